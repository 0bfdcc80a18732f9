"""A user's mistake, in one line: what fairseq's own errors mean."""

import os
import re
import sys
import traceback
from types import TracebackType
from typing import Any

from ..errors import explain, explanations, first_line, of_fairseq_command, raised_by, raised_in
from ..lengths import known_limits, length_hint
from .repairs import repair

# what gloo, NCCL and torch's store say when another process of the run is gone
LOST_PEER = re.compile(
    "Connection (reset|closed) by peer|Timed out (after|waiting)|socket has timed out|ncclRemoteError"
)
NO_GPU = re.compile("Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available")
# errors of fairseq's: their class, a pattern, and the line, with {0} for the message and {1} for the pattern's group
LINES: tuple[tuple[type[BaseException], str, str], ...] = (
    (Exception, "^Model file not found", "--path: {0}"),
    (Exception, "^Dataset not found", "{0}"),
    (
        Exception,
        "^Could not infer language pair",
        "no data of a pair of languages is in this folder; give the --destdir of fairseq-preprocess",
    ),
    (
        AssertionError,
        r"max_tokens(?: limit of |=)(\d+)",
        "--max-tokens {1}: a sentence has more tokens; raise it, or skip such sentences with "
        "--skip-invalid-size-inputs-valid-test",
    ),
    (
        NotImplementedError,
        "^Target-side constraints were provided",
        "--constraints: not with --sampling, --diverse-beam-groups, --diversity-rate or --match-source-len; leave "
        "one of the two out",
    ),
    (
        AssertionError,
        r"^(\d+) < \1$",
        "--constraints: no translation of --max-len-a and --max-len-b tokens has all of them; raise these",
    ),
    (
        AssertionError,
        "min_len cannot be larger than max_len",
        "--min-len: --max-len-a and --max-len-b allow no translation of that length; lower it, or raise them",
    ),
    (
        ValueError,
        "doesn't match the size of optimizer's group",
        "--restore-file: the optimizer's state in the checkpoint is of a model with other parameters; give "
        "--reset-optimizer, or --finetune-from-model in its place",
    ),
)


def is_command() -> bool:
    """Whether this is one of fairseq's commands."""
    found = of_fairseq_command(traceback.walk_stack(None))
    if found:
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    return found


@repair("excepthook", sys, where=is_command)
def print_one_line_errors(
    excepthook: Any, cls: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """A user's mistake, such as a missing file, ends in a traceback (all versions).

    Where `explain` has a line that names the flag or file, that line is printed in its place. This is for errors that
    end one of fairseq's commands; a program that registers the plugin by itself keeps its excepthook. Hydra, which
    prints the errors of ``fairseq-hydra-train``, leaves them to Python (HYDRA_FULL_ERROR).
    """
    line = explain(error) if of_fairseq_command(traceback.walk_tb(trace)) else None
    if line is None:
        excepthook(cls, error, trace)
    else:
        print(f"fairseq_synth: error: {line}", file=sys.stderr)


def explain_fairseq(error: BaseException) -> str | None:
    """The one line for an error of fairseq's own that is known to be a user's mistake, else None."""
    text = str(error)
    for kind, pattern, line in LINES:
        found = re.search(pattern, text)
        if found and isinstance(error, kind):
            return line.format(text, *found.groups())
    if isinstance(error, OSError) and error.filename is not None:
        reason = "no such file or folder" if isinstance(error, FileNotFoundError) else error.strerror
        return f"{error.filename}: {reason}"
    if isinstance(error, KeyboardInterrupt):
        files = {os.path.basename(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)}
        is_training = files & {"train.py", "hydra_train.py"}
        goes_on = "; a training that is started again goes on from its last checkpoint"
        return f"interrupted{goes_on if is_training else ''}"
    if "--skip-invalid-size-inputs-valid-test" in text:
        return text + length_hint(text)
    weights = misfit(error) or misfit(error.__context__)
    if weights is not None:
        return weights
    if "The dataset is empty" in text:
        lengths = " or ".join(f"--synth-max-length {n}" for n in sorted(known_limits))
        others = "; sentences are skipped that are longer than {}, or than other flags allow, such as --max-tokens"
        return text.rstrip(".") + (others.format(lengths) if lengths else "")
    if NO_GPU.search(text) and raised_in(error, "fairseq.optim.fp16_optimizer"):
        return "--fp16 needs a GPU, and none is found; leave it out, or take --bf16, which a CPU has too"
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


explanations.append(explain_fairseq)


def misfit(error: BaseException | None) -> str | None:
    """Which weights do not fit, in short, if `error` is torch's about a state dict of another model, else None."""
    text = str(error)
    if not text.startswith("Error(s) in loading state_dict"):
        return None
    lacking, unknown = (
        re.findall('"([^"]+)"', "".join(re.findall(f"{kind} key.*", text))) for kind in ("Missing", "Unexpected")
    )
    sizes = re.findall(r"size mismatch for (\S+): .*?(\[.*?\]).*?(\[.*?\])", text)
    for name, *shapes in sizes:
        theirs, own = (int(re.findall(r"\d+", shape)[0]) for shape in shapes)
        if name.endswith("embed_tokens.weight") and own != theirs:
            return (
                f"the data have another dictionary ({own} words, {theirs} in the training); give the data of the "
                "training, or data made with its dictionary (--srcdict and --tgtdict of fairseq-preprocess)"
            )
        if name.endswith("sentence_encoder.embed_positions.weight"):  # fairseq has two rows before the positions
            return (
                f"--max-positions {own - 2}: the checkpoint was trained with {theirs - 2}; give that, or another "
                "checkpoint"
            )
        if name.endswith((".E", ".F")):
            return (
                f"{name} is {shapes[0]} in the checkpoint and {shapes[1]} in this model; give the --linformer-k, "
                "--linformer-sharing and --max-positions of the training"
            )
    found = [f"{name} is {theirs} in the checkpoint and {own} in this model" for name, theirs, own in sizes]
    found += [f"the checkpoint lacks {name}" for name in lacking]
    found += [f"this model has no {name}" for name in unknown]
    if not found:
        return None
    others = f" (and {len(found) - 1} more)" if found[1:] else ""
    return f"the checkpoint does not fit: {found[0]}{others}; give the --arch and the sizes of its training"
