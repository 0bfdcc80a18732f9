"""Triton kernels for sentences that fit into one tile: one launch forward, one backward.

A program owns a head and a group of sentences. The whole T x T tile is in its registers, so that the backward pass
computes it once for all gradients:

    P = softmax(S),     dP = dY V^T,     dS = P * (dP - rowsum(P * dP)),     dV = P^T dY
    dQ = dS K,     dK = dS^T Q,     dX = dS W,     dW = sum_b dS^T X,     dc = sum_b colsum(dS),     dR = sum_b dS

but for weights. The sums over b are taken over the group in registers. The forward pass saves nothing but its inputs.
"""

import triton
import triton.language as tl

from .triton_common import (
    INTEGERS,
    kept,
    length_of,
    load_column_factors,
    load_matrix,
    load_row,
    load_row_factors,
    load_rows,
    load_values,
    load_weights,
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
def forward(
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
def backward(
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
