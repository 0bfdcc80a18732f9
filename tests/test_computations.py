"""Every computation of the attention equals the plain one: value and gradients, any type, mask and length."""

import pytest
import torch
from conftest import SPECS, future, make_attention

from fairseq_synth import computations, tiles
from fairseq_synth.computations import fused, is_causal, plain, sentence_lengths
from fairseq_synth.nested import NestedMatrix
from fairseq_synth.synthesizers import Terms
from fairseq_synth.tiles import groups_of, tiled

LENGTHS = [9, 9, 7, 7, 7, 4]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Sizes at which a batch of a few words has many tiles, with rests."""
    monkeypatch.setattr(tiles, "TILE", 40)
    monkeypatch.setattr(tiles, "CAUSAL_ROWS", 4)
    monkeypatch.setattr(tiles, "SHORT", 0)
    monkeypatch.setattr(tiles, "NARROW", 4)  # some products are, some are not
    monkeypatch.setattr(computations, "SMALL", 0)


def padding_mask(lengths):
    return torch.arange(max(lengths))[None] >= torch.tensor(lengths)[:, None]


def run(module, x, grad, mask, attn_mask, monkeypatch, computation):
    """Output and gradients of the real positions by a computation, or by what `attend` chooses."""
    bsz, length = x.shape[1], x.shape[0]
    causal = attn_mask is not None

    def attend(terms, value, *_):
        if computation is plain:
            return None
        if computation is fused:
            return fused(terms, value, None if causal else mask, causal)
        lengths = [length] * bsz if mask is None or causal else sentence_lengths(mask)
        return tiled(terms, value, groups_of(lengths), causal)

    with monkeypatch.context() as patch:
        if computation is not None:
            patch.setattr("fairseq_synth.attention.attend", attend)
        x = x.detach().requires_grad_()
        out, _ = module(x, x, x, key_padding_mask=mask, attn_mask=attn_mask)
        visible = torch.ones_like(out[..., :1]) if mask is None else (~mask).t().unsqueeze(-1).to(out.dtype)
        module.zero_grad()
        (out * visible).backward(grad)
    # a block of R that no row sees has no gradient, or zeros
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    named = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained}
    return {"out": out.detach() * visible, "x": x.grad, **named}


@pytest.mark.parametrize("computation", [fused, tiled, None])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[9] * 3, LENGTHS, [9]], ids=["full", "padded", "one"])
@pytest.mark.parametrize("spec", SPECS)
def test_equals_plain(spec, lengths, causal, computation, monkeypatch):
    """In fp64 to rounding, in fp32 close; the gradient of every parameter and of the input."""
    torch.manual_seed(1)
    mask = padding_mask(lengths) if min(lengths) < 9 else None
    for dtype, atol in [(torch.float64, 1e-12), (torch.float32, 5e-5)]:
        module = make_attention(spec).to(dtype)
        x, grad = torch.randn(2, 9, len(lengths), 6, dtype=dtype)
        attn_mask = future(9, dtype) if causal else None
        expected = run(module, x, grad, mask, attn_mask, monkeypatch, plain)
        found = run(module, x, grad, mask, attn_mask, monkeypatch, computation)
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
def test_large_logits(spec, dtype, std, causal, monkeypatch):
    """Within twice the plain computation's own error, and no NaN where that has none."""
    torch.manual_seed(2)
    module = make_attention(spec)
    if spec == "fixed_random":
        module.synthesizer.components[spec].R.normal_(std=std)
    else:
        module.synthesizer.components["random"].R.assign(std * torch.randn(2, 12, 12))
    module.to(dtype)
    x, grad = torch.randn(2, 9, 6, 6).to(dtype)
    mask = padding_mask(LENGTHS)

    def with_masks(dtype):
        return (mask, future(9, dtype) if causal else None, monkeypatch)

    found = run(module, x, grad, *with_masks(dtype), None)
    own = run(module, x, grad, *with_masks(dtype), plain)
    module.double()
    exact = run(module, x.double(), grad.double(), *with_masks(torch.float64), plain)
    names = {name.split(".R.")[0] for name in exact}  # R is one matrix, however it is stored
    for name in names:
        blocks = [key for key in exact if key.split(".R.")[0] == name]
        assert all(torch.isfinite(found[key]).all() or not torch.isfinite(own[key]).all() for key in blocks), name
        # the key bias has no gradient but rounding: it is measured by the largest
        scale = max(exact[key].abs().max() for key in (exact if name == "k_proj.bias" else blocks))
        error, own_error = (
            max((grads[key].double() - exact[key]).abs().max() for key in blocks) for grads in (found, own)
        )
        # the gradient of alpha sums products with R, which cancel: in fp32 both errors are a few roundings of R
        rounding = 4 * torch.finfo(dtype).eps * scale * (std if dtype == torch.float32 else 1)
        assert error <= 2 * own_error + rounding, name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [(), (0,), (1,), (0, 1)], ids=str)
def test_any_terms(shared, causal, monkeypatch):
    """Terms that no function of the paper has: batch-wide parts in every place, one row for all, a part of a matrix."""
    torch.manual_seed(3)
    bsz, heads, length, width = 3, 2, 9, 5

    def part(n, rows=length, columns=4):
        size = 1 if n in shared else bsz
        return torch.randn(size, heads, rows, columns, dtype=torch.float64, requires_grad=True)

    weight = torch.rand(1, 1, 1, 1, dtype=torch.float64, requires_grad=True)
    products = [
        Terms(query=part(0), key=part(1), weight=weight, scale=0.3),
        Terms(left=part(0, columns=2), right=part(1, columns=5)),
    ]
    biases = [Terms(bias=part(1, length, length)), Terms(bias=part(0, 1, length), weight=weight)]
    matrix = NestedMatrix(heads, 14).double()
    matrix.assign(torch.randn(heads, 14, 14, dtype=torch.float64))
    matrices = [Terms(matrix=matrix(0, length, length), weight=weight), Terms(matrix=matrix(2, length, length))]
    check_terms(biases[::-1], causal, bsz, heads, length, width)
    for terms in (products, products[:1], biases, biases[:1], matrices):
        for more in ([], biases, matrices):
            check_terms(terms + more, causal, bsz, heads, length, width)
    monkeypatch.setattr(tiles, "SHORT", length)
    of_each = torch.randn(bsz, heads, length, length, dtype=torch.float64, requires_grad=True)
    check_terms([products[0], Terms(bias=of_each)], causal, bsz, heads, length, width)


def tensors(terms):
    found = []
    for term in terms:
        found += [part for part in term if isinstance(part, torch.Tensor)] + (term.matrix.blocks if term.matrix else [])
    return found


def check_terms(terms, causal, bsz, heads, length, width):
    before = [tensor.detach().clone() for tensor in tensors(terms)]
    value = torch.randn(bsz, heads, length, width, dtype=torch.float64, requires_grad=True)
    leaves = list({id(t): t for t in [value, *tensors(terms)]}.values())
    grad = torch.randn(bsz, heads, length, width, dtype=torch.float64)

    def gradients(out):
        found = torch.autograd.grad(out, leaves, grad, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found)]

    expected = plain(terms, value, None, future(length, torch.float64) if causal else None)[0]
    expected_grads = gradients(expected)
    for out in (tiled(terms, value, groups_of([length] * bsz), causal), fused(terms, value, None, causal)):
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(gradients(out), expected_grads)
    assert all(torch.equal(a, b) for a, b in zip(tensors(terms), before))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", [s for s in SPECS if "+" in s])
def test_sums(spec, causal, monkeypatch):
    """Mixtures without weights, too; and no parameter or buffer changes."""
    module = make_attention(spec, "sum").double()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x, grad = torch.randn(2, 9, len(LENGTHS), 6, dtype=torch.float64)
    masks = (padding_mask(LENGTHS), future(9, torch.float64) if causal else None, monkeypatch)
    expected, found = (run(module, x, grad, *masks, computation) for computation in (plain, None))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-12, rtol=0)
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items() if not n.endswith("reached"))


@pytest.mark.parametrize("mixture", ["convex", "sum"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", ["factorized_random+dense", "factorized_random+vanilla", "random+factorized_random"])
def test_short_sentences(spec, causal, mixture, monkeypatch):
    """The product of R1 and R2 is computed once for a batch in which another term differs by sentence."""
    module = make_attention(spec, mixture).double()
    x, grad = torch.randn(2, 9, len(LENGTHS), 6, dtype=torch.float64)
    masks = (padding_mask(LENGTHS), future(9, torch.float64) if causal else None, monkeypatch)
    expected = run(module, x, grad, *masks, plain)
    parts_of, parts = tiles.parts_of, []

    def record(term, once):
        made = list(parts_of(term, once))
        parts.extend(part for part, _ in made)
        return made

    monkeypatch.setattr(tiles, "parts_of", record)
    for short, products in ((8, 1), (9, 0 if "random+factorized" not in spec else 1)):
        monkeypatch.setattr(tiles, "SHORT", short)
        parts.clear()
        found = run(module, x, grad, *masks, tiled)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], atol=1e-12, rtol=0)
        assert sum(part.query is not None and part.query.size(0) == 1 for part in parts) == products


@pytest.mark.parametrize("frozen", ["R", "alpha", "W1", "W2", "_proj"])
def test_frozen_parameters(frozen, monkeypatch):
    """What is not trained has no gradient; the others have theirs."""
    module = make_attention("random+fixed_random+dense+vanilla").double()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(frozen not in name)
    x, grad = torch.randn(2, 9, len(LENGTHS), 6, dtype=torch.float64)
    expected, found = (run(module, x, grad, padding_mask(LENGTHS), None, monkeypatch, c) for c in (plain, None))
    assert found.keys() == expected.keys() and not any(frozen in name for name in found)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-12, rtol=0)


def chosen(spec, monkeypatch, bsz=3, training=True, dropout=0.0, **call):
    """The name of the computation that a call comes to."""
    called = []
    module = make_attention(spec, dropout=dropout).train(training)
    x = torch.randn(9, bsz, 6)
    with monkeypatch.context() as patch:
        for name in ("tiled", "fused"):
            original = getattr(computations, name)
            patch.setattr(
                computations, name, lambda *args, n=name, f=original, **kwargs: called.append(n) or f(*args, **kwargs)
            )
        module(x, x, x, **call)
    return called[0] if called else "plain"


@pytest.mark.parametrize(
    "spec, bsz, expected",
    [
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
    ],
)
def test_choice(spec, bsz, expected, monkeypatch):
    assert chosen(spec, monkeypatch, bsz) == expected
    assert chosen(spec, monkeypatch, bsz, need_weights=True) == "plain"
    assert chosen(spec, monkeypatch, bsz, attn_mask=future(9)) == expected
    left = padding_mask([9, 5, 5][:bsz]).flip(1)
    if bsz > 1:
        assert chosen(spec, monkeypatch, bsz, key_padding_mask=left) == "plain"
        assert chosen(spec, monkeypatch, bsz, key_padding_mask=left.flip(1)) == expected
    assert chosen(spec, monkeypatch, bsz, attn_mask=future(9).t()) == "plain"
    learned = future(9).requires_grad_()
    assert chosen(spec, monkeypatch, bsz, attn_mask=learned) == "plain"
    assert chosen(spec, monkeypatch, bsz, attn_mask=torch.zeros(1, 1)) == "plain"
    if bsz > 1:
        assert chosen(spec, monkeypatch, bsz, key_padding_mask=padding_mask([9])) == "plain"
    with_dropout = "fused" if expected == "fused" else "plain"
    assert chosen(spec, monkeypatch, bsz, dropout=0.1) == with_dropout
    assert chosen(spec, monkeypatch, bsz, training=False, dropout=0.1) == expected


def test_small_batches_are_plain(monkeypatch):
    monkeypatch.setattr(computations, "SMALL", 3 * 2 * 9 * 9)
    assert chosen("dense", monkeypatch) == "plain" and chosen("random", monkeypatch) == "tiled"


def test_masks_are_read():
    """Lengths of right-padded sentences; None for an empty one or a hole. A changed mask is read again."""
    assert sentence_lengths(padding_mask(LENGTHS)) == LENGTHS
    mask = padding_mask([3, 2])
    assert sentence_lengths(mask) == [3, 2] and sentence_lengths(mask) == [3, 2]
    mask[1, 1] = True
    assert sentence_lengths(mask) == [3, 1]
    mask[1, 0] = True
    assert sentence_lengths(mask) is None
    mask[:] = torch.tensor([[False, True, False], [False, False, False]])
    assert sentence_lengths(mask) is None
    calls = []
    for _ in range(2):
        computations.remembered(mask, "a question", lambda: calls.append(1))
    assert len(calls) == 1
    square = padding_mask([3, 2, 1])
    assert sentence_lengths(square) == [3, 2, 1] and not is_causal(square)
    with torch.inference_mode():
        assert sentence_lengths(padding_mask([3, 2])) == [3, 2]
    causal = future(4)
    assert is_causal(causal) and is_causal(causal.half()) and is_causal(causal.bool())
    causal[0, 1] = 0
    assert not is_causal(causal) and not is_causal(future(4)[:3]) and not is_causal(torch.zeros(4, 4))
    assert groups_of(LENGTHS) == [(0, 2, 9), (2, 5, 7), (5, 6, 4)]


def test_rows_of_padding_are_finite():
    module = make_attention("random+vanilla")
    x = torch.randn(9, 6, 6)
    out, _ = module(x, x, x, key_padding_mask=padding_mask(LENGTHS))
    assert torch.equal(out[7, 2], module.out_proj.bias) and torch.isfinite(out).all()


@pytest.mark.parametrize("short", [0, 9])
@pytest.mark.parametrize("lengths", [LENGTHS, [9]], ids=["padded", "one"])
@pytest.mark.parametrize("mixture", ["convex", "sum"])
@pytest.mark.parametrize("spec", SPECS)
def test_autocast(spec, mixture, lengths, short, monkeypatch):
    """--amp: value and gradients close to fp32."""
    monkeypatch.setattr(tiles, "SHORT", short)
    module = make_attention(spec, mixture)
    x, grad = torch.randn(2, 9, len(lengths), 6)
    mask = padding_mask(lengths)
    expected = run(module, x, grad, mask, None, monkeypatch, plain)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(module, x, grad, mask, None, monkeypatch, None)
    scale = max(tensor.abs().max() for tensor in expected.values())
    for name in expected:
        assert (found[name] - expected[name]).abs().max() <= 0.03 * scale, name


@pytest.mark.parametrize("independent", [True, False])
def test_tiles_are_not_autocast(independent):
    """The types of the terms and the value hold inside the tiles, in both passes."""
    torch.manual_seed(6)
    value, query, key = (torch.randn(3, 2, 9, 4, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 2, 9, 9, requires_grad=True)
    terms = [Terms(bias=bias)] if independent else [Terms(bias=bias), Terms(query=query, key=key)]
    leaves = [value, bias] if independent else [value, bias, query, key]
    grad = torch.randn(3, 2, 9, 4)
    expected = plain(terms, value, None, None)[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = tiled(terms, value, groups_of([9] * 3), causal=False)
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
        terms = [Terms(bias=bias), Terms(query=query.expand(bsz, -1, -1, -1), key=key.expand(bsz, -1, -1, -1))]
        out = tiled(terms, value.expand(bsz, -1, -1, -1), groups_of([4] * bsz), causal=False)
        return torch.autograd.grad(out, bias, grad.expand(bsz, -1, -1, -1))[0]

    assert gradient(1).dtype == gradient(300).dtype == torch.bfloat16
    torch.testing.assert_close(gradient(300), 300 * gradient(1), rtol=0.01, atol=0)


@pytest.mark.parametrize(
    "device, bsz, dropout, independent, bias, chosen",
    [
        ("cpu", 3, 0.0, True, True, "tiled"),
        ("meta", 3, 0.0, True, True, "tiled"),
        ("cpu", 3, 0.1, True, True, None),
        ("cpu", 3, 0.0, False, False, "fused"),
        ("cpu", 3, 0.1, False, False, "fused"),
        ("cpu", 3, 0.0, False, True, "tiled"),
        ("cpu", 3, 0.1, False, True, None),
        ("meta", 3, 0.0, False, True, "fused"),  # "meta" stands for whatever is no CPU
        ("meta", 3, 0.1, False, True, "fused"),
        ("meta", 1, 0.0, True, True, "fused"),
    ],
)
def test_the_choice(device, bsz, dropout, independent, bias, chosen, monkeypatch):
    """`attend` is its own table."""
    called = []
    for name in ("fused", "tiled"):
        monkeypatch.setattr(computations, name, lambda *args, name=name: called.append(name))
    value = torch.empty(bsz, 2, 9, 4, device=device)
    n = 1 if independent else bsz
    terms = [] if independent and bias else [Terms(query=value[:n], key=value[:n])]
    if bias:
        terms.append(Terms(bias=torch.empty(1, 2, 9, 9, device=device)))
    computations.attend(terms, value, None, None, dropout)
    assert called == ([chosen] if chosen else [])
