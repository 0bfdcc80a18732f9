"""The tables of results in Markdown, from results/."""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fairseq_synth.names import VARIANTS
from recipes.catalog import BASELINE, CORPORA, TABLES, TASKS, Column, Table

from .markdown import ModelColumn, explain_dagger, list_models, markdown, model_table
from .notes import baseline_name, note, reproduce_command
from .records import (
    STEPS_PER_SECOND,
    Place,
    Record,
    Rows,
    differences,
    get_column,
    group_by_row,
    load_column,
    load_paper_speeds,
    load_runs,
    load_speeds,
)

NOT_RUN = "not run yet"
SYNTHESIZERS = [spec.replace("+", "_") for spec in VARIANTS]
# The headings of figures whose own name is not shown.
HEADINGS = {
    "f1": "F1",
    "macro_f1": "F1",
    "answer_f1": "F1",
    "answer_em": "exact",
    "all_of_group": "exact",
    "matthews": "Matthews",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "bleu4": "BLEU-4",
    "rougeL": "ROUGE-L",
    "rougeLsum": "ROUGE-Lsum",
    "meteor": "METEOR",
    "cider": "CIDEr",
    "bleu": "BLEU",
    "chrf": "chrF",
    "valid_loss": "validation loss",
}
TRANSLATION_FIGURES = ("bleu", "chrf", "valid_loss")


# ---- names and digits of figures


def shown_figures(table: Table, column: Column) -> dict[str, str]:
    """Returns {figure of scores.json that a column shows: its heading}."""
    names = column.figures
    if not names and column.name in CORPORA:
        names = tuple(CORPORA[column.name].scores)
    if names:
        return {name: HEADINGS.get(name, name) for name in names}
    task = TASKS[table.task]
    return {task.metric: task.heading}


def main_figure(table: Table, column: Column) -> str:
    """Returns the figure of a column that is compared and drawn: the task's metric, else the first that is shown."""
    names = shown_figures(table, column)
    metric = TASKS[table.task].metric
    return metric if metric in names else next(iter(names))


def number_of_digits(table: Table, figure: str) -> int:
    """Returns how many digits after the point a figure has in tables."""
    return 3 if figure == "valid_loss" else TASKS[table.task].digits


def format_figures(records: Sequence[Record], names: Iterable[str], digits: int = 2) -> str:
    """Returns figures of a model's runs for one cell, separated by slashes.

    A figure is shown as mean ± standard deviation (number of runs), or as a single number if there is one run. If a run
    could not compute it, the reason is shown, which is the last part of its signature.
    """
    if not records:
        return NOT_RUN
    texts = []
    for name in names:
        values = [record["figures"][name] for record in records]
        if None in values:
            first_without = records[values.index(None)]
            texts.append(first_without["signatures"][name].split("|")[-1])
            continue
        text = f"{statistics.mean(values):.{digits}f}"
        if len(values) > 1:
            text += f" ± {statistics.stdev(values):.{digits}f} ({len(values)})"
        texts.append(text)
    return " / ".join(texts)


def format_parameters(records: Iterable[Record]) -> dict[str, str]:
    """Returns {model: its number of parameters in millions}."""
    sizes: dict[str, str] = {}
    for record in records:
        sizes.setdefault(record["model"], f"{record['parameters'] / 1e6:.2f}M")
    return sizes


def minus_baseline(table: Table) -> str:
    """Returns the heading of a column of differences."""
    return f"minus {baseline_name(table)}"


# ---- tables of results


def results_table(name: str, dataset: str = "") -> str:
    """Returns a table of results, or the columns of one of its data sets, with notes on how the figures came about.

    A table of which nothing has run shows the paper's figures only. Models without any figure are left out.
    """
    table = TABLES[name]
    columns = [column for column in table.columns if not dataset or column.name == dataset]
    column_names = [column.name for column in columns]
    records = [record for record in load_runs(name) if record["dataset"] in column_names]
    models_run = list(dict.fromkeys(record["model"] for record in records))
    models = list(dict.fromkeys([*table.models(), *models_run]))
    models_shown = [model for model in models if model in table.published() or model in models_run]
    nobody_has_run_it = f"Nobody has run {reproduce_command(table)} yet.\n"
    if not models_shown:
        return nobody_has_run_it
    model_columns = list_columns(table, columns, records, models, is_alone=bool(dataset))
    paragraphs = [model_table(model_columns, models_shown)]
    dagger = explain_dagger(models_shown)
    if dagger:
        paragraphs.append(dagger)
    if records:
        figures_shown: list[str] = []
        for column in table.columns:
            figures_shown += shown_figures(table, column)
        paragraphs.append(note(table, records, figures_shown))
    else:
        paragraphs.append(nobody_has_run_it)
    return "\n".join(paragraphs)


def list_columns(
    table: Table, columns: Sequence[Column], records: Sequence[Record], models: Sequence[str], is_alone: bool
) -> list[ModelColumn]:
    """Returns the columns of a table of results: parameters, then the figures of each data set, then the paper's speed.

    Args:
        table: the table.
        columns: its data sets that are shown.
        records: the records of their runs.
        models: all models of the table. A model without a run has no number of parameters.
        is_alone: whether one data set is shown alone, so that headings need not name it.
    """
    model_columns = paper_columns(table, "parameters")
    if records:
        parameters = {**dict.fromkeys(models, NOT_RUN), **format_parameters(records)}
        model_columns.append(ModelColumn("parameters", parameters))
    model_columns += paper_columns_of_other_data(table)
    for column in columns:
        rows = group_by_row(table, column, records)
        model_columns += paper_columns(table, column.name)
        model_columns += our_columns(table, column, rows, is_alone)
        model_columns += speed_columns(table, column, rows)
    model_columns += paper_speed_columns(table)
    return model_columns


def our_columns(table: Table, column: Column, rows: Rows, is_alone: bool) -> list[ModelColumn]:
    """Returns our figures of a data set, with their differences to the baseline.

    For translation BLEU, chrF and validation loss each have a column, and so have their differences. For other tasks
    all figures share one column, and another one has the differences in the main figure. Headings name the data set
    unless `is_alone`.
    """
    if not any(rows.values()):
        return []
    source = ", here" if table.paper else ""  # only a table with the paper's figures has to tell them apart
    if table.task == "translation":
        columns = []
        for figure in TRANSLATION_FIGURES:
            name = HEADINGS[figure]
            heading = name if is_alone else f"{column.heading}, {name}"
            columns.append(figure_column(table, rows, [figure], f"{heading}{source}"))
            columns += difference_columns(table, rows, figure, minus_baseline(table))
        return columns
    names = shown_figures(table, column)
    main = main_figure(table, column)
    difference_heading = minus_baseline(table)
    if len(names) > 1:
        difference_heading += f", {names[main]}"
    return [
        figure_column(table, rows, list(names), f"{column_heading(table, column)}{source}"),
        *difference_columns(table, rows, main, difference_heading),
    ]


def figure_column(table: Table, rows: Rows, figures: Sequence[str], heading: str) -> ModelColumn:
    """Returns a column with figures of each model, all with the digits of the first."""
    digits = number_of_digits(table, figures[0])
    return ModelColumn(heading, {row: format_figures(runs, figures, digits) for row, runs in rows.items()})


def difference_columns(table: Table, rows: Rows, figure: str, heading: str) -> list[ModelColumn]:
    """Returns a column with the differences to the baseline, or none if no difference has an interval."""
    by_row = differences(table, rows, figure)
    if not any(difference.half_width for difference in by_row.values()):
        return []
    digits = number_of_digits(table, figure)
    return [ModelColumn(heading, {row: difference.cell(digits) for row, difference in by_row.items()})]


def speed_columns(table: Table, column: Column, rows: Rows) -> list[ModelColumn]:
    """Returns a column with the measured speeds of a table's models, or none if they were not measured."""
    speeds = load_speeds(Place(f"{table.name}/speed", column.name, "ratio"))
    if not speeds:
        return []
    cells = {row: f"{speeds[row].ratio:.2f}" if row in speeds else NOT_RUN for row in rows}
    heading = f"{column_heading(table, column)}, {STEPS_PER_SECOND} over {baseline_name(table)}'s, here"
    return [ModelColumn(heading, cells)]


def column_heading(table: Table, column: Column) -> str:
    """Returns the heading of a column, followed by those of its figures if there are several."""
    names = list(shown_figures(table, column).values())
    if len(names) == 1:
        return column.heading
    names_text = "/".join(names)
    return f"{column.heading} ({names_text})"


# ---- columns of the paper's figures


def paper_columns(table: Table, name: str) -> list[ModelColumn]:
    """Returns a column of the paper's figures, or none if it does not have them. `name` may be a data set's."""
    heading = name
    for column in table.columns:
        if column.name == name:
            heading = column_heading(table, column)
    cells = {model: figures[name] for model, figures in table.published().items() if name in figures}
    return [ModelColumn(f"{heading}, paper", cells)] if cells else []


def paper_columns_of_other_data(table: Table) -> list[ModelColumn]:
    """Returns the columns of the paper's figures on data that we have not trained on."""
    published = list(table.published().values())
    if not published:
        return []
    shown_elsewhere = {"parameters", STEPS_PER_SECOND, *(column.name for column in table.columns)}
    columns = []
    for name in published[0]:
        if name not in shown_elsewhere:
            columns += paper_columns(table, name)
    return columns


def paper_speed_columns(table: Table) -> list[ModelColumn]:
    """Returns a column with the paper's steps per second, and in parentheses their ratio to the Transformer's."""
    ratios = load_paper_speeds(table)
    columns = []
    for column in paper_columns(table, STEPS_PER_SECOND):
        cells = {model: f"{steps} ({ratios[model]:.2f})" for model, steps in column.cells.items()}
        columns.append(ModelColumn(column.heading, cells))
    return columns


# ---- tables over several data sets


def quality_tables() -> str:
    """Returns tables of the differences to the Transformer: translation, a longer recipe of it, and other tasks."""
    short_recipe = [
        relative_parameters("multi30k_cpu", "en-de"),
        quality_column("multi30k_cpu", "en-de", "bleu"),
        quality_column("multi30k_cpu", "en-de", "chrf"),
        quality_column("multi30k_cpu", "en-fr", "bleu"),
        quality_column("multi30k_cpu", "en-fr", "chrf"),
    ]
    long_recipe = [
        quality_column("multi30k", "en-de", "bleu"),
        quality_column("multi30k", "en-de", "chrf"),
    ]
    other_tasks = [
        quality_column("ptb_cpu", "ptb", "ppl"),
        quality_column("wikitext2_cpu", "wikitext2", "ppl"),
        quality_column("agnews_cpu", "agnews", "accuracy"),
        quality_column("imdb_cpu", "imdb", "accuracy"),
    ]
    parts = []
    for title, columns in (
        ("Translation, Multi30k, short recipe", short_recipe),
        ("Translation, Multi30k, recipe of Wu et al. 2021", long_recipe),
        ("Language models and classification", other_tasks),
    ):
        measured_columns = [column for column in columns if column.cells]
        models = list_models_in_order(measured_columns)
        if models:
            parts.append(f"**{title}**\n\n{model_table(measured_columns, models)}")
    all_models = list_models_in_order([*short_recipe, *long_recipe, *other_tasks])
    return "\n".join([*parts, explain_dagger(all_models)])


def quality_column(table_name: str, dataset: str, figure: str) -> ModelColumn:
    """Returns a column of differences to the Transformer; without cells if nothing has run."""
    table = TABLES[table_name]
    column = get_column(table, dataset)
    by_row = differences(table, load_column(table, column), figure)
    name = HEADINGS.get(figure, TASKS[table.task].heading)
    return ModelColumn(f"{column.heading} {name}", {row: difference.cell() for row, difference in by_row.items()})


def relative_parameters(table_name: str, dataset: str) -> ModelColumn:
    """Returns a column with the parameters of each model that has run, over the Transformer's."""
    table = TABLES[table_name]
    rows = load_column(table, get_column(table, dataset))
    parameters = {row: runs[0]["parameters"] for row, runs in rows.items() if runs}
    cells = {}
    for model, number in parameters.items():
        if model != BASELINE:
            cells[model] = f"{number / parameters[BASELINE]:.2f}"
    return ModelColumn("parameters", cells)


def list_models_in_order(columns: Iterable[ModelColumn]) -> list[str]:
    """Returns the models that have a cell: Synthesizers in the order of the architectures, then other models."""
    models = list_models(columns)
    synthesizers = [model for model in SYNTHESIZERS if model in models]
    return list(dict.fromkeys([*synthesizers, *models]))


class MixtureComponent(NamedTuple):
    """A function that is a component of a mixture."""

    mixture: str
    component: str


def alpha_table(name: str) -> str:
    """Returns a table of the weights α that the mixtures of a table have learned for their components.

    A row is a component of a mixture, a column is a layer. A cell is the mean over the heads of the layer and over the
    seeds of the table's first data set.
    """
    weights = collect_weights(name, dataset=TABLES[name].columns[0].name)
    layers: dict[str, None] = {}  # in the order in which the records have them
    for weights_by_layer in weights.values():
        layers.update(dict.fromkeys(weights_by_layer))
    rows = []
    for (mixture, component), weights_by_layer in weights.items():
        means = []
        for layer in layers:
            layer_weights = weights_by_layer.get(layer)
            means.append(f"{statistics.mean(layer_weights):.2f}" if layer_weights else "")
        rows.append([f"`{mixture}`", f"`{component}`", *means])
    layer_names = [layer.replace(".layers.", " ") for layer in layers]  # "encoder.layers.0" becomes "encoder 0"
    return markdown(["mixture", "component", *layer_names], rows)


def collect_weights(name: str, dataset: str) -> dict[MixtureComponent, dict[str, list[float]]]:
    """Returns {component of a mixture: {layer: the weights of all heads and seeds}} for a data set of a table."""
    weights: dict[MixtureComponent, dict[str, list[float]]] = {}
    for record in load_runs(name):
        if record["dataset"] != dataset:
            continue
        for layer, components in record.get("alpha", {}).items():
            for component, weights_of_heads in components.items():
                weights_by_layer = weights.setdefault(MixtureComponent(record["model"], component), {})
                weights_by_layer.setdefault(layer, []).extend(weights_of_heads)
    return weights
