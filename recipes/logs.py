"""Reads logs of fairseq-train: the losses, speeds and other values that it reports during a training."""

import re
import statistics
from typing import Any

# a value in a line of a log, such as "ppl 9.5" or "ppl=9.5"
FIELD = re.compile(r"([a-z_]+)[= ](-?[\d.]+(?:e[-+]?\d+)?|inf|nan)\b")


def read_lines(log: str, kind: str) -> list[dict[str, float]]:
    """Returns the values in all lines of one kind in a log of fairseq-train: a dictionary {name: value} for each line.

    The lines are in the order of the updates. A training that was interrupted repeats the updates after its last
    checkpoint. So the log may have several lines for the same number of updates. Only the last of them is returned.

    Args:
        log: the text of the log.
        kind: "train_inner" (lines every hundred updates or so), "train" (lines at the end of an epoch) or "valid".
    """
    fields_by_updates: dict[int, dict[str, float]] = {}
    for line in log.splitlines():
        if f"| {kind} |" not in line:
            continue
        fields = {name: float(value) for name, value in FIELD.findall(line)}
        if "num_updates" in fields:
            updates = int(fields["num_updates"])
            fields_by_updates[updates] = fields  # replaces an earlier line for the same number of updates
    return [fields_by_updates[updates] for updates in sorted(fields_by_updates)]


def read_log(log: str) -> dict[str, Any]:
    """Returns what the results in results/*.json say of a training: its size, its time, and its validation curve.

    `log`: the text of a log of fairseq-train.
    """
    training = read_lines(log, "train_inner")
    epochs = read_lines(log, "train")
    validations = read_lines(log, "valid")
    updates = int(max(fields["num_updates"] for fields in training + epochs + validations))
    # A short training may end before the first line of "train_inner". Then the lines at the ends of epochs are used.
    reports = training if training else epochs
    # fairseq's name for the tokens of an update is wpb (words per batch).
    tokens_per_update = statistics.mean(fields["wpb"] for fields in reports)
    return {
        "parameters": read_number_of_parameters(log),
        "updates": updates,
        "target_tokens_updates_x_wpb": round(updates * tokens_per_update),
        "minutes": estimate_minutes(updates, reports),
        "curve": validation_curve(validations),
    }


def read_number_of_parameters(log: str) -> int:
    """Returns the number of a model's trained parameters, from a line of the log such as "num. trained: 1,850,624"."""
    match = re.search(r"num\. trained: ([\d,]+)", log)
    assert match is not None  # fairseq-train prints the line whenever it starts
    return int(match[1].replace(",", ""))


def estimate_minutes(updates: int, reports: list[dict[str, float]]) -> float | None:
    """Returns how many minutes a training takes at its median speed; None if its log reports no speed.

    Pauses are not included, and neither are periods in which the machine was busy with something else.

    Args:
        updates: the number of updates in the training.
        reports: the values {name: value} in each line of the log that reports on updates.
    """
    speeds = [fields["ups"] for fields in reports if "ups" in fields]  # ups is fairseq's name for updates per second
    known_speeds = [speed for speed in speeds if speed != 0]  # it is 0 where fairseq has not measured it yet
    if not known_speeds:
        return None
    seconds = updates / statistics.median(known_speeds)
    return round(seconds / 60, 1)


def validation_curve(validations: list[dict[str, float]]) -> dict[str, list[float]]:
    """Returns the validation curve: the updates of all validations, and the loss, perplexity and accuracy at each.

    `validations`: the values that each validation has reported. A value that is not always reported is left out.
    """
    curve: dict[str, list[float]] = {"updates": [int(fields["num_updates"]) for fields in validations]}
    for name in ("loss", "ppl", "accuracy"):
        if all(name in fields for fields in validations):
            curve[f"valid_{name}"] = [fields[name] for fields in validations]
    return curve
