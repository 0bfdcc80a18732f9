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
        tensor_names: The first arguments: names of tensors, None, or structures (named tuples) of these.
        numbers: All other arguments.
        num_warps, num_stages: Triton's options, the number of warps and how many stages ahead a loop reads.
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
        self.readers = [make_reader(names) for names in tensor_names]
        self.compiled: Callable[..., None] | None = None  # the loaded kernel, on a GPU

    def args(self, tensors: dict[Any, Any]) -> list[Any]:
        """Returns the arguments of the kernel. `tensors`: what `name_tensors` returns, with all names of the launch."""
        return [read(tensors) for read in self.readers] + [*self.numbers]

    def compile(self, arguments: Sequence[Any]) -> None:
        """Compiles the kernel for arguments of such types, and loads it on the GPU.

        If its threads need many more registers than they have, it is compiled again with twice as many warps, so that
        each thread needs fewer. This ends when the kernel with more warps does not fit the GPU.

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

        while True:
            options = {"num_warps": num_warps, "num_stages": num_stages}
            kernel = self.kernel.warmup(*arguments, grid=self.grid, **options)
            try:
                launch = kernel[self.grid]  # loads the kernel, and raises OutOfResources if it does not fit
                return LoadedKernel(launch, options, num_spills=kernel.n_spills)
            except OutOfResources:
                if num_stages == 1:
                    raise
                num_stages -= 1


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


def make_reader(names: Any) -> Callable[[dict[Any, Any]], Any]:
    """Returns a function that takes the result of `name_tensors` and returns the tensor of one name.

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

    There are two kinds of partial sums. The gradient of what all sentences share (w, c and r) is summed by groups of
    sentences. The gradient of a weight is one number for each head; every program of a launch leaves a *part* of it.
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
        most = divide_up(4 * PROGRAMS, layout.num_heads)
        sentences, groups = share_out(layout.bsz, min(layout.bsz, most))
        tile = Tile.for_whole_sentence(layout, is_forward=True)
        return self.plan_launch(
            kernel="forward_short",
            tile=tile,
            grid=(layout.num_heads, groups),
            extra_tensors=("out",),
            extra_numbers=(sentences,),
        )

    def plan_forward_long(self) -> Launch:
        """Returns the launch that writes ``out`` and ``lse``, (B, H, T) in fp32, for sentences of any length."""
        layout = self.layout
        tile = Tile.for_kernel("forward", layout)
        programs = layout.bsz * layout.num_heads * divide_up(layout.length, tile.rows)
        return self.plan_launch(kernel="forward", tile=tile, grid=(programs,), extra_tensors=("out", "lse"))

    def add_backward_short(self) -> Addition:
        """Adds the launch that computes all gradients of short sentences.

        Each of its programs computes one head of a group of sentences: the gradients of these sentences, and for what
        all sentences share (keys w, row c, matrix r, and the weights of all summands) a sum over the group.

        Returns:
            the sums that it leaves in memory, which a last launch adds up over the groups.
        """
        layout = self.layout
        groups = self.plan_groups(
            programs_per_group=1,
            sums=self.wanted_sums(SHARED),
            weights=self.wanted_weights(SUMMANDS),
        )
        launch = self.plan_launch(
            kernel="backward_short",
            tile=Tile.for_whole_sentence(layout, is_forward=False),
            grid=(layout.num_heads, groups.number),
            extra_tensors=(self.gradients(), "grad"),
            extra_numbers=(groups.sentences, groups.size),
        )
        self.backward.append(launch)
        # For each head, one program computes all gradients of a group. So it leaves one part of each weight's gradient.
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
                extra_tensors=(self.gradients(), "out", delta, "lse", "grad"),
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
            extra_tensors=(self.gradients(), delta, "lse", "grad"),
            extra_numbers=(groups.sentences, groups.size),
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
        heads_block = power_of_2(layout.num_heads)
        blocks = (heads_block, ADDITION_BLOCK, GROUPS_AT_ONCE, DISTANCES_BLOCK)
        partial_sums = self.gradients()
        # The arguments are in the order in which the kernel `add` has them.
        return Launch(
            kernel=add,
            grid=(self.count_programs_of_addition(),),
            tensor_names=(totals, partial_sums),
            numbers=(*numbers, constants, *blocks),
            num_warps=4,
        )

    def count_programs_of_addition(self) -> int:
        """Returns the number of programs of the kernel `add` of `triton_sums`, which adds up partial sums.

        A program writes a block of numbers of the gradient of w, c or r, or the gradients of one weight in all heads.
        """
        layout = self.layout
        # How many numbers the gradient of each shared tensor has.
        sizes = {
            "w": layout.num_heads * layout.shared_key_rows * layout.shared_width,
            "c": layout.num_heads * layout.row_columns,
            "r": layout.num_heads * layout.matrix_rows * layout.matrix_columns,
        }
        blocks = {"w": ADDITION_BLOCK, "c": ADDITION_BLOCK, "r": ADDITION_BLOCK}
        if layout.is_by_distance:
            blocks["r"] = DISTANCES_BLOCK  # each number is the sum of a diagonal, which is much more work
        num_programs = sum(divide_up(sizes[name], blocks[name]) for name in self.wanted_sums(SHARED))
        if "weights" in layout.wanted:
            num_programs += layout.number_of_weights
        return num_programs

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

    def plan_groups(self, programs_per_group: int, sums: Sequence[str], weights: Sequence[str]) -> Groups:
        """Shares out the sentences to the programs of a kernel, and reserves the memory of their partial sums.

        Args:
            programs_per_group: Programs of the kernel for each head of a group: the number of its tiles.
            sums: Those of the shared tensors w, c and r whose gradients the kernel sums.
            weights: Names of the summands whose weights' gradients the kernel sums.
        """
        bsz = self.layout.bsz
        # Each summand but the product of queries and keys ("q") has something that the sentences of a group share.
        has_shared_tensors = bool(sums) or any(name != "q" for name in weights)
        if has_shared_tensors:
            max_groups = self.count_groups_of_busy_gpu(programs_per_group)
        else:
            max_groups = bsz  # each sentence is a group
        num_sentences, num_groups = share_out(bsz, min(bsz, max_groups))
        size = self.reserve_sums(sums, num_groups)
        for name in weights:
            num_parts = num_groups * programs_per_group
            self.reserve(f"sum_a_{name}", num_parts * self.layout.num_heads)
        return Groups(num_sentences, size, num_groups)

    def count_groups_of_busy_gpu(self, programs_per_group: int) -> int:
        """Returns the number of groups that keeps a GPU busy. More groups would only take more memory."""
        # Programs for short sentences have little work, so there are twice as many.
        num_programs = PROGRAMS if self.layout.length > 32 else 2 * PROGRAMS
        return max(1, num_programs // (self.layout.num_heads * programs_per_group))

    def reserve_sums(self, names: Sequence[str], num_groups: int) -> int:
        """Reserves the memory of the sums of shared tensors, and returns how many numbers a group has.

        The sums of all tensors lie side by side for each group: for w and c and three groups, they are w c w c w c. A
        kernel is given the beginnings of the first w and of the first c, and finds those of the next group so many
        numbers later as a group has. Here, the name ``sum_w`` stands for the first w, and ``sum_c``, the last name, for
        all the rest.
        """
        layout = self.layout
        sizes = {
            "w": layout.num_heads * layout.length * layout.shared_width,
            "c": layout.num_heads * layout.length,
            "r": layout.num_heads * layout.length * layout.length,
        }
        for name in names:
            self.reserve(f"sum_{name}", sizes[name])
        size_of_group = sum(self.sums[f"sum_{name}"] for name in names)
        if names:
            last_name = f"sum_{names[-1]}"
            self.sums[last_name] += (num_groups - 1) * size_of_group
        return size_of_group

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
        # Each sentence has these gradients for itself. They are written into the gradient of their tensor.
        for field in BY_SENTENCE:
            tensor_name = getattr(self.tensors, field)
            if tensor_name in self.layout.wanted:
                names[field] = f"to_{tensor_name}"
        # The kernels write all other gradients as partial sums. The field "w" has its sums in the memory "sum_w".
        for memory_name in self.sums:
            is_gradient = memory_name != "delta"  # which is rowsum(P * dP), computed by one kernel for the others
            if is_gradient:
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
        if len(layout.tiles()) > 2:
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
        if kernel == "columns" and has_shared_keys:
            return Tile(rows=32, columns=64, warps=4, stages=3)
        if kernel == "columns" and not has_queries:
            return Tile(rows=32, columns=64, warps=4, stages=2)
        return square


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

    wider_factor = 0
    if layout.right_width:
        # Each left feature is for `right_width` columns of an outer product. The kernels pad both factors to one
        # width, which depends on the wider factor.
        left_width = divide_up(layout.length, layout.right_width)
        wider_factor = max(layout.right_width, left_width)
    # If all widths are multiples of 8, the kernels read 8 numbers at once.
    widths = (layout.value_width, layout.query_width, layout.shared_width)
    are_multiples_of_8 = all(width % 8 == 0 for width in widths)
    dtype_of_packed = layout.dtypes[0]
    constants = Constants(
        D=layout.value_width,
        D_BLOCK=power_of_2(layout.value_width),
        Q=layout.query_width,
        Q_BLOCK=power_of_2(layout.query_width),
        X=layout.shared_width,
        X_BLOCK=power_of_2(layout.shared_width),
        FACTOR=power_of_2(wider_factor),
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


@cache
def as_constexpr(constants: Any) -> Any:
    """Returns `Constants` in Triton's form, which takes a while to make.

    There are few different ones, or there would be many kernels.
    """
    from triton import language

    return type(constants)(*map(language.constexpr, constants))
