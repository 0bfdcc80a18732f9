"""Attention by position: its mean over sentences, and the constant logits whose attention comes nearest to it.

Sizes: H heads, and sentences of up to T tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FIT_STEPS = 200  # at most; the fit converges much earlier
FIT_TOLERANCE = 1e-4  # relative change of a score at which the fit ends
SMALLEST_SCORE = 1e-6  # relative to the largest of a row: a weight of 0 gets a finite logit


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

    Both are found by maximum likelihood, as in a logistic regression. All sentences have the same logits S (H, T, T).
    A sentence of n tokens has the first n rows and columns of S. If it has the observed weights a, its log-likelihood
    is the sum of ``a_ij log softmax(S)_ij`` over its cells, which is

        sum of a_ij S_ij over all cells - sum of log(sum of exp(S_ij) over row i) over all rows

    The first part depends only on the weights, and the second part only on n. So all that matters of many sentences is
    the sum of their weights, and how many of them have each length.

    Args:
        weights: the observed weights of all sentences, of up to T tokens.
        causal: True if row i sees no column after i; the logits of these columns are 0.
    """
    total = weights.total.double()  # (H, T, T), the sum of the weights of all sentences
    sentences_of_length = count_sentences(weights)  # (T,), how many sentences have 1, 2, ... T tokens
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
    logits = most_likely_logits(total, sentences_of_length, causal, by_distance=False)
    return centre(logits)


def fit_by_distance(total: Tensor, sentences_of_length: Tensor, causal: bool) -> Tensor:
    """Returns the logits by distance under which the observed attention weights are most likely, (H, 2 T - 1).

    The attention weights do not change if a constant is added to all logits of a head. The constants are chosen so that
    the logits of each head have the mean 0.

    Args:
        total: the observed weights (H, T, T), summed over all sentences.
        sentences_of_length: how many sentences had 1, 2, ... T tokens, (T,).
        causal: True if row i sees no column after i.
    """
    logits = most_likely_logits(total, sentences_of_length, causal, by_distance=True)  # (H, T, T)
    return centre(read_diagonals(logits))


def read_diagonals(matrix: Tensor) -> Tensor:
    """Returns the values (H, 2 T - 1) of the diagonals of a matrix (H, T, T), each of which has a single value.

    They are in the order of the distance j - i, from 1 - T to T - 1. So they go up the first column, and then along the
    first row. For example, they are 3, 4, 5, 6, 7 for this matrix, with the distances -2 to 2:

        5 6 7
        4 5 6
        3 4 5
    """
    first_column = matrix[:, :, 0]  # 5 4 3
    first_row = matrix[:, 0, :]  # 5 6 7
    negative_distances = first_column[:, 1:].flip(-1)  # 3 4, without the 5, which is in the first row, too
    return torch.cat([negative_distances, first_row], dim=-1)


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


def centre(logits: Tensor) -> Tensor:
    """Shifts logits so that they have the mean 0 along the last dimension.

    Logits of -inf, of columns that a row does not see, do not count, and become 0. For example, [1, 3, -inf] becomes
    [-1, 1, 0].
    """
    is_hidden = logits.isneginf()
    total = logits.masked_fill(is_hidden, 0.0).sum(dim=-1, keepdim=True)
    num_visible = (~is_hidden).sum(dim=-1, keepdim=True)
    mean = total / num_visible
    return (logits - mean).masked_fill(is_hidden, 0.0).float()


def most_likely_logits(total: Tensor, sentences_of_length: Tensor, causal: bool, by_distance: bool) -> Tensor:
    """Returns the logits under which the observed attention weights are most likely; see `fit_constants`.

    The fit works on scores, which are exp(logits). So an attention weight is its score divided by the sum of its row.
    All scores begin as 1. The scores are improved again and again, until none of them changes by more than
    `FIT_TOLERANCE`, relative to its size.

    Args:
        total: the observed weights (H, T, T), summed over all sentences.
        sentences_of_length: how many sentences had 1, 2, ... T tokens, (T,).
        causal: True if row i sees no column after i.
        by_distance: whether all cells with the same distance j - i, which form a diagonal, have the same logit.

    Returns:
        (H, T, T), -inf where a row does not see a column.
    """
    hidden = ~visible_cells(total.size(-1), causal)  # (T, T), True where a row does not see a column
    scores = torch.ones_like(total).masked_fill(hidden, 0.0)  # (H, T, T), always 0 in hidden cells
    for _ in range(FIT_STEPS):
        improved_scores = improve_scores(scores, total, sentences_of_length, by_distance).masked_fill(hidden, 0.0)
        is_finished = are_close(scores, improved_scores)
        scores = improved_scores
        if is_finished:
            break
    return scores.log()  # the logarithm of 0 is -inf


def are_close(scores: Tensor, improved_scores: Tensor) -> bool:
    """Returns whether no score changes by more than `FIT_TOLERANCE`, relative to its size."""
    changes = (improved_scores - scores).abs()
    return bool((changes <= FIT_TOLERANCE * scores).all())


def sum_diagonals(matrix: Tensor) -> Tensor:
    """Replaces each cell of a matrix (H, T, T) by the sum of its diagonal: [[1, 2], [3, 4]] -> [[5, 2], [3, 5]]."""
    return toeplitz(sum_by_distance(matrix), size=matrix.size(-1))


def improve_scores(scores: Tensor, total: Tensor, sentences_of_length: Tensor, by_distance: bool) -> Tensor:
    """Returns better scores: the observed attention weights are at least as likely under them as under the old ones.

    A sentence has the attention weight ``score / row sum`` in each of its cells. With the best scores, these weights
    are as large as observed, if they are summed over all sentences that have the cell:

        score * sum of (1 / row sum) over the sentences = sum of the observed weights over the sentences

    This equation is solved for the score, with the row sums of the old scores. The new scores have other row sums, so
    one step is not enough (Hunter 2004, MM algorithms for generalized Bradley-Terry models, section 5).

    Args:
        scores: the old scores, (H, T, T), 0 in hidden cells, which their row does not see.
        total: the observed weights (H, T, T), summed over all sentences; 0 in hidden cells.
        sentences_of_length: how many sentences had 1, 2, ... T tokens, (T,).
        by_distance: whether all cells of a diagonal have the same score.

    Returns:
        (H, T, T), from `SMALLEST_SCORE` to 1. The scores of hidden cells have no meaning.
    """
    # (H, T, T), above 0 in all cells, because a sentence of T tokens has all of them
    inverse_row_sums = sum_inverse_row_sums(scores, sentences_of_length)
    # An attention weight stays the same if all scores of its row are divided by a number. The largest score becomes 1.
    if by_distance:
        # The cells of a diagonal have one score. So both sides of the equation are summed over the diagonal, too.
        new_scores = sum_diagonals(total) / sum_diagonals(inverse_row_sums)
        # All rows of a head are divided by the same number. Otherwise, a diagonal would get several scores.
        largest = new_scores.amax(dim=(-2, -1), keepdim=True)  # (H, 1, 1)
    else:
        new_scores = total / inverse_row_sums
        largest = new_scores.amax(dim=-1, keepdim=True)  # (H, T, 1)
    return (new_scores / largest).clamp(min=SMALLEST_SCORE)


def sum_inverse_row_sums(scores: Tensor, sentences_of_length: Tensor) -> Tensor:
    """Returns for each cell (i, j) the sum of 1 / (sum of row i) over all sentences that have this cell, (H, T, T).

    A sentence of n tokens has the first n rows and columns of the scores. So its rows have different sums than those of
    a longer sentence, and its cells are those with i < n and j < n.

    Args:
        scores: (H, T, T), 0 in hidden cells. Every row sees column 0, so that no sum is 0.
        sentences_of_length: how many sentences had 1, 2, ... T tokens, (T,).
    """
    num_heads, longest, _ = scores.shape
    sums_of_first_columns = scores.cumsum(dim=-1)  # (H, T, T), cell (i, j): the sum of row i up to column j
    result = torch.empty_like(scores)
    # (H, T), for each row: the sum over all sentences of the lengths that the loop has reached so far
    totals_of_rows = scores.new_zeros(num_heads, longest)
    for length in range(longest, 0, -1):  # the longest sentences first
        last_column = length - 1
        row_sums = sums_of_first_columns[:, :length, last_column]  # (H, length), in a sentence of this length
        totals_of_rows[:, :length] += sentences_of_length[last_column] / row_sums
        # The loop has reached all sentences of `length` tokens or more. Only these sentences have this column.
        result[:, :, last_column] = totals_of_rows
    return result


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
    columns = torch.arange(size)
    rows = columns.unsqueeze(1)
    distances = (columns - rows).clamp(-largest_distance, largest_distance)  # (size, size)
    places = distances + largest_distance  # the value of distance -m is at place 0
    return values[:, places]
