"""The pictures of a table's column: scores of all runs, validation loss, curves of a training that was continued."""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fairseq_synth.inspect.drawing import Call, Panel, Picture
from recipes.catalog import BASELINE, RECIPES, TABLES, TASKS, Column, Table

from .axes import WIDTH, break_name, call, vertical_line
from .markdown import format_range
from .records import Pair, Record, Rows, get_column, load_column, match_seed, pair_with_baseline
from .tables import main_figure, shown_figures

MOST_LINES = 4  # in one panel, so that their bands can be told apart
BLUE = "tab:blue"


class CannotDrawError(Exception):
    """The results do not have what a picture shows; the message says what is missing."""


def draw_table_picture(name: str) -> Picture:
    """Draws the picture of the name TABLE-DATASET-KIND.png; CannotDrawError says why it cannot be drawn."""
    for table in TABLES.values():
        for column in table.columns:
            for kind, draw in KINDS.items():
                if name == f"{table.name}-{column.name}-{kind}.png":
                    return draw(name, table, column)
    raise CannotDrawError("no picture has this name")


def load_measured_rows(table: Table, column: Column) -> Rows:
    """Returns {model: the records of its runs} of a column, without models that have not run.

    Raises CannotDrawError if fewer than two models have run.
    """
    runs_by_model = {model: runs for model, runs in load_column(table, column).items() if runs}
    number = len(runs_by_model)
    if number < 2:
        raise CannotDrawError(f"it compares models, and results/{table.name} has runs of {number} of {column.name}")
    return runs_by_model


def picture_title(table: Table, column: Column) -> str:
    """Returns the data set, and what distinguishes the table from others of the same data set."""
    return f"{column.heading}: {table.title}"


def describe_seeds(numbers: Sequence[int]) -> str:
    """Returns ``1 seed``, ``3 seeds`` or ``3 to 6 seeds``."""
    text = format_range(numbers, "d")
    return f"{text} seed" if text == "1" else f"{text} seeds"


# ---- scores


def draw_scores(name: str, table: Table, column: Column) -> Picture:
    """Draws a dot for each run and a stroke for each model's mean, the best model first.

    A model with a single run has a hollow dot and no stroke, as one run says little about a mean.
    """
    runs_by_model = load_measured_rows(table, column)
    metric = main_figure(table, column)
    scores_by_model = {}
    for model, runs in runs_by_model.items():
        scores_by_model[model] = [run["figures"][metric] for run in runs]
    means = {model: statistics.mean(scores) for model, scores in scores_by_model.items()}
    is_higher_better = TASKS[table.task].best is max
    best_first = sorted(means, key=lambda model: means[model], reverse=is_higher_better)
    calls = [call("grid", axis="y", alpha=0.4), call("set_axisbelow", True)]
    if table.baseline in means:
        calls.append(vertical_line(means[table.baseline], color="0.6", linestyle="--"))
    for model in best_first:
        color = "black" if model == table.baseline else BLUE
        calls += score_calls(model, scores_by_model[model], color)
    # The models are at 0, 1, 2, … of the y axis, with half a step of room on both sides. The axis is turned around, so
    # that the first and best model is at the top.
    calls.append(call("set_ylim", len(runs_by_model) - 0.5, -0.5))
    calls.append(call("set_title", picture_title(table, column), fontsize=10))
    direction = "higher" if is_higher_better else "lower"
    settings = {
        "xlabel": f"{shown_figures(table, column)[metric]} ({direction} is better)",
    }
    return Picture(
        name,
        [Panel(calls, settings)],
        size=(WIDTH, 1.3 + 0.27 * len(runs_by_model)),  # inches: title, axis and caption, then a line for each model
        below=describe_marks(table, scores_by_model),
    )


def score_calls(model: str, scores: Sequence[float], color: str) -> list[Call]:
    """Returns the dots of a model's scores, and the stroke of their mean if there are several."""
    if len(scores) == 1:
        return [call("scatter", scores, [model], s=16, facecolors="white", edgecolors=color)]
    dots = call("scatter", scores, [model] * len(scores), s=16, color=color)
    stroke = call("scatter", [statistics.mean(scores)], [model], marker="|", s=200, color=color)
    return [dots, stroke]


def describe_marks(table: Table, scores_by_model: Mapping[str, Sequence[float]]) -> str:
    """Returns the caption of `draw_scores`, which says what its dots, strokes and line mean."""
    sentences = []
    numbers_of_runs = [len(scores) for scores in scores_by_model.values()]
    if max(numbers_of_runs) > 1:
        sentences.append("Dots: runs. Strokes: means.")
    if min(numbers_of_runs) == 1:
        sentences.append("Hollow dots: models with one run.")
    if table.baseline in scores_by_model:
        baseline = "the Transformer" if table.baseline == BASELINE else table.baseline
        mean_or_run = "mean" if len(scores_by_model[table.baseline]) > 1 else "run"
        sentences.append(f"Dashed line: {mean_or_run} of {baseline}.")
    return " ".join(sentences)


# ---- validation loss, compared with the baseline's


class LossCurve(NamedTuple):
    """The validation loss of a model minus the baseline's of the same seed, after each of some numbers of updates."""

    model: str
    updates: list[int]
    mean: list[float]  # over seeds
    lowest: list[float]
    highest: list[float]
    number_of_seeds: int


def draw_losses(name: str, table: Table, column: Column) -> Picture:
    """Draws each model's validation loss minus the baseline's over the updates, the best model first.

    Up to four models share a panel. More have a small panel each, as nobody can follow more lines in one.
    """
    pairs_by_row = pair_with_baseline(table, load_measured_rows(table, column))
    curves = []
    for model, pairs in pairs_by_row.items():
        curve = compare_losses(model, pairs)
        if curve:
            curves.append(curve)
    if not curves:
        raise CannotDrawError(f"no run of results/{table.name} shares a seed and a validation with the baseline's")
    curves.sort(key=lambda curve: curve.mean[-1])
    if len(curves) <= MOST_LINES:
        return draw_losses_in_one_panel(name, table, column, curves)
    return draw_losses_in_small_panels(name, table, column, curves)


def compare_losses(model: str, pairs: Sequence[Pair]) -> LossCurve | None:
    """Returns the curve of a model over the updates at which all its pairs were validated; None if there are none."""
    curves_of_runs = [losses_by_update(pair.run) for pair in pairs]
    curves_of_baselines = [losses_by_update(pair.baseline) for pair in pairs]
    updates = shared_updates([*curves_of_runs, *curves_of_baselines])
    if not updates:
        return None
    curve = LossCurve(model, updates, [], [], [], number_of_seeds=len(pairs))
    for update in updates:
        differences = []
        for run_curve, baseline_curve in zip(curves_of_runs, curves_of_baselines):
            differences.append(round(run_curve[update] - baseline_curve[update], 4))
        curve.mean.append(round(statistics.mean(differences), 4))
        curve.lowest.append(min(differences))
        curve.highest.append(max(differences))
    return curve


def losses_by_update(record: Record) -> dict[int, float]:
    """Returns {number of updates: validation loss} of a run."""
    return dict(zip(record["curve"]["updates"], record["curve"]["valid_loss"]))


def shared_updates(curves: Sequence[Mapping[int, float]]) -> list[int]:
    """Returns the numbers of updates after which all of some runs were validated, in order."""
    updates = set(curves[0])
    for curve in curves[1:]:
        updates.intersection_update(curve)
    return sorted(updates)


def loss_calls(curve: LossCurve, color: str) -> list[Call]:
    """Returns the line of a curve, and the band from the lowest to the highest seed if there are several."""
    calls = [call("plot", curve.updates, curve.mean, label=curve.model, color=color)]
    if curve.number_of_seeds > 1:
        band = call("fill_between", curve.updates, curve.lowest, curve.highest, color=color, alpha=0.2, linewidth=0)
        calls.append(band)
    return calls


def describe_losses(curves: Sequence[LossCurve]) -> str:
    """Returns the caption of a picture of `draw_losses`."""
    numbers_of_seeds = [curve.number_of_seeds for curve in curves]
    if max(numbers_of_seeds) == 1:
        return "Below 0 is better. Lines: one seed."
    seeds = describe_seeds(numbers_of_seeds)
    return f"Below 0 is better. Lines: means over {seeds}; bands: from the lowest seed to the highest."


def draw_losses_in_one_panel(name: str, table: Table, column: Column, curves: Sequence[LossCurve]) -> Picture:
    """Draws a few curves in one panel, with a legend in their order at the end of training."""
    calls = [call("axhline", 0, color="black", linewidth=1)]
    # The lowest curve is the best one. The legend lists the curves in the order in which they are drawn, from the
    # worst one, at the top of the panel, to the best one.
    for number, curve in enumerate(reversed(curves)):
        calls += loss_calls(curve, color=f"C{number}")
    calls.append(call("legend", fontsize=8, loc="center left", bbox_to_anchor=[1.01, 0.5]))
    settings = {
        "xlabel": "updates",
        "ylabel": f"validation loss minus {possessive(table)}, bits per token",
        "ylim": loss_limits(curves),
    }
    calls.append(call("set_title", picture_title(table, column), fontsize=10))
    return Picture(name, [Panel(calls, settings)], size=(WIDTH, 3.6), below=describe_losses(curves))


def draw_losses_in_small_panels(name: str, table: Table, column: Column, curves: Sequence[LossCurve]) -> Picture:
    """Draws a panel for each curve, all with the same axes."""
    # Four or five panels stand side by side, whichever leaves fewer places in the last row empty. For 10 curves,
    # -10 % 4 is 2 empty places and -10 % 5 is none.
    columns = min((4, 5), key=lambda number: -len(curves) % number)
    last_update = max(curve.updates[-1] for curve in curves)
    limits = loss_limits(curves)
    panels = []
    for number, curve in enumerate(curves):
        calls = [call("axhline", 0, color="black", linewidth=1), *loss_calls(curve, BLUE)]
        calls.append(call("set_title", break_name(curve.model), fontsize=8))
        calls.append(call("set_xticks", [0, last_update / 2, last_update]))
        settings: dict[str, Any] = {"ylim": limits}
        if number % columns == 0:
            settings["ylabel"] = "difference"
        has_panel_below = number + columns < len(curves)
        if not has_panel_below:
            calls.append(call("tick_params", axis="x", labelbottom=True))
            settings["xlabel"] = "updates"
        panels.append(Panel(calls, settings))
    rows = math.ceil(len(curves) / columns)
    return Picture(
        name,
        panels,
        size=(WIDTH, 0.9 + 1.4 * rows),  # inches: title and caption, then the rows of panels
        columns=columns,
        share_x=True,
        share_y=True,
        title=f"{picture_title(table, column)}. Validation loss minus {possessive(table)}, bits per token",
        below=describe_losses(curves),
    )


def possessive(table: Table) -> str:
    """Returns ``the Transformer's``, or that of another baseline."""
    return "the Transformer's" if table.baseline == BASELINE else f"{table.baseline}'s"


def loss_limits(curves: Sequence[LossCurve]) -> tuple[float, float]:
    """Returns the ends of the axis of losses, with room for all lines, and for bands in the second half of training.

    In the first updates seeds differ so much that their bands would leave no room for what follows.
    """
    values = [0.0]
    for curve in curves:
        second_half = len(curve.mean) // 2
        values += curve.mean + curve.lowest[second_half:] + curve.highest[second_half:]
    room = 0.1 * (max(values) - min(values))
    return round(min(values) - room, 3), round(max(values) + room, 3)


# ---- curves of trainings that were continued


class Stage(NamedTuple):
    """A table whose trainings begin with those of the stage before it, and the number of updates at its end."""

    updates: int
    table: Table
    column: Column


def list_stages(table: Table, column: Column) -> list[Stage]:
    """Returns the stages of a training that was continued, the first stage first and this column last."""
    recipe = RECIPES[column.recipe]
    stage = Stage(recipe.max_update, table, column)
    if not recipe.resume:
        return [stage]
    earlier_table = TABLES[recipe.init]
    return [*list_stages(earlier_table, get_column(earlier_table, column.name)), stage]


def load_continued_runs(stages: Sequence[Stage]) -> dict[str, list[list[Record]]]:
    """Returns {model: for each seed that reached the last stage a list of its records, one for each stage}."""
    rows_by_stage = [load_column(stage.table, stage.column) for stage in stages]
    runs_by_model: dict[str, list[list[Record]]] = {}
    for model, last_runs in rows_by_stage[-1].items():
        for last_run in last_runs:
            earlier_runs = [match_seed(last_run, rows.get(model, [])) for rows in rows_by_stage[:-1]]
            runs = [run for run in (*earlier_runs, last_run) if run is not None]
            if len(runs) == len(stages):
                runs_by_model.setdefault(model, []).append(runs)
    return runs_by_model


def draw_continued(name: str, table: Table, column: Column) -> Picture:
    """Draws two panels over the updates of trainings that were continued: each model's validation loss, and score."""
    stages = list_stages(table, column)
    runs_by_model = load_continued_runs(stages)
    if not runs_by_model:
        raise CannotDrawError(f"no training of results/{table.name} has gone through all its stages")
    loss_calls_of_models = []
    score_calls_of_models = []
    metric = main_figure(table, column)
    for number, (model, runs_of_seeds) in enumerate(runs_by_model.items()):
        color = "black" if model == table.baseline else f"C{number}"  # C0, C1, …: matplotlib's cycle of colours
        loss_calls_of_models += continued_loss_calls(runs_of_seeds, model, color)
        score_calls_of_models += continued_score_calls(runs_of_seeds, metric, stages, model, color)
    loss_calls_of_models.append(call("legend", fontsize=8))
    score_calls_of_models.append(call("set_xticks", [stage.updates for stage in stages]))
    loss_settings = {
        "xlabel": "updates",
        "ylabel": "validation loss, bits per token",
        "ylim": continued_loss_limits(runs_by_model),
    }
    heading = shown_figures(table, column)[metric]
    score_settings = {
        "xlabel": "updates",
        "ylabel": f"{heading} of the test set",
    }
    return Picture(
        name,
        [Panel(loss_calls_of_models, loss_settings), Panel(score_calls_of_models, score_settings)],
        size=(WIDTH, 3.4),
        columns=2,
        title=picture_title(table, column),
        below=describe_continued(runs_by_model),
    )


def describe_continued(runs_by_model: Mapping[str, Sequence[Sequence[Record]]]) -> str:
    """Returns the caption of `draw_continued`, by how many seeds each model has."""
    numbers_of_seeds = [len(runs_of_seeds) for runs_of_seeds in runs_by_model.values()]
    if max(numbers_of_seeds) == 1:
        return "One seed of each model."
    seeds = describe_seeds(numbers_of_seeds)
    return f"Lines and dots: means over {seeds}. Bands and bars: from the lowest seed to the highest."


def continued_loss_calls(runs_of_seeds: Sequence[Sequence[Record]], model: str, color: str) -> list[Call]:
    """Returns the line of a model's validation loss over the updates, and a band if there are several seeds."""
    curves = [losses_by_update(runs[-1]) for runs in runs_of_seeds]  # the last stage's record has the whole curve
    updates = shared_updates(curves)
    means = []
    lowest = []
    highest = []
    for update in updates:
        losses = [curve[update] for curve in curves]
        means.append(round(statistics.mean(losses), 4))
        lowest.append(min(losses))
        highest.append(max(losses))
    calls = [call("plot", updates, means, label=model, color=color)]
    if len(curves) > 1:
        calls.append(call("fill_between", updates, lowest, highest, color=color, alpha=0.2, linewidth=0))
    return calls


def continued_score_calls(
    runs_of_seeds: Sequence[Sequence[Record]], metric: str, stages: Sequence[Stage], model: str, color: str
) -> list[Call]:
    """Returns a dot for a model's mean score after each stage, with a bar over its seeds, joined by a line.

    `runs_of_seeds`: for each seed a list of its records, one for each stage.
    """
    updates = [stage.updates for stage in stages]
    means = []
    below_mean = []
    above_mean = []
    for stage_number in range(len(stages)):
        scores = [runs[stage_number]["figures"][metric] for runs in runs_of_seeds]
        mean = statistics.mean(scores)
        means.append(round(mean, 3))
        below_mean.append(round(mean - min(scores), 3))
        above_mean.append(round(max(scores) - mean, 3))
    bars = [below_mean, above_mean] if len(runs_of_seeds) > 1 else None
    return [call("errorbar", updates, means, yerr=bars, label=model, color=color, fmt="o-", ms=4, capsize=3)]


def continued_loss_limits(runs_by_model: Mapping[str, Sequence[Sequence[Record]]]) -> tuple[float, float]:
    """Returns the ends of the axis of losses, which leave out the steep descent of the first updates."""
    losses: list[float] = []
    for runs in itertools.chain.from_iterable(runs_by_model.values()):
        last_run = runs[-1]  # its record has the curve of all stages
        curve = list(losses_by_update(last_run).values())
        first_tenth = len(curve) // 10
        losses += curve[first_tenth:]
    room = 0.05 * (max(losses) - min(losses))
    return round(min(losses) - room, 3), round(max(losses) + room, 3)


KINDS: dict[str, Callable[[str, Table, Column], Picture]] = {
    "valid-loss": draw_losses,
    "scores": draw_scores,
    "curves": draw_continued,
}
