"""recipes/cluster.smk: what becomes a job, in which order, and what it asks of the cluster."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

pytest.importorskip("snakemake", reason="pip install -c constraints.txt -e '.[cluster]'")

# Stands in for scripts/reproduce.sh: makes the last file of what it is called for, once what that needs is there.
# A training waits until another one has begun, where PAIRS is set.
REPRODUCE = f"""#!{sys.executable}
import os, sys, time
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from recipes import hyperparameters, reproduce
call = reproduce.read_call(sys.argv[1:])
out, (cell,) = call.args.out, call.cells()
first = cell.init()
with open(out / "calls", "a") as file:
    print(*sys.argv[1:], file=file)
def done(cell):
    return cell.data(out) / "bin" / "done"
if call.args.prepare:
    assert not first or done(first).exists()
    made = done(cell)
else:
    assert done(cell).exists() and (not first or (first.run(out) / "scores.json").exists())
    gpus = hyperparameters.number_of("--gpus", call.options)
    made = cell.run(out) / "scores.json" if call.args.rerun else cell.result("gpu" if gpus else "cpu")
    begun = out / "begun" / cell.table.name
    begun.mkdir(parents=True, exist_ok=True)
    (begun / cell.name).touch()
    end = time.time() + 60
    while os.environ.get("PAIRS") and len(list(begun.iterdir())) < 2:
        assert time.time() < end, "nothing else was begun"
        time.sleep(0.1)
made.parent.mkdir(parents=True, exist_ok=True)
made.write_text("{{}}")
"""

SLURM = {
    # a job is run at once; its command is the value of --wrap
    "sbatch": """echo "$@" >> "$SLURM_STUBS/submitted"
for word in "$@"; do case $word in --wrap=*) job=${word#--wrap=} ;; esac; done
id=$((1000 + $(wc -l < "$SLURM_STUBS/submitted")))
export SLURM_JOB_ID=$id
( bash -c "$job" > "$SLURM_STUBS/$id.log" 2>&1; echo $? > "$SLURM_STUBS/$id.rc" ) > /dev/null 2>&1 < /dev/null &
echo $id
""",
    "srun": 'while [[ $1 == -* ]]; do shift; done; exec "$@"',
    "sacct": """for file in "$SLURM_STUBS"/*.log; do
    [ -e "$file" ] || continue
    id=$(basename "$file" .log) state=RUNNING
    [ ! -e "$SLURM_STUBS/$id.rc" ] || { state=COMPLETED; [ "$(cat "$SLURM_STUBS/$id.rc")" = 0 ] || state=FAILED; }
    echo "$id|$state"
done
""",
    "squeue": "exit 1",
    "sinfo": "echo 'PARTITION'; echo 'work*'",
    "sacctmgr": "echo me",
    "scancel": "exit 0",
    "scontrol": "echo 'MinJobAge = 300 sec'",
}


@pytest.fixture
def project(tmp_path):
    """The project with a stand-in for reproduce.sh, and a folder for what it makes."""
    for name in ("recipes", "benchmarks", "fairseq_synth"):
        shutil.copytree(ROOT / name, tmp_path / "project" / name, ignore=shutil.ignore_patterns("__pycache__"))
    scripts = tmp_path / "project" / "scripts"
    scripts.mkdir()
    (scripts / "reproduce.sh").write_text(REPRODUCE)
    (scripts / "reproduce.sh").chmod(0o755)
    (tmp_path / "out").mkdir()
    return tmp_path / "project"


def snakemake(project, cells, *argv, **environment):
    """Runs the workflow; (what it printed, the calls of reproduce.sh in their order)."""
    out = project.parent / "out"
    (out / "calls").write_text("")
    config = [f"cells={cells.replace(' --', f' --out {out} --', 1)}", "data_cpus=1", "minutes=90"]
    command = [sys.executable, "-m", "snakemake", "-s", project / "recipes" / "cluster.smk", *argv, "--config", *config]
    done = subprocess.run(
        [*map(str, command)],
        cwd=project,
        env={**os.environ, "HOME": str(project), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    calls = [line.replace(f" --out {out}", "") for line in (out / "calls").read_text().splitlines()]
    return done.stdout, calls


@pytest.mark.slow
def test_two_at_once(project):
    """Data, what others begin with, cells; each once, two at a time; what there is is left out.

    A job is told its number of GPUs, also where the call says none.
    """
    cells = "multi30k_from_news_cpu --seed 1 --variant 'random transformer' -- --gpus 0"
    said, calls = snakemake(project, cells, "--cores", "2", PAIRS="1")
    cell = "--pair en-de --variant {} --seed 1"
    one, other = (cell.format(name) for name in ("random", "transformer"))
    assert len(calls) == 6, said
    assert re.fullmatch(r"news_cpu --pair en-de --variant \w+ --seed 1 --prepare", calls[0])
    assert set(calls[1:]) >= {f"news_cpu {name} --rerun -- --gpus 0" for name in (one, other)}
    assert {f"multi30k_from_news_cpu {name} -- --gpus 0" for name in (one, other)} == set(calls[4:])
    said, calls = snakemake(project, cells, "--cores", "2")
    assert not calls, said
    (project / "results" / "multi30k_from_news_cpu" / "cpu" / "en-de-random-seed1.json").unlink()
    said, calls = snakemake(project, "multi30k_from_news_cpu --seed 1 --variant random", "--cores", "2")
    assert calls == [f"multi30k_from_news_cpu {one} -- --gpus 0"], said


@pytest.mark.slow
def test_data_alone(project):
    """Where there is a network, for compute nodes without one: docs/wmt14.md."""
    cells = "multi30k_from_news_cpu --seed 1 --variant random -- --gpus 0"
    said, calls = snakemake(project, cells, "data", "--cores", "1")
    one = "--pair en-de --variant random --seed 1 --prepare"
    assert calls == [f"news_cpu {one}", f"multi30k_from_news_cpu {one}"], said
    said, calls = snakemake(project, cells, "data", "--cores", "1")
    assert not calls, said


def test_a_call_that_is_wrong(project):
    """One line says what, beside where Snakemake was."""
    for cells, part in (
        ("tabel2 --seed 1", "invalid choice: 'tabel2'"),
        ("table2 --rerun", "--rerun: only cells that have not run become jobs; leave it out"),
    ):
        said, calls = snakemake(project, cells, "--cores", "1")
        assert not calls and len(said.splitlines()) < 9, said
        assert any(line.startswith("--config cells=...: ") and part in line for line in said.splitlines()), said


@pytest.mark.slow
def test_jobs_of_slurm(project):
    """With stand-ins for its commands: a cell asks for its GPUs, data for none, both for their minutes."""
    pytest.importorskip("snakemake_executor_plugin_slurm")
    stubs = project.parent / "slurm"
    stubs.mkdir()
    for name, body in SLURM.items():
        (stubs / name).write_text(f"#!/bin/bash\n{body}")
        (stubs / name).chmod(0o755)
    argv = "--executor slurm --jobs 2 --seconds-between-status-checks 1 --slurm-init-seconds-before-status-checks 1"
    argv += " --default-resources slurm_account=me slurm_partition=work mem_mb=1000 --latency-wait 5"
    environment = {"SLURM_STUBS": str(stubs), "PATH": f"{stubs}:{os.environ['PATH']}"}
    cells = "multi30k_cpu --pair en-de --seed 7 --variant random -- --gpus 2"
    said, calls = snakemake(project, cells, *argv.split(), **environment)
    logs = "".join(log.read_text() for log in stubs.glob("*.log"))
    one = "multi30k_cpu --pair en-de --variant random --seed 7"
    assert calls == [f"{one} --prepare", f"{one} -- --gpus 2"], said + logs
    data, cell = (
        line.split(" --wrap=")[0] for line in re.findall(r"^--parsable.*", (stubs / "submitted").read_text(), re.M)
    )
    assert "-t 90 " in data and "--cpus-per-task=1 " in data and "gpu" not in data
    assert "-t 90 " in cell and "--gpus=2" in cell
