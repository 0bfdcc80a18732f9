"""Reads the log of a training: the figures that fairseq reports over the updates."""

import re
import statistics
from typing import Any

FIELD = re.compile(r"([a-z_]+)[= ](-?[\d.]+(?:e[-+]?\d+)?|inf|nan)\b")


def read_lines(log: str, kind: str) -> list[dict[str, float]]:
    """Returns the fields of all lines of a kind in a log: train_inner, train or valid.

    There is one line for each number of updates, in their order. A run that was resumed repeats the updates after its
    last checkpoint, and then the last line counts.
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
    """Returns what a log says of a training, as results/*.json keep it: its size, its time, and the validation curve.

    The minutes are the updates divided by the median number of updates per second. So they are without pauses, and
    without what slowed the training down for a while.
    """
    training = read_lines(log, "train_inner")
    epochs = read_lines(log, "train")
    validation = read_lines(log, "valid")
    updates = int(max(fields["num_updates"] for fields in training + epochs + validation))
    measured = training or epochs
    speeds = [fields["ups"] for fields in measured if fields.get("ups")]
    tokens_per_update = statistics.mean(fields["wpb"] for fields in measured)
    parameters = re.findall(r"num\. trained: ([\d,]+)", log)
    return {
        "parameters": int(parameters[0].replace(",", "")),
        "updates": updates,
        "target_tokens_updates_x_wpb": round(updates * tokens_per_update),
        "minutes": round(updates / statistics.median(speeds) / 60, 1) if speeds else None,
        "curve": validation_curve(validation),
    }


def validation_curve(validation: list[dict[str, float]]) -> dict[str, list[float]]:
    """Returns the updates of all validations, and their loss, perplexity and accuracy as far as they are reported."""
    curve: dict[str, list[float]] = {"updates": [int(fields["num_updates"]) for fields in validation]}
    for name in ("loss", "ppl", "accuracy"):
        if all(name in fields for fields in validation):
            curve[f"valid_{name}"] = [fields[name] for fields in validation]
    return curve
