"""Linear layers with a matrix for each head, and several layers computed as one.

Where the Triton kernels are on, both have gradients of their own.
"""

from typing import Any, Optional, Tuple

import torch
import torch.nn as nn
from torch import Tensor

from .computations import kernels


def per_head_linear(x: Tensor, weight: Tensor, bias: Tensor, relu: bool = False) -> Tensor:
    """``W x + b``, or ``relu(W x + b)``, with a matrix per head.

    x (B, H, T, n), weight (H, m, n), bias (H, m) -> (B, H, T, m).
    """
    bsz, heads, length, _ = x.size()
    out: Optional[Tensor] = None
    if not torch.jit.is_scripting():
        if kernels.are_on(x):
            out = _PerHeadLinear.apply(x, weight, bias, relu)
    if out is None:
        out = rows_of_linear(x, weight, bias, relu)
    return out.view(heads, length, bsz, weight.size(1)).permute(2, 0, 1, 3)


def rows_of_linear(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """`per_head_linear` in rows, (H, T B, m)."""
    out = torch.baddbmm(bias.unsqueeze(1), rows_of_heads(x), weight.transpose(1, 2))
    return out.relu_() if relu else out


class _PerHeadLinear(torch.autograd.Function):
    """`rows_of_linear` with gradients that lie as their tensors do: fewer kernels, for more of the CPU's time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
        out = rows_of_linear(x, weight, bias, relu)
        ctx.save_for_backward(x, weight, out if relu else None)
        ctx.dtype_of_bias = bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        x, weight, out = ctx.saved_tensors
        bsz, heads, length, width = x.size()
        if out is not None:
            grad = torch.ops.aten.threshold_backward(grad, out, 0)
        to_x: Optional[Tensor] = None
        if ctx.needs_input_grad[0] and torch.is_grad_enabled():  # for a second derivative
            rows = torch.bmm(grad, weight.to(grad.dtype)).to(x.dtype)
            to_x = rows.view(heads, length, bsz, width).permute(2, 0, 1, 3)
        elif ctx.needs_input_grad[0]:
            to_x = grad.new_empty(length, bsz, heads, width).permute(1, 2, 0, 3)
            torch.bmm(grad, weight.to(grad.dtype), out=rows_of_heads(to_x))
            to_x = to_x.to(x.dtype)
        # under autocast, whose products are of a lower precision, tensors of both types come here
        to_weight = torch.bmm(grad.transpose(1, 2), rows_of_heads(x).to(grad.dtype)).to(weight.dtype)
        return to_x, to_weight, grad.sum(dim=1).to(ctx.dtype_of_bias), None


def rows_of_heads(x: Tensor) -> Tensor:
    """(B, H, T, n) -> (H, T B, n): of a layer's input, and of its gradient, a view, not a copy to keep."""
    return x.permute(1, 2, 0, 3).reshape(x.size(1), x.size(2) * x.size(0), x.size(3))


def combined(x: Tensor, *layers: nn.Module) -> Tuple[Tensor, Tensor]:
    """The weight and bias of one linear layer that computes those of several with the input x, one after another."""
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    return torch.cat(weights), torch.cat(biases)  # type: ignore[arg-type]


def is_plain_linear(*modules: nn.Module) -> bool:
    """Whether calls of the modules are ``F.linear`` and nothing else. Hooks, such as quantization noise, are more."""
    for module in modules:
        hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
        if type(module) is not nn.Linear or "forward" in module.__dict__ or module.bias is None or any(hooks):
            return False
    return True
