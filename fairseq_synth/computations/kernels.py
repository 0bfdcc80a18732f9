"""softmax(S) V on a GPU by Triton kernels: neither logits nor weights leave the registers, in either pass.

Off unless the environment variable FAIRSEQ_SYNTH_KERNELS is 1, as they have not been measured on a GPU. The kernels
are in `triton_short`, `triton_long` and `triton_sums`, their formula in `triton_common`; where their tensors lie is in
`memory`. This file says what they support, and calls them.
"""

import logging
import math
import os
from functools import lru_cache
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..logits import Logits, weighted
from ..masks import is_causal, is_recorded
from .memory import (
    BY_SENTENCE,
    NAMES,
    SHARED,
    Place,
    Tensors,
    gradients_of,
    like_tokens,
    new_gradients,
    of_all_heads,
    own_size,
    tensors_of,
    together,
    token_stride,
    whole_of,
    wholes_of,
    with_token_stride,
)

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)  # in fp32, products without tensor cores take too many registers
VARIABLE = "FAIRSEQ_SYNTH_KERNELS"
TRITON = (3, 4)  # the oldest release whose kernels take tuples
CAPABILITY = (8, 0)
WIDEST = 128  # features of a head
WHOLE = 512  # rows of a factor up to which the product of all rows is cheaper than the gradient of a slice
PROGRAMS = 264  # that a backward pass aims at: two for each of an H100's 132 multiprocessors
Product = Tuple[Optional[Tensor], float, Tensor, Tensor]  # as of `Logits`
WORKING: Set[Tuple[Any, ...]] = set()  # kinds of calls whose kernels have been compiled
FAILED: Set[Tuple[Any, ...]] = set()  # kinds that another computation takes


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
    if os.environ.get(VARIABLE, "0") != "1" or not is_eager(value) or not device_fits(value.device):
        return False
    if not (attn_mask is None or is_causal(attn_mask)):
        return False
    if value.dtype not in DTYPES and not (value.dtype == torch.float32 and is_interpreted()):
        return False
    parts = PARTS[logits] = parts_of(logits, value)
    if value.numel() == 0 or parts is None:
        return False
    if parts.own and len(logits.products) == 1 and not (logits.outers or logits.biases or logits.diagonals):
        return False  # `vanilla` alone: torch's fused attention
    width = max([value.size(3)] + [query.size(3) for _, _, query, _ in parts.own + parts.half])
    summands = len(logits.products) + len(logits.outers) + len(parts.matrices.biases) + len(parts.diagonals)
    return width <= 64 or (width <= WIDEST and summands <= 2)


def is_eager(x: Tensor) -> bool:
    """Whether x has values, and torch does not record what becomes of them."""
    return type(x) is Tensor and not is_recorded()


@lru_cache(maxsize=None)
def device_fits(device: torch.device) -> bool:
    """Whether the kernels can run on a device: a GPU, or a CPU under Triton's interpreter."""
    if device.type == "cpu":
        return is_interpreted() and triton_fits()
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return capability_of(device) >= CAPABILITY and triton_fits()


def is_interpreted() -> bool:
    """Whether Triton's interpreter takes the place of a GPU, as in tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=None)
def capability_of(device: torch.device) -> Tuple[int, int]:
    """A GPU's compute capability; the newest there is, under the interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (99, 0)


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
        if not is_shared(query) and not is_shared(key):
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
    """What calls have in common that have the same compiled kernels; some calls of a kind have others."""
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
    """As of `attend`. Rows of padding are 0."""
    bsz, heads, length, width = value.size()
    parts = PARTS[logits] if logits in PARTS else parts_of(logits, value)
    assert parts is not None
    kind = kind_of(parts, value, key_padding_mask, attn_mask, dropout)
    if kind in FAILED:
        return by_another(logits, value, key_padding_mask, attn_mask, dropout)
    tensors: Tensors = dict.fromkeys(NAMES)
    weights: Dict[str, Optional[Tensor]] = {}
    tensors["v"], scale = value, 1.0
    for weights["q"], number, query, key in parts.own:
        tensors["q"], tensors["k"], scale = query, key, number
    for weights["x"], number, query, key in parts.half:
        tensors["x"], tensors["w"] = weighted(None, query, key, number)
    for weights["outer"], left, right in parts.outer:
        tensors["left"], tensors["right"] = left[..., : -(-length // right.size(3))], right
    for name, logits_of in (("c", parts.columns), ("r", parts.matrices)):
        if logits_of.tensors():
            weights[name], tensors[name] = without_weight(logits_of, length)
    for weights["r"], values, _, _ in parts.diagonals:
        tensors["r"] = values
    for name in BY_SENTENCE:
        tensors[name] = with_token_stride(tensors[name], bsz, heads, value.dtype)
    for name in SHARED:
        tensors[name] = of_all_heads(tensors[name], heads, is_whole=name == "w")
    tensors["weights"], rows = together(weights, heads)
    wholes, places = wholes_of(tensors)
    hidden = None
    if key_padding_mask is not None:
        hidden = key_padding_mask.to(torch.bool).contiguous().view(torch.uint8)
    seed = torch.randint(1 << 62, (1,), device=value.device) if dropout > 0 else None
    options = Options(hidden, seed, dropout, is_causal(attn_mask), scale, rows, len(parts.diagonals) > 0)
    if kind not in WORKING and not is_interpreted():
        try:
            load(wholes, places, options)
        except Exception as error:  # of many classes: of the compiler, the assembler and the GPU's driver
            FAILED.add(kind)
            logger.warning(f"{VARIABLE}: another computation is used for a call, as its kernel failed: {error!r:.1000}")
            return by_another(logits, value, key_padding_mask, attn_mask, dropout)
        WORKING.add(kind)
    out: Tensor = _Kernels.apply(options, places, *wholes)
    return out


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


def by_another(*call: Any) -> Tensor:
    """The result of another computation."""
    from . import COMPUTATIONS

    found = next(each for each in COMPUTATIONS if each.__name__ != __name__ and each.supports(*call))
    return found.compute(*call)


class Options(NamedTuple):
    """What a call has beside its differentiable tensors."""

    hidden: Optional[Tensor]
    seed: Optional[Tensor]
    dropout: float
    causal: bool
    scale: float  # of the product q k^T
    rows: Dict[str, int]  # of each summand that has a weight, in `weights`
    diagonals: bool  # R is its values by distance, (1, H, 1, 2 m + 1)


class Launch(NamedTuple):
    """A call of a kernel."""

    kernel: Any
    grid: Tuple[int, ...]
    args: Tuple[Any, ...]
    num_warps: int
    num_stages: int


def load(wholes: List[Tensor], places: Dict[str, Place], options: Options) -> None:
    """Compiles the kernels of a call, for both passes, and loads them; raises what the compiler or the GPU does."""
    t = tensors_of(wholes, places)
    out = like_tokens(t["v"])
    launch, logs = forward_launch(t, options, out)
    grads = new_gradients(wholes, places, [x.requires_grad for x in wholes])
    launches = backward_launches(t, options, gradients_of(grads, places), out, logs, out, wholes, places)
    for each in (launch, *launches):
        kernel = each.kernel.warmup(*each.args, grid=each.grid, num_warps=each.num_warps, num_stages=each.num_stages)
        kernel[each.grid]  # loads it


def run(launch: Launch) -> None:
    """Calls the kernel."""
    launch.kernel[launch.grid](*launch.args, num_warps=launch.num_warps, num_stages=launch.num_stages)


class _Kernels(torch.autograd.Function):
    """Saves its inputs; for long sentences its output too, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, options: Options, places: Dict[str, Place], *wholes: Tensor) -> Tensor:
        t = tensors_of(wholes, places)
        out = like_tokens(t["v"])
        launch, logs = forward_launch(t, options, out)
        run(launch)
        ctx.options, ctx.places = options, places
        ctx.save_for_backward(*wholes, None if logs is None else out, logs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        *wholes, out, logs = ctx.saved_tensors
        t = tensors_of(wholes, ctx.places)
        grad = with_token_stride(grad, grad.size(0), grad.size(1), t["v"].dtype)
        grads = new_gradients(wholes, ctx.places, ctx.needs_input_grad[2:])
        d = gradients_of(grads, ctx.places)
        for launch in backward_launches(t, ctx.options, d, out, logs, grad, wholes, ctx.places):
            run(launch)
        return (None, None, *grads)


class Sums:
    """Memory of a kernel that sums over groups of sentences, in fp32.

    Args:
        t, d: tensors and gradients, by name.
        names: of the gradients (groups, H, ...) that the kernel sums.
        rows: summands whose weights' gradients, (parts, H), it sums.
        like: (B, H, T, d_h).
        tiles: of a head.
    """

    def __init__(
        self, t: Tensors, d: Tensors, names: Sequence[str], rows: Sequence[str], like: Tensor, tiles: int = 1
    ) -> None:
        bsz, heads, length, _ = like.size()
        wanted = PROGRAMS if length > 32 else 2 * PROGRAMS  # programs for tiles of 32 x 32 are small
        names = [name for name in names if name in d]
        self.is_wanted = bool(names or rows)
        groups = min(bsz, max(1, -(-wanted // (heads * tiles))))
        self.sentences, self.groups = shared_out(bsz, groups if self.is_wanted else bsz)
        # each begins at a multiple of 16 bytes, which is a property that kernels are compiled for
        numbers = [heads * length**2 if name == "r" else t[name].numel() for name in names]
        widths = [-(-number // 4) * 4 for number in numbers]
        self.size, self.parts = sum(widths), self.groups * tiles
        self.places: Tensors = {}
        if names:
            buffer = like.new_empty(self.groups, self.size, dtype=torch.float32)
            self.places.update(zip(names, buffer.split(widths, dim=1)))
        self.places.update(new_parts(rows, self.parts, like))


def new_parts(rows: Sequence[str], parts: int, like: Tensor) -> Tensors:
    """Memory for parts of the gradients of weights, (parts, H) each."""
    return {f"a_{name}": like.new_empty(parts, like.size(1), dtype=torch.float32) for name in rows}


def shared_out(bsz: int, groups: int) -> Tuple[int, int]:
    """Sentences in a group, and groups, none of which is empty."""
    sentences = -(-bsz // groups)
    return sentences, -(-bsz // sentences)


def width_of(t: Tensors) -> int:
    """Features of the widest product."""
    return max(t[name].size(3) for name in ("v", "q", "x") if t[name] is not None)


def is_short(t: Tensors) -> bool:
    """Whether `triton_short` holds its tiles in registers: see `test_resources` in the tests."""
    length = t["v"].size(2)
    summands = [name for name in ("q", "x", "left", "r") if t[name] is not None]
    is_narrow = width_of(t) <= 64
    if length <= 32:
        return len(summands) <= 3 and (is_narrow or summands in (["q"], ["x"], ["r"]))
    return length <= 64 and is_narrow and summands in (["q"], ["x"], ["r"])


def forward_launch(t: Tensors, options: Options, out: Tensor) -> Tuple[Launch, Optional[Tensor]]:
    """The launch that writes the output, (B, H, T, d_h), and what it writes for the backward pass."""
    bsz, heads, length, _ = out.size()
    if is_short(t):
        from . import triton_short

        sentences, groups = shared_out(bsz, min(bsz, -(-4 * PROGRAMS // heads)))
        tile = Tile.whole(t)
        given, numbers, constants = arguments(t, options, tile, [])
        return tile.launch(triton_short.forward, (heads, groups), given, out, *numbers, sentences, constants), None
    from . import triton_long

    tile = Tile.of("forward", t)
    logs = out.new_empty(bsz, heads, length, dtype=torch.float32)
    given, numbers, constants = arguments(t, options, tile, [])
    grid = (bsz * heads * tile.down(length),)
    return tile.launch(triton_long.forward, grid, given, out, logs, *numbers, constants), logs


def backward_launches(
    t: Tensors,
    options: Options,
    d: Tensors,
    out: Any,
    logs: Optional[Tensor],
    grad: Tensor,
    wholes: Sequence[Tensor],
    places: Dict[str, Place],
) -> List[Launch]:
    """The launches of the backward pass, which write the gradients d."""
    from .triton_common import Gradients

    bsz, heads, length, _ = grad.size()
    written: Tensors = {}

    def weighted_by(*names: str) -> List[str]:
        return [name for name in names if name in options.rows and "weights" in d]

    def gradients(names: Sequence[str], more: Tensors) -> Gradients:
        written.update(more)
        found = {**{name: d[name] for name in names if name in d}, **more}
        return Gradients(**{name: found.get(name) for name in Gradients._fields})

    strides = (token_stride(grad), grad.stride(1))
    launches: List[Launch] = []
    if logs is None:
        from . import triton_short

        tile = Tile.whole(t)
        columns = matrix = Sums(t, d, SHARED, weighted_by("q", "x", "outer", "c", "r"), grad)
        given, numbers, constants = arguments(t, options, tile, [grad])
        args = (given, gradients(BY_SENTENCE, columns.places), columns.size, grad, *strides, *numbers)
        grid = (heads, columns.groups)
        launches.append(tile.launch(triton_short.backward, grid, *args, columns.sentences, constants))
        parts = columns.parts
    else:
        from . import triton_long

        of_rows, rows = ("q", "x", "left", "right"), weighted_by("q", "x", "outer")
        tile = Tile.of("rows", t)
        parts = bsz * tile.down(length)
        if rows or set(of_rows) & set(d):
            given, numbers, constants = arguments(t, options, tile, [grad])
            args = (given, gradients(of_rows, new_parts(rows, parts, grad)), out, logs, grad, *strides, *numbers)
            launches.append(tile.launch(triton_long.backward_rows, (parts * heads,), *args, constants))
        tile = Tile.of("columns", t)
        columns = Sums(t, d, ("w", "c"), weighted_by("c"), grad, tile.across(length))
        if columns.is_wanted or "v" in d or "k" in d:
            given, numbers, constants = arguments(t, options, tile, [grad])
            args = (given, gradients(("v", "k"), columns.places), columns.size, out, logs, grad, *strides, *numbers)
            blocks = (columns.parts * heads,)
            launches.append(tile.launch(triton_long.backward_columns, blocks, *args, columns.sentences, constants))
        tile = Tile.of("matrix", t)
        matrix = Sums(t, d, ("r",), weighted_by("r"), grad, tile.down(length) * tile.across(length))
        if matrix.is_wanted:
            given, numbers, constants = arguments(t, options, tile, [grad])
            args = (given, gradients((), matrix.places), matrix.size, out, logs, grad, *strides, *numbers)
            blocks = (matrix.parts * heads,)
            launches.append(tile.launch(triton_long.backward_matrix, blocks, *args, matrix.sentences, constants))
    if written:
        own = {name: own_size(t[name], wholes[places[name].whole]) for name in SHARED if name in places}
        sizes = {name: size or tuple(t[name].size()[2:]) for name, size in own.items()}
        counts = (parts, columns.parts, matrix.parts)
        groups = (columns.groups, columns.size, matrix.groups, matrix.size)
        launches.append(addition(d, gradients((), written), sizes, heads, length, groups, counts, constants))
    return launches


def addition(
    d: Tensors,
    at: Any,
    sizes: Dict[str, Tuple[int, ...]],
    heads: int,
    length: int,
    groups: Tuple[int, int, int, int],
    counts: Tuple[int, int, int],
    constants: Any,
) -> Launch:
    """The launch that adds up sums over groups, and parts of weights' gradients."""
    from .triton_sums import Totals, add

    block, groups_at_once = 256, 16
    to = Totals(*(d.get(name) for name in Totals._fields))
    of_block = {"w": block, "c": block, "r": groups_at_once if constants.DIAGONALS.value else block}
    blocks = sum(-(-heads * math.prod(sizes[name]) // of_block[name]) for name in SHARED if name in d)
    if to.weights is not None:
        blocks += to.weights.numel() // heads
    own = [n for name in SHARED for n in sizes.get(name, (1, 1))]
    args = (to, at, heads, length, *groups, *own, *counts, constants, power_of_2(heads), block, groups_at_once)
    return Launch(add, (blocks,), args, 4, 1)


class Tile(NamedTuple):
    """A program's tile, and its warps: as large as registers allow, which `test_resources` in the tests finds out."""

    rows: int
    columns: int
    warps: int
    stages: int

    @staticmethod
    def whole(t: Tensors) -> "Tile":
        """All rows and columns of a short sentence."""
        size = power_of_2(t["v"].size(2))
        warps = 8 if size > 32 or width_of(t) > 64 or t["left"] is not None else 4
        return Tile(size, size, warps, 1)

    @staticmethod
    def of(kernel: str, t: Tensors) -> "Tile":
        """Of a kernel of `triton_long`."""
        summands = sum(t[name] is not None for name in ("q", "x", "left", "r"))
        is_older = capability_of(t["v"].device) < (9, 0)  # their products of tiles hold more in registers
        rows, columns = 64, 64
        if summands > 2 and t["left"] is not None:
            rows, columns = 16, 16
        elif kernel == "matrix" and t["x"] is not None and width_of(t) > 64:
            rows, columns = 16, 32
        elif summands > 2 or t["left"] is not None or width_of(t) > 64:
            rows, columns = 32, 32
        elif is_older and kernel != "forward" and (summands > 1 or t["x"] is not None):
            rows, columns = 32, 32
        elif kernel == "columns" and t["x"] is not None:
            rows, columns = 32, 64
        elif t["q"] is not None and t["x"] is not None and (is_older or kernel == "rows"):
            rows, columns = 64, 32
        size = power_of_2(t["v"].size(2))
        return Tile(min(rows, size), min(columns, size), 8, 1)

    def down(self, length: int) -> int:
        """Tiles that hold so many rows."""
        return -(-length // self.rows)

    def across(self, length: int) -> int:
        """Tiles that hold so many columns."""
        return -(-length // self.columns)

    def launch(self, kernel: Any, grid: Tuple[int, ...], *args: Any) -> Launch:
        return Launch(kernel, grid, args, self.warps, self.stages)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, and at least 16, as the products of tiles ask for."""
    return 1 << max(4, (n - 1).bit_length())


def arguments(t: Tensors, options: Options, tile: Tile, more: List[Tensor]) -> Tuple[Any, List[Any], Any]:
    """What every kernel takes: tensors, numbers, and constants. `more` tensors are also read in rows."""
    from .triton_common import Constants, Given

    bsz, heads, length, width = t["v"].size()
    strides: List[Any] = []
    for name in BY_SENTENCE:
        x = t[name]
        strides += [0, 0] if x is None else [token_stride(x), x.stride(1)]
    w, c, r, right = t["w"], t["c"], t["r"], t["right"]
    w_head = 0 if w is None else w.stride(1)
    c_head = 0 if c is None else c.stride(1)
    r_row, r_head = (0, 0) if r is None else (r.stride(2), r.stride(1))
    if options.diagonals:
        r_row = r.size(3) // 2
    q_width, x_width = (16 if t[name] is None else t[name].size(3) for name in ("q", "x"))
    columns = 1 if right is None else right.size(3)
    numbers = [*strides, w_head, c_head, r_row, r_head, length, bsz, heads, columns, options.scale]
    numbers.append(options.dropout)
    units = [*strides[:8], w_head, width, q_width, x_width]
    units += [n for x in more for n in (token_stride(x), x.stride(1))]
    is_exact = t["v"].dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    constants = Constants(
        D=width,
        D_BLOCK=power_of_2(width),
        Q=q_width,
        Q_BLOCK=power_of_2(q_width),
        X=x_width,
        X_BLOCK=power_of_2(x_width),
        FACTOR=16 if right is None else power_of_2(max(columns, -(-length // columns))),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        UNIT=1 if any(n % 8 for n in units) else 8,
        CAUSAL=options.causal,
        DIAGONALS=options.diagonals,
        PRECISION="ieee" if is_exact else "tf32",
        **{f"A_{name.upper()}": options.rows.get(name, -1) for name in ("q", "x", "outer", "c", "r")},
    )
    given = Given(**{name: t[name] for name in NAMES}, hidden=options.hidden, seed=options.seed)
    return given, numbers, compiled_for(constants)


@lru_cache(maxsize=None)
def compiled_for(constants: Any) -> Any:
    """The `Constants` in Triton's form, which takes a while to make; there are few, or kernels would be many."""
    from triton import language

    return type(constants)(*map(language.constexpr, constants))
