"""``softmax(S) V`` by one call of torch's fused attention, `torch.nn.functional.scaled_dot_product_attention`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..logits import Bias, Factors, Logits, Product, Term, apply_scale_and_weight, join_features
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

    torch computes ``softmax(torch_scale * query @ key^T + mask) V``.

    * Inner products, and biases that are the same in all rows, become the query and key.
    * All other terms of the logits become the mask, together with `key_padding_mask` and `attn_mask`.

    The rows of a sentence that consists of padding alone are computed too, and their results mean nothing.
    """
    row_biases = [term for term in logits.biases if has_equal_rows(term)]
    other_biases = [term for term in logits.biases if not has_equal_rows(term)]

    # torch has one scale, and each product has its own. torch gets that of the first product, whose query then needs
    # no multiplication. `refuses` has refused logits without a product.
    torch_scale = logits.products[0].scale
    query, key = join_products(logits.products, row_biases, torch_scale, value)

    other_terms: list[Term] = [*other_biases, *logits.outers, *logits.diagonals]
    hides_future = is_causal(attn_mask)
    mask = add_masks(sum_terms(other_terms, value), key_padding_mask, hides_future, value)
    # Only a causal call without other terms and padding has no mask that hides the later tokens. torch then hides them.
    needs_causal_flag = hides_future and mask is None
    out = call_torch(query, key, value, mask, dropout, needs_causal_flag, torch_scale)
    return join_heads(out)


def has_equal_rows(term: Bias) -> bool:
    """Returns whether a bias is the same in all rows, so that it has only one row."""
    return term.bias.size(2) == 1


def sum_terms(terms: list[Term], value: Tensor) -> Tensor | None:
    """Returns the sum of some terms of the logits in the type of the values (B, H, T, d_h), or None without terms."""
    if not terms:
        return None
    length = value.size(2)
    return in_type(Logits(terms).total(length), value.dtype)


def call_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    needs_causal_flag: bool,
    torch_scale: float,
) -> Tensor:
    """Returns ``softmax(torch_scale * query @ key^T + mask) V``, (B, H, T, d_h), computed by torch's fused attention.

    For the call, features are added to the query, key and value. Those of the value are cut from the result again.
    """
    padded_query, padded_key, padded_value = pad_features(query, key, value)
    out = F.scaled_dot_product_attention(
        padded_query,
        padded_key,
        padded_value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=needs_causal_flag,
        scale=torch_scale,
    )
    head_dim = value.size(3)
    return out[..., :head_dim] if out.size(3) > head_dim else out


def join_products(products: list[Product], row_biases: list[Bias], torch_scale: float, value: Tensor) -> Factors:
    """Returns one query and key, (B, H, T, r), whose inner product times `torch_scale` is a sum of terms of the logits.

    Args:
        products: The inner products to add up, at least one.
        row_biases: Biases to add to them, which are the same in all rows.
        torch_scale: The number by which torch multiplies the inner product of the query and key.
        value: V, (B, H, T, d_h). Only its sizes, type and device are read.
    """
    bsz, num_heads, _, _ = value.size()
    factors = []
    for product in products:
        remaining_scale = product.scale / torch_scale  # torch_scale * remaining_scale = product.scale
        factors.append(apply_scale_and_weight(product.query, product.key, remaining_scale, product.weight))
    for row_bias in row_biases:
        factors.append(row_bias_as_product(row_bias, torch_scale, value))
    joined = join_factors(factors, bsz, num_heads)
    return Factors(in_type(joined.left, value.dtype), in_type(joined.right, value.dtype))


def row_bias_as_product(term: Bias, torch_scale: float, value: Tensor) -> Factors:
    """Returns a query and a key whose inner product, times `torch_scale`, is a bias that is the same in all rows.

    Both have n equal features, because torch's kernels want a multiple of n = `FEATURE_MULTIPLE`:

        each of the n features of the query   weight / (n * torch_scale)
        each of the n features of the key     bias of the column
        their inner product                   weight * bias / torch_scale
        torch_scale times this                weight * bias

    Args:
        term: The bias, (B or 1, H or 1, 1, T), and its weight. If the weight is None, it is 1.
        torch_scale: The number by which torch multiplies the inner product.
        value: V, (B, H, T, d_h). Only its sizes, type and device are read.
    """
    bsz, num_heads, length, _ = value.size()
    unweighted_feature = 1 / (FEATURE_MULTIPLE * torch_scale)
    if term.weight is None:
        query_feature = value.new_full([1, 1, 1, 1], unweighted_feature)
    else:
        query_feature = term.weight * unweighted_feature  # (1, H, 1, 1)
    key_feature = term.bias.transpose(2, 3)  # (B or 1, H or 1, T, 1): the bias of a column belongs to its key
    query = query_feature.expand(bsz, num_heads, length, FEATURE_MULTIPLE)
    key = key_feature.expand(bsz, num_heads, length, FEATURE_MULTIPLE)
    return Factors(query, key)


def join_factors(factors: list[Factors], bsz: int, num_heads: int) -> Factors:
    """Joins the features of all queries and of all keys, and returns one query (B, H, T, r) and one key (B, H, S, r).

    The inner product of the returned query and key is the sum of the given inner products.

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
