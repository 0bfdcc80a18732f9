"""Every computation of the attention equals the plain one: value and gradients, any type, mask and length."""

import pytest
import torch
from helpers import SPECS, future_mask, make_attention, padding_mask

from fairseq_synth import computations
from fairseq_synth.computations import fused, plain, tiled
from fairseq_synth.computations.threads import map_in_threads
from fairseq_synth.logits import Bias, Logits, Outer, Product, weight_smaller_factor
from fairseq_synth.masks import causal_mask, is_causal, sentence_lengths
from fairseq_synth.tensors import on_cpu

pytestmark = pytest.mark.usefixtures("on_device")
LENGTHS = [9, 9, 7, 7, 7, 4]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Sizes at which a batch of a few words has many tiles, with rests."""
    monkeypatch.setattr(tiled, "TILE", 80)
    monkeypatch.setattr(tiled, "CAUSAL_ROWS", 4)
    monkeypatch.setattr(tiled, "PLAIN_LIMIT", 0)


def run(module, x, grad, mask, causal, monkeypatch, computation):
    """Output and gradients of the real positions by a computation, or by what `attend` chooses."""

    def attend(*call):
        return computation.compute(*call)

    with monkeypatch.context() as patch:
        if computation is not None:
            patch.setattr("fairseq_synth.attention.attend", attend)
        x = x.detach().requires_grad_()
        out, _ = module(x, x, x, key_padding_mask=mask, attn_mask=causal_mask(x) if causal else None)
        visible = torch.ones_like(out[..., :1]) if mask is None else (~mask).t().unsqueeze(-1).to(out.dtype)
        module.zero_grad()
        (out * visible).backward(grad)
    named = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    return {"out": out.detach() * visible, "x": x.grad, **named}


@pytest.mark.parametrize("computation", [fused, tiled, "tiled in one", None])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[9] * 3, LENGTHS, [9]], ids=["full", "padded", "one"])
@pytest.mark.parametrize("spec", SPECS)
def test_equals_plain(spec, lengths, causal, computation, monkeypatch):
    """In fp64 to rounding, in fp32 close; the gradient of every parameter and of the input."""
    if computation is fused and not set(spec.split("+")) & {"vanilla", "dense", "factorized_random"}:
        pytest.skip("no inner product")
    if computation == "tiled in one":
        computation = tiled
        monkeypatch.setattr(tiled, "TILE", 1 << 19)
        monkeypatch.setattr(tiled, "CAUSAL_ROWS", 128)
    torch.manual_seed(1)
    mask = padding_mask(lengths) if min(lengths) < 9 else None
    for dtype, atol in [(torch.float64, 1e-12), (torch.float32, 5e-5)]:
        module = make_attention(spec).to(dtype)
        x, grad = torch.randn(2, 9, len(lengths), 6, dtype=dtype)
        expected = run(module, x, grad, mask, causal, monkeypatch, plain)
        found = run(module, x, grad, mask, causal, monkeypatch, computation)
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(
                found[name], expected[name], atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("std", [1, 10, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "spec", ["random", "fixed_random", "random+vanilla", "random+dense", "factorized_dense+random"]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("computation", [None, fused])
def test_large_logits(spec, dtype, std, causal, computation, monkeypatch):
    """Within twice the plain computation's own error, and no NaN where that has none."""
    if computation is fused and spec in ("random", "fixed_random", "factorized_dense+random"):
        pytest.skip("no inner product")
    torch.manual_seed(2)
    module = make_attention(spec)
    if spec == "fixed_random":
        module.synthesizer.components[spec].R.normal_(std=std)
    else:
        module.synthesizer.components["random"].R.data = std * torch.randn(2, 12, 12)
    module.to(dtype)
    x, grad = torch.randn(2, 9, 6, 6).to(dtype)
    mask = padding_mask(LENGTHS)

    found = run(module, x, grad, mask, causal, monkeypatch, computation)
    own = run(module, x, grad, mask, causal, monkeypatch, plain)
    module.double()
    exact = run(module, x.double(), grad.double(), mask, causal, monkeypatch, plain)
    for name in exact:
        assert torch.isfinite(found[name]).all() or not torch.isfinite(own[name]).all(), name
        if (computation is fused or x.is_cuda) and dtype != torch.float32:
            continue  # the kernels take a bias in half precision
        # the key bias has no gradient but rounding: it is measured by the largest
        scale = max(exact[key].abs().max() for key in (exact if name == "k_proj.bias" else [name]))
        error, own_error = ((grads[name].double() - exact[name]).abs().max() for grads in (found, own))
        # the gradient of alpha sums products with R and with W2, which cancel: in fp32 both errors are a few
        # roundings of these
        rounding = 4 * torch.finfo(dtype).eps * scale * (max(std, 2) if dtype == torch.float32 else 1)
        assert error <= 2 * own_error + rounding, name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [(), (0,), (1,), (0, 1)], ids=str)
def test_any_logits(shared, causal):
    """Logits that no function of the paper has: shared summands in every place, one row for all, views of a matrix."""
    torch.manual_seed(3)
    bsz, heads, length, width = 3, 2, 9, 5

    def part(n, rows=length, columns=4):
        size = 1 if n in shared else bsz
        return torch.randn(size, heads, rows, columns, dtype=torch.float64, requires_grad=True)

    products = [
        ([Product(part(0), part(1))], 0),
        ([Outer(part(0, columns=7), left_size=2)], 1),
        ([Product(part(0, columns=3), part(1, columns=3)), Bias(part(0, 1, length))], -1),
    ]
    biases = [([Bias(part(1, length, length))], -1), ([Bias(part(0, 1, length))], 0)]
    row = torch.randn(1, 1, 1, length, dtype=torch.float64, requires_grad=True)
    scaled = [([Product(part(0), part(1), 0.5)], 1), biases[1], ([Bias(row)], -1)]
    R = torch.randn(1, heads, 14, 14, dtype=torch.float64, requires_grad=True)
    matrices = [([Bias(R[:, :, :length, :length])], 1), ([Bias(R[:, :, 2 : 2 + length, :length])], -1)]
    of_all_heads = [
        ([Bias(part(0)[:, :1, :, :1].expand(-1, -1, -1, length))], -1),
        ([Bias(part(1, 1, length)[:, :1])], -1),
    ]
    one_head = ([Product(part(0)[:, :1], part(1)[:, :1])], -1)
    for summands in (of_all_heads, [one_head, biases[0]], [one_head], of_all_heads[:1], biases[::-1]):
        check_logits(summands, causal, bsz, heads, length, width)
    check_logits(scaled, causal, bsz, heads, length, width)
    for summands in (products, products[:1], products[::2], biases, biases[:1], matrices):
        for more in ([], biases, matrices):
            check_logits(summands + more, causal, bsz, heads, length, width)


def test_factors_that_no_column_reaches():
    """Nothing is computed of them, as there may be many: 4 + 3 factors, of which 5 columns reach 2 + 3."""
    found = Logits([Outer(torch.randn(2, 3, 9, 7), left_size=4)]).normal_form(5)
    assert [x.shape for x in (found.left, found.right)] == [(2, 3, 9, 2), (2, 3, 9, 3)]


def test_the_smaller_factor_takes_the_weight():
    """Of a product with one key for all sentences, the key: the other would be a copy as large as the layer's input."""
    queries, key, weight = torch.randn(3, 2, 9, 5), torch.randn(1, 2, 9, 5), torch.rand(1, 2, 1, 1)
    for factors in ((queries, key), (key, queries)):
        found = weight_smaller_factor(*factors, scale=1.0, weight=weight)
        for x, y in zip(found, factors):
            assert x is y if y is queries else torch.equal(x, y * weight)


def test_factors_keep_their_type():
    """A weight in fp32, as it is under autocast, leaves factors and a single bias in half precision."""
    query, key = torch.randn(2, 3, 2, 9, 5).half()
    weight = torch.rand(1, 2, 1, 1)
    for factors in ((query, key), (query, key[:1])):
        found = weight_smaller_factor(*factors, scale=1.0, weight=weight)
        assert [x.dtype for x in found] == [torch.half] * 2
    assert Logits([Bias(query, weight)]).total(5).dtype == torch.half


@pytest.mark.parametrize("terms", [1, 2, 3, 4])
def test_types_of_fused_attention(terms, monkeypatch):
    """All that torch is given has the type of the values, as on a GPU it must, also beside weights in fp32."""
    given = []
    replaced = "torch.nn.functional.scaled_dot_product_attention"
    monkeypatch.setattr(
        replaced, lambda query, key, value, attn_mask, **_: given.extend([query, key, attn_mask]) or value
    )
    query, key, value = torch.randn(3, 3, 2, 9, 5).half()
    R = Bias(torch.randn(1, 2, 9, 9).half())
    summands = Product(query, key), Bias(torch.randn(1, 2, 1, 9).half()), R, R
    logits = Logits([summand._replace(weight=torch.rand(1, 2, 1, 1)) for summand in summands[:terms]])
    fused.compute(logits, value, padding_mask([9, 7, 4]), None)
    assert [x.dtype for x in given] == [torch.half] * 3


def test_sums_of_logits():
    """In fp32 at least; a summand with one row for all may come first."""
    half = Bias(torch.randn(1, 2, 6, 5).half())
    assert Logits([half]).total(5).dtype == torch.float16
    assert Logits([half, half]).total(5).dtype == torch.float32
    query, key, bias = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 6, 5)
    for rows in (bias, bias.expand(3, -1, -1, -1)):
        found = Logits([Product(query, key), Bias(rows)]).total(5)
        torch.testing.assert_close(found, query @ key.transpose(2, 3) + rows)


def check_logits(summands, causal, bsz, heads, length, width):
    weights = torch.rand(2, heads, dtype=torch.float64, requires_grad=True)
    logits = Logits()
    for summand, row in summands:
        logits.add_terms(summand, None if row < 0 else weights[row].view(1, heads, 1, 1))
    terms = logits.terms()
    tensors = [x for term in terms for x in term if isinstance(x, torch.Tensor)]
    before = [x.detach().clone() for x in tensors]
    value = torch.randn(bsz, heads, length, width, dtype=torch.float64, requires_grad=True)
    leaves = list({id(t): t for t in [value, *tensors]}.values())
    grad = torch.randn(length * bsz, heads * width, dtype=torch.float64)

    def gradients(computation):
        out = computation.compute(logits, value, None, causal_mask(value) if causal else None)
        return [out, *torch.autograd.grad(out, leaves, grad, allow_unused=True)]

    expected = gradients(plain)
    for computation in (tiled, fused) if logits.products else (tiled,):
        for computed, defined in zip(gradients(computation), expected):
            # A tensor that no computation reads has no gradient, which is as good as a gradient of 0.
            zeros = torch.zeros(1, dtype=torch.float64)
            pair = [zeros if gradient is None else gradient for gradient in (computed, defined)]
            torch.testing.assert_close(*torch.broadcast_tensors(*pair), atol=1e-12, rtol=0)
    for x, y in zip(tensors, before):
        assert torch.equal(x, y)  # nothing was written to


MIXED = "random+fixed_random+dense+vanilla"


@pytest.mark.parametrize(
    "spec, frozen", [(MIXED, name) for name in ("R", "alpha", "W1", "W2", "_proj")] + [("factorized_random", "R1")]
)
def test_frozen_parameters(spec, frozen, monkeypatch):
    """What is not trained has no gradient; the others have theirs."""
    monkeypatch.setattr("fairseq_synth.computations.tiled.TILE", 16)
    module = make_attention(spec).double()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(frozen not in name)
    x, grad = torch.randn(2, 9, len(LENGTHS), 6, dtype=torch.float64)
    expected, found = (run(module, x, grad, padding_mask(LENGTHS), False, monkeypatch, c) for c in (plain, tiled))
    assert found.keys() == expected.keys() and not any(frozen in name for name in found)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-12, rtol=0)


CHOICES = [
    ("random", 3, "tiled"),
    ("fixed_random", 3, "tiled"),
    ("factorized_random", 3, "tiled"),
    ("random+factorized_random", 3, "tiled"),
    ("vanilla", 3, "fused"),
    ("vanilla", 1, "fused"),
    ("factorized_random+vanilla", 3, "tiled"),
    ("random", 1, "tiled"),
    ("dense", 3, "tiled"),
    ("factorized_dense", 3, "tiled"),
    ("random+vanilla", 3, "tiled"),
    ("dense+vanilla", 3, "tiled"),
]


def chosen(spec, monkeypatch, bsz=3, training=True, dropout=0.0, causal=False, **call):
    """The name of the computation that a call comes to."""
    called = []
    module = make_attention(spec, dropout=dropout).train(training)
    x = torch.randn(9, bsz, 6)
    if causal:
        call["attn_mask"] = causal_mask(x)
    with monkeypatch.context() as patch:
        for computation in computations.COMPUTATIONS:
            name, compute = computation.__name__.split(".")[-1], computation.compute
            patch.setattr(computation, "compute", lambda *args, n=name, f=compute: called.append(n) or f(*args))
        module(x, x, x, **call)
    assert len(called) == (0 if "need_weights" in call else 1)  # the weights are those of the definition
    return called[0] if called else "plain"


@pytest.mark.parametrize("spec, bsz, expected", CHOICES)
def test_choice(spec, bsz, expected, monkeypatch, request):
    if request.config.getoption("--device") != "cpu":
        pytest.skip("what a CPU chooses")
    assert chosen(spec, monkeypatch, bsz) == expected
    assert chosen(spec, monkeypatch, bsz, causal=True) == expected
    assert chosen(spec, monkeypatch, bsz, need_weights=True) == "plain"
    assert chosen(spec, monkeypatch, bsz, training=False, dropout=0.1) == expected
    assert chosen(spec, monkeypatch, bsz, dropout=0.1) == ("fused" if expected == "fused" else "plain")
    for mask in (
        future_mask(9),
        future_mask(9).t(),
        future_mask(9).requires_grad_(),
        torch.zeros(1, 1),
    ):  # values are not read
        assert chosen(spec, monkeypatch, bsz, attn_mask=mask) == "plain"
    if bsz > 1:
        right = padding_mask([9, 5, 5])
        assert chosen(spec, monkeypatch, bsz, key_padding_mask=right) == expected
        left = chosen(spec, monkeypatch, bsz, key_padding_mask=right.flip(1))
        assert left == ("fused" if expected == "fused" else "plain")


@pytest.mark.parametrize("spec", SPECS)
def test_a_batch_without_sentences(spec):
    """Whatever its length, it has an output without sentences."""
    module = make_attention(spec, max_length=300)
    x = torch.randn(300, 0, 6, requires_grad=True)
    out, _ = module(x, x, x)
    out.sum().backward()
    assert out.size() == x.size() == x.grad.size()


def test_small_batches_are_plain(monkeypatch):
    """On a CPU, which counts what it would hold."""
    if torch.empty(0).is_cuda:
        pytest.skip("only a CPU's choice depends on the size")
    monkeypatch.setattr(tiled, "PLAIN_LIMIT", 3 * 2 * 9 * 9)
    assert chosen("dense", monkeypatch) == chosen("random", monkeypatch) == "plain"
    monkeypatch.setattr(tiled, "PLAIN_LIMIT", 2 * 9 * 9)  # of one sentence, which is all where logits are shared
    assert chosen("dense", monkeypatch) == "tiled" and chosen("random", monkeypatch) == "plain"
    # padding makes the weights differ by sentence
    assert chosen("random", monkeypatch, key_padding_mask=padding_mask([9, 5, 5])) == "tiled"


@pytest.mark.parametrize(
    "spec, bsz, expected",
    [
        ("random", 3, "plain"),
        ("factorized_random", 3, "plain"),
        ("factorized_random", 1, "fused"),
        ("random", 1, "plain"),
        ("vanilla", 3, "fused"),
        ("dense", 3, "fused"),
        ("factorized_dense", 3, "plain"),
        ("random+vanilla", 3, "fused"),
        ("dense+vanilla", 3, "fused"),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_choice_of_a_gpu(spec, bsz, expected, dropout, monkeypatch):
    """ "meta" stands for whatever is no CPU; it has no values, so that none is read."""
    with torch.device("meta"):
        mask = torch.empty(bsz, 9, dtype=torch.bool)
        assert chosen(spec, monkeypatch, bsz, dropout=dropout, key_padding_mask=mask) == expected
        assert chosen(spec, monkeypatch, bsz, dropout=dropout, causal=True) == expected


@pytest.mark.parametrize("lengths", [[9] * 6, [9, 9, 9, 7, 7, 4], LENGTHS, [9, 8, 7, 6, 5, 4]], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_what_a_gpu_computes(spec, causal, lengths, monkeypatch):
    """On the branch that a GPU takes, run here: equal to the plain computation."""
    for computation in (fused, tiled):
        monkeypatch.setattr(computation, "on_cpu", lambda x: False)
    module = make_attention(spec).double()
    x, grad = torch.randn(2, 9, 6, 6, dtype=torch.float64)
    expected, found = (run(module, x, grad, padding_mask(lengths), causal, monkeypatch, c) for c in (plain, None))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-12, rtol=0)


def test_masks_that_are_known():
    """Lengths of right-padded sentences; None for an empty one or a hole. A causal mask is known by its size."""
    assert sentence_lengths(padding_mask(LENGTHS)) == LENGTHS
    mask = padding_mask([3, 2])
    mask[1, 1] = True
    assert sentence_lengths(mask) == [3, 1]
    mask[1, 0] = True
    assert sentence_lengths(mask) is None
    mask[:] = torch.tensor([[False, True, False], [False, False, False]])
    assert sentence_lengths(mask) is None
    assert is_causal(causal_mask(torch.zeros(3, 3))) and not is_causal(None) and not is_causal(future_mask(3))
    assert not is_causal(torch.zeros(0)) and not is_causal(torch.zeros(3, 0))
    assert on_cpu(torch.zeros(1, device="cpu")) and not on_cpu(torch.zeros(1, device="meta"))


def test_blocks_cover_the_batch_once():
    """Every sentence and head is in one block, of neighbours; lengths are shared only by equal ones."""
    for bsz, heads, length, rows in ((1, 1, 1, 1), (7, 3, 9, 4), (40, 8, 3, 3), (5, 2, 30, 4)):
        lengths = sorted(torch.randint(1, length + 1, (bsz,)).tolist())
        seen = torch.zeros(bsz, heads, dtype=torch.int)
        for block in tiled.divide_by_sentences(lengths, heads, rows, max_heads=2):
            seen[block.sentences, block.heads] += 1
            assert block.length == max(lengths[block.sentences])
        assert (seen == 1).all()
        seen = torch.zeros(bsz, heads, dtype=torch.int)
        for block in tiled.divide_by_length(lengths, heads, rows, max_heads=2):
            seen[block.sentences, block.heads] += 1
            assert set(lengths[block.sentences]) == {block.length}
        assert (seen == 1).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", ["random", "dense+vanilla", "factorized_dense+random"])
def test_several_threads(spec, causal, monkeypatch):
    """Blocks that threads share out give bit for bit what one thread gives; torch has its threads again afterwards."""
    torch.manual_seed(1)
    module = make_attention(spec, num_heads=6, embed_dim=18)
    x, grad = torch.randn(2, 9, len(LENGTHS), 18)
    threads = torch.get_num_threads()
    monkeypatch.setattr("fairseq_synth.computations.tiled.TILE", 1)  # the same blocks for any number of threads
    results = []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            results.append(run(module, x, grad, padding_mask(LENGTHS), causal, monkeypatch, tiled))
            assert torch.get_num_threads() == number
            with torch.inference_mode():
                results[-1]["inference"] = module(x, key_padding_mask=padding_mask(LENGTHS))[0]
    finally:
        torch.set_num_threads(threads)
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name]), name


def test_an_error_in_a_thread_reaches_the_caller():
    """The exception of a piece of work is raised where its result is asked for, and torch has its threads again."""
    threads = torch.get_num_threads()

    def fail(item):
        raise ValueError(f"item {item}")

    try:
        torch.set_num_threads(2)
        with pytest.raises(ValueError, match="item 1"):
            list(map_in_threads(fail, [1, 2, 3]))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("spec", SPECS)
def test_padding_anywhere(spec, monkeypatch):
    """On the left, within a sentence, and a sentence of padding alone: `attend` equals the definition."""
    torch.manual_seed(1)
    module = make_attention(spec).double()
    x, grad = torch.randn(2, 9, 6, 6, dtype=torch.float64)
    left = padding_mask(LENGTHS).flip(1)
    within = padding_mask(LENGTHS).roll(2, dims=1)
    for mask in (left, within, padding_mask([9, 9, 7, 7, 4, 0])):
        expected = run(module, x, grad, mask, False, monkeypatch, plain)
        found = run(module, x, grad, mask, False, monkeypatch, None)
        for name in expected:
            torch.testing.assert_close(
                found[name], expected[name], atol=1e-12, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_fused_under_both_masks():
    """Padding beside a causal mask, which `attend` leaves out, changes nothing in the rows of words."""
    torch.manual_seed(1)
    mask, value = padding_mask(LENGTHS), torch.randn(6, 2, 9, 4)
    logits = Logits([Product(torch.randn(6, 2, 9, 4), torch.randn(6, 2, 9, 4))])
    found, expected = (c.compute(logits, value, mask, causal_mask(value)) for c in (fused, plain))
    visible = ~mask.t().reshape(54, 1)
    torch.testing.assert_close(found * visible, expected * visible)


def test_rows_of_padding_are_finite():
    module = make_attention("random+vanilla")
    x = torch.randn(9, 6, 6)
    out, _ = module(x, x, x, key_padding_mask=padding_mask(LENGTHS))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("lengths", [LENGTHS, [9]], ids=["padded", "one"])
@pytest.mark.parametrize("mixture", ["convex", "sum"])
@pytest.mark.parametrize("spec", SPECS)
def test_autocast(spec, mixture, lengths, monkeypatch, request):
    """--amp: value and gradients close to fp32."""
    module = make_attention(spec, mixture)
    x, grad = torch.randn(2, 9, len(lengths), 6)
    mask = padding_mask(lengths)
    expected = run(module, x, grad, mask, False, monkeypatch, plain)
    with torch.autocast(request.config.getoption("--device"), torch.bfloat16):
        found = run(module, x, grad, mask, False, monkeypatch, None)
    scale = max(tensor.abs().max() for tensor in expected.values())
    for name in expected:
        assert (found[name] - expected[name]).abs().max() <= 0.03 * scale, name


@pytest.mark.parametrize("shared", [True, False])
def test_tiles_are_not_autocast(shared):
    """The types of the logits and the value hold inside the tiles, in both passes."""
    torch.manual_seed(6)
    value, query, key = (torch.randn(3, 2, 9, 4, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 2, 9, 9, requires_grad=True)
    logits = Logits([Bias(bias)] if shared else [Bias(bias), Product(query, key)])
    leaves = [value, bias] if shared else [value, bias, query, key]
    grad = torch.randn(27, 8)
    expected = plain.compute(logits, value, None, None)
    with torch.autocast("cpu", torch.bfloat16):
        found = tiled.compute(logits, value, None, None)
        grads = torch.autograd.grad(found, leaves, grad)
    torch.testing.assert_close(found, expected)
    for a, b in zip(grads, torch.autograd.grad(expected, leaves, grad)):
        torch.testing.assert_close(a, b)


def test_a_bias_sums_over_sentences_in_fp32():
    """300 sentences alike: the gradient in bf16 is 300 times that of one, where a sum in bf16 would stand still."""
    torch.manual_seed(7)
    value, query, key, grad = torch.randn(4, 1, 1, 4, 8).to(torch.bfloat16)
    bias = torch.randn(1, 1, 4, 4).to(torch.bfloat16).requires_grad_()

    def gradient(bsz):
        logits = Logits([Bias(bias), Product(query.expand(bsz, -1, -1, -1), key.expand(bsz, -1, -1, -1))])
        out = tiled.compute(logits, value.expand(bsz, -1, -1, -1), None, None)
        return torch.autograd.grad(out, bias, grad[0, 0].repeat_interleave(bsz, dim=0))[0]

    assert gradient(1).dtype == gradient(300).dtype == torch.bfloat16
    torch.testing.assert_close(gradient(300), 300 * gradient(1), rtol=0.01, atol=0)
