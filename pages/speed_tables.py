"""The tables of speed-ups and memory in Markdown, from results/."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import yaml

from recipes.catalog import BASELINE
from recipes.steps import ROOT

from .markdown import ModelColumn, explain_dagger, list_models, model_table
from .notes import folded_list, list_origin
from .records import Benchmark, Record, load_records, load_speed_ups
from .tables import SYNTHESIZERS


class TablePart(NamedTuple):
    """A part of a table of speed-ups, which is shown as a table with a title."""

    title: str  # empty: none
    benchmarks: dict[str, Benchmark]  # {heading of a column: the benchmark that it shows}


def read_speed_tables() -> dict[str, list[TablePart]]:
    """Returns {table: its parts} from benchmarks.yaml, which lists the tables of speed-ups.

    For example, the table "speed" has a part with the title "Base model", which has two columns::

        speed:
          "Base model":
            "step, 4,000 words": [speed_cpu, step_corpus, 1024 tokens]
            "step, 32,768 words": [speed_cpu, step_32k, 32x32]
    """
    text = (ROOT / "pages" / "benchmarks.yaml").read_text(encoding="utf-8")
    tables = {}
    for table_name, columns_by_title in yaml.safe_load(text).items():
        tables[table_name] = [read_part(title, columns) for title, columns in columns_by_title.items()]
    return tables


def read_part(title: str, columns: Mapping[str, Sequence[str]]) -> TablePart:
    """Returns a part of a table. `columns`: {heading: the folder, the file and the key of a `Benchmark`}."""
    benchmarks = {}
    for heading, (folder, file, key) in columns.items():
        benchmarks[heading] = Benchmark(folder, file, key)
    return TablePart(title, benchmarks)


SPEED_TABLES = read_speed_tables()


def find_benchmark(table_name: str, heading: str) -> Benchmark:
    """Returns the benchmark that a column of a table of speed-ups shows. Raises KeyError if there is no such column."""
    for part in SPEED_TABLES[table_name]:
        if heading in part.benchmarks:
            return part.benchmarks[heading]
    raise KeyError(heading)


def speed_table(name: str) -> str:
    """Returns a table of how many times as fast as fairseq's Transformer models are, with a note that has the commands.

    A table with many columns consists of several parts, one below the other. The explanation of the dagger and the note
    come after the last part.
    """
    paragraphs = []
    models: list[str] = []  # the models of all parts
    benchmarks: list[Benchmark] = []  # the benchmarks of all parts
    for part in SPEED_TABLES[name]:
        columns = load_columns(part)
        models_of_part = sort_models(list_models(columns))
        paragraphs.append(f"{format_title(part)}{model_table(columns, models_of_part)}")
        models += models_of_part
        benchmarks += part.benchmarks.values()
    dagger = explain_dagger(models)
    if dagger:
        paragraphs.append(dagger)
    paragraphs.append(speed_note(benchmarks))
    return "\n".join(paragraphs)


def load_columns(part: TablePart) -> list[ModelColumn]:
    """Returns the columns of a part of a table, with the speed-ups of all models."""
    return [ModelColumn(heading, format_ratios(benchmark)) for heading, benchmark in part.benchmarks.items()]


def format_title(part: TablePart) -> str:
    """Returns the title above a part of a table in Markdown; empty if it has none."""
    return f"**{part.title}**\n\n" if part.title else ""


def format_ratios(benchmark: Benchmark) -> dict[str, str]:
    """Returns {model: its speed-up} as text, without the Transformer, whose speed-up is 1."""
    ratios = {}
    for model, speed_up in load_speed_ups(benchmark).items():
        if model != BASELINE:
            ratios[model] = f"{speed_up.ratio:.2f}"
    return ratios


def sort_models(models: Iterable[str]) -> list[str]:
    """Returns the Synthesizers in the order of the architectures, then other models by name."""
    models = set(models)
    synthesizers = [model for model in SYNTHESIZERS if model in models]
    other_models = sorted(models.difference(SYNTHESIZERS))
    return synthesizers + other_models


def speed_note(benchmarks: Iterable[Benchmark]) -> str:
    """Returns the note below a table of speed-ups: the command of each benchmark, versions and hardware."""
    # Several columns may show the same file, whose command is listed once. A dict keeps the order of its keys.
    files = dict.fromkeys((benchmark.folder, benchmark.file) for benchmark in benchmarks)
    records: list[Record] = []
    for folder, file in files:
        records += load_records(folder, file)
    items = [describe_benchmark(record) for record in records]
    return folded_list([*items, *list_origin(records)])


def describe_benchmark(record: Mapping[str, str]) -> str:
    """Returns an item of a list: what a benchmark measured, at which commit, and by which command.

    The names after ``--variants`` are replaced by "…", since they are those of the rows of the table.
    """
    command = re.sub(r"(--variants) \S+(?: [^-\s]\S*)+", r"\1 …", record["command"])
    return f"{record['benchmark']}, commit {record['commit']}: `{command}`"
