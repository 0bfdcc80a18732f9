"""The command that trains a converted model on."""

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.optim import OPTIMIZER_DATACLASS_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY

UPDATES = 500
WARMUP_UPDATES = 50
SHARE_OF_LEARNING_RATE = 1 / 3
REGISTRIES = {
    "task": TASK_DATACLASS_REGISTRY,
    "criterion": CRITERION_DATACLASS_REGISTRY,
    "optimizer": OPTIMIZER_DATACLASS_REGISTRY,
}


def tuning_command(data: Path, checkpoint: Path, cfg: dict[str, Any]) -> str:
    """Returns a command that trains a converted model on.

    It has the flags of the model's training, but a third of the learning rate, for 500 updates.

    Args:
        data: the binarised data.
        checkpoint: of the converted model.
        cfg: the config in it.
    """
    model_name = cfg["model"]["_name"]
    optimization = cfg["optimization"]
    learning_rate = optimization["lr"][0] * SHARE_OF_LEARNING_RATE
    flags = [str(data), "--finetune-from-model", str(checkpoint), "--save-dir", f"{checkpoint.stem}-tuned"]
    flags += batch_flags(cfg)
    flags += ["--clip-norm", str(optimization["clip_norm"]), "--lr", f"{learning_rate:.2g}"]
    flags += ["--lr-scheduler", "inverse_sqrt", "--warmup-updates", str(WARMUP_UPDATES)]
    flags += ["--max-update", str(UPDATES), "--arch", model_name]
    parser = argparse.ArgumentParser(add_help=False)
    MODEL_REGISTRY[model_name].add_args(parser)
    flags += changed_flags(parser, MODEL_DATACLASS_REGISTRY[model_name](), cfg["model"])
    for kind, registry in REGISTRIES.items():
        name = cfg[kind]["_name"]
        flags += [f"--{kind}", name]
        if name in registry:
            defaults = registry[name]()
            parser = argparse.ArgumentParser(add_help=False)
            gen_parser_from_dataclass(parser, defaults)
            values = {**cfg[kind], "data": None}  # the data is the first argument
            flags += changed_flags(parser, defaults, values)
    return f'fairseq-train --user-dir "$(python -m fairseq_synth)" {shlex.join(flags)}'


def batch_flags(cfg: dict[str, Any]) -> list[str]:
    """Returns the flags that set the size of a batch."""
    dataset = cfg["dataset"]
    if dataset["max_tokens"]:
        flags = ["--max-tokens", str(dataset["max_tokens"])]
    else:
        flags = ["--batch-size", str(dataset["batch_size"])]
    update_freq = cfg["optimization"]["update_freq"]
    if update_freq != [1]:
        flags += ["--update-freq", str(update_freq[0])]
    return flags


def changed_flags(parser: argparse.ArgumentParser, defaults: Any, values: Mapping[str, Any]) -> list[str]:
    """Returns the flags of a parser that have other values than their defaults.

    Args:
        parser: with the flags.
        defaults: has the default of each flag as an attribute.
        values: {name of a flag: its value}.
    """
    flags = []
    for action in parser._actions:
        value = values.get(action.dest)
        if isinstance(value, list):
            value = tuple(value)  # (0.9, 0.98), as fairseq reads it
        if value is None or value == getattr(defaults, action.dest, None):
            continue
        flags.append(action.option_strings[0])
        takes_value = action.nargs != 0
        if takes_value:
            flags.append(str(value))
    return flags
