"""The parts of a parameter that one call needs, where rows or columns of the parameter are positions of a sentence.

A synthesizing function has parameters for sentences of l tokens. A call has T rows, for the positions ``start`` to
``start + T - 1`` of its sentences, and S columns, for the positions 0 to ``S - 1``. The functions below return the
entries for these positions. Position p beyond l has the entry of position ``p mod l``; that is the paper's "tile to the
maximum sequence length". Within l, they return views.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """Everything that the logits S of a call may depend on."""

    x: Tensor  # the input of the layer, (T, B, H d_h); each head sees its slice of the features
    q: Tensor | None  # projected queries, (B, H, T, d_h), of the heads that have queries
    k: Tensor | None  # projected keys, (B, H, S, d_h), of the same heads
    start: int  # position of the first row; 0 except in incremental decoding
    src_len: int  # S, the number of columns


def take_rows(parameter: Tensor, inputs: Inputs) -> Tensor:
    """Returns the call's rows of a parameter (H, l, r), as (1, H, T, r)."""
    tgt_len = inputs.x.size(0)
    return take_positions(parameter, dim=1, start=inputs.start, count=tgt_len)[None]


def take_columns(parameter: Tensor, inputs: Inputs) -> Tensor:
    """Returns the rows of a parameter (H, l, r) that belong to the call's columns, as (1, H, S, r)."""
    return take_positions(parameter, dim=1, start=0, count=inputs.src_len)[None]


def take_column_bias(parameter: Tensor, inputs: Inputs) -> Tensor:
    """Returns the call's columns of a parameter (H, l) that is the same for all rows, as (1, H, 1, S)."""
    return take_positions(parameter, dim=1, start=0, count=inputs.src_len)[None, :, None]


def take_window(parameter: Tensor, inputs: Inputs) -> Tensor:
    """Returns the call's rows and columns of a parameter (H, l, l), as (1, H, T, S)."""
    num_heads, length, width = parameter.size()
    start, tgt_len, src_len = inputs.start, inputs.x.size(0), inputs.src_len
    cuts_rows = tgt_len < length
    cuts_columns = src_len < width
    if cuts_rows and cuts_columns and start + tgt_len <= length:
        # One view instead of two slices: the backward pass of each slice is a copy of the whole parameter.
        head_stride, row_stride, column_stride = parameter.stride()
        return parameter.as_strided(
            size=[1, num_heads, tgt_len, src_len],
            stride=[0, head_stride, row_stride, column_stride],
            storage_offset=parameter.storage_offset() + start * row_stride,
        )
    rows = take_positions(parameter, dim=1, start=start, count=tgt_len)
    return take_positions(rows, dim=2, start=0, count=src_len)[None]


def take_distances(parameter: Tensor, inputs: Inputs) -> Tensor:
    """Returns the values of a parameter (H, 2 m + 1), one for each distance from -m to m, for the call's distances.

    The result (1, H, 1, T + S - 1) begins with the distance from the last row to the first column and ends with the
    distance from the first row to the last column. Distances beyond -m and m have the values of -m and m.
    """
    largest = (parameter.size(1) - 1) // 2
    last_row = inputs.start + inputs.x.size(0) - 1
    first_distance = -last_row
    last_distance = inputs.src_len - 1 - inputs.start
    first_known = max(first_distance, -largest)
    last_known = min(last_distance, largest)
    values = parameter.narrow(1, largest + first_known, last_known - first_known + 1)
    if first_distance < first_known or last_distance > last_known:
        before = parameter[:, :1].expand(-1, first_known - first_distance)
        after = parameter[:, -1:].expand(-1, last_distance - last_known)
        values = torch.cat([before, values, after], dim=1)
    return values[None, :, None]


def take_positions(x: Tensor, dim: int, start: int, count: int) -> Tensor:
    """Returns the entries of `x` along `dim` for the positions ``start`` to ``start + count - 1``.

    The dimension has l entries, and position p has entry ``p mod l``.
    """
    length = x.size(dim)
    if start == 0 and count == length:
        return x  # not a slice, because the gradient of a slice is a copy
    first = start % length
    if first + count <= length:
        return x.narrow(dim, first, count)
    pieces = []
    missing = count
    while missing > 0:
        piece_length = min(missing, length - first)
        pieces.append(x.narrow(dim, first, piece_length))
        missing -= piece_length
        first = 0
    return torch.cat(pieces, dim=dim)
