"""Lines and bars: alpha, singular values, rank of the layers, removal of heads, heads without words, lengths."""

from collections.abc import Sequence
from typing import Any

from ..drawing import WIDTH, Call, Margins, Panel, Picture, legend, line, tick_names, title
from ..subject import Figures
from .models import KINDS, Model, Row, flatten_rows, group_titles, in_lines, loss_label, names_by_group

ALPHA_COLUMNS = 4
LINE_STYLES = ("-", "--", ":")  # for more layers than there are colors
NUM_COLORS = 10
MARKERS = ("o", "s", "^", "D", "v", "x")


def alpha(models: Sequence[Model]) -> Picture:
    """Returns a panel for each layer of each model with mixtures: a bar for each head, divided among the functions."""
    rows: list[Row] = []
    for model in models:
        panels: Row = [alpha_panel(name, figures) for name, figures in model.attentions.items() if figures["alpha"]]
        label = f"{model.name}\nweight α" if len(models) > 1 else "weight α"
        for row in in_lines(panels, ALPHA_COLUMNS):
            row[0] = label_panel(row[0], label)
            rows.append(row)
    columns = max(len(row) for row in rows)
    margins = Margins(left=0.75, right=0.1, top=0.6, bottom=0.5, between_columns=0.15, between_rows=0.6)
    height = margins.top + margins.bottom + len(rows) * 0.85 + (len(rows) - 1) * margins.between_rows
    return Picture(
        "alpha", flatten_rows(rows), (WIDTH, height), columns, share_y=True, margins=margins, legend_columns=4
    )


def alpha_panel(name: str, figures: Figures) -> Panel:
    """Returns the weights of the functions of one attention, as bars on top of each other."""
    calls: list[Call] = []
    heads = list(range(figures["heads"]))
    bottom = [0.0] * figures["heads"]
    for function, weights in figures["alpha"].items():
        calls.append(("bar", [heads, weights], {"bottom": bottom, "label": function}))
        bottom = [low + weight for low, weight in zip(bottom, weights)]
    calls.append(title(name))
    return Panel(calls, {"xlabel": "head", "xticks": heads, "ylim": [0, 1]})


def label_panel(panel: Panel | None, label: str) -> Panel | None:
    """Returns a panel with a label on its left."""
    if panel is None:
        return None
    return panel._replace(settings={**panel.settings, "ylabel": label})


def singular_values(models: Sequence[Model], names: Sequence[str]) -> Picture:
    """Returns a row for each model, a column for each kind of attention; a line for each head, colored by layer."""
    groups = names_by_group(models[0].attentions, names)
    rows: list[Row] = []
    for model in models:
        row: Row = []
        for group, group_title in group_titles(groups).items():
            calls = singular_value_lines(model, groups[group])
            if not rows:
                calls.append(title(group_title))
            if not rows and not row:
                calls.append(legend())
            settings: dict[str, Any] = {}
            if model is models[-1]:
                settings["xlabel"] = "share of the singular values,\nlargest first"
            if not row:
                name = f"{model.name}\n" if len(models) > 1 else ""
                settings["ylabel"] = f"{name}share of their sum"
            row.append(Panel(calls, settings))
        rows.append(row)
    size = (WIDTH, 1.6 * len(rows) + 0.6)
    return Picture("singular-values", flatten_rows(rows), size, len(groups), share_x=True, share_y=True)


def singular_value_lines(model: Model, names: Sequence[str]) -> list[Call]:
    """Returns a line for each head of some attentions."""
    calls = []
    for name in names:
        layer = model.attentions[name]["layer"]
        line_style = LINE_STYLES[layer // NUM_COLORS % len(LINE_STYLES)]
        for head, values in enumerate(model.attentions[name]["singular_values"]):
            label = f"layer {layer}" if head == 0 else None
            shares = [place / (len(values) - 1) for place in range(len(values))]
            calls.append(line(shares, values, label, f"C{layer % NUM_COLORS}", linewidth=1, linestyle=line_style))
    return calls


def rank(models: Sequence[Model]) -> Picture:
    """Returns a row for each stack, a column for each choice of branches; two lines for each model."""
    trained = models[0].figures["layers"]["trained"]
    rows: list[Row] = []
    for stack, by_branches in trained.items():
        row: Row = []
        for branches, distances in by_branches.items():
            calls = rank_lines(models, stack, branches)
            if not rows:
                calls.append(title(branches))
            settings: dict[str, Any] = {"yscale": "log", "xticks": list(range(len(distances["equal_rows"])))}
            if stack == list(trained)[-1]:
                settings["xlabel"] = "layer"
            if not row:
                settings["ylabel"] = f"{stack}: distance\nfrom equal rows"
            row.append(Panel(calls, settings))
        rows.append(row)
    margins = Margins(left=0.8, right=0.1, top=0.6, bottom=0.5, between_columns=0.15, between_rows=0.3)
    height = margins.top + margins.bottom + len(rows) * 1.75 + (len(rows) - 1) * margins.between_rows
    return Picture(
        "rank",
        flatten_rows(rows),
        (WIDTH, height),
        len(rows[0]),
        share_y="row",
        margins=margins,
        legend_columns=6,
    )


def rank_lines(models: Sequence[Model], stack: str, branches: str) -> list[Call]:
    """Returns the lines of one panel of `rank`, and gray ones that explain the styles in the legend."""
    calls = []
    for number, model in enumerate(models):
        marker = MARKERS[number % len(MARKERS)]
        for state, line_style in (("initial", "--"), ("trained", "-")):
            by_stack = model.figures["layers"].get(state, {})
            if stack in by_stack:
                values = by_stack[stack][branches]["equal_rows"]
                label = model.name if state == "trained" else None
                style = {"linestyle": line_style, "linewidth": 1, "marker": marker, "markersize": 3}
                calls.append(line(list(range(len(values))), values, label, model.color, **style))
    calls.append(line([], [], "trained", "gray", linestyle="-"))
    calls.append(line([], [], "initial", "gray", linestyle="--"))
    return calls


def removal(models: Sequence[Model]) -> Picture:
    """Returns a row for the loss, and one for BLEU if there is any, a column for each kind of attention."""
    groups = group_titles(models[0].figures["removal"]["groups"])
    kinds = {"loss": loss_label(models)}
    if has_bleu_of_removal(models):
        kinds["bleu"] = "BLEU"
    rows: list[Row] = []
    for kind, label in kinds.items():
        row: Row = []
        for group, group_title in groups.items():
            calls = []
            for model in models:
                curve = model.figures["removal"]["groups"][group]
                calls.append(line(curve["share"], curve[kind], model.name, model.color, marker="."))
            if not rows:
                calls.append(title(group_title))
            if not rows and not row:
                calls.append(legend())
            settings: dict[str, Any] = {}
            if kind == list(kinds)[-1]:
                settings["xlabel"] = "share of these heads removed,\nleast important first"
            if not row:
                settings["ylabel"] = label
            row.append(Panel(calls, settings))
        rows.append(row)
    return Picture("removal", flatten_rows(rows), (WIDTH, 2 * len(rows) + 0.6), len(groups), share_y="row")


def has_bleu_of_removal(models: Sequence[Model]) -> bool:
    """Returns whether every model has BLEU without some heads."""
    for model in models:
        for curve in model.figures["removal"]["groups"].values():
            if None in curve["bleu"]:
                return False
    return True


def without_words(models: Sequence[Model]) -> Picture:
    """Returns the loss of each model as more and more heads of self-attention look by position alone.

    A dashed line is the loss with no head replaced. Of a single model the points tell the encoder's heads from the
    decoder's.
    """
    calls: list[Call] = []
    for model in models:
        losses = model.figures["words"]["loss"]
        style = {"linewidth": 1} if len(models) == 1 else {"marker": "."}
        label = None if len(models) == 1 else model.name
        calls.append(("axhline", [losses[0]], {"color": model.color, "linestyle": "--", "linewidth": 1}))
        calls.append(line(list(range(len(losses))), losses, label, model.color, **style))
    if len(models) == 1:
        calls[0][2]["label"] = f"{models[0].name}, no head replaced"
        calls += replaced_head_points(models[0])
    else:
        calls.append(line([], [], "no head replaced", "gray", linestyle="--"))
    calls.append(legend(loc="upper left"))
    num_heads = len(models[0].figures["words"]["heads"])
    settings = {"xlabel": f"heads replaced (of {num_heads}), cheapest first", "ylabel": loss_label(models)}
    return Picture("without-words", [Panel(calls, settings)], (WIDTH, 3.2))


def replaced_head_points(model: Model) -> list[Call]:
    """Returns a point for each head that is replaced, in a style for each stack."""
    words = model.figures["words"]
    calls: list[Call] = []
    for stack, filling in (("encoder", model.color), ("decoder", "white")):
        counts = []
        losses = []
        for count, (attention, _) in enumerate(words["heads"], start=1):
            if attention.startswith(stack):
                counts.append(count)
                losses.append(words["loss"][count])
        if counts:
            style = {"facecolor": filling, "edgecolor": model.color, "s": 22, "zorder": 3}
            calls.append(("scatter", [counts, losses], {"label": f"one more head of the {stack} replaced", **style}))
    return calls


def lengths(models: Sequence[Model]) -> Picture:
    """Returns loss, and BLEU if there is any, for each range of lengths, a bar for each model."""
    ranges = models[0].figures["lengths"]["ranges"]
    panels: Row = []
    for kind in KINDS:
        values = [[part[kind] for part in model.figures["lengths"]["ranges"]] for model in models]
        if any(None in model_values for model_values in values):
            continue
        calls = [tick_names("x", range_names(ranges))]
        width = 0.8 / len(models)
        for number, (model, model_values) in enumerate(zip(models, values)):
            shift = (number - (len(models) - 1) / 2) * width  # from the middle of all bars of a range
            places = [place + shift for place in range(len(ranges))]
            calls.append(("bar", [places, model_values, width], {"color": model.color, "label": model.name}))
        label = loss_label(models) if kind == "loss" else KINDS[kind]
        panels.append(Panel(calls, {"xlabel": "tokens of a sentence (sentences)", "ylabel": label}))
    return Picture("lengths", panels, (WIDTH, 2.8), len(panels), legend_columns=4)


def range_names(ranges: Sequence[Figures]) -> list[str]:
    """Returns a name for each range of lengths, with its number of sentences."""
    names = []
    shortest = 1
    for part in ranges:
        names.append(f"{shortest}–{part['longest']}\n({part['sentences']:,})")
        shortest = part["longest"] + 1
    return names
