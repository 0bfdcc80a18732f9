"""Every benchmark runs as its help says, prints its table and writes its file; a missing GPU is one line."""

import json
import subprocess
import sys

import pytest
import torch
from helpers import ROOT

import fairseq_synth.nested

COMMANDS = {
    "block": ["block.py", "--shapes", "4x8", "--variants", "random", "dynamicconv"],
    "causal block": ["block.py", "--shapes", "4x8", "--causal", "--variants", "factorized_dense+vanilla"],
    "step": ["step.py", "--shapes", "2x4", "--words", "100", "--variants", "random", "lightconv"],
    "generate": ["generate.py", "--sentences", "1", "--tokens", "3", "--words", "100", "--variants", "random+vanilla"],
    "memory": ["memory.py", "--shapes", "4x64", "--causal", "--variants", "dense"],
}


def run(*command):
    command = [sys.executable, str(ROOT / "benchmarks" / command[0]), *command[1:]]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_benchmark(name, tmp_path):
    out = tmp_path / "new" / "figures.json"
    done = run(*COMMANDS[name], "--rounds", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    for variant in COMMANDS[name][COMMANDS[name].index("--variants") + 1 :]:
        assert all(value > 0 for value in record["figures"][variant].values()), record
        assert f"| {variant} |" in done.stdout
    assert "--out" not in record["command"] and torch.__version__.startswith(record["versions"]["torch"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu():
    done = run("block.py", "--device", "cuda")
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(
        "error: --device cuda: this machine has no GPU"
    )


def test_kernels(monkeypatch):
    """random launches at most 1.25 times, mixtures with vanilla 1.6 times stock's number; no more in half precision."""
    monkeypatch.setattr(fairseq_synth.nested, "CORE", 256)  # one block, as models have it
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import launches

    for padded in (True, False):
        stock = len(launches.count("stock", padded))
        for name, most in (("random", 1.25), ("random+vanilla", 1.6), ("factorized_random+vanilla", 1.6)):
            found, half = (len(launches.count(name, padded, dtype=t)) for t in (torch.float32, torch.bfloat16))
            assert half == found <= most * stock
