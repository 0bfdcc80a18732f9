"""The Triton kernel that adds up what the programs of a backward pass have summed each: one launch for all gradients.

Gradients of what a batch shares go into tensors as large as the parameters, of their type; what a batch of shorter
sentences does not reach is 0.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Sum(NamedTuple):
    """A gradient, (H, own_rows, own_columns), and its sums over groups of sentences; see `add`."""

    out: Any
    parts: Any
    groups: Any
    size: Any
    rows: Any
    columns: Any
    own_rows: Any
    own_columns: Any


class Totals(NamedTuple):
    """Gradients to write; None: not wanted."""

    w: Any
    c: Any
    r: Any
    weights: Any


@triton.jit
def number_of_blocks(H, sum, BLOCK: tl.constexpr):
    if sum.out is None:
        return 0
    else:
        return tl.cdiv(tl.cast(H, tl.int64) * sum.own_rows * sum.own_columns, BLOCK)


@triton.jit
def add_groups(H, sum, block, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """A block of a gradient: the sum of ``parts + group * size``, (H, rows, columns), over the groups."""
    if sum.out is not None:
        first = tl.cast(block, tl.int64) * BLOCK
        first_row = first // sum.own_columns
        # of each element only divisions of 32 bits: those of 64 would take longer than all else
        place = tl.cast(first % sum.own_columns, tl.int32) + tl.arange(0, BLOCK)
        column, row = place % sum.own_columns, tl.cast(first_row % sum.own_rows, tl.int32) + place // sum.own_columns
        h, row = first_row // sum.own_rows + row // sum.own_rows, row % sum.own_rows
        is_reached = (h < H) & (row < sum.rows) & (column < sum.columns)
        at = sum.parts + (h * sum.rows + row) * sum.columns + column
        total = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, tl.where(tl.max(is_reached.to(tl.int32), 0) > 0, sum.groups, 0), GROUPS):
            group = begin + tl.arange(0, GROUPS)
            mask = (group < sum.groups)[:, None] & is_reached[None, :]
            found = tl.load(at[None, :] + tl.cast(group, tl.int64)[:, None] * sum.size, mask=mask, other=0.0)
            total += tl.sum(found, 0)
        tl.store(sum.out + first + tl.arange(0, BLOCK), total.to(sum.out.dtype.element_ty), mask=h < H)


@triton.jit
def add_diagonals(H, T, sum, block, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    """A block of a gradient by distance, (H, 1, 2 m + 1): sums of the diagonals of ``parts``, over the groups.

    The first and the last distance have all diagonals that are farther from the middle too.
    """
    if sum.out is not None:
        place = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        h, m = place // sum.own_columns, sum.own_columns // 2
        distance = place % sum.own_columns - m
        farther = tl.where(distance == m, 1, tl.where(distance == -m, -1, 0))
        before = tl.where(m == 0, T - 1, 0)  # the only distance has the diagonals of both sides
        total = tl.zeros([BLOCK], tl.float32)
        for step in range(0, tl.maximum(T - m, 1) + before):
            diagonal = distance - before + step * farther
            wanted = (h < H) & (diagonal < T) & (diagonal > -T) & ((step == 0) | (farther != 0))
            for first in range(0, tl.where(tl.max(wanted.to(tl.int32), 0) > 0, sum.groups * T, 0), PAIRS):
                pair = first + tl.arange(0, PAIRS)  # of a group and a row
                group, row = (pair // T)[:, None], (pair % T)[:, None]
                column = row + diagonal[None, :]
                mask = (pair < sum.groups * T)[:, None] & wanted[None, :] & (column >= 0) & (column < T)
                at = sum.parts + tl.cast(group, tl.int64) * sum.size + (h[None, :] * T + row) * T + column
                total += tl.sum(tl.load(at, mask=mask, other=0.0), 0)
        tl.store(sum.out + place, total.to(sum.out.dtype.element_ty), mask=h < H)


@triton.jit
def add_parts(parts, number, row, a_row: tl.constexpr, H, HEADS: tl.constexpr, GROUPS: tl.constexpr):
    """The sum of (number, H) parts, if they are of this row's weight."""
    total = tl.zeros([HEADS], tl.float32)
    if parts is not None:
        h = tl.arange(0, HEADS)
        for first in range(0, tl.where(row == a_row, number, 0), GROUPS):
            part = first + tl.arange(0, GROUPS)
            mask = (part < number)[:, None] & (h < H)[None, :]
            total += tl.sum(tl.load(parts + part[:, None] * H + h[None, :], mask=mask, other=0.0), 0)
    return total


NUMBERS = (
    "H", "T", "w_groups", "w_size", "r_groups", "r_size", "w_rows", "w_columns", "c_rows", "c_columns", "r_rows",
    "r_columns", "of_rows", "of_columns", "of_matrix",
)  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def add(
    to, at, H, T, w_groups, w_size, r_groups, r_size, w_rows, w_columns, c_rows, c_columns, r_rows, r_columns,
    of_rows, of_columns, of_matrix, z, HEADS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    DISTANCES: tl.constexpr,
):  # fmt: skip
    """dW, dc and dR by blocks, and the gradient of each row of weights by a program."""
    w = Sum(to.w, at.w, w_groups, w_size, T, z.X, w_rows, w_columns)
    c = Sum(to.c, at.c, w_groups, w_size, 1, T, c_rows, c_columns)
    r = Sum(to.r, at.r, r_groups, r_size, T, T, r_rows, r_columns)
    block = tl.program_id(0)
    of_w, of_c = number_of_blocks(H, w, BLOCK), number_of_blocks(H, c, BLOCK)
    of_r = number_of_blocks(H, r, DISTANCES if z.DIAGONALS else BLOCK)
    if block < of_w:
        add_groups(H, w, block, BLOCK, GROUPS)
    elif block < of_w + of_c:
        add_groups(H, c, block - of_w, BLOCK, GROUPS)
    elif block < of_w + of_c + of_r:
        if z.DIAGONALS:
            add_diagonals(H, T, r, block - of_w - of_c, DISTANCES, BLOCK // 2)
        else:
            add_groups(H, r, block - of_w - of_c, BLOCK, GROUPS)
    elif to.weights is not None:
        row, h = block - of_w - of_c - of_r, tl.arange(0, HEADS)
        total = add_parts(at.a_q, of_columns, row, z.A_Q, H, HEADS, BLOCK // 2)
        total += add_parts(at.a_x, of_columns, row, z.A_X, H, HEADS, BLOCK // 2)
        total += add_parts(at.a_outer, of_rows, row, z.A_OUTER, H, HEADS, BLOCK // 2)
        total += add_parts(at.a_c, of_columns, row, z.A_C, H, HEADS, BLOCK // 2)
        total += add_parts(at.a_r, of_matrix, row, z.A_R, H, HEADS, BLOCK // 2)
        tl.store(to.weights + row * H + h, total.to(to.weights.dtype.element_ty), mask=h < H)
