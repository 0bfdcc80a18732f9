"""The functions of the paper equal their equations, alone and in mixtures, for heads and sentences of all kinds.

Mistakes in a spec, such as an unknown function, are refused.
"""

import re

import pytest
import reference
import torch
from helpers import SPECS, future_mask, make_attention, padding_mask

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


def assert_equal_in_float64(out, expected):
    """Checks that two tensors in double precision differ by rounding alone."""
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def assert_tokens_equal(out, expected, lengths):
    """Checks two outputs (T, B, C) in double precision, at the real tokens of sentences with these lengths."""
    for sentence, length in enumerate(lengths):
        assert_equal_in_float64(out[:length, sentence], expected[:length, sentence])


def decode(module, x):
    """Returns the output of a self-attention that is given the tokens of x (T, B, C) one by one, as in decoding."""
    incremental_state = {}
    outputs = []
    with torch.no_grad():
        for position in range(x.size(0)):
            out, _ = module(x[position : position + 1], incremental_state=incremental_state)
            outputs.append(out)
    return torch.cat(outputs)


def is_future(sentence, row, column):
    """Returns whether a causal mask hides a column from a row. This is an argument of `reference.attention`."""
    return column > row


def has_gradient(parameter):
    """Returns whether a gradient other than 0 has reached a parameter."""
    return parameter.grad is not None and bool(parameter.grad.any())


# ---- the equations


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [[5, 5], [5, 3]])
@pytest.mark.parametrize("mixture", ["convex", "sum"])
@pytest.mark.parametrize("spec", SPECS)
def test_attention_equals_the_equation(spec, mixture, lengths, is_causal, monkeypatch):
    """The plain computation, which is used if weights are needed, and the fast one both equal the equation.

    The fast computation is free to return anything for padding.
    """
    monkeypatch.setattr("fairseq_synth.computations.tiled.PLAIN_LIMIT", 0)
    module = make_attention(spec, mixture).double()
    x = torch.randn(5, 2, 6, dtype=torch.float64)
    masks = {}
    if lengths == [5, 3]:
        masks["key_padding_mask"] = padding_mask(lengths)
    if is_causal:
        masks["attn_mask"] = future_mask(5, dtype=torch.float64)

    def is_hidden(sentence, row, column):
        """Returns whether the masks hide a column from a row."""
        is_padding = column >= lengths[sentence]
        return is_padding or (is_causal and is_future(sentence, row, column))

    expected = reference.attention(module, x, is_hidden)
    plain_out, _ = module(x, x, x, need_weights=True, **masks)
    assert_equal_in_float64(plain_out, expected)
    fast_out, _ = module(x, x, x, **masks)
    assert_tokens_equal(fast_out, expected, lengths)


@pytest.mark.parametrize("spec", [*SYNTHESIZERS, "random+dense+vanilla"])
def test_gradients_equal_finite_differences(spec):
    """The gradients are those for the input and for every trained parameter.

    The bias of the keys adds the same number to a whole row of S, so its gradient is 0, and its finite differences are
    noise around 0.
    """
    module = make_attention(spec, embed_dim=4, max_length=4, rank=2).double()
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    padding = padding_mask([3, 2])

    def attend(x, *parameters):
        """Returns the output of the module, which reads the parameters itself."""
        out, _ = module(x, x, x, key_padding_mask=padding)
        return out

    assert torch.autograd.gradcheck(attend, (x, *module.parameters()), atol=1e-6)


@pytest.mark.parametrize("name", SYNTHESIZERS)
@pytest.mark.parametrize("start, columns", [(4, 7), (6, 9), (0, 1)])
def test_logits_of_later_rows_are_a_part_of_all_logits(name, start, columns):
    """Two rows from `start` on, and the first columns, are computed alone."""
    module = make_attention(name)
    x = torch.randn(9, 2, 6)
    q = torch.randn(2, 2, 9, 3)  # (B, H, T, d_h), as k
    k = torch.randn(2, 2, 9, 3)

    def compute_scores(first_row, num_rows, num_columns):
        """Returns the logits (2, 2, num_rows, num_columns) of some rows, for the first columns."""
        rows = slice(first_row, first_row + num_rows)
        queries = q[:, :, rows]
        keys = k[:, :, :num_columns]  # A key belongs to a column.
        inputs = Inputs(x[rows], q=queries, k=keys, start=first_row, src_len=num_columns)
        (logits,) = module.synthesizer(inputs)
        # Logits that are the same for all sentences have the size 1 in this dimension.
        return logits.total(num_columns).expand(2, 2, num_rows, num_columns)

    all_scores = compute_scores(first_row=0, num_rows=9, num_columns=9)
    part = compute_scores(first_row=start, num_rows=2, num_columns=columns)
    torch.testing.assert_close(part, all_scores[:, :, start : start + 2, :columns])


@pytest.mark.parametrize("spec", SPECS)
def test_all_parameters_learn(spec):
    """A gradient reaches every parameter. The matrix of fixed_random is no parameter."""
    module = make_attention(spec, max_length=6)
    x = torch.randn(6, 3, 6)
    out, _ = module(x, x, x)
    (out**2).sum().backward()
    for name, parameter in module.named_parameters():
        if name.endswith("k_proj.bias"):
            continue  # it is constant along a row, and so softmax does not see it, in fairseq either
        assert has_gradient(parameter), name
    if "fixed_random" in module.synthesizer.components:
        fixed_random = module.synthesizer.components["fixed_random"]
        assert not fixed_random.is_trained()
        assert "R" in fixed_random.state_dict()


@pytest.mark.parametrize("name", [name for name in SYNTHESIZERS if name not in ("fixed_random", "vanilla")])
def test_a_function_with_zero_logits_still_learns(name):
    module = make_attention(name)
    component = module.synthesizer.components[name]
    component.zero_logits_()
    (logits,) = module.synthesizer(Inputs(torch.randn(6, 2, 6), q=None, k=None, start=0, src_len=6))
    scores = logits.total(6)
    assert torch.count_nonzero(scores) == 0
    (scores * torch.randn_like(scores)).sum().backward()
    assert any(has_gradient(parameter) for parameter in component.parameters())


# ---- heads of different kinds


@pytest.fixture(
    params=[
        "random:1/vanilla:2",
        "dense+vanilla:1/random:1/vanilla:1",
        "factorized_random:3",
        "random:1/dense+vanilla:2",
    ]
)
def spec_of_heads(request):
    """Returns a spec that gives three heads different functions."""
    return request.param


def make_attention_with_three_heads(spec, **options):
    """Returns a self-attention with three heads of width 2, in double precision, for sentences of up to 5 tokens.

    Args:
        spec: the functions of the heads.
        options: other arguments of `make_attention`.
    """
    return make_attention(spec, num_heads=3, embed_dim=6, max_length=5, **options).double()


@pytest.mark.parametrize(
    "spec, heads_with_queries",
    [
        ("random:1/vanilla:2", 2),
        ("dense+vanilla:1/random:1/vanilla:1", 2),
        ("factorized_random:3", 0),
        ("random:1/dense+vanilla:2", 2),
    ],
)
def test_only_heads_that_read_queries_and_keys_have_them(spec, heads_with_queries):
    module = make_attention_with_three_heads(spec)
    head_dim = 2
    for projection in (module.q_proj, module.k_proj):
        if heads_with_queries == 0:
            assert projection is None
        else:
            assert projection.weight.size(0) == head_dim * heads_with_queries


def test_heads_of_different_kinds_equal_the_equation(spec_of_heads):
    """This holds without and with weights, and in decoding."""
    module = make_attention_with_three_heads(spec_of_heads)
    x = torch.randn(5, 2, 6, dtype=torch.float64)
    expected = reference.attention(module, x, is_future)
    out, _ = module(x, attn_mask=causal_mask(x))
    assert_equal_in_float64(out, expected)
    out, weights = module(x, attn_mask=causal_mask(x), need_head_weights=True)
    assert_equal_in_float64(out, expected)
    assert weights.shape == (3, 2, 5, 5)
    assert_equal_in_float64(decode(module, x), expected)


def test_heads_of_different_kinds_learn(spec_of_heads):
    module = make_attention_with_three_heads(spec_of_heads).train()
    x = torch.randn(5, 2, 6, dtype=torch.float64, requires_grad=True)
    out, _ = module(x)
    out.square().sum().backward()
    for name, parameter in module.named_parameters():
        assert name == "k_proj.bias" or has_gradient(parameter), name


def test_heads_of_different_kinds_are_loaded_from_a_checkpoint(spec_of_heads):
    module = make_attention_with_three_heads(spec_of_heads)
    loaded = make_attention_with_three_heads(spec_of_heads, seed=1)
    loaded.load_state_dict(module.state_dict())
    x = torch.randn(5, 2, 6, dtype=torch.float64)
    torch.testing.assert_close(loaded(x)[0], module(x)[0])


@pytest.mark.parametrize(
    "spec_of_checkpoint, spec_of_model, message",
    [
        (
            "random:1/vanilla:2",
            "random+vanilla",
            "the checkpoint has weights of random (group 1 of the heads), and query and key projections, "
            "but this model has random and vanilla;",
        ),
        (
            "random+vanilla",
            "random:1/vanilla:2",
            "the checkpoint has weights of random, and query and key projections, "
            "but this model has random (group 1 of the heads) and vanilla (group 2 of the heads);",
        ),
        ("vanilla", "random:1/vanilla:2", "the checkpoint has dot-product attention in all heads"),
        (
            "random:1/vanilla:2",
            "random:2/vanilla:1",
            "R is (1, 12, 12) in the checkpoint and (2, 12, 12) in this model",
        ),
    ],
)
def test_a_checkpoint_with_other_heads_is_refused(spec_of_checkpoint, spec_of_model, message):
    """The message says what the checkpoint has, and what the model has."""
    checkpoint = make_attention(spec_of_checkpoint, num_heads=3, embed_dim=6).state_dict()
    module = make_attention(spec_of_model, num_heads=3, embed_dim=6)
    with pytest.raises(SynthesizerError, match=re.escape(message)):
        module.load_state_dict(checkpoint)


def test_a_spec_divides_the_heads_into_groups():
    assert parse_heads("random", 8) == ((8, ("random",)),)
    assert parse_heads(" random : 6 / vanilla+dense : 2 ", 8) == ((6, ("random",)), (2, ("dense", "vanilla")))
    assert parse_heads("random/vanilla", 8) == ((4, ("random",)), (4, ("vanilla",)))


@pytest.mark.parametrize(
    "spec, message",
    [
        ("random:4/vanilla:2", "4 . 2 heads do not add up to the 8 attention heads"),
        ("random/dense/vanilla", "8 heads cannot be divided equally among 3"),
        ("random:4/vanilla", "give every group its number"),
        ("random:0/vanilla:8", "give every group its number"),
        ("random:-1/vanilla:9", "give every group its number"),
        ("random:8/randm:0", "unknown function 'randm'"),
        ("random:7", "7 heads do not add up to the 8"),
    ],
)
def test_heads_that_do_not_add_up_are_refused(spec, message):
    with pytest.raises(SynthesizerError, match=f"^--decoder-synthesizer '.*{message}"):
        parse_heads(spec, 8, "--decoder-synthesizer")


# ---- sentences that are longer than l


@pytest.mark.parametrize("start, count", [(0, 5), (1, 3), (3, 4), (7, 12), (0, 11)])
def test_position_p_takes_entry_p_modulo_the_length(start, count):
    entries = torch.arange(10).view(2, 5)
    columns = [position % 5 for position in range(start, start + count)]
    assert torch.equal(take_positions(entries, 1, start, count), entries[:, columns])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [3, 4, 5, 12])
@pytest.mark.parametrize("spec", [*SYNTHESIZERS, "random+fixed_random+factorized_dense", "dense+vanilla"])
def test_tiled_attention_equals_the_equation(spec, length, is_causal, monkeypatch):
    """The maximum length l is 4, and sentences have l - 1, l, l + 1 and 3 l tokens. Each computation is tested.

    Beyond l tokens the parameters begin again. A second sentence has two tokens less, and padding behind them.
    """
    module = make_attention(spec, max_length=4, beyond_length="tile").double()
    x = torch.randn(length, 2, 6, dtype=torch.float64)
    lengths = [length, length - 2]
    padding = padding_mask(lengths)
    mask = causal_mask(x) if is_causal else None

    def is_hidden(sentence, row, column):
        """Returns whether the masks hide a column from a row."""
        is_padding = column >= lengths[sentence]
        return is_padding or (is_causal and is_future(sentence, row, column))

    expected = reference.attention(module, x, is_hidden)
    # An attention that has to return its weights computes them as a whole.
    out, _ = module(x, key_padding_mask=padding, attn_mask=mask, need_weights=True)
    assert_tokens_equal(out, expected, lengths)
    # Otherwise the weights are computed by tiles if there are more of them than PLAIN_LIMIT.
    for plain_limit in (0, 1 << 18):  # by tiles, and without them
        monkeypatch.setattr("fairseq_synth.computations.tiled.PLAIN_LIMIT", plain_limit)
        out, _ = module(x, key_padding_mask=padding, attn_mask=mask)
        assert_tokens_equal(out, expected, lengths)


@pytest.mark.parametrize("length", [3, 4, 5, 12])
@pytest.mark.parametrize("spec", [*SYNTHESIZERS, "random+fixed_random+factorized_dense", "dense+vanilla"])
def test_tiled_decoding_equals_the_equation(spec, length):
    module = make_attention(spec, max_length=4, beyond_length="tile").double()
    x = torch.randn(length, 2, 6, dtype=torch.float64)
    expected = reference.attention(module, x, is_future)
    assert_equal_in_float64(decode(module, x), expected)


@pytest.mark.parametrize("spec", SYNTHESIZERS)
def test_gradients_of_tiled_parameters_equal_finite_differences(spec, monkeypatch):
    """The gradient of an entry is the sum over the places where it is used. It is computed by tiles.

    The parameters are those of sentences of 4 tokens. The sentences have 6, so that entries are used several times.
    """
    # The plain computation would take calls with at most PLAIN_LIMIT logits.
    monkeypatch.setattr("fairseq_synth.computations.tiled.PLAIN_LIMIT", 0)
    module = make_attention(spec, embed_dim=4, max_length=4, rank=2, beyond_length="tile").double()
    x = torch.randn(6, 2, 4, dtype=torch.float64, requires_grad=True)

    def attend(x, *parameters):
        """Returns the output of the module.

        gradcheck changes x and the parameters in place, by a little, and the module reads its parameters itself. They
        are arguments because gradcheck differentiates by the arguments.
        """
        out, _ = module(x)
        return out

    assert torch.autograd.gradcheck(attend, (x, *module.parameters()), atol=1e-6)


@pytest.mark.parametrize("spec", [name for name in SYNTHESIZERS if SYNTHESIZERS[name].has_max_length])
def test_functions_with_a_maximum_length_refuse_longer_sentences(spec):
    """They refuse them in decoding, too, as soon as the last token is given."""
    module = make_attention(spec, max_length=4)
    x = torch.randn(5, 2, 6)
    with pytest.raises(ValueError, match="5 tokens is longer than max_length 4"):
        module(x)
    incremental_state = {}
    module(x[:4], incremental_state=incremental_state)
    with pytest.raises(ValueError, match="5 tokens"):
        module(x[4:], incremental_state=incremental_state)


@pytest.mark.parametrize("spec", [name for name in SYNTHESIZERS if not SYNTHESIZERS[name].has_max_length])
def test_functions_without_a_maximum_length_take_any_length(spec):
    module = make_attention(spec, max_length=4)
    x = torch.randn(5, 2, 6)
    out, _ = module(x)
    assert out.shape == x.shape


# ---- mixtures


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "+" in spec])
def test_convex_weights_start_equal_and_are_trained(spec):
    mixture = Mixture(parse_spec(spec), "convex", num_heads=2, head_dim=3, max_length=12, rank=3)
    mixture.reset_parameters()
    number_of_components = len(spec.split("+"))
    assert mixture.alpha.shape == (number_of_components, 2)
    assert mixture.alpha.requires_grad
    equal_weights = torch.full((number_of_components, 2), 1 / number_of_components)
    torch.testing.assert_close(torch.softmax(mixture.alpha, 0), equal_weights)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "+" in spec])
def test_convex_weights_sum_to_one_in_every_head(spec):
    """If all components have the same logits, the mixture has these logits exactly when its weights sum to 1."""
    module = make_attention(spec)
    ones = torch.ones(1, 2, 4, 4)

    def return_ones(inputs):
        """Stands in for the forward method of each component."""
        return [Bias(ones)]

    for component in module.synthesizer.components.values():
        component.forward = return_ones
    (logits,) = module.synthesizer(Inputs(torch.zeros(4, 1, 6), q=None, k=None, start=0, src_len=4))
    torch.testing.assert_close(logits.total(4), ones)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "+" in spec])
def test_a_sum_has_no_weights(spec):
    assert make_attention(spec, "sum").synthesizer.alpha is None


def test_the_order_in_which_functions_are_registered_has_no_meaning(restore_registry):
    """The rows of alpha are sorted by the names of the functions, so that later releases can load a checkpoint."""
    spec = "random+dense+vanilla"
    module = make_attention(spec)
    for name in sorted(SYNTHESIZERS):
        SYNTHESIZERS[name] = SYNTHESIZERS.pop(name)  # moves it to the end
    loaded = make_attention(spec, seed=1)
    loaded.load_state_dict(module.state_dict())
    x = torch.randn(5, 2, 6)
    assert torch.equal(loaded(x)[0], module(x)[0])


def test_new_functions_come_after_the_papers_functions(restore_registry):
    SYNTHESIZERS["a"] = SYNTHESIZERS["random"]
    SYNTHESIZERS["b"] = SYNTHESIZERS["random"]
    assert parse_spec("b+vanilla+a+random") == ("random", "vanilla", "a", "b")
    assert parse_spec("+".join(reversed(ALPHA_ORDER))) == ALPHA_ORDER


@pytest.mark.parametrize("spec", ["vanilla+random", "random + vanilla"])
def test_a_spec_names_functions_in_any_order(spec):
    assert parse_spec(spec) == ("random", "vanilla")


def test_a_function_cannot_be_mixed_with_itself():
    with pytest.raises(SynthesizerError, match="twice"):
        parse_spec("random+random")


def test_an_unknown_kind_of_mixture_lists_the_valid_ones():
    with pytest.raises(SynthesizerError, match="convex, sum"):
        Mixture(("random",), "product", num_heads=2, head_dim=3, max_length=12, rank=3)


@pytest.mark.parametrize("spec", ["randm", "random+", "", "random+randm", "Random"])
def test_an_unknown_function_lists_the_valid_ones(spec):
    with pytest.raises(SynthesizerError) as error:
        parse_spec(spec, "--decoder-synthesizer")
    message = str(error.value)
    assert "--decoder-synthesizer" in message
    for name in SYNTHESIZERS:
        assert name in message
    assert "\n" not in message


# ---- sizes, and the factors of factorized_dense


@pytest.mark.parametrize("length, factors", [(256, (16, 16)), (100, (10, 10)), (24, (4, 6)), (6, (2, 3)), (4, (2, 2))])
def test_a_length_is_a_product_of_two_similar_factors(length, factors):
    assert factorize(length) == factors


@pytest.mark.parametrize("length", [1, 2, 3, 13, 251])
def test_a_prime_length_is_refused_with_a_length_that_works(length):
    with pytest.raises(SynthesizerError, match=f"--synth-max-length {length}: .*product a\\*b") as error:
        factorize(length)
    suggestion = re.search(r"use (\d+),", str(error.value))
    suggested_length = int(suggestion[1])
    factorize(suggested_length)  # raises no error


def test_factorized_dense_has_distinct_columns():
    """One factor is repeated as a whole and the other entry by entry. If both were repeated alike, 16 would differ."""
    torch.manual_seed(0)
    module = FactorizedDense(num_heads=1, head_dim=4, max_length=256, rank=8)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    terms = module(Inputs(torch.randn(1, 1, 4), q=None, k=None, start=0, src_len=256))
    row = Logits(terms).total(256).flatten()
    assert row.unique().numel() == 256


@pytest.mark.parametrize("columns", [3, 5, 12])
def test_columns_of_an_outer_product(columns):
    """Column j = (u, v) of the product of 2 and 3 factors. There are fewer columns than 6, or they begin again."""
    factors = torch.randn(2, 1, 4, 5)
    left = factors[..., :2]
    right = factors[..., 2:]
    product = Logits([Outer(factors, left_size=2)]).total(columns)
    for column in range(columns):
        u, v = divmod(column % 6, 3)
        torch.testing.assert_close(product[..., column], left[..., u] * right[..., v])


# ---- initial values, and linear layers of heads


@pytest.mark.parametrize("name", SYNTHESIZERS)
def test_every_weight_has_an_initial_value(name):
    """It is a finite number in each place of each parameter and buffer."""
    module = SYNTHESIZERS[name](num_heads=2, head_dim=6, max_length=12, rank=8)
    tensors = list(module.state_dict().values())
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(float("nan"))
    module.reset_parameters()
    for tensor in tensors:
        assert torch.isfinite(tensor).all()


def test_both_parts_of_factorized_dense_start_within_their_own_bounds():
    """The rows of W2 are two matrices, one for each factor, with Glorot's bound for the size of each."""
    module = SYNTHESIZERS["factorized_dense"](num_heads=2, head_dim=6, max_length=12, rank=8)
    module.reset_parameters()
    left, right = module.state_dict()["W2"].split([module.a, module.b], dim=1)
    for part in (left, right):
        bound = (6 / (part.size(1) + 6)) ** 0.5
        assert 0.8 * bound < part.abs().max() <= bound


def test_glorot_bounds_are_those_of_one_head():
    weight = torch.empty(3, 100, 20)
    glorot_uniform_(weight)
    bound = (6 / (100 + 20)) ** 0.5
    assert weight.abs().max() <= bound
    standard_deviation = torch.tensor(bound / 3**0.5)
    torch.testing.assert_close(weight.std(), standard_deviation, rtol=0.05, atol=0)


def test_the_matrix_of_a_head_multiplies_its_slice_of_each_token():
    x = torch.randn(5, 3, 8)
    weight = torch.randn(2, 6, 4)
    bias = torch.randn(2, 6)
    slices = x.view(5, 3, 2, 4)
    expected = torch.einsum("tbhn,hmn->bhtm", slices, weight) + bias[:, None]
    out = by_sentence(per_head_linear(by_head(x, 2), weight, bias), x)
    torch.testing.assert_close(out, expected)
