"""The one exception for a user's mistake, and the one line in which the command line prints it."""

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from types import FrameType

UNUSABLE_PATH = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)

# each knows the one line for some errors of fairseq's that are a user's mistake, and says None to all others
explanations: list[Callable[[BaseException], str | None]] = []


class SynthesizerError(ValueError):
    """A flag, a file or a sentence that cannot be used; its message names it and what to do."""


def first_line(error: BaseException, marker: str = "") -> str:
    """The first line of an error's message that holds `marker`, else its first line."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if marker in line), lines[0]).rstrip(".")


def explain(error: BaseException) -> str | None:
    """The one line that tells a user what to do, or None for an error that needs its traceback."""
    cause: BaseException | None = error
    seen: set[int] = set()  # a chain of errors may come back to itself
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, SynthesizerError):
            return re.sub(r"\s*\n\s*", " ", str(cause))  # a flag or a name may have several lines
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            name = f"{cause.filename}: " if cause.filename else "a file "
            return f"{name}could not be written ({cause.strerror}); make room, then start the command again"
        cause = cause_of(cause)
    if not raised_in(error, "fairseq"):
        return None
    return next((line for line in (explanation(error) for explanation in explanations) if line), None)


def cause_of(error: BaseException) -> BaseException | None:
    """What an error was raised from.

    fairseq and torch wrap some errors in an Exception or a RuntimeError without saying ``from``. Any other error that
    is raised while one is handled is a mistake of its own.
    """
    wrapper = type(error) in (Exception, RuntimeError) and raised_by(error).split(".")[0] in ("fairseq", "torch")
    return error.__context__ if wrapper and not error.__suppress_context__ else error.__cause__


def of_fairseq_command(frames: Iterable[tuple[FrameType, int]]) -> bool:
    """Whether one of fairseq's commands, ``fairseq-train`` or ``python -m fairseq_cli.train``, is among the callers."""
    folders = (os.path.dirname(frame.f_code.co_filename) for frame, _ in frames)
    return any(os.path.basename(folder) == "fairseq_cli" for folder in folders)


def run_command(main: Callable[[], None]) -> None:
    """Runs a command of this project. An error that `explain` knows ends it with one line."""
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        line = explain(error)
        if line is None:
            raise
        print(f"fairseq_synth: error: {line}", file=sys.stderr)
        sys.exit(1)


def raised_in(error: BaseException, module: str) -> bool:
    """Whether code of a module whose name starts with `module` was at work; a user's own script keeps its traceback."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith(module) for frame in frames)


def raised_by(error: BaseException) -> str:
    """The name of the module whose code raised `error`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__", "") if frames else ""
