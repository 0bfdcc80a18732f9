"""What self-attention keeps of earlier tokens while it decodes: `extend` for a step, `reorder` between steps.

A beam search goes on with other hypotheses after every step. Keys and padding masks, where something reads them, are
copied to the new order. Values are not moved: as in a paged cache with pages of one token, they stay in one table, and
the block table of a hypothesis, the row of each of its tokens, is what is reordered. Their product with the attention
weights reads them where they are (`weighted_values`).
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
    values, table, used = cache.get("values"), cache.get("block_table"), cache.get("used")
    saved = cache.get("prev_value")
    if table is None and saved is not None:
        values, table, used = append_values(None, None, None, saved)
    start = 0 if table is None else table.size(1)
    values, table, used = append_values(values, table, used, value)
    keys = cache.get("prev_key")
    if key is not None and keys is not None:
        key = torch.cat([keys, key], dim=2)
    padding = append_padding(cache.get("prev_key_padding_mask"), key_padding_mask, table.size(0), start, value.size(2))
    extended: Cache = {
        "values": values,
        "block_table": table,
        "used": used,
        "prev_key": key,
        "prev_key_padding_mask": padding,
    }
    return extended, start, key, padding


def reorder(cache: Cache, new_order: Tensor) -> Cache:
    """The cache of the hypotheses `new_order`, each a number of one that the cache has."""
    reordered: Cache = {"values": cache.get("values"), "used": cache.get("used")}
    for name in ("block_table", "prev_key", "prev_key_padding_mask", "prev_value"):
        x = cache.get(name)
        if x is not None:
            reordered[name] = x.index_select(0, new_order)
    return reordered


def weighted_values(weights: Tensor, cache: Cache) -> Tensor:
    """The product (B, H, n, d_h) of attention weights (B or 1, H, n, t) and the cached values."""
    values, table = cache["values"], cache["block_table"]
    assert values is not None and table is not None
    bsz, length = table.size()
    heads, head_dim = values.size(1), values.size(2)
    weights = weights.to(values.dtype)
    if weights.size(2) > 1 or torch.is_grad_enabled():
        return torch.matmul(weights, values[table].transpose(1, 2))
    # embedding_bag reads the rows where they are; without a gradient, as it has no second derivative
    entries = table.unsqueeze(1) * heads + torch.arange(heads, device=table.device).unsqueeze(1)
    out = F.embedding_bag(
        entries.view(bsz * heads, length),
        values.view(-1, head_dim),
        mode="sum",
        per_sample_weights=weights.expand(bsz, -1, -1, -1).reshape(bsz * heads, length),
    )
    return out.view(bsz, heads, 1, head_dim)


def append_values(
    values: Optional[Tensor], table: Optional[Tensor], used: Optional[Tensor], newest: Tensor
) -> Tuple[Tensor, Tensor, Tensor]:
    """Writes the values of the newest tokens behind the others.

    Args:
        values: (N, H, d_h), or None before the first token. A row is written once, so that copies of an incremental
            state may go on with the same tensor.
        table: the block table, (B, t): the row of each token of each hypothesis.
        used: (1,), on the CPU: how many rows are written to.
        newest: (B, H, n, d_h).

    Returns:
        the same three with the newest tokens; the block table is (B, t + n).
    """
    bsz, heads, count, head_dim = newest.size()
    # contiguous, as `weighted_values` takes a view: after one product of queries, keys and values they are not
    entries = newest.transpose(1, 2).reshape(bsz * count, heads, head_dim).contiguous()
    fresh = torch.arange(bsz * count, device=newest.device).view(bsz, count)
    cpu = torch.device("cpu")  # whatever the default device, so that reading it never waits for a GPU
    if values is None or table is None or used is None:
        return entries, fresh, torch.full([1], bsz * count, dtype=torch.long, device=cpu)
    if torch.is_grad_enabled() or values.dtype != entries.dtype:
        first = values.size(0)
        values = torch.cat([values, entries])
        used = torch.full([1], values.size(0), dtype=torch.long, device=cpu)
    else:
        first = int(used)
        needed = table.numel() + bsz * count
        if first + bsz * count > values.size(0) or values.size(0) > 4 * needed or not is_writable(used):
            # a larger one, or a smaller one, without the rows that no hypothesis of this state has
            first = table.numel()
            other = values.new_empty([2 * needed, heads, head_dim])
            torch.index_select(values, 0, table.reshape(-1), out=other[:first])
            values, used = other, torch.empty([1], dtype=torch.long, device=cpu)
            table = torch.arange(first, device=table.device).view(table.size(0), table.size(1))
        values[first : first + bsz * count] = entries
        used.fill_(first + bsz * count)
    return values, torch.cat([table, fresh + first], dim=1), used


def is_writable(x: Tensor) -> bool:
    """Whether a tensor can be written to: one of inference mode only within it."""
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
