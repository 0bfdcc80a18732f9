"""The shell recipes and their helpers: what they make, and what they say when they cannot."""

import argparse
import fcntl
import functools
import gzip
import hashlib
import http.server
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading

import pytest
import torch
from commands import ROOT


def script(name, *argv, root=ROOT, env=None, **kwargs):
    """Runs a recipe with this interpreter's tools on the path."""
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return subprocess.run(
        [root / "scripts" / name, *map(str, argv)],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path, **(env or {})},
        **kwargs,
    )


def shown(name, *argv, **kwargs):
    """The commands that a recipe would run."""
    done = script(name, *argv, env={"DRY_RUN": "1"}, **kwargs)
    assert done.returncode == 0, done.stderr
    return [line[2:] for line in done.stdout.splitlines() if line.startswith("+ ")]


def copied_project(tmp_path):
    """The scripts in a folder where some of them can be replaced."""
    project = tmp_path / "project"
    shutil.copytree(ROOT / "scripts", project / "scripts")
    (project / "fairseq_synth").symlink_to(ROOT / "fairseq_synth")
    return project


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


def test_prepare(tmp_path, raw):
    """Raw text to binarised data, kept on a second run, and nothing else of the folder touched."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    argv = [raw, "en", "de", out, "--merges", "100", "--workers", "1"]
    done = script("prepare.sh", *argv)
    assert done.returncode == 0, done.stderr
    assert (out / "codes").exists() and (out / "bin" / "dict.de.txt").exists() and (out / "mine").exists()
    assert (out / "test.de").read_text() == (raw / "test.de").read_text()
    # corpora in the order of their names
    more, train = gzip.open(raw / "more.de.gz").read(), (raw / "train.de").read_bytes()
    assert (out / "text" / "train.de").read_bytes() == more + train
    again = script("prepare.sh", *argv)
    assert "reusing" in again.stdout
    refused(script("prepare.sh", *argv[:-1], "1", "--lowercase"), "other settings", "lowercase=")


def test_prepare_goes_on_where_it_stopped(tmp_path, raw):
    """A full disk ends it in one line with nothing half-written; what was finished is not made again."""
    out = tmp_path / "out"
    (out / "tok").mkdir(parents=True)
    (out / "tok" / "valid.de.part").symlink_to("/dev/full")
    argv = [raw, "en", "de", out, "--merges", "100", "--workers", "1"]
    refused(script("prepare.sh", *argv), "tok/valid.de was not made", "No space left on device")
    assert not (out / "tok" / "valid.de").exists() and not (out / "bin").exists()
    kept = (out / "tok" / "train.en").stat().st_mtime_ns
    done = script("prepare.sh", *argv)
    assert done.returncode == 0, done.stderr
    assert (out / "tok" / "train.en").stat().st_mtime_ns == kept and (out / "bin" / "done").exists()


def test_prepare_with_sentencepiece(tmp_path, raw):
    out = tmp_path / "out"
    argv = [raw, "en", "de", out, "--subwords", "sentencepiece", "--workers", "1"]
    refused(script("prepare.sh", *argv, "--merges", "30000"), "--merges 30000", "Vocabulary size too high")
    assert not (out / "pieces.model").exists()
    shutil.rmtree(out)
    done = script("prepare.sh", *argv, "--merges", "150")
    assert done.returncode == 0, done.stderr
    pieces = (out / "sub" / "test.de").read_text().splitlines()
    assert ["".join(line.split()).replace("\u2581", " ").strip() for line in pieces] == (
        (raw / "test.de").read_text().splitlines()
    )


LONG = b"word " * 10_000


@pytest.mark.parametrize(
    "changed, parts",
    [
        (dict(valid_de=b"one line\n"), ["valid.de", "ends after 1 lines", "aligned"]),
        (dict(test_de=b"\n" * 20), ["test.", "line 1 is empty"]),
        (dict(train_de="Stra\u00dfe\n".encode("latin1") * 150), ["train.de: line 1 is not UTF-8", "0xdf", "iconv"]),
        (dict(train_en=b"\n" * 150, more_en_gz=gzip.compress(b"\n" * 50)), ["no pair is left of 200"]),
        (dict(more_en_gz=gzip.compress(b"text\n" * 50)[:-9]), ["more.en.gz", "not a whole gzip file"]),
    ],
    ids=["unequal", "empty-test", "encoding", "all-empty", "truncated"],
)
def test_prepare_refuses_text(tmp_path, raw, changed, parts):
    folder = copied(raw, tmp_path / "raw", **changed)
    out = tmp_path / "out"
    refused(script("prepare.sh", folder, "en", "de", out), *parts)
    assert not (out / "bin").exists() and not list(out.glob("text/*.part"))


def test_prepare_leaves_out_useless_pairs(tmp_path, raw):
    """An empty line and one of 10,000 words are counted and left out; a separator does not end a line."""
    lines = (raw / "train.de").read_bytes().splitlines(keepends=True)
    lines[:3] = [b"\n", LONG + b"\n", "ein\u2028 Wort\x85 mehr\n".encode()]
    folder = copied(raw, tmp_path / "raw", train_de=b"".join(lines))
    done = script("prepare.sh", folder, "en", "de", tmp_path / "out", "--merges", "100", "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert "199 pairs, left out: 1 empty" in done.stdout
    assert "198 pairs, left out: 1 longer than 250 words" in done.stdout
    assert "ein  Wort  mehr\n" in (tmp_path / "out" / "text" / "train.de").read_text()


def test_prepare_refuses(tmp_path, raw):
    out = tmp_path / "out"
    refused(script("prepare.sh", tmp_path / "no", "en", "de", out), "no: no such folder")
    refused(script("prepare.sh", raw, "en", "cs", out), "valid.cs: no such file")
    folder = copied(raw, tmp_path / "raw", newstest2014_en=b"a\n", newstest2014_de=b"a\n")
    refused(script("prepare.sh", folder, "en", "de", tmp_path / "other"), "newstest2014.en", "would be trained on")
    refused(script("prepare.sh", raw, "en", "de", out, "--subwords", "words"), "--subwords words", "sentencepiece")
    refused(script("prepare.sh", raw, "en", "de", out, "--max-ratio", "x"), "--max-ratio x")
    refused(script("prepare.sh", raw, "en", "en", out), "SRC and TGT are both en")
    refused(script("prepare.sh", raw, "en", "de", "/proc/none"), "/proc/none", "cannot be made")
    refused(script("prepare.sh", raw, "en", "de"), "usage")
    folder = copied(raw, tmp_path / "sides")
    (folder / "valid.de").unlink()
    refused(script("prepare.sh", folder, "en", "de", out), "valid.de", "no such file")


class Mirror(http.server.SimpleHTTPRequestHandler):
    """A mirror of statmt.org that can continue a download, and tells what it was asked for."""

    asked = []

    def do_GET(self):
        path = self.translate_path(self.path)
        self.asked.append((self.path, self.headers.get("Range")))
        if not os.path.exists(path):
            return self.send_error(404)
        contents = open(path, "rb").read()
        start = int((self.headers.get("Range") or "bytes=0-")[6:].rstrip("-"))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(contents) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(contents) - 1}/{len(contents)}")
        self.end_headers()
        self.wfile.write(contents[start:])

    def log_message(self, *args):
        pass


@pytest.fixture
def mirror(tmp_path, raw):
    """(URL, its folder, a copy of the scripts that expects these archives and not WMT14's)."""
    site, project = tmp_path / "site", copied_project(tmp_path)
    members = {
        "wmt13/training-parallel-europarl-v7.tgz": "training/europarl-v7.de-en",
        "wmt13/training-parallel-commoncrawl.tgz": "commoncrawl.de-en",
        "wmt14/training-parallel-nc-v9.tgz": "training/news-commentary-v9.de-en",
    }
    sums = ""
    for path, member in members.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(site / path, "w:gz") as archive:
            for lang in ("en", "de"):
                text = (raw / f"train.{lang}").read_bytes()
                info = tarfile.TarInfo(f"{member}.{lang}")
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text))
        sums += f"{hashlib.sha256((site / path).read_bytes()).hexdigest()}  {path}\n"
    (project / "scripts" / "wmt14.sha256").write_text(sums)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Mirror, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Mirror.asked.clear()
    yield f"http://127.0.0.1:{server.server_port}", site, project
    server.shutdown()


def cache_test_set(out, name, raw):
    """sacreBLEU's copy of a test set, as if it had been fetched: the one of a raw corpus."""
    cache = out / "archives" / "sacrebleu" / name
    cache.mkdir(parents=True, exist_ok=True)
    prefix = f"{name.replace('/', '_')}.en-de"
    shutil.copy(raw / "test.en", cache / f"{prefix}.src")
    shutil.copy(raw / "test.de", cache / f"{prefix}.ref")
    for part in ("docid", "genre", "origlang"):
        (cache / f"{prefix}.{part}").write_text("x\n" * len((raw / "test.en").read_text().splitlines()))


def test_wmt14(tmp_path, raw, mirror):
    """Download, resumed; checksums; the test sets of sacreBLEU; the pipeline on a sample; a second run."""
    url, site, project = mirror
    out = tmp_path / "wmt"
    argv = ["de", out, "--mirror", url, "--sample", "100", "--merges", "100", "--workers", "1"]
    europarl = site / "wmt13" / "training-parallel-europarl-v7.tgz"
    whole = europarl.read_bytes()

    europarl.unlink()
    refused(script("prepare_wmt14.sh", *argv, root=project), f"{url}/wmt13/training-parallel-europarl", "404", "--from")
    europarl.write_bytes(whole[:-1] + b"?")
    refused(script("prepare_wmt14.sh", *argv, root=project), "europarl", "SHA-256", "removed")
    assert not list((out / "archives").glob("*europarl*"))
    europarl.write_bytes(whole)
    # a download that was cut off
    (out / "archives" / "training-parallel-europarl-v7.tgz.part").write_bytes(whole[:1000])
    # no network but the mirror: sacreBLEU cannot fetch its sets, and leaves nothing that a second call takes for whole
    offline = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "no_proxy": "127.0.0.1"}
    refused(script("prepare_wmt14.sh", *argv, root=project, env=offline), "raw/valid.en was not made")
    assert ("/wmt13/training-parallel-europarl-v7.tgz", "bytes=1000-") in Mirror.asked
    assert not (out / "raw" / "valid.en").exists()

    cache_test_set(out, "wmt13", raw)
    cache_test_set(out, "wmt14/full", raw)
    asked = len(Mirror.asked)
    done = script("prepare_wmt14.sh", *argv, root=project)
    assert done.returncode == 0, done.stderr
    assert len(Mirror.asked) == asked
    assert (out / "text" / "train.en").read_text().count("\n") == 300 and (out / "bin" / "done").exists()
    assert (out / "sacrebleu_set").read_text().strip() == "wmt14/full"
    assert "reusing" in script("prepare_wmt14.sh", *argv, root=project).stdout


def test_wmt14_from_corpora_at_hand(tmp_path, raw):
    """By mtdata's names; in two processes."""
    folder = tmp_path / "at hand"
    folder.mkdir()
    for name, theirs in (("train", "train"), ("valid", "dev"), ("test", "test1")):
        shutil.copy(raw / f"{name}.en", folder / f"{theirs}.eng")
        shutil.copy(raw / f"{name}.de", folder / f"{theirs}.deu")
    argv = ["de", tmp_path / "out", "--from", folder, "--sample", "40", "--merges", "50", "--workers", "2"]
    done = script("prepare_wmt14.sh", *argv)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out" / "sacrebleu_set").exists()
    assert "@-@" not in (raw / "train.en").read_text() and "@-@" in (tmp_path / "out" / "tok" / "train.en").read_text()
    refused(script("prepare_wmt14.sh", *argv[:-1], "1", "--merges", "60"), "other settings", "merges=50", "merges=60")
    refused(script("prepare_wmt14.sh", "de", tmp_path / "out", "--from", raw), "other settings", f"from={folder}")
    (tmp_path / "out" / "bin" / "done").unlink()
    refused(script("prepare_wmt14.sh", "de", tmp_path / "out"), "other settings", f"from={folder}")
    refused(script("prepare_wmt14.sh", "de", tmp_path / "new", "--from", folder, "--bogus", "5"), "--bogus")
    assert not (tmp_path / "new").exists()


def test_prepare_waits_for_another_call(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "raw").mkdir()
    argv = ["bash", ROOT / "scripts" / "prepare.sh", tmp_path / "raw", "en", "de", out]
    with open(out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while "at work" not in (line := process.stdout.readline()):
            assert line
        assert not (out / "settings").exists()
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and "valid.en: no such file" in error


@pytest.mark.parametrize("lang, archives", [("de", 3), ("fr", 5)])
def test_wmt14_shows_its_commands(tmp_path, lang, archives, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # it does not limit the processes
    commands = shown("prepare_wmt14.sh", lang, tmp_path / "out")
    assert len([c for c in commands if c.startswith("curl ")]) == archives
    assert len([c for c in commands if re.match("sha256sum .* # [0-9a-f]{64}$", c)]) == archives
    assert any("learn-bpe -s 40000" in c for c in commands) and "fairseq-preprocess" in commands[-1]
    assert f"--workers {len(os.sched_getaffinity(0))} " in commands[-1]
    assert all(" tokenize -a " in c for c in commands if "sacremoses" in c)
    assert not (tmp_path / "out").exists()


def test_wmt14_refuses(tmp_path):
    refused(script("prepare_wmt14.sh", "cs", tmp_path / "out"), "cs", "de or fr")
    refused(script("prepare_wmt14.sh", "de", tmp_path / "out", "--from", "/nowhere"), "--from /nowhere")
    refused(script("prepare_wmt14.sh", "de"), "usage")


def flag(command, name):
    return re.findall(rf" {name} (\S+)", command)[-1]


@pytest.mark.parametrize("nodes, gpus", [(1, 1), (1, 2), (1, 3), (1, 8), (2, 8), (16, 8), (5, 3)])
def test_the_batch_does_not_depend_on_the_gpus(nodes, gpus):
    argv = ["transformer_synth_random_vanilla_wmt_en_de", "en-de", "--gpus", gpus, "--nodes", nodes]
    (command,) = shown("train.sh", *argv, *(["--rendezvous", "first:29500"] if nodes > 1 else []))
    batch = nodes * gpus * int(flag(command, "--max-tokens")) * int(flag(command, "--update-freq"))
    assert 32768 - nodes * gpus * int(flag(command, "--update-freq")) < batch <= 32768
    assert int(flag(command, "--max-tokens")) <= 4096
    assert ("torchrun" in command) == (nodes * gpus > 1)
    if nodes * gpus > 1:
        assert flag(command, "--nproc-per-node") == str(gpus)
    assert flag(command, "--distributed-world-size") == str(nodes * gpus)


def test_slurm(tmp_path):
    """Each machine is called with the job's size and its first machine; flags of fairseq-train stay behind --."""
    (tmp_path / "scontrol").write_text("#!/bin/bash\nprintf 'gpu7\\ngpu8\\n'\n")
    (tmp_path / "srun").write_text('#!/bin/bash\nshift\nexec "$@"\n')
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    env = {"DRY_RUN": "1", "SLURM_JOB_NODELIST": "gpu[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "40007"}
    env["PATH"] = f"{tmp_path}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    argv = ["transformer_wmt_en_de", "en-de", "--gpus", "8", "--", "--lr", "1"]
    done = script("train.slurm", *argv, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--nnodes 2" in done.stdout and "--rdzv-endpoint gpu7:20007" in done.stdout
    assert flag(done.stdout, "--distributed-world-size") == "16" and flag(done.stdout, "--lr") == "1"
    refused(script("train.slurm", *argv, env=env, cwd=tmp_path), "submit from the project's folder")


def test_train_passes_flags_on():
    argv = [
        "transformer_wmt_en_de_big",
        "en-fr",
        "--gpus",
        "1",
        "--precision",
        "fp16",
        "--save-every",
        "7",
        "--seed",
        "3",
    ]
    (command,) = shown("train.sh", *argv, "--", "--lr", "1e-3")
    assert flag(command, "--lr") == "1e-3" and flag(command, "--dropout") == "0.3" and " --fp16 " in command
    assert flag(command, "--save-interval-updates") == "7" and flag(command, "--target-lang") == "fr"


@pytest.mark.parametrize(
    "argv, parts",
    [
        (["transformer_synth_random_wmt_en_de", "en-cs"], ["en-cs", "--data"]),
        (["transformer_synth_randm_wmt_en_de", "en-de"], ["transformer_synth_randm_wmt_en_de", "random_vanilla,"]),
        (["transformer_synth_random_wmt_en_de_x", "en-de"], ["random_wmt_en_de_x", "no recipe"]),
        (["transformer_iwslt_de_en", "en-de"], ["transformer_iwslt_de_en", "no recipe"]),
        (["transformer_wmt_en_de", "en-de", "--data", "/nowhere"], ["--data /nowhere", "prepare.sh /nowhere"]),
        (["transformer_wmt_en_de"], ["usage"]),
        (["transformer_wmt_en_de", "en-de", "--gpu", "1"], ["unknown option --gpu"]),
        (["transformer_wmt_en_de", "en-de", "--seed", "x"], ["--seed x", "whole number"]),
        (["transformer_wmt_en_de", "en-de", "--timeout", "0"], ["--timeout 0", "at least 1"]),
    ],
)
def test_train_refuses(argv, parts):
    refused(script("train.sh", *argv), *parts)


@pytest.mark.parametrize(
    "argv, parts",
    [
        (["--gpus", "1", "--nodes", "2"], ["--nodes 2", "--rendezvous"]),
        (["--gpus", "2", "--processes", "2"], ["--processes 2", "--gpus 0"]),
        (["--gpus", "8", "--batch-tokens", "1000"], ["--batch-tokens 1000", "125", "raise"]),
        (["--gpus", "1", "--max-tokens", "0"], ["--max-tokens 0", "at least 1"]),
        (["--gpus", "1", "--precision", "int8"], ["--precision int8", "bf16"]),
        (["--gpus", "0", "--precision", "fp16"], ["--precision fp16", "needs a GPU"]),
        (["--gpus", "1", "--wandb", "x"], ["--wandb", "pip install wandb"]),
        (["--gpus", "1", "--tensorboard", "x"], ["--tensorboard", "pip install tensorboard"]),
    ],
)
def test_train_refuses_options(argv, parts):
    refused(script("train.sh", "transformer_wmt_en_de", "en-de", *argv, env={"DRY_RUN": "1"}), *parts)


@pytest.mark.parametrize(
    "config, arch, pair, gpus",
    [
        ("wmt_en_de", "transformer_synth_dense_vanilla_wmt_en_de", "en-de", 8),
        ("wmt_en_fr", "transformer_synth_dense_vanilla_wmt_en_fr", "en-fr", 8),
        ("wmt_en_de_big", "transformer_synth_dense_vanilla_wmt_en_de_big", "en-de", 8),
        ("multi30k", "transformer_synth_dense_vanilla_multi30k", "en-de", 2),
    ],
)
def test_hydra_trains_the_same_model(config, arch, pair, gpus):
    """Every setting of configs/ is that of train.sh, and so is every size that it leaves to the defaults."""
    from fairseq import options
    from fairseq.dataclass.initialize import hydra_init
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from hydra.experimental import compose, initialize_config_dir  # its place in Hydra 1.0
    from omegaconf import OmegaConf

    from fairseq_synth.transformer import SynthesizerTransformerConfig

    hydra_init(config)  # as fairseq-hydra-train does: its own defaults become the schema of this name
    with initialize_config_dir(config_dir=str(ROOT / "configs")):
        overrides = ["model.encoder_synthesizer=dense+vanilla", "common.user_dir=x", "task.data=x"]
        composed = compose(config, overrides=overrides)
    defaults = OmegaConf.to_container(OmegaConf.structured(SynthesizerTransformerConfig), enum_to_str=True)
    given = OmegaConf.to_container(composed, enum_to_str=True)
    given["model"] = {**defaults, **given["model"]}
    hydra = OmegaConf.to_container(OmegaConf.create(given), resolve=True)
    (command,) = shown("train.sh", arch, pair, "--gpus", gpus, "--precision", "bf16")
    argv = shlex.split(command)
    argv = argv[argv.index("fairseq-train") + 1 :]
    args = options.parse_args_and_arch(options.get_training_parser(), input_args=argv)
    cli = OmegaConf.to_container(convert_namespace_to_omegaconf(args), enum_to_str=True)
    cli = {group: vars(value) if isinstance(value, argparse.Namespace) else value for group, value in cli.items()}

    # what train.sh says, and the sizes that its architecture and the defaults of the model say
    said = {a[2:].replace("-", "_") for a in argv if a.startswith("--")} | {"synth_max_length"}
    same = {f"model.{key}" for key in defaults if key not in ("_name", "max_source_positions", "max_target_positions")}
    same |= {f"{group}.{key}" for group in hydra if group != "model" for key in (hydra[group] or {}) if key in said}
    # fairseq-hydra-train counts the GPUs itself
    same -= {"bmuf.distributed_world_size", "distributed_training.distributed_world_size", "common.user_dir"}
    same -= {"task.data", "model.data", "checkpoint.save_dir"}
    assert len(same) > 60
    for path in same:
        group, key = path.split(".")
        if key in cli[group]:
            assert str(cli[group][key]) == str(hydra[group][key]), path
    for group in ("task", "criterion", "optimizer", "lr_scheduler"):
        assert cli[group]["_name"] == hydra[group]["_name"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_train_says_that_there_is_no_gpu():
    refused(script("train.sh", "transformer_wmt_en_de", "en-de", env={"DRY_RUN": "1"}), "none found", "--gpus 0")


def test_a_run_is_not_mixed_with_another(tmp_path, data):
    (data / "bin" / "done").touch()
    save = tmp_path / "save"
    save.mkdir()
    (save / "settings").write_text("arch=transformer_multi30k\n")
    (save / "checkpoint_last.pt").touch()
    argv = ["transformer_synth_dense_multi30k", "en-de", "--data", data, "--save-dir", save, "--gpus", "0"]
    refused(script("train.sh", *argv), str(save), "other settings", "arch=transformer_multi30k")


def test_multi30k_is_checked(tmp_path, multi30k):
    """The real corpus passes; a changed or truncated file is refused and not left behind."""
    folder = tmp_path / "corpus"
    shutil.copytree(multi30k, folder)
    folder.chmod(0o755)
    bad = folder / "val.de.gz"
    bad.unlink()
    bad.write_bytes(gzip.compress(b"Ein anderer Text.\n"))
    out = tmp_path / "out"
    refused(script("prepare_multi30k.sh", "de", out, "--from", folder), "val.de.gz", "SHA-256")
    assert sorted(p.name for p in tmp_path.glob("out-raw/[a-z]*")) == [
        "train.de",
        "train.en",
        "valid.en",
    ]  # those before it passed
    bad.write_bytes((multi30k / "val.de.gz").read_bytes()[:-20])
    refused(script("prepare_multi30k.sh", "de", out, "--from", folder), "val.de.gz", "cut off")
    refused(
        script("prepare_multi30k.sh", "de", tmp_path / "out", "--from", tmp_path / "nowhere"),
        "nowhere",
        "no such folder",
    )
    refused(script("prepare_multi30k.sh", "cs", tmp_path / "out"), "cs", "de or fr")


def test_multi30k_is_downloaded(tmp_path, multi30k):
    """Each file once, out of the way of the corpora that are trained on; one that was cut off is asked for again."""
    (tmp_path / "curl").write_text(
        f"""#!/bin/bash
url=${{@: -1}}
while [ "$1" != --output ]; do shift; done
echo "${{url##*/}}" >> {tmp_path}/asked
cp {multi30k}/"${{url##*/}}" "$2"
[ ! -f {tmp_path}/broken ] || truncate -s 999 "$2"
"""
    )
    (tmp_path / "curl").chmod(0o755)
    project = copied_project(tmp_path)
    (project / "scripts" / "prepare.sh").write_text("#!/bin/bash\necho prepare.sh $*\n")
    env = {"PATH": f"{tmp_path}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    argv = ["prepare_multi30k.sh", "de", tmp_path / "out", "--merges", "50"]
    (tmp_path / "broken").touch()
    refused(script(*argv, env=env, root=project), "train.en.gz", "cut off")
    (tmp_path / "broken").unlink()
    done = script(*argv, env=env, root=project)
    assert f"prepare.sh {tmp_path}/out-raw en de {tmp_path}/out --merges 50" in done.stdout, done.stderr
    assert sorted(p.name for p in tmp_path.glob("out-raw/[a-z]*") if p.is_file()) == [
        f"{split}.{lang}" for split in ("test", "train", "valid") for lang in ("de", "en")
    ]
    parts = [f"{part}.{lang}.gz" for part in ("train", "val", "test_2016_flickr") for lang in ("en", "de")]
    assert (tmp_path / "asked").read_text().split() == ["train.en.gz", *parts]


@pytest.mark.parametrize(
    "argv, parts",
    [
        (["--data", "wmt"], ["--data wmt", "numbers multi30k"]),
        (["--pair", "en-cs"], ["--pair en-cs", "en-de en-fr"]),
        (["--data", "multi30k", "--from", "/nowhere"], ["--from /nowhere", "no such folder"]),
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
    run = tmp_path / "numbers-en-de-bpe200-dense-seed1"
    scores = json.loads((run / "scores.json").read_text())
    assert sorted(scores) == ["bleu", "chrf", "compound_split", "tokenised"]
    again = script("quickstart.sh", *argv, *extra, timeout=500)
    assert again.returncode == 0 and "training" not in again.stdout
    assert re.search(r"^BLEU .*", done.stdout, re.M)[0] in again.stdout and again.stdout.count("output:    ") == 3
    refused(script("quickstart.sh", *argv, timeout=500), "other settings")

    # worse translations than the baseline's, as far as the bootstrap can tell
    corpus, worse = tmp_path / "numbers-en-de-bpe200", tmp_path / "worse"
    shutil.copytree(run, worse)
    shutil.copy(corpus / "test.de", run / "test.hyp.de")
    (corpus / "sacrebleu_set").write_text("wmt14/full\n")
    cache_test_set(corpus, "wmt14/full", corpus)
    done = script("evaluate.sh", corpus, worse, "--average", "2", "--beam", "1", "--baseline", run, timeout=500)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^baseline 100.00, this run \d\.\d\d, p = 0.00", done.stdout, re.M), done.stdout
    assert json.loads((worse / "scores.json").read_text())["bleu"]["test_set"] == "wmt14/full"
    assert re.search(r"^BLEU .* wmt14/full$", done.stdout, re.M)
    kept = (worse / "scores.json").read_text()
    refused(script("evaluate.sh", corpus, worse, "--average", "99"), "found 6 update checkpoints, asked for 99")
    assert (worse / "scores.json").read_text() == kept and (worse / "bootstrap.json").exists()
    fewer = tmp_path / "fewer"
    fewer.mkdir()
    (fewer / "test.hyp.de").write_text("eins\n")
    refused(script("evaluate.sh", corpus, worse, "--baseline", fewer), f"--baseline {fewer}", "not on these data")
    settings = (worse / "settings").read_text()
    for line, other in (("pair=en-de", "pair=de-en"), (f"data={corpus}", "data=/other")):
        assert line in settings
        (worse / "settings").write_text(settings.replace(line, other))
        refused(script("evaluate.sh", corpus, worse), other.split("=")[1], str(corpus))
    refused(script("evaluate.sh", tmp_path / "no", worse), "not prepared")
    before = {path: path.stat().st_mtime_ns for path in run.iterdir()}
    commands = shown("evaluate.sh", corpus, run)
    assert "average_checkpoints.py" in commands[0] and "--lenpen 0.6" in commands[1]
    assert before == {path: path.stat().st_mtime_ns for path in run.iterdir()}

    # the record of the run, and a run that is none
    record = [sys.executable, ROOT / "scripts" / "record_result.py", run, tmp_path / "dense.json", "--variant", "dense"]
    record += ["--data", "numbers", "--pair", "en-de", "--seed", "1", "--command", "scripts/quickstart.sh"]
    subprocess.run([*map(str, record)], check=True)
    result = json.loads((tmp_path / "dense.json").read_text())
    assert result["updates"] == 40 and result["parameters"] > 1e6 and result["figures"]["bleu"] < 50
    record[2] = tmp_path
    done = subprocess.run([*map(str, record)], capture_output=True, text=True)
    refused(done, "scores.json", "evaluate.sh")


def test_compound_splitting(tmp_path):
    """Hyphens between letters are words of their own, as the literature's BLEU on WMT14 En-De has them."""
    split = re.search(r"sed -E '(s/\(\\S\).*?/g)'", (ROOT / "scripts" / "evaluate.sh").read_text())[1]
    done = subprocess.run(["sed", "-E", split], input="ein Hin-und-her - so\n", capture_output=True, text=True)
    assert done.stdout == "ein Hin ##AT##-##AT## und ##AT##-##AT## her - so\n"


def test_reproduce_runs_what_is_missing(tmp_path):
    """Every cell once, fairseq's own first; what is trained or recorded is kept; each ends as a record."""
    project = copied_project(tmp_path)
    calls = project / "calls"
    score = '{"bleu": {"score": 30.5, "name": "BLEU", "signature": "nrefs:1"}}'
    stubs = {
        "prepare_multi30k.sh": "",
        "train.sh": 'while [ "$1" != --save-dir ]; do shift; done; mkdir -p "$2"; '
        'echo "num. trained: 1,000) num_updates=20" > "$2/train.log"',
        "evaluate.sh": f"echo '{score}' > \"$2/scores.json\"",
    }
    for name, body in stubs.items():
        (project / "scripts" / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {calls}\n{body}\n')
    argv = ["multi30k_cpu", "--pair", "en-fr", "--variant", "transformer random_vanilla", "--seed", "1 2"]
    done = script("reproduce.sh", *argv, root=project)
    assert done.returncode == 0, done.stderr
    lines = calls.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["prepare_multi30k.sh", *["train.sh", "evaluate.sh"] * 4]
    assert "transformer_multi30k en-fr" in lines[1] and "transformer_synth_random_vanilla_multi30k" in lines[3]
    assert "--baseline" not in lines[2] and "en-fr-transformer-seed1" in lines[4].split("--baseline")[1]
    results = project / "results" / "multi30k_cpu"
    assert len(list(results.iterdir())) == 4
    record = json.loads((results / "en-fr-random_vanilla-seed2.json").read_text())
    assert (
        record["command"] == "scripts/reproduce.sh multi30k_cpu --pair en-fr --variant random_vanilla --seed 2 --rerun"
    )
    assert record["figures"] == {"bleu": 30.5} and record["updates"] == 20 and record["parameters"] == 1000

    def again(*more):
        before = len(calls.read_text().splitlines())
        done = script("reproduce.sh", *argv, *more, root=project)
        return done, [line.split()[0] for line in calls.read_text().splitlines()[before:]]

    (results / "en-fr-random_vanilla-seed2.json").unlink()  # trained already: only scored
    assert again()[1] == ["prepare_multi30k.sh", "evaluate.sh"]
    assert again()[1] == ["prepare_multi30k.sh"]
    one = project / "runs" / "multi30k_cpu-en-fr-random_vanilla-seed2"
    (one / "checkpoint_last.pt").touch()
    assert again("--seed", "2", "--variant", "random_vanilla", "--rerun")[1][1:] == ["train.sh", "evaluate.sh"]
    assert not (one / "checkpoint_last.pt").exists()  # begun anew
    # another recipe is no cell of the table, and other machines are none of another recipe
    before = sorted((path, path.read_text()) for path in results.iterdir())
    one = ["--seed", "2", "--variant", "random_vanilla"]
    assert again(*one, "--", "--max-update", "5")[1][1:] == ["train.sh", "evaluate.sh"]
    assert sorted((path, path.read_text()) for path in results.iterdir()) == before
    assert (project / "runs" / "multi30k_cpu-en-fr-random_vanilla-seed2-changed" / "result.json").exists()
    assert again(*one, "--", "--gpus", "0")[1] == ["prepare_multi30k.sh"]


@pytest.mark.parametrize(
    "argv, parts",
    [
        (["table9"], ["table9", "table2, multi30k or multi30k_cpu"]),
        (["table2", "--pair", "en-cs"], ["--pair en-cs", "en-de en-fr"]),
        (["table2", "--variant", "random randm"], ["--variant randm", "transformer vanilla random"]),
        (["table2", "--seed", "one"], ["one", "whole number"]),
        ([], ["usage"]),
    ],
)
def test_reproduce_refuses(argv, parts):
    refused(script("reproduce.sh", *argv), *parts)


@pytest.mark.parametrize("table", ["table2", "multi30k", "multi30k_cpu"])
def test_reproduce_shows_its_commands(table, tmp_path):
    """Every cell of a table names architectures that exist."""
    from fairseq.models import ARCH_CONFIG_REGISTRY

    commands = shown("reproduce.sh", table, "--seed", "1", "--rerun", "--out", tmp_path, "--", "--gpus", "0")
    archs = [flag(c, "--arch") for c in commands if "fairseq-train" in c]
    assert len(archs) == 2 * (9 if table == "table2" else 11)
    assert all(arch in ARCH_CONFIG_REGISTRY for arch in archs)
    assert len([c for c in commands if "evaluate.sh" in c]) == len(archs)
    assert not any(tmp_path.iterdir())


def test_tables_are_the_results():
    """README.md shows what results/ holds."""
    subprocess.run([sys.executable, ROOT / "scripts" / "make_tables.py", "--check"], check=True)
