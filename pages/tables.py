"""The tables of the pages in Markdown, from results/."""

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import yaml

from fairseq_synth.names import VARIANTS
from recipes.catalog import BASELINE, CORPORA, TABLES, TASKS, Column, Table
from recipes.provenance import device_of
from recipes.steps import ROOT

from .records import STEPS, Place, Record, Rows, column_of, differences, load, load_cells, paper_steps, rows_of, speeds

Cells = tuple[str, Mapping[str, str]]  # a column to be shown: its heading, and the cells of models
# {name of a table of speeds: {heading: its place}}
BENCHMARKS: dict[str, dict[str, Place]] = yaml.safe_load((ROOT / "pages" / "benchmarks.yaml").read_text("utf-8"))
NOT_RUN = "not run yet"
NOTE = "How these figures came about"
SHOWN = ("python", "torch", "fairseq", "ve-fairseq")  # the other versions are in the records
SYNTHESIZERS = [spec.replace("+", "_") for spec in VARIANTS]
HEADINGS = {  # of figures that are not named by them
    "f1": "F1", "macro_f1": "F1", "answer_f1": "F1", "answer_em": "exact", "all_of_group": "exact",
    "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman",
    "bleu4": "BLEU-4", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum", "meteor": "METEOR", "cider": "CIDEr",
    "bleu": "BLEU", "chrf": "chrF", "valid_loss": "validation loss",
}  # fmt: skip
TRANSLATION = ("bleu", "chrf", "valid_loss")  # each is compared; of other tasks the task's figure alone
# the tables and data sets of docs/which-one.md: quality()
QUALITY = (
    ("multi30k_cpu", "en-de"),
    ("multi30k_cpu", "en-fr"),
    ("multi30k", "en-de"),
    ("ptb_cpu", "ptb"),
    ("wikitext2_cpu", "wikitext2"),
    ("agnews_cpu", "agnews"),
    ("imdb_cpu", "imdb"),
)

# ---- words


def label(model: str) -> str:
    """A model's name in a table, with a mark if it is a Synthesizer that is not the paper's."""
    if model == BASELINE:
        return "Transformer (fairseq's own)"
    return f"`{model}` †" if "relative_random" in model else f"`{model}`"


def mark(models: Iterable[str]) -> str:
    """What the mark means, below a table that has it."""
    page = "deviations.md#functions-that-are-not-the-papers"
    return f"† [not the paper's]({page})\n" if any("†" in label(model) for model in models) else ""


def baseline_name(table: Table) -> str:
    """The row that others are compared with, in a sentence."""
    return "the Transformer" if table.baseline == BASELINE else label(table.baseline)


def minus(table: Table) -> str:
    return f"minus {baseline_name(table)}"


def shown(table: Table, column: Column) -> dict[str, str]:
    """{figure of scores.json that a column shows: its heading}."""
    names = column.figures or (CORPORA[column.name].scores if column.name in CORPORA else ())
    task = TASKS[table.task]
    return {name: HEADINGS.get(name, name) for name in names} or {task.metric: task.heading}


def metric(table: Table, column: Column) -> str:
    """The figure of a column that is compared and drawn: the task's, else the column's first."""
    names = shown(table, column)
    return TASKS[table.task].metric if TASKS[table.task].metric in names else next(iter(names))


def digits_of(table: Table, figure: str) -> int:
    return 3 if figure == "valid_loss" else TASKS[table.task].digits


def figures(records: Sequence[Record], names: Iterable[str], digits: int = 2) -> str:
    """Mean ± standard deviation (number of runs) of figures, side by side. One that was not counted says why."""
    found = []
    for name in names if records else ():
        values = [record["figures"][name] for record in records]
        if None in values:
            found.append(records[values.index(None)]["signatures"][name].split("|")[-1])
        else:
            spread = f" ± {statistics.stdev(values):.{digits}f} ({len(values)})" if len(values) > 1 else ""
            found.append(f"{statistics.mean(values):.{digits}f}{spread}")
    return " / ".join(found) or NOT_RUN


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, or what stands for it before anything has run."""
    rows = list(rows)
    if not rows:
        return "No cell has been run at this recipe yet.\n"
    return "".join(f"|{'|'.join(cells)}|\n" for cells in (heads, ["---"] * len(heads), *rows))


def of_models(columns: Sequence[Cells], models: Iterable[str]) -> str:
    """A table with a row for each model."""
    rows = [[label(model), *(cells.get(model, "") for _, cells in columns)] for model in models]
    return markdown(["model", *(heading for heading, _ in columns)], rows)


def folded(title: str, lines: Iterable[str]) -> str:
    """Text that GitHub shows when its title is clicked."""
    return "\n".join([f"<details><summary>{title}</summary>\n", *lines, "\n</details>\n"])


# ---- tables of results


def results(name: str, dataset: str = "") -> str:
    """The table of a name, or of one of its data sets, with notes on how its figures came about.

    Where nothing has run it has the paper's figures alone. A model without any figure is named below.
    """
    table, records = TABLES[name], load_cells(name)
    columns = [column for column in table.columns if not dataset or column.name == dataset]
    records = [record for record in records if record["dataset"] in [column.name for column in columns]]
    models = [*dict.fromkeys([*table.models(), *(record["model"] for record in records)])]
    cells = of_paper(table, "parameters")
    if records:
        sizes = {record["model"]: f"{record['parameters'] / 1e6:.2f}M" for record in reversed(records)}
        cells.append(("parameters", {**dict.fromkeys(models, NOT_RUN), **sizes}))
    ours = ("parameters", STEPS, *(column.name for column in table.columns))
    for other in next(iter(table.published().values()), {}):
        cells += of_paper(table, other) if other not in ours else []  # figures of other data than ours
    for column in columns:
        cells += columns_of(table, column, rows_of(table, column, records), alone=bool(dataset))
    ratios = paper_steps(table)
    for heading, own in of_paper(table, STEPS):
        cells.append((heading, {model: f"{figure} ({ratios[model]:.2f})" for model, figure in own.items()}))
    known = [model for model in models if model in table.published() or any(r["model"] == model for r in records)]
    if not known:
        return f"Nobody has run {command(table)} yet.\n"
    missing = ", ".join(label(model) for model in models if model not in known)
    below = [f"{NOT_RUN.capitalize()}: {missing}.\n"] if missing else []
    below.append(note(table, records) if records else f"Nobody has run {command(table)} yet.\n")
    return "\n".join([of_models(cells, known), *filter(None, [mark(known)]), *below])


def columns_of(table: Table, column: Column, rows: Rows, alone: bool = False) -> list[Cells]:
    """The paper's figures, ours, ours less the baseline's by seed, and the steps a second. `alone`: no other column."""
    found, names, runs = of_paper(table, column.name), shown(table, column), any(rows.values())
    translation = table.task == "translation"
    groups = [[name] for name in TRANSLATION] if translation else [list(names)]
    for group in groups if runs else ():
        own = HEADINGS[group[0]] if translation else ""
        title = own if alone and own else titled(table, column) + (own and f", {own}")
        cells = {row: figures(records, group, digits_of(table, group[0])) for row, records in rows.items()}
        found.append((f"{title}, here" if table.paper else title, cells))
        figure = group[0] if translation else metric(table, column)
        compared = differences(table, rows, figure)
        if any(difference.half_width for difference in compared.values()):
            of = f", {names[figure]}" if len(group) > 1 else ""
            cells = {row: difference.cell(digits_of(table, figure)) for row, difference in compared.items()}
            found.append((f"{minus(table)}{of}", cells))
    timed = speeds(f"{table.name}/speed", column.name, "ratio")
    if timed:
        own_steps = {row: f"{timed[row].ratio:.2f}" if row in timed else NOT_RUN for row in rows}
        found.append((f"{titled(table, column)}, {STEPS} over {baseline_name(table)}'s, here", own_steps))
    return found


def of_paper(table: Table, name: str) -> list[Cells]:
    """A column of the paper's figures, if it has some; `name` is also its heading unless it is a data set's."""
    heading = next((titled(table, column) for column in table.columns if column.name == name), name)
    cells = {model: own[name] for model, own in table.published().items() if name in own}
    return [(f"{heading}, paper", cells)] if cells else []


def titled(table: Table, column: Column) -> str:
    """The heading of a column, with those of its figures if there are several."""
    names = shown(table, column).values()
    return f"{column.heading} ({'/'.join(names)})" if len(names) > 1 else column.heading


def command(table: Table) -> str:
    dataset = "--dataset DATASET " if len(table.columns) > 1 else ""
    return f"`scripts/reproduce.sh {table.name} {dataset}--variant MODEL --seed N`"


def note(table: Table, records: list[Record]) -> str:
    """How the figures of a table came about."""
    task, updates = TASKS[table.task], [record["updates"] for record in records]
    seeds = ", ".join(str(seed) for seed in sorted({record["seed"] for record in records}))
    lines = [f"{command(table)}, N from {seeds}; runs in `results/{table.name}/`."]
    options = Counter(" ".join(extra(record["command"])) for record in records)
    for words in sorted(filter(None, options)):
        lines.append(f"{options[words]} of {len(records)} runs with `{words}`.")
    words = f"{min(updates):,}" if min(updates) == max(updates) else f"{min(updates):,} to {max(updates):,}"
    minutes = {
        device: [r["minutes"] for r in records if device_of(r["hardware"]) == device] for device in ("cpu", "gpu")
    }
    spans = [f"{min(m):.1f} to {max(m):.1f} minutes on a {d.upper()}" for d, m in minutes.items() if m]
    lines.append(f"{words} updates; {' and '.join(spans)}, beside other work.")
    names = dict.fromkeys(n for column in table.columns for n in (*shown(table, column), "chrf"))
    signatures = [shared(r["signatures"][name] for r in records if name in r["signatures"]) for name in names]
    lines.append(f"Signatures: `{'`, `'.join(filter(None, signatures))}`.")
    trips = shared(f"{r['figures']['round_trip']:.2f}" for r in records if {"bleu", "round_trip"} <= {*r["figures"]})
    lines += [f"A perfect translation would score BLEU {trips}."] if trips else []
    tests = [record["significance"] for record in records if record.get("significance")]
    if tests:
        below = sum(test["p_value"] < 0.05 for test in tests)
        kinds = shared(re.split(r"\|(?:seed|won):", test["signature"])[0] for test in tests if "signature" in test)
        text = f"{task.test}{kinds and f' ({kinds})'} against {baseline_name(table)} of the same seed: p < 0.05 in"
        lines.append(f"{text} {below} of {len(tests)} runs.")
    for r in load(f"{table.name}/speed"):
        lines.append(f"{r['benchmark']}: `python benchmarks/timing.py {table.name}`, commit {r['commit']}.")
    return folded(NOTE, [*lines, origin(records)])


def extra(words: str) -> list[str]:
    """The options of the machine in a record's command."""
    return [word for word in words.partition(" --seed ")[2].split()[1:] if word not in ("--rerun", "--")]


def shared(values: Iterable[object]) -> str:
    """What all records say, or everything they say."""
    return "; ".join(sorted({str(value) for value in values}))


def origin(records: Sequence[Record]) -> str:
    """Versions, hardware and commits."""
    versions: dict[str, dict[str, None]] = defaultdict(dict)
    for record in records:
        for name, version in record["versions"].items():
            versions[name][version] = None
    machines, commits = ([word for r in records for word in r[name].split("; ")] for name in ("hardware", "commit"))
    said = ", ".join(f"{name} {' and '.join(sorted(own))}" for name, own in versions.items() if name in SHOWN)
    return f"{said}. {shared(machines)}. Commits: {', '.join(sorted(set(commits)))}."


def summary(name: str) -> str:
    """A translation table in short, for README.md: BLEU, and what BLEU and chrF are less the Transformer's."""
    table, records = TABLES[name], load_cells(name)
    sizes = {record["model"]: f"{record['parameters'] / 1e6:.2f}M" for record in reversed(records)}
    cells: list[Cells] = [("parameters", sizes)]
    for column in table.columns:
        rows = rows_of(table, column, records)
        cells.append((f"{column.heading} BLEU", {row: figures(own, ["bleu"]) for row, own in rows.items() if own}))
        for figure in ("bleu", "chrf"):
            compared = differences(table, rows, figure)
            cells.append((f"{minus(table)}, {HEADINGS[figure]}", {row: own.cell() for row, own in compared.items()}))
    return of_models(cells, [model for model in table.models() if model in sizes])


def quality() -> str:
    """Differences to the Transformer in all tasks, after the parameters over the Transformer's; baselines come last."""
    name, dataset = QUALITY[0]
    sizes = {r["model"]: r["parameters"] for r in load_cells(name) if r["dataset"] == dataset}
    columns: list[Cells] = [("parameters", {model: f"{size / sizes[BASELINE]:.2f}" for model, size in sizes.items()})]
    for name, dataset in QUALITY:
        table = TABLES[name]
        column = column_of(table, dataset)
        rows, translation = rows_of(table, column, load_cells(name)), table.task == "translation"
        names = TRANSLATION[:2] if translation else [metric(table, column)]
        found = [differences(table, rows, figure) for figure in names]
        if found[0]:
            heading = f"{column.heading}, {table.title}" if translation else column.heading
            cells = {row: " / ".join(own[row].cell() for own in found) for row in found[0]}
            columns.append(
                (f"{heading}: {' / '.join(HEADINGS.get(n, TASKS[table.task].heading) for n in names)}", cells)
            )
    run = [model for _, cells in columns[1:] for model in cells]
    first = [model for model in SYNTHESIZERS if model in run]
    return "\n".join([of_models(columns, dict.fromkeys([*first, *run])), mark(run)])


def alpha(name: str) -> str:
    """The learned weights of a table's mixtures by layer: the mean over heads and seeds of its first column."""
    rows: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in load_cells(name):
        for layer, components in record.get("alpha", {}).items():
            for component, heads in components.items() if record["dataset"] == TABLES[name].columns[0].name else ():
                rows[record["model"], component][layer] += heads
    layers = list(dict.fromkeys(layer for row in rows.values() for layer in row))
    cells = [
        [*(f"`{word}`" for word in names), *(f"{statistics.mean(row[x]):.2f}" if x in row else "" for x in layers)]
        for names, row in rows.items()
    ]
    return markdown(["mixture", "component", *(layer.replace(".layers.", " ") for layer in layers)], cells)


# ---- tables of speeds


def in_order(names: Iterable[str]) -> list[str]:
    """The variants in the order of the architectures, then other models by name."""
    return sorted(names, key=lambda name: ([*SYNTHESIZERS, name].index(name), name))


def benchmark(place: Place) -> dict[str, float]:
    """{model: its ratio to the baseline}."""
    found = {name.replace("+", "_"): speed.ratio for name, speed in speeds(*place).items()}
    return {name: ratio for name, ratio in found.items() if name != BASELINE}


def speed(name: str) -> str:
    """Ratios to the baseline, a row for each variant, and the command of each column."""
    places = BENCHMARKS[name]
    columns = [(heading, {m: f"{r:.2f}" for m, r in benchmark(place).items()}) for heading, place in places.items()]
    models = in_order({model for _, cells in columns for model in cells})
    files = {(*place[:2],): heading for heading, place in reversed(places.items())}
    lines, records = [], []
    for place, _ in reversed(files.items()):
        for record in load(*place):
            words = re.sub(r"(--variants) \S+(?: [^-\s]\S*)+", r"\1 …", record["command"])
            lines.append(f"- {record['benchmark']}, commit {record['commit']}: `{words}`")
            records.append(record)
    text = [
        of_models(columns, models),
        mark(models),
        folded("How these figures came about", [*lines, "", origin(records)]),
    ]
    return "\n".join(filter(None, text))
