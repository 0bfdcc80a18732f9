"""Histograms of parameters, logits and attention weights, before and after the training."""

from collections.abc import Sequence
from typing import Any

from ..drawing import WIDTH, Call, Margins, Panel, Picture, legend, row_label, title, without_ticks
from ..results import Results
from .layout import Row, add_call, add_to_first_panel, flatten_rows, split_in_lines
from .models import GROUPS, Model, names_by_group

MOST_COLUMNS = 6
PANEL_HEIGHT = 0.5  # inches
SPACER: Row = [None]  # an empty row, which makes room for the titles of the next kind of attention
SPACER_HEIGHT = 0.15  # inches
STATE_STYLES: dict[str, dict[str, Any]] = {  # in drawing order: the trained state is in front
    "initial": {"color": "0.75", "fill": True},  # gray
    "trained": {"color": "tab:blue"},
}
NAMES = {"parameters": "parameters of the logits", "logits": "logits", "weights": "attention weights"}
SMALLEST_SHARE = 1e-6  # at the lower end of the logarithmic axis


def histograms(models: Sequence[Model], names: Sequence[str], kind: str) -> Picture:
    """Draws histograms: a row for each kind of attention and model, a column for each layer.

    Args:
        models: with the same layers.
        names: the attentions that have the histogram in every model.
        kind: what the values are: ``parameters``, ``logits`` or ``weights``.
    """
    rows: list[Row] = []
    for group_names in names_by_group(models[0].attentions, names).values():
        if rows:
            rows.append(SPACER)
        rows += group_rows(models, group_names, kind)
    # The legend is on the left of the first panel, above the label of its row. The place is in shares of the panel.
    legend_on_the_left = legend(loc="lower right", bbox_to_anchor=[-0.05, 0.95], borderaxespad=0)
    rows = add_to_first_panel(rows, legend_on_the_left)
    row_heights = [SPACER_HEIGHT if row == SPACER else PANEL_HEIGHT for row in rows]
    margins = Margins(left=1.3, right=0.1, top=0.5, bottom=0.7, between_columns=0.15, between_rows=0.3)
    return Picture(
        name=kind,
        panels=flatten_rows(rows),
        size=(WIDTH, margins.picture_height(sum(row_heights), num_rows=len(rows))),
        columns=max(len(row) for row in rows),
        below=explain_axes(kind),
        margins=margins,
        row_heights=row_heights,
    )


def group_rows(models: Sequence[Model], names: Sequence[str], kind: str) -> list[Row]:
    """Returns the histograms of one kind of attention: a row for each model, or several if it has many layers.

    Args:
        models: with the same layers.
        names: the attentions, one of each layer.
        kind: what the values are: ``parameters``, ``logits`` or ``weights``.
    """
    rows: list[Row] = []
    for model in models:
        has_titles = model is models[0]
        panels = [histogram_panel(model, name, kind, has_titles) for name in names]
        # A row is labelled with its model; the row of a single model, with the quantity on its vertical axis.
        label = model.name if len(models) > 1 else "share"
        for line in split_in_lines(panels, MOST_COLUMNS):
            first_panel, *other_panels = line
            rows.append([add_call(first_panel, row_label(label)), *other_panels])
    return rows


def explain_axes(kind: str) -> str:
    """Returns a text that says what the axes of the histograms are.

    Args:
        kind: what the values are: ``parameters``, ``logits`` or ``weights``.
    """
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
    """Returns the histogram of one attention.

    Args:
        model: the model.
        name: the name of the attention.
        kind: what the values are: ``parameters``, ``logits`` or ``weights``.
        has_title: whether the attention is named above the panel.
    """
    results = model.attentions[name]
    calls = draw_shares(results["histograms"][kind])
    if has_title:
        calls.append(title(f"{GROUPS[results['group']]}\nlayer {results['layer']}"))
    calls.append(without_ticks("y"))
    settings: dict[str, Any] = {}
    if kind == "weights":
        settings = {"yscale": "log", "ylim": [SMALLEST_SHARE, 2], "xticks": [0, 0.5, 1]}
    return Panel(calls, settings)


def draw_shares(histogram: Results) -> list[Call]:
    """Returns calls of matplotlib's ``stairs`` that draw a histogram of the initial state and one of the trained state.

    Args:
        histogram: ``low`` and ``high``, the range, and ``shares``, {state: the share of each interval}.
    """
    low = histogram["low"]
    calls: list[Call] = []
    for state, style in STATE_STYLES.items():
        shares = histogram["shares"].get(state)
        if shares:
            width = (histogram["high"] - low) / len(shares)  # the width of an interval
            edges = [low + i * width for i in range(len(shares) + 1)]
            calls.append(("stairs", [shares, edges], {"label": state, **style}))
    return calls
