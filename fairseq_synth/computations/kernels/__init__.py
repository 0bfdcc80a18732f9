"""softmax(S) V on a GPU by Triton kernels: neither logits nor weights leave the registers, in either pass.

Off unless the environment variable FAIRSEQ_SYNTH_KERNELS is 1, as no training with them has run to its end yet. The
kernels are in `triton_attention` and `triton_sums`, their formula in `triton_common`, and how they are called in
`launches`. This file says what they support, and hands them the tensors of a call, which lie in one way only:

=======  =====================================================================================
packed   (T, B, features): of every token its queries and keys, if there are any, and its values
x, w     (H, T, B, X) and (H, l, X): the product with shared keys
pair     (H, T, B, a + b): both factors of the outer product
c        (H, l): a row
r        (H, l, l): a matrix; or its values by distance, (H, 2 m + 1)
weights  (M, H): the weights of the mixture
=======  =====================================================================================

What a call has of projections, parameters and weights are views. The kernels are given what these are views of, and
its gradient: nothing is sliced, joined or padded.
"""

import logging
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...errors import SynthesizerError
from ...logits import Bias, Diagonals, Logits, Product, product_of
from ...masks import is_causal, is_recorded
from ...positions import positions
from .launches import NAMES, SUMMANDS, Launch, Layout, Plan, plan_of, up

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)  # in fp32, products without tensor cores take too many registers
INTERPRETED = (torch.float32, torch.float16)  # numpy, which the interpreter computes with, has no bf16
VARIABLE = "FAIRSEQ_SYNTH_KERNELS"
SWITCH = os.environ.get(VARIABLE, "0")  # read once: to read it takes Python as long as a launch
TRITON = (3, 4)  # the oldest release whose kernels take tuples
CAPABILITY = (8, 0)
MAX_HEAD_DIM = 128
# up to so many rows R1 R2^T is computed whole: slicing first would add a kernel for the slice's gradient
MAX_ROWS_UNSLICED = 512
NO_WEIGHTS = (-1,) * len(SUMMANDS)


def are_on(x: Tensor) -> bool:
    """Whether the kernels are switched on and can run on x, which has values, and torch does not record the call.

    Raises SynthesizerError if the environment variable is neither 1 nor 0.
    """
    if SWITCH not in ("", "0", "1"):
        raise SynthesizerError(f"{VARIABLE}={SWITCH}: give 1 for on or 0 for off")
    has_values = SWITCH == "1" and type(x) is Tensor and not is_recorded() and x.numel() > 0
    return has_values and device_fits(x.device, x.dtype)


@cache
def device_fits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels can run on a GPU, or under Triton's interpreter, in a type. If not, says so once."""
    if device.type == "cpu":
        fits = is_interpreted() and triton_fits()
    elif device.type != "cuda" or torch.version.hip is not None:
        fits = False
    else:
        fits = torch.cuda.get_device_capability(device) >= CAPABILITY and triton_fits()
    if not fits:
        needs = "an NVIDIA GPU of compute capability {}.{} or higher, and Triton".format(*CAPABILITY)
        logger.warning(f"{VARIABLE}: has no effect on {device}: the kernels need {needs}")
    elif dtype not in (INTERPRETED if device.type == "cpu" else DTYPES):
        logger.warning(f"{VARIABLE}: has no effect in {str(dtype)[len('torch.') :]}: give --fp16, --bf16 or --amp")
        fits = False
    return fits


def is_interpreted() -> bool:
    """Whether Triton's interpreter takes the place of a GPU, as in tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_fits() -> bool:
    """Whether there is a Triton new enough."""
    try:
        import triton
    except ImportError:
        return False
    return tuple(int(number) for number in triton.__version__.split(".")[:2]) >= TRITON


def refuses(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float
) -> str:
    """See `computations`."""
    if not are_on(value):
        return "kernels that are off"
    if attn_mask is not None and not is_causal(attn_mask):
        return "a mask other than the causal one"
    places = places_of(logits, value)
    if places is None:
        return "a factor that lies where that of no summand does"
    q, x, outer, c, r = [len(terms) for terms in places]
    if max(q, x, outer, c) > 1:
        return "two summands of one kind"
    if q and not (x or outer or c or r):
        return "an inner product alone, which torch's fused attention is for"
    widest = max([value.size(3)] + [term.query.size(3) for term in places[0] + places[1]])
    return "heads that are too wide" if widest > (MAX_HEAD_DIM if q + x + outer + r <= 2 else 64) else ""


def compute(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float = 0.0
) -> Tensor:
    """See `computations`. Rows of padding at the end are 0."""
    layout, tensors = call_of(logits, value, key_padding_mask is not None, attn_mask is not None, dropout)
    plan = plan_of(layout)
    if not plan.is_loaded and not is_interpreted():
        load(plan, tensors)
    hidden = None
    if key_padding_mask is not None:
        hidden = aligned(key_padding_mask.to(torch.bool).contiguous().view(torch.uint8))
    seed = torch.randint(1 << 62, (1,), device=value.device) if dropout > 0 else None
    out: Tensor = _Kernels.apply(plan, hidden, seed, *tensors)
    return out


def places_of(logits: Logits, value: Tensor) -> tuple[list[Any], ...] | None:
    """The terms that are computed as each of `SUMMANDS`; None if a factor lies where that of no summand does."""
    bsz, length = value.size(0), value.size(2)
    q, x, c, r = [], [], [], list(logits.diagonals)  # type: Tuple[List[Any], List[Any], List[Any], List[Any]]
    for number, term in enumerate(reversed(logits.products)):
        is_query_shared, is_key_shared = term.query.size(0) < bsz, term.key.size(0) < bsz
        if bsz == 1:  # any place will do; queries and keys of the projections come last in a mixture
            is_query_shared, is_key_shared = number > 1, number > 0
        if is_query_shared and not is_key_shared:
            return None
        (r if is_query_shared else x if is_key_shared else q).append(term)
    for bias in logits.biases:
        rows = bias.bias.size()
        if rows[0] > 1:
            return None
        (c if rows[2] < length else r).append(bias)
    return q, x, logits.outers, c, r


def call_of(
    logits: Logits, value: Tensor, has_hidden: bool, causal: bool, dropout: float
) -> tuple[Layout, list[Tensor]]:
    """What a call's launches depend on, and its tensors in the order of `NAMES`."""
    bsz, heads, length, width = value.size()
    places = places_of(logits, value)
    assert places is not None
    of_q, of_x, of_outer, of_c, of_r = places
    t: dict[str, Any] = dict.fromkeys(NAMES)
    Q = X = left = right = w_rows = c_columns = r_rows = r_columns = 0
    scale = 1.0
    if of_q:
        query, key, scale, _ = of_q[0]
        Q, t["packed"] = query.size(3), packed([query, key, value])
    else:
        t["packed"] = packed([value])
    if of_x:
        query, key, of_product, _ = of_x[0]
        t["x"] = by_head(query if of_product == 1.0 else query * of_product, bsz, heads, value.dtype)
        t["w"], w_rows, X = whole(key, heads)
    if of_outer:
        factors, left, _ = of_outer[0]
        right = factors.size(3) - left
        groups = up(length, right)
        if groups > left:  # beyond l
            factors = torch.cat([positions(factors[..., :left], 3, 0, groups), factors[..., left:]], dim=3)
            left = groups
        t["pair"] = by_head(factors, bsz, heads, value.dtype)
    if of_c:
        t["c"], _, c_columns = whole(of_c[0].bias, heads)
    if of_r:
        summand = of_r[0] if len(of_r) == 1 else Bias(sum_of(of_r).total(length), None)
        t["r"], r_rows, r_columns = matrix(summand, heads, length)
    t["weights"], rows = weights_of([terms[0].weight if len(terms) == 1 else None for terms in places], heads)
    given = {name: tensor for name, tensor in t.items() if tensor is not None}
    layout = Layout(
        value.device, tuple([x.dtype for x in given.values()]), T=length, B=bsz, H=heads, D=width, Q=Q, X=X, left=left,
        right=right, w_rows=w_rows, c_columns=c_columns, r_rows=r_rows, r_columns=r_columns,
        is_by_distance=len(of_r) == 1 and isinstance(of_r[0], Diagonals),
        weights=0 if t["weights"] is None else t["weights"].numel() // heads, rows=rows, scale=scale,
        has_hidden=has_hidden, is_causal=causal, dropout=dropout,
        wanted=frozenset([name for name, tensor in given.items() if tensor.requires_grad]),
    )  # fmt: skip
    return layout, [aligned(tensor) for tensor in given.values()]


def sum_of(terms: list[Any]) -> Logits:
    """Logits of products, biases and diagonals."""
    kinds: list[list[Any]] = [[x for x in terms if isinstance(x, kind)] for kind in (Product, Bias, Diagonals)]
    return Logits(kinds[0], [], kinds[1], kinds[2])


def is_view(x: Tensor, base: Tensor | None) -> bool:
    """Whether the kernels may read x in `base`, and give the gradient of that: x is a view of it, and nothing else
    waits for the gradient of x."""
    return (
        base is not None and x._base is base and base.is_contiguous() and base.dtype == x.dtype
        and base.requires_grad == x.requires_grad != x.is_leaf and not x._backward_hooks and not x.retains_grad
    )  # fmt: skip


def packed(parts: Sequence[Tensor]) -> Tensor:
    """Parts (B, H, T, d) side by side for each token, (T B, features): what they are views of, or a copy."""
    bsz, heads, length, _ = parts[-1].size()
    base, features = parts[-1]._base, heads * sum([x.size(3) for x in parts])
    if base is not None and base.numel() == length * bsz * features:
        place = base.storage_offset()
        for x in parts:
            strides = (features, x.size(3), bsz * features, 1)
            if not is_view(x, base) or x.storage_offset() != place or x.stride() != strides:
                break
            place += heads * x.size(3)
        else:
            return base
    by_token = [x.to(parts[-1].dtype).expand(bsz, heads, -1, -1).permute(2, 0, 1, 3).flatten(2) for x in parts]
    return (torch.cat(by_token, dim=2) if len(by_token) > 1 else by_token[0]).contiguous()


def by_head(x: Tensor, bsz: int, heads: int, dtype: torch.dtype) -> Tensor:
    """(B or 1, H or 1, T, r) -> (H, T, B, r)."""
    x = x.to(dtype).permute(1, 2, 0, 3)
    return (x if x.size(0) == heads and x.size(2) == bsz else x.expand(heads, -1, bsz, -1)).contiguous()


def whole(x: Tensor, heads: int) -> tuple[Tensor, int, int]:
    """What begins with x, (1, H or 1, n, m), in each head, (H, rows, columns): what it is a view of, or a copy; and how
    many rows and columns there are."""
    base, (_, head, row, one) = x._base, x.stride()
    if (
        base is not None and base.numel() == heads * head and x.size(1) == heads and one == 1 and row >= x.size(3)
        and head % row == 0 and x.storage_offset() == base.storage_offset() and is_view(x, base)
    ):  # fmt: skip
        return base, head // row, row
    x = x[0] if x.size(1) == heads else x[0].expand(heads, -1, -1)
    return x.contiguous(), x.size(1), x.size(2)


def matrix(term: Product | Bias | Diagonals, heads: int, length: int) -> tuple[Tensor, int, int]:
    """A summand without its weight, as `whole` returns it."""
    if isinstance(term, Bias):
        return whole(term.bias, heads)
    if isinstance(term, Product):
        (query, rows, _), (key, columns, _) = whole(term.query, heads), whole(term.key, heads)
        if max(rows, columns) > MAX_ROWS_UNSLICED or query.dim() != 3 or key.dim() != 3 or term.scale != 1.0:
            return whole(product_of(*term[:3]).total(length), heads)
        return torch.bmm(query, key.transpose(1, 2)), rows, columns
    values = term.values
    base, number = values._base, values.stride(1)
    if (
        base is not None and base.numel() == heads * number and values.size(1) == heads and is_view(values, base)
        and values.storage_offset() - base.storage_offset() == number // 2 + 1 - length
    ):  # fmt: skip
        return base, 1, number
    values = values[0, :, 0].expand(heads, -1).contiguous()
    return values, 1, values.size(1)


def weights_of(weights: Sequence[Tensor | None], heads: int) -> tuple[Tensor | None, tuple[int, ...]]:
    """Weights (M, H), and the row of each of `SUMMANDS` in them, -1 for a weight of 1."""
    given = [x for x in weights if x is not None]
    if not given:
        return None, NO_WEIGHTS
    base = given[0]._base
    if base is not None and all([is_view(x, base) and x.stride(1) == 1 for x in given]):
        first = base.storage_offset()
        return base, tuple([-1 if x is None else (x.storage_offset() - first) // heads for x in weights])
    numbers = iter(range(len(given)))
    rows = tuple([-1 if x is None else next(numbers) for x in weights])
    return torch.cat([x.reshape(1, heads) for x in given]), rows


def aligned(x: Any) -> Any:
    """x at a multiple of 16 bytes, which is a property that kernels are compiled for."""
    return x if x is None or x.data_ptr() % 16 == 0 else x.clone()


def load(plan: Plan, call: Sequence[Any]) -> None:
    """Compiles and loads the kernels of both passes, as the second pass of activation checkpointing cannot turn back.

    Raises SynthesizerError if a kernel does not compile, or does not fit this GPU.
    """
    packed = call[0]
    tensors: dict[Any, Any] = {None: None, **dict(zip(plan.names, call)), **dict(zip(plan.to_names, call))}
    fp32, hidden, seed = (packed.new_empty(1, dtype=x) for x in (torch.float32, torch.uint8, torch.int64))
    tensors.update(dict.fromkeys(plan.sums, fp32), out=packed, grad=packed, lse=fp32, hidden=hidden, seed=seed)
    try:
        with torch.cuda.device_of(packed):
            for launch in (plan.forward, *plan.backward):
                launch.compile(launch.args(tensors))
    except torch.cuda.OutOfMemoryError:
        raise  # fairseq leaves such a batch out
    except Exception as error:  # of many classes: of the compiler, the assembler and the GPU's driver
        raise SynthesizerError(f"set {VARIABLE}=0: a kernel failed: {error!r:.1000}") from error
    plan.is_loaded = True


def run(launch: Launch, tensors: dict[Any, Any]) -> None:
    """Calls the kernel; the compiled one itself, as to find it takes Triton much longer than to launch it."""
    args = launch.args(tensors)
    if launch.call is not None:
        launch.call(*args)
    else:  # Triton's interpreter
        launch.kernel[launch.grid](*args)


class _Kernels(torch.autograd.Function):
    """Saves its inputs; for long sentences its output too, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, hidden: Tensor | None, seed: Tensor | None, *call: Any) -> Tensor:
        a = plan.layout
        out: Tensor = call[0].new_empty((a.T * a.B, a.H * a.D))
        lse = out.new_empty((a.B, a.H, a.T), dtype=torch.float32) if plan.is_long else None
        tensors: dict[Any, Any] = dict(zip(plan.names, call), hidden=hidden, seed=seed, out=out, lse=lse)
        tensors[None] = None
        with torch.cuda.device_of(out):  # the current device may be another; for the backward pass torch sets it
            run(plan.forward, tensors)
        ctx.plan = plan
        ctx.save_for_backward(hidden, seed, lse, out if plan.is_long else None, *call)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # a hook on saved tensors, such as torch's `save_on_cpu`, may bring them back to another address
        hidden, seed, lse, out, *call = map(aligned, ctx.saved_tensors)
        plan: Plan = ctx.plan
        a, grad = plan.layout, aligned(grad.contiguous())
        tensors: dict[Any, Any] = dict(zip(plan.names, call), hidden=hidden, seed=seed, out=out, lse=lse, grad=grad)
        tensors[None] = None
        grads = [torch.empty_like(x) if name in a.wanted else None for name, x in zip(plan.names, call)]
        tensors.update(zip(plan.to_names, grads))
        if a.left > up(a.T, a.right or 1) and "pair" in a.wanted:
            tensors["to_pair"].zero_()  # features that no column reaches
        if plan.sums:
            sizes = list(plan.sums.values())
            sums = grad.new_empty(sum(sizes), dtype=torch.float32).split_with_sizes(sizes)  # `split` is much slower
            tensors.update(zip(plan.sums, sums))
        for launch in plan.backward:
            run(launch, tensors)
        return (None, None, None, *grads)
