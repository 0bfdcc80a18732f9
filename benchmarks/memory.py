"""Peak memory of one self-attention block, forward and backward: stock fairseq's over each variant's.

    python benchmarks/memory.py --shapes 16x1024 --causal

From before the first forward pass: the input is there, the output and gradients are not. On a CPU the peak of the
resident set, each in a process of its own, which varies, so the median of the rounds (Linux only). On a GPU that of
torch's allocator, which does not vary.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from block import build, step
from common import CONVOLUTIONS, STOCK, parser, report, setup

from fairseq_synth.architectures import VARIANTS


def reset_peak(device: str) -> None:
    """Makes the peak what the process holds now. Importing the libraries needed more than they keep."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: str) -> int:
    """Highest bytes since `reset_peak`."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


def taken(name: str, shape: str, args: argparse.Namespace) -> int:
    """Bytes that a block takes."""
    bsz, length = (int(n) for n in shape.split("x"))
    # libraries load themselves and their buffers with the first call
    step(build(name, 32, args.causal), 2, 32, args.causal, args)()
    run = step(build(name, length, args.causal), bsz, length, args.causal, args)
    reset_peak(args.device)
    before = peak(args.device)
    run()
    return peak(args.device) - before


def taken_by_a_process(name: str, shape: str) -> int:
    """The same, of a process of its own."""
    command = [sys.executable, *sys.argv, "--one", name, "--shapes", shape]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    p = parser(__doc__, [*VARIANTS, *CONVOLUTIONS], rounds=3)
    p.add_argument("--shapes", nargs="+", default=["16x1024"], help="sentences x tokens")
    p.add_argument("--causal", action="store_true", help="the decoder's block, no padding")
    p.add_argument("--one", help="internal: print the bytes of this one")
    args = p.parse_args()
    setup(args)
    if args.one:
        print(json.dumps(taken(args.one, args.shapes[0], args)))
        return
    rows: dict[str, dict[str, float]] = {name: {} for name in [STOCK, *args.variants]}
    for shape in args.shapes:
        for name in rows:
            if args.device == "cuda":
                found = [taken(name, shape, args)]
            else:
                found = [taken_by_a_process(name, shape) for _ in range(args.rounds)]
            rows[name][f"{shape} MiB"] = statistics.median(found) / 2**20
            if not rows[name][f"{shape} MiB"]:  # the first call's buffers were enough
                sys.exit(f"error: --shapes {shape}: {name} needs no memory that can be measured; take a larger shape")
        for name in rows:
            rows[name][shape] = rows[STOCK][f"{shape} MiB"] / rows[name][f"{shape} MiB"]
    report(f"peak memory of the block, {'causal' if args.causal else 'padded'}", "stock's / this one's", rows, args)


if __name__ == "__main__":
    main()
