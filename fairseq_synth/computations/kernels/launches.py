"""The launches of the Triton kernels for a call, from its sizes alone: their tiles, numbers and memory.

A launch has names in the place of tensors, so that it serves every call of the same sizes.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch

MAX_SPILLS = 100  # registers of a thread that may lie in memory: up to so many, more warps were slower on an H100
MAX_WARPS = 8
MAX_PLANS = 4096  # that are kept
PROGRAMS = 264  # that a backward pass aims at: two for each of an H100's 132 multiprocessors
NAMES = ("packed", "x", "w", "pair", "c", "r", "weights")  # of a call's tensors, as `kernels` describes them
SUMMANDS = ("q", "x", "outer", "c", "r")
BY_SENTENCE = ("v", "q", "k", "x", "left", "right")
SHARED = ("w", "c", "r")


class Layout(NamedTuple):
    """What the launches of a call depend on; `kernels` says how its tensors lie. A size of 0: no such summand."""

    device: torch.device
    dtypes: tuple[torch.dtype, ...]  # of the tensors, `packed` first
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
    rows: tuple[int, ...]  # of them, that of each of `SUMMANDS`; -1 for 1
    scale: float  # of the product of queries and keys
    has_hidden: bool  # a padding mask
    is_causal: bool
    dropout: float
    wanted: frozenset[str]  # the tensors that have a gradient

    def tiled(self) -> list[str]:
        """The summands of the logits that take registers for a whole tile."""
        found = (("q", self.Q), ("x", self.X), ("outer", self.right), ("r", self.r_columns))
        return [name for name, is_there in found if is_there]

    def is_short(self) -> bool:
        """Whether the kernels for short sentences hold its tiles in registers: see `test_resources` in the tests."""
        width, found = max(self.D, self.Q, self.X), self.tiled()
        if self.T <= 32:
            return len(found) <= 3 and (width <= 64 or found in (["q"], ["x"], ["r"]))
        is_padded = width < power_of_2(width)
        return self.T <= 64 and width <= 64 and (found in (["q"], ["r"]) or found == ["x"] and not is_padded)


class Launch:
    """A call of a kernel.

    Args:
        kernel, grid: of `triton_attention` or `triton_sums`, and numbers of programs.
        tensors: names of tensors, None, and tuples of those; they come first among the arguments.
        numbers: all other arguments.
        of: warps, and stages that it reads ahead, if more than one.
    """

    def __init__(
        self, kernel: Any, grid: Sequence[int], tensors: Sequence[Any], numbers: Sequence[Any], *of: int
    ) -> None:
        self.kernel, self.grid, self.numbers = kernel, (*grid, 1, 1)[:3], numbers
        self.options = dict(zip(("num_warps", "num_stages"), (*of, 1)))  # of the compilation
        self.readers: list[tuple[Any, Any]] = []  # of an argument: what makes it, and what reads the tensors for it
        for x in tensors:
            self.readers.append((type(x)._make, itemgetter(*x)) if isinstance(x, tuple) else (None, x))  # type: ignore
        self.call: Callable[..., None] | None = None  # the compiled kernel, on a GPU

    def args(self, tensors: dict[Any, Any]) -> list[Any]:
        """The arguments, of tensors by name; None has itself as a name."""
        found = [make(read(tensors)) if make is not None else tensors[read] for make, read in self.readers]
        found.extend(self.numbers)
        return found

    def compile(self, args: Sequence[Any]) -> None:
        """Compiles and loads the kernel for such arguments; raises what the compiler or the GPU does.

        One that reads ahead, in stages, and asks for more shared memory than there is, reads less far ahead. One whose
        threads need many more registers than they have gets more warps, so that each thread needs fewer.
        """
        from triton.runtime.errors import OutOfResources

        tried = dict(self.options)
        while True:
            kernel = self.kernel.warmup(*args, grid=self.grid, **tried)
            try:
                call = kernel[self.grid]  # loads it
            except OutOfResources:
                if tried["num_stages"] > 1:
                    tried["num_stages"] -= 1
                    continue
                if self.call is None:
                    raise
                return  # with fewer warps it fits
            self.call, self.options = call, dict(tried)
            if kernel.n_spills <= MAX_SPILLS or tried["num_warps"] >= MAX_WARPS:
                return
            tried["num_warps"] *= 2


class Plan:
    """The launches of a call, and the memory that they need for sums: of each, in fp32, so many numbers."""

    def __init__(self, a: Layout) -> None:
        from .triton_common import Given

        self.layout, self.is_loaded, self.is_long = a, False, not a.is_short()
        self.sums: dict[str, int] = {}
        packed, pair = "packed" if a.Q else None, "pair" if a.right else None
        sizes = (a.D, a.X, a.X, a.right, a.c_columns, a.r_columns, a.weights)
        self.names = [name for name, size in zip(NAMES, sizes) if size]  # of the tensors that there are
        self.to_names = [f"to_{name}" for name in self.names]  # their gradients
        found: dict[str, Any] = {name: name for name in self.names}
        found.update(hidden="hidden" if a.has_hidden else None, seed="seed" if a.dropout else None)
        found.update(v="packed", q=packed, k=packed, left=pair, right=pair)
        self.given = Given(*map(found.get, Given._fields))
        whole = (a.w_rows, a.c_columns, a.r_rows, a.r_columns)
        self.numbers = (a.T, a.B, a.H, a.left, a.right or 1, *whole, a.scale, a.dropout)
        self.forward = self.forward_of_long() if self.is_long else self.forward_of_short()
        self.backward: list[Launch] = []
        if a.wanted:
            totals, counts = self.add_backward_of_long() if self.is_long else self.add_backward_of_short()
            if self.sums.keys() - {"delta"}:
                self.backward.append(self.addition(totals, counts))

    def launch(self, kernel: str, tile: "Tile", grid: Sequence[int], tensors: Sequence[Any], *more: int) -> Launch:
        """Of a kernel of `triton_attention`, with the arguments that all of them take; `more`: further numbers."""
        from . import triton_attention

        numbers = (*self.numbers, *more, constants(self.layout, tile))
        return Launch(getattr(triton_attention, kernel), grid, (self.given, *tensors), numbers, tile.warps, tile.stages)

    def forward_of_short(self) -> Launch:
        """Writes ``out``, (T, B, H, d_h)."""
        a = self.layout
        sentences, groups = shared_out(a.B, min(a.B, up(4 * PROGRAMS, a.H)))
        return self.launch("forward_short", Tile.whole(a, True), (a.H, groups), ("out",), sentences)

    def forward_of_long(self) -> Launch:
        """Writes ``out`` and ``lse``, (B, H, T), in fp32."""
        a, tile = self.layout, Tile.of("forward", self.layout)
        return self.launch("forward", tile, (a.B * a.H * up(a.T, tile.rows),), ("out", "lse"))

    def add_backward_of_short(self) -> tuple[Sequence[int], Sequence[int]]:
        """Returns what `addition` takes."""
        a = self.layout
        sentences, size, groups = self.groups(1, self.summed(*SHARED), self.weighted(*SUMMANDS))
        tile, tensors = Tile.whole(a, False), (self.to(), "grad")
        self.backward.append(self.launch("backward_short", tile, (a.H, groups), tensors, sentences, size))
        return (groups, size, groups, size), (groups, groups, groups)

    def add_backward_of_long(self) -> tuple[Sequence[int], Sequence[int]]:
        """Returns what `addition` takes."""
        a = self.layout
        rows, columns, matrix = (Tile.of(name, a) for name in ("rows", "columns", "matrix"))
        across, tiles = up(a.T, columns.columns), up(a.T, matrix.rows) * up(a.T, matrix.columns)
        of_columns = self.summed("w", "c"), self.weighted("q", "x", "c")
        of_matrix = self.summed("r"), self.weighted("r")
        sentences, size, groups = self.groups(across, *of_columns)
        r_sentences, r_size, r_groups = self.groups(tiles, *of_matrix)
        parts = a.B * up(a.T, rows.rows)
        for name in self.weighted("outer"):
            self.reserve(f"sum_a_{name}", parts * a.H)
        delta = "delta" if a.wanted - {"packed"} or a.Q else None
        if delta is not None:
            self.reserve(delta, a.B * a.H * a.T)
            own = (self.to(), "out", delta, "lse", "grad")
            self.backward.append(self.launch("backward_rows", rows, (parts * a.H,), own))
        tensors = (self.to(), delta, "lse", "grad")
        if any(of_columns) or "packed" in a.wanted:
            grid = (groups * across * a.H,)
            self.backward.append(self.launch("backward_columns", columns, grid, tensors, sentences, size))
        if any(of_matrix):
            grid = (r_groups * tiles * a.H,)
            self.backward.append(self.launch("backward_matrix", matrix, grid, tensors, r_sentences, r_size))
        return (groups, size, r_groups, r_size), (parts, groups * across, r_groups * tiles)

    def addition(self, totals: Sequence[int], counts: Sequence[int]) -> Launch:
        """Adds up sums over groups, and parts of weights' gradients."""
        from .triton_sums import Totals, add

        a, block, groups_at_once, distances = self.layout, 256, 4, 16
        sizes = {"w": (a.w_rows, a.X), "c": (1, a.c_columns), "r": (a.r_rows, a.r_columns)}
        of_block = {"w": block, "c": block, "r": distances if a.is_by_distance else block}
        blocks = sum(up(a.H * math.prod(sizes[name]), of_block[name]) for name in self.summed(*SHARED))
        own = [n for name in SHARED for n in sizes[name]]
        to = Totals(*(f"to_{name}" if name in a.wanted else None for name in Totals._fields))
        z = self.backward[-1].numbers[-1]
        numbers = (a.H, a.T, *totals, *own, *counts, z, power_of_2(a.H), block, groups_at_once, distances)
        return Launch(add, (blocks + a.weights * ("weights" in a.wanted),), (to, self.to()), numbers, 4)

    def summed(self, *names: str) -> list[str]:
        """Those of the tensors whose gradients are sums over sentences that are wanted."""
        return [name for name in names if name in self.layout.wanted]

    def weighted(self, *names: str) -> list[str]:
        """Those of the summands whose weights' gradients are wanted."""
        a = self.layout
        return [name for name in names if "weights" in a.wanted and a.rows[SUMMANDS.index(name)] >= 0]

    def groups(self, tiles: int, names: Sequence[str], weights: Sequence[str]) -> tuple[int, int, int]:
        """Memory for a kernel's sums over groups of sentences: sentences and numbers of a group, and groups."""
        a = self.layout
        wanted = PROGRAMS if a.T > 32 else 2 * PROGRAMS  # programs for tiles of 32 x 32 are small
        # for one number, the gradient of q k^T's weight, a program for each sentence is as good, and more of them run
        is_grouped = bool(names) or any(name != "q" for name in weights)
        sentences, groups = shared_out(a.B, min(a.B, max(1, wanted // (a.H * tiles))) if is_grouped else a.B)
        sizes = {"w": a.T * a.X, "c": a.T, "r": a.T * a.T}
        for name in names:
            self.reserve(f"sum_{name}", a.H * sizes[name])
        # a group's sums lie side by side: the places of the first group's, and a group's size, say where others are
        size = sum(self.sums[f"sum_{name}"] for name in names)
        if names:
            self.sums[f"sum_{names[-1]}"] += (groups - 1) * size
        for name in weights:
            self.reserve(f"sum_a_{name}", groups * tiles * a.H)
        return sentences, size, groups

    def reserve(self, name: str, number: int) -> None:
        """Memory for so many numbers, and up to a multiple of 16 bytes, which is what kernels are compiled for."""
        self.sums[name] = up(number, 4) * 4

    def to(self) -> Any:
        """Where gradients go, or sums for them."""
        from .triton_common import Gradients

        given = self.given._asdict()
        found = {name: f"to_{given[name]}" for name in BY_SENTENCE if given[name] in self.layout.wanted}
        found.update({name[len("sum_") :]: name for name in self.sums if name != "delta"})
        return Gradients(*map(found.get, Gradients._fields))


plan_of = lru_cache(maxsize=MAX_PLANS)(Plan)  # for equal layouts the same one


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
        """Of a kernel for sentences of any length."""
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


def up(n: int, m: int) -> int:
    """n / m, rounded up."""
    return -(-n // m)


def shared_out(bsz: int, groups: int) -> tuple[int, int]:
    """Sentences in a group, and groups, none of which is empty."""
    sentences = up(bsz, groups)
    return sentences, up(bsz, sentences)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, and at least 16, as the products of tiles ask for."""
    return 1 << max(4, (n - 1).bit_length())


def constants(a: Layout, tile: Tile) -> Any:
    """What the kernels of a call are compiled for."""
    from .triton_common import Constants

    return compiled_for(
        Constants(
            D=a.D,
            D_BLOCK=power_of_2(a.D),
            Q=a.Q,
            Q_BLOCK=power_of_2(a.Q),
            X=a.X,
            X_BLOCK=power_of_2(a.X),
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


@cache
def compiled_for(constants: Any) -> Any:
    """The `Constants` in Triton's form, which takes a while to make; there are few, or kernels would be many."""
    from triton import language

    return type(constants)(*map(language.constexpr, constants))
