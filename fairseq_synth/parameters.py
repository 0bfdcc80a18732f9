"""What the functions of `synthesizers` do with their parameters: sizes, initial values, positions, layers per head."""

import math
from typing import Any, List, Optional, Tuple

import torch
import torch.nn as nn
from torch import Tensor

from .computations import kernels
from .errors import SynthesizerError


def factorize(length: int) -> Tuple[int, int]:
    """``(a, b)`` with ``a b = length`` and a the largest divisor up to the square root.

    Raises:
        SynthesizerError: no divisor but 1, so that nothing is factorized.
    """
    for a in range(math.isqrt(length), 1, -1):
        if length % a == 0:
            return a, length // a
    raise SynthesizerError(
        f"--synth-max-length {length}: factorized_dense needs a product a*b with a, b > 1; "
        f"take {max(4, length + 1)}, for example"
    )


def positions(x: Tensor, dim: int, start: int, count: int) -> Tensor:
    """The entries along a dimension of l for positions ``start .. start + count - 1``: position p has entry p mod l.

    This is the paper's way to sentences beyond l, "tile to the maximum sequence length". Within l it is a view.
    """
    length = x.size(dim)
    if start == 0 and count == length:
        return x  # the gradient of a slice is a copy
    start = start % length
    if start + count <= length:
        return x.narrow(dim, start, count)
    pieces: List[Tensor] = []
    while count > 0:
        piece = x.narrow(dim, start, min(count, length - start))
        pieces.append(piece)
        count -= piece.size(dim)
        start = 0
    return torch.cat(pieces, dim=dim)


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


def glorot_uniform_(weight: Tensor) -> Tensor:
    """Glorot-uniform for each head's matrix of a (H, m, n) tensor: U(-s, s) with s = sqrt(6 / (m + n)); returns it."""
    bound = math.sqrt(6.0 / (weight.size(1) + weight.size(2)))
    return nn.init.uniform_(weight, -bound, bound)
