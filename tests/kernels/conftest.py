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
    "test_terms_that_the_kernels_cannot_read_where_they_are_are_copied[short-2]",
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
    """Makes Triton's interpreter four times as fast.

    - The interpreter replaces the functions of `triton.language` whenever a kernel calls a function. Within a kernel,
      the first call from each module is enough.
    - It computes every sum, difference and product of 32-bit integers again in 64 bits, to find overflows. Only
      --kernels keeps this check. The tensors of the tests are too small for an overflow, and the fixture
      `checked_memory` would notice its wrong address.
    - It builds a dictionary of all types whenever it looks up a type of numpy.
    - It checks and wraps the numbers of a shape whenever it makes a type or a tensor of this shape. Once is enough.
    """
    if not kernels.triton_fits():
        return
    from triton.runtime import interpreter

    remember_shapes(monkeypatch)
    patch_language = interpreter._patch_lang
    run_kernel = interpreter.GridExecutor.__call__
    find_numpy_type = functools.cache(interpreter._get_np_dtype)
    address = numpy.dtype(numpy.uint64)
    patched_modules = set()

    def run_kernel_patched_once(self, *args, **kwargs):
        patched_modules.clear()
        return run_kernel(self, *args, **kwargs)

    def patch_once(function):
        if function.__module__ in patched_modules:
            return None
        patched_modules.add(function.__module__)
        return patch_language(function)

    def find_cached_numpy_type(triton_type):
        element = triton_type.scalar
        return address if element.is_ptr() else find_numpy_type(element)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_kernel_patched_once)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter, "_get_np_dtype", find_cached_numpy_type)
    if not request.config.getoption("--kernels"):
        options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", options)


def remember_shapes(monkeypatch):
    """Lets Triton check and wrap the numbers of a shape once, instead of for each type and tensor of this shape."""
    from triton import language

    make_block_type = language.block_type.__init__
    make_tensor = language.tensor.__init__
    attributes_of_block_types = {}  # by the name of the type of the elements and the shape
    attributes_of_tensors = {}  # by the shape

    def make_block_type_of_known_shape(self, element_ty, shape):
        numbers = tuple(getattr(size, "value", size) for size in shape)
        key = (element_ty.name, numbers)
        if key not in attributes_of_block_types:
            make_block_type(self, element_ty, shape)
            attributes_of_block_types[key] = dict(vars(self))
        vars(self).update(attributes_of_block_types[key])

    def make_tensor_of_known_shape(self, handle, type):
        numbers = tuple(type.shape.values) if type.is_block() else ()
        if numbers not in attributes_of_tensors:
            make_tensor(self, handle, type)
            attributes_of_tensors[numbers] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(attributes_of_tensors[numbers], handle=handle, type=type, dtype=type.scalar)

    monkeypatch.setattr(language.block_type, "__init__", make_block_type_of_known_shape)
    monkeypatch.setattr(language.tensor, "__init__", make_tensor_of_known_shape)


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
    address_ranges = []  # the first address of each tensor of the running kernel, and the address behind its end

    def run_with_checks(launch, tensors):
        for tensor in list_tensors(tensors):
            storage = tensor.untyped_storage()
            begin = storage.data_ptr()
            address_ranges.append((begin, begin + storage.nbytes()))
        original_run(launch, tensors)
        address_ranges.clear()

    def check_addresses(pointers, mask):
        addresses = pointers.data[mask.data]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        is_inside = numpy.zeros(addresses.shape, dtype=bool)
        for begin, end in address_ranges:
            is_inside |= (addresses >= begin) & (addresses + size <= end)
        assert is_inside.all(), "a kernel reads or writes outside its tensors"

    def load_with_checks(self, pointers, mask, *other_arguments):
        check_addresses(pointers, mask)
        return original_load(self, pointers, mask, *other_arguments)

    def store_with_checks(self, pointers, value, mask, *other_arguments):
        check_addresses(pointers, mask)
        return original_store(self, pointers, value, mask, *other_arguments)

    monkeypatch.setattr(kernels, "run", run_with_checks)
    monkeypatch.setattr(builder, "create_masked_load", load_with_checks)
    monkeypatch.setattr(builder, "create_masked_store", store_with_checks)
