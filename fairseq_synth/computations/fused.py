"""``softmax(S) V`` by one call of torch's fused attention, `torch.nn.functional.scaled_dot_product_attention`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..logits import Bias, Factors, Logits, Term, join_features, weight_smaller_factor
from ..masks import future_mask, is_causal
from ..tensors import in_type, lowest, on_cpu
from .plain import join_heads

# The fused kernels are fastest, or only work, if the number of features is a multiple of 8.
FEATURE_MULTIPLE = 8


def refuses(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float
) -> str:
    """Returns why this computation does not take the call, or an empty string; see `computations`."""
    if not logits.products:
        return "the logits have no inner product"
    if value.size(0) > 1 and logits.is_shared():
        return "all sentences share the logits"
    if on_cpu(value) and len(logits.terms()) > 1:
        return "there is more than an inner product, and torch's attention with a bias is slow on a CPU"
    if attn_mask is not None and not is_causal(attn_mask):
        return "the mask is not the causal one"
    return ""


def compute(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float = 0.0
) -> Tensor:
    """Returns ``softmax(S) V``, (T B, C); see `attend`.

    Rows of a sentence that consists of padding have any finite values.
    """
    bsz, num_heads, length, head_dim = value.size()
    # torch multiplies the sum of all inner products by one scale.
    scale = logits.products[0].scale
    row_biases = [term for term in logits.biases if term.bias.size(2) == 1]
    other_biases = [term for term in logits.biases if term.bias.size(2) > 1]

    factors = [weight_smaller_factor(x.query, x.key, x.scale / scale, x.weight) for x in logits.products]
    factors += [row_bias_as_product(term, scale, value) for term in row_biases]
    query, key = join_factors(factors, bsz, num_heads)
    query = in_type(query, value.dtype)
    key = in_type(key, value.dtype)

    mask = None
    if other_biases or logits.outers or logits.diagonals:
        remaining_terms: list[Term] = [*other_biases, *logits.outers, *logits.diagonals]
        mask = in_type(Logits(remaining_terms).total(length), value.dtype)
    is_causal_call = is_causal(attn_mask)
    mask = add_masks(mask, key_padding_mask, is_causal_call, value)

    query, key, padded_value = pad_features(query, key, value)
    out = F.scaled_dot_product_attention(
        query,
        key,
        padded_value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal_call and mask is None,
        scale=scale,
    )
    if out.size(3) > head_dim:
        out = out[..., :head_dim]
    return join_heads(out)


def row_bias_as_product(term: Bias, scale: float, value: Tensor) -> Factors:
    """Returns a bias that is the same in all rows as an inner product with `FEATURE_MULTIPLE` equal features.

    Each key has the bias as features, and each query has features that sum up to ``weight / scale``.
    """
    bsz, num_heads, length, _ = value.size()
    share = 1 / FEATURE_MULTIPLE / scale
    if term.weight is None:
        query = value.new_full([1, 1, 1, 1], share)
    else:
        query = term.weight * share
    query = query.expand(bsz, num_heads, length, FEATURE_MULTIPLE)
    key = term.bias.transpose(2, 3).expand(bsz, num_heads, -1, FEATURE_MULTIPLE)
    return Factors(query, key)


def join_factors(factors: list[Factors], bsz: int, num_heads: int) -> Factors:
    """Returns the queries (B, H, T, r) and keys (B, H, S, r) of all inner products, side by side on their features."""
    query, key = factors[0]
    is_complete = query.size() == key.size() and query.size(0) == bsz and query.size(1) == num_heads
    if len(factors) == 1 and is_complete:
        return factors[0]
    queries = [factor.left for factor in factors]
    keys = [factor.right for factor in factors]
    return Factors(join_features(queries, bsz, num_heads), join_features(keys, bsz, num_heads))


def add_masks(mask: Tensor | None, key_padding_mask: Tensor | None, causal: bool, value: Tensor) -> Tensor | None:
    """Returns a mask (B, H, T, T) in numbers: the biases so far plus padding and causality; None if it would be 0.

    Without biases and padding, torch knows by itself what is causal, so no mask is made for that.
    """
    bsz, num_heads, length, _ = value.size()
    if key_padding_mask is not None:
        hidden = in_type(key_padding_mask, torch.bool).view(bsz, 1, 1, length)
        # Finite, so that a sentence of padding has no NaN, and half the range, as a bias is added to it.
        low = lowest(value.dtype) / 2
        if mask is None:
            mask = hidden.to(value.dtype) * low
        else:
            mask = torch.add(mask, hidden, alpha=low)
    if mask is None:
        return None
    if causal:
        mask = mask + future_mask(length, mask)
    if mask.shape != (bsz, num_heads, length, length):
        # The fused kernels take a view of the full size without copying it.
        mask = mask.expand(bsz, num_heads, length, -1)
    return mask


def pad_features(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns query, key and value with as many features as the fused kernels want.

    On a CPU, all three must have the same number of features; additional ones are 0.
    """
    num_features = query.size(3)
    head_dim = value.size(3)
    padded = num_features
    if on_cpu(value):
        padded = max(num_features, head_dim)
    padded += -padded % FEATURE_MULTIPLE
    if padded > num_features:
        query = F.pad(query, (0, padded - num_features))
        key = F.pad(key, (0, padded - num_features))
    if on_cpu(value) and padded > head_dim:
        value = F.pad(value, (0, padded - head_dim))
    return query, key, value
