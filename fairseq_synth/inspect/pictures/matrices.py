"""Attention weights as matrices: means by position, and those of single sentences."""

import math
from collections.abc import Iterator, Mapping, Sequence

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
from ..subject import Figures
from .models import Model, Row, flatten_rows, group_titles, in_lines, names_by_group

Matrices = Mapping[str, Sequence[Sequence[Sequence[int]]]]  # {attention: a matrix for each head}
MOST_COLUMNS = 16  # heads side by side; models with more in all are drawn below each other
LARGEST_CELL = 0.9  # inches
SMALLEST_WIDTH = 6.2  # inches, which the text below needs
TOKEN_SIZE = 0.085  # inches that the name of a token needs
SMALLEST_PANEL = 1.0  # inches
LETTER_WIDTH = 0.06  # inches, of a token's name
LONGEST_NAME = 14  # letters of a token
STYLE = {"cmap": "Blues", "vmin": 0}


def patterns(models: Sequence[Model], names: Sequence[str]) -> Picture:
    """Returns attention weights by position: a row for each attention, a column for each head of each model.

    Args:
        models: with the same layers and heads.
        names: the attentions that have a pattern in every model.
    """
    num_heads = max(models[0].attentions[name]["heads"] for name in names)
    is_side_by_side = len(models) * num_heads <= MOST_COLUMNS
    blocks = []
    for model in models:
        has_labels = model is models[0] or not is_side_by_side
        blocks.append(pattern_block(model, names, num_heads, has_name=len(models) > 1, has_labels=has_labels))
    rows = join_side_by_side(blocks) if is_side_by_side else stack_blocks(blocks)
    columns = len(rows[0])
    margins = Margins(left=1.05, right=0.08, top=0.45, bottom=0.62, between_columns=0.05, between_rows=0.05)
    room = WIDTH - margins.left - margins.right - (columns - 1) * margins.between_columns
    cell = min(LARGEST_CELL, room / columns)
    width = max(SMALLEST_WIDTH, WIDTH - room + columns * cell)
    height = margins.top + margins.bottom + len(rows) * cell + (len(rows) - 1) * margins.between_rows
    below = (
        "A small square is a head: each of its rows is a position that attends, each column a position\n"
        "that is attended to, from 0 at the top left. White is 0, dark blue the head's largest weight."
    )
    return Picture("patterns", flatten_rows(rows), (width, height), columns, below=below, margins=margins)


def pattern_block(model: Model, names: Sequence[str], num_heads: int, has_name: bool, has_labels: bool) -> list[Row]:
    """Returns a model's patterns, a row for each attention.

    Args:
        num_heads: the columns.
        has_name: whether the model's name is above the first row.
        has_labels: whether the attentions' names are on the left of the rows.
    """
    rows = []
    for name in names:
        row: Row = []
        for head, matrix in enumerate(model.attentions[name]["pattern"]):
            calls = [colors(matrix, **STYLE), without_ticks()]
            if name == names[0]:
                calls.append(title(str(head)))
            if head == 0 and name == names[0]:
                calls.append(heading(f"{model.name}, head" if has_name else "head", points=17))
            if head == 0 and has_labels:
                calls.append(row_label(name))
            row.append(Panel(calls, {}))
        rows.append(row)
    return [row + [None] * (num_heads - len(row)) for row in rows]


def join_side_by_side(blocks: Sequence[list[Row]]) -> list[Row]:
    """Returns blocks of equally many rows beside each other."""
    rows: list[Row] = [[] for _ in blocks[0]]
    for block in blocks:
        for number, row in enumerate(block):
            rows[number] += row
    return rows


def stack_blocks(blocks: Sequence[list[Row]]) -> list[Row]:
    """Returns blocks below each other, with an empty row between two of them."""
    rows = list(blocks[0])
    for block in blocks[1:]:
        rows.append([None])
        rows += block
    return rows


def sentences(models: Sequence[Model]) -> Iterator[Picture]:
    """Yields for each single sentence and each kind of attention the weights of all heads of all models.

    Models that could read other sentences have none in common.
    """
    all_sentences = [model.figures.get("sentences", []) for model in models]
    for number, by_model in enumerate(zip(*all_sentences), start=1):
        first = by_model[0]
        if any(sentence["number"] != first["number"] for sentence in by_model):
            continue
        groups = names_by_group(models[0].attentions, first["weights"])
        for group, group_title in group_titles(groups).items():
            name = f"sentence{number}-{group_title.replace(' ', '-')}"
            yield sentence_picture(name, models, by_model, group, groups[group])


def sentence_picture(
    name: str, models: Sequence[Model], by_model: Sequence[Figures], group: str, attentions: Sequence[str]
) -> Picture:
    """Returns the weights of the heads of some attentions for a sentence, with its words at the edges.

    Args:
        by_model: the figures of the sentence, for each model.
        group: the kind of the attentions.
    """
    stack = group.split(".")[0]
    tokens = by_model[0]["tokens"]
    row_tokens = shorten_tokens(tokens[stack])
    column_tokens = shorten_tokens(tokens["encoder"]) if group == "decoder.cross" else row_tokens
    panel_width = max(SMALLEST_PANEL, TOKEN_SIZE * len(column_tokens))
    panel_height = max(SMALLEST_PANEL, TOKEN_SIZE * len(row_tokens))
    most_heads = max(models[0].attentions[attention]["heads"] for attention in attentions)
    margins = sentence_margins(row_tokens, column_tokens, has_names=len(models) > 1)
    room = WIDTH - margins.left - margins.right + margins.between_columns
    columns_with_room = math.floor(room / (panel_width + margins.between_columns))
    columns = min(most_heads, max(1, columns_with_room))
    lines: list[Row] = []
    for attention in attentions:
        layer = models[0].attentions[attention]["layer"]
        for model, sentence in zip(models, by_model):
            panels: Row = []
            for head, matrix in enumerate(sentence["weights"][attention]):
                calls = [colors(matrix, **STYLE), title(f"layer {layer}, head {head}")]
                if head == 0 and len(models) > 1:
                    calls.append(heading(model.name, points=17))
                is_first_of_line = head % columns == 0
                calls.append(tick_names("y", row_tokens, fontsize=6) if is_first_of_line else without_ticks("y"))
                panels.append(Panel(calls, {}))
            lines += in_lines(panels, columns)
    grid = name_lowest_columns(flatten_rows(lines), columns, column_tokens)
    below = "Rows: the word that attends; columns: the word attended to. White is 0, dark blue a head's largest weight."
    width = max(WIDTH, margins.left + panel_width + margins.right)
    height = margins.top + margins.bottom + len(lines) * panel_height + (len(lines) - 1) * margins.between_rows
    return Picture(name, grid, (width, height), columns, below=below, margins=margins)


def sentence_margins(row_tokens: Sequence[str], column_tokens: Sequence[str], has_names: bool) -> Margins:
    """Returns white space that has room for the tokens on the left and below, and for the names of models."""
    between_rows = 0.5 if has_names else 0.3
    return Margins(
        left=0.15 + LETTER_WIDTH * max(len(token) for token in row_tokens),
        right=0.1,
        top=between_rows,
        bottom=0.5 + LETTER_WIDTH * max(len(token) for token in column_tokens),
        between_columns=0.1,
        between_rows=between_rows,
    )


def shorten_tokens(tokens: Sequence[str]) -> list[str]:
    """Returns tokens of which long ones are cut."""
    return [token if len(token) <= LONGEST_NAME else f"{token[: LONGEST_NAME - 1]}…" for token in tokens]


def name_lowest_columns(grid: Sequence[Panel | None], columns: int, tokens: Sequence[str]) -> Row:
    """Returns the panels of a grid, of which the lowest one of each column names the tokens below it."""
    named: Row = []
    for place, panel in enumerate(grid):
        if panel is None:
            named.append(None)
            continue
        is_lowest = place + columns >= len(grid) or grid[place + columns] is None
        ticks = tick_names("x", tokens, fontsize=6, rotation=90) if is_lowest else without_ticks("x")
        named.append(panel._replace(calls=[*panel.calls, ticks]))
    return named
