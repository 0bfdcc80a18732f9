"""Computes metrics of attention weights and other tensors.

Sizes: H heads, T rows (queries) and S columns (keys) of one sentence.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .attentions import Head, attention_weights

RANK_SHARES = tuple(i / 20 for i in range(21))  # shares of the singular values at which their cumulative sums are read
SMALLEST_NORM = 1e-30  # so that nothing is divided by 0


def sentence_weights(logits: Tensor, causal: bool) -> Tensor:
    """Returns the attention weights (H, T, S) of one sentence, the softmax of its logits (H, T, S).

    Args:
        logits: before any mask.
        causal: True if row i sees no column after i.
    """
    return attention_weights(logits.float().unsqueeze(0), causal)[0]


def describe_weights(weights: Tensor) -> dict[str, Tensor]:
    """Computes four metrics that say where each head looks.

    Args:
        weights: (H, T, S).

    Returns:
        {metric: (H,), its mean over the rows}. ``entropy`` is in nats; ``distance`` is the mean of ``|i - j|`` in
        tokens under the weights of row i; ``diagonal`` is the weight on the token itself, j = i; ``neighbours`` is the
        weight on j = i - 1 and j = i + 1.
    """
    num_rows, num_columns = weights.shape[-2:]
    rows = torch.arange(num_rows)[:, None]
    columns = torch.arange(num_columns)
    distance = (rows - columns).abs().to(weights)  # (T, S)
    cells = {
        "entropy": -torch.xlogy(weights, weights),
        "distance": weights * distance,
        "diagonal": weights * (distance == 0),
        "neighbours": weights * (distance == 1),
    }
    return {metric: values.sum(dim=-1).mean(dim=-1) for metric, values in cells.items()}


def word_dependence(weights: Tensor, weights_by_position: Tensor) -> Tensor:
    """Returns for each head (H,) how far its weights are from the weights that the positions alone give.

    This is the total variation distance ``1/2 sum_j |a_ij - b_ij|``, averaged over the rows: 0 if the weights do not
    depend on the words, at most 1.

    Args:
        weights: (H, T, S), of one sentence.
        weights_by_position: (H, T, S), the softmax of the mean logits that each position has over the data.
    """
    distance = (weights - weights_by_position).abs().sum(dim=-1) / 2
    return distance.mean(dim=-1)


def cumulative_singular_values(weights: Tensor, shares: Sequence[float] = RANK_SHARES) -> Tensor:
    """Returns for each head how much of the sum of all singular values the largest singular values hold.

    For example, if a matrix has 8 singular values, the share 0.25 stands for the 2 largest. The result is the sum of
    these 2, divided by the sum of all 8. Between two whole numbers of singular values, the result is interpolated.

    Args:
        weights: (H, T, S).
        shares: n shares of the min(T, S) singular values.

    Returns:
        (H, n).
    """
    singular_values = torch.linalg.svdvals(weights.float())  # (H, min(T, S)), the largest first
    num_heads, num_values = singular_values.shape
    zero = singular_values.new_zeros(num_heads, 1)
    sums = torch.cat([zero, singular_values.cumsum(dim=-1)], dim=-1)  # sums[:, i] is the sum of the largest i
    relative_sums = sums / sums[:, -1:].clamp(min=SMALLEST_NORM)
    # How many singular values each share stands for, such as 2.5 for the share 0.25 of 10. The result lies between the
    # sums of the next whole numbers, 2 and 3 here. For the share 1 of 10, these are 9 and 10, as there is no sum of 11.
    number = torch.tensor(shares, device=sums.device) * num_values
    number_below = number.floor().long().clamp(max=num_values - 1)
    number_above = number_below + 1
    return torch.lerp(relative_sums[:, number_below], relative_sums[:, number_above], number - number_below)


def rank_one_distances(x: Tensor) -> tuple[float, float]:
    """Returns how far the rows of a matrix x (T, C) are from being alike, relative to its Frobenius norm.

    Returns:
        the distance to the closest matrix of equal rows, which is the residual of Dong et al. 2021 (arXiv 2103.03404),
        and the distance to the closest matrix of rank one, which is not larger.
    """
    norm = x.norm().clamp(min=SMALLEST_NORM)
    # The closest matrix of equal rows has the mean of all rows in each row.
    distance_to_equal_rows = (x - x.mean(dim=0)).norm() / norm
    # The closest matrix of rank one has only the largest singular value; the others are the distance to it.
    singular_values = torch.linalg.svdvals(x.float())  # the largest first
    distance_to_rank_one = singular_values[1:].norm() / norm
    return float(distance_to_equal_rows), float(distance_to_rank_one)


def histogram(values: Tensor, low: float, high: float, bins: int) -> list[float]:
    """Returns the share of the values that fall in each of `bins` equal intervals from low to high.

    Values below `low` count in the first interval, values above `high` in the last.
    """
    counts = torch.histc(values.float().clamp(low, high), bins, low, high)
    return (counts / max(values.numel(), 1)).tolist()


def removal_order(importance: dict[str, list[float]]) -> list[Head]:
    """Returns the heads in the order in which they are removed: from the least to the most important.

    Args:
        importance: {attention: the importance of each head}.
    """
    heads_by_importance = []
    for attention, values in importance.items():
        for number, value in enumerate(values):
            heads_by_importance.append((value, Head(attention, number)))
    return [head for _, head in sorted(heads_by_importance)]


def removal_steps(num_heads: int, steps: int) -> list[int]:
    """Returns how many heads are removed at each step, from none to all.

    For example, 16 heads are removed in 4 steps as 0, 4, 8, 12, 16. There are no more steps than heads.
    """
    steps = min(steps, num_heads)
    return [round(num_heads * step / steps) for step in range(steps + 1)]
