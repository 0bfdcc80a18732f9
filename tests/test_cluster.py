"""recipes/cluster.smk: what becomes a job, by which command, and what it waits for."""

import re
import subprocess
import sys

import pytest
from helpers import ROOT

pytest.importorskip("snakemake", reason="pip install -c constraints.txt -e '.[cluster]'")
# {cells: {each of their jobs, by what it makes: the numbers of those that it waits for}}
JOBS = {
    "multi30k_from_news_cpu --seed 1 --variant random": {
        "data/news-en-de/bin/done": [],
        "runs/news_cpu-en-de-random-seed1/evaluation/scores.json": [0],
        "data/multi30k_from_news_cpu-en-de/bin/done": [0],
        "results/multi30k_from_news_cpu/cpu/en-de-random-seed1.json": [2, 1],
    },
    "multi30k_14k --seed 77 --dataset en-fr --variant random": {  # which goes on with the same data
        "data/multi30k_cpu-en-fr/bin/done": [],
        "runs/multi30k_cpu-en-fr-random-seed77/evaluation/scores.json": [0],
        "results/multi30k_14k/cpu/en-fr-random-seed77.json": [0, 1],
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
    said, made = run(tmp_path, cells), [*JOBS[cells]]
    jobs = re.findall(r"rule .*:\n(?:    input: (.*)\n)?    output: (.*)\n(?:    .*\n)*Shell.*--gpus 0(.*)\) >", said)
    wanted = [(", ".join(made[i] for i in of), name, OPTIONS[name.split("/")[0]]) for name, of in JOBS[cells].items()]
    assert sorted(jobs) == sorted(wanted), said
    (tmp_path / made[0]).parent.mkdir(parents=True)
    (tmp_path / made[0]).touch()
    assert f"output: {made[0]}" not in run(tmp_path, cells)


def test_a_slip_is_told(tmp_path):
    assert "tabel2" in run(tmp_path, "tabel2 --seed 1") and "not a call of reproduce.sh" in run(tmp_path, "tabel2")
