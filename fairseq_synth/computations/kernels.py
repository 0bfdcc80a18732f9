"""softmax(S) V on a GPU by Triton kernels: neither logits nor weights leave the registers, in either pass.

Off unless the environment variable FAIRSEQ_SYNTH_KERNELS is 1, as they have not been measured on a GPU. The kernels
are in `triton_short` and `triton_long`, their formula in `triton_common`. This file says what they support, and calls
them.
"""

import logging
import os
from functools import lru_cache
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..logits import Logits, weighted
from ..masks import is_causal

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)  # in fp32, products without tensor cores take too many registers
VARIABLE = "FAIRSEQ_SYNTH_KERNELS"
TRITON = (3, 4)  # the oldest release whose kernels take tuples
CAPABILITY = (8, 0)
WIDEST = 128  # features of a head
PROGRAMS = 264  # that a backward pass aims at: two for each of an H100's 132 multiprocessors
NAMES = ("v", "q", "k", "x", "w", "c", "left", "right", "r", "weight")  # of the tensors, as in `triton_common`
BY_SENTENCE = ("v", "q", "k", "x", "left", "right")
Product = Tuple[Optional[Tensor], float, Tensor, Tensor]  # as of `Logits`
Tensors = Dict[str, Any]  # by name; None where there is no such summand

WORKING: Set[Tuple[Any, ...]] = set()  # kinds of calls whose kernels have been compiled
FAILED: Set[Tuple[Any, ...]] = set()  # kinds that another computation takes


class Parts(NamedTuple):
    """The summands of the logits, by what the kernels have for them."""

    own: List[Product]  # products whose factors both differ by sentence, at most one
    half: List[Product]  # products with a shared key, at most one
    outer: List[Tuple[Optional[Tensor], Tensor, Tensor]]  # at most one
    columns: Logits  # shared rows, which are added up
    matrices: Logits  # shared matrices and products of shared factors, which are added up


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
    parts = PARTS[logits] = parts_of(logits, value.size(0))
    if value.numel() == 0 or parts is None:
        return False
    if parts.own and len(logits.products) == 1 and not logits.outers and not logits.biases:
        return False  # `vanilla` alone: torch's fused attention
    width = max([value.size(3)] + [query.size(3) for _, _, query, _ in parts.own + parts.half])
    summands = len(logits.products) + len(logits.outers) + len(parts.matrices.biases)
    return width <= 64 or (width <= WIDEST and summands <= 2)


def is_eager(x: Tensor) -> bool:
    """Whether x has values, and torch does not record what becomes of them."""
    return type(x) is Tensor and not torch.jit.is_tracing() and not torch.compiler.is_compiling()


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


def parts_of(logits: Logits, bsz: int) -> Optional[Parts]:
    """The summands in the kernels' places; None where they have no place for one of them."""

    def is_shared(x: Tensor) -> bool:
        return x.size(0) < bsz or bsz == 1

    parts = Parts([], [], list(logits.outers), Logits([], [], []), Logits([], [], []))
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
    if max(len(parts.own), len(parts.half), len(parts.outer)) > 1:
        return None
    return parts


def kind_of(
    parts: Parts, value: Tensor, key_padding_mask: Optional[Tensor], attn_mask: Optional[Tensor], dropout: float
) -> Tuple[Any, ...]:
    """What calls have in common that have the same compiled kernels; some calls of a kind have others."""
    counts = (len(parts.own), len(parts.half), len(parts.outer), bool(parts.columns.biases))
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
    parts = PARTS[logits] if logits in PARTS else parts_of(logits, bsz)
    assert parts is not None
    kind = kind_of(parts, value, key_padding_mask, attn_mask, dropout)
    if kind in FAILED:
        return by_another(logits, value, key_padding_mask, attn_mask, dropout)
    tensors: Tensors = dict.fromkeys(NAMES)
    tensors["v"] = value
    for names, products in ((("q", "k"), parts.own), (("x", "w"), parts.half)):
        for weight, scale, query, key in products:
            tensors.update(zip(names, weighted(weight, query, key, scale)))
    for weight, left, right in parts.outer:
        tensors.update(zip(("left", "right"), weighted(weight, left, right)))
    for name in BY_SENTENCE:
        tensors[name] = with_token_stride(tensors[name], bsz, heads, value.dtype)
    if parts.columns.biases:
        tensors["c"] = parts.columns.total(length)
    if len(parts.matrices.biases) == 1 and not parts.matrices.products:
        tensors["weight"], tensors["r"] = parts.matrices.biases[0]
    elif parts.matrices.tensors():
        tensors["r"] = parts.matrices.total(length)
    left, right = tensors["left"], tensors["right"]
    if left is not None and right is not None:
        tensors["left"] = left[..., : -(-length // right.size(3))]
    for name in NAMES:
        if name not in BY_SENTENCE:
            tensors[name] = of_all_heads(tensors[name], heads, is_whole=name in ("w", "weight"))
    hidden = None
    if key_padding_mask is not None:
        hidden = key_padding_mask.to(torch.bool).contiguous().view(torch.uint8)
    seed = torch.randint(1 << 62, (1,), device=value.device) if dropout > 0 else None
    options = Options(hidden, seed, dropout, is_causal(attn_mask))
    if kind not in WORKING and not is_interpreted():
        try:
            load(tensors, options)
        except Exception as error:  # of many classes: of the compiler, the assembler and the GPU's driver
            FAILED.add(kind)
            logger.warning(f"{VARIABLE}: another computation is used for a call, as its kernel failed: {error!r:.1000}")
            return by_another(logits, value, key_padding_mask, attn_mask, dropout)
        WORKING.add(kind)
    out: Tensor = _Kernels.apply(options, *tensors.values())
    return out


def by_another(*call: Any) -> Tensor:
    """The result of another computation."""
    from . import COMPUTATIONS

    found = next(each for each in COMPUTATIONS if each.__name__ != __name__ and each.supports(*call))
    return found.compute(*call)


def with_token_stride(x: Any, bsz: int, heads: int, dtype: torch.dtype) -> Any:
    """x (B or 1, H or 1, T, r) for all sentences and heads, such that token t of sentence b is t B + b strides away.

    Projections leave it so; otherwise it is a copy.
    """
    if x is None:
        return None
    x = x.to(dtype).expand(bsz, heads, -1, -1)
    fits = (x.stride(3) == 1 or x.size(3) == 1) and (x.size(2) == 1 or bsz == 1 or x.stride(2) == bsz * x.stride(0))
    return x if fits else x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def of_all_heads(x: Optional[Tensor], heads: int, is_whole: bool) -> Optional[Tensor]:
    """x, (1, H or 1, rows, n), for all heads, with neighbours in a row, or in a whole head, side by side in memory."""
    if x is None:
        return None
    x = x.expand(-1, heads, -1, -1)
    if is_whole:
        return x if x[0, 0].is_contiguous() and (x.size(3) > 1 or x.is_contiguous()) else x.contiguous()
    return x if x.stride(3) == 1 or x.size(3) == 1 else x.contiguous()


class Options(NamedTuple):
    """What a call has beside its differentiable tensors."""

    hidden: Optional[Tensor]
    seed: Optional[Tensor]
    dropout: float
    causal: bool


class Launch(NamedTuple):
    """A call of a kernel."""

    kernel: Any
    grid: Tuple[int, ...]
    args: Tuple[Any, ...]
    num_warps: int
    num_stages: int


def load(t: Tensors, options: Options) -> None:
    """Compiles the kernels of a call, for both passes, and loads them; raises what the compiler or the GPU does."""
    out = like_tokens(t["v"])
    wanted = [name for name, x in t.items() if x is not None and x.requires_grad]
    launch, logs = forward_launch(t, options, out)
    launches, _, _ = backward_launches(t, options, wanted, out, logs, out)
    for each in (launch, *launches):
        kernel = each.kernel.warmup(*each.args, grid=each.grid, num_warps=each.num_warps, num_stages=each.num_stages)
        kernel[each.grid]  # loads it


def run(launch: Launch) -> None:
    """Calls the kernel."""
    launch.kernel[launch.grid](*launch.args, num_warps=launch.num_warps, num_stages=launch.num_stages)


class _Kernels(torch.autograd.Function):
    """Saves its inputs; for long sentences its output too, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, options: Options, *tensors: Optional[Tensor]) -> Tensor:
        t = dict(zip(NAMES, tensors))
        out = like_tokens(t["v"])
        launch, logs = forward_launch(t, options, out)
        run(launch)
        ctx.options = options
        ctx.save_for_backward(*tensors, None if logs is None else out, logs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        *tensors, out, logs = ctx.saved_tensors
        t = dict(zip(NAMES, tensors))
        grad = with_token_stride(grad, grad.size(0), grad.size(1), t["v"].dtype)
        wanted = [name for name, needed in zip(NAMES, ctx.needs_input_grad[1:]) if needed]
        launches, grads, sums = backward_launches(t, ctx.options, wanted, out, logs, grad)
        for launch in launches:
            run(launch)
        for each in sums:
            grads.update(each.added())
        return (None, *(grads.get(name) for name in NAMES))


class Sums:
    """Gradients of tensors that a batch shares, of each group of sentences, in one buffer of fp32.

    Args:
        tensors: those that have a gradient.
        programs: of a group.
        parts: a gradient is the sum of so many, side by side in the buffer; 1 if it is not named.
    """

    def __init__(self, tensors: Tensors, like: Tensor, programs: int, **parts: int) -> None:
        self.tensors, self.parts = tensors, parts
        wanted = PROGRAMS if like.size(2) > 32 else 2 * PROGRAMS  # programs for tiles of 32 x 32 are small
        groups = min(like.size(0), max(1, -(-wanted // programs)))
        self.sentences, self.groups = shared_out(like.size(0), groups if tensors else like.size(0))
        # each begins at a multiple of 16 bytes, which is a property that kernels are compiled for
        self.widths = [-(-x.numel() * parts.get(name, 1) // 4) * 4 for name, x in tensors.items()]
        self.size = sum(self.widths)
        self.buffer = like.new_empty(self.groups if tensors else 0, self.size, dtype=torch.float32)
        self.places = dict(zip(tensors, self.buffer.split(self.widths, dim=1))) if tensors else {}

    def added(self) -> Tensors:
        """The gradients, of the shapes and types of the tensors."""
        if not self.tensors:
            return {}
        total = self.buffer.sum(0) if self.groups > 1 else self.buffer[0]
        kinds = {x.dtype for x in self.tensors.values()}
        if len(kinds) == 1 and not self.parts:
            total = total.to(kinds.pop())
        found: Tensors = {}
        for (name, x), part in zip(self.tensors.items(), total.split(self.widths)):
            number = self.parts.get(name, 1)
            part = part[: number * x.numel()].view(number, *x.size()[1:])
            found[name] = (part.sum(0, keepdim=True) if number > 1 else part).to(x.dtype)
        return found


def shared_out(bsz: int, groups: int) -> Tuple[int, int]:
    """Sentences in a group, and groups, none of which is empty."""
    sentences = -(-bsz // groups)
    return sentences, -(-bsz // sentences)


def like_tokens(x: Any) -> Tensor:
    """A new tensor like x, (B, H, T, r), in memory (T, B, H, r)."""
    bsz, heads, length, width = x.size()
    out: Tensor = x.new_empty(length, bsz, heads, width).permute(1, 2, 0, 3)
    return out


def token_stride(x: Tensor) -> int:
    """Between token t B + b and the next in x, (B, H, T, r), as `with_token_stride` leaves it."""
    return x.stride(0) if x.size(0) > 1 else x.stride(2)


def width_of(t: Tensors) -> int:
    """Features of the widest product."""
    return max(t[name].size(3) for name in ("v", "q", "x") if t[name] is not None)


def is_short(t: Tensors) -> bool:
    """Whether `triton_short` holds its tiles in registers: see `test_resources` in the tests."""
    length = t["v"].size(2)
    summands = [name for name in ("q", "x", "left", "r") if t[name] is not None]
    if length <= 32:
        return len(summands) <= 3 and (width_of(t) <= 64 or len(summands) == 1)
    newest = capability_of(t["v"].device) >= (9, 0) and summands != ["x", "r"] and "left" not in summands
    return length <= 64 and width_of(t) <= 64 and len(summands) <= (2 if newest else 1)


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
    t: Tensors, options: Options, wanted: List[str], out: Any, logs: Optional[Tensor], grad: Tensor
) -> Tuple[List[Launch], Tensors, List[Sums]]:
    """The launches of the backward pass, the gradients they write, and the sums that remain to be added."""
    from .triton_common import Gradients

    bsz, heads, length, _ = grad.size()
    grads = {name: like_tokens(t[name]) for name in wanted if name in BY_SENTENCE}

    def shared(*names: str) -> Tensors:
        return {name: t[name] for name in names if name in wanted}

    def places(names: Sequence[str], sums: Optional[Sums] = None) -> Gradients:
        written = {**{name: x for name, x in grads.items() if name in names}, **(sums.places if sums else {})}
        return Gradients(**{name: written.get(name) for name in Gradients._fields})

    strides = (token_stride(grad), grad.stride(1))
    if logs is None:
        from . import triton_short

        tile = Tile.whole(t)
        sums = Sums(shared("w", "c", "r", "weight"), grad, heads)
        given, numbers, constants = arguments(t, options, tile, [grad])
        args = (given, places(BY_SENTENCE, sums), sums.size, grad, *strides, *numbers, sums.sentences, constants)
        return [tile.launch(triton_short.backward, (heads, sums.groups), *args)], grads, [sums]
    from . import triton_long

    launches: List[Launch] = []
    of_rows, of_columns = ("q", "x", "left", "right"), ("v", "k")
    if set(of_rows) & set(grads):
        tile = Tile.of("rows", t)
        given, numbers, constants = arguments(t, options, tile, [grad])
        args = (given, places(of_rows), out, logs, grad, *strides, *numbers, constants)
        launches.append(tile.launch(triton_long.backward_rows, (bsz * heads * tile.down(length),), *args))
    tile = Tile.of("columns", t)
    columns = Sums(shared("w", "c"), grad, heads * tile.across(length))
    if columns.tensors or set(of_columns) & set(grads):
        given, numbers, constants = arguments(t, options, tile, [grad])
        args = (given, places(of_columns, columns), columns.size, out, logs, grad, *strides, *numbers)
        grid = (columns.groups * heads * tile.across(length),)
        launches.append(tile.launch(triton_long.backward_columns, grid, *args, columns.sentences, constants))
    tile = Tile.of("matrix", t)
    tiles = tile.down(length) * tile.across(length)
    matrix = Sums(shared("r", "weight"), grad, heads * tiles, weight=tiles)
    if matrix.tensors:
        given, numbers, constants = arguments(t, options, tile, [grad])
        args = (given, places((), matrix), matrix.size, out, logs, grad, *strides, *numbers, matrix.sentences)
        grid = (matrix.groups * heads * tiles,)
        launches.append(tile.launch(triton_long.backward_matrix, grid, *args, constants))
    return launches, grads, [columns, matrix]


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
        elif summands > 2 or t["left"] is not None or width_of(t) > 64:
            rows, columns = 32, 32
        elif is_older and kernel != "forward" and (summands > 1 or t["x"] is not None):
            rows, columns = 32, 32
        elif kernel == "columns" and t["x"] is not None:
            rows, columns = 32, 64
        size = power_of_2(t["v"].size(2))
        return Tile(min(rows, size), min(columns, size), 8 if rows > 16 else 4, 1)

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
    from triton import language

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
    q_width, x_width = (16 if t[name] is None else t[name].size(3) for name in ("q", "x"))
    columns = 1 if right is None else right.size(3)
    numbers = [*strides, w_head, c_head, r_row, r_head, length, bsz, heads, columns, options.dropout]
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
        PRECISION="ieee" if is_exact else "tf32",
    )
    given = Given(**{name: t[name] for name in NAMES}, hidden=options.hidden, seed=options.seed)
    return given, numbers, Constants(*map(language.constexpr, constants))
