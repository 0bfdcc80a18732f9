"""Small corpora of every kind, always the same, and what prepare.sh is called with for them."""

import csv
import gzip
import hashlib
import json
import random

WORDS = "red green blue grey old new house dog cat tree river stone".split()
GERMAN = "rot grün blau grau alt neu Haus Hund Kater Baum Fluß Stein".split()
SIZES = {"train": 160, "valid": 12, "test": 10}
LABELS = ("sport", "world")


def choose(seed, shortest, longest):
    """Words in English and in German."""
    rng = random.Random(seed)
    row = [rng.randrange(len(WORDS)) for _ in range(rng.randint(shortest, longest))]
    return [WORDS[w] for w in row], [GERMAN[w] for w in row]


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def parallel(folder):
    """English and German, word by word, with what a tokeniser and the check of pairs look at. One file is .gz."""
    for split, n in SIZES.items():
        rows = [choose(f"{split} {i}", 1, 8) for i in range(n)]
        english = [f"The {'-'.join(a[:2])}, it's “{' '.join(a)}”." for a, _ in rows]
        german = [f"Das {'-'.join(b[:2])}, „{' '.join(b)}“." for _, b in rows]
        if split == "train":
            english[3:6], german[3:6] = ["", "a\u2028b", "a b c d e f"], ["leer", "c\x85d & <e>", "a"]
        write(folder / f"{split}.en", english)
        write(folder / f"{split}.de{'.gz' if split == 'train' else ''}", german)


def text(folder):
    for split, n in SIZES.items():
        lines = [" ".join(choose(f"{split} {i}", 1, 12)[0]) for i in range(n)]
        write(folder / f"{split}.txt{'.gz' if split == 'test' else ''}", [*lines, "", f"only {split}"])


def labels(folder):
    """The first word of a text tells its label. With headings, sorted by label; the test set has a byte-order mark."""
    folder.mkdir(parents=True)
    for split, n, code in (("train", 160, "utf-8"), ("test", 40, "utf-8-sig")):
        words = [(w, "Ball vote".split()[w % 2]) for w in range(n)]
        rows = [(LABELS[w % 2], f"{word}\\ #36;5", f"<b>{WORDS[w % 12]}</b> &amp; so\non") for w, word in words]
        with open(folder / f"{split}.csv", "w", newline="", encoding=code) as file:
            csv.writer(file).writerows([["label", "title", "text"], *sorted(rows)] if split == "train" else rows)


def mails(folder):
    """The subject is the last word but one."""
    for split, n in zip(("train", "dev", "test"), SIZES.values()):
        rows = [(WORDS[i % 7], GERMAN[i % 5]) for i in range(n)]
        objects = [{"email": f"Dear {a},\n greetings from {a} today", "subject": f"{b} {a}"} for a, b in rows]
        write(folder / f"{split}.jsonl{'.gz' if split == 'train' else ''}", map(json.dumps, objects))


def dialogues(folder):
    for split, n in zip(("train", "validation", "test"), SIZES.values()):
        rows = [[f"{WORDS[i % 12]} {WORDS[(i + at) % 12]} ." for at in range(4)] for i in range(n // 4)]
        write(folder / f"dialogues_{split}.txt", [" __eou__ ".join([*row, ""]) for row in rows])


# {name: (what makes its text, the words of prepare.sh, where {text} and {other} are folders, and the digest of the data
# of commit 01dc25f, before recipes/ was written anew, by these versions)}
VERSIONS = {"sacremoses": "0.2.0", "sentencepiece": "0.2.3", "subword-nmt": "0.3.8"}
PREPARED = {
    "wmt": (parallel, "{text} en de {out} --merges 60 --dash-splits --max-ratio 1.5", "8c99b7e0469344f2"),
    "like": (parallel, "{text} en de {out} --like {other}/wmt --max-length 40", "707b49998de9ca00"),
    "pieces": (parallel, "{text} en de {out} --subwords sentencepiece --merges 90 --lowercase", "1e40db2b4febae86"),
    "words": (text, "lm {out} --from {text}", "729e7eebb3069203"),
    "bpe": (text, "lm {out} --from {text} --merges 20 --sample 11", "f6357abbbb277286"),
    "labels": (labels, "classification {out} --from {text}", "302cf017edbfa64a"),
    "mails": (mails, "aeslc {out} --from {text} --merges 34 --truncate-source 9 --truncate-target 7",
        "58a08f34f6b4da6f"),
    "dialogues": (dialogues, "dailydialog {out} --from {text} --merges 30 --truncate-source 12 --truncate-target 3 "
        "--history 3", "fa5932543aea22b9"),
    "spans": (text, "spans {out} --from {text} --words 20 --merges 34", "1bf21537b1fa25f6"),
}  # fmt: skip


def prepare(name, folder, other, main):
    """Makes the text and the data of a name in a folder."""
    make, argv, _ = PREPARED[name]
    make(folder / "text")
    words = f"{argv} --workers {2 if name in ('wmt', 'bpe') else 1}".split()
    main([word.format(out=folder / name, text=folder / "text", other=other) for word in words])


def sizes(*sides):
    """Flags of a small model."""
    names = {"layers": "1", "embed-dim": "16", "ffn-embed-dim": "16", "attention-heads": "2"}
    return {f"{side}-{name}": value for side in sides for name, value in names.items()}


def digest(data):
    """SHA-256 of prepared data: of what a model is trained and scored on, and of every step before it."""
    sha256 = hashlib.sha256()
    for path in sorted(path for part in ("text", "tok", "sub", "bin") for path in (data / part).rglob("*.*")):
        if path.suffix != ".log":
            sha256.update(f"{path.relative_to(data)}\n".encode() + path.read_bytes())
    return sha256.hexdigest()[:16]
