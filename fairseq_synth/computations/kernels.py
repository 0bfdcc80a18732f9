"""softmax(S) V on a GPU by Triton kernels: neither logits nor weights leave the registers, in either pass.

Off unless the environment variable FAIRSEQ_SYNTH_KERNELS is 1, as no training with them has run to its end yet. The
kernels are in `triton_short`, `triton_long` and `triton_sums`, their formula in `triton_common`; where their tensors
lie is in `memory`, how they are called in `launches`. This file says what they support, and calls them.

To find out how tensors lie, and which launches that means, takes Python longer than the launches themselves. So it is
kept, as a `Plan`, for calls whose tensors lie alike: the layers of a model, and later batches of the same size.
"""

import logging
import os
from functools import lru_cache
from typing import Any, Dict, List, NamedTuple, Optional, Tuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import SynthesizerError
from ..logits import Logits, weighted
from ..masks import is_causal, is_recorded
from .launches import Launch, Options, Scratch, backward_launches, forward_launch
from .memory import (
    BY_SENTENCE,
    NAMES,
    SHARED,
    Place,
    Tensors,
    gradients_of,
    is_aligned,
    is_filled,
    like_tokens,
    lying_in,
    new_gradients,
    of_all_heads,
    own_size,
    tensors_of,
    together,
    whole_of,
    wholes_of,
    with_token_stride,
)

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)  # in fp32, products without tensor cores take too many registers
INTERPRETED = (torch.float32, torch.float16)  # numpy, which the interpreter computes with, has no bf16
VARIABLE = "FAIRSEQ_SYNTH_KERNELS"
TRITON = (3, 4)  # the oldest release whose kernels take tuples
CAPABILITY = (8, 0)
WIDEST = 128  # features of a head
WHOLE = 512  # rows of a factor up to which the product of all rows is cheaper than the gradient of a slice
MOST_PLANS = 4096  # that are kept
Product = Tuple[Optional[Tensor], float, Tensor, Tensor]  # as in `Logits`
KINDS: Dict[Tuple[Any, ...], bool] = {}  # {kind of calls: whether their kernels compile}
REPLACED = "another computation is used"  # of calls whose kernels do not; benchmarks look for it in a log


class Parts(NamedTuple):
    """The summands of the logits, by what the kernels have for them."""

    own: List[Product]  # products whose factors both differ by sentence, at most one
    half: List[Product]  # products with a shared key, at most one
    outer: List[Tuple[Optional[Tensor], Tensor, Tensor]]  # at most one
    columns: Logits  # shared rows, which are added up
    matrices: Logits  # shared matrices and products of shared factors, which are added up
    diagonals: List[Tuple[Optional[Tensor], Tensor, int, int]]  # at most one, without matrices


PARTS: "WeakKeyDictionary[Logits, Optional[Parts]]" = WeakKeyDictionary()  # what `supports` finds, for `compute`


def supports(
    logits: Logits, value: Tensor, key_padding_mask: Optional[Tensor], attn_mask: Optional[Tensor], dropout: float
) -> bool:
    """What the kernels are on for and were written for: see `docs/gpu-kernels.md`."""
    if not are_on(value):
        return False
    if not (attn_mask is None or is_causal(attn_mask)):
        return False
    if value.dtype not in (INTERPRETED if value.device.type == "cpu" else DTYPES):
        return False
    parts = PARTS[logits] = parts_of(logits, value)
    if value.numel() == 0 or parts is None:
        return False
    if parts.own and len(logits.products) == 1 and not (logits.outers or logits.biases or logits.diagonals):
        return False  # `vanilla` alone, and a single sentence with any one product: torch's fused attention
    width = max([value.size(3)] + [query.size(3) for _, _, query, _ in parts.own + parts.half])
    summands = len(logits.products) + len(logits.outers) + len(parts.matrices.biases) + len(parts.diagonals)
    return width <= 64 or (width <= WIDEST and summands <= 2)


def are_on(x: Tensor) -> bool:
    """Whether the kernels are switched on and can run on x, which has values, and torch does not record the call."""
    is_eager = type(x) is Tensor and not is_recorded()
    return are_switched_on() and is_eager and device_fits(x.device)


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


def parts_of(logits: Logits, value: Tensor) -> Optional[Parts]:
    """The summands in the kernels' places; None where they have no place for one of them."""
    bsz, _, length, _ = value.size()

    def is_shared(x: Tensor) -> bool:
        return x.size(0) < bsz or bsz == 1

    parts = Parts([], [], list(logits.outers), Logits([], [], [], []), Logits([], [], [], []), list(logits.diagonals))
    for weight, scale, query, key in logits.products:
        if bsz == 1:  # any product has any place; as a matrix it would be stored
            place = next((each for each in (parts.own, parts.half) if not each), parts.matrices.products)
            place.append((weight, scale, query, key))
        elif not is_shared(query) and not is_shared(key):
            parts.own.append((weight, scale, query, key))
        elif not is_shared(query):
            parts.half.append((weight, scale, query, key))
        elif is_shared(key):
            parts.matrices.products.append((weight, scale, query, key))
        else:
            return None
    for weight, bias in logits.biases:
        if not is_shared(bias):
            return None
        (parts.columns if bias.size(2) == 1 else parts.matrices).biases.append((weight, bias))
    if parts.matrices.tensors() or len(parts.diagonals) > 1:
        parts.matrices.biases.extend(Logits([], [], [], logits.diagonals).with_matrices(length).biases)
        parts.diagonals.clear()
    if max(len(parts.own), len(parts.half), len(parts.outer)) > 1:
        return None
    return parts


def kind_of(
    parts: Parts, value: Tensor, key_padding_mask: Optional[Tensor], attn_mask: Optional[Tensor], dropout: float
) -> Tuple[Any, ...]:
    """A key for calls that, with few exceptions, run the same compiled kernels."""
    counts = (len(parts.own), len(parts.half), len(parts.outer), bool(parts.columns.biases), len(parts.diagonals))
    matrix = (len(parts.matrices.products), [weight is None for weight, _ in parts.matrices.biases].count(False))
    masks = (key_padding_mask is None, attn_mask is None, dropout > 0)
    tile = value.size(2).bit_length()
    return (value.device, value.dtype, value.size(3), tile, *counts, *matrix, *masks)


def compute(
    logits: Logits,
    value: Tensor,
    key_padding_mask: Optional[Tensor],
    attn_mask: Optional[Tensor],
    dropout: float = 0.0,
) -> Tensor:
    """See `attend`. Rows of padding behind a sentence are 0."""
    parts = PARTS[logits] if logits in PARTS else parts_of(logits, value)
    assert parts is not None
    given, scale = summands(parts, value)
    owners = [whole_of(x) for x in given.values()]
    options = Options(
        has_hidden=key_padding_mask is not None,
        dropout=dropout,
        causal=is_causal(attn_mask),
        scale=scale,
        rows={},  # `new_plan` fills them in
        diagonals=len(parts.diagonals) > 0,
    )
    key = layout_of(given, owners, options)
    if key not in PLANS:
        if len(PLANS) >= MOST_PLANS:
            PLANS.clear()
        kind = kind_of(parts, value, key_padding_mask, attn_mask, dropout)
        PLANS[key] = new_plan(given, owners, options, kind)
    plan = PLANS[key]
    if not plan.works:
        return by_another(logits, value, key_padding_mask, attn_mask, dropout)
    hidden = None
    if key_padding_mask is not None:
        hidden = key_padding_mask.to(torch.bool).contiguous().view(torch.uint8)
        hidden = hidden if is_aligned(hidden) else hidden.clone()
    seed = torch.randint(1 << 62, (1,), device=value.device) if dropout > 0 else None
    out: Tensor = _Kernels.apply(plan, hidden, seed, *plan.wholes(given, owners))
    return out


def summands(parts: Parts, value: Tensor) -> Tuple[Dict[str, Tensor], float]:
    """The tensors of a call, named as in `triton_common`, each weight as ``a_`` and its summand; the scale of q k^T."""
    length, scale = value.size(2), 1.0
    given: Dict[str, Any] = {"v": value}
    for weight, number, query, key in parts.own:
        given.update(a_q=weight, q=query, k=key)
        scale = number
    for weight, number, query, key in parts.half:
        query, key = weighted(None, query, key, number)
        given.update(a_x=weight, x=query, w=key)
    for weight, left, right in parts.outer:
        given.update(a_outer=weight, left=left[..., : -(-length // right.size(3))], right=right)
    for name, logits in (("c", parts.columns), ("r", parts.matrices)):
        if logits.tensors():
            given[f"a_{name}"], given[name] = without_weight(logits, length)
    for weight, values, _, _ in parts.diagonals:
        if own_size(values, whole_of(values)) != tuple(values.size()[2:]):
            values = values.clone()  # `add_diagonals` counts distances by the whole tensor
        given.update(a_r=weight, r=values)
    return {name: x for name, x in given.items() if x is not None}, scale


def without_weight(logits: Logits, length: int) -> Tuple[Optional[Tensor], Tensor]:
    """The weight of a sum's only summand and the summand; of several, None and the sum."""
    if len(logits.products) + len(logits.biases) > 1:
        return None, logits.total(length)
    for weight, bias in logits.biases:
        return weight, bias
    ((weight, scale, query, key),) = logits.products
    wholes = [whole_of(query), whole_of(key)]
    if all(x.dim() == 3 and x.size(1) <= WHOLE and own_size(y, x) for x, y in zip(wholes, (query, key))):
        query, key = (x[None] for x in wholes)  # the gradient of a slice is a copy
    return weight, Logits([(None, scale, query, key)], [], [], []).total(length)[:, :, :length, :length]


def layout_of(given: Dict[str, Tensor], owners: List[Tensor], options: Options) -> Tuple[Any, ...]:
    """All that a plan depends on: how the tensors of a call, and those that they are views of, lie in memory."""
    numbers: Dict[int, int] = {}
    found: List[Any] = [given["v"].device, options.has_hidden, options.dropout, options.causal, options.scale]
    found.append(options.diagonals)
    for (name, x), owner in zip(given.items(), owners):
        number = numbers.setdefault(id(owner), len(numbers))
        found += (name, x.dtype, x.size(), x.stride(), x.storage_offset() - owner.storage_offset(), is_aligned(x))
        found += (number, owner.size(), owner.stride(), owner.requires_grad)  # x without a gradient is its own
    return tuple(found)


class Plan:
    """The launches of calls whose tensors lie alike.

    Attributes:
        works: whether the kernels compile.
        sources: of each tensor that autograd is to see, its number among the owners, or the name of a tensor that is
            taken as it is, for all heads; None: tensors are copied first.
        places: of the kernels' tensors in those.
    """

    def __init__(self, options: Options, t: Tensors, places: Dict[str, Place]) -> None:
        self.works = True
        self.sources: Optional[List[Any]] = None
        self.options, self.places = options, places
        self.forward = forward_launch(t, options)
        self.is_long = "logs" in self.forward.tensors
        self.backward: Dict[Any, Backward] = {}

    def wholes(self, given: Dict[str, Tensor], owners: List[Tensor]) -> List[Tensor]:
        """The tensors that autograd is to see."""
        if self.sources is None:
            return prepared(given)[1]
        heads = given["v"].size(1)
        return [given[x].expand(-1, heads, -1, -1) if type(x) is str else owners[x] for x in self.sources]

    def backward_of(self, wanted: Tuple[bool, ...], grad: Tensor, wholes: List[Tensor], *saved: Any) -> "Backward":
        """The backward pass. `wanted`: of each whole, whether its gradient is; `saved`: what else it reads."""
        misaligned = [n for n, x in enumerate((grad, *wholes, *saved)) if x is not None and not is_aligned(x)]
        key = (wanted, grad.stride(), *misaligned)
        if key not in self.backward:
            t = tensors_of(wholes, self.places)
            names = [name for name, place in self.places.items() if wanted[place.whole]]
            launches, scratch = backward_launches(t, self.options, names, self.is_long, grad, wholes, self.places)
            filled = [is_filled(number, whole, self.places) for number, whole in enumerate(wholes)]
            self.backward[key] = Backward(launches, scratch, filled)
        return self.backward[key]


class Backward(NamedTuple):
    """A backward pass: its launches, their memory for sums, and whether they fill the gradient of each whole."""

    launches: List[Launch]
    scratch: Scratch
    filled: List[bool]


PLANS: Dict[Tuple[Any, ...], Plan] = {}  # by what `layout_of` says


def new_plan(given: Dict[str, Tensor], owners: List[Tensor], options: Options, kind: Tuple[Any, ...]) -> Plan:
    """The plan of a call, with its kernels compiled. `kind`: what `kind_of` returns."""
    t, wholes, places, rows = prepared(given)
    plan = Plan(options._replace(rows=rows), t, places)
    numbers = {id(owner): number for number, owner in enumerate(owners)}
    names = {id(x): name for name, x in t.items() if name in given and is_alias(x, given[name])}
    sources = [numbers.get(id(whole), names.get(id(whole))) for whole in wholes]
    is_copied = any(name in given and id(x) not in names for name, x in t.items() if x is not None)
    if None not in sources and not is_copied:
        plan.sources = sources
    plan.works = KINDS.get(kind, True)
    if plan.works and not is_interpreted():
        try:
            load(plan, wholes)
            KINDS[kind] = True
        except torch.cuda.OutOfMemoryError:
            raise  # fairseq leaves such a batch out
        except Exception as error:  # of many classes: of the compiler, the assembler and the GPU's driver
            reason = f"its kernel failed: {error!r:.1000}"
            if options.dropout > 0 and kind in KINDS:
                # the second forward pass of activation checkpointing would drop other weights than the first
                raise SynthesizerError(f"set {VARIABLE}=0: a call cannot go on, as {reason}") from error
            KINDS[kind] = plan.works = False
            logger.warning(f"{VARIABLE}: {REPLACED} for a call, as {reason}")
    return plan


def is_alias(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same memory."""
    return bool(torch._C._is_alias_of(x, y))  # type: ignore[attr-defined]


def prepared(given: Dict[str, Tensor]) -> Tuple[Tensors, List[Tensor], Dict[str, Place], Dict[str, int]]:
    """The kernels' tensors, copied where they cannot be read as they lie; what `wholes_of` says of them; the row of
    each weight."""
    bsz, heads, _, _ = given["v"].size()
    t: Tensors = dict.fromkeys(NAMES)
    for name in BY_SENTENCE:
        t[name] = with_token_stride(given.get(name), bsz, heads, given["v"].dtype)
    for name in SHARED:
        t[name] = of_all_heads(given.get(name), heads, is_whole=name == "w")
    t["weights"], rows = together({name[2:]: x for name, x in given.items() if name.startswith("a_")}, heads)
    wholes, places = wholes_of(t)
    return t, wholes, places, rows


def by_another(*call: Any) -> Tensor:
    """The result of another computation."""
    from . import COMPUTATIONS

    found = next(each for each in COMPUTATIONS if each.__name__ != __name__ and each.supports(*call))
    return found.compute(*call)


def load(plan: Plan, wholes: List[Tensor]) -> None:
    """Compiles the kernels of a call, for both passes, and loads them; raises what the compiler or the GPU does."""
    t = tensors_of(wholes, plan.places)
    out = like_tokens(t["v"])
    backward = plan.backward_of(tuple(x.requires_grad for x in wholes), out, wholes)
    grads = new_gradients(wholes, backward.filled, [x.requires_grad for x in wholes])
    tensors = {**t, **gradients_of(grads, plan.places), **backward.scratch.tensors(out), "out": out, "grad": out}
    for name, dtype in (("logs", torch.float32), ("hidden", torch.uint8), ("seed", torch.int64)):
        tensors[name] = out.new_empty(1, dtype=dtype)
    with torch.cuda.device_of(out):
        for each in (plan.forward, *backward.launches):
            each.compile(each.args(tensors))


def run(launch: Launch, tensors: Tensors) -> None:
    """Calls the kernel; the compiled one itself, as to find it takes Triton much longer than to launch it."""
    args = launch.args(tensors)
    if is_interpreted():
        launch.kernel[launch.grid](*args)
        return
    if launch.call is None:  # `load` has not seen gradients that lie in this way
        launch.compile(args)
    assert launch.call is not None
    launch.call(*args)


class _Kernels(torch.autograd.Function):
    """Saves its inputs; for long sentences its output too, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, hidden: Optional[Tensor], seed: Optional[Tensor], *wholes: Tensor) -> Tensor:
        tensors = tensors_of(wholes, plan.places)
        out = like_tokens(tensors["v"])
        logs = out.new_empty(out.size()[:3], dtype=torch.float32) if plan.is_long else None
        tensors.update(out=out, logs=logs, hidden=hidden, seed=seed)
        with torch.cuda.device_of(out):  # the current device may be another; for the backward pass torch sets it
            run(plan.forward, tensors)
        ctx.plan, ctx.strides = plan, [x.stride() for x in (out, *wholes)]
        ctx.save_for_backward(hidden, seed, logs, out if plan.is_long else None, *wholes)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        hidden, seed, logs, *saved = ctx.saved_tensors
        out, *wholes = map(lying_in, ctx.strides, saved)
        plan, wanted = ctx.plan, ctx.needs_input_grad[3:]
        tensors = tensors_of(wholes, plan.places)
        grad = with_token_stride(grad, grad.size(0), grad.size(1), tensors["v"].dtype)
        backward = plan.backward_of(wanted, grad, wholes, hidden, seed, logs, out)
        grads = new_gradients(wholes, backward.filled, wanted)
        tensors.update(gradients_of(grads, plan.places), out=out, logs=logs, hidden=hidden, seed=seed, grad=grad)
        tensors.update(backward.scratch.tensors(grad))
        for launch in backward.launches:
            run(launch, tensors)
        return (None, None, None, *grads)
