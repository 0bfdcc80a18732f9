"""Lines and bars: alpha, singular values, rank of the layers, removal of heads, heads without words, lengths."""

import itertools
from collections.abc import Sequence
from typing import Any

from ..drawing import WIDTH, Call, Margins, Panel, Picture, call, legend, line, tick_names, title
from ..results import Results
from .layout import (
    Row,
    add_to_first_panel,
    flatten_rows,
    label_x_axes,
    label_y_axes,
    label_y_axis,
    split_into_rows,
    title_columns,
)
from .models import Model, group_titles, loss_label, names_by_group

LABEL_HEIGHT = 0.6  # inches, below the last row of panels, for two lines of text


# ---- alpha

ALPHA_COLUMNS = 4
ALPHA_PANEL_HEIGHT = 0.85  # inches
ALPHA_MARGINS = Margins(left=0.75, right=0.1, top=0.6, bottom=0.5, between_columns=0.15, between_rows=0.6)


def alpha(models: Sequence[Model]) -> Picture:
    """Draws the weights alpha of mixtures: a panel for each attention that is a mixture, and in it a bar for each head.

    Each bar is divided among the functions of the mixture.
    """
    rows: list[Row] = []
    for model in models:
        label = label_of_model(model, "weight α", num_models=len(models))
        for row in split_into_rows(alpha_panels(model), ALPHA_COLUMNS):
            rows.append(label_y_axis(row, label))
    height = ALPHA_MARGINS.picture_height(len(rows) * ALPHA_PANEL_HEIGHT, num_rows=len(rows))
    return Picture(
        name="alpha",
        panels=flatten_rows(rows),
        size=(WIDTH, height),
        columns=max(len(row) for row in rows),
        share_y=True,
        margins=ALPHA_MARGINS,
        legend_columns=4,
    )


def alpha_panels(model: Model) -> list[Panel]:
    """Returns a panel for each attention of a model that is a mixture with learned weights."""
    panels = []
    for name, results in model.attentions.items():
        if results["alpha"]:
            panels.append(alpha_panel(name, results))
    return panels


def alpha_panel(name: str, results: Results) -> Panel:
    """Returns the weights of the functions in each head of one attention, as bars on top of each other.

    Args:
        name: the name of the attention, for the title.
        results: the results of the attention: ``heads``, their number, and ``alpha``, {function: a weight for each
            head}.
    """
    heads = list(range(results["heads"]))
    bottom = [0.0] * len(heads)  # where the bar of the next function begins
    calls: list[Call] = []
    for function, weights in results["alpha"].items():
        calls.append(call("bar", heads, weights, bottom=bottom, label=function))
        bottom = [lower + weight for lower, weight in zip(bottom, weights)]
    calls.append(title(name))
    return Panel(calls, {"xlabel": "head", "xticks": heads, "ylim": [0, 1]})


# ---- singular values

SINGULAR_VALUES_ROW_HEIGHT = 1.6  # inches
NUM_COLORS = 10  # that matplotlib calls C0 to C9
LAYER_LINE_STYLES = ("-", "--", ":")  # the second and third are for layers beyond the ten colors


def singular_values(models: Sequence[Model], names: Sequence[str]) -> Picture:
    """Draws the cumulative singular values of each head: a row of panels for each model, a column for each kind.

    A line shows the sum of the largest singular values of a head, relative to the sum of all of them. Its color shows
    the layer. The kinds are the kinds of attention, such as ``encoder.self``.

    Args:
        models: with the same layers.
        names: the attentions whose singular values every model has.
    """
    names_of_kind = names_by_group(models[0].attentions, names)  # {kind of attention: names of attentions}
    title_of_kind = group_titles(names_of_kind)  # {kind of attention: title of its column}
    rows: list[Row] = []
    for model in models:
        row: Row = []
        for kind in title_of_kind:
            row.append(Panel(calls=singular_value_lines(model, names_of_kind[kind]), settings={}))
        rows.append(row)

    # These functions add text at the edges of the rows and columns.
    rows = title_columns(rows, list(title_of_kind.values()))
    rows = add_to_first_panel(rows, legend())
    rows = label_x_axes(rows, "share of the singular values,\nlargest first")
    rows = label_y_axes(rows, [label_of_model(model, "share of their sum", len(models)) for model in models])

    height_of_all_panels = SINGULAR_VALUES_ROW_HEIGHT * len(models)
    return Picture(
        name="singular-values",
        panels=flatten_rows(rows),
        size=(WIDTH, height_of_all_panels + LABEL_HEIGHT),
        columns=len(title_of_kind),
        share_x=True,
        share_y=True,
    )


def label_of_model(model: Model, label: str, num_models: int) -> str:
    """Returns a label for a vertical axis. If the picture shows several models, the name of the model comes first."""
    if num_models == 1:
        return label
    return f"{model.name}\n{label}"


def singular_value_lines(model: Model, names: Sequence[str]) -> list[Call]:
    """Returns a line with the cumulative singular values of each head of some attentions.

    The lines rise from the left to the right, from 0 to 1. Their colors and styles show the layers.
    """
    calls = []
    for name in names:
        layer = model.attentions[name]["layer"]
        # Layers 0 to 9 have solid lines in ten colors, layers 10 to 19 dashed lines in the same colors, and so on.
        color = f"C{layer % NUM_COLORS}"
        style_number = layer // NUM_COLORS
        line_style = LAYER_LINE_STYLES[style_number % len(LAYER_LINE_STYLES)]
        for head, cumulative_values in enumerate(model.attentions[name]["singular_values"]):
            label = f"layer {layer}" if head == 0 else None  # one entry of the legend for all heads of a layer
            last = len(cumulative_values) - 1
            x = [number / last for number in range(len(cumulative_values))]  # evenly spaced from 0 to 1
            calls.append(line(x, cumulative_values, label, color, linewidth=1, linestyle=line_style))
    return calls


# ---- rank of the layers

RANK_PANEL_HEIGHT = 1.75  # inches
RANK_MARGINS = Margins(left=0.8, right=0.1, top=0.6, bottom=0.5, between_columns=0.15, between_rows=0.3)
RANK_LINE_STYLES = {"initial": "--", "trained": "-"}  # {state of a model: the style of its line}, in drawing order
MARKERS = ("o", "s", "^", "D", "v", "x")  # the models take these in turn


def rank(models: Sequence[Model]) -> Picture:
    """Draws how much the tokens still differ from each other after each layer, for trained and untrained models.

    If all tokens have the same vector, they form a matrix with equal rows, of rank 1. The picture shows the distance
    from such a matrix. It has a row of panels for the encoder and one for the decoder. It has a column for each way in
    which the layers were run, such as ``attention alone``, without feed-forward layers and skip connections. Each model
    has a color.
    """
    # {encoder or decoder: {branches: values after each layer}}; the branches are the parts of the layers that were run.
    values_by_stack = models[0].results["layers"]["trained"]  # The other models have the same keys.
    stacks = list(values_by_stack)
    all_branches = list(values_by_stack[stacks[0]])  # The decoder was run in the same ways as the encoder.
    rows: list[Row] = []
    for stack in stacks:
        row: Row = []
        for branches in all_branches:
            row.append(rank_panel(models, stack, branches))
        rows.append(row)

    # These functions add text at the edges of the rows and columns.
    rows = title_columns(rows, all_branches)
    rows = label_x_axes(rows, "layer")
    rows = label_y_axes(rows, [f"{stack}: distance\nfrom equal rows" for stack in stacks])

    height_of_all_panels = len(stacks) * RANK_PANEL_HEIGHT
    height = RANK_MARGINS.picture_height(height_of_all_panels, num_rows=len(stacks))
    return Picture(
        name="rank",
        panels=flatten_rows(rows),
        size=(WIDTH, height),
        columns=len(all_branches),
        share_y="row",
        margins=RANK_MARGINS,
        legend_columns=6,
    )


def rank_panel(models: Sequence[Model], stack: str, branches: str) -> Panel:
    """Returns a panel that shows how much the tokens differ after each layer, with two lines for each model.

    Args:
        models: with the same layers.
        stack: ``encoder`` or ``decoder``.
        branches: the way in which the layers were run, such as ``attention alone``.
    """
    calls: list[Call] = []
    for model, marker in zip(models, itertools.cycle(MARKERS)):
        calls += rank_lines(model, marker, stack, branches)
    calls += explain_states()
    num_layers = len(distances_from_equal_rows(models[0], "trained", stack, branches))
    return Panel(calls, {"yscale": "log", "xticks": list(range(num_layers))})


def explain_states() -> list[Call]:
    """Returns two entries of the legend, which explain the line styles of trained and initial models.

    matplotlib makes an entry for each line. These lines have no points, so they are seen only in the legend.
    """
    calls = []
    for state in ("trained", "initial"):
        calls.append(line([], [], state, "gray", linestyle=RANK_LINE_STYLES[state]))
    return calls


def rank_lines(model: Model, marker: str, stack: str, branches: str) -> list[Call]:
    """Returns lines that show how much the tokens differ after each layer of a model.

    There is a line for the trained model, and one for the model before its training if it was measured.

    Args:
        model: the model.
        marker: matplotlib's name for the shape of the points.
        stack: ``encoder`` or ``decoder``.
        branches: the way in which the layers were run, such as ``attention alone``.
    """
    calls = []
    for state, line_style in RANK_LINE_STYLES.items():
        distances = distances_from_equal_rows(model, state, stack, branches)
        if not distances:
            continue  # this state was not measured
        # Both lines have the color of the model, so one entry in the legend is enough. The trained model has it.
        label = model.name if state == "trained" else None
        layers = list(range(len(distances)))
        style = {"linestyle": line_style, "linewidth": 1, "marker": marker, "markersize": 3}
        calls.append(line(x=layers, y=distances, label=label, color=model.color, **style))
    return calls


def distances_from_equal_rows(model: Model, state: str, stack: str, branches: str) -> list[float]:
    """Returns how much the tokens differ from each other after each layer, from the results of a model.

    A value of 0 means that all tokens have the same vector after this layer. The list is empty if the results lack the
    state or the stack.

    Args:
        model: the model.
        state: ``trained`` or ``initial``. The model before its training is not always known.
        stack: ``encoder`` or ``decoder``.
        branches: the way in which the layers were run, such as ``attention alone``.
    """
    results_of_state = model.results["layers"].get(state, {})
    if stack not in results_of_state:
        return []
    # The distance of the tokens, as a matrix, from the closest matrix of equal rows, for each layer.
    distances: list[float] = results_of_state[stack][branches]["equal_rows"]
    return distances


# ---- removal of heads

REMOVAL_ROW_HEIGHT = 2.0  # inches


def removal(models: Sequence[Model]) -> Picture:
    """Draws how loss and BLEU change as more and more heads are removed, with a line for each model.

    The first row of panels shows the loss. A second row shows BLEU, if every model has it. There is a column for each
    kind of attention, such as encoder self-attention.
    """
    label_of_metric = {"loss": loss_label(models)}  # {metric of a row: label of its vertical axis}
    if has_bleu_of_removal(models):
        label_of_metric["bleu"] = "BLEU"
    title_of_kind = group_titles(models[0].results["removal"]["groups"])  # {kind of attention: title of its column}
    rows: list[Row] = []
    for metric in label_of_metric:
        row: Row = []
        for kind in title_of_kind:
            row.append(Panel(calls=removal_lines(models, kind, metric), settings={}))
        rows.append(row)

    # These functions add text at the edges of the rows and columns.
    rows = title_columns(rows, list(title_of_kind.values()))
    rows = add_to_first_panel(rows, legend())
    rows = label_x_axes(rows, "share of these heads removed,\nleast important first")
    rows = label_y_axes(rows, list(label_of_metric.values()))

    height_of_all_panels = REMOVAL_ROW_HEIGHT * len(rows)
    return Picture(
        name="removal",
        panels=flatten_rows(rows),
        size=(WIDTH, height_of_all_panels + LABEL_HEIGHT),
        columns=len(title_of_kind),
        share_y="row",
    )


def removal_lines(models: Sequence[Model], kind: str, metric: str) -> list[Call]:
    """Returns a line for each model: a metric as a function of the share of heads that are removed.

    Args:
        models: the models.
        kind: the kind of attention whose heads are removed, such as ``encoder.self``.
        metric: ``loss`` or ``bleu``.
    """
    calls = []
    for model in models:
        curve = model.results["removal"]["groups"][kind]
        calls.append(line(curve["share"], curve[metric], model.name, model.color, marker="."))
    return calls


def has_bleu_of_removal(models: Sequence[Model]) -> bool:
    """Returns whether BLEU was measured for every model as its heads were removed."""
    for model in models:
        for curve in model.results["removal"]["groups"].values():
            if None in curve["bleu"]:
                return False
    return True


# ---- heads without words

WITHOUT_WORDS_HEIGHT = 3.2  # inches


def without_words(models: Sequence[Model]) -> Picture:
    """Draws how the loss grows as more and more heads of self-attention are replaced by heads that ignore the words.

    A dashed line shows the loss before any head is replaced. If there is a single model, a point for each head shows
    whether the head is in the encoder or in the decoder.
    """
    if len(models) == 1:
        calls = without_words_of_one(models[0])
    else:
        calls = without_words_of_several(models)
    calls.append(legend(loc="upper left"))
    num_heads = len(models[0].results["words"]["heads"])
    settings = {"xlabel": f"heads replaced (of {num_heads}), cheapest first", "ylabel": loss_label(models)}
    return Picture(name="without-words", panels=[Panel(calls, settings)], size=(WIDTH, WITHOUT_WORDS_HEIGHT))


def without_words_of_one(model: Model) -> list[Call]:
    """Returns the loss of a model as a line over the number of replaced heads, with a point for each head."""
    losses = model.results["words"]["loss"]  # with 0, 1, 2, … heads replaced
    counts = list(range(len(losses)))
    label = f"{model.name}, no head replaced"
    return [
        call("axhline", losses[0], color=model.color, linestyle="--", linewidth=1, label=label),
        line(counts, losses, None, model.color, linewidth=1),
        *replaced_head_points(model),
    ]


def without_words_of_several(models: Sequence[Model]) -> list[Call]:
    """Returns the loss of each model as a line over the number of replaced heads, and a dashed line where it begins."""
    calls: list[Call] = []
    for model in models:
        losses = model.results["words"]["loss"]
        counts = list(range(len(losses)))
        calls.append(call("axhline", losses[0], color=model.color, linestyle="--", linewidth=1))
        calls.append(line(counts, losses, model.name, model.color, marker="."))
    calls.append(line([], [], "no head replaced", "gray", linestyle="--"))  # explains the dashed lines in the legend
    return calls


def replaced_head_points(model: Model) -> list[Call]:
    """Returns a point for each replaced head: x is the number of heads replaced so far, y is the loss.

    The points of heads of the encoder are filled, and the points of heads of the decoder are white.
    """
    loss_by_count = model.results["words"]["loss"]  # a list: the loss with 0, 1, 2, … heads replaced
    calls: list[Call] = []
    for stack, filling in (("encoder", model.color), ("decoder", "white")):
        counts = replacement_numbers(model, stack)
        if not counts:
            continue
        losses = [loss_by_count[count] for count in counts]
        points = call(
            "scatter",
            counts,
            losses,
            label=f"one more head of the {stack} replaced",
            facecolor=filling,
            edgecolor=model.color,
            s=22,  # the area of a point, in square points of print
            zorder=3,  # in front of the lines
        )
        calls.append(points)
    return calls


def replacement_numbers(model: Model, stack: str) -> list[int]:
    """Returns the places of the heads of a stack, ``encoder`` or ``decoder``, in the order of their replacement.

    Places count from 1. For example, first a head of the decoder was replaced, and then two heads of the encoder. Then
    the result for the encoder is [2, 3].
    """
    replaced_heads = model.results["words"]["heads"]  # in this order, each as [attention, number of the head]
    places = []
    for place, (attention, _head_number) in enumerate(replaced_heads, start=1):
        if attention.startswith(stack):
            places.append(place)
    return places


# ---- lengths

LENGTHS_HEIGHT = 2.8  # inches
# The width of all bars of a range together, relative to the distance between the middles of two ranges.
GROUP_WIDTH = 0.8


def lengths(models: Sequence[Model]) -> Picture:
    """Draws loss, and BLEU if every model has it, for each range of sentence lengths, with a bar for each model."""
    panels = [lengths_panel(models, "loss", label=loss_label(models))]
    if has_bleu_of_lengths(models):
        panels.append(lengths_panel(models, "bleu", label="BLEU"))
    return Picture(name="lengths", panels=panels, size=(WIDTH, LENGTHS_HEIGHT), columns=len(panels), legend_columns=4)


def has_bleu_of_lengths(models: Sequence[Model]) -> bool:
    """Returns whether every model translates, and therefore has BLEU for each range of sentence lengths."""
    for model in models:
        if None in range_values(model, "bleu"):
            return False
    return True


def range_values(model: Model, metric: str) -> list[Any]:
    """Returns ``loss`` or ``bleu`` of a model for each range of lengths. BLEU that was not measured is None."""
    return [length_range[metric] for length_range in model.results["lengths"]["ranges"]]


def lengths_panel(models: Sequence[Model], metric: str, label: str) -> Panel:
    """Returns a panel with a metric for each range of sentence lengths, with a bar for each model.

    Args:
        models: the models.
        metric: ``loss`` or ``bleu``.
        label: the label of the vertical axis.
    """
    values_of_models = [range_values(model, metric) for model in models]
    calls = draw_bars(models, values_of_models)
    # Below the lengths of each range, `range_names` writes its number of sentences in parentheses.
    return Panel(calls, {"xlabel": "tokens of a sentence (sentences)", "ylabel": label})


def draw_bars(models: Sequence[Model], values_of_models: Sequence[Sequence[Any]]) -> list[Call]:
    """Returns the bars of a panel: for each range of sentence lengths, a group with a bar for each model.

    Args:
        models: the models.
        values_of_models: for each model, a value for each range.
    """
    ranges = models[0].results["lengths"]["ranges"]
    calls = [tick_names("x", range_names(ranges))]  # the middles of the groups are at the places 0, 1, 2, …
    bar_width = GROUP_WIDTH / len(models)
    middle_model = (len(models) - 1) / 2  # for example, 0.5 is in the middle of two models with the numbers 0 and 1
    for number, (model, values) in enumerate(zip(models, values_of_models)):
        distance_from_middle = (number - middle_model) * bar_width
        places = [middle_of_group + distance_from_middle for middle_of_group in range(len(ranges))]
        calls.append(call("bar", places, values, bar_width, color=model.color, label=model.name))
    return calls


def range_names(ranges: Sequence[Results]) -> list[str]:
    """Returns a name for each range of sentence lengths, such as 9–16, with its number of sentences below it."""
    names = []
    shortest = 1
    for length_range in ranges:
        longest = length_range["longest"]
        names.append(f"{shortest}–{longest}\n({length_range['sentences']:,})")
        shortest = longest + 1
    return names
