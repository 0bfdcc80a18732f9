"""The workarounds for bugs in fairseq in fairseq_synth/host/, and the one-line errors in place of tracebacks."""

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
import textwrap
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
    """fairseq after 0.12.2 drops the last n mod 8 of n sentences.

    Each batch has a multiple of 8 sentences, but the last one has the rest. Fewer than 8 sentences are allowed in any
    batch, because fairseq makes such batches if not even 8 sentences are within the limits.
    """
    indices = np.random.RandomState(0).permutation(sentences)
    sizes = np.random.RandomState(1).randint(1, 9, size=sentences)

    def get_size(index):
        """Returns the number of tokens of a sentence."""
        return sizes[index]

    batches = data_utils.batch_by_size(
        indices, get_size, num_tokens_vec=sizes, required_batch_size_multiple=8, **limits
    )
    no_sentences = []  # np.concatenate needs at least one list, also if there are no batches
    assert np.concatenate([*batches, no_sentences]).tolist() == indices.tolist()
    most_sentences = limits.get("max_sentences", 10**6)  # without a limit, a batch may have any number of sentences
    for batch in batches:
        is_last = batch is batches[-1]
        assert len(batch) % 8 == 0 or len(batch) < 8 or is_last
        assert len(batch) <= most_sentences


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize(
    "size, forbidden",  # each forbidden token as [hypothesis, token]
    [
        (1, [[0, 7], [0, 8], [0, 9], [1, 3], [1, 4], [1, 6], [1, 8], [2, 5]]),
        (2, [[0, 9], [1, 6], [2, 5]]),
        (3, [[0, 9], [2, 5]]),
        (5, [[2, 5]]),
        (6, []),
    ],
)
def test_repeated_ngrams_are_forbidden(size, forbidden, exported):
    """The buffer has the end of sentence, five tokens of the output so far, and padding.

    In the first hypothesis, 9 would repeat the trigram 7 8 9. In the second one, 6 would repeat the bigram 8 6. In the
    third one, a sixth 5 would repeat an n-gram of any size up to 5. The end of sentence in the first column does not
    count, because no sentence could end if it were forbidden.
    """
    padding = 1
    end_of_sentence = 2
    tokens = torch.full((3, 10), padding)
    tokens[:, 0] = end_of_sentence
    tokens[:, 1:6] = torch.tensor([[7, 8, 9, 7, 8], [3, 8, 6, 4, 8], [5, 5, 5, 5, 5]])
    block = NGramRepeatBlock(size, use_extension=False)
    if exported:
        block = torch.jit.script(block)
    log_probs = block(tokens, lprobs=torch.zeros(3, 12), bsz=1, beam_size=3, step=5)
    assert log_probs.isinf().nonzero().tolist() == forbidden


def test_batches_of_fixed_shapes_are_not_changed():
    four_sentences_of_eight_tokens = (4, 8)
    batches = data_utils.batch_by_size(np.arange(10), lambda i: 8, fixed_shapes=[four_sentences_of_eight_tokens])
    assert all(len(batch) <= 4 for batch in batches)


def make_bucketed_dataset(source_lengths, buckets):
    """Returns a data set in buckets. Its targets have three tokens less than its sources, but at least one.

    Args:
        source_lengths: the number of tokens of each source.
        buckets: the number of buckets.
    """
    dictionary = make_dictionary()
    target_lengths = [max(length - 3, 1) for length in source_lengths]
    return LanguagePairDataset(
        src=[torch.full((length,), 5) for length in source_lengths],
        src_sizes=list(source_lengths),
        src_dict=dictionary,
        tgt=[torch.full((length,), 5) for length in target_lengths],
        tgt_sizes=target_lengths,
        tgt_dict=dictionary,
        num_buckets=buckets,
        shuffle=False,
    )


@pytest.mark.parametrize("buckets", [1, 3, 100])
@pytest.mark.parametrize(
    "limits",
    [
        pytest.param((24, 24), id="both sides"),
        pytest.param((24, 10), id="a shorter target"),
        pytest.param((1024, 24), id="only the target, the source has at most 30 tokens"),
        pytest.param(24, id="one number for both sides"),
        pytest.param((24, float("inf")), id="only the source"),
        pytest.param((1024, 1024), id="no sentence is too long"),
    ],
)
def test_buckets_lose_no_sentence(buckets, limits):
    """A sentence is skipped if it is too long, but not if its bucket is. Padded sentences fit the model too.

    Each sentence is padded to the longest length of its bucket, which may be more than the model allows. In this case,
    the batch is padded less.

    Args:
        buckets: the number of buckets.
        limits: the most tokens that the model allows: (in the source, in the target), or one number for both.
    """
    source_lengths = [number + 1 for number in range(30)]
    target_lengths = [max(length - 3, 1) for length in source_lengths]
    dataset = make_bucketed_dataset(source_lengths, buckets)

    # A sentence is kept exactly if both of its sides fit.
    kept, skipped = dataset.filter_indices_by_size(dataset.ordered_indices(), limits)
    if isinstance(limits, tuple):
        max_source, max_target = limits
    else:
        max_source = limits
        max_target = limits
    fitting = []
    for number in range(30):
        if source_lengths[number] <= max_source and target_lengths[number] <= max_target:
            fitting.append(number)
    assert sorted(kept) == fitting
    assert sorted([*kept, *skipped]) == list(range(30))

    # Every kept sentence is in a batch. No batch is padded over the model's limits, or over 100 tokens in all.
    batches = dataset.batch_by_size(kept, max_tokens=100)
    assert sorted(np.concatenate(batches)) == fitting
    for batch in batches:
        collated = dataset.collater([dataset[number] for number in batch])
        padded_source = collated["net_input"]["src_tokens"].size(1)
        padded_target = collated["target"].size(1)
        assert padded_source <= max_source
        assert padded_target <= max_target
        assert len(batch) * max(padded_source, padded_target) <= 100
        assert collated["ntokens"] == sum(target_lengths[number] for number in batch)


def test_buckets_are_percentiles():
    assert data_utils.get_buckets(np.arange(1, 101), 4).tolist() == [25, 50, 75, 100]
    assert make_bucketed_dataset(range(1, 101), 4).src.buckets.tolist() == [25, 50, 75, 100]


def test_numpy_has_the_function_that_fairseq_calls():
    assert np.compat.long(3) == 3


@pytest.mark.skipif(not hasattr(torch.serialization, "safe_globals"), reason="torch without an allow-list")
class TestSafeLoading:
    def save_and_load(self, tmp_path, value):
        """Returns a value after it was saved to x.pt and loaded by torch."""
        torch.save(value, tmp_path / "x.pt")
        return torch.load(tmp_path / "x.pt")

    def test_types_of_checkpoints_are_loaded(self, tmp_path):
        """Stock models have a Namespace in their checkpoints, and --eval-bleu logs arrays and numbers of numpy."""
        assert self.save_and_load(tmp_path, argparse.Namespace(a=1)).a == 1
        for value in (np.array([1, 2]), np.array(0.5), np.float64(0.5), np.int64(3)):
            loaded = self.save_and_load(tmp_path, {"value": value})
            assert (loaded["value"] == value).all()

    @pytest.mark.parametrize("function", [os.system, print, eval, subprocess.Popen])
    def test_code_is_not_run(self, tmp_path, function):
        """Code in a checkpoint is not run, even if fairseq asks torch for unsafe loading.

        With os.system and Popen, the code would make the file `ran`. With print and eval, it would be harmless, but it
        must be refused as well.
        """

        class Hostile:
            """An object for which `pickle` calls the function when it is loaded."""

            def __reduce__(self):
                arguments = (f"touch {tmp_path}/ran",)
                return function, arguments

        with pytest.raises(pickle.UnpicklingError):
            self.save_and_load(tmp_path, {"model": Hostile()})
        # The context manager `weights_only`, in which the plugin lets fairseq load checkpoints, overrules the argument
        # weights_only=False of torch.load. The file x.pt is the one that save_and_load has just written.
        with pytest.raises(pickle.UnpicklingError), weights_only():
            torch.load(tmp_path / "x.pt", weights_only=False)
        torch.save({"model": Hostile()}, tmp_path / "hostile.pt")
        with pytest.raises(SynthesizerError, match="hostile.pt: refused"):
            fairseq.checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "hostile.pt"))
        assert not (tmp_path / "ran").exists()

    def test_types_of_a_config_are_refused_in_files(self, tmp_path):
        """They are only allowed while several processes exchange a config, which another test covers."""
        from omegaconf import OmegaConf

        with pytest.raises(pickle.UnpicklingError):
            self.save_and_load(tmp_path, OmegaConf.create({"a": 1}))


def get_loading_error(path):
    """Loads a checkpoint that cannot be loaded, and returns the one line of the error, which begins with its name."""
    with pytest.raises(SynthesizerError) as caught:
        fairseq.checkpoint_utils.load_checkpoint_to_cpu(str(path))
    line = str(caught.value)
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    return line


@pytest.mark.skipif(not hasattr(torch.serialization, "safe_globals"), reason="torch without an allow-list")
@pytest.mark.parametrize("reference", [os.system, eval, SynthesizerError])
def test_a_refused_type_is_named(tmp_path, reference):
    """The line names the type that is not allowed, and does not repeat torch's advice to load without a check."""
    torch.save({"model": reference}, tmp_path / "hostile.pt")
    line = get_loading_error(tmp_path / "hostile.pt")
    assert re.search(f"it contains ([a-z_.]*[.])?{reference.__name__}, ", line)
    assert "refused" in line
    assert "weights_only" not in line
    assert "safe_globals" not in line


@pytest.mark.parametrize(
    "error, expected",
    [
        (MemoryError(), "not enough memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "not enough memory"),
        (ModuleNotFoundError("No module named 'apex'"), "No module named 'apex'"),
    ],
)
def test_the_reason_why_a_checkpoint_cannot_be_loaded_is_named(tmp_path, monkeypatch, error, expected):
    def fail(*args, **kwargs):
        """Takes the place of `torch.load`."""
        raise error

    torch.save({"model": {}}, tmp_path / "checkpoint1.pt")
    monkeypatch.setattr(torch, "load", fail)
    line = get_loading_error(tmp_path / "checkpoint1.pt")
    assert expected in line
    assert "cut short" not in line


def test_a_text_file_is_no_checkpoint(tmp_path):
    (tmp_path / "a.pt").write_text("hello, this is no checkpoint")
    line = get_loading_error(tmp_path / "a.pt")
    assert "not a readable checkpoint" in line or "no checkpoint of torch" in line  # torch 2.3 fails elsewhere


def test_a_truncated_checkpoint_is_named(tmp_path):
    """The error is one line with the name of the file, however much of the file is left."""
    path = tmp_path / "checkpoint1.pt"
    torch.save({"model": {"w": torch.zeros(1000)}, "args": None}, path)
    contents = path.read_bytes()
    for size in (0, 10, len(contents) // 2, len(contents) - 1):
        path.write_bytes(contents[:size])
        with pytest.raises(SynthesizerError, match="checkpoint1.pt: ") as caught:
            fairseq.checkpoint_utils.load_checkpoint_to_cpu(str(path))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["weights", "model"])
def test_a_file_of_another_program_is_no_checkpoint_of_fairseq(tmp_path, key):
    """torch can load the file, but it has other contents."""
    torch.save({key: torch.zeros(3)}, tmp_path / "other.pt")
    line = get_loading_error(tmp_path / "other.pt")
    assert "not a checkpoint of fairseq-train" in line
    assert "cut short" not in line


def test_a_copy_is_whole_or_absent(tmp_path, monkeypatch):
    """If the disk is full in the middle of a copy, the existing file keeps its contents."""
    new = tmp_path / "checkpoint2.pt"
    last = tmp_path / "checkpoint_last.pt"
    new.write_bytes(b"new" * 1000)
    last.write_bytes(b"old")

    def copy_until_the_disk_is_full(src, dst, *args, **kwargs):
        """Takes the place of `shutil.copyfile`: writes two bytes, and fails."""
        with open(dst, "wb") as file:
            file.write(b"ne")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", copy_until_the_disk_is_full)
        with pytest.raises(OSError):
            PathManager.copy(str(new), str(last), overwrite=True)
    assert last.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["checkpoint2.pt", "checkpoint_last.pt"]
    PathManager.copy(str(new), str(last), overwrite=True)
    assert last.read_bytes() == new.read_bytes()


def test_a_copy_without_overwrite_is_made_by_fairseq(tmp_path, monkeypatch):
    """Only a copy that overwrites a file, such as a copy of a checkpoint, is made in another way."""
    calls = []
    monkeypatch.setattr(checkpoints.shutil, "copyfile", lambda *args: calls.append(args))
    monkeypatch.setattr(checkpoints.os, "replace", lambda *args: pytest.fail("replaced"))
    PathManager.copy("a", str(tmp_path / "b"))
    calls_of_fairseq = [("a", str(tmp_path / "b"))]
    calls_with_iopath = []  # iopath, where it is installed, has a copying function of its own
    assert calls in (calls_of_fairseq, calls_with_iopath)


@pytest.mark.parametrize("task_class", [FairseqTask, LanguageModelingTask])
def test_empty_lines_are_continued(task_class):
    """The prefix of an empty line, which is the end of sentence, becomes padding. Other prefixes stay."""
    padding = 1
    end_of_sentence = 2
    dictionary = make_dictionary()
    task = SimpleNamespace(target_dictionary=dictionary, source_dictionary=dictionary, args=None)

    def return_prefixes(models, sample, prefix_tokens=None, **_):
        """Takes the place of `generate` of a sequence generator."""
        return prefix_tokens

    generator = SimpleNamespace(generate=return_prefixes)
    prefixes = torch.tensor([[5, end_of_sentence], [end_of_sentence, padding], [6, 7]])
    passed_on = task_class.inference_step(task, generator, [], {}, prefix_tokens=prefixes)
    assert passed_on.tolist() == [[5, end_of_sentence], [padding, padding], [6, 7]]


def test_the_error_of_a_read_only_disk_is_not_hidden_by_the_clean_up(tmp_path, monkeypatch):
    """Removing the unfinished file fails on such a disk too, but the user sees the first error."""

    def fail_to_remove(path):
        """Takes the place of `os.remove`."""
        raise OSError(errno.EROFS, "Read-only", path)

    monkeypatch.setattr("os.remove", fail_to_remove)
    with pytest.raises(OSError, match="the reason"), checkpoints.removed_on_error(str(tmp_path / "a.tmp")):
        raise OSError("the reason")


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    """The existing file keeps its contents. The save fails because a lambda cannot be pickled."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    path = tmp_path / "checkpoint1.pt"
    path.write_bytes(b"old")
    with pytest.raises(Exception, match="pickle"):
        fairseq.checkpoint_utils.torch_persistent_save({"x": lambda: 0}, str(path))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["checkpoint1.pt"]


def test_sharded_data_has_batches_of_its_own_in_each_epoch(data):
    """Without the cache of iterators, no batches are reused, and fairseq forms the batches of the current epoch.

    So the plugin's replacement of get_batch_iterator returns the same batches as fairseq's own method. Whether they
    differ from those of another epoch depends on the version of fairseq.
    """

    def form_batches(get_batch_iterator, epoch):
        """Returns the batches of an epoch, as lists of sentence numbers.

        `get_batch_iterator` is the method of the task that makes the iterator.
        """
        cfg = TranslationConfig(data=str(data / "bin"), source_lang="en", target_lang="de", dataset_impl="mmap")
        task = TranslationTask.setup_task(cfg)
        task.load_dataset("train")
        iterator = get_batch_iterator(
            task, task.dataset("train"), max_tokens=200, epoch=epoch, disable_iterator_cache=True
        )
        return [batch.tolist() for batch in iterator.frozen_batches]

    replacement = FairseqTask.get_batch_iterator
    original = replacement.__wrapped__  # the method of fairseq, which the plugin has replaced
    assert form_batches(replacement, epoch=2) == form_batches(original, epoch=2)

    # Newer versions of fairseq shuffle the sentences before they form batches, with another seed in each epoch.
    # fairseq 0.12.2 has the same batches in every epoch.
    depends_on_epoch = "seed + epoch" in inspect.getsource(original)
    if depends_on_epoch:
        assert form_batches(original, epoch=2) != form_batches(original, epoch=1)
    else:
        assert form_batches(original, epoch=2) == form_batches(original, epoch=1)


@pytest.mark.parametrize("fp32", [False, True], ids=["as-the-model", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ema_averages_tied_weights_once(dtype, fp32):
    """After an update with a decay of 0.5, each average is halfway between the old and the new weight, tied or not."""
    config = SimpleNamespace(ema_decay=0.5, ema_start_update=0, ema_fp32=fp32, ema_update_freq=1, ema_seed_model=None)
    model = make_model(share_all_embeddings=True, encoder_normalize_before=True, decoder_normalize_before=True)
    model = model.to(dtype)
    ema = EMA(model, config)
    old_weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    ema.step(model, updates=1)
    averages = ema.get_model().state_dict()
    for name, new_weight in used_weights(model.state_dict()).items():
        expected = (old_weights[name] + new_weight) / 2
        torch.testing.assert_close(averages[name], expected, rtol=0.01, atol=0.01)


def test_a_process_that_waits_is_terminated():
    """The signal is SIGTERM unless another signal is given."""
    module = torch.nn.Linear(1, 1)
    assert DistributedTimeoutWrapper(module, timeout=0).signal == signal.SIGTERM
    assert DistributedTimeoutWrapper(module, timeout=0, signal=signal.SIGKILL).signal == signal.SIGKILL
    assert DistributedTimeoutWrapper(module, 0, signal.SIGINT).signal == signal.SIGINT


def test_the_timeout_keeps_its_other_defaults(monkeypatch):
    """In a fairseq whose timeout has other default values, only the signal is changed."""
    calls = []

    def init(self, module, timeout=60, interval=5, signal=signal.SIGINT, name="heartbeat"):
        """Takes the place of the initialisation of the timeout: adds its arguments to `calls`."""
        calls.append((timeout, interval, signal, name))

    monkeypatch.setattr(DistributedTimeoutWrapper, "__init__", init)
    monkeypatch.setattr(DistributedTimeoutWrapper, "__del__", lambda self: None)
    repairs.REPAIRS["terminate_on_heartbeat_timeout"].apply()
    DistributedTimeoutWrapper(None)
    DistributedTimeoutWrapper(None, 0, name="other")
    assert calls == [(60, 5, signal.SIGTERM, "heartbeat"), (0, 5, signal.SIGTERM, "other")]


def test_looking_for_a_metric_does_not_change_the_training(data, tmp_path):
    """With --best-checkpoint-metric ppl, a batch is validated before the training to see what is measured."""
    flags = ["--max-update", "2", "--max-tokens", "400"]
    log = train_model(data, tmp_path / "loss", *flags)
    log_with_ppl = train_model(data, tmp_path / "ppl", *flags, "--best-checkpoint-metric", "ppl")
    assert read_losses(log_with_ppl) == read_losses(log)


def test_repairs_are_applied_once():
    """A second import of a file of host/, under another name, does not replace anything again."""
    # The places are functions of fairseq that repairs replace. A custom repair, which replaces this first one, has no
    # list of its places.
    places = [repairs.Place(NGramRepeatBlock, "_no_repeat_ngram")]
    for repair in repairs.REPAIRS.values():
        places += repair.places
    assert len(places) > 30  # the repairs are registered; otherwise this test would compare next to nothing
    functions_before = [place.function() for place in places]
    repairs.apply_repairs()
    folder = Path(host.__file__).parent
    # Repairs are in the subfolders, and one file of host/ itself registers a repair, too.
    for path in (*folder.glob("*/*.py"), folder / "message_table.py"):
        if path.stem == "__init__":
            continue
        # The package is that of the file, such as fairseq_synth.host.bugs, so that relative imports work.
        package = ".".join(path.parent.relative_to(ROOT).parts)
        spec = importlib.util.spec_from_file_location(f"{package}.{path.stem}_again", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    repairs.apply_repairs()
    host.repair_fairseq()
    assert [place.function() for place in places] == functions_before


# the repairs that some versions of numpy, torch or fairseq do not need
UNNEEDED = {
    "restore_numpy_compat",
    "find_buckets_with_new_numpy",
    "keep_last_batch",
    "allow_checkpoint_types",
    "allow_config_in_broadcast",
    "leave_the_fast_path",
    "share_flags_with_the_model",
}


def place_in_command(code, command="generate"):
    """Returns Python code that loads the plugin and then runs a statement, both in a file of one of fairseq's commands.

    The plugin recognizes these commands by the file names in the traceback. So the code is compiled under the name of
    this file. For the statement ``pass`` and the command "generate", the code is::

        from types import SimpleNamespace
        import fairseq.utils
        import fairseq_cli.generate

        plugin = SimpleNamespace(user_dir="fairseq_synth")
        source = 'def run():\\n    fairseq.utils.import_user_module(plugin)\\n    pass\\n'
        exec(compile(source, fairseq_cli.generate.__file__, "exec"))  # defines the function `run`
        run()

    Args:
        code: the statement, in one line.
        command: the name of the command, such as "generate" for fairseq-generate.
    """
    source = f"def run():\n    fairseq.utils.import_user_module(plugin)\n    {code}\n"
    lines = [
        "from types import SimpleNamespace",
        "import fairseq.utils",
        f"import fairseq_cli.{command}",
        "",
        'plugin = SimpleNamespace(user_dir="fairseq_synth")',
        f"source = {source!r}",
        f'exec(compile(source, fairseq_cli.{command}.__file__, "exec"))',
        "run()",
    ]
    return "\n".join(lines)


def run_python(code, **environment):
    """Runs Python code in a process with additional environment variables; returns a subprocess.CompletedProcess."""
    return warm.run(["-c", code], cwd=ROOT, env={**os.environ, **environment})


def test_repairs_are_logged_and_can_be_switched_off():
    """Two repairs are switched off by their names. Each of the others is logged once.

    The code prints two lines: the names of all repairs, and whether the function PathManager.copy has been replaced.
    The repair write_checkpoints_atomically, which is switched off, would replace it.
    """
    switched_off = "keep_last_batch, write_checkpoints_atomically"
    code = textwrap.dedent("""
        import fairseq_synth
        import fairseq.file_io
        from fairseq_synth.host import repairs

        fairseq_synth.register()
        print(*repairs.REPAIRS)
        repairs.apply_repairs()
        print(hasattr(fairseq.file_io.PathManager.copy, repairs.MARK))
    """)
    process = run_python(code, FAIRSEQ_SYNTH_NO_REPAIRS=switched_off, LOGLEVEL="debug")
    names, copy_is_marked = process.stdout.splitlines()
    logged_names = re.findall(r"DEBUG.*repaired fairseq: (\w+)", process.stderr)
    names_switched_off = set(switched_off.split(", "))
    assert copy_is_marked == "False"
    assert len(set(logged_names)) == len(logged_names)
    # print_one_line_errors changes something only in fairseq's own commands, and this code is none of them. Those in
    # UNNEEDED are logged only with the versions of numpy, torch and fairseq that need them.
    expected = set(names.split()) - {"print_one_line_errors"} - UNNEEDED - names_switched_off
    assert expected <= set(logged_names)
    assert not set(logged_names) & names_switched_off


def test_all_repairs_can_be_switched_off():
    """Only safe loading stays: no checkpoint is unpickled without a check."""
    code = textwrap.dedent("""
        import sys
        import fairseq_synth
        import fairseq.checkpoint_utils
        from fairseq_synth.host import repairs

        fairseq_synth.register()
        has_usual_excepthook = sys.excepthook is sys.__excepthook__
        repairs_of_loading = getattr(fairseq.checkpoint_utils.load_checkpoint_to_cpu, repairs.MARK)
        print(has_usual_excepthook, repairs_of_loading)
    """)
    process = run_python(code, FAIRSEQ_SYNTH_NO_REPAIRS="all")
    assert process.stdout.strip() == "True ('load_weights_only',)", process.stderr


def test_an_unknown_name_of_a_repair_is_refused(monkeypatch):
    process = run_python(place_in_command("pass"), FAIRSEQ_SYNTH_NO_REPAIRS="1")
    assert process.returncode != 0
    line = process.stderr.strip().splitlines()[-1]
    assert line.startswith("fairseq_synth: error: FAIRSEQ_SYNTH_NO_REPAIRS=1: use all, or names")
    assert "keep_last_batch" in line
    assert "Traceback" not in process.stderr
    monkeypatch.setenv("FAIRSEQ_SYNTH_NO_REPAIRS", "all,keep_last_batch")
    with pytest.raises(SynthesizerError, match="all,keep_last_batch: use all, or names"):
        repairs.check_switch()


def test_every_repair_says_what_it_is_for():
    """docs/fairseq-bugs.md has a table of symptoms, without full stops, and of the versions of fairseq with the bug."""
    for name, repair in repairs.REPAIRS.items():
        assert repair.symptom, name
        assert not repair.symptom.endswith("."), name
        assert re.search("all versions|0.12.2", repair.versions), name


@pytest.mark.parametrize("version", ["1.13.1", "2.2.2+cu118"])
def test_an_old_torch_is_refused(version):
    with pytest.raises(SynthesizerError, match="torch .* is too old; supported: Python 3.10 .* torch 2.3"):
        versions.check_torch(version)


def test_new_torch_is_warned_of(caplog):
    """The first version with a warning is the first one that pyproject.toml does not let pip install."""
    requirements = (ROOT / "pyproject.toml").read_text()
    bound = re.search(r"torch>=2.6,<2.(\d+); python_version >= ", requirements)
    first_minor_version = int(bound[1])  # such as 9 for torch 2.9
    newest_supported = f"2.{first_minor_version - 1}"
    assert versions.SUPPORTED.endswith(f"torch 2.6 to {newest_supported}")
    versions.check_torch(f"{newest_supported}.1+cpu")
    assert not caplog.records
    first_with_warning = f"2.{first_minor_version}.0"
    versions.check_torch(first_with_warning)
    assert f"torch {first_with_warning} is newer than the tested versions; supported:" in caplog.text


def test_a_fairseq_that_cannot_be_imported_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "fairseq.models.transformer", None)
    message = "this version of fairseq does not work .*supported: .*ve-fairseq 0.12.3"
    with pytest.raises(SynthesizerError, match=message):
        versions.import_host()


@pytest.mark.parametrize(
    "module, body", [("fairseq", "raise ValueError('mutable default')"), ("torch", "__version__ = '1.9'")]
)
def test_an_unsupported_fairseq_or_torch_is_named_in_one_line(tmp_path, module, body):
    """A user sees this line after installing the plugin together with another fairseq or torch.

    `body` is the code of a module that takes the place of `module`.
    """
    if module == "torch":
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text(body)
        (tmp_path / "torch" / "nn.py").write_text("Module = object")
    else:
        (tmp_path / f"{module}.py").write_text(body)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = warm.run(["-m", "fairseq_synth", "flags"], cwd=ROOT, env=environment, fresh=True)
    assert process.returncode != 0
    assert not process.stdout
    (line,) = process.stderr.strip().splitlines()
    assert line.startswith("fairseq_synth: error: ")
    assert "supported: Python 3.10" in line
    assert versions.SUPPORTED in line


@pytest.mark.parametrize("version", ["2.2.2", None])
def test_the_folder_of_the_plugin_is_not_printed_if_torch_is_too_old(tmp_path, version):
    """The version is that of the installed package. torch is not imported, so its error is not seen.

    `version` is the version of the package torch, or None if the folder that comes first has no such package.
    """
    (tmp_path / "torch.py").write_text("raise ValueError('imported')")
    if version:
        (tmp_path / f"torch-{version}.dist-info").mkdir()
        (tmp_path / f"torch-{version}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    # Python looks into the folders of PYTHONPATH first, both for the module torch and for the version of the package.
    # If the first folder has no dist-info, the version is that of the torch that is installed, which is supported.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def check_command(arguments, folder):
        """Checks that python -m fairseq_synth refuses torch if there is a `version`, and else prints this folder."""
        process = warm.run(["-m", "fairseq_synth", *arguments], cwd=ROOT, env=environment, fresh=True)
        if version:
            assert process.returncode == 1
            assert not process.stdout
            assert process.stderr.count("\n") == 1
            expected = f"fairseq_synth: error: torch {version} is too old; supported: Python 3.10"
            assert process.stderr.startswith(expected)
        else:
            assert process.stdout == f"{folder}\n"
            assert not process.stderr

    check_command([], ROOT / "fairseq_synth")
    check_command(["configs"], ROOT / "configs")


def explain_chain(first_error, last_error, module="fairseq.trainer", suffix=""):
    """Returns the line about an error that code raises while it handles another error, or None if there is no line.

    The line depends on the module that has raised the error: errors of fairseq and torch are explained, those of a
    user's own code are not. `explain` finds the module by the ``__name__`` of the code that raises. So this code is run
    by exec, under the name of a module.

    Args:
        first_error: the error that is handled.
        last_error: the error that is raised then.
        module: the name of the module of this code.
        suffix: the text that follows ``raise last_error``, such as " from None".
    """
    code = textwrap.dedent(f"""
        try:
            raise first_error
        except Exception:
            raise last_error{suffix}
    """)
    global_names = {"__name__": module, "first_error": first_error, "last_error": last_error}
    with pytest.raises(Exception) as caught:
        exec(code, global_names)
    return explain(caught.value)


def test_the_cause_of_an_error_is_explained():
    """fairseq and torch wrap some errors in another error. The line is about the first error.

    `explain_chain` raises an error while it handles a first one, if nothing else is given in a module of fairseq and
    without "from". The second error wraps the first one if it is raised with "from", or if fairseq or torch raise an
    Exception or a RuntimeError, which are the types of their wrappers.
    """
    mistake = SynthesizerError("mend it")
    full_disk = OSError(errno.ENOSPC, "No space left on device", "/a/b")

    # fairseq and torch leave "from" out
    assert explain_chain(mistake, Exception("Cannot load model parameters")) == "mend it"
    line = explain_chain(full_disk, RuntimeError("unexpected pos"), module="torch.serialization")
    assert line == "/a/b: could not be written (No space left on device); make room, then start the command again"
    # With "from", an error of any type wraps the first one, even in a user's own code.
    line = explain_chain(mistake, KeyError("b"), module="somebody.s.script", suffix=" from first_error")
    assert line == "mend it"
    # Neither of these errors can be explained.
    assert explain_chain(KeyError("a"), ValueError("b")) is None

    # The last error is another one that occurs while the first one is handled, in fairseq's code too. A NameError is
    # not a type in which fairseq wraps errors.
    assert explain_chain(mistake, NameError("x")) is None
    assert explain_chain(full_disk, NameError("x")) is None
    # The last error states that it has no cause.
    for last_error in (KeyError("x"), Exception("x")):
        assert explain_chain(mistake, last_error, suffix=" from None") is None
        assert explain_chain(full_disk, last_error, suffix=" from None") is None
    # The last error is raised by a user's own code, which does not wrap errors as fairseq does.
    assert explain_chain(mistake, Exception("x"), module="somebody.s.script") is None

    # fairseq names the file, and the system states the reason.
    unwritable_file = OSError(errno.EROFS, "Read-only file system", "/a/checkpoint1.pt")
    assert explain_chain(KeyError("a"), unwritable_file) == "/a/checkpoint1.pt: Read-only file system"
    # A name of two lines is written in one line.
    assert explain(SynthesizerError("--arch a\n  b: unknown")) == "--arch a b: unknown"
    # A user's own mistakes keep their traceback.
    missing_file = FileNotFoundError(2, "No such file", "/optional")
    assert explain_chain(missing_file, KeyError("a bug")) is None
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
    """The line explains errors in fairseq's code. The same errors in a user's code keep their traceback."""

    def explain_error_raised_in(module):
        """Returns the line about a RuntimeError with this message in the code of a module."""
        frame = {"__name__": module, "message": message}
        try:
            exec("raise RuntimeError(message)", frame)
        except RuntimeError as error:
            return explain(error)

    line = explain_error_raised_in("fairseq.trainer")
    assert "another process of this run" in line
    assert "last checkpoint" in line
    assert explain_error_raised_in("somebody.s.script") is None


@pytest.mark.parametrize("command, is_training", [("generate", False), ("train", True)])
def test_an_interrupted_run_says_so_in_a_line(command, is_training):
    interrupt = "exec('raise KeyboardInterrupt', vars(fairseq.utils))"
    process = run_python(place_in_command(interrupt, command))
    assert process.returncode != 0
    assert "Traceback" not in process.stderr
    line = process.stderr.splitlines()[-1]
    assert "interrupted" in line
    assert ("goes on from its last checkpoint" in line) == is_training


def test_no_fast_path_around_the_attention(monkeypatch):
    """At inference with a loaded checkpoint, every layer calls its attention.

    The fast path of fairseq 0.12.2 would not call it.
    """
    model = make_model()
    model.load_state_dict(model.state_dict())
    called_attentions = []
    original_forward = SyntheticAttention.forward

    def forward(self, *args, **kwargs):
        """Takes the place of the attention's method: adds the attention to `called_attentions`, and runs it."""
        called_attentions.append(self)
        return original_forward(self, *args, **kwargs)

    monkeypatch.setattr(SyntheticAttention, "forward", forward)
    with torch.no_grad():
        model.eval().encoder(torch.tensor([[5, 6, 2]]))
    assert len(called_attentions) == len(model.encoder.layers)


def test_a_stock_model_reads_left_padding():
    """Padding on the left does not change the output of the encoder. fairseq 0.12.2 ends in an error."""
    model = make_model("transformer_multi30k")
    model.load_state_dict(model.state_dict())
    with torch.no_grad():
        with_padding = model.encoder(torch.tensor([[1, 5, 6, 2]]))["encoder_out"][0]  # (4, 1, C)
        without_padding = model.encoder(torch.tensor([[5, 6, 2]]))["encoder_out"][0]  # (3, 1, C)
    assert torch.allclose(with_padding[1:], without_padding, atol=1e-6)


def test_a_circular_chain_of_errors_is_no_endless_loop():
    first = ValueError("first")
    second = ValueError("second")
    first.__context__ = second
    second.__cause__ = first
    assert explain(first) is None


def test_lengths_of_several_pairs_of_languages_are_not_checked():
    """If the limits depend on the pair of languages, the data set skips too long sentences itself.

    So `check_lengths`, which otherwise reports too long sentences as an error, raises nothing.
    """

    class Task(FairseqTask):
        """A task that has its own limits for each pair of languages."""

        def max_positions(self):
            """Returns the limits of the source and the target for each pair."""
            return OrderedDict({"a-b": (5, 5), "b-a": (5, 5)})

    task = Task(None)
    task.datasets["valid"] = RoundRobinZipDatasets(OrderedDict({"a-b": ListDataset([1]), "b-a": ListDataset([2])}))
    model = SimpleNamespace(max_positions=lambda: OrderedDict({"a-b": (4, 4), "b-a": (4, 4)}))
    dataset_config = SimpleNamespace(valid_subset="valid", max_tokens_valid=100)
    cfg = SimpleNamespace(dataset=dataset_config)
    trainer = SimpleNamespace(task=task, get_model=lambda: model, cfg=cfg)
    check_lengths(trainer)  # raises nothing


# flags of fairseq-train for a training of two updates that writes checkpoint_last.pt
SHORT = ["--max-update", "2", "--no-epoch-checkpoints", "--data-buffer-size", "0"]


@pytest.fixture(scope="module")
def translator(make_once, data):
    """Returns a checkpoint of a translation model after two updates."""

    def make(folder):
        """Trains the model."""
        train_model(data, folder, *SHORT)

    return make_once("translator", make) / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def scorer(make_once, monolingual):
    """Returns a checkpoint of a language model with the words of `translator`, after two updates."""
    flags = (
        "--task language_modeling --arch transformer_lm_synth_random_vanilla_ptb --tokens-per-sample 200 "
        "--synth-max-length 300 --decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16 "
        "--decoder-attention-heads 2 --optimizer adam --lr 0.1 --batch-size 8 --num-workers 0"
    ).split()

    def make(folder):
        """Trains the language model."""
        run_cli(train.cli_main, monolingual, *USER_DIR, *flags, *SHORT, "--save-dir", folder)

    return make_once("scorer", make) / "checkpoint_last.pt"


def read_hypotheses(output):
    """Returns the translations in the output of fairseq-generate: {number of a sentence: its "SCORE\\tTEXT" lines}."""
    lines_by_sentence = {}
    for number, line in re.findall(r"^H-(\d+)\t(.*)$", output, re.M):
        lines_by_sentence.setdefault(int(number), []).append(line)
    return lines_by_sentence


def test_patience_is_remembered(data, tmp_path):
    """A training that --patience has ended does not go on when it is started again. With more patience, it goes on."""
    flags = ["--lr", "1e-20", "--max-tokens", "4000", "--max-epoch", "9", "--no-epoch-checkpoints"]
    losses = read_losses(train_model(data, tmp_path, *flags, "--patience", "2"))
    # There are three epochs: the first one sets the best loss, and the next two are no better.
    updates_of_epoch = len(losses) // 3

    log_of_second_start = train_model(data, tmp_path, *flags, "--patience", "2")
    assert "nothing to do: the last 2 validations were no better, --patience is 2" in log_of_second_start
    assert not read_losses(log_of_second_start)

    losses_with_more_patience = read_losses(train_model(data, tmp_path, *flags, "--patience", "3"))
    assert len(losses_with_more_patience) == updates_of_epoch

    log_without_memory = train_model(data, tmp_path, *flags, "--patience", "2", "--reset-meters")
    assert len(read_losses(log_without_memory)) == 3 * updates_of_epoch


def test_every_sentence_is_translated_in_one_shard(data, translator):
    """Sharding works in fairseq-generate. A shard that does not exist is an error, and so are shards of typed text."""
    argv = [data / "bin", *USER_DIR, "--path", translator, "--beam", "1", "--batch-size", "4"]
    sentence_numbers = []
    for shard in range(3):
        output, _ = run_cli(generate.cli_main, *argv, "--num-shards", "3", "--shard-id", shard)
        hypotheses = read_hypotheses(output)
        assert hypotheses
        sentence_numbers += hypotheses.keys()
    assert sorted(sentence_numbers) == list(range(TEST_SENTENCES))
    for shard in ("3", "-1"):
        line = get_error_line(generate.cli_main, *argv, "--num-shards", "3", "--shard-id", shard)
        assert line.startswith(f"--shard-id {shard}: must be from 0 to 2")
    line = get_error_line(interactive.cli_main, data / "bin", *USER_DIR, "--path", translator, "--num-shards", "3")
    assert line.startswith("--num-shards 3: fairseq-interactive translates its whole input")


def test_fusion_with_a_language_model(data, translator, scorer):
    """--lm-path works although the data have no dict.txt, with the same results in generate and interactive."""
    argv = [data / "bin", *USER_DIR, "--path", translator, "--beam", "2", "--max-len-a", "0", "--max-len-b", "20"]
    fusion = ["--lm-path", scorer, "--lm-weight", "0.7"]
    output, _ = run_cli(generate.cli_main, *argv)
    hypotheses_without_fusion = read_hypotheses(output)
    output, _ = run_cli(generate.cli_main, *argv, *fusion)
    hypotheses = read_hypotheses(output)
    assert len(hypotheses) == TEST_SENTENCES
    assert hypotheses != hypotheses_without_fusion

    source = (data / "test.en").read_text()
    output, _ = run_cli(interactive.cli_main, *argv, *fusion, stdin=source)
    interactive_hypotheses = read_hypotheses(output)
    for number, (hypothesis,) in hypotheses.items():
        score, text = hypothesis.split("\t")
        interactive_score, interactive_text = interactive_hypotheses[number][0].split("\t")
        assert interactive_text == text
        assert float(interactive_score) == pytest.approx(float(score), abs=1e-4)


@pytest.mark.parametrize("main", [generate.cli_main, interactive.cli_main])
def test_a_language_model_that_does_not_fit_is_refused(data, translator, scorer, tmp_path, main):
    """A language model does not fit if the file does not exist, or if its words are in another order."""
    argv = [data / "bin", *USER_DIR, "--path", translator, "--max-len-a", "0", "--max-len-b", "20"]
    state = torch.load(scorer)
    words = (data / "bin" / "dict.de.txt").read_text().splitlines()
    (tmp_path / "dict.txt").write_text("\n".join(reversed(words)) + "\n")
    state["cfg"]["task"]["data"] = str(tmp_path)
    torch.save(state, tmp_path / "other.pt")

    def check_refusal(path, part):
        """Checks that the language model in the file `path` is refused in a line that contains `part`."""
        line = get_error_line(main, *argv, "--lm-path", path, "--lm-weight", "0.5", stdin="w1 w2\n")
        assert line.startswith(f"--lm-path {path}: ")
        assert part in line

    check_refusal(tmp_path / "nothing.pt", "no such file")
    check_refusal(tmp_path / "other.pt", "has other words, or another order")


def test_diverse_beam_search_does_not_depend_on_the_batch(data, translator):
    """A sentence has the same translations alone and in a batch of eight sentences."""

    def translate(batch_size):
        """Returns the texts of the translations of each sentence: {number of a sentence: its texts}."""
        argv = ["--path", translator, "--beam", "4", "--nbest", "4", "--diverse-beam-groups", "2"]
        output, _ = run_cli(generate.cli_main, data / "bin", *USER_DIR, *argv, "--batch-size", batch_size)
        texts_by_sentence = {}
        for number, lines in read_hypotheses(output).items():
            texts_by_sentence[number] = [line.split("\t")[1] for line in lines]
        return texts_by_sentence

    texts_of_single_sentences = translate(batch_size=1)
    assert len(texts_of_single_sentences) == TEST_SENTENCES
    assert translate(batch_size=8) == texts_of_single_sentences


def test_scalar_quantization_noise_on_a_cpu(data, tmp_path):
    """A model with --quant-noise-scalar can be trained and can translate without a GPU."""
    log = train_model(data, tmp_path, *SHORT, "--quant-noise-scalar", "0.5", "--encoder-synthesizer", "dense+vanilla")
    assert len(read_losses(log)) == 2
    argv = [data / "bin", *USER_DIR, "--path", tmp_path / "checkpoint_last.pt", "--beam", "1"]
    output, _ = run_cli(generate.cli_main, *argv)
    assert len(read_hypotheses(output)) == TEST_SENTENCES


@pytest.mark.parametrize(
    "flags, expected",
    [
        (
            ["--skip-remainder-batch", "--update-freq", "500"],
            "--skip-remainder-batch: an epoch has .*--update-freq 500",
        ),
        (
            ["--skip-remainder-batch", "--max-tokens", "40000", "--required-batch-size-multiple", "1"],
            "--skip-remainder-batch: an epoch has 0 batches",
        ),
        (["--profile"], "--profile .*needs a GPU"),
    ],
)
def test_flags_with_which_no_training_is_possible_are_refused(data, tmp_path, flags, expected):
    argv = [data / "bin", *USER_DIR, "--arch", "transformer_synth_random_multi30k", *SMALL, *RECIPE, "--cpu"]
    line = get_error_line(train.cli_main, *argv, "--save-dir", tmp_path, "--max-update", "2", *flags)
    assert re.search(expected, line)


def test_a_flag_that_is_not_a_number_is_refused(data, translator):
    argv = [data / "bin", *USER_DIR, "--path", translator]
    assert get_error_line(generate.cli_main, *argv, "--lenpen", "nan") == "--lenpen nan: must be a number"


@pytest.mark.parametrize("impl", ["mmap", "cached", "lazy"])
@pytest.mark.parametrize("suffix, size", [("bin", 0), ("bin", -1), ("idx", 0), ("idx", 20), ("idx", -1)])
def test_data_files_that_are_cut_short_are_named(tmp_path, impl, suffix, size):
    """The file with this suffix is cut to `size` bytes or, if `size` is negative, by that many bytes."""
    prefix = str(tmp_path / "train.en-de.en")
    builder = indexed_dataset.make_builder(f"{prefix}.bin", impl, vocab_size=100)
    for length in (3, 5):
        builder.add_item(torch.arange(length))
    builder.finalize(f"{prefix}.idx")
    assert len(indexed_dataset.make_dataset(prefix, impl)) == 2
    path = Path(f"{prefix}.{suffix}")
    remaining_size = size
    if size < 0:
        remaining_size = path.stat().st_size + size
    os.truncate(path, remaining_size)
    with pytest.raises(SynthesizerError, match=f"^{path}: is cut short, .*run fairseq-preprocess"):
        indexed_dataset.make_dataset(prefix, impl)


def test_commands_of_this_project_recommend_no_package(caplog):
    run_command(lambda: logging.getLogger("fairseq.tasks.text_to_speech").info("Please install tensorboardX"))
    assert not caplog.records


def test_the_clone_in_place_of_the_plugin_is_refused():
    """``--user-dir CLONE`` ends in one line that names the folder of the plugin in the clone."""
    process = run_program("generate", "data-bin", "--user-dir", ROOT, check=False)
    assert process.returncode == 1
    assert not process.stdout
    line = process.stderr.strip().splitlines()[-1]
    plugin = ROOT / "fairseq_synth"
    assert line == f"fairseq_synth: error: --user-dir {ROOT}: is the clone; give the plugin in it, {plugin}"
    assert "Traceback" not in process.stderr


def test_torch_load_is_the_original_again_after_a_checkpoint_was_loaded(tmp_path):
    original_load = torch.load
    torch.save({"x": torch.zeros(1)}, tmp_path / "checkpoint.pt")
    with weights_only():
        torch.load(tmp_path / "checkpoint.pt")
    assert torch.load is original_load
    with pytest.raises(FileNotFoundError):
        with weights_only():
            torch.load(tmp_path / "missing.pt")
    assert torch.load is original_load
