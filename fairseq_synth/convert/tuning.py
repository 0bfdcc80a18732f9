"""The command that continues the training of a converted model."""

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
# {part of fairseq's config: the dataclass of each class that it may name}
DATACLASSES = {
    "task": TASK_DATACLASS_REGISTRY,
    "criterion": CRITERION_DATACLASS_REGISTRY,
    "optimizer": OPTIMIZER_DATACLASS_REGISTRY,
}


def tuning_command(data: Path, checkpoint: Path, cfg: dict[str, Any]) -> str:
    """Returns a command of fairseq that continues the training of a converted model.

    It has the flags of the model's training, but a third of the learning rate, for 500 updates (`optimization_flags`).

    Args:
        data: the folder of the binarised data.
        checkpoint: the file of the converted model.
        cfg: fairseq's config in the checkpoint.
    """
    flags = [str(data), "--finetune-from-model", str(checkpoint), "--save-dir", f"{checkpoint.stem}-tuned"]
    flags += batch_flags(cfg)
    flags += optimization_flags(cfg["optimization"])
    flags += model_flags(cfg["model"])
    for part in DATACLASSES:
        flags += part_flags(part, cfg[part])
    user_dir = '"$(python -m fairseq_synth)"'  # The shell replaces this by the folder of the package.
    return f"fairseq-train --user-dir {user_dir} {shlex.join(flags)}"


def optimization_flags(optimization: dict[str, Any]) -> list[str]:
    """Returns the flags of the learning rate, of gradient clipping and of the number of updates.

    Args:
        optimization: the part of fairseq's config that the training had.
    """
    learning_rate = optimization["lr"][0] * SHARE_OF_LEARNING_RATE
    flags = ["--clip-norm", str(optimization["clip_norm"]), "--lr", f"{learning_rate:.2g}"]
    flags += ["--lr-scheduler", "inverse_sqrt", "--warmup-updates", str(WARMUP_UPDATES)]
    flags += ["--max-update", str(UPDATES)]
    return flags


def model_flags(model_cfg: dict[str, Any]) -> list[str]:
    """Returns ``--arch`` and the flags of a model that are not at their defaults."""
    name = model_cfg["_name"]
    parser = argparse.ArgumentParser(add_help=False)
    MODEL_REGISTRY[name].add_args(parser)
    defaults = MODEL_DATACLASS_REGISTRY[name]()
    return ["--arch", name, *changed_flags(parser, defaults, model_cfg)]


def part_flags(part: str, part_cfg: dict[str, Any]) -> list[str]:
    """Returns the flag that sets a part of fairseq's config, and the flags that belong to its value.

    For example, the part ``criterion`` may give ``--criterion label_smoothed_cross_entropy --label-smoothing 0.1``.
    Flags at their defaults are left out.

    Args:
        part: ``task``, ``criterion`` or ``optimizer``.
        part_cfg: this part of the config.
    """
    name = part_cfg["_name"]  # such as "label_smoothed_cross_entropy"
    dataclasses_of_part = DATACLASSES[part]
    if name not in dataclasses_of_part:
        return [f"--{part}", name]  # It has no flags of its own.
    default_config = dataclasses_of_part[name]()
    # Only fairseq's parser knows how the name of each flag is written on the command line.
    parser = argparse.ArgumentParser(add_help=False)
    gen_parser_from_dataclass(parser, default_config)
    return [f"--{part}", name, *changed_flags(parser, default_config, part_cfg)]


def batch_flags(cfg: dict[str, Any]) -> list[str]:
    """Returns the flags that set the size of a batch, with the values in fairseq's config."""
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
    """Returns the command line of those settings that differ from their defaults.

    Args:
        parser: a parser that has the flags.
        defaults: an object that has the default of each flag as an attribute.
        values: {name of a flag: its setting}. No flag is written for a setting that is missing or None, because the
            command line has no text for None.
    """
    command_line = []
    for flag in list_flags(parser):
        name = flag.dest  # such as "adam_betas"
        default = getattr(defaults, name, None)
        value = values.get(name)
        if isinstance(value, list):
            # A config has lists where fairseq's defaults are tuples. fairseq can also read the text of a tuple.
            value = tuple(value)
        if value is None or value == default:
            continue
        command_line += write_flag(flag, value)
    return command_line


def list_flags(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Returns the flags of a parser, without its arguments that have no flag, such as the folder of the data."""
    # argparse calls both of them actions. It has no public way to list them.
    return [action for action in parser._actions if action.option_strings]


def write_flag(flag: argparse.Action, value: Any) -> list[str]:
    """Returns the words that set a flag: ``["--dropout", "0.1"]``, or just ``["--use-old-adam"]`` for a switch.

    A switch takes no value. It sets the opposite of its default.

    Args:
        flag: the flag, as argparse has it.
        value: its value, which is not the default.
    """
    text_of_flag = flag.option_strings[0]  # The others are further ways to write the same flag.
    is_switch = flag.nargs == 0
    if is_switch:
        return [text_of_flag]
    return [text_of_flag, str(value)]
