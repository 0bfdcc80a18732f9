"""A trained square matrix of which only the corner that sentences have reached costs the optimizer anything."""

from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.nn as nn
from torch import Tensor

FIRST = 256  # size of the innermost block


class NestedMatrix(nn.Module):
    """A trained (H, l, l), stored as nested blocks: the first 256 rows and columns, then what doubles them.

    ::

        +------+-----------+
        | core | right[0]  |     A block that no sentence has reached has no gradient, so that neither
        +------+           |     clipping nor Adam walks it: with l = 1024 and sentences of 32 tokens
        | below[0]         |     15/16 of R. Once reached, it has one in every training step, of zeros
        +------------------+     where a batch is short.

    The updates are those of the whole matrix, but that Adam's bias correction and weight decay begin for a block
    when it is first reached. (Under DistributedDataParallel that is at once.) In a state dict it is one tensor,
    ``matrix``.

    Args:
        num_heads: H.
        length: l.
    """

    def __init__(self, num_heads: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.reached = 0  # the longest sentence so far
        bounds = [min(FIRST, length)]
        while bounds[-1] < length:
            bounds.append(min(2 * bounds[-1], length))
        self.levels: List[Tuple[int, int]] = list(zip([0, *bounds], bounds))  # first and last row of each level
        self.core = nn.Parameter(torch.empty(num_heads, bounds[0], bounds[0]))
        self.right = nn.ParameterList([nn.Parameter(torch.empty(num_heads, m, n - m)) for m, n in self.levels[1:]])
        self.below = nn.ParameterList([nn.Parameter(torch.empty(num_heads, n - m, n)) for m, n in self.levels[1:]])
        self._register_state_dict_hook(join_blocks)
        self._register_load_state_dict_pre_hook(split_matrix, with_module=True)

    def forward(self, start: int, rows: int, columns: int) -> Tensor:
        """The part of the matrix that begins in row `start` and column 0, as (H, rows, columns)."""
        stop = start + rows
        bands: List[Tensor] = []
        blocks = [self.core]
        for block in self.below:
            blocks.append(block)
        for k, block in enumerate(blocks):
            first, last = self.levels[k]
            a, b = max(start, first), min(stop, last)
            if a < b:
                band = [corner(block, a - first, b - first, columns)]
                for j, right in enumerate(self.right):
                    column = self.levels[j + 1][0]
                    if j >= k and column < columns:
                        band.append(corner(right, a, b, columns - column))
                bands.append(torch.cat(band, dim=2) if len(band) > 1 else band[0])
        matrix = torch.cat(bands, dim=1) if len(bands) > 1 else bands[0]
        if not torch.jit.is_scripting():
            if self.training and torch.is_grad_enabled() and len(self.levels) > 1:
                matrix = self.keep_unused(matrix, max(stop, columns))
        return matrix

    @torch.jit.unused
    def keep_unused(self, matrix: Tensor, length: int) -> Tensor:
        """Gives the blocks that are not in `matrix` a place in the graph: zeros if ever reached, else nothing."""
        self.reached = max(self.reached, length)
        unused = [
            (first < self.reached, block)
            for (first, _), *blocks in zip(self.levels[1:], self.right, self.below)
            for block in blocks
            if first >= length
        ]
        if not unused:
            return matrix
        return _InGraph.apply([zeros for zeros, _ in unused], matrix, *[block for _, block in unused])

    def parts(self, matrix: Tensor) -> List[Tuple[str, Tensor]]:
        """The blocks of a whole matrix (H, l, l), by the names of the parameters."""
        size = self.core.size(1)
        parts = [("core", matrix[:, :size, :size])]
        for k, (first, last) in enumerate(self.levels[1:]):
            parts += [(f"right.{k}", matrix[:, :first, first:last]), (f"below.{k}", matrix[:, first:last, :last])]
        return parts

    def assign(self, matrix: Tensor) -> None:
        """Takes the values of a whole matrix, (H, l, l)."""
        parameters = dict(self.named_parameters())
        with torch.no_grad():
            for name, block in self.parts(matrix):
                parameters[name].copy_(block)

    def whole(self) -> Tensor:
        """A copy of the whole matrix, (H, l, l), without a gradient."""
        with torch.no_grad():
            return self(0, self.length, self.length).detach().clone()


def join_blocks(module: NestedMatrix, state_dict: Dict[str, Any], prefix: str, local_metadata: Dict[str, Any]) -> None:
    """In a state dict that is made: one matrix in the place of the blocks."""
    for name, _ in module.named_parameters():
        del state_dict[prefix + name]
    state_dict[prefix + "matrix"] = module.whole()
    if len(module.levels) > 1:
        state_dict[prefix + "reached"] = torch.tensor(float(module.reached))  # fairseq's EMA scales all there is


def split_matrix(
    module: NestedMatrix,
    state_dict: Dict[str, Any],
    prefix: str,
    local_metadata: Dict[str, Any],
    strict: bool,
    missing_keys: List[str],
    unexpected_keys: List[str],
    error_msgs: List[str],
) -> None:
    """In a state dict that is loaded: the blocks in the place of the matrix."""
    reached = state_dict.pop(prefix + "reached", None)
    matrix = state_dict.get(prefix + "matrix")
    shape = (module.core.size(0), module.length, module.length)
    if matrix is None:
        return
    del state_dict[prefix + "matrix"]
    if matrix.shape != shape:
        error_msgs.append(f"size mismatch for {prefix}matrix: {tuple(matrix.shape)}, this model has {shape}")
        matrix = module.whole()
    module.reached = 0 if reached is None else int(reached)
    for name, block in module.parts(matrix):
        state_dict[prefix + name] = block.clone()


class _InGraph(torch.autograd.Function):
    """The identity, with more inputs: their gradients are zeros or None as told.

    None alone would do, but DistributedDataParallel waits for every parameter that the graph does not hold.
    """

    @staticmethod
    def forward(ctx: Any, zeros: List[bool], matrix: Tensor, *blocks: Tensor) -> Tensor:
        ctx.zeros, ctx.blocks = zeros, [block.detach() for block in blocks]
        return matrix.view_as(matrix)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        blocks = [torch.zeros_like(b) if zeros else None for zeros, b in zip(ctx.zeros, ctx.blocks)]
        return (None, grad, *blocks)


def corner(x: Tensor, first: int, last: int, columns: int) -> Tensor:
    """``x[:, first:last, :columns]``; x itself if that is all of it, as the gradient of a slice is a copy."""
    if last - first < x.size(1):
        x = x[:, first:last]
    if columns < x.size(2):
        x = x[:, :, :columns]
    return x
