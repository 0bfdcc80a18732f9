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
    """Returns the sum of vectors of a size, each multiplied by its weight; zeros if there are no vectors."""
    total = [0.0] * size
    for weight, vector in zip(weights, vectors):
        for c in range(size):
            total[c] += weight * vector[c]
    return total


def score(name: str, p: dict[str, torch.Tensor], h: int, i: int, j: int, x, q, k) -> float:
    """Returns the logit of a function in row i and column j of head h.

    Beyond l rows and columns the parameters begin again (the paper: "tile to the maximum sequence length"). Only
    relative_random has no such rows: its larger distances get the logit of the distance l or -l.

    Args:
        name: the name of the function.
        p: the parameters of the function by name, and "a" for factorized_dense. With H heads of width d:
            random and fixed_random: R (H, l, l)
            factorized_random: R1 and R2 (H, l, rank)
            relative_random: r (H, 2 l + 1), for the distances from -l to l
            dense: W1 (H, d, d) and b1 (H, d); W2 (H, l, d) and b2 (H, l)
            factorized_dense: W1 and b1 as dense; W2 (H, a + b, d) and b2 (H, a + b), where a b = l
        h, i, j: the numbers of the head, the row and the column.
        x, q, k: the features, query and key of each position, as far as they are those of this head. q and k may be
            None for a function that does not read them.
    """
    if name in ("random", "fixed_random"):  # eq. 4: R
        length = p["R"].shape[1]
        return float(p["R"][h, i % length, j % length])
    if name == "factorized_random":  # eq. 7: R1 R2^T
        length = p["R1"].shape[1]
        return dot(p["R1"][h, i % length], p["R2"][h, j % length])
    if name == "relative_random":  # r[clip(j - i, -l, l)]
        largest_distance = p["r"].shape[1] // 2  # l
        distance = min(max(j - i, -largest_distance), largest_distance)
        return float(p["r"][h, largest_distance + distance])  # The distance -l has the index 0.
    if name == "dense":  # eq. 2: W2 relu(W1 x + b1) + b2
        hidden = relu_layer(p["W1"][h], p["b1"][h], x[i])
        column = j % p["W2"].shape[1]
        return dot(p["W2"][h, column], hidden) + float(p["b2"][h, column])
    if name == "factorized_dense":  # eq. 5, 6: A_u B_v in column j = u b + v
        hidden = relu_layer(p["W1"][h], p["b1"][h], x[i])
        a = p["a"]
        b = p["W2"].shape[1] - a
        column = j % (a * b)
        u = column // b
        v = column % b
        # The first a rows of W2 and b2 give the numbers A_0, A_1, …, and the other b rows the numbers B_0, B_1, …
        row_of_A_u = u
        row_of_B_v = a + v
        A_u = dot(p["W2"][h, row_of_A_u], hidden) + float(p["b2"][h, row_of_A_u])
        B_v = dot(p["W2"][h, row_of_B_v], hidden) + float(p["b2"][h, row_of_B_v])
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
    """Returns the numbers of one head from each row. `size`: how many neighbouring numbers of a row each head has."""
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
        rows = x[:, b].tolist()  # the features of each position
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
        rows: X, a vector for each position, in which the features of head h are the h-th part.
        values: G, a vector for each position, divided in the same way.
        queries, keys: a vector for each position. They have only the heads that read them, so that the first part may
            be that of the third head. They are not read if no head reads them.
    """
    size = module.head_dim
    head = 0  # the number of the head
    head_with_query = 0  # its number among the heads that have queries and keys
    joined: list[float] = []
    for mixture in module.synthesizer.mixtures():
        for head_of_mixture in range(mixture.num_heads):
            x = slice_rows(rows, head, size)
            v = slice_rows(values, head, size)
            head += 1
            q = None
            k = None
            if mixture.reads_query_key:
                q = slice_rows(queries, head_with_query, size)
                k = slice_rows(keys, head_with_query, size)
                head_with_query += 1
            scores = [mixed_score(mixture, h=head_of_mixture, i=i, j=j, x=x, q=q, k=k) for j in visible_columns]
            visible_values = [v[j] for j in visible_columns]
            joined += weighted_sum(softmax(scores), visible_values, size)
    assert head == module.num_heads
    return joined


def linformer_head(E, F, queries, keys, values, size: int) -> list[list[float]]:
    """Returns softmax(Q (E K)^T / sqrt(d)) F V, the output of a head in each row of a sentence.

    The sentence may be shorter than n. Then E and F end with columns that have no word to multiply, and which are cut.

    Args:
        E, F: the matrices (k, n) of the head.
        queries, keys, values: Q, K and V, a vector of d numbers for each word.
        size: d.
    """
    length = len(keys)
    projected_keys = []  # E K
    for weights in E.tolist():
        projected_keys.append(weighted_sum(weights[:length], keys, size))
    projected_values = []  # F V
    for weights in F.tolist():
        projected_values.append(weighted_sum(weights[:length], values, size))
    out = []
    for query in queries:
        scores = [dot(query, key) / math.sqrt(size) for key in projected_keys]
        out.append(weighted_sum(softmax(scores), projected_values, size))
    return out


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
        rows = x[:length, b].tolist()  # the features of each real token
        queries = project(module.q_proj, rows)
        keys = project(module.k_proj, rows)
        values = project(module.v_proj, rows)
        heads = []  # heads[h][i]: the output of head h in row i
        for h in range(H):
            # E has a matrix for each head, or a single one for all heads, and so has F.
            E = module.E[0] if len(module.E) == 1 else module.E[h]
            F = module.F[0] if len(module.F) == 1 else module.F[h]
            q = slice_rows(queries, h, d)
            k = slice_rows(keys, h, d)
            v = slice_rows(values, h, d)
            heads.append(linformer_head(E, F, q, k, v, d))
        for i in range(length):
            joined: list[float] = []
            for head in heads:
                joined += head[i]
            projected = linear(module.out_proj.weight, module.out_proj.bias, joined)
            out[i, b] = torch.tensor(projected, dtype=torch.float64)
    return out
