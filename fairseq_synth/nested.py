"""A trained square matrix of which only the corner that sentences have reached costs the optimizer anything."""

from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
import torch.nn as nn
from torch import Tensor

CORE = 256  # rows and columns of the innermost block


class NestedMatrix(nn.Module):
    """A trained (H, l, l), stored in blocks: the first 256 rows and columns, then what doubles them.

    ::

        +-------+-------+---------------+
        | 0,0   | 0,1   | 0,2           |     A block that no sentence has reached has no gradient, so that
        +-------+-------+               |     neither clipping nor Adam walks it: with l = 1024 and sentences of
        | 1,1           +---------------+     32 tokens 15/16 of R. Once reached, it has one in every training
        |               | 1,2           |     step, of zeros where a batch is short. Tiles of a decoder read no
        +---------------+---------------+     block above the diagonal, and give it none.
        | 2,2                           |
        |                               |     The updates are those of the whole matrix, but that Adam's bias
        |                               |     correction and weight decay begin for a block when it is first
        +-------------------------------+     reached. In a state dict the matrix is one tensor, ``matrix``.

    Args:
        num_heads: H.
        length: l.
    """

    def __init__(self, num_heads: int, length: int) -> None:
        super().__init__()
        self.num_heads, self.length = num_heads, length
        bounds = [0, min(CORE, length)]
        while bounds[-1] < length:
            bounds.append(min(2 * bounds[-1], length))
        # first and last row of each band of rows; of each block its band, and its first and last column
        self.bands: List[Tuple[int, int]] = list(zip(bounds, bounds[1:]))
        self.places: List[Tuple[int, int, int]] = []
        self.blocks = nn.ParameterList()
        for band, (first, last) in enumerate(self.bands):
            for left, right in [(0, last), *self.bands[band + 1 :]]:
                self.places.append((band, left, right))
                self.blocks.append(nn.Parameter(torch.empty(num_heads, last - first, right - left)))
        self.reached = [False] * len(self.blocks)  # whether it has had a gradient
        self._register_state_dict_hook(save_whole)
        self._register_load_state_dict_pre_hook(load_whole, with_module=True)

    def forward(self, start: int, rows: int, columns: int) -> List[List[Tensor]]:
        """The rows from `start` on and the first columns, (1, H, rows, columns), in blocks as `assemble` takes them.

        Position p is row and column p mod l.
        """
        blocks: List[Tensor] = []
        for block in self.blocks:
            blocks.append(block)
        if not torch.jit.is_scripting():
            if torch.is_grad_enabled() and len(blocks) > 1 and not torch.jit.is_tracing():
                blocks = list(_WithZeros.apply(self.reached, *blocks))
        part: List[List[Tensor]] = []
        while rows > 0:
            start = start % self.length
            count = min(rows, self.length - start)
            for band, (first, last) in enumerate(self.bands):
                top, bottom = max(start, first), min(start + count, last)
                if top < bottom:
                    beside: List[Tensor] = []
                    for origin in range(0, columns, self.length):
                        for block, (of_band, left, right) in zip(blocks, self.places):
                            width = min(columns - origin, right) - left
                            if of_band == band and width > 0:
                                beside.append(block[None, :, top - first : bottom - first, :width])
                    part.append(beside)
            start += count
            rows -= count
        return part

    def cells(self, matrix: Tensor) -> Iterator[Tensor]:
        """The part of a whole matrix (H, l, l) that each block holds."""
        for band, left, right in self.places:
            yield matrix[:, slice(*self.bands[band]), left:right]

    def assign(self, matrix: Tensor) -> None:
        """Takes the values of a whole matrix, (H, l, l)."""
        with torch.no_grad():
            for block, cell in zip(self.blocks, self.cells(matrix)):
                block.copy_(cell)

    def whole(self) -> Tensor:
        """A copy of the whole matrix, (H, l, l), without a gradient."""
        with torch.no_grad():
            return assemble(self(0, self.length, self.length))[0].clone()


def assemble(blocks: List[List[Tensor]]) -> Tensor:
    """One tensor of blocks (1, H, m, n): those of a list beside each other, the lists below each other."""
    bands: List[Tensor] = []
    for band in blocks:
        bands.append(band[0] if len(band) == 1 else torch.cat(band, dim=-1))
    return bands[0] if len(bands) == 1 else torch.cat(bands, dim=-2)


def band_edges(blocks: List[List[Tensor]]) -> List[int]:
    """The rows at which a list of blocks ends."""
    edges: List[int] = []
    for band in blocks:
        edges.append((edges[-1] if edges else 0) + band[0].size(-2))
    return edges


def without_future(blocks: List[List[Tensor]]) -> List[List[Tensor]]:
    """The blocks that causal rows read: not those which begin right of all rows of their band."""
    kept = []
    for band, bottom in zip(blocks, band_edges(blocks)):
        lefts = [sum(block.size(-1) for block in band[:i]) for i in range(len(band))]
        kept.append([block for block, left in zip(band, lefts) if left < bottom])
    return kept


def part_of_band(blocks: List[List[Tensor]], rows: slice, columns: slice) -> List[List[Tensor]]:
    """Views of some rows, all of one band, and of some columns: blocks again."""
    for band, bottom in zip(blocks, band_edges(blocks)):
        top = bottom - band[0].size(-2)
        if top <= rows.start < bottom:
            views, left = [], 0
            for block in band:
                first, last = max(columns.start - left, 0), min(columns.stop - left, block.size(-1))
                if first < last:
                    views.append(block[..., rows.start - top : rows.stop - top, first:last])
                left += block.size(-1)
            return [views]
    raise AssertionError(f"rows {rows} of {blocks}")


class _WithZeros(torch.autograd.Function):
    """The blocks as they are. One that a sentence has reached, but not this batch, gets a gradient of zeros.

    A block that none has reached is an input all the same: DistributedDataParallel waits for every parameter that
    the graph does not hold.
    """

    @staticmethod
    def forward(ctx: Any, reached: List[bool], *blocks: Tensor) -> Tuple[Tensor, ...]:
        ctx.reached, ctx.sizes = reached, [block.size() for block in blocks]
        ctx.set_materialize_grads(False)
        return tuple(block.view_as(block) for block in blocks)

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        like = next(grad for grad in grads if grad is not None)
        found: List[Optional[Tensor]] = []
        for i, grad in enumerate(grads):
            ctx.reached[i] = ctx.reached[i] or grad is not None
            found.append(like.new_zeros(ctx.sizes[i]) if grad is None and ctx.reached[i] else grad)
        return (None, *found)


def save_whole(module: NestedMatrix, state_dict: Dict[str, Any], prefix: str, local_metadata: Dict[str, Any]) -> None:
    """A state_dict hook: one matrix in the place of the blocks."""
    for name, _ in module.named_parameters():
        del state_dict[prefix + name]
    state_dict[prefix + "matrix"] = module.whole()
    if len(module.blocks) > 1:
        state_dict[prefix + "reached"] = torch.tensor(module.reached).float()  # fairseq's EMA scales all there is


def load_whole(
    module: NestedMatrix,
    state_dict: Dict[str, Any],
    prefix: str,
    local_metadata: Dict[str, Any],
    strict: bool,
    missing_keys: List[str],
    unexpected_keys: List[str],
    error_msgs: List[str],
) -> None:
    """A load_state_dict hook: the blocks in the place of the matrix."""
    reached = state_dict.pop(prefix + "reached", None)
    matrix = state_dict.pop(prefix + "matrix", None)
    if matrix is None:
        return
    shape = (module.num_heads, module.length, module.length)
    if matrix.shape != shape:
        error_msgs.append(f"size mismatch for {prefix}matrix: {tuple(matrix.shape)}, this model has {shape}")
        matrix = module.whole()
    if reached is not None:
        same_blocks = len(reached) == len(module.blocks)  # else all may have been reached
        module.reached = (reached > 0).tolist() if same_blocks else [True] * len(module.blocks)
    for (name, _), cell in zip(module.named_parameters(), module.cells(matrix)):
        state_dict[prefix + name] = cell.clone()
