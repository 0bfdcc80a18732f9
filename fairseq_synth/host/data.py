"""Repairs of how fairseq forms batches."""

from types import SimpleNamespace
from typing import Any, Iterable, List, Tuple

import fairseq.data.audio.raw_audio_dataset
import fairseq.data.bucket_pad_length_dataset
import fairseq.data.data_utils
import numpy as np
from fairseq.data import LanguagePairDataset, LMContextWindowDataset
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask

from ..errors import SynthesizerError, length_hint
from .repairs import repair, replace


@repair
def restore_numpy_compat() -> bool:
    """fairseq calls ``np.compat.long``, which numpy 2 no longer has (all versions with numpy >= 2)."""
    if hasattr(np, "compat"):
        return False
    np.compat = SimpleNamespace(long=int)  # type: ignore[attr-defined]
    return True


@repair
def find_buckets_with_new_numpy() -> bool:
    """``--num-batch-buckets`` ends in a TypeError: ``np.percentile`` has no ``interpolation`` (all versions).

    numpy 1.22 has renamed the argument to ``method``; newer ones know only that.
    """
    try:
        np.percentile([1], 50, interpolation="lower")  # type: ignore[call-overload]  # of older versions
        return False
    except TypeError:
        pass

    def with_method(get_buckets: Any) -> Any:
        def find_buckets(sizes: np.ndarray, num_buckets: int) -> np.ndarray:
            edges = np.percentile(sizes, np.linspace(0, 100, num_buckets + 1), method="lower")
            return np.unique(edges[1:])

        return find_buckets

    # fairseq's modules hold the function by name
    modules = (
        fairseq.data.data_utils,
        fairseq.data.bucket_pad_length_dataset,
        fairseq.data.audio.raw_audio_dataset,
    )
    return any([replace(module, "get_buckets", with_method) for module in modules])


@repair
def keep_last_batch() -> bool:
    """fairseq drops the last n mod 8 sentences of every data set (after 0.12.2; its issue #5036).

    ``batch_by_size`` leaves out the last batch if its size is no multiple of ``--required-batch-size-multiple``: 100
    test sentences give 96 translations. 0.12.2 keeps it.
    """
    three = np.arange(3)
    sizes = dict(num_tokens_vec=three, max_sentences=8, required_batch_size_multiple=8)
    if fairseq.data.data_utils.batch_by_size(three, None, **sizes):
        return False

    def keeping_all(batch_by_size: Any) -> Any:
        def batch_all(indices: Iterable[int], *args: Any, **kwargs: Any) -> List[Any]:
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

        return batch_all

    return replace(fairseq.data.data_utils, "batch_by_size", keeping_all)


@repair
def keep_bucketed_sentences() -> bool:
    """With ``--num-batch-buckets``, sentences that fit the model are skipped as too long (all versions).

    The last bucket reaches to the longest sentence of the corpus, and its size is what is compared with the model's
    limit, for every sentence in it. Here no bucket is larger than the limit.
    """

    def with_cut_buckets(filter_indices_by_size: Any) -> Any:
        def cut_and_filter(self: LanguagePairDataset, indices: np.ndarray, max_sizes: Any) -> Any:
            if self.buckets is not None and max_sizes is not None:
                limits: Any = max_sizes if isinstance(max_sizes, (tuple, list)) else (max_sizes, max_sizes)
                cut_buckets(self, limits)
            return filter_indices_by_size(self, indices, max_sizes)

        return cut_and_filter

    return replace(LanguagePairDataset, "filter_indices_by_size", with_cut_buckets)


def cut_buckets(dataset: LanguagePairDataset, limits: Tuple[float, float]) -> None:
    """Gives each sentence of at most `limits` (source, target) tokens a padded size of at most that."""
    lengths = dataset.sizes.reshape(len(dataset), -1).T  # (1 or 2, sentences), without padding
    for side, length, limit in zip((dataset.src, dataset.tgt), lengths, limits):
        # in place: the dataset holds the array too, as src_sizes or tgt_sizes
        np.copyto(side.sizes, np.minimum(side.sizes, limit), where=length <= limit, casting="unsafe")
    dataset.bucketed_num_tokens = dataset.num_tokens_vec(np.arange(len(dataset)))
    dataset.buckets = [(None, size) for size in np.unique(dataset.bucketed_num_tokens)]


@repair
def resume_with_the_same_batches() -> bool:
    """A run resumed after its first epoch forms other batches than the run it continues (all versions).

    Batches are formed once, from ``--seed`` plus the epoch that the process starts in, and reused in every epoch
    after it. Here that is always the first epoch; the order of the batches still changes with the epoch.
    """

    def of_first_epoch(get_batch_iterator: Any) -> Any:
        def get_iterator(self: FairseqTask, dataset: Any, *args: Any, **kwargs: Any) -> Any:
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

        return get_iterator

    return replace(FairseqTask, "get_batch_iterator", of_first_epoch)


@repair
def cut_context_padding() -> bool:
    """With ``--context-window`` batches are padded by the whole window, also where no row needs it (all versions).

    A model that takes rows up to a length would refuse such a batch, although every row of it fits.
    """

    def with_cut(collater: Any) -> Any:
        def collate_and_cut(self: LMContextWindowDataset, samples: Any) -> Any:
            batch = collater(self, samples)
            tokens = batch["net_input"]["src_tokens"]
            longest = int(tokens.ne(self.pad_idx).sum(dim=1).max())  # padding is on the right
            batch["net_input"]["src_tokens"] = tokens[:, :longest]
            batch["target"] = batch["target"][:, :longest]
            return batch

        return collate_and_cut

    return replace(LMContextWindowDataset, "collater", with_cut)


@repair
def refuse_rows_left_out() -> bool:
    """``fairseq-eval-lm`` leaves out rows that are longer than the model's limit, and scores the rest (all versions).

    Its ``--tokens-per-sample`` is 1024 by default, so a model trained on shorter rows is scored on the end of the text
    alone. Here the command ends in one line that names the flag.
    """

    def with_check(eval_lm_dataloader: Any) -> Any:
        def check_and_load(self: LanguageModelingTask, dataset: Any, *args: Any, **kwargs: Any) -> Any:
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

        return check_and_load

    return replace(LanguageModelingTask, "eval_lm_dataloader", with_check)
