"""Products: linear layers with a matrix for each head, several layers computed as one, and the factors of logits."""

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from .masks import at_least_fp32, in_type
from .positions import positions


def per_head_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``W x + b`` with a matrix per head: x (H, N, n), weight (H, m, n), bias (H, m) -> (H, N, m)."""
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


def by_head(x: Tensor, heads: int) -> Tensor:
    """(T, B, C) -> (H, T B, d_h), a view: each head's slice of the tokens."""
    return x.reshape(x.size(0) * x.size(1), heads, x.size(2) // heads).transpose(0, 1)


def by_sentence(x: Tensor, like: Tensor) -> Tensor:
    """(H, T B, m) -> (B, H, T, m), a view; `like` is (T, B, C)."""
    return x.view(x.size(0), like.size(0), like.size(1), x.size(2)).permute(2, 0, 1, 3)


def plus(x: Tensor | None, y: Tensor) -> Tensor:
    """The sum, in fp32 at least; y as it is if it is the first summand."""
    return y if x is None else at_least_fp32(x) + at_least_fp32(y)


def times(x: Tensor, weight: Tensor | None) -> Tensor:
    """x times a weight, in the type of x."""
    return x if weight is None else x * in_type(weight, x.dtype)


def smaller_times(x: tuple[Tensor, Tensor], scale: float, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Two factors, the smaller one times the weight and the scale; without a weight the first one."""
    first, second = x
    if weight is None:
        return first if scale == 1.0 else first * scale, second
    weight = weight if scale == 1.0 else weight * scale
    return (first, times(second, weight)) if second.numel() < first.numel() else (times(first, weight), second)


def outer_factors(factors: Tensor, a: int, src_len: int) -> tuple[Tensor, Tensor]:
    """Both factors of `src_len` columns of an outer product: the first begins again beyond l."""
    b = factors.size(3) - a
    left, right = factors.split([a, b], dim=3)
    return positions(left, 3, 0, (src_len + b - 1) // b), positions(right, 3, 0, min(b, src_len))


def toeplitz(values: Tensor, src_len: int) -> Tensor:
    """The matrix (1, H, T, S) of `Diagonals`."""
    rows = values.squeeze(2).unfold(2, src_len, 1)  # the last row comes first: each is the one before it, moved by one
    return rows.flip(2) if rows.size(2) > 1 else rows


def inner_product(query: Tensor, key: Tensor) -> Tensor:
    """``query @ key^T``, without a copy of shared keys for each sentence."""
    if key.size(0) >= query.size(0):
        return torch.matmul(query, key.transpose(-2, -1))
    if key.size(1) == 1:
        return torch.matmul(query, key[0, 0].t())
    return torch.einsum("bhtr,hsr->bhts", query, key[0])


def outer_product(left: Tensor, right: Tensor, src_len: int) -> Tensor:
    """``left_u right_v`` for each row, column ``u b + v``, in the first `src_len` columns."""
    left = positions(left, 3, 0, (src_len + right.size(3) - 1) // right.size(3))
    return (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)[..., :src_len]


def concatenated(factors: list[Tensor], bsz: int = 1, heads: int = 1) -> Tensor:
    """Factors (B or 1, H or 1, T, r) concatenated on features, for so many sentences and heads, or all of theirs."""
    for x in factors:
        bsz = x.size(0) if bsz == 1 else bsz
        heads = x.size(1) if heads == 1 else heads
    of_all = [x if x.size(0) == bsz and x.size(1) == heads else x.expand(bsz, heads, -1, -1) for x in factors]
    return of_all[0] if len(of_all) == 1 else torch.cat(of_all, dim=-1)


def joined(*layers: nn.Module) -> tuple[Tensor, Tensor] | None:
    """The weight and bias of one linear layer that computes those of several, one after another; None if one of them
    is not plain."""
    weights, biases = [], []
    for layer in layers:
        parameters: Any = layer._parameters  # `layer.weight` takes Python several times as long
        if not is_plain_linear(layer) or parameters.get("bias") is None:  # in sharded layers it is no parameter
            return None
        weights.append(parameters["weight"])
        biases.append(parameters["bias"])
    return torch.cat(weights), torch.cat(biases)


def is_plain_linear(x: nn.Module) -> bool:
    """Whether a call of the module is ``F.linear`` and nothing else. Hooks, such as quantization noise, are more."""
    return type(x) is nn.Linear and "forward" not in x.__dict__ and not has_hooks(x)


def has_hooks(x: nn.Module) -> bool:
    """Whether a call of the module is more than its ``forward``."""
    return bool(x._forward_pre_hooks or x._forward_hooks or x._backward_pre_hooks or x._backward_hooks)


class Light(nn.Module):
    """A module of which a call without hooks is its ``forward``: torch's own call takes as long as several views."""

    def __call__(self, inputs: Any) -> Any:
        return super().__call__(inputs) if has_hooks(self) else self.forward(inputs)
