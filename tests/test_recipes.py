"""The shell recipes and their helpers: what they make, and what they say when they cannot."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT


def script(name, *argv, **kwargs):
    """Runs a recipe with this interpreter's tools on the path."""
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return subprocess.run(
        [ROOT / "scripts" / name, *map(str, argv)],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
        **kwargs,
    )


def refused(done, *parts):
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and all(part in last for part in parts), done.stderr


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
    train = set(corpus["train.en"])
    assert not train & set(corpus["valid.en"]) and not train & set(corpus["test.en"])
    assert not any(re.search(r"\d", line) for lines in corpus.values() for line in lines)
    german = " ".join(corpus["train.de"])
    assert "undzwanzig" in german and "vor " in german
    assert make_numbers(tmp_path / "b", *flags) == corpus != make_numbers(tmp_path / "c", *flags, "--seed", "2")


def test_prepare(tmp_path):
    """Raw text to binarised data, kept on a second run, and nothing else of the folder touched."""
    raw, out = tmp_path / "raw", tmp_path / "out"
    make_numbers(raw, "--train", "200", "--held-out", "20")
    out.mkdir()
    (out / "mine").write_text("kept")
    done = script("prepare.sh", raw, "en", "de", out, "100")
    assert done.returncode == 0, done.stderr
    assert (out / "codes").exists() and (out / "bin" / "dict.de.txt").exists() and (out / "mine").exists()
    assert (out / "test.de").read_text() == (raw / "test.de").read_text()
    assert "reusing" in script("prepare.sh", raw, "en", "de", out, "100").stdout


def test_prepare_refuses(tmp_path):
    raw = tmp_path / "raw"
    refused(script("prepare.sh", raw, "en", "de", tmp_path / "out"), str(raw), "no such folder")
    make_numbers(raw, "--train", "20", "--held-out", "5")
    (raw / "valid.de").write_text("one line\n")
    refused(script("prepare.sh", raw, "en", "de", tmp_path / "out"), "valid.", "different numbers of lines")
    (raw / "valid.de").unlink()
    refused(script("prepare.sh", raw, "en", "de", tmp_path / "out"), "valid.de: no such file")
    assert not (tmp_path / "out" / "bin").exists()


def test_multi30k_is_checked(tmp_path, multi30k):
    """The real corpus passes; a changed or truncated file is refused and not left behind."""
    folder = tmp_path / "corpus"
    shutil.copytree(multi30k, folder)
    folder.chmod(0o755)
    bad = folder / "val.de.gz"
    bad.unlink()
    bad.write_bytes(gzip.compress(b"Ein anderer Text.\n"))
    refused(script("prepare_multi30k.sh", "de", tmp_path / "out", folder), "val.de", "SHA-256")
    raw = sorted(os.listdir(tmp_path / "out-raw"))
    assert raw == ["train.de", "train.en", "valid.en"]  # those before it passed
    bad.write_bytes(bad.read_bytes()[:20])
    refused(script("prepare_multi30k.sh", "de", tmp_path / "out", folder), "val.de.gz", "not a whole gzip file")
    refused(script("prepare_multi30k.sh", "de", tmp_path / "out", tmp_path / "nowhere"), "nowhere", "no such folder")
    refused(script("prepare_multi30k.sh", "cs", tmp_path / "out"), "cs", "de or fr")


@pytest.mark.parametrize(
    "argv, parts",
    [
        (["--data", "wmt"], ["--data wmt", "numbers or multi30k"]),
        (["--pair", "en-cs"], ["--pair en-cs", "en-de or en-fr"]),
        (["--data", "multi30k", "--data-dir", "/nowhere"], ["--data-dir /nowhere", "no such folder"]),
        (["--varient", "random"], ["--varient"]),
        (["--seed"], ["--seed needs a value"]),
        (["--variant", "randm"], ["--variant randm", "random_vanilla"]),
        (["--max-update", "many"], ["--max-update many"]),
    ],
)
def test_quickstart_refuses(argv, parts):
    refused(script("quickstart.sh", *argv), *parts)


def test_quickstart_help():
    done = script("quickstart.sh", "--help")
    assert done.returncode == 0 and "--variant NAME" in done.stdout and "set -euo" not in done.stdout


@pytest.mark.skipif(not (ROOT / ".venv" / "installed").exists(), reason="needs the environment of scripts/setup.sh")
def test_quickstart(tmp_path):
    """The whole way in small: BLEU with a signature, three translations, a record, and a second run that resumes."""
    argv = ["--max-update", "40", "--merges", "200", "--variant", "dense", "--threads", "1", "--out", tmp_path]
    extra = ["--", "--max-tokens", "300"]
    done = script("quickstart.sh", *argv, *extra, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^BLEU \d+\.\d\d   nrefs:1\|case:mixed\|.*version:", done.stdout, re.M)
    assert done.stdout.count("source:    ") == 3 and done.stdout.count("output:    ") == 3
    result = json.loads((tmp_path / "numbers-en-de-bpe200-dense-seed1" / "result.json").read_text())
    assert result["updates"] == 40 and result["variant"] == "dense"
    assert (
        result["command"].startswith("scripts/quickstart.sh --max-update 40") and str(tmp_path) not in result["command"]
    )
    again = script("quickstart.sh", *argv, *extra, timeout=500)
    assert again.returncode == 0 and "training" not in again.stdout
    assert re.search(r"^BLEU .*", done.stdout, re.M)[0] in again.stdout and again.stdout.count("output:    ") == 3
    refused(script("quickstart.sh", *argv, timeout=500), "other settings")


def test_tables_are_the_results():
    """README.md shows what results/ holds."""
    subprocess.run([sys.executable, ROOT / "scripts" / "make_tables.py", "--check"], check=True)
