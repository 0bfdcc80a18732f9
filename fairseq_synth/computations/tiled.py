"""softmax(S) V on a CPU, a tile at a time: neither logits nor weights exist as a whole, in either pass.

The backward pass computes every tile of weights again (recomputation: Rabe and Staats 2021, arXiv 2112.05682; Dao
et al. 2022, arXiv 2205.14135) and leaves their derivative to autograd.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..linear import concatenated, smaller_times
from ..logits import Logits, Normal, total
from ..masks import at_least_fp32, future, is_causal, on_cpu, sentence_lengths
from .plain import by_token

PLAIN_LIMIT = 1 << 18  # up to so many logits fit in a core's caches as they are, so that `plain` is faster
TILE = 1 << 19  # logits in a tile: 2 MiB of fp32, which stay in a core's caches through a handful of passes
CAUSAL_ROWS = 128  # rows of a causal tile: columns to the right of it are not computed


def refuses(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float
) -> str:
    """See `computations`."""
    if not on_cpu(value):
        return "values that are not on a CPU"
    if dropout:
        return "dropout"
    if not (attn_mask is None or is_causal(attn_mask)):
        return "a mask other than the causal one"
    bsz, heads, length, _ = value.size()
    number = (min(bsz, 1) if key_padding_mask is None and logits.is_shared() else bsz) * heads * length**2
    if number <= PLAIN_LIMIT:
        return "few logits"
    return "" if lengths_of(value, key_padding_mask) else "padding on the left, or an empty sentence"


def compute(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float = 0.0
) -> Tensor:
    """See `computations`."""
    bsz, heads, length, _ = value.size()
    causal, lengths = is_causal(attn_mask), lengths_of(value, key_padding_mask)
    assert lengths is not None
    rows = CAUSAL_ROWS if causal else length
    find = blocks_of_lengths if bsz > 1 and logits.is_shared() else blocks_of_sentences
    others = Logits([], logits.outers, logits.biases, logits.diagonals).normal(length, len(logits.products) > 0)[2:]
    pairs = [smaller_times((query, key), scale, weight) for query, key, scale, weight in logits.products]
    factors = [x.to(value.dtype) for pair in zip(*pairs) for x in pair]  # under autocast the types differ
    return by_token(_Tiled.apply(list(find(lengths, heads, rows)), causal, value, *others, *factors))


def lengths_of(value: Tensor, key_padding_mask: Tensor | None) -> list[int] | None:
    """As `sentence_lengths`; without a mask all sentences have the length of the values."""
    return [value.size(2)] * value.size(0) if key_padding_mask is None else sentence_lengths(key_padding_mask)


ALL = slice(None)


def cut(x: Normal, sentences: slice, heads: slice, rows: slice, columns: slice) -> Normal:
    """These parts of the summands, or of sums like them: views; what has a size of 1 is of all."""

    def of(x: Tensor | None, *parts: slice) -> Tensor | None:
        return None if x is None else x[tuple(part if n > 1 else ALL for part, n in zip(parts, x.size()))]

    query, key = of(x.query, sentences, heads, rows), of(x.key, sentences, heads, columns)
    left, right = of(x.left, sentences, heads, rows), of(x.right, sentences, heads, rows)
    return Normal(query, key, left, right, of(x.bias, sentences, heads, rows, columns))


class Block(NamedTuple):
    """Sentences and heads whose logits are computed together, in tiles of some rows."""

    sentences: slice
    heads: slice
    length: int  # of these sentences, in tokens
    rows: int  # of a tile
    is_shared: bool  # the sentences have the same logits, so that their values are concatenated on features
    hidden: Tensor | None  # (sentences, n): true at padding, in the last n of `length` columns

    def of(self, x: Normal) -> Normal:
        """What the block reads of the summands, or of sums like them: views."""
        return cut(x, self.sentences, self.heads, slice(0, self.length), slice(0, self.length))

    def factors(self, *x: Tensor | None) -> list[Tensor | None]:
        """What it reads of the factors of products, all queries and then all keys, or of sums like them: views."""
        return [self.of(Normal(query, None, None, None, None)).query for query in x]

    def part(self, left: Any, right: Any, bias: Any, *factors: Any) -> Normal:
        """The summands that the block reads, with one product: its factors are copies, which tiles read in order."""
        n, found = len(factors) // 2, [x for x in self.factors(*factors) if x is not None]
        query, key = (concatenated(half).contiguous() if half else None for half in (found[:n], found[n:]))
        return Normal(query, key, *self.of(Normal(None, None, left, right, bias))[2:])

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
    """Saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, blocks: list[Block], causal: bool, value: Tensor, *summands: Tensor | None) -> Tensor:
        ctx.blocks, ctx.causal = blocks, causal
        ctx.save_for_backward(value, *summands)
        out = like_values(value, blocks)
        with torch.autocast(value.device.type, enabled=False):
            for block in blocks:
                part, v = block.part(*summands), block.read(value)
                for rows, columns in tiles(block, causal):
                    weights = tile_weights(cut(part, ALL, ALL, rows, columns), v.size(1), rows, columns, block, causal)
                    block.write(out, rows, torch.matmul(weights.to(v.dtype), v[:, :, columns]))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, *summands = ctx.saved_tensors
        grad_value = like_values(value, ctx.blocks)
        wide = torch.promote_types(value.dtype, torch.float32)  # of sums over tiles
        wanted = zip(summands, ctx.needs_input_grad[3:])
        sums = [torch.zeros(x.size(), dtype=wide, device=x.device) if needed else None for x, needed in wanted]
        with torch.autocast(value.device.type, enabled=False):
            for block in ctx.blocks:
                part, factors, n = block.part(*summands), block.factors(*sums[3:]), len(sums[3:]) // 2
                halves = [(part.query, factors[:n], summands[3 : 3 + n]), (part.key, factors[n:], summands[3 + n :])]
                of_product = [
                    torch.zeros_like(x, dtype=wide) if any(found is not None for found in totals) else None
                    for x, totals, _ in halves
                ]
                part_sums = Normal(*of_product, *block.of(Normal(None, None, *sums[:3]))[2:])
                v = backward_of_block(part, part_sums, block.read(value), block.read(grad), block, ctx.causal)
                block.write(grad_value, slice(0, block.length), v)
                for (_, totals, inputs), found in zip(halves, of_product):
                    if found is not None:
                        for total, x in zip(totals, found.split([y.size(3) for y in inputs], dim=3)):
                            if total is not None:
                                total.add_(x.sum_to_size(total.size()))
        grads = [None if found is None else found.to(x.dtype) for x, found in zip(summands, sums)]
        return (None, None, grad_value, *grads)


def like_values(value: Tensor, blocks: list[Block]) -> Tensor:
    """A tensor like the values, (B, H, T, d_h), for the blocks to write to: 0 in the rows beyond the shortest block.

    In memory it is (T, B, H, d_h), as projections read and write.
    """
    bsz, heads, length, head_dim = value.size()
    out = value.new_empty(length, bsz, heads, head_dim).permute(1, 2, 0, 3)
    out[:, :, min(block.length for block in blocks) :] = 0
    return out


def backward_of_block(part: Normal, sums: Normal, value: Tensor, grad: Tensor, block: Block, causal: bool) -> Tensor:
    """The gradient of a block's values. Those of the summands are added to `sums`, None for what needs none."""
    grad_value: Tensor | None = None
    # the last rows come first: they have all columns, so that their product starts the sum
    for rows, columns in reversed(tiles(block, causal)):
        tile, tile_sums = cut(part, ALL, ALL, rows, columns), cut(sums, ALL, ALL, rows, columns)
        pairs = zip(tile, tile_sums)
        leaves = Normal(*(x if x is None else x.detach().requires_grad_(found is not None) for x, found in pairs))
        with torch.enable_grad():
            weights = tile_weights(leaves, value.size(1), rows, columns, block, causal)
        g, v = grad[:, :, rows], value[:, :, columns]
        transposed = weights.detach().to(v.dtype).transpose(2, 3)
        if grad_value is None:
            grad_value = torch.matmul(transposed, g)
        else:
            grad_value[:, :, columns].flatten(0, 1).baddbmm_(transposed.flatten(0, 1), g.flatten(0, 1))
        wanted = [(x, found) for x, found in zip(leaves, tile_sums) if x is not None and found is not None]
        if wanted:
            grad_weights = torch.matmul(g, v.transpose(2, 3)).to(weights.dtype)
            for (_, found), x in zip(wanted, torch.autograd.grad(weights, [x for x, _ in wanted], grad_weights)):
                found.add_(x)
    assert grad_value is not None
    return grad_value


def tile_weights(tile: Normal, num_heads: int, rows: slice, columns: slice, block: Block, causal: bool) -> Tensor:
    """Softmax of a tile of logits, in fp32 or fp64; columns that a row may not see are masked."""
    scores = at_least_fp32(total(tile, columns.stop)).expand(-1, num_heads, -1, -1)
    if scores.size(2) == 1 or scores.stride(1) == 0 or (tile.query is None and tile.left is None):
        # a copy, as the masks below write in place
        scores = scores.expand(-1, -1, rows.stop - rows.start, -1).clone()
    with torch.no_grad():  # weights of 0 have no gradient
        if causal:
            scores[..., rows] += future(rows.stop - rows.start, scores)
        elif block.hidden is not None:
            scores[..., -block.hidden.size(1) :].masked_fill_(block.hidden[:, None, None], float("-inf"))
    return torch.softmax(scores, dim=-1)


def tiles(block: Block, causal: bool) -> list[tuple[slice, slice]]:
    """The rows and columns of a block's tiles."""
    bounds = [*range(0, block.length, block.rows), block.length]
    return [(slice(a, b), slice(0, b if causal else block.length)) for a, b in zip(bounds, bounds[1:])]
