"""Triton kernels for sentences that fit into one tile: one launch forward, one backward.

A program owns a head and a group of sentences. The whole T x T tile is in its registers, so that the backward pass
computes it once for all gradients:

    P = softmax(S),     dP = dY V^T,     dS = P * (dP - rowsum(P * dP)),     dV = P^T dY
    dQ = dS K,     dK = dS^T Q,     dX = dS W,     dW = sum_b dS^T X,     dc = sum_b colsum(dS),     dR = a sum_b dS

The sums over b are taken over the group in registers. The forward pass saves nothing but its inputs.
"""

import triton
import triton.language as tl

from .triton_common import (
    INTEGERS,
    Sizes,
    kept,
    length_of,
    load_column_factors,
    load_matrix,
    load_row_factors,
    load_rows,
    load_values,
    load_weight,
    outer_gradients,
    product,
    store_columns,
    store_matrix,
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
    g, y,
    v_token, v_head, q_token, q_head, k_token, k_head, x_token, x_head, left_token, left_head, right_token, right_head,
    w_head, c_head, r_row, r_head, T, B, H, n, dropout, sentences, z,
):  # fmt: skip
    """Y of some sentences."""
    s = Sizes(
        v_token, v_head, q_token, q_head, k_token, k_head, x_token, x_head, left_token, left_head, right_token,
        right_head, w_head, c_head, r_row, r_head, T, B, H, n, dropout,
    )  # fmt: skip
    h, group = tl.program_id(0), tl.program_id(1)
    r, weight = load_matrix(g, s, z, h, 0, 0), load_weight(g, h)
    for b in range(group * sentences, tl.minimum((group + 1) * sentences, B)):
        rows, columns = load_row_factors(g, s, z, b, h, 0), load_column_factors(g, s, z, b, h, 0)
        p = softmax(tile_of_logits(g, s, z, rows, columns, r, weight, b, 0, 0, length_of(g, s, b)))
        v = load_values(g, s, z, b, h, 0)
        out = product((p * kept(g, s, z, b, h, 0, 0)).to(v.dtype), v, z)
        store_rows(y, out, b, h, 0, s, z.D, z.ROWS, z.D_BLOCK)


@triton.jit(do_not_specialize=[*INTEGERS, "sentences", "dy_token", "dy_head", "size"])
def backward(
    g, d, size, dy, dy_token, dy_head,
    v_token, v_head, q_token, q_head, k_token, k_head, x_token, x_head, left_token, left_head, right_token, right_head,
    w_head, c_head, r_row, r_head, T, B, H, n, dropout, sentences, z,
):  # fmt: skip
    """All gradients of some sentences."""
    s = Sizes(
        v_token, v_head, q_token, q_head, k_token, k_head, x_token, x_head, left_token, left_head, right_token,
        right_head, w_head, c_head, r_row, r_head, T, B, H, n, dropout,
    )  # fmt: skip
    h, group = tl.program_id(0), tl.program_id(1)
    weight = load_weight(g, h)
    to_r = tl.zeros([z.ROWS, z.COLUMNS], tl.float32)
    to_w, to_c = tl.zeros([z.COLUMNS, z.X_BLOCK], tl.float32), tl.zeros([z.COLUMNS], tl.float32)
    for b in range(group * sentences, tl.minimum((group + 1) * sentences, B)):
        rows, columns = load_row_factors(g, s, z, b, h, 0), load_column_factors(g, s, z, b, h, 0)
        r = load_matrix(g, s, z, h, 0, 0)  # again for each sentence, from a cache: registers are scarcer
        p = softmax(tile_of_logits(g, s, z, rows, columns, r, weight, b, 0, 0, length_of(g, s, b)))
        keep = kept(g, s, z, b, h, 0, 0)
        dy_b = load_rows(dy, dy_token, dy_head, b, h, 0, s, z.D, z.ROWS, z.D_BLOCK, z.UNIT)
        dv = product(tl.trans((p * keep).to(dy_b.dtype)), dy_b, z)
        store_rows(d.v, dv, b, h, 0, s, z.D, z.COLUMNS, z.D_BLOCK)
        dp = product(dy_b, tl.trans(load_values(g, s, z, b, h, 0)), z) * keep
        ds = p * (dp - tl.sum(p * dp, 1)[:, None])
        if (d.r is not None) or (d.weight is not None):
            to_r += ds
        if d.c is not None:
            to_c += tl.sum(ds, 0)
        if d.q is not None:
            dq = product(ds.to(columns.k.dtype), columns.k, z)
            store_rows(d.q, dq, b, h, 0, s, z.Q, z.ROWS, z.Q_BLOCK)
        if d.k is not None:
            dk = product(tl.trans(ds.to(rows.q.dtype)), rows.q, z)
            store_rows(d.k, dk, b, h, 0, s, z.Q, z.COLUMNS, z.Q_BLOCK)
        if d.x is not None:
            dx = product(ds.to(rows.x.dtype), columns.w, z)
            store_rows(d.x, dx, b, h, 0, s, z.X, z.ROWS, z.X_BLOCK)
        if d.w is not None:
            to_w += product(tl.trans(ds.to(rows.x.dtype)), rows.x, z)
        to_left, to_right = outer_gradients(d, ds, rows, s, z, 0)
        store_rows(d.left, to_left, b, h, 0, s, tl.cdiv(T, n), z.ROWS, z.FACTOR)
        store_rows(d.right, to_right, b, h, 0, s, n, z.ROWS, z.FACTOR)
    place = tl.cast(group, tl.int64) * size
    store_columns(d, to_w, to_c, place, h, 0, s, z)
    store_matrix(d, to_r, load_matrix(g, s, z, h, 0, 0), weight, place, 0, h, 0, 0, s, z)
