"""Text to text: summaries, replies, and answers of GLUE and SuperGLUE, written by a translation model and scored."""

import json
import shutil
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from . import corpora, metrics, pairs
from .command import (
    Parser,
    UserError,
    dry_run,
    existing_folder,
    integer,
    locked,
    pin_settings,
    read_settings,
    run,
    say,
    write,
)
from .corpora import fetch_all
from .prepare import add_options
from .prepare import prepare as prepare_text
from .scoring import Evaluation, print_scores
from .translation import generation_flags, hypotheses, read_lines

PREPARE = """A corpus of pairs of texts, to binarised data for fairseq-train.

  scripts/prepare.sh {names} OUT_DIR [--from DIR] [options]

The text comes from --from, a folder, or without it from the corpus' home; a download is not checked by SHA-256. Files,
columns and the form of both texts: recipes/corpora.yaml. Without a validation set a tenth of the training set is held
out. The pairs are written to OUT_DIR-raw as {{train,valid,test}}.{{source,target}}, a line each, and prepared as
parallel text is, by default with SentencePiece. The source of a reply is the persona, if there is one, and the last
utterances, with | between them. DRY_RUN=1 shows the commands only.
"""
SCORES = """
    Text to text: of summaries and replies ROUGE-1, 2 and L (F1, stemmed), BLEU-1 to 4 (sacreBLEU), METEOR and CIDEr
    (pycocoevalcap; METEOR needs Java) of detokenised text, times 100; of tasks with labels their suite's metrics, and
    how many answers are no label, which count as wrong. There is no significance test. Also test.hyp.target, what the
    model has written.
"""
TEST = ""
RECIPE = "aeslc_cpu"
prepare = corpora.prepare_corpus
METRIC, METRIC_NAME, BEST = "rougeL", "ROUGE-L", max


def main(argv: Sequence[str]) -> None:
    """prepare.sh, of these corpora."""
    parser = Parser("prepare", PREPARE.format(names="|".join(pairs.CORPORA)))
    add = parser.add_argument
    add("corpus", metavar="CORPUS", choices=pairs.CORPORA, help=", ".join(pairs.CORPORA))
    add("out", metavar="OUT_DIR", type=Path)
    add("--from", dest="source", type=existing_folder, metavar="DIR", help="the corpus at hand")
    add("--history", type=integer(1), metavar="N", help="utterances before the one to be written (default: 5)")
    add_options(parser)
    parser.set_defaults(subwords="sentencepiece", max_length=0)
    args = parser.parse_args(argv)
    corpus, raw = pairs.CORPORA[args.corpus], Path(f"{args.out.absolute()}-raw")
    if args.history and not corpus.history:
        raise UserError(f"--history {args.history}: {args.corpus} is no dialogue; leave it out")
    if not corpus.urls and not args.source:
        raise UserError(f"{args.corpus}: nothing to download; name the folder of its text by --from")
    done = (args.out / "bin" / "done").exists()
    # a mistake in the text is told before anything is written
    splits = pairs.read(args.corpus, args.source, args.history) if args.source and not done else {}
    with locked(raw / ".lock"):
        # without --from what is there goes on as it was begun
        source = args.source.resolve() if args.source else read_settings(raw / "settings").get("from", "")
        settings = {"corpus": args.corpus, "history": args.history or corpus.history, "from": source}
        pin_settings(raw / "settings", "*.source", settings)
        if not done:
            if not splits:
                fetch_all(corpus.urls, "pairs", raw / "archives")
                splits = {} if dry_run() else pairs.read(args.corpus, raw / "archives", args.history)
            for split, found in splits.items():
                write(raw / f"{split}.source", "".join(f"{pair.source}\n" for pair in found))
                write(raw / f"{split}.target", "".join(f"{pair.target}\n" for pair in found))
                print(f"{split}: {len(found)} pairs")
            if splits:
                kept = ({"group": pair.group, "answers": pair.answers} for pair in splits["test"])
                write(raw / "test.answers", "".join(f"{json.dumps(beside)}\n" for beside in kept))
        prepare_text(raw, "source", "target", args.out, args, {"corpus": args.corpus})
        if not dry_run() and corpus.scores:
            shutil.copy(raw / "test.answers", args.out)


def score(
    run_of: Evaluation, beam: Optional[int] = None, lenpen: Optional[float] = None, max_tokens: int = 4096
) -> Dict[str, Any]:
    """Writes for the test set and scores that by the kind of the corpus; nothing in a dry run."""
    data, out = run_of.data, run_of.out
    say("writing for the test set")
    argv = generation_flags(data, run_of.checkpoint, run_of.recipe, beam, lenpen, max_tokens)
    run(["fairseq-generate", *argv], log=out / "generate.log")
    if dry_run():
        return {}
    written = hypotheses((out / "generate.log").read_text(encoding="utf-8"), "D")
    wanted = read_lines(data / "test.target")
    if len(written) != len(wanted):
        raise UserError(f"{out}/generate.log: {len(written)} texts of {len(wanted)}; see its end")
    write(out / "test.hyp.target", "".join(f"{line}\n" for line in written))
    say("scoring")
    corpus = pairs.CORPORA.get(run_of.settings.get("corpus", ""))
    if not corpus or not corpus.scores:
        return metrics.of_free_text(written, wanted)
    beside = map(json.loads, read_lines(data / "test.answers"))
    answers: List[metrics.Answer] = [
        metrics.Answer(
            text.lower().strip(),
            # a score as it was before it was rounded
            known["answers"][0] if corpus.number else right.lower(),
            known["group"],
            known["answers"],
        )
        for text, right, known in zip(written, wanted, beside)
    ]
    labels = [word.lower() for word in dict.fromkeys(corpus.labels.values())]
    return metrics.of_answers(answers, labels, corpus.scores)


def report(data: Path, run_dir: Path) -> None:
    """Prints the scores of an evaluated run, and three of its texts."""
    print_scores(run_dir, TEST)
    say("three texts")
    files = (data / "test.source", run_dir / "test.hyp.target", data / "test.target")
    for source, output, wanted in list(zip(*map(read_lines, files)))[:3]:
        print(f"source:    {source[:200]}\noutput:    {output}\nreference: {wanted}")
