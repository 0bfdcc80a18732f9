"""Computes metrics of attention weights and other tensors.

Sizes: H heads, T rows (queries) and S columns (keys) of one sentence.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .attentions import Head, attention_weights

RANK_SHARES = tuple(i / 20 for i in range(21))  # shares of the singular values at which their cumulative sums are read
SMALLEST_NORM = 1e-30  # so that nothing is divided by 0


class RankDistances(NamedTuple):
    """How far a matrix is from simpler ones, relative to its Frobenius norm: 0 if it is such a matrix itself."""

    equal_rows: float  # from the closest matrix in which all rows are equal
    rank_one: float  # from the closest matrix of rank one, which is not farther away


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
    # Each metric of a row is a sum over the columns. These are the terms of the sums, (H, T, S).
    terms_by_metric = {
        "entropy": -torch.xlogy(weights, weights),  # - weight * log(weight), and 0 for the weight 0
        "distance": weights * distance,
        "diagonal": weights * (distance == 0),
        "neighbours": weights * (distance == 1),
    }
    metrics = {}
    for metric, terms in terms_by_metric.items():
        sums_of_rows = terms.sum(dim=-1)  # (H, T)
        metrics[metric] = sums_of_rows.mean(dim=-1)
    return metrics


def word_dependence(weights: Tensor, weights_by_position: Tensor) -> Tensor:
    """Returns for each head (H,) how far its attention weights are from weights that depend on positions alone.

    The distance of a row is the total variation distance ``1/2 sum_j |a_ij - b_ij|``, from 0 to 1. The result is the
    mean over the rows. It is 0 if the weights do not depend on the words.

    Args:
        weights: (H, T, S), of one sentence.
        weights_by_position: (H, T, S), the softmax of the mean logits that each position has over the data.
    """
    distance = (weights - weights_by_position).abs().sum(dim=-1) / 2
    return distance.mean(dim=-1)


def cumulative_singular_values(weights: Tensor, shares: Sequence[float] = RANK_SHARES) -> Tensor:
    """Returns for each head the sum of its largest singular values, relative to the sum of all of them.

    The number of values that are summed is given as a share. For example, a head has the singular values 4, 3, 2 and 1,
    with the sum 10. The share 0.5 stands for the 2 largest, which gives 7 / 10 = 0.7. The share 0.75 stands for the 3
    largest, which gives 0.9. Between them, the result is interpolated: the share 0.6 gives 0.78.

    Args:
        weights: (H, T, S), with min(T, S) singular values for each head.
        shares: n shares, from 0 to 1.

    Returns:
        (H, n).
    """
    relative_sums = sums_of_largest_singular_values(weights)  # (H, min(T, S) + 1): column k is for the k largest
    num_values = relative_sums.size(-1) - 1
    counts = torch.tensor(shares, device=weights.device) * num_values  # such as 2.4, between the columns 2 and 3
    return interpolate_columns(relative_sums, places=counts)


def sums_of_largest_singular_values(weights: Tensor) -> Tensor:
    """Returns for each head the sums of its 0, 1, 2, ... largest singular values, divided by the sum of all of them.

    For example, a head with the singular values 4, 3, 2 and 1 has the sums 0, 4, 7, 9 and 10. They are divided by 10,
    so the result is [0, 0.4, 0.7, 0.9, 1].

    Args:
        weights: (H, T, S).

    Returns:
        (H, min(T, S) + 1).
    """
    singular_values = torch.linalg.svdvals(weights.float())  # (H, min(T, S)), the largest first
    sum_of_none = singular_values.new_zeros(len(weights), 1)
    sums_of_largest = torch.cat([sum_of_none, singular_values.cumsum(dim=-1)], dim=-1)
    sum_of_all = sums_of_largest[:, -1:].clamp(min=SMALLEST_NORM)  # (H, 1), not 0, because it divides
    return sums_of_largest / sum_of_all


def interpolate_columns(matrix: Tensor, places: Tensor) -> Tensor:
    """Returns the values (H, n) of a matrix at places that may lie between two of its columns.

    For example, the values at the place 2.25 are 0.75 times column 2 plus 0.25 times column 3.

    Args:
        matrix: (H, columns), with at least two columns.
        places: (n,), from 0 to the number of the last column.
    """
    last_column = matrix.size(-1) - 1
    # The last column can only be the right one of two columns, because no column follows it.
    left_column = places.floor().long().clamp(max=last_column - 1)
    right_column = left_column + 1
    weight_of_right_column = places - left_column
    return torch.lerp(matrix[:, left_column], matrix[:, right_column], weight_of_right_column)


def rank_one_distances(x: Tensor) -> RankDistances:
    """Returns how far a matrix x (T, C) is from a matrix of equal rows, and from a matrix of rank one.

    The distance to equal rows is the residual of Dong et al. 2021 (arXiv 2103.03404), relative to the norm of x.
    """
    norm = x.norm().clamp(min=SMALLEST_NORM)
    # The closest matrix of equal rows has the mean of all rows in each row.
    distance_to_equal_rows = (x - x.mean(dim=0)).norm()
    # The closest matrix of rank one keeps only the largest singular value of x. The norm of the difference is that of
    # all other singular values (Eckart and Young).
    singular_values = torch.linalg.svdvals(x.float())  # the largest first; torch computes none in 16 bits
    other_singular_values = singular_values[1:]
    distance_to_rank_one = other_singular_values.norm()
    return RankDistances(
        equal_rows=float(distance_to_equal_rows / norm),
        rank_one=float(distance_to_rank_one / norm),
    )


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
