"""Which kernels are launched, and how they are compiled, for GPUs that are not there."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import warm
from helpers import NAMES, make_attention, padding_mask
from kernel_calls import (
    MIXED,
    all_of,
    by_definition,
    by_kernels,
    is_supported,
    mixed,
    plan_with,
)

from fairseq_synth.architectures import VARIANTS
from fairseq_synth.computations import kernels
from fairseq_synth.computations.kernels import launches
from fairseq_synth.computations.kernels.check import compare
from fairseq_synth.computations.kernels.tensors import NO_WEIGHTS
from fairseq_synth.logits import Bias, Product
from fairseq_synth.positions import take_columns, take_window
from recipes.steps import ROOT

triton = pytest.importorskip("triton")
from compile_kernels import LIMITS  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

from fairseq_synth.computations.kernels import triton_attention, triton_sums  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("on_device", "chosen", "kernels_are_on", "dirty_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy in the interpreter, about minus infinity
    pytest.mark.skipif(not kernels.triton_fits(), reason="no Triton that is new enough for the kernels"),
]
interpreted = pytest.mark.interpreted


@interpreted
@pytest.mark.parametrize(
    "wanted,names",
    [
        ("a", ["backward_rows", "backward_columns", "add"]),
        ("p", ["backward_rows", "backward_columns"]),
        ("R", ["backward_rows", "backward_matrix", "add"]),
        ("x", ["backward_rows"]),
        ("w", ["backward_rows", "backward_columns", "add"]),
        ("pRa", ["backward_rows", "backward_columns", "backward_matrix", "add"]),
    ],
)
def test_launches_of_what_is_wanted(wanted, names, monkeypatch):
    """A long sentence has a launch for each place of gradients, and their values do not depend on which are wanted.

    Each of the three sentences has programs of its own, but where gradients are sums over all of them.
    """
    plan_with(monkeypatch, "is_short", lambda _: False)
    plan_with(monkeypatch, "PROGRAMS", 1)
    shapes = dict(p=(7, 3, 48), R=(2, 7, 7), a=(1, 2), x=(3, 2, 7, 8), w=(2, 9, 8))
    x = {name: torch.randn(shape, requires_grad=name in wanted) for name, shape in shapes.items()}
    called, run = [], kernels.run
    monkeypatch.setattr(kernels, "run", lambda launch, t: (called.append(launch), run(launch, t)))

    def gradients(computation):
        q, k, v = (part.unflatten(-1, (2, 8)).permute(1, 2, 0, 3) for part in x["p"].split(16, dim=-1))
        shared = Product(x["x"], take_columns(x["w"], all_of(7)))
        summand = shared if set(wanted) & set("xw") else Product(q, k)
        logits = mixed(x["a"], (summand, 0), (Bias(take_window(x["R"], all_of(7))), -1))
        out = computation(logits, v)
        return torch.autograd.grad(out.square().sum(), [x[name] for name in wanted])

    for found, expected in zip(gradients(by_kernels), gradients(by_definition)):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert [launch.kernel.__name__ for launch in called] == ["forward", *names]
    programs = {launch.kernel.__name__: launch.grid[0] for launch in called}
    number = 2 if wanted == "w" else 6
    assert programs.get("backward_columns", number) == number and programs.get("backward_matrix", 2) == 2


class GpuKernel:
    """A kernel that is compiled, as on a GPU, and then run by the interpreter.

    Both `compiled` and `called` get its arguments' types, its grid and its options.
    """

    def __init__(self, kernel, spills, compiled, called):
        self.kernel = kernel
        self.__name__ = f"{kernel.__module__}.{kernel.__name__}"
        self.spills, self.compiled, self.called = spills, compiled, called

    def warmup(self, *args, grid, **options):
        self.compiled[self.__name__] = (types_of(args), (*grid, 1, 1)[:3], options)
        return LoadedKernel(self, options)


class LoadedKernel:
    """What `GpuKernel.warmup` returns; spilled registers are known once it is loaded for a grid."""

    def __init__(self, gpu_kernel, options):
        self.gpu_kernel, self.options = gpu_kernel, options

    def __getitem__(self, grid):
        gpu_kernel = self.gpu_kernel
        is_small = self.options["num_warps"] < launches.MAX_WARPS
        self.n_spills = launches.MAX_SPILLS + 1 if gpu_kernel.spills and is_small else 0

        def call(*args):
            gpu_kernel.called[gpu_kernel.__name__] = (types_of(args), grid, self.options)
            gpu_kernel.kernel[grid](*args)

        return call


def types_of(x):
    """The type of an argument, or of all in a structure."""
    if isinstance(x, tuple):
        return [types_of(y) for y in x]
    return x.dtype if isinstance(x, torch.Tensor) else type(x)


@pytest.fixture
def gpu(monkeypatch):
    """Makes kernels for a GPU, which spill registers or not; returns what is compiled, and what is called."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("a GPU compiles")

    def make(spills):
        compiled, called = {}, {}
        names = ["forward_short", "backward_short", "forward", "backward_rows", "backward_columns", "backward_matrix"]
        for module, name in [(triton_sums, "add"), *((triton_attention, name) for name in names)]:
            monkeypatch.setattr(module, name, GpuKernel(getattr(module, name), spills, compiled, called))
        monkeypatch.setattr(kernels, "device_fits", lambda *_: True)
        monkeypatch.setattr(kernels, "is_interpreted", lambda: False)
        return compiled, called

    return make


@interpreted
@pytest.mark.parametrize("length,spills", [(7, False), (70, True)])
def test_kernels_are_compiled_before_they_are_called(length, spills, gpu):
    """Each kernel of both passes, with arguments of the types that it is called with; with more warps if it spills."""
    compiled, called = gpu(spills)
    module = make_attention("random+dense", max_length=length, dropout=0.1).train()
    x = torch.randn(length, 2, 6, requires_grad=True)
    out, _ = module(x, key_padding_mask=padding_mask([length, length - 1]))
    assert set(compiled) > set(called)  # the backward pass too
    out.sum().backward()
    assert compiled == called and len(called) == (3 if length == 7 else 5)
    assert all((options["num_warps"] == launches.MAX_WARPS) == spills for _, _, options in called.values())


@interpreted
def test_compiled_kernels_are_compared_before_they_are_used(gpu, monkeypatch):
    """With dropout too: the same kernels are called with a probability of 0."""
    compared = []
    monkeypatch.setattr(kernels, "CHECKED", set())
    monkeypatch.setattr(kernels, "compare", lambda *call: compared.append(compare(*call)) or compared[-1])
    compiled, called = gpu(False)
    module = make_attention("random+dense", max_length=7, dropout=0.1).train()
    out, _ = module(torch.randn(7, 2, 6, requires_grad=True))
    assert compiled == called and len(called) == 3
    assert [found.difference for found in compared] == [""] and kernels.SWITCH == "1"
    out.sum().backward()


def layout(**sizes):
    """Returns a layout of a GPU, in which all sizes that are not given are 0."""
    fields = dict.fromkeys(launches.Layout._fields, 0)
    fields.update(value_width=64, weight_rows=NO_WEIGHTS, wanted=())
    fields.update(sizes)
    return launches.Layout(**fields)


QUERIES = {"query_width": 64}
SHARED_KEYS = {"shared_width": 64}
OUTER = {"right_width": 9}
MATRIX = {"matrix_columns": 9}


@pytest.mark.parametrize(
    "length, sizes",
    [
        (32, MATRIX),
        (32, {**QUERIES, **SHARED_KEYS, **MATRIX}),
        (32, {"value_width": 72, **MATRIX}),
        (32, {"value_width": 72, "shared_width": 72}),
        (64, MATRIX),
        (64, QUERIES),
        (64, SHARED_KEYS),
        (64, {"value_width": 40, "query_width": 40}),
    ],
)
def test_short_sentences_whose_tiles_fit_into_registers(length, sizes):
    assert layout(length=length, **sizes).is_short()


@pytest.mark.parametrize(
    "length, sizes",
    [
        (32, {**QUERIES, **SHARED_KEYS, **OUTER, **MATRIX}),
        (32, {"query_width": 64, "shared_width": 72}),
        (32, {"value_width": 72, **OUTER}),
        (33, {**QUERIES, **MATRIX}),
        (64, {"value_width": 65, **MATRIX}),
        (64, {"value_width": 40, "shared_width": 40}),
        (64, {**QUERIES, **MATRIX}),
        (64, OUTER),
        (65, MATRIX),
        (65, QUERIES),
    ],
)
def test_sentences_that_are_too_long_or_have_too_many_summands_for_registers(length, sizes):
    assert not layout(length=length, **sizes).is_short()


def test_tiles():
    """As they were measured: rows, columns, warps and stages."""
    q = QUERIES
    x = SHARED_KEYS
    outer = OUTER
    r = MATRIX
    for sizes, forward, backward in (
        (dict(length=9, **r), (16, 16, 2, 1), (16, 16, 2, 1)),
        (dict(length=32, **q, **r), (32, 32, 1, 1), (32, 32, 2, 1)),
        (dict(length=32, **outer), (32, 32, 1, 1), (32, 32, 2, 1)),
        (dict(length=33, **r), (64, 64, 4, 1), (64, 64, 4, 1)),
        (dict(length=9, value_width=65, **r), (16, 16, 4, 1), (16, 16, 4, 1)),
    ):
        assert [launches.Tile.for_whole_sentence(layout(**sizes), is_forward) for is_forward in (True, False)] == [
            forward,
            backward,
        ]
    for sizes, *expected in (
        (dict(length=130, **r), (64, 64, 4, 2), (64, 32, 4, 3), (32, 64, 4, 2), (64, 64, 4, 2)),
        (dict(length=130, **q, **r), (64, 64, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)),
        (dict(length=130, **q, **x), (64, 32, 4, 3), (64, 32, 4, 3), (32, 64, 4, 3), (64, 64, 4, 2)),
        (dict(length=130, **outer), (64, 32, 4, 3), (64, 32, 4, 3), (32, 64, 4, 2), (64, 64, 4, 2)),
        (dict(length=130, **q, **x, **r), (32, 32, 4, 2), (32, 32, 4, 3), (32, 32, 4, 2), (32, 32, 4, 2)),
        (dict(length=130, **q, **outer, **r), (16, 16, 4, 2), (16, 16, 4, 3), (16, 16, 4, 2), (16, 16, 4, 2)),
        (dict(length=20, **r), (32, 32, 4, 2), (32, 32, 4, 3), (32, 32, 4, 2), (32, 32, 4, 2)),
    ):
        assert [
            launches.Tile.for_kernel(kernel, layout(**sizes)) for kernel in ("forward", "rows", "columns", "matrix")
        ] == expected


@pytest.mark.parametrize(
    "sizes, expected",
    [
        (dict(length=32, query_width=64, matrix_columns=32), [(8, 125), 8, 1, (8, 63), 16, 2]),
        (dict(length=33, matrix_columns=33), [(8, 125), 8, 4, (8, 33), 31, 4]),
        (dict(length=130, matrix_columns=130), [(24000, 1), 4, (24000, 1), 4, (24000, 1), 1, 4, (216, 1), 334, 4]),
    ],
)
def test_programs(sizes, expected):
    """So many as were measured to be fast: of each launch its grid, the sentences that a program sums over, warps."""
    sizes = dict(bsz=1000, num_heads=8, dtypes=(torch.bfloat16,), matrix_rows=sizes["length"], **sizes)
    plan = launches.Plan(layout(wanted=("packed", "r"), **sizes))
    found = []
    for launch in [plan.forward, *plan.backward[:-1]]:
        sentences = launch.numbers[len(plan.numbers) : -1][:1]
        found += [launch.grid[:2], *sentences, launch.options["num_warps"]]
    assert found == expected


def test_memory_for_sums():
    """A sum for each program: of the gradient of what is shared, or of one weight for each head."""
    shared = dict(num_heads=8, dtypes=(torch.bfloat16,), number_of_weights=3)
    short = dict(length=32, bsz=1000, matrix_rows=32, matrix_columns=32, wanted=("r",))
    assert launches.Plan(layout(**shared, **short)).sums == {"sum_r": 63 * 8 * 32 * 32}  # 63 groups
    long = dict(
        length=130,
        bsz=50,
        query_width=64,
        left_width=10,
        right_width=13,
        matrix_rows=130,
        matrix_columns=130,
        weight_rows=launches.WeightRows(q=0, x=-1, outer=1, c=-1, r=2),
    )
    plan = launches.Plan(layout(**shared, **long, wanted=("packed", "pair", "r", "weights")))
    tiles = 9  # of 16 rows or columns
    of_weights = {"sum_a_outer": 50 * tiles * 8, "sum_a_q": 50 * tiles * 8, "sum_a_r": tiles * tiles * 8}
    assert plan.sums == {"delta": 50 * 8 * 130, "sum_r": 8 * 130 * 130, **of_weights}


@pytest.mark.parametrize(
    "sizes, expected",
    [
        (dict(length=130, right_width=4), dict(FACTOR=64, UNIT=8, PRECISION="tf32")),
        (dict(length=9, value_width=12, query_width=8), dict(FACTOR=16, UNIT=1, Q_BLOCK=16, A_R=3)),
        (dict(dtypes=(torch.float32,)), dict(PRECISION="ieee")),
    ],
)
def test_what_kernels_are_compiled_for(sizes, expected):
    """Both factors fit, several numbers are read at once where all widths allow it, and fp32 is not rounded."""
    sizes = {"dtypes": (torch.bfloat16,), "weight_rows": NO_WEIGHTS._replace(r=3), **sizes}
    found = launches.make_constants(layout(**sizes), launches.Tile(16, 16, 4))
    assert {name: getattr(found, name).value for name in expected} == expected


def test_a_launch_by_default():
    """One program in the directions that are not said, and one stage."""
    launch = launches.Launch(None, (5,), (), (), num_warps=4)
    assert launch.grid == (5, 1, 1) and launch.options == {"num_warps": 4, "num_stages": 1}


WARPS_AND_STAGES = [
    (0, 99, 99, [(2, 3)], (2, 3)),
    (0, 1, 1, [(2, 3), (2, 2), (2, 1)], (2, 1)),  # shared memory for one stage
    (100, 99, 99, [(2, 3)], (2, 3)),
    (101, 99, 99, [(2, 3), (4, 3), (8, 3)], (8, 3)),
    (101, 2, 2, [(2, 3), (2, 2), (4, 2), (8, 2)], (8, 2)),
    (101, 99, 2, [(2, 3), (4, 3), (8, 3), (8, 2)], (8, 2)),
    (101, 99, 0, [(2, 3), (4, 3), (8, 3), (8, 2), (8, 1)], (4, 3)),  # with 8 warps it does not fit: with 4 it does
]


@pytest.mark.parametrize("spills,stages,stages_of_8_warps,expected,kept", WARPS_AND_STAGES)
def test_how_a_kernel_is_compiled_again(spills, stages, stages_of_8_warps, expected, kept):
    """With fewer stages where shared memory ends, with more warps where registers do."""
    kernel = CompiledOnly(spills, stages, stages_of_8_warps)
    launch = launches.Launch(kernel, (7,), (), (), num_warps=2, num_stages=3)
    launch.compile([])
    assert kernel.tried == expected and launch.compiled == (kept, (7, 1, 1)) and tuple(launch.options.values()) == kept


def test_a_kernel_that_is_too_large():
    with pytest.raises(OutOfResources):
        launches.Launch(CompiledOnly(0, 0, 0), (7,), (), (), num_warps=2, num_stages=3).compile([])


class CompiledOnly:
    """A kernel that spills, and a GPU with shared memory for so many stages."""

    def __init__(self, spills, stages, stages_of_8_warps):
        self.n_spills, self.stages, self.tried = spills, {8: stages_of_8_warps}, []
        self.stages.update({2: stages, 4: stages})

    def warmup(self, *args, grid, **options):
        self.tried.append(tuple(options.values()))
        return self

    def __getitem__(self, grid):
        warps, stages = self.tried[-1]
        if stages > self.stages[warps]:
            raise OutOfResources(2, 1, "shared memory")
        return self.tried[-1], grid


def without_interpreter(*arguments):
    """What tests/kernels/compile_kernels.py prints, line by line."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    done = warm.run([ROOT / "tests" / "kernels" / "compile_kernels.py", *arguments], env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


COMPILED = [spec for spec in dict.fromkeys([*NAMES, *VARIANTS, MIXED]) if is_supported(spec)]
# factorized_random has random's kernels
FEWER = [spec for spec in COMPILED if "factorized_random" not in spec or spec == MIXED]
MIXTURES = ["random+vanilla", "dense+vanilla"]
ALL = [(90, "bf16", 64, COMPILED, [32, 256], []), (90, "bf16", 64, MIXTURES, [64, 256], ["causal"])]
# sm_86 has the products of sm_80 and less shared memory
ALL += [(86, "bf16", width, FEWER, [256], []) for width in (64, 128)] + [(80, "bf16", 64, MIXTURES, [32, 256], [])]
ALL += [(90, *other, MIXTURES, [32, 256], []) for other in (("fp16", 64), ("bf16", 8), ("bf16", 40), ("bf16", 72))]


@interpreted
@pytest.mark.parametrize("number", range(len(ALL)))
def test_resources(number):
    """Every launch compiles, spills few registers, and fits into a GPU's shared memory."""
    architecture, dtype, width, specs, lengths, masks = ALL[number]
    check_resources(architecture, dtype, width, ",".join(specs), ",".join(map(str, lengths)), "padded", *masks)


@interpreted
@pytest.mark.parametrize("architecture", [80, 90, 120])
def test_resources_with_dropout(architecture):
    """On Blackwell outside data centers too."""
    check_resources(architecture, "bf16", 64, ",".join(MIXTURES), "256", "dropped")


def check_resources(architecture, dtype, width, *more):
    found = without_interpreter(architecture, dtype, 8, width, *more)
    assert found
    for launch in map(json.loads, found):
        most = 400 if launch["num_warps"] < launches.MAX_WARPS else 600  # bytes
        assert launch["spilled"] <= most, launch
        assert launch["shared"] <= LIMITS[architecture], launch


@interpreted
def test_few_kernels_for_many_shapes():
    """200 random numbers of sentences and tokens: a handful of sizes of tiles, with a few kernels each."""
    assert int(without_interpreter("--count", 200, "random+vanilla")[-1]) <= 15


@interpreted
def test_launches(monkeypatch):
    """A block launches fewer kernels of a GPU, and no more than docs/performance.md says."""
    monkeypatch.undo()  # memory filled with NaN is a launch more
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import launches

    page = (ROOT / "docs" / "performance.md").read_text()
    for name in VARIANTS:
        before = len(launches.list_calls(name, padded=True, dtype=torch.bfloat16, with_kernels=False))
        after = len(launches.list_calls(name, padded=True, dtype=torch.bfloat16, with_kernels=True))
        assert after < before or name == "vanilla"
        if torch.__version__.startswith("2.13"):
            assert re.search(rf"\|`{re.escape(name)}`\|{before}\|\d+\|\d+\|{after}\|", page)


@interpreted
def test_measuring(tmp_path):
    """benchmarks/gpu.py in sizes of a few words: each part leaves a result, which a second call keeps."""
    # one of each kind but the steps, which take the interpreter many minutes with the kernels
    parts = ["tests", "correct", "backend", "causal-mixed", "generate-simple"]
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--dry", "--parts", *parts, "--out", tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for said in (f"{sys.executable} benchmarks/gpu.py --correctness", "has a result in"):
        done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
    rows = json.loads((tmp_path / "correct.json").read_text())
    assert {name: row["kernels"] for name, row in rows.items()} == {"random 3x7": 3, "fixed_random 3x7": 2}
    done = subprocess.run([*map(str, command[:3]), "--parts", "tea"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "error: --parts tea: choose from tests, tests-kernels, correct" in done.stderr
