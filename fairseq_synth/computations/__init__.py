"""Exact ways to compute ``softmax(S) V``, one module each. `attend` takes the first that does not refuse a call.

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

Each has ``compute``, which returns (T B, C), and ``refuses``, with the same arguments, which says what of a call it has
no place for; an empty string if it takes the call. To add a computation, write such a module and put it into
`COMPUTATIONS`; the other modules here belong to `kernels`.
"""

import logging
from functools import cache

from torch import Tensor

from ..logits import Logits
from . import fused, kernels, plain, tiled

logger = logging.getLogger(__name__)

COMPUTATIONS = (kernels, fused, tiled, plain)


def attend(
    logits: Logits,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    dropout: float = 0.0,
) -> Tensor:
    """``softmax(S + masks) V``, (T B, C), by the first computation that takes the call.

    Args:
        logits: S.
        value: V, (B, H, T, d_h).
        key_padding_mask: (B, T), true at padding, or None.
        attn_mask: as `masks.masked_softmax` takes it; with `causal_mask` there is no ``key_padding_mask``.
        dropout: probability of dropping an attention weight.
    """
    for computation in COMPUTATIONS:
        reason = computation.refuses(logits, value, key_padding_mask, attn_mask, dropout)
        if not reason:
            out: Tensor = computation.compute(logits, value, key_padding_mask, attn_mask, dropout)
            return out
        say(computation.__name__, reason)
    raise AssertionError("`plain` takes every call")


@cache
def say(computation: str, reason: str) -> None:
    """Logs, once, what a computation refuses."""
    logger.debug(f"{computation} refuses {reason}")
