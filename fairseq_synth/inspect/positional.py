"""Attention by position: its mean over sentences, and the constant logits whose attention comes nearest to it.

Sizes: H heads, and sentences of up to T tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FIT_STEPS = 200  # at most; the fit converges much earlier
FIT_TOLERANCE = 1e-4  # relative change of a score at which the fit ends
SMALLEST_SCORE = 1e-6  # relative to the largest of a row: a weight of 0 gets a finite logit
SMALLEST_SUM = 1e-30  # so that nothing is divided by 0


class MeanByPosition:
    """The mean of matrices (H, T, S) of several sizes: each cell is averaged over the matrices that have it."""

    def __init__(self) -> None:
        """Starts without a matrix."""
        self.total = torch.zeros(0, 0, 0)
        self.count = torch.zeros(0, 0, 0)  # in how many matrices there is a cell

    def add(self, matrix: Tensor) -> None:
        """Adds a matrix (H, T, S)."""
        size = [max(new, old) for new, old in zip(matrix.shape, self.total.shape)]
        self.total = enlarge(self.total, size)
        self.count = enlarge(self.count, size)
        heads, rows, columns = matrix.shape
        self.total[:heads, :rows, :columns] += matrix
        self.count[:heads, :rows, :columns] += 1

    def mean_of_first(self, rows: int, columns: int) -> Tensor:
        """Returns the first rows and columns of the mean, (H, rows, columns).

        There are fewer rows or columns if no matrix had as many. A cell that no matrix had is 0.
        """
        return self.total[:, :rows, :columns] / self.count[:, :rows, :columns].clamp(min=1)


def enlarge(matrix: Tensor, size: list[int]) -> Tensor:
    """Returns a matrix (H, T, S) with rows and columns of zeros added at its end, so that it has the given size."""
    if list(matrix.shape) == size:
        return matrix
    result = torch.zeros(size)
    heads, rows, columns = matrix.shape
    result[:heads, :rows, :columns] = matrix
    return result


class Constants(NamedTuple):
    """Logits that depend on positions alone, and whose attention comes as near to the observed one as possible."""

    by_position: Tensor  # (H, T, T)
    by_distance: Tensor  # (H, 2 T - 1), for the distances j - i from 1 - T to T - 1

    def matrix(self, size: int) -> Tensor:
        """Returns logits (H, size, size) for sentences of `size` tokens.

        Positions that the observed sentences had get the logits by position, later ones the logits by distance.
        """
        length = min(self.by_position.size(-1), size)
        by_position = self.by_position[:, :length, :length]
        by_distance = toeplitz(self.by_distance, size)  # (H, size, size)
        first_rows = continue_rows(by_position, by_distance[:, :length])  # (H, length, size)
        later_rows = by_distance[:, length:]  # (H, size - length, size)
        return torch.cat([first_rows, later_rows], dim=1)


def continue_rows(by_position: Tensor, by_distance: Tensor) -> Tensor:
    """Returns T rows of logits with more than T columns: first those by position, then those by distance.

    A softmax does not change if a constant is added to its whole row. So a row of logits by distance may lie higher or
    lower than the same row by position. It is first shifted so that its first T columns have the mean of those by
    position. For example, the row [1, 3] by position and the row [0, 2, 5] by distance become [1, 3, 6].

    Args:
        by_position: (H, T, T).
        by_distance: (H, T, columns), for the same rows.

    Returns:
        (H, T, columns).
    """
    length = by_position.size(-1)  # T
    differences = by_position - by_distance[:, :, :length]
    shift = differences.mean(dim=-1, keepdim=True)  # (H, T, 1)
    continuation = by_distance[:, :, length:] + shift
    return torch.cat([by_position, continuation], dim=2)


def fit_constants(weights: MeanByPosition, causal: bool) -> Constants:
    """Returns the logits by position, and by distance, under which the observed attention weights are most likely.

    They maximise ``sum_ij a_ij log softmax(S)_ij`` over all sentences, where a_ij are the observed weights, S are the
    logits, and the softmax is over the columns of each sentence. The logits by position are determined up to a
    constant for each row, the logits by distance up to one constant. These are chosen so that the mean is 0.

    Args:
        weights: the mean of the observed weights (H, T, T) over sentences of T tokens.
        causal: True if row i sees no column after i; the logits of these columns are 0.
    """
    total = weights.total.double()  # (H, T, T), the sum of the observed weights over all sentences
    length = total.size(-1)
    sentences_of_length = count_sentences(weights)  # (T,)
    visible = torch.ones(length, length, dtype=torch.bool)  # (T, T)
    visible_distances = torch.ones(2 * length - 1, dtype=torch.bool)  # for j - i from 1 - T to T - 1
    if causal:
        visible = visible.tril()
        visible_distances[length:] = False  # the distances from 1 on: row i does not see the columns after i
    by_position = most_likely_logits(total, sentences_of_length, visible)  # (H, T, T)
    by_distance = most_likely_logits(sum_by_distance(total), sentences_of_length, visible)  # (H, 2 T - 1)
    return Constants(
        by_position=centre(by_position, visible.expand_as(by_position)),
        by_distance=centre(by_distance, visible_distances.expand_as(by_distance)),
    )


def count_sentences(weights: MeanByPosition) -> Tensor:
    """Returns how many of the averaged sentences had 1, 2, ... T tokens, (T,)."""
    # The diagonal cell of position i is in all sentences of more than i tokens. Of these, the sentences of exactly
    # i + 1 tokens are those without the next position.
    with_position = weights.count[0].diagonal().double()  # (T,)
    with_next_position = torch.cat([with_position[1:], with_position.new_zeros(1)])  # no sentence has position T
    return with_position - with_next_position


def centre(logits: Tensor, visible: Tensor) -> Tensor:
    """Shifts logits so that the visible ones have the mean 0 along the last dimension, and sets the others to 0."""
    total = logits.masked_fill(~visible, 0.0).sum(dim=-1, keepdim=True)
    mean = total / visible.sum(dim=-1, keepdim=True)
    return (logits - mean).masked_fill(~visible, 0.0).float()


def most_likely_logits(observed: Tensor, sentences_of_length: Tensor, visible: Tensor) -> Tensor:
    """Returns the logits under which the observed attention weights are most likely; see `fit_constants`.

    The fit works on scores, which are exp(logits): all begin as 1, and each step of `improve_scores` makes the observed
    weights more likely, until the scores hardly change any more.

    Args:
        observed: the observed weights, summed over all sentences, by position (H, T, T) or by distance (H, 2 T - 1).
            The logits are of the same size.
        sentences_of_length: how many sentences had 1, 2, ... T tokens, (T,).
        visible: (T, T), False where a row does not see a column.
    """
    scores = torch.ones_like(observed)  # by position or by distance, as the observed weights
    cell_scores = spread_over_cells(scores, visible)  # (H, T, T) in both cases
    for _ in range(FIT_STEPS):
        scores = improve_scores(observed, cell_scores, sentences_of_length, visible)
        new_cell_scores = spread_over_cells(scores, visible)
        changes = (new_cell_scores - cell_scores).abs()
        has_converged = bool((changes <= FIT_TOLERANCE * cell_scores).all())
        cell_scores = new_cell_scores
        if has_converged:
            break
    return scores.log()


def is_by_distance(values: Tensor) -> bool:
    """Returns whether values are by distance, (H, 2 T - 1), and not by position, (H, T, T)."""
    return values.dim() == 2


def improve_scores(observed: Tensor, cell_scores: Tensor, sentences_of_length: Tensor, visible: Tensor) -> Tensor:
    """Does one step of the fit of `most_likely_logits`, and returns the new scores, of the size of `observed`.

    The new score of a cell is its observed weight divided by the weight that a score of 1 would give it
    (`expect_weights_of_score_one`). This is the step of Hunter 2004 (MM algorithms for generalized Bradley-Terry
    models, section 5), which never makes the observed weights less likely.

    Args:
        observed: as for `most_likely_logits`, by position (H, T, T) or by distance (H, 2 T - 1).
        cell_scores: the scores before the step by position, (H, T, T), 0 where a row does not see a column.
        sentences_of_length: how many sentences had 1, 2, ... T tokens, (T,).
        visible: (T, T), False where a row does not see a column.
    """
    expected = expect_weights_of_score_one(cell_scores, sentences_of_length) * visible  # (H, T, T)
    if is_by_distance(observed):
        expected = sum_by_distance(expected)
    scores = observed / expected.clamp(min=SMALLEST_SUM)
    # Scores by position are divided by the largest score of their row, scores by distance by that of their head. The
    # softmax stays the same, and one lower limit suits all rows and heads.
    relative_scores = scores / scores.amax(dim=-1, keepdim=True)
    return relative_scores.clamp(min=SMALLEST_SCORE)


def spread_over_cells(scores: Tensor, visible: Tensor) -> Tensor:
    """Returns scores by position, (H, T, T), with 0 where a row does not see a column.

    Args:
        scores: by position (H, T, T), or by distance (H, 2 T - 1).
        visible: (T, T), False where a row does not see a column.
    """
    if is_by_distance(scores):
        return toeplitz(scores, size=len(visible)) * visible
    return scores * visible


def expect_weights_of_score_one(scores: Tensor, sentences_of_length: Tensor) -> Tensor:
    """Returns the attention weight that each cell would have with a score of 1, summed over all sentences, (H, T, T).

    The attention weight of cell (i, j), from position i to position j, is its score divided by the sum of the scores in
    row i. With a score of 1 and an unchanged sum, the weight is 1 / sum. The sum depends on the length of the sentence:
    in a sentence of n tokens, it is scores[i, 0] + ... + scores[i, n - 1]. A sentence has the cell if n is larger than
    i and j. With the number of sentences of n tokens written as N[n], the result is therefore

        result[i, j] = sum over n > max(i, j) of N[n] / (scores[i, 0] + ... + scores[i, n - 1])

    For example, if 3 sentences have one token and 5 sentences have two tokens, and all scores are 1, then
    result[0, 0] = 3 / 1 + 5 / 2, and the other three cells are 5 / 2.

    Args:
        scores: exp(logits) by position, (H, T, T), 0 where a row does not see a column.
        sentences_of_length: how many sentences had 1, 2, ... T tokens, (T,).
    """
    num_heads, length, _ = scores.shape
    # terms[h, i, n] is the term of the sum for sentences of n + 1 tokens. In the example above, terms[h, 0] is
    # [3 / 1, 5 / 2]. Rows beyond the end of a sentence have terms, too, but these are not used below.
    terms = sentences_of_length / scores.cumsum(dim=-1)
    # sums[h, i, n] is the sum of the terms from n on, for all sentences of more than n tokens. In the example,
    # sums[h, 0] is [3 / 1 + 5 / 2, 5 / 2].
    sums = sum_from_each_on(terms)
    # result[h, i, j] = sums[h, i, max(i, j)]
    positions = torch.arange(length)
    larger_position = torch.maximum(positions[:, None], positions)  # (T, T), max(i, j)
    return sums.gather(-1, larger_position.expand(num_heads, -1, -1))


def sum_from_each_on(values: Tensor) -> Tensor:
    """Returns at each place of the last dimension the sum of the values from there to the end.

    For example, [1, 2, 3] becomes [6, 5, 3].
    """
    # `cumsum` sums up from the beginning, so the order is reversed before and after it.
    return values.flip(-1).cumsum(dim=-1).flip(-1)


def sum_by_distance(matrix: Tensor) -> Tensor:
    """Returns the sums (H, 2 T - 1) of a matrix (H, T, T) over its diagonals, by j - i from 1 - T to T - 1."""
    length = matrix.size(-1)
    positions = torch.arange(length)
    diagonal = positions - positions[:, None] + length - 1  # (T, T), the number of each cell's diagonal, from 0
    sums = matrix.new_zeros(len(matrix), 2 * length - 1)
    return sums.index_add_(1, diagonal.flatten(), matrix.flatten(1))


def toeplitz(values: Tensor, size: int) -> Tensor:
    """Returns the matrix (H, size, size) whose cell (i, j) has the value of the distance j - i.

    For example, the values [5, 6, 7], for the distances -1, 0 and 1, become [[6, 7, 7], [5, 6, 7], [5, 5, 6]].

    Args:
        values: (H, 2 m + 1), for the distances from -m to m. Larger distances get the value of m, or of -m.
        size: the number of rows and columns.
    """
    largest_distance = values.size(-1) // 2  # m
    positions = torch.arange(size)
    distance = (positions - positions[:, None]).clamp(-largest_distance, largest_distance)
    return values[:, distance + largest_distance]
