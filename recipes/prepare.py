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
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from . import labels, pairs
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


class Option(NamedTuple):
    """An option of prepare.sh."""

    kinds: Sequence[str]  # of corpora that have it
    default: Mapping[str, Any]  # {kind: its default, if it is not empty}
    settings: Mapping[str, Any]  # of argparse
    is_pinned: bool = True  # data made with another value are refused


def number(minimum: int, help: str) -> Dict[str, Any]:
    return {"type": integer(minimum), "metavar": "N", "help": help}


CUT = "cut {} after N subwords, the end's own included; "
OPTIONS = {
    "merges": Option(
        (*AS_PARALLEL, "text"),
        dict.fromkeys(AS_PARALLEL, 10000),
        number(1, "BPE merges, or SentencePiece's vocabulary (default: 10000; of text for language models none)"),
    ),
    "subwords": Option(
        AS_PARALLEL,
        {"parallel": "bpe", "pairs": "sentencepiece", "spans": "sentencepiece"},
        {"choices": ("bpe", "sentencepiece")},
    ),
    "dash-splits": Option(
        AS_PARALLEL, {}, {"action": "store_true", "help": "split words at hyphens when tokenising (Moses' -a)"}
    ),
    "lowercase": Option(AS_PARALLEL, {}, {"action": "store_true", "help": "lowercase all text"}),
    "max-length": Option(
        AS_PARALLEL,
        {"parallel": 250, "pairs": 0, "spans": 0},
        number(0, "most subwords on a side of a training pair (default: 250; of pairs of texts any number, 0)"),
    ),
    "max-ratio": Option(
        AS_PARALLEL,
        dict.fromkeys(AS_PARALLEL, "0"),
        {"type": ratio, "metavar": "R", "help": "largest ratio of a training pair's lengths; 0: any"},
    ),
    "truncate-source": Option(
        AS_PARALLEL,
        {},
        number(2, CUT.format("sources") + "translate.sh cuts them too where they are SentencePiece's"),
    ),
    "truncate-target": Option(
        AS_PARALLEL, {}, number(2, CUT.format("targets") + "those that are scored against are whole")
    ),
    "like": Option(
        AS_PARALLEL,
        {},
        {"type": Path, "metavar": "DATA_DIR", "help": "with the subwords, words and options of that data, for "
         "fine-tuning a model of it (train.sh --init)"},
    ),
    "history": Option(("pairs",), {}, number(1, "utterances before the one to be written (default: 5)")),
    "words": Option(("spans",), {"spans": 64}, number(2, "of a block (default: 64)")),
    "examples": Option(("labels",), {}, number(10, "training and validation examples, drawn (default: all)")),
    "valid": Option(("labels",), {}, number(1, "examples held out for validation (default: a tenth)")),
    "vocabulary": Option(("labels",), {"labels": 30000}, number(1, "words (default: 30000)")),
    "sample": Option(
        (*AS_PARALLEL, "text"), {}, number(1, "only the first N lines of each training corpus, for a trial")
    ),
    "mirror": Option(("parallel",), {}, {"metavar": "URL", "help": "wmt14: of statmt.org's files"}, False),
    "workers": Option(tuple(TASKS), {}, number(1, "processes (default: all cores)"), False),
}  # fmt: skip


def options_of(corpus: Corpus, given: Mapping[str, Any]) -> argparse.Namespace:
    """All options that a corpus has, with their defaults.

    Raises:
        UserError: one that is given is not for this corpus.
    """
    found: Dict[str, Any] = {}
    for name, option in OPTIONS.items():
        value, has_it = given.get(name), corpus.kind in option.kinds
        if name == "history":
            has_it = name in corpus.options
        if not has_it and value is not None:
            raise UserError(f"--{name} {value}: not for {corpus.name}; leave it out")
        usual = corpus.options.get(name, option.default.get(corpus.kind)) if has_it else None
        found[name.replace("-", "_")] = usual if value is None else value
    found["workers"] = found["workers"] or cores()
    return argparse.Namespace(**found)


def main(argv: Sequence[str]) -> None:
    """prepare.sh."""
    lists = {kind: say_of_corpora(kind) for kind in TASKS}
    parser = Parser("prepare", (__doc__ or "").format(**lists))
    parser.add_argument("what", nargs="+", metavar="CORPUS|RAW_DIR … OUT_DIR")
    parser.add_argument("--from", dest="source", type=existing_folder, metavar="DIR", help="the corpus at hand")
    for name, option in OPTIONS.items():
        parser.add_argument(f"--{name}", dest=name, default=None, **option.settings)
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
    options = options_of(corpus, given)
    src, tgt = dataset.split("-") if corpus.kind == "parallel" else ("source", "target")
    if src == tgt:
        raise UserError(f"SRC and TGT are both {src}")
    if options.like:
        take_options(options, src, tgt)
    recorded, done = read_settings(out / "settings"), (out / "bin" / "done").exists()
    if not source and name in CORPORA and recorded.get("from"):
        source = Path(recorded["from"])  # goes on as it was begun
    if not source and done and name not in CORPORA:
        return say(f"{out} is ready, reusing it")
    if not source and not dry_run() and not done and not has_home(corpus):
        wanted = f", {{train,valid,test}}.{{{src},{tgt}}}" if corpus.kind == "parallel" else ""
        raise UserError(f"{name}: nothing to download; name the folder of its text by --from{wanted}")
    examples: Mapping[str, Sequence[Any]] = {}
    files: List[Path] = []
    if source and (not done or source.is_dir()):  # for data that are ready only as long as its folder is there
        examples, files = text_at_hand(corpus, source, src, tgt, options)
    is_own = (src, tgt) == ("source", "target") and corpus.kind == "parallel"
    settings: Dict[str, object] = {"task": "text_to_text" if is_own else TASKS[corpus.kind], "corpus": name}
    if corpus.kind in AS_PARALLEL:
        settings.update(src=src, tgt=tgt)
    for key, option in ((name.replace("-", "_"), option) for name, option in OPTIONS.items()):
        if option.is_pinned and corpus.kind in option.kinds:
            value = getattr(options, key)
            settings[key] = "" if value is None else value.resolve() if isinstance(value, Path) else value
    if not any(known.startswith(f"{text_corpus(corpus).name}/test.") for known in CHECKSUMS):  # which tell the text
        settings["from"] = source.resolve() if source else ""
        size = sum(file.stat().st_size for file in files)
        digest = hashlib.sha256(json.dumps(examples).encode()).hexdigest() if examples else ""
        settings["raw"] = digest or (f"{size} bytes" if size else recorded.get("raw", ""))
    with folder_of_data(out, settings) as begun:
        if begun:
            MAKERS[corpus.kind](Job(corpus, out, source, src, tgt, options, examples))


def has_home(corpus: Corpus) -> bool:
    """Whether the text can be downloaded, or made."""
    return any((text_corpus(corpus).urls, corpus.archives, corpus.sets, corpus.script))


def text_at_hand(
    corpus: Corpus, source: Path, src: str, tgt: str, options: argparse.Namespace
) -> Tuple[Mapping[str, Sequence[Any]], List[Path]]:
    """(the examples, or else the files) of a folder, so that a mistake is told before anything is written."""
    text = text_corpus(corpus)
    if corpus.kind in ("labels", "pairs"):
        return read_examples(corpus, source, options), []
    if corpus.kind in ("text", "spans") and not has_archive(text, source):
        return {}, [path for paths in files_of(text, source).values() for path in paths]
    if corpus.name not in CORPORA and not dry_run():
        training_corpora(source, src, tgt)
        return {}, [file for lang in (src, tgt) for end in ("", ".gz") for file in source.glob(f"*.{lang}{end}")]
    return {}, []


def text_corpus(corpus: Corpus) -> Corpus:
    """The corpus whose files are read: another one's, where it is text to denoise."""
    return CORPORA[corpus.of] if corpus.of else corpus


def read_examples(corpus: Corpus, folder: Path, options: argparse.Namespace) -> Mapping[str, Sequence[Any]]:
    """{split: its examples} of a corpus that is read as a whole; nothing of other kinds."""
    if corpus.kind == "labels":
        return labels.read(corpus, folder, options.examples, options.valid)
    return pairs.read(corpus, folder, options.history) if corpus.kind == "pairs" else {}


class Job(NamedTuple):
    """What is to be prepared."""

    corpus: Corpus
    out: Path
    source: Optional[Path]  # the folder of the text; None: it is downloaded
    src: str
    tgt: str
    options: argparse.Namespace
    examples: Mapping[str, Sequence[Any]]  # of `read_examples`, once they have been read

    def all_examples(self) -> Mapping[str, Sequence[Any]]:
        """Those that have been read, or else those of the downloaded files."""
        if self.examples:
            return self.examples
        folder = unpacked(self.corpus, self.out / "archives")
        return {} if dry_run() else read_examples(self.corpus, folder, self.options)


# ---- the text of each kind of corpus, and its subwords


def make_parallel(job: Job) -> None:
    """Of parallel text."""
    raw = job.out / "raw"
    if job.corpus.name in CORPORA:
        say("the corpora")
        take_parallel(job.corpus, job.tgt, job.out, job.source, job.options.mirror)
    else:
        raw = job.source or Path("DIR")
    binarise(raw, job.src, job.tgt, job.out, job.options)


def make_text(job: Job) -> None:
    """Of text for language models."""
    take_text(job.corpus, job.out, job.source, job.out / "text", job.options.sample)
    binarise_text(job.out, job.options)


def binarise_text(out: Path, options: argparse.Namespace) -> None:
    """The text in words, or in subwords, as fairseq-train reads it."""
    text = out / "text"
    if options.merges:
        say(f"learning and applying BPE, {options.merges} merges")
        shell(f"subword-nmt learn-bpe -s {options.merges} < {quote(f'{text}/train.txt')}", out / "codes")
        encode = apply_bpe(out / "codes", options.workers)
        for split in SPLITS:
            shell(f"{encode} {quote(f'{text}/{split}.txt')}", out / "sub" / f"{split}.txt")
        text = out / "sub"
    say("binarising")
    preprocess(["--only-source", "--workers", options.workers], out / "bin", f"{text}/{{}}.txt", out / "preprocess.log")
    print_counts(out / "preprocess.log")


def take_text(corpus: Corpus, out: Path, source: Optional[Path], text: Path, sample: Optional[int] = None) -> None:
    """Makes {train,valid,test}.txt in the folder `text` of a corpus of text."""
    say("the text")
    archives = out / "archives"
    found = files_of(corpus, unpacked(corpus, archives, source))
    with clean_after_mistakes(text):
        for split, paths in found.items():
            name = f"{corpus.name}/{split}.txt"
            take(name, paths, text / f"{split}.txt", archives, sample if split == "train" else None)


def make_labels(job: Job) -> None:
    """Of texts with labels."""
    for split, rows in job.all_examples().items():
        write(job.out / "text" / f"{split}.txt", "".join(f"{text}\n" for _, text in rows))
        write(job.out / "text" / f"{split}.label", "".join(f"{label}\n" for label, _ in rows))
        counts = ", ".join(f"{label}: {n}" for label, n in sorted(Counter(label for label, _ in rows).items()))
        print(f"{split}: {len(rows)} examples ({counts})")
    binarise_labels(job.out, job.options)


def binarise_labels(out: Path, options: argparse.Namespace) -> None:
    """Tokenised text in bin/input0 and labels in bin/label, as fairseq's sentence_prediction reads them."""
    say("tokenising")
    tokenize = f"sacremoses --quiet -l en -j {options.workers} normalize -c tokenize"
    for split in SPLITS:
        shell(f"{tokenize} < {quote(str(out / 'text' / f'{split}.txt'))}", out / "tok" / f"{split}.txt")
    say("binarising")
    common = ["--only-source", "--workers", options.workers]
    words = [*common, "--nwordssrc", options.vocabulary]
    preprocess(words, out / "bin" / "input0", f"{out}/tok/{{}}.txt", out / "preprocess.input0.log")
    classes = [*common, "--padding-factor", 1]
    preprocess(classes, out / "bin" / "label", f"{out}/text/{{}}.label", out / "preprocess.label.log")


def make_pairs(job: Job) -> None:
    """Of pairs of texts; what is known beside the test set's is kept in test.answers."""
    raw = job.out / "raw"
    for split, found in job.all_examples().items():
        write(raw / f"{split}.source", "".join(f"{pair.source}\n" for pair in found))
        write(raw / f"{split}.target", "".join(f"{pair.target}\n" for pair in found))
        print(f"{split}: {len(found)} pairs")
        if split == "test" and job.corpus.scores:
            kept = ({"group": pair.group, "answers": pair.answers} for pair in found)
            write(job.out / "test.answers", "".join(f"{json.dumps(beside)}\n" for beside in kept))
    binarise(raw, job.src, job.tgt, job.out, job.options)


def make_spans(job: Job) -> None:
    """Of text to denoise."""
    raw = job.out / "raw"
    take_text(text_corpus(job.corpus), job.out, job.source, raw / "text")
    for seed, split in enumerate(SPLITS):
        if not (raw / f"{split}.target").exists():
            script = ["python", ROOT / "scripts" / "corrupt_spans.py", raw / "text" / f"{split}.txt", raw / split]
            run([*script, "--words", job.options.words, "--seed", seed])
    binarise(raw, job.src, job.tgt, job.out, job.options)


MAKERS = {
    "parallel": make_parallel,
    "text": make_text,
    "labels": make_labels,
    "pairs": make_pairs,
    "spans": make_spans,
}


# ---- parallel text


def training_corpora(raw: Path, src: str, tgt: str) -> List[Path]:
    """Checks the files of a raw folder; the prefixes of what is trained on, in the order of the names."""
    if not raw.is_dir():
        raise UserError(f"{raw}: no such folder; RAW_DIR holds {{train,valid,test}}.{{{src},{tgt}}}")
    check_files(raw, (f"{split}.{lang}" for split in ("valid", "test") for lang in (src, tgt)))
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


def check_files(raw: Path, names: Iterable[str]) -> None:
    """Raises a UserError for a file that is not in a folder, compressed or not."""
    for name in names:
        if not (raw / name).is_file() and not (raw / f"{name}.gz").is_file():
            raise UserError(f"{raw / name}: no such file, nor {name}.gz")


def prepare_test(raw: Path, data: Path) -> Path:
    """Prepares another test set, ``test.{src,tgt}`` of a folder, as prepared data were, with their subwords and words.

    Returns:
        The folder that it is in, below that of the data.
    """
    src, tgt = (read_settings(data / "settings")[side] for side in ("src", "tgt"))
    if not dry_run():
        check_files(raw, (f"test.{lang}" for lang in (src, tgt)))
    options = options_of(Corpus("own", "parallel"), {"like": data})
    take_options(options, src, tgt)
    size = sum(file.stat().st_size for lang in (src, tgt) for file in raw.glob(f"test.{lang}*"))
    out = data / "tests" / raw.resolve().name
    same = {name: getattr(options, name) or "" for name in LIKE}
    settings = {"src": src, "tgt": tgt, **same, "like": data.resolve(), "from": raw.resolve(), "raw": f"{size} bytes"}
    with folder_of_data(out, settings) as begun:
        if begun:
            binarise(raw, src, tgt, out, options, ["test"])
    return out


LIKE = ("subwords", "merges", "dash_splits", "lowercase")  # options that --like takes over


def take_options(options: argparse.Namespace, src: str, tgt: str) -> None:
    """The options that decide on subwords, from the data of --like."""
    settings = read_settings(options.like / "settings")
    if not dry_run() and not (options.like / "bin" / "done").exists():
        raise UserError(f"--like {options.like}: not prepared, or not to its end")
    if settings and {settings.get("src"), settings.get("tgt")} != {src, tgt}:
        raise UserError(f"--like {options.like}: is not parallel text of {src} and {tgt}")
    for name in LIKE:
        setattr(options, name, settings.get(name, getattr(options, name)))


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
    with clean_after_mistakes(out / "text"):
        if "train" in splits:
            corpora = [raw / "train"] if dry_run() else training_corpora(raw, src, tgt)
            clean(out / "text" / "train", corpora, *sample, *lowercase)
            clean(out / "text" / "valid", [raw / "valid"], *lowercase)
        clean(out / "text" / "test", [raw / "test"], *lowercase, "--keep-all")

    workers, words = options.workers, options.subwords == "bpe"
    text = out / ("tok" if words else "text")
    both = " ".join(quote(f"{text}/train.{lang}") for lang in (src, tgt))
    if words:
        say("normalising and tokenising")
        for split in splits:
            for lang in (src, tgt):
                jobs = workers if split == "train" else 1  # to start them takes longer than a small file
                tokenize = f"sacremoses --quiet -l {lang} -j {jobs} normalize -c tokenize"
                dashes = " -a" if options.dash_splits else ""
                shell(f"{tokenize}{dashes} < {quote(f'{out}/text/{split}.{lang}')}", text / f"{split}.{lang}")
        say(f"learning and applying joint BPE, {options.merges} merges")
        model, learn = out / "codes", f"cat {both} | subword-nmt learn-bpe -s {options.merges}"
        encode = apply_bpe(model, workers)
    else:
        say(f"learning and applying a joint SentencePiece model of {options.merges} pieces")
        tool = f"python {quote(str(ROOT / 'scripts' / 'sentence_pieces.py'))}"
        model, learn = out / "pieces.model", f"{tool} train {options.merges} {both}"
        if options.words:  # each span has a word before it and one or more in it, so that there are fewer than these
            learn += f" --sentinels {max(1, round(options.words * 0.15 / 3)) + 1}"
        encode = f"{tool} encode {quote(str(model))} <"
    shell(f"cat {quote(str(options.like / model.name))}" if options.like else learn, model)
    for split in splits:
        for lang in (src, tgt):
            to = out / "sub" / (f"all.{lang}" if split == "train" else f"{split}.{lang}")
            most = options.truncate_source if lang == src else options.truncate_target
            cut = f" | cut -d ' ' -f -{most - 1}" if most else ""
            shell(f"{encode} {quote(f'{text}/{split}.{lang}')}{cut}", to)
            if not dry_run() and count_lines(to) != count_lines(out / "text" / f"{split}.{lang}"):
                raise UserError(
                    f"{to}: has more or fewer lines than {out}/text/{split}.{lang}; remove it and call again"
                )
    if "train" in splits:
        limits = ["--max-length", options.max_length, "--max-ratio", options.max_ratio]
        clean(out / "sub" / "train", [out / "sub" / "all"], *limits)

    say("binarising")
    flags: List[object] = ["-s", src, "-t", tgt, "--joined-dictionary", "--workers", workers]
    flags += ["--srcdict", options.like / "bin" / f"dict.{src}.txt"] if options.like else []
    preprocess(flags, out / "bin", f"{out}/sub/{{}}", out / "preprocess.log", splits)
    print_counts(out / "preprocess.log")
    for lang in (src, tgt) if not dry_run() else ():
        shutil.copy(out / "text" / f"test.{lang}", out)


# ---- steps


def apply_bpe(codes: Path, workers: int) -> str:
    """The command that applies BPE; the text's name comes next."""
    # of several processes it splits a file, not a stream
    return f"subword-nmt apply-bpe -c {quote(str(codes))} " + (f"--num-workers {workers} -i" if workers > 1 else "<")


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
    """fairseq-preprocess, into an empty folder. `prefix`: of the text, with ``{}`` for train, valid and test."""
    if not dry_run():
        shutil.rmtree(to, ignore_errors=True)
    argv = ["fairseq-preprocess", *flags, "--destdir", to]
    run([*argv, *(word for split in splits for word in (f"--{split}pref", prefix.format(split)))], log=log)


def print_counts(log: Path) -> None:
    """Prints what fairseq-preprocess counted: types of the dictionary; sentences, tokens, unknown words of a file."""
    if not dry_run():
        said = re.findall(r"\] (Dictionary: .*|.* sents, .*)", log.read_text())
        print(*dict.fromkeys(re.sub(r"^\S*/", "", line) for line in said), sep="\n")


def count_lines(path: Path) -> int:
    """The number of line ends in a file."""
    with open(path, "rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
