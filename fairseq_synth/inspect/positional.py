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
        """Adds a matrix (H, T, S). If it has more rows or columns than the earlier ones, the mean is enlarged first."""
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

        Two positions that the observed sentences had get a logit by position (P), and all others one by distance (D).
        For example, the observed sentences had up to 2 tokens, and the size is 4:

            P P D D
            P P D D
            D D D D
            D D D D
        """
        length = min(self.by_position.size(-1), size)
        by_position = self.by_position[:, :length, :length]
        by_distance = toeplitz(self.by_distance, size)  # (H, size, size)
        first_rows = continue_rows(by_position, by_distance[:, :length])  # (H, length, size)
        later_rows = by_distance[:, length:]  # (H, size - length, size)
        return torch.cat([first_rows, later_rows], dim=1)


def continue_rows(by_position: Tensor, by_distance: Tensor) -> Tensor:
    """Continues rows of T logits by position with further columns, which are logits by distance.

    The softmax of a row does not change if a constant is added to the row. So the two kinds of logits may be on
    different levels. Before they are joined, the row by distance is shifted so that its first T columns have the same
    mean as the row by position. For example, the row [1, 4] by position has the mean 2.5. The row [0, 2, 5] by distance
    is shifted by 1.5, because its first two columns have the mean 1. Its last column becomes 6.5, and the result is
    [1, 4, 6.5].

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
    """Fits constant logits to attention weights that were observed in sentences of different lengths.

    The fit is done twice: with a logit for each pair of positions i and j, and with a logit for each distance j - i. A
    sentence of n tokens uses the logits of the first n positions. If S are these logits, and a_ij its observed weights,
    the fit maximizes the sum of ``a_ij log softmax(S)_ij`` over all cells of all sentences. This is the log-likelihood
    of a logistic regression. It does not need the weights of every single sentence, but only their sum over all
    sentences, and the number of sentences of each length.

    Args:
        weights: the observed weights of all sentences, of up to T tokens.
        causal: True if row i sees no column after i; the logits of these columns are 0.
    """
    total = weights.total.double()  # (H, T, T), summed over all sentences
    sentences_of_length = count_sentences(weights)  # (T,), how many sentences have 1, 2, ... T tokens
    return Constants(
        by_position=fit_by_position(total, sentences_of_length, causal),
        by_distance=fit_by_distance(total, sentences_of_length, causal),
    )


def fit_by_position(total: Tensor, sentences_of_length: Tensor, causal: bool) -> Tensor:
    """Returns the logits for each pair of positions that fit observed attention weights best, (H, T, T).

    The weights do not change if a constant is added to all logits of a row. So the logits of each row are shifted to
    the mean 0.

    Args:
        total: the observed weights (H, T, T), summed over all sentences.
        sentences_of_length: how many sentences had 1, 2, ... T tokens, (T,).
        causal: True if row i sees no column after i.
    """
    logits = most_likely_logits(total, sentences_of_length, causal, by_distance=False)
    return centre(logits)


def fit_by_distance(total: Tensor, sentences_of_length: Tensor, causal: bool) -> Tensor:
    """Returns the logits for each distance j - i that fit observed attention weights best, (H, 2 T - 1).

    The weights do not change if a constant is added to all logits of a head. So the logits of each head are shifted to
    the mean 0.

    Args:
        total: the observed weights (H, T, T), summed over all sentences.
        sentences_of_length: how many sentences had 1, 2, ... T tokens, (T,).
        causal: True if row i sees no column after i.
    """
    logits = most_likely_logits(total, sentences_of_length, causal, by_distance=True)  # (H, T, T)
    return centre(read_diagonals(logits))


def read_diagonals(matrix: Tensor) -> Tensor:
    """Returns the values (H, 2 T - 1) of the diagonals of a matrix (H, T, T) that is constant along each diagonal.

    The diagonals are sorted by the distance j - i, from 1 - T to T - 1. So their values go up the first column, and
    then along the first row. For example, this matrix has the values 3, 4, 5, 6, 7 for the distances -2 to 2:

        5 6 7
        4 5 6
        3 4 5
    """
    first_column = matrix[:, :, 0]  # 5 4 3
    first_row = matrix[:, 0, :]  # 5 6 7
    negative_distances = first_column[:, 1:].flip(-1)  # 3 4, without the 5, which is in the first row, too
    return torch.cat([negative_distances, first_row], dim=-1)


def visible_cells(length: int, causal: bool) -> Tensor:
    """Returns a mask (length, length) that is True where row i may attend to column j."""
    visible = torch.ones(length, length, dtype=torch.bool)
    return visible.tril() if causal else visible


def count_sentences(weights: MeanByPosition) -> Tensor:
    """Returns how many of the averaged sentences had 1, 2, ... T tokens, (T,).

    For example, position 0 was in 3 sentences, position 1 in 2, and position 2 in 2. Then 1 sentence had 1 token, none
    had 2 tokens, and 2 had 3 tokens. The result is [1, 0, 2], which is [3, 2, 2] - [2, 2, 0].
    """
    with_position = weights.count[0].diagonal().double()  # (T,), how many sentences have the cell (i, i)
    with_next_position = torch.cat([with_position[1:], with_position.new_zeros(1)])  # No sentence has position T.
    return with_position - with_next_position


def centre(logits: Tensor) -> Tensor:
    """Returns logits that are shifted to the mean 0 along the last dimension: [1, 3, -inf] -> [-1, 1, 0].

    Logits of -inf, which belong to columns that a row does not see, are left out of the mean and become 0.
    """
    is_hidden = logits.isneginf()
    total = logits.masked_fill(is_hidden, 0.0).sum(dim=-1, keepdim=True)
    num_visible = (~is_hidden).sum(dim=-1, keepdim=True)
    mean = total / num_visible
    return (logits - mean).masked_fill(is_hidden, 0.0).float()


def most_likely_logits(total: Tensor, sentences_of_length: Tensor, causal: bool, by_distance: bool) -> Tensor:
    """Returns the logits under which the observed attention weights are most likely; see `fit_constants`.

    The fit works on scores, which are the exponentials of the logits. So an attention weight is a score divided by the
    sum of its row. All scores begin as 1, and `improve_scores` is repeated until they hardly change.

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
    """Performs one step of a fit: returns scores under which the observed attention weights are more likely.

    Each cell of a sentence has the attention weight ``score / row sum``. Under the best scores, the sum of these
    weights over all sentences that have the cell is the sum of the observed weights:

        score * sum of (1 / row sum) over the sentences = sum of the observed weights over the sentences

    A step solves this equation for the score, with the row sums of the old scores. As the new scores have other row
    sums, several steps are needed (Hunter 2004, MM algorithms for generalized Bradley-Terry models, section 5).

    Args:
        scores: the old scores, (H, T, T), 0 in hidden cells, which their row does not see.
        total: the observed weights (H, T, T), summed over all sentences; 0 in hidden cells.
        sentences_of_length: how many sentences had 1, 2, ... T tokens, (T,).
        by_distance: whether all cells of a diagonal have the same score.

    Returns:
        (H, T, T), from `SMALLEST_SCORE` to 1. The scores of hidden cells have no meaning.
    """
    # (H, T, T), never 0, because at least one sentence has T tokens and so has all cells
    inverse_row_sums = sum_inverse_row_sums(scores, sentences_of_length)
    if by_distance:
        # A diagonal has one score, and its cells together have one equation: the sum of their equations.
        new_scores = sum_diagonals(total) / sum_diagonals(inverse_row_sums)
        largest = new_scores.amax(dim=(-2, -1), keepdim=True)  # (H, 1, 1), as all rows of a head share their scores
    else:
        new_scores = total / inverse_row_sums
        largest = new_scores.amax(dim=-1, keepdim=True)  # (H, T, 1)
    # The attention weights stay the same if all scores of a row are divided by a number. The largest score becomes 1.
    return (new_scores / largest).clamp(min=SMALLEST_SCORE)


def sum_inverse_row_sums(scores: Tensor, sentences_of_length: Tensor) -> Tensor:
    """Returns for each cell (i, j) the sum of 1 / (sum of row i) over all sentences that have this cell, (H, T, T).

    A sentence of n tokens has the first n rows and columns of the scores, and the sums of its rows have n terms. For
    example, the scores are [[1, 3], [1, 1]]. There is one sentence of 1 token, whose row has the sum 1, and one of 2
    tokens, whose rows have the sums 4 and 2. Both sentences have cell (0, 0), which gets 1 / 1 + 1 / 4. Only the longer
    sentence has the other cells. So the result is [[1.25, 0.25], [0.5, 0.5]].

    Args:
        scores: (H, T, T), 0 in hidden cells. Every row sees column 0, so that no sum is 0.
        sentences_of_length: how many sentences had 1, 2, ... T tokens, (T,).
    """
    num_heads, longest, _ = scores.shape
    sums_of_first_columns = scores.cumsum(dim=-1)  # (H, T, T), cell (i, j): the sum of row i up to column j
    result = torch.empty_like(scores)
    sums_so_far = scores.new_zeros(num_heads, longest)  # for each row, over all sentences of `length` tokens or more
    for length in range(longest, 0, -1):
        last_column = length - 1
        row_sums = sums_of_first_columns[:, :length, last_column]  # (H, length), in a sentence of this length
        sums_so_far[:, :length] += sentences_of_length[last_column] / row_sums
        # All sentences that have this column are added now.
        result[:, :, last_column] = sums_so_far
    return result


def sum_by_distance(matrix: Tensor) -> Tensor:
    """Returns the sum of each diagonal of a matrix (H, T, T) as (H, 2 T - 1): [[1, 2], [3, 4]] -> [3, 5, 2].

    The diagonals are sorted by the distance j - i of their cells, from 1 - T to T - 1.
    """
    length = matrix.size(-1)
    columns = torch.arange(length)
    rows = columns.unsqueeze(1)
    diagonals = columns - rows + length - 1  # (T, T), the number of each cell's diagonal, from 0
    sums = matrix.new_zeros(len(matrix), 2 * length - 1)
    return sums.index_add_(1, diagonals.flatten(), matrix.flatten(1))


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
