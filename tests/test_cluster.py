"""recipes/cluster.smk: what becomes a job, in which order, each once, two at a time."""

import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

pytest.importorskip("snakemake", reason="pip install -c constraints.txt -e '.[cluster]'")
# Stands in for scripts/reproduce.sh, but for --list: makes the last file of what it is called for, once what that needs
# is there. A training waits until another one has begun.
REPRODUCE = f"""#!{sys.executable}
import os, sys, time
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from recipes import catalog, reproduce
catalog.ROOT = reproduce.ROOT
if "--list" in sys.argv:
    sys.exit(reproduce.main(sys.argv[1:]))
if "--variant" not in sys.argv or sys.argv.count("--seed") > 1:
    sys.exit(0)  # the last call, which records
words = sys.argv[1:]
dataset, model, seed, out = (words[words.index(name) + 1] for name in "--dataset --variant --seed --out".split())
(cell,) = catalog.TABLES[words[0]].cells([dataset], [model], [int(seed)])
out, first = Path(out), cell.first()
with open(out / "calls", "a") as file:
    print(words[0], model, *(word for word in words if word in ("--prepare", "--rerun")), file=file)
data = lambda cell: cell.run(out).data / "bin" / "done"
scores = lambda cell: cell.run(out).folder / "evaluation" / "scores.json"
if "--prepare" in words:
    assert not first or data(first).exists()
    made = data(cell)
else:
    assert data(cell).exists() and (not first or scores(first).exists())
    made = scores(cell) if "--rerun" in words else cell.result("cpu")
    begun, end = out / "begun" / words[0], time.time() + 60
    begun.mkdir(parents=True, exist_ok=True)
    (begun / cell.name).touch()
    while len(list(begun.iterdir())) < 2:
        assert time.time() < end, "nothing else was begun"
        time.sleep(0.1)
made.parent.mkdir(parents=True, exist_ok=True)
made.write_text("{{}}")
"""


@pytest.fixture
def snakemake(tmp_path):
    """Runs the workflow on a copy of the project: (what it printed, the calls of reproduce.sh in their order)."""
    for name in ("recipes", "fairseq_synth"):
        shutil.copytree(ROOT / name, tmp_path / "project" / name, ignore=shutil.ignore_patterns("__pycache__"))
    script = tmp_path / "project" / "scripts" / "reproduce.sh"
    script.parent.mkdir()
    script.write_text(REPRODUCE)
    script.chmod(0o755)

    def snakemake(cells):
        (tmp_path / "calls").write_text("")
        argv = "-m snakemake -s recipes/cluster.smk --cores 2 --config data_cpus=1".split()
        argv = [sys.executable, *argv, f"cells={cells} --out {tmp_path}"]
        where = {"cwd": tmp_path / "project", "env": {**os.environ, "HOME": str(tmp_path)}}
        done = subprocess.run(argv, **where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.stdout, (tmp_path / "calls").read_text().splitlines()

    return snakemake


@pytest.mark.slow
def test_two_at_once(snakemake):
    """Data, what others begin with, cells: each once, two at a time, and what there is is left out."""
    cells = "multi30k_from_news_cpu --seed 1 --variant 'random transformer' --gpus 0"
    said, calls = snakemake(cells)
    assert len(calls) == 6 and calls[0].startswith("news_cpu") and calls[0].endswith("--prepare"), said
    assert {*calls[1:4]} >= {"news_cpu random --rerun", "news_cpu transformer --rerun"}, said
    assert {*calls[4:]} == {"multi30k_from_news_cpu random", "multi30k_from_news_cpu transformer"}, said
    said, calls = snakemake(cells)
    assert not calls, said
    said, calls = snakemake("tabel2 --seed 1")
    assert not calls and "tabel2" in said and "not a call of reproduce.sh" in said, said
