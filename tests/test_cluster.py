"""recipes/cluster.smk: what becomes a job, by which command, and what it waits for."""

import re
import subprocess
import sys

import pytest
from helpers import ROOT

pytest.importorskip("snakemake", reason="pip install -c constraints.txt -e '.[cluster]'")
# {cells: {each of their jobs, by what it makes: what it waits for}}
NEWS, NEWS_RUN = "data/news-en-de/bin/done", "runs/news_cpu-en-de-random-seed1/evaluation/scores.json"
DATA, CAPTIONS_RUN = "data/multi30k_cpu-en-fr/bin/done", "runs/multi30k_cpu-en-fr-random-seed77/evaluation/scores.json"
CAPTIONS = "data/multi30k_from_news_cpu-en-de/bin/done"
JOBS = {
    "multi30k_from_news_cpu --seed 1 --variant random": {
        NEWS: "",
        NEWS_RUN: NEWS,
        CAPTIONS: NEWS,
        "results/multi30k_from_news_cpu/cpu/en-de-random-seed1.json": f"{CAPTIONS}, {NEWS_RUN}",
    },
    # which goes on with the same data
    "multi30k_14k --seed 77 --dataset en-fr --variant random": {
        DATA: "",
        CAPTIONS_RUN: DATA,
        "results/multi30k_14k/cpu/en-fr-random-seed77.json": f"{DATA}, {CAPTIONS_RUN}",
    },
}
OPTIONS = {"data": " --prepare", "runs": " --rerun", "results": ""}


def run(folder, cells):
    argv = f"-m snakemake -n -p --cores 2 -s {ROOT}/recipes/cluster.smk --directory {folder} --config".split()
    argv = [sys.executable, *argv, f"cells={cells} --gpus 0 --out {folder}"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout.replace(f"{folder}/", "").replace(f"{ROOT}/", "")


@pytest.mark.parametrize("cells", JOBS)
def test_jobs(cells, tmp_path):
    """Data, what others begin with, and cells, each once; what there is is left out."""
    said = run(tmp_path, cells)
    jobs = re.findall(r"rule .*:\n(?:    input: (.*)\n)?    output: (.*)\n(?:    .*\n)*Shell.*--gpus 0(.*)\) >", said)
    assert len(jobs) == len(JOBS[cells]) and {made: after for after, made, _ in jobs} == JOBS[cells], said
    assert all(options == OPTIONS[made.split("/")[0]] for _, made, options in jobs), said
    first = tmp_path / next(iter(JOBS[cells]))
    first.parent.mkdir(parents=True)
    first.touch()
    assert f"output: {next(iter(JOBS[cells]))}" not in run(tmp_path, cells)


def test_a_slip_is_told(tmp_path):
    assert "tabel2" in run(tmp_path, "tabel2 --seed 1") and "not a call of reproduce.sh" in run(tmp_path, "tabel2")
