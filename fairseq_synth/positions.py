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

    The first row is at position `Inputs.start`, and the first column at position 0. Position l has the entry of
    position 0, and so on.
    """
    _, num_rows, num_columns = parameter.size()
    start = inputs.start
    tgt_len = inputs.x.size(0)
    src_len = inputs.src_len
    ends_within_parameter = start + tgt_len <= num_rows
    leaves_out_rows = tgt_len < num_rows
    leaves_out_columns = src_len < num_columns
    if ends_within_parameter and leaves_out_rows and leaves_out_columns:
        # Here, `take_positions` would make two slices, one of the rows and one of the columns. This is a single view.
        return view_window(parameter, start, tgt_len, src_len)  # (1, H, T, S)
    # At most one of the two calls makes a slice, or positions are repeated, which a view cannot do.
    rows = take_positions(parameter, dim=1, start=start, count=tgt_len)  # (H, T, l)
    window = take_positions(rows, dim=2, start=0, count=src_len)  # (H, T, S)
    return window[None]


def view_window(parameter: Tensor, start: int, tgt_len: int, src_len: int) -> Tensor:
    """Returns ``parameter[None, :, start : start + tgt_len, :src_len]`` as a single view, (1, H, tgt_len, src_len).

    Indexing would make two views, one for rows and one for columns, and the backward pass of each would make a tensor
    as large as the whole parameter.

    Args:
        parameter: (H, l, l), a value for each head, row and column.
        start: The first row.
        tgt_len: The number of rows.
        src_len: The number of columns, which begin at 0.
    """
    # A stride is the number of elements in memory from one head, row or column to the next. The view has the strides of
    # the parameter, as it leaves out only elements before the first row, and at the ends of rows and heads.
    head_stride, row_stride, column_stride = parameter.stride()
    any_stride = 0  # A dimension of size 1 has no next element.
    index_of_first_row = parameter.storage_offset() + start * row_stride
    return parameter.as_strided(
        size=[1, parameter.size(0), tgt_len, src_len],
        stride=[any_stride, head_stride, row_stride, column_stride],
        storage_offset=index_of_first_row,
    )


def take_distances(parameter: Tensor, inputs: Inputs) -> Tensor:
    """Returns the values of a parameter for all distances that occur between the rows and columns of a call.

    The distance from row i to column j is ``j - i``. The smallest distance is that from the last row to column 0, and
    the largest distance is that from the first row to the last column.

    If the parameter has no value for a distance, the nearest distance gives its value. For example, a parameter with
    the values a b c d e has them for the distances -2 to 2. A call with a single row at position 3 and five columns has
    the distances -3 to 1, so it gets a a b c d.

    Args:
        parameter: (H, 2 m + 1), a value for each distance from -m to m.
        inputs: The call.

    Returns:
        (1, H, 1, T + S - 1), from the smallest distance to the largest
    """
    max_distance = (parameter.size(1) - 1) // 2  # m
    first_row = inputs.start
    last_row = first_row + inputs.x.size(0) - 1
    last_column = inputs.src_len - 1
    smallest_distance = -last_row
    largest_distance = last_column - first_row
    # The distances of the call for which the parameter has a value. At least distance 0 is among them. Distance d has
    # the index ``d + m`` in the parameter.
    first_covered = max(smallest_distance, -max_distance)
    last_covered = min(largest_distance, max_distance)
    num_covered = last_covered - first_covered + 1
    covered = parameter.narrow(dim=1, start=first_covered + max_distance, length=num_covered)
    num_missing_before = first_covered - smallest_distance
    num_missing_behind = largest_distance - last_covered
    values = add_nearest(covered, parameter, num_missing_before, num_missing_behind)
    return values[None, :, None]


def add_nearest(covered: Tensor, parameter: Tensor, num_before: int, num_behind: int) -> Tensor:
    """Returns values with the first value of the parameter repeated before them, and its last value behind them.

    For example, a parameter has the values a b c. The covered values a b with 2 values before become a a a b.

    Args:
        covered: The values to add to, (H, any number).
        parameter: (H, 2 m + 1).
        num_before, num_behind: How often the first and the last value are repeated.
    """
    if num_before == 0 and num_behind == 0:
        return covered
    repeated_first = parameter[:, :1].expand(-1, num_before)
    repeated_last = parameter[:, -1:].expand(-1, num_behind)
    return torch.cat([repeated_first, covered, repeated_last], dim=1)


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
