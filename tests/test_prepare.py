"""Prepared data: equal to those of the first version, whole or not there, and made once."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import ROOT, assert_refused
from small_text import SMALL_CORPORA, VERSIONS, compute_digest, write, write_parallel_text

from recipes import pairs, prepare, steps, subwords
from recipes import text as read_text
from recipes.catalog import CORPORA, SPLITS
from recipes.languages import one_line
from recipes.pairs import FilePair, Pair, read_pairs

pytestmark = pytest.mark.usefixtures("programs_in_process")


@pytest.mark.parametrize("name", SMALL_CORPORA)
def test_the_data_stay_as_they_were(prepared_corpus, name):
    """Text, tokens, subwords and binarised data are the same byte for byte, also with two processes."""
    installed_versions = {package: importlib.metadata.version(package) for package in VERSIONS}
    if installed_versions != VERSIONS:
        pytest.skip(f"the digests are of {VERSIONS}")
    assert compute_digest(prepared_corpus(name)) == SMALL_CORPORA[name].digest


def test_numbers_stay_as_they_were(tmp_path):
    argv = f"scripts/make_numbers.py en de {tmp_path}/text --train 400 --held-out 50 --seed 2"
    subprocess.run([sys.executable, *argv.split()], cwd=ROOT, check=True)
    assert compute_digest(tmp_path) == "bb21f9558840b8d4"


@pytest.fixture
def raw(tmp_path):
    """Returns a folder of text in English and German, as `write_parallel_text` writes it."""
    write_parallel_text(tmp_path / "raw")
    return tmp_path / "raw"


def make_arguments(*argv, merges=60):
    """Returns the arguments of prepare.sh for a small number of subwords and one process.

    Args:
        argv: the first arguments; they are converted to strings.
        merges: the number of subwords.
    """
    return [str(argument) for argument in (*argv, "--merges", merges, "--workers", 1)]


def read_files(folder):
    """Returns the contents of all files in a folder and in its subfolders: {path: its bytes}."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_life_of_a_folder(tmp_path, raw, capfd, monkeypatch):
    """A call that ends leaves no half of anything, the next one goes on, and a finished folder is kept as it is."""
    out = tmp_path / "out"
    valid_file = raw / "valid.de"
    original_valid_text = valid_file.read_bytes()
    text_file = out / "text" / "train.en"
    tokenized_file = out / "tok" / "train.en"
    argv = make_arguments(raw, "en", "de", out)

    # The tokeniser is replaced by a program that copies its input. It fails for German text, as if the disk were full,
    # until there is a file named room.
    tokenizer = tmp_path / "bin" / "sacremoses"
    room = tmp_path / "room"
    write(tokenizer, ["#!/bin/bash", f"[[ $* != *' de '* || -e {room} ]] && cat || seq 9 > /dev/full"])
    tokenizer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tokenizer.parent}:{os.environ['PATH']}")

    # The first call ends at a text that is not UTF-8. The text before it stays.
    valid_file.write_bytes(b"a\n" * 8 + b"\xdf\n")
    assert_refused(prepare.main, *argv, part="valid.de: line 9 is not UTF-8 .*; convert it, e.g. with iconv$")
    assert text_file.exists()
    assert not (out / "text" / "valid.de").exists()

    # The second call ends at the full disk. The English tokens stay.
    valid_file.write_bytes(original_valid_text)
    assert_refused(prepare.main, *argv, part="tok/train.de was not made: .*No space left on device")
    room.touch()
    assert [path.name for path in (out / "tok").iterdir()] == ["train.en"]
    assert not (out / "bin").exists()

    # The third call finishes the folder, and does not make the English tokens again.
    write(out / "bin" / "dict.en.txt", ["half"])  # as if a call had been killed there
    time_of_tokens = tokenized_file.stat().st_mtime_ns
    prepare.main(argv)
    assert tokenized_file.stat().st_mtime_ns == time_of_tokens
    assert (out / "bin" / "dict.de.txt").exists()
    assert (out / "test.de").read_text() == (raw / "test.de").read_text()
    assert "159 pairs, left out: 1 empty" in capfd.readouterr().out

    # A later version of prepare.py, which has one more option, keeps the folder.
    digest_of_data = prepare.digest_of_data(out)
    new_option = prepare.Option(prepare.PAIRS, prepare.NUMBER, "an option that is not set")
    monkeypatch.setitem(prepare.OPTIONS, "new", new_option)
    prepare.main(argv)
    assert f"{out} is ready, reusing it" in capfd.readouterr().out
    assert prepare.digest_of_data(out) == digest_of_data

    # Other settings and a changed text are refused, and the folder stays as it is.
    files = read_files(out)
    other_settings = f"{out} was made with other settings .(new|lowercase) is None, asked for"
    assert_refused(prepare.main, *argv, "--new", "3", part=f"{other_settings} 3")
    assert_refused(prepare.main, *argv, "--lowercase", part=other_settings)
    text_of_same_size = original_valid_text[::-1].strip() + b"\n"
    valid_file.write_bytes(text_of_same_size)
    assert_refused(prepare.main, *argv, part=[f"{raw}: valid.de has changed", f"name another folder, or remove {out}"])
    assert read_files(out) == files

    # A text that only has another time of modification is the same text.
    valid_file.write_bytes(original_valid_text)
    prepare.main(argv)
    assert f"{out} is ready, reusing it" in capfd.readouterr().out

    # More text to train on is a change, too.
    for side in ("en", "de"):
        write(raw / f"train2.{side}", ["The end"])
    assert_refused(prepare.main, *argv, part=f"{raw}: train2.de has changed, come or gone")

    # An unfinished folder is finished with the new text and with other settings.
    prepare.remove(out / "bin")  # as if the last call had ended before
    prepare.main(argv)
    assert tokenized_file.read_text() == text_file.read_text()
    assert text_file.read_text().endswith("The end\n")
    prepare.remove(out / "bin")
    prepare.main([*argv, "--lowercase"])
    assert tokenized_file.read_text() == text_file.read_text()
    assert text_file.read_text().endswith("the end\n")


def read_splits(data):
    """Returns the pairs of each split of prepared text in English and German: {name of the split: its pairs}."""
    pairs_by_split = {}
    for split in SPLITS:
        files = FilePair(data / "text" / f"{split}.en", data / "text" / f"{split}.de")
        pairs_by_split[split] = list(read_pairs(files))
    return pairs_by_split


def write_pairs(prefix, text_pairs):
    """Writes the English sides of pairs to PREFIX.en, and their German sides to PREFIX.de."""
    write(Path(f"{prefix}.en"), [pair.source for pair in text_pairs])
    write(Path(f"{prefix}.de"), [pair.target for pair in text_pairs])


def test_a_folder_of_ones_own(tmp_path, raw, capsys, monkeypatch):
    """Files whose names do not begin with train are not trained on, and are named.

    Validation and test sets that are missing are drawn from the training text. They are always the same pairs, and none
    of their sources is trained on, not even in other case. To test this, each pair of the text is also written with its
    source in capitals.
    """
    most_held_out = 20  # the text has more than 200 pairs, of which a tenth would be more
    monkeypatch.setattr(pairs, "MOST_HELD_OUT", most_held_out)
    english = [one_line(line) for line in read_text.lines(raw / "train.en")]
    german = [one_line(line) for line in read_text.lines(raw / "train.de.gz")]
    pairs_as_written = [Pair(source, target) for source, target in zip(english, german)]
    pairs_in_capitals = [Pair(source.upper(), target) for source, target in zip(english, german)]
    long_pair = Pair("one more " * 600 + "ŵ", "noch einer")  # the letter ŵ is only there
    all_pairs = [*pairs_as_written, *pairs_in_capitals, long_pair]
    folder = tmp_path / "own"
    write_pairs(folder / "train", pairs_as_written)
    write_pairs(folder / "train.more", [*pairs_in_capitals, long_pair])
    write_pairs(folder / "newstest2014", [long_pair])

    out = tmp_path / "out"
    second_out = tmp_path / "again"
    for data in (out, second_out):
        prepare.main(make_arguments(folder, "en", "de", data, "--subwords", "sentencepiece"))
    output = capsys.readouterr().out
    assert "trained on: train, train.more; not on newstest2014, because the names of training files begin" in output

    splits = read_splits(out)
    assert read_splits(second_out) == splits  # the same pairs are drawn again
    train = splits["train"]
    valid = splits["valid"]
    test = splits["test"]
    assert long_pair in train
    assert {*train, *valid, *test} <= set(all_pairs)
    # A few pairs are drawn and then left out, because a pair with the same source has been drawn, too.
    assert 15 <= len(valid) <= most_held_out
    assert 15 <= len(test) <= most_held_out

    # Sources count as equal whatever their case is.
    held_out_pairs = valid + test
    trained_sources = {pair.source.lower() for pair in train}
    held_out_sources = {pair.source.lower() for pair in held_out_pairs}
    assert len(held_out_sources) == len(held_out_pairs)  # no source is held out twice
    assert not held_out_sources & trained_sources
    all_sources = {pair.source.lower() for pair in all_pairs}
    empty_source = {""}  # `write_parallel_text` writes a pair with an empty source, which is left out
    assert held_out_sources | trained_sources == all_sources - empty_source

    assert "ŵ".encode() in (out / "pieces.model").read_bytes()  # SentencePiece has read the long line, too
    assert list(read_text.lines(out / "test.en")) == [pair.source for pair in test]


def test_changed_text_is_noticed_whatever_its_files_are_called(tmp_path, raw):
    """Names may have blanks, and characters that mean something else in patterns and templates."""
    names = ("train 2", "train[1]", "train+more", "train{2}", "train*")
    for name in names:
        for side in ("en", "de"):
            write(raw / f"{name}.{side}", [f"only {name}"])
    argv = make_arguments(raw, "en", "de", tmp_path / "{en-de}")
    prepare.main(argv)
    assert (tmp_path / "{en-de}" / "text" / "train.en").read_text().count("only train") == len(names)
    for name in names:
        write(raw / f"{name}.de", ["other"])
        assert_refused(prepare.main, *argv, part=re.escape(f"{raw}: {name}.de has changed, come or gone"))
        write(raw / f"{name}.de", [f"only {name}"])
    prepare.main(argv)


def test_changed_targets_in_a_second_file_are_noticed(tmp_path):
    for split in ("train", "val", "test"):
        write(tmp_path / "raw" / f"{split}.source", ["a b c d"] * 30)
        write(tmp_path / "raw" / f"{split}.target", ["a b"] * 30)
    argv = ["cnndm", str(tmp_path / "out"), "--from", str(tmp_path / "raw"), "--merges", "20", "--workers", "1"]
    prepare.main(argv)
    write(tmp_path / "raw" / "train.target", ["c d"] * 30)
    assert_refused(prepare.main, *argv, part="raw: train.target has changed")


def test_data_of_an_earlier_version_are_kept(tmp_path, raw, capfd):
    """Such data have no key.json, but a text.json with the size, the time and the SHA-256 of each file.

    Only the SHA-256 says whether a file has changed, so that the size and the time may be wrong.
    """
    out = tmp_path / "out"
    argv = make_arguments(raw, "en", "de", out)
    prepare.main(argv)
    sources = steps.load(out / "key.json")["sources"]
    wrong_size = 1
    wrong_time = 2
    old_records = {name: [wrong_size, wrong_time, sha256] for name, sha256 in sources.items()}
    steps.dump(out / "text.json", old_records)
    (out / "key.json").unlink()
    prepare.main(argv)
    assert f"{out} is ready, reusing it" in capfd.readouterr().out

    # The call has written key.json again. Without it, text.json is compared with the changed text.
    (out / "key.json").unlink()
    write(raw / "valid.de", ["other"] * 12)
    assert_refused(prepare.main, *argv, part="valid.de has changed")


def test_text_in_an_unfinished_folder_may_change(tmp_path, raw, monkeypatch):
    """The files that were made from the old text are made again, even if they are newer than the new text."""
    out = tmp_path / "out"
    argv = make_arguments(raw, "en", "de", out)

    def fail(job, text_folder):
        """Takes the place of `prepare.tokenize_text`."""
        raise RuntimeError("the tokeniser has failed")

    monkeypatch.setattr(prepare, "tokenize_text", fail)
    with pytest.raises(RuntimeError, match="the tokeniser has failed"):
        prepare.main(argv)
    monkeypatch.undo()
    write(raw / "test.de", ["other"] * 10)
    os.utime(raw / "test.de", (1, 1))
    prepare.main(argv)
    assert (out / "test.de").read_text() == "other\n" * 10


def test_an_interrupted_binarisation_leaves_nothing(tmp_path, raw, monkeypatch):
    def write_half(argv, log):
        """Takes the place of `prepare.run`: writes a part of a dictionary, and is interrupted."""
        write(tmp_path / "out" / "bin" / "dict.en.txt", ["half"])
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "run", write_half)
    with pytest.raises(KeyboardInterrupt):
        prepare.main(make_arguments(raw, "en", "de", tmp_path / "out"))
    assert not (tmp_path / "out" / "bin").exists()


def test_a_folder_that_begins_with_a_dash(tmp_path, raw, monkeypatch, capfd):
    """The data are made there, and the last line of the output is the next command, which works as it is printed."""
    monkeypatch.chdir(tmp_path)
    prepare.main(make_arguments(raw, "en", "de", "./-out"))
    command = capfd.readouterr().out.splitlines()[-1].split()
    assert command == [str(ROOT / "scripts" / "train.sh"), str(tmp_path / "-out"), "random_vanilla"]
    assert (tmp_path / "-out" / "bin" / "done").exists()


@pytest.mark.parametrize("split, consequence", [
    ("valid", "train.sh will end with an error when it validates"),
    ("test", "evaluate.sh will refuse it after the training"),
])  # fmt: skip
def test_a_sentence_that_is_too_long_is_named_before_the_training(tmp_path, raw, capfd, split, consequence):
    for side in ("en", "de"):
        write(raw / f"{split}.{side}", ["short", "a " * 1023, "a " * 1024])
    prepare.main(make_arguments(raw, "en", "de", tmp_path / "out"))
    warnings = [line for line in capfd.readouterr().out.splitlines() if "too long" in line]
    files_and_problems = [line.split(": ")[1:3] for line in warnings]
    assert files_and_problems == [
        [f"{split}.en", "line 3 is too long"],
        [f"{split}.de", "line 3 is too long"],
    ]
    for line in warnings:
        assert consequence in line
        assert "--truncate-source 1024" in line


def test_too_many_merges_for_the_text(tmp_path, raw, capfd):
    """Pieces that the training text has only inside longer ones become <unk>; unknown characters are no such pieces.

    With so many merges, each of the four words of the training text becomes a single piece. There is a warning if the
    test set has a word that is made of smaller pieces. There is none for the character ŵ, which is unknown because the
    training text does not have it.
    """
    word_of_smaller_pieces = "abxy"  # a@@ b@@ xy; in the training text, a@@ and b@@ are only inside longer pieces
    for side in ("en", "de"):
        write(raw / f"train.{side}", ["abcdef abcd xyz xy"] * 20)
        write(raw / f"valid.{side}", ["abcd ŵ"] * 10)
        write(raw / f"test.{side}", ["abcdef xyz ŵ"] * 20 + [word_of_smaller_pieces] * 10)
    (raw / "train.de.gz").unlink()  # the fixture's text, which train.de replaces
    prepare.main(make_arguments(raw, "en", "de", tmp_path / "out", merges=999))
    output = capfd.readouterr().out
    assert "note: --merges 999 is more than the text allows; BPE has learned only " in output
    assert re.search(r"warning: [\d.]+ % of the validation and test subwords are unknown .<unk>.: --merges 999", output)
    assert "try --merges 100 in another folder" in output

    # Without that word, only the character is unknown.
    for side in ("en", "de"):
        write(raw / f"test.{side}", ["abcd ŵ"])
    prepare.main(make_arguments(raw, "en", "de", tmp_path / "fine", merges=999))
    assert "warning" not in capfd.readouterr().out


class Refusal(NamedTuple):
    """A call of prepare.sh that is refused.

    Attributes:
        reason: what is wrong.
        argv: the arguments, with the names of folders in braces: {tmp} is the test's, and {out} in it is the output;
            {raw} has text in English and German; {wmt} has prepared data in these languages.
        error: a regular expression for a part of the error message.
        change: a shell command that is run in the folder {raw} before the call.
    """

    reason: str
    argv: str
    error: str
    change: str = ""


REFUSALS = [
    Refusal(
        "a colon in the name of the output",
        argv="{raw} en de {tmp}/12:30",
        error="12:30: fairseq takes a colon for the end of a path; use a path without",
    ),
    Refusal(
        "a comma in the name of the output",
        argv="{raw} en de {tmp}/a,b",
        error="a,b: fairseq takes a comma for the end of a path; use a path without",
    ),
    Refusal(
        "no output",
        argv="ptb",
        error="ptb: give OUT_DIR too",
    ),
    Refusal(
        "like a folder without data",
        argv="{raw} en de {out} --like {raw}",
        error="--like .*raw: has no data of prepare.sh",
    ),
    Refusal(
        "no folder of text",
        argv="{tmp}/no en de {out}",
        error="no: no such folder",
    ),
    Refusal(
        "a missing file",
        change="rm train.de.gz",
        argv="{raw} en de {out}",
        error="train.de: no such file, nor train.de.gz",
    ),
    Refusal(
        "a truncated gzip file",
        change="truncate -s 99 train.de.gz",
        argv="{raw} en de {out}",
        error="train.de.gz: not a complete gzip file",
    ),
    Refusal(
        "text behind a truncated gzip file",
        change="truncate -s 10 train.de.gz; echo no >> train.de.gz",
        argv="{raw} en de {out}",
        error="train.de.gz: not a complete gzip",
    ),
    Refusal(
        "a web page instead of a gzip file",
        change="echo '<html>not found</html>' > train.de.gz",
        argv="{raw} en de {out}",
        error="train.de.gz: not a complete gzip file",
    ),
    Refusal(
        "files with other names",
        change="mv train.en all.en; mv train.de.gz all.de.gz",
        argv="{raw} en de {out}",
        error="no train.en and train.de; if all.* contains this text, rename",
    ),
    Refusal(
        "sides of different length",
        change="echo one > valid.de",
        argv="{raw} en de {out}",
        error="valid.de: has only 1 lines, but the other side has more",
    ),
    Refusal(
        "an empty test sentence",
        change="sed -i 's/.*//' test.en",
        argv="{raw} en de {out}",
        error="test.en: line 1 here or in test.de is empty; correct it, because no line of",
    ),
    Refusal(
        "too little text to hold out a validation set",
        change="gunzip train.de; sed -i 10,999d train.*; rm valid.*",
        argv="{raw} en de {out}",
        error="train: 8 pairs are too few .* valid",
    ),
    Refusal(
        "fewer subwords than characters",
        argv="{raw} en de {out} --subwords sentencepiece --merges 9",
        error=r"--merges 9: .* characters than that; use \d+ or more",
    ),
    Refusal(
        "a language twice",
        argv="{raw} en en {out}",
        error="en en: give two file extensions",
    ),
    Refusal(
        "a full stop in a language",
        argv="{raw} en pt.BR {out}",
        error="pt.BR.*letters, digits, - and _",
    ),
    Refusal(
        "like data of other languages",
        argv="{raw} en fr {out} --like {wmt}",
        error="--like .*: does not contain text in en and fr",
    ),
    Refusal(
        "like data with another number of merges",
        argv="{raw} en de {out} --like {wmt} --merges 50",
        error="--merges 50: --like .* has 60; remove the flag",
    ),
    Refusal(
        "an unknown corpus",
        argv="squad {out}",
        error="squad.*ptb, .*personachat",
    ),
    Refusal(
        "an option without effect",
        argv="ptb {out} --lowercase",
        error="--lowercase: has no effect for ptb; remove it",
    ),
    Refusal(
        "a corpus that cannot be downloaded",
        argv="lm {out}",
        error="lm: cannot be downloaded; name the folder of its text by --from",
    ),
    Refusal(
        "a folder without the corpus",
        argv="ptb {out} --from {raw}",
        error="no train set of ptb; .* named ptb.train.txt or train.txt, with or without .gz",
    ),
    Refusal(
        "an output with other files",
        change="mkdir -p ../out; touch ../out/mine",
        argv="{raw} en de {out}",
        error="out: was not written by prepare.sh; name another",
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.reason)
def test_what_is_refused(tmp_path, raw, prepared_corpus, refusal, monkeypatch):
    """The error is one line. The folder of the text stays as it is, and nothing is half done."""
    subprocess.run(["bash", "-c", refusal.change], cwd=raw, check=True)
    files = read_files(raw)
    folders = {"tmp": tmp_path, "raw": raw, "out": tmp_path / "out", "wmt": prepared_corpus("wmt")}
    # Tokenization comes after the checks, so it is not needed.
    monkeypatch.setattr(subwords, "tokenize_file", lambda *args, **options: None)
    words = refusal.argv.format(**folders).split()
    assert_refused(prepare.main, *words, part=refusal.error)
    assert not list(tmp_path.rglob("bin/done"))
    assert not list(tmp_path.rglob("*.part"))
    assert read_files(raw) == files


@pytest.mark.parametrize("lang, archives", [("de", 3), ("fr", 5)])
def test_options_of_a_corpus(lang, archives, tmp_path, dry_run, capsys):
    """A corpus has its own defaults. The number 0 counts as given. A dry run writes nothing.

    `archives` is the number of archives that are downloaded for the language.
    """
    prepare.main(["wmt14", lang, str(tmp_path / "out")])
    printed = capsys.readouterr().out
    checksums = re.findall(r"\+ sha256sum .* # [0-9a-f]{64}\n", printed)
    assert printed.count("+ curl ") == archives
    assert len(checksums) == archives
    assert "learn-bpe -s 40000" in printed
    assert printed.splitlines()[-1].startswith("+ fairseq-preprocess")
    assert printed.count(" tokenize -a ") == printed.count("sacremoses") > 0

    default_settings = prepare.prepare("wmt14", ["en", lang], tmp_path, None, {})
    assert default_settings["max-length"] == 250
    settings = prepare.prepare("wmt14", ["en", lang], tmp_path, None, {"max-length": 0})
    assert settings["max-length"] == 0
    assert not any(tmp_path.iterdir())


def make_site_of_wmt14(site, raw):
    """Writes the archives of the corpus wmt14 to a folder, with the training text of `raw` in each corpus of theirs.

    Args:
        site: the folder, which takes the place of the site from which the archives are downloaded.
        raw: a folder with the text train.en and train.de.

    Returns:
        The SHA-256 of each archive: {wmt14/NAME: its digest}.
    """
    checksums = {}
    for path, member in CORPORA["wmt14"].archives.values():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(site / path, "w:gz") as archive:
            for lang in ("en", "de"):
                archive.add(raw / f"train.{lang}", member.format(tgt="de", lang=lang))
        checksums[f"wmt14/{Path(path).name}"] = read_text.digest(site / path)
    return checksums


def write_sacrebleu_sets(folder, raw):
    """Writes the sets wmt13 and wmt14/full as sacreBLEU keeps them, as if they had been fetched.

    Args:
        folder: the folder in which sacreBLEU keeps its sets.
        raw: a folder with the text test.en and test.de.
    """
    for name in ("wmt13", "wmt14/full"):
        prefix = folder / name / f"{name.replace('/', '_')}.en-de"
        for part in ("docid", "genre", "origlang", "src"):
            write(Path(f"{prefix}.{part}"), read_text.lines(raw / "test.en"))
        write(Path(f"{prefix}.ref"), read_text.lines(raw / "test.de"))


def test_wmt14(tmp_path, raw, monkeypatch):
    """The corpus has archives with several corpora, and the test sets of sacreBLEU. A sample of it is used.

    A second call needs nothing of the archives again.
    """
    site = tmp_path / "site"
    out = tmp_path / "wmt"
    write(raw / "train.de", read_text.lines(raw / "train.de.gz"))  # the archives have text that is not compressed
    checksums = make_site_of_wmt14(site, raw)
    monkeypatch.setattr(read_text, "CHECKSUMS", checksums)
    monkeypatch.setitem(CORPORA, "wmt14", replace(CORPORA["wmt14"], home=f"file://{site}"))
    for proxy in ("https_proxy", "http_proxy"):  # no network: sacreBLEU cannot fetch its sets
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")

    # The first call reads the archives. It ends at the validation set, which is one of sacreBLEU's.
    argv = make_arguments("wmt14", "de", out, "--sample", 100, "--subwords", "sentencepiece")
    not_fetched = "raw/valid.en was not made: .*; try again, or put the file, named valid.{en,de}, into"
    assert_refused(prepare.main, *argv, part=not_fetched)
    assert not (out / "raw" / "valid.en").exists()
    assert (out / "raw" / "1-europarl-v7.en").exists()

    # The second call finds sacreBLEU's sets, and needs no archive.
    write_sacrebleu_sets(out / "archives" / "sacrebleu", raw)
    shutil.rmtree(site)
    prepare.main(argv)
    num_corpora = 3
    num_pairs_of_corpus = 99  # a sample of 100, of which one pair has an empty side
    assert (out / "text" / "train.en").read_text().count("\n") == num_corpora * num_pairs_of_corpus
    assert (out / "sacrebleu_set").read_text() == "wmt14/full\n"
