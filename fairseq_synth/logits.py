"""The logits S of an attention, kept as the sum that they are: `Logits`."""

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from .masks import at_least_fp32


class Logits:
    """S as a sum of inner products, outer products and biases. ``+`` puts the summands of two sums together.

    A first dimension of 1 means that a summand is shared across the batch, as it does not depend on the input; a
    second dimension of 1 that all heads share it. The weights of a mixture are in the smallest factor of each summand.

    Attributes:
        products: queries (B or 1, H or 1, T, r) and keys (B or 1, H or 1, S, r), for ``query @ key^T``.
        outers: left (B or 1, H or 1, T, a) and right (B or 1, H or 1, T, b), a b >= S: column u b + v of a row is
            ``left_u right_v``.
        biases: a weight (1, H, 1, 1), or None for 1, and what it multiplies, (B or 1, H or 1, T or 1, S). Tiles of R
            are weighted where they are read, as R may be larger than everything else.
    """

    def __init__(
        self,
        products: List[Tuple[Tensor, Tensor]],
        outers: List[Tuple[Tensor, Tensor]],
        biases: List[Tuple[Optional[Tensor], Tensor]],
    ) -> None:
        self.products = products
        self.outers = outers
        self.biases = biases

    def __add__(self, other: "Logits") -> "Logits":
        return Logits(self.products + other.products, self.outers + other.outers, self.biases + other.biases)

    def tensors(self) -> List[Tensor]:
        """All tensors of the sum: of each product query and key, of each outer product left and right, of each bias."""
        found: List[Tensor] = []
        for first, second in self.products + self.outers:
            found.append(first)
            found.append(second)
        for weight, bias in self.biases:
            if weight is not None:
                found.append(weight)
            found.append(bias)
        return found

    def is_shared(self) -> bool:
        """Whether all sentences of a batch have the same logits."""
        for x in self.tensors():
            if x.size(0) > 1:
                return False
        return True

    def joined(self) -> "Logits":
        """The same sum with one inner product: the queries are concatenated on features, and so are the keys."""
        if len(self.products) < 2:
            return self
        queries: List[Tensor] = []
        keys: List[Tensor] = []
        for query, key in self.products:
            queries.append(query)
            keys.append(key)
        return Logits([(concatenate(queries), concatenate(keys))], self.outers, self.biases)

    def total(self, src_len: int) -> Tensor:
        """The sum, over `src_len` columns.

        Returns:
            (B or 1, H or 1, T or 1, S); B only if a summand depends on the input, 1 row only if no row differs. In fp32
            at least; a single summand keeps its type, which saves a kernel, and may be a view of a parameter.
        """
        products = self.products
        if len(products) > 1 and products[0][0].size(2) > 1:
            products = self.joined().products  # not for a single row, as in decoding: it would copy all keys
        is_sum = len(products) + len(self.outers) + len(self.biases) > 1
        total: Optional[Tensor] = None
        for query, key in products:
            product = summand(inner_product(query, key), is_sum)
            total = product if total is None else total + product
        for left, right in self.outers:
            product = summand(outer_product(left, right)[..., :src_len], is_sum)
            total = product if total is None else total + product
        biases: Optional[Tensor] = None
        for weight, bias in self.biases:
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


def product_of(query: Tensor, key: Tensor) -> Logits:
    """``query @ key^T``; shapes as of `Logits.products`."""
    return Logits([(query, key)], [], [])


def outer_product_of(left: Tensor, right: Tensor) -> Logits:
    """Outer products of the rows; shapes as of `Logits.outers`."""
    return Logits([], [(left, right)], [])


def bias_of(bias: Tensor, weight: Optional[Tensor] = None) -> Logits:
    """Logits that are at hand, (B or 1, H or 1, T or 1, S), times a weight of each head, (H, 1, 1), or None for 1."""
    return Logits([], [], [(None if weight is None else weight[None], bias)])


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
    sizes = list(factors[0].size())
    for x in factors:
        sizes = [n if m == 1 else m for m, n in zip(sizes, x.size())]
    return torch.cat([x.expand(sizes[0], sizes[1], sizes[2], -1) for x in factors], dim=-1)
