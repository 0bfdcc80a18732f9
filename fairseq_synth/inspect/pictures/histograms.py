"""Histograms of parameters, logits and attention weights, before and after the training."""

from collections.abc import Sequence
from typing import Any

from ..drawing import WIDTH, Call, Margins, Panel, Picture, call, legend, title, without_ticks
from ..results import Results
from .layout import (
    Row,
    add_to_first_panel,
    flatten_rows,
    is_empty_row,
    join_below_each_other,
    name_row,
    split_into_rows,
)
from .models import GROUPS, Model, names_by_group

MOST_COLUMNS = 6

# All sizes are in inches.
PANEL_HEIGHT = 0.5
SPACER_HEIGHT = 0.15  # the height of an empty row between two kinds of attention
MARGINS = Margins(
    left=1.3,  # for the names of the models, and for the legend
    right=0.1,
    top=0.5,  # for the titles of the first row
    bottom=0.7,  # for the numbers of the axis, and the two lines of text below
    between_columns=0.15,
    between_rows=0.3,
)

STATE_STYLES: dict[str, dict[str, Any]] = {  # in drawing order: the trained state is in front
    "initial": {"color": "0.75", "fill": True},  # gray
    "trained": {"color": "tab:blue"},
}
VALUE_NAMES = {"parameters": "parameters of the logits", "logits": "logits", "weights": "attention weights"}
SMALLEST_SHARE = 1e-6  # at the lower end of the logarithmic axis
LARGEST_SHARE = 2  # at its upper end: a share is 1 at most, and some space is left above it


def histograms(models: Sequence[Model], names: Sequence[str], kind: str) -> Picture:
    """Draws histograms: a row of panels for each kind of attention and model, a column for each layer.

    Args:
        models: with the same layers.
        names: the attentions that have the histogram in every model.
        kind: what the values are: ``parameters``, ``logits`` or ``weights``.
    """
    rows_of_kinds: list[list[Row]] = []  # the rows of one kind of attention, then those of the next
    for names_of_kind in names_by_group(models[0].attentions, names).values():
        rows_of_kinds.append(group_rows(models, names_of_kind, kind))
    # An empty row between two kinds makes room for the titles above the second.
    rows = join_below_each_other(rows_of_kinds)
    rows = add_to_first_panel(rows, legend_on_the_left())

    row_heights = [row_height(row) for row in rows]  # An empty row is lower than the others.
    height = MARGINS.picture_height(sum(row_heights), num_rows=len(rows))
    return Picture(
        name=kind,
        panels=flatten_rows(rows),
        size=(WIDTH, height),
        columns=max(len(row) for row in rows),
        below=explain_axes(kind),
        margins=MARGINS,
        row_heights=row_heights,
    )


def row_height(row: Row) -> float:
    """Returns the height of a row of panels, or of the empty row between two kinds of attention, in inches."""
    return SPACER_HEIGHT if is_empty_row(row) else PANEL_HEIGHT


def legend_on_the_left() -> Call:
    """Returns a legend on the left of a panel, above the name of the panel's row."""
    # The lower right corner of the legend is just outside the upper left corner of the panel, which is [0, 1].
    return legend(loc="lower right", bbox_to_anchor=[-0.05, 0.95], borderaxespad=0)


def group_rows(models: Sequence[Model], names: Sequence[str], kind: str) -> list[Row]:
    """Returns the histograms of one kind of attention: a row for each model, or several if it has many layers.

    Args:
        models: with the same layers.
        names: the attentions, one of each layer.
        kind: what the values are: ``parameters``, ``logits`` or ``weights``.
    """
    rows: list[Row] = []
    for model in models:
        # Only the first model has titles, which name the layers. The rows of the others show the same layers below it.
        has_titles = model is models[0]
        panels = [histogram_panel(model, name, kind, has_titles) for name in names]
        name_of_rows = model.name
        if len(models) == 1:
            name_of_rows = "share"  # the quantity on the vertical axis, as a single model needs no name
        for row in split_into_rows(panels, MOST_COLUMNS):
            rows.append(name_row(row, name_of_rows))
    return rows


def explain_axes(kind: str) -> str:
    """Returns a text that says what the axes of the histograms are.

    Args:
        kind: what the values are: ``parameters``, ``logits`` or ``weights``.
    """
    if kind == "weights":
        return (
            "Horizontal axis: attention weights from 0 to 1.\n"
            "Vertical axis: the share of all weights, on a logarithmic scale from a millionth to 1."
        )
    return (
        f"Horizontal axis: {VALUE_NAMES[kind]}; each panel omits the lowest and the highest 0.1 % of its values.\n"
        "Vertical axis: the share of all values, from 0."
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
        kind_of_attention = GROUPS[results["group"]]
        calls.append(title(f"{kind_of_attention}\nlayer {results['layer']}"))
    calls.append(without_ticks("y"))
    settings: dict[str, Any] = {}
    if kind == "weights":
        settings = {"yscale": "log", "ylim": [SMALLEST_SHARE, LARGEST_SHARE], "xticks": [0, 0.5, 1]}
    return Panel(calls, settings)


def draw_shares(histogram: Results) -> list[Call]:
    """Returns calls of matplotlib's ``stairs`` that draw a histogram of the initial state and one of the trained state.

    Args:
        histogram: ``low`` and ``high``, the range of the values; and ``shares``, {``initial`` or ``trained``: the share
            of the values in each interval of this range}. The initial state is not always known.
    """
    low = histogram["low"]
    high = histogram["high"]
    calls: list[Call] = []
    for state, style in STATE_STYLES.items():
        shares = histogram["shares"].get(state)
        if shares:
            interval_width = (high - low) / len(shares)
            num_edges = len(shares) + 1
            edges = [low + edge * interval_width for edge in range(num_edges)]
            calls.append(call("stairs", shares, edges, label=state, **style))
    return calls
