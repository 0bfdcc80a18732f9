"""Which calls the kernels take, and what a user is told about the others."""

import pytest
import torch
from helpers import make_attention
from kernel_calls import (
    attend_by_kernels,
)

from fairseq_synth.computations import kernels
from fairseq_synth.computations.kernels import launches
from fairseq_synth.errors import SynthesizerError
from fairseq_synth.logits import Bias, Logits, Outer, Product

pytestmark = [
    pytest.mark.usefixtures("on_device", "chosen", "kernels_are_on", "dirty_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy in the interpreter, about minus infinity
    pytest.mark.skipif(not kernels.triton_fits(), reason="no Triton that is new enough for the kernels"),
]
interpreted = pytest.mark.interpreted


def test_off_by_default(monkeypatch):
    logits, value = Logits([Bias(torch.randn(1, 2, 7, 7))]), torch.randn(3, 2, 7, 8)
    assert kernels.refuses(logits, value, None, None, 0.0) == ""
    for setting in ("", "0"):
        monkeypatch.setattr(kernels, "SWITCH", setting)
        assert kernels.refuses(logits, value, None, None, 0.0) == "they are switched off"
    monkeypatch.setattr(kernels, "SWITCH", "true")
    with pytest.raises(SynthesizerError, match="FAIRSEQ_SYNTH_KERNELS=true: use 1 for on or 0 for off"):
        kernels.refuses(logits, value, None, None, 0.0)


@pytest.mark.parametrize(
    "name, value, message",
    [
        (
            "triton_fits",
            lambda: False,
            "the kernels need an NVIDIA GPU of compute capability 8.0 or higher, and Triton",
        ),
        ("DTYPES", (), "has no effect in float32: use --fp16, --bf16 or --amp"),
    ],
)
def test_why_the_kernels_are_off(name, value, message, monkeypatch, caplog):
    """Which is said once."""
    monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr(kernels, "INTERPRETED", kernels.DTYPES)
    for _ in range(2):
        assert not kernels.device_fits(torch.device("cpu"), torch.float32)
    kernels.device_fits.cache_clear()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("FAIRSEQ_SYNTH_KERNELS: has no effect ") and said.endswith(message)


@pytest.mark.parametrize(
    "dtype, capability, fits",
    [
        (torch.bfloat16, (9, 0), True),
        (torch.float16, (8, 0), True),
        (torch.float32, (9, 0), False),
        (torch.bfloat16, (7, 5), False),
    ],
)
def test_which_gpus_and_types(dtype, capability, fits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(kernels, "DTYPES", kernels.DTYPES[1:])  # as users have it, without fp32
    assert kernels.device_fits(torch.device("cuda"), dtype) == fits
    kernels.device_fits.cache_clear()


def test_what_is_not_supported(monkeypatch):
    """Everything else goes to the other computations."""
    bias, value = torch.randn(1, 2, 7, 7), torch.randn(3, 2, 7, 8)
    q = torch.randn(3, 2, 7, 8)
    own, half, outer, matrix = Product(q, q), Product(q, q[:1]), Outer(q, 3), Bias(bias)

    def supported(logits, value=value):
        return attend_by_kernels(logits, value) is not None

    assert supported([own, half, outer, matrix])
    assert not supported([own])  # torch's fused attention
    assert not supported([Product(q[:1], q[:1])], value[:1]) and supported([own, matrix], value)
    for twice in ([own, own], [half, half], [outer, outer], [Product(q[:1], q)], [Bias(torch.randn(3, 2, 7, 7))]):
        assert not supported([*twice, matrix])
    wide, wider = torch.randn(2, 3, 2, 7, 72), torch.randn(3, 2, 7, 136)
    assert supported([own, matrix], wide[0]) and not supported([own, half, matrix], wide[0])
    assert not supported([Product(wide[0], wide[1]), half, matrix])
    assert not supported([matrix], wider) and not supported([Product(wider, wider[:1])])
    module, x = make_attention("random"), torch.randn(7, 3, 6)
    monkeypatch.setattr(kernels, "compute", lambda *_: pytest.fail("a call of the kernels"))
    module(x, attn_mask=torch.zeros(7, 7))
    module.to("meta")(x.to("meta"))
    module = make_attention("random").double()
    module(x.double())
    module(x[:, :0].double())
    assert not supported([matrix], value[:0])
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    assert not supported([matrix])


@pytest.mark.parametrize("error", [RuntimeError("out of registers"), torch.cuda.OutOfMemoryError("CUDA out of memory")])
def test_a_kernel_that_does_not_load(error, monkeypatch):
    """One line; but fairseq sees when memory ends. The next call tries again."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("the interpreter compiles nothing")
    tried = []

    def compile(*_):
        tried.append(True)
        raise error

    monkeypatch.setattr(kernels, "is_interpreted", lambda: False)
    monkeypatch.setattr(launches.Launch, "compile", compile)
    line = "set FAIRSEQ_SYNTH_KERNELS=0: a kernel failed: RuntimeError.'out of registers'.$"
    for _ in range(2):
        expected = (SynthesizerError, line) if type(error) is RuntimeError else (type(error), "out of memory")
        with pytest.raises(expected[0], match=expected[1]):
            kernels.compute(Logits([Bias(torch.randn(1, 2, 7, 7))]), torch.randn(3, 2, 7, 8), None, None)
    assert len(tried) == 2
