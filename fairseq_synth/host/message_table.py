"""Explains errors of fairseq and torch in one line, and prints this line in place of a traceback.

Each row of the table `MESSAGES` has a function that explains an error of one kind. Such a function takes the match of
the row's regular expression in the text of the error, and the error. It returns the line, or None if it cannot explain
this error.
"""

import os
import re
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..errors import (
    MESSAGES,
    Message,
    explain,
    first_line,
    has_fairseq_command,
    has_module_in_traceback,
    raising_module,
)
from ..lengths import explain_empty_dataset, length_hint
from .misfit import explain_misfit
from .repairs import repair


def runs_in_command() -> bool:
    """Returns whether this process runs one of fairseq's commands, and tells Hydra not to print errors if it does.

    To do so, it sets the environment variable HYDRA_FULL_ERROR. Otherwise Hydra would print the errors of
    ``fairseq-hydra-train`` itself, and `print_one_line_errors` would never see them.
    """
    is_command = has_fairseq_command(traceback.walk_stack(None))
    if is_command:
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    return is_command


@repair(
    "excepthook",
    sys,
    symptom="A mistake of the user, such as a missing file, gives a traceback instead of a one-line error",
    versions="all versions",
    is_needed=runs_in_command,
)
def print_one_line_errors(
    original: Callable[..., Any], cls: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Replaces ``sys.excepthook`` (``original``): prints a user's mistake as one line instead of a traceback.

    Python calls this function with an error that ends the program. The line names the flag or file and says what to do.
    The original prints the traceback of an error that was not raised in one of fairseq's commands, or that `explain`
    does not know.
    """
    line = None
    is_raised_in_command = has_fairseq_command(traceback.walk_tb(trace))
    if is_raised_in_command:
        line = explain(error)
    if line is None:
        original(cls, error, trace)
    else:
        print(f"fairseq_synth: error: {line}", file=sys.stderr)


Explanation = Callable[[re.Match[str], BaseException], str]


def always(line: str) -> Explanation:
    """Returns a function that explains every error by the same line, for a row of the table."""

    def explain_by_line(match: re.Match[str], error: BaseException) -> str:
        return line

    return explain_by_line


def quote_error(match: re.Match[str], error: BaseException) -> str:
    """Returns the text of an error that is clear enough without an explanation."""
    return str(error)


def explain_missing_checkpoint(match: re.Match[str], error: BaseException) -> str:
    """Returns the line about a checkpoint of ``--path`` that does not exist: fairseq's text, preceded by the flag."""
    return f"--path: {error}"


def explain_max_tokens(match: re.Match[str], error: BaseException) -> str:
    """Returns the line about a sentence that has more tokens than a batch may have, ``--max-tokens``."""
    max_tokens = match[1]
    return (
        f"--max-tokens {max_tokens}: a sentence has more tokens; raise it, or skip such sentences with "
        "--skip-invalid-size-inputs-valid-test"
    )


def explain_unusable_file(match: re.Match[str], error: BaseException) -> str | None:
    """Returns a line with the file and the reason of an error of the operating system; None if it has no file."""
    assert isinstance(error, OSError)
    if error.filename is None:
        return None
    reason = "no such file or folder" if isinstance(error, FileNotFoundError) else error.strerror
    return f"{error.filename}: {reason}"


def explain_interrupt(match: re.Match[str], error: BaseException) -> str:
    """Returns the line about a command that the user has interrupted; a training can be continued."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = {os.path.basename(frame.f_code.co_filename) for frame in frames}
    is_training = "train.py" in files or "hydra_train.py" in files
    if is_training:
        return "interrupted; a training that is started again goes on from its last checkpoint"
    return "interrupted"


def explain_too_long_sentence(match: re.Match[str], error: BaseException) -> str:
    """Returns fairseq's text about a too long sentence, with advice if a Synthesizer's limit may be the reason."""
    return str(error) + length_hint(str(error))


def explain_missing_gpu(match: re.Match[str], error: BaseException) -> str | None:
    """Returns the line about a flag that needs a GPU where there is none; None if it is not clear which flag it is.

    The flag is clear from the module of torch or fairseq in which the error was raised.
    """
    if has_module_in_traceback(error, "fairseq.optim.fp16_optimizer"):
        return "--fp16 needs a GPU, and none is found; leave it out, or take --bf16, which also works on a CPU"
    if has_module_in_traceback(error, "torch.cuda.profiler"):
        return "--profile marks the training for NVIDIA's profiler and needs a GPU, and none is found; leave it out"
    return None


def explain_lost_process(match: re.Match[str], error: BaseException) -> str:
    """Returns the line that one process of a distributed training prints when it has lost another process."""
    reported_by_torch = match[0]
    return (
        f"another process of this run has ended or hangs ({reported_by_torch}); look for the cause in its output, "
        "and start the run again, which then resumes from the last checkpoint"
    )


def explain_weights(match: re.Match[str], error: BaseException) -> str:
    """Returns the line about a checkpoint whose weights do not fit the model."""
    return explain_misfit(str(error))


def explain_no_sentences(match: re.Match[str], error: BaseException) -> str:
    """Returns the line about a data set whose sentences were all skipped."""
    return explain_empty_dataset(str(error))


def quote_flag_error(match: re.Match[str], error: BaseException) -> str | None:
    """Returns the first line of an error in which fairseq itself names a flag; None if fairseq has not raised it."""
    is_raised_by_fairseq = raising_module(error).startswith("fairseq")
    return first_line(error) if is_raised_by_fairseq else None


# `explain` prints the line of the first row that fits an error and whose function returns a line.
MESSAGES += [
    Message(Exception, "^Model file not found", explain_missing_checkpoint),
    Message(Exception, "^Dataset not found", quote_error),
    Message(
        Exception,
        "^Could not infer language pair",
        always("the folder contains no data for a pair of languages; give the --destdir of fairseq-preprocess"),
    ),
    Message(AssertionError, r"max_tokens(?: limit of |=)(\d+)", explain_max_tokens),
    Message(
        NotImplementedError,
        "^Target-side constraints were provided",
        always(
            "--constraints: cannot be used together with --sampling, --diverse-beam-groups, --diversity-rate or "
            "--match-source-len; leave one of the flags out"
        ),
    ),
    # fairseq asserts that an output is shorter than the longest output, and only constraints can make it longer
    Message(
        AssertionError,
        r"^(\d+) < \1$",
        always(
            "--constraints: no translation within --max-len-a and --max-len-b has all constraints; raise these limits"
        ),
    ),
    Message(
        AssertionError,
        "min_len cannot be larger than max_len",
        always(
            "--min-len: --max-len-a and --max-len-b allow no translation of that length; lower --min-len, or raise the "
            "other two"
        ),
    ),
    Message(
        ValueError,
        "doesn't match the size of optimizer's group",
        always(
            "--restore-file: the optimizer's state in the checkpoint is of a model with other parameters; give "
            "--reset-optimizer, or use --finetune-from-model instead"
        ),
    ),
    Message(OSError, "", explain_unusable_file),
    Message(KeyboardInterrupt, "", explain_interrupt),
    Message(Exception, "--skip-invalid-size-inputs-valid-test", explain_too_long_sentence),
    Message(RuntimeError, r"^Error\(s\) in loading state_dict", explain_weights),
    Message(Exception, "The dataset is empty", explain_no_sentences),
    Message(
        Exception,
        "Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available",
        explain_missing_gpu,
    ),
    # what gloo, NCCL and torch's store report when another process of the run is gone
    Message(
        RuntimeError,
        "Connection (reset|closed) by peer|Timed out (after|waiting)|socket has timed out|ncclRemoteError",
        explain_lost_process,
    ),
    # Any other error of fairseq that names a flag. These two rows come last, because the rows above say more.
    Message(ValueError, r"(^|[\s(])--[a-z]", quote_flag_error),
    Message(AssertionError, r"(^|[\s(])--[a-z]", quote_flag_error),
]
