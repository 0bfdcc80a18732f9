"""Linformer: its attention equals the equation of the paper, and its projections are shared as the flags say."""

import pytest
import reference
import torch
from helpers import make_model, padding_mask, perturb

from fairseq_synth.errors import SynthesizerError
from fairseq_synth.linformer import SHARING, LinformerAttention


def make_linformer(sharing="none", **flags):
    """Returns a small Linformer with noise added to its weights, which projects to 3 positions.

    Args:
        sharing: which of its projections are the same parameter, --linformer-sharing.
        flags: other flags of fairseq-train.
    """
    model = make_model("roberta_linformer_agnews", linformer_sharing=sharing, linformer_k=3, **flags)
    return perturb(model)


def list_attentions(model):
    """Returns the self-attention of each layer of a Linformer."""
    return [layer.self_attn for layer in model.encoder.sentence_encoder.layers]


def list_projections(model):
    """Returns E and F of each layer of a Linformer. A shared projection occurs several times."""
    projections = []
    for attention in list_attentions(model):
        projections.append(attention.E)
        projections.append(attention.F)
    return projections


def count_parameters(parameters):
    """Returns how many different parameters there are in a list, in which a parameter may occur several times."""
    return len({id(parameter) for parameter in parameters})


# ---- the attention


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("sharing", SHARING)
def test_attention_equals_the_equation(sharing, is_padded):
    """The reference loops over the sentences without their padding, in double precision.

    The input at padding does not matter, and gets no gradient.
    """
    torch.manual_seed(0)
    module = LinformerAttention(6, 2, max_length=9, k=4, sharing=sharing).double()
    lengths = [7, 3, 5] if is_padded else [7, 7, 7]
    x = torch.randn(7, 3, 6, dtype=torch.float64)
    padding = padding_mask(lengths)
    is_real = ~padding.t()  # (T, B)

    key_padding_mask = padding if is_padded else None
    out, weights = module(x, key_padding_mask=key_padding_mask)
    expected = reference.linformer(module, x, lengths)
    torch.testing.assert_close(out[is_real], expected[is_real], atol=1e-12, rtol=0)
    assert weights is None

    x.requires_grad_()
    out, _ = module(x, key_padding_mask=padding)
    (gradient,) = torch.autograd.grad(out[is_real].sum(), x)
    assert torch.count_nonzero(gradient[padding.t()]) == 0


def test_gradients_equal_finite_differences():
    """The gradients are those for the input, for both projections and for the weight of the keys."""
    torch.manual_seed(0)
    module = LinformerAttention(4, 2, max_length=6, k=2, sharing="headwise").double()
    x = torch.randn(4, 2, 4, dtype=torch.float64, requires_grad=True)
    padding = padding_mask([4, 2])

    def attend(x, *parameters):
        """Returns the output of the module, which reads the parameters itself."""
        out, _ = module(x, key_padding_mask=padding)
        return out

    assert torch.autograd.gradcheck(attend, (x, module.E, module.F, module.k_proj.weight))


def test_attention_weights_are_dropped_in_training():
    """With fairseq's flag --retain-dropout, they are dropped in generation, too."""
    module = LinformerAttention(6, 2, max_length=9, k=4, sharing="layerwise", dropout=0.5)
    x = torch.randn(7, 3, 6)
    assert not torch.equal(module(x)[0], module(x)[0])
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])
    module.dropout_module.make_generation_fast_("x", retain_dropout=True)
    assert not torch.equal(module(x)[0], module(x)[0])


def test_k_may_be_more_than_the_tokens_of_a_sentence():
    """This is so in every short sentence."""
    model = perturb(make_model("roberta_linformer_agnews", linformer_k=20))
    tokens = torch.randint(4, 40, (2, 2))
    out, _ = model(tokens)
    assert torch.isfinite(out).all()


# ---- which projections are the same parameter


@pytest.mark.parametrize(
    "sharing, number_of_heads, number_of_projections",
    [("none", 2, 4), ("headwise", 1, 4), ("key-value", 1, 2), ("layerwise", 1, 1)],
)
def test_projections_are_shared_as_the_flag_says(sharing, number_of_heads, number_of_projections):
    """The choices are those of section 4 of the paper.

    There is a projection for each head, for keys and values of each layer, for each layer, or one for all layers. The
    model can be loaded from its own weights, and every projection gets a gradient.
    """
    model = make_linformer(sharing)
    projections = list_projections(model)
    for projection in projections:
        assert projection.shape == (number_of_heads, 3, 24)
    assert count_parameters(projections) == number_of_projections

    loaded = make_linformer(sharing, seed=9)
    loaded.load_state_dict(model.state_dict())
    tokens = torch.randint(4, 40, (2, 7))
    assert torch.equal(model(tokens)[0], loaded(tokens)[0])

    model.train()
    out, _ = model(tokens)
    out.square().sum().backward()
    for projection in projections:
        assert projection.grad.abs().sum() > 0


def test_layers_share_their_projection_with_layerdrop():
    """The layers get it while the model is built. A loop over them then leaves layers out at random, as in training."""
    model = make_linformer("layerwise", encoder_layerdrop=0.99).eval()
    attentions = list_attentions(model)
    assert len(attentions) > 1
    assert count_parameters([attention.E for attention in attentions]) == 1


# ---- checkpoints


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(linformer_k=4), r"self_attn.E is \[2, 3, 24\] in the checkpoint and \[2, 4, 24\].*--linformer-k"),
        (dict(linformer_sharing="headwise"), "--linformer-sharing"),
        (dict(max_positions=23), "--max-positions 23: the checkpoint was trained with 24"),
    ],
)
def test_a_checkpoint_of_other_sizes_is_refused(flags, message):
    """The error names the flag that differs."""
    state = make_linformer().state_dict()
    flags_of_model = {"linformer_k": 3, "linformer_sharing": "none", **flags}
    model = make_model("roberta_linformer_agnews", **flags_of_model)
    with pytest.raises(SynthesizerError, match=message):
        model.load_state_dict(state)


@pytest.mark.parametrize(
    "sharing_of_checkpoint, sharing_of_model, different_projections",
    [
        ("headwise", "key-value", "layers.0.self_attn.E and .*layers.0.self_attn.F"),
        ("headwise", "layerwise", "layers.0.self_attn.E and .*layers.0.self_attn.F"),
        ("key-value", "layerwise", "layers.0.self_attn.E and .*layers.1.self_attn.E"),
    ],
)
def test_a_model_that_shares_more_than_the_checkpoint_refuses_it(
    sharing_of_checkpoint, sharing_of_model, different_projections
):
    """The shapes are those of the checkpoint. But to load it would keep only the last of several different values.

    The error names two projections that differ, and the model stays as it was.
    """
    model = make_linformer(sharing_of_model)
    weights_before = {name: weight.clone() for name, weight in model.state_dict().items()}
    state = make_linformer(sharing_of_checkpoint).state_dict()
    message = f"--linformer-sharing {sharing_of_model}: .*{different_projections} are the same parameter .*differ"
    with pytest.raises(SynthesizerError, match=message) as error:
        model.load_state_dict(state)
    assert "\n" not in str(error.value)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights_before[name]), name


@pytest.mark.parametrize("sharing", ["headwise", "key-value", "layerwise"])
def test_a_model_that_shares_less_starts_where_the_checkpoint_ends(sharing):
    """Its projections begin with the same values, and may then become different."""
    trained = make_linformer("layerwise")
    model = make_linformer(sharing, seed=9)
    model.load_state_dict(trained.state_dict())
    tokens = torch.randint(4, 40, (2, 7))
    assert torch.equal(trained(tokens)[0], model(tokens)[0])


def test_a_checkpoint_of_another_attention_is_refused():
    """A RoBERTa cannot start from the weights of a Linformer, nor a Linformer from those of a RoBERTa."""
    linformer = make_linformer()
    roberta = make_model("roberta_agnews")
    with pytest.raises(SynthesizerError, match="the checkpoint contains an encoder, but this model is a Linformer"):
        linformer.load_state_dict(roberta.state_dict())
    synthesizer = make_model("roberta_synth_vanilla_agnews")
    with pytest.raises(SynthesizerError, match="the checkpoint contains a Linformer, but this model is an encoder"):
        synthesizer.load_state_dict(linformer.state_dict())


# ---- flags


def test_flags_of_xformers_are_refused():
    """They are for fairseq's own attention."""
    with pytest.raises(SynthesizerError, match="--encoder-xformers-att-config: is only for fairseq's attention"):
        make_linformer(encoder_xformers_att_config="{}")
