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


class RowCounter:
    """Counts the tokens that have rows in the matrices. Copies of a table share it, so that none reuses a row."""

    def __init__(self) -> None:
        self.num_tokens = 0
        # Outside inference mode, nothing may write to tensors that were made in it.
        self.is_inference = torch.is_inference_mode_enabled()


class BlockTable(NamedTuple):
    """The rows that belong to each hypothesis. B hypotheses have t tokens each, of which n are the newest."""

    rows: Tensor  # (B, H, t): the row of each hypothesis, head and token
    newest_rows: Tensor  # (B, H, n): the part of `rows` that the layers have to write to in this step
    # The numbers of the tokens that layers copy into new matrices in this step, in their new order; None: no copy.
    kept_tokens: Tensor | None
    counter: RowCounter
    # (B H,): where the rows of each hypothesis and head begin if `rows` is flattened. A sum over the tokens of one
    # hypothesis and head is a sum from one offset to the next.
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


def extend_table(
    table: BlockTable | None, newest_values: Tensor, capacity: int, key_padding_mask: Tensor | None
) -> BlockTable:
    """Returns the table with the newest tokens behind the others, and counts these tokens.

    Args:
        table: The table of the last step, or None before the first token.
        newest_values: A vector for each new token and head, (B, H, n, d_h). Only its sizes are read.
        capacity: The number of tokens that the matrices of the layers have rows for.
        key_padding_mask: The padding of the newest tokens, (B, n), or None if there is none.
    """
    bsz, num_heads, num_new, _ = newest_values.size()
    device = newest_values.device
    if table is None:
        table = empty_table(bsz, num_heads, device)
    num_old = table.rows.size(2)
    length = num_old + num_new
    kept_tokens = None
    if num_old > 0 and needs_new_matrices(table.counter, bsz * num_new, bsz * length, capacity):
        kept_tokens = list_tokens(table)
        table = renumber(table)

    first_row = table.counter.num_tokens * num_heads
    newest_rows = consecutive_rows(first_row, bsz, num_heads, num_new, device)
    table.counter.num_tokens += bsz * num_new
    return BlockTable(
        rows=torch.cat([table.rows, newest_rows], dim=2),
        newest_rows=newest_rows,
        kept_tokens=kept_tokens,
        counter=table.counter,
        offsets=torch.arange(0, bsz * num_heads * length, length, device=device),
        key_padding_mask=append_padding(table.key_padding_mask, key_padding_mask, bsz, num_old, num_new),
    )


def empty_table(bsz: int, num_heads: int, device: torch.device) -> BlockTable:
    """Returns the table of hypotheses without tokens."""
    rows = torch.empty(bsz, num_heads, 0, dtype=torch.long, device=device)
    return BlockTable(
        rows=rows, newest_rows=rows, kept_tokens=None, counter=RowCounter(), offsets=rows, key_padding_mask=None
    )


def list_tokens(table: BlockTable) -> Tensor:
    """Returns the numbers (t B,) of the tokens of all hypotheses, position by position.

    Row ``n H + h`` belongs to head h of token n, so that the rows of head 0 tell the tokens.
    """
    num_heads = table.rows.size(1)
    rows_of_head_0 = table.rows[:, 0].t().reshape(-1)
    return torch.div(rows_of_head_0, num_heads, rounding_mode="floor")


def renumber(table: BlockTable) -> BlockTable:
    """Returns a table of the same tokens, which are counted anew from 0 in the order of `list_tokens`.

    The layers copy the tokens into new matrices in this order. Tokens that no hypothesis has are left behind.
    """
    bsz, num_heads, length = table.rows.size()
    counter = RowCounter()
    counter.num_tokens = bsz * length
    rows = consecutive_rows(0, bsz, num_heads, length, table.rows.device)
    return table._replace(rows=rows, counter=counter)


def needs_new_matrices(counter: RowCounter, num_new_tokens: int, num_live_tokens: int, capacity: int) -> bool:
    """Returns whether the matrices are full, mostly unused, or cannot be written to.

    The numbers of tokens are those of all hypotheses together; live tokens are those that some hypothesis has.
    """
    is_full = counter.num_tokens + num_new_tokens > capacity
    is_mostly_unused = capacity > 4 * num_live_tokens
    is_read_only = counter.is_inference and not torch.is_inference_mode_enabled()
    return is_full or is_mostly_unused or is_read_only


def consecutive_rows(first_row: int, bsz: int, num_heads: int, count: int, device: torch.device) -> Tensor:
    """Returns the rows (B, H, count) of tokens that are written together, from `first_row` on."""
    rows = torch.arange(first_row, first_row + count * bsz * num_heads, device=device)
    return rows.view(count, bsz, num_heads).permute(1, 2, 0)


def append_to_layer(
    layer_cache: LayerCache | None, newest_keys: Tensor | None, newest_values: Tensor, table: BlockTable
) -> LayerCache:
    """Returns the cache of a layer with the vectors of the newest tokens.

    Args:
        layer_cache: The cache of the last step, or None before the first token.
        newest_keys: (B, H or fewer, n, d_h), or None.
        newest_values: (B, H, n, d_h).
        table: The table that has been extended for this step.
    """
    values = write(None if layer_cache is None else layer_cache.values, newest_values, table)
    keys = None
    if newest_keys is not None:
        keys = write(None if layer_cache is None else layer_cache.keys, newest_keys, table)
    return LayerCache(values, keys)


def write(matrix: Tensor | None, newest: Tensor, table: BlockTable) -> Tensor:
    """Returns a matrix (N H, d_h) of vectors with those of the newest tokens, written in place where possible.

    Args:
        matrix: The matrix so far, or None before the first token.
        newest: (B, H, n, d_h), or the vectors of the first heads only.
        table: The table that has been extended for this step.
    """
    num_heads = table.rows.size(1)
    num_missing_heads = num_heads - newest.size(1)
    if num_missing_heads > 0:
        newest = F.pad(newest, [0, 0, 0, 0, 0, num_missing_heads])
    head_dim = newest.size(3)
    added = newest.permute(2, 0, 1, 3).reshape(-1, head_dim)
    # Twice the rows that are needed now: the matrix grows by doubling.
    num_rows = 2 * table.rows.numel()
    if matrix is None:
        matrix = added.new_empty([num_rows, head_dim])
    elif table.kept_tokens is not None:
        tokens = matrix.view(-1, num_heads * head_dim)
        kept = tokens.index_select(0, table.kept_tokens).view(-1, head_dim)
        matrix = torch.cat([kept, kept.new_empty([num_rows - kept.size(0), head_dim])])
    if matrix.dtype != added.dtype:
        # Autocast was on in some of the steps only.
        matrix = matrix.float()
        added = added.float()
    newest_rows = table.newest_rows.permute(2, 0, 1).reshape(-1)
    is_read_only = matrix.is_inference() and not torch.is_inference_mode_enabled()
    if torch.is_grad_enabled() or is_read_only:
        return matrix.index_copy(0, newest_rows, added)
    return matrix.index_copy_(0, newest_rows, added)


def read_keys(layer_cache: LayerCache, table: BlockTable, num_heads: int) -> Tensor | None:
    """Returns a copy of the keys of all tokens in the first heads, (B, num_heads, t, d_h); None if there are none."""
    if layer_cache.keys is None:
        return None
    return F.embedding(table.rows[:, :num_heads], layer_cache.keys)


def weighted_values(weights: Tensor, layer_cache: LayerCache, table: BlockTable) -> Tensor:
    """Returns the product (B, H, n, d_h) of attention weights (B, H, n, t) and the values.

    A single row reads the values where they are. Otherwise they are copied first.
    """
    bsz, num_heads, _ = table.rows.size()
    weights = weights.to(layer_cache.values.dtype)
    is_single_row = weights.size(2) == 1
    if not is_single_row or torch.is_grad_enabled():  # embedding_bag has no second derivative
        return torch.matmul(weights, F.embedding(table.rows, layer_cache.values))
    out = F.embedding_bag(
        table.rows.reshape(-1),
        layer_cache.values,
        offsets=table.offsets,
        mode="sum",
        per_sample_weights=weights.reshape(-1),
    )
    return out.view(bsz, num_heads, 1, -1)


def append_padding(
    old_padding: Tensor | None, new_padding: Tensor | None, bsz: int, num_old: int, num_new: int
) -> Tensor | None:
    """Returns the padding mask (B, num_old + num_new) of cached and newest tokens; None if there is no padding.

    Either part may be None, which means that it has no padding.
    """
    if old_padding is None and new_padding is None:
        return None
    if new_padding is None:
        assert old_padding is not None
        new_padding = torch.zeros(bsz, num_new, dtype=torch.bool, device=old_padding.device)
    if old_padding is None:
        old_padding = torch.zeros(bsz, num_old, dtype=torch.bool, device=new_padding.device)
    return torch.cat([old_padding.to(torch.bool), new_padding.to(torch.bool)], dim=1)
