"""Text classification: the corpora, accuracy on the test set, and McNemar's test against a baseline."""

import html
import random
import re
from collections import Counter
from pathlib import Path
from shlex import quote
from typing import Any, Container, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from . import corpora
from .command import (
    ROOT,
    Parser,
    UserError,
    cores,
    dry_run,
    existing_folder,
    integer,
    read_settings,
    run,
    say,
    shell,
    write,
)
from .corpora import fetch_all, rows_of, text_of
from .prepare import SPLITS, folder_of_data, preprocess
from .scoring import Evaluation, print_scores

PREPARE = """A corpus of text classification, to binarised data for fairseq-train.

  scripts/prepare.sh agnews|imdb|classification OUT_DIR [--from DIR] [options]

  agnews  AG's news, 4 classes, title and description (Zhang et al. 2015): 120,000 and 7,600 examples
  imdb    Large Movie Review Dataset, 2 classes (Maas et al. 2011): 25,000 and 25,000 reviews
  classification your corpus, in the folder of --from

The text comes from --from, a folder with {train,test}.csv or .tsv, and valid too if there is one, any of them also as
.gz; imdb takes the unpacked aclImdb there as well. Without --from it is downloaded and checked by
SHA-256 (classification.sha256). The first column is the label. The text is all others; for imdb the last. A first
line whose label is "label", "class" or "class index" is taken for headings, unless the training set has that label.

Without a validation set, examples drawn from the training set with a fixed seed are held out. Training examples are
shuffled with the same seed. The text loses markup, is lowercased and tokenised (sacremoses); the vocabulary is the
most frequent words of the training set. DRY_RUN=1 shows the commands only.
"""
SCORES = """
    Classification: accuracy in per cent, by scripts/classify.py. --baseline: McNemar's exact test. Also
    test.predicted, a label for each line of the test set.
"""
RECIPE = "agnews_cpu"  # of a run that names none
prepare = corpora.prepare_corpus
TEST = "McNemar's exact test"  # what `compare` does
METRIC, METRIC_NAME, BEST = "accuracy", "accuracy", max
SEED = 1  # of the split and the order
Example = Tuple[str, str]  # label and text


class Corpus(NamedTuple):
    """Where a corpus is from, and the columns of its files."""

    urls: Sequence[str] = ()
    labels: Sequence[str] = ()  # all there are; empty: those of the training set
    columns: int = 2  # at least
    last_only: bool = False  # the text is the last column, not all after the first


CORPORA = {
    name: Corpus(**entry)
    for name, entry in corpora.CORPORA.items()
    if ("columns" in entry or "labels" in entry) and "source" not in entry
}


def main(argv: Sequence[str]) -> None:
    """prepare.sh, of these corpora."""
    parser = Parser("prepare", PREPARE)
    add = parser.add_argument
    add("corpus", metavar="CORPUS", choices=CORPORA, help=", ".join(CORPORA))
    add("out", metavar="OUT_DIR", type=Path)
    add("--from", dest="source", type=existing_folder, metavar="DIR", help="the corpus at hand")
    add("--examples", type=integer(10), metavar="N", help="training and validation examples, drawn (default: all)")
    add("--valid", type=integer(1), metavar="N", help="examples held out for validation (default: a tenth)")
    add("--vocabulary", type=integer(1), default=30000, metavar="N", help="words (default: 30000)")
    add("--workers", type=integer(1), default=cores(), metavar="N", help="processes (default: all cores)")
    args = parser.parse_args(argv)
    corpus, out = CORPORA[args.corpus], args.out
    if not corpus.urls and not args.source:
        raise UserError(f"{args.corpus}: nothing to download; name the folder of {{train,test}}.csv by --from")
    # a mistake in the text is told before anything is written
    splits = read_corpus(corpus, args.source, args.examples, args.valid) if args.source else {}
    # without --from what is there goes on as it was begun
    source = args.source.resolve() if args.source else read_settings(out / "settings").get("from", "")
    name = args.corpus if corpus.urls else "own"
    settings = {"task": "sentence_prediction", "corpus": name, "vocabulary": args.vocabulary}
    settings.update(examples=args.examples or "", valid=args.valid or "", **{"from": source})
    with folder_of_data(out, settings) as begun:
        if not begun:
            check_unchanged(out, splits)
            return
        if not splits:
            fetch_all(corpus.urls, "classification", out / "archives")
            splits = {} if dry_run() else read_corpus(corpus, out / "archives", args.examples, args.valid)
        for split, examples in [] if dry_run() else splits.items():
            file, lines = out / "text" / f"{split}.txt", "".join(f"{text}\n" for _, text in examples)
            if not file.exists() or file.read_text(encoding="utf-8") != lines:
                (out / "tok" / f"{split}.txt").unlink(missing_ok=True)  # of another text
            write(file, lines)
            write(out / "text" / f"{split}.label", "".join(f"{label}\n" for label, _ in examples))
        binarise(out, args.vocabulary, args.workers)
    for split, examples in [] if dry_run() else splits.items():
        counts = ", ".join(f"{label}: {n}" for label, n in sorted(Counter(e[0] for e in examples).items()))
        print(f"{split}: {len(examples)} examples ({counts})")


def check_unchanged(out: Path, splits: Mapping[str, Sequence[Example]]) -> None:
    """Refuses prepared data whose text has changed since."""
    for split, examples in splits.items():
        made_of = (out / "text" / f"{split}.txt").read_text(encoding="utf-8")
        if made_of != "".join(f"{text}\n" for _, text in examples):
            raise UserError(f"{out}: was made of another {split} set; give another folder, or remove it")


def read_corpus(
    corpus: Corpus, folder: Path, examples: Optional[int], held_out: Optional[int]
) -> Dict[str, List[Example]]:
    """{split: its examples}, training and validation in a random order that is always the same.

    Args:
        examples: how many of training and validation to keep.
        held_out: how many of them are for validation, if the corpus has no such set; default: a tenth.
    """
    train = read_split(corpus, folder, "train")
    labels = {label for label, _ in train or []}
    valid, test = (read_split(corpus, folder, split, labels) for split in ("valid", "test"))
    if train is None or test is None:
        missing = "train" if train is None else "test"
        raise UserError(f"{folder}: no {missing} set; it should be named {missing}.csv or {missing}.tsv, or .gz of it")
    random.Random(SEED).shuffle(train)
    train = train[:examples]
    if valid is None:
        n = held_out or max(1, len(train) // 10)
        if n >= len(train):
            raise UserError(f"--valid {n}: leaves nothing of {len(train)} examples to train on; hold out fewer")
        train, valid = train[n:], train[:n]
    known = {label for label, _ in train}
    for split, rows in (("validation", valid), ("test", test)):
        for label, text in rows:
            if label not in known:
                raise UserError(
                    f"{folder}: the {split} set has the label {label}, which no training example has (they have "
                    f'{", ".join(sorted(known))}); the text is "{text[:40]}"'
                )
    return {"train": train, "valid": valid, "test": test}


def read_split(corpus: Corpus, folder: Path, split: str, known: Container[str] = ()) -> Optional[List[Example]]:
    """The examples of a file of a folder, or of aclImdb's folders; None where there is none of this name.

    Args:
        known: labels of the training set.
    """
    for kind in ("csv", "tsv"):
        for path in (folder / f"{split}.{kind}", folder / f"{split}.{kind}.gz"):
            if path.exists():
                return read_table(corpus, path, kind, known)
    base = next((base for base in (folder / "aclImdb", folder) if (base / split / "pos").is_dir()), None)
    if corpus is not CORPORA["imdb"] or not base:
        return None
    return [
        checked(path, 0, label, path.read_text(encoding="utf-8"), corpus.labels)
        for label, name in (("0", "neg"), ("1", "pos"))
        for path in sorted((base / split / name).glob("*.txt"))
    ]


def read_table(corpus: Corpus, path: Path, kind: str, known: Container[str] = ()) -> List[Example]:
    """The examples of a .csv or .tsv file, with or without a line of headings.

    Args:
        known: labels of the training set, which are no headings.
    """
    rows = []
    for line, row in rows_of(path, text_of(path), tabs=kind == "tsv"):
        if len(row) < corpus.columns:
            raise UserError(
                f"{path}: line {line} has {len(row)} column(s), not {corpus.columns}: the label, then the text, "
                f"divided by {'commas' if kind == 'csv' else 'tabs'}"
            )
        rows.append((line, row[0], " ".join(row[-1:] if corpus.last_only else row[1:])))
    label = rows[0][1] if rows else ""
    if re.sub(r"[\W_]+", " ", label).strip().lower() in ("label", "labels", "class", "class index"):
        if label.strip() not in known and label not in (other for _, other, _ in rows[1:]):
            print(f"{path}: line 1 is taken for headings: {label}, …")
            rows = rows[1:]
    if not rows:
        raise UserError(f"{path}: has no examples")
    return [checked(path, line, label, text, corpus.labels) for line, label, text in rows]


def checked(path: Path, line: int, label: str, text: str, labels: Sequence[str]) -> Example:
    """An example with clean text. `line`: its number in the file; 0 for a file of one example."""
    where = f"{path}: line {line}" if line else str(path)
    label, text = label.strip(), clean(text)
    if not text:
        raise UserError(f"{where} has an empty text; remove it")
    if not label or len(label.split()) > 1 or labels and label not in labels:
        kinds = f"one of {', '.join(labels)}" if labels else "one word"
        raise UserError(f'{where} has the label "{label}"; it must be {kinds}')
    return label, text


def clean(text: str) -> str:
    """Text of one line without markup, lowercased.

    AG News has line breaks as backslashes, and entities that lost their ampersand: ``#36;`` for ``&#36;``.
    """
    text = re.sub(r"(?<![&\w])#(\d+);", r"&#\1;", text.replace("\\", " "))
    text = re.sub(r"</?[a-zA-Z][^<>]*>", " ", html.unescape(text))
    return " ".join(text.lower().split())


def binarise(out: Path, vocabulary: int, workers: int) -> None:
    """Tokenised text in bin/input0 and labels in bin/label, as fairseq's sentence_prediction reads them."""
    say("tokenising")
    tokenize = f"sacremoses --quiet -l en -j {workers} normalize -c tokenize"
    for split in SPLITS:
        shell(f"{tokenize} < {quote(str(out / 'text' / f'{split}.txt'))}", out / "tok" / f"{split}.txt")
    say("binarising")
    common = ["--only-source", "--workers", workers]
    words = [*common, "--nwordssrc", vocabulary]
    preprocess(words, out / "bin" / "input0", f"{out}/tok/{{}}.txt", out / "preprocess.input0.log")
    labels = [*common, "--padding-factor", 1]
    preprocess(labels, out / "bin" / "label", f"{out}/text/{{}}.label", out / "preprocess.label.log")


def score(run_of: Evaluation, max_tokens: int = 4096) -> Dict[str, Any]:
    """The accuracy on the test set, whose labels are written too; nothing in a dry run."""
    say("classifying the test set")
    predicted = run_of.out / "test.predicted"
    argv = ["python", ROOT / "scripts" / "classify.py", run_of.data / "bin", "--path", run_of.checkpoint]
    run([*argv, "--max-tokens", max_tokens, "--output", predicted], log=run_of.out / "classify.log")
    return {} if dry_run() else accuracy(run_of.data, predicted)


def correct(data: Path, predicted: Path) -> List[bool]:
    """Whether each example of the test set has the label predicted."""
    labels = (data / "text" / "test.label").read_text(encoding="utf-8").splitlines()
    found = predicted.read_text(encoding="utf-8").splitlines() if predicted.exists() else []
    if len(found) != len(labels):
        raise UserError(f"{predicted.parent}: not evaluated yet, or not on these data")
    return [a == b for a, b in zip(found, labels)]


def accuracy(data: Path, predicted: Path) -> Dict[str, Any]:
    """The accuracy of predictions on the test set, in per cent."""
    right = correct(data, predicted)
    score = round(100 * sum(right) / len(right), 2)
    return {"accuracy": {"score": score, "name": "accuracy", "signature": f"examples:{len(right)}"}}


def compare(data: Path, run_dir: Path, baseline: Path) -> Dict[str, Any]:
    """McNemar's exact test of a run's accuracy against a baseline's, both evaluated on the same data.

    Null hypothesis: where only one of the two is right, each is with equal probability.
    """
    from scipy.stats import binomtest

    before, after = (correct(data, folder / "test.predicted") for folder in (baseline, run_dir))
    won = sum(b and not a for a, b in zip(before, after))
    lost = sum(a and not b for a, b in zip(before, after))
    return {
        "baseline": round(100 * sum(before) / len(before), 2),
        "score": round(100 * sum(after) / len(after), 2),
        "p_value": float(binomtest(won, won + lost).pvalue) if won + lost else 1.0,
        "signature": f"McNemar, exact|won:{won}|lost:{lost}",
    }


def report(data: Path, run_dir: Path) -> None:
    """Prints the scores of an evaluated run, and three of its predictions."""
    print_scores(run_dir, TEST)
    say("three predictions")
    files = (run_dir / "test.predicted", data / "text" / "test.label", data / "text" / "test.txt")
    for found, label, text in list(zip(*(path.read_text(encoding="utf-8").splitlines() for path in files)))[:3]:
        print(f"predicted: {found}, label: {label}, text: {text[:80]}")
