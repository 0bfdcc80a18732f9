"""Peak memory of one self-attention block, forward and backward: stock fairseq's over each variant's.

    python benchmarks/memory.py --shapes 16x1024 --causal

Memory is counted from before the first forward pass: the input exists by then, the output and gradients do not. On a
CPU the figure is the peak of the resident set of a process of its own, which varies, so that the median of the rounds
is taken (Linux only). On a GPU it is the peak of torch's allocator, which does not vary.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from block import build_block, make_step
from common import CONVOLUTIONS, STOCK, make_parser, parse_shape, report, set_up_device
from rounds import Function

from fairseq_synth.architectures import VARIANTS

MIB = 2**20
WARM_UP_SHAPE = "2x32"  # sentences x tokens


def reset_peak(device: str) -> None:
    """Lowers the recorded peak of memory to what the process holds now, so that earlier work does not count."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # 5 resets the peak of the resident set


def read_peak(device: str) -> int:
    """Returns the highest number of bytes that the process has held since the last `reset_peak`."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    kilobytes = re.findall(r"VmHWM:\s+(\d+) kB", status)[0]
    return 1024 * int(kilobytes)


def measure_here(name: str, shape: str, args: argparse.Namespace) -> int:
    """Returns the bytes that a self-attention needs to run forward and backward once, measured in this process.

    Args:
        name: ``stock``, a convolution of fairseq or a variant.
        shape: the size of the batch, as sentences x tokens.
        args: the command line's flags.
    """
    # In their first call, libraries load themselves and their buffers. These must not count.
    warm_up = build_step(name, WARM_UP_SHAPE, args)
    warm_up()
    step = build_step(name, shape, args)
    reset_peak(args.device)
    before = read_peak(args.device)  # what the process holds now, as the peak was just reset
    step()
    return read_peak(args.device) - before


def build_step(name: str, shape: str, args: argparse.Namespace) -> Function:
    """Builds a self-attention, and returns a function that runs it forward and backward once.

    Args:
        name: ``stock``, a convolution of fairseq or a variant.
        shape: the size of the batch, as sentences x tokens.
        args: the command line's flags.
    """
    module = build_block(name, parse_shape(shape).tokens, args.causal)
    return make_step(module, shape, args.causal, args)


def measure_in_own_process(name: str, shape: str) -> int:
    """Starts this script in a process of its own, and returns the bytes that `measure_here` has measured there.

    Args:
        name: ``stock``, a convolution of fairseq or a variant.
        shape: the size of the batch, as sentences x tokens.
    """
    # The process gets the flags of this one's command line, and two more. If there are two values of --shapes, the last
    # one counts.
    command = [sys.executable, *sys.argv, "--one", name, "--shapes", shape]
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    last_line = completed.stdout.splitlines()[-1]  # that of `print_measurement`
    return int(json.loads(last_line))


def print_measurement(args: argparse.Namespace) -> None:
    """Prints the bytes that the self-attention of ``--one`` needs, in the process of `measure_in_own_process`."""
    print(json.dumps(measure_here(args.one, args.shapes[0], args)))


def measure(name: str, shape: str, args: argparse.Namespace) -> float:
    """Returns the MiB that a self-attention needs to run forward and backward once.

    On a CPU it is the median over several processes, because the measurements vary. Ends with a one-line error if the
    memory is too small to be measured.

    Args:
        name: ``stock``, a convolution of fairseq or a variant.
        shape: the size of the batch, as sentences x tokens.
        args: the command line's flags.
    """
    if args.device == "cuda":
        measurements = [measure_here(name, shape, args)]
    else:
        measurements = [measure_in_own_process(name, shape) for _ in range(args.rounds)]
    memory = statistics.median(measurements) / MIB
    if memory == 0:  # The memory that the warm-up has left was enough.
        sys.exit(f"error: --shapes {shape}: {name} needs no memory that can be measured; take a larger shape")
    return memory


def compare_memory(args: argparse.Namespace) -> None:
    """Compares the peak memory of all variants with stock fairseq's, and prints a table."""
    rows: dict[str, dict[str, float]] = {name: {} for name in [STOCK, *args.variants]}
    for shape in args.shapes:
        memory_by_name = {name: measure(name, shape, args) for name in rows}
        for name, memory in memory_by_name.items():
            # Each shape has two columns: the memory itself, and how many times less it is than stock fairseq's.
            rows[name][f"{shape} MiB"] = memory
            rows[name][shape] = memory_by_name[STOCK] / memory
    mask = "causal" if args.causal else "padded"
    report(f"peak memory of the block, {mask}", "stock's / this one's", rows, args)


def parse_flags() -> argparse.Namespace:
    """Returns the flags of the command line. Ends with a one-line error if there is no such device."""
    parser = make_parser(__doc__, [*VARIANTS, *CONVOLUTIONS], rounds=3)
    parser.add_argument("--shapes", nargs="+", default=["16x1024"], help="sentences x tokens")
    parser.add_argument("--causal", action="store_true", help="the decoder's block, no padding")
    parser.add_argument(
        "--one", help="internal: print the bytes of this variant (the script calls itself so, for a process of its own)"
    )
    args = parser.parse_args()
    set_up_device(args)
    return args


def main() -> None:
    """Compares the memory of all variants; or measures one, in a process that this script has started for it."""
    args = parse_flags()
    if args.one:
        print_measurement(args)
    else:
        compare_memory(args)


if __name__ == "__main__":
    main()
