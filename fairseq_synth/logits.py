"""The logits S of an attention for a call, kept as the sum that they are: `Logits`."""

from typing import NamedTuple

from torch import Tensor

from .linear import concatenated, inner_product, outer_factors, outer_product, plus, smaller_times, times, toeplitz
from .masks import at_least_fp32


class Product(NamedTuple):
    """``weight scale query @ key^T``. The scale is a number, which torch's fused attention takes as it is."""

    query: Tensor  # (B, H, T, r)
    key: Tensor  # (B, H, S, r)
    scale: float
    weight: Tensor | None


class Outer(NamedTuple):
    """The outer product of the first `a` features of a row with its b others: column ``u b + v`` is ``weight factors_u
    factors_(a + v)``; beyond ``a b`` columns they begin again."""

    factors: Tensor  # (B, H, T, a + b)
    a: int
    weight: Tensor | None


class Bias(NamedTuple):
    """Logits that are computed already, times the weight."""

    bias: Tensor  # (B, H, T, S)
    weight: Tensor | None


class Diagonals(NamedTuple):
    """Values by distance, times the weight: column j of row i has value number ``j - i + T - 1``."""

    values: Tensor  # (1, H, 1, T + S - 1)
    weight: Tensor | None


class Logits:
    """S for the T rows and S columns of a call: a sum of terms of four kinds. ``+`` puts two sums together.

    The first dimension of a tensor is 1, not B, if it does not depend on the input, the second is 1, not H, if all
    heads share it, and a bias has one row if all are alike. A weight is (1, H, 1, 1), or None for 1. It stays apart, as
    what is smallest to multiply by it differs from one computation to another.
    """

    def __init__(
        self, products: list[Product], outers: list[Outer], biases: list[Bias], diagonals: list[Diagonals]
    ) -> None:
        self.products, self.outers, self.biases, self.diagonals = products, outers, biases, diagonals

    def __add__(self, other: "Logits") -> "Logits":
        biases, diagonals = self.biases + other.biases, self.diagonals + other.diagonals
        return Logits(self.products + other.products, self.outers + other.outers, biases, diagonals)

    def number_of_terms(self) -> int:
        return len(self.products) + len(self.outers) + len(self.biases) + len(self.diagonals)

    def times(self, weight: Tensor) -> "Logits":
        """A sum without weights, times a weight of each head, (1, H, 1, 1)."""
        products = [Product(query, key, scale, weight) for query, key, scale, _ in self.products]
        outers, biases = [Outer(x, a, weight) for x, a, _ in self.outers], [Bias(x, weight) for x, _ in self.biases]
        return Logits(products, outers, biases, [Diagonals(x, weight) for x, _ in self.diagonals])

    def is_shared(self) -> bool:
        """Whether all sentences of a batch have the same logits."""
        sizes = [max(x.query.size(0), x.key.size(0)) for x in self.products]
        return max([1] + sizes + [x.size(0) for x, _, _ in self.outers] + [x.size(0) for x, _ in self.biases]) == 1

    def normal(self, src_len: int, is_sum: bool = False) -> "Normal":
        """The same sum of at most one product, one outer product and one bias, with weights multiplied in; the bias in
        fp32 at least where there are other terms, or `is_sum` says so."""
        is_sum = is_sum or self.number_of_terms() > 1
        bias: Tensor | None = None
        for x, weight in self.biases:
            bias = plus(bias, times(at_least_fp32(x) if is_sum else x, weight))
        for values, weight in self.diagonals:
            bias = plus(bias, toeplitz(times(at_least_fp32(values) if is_sum else values, weight), src_len))
        left: Tensor | None = None
        right: Tensor | None = None
        for factors, a, weight in self.outers:
            first, second = smaller_times(outer_factors(factors, a, src_len), 1.0, weight)
            if left is None:
                left, right = first, second
            else:
                bias = plus(bias, outer_product(first, second, src_len))
        queries: list[Tensor] = []
        keys: list[Tensor] = []
        for query, key, scale, weight in self.products:
            query, key = smaller_times((query, key), scale, weight)
            if len(queries) > 0 and query.size(2) == 1:  # as in decoding: to join them would copy all keys
                bias = plus(bias, at_least_fp32(inner_product(query, key)))
            else:
                queries.append(query)
                keys.append(key)
        if len(queries) == 0:
            return Normal(None, None, left, right, bias)
        return Normal(concatenated(queries), concatenated(keys), left, right, bias)

    def total(self, src_len: int) -> Tensor:
        return total(self.normal(src_len, False), src_len)


class Normal(NamedTuple):
    """``S = query @ key^T + left (x) right + bias``, sizes as in `Logits`; None for what there is not."""

    query: Tensor | None
    key: Tensor | None
    left: Tensor | None
    right: Tensor | None
    bias: Tensor | None


def total(x: Normal, src_len: int) -> Tensor:
    """S in its first `src_len` columns, (B or 1, H or 1, T or 1, S); B only if a summand depends on the input, one row
    only if no row differs. In fp32 at least; a single summand keeps its type, and may be a view of a parameter."""
    query, key, left, right, bias = x
    found: Tensor | None = None
    if query is not None and key is not None:
        found = inner_product(query, key)
    if left is not None and right is not None:
        found = plus(found, outer_product(left, right, src_len))
    if found is None:
        assert bias is not None
        return bias
    if bias is not None and all([bias.size(i) <= found.size(i) for i in range(3)]):
        return at_least_fp32(found).add_(bias)  # a product has memory of its own
    return found if bias is None else plus(found, bias)


def product_of(query: Tensor, key: Tensor, scale: float = 1.0) -> Logits:
    """``scale query @ key^T``; see `Product`."""
    return Logits([Product(query, key, scale, None)], [], [], [])


def outer_product_of(factors: Tensor, a: int) -> Logits:
    """The outer product of the first `a` features of each row with the others; see `Outer`."""
    return Logits([], [Outer(factors, a, None)], [], [])


def bias_of(bias: Tensor) -> Logits:
    """Logits that are computed already; see `Bias`."""
    return Logits([], [], [Bias(bias, None)], [])


def diagonals_of(values: Tensor) -> Logits:
    """Values by distance; see `Diagonals`."""
    return Logits([], [], [], [Diagonals(values, None)])
