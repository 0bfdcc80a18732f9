"""What self-attention keeps of earlier tokens while it decodes.

A beam search goes on with other hypotheses after every step. Values are not moved for that: they stay in one table,
and a hypothesis is a list of its rows. Keys and padding masks, where something reads them, are copied.
"""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor


def append_values(
    values: Optional[Tensor], rows: Optional[Tensor], used: Optional[Tensor], newest: Tensor
) -> Tuple[Tensor, Tensor, Tensor]:
    """Enters the values of the newest tokens in the table.

    Args:
        values: the table, (N, H, d_h), or None before the first token. Rows are written once, so that copies of an
            incremental state may go on with the same one.
        rows: (B, t), the row of each token of each hypothesis.
        used: (1,), on the CPU: how many rows are written to.
        newest: (B, H, n, d_h).

    Returns:
        the same three with the newest tokens; rows is (B, t + n).
    """
    bsz, heads, count, head_dim = newest.size()
    entries = newest.transpose(1, 2).reshape(bsz * count, heads, head_dim)
    fresh = torch.arange(bsz * count, device=newest.device).view(bsz, count)
    cpu = torch.device("cpu")  # whatever the default: a GPU's would be waited for
    if values is None or rows is None or used is None:
        return entries, fresh, torch.full([1], bsz * count, dtype=torch.long, device=cpu)
    if torch.is_grad_enabled() or values.dtype != entries.dtype:
        first = values.size(0)
        values = torch.cat([values, entries])
        used = torch.full([1], values.size(0), dtype=torch.long, device=cpu)
    else:
        first = int(used)
        needed = rows.numel() + bsz * count
        if first + bsz * count > values.size(0) or values.size(0) > 4 * needed or not may_change(used):
            # another one, without the rows that no hypothesis of this state has
            first = rows.numel()
            other = values.new_empty([2 * needed, heads, head_dim])
            torch.index_select(values, 0, rows.reshape(-1), out=other[:first])
            values, used = other, torch.empty([1], dtype=torch.long, device=cpu)
            rows = torch.arange(first, device=rows.device).view(rows.size(0), rows.size(1))
        values[first : first + bsz * count] = entries
        used.fill_(first + bsz * count)
    return values, torch.cat([rows, fresh + first], dim=1), used


def weighted_values(weights: Tensor, values: Tensor, rows: Tensor) -> Tensor:
    """The product (B, H, n, d_h) of attention weights (B or 1, H, n, S) and the values in `rows` (B, S) of a table."""
    bsz, length = rows.size()
    heads, head_dim = values.size(1), values.size(2)
    weights = weights.to(values.dtype)
    if weights.size(2) > 1 or torch.is_grad_enabled():
        return torch.matmul(weights, values[rows].transpose(1, 2))
    # read where they lie; it has no second derivative
    entries = rows.unsqueeze(1) * heads + torch.arange(heads, device=rows.device).unsqueeze(1)
    out = F.embedding_bag(
        entries.view(bsz * heads, length),
        values.view(-1, head_dim),
        mode="sum",
        per_sample_weights=weights.expand(bsz, -1, -1, -1).reshape(bsz * heads, length),
    )
    return out.view(bsz, heads, 1, head_dim)


def may_change(x: Tensor) -> bool:
    """Whether a tensor can be written to: one of inference mode only within it."""
    if x.is_inference():
        if torch.jit.is_scripting():
            return False
        return torch.is_inference_mode_enabled()
    return True


def take_room(is_free: Optional[Tensor]) -> bool:
    """Whether this step may write behind the cached keys; no other step may after it.

    Copies of an incremental state share one `is_free`, (1,), and so one of them takes the room.
    """
    if is_free is None or torch.is_grad_enabled() or not may_change(is_free) or not bool(is_free):
        return False
    is_free.fill_(False)
    return True


def append_keys(previous: Tensor, room: Optional[Tensor], newest: Tensor, has_room: bool) -> Tensor:
    """The cached keys (B, H, t, d_h) and those of the newest tokens behind them.

    Args:
        previous: what is cached.
        room: None, or (B, H, t + 1, d_h) of which the first t are `previous`.
        newest: (B, H, n, d_h).
        has_room: n is 1, and it may be written to `room`.
    """
    if room is None or not has_room:
        return torch.cat([previous, newest], dim=2)
    room[:, :, previous.size(2) :] = newest
    return room


def reorder_keys(keys: Tensor, new_order: Tensor) -> Tuple[Tensor, Optional[Tensor]]:
    """The keys of other hypotheses, and a tensor of which they are the first, with room for one token more."""
    if torch.is_grad_enabled():
        return keys.index_select(0, new_order), None
    room = keys.new_empty([new_order.size(0), keys.size(1), keys.size(2) + 1, keys.size(3)])
    torch.index_select(keys, 0, new_order, out=room[:, :, : keys.size(2)])
    return room[:, :, : keys.size(2)], room


def append_padding_mask(
    previous: Optional[Tensor], current: Optional[Tensor], bsz: int, start: int, tgt_len: int
) -> Optional[Tensor]:
    """Padding mask (B, start + tgt_len) of the cached and the newest tokens; an absent part has no padding."""
    if previous is None and current is None:
        return None
    if current is None:
        assert previous is not None
        current = torch.zeros(bsz, tgt_len, dtype=torch.bool, device=previous.device)
    if previous is None:
        previous = torch.zeros(bsz, start, dtype=torch.bool, device=current.device)
    return torch.cat([previous.to(torch.bool), current.to(torch.bool)], dim=1)
