"""The Triton kernels without a GPU: their values under Triton's interpreter, and their compilation for GPUs.

Without ``--device cuda`` the interpreter runs them, and a stand-in for a driver compiles them. A chosen part runs by
default; ``--kernels`` runs everything.
"""

import argparse
import copy
import functools
import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import NAMES, SPECS, make_attention, padding_mask

from fairseq_synth import computations
from fairseq_synth.architectures import VARIANTS
from fairseq_synth.computations import kernels, launches, plain
from fairseq_synth.errors import SynthesizerError
from fairseq_synth.logits import bias_of, diagonals_of, outer_product_of, product_of
from fairseq_synth.masks import causal_mask
from recipes.command import ROOT

triton = pytest.importorskip("triton", reason="no Triton for this Python, or this system")
from compile_kernels import LIMITS  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

from fairseq_synth.computations import triton_long, triton_short, triton_sums  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("on_device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of minus infinity in the interpreter
]
MIXED = "random+factorized_random+dense+factorized_dense+vanilla"  # every place of the kernels
MASKS = ["none", "padded", "left", "causal"]


@pytest.fixture
def everything(request):
    """Whether all tests are to run, or a chosen part."""
    return request.config.getoption("--kernels")


@pytest.fixture(autouse=True)
def kernels_are_on(monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "1")
    monkeypatch.setattr(kernels, "PLANS", {})
    # on a GPU they are for half precision, as in fp32 they are slow; but fp32 is what shows that they are right
    monkeypatch.setattr(kernels, "DTYPES", (torch.float32, *kernels.DTYPES))


def plan_with(monkeypatch, name, value):
    """Launches are planned anew, with another function or number."""
    monkeypatch.setattr(launches, name, value)
    kernels.PLANS.clear()


@pytest.fixture(autouse=True)
def dirty_memory(monkeypatch):
    """New tensors of the kernels hold NaN, so that what is not written is noticed."""
    empty = torch.Tensor.new_empty

    def new_empty(x, *size, **kwargs):
        found = empty(x, *size, **kwargs)
        return found.fill_(float("nan")) if found.is_floating_point() else found

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


def run(module, x, grad, mask, causal, monkeypatch, computation):
    """Output and gradients of a layer by a computation; rows of padding have no gradient."""

    def attend(logits, value, key_padding_mask, attn_mask, dropout):
        key_padding_mask = None if causal else key_padding_mask
        assert computation.supports(logits, value, key_padding_mask, attn_mask, dropout)
        return computation.compute(logits, value, key_padding_mask, attn_mask, dropout)

    with monkeypatch.context() as patch:
        patch.setattr("fairseq_synth.attention.attend", attend)
        x = x.detach().requires_grad_()
        out, _ = module(x, x, x, key_padding_mask=mask, attn_mask=causal_mask(x) if causal else None)
        visible = torch.ones_like(out[..., :1]) if mask is None else (~mask).t().unsqueeze(-1).to(out.dtype)
        module.zero_grad()
        (out * visible).backward(grad)
    assert all(plan.works for plan in kernels.PLANS.values())  # none is replaced by another computation
    named = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    return {"out": out.detach() * visible, "x": x.grad, **named}


def mask_of(kind, length, bsz):
    """(B, T), true at padding, for three sentences: one of half the length, one of padding alone; or None."""
    mask = padding_mask([length, max(1, length // 2), 0])[:bsz]
    return {"padded": mask, "left": mask.flip(1)}.get(kind)


def check(spec, length, masks, monkeypatch, width=8, dtype=torch.float32, std=0.3, mixture="convex", bsz=3, m=None):
    """The kernels equal the plain computation in fp64.

    In half precision they may err twice as much as the plain computation does there, by the worst of its tensors: one
    number, such as the gradient of a weight, can be right by chance.
    """
    torch.manual_seed(length)
    module = make_attention(spec, mixture, 2 * width, max_length=m or max(length, 12))
    for name, parameter in module.named_parameters():
        if name.endswith(("random.R", "random.r")):
            parameter.data.normal_(std=std)
    module.to(dtype)
    x, grad = torch.randn(2, length, bsz, 2 * width).to(dtype)
    mask, causal = mask_of(masks, length, bsz), masks == "causal"
    found = run(module, x, grad, mask, causal, monkeypatch, kernels)
    rough = found if dtype == torch.float32 else run(module, x, grad, mask, causal, monkeypatch, plain)
    exact = run(module.double(), x.double(), grad.double(), mask, causal, monkeypatch, plain)
    least = {torch.float32: 2e-5 * max(1, std), torch.float16: 5e-3, torch.bfloat16: 5e-2}[dtype]
    assert found.keys() == exact.keys()
    # the key bias has no gradient but rounding
    same = {"k_proj.bias": "k_proj.weight"}
    scales = {name: max(1.0, float(exact[same.get(name, name)].abs().max())) for name in exact}
    of_plain = max(float((rough[name].double() - exact[name]).abs().max()) / scales[name] for name in exact)
    atol = least if dtype == torch.float32 else max(least, 2 * of_plain)
    for name, scale in scales.items():
        torch.testing.assert_close(
            found[name].double() / scale, exact[name] / scale, atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def some_of(lengths, spec, masks):
    """Each length runs under all masks for `MIXED`, under two for a function, and under one for any other mixture."""
    if spec == MIXED:
        return lengths
    if spec in NAMES:
        return lengths[(SPECS.index(spec) + (masks in ("padded", "left"))) % 2 :: 2]
    return lengths[(SPECS.index(spec) + MASKS.index(masks)) % len(MASKS) :: len(MASKS)]


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("spec", [*SPECS, MIXED])
def test_short_sentences(spec, masks, everything, monkeypatch):
    """Value and the gradient of every parameter and of the input."""
    if not is_supported(spec):
        pytest.skip("torch's fused attention")
    if not everything and spec != MIXED and (masks != "padded" if "+" in spec else masks in ("none", "left")):
        pytest.skip("in the chosen part two masks for each function, one for a mixture")
    for length in some_of([1, 7, 16, 33, 64], spec, masks) if everything else [7]:
        plan_with(monkeypatch, "is_short", lambda _: True)
        check(spec, length, masks, monkeypatch)


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("spec", [*SPECS, MIXED])
def test_long_sentences(spec, masks, everything, monkeypatch):
    """The same; small tiles, so that a few words have many of them, with rests."""
    if not is_supported(spec):
        pytest.skip("torch's fused attention")
    if not everything and (spec != MIXED and (spec not in NAMES or masks != "padded") or masks in ("none", "left")):
        pytest.skip("in the chosen part one mask for each function, and one mixture")
    if spec == MIXED and masks in ("none", "left"):
        pytest.skip("five functions take the interpreter minutes; the paper mixes two")
    plan_with(monkeypatch, "is_short", lambda _: False)
    tiles = {"rows": (16, 32), "columns": (32, 16)}
    monkeypatch.setattr(launches.Tile, "of", lambda kernel, _: launches.Tile(*tiles.get(kernel, (16, 16)), 4))
    for length in some_of([1, 7, 33, 65], spec, masks) if everything else [20]:
        check(spec, length, masks, monkeypatch, bsz=3 if everything and length < 65 else 2)


@pytest.mark.parametrize(
    "spec,padded,causal", [("random", 257, 130), ("random+vanilla", 130, 257), ("dense+vanilla", 130, 130)]
)
def test_many_tiles(spec, padded, causal, everything, monkeypatch):
    """The tiles that a GPU has, for sentences of so many tokens."""
    if not everything:
        pytest.skip("not in the chosen part")
    check(spec, padded, "padded", monkeypatch, m=260)
    check(spec, causal, "causal", monkeypatch, m=260)


def is_supported(spec):
    """Whether the kernels are for these functions."""
    return spec != "vanilla"


@pytest.mark.parametrize("width", [1, 8, 40, 64, 72])
def test_widths_of_a_head(width, everything, monkeypatch):
    for spec in ["dense+vanilla" if width > 64 else MIXED, *(NAMES if everything else [])]:
        if is_supported(spec):
            check(spec, 6, "padded", monkeypatch, width)


@pytest.mark.parametrize("spec", ["random", "relative_random", "random+vanilla"])
def test_large_logits(spec, monkeypatch):
    """R of standard deviation 50, where all weights but one are 0."""
    for is_short in (True, False):
        plan_with(monkeypatch, "is_short", lambda _, found=is_short: found)
        for masks in ("padded", "causal"):
            check(spec, 9, masks, monkeypatch, std=50)


@pytest.mark.parametrize("is_short", [True, False])
def test_distances_beyond_the_longest(is_short, monkeypatch):
    """relative_random has one value for all distances from m on, whose gradient is a sum of several diagonals."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    plan_with(monkeypatch, "PROGRAMS", 6)
    for spec, length in (("relative_random", 20), ("relative_random+vanilla", 7), ("relative_random", 4)):
        for masks in ("padded", "causal"):
            check(spec, length, masks, monkeypatch, m=4)


@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("columns", [slice(0, 5), slice(6, 11), slice(0, 11)], ids=["first", "last", "all"])
def test_distances_of_a_larger_tensor(columns, is_short, monkeypatch):
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    torch.manual_seed(0)
    values, (value, grad) = torch.randn(2, 11, requires_grad=True), torch.randn(2, 2, 2, 9, 4)
    logits = diagonals_of(values[None, :, None, columns], None, 0, 9)
    assert kernels.supports(logits, value, None, None, 0.0)
    outputs = (each.compute(logits, value, None, None) for each in (kernels, plain))
    found, expected = (torch.autograd.grad(out, values, grad)[0] for out in outputs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_sum_without_weights(monkeypatch):
    check("random+dense+vanilla", 9, "padded", monkeypatch, mixture="sum")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("spec", [*SPECS, MIXED])
def test_half_precision(spec, dtype, is_short, monkeypatch, request):
    """On a GPU as a head's width and sentences are there."""
    on_gpu = request.config.getoption("--device") != "cpu"
    if not is_supported(spec):
        pytest.skip("torch's fused attention")
    if dtype == torch.bfloat16 and not on_gpu:
        pytest.skip("numpy, which the interpreter computes with, has no bf16")
    if not on_gpu and spec not in ("random", MIXED):
        pytest.skip("the interpreter takes one function and one mixture")
    if not on_gpu:
        plan_with(monkeypatch, "is_short", lambda _: is_short)
    length = (30 if is_short else 130) if on_gpu else 9
    for masks in ("padded", "causal") if on_gpu else ("padded",):
        check(spec, length, masks, monkeypatch, 64 if on_gpu else 8, dtype)


@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("place", ["q", "x", "outer", "c", "r"])
def test_the_weight_of_a_constant(place, is_short, monkeypatch):
    """A constant changes no softmax: its weight has no gradient but rounding, although the output is rounded too."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    torch.manual_seed(0)
    query, key, value, grad = torch.randn(4, 2, 2, 20, 4, dtype=torch.float16)
    R = torch.randn(1, 2, 20, 20, dtype=torch.float16)
    weight = torch.full((2, 1, 1), 0.5, dtype=torch.float16, requires_grad=True)
    four = torch.full((2, 2, 20, 4), 4, dtype=torch.float16)
    constants = {  # of 64
        "q": lambda: product_of(four, four, weight),
        "x": lambda: product_of(four, four[:1], weight),
        "outer": lambda: outer_product_of(2 * torch.cat([four, four], 3), 2 * four, weight),
        "c": lambda: bias_of(16 * four[:1, :, :1, :1].expand(-1, -1, -1, 20), weight),
        "r": lambda: bias_of((16 * four[:1, :, :, :1]).repeat(1, 1, 1, 20), weight),
    }
    for others in (), (query, R, four):  # a gradient is wanted of the weight alone, and of more
        for x in others:
            x.requires_grad_()
        logits = constants[place]() + (bias_of(R) if place == "q" else product_of(query, key))
        found, *_ = torch.autograd.grad(
            kernels.compute(logits, value + 8, None, None), (weight, *others), grad, allow_unused=True
        )
        assert found.abs().max() < 0.1


@pytest.mark.parametrize("is_short", [True, False])
def test_one_sentence(is_short, monkeypatch):
    """Its products are not stored as matrices, although their factors have the size of those that a batch shares."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    for spec in ("random+vanilla", MIXED):
        check(spec, 9, "none", monkeypatch, bsz=1)
    product = product_of(*torch.randn(2, 1, 2, 7, 8))
    parts = kernels.parts_of(product + product, torch.randn(1, 2, 7, 8))
    assert len(parts.own) == len(parts.half) == 1 and not parts.matrices.tensors()


@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("programs", [1, 3])
def test_groups_of_sentences(programs, is_short, monkeypatch):
    """A program with several sentences, and a last group with fewer."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    plan_with(monkeypatch, "PROGRAMS", programs)
    check("random+dense", 5, "padded", monkeypatch)
    check(MIXED, 5, "causal", monkeypatch, bsz=5)


def random_logits(bsz, heads, length, is_small=False):
    """Logits in every place of the kernels, of views and copies that no projection leaves behind, and their leaves.

    Args:
        is_small: one row and one matrix, which the kernels read with their weights, not two of each.
    """
    leaves = []

    def new(*shape):
        leaves.append(torch.randn(*shape).mul_(0.5).requires_grad_())
        return leaves[-1]

    weight = new(heads, 1, 1)
    query, key = new(bsz, heads, length, 5), new(bsz, length, heads, 5).transpose(1, 2)
    logits = product_of(query, key, weight, scale=0.7)
    logits += product_of(new(length, bsz, 1, 3).permute(1, 2, 0, 3), new(1, 1, 3, length).mT, new(heads, 2, 1)[:, :1])
    logits += outer_product_of(new(bsz, heads, length, length // 3 + 2), new(bsz, 1, length, 3), new(heads, 1, 1))
    logits += bias_of(new(1, heads, 1, length), new(1, 1, 1).expand(heads, 1, 1))
    if not is_small:
        logits += bias_of(new(1, 1, 1, length), weight) + product_of(new(1, heads, length, 2), new(1, 1, length, 2))
    logits += bias_of(new(1, 1, length, length).mT, weight)
    return logits, leaves


@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("length", [1, 9])
def test_any_memory(length, is_short, is_small, monkeypatch):
    """Tensors that lie in any way: what the kernels cannot read is copied. Each summand has a weight of its own."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    logits, leaves = random_logits(3, 2, length, is_small)
    value = torch.randn(3, 2, length, 6, requires_grad=True)
    leaves.append(value)
    grad = torch.randn(3, 6, length, 2).permute(0, 3, 2, 1)
    assert kernels.supports(logits, value, None, None, 0.0)
    found = torch.autograd.grad(kernels.compute(logits, value, None, None), leaves, grad)
    expected = torch.autograd.grad(plain.compute(logits, value, None, None), leaves, grad)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@pytest.mark.parametrize("is_short", [True, False])
def test_views_of_one_tensor(is_short, monkeypatch):
    """A gradient reaches each element once for every use, and nothing that is not its own."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    whole = torch.randn(5, 3, 12, requires_grad=True)  # (T, B, features)
    R = torch.randn(2, 7, 8, requires_grad=True)
    alpha = torch.randn(2, 2, requires_grad=True)

    def heads(first, last, x=whole):
        return x[..., first:last].unflatten(-1, (2, -1)).permute(1, 2, 0, 3)

    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return 3 * grad

    a, b = alpha.softmax(0)[:, :, None, None].unbind()
    q, bias = heads(0, 4), bias_of(R[None, :, :5, :5], b)
    calls = {
        "packed": (product_of(q, heads(4, 8), a) + bias, heads(8, 12)),
        "a part of the whole": (product_of(q, heads(6, 10), a) + bias, torch.randn(3, 2, 5, 4)),
        "the same twice": (product_of(q, q, a) + bias, q),
        "overlapping": (product_of(q, heads(2, 6), a) + bias, heads(3, 7)),
        "without a gradient": (product_of(q.detach(), heads(4, 8), a) + bias_of(R.detach()[None, :, :5, :5]), q),
        "a gradient of its own": (product_of(Tripled.apply(q), heads(4, 8), a) + bias, Tripled.apply(heads(8, 12))),
        "not from the beginning": (bias_of(R[None, :, 2:, 3:], b), heads(8, 12)),
        "transposed": (
            bias_of(R[None, :, :5, :5].mT),
            heads(8, 12, whole.transpose(0, 1).contiguous().transpose(0, 1)),
        ),
        "of the heads' weights": (bias_of(R[None, :, :5, :5], alpha[0, :, None, None]) + product_of(q, q, b), q),
    }
    for name, (logits, value) in calls.items():
        results = []
        for computation in (kernels, plain):
            out = computation.compute(logits, value, None, None)
            grad = torch.linspace(-1, 1, out.numel()).view_as(out)
            grads = torch.autograd.grad(out, [whole, R, alpha], grad, retain_graph=True, allow_unused=True)
            results.append([out, *(torch.zeros(()) if x is None else x for x in grads)])
        for found, expected in zip(*results):
            torch.testing.assert_close(
                found, expected.expand_as(found), atol=1e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("is_short", [True, False])
def test_dropout(is_short, monkeypatch):
    """Values and gradients under the mask of dropped weights that the forward pass shows where V is the identity."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    torch.manual_seed(0)
    length, p = 20, 0.4
    logits, leaves = random_logits(3, 2, length)
    monkeypatch.setattr(torch, "randint", lambda *_, **kwargs: torch.tensor([1234567890123456789]))
    eye = torch.eye(length).expand(3, 2, length, length)
    weights, dropped = kernels.compute(logits, eye, None, None), kernels.compute(logits, eye, None, None, p)
    factors = (dropped / weights).detach()
    kept = factors > 0.5
    torch.testing.assert_close(factors, kept / (1 - p), atol=1e-3, rtol=0)
    assert abs(kept.float().mean() - (1 - p)) < 0.05
    rows = kept.flatten(0, 2)
    assert len(rows.unique(dim=0)) == len(rows)  # each row of each head and sentence has numbers of its own
    value = torch.randn(3, 2, length, 6, requires_grad=True)
    grad = torch.randn(3, 2, length, 6)
    found = torch.autograd.grad(kernels.compute(logits, value, None, None, p), [value, *leaves], grad)
    monkeypatch.setattr(plain, "drop", lambda weights, *_: weights * kept / (1 - p))
    expected = torch.autograd.grad(plain.compute(logits, value, None, None, p), [value, *leaves], grad)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_calls_that_lie_alike_have_one_plan(monkeypatch):
    """Later batches of a size, and other layers, take the launches of the first; all else has launches of its own."""
    calls = [("random+vanilla", 7, "padded"), ("random+vanilla", 7, "causal"), ("random+vanilla", 9, "padded")]
    calls += [(MIXED, 7, "padded"), ("dense+factorized_random", 7, "none")]
    for plans in (len(calls), len(calls)):
        for spec, length, masks in calls:
            check(spec, length, masks, monkeypatch, m=12)
        assert len(kernels.PLANS) == plans


BASE_CALL = dict(
    bsz=2, length=3, places=[(0, 0), (0, 8), (0, 16)], wanted=[True, True, True, True], alphas=2, weights=[0, 1],
    scale=1.0, is_transposed=False, masks="none",
)  # fmt: skip
OTHER_CALLS = [
    dict(bsz=3), dict(length=2), dict(places=[(0, 8), (0, 0), (0, 16)]), dict(places=[(0, 0), (1, 8), (0, 16)]),
    dict(places=[(1, 0), (1, 8), (1, 16)], wanted=[False, True, True, True]), dict(wanted=[False, True, True, True]),
    dict(wanted=[True, True, False, True]), dict(wanted=[True, True, True, False]), dict(alphas=3),
    dict(weights=[1, 0]), dict(weights=[None, 0]), dict(weights=[0, None]), dict(scale=0.5), dict(is_transposed=True),
    dict(masks="padded"), dict(masks="causal"),
]  # fmt: skip


def values_and_gradients(computation, bsz, length, places, wanted, alphas, weights, scale, is_transposed, masks):
    """Of logits whose tensors are views of two wholes, a matrix and weights, with more rows than there are tokens."""
    torch.manual_seed(0)
    shapes = [(5, bsz, 24), (5, bsz, 24), (2, 4, 4), (alphas, 2)]
    *wholes, R, alpha = leaves = [
        torch.randn(shape, requires_grad=is_wanted) for shape, is_wanted in zip(shapes, wanted)
    ]
    alpha = [None, *alpha.softmax(0)[:, :, None, None].unbind()]
    q, k, v = (
        wholes[i][:length, :, first : first + 8].unflatten(-1, (2, -1)).permute(1, 2, 0, 3) for i, first in places
    )
    of_product, of_bias = (alpha[0 if row is None else row + 1] for row in weights)
    bias = R.mT if is_transposed else R
    logits = product_of(q, k, of_product, scale) + bias_of(bias[None, :, :length, :length], of_bias)
    mask = padding_mask([length - 1, *[length] * (bsz - 1)]) if masks == "padded" else None
    out = computation.compute(logits, v, mask, causal_mask(wholes[0]) if masks == "causal" else None)
    rows = out if mask is None else out.masked_fill(mask[:, None, :, None], 0.0)
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad(rows.square().sum(), leaves, allow_unused=True)
    return [rows, *(torch.zeros(()) if x is None else x for x in grads)]


@pytest.mark.parametrize("number", range(len(OTHER_CALLS)))
def test_plans_are_told_apart(number):
    """A call after one that differs in one property."""
    call = {**BASE_CALL, **OTHER_CALLS[number]}
    values_and_gradients(kernels, **BASE_CALL)
    for found, expected in zip(values_and_gradients(kernels, **call), values_and_gradients(plain, **call)):
        torch.testing.assert_close(found, expected.expand_as(found), atol=1e-4, rtol=0)


def test_dropout_differs_from_call_to_call():
    module = make_attention("random+vanilla", dropout=0.5).train()
    x = torch.randn(7, 3, 6)
    torch.manual_seed(1)
    first, second = module(x)[0], module(x)[0]
    torch.manual_seed(1)
    again = module(x)[0]
    assert torch.equal(first, again) and not torch.equal(first, second)


def test_activation_checkpointing():
    """The second forward pass of --checkpoint-activations drops the same weights."""
    module = make_attention("random+vanilla", dropout=0.5).train()
    found = []
    for again in (False, True):
        module.zero_grad()
        torch.manual_seed(1)
        x = torch.linspace(-1, 1, 7 * 3 * 6).view(7, 3, 6).requires_grad_()
        run = functools.partial(module, need_weights=False)
        out = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)[0] if again else run(x)[0]
        torch.manual_seed(2)
        out.square().sum().backward()
        found.append([out, x.grad, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("spec", ["relative_random", MIXED])
def test_autocast(spec, monkeypatch, request):
    """--amp: values and factors in half precision, weights and what the batch shares in fp32."""
    device = request.config.getoption("--device")
    module = make_attention(spec)
    x, grad, mask = torch.randn(7, 3, 6), torch.randn(7, 3, 6), mask_of("padded", 7, 3)
    with torch.autocast(device, torch.float16):
        found = run(module, x, grad, mask, False, monkeypatch, kernels)
    exact = run(copy.deepcopy(module).double(), x.double(), grad.double(), mask, False, monkeypatch, plain)
    for name, value in exact.items():
        assert name == "out" or found[name].dtype == torch.float32
        torch.testing.assert_close(found[name].double(), value, atol=0.03, rtol=0.03, msg=lambda m, n=name: f"{n}: {m}")


def test_gradients_that_nobody_wants(monkeypatch):
    """Parameters that are not trained have no gradient, and the others the same as before."""
    module = make_attention("random+dense+vanilla")
    x, grad = torch.randn(2, 7, 3, 6)
    expected = run(module, x, grad, None, False, monkeypatch, kernels)
    frozen = [name for name, _ in module.named_parameters() if name.endswith(("R", "W2", "q_proj.weight"))]
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    found = run(module, x, grad, None, False, monkeypatch, kernels)
    assert set(expected) - set(found) == set(frozen)
    for name in found:
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize(
    "wanted,names",
    [
        ("v", ["backward_columns"]),
        ("a", ["backward_rows", "backward_columns", "add"]),
        ("kv", ["backward_rows", "backward_columns"]),
        ("R", ["backward_rows", "backward_matrix", "add"]),
        ("qkvRa", ["backward_rows", "backward_columns", "backward_matrix", "add"]),
    ],
)
def test_launches_of_what_is_wanted(wanted, names, monkeypatch):
    """A long sentence has a launch for each place of gradients, and their values do not depend on which are wanted.

    Each of the three sentences has programs of its own, but where gradients are sums over all of them.
    """
    plan_with(monkeypatch, "is_short", lambda _: False)
    plan_with(monkeypatch, "PROGRAMS", 1)
    x = dict(zip("qkv", torch.randn(3, 3, 2, 7, 8)), R=torch.randn(1, 2, 7, 7), a=torch.rand(2, 1, 1))
    leaves = [x[name].requires_grad_() for name in wanted]
    called, run = [], kernels.run
    monkeypatch.setattr(kernels, "run", lambda launch, t: (called.append(launch), run(launch, t)))

    def gradients(computation):
        out = computation.compute(product_of(x["q"], x["k"], x["a"]) + bias_of(x["R"]), x["v"], None, None)
        return torch.autograd.grad(out.square().sum(), leaves)

    for found, expected in zip(gradients(kernels), gradients(plain)):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert [launch.kernel.__name__ for launch in called] == ["forward", *names]
    programs = {launch.kernel.__name__: launch.grid for launch in called}
    assert programs.get("backward_columns", (6,)) == (6,) and programs.get("backward_matrix", (2,)) == (2,)


def test_off_by_default(monkeypatch):
    logits, value = bias_of(torch.randn(1, 2, 7, 7)), torch.randn(3, 2, 7, 8)
    assert kernels.supports(logits, value, None, None, 0.0)
    for setting in ("", "0"):
        monkeypatch.setenv(kernels.VARIABLE, setting)
        assert not kernels.supports(logits, value, None, None, 0.0)
    monkeypatch.setenv(kernels.VARIABLE, "true")
    with pytest.raises(SynthesizerError, match="FAIRSEQ_SYNTH_KERNELS=true: give 1 for on or 0 for off"):
        kernels.supports(logits, value, None, None, 0.0)
    monkeypatch.delenv(kernels.VARIABLE)
    assert not kernels.supports(logits, value, None, None, 0.0)


def test_a_device_that_is_too_old(monkeypatch, caplog):
    """The kernels are off there, which is said once."""
    monkeypatch.setattr(kernels, "triton_fits", lambda: False)
    kernels.device_fits.cache_clear()
    for _ in range(2):
        assert not kernels.supports(bias_of(torch.randn(1, 2, 7, 7)), torch.randn(3, 2, 7, 8), None, None, 0.0)
    kernels.device_fits.cache_clear()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "FAIRSEQ_SYNTH_KERNELS: has no effect on " in said and "compute capability 8.0 or higher, and Triton" in said


def test_what_is_not_supported(monkeypatch):
    """Everything else goes to the other computations."""
    bias, value = torch.randn(1, 2, 7, 7), torch.randn(3, 2, 7, 8)
    q = torch.randn(3, 2, 7, 8)
    own, half, outer = product_of(q, q), product_of(q, q[:1]), outer_product_of(q, q)

    def supported(logits, value=value, mask=None, attn_mask=None):
        return kernels.supports(logits, value, mask, attn_mask, 0.0)

    assert supported(own + half + outer + bias_of(bias))
    assert supported(bias_of(bias), value, torch.zeros(3, 7, dtype=torch.bool), None)
    assert not supported(own)  # torch's fused attention
    assert not supported(product_of(q[:1], q[:1]), value[:1]) and supported(own + bias_of(bias), value)
    for twice in (own + own, half + half, outer + outer, product_of(q[:1], q), bias_of(torch.randn(3, 2, 7, 7))):
        assert not supported(twice)
    assert not supported(bias_of(bias), attn_mask=torch.zeros(7, 7))
    assert not supported(bias_of(bias), value.double())
    assert not supported(bias_of(bias), torch.randn(3, 2, 7, 136))
    assert not supported(half + bias_of(bias), value.to("meta"))
    assert not supported(product_of(torch.randn(3, 2, 7, 136), torch.randn(1, 2, 7, 136)))
    assert not supported(bias_of(bias[:, :, :0, :0]), value[:, :, :0])
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    assert not supported(bias_of(bias))


def failing(monkeypatch, error):
    """Every kernel fails when it is loaded; a list with an element for each time."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("the interpreter compiles nothing")

    tried = []

    def load(*_):
        tried.append(True)
        raise error

    monkeypatch.setattr(kernels, "KINDS", {})
    monkeypatch.setattr(kernels, "device_fits", lambda _: True)
    monkeypatch.setattr(kernels, "is_interpreted", lambda: False)
    monkeypatch.setattr(kernels, "load", load)
    return tried


def test_a_kernel_that_does_not_compile(monkeypatch, caplog):
    """One warning, and the result of another computation, also in the calls that follow."""
    tried = failing(monkeypatch, RuntimeError("out of registers"))
    for length in (7, 7, 6):
        bias, value = torch.randn(1, 2, length, length), torch.randn(3, 2, length, 8)
        out = computations.attend(bias_of(bias), value, None, None)
        torch.testing.assert_close(out, plain.compute(bias_of(bias), value, None, None))
    assert len(tried) == 1 and [record.getMessage() for record in caplog.records] == [
        "FAIRSEQ_SYNTH_KERNELS: another computation is used for a call, as its kernel failed: "
        "RuntimeError('out of registers')"
    ]


def test_memory_that_ends_while_a_kernel_is_loaded(monkeypatch):
    """fairseq sees it, and the next call tries again."""
    tried = failing(monkeypatch, torch.cuda.OutOfMemoryError("CUDA out of memory"))
    for _ in range(2):
        with pytest.raises(torch.cuda.OutOfMemoryError):
            kernels.compute(bias_of(torch.randn(1, 2, 7, 7)), torch.randn(3, 2, 7, 8), None, None)
    assert len(tried) == 2 and not kernels.KINDS


def test_a_kernel_that_fails_after_others_of_its_kind(monkeypatch):
    """The second pass of activation checkpointing, with a gradient, cannot drop the weights that the first one has."""
    failing(monkeypatch, RuntimeError("out of registers"))
    bias, value = bias_of(torch.randn(1, 2, 7, 7)), torch.randn(3, 2, 7, 8)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "load", lambda *_: None)
        patch.setattr(kernels, "run", lambda *_: None)
        for dropout in (0.0, 0.5):
            kernels.compute(bias, value, None, None, dropout)
    with pytest.raises(SynthesizerError, match="set FAIRSEQ_SYNTH_KERNELS=0: .* kernel failed: .*out of registers"):
        kernels.compute(bias, value.requires_grad_(), None, None, 0.5)
    assert torch.equal(kernels.compute(bias, value, None, None), plain.compute(bias, value, None, None))


@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("bsz", [1, 3])
def test_saved_tensors_in_other_memory(bsz, is_short, monkeypatch):
    """torch's `save_on_cpu` brings back tensors that lie in another way."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    packed, shared = torch.randn(5, bsz, 2, 24), torch.randn(5, 1, 2, 8)
    q, k, v = (packed[..., i : i + 8].permute(1, 2, 0, 3) for i in (0, 8, 16))
    k = k[:, :1]  # of all heads
    R, grad = torch.randn(1, 2, 5, 5, requires_grad=True), torch.randn(bsz, 2, 5, 8)
    logits = product_of(q, k) + product_of(q, shared.permute(1, 2, 0, 3)) + bias_of(R)
    (expected,) = torch.autograd.grad(kernels.compute(logits, v, None, None), R, grad)

    def copied(x):
        return torch.empty(x.size(), dtype=x.dtype).copy_(x)

    with torch.autograd.graph.saved_tensors_hooks(copied, lambda x: x):
        out = kernels.compute(logits, v, None, None)
    assert torch.equal(torch.autograd.grad(out, R, grad)[0], expected)


@pytest.mark.parametrize("which", ["value", "bias", "mask", "grad", "saved"])
def test_memory_at_any_address(which, monkeypatch):
    """A launch that is compiled for memory at multiples of 16 bytes is not called with other memory."""
    plan_with(monkeypatch, "is_short", lambda _: False)
    seen, call = {}, kernels.run

    def run(launch, tensors):
        found = {name: kernels.is_aligned(x) for name, x in tensors.items() if x is not None}
        assert seen.setdefault(id(launch), found) == found
        call(launch, tensors)

    def moved(x, name, odd):
        if name != odd:
            return x
        return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.size()).copy_(x)

    monkeypatch.setattr(kernels, "run", run)
    value, grad = torch.randn(2, 5, 2, 2, 8)
    bias, mask, found = torch.randn(1, 2, 5, 5), padding_mask([5, 4]), []
    for odd in ("none", which, "none"):
        v, R = moved(value, "value", odd), moved(bias, "bias", odd).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(moved, name="saved", odd=odd), lambda x: x):
            out = kernels.compute(bias_of(R), v.permute(1, 2, 0, 3), moved(mask, "mask", odd), None)
        found += torch.autograd.grad(out, R, moved(grad, "grad", odd).permute(1, 2, 0, 3))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("is_short", [True, False])
def test_gradients_of_padding(is_short, monkeypatch):
    """Rows of padding at the end are 0, so that the gradient which comes back for them goes nowhere."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    lengths = [7, 4, 0]
    q, k, v, grad = torch.randn(4, 3, 2, 7, 8)
    leaves = [x.requires_grad_() for x in (q, k, v, torch.randn(1, 2, 7, 7))]
    logits, mask = product_of(q, k) + bias_of(leaves[-1]), padding_mask(lengths)
    out = kernels.compute(logits, v, mask, None)
    assert not out[mask[:, None].expand(3, 2, 7)].any()
    found = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    expected = torch.autograd.grad(out, leaves, grad.masked_fill(mask[:, None, :, None], 0.0))
    for a, b in zip(found, expected):
        assert torch.equal(a, b)


@pytest.mark.parametrize("length,spills", [(7, False), (70, True)])
def test_kernels_are_compiled_before_they_are_called(length, spills, monkeypatch):
    """Each kernel of both passes, with arguments of the types that it is called with; with more warps if it spills."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("a GPU compiles")
    compiled, called = {}, {}

    class Compiled:
        def __init__(self, kernel, options):
            self.kernel, self.options = kernel, options

        def __getitem__(self, grid):
            is_small = self.options["num_warps"] < launches.MOST_WARPS
            self.n_spills = (launches.MOST_SPILLS + 1) * (spills and is_small)  # known from here on

            def call(*args):
                called[self.kernel.__name__] = (list(map(kind, args)), grid, self.options)
                self.kernel.kernel[grid](*args)

            return call

    class Kernel:
        def __init__(self, kernel):
            self.kernel, self.__name__ = kernel, f"{kernel.__module__}.{kernel.__name__}"

        def warmup(self, *args, grid, **options):
            compiled[self.__name__] = (list(map(kind, args)), (*grid, 1, 1)[:3], options)
            return Compiled(self, options)

    def kind(x):
        if isinstance(x, tuple):
            return [kind(y) for y in x]
        return x.dtype if isinstance(x, torch.Tensor) else type(x)

    for module, names in (
        (triton_short, ["forward", "backward"]),
        (triton_long, ["forward", "backward_rows", "backward_columns", "backward_matrix"]),
        (triton_sums, ["add"]),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Kernel(getattr(module, name)))
    monkeypatch.setattr(kernels, "device_fits", lambda _: True)
    monkeypatch.setattr(kernels, "is_interpreted", lambda: False)
    module = make_attention("random+dense", max_length=length, dropout=0.1).train()
    x = torch.randn(length, 2, 6, requires_grad=True)
    out, _ = module(x, key_padding_mask=padding_mask([length, length - 1]))
    assert set(compiled) > set(called)  # the backward pass too
    out.sum().backward()
    assert compiled == called and len(called) == (3 if length == 7 else 5)
    assert all((options["num_warps"] == launches.MOST_WARPS) == spills for _, _, options in called.values())


WARPS_AND_STAGES = [
    (0, 99, [(2, 3)]),
    (0, 1, [(2, 3), (2, 2), (2, 1)]),  # shared memory for one stage
    (100, 99, [(2, 3)]),
    (101, 99, [(2, 3), (4, 3), (8, 3)]),
    (101, 2, [(2, 3), (2, 2), (4, 2), (8, 2)]),
]


@pytest.mark.parametrize("spills,stages,expected", WARPS_AND_STAGES)
def test_how_a_kernel_is_compiled_again(spills, stages, expected):
    """With fewer stages where shared memory ends, with more warps where registers do."""
    kernel = CompiledOnly(spills, stages)
    launch = launches.Launch(kernel, (7,), (), (), 2, 3)
    launch.compile([])
    assert kernel.tried == expected and launch.call == (7, 1, 1)


def test_a_kernel_that_is_too_large():
    with pytest.raises(OutOfResources):
        launches.Launch(CompiledOnly(0, 0), (7,), (), (), 2, 3).compile([])


class CompiledOnly:
    """A kernel that spills, and a GPU with shared memory for so many stages."""

    def __init__(self, spills, stages):
        self.n_spills, self.stages, self.tried = spills, stages, []

    def warmup(self, *args, grid, **options):
        self.tried.append(tuple(options.values()))
        return self

    def __getitem__(self, grid):
        if self.tried[-1][1] > self.stages:
            raise OutOfResources(2, 1, "shared memory")
        return grid


def without_interpreter(*arguments):
    """What tests/compile_kernels.py prints, line by line."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, ROOT / "tests" / "compile_kernels.py", *arguments]
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


CHOSEN = [(80, "bf16", 64, ["random", "random+vanilla"], [32], []), (90, "bf16", 64, ["dense+vanilla"], [64, 256], [])]
COMPILED = [spec for spec in dict.fromkeys([*NAMES, *VARIANTS, MIXED]) if is_supported(spec)]
# factorized_random has random's kernels
FEWER = [spec for spec in COMPILED if "factorized_random" not in spec or spec == MIXED]
MIXTURES = ["random+vanilla", "dense+vanilla"]
ALL = [(90, "bf16", 64, COMPILED, [32, 256], []), (90, "bf16", 64, MIXTURES, [64, 256], ["causal"])]
# sm_86 has the products of sm_80 and less shared memory
ALL += [(86, "bf16", width, FEWER, [256], []) for width in (64, 128)] + [(80, "bf16", 64, MIXTURES, [32, 256], [])]
ALL += [(90, *other, MIXTURES, [32, 256], []) for other in (("fp16", 64), ("bf16", 8), ("bf16", 40), ("bf16", 72))]


@pytest.mark.parametrize("number", range(len(ALL)))
def test_resources(number, everything):
    """Every launch compiles, spills few registers, and fits into a GPU's shared memory."""
    calls = ALL if everything else CHOSEN
    if number >= len(calls):
        pytest.skip("not in the chosen part")
    architecture, dtype, width, specs, lengths, masks = calls[number]
    check_resources(architecture, dtype, width, ",".join(specs), ",".join(map(str, lengths)), "padded", *masks)


@pytest.mark.parametrize("architecture", [80, 90, 120])
def test_resources_with_dropout(architecture, everything):
    """On Blackwell outside data centers too."""
    if not everything:
        pytest.skip("not in the chosen part")
    check_resources(architecture, "bf16", 64, ",".join(MIXTURES), "256", "dropped")


def check_resources(architecture, dtype, width, *more):
    found = without_interpreter(architecture, dtype, 8, width, *more)
    assert found
    for launch in map(json.loads, found):
        most = 400 if launch["num_warps"] < launches.MOST_WARPS else 600  # bytes
        assert launch["spilled"] <= most, launch
        assert launch["shared"] <= LIMITS[architecture], launch


def test_few_kernels_for_many_shapes(everything):
    """200 random numbers of sentences and tokens: a handful of sizes of tiles, with a few kernels each."""
    assert int(without_interpreter("--count", 200 if everything else 12, "random+vanilla")[-1]) <= 15


def test_launches(monkeypatch):
    """A block launches fewer kernels of a GPU, and no more than docs/gpu-kernels.md says."""
    monkeypatch.undo()  # memory filled with NaN is a launch more
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import launches

    page = (ROOT / "docs" / "gpu-kernels.md").read_text()
    for name in VARIANTS:
        before, after = (len(launches.count(name, True, dtype=torch.bfloat16, with_kernels=x)) for x in (False, True))
        assert after < before or name == "vanilla"
        if torch.__version__.startswith("2.13"):
            assert f"| `{name}` | {before} | {after} |" in page


def test_measuring(tmp_path, everything):
    """benchmarks/gpu.py in sizes of a few words: each part leaves a result, which a second call keeps."""
    # one of each kind but the steps, which take the interpreter many minutes with the kernels
    parts = ["tests", "correct", "backend", "causal-mixed", "generate-simple"] if everything else ["correct"]
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--dry", "--parts", *parts, "--out", tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for said in (f"{sys.executable} benchmarks/gpu.py --correctness", "has a result in"):
        done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
    rows = json.loads((tmp_path / "correct.json").read_text())
    assert {name: row["kernels"] for name, row in rows.items()} == {"random 3x7": 3, "fixed_random 3x7": 2}
    done = subprocess.run([*map(str, command[:3]), "--parts", "tea"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "error: --parts tea: choose from tests, tests-kernels, correct" in done.stderr


def test_a_measurement_without_kernels_is_none(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    for says, is_kept in (("another computation is used for a call", False), ("done", True)):
        monkeypatch.setattr(gpu, "commands", lambda _, says=says: {"block": ["-c", f"print({says!r})"]})
        assert gpu.run_part("block+kernels", argparse.Namespace(out=tmp_path, dry=True)) == is_kept
        assert (tmp_path / "block+kernels.json").exists() == is_kept
    assert "block+kernels: a kernel failed, and another computation was measured" in capsys.readouterr().out
