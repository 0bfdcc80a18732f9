"""The tables of speeds and memory in Markdown, from results/."""

import re
from collections.abc import Iterable, Mapping

import yaml

from recipes.catalog import BASELINE
from recipes.steps import ROOT

from .markdown import ModelColumn, explain_dagger, folded, list_models, model_table
from .notes import TITLE, describe_origin
from .records import Place, Record, load, load_speeds
from .tables import SYNTHESIZERS

Benchmarks = dict[str, dict[str, dict[str, Place]]]  # {table: {title of a part: {heading: where its figures are}}}


def read_benchmarks() -> Benchmarks:
    """Reads benchmarks.yaml, which lists the tables of speeds."""
    entries = yaml.safe_load((ROOT / "pages" / "benchmarks.yaml").read_text(encoding="utf-8"))
    benchmarks: Benchmarks = {}
    for table, parts in entries.items():
        benchmarks[table] = {}
        for title, columns in parts.items():
            benchmarks[table][title] = {heading: Place(*place) for heading, place in columns.items()}
    return benchmarks


BENCHMARKS = read_benchmarks()


def find_place(table: str, heading: str) -> Place:
    """Returns where the figures of a column of a table of speeds are; KeyError if there is no such column."""
    columns: dict[str, Place] = {}
    for part in BENCHMARKS[table].values():
        columns.update(part)
    return columns[heading]


def speed_table(name: str) -> str:
    """Returns a table of ratios to fairseq's Transformer, in several parts if they have titles, and the commands."""
    blocks = []
    models_shown: list[str] = []
    places: list[Place] = []
    for title, part in BENCHMARKS[name].items():
        columns = [ModelColumn(heading, format_ratios(place)) for heading, place in part.items()]
        models = sort_models(list_models(columns))
        heading = f"**{title}**\n\n" if title else ""
        blocks.append(heading + model_table(columns, models))
        models_shown += models
        places += part.values()
    dagger = explain_dagger(models_shown)
    if dagger:
        blocks.append(dagger)
    blocks.append(describe_benchmarks(places))
    return "\n".join(blocks)


def format_ratios(place: Place) -> dict[str, str]:
    """Returns {model: its ratio to the baseline} of a benchmark."""
    ratios = {model: f"{speed.ratio:.2f}" for model, speed in load_speeds(place).items()}
    ratios.pop(BASELINE, None)
    return ratios


def sort_models(models: Iterable[str]) -> list[str]:
    """Returns the Synthesizers in the order of the architectures, then other models by name."""
    models = set(models)
    synthesizers = [model for model in SYNTHESIZERS if model in models]
    return synthesizers + sorted(models.difference(synthesizers))


def describe_benchmarks(places: Iterable[Place]) -> str:
    """Returns folded text with the command behind each column, and the origin of all."""
    files = dict.fromkeys((place.folder, place.file) for place in places)
    records: list[Record] = []
    for folder, file in files:
        records += load(folder, file)
    lines = [describe_benchmark(record) for record in records]
    return folded(TITLE, [*lines, "", describe_origin(records)])


def describe_benchmark(record: Mapping[str, str]) -> str:
    """Returns an item of a list: what was measured, at which commit, and by which command."""
    # a long list of variants says no more than the table does
    command = re.sub(r"(--variants) \S+(?: [^-\s]\S*)+", r"\1 …", record["command"])
    return f"- {record['benchmark']}, commit {record['commit']}: `{command}`"
