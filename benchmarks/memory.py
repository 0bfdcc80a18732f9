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

from fairseq_synth.architectures import VARIANTS

MIB = 2**20


def reset_peak(device: str) -> None:
    """Lowers the recorded peak to what the process holds now: importing the libraries took more than they keep."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def read_peak(device: str) -> int:
    """Returns the highest number of bytes that the process has held since `reset_peak`."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    kilobytes = re.findall(r"VmHWM:\s+(\d+) kB", status)[0]
    return 1024 * int(kilobytes)


def measure_here(name: str, shape: str, args: argparse.Namespace) -> int:
    """Returns the bytes that a block takes for one pass forward and backward, measured in this process."""
    # libraries load themselves and their buffers in their first call
    warm_up = make_step(build_block(name, 32, args.causal), "2x32", args.causal, args)
    warm_up()
    _, length = parse_shape(shape)
    step = make_step(build_block(name, length, args.causal), shape, args.causal, args)
    reset_peak(args.device)
    before = read_peak(args.device)
    step()
    return read_peak(args.device) - before


def measure_in_own_process(name: str, shape: str) -> int:
    """Returns the same, measured by this script in a process of its own."""
    command = [sys.executable, *sys.argv, "--one", name, "--shapes", shape]
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    last_line = completed.stdout.splitlines()[-1]
    return int(json.loads(last_line))


def measure(name: str, shape: str, args: argparse.Namespace) -> float:
    """Returns the MiB that a block takes. Ends with a one-line error if they are too few to be measured."""
    if args.device == "cuda":
        measurements = [measure_here(name, shape, args)]
    else:
        measurements = [measure_in_own_process(name, shape) for _ in range(args.rounds)]
    memory = statistics.median(measurements) / MIB
    if memory == 0:  # the buffers of the first call were enough
        sys.exit(f"error: --shapes {shape}: {name} needs no memory that can be measured; take a larger shape")
    return memory


def main() -> None:
    """Compares the memory of all variants with stock fairseq's."""
    parser = make_parser(__doc__, [*VARIANTS, *CONVOLUTIONS], rounds=3)
    parser.add_argument("--shapes", nargs="+", default=["16x1024"], help="sentences x tokens")
    parser.add_argument("--causal", action="store_true", help="the decoder's block, no padding")
    parser.add_argument("--one", help="internal: print the bytes of this variant")
    args = parser.parse_args()
    set_up_device(args)
    if args.one:
        print(json.dumps(measure_here(args.one, args.shapes[0], args)))
        return
    rows: dict[str, dict[str, float]] = {name: {} for name in [STOCK, *args.variants]}
    for shape in args.shapes:
        memory = {name: measure(name, shape, args) for name in rows}
        for name, row in rows.items():
            row[f"{shape} MiB"] = memory[name]
            row[shape] = memory[STOCK] / memory[name]
    report(f"peak memory of the block, {'causal' if args.causal else 'padded'}", "stock's / this one's", rows, args)


if __name__ == "__main__":
    main()
