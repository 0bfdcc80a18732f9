"""SyntheticAttention around its functions: projections, masks, dropout, weights, cache, precision, generation.

test_synthesizers.py tests the functions, which compute the logits.
"""

import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema.ema import EMA
from fairseq.modules import MultiheadAttention
from helpers import SPECS, Columns, Distance, future_mask, make_attention, padding_mask

from fairseq_synth import attention, logits, synthesizers
from fairseq_synth.errors import SynthesizerError
from fairseq_synth.logits import Bias, Product
from fairseq_synth.masks import causal_mask, masked_softmax
from fairseq_synth.synthesizers import SYNTHESIZERS

pytestmark = pytest.mark.usefixtures("on_device")


def decode(module, x):
    """Returns the output of a self-attention that is given the tokens of x (T, B, C) one by one, as in decoding."""
    incremental_state = {}
    outputs = []
    for position in range(x.size(0)):
        out, _ = module(x[position : position + 1], incremental_state=incremental_state)
        outputs.append(out)
    return torch.cat(outputs)


def attend_causally(module, x):
    """Returns the output of a self-attention whose rows see no later columns, for all tokens of x (T, B, C) at once."""
    out, _ = module(x, attn_mask=future_mask(x.size(0)))
    return out


def do_nothing(*arguments):
    """Does nothing. It is used as a hook without effect."""


# ---- queries, keys and values


@pytest.fixture(params=["vanilla", "random+vanilla", "random:1/vanilla:1"])
def module_with_queries(request):
    """Returns an attention in training mode, with two heads of width 3, of which one or both have queries."""
    return make_attention(request.param).double().train()


@pytest.fixture
def rows_of_weights(monkeypatch):
    """Returns a list to which every product with a weight, F.linear, adds the number of the weight's rows."""
    rows_of_weights = []
    original_linear = F.linear

    def linear(x, weight, bias):
        """Stands in for F.linear, and notes the number of rows."""
        rows_of_weights.append(len(weight))
        return original_linear(x, weight, bias)

    monkeypatch.setattr(attention.F, "linear", linear)
    return rows_of_weights


def project_and_differentiate(module, x):
    """Returns queries, keys and values, and the gradients of the sum of their squares for x and all parameters."""
    queries, keys, values, *_ = module.project(x)
    sum_of_squares = (queries**2).sum() + (keys**2).sum() + (values**2).sum()
    parameters = [*module.q_proj.parameters(), *module.k_proj.parameters(), *module.v_proj.parameters()]
    gradients = torch.autograd.grad(sum_of_squares, [x, *parameters])
    return [queries, keys, values, *gradients]


def test_queries_keys_and_values_are_one_product_in_training(module_with_queries, rows_of_weights):
    module = module_with_queries
    heads = module.num_query_heads
    x = torch.randn(5, 3, 6).double().requires_grad_()
    queries, keys, values, *_ = module.project(x)
    assert rows_of_weights == [3 * heads + 3 * heads + 6]
    assert queries.shape == (3, heads, 5, 3)
    assert keys.shape == (3, heads, 5, 3)
    assert values.shape == (3, 2, 5, 3)


def test_queries_keys_and_values_are_three_products_in_evaluation(module_with_queries, rows_of_weights):
    module = module_with_queries
    heads = module.num_query_heads
    x = torch.randn(5, 3, 6).double().requires_grad_()
    expected = module.project(x)[:3]
    rows_of_weights.clear()
    torch.testing.assert_close(module.eval().project(x)[:3], expected)
    assert rows_of_weights == [3 * heads, 3 * heads, 6]


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_a_projection_with_a_hook_is_called(register, module_with_queries, rows_of_weights):
    """In training the three projections are one product, but not if one of them has a hook, which would not be called.

    The results are the same. `rows_of_weights` lists the products: each entry is the number of rows of the weight.
    """
    module = module_with_queries
    rows_of_queries = 3 * module.num_query_heads  # The heads have the width 3.
    rows_of_keys = 3 * module.num_query_heads
    rows_of_values = 6
    x = torch.randn(5, 3, 6).double().requires_grad_()
    expected = project_and_differentiate(module, x)
    rows_of_weights.clear()
    register_hook = getattr(module.k_proj, register)
    register_hook(do_nothing)
    torch.testing.assert_close(project_and_differentiate(module, x), expected)
    assert rows_of_weights == [rows_of_queries, rows_of_keys, rows_of_values]


def test_a_projection_with_another_forward_is_called(module_with_queries, rows_of_weights):
    module = module_with_queries
    heads = module.num_query_heads
    # The method of the class becomes an attribute of the object, as if it were another function.
    module.k_proj.forward = module.k_proj.forward
    module.project(torch.randn(5, 3, 6).double())
    assert rows_of_weights == [3 * heads, 3 * heads, 6]


class DoubledLinear(torch.nn.Linear):
    """A projection that is not just a product with its weight."""

    def forward(self, x):
        """Returns twice the product with the weight."""
        return 2 * super().forward(x)


@pytest.mark.parametrize("is_doubled", [False, True])
def test_a_projection_of_another_kind_is_called(is_doubled, module_with_queries):
    """The projection is of another class, or it has no bias."""
    module = module_with_queries
    width = 3 * module.num_query_heads
    projection = DoubledLinear(6, width) if is_doubled else torch.nn.Linear(6, width, bias=False)
    module.k_proj = projection.double()
    x = torch.randn(5, 3, 6).double()
    keys = module.project(x)[1]
    assert torch.equal(keys, module.split_heads(module.k_proj(x)))


def test_weights_that_are_no_parameters():
    """In sharded layers, weights are views of one flat parameter."""
    module = make_attention("random+vanilla").train()
    x = torch.randn(5, 3, 6)
    expected, _ = module(x)
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            setattr(part, name, parameter.view_as(parameter))
    assert not list(module.parameters())
    out, _ = module(x)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    "name, kind",
    [
        # modules whose outputs are no tensors cannot have backward hooks
        ("synthesizer", "forward_pre_hook"),
        ("synthesizer", "forward_hook"),
        ("synthesizer.components.random", "forward_pre_hook"),
        ("synthesizer.components.random", "forward_hook"),
        ("out_proj", "forward_pre_hook"),
        ("out_proj", "forward_hook"),
        ("out_proj", "full_backward_pre_hook"),
        ("out_proj", "full_backward_hook"),
    ],
)
def test_a_hook_of_an_inner_module_is_called_once(name, kind):
    """The attention calls the module even if it could compute the same without it."""
    module = make_attention("random+vanilla")
    hook = mock.Mock(return_value=None)
    register = getattr(module.get_submodule(name), f"register_{kind}")
    register(hook)
    x = torch.randn(5, 3, 6, requires_grad=True)
    out, _ = module(x)
    assert out.shape == x.shape
    out.sum().backward()
    hook.assert_called_once()


def test_a_key_or_value_that_is_not_the_query_is_refused():
    """Self-attention has one input. A view of all of it is the same input."""
    module = make_attention("random+vanilla")
    x = torch.randn(3, 2, 6)
    module(x, x[:], x.view_as(x))
    for different_input in (torch.randn(3, 2, 6), x.clone(), x[:2], x.transpose(0, 1)):
        with pytest.raises(ValueError, match="key: must be the same tensor as query"):
            module(x, different_input, x)
        with pytest.raises(ValueError, match="value: must be the same tensor as query"):
            module(x, x, different_input)


@pytest.mark.parametrize(
    "embed_dim, num_heads, heads_of_synthesizer, width_of_synthesizer, message",
    [
        (8, 2, 2, 2, "the synthesizer has 2 heads of width 2, and the attention has 2 of width 4"),
        (8, 2, 1, 4, "the synthesizer has 1 heads of width 4, and the attention has 2 of width 4"),
        (9, 2, 2, 4, "embed_dim 9 is not a multiple of num_heads 2"),
    ],
)
def test_a_synthesizer_of_other_heads_is_refused(
    embed_dim, num_heads, heads_of_synthesizer, width_of_synthesizer, message
):
    """The attention would compute something else, without an error if the sizes fit by chance."""
    mixture = synthesizers.Mixture(
        ("random", "vanilla"), "convex", heads_of_synthesizer, width_of_synthesizer, max_length=5, rank=2
    )
    with pytest.raises(ValueError, match=message):
        attention.SyntheticAttention(embed_dim, num_heads, mixture)


@pytest.mark.parametrize("spec", SPECS)
def test_an_empty_batch_has_an_empty_output(spec):
    out, _ = make_attention(spec)(torch.zeros(5, 0, 6))
    assert out.shape == (5, 0, 6)


@pytest.mark.parametrize("spec", ["dense", "factorized_dense", "random+vanilla"])
def test_second_derivatives_equal_finite_differences(spec):
    """The plain computation has second derivatives, as docs/limits.md says.

    They are the gradients of the sum of the squares of all gradients. Each is compared along a random direction.
    """
    module = make_attention(spec).double().train()
    x = torch.randn(4, 2, 6).double().requires_grad_()
    inputs = [x, *module.parameters()]

    def sum_squares_of_gradients():
        """Returns the number whose derivatives are compared."""
        out, _ = module(x, need_weights=True)
        gradients = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return sum(gradient.square().sum() for gradient in gradients)

    second_derivatives = torch.autograd.grad(sum_squares_of_gradients(), inputs)
    step = 1e-5
    for tensor, derivative in zip(inputs, second_derivatives):
        direction = torch.randn_like(tensor)
        tensor.data.add_(step * direction)
        value_after = sum_squares_of_gradients().detach()
        tensor.data.sub_(2 * step * direction)
        value_before = sum_squares_of_gradients().detach()
        tensor.data.add_(step * direction)  # back to where it was
        slope = (value_after - value_before) / (2 * step)
        torch.testing.assert_close((derivative * direction).sum(), slope, rtol=1e-4, atol=1e-4)


# ---- masks


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sentence_of_padding_alone_changes_no_other_sentence(spec, dtype):
    """The output for padding is out_proj(0) if weights are needed, and any finite numbers if they are not."""
    module = make_attention(spec).to(dtype)
    x = torch.randn(4, 2, 6).to(dtype).requires_grad_()
    padding = torch.tensor([[False] * 4, [True] * 4])
    out, weights = module(x, x, x, key_padding_mask=padding, need_weights=True)
    assert torch.equal(out[:, 1], module.out_proj.bias.expand(4, 6))
    assert torch.count_nonzero(weights[1]) == 0
    out_without_weights, _ = module(x, x, x, key_padding_mask=padding)
    assert torch.isfinite(out_without_weights).all()

    first_sentence = x[:, :1]
    expected, _ = module(first_sentence, first_sentence, first_sentence)
    rounding = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out[:, :1], expected, atol=rounding, rtol=0)
    torch.testing.assert_close(out_without_weights[:, :1], expected, atol=rounding, rtol=0)

    (out + out_without_weights).float().sum().backward()
    assert torch.isfinite(x.grad).all()
    for parameter in module.parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all()


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("spec", ["random", "random+vanilla"])
def test_the_output_of_a_row_that_sees_no_key_is_that_of_zero_values(spec, need_weights):
    module = make_attention(spec).eval()
    x = torch.randn(5, 3, 6)
    hidden = torch.zeros(5, 5, dtype=torch.bool)
    hidden[2] = True
    out, _ = module(x, attn_mask=hidden, need_weights=need_weights)
    torch.testing.assert_close(out[2], module.out_proj(torch.zeros(3, 6)))
    assert not torch.allclose(out[1], out[2])


def test_weights_of_a_row_that_sees_no_key_are_zero():
    """They are not NaN. With padding on the left, a causal mask leaves the first rows without any key."""
    scores = torch.randn(1, 1, 3, 3, requires_grad=True)
    padding = torch.tensor([[True, False, False]])
    weights = masked_softmax(scores, padding, future_mask(3))
    assert torch.equal(weights[0, 0, 0], torch.zeros(3))
    assert weights[0, 0, 1, 1] == 1
    weights.square().sum().backward()
    assert torch.isfinite(scores.grad).all()
    assert torch.count_nonzero(scores.grad[0, 0, 0]) == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_weights_are_zero_if_everything_is_hidden(dtype):
    scores = torch.randn(1, 1, 3, 3)
    if dtype == torch.bool:
        mask = torch.ones(3, 3, dtype=torch.bool)
    else:
        mask = torch.full((3, 3), float("-inf"))
    assert torch.count_nonzero(masked_softmax(scores, None, mask)) == 0


def make_hidden_keys():
    """Returns a mask (4, 4) that hides some keys, but from no row all of them."""
    hidden = torch.rand(4, 4) < 0.4
    hidden.fill_diagonal_(False)
    return hidden


@pytest.mark.parametrize("value", [float("-inf"), -1e8])
def test_a_mask_of_very_low_numbers_hides_keys(value):
    """-1e8 is the number that fairseq's encoder adds."""
    scores = torch.randn(2, 2, 4, 4)
    hidden = make_hidden_keys()
    mask = torch.zeros(4, 4).masked_fill(hidden, value)
    expected = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
    torch.testing.assert_close(masked_softmax(scores, None, mask), expected)


def test_a_boolean_mask_hides_keys():
    scores = torch.randn(2, 2, 4, 4)
    hidden = make_hidden_keys()
    expected = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
    torch.testing.assert_close(masked_softmax(scores, None, hidden), expected)
    half = masked_softmax(scores.half(), None, hidden)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), expected, atol=1e-3, rtol=1e-3)


def test_a_mask_of_finite_numbers_is_added():
    scores = torch.randn(2, 2, 4, 4)
    bias = torch.randn(4, 4)
    torch.testing.assert_close(masked_softmax(scores, None, bias), torch.softmax(scores + bias, -1))


def test_a_mask_of_numbers_is_added_in_single_precision():
    """bf16 does not have the number 256.5."""
    scores = torch.full((1, 1, 1, 2), 256.0).bfloat16()
    mask = torch.tensor([[0.0, 0.5]]).bfloat16()
    expected = torch.softmax(torch.tensor([0.0, 0.5]), -1)
    torch.testing.assert_close(masked_softmax(scores, None, mask).flatten(), expected)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.long])
@pytest.mark.parametrize("spec", ["vanilla", "random+vanilla"])
def test_masks_of_integers_hide_like_boolean_masks(spec, dtype, need_weights, is_causal):
    module = make_attention(spec)
    x = torch.randn(4, 3, 6)
    padding = padding_mask([4, 2, 3])
    mask = torch.ones(4, 4).triu(1).bool() if is_causal else None
    mask_of_integers = mask.to(dtype) if is_causal else None
    expected, _ = module(x, key_padding_mask=padding, attn_mask=mask, need_weights=need_weights)
    out, _ = module(x, key_padding_mask=padding.to(dtype), attn_mask=mask_of_integers, need_weights=need_weights)
    torch.testing.assert_close(out, expected)


def test_the_causal_mask_is_for_whole_sentences():
    module = make_attention("random")
    with pytest.raises(ValueError, match="attn_mask: causal_mask is for whole sentences"):
        module(torch.randn(1, 2, 6), incremental_state={}, attn_mask=causal_mask(torch.zeros(1)))


@pytest.mark.parametrize("spec", ["vanilla", "random+vanilla"])
def test_the_causal_mask_is_for_padding_behind_the_sentences(spec):
    module = make_attention(spec).eval()
    x = torch.randn(5, 2, 6)
    padding_on_the_left = padding_mask([5, 3]).flip(1)
    with pytest.raises(ValueError, match="key_padding_mask: with causal_mask, all padding must be at the end"):
        module(x, key_padding_mask=padding_on_the_left, attn_mask=causal_mask(x))


@pytest.mark.parametrize("is_on_the_left", [False, True])
@pytest.mark.parametrize("spec", ["vanilla", "random+vanilla"])
def test_padding_under_the_causal_mask_has_the_same_output_with_and_without_weights(spec, is_on_the_left, monkeypatch):
    """This holds for padding on the left, too, which only a CPU refuses."""
    monkeypatch.setattr("fairseq_synth.masks.on_cpu", lambda _: False)
    module = make_attention(spec).eval()
    x = torch.randn(5, 2, 6)
    padding = padding_mask([5, 3])
    if is_on_the_left:
        padding = padding.flip(1)
    out, _ = module(x, key_padding_mask=padding, attn_mask=causal_mask(x))
    out_with_weights, _ = module(x, key_padding_mask=padding, attn_mask=causal_mask(x), need_weights=True)
    torch.testing.assert_close(out, out_with_weights)


# ---- weights, dropout, logits of several shapes


@pytest.mark.parametrize("spec", SPECS)
def test_weights_have_the_shapes_of_fairseqs_attention_and_rows_that_sum_to_1(spec):
    module = make_attention(spec)
    x = torch.randn(4, 3, 6)
    out, no_weights = module(x, x, x)
    out_with_weights, mean_weights = module(x, x, x, need_weights=True)
    _, weights_of_heads = module(x, x, x, need_head_weights=True)
    assert no_weights is None
    assert mean_weights.shape == (3, 4, 4)
    assert weights_of_heads.shape == (2, 3, 4, 4)
    torch.testing.assert_close(out, out_with_weights)
    torch.testing.assert_close(weights_of_heads.mean(0), mean_weights)
    torch.testing.assert_close(weights_of_heads.sum(-1), torch.ones(2, 3, 4))


@pytest.mark.parametrize("is_step", [False, True])
def test_weights_have_the_type_of_the_layer(is_step):
    """This holds for a whole sentence and for a step of decoding."""
    module = make_attention("random+vanilla").to(torch.bfloat16)
    x = torch.randn(1, 2, 6, dtype=torch.bfloat16)
    incremental_state = {} if is_step else None
    out, weights = module(x, incremental_state=incremental_state, need_weights=True)
    assert out.dtype == torch.bfloat16
    assert weights.dtype == torch.bfloat16


@pytest.mark.parametrize("spec", ["random", "factorized_random", "dense", "random+vanilla", "vanilla"])
def test_the_mean_over_draws_of_dropout_is_the_output_without_dropout(spec):
    """Each of 20,000 equal sentences drops weights of its own."""
    module = make_attention(spec, dropout=0.4)
    x = torch.randn(4, 1, 6).expand(4, 20_000, 6)
    module.eval()
    expected, _ = module(x, x, x)
    module.train()
    torch.manual_seed(0)
    out, _ = module(x, x, x)
    assert not torch.allclose(out[:, 0], out[:, 1], atol=1e-3)
    standard_error = out.std(1) / out.size(1) ** 0.5
    deviation = (out.mean(1) - expected.mean(1)).abs()
    assert (deviation < 5 * standard_error + 1e-6).all()


@pytest.mark.parametrize("spec", ["random", "factorized_random", "dense", "random+vanilla", "vanilla"])
def test_dropout_can_be_retained_in_generation(spec):
    """fairseq has the flag --retain-dropout for this."""
    module = make_attention(spec, dropout=0.4).eval()
    module.dropout_module.make_generation_fast_("x", retain_dropout=True)
    x = torch.randn(4, 1, 6).expand(4, 20_000, 6)
    torch.manual_seed(0)
    out, _ = module(x, x, x)
    assert not torch.allclose(out[:, 0], out[:, 1], atol=1e-3)


def test_a_mask_of_numbers_does_not_switch_dropout_off():
    module = make_attention("random+vanilla", dropout=0.4).train()
    x = torch.randn(4, 1, 6).expand(4, 2, 6)
    torch.manual_seed(0)
    out, _ = module(x, attn_mask=future_mask(4))
    assert not torch.allclose(out[3, 0], out[3, 1], atol=1e-3)


@pytest.mark.parametrize("grad", [False, True])
def test_heads_may_share_their_logits(grad, restore_registry):
    """A function may return logits (1, 1, T, S), the same for all sentences and heads."""
    synthesizers.register_synthesizer("distance")(Distance)
    module = make_attention("distance").eval()
    x = torch.randn(5, 3, 6)
    with torch.set_grad_enabled(grad):
        out = decode(module, x)
    torch.testing.assert_close(out, attend_causally(module, x))
    distances = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    expected = torch.softmax(-distances.float(), dim=1).expand(2, 3, 5, 5)
    _, weights = module(x, need_head_weights=True)
    torch.testing.assert_close(weights, expected)


def make_attentions_with_equal_rows(spec, dropout):
    """Returns two attentions with equal rows of logits: the first computes one row for all rows, the second every row.

    Both have the same parameters, because `make_attention` draws them from the same seed. The caller has to use the
    fixture `restore_registry`, because two functions are registered.

    Args:
        spec: the functions of the first attention, with "columns" in it. The second one has "rows" in its place.
        dropout: the probability of dropping an attention weight.
    """

    class Rows(Columns):
        """Has the same logits as `Columns`, once for each row."""

        def forward(self, inputs):
            """Returns the logits (1, H, T, S)."""
            num_rows = inputs.x.size(0)  # T
            logits_of_columns = self.c[:, : inputs.src_len]  # (H, S)
            row = logits_of_columns.unsqueeze(0).unsqueeze(2)  # (1, H, 1, S)
            return [Bias(row.expand(-1, -1, num_rows, -1))]

    synthesizers.register_synthesizer("columns")(Columns)
    synthesizers.register_synthesizer("rows")(Rows)
    has_dropout = dropout > 0
    one_row = make_attention(spec, dropout=dropout).double().train(has_dropout)
    spec_with_rows = spec.replace("columns", "rows")
    every_row = make_attention(spec_with_rows, dropout=dropout).double().train(has_dropout)
    return one_row, every_row


SPECS_WITH_EQUAL_ROWS = ["columns", "columns:1/random:1", "columns+vanilla", "columns+dense:1/columns:1"]


@pytest.mark.parametrize("mask", ["none", "padding", "causal", "future"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("spec", SPECS_WITH_EQUAL_ROWS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_one_row_of_logits_stands_for_all_rows(spec, dropout, need_weights, mask, restore_registry):
    """A function whose logits depend only on the column may return one row of logits for all rows.

    The results are those of an attention that computes every row. Dropout nevertheless differs from row to row: from
    one seed, the two attentions drop the same weights.
    """
    one_row, every_row = make_attentions_with_equal_rows(spec, dropout)
    x = torch.randn(5, 3, 6).double()
    arguments = {"need_weights": need_weights}
    if mask == "padding":
        arguments["key_padding_mask"] = padding_mask([5, 4, 2])
    elif mask == "causal":
        # The mask of this project, an empty tensor, which computations know without reading numbers.
        arguments["attn_mask"] = causal_mask(x)
    elif mask == "future":
        # fairseq's mask, a matrix with -inf above the diagonal. This case also asks for the weights of each head.
        arguments["attn_mask"] = future_mask(5)
        arguments["need_head_weights"] = need_weights
    torch.manual_seed(0)
    out, weights = one_row(x, **arguments)
    torch.manual_seed(0)
    expected, expected_weights = every_row(x, **arguments)
    assert out.shape == x.shape
    torch.testing.assert_close(out, expected)
    if need_weights:
        torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("spec", SPECS_WITH_EQUAL_ROWS)
def test_one_row_of_logits_stands_for_all_rows_in_decoding(spec, restore_registry):
    module, _ = make_attentions_with_equal_rows(spec, dropout=0.0)
    x = torch.randn(5, 3, 6).double()
    expected, _ = module(x, attn_mask=causal_mask(x))
    torch.testing.assert_close(decode(module, x), expected)


# ---- decoding


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("grad", [False, True])
def test_steps_of_a_beam_search_equal_the_whole_sentence(spec, grad):
    """The search gives one token at a time, with a cache. It reorders, copies and finishes hypotheses."""
    with torch.set_grad_enabled(grad):
        check_steps_of_a_beam_search(make_attention(spec).eval())


def check_steps_of_a_beam_search(module):
    """Checks the output of a self-attention at each step of a search for 9 tokens with 3 hypotheses.

    Hypotheses are reordered before step 4, twice before step 5, and before step 7, when one is finished.

    Each step is given one token of each hypothesis. It has to return what the module returns for this token if it is
    given all tokens at once, under a mask of the future.
    """
    length = 9
    orders_by_step = {
        4: [[2, 0, 0]],  # Hypothesis 0 goes on in two ways, and hypothesis 1 is dropped.
        5: [[0, 1, 2], [2, 0, 0]],  # The first order changes nothing.
        7: [[2, 1]],  # Two hypotheses are left.
    }
    x = torch.randn(length, 3, 6)
    padding = torch.zeros(3, length, dtype=torch.bool)
    padding[1, 2] = True  # a hypothesis that ended; fairseq's search goes on with it
    incremental_state = {}
    for step in range(length):
        for order in orders_by_step.get(step, []):
            module.reorder_incremental_state(incremental_state, torch.tensor(order))
            padding = padding[order]
            # The tokens so far follow the order. Later tokens are drawn anew, so that two hypotheses that go on from
            # the same one differ from here on.
            tokens_so_far = x[:step, order]
            later_tokens = torch.randn(length - step, len(order), 6)
            x = torch.cat([tokens_so_far, later_tokens])
        token = x[step : step + 1]
        padding_of_token = padding[:, step : step + 1]  # (B, 1)
        if not padding_of_token.any():
            padding_of_token = None
        out, _ = module(token, token, token, key_padding_mask=padding_of_token, incremental_state=incremental_state)
        expected, _ = module(x, x, x, attn_mask=future_mask(length), key_padding_mask=padding)
        torch.testing.assert_close(out[0], expected[step])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("spec", ["random", "random+vanilla"])
def test_several_tokens_in_a_step_equal_the_whole_sentence(spec, training):
    """A forced prefix, for example, is given at once. A model in training mode can do it, too."""
    module = make_attention(spec).train(training)
    x = torch.randn(9, 3, 6)
    expected = attend_causally(module, x)
    incremental_state = {}
    outputs = []
    with torch.no_grad():
        for start, end in [(0, 1), (1, 3), (3, 9)]:
            mask = future_mask(9)[start:end, :end]
            out, _ = module(x[start:end], incremental_state=incremental_state, attn_mask=mask)
            outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs), expected)


@pytest.mark.parametrize("spec", SPECS)
def test_the_gradient_of_steps_equals_that_of_the_whole_sentence(spec):
    module = make_attention(spec).eval()
    x = torch.randn(5, 2, 6)
    gradient_of_output = torch.randn(5, 2, 6)
    x_of_steps = x.clone().requires_grad_()
    x_of_sentence = x.clone().requires_grad_()
    incremental_state = {}
    for step in range(5):
        out, _ = module(x_of_steps[step : step + 1], incremental_state=incremental_state)
        out.backward(gradient_of_output[step : step + 1], retain_graph=True)
    attend_causally(module, x_of_sentence).backward(gradient_of_output)
    torch.testing.assert_close(x_of_steps.grad, x_of_sentence.grad)


def test_the_second_derivative_of_steps_equals_that_of_the_plain_computation():
    """Steps are calls with one token each, as in decoding.

    They must not look values up by embedding_bag, which has no second derivative.
    """
    module = make_attention("random+vanilla").double()
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)

    def compute_second_derivative(out):
        """Returns the gradient for x of a function of the gradient of an output."""
        (gradient,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
        (second_derivative,) = torch.autograd.grad(gradient.pow(2).sum(), x)
        return second_derivative

    # An attention that has to return its weights computes them as a whole: this is the plain computation.
    plain_out, _ = module(x, attn_mask=causal_mask(x), need_weights=True)
    expected = compute_second_derivative(plain_out)
    out_of_steps = decode(module, x)  # one token after the other, with a cache
    torch.testing.assert_close(compute_second_derivative(out_of_steps), expected)


@pytest.mark.parametrize("spec", ["random", "vanilla"])
@pytest.mark.parametrize(
    "modes", list(itertools.permutations([torch.no_grad, torch.inference_mode, torch.enable_grad]))
)
def test_a_cache_of_one_grad_mode_goes_on_in_another(spec, modes):
    """The cache is used for three steps in each mode, and is reordered after each step."""
    module = make_attention(spec).eval()
    x = torch.randn(9, 2, 6)
    incremental_state = {}
    outputs = []
    for number, mode in enumerate(modes):
        with mode():
            for step in range(3 * number, 3 * number + 3):
                out, _ = module(x[step : step + 1], incremental_state=incremental_state)
                outputs.append(out.detach())
                module.reorder_incremental_state(incremental_state, torch.tensor([0, 1]))
    torch.testing.assert_close(torch.cat(outputs), attend_causally(module, x))


@pytest.mark.parametrize("half_first", [True, False])
@pytest.mark.parametrize("spec", ["random", "random+vanilla"])
def test_some_steps_may_be_under_autocast(spec, half_first):
    """The first two of four steps are in half precision, or the last two."""
    module = make_attention(spec).eval()
    x = torch.randn(4, 2, 6)
    incremental_state = {}
    outputs = []
    with torch.no_grad():
        for step in range(4):
            is_first_half = step < 2
            with torch.autocast("cpu", torch.bfloat16, enabled=is_first_half == half_first):
                out, _ = module(x[step : step + 1], incremental_state=incremental_state)
            outputs.append(out.float())
        expected = attend_causally(module, x)
    torch.testing.assert_close(torch.cat(outputs), expected, atol=0.1, rtol=0)


# ---- the cache


@pytest.mark.parametrize("spec", ["random", "random+vanilla"])
def test_cached_padding_is_reordered(spec):
    """Two tokens are given before the hypotheses are reordered, and one after that.

    The first token of hypothesis 0 is padding. The third output is that of all three tokens in the new order, at once.
    """
    module = make_attention(spec)
    x = torch.randn(3, 2, 6)
    padding = torch.tensor([[True, False, False], [False, False, False]])
    order = torch.tensor([1, 0])
    reordered_x = x[:, order]  # (T, B, C)
    reordered_padding = padding[order]  # (B, T)
    incremental_state = {}
    with torch.no_grad():
        expected, _ = module(
            reordered_x, key_padding_mask=reordered_padding, attn_mask=future_mask(3), need_weights=True
        )
        # A call with several tokens needs a mask of the future. A single token sees all tokens of the cache.
        module(x[:2], key_padding_mask=padding[:, :2], incremental_state=incremental_state, attn_mask=future_mask(2))
        module.reorder_incremental_state(incremental_state, order)
        out, _ = module(reordered_x[2:], key_padding_mask=reordered_padding[:, 2:], incremental_state=incremental_state)
    torch.testing.assert_close(out, expected[2:])


@pytest.mark.parametrize("spec", ["random", "random+vanilla"])
def test_keys_and_values_that_fairseq_put_into_the_cache_are_reordered(spec):
    """Reordered in the cache, they have the same output as if they had been put there in the new order."""
    module = make_attention(spec)
    x = torch.randn(1, 2, 6)
    keys_and_values = torch.randn(2, 2, 2, 2, 3)  # (2, sentences, heads, tokens, width of a head)
    keys = keys_and_values[0]
    values = keys_and_values[1]
    order = torch.tensor([1, 0])
    with torch.no_grad():
        reordered_state = {}
        module._set_input_buffer(reordered_state, {"prev_key": keys, "prev_value": values})
        module.reorder_incremental_state(reordered_state, order)
        out, _ = module(x, incremental_state=reordered_state)
        expected_state = {}
        module._set_input_buffer(expected_state, {"prev_key": keys[order], "prev_value": values[order]})
        expected, _ = module(x, incremental_state=expected_state)
    torch.testing.assert_close(out, expected)


def test_keys_and_values_that_fairseq_put_into_the_cache_are_used():
    """fairseq's layer puts them there if it is called with ``prev_self_attn_state``."""
    module = make_attention("random+vanilla").eval()
    x = torch.randn(4, 2, 6)
    keys = module.split_heads(module.k_proj(x[:3]))
    values = module.split_heads(module.v_proj(x[:3]))
    incremental_state = {}
    module._set_input_buffer(incremental_state, {"prev_key": keys, "prev_value": values})
    out, _ = module(x[3:], incremental_state=incremental_state)
    torch.testing.assert_close(out, attend_causally(module, x)[3:])


@pytest.mark.parametrize("spec", ["factorized_random+vanilla", "dense+vanilla", "factorized_random+dense"])
def test_a_step_does_not_join_the_factors_of_a_mixture(spec, monkeypatch):
    """For one row of logits the products of two factors are added up, so that no keys are copied.

    For more rows the factors are joined, and their product is computed at once.

    The function ``join_features(factors)`` does this. Here it is always called, but for one row with one factor at a
    time, which it returns as it is.
    """
    module = make_attention(spec).eval()
    join_features = mock.Mock(side_effect=logits.join_features)
    monkeypatch.setattr(logits, "join_features", join_features)
    incremental_state = {}

    def list_numbers_of_factors(rows):
        """Returns the different numbers of factors that join_features got while the next rows were computed."""
        join_features.reset_mock()
        module(torch.randn(rows, 2, 6), incremental_state=incremental_state)
        return {len(call.args[0]) for call in join_features.call_args_list}

    assert list_numbers_of_factors(rows=2) == {2}
    # Two steps of decoding follow, with a row each. Their keys are those of the two tokens before and of their own.
    assert list_numbers_of_factors(rows=1) == {1}
    assert list_numbers_of_factors(rows=1) == {1}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_table_of_cached_values_grows_by_doubling(mode):
    """The values are moved to a larger table only rarely, and never by a reordering.

    Six hypotheses become two after 32 of 48 steps. The values of dropped hypotheses are then left behind.
    """
    module = make_attention("random", max_length=64).eval()
    incremental_state = {}
    number_of_moves = 0
    last_address = None
    last_step_of_six = 31
    with mode():
        for step in range(48):
            hypotheses = 6 if step <= last_step_of_six else 2
            module(torch.randn(1, hypotheses, 6), incremental_state=incremental_state)
            # Each cached value is a row of the table. The values of a token are moved only if the table is a new one.
            values = incremental_state[module.state_key("vectors")].values
            if values.data_ptr() != last_address:
                number_of_moves += 1
            last_address = values.data_ptr()
            # A table with more than 4 times the rows that are in use is replaced by a smaller one.
            rows_in_use = incremental_state[module.table_key].rows.numel()
            assert values.size(0) <= 4 * rows_in_use

            # Two of six hypotheses are dropped each time, and one of the others is continued in three ways. After the
            # last step with six hypotheses, only two are left.
            order = [4, 4, 4, 0, 1, 2] if step < last_step_of_six else [1, 0]
            module.reorder_incremental_state(incremental_state, torch.tensor(order))
            assert incremental_state[module.state_key("vectors")].values.data_ptr() == last_address
    # These are the first table, at most 6 times a table of twice the size, as 2^6 tokens are more than 48, and a
    # smaller table for two hypotheses.
    assert number_of_moves <= 8


@pytest.mark.parametrize("spec", ["random", "vanilla"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_copy_of_a_reordered_cache_goes_on_alone(spec, context):
    """A token that is added to one copy of the cache is not seen by the other copy.

    The cache may be reordered in any grad mode, although tensors made in inference mode may not be changed outside it.
    """
    module = make_attention(spec).eval()
    x = torch.randn(4, 2, 6)
    incremental_state = {}
    with torch.no_grad():
        for step in range(2):
            module(x[step : step + 1], None, None, incremental_state=incremental_state)
    with context():
        module.reorder_incremental_state(incremental_state, torch.tensor([1, 0]))
    # Only the dictionaries are copied. Both have the same tensors.
    state = dict(incremental_state)
    other_state = dict(incremental_state)
    with torch.no_grad():
        third, _ = module(x[2:3], None, None, incremental_state=state)
        # The other copy gets another third token, which must not change the first copy.
        module(torch.randn(1, 2, 6), None, None, incremental_state=other_state)
        fourth, _ = module(x[3:], None, None, incremental_state=state)
        # The first two tokens were reordered. The last two were given after that.
        reordered_tokens = x[:2, [1, 0]]
        expected = attend_causally(module, torch.cat([reordered_tokens, x[2:]]))
    torch.testing.assert_close(torch.cat([third, fourth]), expected[2:])


@pytest.mark.parametrize("spec", SPECS)
def test_only_functions_that_read_keys_have_them_projected_and_cached(spec):
    """Without padding, no mask is cached either."""
    module = make_attention(spec)
    x = torch.randn(1, 2, 6)
    incremental_state = {}
    for _ in range(2):
        module(x, x, x, incremental_state=incremental_state)
    reads_keys = any(SYNTHESIZERS[name].reads_query_key for name in spec.split("+"))
    assert (incremental_state[module.state_key("vectors")].keys is not None) == reads_keys
    assert incremental_state[module.table_key].key_padding_mask is None
    assert (module.q_proj is not None) == reads_keys
    assert (module.k_proj is not None) == reads_keys


# ---- precision


@pytest.mark.parametrize("std", [1, 10, 50])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_that_spread_over_hundreds_of_nats_have_the_right_weights(std, dtype):
    module = make_attention("random")
    module.synthesizer.components["random"].R.data = std * torch.randn(2, 12, 12)
    module.to(dtype)
    x = torch.randn(12, 2, 6).to(dtype)
    padding = padding_mask([12, 5])
    out, weights = module(x, key_padding_mask=padding, need_weights=True)
    assert torch.isfinite(out).all()
    expected, expected_weights = module.double()(x.double(), key_padding_mask=padding, need_weights=True)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, atol=30 * eps, rtol=0)
    torch.testing.assert_close(weights.double(), expected_weights, atol=2 * eps, rtol=0)


@pytest.mark.parametrize("spec", SPECS)
def test_autocast_stays_close_to_single_precision(spec):
    """fairseq uses autocast with its flag --amp."""
    module = make_attention(spec)
    x = torch.randn(6, 2, 6)
    padding = padding_mask([6, 4])
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(x, x, x, padding)
    out.float().square().sum().backward()
    expected, _ = module(x, x, x, padding)
    torch.testing.assert_close(out.float(), expected, atol=0.1, rtol=0)
    for parameter in module.parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", SPECS)
def test_half_precision_is_within_a_few_roundings_of_double_precision(spec, dtype):
    module = make_attention(spec).to(dtype)
    x = torch.randn(6, 2, 6).to(dtype)
    out, _ = module(x, x, x)
    expected, _ = module.double()(x.double())
    torch.testing.assert_close(out.double(), expected, atol=20 * torch.finfo(dtype).eps, rtol=0)


# ---- other tools that handle the module


class Output(torch.nn.Module):
    """A module that returns the output of a self-attention without its weights, as torch.jit.trace needs it."""

    def __init__(self, spec):
        super().__init__()
        self.attention = make_attention(spec)

    def forward(self, x, padding):
        """Returns the output (T, B, C)."""
        out, _ = self.attention(x, key_padding_mask=padding)
        return out


@pytest.mark.parametrize("spec", SPECS)
def test_a_trace_holds_for_another_batch_of_the_same_size(spec, monkeypatch):
    """torch.jit.trace itself would check the trace at padding, too, where the output may be anything."""
    monkeypatch.setattr("fairseq_synth.computations.tiled.PLAIN_LIMIT", 0)
    module = Output(spec).eval()
    x = torch.randn(5, 3, 6)
    traced = torch.jit.trace(module, (x, padding_mask([5, 5, 3])), check_trace=False)
    other_x = torch.randn(5, 3, 6)
    other_padding = padding_mask([5, 4, 4])
    out = traced(other_x, other_padding)
    expected = module(other_x, other_padding)
    torch.testing.assert_close(out[:4], expected[:4])  # the first 4 tokens, which are not padding


def test_vanilla_starts_from_the_same_bits_as_fairseqs_attention():
    """The initial weights have the same values, from the same seed, and the same names."""
    torch.manual_seed(0)
    weights_of_fairseq = MultiheadAttention(12, 3, self_attention=True).state_dict()
    torch.manual_seed(0)
    mixture = synthesizers.Mixture(("vanilla",), "convex", num_heads=3, head_dim=4, max_length=12, rank=3)
    weights = attention.SyntheticAttention(12, 3, mixture).state_dict()
    assert list(weights) == list(weights_of_fairseq)
    for name in weights_of_fairseq:
        assert torch.equal(weights[name], weights_of_fairseq[name]), name


def test_vanilla_takes_the_weights_of_fairseqs_attention():
    attention_of_fairseq = MultiheadAttention(12, 3, self_attention=True)
    module = make_attention("vanilla", embed_dim=12, num_heads=3)
    module.load_state_dict(attention_of_fairseq.state_dict())
    x = torch.randn(5, 2, 12)
    padding = padding_mask([5, 3])
    out, _ = module(x, x, x, padding)
    expected, _ = attention_of_fairseq(x, x, x, padding)
    torch.testing.assert_close(out, expected)


def test_fairseqs_moving_average_takes_the_state_dict():
    """With --store-ema, fairseq scales every tensor of the state dict."""
    module = make_attention("random")
    average = EMA(module, EMAConfig(store_ema=True, ema_decay=0.5))
    before = module.state_dict()
    for parameter in module.parameters():
        parameter.data = torch.zeros_like(parameter)
    average.step(module)
    name = "synthesizer.components.random.R"
    torch.testing.assert_close(average.get_model().state_dict()[name], before[name] / 2)


# ---- preparation for generation: weights of a mixture, and scales, are multiplied into parameters


@pytest.mark.parametrize("mixture", ["convex", "sum"])
@pytest.mark.parametrize("spec", [*SPECS, "random+vanilla:1/dense+random:1"])
def test_a_model_prepared_for_generation_has_the_same_output(spec, mixture):
    """The prepared model has no weights of a mixture and no scale of the dot product.

    A second preparation changes nothing.
    """
    module = make_attention(spec, mixture).double().eval()
    x = torch.randn(5, 3, 6, dtype=torch.float64)
    expected, _ = module(x, attn_mask=causal_mask(x))
    for _ in range(2):
        module.make_generation_fast_(name="decoder.layers.0.self_attn", need_attn=False)
        out, _ = module(x, attn_mask=causal_mask(x))
        torch.testing.assert_close(out, expected)
    assert not any(name.endswith("alpha") for name in module.state_dict())
    for part in module.synthesizer.mixtures():
        assert part.alpha is None
        if "vanilla" in part.components:
            assert part.components["vanilla"].scaling == 1.0


@pytest.mark.parametrize("spec, mixture", [("vanilla", "convex"), ("fixed_random+vanilla", "sum")])
def test_the_factor_of_the_queries_is_on_the_device_of_the_projections(spec, mixture):
    """It has their type, too. Both hold even if the functions have no parameters."""
    module = make_attention(spec, mixture).to("meta").half()
    (part,) = module.synthesizer.mixtures()
    factor = part.factor_of_dot_products(like=module.out_proj.weight)
    assert factor.device.type == "meta"
    assert factor.dtype == torch.float16


PREPARED_SPECS = ["vanilla", "random+vanilla", "random+dense", "random:1/vanilla:1"]


@pytest.mark.parametrize("spec", PREPARED_SPECS)
def test_only_a_prepared_model_takes_the_weights_of_a_prepared_model(spec):
    """The weights of a prepared model are other numbers than the trained ones."""
    prepared = make_attention(spec)
    prepared.make_generation_fast_()
    module = make_attention(spec, seed=1)
    with pytest.raises(SynthesizerError, match="^: these are weights of a model prepared for generation"):
        module.load_state_dict(prepared.state_dict())
    attention_of_fairseq = MultiheadAttention(6, 2, self_attention=True)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        attention_of_fairseq.load_state_dict(prepared.state_dict())
    module.make_generation_fast_()
    module.load_state_dict(prepared.state_dict())
    x = torch.randn(5, 3, 6)
    torch.testing.assert_close(module(x), prepared(x), rtol=0, atol=0)


@pytest.mark.parametrize("spec", PREPARED_SPECS)
def test_a_prepared_model_takes_no_trained_weights(spec):
    module = make_attention(spec)
    trained = module.state_dict()
    module.make_generation_fast_()
    with pytest.raises(
        SynthesizerError, match="^: this model is prepared for generation and can no longer load weights"
    ):
        module.load_state_dict(trained)


def test_a_single_function_is_the_same_when_prepared():
    """A model that is not prepared takes its weights, too."""
    prepared = make_attention("random")
    prepared.make_generation_fast_()
    module = make_attention("random", seed=1)
    module.load_state_dict(prepared.state_dict())


def check_that_preparation_changes_nothing(module):
    """Checks that an attention has the same weights and output after it was prepared for generation."""
    x = torch.randn(5, 3, 6)
    weights_before = {name: weight.clone() for name, weight in module.state_dict().items()}
    expected, _ = module(x)
    module.make_generation_fast_()
    torch.testing.assert_close(module.state_dict(), weights_before, rtol=0, atol=0)
    out, _ = module(x)
    assert torch.equal(out, expected)


def test_a_function_that_cannot_take_its_weight_in_keeps_it(restore_registry):
    synthesizers.register_synthesizer("distance")(Distance)
    check_that_preparation_changes_nothing(make_attention("distance+vanilla").eval())


def test_queries_that_another_function_reads_are_not_scaled(restore_registry):
    @synthesizers.register_synthesizer("absolute_query")
    class AbsoluteQuery(synthesizers.Vanilla):
        """Reads the queries, like vanilla."""

        def forward(self, inputs):
            """Returns the dot products of the keys with the absolute values of the queries."""
            return [Product(inputs.q.abs(), inputs.k)]

    check_that_preparation_changes_nothing(make_attention("absolute_query+vanilla").eval())


def test_queries_with_a_hook_are_not_scaled():
    module = make_attention("random+vanilla").eval()
    module.q_proj.register_forward_hook(do_nothing)
    check_that_preparation_changes_nothing(module)


@pytest.mark.parametrize("spec", ["random+dense", "random+vanilla"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per:UserWarning")
def test_a_quantized_model_is_left_as_it_is(spec):
    module = make_attention(spec).eval()
    quantized = torch.ao.quantization.quantize_dynamic(module, {torch.nn.Linear})
    x = torch.randn(5, 3, 6)
    expected, _ = quantized(x)
    out_of_module, _ = module(x)
    torch.testing.assert_close(expected, out_of_module, rtol=0.1, atol=0.1)
    quantized.make_generation_fast_()
    out, _ = quantized(x)
    assert torch.equal(out, expected)
