"""The Triton kernels without a GPU: their values under Triton's interpreter, and their compilation for GPUs.

Without ``--device cuda`` the interpreter runs them, and a stand-in for a driver compiles them, both slowly. As the
kernels are off by default, so is all of that but the calls of `CHOSEN`; ``--kernels`` runs everything.
"""

import copy
import functools
import json
import os
import re
import subprocess
import sys

import pytest
import torch
import warm
from helpers import NAMES, SPECS, Columns, make_attention, padding_mask

from fairseq_synth.architectures import VARIANTS
from fairseq_synth.computations import kernels, plain
from fairseq_synth.computations.kernels import launches
from fairseq_synth.computations.kernels.check import Comparison
from fairseq_synth.computations.kernels.tensors import NO_WEIGHTS
from fairseq_synth.errors import SynthesizerError
from fairseq_synth.logits import Bias, Diagonals, Logits, Outer, Product
from fairseq_synth.masks import causal_mask
from fairseq_synth.positions import Inputs, take_column_bias, take_columns, take_distances, take_rows, take_window
from fairseq_synth.synthesizers import register_synthesizer
from recipes.steps import ROOT

triton = pytest.importorskip("triton", "{}.{}".format(*kernels.TRITON), "no Triton that is new enough for the kernels")
from compile_kernels import LIMITS  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

from fairseq_synth.computations.kernels import triton_attention, triton_sums  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("on_device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of minus infinity in the interpreter
]
MIXED = "random+factorized_random+dense+factorized_dense+vanilla"  # every place of the kernels
MASKS = ["none", "padded", "left", "causal"]
# what the interpreter runs by default: short and long sentences, each kernel, each place of the logits, both masks
CHOSEN = {
    "test_short_sentences[random-padded]",
    "test_short_sentences[relative_random-causal]",
    f"test_short_sentences[{MIXED}-padded]",
    "test_long_sentences[random-padded]",
    "test_long_sentences[random+vanilla-causal]",
    "test_any_summands[2-True]",
    "test_views_of_the_projection[packed-True]",
    "test_launches_of_what_is_wanted[pRa-names5]",
    "test_saved_tensors_in_other_memory[3-True]",
    "test_memory_at_any_address[bias]",
}
interpreted = pytest.mark.interpreted


@pytest.fixture
def everything(request):
    """Whether all tests are to run, or a chosen part."""
    return request.config.getoption("--kernels") or request.config.getoption("--all")


@pytest.fixture(autouse=True)
def chosen(request, everything):
    """A test in which the interpreter or the compiler is at work is skipped, if it is not one of the chosen."""
    is_free = request.config.getoption("--device") != "cpu" or request.node.get_closest_marker("interpreted") is None
    if not (everything or is_free or request.node.name in CHOSEN):
        pytest.skip("the kernels are off by default, and this takes long without a GPU: --kernels")


@pytest.fixture(autouse=True)
def kernels_are_on(monkeypatch, chosen):
    monkeypatch.setattr(kernels, "SWITCH", "1")
    kernels.find_plan.cache_clear()
    kernels.device_fits.cache_clear()
    # the comparison with the definition, which takes the interpreter as long again, has tests of its own
    monkeypatch.setattr(kernels, "compare", lambda *_: Comparison(is_finite=True, difference=""))
    # on a GPU they are for half precision, as in fp32 they are slow; but fp32 is what shows that they are right
    monkeypatch.setattr(kernels, "DTYPES", (torch.float32, *kernels.DTYPES))


def plan_with(monkeypatch, name, value):
    """Launches are planned anew, with another function or number."""
    monkeypatch.setattr(launches.Layout if name == "is_short" else launches, name, value)
    kernels.find_plan.cache_clear()


def attend(computation, logits, value, mask, causal, dropout):
    """softmax(S) V, (B, H, T, d_h), by a computation; None where it refuses the call.

    `logits` are `Logits`, or a list of terms.
    """
    bsz, heads, length, width = value.size()
    logits = logits if isinstance(logits, Logits) else Logits(logits)
    call = logits, value, mask, causal_mask(value) if causal else None, dropout
    if computation.refuses(*call):
        return None
    return computation.compute(*call).view(length, bsz, heads, width).permute(1, 2, 0, 3)


def by_kernels(logits, value, mask=None, causal=False, dropout=0.0):
    return attend(kernels, logits, value, mask, causal, dropout)


def by_definition(logits, value, mask=None, causal=False, dropout=0.0):
    return attend(plain, logits, value, mask, causal, dropout)


def mixed(weights, *summands):
    """The sum of terms, each times a row of the weights (M, H), or -1 for 1."""
    logits = Logits()
    for term, row in summands:
        weight = weights.view(len(weights), 1, -1, 1, 1).unbind()[row] if row >= 0 else None
        logits.add_terms([term], weight)
    return logits


def all_of(length):
    """What a call of a whole sentence reads of parameters."""
    return Inputs(torch.empty(length, 0, 0), None, None, 0, length)


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

    def attend(logits, value, key_padding_mask, _, dropout):
        out = computation(logits, value, key_padding_mask, causal, dropout)
        assert out is not None
        return plain.join_heads(out)

    with monkeypatch.context() as patch:
        patch.setattr("fairseq_synth.attention.attend", attend)
        x = x.detach().requires_grad_()
        out, _ = module(x, x, x, key_padding_mask=mask, attn_mask=causal_mask(x) if causal else None)
        visible = torch.ones_like(out[..., :1]) if mask is None else (~mask).t().unsqueeze(-1).to(out.dtype)
        module.zero_grad()
        (out * visible).backward(grad)
    named = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    return {"out": out.detach() * visible, "x": x.grad, **named}


def mask_of(kind, length, bsz):
    """(B, T), true at padding, for three sentences: one of half the length, one of padding alone; or None."""
    mask = padding_mask([length, max(1, length // 2), 0])[:bsz]
    return {"padded": mask, "left": mask.flip(1)}.get(kind)


def check(
    spec,
    length,
    masks,
    monkeypatch,
    width=8,
    dtype=torch.float32,
    std=0.3,
    mixture="convex",
    bsz=3,
    m=None,
    beyond_length="refuse",
):
    """The kernels equal the plain computation in fp64.

    In half precision they may err twice as much as the plain computation does there, by the worst of its tensors: one
    number, such as the gradient of a weight, can be right by chance.
    """
    torch.manual_seed(length)
    module = make_attention(spec, mixture, 2 * width, max_length=m or max(length, 12), beyond_length=beyond_length)
    for name, parameter in module.named_parameters():
        if name.endswith(("random.R", "random.r")):
            parameter.data.normal_(std=std)
    module.to(dtype)
    x, grad = torch.randn(2, length, bsz, 2 * width).to(dtype)
    mask, causal = mask_of(masks, length, bsz), masks == "causal"
    found = run(module, x, grad, mask, causal, monkeypatch, by_kernels)
    rough = found if dtype == torch.float32 else run(module, x, grad, mask, causal, monkeypatch, by_definition)
    exact = run(module.double(), x.double(), grad.double(), mask, causal, monkeypatch, by_definition)
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


@interpreted
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("spec", [*SPECS, MIXED])
def test_short_sentences(spec, masks, everything, monkeypatch):
    """Value and the gradient of every parameter and of the input."""
    if not is_supported(spec):
        pytest.skip("torch's fused attention")
    for length in some_of([1, 7, 16, 33, 64], spec, masks) if everything else [7]:
        plan_with(monkeypatch, "is_short", lambda _: True)
        check(spec, length, masks, monkeypatch)


@interpreted
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("spec", [*SPECS, MIXED])
def test_long_sentences(spec, masks, everything, monkeypatch):
    """The same; small tiles, so that a few words have many of them, with rests."""
    if not is_supported(spec):
        pytest.skip("torch's fused attention")
    if spec == MIXED and masks in ("none", "left"):
        pytest.skip("five functions take the interpreter minutes; the paper mixes two")
    plan_with(monkeypatch, "is_short", lambda _: False)
    tiles = {"rows": (16, 32), "columns": (32, 16)}
    monkeypatch.setattr(launches.Tile, "for_kernel", lambda kernel, _: launches.Tile(*tiles.get(kernel, (16, 16)), 4))
    for length in some_of([1, 7, 33, 65], spec, masks) if everything else [20]:
        check(spec, length, masks, monkeypatch, bsz=3 if everything and length < 65 else 2)


@interpreted
@pytest.mark.parametrize(
    "spec,padded,causal", [("random", 257, 130), ("random+vanilla", 130, 257), ("dense+vanilla", 130, 130)]
)
def test_many_tiles(spec, padded, causal, monkeypatch):
    """The tiles that a GPU has, for sentences of so many tokens."""
    check(spec, padded, "padded", monkeypatch, m=260)
    check(spec, causal, "causal", monkeypatch, m=260)


def is_supported(spec):
    """Whether the kernels are for these functions."""
    return spec != "vanilla"


@interpreted
@pytest.mark.parametrize("width", [1, 8, 40, 64, 72])
def test_widths_of_a_head(width, monkeypatch):
    for spec in ["dense+vanilla" if width > 64 else MIXED, *NAMES]:
        if is_supported(spec):
            check(spec, 6, "padded", monkeypatch, width)


@interpreted
@pytest.mark.parametrize("spec", ["random", "relative_random", "random+vanilla"])
def test_large_logits(spec, monkeypatch):
    """R of standard deviation 50, where all weights but one are 0."""
    for is_short in (True, False):
        plan_with(monkeypatch, "is_short", lambda _, found=is_short: found)
        for masks in ("padded", "causal"):
            check(spec, 9, masks, monkeypatch, std=50)


@interpreted
@pytest.mark.parametrize("is_short", [True, False])
def test_distances_beyond_the_longest(is_short, monkeypatch):
    """relative_random has one value for all distances from m on, whose gradient is a sum of several diagonals."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    plan_with(monkeypatch, "PROGRAMS", 6)
    for spec, length in (("relative_random", 20), ("relative_random+vanilla", 7), ("relative_random", 4)):
        for masks in ("padded", "causal"):
            check(spec, length, masks, monkeypatch, m=4)


@interpreted
@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("columns", [slice(0, 5), slice(6, 11), slice(0, 11), slice(5, 6)], ids=str)
def test_distances_of_a_larger_tensor(columns, is_short, monkeypatch):
    """Also of one value for all distances, whose gradient is the sum of all diagonals."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    torch.manual_seed(0)
    values, (value, grad) = torch.randn(2, 11, requires_grad=True), torch.randn(2, 2, 2, 9, 4)
    outputs = (
        each([Diagonals(take_distances(values[:, columns], all_of(9)))], value) for each in (by_kernels, by_definition)
    )
    found, expected = (torch.autograd.grad(out, values, grad)[0] for out in outputs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@interpreted
def test_a_sum_without_weights(monkeypatch):
    check("random+dense+vanilla", 9, "padded", monkeypatch, mixture="sum")


@interpreted
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


@interpreted
@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("place", ["q", "x", "outer", "c", "r"])
def test_the_weight_of_a_constant(place, is_short, monkeypatch):
    """A constant changes no softmax: its weight has no gradient but rounding, although the output is rounded too."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    torch.manual_seed(0)
    query, key, value, grad = torch.randn(4, 2, 2, 20, 4, dtype=torch.float16)
    R = torch.randn(1, 2, 20, 20, dtype=torch.float16)
    weights = torch.full((1, 2), 0.5, dtype=torch.float16, requires_grad=True)
    four = torch.full((2, 2, 20, 4), 4, dtype=torch.float16)
    constants = {  # of 64
        "q": Product(four, four),
        "x": Product(four, four[:1]),
        "outer": Outer(2 * torch.cat([four, four, four], 3), 8),
        "c": Bias(16 * four[:1, :, :1, :1].expand(-1, -1, -1, 20)),
        "r": Bias((16 * four[:1, :, :, :1]).repeat(1, 1, 1, 20)),
    }
    for others in (), (query, R, four):  # a gradient is wanted of the weight alone, and of more
        for x in others:
            x.requires_grad_()
        other = Bias(R) if place == "q" else Product(query, key)
        out = by_kernels(mixed(weights, (constants[place], 0), (other, -1)), value + 8)
        found, *_ = torch.autograd.grad(out, (weights, *others), grad, allow_unused=True)
        assert found.abs().max() < 0.1


@interpreted
@pytest.mark.parametrize("is_short", [True, False])
def test_one_sentence(is_short, monkeypatch):
    """Its factors have the size of those that a batch shares."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    for spec in ("random+vanilla", MIXED):
        check(spec, 9, "none", monkeypatch, bsz=1)


@interpreted
@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("programs", [1, 3])
def test_groups_of_sentences(programs, is_short, monkeypatch):
    """A program with several sentences, and a last group with fewer."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    plan_with(monkeypatch, "PROGRAMS", programs)
    check("random+dense", 5, "padded", monkeypatch)
    check(MIXED, 5, "causal", monkeypatch, bsz=5)


def random_logits(bsz, heads, length):
    """Logits in every place of the kernels, each with a weight of its own, and their leaves. Some factors are of all
    heads, and there are two matrices and products that no projection leaves behind."""
    leaves = []

    def new(*shape):
        leaves.append(torch.randn(*shape).mul_(0.5).requires_grad_())
        return leaves[-1]

    weights, longer, inputs = new(5, heads), length + 2, all_of(length)
    logits = mixed(
        weights,
        (Product(new(bsz, heads, length, 5), new(bsz, length, heads, 5).transpose(1, 2), 0.7), 3),
        (Product(new(length, bsz, 1, 3).permute(1, 2, 0, 3), take_columns(new(1, 3, longer).mT, inputs), 0.6), 0),
        (Outer(new(bsz, heads, length, length // 3 + 5), length // 3 + 2), 4),
        (Bias(take_column_bias(new(heads, longer), inputs)), 2),
        (Bias(take_window(new(1, longer, longer), inputs)), 1),
        (Product(take_rows(new(heads, longer, 2), inputs), take_columns(new(1, longer, 2), inputs)), -1),
        (Bias(new(1, heads, length, length)), -1),
    )
    return logits, leaves


@interpreted
@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("length", [2, 9])
def test_any_summands(length, is_short, monkeypatch):
    """What the kernels cannot read where it is, is copied."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    logits, leaves = random_logits(3, 2, length)
    value = torch.randn(3, 2, length, 6, requires_grad=True)
    leaves.append(value)
    grad = torch.randn(3, 6, length, 2).permute(0, 3, 2, 1)
    found, expected = (torch.autograd.grad(f(logits, value), leaves, grad) for f in (by_kernels, by_definition))
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@interpreted
@pytest.mark.parametrize("spec", ["random", "columns", "factorized_random", "relative_random", "factorized_dense"])
@pytest.mark.parametrize("length", [5, 9])
def test_one_summand(spec, length, restore_registry, monkeypatch):
    """Its matrix, row or values are read whole, and have their gradient whole; beyond l they begin again."""
    register_synthesizer("columns")(Columns)
    for is_short in (True, False):
        plan_with(monkeypatch, "is_short", lambda _, found=is_short: found)
        check(spec, length, "padded", monkeypatch, m=6, beyond_length="tile")


@interpreted
@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("case", ["packed", "swapped", "the same twice", "without a gradient", "a hook", "retained"])
def test_views_of_the_projection(case, is_short, monkeypatch):
    """Queries, keys and values as the layer gives them, and what a function may do to them."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    packed, R = torch.randn(5, 3, 24, requires_grad=True), torch.randn(2, 7, 7, requires_grad=True)
    weights, results = torch.rand(2, 2, requires_grad=True), []
    for computation in (by_kernels, by_definition):
        q, k, v = (x.unflatten(-1, (2, 4)).permute(1, 2, 0, 3) for x in packed.split(8, dim=-1))
        seen = []
        if case == "a hook":
            k.register_hook(lambda grad, seen=seen: seen.append(grad) or 0 * grad)
        if case == "retained":
            q.retain_grad()
        query, key = {"swapped": (k, q), "the same twice": (q, q)}.get(case, (q, k))
        query = query.detach() if case == "without a gradient" else query
        out = computation(mixed(weights, (Product(query, key), 1), (Bias(take_window(R, all_of(5))), 0)), v)
        grad = torch.linspace(-1, 1, out.numel()).view_as(out)
        found = torch.autograd.grad(out, [packed, R, weights], grad, retain_graph=True)
        if case == "retained":
            out.backward(grad)
            seen.append(q.grad)
        results.append([out, *found, *seen])
    assert len(results[0]) == len(results[1]) == 4 + (case in ("a hook", "retained"))
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@interpreted
@pytest.mark.parametrize("is_short", [True, False])
def test_dropout(is_short, monkeypatch):
    """Values and gradients under the mask of dropped weights that the forward pass shows where V is the identity."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    torch.manual_seed(0)
    length, p = 20, 0.4
    logits, leaves = random_logits(3, 2, length)
    monkeypatch.setattr(torch, "randint", lambda *_, **kwargs: torch.tensor([1234567890123456789]))
    eye = torch.eye(length).expand(3, 2, length, length)
    weights, dropped = by_kernels(logits, eye), by_kernels(logits, eye, dropout=p)
    factors = (dropped / weights).detach()
    kept = factors > 0.5
    torch.testing.assert_close(factors, kept / (1 - p), atol=1e-3, rtol=0)
    assert abs(kept.float().mean() - (1 - p)) < 0.05
    rows = kept.flatten(0, 2)
    assert len(rows.unique(dim=0)) == len(rows)  # each row of each head and sentence has numbers of its own
    value = torch.randn(3, 2, length, 6, requires_grad=True)
    grad = torch.randn(3, 2, length, 6)
    found = torch.autograd.grad(by_kernels(logits, value, dropout=p), [value, *leaves], grad)
    monkeypatch.setattr(plain, "drop", lambda weights, *_: weights * kept / (1 - p))
    expected = torch.autograd.grad(by_definition(logits, value, dropout=p), [value, *leaves], grad)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@interpreted
def test_calls_that_lie_alike_have_one_plan(monkeypatch):
    """Later batches of a size, and other layers, take the launches of the first; all else has launches of its own."""
    calls = [("random+vanilla", 7, "padded"), ("random+vanilla", 7, "causal"), ("random+vanilla", 9, "padded")]
    calls += [(MIXED, 7, "padded"), ("dense+factorized_random", 7, "none")]
    for plans in (len(calls), len(calls)):
        for spec, length, masks in calls:
            check(spec, length, masks, monkeypatch, m=12)
        assert kernels.find_plan.cache_info().currsize == plans


BASE_CALL = dict(bsz=2, length=3, wanted=[True] * 3, alphas=2, rows=[0, 1], scale=1.0, masks="none", diagonals=False)
OTHER_CALLS = [
    dict(bsz=3), dict(length=2), dict(wanted=[False, True, True]), dict(wanted=[True, False, True]),
    dict(wanted=[True, True, False]), dict(alphas=3), dict(rows=[1, 0]), dict(rows=[-1, 0]), dict(rows=[0, -1]),
    dict(scale=0.5), dict(masks="padded"), dict(masks="causal"), dict(diagonals=True),
]  # fmt: skip


def values_and_gradients(computation, bsz, length, wanted, alphas, rows, scale, masks, diagonals):
    """Of a mixture of two summands."""
    torch.manual_seed(0)
    shapes = [(length, bsz, 24), (2, 7) if diagonals else (2, 4, 4), (alphas, 2)]
    packed, R, weights = leaves = [torch.randn(shape, requires_grad=x) for shape, x in zip(shapes, wanted)]
    q, k, v = (x.unflatten(-1, (2, 4)).permute(1, 2, 0, 3) for x in packed.split(8, dim=-1))
    inputs = all_of(length)
    shared = Diagonals(take_distances(R, inputs)) if diagonals else Bias(take_window(R, inputs))
    logits = mixed(weights, (Product(q, k, scale), rows[0]), (shared, rows[1]))
    mask = padding_mask([length - 1, *[length] * (bsz - 1)]) if masks == "padded" else None
    out = computation(logits, v, mask, masks == "causal")
    visible = out if mask is None else out.masked_fill(mask[:, None, :, None], 0.0)
    return [visible, *torch.autograd.grad(visible.square().sum(), [leaf for leaf in leaves if leaf.requires_grad])]


@interpreted
@pytest.mark.parametrize("number", range(len(OTHER_CALLS)))
def test_plans_are_told_apart(number):
    """A call after one that differs in one property."""
    call = {**BASE_CALL, **OTHER_CALLS[number]}
    values_and_gradients(by_kernels, **BASE_CALL)
    for found, expected in zip(values_and_gradients(by_kernels, **call), values_and_gradients(by_definition, **call)):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@interpreted
def test_dropout_differs_from_call_to_call():
    module = make_attention("random+vanilla", dropout=0.5).train()
    x = torch.randn(7, 3, 6)
    torch.manual_seed(1)
    first, second = module(x)[0], module(x)[0]
    torch.manual_seed(1)
    again = module(x)[0]
    assert torch.equal(first, again) and not torch.equal(first, second)


@interpreted
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


@interpreted
@pytest.mark.parametrize("spec", ["relative_random", MIXED])
def test_autocast(spec, monkeypatch, request):
    """--amp: values and factors in half precision, weights and what the batch shares in fp32."""
    device = request.config.getoption("--device")
    module = make_attention(spec)
    x, grad, mask = torch.randn(7, 3, 6), torch.randn(7, 3, 6), mask_of("padded", 7, 3)
    with torch.autocast(device, torch.float16):
        found = run(module, x, grad, mask, False, monkeypatch, by_kernels)
    exact = run(copy.deepcopy(module).double(), x.double(), grad.double(), mask, False, monkeypatch, by_definition)
    for name, value in exact.items():
        assert name == "out" or found[name].dtype == torch.float32
        torch.testing.assert_close(found[name].double(), value, atol=0.03, rtol=0.03, msg=lambda m, n=name: f"{n}: {m}")


@interpreted
def test_gradients_that_nobody_wants(monkeypatch):
    """Parameters that are not trained have no gradient, and the others the same as before."""
    module = make_attention("random+dense+vanilla")
    x, grad = torch.randn(2, 7, 3, 6)
    expected = run(module, x, grad, None, False, monkeypatch, by_kernels)
    frozen = [name for name, _ in module.named_parameters() if name.endswith(("R", "W2", "q_proj.weight"))]
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    found = run(module, x, grad, None, False, monkeypatch, by_kernels)
    assert set(expected) - set(found) == set(frozen)
    for name in found:
        torch.testing.assert_close(found[name], expected[name])


@interpreted
@pytest.mark.parametrize(
    "wanted,names",
    [
        ("a", ["backward_rows", "backward_columns", "add"]),
        ("p", ["backward_rows", "backward_columns"]),
        ("R", ["backward_rows", "backward_matrix", "add"]),
        ("x", ["backward_rows"]),
        ("w", ["backward_rows", "backward_columns", "add"]),
        ("pRa", ["backward_rows", "backward_columns", "backward_matrix", "add"]),
    ],
)
def test_launches_of_what_is_wanted(wanted, names, monkeypatch):
    """A long sentence has a launch for each place of gradients, and their values do not depend on which are wanted.

    Each of the three sentences has programs of its own, but where gradients are sums over all of them.
    """
    plan_with(monkeypatch, "is_short", lambda _: False)
    plan_with(monkeypatch, "PROGRAMS", 1)
    shapes = dict(p=(7, 3, 48), R=(2, 7, 7), a=(1, 2), x=(3, 2, 7, 8), w=(2, 9, 8))
    x = {name: torch.randn(shape, requires_grad=name in wanted) for name, shape in shapes.items()}
    called, run = [], kernels.run
    monkeypatch.setattr(kernels, "run", lambda launch, t: (called.append(launch), run(launch, t)))

    def gradients(computation):
        q, k, v = (part.unflatten(-1, (2, 8)).permute(1, 2, 0, 3) for part in x["p"].split(16, dim=-1))
        shared = Product(x["x"], take_columns(x["w"], all_of(7)))
        summand = shared if set(wanted) & set("xw") else Product(q, k)
        logits = mixed(x["a"], (summand, 0), (Bias(take_window(x["R"], all_of(7))), -1))
        out = computation(logits, v)
        return torch.autograd.grad(out.square().sum(), [x[name] for name in wanted])

    for found, expected in zip(gradients(by_kernels), gradients(by_definition)):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert [launch.kernel.__name__ for launch in called] == ["forward", *names]
    programs = {launch.kernel.__name__: launch.grid[0] for launch in called}
    number = 2 if wanted == "w" else 6
    assert programs.get("backward_columns", number) == number and programs.get("backward_matrix", 2) == 2


def test_off_by_default(monkeypatch):
    logits, value = Logits([Bias(torch.randn(1, 2, 7, 7))]), torch.randn(3, 2, 7, 8)
    assert kernels.refuses(logits, value, None, None, 0.0) == ""
    for setting in ("", "0"):
        monkeypatch.setattr(kernels, "SWITCH", setting)
        assert kernels.refuses(logits, value, None, None, 0.0) == "they are switched off"
    monkeypatch.setattr(kernels, "SWITCH", "true")
    with pytest.raises(SynthesizerError, match="FAIRSEQ_SYNTH_KERNELS=true: give 1 for on or 0 for off"):
        kernels.refuses(logits, value, None, None, 0.0)


@pytest.mark.parametrize(
    "name, value, message",
    [
        (
            "triton_fits",
            lambda: False,
            "the kernels need an NVIDIA GPU of compute capability 8.0 or higher, and Triton",
        ),
        ("DTYPES", (), "has no effect in float32: give --fp16, --bf16 or --amp"),
    ],
)
def test_why_the_kernels_are_off(name, value, message, monkeypatch, caplog):
    """Which is said once."""
    monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr(kernels, "INTERPRETED", kernels.DTYPES)
    for _ in range(2):
        assert not kernels.device_fits(torch.device("cpu"), torch.float32)
    kernels.device_fits.cache_clear()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("FAIRSEQ_SYNTH_KERNELS: has no effect ") and said.endswith(message)


@pytest.mark.parametrize(
    "dtype, capability, fits",
    [
        (torch.bfloat16, (9, 0), True),
        (torch.float16, (8, 0), True),
        (torch.float32, (9, 0), False),
        (torch.bfloat16, (7, 5), False),
    ],
)
def test_which_gpus_and_types(dtype, capability, fits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(kernels, "DTYPES", kernels.DTYPES[1:])  # as users have it, without fp32
    assert kernels.device_fits(torch.device("cuda"), dtype) == fits
    kernels.device_fits.cache_clear()


def test_what_is_not_supported(monkeypatch):
    """Everything else goes to the other computations."""
    bias, value = torch.randn(1, 2, 7, 7), torch.randn(3, 2, 7, 8)
    q = torch.randn(3, 2, 7, 8)
    own, half, outer, matrix = Product(q, q), Product(q, q[:1]), Outer(q, 3), Bias(bias)

    def supported(logits, value=value):
        return by_kernels(logits, value) is not None

    assert supported([own, half, outer, matrix])
    assert not supported([own])  # torch's fused attention
    assert not supported([Product(q[:1], q[:1])], value[:1]) and supported([own, matrix], value)
    for twice in ([own, own], [half, half], [outer, outer], [Product(q[:1], q)], [Bias(torch.randn(3, 2, 7, 7))]):
        assert not supported([*twice, matrix])
    wide, wider = torch.randn(2, 3, 2, 7, 72), torch.randn(3, 2, 7, 136)
    assert supported([own, matrix], wide[0]) and not supported([own, half, matrix], wide[0])
    assert not supported([Product(wide[0], wide[1]), half, matrix])
    assert not supported([matrix], wider) and not supported([Product(wider, wider[:1])])
    module, x = make_attention("random"), torch.randn(7, 3, 6)
    monkeypatch.setattr(kernels, "compute", lambda *_: pytest.fail("a call of the kernels"))
    module(x, attn_mask=torch.zeros(7, 7))
    module.to("meta")(x.to("meta"))
    module = make_attention("random").double()
    module(x.double())
    module(x[:, :0].double())
    assert not supported([matrix], value[:0])
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    assert not supported([matrix])


@pytest.mark.parametrize("error", [RuntimeError("out of registers"), torch.cuda.OutOfMemoryError("CUDA out of memory")])
def test_a_kernel_that_does_not_load(error, monkeypatch):
    """One line; but fairseq sees when memory ends. The next call tries again."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("the interpreter compiles nothing")
    tried = []

    def compile(*_):
        tried.append(True)
        raise error

    monkeypatch.setattr(kernels, "is_interpreted", lambda: False)
    monkeypatch.setattr(launches.Launch, "compile", compile)
    line = "set FAIRSEQ_SYNTH_KERNELS=0: a kernel failed: RuntimeError.'out of registers'.$"
    for _ in range(2):
        expected = (SynthesizerError, line) if type(error) is RuntimeError else (type(error), "out of memory")
        with pytest.raises(expected[0], match=expected[1]):
            kernels.compute(Logits([Bias(torch.randn(1, 2, 7, 7))]), torch.randn(3, 2, 7, 8), None, None)
    assert len(tried) == 2


@interpreted
@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("bsz", [1, 3])
def test_saved_tensors_in_other_memory(bsz, is_short, monkeypatch):
    """torch's `save_on_cpu` brings back tensors that lie in another way."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    packed, key = torch.randn(5, bsz, 48), torch.randn(2, 7, 8)
    q, k, v = (x.unflatten(-1, (2, 8)).permute(1, 2, 0, 3) for x in packed.split(16, dim=-1))
    R, grad = torch.randn(2, 7, 7, requires_grad=True), torch.randn(bsz, 2, 5, 8)
    shared = Product(torch.randn(bsz, 2, 5, 8), take_columns(key, all_of(5)))
    logits = [Product(q, k), shared, Bias(take_window(R, all_of(5)))]
    (expected,) = torch.autograd.grad(by_kernels(logits, v), R, grad)

    def moved(x):  # from 4 bytes after a multiple of 16 on
        return torch.empty(x.numel() + 16, dtype=x.dtype)[4 // x.itemsize :][: x.numel()].view(x.size()).copy_(x)

    with torch.autograd.graph.saved_tensors_hooks(moved, lambda x: x):
        out = by_kernels(logits, v)
    assert torch.equal(torch.autograd.grad(out, R, grad)[0], expected)


@interpreted
@pytest.mark.parametrize("which", ["value", "bias", "mask", "grad", "saved"])
def test_memory_at_any_address(which, monkeypatch):
    """Kernels are compiled for memory at multiples of 16 bytes, and called with no other."""
    plan_with(monkeypatch, "is_short", lambda _: False)
    call = kernels.run

    def run(launch, tensors):
        assert all(x is None or x.data_ptr() % 16 == 0 for x in tensors.values())
        call(launch, tensors)

    def moved(x, name, odd):
        if name != odd:
            return x
        return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.size()).copy_(x)

    monkeypatch.setattr(kernels, "run", run)
    value, grad = torch.randn(5, 2, 16), torch.randn(10, 16)
    bias, mask, found = torch.randn(2, 5, 5), padding_mask([5, 4]), []
    for odd in ("none", which):
        packed, R = moved(value, "value", odd), moved(bias, "bias", odd).requires_grad_()
        v = packed.unflatten(-1, (2, 8)).permute(1, 2, 0, 3)
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(moved, name="saved", odd=odd), lambda x: x):
            out = kernels.compute(Logits([Bias(take_window(R, all_of(5)))]), v, moved(mask, "mask", odd), None)
        found += torch.autograd.grad(out, R, moved(grad, "grad", odd))
    assert torch.equal(*found)


@interpreted
@pytest.mark.parametrize("is_short", [True, False])
def test_gradients_of_padding(is_short, monkeypatch):
    """Rows of padding at the end are 0, so that the gradient which comes back for them goes nowhere."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    lengths = [7, 4, 0]
    q, k, v, grad = torch.randn(4, 3, 2, 7, 8)
    leaves = [x.requires_grad_() for x in (q, k, v, torch.randn(2, 7, 7))]
    logits, mask = [Product(q, k), Bias(leaves[-1][None])], padding_mask(lengths)
    out = by_kernels(logits, v, mask)
    assert not out[mask[:, None].expand(3, 2, 7)].any()
    found = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    expected = torch.autograd.grad(out, leaves, grad.masked_fill(mask[:, None, :, None], 0.0))
    for a, b in zip(found, expected):
        assert torch.equal(a, b)


@interpreted
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
            is_small = self.options["num_warps"] < launches.MAX_WARPS
            self.n_spills = (launches.MAX_SPILLS + 1) * (spills and is_small)  # known from here on

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
        (triton_attention, ["forward_short", "backward_short"]),
        (triton_attention, ["forward", "backward_rows", "backward_columns", "backward_matrix"]),
        (triton_sums, ["add"]),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Kernel(getattr(module, name)))
    monkeypatch.setattr(kernels, "device_fits", lambda *_: True)
    monkeypatch.setattr(kernels, "is_interpreted", lambda: False)
    module = make_attention("random+dense", max_length=length, dropout=0.1).train()
    x = torch.randn(length, 2, 6, requires_grad=True)
    out, _ = module(x, key_padding_mask=padding_mask([length, length - 1]))
    assert set(compiled) > set(called)  # the backward pass too
    out.sum().backward()
    assert compiled == called and len(called) == (3 if length == 7 else 5)
    assert all((options["num_warps"] == launches.MAX_WARPS) == spills for _, _, options in called.values())


def layout(**sizes):
    """A layout of a GPU, in which all sizes that are not given are 0."""
    wanted = {**dict.fromkeys(launches.Layout._fields, 0), "D": 64, "weight_rows": NO_WEIGHTS, "wanted": (), **sizes}
    return launches.Layout(**wanted)


@pytest.mark.parametrize(
    "is_short, length, cases",
    [
        (True, 32, [dict(r_columns=9), dict(Q=64, X=64, r_columns=9), dict(D=72, r_columns=9), dict(D=72, X=72)]),
        (False, 32, [dict(Q=64, X=64, right=9, r_columns=9), dict(Q=64, X=72), dict(D=72, right=9)]),
        (True, 64, [dict(r_columns=9), dict(Q=64), dict(X=64), dict(D=40, Q=40)]),
        (False, 64, [dict(D=65, r_columns=9), dict(D=40, X=40), dict(Q=64, r_columns=9), dict(right=9)]),
        (False, 33, [dict(Q=64, r_columns=9)]),
        (False, 65, [dict(r_columns=9), dict(Q=64)]),
    ],
)
def test_which_sentences_are_short(is_short, length, cases):
    """Their tiles are in registers, so the number of summands and their widths count."""
    for sizes in cases:
        assert layout(T=length, **sizes).is_short() == is_short, sizes


def test_tiles():
    """As they were measured: rows, columns, warps and stages."""
    q, x, outer, r = dict(Q=64), dict(X=64), dict(right=9), dict(r_columns=9)
    for sizes, forward, backward in (
        (dict(T=9, **r), (16, 16, 2, 1), (16, 16, 2, 1)),
        (dict(T=32, **q, **r), (32, 32, 1, 1), (32, 32, 2, 1)),
        (dict(T=32, **outer), (32, 32, 1, 1), (32, 32, 2, 1)),
        (dict(T=33, **r), (64, 64, 4, 1), (64, 64, 4, 1)),
        (dict(T=9, D=65, **r), (16, 16, 4, 1), (16, 16, 4, 1)),
    ):
        assert [launches.Tile.for_whole_sentence(layout(**sizes), is_forward) for is_forward in (True, False)] == [
            forward,
            backward,
        ]
    for sizes, *expected in (
        (dict(T=130, **r), (64, 64, 4, 2), (64, 32, 4, 3), (32, 64, 4, 2), (64, 64, 4, 2)),
        (dict(T=130, **q, **r), (64, 64, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)),
        (dict(T=130, **q, **x), (64, 32, 4, 3), (64, 32, 4, 3), (32, 64, 4, 3), (64, 64, 4, 2)),
        (dict(T=130, **outer), (64, 32, 4, 3), (64, 32, 4, 3), (32, 64, 4, 2), (64, 64, 4, 2)),
        (dict(T=130, **q, **x, **r), (32, 32, 4, 2), (32, 32, 4, 3), (32, 32, 4, 2), (32, 32, 4, 2)),
        (dict(T=130, **q, **outer, **r), (16, 16, 4, 2), (16, 16, 4, 3), (16, 16, 4, 2), (16, 16, 4, 2)),
        (dict(T=20, **r), (32, 32, 4, 2), (32, 32, 4, 3), (32, 32, 4, 2), (32, 32, 4, 2)),
    ):
        assert [
            launches.Tile.for_kernel(kernel, layout(**sizes)) for kernel in ("forward", "rows", "columns", "matrix")
        ] == expected


@pytest.mark.parametrize(
    "sizes, expected",
    [
        (dict(T=32, Q=64, r_columns=32), [(8, 125), 8, 1, (8, 63), 16, 2]),
        (dict(T=33, r_columns=33), [(8, 125), 8, 4, (8, 33), 31, 4]),
        (dict(T=130, r_columns=130), [(24000, 1), 4, (24000, 1), 4, (24000, 1), 1, 4, (216, 1), 334, 4]),
    ],
)
def test_programs(sizes, expected):
    """So many as were measured to be fast: of each launch its grid, the sentences that a program sums over, warps."""
    sizes = dict(B=1000, H=8, dtypes=(torch.bfloat16,), r_rows=sizes["T"], **sizes)
    plan = launches.Plan(layout(wanted=("packed", "r"), **sizes))
    found = []
    for launch in [plan.forward, *plan.backward[:-1]]:
        sentences = launch.numbers[len(plan.numbers) : -1][:1]
        found += [launch.grid[:2], *sentences, launch.options["num_warps"]]
    assert found == expected


def test_memory_for_sums():
    """A sum for each program: of the gradient of what is shared, or of one weight for each head."""
    shared = dict(H=8, dtypes=(torch.bfloat16,), number_of_weights=3)
    short = dict(T=32, B=1000, r_rows=32, r_columns=32, wanted=("r",))
    assert launches.Plan(layout(**shared, **short)).sums == {"sum_r": 63 * 8 * 32 * 32}  # 63 groups
    long = dict(
        T=130,
        B=50,
        Q=64,
        left=10,
        right=13,
        r_rows=130,
        r_columns=130,
        weight_rows=launches.WeightRows(q=0, x=-1, outer=1, c=-1, r=2),
    )
    plan = launches.Plan(layout(**shared, **long, wanted=("packed", "pair", "r", "weights")))
    tiles = 9  # of 16 rows or columns
    of_weights = {"sum_a_outer": 50 * tiles * 8, "sum_a_q": 50 * tiles * 8, "sum_a_r": tiles * tiles * 8}
    assert plan.sums == {"delta": 50 * 8 * 130, "sum_r": 8 * 130 * 130, **of_weights}


@pytest.mark.parametrize(
    "sizes, expected",
    [
        (dict(T=130, right=4), dict(FACTOR=64, UNIT=8, PRECISION="tf32")),
        (dict(T=9, D=12, Q=8), dict(FACTOR=16, UNIT=1, Q_BLOCK=16, A_R=3)),
        (dict(dtypes=(torch.float32,)), dict(PRECISION="ieee")),
    ],
)
def test_what_kernels_are_compiled_for(sizes, expected):
    """Both factors fit, several numbers are read at once where all widths allow it, and fp32 is not rounded."""
    sizes = {"dtypes": (torch.bfloat16,), "weight_rows": NO_WEIGHTS._replace(r=3), **sizes}
    found = launches.make_constants(layout(**sizes), launches.Tile(16, 16, 4))
    assert {name: getattr(found, name).value for name in expected} == expected


def test_a_launch_by_default():
    """One program in the directions that are not said, and one stage."""
    launch = launches.Launch(None, (5,), (), (), num_warps=4)
    assert launch.grid == (5, 1, 1) and launch.options == {"num_warps": 4, "num_stages": 1}


WARPS_AND_STAGES = [
    (0, 99, 99, [(2, 3)], (2, 3)),
    (0, 1, 1, [(2, 3), (2, 2), (2, 1)], (2, 1)),  # shared memory for one stage
    (100, 99, 99, [(2, 3)], (2, 3)),
    (101, 99, 99, [(2, 3), (4, 3), (8, 3)], (8, 3)),
    (101, 2, 2, [(2, 3), (2, 2), (4, 2), (8, 2)], (8, 2)),
    (101, 99, 2, [(2, 3), (4, 3), (8, 3), (8, 2)], (8, 2)),
    (101, 99, 0, [(2, 3), (4, 3), (8, 3), (8, 2), (8, 1)], (4, 3)),  # with 8 warps it does not fit: with 4 it does
]


@pytest.mark.parametrize("spills,stages,stages_of_8_warps,expected,kept", WARPS_AND_STAGES)
def test_how_a_kernel_is_compiled_again(spills, stages, stages_of_8_warps, expected, kept):
    """With fewer stages where shared memory ends, with more warps where registers do."""
    kernel = CompiledOnly(spills, stages, stages_of_8_warps)
    launch = launches.Launch(kernel, (7,), (), (), num_warps=2, num_stages=3)
    launch.compile([])
    assert kernel.tried == expected and launch.compiled == (kept, (7, 1, 1)) and tuple(launch.options.values()) == kept


def test_a_kernel_that_is_too_large():
    with pytest.raises(OutOfResources):
        launches.Launch(CompiledOnly(0, 0, 0), (7,), (), (), num_warps=2, num_stages=3).compile([])


class CompiledOnly:
    """A kernel that spills, and a GPU with shared memory for so many stages."""

    def __init__(self, spills, stages, stages_of_8_warps):
        self.n_spills, self.stages, self.tried = spills, {8: stages_of_8_warps}, []
        self.stages.update({2: stages, 4: stages})

    def warmup(self, *args, grid, **options):
        self.tried.append(tuple(options.values()))
        return self

    def __getitem__(self, grid):
        warps, stages = self.tried[-1]
        if stages > self.stages[warps]:
            raise OutOfResources(2, 1, "shared memory")
        return self.tried[-1], grid


def without_interpreter(*arguments):
    """What tests/kernels/compile_kernels.py prints, line by line."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    done = warm.run([ROOT / "tests" / "kernels" / "compile_kernels.py", *arguments], env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


COMPILED = [spec for spec in dict.fromkeys([*NAMES, *VARIANTS, MIXED]) if is_supported(spec)]
# factorized_random has random's kernels
FEWER = [spec for spec in COMPILED if "factorized_random" not in spec or spec == MIXED]
MIXTURES = ["random+vanilla", "dense+vanilla"]
ALL = [(90, "bf16", 64, COMPILED, [32, 256], []), (90, "bf16", 64, MIXTURES, [64, 256], ["causal"])]
# sm_86 has the products of sm_80 and less shared memory
ALL += [(86, "bf16", width, FEWER, [256], []) for width in (64, 128)] + [(80, "bf16", 64, MIXTURES, [32, 256], [])]
ALL += [(90, *other, MIXTURES, [32, 256], []) for other in (("fp16", 64), ("bf16", 8), ("bf16", 40), ("bf16", 72))]


@interpreted
@pytest.mark.parametrize("number", range(len(ALL)))
def test_resources(number):
    """Every launch compiles, spills few registers, and fits into a GPU's shared memory."""
    architecture, dtype, width, specs, lengths, masks = ALL[number]
    check_resources(architecture, dtype, width, ",".join(specs), ",".join(map(str, lengths)), "padded", *masks)


@interpreted
@pytest.mark.parametrize("architecture", [80, 90, 120])
def test_resources_with_dropout(architecture):
    """On Blackwell outside data centers too."""
    check_resources(architecture, "bf16", 64, ",".join(MIXTURES), "256", "dropped")


def check_resources(architecture, dtype, width, *more):
    found = without_interpreter(architecture, dtype, 8, width, *more)
    assert found
    for launch in map(json.loads, found):
        most = 400 if launch["num_warps"] < launches.MAX_WARPS else 600  # bytes
        assert launch["spilled"] <= most, launch
        assert launch["shared"] <= LIMITS[architecture], launch


@interpreted
def test_few_kernels_for_many_shapes():
    """200 random numbers of sentences and tokens: a handful of sizes of tiles, with a few kernels each."""
    assert int(without_interpreter("--count", 200, "random+vanilla")[-1]) <= 15


@interpreted
def test_launches(monkeypatch):
    """A block launches fewer kernels of a GPU, and no more than docs/performance.md says."""
    monkeypatch.undo()  # memory filled with NaN is a launch more
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import launches

    page = (ROOT / "docs" / "performance.md").read_text()
    rows = re.findall(r"^\|`([\w+]+)`\|(\d+)\|\d+\|\d+\|(\d+)\|$", page, re.MULTILINE)
    assert rows  # a variant that the page does not list has not been counted
    for name, *listed in rows:
        without_kernels = len(launches.list_calls(name, padded=True, dtype=torch.bfloat16))
        with_kernels = len(launches.list_calls(name, padded=True, dtype=torch.bfloat16, with_kernels=True))
        assert with_kernels < without_kernels or name == "vanilla"
        if torch.__version__.startswith("2.13"):
            assert listed == [str(without_kernels), str(with_kernels)], name


@interpreted
def test_measuring(tmp_path):
    """benchmarks/gpu.py in sizes of a few words: each part leaves a result, which a second call keeps."""
    # one of each kind but the steps, which take the interpreter many minutes with the kernels
    parts = ["tests", "correct", "backend", "causal-mixed", "generate-simple"]
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--dry", "--parts", *parts, "--out", tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for said in (f"{sys.executable} benchmarks/gpu.py --correctness", "has a result in"):
        done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
    rows = json.loads((tmp_path / "correct.json").read_text())
    assert {name: row["kernels"] for name, row in rows.items()} == {"random 3x7": 3, "fixed_random 3x7": 2}
    done = subprocess.run([*map(str, command[:3]), "--parts", "tea"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "error: --parts tea: choose from tests, tests-kernels, correct" in done.stderr
