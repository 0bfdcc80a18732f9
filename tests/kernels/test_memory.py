"""The kernels read tensors wherever they lie, and gradients of padding go nowhere."""

import pytest
import torch
from helpers import padding_mask
from kernel_calls import (
    attend_by_kernels,
    choose_kernels,
    copy_to_offset,
    list_tensors,
    make_inputs,
    view_queries_keys_and_values,
)

from fairseq_synth.computations import kernels
from fairseq_synth.logits import Bias, Logits, Product
from fairseq_synth.positions import take_columns, take_window

pytestmark = [
    pytest.mark.usefixtures("on_device", "skip_unless_chosen", "kernels_are_on", "dirty_memory"),
    # In the interpreter, numpy warns about minus infinity.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
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
    """torch's `save_on_cpu` brings saved tensors back to other addresses and with other strides: no gradient changes.

    Kernels are compiled for addresses that are multiples of 16 bytes. Here every saved tensor comes back as a copy that
    begins 4 bytes after such an address. Only R needs a gradient, which is computed from all tensors that are saved.
    """
    choose_kernels(monkeypatch, is_short)
    inputs = make_inputs(5)
    projection = torch.randn(5, bsz, 48)  # (T, B, 3 * 2 heads * 8 features)
    parameter_of_keys = torch.randn(2, 7, 8)  # (H, rows, features): it has two rows more than there are tokens
    q, k, v = view_queries_keys_and_values(projection)
    R = torch.randn(2, 7, 7, requires_grad=True)  # (H, rows, columns)
    gradient = torch.randn(bsz, 2, 5, 8)
    query_for_shared_keys = torch.randn(bsz, 2, 5, 8)
    shared_key = take_columns(parameter_of_keys, inputs)  # the same for all sentences
    logits = [
        Product(q, k),
        Product(query_for_shared_keys, shared_key),
        Bias(take_window(R, inputs)),
    ]
    out = attend_by_kernels(logits, v)
    (expected,) = torch.autograd.grad(out, R, gradient)

    def move_by_4_bytes(x):
        """Returns a contiguous copy that begins 4 bytes after a multiple of 16."""
        return copy_to_offset(x, 4 // x.itemsize)

    with torch.autograd.graph.saved_tensors_hooks(move_by_4_bytes, return_unchanged):
        out = attend_by_kernels(logits, v)
    (gradient_of_R,) = torch.autograd.grad(out, R, gradient)
    assert torch.equal(gradient_of_R, expected)


def move_by_an_element(x):
    """Returns a copy that begins one element after a multiple of 16 bytes, where no kernel may be given a tensor."""
    return copy_to_offset(x, 1)


def compute_gradient_of_bias(value, bias, mask, grad, change_saved_tensor=return_unchanged):
    """Returns the gradient of the bias (2, 5, 5), which is the only summand of the logits.

    Args:
        value: the values (T, B, 2 heads * 8 features).
        bias: the bias (2, 5, 5). It is made to need a gradient.
        mask: the padding mask (B, T).
        grad: the gradient of the output, (T B, 2 heads * 8 features).
        change_saved_tensor: is called with each tensor that is saved for the backward pass, and returns what is saved.
    """
    R = bias.requires_grad_()
    v = value.unflatten(-1, (2, 8)).permute(1, 2, 0, 3)  # (B, H, T, features)
    logits = Logits([Bias(take_window(R, make_inputs(5)))])
    with torch.autograd.graph.saved_tensors_hooks(change_saved_tensor, return_unchanged):
        out = kernels.compute(logits, v, mask, None)
    (gradient_of_R,) = torch.autograd.grad(out, R, grad)
    return gradient_of_R


@interpreted
@pytest.mark.parametrize("name_of_moved", ["value", "bias", "mask", "grad", "saved"])
def test_memory_at_any_address(name_of_moved, monkeypatch):
    """A tensor at any address is copied to a multiple of 16 bytes before a kernel reads it, which changes no gradient.

    Kernels are compiled for such addresses, and may be called with no other. Either one argument of
    `compute_gradient_of_bias` is moved by one element, or all tensors that are saved for the backward pass are.
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
    arguments = {"value": value, "bias": bias, "mask": padding_mask([5, 4]), "grad": gradient}
    expected = compute_gradient_of_bias(**arguments)
    if name_of_moved == "saved":
        gradient_of_bias = compute_gradient_of_bias(**arguments, change_saved_tensor=move_by_an_element)
    else:
        arguments[name_of_moved] = move_by_an_element(arguments[name_of_moved])
        gradient_of_bias = compute_gradient_of_bias(**arguments)
    assert torch.equal(gradient_of_bias, expected)


@interpreted
@pytest.mark.parametrize("is_short", [True, False])
def test_gradients_of_padding(is_short, monkeypatch):
    """Rows of padding at the end are 0, so that the gradient which comes back for them goes nowhere.

    All other gradients are the same whether the gradient of the output is 0 for these rows or not.
    """
    choose_kernels(monkeypatch, is_short)
    q, k, v, gradient = torch.randn(4, 3, 2, 7, 8).unbind()  # each is (B, H, T, features)
    R = torch.randn(2, 7, 7)  # (H, T, T)
    leaves = [q, k, v, R]
    for leaf in leaves:
        leaf.requires_grad_()
    padding = padding_mask([7, 4, 0])  # (B, T)
    out = attend_by_kernels([Product(q, k), Bias(R[None])], v, padding)  # (B, H, T, features)
    padding_of_all_heads = padding[:, None].expand(3, 2, 7)  # (B, H, T)
    rows_of_padding = out[padding_of_all_heads]
    assert not rows_of_padding.any()
    gradients = torch.autograd.grad(out, leaves, gradient, retain_graph=True)
    gradient_without_padding = gradient.masked_fill(padding_of_all_heads[..., None], 0.0)
    gradients_without_padding = torch.autograd.grad(out, leaves, gradient_without_padding)
    for with_padding, without_padding in zip(gradients, gradients_without_padding):
        assert torch.equal(with_padding, without_padding)
