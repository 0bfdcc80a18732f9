"""The launches of the Triton kernels for a call: which kernels, with how many programs, tiles and numbers.

All of this follows from the sizes of the call. So all calls of the same sizes share their launches, and each call only
adds its tensors.

A program is a kernel's work that a GPU runs in parallel with other programs. It computes a tile: some rows and some
columns of the logits of a head.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from .arguments import (
    SHARED_TENSORS,
    SUMMANDS,
    AdditionBlocks,
    AdditionNumbers,
    CallNumbers,
    CallTensors,
    Constants,
    GroupNumbers,
    PassTensors,
    WeightRows,
)

MAX_SPILLS = 100  # registers of a thread that may lie in memory: up to so many, more warps were slower on an H100
MAX_WARPS = 8
MAX_PLANS = 4096  # so many plans are kept
PROGRAMS = 264  # a backward pass aims at this number of programs: two for each of an H100's 132 multiprocessors
# The last launch of a backward pass adds up the sums of groups of sentences. Each of its programs writes this many
# numbers of a gradient.
ADDITION_BLOCK = 256
# If the matrix is given by its values by distance, a program writes fewer numbers, because each one is the sum of a
# diagonal.
DISTANCES_BLOCK = 16
GROUPS_AT_ONCE = 4  # how many groups a program of the last launch reads at once


class Layout(NamedTuple):
    """Everything that the launches of a call depend on. The names of summands and tensors are those of `arguments`."""

    device: torch.device
    dtypes: CallTensors  # the type of each tensor, or None if there is no such tensor
    length: int  # tokens of each sentence, T
    bsz: int  # sentences, B
    num_heads: int  # H
    value_width: int  # features of a value in each head
    weight_rows: WeightRows
    is_causal: bool
    has_dropout: bool  # whether the kernels are compiled with code for dropout
    dropout: float  # the probability of dropping a weight, a number that such kernels are given
    wanted: tuple[str, ...]  # names of the tensors that need a gradient
    # The sizes of a summand that does not occur are 0.
    query_width: int = 0  # features of a query, and of a key that differs by sentence
    scale: float = 1.0  # the factor that the product of queries and keys is multiplied by
    dense_width: int = 0  # features of dense_query and dense_key
    dense_key_rows: int = 0  # rows that the parameter with dense_key has in each head, at least T
    left_width: int = 0  # features of the left factor of the outer product
    right_width: int = 0  # features of the right factor
    bias_row_columns: int = 0  # columns that the parameter with the bias_row has, at least T
    matrix_rows: int = 0  # rows and columns that the parameter with the matrix has in each head
    matrix_columns: int = 0
    is_by_distance: bool = False  # the matrix is given by its values by distance, 2 m + 1 for each head
    number_of_weights: int = 0  # M

    def summands_with_tiles(self) -> list[str]:
        """Returns the summands of the logits that have a number for each row and column: all but the bias_row.

        A program holds a tile of each of them in registers.
        """
        sizes = {
            "product": self.query_width,
            "dense": self.dense_width,
            "outer": self.right_width,
            "matrix": self.matrix_columns,
        }
        return [summand for summand, size in sizes.items() if size > 0]

    def is_short(self) -> bool:
        """Returns whether the kernels for short sentences compute the call. Their tile is a whole sentence.

        The registers have to hold a tile of each summand. Compiling has shown what fits:

        =============  ========================  =======================================
        tokens         features of a head        summands that need a tile
        =============  ========================  =======================================
        up to 32       up to 64                  up to three
        up to 32       more than 64              one: `product`, `dense` or `matrix`
        33 to 64       16, 32 or 64              one: `product`, `dense` or `matrix`
        33 to 64       others up to 64           one: `product` or `matrix`
        =============  ========================  =======================================

        The last row differs because other widths are padded to the next power of two, which takes registers.
        """
        summands = self.summands_with_tiles()
        features = max(self.value_width, self.query_width, self.dense_width)
        # One branch for each row of the table, in its order.
        if self.length <= 32 and features <= 64:
            return len(summands) <= 3
        if self.length <= 32:
            return summands in (["product"], ["dense"], ["matrix"])
        if self.length <= 64 and features in (16, 32, 64):
            return summands in (["product"], ["dense"], ["matrix"])
        if self.length <= 64 and features <= 64:
            return summands in (["product"], ["matrix"])
        return False

    def kind(self) -> "Kind":
        """Returns the kind of the call. Only the first call of each kind is compared with the definition."""
        return Kind(
            device=self.device,
            dtypes=self.dtypes,
            rounded_length=round_length(self.length),
            num_heads=self.num_heads,
            value_width=self.value_width,
            weight_rows=self.weight_rows,
            is_causal=self.is_causal,
            has_dropout=self.has_dropout,
            wanted=self.wanted,
            query_width=self.query_width,
            scale=self.scale,
            dense_width=self.dense_width,
            right_width=self.right_width,
            factor_block=power_of_2(width_of_factors(self)),
            is_by_distance=self.is_by_distance,
            number_of_weights=self.number_of_weights,
        )


def round_length(length: int) -> int:
    """Returns a length rounded up to 16, 32, 64 or 128. Sentences of the same rounded length have the same tiles.

    For example, 17 tokens are rounded up to 32. Above 64 tokens, every length becomes 128, because longer sentences are
    divided into tiles of a fixed size.
    """
    return min(power_of_2(length), 128)


class Kind(NamedTuple):
    """The kind of a call. Calls of the same kind have the same compiled kernels.

    All fields but `rounded_length` and `factor_block` are fields of `Layout`. What is left out differs from batch to
    batch, and no kernel is compiled for it, such as the number of sentences.
    """

    device: torch.device
    dtypes: CallTensors
    rounded_length: int  # in place of the length
    num_heads: int
    value_width: int
    weight_rows: WeightRows
    is_causal: bool
    has_dropout: bool
    wanted: tuple[str, ...]
    query_width: int
    scale: float
    dense_width: int
    right_width: int
    factor_block: int  # in place of the left width: a power of two that holds either factor of the outer product
    is_by_distance: bool
    number_of_weights: int


class Launch:
    """A kernel with its number of programs and with all its arguments but the tensors, which each call adds.

    For example, a kernel has the arguments ``(out, lse, T, B)``. Its launch is made with the numbers
    ``{"B": 3, "T": 2}``. For each call, `args` reads the tensors ``out`` and ``lse`` from its `PassTensors`.

    Args:
        kernel: The kernel, from `triton_attention` or `triton_sums`. Its first arguments are two or more fields of
            `PassTensors`.
        grid: Numbers of programs, in up to three directions.
        numbers: All other arguments of the kernel, by name.
        num_warps, num_stages: Triton's options, the number of warps and how many stages ahead a loop reads.

    Attributes:
        numbers: As given, in the order of the kernel's arguments.
        options: ``num_warps`` and ``num_stages``, by name.
        compiled: Launches the compiled kernel on a GPU. It is None until `compile` has been called.
    """

    def __init__(
        self, kernel: Any, grid: Sequence[int], numbers: dict[str, Any], num_warps: int, num_stages: int = 1
    ) -> None:
        """Stores the arguments, and finds out which tensors the kernel takes: its arguments that are no `numbers`.

        For example, the kernel ``(out, lse, T, B)`` with the numbers ``{"B": 3, "T": 2}`` takes the tensors ``out`` and
        ``lse``.
        """
        self.kernel = kernel
        unused_directions = [1] * (3 - len(grid))
        self.grid = (*grid, *unused_directions)
        self.options = {"num_warps": num_warps, "num_stages": num_stages}
        self.compiled: Callable[..., None] | None = None  # until `compile` is called
        num_tensors = len(kernel.arg_names) - len(numbers)
        tensor_names = kernel.arg_names[:num_tensors]  # ["out", "lse"]
        number_names = kernel.arg_names[num_tensors:]  # ["T", "B"]
        assert set(number_names) == set(numbers), "the tensors of a kernel have to be its first arguments"
        # A compiled kernel takes its arguments by position, so the numbers are sorted as the kernel has them.
        self.numbers = {name: numbers[name] for name in number_names}  # {"T": 2, "B": 3}
        # ``read_tensors(x)`` returns ``(x.out, x.lse)``. A loop over the names would be slower.
        assert num_tensors > 1, "an attrgetter of a single name returns no tuple"
        self.read_tensors: Callable[[PassTensors], tuple[Any, ...]] = attrgetter(*tensor_names)

    def args(self, tensors: PassTensors) -> list[Any]:
        """Returns all arguments of the kernel in its order: the tensors of a call, and the numbers of the launch."""
        return [*self.read_tensors(tensors), *self.numbers.values()]

    def compile(self, arguments: Sequence[Any]) -> None:
        """Compiles the kernel for arguments of such types, loads it on the GPU and sets `options` and `compiled`.

        If a thread needs many more registers than it has, they lie in slow memory ("spills"). Then the kernel is
        compiled again with twice as many warps, so that each thread needs fewer registers. This is repeated until there
        are at most `MAX_SPILLS` spills or at least `MAX_WARPS` warps, or until the kernel does not fit the GPU.

        Raises:
            OutOfResources: The kernel does not fit the GPU in any way.
            Exception: Anything else that Triton's compiler or the GPU's driver raises.
        """
        from triton.runtime.errors import OutOfResources

        loaded = self.load(arguments, **self.options)
        while loaded.num_spills > MAX_SPILLS and loaded.num_warps < MAX_WARPS:
            try:
                loaded = self.load(arguments, num_warps=2 * loaded.num_warps, num_stages=loaded.num_stages)
            except OutOfResources:
                break  # the kernel with fewer warps is kept
        self.options = {"num_warps": loaded.num_warps, "num_stages": loaded.num_stages}
        self.compiled = loaded.launch

    def load(self, arguments: Sequence[Any], num_warps: int, num_stages: int) -> "LoadedKernel":
        """Returns the kernel, compiled with a number of warps and loaded on the GPU.

        The more stages a loop reads ahead, the more shared memory the kernel needs. If the GPU has too little for 3
        stages, for example, the kernel is compiled for 2 stages, and then for 1.

        Raises:
            OutOfResources: The kernel does not fit the GPU even if it reads only one stage ahead.
        """
        from triton.runtime.errors import OutOfResources

        for stages in range(num_stages, 1, -1):
            try:
                return self.load_with_stages(arguments, num_warps, stages)
            except OutOfResources:
                continue
        return self.load_with_stages(arguments, num_warps, num_stages=1)

    def load_with_stages(self, arguments: Sequence[Any], num_warps: int, num_stages: int) -> "LoadedKernel":
        """Returns the kernel, compiled with these options and loaded on the GPU.

        Raises:
            OutOfResources: The kernel does not fit the GPU.
        """
        compiled = self.kernel.warmup(*arguments, grid=self.grid, num_warps=num_warps, num_stages=num_stages)
        # `warmup` only compiles. Triton loads the kernel when it is asked for the function that launches it.
        launch = compiled[self.grid]
        # Triton knows the number of spills only now that the kernel is loaded.
        return LoadedKernel(launch, num_warps, num_stages, num_spills=compiled.n_spills)


class LoadedKernel(NamedTuple):
    """A kernel that is compiled and loaded on a GPU."""

    launch: Callable[..., None]  # launches the kernel on its arguments
    num_warps: int
    num_stages: int
    num_spills: int  # how many registers of a thread lie in memory, because the GPU has no more


# ---- the launches of a layout


class Launches(NamedTuple):
    """The launches of both passes, and the memory that the backward pass needs."""

    forward: Launch
    backward: list[Launch]
    # {field of `PartialSums`: how many numbers in fp32 it has}. The pieces of memory lie side by side in this order.
    memory: dict[str, int]


class Plan:
    """The launches for all calls with the same layout.

    Attributes:
        layout: The layout.
        is_long: Whether the kernels are the ones for sentences of any length, and not the ones for short sentences.
        launches: The launches of the kernels.
        has_unused_factors: Whether the factors of an outer product have features for columns beyond the sentence. No
            kernel writes the gradient of these features, which is 0.
        is_compiled: Whether the kernels are compiled.
        is_loaded: Whether the kernels may be used.
    """

    def __init__(self, layout: Layout) -> None:
        """Plans the launches, whose kernels are neither compiled nor loaded."""
        self.layout = layout
        self.is_long = not layout.is_short()
        if self.is_long:
            self.launches = plan_long_sentences(layout)
        else:
            self.launches = plan_short_sentences(layout)
        self.has_unused_factors = "factors" in layout.wanted and has_unused_left_factors(layout)
        self.is_compiled = False
        self.is_loaded = False


find_plan = lru_cache(maxsize=MAX_PLANS)(Plan)  # for equal layouts the same plan


def has_unused_left_factors(layout: Layout) -> bool:
    """Returns whether the left factor of the outer product has features for columns beyond the sentence.

    For example, 3 left and 4 right features make 12 columns, 4 for each left feature. A sentence of 7 tokens has only 7
    columns, so that the last left feature is not used.
    """
    if layout.right_width == 0:
        return False  # there is no outer product
    used_left_features = divide_up(layout.length, layout.right_width)  # 2 in the example
    return layout.left_width > used_left_features


def plan_short_sentences(layout: Layout) -> Launches:
    """Returns the launches of the kernels for short sentences: one forward, and up to two backward.

    - `forward_short` writes the output.
    - `backward_short` writes the gradients of tensors that each sentence has for itself, such as its values. For
      tensors that all sentences share, and for the weights of a mixture, it writes partial sums of the gradients.
    - `add` adds up the partial sums. It is left out if there are none.
    """
    forward = plan_forward_short(layout)
    if not layout.wanted:  # no tensor needs a gradient
        return Launches(forward, backward=[], memory={})
    work = plan_work(
        layout,
        tiles_per_head=1,  # the tile is a whole sentence
        shared_tensors=SHARED_TENSORS,
        summands=SUMMANDS,
    )
    backward = [plan_backward_short(layout, work)]
    # For long sentences, three kernels write the partial sums. Here, one kernel does the work of all three.
    addition = plan_addition(layout, row_work=work, column_work=work, matrix_work=work)
    backward.extend(addition)
    return Launches(forward, backward, memory=work.memory)


def plan_forward_short(layout: Layout) -> Launch:
    """Returns the launch of the kernel that computes the output of short sentences.

    The batch is divided into groups of sentences. A program computes one head of all sentences of a group, one sentence
    after the other. For example, 1000 sentences with 8 heads are divided into 125 groups of 8 sentences. This makes
    125 * 8 = 1000 programs.
    """
    from .triton_attention import forward_short

    # The backward pass has fewer programs, as each needs memory for partial sums. These programs need no such memory.
    max_programs = 4 * PROGRAMS  # 1056
    max_groups = divide_up(max_programs, layout.num_heads)  # 132 in the example
    groups = divide_sentences(layout.bsz, max_groups)  # 125 groups of 8 sentences
    tile = Tile.for_whole_sentence(layout, is_forward=True)
    return Launch(
        kernel=forward_short,
        grid=(layout.num_heads, groups.num_groups),  # a program for each head in each group
        numbers={**make_numbers(layout, tile), "sentences_per_group": groups.sentences_per_group},
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def plan_backward_short(layout: Layout, work: "Work") -> Launch:
    """Returns the launch of the kernel that computes the gradients of short sentences.

    A program computes one head of all sentences of a group.

    Args:
        layout: The layout.
        work: How the batch is divided into groups of sentences, from `plan_work`.
    """
    from .triton_attention import backward_short

    tile = Tile.for_whole_sentence(layout, is_forward=False)
    return Launch(
        kernel=backward_short,
        grid=(layout.num_heads, work.groups.num_groups),  # a program for each head in each group
        numbers={**make_numbers(layout, tile), **work.group_numbers()},
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def plan_long_sentences(layout: Layout) -> Launches:
    """Returns the launches of the kernels for sentences of any length: one forward, and up to four backward.

    - `forward` writes the output.
    - `backward_rows` writes the gradients of queries, dense_query and factors, and ``delta``, which the next two
      kernels read.
    - `backward_columns` writes the gradients of values and keys, and partial sums of the gradients of dense_key,
      bias_row and weights.
    - `backward_matrix` writes partial sums of the gradients of the matrix and its weight.
    - `add` adds up the partial sums.

    A kernel of the backward pass is left out if no tensor needs the gradients that it computes.
    """
    forward = plan_forward_long(layout)
    if not layout.wanted:  # no tensor needs a gradient
        return Launches(forward, backward=[], memory={})
    row_work = plan_row_work(layout)
    column_work = plan_column_work(layout)
    matrix_work = plan_matrix_work(layout)
    # The kernels run in the order of this list.
    backward = []
    if needs_delta(layout):
        backward.append(plan_backward_rows(layout, row_work))  # comes first, because the next two kernels read `delta`
    values_need_gradient = "packed" in layout.wanted  # this tensor has the values, and perhaps queries and keys
    if values_need_gradient or column_work.leaves_sums():
        backward.append(plan_backward_columns(layout, column_work))
    if matrix_work.leaves_sums():
        backward.append(plan_backward_matrix(layout, matrix_work))
    addition = plan_addition(layout, row_work, column_work, matrix_work)  # comes last: it reads the partial sums
    backward.extend(addition)
    # A kernel that is left out has no memory.
    memory = {**column_work.memory, **matrix_work.memory, **row_work.memory}
    return Launches(forward, backward, memory)


def plan_forward_long(layout: Layout) -> Launch:
    """Returns the forward launch for sentences of any length. A program computes a tile of rows of one head.

    It writes ``out``, and ``lse``, the logarithm of the softmax's denominator for each row.
    """
    from .triton_attention import forward

    tile = Tile.for_kernel("forward", layout)
    tiles_of_sentence = divide_up(layout.length, tile.rows)
    return Launch(
        kernel=forward,
        grid=(layout.bsz * layout.num_heads * tiles_of_sentence,),
        numbers=make_numbers(layout, tile),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def plan_backward_rows(layout: Layout, work: "Work") -> Launch:
    """Returns the launch of the kernel that computes ``delta`` and the gradients of queries and other factors of rows.

    A program computes a tile of rows of one head in one sentence.

    Args:
        layout: The layout.
        work: How many programs compute a head, from `plan_row_work`.
    """
    from .triton_attention import backward_rows

    tile = Tile.for_kernel("rows", layout)
    num_programs = layout.num_heads * work.programs_per_head()
    return Launch(
        kernel=backward_rows,
        grid=(num_programs,),
        numbers=make_numbers(layout, tile),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def plan_backward_columns(layout: Layout, work: "Work") -> Launch:
    """Returns the launch of the kernel that computes the gradients of columns, such as those of values and keys.

    A program computes a tile of columns of one head in all sentences of a group.

    Args:
        layout: The layout.
        work: How the work is divided among programs, from `plan_column_work`.
    """
    from .triton_attention import backward_columns

    tile = Tile.for_kernel("columns", layout)
    num_programs = layout.num_heads * work.programs_per_head()
    return Launch(
        kernel=backward_columns,
        grid=(num_programs,),
        numbers={**make_numbers(layout, tile), **work.group_numbers()},
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def plan_backward_matrix(layout: Layout, work: "Work") -> Launch:
    """Returns the launch of the kernel that computes the gradient of the matrix.

    A program computes a tile of rows and columns of one head, and adds up the gradients of all sentences of a group.

    Args:
        layout: The layout.
        work: How the work is divided among programs, from `plan_matrix_work`.
    """
    from .triton_attention import backward_matrix

    tile = Tile.for_kernel("matrix", layout)
    num_programs = layout.num_heads * work.programs_per_head()
    return Launch(
        kernel=backward_matrix,
        grid=(num_programs,),
        numbers={**make_numbers(layout, tile), **work.group_numbers()},
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def make_numbers(layout: Layout, tile: "Tile") -> dict[str, Any]:
    """Returns {name: value} for the arguments of every kernel of `triton_attention` that are no tensors.

    These are the fields of `CallNumbers`, and ``constants``.
    """
    numbers = CallNumbers(
        T=layout.length,
        B=layout.bsz,
        H=layout.num_heads,
        left_width=layout.left_width,
        right_width=max(layout.right_width, 1),  # the kernels divide by it, even if there is no outer product
        dense_key_rows=layout.dense_key_rows,
        bias_row_columns=layout.bias_row_columns,
        matrix_rows=layout.matrix_rows,
        matrix_columns=layout.matrix_columns,
        scale=layout.scale,
        dropout=layout.dropout,
    )
    return {**numbers._asdict(), "constants": make_constants(layout, tile)}


# ---- the work of the kernels of a backward pass


class SentenceGroups(NamedTuple):
    """The groups that a batch is divided into."""

    num_groups: int
    sentences_per_group: int  # the last group may have fewer


class Work(NamedTuple):
    """How a kernel of a backward pass divides its work among programs, and the memory for their partial sums.

    A program computes a tile of one head in all sentences of a group. If all sentences share a tensor, its gradient is
    a sum over sentences. The program writes the sum over its group, and the kernel `add` adds up the groups.
    """

    groups: SentenceGroups
    tiles_per_head: int  # programs for each head in each group
    numbers_per_group: int  # the size of a group's partial sums, in fp32 numbers, without the gradients of weights
    memory: dict[str, int]  # {field of `PartialSums`: its size in fp32 numbers}; empty if there are no partial sums

    def programs_per_head(self) -> int:
        """Returns the number of programs for each head, of all tiles and groups."""
        return self.groups.num_groups * self.tiles_per_head

    def leaves_sums(self) -> bool:
        """Returns whether the programs write anything to memory that later kernels read, such as partial sums."""
        return bool(self.memory)

    def group_numbers(self) -> dict[str, int]:
        """Returns {name: value} for two arguments of the kernel, ``sentences_per_group`` and ``numbers_per_group``."""
        numbers = GroupNumbers(
            sentences_per_group=self.groups.sentences_per_group,
            numbers_per_group=self.numbers_per_group,
        )
        return numbers._asdict()


def plan_row_work(layout: Layout) -> Work:
    """Returns the work of the kernel `backward_rows`. A program computes a tile of rows of one head in one sentence.

    For example, a batch of 10 sentences with 2 tiles each has 20 programs for each head. If an outer product has a
    weight in a mixture, each program writes a part of its gradient, which is a single number for each head. The kernel
    `add` adds up these 20 parts.
    """
    tile = Tile.for_kernel("rows", layout)
    tiles_per_head = divide_up(layout.length, tile.rows)  # 2 in the example
    programs_per_head = layout.bsz * tiles_per_head  # 10 * 2
    memory_of_weights = measure_weights(layout, summands=["outer"], num_parts=programs_per_head)
    memory_of_delta = measure_delta(layout)
    return Work(
        groups=SentenceGroups(num_groups=layout.bsz, sentences_per_group=1),  # each sentence is a group
        tiles_per_head=tiles_per_head,
        numbers_per_group=0,  # no tensor that all sentences share gets its gradient from this kernel
        memory={**memory_of_weights, **memory_of_delta},
    )


def plan_column_work(layout: Layout) -> Work:
    """Returns the work of the kernel `backward_columns`. A program computes a tile of columns of a head."""
    tile = Tile.for_kernel("columns", layout)
    return plan_work(
        layout,
        tiles_per_head=divide_up(layout.length, tile.columns),
        shared_tensors=["dense_key", "bias_row"],
        summands=["product", "dense", "bias_row"],
    )


def plan_matrix_work(layout: Layout) -> Work:
    """Returns the work of the kernel `backward_matrix`. A program computes a tile of rows and columns of a head."""
    tile = Tile.for_kernel("matrix", layout)
    tiles_in_a_column = divide_up(layout.length, tile.rows)
    tiles_in_a_row = divide_up(layout.length, tile.columns)
    return plan_work(
        layout,
        tiles_per_head=tiles_in_a_column * tiles_in_a_row,
        shared_tensors=["matrix"],
        summands=["matrix"],
    )


def plan_work(layout: Layout, tiles_per_head: int, shared_tensors: Sequence[str], summands: Sequence[str]) -> Work:
    """Returns how a kernel of a backward pass divides its work among programs, and the memory for their partial sums.

    The batch is divided into groups of sentences, and each head into tiles. A program computes one tile of one head in
    all sentences of one group. For example, 3 groups and 2 tiles make 6 programs for each head:

                  group 0     group 1     group 2
        tile 0    program 0   program 2   program 4
        tile 1    program 1   program 3   program 5

    The gradient of a tensor that all sentences share, such as a matrix, has a partial sum for each group, here 3. The
    tiles of a group write different places of it. The gradient of a weight of a mixture is a single number for each
    head, to which all tiles contribute. So it has a partial sum for each program, here 6.

    Args:
        layout: The layout.
        tiles_per_head: The number of tiles that the kernel divides a head of a sentence into.
        shared_tensors: The tensors that all sentences share and whose gradients the kernel computes, such as
            ["matrix"]. They are fields of `CallTensors`.
        summands: The summands of the logits (`SUMMANDS`) for whose weights the kernel computes gradients.
    """
    groups = choose_groups(layout, tiles_per_head, shared_tensors, summands)  # 3 groups in the example
    size_of_sums = measure_sums_of_group(layout, shared_tensors)  # {tensor: size of its partial sum in a group}
    memory_of_tensors = measure_memory_of_groups(size_of_sums, groups.num_groups)
    programs_per_head = groups.num_groups * tiles_per_head  # 6
    memory_of_weights = measure_weights(layout, summands, num_parts=programs_per_head)
    return Work(
        groups=groups,
        tiles_per_head=tiles_per_head,
        numbers_per_group=sum(size_of_sums.values()),
        memory={**memory_of_tensors, **memory_of_weights},
    )


def choose_groups(
    layout: Layout, tiles_per_head: int, shared_tensors: Sequence[str], summands: Sequence[str]
) -> SentenceGroups:
    """Returns the groups of sentences for a kernel. A program of the kernel computes all sentences of a group.

    Args:
        layout, tiles_per_head, shared_tensors, summands: As in `plan_work`.
    """
    if not gains_from_groups(layout, shared_tensors, summands):
        return SentenceGroups(num_groups=layout.bsz, sentences_per_group=1)  # each sentence is a group
    # Each group needs memory for its sums. So there are only as many groups as keep a GPU busy.
    max_groups = count_groups_of_busy_gpu(layout, tiles_per_head)
    return divide_sentences(layout.bsz, max_groups)


def gains_from_groups(layout: Layout, shared_tensors: Sequence[str], summands: Sequence[str]) -> bool:
    """Returns whether a kernel saves work or memory if each of its programs computes several sentences instead of one.

    It does if a gradient is a sum over sentences: the program adds up its sentences, and writes their sum once.

    Args:
        layout: The layout. Its field ``wanted`` has the names of the tensors that need a gradient.
        shared_tensors: The tensors that all sentences share and whose gradients the kernel computes, such as
            ["matrix"].
        summands: The summands of the logits for whose weights the kernel computes gradients, such as ["matrix"].
    """
    for name in shared_tensors:
        if name in layout.wanted:
            return True
    for summand in list_wanted_weights(layout, summands):
        # All sentences share the weights, too. But for the weight of ``product``, a group saves nothing, because each
        # sentence has queries and keys of its own.
        if summand != "product":
            return True
    return False


def count_groups_of_busy_gpu(layout: Layout, tiles_per_head: int) -> int:
    """Returns the number of groups that keeps a GPU busy. More groups would only take more memory."""
    # Programs for short sentences have little work, so there are twice as many.
    num_programs = PROGRAMS if layout.length > 32 else 2 * PROGRAMS
    return max(1, num_programs // (layout.num_heads * tiles_per_head))


def list_wanted_weights(layout: Layout, summands: Sequence[str]) -> list[str]:
    """Returns the summands, among the given ones, that have a weight whose gradient is needed."""
    if "weights" not in layout.wanted:
        return []
    row_of_summand = layout.weight_rows._asdict()  # -1 for a summand without a weight
    return [summand for summand in summands if row_of_summand[summand] >= 0]


def measure_sums_of_group(layout: Layout, shared_tensors: Sequence[str]) -> dict[str, int]:
    """Returns {tensor: size of a partial sum of its gradient in fp32 numbers}, for tensors whose gradient is needed.

    A partial sum is the gradient of one group of sentences. It has only the rows and columns that a sentence needs.
    """
    sizes = {
        "dense_key": layout.num_heads * layout.length * layout.dense_width,
        "bias_row": layout.num_heads * layout.length,
        "matrix": layout.num_heads * layout.length * layout.length,
    }
    return {name: align(sizes[name]) for name in shared_tensors if name in layout.wanted}


def measure_memory_of_groups(sum_sizes: dict[str, int], num_groups: int) -> dict[str, int]:
    """Returns {tensor: size}, how the memory for the partial sums of all groups is divided among the tensors.

    The memory has the sums of group 0, then the sums of group 1, and so on. For example, dense_key has 8 numbers,
    bias_row has 4, and there are 3 groups. The memory is divided into the pieces {"dense_key": 8, "bias_row": 28}:

        place    0             8            12            20           24            32           36
        sum      dense_key 0 | bias_row 0 | dense_key 1 | bias_row 1 | dense_key 2 | bias_row 2 |
        piece    dense_key   | bias_row                                                         |

    The pieces only tell a kernel where the sums of group 0 begin, here at 0 and 8. From there, it finds the sums of
    group g ``12 * g`` places later, even behind the end of a piece. So the last piece has all that follows.

    Args:
        sum_sizes: {tensor: size of its sum in one group}, in the order in which they lie in memory.
        num_groups: The number of groups.
    """
    if not sum_sizes:
        return {}
    size_of_group = sum(sum_sizes.values())  # 12
    size_of_other_groups = (num_groups - 1) * size_of_group  # 24
    pieces = dict(sum_sizes)
    last_tensor = list(pieces)[-1]
    pieces[last_tensor] += size_of_other_groups  # 4 + 24 = 28
    return pieces


def measure_weights(layout: Layout, summands: Sequence[str], num_parts: int) -> dict[str, int]:
    """Returns {field of `PartialSums`: size}, the memory for partial sums of the gradients of weights.

    For example, {"dense_weight": 160}, for 20 programs and 8 heads.

    Args:
        layout: The layout.
        summands: The summands of the logits for whose weights a kernel computes gradients.
        num_parts: The number of programs that write a partial sum for each head.
    """
    size = align(num_parts * layout.num_heads)
    return {f"{summand}_weight": size for summand in list_wanted_weights(layout, summands)}


def measure_delta(layout: Layout) -> dict[str, int]:
    """Returns {"delta": size}, the memory for a number for each row of the logits; {} if ``delta`` is not needed."""
    if not needs_delta(layout):
        return {}
    return {"delta": align(layout.bsz * layout.num_heads * layout.length)}


def needs_delta(layout: Layout) -> bool:
    """Returns whether any tensor but the values needs a gradient. All such gradients are computed from ``delta``."""
    if layout.query_width > 0:
        return len(layout.wanted) > 0  # `packed` has queries and keys besides the values
    return any(name != "packed" for name in layout.wanted)  # `packed` has the values alone


def align(size: int) -> int:
    """Returns the size of memory in fp32 numbers, rounded up to a multiple of 4 numbers, which are 16 bytes.

    The kernels are compiled for tensors whose memory begins at a multiple of 16 bytes.
    """
    return divide_up(size, 4) * 4


def plan_addition(layout: Layout, row_work: Work, column_work: Work, matrix_work: Work) -> list[Launch]:
    """Returns a list of the last launch of a backward pass, which adds up partial sums; [] if there are none.

    Args:
        layout: The layout.
        row_work: The work of the kernel that writes partial sums for the weight of ``outer``.
        column_work: The work of the kernel that writes partial sums for dense_key, for bias_row, and for the weights of
            product, dense and bias_row.
        matrix_work: The work of the kernel that writes partial sums for the matrix and its weight.
    """
    from .triton_sums import add

    num_programs = count_programs_of_addition(layout)
    if num_programs == 0:
        return []
    numbers = AdditionNumbers(
        H=layout.num_heads,
        T=layout.length,
        column_groups=column_work.groups.num_groups,
        column_numbers=column_work.numbers_per_group,
        matrix_groups=matrix_work.groups.num_groups,
        matrix_numbers=matrix_work.numbers_per_group,
        dense_key_rows=layout.dense_key_rows,
        dense_key_columns=layout.dense_width,
        bias_row_rows=1,
        bias_row_columns=layout.bias_row_columns,
        matrix_rows=layout.matrix_rows,
        matrix_columns=layout.matrix_columns,
        row_parts=row_work.programs_per_head(),
        column_parts=column_work.programs_per_head(),
        matrix_parts=matrix_work.programs_per_head(),
    )
    blocks = AdditionBlocks(
        HEADS=power_of_2(layout.num_heads),
        BLOCK=ADDITION_BLOCK,
        GROUPS=GROUPS_AT_ONCE,
        DISTANCES=DISTANCES_BLOCK,
    )
    any_tile = Tile(rows=16, columns=16, warps=4)  # this kernel reads the constants, but not the tile in them
    constants = make_constants(layout, any_tile)
    return [
        Launch(
            kernel=add,
            grid=(num_programs,),
            numbers={**numbers._asdict(), "constants": constants, **blocks._asdict()},
            num_warps=4,
        )
    ]


def count_programs_of_addition(layout: Layout) -> int:
    """Returns the number of programs of the kernel `add`, which writes the gradients of what all sentences share.

    - For a shared tensor (H, rows, columns), a program writes a block of `ADDITION_BLOCK` numbers. The gradient has the
      size of the whole parameter, of which the sentences may need only a part.
    - For the weights (M, H), a program writes one row.
    """
    num_programs = 0
    if "dense_key" in layout.wanted:
        size_of_dense_key = layout.num_heads * layout.dense_key_rows * layout.dense_width
        num_programs += divide_up(size_of_dense_key, ADDITION_BLOCK)
    if "bias_row" in layout.wanted:
        size_of_bias_row = layout.num_heads * layout.bias_row_columns
        num_programs += divide_up(size_of_bias_row, ADDITION_BLOCK)
    if "matrix" in layout.wanted:
        if layout.is_by_distance:
            matrix_block = DISTANCES_BLOCK  # each number is the sum of a diagonal, so that a program writes fewer
        else:
            matrix_block = ADDITION_BLOCK
        size_of_matrix = layout.num_heads * layout.matrix_rows * layout.matrix_columns
        num_programs += divide_up(size_of_matrix, matrix_block)
    if "weights" in layout.wanted:
        num_programs += layout.number_of_weights
    return num_programs


# ---- tiles


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
        """Returns the tile of a kernel for short sentences. It has all rows and columns of a sentence.

        Their number is rounded up to a power of two. The number of warps is the fastest that was measured.

        Args:
            layout: The layout.
            is_forward: Whether the kernel is that of the forward pass, or that of the backward pass.
        """
        size = power_of_2(layout.length)
        width = max(layout.value_width, layout.query_width, layout.dense_width)
        is_large = size > 32 or width > 64
        has_several_summands = len(layout.summands_with_tiles()) > 1
        has_outer_product = layout.right_width > 0
        if is_large:
            warps = 4
        elif is_forward and (has_several_summands or has_outer_product):
            warps = 1
        else:
            warps = 2
        return Tile(rows=size, columns=size, warps=warps)

    @staticmethod
    def for_kernel(kernel: str, layout: Layout) -> "Tile":
        """Returns the tile of a kernel for sentences of any length.

        Args:
            kernel: ``forward``, or the kernel of the backward pass: ``rows``, ``columns`` or ``matrix``.
            layout: The call.
        """
        # The registers hold a tile of each summand. With three summands or more, tiles have to be small.
        has_many_summands = len(layout.summands_with_tiles()) > 2
        if has_many_summands:
            tile = Tile.for_many_summands(kernel, layout)
        else:
            tile = Tile.for_few_summands(kernel, layout)
        # A tile need not be larger than the whole sentence, whose side is padded to a power of two.
        side_of_sentence = power_of_2(layout.length)
        return tile._replace(rows=min(tile.rows, side_of_sentence), columns=min(tile.columns, side_of_sentence))

    @staticmethod
    def for_many_summands(kernel: str, layout: Layout) -> "Tile":
        """Returns the tile of a kernel for logits of three summands or more. It is small to fit into the registers."""
        has_outer_product = layout.right_width > 0
        side = 16 if has_outer_product else 32
        stages = 3 if kernel == "rows" else 2
        return Tile(rows=side, columns=side, warps=4, stages=stages)

    @staticmethod
    def for_few_summands(kernel: str, layout: Layout) -> "Tile":
        """Returns the tile of a kernel for logits of one or two summands.

        These tiles were the fastest of ten on an H100, in bf16 with heads of 64 features.

        Args:
            kernel: ``forward``, or the kernel of the backward pass: ``rows``, ``columns`` or ``matrix``.
            layout: The call.
        """
        has_product = layout.query_width > 0
        has_dense_product = layout.dense_width > 0
        has_outer_product = layout.right_width > 0
        square = Tile(rows=64, columns=64, warps=4, stages=2)
        tall = Tile(rows=64, columns=32, warps=4, stages=3)
        if kernel == "forward":
            if has_dense_product or has_outer_product:
                return tall
            return square
        if kernel == "rows":
            return tall
        if kernel == "columns":
            if has_dense_product:
                return Tile(rows=32, columns=64, warps=4, stages=3)
            if has_product:
                return square
            return Tile(rows=32, columns=64, warps=4, stages=2)
        assert kernel == "matrix", kernel
        return square


# ---- sizes


def divide_up(n: int, m: int) -> int:
    """Returns n / m, rounded up."""
    return -(-n // m)


def divide_sentences(bsz: int, max_groups: int) -> SentenceGroups:
    """Divides `bsz` sentences into at most `max_groups` groups of the same size. Only the last group may be smaller.

    For example, 10 sentences in at most 4 groups are divided into groups of 3, 3, 3 and 1 sentences. In at most 6
    groups, they are divided into 5 groups of 2.
    """
    sentences_per_group = divide_up(bsz, max_groups)
    num_groups = divide_up(bsz, sentences_per_group)
    return SentenceGroups(num_groups, sentences_per_group)


def power_of_2(n: int) -> int:
    """Returns n rounded up to a power of two, but at least 16, the smallest size that Triton can multiply."""
    exponent = max(4, (n - 1).bit_length())
    return 1 << exponent


def make_constants(layout: Layout, tile: Tile) -> Constants:
    """Returns the constants of a kernel, as Triton takes them. For other constants, the kernel is compiled again.

    Args:
        layout: The call.
        tile: The tile of logits that a program computes at once.
    """
    weight_rows = layout.weight_rows
    constants = Constants(
        # The numbers of features. A BLOCK is the next power of two, as Triton has no tensors of other sizes: a value of
        # 40 features is read with 24 zeros behind it.
        VALUE_WIDTH=layout.value_width,
        VALUE_BLOCK=power_of_2(layout.value_width),
        QUERY_WIDTH=layout.query_width,
        QUERY_BLOCK=power_of_2(layout.query_width),
        DENSE_WIDTH=layout.dense_width,
        DENSE_BLOCK=power_of_2(layout.dense_width),
        FACTOR_BLOCK=power_of_2(width_of_factors(layout)),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        UNIT=choose_unit(layout),
        CAUSAL=layout.is_causal,
        BY_DISTANCE=layout.is_by_distance,
        PRECISION=choose_precision(layout),
        # The row of the tensor of weights (M, H) with the weight of each summand; -1 for a summand without a weight.
        PRODUCT_WEIGHT=weight_rows.product,
        DENSE_WEIGHT=weight_rows.dense,
        OUTER_WEIGHT=weight_rows.outer,
        BIAS_ROW_WEIGHT=weight_rows.bias_row,
        MATRIX_WEIGHT=weight_rows.matrix,
    )
    return as_constexpr(constants)


def choose_unit(layout: Layout) -> int:
    """Returns the number of features that the kernels may read at once: 8, or 1.

    If all heads have 40 features, for example, they begin at the places 0, 40, 80 and so on. As all of these are
    multiples of 8, the features can be read 8 at a time.
    """
    widths = (layout.value_width, layout.query_width, layout.dense_width)
    are_multiples_of_8 = all(width % 8 == 0 for width in widths)  # also a width of 0, if there are no queries
    return 8 if are_multiples_of_8 else 1


def choose_precision(layout: Layout) -> str:
    """Returns Triton's option for products of fp32 numbers, which has no effect in half precision.

    Only tests compute in fp32. They need "ieee", which does not round the factors. "tf32" is Triton's default.
    """
    is_fp32 = layout.dtypes.packed == torch.float32
    return "ieee" if is_fp32 else "tf32"


def width_of_factors(layout: Layout) -> int:
    """Returns the features of the wider factor of an outer product; 0 if there is no outer product.

    Of the left factor, only the features that the sentence needs count. For example, 4 right features and 9 left ones
    make 36 columns. A sentence of 18 tokens needs 18 columns, and so 5 left features. The result is 5.
    """
    if layout.right_width == 0:
        return 0
    used_left_width = divide_up(layout.length, layout.right_width)
    return max(layout.right_width, used_left_width)


@cache
def as_constexpr(constants: Constants) -> Constants:
    """Returns constants as Triton takes them: each is a ``tl.constexpr``.

    The results are cached, because it takes a while to make them.
    """
    from triton import language

    return Constants._make(language.constexpr(constant) for constant in constants)
