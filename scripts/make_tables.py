"""Renders the result tables of README.md from results/*.json.

    python scripts/make_tables.py [--check]

--check changes nothing and fails when the README is not what the results say.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Iterable

ROOT = Path(__file__).resolve().parent.parent
MARKERS = r"(<!-- results: {name} -->\n).*?(<!-- end -->)"


def multi30k() -> str:
    """Multi30k En-De, one row a run, best first."""
    results = [
        json.loads(path.read_text()) for path in sorted((ROOT / "results" / "multi30k_en-de_cpu").glob("*.json"))
    ]
    results.sort(key=lambda r: -r["bleu"])
    rows = ["| model | parameters | BLEU | minutes | command |", "|---|---|---|---|---|"]
    for r in results:
        name = "Transformer (fairseq's own)" if r["variant"] == "transformer" else f"`{r['variant']}`"
        rows.append(
            f"| {name} | {r['parameters'] / 1e6:.2f}M | {r['bleu']:.2f} | {r['training_seconds'] / 60:.0f} | "
            f"`{r['command']}` |"
        )

    def shared(values: Iterable[object]) -> str:
        return "; ".join(sorted({str(value) for value in values}))

    versions = shared(", ".join(f"{name} {v}" for name, v in r["versions"].items()) for r in results)
    note = (
        f"{shared(r['updates'] for r in results)} updates each. `{shared(r['signature'] for r in results)}`. "
        f"{versions}. "
        f"{shared(r['hardware'] for r in results)}. Commit {shared(r['commit'] for r in results)}."
    )
    return "\n".join([*rows, "", note, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    args = parser.parse_args()
    path = ROOT / "README.md"
    readme = path.read_text(encoding="utf-8")
    pattern = re.compile(MARKERS.format(name="multi30k"), re.S)
    if not pattern.search(readme):
        sys.exit("error: README.md has no '<!-- results: multi30k -->' … '<!-- end -->'")
    rendered = pattern.sub(lambda m: m[1] + multi30k() + m[2], readme)
    if args.check and rendered != readme:
        sys.exit("error: README.md is not what results/ says; run python scripts/make_tables.py")
    path.write_text(rendered, encoding="utf-8")


if __name__ == "__main__":
    main()
