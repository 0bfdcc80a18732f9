"""From tensors to figures. T rows (queries) and S columns (keys) of one sentence, H heads."""

from typing import Dict, List, Sequence, Tuple

import torch
from torch import Tensor

from ..masks import causal_mask, masked_softmax

RANK_SHARES = tuple(i / 20 for i in range(21))  # where cumulative singular values are read off


def weights_of(logits: Tensor, causal: bool) -> Tensor:
    """The attention weights (H, T, S): softmax of logits of the same size, where a causal row sees no later column."""
    return masked_softmax(logits.float().unsqueeze(0), None, causal_mask(logits) if causal else None)[0]


def where_it_looks(weights: Tensor) -> Dict[str, Tensor]:
    """For each head (H,) the mean over the rows of weights (H, T, S).

    ``entropy`` in nats; ``distance``, the mean of ``|i - j|`` in tokens under the weights of row i; ``diagonal`` and
    ``neighbours``, the share of the weight on j = i and on j = i - 1, i + 1.
    """
    rows, columns = weights.shape[-2:]
    distance = (torch.arange(rows)[:, None] - torch.arange(columns)).abs().to(weights)
    share = {
        "entropy": -torch.xlogy(weights, weights),
        "distance": weights * distance,
        "diagonal": weights * (distance == 0),
        "neighbours": weights * (distance == 1),
    }
    return {name: value.sum(dim=-1).mean(dim=-1) for name, value in share.items()}


def word_dependence(weights: Tensor, by_position: Tensor) -> Tensor:
    """For each head (H,) how far the weights are from what positions alone give: 0 none of it, 1 all of it.

    The mean over the rows of the total variation distance ``1/2 sum_j |a_ij - b_ij|``.

    Args:
        weights: (H, T, S).
        by_position: (H, T, S), the softmax of the mean logits of each position over the data.
    """
    return (weights - by_position).abs().sum(dim=-1).mean(dim=-1) / 2


def cumulative_singular_values(weights: Tensor, shares: Sequence[float] = RANK_SHARES) -> Tensor:
    """For each head of (H, T, S) the share of the sum of all singular values that the first ones hold, (H, n).

    Args:
        shares: n shares of the min(T, S) singular values; between two of them the figure is interpolated.
    """
    values = torch.linalg.svdvals(weights.float())
    sums = torch.cat([values.new_zeros(len(values), 1), values.cumsum(dim=-1)], dim=-1)
    sums = sums / sums[:, -1:].clamp(min=1e-30)
    place = torch.tensor(shares) * values.size(-1)
    left = place.floor().long().clamp(max=values.size(-1) - 1)
    return torch.lerp(sums[:, left], sums[:, left + 1], place - left)


def rank_one_distances(x: Tensor) -> Tuple[float, float]:
    """How far the rows of x (T, C) are from being alike, relative to the Frobenius norm of x.

    Returns:
        the distance to the closest matrix of equal rows, the residual of Dong et al. 2021 (arXiv 2103.03404), and
        the distance to the closest matrix of rank one, which is not larger.
    """
    norm = x.norm().clamp(min=1e-30)
    values = torch.linalg.svdvals(x.float())
    return float((x - x.mean(dim=0)).norm() / norm), float(values[1:].norm() / norm)


def histogram(values: Tensor, low: float, high: float, bins: int) -> List[float]:
    """The share of the values in each of `bins` equal intervals from low to high; the outermost take what is beyond."""
    counts = torch.histc(values.float().clamp(low, high), bins, low, high)
    return (counts / max(values.numel(), 1)).tolist()


class MeanByPosition:
    """The mean of matrices (H, T, S) of several sizes, cell by cell over those that have the cell."""

    def __init__(self) -> None:
        self.total = self.count = torch.zeros(0, 0, 0)

    def add(self, matrix: Tensor) -> None:
        """One more matrix."""
        size = [max(new, old) for new, old in zip(matrix.shape, self.total.shape)]
        if size != list(self.total.shape):
            for name in ("total", "count"):
                old, new = getattr(self, name), torch.zeros(size)
                new[tuple(slice(n) for n in old.shape)] = old
                setattr(self, name, new)
        part = tuple(slice(n) for n in matrix.shape)
        self.total[part] += matrix
        self.count[part] += 1

    def mean(self, rows: int, columns: int) -> Tensor:
        """The first cells, (H, rows, columns) or less where no matrix was as large; 0 in a cell that none has had."""
        return self.total[:, :rows, :columns] / self.count[:, :rows, :columns].clamp(min=1)


def removal_order(importance: Dict[str, List[float]]) -> List[Tuple[str, int]]:
    """The heads, as (attention, head), from the least to the most important."""
    heads = [(value, name, head) for name, values in importance.items() for head, value in enumerate(values)]
    return [(name, head) for _, name, head in sorted(heads)]


def removal_steps(heads: int, steps: int) -> List[int]:
    """How many of the heads are removed at each step, from none to all, in at most `steps` equal steps."""
    steps = min(steps, heads)
    return [round(heads * step / steps) for step in range(steps + 1)]
