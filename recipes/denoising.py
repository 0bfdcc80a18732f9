"""Denoising: span corruption of any text, and the log perplexity of what was taken out of a held-out one."""

import math
import re
from pathlib import Path
from typing import Any, Dict, Sequence

from . import corpora, language_model
from .command import ROOT, Parser, UserError, dry_run, existing_folder, integer, locked, pin_settings, run, say
from .prepare import SPLITS, add_options
from .prepare import prepare as prepare_text
from .scoring import Evaluation, print_scores

PREPARE = """Text to pairs by span corruption (T5), to binarised data for fairseq-train.

  scripts/prepare.sh {names} OUT_DIR [--from DIR] [options]

{about}
The text is that of a language model's corpus: prepare.sh ptb --help says what --from may hold. Blocks of --words words
lose 15 % of them in spans of 3 on average (scripts/corrupt_spans.py); the pairs are written to OUT_DIR-raw and prepared
as parallel text is, with SentencePiece, in which each mark of a span is one piece. DRY_RUN=1 shows the commands only.
"""
SCORES = """
    Denoising: log perplexity of the test set's targets, nats for each token, marks and the end included
    (fairseq-validate). Lower is better. There is no significance test.
"""
TEST = ""
RECIPE = "denoising_cpu"
prepare = corpora.prepare_corpus
METRIC, METRIC_NAME, BEST = "log_ppl", "log perplexity", min
# name: the corpus of language modelling that is corrupted; of `lm` the folder of one's own
CORPORA = {name: entry["spans_of"] for name, entry in corpora.CORPORA.items() if "spans_of" in entry}


def main(argv: Sequence[str]) -> None:
    """prepare.sh, of these corpora."""
    kinds = {name: "text at hand, {train,valid,test}.txt" if of == "lm" else of for name, of in CORPORA.items()}
    about = "".join(f"  {name:15} {kind}\n" for name, kind in kinds.items())
    parser = Parser("prepare", PREPARE.format(names="|".join(CORPORA), about=about))
    add = parser.add_argument
    add("corpus", metavar="CORPUS", choices=CORPORA, help=", ".join(CORPORA))
    add("out", metavar="OUT_DIR", type=Path)
    add("--from", dest="source", type=existing_folder, metavar="DIR", help="the text at hand")
    add("--words", type=integer(2), default=64, metavar="N", help="of a block (default: 64)")
    add_options(parser)
    parser.set_defaults(subwords="sentencepiece", max_length=0)
    args = parser.parse_args(argv)
    name, raw = CORPORA[args.corpus], Path(f"{args.out.absolute()}-raw")
    corpus = language_model.CORPORA[name]
    # each span has a word before it and one or more in it, so that there are fewer than these
    args.sentinels = max(1, round(args.words * 0.15 / 3)) + 1
    if not corpus.urls and not args.source and not dry_run():
        raise UserError(f"{args.corpus}: nothing to download; name the folder of {{train,valid,test}}.txt by --from")
    done = (args.out / "bin" / "done").exists()
    packed = args.source and any((args.source / Path(url).name).exists() for url in corpus.urls)
    files = language_model.find(corpus, args.source) if args.source and not packed and not done else []
    with locked(raw / ".lock"):
        settings = {"corpus": args.corpus, "words": args.words, "from": (args.source or "") and args.source.resolve()}
        if not done or args.source:
            pin_settings(raw / "settings", "*.source", settings)
        if not done:
            if not dry_run():
                (raw / "text").mkdir(exist_ok=True)
            found = files or language_model.unpacked(corpus, raw / "archives", args.source)
            language_model.take(name, found, raw / "text", None)
            for seed, split in enumerate(SPLITS):
                if not (raw / f"{split}.target").exists():
                    script = [
                        "python",
                        ROOT / "scripts" / "corrupt_spans.py",
                        raw / "text" / f"{split}.txt",
                        raw / split,
                    ]
                    run([*script, "--words", args.words, "--seed", seed])
        prepare_text(raw, "source", "target", args.out, args, {"corpus": args.corpus})


def score(run_of: Evaluation, max_tokens: int = 4096) -> Dict[str, Any]:
    """The log perplexity of the test set; nothing in a dry run."""
    say("scoring the test set")
    log = run_of.out / "validate.log"
    argv = ["fairseq-validate", run_of.data / "bin", "--user-dir", ROOT / "fairseq_synth", "--path", run_of.checkpoint]
    argv += ["--task", "translation", "--source-lang", "source", "--target-lang", "target"]
    run([*argv, "--valid-subset", "test", "--max-tokens", max_tokens], log=log)
    return {} if dry_run() else log_perplexity(log.read_text(encoding="utf-8"), log)


def report(data: Path, run_dir: Path) -> None:
    """Prints the scores of an evaluated run."""
    print_scores(run_dir, TEST)


def log_perplexity(log: str, file: Path) -> Dict[str, Any]:
    """The log perplexity of what fairseq-validate says, in nats.

    Raises:
        UserError: it says no loss.
    """
    found = re.findall(r"\| test .*?\bnll_loss ([\d.]+)", log) or re.findall(r"\| test .*?\bloss ([\d.]+)", log)
    if not found:
        raise UserError(f"{file}: has no loss of the test set; see its end")
    nats = float(found[-1]) * math.log(2)  # fairseq's are bits
    return {"log_ppl": {"score": round(nats, 3), "name": METRIC_NAME, "signature": "nats by target token"}}
