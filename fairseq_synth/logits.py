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

    The first `left_size` features of a row are the left factor, and the other b features are the right factor. The
    logit in column ``u b + v`` is ``left[u] * right[v]``. Columns from ``left_size * b`` on repeat the first columns.

    For example, with the left factor (2, 3), the right factor (5, 7) and 6 columns, the logits of the row are
    (10, 14, 15, 21, 10, 14).
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
    """Logits that depend only on the distance ``j - i`` from row i to column j, times the weight.

    The values are sorted by distance. The smallest distance is that of the last row to the first column, ``1 - T``.
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
        """Returns the logits ``query @ key^T + left (x) right + bias`` as one tensor, (B or 1, H or 1, T or 1, S).

        A sum of several parts is in fp32 at least. A single part keeps its type.

        The caller must not change the result in place if the bias is the only part: then, the result is the bias
        itself, which may be a view of a parameter. Otherwise, the result is a new tensor.

        Args:
            src_len: S, the number of columns.
        """
        total = None
        if self.query is not None and self.key is not None:
            total = inner_product(self.query, self.key)  # a new tensor
        if self.left is not None and self.right is not None:
            total = add(total, outer_product(self.left, self.right, src_len))  # a new tensor in any case
        if total is None:
            assert self.bias is not None, "the logits have no terms"
            return self.bias
        if self.bias is None:
            return total
        # Nothing else needs the sum of the products, so its memory may be used for the result.
        return add_bias_(total, self.bias)


class Factors(NamedTuple):
    """The two factors of an inner or outer product; of an inner product, they are the query and the key."""

    left: Tensor
    right: Tensor


class Logits:
    """The logits S of one call: the sum of all its terms, sorted by kind.

    Attributes:
        products, outers, biases, diagonals: The terms of each kind.
        sorted_terms: A note of the computation `kernels` for itself: the terms as its function `refuses` has sorted
            them, for its function `compute`. None if they have not been sorted yet.
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
        self.sorted_terms = None  # It would lack the new terms.
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
        """Returns the logits as ``query @ key^T + left (x) right + bias``.

        * Inner products are joined into a single one, ``q1 k1^T + q2 k2^T = [q1 q2] [k1 k2]^T``, except in decoding.
        * The first outer product has the factors left and right.
        * All other terms are added up in the bias.

        Args:
            src_len: S, the number of columns.
        """
        # The scale and the weight of each product are multiplied into its factors.
        products = [multiply_in(term) for term in self.products]
        outers = [outer_factors(term, src_len) for term in self.outers]

        joined_products = products
        added_products: list[Product] = []  # They become a part of the bias.
        is_decoding_step = any(product.query.shape[2] == 1 for product in products)  # There is a single query.
        if is_decoding_step:
            # Joining would copy the keys of all tokens so far. So only the first product is taken, without a copy.
            joined_products = products[:1]
            added_products = products[1:]
        query = None
        key = None
        if joined_products:
            query = join_features([product.query for product in joined_products])
            key = join_features([product.key for product in joined_products])

        left = None
        right = None
        if outers:
            left = outers[0].left
            right = outers[0].right

        bias = self._sum_up_bias(added_products, outers[1:], src_len)
        return NormalForm(query=query, key=key, left=left, right=right, bias=bias)

    def total(self, src_len: int) -> Tensor:
        """Returns the logits S as one tensor with `src_len` columns; see `NormalForm.total`."""
        return self.normal_form(src_len).total(src_len)

    def _sum_up_bias(self, products: Sequence[Product], outers: Sequence[Factors], src_len: int) -> Tensor | None:
        """Returns the sum of all biases and diagonals, and of the given products, (B or 1, H or 1, T or 1, S).

        It is in fp32 at least. But if the logits have a single term, nothing is added, and the term keeps its type.
        Without a summand, the result is None.

        Args:
            products: Inner products. Their scales and weights are multiplied in already.
            outers: Outer products. Their weights are multiplied in already.
            src_len: S, the number of columns.
        """
        has_single_term = len(self.terms()) == 1
        # A summand may be as large as all logits. So each one is added before the next one is computed.
        total = None
        for bias_term in self.biases:
            bias = bias_term.bias if has_single_term else at_least_fp32(bias_term.bias)
            total = add(total, multiply(bias, bias_term.weight))
        for diagonals_term in self.diagonals:
            values = diagonals_term.values if has_single_term else at_least_fp32(diagonals_term.values)
            weighted_values = multiply(values, diagonals_term.weight)
            total = add(total, toeplitz(weighted_values, src_len))
        for outer in outers:
            total = add(total, at_least_fp32(outer_product(outer.left, outer.right, src_len)))
        for product in products:
            total = add(total, at_least_fp32(inner_product(product.query, product.key)))
        return total


def add(x: Tensor | None, y: Tensor) -> Tensor:
    """Returns the sum of `x` and `y` in fp32 at least. If `x` is None, the sum so far is empty, and `y` is returned."""
    if x is None:
        return y
    return at_least_fp32(x) + at_least_fp32(y)


def add_bias_(products: Tensor, bias: Tensor) -> Tensor:
    """Returns ``products + bias`` in fp32 at least. To save memory, it is written into `products` if possible.

    It is not possible if `products` is in half precision, or has fewer sentences, heads or rows than the sum.

    Args:
        products: A sum of products that nothing else reads, (B or 1, H or 1, T, S).
        bias: (B or 1, H or 1, T or 1, S).
    """
    # The sum is larger if, for example, all sentences share the products (size 1) and each sentence has a bias of its
    # own (size B). The dimensions are sentences, heads and rows. The number of columns is the same in both.
    sum_is_larger = any(bias.size(dim) > products.size(dim) for dim in range(3))
    if sum_is_larger:
        return add(products, bias)
    if products.dtype in (torch.float32, torch.float64):
        return products.add_(bias)
    copy_in_fp32 = at_least_fp32(products)
    return copy_in_fp32.add_(bias)


def multiply(x: Tensor, weight: Tensor | None) -> Tensor:
    """Returns `x` times the weight, in the type of `x`. The weight None stands for 1."""
    if weight is None:
        return x
    return x * in_type(weight, x.dtype)


def apply_scale_and_weight(left: Tensor, right: Tensor, scale: float, weight: Tensor | None) -> Factors:
    """Returns two factors whose product is ``weight * scale`` times the product of `left` and `right`.

    Only one of the two factors is multiplied:

    * With a weight, it is the factor with fewer elements, because that is less work.
    * Without a weight, it is the left factor. In an inner product, this is the query, which has no more rows than the
      key, and a single row in a decoding step.

    Args:
        left, right: The factors, (B, H, T or S, r) each.
        scale: A number.
        weight: A weight for each head, (1, H, 1, 1), or None.
    """
    has_scale = scale != 1.0
    if weight is None:
        return Factors(left * scale, right) if has_scale else Factors(left, right)
    scaled_weight = weight * scale if has_scale else weight
    right_is_smaller = right.numel() < left.numel()
    if right_is_smaller:
        return Factors(left, multiply(right, scaled_weight))
    return Factors(multiply(left, scaled_weight), right)


def multiply_in(term: Product) -> Product:
    """Returns an equal inner product with scale 1 and no weight. Both are multiplied into its query or key."""
    factors = apply_scale_and_weight(term.query, term.key, term.scale, term.weight)
    return Product(query=factors.left, key=factors.right)


def outer_factors(outer: Outer, src_len: int) -> Factors:
    """Returns the left and right factor of an outer product, with the features that `src_len` columns need.

    The columns are the left feature 0 times each right feature, then the left feature 1 times each right feature, and
    so on. For example, with the left features (l0, l1) and the right features (r0, r1, r2), the 8 columns

        l0 r0, l0 r1, l0 r2,    l1 r0, l1 r1, l1 r2,    l0 r0, l0 r1

    need the left features (l0, l1, l0) and all right features. `outer_product` repeats the right features itself.

    Args:
        outer: The outer product. Its weight is multiplied into one of the factors.
        src_len: S, the number of columns.
    """
    left_size = outer.left_size
    right_size = outer.factors.shape[3] - left_size
    all_left, all_right = outer.factors.split([left_size, right_size], dim=3)
    num_needed_left = count_left_features(src_len, right_size)  # 8 / 3, rounded up to 3
    left = take_positions(all_left, dim=3, start=0, count=num_needed_left)
    num_needed_right = min(right_size, src_len)  # A row of 2 columns would need only r0 and r1.
    right = take_positions(all_right, dim=3, start=0, count=num_needed_right)
    # An outer product has no scale.
    return apply_scale_and_weight(left, right, scale=1.0, weight=outer.weight)


def count_left_features(src_len: int, right_size: int) -> int:
    """Returns how many left features of an outer product `src_len` columns need: ``src_len / right_size``, rounded up.

    Each left feature is for `right_size` neighbouring columns, or fewer at the end of the row.
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
    """Returns ``query @ key^T``, (B, H, T, S), as a new tensor.

    If all sentences share the keys, ``torch.matmul`` would copy them for each sentence. This function does not.

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
    """Returns the outer product of each row's left and right factor, (B, H, T, S), as a new tensor.

    Column j is ``left[j // b] * right[j % b]``. For example, the left factor (2, 3) and the right factor (5, 7) give
    the columns 10, 14, 15 and 21.

    Args:
        left: (B, H, T, a), as `outer_factors` returns it.
        right: (B, H, T, b).
        src_len: S, the number of columns, which is at most ``a * b``.
    """
    right_size = right.shape[3]
    num_left_features = count_left_features(src_len, right_size)
    left = take_positions(left, dim=3, start=0, count=num_left_features)
    products = left.unsqueeze(-1) * right.unsqueeze(-2)  # (B, H, T, left features, b)
    return products.flatten(-2)[..., :src_len]


def join_features(factors: list[Tensor], bsz: int | None = None, num_heads: int | None = None) -> Tensor:
    """Returns the features of several tensors side by side, (B, H, T, r1 + r2 + ...).

    Args:
        factors: Tensors (B or 1, H or 1, T, r), where r may differ.
        bsz: The number of sentences of the result. With None, it is the largest number in `factors`.
        num_heads: The number of heads of the result. With None, it is the largest number in `factors`.
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
