#!/usr/bin/env python
"""Draws the loss, the perplexity and the score of one or more runs over the updates.

    scripts/plot.py RUN_DIR [RUN_DIR ...] [--out FILE]

    scripts/plot.py runs/mine-*-seed1 --out curves.png

RUN_DIR is the folder of a run of train.sh, which may still be running. The losses and perplexities come from its log
(train.log). The scores come from evaluate.sh, or from the validations during training if they compute BLEU or accuracy
(for example, with train.sh ... -- --eval-bleu --eval-bleu-remove-bpe).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipes.catalog import TASKS  # noqa: E402
from recipes.logs import read_lines  # noqa: E402
from recipes.steps import UserError, atomic_write  # noqa: E402

VALIDATION_SCORES = ("bleu", "accuracy")  # what fairseq can report of a validation, apart from the losses


class Curve(NamedTuple):
    """How a loss or score develops during a training: ``values[i]`` was measured after ``updates[i]`` updates."""

    updates: list[float]
    values: list[float]


class Score(NamedTuple):
    """A score on the test set: the name of the metric, and the value."""

    heading: str
    value: float


class Curves(NamedTuple):
    """All that is drawn for one run. A curve is empty if its values were not computed during the training."""

    name: str
    training_loss: Curve
    validation_loss: Curve
    perplexity: Curve
    validation_score: Curve
    test_score: Score | None


def main() -> None:
    """Draws the curves of the runs that the command line names, and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="folder of a run of train.sh")
    parser.add_argument("--out", type=Path, metavar="FILE", help="picture (default: curves.png in the first RUN_DIR)")
    args = parser.parse_args()
    runs = [read_curves(folder) for folder in args.runs]
    out = args.out or args.runs[0] / "curves.png"
    draw(runs, out)
    print("wrote", out)


def read_curves(folder: Path) -> Curves:
    """Returns the curves in the log of a run, and its score on the test set.

    Args:
        folder: the folder of the run.

    Raises:
        UserError: the folder has no log of a training, or the log has no losses yet.
    """
    logs = sorted(folder.glob("train*.log"))
    if not logs:
        raise UserError(f"{folder}: has no train.log; name a run of train.sh")
    log = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in logs)
    training = read_lines(log, "train_inner")
    validation = read_lines(log, "valid")
    if not training and not validation:
        raise UserError(f"{logs[0]}: has no losses yet; wait until the training has reported some")
    return Curves(
        name=folder.resolve().name,
        training_loss=make_curve(training, "loss"),
        validation_loss=make_curve(validation, "loss"),
        perplexity=make_curve(validation, "ppl"),
        validation_score=make_curve(validation, find_validation_score(validation)),
        test_score=read_test_score(folder),
    )


def find_validation_score(lines: list[dict[str, float]]) -> str:
    """Returns which score the log has for validations, "bleu" or "accuracy", or "" if it has none.

    Args:
        lines: the fields of each line of the log that reports a validation.
    """
    for name in VALIDATION_SCORES:
        if any(name in fields for fields in lines):
            return name
    return ""


def make_curve(lines: list[dict[str, float]], name: str) -> Curve:
    """Returns the values of one field of a log over the updates.

    Args:
        lines: the fields of each line, such as {"num_updates": 100, "loss": 11.1}.
        name: the field to return; lines without it are skipped.
    """
    lines_with_field = [fields for fields in lines if name in fields]
    updates = [fields["num_updates"] for fields in lines_with_field]
    values = [fields[name] for fields in lines_with_field]
    return Curve(updates, values)


def read_test_score(folder: Path) -> Score | None:
    """Returns the main score of a run's evaluation, or None if it has not been evaluated."""
    file = folder / "evaluation" / "scores.json"
    if not file.exists():
        return None
    metrics = json.loads(file.read_text(encoding="utf-8"))["figures"]
    for task in TASKS.values():
        if task.metric in metrics:
            return Score(task.heading, metrics[task.metric]["score"])
    # A task of GLUE or SuperGLUE may have several metrics, of which the first one is drawn.
    first_metric = next(iter(metrics.values()))
    return Score(first_metric["name"], first_metric["score"])


def draw(runs: list[Curves], out: Path) -> None:
    """Draws losses, perplexities and scores of some runs in three panels side by side, and writes the picture."""
    import matplotlib

    matplotlib.use("Agg")  # which needs no screen
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(15, 4.5), sharex=True, layout="constrained")
    loss_axes, perplexity_axes, score_axes = panels
    for number, run in enumerate(runs):
        # matplotlib has ten colours, C0 to C9; further runs have the same colours and dashed lines
        line = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--"}
        loss_axes.plot(run.training_loss.updates, run.training_loss.values, alpha=0.35, linewidth=1, **line)
        loss_axes.plot(run.validation_loss.updates, run.validation_loss.values, marker=".", label=run.name, **line)
        perplexity_axes.plot(run.perplexity.updates, run.perplexity.values, marker=".", **line)
        score_axes.plot(run.validation_score.updates, run.validation_score.values, **line)
        if run.test_score is not None:
            last_update = max([*run.training_loss.updates, *run.validation_loss.updates])
            draw_test_score(score_axes, run.test_score, update=last_update, color=line["color"])
    headings = {run.test_score.heading for run in runs if run.test_score is not None}
    loss_axes.set(title="loss: validation (training: pale)", xlabel="updates", ylabel="loss (bits per token)")
    loss_axes.legend()
    perplexity_axes.set(title="perplexity on the validation set", xlabel="updates", yscale="log")
    score_axes.set(title="score: test set (validation: line)", xlabel="updates", ylabel=" / ".join(sorted(headings)))
    score_axes.margins(y=0.15)  # room for the numbers beside the points
    with atomic_write(out) as (unfinished,):
        figure.savefig(unfinished, dpi=100, format=out.suffix.removeprefix(".") or "png")
    pyplot.close(figure)


def draw_test_score(axes: Any, score: Score, update: float, color: str) -> None:
    """Draws a score on the test set as a point, with its value to the upper left of the point.

    Args:
        axes: the panel of matplotlib.
        score: the score.
        update: the number of updates of the training.
        color: the colour of the point and its value.
    """
    axes.plot([update], [score.value], color=color, marker="o", linestyle="none")
    offset_in_points = (-6, 6)
    axes.annotate(
        f"{score.value:g}",
        xy=(update, score.value),
        xytext=offset_in_points,
        textcoords="offset points",
        ha="right",
        color=color,
    )


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is not installed here; run scripts/setup.sh, then source .venv/bin/activate")
