"""Puts panels in rows, and adds titles and labels at the edges of these rows."""

from collections.abc import Sequence
from typing import Any

from ..drawing import Call, Panel, row_label, title

Row = list[Panel | None]  # panels side by side; None is an empty place


def split_into_rows(panels: Sequence[Panel | None], columns: int) -> list[Row]:
    """Returns panels in rows of `columns` panels; the last row may be shorter."""
    return [list(panels[start : start + columns]) for start in range(0, len(panels), columns)]


def flatten_rows(rows: Sequence[Row]) -> Row:
    """Returns the panels of all rows in a single list, as `Picture` takes them.

    Rows that are shorter than the longest one get empty places at their end.
    """
    columns = max(len(row) for row in rows)
    panels: Row = []
    for row in rows:
        panels += row
        panels += [None] * (columns - len(row))
    return panels


def join_below_each_other(groups: Sequence[Sequence[Row]]) -> list[Row]:
    """Returns the rows of several groups below each other, with an empty row between two groups."""
    joined = list(groups[0])
    for rows in groups[1:]:
        joined.append([None])
        joined += rows
    return joined


def is_empty_row(row: Row) -> bool:
    """Returns whether a row has no panel, as the row between two groups of rows."""
    return all(panel is None for panel in row)


def add_call(panel: Panel | None, call: Call) -> Panel | None:
    """Returns a copy of a panel that draws one thing more. An empty place stays empty."""
    if panel is None:
        return None
    return panel._replace(calls=[*panel.calls, call])


def add_settings(panel: Panel | None, **settings: Any) -> Panel | None:
    """Returns a copy of a panel with more arguments for ``axes.set``. An empty place stays empty."""
    if panel is None:
        return None
    return panel._replace(settings={**panel.settings, **settings})


def label_y_axis(row: Row, label: str) -> Row:
    """Returns a copy of a row of panels whose first panel has a label for its vertical axis, in vertical letters."""
    labelled = list(row)
    for column, panel in enumerate(row):
        if panel is not None:
            labelled[column] = add_settings(panel, ylabel=label)
            break
    return labelled


def name_row(row: Row, name: str) -> Row:
    """Returns a copy of a row that has a name on the left of its first panel, in horizontal letters."""
    first_panel, *other_panels = row
    return [add_call(first_panel, row_label(name)), *other_panels]


def label_y_axes(rows: Sequence[Row], labels: Sequence[str]) -> list[Row]:
    """Returns copies of the rows, each with its label at the vertical axis of its first panel."""
    return [label_y_axis(row, label) for row, label in zip(rows, labels)]


def label_x_axes(rows: Sequence[Row], label: str) -> list[Row]:
    """Returns copies of the rows, in which each panel of the last row has a label for its horizontal axis."""
    last_row = [add_settings(panel, xlabel=label) for panel in rows[-1]]
    return [*rows[:-1], last_row]


def title_columns(rows: Sequence[Row], titles: Sequence[str]) -> list[Row]:
    """Returns copies of rows in which the panels of the first row have titles."""
    first_row = [add_call(panel, title(text)) for panel, text in zip(rows[0], titles)]
    return [first_row, *rows[1:]]


def add_to_first_panel(rows: Sequence[Row], call: Call) -> list[Row]:
    """Returns copies of rows in which the first panel of the first row draws one thing more, such as a legend."""
    first_row = [add_call(rows[0][0], call), *rows[0][1:]]
    return [first_row, *rows[1:]]
