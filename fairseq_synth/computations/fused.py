"""softmax(S) V by one call of torch's fused attention."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..logits import Logits, concatenate
from ..masks import future, in_type, is_causal, lowest, on_cpu


def supports(
    logits: Logits, value: Tensor, key_padding_mask: Optional[Tensor], attn_mask: Optional[Tensor], dropout: float
) -> bool:
    """Logits with an inner product that differ by sentence; on a CPU one inner product alone, as its kernel for biases
    is slow."""
    if not logits.of("product") or (value.size(0) > 1 and logits.is_shared()):
        return False
    if on_cpu(value) and len(logits.terms) > 1:
        return False
    return attn_mask is None or is_causal(attn_mask)


def compute(
    logits: Logits, value: Tensor, key_padding_mask: Optional[Tensor], attn_mask: Optional[Tensor], dropout: float = 0.0
) -> Tensor:
    """See `attend`. Rows of a sentence of padding alone are unspecified, but finite."""
    bsz, heads, length, head_dim = value.size()
    causal = is_causal(attn_mask)
    scale = logits.of("product")[0][3]  # torch multiplies the sum of all products by it
    queries, keys, others = [], [], []
    for term in logits.terms:
        kind, factors, row, factor, _ = term
        x = factors[0]
        if kind == "product":
            query, key = logits.weighted(row, x, factors[1], factor / scale)
        elif kind == "bias" and x.size(2) == 1:
            # a bias on columns is 8 more features of every key, times query features of 1/8, as the kernels want a
            # multiple of 8
            eighth = value.new_full([1, 1, 1, 1], 1 / 8 / scale) if row < 0 else logits.weights[row] * (1 / 8 / scale)
            query, key = eighth.expand(bsz, heads, length, 8), x.transpose(2, 3).expand(bsz, heads, -1, 8)
        else:
            others.append(term)
            continue
        queries.append(query)
        keys.append(key)
    if len(queries) > 1 or query.size() != key.size() or query.size(0) != bsz or query.size(1) != heads:
        query, key = concatenate(queries, bsz, heads), concatenate(keys, bsz, heads)
    query, key = in_type(query, value.dtype), in_type(key, value.dtype)

    mask: Optional[Tensor] = None
    if others:
        mask = in_type(Logits(others, logits.weights).total(length), value.dtype)
    if key_padding_mask is not None:
        hidden = in_type(key_padding_mask, torch.bool).view(bsz, 1, 1, length)
        # finite, so that a sentence of padding alone has no NaN, also where a bias is added to it
        low = lowest(value.dtype) / 2
        mask = hidden.to(value.dtype) * low if mask is None else torch.add(mask, hidden, alpha=low)
    if mask is not None and causal:
        mask = mask + future(length, mask)
    if mask is not None and mask.shape != (bsz, heads, length, length):
        mask = mask.expand(bsz, heads, length, -1)  # the kernels take one of all four sizes, without a copy

    rank, is_cpu = query.size(3), on_cpu(value)
    width = max(rank, head_dim) if is_cpu else rank  # a CPU's kernel wants one width of all three
    width += -width % 8
    if width > rank:
        query, key = F.pad(query, (0, width - rank)), F.pad(key, (0, width - rank))
    if is_cpu and width > head_dim:
        value = F.pad(value, (0, width - head_dim))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None, scale=scale
    )
    return out[..., :head_dim] if out.size(3) > head_dim else out
