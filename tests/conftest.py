import argparse
from types import SimpleNamespace

import pytest
import torch
from commands import ROOT, make_data
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

import fairseq_synth  # noqa: F401
import fairseq_synth.nested
from fairseq_synth.attention import SyntheticAttention
from fairseq_synth.synthesizers import SYNTHESIZERS, Mixture, Synthesizer, Terms, parse_spec

torch.set_num_threads(1)  # the workers of pytest-xdist share the machine

# every function, every pair of them and one triple, so that a new function is covered once it is registered
SPECS = (
    list(SYNTHESIZERS)
    + [f"{a}+{b}" for i, a in enumerate(SYNTHESIZERS) for b in list(SYNTHESIZERS)[i + 1 :]]
    + ["random+dense+vanilla"]
)


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="of the tests of the attention and its computations: cpu or cuda")


class Distance(Synthesizer):
    """A function that the paper has not: without weights or a limit, the same for all heads."""

    has_max_length = False

    def forward(self, x, q, k, start, src_len):
        rows, columns = torch.arange(start, start + x.size(2)), torch.arange(src_len)
        return Terms(bias=-(rows[:, None] - columns).abs().float()[None, None])


def make_dictionary(words: int = 40) -> Dictionary:
    dictionary = Dictionary()
    for i in range(words):
        dictionary.add_symbol(f"w{i}")
    return dictionary


@pytest.fixture
def on_device(request):
    """Tensors are made on the device of --device."""
    with torch.device(request.config.getoption("--device")):
        yield


def future(length, dtype=torch.float32):
    """The host's mask of what is behind a row, which nobody but `plain` reads."""
    return torch.full((length, length), float("-inf"), dtype=dtype).triu_(1)


def padding_mask(lengths):
    """(B, S), true behind sentences of these lengths."""
    return torch.arange(max(lengths))[None] >= torch.tensor(lengths)[:, None]


def make_attention(spec, mixture="convex", embed_dim=6, num_heads=2, max_length=12, rank=3, seed=0, **kwargs):
    """An attention with no parameter left at a value that hides a mistake (zeros, equal weights)."""
    torch.manual_seed(seed)
    built = Mixture(parse_spec(spec), mixture, num_heads, embed_dim // num_heads, max_length, rank)
    module = SyntheticAttention(embed_dim, num_heads, built, **kwargs)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


def make_model(arch="transformer_synth_random_vanilla_multi30k", seed=1, words=40, **flags):
    """A small model of an architecture, in eval mode."""
    sizes = dict(
        encoder_embed_dim=16,
        encoder_ffn_embed_dim=24,
        encoder_layers=2,
        encoder_attention_heads=2,
        decoder_layers=2,
        decoder_attention_heads=2,
        dropout=0.1,
        synth_max_length=24,
    )
    args = argparse.Namespace(arch=arch, **{**sizes, **flags})
    ARCH_CONFIG_REGISTRY[arch](args)
    dictionary = make_dictionary(words)
    torch.manual_seed(seed)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return ARCH_MODEL_REGISTRY[arch].build_model(args, task).eval()


def perturb(model, seed=3, std=0.3):
    """Moves every parameter, so that a bias of 0 or an even mixture hides nothing."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" not in name and "output_projection" not in name:
                parameter.add_(torch.randn_like(parameter) * std)
    return model


def pad_batch(sentences, left, pad=1):
    width = max(len(s) for s in sentences)
    batch = torch.full((len(sentences), width), pad)
    for row, s in zip(batch, sentences):
        row[width - len(s) if left else 0 :][: len(s)] = torch.tensor(s)
    return batch


@pytest.fixture(autouse=True)
def small_blocks(request, monkeypatch):
    """The small matrices of the tests have several blocks; where other processes train, theirs are as usual."""
    if request.module.__name__ not in ("test_cli", "test_processes", "test_recipes"):
        monkeypatch.setattr(fairseq_synth.nested, "CORE", 4)


@pytest.fixture(scope="session")
def multi30k():
    """The corpus beside the project, where it is at hand."""
    folder = ROOT.parent / "shared" / "data" / "multi30k"
    if not folder.is_dir():
        pytest.skip("Multi30k is not at hand")
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A corpus of a few hundred sentences, raw and binarised: the target is the source backwards."""
    return make_data(tmp_path_factory.mktemp("data"))
