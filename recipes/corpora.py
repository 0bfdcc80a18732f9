"""The corpora of the tables: from their publishers, or a folder at hand, to binarised data."""

import csv
import gzip
import hashlib
import io
import os
import re
import shutil
import zlib
from pathlib import Path
from shlex import quote
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from . import prepare
from .command import (
    ROOT,
    Parser,
    UserError,
    download,
    dry_run,
    existing_folder,
    locked,
    make_folder,
    pin_settings,
    run,
    say,
    shell,
    show,
)
from .hyperparameters import read_data

MULTI30K = """Multi30k, task 1 (image captions; Elliott et al. 2016, 2017), to binarised data.

  scripts/prepare.sh multi30k de|fr OUT_DIR [--from DIR] [options]

The raw text comes from --from, a folder with {train,val,test_2016_flickr}.{en,de,fr}.gz, or without it from the
corpus' own repository, and is kept in OUT_DIR-raw. Its content is checked by SHA-256 either way (multi30k.sha256).
The test set is test_2016_flickr.
"""

NEWS = """The test sets of WMT's news, 2008 to 2012, as a small training corpus; 2013 validates, 2014 is the test set.

  scripts/prepare.sh news de|fr OUT_DIR [--from DIR] [options of prepare.sh RAW_DIR]

The raw text comes from --from, a folder with newstest{2008,...,2014}.{en,de} or .gz, or without it from sacreBLEU.
"""

WMT14 = """WMT14 English-German or English-French, from the download to binarised data.

  scripts/prepare.sh wmt14 de|fr OUT_DIR [--from DIR] [--mirror URL] [options]

Training: the corpora of WMT14, Europarl v7, Common Crawl, News Commentary v9 and for French UN (undoc.2000) and
Giga. Validation: newstest2013. Test: newstest2014, sacreBLEU's wmt14/full. De needs about 10 GB of disk, Fr 100.
Archives are checked by SHA-256 (wmt14.sha256); an interrupted download goes on where it stopped, and so does all
that follows. DRY_RUN=1 shows the commands only. --sample 2000 tries the recipe on little text.

What these defaults do to BLEU, and why they are so:
  --dash-splits      as in fairseq's own preparation of WMT14: "a-b" becomes three words. It raises tokenised
                     BLEU, so compare detokenised (sacreBLEU) figures, where it is undone.
  News Commentary v9 is WMT14's. fairseq's script takes v12 of WMT17 unless told otherwise: 70,000 pairs more.
  no deduplication   as in fairseq's; other copies of this data set that are deduplicated are smaller.
  newstest2013       as validation, so that no training pair is held out. fairseq's script takes each 100th
                     (En-Fr 1333rd) training pair, which is easier text.
  wmt14/full         3,003 sentences; sacreBLEU's wmt14 without "full" has 2,737, another figure.
  punctuation        is normalised in training and test sources, so translations have plain quotation marks where
                     the German reference has its own: sacreBLEU counts them as errors.
  --merges 40000     joint BPE, --max-length 250, --max-ratio 1.5: as in fairseq's. The vocabulary decides the
                     model's size; the paper's 37k of another preparation cannot be had any more.
"""
CORPORA = read_data("corpora.yaml")
LANGUAGES = {"en": "en", "eng": "en", "de": "de", "deu": "de", "fr": "fr", "fra": "fr"}  # mtdata's names too
SPLITS = {"dev": "valid", "test1": "test"}  # mtdata's names


def checksums(corpus: str) -> Dict[str, str]:
    """{file: SHA-256} of a corpus' list beside this module; empty where it has none."""
    file = Path(__file__).parent / f"{corpus}.sha256"
    lines = file.read_text().splitlines() if file.exists() else []
    return {name: digest for digest, name in map(str.split, lines)}


def sha256(path: Path) -> str:
    """Of a file's contents; of a text for TEXT.gz, which else depends on who compressed it."""
    digest = hashlib.sha256()
    text = path.suffix == ".gz" and not path.name.endswith(".tar.gz")
    with gzip.open(path, "rb") if text else open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def text_of(path: Path) -> str:
    """The text of a file, which may be compressed.

    Raises:
        UserError: it is not UTF-8, or cut off.
    """
    data = b""
    try:
        data = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}: line {line} is not UTF-8; convert the file, e.g. with iconv") from None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise UserError(f"{path}: not a whole gzip file") from None


def rows_of(path: Path, text: str, tabs: bool) -> Iterator[Tuple[int, List[str]]]:
    """The rows of a table that are not empty, each with the number of its last line.

    Args:
        tabs: divided by tabs, without quotes; else by commas.

    Raises:
        UserError: a stray quote, which would swallow the rows behind it.
    """
    csv.field_size_limit(1 << 30)
    style: Dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"strict": True}
    reader, before = csv.reader(io.StringIO(text, newline=""), **style), 0
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
            before = reader.line_num
    except csv.Error as error:
        raise UserError(
            f"{path}: the row from line {before + 1} on has a stray quote ({error}); a text with quotes is itself "
            'quoted, and each of its quotes is doubled: 1,"so ""called"" news"'
        ) from None


def corpus_parser(description: str) -> Parser:
    """What the corpora of parallel text share."""
    parser = Parser("prepare", description)
    parser.add_argument("tgt", metavar="de|fr", choices=("de", "fr"), help="English is translated into it")
    parser.add_argument("out", metavar="OUT_DIR", type=Path)
    parser.add_argument("--from", dest="source", type=existing_folder, metavar="DIR", help="the corpus at hand")
    prepare.add_options(parser)
    return parser


def multi30k(argv: Sequence[str]) -> None:
    """prepare.sh multi30k."""
    args = corpus_parser(MULTI30K).parse_args(argv)
    raw = Path(f"{args.out.absolute()}-raw")
    # a folder of its own: what lies beside train is trained on
    archives = args.source or raw / "archives"
    with locked(raw / ".lock"):
        if not (args.out / "bin" / "done").exists():
            wanted = checksums("multi30k")
            for part, split in CORPORA["multi30k"]["parts"].items():
                for lang in ("en", args.tgt):
                    name = f"{part}.{lang}"
                    unpack(archives / f"{name}.gz", raw / f"{split}.{lang}", wanted[name], args.source is None)
        prepare.prepare(raw, "en", args.tgt, args.out, args)


def unpack(archive: Path, text: Path, wanted: str, fetch: bool) -> None:
    """Makes `text` from a .gz file of Multi30k, which is downloaded where it is missing and `fetch` says so."""
    if text.exists() and sha256(text) == wanted:
        return
    if fetch and not archive.exists():
        fix = "get the corpus elsewhere and name its folder by --from"
        download(f"{CORPORA['multi30k']['url']}/{archive.name}", archive, fix)
    if not dry_run():
        try:
            found = sha256(archive)
        except (OSError, EOFError, zlib.error):
            found = ""
        if found != wanted:
            if fetch and archive.exists():
                archive.unlink()
            raise UserError(
                f"{archive}: missing, cut off, or not Multi30k's text of the commit this recipe is for (by its SHA-256)"
            )
        text.unlink() if text.exists() else None
    shell(f"gunzip -c {quote(str(archive))}", text)


def news(argv: Sequence[str]) -> None:
    """A small corpus of news."""
    args = corpus_parser(NEWS).parse_args(argv)
    raw = Path(f"{args.out.absolute()}-raw")
    with locked(raw / ".lock"):
        if not (args.out / "bin" / "done").exists():
            os.environ["SACREBLEU"] = str(args.out / "archives" / "sacrebleu")
            for name, known in CORPORA["news"]["sets"].items():
                split = {"newstest2013": "valid", "newstest2014": "test"}.get(name, name.replace("newstest", "news"))
                for lang, side in (("en", "src"), (args.tgt, "ref")):
                    fetch = f"sacrebleu -t {known} -l en-{args.tgt} --echo {side}"
                    found = f"gzip -cdf {quote(str(args.source))}/{name}.{lang}*" if args.source else fetch
                    shell(found, raw / f"{split}.{lang}", "get the corpus elsewhere and name its folder by --from")
        prepare.prepare(raw, "en", args.tgt, args.out, args)


def wmt14(argv: Sequence[str]) -> None:
    """prepare.sh wmt14."""
    parser = corpus_parser(WMT14)
    parser.add_argument("--mirror", default=CORPORA["wmt14"]["mirror"], metavar="URL", help="of statmt.org's files")
    parser.set_defaults(merges=40000, dash_splits=True, max_ratio="1.5")
    args = parser.parse_args(argv)
    raw, archives, tgt = args.out / "raw", args.out / "archives", args.tgt
    with locked(raw / ".lock"):
        done = (args.out / "bin" / "done").exists()
        if not done or args.source:
            pin_settings(raw / "settings", "*.en*", {"from": args.source.resolve() if args.source else ""})
        if not done:
            os.environ["SACREBLEU"] = str(archives / "sacrebleu")
            say("the corpora")
            if args.source:
                link(args.source, raw, tgt)
            else:
                wanted = checksums("wmt14")
                corpora = {**CORPORA["wmt14"]["archives"], **(CORPORA["wmt14"]["french"] if tgt == "fr" else {})}
                for name, (path, member) in corpora.items():
                    extract(args.mirror, path, member, raw / name, tgt, archives, wanted[path])
            test_sets(raw, archives, tgt, args.out)
        prepare.prepare(raw, "en", tgt, args.out, args)


def link(source: Path, raw: Path, tgt: str) -> None:
    """Links the corpora of a folder into `raw`, by the names that `prepare` wants."""
    for file in sorted(source.iterdir()):
        name = re.fullmatch(r"(.*)\.(\w+?)(\.gz)?", file.name)
        lang = LANGUAGES.get(name[2]) if name else None
        if name and lang in ("en", tgt):
            to = raw / f"{SPLITS.get(name[1], name[1])}.{lang}{name[3] or ''}"
            run(["ln", "-sfn", file.resolve(), to])


def extract(mirror: str, path: str, member: str, output: Path, tgt: str, archives: Path, wanted: str) -> None:
    """Both sides of a training corpus, out of an archive that is downloaded and checked where it is missing."""
    archive, packed = archives / Path(path).name, ".gz" if member.endswith(".gz") else ""
    files = {lang: Path(f"{output}.{lang}{packed}") for lang in ("en", tgt)}
    if all(file.exists() for file in files.values()):
        return
    fetch(f"{mirror}/{path}", archive, wanted, "name another --mirror, or corpora at hand by --from")
    for lang, file in files.items():
        shell(f"tar -xOf {quote(str(archive))} {member.format(tgt=tgt, lang=lang)}", file)


def fetch(url: str, file: Path, wanted: str, fix: str) -> None:
    """Downloads a file of known content; one that is there and was checked is kept.

    Args:
        wanted: its SHA-256.
        fix: what else to do than to call again.
    """
    checked = file.with_name(file.name + ".checked")
    if checked.exists():
        return
    if not file.exists():
        download(url, file, fix)
    if not wanted:
        print(f"{file}: not checked, as its SHA-256 is not known here")
        checked.touch() if not dry_run() else None
        return
    show(["sha256sum", file], f" # {wanted}")
    if not dry_run():
        found = sha256(file)
        if found != wanted:
            file.unlink()
            raise UserError(
                f"{url}: its SHA-256 is {found}, not {wanted}: another file, or altered on the way; it was removed. "
                f"Call again, or {fix}"
            )
        checked.touch()


def fetch_all(urls: Sequence[str], corpus: str, archives: Path, source: Optional[Path] = None) -> None:
    """Downloads the files of a corpus, or takes them from `source`, and unpacks them in `archives`."""
    wanted = checksums(corpus)
    if not dry_run():
        make_folder(archives)
    for url in urls:
        file = (source or archives) / Path(url).name
        if not source:
            fetch(url, file, wanted.get(file.name, ""), "get the corpus elsewhere and name its folder by --from")
        if file.name.endswith(".zip"):
            run(["python", "-m", "zipfile", "-e", file, archives])
        elif file.name.endswith((".tar.gz", ".tgz")):
            run(["tar", "-xzf", file, "-C", archives])


def test_sets(raw: Path, archives: Path, tgt: str, out: Path) -> None:
    """newstest2013 and 2014 by sacreBLEU, where the folder of --from has none."""
    for split, name in CORPORA["wmt14"]["sets"].items():
        if any(file.is_symlink() for file in raw.glob(f"{split}.*")):
            continue
        cache = archives / "sacrebleu" / name
        if not dry_run() and not list(cache.glob(f"*.en-{tgt}.*")):
            # sacreBLEU keeps what it has for good, even an archive of a download that failed
            shutil.rmtree(cache, ignore_errors=True)
        for lang, side in (("en", "src"), (tgt, "ref")):
            fix = f"call again, or put it as {split}.{{en,{tgt}}} into the folder of --from"
            shell(f"sacrebleu -t {name} -l en-{tgt} --echo {side}", raw / f"{split}.{lang}", fix)
        if split == "test" and not dry_run():
            # tells evaluate.sh to score by name, against the references as published
            (out / "sacrebleu_set").write_text(f"{name}\n")


def numbers(tgt: str, raw: Path) -> None:
    """The quickstart's corpus of numbers, dates and quantities, made on the spot; one that is there is kept."""
    if raw.exists():
        return
    say("making the corpus of numbers, dates and quantities")
    part = raw.with_name(f"{raw.name}.part")
    run(["python", ROOT / "scripts" / "make_numbers.py", "en", tgt, part])
    if not dry_run():
        part.replace(raw)


def main(argv: Sequence[str]) -> None:
    """prepare.sh: the first word is a corpus, or else a folder of parallel text."""
    from . import classification, denoising, language_model, pairs, text_to_text

    name = argv[0] if argv else ""
    if name in PARALLEL:
        PARALLEL[name](argv[1:])
    elif name in language_model.CORPORA:
        language_model.main(argv)
    elif name in classification.CORPORA:
        classification.main(argv)
    elif name in pairs.CORPORA:
        text_to_text.main(argv)
    elif name in denoising.CORPORA:
        denoising.main(argv)
    else:
        words = [word for word in argv[:3] if not word.startswith("-")]
        if 0 < len(words) < 3 and not Path(name).is_dir():
            known = ", ".join([*PARALLEL, *language_model.CORPORA, *classification.CORPORA, *pairs.NAMES])
            raise UserError(f"{name}: neither a corpus nor a folder of parallel text; the corpora are {known}")
        prepare.main(argv)


def prepare_corpus(corpus: str, dataset: str, data: Path, source: Optional[Path], options: Sequence[str]) -> None:
    """Prepares a data set that is a corpus of its own as `data`. `source`: the folder of --from."""
    main([dataset, str(data), *(["--from", str(source)] if source else []), *options])


PARALLEL = {"multi30k": multi30k, "wmt14": wmt14, "news": news}
