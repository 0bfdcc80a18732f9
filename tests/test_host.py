"""The repairs of the host, each with the symptom it is for, and the one-line errors."""

import argparse
import errno
import importlib.util
import inspect
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import fairseq.checkpoint_utils
import fairseq.distributed.utils
import fairseq.optim.lr_scheduler
import fairseq.options
import fairseq.utils
import numpy as np
import pytest
import torch
import warm
from fairseq.data import LanguagePairDataset, ListDataset, RoundRobinZipDatasets, data_utils, indexed_dataset
from fairseq.distributed import DistributedTimeoutWrapper
from fairseq.file_io import PathManager
from fairseq.models.ema.ema import EMA
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from fairseq_cli import generate, interactive, train
from helpers import (
    RECIPE,
    ROOT,
    SMALL,
    TEST_SENTENCES,
    USER_DIR,
    get_error_line,
    make_dictionary,
    make_model,
    read_losses,
    run_cli,
    run_program,
    train_model,
    used_weights,
)

from fairseq_synth import host
from fairseq_synth.attention import SyntheticAttention
from fairseq_synth.errors import SynthesizerError, explain, run_command
from fairseq_synth.host import repairs, versions
from fairseq_synth.host.bugs import checkpoints
from fairseq_synth.host.messages.training import check_lengths
from fairseq_synth.host.needed.loading import weights_only


@pytest.mark.parametrize("sentences", [0, 1, 5, 8, 100, 3003])
@pytest.mark.parametrize("limits", [dict(max_sentences=16), dict(max_tokens=64), dict(max_tokens=64, max_sentences=8)])
def test_no_sentence_is_dropped(sentences, limits):
    """fairseq after 0.12.2 drops n mod 8 sentences; batches are otherwise the host's."""
    indices = np.random.RandomState(0).permutation(sentences)
    sizes = np.random.RandomState(1).randint(1, 9, size=sentences)
    batches = data_utils.batch_by_size(
        indices, lambda i: sizes[i], num_tokens_vec=sizes, required_batch_size_multiple=8, **limits
    )
    assert np.concatenate([*batches, []]).tolist() == indices.tolist()
    assert all(len(b) % 8 == 0 or len(b) < 8 or b is batches[-1] for b in batches)
    assert all(len(b) <= limits.get("max_sentences", 10**6) for b in batches)


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize(
    "ngram, forbidden",
    [
        (1, [[0, 7], [0, 8], [0, 9], [1, 3], [1, 4], [1, 6], [1, 8], [2, 5]]),
        (2, [[0, 9], [1, 6], [2, 5]]),
        (3, [[0, 9], [2, 5]]),
        (5, [[2, 5]]),
        (6, []),
    ],
)
def test_repeated_ngrams_are_found(ngram, forbidden, exported):
    """In a buffer with five tokens after the first column, 9 would complete 7 8 9 again, and 6 the pair 8 6.

    The last sentence has five equal tokens: a sixth would repeat an n-gram of any size up to 5. The end of sentence in
    the first column is none of them: were it forbidden, no sentence could end.
    """
    tokens = torch.full((3, 10), 1)
    tokens[:, 0] = 2
    tokens[:, 1:6] = torch.tensor([[7, 8, 9, 7, 8], [3, 8, 6, 4, 8], [5, 5, 5, 5, 5]])
    block = NGramRepeatBlock(ngram, use_extension=False)
    log_probs = (torch.jit.script(block) if exported else block)(tokens, torch.zeros(3, 12), 1, 3, 5)
    assert log_probs.isinf().nonzero().tolist() == forbidden


def test_fixed_shapes_are_left_alone():
    shapes = [(4, 8)]
    batches = data_utils.batch_by_size(np.arange(10), lambda i: 8, fixed_shapes=shapes)
    assert all(len(b) <= 4 for b in batches)


def bucketed(lengths, buckets):
    """A corpus whose sources have `lengths` tokens and whose targets have three tokens less, in buckets."""
    dictionary = make_dictionary()
    sources = [torch.full((n,), 5) for n in lengths]
    targets = [torch.full((max(n - 3, 1),), 5) for n in lengths]
    sizes = [list(map(len, side)) for side in (sources, targets)]
    return LanguagePairDataset(
        sources, sizes[0], dictionary, targets, sizes[1], dictionary, num_buckets=buckets, shuffle=False
    )


@pytest.mark.parametrize("buckets", [1, 3, 100])
@pytest.mark.parametrize("limits", [(24, 24), (24, 10), (1024, 24), 24, (24, float("inf")), (1024, 1024)])
def test_buckets_lose_no_sentence(buckets, limits):
    """A sentence is skipped if it is too long, and not if its bucket is; what is padded fits the model."""
    dataset = bucketed(range(1, 31), buckets)
    kept, ignored = dataset.filter_indices_by_size(dataset.ordered_indices(), limits)
    source, target = limits if isinstance(limits, tuple) else (limits, limits)
    fitting = [i for i in range(30) if i + 1 <= source and max(i - 2, 1) <= target]
    assert sorted(kept) == fitting and sorted([*kept, *ignored]) == list(range(30))
    batches = dataset.batch_by_size(kept, max_tokens=100)
    assert sorted(np.concatenate(batches)) == fitting
    for batch in batches:
        collated = dataset.collater([dataset[i] for i in batch])
        assert collated["net_input"]["src_tokens"].size(1) <= source and collated["target"].size(1) <= target
        assert len(batch) * max(collated["net_input"]["src_tokens"].size(1), collated["target"].size(1)) <= 100
        assert collated["ntokens"] == sum(max(i - 2, 1) for i in batch)


def test_buckets_are_percentiles():
    assert data_utils.get_buckets(np.arange(1, 101), 4).tolist() == [25, 50, 75, 100]
    assert bucketed(range(1, 101), 4).src.buckets.tolist() == [25, 50, 75, 100]


def test_numpy_compat():
    assert np.compat.long(3) == 3


@pytest.mark.skipif(not hasattr(torch.serialization, "safe_globals"), reason="torch without an allow-list")
class TestSafeLoading:
    def roundtrip(self, tmp_path, value):
        torch.save(value, tmp_path / "x.pt")
        return torch.load(tmp_path / "x.pt")

    def test_what_checkpoints_hold(self, tmp_path):
        """The Namespace of a stock model, and the arrays that --eval-bleu logs, in either numpy's naming."""
        assert self.roundtrip(tmp_path, argparse.Namespace(a=1)).a == 1
        for value in (np.array([1, 2]), np.array(0.5), np.float64(0.5), np.int64(3)):
            assert (self.roundtrip(tmp_path, {"v": value})["v"] == value).all()

    @pytest.mark.parametrize("function", [os.system, print, eval, subprocess.Popen])
    def test_code_is_not_run(self, tmp_path, function):
        class Hostile:
            def __reduce__(self):
                return function, (f"touch {tmp_path}/ran",)

        with pytest.raises(pickle.UnpicklingError):
            self.roundtrip(tmp_path, {"model": Hostile()})
        # also where the host asks for unsafe loading
        with pytest.raises(pickle.UnpicklingError), weights_only():
            torch.load(tmp_path / "x.pt", weights_only=False)
        torch.save({"model": Hostile()}, tmp_path / "hostile.pt")
        with pytest.raises(SynthesizerError, match="hostile.pt: refused"):
            fairseq.checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "hostile.pt"))
        assert not (tmp_path / "ran").exists()

    def test_config_types_only_while_broadcasting(self, tmp_path):
        """The resume of several processes needs the config's types; files never do."""
        from omegaconf import OmegaConf

        with pytest.raises(pickle.UnpicklingError):
            self.roundtrip(tmp_path, OmegaConf.create({"a": 1}))


def unreadable(path):
    """The one line about a checkpoint that cannot be loaded."""
    with pytest.raises(SynthesizerError) as caught:
        fairseq.checkpoint_utils.load_checkpoint_to_cpu(str(path))
    line = str(caught.value)
    assert line.startswith(f"{path}: ") and "\n" not in line
    return line


@pytest.mark.skipif(not hasattr(torch.serialization, "safe_globals"), reason="torch without an allow-list")
@pytest.mark.parametrize("reference", [os.system, eval, SynthesizerError])
def test_what_is_refused_is_named(tmp_path, reference):
    """The type that is not allowed, and not torch's advice to load the file without a check."""
    torch.save({"model": reference}, tmp_path / "hostile.pt")
    line = unreadable(tmp_path / "hostile.pt")
    assert re.search(f"it holds ([a-z_.]*[.])?{reference.__name__}, ", line) and "refused" in line
    assert "weights_only" not in line and "safe_globals" not in line


@pytest.mark.parametrize(
    "error, part",
    [
        (MemoryError(), "not enough memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "not enough memory"),
        (ModuleNotFoundError("No module named 'apex'"), "No module named 'apex'"),
    ],
)
def test_why_a_load_failed(tmp_path, monkeypatch, error, part):
    def fail(*args, **kwargs):
        raise error

    torch.save({"model": {}}, tmp_path / "checkpoint1.pt")
    monkeypatch.setattr(torch, "load", fail)
    line = unreadable(tmp_path / "checkpoint1.pt")
    assert part in line and "cut short" not in line


def test_text_in_place_of_a_checkpoint(tmp_path):
    (tmp_path / "a.pt").write_text("hello, this is no checkpoint")
    line = unreadable(tmp_path / "a.pt")
    assert "not a readable checkpoint" in line or "no checkpoint of torch" in line  # torch 2.3 fails elsewhere


def test_truncated_checkpoint(tmp_path):
    """One line with the file's name, however much of it is left."""
    path = tmp_path / "checkpoint1.pt"
    torch.save({"model": {"w": torch.zeros(1000)}, "args": None}, path)
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(SynthesizerError, match="checkpoint1.pt: ") as caught:
            fairseq.checkpoint_utils.load_checkpoint_to_cpu(str(path))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["weights", "model"])
def test_not_a_fairseq_checkpoint(tmp_path, name):
    """A file of torch that is whole, but holds something else."""
    torch.save({name: torch.zeros(3)}, tmp_path / "other.pt")
    line = unreadable(tmp_path / "other.pt")
    assert "not a checkpoint of fairseq-train" in line and "cut short" not in line


def test_a_copy_is_whole_or_absent(tmp_path, monkeypatch):
    """Killed or out of space in the middle of a copy: the file of that name stays what it was."""
    new, last = tmp_path / "checkpoint2.pt", tmp_path / "checkpoint_last.pt"
    new.write_bytes(b"new" * 1000), last.write_bytes(b"old")

    def half(src, dst, *args, **kwargs):
        with open(dst, "wb") as f:
            f.write(b"ne")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", half)
        with pytest.raises(OSError):
            PathManager.copy(str(new), str(last), overwrite=True)
    assert last.read_bytes() == b"old" and sorted(os.listdir(tmp_path)) == ["checkpoint2.pt", "checkpoint_last.pt"]
    PathManager.copy(str(new), str(last), overwrite=True)
    assert last.read_bytes() == new.read_bytes()


def test_a_copy_without_overwrite_is_the_hosts(tmp_path, monkeypatch):
    """Only checkpoints, which are overwritten, are copied in another way."""
    calls = []
    monkeypatch.setattr(checkpoints.shutil, "copyfile", lambda *args: calls.append(args))
    monkeypatch.setattr(checkpoints.os, "replace", lambda *args: pytest.fail("replaced"))
    PathManager.copy("a", str(tmp_path / "b"))
    assert calls == [("a", str(tmp_path / "b"))] or calls == []  # iopath, where it is installed, has its own


@pytest.mark.parametrize("task", [FairseqTask, LanguageModelingTask])
def test_empty_lines_are_continued(task):
    """A prefix that is the end of the sentence, 2, leaves the line free; other prefixes stay."""
    dictionary = make_dictionary()
    asks = SimpleNamespace(target_dictionary=dictionary, source_dictionary=dictionary, args=None)
    generator = SimpleNamespace(generate=lambda models, sample, prefix_tokens=None, **_: prefix_tokens)
    prefixes = torch.tensor([[5, 2], [2, 1], [6, 7]])
    found = task.inference_step(asks, generator, [], {}, prefix_tokens=prefixes)
    assert found.tolist() == [[5, 2], [1, 1], [6, 7]]


def test_a_read_only_disk_is_named(tmp_path, monkeypatch):
    """And not the clean-up, which fails there too."""
    monkeypatch.setattr("os.remove", lambda path: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only", path)))
    with pytest.raises(OSError, match="the reason"), checkpoints.removed_on_error(str(tmp_path / "a.tmp")):
        raise OSError("the reason")


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    path = tmp_path / "checkpoint1.pt"
    path.write_bytes(b"old")
    with pytest.raises(Exception, match="pickle"):
        fairseq.checkpoint_utils.torch_persistent_save({"x": lambda: 0}, str(path))
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["checkpoint1.pt"]


def test_sharded_data_has_batches_of_its_own_in_each_epoch(data):
    """Without the iterators' cache nothing is reused, and the host forms the batches of the epoch at hand."""

    def batches(get_batch_iterator, epoch):
        cfg = TranslationConfig(data=str(data / "bin"), source_lang="en", target_lang="de", dataset_impl="mmap")
        task = TranslationTask.setup_task(cfg)
        task.load_dataset("train")
        kwargs = dict(max_tokens=200, epoch=epoch, disable_iterator_cache=True)
        return [b.tolist() for b in get_batch_iterator(task, task.dataset("train"), **kwargs).frozen_batches]

    ours, hosts = FairseqTask.get_batch_iterator, FairseqTask.get_batch_iterator.__wrapped__
    assert batches(ours, 2) == batches(hosts, 2)
    with_epoch = "seed + epoch" in inspect.getsource(hosts)  # 0.12.2 has the same batches in every epoch
    assert (batches(hosts, 2) != batches(hosts, 1)) == with_epoch


@pytest.mark.parametrize("fp32", [False, True], ids=["as-the-model", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ema_averages_tied_weights_once(dtype, fp32):
    """One update with a decay of a half: each average is halfway between old and new, tied or not, and none is lost."""
    config = SimpleNamespace(ema_decay=0.5, ema_start_update=0, ema_fp32=fp32, ema_update_freq=1, ema_seed_model=None)
    model = make_model(share_all_embeddings=True, encoder_normalize_before=True, decoder_normalize_before=True)
    model = model.to(dtype)
    ema = EMA(model, config)
    old = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    ema.step(model, updates=1)
    for name, new in used_weights(model.state_dict()).items():
        torch.testing.assert_close(ema.get_model().state_dict()[name], (old[name] + new) / 2, rtol=0.01, atol=0.01)


def test_a_process_that_waits_is_terminated():
    """SIGTERM if nothing else is asked for; the host's other arguments stay."""
    module = torch.nn.Linear(1, 1)
    assert DistributedTimeoutWrapper(module, timeout=0).signal == signal.SIGTERM
    assert DistributedTimeoutWrapper(module, timeout=0, signal=signal.SIGKILL).signal == signal.SIGKILL
    assert DistributedTimeoutWrapper(module, 0, signal.SIGINT).signal == signal.SIGINT


def test_only_the_signal_is_changed(monkeypatch):
    """A host whose timeout has other defaults keeps those."""
    calls = []

    def init(self, module, timeout=60, interval=5, signal=signal.SIGINT, name="heartbeat"):
        calls.append((timeout, interval, signal, name))

    monkeypatch.setattr(DistributedTimeoutWrapper, "__init__", init)
    monkeypatch.setattr(DistributedTimeoutWrapper, "__del__", lambda self: None)
    repairs.REPAIRS["terminate_on_heartbeat_timeout"].apply()
    DistributedTimeoutWrapper(None), DistributedTimeoutWrapper(None, 0, name="other")
    assert calls == [(60, 5, signal.SIGTERM, "heartbeat"), (0, 5, signal.SIGTERM, "other")]


def test_the_metric_of_a_batch_leaves_no_trace(data, tmp_path):
    """Where a metric is looked for before the training, the training is the same."""
    flags = ["--max-update", "2", "--max-tokens", "400"]
    usual = read_losses(train_model(data, tmp_path / "loss", *flags))
    assert read_losses(train_model(data, tmp_path / "ppl", *flags, "--best-checkpoint-metric", "ppl")) == usual


def test_repairs_are_applied_once():
    """A second import, by any name, wraps nothing again."""
    assert len(repairs.PLACES) > 30
    before = [place.function() for place in repairs.PLACES]
    repairs.apply_repairs()
    folder = Path(host.__file__).parent
    for path in (*folder.glob("*/*.py"), folder / "message_table.py"):
        if path.stem != "__init__":
            package = ".".join(path.relative_to(ROOT).parts[:-1])
            spec = importlib.util.spec_from_file_location(f"{package}.{path.stem}_again", path)
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
    repairs.apply_repairs()
    host.repair_fairseq()
    assert [place.function() for place in repairs.PLACES[: len(before)]] == before


# only where numpy is new, or where the host is 0.12.2 or later than that
UNNEEDED = {"restore_numpy_compat", "find_buckets_with_new_numpy", "keep_last_batch", "allow_checkpoint_types"}
UNNEEDED |= {"allow_config_in_broadcast", "leave_the_fast_path", "share_flags_with_the_model"}


def in_command(code, command="generate"):
    """Python code that runs `code` in one of fairseq's commands, once it has loaded the plugin."""
    return (
        f"import fairseq.utils, fairseq_cli.{command} as command;"
        "plugin = type('', (), dict(user_dir='fairseq_synth'));"
        "run = f'def run():\\n fairseq.utils.import_user_module(plugin)\\n ' + " + repr(code.replace("\n", "\n ")) + ";"
        "exec(compile(run, command.__file__, 'exec')); run()"
    )


def run_python(code, **environment):
    return warm.run(["-c", code], cwd=ROOT, env={**os.environ, **environment})


def test_repairs_are_logged_and_can_be_switched_off():
    """Some by name; what is left is logged once each."""
    off = "keep_last_batch, write_checkpoints_atomically"
    code = (
        "import fairseq_synth, fairseq.file_io, logging; from fairseq_synth.host import repairs; "
        "fairseq_synth.register();"
        "print(*repairs.REPAIRS); repairs.apply_repairs();"
        "print(hasattr(fairseq.file_io.PathManager.copy, repairs.MARK))"
    )
    done = run_python(code, FAIRSEQ_SYNTH_NO_REPAIRS=off, LOGLEVEL="debug")
    names, copy_is_marked = done.stdout.splitlines()
    logged = re.findall(r"DEBUG.*repaired fairseq: (\w+)", done.stderr)
    assert copy_is_marked == "False" and len(set(logged)) == len(logged)
    assert set(logged) | set(off.split(", ")) >= set(names.split()) - {"print_one_line_errors"} - UNNEEDED
    assert not set(logged) & set(off.split(", "))


def test_all_repairs_can_be_switched_off():
    """But for one: no checkpoint is unpickled without a check."""
    code = (
        "import fairseq_synth, fairseq.checkpoint_utils as c, sys; from fairseq_synth.host import repairs; "
        "fairseq_synth.register();"
        "print(sys.excepthook is sys.__excepthook__, getattr(c.load_checkpoint_to_cpu, repairs.MARK))"
    )
    done = run_python(code, FAIRSEQ_SYNTH_NO_REPAIRS="all")
    assert done.stdout.strip() == "True ('load_weights_only',)", done.stderr


def test_a_repair_that_does_not_exist(monkeypatch):
    done = run_python(in_command("pass"), FAIRSEQ_SYNTH_NO_REPAIRS="1")
    assert done.returncode != 0
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("fairseq_synth: error: FAIRSEQ_SYNTH_NO_REPAIRS=1: give all, or names")
    assert "keep_last_batch" in line and "Traceback" not in done.stderr
    monkeypatch.setenv("FAIRSEQ_SYNTH_NO_REPAIRS", "all,keep_last_batch")
    with pytest.raises(SynthesizerError, match="all,keep_last_batch: give all, or names"):
        repairs.check_switch()


def test_every_repair_says_what_it_is_for():
    """A row of docs/fairseq-bugs.md has the symptom, which is no full sentence with a stop, and the versions."""
    for name, repair in repairs.REPAIRS.items():
        assert repair.symptom and not repair.symptom.endswith("."), name
        assert re.search("all versions|0.12.2", repair.versions), name


@pytest.mark.parametrize("version", ["1.13.1", "2.2.2+cu118"])
def test_old_torch(version):
    with pytest.raises(SynthesizerError, match="torch .* is too old; supported: Python 3.10 .* torch 2.3"):
        versions.check_torch(version)


def test_new_torch_is_warned_of(caplog):
    """The first version that pip would not choose."""
    first = re.search(r"torch>=2.6,<(2.\d+); python_version >= ", (ROOT / "pyproject.toml").read_text())[1]
    newest = f"2.{int(first[2:]) - 1}"
    assert versions.SUPPORTED.endswith(f"torch 2.6 to {newest}")
    versions.check_torch(f"{newest}.1+cpu")
    assert not caplog.records
    versions.check_torch(f"{first}.0")
    assert f"torch {first}.0 is newer than the tested ones; supported:" in caplog.text


def test_unusable_fairseq(monkeypatch):
    monkeypatch.setitem(sys.modules, "fairseq.models.transformer", None)
    with pytest.raises(SynthesizerError, match="this fairseq cannot be used .*supported: .*ve-fairseq 0.12.3"):
        versions.import_host()


@pytest.mark.parametrize(
    "module, body", [("fairseq", "raise ValueError('mutable default')"), ("torch", "__version__ = '1.9'")]
)
def test_an_unsupported_host_is_named_in_one_line(tmp_path, module, body):
    """What a user sees who has installed it beside something that does not fit."""
    (tmp_path / f"{module}.py").write_text(body)
    if module == "torch":
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch.py").rename(tmp_path / "torch" / "__init__.py")
        (tmp_path / "torch" / "nn.py").write_text("Module = object")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = warm.run(["-m", "fairseq_synth", "flags"], cwd=ROOT, env=environment, fresh=True)
    assert done.returncode != 0 and not done.stdout
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("fairseq_synth: error: ") and "supported: Python 3.10" in line and versions.SUPPORTED in line


@pytest.mark.parametrize("version", ["2.2.2", None])
def test_the_folder_is_not_printed_where_torch_is_too_old(tmp_path, version):
    """By what is installed: nothing is imported."""
    (tmp_path / "torch.py").write_text("raise ValueError('imported')")
    if version:
        (tmp_path / f"torch-{version}.dist-info").mkdir()
        (tmp_path / f"torch-{version}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for word, printed in ((), ROOT / "fairseq_synth"), (("configs",), ROOT / "configs"):
        done = warm.run(["-m", "fairseq_synth", *word], cwd=ROOT, env=environment, fresh=True)
        if version:
            assert done.returncode == 1 and not done.stdout and done.stderr.count("\n") == 1
            assert done.stderr.startswith(f"fairseq_synth: error: torch {version} is too old; supported: Python 3.10")
        else:
            assert done.stdout == f"{printed}\n" and not done.stderr


def test_explanations():
    """The cause that the plugin knows is found behind what the host wrapped around it."""

    def chained(inner, outer, module="fairseq.trainer", how=""):
        code = f"try:\n raise inner\nexcept Exception:\n raise outer{how}"
        try:
            exec(code, {"__name__": module, "inner": inner, "outer": outer})
        except Exception as error:
            return explain(error)

    mistake, full = SynthesizerError("mend it"), OSError(errno.ENOSPC, "No space left on device", "/a/b")
    assert chained(mistake, Exception("Cannot load model parameters")) == "mend it"  # fairseq leaves "from" out
    line = chained(full, RuntimeError("unexpected pos"), "torch.serialization")
    assert line == "/a/b: could not be written (No space left on device); make room, then start the command again"
    assert chained(mistake, KeyError("b"), "somebody.s.script", " from inner") == "mend it"
    assert chained(KeyError("a"), ValueError("b")) is None
    # another error while one is handled, of fairseq's code too, and one that says it has no cause
    for outer, how in ((NameError("x"), ""), (KeyError("x"), " from None"), (Exception("x"), " from None")):
        assert chained(mistake, outer, how=how) is None and chained(full, outer, how=how) is None
    assert chained(mistake, Exception("x"), "somebody.s.script") is None
    # fairseq names the file, and the reason is the system's; a name of two lines is written in one
    unwritable = chained(KeyError("a"), OSError(errno.EROFS, "Read-only file system", "/a/checkpoint1.pt"))
    assert unwritable == "/a/checkpoint1.pt: Read-only file system"
    assert explain(SynthesizerError("--arch a\n  b: unknown")) == "--arch a b: unknown"
    # a user's own mistakes keep their traceback
    assert chained(FileNotFoundError(2, "No such file", "/optional"), KeyError("a bug")) is None
    assert explain(FileNotFoundError(2, "No such file", "/mine")) is None


@pytest.mark.parametrize(
    "message",
    [
        "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:59102: Connection reset by peer. This is typically",
        "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711",
        "Timed out after 16 seconds waiting for clients. 1/2 clients joined.",
    ],
)
def test_a_lost_process_is_named(message):
    def caught(module):
        frame = {"__name__": module, "message": message}
        try:
            exec("raise RuntimeError(message)", frame)
        except RuntimeError as error:
            return explain(error)

    assert "another process of this run" in caught("fairseq.trainer") and "last checkpoint" in caught("fairseq.trainer")
    assert caught("somebody.s.script") is None


@pytest.mark.parametrize("command, is_training", [("generate", False), ("train", True)])
def test_an_interrupted_run_says_so_in_a_line(command, is_training):
    done = run_python(in_command("exec('raise KeyboardInterrupt', vars(fairseq.utils))", command))
    assert done.returncode != 0 and "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert "interrupted" in line and ("goes on from its last checkpoint" in line) == is_training


def test_no_fast_path_around_the_attention(monkeypatch):
    """At inference from a loaded checkpoint every layer's attention is called (0.12.2 would go around it)."""
    model = make_model()
    model.load_state_dict(model.state_dict())
    calls = []
    forward = SyntheticAttention.forward
    monkeypatch.setattr(SyntheticAttention, "forward", lambda *args, **kw: calls.append(1) or forward(*args, **kw))
    with torch.no_grad():
        model.eval().encoder(torch.tensor([[5, 6, 2]]))
    assert len(calls) == len(model.encoder.layers)


def test_a_stock_model_reads_left_padding():
    """At inference from a loaded checkpoint (0.12.2 ends in an error), and padding changes nothing."""
    model = make_model("transformer_multi30k")
    model.load_state_dict(model.state_dict())
    with torch.no_grad():
        padded, alone = (model.encoder(torch.tensor([row]))["encoder_out"][0] for row in ([1, 5, 6, 2], [5, 6, 2]))
    assert torch.allclose(padded[1:], alone, atol=1e-6)


def test_a_chain_of_errors_that_comes_back_to_itself():
    """Each is looked at once."""
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__cause__ = second, first
    assert explain(first) is None


def test_validation_of_several_pairs_of_languages_is_left_alone():
    """Limits by pair of languages: such a data set filters itself once it has been ordered."""

    class Task(FairseqTask):
        def max_positions(self):
            return OrderedDict({"a-b": (5, 5), "b-a": (5, 5)})

    task = Task(None)
    task.datasets["valid"] = RoundRobinZipDatasets(OrderedDict({"a-b": ListDataset([1]), "b-a": ListDataset([2])}))
    model = SimpleNamespace(max_positions=lambda: OrderedDict({"a-b": (4, 4), "b-a": (4, 4)}))
    dataset = SimpleNamespace(valid_subset="valid", max_tokens_valid=100)
    check_lengths(SimpleNamespace(task=task, get_model=lambda: model, cfg=SimpleNamespace(dataset=dataset)))


# the smallest run that ends with a checkpoint, and tasks that need one
SHORT = ["--max-update", "2", "--no-epoch-checkpoints", "--data-buffer-size", "0"]


@pytest.fixture(scope="module")
def translator(make_once, data):
    """A checkpoint of a translation model after two updates."""
    return make_once("translator", lambda folder: train_model(data, folder, *SHORT)) / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def scorer(make_once, monolingual):
    """A checkpoint of a language model with the words of `translator`, after two updates."""
    argv = ["--task", "language_modeling", "--tokens-per-sample", "200", "--synth-max-length", "300"]
    argv += [
        "--decoder-layers",
        "1",
        "--decoder-embed-dim",
        "16",
        "--decoder-ffn-embed-dim",
        "16",
        "--optimizer",
        "adam",
    ]
    argv += ["--decoder-attention-heads", "2", "--lr", "0.1", "--batch-size", "8", "--num-workers", "0", *SHORT]

    def make(folder):
        arch = ["--arch", "transformer_lm_synth_random_vanilla_ptb"]
        run_cli(train.cli_main, monolingual, *USER_DIR, *arch, *argv, "--save-dir", folder)

    return make_once("scorer", make) / "checkpoint_last.pt"


def hypotheses(output):
    """{number of a sentence: its translations with their scores}"""
    found = {}
    for number, hypothesis in re.findall(r"^H-(\d+)\t(.*)$", output, re.M):
        found.setdefault(int(number), []).append(hypothesis)
    return found


def test_patience_is_remembered(data, tmp_path):
    """A training that --patience has ended stays ended when it is started again, and counts on where it stopped."""
    flags = ["--lr", "1e-20", "--max-tokens", "4000", "--max-epoch", "9", "--no-epoch-checkpoints"]
    first = read_losses(train_model(data, tmp_path, *flags, "--patience", "2"))
    again = train_model(data, tmp_path, *flags, "--patience", "2")
    assert "nothing to do: the last 2 validations were no better, --patience is 2" in again and not read_losses(again)
    longer = read_losses(train_model(data, tmp_path, *flags, "--patience", "3"))
    epoch = len(first) // 3  # the first epoch sets the best loss, the next two are no better
    assert len(longer) == epoch
    anew = read_losses(train_model(data, tmp_path, *flags, "--patience", "2", "--reset-meters"))
    assert len(anew) == 3 * epoch


def test_shards_of_a_test_set(data, translator):
    """Each sentence is translated in one shard; a shard that does not exist is an error."""
    argv = [data / "bin", *USER_DIR, "--path", translator, "--beam", "1", "--batch-size", "4"]
    shards = [
        hypotheses(run_cli(generate.cli_main, *argv, "--num-shards", "3", "--shard-id", shard)[0]) for shard in range(3)
    ]
    numbers = [number for shard in shards for number in shard]
    assert sorted(numbers) == list(range(TEST_SENTENCES)) and all(shards)
    for shard in ("3", "-1"):
        line = get_error_line(generate.cli_main, *argv, "--num-shards", "3", "--shard-id", shard)
        assert line.startswith(f"--shard-id {shard}: must be from 0 to 2")
    line = get_error_line(interactive.cli_main, data / "bin", *USER_DIR, "--path", translator, "--num-shards", "3")
    assert line.startswith("--num-shards 3: fairseq-interactive translates all")


def test_fusion_with_a_language_model(data, translator, scorer):
    """--lm-path works with data that lack the model's dict.txt, and alike in generate and interactive."""
    argv = [data / "bin", *USER_DIR, "--path", translator, "--beam", "2", "--max-len-a", "0", "--max-len-b", "20"]
    fusion = ["--lm-path", scorer, "--lm-weight", "0.7"]
    alone = hypotheses(run_cli(generate.cli_main, *argv)[0])
    fused = hypotheses(run_cli(generate.cli_main, *argv, *fusion)[0])
    assert len(fused) == TEST_SENTENCES and fused != alone
    source = (data / "test.en").read_text()
    typed = hypotheses(run_cli(interactive.cli_main, *argv, *fusion, stdin=source)[0])
    for number, (hypothesis,) in fused.items():
        score, text = hypothesis.split("\t")
        typed_score, typed_text = typed[number][0].split("\t")
        assert typed_text == text and float(typed_score) == pytest.approx(float(score), abs=1e-4)


@pytest.mark.parametrize("main", [generate.cli_main, interactive.cli_main])
def test_a_language_model_that_does_not_fit(data, translator, scorer, tmp_path, main):
    """A file that is not there, a model of another kind, and one of other words: the line names --lm-path."""
    argv = [data / "bin", *USER_DIR, "--path", translator, "--max-len-a", "0", "--max-len-b", "20"]
    state = torch.load(scorer)
    words = (data / "bin" / "dict.de.txt").read_text().splitlines()
    (tmp_path / "dict.txt").write_text("\n".join(reversed(words)) + "\n")
    state["cfg"]["task"]["data"] = str(tmp_path)
    torch.save(state, tmp_path / "other.pt")
    for path, part in (
        (tmp_path / "nothing.pt", "no such file"),
        (tmp_path / "other.pt", "has other words, or another order"),
    ):
        line = get_error_line(main, *argv, "--lm-path", path, "--lm-weight", "0.5", stdin="w1 w2\n")
        assert line.startswith(f"--lm-path {path}: ") and part in line


def test_diverse_beam_search_in_any_batch(data, translator):
    """A sentence has the same translations alone and in a batch."""
    argv = [data / "bin", *USER_DIR, "--path", translator, "--beam", "4", "--nbest", "4", "--diverse-beam-groups", "2"]
    alone, together = (hypotheses(run_cli(generate.cli_main, *argv, "--batch-size", size)[0]) for size in (1, 8))
    assert len(alone) == TEST_SENTENCES and alone.keys() == together.keys()
    for number in alone:
        texts = [[line.split("\t")[1] for line in batch[number]] for batch in (alone, together)]
        assert texts[0] == texts[1]


def test_scalar_quantization_noise_on_a_cpu(data, tmp_path):
    """Such a model trains, and translates."""
    log = train_model(data, tmp_path, *SHORT, "--quant-noise-scalar", "0.5", "--encoder-synthesizer", "dense+vanilla")
    assert len(read_losses(log)) == 2
    argv = [data / "bin", *USER_DIR, "--path", tmp_path / "checkpoint_last.pt", "--beam", "1"]
    assert len(hypotheses(run_cli(generate.cli_main, *argv)[0])) == TEST_SENTENCES


@pytest.mark.parametrize(
    "flags, part",
    [
        (
            ["--skip-remainder-batch", "--update-freq", "500"],
            "--skip-remainder-batch leaves no update .*--update-freq 500",
        ),
        (
            ["--skip-remainder-batch", "--max-tokens", "40000", "--required-batch-size-multiple", "1"],
            "--skip-remainder-batch leaves no update .* 0 batches",
        ),
        (["--profile"], "--profile .*needs a GPU"),
    ],
)
def test_flags_that_leave_nothing_to_train(data, tmp_path, flags, part):
    argv = [data / "bin", *USER_DIR, "--arch", "transformer_synth_random_multi30k", *SMALL, *RECIPE, "--cpu"]
    line = get_error_line(train.cli_main, *argv, "--save-dir", tmp_path, "--max-update", "2", *flags)
    assert re.search(part, line)


def test_a_flag_that_is_not_a_number(data, translator):
    argv = [data / "bin", *USER_DIR, "--path", translator]
    assert get_error_line(generate.cli_main, *argv, "--lenpen", "nan") == "--lenpen nan: give a number"


@pytest.mark.parametrize("impl", ["mmap", "cached", "lazy"])
@pytest.mark.parametrize("suffix, size", [("bin", 0), ("bin", -1), ("idx", 0), ("idx", 20), ("idx", -1)])
def test_cut_data_are_named(tmp_path, impl, suffix, size):
    """A negative size is by how much a file of data is too short."""
    prefix = str(tmp_path / "train.en-de.en")
    builder = indexed_dataset.make_builder(f"{prefix}.bin", impl, vocab_size=100)
    for length in (3, 5):
        builder.add_item(torch.arange(length))
    builder.finalize(f"{prefix}.idx")
    assert len(indexed_dataset.make_dataset(prefix, impl)) == 2
    path = Path(f"{prefix}.{suffix}")
    os.truncate(path, path.stat().st_size + size if size < 0 else size)
    with pytest.raises(SynthesizerError, match=f"^{path}: is cut short, .*run fairseq-preprocess"):
        indexed_dataset.make_dataset(prefix, impl)


def test_commands_of_this_project_recommend_no_package(caplog):
    run_command(lambda: logging.getLogger("fairseq.tasks.text_to_speech").info("Please install tensorboardX"))
    assert not caplog.records


def test_the_clone_in_place_of_the_plugin():
    """``--user-dir CLONE`` ends in one line that names the folder in it."""
    done = run_program("generate", "data-bin", "--user-dir", ROOT, check=False)
    assert done.returncode == 1 and not done.stdout
    line = done.stderr.strip().splitlines()[-1]
    assert (
        line
        == f"fairseq_synth: error: --user-dir {ROOT}: is the clone; give the plugin in it, {ROOT / 'fairseq_synth'}"
    )
    assert "Traceback" not in done.stderr
