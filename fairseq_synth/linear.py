"""Linear layers with a matrix for each head, and several layers computed as one."""

from typing import Any, NamedTuple, Optional, Tuple

import torch
import torch.nn as nn
from torch import Tensor


class Projected(NamedTuple):
    """What an attention projects its input (T, B, C) to."""

    q: Optional[Tensor]  # queries and keys, (B, H, T, d_h), if there are any
    k: Optional[Tensor]
    v: Tensor  # values, (B, H, T, d_h)
    packed: Optional[Tensor]  # (T B, features) or (T, B, features): what these are views of, side by side, if anything


def per_head_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``W x + b`` with a matrix per head: x (H, N, n), weight (H, m, n), bias (H, m) -> (H, N, m)."""
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


def by_head(x: Tensor, heads: int) -> Tensor:
    """(T, B, C) -> (H, T B, d_h), a view: each head's slice of the tokens."""
    return x.reshape(x.size(0) * x.size(1), heads, x.size(2) // heads).transpose(0, 1)


def by_sentence(x: Tensor, like: Tensor) -> Tensor:
    """(H, T B, m) -> (B, H, T, m), a view; `like` is (T, B, C)."""
    return x.view(x.size(0), like.size(0), like.size(1), x.size(2)).permute(2, 0, 1, 3)


def joined(*layers: nn.Module) -> Optional[Tuple[Tensor, Tensor]]:
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
