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
    ends_within_length = start + tgt_len <= length
    is_part_of_both_dimensions = tgt_len < length and src_len < width
    if ends_within_length and is_part_of_both_dimensions:
        return view_window(parameter, start, tgt_len, src_len)
    # Here at least one dimension is taken as a whole, which makes no view, or some positions are beyond l, for which
    # `take_positions` makes a copy.
    rows = take_positions(parameter, dim=1, start=start, count=tgt_len)
    return take_positions(rows, dim=2, start=0, count=src_len)[None]


def view_window(parameter: Tensor, start: int, tgt_len: int, src_len: int) -> Tensor:
    """Returns ``parameter[None, :, start : start + tgt_len, :src_len]`` as a single view of the parameter (H, l, l).

    Slicing would make two views, one for rows and one for columns, and the backward pass of each would make a tensor as
    large as the whole parameter.
    """
    # A stride is the number of elements in memory from one head, row or column to the next. The view has the strides of
    # the parameter, and begins at its row `start`.
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

    The parameter is cut where it has more distances than occur, and its first and last value are repeated where it has
    fewer. For example, a parameter with the values a b c d e has them for the distances -2 to 2. A call with a single
    row at position 3 and five columns has the distances -3 to 1, so it gets a a b c d.

    Args:
        parameter: (H, 2 m + 1), a value for each distance from -m to m. Distances below -m have the value of -m, and
            distances above m have the value of m.
        inputs: The call.

    Returns:
        (1, H, 1, T + S - 1)
    """
    max_distance = (parameter.size(1) - 1) // 2  # m, which is also the index of distance 0 in the parameter
    last_row = inputs.start + inputs.x.size(0) - 1
    last_column = inputs.src_len - 1
    # How far the call looks back, from its last row to column 0, and ahead, from its first row to its last column.
    steps_back = last_row
    steps_ahead = last_column - inputs.start
    # How many of these steps the parameter covers. The slice has their values, around the value of distance 0.
    covered_back = min(steps_back, max_distance)
    covered_ahead = min(steps_ahead, max_distance)
    values = parameter.narrow(dim=1, start=max_distance - covered_back, length=covered_back + 1 + covered_ahead)
    if covered_back < steps_back or covered_ahead < steps_ahead:
        repeated_first = parameter[:, :1].expand(-1, steps_back - covered_back)
        repeated_last = parameter[:, -1:].expand(-1, steps_ahead - covered_ahead)
        values = torch.cat([repeated_first, values, repeated_last], dim=1)
    return values[None, :, None]


def take_positions(x: Tensor, dim: int, start: int, count: int) -> Tensor:
    """Returns the entries of a tensor for the positions ``start`` to ``start + count - 1``.

    For example, a tensor with the entries a b c has the entries c a b c a for the positions 2 to 6.

    Args:
        x: A tensor with l entries along dimension `dim`. Position p has entry ``p mod l``, so that the first entry
            follows the last one.
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
    # In the example, these are c, once a b c, and a.
    num_before_end = length - first_entry
    num_whole_tensors = (count - num_before_end) // length
    num_last_entries = (count - num_before_end) % length
    slices = [x.narrow(dim, first_entry, num_before_end)]
    for _ in range(num_whole_tensors):
        slices.append(x.narrow(dim, 0, length))
    if num_last_entries > 0:
        slices.append(x.narrow(dim, 0, num_last_entries))
    return torch.cat(slices, dim=dim)
