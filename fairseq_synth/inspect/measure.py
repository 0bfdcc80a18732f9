"""Computes figures from tensors. T rows (queries) and S columns (keys) of one sentence, H heads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .attentions import Head, attention_weights

RANK_SHARES = tuple(i / 20 for i in range(21))  # of the singular values, where their cumulative sums are read
SMALLEST_NORM = 1e-30  # so that nothing is divided by 0


def sentence_weights(logits: Tensor, causal: bool) -> Tensor:
    """Returns the attention weights (H, T, S) of one sentence from its logits of the same size."""
    return attention_weights(logits.float().unsqueeze(0), causal)[0]


def describe_weights(weights: Tensor) -> dict[str, Tensor]:
    """Returns where each head looks: figures (H,), the means over the rows of weights (H, T, S).

    Returns:
        ``entropy`` in nats; ``distance``, the mean of ``|i - j|`` in tokens under the weights of row i; ``diagonal``
        and ``neighbours``, the share of the weight on j = i, and on j = i - 1 and i + 1.
    """
    rows, columns = weights.shape[-2:]
    distance = (torch.arange(rows)[:, None] - torch.arange(columns)).abs().to(weights)
    figures_of_cells = {
        "entropy": -torch.xlogy(weights, weights),
        "distance": weights * distance,
        "diagonal": weights * (distance == 0),
        "neighbours": weights * (distance == 1),
    }
    return {name: values.sum(dim=-1).mean(dim=-1) for name, values in figures_of_cells.items()}


def word_dependence(weights: Tensor, weights_by_position: Tensor) -> Tensor:
    """Returns for each head (H,) how far its weights are from the weights that positions alone give.

    The figure is the mean over the rows of the total variation distance ``1/2 sum_j |a_ij - b_ij|``: 0 if the weights
    do not depend on the words, at most 1.

    Args:
        weights: (H, T, S).
        weights_by_position: (H, T, S), the softmax of the mean logits of each position over the data.
    """
    distance = (weights - weights_by_position).abs().sum(dim=-1) / 2
    return distance.mean(dim=-1)


def cumulative_singular_values(weights: Tensor, shares: Sequence[float] = RANK_SHARES) -> Tensor:
    """Returns for each head the share of the sum of all singular values that the largest ones hold, (H, n).

    Args:
        weights: (H, T, S).
        shares: n shares of the min(T, S) singular values; between two values the figure is interpolated.
    """
    values = torch.linalg.svdvals(weights.float())
    num_heads, num_values = values.shape
    sums = torch.cat([values.new_zeros(num_heads, 1), values.cumsum(dim=-1)], dim=-1)
    sums = sums / sums[:, -1:].clamp(min=SMALLEST_NORM)
    # sums[:, i] is of the largest i values; a share that falls between two of them is interpolated
    place = torch.tensor(shares) * num_values
    below = place.floor().long().clamp(max=num_values - 1)
    return torch.lerp(sums[:, below], sums[:, below + 1], place - below)


def rank_one_distances(x: Tensor) -> tuple[float, float]:
    """Returns how far the rows of x (T, C) are from being alike, relative to the Frobenius norm of x.

    Returns:
        the distance to the closest matrix of equal rows, the residual of Dong et al. 2021 (arXiv 2103.03404), and
        the distance to the closest matrix of rank one, which is not larger.
    """
    norm = x.norm().clamp(min=SMALLEST_NORM)
    equal_rows = (x - x.mean(dim=0)).norm() / norm
    singular_values = torch.linalg.svdvals(x.float())
    rank_one = singular_values[1:].norm() / norm
    return float(equal_rows), float(rank_one)


def histogram(values: Tensor, low: float, high: float, bins: int) -> list[float]:
    """Returns the share of the values in each of `bins` equal intervals from low to high.

    The first and the last interval also take the values beyond them.
    """
    counts = torch.histc(values.float().clamp(low, high), bins, low, high)
    return (counts / max(values.numel(), 1)).tolist()


def removal_order(importance: dict[str, list[float]]) -> list[Head]:
    """Returns the heads from the least to the most important.

    Args:
        importance: {attention: a figure for each head}.
    """
    by_importance = []
    for attention, values in importance.items():
        for number, value in enumerate(values):
            by_importance.append((value, Head(attention, number)))
    return [head for _, head in sorted(by_importance)]


def removal_steps(num_heads: int, steps: int) -> list[int]:
    """Returns how many heads are removed at each step, from none to all, in at most `steps` equal steps."""
    steps = min(steps, num_heads)
    return [round(num_heads * step / steps) for step in range(steps + 1)]
