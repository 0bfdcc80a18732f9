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

    A softmax does not change if a constant is added to its whole row. So the logits of a row by position and by
    distance can be compared only up to a constant. A constant is added to the row by distance, so that its first T
    columns have the same mean as the row by position. For example, the row [1, 3] by position has the mean 2. The row
    [0, 2, 5] by distance becomes [1, 3, 6], whose first two columns have this mean. The result is [1, 3, 6].

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

    Logits are likely if the sum of ``a_ij log softmax(S)_ij`` over all cells of all sentences is large. Here a_ij are
    the observed weights of a sentence. S are the logits, cut to its number of tokens.

    Args:
        weights: the observed weights of all sentences, of up to T tokens. Their sum and their count are read here.
        causal: True if row i sees no column after i; the logits of these columns are 0.
    """
    total = weights.total.double()  # (H, T, T)
    sentences_of_length = count_sentences(weights)  # (T,)
    return Constants(
        by_position=fit_by_position(total, sentences_of_length, causal),
        by_distance=fit_by_distance(total, sentences_of_length, causal),
    )


def fit_by_position(total: Tensor, sentences_of_length: Tensor, causal: bool) -> Tensor:
    """Returns the logits by position under which the observed attention weights are most likely, (H, T, T).

    A softmax does not change if a constant is added to its whole row. The constants are chosen so that the logits of
    each row have the mean 0.

    Args:
        total: the observed weights (H, T, T), summed over all sentences.
        sentences_of_length: how many sentences had 1, 2, ... T tokens, (T,).
        causal: True if row i sees no column after i.
    """
    visible = visible_cells(total.size(-1), causal)
    logits = most_likely_logits(total, sentences_of_length, visible, by_distance=False)
    return centre(logits, visible.expand_as(logits))


def fit_by_distance(total: Tensor, sentences_of_length: Tensor, causal: bool) -> Tensor:
    """Returns the logits by distance under which the observed attention weights are most likely, (H, 2 T - 1).

    The attention weights do not change if a constant is added to all logits of a head. The constants are chosen so that
    the logits of each head have the mean 0.

    Args:
        total: the observed weights (H, T, T), summed over all sentences.
        sentences_of_length: how many sentences had 1, 2, ... T tokens, (T,).
        causal: True if row i sees no column after i.
    """
    length = total.size(-1)
    visible = visible_cells(length, causal)
    logits = most_likely_logits(total, sentences_of_length, visible, by_distance=True)
    distances = torch.arange(1 - length, length)  # j - i of each logit
    visible_distances = distances <= 0 if causal else torch.ones_like(distances, dtype=torch.bool)
    return centre(logits, visible_distances.expand_as(logits))


def visible_cells(length: int, causal: bool) -> Tensor:
    """Returns which cells of a matrix (length, length) of attention weights can be other than 0: True or False."""
    visible = torch.ones(length, length, dtype=torch.bool)
    return visible.tril() if causal else visible


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


def most_likely_logits(total: Tensor, sentences_of_length: Tensor, visible: Tensor, by_distance: bool) -> Tensor:
    """Returns the logits under which the observed attention weights are most likely; see `fit_constants`.

    The fit works on scores, which are exp(logits). So an attention weight is its score divided by the sum of its row.
    All scores begin as 1. Each step of `improve_scores` makes the observed weights more likely, until the scores hardly
    change any more.

    Args:
        total: the observed weights (H, T, T), summed over all sentences.
        sentences_of_length: how many sentences had 1, 2, ... T tokens, (T,).
        visible: (T, T), False where a row does not see a column.
        by_distance: whether the logits are by distance, (H, 2 T - 1), or by position, (H, T, T).
    """
    observed = sum_by_distance(total) if by_distance else total
    scores = torch.ones_like(observed)
    # A score by distance is in all cells of a diagonal. The matrix has the score of each cell, whatever the form.
    matrix = make_score_matrix(scores, visible, by_distance)  # (H, T, T)
    for _ in range(FIT_STEPS):
        scores = improve_scores(observed, matrix, sentences_of_length, visible, by_distance)
        earlier_matrix = matrix
        matrix = make_score_matrix(scores, visible, by_distance)
        has_hardly_changed = (matrix - earlier_matrix).abs() <= FIT_TOLERANCE * earlier_matrix
        if bool(has_hardly_changed.all()):
            break
    return scores.log()  # No score is 0, see `limit_scores`.


def make_score_matrix(scores: Tensor, visible: Tensor, by_distance: bool) -> Tensor:
    """Returns scores as a matrix (H, T, T), with 0 where a row does not see a column.

    Args:
        scores: by distance (H, 2 T - 1), or by position (H, T, T).
        visible: (T, T), False where a row does not see a column.
        by_distance: whether the scores are by distance.
    """
    if by_distance:
        return toeplitz(scores, size=len(visible)) * visible
    return scores * visible


def improve_scores(
    observed: Tensor, matrix: Tensor, sentences_of_length: Tensor, visible: Tensor, by_distance: bool
) -> Tensor:
    """Does one step of the fit of `most_likely_logits`, and returns the new scores, of the size of `observed`.

    The step computes

        new score = observed weight / (sum over all sentences of 1 / (sum of the row))

    A score by distance is in many rows of a sentence, so the sum is over these rows too.

    This is the step of Hunter 2004 (MM algorithms for generalized Bradley-Terry models, section 5), which never makes
    the observed weights less likely.

    Args:
        observed: the observed weights, summed over all sentences: by distance (H, 2 T - 1), or by position (H, T, T).
        matrix: the scores before the step, (H, T, T), 0 where a row does not see a column.
        sentences_of_length: how many sentences had 1, 2, ... T tokens, (T,).
        visible: (T, T), False where a row does not see a column.
        by_distance: whether the scores are by distance.
    """
    inverse_row_sums = sum_inverse_row_sums(matrix, sentences_of_length) * visible  # (H, T, T)
    if by_distance:
        inverse_row_sums = sum_by_distance(inverse_row_sums)  # (H, 2 T - 1)
    scores = observed / inverse_row_sums.clamp(min=SMALLEST_SUM)
    return limit_scores(scores)


def limit_scores(scores: Tensor) -> Tensor:
    """Returns scores from SMALLEST_SCORE to 1, by dividing them by the largest one and raising those that are lower.

    The division does not change the attention weights, as each row of scores is divided by a single number: by the
    largest score of the row if scores are by position, (H, T, T), and by that of the head if they are by distance,
    (H, 2 T - 1).
    """
    largest = scores.amax(dim=-1, keepdim=True)
    return (scores / largest).clamp(min=SMALLEST_SCORE)


def sum_inverse_row_sums(matrix: Tensor, sentences_of_length: Tensor) -> Tensor:
    """Returns for each cell the sum of 1 / (sum of its row) over all sentences that have the cell, (H, T, T).

    The sum of a row depends on the length of the sentence. In a sentence of n tokens, row i has n scores, and their sum
    is matrix[i, 0] + ... + matrix[i, n - 1]. The sentence has cell (i, j) if n > i and n > j. If N[n] is the number of
    sentences of n tokens, then

        result[i, j] = sum over n > max(i, j) of N[n] / (matrix[i, 0] + ... + matrix[i, n - 1])

    For example, if 3 sentences have one token and 5 sentences have two tokens, and all scores are 1, then
    result[0, 0] = 3 / 1 + 5 / 2, and the other three cells are 5 / 2.

    Args:
        matrix: the scores, (H, T, T), 0 where a row does not see a column.
        sentences_of_length: how many sentences had 1, 2, ... T tokens, (T,).
    """
    num_heads, length, _ = matrix.shape
    row_sums = matrix.cumsum(dim=-1)  # row_sums[h, i, k] is the sum of row i in a sentence whose last position is k.
    # terms[h, i, k] is for all sentences whose last position is k. In the example, terms[h, 0] is [3 / 1, 5 / 2].
    terms = sentences_of_length / row_sums
    # sums[h, i, k] is for all sentences that have position k. In the example, sums[h, 0] is [3 / 1 + 5 / 2, 5 / 2].
    sums = reverse_cumsum(terms)
    # A sentence has cell (i, j) if it has the larger one of the two positions.
    positions = torch.arange(length)
    larger_position = torch.maximum(positions[:, None], positions)  # (T, T)
    return sums.gather(-1, larger_position.expand(num_heads, -1, -1))


def reverse_cumsum(values: Tensor) -> Tensor:
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
