"""Each function equals its equation; mixtures; sizes; the errors of a spec."""

import re

import pytest
import reference
import torch
from helpers import SPECS, make_attention

from fairseq_synth.errors import SynthesizerError
from fairseq_synth.heads import parse_heads, parse_spec
from fairseq_synth.linear import by_head, by_sentence, per_head_linear
from fairseq_synth.logits import Bias, Logits, Outer
from fairseq_synth.masks import causal_mask
from fairseq_synth.positions import Inputs, take_positions
from fairseq_synth.synthesizers import (
    ALPHA_ORDER,
    SYNTHESIZERS,
    FactorizedDense,
    Mixture,
    factorize,
    glorot_uniform_,
)


@pytest.mark.parametrize("mixture", ["convex", "sum"])
@pytest.mark.parametrize("spec", SPECS)
def test_equals_the_equation(spec, mixture, monkeypatch):
    """Against float64 loops from the paper: padding, causality, every row and column, shorter than l.

    The plain computation, which returns weights, and whichever is the fast one; that owes nothing to padding.
    """
    monkeypatch.setattr("fairseq_synth.computations.tiled.PLAIN_LIMIT", 0)
    module = make_attention(spec, mixture).double()
    x = torch.randn(5, 2, 6, dtype=torch.float64)
    lengths = [5, 3]
    padding = torch.tensor([[j >= n for j in range(5)] for n in lengths])
    future = torch.triu(torch.full((5, 5), float("-inf"), dtype=torch.float64), 1)
    for masks, hidden in [
        (dict(), lambda b, i, j: False),
        (dict(key_padding_mask=padding), lambda b, i, j: j >= lengths[b]),
        (dict(attn_mask=future), lambda b, i, j: j > i),
        (dict(attn_mask=future, key_padding_mask=padding), lambda b, i, j: j > i or j >= lengths[b]),
    ]:
        expected = reference.attention(module, x, hidden)
        out, _ = module(x, x, x, need_weights=True, **masks)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        out, _ = module(x, x, x, **masks)
        for b, length in enumerate(lengths if "key_padding_mask" in masks else [5, 5]):
            torch.testing.assert_close(out[:length, b], expected[:length, b], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "spec",
    ["random:1/vanilla:2", "dense+vanilla:1/random:1/vanilla:1", "factorized_random:3", "random:1/dense+vanilla:2"],
)
def test_heads_of_different_kinds(spec):
    """Each head has its group's functions, and only heads that read them have queries and keys."""
    module = make_attention(spec, num_heads=3, embed_dim=6, max_length=5).double()
    reading = spec.count("vanilla:1") + 2 * spec.count("vanilla:2")
    for projection in (module.q_proj, module.k_proj):
        assert (0 if projection is None else projection.weight.size(0)) == 2 * reading
    x = torch.randn(5, 2, 6, dtype=torch.float64, requires_grad=True)
    expected = reference.attention(module, x, lambda b, i, j: j > i)
    torch.testing.assert_close(module(x, attn_mask=causal_mask(x))[0], expected, rtol=0, atol=1e-12)
    out, weights = module(x, attn_mask=causal_mask(x), need_head_weights=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert weights.shape == (3, 2, 5, 5)
    state = {}
    with torch.no_grad():
        steps = [module(x[i : i + 1], incremental_state=state)[0] for i in range(5)]
    torch.testing.assert_close(torch.cat(steps), expected, rtol=0, atol=1e-12)
    module.train()(x)[0].square().sum().backward()
    for name, parameter in module.named_parameters():
        assert name == "k_proj.bias" or parameter.grad is not None and parameter.grad.any(), name
    again = make_attention(spec, num_heads=3, embed_dim=6, max_length=5, seed=1).double()
    again.load_state_dict(module.state_dict())
    torch.testing.assert_close(again(x)[0], module(x)[0])


@pytest.mark.parametrize(
    "spec, others, message",
    [
        (
            "random:1/vanilla:2",
            "random+vanilla",
            "weights of random .group 1 of the heads., and query .* has random and vanilla;",
        ),
        ("random+vanilla", "random:1/vanilla:2", "random, and .* has random .group 1 .* and vanilla .group 2 "),
        ("vanilla", "random:1/vanilla:2", "dot-product attention in all heads"),
        ("random:1/vanilla:2", "random:2/vanilla:1", "R is .1, 12, 12. in the checkpoint and .2, 12, 12."),
    ],
)
def test_a_checkpoint_of_other_heads(spec, others, message):
    state = make_attention(spec, num_heads=3, embed_dim=6).state_dict()
    with pytest.raises(SynthesizerError, match=message):
        make_attention(others, num_heads=3, embed_dim=6).load_state_dict(state)


def test_heads_of_a_spec():
    assert parse_heads("random", 8) == ((8, ("random",)),)
    assert parse_heads(" random : 6 / vanilla+dense : 2 ", 8) == ((6, ("random",)), (2, ("dense", "vanilla")))
    assert parse_heads("random/vanilla", 8) == ((4, ("random",)), (4, ("vanilla",)))


@pytest.mark.parametrize(
    "spec, message",
    [
        ("random:4/vanilla:2", "4 . 2 heads are not the 8 attention heads"),
        ("random/dense/vanilla", "8 heads cannot be shared out equally among 3"),
        ("random:4/vanilla", "give every group its number"),
        ("random:0/vanilla:8", "give every group its number"),
        ("random:-1/vanilla:9", "give every group its number"),
        ("random:8/randm:0", "unknown function 'randm'"),
        ("random:7", "7 heads are not the 8"),
    ],
)
def test_heads_that_do_not_add_up(spec, message):
    error = str(_error(parse_heads, spec, 8, "--decoder-synthesizer"))
    assert re.search(message, error) and error.startswith("--decoder-synthesizer '")


@pytest.mark.parametrize("length", [3, 4, 5, 12])
@pytest.mark.parametrize("spec", [*SYNTHESIZERS, "random+fixed_random+factorized_dense", "dense+vanilla"])
def test_tiled_beyond_length(spec, length, monkeypatch):
    """l = 4 and sentences of l - 1, l, l + 1 and 3 l: every computation, and decoding, equal the loops over p mod l."""
    module = make_attention(spec, max_length=4, beyond_length="tile").double()
    x = torch.randn(length, 2, 6, dtype=torch.float64)
    padding = torch.arange(length)[None] >= torch.tensor([length, length - 2])[:, None]
    for causal in (False, True):
        hidden = padding[:, None] | torch.ones(length, length).triu(1).bool() & causal
        expected = reference.attention(module, x, lambda b, i, j, hidden=hidden: hidden[b, i, j])
        mask = causal_mask(x) if causal else None
        found = [module(x, key_padding_mask=padding, attn_mask=mask, need_weights=True)[0]]
        for small in (0, 1 << 18):
            monkeypatch.setattr("fairseq_synth.computations.tiled.PLAIN_LIMIT", small)
            found.append(module(x, key_padding_mask=padding, attn_mask=mask)[0])
        for out in found:
            for b, end in enumerate([length, length - 2]):
                torch.testing.assert_close(out[:end, b], expected[:end, b], rtol=0, atol=1e-12)
    state = {}
    with torch.no_grad():
        steps = [module(x[i : i + 1], incremental_state=state)[0] for i in range(length)]
    expected = reference.attention(module, x, lambda b, i, j: j > i)
    torch.testing.assert_close(torch.cat(steps), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", SYNTHESIZERS)
def test_gradients_of_tiled_parameters(spec, monkeypatch):
    """Each entry's gradient is the sum over the places where it is used, by tiles too."""
    monkeypatch.setattr("fairseq_synth.computations.tiled.PLAIN_LIMIT", 0)
    module = make_attention(spec, embed_dim=4, max_length=4, rank=2, beyond_length="tile").double()
    x = torch.randn(6, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: module(x)[0], (x, *module.parameters()), atol=1e-6)


@pytest.mark.parametrize("spec", SYNTHESIZERS)
def test_beyond_length_is_refused(spec):
    """By the attention alone, too; functions without l take any length."""
    module = make_attention(spec, max_length=4)
    x = torch.randn(5, 2, 6)
    if SYNTHESIZERS[spec].has_max_length:
        with pytest.raises(ValueError, match="5 tokens is longer than max_length 4"):
            module(x)
        state = {}
        module(x[:4], incremental_state=state)
        with pytest.raises(ValueError, match="5 tokens"):
            module(x[4:], incremental_state=state)
    else:
        assert module(x)[0].shape == x.shape


@pytest.mark.parametrize("spec", [*SYNTHESIZERS, "random+dense+vanilla"])
def test_gradients(spec):
    """fp64 gradcheck in the input and in every trained parameter."""
    module = make_attention(spec, embed_dim=4, max_length=4, rank=2).double()
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    padding = torch.tensor([[False] * 3, [False, False, True]])
    names, parameters = zip(*module.named_parameters())
    # a term that is constant along a row has no gradient; finite differences of it are noise around 0
    assert torch.autograd.gradcheck(
        lambda x, *_: module(x, x, x, key_padding_mask=padding)[0], (x, *parameters), atol=1e-6
    )


@pytest.mark.parametrize("start, count", [(0, 5), (1, 3), (3, 4), (7, 12), (0, 11)])
def test_positions_repeat(start, count):
    """Position p has entry p mod l, wherever the first one is."""
    x = torch.arange(10).view(2, 5)
    expected = x[:, [p % 5 for p in range(start, start + count)]]
    assert torch.equal(take_positions(x, 1, start, count), expected)


@pytest.mark.parametrize("name", SYNTHESIZERS)
def test_later_rows_are_slices(name):
    """Rows from `start` on and fewer columns are a part of the whole, not another matrix."""
    module = make_attention(name)
    x, q, k = torch.randn(9, 2, 6), torch.randn(2, 2, 9, 3), torch.randn(2, 2, 9, 3)

    def scores(start, length, columns):
        rows = slice(start, start + length)
        (logits,) = module.synthesizer(Inputs(x[rows], q[:, :, rows], k[:, :, :columns], start, columns))
        return logits.total(columns).expand(2, 2, length, columns)

    for start, columns in [(4, 7), (6, 9), (0, 1)]:
        torch.testing.assert_close(scores(start, 2, columns), scores(0, 9, 9)[:, :, start : start + 2, :columns])


@pytest.mark.parametrize("spec", [s for s in SPECS if "+" in s])
def test_convex_weights(spec):
    """Sum to 1 over the components in every head, start equal, and are trained; a sum has none."""
    fresh = Mixture(parse_spec(spec), "convex", 2, 3, 12, 3)
    fresh.reset_parameters()
    n = len(spec.split("+"))
    assert fresh.alpha.shape == (n, 2) and fresh.alpha.requires_grad
    torch.testing.assert_close(torch.softmax(fresh.alpha, 0), torch.full((n, 2), 1 / n))
    # equal logits in every component come out unchanged exactly when the weights sum to 1
    module = make_attention(spec)
    for component in module.synthesizer.components.values():
        component.forward = lambda inputs: [Bias(torch.ones(1, 2, 4, 4))]
    (logits,) = module.synthesizer(Inputs(torch.zeros(4, 1, 6), None, None, 0, 4))
    torch.testing.assert_close(logits.total(4), torch.ones(1, 2, 4, 4))
    assert make_attention(spec, "sum").synthesizer.alpha is None


@pytest.mark.parametrize("spec", SPECS)
def test_all_parameters_learn(spec):
    """A gradient reaches everything in the optimizer, in the whole matrix; fixed_random has nothing in it."""
    module = make_attention(spec, max_length=6)
    x = torch.randn(6, 3, 6)
    (module(x, x, x)[0] ** 2).sum().backward()
    for name, parameter in module.named_parameters():
        if name.endswith("k_proj.bias"):
            continue  # constant along a row: softmax does not see it, in fairseq either
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    if "fixed_random" in module.synthesizer.components:
        fixed = module.synthesizer.components["fixed_random"]
        assert not fixed.is_trained() and "R" in fixed.state_dict()


@pytest.mark.parametrize("name", [n for n in SYNTHESIZERS if n not in ("fixed_random", "vanilla")])
def test_zero_logits(name):
    """Such a function still learns."""
    module = make_attention(name)
    component = module.synthesizer.components[name]
    component.zero_logits_()
    (logits,) = module.synthesizer(Inputs(torch.randn(6, 2, 6), None, None, 0, 6))
    scores = logits.total(6)
    assert torch.count_nonzero(scores) == 0
    (scores * torch.randn_like(scores)).sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in component.parameters())


def test_factorized_dense_has_distinct_columns():
    """One factor is tiled and the other interleaved: with both tiled, 16 x 16 has 16 distinct columns."""
    torch.manual_seed(0)
    module = FactorizedDense(1, 4, 256, 8)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    row = Logits(module(Inputs(torch.randn(1, 1, 4), None, None, 0, 256))).total(256).flatten()
    assert row.unique().numel() == 256


@pytest.mark.parametrize("length, expected", [(256, (16, 16)), (100, (10, 10)), (24, (4, 6)), (6, (2, 3)), (4, (2, 2))])
def test_factorize(length, expected):
    assert factorize(length) == expected


@pytest.mark.parametrize("length", [1, 2, 3, 13, 251])
def test_factorize_refuses_primes(length):
    with pytest.raises(SynthesizerError, match=f"--synth-max-length {length}: .*product a\\*b"):
        factorize(length)
    suggestion = int(str(_error(factorize, length)).split("take ")[1].split(",")[0])
    factorize(suggestion)


def _error(function, *args):
    with pytest.raises(SynthesizerError) as caught:
        function(*args)
    return caught.value


@pytest.mark.parametrize("name", SYNTHESIZERS)
def test_every_weight_has_an_initial_value(name):
    """Each number of each parameter and buffer, all of them within the bounds of its own matrix."""
    module = SYNTHESIZERS[name](2, 6, 12, 8)
    tensors = module.state_dict()
    with torch.no_grad():
        for x in tensors.values():
            x.fill_(float("nan"))
    module.reset_parameters()
    assert all(torch.isfinite(x).all() for x in tensors.values())
    if name == "factorized_dense":
        for part in tensors["W2"].split([module.a, module.b], dim=1):
            bound = (6 / (part.size(1) + 6)) ** 0.5
            assert 0.8 * bound < part.abs().max() <= bound


def test_glorot_is_per_head():
    weight = torch.empty(3, 100, 20)
    glorot_uniform_(weight)
    bound = (6 / 120) ** 0.5
    assert weight.abs().max() <= bound
    torch.testing.assert_close(weight.std(), torch.tensor(bound / 3**0.5), rtol=0.05, atol=0)


@pytest.mark.parametrize("spec", ["randm", "random+", "", "random+randm", "Random"])
def test_unknown_name_lists_the_valid_ones(spec):
    message = str(_error(parse_spec, spec, "--decoder-synthesizer"))
    assert "--decoder-synthesizer" in message and all(name in message for name in SYNTHESIZERS)
    assert "\n" not in message


def test_spec():
    assert parse_spec("vanilla+random") == ("random", "vanilla") == parse_spec("random + vanilla")
    assert "twice" in str(_error(parse_spec, "random+random"))
    assert "convex, sum" in str(_error(Mixture, ("random",), "product", 2, 3, 12, 3))


def test_the_order_of_the_classes_has_no_meaning(restore_registry):
    """The rows of alpha in a checkpoint are those of names, and are the same in every release."""
    spec, x = "random+dense+vanilla", torch.randn(5, 2, 6)
    module = make_attention(spec)
    for name in sorted(SYNTHESIZERS):
        SYNTHESIZERS[name] = SYNTHESIZERS.pop(name)
    other = make_attention(spec, seed=1)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x)[0], module(x)[0])
    SYNTHESIZERS["a"] = SYNTHESIZERS["b"] = SYNTHESIZERS["random"]
    assert parse_spec("b+vanilla+a+random") == ("random", "vanilla", "a", "b")
    assert parse_spec("+".join(reversed(ALPHA_ORDER))) == ALPHA_ORDER


def test_per_head_linear():
    """Each head's matrix multiplies the head's slice of each token."""
    x, weight, bias = torch.randn(5, 3, 8), torch.randn(2, 6, 4), torch.randn(2, 6)
    expected = torch.einsum("tbhn,hmn->bhtm", x.view(5, 3, 2, 4), weight) + bias[:, None]
    torch.testing.assert_close(by_sentence(per_head_linear(by_head(x, 2), weight, bias), x), expected)


@pytest.mark.parametrize("columns", [3, 5, 12])
def test_columns_of_an_outer_product(columns):
    """Fewer columns than one group has, some groups, and more than a b, where they begin again."""
    factors = torch.randn(2, 1, 4, 5)
    found = Logits([Outer(factors, left_size=2)]).total(columns)
    for j in range(columns):
        torch.testing.assert_close(found[..., j], factors[..., j % 6 // 3] * factors[..., 2 + j % 3])
