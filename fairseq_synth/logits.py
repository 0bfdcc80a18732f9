"""The attention logits S of one call, described as a sum of simple terms.

A synthesizing function returns its logits as a list of terms: `Product`, `Outer`, `Bias` and `Diagonals`. `Logits`
holds all terms of the functions that a head mixes. It can add them up, or bring the sum into its `NormalForm`, which
the computations of ``softmax(S) V`` work with.

Sizes: B sentences, H heads, T rows (queries) and S columns (keys). Every tensor of a term has four dimensions. A
dimension has the size 1 where a term is the same for all of it:

* B is 1 if the term does not depend on the input,
* H is 1 if all heads share the term,
* T is 1 in a bias whose rows are all alike.

A term may have a weight for each head, (1, H, 1, 1), which a mixture sets. The weight stays apart from the term because
each computation multiplies it by the smallest tensor that it meets.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .positions import take_positions
from .tensors import at_least_fp32, in_type


class Product(NamedTuple):
    """An inner product, ``weight * scale * query @ key^T``.

    The scale is a number, because torch's fused attention takes a number.
    """

    query: Tensor  # (B, H, T, r)
    key: Tensor  # (B, H, S, r)
    scale: float = 1.0
    weight: Tensor | None = None

    def with_weight(self, weight: Tensor | None) -> "Product":
        """Returns the same term with this weight in place of its own."""
        return Product(self.query, self.key, self.scale, weight)


class Outer(NamedTuple):
    """The outer product of two factors of each row, times the weight.

    The first `left_size` features of a row are the left factor, the other b features are the right factor. The logit in
    column ``u b + v`` is ``left[u] right[v]``. Columns beyond ``left_size * b`` begin again with u = v = 0.
    """

    factors: Tensor  # (B, H, T, left_size + b)
    left_size: int
    weight: Tensor | None = None

    def with_weight(self, weight: Tensor | None) -> "Outer":
        """Returns the same term with this weight in place of its own."""
        return Outer(self.factors, self.left_size, weight)


class Bias(NamedTuple):
    """Logits that are computed already, times the weight."""

    bias: Tensor  # (B, H, T, S)
    weight: Tensor | None = None

    def with_weight(self, weight: Tensor | None) -> "Bias":
        """Returns the same term with this weight in place of its own."""
        return Bias(self.bias, weight)


class Diagonals(NamedTuple):
    """One value for each distance between row and column, times the weight.

    The value with index ``j - i + T - 1`` belongs to column j of row i, so that the last row begins with the first
    value.
    """

    values: Tensor  # (1, H, 1, T + S - 1)
    weight: Tensor | None = None

    def with_weight(self, weight: Tensor | None) -> "Diagonals":
        """Returns the same term with this weight in place of its own."""
        return Diagonals(self.values, weight)


Term = Product | Outer | Bias | Diagonals


class NormalForm(NamedTuple):
    """The logits as ``S = query @ key^T + left (x) right + bias``: at most one product, outer product and bias.

    Parts that do not occur are None. All weights and scales are multiplied in. As in the terms, a dimension has the
    size 1 where all sentences, heads or rows are alike.
    """

    query: Tensor | None = None  # (B, H, T, r)
    key: Tensor | None = None  # (B, H, S, r)
    left: Tensor | None = None  # (B, H, T, a); left and right are the factors of an `Outer`
    right: Tensor | None = None  # (B, H, T, b)
    bias: Tensor | None = None  # (B, H, T, S)

    def tensors(self) -> dict[str, Tensor]:
        """Returns {name of the field: its tensor}, for the fields that are not None."""
        return {field: tensor for field, tensor in self._asdict().items() if tensor is not None}

    def total(self, src_len: int) -> Tensor:
        """Returns the logits S as one tensor, (B or 1, H or 1, T or 1, S).

        A sum of several parts is in fp32 at least. A single part keeps its type. If it is the bias, the result may be a
        view of a parameter, so do not change it in place.

        Args:
            src_len: S, the number of columns.
        """
        products = self._sum_of_products(src_len)
        if products is None:
            assert self.bias is not None, "the logits have no terms"
            return self.bias
        if self.bias is None:
            return products
        return add_bias_(products, self.bias)  # may write the sum into the memory of `products`, which is new

    def _sum_of_products(self, src_len: int) -> Tensor | None:
        """Returns ``query @ key^T + left (x) right`` in new memory; without one of the two, the other one; or None."""
        inner = None
        if self.query is not None and self.key is not None:
            inner = inner_product(self.query, self.key)
        if self.left is None or self.right is None:
            return inner
        outer = outer_product(self.left, self.right, src_len)
        return add(inner, outer)  # just `outer` if `inner` is None


class Factors(NamedTuple):
    """The two factors of an inner or outer product; of an inner product, they are the query and the key."""

    left: Tensor
    right: Tensor


class Logits:
    """The logits S of one call: the sum of all its terms, sorted by kind.

    Attributes:
        products, outers, biases, diagonals: The terms of each kind.
        sorted_terms: The terms as a computation has sorted them, which keeps them here from its function `refuses` to
            its function `compute`. None if no computation has sorted them yet.
    """

    def __init__(self, terms: Iterable[Term] = ()) -> None:
        self.products: list[Product] = []
        self.outers: list[Outer] = []
        self.biases: list[Bias] = []
        self.diagonals: list[Diagonals] = []
        self.sorted_terms: Any = None
        self.add_terms(terms)

    def add_terms(self, terms: Iterable[Term], weight: Tensor | None = None) -> None:
        """Adds terms to the sum, each multiplied by a weight.

        Args:
            terms: The terms. If `weight` is given, they may not have a weight of their own, which would be lost.
            weight: A weight for each head, (1, H, 1, 1), or None to add the terms as they are.
        """
        self.sorted_terms = None  # They would lack the new terms.
        for term in terms:
            if weight is None:
                weighted_term = term
            else:
                weighted_term = term.with_weight(weight)
            if isinstance(weighted_term, Product):
                self.products.append(weighted_term)
            elif isinstance(weighted_term, Bias):
                self.biases.append(weighted_term)
            elif isinstance(weighted_term, Outer):
                self.outers.append(weighted_term)
            else:
                assert isinstance(weighted_term, Diagonals), f"no term of logits: {type(weighted_term).__name__}"
                self.diagonals.append(weighted_term)

    def terms(self) -> list[Term]:
        """Returns all terms."""
        return [*self.products, *self.outers, *self.biases, *self.diagonals]

    def is_shared(self) -> bool:
        """Returns whether all sentences of a batch have the same logits."""
        for product in self.products:
            if product.query.shape[0] > 1 or product.key.shape[0] > 1:
                return False
        for outer in self.outers:
            if outer.factors.shape[0] > 1:
                return False
        for bias_term in self.biases:
            if bias_term.bias.shape[0] > 1:
                return False
        return True  # Sentences always share diagonals.

    def normal_form(self, src_len: int) -> NormalForm:
        """Returns the logits as the sum of at most one inner product, one outer product and one bias.

        Args:
            src_len: S, the number of columns.
        """
        # Scales and weights are multiplied in here, so that only tensors are left below.
        products = [multiply_in(term) for term in self.products]
        outers = [outer_factors(term, src_len) for term in self.outers]

        # The inner product: all products become one by joining their features,
        # ``q1 k1^T + q2 k2^T = [q1 q2] [k1 k2]^T``.
        joined_products = products
        other_products: list[Product] = []
        is_decoding_step = any(product.query.shape[2] == 1 for product in products)  # A query has a single row.
        if is_decoding_step:
            # Joining would copy the keys of all tokens so far. So only the first product is taken.
            joined_products = products[:1]
            other_products = products[1:]
        query = None
        key = None
        if joined_products:
            query = join_features([product.query for product in joined_products])
            key = join_features([product.key for product in joined_products])

        # The outer product: the first one.
        left = None
        right = None
        if outers:
            left = outers[0].left
            right = outers[0].right

        # The bias: the sum of everything else.
        bias = self._add_up_bias(other_products, outers[1:], src_len)
        return NormalForm(query=query, key=key, left=left, right=right, bias=bias)

    def total(self, src_len: int) -> Tensor:
        """Returns the logits S as one tensor with `src_len` columns; see `NormalForm.total`."""
        return self.normal_form(src_len).total(src_len)

    def _add_up_bias(
        self, other_products: Sequence[Product], other_outers: Sequence[Factors], src_len: int
    ) -> Tensor | None:
        """Returns the bias of the normal form, (B or 1, H or 1, T or 1, S), or None if the logits need none.

        The bias is the sum of all biases and diagonals of the logits, and of the products that are given here. It is in
        fp32 at least, with one exception: if the logits have a single term, nothing is added, and the type stays.

        Args:
            other_products: The inner products to be added. Their scales and weights are multiplied in already.
            other_outers: The outer products to be added. Their weights are multiplied in already.
            src_len: S, the number of columns.
        """
        has_single_term = len(self.terms()) == 1
        # Each summand may be as large as all logits. So each is added before the next one is computed.
        total = None
        for bias_term in self.biases:
            bias = bias_term.bias if has_single_term else at_least_fp32(bias_term.bias)
            total = add(total, multiply(bias, bias_term.weight))
        for diagonals_term in self.diagonals:
            values = diagonals_term.values if has_single_term else at_least_fp32(diagonals_term.values)
            weighted_values = multiply(values, diagonals_term.weight)
            total = add(total, toeplitz(weighted_values, src_len))
        for outer in other_outers:
            total = add(total, at_least_fp32(outer_product(outer.left, outer.right, src_len)))
        for product in other_products:
            total = add(total, at_least_fp32(inner_product(product.query, product.key)))
        return total


def add(x: Tensor | None, y: Tensor) -> Tensor:
    """Returns ``x + y`` in fp32 at least; or `y` as it is if `x` is None, which stands for a sum without summands."""
    if x is None:
        return y
    return at_least_fp32(x) + at_least_fp32(y)


def add_bias_(products: Tensor, bias: Tensor) -> Tensor:
    """Returns ``products + bias`` in fp32 at least.

    The sum is written into `products`, which saves memory, except in two cases: `products` is in half precision, or it
    is smaller than the sum.

    Args:
        products: A sum of products, in memory of its own, (B or 1, H or 1, T, S).
        bias: (B or 1, H or 1, T or 1, S).
    """
    # Products are smaller than the sum if, for example, all sentences share them and each sentence has a bias of its
    # own. The first three dimensions are sentences, heads and rows; the number of columns is always the same.
    sum_is_larger = any(bias.size(dim) > products.size(dim) for dim in range(3))
    if sum_is_larger:
        return add(products, bias)
    if products.dtype in (torch.float32, torch.float64):
        return products.add_(bias)
    copy_in_fp32 = at_least_fp32(products)
    return copy_in_fp32.add_(bias)


def multiply(x: Tensor, weight: Tensor | None) -> Tensor:
    """Returns `x` times the weight, in the type of `x`."""
    if weight is None:
        return x
    return x * in_type(weight, x.dtype)


def apply_scale_and_weight(left: Tensor, right: Tensor, scale: float, weight: Tensor | None) -> Factors:
    """Returns the two factors of a product, after multiplying one of them by `scale` and `weight`.

    * With a weight, the factor with fewer elements is multiplied, because that is less work.
    * Without a weight, the left factor is multiplied. In an inner product it is the query, which has no more rows than
      the key, and a single row in a decoding step.

    Args:
        left, right: The factors, (B, H, T or S, r) each.
        scale: A number.
        weight: A weight for each head, (1, H, 1, 1), or None.
    """
    has_scale = scale != 1.0  # The multiplication by 1 is saved.
    if weight is None:
        return Factors(left * scale, right) if has_scale else Factors(left, right)
    scaled_weight = weight * scale if has_scale else weight
    right_is_smaller = right.numel() < left.numel()
    if right_is_smaller:
        return Factors(left, multiply(right, scaled_weight))
    return Factors(multiply(left, scaled_weight), right)


def multiply_in(term: Product) -> Product:
    """Returns the same inner product without scale and weight, which are multiplied into its query or key."""
    factors = apply_scale_and_weight(term.query, term.key, term.scale, term.weight)
    return Product(query=factors.left, key=factors.right)


def outer_factors(outer: Outer, src_len: int) -> Factors:
    """Returns the left and right factor of an outer product, with as many features as `src_len` columns need.

    An outer product repeats all b right features for each left feature: the first b columns are the left feature 0
    times each right feature, the next b columns are the left feature 1 times each right feature, and so on. If the left
    features are not enough, they begin again with feature 0.
    """
    left_size = outer.left_size
    right_size = outer.factors.shape[3] - left_size  # b
    all_left, all_right = outer.factors.split([left_size, right_size], dim=3)
    # For example, with 2 left features and b = 3, 8 columns need the left features 0, 1 and 0 again.
    num_needed_left = count_left_features(src_len, right_size)  # 8 / 3, rounded up to 3
    left = take_positions(all_left, dim=3, start=0, count=num_needed_left)
    # Right features are not repeated here, but when the factors are multiplied. Some are not needed if S < b.
    num_needed_right = min(right_size, src_len)
    right = take_positions(all_right, dim=3, start=0, count=num_needed_right)
    # An outer product has no scale.
    return apply_scale_and_weight(left, right, scale=1.0, weight=outer.weight)


def count_left_features(src_len: int, right_size: int) -> int:
    """Returns how many left features of an outer product `src_len` columns need.

    Each left feature is for `right_size` neighbouring columns. The columns of the last one may be cut off, so this is
    ``src_len / right_size``, rounded up.
    """
    return (src_len + right_size - 1) // right_size


def toeplitz(values: Tensor, src_len: int) -> Tensor:
    """Returns the matrix (1, H, T, S) whose entries depend only on the distance from row i to column j, ``j - i``.

    For example, 3 rows and 3 columns have the distances -2 to 2. With the values a b c d e, the matrix is

        c d e    row 0: the distances  0 to 2
        b c d    row 1: the distances -1 to 1
        a b c    row 2: the distances -2 to 0

    Args:
        values: One value for each distance, (1, H, 1, T + S - 1), from the smallest distance to the largest.
        src_len: S, the number of columns.
    """
    # `unfold` lists all slices of S neighbouring values: in the example a b c, then b c d, then c d e. These are the
    # rows of the matrix, but the last row is first.
    rows_from_last_to_first = values.squeeze(2).unfold(dimension=2, size=src_len, step=1)  # (1, H, T, S), a view
    tgt_len = rows_from_last_to_first.shape[2]
    if tgt_len == 1:
        return rows_from_last_to_first  # A single row needs no copy in another order.
    return rows_from_last_to_first.flip(2)


def inner_product(query: Tensor, key: Tensor) -> Tensor:
    """Returns ``query @ key^T``, (B, H, T, S).

    torch.matmul would copy keys that all sentences share, once for each sentence. This function does not copy them.

    Args:
        query: (B or 1, H or 1, T, r).
        key: (B or 1, H or 1, S, r).
    """
    several_sentences_share_keys = key.shape[0] == 1 and query.shape[0] > 1
    if not several_sentences_share_keys:
        return torch.matmul(query, key.transpose(-2, -1))
    all_heads_share_keys = key.shape[1] == 1
    if all_heads_share_keys:
        only_key = key[0, 0]  # (S, r)
        return torch.matmul(query, only_key.t())
    keys_of_heads = key[0]  # (H, S, r)
    return torch.einsum("bhtr,hsr->bhts", query, keys_of_heads)


def outer_product(left: Tensor, right: Tensor, src_len: int) -> Tensor:
    """Returns the outer product of each row's left and right factor, as a row of `src_len` columns.

    Column j is ``left[j // b] * right[j % b]``, where b is the number of right features.
    """
    right_size = right.shape[3]
    num_left_features = count_left_features(src_len, right_size)
    left = take_positions(left, dim=3, start=0, count=num_left_features)
    products = left.unsqueeze(-1) * right.unsqueeze(-2)  # (B, H, T, left features, b)
    return products.flatten(-2)[..., :src_len]


def join_features(factors: list[Tensor], bsz: int | None = None, num_heads: int | None = None) -> Tensor:
    """Returns one tensor with the features of all `factors`, one factor after another, as (B, H, T, r1 + r2 + ...).

    Args:
        factors: Tensors (B or 1, H or 1, T, r), where r may differ.
        bsz: The number of sentences of the result. With None, it is that of the factors, and 1 only if all have 1.
        num_heads: The number of heads of the result. With None, it is that of the factors, and 1 only if all have 1.
    """
    if bsz is None:
        bsz = find_common_size(factor.shape[0] for factor in factors)
    if num_heads is None:
        num_heads = find_common_size(factor.shape[1] for factor in factors)
    expanded = [expand_batch(factor, bsz, num_heads) for factor in factors]
    if len(expanded) == 1:
        return expanded[0]
    return torch.cat(expanded, dim=-1)


def find_common_size(sizes: Iterable[int]) -> int:
    """Returns the size of a dimension after broadcasting: the size that is not 1, or 1 if all sizes are 1."""
    for size in sizes:
        if size != 1:
            return size
    return 1


def expand_batch(x: Tensor, bsz: int, num_heads: int) -> Tensor:
    """Returns x (B or 1, H or 1, T, r) as a view of `bsz` sentences and `num_heads` heads."""
    if x.shape[0] == bsz and x.shape[1] == num_heads:
        return x
    return x.expand(bsz, num_heads, -1, -1)
