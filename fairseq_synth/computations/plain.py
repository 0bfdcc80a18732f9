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
    """Returns ``softmax(S) V``, (T B, C). The arguments are those of `attend`.

    A row from which an `attn_mask` hides all keys has the result 0. The result of a sentence that consists of padding
    alone is finite and has no meaning.
    """
    bsz, num_heads, length, _ = value.size()
    # Setting rows to 0 takes a pass over all weights. Under the causal mask it is not needed: every row sees a key.
    may_hide_all_keys = attn_mask is not None and not is_causal(attn_mask)
    weights = attention_weights(
        logits,
        num_heads,
        tgt_len=length,
        src_len=length,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        zero_rows_without_keys=may_hide_all_keys,
    )
    weights = drop(weights.to(value.dtype), dropout, bsz)  # (B or 1, H, T, T)
    out = weighted_sum(weights, value)  # (B, H, T, d_h)
    return join_heads(out)


def join_heads(out: Tensor) -> Tensor:
    """Returns the output of all heads (B, H, T, d_h) as a matrix (T B, H d_h), which the output projection reads.

    Row ``t B + b`` belongs to token t of sentence b.
    """
    bsz, num_heads, length, head_dim = out.size()
    return out.permute(2, 0, 1, 3).reshape(length * bsz, num_heads * head_dim)


def attention_weights(
    logits: Logits,
    num_heads: int,
    tgt_len: int,
    src_len: int,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    zero_rows_without_keys: bool = True,
    bsz: int | None = None,
) -> Tensor:
    """Returns the attention weights ``softmax(S + masks)``, (B or 1, H, T, S).

    Args:
        logits: The logits S.
        num_heads: H.
        tgt_len: T, the number of rows.
        src_len: S, the number of columns.
        key_padding_mask: (B, S), true at padding, or None.
        attn_mask: A mask as in `masks.masked_softmax`, or None.
        zero_rows_without_keys: Whether a row that may see no key has the weights 0; see `masks.masked_softmax`.
        bsz: B, to get the weights of all sentences in any case, (B, H, T, S). With None, the weights are computed only
            once, (1, H, T, S), if all sentences have the same logits and there is no padding mask.
    """
    scores = logits.total(src_len)  # (B or 1, H or 1, T or 1, S)
    if bsz is None:
        bsz = scores.shape[0]
    scores = scores.expand(bsz, num_heads, tgt_len, -1)
    return masked_softmax(scores, key_padding_mask, attn_mask, zero_rows_without_keys)


def drop(weights: Tensor, dropout: float, bsz: int) -> Tensor:
    """Returns attention weights after dropout, (B, H, T, S). Without dropout, they are returned as they are.

    Each sentence drops weights of its own, even if all sentences share the weights.

    Args:
        weights: (B, H, T, S), or (1, H, T, S) if all sentences share them.
        dropout: Probability of dropping a weight.
        bsz: B.
    """
    if dropout == 0:
        return weights
    return F.dropout(weights.expand(bsz, -1, -1, -1), p=dropout, training=True)


def weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """Returns the product (B, H, T, d_h) of attention weights (B or 1, H, T, S) and values (B, H, S, d_h)."""
    bsz, num_heads, src_len, head_dim = value.size()
    if weights.shape[0] == bsz:
        return torch.matmul(weights, value)
    # All sentences share the weights. If their values are side by side, a single product is enough.
    tgt_len = weights.shape[2]
    values_side_by_side = value.permute(1, 2, 0, 3).reshape(num_heads, src_len, bsz * head_dim)  # (H, S, B d_h)
    out = torch.matmul(weights[0], values_side_by_side)  # (H, T, B d_h)
    return out.view(num_heads, tgt_len, bsz, head_dim).permute(2, 0, 1, 3)
