"""The logits S of an attention, kept as the sum that they are: `Logits`."""

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from .masks import at_least_fp32, in_type

# its kind and tensors, the row of its weight (-1: a weight of 1), and two numbers that some kinds have: scale and a.
# No NamedTuple, which takes Python five times as long to make, as every call of a layer does
Term = Tuple[str, List[Tensor], int, float, int]


class Logits:
    """S as a sum of terms. ``+`` puts two sums together. There are four kinds of terms:

    =============  ====================================================================================================
    ``product``    queries and keys, for ``scale query @ key^T``. The scale is a number, which torch's fused attention
                   takes as it is
    ``outer``      factors (B, H, T, a + b): column ``u b + v`` of a row is ``factors_u factors_(a + v)``. `read` makes
                   two tensors of them
    ``bias``       logits that are computed already: (H or 1, l or 1, l), or (B or 1, H or 1, T or 1, S)
    ``diagonals``  values (H, 2 m + 1) of the distances -m to m: column j of row i has the value of
                   ``min(max(j - i, -m), m)``. `read` makes a bias of them
    =============  ====================================================================================================

    A factor of 3 dimensions is a parameter, whole, (H or 1, l, r): row p is that of position p. One of 4 dimensions is
    of this call, (B or 1, H or 1, T, r); its first dimension is 1 if it does not depend on the input, its second if all
    heads share it. `read` takes a call's rows of the former, and returns logits with factors of the latter kind alone;
    what is computed of logits is computed of those.

    Weights are multiplied where a computation reads the factors, into the smaller one: a product made beforehand would
    be kept for the backward pass, and R may be larger than everything else.

    Attributes:
        terms: the summands; see `Term`.
        weights: empty, or the weights of all rows, [(M, H)]; once read, those of each row, M of (1, H, 1, 1).
    """

    def __init__(self, terms: List[Term], weights: List[Tensor]) -> None:
        self.terms = terms
        self.weights = weights

    def __add__(self, other: "Logits") -> "Logits":
        return Logits(self.terms + other.terms, self.weights)

    def add_weighted(self, other: "Logits", row: int) -> None:
        """Adds summands without weights, times a row of this sum's weights."""
        for kind, tensors, _, scale, a in other.terms:
            self.terms.append((kind, tensors, row, scale, a))

    def read(self, start: int, length: int, src_len: int) -> "Logits":
        """`length` rows, of positions from `start` on, and `src_len` columns of every summand."""
        found = Logits([], [])
        for weights in self.weights:
            found.weights.extend(weights.view(weights.size(0), 1, -1, 1, 1).unbind())
        for kind, tensors, row, scale, a in self.terms:
            if kind == "product":
                tensors = [read_rows(tensors[0], start, length), read_rows(tensors[1], 0, src_len)]
            elif kind == "outer":
                tensors = outer_factors(tensors[0], a, src_len)
            elif kind == "diagonals":
                kind, tensors = "bias", [toeplitz(tensors[0][None, :, None], start, length, src_len)]
            elif kind == "bias" and tensors[0].dim() == 3:
                tensors = [read_window(tensors[0], start, length, src_len)]
            found.terms.append((kind, tensors, row, scale, a))
        return found

    def tensors(self) -> List[Tensor]:
        """The weights, and then the tensors of each term."""
        found = list(self.weights)
        for _, tensors, _, _, _ in self.terms:
            found.extend(tensors)
        return found

    def with_tensors(self, tensors: List[Tensor]) -> "Logits":
        """The same summands of other tensors, in the order of `tensors`."""
        n = len(self.weights)
        found = Logits([], tensors[:n])
        for kind, own, row, scale, a in self.terms:
            found.terms.append((kind, tensors[n : n + len(own)], row, scale, a))
            n += len(own)
        return found

    def is_shared(self) -> bool:
        """Whether all sentences of a batch have the same logits, which are read."""
        for _, tensors, _, _, _ in self.terms:
            for x in tensors:
                if x.size(0) > 1:
                    return False
        return True

    def of(self, kind: str) -> List[Term]:
        """The terms of a kind."""
        found: List[Term] = []
        for term in self.terms:
            if term[0] == kind:
                found.append(term)
        return found

    def joined(self) -> "Logits":
        """The same sum with one inner product, without a weight, as its first term: that of the queries, and of the
        keys, of weighted factors, concatenated on their features."""
        queries: List[Tensor] = []
        keys: List[Tensor] = []
        others: List[Term] = []
        for kind, tensors, row, scale, a in self.terms:
            if kind == "product":
                query, key = self.weighted(row, tensors[0], tensors[1], scale)
                queries.append(query)
                keys.append(key)
            else:
                others.append((kind, tensors, row, scale, a))
        if len(queries) == 0:
            return self
        return Logits([("product", [concatenate(queries), concatenate(keys)], -1, 1.0, 0)] + others, self.weights)

    def weighted(self, row: int, first: Tensor, second: Tensor, scale: float) -> Tuple[Tensor, Tensor]:
        """The factors of a product, one of them times the weight and the scale, in its own type: the smaller, or
        without a weight the first."""
        if row < 0:
            return first if scale == 1.0 else first * scale, second
        weight = self.weights[row]
        if scale != 1.0:
            weight = weight * scale
        if second.numel() < first.numel():
            return first, second * in_type(weight, second.dtype)
        return first * in_type(weight, first.dtype), second

    def total(self, src_len: int) -> Tensor:
        """The sum, over `src_len` columns, of logits that are read.

        Returns:
            (B or 1, H or 1, T or 1, S); B only if a summand depends on the input, 1 row only if no row differs. In fp32
            at least; a single summand keeps its type, which saves a kernel, and may be a view of a parameter.
        """
        terms, products = self.terms, self.of("product")
        if len(products) > 1 and products[0][1][0].size(2) > 1:
            terms = self.joined().terms  # not for a single row, as in decoding: it would copy all keys
        total: Optional[Tensor] = None
        biases: Optional[Tensor] = None
        is_sum = len(terms) > 1
        for kind, tensors, row, scale, _ in terms:
            if kind == "bias":
                bias = at_least_fp32(tensors[0]) if is_sum else tensors[0]
                bias = bias if row < 0 else bias * in_type(self.weights[row], bias.dtype)
                biases = bias if biases is None else biases + bias
                continue
            if kind == "product":
                query, key = self.weighted(row, tensors[0], tensors[1], scale)
                product = inner_product(query, key)
            else:
                left, right = tensors
                left = positions(left, 3, 0, (src_len + right.size(3) - 1) // right.size(3))
                left, right = self.weighted(row, left, right, 1.0)
                product = outer_product(left, right)[..., :src_len]
            product = at_least_fp32(product) if is_sum else product
            total = product if total is None else total + product
        if total is None or biases is None:
            total = biases if total is None else total
            assert total is not None
            return total
        if all([biases.size(i) <= total.size(i) for i in range(3)]):
            return total.add_(biases)  # a product has memory of its own
        return total + biases


def product_of(query: Tensor, key: Tensor, scale: float = 1.0) -> Logits:
    """``scale query @ key^T``; factors as in `Logits`."""
    return Logits([("product", [query, key], -1, scale, 0)], [])


def outer_product_of(factors: Tensor, a: int) -> Logits:
    """The outer product of the first `a` features of each row with the others; see `Logits`."""
    return Logits([("outer", [factors], -1, 1.0, a)], [])


def bias_of(bias: Tensor) -> Logits:
    """Logits that are computed already; see `Logits`."""
    return Logits([("bias", [bias], -1, 1.0, 0)], [])


def diagonals_of(values: Tensor) -> Logits:
    """Values by distance, (H, 2 m + 1); see `Logits`."""
    return Logits([("diagonals", [values], -1, 1.0, 0)], [])


def positions(x: Tensor, dim: int, start: int, count: int) -> Tensor:
    """The entries along a dimension of l for positions ``start .. start + count - 1``: position p has entry p mod l.

    This is the paper's way to sentences beyond l, "tile to the maximum sequence length". Within l it is a view.
    """
    length = x.size(dim)
    if start == 0 and count == length:
        return x  # the gradient of a slice is a copy
    start = start % length
    if start + count <= length:
        return x.narrow(dim, start, count)
    pieces: List[Tensor] = []
    while count > 0:
        piece = x.narrow(dim, start, min(count, length - start))
        pieces.append(piece)
        count -= piece.size(dim)
        start = 0
    return torch.cat(pieces, dim=dim)


def read_rows(x: Tensor, start: int, count: int) -> Tensor:
    """The rows (1, H, count, r) of positions in a whole parameter, of which one row is that of all positions."""
    if x.dim() == 4:
        return x
    return (x if x.size(1) == 1 else positions(x, 1, start, count))[None]


def read_window(x: Tensor, start: int, count: int, columns: int) -> Tensor:
    """Rows and columns (1, H or 1, count or 1, columns) of positions in a whole parameter."""
    heads, length, width = x.size()
    if 1 < length and start + count <= length and columns <= width and (count < length or columns < width):
        # one view, with one copy for its gradient; two slices have two
        head, row, column = x.stride()
        return x.as_strided([1, heads, count, columns], [0, head, row, column], x.storage_offset() + start * row)
    return positions(read_rows(x, start, count), 3, 0, columns)


def toeplitz(values: Tensor, start: int, length: int, src_len: int) -> Tensor:
    """The matrix (1, H, T, S) of values by distance (1, H, 1, 2 m + 1); its rows are positions from `start` on."""
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


def inner_product(query: Tensor, key: Tensor) -> Tensor:
    """``query @ key^T``, without a copy of shared keys for each sentence."""
    if key.size(0) >= query.size(0):
        return torch.matmul(query, key.transpose(-2, -1))
    if key.size(1) == 1:
        return torch.matmul(query, key[0, 0].t())
    return torch.einsum("bhtr,hsr->bhts", query, key[0])


def outer_factors(factors: Tensor, a: int, src_len: int) -> List[Tensor]:
    """Both factors of `src_len` columns of an outer product: the first begins again beyond l."""
    b = factors.size(3) - a
    left, right = factors.split([a, b], dim=3)
    return [positions(left, 3, 0, (src_len + b - 1) // b), positions(right, 3, 0, min(b, src_len))]


def outer_product(left: Tensor, right: Tensor) -> Tensor:
    """``left_u right_v`` for each row, column ``u b + v``: (..., a) and (..., b) -> (..., a b)."""
    return (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)


def concatenate(factors: List[Tensor], bsz: int = 1, heads: int = 1) -> Tensor:
    """Factors (B or 1, H or 1, T, r) concatenated on their features, r, for every sentence and head of theirs, or of
    so many."""
    for x in factors:
        bsz = x.size(0) if bsz == 1 else bsz
        heads = x.size(1) if heads == 1 else heads
    of_all = [x if x.size(0) == bsz and x.size(1) == heads else x.expand(bsz, heads, -1, -1) for x in factors]
    return of_all[0] if len(of_all) == 1 else torch.cat(of_all, dim=-1)
