"""What the Triton kernels share: how they read tensors, and how they compute a tile of logits.

The kernels compute, for a head of sentence b,

    S = a_q scale Q K^T + a_x X W^T + a_o A (x) B + a_c c + a_r R,     Y = softmax(S) V

in which every summand may be absent. Q, K, X, A, B and V differ by sentence. W, the row c, the matrix R and the weights
a are shared across the batch. Column ``u n + v`` of the outer product A (x) B is ``A_u B_v``, where B has n columns.

No gradient is added atomically: each sum is computed by one program, in a fixed order, so that two runs are equal bit
for bit.

Names in all kernels, which are those of the formula where it has one:

===================  =========================================================================================
h, b                 head, sentence
i, j                 the first row and the first column of a tile
length               tokens of the sentence up to its last visible one
p, ds, dy            a tile of the weights softmax(S); gradients of S and of Y
to_q, to_r, ...      sums for gradients, without the weights
tensors, gradients   `Tensors`, `Gradients`: where the tensors begin, and where their gradients go
sizes, constants     `Sizes`, `Constants`: numbers that change from batch to batch, and those that do not
weights              `Weights`: the numbers that multiply the summands in a head
rows, columns        `RowFactors`, `ColumnFactors`: the factors of a tile of logits
===================  =========================================================================================

Triton accepts structures only as named tuples without types of its own, so that all fields are of type Any.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Tensors(NamedTuple):
    """Pointers to the tensors of a call.

    A field is None if there is no such tensor; the compiled kernel then has no code for it. Tensors that lie side by
    side, as `tensors` describes them, all point to the tensor that they are parts of.
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
    weights: Any  # (M, H); `Constants` says which row is whose
    hidden: Any  # (B, T), not 0 at padding
    seed: Any  # (1,), for dropout


class Numbers(NamedTuple):
    """The numbers that every kernel is given, in the order of its arguments.

    They are arguments and not constants, because a kernel would be compiled for each value of a constant.
    """

    T: Any
    B: Any
    H: Any
    left: Any  # columns of the left and the right factor of an outer product
    right: Any
    w_rows: Any
    c_columns: Any
    r_rows: Any
    r_columns: Any
    scale: Any
    dropout: Any


INTEGERS = Numbers._fields[: Numbers._fields.index("scale")]


class Sizes(NamedTuple):
    """Where the elements of tensors are."""

    token: Any  # stride of a token in `packed`
    pair_token: Any  # stride of a token in what holds A and B
    k_start: Any  # where keys, values and B begin in a token
    v_start: Any
    right_start: Any
    x_head: Any  # strides of heads
    pair_head: Any
    w_head: Any
    c_head: Any
    r_head: Any
    r_row: Any  # stride of a row of R; m, if R is its values by distance
    T: Any
    B: Any
    H: Any
    right_width: Any  # columns of the right factor of an outer product
    scale: Any
    dropout: Any


class Constants(NamedTuple):
    """What a kernel is compiled for."""

    D: Any  # features of V, and the power of two that holds them
    D_BLOCK: Any
    Q: Any  # features of Q and K
    Q_BLOCK: Any
    X: Any  # features of X and W
    X_BLOCK: Any
    FACTOR: Any  # a power of two that holds the columns of A and of B
    ROWS: Any  # how many rows a tile has
    COLUMNS: Any
    UNIT: Any  # all strides are multiples of it, so that several numbers are read at once
    CAUSAL: Any
    DIAGONALS: Any  # R is its values by distance, 2 m + 1 for each head
    PRECISION: Any  # how products in fp32 are rounded: "ieee" or "tf32"
    A_Q: Any  # the row of weights that multiplies Q K^T; -1 for a weight of 1
    A_X: Any
    A_OUTER: Any
    A_C: Any
    A_R: Any


class Gradients(NamedTuple):
    """Pointers to what a backward pass writes; None if it is not wanted.

    These are gradients that lie as their tensors do, or sums in fp32.
    """

    v: Any
    q: Any
    k: Any
    x: Any
    left: Any
    right: Any
    w: Any  # sums over groups of sentences: (H, T, X) for w, (H, T) for c, (H, T, T) for r,
    c: Any  # where group g begins at ``g * size``
    r: Any
    a_q: Any  # sums of single programs, (programs, H)
    a_x: Any
    a_outer: Any
    a_c: Any
    a_r: Any


class Weights(NamedTuple):
    """The numbers that multiply the summands in a head; for Q K^T it is the weight times the scale."""

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
def find_sizes(constants, T, B, H, left, right, w_rows, c_columns, r_rows, r_columns, scale, dropout):
    """Returns `Sizes` for tensors that lie as `tensors` describes them."""
    r_row = r_columns
    if constants.DIAGONALS:
        r_row = r_columns // 2
    return Sizes(
        H * (2 * constants.Q + constants.D),  # token
        left + right,  # pair_token
        H * constants.Q,  # k_start
        2 * H * constants.Q,  # v_start
        left,  # right_start
        T * B * constants.X,  # x_head
        T * B * (left + right),  # pair_head
        w_rows * constants.X,  # w_head
        c_columns,  # c_head
        r_rows * r_columns,  # r_head
        r_row,
        T,
        B,
        H,
        right,  # right_width
        scale,
        dropout,
    )


@triton.jit
def pointers(data, first, token, head, b, h, i, B, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Returns pointers to rows i, i + 1, ... of a head of a sentence, (ROWS, BLOCK).

    `first` is where the first token begins; it and the strides of tokens and heads are multiples of UNIT.
    """
    # The compiler forgets what it is told about an argument, but not about a number that is computed here.
    token = tl.multiple_of(tl.cast(token, tl.int64), UNIT)
    head = tl.multiple_of(tl.cast(head, tl.int64), UNIT)
    data += tl.multiple_of(tl.cast(first, tl.int64), UNIT) + h * head
    rows = tl.cast(i + tl.arange(0, ROWS), tl.int64) * B + b
    return data + rows[:, None] * token + tl.arange(0, BLOCK)[None, :]


@triton.jit
def inside(i, T, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns which elements of rows i, i + 1, ... exist."""
    return (i + tl.arange(0, ROWS) < T)[:, None] & (tl.arange(0, BLOCK) < width)[None, :]


@triton.jit
def load_rows(
    data, first, token, head, b, h, i, sizes, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr
):
    """Returns rows i, i + 1, ... of a sentence, with 0 beyond its end; 0 if there is no such tensor."""
    if data is None:
        return 0.0
    else:
        at = pointers(data, first, token, head, b, h, i, sizes.B, ROWS, BLOCK, UNIT)
        return tl.load(at, mask=inside(i, sizes.T, width, ROWS, BLOCK), other=0.0)


@triton.jit
def store_rows(
    data, value, first, token, head, b, h, i, sizes, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr
):
    """Writes rows i, i + 1, ... of a sentence, if the tensor is wanted."""
    if data is not None:
        at = pointers(data, first, token, head, b, h, i, sizes.B, ROWS, BLOCK, UNIT)
        tl.store(at, value.to(data.dtype.element_ty), mask=inside(i, sizes.T, width, ROWS, BLOCK))


@triton.jit
def load_output_rows(data, sizes, constants, b, h, i):
    """Returns rows i, i + 1, ... of a head of Y or dY, which are (T, B, H, d_h)."""
    return load_rows(
        data,
        0,
        sizes.H * constants.D,
        constants.D,
        b,
        h,
        i,
        sizes,
        constants.D,
        constants.ROWS,
        constants.D_BLOCK,
        constants.UNIT,
    )


@triton.jit
def store_output_rows(data, value, sizes, constants, b, h, i):
    """Writes rows i, i + 1, ... of a head of Y, (T, B, H, d_h)."""
    store_rows(
        data,
        value,
        0,
        sizes.H * constants.D,
        constants.D,
        b,
        h,
        i,
        sizes,
        constants.D,
        constants.ROWS,
        constants.D_BLOCK,
        constants.UNIT,
    )


@triton.jit
def store_value_gradients(gradients, dv, sizes, constants, b, h, j):
    """Writes rows j, j + 1, ... of dV, if it is wanted."""
    store_rows(
        gradients.v,
        dv,
        sizes.v_start,
        sizes.token,
        constants.D,
        b,
        h,
        j,
        sizes,
        constants.D,
        constants.COLUMNS,
        constants.D_BLOCK,
        constants.UNIT,
    )


@triton.jit
def store_key_gradients(gradients, dk, sizes, constants, b, h, j):
    """Writes rows j, j + 1, ... of dK, if it is wanted."""
    store_rows(
        gradients.k,
        dk,
        sizes.k_start,
        sizes.token,
        constants.Q,
        b,
        h,
        j,
        sizes,
        constants.Q,
        constants.COLUMNS,
        constants.Q_BLOCK,
        constants.UNIT,
    )


@triton.jit
def load_row_factors(tensors, sizes, constants, b, h, i):
    """Returns the factors of rows i, i + 1, ... of a sentence."""
    q = load_rows(
        tensors.q,
        0,
        sizes.token,
        constants.Q,
        b,
        h,
        i,
        sizes,
        constants.Q,
        constants.ROWS,
        constants.Q_BLOCK,
        constants.UNIT,
    )
    x = load_rows(
        tensors.x,
        0,
        constants.X,
        sizes.x_head,
        b,
        h,
        i,
        sizes,
        constants.X,
        constants.ROWS,
        constants.X_BLOCK,
        constants.UNIT,
    )
    left = load_rows(
        tensors.left,
        0,
        sizes.pair_token,
        sizes.pair_head,
        b,
        h,
        i,
        sizes,
        tl.cdiv(sizes.T, sizes.right_width),
        constants.ROWS,
        constants.FACTOR,
        1,
    )
    right = load_rows(
        tensors.right,
        sizes.right_start,
        sizes.pair_token,
        sizes.pair_head,
        b,
        h,
        i,
        sizes,
        sizes.right_width,
        constants.ROWS,
        constants.FACTOR,
        1,
    )
    return RowFactors(q, x, left, right)


@triton.jit
def load_column_factors(tensors, sizes, constants, b, h, j):
    """Returns the factors of columns j, j + 1, ... of a sentence."""
    k = load_rows(
        tensors.k,
        sizes.k_start,
        sizes.token,
        constants.Q,
        b,
        h,
        j,
        sizes,
        constants.Q,
        constants.COLUMNS,
        constants.Q_BLOCK,
        constants.UNIT,
    )
    return ColumnFactors(
        k, load_shared_keys(tensors, sizes, constants, h, j), load_row(tensors, sizes, constants, h, j)
    )


@triton.jit
def load_shared_keys(tensors, sizes, constants, h, j):
    """Returns rows j, j + 1, ... of W."""
    if tensors.w is None:
        return 0.0
    else:
        column = j + tl.arange(0, constants.COLUMNS)
        first = tensors.w + h * tl.multiple_of(tl.cast(sizes.w_head, tl.int64), constants.UNIT)
        at = first + column[:, None] * constants.X + tl.arange(0, constants.X_BLOCK)[None, :]
        return tl.load(at, mask=inside(j, sizes.T, constants.X, constants.COLUMNS, constants.X_BLOCK), other=0.0)


@triton.jit
def load_row(tensors, sizes, constants, h, j):
    """Returns columns j, j + 1, ... of c."""
    if tensors.c is None:
        return 0.0
    else:
        column = j + tl.arange(0, constants.COLUMNS)
        return tl.load(tensors.c + tl.cast(h, tl.int64) * sizes.c_head + column, mask=column < sizes.T, other=0.0).to(
            tl.float32
        )


@triton.jit
def load_values(tensors, sizes, constants, b, h, j):
    """Returns rows j, j + 1, ... of V."""
    return load_rows(
        tensors.v,
        sizes.v_start,
        sizes.token,
        constants.D,
        b,
        h,
        j,
        sizes,
        constants.D,
        constants.COLUMNS,
        constants.D_BLOCK,
        constants.UNIT,
    )


@triton.jit
def load_matrix(tensors, sizes, constants, h, i, j):
    """Returns a tile of R."""
    if tensors.r is None:
        return 0.0
    else:
        row = (i + tl.arange(0, constants.ROWS))[:, None]
        column = (j + tl.arange(0, constants.COLUMNS))[None, :]
        if constants.DIAGONALS:
            place = tl.minimum(tl.maximum(column - row, -sizes.r_row), sizes.r_row) + sizes.r_row
        else:
            place = row * sizes.r_row + column
        at = tensors.r + tl.cast(h, tl.int64) * sizes.r_head + place
        return tl.load(at, mask=(row < sizes.T) & (column < sizes.T), other=0.0).to(tl.float32)


@triton.jit
def load_weight(tensors, sizes, h, row: tl.constexpr):
    """Returns a head's number in a row of the weights; 1 for row -1."""
    if row < 0:
        return 1.0
    else:
        return tl.load(tensors.weights + row * sizes.H + h).to(tl.float32)


@triton.jit
def load_weights(tensors, sizes, constants, h):
    """Returns the weights of all summands in a head."""
    q = load_weight(tensors, sizes, h, constants.A_Q) * sizes.scale
    x = load_weight(tensors, sizes, h, constants.A_X)
    outer = load_weight(tensors, sizes, h, constants.A_OUTER)
    c = load_weight(tensors, sizes, h, constants.A_C)
    r = load_weight(tensors, sizes, h, constants.A_R)
    return Weights(q, x, outer, c, r)


@triton.jit
def product(a, b, constants):
    """Returns the matrix product a b in fp32, with b rounded to the type of a."""
    return tl.dot(a, b.to(a.dtype), input_precision=constants.PRECISION)


@triton.jit
def selectors(sizes, constants, j, dtype):
    """Returns matrices of 0 and 1 that copy the columns of A and of B to those of the outer product."""
    factor = tl.arange(0, constants.FACTOR)[:, None]
    column = (j + tl.arange(0, constants.COLUMNS))[None, :]
    of_left = tl.where(column // sizes.right_width == factor, 1.0, 0.0)
    of_right = tl.where(column % sizes.right_width == factor, 1.0, 0.0)
    return of_left.to(dtype), of_right.to(dtype)


@triton.jit
def tile_of_logits(tensors, sizes, constants, rows, columns, r, weights, b, i, j, length):
    """Returns a tile of S times log2(e), because a GPU computes exp2.

    It is minus infinity where a column is hidden or a row is padding.
    """
    logits = tl.zeros([constants.ROWS, constants.COLUMNS], tl.float32)
    if tensors.q is not None:
        logits += product(rows.q, tl.trans(columns.k), constants) * weights.q
    if tensors.x is not None:
        logits += product(rows.x, tl.trans(columns.w), constants) * weights.x
    if tensors.left is not None:
        of_left, of_right = selectors(sizes, constants, j, rows.left.dtype)
        logits += product(rows.left, of_left, constants) * product(rows.right, of_right, constants) * weights.outer
    if tensors.c is not None:
        logits += (columns.c * weights.c)[None, :]
    if tensors.r is not None:
        logits += r * weights.r
    row = (i + tl.arange(0, constants.ROWS))[:, None]
    column = (j + tl.arange(0, constants.COLUMNS))[None, :]
    visible = (row < length) & (column < length)
    if constants.CAUSAL:
        visible &= column <= row
    if tensors.hidden is not None:
        visible &= (
            tl.load(tensors.hidden + tl.cast(b, tl.int64) * sizes.T + column, mask=column < sizes.T, other=1) == 0
        )
    return tl.where(visible, logits * 1.4426950408889634, float("-inf"))


@triton.jit
def length_of(tensors, sizes, b):
    """Returns the number of tokens of a sentence up to the last one that is not hidden."""
    if tensors.hidden is None:
        return sizes.T
    else:
        length = 0
        for first in range(0, sizes.T, 128):
            column = first + tl.arange(0, 128)
            is_hidden = tl.load(
                tensors.hidden + tl.cast(b, tl.int64) * sizes.T + column, mask=column < sizes.T, other=1
            )
            length = tl.maximum(length, tl.max(tl.where(is_hidden == 0, column + 1, 0), 0))
        return length


@triton.jit
def kept(tensors, sizes, constants, b, h, i, j):
    """Returns what dropout multiplies a tile of weights by: 0 or 1 / (1 - p).

    The random numbers are Philox's, and the same in every pass.
    """
    if tensors.seed is None:
        return 1.0
    else:
        row = (i + tl.arange(0, constants.ROWS))[:, None]
        column = (j + tl.arange(0, constants.COLUMNS))[None, :]
        number = tl.rand(tl.load(tensors.seed) + tl.cast(b, tl.int64) * sizes.H + h, row * sizes.T + column)
        return tl.where(number < sizes.dropout, 0.0, 1 / (1 - sizes.dropout))


@triton.jit
def row_gradients(gradients, ds, rows, columns, sizes, constants, j):
    """Returns what a tile of dS adds to dQ, dX, dA and dB, without the weights."""
    to_q = 0.0
    to_x = 0.0
    to_left = 0.0
    to_right = 0.0
    if (gradients.q is not None) or (gradients.a_q is not None):
        to_q = product(ds.to(columns.k.dtype), columns.k, constants)
    if (gradients.x is not None) or (gradients.a_x is not None):
        to_x = product(ds.to(rows.x.dtype), columns.w, constants)
    if (gradients.left is not None) or (gradients.right is not None) or (gradients.a_outer is not None):
        of_left, of_right = selectors(sizes, constants, j, rows.left.dtype)
        if (gradients.left is not None) or (gradients.a_outer is not None):
            spread = (ds * product(rows.right, of_right, constants)).to(rows.left.dtype)
            to_left = product(spread, tl.trans(of_left), constants)
        if gradients.right is not None:
            spread = (ds * product(rows.left, of_left, constants)).to(rows.left.dtype)
            to_right = product(spread, tl.trans(of_right), constants)
    return RowFactors(to_q, to_x, to_left, to_right)


@triton.jit
def store_row_gradients(gradients, to, weights, sizes, constants, b, h, i):
    """Writes dQ, dX, dA and dB of rows i, i + 1, ... of a sentence, which are `to` times the weights."""
    store_rows(
        gradients.q,
        to.q * weights.q,
        0,
        sizes.token,
        constants.Q,
        b,
        h,
        i,
        sizes,
        constants.Q,
        constants.ROWS,
        constants.Q_BLOCK,
        constants.UNIT,
    )
    store_rows(
        gradients.x,
        to.x * weights.x,
        0,
        constants.X,
        sizes.x_head,
        b,
        h,
        i,
        sizes,
        constants.X,
        constants.ROWS,
        constants.X_BLOCK,
        constants.UNIT,
    )
    width = tl.cdiv(sizes.T, sizes.right_width)
    store_rows(
        gradients.left,
        to.left * weights.outer,
        0,
        sizes.pair_token,
        sizes.pair_head,
        b,
        h,
        i,
        sizes,
        width,
        constants.ROWS,
        constants.FACTOR,
        1,
    )
    store_rows(
        gradients.right,
        to.right * weights.outer,
        sizes.right_start,
        sizes.pair_token,
        sizes.pair_head,
        b,
        h,
        i,
        sizes,
        sizes.right_width,
        constants.ROWS,
        constants.FACTOR,
        1,
    )


@triton.jit
def mean_outer(gradients, p, rows, sizes, constants, j):
    """Returns what a tile of P adds to the mean of the outer product in each row; 0 if its weight needs no gradient."""
    if gradients.a_outer is None:
        return 0.0
    else:
        of_left, of_right = selectors(sizes, constants, j, rows.left.dtype)
        return tl.sum(p * product(rows.left, of_left, constants) * product(rows.right, of_right, constants), 1)


@triton.jit
def row_weights(gradients, rows, to, sizes):
    """Returns what rows add to da_q, da_x and da_o: ``sum(dS * Q K^T)`` is ``sum(Q * dS K)``, and so on."""
    to_q = 0.0
    to_x = 0.0
    to_outer = 0.0
    if gradients.a_q is not None:
        to_q = tl.sum(rows.q.to(tl.float32) * to.q) * sizes.scale
    if gradients.a_x is not None:
        to_x = tl.sum(rows.x.to(tl.float32) * to.x)
    if gradients.a_outer is not None:
        to_outer = tl.sum(rows.left.to(tl.float32) * to.left)
    return to_q, to_x, to_outer


@triton.jit
def store_part(data, value, part, h, sizes):
    """Writes a program's part of the gradient of a weight, if it is wanted."""
    if data is not None:
        tl.store(data + part * sizes.H + h, value)


@triton.jit
def store_columns(gradients, to_w, to_c, c, weights, place, part, h, j, sizes, constants):
    """Writes dW, dc and da_c of columns j, j + 1, ..., summed over a group of sentences.

    The numbers of the group begin at `place`. `to_w` and `to_c` are the sums without the weights.
    """
    column = j + tl.arange(0, constants.COLUMNS)
    feature = tl.arange(0, constants.X_BLOCK)
    if gradients.w is not None:
        at = gradients.w + place + (tl.cast(h, tl.int64) * sizes.T + column[:, None]) * constants.X + feature[None, :]
        tl.store(at, to_w * weights.x, mask=inside(j, sizes.T, constants.X, constants.COLUMNS, constants.X_BLOCK))
    if gradients.c is not None:
        tl.store(gradients.c + place + tl.cast(h, tl.int64) * sizes.T + column, to_c * weights.c, mask=column < sizes.T)
    store_part(gradients.a_c, tl.sum(to_c * c), part, h, sizes)


@triton.jit
def store_matrix(gradients, to_r, r, weights, place, part, h, i, j, sizes, constants):
    """Writes dR of a tile, and the tile's part of da_r, as `store_columns` does; `to_r` is the sum of dS."""
    if gradients.r is not None:
        row = (i + tl.arange(0, constants.ROWS))[:, None]
        column = (j + tl.arange(0, constants.COLUMNS))[None, :]
        at = gradients.r + place + tl.cast(h, tl.int64) * sizes.T * sizes.T + row * sizes.T + column
        tl.store(at, to_r * weights.r, mask=(row < sizes.T) & (column < sizes.T))
    store_part(gradients.a_r, tl.sum(to_r * r), part, h, sizes)
