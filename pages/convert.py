"""What became of Transformers whose dot products were taken out, from results/convert: docs/convert.md."""

from collections import defaultdict

from recipes.catalog import BASELINE, TABLES

from . import records as results
from .markdown import folded, markdown
from .notes import TITLE, describe_origin, join_distinct
from .records import Record, Rows
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
NONE = "No model has been converted yet.\n"
BITS = ("bits, valid", 3)
FIGURES: dict[str, dict[str, tuple[str, int]]] = {  # of each table of recipes/: headings and digits
    "multi30k_cpu": {"bits": BITS, "bleu": ("BLEU", 2), "chrf": ("chrF", 2)},
    "ptb_cpu": {"bits": BITS, "ppl": ("perplexity, test", 1)},
    "imdb_cpu": {"bits": BITS, "accuracy": ("accuracy, test", 2)},
}


def table(name: str) -> str:
    """A row for each conversion after each number of updates: its figures, and those less the Transformer's."""
    records = results.load("convert", f"{name}-*")
    if not records:
        return NONE
    points: defaultdict[int, Rows] = defaultdict(dict)
    for record in records:
        for run in record["runs"]:
            points[run["updates"]].setdefault(run["model"], []).append({**record, **run})
    timed: Record = next((record["speed"]["figures"] for record in records if "speed" in record), {})
    heads, rows = ["updates", "model", "parameters", *(["times as fast"] if timed else [])], []
    for heading, _ in FIGURES[name].values():
        heads += [heading, minus_baseline(TABLES[name])]
    for updates, found in sorted(points.items()):
        own: Rows = {model: found[model] for model in NAMES if model in found}
        compared = {figure: results.differences(TABLES[name], own, figure) for figure in FIGURES[name]}
        for model, runs in own.items():
            cells = [f"{updates:,}", NAMES[model], parameters(runs)]
            if timed:
                cells.append(f"{timed[model]['ratio']:.2f}" if model in timed and not updates else "")
            for figure, (_, digits) in FIGURES[name].items():
                less = compared[figure].get(model)
                cells += [format_figures(runs, [figure], digits), less.cell(digits) if less else ""]
            rows.append(cells)
    return "\n".join([markdown(heads, rows), folded(TITLE, notes(records))])


def replaced(name: str) -> str:
    """By how much the loss grows when all heads of a stack get a function and nothing is trained: means over seeds."""
    found = [record["replaced"] for record in results.load("convert", f"{name}-*") if "replaced" in record]
    if not found:
        return NONE
    rows = []
    for stack in found[0]["random"]:
        own = [[{"figures": {stack: record[function][stack]}} for record in found] for function in found[0]]
        rows.append([stack, *(format_figures(cells, [stack], 3) for cells in own)])
    return markdown(["all heads of", *(f"`{function}`" for function in found[0])], rows)


def parameters(runs: list[Record]) -> str:
    """How many a model has; of several seeds from the fewest to the most."""
    sizes = sorted({f"{run['parameters'] / 1e6:.2f}M" for run in runs})
    return " to ".join(dict.fromkeys([sizes[0], sizes[-1]]))


def notes(records: list[Record]) -> list[str]:
    """Commands, signatures and origin."""
    first = records[0]
    lines = [f"- {what}: `{command}`" for what, command in first["commands"].items()]
    lines += [f"- times as fast: {r['speed']['what']}" for r in records if "speed" in r]
    signatures = join_distinct(f"`{text}`" for record in records for text in record["signatures"].values())
    return [*lines, "", f"{signatures and signatures + '. '}{describe_origin(records)}"]
