"""Repairs how fairseq iterates over its batches."""

from collections.abc import Callable
from typing import Any

from fairseq.data.indexed_dataset import IndexedCachedDataset
from fairseq.tasks import FairseqTask

from ..repairs import repair


@repair(
    "get_batch_iterator",
    FairseqTask,
    symptom="A run that is resumed after its first epoch uses different batches than an uninterrupted run",
    versions="all versions",
)
def resume_with_the_same_batches(
    original: Callable[..., Any], self: FairseqTask, dataset: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``FairseqTask.get_batch_iterator`` (``original``): a resumed run has the same batches as before.

    fairseq forms the batches of a training once and uses them in all later epochs. Only their order changes. Which
    sentences are in a batch depends on ``--seed`` plus the number of the epoch in which the process starts. So a run
    that is resumed in epoch 5 would get other batches than the same run without interruption. The replacement always
    lets fairseq form the batches of epoch 1, and then sets the iterator to the current epoch.

    Args:
        original: fairseq's method.
        self: the task.
        dataset: the data set.
        args, kwargs: the other arguments of fairseq's method. ``kwargs["epoch"]`` is the current epoch.

    Returns:
        fairseq's iterator over the batches.
    """
    current_epoch = kwargs.get("epoch", 1)  # fairseq's trainer, the only caller that resumes, passes it by name
    if current_epoch == 1 or not will_reuse_batches(self, dataset, keyword_arguments=kwargs):
        return original(self, dataset, *args, **kwargs)
    arguments_for_epoch_1 = {**kwargs, "epoch": 1}
    iterator = original(self, dataset, *args, **arguments_for_epoch_1)
    # The batches are formed. The epoch of the iterator only sets their order from now on.
    iterator.epoch = current_epoch
    return iterator


def will_reuse_batches(task: FairseqTask, dataset: Any, keyword_arguments: dict[str, Any]) -> bool:
    """Returns whether fairseq forms new batches in this call and will use the same batches in later epochs too.

    The conditions are those of ``FairseqTask.get_batch_iterator``. If its cache of iterators is disabled, or if batches
    are rebuilt, every epoch gets batches of its own, with or without an interruption.

    Args:
        task: the task that forms the batches.
        dataset: the data set.
        keyword_arguments: those of the call of ``FairseqTask.get_batch_iterator``.
    """
    has_batches_already = dataset in task.dataset_to_epoch_iter
    if has_batches_already:
        return False
    # fairseq disables its cache, for example, for sharded data, where every epoch reads another part of the data.
    if keyword_arguments.get("disable_iterator_cache") or keyword_arguments.get("update_epoch_batch_itr"):
        return False
    task_flags = getattr(task, "cfg", None)  # an old task has none
    is_rebuilt_every_epoch = getattr(task_flags, "rebuild_batches", False)
    if is_rebuilt_every_epoch:
        return False
    return task.can_reuse_epoch_itr(dataset)


@repair(
    "__getitem__",
    IndexedCachedDataset,
    symptom="`--dataset-impl cached` fails with a KeyError, because the first batch is read before the cache is filled",
    versions="all versions",
)
def read_what_is_not_cached(original: Callable[..., Any], self: IndexedCachedDataset, i: int) -> Any:
    """Replaces ``IndexedCachedDataset.__getitem__`` (``original``): reads an item that is not in the cache yet.

    With ``--dataset-impl cached``, fairseq reads the first batch of a data set before it fills the cache, which ends in
    a KeyError.
    """
    if i not in self.cache_index:
        self.prefetch([i])
    return original(self, i)
