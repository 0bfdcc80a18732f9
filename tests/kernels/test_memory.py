"""The kernels read tensors wherever they lie, and gradients of padding go nowhere."""

import pytest
import torch
from helpers import padding_mask
from kernel_calls import attend_by_kernels, choose_kernels, copy_to_offset, list_tensors, make_inputs

from fairseq_synth.computations import kernels
from fairseq_synth.logits import Bias, Logits, Product
from fairseq_synth.positions import take_columns, take_window

pytestmark = [
    pytest.mark.usefixtures("on_device", "skip_unless_chosen", "kernels_are_on", "dirty_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy in the interpreter, about minus infinity
    pytest.mark.skipif(not kernels.triton_fits(), reason="no Triton that is new enough for the kernels"),
]
interpreted = pytest.mark.interpreted


def return_unchanged(x):
    """Returns its argument. It is a hook that brings a saved tensor back as it was saved."""
    return x


@interpreted
@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("bsz", [1, 3])
def test_saved_tensors_in_other_memory(bsz, is_short, monkeypatch):
    """torch's `save_on_cpu` brings back tensors that lie in another way, which changes no gradient."""
    choose_kernels(monkeypatch, is_short)
    projection = torch.randn(5, bsz, 48)
    shared_key = torch.randn(2, 7, 8)
    q, k, v = (part.unflatten(-1, (2, 8)).permute(1, 2, 0, 3) for part in projection.split(16, dim=-1))
    R = torch.randn(2, 7, 7, requires_grad=True)
    gradient = torch.randn(bsz, 2, 5, 8)
    logits = [
        Product(q, k),
        Product(torch.randn(bsz, 2, 5, 8), take_columns(shared_key, make_inputs(5))),
        Bias(take_window(R, make_inputs(5))),
    ]
    out = attend_by_kernels(logits, v)
    (expected,) = torch.autograd.grad(out, R, gradient)

    def move(x):
        """Returns a copy that begins 4 bytes after a multiple of 16."""
        return copy_to_offset(x, 4 // x.itemsize)

    with torch.autograd.graph.saved_tensors_hooks(move, return_unchanged):
        out = attend_by_kernels(logits, v)
    (gradient_of_R,) = torch.autograd.grad(out, R, gradient)
    assert torch.equal(gradient_of_R, expected)


@interpreted
@pytest.mark.parametrize("name_of_moved", ["value", "bias", "mask", "grad", "saved"])
def test_memory_at_any_address(name_of_moved, monkeypatch):
    """Kernels are compiled for memory at multiples of 16 bytes, and called with no other.

    A tensor at another address, such as the bias or those that are saved, changes no gradient.
    """
    choose_kernels(monkeypatch, is_short=False)
    original_run = kernels.run

    def run_with_check(launch, tensors):
        for tensor in list_tensors(tensors):
            assert tensor.data_ptr() % 16 == 0
        original_run(launch, tensors)

    monkeypatch.setattr(kernels, "run", run_with_check)
    value = torch.randn(5, 2, 16)
    gradient = torch.randn(10, 16)
    bias = torch.randn(2, 5, 5)
    padding = padding_mask([5, 4])

    def compute_gradient(name_of_moved):
        """Returns the gradient of the bias, with tensors of one name moved to another address."""

        def move_if_named(x, name):
            if name == name_of_moved:
                return copy_to_offset(x, 1)
            return x

        def move_if_saved_tensors_are(x):
            return move_if_named(x, "saved")

        packed = move_if_named(value, "value")
        R = move_if_named(bias, "bias").requires_grad_()
        v = packed.unflatten(-1, (2, 8)).permute(1, 2, 0, 3)
        logits = Logits([Bias(take_window(R, make_inputs(5)))])
        with torch.autograd.graph.saved_tensors_hooks(move_if_saved_tensors_are, return_unchanged):
            out = kernels.compute(logits, v, move_if_named(padding, "mask"), None)
        (gradient_of_R,) = torch.autograd.grad(out, R, move_if_named(gradient, "grad"))
        return gradient_of_R

    expected = compute_gradient("none")
    assert torch.equal(compute_gradient(name_of_moved), expected)


@interpreted
@pytest.mark.parametrize("is_short", [True, False])
def test_gradients_of_padding(is_short, monkeypatch):
    """Rows of padding at the end are 0, so that the gradient which comes back for them goes nowhere."""
    choose_kernels(monkeypatch, is_short)
    q, k, v, gradient = torch.randn(4, 3, 2, 7, 8)
    R = torch.randn(2, 7, 7)
    leaves = [q, k, v, R]
    for leaf in leaves:
        leaf.requires_grad_()
    padding = padding_mask([7, 4, 0])
    out = attend_by_kernels([Product(q, k), Bias(R[None])], v, padding)
    rows_of_padding = out[padding[:, None].expand(3, 2, 7)]
    assert not rows_of_padding.any()
    gradients = torch.autograd.grad(out, leaves, gradient, retain_graph=True)
    gradient_without_padding = gradient.masked_fill(padding[:, None, :, None], 0.0)
    gradients_without_padding = torch.autograd.grad(out, leaves, gradient_without_padding)
    for with_padding, without_padding in zip(gradients, gradients_without_padding):
        assert torch.equal(with_padding, without_padding)
