"""softmax(S) V on a CPU, a tile at a time: neither logits nor weights exist as a whole, in either pass.

The backward pass computes every tile of weights again (recomputation: Rabe and Staats 2021, arXiv 2112.05682; Dao
et al. 2022, arXiv 2205.14135) and leaves their derivative to autograd.
"""

from typing import Any, Callable, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .masks import at_least_fp32, future
from .nested import band_edges, part_of_band, without_future
from .synthesizers import Terms, has_bias, joint_product, logits

TILE = 1 << 19  # logits in a tile: 2 MiB of fp32, which stay in a core's caches through a handful of passes
CAUSAL_ROWS = 128  # rows of a causal tile: columns to the right of it are not computed


class Block(NamedTuple):
    """Sentences and heads whose logits are computed together, in tiles of some rows."""

    sentences: slice
    heads: slice
    length: int  # of these sentences, in tokens
    rows: int  # of a tile
    is_shared: bool  # the sentences have the same logits, so their values are one matrix: side by side
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


def tiled(
    terms: List[Terms],
    value: Tensor,
    lengths: Sequence[int],
    causal: bool,
) -> Tensor:
    """`plain`, a tile of logits at a time.

    Args:
        terms: of S.
        value: (B, H, T, d_h).
        lengths: of the sentences, which begin at column 0; none is empty.
        causal: row i sees the columns up to i only.

    Returns:
        (B, H, T, d_h); rows of padding are unspecified, but finite.
    """
    bsz, heads, length, _ = value.size()
    dtype = value.dtype  # under autocast they differ
    products = [
        Terms(t.query.to(dtype), t.key.to(dtype), weight=t.weight, scale=t.scale)
        for t in terms
        if t.query is not None and t.key is not None
    ]
    terms = products + [t._replace(query=None, key=None) for t in terms if has_bias(t)]
    if causal:
        terms = [t if t.matrix is None else t._replace(matrix=without_future(t.matrix)) for t in terms]
    rows = CAUSAL_ROWS if causal else length
    if bsz > 1 and is_shared(terms):
        blocks = list(blocks_of_lengths(lengths, heads, rows))
    else:
        blocks = list(blocks_of_sentences(lengths, heads, rows))
    return _Tiled.apply(terms, blocks, causal, value, *tensors_of(terms))


def is_shared(terms: Sequence[Terms]) -> bool:
    """Whether the logits are the same for every sentence of the batch."""
    return all(x.size(0) == 1 for x in tensors_of(terms))


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
    """Saves only its inputs. Terms with an inner product come first."""

    @staticmethod
    def forward(
        ctx: Any, terms: List[Terms], blocks: List[Block], causal: bool, value: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.shape, ctx.blocks, ctx.causal = [each(lambda _: 0, term) for term in terms], blocks, causal
        ctx.save_for_backward(value, *tensors)
        out = like_values(value, blocks)
        with torch.autocast(value.device.type, enabled=False):
            for block in blocks:
                part = [of_block(term, block) for term in terms]
                products = [term for term in part if term.query is not None]
                part = [*one_contiguous_product(products), *part[len(products) :]]
                v = block.read(value)
                for rows, columns in tiles(block, part, causal):
                    tile = [of_tile(term, rows, columns) for term in part]
                    weights = tile_weights(tile, v.size(1), rows, columns, block, causal)
                    block.write(out, rows, torch.matmul(weights.to(v.dtype), v[:, :, columns]))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        value, *tensors = ctx.saved_tensors
        totals = [zeros_in_fp32(x) if needed else None for x, needed in zip(tensors, ctx.needs_input_grad[4:])]
        grad_value = like_values(value, ctx.blocks)
        with torch.autocast(value.device.type, enabled=False):
            for block in ctx.blocks:
                terms, sums = (
                    [of_block(term, block) for term in unflatten(ctx.shape, found)] for found in (tensors, totals)
                )
                v, g = block.read(value), block.read(grad)
                block.write(grad_value, slice(0, block.length), backward_of_block(terms, sums, v, g, block, ctx.causal))
        grads = [None if total is None else total.to(x.dtype) for x, total in zip(tensors, totals)]
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
    terms: List[Terms], sums: List[Terms], value: Tensor, grad: Tensor, block: Block, causal: bool
) -> Tensor:
    """The gradient of a block's values. Those of its terms are added to `sums`, which has None for what needs none."""
    places = tiles(block, terms, causal)
    is_one_tile = len(places) == 1
    # All tiles share one product.
    count = sum(term.query is not None for term in terms)
    factors, factor_sums = [each(as_leaf, *pair) for pair in zip(terms[:count], sums)], sums[:count]
    with torch.enable_grad():
        product = one_contiguous_product(factors)
    terms, sums = terms[count:], sums[count:]
    if not is_one_tile:
        # It is differentiated once, when its gradient has been summed over the tiles.
        product_sums = [each(lambda x: zeros_in_fp32(x) if x.requires_grad else None, term) for term in product]
        terms = [*[each(torch.Tensor.detach, term) for term in product], *terms]
        sums = [*product_sums, *sums]
    grad_value: Optional[Tensor] = None
    # the last rows come first: they have all columns, so that their product starts the sum
    for rows, columns in reversed(places):
        leaf_sums = [of_tile(total, rows, columns) for total in sums]
        leaves = [each(as_leaf, of_tile(term, rows, columns), total) for term, total in zip(terms, leaf_sums)]
        tile = [*product, *leaves] if is_one_tile else leaves
        with torch.enable_grad():
            weights = tile_weights(tile, value.size(1), rows, columns, block, causal)
        g, v = grad[:, :, rows], value[:, :, columns]
        part = torch.matmul(weights.detach().to(v.dtype).transpose(2, 3), g)
        if grad_value is None:
            grad_value = part
        else:
            grad_value[:, :, columns] += part
        if weights.requires_grad:
            grad_weights = torch.matmul(g, v.transpose(2, 3)).to(weights.dtype)
            if is_one_tile:
                leaves, leaf_sums = [*factors, *leaves], [*factor_sums, *leaf_sums]
            add_gradients([weights], [grad_weights], leaves, leaf_sums)
    if not is_one_tile:
        outputs = [x for x in tensors_of(product) if x.requires_grad]
        add_gradients(outputs, tensors_of(product_sums), factors, factor_sums)
    assert grad_value is not None
    return grad_value


def one_contiguous_product(products: List[Terms]) -> List[Terms]:
    """All inner products as one, its factors copied to where tiles read them in order."""
    return [each(torch.Tensor.contiguous, joint_product(products))] if products else []


def zeros_in_fp32(x: Tensor) -> Tensor:
    """Zeros of the size of x, in fp32 at least, for a sum over tiles."""
    return torch.zeros(x.size(), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def add_gradients(outputs: List[Tensor], grads: List[Tensor], leaves: List[Terms], totals: List[Terms]) -> None:
    """Adds to `totals` the gradients that the leaves have by those of the outputs."""
    if not outputs:
        return
    pairs: List[Tuple[Tensor, Tensor]] = []
    for term, total in zip(leaves, totals):
        each(lambda x, s: None if s is None else pairs.append((x, s)), term, total)
    for (_, store), found in zip(pairs, torch.autograd.grad(outputs, [x for x, _ in pairs], grads)):
        store.add_(found)


def tile_weights(terms: List[Terms], num_heads: int, rows: slice, columns: slice, block: Block, causal: bool) -> Tensor:
    """Softmax of a tile of logits, in fp32 or fp64; columns that a row may not see are masked."""
    scores = at_least_fp32(logits(terms, columns.stop)).expand(-1, num_heads, -1, -1)
    if scores.size(2) == 1 or scores.stride(1) == 0 or all(t.query is None and t.left is None for t in terms):
        scores = scores.expand(-1, -1, rows.stop - rows.start, -1).clone()  # else it may be a view of a parameter
    with torch.no_grad():  # weights of 0 have no gradient
        if causal:
            scores[..., rows] += future(rows.stop - rows.start, scores)
        elif block.hidden is not None:
            scores[..., -block.hidden.size(1) :].masked_fill_(block.hidden[:, None, None], float("-inf"))
    return torch.softmax(scores, dim=-1)


def tiles(block: Block, terms: List[Terms], causal: bool) -> List[Tuple[slice, slice]]:
    """The rows and columns of a block's tiles. A tile lies within one band of a matrix in blocks."""
    edges = set(range(0, block.length, block.rows)) | {block.length}
    for term in terms:
        if term.matrix is not None:
            edges |= {edge for edge in band_edges(term.matrix) if edge < block.length}
    bounds = sorted(edges)
    return [(slice(a, b), slice(0, b if causal else block.length)) for a, b in zip(bounds, bounds[1:])]


def of_block(term: Terms, block: Block) -> Terms:
    """The part of a term that a block reads: views; of the biases all rows and columns."""

    def cut(x: Tensor) -> Tensor:
        sentences = block.sentences if x.size(0) > 1 else slice(None)
        return x[sentences, block.heads if x.size(1) > 1 else slice(None)]

    part = each(cut, term)
    query, key = (None if x is None else x[:, :, : block.length] for x in (part.query, part.key))
    return part._replace(query=query, key=key)


def of_tile(term: Terms, rows: slice, columns: slice) -> Terms:
    """The part of a block's term that a tile reads: views."""

    def of_rows(x: Optional[Tensor]) -> Optional[Tensor]:
        return None if x is None else x[:, :, rows]

    bias, matrix = term.bias, term.matrix
    return Terms(
        query=of_rows(term.query),
        key=None if term.key is None else term.key[:, :, columns],
        bias=None if bias is None else bias[:, :, rows if bias.size(2) > 1 else slice(None), columns],
        matrix=None if matrix is None else part_of_band(matrix, rows, columns),
        left=of_rows(term.left),
        right=of_rows(term.right),
        weight=term.weight,
        scale=term.scale,
    )


def as_leaf(x: Tensor, total: Optional[Tensor]) -> Tensor:
    """x as an input of autograd, if there is a sum for its gradient."""
    return x.detach().requires_grad_(total is not None)


def each(function: Callable[..., Any], term: Terms, *others: Terms) -> Terms:
    """A term with function(x, ...) in the place of each tensor x, and of each block of the matrix.

    The others have the same fields, or None there. A matrix of which all blocks become None is None.
    """

    def apply(name: str) -> Any:
        x = getattr(term, name)
        return None if x is None else function(x, *[getattr(other, name) for other in others])

    matrix = None
    if term.matrix is not None:
        nothing = [[None] * len(band) for band in term.matrix]
        matrices = [term.matrix, *[nothing if other.matrix is None else other.matrix for other in others]]
        matrix = [[function(*blocks) for blocks in zip(*bands)] for bands in zip(*matrices)]
        if all(block is None for band in matrix for block in band):
            matrix = None
    names = [name for name in Terms._fields if name not in ("matrix", "scale")]
    return Terms(**{name: apply(name) for name in names}, matrix=matrix, scale=term.scale)


def tensors_of(terms: Sequence[Terms]) -> List[Tensor]:
    """All tensors of the terms, in the order of `unflatten`."""
    found: List[Tensor] = []
    for term in terms:
        each(found.append, term)
    return found


def unflatten(shape: Sequence[Terms], tensors: Iterable[Any]) -> List[Terms]:
    """Terms shaped like those of `shape`, of what `tensors_of` gave or what stands in its place."""
    remaining = iter(tensors)
    return [each(lambda _: next(remaining), term) for term in shape]
