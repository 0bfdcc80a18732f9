"""The tables of results in Markdown, from results/."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fairseq_synth.names import VARIANTS
from recipes.catalog import BASELINE, CORPORA, TABLES, TASKS, Column, Table

from .markdown import ModelColumn, distinct, explain_dagger, list_models, markdown_table, model_table
from .notes import baseline_name, reproduce_command, results_note
from .records import (
    STEPS_PER_SECOND,
    Benchmark,
    Record,
    RunsByModel,
    compute_differences,
    get_column,
    group_by_model,
    load_column,
    load_paper_speed_ups,
    load_runs,
    load_speed_ups,
)

NOT_RUN = "not run yet"
SYNTHESIZERS = [spec.replace("+", "_") for spec in VARIANTS]
# The headings of metrics. A metric that is missing here is shown by its own name.
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
TRANSLATION_METRICS = ("bleu", "chrf", "valid_loss")


# ---- metrics, and how their values are shown


def shown_metrics(table: Table, column: Column) -> dict[str, str]:
    """Returns {metric: its heading}, for the metrics that a column of a table shows.

    These are the metrics that tables.yaml names for the column. If it names none, they are those that corpora.yaml
    names for the corpus. If corpora.yaml names none either, it is the metric of the table's task.
    """
    metrics_of_column = list(column.figures)
    if metrics_of_column:
        return name_metrics(metrics_of_column)
    metrics_of_corpus = list(CORPORA[column.name].scores) if column.name in CORPORA else []
    if metrics_of_corpus:
        return name_metrics(metrics_of_corpus)
    task = TASKS[table.task]
    return {task.metric: task.heading}


def name_metrics(metrics: Iterable[str]) -> dict[str, str]:
    """Returns {metric: its heading}."""
    return {metric: HEADINGS.get(metric, metric) for metric in metrics}


def main_metric(table: Table, column: Column) -> str:
    """Returns the metric that is compared and drawn: the metric of the task, or else the first one that is shown."""
    metrics = list(shown_metrics(table, column))
    metric_of_task = TASKS[table.task].metric
    return metric_of_task if metric_of_task in metrics else metrics[0]


def number_of_digits(table: Table, metric: str) -> int:
    """Returns how many digits after the point the values of a metric have in tables."""
    return 3 if metric == "valid_loss" else TASKS[table.task].digits


def format_scores(runs: Sequence[Record], metrics: Iterable[str], digits: int = 2) -> str:
    """Returns the scores of a model in one cell of a table, with slashes between the metrics.

    Args:
        runs: the records of the model's runs.
        metrics: the metrics to show.
        digits: the number of digits after the point.
    """
    if not runs:
        return NOT_RUN
    return " / ".join(format_score(runs, metric, digits) for metric in metrics)


def format_score(runs: Sequence[Record], metric: str, digits: int) -> str:
    """Returns the score of a model in one metric, in the form of `format_mean`.

    If a run could not compute the metric, returns the reason instead, which is the last part of the signature: "no
    Java" of "METEOR|no Java".
    """
    for run in runs:
        if run["figures"][metric] is None:
            *_, reason = run["signatures"][metric].split("|")
            return str(reason)
    return format_mean([run["figures"][metric] for run in runs], digits)


def format_mean(values: Sequence[float], digits: int) -> str:
    """Returns "mean ± standard deviation (number of values)", or a single value as it is."""
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):.{digits}f} ({len(values)})"


def minus_baseline(table: Table) -> str:
    """Returns the heading of a column of differences to the baseline."""
    return f"minus {baseline_name(table)}"


# ---- tables of results


def results_table(name: str, dataset: str = "") -> str:
    """Returns a table of results in Markdown, with a note below it that says how its figures came about.

    A row is a model. The columns show our scores, their differences to the baseline, and the paper's figures. If nobody
    has run the table, it shows the paper's figures alone. If there are none, either, only the note is returned.

    Args:
        name: the name of the table in recipes/tables.yaml.
        dataset: the only data set to show; by default all.
    """
    table = TABLES[name]
    shows_all_datasets = not dataset
    shown_datasets = [column for column in table.columns if shows_all_datasets or column.name == dataset]
    runs = load_runs_on(table, shown_datasets)
    note = describe_runs(table, runs)
    models = list_models_with_figures(table, runs)
    if not models:
        return note  # which says that nobody has run the table
    model_columns = list_columns(table, shown_datasets, runs, models, is_dataset_named=shows_all_datasets)
    paragraphs = [model_table(model_columns, models)]
    dagger = explain_dagger(models)
    if dagger:
        paragraphs.append(dagger)
    paragraphs.append(note)
    return "\n".join(paragraphs)


def load_runs_on(table: Table, datasets: Sequence[Column]) -> list[Record]:
    """Returns the records of the runs of a table on some of its data sets."""
    names = [column.name for column in datasets]
    return [run for run in load_runs(table.name) if run["dataset"] in names]


def describe_runs(table: Table, runs: list[Record]) -> str:
    """Returns the note below a table: how the figures of its runs came about, or that there are no runs yet."""
    if not runs:
        return f"We have not run {reproduce_command(table)} yet.\n"
    return results_note(table, runs, list_shown_metrics(table))


def list_models_with_figures(table: Table, runs: Sequence[Record]) -> list[str]:
    """Returns the models that have a run, or figures in the paper: those of the table in its order, then others."""
    models_with_runs = [run["model"] for run in runs]
    models_with_figures = {*models_with_runs, *table.published()}
    all_models = distinct([*table.models(), *models_with_runs])
    return [model for model in all_models if model in models_with_figures]


def list_shown_metrics(table: Table) -> list[str]:
    """Returns the metrics that any column of a table shows."""
    metrics: list[str] = []
    for column in table.columns:
        metrics += shown_metrics(table, column)
    return metrics


def list_columns(
    table: Table, datasets: Sequence[Column], runs: Sequence[Record], models: Sequence[str], is_dataset_named: bool
) -> list[ModelColumn]:
    """Returns the columns of a table of results.

    From left to right, these are

    - the number of parameters: the paper's, and ours
    - the paper's scores on data that we have not trained on
    - the columns of each of our data sets
    - the paper's steps per second

    Columns without any figure are left out: each function that is called here returns no column then.

    Args:
        table: the table.
        datasets: the data sets that are shown. Each is a column in tables.yaml.
        runs: the records of the runs on these data sets.
        models: the models that are shown. A model without a run is marked as "not run yet".
        is_dataset_named: whether headings name the data set.
    """
    columns = paper_columns(table, "parameters")
    columns += parameters_columns(runs, models)
    columns += paper_columns_of_other_data(table)
    for dataset in datasets:
        runs_on_dataset = group_by_model(table, dataset, runs)
        columns += columns_of_dataset(table, dataset, runs_on_dataset, is_dataset_named)
    columns += paper_speed_columns(table)
    return columns


def columns_of_dataset(
    table: Table, dataset: Column, runs_by_model: RunsByModel, is_dataset_named: bool
) -> list[ModelColumn]:
    """Returns the columns for a data set: the paper's scores, our scores and differences, and our speed-ups.

    Args:
        table: the table.
        dataset: its column in tables.yaml.
        runs_by_model: {model: the records of its runs}.
        is_dataset_named: whether headings name the data set.
    """
    return [
        *paper_columns(table, dataset.name),
        *our_columns(table, dataset, runs_by_model, is_dataset_named),
        *speed_columns(table, dataset, models=list(runs_by_model)),
    ]


def parameters_columns(runs: Sequence[Record], models: Iterable[str]) -> list[ModelColumn]:
    """Returns a column with each model's number of parameters in millions, or no column if there are no runs.

    The number is that of the model's first run. A model without a run has "not run yet".
    """
    if not runs:
        return []
    parameters: dict[str, str] = {}
    for run in runs:
        parameters.setdefault(run["model"], f"{run['parameters'] / 1e6:.2f}M")
    return [ModelColumn("parameters", {model: parameters.get(model, NOT_RUN) for model in models})]


def our_columns(table: Table, column: Column, runs_by_model: RunsByModel, is_dataset_named: bool) -> list[ModelColumn]:
    """Returns our scores on a data set, and their differences to the baseline. Without any run there is no column.

    Translations have a pair of columns for each metric. Other tasks have one pair for all metrics.

    Args:
        table: the table.
        column: its column for the data set.
        runs_by_model: {model: the records of its runs}.
        is_dataset_named: whether the headings of translations name the data set. Those of other tasks always do.
    """
    if not any(runs_by_model.values()):
        return []
    if table.task == "translation":
        beginning_of_headings = f"{column.heading}, " if is_dataset_named else ""
        return our_translation_columns(table, runs_by_model, beginning_of_headings)
    return our_score_and_difference_columns(table, column, runs_by_model)


def our_translation_columns(table: Table, runs_by_model: RunsByModel, beginning_of_headings: str) -> list[ModelColumn]:
    """Returns a column for each of BLEU, chrF and validation loss, each followed by one with its differences."""
    columns = []
    for metric in TRANSLATION_METRICS:
        heading = f"{beginning_of_headings}{HEADINGS[metric]}{end_of_our_headings(table)}"
        columns.append(score_column(table, runs_by_model, [metric], heading))
        columns += difference_columns(table, runs_by_model, metric, minus_baseline(table))
    return columns


def our_score_and_difference_columns(table: Table, column: Column, runs_by_model: RunsByModel) -> list[ModelColumn]:
    """Returns one column with the scores in all metrics, and one with the differences in the main metric.

    For example, the columns of a data set with two metrics are headed "MRPC (F1/accuracy), ours" and "minus the
    Transformer, F1".
    """
    heading_by_metric = shown_metrics(table, column)
    metrics = list(heading_by_metric)
    compared_metric = main_metric(table, column)
    heading_of_scores = f"{column_heading(table, column)}{end_of_our_headings(table)}"
    has_several_metrics = len(metrics) > 1
    name_of_metric = f", {heading_by_metric[compared_metric]}" if has_several_metrics else ""
    heading_of_differences = f"{minus_baseline(table)}{name_of_metric}"
    scores = score_column(table, runs_by_model, metrics, heading_of_scores)
    differences = difference_columns(table, runs_by_model, compared_metric, heading_of_differences)
    return [scores, *differences]


def end_of_our_headings(table: Table) -> str:
    """Returns the end of the headings of our figures, which tells them from the paper's if the table has both."""
    return ", ours" if table.paper else ""


def score_column(table: Table, runs_by_model: RunsByModel, metrics: Sequence[str], heading: str) -> ModelColumn:
    """Returns a column with the scores of each model. All metrics have as many digits as the first one."""
    digits = number_of_digits(table, metrics[0])
    return ModelColumn(heading, {model: format_scores(runs, metrics, digits) for model, runs in runs_by_model.items()})


def difference_columns(table: Table, runs_by_model: RunsByModel, metric: str, heading: str) -> list[ModelColumn]:
    """Returns a column with the differences to the baseline, or no column if there are too few runs for intervals."""
    differences = compute_differences(table, runs_by_model, metric)
    if not any(difference.half_width for difference in differences.values()):
        return []
    digits = number_of_digits(table, metric)
    return [ModelColumn(heading, {model: difference.cell(digits) for model, difference in differences.items()})]


def speed_columns(table: Table, column: Column, models: Iterable[str]) -> list[ModelColumn]:
    """Returns a column with the measured speed-ups of models, or no column if none was measured."""
    speed_ups = load_speed_ups(Benchmark(f"{table.name}/speed", column.name, key="ratio"))
    if not speed_ups:
        return []
    cells = {}
    for model in models:
        cells[model] = f"{speed_ups[model].ratio:.2f}" if model in speed_ups else NOT_RUN
    heading = f"{column_heading(table, column)}, training speed relative to {baseline_name(table)}"
    return [ModelColumn(heading, cells)]


def column_heading(table: Table, column: Column) -> str:
    """Returns the heading of a column, followed by the names of its metrics if it shows several."""
    metric_headings = list(shown_metrics(table, column).values())
    if len(metric_headings) == 1:
        return column.heading
    metrics_text = "/".join(metric_headings)
    return f"{column.heading} ({metrics_text})"


# ---- columns of the paper's figures


def paper_columns(table: Table, name: str) -> list[ModelColumn]:
    """Returns a column of the paper's figures by its name, or no column if this table does not have it.

    The name of a column that shows the paper's results on one of our data sets is the name of the data set.
    """
    cells = {model: figures[name] for model, figures in table.published().items() if name in figures}
    if not cells:
        return []
    headings = {column.name: column_heading(table, column) for column in table.columns}
    heading = headings.get(name, name)  # some columns of the paper have no column of ours
    return [ModelColumn(f"{heading}, paper", cells)]


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
    """Returns a column with the paper's steps per second and, in parentheses, the speed-ups; no column without them."""
    speed_ups = load_paper_speed_ups(table)
    columns = []
    for column in paper_columns(table, STEPS_PER_SECOND):
        cells = {model: f"{steps} ({speed_ups[model]:.2f})" for model, steps in column.cells.items()}
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
    all_models = list_synthesizers_first([*short_recipe, *long_recipe, *other_tasks])
    parts = [
        *titled_table("Translation, Multi30k, short recipe", short_recipe),
        *titled_table("Translation, Multi30k, recipe of Wu et al. 2021", long_recipe),
        *titled_table("Language models and classification", other_tasks),
        explain_dagger(all_models),
    ]
    return "\n".join(parts)


def titled_table(title: str, columns: Iterable[ModelColumn]) -> list[str]:
    """Returns a table with a title, without columns that have no cell; no table if no column has any."""
    measured_columns = [column for column in columns if column.cells]
    if not measured_columns:
        return []
    models = list_synthesizers_first(measured_columns)
    return [f"**{title}**\n\n{model_table(measured_columns, models)}"]


def quality_column(table_name: str, dataset: str, metric: str) -> ModelColumn:
    """Returns a column with the differences of all models to the Transformer; without cells if nothing has run."""
    table = TABLES[table_name]
    column = get_column(table, dataset)
    differences = compute_differences(table, load_column(table, column), metric)
    metric_heading = HEADINGS.get(metric, TASKS[table.task].heading)
    cells = {model: difference.cell() for model, difference in differences.items()}
    return ModelColumn(f"{column.heading} {metric_heading}", cells)


def relative_parameters(table_name: str, dataset: str) -> ModelColumn:
    """Returns a column with the number of parameters of each model that has run, over the Transformer's."""
    table = TABLES[table_name]
    runs_by_model = load_column(table, get_column(table, dataset))
    parameters = {model: runs[0]["parameters"] for model, runs in runs_by_model.items() if runs}
    cells = {}
    for model, number in parameters.items():
        if model != BASELINE:
            cells[model] = f"{number / parameters[BASELINE]:.2f}"
    return ModelColumn("parameters", cells)


def list_synthesizers_first(columns: Iterable[ModelColumn]) -> list[str]:
    """Returns the models that have a cell: Synthesizers in the order of the architectures, then other models."""
    models = list_models(columns)
    synthesizers = [model for model in SYNTHESIZERS if model in models]
    return distinct([*synthesizers, *models])


# ---- weights of mixtures


class MixtureComponent(NamedTuple):
    """A function that is a component of a mixture."""

    mixture: str
    component: str


def alpha_table(name: str) -> str:
    """Returns a table of the weights α that mixtures have learned for their components: how much each one counts.

    A row is a component of a mixture, and a column is a layer. A cell is the mean over the heads of the layer and over
    the seeds of the first data set of the table with this name.
    """
    first_dataset = TABLES[name].columns[0].name
    runs = [run for run in load_runs(name) if run["dataset"] == first_dataset]
    weights = collect_weights(runs)  # {(mixture, component): {layer: its weights in all heads of all runs}}
    layers = list_layers(weights.values())
    rows = []
    for (mixture, component), weights_by_layer in weights.items():
        cells = [mean_weight_cell(weights_by_layer, layer) for layer in layers]
        rows.append([f"`{mixture}`", f"`{component}`", *cells])
    layer_headings = [layer.replace(".layers.", " ") for layer in layers]  # "encoder.layers.0" becomes "encoder 0"
    return markdown_table(["mixture", "component", *layer_headings], rows)


def list_layers(weights_of_components: Iterable[Mapping[str, Sequence[float]]]) -> list[str]:
    """Returns each layer in which any component has weights, in the order in which they occur.

    `weights_of_components`: for each component {layer: weights}.
    """
    layers: list[str] = []
    for weights_by_layer in weights_of_components:
        layers += weights_by_layer.keys()
    return distinct(layers)


def mean_weight_cell(weights_by_layer: Mapping[str, Sequence[float]], layer: str) -> str:
    """Returns the mean weight of a component in a layer as text; empty if the layer does not have the component."""
    if layer not in weights_by_layer:
        return ""
    return f"{statistics.mean(weights_by_layer[layer]):.2f}"


def collect_weights(runs: Iterable[Record]) -> dict[MixtureComponent, dict[str, list[float]]]:
    """Returns {component of a mixture: {layer: its weights in all heads of all runs}}.

    A mixture adds several attention functions, its components, each multiplied by a weight for each head. The record of
    a run whose model is a mixture has these weights as ``alpha``. For example, a run of "random_vanilla" has, in a
    layer with two heads::

        {"encoder.layers.0": {"random": [0.4, 0.7], "vanilla": [0.6, 0.3]}, ...}

    Then the result has, if there is no other run::

        {MixtureComponent("random_vanilla", "random"): {"encoder.layers.0": [0.4, 0.7], ...}, ...}
    """
    weights: dict[MixtureComponent, dict[str, list[float]]] = {}
    for run in runs:
        weights_of_run = run.get("alpha", {})
        for layer, weights_by_component in weights_of_run.items():
            for component, weights_of_heads in weights_by_component.items():
                mixture_component = MixtureComponent(mixture=run["model"], component=component)
                weights_by_layer = weights.setdefault(mixture_component, {})
                weights_of_layer = weights_by_layer.setdefault(layer, [])
                weights_of_layer += weights_of_heads
    return weights
