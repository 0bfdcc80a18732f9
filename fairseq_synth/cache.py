"""What self-attention keeps of earlier tokens while it decodes.

A beam search goes on with other hypotheses after every step. As in a paged cache with pages of one token, values and
keys are not moved then: what is reordered is the block table, the rows of each hypothesis's tokens. All layers of a
decoder write and read the same rows, so they share one table, which the first layer extends and reorders once a step.

Vectors of a layer are rows of one matrix, (N H, d_h): head h of token n is row n H + h. A table is a dictionary:

=========================  =================================================================================
``rows``                   the row of each hypothesis, head and token, (B, H, t)
``newest``                 those of the newest tokens, (B, H, n)
``moved``                  the tokens to keep, in their new order, if layers are to make a new matrix, else None
``written``                how many tokens, n, have been: a counter that copies of a table share, so that none writes to
                           the rows of another. An empty tensor (n, 0), as TorchScript has no mutable int
``offsets``                where the tokens of each hypothesis and head begin in ``rows``, (B H,)
``prev_key_padding_mask``  (B, t), true at padding, or None
=========================  =================================================================================
"""

import torch
import torch.nn.functional as F
from torch import Tensor

Cache = dict[str, Tensor | None]


def extend(table: Cache, newest: Tensor, capacity: int, key_padding_mask: Tensor | None) -> Cache:
    """The table with the newest tokens behind the others.

    Args:
        table: empty before the first token.
        newest: a vector of each new token and head, (B, H, n, d_h), of which only the sizes are read.
        capacity: for how many tokens the layers' matrices have rows.
        key_padding_mask: of the newest tokens, (B, n), true at padding; None for no padding.
    """
    bsz, heads, count, _ = newest.size()
    rows, written = table.get("rows"), table.get("written")
    start = 0 if rows is None else rows.size(2)
    length = start + count
    first = 0 if written is None else written.size(0)
    moved: Tensor | None = None
    if rows is not None and written is not None:
        if first + bsz * count > capacity or capacity > 4 * bsz * length or not is_writable(written):
            # the matrices are made anew, without the tokens that no hypothesis has
            moved = torch.div(rows[:, 0].t().reshape(-1), heads, rounding_mode="floor")
            first, rows = bsz * start, rows_of(0, newest, start)
    if written is None or moved is not None:
        written = newest.new_empty([0, 0])
    written.resize_([first + bsz * count, 0])
    behind = rows_of(first * heads, newest, count)
    padding = append_padding(table.get("prev_key_padding_mask"), key_padding_mask, bsz, start, count)
    return {
        "rows": behind if rows is None else torch.cat([rows, behind], dim=2),
        "newest": behind,
        "moved": moved,
        "written": written,
        "offsets": torch.arange(0, bsz * heads * length, length, device=newest.device),
        "prev_key_padding_mask": padding,
    }


def rows_of(first: int, like: Tensor, count: int) -> Tensor:
    """The rows (B, H, count), from `first` on, of tokens that are written together; `like` is (B, H, n, d_h)."""
    bsz, heads = like.size(0), like.size(1)
    rows = torch.arange(first, first + count * bsz * heads, device=like.device)
    return rows.view(count, bsz, heads).permute(1, 2, 0)


def reorder(cache: Cache, new_order: Tensor) -> Cache:
    """A table, or keys and values as fairseq stores them, where hypothesis i goes on from ``new_order[i]``."""
    reordered: Cache = {"written": cache.get("written")}
    for name in ("rows", "prev_key_padding_mask", "prev_key", "prev_value"):
        x = cache.get(name)
        if x is not None:
            reordered[name] = x.index_select(0, new_order)
    return reordered


def write_both(entries: Cache, key: Tensor | None, value: Tensor, table: Cache) -> Cache:
    """A layer's ``values``, and its ``keys`` if there are some, with those of the newest tokens; see `write`."""
    written: Cache = {"values": write(entries.get("values"), value, table)}
    if key is not None:
        written["keys"] = write(entries.get("keys"), key, table)
    return written


def write(entries: Tensor | None, newest: Tensor, table: Cache) -> Tensor:
    """A layer's vectors with those of the newest tokens.

    Args:
        entries: (N H, d_h), or None before the first token.
        newest: (B, H, n, d_h), or of the first heads alone.
        table: as `extend` returns it.
    """
    rows, newest_rows, moved = table["rows"], table["newest"], table.get("moved")
    assert rows is not None and newest_rows is not None
    heads, head_dim = rows.size(1), newest.size(3)
    if newest.size(1) < heads:
        newest = F.pad(newest, [0, 0, 0, 0, 0, heads - newest.size(1)])
    added = newest.permute(2, 0, 1, 3).reshape(-1, head_dim)
    if entries is None:
        entries = added.new_empty([2 * rows.numel(), head_dim])
    elif moved is not None:
        kept = entries.view(-1, heads * head_dim).index_select(0, moved).view(-1, head_dim)
        entries = torch.cat([kept, kept.new_empty([2 * rows.numel() - kept.size(0), head_dim])])
    if entries.dtype != added.dtype:  # under autocast for some of the steps
        entries, added = entries.float(), added.float()
    newest_rows = newest_rows.permute(2, 0, 1).reshape(-1)
    if torch.is_grad_enabled() or not is_writable(entries):
        return entries.index_copy(0, newest_rows, added)
    return entries.index_copy_(0, newest_rows, added)


def read(entries: Tensor, table: Cache, heads: int) -> Tensor:
    """A copy of the vectors of all tokens in the first heads, (B, heads, t, d_h)."""
    rows = table["rows"]
    assert rows is not None
    return F.embedding(rows[:, :heads], entries)


def weighted_values(weights: Tensor, entries: Tensor, table: Cache) -> Tensor:
    """The product (B, H, n, d_h) of attention weights (B, H, n, t) and the values, read where they are."""
    rows = table["rows"]
    assert rows is not None
    bsz, heads, _ = rows.size()
    weights = weights.to(entries.dtype)
    if weights.size(2) > 1 or torch.is_grad_enabled():  # embedding_bag has no second derivative
        return torch.matmul(weights, read(entries, table, heads))
    rows, weights = rows.reshape(-1), weights.reshape(-1)
    out = F.embedding_bag(rows, entries, table["offsets"], mode="sum", per_sample_weights=weights)
    return out.view(bsz, heads, 1, -1)


def is_writable(x: Tensor) -> bool:
    """Whether a tensor can be written to: an inference tensor only in inference mode."""
    return not x.is_inference() or torch.is_inference_mode_enabled()


def append_padding(previous: Tensor | None, newest: Tensor | None, bsz: int, start: int, count: int) -> Tensor | None:
    """Padding mask (B, start + count) of the cached and the newest tokens; an absent part has no padding."""
    if previous is None and newest is None:
        return None
    if newest is None:
        assert previous is not None
        newest = torch.zeros(bsz, count, dtype=torch.bool, device=previous.device)
    if previous is None:
        previous = torch.zeros(bsz, start, dtype=torch.bool, device=newest.device)
    return torch.cat([previous.to(torch.bool), newest.to(torch.bool)], dim=1)
