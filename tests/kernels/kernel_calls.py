"""What the tests of the kernels share: calls of the kernels and of the definition, and their comparison."""

import torch
from helpers import NAMES, SPECS, make_attention, padding_mask

from fairseq_synth.computations import kernels, plain
from fairseq_synth.computations.kernels import launches
from fairseq_synth.logits import Bias, Logits, Outer, Product
from fairseq_synth.masks import causal_mask
from fairseq_synth.positions import Inputs, take_column_bias, take_columns, take_rows, take_window

MIXED = "random+factorized_random+dense+factorized_dense+vanilla"  # every place of the kernels
MASKS = ["none", "padded", "left", "causal"]


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


def is_supported(spec):
    """Whether the kernels are for these functions."""
    return spec != "vanilla"


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
