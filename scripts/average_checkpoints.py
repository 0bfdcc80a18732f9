#!/usr/bin/env python
"""Averages the weights of checkpoints, as the Transformer's papers do before they translate.

    python scripts/average_checkpoints.py --inputs DIR --num-epoch-checkpoints 5 --output DIR/checkpoint_avg.pt
    python scripts/average_checkpoints.py --inputs A.pt B.pt --output checkpoint_avg.pt

fairseq has this script in its repository but ships it in none of its wheels. Flags are the same. Loading is
torch's safe one, and the output gets its name once it is whole.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_synth import register  # noqa: E402
from fairseq_synth.errors import SynthesizerError, run_command  # noqa: E402


def last_checkpoints(folder: Path, n: int, by_updates: bool, upper_bound: int) -> list[Path]:
    """The newest `n` of checkpoint{epoch}.pt, or of checkpoint_{epoch}_{updates}.pt, newest first.

    Args:
        upper_bound: highest epoch, or number of updates, to look at; 0 for no bound.

    Raises:
        SynthesizerError: there are fewer than `n`.
    """
    pattern = re.compile(r"checkpoint_\d+_(\d+)\.pt" if by_updates else r"checkpoint(\d+)\.pt")
    found = [(int(m[1]), p) for p in folder.glob("*.pt") for m in [pattern.fullmatch(p.name)] if m]
    found = sorted((c for c in found if not upper_bound or c[0] <= upper_bound), reverse=True)
    if len(found) < n:
        found_here = f"found {len(found)} of {n} {'update' if by_updates else 'epoch'} checkpoints"
        raise SynthesizerError(f"--inputs {folder}: {found_here}; train on, or average fewer")
    return [path for _, path in found[:n]]


def average(paths: list[Path]) -> dict[str, Any]:
    """The first checkpoint with the mean of all weights and buffers, taken in fp64; half precision becomes fp32.

    Raises:
        SynthesizerError: the checkpoints are of different models.
    """
    import torch
    from fairseq import checkpoint_utils
    from omegaconf import OmegaConf

    result, total = None, {}
    for path in paths:
        state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
        weights = state["model"]
        if result is None:
            result, total = state, {key: torch.zeros_like(w, dtype=torch.float64) for key, w in weights.items()}
        if {k: w.shape for k, w in weights.items()} != {k: w.shape for k, w in total.items()}:
            raise SynthesizerError(f"{path}: not the same model as {paths[0]}")
        for key, weight in weights.items():
            total[key] += weight.double()
    for key, weight in result["model"].items():
        mean = total[key] / len(paths)
        dtype = torch.float32 if weight.dtype in (torch.float16, torch.bfloat16) else weight.dtype
        result["model"][key] = (mean if weight.is_floating_point() else mean.round()).to(dtype)
    if result.get("cfg") is not None:
        result["cfg"] = OmegaConf.to_container(result["cfg"], resolve=True, enum_to_str=True)  # as fairseq saves it
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=Path, nargs="+", required=True, help="checkpoints, or one folder of them")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    newest = parser.add_mutually_exclusive_group()
    newest.add_argument("--num-epoch-checkpoints", type=int, metavar="N", help="the last N epoch checkpoints")
    newest.add_argument("--num-update-checkpoints", type=int, metavar="N", help="the last N of --save-interval-updates")
    parser.add_argument("--checkpoint-upper-bound", type=int, default=0, help="highest epoch or update to look at")
    args = parser.parse_args()
    n = args.num_update_checkpoints if args.num_epoch_checkpoints is None else args.num_epoch_checkpoints
    paths = args.inputs
    if n is not None:
        if n < 1:
            raise SynthesizerError(f"asked for the last {n} checkpoints; give at least 1")
        if len(paths) != 1 or not paths[0].is_dir():
            raise SynthesizerError(
                f"--inputs {' '.join(map(str, paths))}: with --num-epoch- or --num-update-checkpoints give one folder "
                "that is there"
            )
        paths = last_checkpoints(paths[0], n, args.num_update_checkpoints is not None, args.checkpoint_upper_bound)
    for path in paths:
        if path.is_dir():
            raise SynthesizerError(
                f"--inputs {path}: is a folder; say how many of its checkpoints by --num-epoch-checkpoints N or "
                "--num-update-checkpoints N"
            )
        if not path.is_file():
            raise SynthesizerError(f"--inputs {path}: no such file")
    print("averaging", *paths)
    register()  # allows what fairseq's checkpoints hold, and repairs saving
    from fairseq import checkpoint_utils  # not before what takes no time is checked

    checkpoint_utils.torch_persistent_save(average(paths), str(args.output))
    print("wrote", args.output)


if __name__ == "__main__":
    run_command(main)
