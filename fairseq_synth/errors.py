"""The one exception for a user's mistake, and the one line in which the command line prints it."""

import errno
import os
import re
import sys
import traceback
from types import FrameType
from typing import Callable, Iterable, Optional, Set, Tuple

# what gloo, NCCL and torch's store say when another process of the run is gone
LOST_PEER = re.compile(
    "Connection (reset|closed) by peer|Timed out (after|waiting)|socket has timed out|ncclRemoteError"
)
NO_GPU = re.compile("Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available")
UNUSABLE_PATH = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)

# what a model of fairseq_synth with this config is for
TASK_OF_CONFIG = {
    "Transformer": "translation or denoising",
    "LanguageModel": "language_modeling",
    "Roberta": "masked_lm or sentence_prediction",
}

# --synth-max-length of every model that this process has built with such a limit
built_lengths: Set[int] = set()


class SynthesizerError(ValueError):
    """A flag, a file or a sentence that cannot be used; its message names it and what to do."""


def first_line(error: BaseException, marker: str = "") -> str:
    """The first line of an error's message that holds `marker`, else its first line."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if marker in line), lines[0]).rstrip(".")


def explain(error: BaseException) -> Optional[str]:
    """The one line that tells a user what to do, or None for an error that needs its traceback."""
    cause: Optional[BaseException] = error
    seen: Set[int] = set()  # a chain of errors may come back to itself
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, SynthesizerError):
            return str(cause)
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            name = f"{cause.filename}: " if cause.filename else "a file "
            return f"{name}could not be written ({cause.strerror}); make room, then start the command again"
        cause = cause_of(cause)
    return explain_fairseq(error) if raised_in(error, "fairseq") else None


def cause_of(error: BaseException) -> Optional[BaseException]:
    """What an error was raised from.

    fairseq and torch wrap some errors in an Exception or a RuntimeError without saying ``from``. Any other error that
    is raised while one is handled is a mistake of its own.
    """
    wrapper = type(error) in (Exception, RuntimeError) and raised_by(error).split(".")[0] in ("fairseq", "torch")
    return error.__context__ if wrapper and not error.__suppress_context__ else error.__cause__


def of_fairseq_command(frames: Iterable[Tuple[FrameType, int]]) -> bool:
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


def explain_fairseq(error: BaseException) -> Optional[str]:
    """The one line for an error of fairseq's own that is known to be a user's mistake, else None."""
    text = str(error)
    if text.startswith("Model file not found"):
        return f"--path: {text}"
    if text.startswith("Dataset not found"):
        return text
    if isinstance(error, UNUSABLE_PATH) and error.filename is not None:
        reason = "no such file or folder" if isinstance(error, FileNotFoundError) else error.strerror
        return f"{error.filename}: {reason}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; a training that is started again goes on from its last checkpoint"
    if "--skip-invalid-size-inputs-valid-test" in text:
        return text + length_hint(text)
    weights = misfit(error) or misfit(error.__context__)
    if weights is not None:
        named = "ensure that the architectures match" in text
        return (
            f"{text.split(';')[0] if named else 'the checkpoint does not fit'}: {weights}; give the --arch and the "
            "sizes of its training"
        )
    if "The dataset is empty" in text:
        lengths = " or ".join(f"--synth-max-length {n}" for n in sorted(built_lengths))
        others = "; sentences are skipped that are longer than {}, or than other flags allow, such as --max-tokens"
        return text.rstrip(".") + (others.format(lengths) if lengths else "")
    if "min_len cannot be larger than max_len" in text:
        return "--min-len: --max-len-a and --max-len-b allow no translation of that length; lower it, or raise them"
    if NO_GPU.search(text) and raised_in(error, "fairseq.optim.fp16_optimizer"):
        return "--fp16 needs a GPU, and none is found; leave it out, or take --bf16, which a CPU has too"
    if "doesn't match the size of optimizer's group" in text:
        return (
            "--restore-file: the optimizer's state in the checkpoint is of a model with other parameters; give "
            "--reset-optimizer, or --finetune-from-model in its place"
        )
    config = re.search(r"Synthesizer(Transformer|LanguageModel|Roberta)Config", text)
    if (type(error).__name__ == "ConfigAttributeError" and config) or "requires a FairseqMultiModel" in text:
        return (
            f"--task: this task needs a model of its own, not a Synthesizer ({first_line(error)}); take "
            f"{TASK_OF_CONFIG[config[1] if config else 'Transformer']}"
        )
    if type(error).__name__ == "InterpolationKeyError" and "SynthesizerLanguageModelConfig" in text:
        return (
            f"--task: this task does not fit a language model ({first_line(error)}); take --task language_modeling, or "
            "another --arch"
        )
    lost_peer = LOST_PEER.search(text)
    if isinstance(error, RuntimeError) and lost_peer:
        return (
            f"another process of this run has ended or hangs ({lost_peer[0]}): see its output; "
            "started again, the run goes on from the last checkpoint"
        )
    if isinstance(error, (ValueError, AssertionError)) and re.search(r"(^|[\s(])--[a-z]", text):
        # fairseq refuses some flags by name
        return first_line(error) if raised_by(error).startswith("fairseq") else None
    return None


def length_hint(text: str) -> str:
    """What to add to a message if the limit that it names, ``max_positions=(24, 1024)``, may be a Synthesizer's."""
    numbers = re.findall(r"\d+", "".join(re.findall(r"max_positions=(\([^)]*\)|\d+)", text)))
    lengths = built_lengths.intersection(map(int, numbers))
    hint = (
        "; {} is this model's --synth-max-length: longer sentences need --synth-beyond-length tile, with a trained "
        "model --model-overrides \"{{'synth_beyond_length': 'tile'}}\""
    )
    return "".join(hint.format(n) for n in sorted(lengths))


def misfit(error: Optional[BaseException]) -> Optional[str]:
    """Which weights do not fit, in short, if `error` is torch's about a state dict of another model, else None."""
    text = str(error)
    if not text.startswith("Error(s) in loading state_dict"):
        return None
    lacking, unknown = (
        re.findall('"([^"]+)"', "".join(re.findall(f"{kind} key.*", text))) for kind in ("Missing", "Unexpected")
    )
    sizes = re.findall(r"size mismatch for (\S+): .*?(\[.*?\]).*?(\[.*?\])", text)
    found = [f"{name} is {theirs} in the checkpoint and {own} in this model" for name, theirs, own in sizes]
    found += [f"the checkpoint lacks {name}" for name in lacking]
    found += [f"this model has no {name}" for name in unknown]
    return f"{found[0]}{f' (and {len(found) - 1} more)' if found[1:] else ''}" if found else None


def raised_in(error: BaseException, module: str) -> bool:
    """Whether code of a module whose name starts with `module` was at work; a user's own script keeps its traceback."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith(module) for frame in frames)


def raised_by(error: BaseException) -> str:
    """The name of the module whose code raised `error`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__", "") if frames else ""
