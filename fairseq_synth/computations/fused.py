"""``softmax(S) V`` by one call of torch's fused attention, `torch.nn.functional.scaled_dot_product_attention`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..logits import Bias, Factors, Logits, Product, Term, join_features, weight_smaller_factor
from ..masks import future_mask, is_causal
from ..tensors import in_type, lowest, on_cpu
from .plain import join_heads

# torch's fused kernels are fastest, or only work, if the number of features of a query and key is a multiple of 8.
FEATURE_MULTIPLE = 8


def refuses(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float
) -> str:
    """Returns the reason why torch's fused attention cannot compute a call, or would be slow; or an empty string.

    The arguments are those of `attend`, which asks every computation in the same way. Padding and dropout are no
    reason, so `key_padding_mask` and `dropout` are not read.
    """
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

    torch computes ``softmax(scale * query @ key^T + mask) V``. Inner products and biases that are the same in all rows
    become its query and key, and all other terms of the logits become its mask. The rows of a sentence that consists of
    padding alone are computed too, and their results mean nothing.
    """
    _, _, length, head_dim = value.size()
    row_biases = [term for term in logits.biases if term.bias.size(2) == 1]
    other_biases = [term for term in logits.biases if term.bias.size(2) > 1]

    # torch takes one scale for all products. Any number would do, as `join_products` adapts the products that have
    # another scale. That of the first product saves this work. There is a product, or `refuses` would have refused.
    scale = logits.products[0].scale
    query, key = join_products(logits.products, row_biases, scale, value)

    bias = None
    terms_of_mask: list[Term] = [*other_biases, *logits.outers, *logits.diagonals]
    if terms_of_mask:
        bias = in_type(Logits(terms_of_mask).total(length), value.dtype)
    is_causal_call = is_causal(attn_mask)
    mask = add_masks(bias, key_padding_mask, is_causal_call, value)
    # torch takes either a mask or its flag for causal attention. If there is a mask, it hides the later tokens already.
    uses_causal_flag = is_causal_call and mask is None

    query, key, padded_value = pad_features(query, key, value)
    out = F.scaled_dot_product_attention(
        query, key, padded_value, attn_mask=mask, dropout_p=dropout, is_causal=uses_causal_flag, scale=scale
    )
    if out.size(3) > head_dim:
        out = out[..., :head_dim]  # without the features that `pad_features` has added to the value
    return join_heads(out)


def join_products(products: list[Product], row_biases: list[Bias], scale: float, value: Tensor) -> Factors:
    """Returns one query and key, (B, H, T, r), whose inner product times `scale` is a sum of terms of the logits.

    Args:
        products: The inner products to add up, at least one. Each has a scale of its own, so its factors are multiplied
            by this scale divided by `scale`.
        row_biases: Biases to add to them, which are the same in all rows.
        scale: The number by which torch multiplies all inner products.
        value: V, (B, H, T, d_h). Only its sizes, type and device are read.
    """
    bsz, num_heads, _, _ = value.size()
    factors = [
        weight_smaller_factor(product.query, product.key, product.scale / scale, product.weight) for product in products
    ]
    factors += [row_bias_as_product(term, scale, value) for term in row_biases]
    query, key = join_factors(factors, bsz, num_heads)
    return Factors(in_type(query, value.dtype), in_type(key, value.dtype))


def row_bias_as_product(term: Bias, scale: float, value: Tensor) -> Factors:
    """Returns a query and a key whose inner product, times `scale`, is a bias that is the same in all rows.

    Both have n = `FEATURE_MULTIPLE` features, because torch's kernels want a multiple of it. All features are equal:

        a feature of the query    weight / (scale * n)
        a feature of the key      the bias of the key's column
        their inner product       n * weight / (scale * n) * bias = weight * bias / scale

    Args:
        term: The bias, (B or 1, H or 1, 1, S), and its weight.
        scale: The number by which torch multiplies all inner products.
        value: V, (B, H, T, d_h). Only its sizes, type and device are read.
    """
    bsz, num_heads, length, _ = value.size()
    query_feature = 1 / FEATURE_MULTIPLE / scale
    if term.weight is None:
        query = value.new_full([1, 1, 1, 1], query_feature)
    else:
        query = term.weight * query_feature
    query = query.expand(bsz, num_heads, length, FEATURE_MULTIPLE)
    key = term.bias.transpose(2, 3).expand(bsz, num_heads, -1, FEATURE_MULTIPLE)
    return Factors(query, key)


def join_factors(factors: list[Factors], bsz: int, num_heads: int) -> Factors:
    """Joins the features of all queries and of all keys, and returns one query (B, H, T, r) and one key (B, H, S, r).

    Their inner product is the sum of all inner products.

    Args:
        factors: The query (`Factors.left`) and the key (`Factors.right`) of each inner product, (B or 1, H or 1, T, r).
        bsz: B.
        num_heads: H.
    """
    if len(factors) == 1 and has_full_size(factors[0], bsz, num_heads):
        return factors[0]  # This saves the calls below, which would return the same.
    queries = [factor.left for factor in factors]
    keys = [factor.right for factor in factors]
    return Factors(join_features(queries, bsz, num_heads), join_features(keys, bsz, num_heads))


def has_full_size(product: Factors, bsz: int, num_heads: int) -> bool:
    """Returns whether query and key of an inner product have all B sentences and all H heads."""
    query, key = product
    return query.size() == key.size() and query.size(0) == bsz and query.size(1) == num_heads


def add_masks(bias: Tensor | None, key_padding_mask: Tensor | None, causal: bool, value: Tensor) -> Tensor | None:
    """Returns the numbers (B, H, T, T) that torch is to add to the inner products, or None if there is nothing to add.

    They are the sum of the bias, a very low number in the columns of padding, and minus infinity in the columns that
    the causal mask hides. Without bias and padding the result is None even for the causal mask, because torch can then
    apply that mask by itself.

    Args:
        bias: The part of the logits that is no inner product, (B or 1, H or 1, T or 1, T), or None.
        key_padding_mask: (B, T), true at padding, or None.
        causal: Whether a row sees only the columns up to its own.
        value: V, (B, H, T, d_h). Only its sizes and type are read.
    """
    bsz, num_heads, length, _ = value.size()
    mask = bias
    if key_padding_mask is not None:
        mask = add_padding(bias, key_padding_mask, value.dtype)
    if mask is None:
        return None
    if causal:
        # Every row keeps a finite number, in its own column, so that no row becomes NaN.
        mask = mask + future_mask(length, mask)
    if mask.shape != (bsz, num_heads, length, length):
        # The fused kernels take a view of the full size without copying it.
        mask = mask.expand(bsz, num_heads, length, length)
    return mask


def add_padding(bias: Tensor | None, key_padding_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a bias after adding a very low number in the columns of padding, (B, H or 1, T or 1, T).

    The number is finite, because minus infinity would make the rows of a sentence of padding NaN. It is half the lowest
    number of the type, so that the sum with a bias stays finite too.

    Args:
        bias: (B or 1, H or 1, T or 1, T), or None, which stands for a bias of 0.
        key_padding_mask: (B, T), true at padding.
        dtype: The floating-point type of the result; a bias has it already.
    """
    bsz, length = key_padding_mask.size()
    is_padding = in_type(key_padding_mask, torch.bool).view(bsz, 1, 1, length)
    low_number = lowest(dtype) / 2
    if bias is None:
        return is_padding.to(dtype) * low_number
    return torch.add(bias, is_padding, alpha=low_number)  # bias + low_number * is_padding, where true counts as 1


def pad_features(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns query, key and value with as many features as torch's fused kernels want; the additional ones are 0.

    Query and key get a multiple of `FEATURE_MULTIPLE` features. On a CPU, the value must have as many as they do.

    Args:
        query, key: (B, H, T, r).
        value: (B, H, T, d_h).
    """
    num_features = query.size(3)
    head_dim = value.size(3)
    needs_equal_features = on_cpu(value)
    num_needed_features = max(num_features, head_dim) if needs_equal_features else num_features
    num_padded_features = round_up(num_needed_features, FEATURE_MULTIPLE)
    # ``F.pad(x, (0, n))`` appends n zeros to the last dimension.
    if num_padded_features > num_features:
        query = F.pad(query, (0, num_padded_features - num_features))
        key = F.pad(key, (0, num_padded_features - num_features))
    if needs_equal_features and num_padded_features > head_dim:
        value = F.pad(value, (0, num_padded_features - head_dim))
    return query, key, value


def round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is not less than the number."""
    return (number + multiple - 1) // multiple * multiple
