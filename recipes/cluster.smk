# Runs the cells of a results table that nobody has run as jobs of a cluster, or several at once here: docs/wmt14.md.
#
#   snakemake -s recipes/cluster.smk --executor slurm --jobs 20 --config cells="table2 --dataset en-de --gpus 8"
#   snakemake -s recipes/cluster.smk --cores 2 --config cells="multi30k_cpu --seed 1"
# `cells`: options of reproduce.sh. Data, and the runs that a cell begins with, are jobs of their own. More of --config:
# minutes (the most of a job, 1440), cpus (of a training, 4 for each GPU), data_cpus (8).
import argparse, shlex, subprocess, sys
from pathlib import Path
sys.path.insert(0, str(Path(workflow.basedir).parent))
from recipes.catalog import RECIPES, TABLES
from recipes.steps import ROOT

CALL, JOBS = [f"{ROOT}/scripts/reproduce.sh", *shlex.split(str(config.get("cells", "")))], {}
LISTED = subprocess.run([*CALL, "--list"], stdout=subprocess.PIPE, text=True)
if LISTED.returncode or "--rerun" in CALL:
    raise WorkflowError(f"--config cells={shlex.join(CALL[1:])!r}: not a call of reproduce.sh, or one with --rerun")


def add(name, made, after, command, cpus, gpus=0):  # returns what others wait for: a file that is not there yet
    JOBS[name] = (str(made), after, f"cd {shlex.quote(str(ROOT))} && {command}", int(cpus), gpus)
    return [] if made.exists() else [str(made)]


def add_cell(cell, options, is_first=False):
    """Adds the jobs of a cell and of the one that it begins with; returns what others wait for, of its data and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=ROOT)
    parser.add_argument("--gpus", type=int, default=RECIPES[cell.column.recipe].gpus)
    given, _ = parser.parse_known_args(options)
    gpus, run, first = 1 if given.gpus is None else given.gpus, cell.run(given.out), cell.first()
    begin_data, begin = add_cell(first, options, True) if first else ([], [])  # whose words the data have
    command = f"{cell.command} {shlex.join([*options, '--gpus', str(gpus)])}"
    done, cpus = run.data / "bin" / "done", config.get("cpus", 4 * gpus or RECIPES[cell.column.recipe].threads or 1)
    data_job = f"data-{run.data.name}", done, begin_data, f"{command} --prepare", config.get("data_cpus", 8)
    data = begin_data if first and first.run(given.out).data == run.data else add(*data_job)
    made = run.folder / "evaluation" / "scores.json" if is_first else cell.result("gpu" if gpus else "cpu")
    return data, add(run.folder.name, made, data + begin, command + " --rerun" * is_first, cpus, gpus)


# reproduce.sh TABLE --dataset D --variant M --seed N …
CELLS = [(TABLES[w[1]].cells([w[3]], [w[5]], [int(w[7])])[0], w[8:]) for w in map(shlex.split, LISTED.stdout.splitlines())]

rule all:
    input: sum((add_cell(cell, options)[1] for cell, options in CELLS), [])


onsuccess:  # records what a cell is to its baseline, which may have come later
    shell(f"{shlex.join(CALL)} > /dev/null")


for name, (made, after, command, cpus, gpus) in JOBS.items():
    rule:
        name: name
        input: after
        output: made
        log: f"{ROOT}/runs/logs/{name}.log"
        params: command=command
        threads: cpus
        resources: runtime=int(config.get("minutes", 1440)), gpu=gpus
        shell: "({params.command}) > {log:q} 2>&1"
