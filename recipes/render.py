"""Renders the results as Markdown: scripts/make_tables.py."""

import inspect
import json
import math
import re
import statistics
from collections import Counter, defaultdict
from functools import partial
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Sequence, Tuple

from tabulate import tabulate

from fairseq_synth.names import VARIANTS

from .command import ROOT, UserError
from .provenance import device_of
from .tables import BASELINE, DEVICES, STEPS, TABLES, Dataset, Table

Record = Dict[str, Any]
Rows = Dict[str, List[Record]]  # the records of a column of a table, by row
Column = Tuple[str, Mapping[str, str]]  # a column to be shown: its heading, and the cells of models
Place = Tuple[str, str, str]  # of a benchmark's figure: folder and file of results/, and its name there
NOT_RUN = "not run"

SPEED = {  # by heading
    "step, batches of a corpus": ("speed_cpu", "step_corpus", "1024 tokens"),
    "block 128×32": ("speed_cpu", "block_padded", "128x32"),
    "block 32×128": ("speed_cpu", "block_padded", "32x128"),
    "block 16×256": ("speed_cpu", "block_padded", "16x256"),
    "causal 4×1024": ("speed_cpu", "block_causal", "4x1024"),
    "step T=32, ℓ=1024": ("speed_cpu", "step_l1024", "32x32"),
    "generation, 8k words": ("speed_cpu", "generate_8k", "ratio"),
    "memory, causal 16×1024": ("speed_cpu", "memory_causal", "16x1024"),
}
SPEED_GPU = {
    "block 128×32": ("speed_gpu", "block_padded", "128x32"),
    "block 32×128": ("speed_gpu", "block_padded", "32x128"),
    "block 16×256": ("speed_gpu", "block_padded", "16x256"),
    "block 256×256": ("speed_gpu", "block_padded", "256x256"),
    "causal 32×32": ("speed_gpu", "block_causal", "32x32"),
    "causal 4×1024": ("speed_gpu", "block_causal", "4x1024"),
    "step, batches of a corpus": ("speed_gpu", "step_corpus", "4096 tokens"),
    "step 128×256": ("speed_gpu", "step_large", "128x256"),
    "generation, 32k words": ("speed_gpu", "generate_32k", "ratio"),
}
SPEED_KERNELS = {  # with the Triton kernels, each beside the same without
    "128×32": ("speed_gpu", "block_padded", "128x32"),
    "128×32, kernels": ("speed_gpu", "kernels_block_padded", "128x32"),
    "32×128": ("speed_gpu", "block_padded", "32x128"),
    "32×128, kernels": ("speed_gpu", "kernels_block_padded", "32x128"),
    "256×256": ("speed_gpu", "block_padded", "256x256"),
    "256×256, kernels": ("speed_gpu", "kernels_block_padded", "256x256"),
    "causal 4×1024": ("speed_gpu", "block_causal", "4x1024"),
    "causal 4×1024, kernels": ("speed_gpu", "kernels_block_causal", "4x1024"),
}
SPEED_LONG = {  # with sources of summarisation
    "step, 512 tokens": ("speed_cpu", "step_sources", "1x512"),
    "step, 1,024 tokens": ("speed_cpu", "step_sources", "1x1024"),
    "memory of a block, 8×512": ("speed_cpu", "memory_sources", "8x512"),
    "memory of a block, 4×1024": ("speed_cpu", "memory_sources", "4x1024"),
}


# ---- what is in results/


def load(folder: str, name: str = "*") -> List[Record]:
    """The records of a folder of results/, by name."""
    paths = sorted((ROOT / "results" / folder).glob(f"{name}.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def load_cells(table: str) -> List[Record]:
    """The records of a table, by device. A seed that was trained on a GPU and on a CPU is two runs."""
    found = []
    for folder in (*DEVICES, ""):  # a record in neither is refused
        for record in load(f"{table}/{folder}"):
            if folder != device_of(record["hardware"]):
                name = f"{record['dataset']}-{record['model']}-seed{record['seed']}"
                raise UserError(f"results/{table}/{folder}: {name} is of {record['hardware']}; move it to gpu/ or cpu/")
            record["figures"]["valid_loss"] = (record["curve"].get("valid_loss") or [None])[-1]
            found.append(record)
    return found


def rows_of(table: Table, dataset: Dataset, records: Sequence[Record]) -> Rows:
    """The records of a column, by row; see `models_of`."""
    here = [record for record in records if record["dataset"] == dataset.name]
    return {model: [record for record in here if record["model"] == model] for model in models_of(table, here)}


def models_of(table: Table, records: Iterable[Record]) -> List[str]:
    """The rows of a table, and the models of records that are none."""
    return [*dict.fromkeys([*table.models(), *(record["model"] for record in records)])]


def pairs(table: Table, rows: Rows) -> Dict[str, List[Tuple[Record, Record]]]:
    """For each other row its records, each beside the baseline's of the same seed, where both have run.

    Where the baseline was trained on several machines, that of the same machine counts, else of the same device.
    """

    def likeness(record: Record, other: Record) -> Tuple[bool, bool]:
        ours, theirs = record["hardware"], other["hardware"]
        return ours == theirs, device_of(ours) == device_of(theirs)

    found: Dict[str, List[Tuple[Record, Record]]] = {row: [] for row in rows if row != table.baseline}
    for row, own in found.items():
        for record in rows[row]:
            same_seed = [other for other in rows[table.baseline] if other["seed"] == record["seed"]]
            own += [(record, max(same_seed, key=partial(likeness, record)))] if same_seed else []
    return found


def differences(table: Table, rows: Rows, figure: str) -> Dict[str, List[float]]:
    """For each other row its values of a figure less the baseline's, of all `pairs`."""
    return {
        row: [float(record["figures"][figure]) - float(other["figures"][figure]) for record, other in own]
        for row, own in pairs(table, rows).items()
    }


class Speed(NamedTuple):
    """How many times as fast as stock fairseq, or how many times less memory; the lowest and the highest round."""

    ratio: float
    lowest: float
    highest: float


def speeds(folder: str, file: str, figure: str) -> Dict[str, Speed]:
    """{variant: its speed} of a benchmark, if it has run."""
    found = {name: own for record in load(folder, file) for name, own in record["figures"].items() if figure in own}
    found.pop("stock", None)
    low, high = ("lowest", "highest") if figure == "ratio" else (f"{figure} from", f"{figure} to")
    return {
        name: Speed(own[figure], own.get(low, own[figure]), own.get(high, own[figure])) for name, own in found.items()
    }


def paper_steps(table: Table) -> Dict[str, float]:
    """{model: its steps a second over the Transformer's} of the paper's table, if it has them."""
    found = {model: float(own[STEPS]) for model, own in table.paper.items() if STEPS in own}
    return {model: value / found[table.baseline] for model, value in found.items()}


def in_order(names: Iterable[str]) -> List[str]:
    """The variants in the order of the architectures, then other models by name."""
    order = list(VARIANTS)
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))


# ---- cells and tables


def figures(records: Sequence[Record], names: Iterable[str], digits: int = 2) -> str:
    """Mean ± standard deviation (number of runs) of figures, side by side. One that was not counted says why."""
    if not records:
        return NOT_RUN
    found = []
    for name in names:
        values = [record["figures"][name] for record in records]
        if None in values:
            found.append(records[values.index(None)]["signatures"][name].split("|")[-1])
        else:
            spread = f" ± {statistics.stdev(values):.{digits}f} ({len(values)})" if len(values) > 1 else ""
            found.append(f"{statistics.mean(values):.{digits}f}{spread}")
    return " / ".join(found)


def difference(values: Sequence[float], digits: int) -> str:
    """Mean, with its 95 % interval by Student's t where several seeds give one."""
    from scipy.stats import t

    if not values:
        return ""
    n, mean, interval = len(values), statistics.mean(values), ""
    if n > 1:
        half = float(t.ppf(0.975, n - 1)) * statistics.stdev(values) / n**0.5
        interval = f" [{mean - half:+.{digits}f}, {mean + half:+.{digits}f}]"
    return f"{round(mean, digits) + 0.0:+.{digits}f}{interval}"  # no -0.00


def compared(table: Table, rows: Rows, figure: str, digits: int, name: str = "") -> List[Column]:
    """The column of differences to the baseline, if there are some. `name`: of the figure, where it is to be said."""
    cells = {row: difference(values, digits) for row, values in differences(table, rows, figure).items()}
    heading = f"minus {baseline_name(table)}{name and f', {name}'} [95 %]"
    return [(heading, cells)] if any(cells.values()) else []


def of_paper(table: Table, name: str) -> List[Column]:
    """A column of the paper's figures, if it has some; `name` is also its heading unless it is a data set's."""
    heading = next((titled(table, dataset) for dataset in table.datasets if dataset.name == name), name)
    cells = {model: own[name] for model, own in table.paper.items() if name in own}
    return [(f"{heading}, paper", cells)] if cells else []


def titled(table: Table, dataset: Dataset) -> str:
    """The heading of a column, with those of its figures if there are several."""
    title = dataset.heading if table.paper else f"{dataset.heading}, {table.title}"
    names = table.figures(dataset).values()
    return f"{title} ({'/'.join(names)})" if len(names) > 1 else title


def label(model: str) -> str:
    """A model's name in a table."""
    if model == BASELINE:
        return "Transformer (fairseq's own)"
    return f"`{model}` (ours)" if "relative_random" in model else f"`{model}`"  # which the paper has not


def baseline_name(table: Table) -> str:
    """The row that others are compared with, in a sentence."""
    return "the Transformer" if table.baseline == BASELINE else label(table.baseline)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, or what stands for it before anything has run."""
    rows = list(rows)
    if not rows:
        return "No cell has been run at this recipe yet.\n"
    return tabulate(rows, list(heads), "github", disable_numparse=True, stralign=None) + "\n"


def of_models(columns: Sequence[Column], models: Iterable[str]) -> str:
    """A table with a row for each model."""
    rows = [[label(model), *(cells.get(model, "") for _, cells in columns)] for model in models]
    return markdown(["model", *(heading for heading, _ in columns)], rows)


# ---- what pages show


def results(*names: str, short: bool = False) -> str:
    """Tables of the same models side by side, with notes on how their figures came about.

    A model that neither we nor the paper have a figure of is named below. `short`: the first column alone, no notes.
    """
    tables = [TABLES[name] for name in names]
    records = {name: load_cells(name) for name in names}
    models = models_of(tables[0], (record for own in records.values() for record in own))
    sizes = {r["model"]: f"{r['parameters'] / 1e6:.2f}M" for name in reversed(names) for r in reversed(records[name])}
    columns = [*of_paper(tables[0], "parameters"), ("parameters", {**dict.fromkeys(models, NOT_RUN), **sizes})]
    for table in tables:
        ours = ("parameters", STEPS, *(dataset.name for dataset in table.datasets))
        for name in next(iter(table.paper.values()), {}):
            columns += of_paper(table, name) if name not in ours else []  # figures of other data than ours
        for dataset in table.datasets[:1] if short else table.datasets:
            columns += columns_of(table, dataset, records[table.name])
        for heading, cells in of_paper(table, STEPS):
            ratios = paper_steps(table)
            columns.append((heading, {model: f"{cell} ({ratios[model]:.2f})" for model, cell in cells.items()}))
    known = {*sizes, *(model for table in tables for model in table.paper)}
    shown = of_models(columns, [model for model in models if model in known])
    if short or not known:
        return shown
    below = [note(table, records[table.name]) for table in tables if table.paper or records[table.name]]
    missing = ", ".join(label(model) for model in models if model not in known)
    below += [f"- Not run yet: {missing}."] if missing else []
    return "\n".join([shown, *below, ""])


def columns_of(table: Table, dataset: Dataset, records: Sequence[Record]) -> List[Column]:
    """The paper's figures, ours, ours less the baseline's by seed, and the steps a second."""
    title, rows, names = titled(table, dataset), rows_of(table, dataset, records), table.figures(dataset)
    columns = of_paper(table, dataset.name)
    if table.paper or any(rows.values()):
        cells = {row: figures(found, names, table.digits) for row, found in rows.items()}
        columns.append((f"{title}, here" if table.paper else title, cells))
    metric = table.metric(dataset)
    columns += compared(table, rows, metric, table.digits, names[metric] if len(names) > 1 else "")
    if paper_steps(table):
        timed = speeds(f"{table.name}/speed", dataset.name, "ratio")
        cells = {row: f"{timed[row].ratio:.2f}" if row in timed else NOT_RUN for row in rows}
        columns.append((f"{title}, {STEPS} relative to {baseline_name(table)}'s, here", cells))
    return columns


def note(table: Table, records: List[Record]) -> str:
    """How the figures of a table came about."""
    options = table.options("PAIR" if table.corpus else "DATASET", "MODEL", "N")
    text = f"- {table.title}: `scripts/reproduce.sh {table.name} {options}`"
    timed = "".join(
        f" Speed: {r['benchmark']}, `{r['command']}`, commit {r['commit']}." for r in load(f"{table.name}/speed")
    )
    if not records:
        return f"{text}: nobody has run it yet.{timed}"
    minutes, updates = ([r[name] for r in records] for name in ("minutes", "updates"))
    text += f"{of_the_machine(records)}, N from {sorted({r['seed'] for r in records})}, "
    text += f"{span(updates)} updates each, {span(minutes, 1)} minutes of training. "
    names = dict.fromkeys(name for dataset in table.datasets for name in table.figures(dataset))
    signatures = [shared(r["signatures"][name] for r in records if name in r["signatures"]) for name in names]
    text += f"{table.task.METRIC_NAME if len(names) == 1 else 'Figures'} `{'`, `'.join(filter(None, signatures))}`"
    text += shared(f" on {r['test_set']}" for r in records if r.get("test_set"))
    tests = [r["significance"] for r in records if r.get("significance")]
    if tests:
        of = shared(test["metric"] for test in tests if "metric" in test)
        text += f". {table.task.TEST}{of and f' of {of}'} against {baseline_name(table)} of the same seed: "
        text += f"p < 0.05 in {sum(test['p_value'] < 0.05 for test in tests)} of {len(tests)}"
    return f"{text}. {origin(records)}{timed}"


def of_the_machine(records: List[Record]) -> str:
    """The options after ``--`` with which the cells were run, and how many of them."""
    options = Counter(r["command"].partition(" -- ")[2] for r in records)
    numbers = {words: "all" if n == len(records) else f"{n} of {len(records)} cells" for words, n in options.items()}
    return "".join(f", {numbers[words]} with `-- {words}`" for words in sorted(options) if words)


def span(values: Iterable[float], digits: int = 0) -> str:
    """The least and the greatest number, as integers.

    With so many `digits`: the least where it is below 1, and where both are equal the middle one, which stands alone.
    """
    ordered = sorted(values)
    least, most = (f"{math.floor(value + 0.5)}" for value in (ordered[0], ordered[-1]))
    if least == most:
        return f"{ordered[len(ordered) // 2]:.{digits}f}"
    return f"{ordered[0]:.{digits}f} to {most}" if ordered[0] < 1 else f"{least} to {most}"


def shared(values: Iterable[object]) -> str:
    """What all records say, or everything they say."""
    return "; ".join(sorted({str(value) for value in values}))


def origin(records: Sequence[Record]) -> str:
    """Versions, hardware and commit."""
    versions = shared(", ".join(f"{name} {v}" for name, v in r["versions"].items()) for r in records)
    commits = (commit for r in records for commit in r["commit"].split("; "))  # a record may have several
    machines = (machine for r in records for machine in r["hardware"].split("; "))
    return f"{versions}. {shared(machines)}. Commit {shared(commits)}."


def picture(name: str, folder: str = "docs/") -> str:
    """The picture of a table's first column, once a cell of it has run. `folder`: where it is, seen from the page."""
    table = TABLES[name]
    dataset = table.datasets[0]
    if not any(record["dataset"] == dataset.name for record in load_cells(name)):
        return ""
    metric = table.figures(dataset)[table.metric(dataset)]
    return f"\n![{metric} of every model, {dataset.heading}]({folder}{name}-{dataset.name}-scores.png)\n\n"


def steps_a_second(name: str) -> str:
    """How many times the baseline's steps a second a table's models make, here and in the paper: a column for each."""
    table = TABLES[name]
    ours, theirs = speeds(f"{name}/speed", "*", "ratio"), paper_steps(table)
    if not ours:
        return ""
    models = [model for model in theirs if model != table.baseline]
    rows = [["here", *(f"{ours[m].ratio:.2f}" for m in models)], ["paper", *(f"{theirs[m]:.2f}" for m in models)]]
    return markdown(["", *(f"`{model}`" for model in models)], rows)


def validation_loss(*names: str) -> str:
    """The last validation loss of models in several tables, and what it is less the baseline's of the same seed."""
    columns: List[Column] = []
    found = [(TABLES[name], load_cells(name)) for name in names]
    for table, records in found:
        for dataset in table.datasets:
            rows = rows_of(table, dataset, records)
            if any(rows.values()):
                heading = f"{dataset.heading}, {table.title}"
                columns.append((heading, {row: figures(own, ["valid_loss"], 3) for row, own in rows.items()}))
                columns += compared(table, rows, "valid_loss", 3)
    all_records = [record for _, records in found for record in records]
    run = {record["model"] for record in all_records}
    return of_models(columns, [model for model in models_of(TABLES[names[0]], all_records) if model in run])


def alpha(name: str) -> str:
    """The learned weights of a table's mixtures by layer: the mean over heads and seeds of its first column."""
    rows: Dict[Tuple[str, str], Dict[str, List[float]]] = defaultdict(lambda: defaultdict(list))
    for record in load_cells(name):
        if record["dataset"] == TABLES[name].datasets[0].name:
            for layer, components in record.get("alpha", {}).items():
                for component, heads in components.items():
                    rows[record["model"], component][layer] += heads
    layers = list(dict.fromkeys(layer for row in rows.values() for layer in row))
    cells = (
        [f"`{word}`" for word in words] + [f"{statistics.mean(row[x]):.2f}" if x in row else "" for x in layers]
        for words, row in rows.items()
    )
    return markdown(["mixture", "component", *(layer.replace(".layers.", " ") for layer in layers)], cells)


def speed(columns: Mapping[str, Place]) -> str:
    """Ratios to stock fairseq, a row for each variant, and the command of each column."""
    found = [speeds(*where) for where in columns.values()]
    rows = ["| |" + "|".join(columns) + "|", "|---" * (len(columns) + 1) + "|"]
    for variant in in_order({name for own in found for name in own}):
        cells = [f" {own[variant].ratio:.2f} " if variant in own else " " for own in found]
        rows.append(f"| `{variant}` |{'|'.join(cells)}|")
    records = [record for where in dict.fromkeys(where[:2] for where in columns.values()) for record in load(*where)]
    commands = [f"- {record['benchmark']}: `{record['command']}`" for record in records]
    return "\n".join([*rows, "", *commands, "", origin(records), ""])


def repairs() -> str:
    """The bugs of fairseq that are worked around, from the docstrings: ``symptom (versions).`` and the details."""
    from fairseq_synth.host import checkpoints, data, messages, search, training  # noqa: F401  (they list theirs)
    from fairseq_synth.host.repairs import REPAIRS

    rows = []
    for name, function in sorted(REPAIRS.items()):
        symptom, *details = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        found = re.fullmatch(r"(.*) \(([^()]*)\)\.", " ".join(symptom.split()))
        if not found:
            raise UserError(f"{name}: its docstring must start with one sentence, 'symptom (versions).'")
        text = " ".join(" ".join([f"{found[1]}.", *details]).split())
        rows.append([f"`{name}`", text.replace("``", "`").replace("|", "\\|"), found[2]])
    return markdown(["name", "symptom", "fairseq versions"], rows)
