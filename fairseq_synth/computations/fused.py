"""``softmax(S) V`` by one call of torch's fused attention, `torch.nn.functional.scaled_dot_product_attention`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..logits import Bias, Factors, Logits, Product, Term, apply_scale_and_weight, join_features, multiply
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
    if value.shape[0] > 1 and logits.is_shared():
        return "all sentences share the logits"
    # One of the terms is an inner product, as checked above.
    if on_cpu(value) and len(logits.terms()) > 1:
        return "other logits are added to the inner product, and torch's attention with a bias is slow on a CPU"
    if attn_mask is not None and not is_causal(attn_mask):
        return "the mask is not the causal one"
    return ""


def compute(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float = 0.0
) -> Tensor:
    """Returns ``softmax(S) V``, (T B, C). The arguments are those of `attend`.

    torch computes ``softmax(torch_scale * query @ key^T + mask) V``. So the terms of the logits S are divided between
    the query and key, and the mask:

    * Inner products, and biases that depend only on the column, become one query and key.
    * All other terms become the mask, together with `key_padding_mask` and `attn_mask`.

    The output of a sentence that consists of padding alone has no meaning.
    """
    assert logits.products, "`refuses` must refuse logits that have no inner product"
    column_biases: list[Bias] = []
    terms_of_mask: list[Term] = [*logits.outers, *logits.diagonals]
    for bias in logits.biases:
        if is_column_bias(bias):
            column_biases.append(bias)
        else:
            terms_of_mask.append(bias)

    # torch takes one scale, although each product has its own. With the scale of the first product, the query of this
    # product need not be multiplied.
    torch_scale = logits.products[0].scale
    query, key = join_products(logits.products, column_biases, torch_scale, like=value)

    hides_future = is_causal(attn_mask)
    mask = None
    if terms_of_mask or key_padding_mask is not None:
        mask = make_mask(terms_of_mask, key_padding_mask, hides_future, like=value)
    # torch can hide the future itself, which is faster than a mask, but not in addition to a mask.
    torch_hides_future = hides_future and mask is None
    out = call_torch(query, key, value, mask, dropout, torch_hides_future, torch_scale)
    return join_heads(out)


def is_column_bias(term: Bias) -> bool:
    """Returns whether a bias depends only on the column. Such a bias has a single row, which stands for all rows."""
    return term.bias.shape[2] == 1


def sum_terms(terms: list[Term], like: Tensor) -> Tensor:
    """Returns the sum of some terms of the logits, (B or 1, H or 1, T or 1, T).

    Args:
        terms: The terms, at least one.
        like: The values, (B, H, T, d_h). The sum gets their type and has T columns.
    """
    first_term = terms[0]
    if len(terms) == 1 and isinstance(first_term, Bias):
        # The usual case, as in random + vanilla, is computed faster without `Logits`.
        total = multiply(first_term.bias, first_term.weight)
    else:
        length = like.shape[2]
        total = Logits(terms).total(length)
    return in_type(total, like.dtype)


def call_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    torch_hides_future: bool,
    torch_scale: float,
) -> Tensor:
    """Returns ``softmax(torch_scale * query @ key^T + mask) V``, (B, H, T, d_h), computed by torch's fused attention.

    torch's kernels want a multiple of 8 features, so features of 0 are added to the query, key and value. The features
    that are added to the value are in the result, too, and are cut off again.

    Args:
        query, key: (B, H, T, r).
        value: V, (B, H, T, d_h).
        mask: Numbers to add, (B, H, T, T), or None.
        dropout: Probability of dropping an attention weight.
        torch_hides_future: Whether torch applies the causal mask, for which `mask` must be None.
        torch_scale: A number.
    """
    padded_query, padded_key, padded_value = pad_features(query, key, value)
    out = F.scaled_dot_product_attention(
        padded_query,
        padded_key,
        padded_value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=torch_hides_future,
        scale=torch_scale,
    )
    head_dim = value.shape[3]
    if out.shape[3] == head_dim:
        return out
    return out[..., :head_dim]


def join_products(products: list[Product], column_biases: list[Bias], torch_scale: float, like: Tensor) -> Factors:
    """Returns one query and key, (B, H, T, r), so that ``torch_scale * query @ key^T`` is the sum of the given terms.

    First, each term becomes a query and key of its own, whose inner product times `torch_scale` is the term. Then all
    queries are joined along their features, and so are all keys. This adds up the inner products:
    ``[q1 q2] [k1 k2]^T = q1 k1^T + q2 k2^T``.

    Args:
        products: The inner products of the sum, at least one.
        column_biases: The biases of the sum, each of which depends only on the column.
        torch_scale: The number by which torch multiplies the inner product of the query and key.
        like: The values, (B, H, T, d_h). Only their sizes, type and device are read.
    """
    bsz, num_heads, _, _ = like.size()
    pairs = []  # the query and key of each term
    for product in products:
        pairs.append(product_for_torch(product, torch_scale))
    for column_bias in column_biases:
        pairs.append(column_bias_for_torch(column_bias, torch_scale, like))
    query, key = join_factors(pairs, bsz, num_heads)
    return Factors(in_type(query, like.dtype), in_type(key, like.dtype))


def product_for_torch(term: Product, torch_scale: float) -> Factors:
    """Returns a query and key so that ``torch_scale * query @ key^T`` is the term ``weight * scale * q @ k^T``.

    For example, if the scale of the term is 0.5 and `torch_scale` is 0.25, the query is multiplied by 2.
    """
    remaining_scale = term.scale / torch_scale
    return apply_scale_and_weight(term.query, term.key, remaining_scale, term.weight)


def column_bias_for_torch(term: Bias, torch_scale: float, like: Tensor) -> Factors:
    """Returns a query and key, (B, H, T, 8), so that ``torch_scale * query @ key^T`` is a bias times its weight.

    The key is the bias, and the query is ``weight / (8 torch_scale)``, repeated in 8 equal features, because torch's
    kernels want a multiple of 8 (`FEATURE_MULTIPLE`). So torch computes

        torch_scale * (8 features * bias * weight / (8 torch_scale)) = bias * weight

    Args:
        term: The bias, (B or 1, H or 1, 1, T), and its weight. If the weight is None, it is 1.
        torch_scale: The number by which torch multiplies the inner product.
        like: The values, (B, H, T, d_h). Only their sizes, type and device are read.
    """
    factor = 1 / (FEATURE_MULTIPLE * torch_scale)
    if term.weight is None:
        query_feature = like.new_full([1, 1, 1, 1], factor)
    else:
        query_feature = term.weight * factor  # (1, H, 1, 1)
    key_feature = term.bias.transpose(2, 3)  # (B or 1, H or 1, T, 1): each key has the bias of its column
    # `expand` repeats a single number, without memory, for all sentences, heads and tokens, and for the 8 features.
    bsz, num_heads, length, _ = like.size()
    query = query_feature.expand(bsz, num_heads, length, FEATURE_MULTIPLE)
    key = key_feature.expand(bsz, num_heads, length, FEATURE_MULTIPLE)
    return Factors(query, key)


def join_factors(pairs: list[Factors], bsz: int, num_heads: int) -> Factors:
    """Returns one query and one key, (B, H, T, r) each, whose inner product is the sum of the given inner products.

    The query has the features of all queries side by side, and the key has the features of all keys.

    Args:
        pairs: The query (`Factors.left`) and the key (`Factors.right`) of each inner product, (B or 1, H or 1, T, r).
            A dimension has the size 1 if all sentences or heads share the tensor.
        bsz: B.
        num_heads: H.
    """
    is_joined_already = len(pairs) == 1 and has_full_size(pairs[0], bsz, num_heads)
    if is_joined_already:
        return pairs[0]
    queries = [pair.left for pair in pairs]
    keys = [pair.right for pair in pairs]
    return Factors(join_features(queries, bsz, num_heads), join_features(keys, bsz, num_heads))


def has_full_size(product: Factors, bsz: int, num_heads: int) -> bool:
    """Returns whether query and key of an inner product have all B sentences and all H heads."""
    query, key = product
    return query.size() == key.size() and query.shape[0] == bsz and query.shape[1] == num_heads


def make_mask(terms: list[Term], key_padding_mask: Tensor | None, hides_future: bool, like: Tensor) -> Tensor:
    """Returns the mask (B, H, T, T) that torch is to add to the inner products.

    It is the sum of some terms of the logits. In the columns of padding, it is very low. If the future is hidden, it is
    minus infinity in the columns of later tokens.

    Args:
        terms: The terms of the logits that the mask contains.
        key_padding_mask: (B, T), true at padding, or None. It must be given if there are no terms.
        hides_future: Whether a row sees only the columns up to its own.
        like: The values, (B, H, T, d_h). Only their sizes and type are read.
    """
    bsz, num_heads, length, _ = like.size()
    # `mask` may have the size 1 in place of B, H or T at first.
    if key_padding_mask is None:
        mask = sum_terms(terms, like)
    elif terms:
        mask = add_padding(sum_terms(terms, like), key_padding_mask)
    else:
        mask = padding_in_numbers(key_padding_mask, like.dtype)
    if hides_future:
        mask = mask + future_mask(length, like=mask)
    full_size = (bsz, num_heads, length, length)
    if mask.shape != full_size:
        mask = mask.expand(full_size)  # a view, which the fused kernels take without copying it
    return mask


def add_padding(logits: Tensor, key_padding_mask: Tensor) -> Tensor:
    """Returns logits plus a very low number in the columns of padding, (B, H or 1, T or 1, T).

    Args:
        logits: (B or 1, H or 1, T or 1, T).
        key_padding_mask: (B, T), true at padding.
    """
    is_padding = padding_of_columns(key_padding_mask)
    return torch.add(logits, is_padding, alpha=number_of_padding(logits.dtype))  # logits + alpha * is_padding


def padding_in_numbers(key_padding_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a very low number in the columns of padding, and 0 in the others, (B, 1, 1, T).

    Args:
        key_padding_mask: (B, T), true at padding.
        dtype: The floating-point type of the result.
    """
    is_padding = padding_of_columns(key_padding_mask)
    return is_padding.to(dtype) * number_of_padding(dtype)


def padding_of_columns(key_padding_mask: Tensor) -> Tensor:
    """Returns a padding mask (B, T) as booleans (B, 1, 1, T), in which it fits logits (B, H, T, T)."""
    bsz, length = key_padding_mask.size()
    return in_type(key_padding_mask, torch.bool).view(bsz, 1, 1, length)


def number_of_padding(dtype: torch.dtype) -> float:
    """Returns the very low number that is added to the logits of padding.

    It is finite. With minus infinity, all logits of a sentence of padding would be minus infinity, and their softmax
    would be NaN. It is half the lowest number of the type, so that the sum with a logit stays finite too.
    """
    return lowest(dtype) / 2


def pad_features(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns query, key and value with as many features as torch's fused kernels want; the additional ones are 0.

    * On a CPU, all three get the same number of features, a multiple of 8. For example, a query of 12 features and a
      value of 20 become 24 features each.
    * On a GPU, query and key get a multiple of 8. The value stays as it is. In the example, the query gets 16 features.

    Args:
        query, key: (B, H, T, r).
        value: (B, H, T, d_h).
    """
    num_features = query.shape[3]  # r
    if on_cpu(value):
        head_dim = value.shape[3]
        padded_size = round_up(max(num_features, head_dim), FEATURE_MULTIPLE)
        return append_zeros(query, padded_size), append_zeros(key, padded_size), append_zeros(value, padded_size)
    padded_size = round_up(num_features, FEATURE_MULTIPLE)
    return append_zeros(query, padded_size), append_zeros(key, padded_size), value


def append_zeros(x: Tensor, size: int) -> Tensor:
    """Returns a tensor with zeros behind its features, the last dimension, so that there are `size` features."""
    num_zeros = size - x.shape[-1]
    if num_zeros == 0:
        return x
    return F.pad(x, (0, num_zeros))


def round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is not less than the number."""
    return (number + multiple - 1) // multiple * multiple
