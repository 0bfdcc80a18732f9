"""The definition of ``softmax(S) V``, for every kind of logits, mask and device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..logits import Logits
from ..masks import is_causal, masked_softmax


def refuses(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float
) -> str:
    """Returns an empty string, because this computation takes every call."""
    return ""


def compute(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float = 0.0
) -> Tensor:
    """Returns ``softmax(S) V``, (T B, C); see `attend`.

    A row that sees no key is 0 under an ``attn_mask`` other than the `causal_mask`.
    """
    bsz, num_heads, length, _ = value.size()
    weights = attention_weights(
        logits,
        num_heads,
        tgt_len=length,
        src_len=length,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        zero_unseeing_rows=attn_mask is not None and not is_causal(attn_mask),
    )
    weights = drop(weights.to(value.dtype), dropout, bsz)
    return join_heads(weighted_sum(weights, value))


def join_heads(out: Tensor) -> Tensor:
    """Returns (B, H, T, d_h) as (T B, H d_h), which the output projection takes."""
    bsz, num_heads, length, head_dim = out.size()
    return out.permute(2, 0, 1, 3).reshape(length * bsz, num_heads * head_dim)


def attention_weights(
    logits: Logits,
    num_heads: int,
    tgt_len: int,
    src_len: int,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    zero_unseeing_rows: bool = True,
    bsz: int = -1,
) -> Tensor:
    """Returns ``softmax(S + masks)``, (`bsz`, H, T, S), where T is `tgt_len` and S is `src_len`.

    If `bsz` is -1, the weights have the number of sentences that the logits have: B, or 1 if all sentences share them.
    """
    scores = logits.total(src_len).expand(bsz, num_heads, tgt_len, -1)
    return masked_softmax(scores, key_padding_mask, attn_mask, zero_unseeing_rows)


def drop(weights: Tensor, dropout: float, bsz: int) -> Tensor:
    """Returns attention weights (B or 1, H, T, S) after dropout, which is different for each of `bsz` sentences."""
    if dropout == 0:
        return weights
    return F.dropout(weights.expand(bsz, -1, -1, -1), dropout)


def weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """Returns the product (B, H, T, d_h) of attention weights (B or 1, H, T, S) and values (B, H, S, d_h)."""
    bsz, num_heads, src_len, head_dim = value.size()
    if weights.size(0) == bsz:
        return torch.matmul(weights, value)
    # All sentences share the weights. One product serves them all, with their values side by side.
    tgt_len = weights.size(2)
    values_side_by_side = value.permute(1, 2, 0, 3).reshape(num_heads, src_len, bsz * head_dim)
    out = torch.matmul(weights[0], values_side_by_side)
    return out.view(num_heads, tgt_len, bsz, head_dim).permute(2, 0, 1, 3)
