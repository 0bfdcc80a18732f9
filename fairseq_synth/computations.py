"""Exact ways to compute ``softmax(S) V`` from the terms of S. `attend` chooses one for each call.

`plain` is the definition: the others are tested against it, in value and gradient.

==========  ==============================================================================================
`plain`     any mask, dropout, attention weights; holds logits and weights of (B, H, T, S)
`fused`     one call of `torch.nn.functional.scaled_dot_product_attention` over the concatenated queries and
            keys of all terms; biases become its mask
`tiled`     logits and weights never exist as a whole: a tile at a time, computed again in the backward pass.
            Logits that do not depend on the input have one softmax per sentence length, for all sentences
            of that length: one product (T, T) (T, n d_h) for each head
==========  ==============================================================================================
"""

from typing import Any, Callable, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .synthesizers import Terms, at_least_fp32, logits, times_weight
from .tiles import future_mask, groups_of, input_independent, tiled

SMALL = 1 << 16  # logits of a whole batch that are not worth a tile


def attend(
    terms: List[Terms],
    value: Tensor,
    key_padding_mask: Optional[Tensor],
    attn_mask: Optional[Tensor],
    dropout: float,
) -> Optional[Tensor]:
    """``softmax(S + masks) V`` by the best computation for these terms, or None where only `plain` will do.

    =====================================================  ================================
    logits                                                 computation
    =====================================================  ================================
    under a mask that is neither causal nor right padding  plain
    independent of the input, several sentences            tiled; with dropout plain
    one inner product                                      fused
    anything else, on a GPU                                fused
    anything else, on a CPU                                tiled; few or with dropout plain
    =====================================================  ================================

    Args:
        terms: of S.
        value: (B, H, T, d_h).
        key_padding_mask, attn_mask: as of `masked_softmax`, with S = T.
        dropout: probability of dropping a weight.

    Returns:
        (B, H, T, d_h), or None. Rows of padding are unspecified, but finite.
    """
    bsz, heads, length, _ = value.size()
    on_cpu = value.device.type == "cpu"
    lengths = None if key_padding_mask is None else sentence_lengths(key_padding_mask)
    causal = attn_mask is not None
    if key_padding_mask is not None and (lengths is None or len(lengths) != bsz):
        return None
    if attn_mask is not None and (attn_mask.size(0) != length or attn_mask.requires_grad or not is_causal(attn_mask)):
        return None
    if causal:
        # what is behind a sentence is never seen from inside it
        key_padding_mask = lengths = None
    if bsz > 1 and input_independent(terms):
        computation = plain if dropout else tiled
    elif not on_cpu or (len(terms) == 1 and not has_bias(terms[0])):
        computation = fused
    else:
        computation = plain if dropout or bsz * heads * length**2 <= SMALL else tiled

    if computation is fused:
        return fused(terms, value, key_padding_mask, causal, dropout)
    if computation is tiled:
        return tiled(terms, value, groups_of(lengths or [length] * bsz), causal)
    return None


def plain(
    terms: List[Terms],
    value: Tensor,
    key_padding_mask: Optional[Tensor],
    attn_mask: Optional[Tensor],
    dropout: float = 0.0,
) -> Tuple[Tensor, Tensor]:
    """``softmax(S + masks) V`` as it is written.

    Args:
        terms: of S.
        value: (B, H, S, d_h).
        key_padding_mask, attn_mask: as of `masked_softmax`.
        dropout: probability of dropping a weight, for each sentence its own.

    Returns:
        the output, (B, H, T, d_h), and the weights before dropout, (B or 1, H, T, S).
    """
    weights, dropped = plain_weights(terms, value.size(2), key_padding_mask, attn_mask, dropout, value)
    return torch.matmul(dropped, value), weights


def plain_weights(
    terms: List[Terms],
    src_len: int,
    key_padding_mask: Optional[Tensor],
    attn_mask: Optional[Tensor],
    dropout: float,
    value: Tensor,
) -> Tuple[Tensor, Tensor]:
    """The weights of `plain`, (B or 1, H, T, S) of the type of the value, before and after dropout."""
    weights = masked_softmax(logits(terms, src_len), key_padding_mask, attn_mask).to(value.dtype)
    if dropout > 0:
        return weights, F.dropout(weights.expand(value.size(0), -1, -1, -1), dropout)
    return weights, weights


def masked_softmax(scores: Tensor, key_padding_mask: Optional[Tensor], attn_mask: Optional[Tensor]) -> Tensor:
    """Softmax over the visible keys, in fp32 at least; 0 with a zero gradient in a row that sees none.

    Args:
        scores: (B or 1, H, T, S).
        key_padding_mask: (B, S), true for hidden.
        attn_mask: (T, S), boolean with true for hidden, or floating point to add.
    """
    scores = at_least_fp32(scores)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask, float("-inf"))
        else:
            scores = scores + attn_mask
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, None, :].to(torch.bool), float("-inf"))
    if attn_mask is None and key_padding_mask is None:
        return torch.softmax(scores, dim=-1)
    blind = (scores == float("-inf")).all(dim=-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)


def sentence_lengths(key_padding_mask: Tensor) -> Optional[List[int]]:
    """Length of each sentence, where all padding is on the right and no sentence is empty; otherwise None.

    Args:
        key_padding_mask: (B, S), true for padding.
    """

    def compute() -> Optional[List[int]]:
        real = ~key_padding_mask.to(torch.bool)
        lengths = real.sum(dim=1)
        columns = torch.arange(real.size(1), device=real.device)
        aligned = (real == (columns[None] < lengths[:, None])).all()
        found = torch.cat([lengths, aligned[None].to(lengths.dtype)]).tolist()  # at once: one wait for a GPU
        return found[:-1] if found[-1] and 0 not in found[:-1] else None

    return remembered(key_padding_mask, "lengths", compute)


def is_causal(attn_mask: Tensor) -> bool:
    """Whether a mask (T, T) hides all columns above the diagonal, by minus infinity or true, and no other."""

    def compute() -> bool:
        if attn_mask.dim() != 2 or attn_mask.size(0) != attn_mask.size(1):
            return False
        if attn_mask.dtype == torch.bool:
            return torch.equal(attn_mask, torch.ones_like(attn_mask).triu_(1))
        return torch.equal(attn_mask, future_mask(attn_mask.size(0), attn_mask))

    return remembered(attn_mask, "causal", compute)


def remembered(mask: Tensor, question: str, compute: Callable[[], Any]) -> Any:
    """compute(), once for this mask: all layers of a model see the same one, and each look costs a GPU a wait.

    A mask changed in place is read again; writes through ``.data`` or numpy go unseen.
    """
    if mask.is_inference():
        return compute()  # no version by which to know a change
    state = (id(mask), mask._version)
    answers = mask.__dict__.setdefault("fairseq_synth", {})
    if question not in answers or answers[question][0] != state:
        answers[question] = (state, compute())
    return answers[question][1]


def fused(
    terms: List[Terms], value: Tensor, key_padding_mask: Optional[Tensor], causal: bool, dropout: float = 0.0
) -> Tensor:
    """`plain`, where every row sees a key, by one call of torch's fused attention.

    Args:
        terms: of S.
        value: (B, H, T, d_h).
        key_padding_mask: (B, T), true for hidden; None if `causal`.
        causal: row i sees the columns up to i only.
        dropout: probability of dropping a weight.

    Returns:
        (B, H, T, d_h).
    """
    bsz, heads, length, head_dim = value.size()
    queries: List[Tensor] = []
    keys: List[Tensor] = []
    bias: Optional[Tensor] = None
    scale = terms[0].scale if len(terms) == 1 and not has_bias(terms[0]) else 1.0  # one product: the kernel's business
    for term in terms:
        if term.query is not None and term.key is not None:
            queries.append(times_weight(term.query, term.weight, term.scale / scale).to(value.dtype))
            keys.append(term.key.to(value.dtype))
        rest = logits([term._replace(query=None, key=None)], length) if has_bias(term) else None
        if rest is not None:
            bias = rest if bias is None else bias + rest
    if bias is not None and bias.size(0) == 1 and bias.size(2) == 1:
        # a bias on columns is one more key under a query of 1, and leaves the kernels without a mask
        queries.append(value.new_ones(1, 1, 1, 1))
        keys.append(bias.transpose(2, 3).to(value.dtype))
        bias = None
    if not queries:
        queries, keys = [value.new_zeros(1, 1, 1, 1)], [value.new_zeros(1, 1, 1, 1)]
    rank = sum(key.size(-1) for key in keys)
    # the kernels want queries, keys and values of one width, a multiple of 8
    width = max(head_dim, -(-rank // 8) * 8)
    if width > rank:
        queries.append(value.new_zeros(1, 1, 1, 1).expand(1, 1, 1, width - rank))
        keys.append(queries[-1])
    query, key = (
        parts[0].expand(bsz, -1, -1, -1)
        if len(parts) == 1
        else torch.cat([part.expand(bsz, heads, length, -1) for part in parts], dim=-1)
        for parts in (queries, keys)
    )
    hidden = None if key_padding_mask is None else key_padding_mask[:, None, None].to(torch.bool)
    mask: Optional[Tensor] = None
    if bias is not None:
        mask = bias.to(value.dtype)
        if causal:
            mask = mask + future_mask(length, mask)
        if hidden is not None:
            mask = mask.masked_fill(hidden, float("-inf"))
        # the kernels take a mask of all four sizes, without a copy
        mask = mask.expand(bsz, heads, length, length)
    elif hidden is not None:
        mask = ~hidden
    if width > head_dim:
        value = F.pad(value, (0, width - head_dim))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None, scale=scale
    )
    return out[..., :head_dim]


def has_bias(term: Terms) -> bool:
    """Whether the term is more than an inner product of queries and keys."""
    return term.bias is not None or term.matrix is not None or term.left is not None
