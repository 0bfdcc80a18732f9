"""What Transformers reach after their dot products are taken out, from results/convert: docs/convert.md."""

from collections.abc import Mapping
from typing import NamedTuple

from recipes.catalog import BASELINE, TABLES

from . import records as results
from .markdown import folded, markdown
from .notes import TITLE, describe_origin, join_distinct
from .records import Difference, Record, Rows
from .tables import format_figures, minus_baseline

NAMES = {
    BASELINE: "Transformer",
    "encoder-random": "encoder `random`",
    "encoder-relative_random": "encoder `relative_random`",
    "decoder-random": "decoder `random`",
    "both-random": "both `random`",
    "random": "`random`",
    "relative_random": "`relative_random`",
    "within-0.05": "`--heads-within 0.05`",
}
NOTHING_CONVERTED = "No model has been converted yet.\n"


class Figure(NamedTuple):
    """A figure that a table shows."""

    key: str  # in the records
    heading: str
    digits: int


BITS = Figure("bits", "validation loss (bits)", 3)
FIGURES = {  # of each table of recipes/, the most important one first
    "multi30k_cpu": [Figure("bleu", "BLEU", 2), Figure("chrf", "chrF", 2), BITS],
    "ptb_cpu": [Figure("ppl", "test perplexity", 1), BITS],
    "imdb_cpu": [Figure("accuracy", "test accuracy", 2), BITS],
}

Points = dict[int, Rows]  # {updates after the conversion: the records of each model}


def table(name: str) -> str:
    """Returns a table of what each conversion costs, and below it, folded, all figures.

    The costs are the most important figure minus the Transformer's of as many updates.
    """
    records = results.load("convert", f"{name}-*")
    if not records:
        return NOTHING_CONVERTED
    points = group_by_updates(records)
    parts = [cost_table(name, points, read_speeds(records))]
    for updates, rows in points.items():
        title = f"All figures {describe_updates(updates)}"
        parts.append(folded(title, [full_table(name, rows).rstrip()]))
    parts.append(folded(TITLE, notes(records)))
    return "\n".join(parts)


def group_by_updates(records: list[Record]) -> Points:
    """Returns the runs of all records by their updates, from none to the most, and by model."""
    points: Points = {}
    for record in records:
        for run in record["runs"]:
            rows = points.setdefault(run["updates"], {})
            rows.setdefault(run["model"], []).append({**record, **run})
    return {updates: in_order(points[updates]) for updates in sorted(points)}


def in_order(rows: Rows) -> Rows:
    """Returns the rows in the order of `NAMES`, and no others."""
    return {model: rows[model] for model in NAMES if model in rows}


def read_speeds(records: list[Record]) -> Mapping[str, Record]:
    """Returns {model: how many times as fast it translates} of the first record that has speeds, or nothing."""
    for record in records:
        if "speed" in record:
            speeds: Mapping[str, Record] = record["speed"]["figures"]
            return speeds
    return {}


def describe_updates(updates: int) -> str:
    """Returns when figures were measured."""
    return "as converted" if updates == 0 else f"after {updates:,} updates"


def cost_table(name: str, points: Points, speeds: Mapping[str, Record]) -> str:
    """Returns a row for each conversion: parameters, speed, and the main figure minus the Transformer's."""
    main = FIGURES[name][0]
    headings = ["model", "parameters"]
    if speeds:
        headings.append("speed-up")
    for number, updates in enumerate(points):
        # only the first of these columns says what they all show
        subject = f"{main.heading} {minus_baseline(TABLES[name])}, " if number == 0 else ""
        headings.append(f"{subject}{describe_updates(updates)}")
    costs_by_updates = {}
    for updates, runs_by_model in points.items():
        costs_by_updates[updates] = results.differences(TABLES[name], runs_by_model, main.key)
    fewest_updates = min(points)
    table_rows = []
    for model, runs in points[fewest_updates].items():
        name_cell = f"{NAMES[model]}: its {main.heading}" if model == BASELINE else NAMES[model]
        cells = [name_cell, parameters(runs)]
        if speeds:
            cells.append(f"{speeds[model]['ratio']:.2f}" if model in speeds else "")
        for updates, costs in costs_by_updates.items():
            if model == BASELINE:  # it costs nothing: its own figure is shown
                cells.append(format_figures(points[updates][model], [main.key], main.digits))
            else:
                cells.append(difference_cell(costs, model, main.digits))
        table_rows.append(cells)
    return markdown(headings, table_rows)


def full_table(name: str, rows: Rows) -> str:
    """Returns a table of all figures of some models, and of their differences to the Transformer's.

    `rows`: {model: the records of its runs}, all after the same number of updates.
    """
    headings = ["model"]
    differences_by_figure = {}
    for figure in FIGURES[name]:
        headings += [figure.heading, minus_baseline(TABLES[name])]
        differences_by_figure[figure.key] = results.differences(TABLES[name], rows, figure.key)
    table_rows = []
    for model, runs in rows.items():
        cells = [NAMES[model]]
        for figure in FIGURES[name]:
            cells.append(format_figures(runs, [figure.key], figure.digits))
            cells.append(difference_cell(differences_by_figure[figure.key], model, figure.digits))
        table_rows.append(cells)
    return markdown(headings, table_rows)


def difference_cell(differences: Mapping[str, Difference], model: str, digits: int) -> str:
    """Returns a model's difference to the Transformer; empty for the Transformer itself."""
    if model not in differences:
        return ""
    return differences[model].cell(digits)


def replaced(name: str) -> str:
    """Returns how much the loss grows when all heads of a stack get a function and nothing is trained.

    The cells are means over the seeds.
    """
    replacements = []
    for record in results.load("convert", f"{name}-*"):
        if "replaced" in record:
            replacements.append(record["replaced"])
    if not replacements:
        return NOTHING_CONVERTED
    first_replacement = replacements[0]  # {function: {stack of the model: growth of the loss}}, as all others
    functions = list(first_replacement)
    stacks = list(first_replacement[functions[0]])
    table_rows = []
    for stack in stacks:
        cells = [stack]
        for function in functions:
            # in the form of records, of which format_figures takes the mean
            runs = [{"figures": {stack: replacement[function][stack]}} for replacement in replacements]
            cells.append(format_figures(runs, [stack], digits=3))
        table_rows.append(cells)
    return markdown(["all heads of", *(f"`{function}`" for function in functions)], table_rows)


def parameters(runs: list[Record]) -> str:
    """Returns how many parameters a model has; if its seeds differ, from the fewest to the most."""
    sizes = sorted(run["parameters"] for run in runs)
    fewest = f"{sizes[0] / 1e6:.2f}M"
    most = f"{sizes[-1] / 1e6:.2f}M"
    return fewest if fewest == most else f"{fewest} to {most}"


def notes(records: list[Record]) -> list[str]:
    """Returns the lines of a note: commands, signatures, and where the records come from."""
    lines = [f"- {purpose}: `{command}`" for purpose, command in records[0]["commands"].items()]
    for record in records:
        if "speed" in record:
            lines.append(f"- speed-up: {record['speed']['what']}")
    signatures: list[str] = []
    for record in records:
        signatures += [f"`{signature}`" for signature in record["signatures"].values()]
    signatures_text = f"Signatures: {join_distinct(signatures)}. " if signatures else ""
    return [*lines, "", f"{signatures_text}{describe_origin(records)}"]
