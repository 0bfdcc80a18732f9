"""From raw text to BLEU and translations with a Synthesizer, in one command.

  scripts/quickstart.sh [options] [-- flags for fairseq-train]

A second call reuses the environment, the data and the checkpoints: training goes on where it stopped.
"""

import functools
import re
from shlex import quote
from typing import Sequence

from . import scoring, train
from .command import (
    ROOT,
    Parser,
    UserError,
    cores,
    dry_run,
    existing_folder,
    folder,
    integer,
    pin_settings,
    say,
    show,
    split_flags,
)
from .hyperparameters import RECIPES
from .prepare import prepare
from .provenance import asked_threads
from .translation import Translation

RECIPE = "multi30k_cpu"  # of the README's results; shortened for the numbers
UPDATES = {"numbers": 800, "multi30k": RECIPES[RECIPE].max_update}
MERGES = {"numbers": 300, "multi30k": 4000}
SMALL = ["--encoder-layers", 2, "--decoder-layers", 2]  # of the preset's 4, for the numbers
SENTENCES = {"numbers": "Eighty-one hours ago", "multi30k": "A man plays the guitar."}


def main(argv: Sequence[str]) -> None:
    own, rest = split_flags(argv)
    parser = Parser("quickstart", __doc__)
    add = parser.add_argument
    models, variant = [*train.models(), "vanilla"], "dense, ... or transformer (default: %(default)s)"
    add("--variant", choices=models, default="random_vanilla", metavar="NAME", help=variant)
    add("--data", choices=UPDATES, default="numbers", help="numbers (default) is made on the spot, without a network")
    add("--from", dest="source", type=existing_folder, metavar="DIR", help="Multi30k's .gz files (default: download)")
    add("--pair", choices=("en-de", "en-fr"), default="en-de", help="(default: en-de)")
    add("--max-update", type=integer(20), metavar="N", help="updates (default: 800 for numbers, 7000 for multi30k)")
    add("--merges", type=integer(1), metavar="N", help="of the joint BPE (default: 300 for numbers, 4000 for multi30k)")
    add("--threads", type=integer(1), metavar="N", help="of the training's CPU (default: OMP_NUM_THREADS, else all)")
    add("--seed", type=integer(0), default=1, metavar="N", help="(default: 1)")
    add("--out", type=folder, default=ROOT / "runs", metavar="DIR", help="where everything goes (default: runs)")
    args = parser.parse_args(own)
    if args.source and args.data == "numbers":
        raise UserError(
            f"--from {args.source}: the numbers are made on the spot; give --data multi30k, or leave it out"
        )
    updates, merges = args.max_update or UPDATES[args.data], args.merges or MERGES[args.data]
    corpus = args.out / f"{args.data}-{args.pair}-bpe{merges}"
    save = args.out / f"{corpus.name}-{args.variant}-seed{args.seed}"
    prepare(args.data, args.pair, corpus, args.source, {"merges": merges, "lowercase": True})
    pinned = {"max_update": updates, "flags": " ".join(rest)}
    pin_settings(save / "quickstart", "checkpoint_last.pt scores.json", pinned)
    if (save / "scores.json").exists():
        say(f"trained and scored already: {save}")
        Translation.report(corpus, save)
    else:
        arch = RECIPES[RECIPE].architecture(args.variant)
        say(f"training {arch} for {updates} updates (log: {save}/train.log)")
        if args.data == "multi30k":
            say("the README's recipe: about an hour on a CPU core for 7000 updates; stop and call again at will")
        interval = max(1, updates // 20)
        threads = args.threads or asked_threads() or cores()
        command = [arch, args.pair, "--recipe", RECIPE, "--data", corpus, "--save-dir", save, "--seed", args.seed]
        command += ["--max-update", updates, "--gpus", min(1, train.gpus_here()[0]), "--threads", threads]
        command += ["--save-every", interval, "--", "--log-interval", interval]
        command += SMALL if args.data == "numbers" else []
        if updates != RECIPES[RECIPE].max_update:
            command += ["--warmup-updates", max(1, updates // 3)]
            command += ["--validate-interval", 1, "--validate-after-updates", updates * 3 // 4]
        train.start([*command, *rest], functools.partial(show_progress, updates))
        if dry_run():
            show([ROOT / "scripts" / "evaluate.sh", corpus, save])
        else:
            scoring.evaluate(Translation, corpus, save)
    say("a sentence of your own")
    print(f"echo {quote(SENTENCES[args.data])} | {ROOT}/scripts/translate.sh {quote(str(corpus))} {quote(str(save))}")


def show_progress(updates: int, line: str) -> None:
    """Prints a line of fairseq's log in short: perplexity and time, of `updates` in all; the command, and errors."""
    found = re.search(r"train_inner.* ppl=([\d.]+),.* num_updates=(\d+),.* wall=(\d+)", line)
    if found:
        perplexity, done, seconds = found[1], int(found[2]), int(found[3])
        left = f"{seconds} s, {seconds * (updates - done) // done} s left"
        print(f"  update {done} of {updates}: training perplexity {perplexity}, {left}", flush=True)
    elif re.match(r"\+ |.*(Loaded checkpoint|rror:)", line):
        print(line.split(" | ")[-1], end="", flush=True)
