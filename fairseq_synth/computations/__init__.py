"""Exact ways to compute ``softmax(S) V``, one module for each. `attend` takes the first that does not refuse a call.

`plain` is the definition. The others are tested against it, in value and gradient.

==========  ==============================================================================================
`kernels`   for GPUs, off by default: Triton kernels that compute logits and weights of a tile in registers
`fused`     one call of `torch.nn.functional.scaled_dot_product_attention`; the queries and keys of all
            inner products are joined, and biases become its mask
`tiled`     for CPUs: logits and weights never exist as a whole. They are computed a tile at a time, and
            again in the backward pass. If all sentences have the same logits, they also share the softmax
`plain`     for every mask and for dropout; holds logits and weights of (B, H, T, S), or of (1, H, T, S) if
            all sentences share them and there is no padding mask
==========  ==============================================================================================

Each module has two functions with the same arguments, those of `attend`:

* ``refuses`` returns the reason why the computation cannot take the call, or an empty string if it can. `kernels` logs
  its reasons.
* ``compute`` returns the result, (T B, C).

To add a computation, write such a module and put it into `COMPUTATIONS`.
"""

from torch import Tensor

from ..logits import Logits
from . import fused, kernels, plain, tiled

COMPUTATIONS = (kernels, fused, tiled, plain)


def attend(
    logits: Logits,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    dropout: float = 0.0,
) -> Tensor:
    """Returns the attention's output ``softmax(S + masks) V``, (T B, C).

    It is computed by the first module in `COMPUTATIONS` that does not refuse the call.

    Args:
        logits: S.
        value: V, (B, H, T, d_h).
        key_padding_mask: (B, T), true at padding, or None. It must be None together with the `causal_mask`, under which
            a token sees no padding, because all padding is after the tokens (`masks.without_hidden_padding`).
        attn_mask: A mask as in `masks.masked_softmax`, or None.
        dropout: Probability of dropping an attention weight.
    """
    for computation in COMPUTATIONS:
        reason_to_refuse = computation.refuses(logits, value, key_padding_mask, attn_mask, dropout)
        if not reason_to_refuse:
            return computation.compute(logits, value, key_padding_mask, attn_mask, dropout)
    raise AssertionError("`plain` takes every call")
