"""Repairs of flags on fairseq's command line that have no effect, or the wrong one."""

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

from fairseq.data.data_utils import infer_language_pair
from fairseq.tasks.denoising import DenoisingTask
from fairseq.utils import split_paths

from ...errors import SynthesizerError
from ..parsed_flags import repair_parsed_flags
from ..repairs import repair


@repair_parsed_flags(
    symptom="`--bf16` fails without a TPU",
    versions="0.12.2 and later",
    is_needed=lambda: importlib.util.find_spec("torch_xla") is None,
)
def allow_bf16_without_tpu(flags: argparse.Namespace) -> None:
    """Changes the flags in place: with ``--bf16``, no TPU is asked for.

    fairseq's command line sets ``tpu`` if ``--bf16`` is given. Without a TPU, the command ends in "'NoneType' object
    has no attribute 'xla_device'". This repair is applied if torch_xla is not installed, because it is needed for TPUs.
    """
    if getattr(flags, "bf16", False):
        flags.tpu = False


@repair_parsed_flags(
    symptom="`--tokenizer moses` without `--source-lang` and `--target-lang` fails with an error of Hydra",
    versions="all versions",
)
def find_languages_of_tokenizer(flags: argparse.Namespace) -> None:
    """Changes the flags in place: with ``--tokenizer``, missing languages are read from the names of the data files.

    If ``--source-lang`` and ``--target-lang`` are not given, fairseq reads the languages from these names only if it
    needs no tokenizer. With a tokenizer, it ends in an error of Hydra.

    Raises SynthesizerError if the data have no files whose names contain the two languages.
    """
    has_tokenizer = bool(getattr(flags, "tokenizer", None))
    if not has_tokenizer:
        return
    is_about_two_languages = hasattr(flags, "source_lang") and hasattr(flags, "target_lang")
    if not is_about_two_languages:
        return  # The command, such as fairseq-eval-lm, has no flags for languages.
    if flags.source_lang is not None and flags.target_lang is not None:
        return  # The user has given both languages.
    source, target = infer_language_pair(split_paths(flags.data)[0])
    if source is None or target is None:
        raise SynthesizerError(
            f"--tokenizer {flags.tokenizer}: give --source-lang and --target-lang, because the files in {flags.data} "
            "do not have the languages in their names"
        )
    flags.source_lang = flags.source_lang or source
    flags.target_lang = flags.target_lang or target


@repair_parsed_flags(
    symptom="`fairseq-generate --num-shards N --shard-id I` translates the whole test set instead of a part of it",
    versions="all versions",
)
def translate_one_shard(flags: argparse.Namespace) -> None:
    """Changes the flags in place: with ``--num-shards N --shard-id I``, fairseq-generate translates only part I of N.

    fairseq-generate ignores these two flags. But it can share its work among several processes. Then it translates only
    the batches of one of them, whose number is ``--distributed-rank``, of ``--distributed-world-size`` in all. These
    flags have no other effect on this command. So they are set here, as if each shard were such a process.

    Raises SynthesizerError if the shard does not exist, or if the command is fairseq-interactive.
    """
    if not is_translation_command(flags):
        return
    num_shards = flags.num_shards
    shard_id = flags.shard_id
    is_whole_text = num_shards == 1 and shard_id == 0  # the defaults
    if is_whole_text:
        return
    check_shard(num_shards, shard_id, is_interactive_command(flags))
    # A shard may have several processes. Then the processes of all shards are counted together. The comments show
    # process 1 of shard 2, for 3 shards with 2 processes each.
    processes_per_shard = flags.distributed_world_size  # 2
    rank_in_shard = flags.distributed_rank or 0  # 1
    num_processes_of_earlier_shards = shard_id * processes_per_shard  # 4, which have the ranks 0 to 3
    flags.distributed_rank = num_processes_of_earlier_shards + rank_in_shard  # 5
    flags.distributed_world_size = num_shards * processes_per_shard  # 6


def is_translation_command(flags: argparse.Namespace) -> bool:
    """Returns whether parsed flags are those of fairseq-generate or fairseq-interactive, which alone have --beam."""
    return hasattr(flags, "beam")


def is_interactive_command(flags: argparse.Namespace) -> bool:
    """Returns whether parsed flags are those of fairseq-interactive, which alone has --buffer-size."""
    return hasattr(flags, "buffer_size")


def check_shard(num_shards: int, shard_id: int, is_interactive: bool) -> None:
    """Checks that a shard exists, and that the command can translate it; raises SynthesizerError otherwise.

    This is called only if ``--num-shards`` or ``--shard-id`` is given.

    Args:
        num_shards: the value of ``--num-shards``.
        shard_id: the value of ``--shard-id``, which counts from 0.
        is_interactive: whether the command is fairseq-interactive. It reads all of its input, so it refuses any shard.
    """
    if num_shards < 1:
        raise SynthesizerError(f"--num-shards {num_shards}: must be at least 1")
    if not 0 <= shard_id < num_shards:
        raise SynthesizerError(
            f"--shard-id {shard_id}: must be from 0 to {num_shards - 1} with --num-shards {num_shards}"
        )
    if is_interactive:
        raise SynthesizerError(
            f"--num-shards {num_shards}: fairseq-interactive translates its whole input; give each process its own "
            "part of the text, and remove the flag"
        )


@repair(
    "add_args",
    DenoisingTask,
    symptom='`--task denoising` with a Transformer fails with "conflicting option string: --max-source-positions"',
    versions="0.12.2",
    is_needed=lambda: "add_args" in vars(DenoisingTask),
)
def share_flags_with_the_model(original: Callable[..., Any], parser: argparse.ArgumentParser) -> None:
    """Replaces ``DenoisingTask.add_args`` (``original``): accepts flags that the model has added to the parser already.

    Without the replacement, argparse refuses to add the same flag twice. With it, the flag of the model remains, and
    gets the default of the task.
    """

    original(TolerantParser(parser))


class TolerantParser:
    """Stands for a parser of flags, but accepts a flag that the parser has already.

    It has just the one method that fairseq's ``DenoisingTask.add_args`` calls.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser

    def add_argument(self, flag: str, **settings: Any) -> None:
        """Adds a flag to the parser, or changes only its default if the parser has the flag already."""
        try:
            self.parser.add_argument(flag, **settings)
        except argparse.ArgumentError:
            name = flag.lstrip("-").replace("-", "_")
            # The flags that the task shares with a model, such as --max-source-positions, have defaults.
            self.parser.set_defaults(**{name: settings["default"]})
