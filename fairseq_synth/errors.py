"""`SynthesizerError`, the exception for a user's mistake, and the one line in which commands print it."""

import errno
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from types import FrameType
from typing import NamedTuple

UNUSABLE_PATH = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SynthesizerError(ValueError):
    """Reports a flag, a file or a sentence that cannot be used; its message names it and says what to do."""


class Message(NamedTuple):
    """A row of the table `MESSAGES`: what an error of fairseq or torch means for a user.

    Attributes:
        error: the class of the error.
        pattern: a regular expression that is searched in the error's text.
        line: is called with the match and the error; returns the line to print, or None if it has none for this error.
    """

    error: type[BaseException]
    pattern: str
    line: Callable[[re.Match[str], BaseException], str | None]


# The rows are in `host.message_table` and `model`; the first that fits an error explains it.
MESSAGES: list[Message] = []


def explain(error: BaseException) -> str | None:
    """Returns one line that tells a user what to do about an error, or None if the error needs its traceback."""
    causes = chain_of_causes(error)
    for cause in causes:
        if isinstance(cause, SynthesizerError):
            return re.sub(r"\s*\n\s*", " ", str(cause))  # the name of a file or a flag's value may have several lines
        if isinstance(cause, OSError) and cause.errno in DISK_FULL:
            file = f"{cause.filename}: " if cause.filename else "a file "
            return f"{file}could not be written ({cause.strerror}); make room, then start the command again"
    if not has_module_in_traceback(error, "fairseq"):
        return None  # the traceback of a user's own program stays
    for cause in causes:
        line = look_up(cause)
        if line is not None:
            return line
    return None


def look_up(error: BaseException) -> str | None:
    """Returns the line of the first row of `MESSAGES` that explains an error, or None."""
    for message in MESSAGES:
        match = re.search(message.pattern, str(error))
        if match is None or not isinstance(error, message.error):
            continue
        line = message.line(match, error)
        if line is not None:
            return line
    return None


def chain_of_causes(error: BaseException) -> list[BaseException]:
    """Returns the error, what caused it, the cause of that, and so on."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    # `in` would compare errors by their __eq__, which a class may define; a chain may also come back to itself
    while cause is not None and not any(cause is earlier for earlier in causes):
        causes.append(cause)
        cause = cause_of(cause)
    return causes


def cause_of(error: BaseException) -> BaseException | None:
    """Returns the error that caused this one, or None.

    fairseq and torch wrap some errors in an Exception or a RuntimeError without writing ``from``. Any other error that
    is raised while one is handled is a mistake of its own.
    """
    is_wrapper = type(error) in (Exception, RuntimeError)
    package = raising_module(error).split(".")[0]
    if is_wrapper and package in ("fairseq", "torch") and not error.__suppress_context__:
        return error.__context__
    return error.__cause__


def first_line(error: BaseException, marker: str = "") -> str:
    """Returns the first line of an error's message that contains `marker`, or else its first line."""
    lines = str(error).splitlines() or [type(error).__name__]
    for line in lines:
        if marker in line:
            return line.strip().rstrip(".")
    return lines[0].rstrip(".")


def has_fairseq_command(frames: Iterable[tuple[FrameType, int]]) -> bool:
    """Returns whether one of fairseq's commands is among the callers, such as ``fairseq-train``.

    Args:
        frames: the callers, as `traceback.walk_stack` and `traceback.walk_tb` return them.
    """
    for frame, _ in frames:
        folder = os.path.dirname(frame.f_code.co_filename)
        if os.path.basename(folder) == "fairseq_cli":
            return True
    return False


def run_command(main: Callable[[], None]) -> None:
    """Runs a command of this project. If `explain` knows an error, prints its line and exits with 1."""
    # When fairseq is imported, this module recommends a package that none of our commands needs.
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        line = explain(error)
        if line is None:
            raise
        print(f"fairseq_synth: error: {line}", file=sys.stderr)
        sys.exit(1)


def has_module_in_traceback(error: BaseException, module: str) -> bool:
    """Returns whether the traceback of an error has a function of a module whose name starts with `module`."""
    return any(name.startswith(module) for name in modules_in_traceback(error))


def raising_module(error: BaseException) -> str:
    """Returns the name of the module that raised an error, or "" if it was not raised."""
    names = modules_in_traceback(error)
    return names[-1] if names else ""


def modules_in_traceback(error: BaseException) -> list[str]:
    """Returns the name of the module of each function in an error's traceback, from the outermost on."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [frame.f_globals.get("__name__", "") for frame in frames]
