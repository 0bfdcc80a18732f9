"""The kernels' values and gradients are those of the plain computation."""

import copy
from typing import NamedTuple

import pytest
import torch
from helpers import NAMES, SPECS, Columns, check_second_derivative_is_refused, make_attention, padding_mask
from kernel_calls import (
    MASKS,
    MIXED,
    Summand,
    attend_by_kernels,
    attend_plainly,
    check_kernels,
    choose_kernels,
    choose_lengths,
    is_chosen,
    is_supported,
    make_inputs,
    make_logits,
    make_padding,
    make_random_logits,
    run_attention,
    set_number_of_programs,
    view_queries_keys_and_values,
)

from fairseq_synth.computations import kernels, plain
from fairseq_synth.computations.kernels import launches, tensors
from fairseq_synth.logits import Bias, Diagonals, Outer, Product
from fairseq_synth.positions import take_distances, take_window
from fairseq_synth.synthesizers import register_synthesizer

pytestmark = [
    pytest.mark.usefixtures("on_device", "skip_unless_chosen", "kernels_are_on", "dirty_memory", "checked_memory"),
    # In the interpreter, numpy warns about minus infinity.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not kernels.triton_fits(), reason="no Triton that is new enough for the kernels"),
]
interpreted = pytest.mark.interpreted


@pytest.fixture(params=[True, False], ids=["short", "long"])
def is_short(request, monkeypatch):
    """Runs a test with the kernels for short sentences, and again with those for long ones. Returns which they are."""
    choose_kernels(monkeypatch, request.param)
    return request.param


def skip_unsupported(spec):
    """Skips a test of functions that the kernels do not compute."""
    if not is_supported(spec):
        pytest.skip("torch's fused attention")


def skip_unless_masks_are_chosen(spec, masks, is_complete_run):
    """Skips a test of functions under masks that only --kernels tests together; see `is_chosen`."""
    skip_unsupported(spec)
    if not (is_complete_run or is_chosen(spec, masks)):
        pytest.skip("these masks are tested with other functions: --kernels")


@interpreted
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("spec", [*SPECS, MIXED])
def test_short_sentences_equal_the_plain_computation(spec, masks, is_complete_run, monkeypatch):
    """The output is equal, and so are the gradients of the input and of every parameter."""
    skip_unless_masks_are_chosen(spec, masks, is_complete_run)
    sentences = 2
    if is_complete_run or spec == MIXED:
        sentences = 3  # the third one is nothing but padding
    lengths = [7]
    if is_complete_run:
        lengths = choose_lengths([1, 7, 16, 33, 64], spec, masks)
    for length in lengths:
        choose_kernels(monkeypatch, is_short=True)
        check_kernels(spec, length, masks, monkeypatch, sentences=sentences)


@interpreted
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("spec", [*SPECS, MIXED])
def test_long_sentences_equal_the_plain_computation(spec, masks, is_complete_run, monkeypatch):
    """The tiles are so small that a few words have many of them, some of which are not full.

    ============================  ====================================  ===========================
    run                           lengths                               sentences
    ============================  ====================================  ===========================
    --kernels (complete)          `choose_lengths` from 1, 7, 33, 65    3; 2 of 65 tokens
    other                         20                                    2
    ============================  ====================================  ===========================
    """
    skip_unless_masks_are_chosen(spec, masks, is_complete_run)
    if spec == MIXED and masks in ("none", "left"):
        pytest.skip("five functions take the interpreter minutes; the paper mixes two")

    def choose_small_tile(kernel, layout):
        """Takes the place of `Tile.for_kernel`, which chooses larger tiles that are fast on a GPU."""
        if kernel == "rows":
            return launches.Tile(rows=16, columns=32, warps=4)
        if kernel == "columns":
            return launches.Tile(rows=32, columns=16, warps=4)
        return launches.Tile(rows=16, columns=16, warps=4)

    choose_kernels(monkeypatch, is_short=False)
    monkeypatch.setattr(launches.Tile, "for_kernel", choose_small_tile)
    if not is_complete_run:
        check_kernels(spec, 20, masks, monkeypatch, sentences=2)
        return
    for length in choose_lengths([1, 7, 33, 65], spec, masks):
        sentences = 3
        if length == 65:
            sentences = 2  # the third one would take long
        check_kernels(spec, length, masks, monkeypatch, sentences=sentences)


@interpreted
@pytest.mark.parametrize(
    "spec, length_with_padding, length_with_causal_mask",
    [
        # The interpreter takes long for 257 tokens, so that each of two functions has them under one of two masks.
        ("random", 257, 130),
        ("random+vanilla", 130, 257),
        ("dense+vanilla", 130, 130),
    ],
)
def test_sentences_of_many_tiles_equal_the_plain_computation(
    spec, length_with_padding, length_with_causal_mask, is_complete_run, monkeypatch
):
    """The tiles have the sizes that they have on a GPU. A sentence of 130 tokens has three in each direction.

    The two lengths are for --kernels, with three sentences. Otherwise one mixture runs, in two sentences of 130 tokens.
    """
    if is_complete_run:
        check_kernels(spec, length_with_padding, "padded", monkeypatch, max_length=260)
        check_kernels(spec, length_with_causal_mask, "causal", monkeypatch, max_length=260)
    elif spec == "random+vanilla":
        check_kernels(spec, 130, "padded", monkeypatch, max_length=140, sentences=2)
        check_kernels(spec, 130, "causal", monkeypatch, max_length=140, sentences=2)
    else:
        pytest.skip("takes half a minute: --kernels")


@interpreted
@pytest.mark.parametrize("width", [1, 8, 40, 64, 72])
def test_heads_of_any_width_equal_the_plain_computation(width, is_complete_run, monkeypatch):
    """Heads of a mixture are tested, and those of functions alone.

    Without --kernels, only random is tested of the functions alone. The width is that of its values, as it has no
    queries and keys.
    """
    mixture = MIXED
    if width > 64:
        mixture = "dense+vanilla"  # the kernels refuse more than two functions in such wide heads
    names = ["random"]
    if is_complete_run:
        names = NAMES
    for spec in [mixture, *names]:
        if is_supported(spec):  # not vanilla alone
            check_kernels(spec, 6, "padded", monkeypatch, width, sentences=2)


@interpreted
@pytest.mark.parametrize("spec", ["random", "relative_random", "random+vanilla"])
def test_large_logits_equal_the_plain_computation(spec, monkeypatch):
    """R has a standard deviation of 50, so that all weights of a row but one are 0."""
    for is_short in (True, False):
        choose_kernels(monkeypatch, is_short)
        check_kernels(spec, 9, "padded", monkeypatch, std=50)
        check_kernels(spec, 9, "causal", monkeypatch, std=50)


@interpreted
@pytest.mark.parametrize(
    "spec, length", [("relative_random", 20), ("relative_random+vanilla", 7), ("relative_random", 4)]
)
def test_distances_above_the_largest_share_a_value(spec, length, is_short, monkeypatch):
    """The largest distance is 4 here. The gradient of the shared value is a sum of several diagonals."""
    set_number_of_programs(monkeypatch, 6)
    check_kernels(spec, length, "padded", monkeypatch, max_length=4)
    check_kernels(spec, length, "causal", monkeypatch, max_length=4)


@interpreted
@pytest.mark.parametrize(
    "columns",
    [
        slice(0, 5),  # the first 5 values, for the distances from -2 to 2
        slice(6, 11),  # the last 5 values
        slice(0, 11),  # all values, for the distances from -5 to 5
        slice(5, 6),  # a single value, which is that of all distances
    ],
    ids=str,
)
def test_values_of_distances_may_be_a_part_of_a_larger_tensor(columns, is_short):
    """The gradient of the whole tensor, which has 11 values for each head, is that of the plain computation.

    In sentences of 9 tokens there are distances from -8 to 8. Those that are too large for the values have the first or
    the last value, whose gradient is the sum of several diagonals.
    """
    torch.manual_seed(0)
    values_of_distances = torch.randn(2, 11, requires_grad=True)
    value = torch.randn(2, 2, 9, 4)
    gradient = torch.randn(2, 2, 9, 4)

    def compute_gradient(attend):
        diagonals = Diagonals(take_distances(values_of_distances[:, columns], make_inputs(9)))
        out = attend([diagonals], value)
        (gradient_of_values,) = torch.autograd.grad(out, values_of_distances, gradient)
        return gradient_of_values

    expected = compute_gradient(attend_plainly)
    torch.testing.assert_close(compute_gradient(attend_by_kernels), expected, atol=1e-5, rtol=0)


@interpreted
def test_a_sum_without_weights_equals_the_plain_computation(monkeypatch):
    check_kernels("random+dense+vanilla", 9, "padded", monkeypatch, mixture="sum")


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", [*SPECS, MIXED])
def test_half_precision_on_a_gpu_is_as_exact_as_the_plain_computation(spec, dtype, request, monkeypatch):
    """Heads have their usual width, and sentences are short and long."""
    if request.config.getoption("--device") == "cpu":
        pytest.skip("the interpreter is too slow, and it has no bf16")
    skip_unsupported(spec)
    for length in (30, 130):
        check_kernels(spec, length, "padded", monkeypatch, width=64, dtype=dtype)
        check_kernels(spec, length, "causal", monkeypatch, width=64, dtype=dtype)


@interpreted
@pytest.mark.parametrize("spec", ["random", MIXED])
def test_half_precision_in_the_interpreter_is_as_exact_as_the_plain_computation(spec, is_short, request, monkeypatch):
    """One function and one mixture are tested. numpy, with which the interpreter computes, has no bf16."""
    if request.config.getoption("--device") != "cpu":
        pytest.skip("no interpreter")
    check_kernels(spec, 9, "padded", monkeypatch, dtype=torch.float16)


def make_constant_term(kind, four):
    """Returns a term of some logits that is 64 in each row and column.

    Args:
        kind: one of the kinds of the test below.
        four: a tensor (B, H, T, 4) that is 4 everywhere.
    """
    if kind == "product":
        return Product(four, four)  # the sum over 4 features of 4 * 4
    four_of_first_sentence = four[:1]
    if kind == "product with a shared key":
        return Product(four, four_of_first_sentence)  # the same
    if kind == "outer product":
        eight = 2 * torch.cat([four, four, four], dim=3)  # 8 left and 4 right features
        return Outer(eight, left_size=8)  # 8 * 8
    if kind == "row":
        column_of_first_row = four_of_first_sentence[:, :, :1, :1]
        return Bias(16 * column_of_first_row.expand(-1, -1, -1, four.size(2)))  # 16 * 4, in one row for all rows
    assert kind == "matrix"
    first_column = four_of_first_sentence[:, :, :, :1]
    return Bias((16 * first_column).repeat(1, 1, 1, four.size(2)))  # 16 * 4


@interpreted
@pytest.mark.parametrize("needs_other_gradients", [False, True])
@pytest.mark.parametrize("kind", ["product", "product with a shared key", "outer product", "row", "matrix"])
def test_the_weight_of_a_constant_has_no_gradient_but_rounding(kind, needs_other_gradients, is_short):
    """The computed gradient of the weight of a constant term is nearly 0.

    The logits are `weight * 64 + another term`. The softmax of a row does not change if the same number is added to all
    its columns, so that the weight has no effect and its exact gradient is 0. The kernels compute it as the sum of 64
    times the gradients of all logits, which cancel but for rounding: their absolute values have a sum of about 3,000.
    In half precision the output is rounded, too, and still the sum is small. Values around 8 make these errors larger.
    """
    torch.manual_seed(0)
    query, key, value, gradient = torch.randn(4, 2, 2, 20, 4, dtype=torch.float16).unbind()  # (B, H, T, features)
    R = torch.randn(1, 2, 20, 20, dtype=torch.float16)
    weights = torch.full((1, 2), 0.5, dtype=torch.float16, requires_grad=True)  # one weight for each head
    four = torch.full((2, 2, 20, 4), 4, dtype=torch.float16)
    constant_term = make_constant_term(kind, four)
    if needs_other_gradients:
        for tensor in (query, R, four):
            tensor.requires_grad_()
    # Logits have at most one product of queries and keys that differ by sentence.
    if kind == "product":
        other_term = Bias(R)
    else:
        other_term = Product(query, key)
    logits = make_logits(weights, Summand(constant_term, weight_row=0), Summand(other_term))
    out = attend_by_kernels(logits, value + 8)
    inputs = [weights]
    if needs_other_gradients:
        # Some kinds of logits do not use all of these, or have a copy of `four` that was made before.
        inputs += [query, R, four]
    gradient_of_weights, *_ = torch.autograd.grad(out, inputs, gradient, allow_unused=True)
    assert gradient_of_weights.abs().max() < 0.1


@interpreted
@pytest.mark.parametrize("spec", ["random+vanilla", MIXED])
def test_a_batch_of_one_sentence_equals_the_plain_computation(spec, is_short, monkeypatch):
    """The factors of the only sentence have the size of factors that a batch shares."""
    check_kernels(spec, 9, "none", monkeypatch, sentences=1)


@interpreted
@pytest.mark.parametrize("programs", [1, 3])
def test_a_program_may_have_several_sentences(programs, is_short, monkeypatch):
    """The last program may have fewer than the others."""
    set_number_of_programs(monkeypatch, programs)
    check_kernels("random+dense", 5, "padded", monkeypatch)
    check_kernels(MIXED, 5, "causal", monkeypatch, sentences=5)


@interpreted
@pytest.mark.parametrize("length", [2, 9])
def test_terms_of_any_kind_have_the_gradients_of_the_plain_computation(length, is_short):
    """The gradients reach the tensors that the terms are made of, also if the kernels read copies of the terms.

    `make_random_logits` returns terms of every kind, two of which have to be copied.
    """
    logits, tensors = make_random_logits(sentences=3, heads=2, length=length)
    value = torch.randn(3, 2, length, 6, requires_grad=True)
    # The gradient of the output (B, H, T, features) lies in memory as (B, features, T, H), unlike the output.
    gradient = torch.randn(3, 6, length, 2).permute(0, 3, 2, 1)
    inputs = [value, *tensors]
    out = attend_by_kernels(logits, value)
    gradients = torch.autograd.grad(out, inputs, gradient)
    expected_out = attend_plainly(logits, value)
    expected = torch.autograd.grad(expected_out, inputs, gradient)
    torch.testing.assert_close(gradients, expected, atol=1e-4, rtol=0)


@interpreted
@pytest.mark.parametrize("spec", ["random", "columns", "factorized_random", "relative_random", "factorized_dense"])
@pytest.mark.parametrize("length", [5, 9])
def test_a_single_term_equals_the_plain_computation(spec, length, restore_registry, monkeypatch):
    """The kernels read its matrix, row or values as a whole. Beyond the maximum length of 6 they begin again."""
    register_synthesizer("columns")(Columns)
    for is_short in (True, False):
        choose_kernels(monkeypatch, is_short)
        check_kernels(spec, length, "padded", monkeypatch, max_length=6, beyond_length="tile")


@interpreted
@pytest.mark.parametrize("spec", ["random", "dense", "factorized_random", "factorized_dense", "relative_random"])
def test_a_sentence_of_one_token_equals_the_plain_computation(spec, monkeypatch):
    """The stride of a single row says nothing about the parameter whose first row it is."""
    for is_short in (True, False):
        choose_kernels(monkeypatch, is_short)
        check_kernels(spec, 1, "none", monkeypatch, max_length=6)


@interpreted
@pytest.mark.parametrize("case", ["packed", "swapped", "the same twice", "without a gradient", "a hook", "retained"])
def test_queries_keys_and_values_may_be_views_of_one_projection(case, is_short):
    """The layer makes such views, and the kernels are right after anything that a function may do to them.

    ====================  ==========================================================================================
    case                  what a function does
    ====================  ==========================================================================================
    packed                nothing: it has the views that the layer makes
    swapped               it takes the keys as queries and the queries as keys
    the same twice        it takes the queries as keys, too
    without a gradient    it stops the gradient of the queries
    a hook                it has a hook that replaces the gradient of the keys by 0; the hook sees the right gradient
    retained              it lets the queries, which are no leaf, retain their gradient, which is right
    ====================  ==========================================================================================
    """
    packed = torch.randn(5, 3, 24, requires_grad=True)  # (T, B, 3 * 2 heads * 4 features)
    R = torch.randn(2, 7, 7, requires_grad=True)
    weights = torch.rand(2, 2, requires_grad=True)  # (weights, H)

    def compute_output_and_gradients(attend):
        q, k, v = view_queries_keys_and_values(packed)
        query = q
        key = k
        gradients_of_parts = []  # the gradient of the keys in the case "a hook", and of the queries in "retained"

        def record_and_stop(gradient):
            gradients_of_parts.append(gradient)
            return 0 * gradient

        if case == "swapped":
            query = k
            key = q
        elif case == "the same twice":
            key = q
        elif case == "without a gradient":
            query = q.detach()
        elif case == "a hook":
            k.register_hook(record_and_stop)
        elif case == "retained":
            q.retain_grad()
        product = Product(query, key)
        window = Bias(take_window(R, make_inputs(5)))
        logits = make_logits(weights, Summand(product, weight_row=1), Summand(window, weight_row=0))
        out = attend(logits, v)
        gradient = torch.linspace(-1, 1, out.numel()).view_as(out)
        gradients = torch.autograd.grad(out, [packed, R, weights], gradient, retain_graph=True)
        if case == "retained":
            out.backward(gradient)  # unlike torch.autograd.grad, it sets q.grad
            gradients_of_parts.append(q.grad)
        if case in ("a hook", "retained"):
            assert len(gradients_of_parts) == 1
        else:
            assert len(gradients_of_parts) == 0
        return [out, *gradients, *gradients_of_parts]

    results = compute_output_and_gradients(attend_by_kernels)
    expected = compute_output_and_gradients(attend_plainly)
    torch.testing.assert_close(results, expected, atol=1e-4, rtol=0)


@interpreted
def test_dropout_equals_the_plain_computation_with_the_same_dropped_weights(is_short, monkeypatch):
    """If V is the identity, the output is the weights, and so shows which ones are dropped.

    The first part of the test finds them. In the second part, the plain computation drops the same ones, and has the
    same gradients as the kernels. Both parts have the same seed, logits and sizes of the weights (B, H, T, T), on which
    alone it depends which weights the kernels drop.
    """
    torch.manual_seed(0)
    length = 20
    dropout = 0.4
    logits, tensors = make_random_logits(sentences=3, heads=2, length=length)
    seed = torch.tensor([1234567890123456789])
    monkeypatch.setattr(torch, "randint", lambda *_, **kwargs: seed)  # the kernels take their seed from it

    # A weight is either dropped, or divided by the probability of keeping it.
    identity = torch.eye(length).expand(3, 2, length, length)
    weights = attend_by_kernels(logits, identity)
    weights_with_dropout = attend_by_kernels(logits, identity, dropout=dropout)
    factors = (weights_with_dropout / weights).detach()
    is_kept = factors > 0.5
    torch.testing.assert_close(factors, is_kept / (1 - dropout), atol=1e-3, rtol=0)
    assert abs(is_kept.float().mean() - (1 - dropout)) < 0.05
    # Each row of each sentence and head has random numbers of its own.
    rows = is_kept.flatten(0, 2)
    assert len(rows.unique(dim=0)) == len(rows)

    # With other values, the kernels drop the same weights again.
    value = torch.randn(3, 2, length, 6, requires_grad=True)
    gradient = torch.randn(3, 2, length, 6)
    inputs = [value, *tensors]
    out = attend_by_kernels(logits, value, dropout=dropout)
    gradients = torch.autograd.grad(out, inputs, gradient)

    def drop_the_same_weights(weights, *_):
        return weights * is_kept / (1 - dropout)

    monkeypatch.setattr(plain, "drop", drop_the_same_weights)
    expected_out = attend_plainly(logits, value, dropout=dropout)
    expected = torch.autograd.grad(expected_out, inputs, gradient)
    torch.testing.assert_close(gradients, expected, atol=1e-4, rtol=0)


@interpreted
def test_calls_with_the_same_layout_have_one_plan(monkeypatch):
    """Later batches of the same size, and other layers, take the plan of the first call. Other calls have others."""
    calls = [
        ("random+vanilla", 7, "padded"),
        ("random+vanilla", 7, "causal"),
        ("random+vanilla", 9, "padded"),
        (MIXED, 7, "padded"),
        ("dense+factorized_random", 7, "none"),
    ]
    for _ in range(2):
        for spec, length, masks in calls:
            check_kernels(spec, length, masks, monkeypatch, max_length=12)
        assert kernels.find_plan.cache_info().currsize == len(calls)


class MixtureCall(NamedTuple):
    """A call of a mixture of two terms: a product of queries and keys, and a matrix R or diagonals."""

    sentences: int = 2
    length: int = 3
    needs_projection_gradient: bool = True
    needs_matrix_gradient: bool = True
    needs_weights_gradient: bool = True
    number_of_weights: int = 2
    product_weight_row: int | None = 0
    matrix_weight_row: int | None = 1
    scale: float = 1.0
    masks: str = "none"
    has_diagonals: bool = False

    def compute(self, attend):
        """Returns the output for real tokens, and the gradients of the sum of its squares that are needed.

        The tensors that a gradient may be needed of are the projection with queries, keys and values, the matrix R or
        the values of the diagonals, and the weights of the mixture. There are 2 heads of 4 features.

        Args:
            attend: computes the attention, `attend_by_kernels` or `attend_plainly`.
        """
        torch.manual_seed(0)
        size_of_packed = (self.length, self.sentences, 3 * 2 * 4)
        packed = torch.randn(size_of_packed, requires_grad=self.needs_projection_gradient)
        if self.has_diagonals:
            size_of_R = (2, 7)  # in each head, values for the distances from -3 to 3
        else:
            size_of_R = (2, 4, 4)  # in each head, rows and columns for up to 4 tokens
        R = torch.randn(size_of_R, requires_grad=self.needs_matrix_gradient)
        weights = torch.randn(self.number_of_weights, 2, requires_grad=self.needs_weights_gradient)

        q, k, v = view_queries_keys_and_values(packed)  # each is (B, H, T, 4)
        inputs = make_inputs(self.length)
        if self.has_diagonals:
            matrix = Diagonals(take_distances(R, inputs))
        else:
            matrix = Bias(take_window(R, inputs))
        logits = make_logits(
            weights,
            Summand(Product(q, k, self.scale), self.product_weight_row),
            Summand(matrix, self.matrix_weight_row),
        )

        if self.masks == "padded":
            lengths = [self.length] * self.sentences
            lengths[0] -= 1
            padding = padding_mask(lengths)  # (B, T)
            out = attend(logits, v, padding)
            out = out.masked_fill(padding[:, None, :, None], 0.0)  # at padding any output is right
        else:
            out = attend(logits, v, is_causal=self.masks == "causal")
        needed = [tensor for tensor in (packed, R, weights) if tensor.requires_grad]
        gradients = torch.autograd.grad(out.square().sum(), needed)
        return [out, *gradients]


@interpreted
@pytest.mark.parametrize(
    "call",
    [
        MixtureCall(sentences=3),
        MixtureCall(length=2),
        MixtureCall(needs_projection_gradient=False),
        MixtureCall(needs_matrix_gradient=False),
        MixtureCall(needs_weights_gradient=False),
        MixtureCall(number_of_weights=3),
        MixtureCall(product_weight_row=1, matrix_weight_row=0),
        MixtureCall(product_weight_row=None, matrix_weight_row=0),
        MixtureCall(product_weight_row=0, matrix_weight_row=None),
        MixtureCall(scale=0.5),
        MixtureCall(masks="padded"),
        MixtureCall(masks="causal"),
        MixtureCall(has_diagonals=True),
    ],
)
def test_a_call_that_differs_in_one_property_does_not_take_the_plan_of_another(call):
    """The plan of another call is there already, and would give other results."""
    usual_call = MixtureCall()
    usual_call.compute(attend_by_kernels)
    results = call.compute(attend_by_kernels)
    expected = call.compute(attend_plainly)
    torch.testing.assert_close(results, expected, atol=1e-4, rtol=0)


@interpreted
def test_dropout_differs_from_call_to_call_and_can_be_repeated_from_a_seed():
    module = make_attention("random+vanilla", dropout=0.5).train()
    x = torch.randn(7, 3, 6)
    torch.manual_seed(1)
    first, _ = module(x)
    second, _ = module(x)
    torch.manual_seed(1)
    repeated, _ = module(x)
    assert torch.equal(first, repeated)
    assert not torch.equal(first, second)


@interpreted
def test_a_repeated_forward_pass_of_activation_checkpointing_drops_the_same_weights():
    """With --checkpoint-activations, the forward pass is repeated in the backward pass."""
    module = make_attention("random+vanilla", dropout=0.5).train()

    def compute_output_and_gradients(run):
        """Returns the output and all gradients if `run` calls the module with its input."""
        module.zero_grad()
        torch.manual_seed(1)
        x = torch.linspace(-1, 1, 7 * 3 * 6).view(7, 3, 6).requires_grad_()
        out, _ = run(x)
        torch.manual_seed(2)
        out.square().sum().backward()
        gradients_of_parameters = [parameter.grad for parameter in module.parameters()]
        return [out, x.grad, *gradients_of_parameters]

    def run_with_checkpointing(x):
        return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)

    results = compute_output_and_gradients(run_with_checkpointing)
    expected = compute_output_and_gradients(module)
    torch.testing.assert_close(results, expected)


@interpreted
@pytest.mark.parametrize("spec", ["relative_random", MIXED])
def test_autocast_is_close_to_double_precision(spec, monkeypatch, request):
    """With --amp, values and factors are in half precision, and weights and what the batch shares are in fp32."""
    module = make_attention(spec)
    exact_module = copy.deepcopy(module).double()
    x, gradient = torch.randn(2, 7, 3, 6)
    padding = make_padding("padded", length=7, sentences=3)
    with torch.autocast(request.config.getoption("--device"), torch.float16):
        results = run_attention(module, x, gradient, monkeypatch, attend_by_kernels, padding=padding)
    exact = run_attention(exact_module, x.double(), gradient.double(), monkeypatch, attend_plainly, padding=padding)
    for name, expected in exact.items():
        if name != "out":
            assert results[name].dtype == torch.float32
        torch.testing.assert_close(
            results[name].double(),
            expected,
            atol=0.03,
            rtol=0.03,
            msg=lambda message, name=name: f"{name}: {message}",
        )


@interpreted
def test_parameters_that_are_not_trained_have_no_gradient(monkeypatch):
    """The others have the same gradient as before."""
    module = make_attention("random+dense+vanilla")
    x, gradient = torch.randn(2, 7, 3, 6)
    expected = run_attention(module, x, gradient, monkeypatch, attend_by_kernels)
    frozen = [name for name, _ in module.named_parameters() if name.endswith(("R", "W2", "q_proj.weight"))]
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    results = run_attention(module, x, gradient, monkeypatch, attend_by_kernels)
    assert set(expected) - set(results) == set(frozen)
    for name in results:
        torch.testing.assert_close(results[name], expected[name])


def test_only_the_first_rows_and_columns_of_a_parameter_are_read_in_the_parameter():
    """Any other part of it is copied, as its rows lie elsewhere in memory, or as it has fewer heads."""
    parameter = torch.randn(2, 6, 4)  # (H, rows, columns)
    # Each part is (1, heads, rows, columns).
    parts_that_are_read_in_place = [
        parameter[None],  # all of it
        parameter[None, :, :3],  # the first 3 rows
        parameter[None, :, :1],  # the first row
        parameter[None, :, :5, :2],  # the first 5 rows and 2 columns
    ]
    for part in parts_that_are_read_in_place:
        assert tensors.find_or_copy(part, heads=2).tensor is parameter
    parts_that_are_copied = [
        parameter[None, :, ::2],  # every second row
        parameter[None, :, 1:4],  # rows from the second one on
        parameter[None, :, :, ::2],  # every second column
        parameter[None, :, :, 1:],  # columns from the second one on
        parameter[None, :1],  # the first head alone
    ]
    for part in parts_that_are_copied:
        copied = tensors.find_or_copy(part, heads=part.size(1))
        assert copied.tensor is not parameter
        torch.testing.assert_close(copied.tensor, part[0])


def test_factors_of_a_matrix_may_be_the_first_columns_of_larger_parameters():
    """The other columns of the parameters are no part of the product."""
    # views of a tensor that is no parameter (H, rows, columns)
    query, key = torch.randn(2, 2, 6, 4)[:, None, :, :5, :3].unbind()
    parameter = torch.randn(2, 6, 4)
    first_columns = parameter[None, :, :5, :3]
    for product in (Product(query, key), Product(first_columns, key), Product(first_columns, first_columns)):
        matrix = tensors.multiply_parameters(product, heads=2, length=5)
        expected = product.query @ product.key.mT
        torch.testing.assert_close(matrix.tensor[:, :5, :5], expected[0])


def test_queries_of_one_sentence_or_head_are_copied_for_all():
    """They are copied even if they are a part of a projection that has the queries of all sentences and heads."""
    projection = torch.randn(5, 3, 24)
    query, key, value = (part.unflatten(-1, (2, 4)).permute(1, 2, 0, 3) for part in projection.split(8, dim=-1))
    assert tensors.pack([query, key], value) is projection
    for shared_query in (query[:1], query[:, :1]):
        packed_query = tensors.pack([shared_query, key], value)[:, :, :8]
        query_by_head = packed_query.unflatten(-1, (2, 4)).permute(1, 2, 0, 3)
        torch.testing.assert_close(query_by_head, shared_query.expand(3, 2, 5, 4))


@interpreted
def test_kernels_refuse_a_second_derivative(is_short):
    """The derivative would be wrong, because autograd does not see what is computed in the backward pass."""
    R = torch.randn(2, 7, 7, requires_grad=True)
    value = torch.randn(3, 2, 5, 8)
    out = attend_by_kernels([Bias(take_window(R, make_inputs(5)))], value)
    check_second_derivative_is_refused(out, R)
