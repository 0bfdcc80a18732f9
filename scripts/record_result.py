"""Writes what an evaluated training measured, and how, as one JSON file.

    python scripts/record_result.py RUN_DIR OUTPUT --variant random --data multi30k --pair en-de --seed 1 --command "…"

scripts/make_tables.py renders the tables of README.md from such files in results/.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, Dict

from provenance import commit, hardware, versions


def result(run: Path) -> Dict[str, Any]:
    """The figures of a --save-dir: scores, trained parameters, updates."""
    scores = json.loads((run / "scores.json").read_text())
    log = "".join(path.read_text() for path in sorted(run.glob("train*.log")))
    figures = {name: score["score"] for name, score in scores.items()}
    return {
        "test_set": scores["bleu"].get("test_set"),  # of sacreBLEU's
        "figures": figures,
        "signatures": {name: f"{score['name']}|{score['signature']}" for name, score in scores.items()},
        "parameters": int(re.findall(r"num\. trained: ([\d,]+)", log)[0].replace(",", "")),
        "updates": int(re.findall(r"num_updates[=: \"]+(\d+)", log)[-1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the --save-dir of the training, scored by evaluate.sh")
    parser.add_argument("output", type=Path, help="file to write")
    for name in ("variant", "data", "pair", "command"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    try:
        measured = result(args.run)
    except FileNotFoundError as error:
        sys.exit(
            f"error: {error.filename}: no such file; train with scripts/train.sh and score with scripts/evaluate.sh"
        )
    record = {key: getattr(args, key) for key in ("variant", "data", "pair", "seed", "command")}
    record.update(measured, commit=commit(), versions=versions(), hardware=hardware())
    args.output.parent.mkdir(parents=True, exist_ok=True)
    part = args.output.with_suffix(".part")
    part.write_text(json.dumps(record, indent=2) + "\n")
    part.replace(args.output)
    print("wrote", args.output)


if __name__ == "__main__":
    main()
