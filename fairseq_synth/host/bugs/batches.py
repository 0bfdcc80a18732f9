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
    """Replaces ``FairseqTask.get_batch_iterator`` (``original``): a resumed training has the same batches as before.

    fairseq calls this method when a training starts or is resumed. The method groups the sentences into batches, and
    usually all later epochs use the same batches in another order. But the grouping depends on the current epoch. For
    example, a training makes its batches in epoch 1. If it is resumed in epoch 5, it makes other batches. The
    replacement makes the batches of epoch 1 again.

    Args:
        original: fairseq's method.
        self: the task.
        dataset: the data set.
        args, kwargs: the other arguments of fairseq's method.

    Returns:
        fairseq's iterator over the batches.
    """
    current_epoch = kwargs.get("epoch", 1)  # fairseq passes it by name when it resumes a training
    is_resumed = current_epoch != 1
    if not is_resumed or not makes_batches_for_all_epochs(self, dataset, arguments=kwargs):
        return original(self, dataset, *args, **kwargs)
    kwargs["epoch"] = 1
    iterator = original(self, dataset, *args, **kwargs)
    # The batches are made now. The training itself goes on with the current epoch, which decides their order.
    iterator.epoch = current_epoch
    return iterator


def makes_batches_for_all_epochs(task: FairseqTask, dataset: Any, arguments: dict[str, Any]) -> bool:
    """Returns whether a call of ``FairseqTask.get_batch_iterator`` makes batches that all later epochs use, too.

    It makes none if the task has kept the batches of an earlier call. In other cases, each epoch has its own batches.

    Args:
        task: the task that makes the batches.
        dataset: the data set.
        arguments: the keyword arguments of the call.
    """
    has_kept_batches = dataset in task.dataset_to_epoch_iter  # {data set: iterator over its batches}
    if has_kept_batches:
        return False
    # Each of these arguments and flags tells fairseq to make new batches in each epoch.
    if arguments.get("disable_iterator_cache"):  # used for sharded data
        return False
    if arguments.get("update_epoch_batch_itr"):
        return False
    task_flags = getattr(task, "cfg", None)  # None for a task without a config
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
