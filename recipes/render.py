"""Renders the results as Markdown: scripts/make_tables.py."""

import inspect
import json
import re
import statistics
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from tabulate import tabulate

from .command import ROOT, UserError
from .provenance import device_of
from .tables import BASELINE, DEVICES, TABLES, Dataset, Table
from .tables import SPEED as SPEED_COLUMN

Record = Dict[str, Any]
NOT_RUN = "not run"

SPEED = {  # column: file of results/speed_cpu, and its figure
    "step, batches of a corpus": ("step_corpus", "1024 tokens"),
    "block 128×32": ("block_padded", "128x32"),
    "block 32×128": ("block_padded", "32x128"),
    "block 16×256": ("block_padded", "16x256"),
    "causal 4×1024": ("block_causal", "4x1024"),
    "step T=32, ℓ=1024": ("step_l1024", "32x32"),
    "generation, 8k words": ("generate_8k", "ratio"),
    "memory, causal 16×1024": ("memory_causal", "16x1024"),
}
SPEED_GPU = {  # the same of results/speed_gpu
    "block 128×32": ("block_padded", "128x32"),
    "block 32×128": ("block_padded", "32x128"),
    "block 16×256": ("block_padded", "16x256"),
    "block 256×256": ("block_large", "256x256"),
    "causal 32×32": ("block_causal", "32x32"),
    "causal 4×1024": ("block_causal", "4x1024"),
    "step, batches of a corpus": ("step_corpus", "4096 tokens"),
    "step 128×256": ("step_large", "128x256"),
    "generation, 32k words": ("generate_32k", "ratio"),
}
SPEED_LONG = {  # of results/speed_cpu, with sources of summarisation
    "step, 512 tokens": ("step_sources", "1x512"),
    "step, 1,024 tokens": ("step_sources", "1x1024"),
    "memory of a block, 8×512": ("memory_sources", "8x512"),
    "memory of a block, 4×1024": ("memory_sources", "4x1024"),
}


def load(folder: str, name: str = "*") -> List[Record]:
    """The records of a folder of results/, by name."""
    paths = sorted((ROOT / "results" / folder).glob(f"{name}.json"))
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for path, record in zip(paths, records):
        if not {"benchmark", "curve"} & set(record):
            raise UserError(f"{path}: of an older version; scripts/reproduce.sh {folder} --record completes it")
    return records


def load_cells(table: str) -> List[Record]:
    """The records of a table, by device. A seed that was trained on a GPU and on a CPU is two runs."""
    for path in (ROOT / "results" / table).glob("*.json"):
        raise UserError(f"{path}: its place is {' or '.join(DEVICES)}/ of that folder, by its hardware")
    found = {device: load(f"{table}/{device}") for device in DEVICES}
    for device, records in found.items():
        for record in records:
            if device_of(record["hardware"]) != device:
                name = f"{record['dataset']}-{record['model']}-seed{record['seed']}"
                raise UserError(f"results/{table}/{device}: {name} is of {record['hardware']}; move it")
    return [record for records in found.values() for record in records]


class Summary(NamedTuple):
    """A figure over seeds."""

    n: int
    mean: float
    sd: Optional[float]  # of a sample; None for one seed
    half_width: Optional[float]  # of the mean's 95 % confidence interval by Student's t


def summarize(values: Sequence[float]) -> Summary:
    """Mean, standard deviation and the 95 % t-interval of at least one value."""
    n = len(values)
    if n == 1:
        return Summary(1, values[0], None, None)
    from scipy.stats import t

    sd = statistics.stdev(values)
    return Summary(n, statistics.mean(values), sd, float(t.ppf(0.975, n - 1)) * sd / n**0.5)


def paired_differences(
    table: Table, found: Mapping[str, Sequence[Record]], value: Callable[[Record], float]
) -> Dict[str, List[float]]:
    """For each row of a table its values less the baseline's of the same seed, where both have run.

    Where the baseline was trained on several machines, that of the same machine counts.

    Args:
        found: {row: its records}.
    """

    def baseline_of(record: Record) -> Optional[Record]:
        same_seed = [other for other in found[table.baseline] if other["seed"] == record["seed"]]
        same_machine = [other for other in same_seed if other["hardware"] == record["hardware"]]
        return next(iter(same_machine + same_seed), None)

    pairs: Dict[str, List[float]] = {}
    for row, records in found.items():
        others = [(record, baseline_of(record)) for record in records]
        pairs[row] = [value(record) - value(other) for record, other in others if other is not None]
    return pairs


def differences(
    table: Table, found: Mapping[str, Sequence[Record]], value: Callable[[Record], float], digits: int = 2
) -> List[str]:
    """The cells of `paired_differences`: mean and interval, empty for the baseline."""
    pairs = paired_differences(table, found, value)
    return [difference(values, digits) if row != table.baseline else "" for row, values in pairs.items()]


def figure(values: Sequence[float], digits: int = 2) -> str:
    """Mean ± standard deviation (number of runs)."""
    if not values:
        return NOT_RUN
    summary = summarize(values)
    return f"{summary.mean:.{digits}f}" + (f" ± {summary.sd:.{digits}f} ({summary.n})" if summary.n > 1 else "")


def figures(records: Sequence[Record], names: Sequence[str], digits: int = 2) -> str:
    """Figures of the same records, side by side. One that was not counted says why."""
    if not records:
        return NOT_RUN
    found = []
    for name in names:
        values = [r["figures"][name] for r in records]
        found.append(records[0]["signatures"][name].split("|")[-1] if None in values else figure(values, digits))
    return " / ".join(found)


def difference(values: Sequence[float], digits: int = 2) -> str:
    """Mean difference, with its interval where several seeds give one."""
    if not values:
        return ""
    _, mean, _, half = summarize(values)
    low_high = "" if half is None else f" [{mean - half:+.{digits}f}, {mean + half:+.{digits}f}]"
    return f"{mean:+.{digits}f}{low_high}"


def label(model: str) -> str:
    """A model's name in a table."""
    if model == BASELINE:
        return "Transformer (fairseq's own)"
    return f"`{model}` (ours)" if "relative_random" in model else f"`{model}`"  # which the paper has not


def baseline_name(table: Table) -> str:
    """The row that others are compared with, in a sentence."""
    return "the Transformer" if table.baseline == BASELINE else label(table.baseline)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> List[str]:
    """The lines of a table."""
    return tabulate(list(rows), list(heads), "github", disable_numparse=True, stralign=None).splitlines()


def of_models(table: Table, dataset: Dataset, records: Sequence[Record]) -> Dict[str, List[Record]]:
    """{row: the records of a column}."""
    here = [record for record in records if record["dataset"] == dataset.name]
    return {model: [record for record in here if record["model"] == model] for model in table.models()}


def columns_of(table: Table, dataset: Dataset, records: Sequence[Record]) -> List[List[str]]:
    """The paper's figures, ours, ours less the baseline's by seed, and the speed: headings, and a cell for each row."""
    title = dataset.heading if table.paper else f"{dataset.heading}, {table.title}"
    here = of_models(table, dataset, records)
    metric, several = table.metric(dataset), len(table.figures(dataset)) > 1
    title += f" ({'/'.join(table.figures(dataset).values())})" if several else ""
    columns = of_paper(table, dataset.name, f"{title}, paper")
    if table.paper or any(here.values()):
        cells = (figures(found, list(table.figures(dataset)), table.digits) for found in here.values())
        columns.append([f"{title}, here" if table.paper else title, *cells])
    by_seed = differences(table, here, lambda record: float(record["figures"][metric]), table.digits)
    if any(by_seed):
        columns.append([f"minus {baseline_name(table)} [95 %]", *by_seed])
    if any(SPEED_COLUMN in figures for figures in table.paper.values()):
        timed = load(f"{table.name}/speed", dataset.name)
        ratios = timed[0]["figures"] if timed else {}
        shown = (f"{ratios[model]['ratio']:.2f}" if model in ratios else NOT_RUN for model in here)
        columns.append([f"{title}, {SPEED_COLUMN} relative to {baseline_name(table)}'s, here", *shown])
    return columns


def of_paper(table: Table, name: str, heading: str) -> List[List[str]]:
    """A column of the paper's figures, empty where it has none; no column where it has none at all."""
    found = [table.paper.get(model, {}).get(name, "") for model in table.models()]
    return [[heading, *found]] if any(found) else []


def results(*names: str, short: bool = False) -> str:
    """Tables of the same models side by side, with notes on how their figures came about.

    A model that neither we nor the paper have a figure of is named below the table.

    Args:
        short: each table's first column alone, and no notes.
    """
    tables = [TABLES[name] for name in names]
    records = {table.name: load_cells(table.name) for table in tables}
    if not any(records.values()) and not any(table.paper for table in tables):
        return "No cell has been run at this recipe yet.\n"
    all_models = tables[0].models()
    sizes: Dict[str, str] = {}
    for record in (record for table in tables for record in records[table.name]):
        sizes.setdefault(record["model"], f"{record['parameters'] / 1e6:.2f}M")
    columns = [["model", *map(label, all_models)], *of_paper(tables[0], "parameters", "parameters, paper")]
    columns.append(["parameters", *(sizes.get(model, NOT_RUN) for model in all_models)])
    for table in tables:
        ours = ("parameters", SPEED_COLUMN, *(dataset.name for dataset in table.datasets))
        for name in dict.fromkeys(name for figures in table.paper.values() for name in figures if name not in ours):
            columns += of_paper(table, name, f"{name}, paper")  # figures of other data than ours
        for dataset in table.datasets[:1] if short else table.datasets:
            columns += columns_of(table, dataset, records[table.name])
        columns += [relative(found) for found in of_paper(table, SPEED_COLUMN, f"{SPEED_COLUMN}, paper")]
    heads, *rows = zip(*columns)
    known = {*sizes, *(model for table in tables for model in table.paper)}
    missing = [label(model) for model in all_models if model not in known]
    rows = [row for row, model in zip(rows, all_models) if model in known]
    if short:
        return "\n".join([*markdown(heads, rows), ""])
    below = [note(table, records[table.name]) for table in tables if table.paper or records[table.name]]
    if missing:
        below.append(f"- Not run yet: {', '.join(missing)}.")
    return "\n".join([*markdown(heads, rows), "", *below, ""])


def relative(column: Sequence[str]) -> List[str]:
    """The paper's steps a second, and how many times the Transformer's, which is the first, that is."""
    heading, *cells = column
    return [heading, *(f"{cell} ({float(cell) / float(cells[0]):.2f})" if cell else "" for cell in cells)]


def note(table: Table, records: List[Record]) -> str:
    """How the figures of a table came about."""
    options = table.options("PAIR" if table.corpus else "DATASET", "MODEL", "N")
    command = f"- {table.title}: `scripts/reproduce.sh {table.name} {options}`"
    if not records:
        return f"{command}: nobody has run it yet.{timed(table)}"
    seeds, updates = sorted({r["seed"] for r in records}), shared(r["updates"] for r in records)
    columns = {dataset.name: dataset for dataset in table.datasets}
    names = dict.fromkeys(name for dataset in columns.values() for name in table.figures(dataset))
    found = [shared(r["signatures"][name] for r in records if name in r["signatures"]) for name in names]
    signature = "`, `".join(text for text in found if text)
    named = shared(f" on {r['test_set']}" for r in records if r.get("test_set"))
    minutes = sorted(r["minutes"] for r in records)
    took = (
        f"{minutes[0]:.0f} to {minutes[-1]:.0f}"
        if minutes[-1] > 2 * minutes[0]
        else f"{minutes[len(minutes) // 2]:.1f}"
    )
    heading = table.task.METRIC_NAME if len(names) == 1 else "Figures"
    text = f"{command}{of_the_machine(records)}, N from {seeds}, {updates} updates each, "
    text += f"{took} minutes of training. {heading} `{signature}`"
    tested = [r["bootstrap"] for r in records if r.get("bootstrap")]
    if tested:
        sure = sum(test["p_value"] < 0.05 for test in tested)
        text += f"{named}. {table.task.TEST} against {baseline_name(table)} of the same seed: "
        text += f"p < 0.05 in {sure} of {len(tested)}"
    else:
        text += named
    return f"{text}. {origin(records)}{timed(table)}"


def of_the_machine(records: List[Record]) -> str:
    """The options after ``--`` with which the cells were run, and how many of them."""
    options = [r["command"].partition(" -- ")[2] for r in records]
    found = [(words, options.count(words)) for words in sorted(set(options)) if words]
    if len(set(options)) == 1:
        return "".join(f", all with `-- {words}`" for words, _ in found)
    return "".join(f", {count} of {len(records)} cells with `-- {words}`" for words, count in found)


def timed(table: Table) -> str:
    """How the speeds of a table were measured."""
    found = load(f"{table.name}/speed")
    return "".join(f" Speed: {r['benchmark']}, `{r['command']}`, commit {r['commit']}." for r in found)


def steps_a_second(name: str) -> str:
    """How many times the baseline's steps a second a table's models make, here and in the paper: a column for each."""
    table, found = TABLES[name], load(f"{name}/speed")
    if not found:
        return ""
    paper = {model: figures[SPEED_COLUMN] for model, figures in table.paper.items()}
    models = [model for model in table.models() if model in paper and model != table.baseline]
    ours = [f"{found[0]['figures'][model]['ratio']:.2f}" for model in models]
    theirs = [f"{float(paper[model]) / float(paper[table.baseline]):.2f}" for model in models]
    return "\n".join([*markdown(["", *(f"`{m}`" for m in models)], [["here", *ours], ["paper", *theirs]]), ""])


def validation_loss(name: str) -> str:
    """The last validation loss of a table's models, and what it is less the baseline's of the same seed."""

    def last_loss(record: Record) -> float:
        return float(record["curve"]["valid_loss"][-1])

    table, records = TABLES[name], load_cells(name)
    if not records:
        return "No model has been trained yet.\n"
    heads, columns = ["model"], [[label(model) for model in table.models()]]
    run = {r["dataset"] for r in records}
    for dataset in (dataset for dataset in table.datasets if dataset.name in run):
        here = of_models(table, dataset, records)
        heads += [dataset.heading, f"minus {baseline_name(table)} [95 %]"]
        columns.append([figure([last_loss(r) for r in found], 3) for found in here.values()])
        columns.append(differences(table, here, last_loss, 3))
    rows = [row for row in zip(*columns) if any(cell not in ("", NOT_RUN) for cell in row[1:])]
    return "\n".join([*markdown(heads, rows), ""])


def alpha(name: str) -> str:
    """The learned weights of a table's mixtures by layer: the mean over heads and seeds of its first column."""
    records = [r for r in load_cells(name) if r.get("alpha") and r["dataset"] == TABLES[name].datasets[0].name]
    rows: Dict[Any, Dict[str, List[float]]] = {}
    for record in records:
        for layer, components in record["alpha"].items():
            for component, heads in components.items():
                rows.setdefault((record["model"], component), {}).setdefault(layer, []).extend(heads)
    if not rows:
        return "No mixture has been trained yet.\n"
    layers = list(dict.fromkeys(layer for row in rows.values() for layer in row))
    heads = ["mixture", "component", *(layer.replace(".layers.", " ") for layer in layers)]
    cells = (
        [
            f"`{model}`",
            f"`{component}`",
            *(f"{statistics.mean(row[layer]):.2f}" if layer in row else "" for layer in layers),
        ]
        for (model, component), row in rows.items()
    )
    return "\n".join([*markdown(heads, cells), ""])


def speed(folder: str = "speed_cpu", columns: Mapping[str, Tuple[str, str]] = SPEED) -> str:
    """Ratios to stock fairseq, a row for each variant, and the command of each column.

    Args:
        folder: of results/.
        columns: {heading: (file, figure)}.
    """
    records = {file: load(folder, file)[0] for file, _ in columns.values()}
    variants = in_order({name for record in records.values() for name in record["figures"]} - {"stock"})
    rows = ["| |" + "|".join(columns) + "|", "|---" * (len(columns) + 1) + "|"]
    for variant in variants:
        figures = [records[file]["figures"].get(variant, {}).get(figure) for file, figure in columns.values()]
        rows.append(f"| `{variant}` |" + "|".join(" " if f is None else f" {f:.2f} " for f in figures) + "|")
    commands = [f"- {record['benchmark']}: `{record['command']}`" for record in records.values()]
    return "\n".join([*rows, "", *commands, "", origin(list(records.values())), ""])


def in_order(names: Iterable[str]) -> List[str]:
    """The variants in the order of the architectures, then other models by name."""
    from fairseq_synth.architectures import VARIANTS

    order = list(VARIANTS)
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))


def picture(name: str, folder: str = "docs/") -> str:
    """The picture of a table's first column, once a cell of it has run. `folder`: where it is, seen from the page."""
    table = TABLES[name]
    dataset = table.datasets[0]
    if not any(record["dataset"] == dataset.name for record in load_cells(name)):
        return ""
    metric = next(iter(table.figures(dataset).values()))
    return f"\n![{metric} of every model, {dataset.heading}]({folder}{name}-{dataset.name}-scores.png)\n\n"


def repairs() -> str:
    """The bugs of fairseq that are worked around, from the docstrings: ``symptom (versions).`` and the details."""
    from fairseq_synth.host import checkpoints, data, messages, training  # noqa: F401  (they list theirs)
    from fairseq_synth.host.repairs import REPAIRS

    rows = []
    for name, function in sorted(REPAIRS.items()):
        symptom, *details = re.split(r"\n\s*\n", inspect.cleandoc(function.__doc__ or ""))
        found = re.fullmatch(r"(.*) \(([^()]*)\)\.", symptom.replace("\n", " "))
        if not found:
            raise UserError(f"{name}: its docstring must start with one sentence, 'symptom (versions).'")
        text = " ".join([found[1] + ".", *(" ".join(detail.split()) for detail in details)])
        rows.append([f"`{name}`", text.replace("``", "`").replace("|", "\\|"), found[2]])
    return "\n".join([*markdown(["name", "symptom", "fairseq versions"], rows), ""])


def shared(values: Iterable[object]) -> str:
    """What all records say, or everything they say."""
    return "; ".join(sorted({str(value) for value in values}))


def origin(records: List[Record]) -> str:
    """Versions, hardware and commit."""
    versions = shared(", ".join(f"{name} {v}" for name, v in r["versions"].items()) for r in records)
    return f"{versions}. {shared(r['hardware'] for r in records)}. Commit {shared(r['commit'] for r in records)}."


def fill(name: str, page: str, block: str, contents: str) -> str:
    """The text of a page with the block `<!-- results: NAME --> … <!-- end -->` replaced."""
    pattern = re.compile(rf"(<!-- results: {re.escape(block)} -->\n).*?(<!-- end -->)", re.S)
    if not pattern.search(page):
        raise UserError(f"{name} has no '<!-- results: {block} -->' … '<!-- end -->'")
    return pattern.sub(lambda match: match[1] + contents + match[2], page)
