"""Padding and causality: alignment of padded sentences, their lengths, and the softmax under masks.

The values of a mask are never read on a GPU, where that would make the CPU wait. A decoder passes `causal_mask`, a
tensor without elements, which is known by its size. Sentences are aligned on their first token as they enter the model
(`align`), so that position-indexed logits are right and all padding is behind the sentences.

Any other mask is an ``attn_mask`` of booleans or of numbers, which the plain computation applies to the logits. A
decoder's is what ``buffered_future_mask`` in `layers` returns; a step of decoding has none. Every computation has code
of its own that skips what `causal_mask` hides: to change that, change every place that says ``causal``.
"""

import torch
from torch import Tensor


def causal_mask(like: Tensor) -> Tensor:
    """The ``attn_mask`` of a decoder, without elements: row i sees the columns up to i, and padding is on the right.

    A mask (T, T) of minus infinity means the same to `masked_softmax`, but one has to read its values to know.
    """
    return like.new_empty(0, 0)


def is_causal(attn_mask: Tensor | None) -> bool:
    """Whether a mask is `causal_mask`."""
    return attn_mask is not None and attn_mask.dim() == 2 and attn_mask.size(0) == 0


def as_boolean(attn_mask: Tensor | None) -> Tensor | None:
    """The mask, of booleans if it is not of floating-point numbers."""
    if attn_mask is None or torch.is_floating_point(attn_mask):
        return attn_mask
    return in_type(attn_mask, torch.bool)


def behind_sentences(key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """The padding mask; None under `causal_mask`, as no row of a sentence looks at what is behind it.

    Raises ValueError if under `causal_mask` there is padding elsewhere, which is asked on a CPU alone.
    """
    if key_padding_mask is None or not is_causal(attn_mask):
        return key_padding_mask
    if on_cpu(key_padding_mask):
        if aligned_columns(key_padding_mask) is not None:
            raise ValueError("key_padding_mask: causal_mask is for sentences with all padding behind them")
    return None


def future(length: int, like: Tensor) -> Tensor:
    """`causal_mask` in numbers, (T, T) of the type of `like`: minus infinity above the diagonal, else 0."""
    return torch.full([length, length], float("-inf"), dtype=like.dtype, device=like.device).triu_(1)


def masked_softmax(
    scores: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, zero_unseeing_rows: bool = True
) -> Tensor:
    """Softmax over the visible keys; 0 with a zero gradient in a row that sees none.

    The weights have the type of `scores`, or fp32 at least where `attn_mask` adds numbers to them.

    Args:
        scores: (B or 1, H, T or 1, S).
        key_padding_mask: (B, S), true for hidden.
        attn_mask: (T, S), boolean with true for hidden, or floating point to add; or `causal_mask`.
        zero_unseeing_rows: give the weights 0 to rows that see no key, instead of any finite ones; costs a pass over
            the weights and one over their gradient.
    """
    if is_causal(attn_mask):
        scores = scores + future(scores.size(3), scores)
        attn_mask = None
    hidden: Tensor | None = None
    if attn_mask is not None:
        hidden = attn_mask
        if attn_mask.dtype != torch.bool:
            scores = at_least_fp32(scores) + attn_mask
            hidden = attn_mask == float("-inf")
    if key_padding_mask is not None:
        padding = key_padding_mask[:, None, None].to(torch.bool)
        hidden = padding if hidden is None else hidden | padding
    if hidden is None:
        return torch.softmax(scores, dim=-1)
    # finite: a fully masked row is then no NaN, and its weights become 0 in the end
    scores = scores.masked_fill(hidden, lowest(scores.dtype))
    weights = torch.softmax(scores, dim=-1)  # 0 where a key is hidden beside a visible one
    return weights.masked_fill(hidden, 0.0) if zero_unseeing_rows else weights


def sentence_lengths(key_padding_mask: Tensor) -> list[int] | None:
    """Length of each sentence, where all padding is on the right and no sentence is empty; otherwise None.

    For the CPU only: on a GPU, reading the values would synchronize.

    Args:
        key_padding_mask: (B, S), true for padding.
    """
    real = ~key_padding_mask.to(torch.bool)
    lengths = real.sum(dim=1)
    if not torch.equal(real, torch.arange(real.size(1), device=real.device)[None] < lengths[:, None]):
        return None
    found: list[int] = lengths.tolist()
    return None if 0 in found else found


def aligned_columns(padding_mask: Tensor) -> Tensor | None:
    """The columns (B, T) that tokens take when all padding is moved behind its sentence, order kept.

    None where nothing moves, which is asked on a CPU alone: on a GPU the answer would make the CPU wait.

    Args:
        padding_mask: (B, T), true at padding, which may be anywhere.
    """
    if on_cpu(padding_mask) and not bool((padding_mask[:, :-1] & ~padding_mask[:, 1:]).any()):
        return None
    real = (~padding_mask).long()
    behind = real.sum(dim=1, keepdim=True) + (1 - real).cumsum(dim=1) - 1
    return torch.where(padding_mask, behind, real.cumsum(dim=1) - 1)


def align(x: Tensor, columns: Tensor | None) -> Tensor:
    """x (B, T) or (B, T, C) with its tokens in `aligned_columns`."""
    if columns is None:
        return x
    index = columns if x.dim() == 2 else columns.unsqueeze(-1).expand_as(x)
    return torch.empty_like(x).scatter(1, index, x)


def restore(x: Tensor, columns: Tensor | None, batch_first: bool = False) -> Tensor:
    """x (T, B, C), or (B, T, C) if `batch_first`, from `aligned_columns` back to the caller's columns."""
    if columns is None:
        return x
    if batch_first:
        return x.gather(1, columns.unsqueeze(-1).expand(-1, -1, x.size(2)))
    return x.gather(0, columns.t().unsqueeze(-1).expand(-1, -1, x.size(2)))


def is_recorded() -> bool:
    """Whether torch records the computation, by a trace or `torch.compile`. Scripted code must not call it."""
    return torch.jit.is_tracing() or torch.compiler.is_compiling()


def on_cpu(x: Tensor) -> bool:
    """Whether values may be read, and loops depend on them: on a CPU, unless torch records the computation."""
    if not torch.jit.is_scripting():
        return x.device.type == "cpu" and not is_recorded()
    return x.device.type == "cpu"


def in_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a type; `Tensor.to` takes several times as long to find that it is."""
    return x if x.dtype == dtype else x.to(dtype)


def lowest(dtype: torch.dtype) -> float:
    """About the lowest finite number of a floating-point type; of fp64 that of fp32."""
    return -65504.0 if dtype == torch.float16 else -3.3e38


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or as it is in fp64."""
    return x if x.dtype == torch.float64 else in_type(x, torch.float32)
