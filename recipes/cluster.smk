# Runs the cells of a results table that nobody has run as jobs of a cluster, or several at once here: docs/wmt14.md.
#
#   snakemake -s recipes/cluster.smk --executor slurm --jobs 20 --config cells="table2 --pair en-de -- --gpus 8"
#   snakemake -s recipes/cluster.smk --cores 2 --config cells="multi30k_cpu --seed 1"
#
# `cells` is what reproduce.sh would be called with. Data are jobs of their own, and so are the runs that a cell begins
# with. More to give with --config: minutes (the most that a job may take, 1440), cpus (of a training, 4 for each GPU)
# and data_cpus (8).
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(workflow.basedir).parent))
from recipes import reproduce
from recipes.command import ROOT, UserError
from recipes.hyperparameters import RECIPES, number_of

try:
    CALL = reproduce.read_call(shlex.split(str(config.get("cells", ""))))
    for flag in ("rerun", "prepare", "list", "record", "time"):
        if getattr(CALL.args, flag):
            raise UserError(f"--{flag}: only cells that have not run become jobs; leave it out")
except UserError as error:
    raise WorkflowError(f"--config cells=...: {error}")

OUT = CALL.args.out = CALL.args.out.resolve()
JOBS = {}  # {name: what it needs, makes and calls}


def add(name, made, needs, command, cpus, gpus=0):
    """Adds a job, and returns what later jobs wait for: its file, or nothing where that is there.

    A file that is there, and newer than what was made of it, would start those jobs again.
    """
    command = f"{shlex.quote(str(ROOT))}/{command}"
    JOBS[name] = dict(made=str(made), needs=needs, command=command, cpus=cpus, gpus=gpus)
    return [] if made.exists() else [str(made)]


def add_data(cell):
    first = cell.init()
    needs = add_data(first) if first else []
    data, command = cell.data(OUT), CALL._replace(options=[], flags=[]).command(cell, "--prepare")
    return add(f"data-{data.name}", data / "bin" / "done", needs, command, int(config.get("data_cpus", 8)))


def add_training(cell, call, name, made, flag=""):
    first, recipe = cell.init(), RECIPES[cell.dataset.recipe]
    needs = add_data(cell)
    if first:
        run = first.run(OUT)
        needs += add_training(first, call.first(), run.name, run / "scores.json", "--rerun")
    cpus = int(config.get("cpus", 4 * gpus(cell) or recipe.threads or 1))
    if number_of("--gpus", call.options) is None:  # a training takes all GPUs that it sees
        call = call._replace(options=[*call.options, "--gpus", str(gpus(cell))])
    return add(name, made, needs, call.command(cell, flag), cpus, gpus(cell))


def gpus(cell):
    """What a training is given: as --gpus says, else the recipe, else 1."""
    asked, usual = number_of("--gpus", CALL.options), RECIPES[cell.dataset.recipe].gpus
    return asked if asked is not None else 1 if usual is None else usual


CELLS = []  # the records that are wanted
for cell in CALL.cells():
    device = "gpu" if gpus(cell) else "cpu"
    record = CALL.run(cell) / "result.json" if CALL.changed else cell.result(device)
    wanted = add_training(cell, CALL, f"{CALL.table.name}-{cell.name}-{device}", record)
    CELLS += [] if CALL.is_done(cell) else wanted


rule all:
    input:
        CELLS,


rule data:  # for a call of its own
    input:
        [job["made"] for name, job in JOBS.items() if name.startswith("data-") and not Path(job["made"]).exists()],


for name, job in JOBS.items():

    rule:
        name:
            name
        input:
            job["needs"],
        output:
            job["made"],
        log:
            f"{OUT}/runs/logs/{name}.log",
        params:
            command=job["command"],
        threads: job["cpus"]
        resources:
            runtime=int(config.get("minutes", 1440)),
            gpu=job["gpus"],
        shell:
            "{params.command} > {log:q} 2>&1"
