"""Triton kernels of softmax(S) V and its gradients: two for sentences that fit into one tile, four for any length.

**Short sentences**, a launch forward, one backward. A program owns a head and a group of sentences. The whole T x T
tile is in its registers, so that the backward pass computes it once for all gradients:

    P = softmax(S),     dP = dY V^T,     dS = P * (dP - rowsum(P * dP)),     dV = P^T dY
    dQ = dS K,     dK = dS^T Q,     dX = dS W,     dW = sum_b dS^T X,     dc = sum_b colsum(dS),     dR = sum_b dS

but for weights. The sums over b are taken over the group in registers. The forward pass saves nothing but its inputs.

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
    kept,
    length_of,
    load_column_factors,
    load_matrix,
    load_row,
    load_row_factors,
    load_rows,
    load_shared_keys,
    load_values,
    load_weights,
    mean_outer,
    product,
    row_gradients,
    row_weights,
    sizes,
    store_columns,
    store_matrix,
    store_part,
    store_row_gradients,
    store_rows,
    tile_of_logits,
)


@triton.jit
def softmax(logits):
    """Of rows, to base 2; 0 where a row sees nothing."""
    top = tl.max(logits, 1)
    weights = tl.exp2(logits - tl.where(top > float("-inf"), top, 0.0)[:, None])
    total = tl.sum(weights, 1)
    return weights / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=[*INTEGERS, "sentences"])
def forward_short(
    g, y, T, B, H, left, n, w_rows, c_columns, r_rows, r_columns, scale, dropout, sentences, z,
):  # fmt: skip
    """Y of some sentences."""
    s = sizes(z, T, B, H, left, n, w_rows, c_columns, r_rows, r_columns, scale, dropout)
    h, group = tl.program_id(0), tl.program_id(1)
    r, a = load_matrix(g, s, z, h, 0, 0), load_weights(g, s, z, h)
    for b in range(group * sentences, tl.minimum((group + 1) * sentences, B)):
        rows, columns = load_row_factors(g, s, z, b, h, 0), load_column_factors(g, s, z, b, h, 0)
        p = softmax(tile_of_logits(g, s, z, rows, columns, r, a, b, 0, 0, length_of(g, s, b)))
        v = load_values(g, s, z, b, h, 0)
        out = product((p * kept(g, s, z, b, h, 0, 0)).to(v.dtype), v, z)
        store_rows(y, out, 0, H * z.D, z.D, b, h, 0, s, z.D, z.ROWS, z.D_BLOCK, z.UNIT)


@triton.jit(do_not_specialize=[*INTEGERS, "sentences", "size"])
def backward_short(
    g, d, dy, T, B, H, left, n, w_rows, c_columns, r_rows, r_columns, scale, dropout, sentences, size, z,
):  # fmt: skip
    """All gradients of some sentences."""
    s = sizes(z, T, B, H, left, n, w_rows, c_columns, r_rows, r_columns, scale, dropout)
    h, group = tl.program_id(0), tl.program_id(1)
    a = load_weights(g, s, z, h)
    to_r = tl.zeros([z.ROWS, z.COLUMNS], tl.float32)
    to_w, to_c = tl.zeros([z.COLUMNS, z.X_BLOCK], tl.float32), tl.zeros([z.COLUMNS], tl.float32)
    to_a_q, to_a_x, to_a_outer = tl.zeros([], tl.float32), tl.zeros([], tl.float32), tl.zeros([], tl.float32)
    for b in range(group * sentences, tl.minimum((group + 1) * sentences, B)):
        rows, columns = load_row_factors(g, s, z, b, h, 0), load_column_factors(g, s, z, b, h, 0)
        r = load_matrix(g, s, z, h, 0, 0)  # again for each sentence, from a cache: registers are scarcer
        p = softmax(tile_of_logits(g, s, z, rows, columns, r, a, b, 0, 0, length_of(g, s, b)))
        keep = kept(g, s, z, b, h, 0, 0)
        dy_b = load_rows(dy, 0, H * z.D, z.D, b, h, 0, s, z.D, z.ROWS, z.D_BLOCK, z.UNIT)
        dv = product(tl.trans((p * keep).to(dy_b.dtype)), dy_b, z)
        store_rows(d.v, dv, s.v, s.token, z.D, b, h, 0, s, z.D, z.COLUMNS, z.D_BLOCK, z.UNIT)
        dp = product(dy_b, tl.trans(load_values(g, s, z, b, h, 0)), z) * keep
        ds = p * (dp - tl.sum(p * dp, 1)[:, None])
        if (d.r is not None) or (d.a_r is not None):
            to_r += ds
        if (d.c is not None) or (d.a_c is not None):
            to_c += tl.sum(ds, 0)
        if d.k is not None:
            dk = product(tl.trans(ds.to(rows.q.dtype)), rows.q, z) * a.q
            store_rows(d.k, dk, s.k, s.token, z.Q, b, h, 0, s, z.Q, z.COLUMNS, z.Q_BLOCK, z.UNIT)
        if d.w is not None:
            to_w += product(tl.trans(ds.to(rows.x.dtype)), rows.x, z)
        to = row_gradients(d, ds, rows, columns, s, z, 0)
        store_row_gradients(d, to, a, s, z, b, h, 0)
        of_q, of_x, of_outer = row_weights(d, rows, to, s)
        to_a_q += of_q
        to_a_x += of_x
        to_a_outer += of_outer
    place, c = tl.cast(group, tl.int64) * size, load_row(g, s, z, h, 0)
    store_columns(d, to_w, to_c, c, a, place, group, h, 0, s, z)
    store_matrix(d, to_r, load_matrix(g, s, z, h, 0, 0), a, place, group, h, 0, 0, s, z)
    store_part(d.a_q, to_a_q, group, h, s)
    store_part(d.a_x, to_a_x, group, h, s)
    store_part(d.a_outer, to_a_outer, group, h, s)


@triton.jit
def columns_of_rows(s, z, i, length):
    """How many columns rows i, i + 1, ... see."""
    end = tl.where(i < length, length, 0)
    if z.CAUSAL:
        end = tl.minimum(end, i + z.ROWS)
    return end


@triton.jit
def load_numbers(data, s, z, b, h, i, other):
    """A number of each row, of (B, H, T)."""
    if data is None:
        return other
    else:
        row = i + tl.arange(0, z.ROWS)
        return tl.load(data + (tl.cast(b, tl.int64) * s.H + h) * s.T + row, mask=row < s.T, other=other)


@triton.jit
def store_numbers(data, value, s, z, b, h, i):
    row = i + tl.arange(0, z.ROWS)
    tl.store(data + (tl.cast(b, tl.int64) * s.H + h) * s.T + row, value, mask=row < s.T)


@triton.jit
def load_outputs(dy, delta, lse, s, z, b, h, i):
    """Of rows: dY, rowsum(P * dP) and the logarithm of the softmax's denominator."""
    dy_i = load_rows(dy, 0, s.H * z.D, z.D, b, h, i, s, z.D, z.ROWS, z.D_BLOCK, z.UNIT)
    return dy_i, load_numbers(delta, s, z, b, h, i, 0.0), load_numbers(lse, s, z, b, h, i, float("inf"))


@triton.jit(do_not_specialize=INTEGERS)
def forward(
    g, y, lse, T, B, H, left, n, w_rows, c_columns, r_rows, r_columns, scale, dropout, z,
):  # fmt: skip
    """Some rows of Y of a sentence, and the logarithms of their denominators."""
    s = sizes(z, T, B, H, left, n, w_rows, c_columns, r_rows, r_columns, scale, dropout)
    tiles = tl.cdiv(T, z.ROWS)
    i, b, h = tl.program_id(0) % tiles * z.ROWS, tl.program_id(0) // tiles // H, tl.program_id(0) // tiles % H
    length, a, rows = length_of(g, s, b), load_weights(g, s, z, h), load_row_factors(g, s, z, b, h, i)
    top = tl.full([z.ROWS], -1e30, tl.float32)  # finite, so that a row that sees nothing has no NaN
    total = tl.zeros([z.ROWS], tl.float32)
    out = tl.zeros([z.ROWS, z.D_BLOCK], tl.float32)
    for j in range(0, columns_of_rows(s, z, i, length), z.COLUMNS):
        columns, r = load_column_factors(g, s, z, b, h, j), load_matrix(g, s, z, h, i, j)
        logits = tile_of_logits(g, s, z, rows, columns, r, a, b, i, j, length)
        higher = tl.maximum(top, tl.max(logits, 1))
        p, shrink = tl.exp2(logits - higher[:, None]), tl.exp2(top - higher)
        v = load_values(g, s, z, b, h, j)
        total = total * shrink + tl.sum(p, 1)
        out = out * shrink[:, None] + product((p * kept(g, s, z, b, h, i, j)).to(v.dtype), v, z)
        top = higher
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    store_rows(y, out, 0, H * z.D, z.D, b, h, i, s, z.D, z.ROWS, z.D_BLOCK, z.UNIT)
    store_numbers(lse, tl.where(total > 0, top + tl.log2(total), float("inf")), s, z, b, h, i)


@triton.jit(do_not_specialize=[*INTEGERS])
def backward_rows(
    g, d, y, delta, lse, dy, T, B, H, left, n, w_rows, c_columns, r_rows, r_columns, scale, dropout, z,
):  # fmt: skip
    s = sizes(z, T, B, H, left, n, w_rows, c_columns, r_rows, r_columns, scale, dropout)
    tiles = tl.cdiv(T, z.ROWS)
    i, b, h = tl.program_id(0) % tiles * z.ROWS, tl.program_id(0) // tiles // H, tl.program_id(0) // tiles % H
    length, a, rows = length_of(g, s, b), load_weights(g, s, z, h), load_row_factors(g, s, z, b, h, i)
    dy_i = load_rows(dy, 0, H * z.D, z.D, b, h, i, s, z.D, z.ROWS, z.D_BLOCK, z.UNIT)
    y_i = load_rows(y, 0, H * z.D, z.D, b, h, i, s, z.D, z.ROWS, z.D_BLOCK, z.UNIT)
    delta_i, lse_i = tl.sum(dy_i.to(tl.float32) * y_i.to(tl.float32), 1), load_numbers(lse, s, z, b, h, i, float("inf"))
    error = tl.zeros([z.ROWS], tl.float32)  # of `delta_i`: the sum of a row of dS, which should be 0
    outer = tl.zeros([z.ROWS], tl.float32)
    to_q, to_x = tl.zeros([z.ROWS, z.Q_BLOCK], tl.float32), tl.zeros([z.ROWS, z.X_BLOCK], tl.float32)
    to_left, to_right = tl.zeros([z.ROWS, z.FACTOR], tl.float32), tl.zeros([z.ROWS, z.FACTOR], tl.float32)
    end = 0  # without gradients of rows or of weights only rowsum(dY * Y) is written
    if (d.q is not None) or (d.x is not None) or (d.left is not None) or (d.right is not None) or (d.a_r is not None):
        end = columns_of_rows(s, z, i, length)
    if (d.a_q is not None) or (d.a_x is not None) or (d.a_outer is not None) or (d.a_c is not None):
        end = columns_of_rows(s, z, i, length)
    for j in range(0, end, z.COLUMNS):
        columns, r = load_column_factors(g, s, z, b, h, j), load_matrix(g, s, z, h, i, j)
        logits = tile_of_logits(g, s, z, rows, columns, r, a, b, i, j, length)
        dp = product(dy_i, tl.trans(load_values(g, s, z, b, h, j)), z) * kept(g, s, z, b, h, i, j)
        p = tl.exp2(logits - lse_i[:, None])
        ds = p * (dp - delta_i[:, None])
        error += tl.sum(ds, 1)
        outer += mean_outer(d, p, rows, s, z, j)
        to = row_gradients(d, ds, rows, columns, s, z, j)
        to_q += to.q
        to_x += to.x
        to_left += to.left
        to_right += to.right
    to = RowFactors(to_q, to_x, to_left, to_right)
    store_row_gradients(d, to, a, s, z, b, h, i)
    store_numbers(delta, delta_i + error, s, z, b, h, i)
    _, _, of_outer = row_weights(d, rows, to, s)
    store_part(d.a_outer, of_outer - tl.sum(error * outer), b * tiles + i // z.ROWS, h, s)


@triton.jit(do_not_specialize=[*INTEGERS, "sentences", "size"])
def backward_columns(
    g, d, delta, lse, dy, T, B, H, left, n, w_rows, c_columns, r_rows, r_columns, scale, dropout, sentences, size, z,
):  # fmt: skip
    s = sizes(z, T, B, H, left, n, w_rows, c_columns, r_rows, r_columns, scale, dropout)
    tiles = tl.cdiv(T, z.COLUMNS)
    j, group, h = tl.program_id(0) % tiles * z.COLUMNS, tl.program_id(0) // tiles // H, tl.program_id(0) // tiles % H
    a = load_weights(g, s, z, h)
    to_w, to_c = tl.zeros([z.COLUMNS, z.X_BLOCK], tl.float32), tl.zeros([z.COLUMNS], tl.float32)
    to_a_q = tl.zeros([], tl.float32)
    for b in range(group * sentences, tl.minimum((group + 1) * sentences, B)):
        length, columns, v = length_of(g, s, b), load_column_factors(g, s, z, b, h, j), load_values(g, s, z, b, h, j)
        to_v, to_k = tl.zeros([z.COLUMNS, z.D_BLOCK], tl.float32), tl.zeros([z.COLUMNS, z.Q_BLOCK], tl.float32)
        first = 0
        if z.CAUSAL:
            first = j // z.ROWS * z.ROWS
        for i in range(first, tl.where(j < length, length, 0), z.ROWS):
            rows, r = load_row_factors(g, s, z, b, h, i), load_matrix(g, s, z, h, i, j)
            dy_i, delta_i, lse_i = load_outputs(dy, delta, lse, s, z, b, h, i)
            p = tl.exp2(tile_of_logits(g, s, z, rows, columns, r, a, b, i, j, length) - lse_i[:, None])
            keep = kept(g, s, z, b, h, i, j)
            to_v += product(tl.trans((p * keep).to(dy_i.dtype)), dy_i, z)
            if delta is not None:
                ds = p * (product(dy_i, tl.trans(v), z) * keep - delta_i[:, None])
                if (d.k is not None) or (d.a_q is not None):
                    to_k += product(tl.trans(ds.to(rows.q.dtype)), rows.q, z)
                if (d.w is not None) or (d.a_x is not None):
                    to_w += product(tl.trans(ds.to(rows.x.dtype)), rows.x, z)
                if (d.c is not None) or (d.a_c is not None):
                    to_c += tl.sum(ds, 0)
        store_rows(d.v, to_v, s.v, s.token, z.D, b, h, j, s, z.D, z.COLUMNS, z.D_BLOCK, z.UNIT)
        store_rows(d.k, to_k * a.q, s.k, s.token, z.Q, b, h, j, s, z.Q, z.COLUMNS, z.Q_BLOCK, z.UNIT)
        if d.a_q is not None:
            k = load_rows(g.k, s.k, s.token, z.Q, b, h, j, s, z.Q, z.COLUMNS, z.Q_BLOCK, z.UNIT)
            to_a_q += tl.sum(to_k * k.to(tl.float32)) * s.scale
    place, part = tl.cast(group, tl.int64) * size, group * tiles + j // z.COLUMNS
    store_part(d.a_q, to_a_q, part, h, s)
    if d.a_x is not None:
        store_part(d.a_x, tl.sum(to_w * load_shared_keys(g, s, z, h, j).to(tl.float32)), part, h, s)
    store_columns(d, to_w, to_c, load_row(g, s, z, h, j), a, place, part, h, j, s, z)


@triton.jit(do_not_specialize=[*INTEGERS, "sentences", "size"])
def backward_matrix(
    g, d, delta, lse, dy, T, B, H, left, n, w_rows, c_columns, r_rows, r_columns, scale, dropout, sentences, size, z,
):  # fmt: skip
    s = sizes(z, T, B, H, left, n, w_rows, c_columns, r_rows, r_columns, scale, dropout)
    across = tl.cdiv(T, z.COLUMNS)
    tiles = tl.cdiv(T, z.ROWS) * across
    tile, group, h = tl.program_id(0) % tiles, tl.program_id(0) // tiles // H, tl.program_id(0) // tiles % H
    i, j = tile // across * z.ROWS, tile % across * z.COLUMNS
    a = load_weights(g, s, z, h)
    to_r = tl.zeros([z.ROWS, z.COLUMNS], tl.float32)
    end = tl.minimum((group + 1) * sentences, B)
    if z.CAUSAL:
        end = tl.where(j < i + z.ROWS, end, 0)
    r = load_matrix(g, s, z, h, i, j)
    for b in range(group * sentences, end):
        rows, columns = load_row_factors(g, s, z, b, h, i), load_column_factors(g, s, z, b, h, j)
        dy_i, delta_i, lse_i = load_outputs(dy, delta, lse, s, z, b, h, i)
        p = tl.exp2(tile_of_logits(g, s, z, rows, columns, r, a, b, i, j, T) - lse_i[:, None])
        dp = product(dy_i, tl.trans(load_values(g, s, z, b, h, j)), z) * kept(g, s, z, b, h, i, j)
        to_r += p * (dp - delta_i[:, None])
    place = tl.cast(group, tl.int64) * size
    store_matrix(d, to_r, r, a, place, group * tiles + tile, h, i, j, s, z)
