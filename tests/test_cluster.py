"""recipes/cluster.smk: what becomes a job, by which command, and what it waits for."""

import re
import subprocess
import sys

import pytest
from helpers import ROOT

pytest.importorskip("snakemake", reason="pip install -c constraints.txt -e '.[cluster]'")
# {cells: each of their jobs, and those that it waits for}
JOBS = {
    "multi30k_from_news_cpu --seed 1 --variant 'random transformer'": {
        "data news_cpu": [],
        "data multi30k_from_news_cpu": ["data news_cpu"],
        **{f"news_cpu {model}": ["data news_cpu"] for model in ("random", "transformer")},
        **{f"multi30k_from_news_cpu {model}": ["data multi30k_from_news_cpu", f"news_cpu {model}"]
           for model in ("random", "transformer")},
    },
    # which goes on with the same data
    "multi30k_14k --seed 77 --dataset en-fr --variant random": {
        "data multi30k_cpu": [],
        "multi30k_cpu random": ["data multi30k_cpu"],
        "multi30k_14k random": ["data multi30k_cpu", "multi30k_cpu random"],
    },
}  # fmt: skip


def run(folder, cells):
    argv = f"-m snakemake -n -p --cores 2 -s {ROOT}/recipes/cluster.smk --directory {folder} --config".split()
    argv = [sys.executable, *argv, f"cells={cells} --gpus 0 --out {folder}"]
    return subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


@pytest.mark.parametrize("cells", JOBS)
def test_jobs(cells, tmp_path):
    """Data, what others begin with, and cells, each once; what there is is left out."""
    said = run(tmp_path, cells)
    pattern = r"rule .*:\n(?:    input: (.*)\n)?    output: (.*)\n(?:    .*\n)*"
    pattern += r"Shell.*reproduce.sh (\S+) .*--variant (\S+) (.*)\)"
    jobs, made = {}, {}
    for after, output, table, model, options in re.findall(pattern, said):
        kind = "prepare" if "--prepare" in options else "rerun" if "--rerun" in options else "cell"
        name = f"data {table}" if kind == "prepare" else f"{table} {model}"
        ends = {"prepare": "/bin/done", "rerun": f"{table}-.*-{model}-.*/scores.json", "cell": f"/{table}/cpu/.*.json"}
        assert re.search(f"{ends[kind]}$", output) and name not in jobs, said
        jobs[name], made[output] = after.split(", ") if after else [], name
    assert {name: sorted(made[file] for file in files) for name, files in jobs.items()} == JOBS[cells], said
    first = next(iter(made))
    (tmp_path / first).parent.mkdir(parents=True)
    (tmp_path / first).touch()
    assert f"output: {first}" not in run(tmp_path, cells)


def test_a_slip_is_told(tmp_path):
    assert "tabel2" in run(tmp_path, "tabel2 --seed 1") and "not a call of reproduce.sh" in run(tmp_path, "tabel2")
