"""Linformer against its equation, and which of its projections are one."""

import pytest
import reference
import torch
from helpers import make_model, padding_mask, perturb

from fairseq_synth.errors import SynthesizerError
from fairseq_synth.linformer import SHARING, LinformerAttention


def make_linformer(sharing="none", **flags):
    return perturb(make_model("roberta_linformer_agnews", linformer_sharing=sharing, linformer_k=3, **flags))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sharing", SHARING)
def test_equation(sharing, padded):
    """Against loops over the sentences without their padding, in float64."""
    torch.manual_seed(0)
    module = LinformerAttention(6, 2, max_length=9, k=4, sharing=sharing).double()
    lengths = [7, 3, 5] if padded else [7, 7, 7]
    x, mask = torch.randn(7, 3, 6, dtype=torch.float64), padding_mask(lengths)
    out, weights = module(x, key_padding_mask=mask if padded else None)
    real = ~mask.t()
    torch.testing.assert_close(out[real], reference.linformer(module, x, lengths)[real], atol=1e-12, rtol=0)
    assert weights is None
    # what stands at the padding does not matter, and gets no gradient
    x.requires_grad_()
    gradient = torch.autograd.grad(module(x, key_padding_mask=mask)[0][real].sum(), x)[0]
    assert torch.count_nonzero(gradient[mask.t()]) == 0


def test_gradient():
    torch.manual_seed(0)
    module = LinformerAttention(4, 2, max_length=6, k=2, sharing="headwise").double()
    x = torch.randn(4, 2, 4, dtype=torch.float64, requires_grad=True)
    mask = padding_mask([4, 2])
    weights = [module.E, module.F, module.k_proj.weight]
    assert torch.autograd.gradcheck(lambda *_: module(x, key_padding_mask=mask)[0], (x, *weights))


@pytest.mark.parametrize(
    "sharing, heads, projections", [("none", 2, 4), ("headwise", 1, 4), ("key-value", 1, 2), ("layerwise", 1, 1)]
)
def test_sharing(sharing, heads, projections):
    """As in section 4 of the paper: for each head, each layer's keys and values, each layer, or one for all."""
    model = make_linformer(sharing)
    attentions = [layer.self_attn for layer in model.encoder.sentence_encoder.layers]
    assert {tuple(p.shape) for a in attentions for p in (a.E, a.F)} == {(heads, 3, 24)}
    assert len({id(p) for a in attentions for p in (a.E, a.F)}) == projections
    other = make_linformer(sharing, seed=9)
    other.load_state_dict(model.state_dict())
    tokens = torch.randint(4, 40, (2, 7))
    assert torch.equal(model(tokens)[0], other(tokens)[0])
    model.train()(tokens)[0].square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for a in attentions for p in (a.E, a.F))


def test_sharing_with_layerdrop():
    layers = make_linformer("layerwise", encoder_layerdrop=0.99).eval().encoder.sentence_encoder.layers
    assert len(layers) > 1 and len({id(layer.self_attn.E) for layer in layers}) == 1


def test_attention_dropout():
    """In training, and with --retain-dropout in generation too."""
    module, x = LinformerAttention(6, 2, max_length=9, k=4, sharing="layerwise", dropout=0.5), torch.randn(7, 3, 6)
    assert not torch.equal(module(x)[0], module(x)[0])
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])
    module.dropout_module.make_generation_fast_("x", retain_dropout=True)
    assert not torch.equal(module(x)[0], module(x)[0])


def test_k_beyond_the_sentence():
    """k may be more than a sentence has tokens, as in every short sentence."""
    model = perturb(make_model("roberta_linformer_agnews", linformer_k=20))
    assert torch.isfinite(model(torch.randint(4, 40, (2, 2)))[0]).all()


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(linformer_k=4), r"self_attn.E is \[2, 3, 24\] in the checkpoint and \[2, 4, 24\].*--linformer-k"),
        (dict(linformer_sharing="headwise"), "--linformer-sharing"),
        (dict(max_positions=23), "--max-positions 23: the checkpoint was trained with 24"),
    ],
)
def test_another_checkpoint(flags, message):
    state = make_linformer().state_dict()
    other = make_model("roberta_linformer_agnews", **{"linformer_k": 3, "linformer_sharing": "none", **flags})
    with pytest.raises(SynthesizerError, match=message):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    "trained, built, pair",
    [
        ("headwise", "key-value", "layers.0.self_attn.E and .*layers.0.self_attn.F"),
        ("headwise", "layerwise", "layers.0.self_attn.E and .*layers.0.self_attn.F"),
        ("key-value", "layerwise", "layers.0.self_attn.E and .*layers.1.self_attn.E"),
    ],
)
def test_projections_that_would_become_one(trained, built, pair):
    """The shapes are those of the checkpoint's; to load it would keep the last of the values alone."""
    other = make_linformer(built)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    message = f"--linformer-sharing {built}: .*{pair} are the same parameter .*differ"
    with pytest.raises(SynthesizerError, match=message) as error:
        other.load_state_dict(make_linformer(trained).state_dict())
    assert "\n" not in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize("built", ["headwise", "key-value", "layerwise"])
def test_projections_that_begin_as_one(built):
    """A model that shares less starts where the checkpoint ends."""
    one, other = make_linformer("layerwise"), make_linformer(built, seed=9)
    other.load_state_dict(one.state_dict())
    tokens = torch.randint(4, 40, (2, 7))
    assert torch.equal(one(tokens)[0], other(tokens)[0])


def test_xformers_are_refused():
    with pytest.raises(SynthesizerError, match="--encoder-xformers-att-config: is only for fairseq's attention"):
        make_linformer(encoder_xformers_att_config="{}")


def test_a_checkpoint_of_another_attention():
    """One of a RoBERTa cannot start a Linformer, nor the other way around."""
    linformer, stock = make_linformer(), make_model("roberta_agnews")
    with pytest.raises(SynthesizerError, match="the checkpoint contains an encoder, but this model is a Linformer"):
        linformer.load_state_dict(stock.state_dict())
    with pytest.raises(SynthesizerError, match="the checkpoint contains a Linformer, but this model is an encoder"):
        make_model("roberta_synth_vanilla_agnews").load_state_dict(linformer.state_dict())
