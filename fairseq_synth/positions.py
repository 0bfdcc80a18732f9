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
    """Returns the rows of a parameter (H, l, r) for the T row positions of a call, as (1, H, T, r)."""
    tgt_len = inputs.x.size(0)
    return take_positions(parameter, dim=1, start=inputs.start, count=tgt_len)[None]


def take_columns(parameter: Tensor, inputs: Inputs) -> Tensor:
    """Returns the rows of a parameter (H, l, r) for the S column positions of a call, as (1, H, S, r)."""
    return take_positions(parameter, dim=1, start=0, count=inputs.src_len)[None]


def take_column_bias(parameter: Tensor, inputs: Inputs) -> Tensor:
    """Returns the entries of a parameter (H, l) for the S column positions of a call, as (1, H, 1, S)."""
    return take_positions(parameter, dim=1, start=0, count=inputs.src_len)[None, :, None]


def take_window(parameter: Tensor, inputs: Inputs) -> Tensor:
    """Returns the part of a parameter (H, l, l) for the T row and S column positions of a call, as (1, H, T, S).

    The first row is at position `Inputs.start`, and the first column at position 0. Positions beyond l begin again at
    0; see `take_positions`.
    """
    _, length, width = parameter.size()
    start = inputs.start
    tgt_len = inputs.x.size(0)
    src_len = inputs.src_len
    cuts_rows = tgt_len < length
    cuts_columns = src_len < width
    has_positions_beyond = start + tgt_len > length
    if cuts_rows and cuts_columns and not has_positions_beyond:
        return view_window(parameter, start, tgt_len, src_len)
    # If only one dimension is cut, slicing makes a single view, too. Beyond l, `take_positions` copies.
    rows = take_positions(parameter, dim=1, start=start, count=tgt_len)
    return take_positions(rows, dim=2, start=0, count=src_len)[None]


def view_window(parameter: Tensor, start: int, tgt_len: int, src_len: int) -> Tensor:
    """Returns ``parameter[None, :, start : start + tgt_len, :src_len]`` as a single view of the parameter (H, l, l).

    Slicing would make two views, one for rows and one for columns, and the backward pass of each would make a tensor as
    large as the whole parameter.
    """
    head_stride, row_stride, column_stride = parameter.stride()
    return parameter.as_strided(
        size=[1, parameter.size(0), tgt_len, src_len],
        stride=[0, head_stride, row_stride, column_stride],
        storage_offset=parameter.storage_offset() + start * row_stride,
    )


def take_distances(parameter: Tensor, inputs: Inputs) -> Tensor:
    """Returns the values of a parameter for all distances that occur between the rows and columns of a call.

    The distance from row i to column j is ``j - i``. The result begins with the distance from the last row to the first
    column, and ends with the distance from the first row to the last column.

    The parameter is cut where it has more distances than needed, and its first and last value are repeated where it has
    fewer. For example, a parameter with the values a b c d e for the distances -2 to 2 becomes a a b c d for a single
    row at position 3 and five columns, whose distances are -3 to 1.

    Args:
        parameter: (H, 2 m + 1), a value for each distance from -m to m. Distances below -m have the value of -m, and
            distances above m have the value of m.
        inputs: The call.

    Returns:
        (1, H, 1, T + S - 1)
    """
    largest_distance = (parameter.size(1) - 1) // 2  # m
    first_row = inputs.start
    last_row = inputs.start + inputs.x.size(0) - 1
    last_column = inputs.src_len - 1
    # The distances from `first_needed` to `last_needed` occur in the call. The first is 0 or less, and the last is 0 or
    # more, because the columns of a call begin at position 0 and include the positions of its rows.
    first_needed = 0 - last_row
    last_needed = last_column - first_row
    # The parameter has values of its own for the distances from `first_known` to `last_known` among them.
    first_known = max(first_needed, -largest_distance)
    last_known = min(last_needed, largest_distance)
    index_of_first_known = first_known + largest_distance  # the distance -m is at index 0
    values = parameter.narrow(dim=1, start=index_of_first_known, length=last_known - first_known + 1)  # a view
    if first_needed < first_known or last_needed > last_known:
        before = parameter[:, :1].expand(-1, first_known - first_needed)  # the value of -m for each distance below -m
        after = parameter[:, -1:].expand(-1, last_needed - last_known)  # the value of m for each distance above m
        values = torch.cat([before, values, after], dim=1)
    return values[None, :, None]


def take_positions(x: Tensor, dim: int, start: int, count: int) -> Tensor:
    """Returns the entries of a tensor for the positions ``start`` to ``start + count - 1``.

    Args:
        x: A tensor with l entries along dimension `dim`. Position p has entry ``p mod l``, so that the entries begin
            again at the first one after the last.
        dim: The dimension of the positions.
        start: The first position.
        count: The number of positions.
    """
    length = x.size(dim)
    if start == 0 and count == length:
        return x  # This is not a slice, because the backward pass of a slice copies the gradient.
    first_entry = start % length
    if first_entry + count <= length:
        return x.narrow(dim, first_entry, count)
    # From the first entry to the end of the tensor, then the tensor from its beginning, as often as it takes.
    slices = []
    num_missing = count
    while num_missing > 0:
        slice_length = min(num_missing, length - first_entry)
        slices.append(x.narrow(dim, first_entry, slice_length))
        num_missing -= slice_length
        first_entry = 0
    return torch.cat(slices, dim=dim)
