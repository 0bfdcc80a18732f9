"""All that is to be measured on a GPU, in parts of at most nine minutes.

    python benchmarks/gpu.py                      # every part that has no result yet
    python benchmarks/gpu.py --parts block step   # these
    python benchmarks/gpu.py --list

Each part is a process of its own with a limit of nine minutes. Its result is a file in --out, written when the part has
succeeded; a part that has a result of the same command is not run again. So if a call stops, or is stopped, repeat it.
A part that fails leaves its output in --out, and the others go on. Parts with the Triton kernels of docs/gpu-kernels.md
run in addition to the same parts without.

With --dry everything runs on the CPU with a few words, which tests the commands but measures nothing.
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
RESULT = "OUT"  # stands in a command for the path of the result's file, which is filled in when the command is run
# The sizes of the self-attention that `check_correctness` computes with --dry.
DRY_WIDTH = 32
DRY_HEADS = 1
LARGEST_ERROR = 0.05  # relative error of half precision at which `check_correctness` fails


# ---- the parts and their commands


class Sizes(NamedTuple):
    """The shapes (sentences x tokens), rounds and other flags that the benchmarks are called with."""

    short_shapes: list[str]  # shapes with short sentences, for self-attentions and training steps
    square_shape: str  # the largest shape of a self-attention with padding
    causal_shape: str  # the shape of a causal self-attention
    large_step_shape: str  # the shape of a training step with a large batch
    memory_shape: str
    rounds: str
    block_rounds: str  # more, as a round of a self-attention takes milliseconds, which vary
    vocabulary_flags: list[str]  # with the size of the vocabulary of a training step; empty: the default
    generation_flags: list[str]  # the flags of a beam search


REAL = Sizes(
    short_shapes=["128x32", "32x128"],
    square_shape="256x256",
    causal_shape="4x1024",
    large_step_shape="128x256",
    memory_shape="256x256",
    rounds="10",
    block_rounds="50",
    vocabulary_flags=[],
    generation_flags=[],
)
DRY = Sizes(
    short_shapes=["2x6"],
    square_shape="1x9",
    causal_shape="1x9",
    large_step_shape="2x9",
    memory_shape="8x64",  # less cannot be measured
    rounds="1",
    block_rounds="1",
    vocabulary_flags=["--words", "50"],
    generation_flags=["--tokens", "3", "--sentences", "2", "--words", "50"],
)


def list_commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Returns {name of a part: its command}, where a command is a list of the arguments with which python runs it.

    A part with the Triton kernels, such as ``step-simple+kernels``, has the same command as ``step-simple``. Only
    ``step-simple`` is listed here.
    """
    commands = {**list_test_commands(args), **list_check_commands(args)}
    # A benchmark is one part for the simple variants and one for the others, so that each ends within its time limit.
    for group, variants in (("simple", SIMPLE), ("mixed", MIXED)):
        timed_variants = variants[:1] if args.dry else variants
        for benchmark, command in list_benchmark_commands(timed_variants, args).items():
            commands[f"{benchmark}-{group}"] = command
    return commands


def list_test_commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Returns {name of a part: its command} for the tests that need a GPU.

    With --dry, each command runs one short test, which ``-k`` chooses by its name.
    """
    # With no:cacheprovider, pytest does not write the folder .pytest_cache.
    pytest = ["-m", "pytest", "-q", "--device", args.device, "-p", "no:cacheprovider"]
    tests = [*pytest, "tests/test_computations.py", "tests/test_attention.py"]
    kernel_tests = [*pytest, "tests/kernels"]
    if args.dry:
        tests.append("-k=test_the_output_for_padding_is_finite")
        kernel_tests.append("-k=test_off_by_default")
    else:
        # Most of the time, Triton compiles on the CPU, so several processes share one GPU.
        num_processes = min(16, os.cpu_count() or 1)
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
    common_flags = ["--variants", *variants, "--device", args.device, "--dtype", args.dtype, "--out", RESULT]
    block = ["benchmarks/block.py", *common_flags, "--rounds", sizes.block_rounds]
    step = ["benchmarks/step.py", *common_flags, "--rounds", sizes.rounds]
    memory = ["benchmarks/memory.py", *common_flags, "--rounds", "1"]  # the memory of a GPU is the same in all rounds
    generate = ["benchmarks/generate.py", *common_flags, "--rounds", sizes.rounds]
    if args.data:
        batches = ["--data", args.data, "--max-tokens", "4096", "--batches", "4"]
    else:
        batches = ["--shapes", *sizes.short_shapes]
    return {
        "block": [*block, "--shapes", *sizes.short_shapes, sizes.square_shape],
        "causal": [*block, "--shapes", sizes.causal_shape, "--causal"],
        "step": [*step, *batches, *sizes.vocabulary_flags],
        "step-large": [*step, "--shapes", sizes.large_step_shape, *sizes.vocabulary_flags],
        "memory": [*memory, "--shapes", sizes.memory_shape],
        "generate": [*generate, *sizes.generation_flags],
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
    unfinished: Path  # the result while the command is running, so that a command that fails leaves no result
    command: Path  # the command that the result is of, with the word `RESULT` in place of the path of the result
    log: Path  # the output of the command

    @classmethod
    def in_folder(cls, folder: Path, part: str) -> "PartFiles":
        """Returns the files of a part in a folder."""
        return cls(
            result=folder / f"{part}.json",
            unfinished=folder / f"{part}.new",
            command=folder / f"{part}.command",
            log=folder / f"{part}.log",
        )


def run_part(part: str, args: argparse.Namespace) -> bool:
    """Runs a part, unless the folder of the results has a result of the same command already.

    The command first writes its result to an unfinished file. This file becomes the result when the command has
    succeeded, so a command that fails leaves no result.

    Args:
        part: the name of the part, such as "step-simple", or "step-simple+kernels" with the Triton kernels.
        args: the command line's flags. With --dry, the command works on smaller sizes, and has a result too.

    Returns:
        whether the part has a result now.
    """
    files = PartFiles.in_folder(args.out, part)
    # The kernels are switched on by an environment variable, so both parts have the same command. In this command, the
    # word "OUT" stands in the place of the file of the result.
    part_without_kernels = part.removesuffix("+kernels")
    command_with_placeholder = list_commands(args)[part_without_kernels]
    if has_result(files, command_with_placeholder):
        print(f"{part}: has a result in {files.result}")
        return True
    remove_results(files)  # They belong to another command, or to a run that was stopped.
    record_command(files, command_with_placeholder)  # By this, `has_result` knows the command of the result.

    command = fill_in_result(command_with_placeholder, files.unfinished)
    print(f"{part}: {sys.executable} {' '.join(command)}", flush=True)
    problem = run_python(command, with_kernels=uses_kernels(part), dry=args.dry, log=files.log)
    if problem:
        print(f"{part}: {problem}; its output is in {files.log}")
        return False
    if not files.unfinished.exists():  # The command was pytest, which writes no result.
        write_summary(files, command)
    files.unfinished.rename(files.result)
    return True


def fill_in_result(command_with_placeholder: list[str], result: Path) -> list[str]:
    """Returns a command with the path of its result: ["step.py", "--out", "OUT"] -> ["step.py", "--out", "a.new"].

    Args:
        command_with_placeholder: the command with the word `RESULT`, which is "OUT", in place of the path.
        result: the path, which is a.new in the example.
    """
    return [str(result) if word == RESULT else word for word in command_with_placeholder]


def uses_kernels(part: str) -> bool:
    """Returns whether a part is run with the Triton kernels. The part ``correct`` always is, as it checks them."""
    return part.endswith("+kernels") or part == "correct"


def remove_results(files: PartFiles) -> None:
    """Removes the results that an earlier run of a part has left, finished or not."""
    files.result.unlink(missing_ok=True)
    files.unfinished.unlink(missing_ok=True)


def record_command(files: PartFiles, command_with_placeholder: list[str]) -> None:
    """Writes the command of a part to a file. It has no path of a result, so the folder of the results may be moved."""
    files.command.write_text(" ".join(command_with_placeholder))


def write_summary(files: PartFiles, command: list[str]) -> None:
    """Writes the result of a command that writes none: the command, and the last line of its output.

    This line is pytest's summary, such as "81 passed in 95.20s". It is written as a list, which is empty if the command
    has printed nothing.
    """
    last_lines = files.log.read_text().splitlines()[-1:]
    files.unfinished.write_text(json.dumps({"command": command, "summary": last_lines}, indent=2))


def has_result(files: PartFiles, command_with_placeholder: list[str]) -> bool:
    """Returns whether there is a result, and whether it is the result of this command."""
    if not files.result.exists() or not files.command.exists():
        return False
    recorded_command = files.command.read_text()
    return recorded_command == " ".join(command_with_placeholder)


def run_python(command: list[str], with_kernels: bool, dry: bool, log: Path) -> str:
    """Runs Python with a time limit, and returns what went wrong; "" if it has succeeded.

    Args:
        command: a script, or ``-m`` and a module, and its arguments.
        with_kernels: whether the Triton kernels are switched on.
        dry: whether the kernels run in Triton's interpreter, without a GPU.
        log: the file to which the output is written.
    """
    environment = {**os.environ, kernels.VARIABLE: "1" if with_kernels else "0"}
    if dry:
        environment["TRITON_INTERPRET"] = "1"
    time_limit = 60 * TIME_LIMIT_IN_MINUTES  # seconds
    with log.open("w") as file:
        try:
            completed = subprocess.run(
                [sys.executable, *command],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=time_limit,
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

    Writes what `check_variant` returns for each variant and shape to a JSON file. Then ends with an error if a variant
    was not computed by the kernels, if two runs differ, or if the values are too far from those in fp64.

    Args:
        out: the JSON file.
        dry: whether to check two variants in small sizes, on the CPU.
    """
    variants = [name for name in VARIANTS if name != "vanilla"]
    if dry:
        variants = variants[:2]
        shapes = [CheckShape(sentences=2, length=5)]
    else:
        shapes = [
            CheckShape(sentences=64, length=32),
            CheckShape(sentences=32, length=128),
            CheckShape(sentences=4, length=1024, causal=True),
        ]
    findings = {}  # for example {"random 64x32": what `check_variant` returns}
    for variant in variants:
        for shape in shapes:
            findings[f"{variant} {shape.sentences}x{shape.length}"] = check_variant(variant, shape, dry)
    out.write_text(json.dumps(findings, indent=2) + "\n")
    wrong = [name for name, finding in findings.items() if not is_correct(finding)]
    if wrong:
        names = ", ".join(wrong)
        sys.exit(
            f"error: {names}: the kernels did not run, two runs differ, or the error is {LARGEST_ERROR} or more; "
            f"see {out}"
        )


def is_correct(finding: dict[str, Any]) -> bool:
    """Returns whether what `check_variant` returns is as it should be."""
    return bool(finding["kernels"]) and finding["equal bits"] and finding["error"] < LARGEST_ERROR


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
    half_precision_module = build_check_block(name, shape, batch, dry)
    exact_module = build_check_block(name, shape, batch, dry).double()  # the same weights
    # The kernels check themselves in their first call, by further launches. These must not be counted below.
    run_block(half_precision_module, batch)
    first_run = run_and_count_kernels(half_precision_module, batch)
    second_run = run_and_count_kernels(half_precision_module, batch)
    exact_tensors = run_block(exact_module, batch)  # The kernels do not support fp64, so torch computes this.
    errors = [relative_error(tensor, exact) for tensor, exact in zip(first_run.tensors, exact_tensors)]
    are_equal = [torch.equal(first, second) for first, second in zip(first_run.tensors, second_run.tensors)]
    return {
        "kernels": min(first_run.launches, second_run.launches),
        "equal bits": all(are_equal),
        "error": max(errors),
    }


def build_check_block(name: str, shape: CheckShape, batch: "CheckBatch", dry: bool) -> torch.nn.Module:
    """Builds a self-attention for `check_variant`, in training mode, with the same weights in every call.

    Args:
        name: the variant.
        shape: the size of the batch.
        batch: the batch. The self-attention has its device and dtype.
        dry: whether to build a narrow attention.
    """
    width = DRY_WIDTH if dry else WIDTH
    heads = DRY_HEADS if dry else HEADS
    module = build_block(name, shape.length, shape.causal, width=width, heads=heads)
    return module.to(batch.x.device, batch.x.dtype).train()


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the largest difference of two tensors, divided by the largest exact value if that is above 1."""
    largest = exact.abs().max().clamp(min=1)
    return float((value - exact).abs().max() / largest)


class CheckBatch(NamedTuple):
    """A batch for `check_variant`: the arguments of a self-attention, and the gradient of its output."""

    x: torch.Tensor  # (T, B, width)
    output_gradient: torch.Tensor  # (T, B, width)
    key_padding_mask: torch.Tensor | None  # (B, T), True at padding; None: there is no padding
    is_causal: bool  # whether the attention gets a mask of later tokens


def make_check_batch(shape: CheckShape, dry: bool) -> CheckBatch:
    """Returns a random batch in half precision.

    In a causal batch, all sentences have the same length. Another batch has sentences of different lengths.

    Args:
        shape: the size of the batch.
        dry: whether the batch is narrow and on the CPU.
    """
    device = "cpu" if dry else "cuda"
    dtype = torch.float16 if dry else torch.bfloat16
    width = DRY_WIDTH if dry else WIDTH
    torch.manual_seed(0)
    random_numbers = torch.randn(2, shape.length, shape.sentences, width, device=device).to(dtype)
    x, output_gradient = random_numbers.unbind(0)  # (T, B, width) each
    key_padding_mask = None if shape.causal else make_rising_padding_mask(shape, device)
    return CheckBatch(x, output_gradient, key_padding_mask, is_causal=shape.causal)


def make_rising_padding_mask(shape: CheckShape, device: str) -> torch.Tensor:
    """Returns a padding mask (B, T), True at padding, for sentences whose lengths rise evenly from 0 to almost T.

    For example, four sentences of up to eight tokens have 0, 2, 4 and 6 tokens.
    """
    lengths = torch.arange(shape.sentences, device=device) * shape.length // shape.sentences  # (B,)
    positions = torch.arange(shape.length, device=device)  # (T,)
    return positions.unsqueeze(0) >= lengths.unsqueeze(1)


def run_block(module: torch.nn.Module, batch: CheckBatch) -> list[Any]:
    """Runs a self-attention forward and backward on a batch, which is converted to the dtype of the module.

    Returns:
        the output, which is set to 0 at padding, the gradient of the input, and the gradients of all parameters.
    """
    dtype = next(module.parameters()).dtype
    x = batch.x.to(dtype, copy=True).requires_grad_()  # a copy, so that the tensor of the batch gets no gradient
    attention_mask = causal_mask(x) if batch.is_causal else None
    output, _ = module(x, key_padding_mask=batch.key_padding_mask, attn_mask=attention_mask)
    if batch.key_padding_mask is not None:
        is_token = ~batch.key_padding_mask.transpose(0, 1).unsqueeze(2)  # (T, B, 1)
        output = output * is_token.to(dtype)  # what is computed at padding has no meaning
    module.zero_grad()
    output.backward(batch.output_gradient.to(dtype))
    parameter_gradients = [parameter.grad for parameter in module.parameters()]
    return [output.detach(), x.grad, *parameter_gradients]


class CountedRun(NamedTuple):
    """A run of a self-attention, forward and backward."""

    tensors: list[Any]  # the output and the gradients, as `run_block` returns them
    launches: int  # how many Triton kernels were launched


def run_and_count_kernels(module: torch.nn.Module, batch: CheckBatch) -> CountedRun:
    """Runs a self-attention forward and backward on a batch, and counts the Triton kernels that are launched."""
    # `kernels.run` launches a kernel. Its calls are counted here, and work as usual.
    with mock.patch.object(kernels, "run", wraps=kernels.run) as counted_run:
        tensors = run_block(module, batch)
    return CountedRun(tensors, launches=counted_run.call_count)


def write_backend(out: Path, dry: bool) -> None:
    """Writes to a JSON file which kernels stock fairseq's self-attention launches on this device, for some shapes.

    The names of the kernels show which implementation of attention torch has chosen.

    Args:
        out: the JSON file.
        dry: whether to run a small shape on the CPU.
    """
    # `make_step` reads the device and the dtype from the flags of benchmarks/block.py.
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
    """Returns the flags of the command line, and as `device` where the parts run.

    Ends with a one-line error if a GPU is needed and there is none.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", help="names of the parts to run, or beginnings of names (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the results")
    parser.add_argument(
        "--data", type=os.path.abspath, help="a corpus as fairseq-preprocess writes it, for the training step"
    )
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16"])
    parser.add_argument(
        "--dry",
        action="store_true",
        help="trial on the CPU with a few words, to test the commands; its times mean nothing",
    )
    # `list_check_commands` calls this script with one of these two flags, as each part is a process of its own.
    parser.add_argument("--correctness", type=Path, help="internal: the file to which the part `correct` is written")
    parser.add_argument("--backend", type=Path, help="internal: the file to which the part `backend` is written")
    args = parser.parse_args()
    if args.dry:
        args.device = "cpu"
        args.dtype = "fp32"  # --dtype is for a GPU
    else:
        args.device = "cuda"
    needs_gpu = not args.dry and not args.list
    if needs_gpu and not torch.cuda.is_available():
        sys.exit("error: this machine has no GPU that torch can use; --dry shows the parts on a CPU")
    return args


def choose_parts(args: argparse.Namespace) -> list[str]:
    """Returns the names of the parts that ``--parts`` chooses by their first letters, or of all parts.

    Ends with a one-line error if no name begins with one of the words of ``--parts``.
    """
    parts = list_parts(args)
    if not args.parts:
        return parts
    chosen = set()
    unknown_words = []
    for word in args.parts:
        parts_of_word = [part for part in parts if part.startswith(word)]
        chosen.update(parts_of_word)
        if not parts_of_word:
            unknown_words.append(word)
    if unknown_words:
        sys.exit(f"error: --parts {' '.join(unknown_words)}: choose from {', '.join(parts)}")
    return [part for part in parts if part in chosen]  # in the order in which they are run


def main() -> None:
    """Runs the parts that have no result yet; or lists them; or computes one part, in the process that runs it."""
    args = parse_flags()
    if args.correctness:
        check_correctness(args.correctness, args.dry)
    elif args.backend:
        write_backend(args.backend, args.dry)
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
