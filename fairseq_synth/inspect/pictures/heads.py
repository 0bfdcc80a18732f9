"""Metrics of every head, as colors and numbers."""

import math
import textwrap
from collections.abc import Mapping, Sequence

from ..drawing import WIDTH, Call, Margins, Panel, Picture, call, colors, tick_names, title, without_ticks
from .layout import Row, add_call, flatten_rows, label_x_axes, label_y_axes, label_y_axis
from .models import Model, group_titles, names_by_group

HEAD_METRICS = {  # metric of each head: its title
    "entropy": "entropy (nats)",
    "distance": "mean distance (tokens)",
    "diagonal": "weight on the token itself",
    "neighbours": "weight on its neighbours",
    "word_dependence": "dependence on words",
    "gradient": "importance by gradient (nats)",
    "left_out": "increase of the loss without the head (bits)",
    "without_words": "increase of the loss if the head only reads positions (bits)",
}
COLORS = "Oranges"  # matplotlib's name for the scale from white to brown
MOST_NUMBERS = 8  # heads of a row whose cells have room for numbers
DARK = 0.6  # share of the range of values above which a cell is so dark that its number is white


class ValueRange:
    """The lowest and the highest value of a metric, which decide how its values are written and colored."""

    def __init__(self, values: Sequence[float]) -> None:
        """Finds the range of all values of a metric, and with how many decimals its values are written.

        The largest value gets two significant digits. For example, 0.0123 is written as 0.012, with three decimals, and
        123 as 123, without any. All other values get as many decimals.
        """
        self.low = min(values)
        self.high = max(values)
        self.decimals = 0
        largest = max(abs(self.low), abs(self.high))
        if largest > 0:
            power_of_ten = math.floor(math.log10(largest))  # the place of the first digit: -2 for 0.0123, 2 for 123
            self.decimals = max(0, 1 - power_of_ten)

    def write(self, value: float) -> str:
        """Returns a value as text. A value that is rounded to 0 has no minus sign."""
        rounded = round(value, self.decimals) + 0.0  # -0.0 + 0.0 is 0.0
        return f"{rounded:.{self.decimals}f}"

    def is_dark(self, value: float) -> bool:
        """Returns whether the color of a value is dark."""
        if self.high == self.low:
            return False
        return (value - self.low) / (self.high - self.low) > DARK


def heads(models: Sequence[Model], names_by_metric: Mapping[str, Sequence[str]]) -> Picture:
    """Draws the metrics of every head of one model, or of several models beside each other.

    Args:
        models: with the same layers and heads.
        names_by_metric: {metric: the attentions that have it in every model}.
    """
    if len(models) == 1:
        return heads_of_one(models[0], names_by_metric)
    return heads_of_several(models, names_by_metric)


def list_values(models: Sequence[Model], names: Sequence[str], metric: str) -> list[float]:
    """Returns the values of a metric of all heads of some attentions, in all models."""
    values: list[float] = []
    for model in models:
        for name in names:
            values += model.attentions[name][metric]
    return values


def draw_cells(matrix: Sequence[Sequence[float]], value_range: ValueRange) -> Call:
    """Returns a matrix whose cells are drawn as colors, the lightest for the lowest value of a range.

    Args:
        matrix: a row of values for each attention. A row with fewer heads than others is shorter.
        value_range: the range of the metric.
    """
    return colors(pad_rows(matrix), cmap=COLORS, vmin=value_range.low, vmax=value_range.high)


def pad_rows(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """Returns a matrix in which all rows are as long as the longest one. The added values are NaN and are not drawn."""
    longest = max(len(row) for row in matrix)
    padded = []
    for row in matrix:
        num_missing = longest - len(row)
        padded.append([*row, *[math.nan] * num_missing])
    return padded


# ---- one model

# All sizes of this picture are in inches.
LAYER_HEIGHT = 0.22  # the height of a row of cells
ONE_MODEL_MARGINS = Margins(left=1.15, right=0.1, top=0.3, bottom=0.5, between_columns=0.6, between_rows=0.5)
LABEL_LETTERS = 18  # the most letters in a line of the label of a row


def heads_of_one(model: Model, names_by_metric: Mapping[str, Sequence[str]]) -> Picture:
    """Draws the metrics of every head of a model: a row of panels for each metric, a column for each kind of attention.

    A panel shows a metric of one kind of attention, with a line of cells for each layer, and a cell for each head.

    Args:
        model: the model.
        names_by_metric: {metric: the attentions that have it}.
    """
    title_of_kind = group_titles(list_groups(model, names_by_metric))  # {kind of attention: title of its column}
    rows: list[Row] = []
    for metric, names in names_by_metric.items():
        row = metric_row(model, metric, names, title_of_kind)
        label = textwrap.fill(HEAD_METRICS[metric], LABEL_LETTERS)  # with line breaks
        rows.append(label_y_axis(row, label))
    rows = label_x_axes(rows, "head")

    # All panels have the same height, with room for the panel that has the most layers.
    num_rows = len(rows)
    height_of_all_panels = num_rows * LAYER_HEIGHT * count_most_layers(model, names_by_metric)
    return Picture(
        name="heads",
        panels=flatten_rows(rows),
        size=(WIDTH, ONE_MODEL_MARGINS.picture_height(height_of_all_panels, num_rows)),
        columns=len(title_of_kind),
        margins=ONE_MODEL_MARGINS,
    )


def count_most_layers(model: Model, names_by_metric: Mapping[str, Sequence[str]]) -> int:
    """Returns the largest number of layers for which a kind of attention has the same metric; at least 1.

    For example, if all 6 attentions of kind ``encoder.self`` have an entropy, the result is at least 6, because each
    layer has one attention of this kind.

    Args:
        model: the model.
        names_by_metric: {metric: the attentions that have it}.
    """
    most_layers = 1
    for names in names_by_metric.values():
        names_of_kinds = names_by_group(model.attentions, names)  # {kind of attention: names, one for each layer}
        for names_of_kind in names_of_kinds.values():
            most_layers = max(most_layers, len(names_of_kind))
    return most_layers


def list_groups(model: Model, names_by_metric: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the kinds of attention, such as ``encoder.self``, that have at least one metric.

    A kind with several metrics is listed several times.
    """
    groups: list[str] = []
    for names in names_by_metric.values():
        groups += names_by_group(model.attentions, names)
    return groups


def metric_row(model: Model, metric: str, names: Sequence[str], titles: Mapping[str, str]) -> Row:
    """Returns a panel for each kind of attention, with a metric of all its heads.

    Args:
        model: the model.
        metric: the metric.
        names: the attentions that have it.
        titles: {kind of attention: its title}; a kind without the metric has an empty place.
    """
    names_of_group = names_by_group(model.attentions, names)  # {kind of attention: names of attentions}
    # All panels of the row share this range, so that their colors can be compared.
    value_range = ValueRange(list_values([model], names, metric))
    row: Row = []
    for group, group_title in titles.items():
        if group in names_of_group:
            row.append(group_panel(model, metric, names_of_group[group], value_range, group_title))
        else:
            row.append(None)
    return row


def group_panel(model: Model, metric: str, names: Sequence[str], value_range: ValueRange, group_title: str) -> Panel:
    """Returns a metric of the heads of one kind of attention: a row for each layer, a column for each head.

    Args:
        model: the model.
        metric: the metric.
        names: the attentions of this kind, layer by layer.
        value_range: of the metric, over all kinds of attention, so that their colors can be compared.
        group_title: the title of the panel.
    """
    matrix = [model.attentions[name][metric] for name in names]
    num_columns = max(len(row) for row in matrix)
    layer_names = [f"layer {model.attentions[name]['layer']}" for name in names]
    calls = [draw_cells(matrix, value_range), title(group_title)]
    cells_have_room_for_numbers = num_columns <= MOST_NUMBERS
    if cells_have_room_for_numbers:
        calls += write_numbers(matrix, value_range)
    calls.append(tick_names("y", layer_names))
    return Panel(calls, settings={"xticks": list(range(num_columns))})


def write_numbers(matrix: Sequence[Sequence[float]], value_range: ValueRange) -> list[Call]:
    """Returns the values of a matrix as text in its cells, white on dark cells and black on the others."""
    calls: list[Call] = []
    for row, row_values in enumerate(matrix):
        for column, value in enumerate(row_values):
            text_color = "white" if value_range.is_dark(value) else "black"
            number = value_range.write(value)
            calls.append(call("text", column, row, number, ha="center", va="center", fontsize=6.5, color=text_color))
    return calls


# ---- several models

# All sizes of this picture are in inches.
ATTENTION_HEIGHT = 0.13  # the height of a row of cells
SMALLEST_PANEL_HEIGHT = 0.6
SEVERAL_MODELS_MARGINS = Margins(left=1.2, right=0.1, top=0.75, bottom=0.5, between_columns=0.1, between_rows=0.25)
TITLE_LETTERS = 14  # the most letters in a line of the title of a column


def heads_of_several(models: Sequence[Model], names_by_metric: Mapping[str, Sequence[str]]) -> Picture:
    """Draws the metrics of every head of several models: a row of panels for each model, a column for each metric.

    A panel has a line of cells for each attention. A cell is a head. The title of a column has the lowest and the
    highest value of the metric over all models, which are its lightest and its darkest color.

    Args:
        models: with the same layers and heads.
        names_by_metric: {metric: the attentions that have it in every model}.
    """
    value_ranges = {}
    for metric, names in names_by_metric.items():
        value_ranges[metric] = ValueRange(list_values(models, names, metric))
    rows = [model_row(model, names_by_metric, value_ranges) for model in models]
    rows = add_metric_titles(rows, value_ranges)
    rows = label_y_axes(rows, [model.name for model in models])
    rows = label_x_axes(rows, "head")
    num_rows = len(models)
    most_attentions = max(len(names) for names in names_by_metric.values())
    panel_height = max(SMALLEST_PANEL_HEIGHT, ATTENTION_HEIGHT * most_attentions)
    return Picture(
        name="heads",
        panels=flatten_rows(rows),
        size=(WIDTH, SEVERAL_MODELS_MARGINS.picture_height(num_rows * panel_height, num_rows)),
        columns=len(names_by_metric),
        margins=SEVERAL_MODELS_MARGINS,
    )


def model_row(
    model: Model, names_by_metric: Mapping[str, Sequence[str]], value_ranges: Mapping[str, ValueRange]
) -> Row:
    """Returns a panel for each metric of a model. Only the first panel has the names of the attentions on its left.

    Args:
        model: the model.
        names_by_metric: {metric: the attentions that have it in every model}.
        value_ranges: {metric: the range of its values over all models}.
    """
    row: Row = []
    for metric, names in names_by_metric.items():
        is_first_panel = not row
        row.append(model_panel(model, metric, names, value_ranges[metric], shows_names=is_first_panel))
    return row


def add_metric_titles(rows: Sequence[Row], value_ranges: Mapping[str, ValueRange]) -> list[Row]:
    """Returns copies of rows in which each panel of the first row has the title of its metric.

    Args:
        rows: a panel for each metric.
        value_ranges: {metric: the range of its values}, in the order of the panels.
    """
    first_row: Row = []
    for panel, (metric, value_range) in zip(rows[0], value_ranges.items()):
        first_row.append(add_call(panel, metric_title(metric, value_range)))
    return [first_row, *rows[1:]]


def model_panel(model: Model, metric: str, names: Sequence[str], value_range: ValueRange, shows_names: bool) -> Panel:
    """Returns a panel with a metric of all heads of a model: a row for each attention, a column for each head.

    Args:
        model: the model.
        metric: the metric.
        names: the attentions that have it.
        value_range: of the metric, over all models, so that their colors can be compared.
        shows_names: whether the names of the attentions are written on the left.
    """
    matrix = [model.attentions[name][metric] for name in names]
    num_columns = max(len(row) for row in matrix)  # an attention with fewer heads leaves the last columns empty
    calls = [draw_cells(matrix, value_range)]
    if shows_names:
        calls.append(tick_names("y", names))
    else:
        calls.append(without_ticks("y"))
    return Panel(calls, settings={"xticks": list(range(num_columns))})


def metric_title(metric: str, value_range: ValueRange) -> Call:
    """Returns a title that names a metric, with its lowest and its highest value in the last line."""
    lines = textwrap.wrap(HEAD_METRICS[metric], TITLE_LETTERS)
    lines.append(f"{value_range.write(value_range.low)} to {value_range.write(value_range.high)}")
    return "set_title", ["\n".join(lines)], {"fontsize": 7}
