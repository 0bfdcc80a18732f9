"""Fixtures of the tests of the kernels.

Without ``--device cuda``, Triton's interpreter runs the kernels, and a stand-in for a driver compiles them. Both are
slow, and the kernels are off by default, so that only a few chosen tests run; ``--kernels`` runs all.
"""

import dataclasses
import functools

import numpy
import pytest
import torch
from kernel_calls import MIXED, list_tensors

from fairseq_synth.computations import kernels
from fairseq_synth.computations.kernels.check import Comparison

# The tests that run by default. They have short and long sentences, each kernel, each place of the logits, and both
# masks.
CHOSEN_TESTS = {
    "test_short_sentences_equal_the_plain_computation[random-padded]",
    "test_short_sentences_equal_the_plain_computation[relative_random-causal]",
    f"test_short_sentences_equal_the_plain_computation[{MIXED}-padded]",
    "test_long_sentences_equal_the_plain_computation[random-padded]",
    "test_long_sentences_equal_the_plain_computation[relative_random+vanilla-causal]",
    "test_terms_of_any_kind_have_the_gradients_of_the_plain_computation[short-2]",
    "test_a_sentence_of_one_token_equals_the_plain_computation[dense]",
    "test_a_sentence_of_one_token_equals_the_plain_computation[factorized_random]",
    "test_queries_keys_and_values_may_be_views_of_one_projection[short-packed]",
    "test_a_long_sentence_has_launches_for_the_gradients_that_are_needed[all]",
    "test_saved_tensors_in_other_memory[3-True]",
    "test_memory_at_any_address[bias]",
    "test_wrong_kernels_are_switched_off[output]",
    "test_wrong_kernels_are_switched_off[matrix]",
    "test_right_kernels_stay_on[random-dtype1]",
}


@pytest.fixture(autouse=True)
def fast_interpreter(request, monkeypatch):
    """Makes Triton's interpreter four times as fast, by changes of its private parts. Each has a function of its own.

    Only with --kernels, the interpreter looks for overflows of integers.
    """
    if not kernels.triton_fits():
        return
    patch_each_module_once(monkeypatch)
    remember_numpy_types(monkeypatch)
    remember_block_types(monkeypatch)
    remember_shapes_of_tensors(monkeypatch)
    if not request.config.getoption("--kernels"):
        leave_out_overflow_checks(monkeypatch)


def patch_each_module_once(monkeypatch):
    """Lets the interpreter replace the functions of `triton.language` once for each module that a kernel calls.

    The interpreter replaces them whenever a kernel calls a function. Within a kernel, the first call from each module
    is enough.
    """
    from triton.runtime import interpreter

    original_patch = interpreter._patch_lang
    original_run = interpreter.GridExecutor.__call__
    patched_modules = set()  # the names of the modules from which the running kernel has called a function

    def run_kernel(self, *args, **kwargs):
        patched_modules.clear()  # another kernel begins
        return original_run(self, *args, **kwargs)

    def patch_once(function):
        if function.__module__ in patched_modules:
            return None
        patched_modules.add(function.__module__)
        return original_patch(function)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_kernel)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)


def remember_numpy_types(monkeypatch):
    """Remembers the type of numpy for each type of Triton. The interpreter builds a dictionary for each look-up."""
    from triton.runtime import interpreter

    find_numpy_type = functools.cache(interpreter._get_np_dtype)
    type_of_addresses = numpy.dtype(numpy.uint64)

    def find_remembered_type(triton_type):
        element_type = triton_type.scalar  # the type of an element of a block, or a type that is no block itself
        # A pointer is an address, whatever it points to. There is a type of pointers for each type of what they point
        # to; so they need not be remembered.
        if element_type.is_ptr():
            return type_of_addresses
        return find_numpy_type(element_type)

    monkeypatch.setattr(interpreter, "_get_np_dtype", find_remembered_type)


def leave_out_overflow_checks(monkeypatch):
    """Lets the interpreter compute sums, differences and products of 32-bit integers without looking for overflows.

    It would compute each of them again in 64 bits. The tensors of the tests are too small for an overflow, and the
    fixture `checked_memory` would notice its wrong address.
    """
    from triton.runtime import interpreter

    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)


def remember_block_types(monkeypatch):
    """Lets Triton check and name a type of blocks once, instead of whenever it makes this type.

    A block type is made from the type of its elements and a shape. All attributes that Triton's `__init__` sets
    (`element_ty`, `shape`, `numel` and `name`) follow from these two, so that they can be copied from the first such
    type.
    """
    from triton import language

    original_init = language.block_type.__init__
    known_attributes = {}  # {(name of the type of the elements, numbers of the shape): attributes of the block type}

    def init_block_type(self, element_ty, shape):
        # The size of a dimension is an integer, or one of Triton's constants, whose `value` is an integer.
        numbers = tuple(getattr(size, "value", size) for size in shape)
        key = (element_ty.name, numbers)
        if key not in known_attributes:
            original_init(self, element_ty, shape)
            known_attributes[key] = dict(vars(self))
        vars(self).update(known_attributes[key])

    monkeypatch.setattr(language.block_type, "__init__", init_block_type)


def remember_shapes_of_tensors(monkeypatch):
    """Lets Triton wrap the numbers of a shape as constants once, instead of for each tensor of this shape.

    Triton's `__init__` of a tensor sets five attributes. Two take long and follow from the shape: `shape` and `numel`,
    which are copied from the first tensor of this shape. The others differ between tensors of a shape: `handle` and
    `type` are its arguments, and `dtype` is the type of an element.
    """
    from triton import language

    original_init = language.tensor.__init__
    known_attributes = {}  # {numbers of the shape: the attributes `shape` and `numel`}

    def init_tensor(self, handle, type):
        if type.is_block():
            numbers = tuple(type.shape.values)  # the shape is one of Triton's own tuples
        else:
            numbers = ()  # a single number has no dimensions
        if numbers not in known_attributes:
            original_init(self, handle, type)
            known_attributes[numbers] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(known_attributes[numbers])
        self.handle = handle
        self.type = type
        self.dtype = type.scalar

    monkeypatch.setattr(language.tensor, "__init__", init_tensor)


@pytest.fixture
def is_complete_run(request):
    """Returns whether tests run with all their lengths of a sentence, which takes three times as long: --kernels."""
    return request.config.getoption("--kernels")


@pytest.fixture
def skip_unless_chosen(request):
    """Skips a test in which the interpreter or the compiler works, unless it is one of the chosen."""
    runs_all = request.config.getoption("--kernels") or request.config.getoption("--all")
    is_on_gpu = request.config.getoption("--device") != "cpu"
    is_interpreted = request.node.get_closest_marker("interpreted") is not None
    is_slow = is_interpreted and not is_on_gpu
    is_chosen = request.node.name in CHOSEN_TESTS
    if is_slow and not is_chosen and not runs_all:
        pytest.skip("the kernels are off by default, and this takes long without a GPU: --kernels")


@pytest.fixture
def kernels_are_on(monkeypatch, skip_unless_chosen):
    """Switches the kernels on, without plans of earlier tests."""
    monkeypatch.setattr(kernels, "SWITCH", "1")
    kernels.find_plan.cache_clear()
    kernels.device_fits.cache_clear()
    # The comparison with the definition, which takes the interpreter as long again, has tests of its own.
    monkeypatch.setattr(kernels, "compare", lambda *_: Comparison(is_finite=True, difference=""))
    # On a GPU the kernels are for half precision, as in fp32 they are slow; but fp32 is what shows that they are right.
    monkeypatch.setattr(kernels, "DTYPES", (torch.float32, *kernels.DTYPES))


@pytest.fixture
def dirty_memory(monkeypatch):
    """Fills new tensors of the kernels with NaN, so that what is not written is noticed."""
    original_new_empty = torch.Tensor.new_empty

    def new_filled_with_nan(x, *size, **kwargs):
        tensor = original_new_empty(x, *size, **kwargs)
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        return tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", new_filled_with_nan)


class MemoryOfKernel:
    """The memory that the running kernel may use: that of its tensors."""

    def __init__(self):
        self.address_ranges = []  # the first address of the memory of each tensor, and the address behind its end

    def begin_kernel(self, tensors):
        """Notes where the tensors of a kernel lie.

        A kernel may read outside a tensor that is a part of a larger one. So the memory of the larger one counts.
        """
        self.address_ranges = []
        for tensor in tensors:
            memory = tensor.untyped_storage()
            begin = memory.data_ptr()
            self.address_ranges.append((begin, begin + memory.nbytes()))

    def end_kernel(self):
        """Forgets the tensors of a kernel, which has ended."""
        self.address_ranges = []

    def check(self, pointers, mask):
        """Fails if one of some pointers, at which the mask is true, points to an element outside the memory.

        Args:
            pointers: a block of pointers of the interpreter, whose `data` are an array of addresses.
            mask: a block of booleans, which are true for the pointers that the kernel uses.
        """
        addresses = pointers.data[mask.data]
        bits_of_element = pointers.get_element_ty().primitive_bitwidth
        bytes_of_element = bits_of_element // 8
        is_inside = numpy.zeros(addresses.shape, dtype=bool)
        for begin, end in self.address_ranges:
            is_inside_this_range = (addresses >= begin) & (addresses + bytes_of_element <= end)
            is_inside |= is_inside_this_range
        assert is_inside.all(), "a kernel reads or writes outside its tensors"


@pytest.fixture
def checked_memory(monkeypatch):
    """Fails a test in which a kernel reads or writes outside the memory of its tensors.

    Only Triton's interpreter can be checked: its kernels read and write at addresses that are arrays of numpy.
    """
    if not kernels.triton_fits():
        return
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    original_run = kernels.run
    original_load = builder.create_masked_load
    original_store = builder.create_masked_store
    memory = MemoryOfKernel()

    def run_with_checks(launch, tensors):
        memory.begin_kernel(list_tensors(tensors))
        original_run(launch, tensors)
        memory.end_kernel()

    def load_with_checks(self, pointers, mask, *other_arguments):
        memory.check(pointers, mask)
        return original_load(self, pointers, mask, *other_arguments)

    def store_with_checks(self, pointers, value, mask, *other_arguments):
        memory.check(pointers, mask)
        return original_store(self, pointers, value, mask, *other_arguments)

    monkeypatch.setattr(kernels, "run", run_with_checks)
    monkeypatch.setattr(builder, "create_masked_load", load_with_checks)
    monkeypatch.setattr(builder, "create_masked_store", store_with_checks)
