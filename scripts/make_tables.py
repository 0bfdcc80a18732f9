"""Renders the result tables of README.md and docs/ from results/.

    python scripts/make_tables.py [--check]

--check changes nothing and fails when a table is not what the results say.
"""

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Sequence

ROOT = Path(__file__).resolve().parent.parent
MARKERS = r"(<!-- results: {name} -->\n).*?(<!-- end -->)"


# the paper's Table 2 (machine translation): parameters, BLEU of En-De and En-Fr on newstest2014
PAPER = {
    "transformer": ("67M", "27.67", "41.57"),
    "fixed_random": ("61M", "23.89", "38.31"),
    "random": ("67M", "27.27", "41.12"),
    "factorized_random": ("61M", "27.30", "41.12"),
    "dense": ("62M", "27.43", "41.39"),
    "factorized_dense": ("61M", "27.32", "41.57"),
    "random_dense": ("67M", "27.68", "41.21"),
    "dense_vanilla": ("74M", "27.57", "41.38"),
    "random_vanilla": ("73M", "28.47", "41.85"),
}
MODELS = [*PAPER, "factorized_random_dense", "factorized_random_vanilla"]
NOT_RUN = "not run"


def table2() -> str:
    """WMT14, newstest2014: the paper's figures and ours side by side."""
    results = load("table2")
    rows = ["| model | parameters, paper | here | En-De, paper | here | En-Fr, paper | here |", "|---" * 7 + "|"]
    for model, (size, *paper) in PAPER.items():
        sizes = {r["parameters"] for r in results if r["variant"] == model and r["pair"] == "en-de"}
        cells = [size, f"{min(sizes) / 1e6:.1f}M" if sizes else NOT_RUN]
        for pair, figure in zip(("en-de", "en-fr"), paper):
            cells += [figure, mean(r for r in results if (r["variant"], r["pair"]) == (model, pair))]
        rows.append(f"| {label(model)} | {' | '.join(cells)} |")
    return "\n".join([*rows, "", *footnotes("table2", results), ""])


def multi30k() -> str:
    """Multi30k, test_2016_flickr: the small and the whole recipe."""
    columns = [(table, pair) for table in ("multi30k_cpu", "multi30k") for pair in ("en-de", "en-fr")]
    results = {table: load(table) for table, _ in columns}
    heads = ["En-De, one CPU thread", "En-Fr, one CPU thread", "En-De, whole recipe", "En-Fr, whole recipe"]
    rows = ["| model | parameters | " + " | ".join(heads) + " |", "|---" * 6 + "|"]
    for model in MODELS:
        cells = [[r for r in results[table] if (r["variant"], r["pair"]) == (model, pair)] for table, pair in columns]
        sizes = [f"{r['parameters'] / 1e6:.2f}M" for r in cells[0] or cells[2]]
        cells = [sizes[0] if sizes else NOT_RUN, *map(mean, cells)]
        rows.append(f"| {label(model)} | {' | '.join(cells)} |")
    notes = [note for table in results for note in footnotes(table, results[table])]
    return "\n".join([*rows, "", *notes, ""])


def label(model: str) -> str:
    """A model's name in a table."""
    return "Transformer (fairseq's own)" if model == "transformer" else f"`{model}`"


def mean(results: Iterable[Dict[str, Any]]) -> str:
    """BLEU over the seeds: the mean, the standard deviation where there are several, and their number."""
    scores = [r["figures"]["bleu"] for r in results]
    if not scores:
        return NOT_RUN
    if len(scores) == 1:
        return f"{scores[0]:.2f}"
    return f"{statistics.mean(scores):.2f} ± {statistics.stdev(scores):.2f} ({len(scores)})"


def footnotes(table: str, results: List[Dict[str, Any]]) -> List[str]:
    """How the figures of a table came about."""
    command = f"`scripts/reproduce.sh {table} --pair PAIR --variant MODEL --seed N --rerun`"
    if not results:
        return [f"- {command}: nobody has run it yet"]
    seeds = sorted({r["seed"] for r in results})
    signature = shared(r["signatures"]["bleu"] for r in results)
    updates = shared(r["updates"] for r in results)
    named = shared(f" on {r['test_set']}" for r in results if r.get("test_set"))
    return [f"- {command}, N from {seeds}, {updates} updates each. `{signature}`{named}. {origin(results)}"]


SPEED = {  # column: file of results/speed_cpu, and its figure
    "block 128×32": ("block_padded", "128x32"),
    "block 32×128": ("block_padded", "32x128"),
    "block 16×256": ("block_padded", "16x256"),
    "causal 4×1024": ("block_causal", "4x1024"),
    "step T=32": ("step", "32x32"),
    "step T=256": ("step", "4x256"),
    "step T=32, ℓ=1024": ("step_l1024", "32x32"),
    "generation, 32k words": ("generate_32k", "ratio"),
    "generation, 8k words": ("generate_8k", "ratio"),
    "generation, Multi30k": ("generate_trained", "ratio"),
    "memory, causal 16×1024": ("memory_causal", "16x1024"),
}


def speed(columns: Sequence[str] = tuple(SPEED)) -> str:
    """Ratios to stock fairseq, a row for each variant, and the command of each column."""
    records = {SPEED[column][0]: load("speed_cpu", SPEED[column][0])[0] for column in columns}
    variants: List[str] = []
    for record in records.values():
        variants += [name for name in record["figures"] if name not in variants and name != "stock"]
    rows = ["| |" + "|".join(columns) + "|", "|---" * (len(columns) + 1) + "|"]
    for variant in variants:
        figures = [records[SPEED[column][0]]["figures"].get(variant, {}).get(SPEED[column][1]) for column in columns]
        rows.append(f"| `{variant}` |" + "|".join(" " if f is None else f" {f:.2f} " for f in figures) + "|")
    commands = [f"- {record['benchmark']}: `{record['command']}`" for record in records.values()]
    return "\n".join([*rows, "", *commands, "", origin(list(records.values())), ""])


def speed_in_short() -> str:
    """The columns of `speed` that say most."""
    return speed(["block 32×128", "causal 4×1024", "step T=32", "generation, 8k words", "memory, causal 16×1024"])


def load(folder: str, name: str = "*") -> List[Dict[str, Any]]:
    """The records of a folder of results/, by name."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / "results" / folder).glob(f"{name}.json"))]


def shared(values: Iterable[object]) -> str:
    """What all records say, or everything they say."""
    return "; ".join(sorted({str(value) for value in values}))


def origin(results: List[Dict[str, Any]]) -> str:
    """Versions, hardware and commit."""
    versions = shared(", ".join(f"{name} {v}" for name, v in r["versions"].items()) for r in results)
    return f"{versions}. {shared(r['hardware'] for r in results)}. Commit {shared(r['commit'] for r in results)}."


TABLES: Dict[str, Dict[str, Callable[[], str]]] = {
    "README.md": {"table2": table2, "multi30k": multi30k, "speed": speed_in_short},
    "docs/performance.md": {"speed": speed},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    args = parser.parse_args()
    for page, tables in TABLES.items():
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        rendered = text
        for name, table in tables.items():
            pattern = re.compile(MARKERS.format(name=name), re.S)
            if not pattern.search(text):
                sys.exit(f"error: {page} has no '<!-- results: {name} -->' … '<!-- end -->'")
            contents = table()
            rendered = pattern.sub(lambda m, contents=contents: m[1] + contents + m[2], rendered)
        if args.check and rendered != text:
            sys.exit(f"error: {page} is not what results/ says; run python scripts/make_tables.py")
        if not args.check:
            path.write_text(rendered, encoding="utf-8")


if __name__ == "__main__":
    main()
