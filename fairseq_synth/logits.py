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

from collections.abc import Iterable
from typing import NamedTuple

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


class Outer(NamedTuple):
    """The outer product of two factors of each row, times the weight.

    The first `left_size` features of a row are the left factor, the other b features are the right factor. The logit in
    column ``u b + v`` is ``left[u] right[v]``. Columns beyond ``left_size * b`` begin again with u = v = 0.
    """

    factors: Tensor  # (B, H, T, left_size + b)
    left_size: int
    weight: Tensor | None = None


class Bias(NamedTuple):
    """Logits that are computed already, times the weight."""

    bias: Tensor  # (B, H, T, S)
    weight: Tensor | None = None


class Diagonals(NamedTuple):
    """One value for each distance between row and column, times the weight.

    The value with index ``j - i + T - 1`` belongs to column j of row i, so that the last row begins with the first
    value.
    """

    values: Tensor  # (1, H, 1, T + S - 1)
    weight: Tensor | None = None


Term = Product | Outer | Bias | Diagonals


class NormalForm(NamedTuple):
    """The logits ``S = query @ key^T + left (x) right + bias``; summands that do not occur are None.

    All weights are multiplied in. Sizes are those of the terms; `left` and `right` are (B, H, T, a) and (B, H, T, b).
    """

    query: Tensor | None
    key: Tensor | None
    left: Tensor | None
    right: Tensor | None
    bias: Tensor | None

    def total(self, src_len: int) -> Tensor:
        """Returns S for `src_len` columns, (B or 1, H or 1, T or 1, S).

        A sum is in fp32 at least. A single summand keeps its type, and a single bias may be a view of a parameter.
        """
        scores = None
        if self.query is not None and self.key is not None:
            scores = inner_product(self.query, self.key)
        if self.left is not None and self.right is not None:
            scores = add(scores, outer_product(self.left, self.right, src_len))
        if self.bias is None:
            assert scores is not None, "the logits have no terms"
            return scores
        if scores is None:
            return self.bias
        fits_into_scores = all(self.bias.size(dim) <= scores.size(dim) for dim in range(3))
        if fits_into_scores:
            # Products own their memory, so the bias can be added in place.
            return at_least_fp32(scores).add_(self.bias)
        return add(scores, self.bias)


class Logits:
    """The logits S of one call: the sum of all its terms, sorted by kind."""

    def __init__(self, terms: Iterable[Term] = ()) -> None:
        self.products: list[Product] = []
        self.outers: list[Outer] = []
        self.biases: list[Bias] = []
        self.diagonals: list[Diagonals] = []
        self.add_terms(terms)

    def add_terms(self, terms: Iterable[Term], weight: Tensor | None = None) -> None:
        """Adds terms that have no weight yet, times a weight of each head, (1, H, 1, 1)."""
        for term in terms:
            if weight is not None:
                weighted_term = term._replace(weight=weight)
            else:
                weighted_term = term
            if isinstance(weighted_term, Product):
                self.products.append(weighted_term)
            elif isinstance(weighted_term, Bias):
                self.biases.append(weighted_term)
            elif isinstance(weighted_term, Outer):
                self.outers.append(weighted_term)
            else:
                self.diagonals.append(weighted_term)

    def terms(self) -> list[Term]:
        """Returns all terms."""
        return [*self.products, *self.outers, *self.biases, *self.diagonals]

    def is_shared(self) -> bool:
        """Returns whether all sentences of a batch have the same logits."""
        tensors = [term.query for term in self.products]
        tensors += [term.key for term in self.products]
        tensors += [term.factors for term in self.outers]
        tensors += [term.bias for term in self.biases]
        return all(tensor.size(0) == 1 for tensor in tensors)

    def normal_form(self, src_len: int) -> NormalForm:
        """Returns the sum of at most one inner product, one outer product and one bias, with the weights multiplied in.

        A bias that is added to other terms is in fp32 at least.
        """
        bias = self._sum_of_biases(src_len)

        left = None
        right = None
        for outer in self.outers:
            factors = outer_factors(outer, src_len)
            if left is None:
                left = factors.left
                right = factors.right
            else:
                bias = add(bias, outer_product(factors.left, factors.right, src_len))

        queries: list[Tensor] = []
        keys: list[Tensor] = []
        for product in self.products:
            query, key = weighted_factors(product)
            is_single_row = query.size(2) == 1
            if queries and is_single_row:
                # A decoding step. Joining the features would copy all cached keys for one row of logits.
                bias = add(bias, at_least_fp32(inner_product(query, key)))
            else:
                queries.append(query)
                keys.append(key)
        if not queries:
            return NormalForm(None, None, left, right, bias)
        return NormalForm(join_features(queries), join_features(keys), left, right, bias)

    def total(self, src_len: int) -> Tensor:
        """Returns S for `src_len` columns; see `NormalForm.total`."""
        return self.normal_form(src_len).total(src_len)

    def _sum_of_biases(self, src_len: int) -> Tensor | None:
        """Returns the sum of all biases and diagonals, (B or 1, H or 1, T or 1, S), or None if there are none."""
        num_terms = len(self.products) + len(self.outers) + len(self.biases) + len(self.diagonals)
        is_sum = num_terms > 1
        total = None
        for bias in self.biases:
            matrix = at_least_fp32(bias.bias) if is_sum else bias.bias
            total = add(total, multiply(matrix, bias.weight))
        for diagonals in self.diagonals:
            values = at_least_fp32(diagonals.values) if is_sum else diagonals.values
            total = add(total, toeplitz(multiply(values, diagonals.weight), src_len))
        return total


def add(x: Tensor | None, y: Tensor) -> Tensor:
    """Returns ``x + y`` in fp32 at least; if there is no x yet, returns y as it is."""
    if x is None:
        return y
    return at_least_fp32(x) + at_least_fp32(y)


def multiply(x: Tensor, weight: Tensor | None) -> Tensor:
    """Returns `x` times the weight, in the type of `x`."""
    if weight is None:
        return x
    return x * in_type(weight, x.dtype)


class Factors(NamedTuple):
    """The two factors of a product."""

    left: Tensor
    right: Tensor


def weighted_factors(product: Product) -> Factors:
    """Returns query and key of a product, with its weight and scale multiplied into the smaller one."""
    return weight_smaller_factor(product.query, product.key, product.scale, product.weight)


def weight_smaller_factor(left: Tensor, right: Tensor, scale: float, weight: Tensor | None) -> Factors:
    """Returns two factors, the smaller one multiplied by weight and scale; without a weight, the left one."""
    if weight is None:
        if scale == 1.0:
            return Factors(left, right)
        return Factors(left * scale, right)
    factor = weight if scale == 1.0 else weight * scale
    if right.numel() < left.numel():
        return Factors(left, multiply(right, factor))
    return Factors(multiply(left, factor), right)


def outer_factors(outer: Outer, src_len: int) -> Factors:
    """Returns the weighted left and right factor of an outer product, as far as `src_len` columns need them."""
    right_size = outer.factors.size(3) - outer.left_size
    left, right = outer.factors.split([outer.left_size, right_size], dim=3)
    # Each left feature stands for `right_size` columns. Beyond all columns the left factor begins again.
    num_groups = (src_len + right_size - 1) // right_size
    left = take_positions(left, dim=3, start=0, count=num_groups)
    right = take_positions(right, dim=3, start=0, count=min(right_size, src_len))
    return weight_smaller_factor(left, right, scale=1.0, weight=outer.weight)


def toeplitz(values: Tensor, src_len: int) -> Tensor:
    """Returns the matrix (1, H, T, S) of the values (1, H, 1, T + S - 1) of `Diagonals`."""
    # Windows of S neighbouring values are the rows, the last row first: each row is the one below it, moved by one.
    rows = values.squeeze(2).unfold(2, src_len, 1)
    if rows.size(2) == 1:
        return rows
    return rows.flip(2)


def inner_product(query: Tensor, key: Tensor) -> Tensor:
    """Returns ``query @ key^T``. Keys that all sentences share are not copied for each sentence."""
    are_keys_shared = key.size(0) < query.size(0)
    if not are_keys_shared:
        return torch.matmul(query, key.transpose(-2, -1))
    if key.size(1) == 1:
        return torch.matmul(query, key[0, 0].t())
    return torch.einsum("bhtr,hsr->bhts", query, key[0])


def outer_product(left: Tensor, right: Tensor, src_len: int) -> Tensor:
    """Returns ``left[u] right[v]`` in column ``u b + v`` of each row, for the first `src_len` columns."""
    right_size = right.size(3)
    num_groups = (src_len + right_size - 1) // right_size
    left = take_positions(left, dim=3, start=0, count=num_groups)
    products = left.unsqueeze(-1) * right.unsqueeze(-2)
    return products.flatten(-2)[..., :src_len]


def join_features(factors: list[Tensor], bsz: int = 1, num_heads: int = 1) -> Tensor:
    """Returns factors (B or 1, H or 1, T, r) side by side on their features.

    All of them are expanded to `bsz` sentences and `num_heads` heads, or to as many as any of the factors has.
    """
    for factor in factors:
        if bsz == 1:
            bsz = factor.size(0)
        if num_heads == 1:
            num_heads = factor.size(1)
    expanded = [expand_batch(factor, bsz, num_heads) for factor in factors]
    if len(expanded) == 1:
        return expanded[0]
    return torch.cat(expanded, dim=-1)


def expand_batch(x: Tensor, bsz: int, num_heads: int) -> Tensor:
    """Returns x (B or 1, H or 1, T, r) as a view of `bsz` sentences and `num_heads` heads."""
    if x.size(0) == bsz and x.size(1) == num_heads:
        return x
    return x.expand(bsz, num_heads, -1, -1)
