"""The pictures of a table's column: scores of all runs, validation loss, curves of a training that was continued."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from fairseq_synth.inspect.drawing import Panel, Picture
from recipes.catalog import BASELINE, RECIPES, TABLES, TASKS, Column, Table

from .axes import FONT, SMALL_FONT, WIDTH, RecordedAxes, break_name, get_limits_of_models
from .markdown import format_range
from .records import (
    Pair,
    Record,
    RunsByModel,
    find_run_with_same_seed,
    get_column,
    load_column,
    pair_with_baseline,
)
from .tables import main_metric, shown_metrics

MOST_LINES = 4  # in one panel, so that their bands can be told apart
BLUE = "tab:blue"


class CannotDrawError(Exception):
    """The results do not have what a picture shows; the message says what is missing."""


def draw_table_picture(name: str) -> Picture:
    """Returns the picture with the name TABLE-DATASET-KIND.png, where the kind is a key of `KINDS`.

    Raises CannotDrawError if there is no such table, data set or kind, or if the results are not complete.
    """
    for table in TABLES.values():
        for column in table.columns:
            for kind, draw in KINDS.items():
                if name == f"{table.name}-{column.name}-{kind}.png":
                    return draw(name, table, column)
    raise CannotDrawError("no picture has this name")


def load_measured_runs(table: Table, column: Column) -> RunsByModel:
    """Returns {model: the records of its runs} of a column, without models that have not run.

    Raises CannotDrawError if fewer than two models have run.
    """
    runs_by_model = {}
    for model, runs in load_column(table, column).items():
        if runs:
            runs_by_model[model] = runs
    number_of_models = len(runs_by_model)
    if number_of_models < 2:
        raise CannotDrawError(
            "the picture compares at least two models, "
            f"but results/{table.name} has runs of only {number_of_models} for {column.name}"
        )
    return runs_by_model


def picture_title(table: Table, column: Column) -> str:
    """Returns the title of a picture: the data set, and what distinguishes the table from others of this data set."""
    return f"{column.heading}: {table.title}"


def describe_baseline(table: Table) -> str:
    """Returns the name of the model with which others are compared, as part of a sentence."""
    return "the Transformer" if table.baseline == BASELINE else table.baseline


def describe_numbers_of_seeds(numbers: Sequence[int]) -> str:
    """Returns how many seeds models have: "1 seed", "3 seeds" or, if they differ, "3 to 6 seeds"."""
    text = format_range(numbers, "d")
    return f"{text} seed" if text == "1" else f"{text} seeds"


# ---- scores

# Sizes in inches.
HEIGHT_OF_TITLE_AXIS_AND_CAPTION = 1.3
HEIGHT_OF_SCORES_LINE = 0.27  # the height of the line of one model


def draw_scores(name: str, table: Table, column: Column) -> Picture:
    """Returns a picture of the test scores in one column of a table: a line with dots for each model, best model first.

    Args:
        name: the file name of the picture.
        table: the table.
        column: its column, whose main metric is drawn.
    """
    metric = main_metric(table, column)
    scores_by_model = {}  # {model: the score of each run}
    for model, runs in load_measured_runs(table, column).items():
        scores_by_model[model] = [run["figures"][metric] for run in runs]
    height = HEIGHT_OF_TITLE_AXIS_AND_CAPTION + HEIGHT_OF_SCORES_LINE * len(scores_by_model)
    return Picture(
        name,
        [draw_scores_panel(table, column, scores_by_model)],
        size=(WIDTH, height),
        below=describe_marks(table, scores_by_model),
    )


def draw_scores_panel(table: Table, column: Column, scores_by_model: Mapping[str, Sequence[float]]) -> Panel:
    """Draws a line of dots for each model, the best model at the top, and a dashed line at the baseline's mean."""
    axes = RecordedAxes()
    axes.grid(axis="y", alpha=0.4)
    axes.set_axisbelow(True)
    if table.baseline in scores_by_model:
        mean_of_baseline = statistics.mean(scores_by_model[table.baseline])
        axes.axvline(mean_of_baseline, color="0.6", linewidth=1, linestyle="--")
    for model in sort_best_first(table, scores_by_model):
        color = "black" if model == table.baseline else BLUE
        draw_scores_of_model(axes, model, scores_by_model[model], color)
    # matplotlib puts the models at 0, 1, 2, … of the y axis, in the order in which they are drawn.
    axes.set_ylim(*get_limits_of_models(len(scores_by_model)))
    axes.set_title(picture_title(table, column), fontsize=FONT)
    axes.set(xlabel=score_label(table, column))
    return axes.panel()


def sort_best_first(table: Table, scores_by_model: Mapping[str, Sequence[float]]) -> list[str]:
    """Returns the models sorted by their mean scores, the best model first."""
    is_higher_better = TASKS[table.task].best is max
    means = {model: statistics.mean(scores) for model, scores in scores_by_model.items()}
    return sorted(means, key=lambda model: means[model], reverse=is_higher_better)


def score_label(table: Table, column: Column) -> str:
    """Returns the label of an axis of scores: the metric, and whether higher or lower is better."""
    heading = shown_metrics(table, column)[main_metric(table, column)]
    direction = "higher" if TASKS[table.task].best is max else "lower"
    return f"{heading} ({direction} is better)"


def draw_scores_of_model(axes: RecordedAxes, model: str, scores: Sequence[float], color: str) -> None:
    """Draws a dot for each score of a model on its line, and a stroke at their mean.

    A single score is a hollow dot without a stroke, because one run says little about the mean.
    """
    if len(scores) == 1:
        axes.scatter(scores, [model], s=16, facecolors="white", edgecolors=color)
    else:
        axes.scatter(scores, [model] * len(scores), s=16, color=color)
        axes.scatter([statistics.mean(scores)], [model], marker="|", s=200, color=color)


def describe_marks(table: Table, scores_by_model: Mapping[str, Sequence[float]]) -> str:
    """Returns the caption of `draw_scores`, which says what its dots, strokes and line mean."""
    sentences = []
    numbers_of_runs = [len(scores) for scores in scores_by_model.values()]
    if max(numbers_of_runs) > 1:
        sentences.append("Dots: runs. Strokes: means.")
    if min(numbers_of_runs) == 1:
        sentences.append("Hollow dots: models with one run.")
    if table.baseline in scores_by_model:
        mean_or_run = "mean" if len(scores_by_model[table.baseline]) > 1 else "run"
        sentences.append(f"Dashed line: {mean_or_run} of {describe_baseline(table)}.")
    return " ".join(sentences)


# ---- validation losses of several seeds


class Curve(NamedTuple):
    """A model's validation loss after some numbers of updates: the mean over seeds, the lowest and the highest seed."""

    model: str
    updates: list[int]
    mean: list[float]
    lowest: list[float]
    highest: list[float]
    number_of_seeds: int


def summarize_seeds(model: str, losses_of_seeds: Sequence[Mapping[int, float]]) -> Curve:
    """Returns the curve of a model, over the numbers of updates after which all seeds were validated.

    Args:
        model: its name.
        losses_of_seeds: for each seed {number of updates: loss}.
    """
    updates = list_shared_updates(losses_of_seeds)
    means = []
    lowest = []
    highest = []
    for number_of_updates in updates:
        losses = [loss_by_updates[number_of_updates] for loss_by_updates in losses_of_seeds]
        means.append(round(statistics.mean(losses), 4))
        lowest.append(min(losses))
        highest.append(max(losses))
    return Curve(model, updates, means, lowest, highest, number_of_seeds=len(losses_of_seeds))


def list_shared_updates(losses_of_seeds: Sequence[Mapping[int, float]]) -> list[int]:
    """Returns the numbers of updates after which all seeds were validated, in rising order."""
    updates = set(losses_of_seeds[0])
    for loss_by_updates in losses_of_seeds[1:]:
        updates.intersection_update(loss_by_updates)
    return sorted(updates)


def read_losses(run: Record) -> dict[int, float]:
    """Returns {number of updates: validation loss} of a run."""
    return dict(zip(run["curve"]["updates"], run["curve"]["valid_loss"]))


def draw_curve(axes: RecordedAxes, curve: Curve, color: str) -> None:
    """Draws the line of a curve's means and, if there are several seeds, a band from the lowest seed to the highest."""
    axes.plot(curve.updates, curve.mean, label=curve.model, color=color)
    if curve.number_of_seeds > 1:
        axes.fill_between(curve.updates, curve.lowest, curve.highest, color=color, alpha=0.2, linewidth=0)


# ---- validation loss, compared with the baseline's


def draw_losses(name: str, table: Table, column: Column) -> Picture:
    """Returns a picture of each model's validation loss minus the baseline's over the updates, the best model first.

    Up to four models share a panel. More have a small panel each, as nobody can follow more lines in one.

    Args:
        name: the file name of the picture.
        table: the table.
        column: its column whose models are drawn.
    """
    curves = compare_losses(table, column)
    if not curves:
        raise CannotDrawError(
            f"no run of results/{table.name} was validated after as many updates as a run of the baseline with its seed"
        )
    if len(curves) <= MOST_LINES:
        return draw_losses_in_one_panel(name, table, column, curves)
    return draw_losses_in_small_panels(name, table, column, curves)


def compare_losses(table: Table, column: Column) -> list[Curve]:
    """Returns the curves of each model's validation loss minus the baseline's, the lowest last value first.

    A run is compared with the baseline's run of the same seed. A model is left out if its runs share no seed, or no
    number of updates at which both were validated.
    """
    runs_by_model = load_measured_runs(table, column)
    curves = []
    for model, pairs in pair_with_baseline(runs_by_model, table.baseline).items():
        differences_of_seeds = [subtract_baseline(pair) for pair in pairs]
        curve = summarize_seeds(model, differences_of_seeds)
        has_points = bool(curve.updates)
        if has_points:
            curves.append(curve)
    return sorted(curves, key=lambda curve: curve.mean[-1])


def subtract_baseline(pair: Pair) -> dict[int, float]:
    """Returns {number of updates: a run's validation loss minus the baseline's}, where both were validated."""
    losses = read_losses(pair.run)
    losses_of_baseline = read_losses(pair.baseline)
    differences = {}
    for number_of_updates, loss in losses.items():
        if number_of_updates in losses_of_baseline:
            differences[number_of_updates] = round(loss - losses_of_baseline[number_of_updates], 4)
    return differences


def describe_losses(curves: Sequence[Curve]) -> str:
    """Returns the caption of a picture of `draw_losses`, which says what its lines and bands mean."""
    numbers_of_seeds = [curve.number_of_seeds for curve in curves]
    if max(numbers_of_seeds) == 1:
        return "Below 0 is better. Lines: one seed."
    seeds = describe_numbers_of_seeds(numbers_of_seeds)
    return f"Below 0 is better. Lines: means over {seeds}; bands: from the lowest seed to the highest."


def draw_losses_in_one_panel(name: str, table: Table, column: Column, curves: Sequence[Curve]) -> Picture:
    """Returns a picture of a few curves in one panel, with a legend.

    The legend lists the worst curve first. A higher loss is worse, so this is the order in which the curves end at the
    right of the panel, from top to bottom.

    Args:
        name: the file name of the picture.
        table: the table whose models are drawn.
        column: its column for the data set.
        curves: the curve of each model, the best one first.
    """
    axes = RecordedAxes()
    axes.axhline(0, color="black", linewidth=1)
    worst_first = list(reversed(curves))
    for color_number, curve in enumerate(worst_first):
        draw_curve(axes, curve, color=f"C{color_number}")  # C0, C1, …: matplotlib's cycle of colours
    # The legend is outside the panel: its left edge is 1 % of the panel's width to the right of the panel.
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=[1.01, 0.5])
    axes.set_title(picture_title(table, column), fontsize=FONT)
    axes.set(
        xlabel="updates",
        ylabel=f"validation loss minus {describe_baseline(table)}'s, bits per token",
        ylim=get_difference_limits(curves),
    )
    return Picture(name, [axes.panel()], size=(WIDTH, 3.6), below=describe_losses(curves))


def draw_losses_in_small_panels(name: str, table: Table, column: Column, curves: Sequence[Curve]) -> Picture:
    """Returns a picture with a small panel for each curve, all with the same limits of the axes."""
    number_of_columns = choose_number_of_columns(len(curves))
    number_of_rows = math.ceil(len(curves) / number_of_columns)
    last_update = max(curve.updates[-1] for curve in curves)
    limits = get_difference_limits(curves)
    axes_of_curves = [draw_small_panel(curve, last_update, limits) for curve in curves]
    label_outer_axes(axes_of_curves, number_of_columns)
    height_of_title_and_caption = 0.9  # inches
    height_of_panel = 1.4  # inches
    return Picture(
        name,
        [axes.panel() for axes in axes_of_curves],
        size=(WIDTH, height_of_title_and_caption + height_of_panel * number_of_rows),
        columns=number_of_columns,
        share_x=True,
        share_y=True,
        title=f"{picture_title(table, column)}. Validation loss minus {describe_baseline(table)}'s, bits per token",
        below=describe_losses(curves),
    )


def draw_small_panel(curve: Curve, last_update: int, limits: tuple[float, float]) -> RecordedAxes:
    """Draws a curve with a line at 0 and the name of its model above it.

    Args:
        curve: the curve.
        last_update: the number of updates at the right end of the x axis.
        limits: the ends of the y axis.
    """
    axes = RecordedAxes()
    axes.axhline(0, color="black", linewidth=1)
    draw_curve(axes, curve, BLUE)
    axes.set_title(break_name(curve.model), fontsize=SMALL_FONT)
    axes.set_xticks([0, last_update / 2, last_update])
    axes.set(ylim=limits)
    return axes


def label_outer_axes(axes_of_panels: Sequence[RecordedAxes], number_of_columns: int) -> None:
    """Labels the y axis of the first panel in each row, and the x axis of the last panel in each column.

    For example, there are 5 panels in 3 columns::

        0 1 2
        3 4

    The panels 0 and 3 get a label of the y axis. The panels 2, 3 and 4, the last three, get a label of the x axis.

    Args:
        axes_of_panels: the axes, row by row.
        number_of_columns: how many panels a row has.
    """
    first_in_rows = axes_of_panels[::number_of_columns]
    for axes in first_in_rows:
        axes.set(ylabel="difference")
    last_in_columns = axes_of_panels[-number_of_columns:]
    for axes in last_in_columns:
        axes.tick_params(axis="x", labelbottom=True)  # matplotlib would write these numbers in the last row only
        axes.set(xlabel="updates")


def choose_number_of_columns(number_of_panels: int) -> int:
    """Returns how many panels stand side by side: four or five, whichever leaves fewer places in the last row empty."""
    empty_places_of_four = -number_of_panels % 4
    empty_places_of_five = -number_of_panels % 5
    return 4 if empty_places_of_four <= empty_places_of_five else 5


def get_difference_limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Returns the lower and the upper end of the y axis of `draw_losses`.

    There is room for 0, for all lines, and for the second half of all bands. In the first updates, seeds differ so much
    that an axis with room for the whole bands would show the rest too small.
    """
    values = [0.0]
    for curve in curves:
        second_half = len(curve.updates) // 2
        values += curve.mean
        values += curve.lowest[second_half:]
        values += curve.highest[second_half:]
    return add_room(values, share=0.1)


def add_room(values: Sequence[float], share: float) -> tuple[float, float]:
    """Returns the ends of an axis for some values, with a share of their range left free at both ends."""
    room = share * (max(values) - min(values))
    return round(min(values) - room, 3), round(max(values) + room, 3)


# ---- curves of trainings that were continued


class Stage(NamedTuple):
    """A part of a training that was continued: the number of updates at its end, and the table with its results.

    For example, the trainings of the table multi30k_14k go on from the ends of those of multi30k_cpu.
    """

    updates: int
    table: Table
    column: Column


class ContinuedTraining(NamedTuple):
    """A training with one seed that went through all stages."""

    records: list[Record]  # the run of each stage

    def losses(self) -> dict[int, float]:
        """Returns {number of updates: validation loss} of the whole training, which the last record has."""
        return read_losses(self.records[-1])

    def list_scores(self, metric: str) -> list[float]:
        """Returns the value of a metric at the end of each stage."""
        return [record["figures"][metric] for record in self.records]


def list_stages(table: Table, column: Column) -> list[Stage]:
    """Returns the stages of the trainings of a table's column. The last one is this column itself."""
    recipe = RECIPES[column.recipe]
    last_stage = Stage(recipe.max_update, table, column)
    if not recipe.resume:
        return [last_stage]
    earlier_table = TABLES[recipe.init]
    earlier_stages = list_stages(earlier_table, get_column(earlier_table, column.name))
    return [*earlier_stages, last_stage]


def load_continued_trainings(stages: Sequence[Stage]) -> dict[str, list[ContinuedTraining]]:
    """Returns {model: its trainings that went through all stages}, without models that have no such training."""
    trainings_by_model = {}
    for model, runs_by_stage in load_runs_by_stage(stages).items():
        trainings = find_trainings(runs_by_stage)
        if trainings:
            trainings_by_model[model] = trainings
    return trainings_by_model


def load_runs_by_stage(stages: Sequence[Stage]) -> dict[str, list[list[Record]]]:
    """Returns {model: a list of its runs in the first stage, a list of those in the second stage, and so on}.

    A stage is a part of a training, for example up to 7,000 updates. The models are those of the last stage. A list is
    empty if the model has no run in a stage.
    """
    results_of_stages = [load_column(stage.table, stage.column) for stage in stages]  # {model: its runs} for each stage
    results_of_last_stage = results_of_stages[-1]
    runs_by_stage_of_models = {}
    for model in results_of_last_stage:
        runs_by_stage_of_models[model] = [results.get(model, []) for results in results_of_stages]
    return runs_by_stage_of_models


def find_trainings(runs_by_stage: Sequence[Sequence[Record]]) -> list[ContinuedTraining]:
    """Returns the trainings of a model that went through all stages, at most one for each seed.

    `runs_by_stage` has a list for each stage: the model's runs in this stage, which differ in their seeds.
    """
    trainings = []
    *earlier_stages, last_stage = runs_by_stage
    for last_run in last_stage:
        training = find_training(last_run, earlier_stages)
        if training is not None:
            trainings.append(training)
    return trainings


def find_training(last_run: Record, runs_by_earlier_stage: Sequence[Sequence[Record]]) -> ContinuedTraining | None:
    """Returns the training that ended with a given run, or None if one of its earlier runs is missing.

    The runs of a training have the same seed: each one continued the run of the stage before it.

    Args:
        last_run: the run of the last stage.
        runs_by_earlier_stage: a list for each earlier stage: the runs of the same model, which differ in their seeds.
    """
    records = []
    for runs in runs_by_earlier_stage:
        run = find_run_with_same_seed(last_run, runs)
        if run is None:
            return None
        records.append(run)
    return ContinuedTraining([*records, last_run])


def draw_continued(name: str, table: Table, column: Column) -> Picture:
    """Returns a picture with two panels over the updates of trainings that were continued: validation loss, and score.

    Args:
        name: the file name of the picture.
        table: the table of the last stage.
        column: its column whose models are drawn.
    """
    stages = list_stages(table, column)
    trainings_by_model = load_continued_trainings(stages)
    if not trainings_by_model:
        raise CannotDrawError(f"no training of results/{table.name} has gone through all its stages")
    loss_panel = draw_continued_losses(trainings_by_model, table.baseline)
    score_panel = draw_continued_scores(trainings_by_model, stages)
    return Picture(
        name,
        [loss_panel, score_panel],
        size=(WIDTH, 3.4),
        columns=2,
        title=picture_title(table, column),
        below=describe_continued(trainings_by_model),
    )


def choose_colors(models: Iterable[str], baseline: str) -> dict[str, str]:
    """Returns {model: its color}: black for the baseline, and C0, C1, … for others, which are matplotlib's colors."""
    colors = {model: f"C{number}" for number, model in enumerate(models)}
    if baseline in colors:
        colors[baseline] = "black"
    return colors


def draw_continued_losses(trainings_by_model: Mapping[str, Sequence[ContinuedTraining]], baseline: str) -> Panel:
    """Draws the validation loss of each model over the updates of all stages, with a band if it has several seeds."""
    colors = choose_colors(trainings_by_model, baseline)
    axes = RecordedAxes()
    for model, trainings in trainings_by_model.items():
        losses_of_seeds = [training.losses() for training in trainings]
        curve = summarize_seeds(model, losses_of_seeds)
        draw_curve(axes, curve, colors[model])
    axes.legend(fontsize=8)
    axes.set(
        xlabel="updates",
        ylabel="validation loss, bits per token",
        ylim=get_continued_loss_limits(trainings_by_model),
    )
    return axes.panel()


def draw_continued_scores(
    trainings_by_model: Mapping[str, Sequence[ContinuedTraining]], stages: Sequence[Stage]
) -> Panel:
    """Draws the test score of each model at the end of each stage, with dots that are joined by a line."""
    last_stage = stages[-1]  # all stages have the same metrics and the same baseline
    metric = main_metric(last_stage.table, last_stage.column)
    heading_by_metric = shown_metrics(last_stage.table, last_stage.column)
    updates = [stage.updates for stage in stages]
    colors = choose_colors(trainings_by_model, last_stage.table.baseline)
    axes = RecordedAxes()
    for model, trainings in trainings_by_model.items():
        scores_of_seeds = [training.list_scores(metric) for training in trainings]
        draw_means(axes, updates, scores_of_seeds, model, colors[model])
    axes.set_xticks(updates)
    axes.set(xlabel="updates", ylabel=f"{heading_by_metric[metric]} of the test set")
    return axes.panel()


def draw_means(
    axes: RecordedAxes, updates: Sequence[int], scores_of_seeds: Sequence[Sequence[float]], model: str, color: str
) -> None:
    """Draws a model's mean score at the end of each stage, with a bar from the lowest seed to the highest.

    Args:
        axes: where to draw.
        updates: the number of updates at the end of each stage.
        scores_of_seeds: for each seed, the score at the end of each stage.
        model: the name for a legend.
        color: the color of dots, line and bars.
    """
    means = []
    below_mean = []
    above_mean = []
    for scores in zip(*scores_of_seeds):  # the scores of all seeds at the end of one stage
        mean = statistics.mean(scores)
        means.append(round(mean, 3))
        below_mean.append(round(mean - min(scores), 3))
        above_mean.append(round(max(scores) - mean, 3))
    has_several_seeds = len(scores_of_seeds) > 1
    # matplotlib takes the lengths of bars as two lists: those below the dots, and those above.
    bars = [below_mean, above_mean] if has_several_seeds else None
    axes.errorbar(updates, means, yerr=bars, label=model, color=color, fmt="o-", ms=4, capsize=3)


def describe_continued(trainings_by_model: Mapping[str, Sequence[ContinuedTraining]]) -> str:
    """Returns the caption of `draw_continued`, which says what its lines, dots, bands and bars mean."""
    numbers_of_seeds = [len(trainings) for trainings in trainings_by_model.values()]
    if max(numbers_of_seeds) == 1:
        return "One seed of each model."
    seeds = describe_numbers_of_seeds(numbers_of_seeds)
    return f"Lines and dots: means over {seeds}. Bands and bars: from the lowest seed to the highest."


def get_continued_loss_limits(trainings_by_model: Mapping[str, Sequence[ContinuedTraining]]) -> tuple[float, float]:
    """Returns the ends of the y axis of losses, which leave out the steep descent in the first tenth of a training."""
    shown_losses: list[float] = []
    for trainings in trainings_by_model.values():
        for training in trainings:
            losses = list(training.losses().values())
            first_tenth = len(losses) // 10
            shown_losses += losses[first_tenth:]
    return add_room(shown_losses, share=0.05)


# The functions that draw a picture of a column, by the last part of the picture's name.
KINDS: dict[str, Callable[[str, Table, Column], Picture]] = {
    "valid-loss": draw_losses,
    "scores": draw_scores,
    "curves": draw_continued,
}
