"""What the tests of the kernels share: calls of the kernels and of the plain computation, and their comparison."""

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


def plan_with(monkeypatch, name, value):
    """Sets a function or a number by which launches are planned for the rest of the test, and forgets all plans."""
    monkeypatch.setattr(launches.Layout if name == "is_short" else launches, name, value)
    kernels.find_plan.cache_clear()


def list_tensors(tensors):
    """Returns all tensors among the `PassTensors` of a launch, which are in named tuples, as a list."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    if isinstance(tensors, tuple):
        return [tensor for part in tensors for tensor in list_tensors(part)]
    return []  # None: there is no such tensor


def plan_short_sentences(monkeypatch, is_short):
    """Lets sentences of any length be computed by the kernels for short sentences, or by those for long ones."""
    plan_with(monkeypatch, "is_short", lambda layout: is_short)


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
    """A term of some logits, and the number of the weight by which it is multiplied."""

    term: Any
    weight: int | None = None  # None: it has no weight


def make_logits(weights, *summands):
    """Returns the sum of `Summand`s as logits. weights: (M, H), a weight of each head in each row."""
    logits = Logits()
    rows_of_weights = weights.view(len(weights), 1, -1, 1, 1).unbind()
    for summand in summands:
        weight = None if summand.weight is None else rows_of_weights[summand.weight]
        logits.add_terms([summand.term], weight)
    return logits


def inputs_of_length(length):
    """Returns inputs of a whole sentence, from which parameters that depend on positions alone can be taken."""
    return Inputs(torch.empty(length, 0, 0), q=None, k=None, start=0, src_len=length)


def run_attention(module, x, gradient, monkeypatch, attend, *, padding=None, is_causal=False):
    """Returns what `helpers.run_attention` returns, computed by `attend_by_kernels` or `attend_plainly`.

    The function must not refuse the call.
    """

    def attend_of_module(logits, value, key_padding_mask, attn_mask, dropout):
        out = attend(logits, value, key_padding_mask, is_causal, dropout)
        assert out is not None
        return plain.join_heads(out)

    return helpers.run_attention(
        module, x, gradient, monkeypatch, padding=padding, is_causal=is_causal, attend=attend_of_module
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
        length: of the sentences, in tokens.
        masks: one of `MASKS`.
        monkeypatch: pytest's fixture.
        width: of each of two heads.
        dtype: the type of all tensors.
        std: the standard deviation of the parameters of random and relative_random.
        mixture: how the functions are mixed, convex or sum.
        sentences: their number.
        max_length: the longest length of the functions; default: as long as the sentences, or 12.
        beyond_length: what functions do with longer sentences.
    """
    torch.manual_seed(length)
    max_length = max_length or max(length, 12)
    module = make_attention(spec, mixture, 2 * width, max_length=max_length, beyond_length=beyond_length)
    for name, parameter in module.named_parameters():
        if name.endswith(("random.R", "random.r")):
            parameter.data.normal_(std=std)
    module.to(dtype)
    x, gradient = torch.randn(2, length, sentences, 2 * width).to(dtype)
    call = {"padding": make_padding(masks, length, sentences), "is_causal": masks == "causal"}

    results = run_attention(module, x, gradient, monkeypatch, attend_by_kernels, **call)
    if dtype != torch.float32:
        plain_results = run_attention(module, x, gradient, monkeypatch, attend_plainly, **call)
    exact = run_attention(module.double(), x.double(), gradient.double(), monkeypatch, attend_plainly, **call)

    scales = {name: measure_scale(name, exact) for name in exact}
    if dtype == torch.float32:
        tolerance = 2e-5 * max(1, std)
    else:
        plain_errors = []
        for name, scale in scales.items():
            plain_errors.append(float((plain_results[name].double() - exact[name]).abs().max()) / scale)
        rounding = {torch.float16: 5e-3, torch.bfloat16: 5e-2}[dtype]
        tolerance = max(rounding, 2 * max(plain_errors))
    assert results.keys() == exact.keys()
    for name, scale in scales.items():
        torch.testing.assert_close(
            results[name].double() / scale,
            exact[name] / scale,
            atol=tolerance,
            rtol=0,
            msg=lambda message, name=name: f"{name}: {message}",
        )


def measure_scale(name, exact):
    """Returns the largest number of a tensor among exact results, or 1 if it is smaller: errors are relative to it.

    The gradient of the bias of the keys is nothing but rounding, so that of their weight stands for it.
    """
    name_of_measured = "k_proj.weight" if name == "k_proj.bias" else name
    return max(1.0, float(exact[name_of_measured].abs().max()))


def choose_lengths(lengths, spec, masks):
    """Returns those of some lengths that are tested for some functions and masks, so that all tests take less time.

    For `MIXED`, each length is tested under all masks, for a single function under two of four, and for any other
    mixture under one.
    """
    if spec == MIXED:
        return lengths
    if spec in NAMES:
        has_padding = masks in ("padded", "left")
        first = (SPECS.index(spec) + has_padding) % 2
        return lengths[first::2]
    first = (SPECS.index(spec) + MASKS.index(masks)) % len(MASKS)
    return lengths[first :: len(MASKS)]


def is_chosen(spec, masks):
    """Returns whether --all tests some functions under a kind of masks.

    The kernels add up the summands of the logits one by one, and hide columns and rows afterwards. So a summand and a
    mask do not interact: each has to be tested with the kernels for short and for long sentences, but not each pair.

    - `MIXED`, which has all summands, is tested under all masks.
    - A single function is tested with padding and without, under one of two kinds of masks each. Its gradients are not
      summed with those of other functions.
    - Any other mixture is tested under one kind of masks, another one than the mixture before it.
    """
    number = SPECS.index(spec) if spec in SPECS else 0
    if spec == MIXED:
        return True
    if spec in NAMES:
        return masks in (["none", "padded"], ["causal", "left"])[number % 2]
    return masks == MASKS[number % len(MASKS)]


def is_supported(spec):
    """Returns whether the kernels compute these functions. vanilla alone is left to torch's fused attention."""
    return spec != "vanilla"


def make_random_logits(sentences, heads, length):
    """Returns logits with every kind of term that the kernels know, and the tensors that they are made of.

    Most terms have a weight of their own. Some factors are the same for all heads. Two terms cannot be read where they
    are and are copied: a product whose factors are no projections of the input, and a bias that is no part of a
    parameter.
    """
    tensors = []

    def make_tensor(*shape):
        tensor = torch.randn(*shape).mul_(0.5).requires_grad_()
        tensors.append(tensor)
        return tensor

    weights = make_tensor(5, heads)
    max_length = length + 2
    inputs = inputs_of_length(length)
    query = make_tensor(sentences, heads, length, 5)
    key = make_tensor(sentences, length, heads, 5).transpose(1, 2)
    query_of_all_heads = make_tensor(length, sentences, 1, 3).permute(1, 2, 0, 3)
    key_of_all_sentences = take_columns(make_tensor(1, 3, max_length).mT, inputs)
    left_size = length // 3 + 2
    outer_factors = make_tensor(sentences, heads, length, left_size + 3)
    row = take_column_bias(make_tensor(heads, max_length), inputs)
    window = take_window(make_tensor(1, max_length, max_length), inputs)
    shared_query = take_rows(make_tensor(heads, max_length, 2), inputs)
    shared_key = take_columns(make_tensor(1, max_length, 2), inputs)
    matrix = make_tensor(1, heads, length, length)
    logits = make_logits(
        weights,
        Summand(Product(query, key, 0.7), weight=3),
        Summand(Product(query_of_all_heads, key_of_all_sentences, 0.6), weight=0),
        Summand(Outer(outer_factors, left_size), weight=4),
        Summand(Bias(row), weight=2),
        Summand(Bias(window), weight=1),
        Summand(Product(shared_query, shared_key)),
        Summand(Bias(matrix)),
    )
    return logits, tensors
