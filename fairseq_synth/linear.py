"""Linear layers, with a matrix for each head or several computed as one; and fast ways to read and call modules."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor


def per_head_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns ``W x + b``, (H, N, m), where each head has a matrix W and a bias b of its own.

    Args:
        x: N vectors for each head, (H, N, n).
        weight: (H, m, n).
        bias: (H, m).
    """
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


def by_head(x: Tensor, num_heads: int) -> Tensor:
    """Returns each head's slice of the features of all tokens, (T, B, C) -> (H, T B, d_h), as a view."""
    tgt_len, bsz, embed_dim = x.size()
    return x.reshape(tgt_len * bsz, num_heads, embed_dim // num_heads).transpose(0, 1)


def by_sentence(x: Tensor, tokens: Tensor) -> Tensor:
    """Returns the vectors of all heads and tokens with the sentences apart, (H, T B, m) -> (B, H, T, m), as a view.

    Args:
        x: A vector for each head and token, (H, T B, m).
        tokens: A tensor (T, B, C), of which only the sizes T and B are read.
    """
    tgt_len, bsz, _ = tokens.size()
    num_heads, _, width = x.size()
    return x.view(num_heads, tgt_len, bsz, width).permute(2, 0, 1, 3)


class LinearWeights(NamedTuple):
    """The parameters of a linear layer."""

    weight: Tensor
    bias: Tensor


def read_linear_weights(layer: nn.Module) -> LinearWeights | None:
    """Returns the weight and bias of a linear layer, with which ``F.linear`` computes the same as a call of the layer.

    The result is None if the layer has to be called itself, because `is_plain_linear` is false.
    """
    if not is_plain_linear(layer):
        return None
    # Reading the dictionary is faster than `layer.weight` and `layer.bias`.
    parameters: dict[str, Any] = layer._parameters
    return LinearWeights(parameters["weight"], parameters["bias"])


def join_linear_layers(layers: Sequence[nn.Module]) -> LinearWeights | None:
    """Returns the weight and bias of one linear layer whose output is the outputs of all `layers` side by side.

    The result is None if `is_plain_linear` is false for one of the layers.
    """
    weights = []
    biases = []
    for layer in layers:
        if not is_plain_linear(layer):
            return None
        parameters: dict[str, Any] = layer._parameters
        weights.append(parameters["weight"])
        biases.append(parameters["bias"])
    return LinearWeights(torch.cat(weights), torch.cat(biases))


def is_plain_linear(layer: nn.Module) -> bool:
    """Returns whether ``F.linear`` with a module's weight and bias computes the same as a call of the module.

    It does not if the module has hooks, which quantization noise adds, or if its ``forward`` has been replaced. The
    result is also false for a subclass of `nn.Linear`, for a layer without a bias, and for a sharded layer, which has
    no parameters of its own.
    """
    if type(layer) is not nn.Linear or "forward" in layer.__dict__ or has_hooks(layer):
        return False
    parameters: dict[str, Any] = layer._parameters
    return parameters.get("weight") is not None and parameters.get("bias") is not None


def has_hooks(module: nn.Module) -> bool:
    """Returns whether calling the module does more than calling its ``forward``."""
    attributes = module.__dict__  # This is faster than to read the attributes one by one.
    return bool(
        attributes["_forward_pre_hooks"]
        or attributes["_forward_hooks"]
        or attributes["_backward_pre_hooks"]
        or attributes["_backward_hooks"]
    )


def read_module(module: nn.Module, name: str) -> Any:
    """Returns a module that is an attribute of another module, as ``getattr(module, name)`` does, but faster.

    `nn.Module` keeps such attributes in a dictionary, and `getattr` looks in all other places first. This takes as long
    as to make a view of a tensor.
    """
    return module._modules[name]


def read_parameter(module: nn.Module, name: str) -> Any:
    """Returns a parameter of a module, as ``getattr(module, name)`` does, but faster; see `read_module`."""
    parameter = module._parameters.get(name)
    if parameter is None:
        # Either the attribute is None, or sharding has replaced the parameter by a tensor.
        return getattr(module, name)
    return parameter


class LightModule(nn.Module):
    """A module whose call is faster than that of `nn.Module` if it has no hooks.

    The call of `nn.Module` takes as long as several views of a tensor, and an attention has a handful of modules.
    """

    def __call__(self, inputs: Any) -> Any:
        """Calls ``forward``, and the hooks if there are any."""
        if has_hooks(self):
            return super().__call__(inputs)
        return self.forward(inputs)
