"""Repairs how fairseq forms batches: no sentence is lost unnoticed, and no batch is longer than its model allows."""

import inspect
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import fairseq.data.audio.raw_audio_dataset
import fairseq.data.bucket_pad_length_dataset
import fairseq.data.data_utils
import numpy as np
from fairseq.data import LanguagePairDataset, LMContextWindowDataset
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.utils import resolve_max_positions

from ...errors import SynthesizerError
from ...lengths import length_hint
from ..repairs import custom_repair, repair


@custom_repair(
    symptom="fairseq calls `np.compat.long`, which numpy 2 no longer has",
    versions="all versions with numpy >= 2",
)
def restore_numpy_compat() -> bool:
    """Adds ``np.compat.long``, which fairseq calls, to numpy 2, which has removed it."""
    if hasattr(np, "compat"):
        return False
    np.compat = SimpleNamespace(long=int)  # type: ignore[attr-defined]
    return True


def percentile_lacks_interpolation() -> bool:
    """Returns whether this numpy (from 1.22 on) has renamed the argument of ``np.percentile`` that fairseq passes."""
    try:
        np.percentile([1], 50, interpolation="lower")  # type: ignore[call-overload]
    except TypeError:
        return True
    return False


# the last two modules have imported the function by its name
@repair(
    "get_buckets",
    fairseq.data.data_utils,
    fairseq.data.bucket_pad_length_dataset,
    fairseq.data.audio.raw_audio_dataset,
    symptom="`--num-batch-buckets` ends in a TypeError: `np.percentile` has no `interpolation`",
    versions="all versions",
    where=percentile_lacks_interpolation,
)
def find_buckets_with_new_numpy(_original_get_buckets: Any, sizes: np.ndarray, num_buckets: int) -> np.ndarray:
    """Replaces fairseq's ``get_buckets`` with one that newer versions of numpy can run.

    fairseq passes ``interpolation`` to ``np.percentile``. numpy 1.22 has renamed that argument to ``method``, and newer
    versions know only the new name.
    """
    percentages = np.linspace(0, 100, num_buckets + 1)
    boundaries = np.percentile(sizes, percentages, method="lower")
    return np.unique(boundaries[1:])  # the first boundary is the shortest sentence


def drops_last_batch() -> bool:
    """Returns whether this fairseq forms no batch at all of three sentences, because they are fewer than eight."""
    sentences = np.arange(3)
    batches = fairseq.data.data_utils.batch_by_size(
        sentences, None, num_tokens_vec=sentences, max_sentences=8, required_batch_size_multiple=8
    )
    return len(batches) == 0


@repair(
    "batch_by_size",
    fairseq.data.data_utils,
    symptom="fairseq drops the last n mod 8 sentences of every data set",
    versions="after 0.12.2; its issue #5036",
    where=drops_last_batch,
)
def keep_last_batch(original_batch_by_size: Any, indices: Iterable[int], *args: Any, **kwargs: Any) -> list[Any]:
    """Replaces fairseq's ``batch_by_size`` with one that keeps the last batch.

    The original leaves it out if its size is not a multiple of ``--required-batch-size-multiple``, 8 by default: 100
    test sentences give 96 translations. 0.12.2 keeps it.
    """
    if not isinstance(indices, np.ndarray):
        indices = np.fromiter(indices, dtype=np.int64, count=-1)
    if len(indices) == 0:
        return []
    batches = list(original_batch_by_size(indices, *args, **kwargs))
    number_kept = sum(len(batch) for batch in batches)
    # fairseq fills batches of fixed shapes in another way, which loses no sentence
    call = inspect.signature(original_batch_by_size).bind(indices, *args, **kwargs)
    has_fixed_shapes = call.arguments.get("fixed_shapes") is not None
    if not has_fixed_shapes and number_kept < len(indices):
        batches.append(indices[number_kept:])
    return batches


@repair(
    "filter_indices_by_size",
    LanguagePairDataset,
    symptom="With `--num-batch-buckets`, sentences that fit the model are skipped as too long",
    versions="all versions",
)
def keep_bucketed_sentences(
    original_filter_indices_by_size: Any, self: LanguagePairDataset, indices: np.ndarray, max_sizes: Any
) -> Any:
    """Replaces ``filter_indices_by_size`` with one that makes no bucket longer than the model's limit.

    The last bucket is as long as the longest sentence of the corpus, and the original compares the length of the bucket
    with the limit for every sentence in it.
    """
    if self.buckets is not None and max_sizes is not None:
        limits: Any = max_sizes if isinstance(max_sizes, (tuple, list)) else (max_sizes, max_sizes)
        cut_buckets(self, limits)
    return original_filter_indices_by_size(self, indices, max_sizes)


def cut_buckets(dataset: LanguagePairDataset, limits: tuple[float, float]) -> None:
    """Shortens the buckets of a dataset: a sentence that fits the model is padded to the model's limit at most.

    Args:
        dataset: its padded sizes and its list of buckets are changed in place.
        limits: the longest source and the longest target that the model takes, in tokens.
    """
    # lengths without padding: (sentences,) without targets, (sentences, 2) with them
    lengths = dataset.sizes.reshape(len(dataset), -1).T
    for side, side_lengths, limit in zip((dataset.src, dataset.tgt), lengths, limits):
        fits = side_lengths <= limit
        # in place, because the dataset also holds this array as src_sizes or tgt_sizes
        np.copyto(side.sizes, np.minimum(side.sizes, limit), where=fits, casting="unsafe")
    dataset.bucketed_num_tokens = dataset.num_tokens_vec(np.arange(len(dataset)))
    dataset.buckets = [(None, size) for size in np.unique(dataset.bucketed_num_tokens)]


@repair(
    "get_batch_iterator",
    FairseqTask,
    symptom="`--skip-invalid-size-inputs-valid-test` does not skip a sentence of more than `--max-tokens`",
    versions="all versions",
)
def skip_sentences_over_max_tokens(
    original_get_batch_iterator: Any, self: FairseqTask, dataset: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``get_batch_iterator`` with one that can also skip sentences of more than ``--max-tokens``.

    It skips them if ``--skip-invalid-size-inputs-valid-test`` is given. The original keeps them, and the command ends
    in an AssertionError: a training after its first epoch or, in later versions, before it.
    """
    limits = kwargs.get("max_positions")
    max_tokens = kwargs.get("max_tokens")
    if kwargs.get("ignore_invalid_inputs") and limits is not None and max_tokens is not None:
        kwargs["max_positions"] = resolve_max_positions(limits, max_tokens)
    return original_get_batch_iterator(self, dataset, *args, **kwargs)


@repair(
    "collater",
    LMContextWindowDataset,
    symptom="With `--context-window` batches are padded by the whole window, also where no row needs it",
    versions="all versions",
)
def cut_context_padding(original_collater: Any, self: LMContextWindowDataset, samples: Any) -> Any:
    """Replaces ``collater`` with one that pads a batch only up to its longest row.

    The original pads all rows by the whole context window. A model with a limit would refuse such a batch, although
    each of its rows fits.
    """
    batch = original_collater(self, samples)
    tokens = batch["net_input"]["src_tokens"]
    row_lengths = tokens.ne(self.pad_idx).sum(dim=1)
    longest = int(row_lengths.max())
    batch["net_input"]["src_tokens"] = tokens[:, :longest]  # padding is on the right
    batch["target"] = batch["target"][:, :longest]
    return batch


@repair(
    "eval_lm_dataloader",
    LanguageModelingTask,
    symptom="`fairseq-eval-lm` leaves out rows that are longer than the model's limit, and scores the rest",
    versions="all versions",
)
def refuse_rows_left_out(
    original_eval_lm_dataloader: Any, self: LanguageModelingTask, dataset: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``eval_lm_dataloader`` with one that raises SynthesizerError if rows are too long for the model.

    The original leaves these rows out. ``--tokens-per-sample`` of ``fairseq-eval-lm`` is 1024 by default, so a model
    trained on shorter rows would be scored only on the end of the text.
    """
    call = inspect.signature(original_eval_lm_dataloader).bind(self, dataset, *args, **kwargs)
    limit = call.arguments.get("max_positions")
    if isinstance(limit, int):
        check_row_lengths(self, dataset, limit)
    return original_eval_lm_dataloader(self, dataset, *args, **kwargs)


def check_row_lengths(task: LanguageModelingTask, dataset: Any, limit: int) -> None:
    """Checks that no row of a text is longer than `limit` tokens; raises SynthesizerError otherwise."""
    number_too_long = int((np.asarray(dataset.sizes) > limit).sum())
    if number_too_long == 0:
        return
    bos = " besides that of --add-bos-token" if getattr(task.args, "add_bos_token", False) else ""
    raise SynthesizerError(
        f"--tokens-per-sample: {number_too_long} of {len(dataset)} rows are longer than the {limit} tokens that the "
        f"model takes{bos}, and fairseq would leave them out; give at most {limit}, and --sample-break-mode none for "
        "sentences that are longer" + length_hint(f"max_positions={limit}")
    )
