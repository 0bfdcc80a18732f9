"""The paper's equations as loops over scalars in float64, with nothing of the package but its parameters.

A vector is a list of numbers or a tensor (n,). Each function computes a number, a vector or a few vectors, so that it
can be read beside the equation.
"""

import math

import torch


def dot(a, b) -> float:
    """Returns the inner product of two vectors."""
    total = 0.0
    for x, y in zip(a, b):
        total += float(x) * float(y)
    return total


def linear(W, b, x) -> list[float]:
    """Returns W x + b, for a matrix W and the vectors b and x."""
    return [dot(row, x) + float(bias) for row, bias in zip(W, b)]


def relu_layer(W, b, x) -> list[float]:
    """Returns relu(W x + b), for a matrix W and the vectors b and x."""
    return [max(0.0, number) for number in linear(W, b, x)]


def softmax(scores: list[float]) -> list[float]:
    """Returns the softmax of a vector."""
    exponentials = [math.exp(score) for score in scores]
    total = sum(exponentials)
    return [exponential / total for exponential in exponentials]


def weighted_sum(weights: list[float], vectors: list[list[float]], size: int) -> list[float]:
    """Returns the sum of vectors of a size, each multiplied by its weight; zeros if there are no vectors.

    There may be more weights than vectors. The other weights are not used.
    """
    total = [0.0] * size
    for weight, vector in zip(weights, vectors):
        for c in range(size):
            total[c] += weight * vector[c]
    return total


def score(name: str, p: dict[str, torch.Tensor], h: int, i: int, j: int, x, q, k) -> float:
    """Returns the logit of a function in row i and column j of head h.

    Beyond l rows and columns the parameters begin again (the paper: "tile to the maximum sequence length").

    Args:
        name: the name of the function.
        p: the parameters of the function by name, and "a" for factorized_dense.
        h, i, j: the numbers of the head, the row and the column.
        x, q, k: the features, query and key of each position, as far as they are those of this head.
    """
    if name in ("random", "fixed_random"):  # eq. 4: R
        R = p["R"]
        return float(R[h, i % R.shape[1], j % R.shape[1]])
    if name == "factorized_random":  # eq. 7: R1 R2^T
        length = p["R1"].shape[1]
        return dot(p["R1"][h, i % length], p["R2"][h, j % length])
    if name == "relative_random":  # r[clip(j - i, -m, m)], m = l
        m = p["r"].shape[1] // 2
        distance = min(max(j - i, -m), m)
        return float(p["r"][h, m + distance])
    if name == "dense":  # eq. 2: W2 relu(W1 x + b1) + b2
        column = j % p["W2"].shape[1]
        hidden = relu_layer(p["W1"][h], p["b1"][h], x[i])
        return dot(p["W2"][h, column], hidden) + float(p["b2"][h, column])
    if name == "factorized_dense":  # eq. 5, 6: A of a values, B of b values, column j = (u, v)
        a = p["a"]
        b = p["W2"].shape[1] - a  # W2 has a rows for A, then b for B
        u, v = divmod(j % (a * b), b)
        hidden = relu_layer(p["W1"][h], p["b1"][h], x[i])
        A_u = dot(p["W2"][h, u], hidden) + float(p["b2"][h, u])
        B_v = dot(p["W2"][h, a + v], hidden) + float(p["b2"][h, a + v])
        return A_u * B_v
    if name == "vanilla":  # q k / sqrt(d)
        return dot(q[i], k[j]) / math.sqrt(len(q[i]))
    raise ValueError(name)


def mixed_score(mixture, h: int, i: int, j: int, x, q, k) -> float:
    """Returns sum_m alpha_m S_m, the logit of a mixture in row i and column j of head h.

    The weights are the softmax of alpha over the components, for each head. A sum has no weights. The arguments after
    `mixture` are those of `score`.
    """
    scores = []
    for name, component in mixture.components.items():
        parameters = dict(component.state_dict())
        if name == "factorized_dense":
            parameters["a"] = component.a
        scores.append(score(name, parameters, h, i, j, x, q, k))
    if mixture.alpha is None:
        return sum(scores)
    weights = softmax([float(alpha[h]) for alpha in mixture.alpha])
    return dot(weights, scores)


def project(layer, rows: list[list[float]]) -> list[list[float]]:
    """Returns the output of a linear layer for each row.

    If there is no such layer, its output is read by no function, and the rows take its place.
    """
    if layer is None:
        return rows
    return [linear(layer.weight, layer.bias, row) for row in rows]


def slice_rows(rows: list[list[float]], head: int, size: int) -> list[list[float]]:
    """Returns the part of each row that is that of a head, if each head has so many numbers."""
    return [row[head * size : (head + 1) * size] for row in rows]


def attention(module, x: torch.Tensor, is_hidden) -> torch.Tensor:
    """Returns Y = softmax(S(X)) G(X) over the visible keys, after the output projection, as a tensor (T, B, C).

    Before the output projection, a row that sees no key is 0.

    Args:
        module: a SyntheticAttention in float64.
        x: (T, B, C).
        is_hidden: a function: is_hidden(b, i, j) says whether row i of sentence b may not see column j.
    """
    T, B, C = x.shape
    out = torch.zeros(T, B, C, dtype=torch.float64)
    for b in range(B):
        rows = [[float(number) for number in x[t, b]] for t in range(T)]
        values = project(module.v_proj, rows)
        queries = project(module.q_proj, rows)
        keys = project(module.k_proj, rows)
        for i in range(T):
            visible_columns = [j for j in range(T) if not is_hidden(b, i, j)]
            heads = compute_heads(module, i, visible_columns, rows, values, queries, keys)
            out[i, b] = torch.tensor(linear(module.out_proj.weight, module.out_proj.bias, heads), dtype=torch.float64)
    return out


def compute_heads(module, i: int, visible_columns: list[int], rows, values, queries, keys) -> list[float]:
    """Returns softmax(S) G in row i of a sentence, of all heads, one after the other.

    Args:
        module: a SyntheticAttention in float64.
        i: the number of the row.
        visible_columns: the numbers of the columns that it sees.
        rows, values, queries, keys: a vector for each position. Queries and keys have only the heads that read them, if
            the module has projections for them.
    """
    size = module.head_dim
    head = 0  # the number of the head
    head_with_query = 0  # its number among the heads that have queries and keys
    joined: list[float] = []
    for mixture in module.synthesizer.mixtures():
        for head_of_mixture in range(mixture.num_heads):
            x = slice_rows(rows, head, size)
            v = slice_rows(values, head, size)
            q = slice_rows(queries, head_with_query, size)
            k = slice_rows(keys, head_with_query, size)
            scores = [mixed_score(mixture, head_of_mixture, i, j, x, q, k) for j in visible_columns]
            joined += weighted_sum(softmax(scores), [v[j] for j in visible_columns], size)
            head += 1
            if mixture.reads_query_key:
                head_with_query += 1
    assert head == module.num_heads
    return joined


def linformer(module, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Returns softmax(Q (E K)^T / sqrt(d)) F V of Wang et al. 2020, eq. 7, over the sentences without their padding.

    The result is the tensor (T, B, C) after the output projection. Only rows of real tokens are computed; the others
    are 0.

    Args:
        module: a LinformerAttention in float64.
        x: (T, B, C), padded on the right.
        lengths: the number of real tokens of each sentence.
    """
    T, B, C = x.shape
    H = module.num_heads
    d = C // H
    out = torch.zeros(T, B, C, dtype=torch.float64)
    for b, length in enumerate(lengths):
        rows = [[float(number) for number in x[t, b]] for t in range(length)]
        queries = project(module.q_proj, rows)
        keys = project(module.k_proj, rows)
        values = project(module.v_proj, rows)
        joined_rows: list[list[float]] = [[] for _ in range(length)]  # the heads of each row, one after the other
        for h in range(H):
            E = module.E[h % module.E.shape[0]]  # (k, n); a projection may be that of all heads
            F = module.F[h % module.F.shape[0]]
            q = slice_rows(queries, h, d)
            # The sentence may be shorter than n. Then only the first columns of E and F have a word to multiply.
            projected_keys = [weighted_sum(weights, slice_rows(keys, h, d), d) for weights in E.tolist()]  # E K
            projected_values = [weighted_sum(weights, slice_rows(values, h, d), d) for weights in F.tolist()]  # F V
            for i in range(length):
                scores = [dot(q[i], key) / math.sqrt(d) for key in projected_keys]
                joined_rows[i] += weighted_sum(softmax(scores), projected_values, d)
        for i in range(length):
            projected = linear(module.out_proj.weight, module.out_proj.bias, joined_rows[i])
            out[i, b] = torch.tensor(projected, dtype=torch.float64)
    return out
