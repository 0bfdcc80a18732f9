#!/usr/bin/env python
"""Averages the weights of several checkpoints.

    python scripts/average_checkpoints.py --inputs DIR --num-epoch-checkpoints 5 --output DIR/checkpoint_avg.pt
    python scripts/average_checkpoints.py --inputs A.pt B.pt --output checkpoint_avg.pt

The flags are the same as in fairseq's script average_checkpoints.py, which is not part of fairseq's packages. Unlike
fairseq's script, this script never runs code from a checkpoint, and never leaves an incomplete output file.
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
    """Averages the checkpoints that the command line names, and writes the result to --output."""
    args = make_parser().parse_args()
    paths = choose_checkpoints(args)
    print("averaging", *paths)
    register()  # allows torch to load what fairseq's checkpoints hold, and repairs how fairseq saves them
    from fairseq import checkpoint_utils  # imported late, so that wrong options are refused at once

    checkpoint_utils.torch_persistent_save(average(paths), str(args.output))
    print("wrote", args.output)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=Path, nargs="+", required=True, help="checkpoints, or a folder of checkpoints")
    parser.add_argument("--output", type=Path, required=True, help="the averaged checkpoint")
    newest = parser.add_mutually_exclusive_group()
    newest.add_argument("--num-epoch-checkpoints", type=int, metavar="N", help="average the last N epoch checkpoints")
    newest.add_argument("--num-update-checkpoints", type=int, metavar="N", help="average the last N update checkpoints")
    parser.add_argument("--checkpoint-upper-bound", type=int, default=0, help="ignore later epochs or updates")
    return parser


def choose_checkpoints(args: argparse.Namespace) -> list[Path]:
    """Returns the checkpoints that the options name.

    Raises SynthesizerError if a file is missing, or if it is unclear which checkpoints of a folder are meant.
    """
    if args.num_update_checkpoints is not None:
        folder = check_folder(args.inputs, args.num_update_checkpoints)
        file_name = re.compile(r"checkpoint_\d+_(?P<age>\d+)\.pt")  # checkpoint_EPOCH_UPDATES.pt
        return find_newest(folder, file_name, args.num_update_checkpoints, "update", args.checkpoint_upper_bound)
    if args.num_epoch_checkpoints is not None:
        folder = check_folder(args.inputs, args.num_epoch_checkpoints)
        file_name = re.compile(r"checkpoint(?P<age>\d+)\.pt")  # checkpointEPOCH.pt
        return find_newest(folder, file_name, args.num_epoch_checkpoints, "epoch", args.checkpoint_upper_bound)
    for path in args.inputs:
        check_file(path)
    return args.inputs


def check_folder(inputs: list[Path], number: int) -> Path:
    """Returns the only path in `inputs`, which must be a folder, and checks that at least one checkpoint is asked for.

    Raises SynthesizerError otherwise.
    """
    if number < 1:
        raise SynthesizerError(f"asked for the last {number} checkpoints; give at least 1")
    if len(inputs) != 1 or not inputs[0].is_dir():
        names = " ".join(str(path) for path in inputs)
        raise SynthesizerError(
            f"--inputs {names}: with --num-epoch-checkpoints or --num-update-checkpoints give one folder that exists"
        )
    return inputs[0]


def check_file(path: Path) -> None:
    """Checks that `path` is a file; raises SynthesizerError if it is a folder or does not exist."""
    if path.is_dir():
        raise SynthesizerError(
            f"--inputs {path}: is a folder; say how many of its checkpoints by --num-epoch-checkpoints N or "
            "--num-update-checkpoints N"
        )
    if not path.is_file():
        raise SynthesizerError(f"--inputs {path}: no such file")


def find_newest(folder: Path, file_name: re.Pattern[str], number: int, kind: str, upper_bound: int) -> list[Path]:
    """Returns the newest checkpoints of a folder, the newest one first.

    Args:
        folder: the folder to search.
        file_name: which files to look at; the group "age" of this pattern is the number of epochs or updates.
        number: how many checkpoints to return.
        kind: what the checkpoints are called in the error, "epoch" or "update".
        upper_bound: the highest number of epochs or updates to look at; 0 for no bound.

    Raises:
        SynthesizerError: the folder has fewer checkpoints.
    """
    path_by_age: dict[int, Path] = {}
    for path in folder.glob("*.pt"):
        match = file_name.fullmatch(path.name)
        if match is None:
            continue
        age = int(match["age"])
        if upper_bound == 0 or age <= upper_bound:
            path_by_age[age] = path
    if len(path_by_age) < number:
        raise SynthesizerError(
            f"--inputs {folder}: found {len(path_by_age)} of {number} {kind} checkpoints; train on, or average fewer"
        )
    newest_ages = sorted(path_by_age, reverse=True)[:number]
    return [path_by_age[age] for age in newest_ages]


def average(paths: list[Path]) -> dict[str, Any]:
    """Returns the first checkpoint, with the mean of all checkpoints' weights and buffers in place of its own.

    The mean is computed in fp64. Weights in half precision become fp32.

    Raises SynthesizerError if the checkpoints are of different models, or if a weight is NaN.
    """
    from fairseq import checkpoint_utils
    from omegaconf import OmegaConf

    checkpoint = checkpoint_utils.load_checkpoint_to_cpu(str(paths[0]))
    first_weights = checkpoint["model"]
    check_numbers(first_weights, paths[0])
    sums = {name: weight.double() for name, weight in first_weights.items()}
    for path in paths[1:]:
        weights = checkpoint_utils.load_checkpoint_to_cpu(str(path))["model"]
        if read_shapes(weights) != read_shapes(first_weights):
            raise SynthesizerError(f"{path}: not the same model as {paths[0]}")
        check_numbers(weights, path)
        for name, weight in weights.items():
            sums[name] += weight.double()
    for name, weight in first_weights.items():
        mean = sums[name] / len(paths)
        first_weights[name] = convert_mean(mean, weight)  # replaces the weight in the checkpoint
    if checkpoint.get("cfg") is not None:
        # fairseq saves the configuration in this form
        checkpoint["cfg"] = OmegaConf.to_container(checkpoint["cfg"], resolve=True, enum_to_str=True)
    return checkpoint


def check_numbers(weights: dict[str, Any], path: Path) -> None:
    """Raises SynthesizerError if a weight of a checkpoint is NaN."""
    for name, weight in weights.items():
        if weight.isnan().any():
            raise SynthesizerError(
                f"{path}: has weights that are not numbers (NaN, first in {name}); average other checkpoints, or "
                "train again with a lower learning rate"
            )


def read_shapes(weights: dict[str, Any]) -> dict[str, Any]:
    """Returns the shape of each weight by its name."""
    return {name: weight.shape for name, weight in weights.items()}


def convert_mean(mean: Any, weight: Any) -> Any:
    """Returns a mean in fp64 with the type of the weight that it replaces, but with fp32 for half precision.

    The mean of integers is rounded.
    """
    import torch

    if weight.dtype in (torch.float16, torch.bfloat16):
        return mean.to(torch.float32)
    if weight.is_floating_point():
        return mean.to(weight.dtype)
    return mean.round().to(weight.dtype)


if __name__ == "__main__":
    logging.disable(logging.INFO)  # fairseq's messages about optional packages
    run_command(main)
