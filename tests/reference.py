"""The paper's equations as loops over scalars in float64, with nothing of the package but its parameters."""

import math

import torch


def dot(a, b) -> float:
    return sum(float(p) * float(q) for p, q in zip(a, b))


def relu_layer(W, b, x) -> list[float]:
    return [max(0.0, dot(row, x) + float(bias)) for row, bias in zip(W, b)]


def score(name: str, p: dict[str, torch.Tensor], h: int, i: int, j: int, x, q, k) -> float:
    """Logit of head h, row i, column j. x, q, k: per position, the head's slice of the sentence.

    Beyond l rows and columns begin again (the paper: "tile to the maximum sequence length").
    """
    if name in ("random", "fixed_random"):  # eq. 4: R
        R = p["R"]
        return float(R[h, i % R.shape[1], j % R.shape[1]])
    if name == "factorized_random":  # eq. 7: R1 R2^T
        length = p["R1"].shape[1]
        return dot(p["R1"][h, i % length], p["R2"][h, j % length])
    if name == "relative_random":  # r[clip(j - i, -m, m)], m = l
        m = p["r"].shape[1] // 2
        return float(p["r"][h, m + min(max(j - i, -m), m)])
    if name == "dense":  # eq. 2: W2 relu(W1 x + b1) + b2
        column = j % p["W2"].shape[1]
        return dot(p["W2"][h, column], relu_layer(p["W1"][h], p["b1"][h], x[i])) + float(p["b2"][h, column])
    if name == "factorized_dense":  # eq. 5, 6: A of a values, B of b values, column j = (u, v)
        a, b = p["a"], p["W2"].shape[1] - p["a"]  # W2 has a rows for A, then b for B
        u, v = divmod(j % (a * b), b)
        hidden = relu_layer(p["W1"][h], p["b1"][h], x[i])
        A, B = (dot(p["W2"][h, row], hidden) + float(p["b2"][h, row]) for row in (u, a + v))
        return A * B
    if name == "vanilla":
        return dot(q[i], k[j]) / math.sqrt(len(q[i]))
    raise ValueError(name)


def mixed_score(mixture, h: int, i: int, j: int, x, q, k) -> float:
    """sum_m alpha_m S_m, the weights the softmax of alpha over the components, for each head."""
    scores = []
    for name, component in mixture.components.items():
        sizes = {"a": component.a} if name == "factorized_dense" else {}
        scores.append(score(name, {**component.state_dict(), **sizes}, h, i, j, x, q, k))
    if mixture.alpha is None:
        return sum(scores)
    exps = [math.exp(float(alpha[h])) for alpha in mixture.alpha]
    return sum(e / sum(exps) * s for e, s in zip(exps, scores))


def attention(module, x: torch.Tensor, hidden) -> torch.Tensor:
    """Y = softmax(S(X)) G(X) over the visible keys, then the output projection; 0 where no key is visible.

    Args:
        module: a SyntheticAttention in float64.
        x: (T, B, C).
        hidden: hidden(b, i, j), whether row i of sentence b may not see column j.
    """
    T, B, C = x.shape
    H, d = module.num_heads, module.head_dim

    def project(linear, vector):
        return [dot(w, vector) + float(b) for w, b in zip(linear.weight, linear.bias)]

    # of each head its mixture, its number there, and its number among the heads that have queries and keys
    heads = []
    for mixture in module.synthesizer.mixtures():
        for h in range(mixture.num_heads):
            heads.append((mixture, h, sum(m.reads_query_key for m, _, _ in heads)))
    assert len(heads) == H

    out = torch.zeros(T, B, C, dtype=torch.float64)
    for b in range(B):
        rows = [[float(e) for e in x[t, b]] for t in range(T)]
        v = [project(module.v_proj, row) for row in rows]
        q = [project(module.q_proj, row) for row in rows] if module.q_proj is not None else rows
        k = [project(module.k_proj, row) for row in rows] if module.k_proj is not None else rows
        for i in range(T):
            joined: list[float] = []
            for h, (mixture, head_of_mixture, among) in enumerate(heads):
                xh, vh = ([row[h * d : (h + 1) * d] for row in m] for m in (rows, v))
                qh, kh = ([row[among * d : (among + 1) * d] for row in m] for m in (q, k))
                seen = [j for j in range(T) if not hidden(b, i, j)]
                exps = {j: math.exp(mixed_score(mixture, head_of_mixture, i, j, xh, qh, kh)) for j in seen}
                joined += [sum(exps[j] / sum(exps.values()) * vh[j][c] for j in seen) for c in range(d)]
            out[i, b] = torch.tensor(project(module.out_proj, joined), dtype=torch.float64)
    return out


def linformer(module, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """softmax(Q (E K)^T / sqrt(d)) F V of Wang et al. 2020, eq. 7, over the sentences without their padding.

    Args:
        module: a LinformerAttention in float64.
        x: (T, B, C), padded on the right.
        lengths: of each sentence; only rows of real tokens are computed.
    """
    T, B, C = x.shape
    H, d, k = module.num_heads, C // module.num_heads, module.E.shape[1]
    out = torch.zeros(T, B, C, dtype=torch.float64)
    for b, length in enumerate(lengths):
        q, key, v = (
            [[dot(w, x[t, b]) + float(bias) for w, bias in zip(p.weight, p.bias)] for t in range(length)]
            for p in (module.q_proj, module.k_proj, module.v_proj)
        )
        for i in range(length):
            joined: list[float] = []
            for h in range(H):
                E, F = (projection[h % projection.shape[0]] for projection in (module.E, module.F))
                columns_of_head = range(h * d, (h + 1) * d)
                keys = [
                    [sum(float(E[m, n]) * key[n][c] for n in range(length)) for c in columns_of_head] for m in range(k)
                ]
                values = [
                    [sum(float(F[m, n]) * v[n][c] for n in range(length)) for c in columns_of_head] for m in range(k)
                ]
                exps = [math.exp(dot([q[i][c] for c in columns_of_head], row) / math.sqrt(d)) for row in keys]
                joined += [sum(e / sum(exps) * row[c] for e, row in zip(exps, values)) for c in range(d)]
            rows = zip(module.out_proj.weight, module.out_proj.bias)
            out[i, b] = torch.tensor([dot(w, joined) + float(bias) for w, bias in rows], dtype=torch.float64)
    return out
