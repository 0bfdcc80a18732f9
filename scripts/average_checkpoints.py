#!/usr/bin/env python
"""Averages the weights of checkpoints, as papers on Transformers do before they translate.

    python scripts/average_checkpoints.py --inputs DIR --num-epoch-checkpoints 5 --output DIR/checkpoint_avg.pt
    python scripts/average_checkpoints.py --inputs A.pt B.pt --output checkpoint_avg.pt

fairseq has this script in its repository, but in none of its packages. The flags are the same. It loads only files
that are safe to load, and the output gets its name when it is complete.
"""

import argparse
import logging
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_synth import register  # noqa: E402
from fairseq_synth.errors import SynthesizerError, run_command  # noqa: E402


def main() -> None:
    """Runs the command line."""
    args = make_parser().parse_args()
    paths = checkpoints_of_options(args)
    print("averaging", *paths)
    register()  # allows torch to load what fairseq's checkpoints hold, and repairs how fairseq saves them
    from fairseq import checkpoint_utils  # imported late, so that wrong options are refused at once

    checkpoint_utils.torch_persistent_save(average(paths), str(args.output))
    print("wrote", args.output)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=Path, nargs="+", required=True, help="checkpoints, or one folder of them")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    newest = parser.add_mutually_exclusive_group()
    newest.add_argument("--num-epoch-checkpoints", type=int, metavar="N", help="the last N epoch checkpoints")
    newest.add_argument("--num-update-checkpoints", type=int, metavar="N", help="the last N of --save-interval-updates")
    parser.add_argument("--checkpoint-upper-bound", type=int, default=0, help="highest epoch or update to look at")
    return parser


def checkpoints_of_options(args: argparse.Namespace) -> list[Path]:
    """Returns the checkpoints that the options name.

    Raises SynthesizerError if a file is missing, or if it is unclear which checkpoints of a folder are meant.
    """
    by_updates = args.num_update_checkpoints is not None
    number = args.num_update_checkpoints if by_updates else args.num_epoch_checkpoints
    if number is None:
        for path in args.inputs:
            check_file(path)
        return args.inputs
    if number < 1:
        raise SynthesizerError(f"asked for the last {number} checkpoints; give at least 1")
    if len(args.inputs) != 1 or not args.inputs[0].is_dir():
        raise SynthesizerError(
            f"--inputs {' '.join(map(str, args.inputs))}: with --num-epoch-checkpoints or --num-update-checkpoints "
            "give one folder that exists"
        )
    return last_checkpoints(args.inputs[0], number, by_updates, args.checkpoint_upper_bound)


def check_file(path: Path) -> None:
    """Raises SynthesizerError if there is no file with this name."""
    if path.is_dir():
        raise SynthesizerError(
            f"--inputs {path}: is a folder; say how many of its checkpoints by --num-epoch-checkpoints N or "
            "--num-update-checkpoints N"
        )
    if not path.is_file():
        raise SynthesizerError(f"--inputs {path}: no such file")


def last_checkpoints(folder: Path, number: int, by_updates: bool, upper_bound: int) -> list[Path]:
    """Returns the newest checkpoints of a folder, the newest one first.

    Args:
        number: how many.
        by_updates: take checkpoint_{epoch}_{updates}.pt instead of checkpoint{epoch}.pt.
        upper_bound: the highest epoch, or number of updates, to look at; 0 for no bound.

    Raises SynthesizerError if there are fewer.
    """
    pattern = r"checkpoint_\d+_(\d+)\.pt" if by_updates else r"checkpoint(\d+)\.pt"
    path_by_age: dict[int, Path] = {}
    for path in folder.glob("*.pt"):
        match = re.fullmatch(pattern, path.name)
        if match and (upper_bound == 0 or int(match[1]) <= upper_bound):
            path_by_age[int(match[1])] = path
    if len(path_by_age) < number:
        kind = "update" if by_updates else "epoch"
        raise SynthesizerError(
            f"--inputs {folder}: found {len(path_by_age)} of {number} {kind} checkpoints; train on, or average fewer"
        )
    newest = sorted(path_by_age, reverse=True)[:number]
    return [path_by_age[age] for age in newest]


def average(paths: list[Path]) -> dict[str, Any]:
    """Returns the first checkpoint, with the mean of all checkpoints' weights and buffers in place of its own.

    The mean is computed in fp64. Weights in half precision become fp32.

    Raises SynthesizerError if the checkpoints are of different models, or if a weight is NaN.
    """
    from fairseq import checkpoint_utils
    from omegaconf import OmegaConf

    result = checkpoint_utils.load_checkpoint_to_cpu(str(paths[0]))
    weights = result["model"]
    check_numbers(weights, paths[0])
    sums = {name: weight.double() for name, weight in weights.items()}
    for path in paths[1:]:
        others = checkpoint_utils.load_checkpoint_to_cpu(str(path))["model"]
        if shapes(others) != shapes(weights):
            raise SynthesizerError(f"{path}: not the same model as {paths[0]}")
        check_numbers(others, path)
        for name, weight in others.items():
            sums[name] += weight.double()
    for name, weight in weights.items():
        weights[name] = convert_mean(sums[name] / len(paths), weight)
    if result.get("cfg") is not None:
        # fairseq saves the configuration in this form
        result["cfg"] = OmegaConf.to_container(result["cfg"], resolve=True, enum_to_str=True)
    return result


def check_numbers(weights: dict[str, Any], path: Path) -> None:
    """Raises SynthesizerError if a weight of a checkpoint is NaN."""
    for name, weight in weights.items():
        if weight.isnan().any():
            raise SynthesizerError(
                f"{path}: has weights that are not numbers (NaN, first in {name}); average other checkpoints, or "
                "train again with a lower learning rate"
            )


def shapes(weights: dict[str, Any]) -> dict[str, Any]:
    """Returns {name of a weight: its shape}."""
    return {name: weight.shape for name, weight in weights.items()}


def convert_mean(mean: Any, weight: Any) -> Any:
    """Returns a mean in fp64 with the type of the weight that it replaces, but with fp32 for half precision."""
    import torch

    if weight.dtype in (torch.float16, torch.bfloat16):
        return mean.to(torch.float32)
    if not weight.is_floating_point():
        mean = mean.round()
    return mean.to(weight.dtype)


if __name__ == "__main__":
    logging.disable(logging.INFO)  # fairseq's messages about optional packages
    run_command(main)
