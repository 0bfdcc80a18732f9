"""Markdown for the pages: tables, folded text, names of models, ranges of numbers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from recipes.catalog import BASELINE


class ModelColumn(NamedTuple):
    """A column of a table that has a row for each model."""

    heading: str
    cells: Mapping[str, str]  # {model: text}; a model that is missing has an empty cell


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown, or a sentence in its place if there are no rows."""
    rows = list(rows)
    if not rows:
        return "No model has been trained with this recipe yet.\n"
    lines = []
    for cells in [headings, ["---"] * len(headings), *rows]:
        lines.append("|" + "|".join(cells) + "|\n")
    return "".join(lines)


def model_table(columns: Sequence[ModelColumn], models: Iterable[str]) -> str:
    """Returns a table in Markdown with a row for each model."""
    rows = []
    for model in models:
        cells = [column.cells.get(model, "") for column in columns]
        rows.append([label(model), *cells])
    headings = [column.heading for column in columns]
    return markdown(["model", *headings], rows)


def list_models(columns: Iterable[ModelColumn]) -> list[str]:
    """Returns the models that have a cell in any column, in the order of the columns."""
    models: dict[str, None] = {}
    for column in columns:
        models.update(dict.fromkeys(column.cells))
    return list(models)


def label(model: str) -> str:
    """Returns the name of a model for a table, with a dagger if it is a Synthesizer that the paper does not have."""
    if model == BASELINE:
        return "Transformer (fairseq's own)"
    return f"`{model}` †" if "relative_random" in model else f"`{model}`"


def explain_dagger(models: Iterable[str]) -> str:
    """Returns the line that explains the dagger of `label`; empty if no model has one."""
    if not any("†" in label(model) for model in models):
        return ""
    return "† [not the paper's](deviations.md#functions-that-are-not-the-papers)\n"


def folded(title: str, lines: Iterable[str]) -> str:
    """Returns text that GitHub shows only after a click on its title."""
    return "\n".join([f"<details><summary>{title}</summary>\n", *lines, "\n</details>\n"])


def format_range(values: Iterable[float], format_spec: str) -> str:
    """Returns "lowest to highest", or a single number if both look the same in the format."""
    values = list(values)
    lowest = format(min(values), format_spec)
    highest = format(max(values), format_spec)
    return lowest if lowest == highest else f"{lowest} to {highest}"
