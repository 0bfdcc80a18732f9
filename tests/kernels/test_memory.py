"""The kernels read tensors wherever they lie, and gradients of padding go nowhere."""

import functools

import pytest
import torch
from helpers import padding_mask
from kernel_calls import (
    attend_by_kernels,
    inputs_of_length,
    list_tensors,
    plan_with,
)

from fairseq_synth.computations import kernels
from fairseq_synth.logits import Bias, Logits, Product
from fairseq_synth.positions import take_columns, take_window

pytestmark = [
    pytest.mark.usefixtures("on_device", "chosen", "kernels_are_on", "dirty_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy in the interpreter, about minus infinity
    pytest.mark.skipif(not kernels.triton_fits(), reason="no Triton that is new enough for the kernels"),
]
interpreted = pytest.mark.interpreted


@interpreted
@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("bsz", [1, 3])
def test_saved_tensors_in_other_memory(bsz, is_short, monkeypatch):
    """torch's `save_on_cpu` brings back tensors that lie in another way."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    packed, key = torch.randn(5, bsz, 48), torch.randn(2, 7, 8)
    q, k, v = (x.unflatten(-1, (2, 8)).permute(1, 2, 0, 3) for x in packed.split(16, dim=-1))
    R, grad = torch.randn(2, 7, 7, requires_grad=True), torch.randn(bsz, 2, 5, 8)
    shared = Product(torch.randn(bsz, 2, 5, 8), take_columns(key, inputs_of_length(5)))
    logits = [Product(q, k), shared, Bias(take_window(R, inputs_of_length(5)))]
    (expected,) = torch.autograd.grad(attend_by_kernels(logits, v), R, grad)

    def moved(x):  # from 4 bytes after a multiple of 16 on
        return torch.empty(x.numel() + 16, dtype=x.dtype)[4 // x.itemsize :][: x.numel()].view(x.size()).copy_(x)

    with torch.autograd.graph.saved_tensors_hooks(moved, lambda x: x):
        out = attend_by_kernels(logits, v)
    assert torch.equal(torch.autograd.grad(out, R, grad)[0], expected)


@interpreted
@pytest.mark.parametrize("which", ["value", "bias", "mask", "grad", "saved"])
def test_memory_at_any_address(which, monkeypatch):
    """Kernels are compiled for memory at multiples of 16 bytes, and called with no other."""
    plan_with(monkeypatch, "is_short", lambda _: False)
    call = kernels.run

    def run(launch, tensors):
        assert all(x.data_ptr() % 16 == 0 for x in list_tensors(tensors))
        call(launch, tensors)

    def moved(x, name, odd):
        if name != odd:
            return x
        return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.size()).copy_(x)

    monkeypatch.setattr(kernels, "run", run)
    value, grad = torch.randn(5, 2, 16), torch.randn(10, 16)
    bias, mask, found = torch.randn(2, 5, 5), padding_mask([5, 4]), []
    for odd in ("none", which):
        packed, R = moved(value, "value", odd), moved(bias, "bias", odd).requires_grad_()
        v = packed.unflatten(-1, (2, 8)).permute(1, 2, 0, 3)
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(moved, name="saved", odd=odd), lambda x: x):
            out = kernels.compute(
                Logits([Bias(take_window(R, inputs_of_length(5)))]), v, moved(mask, "mask", odd), None
            )
        found += torch.autograd.grad(out, R, moved(grad, "grad", odd))
    assert torch.equal(*found)


@interpreted
@pytest.mark.parametrize("is_short", [True, False])
def test_gradients_of_padding(is_short, monkeypatch):
    """Rows of padding at the end are 0, so that the gradient which comes back for them goes nowhere."""
    plan_with(monkeypatch, "is_short", lambda _: is_short)
    lengths = [7, 4, 0]
    q, k, v, grad = torch.randn(4, 3, 2, 7, 8)
    leaves = [x.requires_grad_() for x in (q, k, v, torch.randn(2, 7, 7))]
    logits, mask = [Product(q, k), Bias(leaves[-1][None])], padding_mask(lengths)
    out = attend_by_kernels(logits, v, mask)
    assert not out[mask[:, None].expand(3, 2, 7)].any()
    found = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    expected = torch.autograd.grad(out, leaves, grad.masked_fill(mask[:, None, :, None], 0.0))
    for a, b in zip(found, expected):
        assert torch.equal(a, b)
