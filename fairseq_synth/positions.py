"""What a call reads of a parameter whose rows or columns are positions of a sentence."""

from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """What S may depend on. T rows are asked for, of positions from `start` on, and S columns, from position 0 on."""

    x: Tensor  # the layer's input, (T, B, H d_h); each head sees its slice
    q: Tensor | None  # projected queries, (B, H, T, d_h), of the heads that have some
    k: Tensor | None  # projected keys, (B, H, S, d_h)
    start: int  # position of the first row
    src_len: int  # S, the number of columns


def rows_of(x: Tensor, inputs: Inputs) -> Tensor:
    """The call's rows (1, H, T, r) of a parameter (H, l, r)."""
    return positions(x, 1, inputs.start, inputs.x.size(0))[None]


def columns_of(x: Tensor, inputs: Inputs) -> Tensor:
    """What the call's columns have of a parameter (H, l, r), (1, H, S, r)."""
    return positions(x, 1, 0, inputs.src_len)[None]


def window_of(x: Tensor, inputs: Inputs) -> Tensor:
    """The call's rows and columns (1, H, T, S) of a parameter (H, l, l); (1, H, 1, S) of (H, 1, l), for all rows."""
    heads, length, width = x.size()
    start, count, columns = inputs.start, inputs.x.size(0), inputs.src_len
    if length == 1:
        start, count = 0, 1
    if start + count <= length and columns < width and count < length:
        # one view, with one copy for its gradient; two slices have two
        head, row, column = x.stride()
        return x.as_strided([1, heads, count, columns], [0, head, row, column], x.storage_offset() + start * row)
    return positions(positions(x, 1, start, count), 2, 0, columns)[None]


def distances_of(x: Tensor, inputs: Inputs) -> Tensor:
    """The values (1, H, 1, T + S - 1) of a parameter (H, 2 m + 1) for the call's distances: from that of its last row
    and first column to that of its first row and last column; those beyond -m and m have the values of these."""
    m = (x.size(1) - 1) // 2
    first, last = 1 - inputs.start - inputs.x.size(0), inputs.src_len - 1 - inputs.start
    lowest, highest = max(first, -m), min(last, m)
    found = x.narrow(1, m + lowest, highest - lowest + 1)
    if first < lowest or highest < last:
        before = x[:, :1].expand(-1, lowest - first)
        found = torch.cat([before, found, x[:, -1:].expand(-1, last - highest)], dim=1)
    return found[None, :, None]


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
    pieces: list[Tensor] = []
    while count > 0:
        piece = x.narrow(dim, start, min(count, length - start))
        pieces.append(piece)
        count -= piece.size(dim)
        start = 0
    return torch.cat(pieces, dim=dim)
