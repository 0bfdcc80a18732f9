"""Exact ways to compute ``softmax(S) V``, one module each. `attend` takes the first that supports a call.

`plain` is the definition: the others are tested against it, in value and gradient.

==========  ==============================================================================================
`kernels`   for GPUs, off by default: Triton kernels that compute logits and weights of a tile in registers
`fused`     one call of `torch.nn.functional.scaled_dot_product_attention` over the queries and keys of all
            products, concatenated; biases become its mask
`tiled`     for CPUs: logits and weights never exist as a whole. A tile of them at a time is computed, and
            computed again in the backward pass. Shared logits have one softmax for all sentences of a length
`plain`     any mask, dropout, attention weights; holds logits and weights of (B, H, T, S), or of (1, H, T, S)
            where they are shared across the batch and there is no padding mask
==========  ==============================================================================================

`fused`, `tiled` and `plain` have ``compute``, which takes logits that are read (`Logits.read`) and returns (B, H, T,
d_h); ``supports`` says of the first two whether they take a call. To add a computation, write such a module and put it
into `COMPUTATIONS`. `kernels` takes logits as functions return them; the other modules here belong to it.
"""

from typing import Optional

from torch import Tensor

from ..linear import Projected
from ..logits import Logits
from ..masks import is_causal
from . import fused, kernels, plain, tiled

COMPUTATIONS = (fused, tiled)  # and `plain`, which takes every call


def attend(
    logits: Logits,
    projected: Projected,
    key_padding_mask: Optional[Tensor],
    attn_mask: Optional[Tensor],
    dropout: float = 0.0,
) -> Tensor:
    """``softmax(S + masks) V``, (T B, C), by the first computation that supports it.

    Args:
        logits: S.
        projected: the values, and what the kernels need to know of queries and keys.
        key_padding_mask: (B, T), true at padding, or None.
        attn_mask: as `masks.masked_softmax` takes it; with `causal_mask` there is no ``key_padding_mask``.
        dropout: probability of dropping an attention weight.
    """
    value = projected.v
    if kernels.are_on(value) and (attn_mask is None or is_causal(attn_mask)):
        out = kernels.attend(logits, projected, key_padding_mask, attn_mask is not None, dropout)
        if out is not None:
            return out.flatten(0, 1)
    bsz, heads, length, width = value.size()
    call = (logits.read(0, length, length), value, key_padding_mask, attn_mask, dropout)
    computation = next((computation for computation in COMPUTATIONS if computation.supports(*call)), plain)
    by_head: Tensor = computation.compute(*call)
    return by_head.permute(2, 0, 1, 3).reshape(length * bsz, heads * width)
