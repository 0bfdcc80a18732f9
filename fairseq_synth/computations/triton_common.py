"""What the Triton kernels share: how tensors lie, and a tile of logits.

The kernels compute, for a head of sentence b,

    S = Q K^T + X W^T + A (x) B + c + a R,     Y = softmax(S) V

in which every summand may be absent. Q, K, X, A, B and V differ by sentence; W, the row c, the matrix R and its weight
a are shared across the batch. Column ``u n + v`` of the outer products A (x) B is ``A_u B_v``, with n columns in B.

No gradient is added atomically: every sum is of one program, in a fixed order, so that two runs are equal bit for bit.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Given(NamedTuple):
    """First elements of the tensors. None: there is no such summand, and no code for it in the compiled kernel."""

    v: Any
    q: Any
    k: Any
    x: Any
    w: Any
    c: Any
    left: Any  # A
    right: Any  # B
    r: Any
    weight: Any  # a, (H,)
    hidden: Any  # (B, T), not 0 at padding
    seed: Any  # of dropout, (1,); None: no dropout


class Sizes(NamedTuple):
    """Numbers that change from batch to batch. They are no constants of a kernel, or each would compile another one."""

    v_token: Any  # stride of token t B + b in V: the sentences of a batch are interleaved
    v_head: Any  # stride of a head
    q_token: Any
    q_head: Any
    k_token: Any
    k_head: Any
    x_token: Any
    x_head: Any
    left_token: Any
    left_head: Any
    right_token: Any
    right_head: Any
    w_head: Any
    c_head: Any
    r_row: Any
    r_head: Any
    T: Any
    B: Any
    H: Any
    n: Any  # columns of the right factor of an outer product
    dropout: Any


INTEGERS = Sizes._fields[:-1]  # Triton makes no constants of floats


class Constants(NamedTuple):
    """What a kernel is compiled for."""

    D: Any  # width of V, and the power of two that holds it
    D_BLOCK: Any
    Q: Any  # width of Q and K
    Q_BLOCK: Any
    X: Any  # width of X and W
    X_BLOCK: Any
    FACTOR: Any  # a power of two that holds the widths of A and of B
    ROWS: Any  # of a tile
    COLUMNS: Any
    UNIT: Any  # all strides are multiples of it, so that several numbers are read at once
    CAUSAL: Any
    PRECISION: Any  # of products of fp32


class Gradients(NamedTuple):
    """Where gradients go, (T, B, H, width), or sums over a group of sentences, in fp32; None: not wanted."""

    v: Any
    q: Any
    k: Any
    x: Any
    left: Any
    right: Any
    w: Any  # (groups, H, T, width), as are those below, (groups, H, ...), each group `size` numbers after the last
    c: Any
    r: Any
    weight: Any


class RowFactors(NamedTuple):
    """The factors of the logits that belong to rows."""

    q: Any
    x: Any
    left: Any
    right: Any


class ColumnFactors(NamedTuple):
    """The factors of the logits that belong to columns."""

    k: Any
    w: Any
    c: Any


@triton.jit
def places(data, token, head, b, h, i, B, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Where rows i, i + 1, ... of head h of sentence b are, (ROWS, BLOCK)."""
    rows = tl.cast(i + tl.arange(0, ROWS), tl.int64) * B + b
    return data + tl.cast(h, tl.int64) * head + rows[:, None] * token + tl.arange(0, BLOCK)[None, :]


@triton.jit
def inside(i, T, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Which of these places exist."""
    return (i + tl.arange(0, ROWS) < T)[:, None] & (tl.arange(0, BLOCK) < width)[None, :]


@triton.jit
def load_rows(data, token, head, b, h, i, s, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Rows i, i + 1, ... of a sentence; 0 where there are none."""
    if data is None:
        return 0.0
    else:
        token, head = tl.multiple_of(token, UNIT), tl.multiple_of(head, UNIT)
        at = places(data, token, head, b, h, i, s.B, ROWS, BLOCK)
        return tl.load(at, mask=inside(i, s.T, width, ROWS, BLOCK), other=0.0)


@triton.jit
def store_rows(data, value, b, h, i, s, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Writes rows i, i + 1, ... of a sentence to (T, B, H, width), if there is such a tensor."""
    if data is not None:
        at = places(data, s.H * width, width, b, h, i, s.B, ROWS, BLOCK)
        tl.store(at, value.to(data.dtype.element_ty), mask=inside(i, s.T, width, ROWS, BLOCK))


@triton.jit
def load_row_factors(g, s, z, b, h, i):
    q = load_rows(g.q, s.q_token, s.q_head, b, h, i, s, z.Q, z.ROWS, z.Q_BLOCK, z.UNIT)
    x = load_rows(g.x, s.x_token, s.x_head, b, h, i, s, z.X, z.ROWS, z.X_BLOCK, z.UNIT)
    left = load_rows(g.left, s.left_token, s.left_head, b, h, i, s, tl.cdiv(s.T, s.n), z.ROWS, z.FACTOR, 1)
    right = load_rows(g.right, s.right_token, s.right_head, b, h, i, s, s.n, z.ROWS, z.FACTOR, 1)
    return RowFactors(q, x, left, right)


@triton.jit
def load_column_factors(g, s, z, b, h, j):
    k = load_rows(g.k, s.k_token, s.k_head, b, h, j, s, z.Q, z.COLUMNS, z.Q_BLOCK, z.UNIT)
    w, c = 0.0, 0.0
    column = j + tl.arange(0, z.COLUMNS)
    if g.w is not None:
        first = g.w + tl.cast(h, tl.int64) * tl.multiple_of(s.w_head, z.UNIT)
        at = first + column[:, None] * z.X + tl.arange(0, z.X_BLOCK)[None, :]
        w = tl.load(at, mask=inside(j, s.T, z.X, z.COLUMNS, z.X_BLOCK), other=0.0)
    if g.c is not None:
        c = tl.load(g.c + h * s.c_head + column, mask=column < s.T, other=0.0).to(tl.float32)
    return ColumnFactors(k, w, c)


@triton.jit
def load_values(g, s, z, b, h, j):
    return load_rows(g.v, s.v_token, s.v_head, b, h, j, s, z.D, z.COLUMNS, z.D_BLOCK, z.UNIT)


@triton.jit
def load_matrix(g, s, z, h, i, j):
    """A tile of R."""
    if g.r is None:
        return 0.0
    else:
        row, column = (i + tl.arange(0, z.ROWS))[:, None], (j + tl.arange(0, z.COLUMNS))[None, :]
        at = g.r + tl.cast(h, tl.int64) * s.r_head + (row * s.r_row + column)
        return tl.load(at, mask=(row < s.T) & (column < s.T), other=0.0).to(tl.float32)


@triton.jit
def load_weight(g, h):
    """The weight of R."""
    if g.weight is None:
        return 1.0
    else:
        return tl.load(g.weight + h).to(tl.float32)


@triton.jit
def product(a, b, z):
    """a b, with b in the type of a; the result is fp32."""
    return tl.dot(a, b.to(a.dtype), input_precision=z.PRECISION)


@triton.jit
def selectors(s, z, j, dtype):
    """Matrices of 0 and 1 that copy the columns of A and of B to those of the outer product."""
    factor, column = tl.arange(0, z.FACTOR)[:, None], (j + tl.arange(0, z.COLUMNS))[None, :]
    of_left = tl.where(column // s.n == factor, 1.0, 0.0)
    of_right = tl.where(column % s.n == factor, 1.0, 0.0)
    return of_left.to(dtype), of_right.to(dtype)


@triton.jit
def tile_of_logits(g, s, z, rows, columns, r, weight, b, i, j, length):
    """S times log2(e), as exp2 is what a GPU has; minus infinity where a column is hidden, or a row is padding."""
    logits = tl.zeros([z.ROWS, z.COLUMNS], tl.float32)
    if g.q is not None:
        logits += product(rows.q, tl.trans(columns.k), z)
    if g.x is not None:
        logits += product(rows.x, tl.trans(columns.w), z)
    if g.left is not None:
        of_left, of_right = selectors(s, z, j, rows.left.dtype)
        logits += product(rows.left, of_left, z) * product(rows.right, of_right, z)
    if g.c is not None:
        logits += columns.c[None, :]
    if g.r is not None:
        logits += weight * r
    row, column = (i + tl.arange(0, z.ROWS))[:, None], (j + tl.arange(0, z.COLUMNS))[None, :]
    visible = (row < length) & (column < length)
    if z.CAUSAL:
        visible &= column <= row
    if g.hidden is not None:
        visible &= tl.load(g.hidden + tl.cast(b, tl.int64) * s.T + column, mask=column < s.T, other=1) == 0
    return tl.where(visible, logits * 1.4426950408889634, float("-inf"))


@triton.jit
def length_of(g, s, b):
    """Tokens of a sentence up to the last that is not hidden."""
    if g.hidden is None:
        return s.T
    else:
        length = 0
        for first in range(0, s.T, 128):
            column = first + tl.arange(0, 128)
            is_hidden = tl.load(g.hidden + tl.cast(b, tl.int64) * s.T + column, mask=column < s.T, other=1)
            length = tl.maximum(length, tl.max(tl.where(is_hidden == 0, column + 1, 0), 0))
        return length


@triton.jit
def kept(g, s, z, b, h, i, j):
    """What dropout multiplies a tile of weights by: 0 or 1 / (1 - p), by Philox, the same in every pass."""
    if g.seed is None:
        return 1.0
    else:
        row, column = (i + tl.arange(0, z.ROWS))[:, None], (j + tl.arange(0, z.COLUMNS))[None, :]
        number = tl.rand(tl.load(g.seed) + tl.cast(b, tl.int64) * s.H + h, row * s.T + column)
        return tl.where(number < s.dropout, 0.0, 1 / (1 - s.dropout))


@triton.jit
def outer_gradients(d, ds, rows, s, z, j):
    """What a tile of dS adds to the gradients of A and of B."""
    to_left, to_right = 0.0, 0.0
    if (d.left is not None) or (d.right is not None):
        of_left, of_right = selectors(s, z, j, rows.left.dtype)
        if d.left is not None:
            spread = (ds * product(rows.right, of_right, z)).to(rows.left.dtype)
            to_left = product(spread, tl.trans(of_left), z)
        if d.right is not None:
            spread = (ds * product(rows.left, of_left, z)).to(rows.left.dtype)
            to_right = product(spread, tl.trans(of_right), z)
    return to_left, to_right


@triton.jit
def store_columns(d, to_w, to_c, place, h, j, s, z):
    """Writes dW and dc of columns j, j + 1, ..., summed over a group of sentences, whose numbers begin at `place`."""
    column, feature = j + tl.arange(0, z.COLUMNS), tl.arange(0, z.X_BLOCK)
    if d.w is not None:
        at = d.w + place + (tl.cast(h, tl.int64) * s.T + column[:, None]) * z.X + feature[None, :]
        tl.store(at, to_w, mask=inside(j, s.T, z.X, z.COLUMNS, z.X_BLOCK))
    if d.c is not None:
        tl.store(d.c + place + tl.cast(h, tl.int64) * s.T + column, to_c, mask=column < s.T)


@triton.jit
def store_matrix(d, to_r, r, weight, place, tile, h, i, j, s, z):
    """Writes dR of a tile, and the tile's part of da, as of `store_columns`; `to_r` is the sum of dS."""
    if d.r is not None:
        row, column = (i + tl.arange(0, z.ROWS))[:, None], (j + tl.arange(0, z.COLUMNS))[None, :]
        at = d.r + place + tl.cast(h, tl.int64) * s.T * s.T + row * s.T + column
        tl.store(at, to_r * weight, mask=(row < s.T) & (column < s.T))
    if d.weight is not None:
        tl.store(d.weight + place + tile * s.H + h, tl.sum(to_r * r))
