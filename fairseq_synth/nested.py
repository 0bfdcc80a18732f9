"""A trained square matrix of which only the corner that sentences have reached costs the optimizer anything."""

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

FIRST = 256  # size of the innermost block


class Blocks(NamedTuple):
    """``matrix[:, start : start + rows, :columns]`` of a `NestedMatrix`, (H, rows, columns), not yet put together.

    The blocks are all those of the matrix, so that one that the part does not touch has a place in the graph.
    """

    blocks: List[Tensor]  # (H, m, n) each
    corners: List[Tuple[int, int]]  # first row and column of each, counted from those of the part
    zeros: List[bool]  # whether its gradient is zeros, and not absent, where the part does not touch it
    rows: int
    columns: int


class NestedMatrix(nn.Module):
    """A trained (H, l, l), stored as nested blocks: the first 256 rows and columns, then what doubles them.

    ::

        +------+-----------+
        | core | right[0]  |     A block that no sentence has reached has no gradient, so that neither
        +------+           |     clipping nor Adam walks it: with l = 1024 and sentences of 32 tokens
        | below[0]         |     15/16 of R. Once reached, it has one in every training step, of zeros
        +------------------+     where a batch is short.

    The updates are those of the whole matrix, but that Adam's bias correction and weight decay begin for a block
    when it is first reached. (Under DistributedDataParallel that is at once. In a decoder the tiles leave the blocks
    right of the diagonal, which it never reads, without a gradient.) In a state dict it is one tensor, ``matrix``.

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

    def forward(self, start: int, rows: int, columns: int) -> Blocks:
        """The part of the matrix that begins in row `start` and column 0: (H, rows, columns), in blocks."""
        blocks = [self.core]
        corners = [(-start, 0)]
        zeros = [True]
        if not torch.jit.is_scripting():
            if self.training and torch.is_grad_enabled():
                self.reached = max(self.reached, start + rows, columns)
        for k, block in enumerate(self.right):
            blocks.append(block)
            corners.append((-start, self.levels[k + 1][0]))
            zeros.append(self.levels[k + 1][0] < self.reached)
        for k, block in enumerate(self.below):
            blocks.append(block)
            corners.append((self.levels[k + 1][0] - start, 0))
            zeros.append(self.levels[k + 1][0] < self.reached)
        return Blocks(blocks, corners, zeros, rows, columns)

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
            return join(self(0, self.length, self.length)).detach().clone()


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


def join(part: Blocks) -> Tensor:
    """The part as one tensor, (H, rows, columns); a view of a block where that is all of it."""
    if not torch.jit.is_scripting():
        if torch.is_grad_enabled() and len(part.blocks) > 1:
            return _Join.apply(part._replace(blocks=[]), *part.blocks)
    whole: Optional[Tensor] = None
    for block, (row, column) in zip(part.blocks, part.corners):
        first, last, stop = overlap(part, row, column, block.size(1), block.size(2))
        if first < last and column < stop:
            piece = corner(block, first - row, last - row, stop - column)
            if piece.size(1) == part.rows and piece.size(2) == part.columns:
                return piece
            if whole is None:
                whole = piece.new_empty(piece.size(0), part.rows, part.columns)
            whole[:, first:last, column:stop] = piece
    assert whole is not None
    return whole


def overlap(part: Blocks, row: int, column: int, m: int, n: int) -> Tuple[int, int, int]:
    """What a block (H, m, n) whose corner is `row`, `column` holds of a part: from row `first` to before `last`, and
    from `column` to before `stop`. Nothing if either is empty."""
    return max(row, 0), min(row + m, part.rows), min(column + n, part.columns)


class _Join(torch.autograd.Function):
    """`join`, in which every block has a place in the graph, and one that is not in the part zeros or no gradient.

    Leaving it out would do, but DistributedDataParallel waits for every parameter that the graph does not hold.
    """

    @staticmethod
    def forward(ctx: Any, part: Blocks, *blocks: Tensor) -> Tensor:
        ctx.part, ctx.shapes = part, [block.shape for block in blocks]
        return join(part._replace(blocks=list(blocks)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        grads: List[Optional[Tensor]] = []
        for (_, m, n), (row, column), zero in zip(ctx.shapes, ctx.part.corners, ctx.part.zeros):
            first, last, stop = overlap(ctx.part, row, column, m, n)
            if first < last and column < stop:
                piece = grad[:, first:last, column:stop]
                grads.append(F.pad(piece, (0, column + n - stop, first - row, row + m - last)))
            else:
                grads.append(grad.new_zeros(grad.size(0), m, n) if zero else None)
        return (None, *grads)


def corner(x: Tensor, first: int, last: int, columns: int) -> Tensor:
    """``x[:, first:last, :columns]``; x itself if that is all of it, as the gradient of a slice is a copy."""
    if last - first < x.size(1):
        x = x[:, first:last]
    if columns < x.size(2):
        x = x[:, :, :columns]
    return x
