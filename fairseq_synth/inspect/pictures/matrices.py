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
    tick_names,
    title,
    without_ticks,
)
from ..results import Results
from .layout import (
    Row,
    add_call,
    add_to_first_panel,
    flatten_rows,
    join_below_each_other,
    name_row,
    split_into_rows,
    title_columns,
)
from .models import Model, group_titles, names_by_group

WEIGHT_COLORS = {"cmap": "Blues", "vmin": 0}  # from white for the weight 0 to dark blue for the largest weight
MODEL_NAME_POINTS = 17  # how far above a panel the name of its model is, which leaves room for the panel's title


# ---- means by position

MOST_COLUMNS = 16  # heads side by side; models with more in all are drawn below each other

# All sizes of these pictures are in inches.
PATTERN_MARGINS = Margins(
    left=1.05,  # for the names of the attentions
    right=0.08,
    top=0.45,  # for the names of the models and the numbers of the heads
    bottom=0.62,  # for the two lines of text below
    between_columns=0.05,
    between_rows=0.05,
)
LARGEST_PATTERN = 0.9  # width and height of the square panel of a head
SMALLEST_PATTERNS_WIDTH = 6.2  # a picture has at least this width, because of the text below it


def patterns(models: Sequence[Model], names: Sequence[str]) -> Picture:
    """Draws the mean attention weights by position: a row for each attention, a column for each head of each model.

    Args:
        models: with the same layers and heads.
        names: the attentions whose mean weights every model has.
    """
    rows = pattern_rows(models, names)
    num_columns = len(rows[0])
    return Picture(
        name="patterns",
        panels=flatten_rows(rows),
        size=pattern_size(num_columns, num_rows=len(rows)),
        columns=num_columns,
        below=(
            "A small square is a head: each of its rows is a position that attends, each column a position\n"
            "that is attended to, from 0 at the top left. White is 0, dark blue the head's largest weight."
        ),
        margins=PATTERN_MARGINS,
    )


def pattern_size(num_columns: int, num_rows: int) -> tuple[float, float]:
    """Returns width and height in inches of a picture of mean attention weights, whose panels are squares.

    With many columns, the picture has the usual width. With a few columns, it is less wide, so that the panels are not
    larger than `LARGEST_PATTERN`.
    """
    width = WIDTH
    panel_size = PATTERN_MARGINS.width_left_for_panels(WIDTH, num_columns) / num_columns
    if panel_size > LARGEST_PATTERN:
        panel_size = LARGEST_PATTERN
        width_of_all_columns = PATTERN_MARGINS.picture_width(num_columns * panel_size, num_columns)
        width = max(width_of_all_columns, SMALLEST_PATTERNS_WIDTH)  # The text below the panels has to fit.
    height = PATTERN_MARGINS.picture_height(num_rows * panel_size, num_rows)
    return width, height


def pattern_rows(models: Sequence[Model], names: Sequence[str]) -> list[Row]:
    """Returns the mean attention weights of all models, side by side if there is room, else below each other.

    A row of panels shows the heads of one attention. For example, two models A and B with two heads are drawn as

        encoder.self.0  A A B B        or        encoder.self.0  A A
        encoder.self.1  A A B B                  encoder.self.1  A A

                                                 encoder.self.0  B B
                                                 encoder.self.1  B B

    Args:
        models: with the same layers and heads.
        names: the attentions.
    """
    num_heads = max(models[0].attentions[name]["heads"] for name in names)
    has_model_names = len(models) > 1
    rows_of_models = [titled_model_rows(model, names, num_heads, has_model_names) for model in models]
    has_room_side_by_side = len(models) * num_heads <= MOST_COLUMNS
    if has_room_side_by_side:
        joined_rows = join_side_by_side(rows_of_models)
        return name_rows(joined_rows, names)
    named_rows_of_models = [name_rows(rows, names) for rows in rows_of_models]
    return join_below_each_other(named_rows_of_models)


def titled_model_rows(model: Model, names: Sequence[str], num_heads: int, has_model_name: bool) -> list[Row]:
    """Returns the mean attention weights of a model, with the numbers of the heads above the first row.

    Args:
        model: the model.
        names: the attentions, one for each row.
        num_heads: the number of columns.
        has_model_name: whether the name of the model is above the numbers, too.
    """
    rows = model_rows(model, names, num_heads)
    titled_rows = title_columns(rows, [str(head) for head in range(num_heads)])
    text_above_titles = f"{model.name}, head" if has_model_name else "head"
    return add_to_first_panel(titled_rows, heading(text_above_titles, points=MODEL_NAME_POINTS))


def name_rows(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Returns copies of rows, each with the name of its attention on the left."""
    return [name_row(row, name) for row, name in zip(rows, names)]


def model_rows(model: Model, names: Sequence[str], num_heads: int) -> list[Row]:
    """Returns the mean attention weights of a model: a row of panels for each attention, a panel for each head.

    Args:
        model: the model.
        names: the attentions.
        num_heads: the length of all rows; an attention with fewer heads has empty places at the end of its row.
    """
    rows: list[Row] = []
    for name in names:
        matrices_of_heads = model.attentions[name]["pattern"]
        row: Row = []
        for matrix in matrices_of_heads:
            row.append(Panel(calls=[colors(matrix, **WEIGHT_COLORS), without_ticks()], settings={}))
        num_empty_places = num_heads - len(row)
        row += [None] * num_empty_places
        rows.append(row)
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


# ---- single sentences

# All sizes of these pictures are in inches.
TOKEN_SIZE = 0.085  # height of a row, or width of a column, of attention weights that has a token beside it
LETTER_WIDTH = 0.06  # the width of a letter of these tokens
SMALLEST_PANEL = 1.0  # width and height
TITLE_ROOM = 0.3  # above a panel, for its title
TITLE_AND_MODEL_ROOM = 0.5  # above a panel, for its title and for the name of its model above the title
TICK_ROOM = 0.15  # between the tokens on the left and the panels, with the white edge of the picture
TEXT_ROOM = 0.5  # below the tokens, for the text at the bottom of the picture

LONGEST_TOKEN = 14  # letters; longer tokens are cut


class SentenceTokens(NamedTuple):
    """The tokens of a sentence that are at the rows and at the columns of its attention weights."""

    rows: list[str]
    columns: list[str]


class PanelSize(NamedTuple):
    """The size of each panel of a picture, in inches."""

    width: float
    height: float


def sentences(models: Sequence[Model]) -> Iterator[Picture]:
    """Yields pictures of the attention weights for each single sentence that all models have read.

    There is a picture for each sentence and kind of attention, such as ``sentence1-cross-attention``. The number in
    this name counts the sentences of the first model, from 1, whether the other models have read them or not.
    """
    results_of_models = [results_by_sentence(model) for model in models]
    sentences_of_first_model = list(results_of_models[0])
    for count, sentence in enumerate(sentences_of_first_model, start=1):
        all_have_read_it = all(sentence in results for results in results_of_models)
        if all_have_read_it:
            results_of_sentence = [results[sentence] for results in results_of_models]
            for picture in sentence_pictures(models, results_of_sentence):
                yield picture._replace(name=f"sentence{count}-{picture.name}")


def results_by_sentence(model: Model) -> dict[int, Results]:
    """Returns {index of a sentence in the data: its tokens and weights}, for the single sentences a model has read."""
    return {results["number"]: results for results in model.results.get("sentences", [])}


def sentence_pictures(models: Sequence[Model], results_of_models: Sequence[Results]) -> Iterator[Picture]:
    """Yields a picture of the attention weights for one sentence for each kind of attention, such as cross-attention.

    Args:
        models: with the same layers and heads, and therefore with the same attentions.
        results_of_models: for each model, the tokens of the sentence and ``weights``, {attention: its weights}.
    """
    all_names = list(results_of_models[0]["weights"])
    names_of_kind = names_by_group(models[0].attentions, all_names)  # {kind of attention: names of attentions}
    for kind, kind_title in group_titles(names_of_kind).items():
        picture = sentence_picture(models, results_of_models, kind, names_of_kind[kind])
        yield picture._replace(name=kind_title.replace(" ", "-"))


def sentence_picture(
    models: Sequence[Model], results_of_models: Sequence[Results], kind: str, names: Sequence[str]
) -> Picture:
    """Draws the attention weights of a sentence, with a panel for each head, and with the words at the edges.

    Args:
        models: with the same layers and heads.
        results_of_models: for each model, the tokens of the sentence and its weights.
        kind: the kind of attention, such as ``encoder.self``.
        names: the attentions of this kind.
    """
    tokens = sentence_tokens(results_of_models[0]["tokens"], kind)
    panel = sentence_panel_size(tokens)
    margins = sentence_margins(tokens, has_model_names=len(models) > 1)
    most_heads = max(models[0].attentions[name]["heads"] for name in names)
    num_columns = min(most_heads, count_columns_with_room(margins, panel.width))

    rows_without_tokens = sentence_rows(models, results_of_models, names, panels_per_row=num_columns)
    rows = write_tokens(rows_without_tokens, tokens)
    return Picture(
        name="sentence",
        panels=flatten_rows(rows),
        size=sentence_picture_size(panel, margins, num_rows=len(rows)),
        columns=num_columns,
        below=(
            "Rows: the word that attends; columns: the word attended to. White is 0, dark blue a head's largest weight."
        ),
        margins=margins,
    )


def sentence_panel_size(tokens: SentenceTokens) -> PanelSize:
    """Returns the size of the panels of a sentence, which grows with the number of tokens at their edges."""
    return PanelSize(
        width=max(SMALLEST_PANEL, TOKEN_SIZE * len(tokens.columns)),
        height=max(SMALLEST_PANEL, TOKEN_SIZE * len(tokens.rows)),
    )


def sentence_picture_size(panel: PanelSize, margins: Margins, num_rows: int) -> tuple[float, float]:
    """Returns width and height in inches of the picture of a sentence, with `num_rows` rows of panels.

    The picture has the usual width, unless a single panel of a very long sentence needs more.
    """
    width_of_one_column = margins.left + panel.width + margins.right
    width = max(WIDTH, width_of_one_column)
    height = margins.picture_height(num_rows * panel.height, num_rows)
    return width, height


def sentence_rows(
    models: Sequence[Model], results_of_models: Sequence[Results], names: Sequence[str], panels_per_row: int
) -> list[Row]:
    """Returns the attention weights of all heads for a sentence, a panel for each head. The tokens are added later.

    Each attention of each model begins a new row of panels: first the first attention of all models, then the second
    attention of all models, and so on. With several models, the name of the model is above its first panel.

    Args:
        models: with the same layers and heads.
        results_of_models: for each model, the ``weights`` for the sentence.
        names: the attentions.
        panels_per_row: how many panels there is room for in a row. More panels continue in another row.
    """
    rows: list[Row] = []
    for name in names:
        for model, results in zip(models, results_of_models):
            panels = weight_panels(model, name, results["weights"][name])
            if len(models) > 1:
                model_name = heading(model.name, points=MODEL_NAME_POINTS)
                panels[0] = add_call(panels[0], model_name)
            rows += split_into_rows(panels, panels_per_row)
    return rows


def sentence_tokens(tokens: Mapping[str, Sequence[str]], kind: str) -> SentenceTokens:
    """Returns the tokens at the rows and columns of attention weights, of which long ones are cut.

    Args:
        tokens: {``encoder`` or ``decoder``: the tokens that it reads}.
        kind: the kind of attention: ``encoder.self``, ``decoder.self`` or ``decoder.cross``.
    """
    row_stack, _, _ = kind.partition(".")
    column_stack = "encoder" if kind == "decoder.cross" else row_stack
    return SentenceTokens(rows=shorten_tokens(tokens[row_stack]), columns=shorten_tokens(tokens[column_stack]))


def shorten_tokens(tokens: Sequence[str]) -> list[str]:
    """Returns tokens of at most `LONGEST_TOKEN` letters: longer ones are cut and end with an ellipsis."""
    shortened = []
    for token in tokens:
        if len(token) > LONGEST_TOKEN:
            shortened.append(f"{token[: LONGEST_TOKEN - 1]}…")
        else:
            shortened.append(token)
    return shortened


def sentence_margins(tokens: SentenceTokens, has_model_names: bool) -> Margins:
    """Returns the white space in inches around the panels of a sentence.

    It has room for the tokens on the left of the panels and below them, and for what is written above each panel.

    Args:
        tokens: the tokens at the rows and columns of the panels.
        has_model_names: whether the names of models are above the panels, in addition to the panels' titles.
    """
    longest_row_token = max(len(token) for token in tokens.rows)  # letters
    longest_column_token = max(len(token) for token in tokens.columns)  # letters
    room_above_each_row = TITLE_AND_MODEL_ROOM if has_model_names else TITLE_ROOM
    return Margins(
        left=TICK_ROOM + LETTER_WIDTH * longest_row_token,
        right=0.1,
        top=room_above_each_row,  # above the first row of panels
        bottom=TEXT_ROOM + LETTER_WIDTH * longest_column_token,  # these tokens are written upwards
        between_columns=0.1,
        between_rows=room_above_each_row,  # above each other row
    )


def count_columns_with_room(margins: Margins, panel_width: float) -> int:
    """Returns how many panels fit side by side in a picture; at least one."""
    # Each column takes a panel and the space on its right. The last column has no such space, so it is added here.
    room_for_columns = WIDTH - margins.left - margins.right + margins.between_columns
    column_width = panel_width + margins.between_columns
    return max(1, math.floor(room_for_columns / column_width))


def weight_panels(model: Model, name: str, weights: Sequence[Sequence[Sequence[int]]]) -> Row:
    """Returns a panel for each head of an attention, with its weights for a sentence as colors.

    Args:
        model: the model.
        name: the name of the attention.
        weights: a matrix for each head, in thousandths.
    """
    layer = model.attentions[name]["layer"]
    panels: Row = []
    for head, matrix in enumerate(weights):
        head_title = title(f"layer {layer}, head {head}")
        panels.append(Panel(calls=[colors(matrix, **WEIGHT_COLORS), head_title], settings={}))
    return panels


def write_tokens(rows: Sequence[Row], tokens: SentenceTokens) -> list[Row]:
    """Returns copies of rows of attention weights, with the tokens at the left and the lower edge."""
    rows_with_tokens_on_the_left = write_tokens_on_the_left(rows, tokens.rows)
    return write_tokens_below(rows_with_tokens_on_the_left, tokens.columns)


def write_tokens_on_the_left(rows: Sequence[Row], tokens: Sequence[str]) -> list[Row]:
    """Returns copies of rows in which the first panel of each row has the tokens on its left."""
    token_names = tick_names("y", tokens, fontsize=6)
    changed_rows = []
    for row in rows:
        first_panel, *other_panels = row
        changed_row = [add_call(first_panel, token_names)]
        for panel in other_panels:
            changed_row.append(add_call(panel, without_ticks("y")))
        changed_rows.append(changed_row)
    return changed_rows


def write_tokens_below(rows: Sequence[Row], tokens: Sequence[str]) -> list[Row]:
    """Returns copies of rows in which each panel without another panel just below it has the tokens below it.

    For example, a row of four heads is followed by a row of two heads. Then the third and the fourth head of the first
    row, and both heads of the second row, have the tokens below them.
    """
    changed_rows = []
    for row_number, row in enumerate(rows):
        is_last_row = row_number == len(rows) - 1
        length_of_next_row = 0 if is_last_row else len(rows[row_number + 1])
        changed_row: Row = []
        for column, panel in enumerate(row):
            has_panel_below = column < length_of_next_row
            if has_panel_below:
                ticks = without_ticks("x")
            else:
                ticks = tick_names("x", tokens, fontsize=6, rotation=90)
            changed_row.append(add_call(panel, ticks))
        changed_rows.append(changed_row)
    return changed_rows
