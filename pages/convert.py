"""The tables of docs/convert.md, from results/convert: what Transformers reach after dot products are taken out.

A conversion replaces the dot products of some heads of a trained Transformer by another function. The table names it
like ``encoder-random``. The converted model is measured as it is, and again after some further updates.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from recipes.catalog import BASELINE, TABLES

from . import records
from .markdown import folded, markdown_table
from .notes import folded_list, join_distinct, list_origin
from .records import Difference, Record, RunsByModel, compute_differences
from .tables import format_mean, format_scores, minus_baseline

# The names of the conversions in tables, in the order of their rows. The Transformer is not converted.
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


class Metric(NamedTuple):
    """A metric that a table shows."""

    key: str  # in the records
    heading: str
    digits: int


BITS = Metric("bits", "validation loss (bits)", 3)
METRICS = {  # the metrics of each table of recipes/, the most important one first
    "multi30k_cpu": [Metric("bleu", "BLEU", 2), Metric("chrf", "chrF", 2), BITS],
    "ptb_cpu": [Metric("ppl", "test perplexity", 1), BITS],
    "imdb_cpu": [Metric("accuracy", "test accuracy", 2), BITS],
}

RunsByUpdates = dict[int, RunsByModel]  # {updates after the conversion: {conversion: the records of its runs}}


# ---- what conversions cost


def conversion_table(name: str) -> str:
    """Returns a table of what each conversion costs, with all scores and a note folded below it.

    The cost is the main metric minus that of a Transformer with as many updates. `name` is the name of the table in
    recipes/ whose Transformer was converted.
    """
    records_of_seeds = load_conversions(name)
    if not records_of_seeds:
        return NOTHING_CONVERTED
    runs_by_updates = group_runs_by_updates(records_of_seeds)
    speed_ups = read_speed_ups(records_of_seeds)
    paragraphs = [cost_table(name, runs_by_updates, speed_ups)]
    for updates, runs_by_conversion in runs_by_updates.items():
        title = f"All scores {describe_updates(updates)}"
        all_scores = score_table(name, runs_by_conversion)
        paragraphs.append(folded(title, [all_scores.rstrip()]))
    note = list_note(records_of_seeds)
    paragraphs.append(folded_list(note))
    return "\n".join(paragraphs)


def load_conversions(name: str) -> list[Record]:
    """Returns the records of the conversions of a table's Transformer: one for each seed of the Transformer."""
    return records.load_records("convert", f"{name}-*")


def group_runs_by_updates(records_of_seeds: Sequence[Record]) -> RunsByUpdates:
    """Returns {updates after the conversion: {conversion: its runs of all seeds}}.

    The numbers of updates are in rising order, and the conversions in the order of `NAMES`.
    """
    runs_by_updates: RunsByUpdates = {}
    for run in list_runs(records_of_seeds):
        runs_by_conversion = runs_by_updates.setdefault(run["updates"], {})
        runs_by_conversion.setdefault(run["model"], []).append(run)
    return {updates: sort_conversions(runs_by_updates[updates]) for updates in sorted(runs_by_updates)}


def list_runs(records_of_seeds: Sequence[Record]) -> list[Record]:
    """Returns the runs of all records. Each run also gets the other entries of its record, such as the seed."""
    runs = []
    for record in records_of_seeds:
        for run in record["runs"]:
            runs.append({**record, **run})
    return runs


def sort_conversions(runs_by_conversion: RunsByModel) -> RunsByModel:
    """Returns the conversions and their runs in the order of `NAMES`, without those that have no name there."""
    return {conversion: runs_by_conversion[conversion] for conversion in NAMES if conversion in runs_by_conversion}


def read_speed_ups(records_of_seeds: Sequence[Record]) -> dict[str, float]:
    """Returns {conversion: how many times as fast it translates}, measured for one seed; empty if for none."""
    for record in records_of_seeds:
        if "speed" in record:
            figures_by_conversion = record["speed"]["figures"]
            return {conversion: figures["ratio"] for conversion, figures in figures_by_conversion.items()}
    return {}


def describe_updates(updates: int) -> str:
    """Returns after how many updates scores were measured, as part of a heading."""
    return "as converted" if updates == 0 else f"after {updates:,} updates"


def cost_table(name: str, runs_by_updates: RunsByUpdates, speed_ups: Mapping[str, float]) -> str:
    """Returns a table with a row for each conversion: parameters, speed-up, and costs after each number of updates.

    For example, with costs as converted and after 1,000 updates:

        model                    parameters   speed-up   BLEU minus Transformer, as converted   after 1,000 updates
        Transformer: its BLEU    6.00M        1.00       38.20                                  38.30
        encoder `random`         5.50M        1.10       −4.10                                  −0.50

    Args:
        name: the name of the table in recipes/ whose Transformer was converted.
        runs_by_updates: {updates: {conversion: its runs}}, with rising numbers of updates, as `group_runs_by_updates`
            returns them. All conversions were measured after the fewest updates, and some of them also after more.
        speed_ups: {conversion: its speed-up}. If it is empty, there is no such column.
    """
    cost_columns = []  # for each number of updates {conversion: its cell}
    for runs_by_conversion in runs_by_updates.values():
        cost_columns.append(cost_cells(name, runs_by_conversion))
    fewest_updates = min(runs_by_updates)
    rows = []
    for conversion, runs in runs_by_updates[fewest_updates].items():
        cells = [name_cell(name, conversion), format_parameters(runs)]
        if speed_ups:
            cells.append(speed_up_cell(speed_ups, conversion))
        for cost_column in cost_columns:
            cells.append(cost_column.get(conversion, ""))  # empty if it was not measured after so many updates
        rows.append(cells)
    headings = cost_headings(name, list(runs_by_updates), has_speed_ups=bool(speed_ups))
    return markdown_table(headings, rows)


def speed_up_cell(speed_ups: Mapping[str, float], conversion: str) -> str:
    """Returns the speed-up of a conversion as text; empty if it was not measured."""
    if conversion not in speed_ups:
        return ""
    return f"{speed_ups[conversion]:.2f}"


def cost_headings(name: str, numbers_of_updates: Sequence[int], has_speed_ups: bool) -> list[str]:
    """Returns the headings of `cost_table`. Only the first column of costs says what all of them show."""
    headings = ["model", "parameters"]
    if has_speed_ups:
        headings.append("speed-up")
    main_metric = METRICS[name][0]
    first_updates, *later_updates = numbers_of_updates
    headings.append(f"{main_metric.heading} {minus_baseline(TABLES[name])}, {describe_updates(first_updates)}")
    headings += [describe_updates(updates) for updates in later_updates]
    return headings


def name_cell(name: str, conversion: str) -> str:
    """Returns the name of a conversion for `cost_table`. The Transformer's says that its row has scores, not costs."""
    if conversion == BASELINE:
        main_metric = METRICS[name][0]
        return f"{NAMES[conversion]}: its {main_metric.heading}"
    return NAMES[conversion]


def cost_cells(name: str, runs_by_conversion: RunsByModel) -> dict[str, str]:
    """Returns {conversion: its main metric minus the Transformer's}, as text; for the Transformer the metric itself."""
    main_metric = METRICS[name][0]
    differences = compute_differences(TABLES[name], runs_by_conversion, main_metric.key)
    cells = {}
    for conversion, runs in runs_by_conversion.items():
        if conversion == BASELINE:
            cells[conversion] = format_scores(runs, [main_metric.key], main_metric.digits)
        else:
            cells[conversion] = difference_cell(differences, conversion, main_metric.digits)
    return cells


def score_table(name: str, runs_by_conversion: RunsByModel) -> str:
    """Returns a table of all scores of conversions, and of their differences to the Transformer's.

    Args:
        name: the name of the table in recipes/ whose Transformer was converted.
        runs_by_conversion: {conversion: its runs}, all after the same number of updates.
    """
    table = TABLES[name]
    metrics = METRICS[name]
    headings = ["model"]
    for metric in metrics:
        headings += [metric.heading, minus_baseline(table)]
    differences_by_metric = {}
    for metric in metrics:
        differences_by_metric[metric] = compute_differences(table, runs_by_conversion, metric.key)
    rows = []
    for conversion, runs in runs_by_conversion.items():
        cells = [NAMES[conversion]]
        for metric in metrics:
            cells.append(format_scores(runs, [metric.key], metric.digits))
            cells.append(difference_cell(differences_by_metric[metric], conversion, metric.digits))
        rows.append(cells)
    return markdown_table(headings, rows)


def difference_cell(differences: Mapping[str, Difference], conversion: str, digits: int) -> str:
    """Returns the difference of a conversion to the Transformer as text; empty for the Transformer itself."""
    if conversion not in differences:
        return ""
    return differences[conversion].cell(digits)


def format_parameters(runs: Sequence[Record]) -> str:
    """Returns how many parameters a conversion has, in millions; if its runs differ, from the fewest to the most."""
    sizes = sorted(run["parameters"] for run in runs)
    fewest = f"{sizes[0] / 1e6:.2f}M"
    most = f"{sizes[-1] / 1e6:.2f}M"
    return fewest if fewest == most else f"{fewest} to {most}"


def list_note(records_of_seeds: Sequence[Record]) -> list[str]:
    """Returns the items of the note below a table: commands, signatures of metrics, and where the records come from."""
    items = [f"{purpose}: `{command}`" for purpose, command in records_of_seeds[0]["commands"].items()]
    signatures: list[str] = []
    for record in records_of_seeds:
        if "speed" in record:
            items.append(f"speed-up: {record['speed']['what']}")
        signatures += [f"`{signature}`" for signature in record["signatures"].values()]
    if signatures:
        items.append(f"Signatures of the scores: {join_distinct(signatures)}")
    return [*items, *list_origin(records_of_seeds)]


# ---- all heads replaced at once, without training


def replacement_table(name: str) -> str:
    """Returns a table of how much the loss of a trained Transformer grows when functions replace its dot products.

    All heads of the self-attentions in the encoder, in the decoder or in both are replaced at once, and nothing is
    trained afterwards. A row is one of these stacks, and a column is a function. The cells are means over the seeds.
    """
    # A measurement is {function: {stack: growth of the loss}}, with the same functions and stacks for each seed.
    measurements = [record["replaced"] for record in load_conversions(name) if "replaced" in record]
    if not measurements:
        return NOTHING_CONVERTED
    any_measurement = measurements[0]
    functions = list(any_measurement)
    stacks = list(any_measurement[functions[0]])
    rows = []
    for stack in stacks:
        cells = [stack]
        for function in functions:
            growths = [measurement[function][stack] for measurement in measurements]  # one for each seed
            cells.append(format_mean(growths, digits=3))
        rows.append(cells)
    function_headings = [f"`{function}`" for function in functions]
    return markdown_table(["all heads of", *function_headings], rows)
