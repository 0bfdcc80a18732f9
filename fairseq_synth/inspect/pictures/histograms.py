"""Histograms of parameters, logits and attention weights, trained and initial."""

from collections.abc import Sequence
from typing import Any

from ..drawing import WIDTH, Call, Margins, Panel, Picture, legend, row_label, title, without_ticks
from ..subject import Figures
from .models import GROUPS, Model, Row, flatten_rows, in_lines, names_by_group

MOST_COLUMNS = 6
PANEL_HEIGHT = 0.5  # inches
SPACER_HEIGHT = 0.15  # of the row between two kinds of attention, whose titles are in it
STATE_STYLES: dict[str, dict[str, Any]] = {
    "initial": {"color": "0.75", "fill": True},
    "trained": {"color": "tab:blue"},
}  # in drawing order
NAMES = {"parameters": "parameters of the logits", "logits": "logits", "weights": "attention weights"}
SMALLEST_SHARE = 1e-6  # on the logarithmic axis of the weights


def histograms(models: Sequence[Model], names: Sequence[str], kind: str) -> Picture:
    """Returns a row for each kind of attention and model, a column for each layer.

    Args:
        models: with the same layers.
        names: the attentions that have the histogram in every model.
        kind: parameters, logits or weights.
    """
    rows: list[Row] = []
    for group_names in names_by_group(models[0].attentions, names).values():
        if rows:
            rows.append([None])  # room for the titles of the next group
        is_first_line = True
        for model in models:
            panels = [histogram_panel(model, name, kind, is_first_line) for name in group_names]
            for line in in_lines(panels, MOST_COLUMNS):
                rows.append(name_row(line, model.name if len(models) > 1 else "share"))
            is_first_line = False
    rows[0][0] = add_legend(rows[0][0])
    columns = max(len(row) for row in rows)
    margins = Margins(left=1.3, right=0.1, top=0.5, bottom=0.7, between_columns=0.15, between_rows=0.3)
    row_heights = [SPACER_HEIGHT if row == [None] else PANEL_HEIGHT for row in rows]
    height = margins.top + margins.bottom + sum(row_heights) + (len(rows) - 1) * margins.between_rows
    return Picture(
        kind,
        flatten_rows(rows),
        (WIDTH, height),
        columns,
        below=explain_axes(kind),
        margins=margins,
        row_heights=row_heights,
    )


def explain_axes(kind: str) -> str:
    """Returns what the axes of the histograms are."""
    if kind == "weights":
        return (
            "Across: attention weights from 0 to 1.\n"
            "Up: the share of all weights, on a logarithmic scale from a millionth to 1."
        )
    return (
        f"Across: {NAMES[kind]}; each panel has its own range, without the lowest and the highest 0.1 %.\n"
        "Up: the share of all values, from 0."
    )


def histogram_panel(model: Model, name: str, kind: str, has_title: bool) -> Panel:
    """Returns the histogram of one attention."""
    figures = model.attentions[name]
    calls = stairs(figures["histograms"][kind])
    settings: dict[str, Any] = {}
    if has_title:
        calls.append(title(f"{GROUPS[figures['group']]}\nlayer {figures['layer']}"))
    if kind == "weights":
        settings["yscale"] = "log"
        settings["ylim"] = [SMALLEST_SHARE, 2]
        settings["xticks"] = [0, 0.5, 1]
    calls.append(without_ticks("y"))
    return Panel(calls, settings)


def stairs(histogram: Figures) -> list[Call]:
    """Returns the shares of a histogram's intervals, the trained state in front of the initial one, in gray."""
    calls: list[Call] = []
    for state, style in STATE_STYLES.items():
        shares = histogram["shares"].get(state)
        if shares:
            width = (histogram["high"] - histogram["low"]) / len(shares)
            edges = [histogram["low"] + i * width for i in range(len(shares) + 1)]
            calls.append(("stairs", [shares, edges], {"label": state, **style}))
    return calls


def name_row(row: Row, text: str) -> Row:
    """Returns a row with a label on its left."""
    first, *others = row
    assert first is not None
    return [first._replace(calls=[*first.calls, row_label(text)]), *others]


def add_legend(panel: Panel | None) -> Panel | None:
    """Returns a panel with a legend on its left, above the label of its row."""
    if panel is None:
        return None
    place = legend(loc="lower right", bbox_to_anchor=[-0.05, 0.95], borderaxespad=0)
    return panel._replace(calls=[*panel.calls, place])
