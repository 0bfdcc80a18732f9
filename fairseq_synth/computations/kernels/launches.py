"""The launches of the Triton kernels for a call: their tiles, numbers and memory, which follow from its sizes alone.

A launch has names in the place of tensors, so that it serves every call of the same sizes.
"""

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
    """Everything that the launches of a call depend on."""

    device: torch.device
    dtypes: tuple[torch.dtype, ...]  # the types of the tensors, in the order of `NAMES`
    length: int  # tokens of each sentence, T
    bsz: int  # sentences, B
    num_heads: int  # H
    value_width: int  # features of a value in each head
    weight_rows: WeightRows
    has_hidden: bool  # whether there is a padding mask
    is_causal: bool
    has_dropout: bool
    dropout: float
    wanted: tuple[str, ...]  # names of the tensors that need a gradient
    # The sizes of a summand that does not occur are 0.
    query_width: int = 0  # features of a query, and of a key that differs by sentence
    scale: float = 1.0  # the factor that the product of queries and keys is multiplied by
    shared_width: int = 0  # features of a key that all sentences share, and of the tensor x that it is multiplied by
    shared_key_rows: int = 0  # rows that the parameter with the shared keys has in each head, at least T
    left_width: int = 0  # features of the left factor of an outer product
    right_width: int = 0  # features of the right factor
    row_columns: int = 0  # columns that the parameter with the row c has, at least T
    matrix_rows: int = 0  # rows and columns that the parameter with the matrix R has in each head
    matrix_columns: int = 0
    is_by_distance: bool = False  # the matrix is given by its values by distance, 2 m + 1 for each head
    number_of_weights: int = 0  # M

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
        """Returns a layout that is equal for all calls that run the same compiled kernels.

        Sizes that are only arguments of the kernels become 0, as do the number of sentences and the probability of
        dropout. Of other sizes only a property counts that the kernels are compiled for: whether there is a row c or a
        matrix, and how large the tiles are. Tiles grow with the sentence up to 64 rows and columns; a sentence of more
        than 64 tokens has several, for which 128 stands.
        """
        return self._replace(
            length=min(power_of_2(self.length), 128),
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
        """Keeps what the launch needs; see the class for the arguments."""
        self.kernel = kernel
        unused_directions = [1] * (3 - len(grid))
        self.grid = (*grid, *unused_directions)
        self.numbers = numbers
        self.options = {"num_warps": num_warps, "num_stages": num_stages}
        self.readers = [make_reader(names) for names in tensors]
        self.compiled: Callable[..., None] | None = None  # the loaded kernel, on a GPU

    def args(self, tensors: dict[Any, Any]) -> list[Any]:
        """Returns the arguments for tensors by their names; None has itself as a name."""
        return [read(tensors) for read in self.readers] + [*self.numbers]

    def compile(self, arguments: Sequence[Any]) -> None:
        """Compiles the kernel for arguments of such types, and loads it on the GPU.

        If its threads need many more registers than they have, the kernel is compiled again with twice as many warps,
        so that each thread needs fewer. If it does not fit the GPU with more warps, the last one that fits is kept.

        Raises:
            OutOfResources: The kernel does not fit the GPU even if it reads only one stage ahead.
            Exception: Anything else that Triton's compiler or the GPU's driver raises.
        """
        from triton.runtime.errors import OutOfResources

        options = dict(self.options)
        while True:
            try:
                kernel = self.compile_with(options, arguments)
            except OutOfResources:
                fits_with_fewer_warps = self.compiled is not None
                if fits_with_fewer_warps:
                    return
                raise
            self.options = dict(options)
            has_enough_registers = kernel.n_spills <= MAX_SPILLS
            if has_enough_registers or options["num_warps"] >= MAX_WARPS:
                return
            options["num_warps"] *= 2

    def compile_with(self, options: dict[str, int], arguments: Sequence[Any]) -> Any:
        """Compiles the kernel with these options, loads it as `self.compiled`, and returns it as compiled.

        If the kernel asks for more shared memory than there is, it is compiled again to read fewer stages ahead, and
        ``options["num_stages"]`` is reduced.

        Raises:
            OutOfResources: The kernel does not fit the GPU even if it reads only one stage ahead.
        """
        from triton.runtime.errors import OutOfResources

        while True:
            kernel = self.kernel.warmup(*arguments, grid=self.grid, **options)
            try:
                self.compiled = kernel[self.grid]  # loads it
                return kernel
            except OutOfResources:
                if options["num_stages"] == 1:
                    raise
                options["num_stages"] -= 1


def make_reader(names: Any) -> Callable[[dict[Any, Any]], Any]:
    """Returns a function that takes {name: tensor} and returns the tensor of one name.

    If `names` is a named tuple of at least two names, the function returns the same kind of named tuple with their
    tensors. For example, ``Tensors(v="packed", q=None, ...)`` becomes ``Tensors(v=<tensor>, q=None, ...)``.
    """
    if not isinstance(names, tuple):
        return itemgetter(names)
    structure = type(names)
    read_all = itemgetter(*names)

    def read_structure(tensors: dict[Any, Any]) -> Any:
        """Returns the named tuple of tensors."""
        # This makes the named tuple in a third of the time that a call of its class takes.
        return tuple.__new__(structure, read_all(tensors))

    return read_structure


class Groups(NamedTuple):
    """How the sentences of a batch are shared out to programs, each of which sums the gradients of its group.

    The sums of all groups lie one after another in memory.
    """

    sentences: int  # in a group
    size: int  # numbers that the sums of a group consist of; the sums of group g begin at number ``g * size``
    number: int  # how many groups there are


class Addition(NamedTuple):
    """The partial sums that the last launch of a backward pass adds up.

    Gradients of what all sentences share are summed by groups of sentences. The gradient of a mixture's weight is one
    number for each head, of which every program has computed a part.
    """

    columns: Groups  # the groups that the gradients of the shared keys w and of the row c are summed over
    matrix: Groups  # the groups that the gradient of the matrix r is summed over
    row_parts: int  # parts of the gradient of the outer product's weight
    column_parts: int  # parts of the gradients of the weights of q, x and c
    matrix_parts: int  # parts of the gradient of the weight of r


class Plan:
    """The launches of all calls with a layout, and the memory that their sums need.

    Attributes:
        forward, backward: The launches of both passes.
        is_long: Whether they are the kernels for sentences of any length.
        has_unused_factors: Whether a part of the gradient of an outer product's factors is 0, and no kernel writes it.
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
        # The left factor of an outer product may have features for columns beyond the sentence. No kernel writes their
        # gradient, which is 0.
        used_left_width = divide_up(layout.length, max(layout.right_width, 1))
        self.has_unused_factors = "pair" in layout.wanted and layout.left_width > used_left_width
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

        Args:
            kernel: The name of the kernel.
            tile: The rows and columns of the logits that a program holds at once.
            grid: Numbers of programs, in up to three directions.
            tensors: Names of the tensors that only this kernel has as arguments, in their order. They follow the
                tensors of the call, which all kernels have.
            more: Numbers that only this kernel has as arguments, in their order. They follow `self.numbers`.
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
        """Adds the launch that computes all gradients of short sentences.

        Each of its programs computes one head of a group of sentences: the gradients of these sentences, and for what
        all sentences share (keys w, row c, matrix r, and the weights of all summands) a sum over the group.

        Returns:
            the sums that it leaves in memory, which a last launch adds up over the groups.
        """
        layout = self.layout
        groups = self.plan_groups(
            programs_per_group=1, shared=self.wanted_sums(SHARED), weighted=self.wanted_weights(SUMMANDS)
        )
        launch = self.plan_launch(
            kernel="backward_short",
            tile=Tile.for_whole_sentence(layout, is_forward=False),
            grid=(layout.num_heads, groups.number),
            tensors=(self.gradients(), "grad"),
            more=(groups.sentences, groups.size),
        )
        self.backward.append(launch)
        # A program computes all gradients of its group, so that there are as many parts of each of them as groups.
        return Addition(
            columns=groups,
            matrix=groups,
            row_parts=groups.number,
            column_parts=groups.number,
            matrix_parts=groups.number,
        )

    def add_backward_long(self) -> Addition:
        """Adds the launches that compute the gradients of sentences of any length.

        There is one launch for each place that sums go to: rows of a sentence, columns of a group of sentences, and
        tiles of the matrix. A launch is left out if none of its gradients is wanted.

        Returns:
            the partial sums that they leave in memory.
        """
        layout = self.layout
        row_tile = Tile.for_kernel("rows", layout)
        column_tile = Tile.for_kernel("columns", layout)
        matrix_tile = Tile.for_kernel("matrix", layout)

        # Memory for all sums is reserved first, because `gradients` reads from it which sums there are.
        tiles_of_columns = divide_up(layout.length, column_tile.columns)
        column_sums = self.wanted_sums(("w", "c"))
        column_weights = self.wanted_weights(("q", "x", "c"))
        column_groups = self.plan_groups(tiles_of_columns, column_sums, column_weights)
        tiles_of_matrix = divide_up(layout.length, matrix_tile.rows) * divide_up(layout.length, matrix_tile.columns)
        matrix_sums = self.wanted_sums(("r",))
        matrix_weights = self.wanted_weights(("r",))
        matrix_groups = self.plan_groups(tiles_of_matrix, matrix_sums, matrix_weights)
        row_parts = layout.bsz * divide_up(layout.length, row_tile.rows)
        if self.wanted_weights(("outer",)):
            self.reserve("sum_a_outer", row_parts * layout.num_heads)
        # All gradients but that of the values need rowsum(P * dP), which the first launch writes to `delta`.
        needs_delta = layout.query_width > 0 or any(name != "packed" for name in layout.wanted)
        delta = "delta" if needs_delta else None
        if needs_delta:
            self.reserve("delta", layout.bsz * layout.num_heads * layout.length)

        if needs_delta:
            launch = self.plan_launch(
                kernel="backward_rows",
                tile=row_tile,
                grid=(row_parts * layout.num_heads,),
                tensors=(self.gradients(), "out", delta, "lse", "grad"),
            )
            self.backward.append(launch)
        if column_sums or column_weights or "packed" in layout.wanted:
            launch = self.plan_launch_over_groups(
                "backward_columns", column_tile, tiles_of_columns, column_groups, delta
            )
            self.backward.append(launch)
        if matrix_sums or matrix_weights:
            launch = self.plan_launch_over_groups("backward_matrix", matrix_tile, tiles_of_matrix, matrix_groups, delta)
            self.backward.append(launch)
        return Addition(
            columns=column_groups,
            matrix=matrix_groups,
            row_parts=row_parts,
            column_parts=column_groups.number * tiles_of_columns,
            matrix_parts=matrix_groups.number * tiles_of_matrix,
        )

    def plan_launch_over_groups(
        self, kernel: str, tile: "Tile", num_tiles: int, groups: Groups, delta: str | None
    ) -> Launch:
        """Returns a launch of a backward kernel that has a program for each head and tile of each group of sentences.

        Args:
            kernel: ``backward_columns`` or ``backward_matrix``.
            tile: The rows and columns of the logits that a program holds at once.
            num_tiles: The number of tiles in each head.
            groups: The groups that the sentences are shared out to.
            delta: The name of the memory with rowsum(P * dP), or None if it is not computed.
        """
        return self.plan_launch(
            kernel=kernel,
            tile=tile,
            grid=(groups.number * num_tiles * self.layout.num_heads,),
            tensors=(self.gradients(), delta, "lse", "grad"),
            more=(groups.sentences, groups.size),
        )

    def plan_addition(self, addition: Addition) -> Launch:
        """Returns the last launch of a backward pass, which adds up the partial sums of all other launches.

        The results are the gradients of the shared keys w, of the row c, of the matrix r and of the weights.
        """
        from .triton_sums import AdditionNumbers, Totals, add

        layout = self.layout
        totals = Totals(
            w=self.gradient_of("w"),
            c=self.gradient_of("c"),
            r=self.gradient_of("r"),
            weights=self.gradient_of("weights"),
        )
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
        no_tile = Tile(rows=16, columns=16, warps=4)  # the kernel is given a tile as all kernels are, but reads none
        constants = make_constants(layout, no_tile)
        # The arguments of `add` are: totals, sums, the numbers, the constants, and these four sizes of blocks.
        heads_block = power_of_2(layout.num_heads)
        blocks = (heads_block, ADDITION_BLOCK, GROUPS_AT_ONCE, DISTANCES_BLOCK)
        return Launch(
            kernel=add,
            grid=(self.count_programs_of_addition(),),
            tensors=(totals, self.gradients()),
            numbers=(*numbers, constants, *blocks),
            num_warps=4,
        )

    def count_programs_of_addition(self) -> int:
        """Returns the number of programs that add up partial sums.

        Each program writes a block of the gradient of a shared tensor, or the gradient of a row of the weights.
        """
        layout = self.layout
        numbers_per_head = {
            "w": layout.shared_key_rows * layout.shared_width,
            "c": layout.row_columns,
            "r": layout.matrix_rows * layout.matrix_columns,
        }
        programs = 0
        for name in self.wanted_sums(SHARED):
            block = ADDITION_BLOCK
            if name == "r" and layout.is_by_distance:
                block = DISTANCES_BLOCK  # each number is the sum of a diagonal, which is much more work
            programs += divide_up(layout.num_heads * numbers_per_head[name], block)
        if "weights" in layout.wanted:
            programs += layout.number_of_weights
        return programs

    def gradient_of(self, name: str) -> str | None:
        """Returns the name of the gradient of a tensor, or None if it is not wanted."""
        return f"to_{name}" if name in self.layout.wanted else None

    def wanted_sums(self, names: Sequence[str]) -> list[str]:
        """Returns those of the shared tensors that need a gradient."""
        return [name for name in names if name in self.layout.wanted]

    def wanted_weights(self, names: Sequence[str]) -> list[str]:
        """Returns those of the summands whose weight needs a gradient."""
        if "weights" not in self.layout.wanted:
            return []
        return [name for name in names if getattr(self.layout.weight_rows, name) >= 0]

    def plan_groups(self, programs_per_group: int, shared: Sequence[str], weighted: Sequence[str]) -> Groups:
        """Shares out the sentences to the programs of a kernel, and reserves the memory of their sums.

        The memory of the sums of ``w`` and ``c``, for example, is w c w c w c for three groups. A kernel is given the
        beginnings of the first w and of the first c, and adds `Groups.size` to both for each further group. So the
        memory named ``sum_w`` is the first w, and the memory named ``sum_c`` is all the rest.

        Args:
            programs_per_group: Programs of the kernel for each head of a group: the number of its tiles.
            shared: Names of the shared tensors whose gradients the kernel sums.
            weighted: Names of the summands whose weights' gradients the kernel sums.
        """
        layout = self.layout
        # More sums take more memory, so there are only as many groups as keep the GPU busy. Programs for short
        # sentences have little work, so there are twice as many.
        programs = PROGRAMS if layout.length > 32 else 2 * PROGRAMS
        # The gradient of the weight of Q K^T is a single number for each head, which takes no memory worth saving.
        # Then each sentence is a group.
        is_grouped = bool(shared) or any(name != "q" for name in weighted)
        max_groups = layout.bsz
        if is_grouped:
            max_groups = max(1, programs // (layout.num_heads * programs_per_group))
        sentences, num_groups = share_out(layout.bsz, min(layout.bsz, max_groups))
        numbers_per_head = {
            "w": layout.length * layout.shared_width,
            "c": layout.length,
            "r": layout.length * layout.length,
        }
        for name in shared:
            self.reserve(f"sum_{name}", layout.num_heads * numbers_per_head[name])
        size = sum(self.sums[f"sum_{name}"] for name in shared)
        if shared:
            last = f"sum_{shared[-1]}"
            size_of_other_groups = (num_groups - 1) * size
            self.sums[last] += size_of_other_groups
        for name in weighted:
            self.reserve(f"sum_a_{name}", num_groups * programs_per_group * layout.num_heads)
        return Groups(sentences, size, num_groups)

    def reserve(self, name: str, number: int) -> None:
        """Reserves memory for so many numbers, in multiples of the 16 bytes that kernels are compiled for."""
        self.sums[name] = divide_up(number, 4) * 4

    def gradients(self) -> Any:
        """Returns the `Gradients` of the kernels, with names in the place of pointers.

        For example, ``Gradients(v="to_packed", w="sum_w", ...)``: the gradient of the values is written into
        ``to_packed``, which is the gradient of the tensor ``packed``. The gradient of the shared keys w is a sum over
        the sentences, and partial sums are written into the memory that `reserve` has reserved as ``sum_w``. A field
        is None if the gradient is not wanted.
        """
        from .triton_common import Gradients

        names: dict[str, str | None] = dict.fromkeys(Gradients._fields)
        for name in BY_SENTENCE:
            tensor = getattr(self.tensors, name)
            if tensor in self.layout.wanted:
                names[name] = f"to_{tensor}"
        for memory_name in self.sums:
            # ``delta`` is rowsum(P * dP), which one kernel computes for the others and which is no gradient.
            if memory_name != "delta":
                field = memory_name.removeprefix("sum_")
                names[field] = memory_name
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
        """Returns the tile of all rows and columns of a short sentence, for the kernel of one of the passes."""
        size = power_of_2(layout.length)
        widest = max(layout.value_width, layout.query_width, layout.shared_width)
        if size > 32 or widest > 64:
            warps = 4
        elif is_forward and (len(layout.tiles()) > 1 or layout.right_width > 0):
            warps = 1
        else:
            warps = 2
        return Tile(rows=size, columns=size, warps=warps)

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
        if has_many_summands:
            # A tile of each summand is held in registers, so tiles have to be smaller.
            side = 16 if has_outer_product else 32
            stages = 3 if kernel == "rows" else 2
            tile = Tile(rows=side, columns=side, warps=4, stages=stages)
        elif kernel == "forward" and (has_shared_keys or has_outer_product):
            tile = Tile(rows=64, columns=32, warps=4, stages=3)
        elif kernel == "rows":
            tile = Tile(rows=64, columns=32, warps=4, stages=3)
        elif kernel == "columns" and has_shared_keys:
            tile = Tile(rows=32, columns=64, warps=4, stages=3)
        elif kernel == "columns" and not has_queries:
            tile = Tile(rows=32, columns=64, warps=4, stages=2)
        else:
            tile = Tile(rows=64, columns=64, warps=4, stages=2)
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
    """Returns the `Constants` that the kernels of a call are compiled for, in Triton's form."""
    from .triton_common import Constants

    largest_factor = 0
    if layout.right_width:
        # Column ``u right_width + v`` of an outer product is left[u] right[v], so that the sentence needs so many u.
        left_width = divide_up(layout.length, layout.right_width)
        largest_factor = max(layout.right_width, left_width)
    # If all widths are multiples of 8, the kernels read 8 numbers at once.
    widths = (layout.value_width, layout.query_width, layout.shared_width)
    are_multiples_of_8 = all(width % 8 == 0 for width in widths)
    constants = Constants(
        D=layout.value_width,
        D_BLOCK=power_of_2(layout.value_width),
        Q=layout.query_width,
        Q_BLOCK=power_of_2(layout.query_width),
        X=layout.shared_width,
        X_BLOCK=power_of_2(layout.shared_width),
        FACTOR=power_of_2(largest_factor),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        UNIT=8 if are_multiples_of_8 else 1,
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
