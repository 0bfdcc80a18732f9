"""Every benchmark runs as its help says, prints its table and writes its file; a missing GPU is one line."""

import functools
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm
from helpers import ROOT

COMMANDS = {
    "block": ["block.py", "--shapes", "4x8", "--variants", "random", "dynamicconv"],
    "causal block": ["block.py", "--shapes", "4x8", "--causal", "--variants", "factorized_dense+vanilla"],
    "step": ["step.py", "--shapes", "2x4", "--words", "100", "--variants", "random", "lightconv"],
    "host": ["launches.py", "--host", "--variants", "random+vanilla"],
    "long sources": ["step.py", "--shapes", "2x4", "--target-tokens", "2", "--words", "100", "--variants", "random"],
    "generate": ["generate.py", "--sentences", "1", "--tokens", "3", "--words", "100", "--variants", "random+vanilla"],
    "memory": ["memory.py", "--shapes", "8x256", "--causal", "--variants", "dense"],
}


@pytest.fixture
def run(monkeypatch):
    """Runs a benchmark's command line, in this process."""

    def run(name, *argv):
        script = str(ROOT / "benchmarks" / name)
        monkeypatch.setattr(sys, "argv", [script, *argv])
        runpy.run_path(script, run_name="__main__")

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_benchmark(name, tmp_path, run, capsys, monkeypatch):
    out = tmp_path / "new" / "figures.json"
    start = subprocess.run

    def warmed(command, **kwargs):  # the process of its own that memory is measured in
        return warm.run(command[1:]) if "--one" in command and "-S" not in command else start(command, **kwargs)

    # the base model, narrow: its time is no subject here
    import common

    narrow = {f"{side}_{part}": 64 for side in ("encoder", "decoder") for part in ("embed_dim", "ffn_embed_dim")}
    monkeypatch.setattr(common, "base_model", functools.partial(common.base_model, **narrow))
    monkeypatch.setattr(subprocess, "run", warmed)
    run(*COMMANDS[name], "--rounds", "1", "--out", str(out))
    table = capsys.readouterr().out
    record = json.loads(out.read_text())
    for variant in COMMANDS[name][COMMANDS[name].index("--variants") + 1 :]:
        assert all(value > 0 for value in record["figures"][variant].values()), record
        assert f"|{variant}|" in table
    assert "--out" not in record["command"] and torch.__version__.startswith(record["versions"]["torch"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu(run):
    with pytest.raises(SystemExit, match="^error: --device cuda: this machine has no GPU"):
        run("block.py", "--device", "cuda")


@pytest.mark.parametrize("words", ["nope", "multi30k_cpu --dataset nope"])
def test_timing_refuses(words, run):
    """A table and columns that there are not, in one line."""
    with pytest.raises(SystemExit, match="^error: [^\\n]*nope[^\\n]*choose from [^\\n]*$"):
        run("timing.py", *words.split())


def test_no_memory_to_measure(monkeypatch, run):
    """A shape for which the buffers of the first call are enough has no ratio."""
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="0\n"))
    with pytest.raises(SystemExit, match="^error: --shapes 1x9: stock needs no memory that can be measured; take a"):
        run("memory.py", "--shapes", "1x9", "--rounds", "1")


def test_kernels(monkeypatch):
    """random launches at most 1.25 times, mixtures with vanilla 1.6 times stock's number; no more in half precision."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import launches

    for padded in (True, False):
        stock = len(launches.count("stock", padded))
        for name, most in (("random", 1.25), ("random+vanilla", 1.6), ("factorized_random+vanilla", 1.6)):
            found, half = (len(launches.count(name, padded, dtype=t)) for t in (torch.float32, torch.bfloat16))
            assert half == found <= most * stock


@pytest.mark.parametrize("name", ["dense", "random+vanilla", "relative_random+vanilla", "stock"])
def test_the_host_takes_the_branch_of_a_gpu(name, monkeypatch):
    """Without the Triton kernels the block's attention is torch's fused one, once in each pass, also for mixtures."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import launches

    calls, on_a_gpu = [], launches.on_a_gpu
    monkeypatch.setattr(launches, "on_a_gpu", lambda kernels, run, noted: on_a_gpu(kernels, run, calls.append))
    launches.host_block(name, False, repeats=2)()
    assert calls == ["fused_attention", "fused_attention_backward"] * 2


def test_generate_refuses(run, tmp_path):
    """Checkpoints of one name, and flags that they would ignore."""
    of = ["--checkpoints", str(tmp_path / "a" / "best.pt"), str(tmp_path / "b" / "stock.pt"), "--data", str(tmp_path)]
    with pytest.raises(SystemExit, match="--checkpoints: one after the first is called stock"):
        run("generate.py", *of)
    with pytest.raises(SystemExit, match="^error: --variants --tokens: not for --checkpoints"):
        run("generate.py", *of, "--variants", "random", "--tokens", "3")


def test_a_part_of_another_command_runs_again(monkeypatch, tmp_path):
    """A result of a dry run, or of another dtype, is not taken for the one that is asked for."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    def fit(command, **_):
        Path(command[command.index("--out") + 1]).write_text(" ".join(command))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", fit)
    asked = dict(device="cuda", dtype="bf16", dry=False, data=None, out=tmp_path)
    results = []
    for changes in ({"dry": True}, {}, {}, {"dtype": "fp16"}, {"data": "/bin"}):
        assert gpu.run_part("step-simple", SimpleNamespace(**{**asked, **changes}))
        results.append((tmp_path / "step-simple.json").read_text())
    assert results[1] == results[2] and len(set(results)) == 4
    assert "--dtype fp16" in results[3] and "--data /bin" in results[4]
    command = gpu.commands(SimpleNamespace(**asked))["memory-mixed"]
    assert command[len(command) - 1 - command[::-1].index("--rounds") + 1] == "1"


def listed_launches():
    """The version of torch and the rows of the table in docs/performance.md."""
    page = (ROOT / "docs" / "performance.md").read_text()
    section = page[page.index("### Kernels that are launched") :]
    rows = re.findall(r"^\|`?([\w+]+)`?\|(\d+)\|(\d+)\|(\d+)\|\d*\|$", section, re.MULTILINE)
    return re.search(r"torch ([\d.]+)", section)[1].rstrip("."), rows


def test_kernels_of_a_step_of_decoding(monkeypatch):
    """No more than these shares of stock's calls; docs/performance.md lists them all."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import launches

    found = {name: launches.count_decoding(name) for name in ("stock", *launches.VARIANTS)}
    bounds = {"random": 0.85, "fixed_random": 0.85, "factorized_random": 0.9, "relative_random": 0.9, "dense": 0.95}
    bounds.update({"factorized_dense": 0.95, "vanilla": 1.0, "random+vanilla": 1.0, "dense+vanilla": 1.1})
    for name in launches.VARIANTS:
        assert found[name] <= bounds.get(name, 1.05) * found["stock"], name
    version, rows = listed_launches()
    if torch.__version__.startswith(version):
        assert {name: decoding for name, _, _, decoding in rows} == {name: str(calls) for name, calls in found.items()}


def test_kernels_in_the_docs(monkeypatch):
    """docs/performance.md lists each variant's number of kernels, padded and causal."""
    version, rows = listed_launches()
    if not torch.__version__.startswith(version):
        pytest.skip(f"counted with torch {version}; this is {torch.__version__}")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import launches

    assert len(rows) == 1 + len(launches.VARIANTS)
    found = [(name, *(str(len(launches.count(name, padded))) for padded in (True, False))) for name, *_ in rows]
    assert found == [row[:3] for row in rows]
