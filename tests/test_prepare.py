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

import pytest
from helpers import ROOT, assert_refused
from small_text import PREPARED, VERSIONS, digest, parallel, write

from recipes import pairs, prepare, steps, subwords
from recipes import text as read_text
from recipes.catalog import CORPORA, SPLITS
from recipes.languages import one_line
from recipes.pairs import FilePair, read_pairs

pytestmark = pytest.mark.usefixtures("programs_in_process")


@pytest.mark.parametrize("name", PREPARED)
def test_the_data_stay_as_they_were(prepared_corpus, name):
    """Text, tokens, subwords and binarised data, byte for byte; also with two processes."""
    if {package: importlib.metadata.version(package) for package in VERSIONS} != VERSIONS:
        pytest.skip(f"the digests are of {VERSIONS}")
    assert digest(prepared_corpus(name)) == PREPARED[name][2]


def test_numbers_stay_as_they_were(tmp_path):
    argv = f"scripts/make_numbers.py en de {tmp_path}/text --train 400 --held-out 50 --seed 2"
    subprocess.run([sys.executable, *argv.split()], cwd=ROOT, check=True)
    assert digest(tmp_path) == "bb21f9558840b8d4"


@pytest.fixture
def raw(tmp_path):
    parallel(tmp_path / "raw")
    return tmp_path / "raw"


def call(*argv):
    return list(map(str, [*argv, "--merges", 60, "--workers", 1]))


def test_the_life_of_a_folder(tmp_path, raw, capfd, monkeypatch):
    """A call that ends leaves no half of anything, the next one goes on, and a finished folder is kept as it is."""
    out, tool, valid = tmp_path / "out", tmp_path / "bin" / "sacremoses", raw / "valid.de"
    argv, train = call(raw, "en", "de", out), out / "text" / "train.en"
    # in place of the tokeniser
    write(tool, ["#!/bin/bash", f"[[ $* != *' de '* || -e {tmp_path}/room ]] && cat || seq 9 > /dev/full"])
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    good = valid.read_bytes()
    valid.write_bytes(b"a\n" * 8 + b"\xdf\n")
    assert_refused(prepare.main, *argv, part="valid.de: line 9 is not UTF-8 .*; convert it, e.g. with iconv$")
    assert train.exists() and not (out / "text" / "valid.de").exists()
    valid.write_bytes(good)
    assert_refused(prepare.main, *argv, part="tok/train.de was not made: .*No space left on device")
    (tmp_path / "room").touch()
    assert [path.name for path in (out / "tok").iterdir()] == ["train.en"] and not (out / "bin").exists()
    write(out / "bin" / "dict.en.txt", ["half"])  # as if a call had been killed there
    kept = (out / "tok" / "train.en").stat().st_mtime_ns
    prepare.main(argv)
    assert (out / "tok" / "train.en").stat().st_mtime_ns == kept and (out / "bin" / "dict.de.txt").exists()
    assert (out / "test.de").read_text() == (raw / "test.de").read_text()
    assert "159 pairs, left out: 1 empty" in capfd.readouterr().out
    known = prepare.digest_of_data(out)
    new = prepare.Option(prepare.PAIRS, prepare.NUMBER, "an option that is not set")
    monkeypatch.setitem(prepare.OPTIONS, "new", new)
    prepare.main(argv)
    assert f"{out} is ready, reusing it" in capfd.readouterr().out and prepare.digest_of_data(out) == known
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    other_settings = f"{out} was made with other settings .(new|lowercase) is None, asked for"
    assert_refused(prepare.main, *argv, "--new", "3", part=f"{other_settings} 3")
    assert_refused(prepare.main, *argv, "--lowercase", part=other_settings)
    valid.write_bytes(good[::-1].strip() + b"\n")  # of the same size
    assert_refused(prepare.main, *argv, part=[f"{raw}: valid.de has changed", f"name another folder, or remove {out}"])
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    valid.write_bytes(good)  # as before, but for its time
    prepare.main(argv)
    assert f"{out} is ready, reusing it" in capfd.readouterr().out
    for side in ("en", "de"):
        write(raw / f"train2.{side}", ["The end"])
    assert_refused(prepare.main, *argv, part=f"{raw}: train2.de has changed, come or gone")
    for more, end in ([], "The end\n"), (["--lowercase"], "the end\n"):
        prepare.remove(out / "bin")  # as if it had been ended before
        prepare.main([*argv, *more])
        assert (out / "tok" / "train.en").read_text() == train.read_text() and train.read_text().endswith(end)


def test_a_folder_of_ones_own(tmp_path, raw, capsys, monkeypatch):
    """Others than train* are named. Missing sets are always the same pairs; none of their sources is trained on."""
    monkeypatch.setattr(pairs, "MOST_HELD_OUT", 20)
    english, german = ([*map(one_line, read_text.lines(raw / f"train.{end}"))] for end in ("en", "de.gz"))
    all_pairs = [*zip(english, german), *zip(map(str.upper, english), german), ("one more " * 600 + "ŵ", "noch einer")]
    for at, side in enumerate(("en", "de")):
        for name, rows in {
            "train": all_pairs[:160],
            "train.more": all_pairs[160:],
            "newstest2014": all_pairs[-1:],
        }.items():
            write(tmp_path / "own" / f"{name}.{side}", [pair[at] for pair in rows])
    outs, drawn = (tmp_path / "out", tmp_path / "again"), []
    for out in outs:
        prepare.main(call(tmp_path / "own", "en", "de", out, "--subwords", "sentencepiece"))
        prefixes = [out / "text" / split for split in SPLITS]
        drawn.append([[*read_pairs(FilePair(Path(f"{prefix}.en"), Path(f"{prefix}.de")))] for prefix in prefixes])
    output = capsys.readouterr().out
    assert "trained on: train, train.more; not on newstest2014, as files to train on begin with train" in output
    train, valid, test = ([tuple(pair) for pair in rows] for rows in drawn[0])
    assert drawn[0] == drawn[1] and all_pairs[-1] in train and {*train, *valid, *test} <= {*all_pairs}
    assert all(15 <= len(rows) <= 20 for rows in (valid, test))
    held_out, kept = ({source.lower() for source, _ in rows} for rows in (valid + test, train))
    assert len(held_out) == len(valid + test) and not held_out & kept
    assert held_out | kept == {source.lower() for source, _ in all_pairs} - {""}
    assert "ŵ".encode() in (outs[0] / "pieces.model").read_bytes()  # SentencePiece has read the long line, too
    assert [*read_text.lines(outs[0] / "test.en")] == [source for source, _ in test]


def test_changed_text_is_noticed_whatever_its_files_are_called(tmp_path, raw):
    """Names may have blanks, and characters that mean something else in patterns and templates."""
    names = ("train 2", "train[1]", "train+more", "train{2}", "train*")
    for name in names:
        for side in ("en", "de"):
            write(raw / f"{name}.{side}", [f"only {name}"])
    argv = call(raw, "en", "de", tmp_path / "{en-de}")
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
    """They have no key, but the size, the time and the SHA-256 of each file."""
    out = tmp_path / "out"
    argv = call(raw, "en", "de", out)
    prepare.main(argv)
    sources = steps.load(out / "key.json")["sources"]
    steps.dump(out / "text.json", {name: [1, 2, digest] for name, digest in sources.items()})
    (out / "key.json").unlink()
    prepare.main(argv)
    assert f"{out} is ready, reusing it" in capfd.readouterr().out
    (out / "key.json").unlink()
    write(raw / "valid.de", ["other"] * 12)
    assert_refused(prepare.main, *argv, part="valid.de has changed")


def test_text_in_an_unfinished_folder_may_change(tmp_path, raw, monkeypatch):
    """What was made of the old text is made again, even if its files are newer."""
    out = tmp_path / "out"
    argv = call(raw, "en", "de", out)
    monkeypatch.setattr(prepare, "tokenize_text", lambda job, text_folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare.main(argv)
    monkeypatch.undo()
    write(raw / "test.de", ["other"] * 10)
    os.utime(raw / "test.de", (1, 1))
    prepare.main(argv)
    assert (out / "test.de").read_text() == "other\n" * 10


def test_an_interrupted_binarisation_leaves_nothing(tmp_path, raw, monkeypatch):
    def interrupted(argv, log):
        write(tmp_path / "out" / "bin" / "dict.en.txt", ["half"])
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare.main(call(raw, "en", "de", tmp_path / "out"))
    assert not (tmp_path / "out" / "bin").exists()


def test_a_folder_that_begins_with_a_dash(tmp_path, raw, monkeypatch, capfd):
    """And what comes next is a command that works as it is printed."""
    monkeypatch.chdir(tmp_path)
    prepare.main(call(raw, "en", "de", "./-out"))
    command = capfd.readouterr().out.splitlines()[-1].split()
    assert command == [str(ROOT / "scripts" / "train.sh"), str(tmp_path / "-out"), "random_vanilla"]
    assert (tmp_path / "-out" / "bin" / "done").exists()


@pytest.mark.parametrize("split, what", [
    ("valid", "train.sh will end with an error when it validates"),
    ("test", "evaluate.sh will refuse it after the training"),
])  # fmt: skip
def test_a_sentence_that_is_too_long_is_named_before_the_training(tmp_path, raw, capfd, split, what):
    for side in ("en", "de"):
        write(raw / f"{split}.{side}", ["short", "a " * 1023, "a " * 1024])
    prepare.main(call(raw, "en", "de", tmp_path / "out"))
    warnings = [line for line in capfd.readouterr().out.splitlines() if "too long" in line]
    assert [line.split(": ")[1:3] for line in warnings] == [
        [f"{split}.{side}", "line 3 is too long"] for side in ("en", "de")
    ]
    assert all(what in line and "--truncate-source 1024" in line for line in warnings)


def test_too_many_merges_for_the_text(tmp_path, raw, capfd):
    """Pieces that the training text has only inside longer ones become <unk>; unknown characters are no such pieces."""
    for side in ("en", "de"):
        write(raw / f"train.{side}", ["abcdef abcd xyz xy"] * 20)
        write(raw / f"valid.{side}", ["abcd ŵ"] * 10)
        write(raw / f"test.{side}", ["abcdef xyz ŵ"] * 20 + ["abxy"] * 10)
    (raw / "train.de.gz").unlink()
    prepare.main([*call(raw, "en", "de", tmp_path / "out")[:-4], "--merges", "999", "--workers", "1"])
    output = capfd.readouterr().out
    assert "note: --merges 999 is more than the text allows; BPE has learned only " in output
    assert re.search(r"warning: [\d.]+ % of the validation and test subwords are unknown .<unk>.: --merges 999", output)
    assert "try --merges 100 in another folder" in output
    for side in ("en", "de"):
        write(raw / f"test.{side}", ["abcd ŵ"])
    prepare.main([*call(raw, "en", "de", tmp_path / "fine")[:-4], "--merges", "999", "--workers", "1"])
    assert "warning" not in capfd.readouterr().out


@pytest.mark.parametrize("change, argv, part", [
    ("", "{raw} en de {tmp}/12:30", "12:30: fairseq takes a colon for the end of a path; use a path without"),
    ("", "{raw} en de {tmp}/a,b", "a,b: fairseq takes a comma for the end of a path; use a path without"),
    ("", "ptb", "ptb: give OUT_DIR too"),
    ("", "{raw} en de {out} --like {raw}", "--like .*raw: has no data of prepare.sh"),
    ("", "{tmp}/no en de {out}", "no: no such folder"),
    ("rm train.de.gz", "{raw} en de {out}", "train.de: no such file, nor train.de.gz"),
    ("truncate -s 99 train.de.gz", "{raw} en de {out}", "train.de.gz: not a complete gzip file"),
    ("truncate -s 10 train.de.gz; echo no >> train.de.gz", "{raw} en de {out}", "train.de.gz: not a complete gzip"),
    ("echo '<html>not found</html>' > train.de.gz", "{raw} en de {out}", "train.de.gz: not a complete gzip file"),
    ("mv train.en all.en; mv train.de.gz all.de.gz", "{raw} en de {out}", "no train.en and train.de; rename all"),
    ("echo one > valid.de", "{raw} en de {out}", "valid.de: has only 1 lines, but the other side has more"),
    ("sed -i 's/.*//' test.en", "{raw} en de {out}", "test.en: line 1 here or in test.de is empty; no line of"),
    ("gunzip train.de; sed -i 10,999d train.*; rm valid.*", "{raw} en de {out}", "train: 8 pairs are too few .* valid"),
    ("", "{raw} en de {out} --subwords sentencepiece --merges 9", r"--merges 9: .* characters; give \d+ or more"),
    ("", "{raw} en en {out}", "en en: give two file extensions"),
    ("", "{raw} en pt.BR {out}", "pt.BR.*letters, digits, - and _"),
    ("", "{raw} en fr {out} --like {wmt}", "--like .*: does not contain text in en and fr"),
    ("", "{raw} en de {out} --like {wmt} --merges 50", "--merges 50: --like .* has 60; remove the flag"),
    ("", "squad {out}", "squad.*ptb, .*personachat"),
    ("", "ptb {out} --lowercase", "--lowercase: has no effect for ptb; remove it"),
    ("", "lm {out}", "lm: cannot be downloaded; name the folder of its text by --from"),
    ("", "ptb {out} --from {raw}", "no train set of ptb; .* named ptb.train.txt or train.txt, or .gz of it"),
    ("mkdir -p ../out; touch ../out/mine", "{raw} en de {out}", "out: was not written by prepare.sh; name another"),
])  # fmt: skip
def test_what_is_refused(tmp_path, raw, prepared_corpus, change, argv, part, monkeypatch):
    """In one line; the folder of the text stays as it is, and nothing is half done."""
    subprocess.run(["bash", "-c", change], cwd=raw, check=True)
    before = {(path, path.read_bytes()) for path in raw.iterdir()}
    folders = {"tmp": tmp_path, "raw": raw, "out": tmp_path / "out", "wmt": prepared_corpus("wmt")}
    monkeypatch.setattr(subwords, "tokenize_file", lambda *args, **options: None)  # what comes after the checks
    assert_refused(prepare.main, *argv.format(**folders).split(), part=part)
    assert not list(tmp_path.rglob("bin/done")) and not list(tmp_path.rglob("*.part"))
    assert {(path, path.read_bytes()) for path in raw.iterdir()} == before


@pytest.mark.parametrize("lang, archives", [("de", 3), ("fr", 5)])
def test_options_of_a_corpus(lang, archives, tmp_path, dry_run, capsys):
    """A corpus has its own defaults; 0 is a number, and no missing one; a dry run writes nothing."""
    prepare.main(["wmt14", lang, str(tmp_path / "out")])
    shown = capsys.readouterr().out
    assert shown.count("+ curl ") == len(re.findall(r"\+ sha256sum .* # [0-9a-f]{64}\n", shown)) == archives
    assert "learn-bpe -s 40000" in shown and shown.splitlines()[-1].startswith("+ fairseq-preprocess")
    assert shown.count(" tokenize -a ") == shown.count("sacremoses") > 0
    for chosen, length in (({}, 250), ({"max-length": 0}, 0)):
        assert prepare.prepare("wmt14", ["en", lang], tmp_path, None, chosen)["max-length"] == length
    assert not any(tmp_path.iterdir())


def test_wmt14(tmp_path, raw, monkeypatch):
    """Archives with several corpora, the test sets of sacreBLEU, a sample; a second call needs nothing of it again."""
    site, out, sums = tmp_path / "site", tmp_path / "wmt", {}
    write(raw / "train.de", read_text.lines(raw / "train.de.gz"))
    for path, member in CORPORA["wmt14"].archives.values():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(site / path, "w:gz") as archive:
            for lang in ("en", "de"):
                archive.add(raw / f"train.{lang}", member.format(tgt="de", lang=lang))
        sums[f"wmt14/{Path(path).name}"] = read_text.digest(site / path)
    monkeypatch.setattr(read_text, "CHECKSUMS", sums)
    monkeypatch.setitem(CORPORA, "wmt14", replace(CORPORA["wmt14"], home=f"file://{site}"))
    for proxy in ("https_proxy", "http_proxy"):  # no network: sacreBLEU cannot fetch its sets
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    argv = call("wmt14", "de", out, "--sample", 100, "--subwords", "sentencepiece")
    assert_refused(
        prepare.main, *argv, part="raw/valid.en was not made: .*; try again, or put the file, named valid.{en,de}, into"
    )
    assert not (out / "raw" / "valid.en").exists() and (out / "raw" / "1-europarl-v7.en").exists()
    for name in ("wmt13", "wmt14/full"):  # sacreBLEU's copies, as if they had been fetched
        prefix = out / "archives" / "sacrebleu" / name / f"{name.replace('/', '_')}.en-de"
        for part in ("docid", "genre", "origlang", "src", "ref"):
            write(Path(f"{prefix}.{part}"), read_text.lines(raw / f"test.{'de' if part == 'ref' else 'en'}"))
    shutil.rmtree(site)
    prepare.main(argv)
    assert (out / "text" / "train.en").read_text().count("\n") == 3 * 99
    assert (out / "sacrebleu_set").read_text() == "wmt14/full\n"
