"""What programs and notebooks do with the plugin: load models, copy and pickle them, reload modules."""

import copy
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
import warm
from helpers import (
    KINDS,
    ROOT,
    make_model,
    make_synth,
    train_model,
)

from fairseq_synth.errors import SynthesizerError
from fairseq_synth.transformer import SynthesizerTransformer

CHECKPOINT = "checkpoint_last.pt"


@pytest.fixture(scope="module")
def model(make_once, data):
    """The folder of a run of two updates, with the dictionaries of its data in a folder `words` in it."""

    def make(folder):
        train_model(data, folder, "--max-update", "2", "--no-epoch-checkpoints", "--data-buffer-size", "0")
        shutil.copytree(data / "bin", folder / "words")

    return make_once("model-for-python", make)


def translate(*args, **kwargs):
    """The translation of a sentence by the model that these arguments of from_pretrained load."""
    return SynthesizerTransformer.from_pretrained(*args, **kwargs).translate("w1 w2 w3")


def test_what_from_pretrained_accepts(model, data, tmp_path, monkeypatch):
    """Paths of any kind, ensembles, archives, data within the model's folder, and settings in several forms."""
    monkeypatch.chdir(tmp_path)
    words = data / "bin"
    expected = translate(str(model), CHECKPOINT, str(words))
    assert translate(model, CHECKPOINT, words) == expected
    assert translate(os.path.relpath(model), CHECKPOINT, os.path.relpath(words)) == expected
    assert translate(model, CHECKPOINT, "./words") == expected
    assert translate(model, model / CHECKPOINT, words) == expected
    assert translate(model, f"{CHECKPOINT}{os.pathsep}{CHECKPOINT}", words) == expected
    assert translate(model, [CHECKPOINT, CHECKPOINT], words) == expected
    shutil.make_archive("packed", "gztar", model.parent, model.name)
    assert translate("packed.tar.gz", CHECKPOINT, "./words") == expected
    for settings in ({"synth_beyond_length": "tile"}, "{'synth_beyond_length': 'tile'}"):
        hub = SynthesizerTransformer.from_pretrained(model, CHECKPOINT, words, model_overrides=settings)
        assert hub.translate("w1 " * 30)  # longer than --synth-max-length


@pytest.mark.parametrize(
    "arguments, line",
    [
        ({"checkpoint_file": "other.pt"}, "{model}/other.pt: no such checkpoint"),
        (
            {"model_name_or_path": "{model}/checkpoint_last.pt"},
            "checkpoint_last.pt: is not a folder; give its folder, and",
        ),
        ({"data_name_or_path": "{model}"}, "no data of a pair of languages is in this folder"),
        ({"data_name_or_path": "{model}/words/dict.en.txt"}, "dict.en.txt: is not a folder"),
        ({"data_name_or_path": "./nowhere"}, "{model}/./nowhere: no such folder"),
        ({"bpe": "subwordnmt"}, "bpe='subwordnmt': choose from .*subword_nmt"),
        ({"tokenizer": "mose"}, "tokenizer='mose': choose from .*moses"),
        ({"bpe": "sentencepiece"}, "sentencepiece_model is missing; give sentencepiece_model=..."),
        ({"bpe": "subword_nmt"}, "bpe_codes is missing"),
        ({"bpe": "subword_nmt", "bpe_codes": "/nowhere"}, "/nowhere"),
        ({"model_overrides": "[]"}, r"model_overrides='\[\]': must be a dict"),
    ],
    ids=str,
)
def test_what_from_pretrained_refuses_in_one_line(model, arguments, line):
    defaults = {"model_name_or_path": "{model}", "checkpoint_file": CHECKPOINT, "data_name_or_path": "{model}/words"}
    filled = {name: value.replace("{model}", str(model)) for name, value in {**defaults, **arguments}.items()}
    with pytest.raises(SynthesizerError, match=f"^from_pretrained: .*{line.replace('{model}', str(model))}") as error:
        SynthesizerTransformer.from_pretrained(**filled)
    assert "\n" not in str(error.value)


def test_a_loaded_model_can_be_copied_and_pickled(model):
    """Whole, as for processes that are spawned, or the model alone."""
    hub = SynthesizerTransformer.from_pretrained(model, CHECKPOINT, "./words")
    expected = hub.translate("w1 w2 w3")
    assert copy.deepcopy(hub).translate("w1 w2 w3") == expected
    assert pickle.loads(pickle.dumps(hub)).translate("w1 w2 w3") == expected
    alone = pickle.loads(pickle.dumps(hub.models[0]))
    with pytest.raises(RuntimeError, match="cannot train"):
        alone.train()
    for name, weight in hub.models[0].state_dict().items():
        assert torch.equal(alone.state_dict()[name], weight)


RELOAD = """
import importlib, sys
import fairseq_synth.transformer
path, checkpoint = sys.argv[1:]

def translate():
    model = sys.modules["fairseq_synth.transformer"].SynthesizerTransformer
    return model.from_pretrained(path, checkpoint, "./words").translate("w1 w2 w3")

translations = [translate()]
for rounds in range(2):
    for name in [name for name in sys.modules if name.split(".")[0] == "fairseq_synth"]:
        importlib.reload(sys.modules[name])
    fairseq_synth.register()
    fairseq_synth.register()
    translations.append(translate())
for name in ("fairseq_synth", "fairseq_synth.transformer", "fairseq_synth.architectures"):
    importlib.reload(sys.modules[name])
    fairseq_synth.register()
    translations.append(translate())

from fairseq.models import MODEL_REGISTRY
assert MODEL_REGISTRY["transformer_synth"] is fairseq_synth.transformer.SynthesizerTransformer
assert len(set(translations)) == 1, translations
"""


def test_modules_can_be_reloaded(model):
    """As in a notebook, after a change of the code: all of them or one, and register() again."""
    done = warm.run(["-c", RELOAD, model, CHECKPOINT], cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arch", [KINDS[kind][0] for kind in KINDS] + ["roberta_linformer_agnews"])
def test_torchscript_is_refused(arch):
    with pytest.raises(SynthesizerError, match=": TorchScript is not supported; .*torch.compile"):
        torch.jit.script(make_model(arch))


@pytest.mark.parametrize("layer", ["encoder.layers.1.self_attn", "decoder.layers.0.self_attn"])
def test_a_checkpoint_that_has_lost_a_layers_weights(layer):
    """It is not taken for one of a stock Transformer, which has them in no layer."""
    model = make_synth("random+vanilla")
    weights = {
        name: weight for name, weight in model.state_dict().items() if not name.startswith(f"{layer}.synthesizer")
    }
    assert len(weights) < len(model.state_dict())
    message = f"^{layer}: .* no weights of random here, but has weights of synthesizing functions in other layers"
    with pytest.raises(SynthesizerError, match=message):
        make_synth("random+vanilla").load_state_dict(weights)


def test_the_package_says_that_it_has_types():
    assert (Path(sys.modules["fairseq_synth"].__file__).parent / "py.typed").exists()
