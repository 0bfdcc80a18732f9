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
    tgt_len = inputs.x.shape[0]
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
    max_length = parameter.shape[1]  # l
    start = inputs.start
    tgt_len = inputs.x.shape[0]
    src_len = inputs.src_len
    # Usually a call takes a part of the rows, none of which repeats, and a part of the columns. The general code below
    # would give the same result, but the backward pass of `view_window` is faster.
    takes_some_rows = tgt_len < max_length and start + tgt_len <= max_length
    takes_some_columns = src_len < max_length
    if takes_some_rows and takes_some_columns:
        return view_window(parameter, start, tgt_len, src_len)  # (1, H, T, S)
    # This works in general. `take_positions` takes row or column 0 again for position l, row 1 for l + 1, and so on.
    rows = take_positions(parameter, dim=1, start=start, count=tgt_len)  # (H, T, l)
    window = take_positions(rows, dim=2, start=0, count=src_len)  # (H, T, S)
    return window[None]


def view_window(parameter: Tensor, start: int, tgt_len: int, src_len: int) -> Tensor:
    """Returns the same as ``parameter[None, :, start : start + tgt_len, :src_len]``, (1, H, tgt_len, src_len).

    Such an index makes two views, of the rows first and then of the columns, and the backward pass of each makes a
    tensor as large as the whole parameter. This function makes a single view, which has the strides of the parameter,
    but begins later and is smaller. For example, of a parameter with one head and l = 4, the window with start = 1,
    tgt_len = 2 and src_len = 3 has the elements in brackets:

        row 0      0    1    2    3
        row 1     [4]  [5]  [6]   7
        row 2     [8]  [9] [10]  11
        row 3     12   13   14   15

    Args:
        parameter: (H, l, l), a value for each head, row and column.
        start: The first row.
        tgt_len: The number of rows.
        src_len: The number of columns, which begin at 0.
    """
    # A stride is the number of elements from one head, row or column of the parameter to the next.
    head_stride, row_stride, column_stride = parameter.stride()  # 16, 4 and 1
    first_element = parameter.storage_offset() + start * row_stride  # 0 + 1 * 4
    return parameter.as_strided(
        size=[1, parameter.shape[0], tgt_len, src_len],
        stride=[0, head_stride, row_stride, column_stride],  # The stride of a dimension of size 1 may be any number.
        storage_offset=first_element,
    )


def take_distances(parameter: Tensor, inputs: Inputs) -> Tensor:
    """Returns a parameter's value for each distance ``j - i`` from a row i to a column j of a call.

    The parameter has a value for each distance from -m to m. A distance below -m gets the value of -m, and a distance
    above m gets the value of m.

    For example, the parameter a b c d e has the values of the distances -2 to 2. A call with a single row at position 3
    and five columns has the distances -3 to 1, so it gets a a b c d. The comments have the numbers of this example.

    Args:
        parameter: (H, 2 m + 1), a value for each distance from -m to m.
        inputs: The call.

    Returns:
        (1, H, 1, T + S - 1), from the smallest distance to the largest
    """
    max_distance = (parameter.shape[1] - 1) // 2  # m = 2
    smallest, largest = find_distance_range(inputs)  # -3 and 1
    # The value of distance -m has the index 0, so the value of distance d has the index d + m.
    first_index = smallest + max_distance  # -1
    last_index = largest + max_distance  # 3
    values = take_clamped(parameter, first_index, last_index)  # a a b c d, as the index -1 gets the first value
    return values[None, :, None]


def find_distance_range(inputs: Inputs) -> tuple[int, int]:
    """Returns the smallest and the largest distance from a row to a column of a call, ``column - row``.

    For example, a call with the rows 3 and 4 and the columns 0 to 4 has the distances from ``0 - 4 = -4`` to
    ``4 - 3 = 1``.
    """
    first_row = inputs.start
    last_row = first_row + inputs.x.shape[0] - 1
    first_column = 0
    last_column = inputs.src_len - 1
    return first_column - last_row, last_column - first_row


def take_clamped(parameter: Tensor, first: int, last: int) -> Tensor:
    """Returns the values of a parameter at the indices from `first` to `last`, some of which may not exist.

    An index below 0 gets the first value, and an index that is too large gets the last value. For example, the indices
    -1 to 3 of the parameter a b c d e get a a b c d. The comments have the numbers of this example.

    Args:
        parameter: (H, any number). The indices are for the second dimension.
        first, last: The first and the last index. At least one index from `first` to `last` must exist.
    """
    last_value = parameter.shape[1] - 1  # 4
    first_existing = max(first, 0)  # 0
    last_existing = min(last, last_value)  # 3
    num_existing = last_existing - first_existing + 1  # 4
    existing = parameter.narrow(dim=1, start=first_existing, length=num_existing)  # a b c d
    num_before = first_existing - first  # 1
    num_behind = last - last_existing  # 0
    if num_before == 0 and num_behind == 0:
        return existing
    first_values = parameter[:, :1].expand(-1, num_before)  # a
    last_values = parameter[:, -1:].expand(-1, num_behind)
    return torch.cat([first_values, existing, last_values], dim=1)


def take_positions(x: Tensor, dim: int, start: int, count: int) -> Tensor:
    """Returns the entries of a tensor for the positions ``start`` to ``start + count - 1``.

    The entries repeat: in a tensor of l entries, position p has entry ``p mod l``. For example, a tensor with the
    entries a b c has the entries c a b c a for the positions 2 to 6.

    Args:
        x: A tensor with l entries along dimension `dim`.
        dim: The dimension of the positions.
        start: The first position.
        count: The number of positions.
    """
    length = x.size(dim)  # l
    if start == 0 and count == length:
        return x  # This is not a slice, because the backward pass of a slice copies the gradient.
    first_entry = start % length
    if first_entry + count <= length:
        return x.narrow(dim, first_entry, count)
    # A slice ends where the tensor ends, at the latest. The next one begins at entry 0. The example has the slices c,
    # a b c and a.
    slices = []
    num_missing = count
    while num_missing > 0:
        slice_length = min(length - first_entry, num_missing)
        slices.append(x.narrow(dim, first_entry, slice_length))
        num_missing -= slice_length
        first_entry = 0
    return torch.cat(slices, dim=dim)
