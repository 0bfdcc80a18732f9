"""The kernels' values and gradients are those of the plain computation."""

import copy
import functools

import pytest
import torch
from helpers import NAMES, SPECS, Columns, make_attention, padding_mask
from kernel_calls import (
    MASKS,
    MIXED,
    all_of,
    by_definition,
    by_kernels,
    check,
    is_supported,
    mask_of,
    mixed,
    plan_with,
    random_logits,
    run,
    some_of,
)

from fairseq_synth.computations import kernels, plain
from fairseq_synth.computations.kernels import launches
from fairseq_synth.logits import Bias, Diagonals, Outer, Product
from fairseq_synth.positions import take_distances, take_window
from fairseq_synth.synthesizers import register_synthesizer

pytestmark = [
    pytest.mark.usefixtures("on_device", "chosen", "kernels_are_on", "dirty_memory", "checked_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy in the interpreter, about minus infinity
    pytest.mark.skipif(not kernels.triton_fits(), reason="no Triton that is new enough for the kernels"),
]
interpreted = pytest.mark.interpreted


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
@pytest.mark.parametrize("spec", ["random", "dense", "factorized_random", "factorized_dense", "relative_random"])
def test_a_sentence_of_one_token(spec, monkeypatch):
    """The stride of a single row says nothing about the parameter that it is the first row of."""
    for is_short in (True, False):
        plan_with(monkeypatch, "is_short", lambda _, is_short=is_short: is_short)
        check(spec, 1, "none", monkeypatch, m=6)


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
