"""The logits S of an attention, kept as the sum that they are: `Logits`."""

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from .masks import at_least_fp32
from .parameters import positions


class Logits:
    """S as functions return it. A factor of 3 dimensions is a parameter, whole, (H, l, r): row p is position p's.

    One of 4 dimensions is of this call: (B or 1, H or 1, T, r). The first number of a summand is the row of its weight
    in `weights`, (M, H); -1 for 1.
    """

    def __init__(
        self,
        products: List[Tuple[int, float, Tensor, Tensor]],
        outers: List[Tuple[int, Tensor, int]],
        biases: List[Tuple[int, Tensor]],
        diagonals: List[Tuple[int, Tensor]],
        weights: Optional[Tensor] = None,
    ) -> None:
        self.products = products
        self.outers = outers
        self.biases = biases
        self.diagonals = diagonals
        self.weights = weights

    def __add__(self, other: "Logits") -> "Logits":
        weights = self.weights if other.weights is None else other.weights
        products, outers = self.products + other.products, self.outers + other.outers
        return Logits(products, outers, self.biases + other.biases, self.diagonals + other.diagonals, weights)

    def weighted_by(self, row: int, weights: Optional[Tensor]) -> "Logits":
        """The same summands, each times a row of `weights`."""
        if weights is None:
            return self
        return Logits(
            [(row, scale, query, key) for _, scale, query, key in self.products],
            [(row, pair, a) for _, pair, a in self.outers],
            [(row, bias) for _, bias in self.biases],
            [(row, values) for _, values in self.diagonals],
            weights,
        )

    def read(self, start: int, length: int, src_len: int) -> "Summands":
        """Rows `start` ... of `length` positions, and `src_len` columns, of every summand."""
        weights: List[Tensor] = []
        given = self.weights
        if given is not None:
            for weight in given[:, None, :, None, None].unbind():
                weights.append(weight)
        found = Summands([], [], [], [])
        for row, scale, query, key in self.products:
            pair = (read_rows(query, start, length), read_rows(key, 0, src_len))
            found.products.append((None if row < 0 else weights[row], scale, pair[0], pair[1]))
        for row, factors, a in self.outers:
            left, right = factors.split([a, factors.size(3) - a], dim=3)
            n = right.size(3)
            left, right = positions(left, 3, 0, (src_len + n - 1) // n), right.narrow(3, 0, min(n, src_len))
            found.outers.append((None if row < 0 else weights[row], left, right))
        for row, bias in self.biases:
            if bias.dim() == 3:
                bias = positions(read_rows(bias, start, length), 3, 0, src_len)
            found.biases.append((None if row < 0 else weights[row], bias))
        for row, values in self.diagonals:
            found.diagonals.append((None if row < 0 else weights[row], values[None, :, None], start, length))
        return found


def read_rows(x: Tensor, start: int, count: int) -> Tensor:
    """The rows of positions, (1, H, count, r), of a whole parameter; one row stays one."""
    if x.dim() == 4:
        return x
    return (x if x.size(1) == 1 else positions(x, 1, start, count))[None]


class Summands:
    """S as a sum of inner products, outer products, biases and diagonals. ``+`` puts the summands of two sums together.

    Each summand is a weight and its factors. A weight is (1, H, 1, 1), or None for 1. A factor's first dimension of 1
    means that it is shared across the batch, as it does not depend on the input; a second dimension of 1 that all heads
    share it. Weights are multiplied where a computation reads the factors, into the smaller one: a product made
    beforehand would be kept for the backward pass, and R may be larger than everything else.

    Attributes:
        products: a weight, a scale, queries (B or 1, H or 1, T, r) and keys (B or 1, H or 1, S, r), for
            ``scale query @ key^T``. The scale is a number, which torch's fused attention takes as it is.
        outers: left (B or 1, H or 1, T, a) and right (B or 1, H or 1, T, b), a b >= S: column u b + v of a row is
            ``left_u right_v``.
        biases: logits that are computed already, (B or 1, H or 1, T or 1, S).
        diagonals: values (1, H, 1, 2 m + 1) of the distances -m to m, the position of the first row, and T: column j of
            row i has the value of ``min(max(j - i, -m), m)``. `with_matrices` makes biases of them.
    """

    def __init__(
        self,
        products: List[Tuple[Optional[Tensor], float, Tensor, Tensor]],
        outers: List[Tuple[Optional[Tensor], Tensor, Tensor]],
        biases: List[Tuple[Optional[Tensor], Tensor]],
        diagonals: List[Tuple[Optional[Tensor], Tensor, int, int]],
    ) -> None:
        self.products = products
        self.outers = outers
        self.biases = biases
        self.diagonals = diagonals

    def __add__(self, other: "Summands") -> "Summands":
        products, outers = self.products + other.products, self.outers + other.outers
        return Summands(products, outers, self.biases + other.biases, self.diagonals + other.diagonals)

    def tensors(self) -> List[Tensor]:
        """All tensors of the sum: of each summand the weight, if there is one, and the factors."""
        found: List[Tensor] = []
        for weight, _, query, key in self.products:
            if weight is not None:
                found.append(weight)
            found.append(query)
            found.append(key)
        for weight, left, right in self.outers:
            if weight is not None:
                found.append(weight)
            found.append(left)
            found.append(right)
        for weight, bias in self.biases:
            if weight is not None:
                found.append(weight)
            found.append(bias)
        for weight, values, _, _ in self.diagonals:
            if weight is not None:
                found.append(weight)
            found.append(values)
        return found

    def is_shared(self) -> bool:
        """Whether all sentences of a batch have the same logits."""
        for x in self.tensors():
            if x.size(0) > 1:
                return False
        return True

    def with_matrices(self, src_len: int) -> "Summands":
        """The same sum with a bias of `src_len` columns in the place of each of the diagonals."""
        biases = list(self.biases)
        for weight, values, start, length in self.diagonals:
            biases.append((weight, toeplitz(values, start, length, src_len)))
        return Summands(self.products, self.outers, biases, [])

    def joined(self) -> "Summands":
        """The same sum with one inner product, without a weight: that of the queries, and of the keys, of `weighted`
        factors, concatenated on their features."""
        queries: List[Tensor] = []
        keys: List[Tensor] = []
        products: List[Tuple[Optional[Tensor], float, Tensor, Tensor]] = []
        for weight, scale, query, key in self.products:
            query, key = weighted(weight, query, key, scale)
            queries.append(query)
            keys.append(key)
        if len(queries) > 0:
            products.append((None, 1.0, concatenate(queries), concatenate(keys)))
        return Summands(products, self.outers, self.biases, self.diagonals)

    def total(self, src_len: int) -> Tensor:
        """The sum, over `src_len` columns.

        Returns:
            (B or 1, H or 1, T or 1, S); B only if a summand depends on the input, 1 row only if no row differs. In fp32
            at least; a single summand keeps its type, which saves a kernel, and may be a view of a parameter.
        """
        products, of_biases = self.products, self.with_matrices(src_len).biases
        if len(products) > 1 and products[0][2].size(2) > 1:
            products = self.joined().products  # not for a single row, as in decoding: it would copy all keys
        is_sum = len(products) + len(self.outers) + len(of_biases) > 1
        total: Optional[Tensor] = None
        for weight, scale, query, key in products:
            query, key = weighted(weight, query, key, scale)
            product = summand(inner_product(query, key), is_sum)
            total = product if total is None else total + product
        for weight, left, right in self.outers:
            left, right = weighted(weight, left, right)
            product = summand(outer_product(left, right)[..., :src_len], is_sum)
            total = product if total is None else total + product
        biases: Optional[Tensor] = None
        for weight, bias in of_biases:
            bias = summand(bias, is_sum)
            if weight is not None:
                bias = bias * weight.to(bias.dtype)
            biases = bias if biases is None else biases + bias
        if total is None or biases is None:
            total = biases if total is None else total
            assert total is not None
            return total
        if all([biases.size(i) <= total.size(i) for i in range(3)]):
            return total.add_(biases)  # a product has memory of its own
        return total + biases


def product_of(query: Tensor, key: Tensor, scale: float = 1.0) -> Logits:
    """``scale query @ key^T``; factors as in `Logits`."""
    return Logits([(-1, scale, query, key)], [], [], [])


def outer_product_of(factors: Tensor, a: int) -> Logits:
    """Outer products of the first `a` features of each row and the others: column u b + v is ``left_u right_v``."""
    return Logits([], [(-1, factors, a)], [], [])


def bias_of(bias: Tensor) -> Logits:
    """Logits that are computed already: (H, l or 1, l), whole, or (B or 1, H or 1, T or 1, S)."""
    return Logits([], [], [(-1, bias)], [])


def diagonals_of(values: Tensor) -> Logits:
    """Values by distance, (H, 2 m + 1)."""
    return Logits([], [], [], [(-1, values)])


def toeplitz(values: Tensor, start: int, length: int, src_len: int) -> Tensor:
    """The matrix (1, H, T, S) of a summand of `Logits.diagonals`."""
    # all j - i, from that of the last row and first column to that of the first row and last column
    m = (values.size(3) - 1) // 2
    first, last = -(start + length - 1), src_len - 1 - start
    lowest, highest = max(first, -m), min(last, m)
    found = values.narrow(3, m + lowest, highest - lowest + 1)
    if first < lowest or highest < last:
        before = values[..., :1].expand(-1, -1, -1, lowest - first)
        found = torch.cat([before, found, values[..., -1:].expand(-1, -1, -1, last - highest)], dim=3)
    rows = found.squeeze(2).unfold(2, src_len, 1)  # the last row comes first: each is the one before it, moved by one
    return rows.flip(2) if length > 1 else rows


def weighted(weight: Optional[Tensor], first: Tensor, second: Tensor, scale: float = 1.0) -> Tuple[Tensor, Tensor]:
    """The factors of a product, one of them times the weight and the scale, in its own type: the smaller, or without a
    weight the first."""
    if weight is None:
        return first if scale == 1.0 else first * scale, second
    if scale != 1.0:
        weight = weight * scale
    if second.numel() < first.numel():
        return first, second * weight.to(second.dtype)
    return first * weight.to(first.dtype), second


def summand(x: Tensor, is_sum: bool) -> Tensor:
    """x, in fp32 at least where others are added to it."""
    return at_least_fp32(x) if is_sum else x


def inner_product(query: Tensor, key: Tensor) -> Tensor:
    """``query @ key^T``, without a copy of shared keys for each sentence."""
    if key.size(0) >= query.size(0):
        return torch.matmul(query, key.transpose(-2, -1))
    if key.size(1) == 1:
        return torch.matmul(query, key[0, 0].t())
    return torch.einsum("bhtr,hsr->bhts", query, key[0])


def outer_product(left: Tensor, right: Tensor) -> Tensor:
    """``left_u right_v`` for each row, column ``u b + v``: (..., a) and (..., b) -> (..., a b)."""
    return (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)


def concatenate(factors: List[Tensor]) -> Tensor:
    """Factors (B or 1, H or 1, T, r) concatenated on their features, r."""
    if len(factors) == 1:
        return factors[0]
    sizes = list(factors[0].size())
    for x in factors:
        sizes = [n if m == 1 else m for m, n in zip(sizes, x.size())]
    return torch.cat([x.expand(sizes[0], sizes[1], sizes[2], -1) for x in factors], dim=-1)
