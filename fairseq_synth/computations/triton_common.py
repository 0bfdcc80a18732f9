"""What the Triton kernels share: how tensors lie, and a tile of logits.

The kernels compute, for a head of sentence b,

    S = a_q Q K^T + a_x X W^T + a_o A (x) B + a_c c + a_r R,     Y = softmax(S) V

in which every summand may be absent. Q, K, X, A, B and V differ by sentence; W, the row c, the matrix R and the
weights a, a number each, are shared across the batch. Column ``u n + v`` of the outer products A (x) B is ``A_u B_v``,
with n columns in B.

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
    a_q: Any  # the weights, (H,); None for 1
    a_x: Any
    a_o: Any
    a_c: Any
    a_r: Any
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
    scale: Any  # that Q K^T is multiplied by beside its weight
    dropout: Any


INTEGERS = Sizes._fields[:-2]  # Triton makes no constants of floats


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
    a_q: Any
    a_x: Any
    a_o: Any
    a_c: Any
    a_r: Any


class Weights(NamedTuple):
    """What the summands are multiplied by."""

    q: Any
    x: Any
    o: Any
    c: Any
    r: Any


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
    w = 0.0
    if g.w is not None:
        column = j + tl.arange(0, z.COLUMNS)
        first = g.w + tl.cast(h, tl.int64) * tl.multiple_of(s.w_head, z.UNIT)
        at = first + column[:, None] * z.X + tl.arange(0, z.X_BLOCK)[None, :]
        w = tl.load(at, mask=inside(j, s.T, z.X, z.COLUMNS, z.X_BLOCK), other=0.0)
    return ColumnFactors(k, w, load_row(g, s, z, h, j))


@triton.jit
def load_row(g, s, z, h, j):
    """Columns of c."""
    if g.c is None:
        return 0.0
    else:
        column = j + tl.arange(0, z.COLUMNS)
        return tl.load(g.c + h * s.c_head + column, mask=column < s.T, other=0.0).to(tl.float32)


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
def load_weight(data, h):
    """The weight of a summand."""
    if data is None:
        return 1.0
    else:
        return tl.load(data + h).to(tl.float32)


@triton.jit
def load_weights(g, s, h):
    """The weights of all summands in a head."""
    q = s.scale * load_weight(g.a_q, h)
    return Weights(q, load_weight(g.a_x, h), load_weight(g.a_o, h), load_weight(g.a_c, h), load_weight(g.a_r, h))


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
def tile_of_logits(g, s, z, rows, columns, r, a, b, i, j, length):
    """S times log2(e), as exp2 is what a GPU has; minus infinity where a column is hidden, or a row is padding."""
    logits = tl.zeros([z.ROWS, z.COLUMNS], tl.float32)
    if g.q is not None:
        logits += a.q * product(rows.q, tl.trans(columns.k), z)
    if g.x is not None:
        logits += a.x * product(rows.x, tl.trans(columns.w), z)
    if g.left is not None:
        of_left, of_right = selectors(s, z, j, rows.left.dtype)
        logits += a.o * product(rows.left, of_left, z) * product(rows.right, of_right, z)
    if g.c is not None:
        logits += a.c * columns.c[None, :]
    if g.r is not None:
        logits += a.r * r
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
def to_outer_factors(ds, rows, s, z, j, is_left: tl.constexpr):
    """The gradient of the left or the right factors of a tile's rows, but for their weight."""
    of_left, of_right = selectors(s, z, j, rows.left.dtype)
    if is_left:
        other, own = product(rows.right, of_right, z), of_left
    else:
        other, own = product(rows.left, of_left, z), of_right
    return product((ds * other).to(rows.left.dtype), tl.trans(own), z)


@triton.jit
def store_of_rows(d, to_q, to_x, to_left, to_right, a, b, h, i, s, z):
    """Writes the gradients of the factors of rows."""
    store_rows(d.q, to_q * a.q, b, h, i, s, z.Q, z.ROWS, z.Q_BLOCK)
    store_rows(d.x, to_x * a.x, b, h, i, s, z.X, z.ROWS, z.X_BLOCK)
    store_rows(d.left, to_left * a.o, b, h, i, s, tl.cdiv(s.T, s.n), z.ROWS, z.FACTOR)
    store_rows(d.right, to_right * a.o, b, h, i, s, s.n, z.ROWS, z.FACTOR)


@triton.jit
def store_of_columns(g, d, to_w, to_c, a, first, weight, h, j, s, z):
    """Writes the gradients of W, c and the weight of c.

    Args:
        first: where the sums of this group begin.
        weight: where that of this tile and head is, after the first of `d.a_c`.
    """
    head = tl.cast(h, tl.int64) * s.T
    column, feature = j + tl.arange(0, z.COLUMNS), tl.arange(0, z.X_BLOCK)
    if d.w is not None:
        at = d.w + first + (head + column[:, None]) * z.X + feature[None, :]
        tl.store(at, to_w * a.x, mask=(column < s.T)[:, None] & (feature < z.X)[None, :])
    if d.c is not None:
        tl.store(d.c + first + head + column, to_c * a.c, mask=column < s.T)
    if d.a_c is not None:
        tl.store(d.a_c + first + weight, tl.sum(to_c * load_row(g, s, z, h, j)))


@triton.jit
def store_matrix(g, d, to_r, a, first, weight, h, i, j, s, z):
    """Writes the gradients of a tile of R and of its weight; `first` and `weight` as of `store_of_columns`."""
    row, column = i + tl.arange(0, z.ROWS), j + tl.arange(0, z.COLUMNS)
    if d.r is not None:
        at = d.r + first + (tl.cast(h, tl.int64) * s.T + row[:, None]) * s.T + column[None, :]
        tl.store(at, to_r * a.r, mask=(row < s.T)[:, None] & (column < s.T)[None, :])
    if d.a_r is not None:
        tl.store(d.a_r + first + weight, tl.sum(to_r * load_matrix(g, s, z, h, i, j)))
