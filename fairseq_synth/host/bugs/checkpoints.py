"""Repairs how fairseq writes checkpoints."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fairseq.checkpoint_utils
from fairseq.file_io import PathManager

from ..repairs import repair


@repair(
    "copy",
    PathManager,
    symptom="fairseq copies a new checkpoint *onto* checkpoint_last.pt and checkpoint_best.pt",
    versions="all versions",
)
def write_checkpoints_atomically(original_copy: Any, src_path: str, dst_path: str, overwrite: bool = False) -> Any:
    """Replaces fairseq's ``PathManager.copy``: an existing file is replaced only when its new copy is complete.

    fairseq copies a new checkpoint onto checkpoint_last.pt and checkpoint_best.pt. A kill or a full disk in the middle
    would leave them cut short, with the old ones gone.
    """
    if not overwrite or not PathManager.supports_rename(dst_path):
        return original_copy(src_path, dst_path, overwrite=overwrite)
    unfinished = f"{dst_path}.tmp"
    with removed_on_error(unfinished):
        shutil.copyfile(src_path, unfinished)  # raises an error; iopath's own copy only returns False
        os.replace(unfinished, dst_path)
    return True


@repair(
    "torch_persistent_save",
    fairseq.checkpoint_utils,
    symptom="A checkpoint that cannot be written, as on a full disk, leaves a `.tmp` file behind",
    versions="all versions",
)
def remove_unfinished_checkpoints(
    original_torch_persistent_save: Any, obj: Any, path: str, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``torch_persistent_save`` with one that removes its ``.tmp`` file if it cannot write a checkpoint."""
    with removed_on_error(f"{path}.tmp"):
        return original_torch_persistent_save(obj, path, *args, **kwargs)


@contextlib.contextmanager
def removed_on_error(path: str) -> Iterator[None]:
    """Removes the file `path`, if it exists, when the body of the with statement fails."""
    try:
        yield
    except BaseException:
        # the file may not exist; on a read-only disk it cannot be removed, and the first error is the one to report
        with contextlib.suppress(OSError):
            os.remove(path)
        raise


@repair(
    "save_checkpoint",
    fairseq.checkpoint_utils,
    symptom="With `--no-epoch-checkpoints`, a save at the end of an epoch writes no numbered checkpoint",
    versions="all versions",
)
def number_checkpoints_at_epoch_ends(
    original_save_checkpoint: Any, cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any
) -> Any:
    """Replaces ``save_checkpoint`` with one that writes a numbered checkpoint at the end of an epoch too.

    This matters with ``--no-epoch-checkpoints``. Otherwise the state of such a save is only in checkpoint_last.pt, so
    the average of the last checkpoints lacks it. If an epoch has few batches, every save of ``--save-interval-updates``
    may be at the end of one. The replacement tells fairseq that the epoch has not ended.
    """
    if cfg.no_epoch_checkpoints:
        epoch_itr = SimpleNamespace(epoch=epoch_itr.epoch, state_dict=epoch_itr.state_dict, end_of_epoch=lambda: False)
    return original_save_checkpoint(cfg, trainer, epoch_itr, val_loss)
