"""Renders the result tables of README.md and docs/ from results/.

    python scripts/make_tables.py [--check]

--check changes nothing and fails when a table is not what the results say.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Sequence

ROOT = Path(__file__).resolve().parent.parent
MARKERS = r"(<!-- results: {name} -->\n).*?(<!-- end -->)"


def multi30k() -> str:
    """Multi30k En-De, one row a run, best first."""
    results = load("multi30k_en-de_cpu")
    results.sort(key=lambda r: -r["bleu"])
    rows = ["| model | parameters | BLEU | minutes | command |", "|---|---|---|---|---|"]
    for r in results:
        name = "Transformer (fairseq's own)" if r["variant"] == "transformer" else f"`{r['variant']}`"
        rows.append(
            f"| {name} | {r['parameters'] / 1e6:.2f}M | {r['bleu']:.2f} | {r['training_seconds'] / 60:.0f} | "
            f"`{r['command']}` |"
        )
    note = (
        f"{shared(r['updates'] for r in results)} updates each. `{shared(r['signature'] for r in results)}`. "
        f"{origin(results)}"
    )
    return "\n".join([*rows, "", note, ""])


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
    "README.md": {"multi30k": multi30k, "speed": speed_in_short},
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
        path.write_text(rendered, encoding="utf-8")


if __name__ == "__main__":
    main()
