"""Programs and notebooks can load models, copy and pickle them, and reload the plugin's modules."""

import copy
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
import warm
from helpers import KINDS, ROOT, make_model, make_synth, train_model

from fairseq_synth.errors import SynthesizerError
from fairseq_synth.transformer import SynthesizerTransformer

CHECKPOINT = "checkpoint_last.pt"


@pytest.fixture(scope="module")
def model(make_once, data):
    """Returns the folder of a run of two updates, with the dictionaries of its data in a folder `words` in it."""

    def make(folder):
        """Trains the model in this folder, and copies the dictionaries."""
        train_model(data, folder, "--max-update", "2", "--no-epoch-checkpoints", "--data-buffer-size", "0")
        shutil.copytree(data / "bin", folder / "words")

    return make_once("model-for-python", make)


def translate(*args, **kwargs):
    """Returns the translation of a sentence by the model that these arguments of from_pretrained load."""
    hub = SynthesizerTransformer.from_pretrained(*args, **kwargs)
    return hub.translate("w1 w2 w3")


def test_from_pretrained_accepts_its_arguments_in_several_forms(model, data, tmp_path, monkeypatch):
    """It takes paths of any kind, ensembles, archives, data within the model's folder, and settings in two forms."""
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
        ({"data_name_or_path": "{model}"}, "the folder contains no data for a pair of languages"),
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
def test_from_pretrained_refuses_wrong_arguments_in_one_line(model, arguments, line):
    """In the arguments and in the line, {model} stands for the folder of the model."""
    templates = {"model_name_or_path": "{model}", "checkpoint_file": CHECKPOINT, "data_name_or_path": "{model}/words"}
    templates.update(arguments)
    kwargs = {name: template.replace("{model}", str(model)) for name, template in templates.items()}
    expected = line.replace("{model}", str(model))
    with pytest.raises(SynthesizerError, match=f"^from_pretrained: .*{expected}") as error:
        SynthesizerTransformer.from_pretrained(**kwargs)
    assert "\n" not in str(error.value)


def test_a_loaded_model_can_be_copied_and_pickled(model):
    """This holds for the whole hub, which processes that are spawned get, and for the model alone."""
    hub = SynthesizerTransformer.from_pretrained(model, CHECKPOINT, "./words")
    expected = hub.translate("w1 w2 w3")
    assert copy.deepcopy(hub).translate("w1 w2 w3") == expected
    assert pickle.loads(pickle.dumps(hub)).translate("w1 w2 w3") == expected
    original_model = hub.models[0]
    pickled_model = pickle.loads(pickle.dumps(original_model))
    with pytest.raises(RuntimeError, match="cannot train"):
        pickled_model.train()
    pickled_weights = pickled_model.state_dict()
    for name, weight in original_model.state_dict().items():
        assert torch.equal(pickled_weights[name], weight)


# A program that reloads all modules twice, then three modules one by one, and translates a sentence each time.
RELOAD = """
import importlib, sys
import fairseq_synth.transformer
path, checkpoint = sys.argv[1:]

def translate():
    model = sys.modules["fairseq_synth.transformer"].SynthesizerTransformer
    return model.from_pretrained(path, checkpoint, "./words").translate("w1 w2 w3")

translations = [translate()]
for rounds in range(2):
    names_of_modules = [name for name in sys.modules if name.split(".")[0] == "fairseq_synth"]
    for name in names_of_modules:
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
    """A notebook does so after a change of the code: it reloads all modules or one, and calls register() again."""
    process = warm.run(["-c", RELOAD, model, CHECKPOINT], cwd=ROOT)
    assert process.returncode == 0, process.stderr


SYNTHESIZER_ARCHS = [synthesizer_arch for synthesizer_arch, _stock_arch in KINDS.values()]


@pytest.mark.parametrize("arch", [*SYNTHESIZER_ARCHS, "roberta_linformer_agnews"])
def test_torchscript_is_refused(arch):
    with pytest.raises(SynthesizerError, match=": TorchScript is not supported; .*torch.compile"):
        torch.jit.script(make_model(arch))


@pytest.mark.parametrize("layer", ["encoder.layers.1.self_attn", "decoder.layers.0.self_attn"])
def test_a_checkpoint_that_has_lost_a_layers_weights_is_refused(layer):
    """It is not taken for a checkpoint of a stock Transformer, which has such weights in no layer."""
    all_weights = make_synth("random+vanilla").state_dict()
    weights = {}
    for name, weight in all_weights.items():
        if not name.startswith(f"{layer}.synthesizer"):
            weights[name] = weight
    assert len(weights) < len(all_weights)
    message = f"^{layer}: .* no weights of random here, but has weights of synthesizing functions in other layers"
    with pytest.raises(SynthesizerError, match=message):
        make_synth("random+vanilla").load_state_dict(weights)


def test_the_package_says_that_it_has_types():
    folder = Path(sys.modules["fairseq_synth"].__file__).parent
    assert (folder / "py.typed").exists()
