"""What the Triton kernels share: how they read tensors, and how they compute a tile of logits.

The file `arguments` has the formula of the logits S, and the names of its summands and tensors. Q, K, X, A, B and V
differ by sentence. W, the row c, the matrix R and the weights a are shared across the batch. Column ``u n + v`` of the
outer product A (x) B is ``A_u B_v``, where B has n columns.

No gradient is added atomically: each sum is computed by one program, in a fixed order, so that two runs are equal bit
for bit.

Names in all kernels, which are those of the formula where it has one:

===================  =========================================================================================
h, b                 head, sentence
i, j                 the first row and the first column of a tile
length               tokens of the sentence up to its last visible one
q, k, v, x, w, c, r  tiles of Q, K, V, X, W, c and R
p, ds, y, dy         a tile of the weights softmax(S); gradients of S; rows of Y; gradients of Y
to_q, to_r, ...      sums for gradients, without the weights
tensors, gradients   `CallTensors`: where the tensors begin, and where their gradients go
sums                 `PartialSums`: where partial sums of gradients go
sizes, constants     `Sizes`, `Constants`: numbers that change from batch to batch, and those that do not
weights              `Weights`: the numbers that multiply the summands in a head
rows, columns        `RowFactors`, `ColumnFactors`: the factors of a tile of logits
===================  =========================================================================================

Triton accepts structures only as named tuples without types of its own, so that all fields are of type Any.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arguments import CallNumbers

# The arguments for which no kernel is compiled anew, although they are integers.
INTEGERS = CallNumbers._fields[: CallNumbers._fields.index("scale")]


class Sizes(NamedTuple):
    """Where the elements of tensors are."""

    token: Any  # stride of a token in `packed`
    factors_token: Any  # stride of a token in `factors`, which has A and B
    key_start: Any  # where keys, values and B begin in a token
    value_start: Any
    right_start: Any
    dense_query_head: Any  # strides of heads
    factors_head: Any
    dense_key_head: Any
    bias_row_head: Any
    matrix_head: Any
    matrix_row: Any  # stride of a row of R; m, if R is its values by distance
    T: Any
    B: Any
    H: Any
    right_width: Any  # columns of the right factor of an outer product
    scale: Any
    dropout: Any


class Weights(NamedTuple):
    """The numbers that multiply the summands in a head; for the product it is the weight times the scale."""

    product: Any
    dense: Any
    outer: Any
    bias_row: Any
    matrix: Any


class RowFactors(NamedTuple):
    """The factors of the logits that belong to rows."""

    query: Any
    dense_query: Any
    left: Any
    right: Any


class ColumnFactors(NamedTuple):
    """The factors of the logits that belong to columns."""

    key: Any
    dense_key: Any
    bias_row: Any


@triton.jit
def find_sizes(
    constants,
    T,
    B,
    H,
    left_width,
    right_width,
    dense_key_rows,
    bias_row_columns,
    matrix_rows,
    matrix_columns,
    scale,
    dropout,
):
    """Returns `Sizes` for tensors that lie as `CallTensors` describes them."""
    matrix_row = matrix_columns
    if constants.BY_DISTANCE:
        matrix_row = matrix_columns // 2
    return Sizes(
        H * (2 * constants.QUERY_WIDTH + constants.VALUE_WIDTH),  # token
        left_width + right_width,  # factors_token
        H * constants.QUERY_WIDTH,  # key_start
        2 * H * constants.QUERY_WIDTH,  # value_start
        left_width,  # right_start
        T * B * constants.DENSE_WIDTH,  # dense_query_head
        T * B * (left_width + right_width),  # factors_head
        dense_key_rows * constants.DENSE_WIDTH,  # dense_key_head
        bias_row_columns,  # bias_row_head
        matrix_rows * matrix_columns,  # matrix_head
        matrix_row,
        T,
        B,
        H,
        right_width,
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
        sizes.H * constants.VALUE_WIDTH,
        constants.VALUE_WIDTH,
        b,
        h,
        i,
        sizes,
        constants.VALUE_WIDTH,
        constants.ROWS,
        constants.VALUE_BLOCK,
        constants.UNIT,
    )


@triton.jit
def store_output_rows(data, value, sizes, constants, b, h, i):
    """Writes rows i, i + 1, ... of a head of Y, (T, B, H, d_h)."""
    store_rows(
        data,
        value,
        0,
        sizes.H * constants.VALUE_WIDTH,
        constants.VALUE_WIDTH,
        b,
        h,
        i,
        sizes,
        constants.VALUE_WIDTH,
        constants.ROWS,
        constants.VALUE_BLOCK,
        constants.UNIT,
    )


@triton.jit
def store_value_gradients(gradients, dv, sizes, constants, b, h, j):
    """Writes rows j, j + 1, ... of dV, if it is wanted."""
    store_rows(
        gradients.packed,
        dv,
        sizes.value_start,
        sizes.token,
        constants.VALUE_WIDTH,
        b,
        h,
        j,
        sizes,
        constants.VALUE_WIDTH,
        constants.COLUMNS,
        constants.VALUE_BLOCK,
        constants.UNIT,
    )


@triton.jit
def store_key_gradients(gradients, dk, sizes, constants, b, h, j):
    """Writes rows j, j + 1, ... of dK, if there are keys and it is wanted."""
    if constants.QUERY_WIDTH > 0:
        store_rows(
            gradients.packed,
            dk,
            sizes.key_start,
            sizes.token,
            constants.QUERY_WIDTH,
            b,
            h,
            j,
            sizes,
            constants.QUERY_WIDTH,
            constants.COLUMNS,
            constants.QUERY_BLOCK,
            constants.UNIT,
        )


@triton.jit
def load_row_factors(tensors, sizes, constants, b, h, i):
    """Returns the factors of rows i, i + 1, ... of a sentence."""
    q = 0.0
    if constants.QUERY_WIDTH > 0:
        q = load_rows(
            tensors.packed,
            0,
            sizes.token,
            constants.QUERY_WIDTH,
            b,
            h,
            i,
            sizes,
            constants.QUERY_WIDTH,
            constants.ROWS,
            constants.QUERY_BLOCK,
            constants.UNIT,
        )
    x = load_rows(
        tensors.dense_query,
        0,
        constants.DENSE_WIDTH,
        sizes.dense_query_head,
        b,
        h,
        i,
        sizes,
        constants.DENSE_WIDTH,
        constants.ROWS,
        constants.DENSE_BLOCK,
        constants.UNIT,
    )
    left = load_rows(
        tensors.factors,
        0,
        sizes.factors_token,
        sizes.factors_head,
        b,
        h,
        i,
        sizes,
        tl.cdiv(sizes.T, sizes.right_width),
        constants.ROWS,
        constants.FACTOR_BLOCK,
        1,
    )
    right = load_rows(
        tensors.factors,
        sizes.right_start,
        sizes.factors_token,
        sizes.factors_head,
        b,
        h,
        i,
        sizes,
        sizes.right_width,
        constants.ROWS,
        constants.FACTOR_BLOCK,
        1,
    )
    return RowFactors(q, x, left, right)


@triton.jit
def load_column_factors(tensors, sizes, constants, b, h, j):
    """Returns the factors of columns j, j + 1, ... of a sentence."""
    k = 0.0
    if constants.QUERY_WIDTH > 0:
        k = load_keys(tensors, sizes, constants, b, h, j)
    w = load_shared_keys(tensors, sizes, constants, h, j)
    c = load_row(tensors, sizes, constants, h, j)
    return ColumnFactors(k, w, c)


@triton.jit
def load_keys(tensors, sizes, constants, b, h, j):
    """Returns rows j, j + 1, ... of K."""
    return load_rows(
        tensors.packed,
        sizes.key_start,
        sizes.token,
        constants.QUERY_WIDTH,
        b,
        h,
        j,
        sizes,
        constants.QUERY_WIDTH,
        constants.COLUMNS,
        constants.QUERY_BLOCK,
        constants.UNIT,
    )


@triton.jit
def load_shared_keys(tensors, sizes, constants, h, j):
    """Returns rows j, j + 1, ... of W."""
    if tensors.dense_key is None:
        return 0.0
    else:
        column = j + tl.arange(0, constants.COLUMNS)
        first = tensors.dense_key + h * tl.multiple_of(tl.cast(sizes.dense_key_head, tl.int64), constants.UNIT)
        at = first + column[:, None] * constants.DENSE_WIDTH + tl.arange(0, constants.DENSE_BLOCK)[None, :]
        return tl.load(
            at, mask=inside(j, sizes.T, constants.DENSE_WIDTH, constants.COLUMNS, constants.DENSE_BLOCK), other=0.0
        )


@triton.jit
def load_row(tensors, sizes, constants, h, j):
    """Returns columns j, j + 1, ... of c."""
    if tensors.bias_row is None:
        return 0.0
    else:
        column = j + tl.arange(0, constants.COLUMNS)
        return tl.load(
            tensors.bias_row + tl.cast(h, tl.int64) * sizes.bias_row_head + column, mask=column < sizes.T, other=0.0
        ).to(tl.float32)


@triton.jit
def load_values(tensors, sizes, constants, b, h, j):
    """Returns rows j, j + 1, ... of V."""
    return load_rows(
        tensors.packed,
        sizes.value_start,
        sizes.token,
        constants.VALUE_WIDTH,
        b,
        h,
        j,
        sizes,
        constants.VALUE_WIDTH,
        constants.COLUMNS,
        constants.VALUE_BLOCK,
        constants.UNIT,
    )


@triton.jit
def load_matrix(tensors, sizes, constants, h, i, j):
    """Returns a tile of R."""
    if tensors.matrix is None:
        return 0.0
    else:
        row = (i + tl.arange(0, constants.ROWS))[:, None]
        column = (j + tl.arange(0, constants.COLUMNS))[None, :]
        if constants.BY_DISTANCE:
            place = tl.minimum(tl.maximum(column - row, -sizes.matrix_row), sizes.matrix_row) + sizes.matrix_row
        else:
            place = row * sizes.matrix_row + column
        at = tensors.matrix + tl.cast(h, tl.int64) * sizes.matrix_head + place
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
    q = load_weight(tensors, sizes, h, constants.PRODUCT_WEIGHT) * sizes.scale
    x = load_weight(tensors, sizes, h, constants.DENSE_WEIGHT)
    outer = load_weight(tensors, sizes, h, constants.OUTER_WEIGHT)
    c = load_weight(tensors, sizes, h, constants.BIAS_ROW_WEIGHT)
    r = load_weight(tensors, sizes, h, constants.MATRIX_WEIGHT)
    return Weights(q, x, outer, c, r)


@triton.jit
def product(a, b, constants):
    """Returns the matrix product a b in fp32, with b rounded to the type of a."""
    return tl.dot(a, b.to(a.dtype), input_precision=constants.PRECISION)


@triton.jit
def selectors(sizes, constants, j, dtype):
    """Returns matrices of 0 and 1 that copy the columns of A and of B to those of the outer product."""
    factor = tl.arange(0, constants.FACTOR_BLOCK)[:, None]
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
    if constants.QUERY_WIDTH > 0:
        logits += product(rows.query, tl.trans(columns.key), constants) * weights.product
    if tensors.dense_query is not None:
        logits += product(rows.dense_query, tl.trans(columns.dense_key), constants) * weights.dense
    if tensors.factors is not None:
        of_left, of_right = selectors(sizes, constants, j, rows.left.dtype)
        logits += product(rows.left, of_left, constants) * product(rows.right, of_right, constants) * weights.outer
    if tensors.bias_row is not None:
        logits += (columns.bias_row * weights.bias_row)[None, :]
    if tensors.matrix is not None:
        logits += r * weights.matrix
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
def kept(seed, sizes, constants, b, h, i, j):
    """Returns what dropout multiplies a tile of weights by: 0 or 1 / (1 - p).

    The random numbers are Philox's, and the same in every pass.
    """
    if seed is None:
        return 1.0
    else:
        row = (i + tl.arange(0, constants.ROWS))[:, None]
        column = (j + tl.arange(0, constants.COLUMNS))[None, :]
        number = tl.rand(tl.load(seed) + tl.cast(b, tl.int64) * sizes.H + h, row * sizes.T + column)
        return tl.where(number < sizes.dropout, 0.0, 1 / (1 - sizes.dropout))


@triton.jit
def row_gradients(gradients, sums, ds, rows, columns, sizes, constants, j):
    """Returns what a tile of dS adds to dQ, dX, dA and dB, without the weights."""
    to_q = 0.0
    to_x = 0.0
    to_left = 0.0
    to_right = 0.0
    if constants.QUERY_WIDTH > 0:
        if (gradients.packed is not None) or (sums.product_weight is not None):
            to_q = product(ds.to(columns.key.dtype), columns.key, constants)
    if (gradients.dense_query is not None) or (sums.dense_weight is not None):
        to_x = product(ds.to(rows.dense_query.dtype), columns.dense_key, constants)
    if (gradients.factors is not None) or (sums.outer_weight is not None):
        of_left, of_right = selectors(sizes, constants, j, rows.left.dtype)
        spread = (ds * product(rows.right, of_right, constants)).to(rows.left.dtype)
        to_left = product(spread, tl.trans(of_left), constants)
        if gradients.factors is not None:
            spread = (ds * product(rows.left, of_left, constants)).to(rows.left.dtype)
            to_right = product(spread, tl.trans(of_right), constants)
    return RowFactors(to_q, to_x, to_left, to_right)


@triton.jit
def store_row_gradients(gradients, to, weights, sizes, constants, b, h, i):
    """Writes dQ, dX, dA and dB of rows i, i + 1, ... of a sentence, which are `to` times the weights."""
    if constants.QUERY_WIDTH > 0:
        store_rows(
            gradients.packed,
            to.query * weights.product,
            0,
            sizes.token,
            constants.QUERY_WIDTH,
            b,
            h,
            i,
            sizes,
            constants.QUERY_WIDTH,
            constants.ROWS,
            constants.QUERY_BLOCK,
            constants.UNIT,
        )
    store_rows(
        gradients.dense_query,
        to.dense_query * weights.dense,
        0,
        constants.DENSE_WIDTH,
        sizes.dense_query_head,
        b,
        h,
        i,
        sizes,
        constants.DENSE_WIDTH,
        constants.ROWS,
        constants.DENSE_BLOCK,
        constants.UNIT,
    )
    width = tl.cdiv(sizes.T, sizes.right_width)
    store_rows(
        gradients.factors,
        to.left * weights.outer,
        0,
        sizes.factors_token,
        sizes.factors_head,
        b,
        h,
        i,
        sizes,
        width,
        constants.ROWS,
        constants.FACTOR_BLOCK,
        1,
    )
    store_rows(
        gradients.factors,
        to.right * weights.outer,
        sizes.right_start,
        sizes.factors_token,
        sizes.factors_head,
        b,
        h,
        i,
        sizes,
        sizes.right_width,
        constants.ROWS,
        constants.FACTOR_BLOCK,
        1,
    )


@triton.jit
def mean_outer(sums, p, rows, sizes, constants, j):
    """Returns what a tile of P adds to the mean of the outer product in each row; 0 if its weight needs no gradient."""
    if sums.outer_weight is None:
        return 0.0
    else:
        of_left, of_right = selectors(sizes, constants, j, rows.left.dtype)
        return tl.sum(p * product(rows.left, of_left, constants) * product(rows.right, of_right, constants), 1)


@triton.jit
def row_weights(sums, rows, to, sizes):
    """Returns what rows add to da_q, da_x and da_o: ``sum(dS * Q K^T)`` is ``sum(Q * dS K)``, and so on."""
    to_q = 0.0
    to_x = 0.0
    to_outer = 0.0
    if sums.product_weight is not None:
        to_q = tl.sum(rows.query.to(tl.float32) * to.query) * sizes.scale
    if sums.dense_weight is not None:
        to_x = tl.sum(rows.dense_query.to(tl.float32) * to.dense_query)
    if sums.outer_weight is not None:
        to_outer = tl.sum(rows.left.to(tl.float32) * to.left)
    return to_q, to_x, to_outer


@triton.jit
def store_part(data, value, part, h, sizes):
    """Writes a program's part of the gradient of a weight, if it is wanted."""
    if data is not None:
        tl.store(data + part * sizes.H + h, value)


@triton.jit
def store_columns(sums, to_w, to_c, c, weights, place, part, h, j, sizes, constants):
    """Writes dW, dc and da_c of columns j, j + 1, ..., summed over a group of sentences.

    The numbers of the group begin at `place`. `to_w` and `to_c` are the sums without the weights.
    """
    column = j + tl.arange(0, constants.COLUMNS)
    feature = tl.arange(0, constants.DENSE_BLOCK)
    if sums.dense_key is not None:
        at = (
            sums.dense_key
            + place
            + (tl.cast(h, tl.int64) * sizes.T + column[:, None]) * constants.DENSE_WIDTH
            + feature[None, :]
        )
        tl.store(
            at,
            to_w * weights.dense,
            mask=inside(j, sizes.T, constants.DENSE_WIDTH, constants.COLUMNS, constants.DENSE_BLOCK),
        )
    if sums.bias_row is not None:
        tl.store(
            sums.bias_row + place + tl.cast(h, tl.int64) * sizes.T + column,
            to_c * weights.bias_row,
            mask=column < sizes.T,
        )
    store_part(sums.bias_row_weight, tl.sum(to_c * c), part, h, sizes)


@triton.jit
def store_matrix(sums, to_r, r, weights, place, part, h, i, j, sizes, constants):
    """Writes dR of a tile, and the tile's part of da_r, as `store_columns` does; `to_r` is the sum of dS."""
    if sums.matrix is not None:
        row = (i + tl.arange(0, constants.ROWS))[:, None]
        column = (j + tl.arange(0, constants.COLUMNS))[None, :]
        at = sums.matrix + place + tl.cast(h, tl.int64) * sizes.T * sizes.T + row * sizes.T + column
        tl.store(at, to_r * weights.matrix, mask=(row < sizes.T) & (column < sizes.T))
    store_part(sums.matrix_weight, tl.sum(to_r * r), part, h, sizes)
