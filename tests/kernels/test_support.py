"""The kernels take some calls, and a user is told why they do not take the others."""

import pytest
import torch
from helpers import make_attention
from kernel_calls import attend_by_kernels

from fairseq_synth.computations import kernels
from fairseq_synth.computations.kernels import launches
from fairseq_synth.errors import SynthesizerError
from fairseq_synth.logits import Bias, Logits, Outer, Product

pytestmark = [
    pytest.mark.usefixtures("on_device", "skip_unless_chosen", "kernels_are_on", "dirty_memory"),
    # In the interpreter, numpy warns about minus infinity.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not kernels.triton_fits(), reason="no Triton that is new enough for the kernels"),
]
interpreted = pytest.mark.interpreted


def test_off_by_default(monkeypatch):
    """The kernels take a call only if they are switched on. A setting that is neither on nor off is an error."""
    logits = Logits([Bias(torch.randn(1, 2, 7, 7))])
    value = torch.randn(3, 2, 7, 8)
    assert kernels.refuses(logits, value, None, None, 0.0) == ""
    for setting in ("", "0"):
        monkeypatch.setattr(kernels, "SWITCH", setting)
        assert kernels.refuses(logits, value, None, None, 0.0) == "they are switched off"
    monkeypatch.setattr(kernels, "SWITCH", "true")
    with pytest.raises(SynthesizerError, match="FAIRSEQ_SYNTH_KERNELS=true: use 1 for on or 0 for off"):
        kernels.refuses(logits, value, None, None, 0.0)


@pytest.mark.parametrize(
    "name, value, end_of_message",
    [
        # There is no Triton that fits.
        (
            "triton_fits",
            lambda: False,
            "the kernels need an NVIDIA GPU of compute capability 8.0 or higher, and Triton",
        ),
        # The kernels are for no type at all.
        ("DTYPES", (), "has no effect in float32: use --fp16, --bf16 or --amp"),
    ],
)
def test_a_warning_says_once_why_the_kernels_are_off(name, value, end_of_message, monkeypatch, caplog):
    """Either Triton does not fit, or the kernels are for no type at all. The second of two calls does not warn again.

    `value` replaces the attribute `name` of the module `kernels`.
    """
    monkeypatch.setattr(kernels, name, value)
    # On the CPU, where the interpreter runs the kernels, these types count. Let them be the same as on a GPU: none, if
    # `DTYPES` was replaced.
    monkeypatch.setattr(kernels, "INTERPRETED", kernels.DTYPES)
    # `device_fits` caches its result, and so warns once. The fixture `kernels_are_on` has cleared the cache.
    for _ in range(2):
        assert not kernels.device_fits(torch.device("cpu"), torch.float32)
    kernels.device_fits.cache_clear()  # so that no later test finds these results
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("FAIRSEQ_SYNTH_KERNELS: has no effect ")
    assert message.endswith(end_of_message)


@pytest.mark.parametrize(
    "dtype, capability, fits",
    [
        (torch.bfloat16, (9, 0), True),
        (torch.float16, (8, 0), True),
        (torch.float32, (9, 0), False),
        (torch.bfloat16, (7, 5), False),
    ],
)
def test_the_kernels_are_for_new_gpus_in_half_precision(dtype, capability, fits, monkeypatch):
    """A GPU needs a compute capability of 8.0 or higher."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(kernels, "DTYPES", kernels.DTYPES[1:])  # as users have it, without fp32
    assert kernels.device_fits(torch.device("cuda"), dtype) == fits
    kernels.device_fits.cache_clear()


def test_what_is_not_supported(monkeypatch):
    """Everything that the kernels do not take goes to the other computations."""
    value = torch.randn(3, 2, 7, 8)
    query = torch.randn(3, 2, 7, 8)
    product = Product(query, query)  # queries and keys of each sentence
    product_with_shared_key = Product(query, query[:1])  # a key for all sentences
    product_with_shared_query = Product(query[:1], query)
    product_of_shared_factors = Product(query[:1], query[:1])
    outer = Outer(query, 3)
    matrix = Bias(torch.randn(1, 2, 7, 7))
    matrix_of_each_sentence = Bias(torch.randn(3, 2, 7, 7))

    def is_taken(terms, value=value):
        return attend_by_kernels(terms, value) is not None

    # A mixture of one term of each kind is taken. An inner product alone is left to torch's fused attention.
    assert is_taken([product, product_with_shared_key, outer, matrix])
    assert not is_taken([product])

    # For a batch of one sentence, a product of shared factors is an inner product, too. A mixture is taken.
    assert not is_taken([product_of_shared_factors], value[:1])
    assert is_taken([product, matrix])

    # Two terms of one kind are not taken, nor is a term that the kernels do not know.
    assert not is_taken([product, product, matrix])
    assert not is_taken([product_with_shared_key, product_with_shared_key, matrix])
    assert not is_taken([outer, outer, matrix])
    assert not is_taken([product_with_shared_query, matrix])
    assert not is_taken([matrix_of_each_sentence, matrix])

    # Heads of more than 64 features are too wide for three terms, and heads of more than 128 for any.
    wide_query, wide_key = torch.randn(2, 3, 2, 7, 72)
    wide_product = Product(wide_query, wide_key)
    wide_value = wide_query
    assert is_taken([product, matrix], wide_value)
    assert not is_taken([product, product_with_shared_key, matrix], wide_value)
    assert not is_taken([wide_product, product_with_shared_key, matrix])
    wider = torch.randn(3, 2, 7, 136)
    assert not is_taken([matrix], wider)
    assert not is_taken([Product(wider, wider[:1])])

    # These layers do not call the kernels: with another mask than the causal one, on torch's meta device, in double
    # precision, and with an empty batch.
    module = make_attention("random")
    x = torch.randn(7, 3, 6)
    monkeypatch.setattr(kernels, "compute", lambda *_: pytest.fail("a call of the kernels"))
    module(x, attn_mask=torch.zeros(7, 7))
    module.to("meta")(x.to("meta"))
    module_in_double_precision = make_attention("random").double()
    module_in_double_precision(x.double())
    module_in_double_precision(x[:, :0].double())
    assert not is_taken([matrix], value[:0])

    # A call that torch records is not taken.
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    assert not is_taken([matrix])


@pytest.mark.parametrize(
    "error, expected_class, expected_message",
    [
        # A user is told in one line what to do, and what the error was.
        (
            RuntimeError("out of registers"),
            SynthesizerError,
            r"set FAIRSEQ_SYNTH_KERNELS=0: a kernel failed: RuntimeError\('out of registers'\)$",
        ),
        # This error is raised unchanged, because fairseq catches it and skips the batch.
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), torch.cuda.OutOfMemoryError, "out of memory"),
    ],
)
def test_a_kernel_that_does_not_load(error, expected_class, expected_message, monkeypatch):
    """An error of the compiler reaches the user, and the next call tries to compile the kernel again."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("the interpreter compiles nothing")
    compiled_launches = []

    def fail_to_compile(launch, arguments):
        compiled_launches.append(launch)
        raise error

    monkeypatch.setattr(kernels, "is_interpreted", lambda: False)
    monkeypatch.setattr(launches.Launch, "compile", fail_to_compile)
    for _ in range(2):
        logits = Logits([Bias(torch.randn(1, 2, 7, 7))])
        value = torch.randn(3, 2, 7, 8)
        with pytest.raises(expected_class, match=expected_message):
            kernels.compute(logits, value, None, None)
    assert len(compiled_launches) == 2
