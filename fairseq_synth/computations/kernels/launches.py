"""The launches of the Triton kernels for a call: their tiles, numbers and memory, which follow from its sizes alone.

A launch has names in the place of tensors, so that it serves every call of the same sizes.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_SPILLS = 100  # registers of a thread that may lie in memory: up to so many, more warps were slower on an H100
MAX_WARPS = 8
MAX_PLANS = 4096  # so many plans are kept
PROGRAMS = 264  # a backward pass aims at this number of programs: two for each of an H100's 132 multiprocessors
# The last launch of a backward pass adds up the sums of groups of sentences. Each of its programs writes this many
# numbers of a gradient.
ADDITION_BLOCK = 256
# If R is given by its values by distance, a program writes fewer numbers, because each one is the sum of a diagonal.
DISTANCES_BLOCK = 16
GROUPS_AT_ONCE = 4  # how many groups a program of the last launch reads at once
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

    def summands_with_tiles(self) -> list[str]:
        """Returns the names of the summands of which a program holds a whole tile in registers: all but the row c."""
        sizes = {"q": self.query_width, "x": self.shared_width, "outer": self.right_width, "r": self.matrix_columns}
        return [name for name, size in sizes.items() if size > 0]

    def is_short(self) -> bool:
        """Returns whether the kernels for short sentences compute the call. They have one tile for a whole sentence.

        They compute a call if the registers hold everything. Which calls these are was found out by compiling them.
        """
        summands = self.summands_with_tiles()
        width = max(self.value_width, self.query_width, self.shared_width)
        is_narrow = width <= 64
        if self.length <= 32:
            is_simple = summands in (["q"], ["x"], ["r"])
            return len(summands) <= 3 and (is_narrow or is_simple)
        if self.length <= 64 and is_narrow:
            is_padded = width < power_of_2(width)  # the kernels pad all widths to powers of two
            return summands in (["q"], ["r"]) or (summands == ["x"] and not is_padded)
        return False

    def kind(self) -> "Layout":
        """Returns the kind of the call. Only the first call of each kind is compared with the definition.

        The kind is a layout in which everything is left out that may differ between calls of the same kind: sizes that
        are only arguments of the kernels, the number of sentences, and the probability of dropout are 0.
        """
        # A tile grows with the sentence up to 64 rows and columns. Longer sentences have several tiles, which 128
        # stands for, the power of two after 64.
        length_of_kind = min(power_of_2(self.length), 128)
        # The kernels are compiled with or without a row c and a matrix R, and for any number of columns.
        has_row = self.row_columns > 0
        has_matrix = self.matrix_columns > 0
        # They are compiled for the width of the wider factor of an outer product, which grows with the sentence.
        width_of_factors_of_kind = 0
        if self.right_width > 0:
            width_of_factors_of_kind = power_of_2(width_of_factors(self))
        return self._replace(
            length=length_of_kind,
            row_columns=int(has_row),
            matrix_columns=int(has_matrix),
            bsz=0,
            left_width=width_of_factors_of_kind,
            shared_key_rows=0,
            matrix_rows=0,
            dropout=0.0,
        )


class Launch:
    """A launch of a kernel, with names in the place of its tensors.

    Args:
        kernel: The kernel, from `triton_attention` or `triton_sums`.
        grid: Numbers of programs, in up to three directions.
        tensor_names: The kernel's first arguments. Each is the name of a tensor; or None, if the kernel is to do
            without this tensor; or a named tuple of names and None.
        numbers: All other arguments of the kernel, as they are.
        num_warps, num_stages: Triton's options, the number of warps and how many stages ahead a loop reads.

    Attributes:
        options: ``num_warps`` and ``num_stages``, by name.
        argument_readers: For each of the first arguments, a function that returns it, given {name: tensor}.
        compiled: Launches the compiled kernel on a GPU. It is None until `compile` has been called.
    """

    def __init__(
        self,
        kernel: Any,
        grid: Sequence[int],
        tensor_names: Sequence[Any],
        numbers: Sequence[Any],
        num_warps: int,
        num_stages: int = 1,
    ) -> None:
        self.kernel = kernel
        unused_directions = [1] * (3 - len(grid))
        self.grid = (*grid, *unused_directions)
        self.numbers = numbers
        self.options = {"num_warps": num_warps, "num_stages": num_stages}
        self.argument_readers = [make_argument_reader(names) for names in tensor_names]
        self.compiled: Callable[..., None] | None = None

    def args(self, tensors: dict[Any, Any]) -> list[Any]:
        """Returns the arguments of the kernel. `tensors`: what `name_tensors` returns, with all names of the launch."""
        return [read(tensors) for read in self.argument_readers] + [*self.numbers]

    def compile(self, arguments: Sequence[Any]) -> None:
        """Compiles the kernel for arguments of such types, loads it on the GPU and sets `options` and `compiled`.

        If its threads need many more registers than they have, it is compiled again with twice as many warps, so that
        each thread needs fewer. This ends at `MAX_WARPS`, or when the kernel with more warps does not fit the GPU.

        Raises:
            OutOfResources: The kernel does not fit the GPU even if it reads only one stage ahead.
            Exception: Anything else that Triton's compiler or the GPU's driver raises.
        """
        from triton.runtime.errors import OutOfResources

        loaded = self.load(arguments, **self.options)
        while loaded.num_spills > MAX_SPILLS and loaded.options["num_warps"] < MAX_WARPS:
            more_warps = {**loaded.options, "num_warps": 2 * loaded.options["num_warps"]}
            try:
                loaded = self.load(arguments, **more_warps)
            except OutOfResources:
                break  # the kernel with fewer warps is kept
        self.options = loaded.options
        self.compiled = loaded.launch

    def load(self, arguments: Sequence[Any], num_warps: int, num_stages: int) -> "LoadedKernel":
        """Returns the kernel, compiled with so many warps and loaded on the GPU.

        If it asks for more shared memory than there is, it is compiled again to read fewer stages ahead.

        Raises:
            OutOfResources: The kernel does not fit the GPU even if it reads only one stage ahead.
        """
        from triton.runtime.errors import OutOfResources

        options = {"num_warps": num_warps, "num_stages": num_stages}
        kernel = self.kernel.warmup(*arguments, grid=self.grid, **options)
        try:
            launch = kernel[self.grid]  # loads the kernel, and raises OutOfResources if it does not fit
        except OutOfResources:
            if num_stages == 1:
                raise
            return self.load(arguments, num_warps, num_stages - 1)
        return LoadedKernel(launch, options, num_spills=kernel.n_spills)


class LoadedKernel(NamedTuple):
    """A kernel that is compiled and loaded on a GPU."""

    launch: Callable[..., None]  # launches the kernel on its arguments
    options: dict[str, int]  # ``num_warps`` and ``num_stages``, with which it was compiled
    num_spills: int  # how many registers of a thread lie in memory, because the GPU has no more


def name_tensors(**tensors: Tensor | None) -> dict[Any, Any]:
    """Returns {name: tensor} for `Launch.args`.

    Where a kernel has no tensor, as there is no padding mask, the launch has None in place of a name. So the dictionary
    also has the item {None: None}.
    """
    return {None: None, **tensors}


def make_argument_reader(names: Any) -> Callable[[dict[Any, Any]], Any]:
    """Returns a function that takes {name: tensor} and returns the argument of a kernel that `names` stands for.

    Args:
        names: One of `Launch`'s `tensor_names`:

            - The name of a tensor. The function returns this tensor.
            - None. The function returns None, which `name_tensors` has put into the dictionary.
            - A named tuple of at least two names or None. The function returns the same kind of named tuple. For
              example, ``Tensors(v="packed", q=None, ...)`` becomes ``Tensors(v=<tensor>, q=None, ...)``.
    """
    if not isinstance(names, tuple):
        return itemgetter(names)
    structure = type(names)
    read_all = itemgetter(*names)  # returns a plain tuple

    def read_structure(tensors: dict[Any, Any]) -> Any:
        """Returns the named tuple of tensors."""
        # This makes the named tuple in a third of the time that ``structure(*read_all(tensors))`` takes.
        return tuple.__new__(structure, read_all(tensors))

    return read_structure


class Groups(NamedTuple):
    """How the sentences of a batch are divided among the programs of a kernel.

    A program computes a tile of a head in all sentences of a group. It adds up their gradients of what they share, such
    as the matrix r, and writes the sums into memory.
    """

    num_groups: int
    sentences_per_group: int
    tiles_per_head: int  # so many programs compute a head in a group
    # How many numbers the sums of a group consist of. The sums of group g begin at number ``g * numbers_per_group``.
    numbers_per_group: int

    def programs_per_head(self) -> int:
        """Returns how many programs compute a head. Each leaves a part of the gradients of the weights."""
        return self.num_groups * self.tiles_per_head


class PartialSums(NamedTuple):
    """The partial sums that the last launch of a backward pass adds up.

    There are two kinds of partial sums. The gradient of what all sentences share (w, c and r) is summed by groups of
    sentences. The gradient of a weight is one number for each head; every program of a launch leaves a *part* of it.
    """

    row_parts: int  # parts of the gradient of the outer product's weight in each head
    # How the kernel divides the batch that sums the gradients of w, of c, and of the weights of q, x and c.
    columns: Groups
    # How the kernel divides the batch that sums the gradients of r and of its weight.
    matrix: Groups


def gradient_of(name: str) -> str:
    """Returns the name of the gradient of a tensor: ``to_packed`` for ``packed``."""
    return f"to_{name}"


def sum_of(field: str) -> str:
    """Returns the name of the memory of the partial sums for a field of `Gradients`: ``sum_w`` for ``w``."""
    return f"sum_{field}"


class Plan:
    """The launches of all calls with a layout, and the memory that their sums need.

    Attributes:
        forward, backward: The launches of both passes.
        is_long: Whether they are the kernels for sentences of any length.
        has_unused_factors: Whether a part of the gradient of an outer product's factors is 0, and no kernel writes it.
        names: Names of the tensors that there are, in the order of `NAMES`.
        gradient_names: Names of their gradients.
        tensors: The kernels' `Tensors`, with names in the place of pointers.
        numbers: The kernels' `Numbers`.
        sums: {name of a piece of memory: how many numbers in fp32 it has}. The backward pass allocates all pieces side
            by side, in this order. Most have partial sums; ``delta`` has a number for each row of the logits.
        is_compiled, is_loaded: Whether the kernels are compiled, and whether they may be used; see `load`.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.is_compiled = False
        self.is_loaded = False
        self.is_long = not layout.is_short()
        # The left factor of an outer product may have features for columns beyond the sentence. No kernel writes their
        # gradient, which is 0.
        used_left_width = divide_up(layout.length, max(layout.right_width, 1))
        self.has_unused_factors = "pair" in layout.wanted and layout.left_width > used_left_width
        self.names = list_tensors(layout)
        self.gradient_names = [gradient_of(name) for name in self.names]
        self.tensors = self.name_pointers()
        self.numbers = self.make_numbers()
        self.sums: dict[str, int] = {}
        self.forward = self.plan_forward_long() if self.is_long else self.plan_forward_short()
        self.backward: list[Launch] = []
        if layout.wanted:
            partial_sums = self.add_backward_long() if self.is_long else self.add_backward_short()
            is_anything_shared = any(name in (*SHARED, "weights") for name in layout.wanted)
            if is_anything_shared:
                self.backward.append(self.plan_addition(partial_sums))

    def name_pointers(self) -> Any:
        """Returns the `Tensors` of the kernels, with names in the place of pointers; None where there is no tensor."""
        from .triton_common import Tensors

        layout = self.layout
        present = {name: name for name in self.names}
        queries = "packed" if layout.query_width else None
        # Several fields may have the same name. The kernels know where in the tensor each of these fields begins.
        return Tensors(
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

    def make_numbers(self) -> Any:
        """Returns the `Numbers` of the kernels."""
        from .triton_common import Numbers

        layout = self.layout
        return Numbers(
            T=layout.length,
            B=layout.bsz,
            H=layout.num_heads,
            left=layout.left_width,
            right=max(layout.right_width, 1),  # the kernels divide by it, even if there is no outer product
            w_rows=layout.shared_key_rows,
            c_columns=layout.row_columns,
            r_rows=layout.matrix_rows,
            r_columns=layout.matrix_columns,
            scale=layout.scale,
            dropout=layout.dropout,
        )

    def plan_launch(
        self,
        kernel: str,
        tile: "Tile",
        grid: Sequence[int],
        extra_tensors: Sequence[Any],
        extra_numbers: Sequence[int] = (),
    ) -> Launch:
        """Returns a launch of a kernel of `triton_attention`.

        All these kernels begin with the same arguments, and end with the same: the tensors of the call as one named
        tuple, the extra tensors, the numbers of the call one by one, the extra numbers, and the constants.

        Args:
            kernel: The name of the kernel.
            tile: The rows and columns of the logits that a program holds at once.
            grid: Numbers of programs, in up to three directions.
            extra_tensors: Names of the tensors that only this kernel has as arguments, in their order.
            extra_numbers: Numbers that only this kernel has as arguments, in their order.
        """
        from . import triton_attention

        return Launch(
            kernel=getattr(triton_attention, kernel),
            grid=grid,
            tensor_names=(self.tensors, *extra_tensors),
            numbers=(*self.numbers, *extra_numbers, make_constants(self.layout, tile)),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def plan_forward_short(self) -> Launch:
        """Returns the launch that writes ``out``, (T, B, H, d_h), for short sentences."""
        layout = self.layout
        # Four times the programs of a backward pass. They leave no sums, so that more groups take no more memory.
        max_groups = divide_up(4 * PROGRAMS, layout.num_heads)
        sentences_per_group, num_groups = share_out(layout.bsz, min(layout.bsz, max_groups))
        return self.plan_launch(
            kernel="forward_short",
            tile=Tile.for_whole_sentence(layout, is_forward=True),
            grid=(layout.num_heads, num_groups),
            extra_tensors=("out",),
            extra_numbers=(sentences_per_group,),
        )

    def plan_forward_long(self) -> Launch:
        """Returns the launch that writes ``out`` and ``lse``, (B, H, T) in fp32, for sentences of any length."""
        layout = self.layout
        tile = Tile.for_kernel("forward", layout)
        num_programs = layout.bsz * layout.num_heads * divide_up(layout.length, tile.rows)
        return self.plan_launch(kernel="forward", tile=tile, grid=(num_programs,), extra_tensors=("out", "lse"))

    def add_backward_short(self) -> PartialSums:
        """Adds the launch that computes all gradients of short sentences, and returns which partial sums it leaves.

        Each of its programs computes one head of a group of sentences: the gradients of these sentences, and for what
        all sentences share (keys w, row c, matrix r, and the weights of all summands) a sum over the group.
        """
        layout = self.layout
        groups = self.plan_groups(
            tiles_per_head=1,  # the whole sentence
            shared_tensors=self.wanted_tensors(SHARED),
            weights=self.wanted_weights(SUMMANDS),
        )
        launch = self.plan_launch(
            kernel="backward_short",
            tile=Tile.for_whole_sentence(layout, is_forward=False),
            grid=(layout.num_heads, groups.num_groups),
            extra_tensors=(self.gradients(), "grad"),
            extra_numbers=(groups.sentences_per_group, groups.numbers_per_group),
        )
        self.backward.append(launch)
        return PartialSums(row_parts=groups.programs_per_head(), columns=groups, matrix=groups)

    def add_backward_long(self) -> PartialSums:
        """Adds the launches for the gradients of sentences of any length, and returns which partial sums they leave.

        There are up to three launches, one for each place that sums go to: rows of a sentence, columns of a group of
        sentences, and tiles of the matrix. A launch is left out if none of its gradients is wanted.
        """
        layout = self.layout
        row_tile = Tile.for_kernel("rows", layout)
        column_tile = Tile.for_kernel("columns", layout)
        matrix_tile = Tile.for_kernel("matrix", layout)

        # 1. Memory for all sums. It comes before all launches, because each of them is given `gradients`, which names
        # the memory that is reserved so far.
        shared_by_columns = self.wanted_tensors(("w", "c"))
        weights_by_columns = self.wanted_weights(("q", "x", "c"))
        column_groups = self.plan_groups(
            tiles_per_head=divide_up(layout.length, column_tile.columns),
            shared_tensors=shared_by_columns,
            weights=weights_by_columns,
        )
        shared_by_matrix = self.wanted_tensors(("r",))
        weights_by_matrix = self.wanted_weights(("r",))
        matrix_groups = self.plan_groups(
            tiles_per_head=divide_up(layout.length, matrix_tile.rows) * divide_up(layout.length, matrix_tile.columns),
            shared_tensors=shared_by_matrix,
            weights=weights_by_matrix,
        )
        row_parts = layout.bsz * divide_up(layout.length, row_tile.rows)  # a part for each tile of each sentence
        self.reserve_parts(self.wanted_weights(("outer",)), row_parts)
        # All gradients but that of the values need rowsum(P * dP), which the first launch writes to `delta`. The values
        # are in "packed", and so are queries and keys if there are any.
        needs_delta = layout.query_width > 0 or any(name != "packed" for name in layout.wanted)
        if needs_delta:
            self.reserve("delta", layout.bsz * layout.num_heads * layout.length)

        # 2. The launches. The first one comes first, because the others read its `delta`.
        delta = "delta" if needs_delta else None
        if needs_delta:
            launch = self.plan_launch(
                kernel="backward_rows",
                tile=row_tile,
                grid=(row_parts * layout.num_heads,),
                extra_tensors=(self.gradients(), "out", delta, "lse", "grad"),
            )
            self.backward.append(launch)
        if shared_by_columns or weights_by_columns or "packed" in layout.wanted:
            self.backward.append(self.plan_launch_over_groups("backward_columns", column_tile, column_groups, delta))
        if shared_by_matrix or weights_by_matrix:
            self.backward.append(self.plan_launch_over_groups("backward_matrix", matrix_tile, matrix_groups, delta))
        return PartialSums(row_parts=row_parts, columns=column_groups, matrix=matrix_groups)

    def plan_launch_over_groups(self, kernel: str, tile: "Tile", groups: Groups, delta: str | None) -> Launch:
        """Returns a launch of a backward kernel that has a program for each head and tile of each group of sentences.

        Args:
            kernel: ``backward_columns`` or ``backward_matrix``.
            tile: The rows and columns of the logits that a program holds at once.
            groups: The groups that the sentences are shared out to.
            delta: The name of the memory with rowsum(P * dP), or None if it is not computed.
        """
        return self.plan_launch(
            kernel=kernel,
            tile=tile,
            grid=(groups.programs_per_head() * self.layout.num_heads,),
            extra_tensors=(self.gradients(), delta, "lse", "grad"),
            extra_numbers=(groups.sentences_per_group, groups.numbers_per_group),
        )

    def plan_addition(self, partial_sums: PartialSums) -> Launch:
        """Returns the last launch of a backward pass, which adds up the partial sums of all other launches.

        The results are the gradients of the shared keys w, of the row c, of the matrix r and of the weights.
        """
        from .triton_sums import AdditionBlocks, Totals, add

        layout = self.layout
        totals = Totals(
            w=self.wanted_gradient_of("w"),
            c=self.wanted_gradient_of("c"),
            r=self.wanted_gradient_of("r"),
            weights=self.wanted_gradient_of("weights"),
        )
        no_tile = Tile(rows=16, columns=16, warps=4)  # the kernel is given a tile as all kernels are, but reads none
        blocks = AdditionBlocks(
            HEADS=power_of_2(layout.num_heads),
            BLOCK=ADDITION_BLOCK,
            GROUPS=GROUPS_AT_ONCE,
            DISTANCES=DISTANCES_BLOCK,
        )
        return Launch(
            kernel=add,
            grid=(self.count_programs_of_addition(),),
            tensor_names=(totals, self.gradients()),
            numbers=(*self.make_numbers_of_addition(partial_sums), make_constants(layout, no_tile), *blocks),
            num_warps=4,
        )

    def make_numbers_of_addition(self, partial_sums: PartialSums) -> Any:
        """Returns the `AdditionNumbers` of the kernel `add`: the sizes of the gradients and of their partial sums."""
        from .triton_sums import AdditionNumbers

        layout = self.layout
        columns = partial_sums.columns
        matrix = partial_sums.matrix
        return AdditionNumbers(
            H=layout.num_heads,
            T=layout.length,
            column_groups=columns.num_groups,
            column_size=columns.numbers_per_group,
            matrix_groups=matrix.num_groups,
            matrix_size=matrix.numbers_per_group,
            w_rows=layout.shared_key_rows,
            w_columns=layout.shared_width,
            c_rows=1,
            c_columns=layout.row_columns,
            r_rows=layout.matrix_rows,
            r_columns=layout.matrix_columns,
            row_parts=partial_sums.row_parts,
            column_parts=columns.programs_per_head(),
            matrix_parts=matrix.programs_per_head(),
        )

    def count_programs_of_addition(self) -> int:
        """Returns the number of programs of the kernel `add` of `triton_sums`, which adds up partial sums.

        A program writes a block of numbers of the gradient of w, c or r, or the gradients of one weight in all heads.
        """
        layout = self.layout
        num_heads = layout.num_heads
        wanted = layout.wanted
        num_programs = 0
        if "w" in wanted:
            num_programs += divide_up(num_heads * layout.shared_key_rows * layout.shared_width, ADDITION_BLOCK)
        if "c" in wanted:
            num_programs += divide_up(num_heads * layout.row_columns, ADDITION_BLOCK)
        if "r" in wanted:
            block = DISTANCES_BLOCK if layout.is_by_distance else ADDITION_BLOCK
            num_programs += divide_up(num_heads * layout.matrix_rows * layout.matrix_columns, block)
        if "weights" in wanted:
            num_programs += layout.number_of_weights
        return num_programs

    def wanted_gradient_of(self, name: str | None) -> str | None:
        """Returns the name of the gradient of a tensor; None if it is not wanted, or if there is no tensor."""
        if name is None or name not in self.layout.wanted:
            return None
        return gradient_of(name)

    def wanted_tensors(self, names: Sequence[str]) -> list[str]:
        """Returns those of the tensors that need a gradient."""
        return [name for name in names if name in self.layout.wanted]

    def wanted_weights(self, summands: Sequence[str]) -> list[str]:
        """Returns those of the summands that have a weight which needs a gradient."""
        if "weights" not in self.layout.wanted:
            return []
        return [summand for summand in summands if getattr(self.layout.weight_rows, summand) >= 0]

    def plan_groups(self, tiles_per_head: int, shared_tensors: Sequence[str], weights: Sequence[str]) -> Groups:
        """Divides the sentences among the programs of a kernel, and reserves memory for the partial sums.

        Args:
            tiles_per_head: How many programs of the kernel compute a head in a group.
            shared_tensors: Those of w, c and r whose gradients the kernel sums.
            weights: Names of the summands whose weights' gradients the kernel sums.
        """
        bsz = self.layout.bsz
        # Each summand but the product of queries and keys ("q") has something that the sentences of a group share, and
        # that a program reads once for all of them.
        has_shared_tensors = bool(shared_tensors) or any(summand != "q" for summand in weights)
        if has_shared_tensors:
            max_groups = self.count_groups_of_busy_gpu(tiles_per_head)
        else:
            max_groups = bsz  # each sentence is a group
        sentences_per_group, num_groups = share_out(bsz, min(bsz, max_groups))
        groups = Groups(
            num_groups=num_groups,
            sentences_per_group=sentences_per_group,
            tiles_per_head=tiles_per_head,
            numbers_per_group=self.reserve_sums(shared_tensors, num_groups),
        )
        self.reserve_parts(weights, groups.programs_per_head())
        return groups

    def count_groups_of_busy_gpu(self, tiles_per_head: int) -> int:
        """Returns the number of groups that keeps a GPU busy. More groups would only take more memory."""
        # Programs for short sentences have little work, so there are twice as many.
        num_programs = PROGRAMS if self.layout.length > 32 else 2 * PROGRAMS
        return max(1, num_programs // (self.layout.num_heads * tiles_per_head))

    def reserve_sums(self, names: Sequence[str], num_groups: int) -> int:
        """Reserves memory for the sums of shared tensors, and returns how many numbers the sums of one group have.

        The sums of a group lie side by side, and so do the groups. For w and c and three groups, the memory is

            w0 c0 w1 c1 w2 c2

        A kernel is given the beginnings of w0 and c0. It finds those of group g by adding ``g * numbers_per_group``.
        So only w0 and c0 have names: ``sum_w`` is w0, and ``sum_c`` is all the rest.

        Args:
            names: Some of w, c and r.
            num_groups: The number of groups of sentences.
        """
        if not names:
            return 0
        layout = self.layout
        sizes = {
            "w": layout.num_heads * layout.length * layout.shared_width,
            "c": layout.num_heads * layout.length,
            "r": layout.num_heads * layout.length * layout.length,
        }
        for name in names:
            self.reserve(sum_of(name), sizes[name])
        numbers_per_group = sum(self.sums[sum_of(name)] for name in names)
        # The sums of the first group are followed by all other groups, which belong to the last name.
        last_name = sum_of(names[-1])
        self.sums[last_name] += (num_groups - 1) * numbers_per_group
        return numbers_per_group

    def reserve_parts(self, weights: Sequence[str], num_parts: int) -> None:
        """Reserves memory for the parts of the gradients of weights, (num_parts, H) for each weight.

        Args:
            weights: The names of the summands that have the weights.
            num_parts: How many programs write a part for each head.
        """
        for summand in weights:
            self.reserve(sum_of(f"a_{summand}"), num_parts * self.layout.num_heads)

    def reserve(self, name: str, number: int) -> None:
        """Reserves memory for so many numbers, in multiples of the 16 bytes that kernels are compiled for."""
        self.sums[name] = divide_up(number, 4) * 4  # a number in fp32 has 4 bytes

    def gradients(self) -> Any:
        """Returns the `Gradients` of the kernels, with names in the place of pointers.

        For example, ``Gradients(v="to_packed", w="sum_w", ...)``: the gradient of the values is written into
        ``to_packed``, which is the gradient of the tensor ``packed``. The gradient of the shared keys w is a sum over
        the sentences, and partial sums are written into the memory that `reserve` has reserved as ``sum_w``. A field
        is None if the gradient is not wanted.
        """
        from .triton_common import Gradients

        names: dict[str, str | None] = dict.fromkeys(Gradients._fields)
        # Each sentence has these gradients for itself. They are written into the gradient of their tensor.
        for field in BY_SENTENCE:
            tensor_name = getattr(self.tensors, field)
            names[field] = self.wanted_gradient_of(tensor_name)
        # All other gradients are written as partial sums, if memory is reserved for them.
        for field in Gradients._fields:
            if sum_of(field) in self.sums:
                names[field] = sum_of(field)
        return Gradients(**names)


def list_tensors(layout: Layout) -> list[str]:
    """Returns the names of the tensors that a call has, in the order of `NAMES`."""
    # For each tensor, a size that is 0 if there is no such tensor.
    sizes = {
        "packed": layout.value_width,
        "x": layout.shared_width,
        "w": layout.shared_width,
        "pair": layout.right_width,
        "c": layout.row_columns,
        "r": layout.matrix_columns,
        "weights": layout.number_of_weights,
    }
    return [name for name in NAMES if sizes[name] > 0]


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
        elif is_forward and (len(layout.summands_with_tiles()) > 1 or layout.right_width > 0):
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
        if len(layout.summands_with_tiles()) > 2:
            tile = Tile.for_many_summands(kernel, layout)
        else:
            tile = Tile.for_few_summands(kernel, layout)
        # A tile need not be larger than the sentence.
        longest_side = power_of_2(layout.length)
        return tile._replace(rows=min(tile.rows, longest_side), columns=min(tile.columns, longest_side))

    @staticmethod
    def for_many_summands(kernel: str, layout: Layout) -> "Tile":
        """Returns a small tile, because the registers hold one for each summand of the logits."""
        has_outer_product = layout.right_width > 0
        side = 16 if has_outer_product else 32
        stages = 3 if kernel == "rows" else 2
        return Tile(rows=side, columns=side, warps=4, stages=stages)

    @staticmethod
    def for_few_summands(kernel: str, layout: Layout) -> "Tile":
        """Returns the tile of a kernel for logits of one or two summands."""
        has_queries = layout.query_width > 0
        has_shared_keys = layout.shared_width > 0
        has_outer_product = layout.right_width > 0
        square = Tile(rows=64, columns=64, warps=4, stages=2)
        tall = Tile(rows=64, columns=32, warps=4, stages=3)
        if kernel == "forward":
            return tall if has_shared_keys or has_outer_product else square
        if kernel == "rows":
            return tall
        if kernel == "columns":
            if has_shared_keys:
                return Tile(rows=32, columns=64, warps=4, stages=3)
            if not has_queries:
                return Tile(rows=32, columns=64, warps=4, stages=2)
        return square


def divide_up(n: int, m: int) -> int:
    """Returns n / m, rounded up."""
    return -(-n // m)


def share_out(bsz: int, groups: int) -> tuple[int, int]:
    """Returns how many sentences a group has, and how many groups there are: up to `groups`, none of them empty.

    For example, 10 sentences in up to 4 groups are 3 in each group, and the last group has 1. In up to 6 groups, they
    are 2 in each of 5 groups.
    """
    sentences_per_group = divide_up(bsz, groups)
    return sentences_per_group, divide_up(bsz, sentences_per_group)


def power_of_2(n: int) -> int:
    """Returns the smallest power of two that is at least n, and at least 16, as the products of tiles ask for."""
    return 1 << max(4, (n - 1).bit_length())


def make_constants(layout: Layout, tile: Tile) -> Any:
    """Returns the `Constants` that the kernels of a call are compiled for, in Triton's form."""
    from .triton_common import Constants

    # If all widths are multiples of 8, so are all strides, and the kernels read 8 numbers at once.
    widths = (layout.value_width, layout.query_width, layout.shared_width)
    are_multiples_of_8 = all(width % 8 == 0 for width in widths)
    dtype_of_packed, *_ = layout.dtypes
    constants = Constants(
        D=layout.value_width,
        D_BLOCK=power_of_2(layout.value_width),
        Q=layout.query_width,
        Q_BLOCK=power_of_2(layout.query_width),
        X=layout.shared_width,
        X_BLOCK=power_of_2(layout.shared_width),
        FACTOR=power_of_2(width_of_factors(layout)),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        UNIT=8 if are_multiples_of_8 else 1,
        CAUSAL=layout.is_causal,
        DIAGONALS=layout.is_by_distance,
        PRECISION="ieee" if dtype_of_packed == torch.float32 else "tf32",
        A_Q=layout.weight_rows.q,
        A_X=layout.weight_rows.x,
        A_OUTER=layout.weight_rows.outer,
        A_C=layout.weight_rows.c,
        A_R=layout.weight_rows.r,
    )
    return as_constexpr(constants)


def width_of_factors(layout: Layout) -> int:
    """Returns the width that holds either factor of an outer product; 0 without an outer product.

    With `right_width` right features, the sentence needs ``length / right_width`` left features, rounded up.
    """
    if layout.right_width == 0:
        return 0
    used_left_width = divide_up(layout.length, layout.right_width)
    return max(layout.right_width, used_left_width)


@cache
def as_constexpr(constants: Any) -> Any:
    """Returns `Constants` in Triton's form, which takes a while to make.

    There are few different ones, or there would be many kernels.
    """
    from triton import language

    return type(constants)(*map(language.constexpr, constants))
