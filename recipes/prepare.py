"""Raw text -> binarised data for fairseq-train.

  scripts/prepare.sh RAW_DIR SRC TGT OUT_DIR [options]     parallel text of one's own
  scripts/prepare.sh multi30k|wmt14|news de|fr OUT_DIR     corpora of parallel text
  scripts/prepare.sh ptb|wikitext2|wikitext103|lm1b OUT_DIR, lm OUT_DIR --from DIR     text, for language models
  scripts/prepare.sh agnews|imdb OUT_DIR, classification OUT_DIR --from DIR            texts with labels
  scripts/prepare.sh cnndm|aeslc|personachat|dailydialog OUT_DIR                       pairs of texts
  scripts/prepare.sh sst2|cola|mrpc|stsb|qqp|mnli|qnli|rte OUT_DIR                     GLUE, as text
  scripts/prepare.sh boolq|cb|copa|multirc|record|wic|wsc OUT_DIR                      SuperGLUE, as text
  scripts/prepare.sh wikitext2_spans OUT_DIR, spans OUT_DIR --from DIR                 text to denoise

`prepare.sh CORPUS --help` says more of a corpus. For pairs of texts of one's own SRC and TGT are source and target.
Parallel text: check, normalise and tokenise (sacremoses), joint
subwords (subword-nmt or sentencepiece), clean, fairseq-preprocess with a joined dictionary.

  RAW_DIR   NAME.SRC and NAME.TGT, or the same with .gz, one sentence a line. NAMEs are valid and test; every
            other is a training corpus, taken in the order of the names.
  OUT_DIR   receives bin/ for fairseq-train, codes (BPE) or pieces.model (SentencePiece), test.{SRC,TGT} to score
            against, and settings, which evaluate.sh reads

Every step writes its file atomically, so a second call goes on where the first one ended, and a finished OUT_DIR is
kept. DRY_RUN=1 shows the commands only.
"""

import argparse
import contextlib
import re
import shutil
from pathlib import Path
from shlex import quote
from typing import Dict, Iterable, Iterator, List, Mapping, Optional, Sequence

from .command import (
    ROOT,
    Parser,
    UserError,
    cores,
    dry_run,
    integer,
    locked,
    pin_settings,
    read_settings,
    run,
    say,
    shell,
)

SPLITS = ("train", "valid", "test")


def ratio(text: str) -> str:
    """The type of --max-ratio, kept as it is written."""
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text}: must be a number")
    return text


def add_options(parser: Parser) -> None:
    """The options of prepare.sh, which every corpus' own script takes too."""
    add = parser.add_argument
    add("--merges", type=integer(1), default=10000, metavar="N", help="BPE merges, or SentencePiece's vocabulary")
    add("--subwords", choices=("bpe", "sentencepiece"), default="bpe")
    add("--dash-splits", action="store_true", help="split words at hyphens when tokenising (Moses' -a)")
    add("--lowercase", action="store_true", help="lowercase all text")
    add("--max-length", type=integer(0), default=250, metavar="N", help="most subwords on a side of a training pair")
    add("--max-ratio", type=ratio, default="0", metavar="R", help="largest ratio of a training pair's lengths; 0: any")
    add("--truncate-source", type=integer(2), metavar="N", help="cut sources after N subwords, the end's own included; "
        "translate.sh cuts them too where they are SentencePiece's")  # fmt: skip
    add("--truncate-target", type=integer(2), metavar="N", help="the same of targets (those of the test set are whole)")
    parser.set_defaults(sentinels=0)  # marks of spans, which are a SentencePiece each: denoising.py
    add("--sample", type=integer(1), metavar="N", help="only the first N pairs of each training corpus, for a trial")
    add("--workers", type=integer(1), default=cores(), metavar="N", help="processes (default: all cores)")
    add("--like", type=Path, metavar="DATA_DIR", help="with the subwords, words and options of that data, "
        "for fine-tuning a model of it (train.sh --init)")  # fmt: skip


def main(argv: Sequence[str]) -> None:
    parser = Parser("prepare", __doc__)
    parser.add_argument("raw", metavar="RAW_DIR", type=Path)
    parser.add_argument("src", metavar="SRC")
    parser.add_argument("tgt", metavar="TGT")
    parser.add_argument("out", metavar="OUT_DIR", type=Path)
    add_options(parser)
    args = parser.parse_args(argv)
    prepare(args.raw, args.src, args.tgt, args.out, args)


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


def prepare(
    raw: Path, src: str, tgt: str, out: Path, options: argparse.Namespace, more: Optional[Mapping[str, object]] = None
) -> None:
    """Makes `out` from `raw`, with the options of `add_options`; `more` are settings to keep beside."""
    if src == tgt:
        raise UserError(f"SRC and TGT are both {src}")
    if options.like:
        take_options(options, src, tgt)
    corpora = [raw / "train"]
    if not dry_run() and not (out / "bin" / "done").exists():
        corpora = training_corpora(raw, src, tgt)  # before anything is written
    pinned = of_text(src, tgt, options)
    pinned.update(max_length=options.max_length, max_ratio=options.max_ratio, sample=options.sample or "")
    pinned.update(more or {})
    pinned.update({name: value for name, value in truncation(options).items() if value})
    pinned.update({"like": options.like.resolve()} if options.like else {}, raw=raw.resolve())
    files = [file for lang in (src, tgt) for end in ("", ".gz") for file in raw.glob(f"*.{lang}{end}")]
    with folder_of_data(out, pinned, files) as begun:
        if begun:
            binarise(raw, corpora, src, tgt, out, options)


def prepare_test(raw: Path, data: Path) -> Path:
    """Prepares another test set, ``test.{src,tgt}`` of a folder, as prepared data were, with their subwords and words.

    Returns:
        The folder that it is in, below that of the data.
    """
    src, tgt = (read_settings(data / "settings")[side] for side in ("src", "tgt"))
    if not dry_run():
        check_files(raw, (f"test.{lang}" for lang in (src, tgt)))
    parser = Parser("prepare", "")
    add_options(parser)
    options = parser.parse_args(["--like", str(data)])
    take_options(options, src, tgt)
    files = [file for lang in (src, tgt) for file in raw.glob(f"test.{lang}*")]
    out = data / "tests" / raw.resolve().name
    pinned = {**of_text(src, tgt, options), "like": data.resolve(), "raw": raw.resolve()}
    with folder_of_data(out, pinned, files) as begun:
        if begun:
            binarise(raw, [], src, tgt, out, options, ["test"])
    return out


def of_text(src: str, tgt: str, options: argparse.Namespace) -> Dict[str, object]:
    """The settings that say how text becomes subwords."""
    cased = {"dash_splits": options.dash_splits or "", "lowercase": options.lowercase or ""}
    return {"src": src, "tgt": tgt, "subwords": options.subwords, "merges": options.merges, **cased}


def truncation(options: argparse.Namespace) -> Dict[str, Optional[int]]:
    """The most subwords of each side."""
    return {"truncate_source": options.truncate_source, "truncate_target": options.truncate_target}


def take_options(options: argparse.Namespace, src: str, tgt: str) -> None:
    """The options that decide on subwords, from the data of --like."""
    settings = read_settings(options.like / "settings")
    if not dry_run() and not (options.like / "bin" / "done").exists():
        raise UserError(f"--like {options.like}: not prepared, or not to its end")
    if settings and {settings.get("src"), settings.get("tgt")} != {src, tgt}:
        raise UserError(f"--like {options.like}: is not parallel text of {src} and {tgt}")
    for name in ("subwords", "merges", "dash_splits", "lowercase"):
        setattr(options, name, settings.get(name, getattr(options, name)))


def binarise(
    raw: Path,
    corpora: Sequence[Path],
    src: str,
    tgt: str,
    out: Path,
    options: argparse.Namespace,
    splits: Sequence[str] = SPLITS,
) -> None:
    """The steps of `prepare`, each of which keeps what an earlier call made. `corpora`: of `training_corpora`."""

    def clean(to: Path, prefixes: Sequence[Path], *flags: object) -> None:
        if not all(Path(f"{to}.{lang}").exists() for lang in (src, tgt)):
            run(["python", ROOT / "scripts" / "clean_pairs.py", src, tgt, to, *prefixes, *flags])

    say("checking the text")
    lowercase = ["--lowercase"] if options.lowercase else []
    try:
        if "train" in splits:
            clean(
                out / "text" / "train", corpora, *(["--sample", options.sample] if options.sample else []), *lowercase
            )
            clean(out / "text" / "valid", [raw / "valid"], *lowercase)
        clean(out / "text" / "test", [raw / "test"], *lowercase, "--keep-all")
    except UserError:
        begin_text_anew(out)
        raise

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
        learn += f" --sentinels {options.sentinels}" * bool(options.sentinels)
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
    if not dry_run():
        print_counts(out / "preprocess.log")
        for lang in (src, tgt):
            shutil.copy(out / "text" / f"test.{lang}", out)


def apply_bpe(codes: Path, workers: int) -> str:
    """The command that applies BPE; the text's name comes next."""
    # of several processes it splits a file, not a stream
    return f"subword-nmt apply-bpe -c {quote(str(codes))} " + (f"--num-workers {workers} -i" if workers > 1 else "<")


@contextlib.contextmanager
def folder_of_data(out: Path, settings: Mapping[str, object], files: Sequence[Path] = ()) -> Iterator[bool]:
    """Holds a folder of data while it is made, and then marks it as ready. Yields whether there is anything to do.

    Args:
        settings: what it is made with. Data made otherwise are refused, ready or not.
        files: the text that it is made of, which may not change, as its size tells; none: nobody looks.
    """
    with locked(out / ".lock"):
        pin_settings(out / "settings", "text/*", settings)
        if files:
            pin_settings(out / "raw_bytes", "text/*", {"raw_bytes": sum(file.stat().st_size for file in files)})
        if (out / "bin" / "done").exists():
            say(f"{out} is ready, reusing it")
            yield False
            return
        yield True
        if not dry_run() and (out / "bin").is_dir():
            (out / "bin" / "done").touch()
            say(f"{out} is ready")


def preprocess(flags: Sequence[object], to: Path, prefix: str, log: Path, splits: Sequence[str] = SPLITS) -> None:
    """fairseq-preprocess, into an empty folder. `prefix`: of the text, with ``{}`` for train, valid and test."""
    if not dry_run():
        shutil.rmtree(to, ignore_errors=True)
    argv = ["fairseq-preprocess", *flags, "--destdir", to]
    run([*argv, *(word for split in splits for word in (f"--{split}pref", prefix.format(split)))], log=log)


def begin_text_anew(out: Path) -> None:
    """After a mistake in the text: it will be mended, and then all of it is read again."""
    for file in (out / "text").glob("*"):
        file.unlink()


def print_counts(log: Path) -> None:
    """Prints what fairseq-preprocess counted: types of the dictionary; sentences, tokens, unknown words of a file."""
    said = re.findall(r"\] (Dictionary: .*|.* sents, .*)", log.read_text())
    print(*dict.fromkeys(re.sub(r"^\S*/", "", line) for line in said), sep="\n")


def count_lines(path: Path) -> int:
    """The number of line ends in a file."""
    with open(path, "rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
