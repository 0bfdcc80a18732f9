"""The right kernels are launched, and they are compiled for GPUs that are not there."""

import argparse
import json
import os
import re
import sys
from typing import NamedTuple

import pytest
import torch
import warm
from helpers import NAMES, make_attention, padding_mask
from kernel_calls import (
    MIXED,
    Summand,
    attend_by_kernels,
    attend_plainly,
    choose_kernels,
    is_supported,
    make_inputs,
    make_logits,
    set_number_of_programs,
    view_queries_keys_and_values,
)

from fairseq_synth.architectures import VARIANTS
from fairseq_synth.computations import kernels
from fairseq_synth.computations.kernels import launches
from fairseq_synth.computations.kernels.arguments import CallTensors, PassTensors, WeightRows
from fairseq_synth.computations.kernels.check import compare
from fairseq_synth.logits import Bias, Product
from fairseq_synth.positions import take_columns, take_window
from recipes.steps import ROOT

triton = pytest.importorskip("triton")
from compile_kernels import SHARED_MEMORY_LIMITS  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

from fairseq_synth.computations.kernels import triton_attention, triton_sums  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("on_device", "skip_unless_chosen", "kernels_are_on", "dirty_memory"),
    # In the interpreter, numpy warns about minus infinity.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not kernels.triton_fits(), reason="no Triton that is new enough for the kernels"),
]
interpreted = pytest.mark.interpreted


@interpreted
@pytest.mark.parametrize(
    "needed, expected_launches",
    [
        # names of tensors in the test, and the kernels of the backward pass that compute their gradients
        (["weights"], {"backward_rows": None, "backward_columns": 6, "add": None}),
        (["projection"], {"backward_rows": None, "backward_columns": 6}),
        (["R"], {"backward_rows": None, "backward_matrix": 2, "add": None}),
        (["query"], {"backward_rows": None}),
        (["shared_key"], {"backward_rows": None, "backward_columns": 2, "add": None}),
        (
            ["projection", "R", "weights"],
            {"backward_rows": None, "backward_columns": 6, "backward_matrix": 2, "add": None},
        ),
    ],
    ids=["weights", "projection", "R", "query", "shared_key", "all"],
)
def test_a_long_sentence_has_launches_for_the_gradients_that_are_needed(needed, expected_launches, monkeypatch):
    """The values of the gradients do not depend on which are needed.

    A launch that does not sum over sentences has a program for each of three sentences and two heads, and one that sums
    has a program for each head. `expected_launches`: {kernel: its number of programs, or None for any}.
    """
    choose_kernels(monkeypatch, is_short=False)
    set_number_of_programs(monkeypatch, 1)
    run_launches = []
    original_run = kernels.run

    def run_and_record(launch, tensors):
        run_launches.append(launch)
        return original_run(launch, tensors)

    monkeypatch.setattr(kernels, "run", run_and_record)
    shapes = {
        "projection": (7, 3, 48),
        "R": (2, 7, 7),
        "weights": (1, 2),
        "query": (3, 2, 7, 8),
        "shared_key": (2, 9, 8),
    }
    tensors = {name: torch.randn(shape, requires_grad=name in needed) for name, shape in shapes.items()}
    needed_tensors = [tensors[name] for name in needed]

    def compute_gradients(attend):
        """Returns the gradients of the needed tensors, of the sum of the squares of an attention's output.

        The logits are a product and R. If the gradient of `query` or `shared_key` is needed, the product is that of
        these two, where all sentences share the keys. Otherwise it is that of the queries and keys of the projection.
        """
        q, k, v = view_queries_keys_and_values(tensors["projection"])  # each is (B, H, T, 8)
        inputs = make_inputs(7)  # the sentence has 7 tokens
        if "query" in needed or "shared_key" in needed:
            key_of_all_sentences = take_columns(tensors["shared_key"], inputs)
            product = Product(tensors["query"], key_of_all_sentences)
        else:
            product = Product(q, k)
        window = Bias(take_window(tensors["R"], inputs))
        weighted_product = Summand(product, weight_row=0)  # by the only row of the weights
        logits = make_logits(tensors["weights"], weighted_product, Summand(window))
        out = attend(logits, v)
        return torch.autograd.grad(out.square().sum(), needed_tensors)

    gradients = compute_gradients(attend_by_kernels)
    expected_gradients = compute_gradients(attend_plainly)
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-4, rtol=1e-4)
    assert [launch.kernel.__name__ for launch in run_launches] == ["forward", *expected_launches]
    for launch in run_launches:
        number_of_programs = expected_launches.get(launch.kernel.__name__)
        if number_of_programs is not None:
            assert launch.grid[0] == number_of_programs


class KernelCall(NamedTuple):
    """How a kernel is compiled or called."""

    types: list  # the types of the arguments
    grid: tuple[int, ...]
    options: dict[str, int]


class GpuKernel:
    """Takes the place of a kernel: it is compiled as on a GPU, and then run by the interpreter.

    Args:
        kernel: the kernel.
        spills: whether it needs more registers than there are if it has few warps.
        compiled: a dict to which `warmup` adds how the kernel is compiled, under its name.
        called: a dict to which a call adds how the kernel is called.
    """

    def __init__(self, kernel, spills, compiled, called):
        self.kernel = kernel
        self.__name__ = f"{kernel.__module__}.{kernel.__name__}"
        self.arg_names = kernel.arg_names
        self.spills = spills
        self.compiled = compiled
        self.called = called

    def warmup(self, *args, grid, **options):
        """Records how the kernel is compiled, in place of Triton's method that compiles it."""
        whole_grid = (*grid, 1, 1)[:3]  # in three directions
        self.compiled[self.__name__] = KernelCall(list_types(args), whole_grid, options)
        return LoadedKernel(self, options)


class LoadedKernel:
    """A kernel that `GpuKernel.warmup` has compiled. Once it is loaded for a grid, its number of spills is known."""

    def __init__(self, gpu_kernel, options):
        self.gpu_kernel = gpu_kernel
        self.options = options

    def count_spills(self):
        """Returns how many registers the kernel spills.

        A kernel that is to spill does so until it is compiled with the largest number of warps. So the tests see that
        `Launch.compile` asks for more warps as long as the number is above its limit.
        """
        has_few_warps = self.options["num_warps"] < launches.MAX_WARPS
        if self.gpu_kernel.spills and has_few_warps:
            return launches.MAX_SPILLS + 1
        return 0

    def __getitem__(self, grid):
        """Loads the kernel for a grid, and returns the function that launches it, as Triton's `kernel[grid]` does.

        Triton sets `n_spills` while it loads a kernel, and so does this method. The function that is returned records
        the call, and lets the interpreter run the kernel.
        """
        self.n_spills = self.count_spills()

        def call(*args):
            name = self.gpu_kernel.__name__
            self.gpu_kernel.called[name] = KernelCall(list_types(args), grid, self.options)
            interpreted_kernel = self.gpu_kernel.kernel
            interpreted_kernel[grid](*args)

        return call


def list_types(argument):
    """Returns the type of an argument of a kernel; of a tuple, the list of the types in it."""
    if isinstance(argument, tuple):
        return [list_types(part) for part in argument]
    if isinstance(argument, torch.Tensor):
        return argument.dtype
    return type(argument)


@pytest.fixture
def pretend_gpu(monkeypatch):
    """Returns the function `replace_kernels`, by which a test pretends that the CPU is a GPU that compiles kernels."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("a GPU compiles")

    def replace_kernels(spills):
        """Replaces all kernels by `GpuKernel`s, and returns two dicts that they fill during the test.

        - {name of a kernel: the `KernelCall` for which it was compiled last}
        - {name of a kernel: the `KernelCall` with which it was called last}

        Args:
            spills: whether all kernels spill registers until they are compiled with the largest number of warps.
        """
        compiled = {}
        called = {}
        kernels_of_modules = [
            (triton_sums, "add"),
            (triton_attention, "forward_short"),
            (triton_attention, "backward_short"),
            (triton_attention, "forward"),
            (triton_attention, "backward_rows"),
            (triton_attention, "backward_columns"),
            (triton_attention, "backward_matrix"),
        ]
        for module, name in kernels_of_modules:
            kernel = getattr(module, name)
            monkeypatch.setattr(module, name, GpuKernel(kernel, spills, compiled, called))
        monkeypatch.setattr(kernels, "device_fits", lambda *_: True)
        monkeypatch.setattr(kernels, "is_interpreted", lambda: False)
        return compiled, called

    return replace_kernels


@interpreted
@pytest.mark.parametrize(
    "length, number_of_kernels, spills",
    [
        (7, 3, False),  # a short sentence: forward_short, backward_short and add
        (70, 5, True),  # a long sentence: forward, backward_rows, backward_columns, backward_matrix and add
    ],
)
def test_kernels_are_compiled_before_they_are_called(length, number_of_kernels, spills, pretend_gpu):
    """The kernels of both passes are compiled for the types, grids and options that they are called with.

    They have the largest number of warps if they spill with fewer.
    """
    # {name of a kernel: the types of its arguments, its grid and its options}
    compiled, called = pretend_gpu(spills)
    module = make_attention("random+dense", max_length=length, dropout=0.1).train()
    x = torch.randn(length, 2, 6, requires_grad=True)
    out, _ = module(x, key_padding_mask=padding_mask([length, length - 1]))
    # The forward pass has called its own kernel, and compiled those of the backward pass, too.
    assert set(compiled) > set(called)
    out.sum().backward()
    # Now all have been called, in the way for which they were compiled.
    assert compiled == called
    assert len(called) == number_of_kernels
    for call in called.values():
        has_most_warps = call.options["num_warps"] == launches.MAX_WARPS
        assert has_most_warps == spills


@interpreted
def test_compiled_kernels_are_compared_before_they_are_used(pretend_gpu, monkeypatch):
    """The first call runs all kernels of both passes once, to compare their results with the definition's.

    So the kernels of the backward pass have been called before there is a backward pass. With dropout, the same
    kernels are called for this with a probability of 0, and are found to be right.
    """
    comparisons = []

    def record_comparison(*arguments):
        comparison = compare(*arguments)  # a fixture has replaced it in `kernels`, and this is the original
        comparisons.append(comparison)
        return comparison

    monkeypatch.setattr(kernels, "CHECKED", set())  # no kind of call has been compared yet
    monkeypatch.setattr(kernels, "compare", record_comparison)
    compiled, called = pretend_gpu(spills=False)
    module = make_attention("random+dense", max_length=7, dropout=0.1).train()
    out, _ = module(torch.randn(7, 2, 6, requires_grad=True))
    assert compiled == called
    assert len(called) == 3  # forward_short, backward_short and add
    assert [comparison.difference for comparison in comparisons] == [""]  # one comparison, in which nothing differs
    assert kernels.SWITCH == "1"  # the kernels stay on
    out.sum().backward()  # raises no error


def make_layout(**sizes):
    """Returns a layout of a GPU, in which all sizes that are not given are 0."""
    fields = dict.fromkeys(launches.Layout._fields, 0)
    fields.update(value_width=64, weight_rows=WeightRows(), wanted=())
    fields.update(sizes)
    return launches.Layout(**fields)


QUERIES = {"query_width": 64}
DENSE = {"dense_width": 64}
OUTER = {"right_width": 9}
MATRIX = {"matrix_columns": 9}


@pytest.mark.parametrize(
    "length, sizes",
    [
        (32, MATRIX),
        (32, {**QUERIES, **DENSE, **MATRIX}),
        (32, {"value_width": 72, **MATRIX}),
        (32, {"value_width": 72, "dense_width": 72}),
        (64, MATRIX),
        (64, QUERIES),
        (64, DENSE),
        (64, {"value_width": 40, "query_width": 40}),
    ],
)
def test_short_sentences_whose_tiles_fit_into_registers(length, sizes):
    assert make_layout(length=length, **sizes).is_short()


@pytest.mark.parametrize(
    "length, sizes",
    [
        # Up to 32 tokens with up to 64 features in a head: more than three summands.
        (32, {**QUERIES, **DENSE, **OUTER, **MATRIX}),
        # Up to 32 tokens with more features: more than one summand, or an outer product.
        (32, {"query_width": 64, "dense_width": 72}),
        (32, {"value_width": 72, **OUTER}),
        # 33 to 64 tokens with up to 64 features: more than one summand, or an outer product.
        (33, {**QUERIES, **MATRIX}),
        (64, {**QUERIES, **MATRIX}),
        (64, OUTER),
        # 33 to 64 tokens with a number of features that is no power of two: a dense product.
        (64, {"value_width": 40, "dense_width": 40}),
        # 33 to 64 tokens with more than 64 features.
        (64, {"value_width": 65, **MATRIX}),
        # more than 64 tokens
        (65, MATRIX),
        (65, QUERIES),
    ],
)
def test_sentences_that_are_too_long_or_have_too_many_summands_for_registers(length, sizes):
    """The kernels for short sentences, whose tile is a whole sentence, are not for a call that breaks a limit."""
    assert not make_layout(length=length, **sizes).is_short()


def read_constants(launch):
    """Returns the constants that the kernel of a launch is compiled for, and its options."""
    constants = [constant.value for constant in launch.numbers["constants"]]
    return launch.kernel.__name__, *constants, *launch.options.values()


@pytest.mark.parametrize("right_width", [0, 8, 17, 64])
@pytest.mark.parametrize("summands", [{}, QUERIES, MATRIX, {**QUERIES, **MATRIX}])
def test_calls_of_one_kind_have_the_same_kernels(summands, right_width):
    """Only the first call of a kind is compared with the definition, which must be enough for all others.

    The kind of a call depends on its length and on the numbers of features, among them those of the right factor of
    an outer product (0: there is no such product).
    """
    kernels_of_kinds = {}  # {kind: the kernels of the first call of this kind, with their constants and options}
    for length in (1, 7, 16, 17, 32, 33, 64, 65, 130, 300, 1000):
        sizes = dict(summands)
        if "matrix_columns" in summands:
            sizes["matrix_columns"] = length  # the matrix has at least as many columns as there are tokens
        layout = make_layout(
            length=length,
            bsz=2,
            num_heads=2,
            dtypes=CallTensors(packed=torch.float16),
            right_width=right_width,
            left_width=1000,  # the outer product has enough left features for 1,000 tokens
            wanted=("packed",),  # the projection of queries, keys and values needs a gradient
            **sizes,
        )
        planned = launches.Plan(layout).launches
        kernels_of_call = [read_constants(launch) for launch in (planned.forward, *planned.backward)]
        kind = layout.kind()
        if kind not in kernels_of_kinds:
            kernels_of_kinds[kind] = kernels_of_call
        assert kernels_of_call == kernels_of_kinds[kind], length


@pytest.mark.parametrize(
    "sizes, forward_tile, backward_tile",
    [
        (dict(length=9, **MATRIX), (16, 16, 2, 1), (16, 16, 2, 1)),
        (dict(length=32, **QUERIES, **MATRIX), (32, 32, 1, 1), (32, 32, 2, 1)),
        (dict(length=32, **OUTER), (32, 32, 1, 1), (32, 32, 2, 1)),
        (dict(length=33, **MATRIX), (64, 64, 4, 1), (64, 64, 4, 1)),
        (dict(length=9, value_width=65, **MATRIX), (16, 16, 4, 1), (16, 16, 4, 1)),
    ],
)
def test_tiles_of_short_sentences(sizes, forward_tile, backward_tile):
    """The tiles have the rows, columns, warps and stages that were measured to be fast in both passes."""
    layout = make_layout(**sizes)
    assert launches.Tile.for_whole_sentence(layout, is_forward=True) == forward_tile
    assert launches.Tile.for_whole_sentence(layout, is_forward=False) == backward_tile


@pytest.mark.parametrize(
    "sizes, tiles",
    [
        # One summand or two: the tiles have 64 rows and columns, or half as many on one side.
        (
            dict(length=130, **MATRIX),
            {
                "forward": launches.Tile(rows=64, columns=64, warps=4, stages=2),
                "rows": launches.Tile(rows=64, columns=32, warps=4, stages=3),
                "columns": launches.Tile(rows=32, columns=64, warps=4, stages=2),
                "matrix": launches.Tile(rows=64, columns=64, warps=4, stages=2),
            },
        ),
        (
            dict(length=130, **QUERIES, **MATRIX),
            {
                "forward": launches.Tile(rows=64, columns=64, warps=4, stages=2),
                "rows": launches.Tile(rows=64, columns=32, warps=4, stages=3),
                "columns": launches.Tile(rows=64, columns=64, warps=4, stages=2),
                "matrix": launches.Tile(rows=64, columns=64, warps=4, stages=2),
            },
        ),
        (
            dict(length=130, **QUERIES, **DENSE),
            {
                "forward": launches.Tile(rows=64, columns=32, warps=4, stages=3),
                "rows": launches.Tile(rows=64, columns=32, warps=4, stages=3),
                "columns": launches.Tile(rows=32, columns=64, warps=4, stages=3),
                "matrix": launches.Tile(rows=64, columns=64, warps=4, stages=2),
            },
        ),
        (
            dict(length=130, **OUTER),
            {
                "forward": launches.Tile(rows=64, columns=32, warps=4, stages=3),
                "rows": launches.Tile(rows=64, columns=32, warps=4, stages=3),
                "columns": launches.Tile(rows=32, columns=64, warps=4, stages=2),
                "matrix": launches.Tile(rows=64, columns=64, warps=4, stages=2),
            },
        ),
        # Three summands: 32 rows and columns.
        (
            dict(length=130, **QUERIES, **DENSE, **MATRIX),
            {
                "forward": launches.Tile(rows=32, columns=32, warps=4, stages=2),
                "rows": launches.Tile(rows=32, columns=32, warps=4, stages=3),
                "columns": launches.Tile(rows=32, columns=32, warps=4, stages=2),
                "matrix": launches.Tile(rows=32, columns=32, warps=4, stages=2),
            },
        ),
        # Three summands, one of which is an outer product: 16 rows and columns.
        (
            dict(length=130, **QUERIES, **OUTER, **MATRIX),
            {
                "forward": launches.Tile(rows=16, columns=16, warps=4, stages=2),
                "rows": launches.Tile(rows=16, columns=16, warps=4, stages=3),
                "columns": launches.Tile(rows=16, columns=16, warps=4, stages=2),
                "matrix": launches.Tile(rows=16, columns=16, warps=4, stages=2),
            },
        ),
        # 20 tokens: no more than 32 rows and columns, the next power of two.
        (
            dict(length=20, **MATRIX),
            {
                "forward": launches.Tile(rows=32, columns=32, warps=4, stages=2),
                "rows": launches.Tile(rows=32, columns=32, warps=4, stages=3),
                "columns": launches.Tile(rows=32, columns=32, warps=4, stages=2),
                "matrix": launches.Tile(rows=32, columns=32, warps=4, stages=2),
            },
        ),
    ],
)
def test_tiles_of_long_sentences(sizes, tiles):
    """The tiles have the rows, columns, warps and stages that were measured to be fast in each kernel."""
    layout = make_layout(**sizes)
    assert list(tiles) == ["forward", "rows", "columns", "matrix"]
    for kernel, tile in tiles.items():
        assert launches.Tile.for_kernel(kernel, layout) == tile, kernel


class Programs(NamedTuple):
    """The numbers of programs, warps and sentences that are planned for a launch."""

    grid: tuple[int, int]
    warps: int
    sentences: int | None = None  # the number of sentences over which a program sums; None: it sums over none


def plan_programs(**sizes):
    """Returns the `Programs` of each launch but the last, which adds sums up.

    The call has 1,000 sentences and 8 heads, and is in bf16. The gradients of values and of the matrix R are needed.
    `sizes` are other fields of its layout.
    """
    layout = make_layout(
        bsz=1000, num_heads=8, dtypes=CallTensors(packed=torch.bfloat16), wanted=("packed", "matrix"), **sizes
    )
    planned = launches.Plan(layout).launches
    *backward_launches, _launch_that_adds_sums_up = planned.backward
    programs = []
    for launch in [planned.forward, *backward_launches]:
        # A grid has three directions, of which these launches use up to two.
        used_grid = launch.grid[:2]
        # A kernel that sums over no sentences does not have this number.
        sentences = launch.numbers.get("sentences_per_group")
        programs.append(Programs(used_grid, launch.options["num_warps"], sentences))
    return programs


def test_programs_of_short_sentences_are_as_many_as_were_measured_to_be_fast():
    assert plan_programs(length=32, query_width=64, matrix_rows=32, matrix_columns=32) == [
        Programs(grid=(8, 125), sentences=8, warps=1),
        Programs(grid=(8, 63), sentences=16, warps=2),
    ]
    assert plan_programs(length=33, matrix_rows=33, matrix_columns=33) == [
        Programs(grid=(8, 125), sentences=8, warps=4),
        Programs(grid=(8, 33), sentences=31, warps=4),
    ]


def test_programs_of_long_sentences_are_as_many_as_were_measured_to_be_fast():
    assert plan_programs(length=130, matrix_rows=130, matrix_columns=130) == [
        Programs(grid=(24000, 1), warps=4),
        Programs(grid=(24000, 1), warps=4),
        Programs(grid=(24000, 1), sentences=1, warps=4),
        Programs(grid=(216, 1), sentences=334, warps=4),
    ]


def test_memory_for_the_sums_of_short_sentences():
    """Each group of sentences has a sum of the gradients of the matrix of each head. No other gradient is needed."""
    sentences = 1000
    heads = 8
    length = 32
    layout = make_layout(
        length=length,
        bsz=sentences,
        num_heads=heads,
        number_of_weights=3,
        dtypes=CallTensors(packed=torch.bfloat16),
        matrix_rows=length,
        matrix_columns=length,
        wanted=("matrix",),
    )
    # 528 programs, twice `launches.PROGRAMS`, are aimed at: up to 66 groups for each of 8 heads. So a group has 16
    # sentences, and there are 1000 / 16 groups, rounded up.
    groups = 63
    assert launches.Plan(layout).launches.memory == {"matrix": groups * heads * length * length}


def test_memory_for_the_sums_of_long_sentences():
    """Each program has a sum of the gradients of a weight of a head.

    Logits with three summands, one of them an outer product, have tiles of 16 rows and 16 columns.
    """
    sentences = 50
    heads = 8
    length = 130
    tiles_of_rows = 9  # 130 / 16, rounded up
    tiles_of_columns = 9
    layout = make_layout(
        length=length,
        bsz=sentences,
        num_heads=heads,
        number_of_weights=3,
        dtypes=CallTensors(packed=torch.bfloat16),
        query_width=64,
        left_width=10,
        right_width=13,
        matrix_rows=length,
        matrix_columns=length,
        weight_rows=WeightRows(product=0, outer=1, matrix=2),
        wanted=("packed", "factors", "matrix", "weights"),
    )
    assert launches.Plan(layout).launches.memory == {
        # a number for each row of the logits, from which the gradients of all summands are computed
        "delta": sentences * heads * length,
        # A program sums the gradient of a tile of the matrix over all sentences, and has a sum for its weight.
        "matrix": heads * length * length,
        "matrix_weight": tiles_of_rows * tiles_of_columns * heads,
        # For the other summands, a program computes a tile of rows or of columns of one sentence.
        "outer_weight": sentences * tiles_of_rows * heads,
        "product_weight": sentences * tiles_of_columns * heads,
    }


def test_the_memory_of_a_group_is_followed_by_that_of_the_next_group():
    """The last piece has all memory behind its beginning."""
    memory = launches.measure_memory_of_groups({"dense_key": 12, "bias_row": 4}, num_groups=3)
    assert memory == {"dense_key": 12, "bias_row": 4 + 2 * (12 + 4)}


def test_the_arguments_of_a_launch_have_the_order_of_the_kernel():
    kernel = CompiledOnly(spills=0, stages=99)
    kernel.arg_names = ["tensors", "out", "T", "B"]
    launch = launches.Launch(kernel, grid=(5,), numbers={"B": 3, "T": 2}, num_warps=4)
    assert launch.args(PassTensors(tensors="the tensors", out="the output")) == ["the tensors", "the output", 2, 3]


@pytest.mark.parametrize(
    "sizes, expected",
    [
        (
            dict(dtypes=CallTensors(packed=torch.bfloat16), length=130, right_width=4),
            # 4 right features need 33 left features for 130 columns. A block is a power of two that holds either.
            # All widths, here only that of the values, 64, are multiples of 8: so many numbers are read at once.
            dict(FACTOR_BLOCK=64, UNIT=8, PRECISION="tf32"),
        ),
        (
            dict(
                dtypes=CallTensors(packed=torch.bfloat16),
                length=9,
                value_width=12,
                query_width=8,
                weight_rows=WeightRows(matrix=3),
            ),
            # A block has at least 16 numbers, also without an outer product or for 8 features of a query. A value has
            # 12 features, which is no multiple of 8. The weight of the matrix is in row 3 of the weights.
            dict(FACTOR_BLOCK=16, UNIT=1, QUERY_BLOCK=16, MATRIX_WEIGHT=3),
        ),
        # Products in fp32 are not rounded.
        (dict(dtypes=CallTensors(packed=torch.float32)), dict(PRECISION="ieee")),
    ],
)
def test_constants_that_kernels_are_compiled_for(sizes, expected):
    """Both factors fit, several numbers are read at once where all widths allow it, and fp32 is not rounded."""
    layout = make_layout(**sizes)
    constants = launches.make_constants(layout, launches.Tile(16, 16, 4))
    for name, value in expected.items():
        assert getattr(constants, name).value == value, name


def test_a_launch_has_one_program_in_other_directions_and_one_stage_by_default():
    kernel = CompiledOnly(spills=0, stages=99)
    launch = launches.Launch(kernel, grid=(5,), numbers={}, num_warps=4)
    assert launch.grid == (5, 1, 1)
    assert launch.options == {"num_warps": 4, "num_stages": 1}


@pytest.mark.parametrize(
    "resources, tried_options, kept_options",
    [
        # It fits at once.
        (dict(spills=0, stages=99), [(2, 3)], (2, 3)),
        # It has too many stages for the shared memory.
        (dict(spills=0, stages=1), [(2, 3), (2, 2), (2, 1)], (2, 1)),
        # It spills as many registers as it may, `launches.MAX_SPILLS`.
        (dict(spills=100, stages=99), [(2, 3)], (2, 3)),
        # It spills one more, with any number of warps. 8 are the most.
        (dict(spills=101, stages=99), [(2, 3), (4, 3), (8, 3)], (8, 3)),
        # It has too many stages, and spills too many registers. The smaller number of stages stays.
        (dict(spills=101, stages=2), [(2, 3), (2, 2), (4, 2), (8, 2)], (8, 2)),
        # It spills too many registers, and has too many stages for 8 warps.
        (dict(spills=101, stages=99, stages_of_8_warps=2), [(2, 3), (4, 3), (8, 3), (8, 2)], (8, 2)),
        # It does not fit with 8 warps, whatever the number of stages is, but it does with 4.
        (dict(spills=101, stages=99, stages_of_8_warps=0), [(2, 3), (4, 3), (8, 3), (8, 2), (8, 1)], (4, 3)),
    ],
)
def test_a_kernel_is_compiled_with_fewer_stages_or_more_warps_until_it_fits(resources, tried_options, kept_options):
    """It starts with 2 warps and 3 stages. The options are pairs of numbers of warps and stages.

    - If the kernel does not fit into the shared memory, it is tried with one stage less.
    - If it then spills too many registers, it is tried with twice as many warps, up to 8.
    - If it does not fit with more warps, the options before are kept.

    `resources`: the arguments of `CompiledOnly`, how many registers the kernel spills, and for how many stages there is
    shared memory (99: for any number).
    """
    kernel = CompiledOnly(**resources)
    launch = launches.Launch(kernel, grid=(7,), numbers={}, num_warps=2, num_stages=3)
    launch.compile([])
    assert kernel.tried_options == tried_options
    assert launch.compiled == (kept_options, (7, 1, 1))  # the options and the whole grid
    kept_warps, kept_stages = kept_options
    assert launch.options == {"num_warps": kept_warps, "num_stages": kept_stages}


def test_a_kernel_that_fits_with_no_options_is_an_error():
    kernel = CompiledOnly(spills=0, stages=0)
    launch = launches.Launch(kernel, grid=(7,), numbers={}, num_warps=2, num_stages=3)
    with pytest.raises(OutOfResources):
        launch.compile([])


class CompiledOnly:
    """Takes the place of a kernel and of its compiled form, which cannot be called.

    Args:
        spills: how many registers it spills.
        stages: for how many stages the GPU has enough shared memory.
        stages_of_8_warps: the same for 8 warps; default: as for fewer.
    """

    def __init__(self, spills, stages, stages_of_8_warps=None):
        self.arg_names = ["tensors", "out"]
        self.n_spills = spills
        self.most_stages = {2: stages, 4: stages, 8: stages}  # by the number of warps
        if stages_of_8_warps is not None:
            self.most_stages[8] = stages_of_8_warps
        self.tried_options = []  # pairs of the numbers of warps and stages with which it was compiled

    def warmup(self, *args, grid, num_warps, num_stages):
        """Records the options, in place of Triton's method that compiles the kernel."""
        self.tried_options.append((num_warps, num_stages))
        return self

    def __getitem__(self, grid):
        """Returns the options and the grid, in place of a function that launches the kernel, if the kernel fits."""
        warps, stages = self.tried_options[-1]
        if stages > self.most_stages[warps]:
            raise OutOfResources(2, 1, "shared memory")
        return (warps, stages), grid


def run_compile_kernels(*arguments):
    """Returns the lines that tests/kernels/compile_kernels.py prints. It runs without Triton's interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    process = warm.run([ROOT / "tests" / "kernels" / "compile_kernels.py", *arguments], env=environment)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


SUPPORTED = [spec for spec in dict.fromkeys([*NAMES, *VARIANTS, MIXED]) if is_supported(spec)]
# factorized_random is left out, because it has the kernels of random.
WITHOUT_FACTORIZED_RANDOM = [spec for spec in SUPPORTED if "factorized_random" not in spec or spec == MIXED]
MIXTURES = ["random+vanilla", "dense+vanilla"]
# A spec for each set of summands of which a program holds a tile: these decide how many registers it needs.
ONE_OF_EACH_KIND = ["random", "relative_random", "dense", "factorized_dense", "random+dense", *MIXTURES]


@interpreted
@pytest.mark.parametrize(
    "architecture, dtype, width, specs_with_kernels, specs_with_all, lengths, masks",
    [
        # All functions in the usual case, and the paper's mixtures under both masks.
        (90, "bf16", 64, SUPPORTED, [*ONE_OF_EACH_KIND, MIXED], [32, 256], ["padded"]),
        (90, "bf16", 64, MIXTURES, ["dense+vanilla"], [64, 256], ["padded", "causal"]),
        # sm_86 has the products of sm_80 and less shared memory, of which wide heads need more.
        (86, "bf16", 64, WITHOUT_FACTORIZED_RANDOM, [MIXED], [256], ["padded"]),
        (86, "bf16", 128, WITHOUT_FACTORIZED_RANDOM, MIXTURES, [256], ["padded"]),
        # Another architecture, another type, and other widths. In these rows the two mixtures take turns with --all.
        (80, "bf16", 64, MIXTURES, ["random+vanilla"], [32, 256], ["padded"]),
        (90, "fp16", 64, MIXTURES, ["dense+vanilla"], [32, 256], ["padded"]),
        (90, "bf16", 8, MIXTURES, ["random+vanilla"], [32, 256], ["padded"]),
        (90, "bf16", 40, MIXTURES, ["dense+vanilla"], [32, 256], ["padded"]),
        (90, "bf16", 72, MIXTURES, ["random+vanilla"], [32, 256], ["padded"]),
    ],
)
def test_every_launch_fits_into_a_gpu(
    architecture, dtype, width, specs_with_kernels, specs_with_all, lengths, masks, is_complete_run
):
    """The compiler takes a second for each kernel. So fewer functions are tested with --all than with --kernels."""
    if is_complete_run:  # with --kernels
        specs = specs_with_kernels
    else:
        specs = specs_with_all
    check_resources(architecture, dtype, width, specs, lengths, masks)


@interpreted
@pytest.mark.parametrize("architecture, chosen_specs", [(80, []), (90, ["random+vanilla"]), (120, ["dense+vanilla"])])
def test_every_launch_with_dropout_fits_into_a_gpu(architecture, chosen_specs, is_complete_run):
    """The architecture 120 is that of the GPUs of Blackwell outside data centers."""
    specs = MIXTURES if is_complete_run else chosen_specs
    if not specs:
        pytest.skip("this GPU is tested without dropout: --kernels")
    check_resources(architecture, "bf16", 64, specs, lengths=[256], masks=["dropped"])


def check_resources(architecture, dtype, width, specs, lengths, masks):
    """Checks that every launch compiles, spills few registers, and fits into the shared memory of a GPU."""
    specs_text = ",".join(specs)
    lengths_text = ",".join(str(length) for length in lengths)
    number_of_heads = 8
    lines = run_compile_kernels(architecture, dtype, number_of_heads, width, specs_text, lengths_text, *masks)
    assert lines
    for line in lines:
        launch = json.loads(line)
        most_spilled_bytes = 400 if launch["num_warps"] < launches.MAX_WARPS else 600
        assert launch["spilled"] <= most_spilled_bytes, launch
        assert launch["shared"] <= SHARED_MEMORY_LIMITS[architecture], launch


@interpreted
def test_many_shapes_need_few_kernels():
    """For 200 random numbers of sentences and tokens, there are a handful of sizes of tiles, with few kernels each."""
    *_, number_of_kernels = run_compile_kernels("--count", 200, "random+vanilla")
    assert int(number_of_kernels) <= 15


@interpreted
@pytest.mark.parametrize("name", VARIANTS)
def test_a_block_launches_as_few_kernels_of_a_gpu_as_the_page_says(name, monkeypatch):
    """docs/performance.md has the numbers for one version of torch, in a table with this header:

    model | padded | causal | decoding | padded, with the kernels

    The test counts what is padded, without the kernels of this project and with them.
    """
    monkeypatch.undo()  # the fixture that fills memory with NaN launches more
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from launches import list_launches

    page = (ROOT / "docs" / "performance.md").read_text()
    launches_without_kernels = list_launches(name, causal=False, dtype=torch.bfloat16, with_kernels=False)
    launches_with_kernels = list_launches(name, causal=False, dtype=torch.bfloat16, with_kernels=True)
    number_without_kernels = len(launches_without_kernels)
    number_with_kernels = len(launches_with_kernels)
    if name != "vanilla":  # the kernels do not compute it
        assert number_with_kernels < number_without_kernels
    if torch.__version__.startswith("2.13"):  # the version of the page
        causal = r"\d+"  # any number
        decoding = r"\d+"
        row = rf"\|`{re.escape(name)}`\|{number_without_kernels}\|{causal}\|{decoding}\|{number_with_kernels}\|"
        assert re.search(row, page)


def run_gpu_benchmark(*arguments):
    """Runs benchmarks/gpu.py with sizes of a few words, and returns its CompletedProcess.

    Only the processes that it starts run kernels, so that it may be a warm process itself.
    """
    environment = {**os.environ, "PYTHONPATH": ROOT}
    return warm.run([ROOT / "benchmarks" / "gpu.py", "--dry", *arguments], env=environment)


@pytest.mark.parametrize("part", ["tests", "tests-kernels"])
def test_the_gpu_benchmark_names_a_test_that_exists(part, monkeypatch):
    """Two parts of the benchmark run tests. With --dry each runs a single test, which its command names, such as

    -m pytest -q --device cpu -p no:cacheprovider tests/kernels -k=test_off_by_default
    """
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    command = gpu.list_test_commands(argparse.Namespace(dry=True, device="cpu"))[part]
    paths = [ROOT / word for word in command if word.startswith("tests/")]
    files = []
    for path in paths:
        if path.is_dir():
            files.extend(path.rglob("test_*.py"))
        else:
            files.append(path)
    name_of_test = command[-1].removeprefix("-k=")
    assert any(f"def {name_of_test}(" in file.read_text() for file in files)


@interpreted
def test_each_part_of_the_gpu_benchmark_leaves_a_result_which_a_second_call_keeps(tmp_path, is_complete_run):
    """The benchmark consists of parts, which are run one by one.

    The test runs a part of each kind: two checks, generation, tests, and a causal attention block. Steps of training
    are left out, because they take the interpreter many minutes. The part with tests, which starts pytest, and the
    block run only with --kernels, as they take long.
    """
    parts = ["correct", "backend", "generate-simple"]
    if is_complete_run:  # with --kernels
        parts += ["tests-kernels", "causal-simple+kernels"]
    arguments = ["--parts", *parts, "--out", tmp_path]
    first = run_gpu_benchmark(*arguments)
    assert first.returncode == 0, first.stderr
    assert f"{sys.executable} benchmarks/gpu.py --correctness" in first.stdout
    second = run_gpu_benchmark(*arguments)
    assert second.returncode == 0, second.stderr
    assert "has a result in" in second.stdout
    figures_by_call = json.loads((tmp_path / "correct.json").read_text())
    launches_by_call = {name: figures["kernels"] for name, figures in figures_by_call.items()}
    # Both launch a kernel in each pass. random launches a third one, which adds up the gradient of its parameter R.
    # fixed_random trains no R.
    assert launches_by_call == {"random 2x5": 3, "fixed_random 2x5": 2}


@interpreted
def test_the_gpu_benchmark_refuses_an_unknown_part():
    process = run_gpu_benchmark("--parts", "tea")
    assert process.returncode == 1
    assert "error: --parts tea: choose from tests, tests-kernels, correct" in process.stderr
