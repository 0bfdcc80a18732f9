"""softmax(S) V as it is written: the definition, for every logits, mask and device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..logits import Logits
from ..masks import is_causal, masked_softmax


def refuses(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float
) -> str:
    """See `computations`: it takes every call."""
    return ""


def compute(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float = 0.0
) -> Tensor:
    """See `computations`. Under an ``attn_mask`` other than `causal_mask` a row that sees nothing is 0."""
    bsz, heads, length, _ = value.size()
    zero_unseeing_rows = attn_mask is not None and not is_causal(attn_mask)
    weights = attention_weights(logits, heads, length, length, key_padding_mask, attn_mask, zero_unseeing_rows)
    return by_token(weighted_sum(drop(weights.to(value.dtype), dropout, bsz), value))


def by_token(out: Tensor) -> Tensor:
    """(B, H, T, d_h) -> (T B, H d_h), as the output projection takes it."""
    bsz, heads, length, width = out.size()
    return out.permute(2, 0, 1, 3).reshape(length * bsz, heads * width)


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
    """``softmax(S + masks)``, (`bsz`, H, T = `tgt_len`, S = `src_len`); `bsz` of -1: B, or 1 if logits are shared."""
    scores = logits.total(src_len).expand(bsz, num_heads, tgt_len, -1)
    return masked_softmax(scores, key_padding_mask, attn_mask, zero_unseeing_rows)


def drop(weights: Tensor, dropout: float, bsz: int) -> Tensor:
    """Attention weights (B or 1, H, T, S) after dropout, for each sentence its own."""
    return F.dropout(weights.expand(bsz, -1, -1, -1), dropout) if dropout > 0 else weights


def weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """The product (B, H, T, d_h) of weights (B or 1, H, T, S) and values (B, H, S, d_h)."""
    bsz, heads, length, head_dim = value.size()
    if weights.size(0) == bsz:
        return torch.matmul(weights, value)
    # shared weights: one product for all sentences, whose values are concatenated on their features
    values = value.permute(1, 2, 0, 3).reshape(heads, length, bsz * head_dim)
    out = torch.matmul(weights[0], values)
    return out.view(heads, out.size(1), bsz, head_dim).permute(2, 0, 1, 3)
