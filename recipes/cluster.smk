# Runs the cells of a results table that have no result yet, as jobs of a cluster or several at once on this machine.
#
#   snakemake -s recipes/cluster.smk --executor slurm --jobs 20 --config cells="table2 --dataset en-de --gpus 8"
#   snakemake -s recipes/cluster.smk --cores 2 --config cells="multi30k_cpu --seed 1"
#
# `cells` are options of reproduce.sh. Preparing a data set is a job, and so is a run that other cells start from.
# More of --config: minutes (the most that a job may take, 1440), cpus (of a training, 4 for each GPU), data_cpus (8).
# See docs/wmt14.md.
import argparse
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(workflow.basedir).parent))
from recipes.catalog import TABLES
from recipes.steps import ROOT


class Job(NamedTuple):
    name: str
    output: Path  # the file that shows that the job is done
    inputs: list  # names of such files of the jobs before it
    command: str
    cpus: int
    gpus: int = 0


JOBS = {}  # {name: job}
REPRODUCE = [f"{ROOT}/scripts/reproduce.sh", *shlex.split(str(config.get("cells", "")))]


def add_job(job):
    """Adds a job, and returns the files that later jobs have to wait for: none if its output exists already."""
    JOBS[job.name] = job
    return [] if job.output.exists() else [str(job.output)]


def add_data_job(run, inputs, command):
    """Adds the job that prepares a run's data."""
    output = run.data / "bin" / "done"
    cpus = int(config.get("data_cpus", 8))
    return add_job(Job(f"data-{run.data.name}", output, inputs, f"{command} --prepare", cpus))


def add_cell(cell, options, is_first_stage=False):
    """Adds the jobs of a cell: its data, its training, and before them those of the cell that it starts from.

    Returns the files to wait for: those of the data, and those of the training.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=ROOT)
    parser.add_argument("--gpus", type=int, default=cell.recipe.gpus)
    chosen, _ = parser.parse_known_args(options)
    gpus = 1 if chosen.gpus is None else chosen.gpus
    run = cell.run(chosen.out)
    first_stage = cell.first_stage()
    if first_stage:
        first_data, first_run = add_cell(first_stage, options, is_first_stage=True)
    else:
        first_data, first_run = [], []
    command = f"{cell.command} {shlex.join([*options, '--gpus', str(gpus)])}"
    if first_stage and first_stage.run(chosen.out).data == run.data:
        data = first_data
    else:
        data = add_data_job(run, first_data, command)
    cpus = int(config.get("cpus", 4 * gpus or cell.recipe.threads or 1))
    if is_first_stage:
        output = run.folder / "evaluation" / "scores.json"
        command += " --rerun"  # it may have a result, but no checkpoint here
    else:
        output = cell.result("gpu" if gpus else "cpu")
    training = add_job(Job(run.folder.name, output, data + first_run, command, cpus, gpus))
    return data, training


def add_listed_cell(line):
    """Adds the jobs of a command of reproduce.sh --list, and returns the file of its result if that is missing."""
    _, table, _, dataset, _, variant, _, seed, *options = shlex.split(line)  # --dataset D --variant M --seed N
    cell = TABLES[table].cells([dataset], [variant], [int(seed)])[0]
    return add_cell(cell, options)[1]


listed = subprocess.run([*REPRODUCE, "--list"], stdout=subprocess.PIPE, text=True)
if listed.returncode or "--rerun" in REPRODUCE:
    raise WorkflowError(f"--config cells={shlex.join(REPRODUCE[1:])!r}: not a call of reproduce.sh, or one with --rerun")
RESULTS = [result for line in listed.stdout.splitlines() for result in add_listed_cell(line)]


rule all:
    input: RESULTS


onsuccess:  # adds to the results how a cell compares with its baseline, which may have been scored after it
    shell(f"{shlex.join(REPRODUCE)} > /dev/null")


for job in JOBS.values():
    rule:
        name: job.name
        input: job.inputs
        output: str(job.output)
        log: f"{ROOT}/runs/logs/{job.name}.log"
        params: command=f"cd {shlex.quote(str(ROOT))} && {job.command}"
        threads: job.cpus
        resources: runtime=int(config.get("minutes", 1440)), gpu=job.gpus
        shell: "({params.command}) > {log:q} 2>&1"
