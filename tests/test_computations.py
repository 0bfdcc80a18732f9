"""Every computation of the attention equals the plain one: value and gradients, any type, mask and length."""

import weakref
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from helpers import (
    SPECS,
    check_second_derivative_is_refused,
    future_mask,
    make_attention,
    padding_mask,
    run_attention,
)

from fairseq_synth import computations
from fairseq_synth.computations import fused, plain, tiled
from fairseq_synth.computations.threads import compute_in_threads
from fairseq_synth.logits import Bias, Logits, Outer, Product, apply_scale_and_weight
from fairseq_synth.masks import causal_mask, is_causal, sentence_lengths
from fairseq_synth.tensors import on_cpu

pytestmark = pytest.mark.usefixtures("on_device")
LENGTHS = [9, 9, 7, 7, 7, 4]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Sets sizes at which a batch of a few words is divided into many tiles, some of them smaller than others."""
    monkeypatch.setattr(tiled, "TILE", 80)
    monkeypatch.setattr(tiled, "CAUSAL_ROWS", 4)
    monkeypatch.setattr(tiled, "PLAIN_LIMIT", 0)


def assert_results_equal(results, expected, atol=1e-12):
    """Checks that two results of `run_attention` are equal up to rounding."""
    assert results.keys() == expected.keys()
    for name, expected_result in expected.items():

        def begin_with_name(message, name=name):
            """Returns torch's error message behind the name of the result."""
            return f"{name}: {message}"

        torch.testing.assert_close(results[name], expected_result, atol=atol, rtol=0, msg=begin_with_name)


def has_inner_product(spec):
    """Returns whether a function of a spec has logits that are inner products, which the fused computation needs."""
    functions = set(spec.split("+"))
    functions_with_inner_product = {"vanilla", "dense", "factorized_random"}
    return not functions.isdisjoint(functions_with_inner_product)


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-12), (torch.float32, 5e-5)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[9] * 3, LENGTHS, [9]], ids=["full", "padded", "one"])
@pytest.mark.parametrize("spec", SPECS)
def test_each_computation_equals_the_plain_one(spec, lengths, causal, dtype, atol, monkeypatch):
    """The output, and the gradients of the input and of every parameter, are those of the plain computation."""
    torch.manual_seed(1)
    module = make_attention(spec).to(dtype)
    x_and_gradient = torch.randn(2, 9, len(lengths), 6, dtype=dtype)  # both are (T, B, C)
    x = x_and_gradient[0]
    gradient = x_and_gradient[1]
    padding = padding_mask(lengths) if min(lengths) < 9 else None
    masks = {"padding": padding, "is_causal": causal}
    expected = run_attention(module, x, gradient, monkeypatch, **masks, attend=plain.compute)

    chosen = run_attention(module, x, gradient, monkeypatch, **masks, attend=computations.attend)
    assert_results_equal(chosen, expected, atol)
    if has_inner_product(spec):
        in_one_call = run_attention(module, x, gradient, monkeypatch, **masks, attend=fused.compute)
        assert_results_equal(in_one_call, expected, atol)
    # The fixture `small_tiles`, which all tests of this file use, sets small sizes of tiles.
    in_small_tiles = run_attention(module, x, gradient, monkeypatch, **masks, attend=tiled.compute)
    assert_results_equal(in_small_tiles, expected, atol)
    # These are the sizes that `tiled` has without the fixture. A tile of this size has room for all logits.
    monkeypatch.setattr(tiled, "TILE", 1 << 19)
    monkeypatch.setattr(tiled, "CAUSAL_ROWS", 128)
    in_one_tile = run_attention(module, x, gradient, monkeypatch, **masks, attend=tiled.compute)
    assert_results_equal(in_one_tile, expected, atol)


@pytest.mark.parametrize("std", [1, 10, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "spec", ["random", "fixed_random", "random+vanilla", "random+dense", "factorized_dense+random"]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("computation", [None, fused])
def test_errors_with_large_logits_are_at_most_twice_those_of_the_plain_computation(
    spec, dtype, std, causal, computation, monkeypatch
):
    """Two things are checked of the output and of each gradient.

    1. It has no NaN and no infinity where the plain computation has none.
    2. Its largest error is at most twice that of the plain computation, plus a few rounding errors. An error is the
       difference to the plain computation in double precision. Results of torch's fused attention in half precision
       are exempt: it takes R as a mask in half precision, which rounds the logits more than the plain computation does.

    `computation` is None for the computation that is chosen for the batch. `std` is the standard deviation of R, and so
    the size of the logits.
    """
    if computation is fused and not has_inner_product(spec):
        pytest.skip("no inner product")
    torch.manual_seed(2)
    module = make_attention(spec)
    if spec == "fixed_random":
        module.synthesizer.components["fixed_random"].R.normal_(std=std)  # a buffer
    else:
        module.synthesizer.components["random"].R.data = std * torch.randn(2, 12, 12)  # a parameter
    module.to(dtype)
    x_and_gradient = torch.randn(2, 9, 6, 6).to(dtype)  # both are (T, B, C) = (9, 6, 6)
    x = x_and_gradient[0]
    gradient = x_and_gradient[1]
    masks = {"padding": padding_mask(LENGTHS), "is_causal": causal}

    attend = computations.attend if computation is None else computation.compute
    results = run_attention(module, x, gradient, monkeypatch, **masks, attend=attend)
    plain_results = run_attention(module, x, gradient, monkeypatch, **masks, attend=plain.compute)
    module.double()
    exact_results = run_attention(module, x.double(), gradient.double(), monkeypatch, **masks, attend=plain.compute)

    # 1. no new NaN
    for name, plain_result in plain_results.items():
        if torch.isfinite(plain_result).all():
            assert torch.isfinite(results[name]).all(), name

    # 2. the errors
    is_fused = computation is fused or x.is_cuda  # On a GPU, torch's fused attention is chosen.
    is_exempt = is_fused and dtype != torch.float32
    if not is_exempt:
        for name, exact_result in exact_results.items():
            error = (results[name].double() - exact_result).abs().max()
            plain_error = (plain_results[name].double() - exact_result).abs().max()
            allowed_rounding = compute_allowed_rounding(name, exact_results, dtype, std)
            assert error <= 2 * plain_error + allowed_rounding, name


def compute_allowed_rounding(name, exact_results, dtype, std):
    """Returns by how much a result may differ if the plain computation happens to have no error: 4 rounding errors.

    Args:
        name: the name of the result.
        exact_results: the results of `run_attention` in double precision.
        dtype: the type in which the result has been computed.
        std: the standard deviation of R.
    """
    if name == "k_proj.bias":
        # This bias adds one number to all logits of a row, which does not change the attention weights. So its exact
        # gradient is 0, and what is computed is nothing but rounding, which grows with the other results.
        largest_number = max(result.abs().max() for result in exact_results.values())
    else:
        largest_number = exact_results[name].abs().max()
    rounding_error = torch.finfo(dtype).eps * largest_number

    if dtype == torch.float32:
        # The gradient of alpha is a sum of products with R and with W2, which cancel. The products have larger rounding
        # errors than their small sum, and these errors grow with R. All results may have such errors.
        rounding_error *= max(std, 2)
    # In half precision the plain computation has such errors itself, and twice its errors are allowed anyway.
    return 4 * rounding_error


SENTENCES = 3
HEADS = 2
LENGTH = 9
WIDTH = 5

# the places of the two tensors of a product
LEFT = 0
RIGHT = 1


class Summand(NamedTuple):
    """A part of some logits: terms, and the number of the weight by which they are multiplied."""

    terms: list
    weight: int | None = None  # None: they have no weight


def check_logits(summands, causal):
    """Checks that the computations of softmax(S) V have the output and the gradients of the plain computation.

    Also checks that the computations write into none of the tensors.

    Args:
        summands: the `Summand`s whose sum is S. ``summand.weight`` is the index of one of two weights, or None.
        causal: whether a causal mask is given.
    """
    weights = torch.rand(2, HEADS, dtype=torch.float64, requires_grad=True)
    logits = Logits()
    for summand in summands:
        if summand.weight is None:
            weight = None
        else:
            weight = weights[summand.weight].view(1, HEADS, 1, 1)
        logits.add_terms(summand.terms, weight)
    # A term has tensors such as queries, keys or a bias, and perhaps a weight.
    tensors = []
    for term in logits.terms():
        tensors += [field for field in term if isinstance(field, torch.Tensor)]
    copies = [tensor.detach().clone() for tensor in tensors]
    value = torch.randn(SENTENCES, HEADS, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    # The output is (T B, C): it has a row for each token, and the heads are joined.
    gradient = torch.randn(LENGTH * SENTENCES, HEADS * WIDTH, dtype=torch.float64)
    attn_mask = causal_mask(value) if causal else None
    # A summand may be given twice, so that a tensor is in two terms. It is differentiated once.
    tensors_by_id = {id(tensor): tensor for tensor in [value, *tensors]}
    distinct_tensors = list(tensors_by_id.values())

    def compute(computation):
        """Returns the output of a computation and the gradient of each tensor, 0 for a tensor that it does not read."""
        out = computation.compute(logits, value, None, attn_mask)
        gradients = torch.autograd.grad(out, distinct_tensors, gradient, allow_unused=True, materialize_grads=True)
        return [out, *gradients]

    expected = compute(plain)
    torch.testing.assert_close(compute(tiled), expected, atol=1e-12, rtol=0)
    if logits.products:
        torch.testing.assert_close(compute(fused), expected, atol=1e-12, rtol=0)
    for tensor, copy in zip(tensors, copies):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [(), (LEFT,), (RIGHT,), (LEFT, RIGHT)], ids=str)
def test_logits_of_any_shape_equal_the_plain_computation(shared, causal):
    """The logits are such as no function of the paper has.

    Summands are shared in every place, a summand has one row for all queries, and summands are views of one matrix.
    `shared` names the places of a product whose tensor all sentences share.
    """
    torch.manual_seed(3)

    def make_tensor(place, rows=LENGTH, columns=4):
        """Returns random numbers (1 or SENTENCES, HEADS, rows, columns) for a place of a product, LEFT or RIGHT."""
        sentences = 1 if place in shared else SENTENCES
        return torch.randn(sentences, HEADS, rows, columns, dtype=torch.float64, requires_grad=True)

    product = Summand([Product(make_tensor(LEFT), make_tensor(RIGHT))], weight=0)
    outer = Summand([Outer(make_tensor(LEFT, columns=7), left_size=2)], weight=1)
    narrow_product = Product(make_tensor(LEFT, columns=3), make_tensor(RIGHT, columns=3))
    product_and_row = Summand([narrow_product, Bias(make_tensor(LEFT, rows=1, columns=LENGTH))])
    scaled_product = Summand([Product(make_tensor(LEFT), make_tensor(RIGHT), 0.5)], weight=1)
    matrix = Summand([Bias(make_tensor(RIGHT, columns=LENGTH))])
    row = Summand([Bias(make_tensor(LEFT, rows=1, columns=LENGTH))], weight=0)
    biases = [matrix, row]
    row_of_all_heads = Summand([Bias(torch.randn(1, 1, 1, LENGTH, dtype=torch.float64, requires_grad=True))])

    R = torch.randn(1, HEADS, 14, 14, dtype=torch.float64, requires_grad=True)
    first_rows = Summand([Bias(R[:, :, :LENGTH, :LENGTH])], weight=1)
    later_rows = Summand([Bias(R[:, :, 2 : 2 + LENGTH, :LENGTH])])
    views = [first_rows, later_rows]

    column = make_tensor(LEFT)[:, :1, :, :1]
    matrix_for_all_heads = Summand([Bias(column.expand(-1, -1, -1, LENGTH))])
    row_for_all_heads = Summand([Bias(make_tensor(RIGHT, rows=1, columns=LENGTH)[:, :1])])
    product_for_all_heads = Summand([Product(make_tensor(LEFT)[:, :1], make_tensor(RIGHT)[:, :1])])

    check_logits([matrix_for_all_heads, row_for_all_heads], causal)
    check_logits([matrix_for_all_heads], causal)
    check_logits([product_for_all_heads, matrix], causal)
    check_logits([product_for_all_heads], causal)
    check_logits([row, matrix], causal)
    check_logits([scaled_product, row, row_of_all_heads], causal)
    for more_summands in ([], biases, views):
        check_logits([product, outer, product_and_row, *more_summands], causal)
        check_logits([product, *more_summands], causal)
        check_logits([product, product_and_row, *more_summands], causal)
        check_logits([*biases, *more_summands], causal)
        check_logits([matrix, *more_summands], causal)
        check_logits([*views, *more_summands], causal)


def test_nothing_is_computed_of_factors_that_no_column_reaches():
    """There may be many such factors. Here 5 columns reach 2 of 4 left factors and 3 right ones."""
    logits = Logits([Outer(torch.randn(2, 3, 9, 7), left_size=4)]).normal_form(5)
    assert logits.left.shape == (2, 3, 9, 2)
    assert logits.right.shape == (2, 3, 9, 3)


def test_the_smaller_factor_of_a_product_takes_its_weight():
    """Here the smaller factor is the key, which all sentences share.

    A copy of the queries would be as large as the layer's input.
    """
    queries = torch.randn(3, 2, 9, 5)
    key = torch.randn(1, 2, 9, 5)
    weight = torch.rand(1, 2, 1, 1)
    left, right = apply_scale_and_weight(queries, key, scale=1.0, weight=weight)
    assert left is queries
    assert torch.equal(right, key * weight)
    left, right = apply_scale_and_weight(key, queries, scale=1.0, weight=weight)
    assert torch.equal(left, key * weight)
    assert right is queries


def test_a_weight_in_single_precision_leaves_factors_in_half_precision():
    """Under autocast, weights are in single precision."""
    query, key = torch.randn(2, 3, 2, 9, 5).half()
    shared_key = key[:1]
    weight = torch.rand(1, 2, 1, 1)
    for right_factor in (key, shared_key):
        left, right = apply_scale_and_weight(query, right_factor, scale=1.0, weight=weight)
        assert left.dtype == torch.half
        assert right.dtype == torch.half
    assert Logits([Bias(query, weight)]).total(5).dtype == torch.half


@pytest.mark.parametrize("number_of_terms", [1, 2, 3, 4])
def test_torchs_fused_attention_gets_tensors_of_the_type_of_the_values(number_of_terms, monkeypatch):
    """A GPU needs tensors of one type. Here the weights of the terms are in fp32, and all else is in fp16."""
    query, key, value = torch.randn(3, 3, 2, 9, 5).half()
    scaled_dot_product_attention = mock.Mock(return_value=value)
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", scaled_dot_product_attention)
    matrix = Bias(torch.randn(1, 2, 9, 9).half())
    row = Bias(torch.randn(1, 2, 1, 9).half())
    terms = [Product(query, key), row, matrix, matrix][:number_of_terms]
    weighted_terms = [term._replace(weight=torch.rand(1, 2, 1, 1)) for term in terms]
    logits = Logits(weighted_terms)
    fused.compute(logits, value, padding_mask([9, 7, 4]), None)
    (call,) = scaled_dot_product_attention.call_args_list
    fused_query, fused_key, _value = call.args
    assert fused_query.dtype == torch.half
    assert fused_key.dtype == torch.half
    assert call.kwargs["attn_mask"].dtype == torch.half


def test_a_sum_of_logits_is_in_single_precision_at_least():
    """Only a single summand keeps its type."""
    bias = Bias(torch.randn(1, 2, 6, 5).half())
    assert Logits([bias]).total(5).dtype == torch.float16
    assert Logits([bias, bias]).total(5).dtype == torch.float32


@pytest.mark.parametrize("sentences", [1, 3])
def test_a_summand_with_one_row_for_all_may_come_first(sentences):
    query = torch.randn(1, 2, 1, 4)
    key = torch.randn(1, 2, 5, 4)
    bias = torch.randn(1, 2, 6, 5).expand(sentences, -1, -1, -1)
    logits = Logits([Product(query, key), Bias(bias)]).total(5)
    torch.testing.assert_close(logits, query @ key.transpose(2, 3) + bias)


MIXED = "random+fixed_random+dense+vanilla"


@pytest.mark.parametrize(
    "spec, frozen",
    [
        (MIXED, "R"),
        (MIXED, "alpha"),
        (MIXED, "W1"),
        (MIXED, "W2"),
        (MIXED, "_proj"),
        ("factorized_random", "R1"),
    ],
)
def test_a_frozen_parameter_has_no_gradient_and_the_others_have_theirs(spec, frozen, monkeypatch):
    monkeypatch.setattr("fairseq_synth.computations.tiled.TILE", 16)
    module = make_attention(spec).double()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(frozen not in name)
    x, gradient = torch.randn(2, 9, len(LENGTHS), 6, dtype=torch.float64)
    padding = padding_mask(LENGTHS)
    expected = run_attention(module, x, gradient, monkeypatch, padding=padding, attend=plain.compute)
    results = run_attention(module, x, gradient, monkeypatch, padding=padding, attend=tiled.compute)
    assert not any(frozen in name for name in results)
    assert_results_equal(results, expected)


class Choice(NamedTuple):
    """The computation that a CPU chooses for a batch."""

    spec: str  # the functions of the attention
    sentences: int  # their number in the batch
    expected: str  # the name of the computation


CHOICES = [
    Choice("random", 3, "tiled"),
    Choice("fixed_random", 3, "tiled"),
    Choice("factorized_random", 3, "tiled"),
    Choice("random+factorized_random", 3, "tiled"),
    Choice("vanilla", 3, "fused"),
    Choice("vanilla", 1, "fused"),
    Choice("factorized_random+vanilla", 3, "tiled"),
    Choice("random", 1, "tiled"),
    Choice("dense", 3, "tiled"),
    Choice("factorized_dense", 3, "tiled"),
    Choice("random+vanilla", 3, "tiled"),
    Choice("dense+vanilla", 3, "tiled"),
]
CHOICES_FOR_SEVERAL_SENTENCES = [choice for choice in CHOICES if choice.sentences > 1]


def find_computation(
    spec, monkeypatch, sentences=3, training=True, dropout=0.0, attn_mask=None, padding=None, need_weights=False
):
    """Returns the name of the computation that is chosen for a batch of sentences of 9 words, such as "tiled".

    Args:
        spec: the functions of the attention.
        monkeypatch: pytest's fixture.
        sentences: the number of sentences.
        training: whether the attention is in training mode.
        dropout: the probability of dropout on the attention weights.
        attn_mask: the attention mask, None, or "causal" for a causal mask.
        padding: the padding mask (B, T), or None.
        need_weights: whether the attention has to return its weights. If so, no module of `computations` is called: the
            attention computes softmax(S) V itself, as the definition says. The result is "plain" for this, too.
    """
    module = make_attention(spec, dropout=dropout).train(training)
    x = torch.randn(9, sentences, 6)
    mask = causal_mask(x) if attn_mask == "causal" else attn_mask
    with monkeypatch.context() as patch:
        # Each computation, a module such as `fairseq_synth.computations.tiled`, gets a mock of its function `compute`,
        # which calls the function and remembers that it was called.
        mocks = {}
        for computation in computations.COMPUTATIONS:
            name = computation.__name__.removeprefix("fairseq_synth.computations.")
            mocks[name] = mock.Mock(side_effect=computation.compute)
            patch.setattr(computation, "compute", mocks[name])
        module(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=need_weights)
    names_of_called = [name for name, compute_mock in mocks.items() if compute_mock.called]
    if need_weights:
        assert names_of_called == []
        return "plain"
    (chosen_name,) = names_of_called
    mocks[chosen_name].assert_called_once()
    return chosen_name


@pytest.fixture
def on_cpu_alone(request):
    """Skips a test on devices other than a CPU, because it is about the choice that is made on a CPU."""
    if request.config.getoption("--device") != "cpu":
        pytest.skip("what a CPU chooses")


@pytest.mark.parametrize("spec, sentences, expected", CHOICES)
def test_a_cpu_chooses_the_same_computation_with_and_without_a_causal_mask(
    spec, sentences, expected, monkeypatch, on_cpu_alone
):
    assert find_computation(spec, monkeypatch, sentences) == expected
    assert find_computation(spec, monkeypatch, sentences, attn_mask="causal") == expected


@pytest.mark.parametrize("spec, sentences, expected", CHOICES)
def test_weights_are_computed_plainly(spec, sentences, expected, monkeypatch, on_cpu_alone):
    assert find_computation(spec, monkeypatch, sentences, need_weights=True) == "plain"


@pytest.mark.parametrize("spec, sentences, expected", CHOICES)
def test_a_cpu_does_not_compute_dropout_by_tiles(spec, sentences, expected, monkeypatch, on_cpu_alone):
    """There is no dropout in evaluation, so the choice is as usual there."""
    assert find_computation(spec, monkeypatch, sentences, training=False, dropout=0.1) == expected
    with_dropout = "fused" if expected == "fused" else "plain"
    assert find_computation(spec, monkeypatch, sentences, dropout=0.1) == with_dropout


@pytest.mark.parametrize("spec, sentences, expected", CHOICES)
def test_masks_of_numbers_are_computed_plainly(spec, sentences, expected, monkeypatch, on_cpu_alone):
    """The numbers of a mask are not read, so a mask that happens to be causal is not noticed."""
    trained_mask = future_mask(9).requires_grad_()
    for mask in (future_mask(9), future_mask(9).t(), trained_mask, torch.zeros(1, 1)):
        assert find_computation(spec, monkeypatch, sentences, attn_mask=mask) == "plain"


@pytest.mark.parametrize("spec, sentences, expected", CHOICES_FOR_SEVERAL_SENTENCES)
def test_a_cpu_does_not_compute_padding_on_the_left_by_tiles(spec, sentences, expected, monkeypatch, on_cpu_alone):
    padding_on_the_right = padding_mask([9, 5, 5])
    padding_on_the_left = padding_on_the_right.flip(1)
    assert find_computation(spec, monkeypatch, sentences, padding=padding_on_the_right) == expected
    with_padding_on_the_left = "fused" if expected == "fused" else "plain"
    assert find_computation(spec, monkeypatch, sentences, padding=padding_on_the_left) == with_padding_on_the_left


@pytest.mark.parametrize("spec", SPECS)
def test_a_batch_without_sentences_has_an_output_without_sentences(spec):
    """This also holds if the sentences would be long."""
    module = make_attention(spec, max_length=300)
    x = torch.randn(300, 0, 6, requires_grad=True)
    out, _ = module(x, x, x)
    out.sum().backward()
    assert out.size() == x.size()
    assert x.grad.size() == x.size()


def test_a_cpu_computes_small_batches_plainly(monkeypatch, on_cpu_alone):
    """A batch is small if its weights have at most PLAIN_LIMIT numbers: here 3 sentences, 2 heads and 9 × 9 weights."""
    monkeypatch.setattr(tiled, "PLAIN_LIMIT", 3 * 2 * 9 * 9)
    assert find_computation("dense", monkeypatch) == "plain"
    assert find_computation("random", monkeypatch) == "plain"


def test_weights_that_sentences_share_count_once_for_the_size_of_a_batch(monkeypatch, on_cpu_alone):
    """Sentences share the weights of random, unless padding makes the weights differ from sentence to sentence."""
    monkeypatch.setattr(tiled, "PLAIN_LIMIT", 2 * 9 * 9)
    assert find_computation("dense", monkeypatch) == "tiled"
    assert find_computation("random", monkeypatch) == "plain"
    assert find_computation("random", monkeypatch, padding=padding_mask([9, 5, 5])) == "tiled"


@pytest.mark.parametrize(
    "spec, sentences, expected",
    [
        # R is a bias, and no inner product.
        ("random", 3, "plain"),
        ("random", 1, "plain"),
        # R1 R2^T is an inner product, but all sentences share its logits, which the plain computation computes once.
        ("factorized_random", 3, "plain"),
        ("factorized_random", 1, "fused"),
        # q k^T and W2 relu(W1 x + b1) are inner products of a row and a column.
        ("vanilla", 3, "fused"),
        ("dense", 3, "fused"),
        # A_u B_v, the product of two numbers of the row, is no inner product.
        ("factorized_dense", 3, "plain"),
        # One inner product is enough. The other logits become the mask of the fused attention.
        ("random+vanilla", 3, "fused"),
        ("dense+vanilla", 3, "fused"),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_gpu_chooses_fused_attention_for_inner_products(spec, sentences, expected, dropout, monkeypatch):
    """ "meta" stands for any device other than a CPU. Its tensors have no values, so none is read.

    The context lets `find_computation` make its tensors on this device, too.
    """
    with torch.device("meta"):
        padding = torch.empty(sentences, 9, dtype=torch.bool)
        assert find_computation(spec, monkeypatch, sentences, dropout=dropout, padding=padding) == expected
        assert find_computation(spec, monkeypatch, sentences, dropout=dropout, attn_mask="causal") == expected


@pytest.mark.parametrize("lengths", [[9] * 6, [9, 9, 9, 7, 7, 4], LENGTHS, [9, 8, 7, 6, 5, 4]], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_what_a_gpu_computes_equals_the_plain_computation(spec, causal, lengths, monkeypatch):
    """The code that runs on a GPU is run on this device."""
    for computation in (fused, tiled):
        monkeypatch.setattr(computation, "on_cpu", lambda x: False)
    module = make_attention(spec).double()
    x, gradient = torch.randn(2, 9, 6, 6, dtype=torch.float64)
    masks = {"padding": padding_mask(lengths), "is_causal": causal}
    expected = run_attention(module, x, gradient, monkeypatch, **masks, attend=plain.compute)
    results = run_attention(module, x, gradient, monkeypatch, **masks)
    assert_results_equal(results, expected)


def test_lengths_are_known_of_sentences_with_padding_behind_them():
    """The lengths are None if a sentence has padding within it or is empty."""
    assert sentence_lengths(padding_mask(LENGTHS)) == LENGTHS
    assert sentence_lengths(torch.tensor([[False, False, False], [False, True, True]])) == [3, 1]
    assert sentence_lengths(torch.tensor([[False, False, False], [True, True, True]])) is None
    assert sentence_lengths(torch.tensor([[False, True, False], [False, False, False]])) is None


def test_the_causal_mask_is_known_by_its_size():
    assert is_causal(causal_mask(torch.zeros(3, 3)))
    assert not is_causal(None)
    assert not is_causal(future_mask(3))
    assert not is_causal(torch.zeros(0))
    assert not is_causal(torch.zeros(3, 0))


def test_a_tensor_is_on_a_cpu_or_not():
    assert on_cpu(torch.zeros(1, device="cpu"))
    assert not on_cpu(torch.zeros(1, device="meta"))


@pytest.mark.parametrize(
    "sentences, heads, max_length, rows", [(1, 1, 1, 1), (7, 3, 9, 4), (40, 8, 3, 3), (5, 2, 30, 4)]
)
def test_blocks_cover_each_sentence_and_head_once(sentences, heads, max_length, rows):
    """The sentences of a block stand next to each other. `divide_by_length` only joins sentences of one length."""
    lengths = sorted(torch.randint(1, max_length + 1, (sentences,)).tolist())

    blocks_of_head = torch.zeros(sentences, heads, dtype=torch.int)
    for block in tiled.divide_by_sentences(lengths, heads, rows, max_heads=2):
        blocks_of_head[block.sentences, block.heads] += 1
        assert block.length == max(lengths[block.sentences])
    assert (blocks_of_head == 1).all()

    blocks_of_head = torch.zeros(sentences, heads, dtype=torch.int)
    for block in tiled.divide_by_length(lengths, heads, rows, max_heads=2):
        blocks_of_head[block.sentences, block.heads] += 1
        assert set(lengths[block.sentences]) == {block.length}
    assert (blocks_of_head == 1).all()


@pytest.fixture
def restore_threads():
    """Gives torch the number of threads back that it had before the test."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kinds_of_terms", [("bias",), ("product", "bias"), ("product", "outer product")], ids="+".join)
def test_three_threads_compute_the_same_bits_as_one(kinds_of_terms, causal, monkeypatch, restore_threads):
    """The output and all gradients are the same. torch has its number of threads again after the computation.

    The logits are sums of terms, each multiplied by a weight. The terms are given as tensors, without a layer that
    computes them from its input: torch computes such a layer as a whole, and its bits may depend on the number of
    threads.
    """
    # The work is divided into blocks, smaller ones for several threads. With the smallest tiles, the blocks are the
    # same for any number of threads.
    monkeypatch.setattr(tiled, "TILE", 1)
    torch.manual_seed(1)
    sentences = len(LENGTHS)
    length = max(LENGTHS)
    heads = 6
    width = 3
    query_key_value = torch.randn(3, sentences, heads, length, width)
    query = query_key_value[0].requires_grad_()
    key = query_key_value[1].requires_grad_()
    value = query_key_value[2].requires_grad_()
    R = torch.randn(1, heads, length, length, requires_grad=True)
    factors = torch.randn(sentences, heads, length, 6, requires_grad=True)  # 3 left and 3 right features
    weights = torch.rand(2, heads, requires_grad=True)  # for one or two terms; the second one may be left over

    terms = {"product": Product(query, key), "bias": Bias(R), "outer product": Outer(factors, left_size=3)}
    logits = Logits()
    for index, kind in enumerate(kinds_of_terms):
        logits.add_terms([terms[kind]], weights[index].view(1, heads, 1, 1))
    padding = padding_mask(LENGTHS)
    attn_mask = causal_mask(value) if causal else None
    gradient = torch.randn(length * sentences, heads * width)  # the output is (T B, C)

    def compute_with_threads(number):
        """Returns the output, the gradients, and the output in inference, computed with this number of threads.

        A tensor that is in none of these terms has the gradient 0.
        """
        torch.set_num_threads(number)
        out = tiled.compute(logits, value, padding, attn_mask)
        inputs = [query, key, value, R, factors, weights]
        gradients = torch.autograd.grad(out, inputs, gradient, allow_unused=True, materialize_grads=True)
        assert torch.get_num_threads() == number
        with torch.inference_mode():
            out_in_inference = tiled.compute(logits, value, padding, attn_mask)
        return [out, *gradients, out_in_inference]

    expected_results = compute_with_threads(1)
    results = compute_with_threads(3)
    for expected, result in zip(expected_results, results):
        assert torch.equal(result, expected)


def test_an_error_in_a_thread_reaches_the_caller(restore_threads):
    """The error is raised where the result is asked for, and torch has its number of threads again."""

    def fail(item):
        """Takes the place of a computation that ends with an error."""
        raise ValueError(f"item {item}")

    torch.set_num_threads(2)
    with pytest.raises(ValueError, match="item 1"):
        list(compute_in_threads(fail, [1, 2, 3]))
    assert torch.get_num_threads() == 2


def test_the_results_of_a_block_are_freed_before_those_of_the_next_are_computed(monkeypatch, restore_threads):
    """With one thread, only one block at a time needs memory, for its output or for its gradients."""
    torch.set_num_threads(1)
    original_differentiate = tiled.differentiate_block
    blocks = []  # the blocks so far
    references = []  # to the tensors of their gradients

    def differentiate_block(block, **kwargs):
        """Takes the place of `tiled.differentiate_block`: checks that no earlier gradients exist any more."""
        blocks.append(block)
        assert all(reference() is None for reference in references)
        gradients = original_differentiate(block, **kwargs)
        for tensor in (gradients.value, *gradients.tensors.values()):
            references.append(weakref.ref(tensor))
        return gradients

    original_compute = tiled.compute_block
    references_to_outputs = []

    def compute_block(*args, **kwargs):
        """Takes the place of `tiled.compute_block`: checks that no earlier outputs exist any more."""
        assert all(reference() is None for reference in references_to_outputs)
        out = original_compute(*args, **kwargs)
        references_to_outputs.append(weakref.ref(out))
        return out

    monkeypatch.setattr(tiled, "differentiate_block", differentiate_block)
    monkeypatch.setattr(tiled, "compute_block", compute_block)
    module = make_attention("random+vanilla")
    run_attention(module, torch.randn(9, 6, 6), torch.randn(9, 6, 6), monkeypatch, attend=tiled.compute)
    assert len(blocks) > 1


def test_tiles_refuse_a_second_derivative():
    """The derivative would be wrong, because autograd does not see what is computed in the backward pass."""
    R = torch.randn(1, 2, 9, 9, requires_grad=True)
    value = torch.randn(3, 2, 9, 4)
    out = tiled.compute(Logits([Bias(R)]), value, None, None)
    check_second_derivative_is_refused(out, R)


@pytest.mark.parametrize("place", ["on the left", "within", "a whole sentence"])
@pytest.mark.parametrize("spec", SPECS)
def test_padding_in_any_place_equals_the_plain_computation(spec, place, monkeypatch):
    padding = {
        "on the left": padding_mask(LENGTHS).flip(1),
        "within": padding_mask(LENGTHS).roll(2, dims=1),
        "a whole sentence": padding_mask([9, 9, 7, 7, 4, 0]),
    }[place]
    torch.manual_seed(1)
    module = make_attention(spec).double()
    x, gradient = torch.randn(2, 9, 6, 6, dtype=torch.float64)
    expected = run_attention(module, x, gradient, monkeypatch, padding=padding, attend=plain.compute)
    results = run_attention(module, x, gradient, monkeypatch, padding=padding)
    assert_results_equal(results, expected)


def test_padding_under_a_causal_mask_changes_nothing_for_words_in_fused_attention():
    """`attend` leaves such a padding mask out."""
    torch.manual_seed(1)
    padding = padding_mask(LENGTHS)
    value = torch.randn(6, 2, 9, 4)
    logits = Logits([Product(torch.randn(6, 2, 9, 4), torch.randn(6, 2, 9, 4))])
    out = fused.compute(logits, value, padding, causal_mask(value))
    expected = plain.compute(logits, value, padding, causal_mask(value))
    is_word = ~padding.t().reshape(9 * 6, 1)
    torch.testing.assert_close(out * is_word, expected * is_word)


def test_the_output_for_padding_is_finite():
    module = make_attention("random+vanilla")
    x = torch.randn(9, 6, 6)
    out, _ = module(x, x, x, key_padding_mask=padding_mask(LENGTHS))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("lengths", [LENGTHS, [9]], ids=["padded", "one"])
@pytest.mark.parametrize("mixture", ["convex", "sum"])
@pytest.mark.parametrize("spec", SPECS)
def test_autocast_is_close_to_single_precision(spec, mixture, lengths, monkeypatch, request):
    """The output and the gradients are compared. fairseq uses autocast with --amp."""
    module = make_attention(spec, mixture)
    x, gradient = torch.randn(2, 9, len(lengths), 6)
    padding = padding_mask(lengths)
    expected = run_attention(module, x, gradient, monkeypatch, padding=padding, attend=plain.compute)
    with torch.autocast(request.config.getoption("--device"), torch.bfloat16):
        results = run_attention(module, x, gradient, monkeypatch, padding=padding)
    scale = max(tensor.abs().max() for tensor in expected.values())
    for name, expected_result in expected.items():
        assert (results[name] - expected_result).abs().max() <= 0.03 * scale, name


@pytest.mark.parametrize("has_product", [False, True])
def test_tiles_keep_the_type_of_logits_and_values_under_autocast(has_product):
    """The output and the gradients have the type and the values that they have without autocast."""
    torch.manual_seed(6)
    value = torch.randn(3, 2, 9, 4, requires_grad=True)
    query = torch.randn(3, 2, 9, 4, requires_grad=True)
    key = torch.randn(3, 2, 9, 4, requires_grad=True)
    bias = torch.randn(1, 2, 9, 9, requires_grad=True)
    if has_product:
        logits = Logits([Bias(bias), Product(query, key)])
        inputs = [value, bias, query, key]
    else:
        logits = Logits([Bias(bias)])
        inputs = [value, bias]
    gradient = torch.randn(27, 8)
    expected = plain.compute(logits, value, None, None)
    expected_gradients = torch.autograd.grad(expected, inputs, gradient)
    with torch.autocast("cpu", torch.bfloat16):
        out = tiled.compute(logits, value, None, None)
        gradients = torch.autograd.grad(out, inputs, gradient)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients, expected_gradients)


def test_the_gradient_of_a_bias_is_summed_over_sentences_in_single_precision():
    """The gradient for 300 equal sentences is 300 times that for one sentence. A sum in bf16 would stop growing."""
    torch.manual_seed(7)
    # A sentence of 4 words, with one head of width 8.
    random_numbers = torch.randn(4, 1, 1, 4, 8).to(torch.bfloat16)
    value = random_numbers[0]  # (B, H, T, d_h) = (1, 1, 4, 8), as query and key
    query = random_numbers[1]
    key = random_numbers[2]
    gradient_of_sentence = random_numbers[3][0, 0]  # (4, 8)
    bias = torch.randn(1, 1, 4, 4).to(torch.bfloat16).requires_grad_()

    def compute_gradient(sentences):
        """Returns the gradient of the bias for a batch that contains the same sentence this many times."""
        product = Product(query.expand(sentences, -1, -1, -1), key.expand(sentences, -1, -1, -1))
        values = value.expand(sentences, -1, -1, -1)
        out = tiled.compute(Logits([Bias(bias), product]), values, key_padding_mask=None, attn_mask=None)
        # The output is (T B, C): all sentences' first words come first, so each row is repeated in its place.
        gradient = gradient_of_sentence.repeat_interleave(sentences, dim=0)
        (gradient_of_bias,) = torch.autograd.grad(out, bias, gradient)
        return gradient_of_bias

    assert compute_gradient(1).dtype == torch.bfloat16
    assert compute_gradient(300).dtype == torch.bfloat16
    torch.testing.assert_close(compute_gradient(300), 300 * compute_gradient(1), rtol=0.01, atol=0)
