"""softmax(S) V on a CPU, a tile at a time: neither logits nor weights exist as a whole, in either pass.

The backward pass computes every tile of weights again (recomputation: Rabe and Staats 2021, arXiv 2112.05682; Dao
et al. 2022, arXiv 2205.14135) and leaves their derivative to autograd.
"""

from typing import Any, Callable, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..logits import Summands
from ..masks import at_least_fp32, future, is_causal, on_cpu, sentence_lengths

PLAIN_LIMIT = 1 << 18  # up to so many logits fit in a core's caches as they are, so that `plain` is faster
TILE = 1 << 19  # logits in a tile: 2 MiB of fp32, which stay in a core's caches through a handful of passes
CAUSAL_ROWS = 128  # rows of a causal tile: columns to the right of it are not computed


def supports(
    logits: Summands, value: Tensor, key_padding_mask: Optional[Tensor], attn_mask: Optional[Tensor], dropout: float
) -> bool:
    """Many logits on a CPU, without dropout. All padding is on the right, and no sentence is empty."""
    if dropout or not on_cpu(value) or not (attn_mask is None or is_causal(attn_mask)):
        return False
    bsz, heads, length, _ = value.size()
    number = (min(bsz, 1) if key_padding_mask is None and logits.is_shared() else bsz) * heads * length**2
    return number > PLAIN_LIMIT and lengths_of(value, key_padding_mask) is not None


def compute(
    logits: Summands,
    value: Tensor,
    key_padding_mask: Optional[Tensor],
    attn_mask: Optional[Tensor],
    dropout: float = 0.0,
) -> Tensor:
    """See `attend`."""
    bsz, heads, length, _ = value.size()
    causal, lengths = is_causal(attn_mask), lengths_of(value, key_padding_mask)
    assert lengths is not None
    dtype = value.dtype  # under autocast they differ
    products = [(weight, scale, q.to(dtype), k.to(dtype)) for weight, scale, q, k in logits.products]
    logits = Summands(products, logits.outers, logits.with_matrices(length).biases, [])
    rows = CAUSAL_ROWS if causal else length
    if bsz > 1 and logits.is_shared():
        blocks = list(blocks_of_lengths(lengths, heads, rows))
    else:
        blocks = list(blocks_of_sentences(lengths, heads, rows))
    return _Tiled.apply(map_tensors(lambda _: True, logits), blocks, causal, value, *logits.tensors())


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
    """Saves only its inputs. `places` are logits with True in the place of each tensor."""

    @staticmethod
    def forward(ctx: Any, places: Summands, blocks: List[Block], causal: bool, value: Tensor, *tensors: Tensor) -> Tensor:
        ctx.places, ctx.blocks, ctx.causal = places, blocks, causal
        ctx.save_for_backward(value, *tensors)
        out = like_values(value, blocks)
        logits = in_places(places, tensors)
        with torch.autocast(value.device.type, enabled=False):
            for block in blocks:
                part = with_one_product(of_block(logits, block))
                v = block.read(value)
                for rows, columns in tiles(block, causal):
                    weights = tile_weights(of_tile(part, rows, columns), v.size(1), rows, columns, block, causal)
                    block.write(out, rows, torch.matmul(weights.to(v.dtype), v[:, :, columns]))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        value, *tensors = ctx.saved_tensors
        sums = [zeros_in_fp32(x) if needed else None for x, needed in zip(tensors, ctx.needs_input_grad[4:])]
        grad_value = like_values(value, ctx.blocks)
        logits, logits_sums = in_places(ctx.places, tensors), in_places(ctx.places, sums)
        with torch.autocast(value.device.type, enabled=False):
            for block in ctx.blocks:
                part, part_sums = of_block(logits, block), of_block(logits_sums, block)
                v, g = block.read(value), block.read(grad)
                v = backward_of_block(part, part_sums, v, g, block, ctx.causal)
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


def backward_of_block(logits: Summands, sums: Summands, value: Tensor, grad: Tensor, block: Block, causal: bool) -> Tensor:
    """The gradient of a block's values. Those of its logits are added to `sums`, which has None for what needs none."""
    places = tiles(block, causal)
    is_one_tile = len(places) == 1
    # all tiles share one product
    factors = map_tensors(as_leaf, Summands(logits.products, [], [], []), Summands(sums.products, [], [], []))
    with torch.enable_grad():
        product = with_one_product(factors)
    if not is_one_tile:
        # it is differentiated once, when its gradient has been summed over the tiles
        product_sums = map_tensors(lambda x: zeros_in_fp32(x) if x.requires_grad else None, product)
        logits = Summands(map_tensors(torch.Tensor.detach, product).products, logits.outers, logits.biases, [])
        factor_sums = Summands(sums.products, [], [], [])
        sums = Summands(product_sums.products, sums.outers, sums.biases, [])
    grad_value: Optional[Tensor] = None
    # the last rows come first: they have all columns, so that their product starts the sum
    for rows, columns in reversed(places):
        tile_sums = of_tile(sums, rows, columns)
        leaves = map_tensors(as_leaf, of_tile(logits, rows, columns), tile_sums)
        tile = leaves
        if is_one_tile:
            tile = Summands(product.products, leaves.outers, leaves.biases, [])
            leaves = Summands(factors.products, leaves.outers, leaves.biases, [])
        with torch.enable_grad():
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
        outputs = [x for x in product.tensors() if x.requires_grad]
        add_gradients(outputs, [x for x in product_sums.tensors() if x is not None], factors, factor_sums)
    assert grad_value is not None
    return grad_value


def with_one_product(logits: Summands) -> Summands:
    """All inner products as one, its factors copied to where tiles read them in order."""
    products = [(weight, scale, q.contiguous(), k.contiguous()) for weight, scale, q, k in logits.joined().products]
    return Summands(products, logits.outers, logits.biases, [])


def zeros_in_fp32(x: Tensor) -> Tensor:
    """Zeros of the size of x, in fp32 at least, for a sum over tiles."""
    return torch.zeros(x.size(), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def add_gradients(outputs: List[Tensor], grads: List[Tensor], leaves: Summands, sums: Summands) -> None:
    """Adds to `sums` the gradients that the leaves have by those of the outputs."""
    if outputs:
        inputs = [x for x in leaves.tensors() if x.requires_grad]  # those that have a sum, see `as_leaf`
        totals = [x for x in sums.tensors() if x is not None]
        for total, found in zip(totals, torch.autograd.grad(outputs, inputs, grads)):
            total.add_(found)


def tile_weights(logits: Summands, num_heads: int, rows: slice, columns: slice, block: Block, causal: bool) -> Tensor:
    """Softmax of a tile of logits, in fp32 or fp64; columns that a row may not see are masked."""
    scores = at_least_fp32(logits.total(columns.stop)).expand(-1, num_heads, -1, -1)
    if scores.size(2) == 1 or scores.stride(1) == 0 or not (logits.products or logits.outers):
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


def of_block(logits: Summands, block: Block) -> Summands:
    """The part of the logits that a block reads: views; of the biases all rows and columns."""

    def cut(x: Tensor) -> Tensor:
        sentences = block.sentences if x.size(0) > 1 else slice(None)
        return x[sentences, block.heads if x.size(1) > 1 else slice(None)]

    part = map_tensors(cut, logits)
    factors = map_tensors(lambda x: x[:, :, : block.length], Summands(part.products, [], [], []))
    return Summands(factors.products, part.outers, part.biases, [])


def of_tile(logits: Summands, rows: slice, columns: slice) -> Summands:
    """The part of a block's logits that a tile reads: views."""

    def of_rows(x: Any) -> Any:
        return None if x is None else x[:, :, rows if x.size(2) > 1 else slice(None)]

    def of_columns(x: Any, dim: int) -> Any:
        return None if x is None else x.narrow(dim, 0, columns.stop)

    return Summands(
        [(weight, scale, of_rows(query), of_columns(key, 2)) for weight, scale, query, key in logits.products],
        [(weight, of_rows(left), of_rows(right)) for weight, left, right in logits.outers],
        [(weight, of_columns(of_rows(bias), 3)) for weight, bias in logits.biases],
        [],
    )


def as_leaf(x: Tensor, total: Optional[Tensor]) -> Tensor:
    """x as an input of autograd, if there is a sum for its gradient."""
    return x.detach().requires_grad_(total is not None)


def map_tensors(function: Callable[..., Any], logits: Summands, *others: Summands) -> Summands:
    """Summands of function(x, ...) for each tensor x, with what stands there in the others; None and scales stay."""

    def apply(x: Any, *rest: Any) -> Any:
        return x if x is None or isinstance(x, float) else function(x, *rest)

    def summands(name: str) -> List[Any]:
        found = zip(*(getattr(one, name) for one in (logits, *others)))
        return [tuple(apply(*xs) for xs in zip(*summand)) for summand in found]

    return Summands(summands("products"), summands("outers"), summands("biases"), [])


def in_places(places: Summands, tensors: Iterable[Any]) -> Summands:
    """The inverse of ``Summands.tensors``: what comes next, a tensor or None, in each place that is True."""
    remaining = iter(tensors)
    return map_tensors(lambda _: next(remaining), places)
