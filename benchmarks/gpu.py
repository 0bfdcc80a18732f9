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

TIME_LIMIT_IN_MINUTES = 9  # for each part
SIMPLE = ["random", "relative_random", "fixed_random", "factorized_random", "dense"]
MIXED = [name for name in VARIANTS if name not in SIMPLE and name != "vanilla"]
RESULT = "OUT"  # the word of a command in whose place the path of the result's file is put
LARGEST_ERROR = 0.05  # relative error of half precision at which `check_correctness` fails


# ---- the parts and their commands


class Sizes(NamedTuple):
    """The shapes (sentences x tokens), rounds and other flags that the benchmarks are called with."""

    short: list[str]  # the shapes with short sentences, for self-attentions and training steps
    square: str  # the largest shape of a self-attention with padding
    causal: str  # the shape of a causal self-attention
    large_step: str  # the shape of a training step with a large batch
    memory: str
    rounds: str
    block_rounds: str  # more, as a round of a self-attention takes milliseconds, which vary
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
    """Returns {name of a part: the arguments with which python runs it}.

    The parts that `list_parts` repeats with the Triton kernels are not among them, as they have the same commands.
    """
    commands = {**list_test_commands(args), **list_check_commands(args)}
    # The variants are in two groups, so that each part ends within its time limit.
    for group, variants in (("simple", SIMPLE), ("mixed", MIXED)):
        timed_variants = variants[:1] if args.dry else variants
        for benchmark, command in list_benchmark_commands(timed_variants, args).items():
            commands[f"{benchmark}-{group}"] = command
    return commands


def list_test_commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Returns {name of a part: its command} for the tests that need a GPU.

    With --dry, each command runs one short test.
    """
    pytest = ["-m", "pytest", "-q", "--device", args.device, "-p", "no:cacheprovider"]
    tests = [*pytest, "tests/test_computations.py", "tests/test_attention.py"]
    kernel_tests = [*pytest, "tests/kernels"]
    if args.dry:
        tests.append("-k=test_the_output_for_padding_is_finite")
        kernel_tests.append("-k=test_off_by_default")
    else:
        num_processes = min(16, os.cpu_count() or 1)  # most of the time is the compiler's
        kernel_tests += ["-n", str(num_processes)]
    return {"tests": tests, "tests-kernels": kernel_tests}


def list_check_commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Returns {name of a part: its command} for the parts that are functions of this script."""
    dry = ["--dry"] if args.dry else []
    return {
        "correct": ["benchmarks/gpu.py", "--correctness", RESULT, *dry],
        "backend": ["benchmarks/gpu.py", "--backend", RESULT, *dry],
    }


def list_benchmark_commands(variants: list[str], args: argparse.Namespace) -> dict[str, list[str]]:
    """Returns {name of a benchmark: its command} for all benchmarks of some variants."""
    sizes = DRY if args.dry else REAL
    common = ["--variants", *variants, "--device", args.device, "--dtype", args.dtype, "--out", RESULT]
    block = ["benchmarks/block.py", *common, "--rounds", sizes.block_rounds]
    step = ["benchmarks/step.py", *common, "--rounds", sizes.rounds]
    memory = ["benchmarks/memory.py", *common, "--rounds", "1"]  # torch's allocator does not vary
    generate = ["benchmarks/generate.py", *common, "--rounds", sizes.rounds]
    vocabulary = ["--words", "50"] if args.dry else []
    step_data = ["--shapes", *sizes.short]
    if args.data:
        step_data = ["--data", args.data, "--max-tokens", "4096", "--batches", "4"]
    return {
        "block": [*block, "--shapes", *sizes.short, sizes.square],
        "causal": [*block, "--shapes", sizes.causal, "--causal"],
        "step": [*step, *step_data, *vocabulary],
        "step-large": [*step, "--shapes", sizes.large_step, *vocabulary],
        "memory": [*memory, "--shapes", sizes.memory],
        "generate": [*generate, *sizes.generate],
    }


def list_parts(args: argparse.Namespace) -> list[str]:
    """Returns the names of all parts.

    Speed and memory are measured a second time with the Triton kernels, in parts such as ``step-simple+kernels``. The
    beam search is not, as it does not use them.
    """
    names = list(list_commands(args))
    measured = [name for name in names if name.startswith(("block", "causal", "step", "memory"))]
    return names + [f"{name}+kernels" for name in measured]


# ---- running a part


class PartFiles(NamedTuple):
    """The files that a part leaves in the folder of the results."""

    result: Path
    unfinished: Path  # the result while the part is running
    command: Path  # the command that the result is of
    log: Path  # the output of the command


def run_part(part: str, args: argparse.Namespace) -> bool:
    """Runs a part, unless the folder of the results has a result of the same command already.

    Args:
        part: the name of the part; ``step-simple+kernels`` is ``step-simple`` with the Triton kernels.
        args: the command line's flags.

    Returns:
        whether the part has a result now.
    """
    files = PartFiles(
        result=args.out / f"{part}.json",
        unfinished=args.out / f"{part}.new",
        command=args.out / f"{part}.command",
        log=args.out / f"{part}.log",
    )
    name, _, suffix = part.partition("+")
    arguments = list_commands(args)[name]
    if has_result(files, arguments):
        print(f"{part}: has a result in {files.result}")
        return True
    prepare_files(files, arguments)
    # While the command is running, its result has another name, so that a part that fails leaves no result.
    words = [str(files.unfinished) if word == RESULT else word for word in arguments]
    command = [sys.executable, *words]
    print(f"{part}: {' '.join(command)}", flush=True)
    with_kernels = suffix == "kernels" or name == "correct"  # the part "correct" checks the kernels
    problem = run_command(command, with_kernels, args.dry, files.log)
    if problem:
        print(f"{part}: {problem}; its output is in {files.log}")
        return False
    finish_result(files, command)
    return True


def prepare_files(files: PartFiles, arguments: list[str]) -> None:
    """Removes the results that an earlier run of a part has left, and writes the part's command to a file.

    `arguments`: the arguments of Python in this command.
    """
    files.result.unlink(missing_ok=True)  # the result of another command
    files.unfinished.unlink(missing_ok=True)
    files.command.write_text(" ".join(arguments))


def finish_result(files: PartFiles, command: list[str]) -> None:
    """Gives the result of a part its final name.

    Some commands, the tests, write no result. Then the result is the last line of their output.

    Args:
        files: the files of the part.
        command: Python and its arguments.
    """
    if not files.unfinished.exists():
        last_line = files.log.read_text().splitlines()[-1:]
        files.unfinished.write_text(json.dumps({"command": command[1:], "summary": last_line}, indent=2))
    files.unfinished.rename(files.result)


def has_result(files: PartFiles, arguments: list[str]) -> bool:
    """Returns whether there is a result, and whether it is of the command with these arguments."""
    if not files.result.exists() or not files.command.exists():
        return False
    return files.command.read_text() == " ".join(arguments)


def run_command(command: list[str], with_kernels: bool, dry: bool, log: Path) -> str:
    """Runs a command with a time limit, and returns what went wrong; "" if it has succeeded.

    Args:
        command: the program and its arguments.
        with_kernels: whether the Triton kernels are switched on.
        dry: whether these run in Triton's interpreter, without a GPU.
        log: the file to which the command's output is written.
    """
    environment = {**os.environ, kernels.VARIABLE: "1" if with_kernels else "0"}
    if dry:
        environment["TRITON_INTERPRET"] = "1"
    time_limit = 60 * TIME_LIMIT_IN_MINUTES  # seconds
    with log.open("w") as file:
        try:
            completed = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=time_limit
            )
        except subprocess.TimeoutExpired:
            return f"not done in {TIME_LIMIT_IN_MINUTES} minutes"
    if completed.returncode:
        return f"exit code {completed.returncode}"
    return ""


# ---- the parts that this script computes


class CheckShape(NamedTuple):
    """The size of a batch for `check_variant`: so many sentences of up to so many tokens."""

    sentences: int
    length: int
    causal: bool = False  # True: a mask of later tokens and no padding; False: padding


def check_correctness(out: Path, dry: bool) -> None:
    """Checks that the Triton kernels compute every variant correctly in half precision.

    Writes what `check_variant` returns for each variant and shape to a JSON file. Ends with an error if a variant was
    not computed by the kernels, if two runs differ, or if the values are too far from those in fp64.

    Args:
        out: the JSON file.
        dry: whether to check two variants in small sizes, on the CPU.
    """
    variants = [name for name in VARIANTS if name != "vanilla"]
    if dry:
        variants = variants[:2]
        shapes = [CheckShape(3, 7)]
    else:
        shapes = [CheckShape(64, 32), CheckShape(32, 128), CheckShape(4, 1024, causal=True)]
    rows = {}
    for name in variants:
        for shape in shapes:
            rows[f"{name} {shape.sentences}x{shape.length}"] = check_variant(name, shape, dry)
    out.write_text(json.dumps(rows, indent=2) + "\n")
    wrong = [name for name, row in rows.items() if not is_correct(row)]
    if wrong:
        sys.exit(
            f"error: without kernels, with unequal bits or with an error of {LARGEST_ERROR}: {', '.join(wrong)}; "
            f"see {out}"
        )


def is_correct(row: dict[str, Any]) -> bool:
    """Returns whether what `check_variant` returns is as it should be."""
    return bool(row["kernels"]) and row["equal bits"] and row["error"] < LARGEST_ERROR


def check_variant(name: str, shape: CheckShape, dry: bool) -> dict[str, Any]:
    """Runs a self-attention forward and backward, twice by the Triton kernels in half precision and once in fp64.

    Args:
        name: the variant.
        shape: the size of the batch.
        dry: whether to run a narrow attention on the CPU.

    Returns:
        ``kernels``, how many kernels each of the two runs launched; ``equal bits``, whether these runs are equal;
        ``error``, the largest error of output and gradients, each relative to its largest value if that is above 1.
    """
    batch = make_check_batch(shape, dry)
    width = 32 if dry else WIDTH
    heads = 2 if dry else HEADS
    # `build_block` takes the sizes from its module, benchmarks/block.py, and not as arguments.
    with mock.patch.multiple("block", WIDTH=width, HEADS=heads):
        module = build_block(name, shape.length, shape.causal).to(batch.x.device, batch.x.dtype).train()
    # The first result is dropped: in their first call, the kernels are launched more often, to check themselves.
    run_block(module, batch)
    with mock.patch.object(kernels, "run", wraps=kernels.run) as kernels_run:
        first = run_block(module, batch)
        second = run_block(module, batch)
    module.double()  # the kernels do not support fp64, so this is computed without them
    exact = run_block(module, batch)
    return {
        "kernels": kernels_run.call_count // 2,
        "equal bits": all(torch.equal(one, other) for one, other in zip(first, second)),
        "error": max(relative_error(value, exact_value) for value, exact_value in zip(first, exact)),
    }


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the largest difference of two tensors, divided by the largest exact value if that is above 1."""
    largest = exact.abs().max().clamp(min=1)
    return float((value - exact).abs().max() / largest)


class CheckBatch(NamedTuple):
    """A batch for `check_variant`: the arguments of a self-attention, and the gradient of its output."""

    x: torch.Tensor  # (T, B, width)
    output_gradient: torch.Tensor  # (T, B, width)
    key_padding_mask: torch.Tensor | None  # (B, T); None: a mask of later tokens and no padding
    token_factor: torch.Tensor  # (T, B, 1): 1 where there is a token, 0 where there is padding

    def is_causal(self) -> bool:
        """Returns whether the attention gets a mask of later tokens, instead of a mask of padding."""
        return self.key_padding_mask is None


def make_check_batch(shape: CheckShape, dry: bool) -> CheckBatch:
    """Returns a random batch in half precision. Without a mask of later tokens, its lengths rise evenly from 0.

    Args:
        shape: the size of the batch.
        dry: whether the batch is narrow and on the CPU.
    """
    sentences, length, causal = shape
    device, dtype = ("cpu", torch.float16) if dry else ("cuda", torch.bfloat16)
    width = 32 if dry else WIDTH
    torch.manual_seed(0)
    x, output_gradient = torch.randn(2, length, sentences, width, device=device).to(dtype)
    if causal:
        return CheckBatch(x, output_gradient, key_padding_mask=None, token_factor=torch.ones_like(x[..., :1]))
    # Sentence b of B has b T / B tokens, rounded down, so the first one is empty.
    lengths = torch.arange(sentences, device=device) * length // sentences  # (B,)
    positions = torch.arange(length, device=device)  # (T,)
    key_padding_mask = positions[None] >= lengths[:, None]  # (B, T)
    token_factor = (~key_padding_mask).t().unsqueeze(-1).to(dtype)  # (T, B, 1)
    return CheckBatch(x, output_gradient, key_padding_mask, token_factor)


def run_block(module: torch.nn.Module, batch: CheckBatch) -> list[Any]:
    """Runs a self-attention forward and backward, in the dtype of its parameters.

    Returns:
        its output, which is set to 0 at padding, the gradient of its input, and the gradients of all parameters.
    """
    dtype = next(module.parameters()).dtype
    x = batch.x.detach().clone().to(dtype).requires_grad_()
    attention_mask = causal_mask(x) if batch.is_causal() else None
    output, _ = module(x, key_padding_mask=batch.key_padding_mask, attn_mask=attention_mask)
    output = output * batch.token_factor.to(dtype)
    module.zero_grad()
    output.backward(batch.output_gradient.to(dtype))
    parameter_gradients = [parameter.grad for parameter in module.parameters()]
    return [output.detach(), x.grad, *parameter_gradients]


def list_backend(out: Path, dry: bool) -> None:
    """Writes to a JSON file which kernels stock fairseq's self-attention launches on this device, for some shapes.

    The names of the kernels show which implementation of attention torch has chosen.

    Args:
        out: the JSON file.
        dry: whether to run a small shape on the CPU.
    """
    if dry:
        args = argparse.Namespace(device="cpu", dtype="fp32")
        activity = torch.profiler.ProfilerActivity.CPU
        shapes = ["3x7"]
    else:
        args = argparse.Namespace(device="cuda", dtype="bf16")
        activity = torch.profiler.ProfilerActivity.CUDA
        shapes = ["128x32", "32x128", "256x256"]
    kernels_by_shape: dict[str, list[str]] = {}
    for shape in shapes:
        module = build_block(STOCK, length=1, causal=False)  # stock fairseq's attention takes sentences of any length
        step = make_step(module, shape, causal=False, args=args)
        step()  # a first call, in which torch sets itself up, is not profiled
        with torch.profiler.profile(activities=[activity]) as profile:
            step()
        kernels_by_shape[shape] = [event.key for event in profile.key_averages()]
    out.write_text(json.dumps(kernels_by_shape, indent=2) + "\n")


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
    parser.add_argument("--correctness", type=Path, help="internal: the file to which the part `correct` is written")
    parser.add_argument("--backend", type=Path, help="internal: the file to which the part `backend` is written")
    args = parser.parse_args()
    args.device = "cpu" if args.dry else "cuda"
    if args.dry:
        args.dtype = "fp32"
    elif not torch.cuda.is_available() and not args.list:
        sys.exit("error: this machine has no GPU that torch can use; --dry shows the parts on a CPU")
    return args


def choose_parts(args: argparse.Namespace) -> list[str]:
    """Returns the names of the parts that ``--parts`` chooses by their first letters, or of all parts.

    Ends with a one-line error if no name begins with one of the words of ``--parts``.
    """
    parts = list_parts(args)
    if not args.parts:
        return parts
    unknown = [word for word in args.parts if not any(part.startswith(word) for part in parts)]
    if unknown:
        sys.exit(f"error: --parts {' '.join(unknown)}: choose from {', '.join(parts)}")
    return [part for part in parts if part.startswith(tuple(args.parts))]


def main() -> None:
    """Runs the parts that have no result yet; or lists them; or computes one part, in the process that runs it."""
    args = parse_flags()
    if args.correctness:
        check_correctness(args.correctness, args.dry)
    elif args.backend:
        list_backend(args.backend, args.dry)
    elif args.list:
        print("\n".join(choose_parts(args)))
    else:
        run_parts(args)


def run_parts(args: argparse.Namespace) -> None:
    """Runs the parts that ``--parts`` chooses, and ends with a one-line error if one of them has no result."""
    parts = choose_parts(args)
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = [part for part in parts if not run_part(part, args)]
    if failed:
        sys.exit(f"error: no result of {', '.join(failed)}; a second call runs them again")


if __name__ == "__main__":
    main()
