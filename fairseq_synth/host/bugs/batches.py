"""Repairs how fairseq iterates over its batches."""

from typing import Any

from fairseq.data.indexed_dataset import IndexedCachedDataset
from fairseq.tasks import FairseqTask

from ..repairs import repair


@repair(
    "get_batch_iterator",
    FairseqTask,
    symptom="A run resumed after its first epoch forms other batches than the run it continues",
    versions="all versions",
)
def resume_with_the_same_batches(
    original_get_batch_iterator: Any, self: FairseqTask, dataset: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``get_batch_iterator`` with one that forms the same batches in whichever epoch a run is resumed.

    Batches are formed once, from ``--seed`` plus the epoch in which the process starts, and reused in every later
    epoch. With the repair they are always formed from the first epoch; their order still changes with the epoch.
    """
    epoch = kwargs.get("epoch", 1)
    if epoch == 1 or not reuses_batches(self, dataset, kwargs):
        return original_get_batch_iterator(self, dataset, *args, **kwargs)
    kwargs["epoch"] = 1
    iterator = original_get_batch_iterator(self, dataset, *args, **kwargs)
    iterator.epoch = epoch
    return iterator


def reuses_batches(task: FairseqTask, dataset: Any, kwargs: dict[str, Any]) -> bool:
    """Returns whether the batches that are formed now will be used in later epochs too.

    Args:
        task: the task that forms them.
        dataset: the data set.
        kwargs: the keyword arguments of ``get_batch_iterator``.
    """
    is_formed_already = dataset in task.dataset_to_epoch_iter
    # with sharded data every epoch reads another shard
    is_sharded = kwargs.get("disable_iterator_cache") or kwargs.get("update_epoch_batch_itr")
    is_rebuilt = getattr(getattr(task, "cfg", None), "rebuild_batches", False)
    return task.can_reuse_epoch_itr(dataset) and not (is_formed_already or is_sharded or is_rebuilt)


@repair(
    "__getitem__",
    IndexedCachedDataset,
    symptom="Data of `--dataset-impl cached` end in a KeyError: the first batch is read before the cache",
    versions="all versions",
)
def read_what_is_not_cached(original_getitem: Any, self: IndexedCachedDataset, i: int) -> Any:
    """Replaces ``IndexedCachedDataset.__getitem__`` with one that reads an item into the cache if it is not there yet.

    The first batch of a data set is read before its cache is filled.
    """
    if i not in self.cache_index:
        self.prefetch([i])
    return original_getitem(self, i)
