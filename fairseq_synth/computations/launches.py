"""The launches of the Triton kernels for a call, from its sizes alone: their tiles, numbers and memory.

A launch has names in the place of tensors, so that it serves every call of the same sizes.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

import torch

MOST_SPILLS = 100  # registers of a thread that may lie in memory: up to so many, more warps were slower on an H100
MOST_WARPS = 8
PROGRAMS = 264  # that a backward pass aims at: two for each of an H100's 132 multiprocessors
SUMMANDS = ("q", "x", "outer", "c", "r")
SHARED = ("w", "c", "r")


class Layout(NamedTuple):
    """What the launches of a call depend on; `kernels.Call` says how its tensors lie. A width of 0: no such summand."""

    device: torch.device
    dtypes: Tuple[torch.dtype, ...]  # of the tensors, values first
    T: int
    B: int
    H: int
    D: int  # features of a head: of its values,
    Q: int  # queries and keys,
    X: int  # shared keys and what multiplies them,
    left: int  # and of both factors of an outer product
    right: int
    w_rows: int  # of a head's whole shared keys
    c_columns: int
    r_rows: int
    r_columns: int
    is_by_distance: bool  # R is its values by distance, 2 m + 1 for each head
    weights: int  # rows of weights
    rows: Tuple[int, ...]  # of them, that of each of `SUMMANDS`; -1 for 1
    scale: float  # of the product of queries and keys
    has_hidden: bool  # a padding mask
    is_causal: bool
    dropout: float
    wanted: FrozenSet[str]  # the tensors that have a gradient

    def tiled(self) -> List[str]:
        """The summands of the logits that take registers for a whole tile."""
        found = (("q", self.Q), ("x", self.X), ("left", self.right), ("r", self.r_columns))
        return [name for name, is_there in found if is_there]

    def is_short(self) -> bool:
        """Whether `triton_short` holds its tiles in registers: see `test_resources` in the tests."""
        width, found = max(self.D, self.Q, self.X), self.tiled()
        if self.T <= 32:
            return len(found) <= 3 and (width <= 64 or found in (["q"], ["x"], ["r"]))
        is_padded = width < power_of_2(width)
        return self.T <= 64 and width <= 64 and (found in (["q"], ["r"]) or found == ["x"] and not is_padded)


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

    def args(self, tensors: Dict[str, Any]) -> List[Any]:
        """The arguments, of tensors by name."""
        found: List[Any] = []
        for x in self.tensors:
            found.append(tensors.get(x) if type(x) is str else x and type(x)(*map(tensors.get, x)))
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


class Plan:
    """The launches of a call, and how much memory they need for sums."""

    def __init__(self, a: Layout) -> None:
        self.layout, self.is_loaded, self.is_long = a, False, not a.is_short()
        self.starts: Dict[str, int] = {}  # of sums, in `scratch` numbers of fp32
        self.scratch = 0
        self.forward = self.forward_launch()
        self.backward: List[Launch] = []
        if a.wanted:
            self.add_backward_launches()

    def share_out(self, numbers: Dict[str, int], groups: int) -> int:
        """Gives places to sums of so many numbers each, side by side in every group; the size of a group."""
        size = 0
        for name, number in numbers.items():
            self.starts[name] = self.scratch + size
            size += up(number, 4) * 4  # a multiple of 16 bytes, which is a property that kernels are compiled for
        self.scratch += groups * size
        return size

    def sums(self, tiles: int, names: Sequence[str], weights: Sequence[str]) -> Tuple[int, int, int]:
        """Places for a kernel's sums over groups of sentences: sentences and numbers of a group, and groups."""
        a = self.layout
        wanted = PROGRAMS if a.T > 32 else 2 * PROGRAMS  # programs for tiles of 32 x 32 are small
        # for one number, the gradient of q k^T's weight, a program for each sentence is as good, and more of them run
        is_grouped = bool(names) or any(name != "q" for name in weights)
        sentences, groups = shared_out(a.B, min(a.B, max(1, wanted // (a.H * tiles))) if is_grouped else a.B)
        sizes = {"w": a.T * a.X, "c": a.T, "r": a.T * a.T}
        size = self.share_out({f"sum_{name}": a.H * sizes[name] for name in names}, groups)
        self.share_out({f"sum_a_{name}": groups * tiles * a.H for name in weights}, 1)
        return sentences, size, groups

    def forward_launch(self) -> Launch:
        """Writes ``out``, (T, B, H, d_h), and of long sentences ``logs``, (B, H, T), in fp32."""
        a, tensors = self.layout, self.layout and given(self.layout)
        if not self.is_long:
            from . import triton_short

            sentences, groups = shared_out(a.B, min(a.B, up(4 * PROGRAMS, a.H)))
            tile = Tile.whole(a, is_forward=True)
            more = (*numbers(a), sentences, constants(a, tile))
            return tile.launch(triton_short.forward, (a.H, groups), (tensors, "out"), more)
        from . import triton_long

        tile = Tile.of("forward", a)
        more = (*numbers(a), constants(a, tile))
        return tile.launch(triton_long.forward, (a.B * a.H * up(a.T, tile.rows),), (tensors, "out", "logs"), more)

    def add_backward_launches(self) -> None:
        from .triton_common import Gradients

        a, tensors = self.layout, given(self.layout)

        def summed(*names: str) -> List[str]:
            return [name for name in names if name in a.wanted]

        def weighted_by(*names: str) -> List[str]:
            return [name for name in names if a.rows[SUMMANDS.index(name)] >= 0] if "weights" in a.wanted else []

        def to(*names: str) -> Any:
            """Gradients of what differs by sentence, and the sums that have a place."""
            of = {"v": "packed", "q": "packed" if a.Q else "", "k": "packed" if a.Q else "", "left": "pair", "right": "pair"}
            found = {name: f"to_{name}" for name in names if of.get(name, name) in a.wanted}
            found.update({name: f"sum_{name}" for name in names if f"sum_{name}" in self.starts})
            return Gradients(**{name: found.get(name) for name in Gradients._fields})

        def add(tile: "Tile", kernel: Any, grid: Any, gradients: Any, read: Any = (), more: Any = (), last: Any = ()) -> None:
            own = (*more, *numbers(a), *last, constants(a, tile))
            self.backward.append(tile.launch(kernel, grid, (tensors, gradients, *read, "grad"), own))

        every = ("w", "c", "r", *(f"a_{name}" for name in SUMMANDS))
        if not self.is_long:
            from . import triton_short

            sentences, size, groups = self.sums(1, summed(*SHARED), weighted_by(*SUMMANDS))
            gradients = to("v", "q", "k", "x", "left", "right", *every)
            add(Tile.whole(a, False), triton_short.backward, (a.H, groups), gradients, (), (), (sentences, size))
            totals, counts = (groups, size, groups, size), (groups, groups, groups)
        else:
            from . import triton_long

            rows, columns, matrix = (Tile.of(name, a) for name in ("rows", "columns", "matrix"))
            across, tiles = up(a.T, columns.columns), up(a.T, matrix.rows) * up(a.T, matrix.columns)
            of_columns = summed("w", "c"), weighted_by("q", "x", "c")
            of_matrix = summed("r"), weighted_by("r")
            sentences, size, groups = self.sums(across, *of_columns)
            r_sentences, r_size, r_groups = self.sums(tiles, *of_matrix)
            parts = a.B * up(a.T, rows.rows)
            self.share_out({f"sum_a_{name}": parts * a.H for name in weighted_by("outer")}, 1)
            means = None
            if a.wanted - {"packed"} or "packed" in a.wanted and a.Q:
                means = "means"
                self.share_out({means: a.B * a.H * a.T}, 1)
                gradients = to("q", "x", "left", "right", *every[3:])
                add(rows, triton_long.backward_rows, (parts * a.H,), gradients, ("out", means, "logs"))
            if any(of_columns) or "packed" in a.wanted:
                gradients = to("v", "k", "w", "c", "a_q", "a_x", "a_c")
                grid = (groups * across * a.H,)
                add(columns, triton_long.backward_columns, grid, gradients, (means, "logs"), (size,), (sentences,))
            if any(of_matrix):
                grid = (r_groups * tiles * a.H,)
                add(matrix, triton_long.backward_matrix, grid, to("r", "a_r"), (means, "logs"), (r_size,), (r_sentences,))
            totals, counts = (groups, size, r_groups, r_size), (parts, groups * across, r_groups * tiles)
        if self.starts.keys() - {"means"}:
            self.backward.append(self.addition(to(*every), totals, counts, self.backward[-1].numbers[-1]))

    def addition(self, at: Any, totals: Sequence[int], counts: Sequence[int], z: Any) -> Launch:
        """Adds up sums over groups, and parts of weights' gradients."""
        from .triton_sums import Totals, add

        a, block, groups_at_once, distances = self.layout, 256, 4, 16
        sizes = {"w": (a.w_rows, a.X), "c": (1, a.c_columns), "r": (a.r_rows, a.r_columns)}
        of_block = {"w": block, "c": block, "r": distances if a.is_by_distance else block}
        blocks = sum(up(a.H * math.prod(sizes[name]), of_block[name]) for name in SHARED if name in a.wanted)
        if "weights" in a.wanted:
            blocks += a.weights
        own = [n for name in SHARED for n in (sizes[name] if math.prod(sizes[name]) else (1, 1))]
        to = Totals(*(f"to_{name}" if name in a.wanted else None for name in Totals._fields))
        more = (a.H, a.T, *totals, *own, *counts, z, power_of_2(a.H), block, groups_at_once, distances)
        return Launch(add, (blocks,), (to, at), more, 4)


@lru_cache(maxsize=4096)
def plan_of(a: Layout) -> Plan:
    return Plan(a)


class Tile(NamedTuple):
    """A program's tile, its warps, and how far ahead it reads, in stages.

    On an H100, in bf16 with 64 features in a head, within a tenth of the fastest of ten: see `docs/gpu-kernels.md`.
    """

    rows: int
    columns: int
    warps: int
    stages: int = 1

    @staticmethod
    def whole(a: Layout, is_forward: bool) -> "Tile":
        """All rows and columns of a short sentence."""
        size = power_of_2(a.T)
        if size > 32 or max(a.D, a.Q, a.X) > 64:
            return Tile(size, size, 4)
        return Tile(size, size, 1 if is_forward and (len(a.tiled()) > 1 or a.right) else 2)

    @staticmethod
    def of(kernel: str, a: Layout) -> "Tile":
        """Of a kernel of `triton_long`."""
        rows, columns, stages = {"rows": (64, 32, 3), "columns": (32, 64, 2)}.get(kernel, (64, 64, 2))
        if len(a.tiled()) > 2:
            rows, columns = (16, 16) if a.right else (32, 32)
        elif kernel == "forward" and (a.X or a.right):
            rows, columns, stages = 64, 32, 3
        elif kernel == "columns" and a.X:
            stages = 3
        elif kernel == "columns" and a.Q:
            rows = 64
        size = power_of_2(a.T)
        return Tile(min(rows, size), min(columns, size), 4, stages)

    def launch(self, kernel: Any, grid: Tuple[int, ...], tensors: Tuple[Any, ...], numbers: Tuple[Any, ...]) -> Launch:
        return Launch(kernel, grid, tensors, numbers, self.warps, self.stages)


def up(n: int, m: int) -> int:
    """n / m, rounded up."""
    return -(-n // m)


def shared_out(bsz: int, groups: int) -> Tuple[int, int]:
    """Sentences in a group, and groups, none of which is empty."""
    sentences = up(bsz, groups)
    return sentences, up(bsz, sentences)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, and at least 16, as the products of tiles ask for."""
    return 1 << max(4, (n - 1).bit_length())


def given(a: Layout) -> Any:
    """The names of the tensors that a call has."""
    from .triton_common import Given

    widths = {"q": a.Q, "k": a.Q, "x": a.X, "w": a.X, "c": a.c_columns, "left": a.right, "right": a.right}
    widths.update(v=1, r=a.r_columns, weights=a.weights, hidden=a.has_hidden, seed=int(a.dropout > 0))
    return Given(**{name: name if widths[name] else None for name in Given._fields})


def numbers(a: Layout) -> Tuple[Any, ...]:
    """What `triton_common.sizes` takes."""
    return (a.T, a.B, a.H, a.left, a.right or 1, a.w_rows, a.c_columns, a.r_rows, a.r_columns, a.scale, a.dropout)


def constants(a: Layout, tile: Tile) -> Any:
    """What the kernels of a call are compiled for."""
    from .triton_common import Constants

    q, x = a.Q or 16, a.X or 16
    return compiled_for(
        Constants(
            D=a.D,
            D_BLOCK=power_of_2(a.D),
            Q=q,
            Q_BLOCK=power_of_2(q),
            X=x,
            X_BLOCK=power_of_2(x),
            FACTOR=power_of_2(max(a.right, up(a.T, a.right))) if a.right else 16,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            UNIT=8 if not (a.D % 8 or a.Q % 8 or a.X % 8) else 1,
            CAUSAL=a.is_causal,
            DIAGONALS=a.is_by_distance,
            PRECISION="ieee" if a.dtypes[0] == torch.float32 else "tf32",
            **{f"A_{name.upper()}": row for name, row in zip(SUMMANDS, a.rows)},
        )
    )


@lru_cache(maxsize=None)
def compiled_for(constants: Any) -> Any:
    """The `Constants` in Triton's form, which takes a while to make; there are few, or kernels would be many."""
    from triton import language

    return type(constants)(*map(language.constexpr, constants))
