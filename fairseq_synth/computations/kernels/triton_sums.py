"""The Triton kernel that adds up the sums of all programs of a backward pass, in one launch for all gradients.

The gradients of tensors that a batch shares have the size and type of the parameters. They are 0 where the sentences
of the batch do not reach.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arguments import AdditionNumbers


class SharedGradient(NamedTuple):
    """The gradient of a tensor that a batch shares, and its sums over groups of sentences."""

    out: Any  # the gradient, (H, own_rows, own_columns)
    parts: Any  # the sums, (H, rows, columns) for each group
    groups: Any
    size: Any  # the sums of group g begin at ``parts + g * size``
    rows: Any
    columns: Any
    own_rows: Any
    own_columns: Any


@triton.jit
def number_of_blocks(H, shared, BLOCK: tl.constexpr):
    """Returns how many programs write a gradient."""
    if shared.out is None:
        return 0
    else:
        return tl.cdiv(tl.cast(H, tl.int64) * shared.own_rows * shared.own_columns, BLOCK)


@triton.jit
def add_groups(H, shared, block, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """Writes a block of a gradient: the sum over the groups."""
    if shared.out is not None:
        first = tl.cast(block, tl.int64) * BLOCK
        first_row = first // shared.own_columns
        # Each element takes divisions of 32 bits only. Those of 64 bits would take longer than everything else.
        place = tl.cast(first % shared.own_columns, tl.int32) + tl.arange(0, BLOCK)
        column = place % shared.own_columns
        row_of_heads = tl.cast(first_row % shared.own_rows, tl.int32) + place // shared.own_columns
        h = first_row // shared.own_rows + row_of_heads // shared.own_rows
        row = row_of_heads % shared.own_rows
        is_reached = (h < H) & (row < shared.rows) & (column < shared.columns)
        at = shared.parts + (h * shared.rows + row) * shared.columns + column
        total = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, tl.where(tl.max(is_reached.to(tl.int32), 0) > 0, shared.groups, 0), GROUPS):
            group = begin + tl.arange(0, GROUPS)
            mask = (group < shared.groups)[:, None] & is_reached[None, :]
            sums = tl.load(at[None, :] + tl.cast(group, tl.int64)[:, None] * shared.size, mask=mask, other=0.0)
            total += tl.sum(sums, 0)
        tl.store(shared.out + first + tl.arange(0, BLOCK), total.to(shared.out.dtype.element_ty), mask=h < H)


@triton.jit
def add_diagonals(H, T, shared, block, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    """Writes a block of a gradient by distance, (H, 1, 2 m + 1): sums of diagonals, over the groups.

    The first and the last distance also have all diagonals that are farther from the middle.
    """
    if shared.out is not None:
        place = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        h = place // shared.own_columns
        m = shared.own_columns // 2
        distance = place % shared.own_columns - m
        farther = tl.where(distance == m, 1, tl.where(distance == -m, -1, 0))
        before = tl.where(m == 0, T - 1, 0)  # the only distance has the diagonals of both sides
        total = tl.zeros([BLOCK], tl.float32)
        for step in range(0, tl.maximum(T - m, 1) + before):
            diagonal = distance - before + step * farther
            wanted = (h < H) & (diagonal < T) & (diagonal > -T) & ((step == 0) | (farther != 0))
            for first in range(0, tl.where(tl.max(wanted.to(tl.int32), 0) > 0, shared.groups * T, 0), PAIRS):
                pair = first + tl.arange(0, PAIRS)  # each is a group and a row
                group = (pair // T)[:, None]
                row = (pair % T)[:, None]
                column = row + diagonal[None, :]
                mask = (pair < shared.groups * T)[:, None] & wanted[None, :] & (column >= 0) & (column < T)
                at = shared.parts + tl.cast(group, tl.int64) * shared.size + (h[None, :] * T + row) * T + column
                total += tl.sum(tl.load(at, mask=mask, other=0.0), 0)
        tl.store(shared.out + place, total.to(shared.out.dtype.element_ty), mask=h < H)


@triton.jit
def add_parts(parts, number, row, a_row: tl.constexpr, H, HEADS: tl.constexpr, GROUPS: tl.constexpr):
    """Returns the sum of (number, H) parts, if they belong to the weights of this row; else 0."""
    total = tl.zeros([HEADS], tl.float32)
    if parts is not None:
        h = tl.arange(0, HEADS)
        for first in range(0, tl.where(row == a_row, number, 0), GROUPS):
            part = first + tl.arange(0, GROUPS)
            mask = (part < number)[:, None] & (h < H)[None, :]
            total += tl.sum(tl.load(parts + part[:, None] * H + h[None, :], mask=mask, other=0.0), 0)
    return total


@triton.jit(do_not_specialize=AdditionNumbers._fields)
def add(
    gradients,
    sums,
    H,
    T,
    column_groups,
    column_numbers,
    matrix_groups,
    matrix_numbers,
    dense_key_rows,
    dense_key_columns,
    bias_row_rows,
    bias_row_columns,
    matrix_rows,
    matrix_columns,
    row_parts,
    column_parts,
    matrix_parts,
    constants,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    DISTANCES: tl.constexpr,
):
    """Writes the gradients of the tensors that a batch shares, from the partial sums in `sums`.

    A program writes a block of BLOCK numbers of dW, dc or dR, or the gradient of a row of weights.
    """
    dense_key = SharedGradient(
        gradients.dense_key,
        sums.dense_key,
        column_groups,
        column_numbers,
        T,
        constants.DENSE_WIDTH,
        dense_key_rows,
        dense_key_columns,
    )
    bias_row = SharedGradient(
        gradients.bias_row, sums.bias_row, column_groups, column_numbers, 1, T, bias_row_rows, bias_row_columns
    )
    matrix = SharedGradient(
        gradients.matrix, sums.matrix, matrix_groups, matrix_numbers, T, T, matrix_rows, matrix_columns
    )
    block = tl.program_id(0)
    dense_key_end = number_of_blocks(H, dense_key, BLOCK)
    bias_row_end = dense_key_end + number_of_blocks(H, bias_row, BLOCK)
    matrix_end = bias_row_end + number_of_blocks(H, matrix, DISTANCES if constants.BY_DISTANCE else BLOCK)
    if block < dense_key_end:
        add_groups(H, dense_key, block, BLOCK, GROUPS)
    elif block < bias_row_end:
        add_groups(H, bias_row, block - dense_key_end, BLOCK, GROUPS)
    elif block < matrix_end:
        if constants.BY_DISTANCE:
            add_diagonals(H, T, matrix, block - bias_row_end, DISTANCES, BLOCK // 2)
        else:
            add_groups(H, matrix, block - bias_row_end, BLOCK, GROUPS)
    elif gradients.weights is not None:
        row = block - matrix_end
        h = tl.arange(0, HEADS)
        total = add_parts(sums.product_weight, column_parts, row, constants.PRODUCT_WEIGHT, H, HEADS, BLOCK // 2)
        total += add_parts(sums.dense_weight, column_parts, row, constants.DENSE_WEIGHT, H, HEADS, BLOCK // 2)
        total += add_parts(sums.outer_weight, row_parts, row, constants.OUTER_WEIGHT, H, HEADS, BLOCK // 2)
        total += add_parts(sums.bias_row_weight, column_parts, row, constants.BIAS_ROW_WEIGHT, H, HEADS, BLOCK // 2)
        total += add_parts(sums.matrix_weight, matrix_parts, row, constants.MATRIX_WEIGHT, H, HEADS, BLOCK // 2)
        tl.store(gradients.weights + row * H + h, total.to(gradients.weights.dtype.element_ty), mask=h < H)
