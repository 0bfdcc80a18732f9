"""Writes what a run of quickstart.sh measured, and how, to RUN_DIR/result.json.

    python scripts/record_result.py RUN_DIR --variant random --data multi30k --pair en-de --command "scripts/…"

To publish a figure, copy the file to results/ and run scripts/make_tables.py.
"""

import argparse
import json
import re
from pathlib import Path

from provenance import commit, hardware, versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the --save-dir of the training, evaluated by evaluate.sh")
    for name in ("variant", "data", "pair", "command"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()

    bleu = json.loads((args.run / "bleu.json").read_text())
    log = (args.run / "train.log").read_text()
    result = {
        "variant": args.variant,
        "data": args.data,
        "pair": args.pair,
        "bleu": bleu["score"],
        "signature": f"{bleu['name']}|{bleu['signature']}",
        "parameters": int(re.findall(r"num\. trained: ([\d,]+)", log)[0].replace(",", "")),
        "updates": int(re.findall(r"num_updates=(\d+)", log)[-1]),
        "training_seconds": round(sum(map(float, re.findall(r"done training in ([\d.]+)", log)))),
        "command": args.command,
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(),
    }
    path = args.run / "result.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print("wrote", path)


if __name__ == "__main__":
    main()
