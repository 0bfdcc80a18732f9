"""Writes a small corpus of every kind, always the same text, and lists how prepare.sh is called for it."""

import csv
import gzip
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

WORDS = "red green blue grey old new house dog cat tree river stone".split()
GERMAN_WORDS = "rot grün blau grau alt neu Haus Hund Kater Baum Fluß Stein".split()  # in the order of WORDS
SIZES = {"train": 160, "valid": 12, "test": 10}  # the number of sentences or documents
LABELS = ("sport", "world")


class SentencePair(NamedTuple):
    """The words of a random sentence in English, and their German translations one by one."""

    english: list[str]
    german: list[str]


def choose_words(seed, shortest, longest):
    """Returns a random `SentencePair`, which is the same whenever the seed is the same.

    Args:
        seed: a string.
        shortest, longest: the bounds of the number of words.
    """
    rng = random.Random(seed)
    length = rng.randint(shortest, longest)
    numbers = [rng.randrange(len(WORDS)) for _ in range(length)]
    english = [WORDS[number] for number in numbers]
    german = [GERMAN_WORDS[number] for number in numbers]
    return SentencePair(english, german)


def write(path, lines):
    """Writes lines of text to a file, which is compressed if its name ends in .gz. Makes its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{line}\n" for line in lines).encode()
    if path.suffix == ".gz":
        text = gzip.compress(text)
    path.write_bytes(text)


# ---- the text of each corpus


def write_parallel_text(folder):
    """Writes English sentences and their German translations, word by word, to {train,valid,test}.{en,de}.

    They have quotation marks, hyphens and an apostrophe, which a tokeniser separates from the words or not. Three pairs
    of the training set are unusual: one side is empty, or has a character that some programs take for the end of a
    line, or one side is much longer than the other. The German training set is compressed.
    """
    for split, size in SIZES.items():
        english_lines = []
        german_lines = []
        for number in range(size):
            pair = choose_words(f"{split} {number}", 1, 8)
            english_lines.append(f"The {'-'.join(pair.english[:2])}, it's “{' '.join(pair.english)}”.")
            german_lines.append(f"Das {'-'.join(pair.german[:2])}, „{' '.join(pair.german)}“.")
        if split == "train":
            english_lines[3:6] = ["", "a\u2028b", "a b c d e f"]
            german_lines[3:6] = ["leer", "c\x85d & <e>", "a"]
            german_file = "train.de.gz"
        else:
            german_file = f"{split}.de"
        write(folder / f"{split}.en", english_lines)
        write(folder / german_file, german_lines)


def write_text(folder):
    """Writes text for a language model to train.txt, valid.txt and test.txt.gz.

    Each file ends with an empty line and a line that occurs in no other file.
    """
    for split, size in SIZES.items():
        lines = []
        for number in range(size):
            pair = choose_words(f"{split} {number}", 1, 12)
            lines.append(" ".join(pair.english))
        name = "test.txt.gz" if split == "test" else f"{split}.txt"
        write(folder / name, [*lines, "", f"only {split}"])


def write_labelled_text(folder):
    """Writes texts with a label, a title and a body to train.csv and test.csv.

    The first word of a title tells the label. The training set has headings and is sorted by label. The test set begins
    with a byte-order mark.
    """
    folder.mkdir(parents=True)
    write_csv(folder / "train.csv", make_labelled_rows(160), headings=["label", "title", "text"], encoding="utf-8")
    write_csv(folder / "test.csv", make_labelled_rows(40), headings=None, encoding="utf-8-sig")


def make_labelled_rows(count):
    """Returns rows (label, title, body), with the labels in turn."""
    rows = []
    for number in range(count):
        label = LABELS[number % 2]
        first_word = ("Ball", "vote")[number % 2]
        # Corpora from the web have such escaped characters and tags, and line breaks within a text.
        rows.append((label, f"{first_word}\\ #36;5", f"<b>{WORDS[number % 12]}</b> &amp; so\non"))
    return rows


def write_csv(path, rows, headings, encoding):
    """Writes rows to a CSV file. With headings, they are the first row, and the other rows are sorted."""
    with open(path, "w", newline="", encoding=encoding) as file:
        writer = csv.writer(file)
        if headings is None:
            writer.writerows(rows)
        else:
            writer.writerow(headings)
            writer.writerows(sorted(rows))


def write_mails(folder):
    """Writes e-mails with a subject to train.jsonl.gz, dev.jsonl and test.jsonl, one JSON object in each line.

    The subject consists of a word that depends on the number of the mail, and of the name in the mail.
    """
    file_of_split = {"train": "train.jsonl.gz", "valid": "dev.jsonl", "test": "test.jsonl"}
    for split, size in SIZES.items():
        lines = []
        for number in range(size):
            name = WORDS[number % 7]
            topic = GERMAN_WORDS[number % 5]
            mail = {"email": f"Dear {name},\n greetings from {name} today", "subject": f"{topic} {name}"}
            lines.append(json.dumps(mail))
        write(folder / file_of_split[split], lines)


def write_dialogues(folder):
    """Writes dialogues of four utterances to dialogues_{train,validation,test}.txt, one dialogue in each line."""
    file_of_split = {"train": "dialogues_train.txt", "valid": "dialogues_validation.txt", "test": "dialogues_test.txt"}
    for split, size in SIZES.items():
        dialogues = []
        for number in range(size // 4):
            utterances = []
            for place in range(4):
                utterances.append(f"{WORDS[number % 12]} {WORDS[(number + place) % 12]} .")
            # Each utterance ends with the mark, the last one too.
            dialogues.append(" __eou__ ".join([*utterances, ""]))
        write(folder / file_of_split[split], dialogues)


# ---- how prepare.sh is called


class Corpus(NamedTuple):
    """A small corpus, and how prepare.sh prepares it.

    Attributes:
        write_text: writes the text into a folder.
        command: the arguments of prepare.sh, where {text}, {out} and {other} stand for folders: that of the text, that
            of the prepared data, and one with other prepared data.
        digest: the digest of the prepared data (`compute_digest`), as commit 01dc25f prepared them with `VERSIONS`. So
            it shows whether the data are still the same.
    """

    write_text: Callable[[Path], None]
    command: str
    digest: str


# the packages that prepare the data, with the versions for which the digests hold
VERSIONS = {"sacremoses": "0.2.0", "sentencepiece": "0.2.3", "subword-nmt": "0.3.8"}
SMALL_CORPORA = {
    "wmt": Corpus(
        write_parallel_text, "{text} en de {out} --merges 60 --dash-splits --max-ratio 1.5", digest="8c99b7e0469344f2"
    ),
    "like": Corpus(
        write_parallel_text, "{text} en de {out} --like {other}/wmt --max-length 40", digest="707b49998de9ca00"
    ),
    "pieces": Corpus(
        write_parallel_text,
        "{text} en de {out} --subwords sentencepiece --merges 90 --lowercase",
        digest="1e40db2b4febae86",
    ),
    "words": Corpus(write_text, "lm {out} --from {text}", digest="729e7eebb3069203"),
    "bpe": Corpus(write_text, "lm {out} --from {text} --merges 20 --sample 11", digest="f6357abbbb277286"),
    "labels": Corpus(write_labelled_text, "classification {out} --from {text}", digest="302cf017edbfa64a"),
    "mails": Corpus(
        write_mails,
        "aeslc {out} --from {text} --merges 34 --truncate-source 9 --truncate-target 7",
        digest="58a08f34f6b4da6f",
    ),
    "dialogues": Corpus(
        write_dialogues,
        "dailydialog {out} --from {text} --merges 30 --truncate-source 12 --truncate-target 3 --history 3",
        digest="fa5932543aea22b9",
    ),
    "spans": Corpus(write_text, "spans {out} --from {text} --words 20 --merges 34", digest="1bf21537b1fa25f6"),
}


def prepare(name, folder, other, main):
    """Writes the text of a corpus to the subfolder text of a folder, and prepares it in a subfolder with its name.

    Args:
        name: a key of SMALL_CORPORA.
        folder: the folder.
        other: the folder that takes the place of {other}.
        main: the function of the command, recipes.prepare.main.
    """
    corpus = SMALL_CORPORA[name]
    text = folder / "text"
    corpus.write_text(text)
    argv = [word.format(out=folder / name, text=text, other=other) for word in corpus.command.split()]
    workers = "2" if name in ("wmt", "bpe") else "1"
    main([*argv, "--workers", workers])


def small_model_flags(*sides):
    """Returns the flags {name: value} that set the sizes of a small model, for the sides encoder, decoder or both."""
    sizes = {"layers": "1", "embed-dim": "16", "ffn-embed-dim": "16", "attention-heads": "2"}
    flags = {}
    for side in sides:
        for name, value in sizes.items():
            flags[f"{side}-{name}"] = value
    return flags


def compute_digest(data):
    """Returns a checksum of prepared data: of what a model is trained and scored on, and of every step before it.

    Args:
        data: the folder. Its subfolders text, tok, sub and bin are read, but not the logs.
    """
    files = []
    for folder in ("text", "tok", "sub", "bin"):
        files += (data / folder).rglob("*.*")
    sha256 = hashlib.sha256()
    for file in sorted(files):
        if file.suffix == ".log":
            continue
        sha256.update(f"{file.relative_to(data)}\n".encode())
        sha256.update(file.read_bytes())
    return sha256.hexdigest()[:16]
