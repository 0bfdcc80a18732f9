"""The one exception for a user's mistake, and the one line in which the command line prints it."""

import errno
import re
import sys
import traceback
from types import TracebackType
from typing import Optional, Type

# what gloo, NCCL and torch's store say when another process of the run is gone
LOST_PEER = re.compile(
    "Connection (reset|closed) by peer|Timed out (after|waiting)|socket has timed out|ncclRemoteError"
)


class SynthesizerError(ValueError):
    """A flag, a file or a sentence that cannot be used; its message names it and the mend."""


def first_line(error: BaseException, marker: str = "") -> str:
    """The first line of an error's message that holds `marker`, else its first line."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if marker in line), lines[0]).rstrip(".")


def explain(error: BaseException) -> Optional[str]:
    """The one line that tells a user what to mend, or None for an error that needs its traceback."""
    if isinstance(error, FileNotFoundError) and error.filename is not None and raised_in_fairseq(error):
        return f"{error.filename}: no such file or folder"
    if isinstance(error, KeyboardInterrupt) and raised_in_fairseq(error):
        return "interrupted; a training that is started again goes on from its last checkpoint"
    if str(error).startswith("Model file not found"):
        return f"--path: {error}"
    if "--skip-invalid-size-inputs-valid-test" in str(error):
        return f"{error}; a Synthesizer's own limit is --synth-max-length, set in training"
    if isinstance(error, RuntimeError) and LOST_PEER.search(str(error)) and raised_in_fairseq(error):
        return (
            f"another process of this run has ended or hangs ({LOST_PEER.search(str(error))[0]}): see its output; "
            "started again, the run goes on from the last checkpoint"
        )
    cause: Optional[BaseException] = error
    while cause is not None:  # the host wraps some errors in others of its own
        if isinstance(cause, SynthesizerError):
            return str(cause)
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return f"{cause.strerror}: a file could not be written; what was saved before is untouched"
        cause = cause.__cause__ or cause.__context__
    return None


def raised_in_fairseq(error: BaseException) -> bool:
    """Whether fairseq or this plugin was at work; a user's own script keeps its traceback."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith("fairseq") for frame in frames)


def print_explanations() -> None:
    """Installs an excepthook that prints one line where `explain` has one, and otherwise does what it did."""
    previous = sys.excepthook

    def excepthook(cls: Type[BaseException], error: BaseException, trace: Optional[TracebackType]) -> None:
        line = explain(error)
        if line is None:
            previous(cls, error, trace)
        else:
            print(f"fairseq_synth: error: {line}", file=sys.stderr)

    sys.excepthook = excepthook
