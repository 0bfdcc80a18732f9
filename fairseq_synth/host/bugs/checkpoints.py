"""Repairs how fairseq writes checkpoints."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import fairseq.checkpoint_utils
from fairseq.file_io import PathManager

from ..repairs import repair


@repair(
    "copy",
    PathManager,
    symptom="If writing checkpoint_last.pt or checkpoint_best.pt is interrupted, the old file is lost, too",
    versions="all versions",
)
def write_checkpoints_atomically(
    original: Callable[..., Any], src_path: str, dst_path: str, overwrite: bool = False
) -> Any:
    """Replaces ``PathManager.copy`` (``original``): an existing file is replaced only when its new copy is complete.

    fairseq calls this function to copy a new checkpoint onto checkpoint_last.pt and checkpoint_best.pt. If the process
    is killed or the disk is full in the middle, the file is cut short and the old checkpoint is lost. The replacement
    writes the copy to another file first, and then renames it. If the copy must not overwrite a file, or if files
    cannot be renamed where it goes, the original is called.

    Returns:
        True, or what the original returns.
    """
    may_replace_a_file = overwrite and PathManager.supports_rename(dst_path)
    if not may_replace_a_file:
        return original(src_path, dst_path, overwrite=overwrite)
    unfinished_copy = f"{dst_path}.tmp"
    with removed_on_error(unfinished_copy):
        # The original is not called, because it would return False instead of raising an error.
        shutil.copyfile(src_path, unfinished_copy)
        os.replace(unfinished_copy, dst_path)
    return True


@repair(
    "torch_persistent_save",
    fairseq.checkpoint_utils,
    symptom="If a checkpoint cannot be written, for example on a full disk, a `.tmp` file is left behind",
    versions="all versions",
)
def remove_unfinished_checkpoints(original: Callable[..., Any], obj: Any, path: str, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``fairseq.checkpoint_utils.torch_persistent_save`` (``original``): leaves no unfinished file behind.

    fairseq writes a checkpoint to PATH.tmp and then renames it. If an error occurs, the replacement removes PATH.tmp.
    """
    with removed_on_error(f"{path}.tmp"):
        return original(obj, path, *args, **kwargs)


@contextlib.contextmanager
def removed_on_error(path: str) -> Iterator[None]:
    """Removes the file `path`, if it exists, when the body of the with statement raises an error."""
    try:
        yield
    except BaseException:
        # If the file cannot be removed, as on a read-only disk, the user should see the first error, not this one.
        with contextlib.suppress(OSError):
            os.remove(path)
        raise


@repair(
    "save_checkpoint",
    fairseq.checkpoint_utils,
    symptom="With `--no-epoch-checkpoints`, `--save-interval-updates` saves no checkpoint at the end of an epoch",
    versions="all versions",
)
def number_checkpoints_at_epoch_ends(
    original: Callable[..., Any], cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any
) -> Any:
    """Replaces ``fairseq.checkpoint_utils.save_checkpoint`` (``original``): leaves out no checkpoint after N updates.

    With ``--save-interval-updates N``, fairseq writes a checkpoint every N updates. Within an epoch, it is called
    checkpoint_EPOCH_UPDATES.pt, for example checkpoint_2_500.pt. If the N updates end together with an epoch, it is
    called checkpointEPOCH.pt, for example checkpoint2.pt. But ``--no-epoch-checkpoints`` forbids such files, and then
    this checkpoint is missing. The replacement tells fairseq that the epoch has not ended. So the checkpoint gets a
    name of the first form.

    Args:
        original: fairseq's function.
        cfg: the flags for checkpoints.
        trainer: fairseq's trainer.
        epoch_itr: the iterator over the batches of the epoch.
        val_loss: the validation loss, or None.
    """
    if cfg.no_epoch_checkpoints:
        never_at_end_of_epoch = IteratorWithinEpoch(epoch_itr)
        return original(cfg, trainer, never_at_end_of_epoch, val_loss)
    return original(cfg, trainer, epoch_itr, val_loss)


class IteratorWithinEpoch:
    """Stands for an iterator over the batches of an epoch, but always says that the epoch has not ended.

    It has just the three attributes that fairseq's ``save_checkpoint`` reads.
    """

    def __init__(self, iterator: Any) -> None:
        self.epoch = iterator.epoch
        self.state_dict = iterator.state_dict

    def end_of_epoch(self) -> bool:
        """Returns False."""
        return False
