"""The launches of the Triton kernels for a call: their tiles, numbers and memory, which follow from its sizes alone.

A launch has no tensors, so that it serves every call of the same sizes. It takes them from the `PassTensors` of a call.
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
        """Returns the summands of which a program holds a whole tile in registers: all but the bias_row."""
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
    """Returns a length that stands for all lengths whose kernels have the same tiles: 16, 32, 64 or 128.

    The tiles of short sentences have the length rounded up to a power of two, at least 16. For example, 16 stands for 1
    to 16 tokens, and 32 for 17 to 32. 128 stands for all lengths above 64, because long sentences are divided into
    tiles of the same size, whatever their length is.
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
    """A launch of a kernel, which takes its tensors from the `PassTensors` of a call.

    For example, a kernel may have the arguments ``(out, lse, T, B)``. The launch is made with the numbers
    ``{"B": 3, "T": 2}``. So T and B are known, and `args` reads ``out`` and ``lse`` from the `PassTensors`.

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
        """Sorts the kernel's arguments into tensors, which differ from call to call, and numbers, which are known.

        For example, the kernel ``(out, lse, T, B)`` with the numbers ``{"B": 3, "T": 2}`` has the tensors ``out`` and
        ``lse``.
        """
        self.kernel = kernel
        unused_directions = [1] * (3 - len(grid))
        self.grid = (*grid, *unused_directions)
        self.options = {"num_warps": num_warps, "num_stages": num_stages}
        tensor_names = [name for name in kernel.arg_names if name not in numbers]  # ["out", "lse"]
        number_names = [name for name in kernel.arg_names if name in numbers]  # ["T", "B"], in the kernel's order
        assert kernel.arg_names == tensor_names + number_names, "the tensors of a kernel have to be its first arguments"
        self.numbers = {name: numbers[name] for name in number_names}  # {"T": 2, "B": 3}
        # `read_tensors` takes the kernel's tensors from a `PassTensors`: ``(x.out, x.lse)``. A loop would be slower.
        assert len(tensor_names) > 1, "an attrgetter of a single name returns no tuple"
        self.read_tensors: Callable[[PassTensors], tuple[Any, ...]] = attrgetter(*tensor_names)
        self.compiled: Callable[..., None] | None = None  # until `compile` is called

    def args(self, tensors: PassTensors) -> list[Any]:
        """Returns the arguments of the kernel in their order, because a compiled kernel takes them by position."""
        return [*self.read_tensors(tensors), *self.numbers.values()]

    def compile(self, arguments: Sequence[Any]) -> None:
        """Compiles the kernel for arguments of such types, loads it on the GPU and sets `options` and `compiled`.

        If more than `MAX_SPILLS` registers of a thread do not fit and lie in memory, the kernel is compiled again with
        twice as many warps, so that each thread needs fewer. This ends at `MAX_WARPS`, or when the kernel with more
        warps does not fit the GPU.

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

        The more stages a loop reads ahead, the more shared memory the kernel needs. If the GPU has too little for
        `num_stages`, the kernel is compiled for one stage less, and so on.

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
    """What is known about all calls with a layout.

    Attributes:
        layout: The layout.
        is_long: Whether the kernels are those for sentences of any length.
        has_unused_factors: Whether a part of the gradient of an outer product's factors is 0, and no kernel writes it.
        launches: The launches of the kernels.
        is_compiled: Whether the kernels are compiled.
        is_loaded: Whether the kernels may be used.
    """

    def __init__(self, layout: Layout) -> None:
        """Plans the launches, whose kernels are neither compiled nor loaded."""
        self.layout = layout
        self.is_long = not layout.is_short()
        self.launches = plan_long_sentences(layout) if self.is_long else plan_short_sentences(layout)
        self.has_unused_factors = "factors" in layout.wanted and has_unused_left_factors(layout)
        self.is_compiled = False
        self.is_loaded = False


find_plan = lru_cache(maxsize=MAX_PLANS)(Plan)  # for equal layouts the same plan


def has_unused_left_factors(layout: Layout) -> bool:
    """Returns whether the left factor of the outer product has features for columns beyond the sentence."""
    return layout.right_width > 0 and layout.left_width > divide_up(layout.length, layout.right_width)


def plan_short_sentences(layout: Layout) -> Launches:
    """Returns the launches of the kernels for short sentences.

    The forward pass is one launch, `forward_short`. The backward pass has two:

    - `backward_short` writes the gradients that each sentence has for itself, such as those of its values. For tensors
      that all sentences share, and for the weights of a mixture, it writes partial sums.
    - `add` adds up the partial sums. Without partial sums, it is left out.
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
    # For long sentences, three kernels write the partial sums, each with work of its own. Here, one kernel writes all.
    addition = plan_addition(layout, outer_weight_from=work, columns_from=work, matrix_from=work)
    backward.extend(addition)
    return Launches(forward, backward, memory=work.memory)


def plan_forward_short(layout: Layout) -> Launch:
    """Returns the launch that writes ``out`` for short sentences.

    A program is what a GPU runs in parallel with others. Here it computes one head of a group of sentences, one
    sentence after the other.
    """
    from .triton_attention import forward_short

    # More programs keep a GPU busier. A backward pass aims at only `PROGRAMS` of them, because each needs memory for
    # its partial sums. These programs need none, so that there may be four times as many.
    max_programs = 4 * PROGRAMS
    max_groups = divide_up(max_programs, layout.num_heads)  # each group has a program for each head
    groups = divide_sentences(layout.bsz, max_groups)
    tile = Tile.for_whole_sentence(layout, is_forward=True)
    return Launch(
        kernel=forward_short,
        grid=(layout.num_heads, groups.num_groups),
        numbers={**make_numbers(layout, tile), "sentences_per_group": groups.sentences_per_group},
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def plan_backward_short(layout: Layout, work: "Work") -> Launch:
    """Returns the launch that writes gradients for short sentences.

    A program computes one head, in all sentences of a group.

    Args:
        layout: The layout.
        work: Which groups there are, and where a program writes its sums over the group.
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

    - `backward_rows` writes the gradients of queries, dense_query and factors, and ``delta`` for the next two.
    - `backward_columns` writes the gradients of values and keys, and partial sums for dense_key, bias_row and weights.
    - `backward_matrix` writes partial sums for the matrix and its weight.
    - `add` adds up the partial sums.
    """
    forward = plan_forward_long(layout)
    if not layout.wanted:  # no tensor needs a gradient
        return Launches(forward, backward=[], memory={})
    # How each kernel divides its work among programs, and the memory for what these leave for later kernels.
    rows = plan_row_work(layout)
    columns = plan_column_work(layout)
    matrix = plan_matrix_work(layout)
    # A kernel is left out if nobody wants what it writes.
    wants_values_or_keys = "packed" in layout.wanted  # this tensor has the values, and perhaps queries and keys
    backward = []
    if needs_delta(layout):
        backward.append(plan_backward_rows(layout, rows))  # comes first, because the next two kernels read ``delta``
    if wants_values_or_keys or columns.leaves_sums():
        backward.append(plan_backward_columns(layout, columns))
    if matrix.leaves_sums():
        backward.append(plan_backward_matrix(layout, matrix))
    # The last launch adds up what the others have left.
    addition = plan_addition(layout, outer_weight_from=rows, columns_from=columns, matrix_from=matrix)
    backward.extend(addition)
    # For a kernel that is not launched, this is empty.
    memory = {**columns.memory, **matrix.memory, **rows.memory}
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
    """Returns the launch that writes ``delta`` and the gradients of rows.

    A program computes a tile of rows of one head in one sentence.

    Args:
        layout: The layout.
        work: How many programs compute a head.
    """
    from .triton_attention import backward_rows

    tile = Tile.for_kernel("rows", layout)
    num_programs = layout.num_heads * work.programs_per_head()  # each head has a program for each tile of each sentence
    return Launch(
        kernel=backward_rows,
        grid=(num_programs,),
        numbers=make_numbers(layout, tile),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def plan_backward_columns(layout: Layout, work: "Work") -> Launch:
    """Returns the launch for the gradients of columns, such as those of keys and values.

    A program computes a tile of columns of one head, in all sentences of a group.

    Args:
        layout: The layout.
        work: Which groups there are, and where a program writes its sums over the group.
    """
    from .triton_attention import backward_columns

    tile = Tile.for_kernel("columns", layout)
    num_programs = layout.num_heads * work.programs_per_head()  # for each head in each group, one for each tile
    return Launch(
        kernel=backward_columns,
        grid=(num_programs,),
        numbers={**make_numbers(layout, tile), **work.group_numbers()},
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def plan_backward_matrix(layout: Layout, work: "Work") -> Launch:
    """Returns the launch for the gradient of the matrix.

    A program computes a tile of rows and columns of one head, and sums over the sentences of a group.

    Args:
        layout: The layout.
        work: Which groups there are, and where a program writes its sums over the group.
    """
    from .triton_attention import backward_matrix

    tile = Tile.for_kernel("matrix", layout)
    num_programs = layout.num_heads * work.programs_per_head()  # for each head in each group, one for each tile
    return Launch(
        kernel=backward_matrix,
        grid=(num_programs,),
        numbers={**make_numbers(layout, tile), **work.group_numbers()},
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def make_numbers(layout: Layout, tile: "Tile") -> dict[str, Any]:
    """Returns the arguments that all kernels of `triton_attention` have and that are no tensors, by name.

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
    """How a kernel of a backward pass divides its work among programs, and the memory for what these leave behind.

    A program computes a tile of a head in all sentences of a group. It adds up their gradients of what all sentences
    share, and leaves the sums in memory. `plan_addition` plans the launch that adds up the sums of all programs.
    """

    groups: SentenceGroups
    tiles_per_head: int  # so many programs compute a head in a group
    numbers_per_group: int  # how many numbers the sums of a group have, without the parts of the weights' gradients
    memory: dict[str, int]  # {field of `PartialSums`: how many numbers it has}; empty if nothing is left behind

    def programs_per_head(self) -> int:
        """Returns how many programs compute a head. Each leaves a part of the gradients of the weights."""
        return self.groups.num_groups * self.tiles_per_head

    def leaves_sums(self) -> bool:
        """Returns whether the programs have any sums to leave behind."""
        return bool(self.memory)

    def group_numbers(self) -> dict[str, int]:
        """Returns two arguments of the kernel, ``sentences_per_group`` and ``numbers_per_group``, by name."""
        numbers = GroupNumbers(
            sentences_per_group=self.groups.sentences_per_group,
            numbers_per_group=self.numbers_per_group,
        )
        return numbers._asdict()


def plan_row_work(layout: Layout) -> Work:
    """Returns the work of `backward_rows`. A program computes a tile of rows of one head in one sentence.

    The programs leave ``delta``, and parts of the gradient of the weight of ``outer``. For example, 10 sentences of 2
    tiles are 20 programs for each head. The gradient of the weight of a head has 20 parts, which `add` adds up.
    """
    tile = Tile.for_kernel("rows", layout)
    tiles_per_head = divide_up(layout.length, tile.rows)  # 2 in the example
    programs_per_head = layout.bsz * tiles_per_head  # 10 * 2
    memory_of_parts = measure_parts(layout, summands=["outer"], num_parts=programs_per_head)
    memory_of_delta = measure_delta(layout)
    return Work(
        groups=SentenceGroups(num_groups=layout.bsz, sentences_per_group=1),  # each sentence is a group
        tiles_per_head=tiles_per_head,
        numbers_per_group=0,  # there are no sums over groups
        memory={**memory_of_parts, **memory_of_delta},
    )


def plan_column_work(layout: Layout) -> Work:
    """Returns the work of `backward_columns`. A program computes a tile of columns."""
    tile = Tile.for_kernel("columns", layout)
    return plan_work(
        layout,
        tiles_per_head=divide_up(layout.length, tile.columns),
        shared_tensors=["dense_key", "bias_row"],
        summands=["product", "dense", "bias_row"],
    )


def plan_matrix_work(layout: Layout) -> Work:
    """Returns the work of `backward_matrix`. A program computes a tile of rows and columns."""
    tile = Tile.for_kernel("matrix", layout)
    return plan_work(
        layout,
        tiles_per_head=divide_up(layout.length, tile.rows) * divide_up(layout.length, tile.columns),
        shared_tensors=["matrix"],
        summands=["matrix"],
    )


def plan_work(layout: Layout, tiles_per_head: int, shared_tensors: Sequence[str], summands: Sequence[str]) -> Work:
    """Returns how a kernel of a backward pass divides its work among programs, and the memory for what these write.

    The batch is divided into groups of sentences, and each head into tiles. A program (what a GPU runs in parallel with
    others) computes one tile of one head in all sentences of one group. With 3 groups and 2 tiles, 6 programs compute a
    head:

                  group 0     group 1     group 2
        tile 0    program 0   program 2   program 4
        tile 1    program 1   program 3   program 5

    Args:
        layout: The layout.
        tiles_per_head: How many tiles the kernel divides a head of a sentence into.
        shared_tensors: The tensors that all sentences share and whose gradients the kernel computes, such as
            ["matrix"]. They are fields of `CallTensors`.
        summands: The summands of the logits (`SUMMANDS`) for whose weights the kernel computes gradients.
    """
    groups = choose_groups(layout, tiles_per_head, shared_tensors, summands)  # 3 groups in the example
    # Gradients of shared tensors. Such a gradient has many numbers, and each tile has some of them. So the programs of
    # a group, such as 0 and 1, write one sum together. There are 3 sums, one for each group.
    sum_sizes = measure_sums(layout, shared_tensors)  # {tensor: how many numbers a sum has}
    memory_of_sums = measure_memory_of_groups(sum_sizes, groups.num_groups)
    # Gradients of weights. Such a gradient is a single number in each head. Every program writes a part of this number.
    # There are 6 parts, one for each program.
    programs_per_head = groups.num_groups * tiles_per_head  # 3 * 2
    memory_of_parts = measure_parts(layout, summands, num_parts=programs_per_head)
    return Work(
        groups=groups,
        tiles_per_head=tiles_per_head,
        numbers_per_group=sum(sum_sizes.values()),
        memory={**memory_of_sums, **memory_of_parts},
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
    # The fewer groups, the less memory their sums need. But there have to be enough to keep a GPU busy.
    return divide_sentences(layout.bsz, max_groups=count_groups_of_busy_gpu(layout, tiles_per_head))


def gains_from_groups(layout: Layout, shared_tensors: Sequence[str], summands: Sequence[str]) -> bool:
    """Returns whether a kernel saves work or memory if a program computes a group of sentences instead of a single one.

    It does if a gradient is a sum over sentences: the program adds up its group, and writes the sum once.

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
    """Returns those of the summands that have a weight which needs a gradient."""
    if "weights" not in layout.wanted:
        return []
    row_of_summand = layout.weight_rows._asdict()
    return [summand for summand in summands if row_of_summand[summand] >= 0]


def measure_sums(layout: Layout, shared_tensors: Sequence[str]) -> dict[str, int]:
    """Returns {name of a tensor: how many numbers the sum of its gradient over one group has}, if it is wanted."""
    sizes = {
        "dense_key": layout.num_heads * layout.length * layout.dense_width,
        "bias_row": layout.num_heads * layout.length,
        "matrix": layout.num_heads * layout.length * layout.length,
    }
    return {name: align(sizes[name]) for name in shared_tensors if name in layout.wanted}


def measure_memory_of_groups(sum_sizes: dict[str, int], num_groups: int) -> dict[str, int]:
    """Returns {name: how many numbers}, the pieces into which the memory for the sums of all groups is cut.

    The memory has the sums of group 0, then those of group 1, and so on. For example, a sum has 8 numbers for dense_key
    and 4 for bias_row, and there are 3 groups:

        place    0             8            12            20           24            32           36
        sum      dense_key 0 | bias_row 0 | dense_key 1 | bias_row 1 | dense_key 2 | bias_row 2 |
        piece    dense_key   | bias_row                                                         |

    A kernel is given only where the sums of group 0 begin, here 0 and 8. It finds those of group g ``12 g`` places
    later, in whatever piece they lie. So two cuts are enough, at 0 and 8, and the last piece has all that follows.

    Args:
        sum_sizes: {name: how many numbers the sum of one group has}, in the order in which they lie in memory.
        num_groups: The number of groups.
    """
    if not sum_sizes:
        return {}
    numbers_per_group = sum(sum_sizes.values())  # 12
    numbers_of_later_groups = (num_groups - 1) * numbers_per_group  # 24
    pieces = dict(sum_sizes)
    last_name = list(pieces)[-1]
    pieces[last_name] += numbers_of_later_groups  # 4 + 24 = 28
    return pieces


def measure_parts(layout: Layout, summands: Sequence[str], num_parts: int) -> dict[str, int]:
    """Returns the memory for parts of the gradients of weights, (num_parts, H) for each weight.

    Args:
        layout: The layout.
        summands: The summands that may have the weights.
        num_parts: How many programs write a part for each head.
    """
    size = align(num_parts * layout.num_heads)
    return {f"{summand}_weight": size for summand in list_wanted_weights(layout, summands)}


def measure_delta(layout: Layout) -> dict[str, int]:
    """Returns the memory for ``delta``, {"delta": how many numbers}; {} if it is not needed."""
    if not needs_delta(layout):
        return {}
    return {"delta": align(layout.bsz * layout.num_heads * layout.length)}


def needs_delta(layout: Layout) -> bool:
    """Returns whether any gradient is wanted apart from that of the values. All others are computed from ``delta``."""
    packed_has_queries = layout.query_width > 0  # `packed` has the queries, keys and values, or the values alone
    for name in layout.wanted:
        has_values_alone = name == "packed" and not packed_has_queries
        if not has_values_alone:
            return True
    return False


def align(number: int) -> int:
    """Returns a number of numbers in fp32, rounded up to multiples of the 16 bytes that kernels are compiled for."""
    return divide_up(number, 4) * 4  # a number in fp32 has 4 bytes


def plan_addition(layout: Layout, outer_weight_from: Work, columns_from: Work, matrix_from: Work) -> list[Launch]:
    """Returns the last launch of a backward pass, which adds up partial sums; no launch if there are none.

    Args:
        layout: The layout.
        outer_weight_from: The work of the kernel that has written parts for the weight of ``outer``.
        columns_from: The work of the kernel that has written sums for dense_key and bias_row, and parts for the weights
            of product, dense and bias_row.
        matrix_from: The work of the kernel that has written sums for the matrix, and parts for its weight.
    """
    from .triton_sums import add

    num_programs = count_programs_of_addition(layout)
    if num_programs == 0:
        return []
    numbers = AdditionNumbers(
        H=layout.num_heads,
        T=layout.length,
        column_groups=columns_from.groups.num_groups,
        column_numbers=columns_from.numbers_per_group,
        matrix_groups=matrix_from.groups.num_groups,
        matrix_numbers=matrix_from.numbers_per_group,
        dense_key_rows=layout.dense_key_rows,
        dense_key_columns=layout.dense_width,
        bias_row_rows=1,
        bias_row_columns=layout.bias_row_columns,
        matrix_rows=layout.matrix_rows,
        matrix_columns=layout.matrix_columns,
        row_parts=outer_weight_from.programs_per_head(),
        column_parts=columns_from.programs_per_head(),
        matrix_parts=matrix_from.programs_per_head(),
    )
    blocks = AdditionBlocks(
        HEADS=power_of_2(layout.num_heads),
        BLOCK=ADDITION_BLOCK,
        GROUPS=GROUPS_AT_ONCE,
        DISTANCES=DISTANCES_BLOCK,
    )
    any_tile = Tile(rows=16, columns=16, warps=4)  # the constants have a tile, which this kernel does not read
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
    """Returns the number of programs of the kernel `add`.

    - For each wanted gradient of a shared tensor (H, rows, columns), a program writes a block of `ADDITION_BLOCK`
      numbers. The gradient has the size of the parameter, which may be larger than the sentences need.
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
        # Each value by distance is the sum of a diagonal, so that a program writes fewer of them.
        matrix_block = DISTANCES_BLOCK if layout.is_by_distance else ADDITION_BLOCK
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
        """Returns the tile of all rows and columns of a short sentence, for the kernel of one of the passes.

        Its rows and columns are a power of two, which holds the sentence. The numbers of warps are the fastest that
        were measured.
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
        """Returns a small tile, because the registers hold one for each summand of the logits."""
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
    """Returns groups of the same size, up to `max_groups` of them. The last group may be smaller, but is not empty.

    For example, 10 sentences in up to 4 groups are 3 in each group, and the last group has 1. In up to 6 groups, they
    are 2 in each of 5 groups.
    """
    sentences_per_group = divide_up(bsz, max_groups)
    return SentenceGroups(num_groups=divide_up(bsz, sentences_per_group), sentences_per_group=sentences_per_group)


def power_of_2(n: int) -> int:
    """Returns the smallest power of two that is at least n, and at least 16, as the products of tiles ask for."""
    return 1 << max(4, (n - 1).bit_length())


def make_constants(layout: Layout, tile: Tile) -> Constants:
    """Returns the `Constants` that the kernels of a call are compiled for, in Triton's form."""
    weight_rows = layout.weight_rows
    constants = Constants(
        # Widths, and the blocks that hold them: Triton reads 64 numbers, a power of two, to get a value of width 40.
        VALUE_WIDTH=layout.value_width,
        VALUE_BLOCK=power_of_2(layout.value_width),
        QUERY_WIDTH=layout.query_width,
        QUERY_BLOCK=power_of_2(layout.query_width),
        DENSE_WIDTH=layout.dense_width,
        DENSE_BLOCK=power_of_2(layout.dense_width),
        FACTOR_BLOCK=power_of_2(width_of_factors(layout)),
        # The tile of logits that a program computes at once.
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        # How it is computed.
        UNIT=choose_unit(layout),
        CAUSAL=layout.is_causal,
        BY_DISTANCE=layout.is_by_distance,
        PRECISION=choose_precision(layout),
        # Which row of the weights (M, H) is the weight of each summand; -1 for a summand without a weight.
        PRODUCT_WEIGHT=weight_rows.product,
        DENSE_WEIGHT=weight_rows.dense,
        OUTER_WEIGHT=weight_rows.outer,
        BIAS_ROW_WEIGHT=weight_rows.bias_row,
        MATRIX_WEIGHT=weight_rows.matrix,
    )
    return as_constexpr(constants)


def choose_unit(layout: Layout) -> int:
    """Returns how many numbers the kernels may read at once: 8 or 1.

    They read rows of features, such as a value, which begin at multiples of the widths of values, queries and keys. If
    all of these are multiples of 8, every row can be read 8 numbers at a time.
    """
    widths = (layout.value_width, layout.query_width, layout.dense_width)
    are_multiples_of_8 = all(width % 8 == 0 for width in widths)  # also 0, for what does not occur
    return 8 if are_multiples_of_8 else 1


def choose_precision(layout: Layout) -> str:
    """Returns how a GPU multiplies numbers in fp32, in Triton's words. It has no effect in half precision."""
    # Only tests compute in fp32. They need exact products.
    is_fp32 = layout.dtypes.packed == torch.float32
    return "ieee" if is_fp32 else "tf32"


def width_of_factors(layout: Layout) -> int:
    """Returns the width that holds either factor of an outer product; 0 without an outer product.

    With `right_width` right features, the sentence needs ``length / right_width`` left features, rounded up.
    """
    if layout.right_width == 0:
        return 0
    used_left_width = divide_up(layout.length, layout.right_width)
    return max(layout.right_width, used_left_width)


@cache
def as_constexpr(constants: Constants) -> Constants:
    """Returns `Constants` in Triton's form, which takes a while to make.

    There are few different ones, or there would be many kernels.
    """
    from triton import language

    return Constants._make(language.constexpr(constant) for constant in constants)
