"""softmax(S) V on a GPU by Triton kernels: neither logits nor weights leave the registers, in either pass.

Off unless the environment variable FAIRSEQ_SYNTH_KERNELS is 1, as no training with them has run to its end yet. The
kernels are in `triton_short`, `triton_long` and `triton_sums`, their formula in `triton_common`, and how they are called
in `launches`. This file says what they support, and hands them the tensors of a call, which lie in one way only:

=======  =====================================================================================
packed   (T, B, features): of every token its queries and keys, if there are any, and its values
x, w     (H, T, B, X) and (H, l, X): the product with shared keys, w whole
pair     (H, T, B, a + b): both factors of the outer product
c        (H, l): a row, whole
r        (H, l, l): a matrix, whole or of this call; or its values by distance, (H, 2 m + 1)
weights  (M, H): the weights of the mixture
=======  =====================================================================================

The projections leave them so. As parameters are whole, their gradients are too: nothing is sliced, joined or padded.
"""

import logging
import os
from functools import lru_cache
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import SynthesizerError
from ..logits import Logits
from ..masks import is_recorded
from ..parameters import positions
from .launches import SUMMANDS, Launch, Layout, Plan, plan_of, up

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)  # in fp32, products without tensor cores take too many registers
INTERPRETED = (torch.float32, torch.float16)  # numpy, which the interpreter computes with, has no bf16
VARIABLE = "FAIRSEQ_SYNTH_KERNELS"
TRITON = (3, 4)  # the oldest release whose kernels take tuples
CAPABILITY = (8, 0)
WIDEST = 128  # features of a head
WHOLE = 512  # rows of a factor up to which the product of all rows is cheaper than the gradient of a slice
NAMES = ("packed", "x", "w", "pair", "c", "r", "weights")


def are_on(x: Tensor) -> bool:
    """Whether the kernels are switched on and can run on x, which has values, and torch does not record the call."""
    if not are_switched_on() or type(x) is not Tensor or is_recorded() or not device_fits(x.device):
        return False
    return x.dtype in (INTERPRETED if x.device.type == "cpu" else DTYPES) and x.numel() > 0


def are_switched_on() -> bool:
    """What the environment variable says.

    Raises:
        SynthesizerError: it is neither 1 nor 0.
    """
    value = os.environ.get(VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise SynthesizerError(f"{VARIABLE}={value}: give 1 for on or 0 for off")
    return value == "1"


@lru_cache(maxsize=None)
def device_fits(device: torch.device) -> bool:
    """Whether the kernels can run on a device: a GPU, or a CPU under Triton's interpreter. If not, says so once."""
    if device.type == "cpu":
        fits = is_interpreted() and triton_fits()
    elif device.type != "cuda" or torch.version.hip is not None:
        fits = False
    else:
        fits = torch.cuda.get_device_capability(device) >= CAPABILITY and triton_fits()
    if not fits:
        needs = "an NVIDIA GPU of compute capability {}.{} or higher, and Triton".format(*CAPABILITY)
        logger.warning(f"{VARIABLE}: has no effect on {device}: the kernels need {needs}")
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


class Call(NamedTuple):
    """The tensors of a call by `NAMES`, and what else `Layout` asks for."""

    tensors: Dict[str, Tensor]
    rows: Dict[str, int]  # of the weights of summands
    scale: float
    is_by_distance: bool
    left: int


def attend(
    logits: Logits,
    q: Optional[Tensor],
    k: Optional[Tensor],
    value: Tensor,
    packed: Optional[Tensor],
    key_padding_mask: Optional[Tensor],
    is_causal: bool,
    dropout: float = 0.0,
) -> Optional[Tensor]:
    """See `computations.attend`; None for what the kernels have no place for. Rows of padding at the end are 0."""
    call = call_of(logits, q, k, value, packed)
    if call is None:
        return None
    a = layout_of(call, value, key_padding_mask is not None, is_causal, dropout)
    plan = plan_of(a)
    tensors = [call.tensors.get(name) for name in NAMES]
    if not plan.is_loaded and not is_interpreted():
        load(plan, tensors)
        plan.is_loaded = True
    hidden = None
    if key_padding_mask is not None:
        hidden = aligned(key_padding_mask.to(torch.bool).contiguous().view(torch.uint8))
    seed = torch.randint(1 << 62, (1,), device=value.device) if dropout > 0 else None
    out: Tensor = _Kernels.apply(plan, hidden, seed, *tensors)
    return out


def call_of(
    logits: Logits, q: Optional[Tensor], k: Optional[Tensor], value: Tensor, packed: Optional[Tensor]
) -> Optional[Call]:
    """The summands in the kernels' places; None where they have no place for one of them."""
    bsz, heads, length, width = value.size()
    dtype, tensors, rows, scale, left = value.dtype, {}, {}, 1.0, 0
    own, half, columns, matrices = [], [], [], Logits([], [], [], list(logits.diagonals), logits.weights)
    for product in logits.products:
        is_shared = [x.dim() == 3 or x.size(0) < bsz for x in product[2:]]
        if is_shared[0] and not is_shared[1]:
            return None
        (matrices.products if is_shared[0] else half if is_shared[1] else own).append(product)
    for row, bias in logits.biases:
        if bias.dim() == 4 and bias.size(0) > 1:
            return None
        (columns if bias.size(-2) == 1 else matrices.biases).append((row, bias))
    of_matrices = len(matrices.products) + len(matrices.biases) + len(matrices.diagonals)
    if max(len(own), len(half), len(logits.outers)) > 1 or len(columns) > 1:
        return None
    if own and not (half or logits.outers or columns or of_matrices):
        return None  # `vanilla` alone: torch's fused attention
    widest = max([width, *(product[2].size(-1) for product in own + half)])
    if widest > WIDEST or widest > 64 and len(own) + len(half) + len(logits.outers) + of_matrices > 2:
        return None

    for row, scale, query, key in own:
        rows["q"] = row
        if packed is None or query is not q or key is not k:
            packed = torch.cat([flat(x, bsz, heads, dtype) for x in (query, key, value)], dim=2)
    if packed is None or not own and packed.size(2) != heads * width:
        packed = flat(value, bsz, heads, dtype)
    tensors["packed"] = packed.contiguous()
    for row, number, query, key in half:
        rows["x"] = row
        tensors["x"] = by_head(query if number == 1.0 else query * number, bsz, heads, dtype)
        tensors["w"] = whole(key, heads, length)
    for row, factors, left in logits.outers:
        rows["outer"] = row
        groups, right = up(length, factors.size(3) - left), factors[..., left:]
        if groups > left:  # beyond l
            factors, left = torch.cat([positions(factors[..., :left], 3, 0, groups), right], dim=3), groups
        tensors["pair"] = by_head(factors, bsz, heads, dtype)
    for row, bias in columns:
        rows["c"] = row
        tensors["c"] = whole(bias.transpose(-1, -2), heads, length).squeeze(2)
    if of_matrices:
        rows["r"], tensors["r"] = matrix(matrices, heads, length)
    if logits.weights is not None:
        tensors["weights"] = logits.weights.contiguous()
    is_by_distance = "r" in tensors and tensors["r"].dim() == 2
    return Call({name: aligned(x) for name, x in tensors.items()}, rows, scale, is_by_distance, left)


def flat(x: Tensor, bsz: int, heads: int, dtype: torch.dtype) -> Tensor:
    """(B or 1, H or 1, T, r) -> (T, B, H r)."""
    return x.to(dtype).expand(bsz, heads, -1, -1).permute(2, 0, 1, 3).flatten(2)


def by_head(x: Tensor, bsz: int, heads: int, dtype: torch.dtype) -> Tensor:
    """(B or 1, H or 1, T, r) -> (H, T, B, r)."""
    return x.to(dtype).expand(bsz, heads, -1, -1).permute(1, 2, 0, 3).contiguous()


def whole(x: Tensor, heads: int, length: int) -> Tensor:
    """What sentences share, (H, l, r), whole if no sentence is longer."""
    from ..logits import read_rows

    if x.dim() == 4 or x.size(1) < length:
        x = read_rows(x, 0, length)[0]
    return x.expand(heads, -1, -1).contiguous()


def matrix(logits: Logits, heads: int, length: int) -> Tuple[int, Tensor]:
    """The row of the weight of a sum's only summand, and the summand; of several, -1 and the sum."""
    if len(logits.products) + len(logits.biases) + len(logits.diagonals) == 1:
        for row, values in logits.diagonals:
            return row, values.contiguous()
        for row, bias in logits.biases:
            if bias.dim() == 3 and min(bias.size(1), bias.size(2)) >= length:
                return row, bias.expand(heads, -1, -1).contiguous()
        for row, scale, query, key in logits.products:
            if query.dim() == key.dim() == 3 and length <= min(query.size(1), key.size(1)) <= WHOLE and scale == 1.0:
                return row, torch.bmm(query, key.transpose(1, 2))
    return -1, logits.read(0, length, length).total(length)[0].expand(heads, length, length).contiguous()


def aligned(x: Any) -> Any:
    """x at a multiple of 16 bytes, which is a property that kernels are compiled for."""
    return x if x is None or x.data_ptr() % 16 == 0 else x.clone()


def layout_of(call: Call, value: Tensor, has_hidden: bool, is_causal: bool, dropout: float) -> Layout:
    bsz, heads, length, width = value.size()
    t = call.tensors
    sizes = {name: t[name].size() if name in t else (0, 0, 0, 0) for name in NAMES}
    return Layout(
        value.device,
        tuple([x.dtype for x in t.values()]),
        length,
        bsz,
        heads,
        width,
        (sizes["packed"][2] // heads - width) // 2,
        sizes["x"][3],
        call.left,
        sizes["pair"][3] - call.left,
        sizes["w"][1],
        sizes["c"][1],
        1 if call.is_by_distance else sizes["r"][1],
        sizes["r"][-1],
        call.is_by_distance,
        sizes["weights"][0],
        tuple([call.rows.get(name, -1) for name in SUMMANDS]),
        call.scale,
        has_hidden,
        is_causal,
        dropout,
        frozenset([name for name, x in t.items() if x.requires_grad]),
    )


def named(a: Layout, tensors: Sequence[Optional[Tensor]], before: str = "") -> Dict[str, Any]:
    """The tensors of the kernels, or their gradients, in those of `NAMES`."""
    t = dict(zip(NAMES, tensors))
    packed, pair = t.pop("packed"), t.pop("pair")
    if packed is not None:
        t["v"] = packed
        if a.Q:
            t["q"] = packed
            _, t["k"], t["v"] = packed.split([a.H * a.Q, a.H * a.Q, a.H * a.D], dim=2)
    if pair is not None:
        t["left"], t["right"] = pair.split([a.left, a.right], dim=3)
    return {before + name: x for name, x in t.items()} if before else t


def load(plan: Plan, call: Sequence[Any]) -> None:
    """Compiles and loads the kernels of both passes, as the second pass of activation checkpointing cannot turn back.

    Raises:
        SynthesizerError: a kernel does not compile, or does not fit this GPU.
    """
    tensors, like = {**named(plan.layout, call), **named(plan.layout, call, "to_")}, call[0]
    fp32, hidden, seed = (like.new_empty(1, dtype=x) for x in (torch.float32, torch.uint8, torch.int64))
    tensors.update(dict.fromkeys(plan.starts, fp32), out=like, grad=like, logs=fp32, hidden=hidden, seed=seed)
    try:
        with torch.cuda.device_of(like):
            for launch in (plan.forward, *plan.backward):
                launch.compile(launch.args(tensors))
    except torch.cuda.OutOfMemoryError:
        raise  # fairseq leaves such a batch out
    except Exception as error:  # of many classes: of the compiler, the assembler and the GPU's driver
        raise SynthesizerError(f"set {VARIABLE}=0: a kernel failed: {error!r:.1000}") from error


def run(launch: Launch, tensors: Dict[str, Any]) -> None:
    """Calls the kernel; the compiled one itself, as to find it takes Triton much longer than to launch it."""
    args = launch.args(tensors)
    if is_interpreted():
        launch.kernel[launch.grid](*args)
        return
    if launch.call is None:
        launch.compile(args)
    assert launch.call is not None
    launch.call(*args)


class _Kernels(torch.autograd.Function):
    """Saves its inputs; for long sentences its output too, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, hidden: Optional[Tensor], seed: Optional[Tensor], *call: Any) -> Tensor:
        a, tensors = plan.layout, named(plan.layout, call)
        out: Tensor = call[0].new_empty((a.T, a.B, a.H * a.D))
        logs = out.new_empty((a.B, a.H, a.T), dtype=torch.float32) if plan.is_long else None
        tensors.update(out=out, logs=logs, hidden=hidden, seed=seed)
        with torch.cuda.device_of(out):  # the current device may be another; for the backward pass torch sets it
            run(plan.forward, tensors)
        ctx.plan = plan
        ctx.save_for_backward(hidden, seed, logs, out if plan.is_long else None, *call)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        # a hook on saved tensors, such as torch's `save_on_cpu`, may bring them back to another address
        hidden, seed, logs, out, *call = map(aligned, ctx.saved_tensors)
        plan, a = ctx.plan, ctx.plan.layout
        tensors = named(a, call)
        grads: List[Any] = [torch.empty_like(x) if name in a.wanted else None for name, x in zip(NAMES, call)]
        if grads[3] is not None and a.left > up(a.T, a.right):
            grads[3].zero_()  # features that no column reaches
        tensors.update(named(a, grads, "to_"), out=out, logs=logs, hidden=hidden, seed=seed)
        tensors["grad"] = aligned(grad.contiguous())
        if plan.scratch:
            buffer = grad.new_empty(plan.scratch, dtype=torch.float32)
            tensors.update({name: buffer[start:] for name, start in plan.starts.items()})
        for launch in plan.backward:
            run(launch, tensors)
        return (None, None, None, *grads)
