"""The memory of self-attention while it decodes: values and keys of the tokens so far.

After every step, a beam search goes on with other hypotheses. fairseq's own attention then copies all cached keys and
values of every layer into the new order. Here they stay where they are, as in a paged cache with pages of one token:

* Each layer has a `LayerCache`: one matrix for its values and, if something reads them, one for its keys. The vector of
  head h of the token with number n is row ``n H + h`` of the matrix.
* A `BlockTable` tells which rows belong to which hypothesis. Only the table is reordered. All layers of a decoder use
  the same rows, so they share one table, which the first layer extends and reorders once a step.

A step makes a new table and a new cache, and writes only to rows that no hypothesis uses yet. Copies of a decoder's
state can therefore go on independently of each other.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# The matrices are replaced by smaller ones if they have rows for more than this many times the tokens in use. New ones
# have rows for twice the tokens in use (`choose_num_rows`), so this happens only after many hypotheses have ended.
LARGEST_CAPACITY_FACTOR = 4


class RowCounter:
    """Counts the tokens that have got rows in the matrices.

    It is an object of its own, because all copies of a table must share it: so no row is given to two tokens.
    """

    def __init__(self) -> None:
        self.num_tokens = 0


class BlockTable(NamedTuple):
    """Says which rows of the matrices belong to which hypothesis.

    There are B hypotheses of t tokens, the last n of which are new in this step.
    """

    rows: Tensor  # (B, H, t): the row of each hypothesis, head and token
    newest_rows: Tensor  # (B, H, n): the part of `rows` that the layers have to write to in this step
    # (t B,): numbers of the tokens that the layers copy into new matrices in this step, in their new order. None if
    # the layers go on with the matrices that they have.
    kept_tokens: Tensor | None
    counter: RowCounter
    # (B H,): where the rows of each hypothesis and head begin if `rows` is flattened, for `F.embedding_bag`
    offsets: Tensor
    key_padding_mask: Tensor | None  # (B, t), true at padding

    def reorder(self, new_order: Tensor) -> "BlockTable":
        """Returns the table in which hypothesis i goes on from hypothesis ``new_order[i]``."""
        key_padding_mask = self.key_padding_mask
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.index_select(0, new_order)
        return self._replace(rows=self.rows.index_select(0, new_order), key_padding_mask=key_padding_mask)


class LayerCache(NamedTuple):
    """The vectors of one layer, (N H, d_h), with room for N tokens. Keys are None if nothing reads them."""

    values: Tensor
    keys: Tensor | None


def count_tokens_that_fit(layer_cache: LayerCache | None, num_heads: int) -> int:
    """Returns how many tokens a layer has rows for, in use or free.

    For example, there is room for 25 tokens if there are 100 rows and 4 heads, because a token has a row for each head.
    Before the first token, there are no rows: `layer_cache` is None.
    """
    if layer_cache is None:
        return 0
    num_rows = layer_cache.values.shape[0]
    return num_rows // num_heads


def extend_table(
    table: BlockTable | None,
    layer_cache: LayerCache | None,
    newest_values: Tensor,
    key_padding_mask: Tensor | None,
) -> BlockTable:
    """Returns the table of the next step of a beam search, in which each hypothesis has n more tokens.

    A table says in which rows of the layers' matrices the keys and values of each hypothesis are. The new tokens get
    free rows. If there are too few, the table tells the layers to copy all tokens into new matrices first
    (`BlockTable.kept_tokens`).

    For example, let there be one head and a hypothesis with the rows 0 and 2. Row 1 belongs to a dropped hypothesis.

    * If the matrices have room, the result has the rows 0, 2 and 3. Row 3 is new.
    * If they are full, the result has the rows 0, 1 and 2 of new matrices. The layers copy the tokens 0 and 2 to the
      first two rows. Row 2 is new.

    Args:
        table: The table of the last step, or None before the first token.
        layer_cache: The matrices of a layer after the last step, or None before the first token. Only their number of
            rows is read, which is the same in all layers.
        newest_values: A vector for each new token and head, (B, H, n, d_h). Only its sizes are read.
        key_padding_mask: The padding of the new tokens, (B, n), or None if there is none.
    """
    bsz, num_heads, num_new, _ = newest_values.size()
    device = newest_values.device
    if table is None:
        table = empty_table(bsz, num_heads, device)
    num_old = table.rows.shape[2]
    length = num_old + num_new

    # The layers make new matrices if they have to. `table` then gets the rows of its tokens in the new matrices, and a
    # new counter, which counts only these tokens.
    kept_tokens = None
    has_old_tokens = num_old > 0
    capacity = count_tokens_that_fit(layer_cache, num_heads)
    if has_old_tokens and needs_new_matrices(
        table.counter, num_new_tokens=bsz * num_new, num_live_tokens=bsz * length, capacity=capacity
    ):
        kept_tokens = list_tokens(table)
        table = renumber(table)

    newest_rows = reserve_rows(table.counter, bsz, num_heads, num_new, device)  # counts the new tokens in the counter
    rows = torch.cat([table.rows, newest_rows], dim=2)  # (B, H, length)
    # In the flattened `rows`, each hypothesis and head has `length` neighbouring entries.
    offsets = torch.arange(0, bsz * num_heads * length, length, device=device)
    return BlockTable(
        rows=rows,
        newest_rows=newest_rows,
        kept_tokens=kept_tokens,
        counter=table.counter,
        offsets=offsets,
        key_padding_mask=append_padding(table.key_padding_mask, key_padding_mask, bsz, num_old, num_new),
    )


def empty_table(bsz: int, num_heads: int, device: torch.device) -> BlockTable:
    """Returns the table of hypotheses without tokens."""
    rows = torch.empty(bsz, num_heads, 0, dtype=torch.long, device=device)
    return BlockTable(
        rows=rows, newest_rows=rows, kept_tokens=None, counter=RowCounter(), offsets=rows, key_padding_mask=None
    )


def list_tokens(table: BlockTable) -> Tensor:
    """Returns the numbers of the tokens of all hypotheses, (t B,): first at position 0, then at position 1, and so on.

    Head h of the token with number n has the row ``n H + h``. So n is the row of head 0, divided by H.
    """
    num_heads = table.rows.shape[1]
    rows_of_head_0 = table.rows[:, 0].t().reshape(-1)  # (B, t) -> (t B,)
    return torch.div(rows_of_head_0, num_heads, rounding_mode="floor")


def renumber(table: BlockTable) -> BlockTable:
    """Returns a table of the same tokens for new matrices, with a new counter.

    The tokens are numbered from 0 on, in the order in which `list_tokens` lists them and the layers copy them into the
    new matrices. Tokens of dropped hypotheses get no number.
    """
    bsz, num_heads, length = table.rows.size()
    counter = RowCounter()
    rows = reserve_rows(counter, bsz, num_heads, length, table.rows.device)
    return table._replace(rows=rows, counter=counter)


def needs_new_matrices(counter: RowCounter, num_new_tokens: int, num_live_tokens: int, capacity: int) -> bool:
    """Returns whether the matrices of keys and values are to be replaced by new ones.

    There are two reasons. For example, let the matrices have rows for 100 tokens, of which 95 are taken:

    * The new tokens do not fit. For example, there are 6 new tokens, and 95 + 6 > 100.
    * Most rows are wasted, because dropped hypotheses keep theirs. For example, only 24 tokens are still in use, and
      ``LARGEST_CAPACITY_FACTOR * 24 = 4 * 24 < 100``.

    Args:
        counter: Says how many tokens have taken rows so far. The new tokens are not among them, but the tokens of
            dropped hypotheses are.
        num_new_tokens: The number of new tokens of all hypotheses together.
        num_live_tokens: The number of tokens in use: all tokens of the present hypotheses, including the new tokens.
        capacity: The number of tokens that the matrices have rows for.
    """
    is_too_small = counter.num_tokens + num_new_tokens > capacity
    wastes_memory = LARGEST_CAPACITY_FACTOR * num_live_tokens < capacity
    return is_too_small or wastes_memory


def reserve_rows(counter: RowCounter, bsz: int, num_heads: int, count: int, device: torch.device) -> Tensor:
    """Returns the next free rows, (B, H, count), for `count` tokens of each hypothesis. Adds the tokens to the counter.

    For example, with H = 2 heads, token n has the rows 2 n and 2 n + 1.
    """
    first_row = counter.num_tokens * num_heads
    counter.num_tokens += count * bsz
    rows = torch.arange(first_row, first_row + count * bsz * num_heads, device=device)
    return rows.view(count, bsz, num_heads).permute(1, 2, 0)


def append_to_layer(
    layer_cache: LayerCache | None, newest_keys: Tensor | None, newest_values: Tensor, table: BlockTable
) -> LayerCache:
    """Returns the cache of a layer with the keys and values of the new tokens.

    The matrices of `layer_cache` are changed in place where possible. So the caller goes on with the result only.

    Args:
        layer_cache: The cache of the last step, or None before the first token.
        newest_keys: The keys of the new tokens, (B, heads with keys, n, d_h). The heads with keys are the first ones of
            the layer. None if no head reads keys.
        newest_values: The values of the new tokens, (B, H, n, d_h).
        table: The table that `extend_table` has returned for this step.
    """
    old_values = None
    old_keys = None
    if layer_cache is not None:
        old_values = layer_cache.values
        old_keys = layer_cache.keys
    values = write_vectors(old_values, newest_values, table)
    keys = None
    if newest_keys is not None:
        keys = write_vectors(old_keys, newest_keys, table)
    return LayerCache(values, keys)


def write_vectors(matrix: Tensor | None, newest: Tensor, table: BlockTable) -> Tensor:
    """Writes the vectors of new tokens to a matrix of keys or values, and returns the matrix that has them.

    ``newest[b, h, i]``, the vector of new token i of hypothesis b in head h, becomes the row with the number
    ``table.newest_rows[b, h, i]``.

    The result is either the matrix of the argument, changed in place, or a new one. So the caller goes on with the
    result only.

    Args:
        matrix: The matrix so far, with a row of d_h features for each token and head. None before the first token.
        newest: The vectors of n new tokens of B hypotheses, (B, H, n, d_h). If only the first heads have vectors, the
            other heads get zeros.
        table: The table that `extend_table` has returned for this step.
    """
    num_heads = table.rows.shape[1]
    vectors_of_all_heads = append_zero_heads(newest, num_heads)
    vectors = list_by_token(vectors_of_all_heads)  # (B, H, n, d_h) -> (n B H, d_h)
    row_numbers = list_by_token(table.newest_rows)  # (B, H, n) -> (n B H,): the row of each of the vectors
    matrix_with_room = make_room(matrix, vectors, table)  # the same matrix, or a new one with a copy of its rows
    return write_rows(matrix_with_room, row_numbers, vectors)  # in place, or into a copy if autograd may need the old


def list_by_token(x: Tensor) -> Tensor:
    """Returns numbers (B, H, n) as a list (n B H,), or vectors (B, H, n, d_h) as a list (n B H, d_h).

    Both lists are sorted by token, hypothesis and head. Projections write vectors in this order, so that listing them
    usually copies nothing.
    """
    features = range(3, x.dim())
    return x.permute(2, 0, 1, *features).flatten(0, 2)


def write_rows(matrix: Tensor, row_numbers: Tensor, rows: Tensor) -> Tensor:
    """Returns the matrix after writing `rows` to the rows with the numbers `row_numbers`.

    The matrix is changed in place if that is allowed. Otherwise, the result is a copy. If the types differ, because
    autocast was on in only some of the steps, the result is in fp32.
    """
    if matrix.dtype != rows.dtype:
        matrix = matrix.float()
        rows = rows.float()
    if must_stay_unchanged(matrix):
        return matrix.index_copy(0, row_numbers, rows)  # a changed copy
    return matrix.index_copy_(0, row_numbers, rows)  # the same matrix, changed in place


def append_zero_heads(vectors: Tensor, num_heads: int) -> Tensor:
    """Returns the vectors (B, heads, n, d_h) with further heads of zeros behind them, so that there are `num_heads`."""
    num_missing_heads = num_heads - vectors.shape[1]
    if num_missing_heads == 0:
        return vectors
    # For each dimension from the last one on, `F.pad` takes the number of zeros to put before it and behind it.
    none = (0, 0)
    return F.pad(vectors, [*none, *none, 0, num_missing_heads])


def make_room(matrix: Tensor | None, new_vectors: Tensor, table: BlockTable) -> Tensor:
    """Returns a matrix that has free rows for the new vectors.

    There are three cases:

    1. Before the first token, there is no matrix. So one is made.
    2. The matrix has room. It is returned as it is.
    3. The matrix is too small, or most of it is unused. The tokens ``table.kept_tokens`` are copied into a new one.

    `extend_table` has decided between the last two cases. In case 2, ``table.kept_tokens`` is None.

    Args:
        matrix: The matrix of the last step, with a row of d_h features for each token and head. None before the first
            token.
        new_vectors: The vectors to be written, (number of vectors, d_h). Only their width and type are read.
        table: The table of this step.
    """
    if matrix is None:  # case 1
        head_dim = new_vectors.shape[1]
        return new_vectors.new_empty([choose_num_rows(table), head_dim])
    if table.kept_tokens is None:  # case 2
        return matrix
    num_heads = table.rows.shape[1]
    return copy_kept_tokens(matrix, table.kept_tokens, num_heads, choose_num_rows(table))  # case 3


def must_stay_unchanged(matrix: Tensor) -> bool:
    """Returns whether a matrix must not be written to in place."""
    # Outside inference mode, torch refuses to write to a tensor that was made in it.
    is_read_only = matrix.is_inference() and not torch.is_inference_mode_enabled()
    # Autograd may need the values of the matrix for a gradient.
    may_be_needed_for_gradients = torch.is_grad_enabled()
    return is_read_only or may_be_needed_for_gradients


def choose_num_rows(table: BlockTable) -> int:
    """Returns the number of rows of a new matrix: twice as many as the tokens of the table need."""
    return 2 * table.rows.numel()


def copy_kept_tokens(matrix: Tensor, kept_tokens: Tensor, num_heads: int, num_rows: int) -> Tensor:
    """Returns a new matrix of `num_rows` rows that begins with the vectors of the kept tokens, in their order.

    For example, with 2 heads, the kept tokens 0 and 2 have the rows 0, 1, 4 and 5 of the old matrix. They become the
    rows 0 to 3 of the new matrix.

    Args:
        matrix: The old matrix, (N H, d_h), where each of N tokens has H neighbouring rows.
        kept_tokens: The numbers of the tokens to copy.
        num_heads: H.
        num_rows: Number of rows of the new matrix. The rows after the copied tokens are not initialised.
    """
    head_dim = matrix.shape[1]
    vectors_of_tokens = matrix.view(-1, num_heads * head_dim)  # (N, H d_h): a row for each token, with all heads
    kept_vectors = vectors_of_tokens.index_select(0, kept_tokens)  # (number of kept tokens, H d_h)
    kept_rows = kept_vectors.view(-1, head_dim)  # a row for each token and head again
    free_rows = kept_rows.new_empty([num_rows - kept_rows.shape[0], head_dim])
    return torch.cat([kept_rows, free_rows])


def read_keys(layer_cache: LayerCache, table: BlockTable, num_heads: int) -> Tensor | None:
    """Returns a copy of the keys of all tokens in the first heads, (B, num_heads, t, d_h); None if there are none."""
    if layer_cache.keys is None:
        return None
    return F.embedding(table.rows[:, :num_heads], layer_cache.keys)


def weighted_values(weights: Tensor, layer_cache: LayerCache, table: BlockTable) -> Tensor:
    """Returns the attention's output: the sum of the values of all tokens so far, weighted by the attention weights.

    Args:
        weights: The attention weights of the n new tokens, (B, H, n, t).
        layer_cache: The values of all tokens, a matrix with a row of d_h features for each token and head.
        table: ``table.rows``, (B, H, t), has the number of the row for each hypothesis, head and token.

    Returns:
        (B, H, n, d_h)
    """
    weights = weights.to(layer_cache.values.dtype)
    has_single_new_token = weights.shape[2] == 1
    # `sum_without_copy` has no second derivative, which somebody may ask for if gradients are on.
    may_need_second_derivative = torch.is_grad_enabled()
    if has_single_new_token and not may_need_second_derivative:
        return sum_without_copy(weights, layer_cache.values, table)
    # `F.embedding` copies the row of the matrix for each number in the table.
    copied_values = F.embedding(table.rows, layer_cache.values)  # (B, H, t, d_h)
    return torch.matmul(weights, copied_values)


def sum_without_copy(weights: Tensor, values: Tensor, table: BlockTable) -> Tensor:
    """Returns the weighted sum of the values of all tokens for a single new token, (B, H, 1, d_h).

    Each hypothesis b and head h has t tokens. The value of token j is the row ``table.rows[b, h, j]`` of the matrix
    `values`, and is multiplied by ``weights[b, h, 0, j]``.

    A *bag* is what torch calls some rows that are to be added up. Each hypothesis and head is a bag of t rows here.
    `F.embedding_bag` adds up the rows of all bags without copying them first.

    Args:
        weights: The attention weights of the new token, (B, H, 1, t).
        values: The matrix of values, with d_h features in each row.
        table: Has the numbers of the rows, (B, H, t).
    """
    bsz, num_heads, _ = table.rows.size()
    # The bags are given one after another, in a list of row numbers and in a list of weights: t entries of head 0 of
    # hypothesis 0, t entries of its head 1, and so on.
    row_numbers = table.rows.reshape(-1)  # (B, H, t) -> (B H t,)
    weights_of_rows = weights.reshape(-1)  # (B, H, 1, t) -> (B H t,)
    starts_of_bags = table.offsets  # (B H,): 0, t, 2 t, ..., the entry of both lists at which each bag begins
    sums_of_bags = F.embedding_bag(
        row_numbers, values, offsets=starts_of_bags, mode="sum", per_sample_weights=weights_of_rows
    )  # (B H, d_h)
    return sums_of_bags.view(bsz, num_heads, 1, -1)


def append_padding(
    old_padding: Tensor | None, new_padding: Tensor | None, bsz: int, num_old: int, num_new: int
) -> Tensor | None:
    """Returns the padding mask of all tokens, (B, num_old + num_new), or None if there is no padding.

    Args:
        old_padding: (B, num_old), true at padding among the tokens of earlier steps; None if there is none.
        new_padding: (B, num_new), the same for the new tokens.
        bsz: B.
        num_old, num_new: Numbers of tokens of each hypothesis.
    """
    if old_padding is None and new_padding is None:
        return None
    # If only one of the two is given, the other tokens are no padding.
    if new_padding is None:
        assert old_padding is not None
        new_padding = torch.zeros(bsz, num_new, dtype=torch.bool, device=old_padding.device)
    if old_padding is None:
        old_padding = torch.zeros(bsz, num_old, dtype=torch.bool, device=new_padding.device)
    return torch.cat([old_padding.to(torch.bool), new_padding.to(torch.bool)], dim=1)
