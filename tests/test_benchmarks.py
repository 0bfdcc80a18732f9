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
    "block": "block.py --shapes 4x8 --variants random dynamicconv",
    "causal block": "block.py --shapes 4x8 --causal --variants factorized_dense+vanilla",
    "step": "step.py --shapes 2x4 --words 100 --variants random lightconv",
    "host": "launches.py --host --variants random+vanilla",
    "long sources": "step.py --shapes 2x4 --target-tokens 2 --words 100 --variants random",
    "generate": "generate.py --sentences 1 --tokens 3 --words 100 --variants random+vanilla",
    "memory": "memory.py --shapes 8x256 --causal --variants dense",
}


@pytest.fixture(autouse=True)
def import_benchmarks(monkeypatch):
    """Makes the modules of benchmarks/ importable, as they are for their scripts."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def run(monkeypatch):
    """Returns a function that runs a benchmark's command line in this process."""

    def run_script(name, *arguments):
        """Runs the benchmark in the file `name` of benchmarks/ with these arguments."""
        script = str(ROOT / "benchmarks" / name)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(script, run_name="__main__")

    return run_script


@pytest.fixture
def narrow_models(monkeypatch):
    """Makes the base model narrow, because a model of its usual size would only cost time."""
    import common

    sizes = {"encoder_embed_dim": 64, "encoder_ffn_embed_dim": 64, "decoder_embed_dim": 64, "decoder_ffn_embed_dim": 64}
    monkeypatch.setattr(common, "build_base_model", functools.partial(common.build_base_model, **sizes))


@pytest.fixture
def warm_processes(monkeypatch):
    """Starts the processes in which memory is measured from one that has imported torch already."""
    original_run = subprocess.run

    def run_measurements_warm(command, **options):
        """Replaces subprocess.run: a measurement begins with torch imported; any other command runs as usual."""
        is_measurement = "--one" in command and "-S" not in command
        if is_measurement:
            return warm.run(command[1:])
        return original_run(command, **options)

    monkeypatch.setattr(subprocess, "run", run_measurements_warm)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_prints_its_table_and_writes_its_file(name, tmp_path, run, capsys, narrow_models, warm_processes):
    out = tmp_path / "new" / "figures.json"
    script, *arguments = COMMANDS[name].split()
    run(script, *arguments, "--rounds", "1", "--out", str(out))
    table = capsys.readouterr().out
    record = json.loads(out.read_text())
    variants = arguments[arguments.index("--variants") + 1 :]
    for variant in variants:
        assert all(value > 0 for value in record["figures"][variant].values()), record
        assert f"|{variant}|" in table
    assert record["command"] == f"python benchmarks/{COMMANDS[name]} --rounds 1"
    assert torch.__version__.startswith(record["versions"]["torch"])


def test_speeds_are_medians_of_the_rounds_after_the_warm_up():
    from rounds import Comparison, compare_in_turns

    seconds_of_stock = iter([9, 4, 6, 10])  # the first round is the warm-up
    seconds_of_random = iter([1, 2, 2, 10])
    functions = {
        "stock": lambda: next(seconds_of_stock),
        "random": lambda: next(seconds_of_random),
    }

    def read_stopwatch(function):
        """Returns the seconds of a call, which the functions of this test return themselves."""
        return function()

    comparisons = compare_in_turns(functions, "stock", read_stopwatch, rounds=3, warm_up=1)
    # The ratios of the three rounds are 2, 3 and 1, and the seconds are 2, 2 and 10.
    assert comparisons["random"] == Comparison(ratio=2, lowest=1, highest=3, seconds=2)
    assert comparisons["stock"] == Comparison(ratio=1, lowest=1, highest=1, seconds=6)


def test_each_round_begins_with_another_function():
    from rounds import time_in_turns

    calls = []
    functions = {name: functools.partial(calls.append, name) for name in "abc"}

    def call_in_no_time(function):
        """Calls a function, and returns 0 seconds as its time."""
        function()
        return 0.0

    time_in_turns(functions, call_in_no_time, rounds=3, warm_up=0)
    assert "".join(calls) == "abcbcacab"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_one_line(run):
    with pytest.raises(SystemExit, match="^error: --device cuda: this machine has no GPU"):
        run("block.py", "--device", "cuda")


@pytest.mark.parametrize("words", ["nope", "multi30k_cpu --dataset nope"])
def test_timing_refuses_unknown_tables_and_columns(words, run):
    with pytest.raises(SystemExit, match="^error: [^\\n]*nope[^\\n]*choose from [^\\n]*$"):
        run("timing.py", *words.split())


def test_memory_refuses_a_shape_for_which_the_first_buffers_are_enough(monkeypatch, run):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="0\n"))
    with pytest.raises(SystemExit, match="^error: --shapes 1x9: stock needs no memory that can be measured; take a"):
        run("memory.py", "--shapes", "1x9", "--rounds", "1")


def test_generate_refuses_ambiguous_names_and_flags_that_have_no_effect(run, tmp_path):
    first = str(tmp_path / "a" / "best.pt")
    second = str(tmp_path / "b" / "stock.pt")
    arguments = ["--checkpoints", first, second, "--data", str(tmp_path)]
    with pytest.raises(SystemExit, match="--checkpoints: only the first checkpoint, the baseline, is called stock"):
        run("generate.py", *arguments)
    with pytest.raises(SystemExit, match="^error: --variants --tokens: --checkpoints translates a test set"):
        run("generate.py", *arguments, "--variants", "random", "--tokens", "3")


def test_a_part_of_another_command_runs_again(monkeypatch, tmp_path):
    """A result of a dry run, or of another dtype, is not taken for the one that is asked for."""
    import gpu

    def write_result(command, **_):
        """Replaces subprocess.run: writes the command itself as its result, and succeeds."""
        out = Path(command[command.index("--out") + 1])
        out.write_text(" ".join(command))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", write_result)
    defaults = dict(device="cuda", dtype="bf16", dry=False, data=None, out=tmp_path)
    results = []
    for changes in ({"dry": True}, {}, {}, {"dtype": "fp16"}, {"data": "/bin"}):
        args = SimpleNamespace(**{**defaults, **changes})
        assert gpu.run_part("step-simple", args)
        results.append((tmp_path / "step-simple.json").read_text())
    assert results[1] == results[2]
    assert len(set(results)) == 4
    assert "--dtype fp16" in results[3]
    assert "--data /bin" in results[4]


def test_memory_on_a_gpu_has_one_round():
    import gpu

    args = SimpleNamespace(device="cuda", dtype="bf16", dry=False, data=None)
    command = gpu.list_commands(args)["memory-mixed"]
    assert command[command.index("--rounds") + 1] == "1"


# ---- launches


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "name, highest_ratio", [("random", 1.25), ("random+vanilla", 1.6), ("factorized_random+vanilla", 1.6)]
)
def test_a_block_launches_at_most_so_many_times_stocks_kernels(name, highest_ratio, causal):
    """In half precision a block launches as many kernels as in single precision."""
    import launches

    launches_of_variant = launches.list_launches(name, causal)
    launches_of_stock = launches.list_launches("stock", causal)
    launches_in_half_precision = launches.list_launches(name, causal, dtype=torch.bfloat16)
    assert len(launches_of_variant) <= highest_ratio * len(launches_of_stock)
    assert len(launches_of_variant) == len(launches_in_half_precision)


@pytest.mark.parametrize("name", ["dense", "random+vanilla", "relative_random+vanilla", "stock"])
def test_the_host_takes_the_branch_of_a_gpu(name, monkeypatch):
    """Without the Triton kernels the block's attention is torch's fused one, once in each pass, even for mixtures."""
    import launches

    calls = []
    fake_gpu = launches.fake_gpu

    def fake_gpu_with_a_list(with_kernels, on_launch, on_fused_attention):
        """Replaces launches.fake_gpu: records the calls of the fused attention in the list `calls`."""
        return fake_gpu(with_kernels, on_launch, on_fused_attention=calls.append)

    monkeypatch.setattr(launches, "fake_gpu", fake_gpu_with_a_list)
    step = launches.make_host_step(name, with_kernels=False, repeats=2)
    step()
    assert calls == ["fused_attention", "fused_attention_backward"] * 2


def read_launch_table():
    """Returns the version of torch and the rows of the table of launches in docs/performance.md.

    Each row is a tuple of strings: the variant, and the launches of a padded block, a causal block and a step of
    decoding.
    """
    page = (ROOT / "docs" / "performance.md").read_text()
    section = page[page.index("### Kernels that are launched") :]
    rows = re.findall(r"^\|`?([\w+]+)`?\|(\d+)\|(\d+)\|(\d+)\|\d*\|$", section, re.MULTILINE)
    version = re.search(r"torch ([\d.]+)", section)[1].rstrip(".")
    assert len(rows) > 10
    return version, rows


# For each variant: the highest ratio of the kernels that a step of its beam search launches to those of stock's.
HIGHEST_RATIOS_OF_DECODING = {
    "random": 0.85,
    "fixed_random": 0.85,
    "factorized_random": 0.9,
    "relative_random": 0.9,
    "dense": 0.95,
    "factorized_dense": 0.95,
    "vanilla": 1.0,
    "random+vanilla": 1.0,
    "dense+vanilla": 1.1,
}


def test_a_step_of_decoding_launches_at_most_so_many_times_stocks_kernels():
    """The numbers are those that docs/performance.md lists, if they were counted with this version of torch.

    A variant that is not listed there is not counted here.
    """
    import launches

    version, rows = read_launch_table()
    stock = launches.count_launches_of_decoding("stock")
    for name, _padded, _causal, listed_number in rows:
        number = launches.count_launches_of_decoding(name)
        highest_ratio = HIGHEST_RATIOS_OF_DECODING.get(name, 1.05)
        assert number <= highest_ratio * stock, name
        if torch.__version__.startswith(version):
            assert number == int(listed_number), name


def test_launches_of_a_block_are_as_listed():
    import launches

    version, rows = read_launch_table()
    if not torch.__version__.startswith(version):
        pytest.skip(f"counted with torch {version}; this is {torch.__version__}")
    for name, listed_number_padded, listed_number_causal, _decoding in rows:
        padded_launches = launches.list_launches(name, causal=False)
        causal_launches = launches.list_launches(name, causal=True)
        assert len(padded_launches) == int(listed_number_padded), name
        assert len(causal_launches) == int(listed_number_causal), name
