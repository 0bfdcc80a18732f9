"""Names the checkpoint that cannot be loaded, and says why."""

import contextlib
import os
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import fairseq.checkpoint_utils
import fairseq.optim.lr_scheduler
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer

from ...errors import UNUSABLE_PATH, SynthesizerError, explain, first_line, has_module_in_traceback
from ..repairs import repair


@repair(
    "load_checkpoint_to_cpu",
    fairseq.checkpoint_utils,
    symptom="The error for a checkpoint that cannot be loaded is a C++ or pickle error that does not name the file",
    versions="all versions",
)
def name_unreadable_checkpoints(original: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``fairseq.checkpoint_utils.load_checkpoint_to_cpu`` (``original``): its errors name the checkpoint.

    A checkpoint that cannot be loaded raises a SynthesizerError, which also says why. A path that does not exist or
    cannot be opened raises the same error as before.
    """
    try:
        return original(path, *args, **kwargs)
    except UNUSABLE_PATH:  # errors such as FileNotFoundError, which name the file already
        raise
    except Exception as error:  # a damaged file can raise any kind of error, anywhere in torch.load
        raise SynthesizerError(f"{path}: {explain_unreadable(error)}") from error


def explain_unreadable(error: Exception) -> str:
    """Returns in one line why a checkpoint could not be loaded, and what the user should do.

    Args:
        error: the error that ``load_checkpoint_to_cpu`` of fairseq has raised.
    """
    # torch raises errors of all these kinds, so the order matters: the test for any error of torch comes last.
    reason = first_line(error)  # the rest of the message is often long
    is_out_of_memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
    if is_out_of_memory:
        return "not enough memory to load it; end other programs, or take a machine with more"
    if isinstance(error, ImportError):
        return f"refers to a module that is not installed ({reason}); install it"
    is_refused_by_safe_loader = isinstance(error, pickle.UnpicklingError)
    if is_refused_by_safe_loader:
        return explain_refusal(error)
    kind = type(error).__name__
    is_raised_by_torch = has_module_in_traceback(error, "torch")
    if is_raised_by_torch:
        return (
            f"not a readable checkpoint, perhaps truncated ({kind}: {reason}); copy it again, or use another checkpoint"
        )
    # torch has read the file, but fairseq does not find in it what it expects.
    return (
        f"not a checkpoint of fairseq-train ({kind}: {reason}); give one that it has written, such as "
        "checkpoint_best.pt"
    )


def explain_refusal(error: Exception) -> str:
    """Returns in one line why torch's safe loader has refused a file: it has a dangerous type, or it is damaged."""
    # In the first case, the loader writes "Unsupported global: GLOBAL posix.system was not an allowed global".
    refused_type = re.search(r"GLOBAL (?P<name>\S+)", str(error))
    if refused_type:
        return (
            f"refused, because it contains {refused_type['name']}, which is neither a weight nor a setting and might "
            "run code; use a checkpoint that you trust"
        )
    # The first line of the message advises to load the file without a check. A later line has the reason.
    reason_of_loader = first_line(error, containing="Unsupported")
    return f"refused, because it is damaged or not a checkpoint of torch ({reason_of_loader}); use another checkpoint"


@repair(
    "load_checkpoint",
    Trainer,
    symptom="If the file named by `--restore-file` does not exist, the model is trained from scratch without a warning",
    versions="all versions",
)
def check_restored_checkpoint(
    original: Callable[..., Any], self: Trainer, filename: str, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``Trainer.load_checkpoint`` (``original``): refuses to start from a checkpoint that does not exist.

    fairseq calls this method for the checkpoint_last.pt in ``--save-dir``, which a new training does not have, or for a
    checkpoint that a flag such as ``--restore-file`` names. In both cases, it trains from scratch if the file is
    missing. The replacement raises SynthesizerError if a flag names a missing file. It also adds the name of the
    checkpoint to the errors of loading it (`errors_name_the_checkpoint`).
    """
    settings = self.cfg.checkpoint
    last_checkpoint = os.path.join(settings.save_dir, f"checkpoint_last{self.checkpoint_suffix}.pt")
    is_last_checkpoint = filename == last_checkpoint
    is_named_by_flag = not is_last_checkpoint
    if is_named_by_flag and not PathManager.isfile(filename):
        raise SynthesizerError(explain_missing_checkpoint(settings, filename))
    # The user may not know that there is a checkpoint_last.pt, so errors of loading it also say how to avoid it.
    with errors_name_the_checkpoint(filename, is_last_checkpoint):
        return original(self, filename, *args, **kwargs)


def explain_missing_checkpoint(settings: Any, filename: str) -> str:
    """Returns the line about a checkpoint that a training should start from, but that does not exist.

    Args:
        settings: fairseq's flags for checkpoints.
        filename: the checkpoint, which comes from ``--restore-file`` or ``--continue-once``.
    """
    if filename == getattr(settings, "continue_once", None):
        flag = "--continue-once"
    else:
        flag = "--restore-file"
    # Perhaps the user has left out the folder.
    path_in_save_dir = os.path.join(settings.save_dir, filename)
    hint = f"; there is {path_in_save_dir}" if PathManager.isfile(path_in_save_dir) else ""
    return f"{flag} {filename}: no such file{hint}; give one, or leave the flag out"


@contextlib.contextmanager
def errors_name_the_checkpoint(filename: str, is_last_checkpoint: bool) -> Iterator[None]:
    """Adds the name of a checkpoint to an error that is raised in the body of the with statement.

    Only an error that `explain` knows is changed, because the user sees its line instead of a traceback. It becomes a
    SynthesizerError. An error whose line has the name already is raised unchanged.

    Args:
        filename: the checkpoint from which the training starts.
        is_last_checkpoint: whether it is the checkpoint_last.pt in ``--save-dir``. The user may not know that it is
            there, so the line gets the advice to take another folder.
    """
    try:
        yield
    except Exception as error:
        line = explain(error)
        if line is None or filename in line:
            raise
        advice = "; a new training needs a --save-dir of its own" if is_last_checkpoint else ""
        raise SynthesizerError(f"{filename}: {line}{advice}") from error


@repair(
    "build_lr_scheduler",
    fairseq.optim.lr_scheduler,
    symptom="A training that is resumed with another `--lr-scheduler` fails with a KeyError or, later, a TypeError",
    versions="all versions",
)
def name_other_scheduler(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces ``fairseq.optim.lr_scheduler.build_lr_scheduler`` (``original``): the scheduler checks what it loads.

    When a training is resumed, fairseq calls ``scheduler.load_state_dict`` with the state in the checkpoint. The
    replacement makes this method raise SynthesizerError if the state is that of another kind of scheduler.
    """
    scheduler = original(*args, **kwargs)
    original_load_state_dict = scheduler.load_state_dict

    def load_checked_state(state_dict: dict[str, Any]) -> None:
        """Loads the state if it has the same keys as the scheduler's own state; other kinds have other keys."""
        if set(state_dict) != set(scheduler.state_dict()):
            raise SynthesizerError(
                "--lr-scheduler: the checkpoint was trained with another scheduler; use that scheduler, or "
                "--reset-lr-scheduler"
            )
        original_load_state_dict(state_dict)

    scheduler.load_state_dict = load_checked_state
    return scheduler
