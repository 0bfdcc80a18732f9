"""All that is to be measured on a GPU, in parts of at most nine minutes.

    python benchmarks/gpu.py                      # every part that has no result yet
    python benchmarks/gpu.py --parts block step   # these
    python benchmarks/gpu.py --list

Each part is a process of its own with a limit of nine minutes. Its result is a file in --out, written when the part has
succeeded; a part that has a result of the same command is not run again. So if a call stops, or is stopped, repeat it.
A part that fails leaves its output in --out, and the others go on. Parts with the Triton kernels of docs/gpu-kernels.md
run in addition to the same parts without.

With --dry everything runs on the CPU in sizes of a few words, which shows that the commands work and measures nothing.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from block import HEADS, WIDTH, build_block, make_step
from common import ROOT, STOCK, kernels

from fairseq_synth.architectures import VARIANTS
from fairseq_synth.masks import causal_mask

MINUTES = 9  # the time limit of a part
SIMPLE = ["random", "relative_random", "fixed_random", "factorized_random", "dense"]
MIXED = [name for name in VARIANTS if name not in SIMPLE and name != "vanilla"]
RESULT = "OUT"  # stands for the result's file in a command
LARGEST_ERROR = 0.05  # of half precision, relative to fp64: `check_correctness` fails from here on


# ---- the parts and their commands


class Sizes(NamedTuple):
    """Shapes (sentences x tokens), rounds and other flags of the benchmarks."""

    short: list[str]  # of blocks and steps
    square: str  # the largest padded block
    causal: str  # of a causal block
    large_step: str
    memory: str
    rounds: str
    block_rounds: str  # more, as a round of a block takes milliseconds, which vary
    generate: list[str]  # flags of a beam search


REAL = Sizes(
    short=["128x32", "32x128"],
    square="256x256",
    causal="4x1024",
    large_step="128x256",
    memory="256x256",
    rounds="10",
    block_rounds="50",
    generate=[],
)
DRY = Sizes(
    short=["2x6"],
    square="1x9",
    causal="1x9",
    large_step="2x9",
    memory="8x64",  # less cannot be measured
    rounds="1",
    block_rounds="1",
    generate=["--tokens", "3", "--sentences", "2", "--words", "50"],
)


def list_commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Returns {part: the arguments of python}, without the parts that repeat others with the kernels."""
    commands = {**list_test_commands(args), **list_check_commands(args)}
    # in two groups, so that each part ends within its time limit
    for group, variants in (("simple", SIMPLE), ("mixed", MIXED)):
        variants_timed = variants[:1] if args.dry else variants
        for benchmark, command in list_benchmark_commands(variants_timed, args).items():
            commands[f"{benchmark}-{group}"] = command
    return commands


def list_test_commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the commands of the tests that need a GPU."""
    pytest = ["-m", "pytest", "-q", "--device", args.device, "-p", "no:cacheprovider"]
    tests = [*pytest, "tests/test_computations.py", "tests/test_attention.py"]
    tests_of_kernels = [*pytest, "tests/kernels"]
    if args.dry:
        tests.append("-k=test_rows_of_padding_are_finite")
        tests_of_kernels.append("-k=test_off_by_default")
    else:
        workers = min(16, os.cpu_count() or 1)  # most of the time is the compiler's
        tests_of_kernels += ["-n", str(workers)]
    return {"tests": tests, "tests-kernels": tests_of_kernels}


def list_check_commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the commands of the parts that this script computes itself."""
    dry = ["--dry"] if args.dry else []
    return {
        "correct": ["benchmarks/gpu.py", "--correctness", RESULT, *dry],
        "backend": ["benchmarks/gpu.py", "--backend", RESULT, *dry],
    }


def list_benchmark_commands(variants: list[str], args: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the commands of the benchmarks of some variants."""
    sizes = DRY if args.dry else REAL
    common = ["--variants", *variants, "--device", args.device, "--dtype", args.dtype, "--out", RESULT]
    block = ["benchmarks/block.py", *common, "--rounds", sizes.block_rounds]
    step = ["benchmarks/step.py", *common, "--rounds", sizes.rounds]
    memory = ["benchmarks/memory.py", *common, "--rounds", "1"]  # torch's allocator does not vary
    generate = ["benchmarks/generate.py", *common, "--rounds", sizes.rounds]
    small_vocabulary = ["--words", "50"] if args.dry else []
    if args.data:
        step_data = ["--data", args.data, "--max-tokens", "4096", "--batches", "4"]
    else:
        step_data = ["--shapes", *sizes.short]
    return {
        "block": [*block, "--shapes", *sizes.short, sizes.square],
        "causal": [*block, "--shapes", sizes.causal, "--causal"],
        "step": [*step, *step_data, *small_vocabulary],
        "step-large": [*step, "--shapes", sizes.large_step, *small_vocabulary],
        "memory": [*memory, "--shapes", sizes.memory],
        "generate": [*generate, *sizes.generate],
    }


def list_parts(args: argparse.Namespace) -> list[str]:
    """Returns the names of all parts. Speed and memory are measured again with the kernels, which decoding lacks."""
    names = list(list_commands(args))
    measured = [name for name in names if name.startswith(("block", "causal", "step", "memory"))]
    return names + [f"{name}+kernels" for name in measured]


# ---- running a part


def run_part(part: str, args: argparse.Namespace) -> bool:
    """Runs a part unless it has a result of the same command; returns whether it has a result now."""
    result = args.out / f"{part}.json"
    command_file = args.out / f"{part}.command"
    name, _, suffix = part.partition("+")  # "step-simple+kernels" is "step-simple" with the Triton kernels
    arguments = list_commands(args)[name]
    if result.exists() and command_file.exists() and command_file.read_text() == " ".join(arguments):
        print(f"{part}: has a result in {result}")
        return True
    result.unlink(missing_ok=True)  # of another command
    command_file.write_text(" ".join(arguments))
    unfinished = args.out / f"{part}.new"
    unfinished.unlink(missing_ok=True)
    arguments_with_file = [str(unfinished) if word == RESULT else word for word in arguments]
    command = [sys.executable, *arguments_with_file]
    with_kernels = suffix == "kernels" or name == "correct"
    log = args.out / f"{part}.log"
    print(f"{part}: {' '.join(command)}", flush=True)
    problem = run_command(command, with_kernels, args.dry, log)
    if problem:
        print(f"{part}: {problem}; its output is in {log}")
        return False
    if not unfinished.exists():  # tests write no result
        last_line = log.read_text().splitlines()[-1:]
        unfinished.write_text(json.dumps({"command": command[1:], "summary": last_line}, indent=2))
    unfinished.rename(result)
    return True


def run_command(command: list[str], with_kernels: bool, dry: bool, log: Path) -> str:
    """Runs a command with its output in a file, and returns what went wrong; empty if it has succeeded."""
    environment = {**os.environ, kernels.VARIABLE: "1" if with_kernels else "0"}
    if dry:
        environment["TRITON_INTERPRET"] = "1"
    with log.open("w") as file:
        try:
            completed = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=60 * MINUTES
            )
        except subprocess.TimeoutExpired:
            return f"not done in {MINUTES} minutes"
    return f"exit code {completed.returncode}" if completed.returncode else ""


# ---- the parts that this script computes


def check_correctness(out: Path, dry: bool) -> None:
    """Compares every variant in half precision by the kernels with fp64, and two runs with each other.

    Writes the rows of `check_variant` to a file, and ends with an error if one is not as it should be.
    """
    shapes = [(3, 7, False)] if dry else [(64, 32, False), (32, 128, False), (4, 1024, True)]
    variants = [name for name in VARIANTS if name != "vanilla"]
    if dry:
        variants = variants[:2]
    rows = {}
    for name in variants:
        for sentences, length, is_causal in shapes:
            rows[f"{name} {sentences}x{length}"] = check_variant(name, sentences, length, is_causal, dry)
    out.write_text(json.dumps(rows, indent=2) + "\n")
    wrong = []
    for name, row in rows.items():
        if not row["kernels"] or not row["equal bits"] or row["error"] >= LARGEST_ERROR:
            wrong.append(name)
    if wrong:
        sys.exit(
            f"error: without kernels, with unequal bits or with an error of {LARGEST_ERROR}: {', '.join(wrong)}; "
            f"see {out}"
        )


def check_variant(name: str, sentences: int, length: int, causal: bool, dry: bool) -> dict[str, Any]:
    """Runs one block twice by the kernels and once in fp64.

    Returns:
        how often each run called the kernels, whether both have equal bits, and the largest error of outputs and
        gradients, relative to the largest value of each if that is above 1.
    """
    batch = make_check_batch(sentences, length, causal, dry)
    width, heads = (32, 2) if dry else (WIDTH, HEADS)
    with mock.patch.multiple("block", WIDTH=width, HEADS=heads):
        module = build_block(name, length, causal).to(batch.x.device, batch.x.dtype).train()
    run_block(module, batch)  # the first call also compares the kernels with the definition, by launches of its own
    with mock.patch.object(kernels, "run", wraps=kernels.run) as kernels_run:
        first = run_block(module, batch)
        second = run_block(module, batch)
    calls_per_run = kernels_run.call_count // 2
    module.double()  # which the kernels do not support
    exact = run_block(module, batch)
    errors = []
    for value, exact_value in zip(first, exact):
        largest = exact_value.abs().max().clamp(min=1)
        errors.append(float((value - exact_value).abs().max() / largest))
    has_equal_bits = all(torch.equal(one, other) for one, other in zip(first, second))
    return {"kernels": calls_per_run, "equal bits": has_equal_bits, "error": max(errors)}


class CheckBatch(NamedTuple):
    """A batch for `check_variant`: what a block is given, and the gradient of its output."""

    x: torch.Tensor  # (T, B, width)
    output_gradient: torch.Tensor  # (T, B, width)
    key_padding_mask: torch.Tensor | None  # (B, T); None: a causal block, which has no padding
    is_no_padding: torch.Tensor  # (T, B, 1): 1 where there is a token, 0 where there is padding


def make_check_batch(sentences: int, length: int, causal: bool, dry: bool) -> CheckBatch:
    """Returns a random batch in half precision. Without `causal` the lengths of its sentences rise from 0."""
    device, dtype = ("cpu", torch.float16) if dry else ("cuda", torch.bfloat16)
    width = 32 if dry else WIDTH
    torch.manual_seed(0)
    x, output_gradient = torch.randn(2, length, sentences, width, device=device).to(dtype)
    if causal:
        return CheckBatch(x, output_gradient, key_padding_mask=None, is_no_padding=torch.ones_like(x[..., :1]))
    lengths = torch.arange(sentences, device=device) * length // sentences  # one sentence is empty
    key_padding_mask = torch.arange(length, device=device)[None] >= lengths[:, None]
    is_no_padding = (~key_padding_mask).t().unsqueeze(-1).to(dtype)
    return CheckBatch(x, output_gradient, key_padding_mask, is_no_padding)


def run_block(module: torch.nn.Module, batch: CheckBatch) -> list[Any]:
    """Runs a block forward and backward, in the dtype of its parameters.

    Returns its output, which is 0 at padding, the gradient of its input, and those of all parameters.
    """
    dtype = next(module.parameters()).dtype
    x = batch.x.detach().clone().to(dtype).requires_grad_()
    is_causal = batch.key_padding_mask is None
    attention_mask = causal_mask(x) if is_causal else None
    output, _ = module(x, key_padding_mask=batch.key_padding_mask, attn_mask=attention_mask)
    output = output * batch.is_no_padding.to(dtype)
    module.zero_grad()
    output.backward(batch.output_gradient.to(dtype))
    parameter_gradients = [parameter.grad for parameter in module.parameters()]
    return [output.detach(), x.grad, *parameter_gradients]


def list_backend(out: Path, dry: bool) -> None:
    """Writes the kernels that stock fairseq's block calls on this device: they show the backend of its attention."""
    args = argparse.Namespace(device="cpu" if dry else "cuda", dtype="fp32" if dry else "bf16")
    activity = torch.profiler.ProfilerActivity.CPU if dry else torch.profiler.ProfilerActivity.CUDA
    rows: dict[str, list[str]] = {}
    for shape in ["3x7"] if dry else ["128x32", "32x128", "256x256"]:
        step = make_step(build_block(STOCK, 1, causal=False), shape, causal=False, args=args)
        step()
        with torch.profiler.profile(activities=[activity]) as profile:
            step()
        rows[shape] = [event.key for event in profile.key_averages()]
    out.write_text(json.dumps(rows, indent=2) + "\n")


# ---- the command


def parse_flags() -> argparse.Namespace:
    """Returns the flags of the command line, with the device. Ends with a one-line error if there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", help="the parts to run, or what they begin with (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the results")
    parser.add_argument(
        "--data", type=os.path.abspath, help="a corpus as fairseq-preprocess writes it, for the training step"
    )
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16"])
    parser.add_argument("--dry", action="store_true", help="on the CPU, in sizes of a few words: measures nothing")
    parser.add_argument("--correctness", type=Path, help="internal: one part")
    parser.add_argument("--backend", type=Path, help="internal: one part")
    args = parser.parse_args()
    args.device = "cpu" if args.dry else "cuda"
    if args.dry:
        args.dtype = "fp32"
    elif not torch.cuda.is_available() and not args.list:
        sys.exit("error: this machine has no GPU that torch can use; --dry shows the parts on a CPU")
    return args


def choose_parts(args: argparse.Namespace) -> list[str]:
    """Returns the parts of ``--parts``, or all. Ends with a one-line error if a word begins no part's name."""
    parts = list_parts(args)
    if not args.parts:
        return parts
    unknown = [word for word in args.parts if not any(part.startswith(word) for part in parts)]
    if unknown:
        sys.exit(f"error: --parts {' '.join(unknown)}: choose from {', '.join(parts)}")
    return [part for part in parts if part.startswith(tuple(args.parts))]


def main() -> None:
    """Runs the parts."""
    args = parse_flags()
    if args.correctness:
        check_correctness(args.correctness, args.dry)
        return
    if args.backend:
        list_backend(args.backend, args.dry)
        return
    parts = choose_parts(args)
    if args.list:
        print("\n".join(parts))
        return
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = [part for part in parts if not run_part(part, args)]
    if failed:
        sys.exit(f"error: no result of {', '.join(failed)}; a second call runs them again")


if __name__ == "__main__":
    main()
