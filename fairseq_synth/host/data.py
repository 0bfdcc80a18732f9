"""Repairs of how fairseq forms batches."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import fairseq.data.audio.raw_audio_dataset
import fairseq.data.bucket_pad_length_dataset
import fairseq.data.data_utils
import numpy as np
from fairseq.data import LanguagePairDataset, LMContextWindowDataset
from fairseq.data.indexed_dataset import IndexedCachedDataset
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.utils import resolve_max_positions

from ..errors import SynthesizerError
from ..lengths import length_hint
from .repairs import listed, repair


@listed
def restore_numpy_compat() -> bool:
    """fairseq calls ``np.compat.long``, which numpy 2 no longer has (all versions with numpy >= 2)."""
    if hasattr(np, "compat"):
        return False
    np.compat = SimpleNamespace(long=int)  # type: ignore[attr-defined]
    return True


def percentile_has_new_name() -> bool:
    """Whether this is numpy from 1.22 on, which has renamed an argument."""
    try:
        np.percentile([1], 50, interpolation="lower")  # type: ignore[call-overload]  # of older versions
        return False
    except TypeError:
        return True


# fairseq's modules hold the function by name
@repair(
    "get_buckets",
    fairseq.data.data_utils,
    fairseq.data.bucket_pad_length_dataset,
    fairseq.data.audio.raw_audio_dataset,
    where=percentile_has_new_name,
)
def find_buckets_with_new_numpy(_: Any, sizes: np.ndarray, num_buckets: int) -> np.ndarray:
    """``--num-batch-buckets`` ends in a TypeError: ``np.percentile`` has no ``interpolation`` (all versions).

    numpy 1.22 has renamed the argument to ``method``; newer ones know only that.
    """
    return np.unique(np.percentile(sizes, np.linspace(0, 100, num_buckets + 1), method="lower")[1:])


def last_batch_is_dropped() -> bool:
    """Whether three sentences, in batches of eight, are none."""
    three = np.arange(3)
    sizes = dict(num_tokens_vec=three, max_sentences=8, required_batch_size_multiple=8)
    return not fairseq.data.data_utils.batch_by_size(three, None, **sizes)


@repair("batch_by_size", fairseq.data.data_utils, where=last_batch_is_dropped)
def keep_last_batch(batch_by_size: Any, indices: Iterable[int], *args: Any, **kwargs: Any) -> list[Any]:
    """fairseq drops the last n mod 8 sentences of every data set (after 0.12.2; its issue #5036).

    ``batch_by_size`` leaves out the last batch if its size is no multiple of ``--required-batch-size-multiple``: 100
    test sentences give 96 translations. 0.12.2 keeps it.
    """
    if not isinstance(indices, np.ndarray):
        indices = np.fromiter(indices, dtype=np.int64, count=-1)
    if len(indices) == 0:
        return []
    batches = list(batch_by_size(indices, *args, **kwargs))
    fixed_shapes = kwargs.get("fixed_shapes", args[5] if len(args) > 5 else None)
    kept = sum(len(batch) for batch in batches)
    if fixed_shapes is None and kept < len(indices):
        batches.append(indices[kept:])
    return batches


@repair("filter_indices_by_size", LanguagePairDataset)
def keep_bucketed_sentences(filter_by_size: Any, self: LanguagePairDataset, indices: np.ndarray, max_sizes: Any) -> Any:
    """With ``--num-batch-buckets``, sentences that fit the model are skipped as too long (all versions).

    The last bucket reaches to the longest sentence of the corpus, and its size is what is compared with the model's
    limit, for every sentence in it. Here no bucket is larger than the limit.
    """
    if self.buckets is not None and max_sizes is not None:
        limits: Any = max_sizes if isinstance(max_sizes, (tuple, list)) else (max_sizes, max_sizes)
        cut_buckets(self, limits)
    return filter_by_size(self, indices, max_sizes)


def cut_buckets(dataset: LanguagePairDataset, limits: tuple[float, float]) -> None:
    """Gives each sentence of at most `limits` (source, target) tokens a padded size of at most that."""
    lengths = dataset.sizes.reshape(len(dataset), -1).T  # (1 or 2, sentences), without padding
    for side, length, limit in zip((dataset.src, dataset.tgt), lengths, limits):
        # in place: the dataset holds the array too, as src_sizes or tgt_sizes
        np.copyto(side.sizes, np.minimum(side.sizes, limit), where=length <= limit, casting="unsafe")
    dataset.bucketed_num_tokens = dataset.num_tokens_vec(np.arange(len(dataset)))
    dataset.buckets = [(None, size) for size in np.unique(dataset.bucketed_num_tokens)]


@repair("get_batch_iterator", FairseqTask)
def resume_with_the_same_batches(
    get_batch_iterator: Any, self: FairseqTask, dataset: Any, *args: Any, **kwargs: Any
) -> Any:
    """A run resumed after its first epoch forms other batches than the run it continues (all versions).

    Batches are formed once, from ``--seed`` plus the epoch that the process starts in, and reused in every epoch
    after it. Here that is always the first epoch; the order of the batches still changes with the epoch.
    """
    epoch = kwargs.get("epoch", 1)
    reused = (
        self.can_reuse_epoch_itr(dataset)
        and not kwargs.get("disable_iterator_cache")  # sharded data: another shard in each epoch
        and not kwargs.get("update_epoch_batch_itr")
        and not getattr(getattr(self, "cfg", None), "rebuild_batches", False)
    )
    if epoch == 1 or not reused or dataset in self.dataset_to_epoch_iter:
        return get_batch_iterator(self, dataset, *args, **kwargs)
    iterator = get_batch_iterator(self, dataset, *args, **{**kwargs, "epoch": 1})
    iterator.epoch = epoch
    return iterator


@repair("get_batch_iterator", FairseqTask)
def skip_sentences_over_max_tokens(
    get_batch_iterator: Any, self: FairseqTask, dataset: Any, *args: Any, **kwargs: Any
) -> Any:
    """``--skip-invalid-size-inputs-valid-test`` does not skip a sentence of more than ``--max-tokens`` (all versions).

    The command ends in an AssertionError, a training after its first epoch or, in later versions, before it.
    """
    limits, most = kwargs.get("max_positions"), kwargs.get("max_tokens")
    if kwargs.get("ignore_invalid_inputs") and limits is not None and most is not None:
        kwargs["max_positions"] = resolve_max_positions(limits, most)
    return get_batch_iterator(self, dataset, *args, **kwargs)


@repair("__getitem__", IndexedCachedDataset)
def read_what_is_not_cached(getitem: Any, self: IndexedCachedDataset, i: int) -> Any:
    """Data of ``--dataset-impl cached`` end in a KeyError: the first batch is read before the cache (all versions)."""
    if i not in self.cache_index:
        self.prefetch([i])
    return getitem(self, i)


@repair("collater", LMContextWindowDataset)
def cut_context_padding(collater: Any, self: LMContextWindowDataset, samples: Any) -> Any:
    """With ``--context-window`` batches are padded by the whole window, also where no row needs it (all versions).

    A model that takes rows up to a length would refuse such a batch, although every row of it fits.
    """
    batch = collater(self, samples)
    tokens = batch["net_input"]["src_tokens"]
    longest = int(tokens.ne(self.pad_idx).sum(dim=1).max())  # padding is on the right
    batch["net_input"]["src_tokens"] = tokens[:, :longest]
    batch["target"] = batch["target"][:, :longest]
    return batch


@repair("eval_lm_dataloader", LanguageModelingTask)
def refuse_rows_left_out(
    eval_lm_dataloader: Any, self: LanguageModelingTask, dataset: Any, *args: Any, **kwargs: Any
) -> Any:
    """``fairseq-eval-lm`` leaves out rows that are longer than the model's limit, and scores the rest (all versions).

    Its ``--tokens-per-sample`` is 1024 by default, so a model trained on shorter rows is scored on the end of the text
    alone. Here the command ends in one line that names the flag.
    """
    limit = kwargs.get("max_positions", args[2] if len(args) > 2 else None)
    too_long = int((np.asarray(dataset.sizes) > limit).sum()) if isinstance(limit, int) else 0
    if too_long:
        bos = " beside that of --add-bos-token" if getattr(self.args, "add_bos_token", False) else ""
        raise SynthesizerError(
            f"--tokens-per-sample: {too_long} of {len(dataset)} rows are longer than the {limit} tokens that "
            f"the model takes{bos}, and fairseq would leave them out; give at most {limit}, and "
            "--sample-break-mode none for sentences that are longer" + length_hint(f"max_positions={limit}")
        )
    return eval_lm_dataloader(self, dataset, *args, **kwargs)
