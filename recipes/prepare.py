"""Raw text -> binarised data for fairseq-train.

  scripts/prepare.sh CORPUS OUT_DIR [options]            a corpus of these
  scripts/prepare.sh CORPUS de|fr OUT_DIR [options]      parallel text, from English
  scripts/prepare.sh RAW_DIR SRC TGT OUT_DIR [options]   parallel text of your own; pairs of any texts: source target

Parallel text: checked, normalised and tokenised (sacremoses), joint subwords (subword-nmt or SentencePiece), cleaned,
fairseq-preprocess with a joined dictionary. Of your own RAW_DIR holds NAME.SRC and NAME.TGT, one sentence a line. NAMEs
are valid and test; every other is a training corpus, taken in the order of the names.
{parallel}
Text for language models: words between spaces, or BPE (--merges); each line ends with </s>.
{text}
Texts with labels: the first column is the label, the text all others, of imdb the last. A first line whose label is
"label", "class" or "class index" is taken for headings, unless the training set has that label. Without a validation
set a tenth of the training set is held out. The text loses markup, is lowercased and tokenised.
{labels}
Pairs of texts, prepared as parallel text is, by default with SentencePiece; columns and form: recipes/corpora.yaml. The
source of a reply is the persona, if there is one, and the last utterances, with | between them. Without a validation
set a tenth of the training set is held out.
{pairs}
Text to denoise (T5): blocks of --words words lose 15 % of them, in spans of 3 on average (scripts/corrupt_spans.py).
{spans}
--from names a folder with the text, any file of it also as .gz; without it, the text is downloaded. It is checked by
SHA-256 where that is known (recipes/corpora.sha256). OUT_DIR receives bin/ for fairseq-train, the codes of subwords,
the test set to score against, and settings, which evaluate.sh reads. Every step writes its file atomically, so a
second call goes on where the first one ended, and a finished OUT_DIR is kept. DRY_RUN=1 shows the commands only.
"""

import argparse
import contextlib
import hashlib
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from shlex import quote
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from . import examples
from .command import (
    ROOT,
    Parser,
    UserError,
    cores,
    dry_run,
    existing_folder,
    integer,
    locked,
    pin_settings,
    read_settings,
    run,
    say,
    shell,
    write,
)
from .corpora import (
    CHECKSUMS,
    CORPORA,
    SPLITS,
    Corpus,
    files_of,
    has_archive,
    say_of_corpora,
    take,
    take_parallel,
    unpacked,
)

TASKS = {  # {kind of a corpus: its task}
    "parallel": "translation",
    "text": "language_modeling",
    "labels": "sentence_prediction",
    "pairs": "text_to_text",
    "spans": "denoising",
}
AS_PARALLEL = ("parallel", "pairs", "spans")


def ratio(text: str) -> str:
    """The type of --max-ratio, kept as it is written."""
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text}: must be a number")
    return text


def number(minimum: int, help: str) -> Dict[str, Any]:
    return {"type": integer(minimum), "metavar": "N", "help": help}


def switch(help: str) -> Dict[str, Any]:
    return {"action": "store_true", "help": help}


CUT = "cut {} after N subwords, the end's own included; "
RATIO = {"type": ratio, "metavar": "R", "help": "largest ratio of a training pair's lengths; 0: any"}
MERGES = "BPE merges, or SentencePiece's vocabulary (default: 10000; of text for language models none)"
LENGTH = "most subwords on a side of a training pair (default: 250; of pairs of texts any number, 0)"
SOURCE = CUT.format("sources") + "translate.sh cuts them too where they are SentencePiece's"
TARGET = CUT.format("targets") + "those that are scored against are whole"
LIKE = "with the subwords, words and options of that data, for fine-tuning a model of it (train.sh --init)"
OPTIONS: Dict[str, Tuple[Sequence[str], Dict[str, Any]]] = {  # {option: kinds of corpora that have it, of argparse}
    "merges": ((*AS_PARALLEL, "text"), number(1, MERGES)),
    "subwords": (AS_PARALLEL, {"choices": ("bpe", "sentencepiece")}),
    "dash-splits": (AS_PARALLEL, switch("split words at hyphens when tokenising (Moses' -a)")),
    "lowercase": (AS_PARALLEL, switch("lowercase all text")),
    "max-length": (AS_PARALLEL, number(0, LENGTH)),
    "max-ratio": (AS_PARALLEL, RATIO),
    "truncate-source": (AS_PARALLEL, number(2, SOURCE)),
    "truncate-target": (AS_PARALLEL, number(2, TARGET)),
    "like": (AS_PARALLEL, {"type": Path, "metavar": "DATA_DIR", "help": LIKE}),
    "history": (("pairs",), number(1, "utterances before the one to be written (default: 5)")),
    "words": (("spans",), number(2, "of a block (default: 64)")),
    "examples": (("labels",), number(10, "training and validation examples, drawn (default: all)")),
    "valid": (("labels",), number(1, "examples held out for validation (default: a tenth)")),
    "vocabulary": (("labels",), number(1, "words (default: 30000)")),
    "sample": ((*AS_PARALLEL, "text"), number(1, "only the first N lines of each training corpus, for a trial")),
    "mirror": (("parallel",), {"metavar": "URL", "help": "wmt14: of statmt.org's files"}),
    "workers": (tuple(TASKS), number(1, "processes (default: all cores)")),
}
NOT_PINNED = ("mirror", "workers")  # data made with other values are the same
PIECES = {"merges": 10000, "subwords": "sentencepiece", "max-length": 0, "max-ratio": "0"}
DEFAULTS: Dict[str, Dict[str, Any]] = {  # {kind: {option: its default, if it is not empty}}
    "parallel": {"merges": 10000, "subwords": "bpe", "max-length": 250, "max-ratio": "0"},
    "text": {},
    "labels": {"vocabulary": 30000},
    "pairs": PIECES,
    "spans": {**PIECES, "words": 64},
}
OF_LIKE = ("subwords", "merges", "dash_splits", "lowercase")  # options that --like takes over


def options_of(corpus: Corpus, given: Mapping[str, Any], src: str, tgt: str) -> argparse.Namespace:
    """All options, with the defaults of a corpus; those that it has not are None, and refused if they are given."""
    found, usual = argparse.Namespace(), {**DEFAULTS[corpus.kind], "workers": cores(), **corpus.options}
    for name, (kinds, _) in OPTIONS.items():
        value = given.get(name)
        if value is not None and (corpus.kind not in kinds or name == "history" and name not in usual):
            raise UserError(f"--{name} {value}: not for {corpus.name}; leave it out")
        setattr(found, name.replace("-", "_"), usual.get(name) if value is None else value)
    if found.like:
        settings = read_settings(found.like / "settings")
        if not dry_run() and not (found.like / "bin" / "done").exists():
            raise UserError(f"--like {found.like}: not prepared, or not to its end")
        if settings and {settings.get("src"), settings.get("tgt")} != {src, tgt}:
            raise UserError(f"--like {found.like}: is not parallel text of {src} and {tgt}")
        for name in OF_LIKE:
            setattr(found, name, settings.get(name, getattr(found, name)))
    return found


def main(argv: Sequence[str]) -> None:
    """prepare.sh."""
    parser = Parser("prepare", (__doc__ or "").format(**{kind: say_of_corpora(kind) for kind in TASKS}))
    parser.add_argument("what", nargs="+", metavar="CORPUS|RAW_DIR … OUT_DIR")
    parser.add_argument("--from", dest="source", type=existing_folder, metavar="DIR", help="the corpus at hand")
    for option, (_, settings) in OPTIONS.items():
        parser.add_argument(f"--{option}", dest=option, default=None, **settings)
    given = vars(parser.parse_args(argv))
    words, source = given.pop("what"), given.pop("source")
    name, *more = words
    if name in CORPORA:
        wanted = ["de|fr", "OUT_DIR"] if CORPORA[name].kind == "parallel" else ["OUT_DIR"]
        if len(more) != len(wanted) or (len(more) == 2 and more[0] not in ("de", "fr")):
            raise UserError(f"{' '.join(words)}: {name} is prepared by prepare.sh {name} {' '.join(wanted)}")
        prepare(name, f"en-{more[0]}" if len(more) == 2 else "", Path(more[-1]), source, given)
        return
    if len(words) != 4:
        if not Path(name).is_dir():
            known = ", ".join(CORPORA)
            raise UserError(f"{name}: neither a corpus nor a folder of parallel text; the corpora are {known}")
        raise UserError("RAW_DIR SRC TGT OUT_DIR are wanted; see scripts/prepare.sh --help")
    raw, src, tgt, out = words
    if source:
        raise UserError(f"--from {source}: RAW_DIR is the folder of the text; leave it out")
    prepare("own", f"{src}-{tgt}", Path(out), Path(raw), given)


def prepare(name: str, dataset: str, out: Path, source: Optional[Path], given: Mapping[str, Any]) -> None:
    """Prepares a corpus as the folder `out`.

    Args:
        name: of a corpus, or any other for the parallel text of a folder.
        dataset: the pair of languages of parallel text, such as en-de.
        source: the folder of its text; default: as an earlier call had it, or else the text is downloaded.
        given: {option of prepare.sh: its value}.
    """
    corpus = CORPORA.get(name, Corpus(name, "parallel"))
    text = CORPORA.get(corpus.of, corpus)  # whose files are read
    src, tgt = dataset.split("-") if corpus.kind == "parallel" else ("source", "target")
    if src == tgt:
        raise UserError(f"SRC and TGT are both {src}")
    options = options_of(corpus, given, src, tgt)
    recorded, done = read_settings(out / "settings"), (out / "bin" / "done").exists()
    if not source and name in CORPORA and recorded.get("from"):
        source = Path(recorded["from"])  # goes on as it was begun
    if not source and done and name not in CORPORA:
        return say(f"{out} is ready, reusing it")
    if not source and not dry_run() and not done and not (text.urls or text.archives or text.sets or text.script):
        wanted = f", {{train,valid,test}}.{{{src},{tgt}}}" if corpus.kind == "parallel" else ""
        raise UserError(f"{name}: nothing to download; name the folder of its text by --from{wanted}")

    # a mistake is told before anything is written; data that are ready are compared as long as their text is there
    found: examples.Examples = {}
    files: List[Path] = []
    if source and (source.is_dir() or not done):
        if corpus.kind in ("labels", "pairs"):
            found = read_examples(corpus, source, options)
        elif corpus.kind in ("text", "spans") and not has_archive(text, source):
            files = [path for paths in files_of(text, source).values() for path in paths]
        elif name not in CORPORA and not dry_run():
            training_corpora(source, src, tgt)
            files = [file for lang in (src, tgt) for end in ("", ".gz") for file in source.glob(f"*.{lang}{end}")]

    is_own = (src, tgt) == ("source", "target") and corpus.kind == "parallel"
    settings: Dict[str, object] = {"task": "text_to_text" if is_own else TASKS[corpus.kind], "corpus": name}
    if corpus.kind in AS_PARALLEL:
        settings.update(src=src, tgt=tgt)
    names = [name for name, (kinds, _) in OPTIONS.items() if corpus.kind in kinds and name not in NOT_PINNED]
    for key in (name.replace("-", "_") for name in names):
        value = getattr(options, key)
        settings[key] = "" if value is None else value.resolve() if isinstance(value, Path) else value
    if not any(known.startswith(f"{text.name}/test.") for known in CHECKSUMS):  # which tell the text
        settings["from"] = source.resolve() if source else ""
        settings["raw"] = fingerprint(corpus, found, files) or recorded.get("raw", "")
    with folder_of_data(out, settings) as begun:
        if begun:
            make(corpus, source, src, tgt, out, options, found)


def read_examples(corpus: Corpus, folder: Path, options: argparse.Namespace) -> examples.Examples:
    """Those of texts with labels, or of pairs of texts."""
    return examples.read(corpus, folder, options.history, options.examples, options.valid)


def fingerprint(corpus: Corpus, found: examples.Examples, files: Sequence[Path]) -> str:
    """What tells a text from another one, that of examples or else of files; empty if there are none."""
    if not found:
        size = sum(file.stat().st_size for file in files)
        return f"{size} bytes" if size else ""
    labelled = {split: [(row.target, row.source) for row in rows] for split, rows in found.items()}
    return hashlib.sha256(json.dumps(labelled if corpus.kind == "labels" else found).encode()).hexdigest()


# ---- the text of each kind of corpus, and its data


def make(
    corpus: Corpus,
    source: Optional[Path],
    src: str,
    tgt: str,
    out: Path,
    options: argparse.Namespace,
    found: examples.Examples,
) -> None:
    """Data of a corpus, whose text is in the folder `source` or downloaded, or has been read as examples."""
    raw = out / "raw"
    if corpus.kind == "text":
        take_text(corpus, source, out, out / "text", options.sample)
        binarise_text(out, options)
    elif corpus.kind == "labels":
        write_examples(corpus, found, out, options)
        binarise_labels(out, options)
    else:
        if corpus.kind == "pairs":
            write_examples(corpus, found, out, options)
        elif corpus.kind == "spans":
            take_text(CORPORA[corpus.of], source, out, raw / "text")
            for seed, split in enumerate(SPLITS):
                if not (raw / f"{split}.target").exists():
                    script = ["python", ROOT / "scripts" / "corrupt_spans.py", raw / "text" / f"{split}.txt"]
                    run([*script, raw / split, "--words", options.words, "--seed", seed])
        elif corpus.name in CORPORA:
            say("the corpora")
            take_parallel(corpus, tgt, out, source, options.mirror)
        else:
            raw = source or Path("DIR")
        binarise(raw, src, tgt, out, options)


def take_text(corpus: Corpus, source: Optional[Path], out: Path, text: Path, sample: Optional[int] = None) -> None:
    """Makes {train,valid,test}.txt in the folder `text` of a corpus of text."""
    say("the text")
    archives = out / "archives"
    files = files_of(corpus, unpacked(corpus, archives, source))
    with clean_after_mistakes(text):
        for split, paths in files.items():
            name = f"{split}.txt"
            take(f"{corpus.name}/{name}", paths, text / name, archives, sample if split == "train" else None)


def write_examples(corpus: Corpus, found: examples.Examples, out: Path, options: argparse.Namespace) -> None:
    """A file for each side. What is known beside the test set's pairs is kept in test.answers."""
    if not found:
        folder = unpacked(corpus, out / "archives")
        found = {} if dry_run() else read_examples(corpus, folder, options)
    if dry_run():
        return
    is_labels = corpus.kind == "labels"
    prefix, endings = (out / "text", ("txt", "label")) if is_labels else (out / "raw", ("source", "target"))
    for split, rows in found.items():
        for side, ending in enumerate(endings):
            write(prefix / f"{split}.{ending}", "".join(f"{row[side]}\n" for row in rows))
        counts = ", ".join(f"{label}: {n}" for label, n in sorted(Counter(row.target for row in rows).items()))
        print(f"{split}: {len(rows)} examples{f' ({counts})' if is_labels else ''}")
    if corpus.scores:
        beside = ({"group": row.group, "answers": row.answers} for row in found["test"])
        write(out / "test.answers", "".join(f"{json.dumps(known)}\n" for known in beside))


def binarise_text(out: Path, options: argparse.Namespace) -> None:
    """The text in words, or in subwords, as fairseq-train reads it."""
    if options.merges:
        encode(out / "text", ["txt"], out, options)
    say("binarising")
    flags = ["--only-source", "--workers", options.workers]
    preprocess(flags, out / "bin", f"{out}/{'sub' if options.merges else 'text'}/{{}}.txt", out / "preprocess.log")


def binarise_labels(out: Path, options: argparse.Namespace) -> None:
    """Tokenised text in bin/input0 and labels in bin/label, as fairseq's sentence_prediction reads them."""
    say("tokenising")
    for split in SPLITS:
        tokenize(out / "text" / f"{split}.txt", out / "tok" / f"{split}.txt", "en", options.workers)
    say("binarising")
    flags = ["--only-source", "--workers", options.workers]
    words, classes = [*flags, "--nwordssrc", options.vocabulary], [*flags, "--padding-factor", 1]
    preprocess(words, out / "bin" / "input0", f"{out}/tok/{{}}.txt", out / "preprocess.input0.log")
    preprocess(classes, out / "bin" / "label", f"{out}/text/{{}}.label", out / "preprocess.label.log")


# ---- parallel text


def training_corpora(raw: Path, src: str, tgt: str) -> List[Path]:
    """Checks the files of a raw folder; the prefixes of what is trained on, in the order of the names."""
    if not raw.is_dir():
        raise UserError(f"{raw}: no such folder; RAW_DIR holds {{train,valid,test}}.{{{src},{tgt}}}")
    check_files(raw, ("valid", "test"), (src, tgt))
    found = {re.sub(r"\.gz$", "", path.name) for path in raw.iterdir()}
    names = sorted(name[: -len(src) - 1] for name in found if name.endswith(f".{src}"))
    names = [name for name in names if name not in ("valid", "test")]
    if not names:
        raise UserError(f"{raw}/train.{src}: no such file, nor any other training corpus")
    for name in names:
        if re.match("dev|valid|test|newstest", name):
            raise UserError(
                f"{raw}/{name}.{src}: would be trained on, and is a test set by its name; call it valid or test, "
                "or remove it"
            )
    return [raw / name for name in names]


def check_files(raw: Path, splits: Sequence[str], sides: Sequence[str]) -> None:
    """Refuses a folder without one of these files, compressed or not."""
    for name in (f"{split}.{side}" for split in splits for side in sides):
        if not (raw / name).is_file() and not (raw / f"{name}.gz").is_file():
            raise UserError(f"{raw / name}: no such file, nor {name}.gz")


def prepare_test(raw: Path, data: Path) -> Path:
    """Prepares another test set, ``test.{src,tgt}`` of a folder, as prepared data were, with their subwords and words.

    Returns:
        The folder that it is in, below that of the data.
    """
    src, tgt = (read_settings(data / "settings")[side] for side in ("src", "tgt"))
    if not dry_run():
        check_files(raw, ["test"], (src, tgt))
    options = options_of(Corpus("own", "parallel"), {"like": data}, src, tgt)
    size = sum(file.stat().st_size for lang in (src, tgt) for file in raw.glob(f"test.{lang}*"))
    out = data / "tests" / raw.resolve().name
    same = {name: getattr(options, name) or "" for name in OF_LIKE}
    settings = {"src": src, "tgt": tgt, **same, "like": data.resolve(), "from": raw.resolve(), "raw": f"{size} bytes"}
    with folder_of_data(out, settings) as begun:
        if begun:
            binarise(raw, src, tgt, out, options, ["test"])
    return out


def binarise(
    raw: Path, src: str, tgt: str, out: Path, options: argparse.Namespace, splits: Sequence[str] = SPLITS
) -> None:
    """From parallel text in a folder to bin/; each step keeps what an earlier call made."""

    def clean(to: Path, prefixes: Sequence[Path], *flags: object) -> None:
        if not all(Path(f"{to}.{lang}").exists() for lang in (src, tgt)):
            run(["python", ROOT / "scripts" / "clean_pairs.py", src, tgt, to, *prefixes, *flags])

    say("checking the text")
    lowercase = ["--lowercase"] if options.lowercase else []
    sample = ["--sample", options.sample] if options.sample else []
    text = out / "text"
    with clean_after_mistakes(text):
        if "train" in splits:
            clean(
                text / "train", [raw / "train"] if dry_run() else training_corpora(raw, src, tgt), *sample, *lowercase
            )
            clean(text / "valid", [raw / "valid"], *lowercase)
        clean(text / "test", [raw / "test"], *lowercase, "--keep-all")
    if options.subwords == "bpe":
        say("normalising and tokenising")
        text = out / "tok"
        for split in splits:
            jobs = options.workers if split == "train" else 1  # to start them takes longer than a small file
            for name, lang in ((f"{split}.{lang}", lang) for lang in (src, tgt)):
                tokenize(out / "text" / name, text / name, lang, jobs, " -a" if options.dash_splits else "")
    encode(text, [src, tgt], out, options, splits)
    if "train" in splits:
        limits = ["--max-length", options.max_length, "--max-ratio", options.max_ratio]
        clean(out / "sub" / "train", [out / "sub" / "all"], *limits)
    say("binarising")
    flags: List[object] = ["-s", src, "-t", tgt, "--joined-dictionary", "--workers", options.workers]
    flags += ["--srcdict", options.like / "bin" / f"dict.{src}.txt"] if options.like else []
    preprocess(flags, out / "bin", f"{out}/sub/{{}}", out / "preprocess.log", splits)
    for lang in (src, tgt) if not dry_run() else ():
        shutil.copy(out / "text" / f"test.{lang}", out)


# ---- steps


def tokenize(text: Path, to: Path, language: str, jobs: int, flags: str = "") -> None:
    """Normalises and tokenises a text."""
    shell(f"sacremoses --quiet -l {language} -j {jobs} normalize -c tokenize{flags} < {quote(str(text))}", to)


def encode(
    text: Path, sides: Sequence[str], out: Path, options: argparse.Namespace, splits: Sequence[str] = SPLITS
) -> None:
    """The text in subwords, which are learned of the training text's sides together."""
    train = " ".join(quote(f"{text}/train.{side}") for side in sides)
    if options.subwords == "sentencepiece":
        say(f"learning and applying a joint SentencePiece model of {options.merges} pieces")
        tool = f"python {quote(str(ROOT / 'scripts' / 'sentence_pieces.py'))}"
        model, learn = out / "pieces.model", f"{tool} train {options.merges} {train}"
        if options.words:  # each span has a word before it and one or more in it, so that there are fewer than these
            learn += f" --sentinels {max(1, round(options.words * 0.15 / 3)) + 1}"
        apply = f"{tool} encode {quote(str(model))} <"
    else:
        say(f"learning and applying BPE, {options.merges} merges")
        model, learn = out / "codes", f"cat {train} | subword-nmt learn-bpe -s {options.merges}"
        # of several processes it splits a file, not a stream
        several = f"--num-workers {options.workers} -i" if options.workers > 1 else "<"
        apply = f"subword-nmt apply-bpe -c {quote(str(model))} {several}"
    shell(f"cat {quote(str(options.like / model.name))}" if options.like else learn, model)
    for split in splits:
        for side, most in zip(sides, (options.truncate_source, options.truncate_target)):
            name = f"{split}.{side}"
            # training pairs are cleaned again
            to = out / "sub" / (f"all.{side}" if split == "train" and len(sides) > 1 else name)
            cut = f" | cut -d ' ' -f -{most - 1}" if most else ""
            shell(f"{apply} {quote(f'{text}/{name}')}{cut}", to)
            if not dry_run() and count_lines(to) != count_lines(out / "text" / name):
                raise UserError(f"{to}: has more or fewer lines than {out}/text/{name}; remove it and call again")


@contextlib.contextmanager
def folder_of_data(out: Path, settings: Mapping[str, object]) -> Iterator[bool]:
    """Holds a folder of data while it is made, and then marks it as ready. Yields whether there is anything to do.

    Args:
        settings: what it is made with. Data made otherwise are refused, ready or not.
    """
    with locked(out / ".lock"):
        pin_settings(out / "settings", "text/* raw/*", settings)
        if (out / "bin" / "done").exists():
            say(f"{out} is ready, reusing it")
            yield False
            return
        yield True
        if not dry_run() and (out / "bin").is_dir():
            (out / "bin" / "done").touch()
            say(f"{out} is ready")


@contextlib.contextmanager
def clean_after_mistakes(text: Path) -> Iterator[None]:
    """After a mistake in the text it will be mended, and then all of it is read again."""
    try:
        yield
    except UserError:
        for file in text.glob("*"):
            file.unlink()
        raise


def preprocess(flags: Sequence[object], to: Path, prefix: str, log: Path, splits: Sequence[str] = SPLITS) -> None:
    """fairseq-preprocess, into an empty folder, and what it counted.

    Args:
        prefix: of the text, with ``{}`` for train, valid and test.
    """
    if not dry_run():
        shutil.rmtree(to, ignore_errors=True)
    argv = ["fairseq-preprocess", *flags, "--destdir", to]
    run([*argv, *(word for split in splits for word in (f"--{split}pref", prefix.format(split)))], log=log)
    if not dry_run():
        said = re.findall(r"\] (Dictionary: .*|.* sents, .*)", log.read_text())
        print(*dict.fromkeys(re.sub(r"^\S*/", "", line) for line in said), sep="\n")


def count_lines(path: Path) -> int:
    """The number of line ends in a file."""
    with open(path, "rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
