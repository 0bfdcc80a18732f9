"""What the Triton kernels share: how tensors lie, and a tile of logits.

The kernels compute, for a head of sentence b,

    S = a_q scale Q K^T + a_x X W^T + a_o A (x) B + a_c c + a_r R,     Y = softmax(S) V

in which every summand may be absent. Q, K, X, A, B and V differ by sentence; W, the row c, the matrix R and the weights
a are shared across the batch. Column ``u n + v`` of the outer products A (x) B is ``A_u B_v``, with n columns in B.

No gradient is added atomically: every sum is of one program, in a fixed order, so that two runs are equal bit for bit.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Given(NamedTuple):
    """First elements of the tensors. None: there is no such summand, and no code for it in the compiled kernel.

    Tensors that lie side by side, as `kernels` describes them, are given as the one that they are parts of.
    """

    v: Any
    q: Any
    k: Any
    x: Any
    w: Any
    c: Any
    left: Any  # A
    right: Any  # B
    r: Any
    weights: Any  # rows of (H,); which is whose, `Constants` says
    hidden: Any  # (B, T), not 0 at padding
    seed: Any  # of dropout, (1,); None: no dropout


class Sizes(NamedTuple):
    """Where tensors lie: numbers that change from batch to batch."""

    token: Any  # strides of tokens in `packed`, and
    pair: Any  # in what holds A and B
    k: Any  # where keys, values and B begin in a token
    v: Any
    right: Any
    x_head: Any  # strides of heads and of rows
    pair_head: Any
    w_head: Any
    c_head: Any
    r_head: Any
    r_row: Any  # m, where R is its values by distance
    T: Any
    B: Any
    H: Any
    n: Any  # columns of the right factor of an outer product
    scale: Any
    dropout: Any


# what a kernel is given of them; no constants, or each batch would compile another one
INTEGERS = ("T", "B", "H", "left", "n", "w_rows", "c_columns", "r_rows", "r_columns")


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
    DIAGONALS: Any  # R is its values by distance, 2 m + 1 for each head
    PRECISION: Any  # of products of fp32
    A_Q: Any  # row of the weight of each summand; -1 for 1
    A_X: Any
    A_OUTER: Any
    A_C: Any
    A_R: Any


class Gradients(NamedTuple):
    """Where gradients go, which lie as their tensors do, or sums over a group of sentences; None: not wanted."""

    v: Any
    q: Any
    k: Any
    x: Any
    left: Any
    right: Any
    w: Any  # (groups, H, T, width), as are c and r, (groups, H, ...), each group `size` numbers after the last, in fp32
    c: Any
    r: Any
    a_q: Any  # (parts, H), in fp32, each part the sum of a program
    a_x: Any
    a_outer: Any
    a_c: Any
    a_r: Any


class Weights(NamedTuple):
    """What multiplies the summands of a head: Q K^T, X W^T, A (x) B, c and R."""

    q: Any
    x: Any
    outer: Any
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
def sizes(z, T, B, H, left, n, w_rows, c_columns, r_rows, r_columns, scale, dropout):
    """Of tensors that lie as `kernels` says; `left` and `n`: columns of the factors of an outer product."""
    r_row = r_columns
    if z.DIAGONALS:
        r_row = r_columns // 2
    return Sizes(
        H * (2 * z.Q + z.D), left + n, H * z.Q, 2 * H * z.Q, left, T * B * z.X, T * B * (left + n), w_rows * z.X,
        c_columns, r_rows * r_columns, r_row, T, B, H, n, scale, dropout,
    )  # fmt: skip


@triton.jit
def pointers(data, first, token, head, b, h, i, B, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Where rows i, i + 1, ... of a head of a sentence are, (ROWS, BLOCK); `first` and strides: multiples of UNIT."""
    # the compiler forgets what it is told of an argument; of a number that is computed here it does not
    token, head = tl.multiple_of(tl.cast(token, tl.int64), UNIT), tl.multiple_of(tl.cast(head, tl.int64), UNIT)
    data += tl.multiple_of(tl.cast(first, tl.int64), UNIT) + h * head
    rows = tl.cast(i + tl.arange(0, ROWS), tl.int64) * B + b
    return data + rows[:, None] * token + tl.arange(0, BLOCK)[None, :]


@triton.jit
def inside(i, T, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Which of these elements exist."""
    return (i + tl.arange(0, ROWS) < T)[:, None] & (tl.arange(0, BLOCK) < width)[None, :]


@triton.jit
def load_rows(data, first, token, head, b, h, i, s, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Rows i, i + 1, ... of a sentence; 0 where there are none."""
    if data is None:
        return 0.0
    else:
        at = pointers(data, first, token, head, b, h, i, s.B, ROWS, BLOCK, UNIT)
        return tl.load(at, mask=inside(i, s.T, width, ROWS, BLOCK), other=0.0)


@triton.jit
def store_rows(
    data, value, first, token, head, b, h, i, s, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr
):
    """Writes rows i, i + 1, ... of a sentence, if there is such a tensor."""
    if data is not None:
        at = pointers(data, first, token, head, b, h, i, s.B, ROWS, BLOCK, UNIT)
        tl.store(at, value.to(data.dtype.element_ty), mask=inside(i, s.T, width, ROWS, BLOCK))


@triton.jit
def load_row_factors(g, s, z, b, h, i):
    q = load_rows(g.q, 0, s.token, z.Q, b, h, i, s, z.Q, z.ROWS, z.Q_BLOCK, z.UNIT)
    x = load_rows(g.x, 0, z.X, s.x_head, b, h, i, s, z.X, z.ROWS, z.X_BLOCK, z.UNIT)
    left = load_rows(g.left, 0, s.pair, s.pair_head, b, h, i, s, tl.cdiv(s.T, s.n), z.ROWS, z.FACTOR, 1)
    right = load_rows(g.right, s.right, s.pair, s.pair_head, b, h, i, s, s.n, z.ROWS, z.FACTOR, 1)
    return RowFactors(q, x, left, right)


@triton.jit
def load_column_factors(g, s, z, b, h, j):
    k = load_rows(g.k, s.k, s.token, z.Q, b, h, j, s, z.Q, z.COLUMNS, z.Q_BLOCK, z.UNIT)
    return ColumnFactors(k, load_shared_keys(g, s, z, h, j), load_row(g, s, z, h, j))


@triton.jit
def load_shared_keys(g, s, z, h, j):
    """Rows j, j + 1, ... of W."""
    if g.w is None:
        return 0.0
    else:
        column = j + tl.arange(0, z.COLUMNS)
        first = g.w + h * tl.multiple_of(tl.cast(s.w_head, tl.int64), z.UNIT)
        at = first + column[:, None] * z.X + tl.arange(0, z.X_BLOCK)[None, :]
        return tl.load(at, mask=inside(j, s.T, z.X, z.COLUMNS, z.X_BLOCK), other=0.0)


@triton.jit
def load_row(g, s, z, h, j):
    """Columns j, j + 1, ... of c."""
    if g.c is None:
        return 0.0
    else:
        column = j + tl.arange(0, z.COLUMNS)
        return tl.load(g.c + tl.cast(h, tl.int64) * s.c_head + column, mask=column < s.T, other=0.0).to(tl.float32)


@triton.jit
def load_values(g, s, z, b, h, j):
    return load_rows(g.v, s.v, s.token, z.D, b, h, j, s, z.D, z.COLUMNS, z.D_BLOCK, z.UNIT)


@triton.jit
def load_matrix(g, s, z, h, i, j):
    """A tile of R."""
    if g.r is None:
        return 0.0
    else:
        row, column = (i + tl.arange(0, z.ROWS))[:, None], (j + tl.arange(0, z.COLUMNS))[None, :]
        if z.DIAGONALS:
            place = tl.minimum(tl.maximum(column - row, -s.r_row), s.r_row) + s.r_row
        else:
            place = row * s.r_row + column
        at = g.r + tl.cast(h, tl.int64) * s.r_head + place
        return tl.load(at, mask=(row < s.T) & (column < s.T), other=0.0).to(tl.float32)


@triton.jit
def load_weight(g, s, h, row: tl.constexpr):
    if row < 0:
        return 1.0
    else:
        return tl.load(g.weights + row * s.H + h).to(tl.float32)


@triton.jit
def load_weights(g, s, z, h):
    q, x, outer = load_weight(g, s, h, z.A_Q), load_weight(g, s, h, z.A_X), load_weight(g, s, h, z.A_OUTER)
    return Weights(q * s.scale, x, outer, load_weight(g, s, h, z.A_C), load_weight(g, s, h, z.A_R))


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
        logits += product(rows.q, tl.trans(columns.k), z) * a.q
    if g.x is not None:
        logits += product(rows.x, tl.trans(columns.w), z) * a.x
    if g.left is not None:
        of_left, of_right = selectors(s, z, j, rows.left.dtype)
        logits += product(rows.left, of_left, z) * product(rows.right, of_right, z) * a.outer
    if g.c is not None:
        logits += (columns.c * a.c)[None, :]
    if g.r is not None:
        logits += r * a.r
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
def row_gradients(d, ds, rows, columns, s, z, j):
    """What a tile of dS adds to dQ, dX, dA and dB, but for the weights."""
    to_q, to_x, to_left, to_right = 0.0, 0.0, 0.0, 0.0
    if (d.q is not None) or (d.a_q is not None):
        to_q = product(ds.to(columns.k.dtype), columns.k, z)
    if (d.x is not None) or (d.a_x is not None):
        to_x = product(ds.to(rows.x.dtype), columns.w, z)
    if (d.left is not None) or (d.right is not None) or (d.a_outer is not None):
        of_left, of_right = selectors(s, z, j, rows.left.dtype)
        if (d.left is not None) or (d.a_outer is not None):
            spread = (ds * product(rows.right, of_right, z)).to(rows.left.dtype)
            to_left = product(spread, tl.trans(of_left), z)
        if d.right is not None:
            spread = (ds * product(rows.left, of_left, z)).to(rows.left.dtype)
            to_right = product(spread, tl.trans(of_right), z)
    return RowFactors(to_q, to_x, to_left, to_right)


@triton.jit
def store_row_gradients(d, to, a, s, z, b, h, i):
    """Writes dQ, dX, dA and dB of rows i, i + 1, ... of a sentence; `to` lacks the weights."""
    store_rows(d.q, to.q * a.q, 0, s.token, z.Q, b, h, i, s, z.Q, z.ROWS, z.Q_BLOCK, z.UNIT)
    store_rows(d.x, to.x * a.x, 0, z.X, s.x_head, b, h, i, s, z.X, z.ROWS, z.X_BLOCK, z.UNIT)
    width = tl.cdiv(s.T, s.n)
    store_rows(d.left, to.left * a.outer, 0, s.pair, s.pair_head, b, h, i, s, width, z.ROWS, z.FACTOR, 1)
    store_rows(d.right, to.right * a.outer, s.right, s.pair, s.pair_head, b, h, i, s, s.n, z.ROWS, z.FACTOR, 1)


@triton.jit
def mean_outer(d, p, rows, s, z, j):
    """What a tile of P adds to the mean of the outer product in each row, where the weight's gradient is wanted."""
    if d.a_outer is None:
        return 0.0
    else:
        of_left, of_right = selectors(s, z, j, rows.left.dtype)
        return tl.sum(p * product(rows.left, of_left, z) * product(rows.right, of_right, z), 1)


@triton.jit
def row_weights(d, rows, to, s):
    """What rows add to da_q, da_x and da_o: ``sum(dS * Q K^T)`` is ``sum(Q * dS K)``, and so on."""
    to_q, to_x, to_outer = 0.0, 0.0, 0.0
    if d.a_q is not None:
        to_q = tl.sum(rows.q.to(tl.float32) * to.q) * s.scale
    if d.a_x is not None:
        to_x = tl.sum(rows.x.to(tl.float32) * to.x)
    if d.a_outer is not None:
        to_outer = tl.sum(rows.left.to(tl.float32) * to.left)
    return to_q, to_x, to_outer


@triton.jit
def store_part(data, value, part, h, s):
    """Writes a program's part of the gradient of a weight, if it is wanted."""
    if data is not None:
        tl.store(data + part * s.H + h, value)


@triton.jit
def store_columns(d, to_w, to_c, c, a, place, part, h, j, s, z):
    """Writes dW, dc and da_c of columns j, j + 1, ..., summed over a group of sentences.

    Numbers of the group begin at `place`; `to_w` and `to_c` lack the weights.
    """
    column, feature = j + tl.arange(0, z.COLUMNS), tl.arange(0, z.X_BLOCK)
    if d.w is not None:
        at = d.w + place + (tl.cast(h, tl.int64) * s.T + column[:, None]) * z.X + feature[None, :]
        tl.store(at, to_w * a.x, mask=inside(j, s.T, z.X, z.COLUMNS, z.X_BLOCK))
    if d.c is not None:
        tl.store(d.c + place + tl.cast(h, tl.int64) * s.T + column, to_c * a.c, mask=column < s.T)
    store_part(d.a_c, tl.sum(to_c * c), part, h, s)


@triton.jit
def store_matrix(d, to_r, r, a, place, part, h, i, j, s, z):
    """Writes dR of a tile, and the tile's part of da_r, as in `store_columns`; `to_r` is the sum of dS."""
    if d.r is not None:
        row, column = (i + tl.arange(0, z.ROWS))[:, None], (j + tl.arange(0, z.COLUMNS))[None, :]
        at = d.r + place + tl.cast(h, tl.int64) * s.T * s.T + row * s.T + column
        tl.store(at, to_r * a.r, mask=(row < s.T) & (column < s.T))
    store_part(d.a_r, tl.sum(to_r * r), part, h, s)
