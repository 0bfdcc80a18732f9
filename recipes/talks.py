"""Reads the TED talks of IWSLT: lines between tags for training, and XML files to validate and test."""

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from .steps import dry_run, whole
from .text import lines

VALID_EVERY = 23  # fairseq validates on every 23rd line of the training text, and trains on the others


def take_talks(files: Mapping[str, Sequence[Path]], folder: Path, side: str) -> None:
    """Writes train, valid and test of one language to a folder, divided as fairseq divides IWSLT14.

    (fairseq divides the text after it has left out pairs that are too long or too uneven; here all pairs are counted,
    and prepare.sh leaves some out later.)

    Args:
        files: {"train": the files with tags, "test": the XML files}, each for this language.
        side: the language, the ending of the files that are written.
    """
    outputs = [folder / f"{split}.{side}" for split in ("train", "valid", "test")]
    print(f"# {folder}/{{train,valid,test}}.{side}: {' '.join(map(str, [*files['train'], *files['test']]))}")
    if dry_run() or all(output.exists() for output in outputs):
        return
    training_lines = chain.from_iterable(read_training_lines(path) for path in files["train"])
    test_lines = chain.from_iterable(read_segments(path) for path in files["test"])
    with whole(*outputs) as (train_part, valid_part, test_part):
        with open(train_part, "w", encoding="utf-8") as train, open(valid_part, "w", encoding="utf-8") as valid:
            for number, line in enumerate(training_lines, start=1):
                file = valid if number % VALID_EVERY == 0 else train
                print(line, file=file)
        with open(test_part, "w", encoding="utf-8") as test:
            for line in test_lines:
                print(line, file=test)


def read_training_lines(path: Path) -> Iterator[str]:
    """Yields the sentences of a file train.tags.*, and the titles and descriptions of the talks.

    The file's other lines that begin with a tag, such as <url> and <speaker>, have no counterpart in the other
    language.
    """
    for line in lines(path):
        text = re.sub(r"</?(title|description)>", "", line).strip()
        if not re.match(r"</?[a-z]+[ >]", text):
            yield text


def read_segments(path: Path) -> Iterator[str]:
    """Yields the sentences of an XML file, each of which is a line <seg id="1"> ... </seg>."""
    for line in lines(path):
        segment = re.search(r"<seg id[^>]*>(.*)</seg>", line)
        if segment:
            yield html.unescape(segment[1].strip())
