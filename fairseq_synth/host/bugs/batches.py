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

    fairseq calls this method when a training starts or is resumed. Usually it divides the sentences into batches once,
    and all later epochs use these batches in another order. But the division depends on the epoch in which it is made.
    So if a run is resumed in epoch 5, its batches differ from those that it has used before, which were made in
    epoch 1. The replacement makes the batches of epoch 1 in each case.

    Args:
        original: fairseq's method.
        self: the task.
        dataset: the data set.
        args, kwargs: the other arguments of fairseq's method.

    Returns:
        fairseq's iterator over the batches.
    """
    current_epoch = kwargs.get("epoch", 1)  # fairseq's trainer, the only caller that resumes, passes it by name
    is_resumed = current_epoch != 1
    if is_resumed and makes_batches_for_all_epochs(self, dataset, arguments=kwargs):
        arguments_for_epoch_1 = {**kwargs, "epoch": 1}
        iterator = original(self, dataset, *args, **arguments_for_epoch_1)
        # The batches are made now. From here on, the iterator uses its epoch only to choose the order of the batches,
        # and to count the epochs. Without this line, the training would start again with epoch 1.
        iterator.epoch = current_epoch
        return iterator
    return original(self, dataset, *args, **kwargs)


def makes_batches_for_all_epochs(task: FairseqTask, dataset: Any, arguments: dict[str, Any]) -> bool:
    """Returns whether a call of ``FairseqTask.get_batch_iterator`` makes batches that all later epochs use, too.

    Args:
        task: the task that makes the batches.
        dataset: the data set.
        arguments: the keyword arguments of the call.
    """
    has_batches_already = dataset in task.dataset_to_epoch_iter  # {data set: iterator over its batches}
    if has_batches_already:
        return False
    # In each of the following cases, every epoch makes batches of its own.
    if arguments.get("disable_iterator_cache"):  # such as for sharded data
        return False
    if arguments.get("update_epoch_batch_itr"):
        return False
    task_flags = getattr(task, "cfg", None)  # An old task has none.
    if getattr(task_flags, "rebuild_batches", False):
        return False
    can_reuse_batches: bool = task.can_reuse_epoch_itr(dataset)
    return can_reuse_batches


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
