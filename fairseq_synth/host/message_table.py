"""Fills the table of messages, what fairseq's own errors mean in one line, and prints that in place of a traceback."""

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
    passes_through,
    raising_module,
)
from ..lengths import explain_empty_dataset, length_hint
from .misfit import explain_misfit
from .repairs import repair


def runs_in_command() -> bool:
    """Returns whether this process is one of fairseq's commands, and lets Hydra leave such a command's errors to us.

    Hydra prints the errors of ``fairseq-hydra-train`` itself unless the variable HYDRA_FULL_ERROR is set.
    """
    is_command = has_fairseq_command(traceback.walk_stack(None))
    if is_command:
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    return is_command


@repair(
    "excepthook",
    sys,
    symptom="A user's mistake, such as a missing file, ends in a traceback",
    versions="all versions",
    where=runs_in_command,
)
def print_one_line_errors(
    original_excepthook: Any, cls: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Replaces Python's excepthook: prints a user's mistake as one line that names the flag or file, without traceback.

    `explain` writes the line. An error for which it has none keeps its traceback. This is for errors that end one of
    fairseq's commands; a program that registers the plugin itself keeps its excepthook.
    """
    line = explain(error) if has_fairseq_command(traceback.walk_tb(trace)) else None
    if line is None:
        original_excepthook(cls, error, trace)
    else:
        print(f"fairseq_synth: error: {line}", file=sys.stderr)


Explanation = Callable[[re.Match[str], BaseException], str]


def always(line: str) -> Explanation:
    """Returns the explanation that is the same line for every error of a row."""
    return lambda match, error: line


def quote_error(match: re.Match[str], error: BaseException) -> str:
    """Returns the error's own text."""
    return str(error)


def explain_missing_checkpoint(match: re.Match[str], error: BaseException) -> str:
    """Names the flag in front of fairseq's own text."""
    return f"--path: {error}"


def explain_max_tokens(match: re.Match[str], error: BaseException) -> str:
    """Says what to do about a sentence that is longer than a batch may be."""
    return (
        f"--max-tokens {match[1]}: a sentence has more tokens; raise it, or skip such sentences with "
        "--skip-invalid-size-inputs-valid-test"
    )


def explain_unusable_file(match: re.Match[str], error: BaseException) -> str | None:
    """Names the file and the reason, if the operating system's error has a file."""
    assert isinstance(error, OSError)
    if error.filename is None:
        return None
    reason = "no such file or folder" if isinstance(error, FileNotFoundError) else error.strerror
    return f"{error.filename}: {reason}"


def explain_interrupt(match: re.Match[str], error: BaseException) -> str:
    """Says that the command was interrupted, and that a training can be continued."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = {os.path.basename(frame.f_code.co_filename) for frame in frames}
    if files & {"train.py", "hydra_train.py"}:
        return "interrupted; a training that is started again goes on from its last checkpoint"
    return "interrupted"


def explain_too_long_sentence(match: re.Match[str], error: BaseException) -> str:
    """Adds to fairseq's own text what a Synthesizer's limit is, if it may be the reason."""
    return str(error) + length_hint(str(error))


def explain_missing_gpu(match: re.Match[str], error: BaseException) -> str | None:
    """Names the flag that needs a GPU, or returns None if it is not known."""
    if passes_through(error, "fairseq.optim.fp16_optimizer"):
        return "--fp16 needs a GPU, and none is found; leave it out, or take --bf16, which a CPU has too"
    if passes_through(error, "torch.cuda.profiler"):
        return "--profile marks the training for NVIDIA's profiler and needs a GPU, and none is found; leave it out"
    return None


def explain_lost_process(match: re.Match[str], error: BaseException) -> str:
    """Says that another process of a distributed training is gone."""
    return (
        f"another process of this run has ended or hangs ({match[0]}): see its output; started again, the run goes on "
        "from the last checkpoint"
    )


def quote_flag_error(match: re.Match[str], error: BaseException) -> str | None:
    """Returns the text of an error in which fairseq itself names a flag."""
    is_raised_by_fairseq = raising_module(error).startswith("fairseq")
    return first_line(error) if is_raised_by_fairseq else None


MESSAGES += [
    Message(Exception, "^Model file not found", explain_missing_checkpoint),
    Message(Exception, "^Dataset not found", quote_error),
    Message(
        Exception,
        "^Could not infer language pair",
        always("no data of a pair of languages is in this folder; give the --destdir of fairseq-preprocess"),
    ),
    Message(AssertionError, r"max_tokens(?: limit of |=)(\d+)", explain_max_tokens),
    Message(
        NotImplementedError,
        "^Target-side constraints were provided",
        always(
            "--constraints: not with --sampling, --diverse-beam-groups, --diversity-rate or --match-source-len; leave "
            "one of the two out"
        ),
    ),
    Message(
        AssertionError,
        r"^(\d+) < \1$",
        always("--constraints: no translation of --max-len-a and --max-len-b tokens has all of them; raise these"),
    ),
    Message(
        AssertionError,
        "min_len cannot be larger than max_len",
        always("--min-len: --max-len-a and --max-len-b allow no translation of that length; lower it, or raise them"),
    ),
    Message(
        ValueError,
        "doesn't match the size of optimizer's group",
        always(
            "--restore-file: the optimizer's state in the checkpoint is of a model with other parameters; give "
            "--reset-optimizer, or --finetune-from-model in its place"
        ),
    ),
    Message(OSError, "", explain_unusable_file),
    Message(KeyboardInterrupt, "", explain_interrupt),
    Message(Exception, "--skip-invalid-size-inputs-valid-test", explain_too_long_sentence),
    Message(RuntimeError, r"^Error\(s\) in loading state_dict", lambda match, error: explain_misfit(str(error))),
    Message(Exception, "The dataset is empty", lambda match, error: explain_empty_dataset(str(error))),
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
    # fairseq refuses some flags by name
    Message(ValueError, r"(^|[\s(])--[a-z]", quote_flag_error),
    Message(AssertionError, r"(^|[\s(])--[a-z]", quote_flag_error),
]
