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
    """A row of the table `MESSAGES`, which explains a certain error of fairseq or torch to a user.

    Attributes:
        error: the class of the error.
        pattern: a regular expression that occurs in the error's text.
        line: a function that gets the match of the pattern and the error, and returns the line to print; or None if it
            cannot explain this error.
    """

    error: type[BaseException]
    pattern: str
    line: Callable[[re.Match[str], BaseException], str | None]


# The rows are in `host.message_table` and `model`; the first that fits an error explains it.
MESSAGES: list[Message] = []


def explain(error: BaseException) -> str | None:
    """Returns one line that tells a user what to do about an error, or None if the error needs its traceback.

    A SynthesizerError and a full disk are always explained. Any other error is explained only if a function of fairseq
    is in its traceback, because a user's own program may raise the same error for another reason.
    """
    causes = chain_of_causes(error)  # including the error itself
    for cause in causes:
        if isinstance(cause, SynthesizerError):
            return join_lines(str(cause))
        if isinstance(cause, OSError) and cause.errno in DISK_FULL:
            file = f"{cause.filename}: " if cause.filename else "a file "
            return f"{file}could not be written ({cause.strerror}); make room, then start the command again"
    is_error_of_user_program = not has_module_in_traceback(error, "fairseq")
    if is_error_of_user_program:
        return None
    for cause in causes:
        line = look_up(cause)
        if line is not None:
            return line
    return None


def join_lines(text: str) -> str:
    """Returns a message as one line. The name of a file or the value of a flag in it may have several."""
    return re.sub(r"\s*\n\s*", " ", text)


def look_up(error: BaseException) -> str | None:
    """Returns the line about an error from the first row of `MESSAGES` that explains it, or None if no row does."""
    for message in MESSAGES:
        match = re.search(message.pattern, str(error))
        if match is None or not isinstance(error, message.error):
            continue
        line = message.line(match, error)
        if line is not None:
            return line
    return None


def chain_of_causes(error: BaseException) -> list[BaseException]:
    """Returns the error, the error that caused it, the cause of that, and so on."""
    causes: list[BaseException] = []
    ids: set[int] = set()  # A class may define when its errors are equal, so errors are told apart by their ids.
    cause: BaseException | None = error
    while cause is not None and id(cause) not in ids:  # A chain may come back to an error.
        causes.append(cause)
        ids.add(id(cause))
        cause = find_cause(cause)
    return causes


def find_cause(error: BaseException) -> BaseException | None:
    """Returns the error that caused this one, or None.

    An error has a cause in two cases:

    * It was raised by ``raise ... from cause``.
    * fairseq or torch caught another error, and raised this one to report it (`is_raised_again`).

    If other code raises an error while it handles one, that may be a mistake in this code. So there is no cause then.
    """
    was_raised_with_from = error.__suppress_context__  # Python sets this in ``raise ... from ...``.
    if was_raised_with_from:
        return error.__cause__  # None after ``raise ... from None``
    if is_raised_again(error):
        return error.__context__  # the error that was being handled
    return None


def is_raised_again(error: BaseException) -> bool:
    """Returns whether fairseq or torch raised an error to report another error, as an Exception or a RuntimeError."""
    package = raising_module(error).split(".")[0]
    return package in ("fairseq", "torch") and type(error) in (Exception, RuntimeError)


def first_line(error: BaseException, containing: str = "") -> str:
    """Returns the first line of an error's message that contains a text; if there is none, the message's first line.

    A full stop at its end is left out. An error without a message has the name of its class.
    """
    lines = str(error).splitlines() or [type(error).__name__]
    for line in lines:
        if containing in line:
            return line.strip().rstrip(".")
    return lines[0].rstrip(".")


def has_fairseq_command(frames: Iterable[tuple[FrameType, int]]) -> bool:
    """Returns whether some of the code that is running belongs to a command of fairseq, such as ``fairseq-train``.

    Args:
        frames: the running functions, as `traceback.walk_stack` and `traceback.walk_tb` return them.
    """
    for frame, _ in frames:
        folder = os.path.dirname(frame.f_code.co_filename)
        if os.path.basename(folder) == "fairseq_cli":
            return True
    return False


def run_command(main: Callable[[], None]) -> None:
    """Runs a command of this project.

    If it raises an error that `explain` knows, one line about it is printed, and the process exits with 1. Any other
    error is raised as it is.

    Args:
        main: the function of the command.
    """
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
    """Returns the name of the module that raised an error, or an empty name if the error was not raised."""
    names = modules_in_traceback(error)
    return names[-1] if names else ""


def modules_in_traceback(error: BaseException) -> list[str]:
    """Returns the name of the module of each function in an error's traceback, from the outermost on."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [frame.f_globals.get("__name__", "") for frame in frames]
