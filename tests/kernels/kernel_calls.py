"""Calls of the kernels and of the plain computation, and their comparison, which the tests of the kernels share."""

from typing import Any, NamedTuple

import helpers
import torch
from helpers import NAMES, SPECS, make_attention, padding_mask

from fairseq_synth.computations import kernels, plain
from fairseq_synth.computations.kernels import launches
from fairseq_synth.logits import Bias, Logits, Outer, Product
from fairseq_synth.masks import causal_mask
from fairseq_synth.positions import Inputs, take_column_bias, take_columns, take_rows, take_window

MIXED = "random+factorized_random+dense+factorized_dense+vanilla"  # every kind of term that the kernels know
# Kinds of masks: padding behind the sentences or on the left, or a causal mask.
MASKS = ["none", "padded", "left", "causal"]


def choose_kernels(monkeypatch, is_short):
    """Lets sentences of any length be computed by the kernels for short sentences, or by those for long ones.

    The choice holds for the rest of the test. All plans are forgotten.

    Args:
        monkeypatch: pytest's fixture.
        is_short: whether the kernels are those for short sentences.
    """
    monkeypatch.setattr(launches.Layout, "is_short", lambda layout: is_short)
    kernels.find_plan.cache_clear()


def set_number_of_programs(monkeypatch, number):
    """Sets the number of programs that a backward pass aims at for the rest of the test, and forgets all plans."""
    monkeypatch.setattr(launches, "PROGRAMS", number)
    kernels.find_plan.cache_clear()


def list_tensors(part):
    """Returns all tensors among the `PassTensors` of a launch as a list.

    Args:
        part: the `PassTensors`, which are a named tuple of named tuples; or a part of them, which may be None.
    """
    if isinstance(part, torch.Tensor):
        return [part]
    tensors = []
    if isinstance(part, tuple):
        for smaller_part in part:
            tensors.extend(list_tensors(smaller_part))
    return tensors


def copy_to_offset(x, offset):
    """Returns a copy of a tensor that begins at an offset in its memory, and so has no aligned address.

    Args:
        x: the tensor.
        offset: the number of elements in front of it.
    """
    memory = torch.empty(offset + x.numel(), dtype=x.dtype)
    return memory[offset:].view(x.size()).copy_(x)


def attend(computation, logits, value, padding, is_causal, dropout):
    """Returns softmax(S) V, (B, H, T, d_h), by a computation; None if it refuses the call.

    Args:
        computation: a module of fairseq_synth.computations.
        logits: `Logits`, or a list of their terms.
        value: (B, H, T, d_h).
        padding: a mask (B, T), true for padding, or None.
        is_causal: whether rows see no later columns.
        dropout: the probability with which weights are dropped.
    """
    sentences, heads, length, width = value.size()
    if not isinstance(logits, Logits):
        logits = Logits(logits)
    attn_mask = causal_mask(value) if is_causal else None
    if computation.refuses(logits, value, padding, attn_mask, dropout):
        return None
    out = computation.compute(logits, value, padding, attn_mask, dropout)  # (T B, C)
    return out.view(length, sentences, heads, width).permute(1, 2, 0, 3)


def attend_by_kernels(logits, value, padding=None, is_causal=False, dropout=0.0):
    """Returns softmax(S) V as `attend` does, computed by the kernels."""
    return attend(kernels, logits, value, padding, is_causal, dropout)


def attend_plainly(logits, value, padding=None, is_causal=False, dropout=0.0):
    """Returns softmax(S) V as `attend` does, by the plain computation, with which the kernels are compared."""
    return attend(plain, logits, value, padding, is_causal, dropout)


class Summand(NamedTuple):
    """A term of some logits, and the number of the row in which its weights are among all weights."""

    term: Any
    weight_row: int | None = None  # None: it has no weight


def view_queries_keys_and_values(projection):
    """Returns queries, keys and values (B, 2, T, width), which are views of a projection (T, B, 3 * 2 * width).

    The features of a token are its queries, its keys and its values, each with those of the first and the second head.
    """
    views = []
    for part in projection.chunk(3, dim=-1):
        heads = part.unflatten(-1, (2, -1))  # (T, B, 2, width)
        views.append(heads.permute(1, 2, 0, 3))
    return views


def make_logits(weights, *summands):
    """Returns the sum of some `Summand`s as logits.

    Args:
        weights: (M, H). Each row has a weight for each head, and belongs to one summand.
        summands: the summands.
    """
    logits = Logits()
    # Each row gets the size (1, H, 1, 1), which fits logits (B, H, T, S).
    rows_of_weights = weights.view(len(weights), 1, -1, 1, 1).unbind()
    for summand in summands:
        if summand.weight_row is None:
            logits.add_terms([summand.term])
        else:
            logits.add_terms([summand.term], rows_of_weights[summand.weight_row])
    return logits


def make_inputs(length):
    """Returns inputs of a whole sentence, from which parameters that depend on positions alone can be taken."""
    return Inputs(torch.empty(length, 0, 0), q=None, k=None, start=0, src_len=length)


def run_attention(module, x, gradient, monkeypatch, attend, *, padding=None, is_causal=False):
    """Runs a self-attention forward and backward, and returns its results as `helpers.run_attention` does.

    All arguments but `attend` are those of `helpers.run_attention`.

    Args:
        attend: the function that computes softmax(S) V, `attend_by_kernels` or `attend_plainly`. It must not refuse the
            call.
    """

    def attend_for_module(logits, value, key_padding_mask, attn_mask, dropout):
        out = attend(logits, value, key_padding_mask, is_causal, dropout)
        assert out is not None
        return plain.join_heads(out)

    return helpers.run_attention(
        module, x, gradient, monkeypatch, padding=padding, is_causal=is_causal, attend=attend_for_module
    )


def make_padding(masks, length, sentences):
    """Returns a padding mask (B, T) for a kind of masks, or None if it has no padding.

    Of up to three sentences, the second one has half of the length, and the third one is padding alone.
    """
    padding = padding_mask([length, max(1, length // 2), 0])[:sentences]
    if masks == "padded":
        return padding
    if masks == "left":
        return padding.flip(1)
    return None


def check_kernels(
    spec,
    length,
    masks,
    monkeypatch,
    width=8,
    dtype=torch.float32,
    std=0.3,
    mixture="convex",
    sentences=3,
    max_length=None,
    beyond_length="refuse",
):
    """Checks that the kernels have the output and gradients of the plain computation in double precision.

    In half precision their errors may be twice those of the plain computation in half precision. The largest error of
    all tensors counts, since a single number, such as the gradient of a weight, can be right by chance.

    Args:
        spec: the functions.
        length: the length of the sentences, in tokens.
        masks: one of `MASKS`.
        monkeypatch: pytest's fixture.
        width: the width of each of two heads.
        dtype: the type of all tensors.
        std: the standard deviation of the parameters of random and relative_random.
        mixture: how the functions are mixed, convex or sum.
        sentences: the number of sentences.
        max_length: the longest length of the functions; default: as long as the sentences, or 12.
        beyond_length: what functions do with longer sentences.
    """
    if max_length is None:
        max_length = max(length, 12)
    torch.manual_seed(length)
    module = make_attention(spec, mixture, 2 * width, max_length=max_length, beyond_length=beyond_length)
    for name, parameter in module.named_parameters():
        if name.endswith(("random.R", "random.r")):
            parameter.data.normal_(std=std)
    module.to(dtype)
    x, gradient = torch.randn(2, length, sentences, 2 * width).to(dtype)
    call = {"padding": make_padding(masks, length, sentences), "is_causal": masks == "causal"}

    results = run_attention(module, x, gradient, monkeypatch, attend_by_kernels, **call)
    plain_results = None  # they are needed in half precision only
    if dtype != torch.float32:
        plain_results = run_attention(module, x, gradient, monkeypatch, attend_plainly, **call)
    exact = run_attention(module.double(), x.double(), gradient.double(), monkeypatch, attend_plainly, **call)

    if dtype == torch.float32:
        tolerance = 2e-5 * max(1, std)
    else:
        tolerance = choose_tolerance(dtype, plain_results, exact)
    assert results.keys() == exact.keys()
    for name in exact:
        scale = measure_scale(name, exact)
        torch.testing.assert_close(
            results[name].double() / scale,
            exact[name] / scale,
            atol=tolerance,
            rtol=0,
            msg=lambda message, name=name: f"{name}: {message}",
        )


def choose_tolerance(dtype, plain_results, exact):
    """Returns how large the errors of the kernels may be in half precision, relative to the scale of a tensor.

    Args:
        dtype: float16 or bfloat16.
        plain_results: {name: tensor}, the results of the plain computation in this type.
        exact: {name: tensor}, its results in double precision.
    """
    plain_errors = []
    for name in exact:
        largest_error = float((plain_results[name].double() - exact[name]).abs().max())
        plain_errors.append(largest_error / measure_scale(name, exact))
    error_of_rounding = {torch.float16: 5e-3, torch.bfloat16: 5e-2}[dtype]
    return max(error_of_rounding, 2 * max(plain_errors))


def measure_scale(name, exact):
    """Returns the largest number of a tensor among exact results, or 1 if it is smaller: errors are relative to it.

    The gradient of the bias of the keys is nothing but rounding, so that of their weight stands for it.

    Args:
        name: the name of the tensor.
        exact: {name: tensor}, all results in double precision.
    """
    measured_name = name
    if name == "k_proj.bias":
        measured_name = "k_proj.weight"
    return max(1.0, float(exact[measured_name].abs().max()))


def choose_lengths(lengths, spec, masks):
    """Returns those of some lengths that are tested for some functions and masks, so that all tests take less time.

    - For `MIXED`, each length is tested under all masks.
    - For a single function, it is tested under two kinds of masks. Those with padding have every second length, and
      those without have the others:

          masks                 function with an even number   function with an odd number
          none, causal          lengths 0, 2, 4                lengths 1, 3
          padded, left          lengths 1, 3                   lengths 0, 2, 4

    - For any other mixture, it is tested under one kind of masks. Each kind has every fourth length: the first kind
      begins with length 0 and the next kind with length 1, or one later for the mixture after it.

    The number of a function or a mixture is its index in `SPECS`.
    """
    if spec == MIXED:
        return lengths
    number = SPECS.index(spec)
    if spec in NAMES:
        is_odd = number % 2 == 1
        has_padding = masks in ("padded", "left")
        begins_with_second_length = is_odd != has_padding
        if begins_with_second_length:
            return lengths[1::2]
        return lengths[0::2]
    start = (number + MASKS.index(masks)) % len(MASKS)
    return lengths[start :: len(MASKS)]


def is_chosen(spec, masks):
    """Returns whether --all tests some functions under a kind of masks.

    The kernels add up the summands of the logits one by one, and hide columns and rows afterwards. So a summand and a
    mask do not interact: each has to be tested with the kernels for short and for long sentences, but not each pair.
    """
    # `MIXED` has all summands, and is tested under all masks.
    if spec == MIXED:
        return True
    number = SPECS.index(spec)
    # A single function is tested under one kind of masks with padding ("padded" or "left") and one without. Functions
    # that follow each other in `SPECS` take turns. Its gradients are not summed with those of other functions.
    if spec in NAMES:
        is_even = number % 2 == 0
        if is_even:
            return masks in ("none", "padded")
        return masks in ("causal", "left")
    # Any other mixture is tested under one kind of masks: the one after that of the mixture before it in `SPECS`.
    return masks == MASKS[number % len(MASKS)]


def is_supported(spec):
    """Returns whether the kernels compute these functions. vanilla alone is left to torch's fused attention."""
    return spec != "vanilla"


def make_random_logits(sentences, heads, length):
    """Returns logits with every kind of term that the kernels know, and the tensors that they are made of.

    Most terms have a weight of their own, and the rows of weights have another order than the terms. Some factors are
    the same for all heads. Parameters are for two tokens more than the sentences have, so that the terms read the
    beginning of them. The numbers of features have no meaning.

    Two terms cannot be read where they are and are copied: a product whose factors are no projections of the input, and
    a bias that is no part of a parameter.
    """
    tensors = []

    def make_tensor(*shape):
        tensor = torch.randn(*shape).mul_(0.5).requires_grad_()
        tensors.append(tensor)
        return tensor

    weights = make_tensor(5, heads)
    max_length = length + 2
    inputs = make_inputs(length)

    # A product of queries and keys with 5 features, which is copied. The keys lie in memory as (B, T, H, 5).
    query = make_tensor(sentences, heads, length, 5)  # (B, H, T, 5)
    key = make_tensor(sentences, length, heads, 5).transpose(1, 2)  # (B, H, T, 5)
    copied_product = Product(query, key, 0.7)

    # A product with keys that all sentences share, of 3 features. Both factors are the same for all heads. The queries
    # lie in memory as (T, B, 1, 3), and the parameter with the keys as (1, 3, max_length).
    query_of_all_heads = make_tensor(length, sentences, 1, 3).permute(1, 2, 0, 3)  # (B, 1, T, 3)
    key_of_all_sentences = take_columns(make_tensor(1, 3, max_length).mT, inputs)  # (1, 1, T, 3)
    dense_product = Product(query_of_all_heads, key_of_all_sentences, 0.6)

    # An outer product with 3 right features, and at least one left feature more than the columns of a sentence need.
    right_size = 3
    left_size = length // right_size + 2
    outer_product = Outer(make_tensor(sentences, heads, length, left_size + right_size), left_size)

    # A row for each head, and a matrix for all heads. Both are read in their parameters.
    row = Bias(take_column_bias(make_tensor(heads, max_length), inputs))  # (1, H, 1, T)
    window = Bias(take_window(make_tensor(1, max_length, max_length), inputs))  # (1, 1, T, T)

    # A matrix that is the product of two parameters, of which the keys are the same for all heads.
    shared_query = take_rows(make_tensor(heads, max_length, 2), inputs)  # (1, H, T, 2)
    shared_key = take_columns(make_tensor(1, max_length, 2), inputs)  # (1, 1, T, 2)
    product_of_parameters = Product(shared_query, shared_key)

    # A matrix that is no part of a parameter, and is copied.
    copied_bias = Bias(make_tensor(1, heads, length, length))

    logits = make_logits(
        weights,
        Summand(copied_product, weight_row=3),
        Summand(dense_product, weight_row=0),
        Summand(outer_product, weight_row=4),
        Summand(row, weight_row=2),
        Summand(window, weight_row=1),
        Summand(product_of_parameters),
        Summand(copied_bias),
    )
    return logits, tensors
