"""Raw text -> binarised data for fairseq-train.

  scripts/prepare.sh CORPUS OUT_DIR [options]            a corpus of these
  scripts/prepare.sh CORPUS de|fr OUT_DIR [options]      parallel text, from English
  scripts/prepare.sh RAW_DIR SRC TGT OUT_DIR [options]   parallel text of your own; pairs of any texts: source target

Parallel text: checked, normalised and tokenised (sacremoses), joint subwords (subword-nmt or SentencePiece), cleaned,
fairseq-preprocess with a joined dictionary. For text of your own RAW_DIR holds valid.SRC, valid.TGT, test.SRC and
test.TGT, one sentence a line. Every other pair of files NAME.SRC and NAME.TGT is trained on, in the order of the names.
{parallel}
Text for language models: words between spaces, or BPE (--merges); each line ends with </s>.
{text}
Texts with labels: the first column is the label, the text all others, of imdb the last. A first line whose label is
"label", "class" or "class index" is taken for headings, unless the training set has that label. Without a validation
set a tenth of the training set is held out. The text loses markup, is lowercased and tokenised.
{labels}
Pairs of texts, prepared as parallel text is, by default with SentencePiece; columns and form: recipes/corpora.yaml. The
source of a reply is the persona, if there is one, and the last utterances, with | between them; of one that is cut the
end is kept. Without a validation set a tenth of the training set is held out.
{pairs}
Text to denoise (T5): blocks of --words words lose 15 % of them, in spans of 3 on average (scripts/corrupt_spans.py).
{spans}
--from names a folder with the text, any file of it also as .gz; without it, the text is downloaded. It is checked by
SHA-256 where that is known (recipes/corpora.sha256). Of an archive in --from, the text in it is checked, not the
archive. OUT_DIR receives bin/ for fairseq-train, the codes of subwords, the test set to score against, and settings,
which evaluate.sh reads. Every step writes its file atomically, so a second call goes on where the first one ended, and
a finished OUT_DIR is kept. DRY_RUN=1 shows the commands only.
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
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from . import corpora
from .command import (
    ROOT,
    Parser,
    UserError,
    cores,
    dry_run,
    existing_folder,
    folder,
    integer,
    locked,
    pin_settings,
    read_settings,
    run,
    say,
    shell,
    write,
)
from .corpora import CORPORA, SPLITS, Corpus
from .examples import Examples, read

AS_PARALLEL = ("parallel", "pairs", "spans")
PIECES = {"merges": 10000, "subwords": "sentencepiece", "max-length": 0, "max-ratio": "0"}
KINDS: Dict[str, Tuple[str, Dict[str, Any]]] = {  # {kind of a corpus: (its task, defaults that are not empty)}
    "parallel": ("translation", {**PIECES, "subwords": "bpe", "max-length": 250}),
    "text": ("language_modeling", {}),
    "labels": ("sentence_prediction", {"vocabulary": 30000}),
    "pairs": ("text_to_text", PIECES),
    "spans": ("denoising", {**PIECES, "words": 64}),
}


def ratio(text: str) -> str:
    """The type of --max-ratio, kept as it is written."""
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text}: must be a number")
    return text


def number(minimum: int, help: str) -> Dict[str, Any]:
    return {"type": integer(minimum), "metavar": "N", "help": help}


CUT = "cut {} after N subwords, the end's own included; "
RATIO = {"type": ratio, "metavar": "R", "help": "largest ratio of a training pair's lengths; 0: any"}
MERGES = "BPE merges, or SentencePiece's vocabulary (default: 10000; wmt14 40000, lm1b 32000, other text of `lm` none)"
SUBWORDS = "(default: bpe for parallel text, which RAW_DIR source target is too; else sentencepiece)"
LENGTH = "most subwords on a side of a training pair; 0: any number (default: 250 for parallel text, else 0)"
SOURCE = CUT.format("sources") + "translate.sh cuts them too where they are SentencePiece's"
TARGET = CUT.format("targets") + "those that are scored against are whole"
KEEP_END = "of a source that is cut keep the end: in a dialogue, the last utterances"
LIKE = "with the subwords and words of that data, tokenised and lowercased as they are, to fine-tune a model of it"
OPTIONS: Dict[str, Tuple[Sequence[str], Dict[str, Any]]] = {  # {option: kinds of corpora that have it, argparse's}
    "merges": ((*AS_PARALLEL, "text"), number(1, MERGES)),
    "subwords": (AS_PARALLEL, {"choices": ("bpe", "sentencepiece"), "help": SUBWORDS}),
    "dash-splits": (
        AS_PARALLEL,
        {"action": "store_true", "help": "split words at hyphens when tokenising (Moses' -a)"},
    ),
    "lowercase": (AS_PARALLEL, {"action": "store_true", "help": "lowercase all text"}),
    "max-length": (AS_PARALLEL, number(0, LENGTH)),
    "max-ratio": (AS_PARALLEL, RATIO),
    "truncate-source": (AS_PARALLEL, number(2, SOURCE)),
    "truncate-target": (AS_PARALLEL, number(2, TARGET)),
    "keep-end": (("parallel", "pairs"), {"action": "store_true", "help": KEEP_END}),
    "like": (AS_PARALLEL, {"type": Path, "metavar": "DATA_DIR", "help": LIKE}),
    "history": (("pairs",), number(1, "utterances before the one to be written (default: 5)")),
    "words": (("spans",), number(2, "of a block (default: 64)")),
    "examples": (("labels",), number(10, "training and validation examples, drawn (default: all)")),
    "valid": (("labels",), number(1, "examples held out for validation (default: a tenth)")),
    "vocabulary": (("labels",), number(1, "words (default: 30000)")),
    "sample": ((*AS_PARALLEL, "text"), number(1, "only the first N lines of each training corpus, for a trial")),
    "mirror": (("parallel",), {"metavar": "URL", "help": "wmt14: of statmt.org's files"}),
    "workers": (tuple(KINDS), number(1, "processes (default: all cores)")),
}
MADE = ("archives", "raw", "text", "tok", "sub", "bin")  # folders of OUT_DIR
MADE_FILES = ("codes", "pieces.model", "test.answers")
# the beginning of a name, or a word of it, that no training corpus has
HELD_OUT_WORDS = r"(news)?(dev|test)(test|set)?|tst|val(id(ation)?)?|eval(uation)?|held[-_.]?out"
HELD_OUT = rf"^(dev|valid|test)|(^|[^a-z])({HELD_OUT_WORDS})([^a-z]|$)"
NOT_PINNED = ("mirror", "workers")  # data made with other values are the same
OF_LIKE = ("subwords", "merges", "dash_splits", "lowercase")  # options that --like takes over


def as_typed(option: str, value: object) -> str:
    """An option as it is typed; a switch has no value."""
    return f"--{option}" if value is True else f"--{option} {value}"


def options_of(corpus: Corpus, given: Mapping[str, Any], src: str, tgt: str) -> argparse.Namespace:
    """All options, with the defaults of a corpus; those that it has not are None, and refused if they are given."""
    found, usual = argparse.Namespace(), {**KINDS[corpus.kind][1], "workers": cores(), **corpus.options}
    for name, (kinds, _) in OPTIONS.items():
        value = given.get(name)
        is_ignored = (name == "history" and name not in usual) or (name == "mirror" and not corpus.archives)
        if value is not None and (corpus.kind not in kinds or is_ignored):
            what = corpus.name if corpus.name in CORPORA else "parallel text"
            raise UserError(f"{as_typed(name, value)}: not for {what}; leave it out")
        setattr(found, name.replace("-", "_"), usual.get(name) if value is None else value)
    if found.like:
        settings = read_settings(found.like / "settings")
        if not dry_run() and not (found.like / "bin" / "done").exists():
            raise UserError(f"--like {found.like}: not prepared, or not to its end")
        if settings and {settings.get("src"), settings.get("tgt")} != {src, tgt}:
            raise UserError(f"--like {found.like}: is not parallel text of {src} and {tgt}")
        for name in OF_LIKE:
            option = name.replace("_", "-")
            theirs, value = settings.get(name, getattr(found, name)), given.get(option)
            if settings and value is not None and str(value) != str(theirs):
                flag = as_typed(option, value)
                raise UserError(f"{flag}: --like {found.like} has {theirs or 'none'}; leave it out")
            setattr(found, name, theirs)
    return found


def main(argv: Sequence[str]) -> None:
    """prepare.sh."""
    parser = Parser("prepare", (__doc__ or "").format(**{kind: corpora.say_of_corpora(kind) for kind in KINDS}))
    parser.add_argument("what", nargs="+", metavar="CORPUS|RAW_DIR … OUT_DIR")
    parser.add_argument("--from", dest="source", type=existing_folder, metavar="DIR", help="the corpus at hand")
    for option, (_, settings) in OPTIONS.items():
        parser.add_argument(f"--{option}", dest=option, default=None, **settings)
    given = vars(parser.parse_args(argv))
    words, source = given.pop("what"), given.pop("source")
    try:
        out = folder(words[-1])
    except argparse.ArgumentTypeError as error:
        parser.error(f"OUT_DIR: {error}")
    name, corpus = words[0], CORPORA.get(words[0])
    if not corpus and len(words) != 4 and not Path(name).is_dir():
        known = ", ".join(CORPORA)
        raise UserError(f"{name}: neither a corpus nor a folder of parallel text; the corpora are {known}")
    wanted = "RAW_DIR SRC TGT OUT_DIR"
    if corpus:
        wanted = f"{name} de|fr OUT_DIR" if corpus.kind == "parallel" else f"{name} OUT_DIR"
    if len(words) != len(wanted.split()) or ("de|fr" in wanted and words[1] not in ("de", "fr")):
        raise UserError(f"{' '.join(words)}: call prepare.sh {wanted}; see scripts/prepare.sh --help")
    if source and not corpus:
        raise UserError(f"--from {source}: RAW_DIR is the folder of the text; leave it out")
    if corpus:
        prepare(name, "-".join(["en", *words[1:-1]]), out, source, given)
    else:
        for language in words[1:-1]:
            if not re.fullmatch(r"\w+", language):
                raise UserError(f"{language}: the name of a language has letters, digits and _ only, as in pt_BR")
        prepare("own", "-".join(words[1:-1]), out, Path(name), given)


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
    check_folders(source, out, (src, tgt))
    if source and corpus.script:
        raise UserError(f"--from {source}: {name} is made on the spot; leave it out")
    options = options_of(corpus, given, src, tgt)
    recorded, done = read_settings(out / "settings"), (out / "bin" / "done").exists()
    if not source and name in CORPORA and recorded.get("from"):
        source = Path(recorded["from"])  # goes on as it was begun
    if not source and done and name not in CORPORA:
        return say(f"{out} is ready, reusing it")
    if not source and not dry_run() and not done and not (text.urls or text.archives or text.sets or text.script):
        wanted = f", {{train,valid,test}}.{{{src},{tgt}}}" if corpus.kind == "parallel" else ""
        raise UserError(f"{name}: nothing to download; name the folder of its text by --from{wanted}")
    if given.get("keep-end") and not options.truncate_source:
        raise UserError("--keep-end: nothing is cut; give --truncate-source too, or leave it out")
    if options.like and corpus.labels and not dry_run():
        check_labels(corpus, options)
    job = Job(corpus, text, source, src, tgt, out, options)
    raw = recorded.get("raw", "")
    if source and (source.is_dir() or not done):  # data that are ready need their text no more
        examples, found = text_at_hand(job, source)
        job, raw = job._replace(examples=examples), found or raw

    is_own = (src, tgt) == ("source", "target") and corpus.kind == "parallel"
    settings: Dict[str, object] = {"task": "text_to_text" if is_own else KINDS[corpus.kind][0], "corpus": name}
    if corpus.kind in AS_PARALLEL:
        settings.update(src=src, tgt=tgt)
    for option, (kinds, _) in OPTIONS.items():
        if corpus.kind in kinds and option not in NOT_PINNED:
            value = getattr(options, option.replace("-", "_"))
            value = value.resolve() if isinstance(value, Path) else value
            settings[option.replace("-", "_")] = "" if value is None else value
    # a text whose SHA-256 is known is checked by it when it is taken
    is_text = corpus.kind not in ("labels", "pairs")
    if not is_text or not any(known.startswith(f"{text.name}/test.") for known in corpora.CHECKSUMS):
        settings.update({"from": source.resolve() if source else "", "raw": raw})
    once(out, settings, lambda: make(job))


def check_folders(source: Optional[Path], out: Path, sides: Sequence[str]) -> None:
    """Refuses an OUT_DIR where the text, a training or what others have made would be overwritten, removed or used."""
    text, made = source and source.resolve(), [out.resolve() / name for name in MADE]
    if text and (text == out.resolve() or {text, *text.parents} & {*made}):
        raise UserError(f"{out}: {source} has the text, whose files would be overwritten; name another folder")
    if "arch" in read_settings(out / "settings"):
        raise UserError(f"{out}: is the folder of a training; name another folder")
    made += [out / name for name in (*MADE_FILES, *(f"test.{side}" for side in sides))]
    for path in made if not (out / "settings").exists() else ():
        if path.exists() and path.name != "archives":  # a download may be put there by hand
            raise UserError(f"{path}: was not made by prepare.sh, which would use or overwrite it; name another folder")


class Job(NamedTuple):
    """What is prepared."""

    corpus: Corpus
    text: Corpus  # whose files are read: another one, of text to denoise
    source: Optional[Path]  # the folder of the text; None: it is downloaded
    src: str
    tgt: str
    out: Path
    options: argparse.Namespace
    examples: Examples = {}


def text_at_hand(job: Job, source: Path) -> Tuple[Examples, str]:
    """The examples of a folder, and what tells its text from another. Mistakes are told before anything is written."""
    kind, files, options = job.corpus.kind, [], job.options
    if kind != "parallel" and corpora.has_archive(job.text, source):
        files = list(filter(Path.exists, (source / Path(url).name for url in job.text.urls)))
    elif kind in ("labels", "pairs"):
        found = read(job.corpus, source, options.history, options.examples, options.valid)
        rows = {split: [(e.target, e.source) if kind == "labels" else e for e in found[split]] for split in found}
        return found, hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    elif kind in ("text", "spans"):
        files = [path for paths in corpora.files_of(job.text, source).values() for path in paths]
    elif job.corpus.name not in CORPORA and not dry_run():
        training_corpora(source, job.src, job.tgt)
        files = [file for lang in (job.src, job.tgt) for end in ("", ".gz") for file in source.glob(f"*.{lang}{end}")]
    return {}, corpora.digest(*files) if files else ""


# ---- the text of each kind of corpus, and its data


def make(job: Job) -> None:
    """The text of a corpus, and its data."""
    kind, raw = job.corpus.kind, job.out / "raw"
    if kind == "text":
        take_text(job, job.out / "text", job.options.sample)
        binarise_text(job)
    elif kind == "labels":
        write_examples(job, job.out / "text", ("txt", "label"))
        binarise_labels(job)
    else:
        if kind == "pairs":
            write_examples(job, raw, ("source", "target"))
        elif kind == "spans":
            take_text(job, raw / "text")
            for seed, split in enumerate(SPLITS):
                if not (raw / f"{split}.target").exists():
                    script = ["python", ROOT / "scripts" / "corrupt_spans.py", raw / "text" / f"{split}.txt"]
                    run([*script, raw / split, "--words", job.options.words, "--seed", seed])
        elif job.corpus.name in CORPORA:
            say("the corpora")
            corpora.take_parallel(job.corpus, job.tgt, job.out, job.source, job.options.mirror)
        else:
            raw = job.source or Path("DIR")
        binarise(job, raw)


def take_text(job: Job, to: Path, sample: Optional[int] = None) -> None:
    """Makes {train,valid,test}.txt of a corpus of text in a folder."""
    say("the text")
    archives = job.out / "archives"
    files = corpora.files_of(job.text, corpora.unpacked(job.text, archives, job.source))
    with clean_after_mistakes(to):
        for split, paths in files.items():
            name = f"{split}.txt"
            corpora.take(f"{job.text.name}/{name}", paths, to / name, archives, sample if split == "train" else None)


def write_examples(job: Job, folder: Path, sides: Sequence[str]) -> None:
    """A file for each side. What is known beside the test set's pairs is kept in test.answers."""
    found, options = job.examples, job.options
    if not found:
        archives = corpora.unpacked(job.corpus, job.out / "archives", job.source)
        if not dry_run():
            found = read(job.corpus, archives, options.history, options.examples, options.valid)
    if dry_run():
        return
    for split, rows in found.items():
        for at, side in enumerate(sides):
            write(folder / f"{split}.{side}", "".join(f"{row[at]}\n" for row in rows))
        counts = sorted(Counter(row.target for row in rows).items()) if "label" in sides else []
        print(f"{split}: {len(rows)} examples", *(f"{label}: {n}" for label, n in counts), sep=", ")
        if split == "test" and job.corpus.scores:
            beside = (json.dumps({"group": row.group, "answers": row.answers}) for row in rows)
            write(job.out / "test.answers", "".join(f"{line}\n" for line in beside))


def binarise_text(job: Job) -> None:
    """The text in words, or in subwords, as fairseq-train reads it."""
    if job.options.merges:
        encode(job, job.out / "text", ["txt"])
    say("binarising")
    text = job.out / ("sub" if job.options.merges else "text")
    preprocess(job, ["--only-source", "--workers", job.options.workers], f"{text}/{{}}.txt")


def binarise_labels(job: Job) -> None:
    """Tokenised text in bin/input0 and labels in bin/label, as fairseq's sentence_prediction reads them."""
    out, options = job.out, job.options
    say("tokenising")
    for split in SPLITS:
        tokenize(job, f"{split}.txt", "en", options.workers)
    say("binarising")
    flags = ["--only-source", "--workers", options.workers]
    preprocess(job, [*flags, "--nwordssrc", options.vocabulary], f"{out}/tok/{{}}.txt", "input0")
    preprocess(job, [*flags, "--padding-factor", 1], f"{out}/text/{{}}.label", "label")


# ---- parallel text


def training_corpora(raw: Path, src: str, tgt: str) -> List[Path]:
    """Checks the files of a raw folder; the prefixes of what is trained on, in the order of the names."""
    if not raw.is_dir():
        raise UserError(f"{raw}: no such folder; RAW_DIR holds {{train,valid,test}}.{{{src},{tgt}}}")
    check_files(raw, ("valid", "test"), (src, tgt))
    found = {re.sub(r"\.gz$", "", path.name) for path in raw.iterdir()}
    names = sorted({name[: -len(src) - 1] for name in found if name.endswith(f".{src}")} - {"", "valid", "test"})
    if not names:
        raise UserError(f"{raw}/train.{src}: no such file, nor any other training corpus")
    for name in names:
        if re.search(HELD_OUT, name.lower()):
            raise UserError(
                f"{raw}/{name}.{src}: would be trained on, as all files but valid and test are, and is a test set by "
                "its name; call it valid or test, or remove it"
            )
    return [raw / name for name in names]


def check_files(raw: Path, splits: Sequence[str], sides: Sequence[str]) -> None:
    """Refuses a folder without one of these files, compressed or not."""
    for name in (f"{split}.{side}" for split in splits for side in sides):
        if not (raw / name).is_file() and not (raw / f"{name}.gz").is_file():
            raise UserError(f"{raw / name}: no such file, nor {name}.gz")


def prepare_test(raw: Path, data: Path) -> Path:
    """Prepares ``test.{src,tgt}`` of a folder with the subwords and words of data, in a folder below theirs."""
    found = read_settings(data / "settings")
    src, tgt = found["src"], found["tgt"]
    if not dry_run():
        check_files(raw, ["test"], (src, tgt))
    corpus = Corpus("own", "parallel")
    cuts = ("truncate_source", "truncate_target", "keep_end")
    given = {name.replace("_", "-"): int(found[name]) for name in cuts[:2] if found.get(name)}
    options = options_of(corpus, {"like": data, "keep-end": bool(found.get("keep_end")), **given}, src, tgt)
    files = [raw / f"test.{lang}{end}" for lang in (src, tgt) for end in ("", ".gz")]
    out = data / "tests" / re.sub("[,:]", "_", raw.resolve().name)  # where fairseq divides a path
    check_folders(raw, out, (src, tgt))
    same = {name: getattr(options, name) or "" for name in (*OF_LIKE, *cuts)}
    settings = {"src": src, "tgt": tgt, **same, "like": digest_of(data), "from": raw.resolve()}
    settings["raw"] = corpora.digest(*filter(Path.exists, files))
    job = Job(corpus, corpus, raw, src, tgt, out, options)
    once(out, settings, lambda: binarise(job, raw, ["test"]))
    return out


def binarise(job: Job, raw: Path, splits: Sequence[str] = SPLITS) -> None:
    """From parallel text in a folder to bin/; each step keeps what an earlier call made."""
    src, tgt, out, options = job.src, job.tgt, job.out, job.options

    def clean(to: Path, prefixes: Sequence[Path], *flags: object) -> None:
        if not all(Path(f"{to}.{lang}").exists() for lang in (src, tgt)):
            run(["python", ROOT / "scripts" / "clean_pairs.py", src, tgt, to, *prefixes, *flags])

    say("checking the text")
    lowercase = ["--lowercase"] if options.lowercase else []
    sample = ["--sample", options.sample] if options.sample else []
    text = out / "text"
    with clean_after_mistakes(text):
        if "train" in splits:
            prefixes = [raw / "train"] if dry_run() else training_corpora(raw, src, tgt)
            clean(text / "train", prefixes, *sample, *lowercase)
            clean(text / "valid", [raw / "valid"], *lowercase)
        clean(text / "test", [raw / "test"], *lowercase, "--keep-all")
    if options.subwords == "bpe":
        say("normalising and tokenising")
        text = out / "tok"
        for split in splits:
            for lang in (src, tgt):
                # to start several takes longer than a small file
                tokenize(job, f"{split}.{lang}", lang, options.workers if split == "train" else 1)
    encode(job, text, [src, tgt], splits)
    if "train" in splits:
        limits = ["--max-length", options.max_length, "--max-ratio", options.max_ratio]
        clean(out / "sub" / "train", [out / "sub" / "all"], *limits)
    say("binarising")
    flags: List[object] = ["-s", src, "-t", tgt, "--joined-dictionary", "--workers", options.workers]
    flags += ["--srcdict", options.like / "bin" / f"dict.{src}.txt"] if options.like else []
    preprocess(job, flags, f"{out}/sub/{{}}", splits=splits)
    for lang in (src, tgt) if not dry_run() else ():
        shutil.copy(out / "text" / f"test.{lang}", out)


def check_labels(corpus: Corpus, options: argparse.Namespace) -> None:
    """Refuses labels with subwords that the words of other data have not: their model could not write them."""
    like = options.like
    lines = (like / "bin" / "dict.target.txt").read_text(encoding="utf-8").splitlines()
    known = {line.rsplit(" ", 1)[0] for line in lines}
    split = subwords_of(like, options.subwords)
    for label in corpus.labels.values():
        unknown = {*split(label.lower() if options.lowercase else label)} - known
        if unknown:
            raise UserError(
                f"--like {like}: its words have no {', '.join(sorted(unknown))}, and "
                f'the label "{label}" of {corpus.name} is written with them; prepare without --like, or with another '
                "label in recipes/corpora.yaml"
            )


def subwords_of(data: Path, kind: str) -> Callable[[str], Sequence[str]]:
    """What splits a text by the subwords of prepared data."""
    if kind == "sentencepiece":
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_file=str(data / "pieces.model"))
        return lambda text: [str(piece) for piece in model.encode(text, out_type=str)]
    from subword_nmt.apply_bpe import BPE

    with open(data / "codes", encoding="utf-8") as codes:
        bpe = BPE(codes)
    return lambda text: str(bpe.process_line(text)).split()


def last_words(subwords: Sequence[str], most: int, kind: str) -> Sequence[str]:
    """The last `most` subwords, or fewer, from the beginning of a word on. `kind`: bpe or sentencepiece."""

    def begins_word(i: int) -> bool:
        if kind == "sentencepiece":
            return subwords[i].startswith("\u2581")
        return not subwords[i - 1].endswith("@@")

    first = max(0, len(subwords) - most)
    begin = first and next(filter(begins_word, range(first, len(subwords))), first)  # first: all are of one word
    return subwords[begin:]


# ---- steps


def tokenize(job: Job, name: str, language: str, processes: int) -> None:
    """Normalises and tokenises a file of the folder text, to the folder tok."""
    dashes = " -a" if job.options.dash_splits else ""
    tool = f"sacremoses --quiet -l {language} -j {processes} normalize -c tokenize{dashes}"
    shell(f"{tool} < {quote(str(job.out / 'text' / name))}", job.out / "tok" / name)


def encode(job: Job, text: Path, sides: Sequence[str], splits: Sequence[str] = SPLITS) -> None:
    """The text in subwords, which are learned of the training text's sides together."""
    options, out = job.options, job.out
    train = " ".join(quote(f"{text}/train.{side}") for side in sides)
    if options.subwords == "sentencepiece":
        what = f"a joint SentencePiece model of {options.merges} pieces"
        tool = f"python {quote(str(ROOT / 'scripts' / 'sentence_pieces.py'))}"
        model, learn = out / "pieces.model", f"{tool} train {options.merges} {train}"
        if options.words:  # a mark for each span of a block, and one more, as corrupt_spans.py rounds twice
            learn += f" --sentinels {max(1, round(options.words * 0.15 / 3)) + 1}"
        apply = f"{tool} encode {quote(str(model))} <"
    else:
        what = f"BPE, {options.merges} merges"
        model, learn = out / "codes", f"cat {train} | subword-nmt learn-bpe -s {options.merges}"
        # of several processes it splits a file, not a stream
        several = f"--num-workers {options.workers} -i" if options.workers > 1 else "<"
        apply = f"subword-nmt apply-bpe -c {quote(str(model))} {several}"
    say(f"applying the subwords of {options.like}" if options.like else f"learning and applying {what}")
    shell(f"cat {quote(str(options.like / model.name))}" if options.like else learn, model)
    for split in splits:
        for side, most in zip(sides, (options.truncate_source, options.truncate_target)):
            # training pairs are cleaned once more
            to = out / "sub" / f"{'all' if split == 'train' and len(sides) == 2 else split}.{side}"
            cut = f" | cut -d ' ' -f -{most - 1}" if most else ""
            if most and options.keep_end and side == sides[0]:
                cut = f" | python {quote(str(ROOT / 'scripts' / 'last_words.py'))} {most - 1} {options.subwords}"
            shell(f"{apply} {quote(f'{text}/{split}.{side}')}{cut}", to)
            whole = out / "text" / f"{split}.{side}"
            if not dry_run() and count_lines(to) != count_lines(whole):
                raise UserError(f"{to}: has more or fewer lines than {whole}; remove it and call again")


def once(out: Path, settings: Mapping[str, object], make_data: Callable[[], None]) -> None:
    """Makes a folder of data unless it is ready, which a file marks. Data made with other settings are refused."""
    with locked(out / ".lock"):
        # learning subwords may fail; then other settings of them may be tried on the same text
        of_subwords = dict.fromkeys(("merges", "subwords"), "codes pieces.model sub/* bin/*")
        pin_settings(out / "settings", "text/* raw/* tok/* sub/* bin/*", settings, of_subwords)
        if (out / "bin" / "done").exists():
            return say(f"{out} is ready, reusing it")
        make_data()
        if not dry_run() and (out / "bin").is_dir():
            (out / "bin" / "done").touch()
            say(f"{out} is ready")


@contextlib.contextmanager
def clean_after_mistakes(text: Path) -> Iterator[None]:
    """After a mistake in the text it will be mended, and then all of it is read again."""
    try:
        yield
    except UserError:
        shutil.rmtree(text, ignore_errors=True)
        raise


def preprocess(job: Job, flags: Sequence[object], text: str, part: str = "", splits: Sequence[str] = SPLITS) -> None:
    """fairseq-preprocess of a text, ``{}`` for each split, into the empty folder bin or a part of it; its counts."""
    to, log = job.out / "bin" / part, job.out / f"preprocess.{part}.log".replace("..", ".")
    argv = ["fairseq-preprocess", *flags, "--destdir", to]
    if not dry_run():
        shutil.rmtree(to, ignore_errors=True)
    prefixes = (word for split in splits for word in (f"--{split}pref", text.format(split)))
    run([*argv, *prefixes], log=log)
    if not dry_run():
        said = re.findall(r"\] (Dictionary: .*|.* sents, .*)", log.read_text())
        print(*dict.fromkeys(re.sub(r"^\S*/", "", line) for line in said), sep="\n")


def digest_of(data: Path) -> str:
    """What tells prepared data from others: their settings and words."""
    files = [data / "settings", *(data / "bin").glob("**/dict*.txt")]
    return corpora.digest(*(file for file in files if file.exists()))[:16]


def count_lines(path: Path) -> int:
    """The number of line ends in a file."""
    with open(path, "rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
