"""Triton kernels of softmax(S) V and its gradients: two for sentences that fit into one tile, four for any length.

**Short sentences**, a launch forward, one backward. A program owns a head and a group of sentences. The whole T x T
tile is in its registers, so that the backward pass computes it once for all gradients:

    P = softmax(S),     dP = dY V^T,     dS = P * (dP - rowsum(P * dP)),     dV = P^T dY
    dQ = dS K,     dK = dS^T Q,     dX = dS W,     dW = sum_b dS^T X,     dc = sum_b colsum(dS),     dR = sum_b dS

apart from the weights. The sums over b are taken over the group in registers. The forward pass saves nothing but its
inputs.

**Any length**, a launch forward, and backward one for each place that sums go to. The forward pass keeps the maximum
and the sum of a row while it walks over its columns (Dao et al. 2022, arXiv 2205.14135) and saves the logarithm of the
softmax's denominator, to base 2, which is infinite for a row that sees nothing. With it, and with
``rowsum(P * dP) = rowsum(dY * Y)``, each kernel of the backward pass computes its tiles of P and dS again:

`backward_rows`     owns rows of a sentence and walks over columns: rowsum(P * dP), dQ, dX, dA, dB, da_o
`backward_columns`  owns columns and walks over rows: dV, dK; and over a group of sentences: dW, dc, da_q, da_x, da_c
`backward_matrix`   owns a tile of R and walks over a group of sentences: dR, da_r

In half precision Y and P are rounded, so that rowsum(dY * Y) is off, and a row of dS does not add up to 0. The gradient
of a mixture's weight, a sum over all logits, would have the errors of all rows. `backward_rows` therefore adds up each
row of dS, and with that corrects rowsum(P * dP) before the other kernels read it.
"""

import triton
import triton.language as tl

from .triton_common import (
    INTEGERS,
    RowFactors,
    find_sizes,
    kept,
    length_of,
    load_column_factors,
    load_keys,
    load_matrix,
    load_output_rows,
    load_row,
    load_row_factors,
    load_shared_keys,
    load_values,
    load_weights,
    mean_outer,
    product,
    row_gradients,
    row_weights,
    store_columns,
    store_key_gradients,
    store_matrix,
    store_output_rows,
    store_part,
    store_row_gradients,
    store_value_gradients,
    tile_of_logits,
)


@triton.jit
def softmax(logits):
    """Returns the softmax of each row, to base 2; a row that sees nothing has zeros."""
    top = tl.max(logits, 1)
    weights = tl.exp2(logits - tl.where(top > float("-inf"), top, 0.0)[:, None])
    total = tl.sum(weights, 1)
    return weights / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=[*INTEGERS, "sentences_per_group"])
def forward_short(
    tensors,
    seed,
    out,
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
    sentences_per_group,
    constants,
):
    """Writes Y of a group of sentences in a head."""
    sizes = find_sizes(
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
    )
    h = tl.program_id(0)
    group = tl.program_id(1)
    r = load_matrix(tensors, sizes, constants, h, 0, 0)
    weights = load_weights(tensors, sizes, constants, h)
    for b in range(group * sentences_per_group, tl.minimum((group + 1) * sentences_per_group, B)):
        rows = load_row_factors(tensors, sizes, constants, b, h, 0)
        columns = load_column_factors(tensors, sizes, constants, b, h, 0)
        length = length_of(tensors, sizes, b)
        p = softmax(tile_of_logits(tensors, sizes, constants, rows, columns, r, weights, b, 0, 0, length))
        v = load_values(tensors, sizes, constants, b, h, 0)
        y = product((p * kept(seed, sizes, constants, b, h, 0, 0)).to(v.dtype), v, constants)
        store_output_rows(out, y, sizes, constants, b, h, 0)


@triton.jit(do_not_specialize=[*INTEGERS, "sentences_per_group", "numbers_per_group"])
def backward_short(
    tensors,
    seed,
    gradients,
    sums,
    out_gradient,
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
    sentences_per_group,
    numbers_per_group,
    constants,
):
    """Writes all gradients of a group of sentences in a head."""
    sizes = find_sizes(
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
    )
    h = tl.program_id(0)
    group = tl.program_id(1)
    weights = load_weights(tensors, sizes, constants, h)
    to_r = tl.zeros([constants.ROWS, constants.COLUMNS], tl.float32)
    to_w = tl.zeros([constants.COLUMNS, constants.DENSE_BLOCK], tl.float32)
    to_c = tl.zeros([constants.COLUMNS], tl.float32)
    to_a_q = tl.zeros([], tl.float32)
    to_a_x = tl.zeros([], tl.float32)
    to_a_outer = tl.zeros([], tl.float32)
    for b in range(group * sentences_per_group, tl.minimum((group + 1) * sentences_per_group, B)):
        rows = load_row_factors(tensors, sizes, constants, b, h, 0)
        columns = load_column_factors(tensors, sizes, constants, b, h, 0)
        r = load_matrix(tensors, sizes, constants, h, 0, 0)  # for each sentence, from a cache: registers are scarcer
        length = length_of(tensors, sizes, b)
        p = softmax(tile_of_logits(tensors, sizes, constants, rows, columns, r, weights, b, 0, 0, length))
        keep = kept(seed, sizes, constants, b, h, 0, 0)
        dy_b = load_output_rows(out_gradient, sizes, constants, b, h, 0)
        dv = product(tl.trans((p * keep).to(dy_b.dtype)), dy_b, constants)
        store_value_gradients(gradients, dv, sizes, constants, b, h, 0)
        dp = product(dy_b, tl.trans(load_values(tensors, sizes, constants, b, h, 0)), constants) * keep
        ds = p * (dp - tl.sum(p * dp, 1)[:, None])
        if (sums.matrix is not None) or (sums.matrix_weight is not None):
            to_r += ds
        if (sums.bias_row is not None) or (sums.bias_row_weight is not None):
            to_c += tl.sum(ds, 0)
        if constants.QUERY_WIDTH > 0:
            if gradients.packed is not None:
                dk = product(tl.trans(ds.to(rows.query.dtype)), rows.query, constants) * weights.product
                store_key_gradients(gradients, dk, sizes, constants, b, h, 0)
        if sums.dense_key is not None:
            to_w += product(tl.trans(ds.to(rows.dense_query.dtype)), rows.dense_query, constants)
        to = row_gradients(gradients, sums, ds, rows, columns, sizes, constants, 0)
        store_row_gradients(gradients, to, weights, sizes, constants, b, h, 0)
        of_q, of_x, of_outer = row_weights(sums, rows, to, sizes)
        to_a_q += of_q
        to_a_x += of_x
        to_a_outer += of_outer
    place = tl.cast(group, tl.int64) * numbers_per_group
    c = load_row(tensors, sizes, constants, h, 0)
    r = load_matrix(tensors, sizes, constants, h, 0, 0)
    store_columns(sums, to_w, to_c, c, weights, place, group, h, 0, sizes, constants)
    store_matrix(sums, to_r, r, weights, place, group, h, 0, 0, sizes, constants)
    store_part(sums.product_weight, to_a_q, group, h, sizes)
    store_part(sums.dense_weight, to_a_x, group, h, sizes)
    store_part(sums.outer_weight, to_a_outer, group, h, sizes)


@triton.jit
def columns_of_rows(sizes, constants, i, length):
    """Returns how many columns rows i, i + 1, ... see."""
    end = tl.where(i < length, length, 0)
    if constants.CAUSAL:
        end = tl.minimum(end, i + constants.ROWS)
    return end


@triton.jit
def load_numbers(data, sizes, constants, b, h, i, other):
    """Returns one number for each row, from (B, H, T)."""
    if data is None:
        return other
    else:
        row = i + tl.arange(0, constants.ROWS)
        first = data + (tl.cast(b, tl.int64) * sizes.H + h) * sizes.T
        return tl.load(first + row, mask=row < sizes.T, other=other)


@triton.jit
def store_numbers(data, value, sizes, constants, b, h, i):
    """Writes one number for each row, to (B, H, T)."""
    row = i + tl.arange(0, constants.ROWS)
    first = data + (tl.cast(b, tl.int64) * sizes.H + h) * sizes.T
    tl.store(first + row, value, mask=row < sizes.T)


@triton.jit
def load_outputs(out_gradient, delta, lse, sizes, constants, b, h, i):
    """Returns dY, rowsum(P * dP) and the logarithm of the softmax's denominator for rows i, i + 1, ..."""
    dy_i = load_output_rows(out_gradient, sizes, constants, b, h, i)
    delta_i = load_numbers(delta, sizes, constants, b, h, i, 0.0)
    lse_i = load_numbers(lse, sizes, constants, b, h, i, float("inf"))
    return dy_i, delta_i, lse_i


@triton.jit(do_not_specialize=INTEGERS)
def forward(
    tensors,
    seed,
    out,
    lse,
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
    constants,
):
    """Writes some rows of Y of a sentence, and the logarithms of their denominators."""
    sizes = find_sizes(
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
    )
    tiles = tl.cdiv(T, constants.ROWS)
    i = tl.program_id(0) % tiles * constants.ROWS
    b = tl.program_id(0) // tiles // H
    h = tl.program_id(0) // tiles % H
    length = length_of(tensors, sizes, b)
    weights = load_weights(tensors, sizes, constants, h)
    rows = load_row_factors(tensors, sizes, constants, b, h, i)
    top = tl.full([constants.ROWS], -1e30, tl.float32)  # finite, so that a row that sees nothing has no NaN
    total = tl.zeros([constants.ROWS], tl.float32)
    y = tl.zeros([constants.ROWS, constants.VALUE_BLOCK], tl.float32)
    for j in range(0, columns_of_rows(sizes, constants, i, length), constants.COLUMNS):
        columns = load_column_factors(tensors, sizes, constants, b, h, j)
        r = load_matrix(tensors, sizes, constants, h, i, j)
        logits = tile_of_logits(tensors, sizes, constants, rows, columns, r, weights, b, i, j, length)
        higher = tl.maximum(top, tl.max(logits, 1))
        p = tl.exp2(logits - higher[:, None])
        shrink = tl.exp2(top - higher)
        v = load_values(tensors, sizes, constants, b, h, j)
        total = total * shrink + tl.sum(p, 1)
        kept_weights = (p * kept(seed, sizes, constants, b, h, i, j)).to(v.dtype)
        y = y * shrink[:, None] + product(kept_weights, v, constants)
        top = higher
    y = y / tl.where(total > 0, total, 1.0)[:, None]
    store_output_rows(out, y, sizes, constants, b, h, i)
    store_numbers(lse, tl.where(total > 0, top + tl.log2(total), float("inf")), sizes, constants, b, h, i)


@triton.jit(do_not_specialize=INTEGERS)
def backward_rows(
    tensors,
    seed,
    gradients,
    sums,
    out,
    lse,
    out_gradient,
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
    constants,
):
    """Writes the gradients that some rows of a sentence have, and rowsum(P * dP)."""
    sizes = find_sizes(
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
    )
    tiles = tl.cdiv(T, constants.ROWS)
    i = tl.program_id(0) % tiles * constants.ROWS
    b = tl.program_id(0) // tiles // H
    h = tl.program_id(0) // tiles % H
    length = length_of(tensors, sizes, b)
    weights = load_weights(tensors, sizes, constants, h)
    rows = load_row_factors(tensors, sizes, constants, b, h, i)
    dy_i = load_output_rows(out_gradient, sizes, constants, b, h, i)
    y_i = load_output_rows(out, sizes, constants, b, h, i)
    delta_i = tl.sum(dy_i.to(tl.float32) * y_i.to(tl.float32), 1)
    lse_i = load_numbers(lse, sizes, constants, b, h, i, float("inf"))
    error = tl.zeros([constants.ROWS], tl.float32)  # in `delta_i`: the sum of a row of dS, which should be 0
    outer = tl.zeros([constants.ROWS], tl.float32)
    to_q = tl.zeros([constants.ROWS, constants.QUERY_BLOCK], tl.float32)
    to_x = tl.zeros([constants.ROWS, constants.DENSE_BLOCK], tl.float32)
    to_left = tl.zeros([constants.ROWS, constants.FACTOR_BLOCK], tl.float32)
    to_right = tl.zeros([constants.ROWS, constants.FACTOR_BLOCK], tl.float32)
    end = 0  # without gradients of rows or of weights only rowsum(dY * Y) is written
    if constants.QUERY_WIDTH > 0:
        if gradients.packed is not None:
            end = columns_of_rows(sizes, constants, i, length)
    if (gradients.dense_query is not None) or (gradients.factors is not None):
        end = columns_of_rows(sizes, constants, i, length)
    if (sums.product_weight is not None) or (sums.dense_weight is not None) or (sums.outer_weight is not None):
        end = columns_of_rows(sizes, constants, i, length)
    if (sums.bias_row_weight is not None) or (sums.matrix_weight is not None):
        end = columns_of_rows(sizes, constants, i, length)
    for j in range(0, end, constants.COLUMNS):
        columns = load_column_factors(tensors, sizes, constants, b, h, j)
        r = load_matrix(tensors, sizes, constants, h, i, j)
        logits = tile_of_logits(tensors, sizes, constants, rows, columns, r, weights, b, i, j, length)
        dp = product(dy_i, tl.trans(load_values(tensors, sizes, constants, b, h, j)), constants)
        dp *= kept(seed, sizes, constants, b, h, i, j)
        p = tl.exp2(logits - lse_i[:, None])
        ds = p * (dp - delta_i[:, None])
        error += tl.sum(ds, 1)
        outer += mean_outer(sums, p, rows, sizes, constants, j)
        to = row_gradients(gradients, sums, ds, rows, columns, sizes, constants, j)
        to_q += to.query
        to_x += to.dense_query
        to_left += to.left
        to_right += to.right
    to = RowFactors(to_q, to_x, to_left, to_right)
    store_row_gradients(gradients, to, weights, sizes, constants, b, h, i)
    store_numbers(sums.delta, delta_i + error, sizes, constants, b, h, i)
    _, _, of_outer = row_weights(sums, rows, to, sizes)
    store_part(sums.outer_weight, of_outer - tl.sum(error * outer), b * tiles + i // constants.ROWS, h, sizes)


@triton.jit
def column_gradients(gradients, sums, ds, rows, constants):
    """Returns what a tile of dS adds to dK, dW and dc, without the weights."""
    to_k = 0.0
    to_w = 0.0
    to_c = 0.0
    if constants.QUERY_WIDTH > 0:
        if (gradients.packed is not None) or (sums.product_weight is not None):
            to_k = product(tl.trans(ds.to(rows.query.dtype)), rows.query, constants)
    if (sums.dense_key is not None) or (sums.dense_weight is not None):
        to_w = product(tl.trans(ds.to(rows.dense_query.dtype)), rows.dense_query, constants)
    if (sums.bias_row is not None) or (sums.bias_row_weight is not None):
        to_c = tl.sum(ds, 0)
    return to_k, to_w, to_c


@triton.jit(do_not_specialize=[*INTEGERS, "sentences_per_group", "numbers_per_group"])
def backward_columns(
    tensors,
    seed,
    gradients,
    sums,
    lse,
    out_gradient,
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
    sentences_per_group,
    numbers_per_group,
    constants,
):
    """Writes the gradients that some columns have, in a group of sentences."""
    sizes = find_sizes(
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
    )
    tiles = tl.cdiv(T, constants.COLUMNS)
    j = tl.program_id(0) % tiles * constants.COLUMNS
    group = tl.program_id(0) // tiles // H
    h = tl.program_id(0) // tiles % H
    weights = load_weights(tensors, sizes, constants, h)
    to_w = tl.zeros([constants.COLUMNS, constants.DENSE_BLOCK], tl.float32)
    to_c = tl.zeros([constants.COLUMNS], tl.float32)
    to_a_q = tl.zeros([], tl.float32)
    for b in range(group * sentences_per_group, tl.minimum((group + 1) * sentences_per_group, B)):
        length = length_of(tensors, sizes, b)
        columns = load_column_factors(tensors, sizes, constants, b, h, j)
        v = load_values(tensors, sizes, constants, b, h, j)
        to_v = tl.zeros([constants.COLUMNS, constants.VALUE_BLOCK], tl.float32)
        to_k = tl.zeros([constants.COLUMNS, constants.QUERY_BLOCK], tl.float32)
        first = 0
        if constants.CAUSAL:
            first = j // constants.ROWS * constants.ROWS
        for i in range(first, tl.where(j < length, length, 0), constants.ROWS):
            rows = load_row_factors(tensors, sizes, constants, b, h, i)
            r = load_matrix(tensors, sizes, constants, h, i, j)
            dy_i, delta_i, lse_i = load_outputs(out_gradient, sums.delta, lse, sizes, constants, b, h, i)
            logits = tile_of_logits(tensors, sizes, constants, rows, columns, r, weights, b, i, j, length)
            p = tl.exp2(logits - lse_i[:, None])
            keep = kept(seed, sizes, constants, b, h, i, j)
            to_v += product(tl.trans((p * keep).to(dy_i.dtype)), dy_i, constants)
            if sums.delta is not None:
                ds = p * (product(dy_i, tl.trans(v), constants) * keep - delta_i[:, None])
                of_k, of_w, of_c = column_gradients(gradients, sums, ds, rows, constants)
                to_k += of_k
                to_w += of_w
                to_c += of_c
        store_value_gradients(gradients, to_v, sizes, constants, b, h, j)
        store_key_gradients(gradients, to_k * weights.product, sizes, constants, b, h, j)
        if sums.product_weight is not None:
            k = load_keys(tensors, sizes, constants, b, h, j)
            to_a_q += tl.sum(to_k * k.to(tl.float32)) * sizes.scale
    place = tl.cast(group, tl.int64) * numbers_per_group
    part = group * tiles + j // constants.COLUMNS
    store_part(sums.product_weight, to_a_q, part, h, sizes)
    if sums.dense_weight is not None:
        w = load_shared_keys(tensors, sizes, constants, h, j).to(tl.float32)
        store_part(sums.dense_weight, tl.sum(to_w * w), part, h, sizes)
    c = load_row(tensors, sizes, constants, h, j)
    store_columns(sums, to_w, to_c, c, weights, place, part, h, j, sizes, constants)


@triton.jit(do_not_specialize=[*INTEGERS, "sentences_per_group", "numbers_per_group"])
def backward_matrix(
    tensors,
    seed,
    gradients,
    sums,
    lse,
    out_gradient,
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
    sentences_per_group,
    numbers_per_group,
    constants,
):
    """Writes the gradients of a tile of R and of its weight, in a group of sentences."""
    sizes = find_sizes(
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
    )
    across = tl.cdiv(T, constants.COLUMNS)
    tiles = tl.cdiv(T, constants.ROWS) * across
    tile = tl.program_id(0) % tiles
    group = tl.program_id(0) // tiles // H
    h = tl.program_id(0) // tiles % H
    i = tile // across * constants.ROWS
    j = tile % across * constants.COLUMNS
    weights = load_weights(tensors, sizes, constants, h)
    to_r = tl.zeros([constants.ROWS, constants.COLUMNS], tl.float32)
    end = tl.minimum((group + 1) * sentences_per_group, B)
    if constants.CAUSAL:
        end = tl.where(j < i + constants.ROWS, end, 0)
    r = load_matrix(tensors, sizes, constants, h, i, j)
    for b in range(group * sentences_per_group, end):
        rows = load_row_factors(tensors, sizes, constants, b, h, i)
        columns = load_column_factors(tensors, sizes, constants, b, h, j)
        dy_i, delta_i, lse_i = load_outputs(out_gradient, sums.delta, lse, sizes, constants, b, h, i)
        logits = tile_of_logits(tensors, sizes, constants, rows, columns, r, weights, b, i, j, T)
        p = tl.exp2(logits - lse_i[:, None])
        dp = product(dy_i, tl.trans(load_values(tensors, sizes, constants, b, h, j)), constants)
        dp *= kept(seed, sizes, constants, b, h, i, j)
        to_r += p * (dp - delta_i[:, None])
    place = tl.cast(group, tl.int64) * numbers_per_group
    store_matrix(sums, to_r, r, weights, place, group * tiles + tile, h, i, j, sizes, constants)
