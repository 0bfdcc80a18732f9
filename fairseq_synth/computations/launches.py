"""The launches of the Triton kernels for a call: their tiles, numbers and memory, by how its tensors lie.

A launch has names in the place of tensors, so that it serves every call whose tensors lie alike.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .memory import BY_SENTENCE, NAMES, SHARED, Place, Tensors, own_size, token_stride

MOST_SPILLS = 100  # registers of a thread that may lie in memory: up to so many, more warps were slower on an H100
MOST_WARPS = 8
PROGRAMS = 264  # that a backward pass aims at: two for each of an H100's 132 multiprocessors


class Options(NamedTuple):
    """What a call has beside its differentiable tensors."""

    has_hidden: bool  # a padding mask
    dropout: float
    causal: bool
    scale: float  # of the product q k^T
    rows: Dict[str, int]  # of each summand that has a weight, in `weights`
    diagonals: bool  # R is its values by distance, (1, H, 1, 2 m + 1)


@dataclass
class Launch:
    """A call of a kernel."""

    kernel: Any
    grid: Tuple[int, ...]
    tensors: Tuple[Any, ...]  # names of tensors, None, and tuples of those; they come first among the arguments
    numbers: Tuple[Any, ...]  # all other arguments
    num_warps: int
    num_stages: int = 1
    options: Optional[Dict[str, int]] = None  # of its compilation, once it has been compiled
    call: Optional[Callable[..., None]] = None  # the compiled kernel, on a GPU

    def args(self, tensors: Tensors) -> List[Any]:
        """The arguments, of tensors by name."""
        found: List[Any] = []
        for x in self.tensors:
            if x is None or type(x) is str:
                found.append(x and tensors[x])
            else:
                found.append(type(x)(*[name and tensors[name] for name in x]))
        return [*found, *self.numbers]

    def compile(self, args: Sequence[Any]) -> None:
        """Compiles and loads the kernel for such arguments; raises what the compiler or the GPU does.

        One that reads ahead, in stages, and asks for more shared memory than there is, reads less far ahead. One whose
        threads need many more registers than they have gets more warps, so that each thread needs fewer.
        """
        from triton.runtime.errors import OutOfResources

        warps, stages = self.num_warps, self.num_stages
        while True:
            self.options = dict(num_warps=warps, num_stages=stages)
            kernel = self.kernel.warmup(*args, grid=self.grid, **self.options)
            try:
                self.call = kernel[(*self.grid, 1, 1)[:3]]  # loads it
            except OutOfResources:
                if stages == 1:
                    raise
                stages -= 1
                continue
            if kernel.n_spills <= MOST_SPILLS or warps >= MOST_WARPS:
                return
            warps *= 2


class Scratch:
    """Memory in fp32 for sums of a backward pass: one tensor, in which each sum has a place."""

    def __init__(self) -> None:
        self.size = 0
        self.starts: Dict[str, int] = {}  # {name of a sum: where it begins}

    def share_out(self, numbers: Dict[str, int], groups: int) -> int:
        """Gives places to sums of so many numbers each, side by side in every group; the size of a group."""
        size = 0
        for name, number in numbers.items():
            self.starts[name] = self.size + size
            size += -(-number // 4) * 4  # a multiple of 16 bytes, which is a property that kernels are compiled for
        self.size += groups * size
        return size

    def tensors(self, like: Tensor) -> Tensors:
        """The sums, by name, each from where it begins: kernels know its size."""
        if not self.starts:
            return {}
        buffer = like.new_empty(self.size, dtype=torch.float32)
        return {name: buffer[start:] for name, start in self.starts.items()}


class Sums:
    """A kernel's sums over groups of sentences.

    Args:
        t: tensors, for their sizes.
        names: of the gradients (groups, H, ...) that the kernel sums.
        rows: summands whose weights' gradients, (parts, H), it sums.
        like: (B, H, T, d_h).
        tiles: of a head.
    """

    def __init__(
        self, t: Tensors, names: Sequence[str], rows: Sequence[str], like: Tensor, scratch: Scratch, tiles: int = 1
    ) -> None:
        bsz, heads, length, _ = like.size()
        wanted = PROGRAMS if length > 32 else 2 * PROGRAMS  # programs for tiles of 32 x 32 are small
        self.is_wanted = bool(names or rows)
        groups = min(bsz, max(1, wanted // (heads * tiles)))
        # for one number, the gradient of q k^T's weight, a program for each sentence is as good, and more of them run
        is_grouped = bool(names) or any(row != "q" for row in rows)
        self.sentences, self.groups = shared_out(bsz, groups if is_grouped else bsz)
        self.parts = self.groups * tiles
        numbers = {f"sum_{name}": heads * length**2 if name == "r" else t[name].numel() for name in names}
        self.size = scratch.share_out(numbers, self.groups)
        scratch.share_out({f"sum_a_{name}": self.parts * heads for name in rows}, 1)


def shared_out(bsz: int, groups: int) -> Tuple[int, int]:
    """Sentences in a group, and groups, none of which is empty."""
    sentences = -(-bsz // groups)
    return sentences, -(-bsz // sentences)


def width_of(t: Tensors) -> int:
    """Features of the widest product."""
    return max(t[name].size(3) for name in ("v", "q", "x") if t[name] is not None)


def is_padded(t: Tensors) -> bool:
    """Whether the widest product is padded to a power of two, which takes registers."""
    return width_of(t) < power_of_2(width_of(t))


def is_short(t: Tensors) -> bool:
    """Whether `triton_short` holds its tiles in registers: see `test_resources` in the tests."""
    length, found = t["v"].size(2), summands(t)
    is_narrow = width_of(t) <= 64
    if length <= 32:
        return len(found) <= 3 and (is_narrow or found in (["q"], ["x"], ["r"]))
    return length <= 64 and is_narrow and (found in (["q"], ["r"]) or found == ["x"] and not is_padded(t))


def summands(t: Tensors) -> List[str]:
    """The summands of the logits that take registers for a whole tile."""
    return [name for name in ("q", "x", "left", "r") if t[name] is not None]


def forward_launch(t: Tensors, options: Options) -> Launch:
    """The launch that writes ``out``, (B, H, T, d_h), and of long sentences ``logs``, (B, H, T), in fp32."""
    bsz, heads, length, _ = t["v"].size()
    if is_short(t):
        from . import triton_short

        sentences, groups = shared_out(bsz, min(bsz, -(-4 * PROGRAMS // heads)))
        tile = Tile.whole(t, is_forward=True)
        given, numbers, constants = arguments(t, options, tile, [])
        return tile.launch(triton_short.forward, (heads, groups), (given, "out"), *numbers, sentences, constants)
    from . import triton_long

    tile = Tile.of("forward", t)
    given, numbers, constants = arguments(t, options, tile, [])
    grid = (bsz * heads * tile.down(length),)
    return tile.launch(triton_long.forward, grid, (given, "out", "logs"), *numbers, constants)


def backward_launches(
    t: Tensors,
    options: Options,
    wanted: Sequence[str],
    is_long: bool,
    grad: Tensor,
    wholes: Sequence[Tensor],
    places: Dict[str, Place],
) -> Tuple[List[Launch], Scratch]:
    """The launches of the backward pass, and their memory for sums.

    Args:
        wanted: the tensors whose gradients are written; the gradient of ``q`` is named ``to_q``.
        is_long: whether the forward pass has written ``logs``.
        grad: of the output, (B, H, T, d_h); its name is ``grad``.
    """
    from .triton_common import Gradients

    bsz, heads, length, _ = grad.size()
    scratch = Scratch()
    launches: List[Launch] = []

    def weighted_by(*names: str) -> List[str]:
        return [name for name in names if name in options.rows and "weights" in wanted]

    def summed(*names: str) -> List[str]:
        return [name for name in names if name in wanted]

    def gradients(*names: str) -> Gradients:
        """Of tensors, those that are wanted; of sums, those that have a place."""
        found = {name: f"to_{name}" for name in names if name in wanted}
        found.update({name: f"sum_{name}" for name in names if f"sum_{name}" in scratch.starts})
        return Gradients(**{name: found.get(name) for name in Gradients._fields})

    def add(
        tile: Tile,
        kernel: Any,
        programs: Any,
        to: Gradients,
        read: Sequence[Optional[str]],
        more: Sequence[int] = (),
        last: Sequence[int] = (),
    ) -> None:
        given, numbers, constants = arguments(t, options, tile, [grad])
        numbers = [*more, token_stride(grad), grad.stride(1), *numbers, *last, constants]
        launches.append(tile.launch(kernel, programs, (given, to, *read, "grad"), *numbers))

    if not is_long:
        from . import triton_short

        tile = Tile.whole(t, is_forward=False)
        columns = matrix = Sums(t, summed(*SHARED), weighted_by("q", "x", "outer", "c", "r"), grad, scratch)
        to = gradients(*BY_SENTENCE, *SHARED, "a_q", "a_x", "a_outer", "a_c", "a_r")
        add(tile, triton_short.backward, (heads, columns.groups), to, [], [], [columns.sentences, columns.size])
        parts = columns.parts
    else:
        from . import triton_long

        of_rows, of_columns, of_matrix = (Tile.of(name, t) for name in ("rows", "columns", "matrix"))
        columns = Sums(t, summed("w", "c"), weighted_by("q", "x", "c"), grad, scratch, of_columns.across(length))
        tiles = of_matrix.down(length) * of_matrix.across(length)
        matrix = Sums(t, summed("r"), weighted_by("r"), grad, scratch, tiles)
        parts = bsz * of_rows.down(length)
        if weighted_by("outer"):
            scratch.share_out({"sum_a_outer": parts * heads}, 1)
        means = "means" if set(wanted) - {"v"} else None
        if means:
            scratch.share_out({means: bsz * heads * length}, 1)
            to = gradients("q", "x", "left", "right", "a_q", "a_x", "a_outer", "a_c", "a_r")
            add(of_rows, triton_long.backward_rows, (parts * heads,), to, ["out", means, "logs"])
        read = [means, "logs"]
        if columns.is_wanted or {"v", "k"} & set(wanted):
            to, programs = gradients("v", "k", "w", "c", "a_q", "a_x", "a_c"), (columns.parts * heads,)
            add(of_columns, triton_long.backward_columns, programs, to, read, [columns.size], [columns.sentences])
        if matrix.is_wanted:
            to, programs = gradients("r", "a_r"), (matrix.parts * heads,)
            add(of_matrix, triton_long.backward_matrix, programs, to, read, [matrix.size], [matrix.sentences])
    if scratch.starts.keys() - {"means"}:
        own = {name: own_size(t[name], wholes[places[name].whole]) for name in SHARED if name in places}
        sizes = {name: size or tuple(t[name].size()[2:]) for name, size in own.items()}
        counts = (parts, columns.parts, matrix.parts)
        groups = (columns.groups, columns.size, matrix.groups, matrix.size)
        rows_of_weights = t["weights"].numel() // heads if "weights" in wanted else 0
        at = gradients(*SHARED, "a_q", "a_x", "a_outer", "a_c", "a_r")
        constants = launches[-1].numbers[-1]
        launches.append(addition(wanted, at, sizes, heads, length, rows_of_weights, groups, counts, constants))
    return launches, scratch


def addition(
    wanted: Sequence[str],
    at: Any,
    sizes: Dict[str, Tuple[int, ...]],
    heads: int,
    length: int,
    rows_of_weights: int,
    groups: Tuple[int, int, int, int],
    counts: Tuple[int, int, int],
    constants: Any,
) -> Launch:
    """The launch that adds up sums over groups, and parts of weights' gradients."""
    from .triton_sums import Totals, add

    block, groups_at_once, distances = 256, 4, 16
    to = Totals(*(f"to_{name}" if name in wanted else None for name in Totals._fields))
    of_block = {"w": block, "c": block, "r": distances if constants.DIAGONALS.value else block}
    blocks = sum(-(-heads * math.prod(sizes[name]) // of_block[name]) for name in SHARED if name in wanted)
    own = [n for name in SHARED for n in sizes.get(name, (1, 1))]
    numbers = (heads, length, *groups, *own, *counts, constants, power_of_2(heads), block, groups_at_once, distances)
    return Launch(add, (blocks + rows_of_weights,), (to, at), numbers, 4)


class Tile(NamedTuple):
    """A program's tile, its warps, and how far ahead it reads, in stages.

    On an H100, in bf16 with 64 features in a head, within a tenth of the fastest of ten: see `docs/gpu-kernels.md`.
    """

    rows: int
    columns: int
    warps: int
    stages: int = 1

    @staticmethod
    def whole(t: Tensors, is_forward: bool) -> "Tile":
        """All rows and columns of a short sentence."""
        size = power_of_2(t["v"].size(2))
        if size > 32 or width_of(t) > 64:
            return Tile(size, size, 4)
        return Tile(size, size, 1 if is_forward and (len(summands(t)) > 1 or t["left"] is not None) else 2)

    @staticmethod
    def of(kernel: str, t: Tensors) -> "Tile":
        """Of a kernel of `triton_long`."""
        rows, columns, stages = {"rows": (64, 32, 3), "columns": (32, 64, 2)}.get(kernel, (64, 64, 2))
        if len(summands(t)) > 2:
            rows, columns = (32, 32) if t["left"] is None else (16, 16)
        elif kernel == "forward" and (t["x"] is not None or t["left"] is not None):
            rows, columns, stages = 64, 32, 3
        elif kernel == "columns" and t["x"] is not None:
            stages = 3
        elif kernel == "columns" and t["q"] is not None:
            rows = 64
        size = power_of_2(t["v"].size(2))
        return Tile(min(rows, size), min(columns, size), 4, stages)

    def down(self, length: int) -> int:
        """Tiles that hold so many rows."""
        return -(-length // self.rows)

    def across(self, length: int) -> int:
        """Tiles that hold so many columns."""
        return -(-length // self.columns)

    def launch(self, kernel: Any, grid: Tuple[int, ...], tensors: Tuple[Any, ...], *numbers: Any) -> Launch:
        return Launch(kernel, grid, tensors, numbers, self.warps, self.stages)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, and at least 16, as the products of tiles ask for."""
    return 1 << max(4, (n - 1).bit_length())


def arguments(t: Tensors, options: Options, tile: Tile, more: List[Tensor]) -> Tuple[Any, List[Any], Any]:
    """What every kernel takes: names of tensors, numbers, and constants. `more` tensors are also read in rows."""
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
    is_exact = t["v"].dtype == torch.float32
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
    names = {name: name for name in NAMES if t[name] is not None}
    names.update(
        {name: name for name, is_there in (("hidden", options.has_hidden), ("seed", options.dropout)) if is_there}
    )
    return Given(**{name: names.get(name) for name in Given._fields}), numbers, compiled_for(constants)


@lru_cache(maxsize=None)
def compiled_for(constants: Any) -> Any:
    """The `Constants` in Triton's form, which takes a while to make; there are few, or kernels would be many."""
    from triton import language

    return type(constants)(*map(language.constexpr, constants))
