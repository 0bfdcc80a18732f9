# Runs the cells of a results table that nobody has run as jobs of a cluster, or several at once here: docs/wmt14.md.
#
#   snakemake -s recipes/cluster.smk --executor slurm --jobs 20 --config cells="table2 --pair en-de -- --gpus 8"
#   snakemake -s recipes/cluster.smk --cores 2 --config cells="multi30k_cpu --seed 1"
#
# `cells` is what reproduce.sh would be called with. Data are jobs of their own, and so are the runs that a cell begins
# with. More to give with --config: minutes (the most that a job may take, 1440), cpus (of a training, 4 for each GPU)
# and data_cpus (8).
import argparse
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

OUT = CALL.args.out.resolve()
MINUTES = int(config.get("minutes", 1440))
CELLS = {cell.name: cell for cell in CALL.cells()}
FIRST, DATA = {}, {}  # {folder: cell}: the runs that others begin with, and the data
for cell in CELLS.values():
    DATA[cell.data(OUT).name] = cell
    while cell := cell.init():
        FIRST[cell.run(OUT).name] = DATA[cell.data(OUT).name] = cell


def gpus(cell):
    """What a training is given: as --gpus says, else the recipe, else 1."""
    asked, usual = number_of("--gpus", CALL.options), RECIPES[cell.dataset.recipe].gpus
    return asked if asked is not None else 1 if usual is None else usual


def cpus(cell):
    return int(config.get("cpus", 4 * gpus(cell) or RECIPES[cell.dataset.recipe].threads or 1))


def result(cell):
    """Where its figures are kept: a path like RESULT."""
    if CALL.changed:
        return reproduce.changed_run(cell, OUT) / "result.json"
    return cell.result("gpu" if gpus(cell) else "cpu")


RESULT, LOG = f"{ROOT}/results/{CALL.table.name}/{{device}}/{{cell}}.json", f"{CALL.table.name}-{{cell}}-{{device}}.log"
if CALL.changed:
    RESULT, LOG = f"{OUT}/runs/{CALL.table.name}-{{cell}}-changed/result.json", f"{CALL.table.name}-{{cell}}.log"


def ready(cell):
    """The file that marks its data as prepared."""
    return cell.data(OUT) / "bin" / "done"


def missing(*files):
    """The files that are not there. The others are no inputs, so that a newer date of theirs starts no job again."""
    return [str(file) for file in files if not file.exists()]


def before(cell):
    """What a training waits for."""
    first = cell.init()
    return missing(ready(cell), *([first.run(OUT) / "scores.json"] if first else []))


def command(cell, what, options):
    """A call of reproduce.sh for one cell."""
    args = argparse.Namespace(**{**vars(CALL.args), "out": OUT, "rerun": True})
    return f"{shlex.quote(str(ROOT))}/{reproduce.listed(cell, args, options).replace(' --rerun', what, 1)}"


rule all:
    input:
        [str(result(cell)) for cell in CELLS.values()
         if not reproduce.is_done(cell, OUT, reproduce.asked_device(CALL.options), bool(CALL.changed))],


rule data:
    input:
        lambda w: missing(*(ready(first) for first in [DATA[w.data].init()] if first)),
    output:
        f"{OUT}/data/{{data}}/bin/done",
    log:
        f"{OUT}/runs/logs/data-{{data}}.log",
    params:
        command=lambda w: command(DATA[w.data], " --prepare", []),
    threads: int(config.get("data_cpus", 8))
    resources:
        runtime=MINUTES,
    shell:
        "{params.command} > {log} 2>&1"


rule first:
    input:
        lambda w: before(FIRST[w.run]),
    output:
        f"{OUT}/runs/{{run}}/scores.json",
    log:
        f"{OUT}/runs/logs/{{run}}.log",
    params:
        command=lambda w: command(FIRST[w.run], " --rerun", reproduce.of_the_machine(CALL.options)),
    threads: lambda w: cpus(FIRST[w.run])
    resources:
        runtime=MINUTES,
        gpu=lambda w: gpus(FIRST[w.run]),
    shell:
        "{params.command} > {log} 2>&1"


rule cell:
    input:
        lambda w: before(CELLS[w.cell]),
    output:
        RESULT,
    log:
        f"{OUT}/runs/logs/{LOG}",
    params:
        command=lambda w: command(CELLS[w.cell], "", CALL.rest),
    threads: lambda w: cpus(CELLS[w.cell])
    resources:
        runtime=MINUTES,
        gpu=lambda w: gpus(CELLS[w.cell]),
    shell:
        "{params.command} > {log} 2>&1"
