"""Figures of every head, as colors and numbers."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ..drawing import WIDTH, Call, Margins, Panel, Picture, colors, tick_names, title, without_ticks
from .models import Model, Row, flatten_rows, group_titles, names_by_group

HEAD_FIGURES = {  # figure of each head: its title
    "entropy": "entropy (nats)",
    "distance": "mean distance (tokens)",
    "diagonal": "weight on the token itself",
    "neighbours": "weight on its neighbours",
    "word_dependence": "dependence on words",
    "gradient": "importance by gradient (nats)",
    "left_out": "increase of the loss without the head (bits)",
    "without_words": "increase of the loss with the head by position alone (bits)",
}
COLORS = "Oranges"
MOST_NUMBERS = 8  # heads of a row whose cells have room for numbers
DARK = 0.6  # share of the range of values above which a cell is so dark that its number is white


class Range:
    """The lowest and the highest value of a figure, and how its numbers are written."""

    def __init__(self, values: Sequence[float]) -> None:
        """Takes all values of the figure."""
        self.low = min(values)
        self.high = max(values)
        largest = max(abs(self.low), abs(self.high))
        # two digits of the largest value
        self.decimals = 0 if largest == 0 else max(0, 1 - math.floor(math.log10(largest)))

    def write(self, value: float) -> str:
        """Returns a value as text, without a sign if it is 0 as written."""
        return f"{round(value, self.decimals) + 0.0:.{self.decimals}f}"

    def is_dark(self, value: float) -> bool:
        """Returns whether the color of a value is dark."""
        return self.high > self.low and (value - self.low) / (self.high - self.low) > DARK


def heads(models: Sequence[Model], figures: Mapping[str, Sequence[str]]) -> Picture:
    """Returns the figures of every head of one model, or of several models beside each other.

    Args:
        models: with the same layers and heads.
        figures: {figure: the attentions that have it in every model}.
    """
    if len(models) == 1:
        return heads_of_one(models[0], figures)
    return heads_of_several(models, figures)


def heads_of_one(model: Model, figures: Mapping[str, Sequence[str]]) -> Picture:
    """Returns a row for each figure, a column for each kind of attention; a cell is a head, with its number."""
    groups: dict[str, None] = {}
    for names in figures.values():
        groups.update(dict.fromkeys(names_by_group(model.attentions, names)))
    titles = group_titles(groups)
    rows: list[Row] = []
    most_layers = 1
    for figure, names in figures.items():
        by_group = names_by_group(model.attentions, names)
        most_layers = max([most_layers, *(len(group_names) for group_names in by_group.values())])
        values = Range([value for name in names for value in model.attentions[name][figure]])
        row: Row = []
        for group, group_title in titles.items():
            if group in by_group:
                row.append(group_panel(model, figure, by_group[group], values, group_title))
            else:
                row.append(None)
        rows.append(name_first_panel(row, figure))
    rows[-1] = [None if panel is None else name_heads(panel) for panel in rows[-1]]
    margins = Margins(left=1.15, right=0.1, top=0.3, bottom=0.5, between_columns=0.6, between_rows=0.5)
    height = margins.top + margins.bottom + len(rows) * 0.22 * most_layers + (len(rows) - 1) * margins.between_rows
    return Picture("heads", flatten_rows(rows), (WIDTH, height), len(titles), margins=margins)


def group_panel(model: Model, figure: str, names: Sequence[str], values: Range, group_title: str) -> Panel:
    """Returns a figure of the heads of one kind of attention: a row for each layer, a column for each head."""
    matrix = [model.attentions[name][figure] for name in names]
    most_heads = max(len(row) for row in matrix)
    layers = [f"layer {model.attentions[name]['layer']}" for name in names]
    calls = [colors(padded(matrix), cmap=COLORS, vmin=values.low, vmax=values.high), title(group_title)]
    if most_heads <= MOST_NUMBERS:
        calls += numbers(matrix, values)
    calls.append(tick_names("y", layers))
    return Panel(calls, {"xticks": list(range(most_heads))})


def numbers(matrix: Sequence[Sequence[float]], values: Range) -> list[Call]:
    """Returns the values of a matrix as text in its cells."""
    calls: list[Call] = []
    for row, row_values in enumerate(matrix):
        for column, value in enumerate(row_values):
            text_color = "white" if values.is_dark(value) else "black"
            style = {"ha": "center", "va": "center", "fontsize": 6.5, "color": text_color}
            calls.append(("text", [column, row, values.write(value)], style))
    return calls


def name_first_panel(row: Row, figure: str) -> Row:
    """Returns a row whose first panel has the title of the figure on its left."""
    label = "\n".join(textwrap.wrap(HEAD_FIGURES[figure], 18))
    named = list(row)
    for place, panel in enumerate(named):
        if panel is not None:
            named[place] = panel._replace(settings={**panel.settings, "ylabel": label})
            break
    return named


def name_heads(panel: Panel) -> Panel:
    """Returns a panel that names its horizontal axis."""
    return panel._replace(settings={**panel.settings, "xlabel": "head"})


def padded(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """Returns a matrix whose shorter rows end with cells that are not drawn."""
    width = max(len(row) for row in matrix)
    return [list(row) + [math.nan] * (width - len(row)) for row in matrix]


def heads_of_several(models: Sequence[Model], figures: Mapping[str, Sequence[str]]) -> Picture:
    """Returns a block of rows for each model, a column for each figure.

    In a panel a row of cells is an attention, a cell a head. A column's title has the figure's lowest and highest
    value over all models, which are its lightest and its darkest color.
    """
    rows: list[Row] = []
    for model in models:
        row: Row = []
        for figure, names in figures.items():
            values = Range([value for other in models for name in names for value in other.attentions[name][figure]])
            matrix = padded([model.attentions[name][figure] for name in names])
            calls = [colors(matrix, cmap=COLORS, vmin=values.low, vmax=values.high)]
            calls.append(tick_names("y", names) if not row else without_ticks("y"))
            if not rows:
                wrapped = textwrap.wrap(HEAD_FIGURES[figure], 14)
                value_range = f"{values.write(values.low)} to {values.write(values.high)}"
                calls.append(("set_title", ["\n".join([*wrapped, value_range])], {"fontsize": 7}))
            settings: dict[str, Any] = {"xticks": list(range(len(matrix[0])))}
            if not row:
                settings["ylabel"] = model.name
            if model is models[-1]:
                settings["xlabel"] = "head"
            row.append(Panel(calls, settings))
        rows.append(row)
    most_attentions = max(len(names) for names in figures.values())
    panel_height = max(0.6, 0.13 * most_attentions)
    margins = Margins(left=1.2, right=0.1, top=0.75, bottom=0.5, between_columns=0.1, between_rows=0.25)
    height = margins.top + margins.bottom + len(rows) * panel_height + (len(rows) - 1) * margins.between_rows
    return Picture("heads", flatten_rows(rows), (WIDTH, height), len(figures), margins=margins)
