"""Padding and causality: the alignment of padded sentences, their lengths, and the softmax under masks.

Masks are tensors, and on a GPU their values are never read, because that would make the CPU wait. Two conventions make
this possible:

* A decoder passes `causal_mask`, a tensor without elements, which is recognised by its size.
* Sentences are aligned on their first token when they enter the model (`align`). Logits that depend on positions are
  then right for every sentence, and all padding is behind the sentences.

Every other ``attn_mask`` is a tensor of booleans or of numbers, which only the plain computation applies. Each other
computation skips what `causal_mask` hides by code of its own: whoever changes that mask changes every place that asks
`is_causal`. The mask that a decoder passes comes from ``buffered_future_mask`` in `layers`; a decoding step has none.
"""

import torch
from torch import Tensor

from .tensors import at_least_fp32, in_type, lowest, on_cpu


def causal_mask(like: Tensor) -> Tensor:
    """Returns the ``attn_mask`` of a decoder, a tensor without elements on the device of `like`.

    It means that row i sees the columns up to i, and that all padding is on the right. A matrix (T, T) of minus
    infinity means the same to `masked_softmax`, but its values have to be read to know that.
    """
    return like.new_empty(0, 0)


def is_causal(attn_mask: Tensor | None) -> bool:
    """Returns whether a mask is the `causal_mask`."""
    return attn_mask is not None and attn_mask.dim() == 2 and attn_mask.size(0) == 0


def to_boolean_or_float(attn_mask: Tensor | None) -> Tensor | None:
    """Returns a mask of integers as one of booleans, and any other mask as it is."""
    if attn_mask is None or torch.is_floating_point(attn_mask):
        return attn_mask
    return in_type(attn_mask, torch.bool)


def without_hidden_padding(key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """Returns the padding mask, or None under the `causal_mask`, which hides all padding behind a sentence.

    Raises:
        ValueError: There is padding elsewhere under the `causal_mask`. This is only checked on a CPU.
    """
    if key_padding_mask is None or not is_causal(attn_mask):
        return key_padding_mask
    if on_cpu(key_padding_mask) and aligned_columns(key_padding_mask) is not None:
        raise ValueError("key_padding_mask: causal_mask is for sentences with all padding behind them")
    return None


def future_mask(length: int, like: Tensor) -> Tensor:
    """Returns the `causal_mask` in numbers: (T, T), minus infinity above the diagonal and 0 elsewhere.

    It has the type and device of `like`.
    """
    return torch.full([length, length], float("-inf"), dtype=like.dtype, device=like.device).triu_(1)


def masked_softmax(
    scores: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, zero_unseeing_rows: bool = True
) -> Tensor:
    """Returns the softmax over the visible keys.

    The weights have the type of `scores`, or at least fp32 if `attn_mask` adds numbers.

    Args:
        scores: The logits, (B or 1, H, T or 1, S).
        key_padding_mask: (B, S), true for hidden keys.
        attn_mask: (T, S), boolean with true for hidden keys, or floating point to add; or the `causal_mask`.
        zero_unseeing_rows: Whether a row that sees no key has the weights 0 with a zero gradient, instead of any finite
            weights. This costs a pass over the weights and one over their gradient.
    """
    if is_causal(attn_mask):
        scores = scores + future_mask(scores.size(3), scores)
        attn_mask = None
    hidden = None
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            hidden = attn_mask
        else:
            scores = at_least_fp32(scores) + attn_mask
            hidden = attn_mask == float("-inf")
    if key_padding_mask is not None:
        padding = key_padding_mask[:, None, None].to(torch.bool)
        hidden = padding if hidden is None else hidden | padding
    if hidden is None:
        return torch.softmax(scores, dim=-1)
    # The lowest finite number instead of minus infinity: a row that sees no key has no NaN then.
    scores = scores.masked_fill(hidden, lowest(scores.dtype))
    weights = torch.softmax(scores, dim=-1)
    if zero_unseeing_rows:
        return weights.masked_fill(hidden, 0.0)
    return weights


def sentence_lengths(key_padding_mask: Tensor) -> list[int] | None:
    """Returns the length of each sentence, if all padding is on the right and no sentence is empty, else None.

    This reads the values of the mask, so it is for the CPU only.

    Args:
        key_padding_mask: (B, S), true at padding.
    """
    is_token = ~key_padding_mask.to(torch.bool)
    lengths = is_token.sum(dim=1)
    columns = torch.arange(is_token.size(1), device=is_token.device)
    is_padding_on_the_right = torch.equal(is_token, columns[None] < lengths[:, None])
    if not is_padding_on_the_right:
        return None
    numbers: list[int] = lengths.tolist()
    if 0 in numbers:
        return None
    return numbers


def aligned_columns(padding_mask: Tensor) -> Tensor | None:
    """Returns the column (B, T) of each token after all padding has moved behind its sentence, with the order kept.

    Returns None if nothing moves. This is only found out on a CPU; on a GPU the CPU would have to wait for the answer.

    Args:
        padding_mask: (B, T), true at padding, which may be anywhere.
    """
    if on_cpu(padding_mask):
        is_padding_before_token = padding_mask[:, :-1] & ~padding_mask[:, 1:]
        if not bool(is_padding_before_token.any()):
            return None
    is_token = (~padding_mask).long()
    num_tokens = is_token.sum(dim=1, keepdim=True)
    columns_of_tokens = is_token.cumsum(dim=1) - 1
    columns_of_padding = num_tokens + (1 - is_token).cumsum(dim=1) - 1
    return torch.where(padding_mask, columns_of_padding, columns_of_tokens)


def align(x: Tensor, columns: Tensor | None) -> Tensor:
    """Returns x (B, T) or (B, T, C) with its tokens moved to `aligned_columns`; None moves nothing."""
    if columns is None:
        return x
    if x.dim() == 2:
        index = columns
    else:
        index = columns.unsqueeze(-1).expand_as(x)
    return torch.empty_like(x).scatter(1, index, x)


def restore(x: Tensor, columns: Tensor | None, batch_first: bool = False) -> Tensor:
    """Returns x (T, B, C), or (B, T, C) if `batch_first`, moved from `aligned_columns` back to the caller's columns."""
    if columns is None:
        return x
    if batch_first:
        return x.gather(1, columns.unsqueeze(-1).expand(-1, -1, x.size(2)))
    return x.gather(0, columns.t().unsqueeze(-1).expand(-1, -1, x.size(2)))
