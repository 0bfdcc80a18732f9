"""Summaries, replies and answers: the corpora, their forms, truncation, scores, and what is said of bad text."""

import dataclasses
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from helpers import ROOT, flag, refused

from recipes import corpora, examples, metrics, pictures, prepare, render, reproduce, tables, tasks, train, translate
from recipes.command import UserError, read_settings
from recipes.corpora import CORPORA
from recipes.tables import TABLES

pytestmark = pytest.mark.usefixtures("recipes_environment", "preprocess_here")
SIZES = "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 --decoder-embed-dim 16 --lr 0.01".split()
NAMES = ["ann", "bob", "eve", "tom", "sue", "kim"]
CHAT = """1 your persona: i like tea.
2 hello!\thi there.
3 tea?\tyes please.
1 your persona: i run.
2 who are you?\ta runner.
"""


def mails(n, start=0):
    """Lines of .jsonl: the subject is the last word but one of the mail."""
    words = [NAMES[(start + i) % 6] for i in range(n)]
    return "".join(json.dumps({"email": f"dear all,\n greetings from {w} today", "subject": w}) + "\n" for w in words)


@pytest.fixture(scope="module")
def aeslc(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aeslc")
    (folder / "train.jsonl.gz").write_bytes(gzip.compress(mails(60).encode()))
    (folder / "dev.jsonl").write_text(mails(6))
    (folder / "test.jsonl").write_text(mails(8, 2))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory, aeslc):
    out = tmp_path_factory.mktemp("data") / "aeslc"
    options = "--merges 30 --lowercase --truncate-source 12 --truncate-target 9 --workers 1".split()
    prepare.main(["aeslc", str(out), "--from", str(aeslc), *options])
    return out


# ---- corpora


def test_articles_in_three_forms(tmp_path):
    """Tables of other column names, with line breaks in quotes; a line each in two files."""
    (tmp_path / "my_train.csv").write_text(',text,y\n0,"A ""long""\nstory.","One.\nTwo."\n')
    (tmp_path / "valid.csv").write_text("article,highlights,id\nnews,new,7\n")
    (tmp_path / "test.source").write_text("one\ntwo\n")
    (tmp_path / "test.target").write_text("1\n2\n")
    found = examples.read(CORPORA["cnndm"], tmp_path, 5)
    assert found["train"] == [examples.Example('A "long" story.', "One. Two.")]
    assert [pair[:2] for pair in found["valid"] + found["test"]] == [("news", "new"), ("one", "1"), ("two", "2")]
    (tmp_path / "test.target").write_text("1\n")
    with pytest.raises(UserError, match=r"test.target: has \d lines, and .*test.source has 2"):
        examples.read(CORPORA["cnndm"], tmp_path, 5)
    (tmp_path / "valid.csv").write_text('article,highlights\n"news,new\nmore,old\n')
    with pytest.raises(UserError, match="valid.csv: the row from line 2 on has a stray quote"):
        examples.read(CORPORA["cnndm"], tmp_path, 5)


def test_subject_lines_of_files(tmp_path):
    for split in ("train", "dev", "test"):
        (tmp_path / split).mkdir()
        for name in "ab":
            text = f"Mail {name},\nof two lines.\n\n@subject\nThe {name}\n\n@ann0\nAnother\n"
            (tmp_path / split / f"{name}.subject").write_text(text)
    assert [pair[:2] for pair in examples.read(CORPORA["aeslc"], tmp_path, 5)["test"]] == [
        ("Mail a, of two lines.", "The a"),
        ("Mail b, of two lines.", "The b"),
    ]


def test_dialogues(tmp_path):
    """Persona and history stand before the utterance, up to a number of them; a dialogue is not divided."""
    for name in ("train", "valid"):
        (tmp_path / f"{name}_self_original_no_cands.txt").write_text(CHAT)
    found = examples.read(CORPORA["personachat"], tmp_path, 5)
    assert found["test"][1][:2] == ("i like tea. | hello! | hi there. | tea?", "yes please.")
    assert examples.read(CORPORA["personachat"], tmp_path, 1)["test"][1].source == "i like tea. | tea?"
    assert {pair.group for pair in found["train"]}.isdisjoint(pair.group for pair in found["valid"])
    assert len(found["train"]) + len(found["valid"]) == len(found["test"]) == 3
    (tmp_path / "dialogues_train.txt").write_text("a __eou__ b __eou__ c __eou__\n" * 10)
    (tmp_path / "dialogues_test.txt").write_text("a __eou__ b __eou__ c __eou__\n")
    found = examples.read(CORPORA["dailydialog"], tmp_path, 5)
    assert [pair[:2] for pair in found["test"]] == [("a", "b"), ("a | b", "c")]
    assert (len(found["train"]), len(found["valid"])) == (18, 2)


def test_a_test_set_alone_is_divided(tmp_path, capsys):
    (tmp_path / "valid_self_original_no_cands.txt").write_text(CHAT * 10)
    found = examples.read(CORPORA["personachat"], tmp_path, 5)
    assert sum(map(len, found.values())) == 30 and "no training set" in capsys.readouterr().out
    groups = [{pair.group for pair in found[split]} for split in examples.SPLITS]
    assert [len(group) for group in groups] == [16, 2, 2] and not groups[0] & groups[1] | groups[1] & groups[2]


@pytest.mark.parametrize(
    "name, contents, parts",
    [
        ("test.jsonl", None, ["no test set of aeslc", "test.jsonl"]),
        ("test.jsonl", b'{"email": "a", "title": "b"}\n', ["test.jsonl", "no column subject", "email, title"]),
        ("test.jsonl", b'{"email": "a", "subject": " "}\n', ["test.jsonl: line 1 has an empty target", "remove it"]),
        ("test.jsonl", b'{"email": "a", "subject": null}\n', ["test.jsonl: line 1 has an empty target", "remove it"]),
        ("test.jsonl", b'{"email": "a"\n', ["test.jsonl: line 1 is no JSON object"]),
        ("dev.jsonl", '{"email": "Stra\u00dfe"}\n'.encode("latin1"), ["dev.jsonl: line 1 is not UTF-8", "iconv"]),
        ("train.jsonl.gz", gzip.compress(mails(9).encode())[:-9], ["train.jsonl.gz: not a whole gzip file"]),
    ],
    ids=["missing", "column", "empty", "null", "json", "encoding", "truncated"],
)
def test_prepare_refuses(tmp_path, aeslc, name, contents, parts):
    folder, out = tmp_path / "text", tmp_path / "out"
    folder.mkdir()
    for file in aeslc.iterdir():
        if file.name != name:
            (folder / file.name).symlink_to(file)
    if contents:
        (folder / name).write_bytes(contents)
    refused(prepare.main, "aeslc", out, "--from", folder, parts=parts)
    assert sorted(tmp_path.iterdir()) == [folder]


def test_a_single_example(tmp_path, capsys):
    """It cannot be trained on and validated with; those with an empty side are counted."""
    folder = tmp_path / "text"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(mails(1))
    with open(folder / "train.jsonl", "a") as file:
        file.write('{"email": "", "subject": "b"}\n')
    parts = ["too few examples of aeslc; none is left for the train set"]
    refused(prepare.main, "aeslc", tmp_path / "out", "--from", folder, parts=parts)
    assert sorted(tmp_path.iterdir()) == [folder]
    assert "train.jsonl: 1 example(s) with an empty side are left out" in capsys.readouterr().out


def test_prepare_refuses_options(tmp_path, aeslc):
    argv = ["aeslc", tmp_path / "out", "--from", aeslc]
    refused(prepare.main, *argv, "--history", "3", parts=["--history 3: not for aeslc"])
    refused(prepare.main, *argv, "--truncate-source", "1", parts=["--truncate-source", "at least 2"])
    refused(prepare.main, *argv, "--keep-end", parts=["--keep-end", "give --truncate-source too"])


def test_a_broken_archive(tmp_path, monkeypatch):
    """One that was downloaded is removed, so that the next call gets it anew; one at hand is kept."""
    site, out = tmp_path / "site", tmp_path / "out"
    site.mkdir()
    (site / "d.zip").write_bytes(b"<html>not found</html>")
    corpus = dataclasses.replace(CORPORA["dailydialog"], home=f"file://{site}", urls=["d.zip"])
    monkeypatch.setitem(CORPORA, "dailydialog", corpus)
    refused(prepare.main, "dailydialog", out, parts=[f"{out}/archives/d.zip: is cut short, or no archive"])
    assert not (out / "archives" / "d.zip").exists()
    refused(prepare.main, "dailydialog", out, "--from", site, parts=[f"{site}/d.zip: is cut short, or no archive"])
    assert (site / "d.zip").exists()
    # one that is whole stays, whatever keeps it from being unpacked
    with zipfile.ZipFile(site / "d.zip", "w") as archive:
        archive.writestr("a/b.txt", "c")
    archives = tmp_path / "new" / "archives"
    archives.mkdir(parents=True)
    (archives / "a").touch()
    parts = [f"{archives}/d.zip: was not unpacked", "NotADirectoryError"]
    refused(prepare.main, "dailydialog", tmp_path / "new", parts=parts)
    assert (archives / "d.zip").exists()


def test_what_is_a_whole_file(tmp_path):
    """Compressed files that are cut off, altered or of another kind are not; a plain text is."""
    text = bytes(random.randrange(256) for _ in range(5000))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a", text)
    with gzip.open(tmp_path / "a.gz", "wb") as file:
        file.write(text)
    for name in ("a.zip", "a.gz"):
        path = tmp_path / name
        whole = path.read_bytes()
        assert corpora.is_whole(path)
        for broken in (b"<html>not found</html>", whole[:-30], whole[:3000] + b"zzzz" + whole[3004:]):
            path.write_bytes(broken)
            assert not corpora.is_whole(path)
    (tmp_path / "a.txt").write_bytes(text)
    assert corpora.is_whole(tmp_path / "a.txt")


def test_a_text_that_cannot_be_written(tmp_path):
    """Its downloads stay, for a full disk is no fault of theirs; one that is cut off is removed."""
    archives, text = tmp_path / "archives", tmp_path / "text"
    archives.mkdir()
    text.mkdir()
    with gzip.open(archives / "a.gz", "wb") as file:
        file.write(b"one\n" * 100_000)
    (archives / "b.gz").write_bytes((archives / "a.gz").read_bytes())
    paths = [archives / "a.gz", archives / "b.gz"]
    (text / "t.txt.part").symlink_to("/dev/full")
    with pytest.raises(UserError, match="t.txt was not made: .*No space left"):
        corpora.take("c/t.txt", paths, text / "t.txt", archives)
    assert all(path.exists() for path in paths)
    paths[1].write_bytes(paths[1].read_bytes()[:-20])
    with pytest.raises(UserError, match="t.txt was not made"):
        corpora.take("c/t.txt", paths, text / "t.txt", archives)
    assert [path.exists() for path in paths] == [True, False]


def test_archives(tmp_path, monkeypatch):
    """Of DailyDialog, which has archives in its archive: from its home, and from a folder at hand."""
    site, inner = tmp_path / "site", tmp_path / "site" / "ijcnlp"
    inner.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        text = f"hello {split} __eou__ hi __eou__\n" * (20 if split == "train" else 2)
        with zipfile.ZipFile(inner / f"{split}.zip", "w") as archive:
            archive.writestr(f"{split}/dialogues_{split}.txt", text)
    (inner / "._train.zip").write_bytes(b"of a file system")
    with zipfile.ZipFile(site / "d.zip", "w") as archive:
        for file in inner.iterdir():
            archive.write(file, f"ijcnlp/{file.name}")
    shutil.rmtree(inner)
    corpus = dataclasses.replace(CORPORA["dailydialog"], home=f"file://{site}", urls=["d.zip"])
    monkeypatch.setitem(CORPORA, "dailydialog", corpus)
    monkeypatch.setattr(prepare, "binarise", lambda *args: None)
    prepare.main(["dailydialog", str(tmp_path / "home")])
    prepare.main(["dailydialog", str(tmp_path / "hand"), "--from", str(site)])
    for out in (tmp_path / "home", tmp_path / "hand"):
        assert (out / "raw" / "test.source").read_text() == "hello test\n" * 2
        assert len((out / "raw" / "train.target").read_text().splitlines()) == 20
    with zipfile.ZipFile(site / "d.zip", "a") as archive:
        archive.writestr("more", "text")
    refused(
        prepare.main,
        "dailydialog",
        tmp_path / "hand",
        "--from",
        site,
        parts=["made with other settings", "its text has changed"],
    )


@pytest.mark.parametrize("name", ["aeslc", "cnndm", "dailydialog", "personachat"])
def test_the_real_corpora(real_text, name):
    family = "dialogue" if name in ("dailydialog", "personachat") else "summarisation"
    found = examples.read(CORPORA[name], real_text(f"{family}/{name}"), 5)
    counts = {"aeslc": (14436, 1960, 1906), "cnndm": (200, 1000, 500), "dailydialog": (76053, 7069, 6740)}
    assert tuple(len(found[split]) for split in examples.SPLITS) == counts.get(name, (6239, 775, 787))


# ---- data


def test_prepare(data, aeslc, capsys):
    """Both sides are cut, the test set's references are whole; a second call keeps it; other options are refused."""
    for side, most in (("source", 11), ("target", 8)):
        lengths = [len(line.split()) for line in (data / "sub" / f"test.{side}").read_text().splitlines()]
        assert max(lengths) == most or side == "target" and max(lengths) < most
    assert (data / "test.target").read_text().split() == [NAMES[(2 + i) % 6] for i in range(8)]
    settings = read_settings(data / "settings")
    assert settings["corpus"] == "aeslc" and settings["truncate_source"] == "12"
    argv = ["aeslc", str(data), "--from", str(aeslc), "--merges", "30", "--lowercase", "--truncate-target", "9"]
    prepare.main([*argv, "--truncate-source", "12"])
    assert "reusing" in capsys.readouterr().out
    older = (data / "settings").read_text().replace("keep_end=\n", "")  # of a version that does not know the option
    (data / "settings").write_text(older)
    prepare.main([*argv, "--truncate-source", "12"])
    assert "reusing" in capsys.readouterr().out and "keep_end" not in older
    refused(prepare.main, *argv, "--truncate-source", "12", "--keep-end", parts=["keep_end=none", "keep_end=True"])
    refused(prepare.main, *argv, "--truncate-source", "13", parts=["truncate_source=12", "truncate_source=13"])
    refused(prepare.main, *argv, "--history", "2", parts=["--history 2: not for aeslc"])


def test_a_long_text_is_cut_as_in_the_data(data):
    """The pieces that translate.sh gives the model are those of the data, of 100,000 words too."""
    import sentencepiece

    settings = read_settings(data / "settings")
    model = sentencepiece.SentencePieceProcessor(model_file=str(data / "pieces.model"))
    lines = [*(data / "text" / "test.source").read_text().splitlines(), "", "greetings from bob " * 33_334]
    cut = translate.as_prepared("\n".join(lines), settings, data / "pieces.model")
    found = [model.encode(line, out_type=str) for line in cut]
    assert [" ".join(line) for line in found[:8]] == (data / "sub" / "test.source").read_text().splitlines()
    assert not found[8] and 10 <= len(found[9]) <= 11  # a blank at the end is lost


def test_the_end_of_a_dialogue_is_kept(tmp_path):
    """Of a source that is too long, and of the lines of translate.sh and of another test set in the same way."""
    import sentencepiece

    said = [f"{name} sat with {other} on the mat" for name, other in zip(NAMES, reversed(NAMES))]
    for split in ("train", "validation", "test"):
        (tmp_path / f"dialogues_{split}.txt").write_text(f"{' __eou__ '.join(said)} __eou__\n" * 4)
    out = tmp_path / "out"
    prepare.main([*f"dailydialog {out} --from {tmp_path} --merges 24 --truncate-source 12 --workers 1".split()])
    model = sentencepiece.SentencePieceProcessor(model_file=str(out / "pieces.model"))
    sources = (out / "text" / "test.source").read_text().splitlines()
    found = [line.split() for line in (out / "sub" / "test.source").read_text().splitlines()]
    assert len(found) == len(sources) and max(map(len, found)) == 11
    for text, pieces in zip(sources, found):
        whole = model.encode(text, out_type=str)
        first = next(i for i, piece in enumerate(whole) if i >= len(whole) - 11 and piece.startswith("\u2581"))
        assert pieces == whole[first:]
    settings = read_settings(out / "settings")
    cut = translate.as_prepared("\n".join(sources), settings, out / "pieces.model")
    assert [model.encode(line, out_type=str) for line in cut] == found
    other = prepare.prepare_test(out / "raw", out)
    assert (other / "sub" / "test.source").read_text() == (out / "sub" / "test.source").read_text()
    targets = [line.split() for line in (out / "sub" / "test.target").read_text().splitlines()]
    assert targets == [model.encode(line, out_type=str) for line in (out / "test.target").read_text().splitlines()]


@pytest.mark.parametrize(
    "subwords, most, kind, kept",
    [
        ("a@@ b c@@ d@@ e f", 3, "bpe", "f"),
        ("a@@ b c@@ d@@ e f", 4, "bpe", "c@@ d@@ e f"),
        ("\u2581a b \u2581c d e", 4, "sentencepiece", "\u2581c d e"),
        ("\u2581a b \u2581c d e", 5, "sentencepiece", "\u2581a b \u2581c d e"),
        ("\u2581a b c d", 2, "sentencepiece", "c d"),
        ("", 2, "bpe", ""),
    ],
)
def test_last_words(subwords, most, kind, kept):
    """From the beginning of a word on; of a word that is longer than all that may stay, its end."""
    script = [sys.executable, ROOT / "scripts" / "last_words.py", most, kind]
    done = subprocess.run([*map(str, script)], input=f"{subwords}\n", capture_output=True, text=True)
    assert done.stdout == f"{kept}\n", done.stderr


def test_another_test_set_is_cut_as_the_data(data, tmp_path):
    """Its subwords are those that the same lines have as the data's own test set."""
    for side in ("source", "target"):
        (tmp_path / f"test.{side}").write_bytes((data / "raw" / f"test.{side}").read_bytes())
    out = prepare.prepare_test(tmp_path, data)
    for side in ("source", "target"):
        assert (out / "sub" / f"test.{side}").read_text() == (data / "sub" / f"test.{side}").read_text()
    assert read_settings(out / "settings")["truncate_source"] == "12"
    (tmp_path / "test.source.orig").touch()  # an editor's copy
    moved = data.rename(data.with_name("moved"))
    try:
        assert prepare.prepare_test(tmp_path, moved) == moved / "tests" / tmp_path.name
    finally:
        moved.rename(data)
    with pytest.raises(UserError, match=f"{out}: {out} has the text, whose files would be overwritten"):
        prepare.prepare_test(out, data)


def test_train_knows_the_pair(data, dry, capsys):
    for name in ("aeslc", "source-target"):
        train.main(["transformer_synth_random_multi30k", name, "--recipe", "pairs_cpu", "--data", str(data)])
        shown = capsys.readouterr().out
        assert flag(shown, "--source-lang") == "source" and flag(shown, "--target-lang") == "target"
    train.main(["transformer_t5_tiny", "dailydialog", "--gpus", "0"])
    assert f"{ROOT}/data/dailydialog/bin" in capsys.readouterr().out
    argv = ["transformer_multi30k", "mine", "--recipe", "pairs_cpu", "--gpus", "0"]
    refused(train.main, *argv, parts=["mine", "aeslc", "prepare.sh"])


def test_data_that_are_not_prepared(tmp_path):
    argv = ["transformer_t5_tiny", "aeslc", "--data", tmp_path, "--gpus", "0"]
    refused(train.main, *argv, parts=["not prepared", f"prepare.sh aeslc {tmp_path}"])
    refused(prepare.main, "squad", tmp_path / "a", parts=["squad: neither", "ptb", "personachat"])


# ---- scores


def test_free_text(monkeypatch):
    """By hand: of two words one is right. METEOR says why it has no figure."""
    scores = metrics.of_free_text(["a dog", "the cats ran"], ["a cat", "the cats ran"])
    assert scores["rouge1"]["score"] == scores["rougeL"]["score"] == 75 and scores["rouge2"]["score"] == 50
    assert scores["rougeLsum"]["score"] == 75
    assert scores["bleu1"]["score"] == 80 and scores["bleu4"]["name"] == "BLEU-4"
    assert scores["cider"]["score"] > 0 and "tok:13a" in scores["cider"]["signature"]
    monkeypatch.setattr(metrics.shutil, "which", lambda name: None)
    without = metrics.of_free_text(["a dog"], ["a cat"])["meteor"]
    assert without == {"score": None, "name": "METEOR", "signature": "not scored: no Java"}


def test_rouge_by_sentences():
    """The sentences of a summary may come in another order: by hand, each has the words of the reference's."""
    found = metrics.rouge(["a b . c d ."], ["c d . a b ."], "L", "Lsum")
    assert found == {"L": [0.5], "Lsum": [1]}


def test_texts_compared():
    """Better for four of four: of the 16 ways to exchange them, two are as far apart. The same text twice: p is 1."""
    wanted = ["a b", "c d", "e f", "g h"]
    found = metrics.compare_free_text(["a x", "c x", "e x", "g x"], wanted, wanted)
    assert (found["metric"], found["baseline"], found["score"]) == ("ROUGE-L", 50, 100)
    assert found["p_value"] == pytest.approx(2 / 16) and "samples:999" in found["signature"]
    assert metrics.compare_free_text(wanted, wanted, wanted)["p_value"] == 1


@pytest.mark.parametrize("program", ["#!/bin/sh\nexit 1\n", "no program"])
def test_java_that_does_not_start(tmp_path, program):
    (tmp_path / "java").write_text(program)
    (tmp_path / "java").chmod(0o755)
    code = "from recipes import metrics; print(metrics.of_free_text(['a'], ['a'])['meteor']['signature'])"
    argv, variables = [sys.executable, "-c", code], {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(argv, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60)
    assert done.stdout == "not scored: Java is there, but does not run METEOR\n", done.stderr


@pytest.mark.skipif(not metrics.shutil.which("java"), reason="METEOR needs Java")
def test_meteor():
    """Also of an empty text, and of one with the bars that METEOR divides texts by."""
    texts = ["the cat sat on the mat", "", "a ||| b"]
    assert metrics.of_free_text(texts[:1], texts[:1])["meteor"]["score"] == 100
    assert 0 < metrics.of_free_text(texts, ["the cat sat on the mat", "hello there", "a b"])["meteor"]["score"] < 100


def test_a_library_that_is_missing(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(metrics.importlib, "import_module", missing)
    with pytest.raises(UserError, match="rouge_score is not installed here; run scripts/setup.sh"):
        metrics.of_free_text(["a"], ["b"])


# ---- all of it


@pytest.mark.slow
def test_a_summariser(data, tmp_path, monkeypatch, capsys):
    """One cell of a table: trained, scored, recorded; then the words of the first command line write a subject."""
    for module in (reproduce, tables, render):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "prepare", lambda *args: None)
    monkeypatch.setitem(TABLES, "personachat", dataclasses.replace(TABLES["personachat"], data=str(data)))
    flags = "--gpus 0 --max-update 40 --save-every 5 --batch-tokens 300 --".split()
    flags += [*SIZES, "--warmup-updates", "5"]
    reproduce.main(["personachat", "--variant", "random", "--seed", "1", "--out", str(tmp_path), "--", *flags])
    run = tmp_path / "runs" / "personachat-personachat-random-seed1-changed"
    record = json.loads((run / "result.json").read_text())
    assert {"rouge1", "rougeL", "bleu1", "bleu4", "meteor", "cider"} <= set(record["figures"])
    assert len((run / "test.hyp.target").read_text().splitlines()) == 8
    assert "reference:" in capsys.readouterr().out
    call = [ROOT / "scripts" / "translate.sh", data, run]
    done = subprocess.run(call, input="Dear all, greetings from Bob today\n", capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1, done.stderr
    other = shutil.copytree(run, tmp_path / "perfect")
    shutil.copy(data / "test.target", other / "test.hyp.target")
    tasks.main([str(data), str(run), "--beam", "1", "--baseline", str(other)])
    shown = capsys.readouterr().out
    assert re.search(r"^baseline 100\.00, this run .*, p = 0\.0.* \(Paired permutation test of ROUGE-L\)$", shown, re.M)
    refused(tasks.main, data, run, "--context-window", "3", parts=["--context-window", "text_to_text"])


def test_figures_side_by_side(tmp_path, monkeypatch):
    """Several of one column; one that was not counted says why."""
    records = [{"figures": {"bleu4": 3.21, "meteor": None}, "signatures": {"meteor": "METEOR|not scored: no Java"}}]
    assert render.figures(records, ["bleu4", "meteor"]) == "3.21 / not scored: no Java"
    records.insert(0, {"figures": {"bleu4": 3.21, "meteor": 7}, "signatures": {"meteor": "METEOR|1.5|pycocoevalcap"}})
    assert render.figures(records, ["meteor"]) == "not scored: no Java"
    shown = render.results("personachat")
    assert "| PersonaChat (BLEU-4/ROUGE-L/METEOR/CIDEr), paper |" in shown
    assert "| `random` | not run | 2.25/15.00/6.42/19.57 | not run |" in shown


def test_one_of_several_figures_is_compared(tmp_path, monkeypatch):
    """That of the significance test, by its name, in the table and in the picture; the time is of all runs."""
    for module in (render, tables):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    folder = tmp_path / "results" / "personachat" / "cpu"
    folder.mkdir(parents=True)
    same = {"dataset": "personachat", "seed": 1, "hardware": "a CPU, 1 thread(s)", "command": "x", "commit": "c"}
    same.update(parameters=1e6, curve={}, versions={"torch": "2"}, signatures={})
    for model, minutes, values in (("transformer", 7, (3, 8.5, 4, 9)), ("random", 11, (2, 9, 5, 7))):
        figures = dict(zip(("bleu4", "rougeL", "meteor", "cider"), values))
        record = {**same, "model": model, "minutes": minutes, "updates": 2 * minutes, "figures": figures}
        (folder / f"personachat-{model}-seed1.json").write_text(json.dumps(record))
    shown = render.results("personachat")
    assert "| minus the Transformer, ROUGE-L [95 %] |" in shown and "| +0.50 |" in shown
    assert "14 to 22 updates each, 7 to 11 minutes of training." in shown
    assert "![ROUGE-L of every model, PersonaChat]" in render.picture("personachat")
    table = TABLES["personachat"]
    rows = render.rows_of(table, table.datasets[0], render.load_cells("personachat"))
    drawn = pictures.runs(table, table.datasets[0], {row: found for row, found in rows.items() if found})
    assert drawn.settings["xlabel"].startswith("ROUGE-L: ")
    dots = [call for call in drawn.calls if call[0] == "scatter"]
    assert [call[1] for call in dots[::2]] == [[[9], ["random"]], [[8.5], ["transformer"]]]
    assert ("axvline", [8.5]) in [call[:2] for call in drawn.calls]


def test_rows_of_the_first_stage():
    """A table of fine-tuned models takes the baselines of denoising too."""
    for model in ("lightconv", "dynamicconv", "transformer_plus"):
        TABLES["aeslc_cpu"].check(None, [model])
    with pytest.raises(UserError, match="--variant lightconv: choose from transformer, "):
        TABLES["cnndm"].check(None, ["lightconv"])
