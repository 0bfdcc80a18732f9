"""Attention weights as matrices: means by position, and the weights for single sentences."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..drawing import (
    WIDTH,
    Margins,
    Panel,
    Picture,
    colors,
    heading,
    row_label,
    tick_names,
    title,
    without_ticks,
)
from ..results import Results
from .layout import Row, add_call, add_to_first_panel, flatten_rows, split_in_lines, title_columns
from .models import Model, group_titles, names_by_group

MOST_COLUMNS = 16  # heads side by side; models with more in all are drawn below each other
LARGEST_CELL = 0.9  # inches, of the matrix of a head
SMALLEST_WIDTH = 6.2  # inches, which the text below needs
TOKEN_SIZE = 0.085  # inches that a line with the name of a token needs
SMALLEST_PANEL = 1.0  # inches
LETTER_WIDTH = 0.06  # inches, of a token's name
LONGEST_NAME = 14  # letters of a token
STYLE = {"cmap": "Blues", "vmin": 0}


# ---- means by position


def patterns(models: Sequence[Model], names: Sequence[str]) -> Picture:
    """Draws the mean attention weights by position: a row for each attention, a column for each head of each model.

    Args:
        models: with the same layers and heads.
        names: the attentions whose mean weights every model has.
    """
    rows = pattern_rows(models, names)
    columns = len(rows[0])
    margins = Margins(left=1.05, right=0.08, top=0.45, bottom=0.62, between_columns=0.05, between_rows=0.05)
    room = WIDTH - margins.left - margins.right - (columns - 1) * margins.between_columns
    cell = min(LARGEST_CELL, room / columns)
    width_of_margins = WIDTH - room  # the white space at the edges and between the columns
    width = max(SMALLEST_WIDTH, width_of_margins + columns * cell)
    height = margins.picture_height(len(rows) * cell, num_rows=len(rows))
    below = (
        "A small square is a head: each of its rows is a position that attends, each column a position\n"
        "that is attended to, from 0 at the top left. White is 0, dark blue the head's largest weight."
    )
    return Picture("patterns", flatten_rows(rows), (width, height), columns, below=below, margins=margins)


def pattern_rows(models: Sequence[Model], names: Sequence[str]) -> list[Row]:
    """Returns the mean attention weights of all models, side by side if there is room, else below each other.

    Args:
        models: with the same layers and heads.
        names: the attentions.
    """
    num_heads = max(models[0].attentions[name]["heads"] for name in names)
    is_side_by_side = len(models) * num_heads <= MOST_COLUMNS
    rows_of_models = []
    for model in models:
        rows = model_rows(model, names, num_heads)
        rows = title_columns(rows, [str(head) for head in range(num_heads)])
        above = f"{model.name}, head" if len(models) > 1 else "head"
        rows = add_to_first_panel(rows, heading(above, points=17))
        # Models side by side share the names of the attentions, which are at the left edge of the picture.
        is_at_left_edge = model is models[0] or not is_side_by_side
        if is_at_left_edge:
            rows = name_attentions(rows, names)
        rows_of_models.append(rows)
    if is_side_by_side:
        return join_side_by_side(rows_of_models)
    return join_below_each_other(rows_of_models)


def name_attentions(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Returns copies of rows, each with the name of its attention on the left."""
    named = []
    for row, name in zip(rows, names):
        first_panel, *other_panels = row
        named.append([add_call(first_panel, row_label(name)), *other_panels])
    return named


def model_rows(model: Model, names: Sequence[str], num_heads: int) -> list[Row]:
    """Returns the mean attention weights of a model: a row for each attention, a column for each head.

    Args:
        model: the model.
        names: the attentions.
        num_heads: the number of columns; an attention with fewer heads has empty places at the end of its row.
    """
    rows: list[Row] = []
    for name in names:
        row: Row = []
        for matrix in model.attentions[name]["pattern"]:
            row.append(Panel([colors(matrix, **STYLE), without_ticks()], {}))
        rows.append(row + [None] * (num_heads - len(row)))
    return rows


def join_side_by_side(rows_of_models: Sequence[Sequence[Row]]) -> list[Row]:
    """Returns the rows of several models beside each other: first rows form the first row, and so on."""
    joined: list[Row] = []
    for rows in zip(*rows_of_models):
        row: Row = []
        for row_of_model in rows:
            row += row_of_model
        joined.append(row)
    return joined


def join_below_each_other(rows_of_models: Sequence[Sequence[Row]]) -> list[Row]:
    """Returns the rows of several models below each other, with an empty row between two models."""
    joined = list(rows_of_models[0])
    for rows in rows_of_models[1:]:
        joined.append([None])
        joined += rows
    return joined


# ---- single sentences


class SentenceTokens(NamedTuple):
    """What the rows and the columns of the attention weights for a sentence stand for."""

    rows: list[str]
    columns: list[str]


def sentences(models: Sequence[Model]) -> Iterator[Picture]:
    """Yields pictures of the attention weights for each single sentence that all models have read.

    There is a picture for each sentence and kind of attention, such as ``sentence1-cross-attention``. The number in
    this name counts the sentences of the first model, from 1.
    """
    sentences_of_models = [sentences_by_number(model) for model in models]
    for place, number in enumerate(sentences_of_models[0], start=1):
        all_have_read_it = all(number in sentences_of_model for sentences_of_model in sentences_of_models)
        if not all_have_read_it:
            continue
        results_of_models = [sentences_of_model[number] for sentences_of_model in sentences_of_models]
        groups = names_by_group(models[0].attentions, results_of_models[0]["weights"])
        for group, group_title in group_titles(groups).items():
            picture = sentence_picture(models, results_of_models, group, groups[group])
            yield picture._replace(name=f"sentence{place}-{group_title.replace(' ', '-')}")


def sentences_by_number(model: Model) -> dict[int, Results]:
    """Returns {place of a sentence in the data: its tokens and weights}, for the single sentences a model has read."""
    return {sentence["number"]: sentence for sentence in model.results.get("sentences", [])}


def sentence_picture(
    models: Sequence[Model], results_of_models: Sequence[Results], group: str, names: Sequence[str]
) -> Picture:
    """Draws the attention weights of all heads of one kind for a sentence, with the words at the edges.

    Args:
        models: with the same layers and heads.
        results_of_models: for each model, the tokens of the sentence and its weights.
        group: the kind of attention, such as ``encoder.self``.
        names: the attentions of this kind.
    """
    tokens = sentence_tokens(results_of_models[0]["tokens"], group)
    panel_width = max(SMALLEST_PANEL, TOKEN_SIZE * len(tokens.columns))
    panel_height = max(SMALLEST_PANEL, TOKEN_SIZE * len(tokens.rows))
    margins = sentence_margins(tokens, has_names=len(models) > 1)
    most_heads = max(models[0].attentions[name]["heads"] for name in names)
    panels_per_row = min(most_heads, count_columns_with_room(margins, panel_width))
    rows = sentence_rows(models, results_of_models, names, panels_per_row)
    rows = [name_rows(row, tokens.rows) for row in rows]
    panels = name_columns(flatten_rows(rows), panels_per_row, tokens.columns)
    width = max(WIDTH, margins.left + panel_width + margins.right)
    height = margins.picture_height(len(rows) * panel_height, num_rows=len(rows))
    below = "Rows: the word that attends; columns: the word attended to. White is 0, dark blue a head's largest weight."
    return Picture("sentence", panels, (width, height), panels_per_row, below=below, margins=margins)


def sentence_rows(
    models: Sequence[Model], results_of_models: Sequence[Results], names: Sequence[str], panels_per_row: int
) -> list[Row]:
    """Returns the attention weights of all heads for a sentence, a panel for each head, still without the words.

    The heads of an attention and a model form a row, or several rows if they are more than `panels_per_row`. With
    several models, the first of these panels names the model.

    Args:
        models: with the same layers and heads.
        results_of_models: for each model, the ``weights`` for the sentence.
        names: the attentions.
        panels_per_row: how many panels there is room for in a row.
    """
    rows: list[Row] = []
    for name in names:
        for model, results in zip(models, results_of_models):
            panels = weight_panels(model, name, results["weights"][name])
            if len(models) > 1:
                panels[0] = add_call(panels[0], heading(model.name, points=17))
            rows += split_in_lines(panels, panels_per_row)
    return rows


def sentence_tokens(tokens: Mapping[str, Sequence[str]], group: str) -> SentenceTokens:
    """Returns the tokens at the rows and columns of attention weights, of which long ones are cut.

    Args:
        tokens: {``encoder`` or ``decoder``: the tokens that it reads}.
        group: the kind of attention: ``encoder.self``, ``decoder.self`` or ``decoder.cross``.
    """
    stack = group.split(".")[0]
    column_stack = "encoder" if group == "decoder.cross" else stack
    return SentenceTokens(rows=shorten_tokens(tokens[stack]), columns=shorten_tokens(tokens[column_stack]))


def shorten_tokens(tokens: Sequence[str]) -> list[str]:
    """Returns tokens of at most `LONGEST_NAME` letters: longer ones are cut and end with an ellipsis."""
    shortened = []
    for token in tokens:
        if len(token) > LONGEST_NAME:
            shortened.append(f"{token[: LONGEST_NAME - 1]}…")
        else:
            shortened.append(token)
    return shortened


def sentence_margins(tokens: SentenceTokens, has_names: bool) -> Margins:
    """Returns white space that has room for the tokens on the left and below the panels.

    Args:
        tokens: the tokens at the rows and columns.
        has_names: whether the names of models are above the panels.
    """
    between_rows = 0.5 if has_names else 0.3
    return Margins(
        left=0.15 + LETTER_WIDTH * max(len(token) for token in tokens.rows),
        right=0.1,
        top=between_rows,
        bottom=0.5 + LETTER_WIDTH * max(len(token) for token in tokens.columns),
        between_columns=0.1,
        between_rows=between_rows,
    )


def count_columns_with_room(margins: Margins, panel_width: float) -> int:
    """Returns how many panels fit side by side in a picture; at least one."""
    room = WIDTH - margins.left - margins.right + margins.between_columns
    return max(1, math.floor(room / (panel_width + margins.between_columns)))


def weight_panels(model: Model, name: str, weights: Sequence[Sequence[Sequence[int]]]) -> Row:
    """Returns a panel for each head of an attention, with its weights for a sentence as colors.

    Args:
        model: the model.
        name: the name of the attention.
        weights: a matrix for each head.
    """
    layer = model.attentions[name]["layer"]
    panels: Row = []
    for head, matrix in enumerate(weights):
        panels.append(Panel([colors(matrix, **STYLE), title(f"layer {layer}, head {head}")], {}))
    return panels


def name_rows(row: Row, tokens: Sequence[str]) -> Row:
    """Returns panels side by side, of which the first has the tokens on its left."""
    first_panel, *other_panels = row
    named = [add_call(first_panel, tick_names("y", tokens, fontsize=6))]
    for panel in other_panels:
        named.append(add_call(panel, without_ticks("y")))
    return named


def name_columns(panels: Row, columns: int, tokens: Sequence[str]) -> Row:
    """Returns the panels of a picture, of which the lowest one in each column has the tokens below it.

    Args:
        panels: all panels, row by row; None is an empty place.
        columns: how many panels a row has.
        tokens: the tokens.
    """
    named: Row = []
    for place, panel in enumerate(panels):
        if panel is None:
            named.append(None)
            continue
        place_below = place + columns  # where the panel in the next row is
        is_lowest = place_below >= len(panels) or panels[place_below] is None
        if is_lowest:
            ticks = tick_names("x", tokens, fontsize=6, rotation=90)
        else:
            ticks = without_ticks("x")
        named.append(add_call(panel, ticks))
    return named
