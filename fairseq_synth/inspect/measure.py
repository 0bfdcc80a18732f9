"""From tensors to figures. T rows (queries) and S columns (keys) of one sentence, H heads."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import causal_mask, masked_softmax

FIT_STEPS = 200  # of logits by position, at most; they converge much earlier
SMALLEST = 1e-6  # attention weight that such logits tell from 0, relative to the largest of the row
RANK_SHARES = tuple(i / 20 for i in range(21))  # where cumulative singular values are read off


def weights_of(logits: Tensor, causal: bool) -> Tensor:
    """The attention weights (H, T, S): softmax of logits of the same size, where a causal row sees no later column."""
    return masked_softmax(logits.float().unsqueeze(0), None, causal_mask(logits) if causal else None)[0]


def where_it_looks(weights: Tensor) -> dict[str, Tensor]:
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


def rank_one_distances(x: Tensor) -> tuple[float, float]:
    """How far the rows of x (T, C) are from being alike, relative to the Frobenius norm of x.

    Returns:
        the distance to the closest matrix of equal rows, the residual of Dong et al. 2021 (arXiv 2103.03404), and
        the distance to the closest matrix of rank one, which is not larger.
    """
    norm = x.norm().clamp(min=1e-30)
    values = torch.linalg.svdvals(x.float())
    return float((x - x.mean(dim=0)).norm() / norm), float(values[1:].norm() / norm)


def histogram(values: Tensor, low: float, high: float, bins: int) -> list[float]:
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


class Constants(NamedTuple):
    """Logits that depend on positions alone, and give weights as near to those seen as such logits can."""

    by_position: Tensor  # (H, n, n) of the positions seen
    by_distance: Tensor  # (H, 2 n - 1): of the distances j - i from 1 - n to n - 1

    def matrix(self, size: int) -> Tensor:
        """(H, size, size): by position and, where no sentence had the position, by distance."""
        seen = min(self.by_position.size(-1), size)
        found = by_diagonal(self.by_distance, size)
        near = self.by_position[:, :seen, :seen]
        # a constant added to a row of logits changes nothing: in rows with both, both get the same mean
        found[:, :seen, seen:] += (near - found[:, :seen, :seen]).mean(dim=-1, keepdim=True)
        found[:, :seen, :seen] = near
        return found


def constants_of(seen: MeanByPosition, causal: bool) -> Constants:
    """The logits by position, and by distance, under which the attention weights seen are most likely.

    They maximise ``sum_ij a_ij log softmax(S)_ij`` over all sentences, each with a softmax over its own columns. Both
    are found but for a constant, a row's or of all.

    Args:
        seen: weights (H, T, T) of sentences of T tokens.
        causal: row i sees the columns up to i. What lies behind is 0.
    """
    rows = seen.count[0].diagonal().double()
    ends = rows - torch.cat([rows[1:], rows.new_zeros(1)])  # sentences whose last position is this one
    length = len(rows)
    visible = torch.ones(length, length, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    found = []
    for logits, seen_of in (
        (likeliest(seen.total.double(), ends, visible), visible.expand_as(seen.total)),
        (likeliest(sum_by_diagonal(seen.total.double()), ends, visible), sum_by_diagonal(visible[None].double()) > 0),
    ):
        mean = logits.where(seen_of, logits.new_zeros([])).sum(-1, keepdim=True) / seen_of.sum(-1, keepdim=True)
        found.append((logits - mean).masked_fill(~seen_of, 0.0).float())
    return Constants(*found)


def likeliest(sums: Tensor, ends: Tensor, visible: Tensor) -> Tensor:
    """The logits of `constants_of`, by the steps of Hunter 2004 (MM algorithms for generalized Bradley-Terry models,
    section 5), none of which makes them less likely.

    Args:
        sums: the weights seen, summed by position (H, T, T), or by distance (H, 2 T - 1).
        ends: (T,), sentences of 1 to T tokens.
        visible: (T, T), false where a row does not see a column.

    Returns:
        of the size of `sums`.
    """
    length, tied = len(ends), sums.dim() == 2
    places = torch.arange(length)
    shortest = torch.maximum(places[:, None], places).expand(len(sums), -1, -1)  # sentence with this cell, less one
    scores = visible.to(sums).expand_as(shortest)
    for _ in range(FIT_STEPS):
        # 1 / the sum of a row's scores, of each length; then the sum over the sentences that have the cell
        expected = (ends / scores.cumsum(dim=-1)).flip(-1).cumsum(dim=-1).flip(-1).gather(-1, shortest) * visible
        found = sums / (sum_by_diagonal(expected) if tied else expected).clamp(min=1e-30)
        found = (found / found.amax(dim=-1, keepdim=True)).clamp(min=SMALLEST)
        old, scores = scores, (by_diagonal(found, length) if tied else found) * visible
        if float((scores - old).abs().sub(1e-4 * old).max()) <= 0:
            break
    return found.log()


def sum_by_diagonal(matrix: Tensor) -> Tensor:
    """The sums over the diagonals j - i of (H, T, T), from 1 - T to T - 1, (H, 2 T - 1)."""
    length = matrix.size(-1)
    place = torch.arange(length) - torch.arange(length)[:, None] + length - 1
    sums = matrix.new_zeros(len(matrix), 2 * length - 1)
    return sums.index_add_(1, place.flatten(), matrix.flatten(1))


def by_diagonal(values: Tensor, size: int) -> Tensor:
    """The matrix (H, size, size) of values (H, 2 m + 1) by distance j - i; beyond m that of m."""
    m = values.size(-1) // 2
    place = torch.arange(size) - torch.arange(size)[:, None]
    return values[:, place.clamp(-m, m) + m]


def removal_order(importance: dict[str, list[float]]) -> list[tuple[str, int]]:
    """The heads, as (attention, head), from the least to the most important."""
    heads = [(value, name, head) for name, values in importance.items() for head, value in enumerate(values)]
    return [(name, head) for _, name, head in sorted(heads)]


def removal_steps(heads: int, steps: int) -> list[int]:
    """How many of the heads are removed at each step, from none to all, in at most `steps` equal steps."""
    steps = min(steps, heads)
    return [round(heads * step / steps) for step in range(steps + 1)]
