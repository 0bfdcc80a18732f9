"""Exact ways to compute ``softmax(S) V`` from the terms of S. `attend` chooses one for each call.

`plain` is the definition: the others are tested against it, in value and gradient.

==========  ==============================================================================================
`plain`     any mask, dropout, attention weights; holds logits and weights of (B, H, T, S), or of (1, H, T, S)
            where they are shared across the batch and there is no padding mask
`fused`     one call of `torch.nn.functional.scaled_dot_product_attention` over the queries and keys of all
            terms beside each other; biases become its mask
`tiled`     for CPUs: logits and weights never exist as a whole. A tile of them at a time is computed, and
            computed again in the backward pass. Shared logits have one softmax for all sentences of a length
==========  ==============================================================================================
"""

from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .masks import future, is_causal, masked_softmax, on_cpu, sentence_lengths
from .synthesizers import Terms, has_bias, logits, side_by_side, times_weight
from .tiles import is_shared, tiled

SMALL = 1 << 18  # logits that `plain` holds at no cost: they stay in a core's caches


def attend(
    terms: List[Terms],
    value: Tensor,
    key_padding_mask: Optional[Tensor],
    attn_mask: Optional[Tensor],
    dropout: float = 0.0,
) -> Tensor:
    """``softmax(S + masks) V`` by the best computation for these terms.

    =====================================================  ==================================
    logits                                                 computation
    =====================================================  ==================================
    under an ``attn_mask`` other than `causal_mask`        plain
    one inner product, not shared, and nothing else        fused
    on a GPU: shared across the batch, or without product  plain
    on a GPU: anything else                                fused
    on a CPU: anything else                                tiled; plain if few or with dropout
    =====================================================  ==================================

    Where padding is not only on the right, or covers a whole sentence, it is plain in place of tiled.

    Args:
        terms: of S.
        value: (B, H, T, d_h).
        key_padding_mask, attn_mask: as of `masked_softmax`, with S = T.
        dropout: probability of dropping a weight, for each sentence its own.

    Returns:
        (B, H, T, d_h). Rows of padding are unspecified, but finite.
    """
    bsz, heads, length, _ = value.size()
    causal = is_causal(attn_mask)
    if causal:
        key_padding_mask = None  # padding is behind the sentences, where no row of theirs looks
    elif attn_mask is not None:
        return plain(terms, value, key_padding_mask, attn_mask, dropout)[0]
    shared = bsz > 1 and is_shared(terms)
    has_product = any(term.query is not None for term in terms)
    is_product = has_product and len(terms) == 1 and not has_bias(terms[0])
    if not shared and has_product and (is_product or not on_cpu(value)):
        return fused(terms, value, key_padding_mask, causal, dropout)
    number = (1 if shared and key_padding_mask is None else bsz) * heads * length**2
    if dropout or number <= SMALL or not on_cpu(value):
        return plain(terms, value, key_padding_mask, attn_mask, dropout, fully_masked_rows=False)[0]
    lengths = [length] * bsz if key_padding_mask is None else sentence_lengths(key_padding_mask)
    if lengths is None:
        return plain(terms, value, key_padding_mask, attn_mask, fully_masked_rows=False)[0]
    return tiled(terms, value, lengths, causal)


def plain(
    terms: List[Terms],
    value: Tensor,
    key_padding_mask: Optional[Tensor],
    attn_mask: Optional[Tensor],
    dropout: float = 0.0,
    fully_masked_rows: bool = True,
) -> Tuple[Tensor, Tensor]:
    """``softmax(S + masks) V`` as it is written.

    Args:
        terms: of S.
        value: (B, H, S, d_h).
        key_padding_mask, attn_mask, fully_masked_rows: as of `masked_softmax`.
        dropout: probability of dropping a weight, for each sentence its own.

    Returns:
        the output, (B, H, T, d_h), and the weights before dropout, (B or 1, H, T, S).
    """
    weights = attention_weights(terms, value.size(1), value.size(2), key_padding_mask, attn_mask, fully_masked_rows)
    weights = weights.to(value.dtype)
    return weighted_sum(drop(weights, dropout, value.size(0)), value), weights


def attention_weights(
    terms: List[Terms],
    num_heads: int,
    src_len: int,
    key_padding_mask: Optional[Tensor],
    attn_mask: Optional[Tensor],
    fully_masked_rows: bool = True,
) -> Tensor:
    """``softmax(S + masks)`` over S = `src_len` columns, (B or 1, H, T or 1, S)."""
    weights = masked_softmax(logits(terms, src_len), key_padding_mask, attn_mask, fully_masked_rows)
    return weights.expand(-1, num_heads, -1, -1)  # of terms that are the same for all heads


def drop(weights: Tensor, dropout: float, bsz: int) -> Tensor:
    """Attention weights (B or 1, H, T, S) after dropout, for each sentence its own."""
    return F.dropout(weights.expand(bsz, -1, -1, -1), dropout) if dropout > 0 else weights


def weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """The product (B, H, T, d_h) of weights (B or 1, H, T, S) and values (B, H, S, d_h)."""
    bsz, heads, length, head_dim = value.size()
    if weights.size(0) == bsz:
        return torch.matmul(weights, value)
    # shared weights: one product for all sentences, their values side by side
    values = value.permute(1, 2, 0, 3).reshape(heads, length, bsz * head_dim)
    out = torch.matmul(weights[0], values)
    return out.view(heads, out.size(1), bsz, head_dim).permute(2, 0, 1, 3)


def fused(
    terms: List[Terms], value: Tensor, key_padding_mask: Optional[Tensor], causal: bool, dropout: float = 0.0
) -> Tensor:
    """`plain` by one call of torch's fused attention.

    Args:
        terms: of S.
        value: (B, H, T, d_h).
        key_padding_mask: (B, T), true for hidden; None if `causal`.
        causal: row i sees the columns up to i only.
        dropout: probability of dropping a weight.

    Returns:
        (B, H, T, d_h); rows of a sentence of padding alone are unspecified, but finite.
    """
    bsz, heads, length, head_dim = value.size()
    queries: List[Tensor] = []
    keys: List[Tensor] = []
    biases: List[Terms] = []
    products = [term for term in terms if term.query is not None]
    scale = products[0].scale if len(products) == 1 else 1.0  # the kernel's business
    for term in terms:
        query, key, bias, weight = term.query, term.key, term.bias, term.weight
        factor = term.scale / scale
        if bias is not None and bias.size(0) == bias.size(2) == 1:
            # a bias on columns is 8 more features of every key, times query features of 1/8, as the kernels want a
            # multiple of 8
            eighths = value.new_full([1, 1, 1, 1], 1 / (8 * scale)).expand(-1, -1, -1, 8)
            columns = bias.transpose(2, 3).expand(-1, -1, -1, 8)
            queries += [eighths] if query is None else [times_weight(query, None, factor), eighths]
            key = columns if key is None else side_by_side([key, columns])
            keys.append(times_weight(key, weight))  # the smaller factor
            bias = None
        elif query is not None and key is not None:
            queries.append(times_weight(query, weight, factor))
            keys.append(key)
        rest = Terms(None, None, bias, term.matrix, term.left, term.right, weight)
        if has_bias(rest):
            biases.append(rest)
    query, key = (
        (side_by_side(parts) if len(parts) > 1 else parts[0]).to(value.dtype).expand(bsz, heads, length, -1)
        for parts in (queries, keys)
    )

    mask: Optional[Tensor] = None
    if key_padding_mask is not None:
        padding = key_padding_mask[:, None, None].to(torch.bool)
        # finite, so that a sentence of padding alone has no NaN
        lowest = torch.finfo(value.dtype).min
    if biases:
        mask = logits(biases, length).to(value.dtype)
        if causal:
            mask = mask + future(length, mask)
        if key_padding_mask is not None:
            mask = mask.masked_fill(padding, lowest)
    elif key_padding_mask is not None:
        mask = value.new_zeros(1, 1, 1, 1).masked_fill(padding, lowest)
    if mask is not None:
        mask = mask.expand(bsz, heads, length, length)  # the kernels take one of all four sizes, without a copy

    rank = query.size(-1)
    width = max(rank, head_dim) if value.device.type == "cpu" else rank  # its kernel wants one width of all three
    width = -(-width // 8) * 8
    if width > rank:
        query, key = F.pad(query, (0, width - rank)), F.pad(key, (0, width - rank))
    if value.device.type == "cpu" and width > head_dim:
        value = F.pad(value, (0, width - head_dim))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None, scale=scale
    )
    return out[..., :head_dim] if value.size(-1) > head_dim else out
