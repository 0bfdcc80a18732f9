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

    sentences: slice  # of the terms; all where they are shared
    heads: slice
    features: slice  # of the values
    length: int  # of these sentences, in tokens
    rows: int  # of a tile
    hidden: Optional[Tensor]  # (sentences, n): true at padding, in the last n of `length` columns

    def cut(self, x: Tensor) -> Tensor:
        """The part (sentences, heads, length, features) of a tensor like the values."""
        return x[self.sentences, self.heads, : self.length, self.features]


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
    bsz, heads, length, head_dim = value.size()
    products = [
        Terms(
            t.query.to(value.dtype), t.key.to(value.dtype), weight=t.weight, scale=t.scale
        )  # under autocast they differ
        for t in terms
        if t.query is not None and t.key is not None
    ]
    terms = products + [t._replace(query=None, key=None) for t in terms if has_bias(t)]
    if causal:
        terms = [t if t.matrix is None else t._replace(matrix=without_future(t.matrix)) for t in terms]
    if bsz == 1 or not is_shared(terms):
        rows = CAUSAL_ROWS if causal else length
        return run(terms, value, list(blocks_of_sentences(lengths, heads, rows)), causal)
    # one sentence of all values side by side, (1, H, T, B d_h)
    values = value.permute(1, 2, 0, 3).reshape(1, heads, length, bsz * head_dim)
    blocks = list(blocks_of_lengths(lengths, heads, head_dim, CAUSAL_ROWS if causal else length))
    out = run(terms, values, blocks, causal)
    return out.view(heads, length, bsz, head_dim).permute(2, 0, 1, 3)


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
            yield Block(slice(b, b + size), slice(h, h + count), slice(None), max(found), rows, hidden)


def blocks_of_lengths(lengths: Sequence[int], heads: int, head_dim: int, rows: int) -> Iterator[Block]:
    """Blocks of shared logits: for neighbours of equal length, as which fairseq sorts a batch."""
    first = 0
    for last in range(1, len(lengths) + 1):
        length = lengths[first]
        if last < len(lengths) and lengths[last] == length:
            continue
        height = min(rows, length, max(1, TILE // length))
        count = max(1, TILE // (height * length))
        for h in range(0, heads, count):
            features = slice(first * head_dim, last * head_dim)
            yield Block(slice(None), slice(h, h + count), features, length, height, None)
        first = last


def run(terms: List[Terms], value: Tensor, blocks: List[Block], causal: bool) -> Tensor:
    """The output (n, H, T, d) of all blocks for values (n, H, T, d)."""
    return _Tiled.apply(terms, blocks, causal, value, *tensors_of(terms))


class _Tiled(torch.autograd.Function):
    """Saves its inputs alone. The terms are inner products first, then what has none."""

    @staticmethod
    def forward(
        ctx: Any, terms: List[Terms], blocks: List[Block], causal: bool, value: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.shape, ctx.blocks, ctx.causal = [each(lambda _: 0, term) for term in terms], blocks, causal
        ctx.save_for_backward(value, *tensors)
        out = torch.zeros_like(value)
        with torch.autocast(value.device.type, enabled=False):
            for block in blocks:
                part = [of_block(term, block) for term in terms]
                products = [term for term in part if term.query is not None]
                part = [*one_contiguous_product(products), *part[len(products) :]]
                v, o = block.cut(value).contiguous(), block.cut(out)
                for rows, columns in tiles(block, part, causal):
                    tile = [of_tile(term, rows, columns) for term in part]
                    weights = tile_weights(tile, v.size(1), rows, columns, block, causal)
                    o[:, :, rows] = torch.matmul(weights.to(v.dtype), v[:, :, columns])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        value, *tensors = ctx.saved_tensors
        totals = [zeros_in_fp32(x) if needed else None for x, needed in zip(tensors, ctx.needs_input_grad[4:])]
        grad_value = torch.zeros_like(value)
        with torch.autocast(value.device.type, enabled=False):
            for block in ctx.blocks:
                terms, sums = (
                    [of_block(term, block) for term in unflatten(ctx.shape, found)] for found in (tensors, totals)
                )
                v, g = (block.cut(x).contiguous() for x in (value, grad))
                block.cut(grad_value).copy_(backward_of_block(terms, sums, v, g, block, ctx.causal))
        grads = [None if total is None else total.to(x.dtype) for x, total in zip(tensors, totals)]
        return (None, None, None, grad_value, *grads)


def backward_of_block(
    terms: List[Terms], sums: List[Terms], value: Tensor, grad: Tensor, block: Block, causal: bool
) -> Tensor:
    """The gradient of a block's values. Those of its terms are added to `sums`, which has None for what needs none."""
    # one product for all tiles, differentiated once
    leaves = [each(as_leaf, *pair) for pair in zip(terms, sums) if pair[0].query is not None]
    with torch.enable_grad():
        product = one_contiguous_product(leaves)
    product_sums = [each(lambda x: zeros_in_fp32(x) if x.requires_grad else None, term) for term in product]
    tile_terms = [*[each(torch.Tensor.detach, term) for term in product], *terms[len(leaves) :]]
    tile_sums = [*product_sums, *sums[len(leaves) :]]
    grad_value: Optional[Tensor] = None
    # the last rows come first: they have all columns, so that their product starts the sum
    for rows, columns in reversed(tiles(block, tile_terms, causal)):
        totals = [of_tile(total, rows, columns) for total in tile_sums]
        tile = [each(as_leaf, of_tile(term, rows, columns), total) for term, total in zip(tile_terms, totals)]
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
            add_gradients([weights], [grad_weights], tile, totals)
    outputs = tensors_of(product)
    grads = tensors_of(product_sums)
    outputs = [x for x in outputs if x.requires_grad]
    if outputs:
        add_gradients(outputs, [g.to(x.dtype) for g, x in zip(grads, outputs)], leaves, sums[: len(leaves)])
    assert grad_value is not None
    return grad_value


def one_contiguous_product(products: List[Terms]) -> List[Terms]:
    """All inner products as one, its factors copied to where tiles read them in order."""
    return [each(torch.Tensor.contiguous, joint_product(products))] if products else []


def zeros_in_fp32(x: Tensor) -> Tensor:
    """Zeros like x for a sum over tiles, in fp32 at least."""
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


def add_gradients(outputs: List[Tensor], grads: List[Tensor], leaves: List[Terms], totals: List[Terms]) -> None:
    """Adds to `totals` the gradients that the leaves have by those of the outputs."""
    pairs: List[Tuple[Tensor, Tensor]] = []
    for term, total in zip(leaves, totals):
        each(lambda x, s: None if s is None else pairs.append((x, s)), term, total)
    for (_, store), found in zip(pairs, torch.autograd.grad(outputs, [x for x, _ in pairs], grads)):
        store.add_(found)


def tile_weights(terms: List[Terms], num_heads: int, rows: slice, columns: slice, block: Block, causal: bool) -> Tensor:
    """Softmax of a tile of logits, in fp32 at least, what a row may not see hidden."""
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
    """The rows and columns of a block's tiles. One reads its rows of a matrix in blocks from one band."""
    edges = set(range(0, block.length, block.rows)) | {block.length}
    for term in terms:
        if term.matrix is not None:
            edges |= {edge for edge in band_edges(term.matrix) if edge < block.length}
    bounds = sorted(edges)
    return [(slice(a, b), slice(0, b if causal else block.length)) for a, b in zip(bounds, bounds[1:])]


def of_block(term: Terms, block: Block) -> Terms:
    """The part of a term that a block reads: views, all rows and columns."""

    def cut(x: Optional[Tensor]) -> Optional[Tensor]:
        if x is None:
            return None
        sentences = block.sentences if x.size(0) > 1 else slice(None)
        return x[sentences, block.heads if x.size(1) > 1 else slice(None)]

    return each(cut, term)


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
