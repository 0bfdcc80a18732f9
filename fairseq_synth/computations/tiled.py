"""softmax(S) V on a CPU, a tile at a time: neither logits nor weights exist as a whole, in either pass.

The backward pass computes every tile of weights again (recomputation: Rabe and Staats 2021, arXiv 2112.05682; Dao
et al. 2022, arXiv 2205.14135) and leaves their derivative to autograd.
"""

from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..logits import Logits
from ..masks import at_least_fp32, future, is_causal, on_cpu, sentence_lengths

PLAIN_LIMIT = 1 << 18  # up to so many logits fit in a core's caches as they are, so that `plain` is faster
TILE = 1 << 19  # logits in a tile: 2 MiB of fp32, which stay in a core's caches through a handful of passes
CAUSAL_ROWS = 128  # rows of a causal tile: columns to the right of it are not computed
PARTS = {"product": ["query", "key"], "outer": ["outer", "outer"], "bias": ["bias"]}  # what the tensors of a term are


def supports(
    logits: Logits, value: Tensor, key_padding_mask: Optional[Tensor], attn_mask: Optional[Tensor], dropout: float
) -> bool:
    """Many logits on a CPU, without dropout. All padding is on the right, and no sentence is empty."""
    if dropout or not on_cpu(value) or not (attn_mask is None or is_causal(attn_mask)):
        return False
    bsz, heads, length, _ = value.size()
    number = (min(bsz, 1) if key_padding_mask is None and logits.is_shared() else bsz) * heads * length**2
    return number > PLAIN_LIMIT and lengths_of(value, key_padding_mask) is not None


def compute(
    logits: Logits, value: Tensor, key_padding_mask: Optional[Tensor], attn_mask: Optional[Tensor], dropout: float = 0.0
) -> Tensor:
    """See `attend`."""
    bsz, heads, length, _ = value.size()
    causal, lengths = is_causal(attn_mask), lengths_of(value, key_padding_mask)
    assert lengths is not None
    # under autocast the types differ
    parts = zip(parts_of(logits), logits.tensors())
    logits = logits.with_tensors([x.to(value.dtype) if part in ("query", "key") else x for part, x in parts])
    rows = CAUSAL_ROWS if causal else length
    if bsz > 1 and logits.is_shared():
        blocks = list(blocks_of_lengths(lengths, heads, rows))
    else:
        blocks = list(blocks_of_sentences(lengths, heads, rows))
    tensors = logits.tensors()
    structure = logits.with_tensors([torch.empty(0)] * len(tensors))
    return _Tiled.apply(structure, blocks, causal, value, *tensors)


def lengths_of(value: Tensor, key_padding_mask: Optional[Tensor]) -> Optional[List[int]]:
    """As `sentence_lengths`; without a mask all sentences have the length of the values."""
    return [value.size(2)] * value.size(0) if key_padding_mask is None else sentence_lengths(key_padding_mask)


class Block(NamedTuple):
    """Sentences and heads whose logits are computed together, in tiles of some rows."""

    sentences: slice
    heads: slice
    length: int  # of these sentences, in tokens
    rows: int  # of a tile
    is_shared: bool  # the sentences have the same logits, so that their values are concatenated on features
    hidden: Optional[Tensor]  # (sentences, n): true at padding, in the last n of `length` columns

    def read(self, x: Tensor) -> Tensor:
        """Its n sentences of x, (B, H, T, d_h): (n, heads, length, d_h), or (1, heads, length, n d_h) if shared."""
        part = x[self.sentences, self.heads, : self.length]
        return part.permute(1, 2, 0, 3).flatten(2)[None] if self.is_shared else part.contiguous()

    def write(self, x: Tensor, rows: slice, part: Tensor) -> None:
        """Writes `part`, laid out as `read` returns it, to these rows of the block in x, (B, H, T, d_h)."""
        place = x[self.sentences, self.heads, rows]
        if self.is_shared:
            part = part[0].unflatten(-1, (-1, x.size(-1))).permute(2, 0, 1, 3)
        place.copy_(part)


def blocks_of_sentences(lengths: Sequence[int], heads: int, rows: int) -> Iterator[Block]:
    """Blocks of logits that differ by sentence: neighbours of any length, their padding hidden."""
    longest = max(lengths)
    rows = min(rows, longest, max(1, TILE // longest))
    size = min(len(lengths), max(1, TILE // (rows * longest)))
    count = max(1, TILE // (size * rows * longest))
    for b in range(0, len(lengths), size):
        found = lengths[b : b + size]
        hidden = None
        if min(found) < max(found):
            hidden = torch.arange(min(found), max(found)) >= torch.tensor(found)[:, None]
        for h in range(0, heads, count):
            yield Block(slice(b, b + size), slice(h, h + count), max(found), rows, False, hidden)


def blocks_of_lengths(lengths: Sequence[int], heads: int, rows: int) -> Iterator[Block]:
    """Blocks of shared logits, for neighbours of equal length: fairseq sorts a batch by length."""
    first = 0
    for last in range(1, len(lengths) + 1):
        length = lengths[first]
        if last < len(lengths) and lengths[last] == length:
            continue
        height = min(rows, length, max(1, TILE // length))
        count = max(1, TILE // (height * length))
        for h in range(0, heads, count):
            yield Block(slice(first, last), slice(h, h + count), length, height, True, None)
        first = last


class _Tiled(torch.autograd.Function):
    """Saves only its inputs. `structure`: the logits without their tensors."""

    @staticmethod
    def forward(
        ctx: Any, structure: Logits, blocks: List[Block], causal: bool, value: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.structure, ctx.blocks, ctx.causal = structure, blocks, causal
        ctx.save_for_backward(value, *tensors)
        out = like_values(value, blocks)
        logits = structure.with_tensors(list(tensors))
        with torch.autocast(value.device.type, enabled=False):
            for block in blocks:
                part = with_one_product(logits.with_tensors(of_block(logits, logits.tensors(), block)))
                v = block.read(value)
                for rows, columns in tiles(block, causal):
                    tile = part.with_tensors(of_tile(part, part.tensors(), rows, columns))
                    weights = tile_weights(tile, v.size(1), rows, columns, block, causal)
                    block.write(out, rows, torch.matmul(weights.to(v.dtype), v[:, :, columns]))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        value, *tensors = ctx.saved_tensors
        sums = [zeros_in_fp32(x) if needed else None for x, needed in zip(tensors, ctx.needs_input_grad[4:])]
        grad_value = like_values(value, ctx.blocks)
        logits = ctx.structure.with_tensors(tensors)
        with torch.autocast(value.device.type, enabled=False):
            for block in ctx.blocks:
                part = logits.with_tensors(of_block(logits, tensors, block))
                v, g = block.read(value), block.read(grad)
                v = backward_of_block(part, of_block(logits, sums, block), v, g, block, ctx.causal)
                block.write(grad_value, slice(0, block.length), v)
        grads = [None if total is None else total.to(x.dtype) for x, total in zip(tensors, sums)]
        return (None, None, None, grad_value, *grads)


def like_values(value: Tensor, blocks: List[Block]) -> Tensor:
    """A tensor like the values, (B, H, T, d_h), for the blocks to write to: 0 in the rows beyond the shortest block.

    In memory it is (T, B, H, d_h), as projections read and write.
    """
    bsz, heads, length, head_dim = value.size()
    out = value.new_empty(length, bsz, heads, head_dim).permute(1, 2, 0, 3)
    out[:, :, min(block.length for block in blocks) :] = 0
    return out


def backward_of_block(
    logits: Logits, sums: List[Optional[Tensor]], value: Tensor, grad: Tensor, block: Block, causal: bool
) -> Tensor:
    """The gradient of a block's values. Those of `logits.tensors()` are added to `sums`, None for what needs none."""
    bounds = tiles(block, causal)
    is_one_tile = len(bounds) == 1
    if not is_one_tile:
        # all tiles share one product; it is differentiated once, when its gradient has been summed over them
        factors, sums_of_factors = as_leaves(logits, sums), sums
        with torch.enable_grad():
            joined = with_one_product(factors)
        product = [x for _, tensors, *_ in joined.of("product") for x in tensors]
        product_sums = [zeros_in_fp32(x) if x.requires_grad else None for x in product]
        others = [total for part, total in zip(parts_of(logits), sums) if part in ("outer", "bias")]
        sums = [*sums[: len(logits.weights)], *product_sums, *others]
        logits = joined.with_tensors([x.detach() for x in joined.tensors()])
    grad_value: Optional[Tensor] = None
    # the last rows come first: they have all columns, so that their product starts the sum
    for rows, columns in reversed(bounds):
        tile_sums = of_tile(logits, sums, rows, columns)
        leaves = as_leaves(logits.with_tensors(of_tile(logits, logits.tensors(), rows, columns)), tile_sums)
        with torch.enable_grad():
            tile = with_one_product(leaves) if is_one_tile else leaves
            weights = tile_weights(tile, value.size(1), rows, columns, block, causal)
        g, v = grad[:, :, rows], value[:, :, columns]
        transposed = weights.detach().to(v.dtype).transpose(2, 3)
        if grad_value is None:
            grad_value = torch.matmul(transposed, g)
        else:
            grad_value[:, :, columns].flatten(0, 1).baddbmm_(transposed.flatten(0, 1), g.flatten(0, 1))
        if weights.requires_grad:
            grad_weights = torch.matmul(g, v.transpose(2, 3)).to(weights.dtype)
            add_gradients([weights], [grad_weights], leaves, tile_sums)
    if not is_one_tile:
        outputs = [x for x in product if x.requires_grad]
        add_gradients(outputs, [x for x in product_sums if x is not None], factors, sums_of_factors)
    assert grad_value is not None
    return grad_value


def as_leaves(logits: Logits, sums: List[Optional[Tensor]]) -> Logits:
    """The logits with tensors that autograd sees as inputs where there is a sum for their gradient."""
    pairs = zip(logits.tensors(), sums)
    return logits.with_tensors([x.detach().requires_grad_(total is not None) for x, total in pairs])


def with_one_product(logits: Logits) -> Logits:
    """All inner products as one, its factors copied to where tiles read them in order."""
    joined = logits.joined()
    for _, tensors, *_ in joined.of("product"):
        tensors[:] = [x.contiguous() for x in tensors]
    return joined


def zeros_in_fp32(x: Tensor) -> Tensor:
    """Zeros of the size of x, in fp32 at least, for a sum over tiles."""
    return torch.zeros(x.size(), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def add_gradients(outputs: List[Tensor], grads: List[Tensor], leaves: Logits, sums: List[Optional[Tensor]]) -> None:
    """Adds to `sums` the gradients that the leaves have by those of the outputs."""
    if outputs:
        wanted = [(x, total) for x, total in zip(leaves.tensors(), sums) if total is not None]
        found = torch.autograd.grad(outputs, [x for x, _ in wanted], grads, allow_unused=True)
        for (_, total), x in zip(wanted, found):
            if x is not None:
                total.add_(x)


def tile_weights(logits: Logits, num_heads: int, rows: slice, columns: slice, block: Block, causal: bool) -> Tensor:
    """Softmax of a tile of logits, in fp32 or fp64; columns that a row may not see are masked."""
    scores = at_least_fp32(logits.total(columns.stop)).expand(-1, num_heads, -1, -1)
    if scores.size(2) == 1 or scores.stride(1) == 0 or len(logits.of("bias")) == len(logits.terms):
        # a copy, as the masks below write in place
        scores = scores.expand(-1, -1, rows.stop - rows.start, -1).clone()
    with torch.no_grad():  # weights of 0 have no gradient
        if causal:
            scores[..., rows] += future(rows.stop - rows.start, scores)
        elif block.hidden is not None:
            scores[..., -block.hidden.size(1) :].masked_fill_(block.hidden[:, None, None], float("-inf"))
    return torch.softmax(scores, dim=-1)


def tiles(block: Block, causal: bool) -> List[Tuple[slice, slice]]:
    """The rows and columns of a block's tiles."""
    bounds = [*range(0, block.length, block.rows), block.length]
    return [(slice(a, b), slice(0, b if causal else block.length)) for a, b in zip(bounds, bounds[1:])]


def parts_of(logits: Logits) -> List[str]:
    """What each of `logits.tensors()` is."""
    return ["weight"] * len(logits.weights) + [part for kind, *_ in logits.terms for part in PARTS[kind]]


def of_block(logits: Logits, tensors: Sequence[Any], block: Block) -> List[Any]:
    """What a block reads of `logits.tensors()`, or of sums like them: views; of biases all rows and columns."""
    found: List[Any] = []
    for part, x in zip(parts_of(logits), tensors):
        if x is not None:
            sentences = block.sentences if x.size(0) > 1 else slice(None)
            x = x[sentences, block.heads if x.size(1) > 1 else slice(None)]
            x = x[:, :, : block.length] if part in ("query", "key") else x
        found.append(x)
    return found


def of_tile(logits: Logits, tensors: Sequence[Any], rows: slice, columns: slice) -> List[Any]:
    """The parts of a block's tensors that a tile reads: views."""
    found: List[Any] = []
    for part, x in zip(parts_of(logits), tensors):
        if x is not None:
            x = x[:, :, rows] if part in ("query", "outer", "bias") and x.size(2) > 1 else x
            x = x[:, :, : columns.stop] if part == "key" else x
            x = x[..., : columns.stop] if part == "bias" else x
        found.append(x)
    return found
