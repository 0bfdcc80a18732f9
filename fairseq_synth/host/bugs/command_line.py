"""Repairs of flags on fairseq's command line that have no effect, or the wrong one."""

import argparse
import importlib.util
from types import SimpleNamespace
from typing import Any

import fairseq.options
from fairseq.data.data_utils import infer_language_pair
from fairseq.tasks.denoising import DenoisingTask
from fairseq.utils import split_paths

from ...errors import SynthesizerError
from ..repairs import repair


def get_namespace(parsed: Any) -> argparse.Namespace:
    """Returns the flags in the result of fairseq's ``parse_args_and_arch``, which may hold unknown ones besides."""
    return parsed[0] if isinstance(parsed, tuple) else parsed


@repair(
    "parse_args_and_arch",
    fairseq.options,
    symptom="`--bf16` makes the command line ask for a TPU",
    versions="0.12.2 and later",
    where=lambda: importlib.util.find_spec("torch_xla") is None,
)
def allow_bf16_without_tpu(original_parse_args_and_arch: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``parse_args_and_arch`` with one that does not ask for a TPU when ``--bf16`` is given.

    Otherwise the command ends in "'NoneType' object has no attribute 'xla_device'". Without torch_xla there can be no
    TPU. Hydra's ``common.bf16=true`` does not have the bug.
    """
    parsed = original_parse_args_and_arch(*args, **kwargs)
    namespace = get_namespace(parsed)
    if getattr(namespace, "bf16", False):
        namespace.tpu = False
    return parsed


@repair(
    "parse_args_and_arch",
    fairseq.options,
    symptom="`--tokenizer moses` without `--source-lang` and `--target-lang` ends in an error of Hydra's",
    versions="all versions",
)
def find_languages_of_tokenizer(original_parse_args_and_arch: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``parse_args_and_arch``: for ``--tokenizer``, the languages are found in the names of the data.

    fairseq finds them there only without a tokenizer.
    """
    parsed = original_parse_args_and_arch(*args, **kwargs)
    namespace = get_namespace(parsed)
    lacks_language = getattr(namespace, "source_lang", "") is None or getattr(namespace, "target_lang", "") is None
    if not getattr(namespace, "tokenizer", None) or not lacks_language:
        return parsed
    source, target = infer_language_pair(split_paths(namespace.data)[0])
    if source is None or target is None:
        raise SynthesizerError(
            f"--tokenizer {namespace.tokenizer}: give --source-lang and --target-lang, which {namespace.data} does not "
            "tell"
        )
    namespace.source_lang = namespace.source_lang or source
    namespace.target_lang = namespace.target_lang or target
    return parsed


@repair(
    "parse_args_and_arch",
    fairseq.options,
    symptom="`fairseq-generate --num-shards N --shard-id I` translates the whole test set, not a part of it",
    versions="all versions",
)
def translate_one_shard(original_parse_args_and_arch: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``parse_args_and_arch``: with ``--num-shards``, fairseq-generate translates only its shard.

    fairseq-generate divides the batches only by ``--distributed-world-size`` and ``--distributed-rank``, which have no
    other effect on this command. fairseq-interactive, which also ignores the flags, refuses them here: it reads all its
    input.
    """
    parsed = original_parse_args_and_arch(*args, **kwargs)
    namespace = get_namespace(parsed)
    num_shards = getattr(namespace, "num_shards", 1)
    shard_id = getattr(namespace, "shard_id", 0)
    if num_shards == 1 and shard_id == 0:
        return parsed
    if num_shards < 1:
        raise SynthesizerError(f"--num-shards {num_shards}: must be at least 1")
    if not 0 <= shard_id < num_shards:
        raise SynthesizerError(
            f"--shard-id {shard_id}: must be from 0 to {num_shards - 1} with --num-shards {num_shards}"
        )
    has_beam_search = hasattr(namespace, "beam")
    if has_beam_search and hasattr(namespace, "buffer_size"):
        raise SynthesizerError(
            f"--num-shards {num_shards}: fairseq-interactive translates all of its input; give each process its own "
            "part of the text, and leave the flag out"
        )
    if has_beam_search:
        # a process of a distributed generation translates its share of the shard
        world_size = namespace.distributed_world_size
        namespace.distributed_rank = shard_id * world_size + (namespace.distributed_rank or 0)
        namespace.distributed_world_size = num_shards * world_size
    return parsed


@repair(
    "add_args",
    DenoisingTask,
    symptom='`--task denoising` with a Transformer ends in "conflicting option string: --max-source-positions"',
    versions="0.12.2",
    where=lambda: "add_args" in vars(DenoisingTask),
)
def share_flags_with_the_model(original_add_args: Any, parser: argparse.ArgumentParser) -> None:
    """Replaces the ``add_args`` of ``--task denoising`` with one that skips flags that the model has added already.

    The defaults of the task are kept for these flags.
    """

    def add_argument(flag: str, **settings: Any) -> None:
        try:
            parser.add_argument(flag, **settings)
        except argparse.ArgumentError:  # the model has added the flag; the task's default counts
            name = flag.lstrip("-").replace("-", "_")
            parser.set_defaults(**{name: settings["default"]})

    original_add_args(SimpleNamespace(add_argument=add_argument))
