"""Attention by position: the mean over sentences, and the constant logits that come nearest to it.

H heads, and sentences of up to T tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FIT_STEPS = 200  # at most; the fit converges much earlier
FIT_TOLERANCE = 1e-4  # relative change of a score at which the fit ends
SMALLEST_SCORE = 1e-6  # relative to the largest of a row: a weight of 0 gets a finite logit
SMALLEST_SUM = 1e-30  # so that nothing is divided by 0


class MeanByPosition:
    """The mean of matrices (H, T, S) of several sizes, cell by cell over the matrices that have the cell."""

    def __init__(self) -> None:
        """Starts without a matrix."""
        self.total = torch.zeros(0, 0, 0)
        self.count = torch.zeros(0, 0, 0)

    def add(self, matrix: Tensor) -> None:
        """Adds one more matrix."""
        size = [max(new, old) for new, old in zip(matrix.shape, self.total.shape)]
        self.total = enlarge(self.total, size)
        self.count = enlarge(self.count, size)
        heads, rows, columns = matrix.shape
        self.total[:heads, :rows, :columns] += matrix
        self.count[:heads, :rows, :columns] += 1

    def mean(self, rows: int, columns: int) -> Tensor:
        """Returns the first cells, (H, rows, columns), or fewer where no matrix was as large; 0 for an empty cell."""
        return self.total[:, :rows, :columns] / self.count[:, :rows, :columns].clamp(min=1)


def enlarge(matrix: Tensor, size: list[int]) -> Tensor:
    """Returns a matrix (H, T, S) with zeros after its last rows and columns, of a size that is at least its own."""
    if list(matrix.shape) == size:
        return matrix
    result = torch.zeros(size)
    heads, rows, columns = matrix.shape
    result[:heads, :rows, :columns] = matrix
    return result


class Constants(NamedTuple):
    """Logits that depend on positions alone, and give weights as near to the observed ones as such logits can."""

    by_position: Tensor  # (H, T, T)
    by_distance: Tensor  # (H, 2 T - 1), for the distances j - i from 1 - T to T - 1

    def matrix(self, size: int) -> Tensor:
        """Returns logits (H, size, size): by position, and by distance where no sentence had the position."""
        length = min(self.by_position.size(-1), size)
        by_position = self.by_position[:, :length, :length]
        result = toeplitz(self.by_distance, size)
        # The softmax of a row ignores a constant. In rows that have cells of both kinds, both get the same mean.
        difference = (by_position - result[:, :length, :length]).mean(dim=-1, keepdim=True)
        result[:, :length, length:] += difference
        result[:, :length, :length] = by_position
        return result


def fit_constants(weights: MeanByPosition, causal: bool) -> Constants:
    """Returns the logits by position, and by distance, under which the observed attention weights are most likely.

    They maximise ``sum_ij a_ij log softmax(S)_ij`` over all sentences, where the softmax of a sentence is over its own
    columns. Logits by position are known up to a constant for each row, logits by distance up to one constant: here
    the visible ones have the mean 0.

    Args:
        weights: those (H, T, T) of sentences of T tokens.
        causal: whether row i sees the columns up to i only. The logits after them are 0.
    """
    total = weights.total.double()
    length = total.size(-1)
    sentences_of_length = count_sentences(weights)
    visible = torch.ones(length, length, dtype=torch.bool)
    if causal:
        visible = visible.tril()
    by_position = most_likely_logits(total, sentences_of_length, visible)
    by_distance = most_likely_logits(sum_by_distance(total), sentences_of_length, visible)
    visible_distances = sum_by_distance(visible[None].double()) > 0
    return Constants(
        centre(by_position, visible.expand_as(by_position)),
        centre(by_distance, visible_distances.expand_as(by_distance)),
    )


def count_sentences(weights: MeanByPosition) -> Tensor:
    """Returns how many sentences had 1, 2, ... T tokens, (T,)."""
    with_position = weights.count[0].diagonal().double()  # sentences that have a token 0, 1, ... T - 1
    with_next_position = torch.cat([with_position[1:], with_position.new_zeros(1)])
    return with_position - with_next_position


def centre(logits: Tensor, visible: Tensor) -> Tensor:
    """Returns logits whose visible values have the mean 0 along the last dimension, and whose others are 0."""
    total = logits.masked_fill(~visible, 0.0).sum(dim=-1, keepdim=True)
    mean = total / visible.sum(dim=-1, keepdim=True)
    return (logits - mean).masked_fill(~visible, 0.0).float()


def most_likely_logits(sums: Tensor, sentences_of_length: Tensor, visible: Tensor) -> Tensor:
    """Returns the logits of `fit_constants`, of the size of `sums`.

    The steps are those of Hunter 2004 (MM algorithms for generalized Bradley-Terry models, section 5); none of them
    makes the weights less likely.

    Args:
        sums: the observed weights, summed by position (H, T, T) or by distance (H, 2 T - 1).
        sentences_of_length: (T,), how many sentences had 1, 2, ... T tokens.
        visible: (T, T), false where a row does not see a column.
    """
    length = len(sentences_of_length)
    is_by_distance = sums.dim() == 2
    positions = torch.arange(length)
    # the shortest sentence that has a cell ends at the larger of its two positions
    last_position = torch.maximum(positions[:, None], positions).expand(len(sums), -1, -1)
    scores = visible.to(sums).expand_as(last_position)  # exp(logits) by position
    for _ in range(FIT_STEPS):
        # for each row and length of a sentence: sentences over the sum of the row's scores
        by_length = sentences_of_length / scores.cumsum(dim=-1)
        # for each row and position: the sum over the sentences that have the position
        from_length_on = by_length.flip(-1).cumsum(dim=-1).flip(-1)
        expected = from_length_on.gather(-1, last_position) * visible
        if is_by_distance:
            expected = sum_by_distance(expected)
        new = sums / expected.clamp(min=SMALLEST_SUM)
        new = (new / new.amax(dim=-1, keepdim=True)).clamp(min=SMALLEST_SCORE)
        new_scores = (toeplitz(new, length) if is_by_distance else new) * visible
        has_converged = bool(((new_scores - scores).abs() <= FIT_TOLERANCE * scores).all())
        scores = new_scores
        if has_converged:
            break
    return new.log()


def sum_by_distance(matrix: Tensor) -> Tensor:
    """Returns the sums (H, 2 T - 1) of a matrix (H, T, T) over its diagonals j - i, from 1 - T to T - 1."""
    length = matrix.size(-1)
    positions = torch.arange(length)
    diagonal = positions - positions[:, None] + length - 1
    sums = matrix.new_zeros(len(matrix), 2 * length - 1)
    return sums.index_add_(1, diagonal.flatten(), matrix.flatten(1))


def toeplitz(values: Tensor, size: int) -> Tensor:
    """Returns the matrix (H, size, size) of values (H, 2 m + 1) by distance j - i; beyond m that of m."""
    m = values.size(-1) // 2
    positions = torch.arange(size)
    distance = positions - positions[:, None]
    return values[:, distance.clamp(-m, m) + m]
