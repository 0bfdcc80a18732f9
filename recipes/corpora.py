"""The corpora of corpora.yaml: their files, from a folder at hand or from their publishers, checked and unpacked."""

import gzip
import hashlib
import os
import re
import shutil
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any, Dict, List, Mapping, Optional, Sequence

from .command import ROOT, UserError, download, dry_run, make_folder, run, shell, show
from .hyperparameters import make, read_data

SPLITS = ("train", "valid", "test")
LANGUAGES = {"en": "en", "eng": "en", "de": "de", "deu": "de", "fr": "fr", "fra": "fr"}  # mtdata's names too
PACKED = (".zip", ".tar.gz", ".tgz")  # endings of archives
ELSEWHERE = "get the corpus elsewhere and name its folder by --from"


@dataclass(frozen=True)
class Corpus:
    """A corpus of corpora.yaml. `source` and `target`, the form of an example, have names of columns in braces."""

    name: str
    kind: str  # parallel, text, labels, pairs or spans: what prepare.py makes of it
    about: str = ""  # for --help
    home: str = ""  # before each of `urls` and `archives`
    urls: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)  # {split or training corpus: patterns}
    options: Mapping[str, Any] = field(default_factory=dict)  # of prepare.sh, where its own defaults are others
    # parallel text
    archives: Mapping[str, Sequence[str]] = field(default_factory=dict)  # {training corpus: (archive, files in it)}
    sets: Mapping[str, str] = field(default_factory=dict)  # {split or training corpus: sacreBLEU's name of it}
    script: str = ""  # of scripts/, which makes the text
    of: str = ""  # of text to denoise: the corpus of text
    # texts with labels, and pairs of texts
    rows: str = ""  # a reader of examples.py; default: by the ending of the file's name
    columns: Sequence[str] = ()  # of a table without a line of headings
    names: Mapping[str, str] = field(default_factory=dict)  # {other name of a column: its name}
    broken_rows: bool = False  # rows with too few columns are left out, and counted; else they are refused
    labels: Mapping[str, str] = field(default_factory=dict)  # {each label: what is to be written}; the column "label"
    number: str = ""  # a column of numbers, which are written in steps of 0.2
    source: str = ""
    target: str = ""
    scores: Sequence[str] = ()  # of metrics.py; none: those of free text
    test_is_enough: bool = False  # where there is no training set, the test set is divided

    def answer_labels(self) -> List[str]:
        """What may be written for a label, each once, in lower case. The last one is the positive one of F1."""
        return [word.lower() for word in dict.fromkeys(self.labels.values())]


def read_corpora() -> Dict[str, Corpus]:
    """Those of corpora.yaml, by name. Labels may be a list, if they are written as they are."""
    found = {}
    for name, entry in read_data("corpora.yaml").items():
        labels = entry.get("labels", {})
        pairs = labels.items() if isinstance(labels, dict) else zip(labels, labels)
        entry["labels"] = {str(label): str(word) for label, word in pairs}
        found[name] = make("corpora.yaml", name, Corpus, entry, name=name)
    return found


CORPORA = read_corpora()
# {CORPUS/file, or CORPUS/SPLIT.SIDE of a text: SHA-256}
CHECKSUMS = dict(line.split()[::-1] for line in (ROOT / "recipes" / "corpora.sha256").read_text().splitlines())


def sha256(*paths: Path) -> str:
    """Of the contents of files, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def digest(*paths: Path) -> str:
    """Of the names and contents of files, so that lines that move from one to another are noticed."""
    known = "".join(f"{sha256(path)} {path.name}\n" for path in sorted(paths))
    return hashlib.sha256(known.encode()).hexdigest()


def text_of(path: Path) -> str:
    """The text of a file, which may be compressed."""
    data = b""
    try:
        data = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}: line {line} is not UTF-8; convert the file, e.g. with iconv") from None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise UserError(f"{path}: not a whole gzip file") from None


# ---- files of a corpus


def find(folder: Path, patterns: Sequence[str]) -> List[Path]:
    """The files of the first pattern that has some, as they are or as .gz.

    All are of one folder, the one that is fewest folders below `folder`: others may have another corpus, or data made
    of this one. Several that are as near are refused.
    """
    for pattern in patterns:
        found = [nearest(folder, part) for part in pattern.split("+")]
        if all(found):
            return [path for paths in found for path in paths]
    return []


def nearest(folder: Path, pattern: str) -> List[Path]:
    """The files of one pattern, in the order of their names; one that is there twice is taken as it is, not as .gz."""
    names = {path.with_suffix("") if path.suffix == ".gz" else path for path in folder.glob(pattern)}
    names |= {path.with_suffix("") for path in folder.glob(f"{pattern}.gz")}
    depth = min((len(name.parts) for name in names), default=0)
    parents = sorted({name.parent for name in names if len(name.parts) == depth})
    if len(parents) > 1:
        several = ", ".join(str(parent.relative_to(folder)) for parent in parents)
        raise UserError(f"--from {folder}: has {Path(pattern).name} in {several}; name one of these folders by --from")
    return [name if name.exists() else Path(f"{name}.gz") for name in sorted(names) if name.parent in parents]


def files_of(corpus: Corpus, folder: Path, optional: Sequence[str] = (), **names: str) -> Dict[str, List[Path]]:
    """{split: its files in a folder}. One that is missing is refused, unless it is `optional`."""
    found = {}
    for split, text in corpus.files.items():
        patterns = text.format(**names).split()
        found[split] = find(folder, patterns)
        if not found[split] and dry_run() and not folder.exists():
            found[split] = [folder / patterns[0]]
        if not found[split] and split not in optional:
            wanted = " or ".join(Path(pattern).name for pattern in patterns)
            raise UserError(f"{folder}: no {split} set of {corpus.name}; it should be named {wanted}, or .gz of it")
    return found


def has_archive(corpus: Corpus, folder: Path) -> bool:
    """Whether a folder has an archive of a corpus, which is then read, even if the files are there too."""
    return any((folder / Path(url).name).exists() for url in corpus.urls if url.endswith(PACKED))


def unpacked(corpus: Corpus, archives: Path, source: Optional[Path] = None, **names: str) -> Path:
    """The folder with the files of a corpus, which are downloaded or, where there is a `source`, at hand."""
    if source and not has_archive(corpus, source):
        return source
    if not dry_run():
        make_folder(archives)
    for url in corpus.urls:
        url = f"{corpus.home}/{url}".lstrip("/").format(**names)
        file = source / Path(url).name if source else fetch(url, archives, corpus.name)
        if file.name.endswith(PACKED):
            unpack(file, archives, archives / "unpack.log")
    for inner in sorted(archives.rglob("*.zip")):  # of DailyDialog
        if inner.parent != archives and not inner.name.startswith("._"):
            unpack(inner, inner.parent, archives / "unpack.log")
    return archives


def unpack(archive: Path, folder: Path, log: Path) -> None:
    """Unpacks an archive. One that is broken is refused, and removed if it is below the folder it goes to."""
    is_zip = archive.name.endswith(".zip")
    argv = ["python", "-m", "zipfile", "-e", archive, folder] if is_zip else ["tar", "-xzf", archive, "-C", folder]
    try:
        run(argv, log)
    except UserError as error:
        if is_whole(archive):  # the disk may be full
            raise UserError(f"{archive}: was not unpacked: {error}") from None
        if folder in archive.parents:
            archive.unlink()
        raise UserError(f"{archive}: is cut short, or no archive; get it anew") from None


def is_whole(file: Path) -> bool:
    """Whether a compressed file can be read to its end; others are taken for whole."""
    if file.name.endswith(".zip"):
        try:
            with zipfile.ZipFile(file) as archive:
                return archive.testzip() is None
        except (zipfile.BadZipFile, zlib.error, EOFError):
            return False
    if not file.name.endswith((".gz", ".tgz")):
        return True
    try:
        with gzip.open(file) as text:
            while text.read(1 << 20):
                pass
    except (gzip.BadGzipFile, zlib.error, EOFError):
        return False
    return True


def fetch(url: str, folder: Path, corpus: str, fix: str = ELSEWHERE) -> Path:
    """Downloads a file; one that is there and was checked is kept. `fix`: what else to do than to call again."""
    file = folder / Path(url).name
    checked, wanted = file.with_name(f"{file.name}.checked"), CHECKSUMS.get(f"{corpus}/{file.name}")
    if checked.exists() and file.exists():
        return file
    if not file.exists():
        download(url, file, fix)
        if not any(known.startswith(f"{corpus}/") for known in CHECKSUMS):
            print(f"{file}: not checked, as its SHA-256 is not known here")
    if wanted:
        show(["sha256sum", file], f" # {wanted}")
    if wanted and not dry_run():
        found = sha256(file)
        if found != wanted:
            file.unlink()
            raise UserError(
                f"{url}: its SHA-256 is {found}, not {wanted}: another file, or altered on the way; it was removed. "
                f"Call again, or {fix}"
            )
        checked.touch()
    return file


def take(name: str, paths: Sequence[Path], output: Path, archives: Path, sample: Optional[int] = None) -> None:
    """Makes a text of files, or of their first lines, and checks it; one that is there is kept.

    A wrong text is removed, and so are its files, or those that are broken, in the folder of downloads, `archives`.
    """
    shorter = f" | sed -n 1,{sample}p" if sample else ""
    files = " ".join(quote(str(path)) for path in paths)
    wrong = [path for path in paths if archives in path.parents]
    try:
        # what is not compressed passes through; a byte-order mark is no part of the first word
        shell(f"gzip -cdf {files} | sed '1s/^\\xef\\xbb\\xbf//'{shorter}", output)
        if not dry_run():
            check_text(output, None if sample else CHECKSUMS.get(name), paths[0])
    except UserError:
        if not output.exists():  # the disk may be full
            wrong = [path for path in wrong if not is_whole(path)]
        for path in (output, *wrong):
            path.unlink(missing_ok=True)
        raise


def check_text(text: Path, wanted: Optional[str], source: Path) -> None:
    """Refuses a text that is empty, not UTF-8, or not what its SHA-256 says. `source`: the file it was made of."""
    if wanted and sha256(text) != wanted:
        raise UserError(f"{source}: is not the text of this corpus (by its SHA-256)")
    try:
        with open(text, encoding="utf-8") as lines:
            if not sum(not line.isspace() for line in lines):  # all lines are read
                raise UserError(f"{source}: has no text")
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: is not UTF-8 ({error.reason}); convert it, e.g. with iconv") from None


# ---- parallel text


def take_parallel(corpus: Corpus, tgt: str, out: Path, source: Optional[Path], mirror: Optional[str]) -> None:
    """Makes NAME.en and NAME.`tgt` in the folder raw of `out`, of each training corpus and of the other sets."""
    raw, archives, languages = out / "raw", out / "archives", ("en", tgt)
    if corpus.files and (source or corpus.urls):
        for lang in languages:
            folder = unpacked(corpus, archives, source, lang=lang)
            for name, paths in files_of(corpus, folder, lang=lang).items():
                take(f"{corpus.name}/{name}.{lang}", paths, raw / f"{name}.{lang}", archives)
        return
    if corpus.script and not raw.exists():
        part = out / "raw.part"
        run(["python", ROOT / "scripts" / corpus.script, *languages, part])
        if not dry_run():
            part.replace(raw)
    if corpus.archives and source:
        link(source, raw, tgt)
    for name, (path, member) in corpus.archives.items():
        packed = ".gz" if member.endswith(".gz") else ""
        files = {lang: raw / f"{name}.{lang}{packed}" for lang in languages}
        is_of_another = tgt != "fr" and "{tgt}" not in member
        if source or is_of_another or all(file.exists() for file in files.values()):
            continue
        fix = "name another --mirror, or corpora at hand by --from"
        archive = fetch(f"{mirror or corpus.home}/{path}", archives, corpus.name, fix)
        for lang, file in files.items():
            shell(f"tar -xOf {quote(str(archive))} {member.format(tgt=tgt, lang=lang)}", file)
    for name, known in corpus.sets.items():
        if not any(file.is_symlink() for file in raw.glob(f"{name}.*")):
            take_test_set(known, tgt, raw / name, archives / "sacrebleu")
            if name == "test" and not dry_run():
                # beside the scores, as their signature does not say it
                (out / "sacrebleu_set").write_text(f"{known}\n")


def link(source: Path, raw: Path, tgt: str) -> None:
    """Links the corpora of a folder into `raw`, by the names that are wanted there."""
    if not dry_run():
        make_folder(raw)
    for file in sorted(source.iterdir()):
        name = re.fullmatch(r"(.*)\.(\w+?)(\.gz)?", file.name)
        lang = LANGUAGES.get(name[2]) if name else None
        if name and lang in ("en", tgt):
            split = {"dev": "valid", "test1": "test"}.get(name[1], name[1])  # mtdata's names
            run(["ln", "-sfn", file.resolve(), raw / f"{split}.{lang}{name[3] or ''}"])


def take_test_set(known: str, tgt: str, output: Path, cache: Path) -> None:
    """Both sides of a test set, by sacreBLEU. `known`: its name there."""
    os.environ["SACREBLEU"] = str(cache)
    if not dry_run() and not list((cache / known).glob(f"*.en-{tgt}.*")):
        # sacreBLEU keeps what it has for good, even an archive of a download that failed
        shutil.rmtree(cache / known, ignore_errors=True)
    for lang, side in (("en", "src"), (tgt, "ref")):
        fix = f"call again, or put it as {output.name}.{{en,{tgt}}} into the folder of --from"
        shell(f"sacrebleu -t {known} -l en-{tgt} --echo {side}", Path(f"{output}.{lang}"), fix)


def say_of_corpora(kind: str) -> str:
    """The corpora of a kind, for --help."""
    found = {name: corpus for name, corpus in CORPORA.items() if corpus.kind == kind}
    lines = [f"  {name:15} {corpus.about}" for name, corpus in found.items() if corpus.about]
    names = [name for name, corpus in found.items() if not corpus.about]
    return "\n".join([*lines, *([f"  {', '.join(names)}: GLUE and SuperGLUE"] if names else []), ""])
