"""Reads logs of fairseq-train: the losses, speeds and other values that it reports during a training."""

import re
import statistics
from typing import Any

# a value in a line of a log, such as "ppl 9.5" or "ppl=9.5"
FIELD = re.compile(r"([a-z_]+)[= ](-?[\d.]+(?:e[-+]?\d+)?|inf|nan)\b")


def read_lines(log: str, kind: str) -> list[dict[str, float]]:
    """Returns the values in all lines of one kind in a log of fairseq-train: a dictionary {name: value} for each line.

    The lines are in the order of the updates. A training that was interrupted repeats the updates after its last
    checkpoint. If there are several lines for the same number of updates, the last one counts.

    Args:
        log: the text of the log.
        kind: "train_inner" (lines every hundred updates or so), "train" (lines at the end of an epoch) or "valid".
    """
    fields_by_updates = {}
    for line in log.splitlines():
        if f"| {kind} |" not in line:
            continue
        fields = {name: float(value) for name, value in FIELD.findall(line)}
        if "num_updates" in fields:
            fields_by_updates[fields["num_updates"]] = fields
    return [fields_by_updates[updates] for updates in sorted(fields_by_updates)]


def read_log(log: str) -> dict[str, Any]:
    """Returns what the results in results/*.json say of a training: its size, its time, and its validation curve.

    The time is computed from the median speed. So it does not include pauses, or periods in which the machine was busy
    with something else.

    Args:
        log: the text of a log of fairseq-train.
    """
    training = read_lines(log, "train_inner")
    epochs = read_lines(log, "train")
    validations = read_lines(log, "valid")
    updates = int(max(fields["num_updates"] for fields in training + epochs + validations))
    # A short training may end before the first line of "train_inner". Then the lines at the ends of epochs are used.
    reports = training if training else epochs
    # fairseq's names are ups for updates per second, and wpb (words per batch) for the tokens of an update
    updates_per_second = [fields["ups"] for fields in reports if fields.get("ups")]
    tokens_per_update = statistics.mean(fields["wpb"] for fields in reports)
    if updates_per_second:
        minutes = round(updates / statistics.median(updates_per_second) / 60, 1)
    else:
        minutes = None
    parameters = re.findall(r"num\. trained: ([\d,]+)", log)  # for example "1,850,624", once for each start
    return {
        "parameters": int(parameters[0].replace(",", "")),
        "updates": updates,
        "target_tokens_updates_x_wpb": round(updates * tokens_per_update),
        "minutes": minutes,
        "curve": validation_curve(validations),
    }


def validation_curve(validations: list[dict[str, float]]) -> dict[str, list[float]]:
    """Returns the validation curve: the updates of all validations, and the loss, perplexity and accuracy at each.

    `validations`: the values that each validation has reported. A value that is not always reported is left out.
    """
    curve: dict[str, list[float]] = {"updates": [int(fields["num_updates"]) for fields in validations]}
    for name in ("loss", "ppl", "accuracy"):
        if all(name in fields for fields in validations):
            curve[f"valid_{name}"] = [fields[name] for fields in validations]
    return curve
