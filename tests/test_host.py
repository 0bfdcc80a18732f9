"""The repairs of the host, each with the symptom it is for, and the one-line errors."""

import argparse
import errno
import os
import pickle
import subprocess
import sys

import fairseq.checkpoint_utils
import numpy as np
import pytest
import torch
from conftest import ROOT, make_model
from fairseq.data import data_utils
from fairseq.file_io import PathManager

from fairseq_synth.attention import SyntheticAttention
from fairseq_synth.errors import SynthesizerError, explain
from fairseq_synth.host import checkpoints, versions


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


def test_fixed_shapes_are_left_alone():
    shapes = [(4, 8)]
    batches = data_utils.batch_by_size(np.arange(10), lambda i: 8, fixed_shapes=shapes)
    assert all(len(b) <= 4 for b in batches)


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
        with pytest.raises(pickle.UnpicklingError), checkpoints.weights_only():
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


def test_not_a_fairseq_checkpoint(tmp_path):
    torch.save({"weights": torch.zeros(3)}, tmp_path / "other.pt")
    with pytest.raises(SynthesizerError, match="other.pt"):
        fairseq.checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "other.pt"))


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


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    path = tmp_path / "checkpoint1.pt"
    path.write_bytes(b"old")
    with pytest.raises(Exception, match="pickle"):
        fairseq.checkpoint_utils.torch_persistent_save({"x": lambda: 0}, str(path))
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["checkpoint1.pt"]


@pytest.mark.parametrize("version", ["1.13.1", "2.2.2+cu118"])
def test_old_torch(version):
    with pytest.raises(SynthesizerError, match="torch .* is too old; supported: Python 3.8 .* torch 2.3"):
        versions.check_torch(version)


def test_new_torch_is_warned_of(caplog):
    versions.check_torch("2.13.0+cpu")
    assert not caplog.records
    versions.check_torch("2.99.0")
    assert "torch 2.99.0 is newer than the tested ones; supported:" in caplog.text


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
    done = subprocess.run(
        [sys.executable, "-m", "fairseq_synth"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode != 0 and not done.stdout
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("fairseq_synth: error: ") and "supported: Python 3.8" in line and "torch 2.6 to 2.13" in line


def test_explanations():
    """The cause that the plugin knows is found behind what the host wrapped around it."""

    def chained(inner, outer):
        try:
            try:
                raise inner
            except Exception:
                raise outer  # noqa: B904  (as the host does)
        except Exception as error:
            return explain(error)

    assert chained(SynthesizerError("mend it"), Exception("Cannot load model parameters")) == "mend it"
    assert "No space left" in chained(OSError(errno.ENOSPC, "No space left on device"), RuntimeError("x"))
    assert chained(KeyError("a"), ValueError("b")) is None
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


def test_an_interrupted_run_says_so_in_a_line():
    code = "import fairseq_synth, fairseq.utils; exec('raise KeyboardInterrupt', vars(fairseq.utils))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "goes on from its last checkpoint" in done.stderr.splitlines()[-1]


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


def test_folder_is_printed():
    """``--user-dir "$(python -m fairseq_synth)"``: one line, the package's folder."""
    out = subprocess.run([sys.executable, "-m", "fairseq_synth"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == str(ROOT / "fairseq_synth")
