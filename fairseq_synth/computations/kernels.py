"""softmax(S) V on a GPU by Triton kernels: neither logits nor weights leave the registers, in either pass.

Off unless the environment variable FAIRSEQ_SYNTH_KERNELS is 1, as no training with them has run to its end yet. The
kernels are in `triton_attention` and `triton_sums`, their formula in `triton_common`, and how they are called in
`launches`. This file says what they support, and hands them the tensors of a call, which lie in one way only:

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
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import SynthesizerError
from ..linear import Projected
from ..logits import Logits, Term, positions
from ..masks import is_recorded
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


def are_on(x: Tensor) -> bool:
    """Whether the kernels are switched on and can run on x, which has values, and torch does not record the call.

    Raises SynthesizerError if the environment variable is neither 1 nor 0.
    """
    if SWITCH not in ("", "0", "1"):
        raise SynthesizerError(f"{VARIABLE}={SWITCH}: give 1 for on or 0 for off")
    has_values = SWITCH == "1" and type(x) is Tensor and not is_recorded() and x.numel() > 0
    return has_values and device_fits(x.device, x.dtype)


@lru_cache(maxsize=None)
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


def attend(
    logits: Logits, projected: Projected, key_padding_mask: Optional[Tensor], is_causal: bool, dropout: float = 0.0
) -> Optional[Tensor]:
    """See `computations.attend`; None for what the kernels have no place for. Rows of padding at the end are 0."""
    call = call_of(logits, projected, key_padding_mask is not None, is_causal, dropout)
    if call is None:
        return None
    layout, tensors = call
    plan = plan_of(layout)
    if not plan.is_loaded and not is_interpreted():
        load(plan, tensors)
    hidden = None
    if key_padding_mask is not None:
        hidden = aligned(key_padding_mask.to(torch.bool).contiguous().view(torch.uint8))
    seed = torch.randint(1 << 62, (1,), device=projected.v.device) if dropout > 0 else None
    out: Tensor = _Kernels.apply(plan, hidden, seed, *tensors)
    return out


def call_of(
    logits: Logits, projected: Projected, has_hidden: bool, is_causal: bool, dropout: float
) -> Optional[Tuple[Layout, List[Tensor]]]:
    """What a call's launches depend on, and its tensors in the order of `NAMES`; None if a summand has no place."""
    q, k, value, packed = projected
    bsz, heads, length, width = value.size()
    terms: Dict[str, List[Term]] = {name: [] for name in SUMMANDS}
    for term in logits.terms:
        name = summand_of(term, bsz)
        if name is None:
            return None
        terms[name].append(term)
    of_q, of_x, of_outer, of_c, of_r = map(len, terms.values())
    if max(of_q, of_x, of_outer, of_c) > 1:
        return None
    if of_q and not (of_x or of_outer or of_c or of_r):
        return None  # `vanilla` alone: torch's fused attention
    widest = max([width, *(tensors[0].size(-1) for _, tensors, *_ in terms["q"] + terms["x"])])
    if widest > (MAX_HEAD_DIM if of_q + of_x + of_outer + of_r <= 2 else 64):
        return None

    t: Dict[str, Any] = dict.fromkeys(NAMES)
    rows, scale, q_width, a = dict.fromkeys(SUMMANDS, -1), 1.0, 0, 0
    for _, (query, key), rows["q"], scale, _ in terms["q"]:  # noqa: B007
        # hooks of a function on what it was given see the gradient of views alone
        is_hooked = query._backward_hooks or key._backward_hooks or query.retains_grad or key.retains_grad
        if query is not q or key is not k or is_hooked:
            packed = torch.cat([flat(x, bsz, heads, value.dtype) for x in (query, key, value)], dim=2)
        q_width = query.size(3)
    if packed is None or not of_q and packed.size(-1) != heads * width:
        packed = flat(value, bsz, heads, value.dtype)
    t["packed"] = packed.contiguous()
    for _, (query, key), rows["x"], of_product, _ in terms["x"]:
        t["x"] = by_head(query if of_product == 1.0 else query * of_product, bsz, heads, value.dtype)
        t["w"] = whole(key, heads, length, 1)
    for _, (factors,), rows["outer"], _, a in terms["outer"]:
        groups, right = up(length, factors.size(3) - a), factors[..., a:]
        if groups > a:  # beyond l
            factors, a = torch.cat([positions(factors[..., :a], 3, 0, groups), right], dim=3), groups
        t["pair"] = by_head(factors, bsz, heads, value.dtype)
    for _, (bias,), rows["c"], _, _ in terms["c"]:
        t["c"] = whole(bias, heads, length, 2)
    if of_r:
        rows["r"], t["r"] = matrix(Logits(terms["r"], logits.weights), heads, length)
    if logits.weights:
        t["weights"] = logits.weights[0]
    _, x, w, pair, c, r, weights = t.values()
    r_rows = size(r, 1) if r is None or r.dim() == 3 else 1
    of_heads = (length, bsz, heads, width, q_width, size(x, 3), a, size(pair, 3) - a)
    of_shared = (size(w, 1), size(c, 2), r_rows, size(r, -1), r is not None and r.dim() == 2, size(weights, 0))
    of_call = (tuple(rows.values()), scale, has_hidden, is_causal, dropout)
    tensors = [tensor for tensor in t.values() if tensor is not None]
    dtypes = tuple([tensor.dtype for tensor in tensors])
    wanted = frozenset([name for name, tensor in t.items() if tensor is not None and tensor.requires_grad])
    layout = Layout(value.device, dtypes, *of_heads, *of_shared, *of_call, wanted)
    return layout, [aligned(tensor) for tensor in tensors]


def summand_of(term: Term, bsz: int) -> Optional[str]:
    """Which of `SUMMANDS` a term is computed as; None for a factor that lies where that of no summand does."""
    kind, tensors, *_ = term
    if kind == "outer":
        return "outer"
    if kind == "product":
        is_query_shared, is_key_shared = [x.dim() == 3 or x.size(0) < bsz for x in tensors]
        if is_query_shared:
            return "r" if is_key_shared else None
        return "x" if is_key_shared else "q"
    (bias,) = tensors
    if bias.dim() == 4 and bias.size(0) > 1:
        return None
    return "c" if kind == "bias" and bias.size(-2) == 1 else "r"


def size(x: Optional[Tensor], dim: int) -> int:
    """Its size in a dimension; 0 for None."""
    return 0 if x is None else x.size(dim)


def flat(x: Tensor, bsz: int, heads: int, dtype: torch.dtype) -> Tensor:
    """(B or 1, H or 1, T, r) -> (T, B, H r)."""
    return x.to(dtype).expand(bsz, heads, -1, -1).permute(2, 0, 1, 3).flatten(2)


def by_head(x: Tensor, bsz: int, heads: int, dtype: torch.dtype) -> Tensor:
    """(B or 1, H or 1, T, r) -> (H, T, B, r)."""
    x = x.to(dtype).permute(1, 2, 0, 3)
    return (x if x.size(0) == heads and x.size(2) == bsz else x.expand(heads, -1, bsz, -1)).contiguous()


def whole(x: Tensor, heads: int, length: int, dim: int) -> Tensor:
    """What sentences share, (H, rows, columns), with so many entries in a dimension at least."""
    x = x[0] if x.dim() == 4 else x
    if x.size(dim) < length:
        x = positions(x, dim, 0, length)
    return (x if x.size(0) == heads else x.expand(heads, -1, -1)).contiguous()


def matrix(logits: Logits, heads: int, length: int) -> Tuple[int, Tensor]:
    """The row of the weight of a sum's only summand, and the summand; of several, -1 and the sum."""
    if len(logits.terms) == 1:
        ((kind, (x, *keys), row, scale, _),) = logits.terms
        if kind == "diagonals":
            return row, x.contiguous()
        for key in keys:
            if x.dim() == key.dim() == 3 and max(x.size(1), key.size(1)) <= MAX_ROWS_UNSLICED and scale == 1.0:
                kind, x = "bias", torch.bmm(x, key.transpose(1, 2))
        if kind == "bias":
            return row, whole(whole(x, heads, length, 1), heads, length, 2)
    return -1, whole(logits.read(0, length, length).total(length), heads, length, 1)


def aligned(x: Any) -> Any:
    """x at a multiple of 16 bytes, which is a property that kernels are compiled for."""
    return x if x is None or x.data_ptr() % 16 == 0 else x.clone()


def load(plan: Plan, call: Sequence[Any]) -> None:
    """Compiles and loads the kernels of both passes, as the second pass of activation checkpointing cannot turn back.

    Raises SynthesizerError if a kernel does not compile, or does not fit this GPU.
    """
    packed = call[0]
    tensors: Dict[Any, Any] = {None: None, **dict(zip(plan.names, call)), **dict(zip(plan.to_names, call))}
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


def run(launch: Launch, tensors: Dict[Any, Any]) -> None:
    """Calls the kernel; the compiled one itself, as to find it takes Triton much longer than to launch it."""
    args = launch.args(tensors)
    if launch.call is not None:
        launch.call(*args)
    else:  # Triton's interpreter
        launch.kernel[launch.grid](*args)


class _Kernels(torch.autograd.Function):
    """Saves its inputs; for long sentences its output too, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, hidden: Optional[Tensor], seed: Optional[Tensor], *call: Any) -> Tensor:
        a = plan.layout
        out: Tensor = call[0].new_empty((a.T, a.B, a.H * a.D))
        lse = out.new_empty((a.B, a.H, a.T), dtype=torch.float32) if plan.is_long else None
        tensors: Dict[Any, Any] = dict(zip(plan.names, call), hidden=hidden, seed=seed, out=out, lse=lse)
        tensors[None] = None
        with torch.cuda.device_of(out):  # the current device may be another; for the backward pass torch sets it
            run(plan.forward, tensors)
        ctx.plan = plan
        ctx.save_for_backward(hidden, seed, lse, out if plan.is_long else None, *call)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        # a hook on saved tensors, such as torch's `save_on_cpu`, may bring them back to another address
        hidden, seed, lse, out, *call = map(aligned, ctx.saved_tensors)
        plan: Plan = ctx.plan
        a, grad = plan.layout, aligned(grad.contiguous())
        tensors: Dict[Any, Any] = dict(zip(plan.names, call), hidden=hidden, seed=seed, out=out, lse=lse, grad=grad)
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
