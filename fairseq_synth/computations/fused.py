"""softmax(S) V by one call of torch's fused attention."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..linear import concatenated, smaller_times
from ..logits import Bias, Logits
from ..masks import future, in_type, is_causal, lowest, on_cpu
from .plain import by_token


def refuses(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float
) -> str:
    """See `computations`."""
    if not logits.products:
        return "logits without an inner product"
    if value.size(0) > 1 and logits.is_shared():
        return "logits that all sentences share"
    if on_cpu(value) and logits.number_of_terms() > 1:
        return "more than one inner product on a CPU, whose kernel for biases is slow"
    return "" if attn_mask is None or is_causal(attn_mask) else "a mask other than the causal one"


def compute(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float = 0.0
) -> Tensor:
    """See `computations`. Rows of a sentence of padding alone are unspecified, but finite."""
    bsz, heads, length, head_dim = value.size()
    causal = is_causal(attn_mask)
    scale = logits.products[0].scale  # torch multiplies the sum of all products by it
    factors = [smaller_times((query, key), factor / scale, weight) for query, key, factor, weight in logits.products]
    others: list[Bias] = []
    for bias, weight in logits.biases:
        if bias.size(2) > 1:
            others.append(Bias(bias, weight))
            continue
        # a bias on columns is 8 more features of every key, times query features of 1/8, as the kernels want a
        # multiple of 8
        eighth = value.new_full([1, 1, 1, 1], 1 / 8 / scale) if weight is None else weight * (1 / 8 / scale)
        factors.append((eighth.expand(bsz, heads, length, 8), bias.transpose(2, 3).expand(bsz, heads, -1, 8)))
    query, key = joined(factors, bsz, heads)
    query, key = in_type(query, value.dtype), in_type(key, value.dtype)

    mask: Tensor | None = None
    if others or logits.outers or logits.diagonals:
        mask = in_type(Logits([], logits.outers, others, logits.diagonals).total(length), value.dtype)
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
    return by_token(out[..., :head_dim] if out.size(3) > head_dim else out)


def joined(factors: list[tuple[Tensor, Tensor]], bsz: int, heads: int) -> tuple[Tensor, Tensor]:
    """The factors (B, H, T, r) and (B, H, S, r) of all products, concatenated on their features."""
    query, key = factors[0]
    if len(factors) == 1 and query.size() == key.size() and query.size(0) == bsz and query.size(1) == heads:
        return query, key
    queries, keys = zip(*factors)
    return concatenated(list(queries), bsz, heads), concatenated(list(keys), bsz, heads)
