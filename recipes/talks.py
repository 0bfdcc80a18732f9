"""Reads the TED talks of IWSLT: lines between tags for training, and XML files to validate and test."""

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from .steps import atomic_write, dry_run, show_step
from .text import lines, open_to_write, write_lines

VALID_EVERY = 23  # fairseq validates on every 23rd line of the training text, and trains on the others


def write_talks(files: Mapping[str, Sequence[Path]], folder: Path, side: str) -> None:
    """Writes the training, validation and test set of IWSLT14 in one language to a folder.

    The validation set is a part of the training text. See `write_training_and_validation_lines`.

    Args:
        files: {"train": the files with tags, "test": the XML files}, all of them in this language.
        folder: where the files are written. Existing files are kept.
        side: the language, which is the ending of the files.
    """
    outputs = [folder / f"{split}.{side}" for split in ("train", "valid", "test")]
    names_of_inputs = " ".join(str(path) for path in (*files["train"], *files["test"]))
    show_step(f"{folder}/{{train,valid,test}}.{side}: {names_of_inputs}")
    if dry_run() or all(output.exists() for output in outputs):
        return
    with atomic_write(*outputs) as (train_part, valid_part, test_part):
        write_training_and_validation_lines(files["train"], train_part, valid_part)
        write_lines(test_part, chain.from_iterable(read_segments(path) for path in files["test"]))


def write_training_and_validation_lines(files: Sequence[Path], train: Path, valid: Path) -> None:
    """Divides the lines of some files with tags into a training set and a validation set.

    As in fairseq's example for IWSLT14, every 23rd line is used for validation, and not for training. The validation
    set is not quite the same as fairseq's: all lines are counted here, while fairseq leaves out pairs of unsuitable
    lengths before it counts.

    Args:
        files: the files to read.
        train: the file with the training set, which is written.
        valid: the file with the validation set, which is written.
    """
    text_lines = chain.from_iterable(read_training_lines(path) for path in files)
    with open_to_write(train) as train_file, open_to_write(valid) as valid_file:
        for number, line in enumerate(text_lines, start=1):
            file = valid_file if number % VALID_EVERY == 0 else train_file
            file.write(f"{line}\n")


def read_training_lines(path: Path) -> Iterator[str]:
    """Yields the lines of text in a file train.tags.*: sentences, and titles and descriptions of the talks.

    Lines with other tags, such as <url> and <speaker>, are skipped, as they have no translation in the other language.
    """
    for line in lines(path):
        text = re.sub(r"</?(title|description)>", "", line).strip()
        if not re.match(r"</?[a-z]+[ >]", text):
            yield text


def read_segments(path: Path) -> Iterator[str]:
    """Yields the sentences of an XML file. Each of them is in a line such as <seg id="1"> Thank you. </seg>."""
    for line in lines(path):
        segment = re.search(r"<seg id[^>]*>(.*)</seg>", line)
        if segment:
            yield html.unescape(segment[1].strip())
