"""The launches of the Triton kernels for a call: their tiles, numbers and memory, which follow from its sizes alone.

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
ADDITION_BLOCK = 256  # numbers of a gradient that a program of the addition writes,
DISTANCES_BLOCK = 16  # or values by distance, each of which is the sum of a diagonal
GROUPS_AT_ONCE = 4  # that the addition reads
NAMES = ("packed", "x", "w", "pair", "c", "r", "weights")  # the tensors of a call, as `tensors` describes them
BY_SENTENCE = ("v", "q", "k", "x", "left", "right")  # gradients that each sentence has for itself
SHARED = ("w", "c", "r")  # gradients that are sums over the sentences


class WeightRows(NamedTuple):
    """The row of weights (M, H) that is the weight of each summand; -1 for a weight of 1."""

    q: int = -1  # the product of queries and keys
    x: int = -1  # the product with shared keys
    outer: int = -1
    c: int = -1
    r: int = -1


SUMMANDS = WeightRows._fields


class Layout(NamedTuple):
    """Everything that the launches of a call depend on. A size is 0 if there is no such summand."""

    device: torch.device
    dtypes: tuple[torch.dtype, ...]  # of the tensors, in the order of `NAMES`
    length: int  # tokens of each sentence, T
    bsz: int  # sentences, B
    num_heads: int  # H
    value_width: int  # features of a value in each head
    query_width: int  # features of a query, and of a key that differs by sentence
    shared_width: int  # features of a key that all sentences share, and of the tensor x that it is multiplied by
    left_width: int  # features of the left factor of an outer product
    right_width: int  # features of the right factor
    shared_key_rows: int  # rows that the parameter with the shared keys has in each head, at least T
    row_columns: int  # columns that the parameter with the row c has, at least T
    matrix_rows: int  # rows and columns that the parameter with the matrix R has in each head
    matrix_columns: int
    is_by_distance: bool  # the matrix is given by its values by distance, 2 m + 1 for each head
    number_of_weights: int  # M
    weight_rows: WeightRows
    scale: float  # of the product of queries and keys
    has_hidden: bool  # whether there is a padding mask
    is_causal: bool
    has_dropout: bool
    dropout: float
    wanted: tuple[str, ...]  # names of the tensors that need a gradient

    def tiles(self) -> list[str]:
        """Returns the summands of the logits that take registers for a whole tile."""
        sizes = {"q": self.query_width, "x": self.shared_width, "outer": self.right_width, "r": self.matrix_columns}
        return [name for name, size in sizes.items() if size > 0]

    def is_short(self) -> bool:
        """Returns whether the kernels for short sentences hold the tiles in registers, as the compiler says."""
        tiles = self.tiles()
        width = max(self.value_width, self.query_width, self.shared_width)
        is_narrow = width <= 64
        if self.length <= 32:
            return len(tiles) <= 3 and (is_narrow or tiles in (["q"], ["x"], ["r"]))
        if self.length > 64 or not is_narrow:
            return False
        is_padded = width < power_of_2(width)
        return tiles in (["q"], ["r"]) or (tiles == ["x"] and not is_padded)

    def kind(self) -> "Layout":
        """Returns the layout without the sizes that change from batch to batch, equal for calls of the same kernels."""
        return self._replace(
            length=min(power_of_2(self.length), 128),  # tiles have 64 rows at most
            bsz=0,
            left_width=0,
            shared_key_rows=0,
            row_columns=min(self.row_columns, 1),
            matrix_rows=0,
            matrix_columns=min(self.matrix_columns, 1),
            dropout=0.0,
        )


class Launch:
    """A launch of a kernel.

    Args:
        kernel: The kernel, from `triton_attention` or `triton_sums`.
        grid: Numbers of programs, in up to three directions.
        tensors: The first arguments: names of tensors, None, or structures (named tuples) of these.
        numbers: All other arguments.
        num_warps, num_stages: Triton's options, the number of warps and how many stages ahead a loop reads.
    """

    def __init__(
        self,
        kernel: Any,
        grid: Sequence[int],
        tensors: Sequence[Any],
        numbers: Sequence[Any],
        num_warps: int,
        num_stages: int = 1,
    ) -> None:
        self.kernel = kernel
        self.grid = (*grid, 1, 1)[:3]
        self.numbers = numbers
        self.options = {"num_warps": num_warps, "num_stages": num_stages}
        self.readers = [make_reader(names) for names in tensors]
        self.compiled: Callable[..., None] | None = None  # the loaded kernel, on a GPU

    def args(self, tensors: dict[Any, Any]) -> list[Any]:
        """Returns the arguments for tensors by their names; None has itself as a name."""
        return [read(tensors) for read in self.readers] + [*self.numbers]

    def compile(self, arguments: Sequence[Any]) -> None:
        """Compiles and loads the kernel for such arguments; raises what the compiler or the GPU raises.

        A kernel that asks for more shared memory than there is reads fewer stages ahead. A kernel whose threads need
        many more registers than they have gets more warps, so that each thread needs fewer.
        """
        from triton.runtime.errors import OutOfResources

        tried = dict(self.options)
        while True:
            kernel = self.kernel.warmup(*arguments, grid=self.grid, **tried)
            try:
                compiled = kernel[self.grid]  # loads it
            except OutOfResources:
                if tried["num_stages"] > 1:
                    tried["num_stages"] -= 1
                    continue
                if self.compiled is None:
                    raise
                return  # with fewer warps it fits
            self.compiled = compiled
            self.options = dict(tried)
            if kernel.n_spills <= MAX_SPILLS or tried["num_warps"] >= MAX_WARPS:
                return
            tried["num_warps"] *= 2


def make_reader(names: Any) -> Callable[[dict[Any, Any]], Any]:
    """Returns a function that looks up a tensor by its name, or a structure of tensors by theirs."""
    if not isinstance(names, tuple):
        return itemgetter(names)
    structure = type(names)
    read_all = itemgetter(*names)

    def read_structure(tensors: dict[Any, Any]) -> Any:
        """Returns a structure of tensors by their names, in a third of the time that a call of its class takes."""
        return tuple.__new__(structure, read_all(tensors))

    return read_structure


class Groups(NamedTuple):
    """How the sentences of a batch are shared out to programs, and where these leave their sums."""

    sentences: int  # of a group
    size: int  # numbers of the sums of a group; group g begins at ``g * size``
    number: int


class Addition(NamedTuple):
    """What the last launch adds up: the sums of groups of sentences, and the programs' parts of weights' gradients."""

    columns: Groups  # of the sums for w and c
    matrix: Groups  # of the sums for r
    row_parts: int  # of the gradient of the outer product's weight
    column_parts: int  # of the gradients of the weights of q, x and c
    matrix_parts: int  # of the gradient of the weight of r


class Plan:
    """The launches of all calls with a layout, and the memory that their sums need.

    Attributes:
        forward, backward: The launches of both passes.
        is_long: Whether they are the kernels for sentences of any length.
        names: Names of the tensors that there are, in the order of `NAMES`.
        gradient_names: Names of their gradients.
        sums: For each sum by its name, so many numbers in fp32.
        is_compiled, is_loaded: Whether the kernels are compiled, and whether they may be used; see `load`.
    """

    def __init__(self, layout: Layout) -> None:
        from .triton_common import Numbers, Tensors

        self.layout = layout
        self.is_compiled = False
        self.is_loaded = False
        self.is_long = not layout.is_short()
        self.sums: dict[str, int] = {}
        sizes = {
            "packed": layout.value_width,
            "x": layout.shared_width,
            "w": layout.shared_width,
            "pair": layout.right_width,
            "c": layout.row_columns,
            "r": layout.matrix_columns,
            "weights": layout.number_of_weights,
        }
        self.names = [name for name in NAMES if sizes[name] > 0]
        self.gradient_names = [f"to_{name}" for name in self.names]
        present = {name: name for name in self.names}
        queries = "packed" if layout.query_width else None
        self.tensors = Tensors(
            v="packed",
            q=queries,
            k=queries,
            x=present.get("x"),
            w=present.get("w"),
            c=present.get("c"),
            left=present.get("pair"),
            right=present.get("pair"),
            r=present.get("r"),
            weights=present.get("weights"),
            hidden="hidden" if layout.has_hidden else None,
            seed="seed" if layout.has_dropout else None,
        )
        self.numbers = Numbers(
            T=layout.length,
            B=layout.bsz,
            H=layout.num_heads,
            left=layout.left_width,
            right=max(layout.right_width, 1),
            w_rows=layout.shared_key_rows,
            c_columns=layout.row_columns,
            r_rows=layout.matrix_rows,
            r_columns=layout.matrix_columns,
            scale=layout.scale,
            dropout=layout.dropout,
        )
        self.forward = self.plan_forward_long() if self.is_long else self.plan_forward_short()
        self.backward: list[Launch] = []
        if layout.wanted:
            addition = self.add_backward_long() if self.is_long else self.add_backward_short()
            if self.sums.keys() - {"delta"}:
                self.backward.append(self.plan_addition(addition))

    def plan_launch(
        self, kernel: str, tile: "Tile", grid: Sequence[int], tensors: Sequence[Any], more: Sequence[int] = ()
    ) -> Launch:
        """Returns a launch of a kernel of `triton_attention`.

        Its arguments begin with the tensors of the call. `more` are numbers that only some kernels have, in their
        order.
        """
        from . import triton_attention

        return Launch(
            kernel=getattr(triton_attention, kernel),
            grid=grid,
            tensors=(self.tensors, *tensors),
            numbers=(*self.numbers, *more, make_constants(self.layout, tile)),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def plan_forward_short(self) -> Launch:
        """Returns the launch that writes ``out``, (T, B, H, d_h), for short sentences."""
        layout = self.layout
        most = divide_up(4 * PROGRAMS, layout.num_heads)
        sentences, groups = share_out(layout.bsz, min(layout.bsz, most))
        tile = Tile.for_whole_sentence(layout, is_forward=True)
        return self.plan_launch("forward_short", tile, (layout.num_heads, groups), ("out",), more=(sentences,))

    def plan_forward_long(self) -> Launch:
        """Returns the launch that writes ``out`` and ``lse``, (B, H, T) in fp32, for sentences of any length."""
        layout = self.layout
        tile = Tile.for_kernel("forward", layout)
        programs = layout.bsz * layout.num_heads * divide_up(layout.length, tile.rows)
        return self.plan_launch("forward", tile, (programs,), ("out", "lse"))

    def add_backward_short(self) -> Addition:
        """Adds the only backward launch for short sentences, and returns the sums that a last launch adds up.

        Each group of sentences has its own sums of the gradients that all sentences share.
        """
        layout = self.layout
        groups = self.plan_groups(tiles=1, names=self.wanted_sums(SHARED), weights=self.wanted_weights(SUMMANDS))
        tile = Tile.for_whole_sentence(layout, is_forward=False)
        self.backward.append(
            self.plan_launch(
                "backward_short",
                tile,
                grid=(layout.num_heads, groups.number),
                tensors=(self.gradients(), "grad"),
                more=(groups.sentences, groups.size),
            )
        )
        # One program computes all gradients of a group, so rows, columns and the matrix have the same parts.
        number = groups.number
        return Addition(groups, groups, row_parts=number, column_parts=number, matrix_parts=number)

    def add_backward_long(self) -> Addition:
        """Adds the backward launches for sentences of any length; returns what is to be added up."""
        layout = self.layout
        rows = Tile.for_kernel("rows", layout)
        columns = Tile.for_kernel("columns", layout)
        matrix = Tile.for_kernel("matrix", layout)

        # Memory for all sums comes first, as `gradients` says which of them there are.
        column_tiles = divide_up(layout.length, columns.columns)
        column_sums = self.wanted_sums(("w", "c"))
        column_weights = self.wanted_weights(("q", "x", "c"))
        column_groups = self.plan_groups(column_tiles, column_sums, column_weights)
        matrix_tiles = divide_up(layout.length, matrix.rows) * divide_up(layout.length, matrix.columns)
        matrix_sums = self.wanted_sums(("r",))
        matrix_weights = self.wanted_weights(("r",))
        matrix_groups = self.plan_groups(matrix_tiles, matrix_sums, matrix_weights)
        row_parts = layout.bsz * divide_up(layout.length, rows.rows)
        if self.wanted_weights(("outer",)):
            self.reserve("sum_a_outer", row_parts * layout.num_heads)
        delta = None
        if layout.query_width or any(name != "packed" for name in layout.wanted):  # not the gradient of values alone
            delta = "delta"
            self.reserve(delta, layout.bsz * layout.num_heads * layout.length)

        gradients = self.gradients()
        if delta is not None:
            row_tensors = (gradients, "out", delta, "lse", "grad")
            self.backward.append(self.plan_launch("backward_rows", rows, (row_parts * layout.num_heads,), row_tensors))
        tensors = (gradients, delta, "lse", "grad")
        if column_sums or column_weights or "packed" in layout.wanted:
            grid = (column_groups.number * column_tiles * layout.num_heads,)
            numbers = (column_groups.sentences, column_groups.size)
            self.backward.append(self.plan_launch("backward_columns", columns, grid, tensors, more=numbers))
        if matrix_sums or matrix_weights:
            grid = (matrix_groups.number * matrix_tiles * layout.num_heads,)
            numbers = (matrix_groups.sentences, matrix_groups.size)
            self.backward.append(self.plan_launch("backward_matrix", matrix, grid, tensors, more=numbers))
        return Addition(
            column_groups,
            matrix_groups,
            row_parts=row_parts,
            column_parts=column_groups.number * column_tiles,
            matrix_parts=matrix_groups.number * matrix_tiles,
        )

    def plan_addition(self, addition: Addition) -> Launch:
        """Returns the launch that adds up sums over groups, and parts of the gradients of weights."""
        from .triton_sums import AdditionNumbers, Totals, add

        layout = self.layout
        totals = Totals(**{name: f"to_{name}" if name in layout.wanted else None for name in Totals._fields})
        numbers = AdditionNumbers(
            H=layout.num_heads,
            T=layout.length,
            column_groups=addition.columns.number,
            column_size=addition.columns.size,
            matrix_groups=addition.matrix.number,
            matrix_size=addition.matrix.size,
            w_rows=layout.shared_key_rows,
            w_columns=layout.shared_width,
            c_rows=1,
            c_columns=layout.row_columns,
            r_rows=layout.matrix_rows,
            r_columns=layout.matrix_columns,
            row_parts=addition.row_parts,
            column_parts=addition.column_parts,
            matrix_parts=addition.matrix_parts,
        )
        programs = 0
        for name in self.wanted_sums(SHARED):
            size = layout.num_heads * math.prod((getattr(numbers, f"{name}_rows"), getattr(numbers, f"{name}_columns")))
            is_diagonal = name == "r" and layout.is_by_distance
            programs += divide_up(size, DISTANCES_BLOCK if is_diagonal else ADDITION_BLOCK)
        if "weights" in layout.wanted:
            programs += layout.number_of_weights
        constants = make_constants(layout, Tile(rows=16, columns=16, warps=4))  # no tile is read
        blocks = (power_of_2(layout.num_heads), ADDITION_BLOCK, GROUPS_AT_ONCE, DISTANCES_BLOCK)
        return Launch(
            kernel=add,
            grid=(programs,),
            tensors=(totals, self.gradients()),
            numbers=(*numbers, constants, *blocks),
            num_warps=4,
        )

    def wanted_sums(self, names: Sequence[str]) -> list[str]:
        """Returns those of the shared tensors that need a gradient."""
        return [name for name in names if name in self.layout.wanted]

    def wanted_weights(self, names: Sequence[str]) -> list[str]:
        """Returns those of the summands whose weight needs a gradient."""
        if "weights" not in self.layout.wanted:
            return []
        return [name for name in names if getattr(self.layout.weight_rows, name) >= 0]

    def plan_groups(self, tiles: int, names: Sequence[str], weights: Sequence[str]) -> Groups:
        """Shares out the sentences to the programs of a kernel, and reserves the memory of their sums.

        Args:
            tiles: Programs for each head and group.
            names: Shared tensors whose gradients the kernel sums.
            weights: Summands whose weights' gradients the kernel sums.
        """
        layout = self.layout
        programs = PROGRAMS if layout.length > 32 else 2 * PROGRAMS  # programs for tiles of 32 x 32 are small
        # The weight of the product of queries and keys has a single number for each head as its gradient. To group
        # sentences saves nothing there, so that each sentence has a program, and more of them run at once.
        is_grouped = bool(names) or any(name != "q" for name in weights)
        most = max(1, programs // (layout.num_heads * tiles)) if is_grouped else layout.bsz
        sentences, count = share_out(layout.bsz, min(layout.bsz, most))
        numbers = {"w": layout.length * layout.shared_width, "c": layout.length, "r": layout.length * layout.length}
        for name in names:
            self.reserve(f"sum_{name}", layout.num_heads * numbers[name])
        # The sums of a group are contiguous. The last tensor of the first group is enlarged by all other groups.
        size = sum(self.sums[f"sum_{name}"] for name in names)
        if names:
            self.sums[f"sum_{names[-1]}"] += (count - 1) * size
        for name in weights:
            self.reserve(f"sum_a_{name}", count * tiles * layout.num_heads)
        return Groups(sentences, size, count)

    def reserve(self, name: str, number: int) -> None:
        """Reserves memory for so many numbers, in multiples of the 16 bytes that kernels are compiled for."""
        self.sums[name] = divide_up(number, 4) * 4

    def gradients(self) -> Any:
        """Returns the names of the memory that gradients go to, or sums for them."""
        from .triton_common import Gradients

        names: dict[str, str | None] = dict.fromkeys(Gradients._fields)
        for name in BY_SENTENCE:
            tensor = getattr(self.tensors, name)
            if tensor in self.layout.wanted:
                names[name] = f"to_{tensor}"
        for name in self.sums:
            if name != "delta":
                names[name.removeprefix("sum_")] = name
        return Gradients(**names)


find_plan = lru_cache(maxsize=MAX_PLANS)(Plan)  # for equal layouts the same plan


class Tile(NamedTuple):
    """The rows and columns of a program's tile, its warps, and how many stages ahead it reads.

    On an H100, in bf16 with 64 features in a head, the choice is within a tenth of the fastest of ten tiles.
    """

    rows: int
    columns: int
    warps: int
    stages: int = 1

    @staticmethod
    def for_whole_sentence(layout: Layout, is_forward: bool) -> "Tile":
        """Returns the tile of all rows and columns of a short sentence."""
        size = power_of_2(layout.length)
        if size > 32 or max(layout.value_width, layout.query_width, layout.shared_width) > 64:
            return Tile(size, size, warps=4)
        has_much_work = len(layout.tiles()) > 1 or layout.right_width > 0
        return Tile(size, size, warps=1 if is_forward and has_much_work else 2)

    @staticmethod
    def for_kernel(kernel: str, layout: Layout) -> "Tile":
        """Returns the tile of a kernel for sentences of any length.

        The sizes are the fastest of ten that were timed on an H100, in bf16 with heads of 64 features.

        Args:
            kernel: ``forward``, or the kernel of the backward pass: ``rows``, ``columns`` or ``matrix``.
            layout: The call.
        """
        has_queries = layout.query_width > 0
        has_shared_keys = layout.shared_width > 0
        has_outer_product = layout.right_width > 0
        has_many_summands = len(layout.tiles()) > 2
        if kernel == "forward":
            tile = Tile(64, 64, warps=4, stages=2)
            if has_shared_keys or has_outer_product:
                tile = Tile(64, 32, warps=4, stages=3)
        elif kernel == "rows":
            tile = Tile(64, 32, warps=4, stages=3)
        elif kernel == "columns":
            tile = Tile(32, 64, warps=4, stages=2)
            if has_shared_keys:
                tile = Tile(32, 64, warps=4, stages=3)
            elif has_queries:
                tile = Tile(64, 64, warps=4, stages=2)
        else:
            tile = Tile(64, 64, warps=4, stages=2)
        if has_many_summands:
            # A tile of each summand is held in registers, so the tiles have to be smaller. The number of stages is that
            # of the kernel alone.
            side = 16 if has_outer_product else 32
            stages = 3 if kernel == "rows" else 2
            tile = Tile(side, side, warps=4, stages=stages)
        # A tile need not be larger than the sentence.
        longest_side = power_of_2(layout.length)
        return tile._replace(rows=min(tile.rows, longest_side), columns=min(tile.columns, longest_side))


def divide_up(n: int, m: int) -> int:
    """Returns n / m, rounded up."""
    return -(-n // m)


def share_out(bsz: int, groups: int) -> tuple[int, int]:
    """Returns the sentences of a group, and the number of groups, none of which is empty."""
    sentences = divide_up(bsz, groups)
    return sentences, divide_up(bsz, sentences)


def power_of_2(n: int) -> int:
    """Returns the smallest power of two that is at least n, and at least 16, as the products of tiles ask for."""
    return 1 << max(4, (n - 1).bit_length())


def make_constants(layout: Layout, tile: Tile) -> Any:
    """Returns what the kernels of a call are compiled for."""
    from .triton_common import Constants

    factor = 0
    if layout.right_width:
        factor = max(layout.right_width, divide_up(layout.length, layout.right_width))
    is_multiple_of_8 = not (layout.value_width % 8 or layout.query_width % 8 or layout.shared_width % 8)
    constants = Constants(
        D=layout.value_width,
        D_BLOCK=power_of_2(layout.value_width),
        Q=layout.query_width,
        Q_BLOCK=power_of_2(layout.query_width),
        X=layout.shared_width,
        X_BLOCK=power_of_2(layout.shared_width),
        FACTOR=power_of_2(factor),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        UNIT=8 if is_multiple_of_8 else 1,
        CAUSAL=layout.is_causal,
        DIAGONALS=layout.is_by_distance,
        PRECISION="ieee" if layout.dtypes[0] == torch.float32 else "tf32",
        A_Q=layout.weight_rows.q,
        A_X=layout.weight_rows.x,
        A_OUTER=layout.weight_rows.outer,
        A_C=layout.weight_rows.c,
        A_R=layout.weight_rows.r,
    )
    return as_constexpr(constants)


@cache
def as_constexpr(constants: Any) -> Any:
    """Returns `Constants` in Triton's form, which takes a while to make.

    There are few different ones, or there would be many kernels.
    """
    from triton import language

    return type(constants)(*map(language.constexpr, constants))
