"""Writes Markdown: tables, text that is folded away, names of models, ranges of numbers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from recipes.catalog import BASELINE

DAGGER = "†"  # marks the Synthesizers that this project adds to those of the paper


class ModelColumn(NamedTuple):
    """A column of a table that has a row for each model."""

    heading: str
    cells: Mapping[str, str]  # {model: text}; a model that is missing has an empty cell


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown. A row is a list of its cells. Without any row, returns a sentence instead."""
    rows = list(rows)
    if not rows:
        return "No model has been trained with this recipe yet.\n"
    rule = ["---"] * len(headings)  # Markdown's line between the headings and the rows
    lines = []
    for cells in [headings, rule, *rows]:
        lines.append("|" + "|".join(cells) + "|\n")
    return "".join(lines)


def model_table(columns: Sequence[ModelColumn], models: Iterable[str]) -> str:
    """Returns a table in Markdown with a row for each of the models, which begins with the model's name."""
    headings = ["model"]
    headings += [column.heading for column in columns]
    rows = []
    for model in models:
        cells = [model_label(model)]
        cells += [column.cells.get(model, "") for column in columns]
        rows.append(cells)
    return markdown_table(headings, rows)


def list_models(columns: Iterable[ModelColumn]) -> list[str]:
    """Returns the models that have a cell in any of the columns, each model once."""
    models: list[str] = []
    for column in columns:
        models += column.cells
    return distinct(models)


def distinct(texts: Iterable[str]) -> list[str]:
    """Returns the texts without repetitions, in the order in which they first occur."""
    return list(dict.fromkeys(texts))


def model_label(model: str) -> str:
    """Returns the name of a model for a table, with a dagger if it is a Synthesizer that is not in the paper."""
    if model == BASELINE:
        return "Transformer (fairseq's own)"
    if "relative_random" in model:
        return f"`{model}` {DAGGER}"
    return f"`{model}`"


def explain_dagger(models: Iterable[str]) -> str:
    """Returns the line below a table that explains the dagger in `model_label`; empty if none of the models has one."""
    if not any(DAGGER in model_label(model) for model in models):
        return ""
    return f"{DAGGER} [not in the paper](deviations.md#functions-that-are-not-the-papers)\n"


def folded(title: str, lines: Iterable[str]) -> str:
    """Returns lines of Markdown as text that GitHub shows only after a click on the title."""
    return "\n".join([f"<details><summary>{title}</summary>\n", *lines, "\n</details>\n"])


def format_range(numbers: Iterable[float], format_spec: str) -> str:
    """Returns "LOWEST to HIGHEST" of some numbers, or a single number if both look the same in this format."""
    numbers = list(numbers)
    lowest = format(min(numbers), format_spec)
    highest = format(max(numbers), format_spec)
    return lowest if lowest == highest else f"{lowest} to {highest}"
