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
    """Returns the ``attn_mask`` that stands for causal attention: a tensor without elements on the device of `like`.

    It says that row i sees the columns up to i, and that all padding is on the right. A computation knows this mask by
    its size, and can skip the hidden logits. Of an ordinary mask (T, T), it would have to read the values first.
    """
    return like.new_empty(0, 0)


def is_causal(attn_mask: Tensor | None) -> bool:
    """Returns whether a mask is the `causal_mask`."""
    return attn_mask is not None and attn_mask.dim() == 2 and attn_mask.shape[0] == 0


def to_boolean_or_float(attn_mask: Tensor | None) -> Tensor | None:
    """Returns a mask of integers as one of booleans, and any other mask as it is."""
    if attn_mask is None or torch.is_floating_point(attn_mask):
        return attn_mask
    return in_type(attn_mask, torch.bool)


def without_hidden_padding(key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """Returns the padding mask, or None under the `causal_mask`, where no padding mask is needed.

    There, all padding must be after the tokens of its sentence, and a token sees only what is before it. So it sees no
    padding.

    Args:
        key_padding_mask: (B, T), true at padding, or None.
        attn_mask: Any ``attn_mask``, or None.

    Raises:
        ValueError: There is padding before a token under the `causal_mask`. This is only checked on a CPU.
    """
    if key_padding_mask is None:
        return None
    if not is_causal(attn_mask):
        return key_padding_mask
    if on_cpu(key_padding_mask) and has_padding_before_tokens(key_padding_mask):
        raise ValueError("key_padding_mask: with causal_mask, all padding must be at the end of the sentences")
    return None


def future_mask(length: int, like: Tensor) -> Tensor:
    """Returns a causal mask to add to logits, (length, length): minus infinity above the diagonal and 0 elsewhere.

    It has the type and device of `like`.
    """
    return torch.full([length, length], float("-inf"), dtype=like.dtype, device=like.device).triu_(1)


def masked_softmax(
    scores: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, zero_rows_without_keys: bool = True
) -> Tensor:
    """Returns the softmax of the logits over the keys that are not hidden, (B or 1, H, T, S).

    It has the type of `scores`, or fp32 at least if `attn_mask` is a mask of numbers.

    Args:
        scores: The logits, (B or 1, H, T or 1, S).
        key_padding_mask: (B, S), true for hidden keys, or None.
        attn_mask: (T, S), boolean with true for hidden keys, or floating point to add; or the `causal_mask`.
        zero_rows_without_keys: What happens to a row whose keys are all hidden. If true, its weights and its gradient
            are 0. If false, its weights are finite numbers without a meaning, which saves two passes over the weights.
    """
    # Masks that are added: numbers, and the `causal_mask`. `scores` is replaced at each step, so that the logits of the
    # step before take no memory any longer.
    if attn_mask is not None:
        scores = add_mask(scores, attn_mask)
    # Keys that are hidden by padding, by booleans, or by minus infinity in a mask of numbers.
    hidden = hidden_keys(key_padding_mask, attn_mask)
    if hidden is None:
        return torch.softmax(scores, dim=-1)
    # The softmax of a row with nothing but minus infinity would be NaN. Therefore, the logits of hidden keys become a
    # finite number, which is so low that their weight is 0. But if all S keys of a row are hidden, their weights are
    # 1 / S, and may have to be set to 0.
    scores = scores.masked_fill(hidden, lowest(scores.dtype))
    weights = torch.softmax(scores, dim=-1)
    if zero_rows_without_keys:
        return weights.masked_fill(hidden, 0.0)
    return weights


def add_mask(scores: Tensor, attn_mask: Tensor) -> Tensor:
    """Returns the logits plus a mask.

    * The `causal_mask` stands for minus infinity in later columns. The logits keep their type.
    * A mask of numbers is added in fp32 at least.
    * A boolean mask is not added: the logits are returned as they are. `masked_softmax` applies such a mask later.

    Args:
        scores: The logits, (B or 1, H, T or 1, S). There is a single row if all rows are the same.
        attn_mask: Any of these masks. The causal mask is for as many rows as columns.
    """
    if is_causal(attn_mask):
        length = scores.shape[3]  # the number of columns, and of rows
        return scores + future_mask(length, like=scores)
    is_boolean = attn_mask.dtype == torch.bool
    if is_boolean:
        return scores
    return at_least_fp32(scores) + attn_mask


def hidden_keys(key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """Returns a boolean mask that is true where a row may not see a key, because of either mask; or None.

    The `causal_mask` does not count here. `add_mask` adds it, and that is enough, because each row sees one key at
    least.

    Args:
        key_padding_mask: (B, S), true for hidden keys of a sentence, or None.
        attn_mask: (T, S), boolean with true for keys that are hidden from a row, or floating point with minus infinity
            for them; or the `causal_mask`; or None.

    Returns:
        (B, 1, T, S), (B, 1, 1, S) or (T, S), all of which fit logits (B, H, T, S); None if no mask counts
    """
    hidden_by_attn_mask = keys_hidden_from_rows(attn_mask)  # (T, S), or None
    if key_padding_mask is None:
        return hidden_by_attn_mask
    padding = key_padding_mask[:, None, None].to(torch.bool)  # (B, 1, 1, S)
    if hidden_by_attn_mask is None:
        return padding
    return hidden_by_attn_mask | padding  # (B, 1, T, S)


def keys_hidden_from_rows(attn_mask: Tensor | None) -> Tensor | None:
    """Returns an ``attn_mask`` as booleans (T, S), true where a key is hidden from a row.

    Without a mask, and for the `causal_mask`, the result is None.
    """
    if attn_mask is None or is_causal(attn_mask):
        return None
    if attn_mask.dtype == torch.bool:
        return attn_mask
    return attn_mask == float("-inf")


def sentence_lengths(key_padding_mask: Tensor) -> list[int] | None:
    """Returns the length of each sentence in tokens; or None if padding is not on the right or a sentence is empty.

    This reads the values of the mask, so it is for the CPU only.

    Args:
        key_padding_mask: (B, S), true at padding.
    """
    is_token = ~key_padding_mask.to(torch.bool)
    num_tokens = is_token.sum(dim=1)
    # If all padding is on the right, the n tokens of a sentence are in the first n columns.
    columns = torch.arange(is_token.shape[1], device=is_token.device)
    is_among_first_columns = columns[None] < num_tokens[:, None]
    is_padding_on_the_right = torch.equal(is_token, is_among_first_columns)
    if not is_padding_on_the_right:
        return None
    lengths: list[int] = num_tokens.tolist()
    if 0 in lengths:
        return None
    return lengths


def aligned_columns(padding_mask: Tensor) -> Tensor | None:
    """Returns the column to which each token moves so that all padding is after its sentence, (B, T).

    Tokens keep their order, and so does padding. For example, a sentence with padding in the columns 0 and 3 has the
    mask [1, 0, 0, 1] and gets the columns [2, 0, 1, 3].

    If nothing has to move, the result is None on a CPU. On a GPU this is not checked, because the CPU would have to
    wait for the answer.

    Args:
        padding_mask: (B, T), true at padding, which may be anywhere.
    """
    if on_cpu(padding_mask) and not has_padding_before_tokens(padding_mask):
        return None
    is_token = (~padding_mask).long()  # in the example [0, 1, 1, 0]
    is_padding = 1 - is_token  # [1, 0, 0, 1]
    num_tokens = is_token.sum(dim=1, keepdim=True)  # (B, 1), [2]
    # A token moves behind the tokens on its left. Padding moves behind all tokens and the padding on its left. Both are
    # computed for every column first.
    column_if_token = count_before(is_token)  # [0, 0, 1, 2]
    column_if_padding = num_tokens + count_before(is_padding)  # 2 + [0, 1, 1, 1] = [2, 3, 3, 3]
    return torch.where(padding_mask, column_if_padding, column_if_token)  # [2, 0, 1, 3]


def count_before(is_counted: Tensor) -> Tensor:
    """Returns the number of ones on the left of each column: [0, 1, 1, 0] -> [0, 0, 1, 2].

    Args:
        is_counted: (B, T), of integers 0 and 1.
    """
    return is_counted.cumsum(dim=1) - is_counted  # `cumsum` counts the column itself, too.


def has_padding_before_tokens(padding_mask: Tensor) -> bool:
    """Returns whether a sentence has padding before one of its tokens.

    This reads the values of the mask, so it is for the CPU only.

    Args:
        padding_mask: (B, T), true at padding, of a boolean type.
    """
    is_padding_before_token = padding_mask[:, :-1] & ~padding_mask[:, 1:]
    return bool(is_padding_before_token.any())


def align(x: Tensor, columns: Tensor | None) -> Tensor:
    """Returns a batch with each token moved to its new column, so that all padding is after the sentences.

    For example, the tokens [p, u, v, p] with the columns [2, 0, 1, 3] become [u, v, p, p].

    Args:
        x: (B, T) or (B, T, C).
        columns: The new column of each token, (B, T), as `aligned_columns` returns it. With None, nothing moves.
    """
    if columns is None:
        return x
    if x.dim() == 2:
        index = columns
    else:
        index = columns.unsqueeze(-1).expand_as(x)
    # Each row of `columns` has every column once, so that all elements of the new tensor are written.
    return torch.empty_like(x).scatter(1, index, x)


def restore(aligned: Tensor, columns: Tensor | None, batch_first: bool = False) -> Tensor:
    """Returns a batch with each token moved back to the column that it had before `align`.

    `align` has moved token t of sentence b to the column ``columns[b, t]``. So it is read from there.

    Args:
        aligned: (T, B, C), or (B, T, C) if `batch_first`.
        columns: The argument of `align`, (B, T). With None, nothing moves.
        batch_first: Whether the sentences are the first dimension of `aligned`.
    """
    if columns is None:
        return aligned
    # `gather` wants an index for each feature, too. Here, all features of a token have the same index.
    num_features = aligned.shape[2]
    if batch_first:
        index = columns.unsqueeze(-1).expand(-1, -1, num_features)  # (B, T, C)
        return aligned.gather(1, index)  # result[b, t, c] = aligned[b, columns[b, t], c]
    index = columns.t().unsqueeze(-1).expand(-1, -1, num_features)  # (T, B, C)
    return aligned.gather(0, index)  # result[t, b, c] = aligned[columns[b, t], b, c]
