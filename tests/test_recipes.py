"""The recipes: what they make, what they run, and what they say when they cannot."""

import argparse
import dataclasses
import fcntl
import functools
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from fairseq import options
from fairseq.data import encoders
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from helpers import NO_THREAD, ROOT, flag, refused, script

from fairseq_synth.architectures import VARIANTS
from recipes import (
    analysis,
    command,
    corpora,
    hyperparameters,
    pictures,
    prepare,
    provenance,
    quickstart,
    record,
    render,
    reproduce,
    scoring,
    tables,
    tasks,
    train,
    translate,
    translation,
)
from recipes.command import UserError
from recipes.hyperparameters import BASELINES, RECIPES

pytestmark = pytest.mark.usefixtures("recipes_environment", "preprocess_here")


def test_a_log_has_whole_lines(tmp_path, monkeypatch):
    """What a program prints and what it logs stand in the order of writing, and no line is inside another."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    program = "import sys\nfor i in range(9):\n print('D' * 3000)\n print('INFO', file=sys.stderr)"
    command.run([sys.executable, "-c", program], log=tmp_path / "log")
    assert (tmp_path / "log").read_text() == ("D" * 3000 + "\nINFO\n") * 9


# ---- data


def make_numbers(folder, *flags):
    argv = [sys.executable, ROOT / "scripts" / "make_numbers.py", "en", "de", folder, *flags]
    subprocess.run([*map(str, argv)], check=True)
    return {p.name: p.read_text().splitlines() for p in folder.iterdir()}


def test_numbers(tmp_path):
    """Aligned, held-out sentences unseen in training, no digit left, the same for the same seed."""
    flags = ["--train", "400", "--held-out", "50"]
    corpus = make_numbers(tmp_path / "a", *flags)
    assert {name: len(lines) for name, lines in corpus.items()} == {
        f"{split}.{lang}": n for split, n in [("train", 400), ("valid", 50), ("test", 50)] for lang in ("en", "de")
    }
    train_set = set(corpus["train.en"])
    assert not train_set & set(corpus["valid.en"]) and not train_set & set(corpus["test.en"])
    assert not any(re.search(r"\d", line) for lines in corpus.values() for line in lines)
    german = " ".join(corpus["train.de"])
    assert "undzwanzig" in german and "vor " in german
    assert make_numbers(tmp_path / "b", *flags) == corpus != make_numbers(tmp_path / "c", *flags, "--seed", "2")


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """A raw corpus: two training corpora, one of them compressed, validation and test set."""
    folder = tmp_path_factory.mktemp("raw")
    make_numbers(folder, "--train", "200", "--held-out", "20")
    for lang in ("en", "de"):
        lines = (folder / f"train.{lang}").read_bytes().splitlines(keepends=True)
        (folder / f"train.{lang}").write_bytes(b"".join(lines[:150]))
        with gzip.open(folder / f"more.{lang}.gz", "wb") as file:
            file.writelines(lines[150:])
    return folder


def copied(raw, folder, **changed):
    """The corpus with some files changed: `valid_de=b"…"` for valid.de."""
    shutil.copytree(raw, folder)
    for name, contents in changed.items():
        (folder / name.replace("_", ".")).write_bytes(contents)
    return folder


def assert_translated_as_prepared(data):
    """translate.sh gives the model the subwords that prepare.sh made of the same text."""
    settings = command.read_settings(data / "settings")
    flags = translation.generation_flags(data, settings, "model.pt", RECIPES["multi30k"])
    *normalise, interactive = translate.pipeline(settings, flags)
    text = (data / "test.en").read_text()
    for program in normalise:
        text = subprocess.run(program, input=text, capture_output=True, text=True, check=True).stdout
    parser = options.get_interactive_generation_parser()
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, [str(word) for word in interactive[1:]]))
    tokenizer, bpe = encoders.build_tokenizer(cfg.tokenizer), encoders.build_bpe(cfg.bpe)
    tokens = [tokenizer.encode(line) if tokenizer else line for line in text.splitlines()]
    assert [bpe.encode(line) for line in tokens] == (data / "sub" / "test.en").read_text().splitlines()


def test_prepare(tmp_path, raw, capfd):
    """Useless pairs are counted and left out; a full disk ends it cleanly; a second call goes on; the third keeps."""
    lines = (raw / "train.de").read_bytes().splitlines(keepends=True)
    lines[:3] = [b"\n", b"word " * 10_000 + b"\n", "ein\u2028 Wort\x85 mehr\n".encode()]
    test = [
        "“Eighty-one” — it's a <b> & [c] ‘d’…",
        "a\u2028 b\x85 c",
        *(raw / "test.en").read_text().splitlines()[2:],
        "",
    ]
    changed = dict(train_de=b"".join(lines), test_en="\n".join(test).encode())
    changed["valid_en"] = b"\xef\xbb\xbf" + (raw / "valid.en").read_bytes()
    folder, out = copied(raw, tmp_path / "raw", **changed), tmp_path / "out"
    argv = [folder, "en", "de", out, "--merges", "100", "--workers", "1"]
    (out / "tok").mkdir(parents=True)
    (out / "settings").touch()  # as a folder of prepare.sh has
    (out / "tok" / "valid.de.part").symlink_to("/dev/full")
    refused(prepare.main, *argv, parts=["tok/valid.de was not made", "No space left on device"])
    assert not (out / "tok" / "valid.de").exists() and not (out / "bin").exists()
    with open(folder / "valid.de", "a") as file:
        file.write(" ")  # another text than the one that was read
    refused(prepare.main, *argv, parts=["other settings", "its text has changed"])
    shutil.copy(raw / "valid.de", folder)
    kept = (out / "tok" / "train.en").stat().st_mtime_ns
    prepare.main([*map(str, argv)])
    assert (out / "tok" / "train.en").stat().st_mtime_ns == kept and (out / "bin" / "dict.de.txt").exists()
    assert (out / "test.de").read_text() == (raw / "test.de").read_text()
    text = (out / "text" / "train.de").read_bytes()
    assert not (out / "text" / "valid.en").read_bytes().startswith(b"\xef\xbb\xbf")
    assert text.startswith(gzip.open(raw / "more.de.gz").read())  # corpora in the order of their names
    assert "ein  Wort  mehr\n" in text.decode()
    said = capfd.readouterr().out
    assert "199 pairs, left out: 1 empty" in said and "198 pairs, left out: 1 longer than 250 tokens" in said
    assert_translated_as_prepared(out)
    shutil.rmtree(folder)
    prepare.main([*map(str, argv)])  # of what is done nothing is needed again
    assert "reusing" in capfd.readouterr().out
    copied(raw, folder)
    refused(prepare.main, *argv, parts=["other settings", "its text has changed"])  # what is there is of another text
    shutil.rmtree(folder)
    refused(prepare.main, *argv, "--lowercase", parts=["other settings", "lowercase="])


def test_prepare_with_sentencepiece(tmp_path, raw):
    argv = [raw, "en", "de", tmp_path / "out", "--subwords", "sentencepiece", "--workers", "1"]
    refused(prepare.main, *argv, "--merges", "30000", parts=["--merges 30000", "Vocabulary size too high"])
    assert not (tmp_path / "out" / "pieces.model").exists()
    prepare.main([*map(str, argv), "--merges", "150"])  # goes on in the same folder
    for name in ("pieces.model", "bin"):  # what is left is of 150 pieces
        (tmp_path / "out" / name).rename(tmp_path / name)
    refused(prepare.main, *argv, "--merges", "160", parts=["other settings", "merges=150"])
    for name in ("pieces.model", "bin"):
        (tmp_path / name).rename(tmp_path / "out" / name)
    pieces = (tmp_path / "out" / "sub" / "test.de").read_text().splitlines()
    assert ["".join(line.split()).replace("\u2581", " ").strip() for line in pieces] == (
        (raw / "test.de").read_text().splitlines()
    )
    assert_translated_as_prepared(tmp_path / "out")


@pytest.mark.parametrize(
    "changed, parts",
    [
        (dict(valid_de=b"one line\n"), ["valid.de", "ends after 1 lines", "aligned"]),
        (dict(test_de=b"\n" * 20), ["test.", "line 1 is empty"]),
        (dict(train_de="Stra\u00dfe\n".encode("latin1") * 150), ["train.de: line 1 is not UTF-8", "0xdf", "iconv"]),
        (dict(train_de="eins\n".encode("utf-16") * 150), ["train.de: line 1 is not UTF-8", "iconv -f utf-16"]),
        (dict(valid_en=b"", valid_de=b""), ["raw/valid: no text is in these files"]),
        (dict(train_en=b"\n" * 150, more_en_gz=gzip.compress(b"\n" * 50)), ["no pair is left of 200 (200 empty)"]),
        (dict(more_en_gz=gzip.compress(b"text\n" * 50)[:-9]), ["more.en.gz", "not a whole gzip file"]),
    ],
    ids=["unequal", "empty-test", "encoding", "utf-16", "no-text", "all-empty", "truncated"],
)
def test_prepare_refuses_text(tmp_path, raw, changed, parts):
    out = tmp_path / "out"
    done = script("prepare.sh", copied(raw, tmp_path / "raw", **changed), "en", "de", out)
    assert done.returncode == 1 and all(part in done.stderr for part in parts), done.stderr
    assert not (out / "bin").exists() and not list(out.glob("text/*"))


def test_prepare_refuses(tmp_path, raw):
    out = tmp_path / "out"
    refused(prepare.main, tmp_path / "no", "en", "de", out, parts=["no: no such folder"])
    refused(prepare.main, raw, "en", "cs", tmp_path / "cs", parts=["valid.cs: no such file"])
    assert not out.exists() and not (tmp_path / "cs").exists()
    folder = copied(raw, tmp_path / "raw", newstest2014_en=b"a\n", newstest2014_de=b"a\n")
    refused(prepare.main, folder, "en", "de", tmp_path / "x", parts=["newstest2014.en", "would be trained on"])
    names = ["val", "tst2013", "flickr-test", "Eval", "news.dev", "flores-devtest", "my-testset", "news-validation"]
    for number, name in enumerate([*names, "wmt-devset2", "held-out", "x.heldout", "newsdev2016", "mini-evaluation"]):
        folder = copied(raw, tmp_path / f"held-out-{number}", **{f"{name}.en": b"a\n", f"{name}.de": b"a\n"})
        refused(prepare.main, folder, "en", "de", tmp_path / "x", parts=[f"{name}.en", "would be trained on"])
    more = {f"{name}.{lang}": b"a\n" for name in ("contest", "medieval", "unheld-out") for lang in ("en", "de")}
    folder = copied(raw, tmp_path / "trained-on", **more)
    (folder / ".en").touch()  # no name: of none
    found = [path.name for path in prepare.training_corpora(folder, "en", "de")]
    assert found == ["contest", "medieval", "more", "train", "unheld-out"]
    refused(prepare.main, raw, "en", "pt-BR", out, parts=["pt-BR: ", "letters, digits and _ only, as in pt_BR"])
    refused(prepare.main, "numbers", "de", out, "--from", raw, parts=[f"--from {raw}", "made on the spot"])
    refused(prepare.main, raw, "en", "de", out, "--subwords", "words", parts=["--subwords", "sentencepiece"])
    refused(prepare.main, raw, "en", "de", out, "--max-ratio", "x", parts=["--max-ratio", "x: must be a number"])
    refused(prepare.main, raw, "en", "en", out, parts=["SRC and TGT are both en"])
    refused(prepare.main, raw, "en", "de", "/proc/none", parts=["/proc/none", "cannot be made"])
    refused(prepare.main, raw, "en", "de", parts=["OUT_DIR", "prepare.sh --help"])


def test_prepare_leaves_what_is_not_its_own(tmp_path, raw):
    """Text in OUT_DIR or in a folder of it that prepare.sh makes; such a folder of others; a folder of a training."""

    def kept(*argv, parts):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        refused(prepare.main, *argv, parts=[*parts, "name another folder"])
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    out = tmp_path / "out"
    for folder in (out, out / "text", out / "raw" / "de", out / "archives"):
        copied(raw, folder, test_en=b"")  # a mistake, after which the folder text is removed
        kept(folder, "en", "de", out, parts=[f"{out}: {folder} has the text, whose files would be overwritten"])
        (out / "settings").write_text("task=translation\n")
        kept(folder, "en", "de", out, parts=[f"{out}: {folder} has the text"])
        shutil.rmtree(out)
    for name in ("raw", "text", "tok", "sub", "bin"):
        (out / name).mkdir(parents=True)
        (out / name / "mine").write_text("x")
        kept(raw, "en", "de", out, parts=[f"{out / name}: was not made by prepare.sh"])
        shutil.rmtree(out)
    for name in ("codes", "pieces.model", "test.answers", "test.en", "test.de"):
        out.mkdir()
        (out / name).write_text("x")
        kept(raw, "en", "de", out, parts=[f"{out / name}: was not made by prepare.sh"])
        shutil.rmtree(out)
    out.mkdir()
    (out / "settings").write_text("arch=transformer_multi30k\n")
    kept(raw, "en", "de", out, parts=[f"{out}: is the folder of a training"])


def test_options_of_a_corpus(tmp_path, dry, capsys):
    """0 is a number, and no missing one; a corpus has its own defaults; others are not taken silently."""
    for more, wanted in (([], "250"), (["--max-length", "0"], "0")):
        prepare.main(["wmt14", "de", str(tmp_path / "out"), *more])
        shown = capsys.readouterr().out
        assert f"--max-length {wanted} --max-ratio 1.5" in shown and "learn-bpe -s 40000" in shown
    refused(prepare.main, "ptb", tmp_path / "out", "--lowercase", parts=["--lowercase: not for ptb"])
    refused(prepare.main, "multi30k", "de", tmp_path / "out", "--mirror", "x", parts=["--mirror x: not for multi30k"])
    refused(prepare.main, "ptb", "de", tmp_path / "out", parts=["prepare.sh ptb OUT_DIR"])
    refused(prepare.main, "wmt14", tmp_path / "out", parts=["prepare.sh wmt14 de|fr OUT_DIR"])
    refused(prepare.main, tmp_path, "en", "de", "out", "--from", tmp_path, parts=["RAW_DIR is the folder of the text"])


def test_a_lock_waits(tmp_path, capsys):
    order = []

    def wait():
        with command.locked(tmp_path / ".lock"):
            order.append("second")

    with command.locked(tmp_path / ".lock") as first:
        with command.locked(tmp_path / ".lock", wait=False) as other:
            assert first and not other
        thread = threading.Thread(target=wait)
        thread.start()
        while "at work" not in capsys.readouterr().out:
            time.sleep(0.01)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_lock_is_held_by_what_has_been_started(tmp_path):
    """A program goes on writing when the process that has started it is killed."""
    code = f"""if True:
        from pathlib import Path
        from recipes.command import locked, started
        with locked(Path({str(tmp_path / ".lock")!r})), started(["sleep", "60"]) as process:
            print(process.pid, flush=True)
    """
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        program = int(process.stdout.readline())
        process.kill()
    try:
        with command.locked(tmp_path / ".lock", wait=False) as lock:
            assert not lock
    finally:
        os.kill(program, signal.SIGKILL)
    with command.locked(tmp_path / ".lock") as lock:
        assert lock


def test_finished_data_stay_as_they_are(tmp_path):
    """Other settings are refused, also where the text has been removed to make room."""
    (tmp_path / "bin").mkdir()
    made = []
    prepare.once(tmp_path, {"lowercase": "", "raw": "1"}, lambda: made.append(tmp_path))
    for settings in ({"lowercase": "True", "raw": "1"}, {"lowercase": "", "raw": "2"}):
        with pytest.raises(UserError, match=f"{tmp_path} was made with other settings"):
            prepare.once(tmp_path, settings, lambda: made.append(tmp_path))
    prepare.once(tmp_path, {"lowercase": "", "raw": "1"}, lambda: made.append(tmp_path))
    assert len(made) == 1


def cache_test_set(out, name, raw):
    """sacreBLEU's copy of a test set, as if it had been fetched: the one of a raw corpus."""
    cache = out / "archives" / "sacrebleu" / name
    cache.mkdir(parents=True, exist_ok=True)
    prefix = f"{name.replace('/', '_')}.en-de"
    shutil.copy(raw / "test.en", cache / f"{prefix}.src")
    shutil.copy(raw / "test.de", cache / f"{prefix}.ref")
    for part in ("docid", "genre", "origlang"):
        (cache / f"{prefix}.{part}").write_text("x\n" * len((raw / "test.en").read_text().splitlines()))


def test_wmt14(tmp_path, raw, monkeypatch, capfd):
    """Download, resumed; checksums; the test sets of sacreBLEU; the pipeline on a sample; a second run."""
    site, sums = tmp_path / "site", {}
    for path, member in corpora.CORPORA["wmt14"].archives.values():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(site / path, "w:gz") as archive:
            for lang in ("en", "de"):
                text = (raw / f"train.{lang}").read_bytes()
                info = tarfile.TarInfo(member.format(tgt="de", lang=lang))
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text))
        sums[f"wmt14/{Path(path).name}"] = hashlib.sha256((site / path).read_bytes()).hexdigest()
    monkeypatch.setattr(corpora, "CHECKSUMS", sums)
    for proxy in ("https_proxy", "http_proxy"):  # no network: sacreBLEU cannot fetch its sets
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    out, europarl = tmp_path / "wmt", site / "wmt13" / "training-parallel-europarl-v7.tgz"
    argv = ["wmt14", "de", out, "--mirror", f"file://{site}", "--sample", "100", "--merges", "100", "--workers", "1"]
    complete = europarl.read_bytes()

    europarl.unlink()
    refused(prepare.main, *argv, parts=["training-parallel-europarl", "cannot be downloaded", "--from"])
    europarl.write_bytes(complete[:-1] + b"?")
    refused(prepare.main, *argv, parts=["europarl", "SHA-256", "removed"])
    assert not list((out / "archives").glob("*europarl*"))
    europarl.write_bytes(b"?" * 1000 + complete[1000:])
    # a download that was cut off goes on: the wrong first bytes are not asked for again
    (out / "archives" / "training-parallel-europarl-v7.tgz.part").write_bytes(complete[:1000])
    refused(prepare.main, *argv, parts=["raw/valid.en was not made"])
    assert not (out / "raw" / "valid.en").exists() and (out / "raw" / "1-europarl-v7.en").exists()
    cache_test_set(out, "wmt13", raw)
    cache_test_set(out, "wmt14/full", raw)
    shutil.rmtree(site)
    prepare.main([*map(str, argv)])
    assert (out / "text" / "train.en").read_text().count("\n") == 300 and (out / "bin" / "done").exists()
    assert (out / "sacrebleu_set").read_text().strip() == "wmt14/full"
    assert_translated_as_prepared(out)  # with hyphens split
    prepare.main([*map(str, argv)])
    assert "reusing" in capfd.readouterr().out


def test_wmt14_from_corpora_at_hand(tmp_path, raw):
    """By mtdata's names; in two processes."""
    folder, out = tmp_path / "at hand", tmp_path / "out"
    folder.mkdir()
    for name, theirs in (("train", "train"), ("valid", "dev"), ("test", "test1")):
        shutil.copy(raw / f"{name}.en", folder / f"{theirs}.eng")
        shutil.copy(raw / f"{name}.de", folder / f"{theirs}.deu")
    argv = ["wmt14", "de", out, "--from", folder, "--sample", "40", "--merges", "50", "--workers", "2"]
    prepare.main([*map(str, argv)])
    assert not (out / "sacrebleu_set").exists()
    assert "@-@" not in (raw / "train.en").read_text() and "@-@" in (out / "tok" / "train.en").read_text()
    refused(prepare.main, *argv, "--merges", "60", parts=["other settings", "merges=50", "merges=60"])
    refused(prepare.main, "wmt14", "de", out, "--from", raw, parts=["other settings", f"from={folder}"])
    (out / "bin" / "done").unlink()
    prepare.main([*map(str, argv[:3]), *argv[5:]])  # goes on as it was begun
    assert (out / "bin" / "done").exists()
    refused(prepare.main, "wmt14", "de", tmp_path / "new", "--from", folder, "--bogus", "5", parts=["--bogus"])
    refused(prepare.main, "wmt14", "cs", out, parts=["cs", "fr"])
    refused(prepare.main, "wmt14", "de", out, "--from", "/nowhere", parts=["--from", "/nowhere: no such folder"])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("lang, archives", [("de", 3), ("fr", 5)])
def test_wmt14_shows_its_commands(tmp_path, lang, archives, dry, capsys):
    prepare.main(["wmt14", lang, str(tmp_path / "out")])
    commands = [line[2:] for line in capsys.readouterr().out.splitlines() if line.startswith("+ ")]
    assert len([c for c in commands if c.startswith("curl ")]) == archives
    assert len([c for c in commands if re.match("sha256sum .* # [0-9a-f]{64}$", c)]) == archives
    assert any("learn-bpe -s 40000" in c for c in commands) and "fairseq-preprocess" in commands[-1]
    assert all(" tokenize -a " in c for c in commands if "sacremoses" in c)
    assert not (tmp_path / "out").exists()


def test_multi30k(tmp_path, multi30k, monkeypatch):
    """Checked, from a folder and from its home; a changed or truncated file is refused and not left behind."""
    monkeypatch.setattr(prepare, "binarise", lambda *args: None)
    folder, out = tmp_path / "corpus", tmp_path / "out"
    shutil.copytree(multi30k, folder)
    folder.chmod(0o755)
    bad = folder / "val.de.gz"
    bad.unlink()
    bad.write_bytes(gzip.compress(b"Ein anderer Text.\n"))
    refused(prepare.main, "multi30k", "de", out, "--from", folder, parts=["val.de.gz", "SHA-256"])
    # those before it passed
    assert sorted(p.name for p in tmp_path.glob("out/raw/[a-z]*")) == ["test.en", "train.de", "train.en", "valid.en"]
    multi30k_here = dataclasses.replace(corpora.CORPORA["multi30k"], home=f"file://{folder}")
    monkeypatch.setitem(corpora.CORPORA, "multi30k", multi30k_here)
    bad.write_bytes((multi30k / "val.de.gz").read_bytes()[:-20])
    refused(prepare.main, "multi30k", "de", tmp_path / "new", parts=["val.de.gz", "unexpected end of file", "anew"])
    assert not list(tmp_path.glob("new/archives/val.de*"))
    bad.write_bytes((multi30k / "val.de.gz").read_bytes())
    prepare.main(["multi30k", "de", str(tmp_path / "new")])
    # out of the way of the corpora that are trained on
    assert sorted(p.name for p in tmp_path.glob("new/raw/[a-z]*") if p.is_file()) == [
        f"{split}.{lang}" for split in ("test", "train", "valid") for lang in ("de", "en")
    ]


# ---- training


def training_command(capsys, *argv):
    """The command that train.sh shows."""
    train.main([*map(str, argv)])
    return capsys.readouterr().out


@pytest.mark.parametrize("nodes, gpus", [(1, 1), (1, 2), (1, 3), (1, 8), (2, 8), (16, 8), (5, 3)])
def test_the_batch_does_not_depend_on_the_gpus(nodes, gpus, dry, capsys):
    argv = ["transformer_synth_random_vanilla_wmt_en_de", "en-de", "--gpus", gpus, "--nodes", nodes]
    shown = training_command(capsys, *argv, *(["--rendezvous", "first:29500"] if nodes > 1 else []))
    tokens, passes = int(flag(shown, "--max-tokens")), int(flag(shown, "--update-freq"))
    assert 32768 - nodes * gpus * passes < nodes * gpus * tokens * passes <= 32768 and tokens <= 4096
    assert ("torchrun" in shown) == (nodes * gpus > 1)
    if nodes * gpus > 1:
        assert flag(shown, "--nproc-per-node") == str(gpus)
    assert flag(shown, "--distributed-world-size") == str(nodes * gpus)


def test_the_length_follows_the_text(tmp_path, raw, dry, monkeypatch, capsys):
    """The longest sentence of any set, its end included, in steps of 8; never less than the architecture takes."""
    monkeypatch.delenv("DRY_RUN")
    folder = copied(raw, tmp_path / "raw", valid_en=b"one\n" * 19 + b"one " * 113 + b"\n")
    data = tmp_path / "data"
    prepare.main([*map(str, [folder, "en", "de", data, "--merges", "100", "--workers", "1"])])
    assert train.longest_sentence(data) > 113
    length = -(-train.longest_sentence(data) // 8) * 8
    monkeypatch.setenv("DRY_RUN", "1")
    argv = ["transformer_synth_random_multi30k", "en-de", "--recipe", "multi30k_cpu", "--data", data]
    capsys.readouterr()
    shown = training_command(capsys, *argv)
    assert flag(shown, "--synth-max-length") == str(length) and f"--synth-max-length {length}: the longest" in shown
    for own in ("--synth-max-length 24", "--synth-max-length=24", "--synth-beyond-length tile"):
        shown = training_command(capsys, *argv, "--", *own.split())
        assert own in shown and str(length) not in shown
    for arch in ("transformer_multi30k", "transformer_synth_random_wmt_en_de"):
        shown = training_command(capsys, arch, *argv[1:2], "--data", data, "--gpus", "0")
        assert "--synth-max-length" not in shown
    rest = ["--finetune-from-model", "/textiles/tile/checkpoint_best.pt"]
    with pytest.raises(UserError, match=r"--init .*: takes up to \d+ tokens, and .* has a sentence of \d+; train that"):
        train.length_flags(argv[0], RECIPES["multi30k_cpu"], data, rest, tmp_path)
    assert train.length_flags(argv[0], RECIPES["multi30k_cpu"], data, ["--synth-beyond-length=tile"], tmp_path) == []
    # functions that take any length; of flags all count, and of one flag also what the architecture says
    for variant, more, follows in (
        ("relative_random_vanilla", "", False),
        ("vanilla", "--encoder-synthesizer random", True),
        ("random", "--encoder-synthesizer=vanilla", True),
        ("random", "--encoder-synthesizer=vanilla:2/relative_random+vanilla:2 --decoder-synthesizer vanilla", False),
        ("random", "--encoder-synthesizer vanilla --decoder-synthesizer vanilla,vanilla,dense,vanilla", True),
    ):
        arch = f"transformer_synth_{variant}_multi30k"
        shown = training_command(capsys, arch, *argv[1:], "--", *more.split())
        assert ("--synth-max-length" in shown) == follows, (variant, more)
    # the recipe of another size says nothing of the architecture's length
    shown = training_command(capsys, argv[0], "en-de", "--recipe", "wmt_en_de", "--data", data, "--gpus", "0")
    assert flag(shown, "--synth-max-length") == str(length) and "takes 100 by default" in shown
    shown = training_command(capsys, "transformer_synth_random_iwslt_de_en", *argv[1:])
    assert "--synth-max-length" not in shown
    parts = ["--batch-tokens 100", f"less than a sentence of {length}"]
    refused(train.main, *argv, "--batch-tokens", "100", parts=parts)
    # what no model takes: fairseq leaves it out of a training set, and would end at it in others
    for split, sizes in (("train", [2000, 3]), ("test", [4, 2000])):
        shown = training_command(capsys, *argv)
        assert flag(shown, "--synth-max-length") == str(length)
        (data / "bin" / f"{split}.en-de.en.idx").write_bytes(struct.pack("<18xQ2i", 2, *sizes))
    refused(train.main, *argv, parts=["line 2 of test.en has 2000 tokens", "takes 1024", "split it"])


def test_slurm(tmp_path):
    """Each machine is called with the job's size and its first machine; flags of fairseq-train stay behind --."""
    (tmp_path / "scontrol").write_text("#!/bin/bash\nprintf 'gpu7\\ngpu8\\n'\n")
    (tmp_path / "srun").write_text('#!/bin/bash\nshift\nexec "$@"\n')
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    env = {"DRY_RUN": "1", "SLURM_JOB_NODELIST": "gpu[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "40007"}
    env["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    argv = ["transformer_wmt_en_de", "en-de", "--gpus", "8", "--", "--lr", "1"]
    done = script("train.slurm", *argv, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--nnodes 2" in done.stdout and "--rdzv-endpoint gpu7:20007" in done.stdout
    assert flag(done.stdout, "--distributed-world-size") == "16" and flag(done.stdout, "--lr") == "1"
    done = script("train.slurm", *argv, env=env, cwd=tmp_path)
    assert done.returncode != 0 and "submit from the project's folder" in done.stderr


def test_train_passes_flags_on(dry, capsys):
    argv = "transformer_wmt_en_de_big en-fr --gpus 1 --precision fp16 --save-every 7 --seed 3 -- --lr 1e-3".split()
    shown = training_command(capsys, *argv)
    assert flag(shown, "--lr") == "1e-3" and flag(shown, "--dropout") == "0.3" and " --fp16 " in shown
    assert flag(shown, "--save-interval-updates") == "7" and flag(shown, "--target-lang") == "fr"
    # a preset without a recipe
    argv = "transformer_synth_random_iwslt_de_en de-en --recipe wmt_en_de --data iwslt --gpus 1".split()
    shown = training_command(capsys, *argv)
    assert flag(shown, "--arch") == "transformer_synth_random_iwslt_de_en" and flag(shown, "--source-lang") == "de"


@pytest.mark.parametrize(
    "argv, parts",
    [
        ("transformer_synth_random_wmt_en_de en-cs", ["en-cs", "--data"]),
        ("transformer_synth_randm_wmt_en_de en-de", ["transformer_synth_randm_wmt_en_de", "random_vanilla,"]),
        ("transformer_synth_random_wmt_en_de_x en-de", ["random_wmt_en_de_x", "no recipe"]),
        ("transformer_iwslt_de_en en-de", ["transformer_iwslt_de_en", "no recipe"]),
        ("transformer_wmt_en_de", ["DATASET", "train.sh --help"]),
        ("transformer_lm_ptb en-de", ["en-de", "ptb, wikitext2", "--data"]),
        ("roberta_synth_randm_imdb imdb", ["roberta_synth_randm_imdb", "roberta_synth_NAME_imdb", "random_vanilla,"]),
        ("transformer_wmt_en_de en-de --gpu 1", ["--gpu 1"]),
        ("transformer_wmt_en_de en-de --seed x", ["--seed", "x: must be an integer"]),
        ("transformer_wmt_en_de en-de --timeout 0", ["--timeout", "at least 1"]),
        ("transformer_wmt_en_de en-de --gpus 1 --nodes 2", ["--nodes 2", "--rendezvous"]),
        ("transformer_wmt_en_de en-de --gpus 2 --processes 2", ["--processes 2", "--gpus 0"]),
        ("transformer_wmt_en_de en-de --gpus 8 --batch-tokens 1000", ["--batch-tokens 1000", "125", "raise"]),
        ("transformer_wmt_en_de en-de --gpus 1 --precision int8", ["--precision", "int8", "bf16"]),
        ("transformer_wmt_en_de en-de --gpus 0 --precision fp16", ["--precision fp16", "needs a GPU"]),
        ("transformer_wmt_en_de en-de --gpus 1 --max-tokens 9", ["--max-tokens 9", "is less than a sentence of 256"]),
        ("transformer_wmt_en_de en-de --gpus 1 -- --save-dir=x", ["-- --save-dir", "give it before --"]),
        ("transformer_wmt_en_de en-de --gpus 1 -- --arch transformer", ["-- --arch", "ARCH says it"]),
        ("transformer_wmt_en_de en-de --gpus 1 -- -s de", ["-- -s: DATASET says it; leave it out"]),
        ("transformer_wmt_en_de en-de --gpus 1 -- --target-lang=en", ["-- --target-lang: DATASET says it"]),
    ],
)
def test_train_refuses(argv, parts, dry):
    refused(train.main, *argv.split(), parts=parts)


def test_train_needs_data_and_a_gpu(tmp_path, dry, monkeypatch):
    if not torch.cuda.is_available():
        refused(train.main, "transformer_wmt_en_de", "en-de", parts=["none found", "--gpus 0"])
    monkeypatch.delenv("DRY_RUN")
    for argv, how in (
        ("transformer_wmt_en_de en-de", "RAW_DIR en de /nowhere"),
        ("transformer_lm_ptb mine", "lm /nowhere --from RAW_DIR"),
        ("roberta_agnews mine", "classification /nowhere --from RAW_DIR"),
        ("transformer_synth_random_t5_tiny mine --recipe denoising_cpu", "spans /nowhere --from RAW_DIR"),
        ("transformer_synth_random_multi30k mine --recipe pairs_cpu", "RAW_DIR source target /nowhere"),
    ):
        parts = ["--data /nowhere", f"run scripts/prepare.sh {how}"]
        refused(train.main, *argv.split(), "--data", "/nowhere", parts=parts)


def test_a_run_is_not_mixed_with_another(tmp_path):
    """Neither with one of other settings, nor with one that is at work; nor on data of another pair of languages."""
    data = tmp_path / "data"
    (data / "bin").mkdir(parents=True)
    (data / "bin" / "done").touch()
    save = tmp_path / "save"
    save.mkdir()
    (save / "settings").write_text("arch=transformer_multi30k\n")
    (save / "checkpoint_last.pt").touch()
    argv = ["transformer_synth_dense_multi30k", "en-de", "--data", data, "--save-dir", save, "--gpus", "0"]
    (data / "settings").write_text("src=de\ntgt=en\n")
    refused(train.main, *argv, parts=["en-de: ", f"--data {data} is de-en"])
    (data / "settings").unlink()
    refused(train.main, *argv[:-3], data, "--gpus", "0", parts=[f"--save-dir {data}: is a folder of data"])
    refused(train.main, *argv, parts=[str(save), "other settings", "arch=transformer_multi30k"])
    with open(save / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(train.main, *argv, parts=[f"--save-dir {save}", "another process is training there"])


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A training that has begun: its data and folder, and a call of train.sh that goes on, up to fairseq-train."""
    data, save = tmp_path / "data", tmp_path / "save"
    (data / "bin").mkdir(parents=True)
    (data / "bin" / "done").touch()
    for lang in ("en", "de"):
        (data / "bin" / f"dict.{lang}.txt").write_text("eins 1\n")
    (data / "settings").write_text("src=en\ntgt=de\nsubwords=bpe\nlowercase=\ndash_splits=\n")
    monkeypatch.setattr(os, "execvp", lambda *argv: None)

    def go_on(*more, recipe="multi30k_cpu"):
        argv = ["transformer_multi30k", "en-de", "--recipe", recipe, "--data", data, "--save-dir", save, "--gpus", "0"]
        train.main([*map(str, argv), *more])

    go_on()
    (save / "checkpoint_last.pt").touch()
    return data, save, go_on


def faults_of_memory_used_again():
    """How often the system has to provide memory to a program that takes, fills and frees 64 MiB, 20 times."""
    code = "import resource as r\nfor _ in range(20): b'x' * 2**26\nprint(r.getrusage(r.RUSAGE_SELF).ru_minflt)"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def test_a_training_on_a_cpu_keeps_its_memory(begun, monkeypatch):
    """Memory that it frees is not given back to the system, which would fill it with zeros anew in every update."""
    _, save, go_on = begun
    kept = faults_of_memory_used_again()
    for name in ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name)
    assert faults_of_memory_used_again() > 10 * kept
    # what the user has set stays, and on a GPU nothing is set
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "12345")
    go_on()
    assert os.environ["MALLOC_TRIM_THRESHOLD_"] == "12345"
    monkeypatch.delenv("MALLOC_MMAP_MAX_")
    monkeypatch.setattr(train, "gpus_here", lambda: (1, "bf16"))
    go_on("--gpus", "1", "--save-dir", str(save.parent / "gpu"))
    assert "MALLOC_MMAP_MAX_" not in os.environ


def test_a_run_knows_its_data(begun):
    """Data made anew in the same folder, with other words or other options, are not taken for those of the run."""
    data, save, go_on = begun
    go_on()
    said = f"{save}: {data} was made anew since, with other settings or words"
    for file in (data / "bin" / "dict.de.txt", data / "settings"):
        kept = file.read_text()
        file.write_text(f"{kept}zwei=1\n")
        init = functools.partial(train.init_flags, save, "transformer_multi30k", data, [], save)
        for call in (go_on, functools.partial(scoring.read_run_settings, data, save), init):
            with pytest.raises(UserError, match=said):
                call()
        file.write_text(kept)
    go_on()


def test_a_run_without_a_checkpoint_takes_new_data(begun):
    """A training that failed before its first checkpoint has learned nothing of the earlier data."""
    data, save, go_on = begun
    (save / "checkpoint_last.pt").unlink()
    (data / "bin" / "dict.de.txt").write_text("zwei 1\n")
    go_on()
    assert f"data_digest={train.digest_of(data)}" in (save / "settings").read_text().splitlines()


def test_a_training_that_begins_anew_keeps_nothing_of_another(begun):
    """Its record has its own updates and machine alone; scores of a removed model are not taken for its own."""
    _, save, go_on = begun
    left = [save / "train.log", save / "scores.json", save / "tests" / "other" / "scores.json"]
    left[-1].parent.mkdir(parents=True)
    for path in left:
        path.write_text("{}")
    (save / "provenance.json").write_text('[{"hardware": "another"}]')
    go_on()
    assert all(path.exists() for path in left) and len(json.loads((save / "provenance.json").read_text())) == 2
    (save / "checkpoint_last.pt").unlink()
    go_on("--seed", "7")
    (start,) = json.loads((save / "provenance.json").read_text())
    assert not any(path.exists() for path in left) and start["hardware"] != "another"


def test_a_run_without_its_last_checkpoint_keeps_its_settings(begun):
    """Other checkpoints would be averaged with those of another training."""
    _, save, go_on = begun
    (save / "checkpoint_last.pt").rename(save / "checkpoint_2_20.pt")
    with pytest.raises(UserError, match="it has seed=1, asked for seed=7"):
        go_on("--seed", "7")
    go_on()


def test_a_second_stage_goes_on_with_its_first(begun):
    """Its first stage has been evaluated since, which has made an average."""
    data, save, _ = begun
    first = save.parent / "first"
    first.mkdir()
    (first / "checkpoint_best.pt").touch()
    init = functools.partial(train.init_flags, first, "transformer_multi30k", data, [], save)
    begun_with = init()
    (save / "settings").write_text(f"flags={' '.join(begun_with)} --lr 1\n")
    (first / "checkpoint_avg.pt").touch()
    assert init() == begun_with == ["--finetune-from-model", str(first / "checkpoint_best.pt")]
    (save / "checkpoint_last.pt").unlink()
    assert init() == ["--finetune-from-model", str(first / "checkpoint_avg.pt")]


def test_a_run_goes_on_as_it_was_begun(begun, monkeypatch):
    """With the precision and the recipe's flags that it had, and with a schedule that ends where it was to end."""
    _, save, go_on = begun
    go_on("--max-update", "9000")  # the learning rate does not follow it
    with pytest.raises(UserError, match="it has precision=fp32, asked for precision=bf16"):
        go_on("--precision", "bf16")
    recipe = RECIPES["multi30k_cpu"]
    monkeypatch.setitem(RECIPES, "multi30k_cpu", dataclasses.replace(recipe, flags={**recipe.flags, "lr": "1"}))
    with pytest.raises(UserError, match="it has recipe_flags=.* --lr 3e-3 .*, asked for recipe_flags=.* --lr 1 "):
        go_on()
    (save / "settings").unlink()
    cosine = dataclasses.replace(recipe, flags={**recipe.flags, "lr-scheduler": "cosine"})
    monkeypatch.setitem(RECIPES, "multi30k_cpu", cosine)
    go_on()
    with pytest.raises(UserError, match="it has max_update=7000, asked for max_update=9000"):
        go_on("--max-update", "9000")


def test_the_end_of_a_schedule():
    command = "fairseq-train --lr-scheduler inverse_sqrt --max-update 5 --lr-scheduler {}".format
    assert train.schedule(command("cosine").split()) == "5" and train.schedule(command("inverse_sqrt").split()) == ""
    assert train.schedule(command("cosine --lr-period-updates 3").split()) == ""


def test_a_training_that_went_on_after_its_average(tmp_path, capsys):
    """translate.sh takes the average all the same, and says so; an evaluation without one removes it."""
    for name in ("avg", "best", "last"):
        (tmp_path / f"checkpoint_{name}.pt").touch()
    os.utime(tmp_path / "checkpoint_last.pt", (0, 0))
    assert train.best_checkpoint(tmp_path).name == "checkpoint_avg.pt" and capsys.readouterr().err == ""
    os.utime(tmp_path / "checkpoint_avg.pt", (0, 0))
    os.utime(tmp_path / "checkpoint_last.pt", (9, 9))
    assert train.best_checkpoint(tmp_path).name == "checkpoint_avg.pt"
    assert "checkpoint_avg.pt is older than checkpoint_last.pt; evaluate.sh averages anew" in capsys.readouterr().err
    with scoring.atomic_evaluation(tmp_path) as out:
        (out / "scores.json").touch()
    assert train.best_checkpoint(tmp_path).name == "checkpoint_best.pt"


def test_the_scripts_are_those_of_their_folder(tmp_path):
    """Not those of another copy of the project in the current folder."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").touch()
    (tmp_path / "recipes" / "__main__.py").write_text("print('the other copy')\n")
    done = script("train.sh", "--help", cwd=tmp_path)
    assert done.returncode == 0 and "scripts/train.sh ARCH DATASET" in done.stdout
    argv = ["transformer_nothing", "en-de", "--save-dir", tmp_path / "save"]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "recipe.py", "train", *argv],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "error: transformer_nothing: no recipe" in done.stderr


def test_a_training_finds_what_its_caller_does(tmp_path, monkeypatch, capfd):
    """fairseq may be in a folder that only PYTHONPATH names."""
    (tmp_path / "sitecustomize.py").write_text("print('found')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    train.start(["--help"])
    assert capfd.readouterr().out.startswith("found\n")


def test_a_recipe_that_is_gone(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}/settings: there is no recipe old"):
        scoring.recipe_of(translation.Translation, tmp_path, {"recipe": "old"})


def test_equal_translations(tmp_path):
    """sacreBLEU's bootstrap has p = 0.001 for them."""
    lines = ["ein Mann spielt Gitarre ."] * 3
    (tmp_path / "settings").write_text("lowercase=\ntgt=de\n")
    found = translation.Translation.test(tmp_path, lines, lines[:], lines[:])
    assert found["p_value"] == 1 and found["score"] == found["baseline"] == 100


def test_references_of_a_baseline(tmp_path):
    """A baseline was evaluated on a test set of the same text, whatever has become of its data since."""
    data, base = tmp_path / "data", tmp_path / "base"
    for folder in (data, base):
        folder.mkdir()
    (data / "settings").write_text("src=en\ntgt=de\n")
    (data / "test.de").write_text("eins\n")
    argv = (translation.Translation, data, base)
    found = {"references": scoring.references(*argv)}
    (base / "evaluation.json").write_text(json.dumps(found))
    scoring.check_references(*argv)
    said = f"--baseline {base}: was evaluated on another test set than that of {data}, .*; evaluate it again"
    (data / "test.de").write_text("zwei\n")
    with pytest.raises(UserError, match=said):
        scoring.check_references(*argv)
    (base / "evaluation.json").unlink()
    with pytest.raises(UserError, match=said):
        scoring.check_references(*argv)


CONFIGS = {"wmt_en_de": 8, "wmt_en_fr": 8, "wmt_en_de_big": 8, "multi30k": 2, "multi30k_cpu": 1}  # for how many GPUs
REGISTERED = ("criterion", "optimizer", "lr_scheduler")
# of the command line alone, found by fairseq itself, or interpolated from another value
ELSEWHERE = """common.user_dir distributed_training.distributed_world_size checkpoint.save_dir model._name model.arch
    model.data model.encoder_synthesizer model.decoder_synthesizer task.data""".split()


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_are_the_recipes(name):
    """Hydra's configs/NAME.yaml and the recipe's command are the same training, in every value that fairseq knows."""
    from fairseq.dataclass.initialize import hydra_init
    from hydra.experimental import compose, initialize_config_dir  # its place in Hydra 1.0
    from omegaconf import OmegaConf

    recipe = RECIPES[name]
    pair = "en-fr" if name.endswith("fr") else "en-de"
    args = train.make_parser().parse_args([recipe.architecture("random_vanilla"), pair, "--recipe", name])
    args.gpus, args.processes = 0, CONFIGS[name]  # stand for the GPUs, so that none is looked for
    words = train.training_command(args, recipe, ROOT, ROOT, [])
    words = [word for word in words[words.index(str(ROOT / "bin")) :] if word != "--cpu"]
    parsed = options.parse_args_and_arch(options.get_training_parser(), input_args=words)
    wanted = OmegaConf.to_container(convert_namespace_to_omegaconf(parsed), enum_to_str=True)
    wanted["common"]["cpu" if recipe.gpus == 0 else "bf16"] = True
    wanted["model"] = vars(wanted["model"]) if isinstance(wanted["model"], argparse.Namespace) else wanted["model"]
    hydra_init(name)  # as fairseq-hydra-train does: its own defaults become the schema of this name
    with initialize_config_dir(config_dir=str(ROOT / "configs")):
        composed = compose(name, overrides=["common.user_dir=x", "task.data=x", "model.encoder_synthesizer=dense"])
    assert composed.model.decoder_synthesizer == "dense"
    assert composed.lr_scheduler.warmup_updates == int(recipe.flags["warmup-updates"])
    found = OmegaConf.to_container(composed, enum_to_str=True)
    compared = set()
    for group in (
        "common",
        "distributed_training",
        "dataset",
        "optimization",
        "checkpoint",
        "model",
        "task",
        *REGISTERED,
    ):
        known = found[group]
        for key in known.keys() & wanted[group].keys():
            if f"{group}.{key}" not in ELSEWHERE and not str(known[key]).startswith("${"):
                assert str(known[key]) == str(wanted[group][key]), f"{group}.{key}"
                compared.add(key)
    said = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    given = {
        key for values in (yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())).values() for key in values
    }
    apart = {place.split(".")[1] for place in ELSEWHERE} | {"_name", "optimizer", "criterion", "lr_scheduler"}
    assert said | given <= compared | apart and len(compared) > 100


# ---- results

LOG = """\
2026-11-22 02:56:48 | INFO | fairseq_cli.train | num. shared model params: 1,850,624 (num. trained: 1,850,624)
2026-11-22 02:56:48 | INFO | fairseq_cli.train | num. expert model params: 0 (num. trained: 0)
2026-11-22 02:57:24 | INFO | train_inner | epoch 001:    100 / 546 loss=11.111, nll_loss=10.936, ppl=1958.63, \
wps=2648.2, ups=2, wpb=900, bsz=54.1, num_updates=100, lr=0.000200093, gnorm=1.764, clip=99, train_wall=33, wall=36
2026-11-22 02:57:57 | INFO | train_inner | epoch 001:    200 / 546 loss=8.925, nll_loss=8.445, ppl=348.52, \
wps=2731.6, ups=0.1, wpb=800, bsz=55.4, num_updates=200, lr=0.000400087, gnorm=1.396, clip=74, train_wall=32, wall=69
2026-11-22 02:59:05 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 7.806 | nll_loss 7.096 | ppl 136.82 | \
wps 7064 | wpb 689 | bsz 40.6 | num_updates 200
2026-11-22 02:57:57 | INFO | train_inner | epoch 001:    200 / 546 loss=8.925, nll_loss=8.445, ppl=348.52, \
wps=2731.6, ups=2, wpb=800, bsz=55.4, num_updates=200, lr=0.000400087, gnorm=1.396, clip=74, train_wall=32, wall=69
2026-11-22 03:01:39 | INFO | valid | epoch 002 | valid on 'valid' subset | loss 6.342 | nll_loss 5.394 | ppl 42.04 | \
wps 8547.4 | wpb 689 | bsz 40.6 | num_updates 240 | best_loss 6.342
"""


def test_what_a_program_says(tmp_path, capfd):
    """Its errors are shown, but for the line that the user gets as the only one."""
    code = "echo watch out >&2; echo 'error: text.en: line 2 is empty' >&2; exit 1"
    refused(lambda _: command.run(["bash", "-c", code]), parts=["text.en: line 2 is empty"])
    said = capfd.readouterr().err
    assert "watch out" in said and "line 2" not in said
    refused(lambda _: command.run(["false"]), parts=["false failed, see above"])
    code, log = "printf 'no \\xff\\n'; exit 1", tmp_path / "log"  # no UTF-8
    refused(lambda _: command.run(["bash", "-c", code], log), parts=["bash failed: no", f"see {log}"])


def test_a_program_is_ended_with_the_script(tmp_path):
    """Also one that writes to a log."""
    code = f"echo $$ > {tmp_path}/pid; exec sleep 60"

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for log in (None, tmp_path / "log"):
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(KeyboardInterrupt):
                command.run(["bash", "-c", code], log=log)
            with pytest.raises(ProcessLookupError):
                os.kill(int((tmp_path / "pid").read_text()), 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_read_log():
    """A run that was resumed counts its updates once."""
    assert record.read_log(LOG) == {
        "parameters": 1850624,
        "updates": 240,
        "target_tokens_updates_x_wpb": 240 * 850,
        "minutes": 2.0,
        "curve": {"updates": [200, 240], "valid_loss": [7.806, 6.342], "valid_ppl": [136.82, 42.04]},
    }
    line = '| INFO | valid | {"epoch": 1, "valid_loss": "7.8", "valid_ppl": "136.82", "valid_num_updates": "350"}'
    assert record.log_lines(line, "valid") == [{"epoch": 1, "loss": 7.8, "ppl": 136.82, "num_updates": 350}]
    for text, part in (("", "num. trained"), (LOG.splitlines()[0], "num_updates")):
        with pytest.raises(UserError, match=part):
            record.read_log(text)


def test_alpha():
    ours = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    weights = {
        "decoder.layers.1.self_attn.synthesizer.alpha": ours,
        "decoder.layers.1.self_attn.synthesizer.components.dense.W1": ours,
    }
    weights["encoder.layers.0.self_attn.synthesizer.components.random.R"] = ours
    expected = {"decoder.layers.1": {"dense": [0.5, 0.1192], "vanilla": [0.5, 0.8808]}}
    assert record.mixture_weights(weights) == expected


def test_alpha_of_an_older_checkpoint():
    """Each function had a row of its own. A run that was trained then may be recorded again."""
    prefix = "encoder.sentence_encoder.layers.0.self_attn.synthesizer.components"
    weights = {f"{prefix}.vanilla.alpha": torch.zeros(2), f"{prefix}.random.alpha": torch.tensor([0.0, 1.0])}
    weights[f"{prefix}.random.R"] = torch.zeros(2, 3, 3)
    expected = {"encoder.layers.0": {"random": [0.5, 0.7311], "vanilla": [0.5, 0.2689]}}
    assert record.mixture_weights(weights) == expected
    assert f"{prefix}.random.alpha" in weights


def test_alpha_of_heads_of_different_kinds():
    """A group has an entry of its own: its weights are those of its heads alone."""
    weights = {}
    for group, names in enumerate([["random"], ["dense", "random"]]):
        prefix = f"encoder.layers.0.self_attn.synthesizer.groups.{group}"
        weights[f"{prefix}.alpha"] = torch.zeros(len(names) + 1, 2 + group)
        weights.update({f"{prefix}.components.{name}.{weight}": torch.zeros(2) for name in names for weight in "ab"})
    found = record.mixture_weights(weights)
    assert found["encoder.layers.0.groups.0"] == {"random": [0.5, 0.5], "vanilla": [0.5, 0.5]}
    assert found["encoder.layers.0.groups.1"]["dense"] == [0.3333] * 3 and len(found) == 2


def test_translations_and_compounds():
    generated = "S-1\tso\nH-1\t-0.5\ta@@ b\nD-1\t-0.5\tab\nD-10\t-1\t\nD-0\t-0.2\tzuerst - so\n"
    assert translation.hypotheses(generated, "D", 3, "fairseq-generate") == ["zuerst - so", "ab", ""]
    with pytest.raises(UserError, match="fairseq-generate has left 2 of 3 sentences out"):
        translation.hypotheses(generated, "H", 3, "fairseq-generate")
    assert translation.split_compounds("ein Hin-und-her - so") == "ein Hin ##AT##-##AT## und ##AT##-##AT## her - so"


def test_german_quotation_marks(tmp_path):
    """Training text has plain ones. The compound-split figure does not count them as errors, sacreBLEU's does."""
    settings = {"src": "en", "tgt": "de", "lowercase": "", "subwords": "sentencepiece"}
    task = translation.Translation(tmp_path, settings, RECIPES["wmt_en_de"], tmp_path, tmp_path)
    scores = task.scores(['Er sagt "ja" zu ihr und geht.'], ["Er sagt „ja“ zu ihr und geht."], "")
    assert scores["compound_split"]["score"] == pytest.approx(100) and scores["bleu"]["score"] < 99


def result(model, seed, bleu, **others):
    """A record of multi30k_cpu."""
    curve = {"updates": [350, 700], "valid_loss": [7 - bleu / 10, 5 - bleu / 10], "valid_ppl": [9, 8]}
    figures = {"dataset": "en-de", "model": model, "seed": seed, "figures": {"bleu": bleu}, "signatures": {"bleu": "s"}}
    figures.update(updates=7000, minutes=22, parameters=1e6, curve=curve, versions={"torch": "2"}, hardware="h")
    figures["command"] = "reproduce.sh multi30k_cpu"
    return {**figures, "commit": "c", **others}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """results/ with a Transformer, a model that is ahead of it and one of one seed."""
    for module in (analysis, render, tables):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    folder = tmp_path / "results" / "multi30k_cpu" / "gpu"
    folder.mkdir(parents=True)
    alpha = {"encoder.layers.0": {"random": [0.2, 0.4], "vanilla": [0.8, 0.6]}}
    records = [result("transformer", s, 30 + s) for s in (1, 2, 3)]
    records += [result("random", s, 31 + 1.5 * s) for s in (1, 2, 3)]
    records += [result("random_vanilla", 2, 33, alpha=alpha, significance={"p_value": 0.01, "metric": "BLEU"})]
    records[-1]["commit"] = "c; later"
    for r in records:
        (folder / f"{r['dataset']}-{r['model']}-seed{r['seed']}.json").write_text(json.dumps(r))
    return folder


def inspected():
    """What the inspection says of a model of one layer and two heads."""
    shares = {"trained": [0.25] * 4, "initial": [0.1, 0.2, 0.3, 0.4]}
    histogram = {"low": 0.0, "high": 1.0, "shares": shares, "deviation": {"trained": 1.0, "initial": 1.0}}
    attentions = {
        f"{group}.0": {
            **dict.fromkeys(("entropy", "diagonal", "neighbours", "word_dependence", "distance"), [0.25, 0.75]),
            **{"gradient": [0.1, 0.3], "left_out": [0, 0], "alpha": None, "layer": 0, "heads": 2, "group": group},
            "histograms": dict.fromkeys(("parameters", "logits", "weights"), histogram),
            "pattern": [[[row * 100 + column for column in range(20)] for row in range(20)]] * 2,
            "singular_values": [[0, 0.5, 1]] * 2,
        }
        for group in analysis.GROUPS
    }
    layers = {"as it is": {"equal_rows": [0.5], "rank_one": [0.4]}}
    curves = {group: {"share": [0, 0.5, 1], "loss": [1, 2, 3], "bleu": [30.0, 20.0, 10.0]} for group in analysis.GROUPS}
    return {
        "checkpoint": {"updates": 7000},
        "attentions": attentions,
        "data": {"subset": "valid", "sentences": 9},
        "loss": 1.0,
        "layers": dict.fromkeys(("trained", "initial"), {"encoder": layers, "decoder": layers}),
        "removal": {"groups": curves, "signature": "s", "beam": 1},
        "sentences": ["many"],
    }


@pytest.fixture
def trained(results, tmp_path):
    """A folder with the runs of two models and where one of them was inspected; the arguments of analyse.sh for it."""
    out = tmp_path / "out"
    for model in ("transformer", "random"):
        run = out / "runs" / f"multi30k_cpu-en-de-{model}-seed1"
        run.mkdir(parents=True)
        (run / "checkpoint_avg.pt").touch()
    return out, ["multi30k_cpu", "--pair", "en-de", "--out", str(out)]


def inspection(folder, figures):
    """What python -m fairseq_synth.inspect has left of the model `random` in a folder."""
    folder = folder / "multi30k_cpu-en-de-random-seed1"
    folder.mkdir(parents=True)
    (folder / "figures.json").write_text(json.dumps({"checkpoint_avg": figures}))
    (folder / "origin.json").write_text(json.dumps({"commit": "of then", "versions": {}, "hardware": ""}))


def test_analysis_of_a_table(trained, tmp_path, capsys):
    """The inspection's figures become a record, and the record a table and pictures."""
    out, argv = trained
    inspection(out / "analysis", inspected())
    assert analysis.readme() == "" and "No model" in analysis.table()
    analysis.main([*argv, "--variant", "random dense"])
    assert "en-de-dense-seed1: not trained" in capsys.readouterr().out
    analysis.main(["denoising_cpu", "--variant", "transformer_plus", "--out", str(out)])
    assert "transformer_plus-seed1: not trained" in capsys.readouterr().out
    text = (tmp_path / "results" / "analysis" / "multi30k_cpu-en-de-random-seed1.json").read_text()
    kept = json.loads(text)
    assert kept["commit"] == "of then"
    attention = kept["attentions"]["encoder.self.0"]
    assert "sentences" not in kept and attention["histograms"]["logits"]["shares"]["initial"] == [0.3, 0.7]
    assert attention["pattern"][0][-1][-1] == 1515 and "pattern" not in kept["attentions"]["decoder.cross.0"]
    row = "| `random` | 7000 | cross-attention | 0.50 | 0.50 | 0.50 | 0.50 | 0.300, 0.100 | 30.0 | 20.0 | 10.0 |"
    assert row in analysis.table() and "--sentences 9" in analysis.table() and "learned-r.png" in analysis.readme()
    pages = set(re.findall(r"\((\S+\.png)\)", (ROOT / "docs" / "analysis.md").read_text()))
    pages.remove("multi30k_tiled-en-de-valid-loss.png")  # of a table of results
    assert {picture.name for picture in analysis.pictures()} == pages | {"learned-r.png"}
    assert {path.name for path in pictures.render(check=False, folder=tmp_path)} > pages


def test_analysis_of_more_sentences(trained, tmp_path, capsys, monkeypatch):
    """An inspection of as many as are asked for is kept; a record of a model that is no row leaves the pages alone."""
    out, argv = trained
    calls, argv = [], [*argv, "--variant", "random"]

    def inspect(command):
        calls.append(command[command.index("--sentences") + 1])
        inspection(out / "analysis", inspected())

    monkeypatch.setattr(analysis, "run", inspect)
    for more in ([], ["--sentences", "200"], ["--sentences", "9"], ["--sentences", "9"], []):
        analysis.main([*argv, *more])
    assert calls == ["200", "9", "200"]
    folder = tmp_path / "results" / "analysis"
    record = json.loads((folder / "multi30k_cpu-en-de-random-seed1.json").read_text())
    (folder / "multi30k_cpu-en-de-vanilla-seed1.json").write_text(json.dumps({**record, "model": "vanilla"}))
    assert list(analysis.load()) == ["random"]


def test_analysis_by_sentence_length(trained):
    """Loss and BLEU of each range of lengths, likewise."""
    out, argv = trained
    assert "No model" in analysis.lengths("multi30k_cpu")
    ranges = [(8, 3, 1.5, 40.0), (32, 2, 2.25, 30.04)]
    ranges = [dict(zip(("longest", "sentences", "loss", "bleu"), values)) for values in ranges]
    found = {"ranges": ranges, "signature": "s", "beam": 1}
    inspection(out / "lengths", {"data": {"subset": "test", "sentences": 5}, "lengths": found})
    analysis.main([*argv, "--variant", "random", "--lengths"])
    refused(analysis.main, *argv, "--lengths", "--sentences", "5", parts=["--sentences"])
    refused(analysis.main, "multi30k_cpu", "--pair", "en-xx", parts=["--pair en-xx: choose from en-de, en-fr"])
    refused(analysis.main, "multi30k_cpu", "--variant", "randm", parts=["--variant randm: choose from", "random"])
    heads, _, row, _, note, *_ = analysis.lengths("multi30k_cpu").splitlines()
    assert heads == "| model | 1 to 8 (3) | 9 to 32 (2) |" and row == "| `random` | 1.50, 40.0 | 2.25, 30.0 |"
    assert "--subset test --only lengths" in note and "Beam 1, `s`" in note


def test_analysis_runs_the_inspection(tmp_path, dry, capsys):
    run = tmp_path / "runs" / "multi30k_cpu-en-de-random-seed1"
    run.mkdir(parents=True)
    (run / "checkpoint_avg.pt").touch()
    analysis.main(["multi30k_cpu", "--pair", "en-de", "--variant", "random", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert f"-m fairseq_synth.inspect {run}/checkpoint_avg.pt --data {tmp_path}/data/multi30k_cpu-en-de/bin" in shown
    done = tmp_path / "analysis" / "multi30k_cpu-en-de-random-seed1" / "origin.json"
    done.parent.mkdir(parents=True)
    done.write_text("{}")
    os.utime(done, (0, 0))  # of an earlier training
    analysis.main(["multi30k_cpu", "--dataset", "en-de", "--variant", "random", "--out", str(tmp_path)])
    assert "-m fairseq_synth.inspect" in capsys.readouterr().out
    os.utime(done)
    analysis.main(["multi30k_cpu", "--dataset", "en-de", "--variant", "random", "--out", str(tmp_path)])
    assert not capsys.readouterr().out  # done, and a dry run writes nothing: figures.json would be missing
    run = tmp_path / "runs" / "ptb_cpu-ptb-random-seed1"  # whose recipe averages nothing
    run.mkdir(parents=True)
    (run / "checkpoint_best.pt").touch()
    analysis.main(["ptb_cpu", "--variant", "random lightconv_lm", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert f"-m fairseq_synth.inspect {run}/checkpoint_best.pt" in shown and "lightconv_lm-seed1: left out" in shown


def test_a_scored_run_has_all_files(tmp_path, monkeypatch):
    """scores.json, by which others know it, comes last and goes first."""
    (tmp_path / "scores.json").write_text("old")
    moved, replace = [], Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, to: (moved.append((path.name, to.exists())), replace(path, to)))
    with scoring.atomic_evaluation(tmp_path) as out:
        for name in ("scores.json", "test.hyp.de", "test.tok.de"):
            (out / name).write_text("new")
        assert (tmp_path / "scores.json").read_text() == "old"
    assert moved[-1] == ("scores.json", False) and len(moved) == 3
    for names in ([], ["generate.log"]):  # an evaluation that failed leaves what there is to look into
        with pytest.raises(UserError), scoring.atomic_evaluation(tmp_path) as out:
            for name in names:
                (out / name).touch()
            raise UserError("no")
        assert out.exists() == bool(names)


def test_the_papers_rows_are_models():
    for table in tables.TABLES.values():
        found = {table.training(row)[0] for row in table.models()}
        assert found <= {*train.models(), *BASELINES} and table.models()[0] == table.baseline
        assert set(table.variations) <= set(table.models())
        for cell in table.cells():
            arch = RECIPES[cell.dataset.recipe].architecture(table.training(cell.model)[0])
            assert RECIPES[train.recipe_name(arch, cell.dataset.name)].task == RECIPES[cell.dataset.recipe].task


def test_data_of_two_tables_are_prepared_alike():
    """Or in two folders."""
    found = {}
    for table in tables.TABLES.values():
        for cell in table.cells():
            first = cell.init()
            how = (table.corpus or cell.dataset.name, dict(table.preparation), first and first.data(Path()))
            assert found.setdefault(cell.data(Path()), how) == how, cell


def test_an_average_has_the_last_update():
    """A checkpoint with a number, which an average can take, is written at multiples of save_every alone."""
    for name, recipe in RECIPES.items():
        assert not (recipe.average and recipe.save_every) or recipe.max_update % recipe.save_every == 0, name


def test_what_data_parallel_needs():
    """By fairseq's code: the adaptive criterion refuses torch's DDP, and a classifier leaves RoBERTa's own head out."""
    for name, recipe in RECIPES.items():
        flags = recipe.flags
        assert flags.get("criterion") != "adaptive_loss" or flags["ddp-backend"] == "legacy_ddp", name
        assert flags.get("criterion") != "sentence_prediction" or "find-unused-parameters" in flags, name
        # else the rows of a batch are a multiple of 8, and depend on the number of GPUs
        assert "tokens-per-sample" not in flags or flags["required-batch-size-multiple"] == "1", name


@pytest.mark.parametrize(
    "text, part",
    [
        ("a: {like: b}", "recipes.yaml: a: there is no b to be like"),
        ("a: {preset: x, corpus: y, beams: 4}", "recipes.yaml: a: beams is no key of a recipe"),
        ("a:\n  preset: x\n  corpus: [", "recipes.yaml: line 3: "),
        ("a: {preset: x}", "recipes.yaml: a: missing 1 required positional argument: 'corpus'"),
    ],
)
def test_a_slip_in_the_recipes_is_told(text, part, tmp_path, monkeypatch):
    """With the file and the entry or line."""
    (tmp_path / "recipes.yaml").write_text(text)
    monkeypatch.setattr(hyperparameters, "__file__", str(tmp_path / "hyperparameters.py"))
    with pytest.raises(UserError, match=part):
        hyperparameters.read_recipes()


@pytest.mark.parametrize(
    "entry, part",
    [
        ("{title: t}", "tables.yaml: a: 'columns' is missing"),
        ("{columns: {x: [X, ptb_cpu]}, task: parsing}", "tables.yaml: a: 'parsing' is missing, unknown"),
        ('{columns: {x: [X, ptb_cpu]}, paper: "m x\\nrandom 1", paper_columns: {x: b}}', "yaml: a: 'b' is missing"),
        ("{columns: {x: X}}", "tables.yaml: a: .* is missing, unknown or not of this form"),
        ("{columns: {x: [X, ptb_cpu]}}", "tables.yaml: a: missing 2 required"),
        ("{columns: {x: [X, none]}, title: t, about: t}", "table a: x: there is no recipe none"),
        ("{columns: {x: [X, multi30k_from_news_cpu]}, title: t, about: t}", "a: begins with news_cpu, no table of x"),
        ("{columns: {x: [X, ptb_cpu]}, tittle: t}", "tables.yaml: a: tittle is no key of a table"),
    ],
)
def test_a_slip_in_the_tables_is_told(entry, part, tmp_path, monkeypatch):
    (tmp_path / "tables.yaml").write_text(f"a: {entry}")
    monkeypatch.setattr(hyperparameters, "__file__", str(tmp_path / "hyperparameters.py"))
    with pytest.raises(UserError, match=part):
        tables.read_tables()


def test_the_models_are_the_variants():
    """They are known without loading torch or fairseq, which would take seconds before each training."""
    assert train.models() == ["transformer", *(v.replace("+", "_") for v in VARIANTS if v != "vanilla")]
    code = "import sys; from recipes import train; train.recipe_name('transformer_synth_random_multi30k'); "
    code += "print({'fairseq', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "set()\n"


@pytest.fixture
def stubs(tmp_path, monkeypatch):
    """A project whose trainings and evaluations only say that they were called."""
    calls = []
    for module in (reproduce, tables, render):
        monkeypatch.setattr(module, "ROOT", tmp_path)

    def fit(argv):
        argv = list(map(str, argv))
        save = tmp_path / "runs" / argv[argv.index("--save-dir") + 1]
        save.mkdir(parents=True, exist_ok=True)
        (save / "train.log").write_text(LOG)
        hardware = (tmp_path / "hardware").read_text() if (tmp_path / "hardware").exists() else "h"
        (save / "provenance.json").write_text(json.dumps([{"commit": "c", "versions": {}, "hardware": hardware}]))
        with open(tmp_path / "options", "a") as file:
            print(*argv, file=file)
        calls.append(" ".join(["train", argv[0], *argv[argv.index("--") + 1 :]]))

    def evaluate(task, data, run, recipe):
        assert recipe.beam == 5 and recipe.average == 5
        calls.append("evaluate")
        (run / "scores.json").write_text('{"bleu": {"score": 30.5, "name": "BLEU", "signature": "nrefs:1"}}')
        (run / "evaluation.json").write_text('{"commit": "later"}')

    task = SimpleNamespace(
        compare=lambda data, run, baseline: {"p_value": 0.5, "against": baseline.name},
        TEST="a test",
        METRIC="bleu",
        METRIC_NAME="BLEU",
        BEST=max,
        DIGITS=2,
    )
    monkeypatch.setattr(tables, "prepare", lambda *args: calls.append(f"prepare {args[1]}"))
    monkeypatch.setattr(train, "start", fit)
    monkeypatch.setattr(reproduce, "evaluate", evaluate)
    monkeypatch.setattr(record, "learned_alpha", lambda checkpoint: {})
    table = tables.TABLES["multi30k_cpu"]
    monkeypatch.setitem(tables.TABLES, "multi30k_cpu", dataclasses.replace(table, task=task))

    def called(*argv):
        calls.clear()
        reproduce.main(["multi30k_cpu", "--pair", "en-fr", "--out", str(tmp_path), *argv])
        return list(calls)

    return tmp_path, called


def test_a_row_with_flags_of_its_own(stubs, monkeypatch):
    """It is trained with them, and compared with the table's baseline, which comes first."""
    project, called = stubs

    def use(flags):
        changes = dict(rows=("small", "random"), variations={"small": ("random", flags)}, baseline="random")
        table = dataclasses.replace(tables.TABLES["multi30k_cpu"], **changes)
        monkeypatch.setitem(tables.TABLES, "multi30k_cpu", table)

    def kept(row):
        return json.loads((project / "results" / "multi30k_cpu" / "gpu" / f"en-fr-{row}-seed1.json").read_text())

    use("--synth-max-length 8")
    arch = "train transformer_synth_random_multi30k"
    assert called("--seed", "1") == ["prepare en-fr", arch, "evaluate", f"{arch} --synth-max-length 8", "evaluate"]
    small = kept("small")
    assert small["significance"]["against"] == "multi30k_cpu-en-fr-random-seed1"
    assert "--variant small" in small["command"]
    assert small["flags"] == "--synth-max-length 8" and not {"flags", "significance"} & set(kept("random"))
    assert "minus `random` [95 %]" in render.validation_loss("multi30k_cpu")
    assert "En-Fr" not in render.results("multi30k_cpu", short=True)  # the second column

    # a row that another call finished before the baseline
    for row in ("small", "random"):
        (project / "results" / "multi30k_cpu" / "gpu" / f"en-fr-{row}-seed1.json").unlink()
    shutil.move(project / "runs" / "multi30k_cpu-en-fr-random-seed1", project / "away")
    called("--seed", "1", "--variant", "small")
    assert "significance" not in kept("small")
    called("--seed", "1", "--variant", "random")
    called("--seed", "1", "--record")
    assert kept("small")["significance"]["against"] == "multi30k_cpu-en-fr-random-seed1"

    use("--synth-max-length 16")
    (project / "results" / "multi30k_cpu" / "gpu" / "en-fr-small-seed1.json").unlink()
    with pytest.raises(UserError, match="other settings"):
        called("--seed", "1", "--variant", "small")


def test_reproduce_runs_what_is_missing(stubs, capsys):
    """Every cell once, the Transformer first; what is trained or recorded is kept; each ends as a record."""
    project, called = stubs
    some = ["--variant", "random_vanilla transformer", "--seed", "1 2"]
    both = ["train transformer_multi30k", "evaluate", "train transformer_synth_random_vanilla_multi30k", "evaluate"]
    assert called(*some) == ["prepare en-fr", *both, *both]
    folder = project / "results" / "multi30k_cpu" / "gpu"
    one = folder / "en-fr-random_vanilla-seed2.json"
    kept = json.loads(one.read_text())
    assert kept["command"] == tables.TABLES["multi30k_cpu"].name.join(
        ["scripts/reproduce.sh ", " --pair en-fr --variant random_vanilla --seed 2 --rerun"]
    )
    assert kept["figures"] == {"bleu": 30.5} and kept["updates"] == 240
    assert kept["commit"] == "c; later"  # of the training, and of the evaluation
    assert kept["significance"] == {"p_value": 0.5, "against": "multi30k_cpu-en-fr-transformer-seed2"}
    assert called(*some) == []
    assert called("--prepare", *some) == ["prepare en-fr"]
    one.unlink()  # trained already: only scored
    assert called(*some) == ["prepare en-fr", "evaluate"]
    capsys.readouterr()
    assert called(*some[:2], "--seed", "2 3", "--list") == []
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 2 and all("--seed 3" in line for line in listed)
    run, only = (
        project / "runs" / "multi30k_cpu-en-fr-random_vanilla-seed2",
        ["--seed", "2", "--variant", "random_vanilla"],
    )
    (run / "checkpoint_last.pt").touch()
    assert called(*only, "--rerun") == ["prepare en-fr", *both[2:]]
    assert not (run / "checkpoint_last.pt").exists()  # begun anew
    # a call that ended before it had recorded the run goes on with it, although the record of an earlier run is there
    (run / "recorded").unlink()
    assert one.exists() and called(*only, "--rerun") == ["prepare en-fr", "evaluate"]
    # another recipe is no cell of the table, and other machines are none of another recipe
    before = sorted((path, path.read_text()) for path in folder.iterdir())
    assert called(*only, "--", "--max-update", "5") == ["prepare en-fr", *both[2:]]
    assert sorted((path, path.read_text()) for path in folder.iterdir()) == before
    assert (run.with_name(f"{run.name}-changed") / "result.json").exists()
    assert "significance" not in json.loads((run.with_name(f"{run.name}-changed") / "result.json").read_text())
    with pytest.raises(UserError, match="--record: .* leave what follows -- out"):
        called(*only, "--record", "--", "--max-update", "5")
    assert called(*only, "--", "--gpus", "1") == []
    # a changed recipe has one run: other changes are not taken for it
    assert called(*only, "--", "--max-update", "5") == []
    assert "-changed/result.json is there; --rerun runs it again" in capsys.readouterr().out
    with pytest.raises(UserError, match="options=--max-update 5, asked for options=--max-update 6"):
        called(*only, "--", "--max-update", "6")
    called(*only, "--list", "--", "--max-update", "6")
    assert "--max-update 6" in capsys.readouterr().out
    assert called(*only, "--rerun", "--", "--max-update", "6") == ["prepare en-fr", *both[2:]]


def test_each_device_has_its_own_record(stubs):
    """A cell on a CPU leaves the GPU's figures alone; without --gpus either counts as run; a run is of one device."""
    project, called = stubs
    one = ["--variant", "transformer", "--seed", "1"]
    called(*one)
    folder = project / "results" / "multi30k_cpu"
    gpu, cpu = (folder / device / "en-fr-transformer-seed1.json" for device in ("gpu", "cpu"))
    kept = gpu.read_text()
    with pytest.raises(UserError, match="transformer-seed1: was trained on a gpu; --rerun trains it anew"):
        called(*one, "--", "--gpus", "0")
    (project / "hardware").write_text("a CPU, 1 thread(s)")
    assert "train transformer_multi30k" in called(*one, "--rerun", "--", "--gpus", "0")
    assert gpu.read_text() == kept and json.loads(cpu.read_text())["hardware"] == "a CPU, 1 thread(s)"
    assert called(*one) == called(*one, "--", "--gpus=1") == called(*one, "--", "--gpus", "0") == []
    gpu.unlink()
    assert called(*one) == []
    (project / "runs" / "multi30k_cpu-en-fr-transformer-seed1" / "trained").unlink()  # as if it had been stopped
    cpu.unlink()
    with pytest.raises(UserError, match="was trained on a cpu; --rerun"):
        called(*one, "--", "--gpus", "1")
    (project / "hardware").write_text("h")
    begun = project / "runs" / "multi30k_cpu-en-fr-transformer-seed1" / "checkpoint_last.pt"
    begun.touch()
    assert "train transformer_multi30k" in called(*one, "--rerun", "--", "--gpus", "1")
    assert json.loads(gpu.read_text())["hardware"] == "h" and not begun.exists()  # nothing is left of the CPU's run


def test_a_run_resumed_on_another_machine(stubs):
    """Its record names both."""
    project, called = stubs
    one = ["--variant", "transformer", "--seed", "1"]
    called(*one)
    run = project / "runs" / "multi30k_cpu-en-fr-transformer-seed1"
    starts = json.loads((run / "provenance.json").read_text())
    (run / "provenance.json").write_text(json.dumps([{**starts[0], "commit": "b", "hardware": "g"}, *starts]))
    called(*one, "--record")
    (path,) = (project / "results" / "multi30k_cpu" / "gpu").iterdir()
    kept = json.loads(path.read_text())
    assert kept["hardware"] == "g; h" and kept["commit"] == "b; c; later"


def test_two_stages(stubs, monkeypatch, capsys):
    """The run that a cell begins with is made first if its checkpoint is missing, even where its figures are known."""
    project, called = stubs
    table = tables.TABLES["multi30k_cpu"]
    first = dataclasses.replace(table, name="first", corpus="other")
    monkeypatch.setitem(tables.TABLES, "first", first)
    monkeypatch.setitem(RECIPES, "multi30k_cpu", dataclasses.replace(RECIPES["multi30k_cpu"], init="first"))
    first = dataclasses.replace(first, datasets=[d._replace(recipe="news_cpu") for d in first.datasets])
    monkeypatch.setitem(tables.TABLES, "first", first)
    asked = []
    monkeypatch.setattr(tables, "prepare", lambda *args: asked.append(args))
    (project / "corpora" / "other").mkdir(parents=True)
    one = ["--variant", "random", "--seed", "2", "--from", str(project / "corpora")]
    arch = "train transformer_synth_random_multi30k"
    assert called(*one, "--", "--gpus", "1") == [arch, "evaluate", arch, "evaluate"]
    assert [(args[0], args[3].name) for args in asked] == [("other", "other"), ("multi30k", "corpora")]
    assert asked[1][-1]["like"] == project / "data" / "first-en-fr"
    kept = project / "results" / "first" / "gpu" / "en-fr-random-seed2.json"
    assert kept.exists()
    run = project / "runs" / "first-en-fr-random-seed2"
    second = project / "results" / "multi30k_cpu" / "gpu" / "en-fr-random-seed2.json"
    assert "init" not in json.loads(kept.read_text())
    assert f"--init {run}" in (project / "options").read_text().splitlines()[1]
    (run / "checkpoint_avg.pt").touch()
    (run / "evaluation.json").write_text('{"average": 3}')  # whose checkpoint_avg.pt is another one
    with pytest.raises(UserError, match=f"{run}: was evaluated with --average 3, and the recipe has 5"):
        called(*one, "--rerun")
    (run / "evaluation.json").unlink()
    changed = project / "runs" / "multi30k_cpu-en-fr-random-seed2-changed" / "result.json"
    assert called(*one, "--rerun", "--", "--max-update", "9") == [arch, "evaluate"]  # of the second stage alone
    assert "by its own recipe" not in capsys.readouterr().out
    (run / "checkpoint_avg.pt").unlink()  # as evaluate.sh --average 0 does; the training is not lost for that
    assert called(*one, "--rerun", "--", "--max-update", "9") == ["evaluate", arch, "evaluate"]
    assert "first en-fr-random-seed2 of first, by its own recipe" in capsys.readouterr().out
    assert called(*one, "--rerun") == ["evaluate", arch, "evaluate"]
    (project / "hardware").write_text("a CPU, 1 thread(s)")
    with pytest.raises(UserError, match=f"{run}: was trained on a gpu; remove it, or name another --out"):
        called(*one, "--rerun", "--", "--gpus", "0")
    (project / "hardware").unlink()
    shutil.rmtree(run)
    assert called(*one, "--rerun") == [arch, "evaluate", arch, "evaluate"]
    assert json.loads(second.read_text())["init"] == json.loads(changed.read_text())["init"] == run.name
    with command.locked(run.with_name(f".{run.name}.lock")), pytest.raises(UserError, match="another process"):
        (run / "scores.json").unlink()
        called(*one, "--rerun")


@pytest.mark.slow
def test_fine_tuning_for_other_text(tmp_path, raw):
    """One's own text with the words of other data; the weights are those of the run, and so is the length."""
    first, second, run = tmp_path / "first", tmp_path / "second", tmp_path / "run"
    prepare.main([*map(str, [raw, "en", "de", first, "--merges", "100", "--workers", "1", "--lowercase"])])
    other = copied(raw, tmp_path / "raw", valid_en=b"a zebra\n" * 20)
    prepare.main([*map(str, [other, "en", "de", second, "--like", first, "--workers", "1"])])
    assert (first / "codes").read_text() == (second / "codes").read_text()
    assert (first / "bin" / "dict.de.txt").read_text() == (second / "bin" / "dict.de.txt").read_text()
    assert command.read_settings(second / "settings")["lowercase"] == "True"
    refused(prepare.main, other, "en", "fr", tmp_path / "x", "--like", first, parts=["--like", "of en and fr"])
    like = [other, "en", "de", tmp_path / "x", "--like", first]
    refused(prepare.main, *like, "--merges", "50", parts=[f"--merges 50: --like {first} has 100; leave it out"])
    refused(prepare.main, *like, "--dash-splits", parts=["--dash-splits: --like", "has none; leave it out"])
    arch, flags = "transformer_synth_random_multi30k", "--encoder-layers 1 --decoder-layers 1 --warmup-updates 1"
    argv = [arch, "en-de", "--recipe", "multi30k_cpu", "--max-update", "1", "--save-every", "1", "--gpus", "0"]
    first_run = [*argv, "--data", first, "--save-dir", run, "--", *flags.split(), "--synth-max-length", "112"]
    done = script("train.sh", *first_run, *NO_THREAD)
    assert done.returncode == 0, done.stdout + done.stderr
    argv += ["--data", second, "--init", run]
    refused(train.main, "transformer_multi30k", *argv[1:], parts=[f"--init {run}", f"run of {arch}"])
    for option, value in (("--encoder-layers", "1"), ("--synth-max-length", "112")):
        wrong = script("train.sh", *argv, "--save-dir", tmp_path / "tuned", "--", option, "2")
        assert wrong.stderr == f"error: --init {run}: has {option} {value}; leave {option} out\n"
        assert wrong.returncode == 1
    tuned = [*argv, "--save-dir", tmp_path / "tuned", "--", "--warmup-updates", "1", "--lr", "0"]
    done = script("train.sh", *tuned, *NO_THREAD)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = (
        torch.load(folder / "checkpoint_best.pt", weights_only=False) for folder in (run, tmp_path / "tuned")
    )
    assert before["model"].keys() == after["model"].keys()
    assert all(torch.allclose(value, after["model"][name], atol=1e-5) for name, value in before["model"].items())
    (second / "bin" / "dict.de.txt").write_text("zebra 1\n")
    refused(train.main, *argv, parts=[f"--init {run}", "other words", f"--like {first}"])


def test_calls_share_the_cells(stubs, capsys):
    """A cell that another process is running is skipped; --record compares with a Transformer that came later."""
    project, called = stubs
    with command.locked(project / "runs" / ".multi30k_cpu-en-fr-transformer-seed1.lock"):
        assert called("--variant", "transformer dense", "--seed", "1")[1:] == [
            "train transformer_synth_dense_multi30k",
            "evaluate",
        ]
    dense = project / "results" / "multi30k_cpu" / "gpu" / "en-fr-dense-seed1.json"
    assert "another process is running it: skipped" in capsys.readouterr().out
    assert "significance" not in json.loads(dense.read_text())
    called("--variant", "transformer dense", "--seed", "1")
    base = project / "runs" / "multi30k_cpu-en-fr-transformer-seed1"
    (base / "evaluation.json").write_text('{"beam": 1}')
    with pytest.raises(UserError, match=f"{base}: was evaluated with --beam 1"):
        called("--seed", "1", "--variant", "dense", "--record")
    (base / "evaluation.json").unlink()
    called("--seed", "1", "--record")
    assert "significance" in json.loads(dense.read_text())


def test_only_what_is_scored_is_recorded_again(stubs, monkeypatch):
    """Not a cell without scores here; and without a test where there is none, as for language models."""
    project, called = stubs
    folder = project / "results" / "multi30k_cpu" / "gpu"
    with command.locked(project / "runs" / ".multi30k_cpu-en-fr-transformer-seed1.lock"):
        called("--variant", "random dense", "--seed", "1")
    (project / "runs" / "multi30k_cpu-en-fr-random-seed1" / "scores.json").unlink()
    called("--variant", "transformer", "--seed", "1")
    called("--seed", "1", "--record")
    compared = {path.name: "significance" in json.loads(path.read_text()) for path in folder.iterdir()}
    names = {"transformer": False, "random": False, "dense": True}
    assert compared == {f"en-fr-{model}-seed1.json": is_compared for model, is_compared in names.items()}
    table = tables.TABLES["multi30k_cpu"]
    task = SimpleNamespace(**{**vars(table.task), "TEST": "", "compare": lambda *args: None})
    monkeypatch.setitem(tables.TABLES, "multi30k_cpu", dataclasses.replace(table, task=task))
    called("--seed", "1", "--record")
    assert not any("significance" in json.loads(path.read_text()) for path in folder.iterdir())


def test_a_record_is_written_again(stubs):
    """--record keeps the command; it needs all that the record is made of."""
    project, called = stubs
    one = ["--variant", "transformer", "--seed", "1"]
    called(*one, "--", "--gpus", "1")
    run = project / "runs" / "multi30k_cpu-en-fr-transformer-seed1"
    path = project / "results" / "multi30k_cpu" / "gpu" / "en-fr-transformer-seed1.json"
    kept = path.read_text()
    path.write_text(kept.replace('"minutes"', '"hours"'))
    assert called(*one, "--record") == [] and path.read_text() == kept and "-- --gpus 1" in kept
    (run / "evaluation.json").write_text('{"average": 5, "beam": 1}')
    with pytest.raises(UserError, match=f"{run}: was evaluated with --beam 1, and the recipe has 5; evaluate it again"):
        called(*one, "--record")
    (run / "evaluation.json").unlink()
    (run / "train.log").write_text("Killed\n")
    with pytest.raises(UserError, match="train.log: no line with"):
        called(*one, "--record")
    (run / "provenance.json").unlink()
    (run / "train.log").write_text(LOG)
    with pytest.raises(UserError, match="provenance.json: no such file"):
        called(*one, "--record")


def test_cells_are_listed_as_they_would_be_run(stubs, capsys):
    """With what the call was given, --rerun only if it was; and into a pipe that is closed early."""
    project, called = stubs
    one, more = ["--variant", "transformer", "--seed", "1"], ["--", "--gpus", "0", "--", "--lr", "1"]
    called(*one)
    capsys.readouterr()
    start = "scripts/reproduce.sh multi30k_cpu --pair en-fr --variant transformer --seed"
    assert called(*one, "--list") == [] and capsys.readouterr().out == ""
    called(*one, "--list", "--rerun")
    assert capsys.readouterr().out == f"{start} 1 --rerun\n"
    called(*one, "--list", "--from", str(project), *more)  # another recipe: not run yet
    assert capsys.readouterr().out == f"{start} 1 --from {project} -- --gpus 0 -- --lr 1\n"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", "scripts/reproduce.sh table2 --seed \"$(seq -s ' ' 3000)\" --list | head -1"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.startswith("scripts/reproduce.sh table2 --pair en-de --variant transformer --seed 1")
    assert done.stderr == "" and "--rerun" not in done.stdout


@pytest.mark.parametrize(
    "changes, part",
    [
        (dict(baseline="randm"), "baseline: randm is no row"),
        (dict(rows=("random", "dense")), "baseline: transformer is no row; name one of random, dense"),
        (dict(rows=("transformer", "randm")), "rows: there is no model randm"),
        (dict(variations={"small": ("random", "")}), "variations: small is no row"),
        (dict(rows=("transformer", "x"), variations={"x": ("randm", "")}), "rows: there is no model randm"),
        (dict(datasets=(tables.Dataset("en-de", "En-De", "none"),)), "en-de: there is no recipe none"),
    ],
)
def test_a_table_is_checked_when_it_is_made(changes, part):
    with pytest.raises(UserError, match=f"table multi30k_cpu: {part}"):
        dataclasses.replace(tables.TABLES["multi30k_cpu"], **changes)


@pytest.mark.parametrize(
    "argv, parts",
    [
        ("table7 --time --seed 1 --rerun", ["--time", "leave --seed and --rerun out"]),
        ("table7 --time --list --record", ["--time", "leave --list and --record out"]),
        ("table7 --time -- --gpus 1", ["--time", "leave what follows -- out"]),
        ("table9", ["table9", "multi30k_cpu"]),
        ("table2 --pair en-cs", ["--pair en-cs", "en-de, en-fr"]),
        ("table2 --variant randm", ["--variant randm", "transformer, fixed_random"]),
        ("table2 --seed one", ["--seed one", "integer"]),
        ("table7 --dataset ptb", ["--dataset ptb", "agnews, imdb"]),
        ("table2 -- --nodes 2 --rendezvous first:29500", ["--nodes", "one machine"]),
        ("table2 -- --gpus 1 --seed 5", ["-- --seed", "before --"]),
        ("table2 -- --recipe=iwslt", ["-- --recipe", "leave it out"]),
        ("table2 -- --data there", ["-- --data", "--out"]),
        ("table2 -- --save-dir there", ["-- --save-dir", "--out"]),
        ("table2 --out a,b", ["--out: a,b: ", "rename it"]),
        ("table2 --record --out /nowhere", ["--record: no run", "/nowhere/runs"]),
        ("", ["TABLE", "reproduce.sh --help"]),
    ],
)
def test_reproduce_refuses(argv, parts):
    refused(reproduce.main, *argv.split(), parts=parts)


def test_a_dry_run_records_nothing(dry):
    refused(reproduce.main, "ptb_cpu", "--record", parts=["--record", "DRY_RUN=1"])


@pytest.mark.parametrize("table", tables.TABLES)
def test_reproduce_shows_its_commands(table, tmp_path, dry, capsys):
    """Every cell of a table names architectures that exist."""
    from fairseq.models import ARCH_CONFIG_REGISTRY

    reproduce.main([table, "--seed", "1", "--rerun", "--out", str(tmp_path), "--", "--gpus", "0"])
    commands = capsys.readouterr().out.splitlines()
    archs = [flag(c, "--arch") for c in commands if "fairseq-train" in c]
    described = tables.TABLES[table]
    stages = 2 if RECIPES[described.datasets[0].recipe].init else 1
    assert len(archs) == len(described.datasets) * len(described.models()) * stages
    assert all(arch in ARCH_CONFIG_REGISTRY for arch in archs)
    assert not any(tmp_path.iterdir())


def test_timing_prepares_as_the_cells_do(tmp_path, dry, capsys):
    """The second stage's text with the first stage's words."""
    reproduce.main(["multi30k_from_news_cpu", "--time", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert said.count("learn-bpe") == 1 and f"cat {tmp_path}/data/news-en-de/codes >" in said


# ---- all of it


@pytest.mark.parametrize(
    "argv, parts",
    [
        ("--data wmt", ["--data", "numbers"]),
        ("--pair en-cs", ["--pair", "en-fr"]),
        ("--data multi30k --from /nowhere", ["--from", "/nowhere: no such folder"]),
        ("--from .", ["--from .", "made on the spot", "--data multi30k"]),
        ("--varient random", ["--varient"]),
        ("--seed", ["--seed", "expected one argument"]),
        ("--max-update many", ["--max-update", "many"]),
    ],
)
def test_quickstart_refuses(argv, parts):
    refused(quickstart.main, *argv.split(), parts=parts)


def test_quickstart_refuses_a_variant_at_once(tmp_path):
    parts = ["--variant", "randm", "random_dense"]
    refused(quickstart.main, "--variant", "randm", "--out", tmp_path / "out", parts=parts)
    assert not any(tmp_path.iterdir())


def test_quickstart_needs_a_folder(tmp_path):
    (tmp_path / "file").touch()
    refused(quickstart.main, "--out", tmp_path / "file", parts=[f"{tmp_path}/file", "this folder cannot be made"])


def test_an_environment_that_was_copied_is_made_anew(tmp_path):
    """Its programs name the interpreter of the one that it was copied from."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("setup.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    for root, anew in ((tmp_path, False), (f"/elsewhere{tmp_path}", True), (f"{tmp_path}2", True)):
        (tmp_path / ".venv" / "installed").write_text(f"{root} another digest  -\n")
        env = {**os.environ, "DRY_RUN": "1"}
        done = subprocess.run([tmp_path / "scripts" / "setup.sh"], capture_output=True, text=True, env=env)
        assert done.returncode == 0 and ("-m venv --clear " in done.stdout) == anew, done.stdout + done.stderr


@pytest.mark.parametrize("value, shown", [("1", True), ("0", False), ("", False)])
def test_what_a_dry_run_is(value, shown, tmp_path, monkeypatch):
    monkeypatch.setenv("DRY_RUN", value)
    command.run(["touch", tmp_path / "a"])
    source = f'source {ROOT}/scripts/common.sh; run touch "$1"'
    subprocess.run(["bash", "-c", source, "bash", tmp_path / "b"], check=True)
    assert [(tmp_path / name).exists() for name in "ab"] == [not shown, not shown]


@pytest.mark.parametrize("name", ["", "-x", "./-x", "a,b", "a:b"])
def test_folders_that_fairseq_cannot_read(name, raw):
    """It divides paths at : and ,; what begins with - is an option. An empty word is not the current folder."""
    refused(prepare.main, raw, "en", "de", "--", name, parts=["OUT_DIR: ", name or "empty word"])
    refused(train.main, "transformer_multi30k", "en-de", f"--save-dir={name}", parts=["--save-dir: ", name or "empty"])
    refused(tasks.main, "--", name, "run", parts=["DATA_DIR: ", name or "empty word"])


def test_a_name_that_is_not_utf8():
    done = subprocess.run(
        [ROOT / "scripts" / "prepare.sh", b"caf\xe9", "en", "de", "out"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, "error: 'caf\\udce9': is not UTF-8; rename the file\n")


@pytest.mark.parametrize("name, said", [("quickstart", "scripts/setup.sh failed"), ("train", "run scripts/setup.sh")])
def test_without_an_environment(tmp_path, name, said):
    """One line, where it cannot be made, or where it is to be made first."""
    for folder in ("scripts", "recipes"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "scripts" / "setup.sh").write_text("#!/bin/bash\nexit 1\n")
    (tmp_path / "yaml.py").write_text("raise ModuleNotFoundError(name='yaml')\n")
    argv = [tmp_path / "scripts" / f"{name}.sh", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert said in done.stderr


def test_help(tmp_path):
    """Of every script, called from elsewhere by a symbolic link."""
    said = script("prepare.sh", "wmt14", "--help").stdout
    assert all(re.search(rf"^  .*\b{name}\b", said, re.M) for name in corpora.CORPORA)
    for name in ("quickstart", "train", "prepare", "evaluate", "translate", "reproduce", "analyse"):
        (tmp_path / name).symlink_to(ROOT / "scripts" / f"{name}.sh")
        done = subprocess.run([tmp_path / name, "--help"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and f"scripts/{name}.sh" in done.stdout, done.stderr
        assert name != "reproduce" or all(f" {table.name} " in done.stdout for table in tables.TABLES.values())


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".venv" / "installed").exists(), reason="needs the environment of scripts/setup.sh")
def test_quickstart(tmp_path):
    """The way from text to BLEU in small, in one test, as only one training is wanted for all that is tried with it."""
    corpus, run = quickstart_in_small(tmp_path)
    own_sentences_are_translated(corpus, run)
    a_record_says_what_was_run(run)
    worse = compared_with_a_baseline(corpus, run)
    other_test_sets(tmp_path, corpus, worse)
    evaluation_refuses(corpus, worse)


def quickstart_in_small(out):
    """Scores with a signature, three translations, and a second call that only shows them; (data, run)."""
    argv = ["--max-update", "40", "--merges", "200", "--variant", "random_vanilla", "--threads", "1", "--out", out]
    # a smaller corpus than the quickstart makes; one that is there is kept, in a folder of prepare.sh
    make_numbers(out / "numbers-en-de-bpe200" / "raw", "--train", "2000", "--held-out", "40")
    (out / "numbers-en-de-bpe200" / "settings").touch()
    corpus, run = out / "numbers-en-de-bpe200", out / "numbers-en-de-bpe200-random_vanilla-seed1"
    first, again = (script("quickstart.sh", *argv, "--", "--max-tokens", "300", timeout=1500) for _ in range(2))
    for done in (first, again):
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("source:    ") == 3 and done.stdout.count("output:    ") == 3
        assert f"translate.sh {corpus} {run}\n" in done.stdout
    assert re.search(r"^BLEU \d+\.\d\d   nrefs:1\|case:lc\|.*version:", first.stdout, re.M)
    assert re.search(r"^BLEU .*", first.stdout, re.M)[0] in again.stdout and "update 40" not in again.stdout
    assert sorted(json.loads((run / "scores.json").read_text())) == ["bleu", "chrf", "compound_split", "tokenised"]
    refused(quickstart.main, *argv, parts=["other settings"])
    return corpus, run


def own_sentences_are_translated(corpus, run):
    """Each line by one line, an empty one by an empty one; flags go to fairseq-interactive."""
    argv = [corpus, run, "--beam", "1", "--", "--max-len-b", "20"]
    done = script("translate.sh", *argv, input="eighty-one hours\n\nyes")
    assert done.returncode == 0 and "--beam 1 " in done.stderr and f"--path {run}/checkpoint_avg.pt" in done.stderr
    first, second, third = done.stdout.split("\n")[:-1]
    assert first and not second and third


def a_record_says_what_was_run(run):
    """Updates, parameters and minutes of the log; the commit and machine; the weights of the mixtures."""
    text = (run / "train.log").read_text()
    log = record.read_log(text)
    assert log["updates"] == log["curve"]["updates"][-1] == 40 and log["parameters"] > 5e5
    speeds = [float(speed) for speed in re.findall(r"train_inner.* ups=([\d.]+)", text)]
    assert log["minutes"] == round(40 / statistics.median(speeds) / 60, 1)
    (start,) = json.loads((run / "provenance.json").read_text())
    assert start["commit"] and start["hardware"].endswith("1 thread(s)")
    alpha = record.learned_alpha(run / "checkpoint_avg.pt")
    first = alpha["encoder.layers.0"]
    assert len(alpha) == 4 and first["random"][0] + first["vanilla"][0] == pytest.approx(1, abs=1e-3)


def compared_with_a_baseline(corpus, run):
    """A copy of the run, evaluated against a baseline without a mistake: worse, as the bootstrap says."""
    worse = run.parent / "worse"
    shutil.copytree(run, worse)
    shutil.copy(corpus / "test.de", run / "test.hyp.de")
    (corpus / "sacrebleu_set").write_text("wmt14/full\n")
    cache_test_set(corpus, "wmt14/full", corpus)
    done = script("evaluate.sh", corpus, worse, "--average", "2", "--beam", "1", "--baseline", run, timeout=1500)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^baseline 100.00, this run \d\.\d\d, p = 0.00", done.stdout, re.M), done.stdout
    assert "the baseline was evaluated with average 5 and not 2, beam 5 and not 1\n" in done.stdout
    kept = json.loads((worse / "evaluation.json").read_text())
    assert kept["beam"] == 1 and kept["commit"] == provenance.commit()
    assert re.search(r"^BLEU .* wmt14/full$", done.stdout, re.M)
    test = json.loads((worse / "significance.json").read_text())
    assert test["p_value"] < 0.01 and "bs:1000|seed:12345" in test["signature"]
    return worse


def other_test_sets(tmp_path, corpus, run):
    """The same text as the test set has the same scores, translations and words; the run's own scores stay."""
    kept = (run / "scores.json").read_text()
    other, same = tmp_path / "other", tmp_path / "a:b, c"
    same.mkdir()
    for lang in ("en", "de"):
        shutil.copy(tmp_path / "numbers-en-de-bpe200" / "raw" / f"test.{lang}", same)
    argv = ["evaluate.sh", corpus, run, "--average", "2", "--beam", "1", "--test"]
    done = script(*argv, same, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    scores = json.loads((run / "tests" / "a_b_ c" / "scores.json").read_text())
    tokenised = json.loads(kept)["tokenised"]  # its reference is no test set of sacreBLEU's
    assert scores["tokenised"] == tokenised and len(scores) == 4 and "test_set" not in scores["bleu"]
    assert (run / "tests" / "a_b_ c" / "test.hyp.de").read_text() == (run / "test.hyp.de").read_text()
    words = [folder / "bin" / "dict.de.txt" for folder in (corpus, corpus / "tests" / "a_b_ c")]
    assert words[0].read_text() == words[1].read_text()
    assert (run / "scores.json").read_text() == kept and not (run / "tests" / "a_b_ c" / "checkpoint_avg.pt").exists()
    refused(tasks.main, corpus, run, "--test", other, parts=["other/test.en: no such file"])
    other.mkdir()
    shutil.copy(same / "test.en", other / "test.en")
    (other / "test.de").write_text("eins\n")
    done = script(*argv, other)
    assert done.returncode == 1 and "test.de: ends after 1 lines" in done.stderr, done.stderr
    assert not (corpus / "tests" / "other" / "bin").exists() and not (run / "tests" / "other").exists()


def evaluation_refuses(corpus, run):
    """Too few checkpoints, a baseline without translations, other data; an earlier evaluation stays."""
    kept = (run / "scores.json").read_text()
    refused(tasks.main, corpus, run, "--average", "99", parts=["has 6 of the 99 checkpoints", "--average 6"])
    assert (run / "scores.json").read_text() == kept and (run / "significance.json").exists()
    fewer = run.parent / "fewer"
    fewer.mkdir()
    (fewer / "test.hyp.de").write_text("eins\n")
    parts = [f"--baseline {fewer}: not evaluated yet, or not on these data; evaluate this run on the same test set"]
    refused(tasks.main, corpus, run, "--average", "99", "--baseline", fewer, parts=parts)  # before anything else
    settings = (run / "settings").read_text()
    for line, other in (("pair=en-de", "pair=de-en"), (f"data={corpus}", "data=/other")):
        assert line in settings
        (run / "settings").write_text(settings.replace(line, other))
        refused(tasks.main, corpus, run, parts=[other.split("=")[1], str(corpus)])
    refused(tasks.main, run.parent / "no", run, parts=["not prepared"])


def test_translate_refuses(tmp_path, monkeypatch, capsys):
    """What has no checkpoint, other data and other text; a dry run only shows the programs, on standard error."""
    data = tmp_path / "data"
    (data / "bin").mkdir(parents=True)
    (data / "bin" / "done").touch()
    (data / "settings").write_text("src=en\ntgt=de\nsubwords=bpe\nlowercase=\ndash_splits=\n")
    refused(translate.main, data, tmp_path / "no", parts=["no: no such folder", "train.sh"])
    refused(translate.main, data, tmp_path, parts=[f"{tmp_path}: has no checkpoint_best.pt"])
    refused(translate.main, data, tmp_path, "--", "--nbest", "2", parts=["-- --nbest", "leave it out"])
    refused(translate.main, data, tmp_path, "--", "--input=x", parts=["-- --input", "standard input", "leave it out"])
    monkeypatch.setenv("DRY_RUN", "1")
    translate.main([str(data), str(tmp_path)])
    shown = capsys.readouterr()
    assert not shown.out and "+ sacremoses --quiet -l en normalize -c\n+ fairseq-interactive " in shown.err
    monkeypatch.delenv("DRY_RUN")
    (tmp_path / "checkpoint_best.pt").touch()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff")))
    refused(translate.main, data, tmp_path, parts=["standard input: not UTF-8", "0xff"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf\n\n")))
    translate.main([str(data), str(tmp_path)])  # nothing to translate: no program is started
    assert capsys.readouterr().out == "\n\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    translate.main([str(data), str(tmp_path)])
    assert capsys.readouterr().out == ""
    (tmp_path / "settings").write_text("pair=en-fr\n")
    refused(translate.main, data, tmp_path, parts=["was trained for en-fr", "is en-de"])
    (data / "settings").write_text("task=language_modeling\n")
    refused(translate.main, data, tmp_path, parts=["prepared for language_modeling", "parallel text"])


def translation_into(tgt, tmp_path):
    """The evaluation of a run."""
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir(), out.mkdir()
    (data / "settings").write_text(f"src=en\ntgt={tgt}\nsubwords=bpe\n")
    settings = {"src": "en", "tgt": tgt, "subwords": "bpe", "lowercase": ""}
    return translation.Translation(data, settings, RECIPES["multi30k_cpu"], tmp_path / "x.pt", out)


@pytest.mark.parametrize(
    "hint, advice", [("", ""), ("; --synth-max-length", ", or train with a larger -- --synth-max-length")]
)
def test_a_test_set_with_a_sentence_that_is_too_long(tmp_path, monkeypatch, hint, advice):
    """The file and the line are told, and not only the sample's number; the flag only of a model that has it."""

    def run(argv, log):
        log.write_text(f"Exception: Size of sample #44 is invalid (=(101, 93)) since max_positions=(100, 1024){hint}\n")
        raise UserError("fairseq-generate failed")

    monkeypatch.setattr(scoring, "run", run)
    said = f"test.en: line 45, here or in test.de, is longer than the model's 100 tokens; split it{advice}$"
    with pytest.raises(UserError, match=said):
        translation_into("de", tmp_path).score()


def test_what_sacrebleu_lacks_is_told_first(tmp_path):
    """Before anything is translated, and in one line."""
    with pytest.raises(UserError, match=r"^sacrebleu failed: Japanese .* pip install sacrebleu\[ja\]$"):
        translation_into("ja", tmp_path).score()


def test_text_that_has_changed_is_noticed(tmp_path, raw, dry, monkeypatch):
    """Also where its size is the same."""
    monkeypatch.delenv("DRY_RUN")
    folder = copied(raw, tmp_path / "raw")
    argv = [folder, "en", "de", tmp_path / "data", "--merges", "100", "--workers", "1"]
    prepare.main([*map(str, argv)])
    prepare.main([*map(str, argv)])
    text = folder / "test.de"
    text.write_bytes(text.read_bytes()[::-1].lstrip(b"\n") + b"\n")
    refused(prepare.main, *argv, parts=["was made with other settings", "its text has changed"])


LONG = (
    "echo 'Exception: Size of sample #1 is invalid (=(np.int64(30), 0)) since max_positions=(24, 1024){}' >&2; exit 1"
)


@pytest.mark.parametrize(
    "does, said",
    [
        ("printf 'D-0\\t-1\\teins\\n'", "sh has left 1 of 2 sentences out$"),
        ("printf 'D-0\\t-1\\teins\\nD-1\\t-1\\tzwei\\n'; echo 'error: no room' >&2; exit 3", "sh failed: no room$"),
        (LONG.format(""), "line 3 is longer than the model's 24 tokens; split it$"),
        (LONG.format("; --synth-max-length"), "24 tokens; .* --model-overrides"),
    ],
)
def test_translations_are_all_there(does, said):
    """Else the reason is told, and nothing is printed."""
    with pytest.raises(UserError, match=said):
        translate.translate([["cat"], ["sh", "-c", f"cat > /dev/null; {does}"]], ["one", "", "three"])


def test_a_line_to_translate():
    """As prepare.sh has it: one line for every tool, lowercased if the data are."""
    assert translate.as_prepared(" A\u2028 B\x85c \n\nd\n\n", {"lowercase": ""}, None) == ["A B c", "", "d", ""]
    assert translate.as_prepared("A b", {"lowercase": "True"}, None) == ["a b"]
    assert translate.as_prepared("", {"lowercase": ""}, None) == []
    assert translate.as_prepared("a\n ", {"lowercase": ""}, None) == ["a", ""]


def test_a_corpus_of_any_folder(tmp_path, raw, monkeypatch, capsys):
    """Of parallel text a table needs no more than the folder, and not that once it is prepared."""
    out = tmp_path / "out"
    (tmp_path / "ready" / "bin").mkdir(parents=True)
    (tmp_path / "ready" / "bin" / "done").touch()
    (tmp_path / "ready" / "settings").touch()
    prepare.prepare("mine", "de-en", tmp_path / "ready", None, {})
    assert "ready, reusing it" in capsys.readouterr().out
    with pytest.raises(UserError, match="mine: nothing to download; .* by --from, .*{de,en}"):
        prepare.prepare("mine", "de-en", out, None, {})
    monkeypatch.setenv("DRY_RUN", "1")
    for source in (None, raw):
        prepare.prepare("mine", "de-en", out, source, {"merges": 70})
        shown = capsys.readouterr().out
        assert f"{source or 'DIR'}/train" in shown and "-s de -t en" in shown and "learn-bpe -s 70" in shown


def test_a_training_shorter_than_its_warm_up(capsys):
    """It is warned of, and only it; of a flag given twice the last one counts."""
    command = ["fairseq-train", "--warmup-updates", "1500", "--max-update", "100"]
    train.warn_of_warm_up([*command, "--warmup-updates", "20"])
    train.warn_of_warm_up(["fairseq-train", "--max-update", "100"])
    train.warn_of_warm_up([*command, "--max-update", "0"])  # no limit
    assert capsys.readouterr().err == ""
    train.warn_of_warm_up(command)
    error = capsys.readouterr().err
    assert "--max-update 100" in error and "--warmup-updates 1500" in error and "-- --warmup-updates 20" in error


def test_tables_without_the_environment():
    """One line, where fairseq is not installed."""
    code = "import runpy, sys; sys.modules['fairseq'] = None; sys.argv[1:] = ['--check']; "
    code += f"runpy.run_path({str(ROOT / 'scripts' / 'make_tables.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: fairseq is not installed here; run source .venv/bin/activate\n"


def test_hardware(monkeypatch):
    """A training on the CPU of a machine with a GPU is the CPU's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert provenance.hardware() == provenance.hardware("cuda", 2) == "a GPU"
    assert provenance.hardware("cpu", 3).endswith(", 3 thread(s)")
    assert provenance.hardware("cpu").endswith(f", {torch.get_num_threads()} thread(s)")


def test_a_record_says_how_many_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    file = tmp_path / "provenance.json"
    provenance.note(file, "cuda", 8, "bf16")
    provenance.note(file, "cuda", 1, "fp32")
    several, one = json.loads(file.read_text())
    assert (several["hardware"], several["precision"]) == ("8 × a GPU", "bf16")
    assert one["hardware"] == "a GPU" and "precision" not in one
    assert provenance.device_of(several["hardware"]) == "gpu"
    for processes in (1, 8):  # the same again, and back to the first: the last one is where it ended
        provenance.note(file, "cuda", processes, "bf16" if processes == 8 else "fp32")
    assert json.loads(file.read_text()) == [several, one, several]


@pytest.mark.parametrize("value, threads", [("4,2", 4), (" 3", 3), ("", None), ("abc", None), ("0", None)])
def test_threads_of_the_environment(value, threads, tmp_path, monkeypatch):
    """As OpenMP takes them: a list is for nested levels, and what it does not understand is no number."""
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert provenance.asked_threads() == threads
    provenance.note(tmp_path / "provenance.json", "cpu", 1, "fp32")
    assert json.loads((tmp_path / "provenance.json").read_text())[0]["hardware"].endswith(
        f", {threads or torch.get_num_threads()} thread(s)"
    )


def test_commit_is_marked_when_code_differs(tmp_path, monkeypatch):
    """A figure's commit is marked by other code, but not by a result, so that one cell does not mark the next."""
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.commit() == ""
    for name in ("code.py", "results/cell.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    (tmp_path / "results" / "cell.json").write_text("2\n")
    clean = provenance.commit()
    assert re.fullmatch("[0-9a-f]{12}", clean)
    (tmp_path / "code.py").write_text("2\n")
    assert provenance.commit() == f"{clean}-dirty"
