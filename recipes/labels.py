"""Corpora of texts with labels: their files, checked and cleaned."""

import html
import random
import re
from pathlib import Path
from typing import Container, Dict, List, Optional, Sequence, Tuple

from .command import UserError
from .corpora import Corpus, files_of, find, rows_of, text_of

SEED = 1  # of the split and the order
Example = Tuple[str, str]  # label and text


def read(corpus: Corpus, folder: Path, examples: Optional[int], held_out: Optional[int]) -> Dict[str, List[Example]]:
    """{split: its examples}, training and validation in a random order that is always the same.

    Args:
        examples: how many of training and validation to keep.
        held_out: how many of them are for validation, if the corpus has no such set; default: a tenth.
    """
    files = files_of(corpus, folder, ("train", "test"))
    train = read_split(corpus, files["train"])
    labels = {label for label, _ in train}
    test, valid = (read_split(corpus, paths, labels) for paths in (files["test"], find(folder, corpus.files["valid"])))
    random.Random(SEED).shuffle(train)
    train = train[:examples]
    if not valid:
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


def read_split(corpus: Corpus, paths: Sequence[Path], known: Container[str] = ()) -> List[Example]:
    """The examples of a table; or of files of one review each, as IMDb has them, whose folder is the label.

    Args:
        known: labels of the training set.
    """
    if paths and paths[0].suffix == ".txt":
        labels = {"neg": "0", "pos": "1"}
        return [checked(path, 0, labels[path.parent.name], text_of(path), corpus.classes) for path in paths]
    return [example for path in paths for example in read_table(corpus, path, known)]


def read_table(corpus: Corpus, path: Path, known: Container[str]) -> List[Example]:
    """The examples of a .csv or .tsv file, with or without a line of headings.

    Args:
        known: labels of the training set, which are no headings.
    """
    rows, tabs = [], ".tsv" in path.suffixes
    for line, row in rows_of(path, text_of(path), tabs):
        if len(row) < corpus.fields:
            raise UserError(
                f"{path}: line {line} has {len(row)} column(s), not {corpus.fields}: the label, then the text, "
                f"divided by {'tabs' if tabs else 'commas'}"
            )
        rows.append((line, row[0], " ".join(row[-1:] if corpus.last_only else row[1:])))
    label = rows[0][1] if rows else ""
    if re.sub(r"[\W_]+", " ", label).strip().lower() in ("label", "labels", "class", "class index"):
        if label.strip() not in known and label not in (other for _, other, _ in rows[1:]):
            print(f"{path}: line 1 is taken for headings: {label}, …")
            rows = rows[1:]
    if not rows:
        raise UserError(f"{path}: has no examples")
    return [checked(path, line, label, text, corpus.classes) for line, label, text in rows]


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
