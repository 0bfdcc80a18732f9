"""Scores a trained model on the test set of its task.

  scripts/evaluate.sh DATA_DIR RUN_DIR [options]

  DATA_DIR is what prepare.sh made, RUN_DIR the --save-dir of the training.

Writes scores.json to RUN_DIR once all is there, with the figures and how they were counted:

{tasks}
"""

import inspect
from pathlib import Path
from typing import Sequence

from .command import Parser, UserError, integer
from .scoring import evaluate, read_data_settings
from .tables import TASKS


def main(argv: Sequence[str]) -> None:
    """evaluate.sh."""
    scores = "\n\n".join(inspect.cleandoc(task.SCORES) for task in TASKS.values())
    parser = Parser("evaluate", (__doc__ or "").format(tasks=scores))
    add = parser.add_argument
    add("data", metavar="DATA_DIR", type=Path)
    add("run", metavar="RUN_DIR", type=Path)
    add(
        "--average",
        type=integer(0),
        metavar="N",
        help="average the last N checkpoints (of --save-interval-updates, else of epochs); 0: the best by validation. "
        "Default of this, --beam, --lenpen and --context-window: the recipe's",
    )
    add("--max-tokens", type=integer(1), metavar="N", help="tokens of a batch (default: 4096)")
    add("--baseline", type=Path, metavar="RUN_DIR", help="an evaluated run of the same data, for a significance test")
    add("--test", type=Path, metavar="DIR", help="translation: another test set, test.{SRC,TGT} of a folder, "
        "prepared as DATA_DIR was; its scores go to tests/NAME of RUN_DIR")  # fmt: skip
    add("--beam", type=integer(1), metavar="N", help="translation: beam size")
    add("--lenpen", type=float, metavar="X", help="translation: length penalty")
    add("--context-window", type=integer(0), metavar="N", help="language models: least context of a token in its row")
    args = parser.parse_args(argv)
    name = read_data_settings(args.data).get("task", "translation")
    options = {key: value for key, value in vars(args).items() if value is not None and key not in ("data", "run")}
    task = TASKS[name]
    known = {"average", *inspect.signature(task.score).parameters, *(["baseline"] if task.TEST else [])}
    known |= {"test"} if name == "translation" else set()
    for key in options:
        if key not in known:
            raise UserError(f"--{key.replace('_', '-')}: not for {args.data}, whose task is {name}; leave it out")
    evaluate(task, args.data, args.run, **options)
