"""What self-attention keeps of earlier tokens while it decodes: `extend` for a step, `reorder` between steps.

A beam search goes on with other hypotheses after every step. Values, and keys where something reads them, are not
moved then: as in a paged cache with pages of one token, they stay in one table, and the block table of a hypothesis,
the row of each of its tokens, is what is reordered, with the padding mask. The product of attention weights and values
reads the values where they are (`weighted_values`); keys are collected once a step.
"""

from typing import Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

Cache = Dict[str, Optional[Tensor]]


def extend(
    cache: Cache, key: Optional[Tensor], value: Tensor, key_padding_mask: Optional[Tensor]
) -> Tuple[Cache, int, Optional[Tensor], Optional[Tensor]]:
    """Adds the newest tokens.

    Args:
        cache: empty before the first token, or as `extend` and `reorder` return it. fairseq's layer fills it with
            ``prev_key`` and ``prev_value``, (B, H, t, d_h), where it is called with ``prev_self_attn_state``.
        key: (B, H, n, d_h), or None if nothing reads keys.
        value: (B, H, n, d_h).
        key_padding_mask: (B, n), true at padding; None for no padding.

    Returns:
        the cache of all t + n tokens; t; their keys, (B, H, t + n, d_h); their padding mask, (B, t + n), or None.
    """
    entries, table, used = cache.get("entries"), cache.get("block_table"), cache.get("used")
    saved = cache.get("prev_value")
    if table is None and saved is not None:
        saved_key = cache.get("prev_key") if key is not None else None
        entries, table, used = append(None, None, None, with_key(saved, saved_key))
    start = 0 if table is None else table.size(1)
    entries, table, used = append(entries, table, used, with_key(value, key))
    if key is not None:
        key = collect(entries, table, value.size(1), key.size(1))
    padding = append_padding(cache.get("prev_key_padding_mask"), key_padding_mask, table.size(0), start, value.size(2))
    extended: Cache = {
        "entries": entries,
        "block_table": table,
        "used": used,
        "prev_key_padding_mask": padding,
    }
    return extended, start, key, padding


def reorder(cache: Cache, new_order: Tensor) -> Cache:
    """The cache for the next step, where hypothesis i goes on from hypothesis ``new_order[i]``."""
    reordered: Cache = {"entries": cache.get("entries"), "used": cache.get("used")}
    for name in ("block_table", "prev_key_padding_mask", "prev_key", "prev_value"):
        x = cache.get(name)
        if x is not None:
            reordered[name] = x.index_select(0, new_order)
    return reordered


def weighted_values(weights: Tensor, cache: Cache) -> Tensor:
    """The product (B, H, n, d_h) of attention weights (B or 1, H, n, t) and the cached values."""
    entries, table = cache["entries"], cache["block_table"]
    assert entries is not None and table is not None
    bsz, length = table.size()
    heads, head_dim = weights.size(1), entries.size(2)
    weights = weights.to(entries.dtype)
    if weights.size(2) > 1 or torch.is_grad_enabled():
        return torch.matmul(weights, collect(entries, table, 0, heads))
    # embedding_bag reads the rows where they are; without a gradient, as it has no second derivative
    out = F.embedding_bag(
        rows_of(table, entries.size(1), 0, heads).view(bsz * heads, length),
        entries.view(-1, head_dim),
        mode="sum",
        per_sample_weights=weights.expand(bsz, -1, -1, -1).reshape(bsz * heads, length),
    )
    return out.view(bsz, heads, 1, head_dim)


def with_key(value: Tensor, key: Optional[Tensor]) -> Tensor:
    """What is kept of tokens, (B, E, n, d_h): the values of all heads, then the keys of those that have some."""
    return value if key is None else torch.cat([value, key], dim=1)


def collect(entries: Tensor, table: Tensor, first: int, count: int) -> Tensor:
    """A copy, (B, count, t, d_h), of `count` of the E vectors of every token, from `first` on."""
    return F.embedding(rows_of(table, entries.size(1), first, count), entries.view(-1, entries.size(2)))


def rows_of(table: Tensor, size: int, first: int, count: int) -> Tensor:
    """Where `collect` finds its vectors: row numbers (B, count, t) in entries seen as (N E, d_h), with E = `size`."""
    return table.unsqueeze(1) * size + torch.arange(first, first + count, device=table.device).unsqueeze(1)


def append(
    entries: Optional[Tensor], table: Optional[Tensor], used: Optional[Tensor], newest: Tensor
) -> Tuple[Tensor, Tensor, Tensor]:
    """Writes the entries of the newest tokens behind the others.

    Args:
        entries: (N, E, d_h), the vectors of each token, or None before the first. A row is written once, so that copies
            of an incremental state may go on with the same tensor.
        table: the block table, (B, t): the row of each token of each hypothesis.
        used: (1,), on the CPU: how many rows are written to.
        newest: (B, E, n, d_h).

    Returns:
        the same three with the newest tokens; the block table is (B, t + n).
    """
    bsz, size, count, head_dim = newest.size()
    # contiguous, as `collect` takes a view: after one product of queries, keys and values they are not
    added = newest.transpose(1, 2).reshape(bsz * count, size, head_dim).contiguous()
    fresh = torch.arange(bsz * count, device=newest.device).view(bsz, count)
    cpu = torch.device("cpu")  # whatever the default device, so that reading it never waits for a GPU
    if entries is None or table is None or used is None:
        return added, fresh, torch.full([1], bsz * count, dtype=torch.long, device=cpu)
    if torch.is_grad_enabled() or entries.dtype != added.dtype:
        first = entries.size(0)
        entries = torch.cat([entries, added])
        used = torch.full([1], entries.size(0), dtype=torch.long, device=cpu)
    else:
        first = int(used)
        needed = table.numel() + bsz * count
        if first + bsz * count > entries.size(0) or entries.size(0) > 4 * needed or not is_writable(used):
            # a larger one, or a smaller one, without the rows that no hypothesis of this state has
            first = table.numel()
            other = entries.new_empty([2 * needed, size, head_dim])
            torch.index_select(entries, 0, table.reshape(-1), out=other[:first])
            entries, used = other, torch.empty([1], dtype=torch.long, device=cpu)
            table = torch.arange(first, device=table.device).view(table.size(0), table.size(1))
        entries[first : first + bsz * count] = added
        used.fill_(first + bsz * count)
    return entries, torch.cat([table, fresh + first], dim=1), used


def is_writable(x: Tensor) -> bool:
    """Whether a tensor can be written to: an inference tensor only in inference mode."""
    if x.is_inference():
        if torch.jit.is_scripting():
            return False
        return torch.is_inference_mode_enabled()
    return True


def append_padding(
    previous: Optional[Tensor], newest: Optional[Tensor], bsz: int, start: int, count: int
) -> Optional[Tensor]:
    """Padding mask (B, start + count) of the cached and the newest tokens; an absent part has no padding."""
    if previous is None and newest is None:
        return None
    if newest is None:
        assert previous is not None
        newest = torch.zeros(bsz, count, dtype=torch.bool, device=previous.device)
    if previous is None:
        previous = torch.zeros(bsz, start, dtype=torch.bool, device=newest.device)
    return torch.cat([previous.to(torch.bool), newest.to(torch.bool)], dim=1)
