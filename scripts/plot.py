#!/usr/bin/env python
"""Draws the curves of trainings over their updates: loss, perplexity, and the score on the test set.

    scripts/plot.py RUN_DIR [RUN_DIR ...] [--out FILE]

    scripts/plot.py runs/mine-*-seed1 --out curves.png

RUN_DIR is a folder of train.sh, also while it is being trained. The losses and perplexities are those of its log
(train.log). The scores are those of its evaluation, or of each validation if BLEU or accuracy was computed then (for
example with train.sh ... -- --eval-bleu --eval-bleu-remove-bpe).
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
    """Values of a figure after so many updates."""

    updates: list[float]
    values: list[float]


class Score(NamedTuple):
    """A score on the test set."""

    heading: str
    value: float


class Curves(NamedTuple):
    """What is drawn of a run."""

    name: str
    training_loss: Curve
    validation_loss: Curve
    perplexity: Curve
    validation_score: Curve
    test_score: Score | None


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="made by train.sh")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a picture (default: curves.png in the first RUN_DIR)")
    args = parser.parse_args()
    runs = [read_curves(folder) for folder in args.runs]
    out = args.out or args.runs[0] / "curves.png"
    draw(runs, out)
    print("wrote", out)


def read_curves(folder: Path) -> Curves:
    """Returns what the log and the scores of a run say.

    Raises UserError if the folder has no log of a training.
    """
    logs = sorted(folder.glob("train*.log"))
    if not logs:
        raise UserError(f"{folder}: has no train.log; name a run of train.sh")
    log = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in logs)
    training = read_lines(log, "train_inner")
    validation = read_lines(log, "valid")
    if not training and not validation:
        raise UserError(f"{logs[0]}: has no losses yet; wait until the training has reported some")
    score_name = next((name for name in VALIDATION_SCORES if any(name in fields for fields in validation)), "")
    return Curves(
        name=folder.resolve().name,
        training_loss=make_curve(training, "loss"),
        validation_loss=make_curve(validation, "loss"),
        perplexity=make_curve(validation, "ppl"),
        validation_score=make_curve(validation, score_name),
        test_score=read_test_score(folder),
    )


def make_curve(lines: list[dict[str, float]], name: str) -> Curve:
    """Returns the values of a field over the updates."""
    with_field = [fields for fields in lines if name in fields]
    return Curve([fields["num_updates"] for fields in with_field], [fields[name] for fields in with_field])


def read_test_score(folder: Path) -> Score | None:
    """Returns the main score of a run's evaluation, or None if it has not been evaluated."""
    file = folder / "evaluation" / "scores.json"
    if not file.exists():
        return None
    figures = json.loads(file.read_text(encoding="utf-8"))["figures"]
    for task in TASKS.values():
        if task.metric in figures:
            return Score(task.heading, figures[task.metric]["score"])
    first = next(iter(figures.values()))  # a metric of GLUE or SuperGLUE
    return Score(first["name"], first["score"])


def draw(runs: list[Curves], out: Path) -> None:
    """Draws the curves of some runs side by side, and writes the picture."""
    import matplotlib

    matplotlib.use("Agg")  # which needs no screen
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(15, 4.5), sharex=True, layout="constrained")
    loss_axes, perplexity_axes, score_axes = panels
    for number, run in enumerate(runs):
        color = f"C{number % 10}"
        style = "-" if number < 10 else "--"
        loss_axes.plot(*run.training_loss, color=color, linestyle=style, alpha=0.35, linewidth=1)
        loss_axes.plot(*run.validation_loss, color=color, linestyle=style, marker=".", label=run.name)
        perplexity_axes.plot(*run.perplexity, color=color, linestyle=style, marker=".")
        draw_scores(score_axes, run, color, style)
    loss_axes.set(title="loss: validation (training: pale)", xlabel="updates", ylabel="loss (bits per token)")
    perplexity_axes.set(title="perplexity on the validation set", xlabel="updates", yscale="log")
    headings = {run.test_score.heading for run in runs if run.test_score}
    score_axes.set(title="score: test set (validation: line)", xlabel="updates", ylabel=" / ".join(sorted(headings)))
    score_axes.margins(y=0.15)  # room for the numbers beside the points
    loss_axes.legend()
    with atomic_write(out) as (part,):
        figure.savefig(part, dpi=100, format=out.suffix.removeprefix(".") or "png")
    pyplot.close(figure)


def draw_scores(axes: Any, run: Curves, color: str, style: str) -> None:
    """Draws a run's scores on the validation set as a line, and its score on the test set as a point at its end."""
    axes.plot(*run.validation_score, color=color, linestyle=style)
    if run.test_score:
        last_update = max([*run.training_loss.updates, *run.validation_loss.updates])
        axes.plot([last_update], [run.test_score.value], color=color, marker="o", linestyle="none")
        axes.annotate(
            f"{run.test_score.value:g}", (last_update, run.test_score.value), color=color,
            textcoords="offset points", xytext=(-6, 6), ha="right",
        )  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is not installed here; run scripts/setup.sh, then source .venv/bin/activate")
