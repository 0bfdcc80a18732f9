"""softmax(S) V by one call of torch's fused attention."""

from typing import List, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..logits import Logits, Term, expanded
from ..masks import future, is_causal, on_cpu


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
    products: List[Term] = []
    others: List[Term] = []
    for term in logits.terms:
        kind, (x, *_), row, _, _ = term
        if kind == "bias" and x.size(2) == 1 and x.size(0) == 1:
            # a bias on columns is 8 more features of every key, times query features of 1/8, as the kernels want a
            # multiple of 8
            eighths = value.new_full([1, 1, 1, 1], 1 / 8).expand(-1, -1, length, 8)
            term = ("product", [eighths, x.transpose(2, 3).expand(-1, -1, -1, 8)], row, 1.0, 0)
        (products if term[0] == "product" else others).append(term)
    if len(products) > 1:
        products = Logits(products, logits.weights).joined().terms
    ((_, (query, key), row, scale, _),) = products
    query, key = logits.weighted(row, query, key, 1.0)
    query = expanded(query.to(value.dtype), bsz, heads)
    key = expanded(key.to(value.dtype), bsz, heads)

    mask: Optional[Tensor] = None
    if others:
        mask = Logits(others, logits.weights).total(length).to(value.dtype)
    if key_padding_mask is not None:
        hidden = key_padding_mask.to(torch.bool).view(bsz, 1, 1, length)
        # finite, so that a sentence of padding alone has no NaN, also where a bias is added to it
        lowest = torch.finfo(value.dtype).min / 2
        mask = hidden.to(value.dtype) * lowest if mask is None else torch.add(mask, hidden, alpha=lowest)
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
