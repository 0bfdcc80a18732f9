"""Names the checkpoint that cannot be loaded, and says why."""

import os
import pickle
import re
from typing import Any

import fairseq.checkpoint_utils
import fairseq.optim.lr_scheduler
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer

from ...errors import UNUSABLE_PATH, SynthesizerError, explain, first_line, passes_through
from ..repairs import repair


@repair(
    "load_checkpoint_to_cpu",
    fairseq.checkpoint_utils,
    symptom="A checkpoint that cannot be loaded gives a C++ or pickle error without its name",
    versions="all versions",
)
def name_unreadable_checkpoints(original_load_checkpoint_to_cpu: Any, path: str, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``load_checkpoint_to_cpu`` with one whose errors name the checkpoint and say why it cannot be loaded."""
    try:
        return original_load_checkpoint_to_cpu(path, *args, **kwargs)
    except UNUSABLE_PATH:  # these errors name the file
        raise
    except Exception as error:  # a damaged file can fail anywhere in the loader
        raise SynthesizerError(f"{path}: {explain_unreadable(error)}") from error


def explain_unreadable(error: Exception) -> str:
    """Returns in one line why a checkpoint could not be loaded, and what to do."""
    reason = first_line(error)
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return "not enough memory to load it; end other programs, or take a machine with more"
    if isinstance(error, ImportError):
        return f"refers to a module that is not installed ({reason}); install it"
    refused = re.search(r"GLOBAL (\S+)", str(error))
    if refused:
        return (
            f"refused, it holds {refused[1]}, which is neither a weight nor a setting and might run code; "
            "take a checkpoint that you trust"
        )
    if isinstance(error, pickle.UnpicklingError):
        reason = first_line(error, "Unsupported")
        return f"refused, it is damaged or no checkpoint of torch ({reason}); take one that you trust"
    kind = type(error).__name__
    if passes_through(error, "torch"):
        return f"not a readable checkpoint, perhaps cut short ({kind}: {reason}); take another"
    return (
        f"not a checkpoint of fairseq-train ({kind}: {reason}); give one that it has written, such as "
        "checkpoint_best.pt"
    )


@repair(
    "load_checkpoint",
    Trainer,
    symptom="A `--restore-file` that is not there is no error: the run trains from scratch",
    versions="all versions",
)
def check_restored_checkpoint(
    original_load_checkpoint: Any, self: Trainer, filename: str, *args: Any, **kwargs: Any
) -> Any:
    """Replaces the trainer's ``load_checkpoint`` with one that refuses a ``--restore-file`` that is not there.

    The original trains from scratch then. The replacement also adds the name of the checkpoint to errors about a
    checkpoint that does not fit.
    """
    cfg = self.cfg.checkpoint
    last_checkpoint = os.path.join(cfg.save_dir, f"checkpoint_last{self.checkpoint_suffix}.pt")
    is_resumed = filename == last_checkpoint
    if not is_resumed and not PathManager.isfile(filename):
        raise SynthesizerError(explain_missing_checkpoint(cfg, filename))
    try:
        return original_load_checkpoint(self, filename, *args, **kwargs)
    except Exception as error:
        line = explain(error)
        if line is None or filename in line:
            raise
        advice = "; a new training needs a --save-dir of its own" if is_resumed else ""
        raise SynthesizerError(f"{filename}: {line}{advice}") from error


def explain_missing_checkpoint(cfg: Any, filename: str) -> str:
    """Returns the line about a file that a training shall start from and that is not there."""
    is_continued = filename == getattr(cfg, "continue_once", None)
    flag = "--continue-once" if is_continued else "--restore-file"
    in_save_dir = os.path.join(cfg.save_dir, filename)
    hint = f"; there is {in_save_dir}" if PathManager.isfile(in_save_dir) else ""
    return f"{flag} {filename}: no such file{hint}; give one, or leave the flag out"


@repair(
    "build_lr_scheduler",
    fairseq.optim.lr_scheduler,
    symptom="A training resumed with another `--lr-scheduler` ends in a KeyError, or later in a TypeError",
    versions="all versions",
)
def name_other_scheduler(original_build_lr_scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``build_lr_scheduler``: its scheduler refuses to load the state of another kind of scheduler."""
    scheduler = original_build_lr_scheduler(*args, **kwargs)
    load_state_dict = scheduler.load_state_dict

    def load_checked_state(state_dict: dict[str, Any]) -> None:
        if set(state_dict) != set(scheduler.state_dict()):
            raise SynthesizerError(
                "--lr-scheduler: the training of the checkpoint had another one; give that, or --reset-lr-scheduler"
            )
        load_state_dict(state_dict)

    scheduler.load_state_dict = load_checked_state
    return scheduler
