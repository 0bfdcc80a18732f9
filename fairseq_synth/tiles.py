"""softmax(S) V by tiles: neither logits nor weights exist as a whole, in either pass."""

from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .synthesizers import Terms, at_least_fp32, outer_product, times_weight

# logits in a tile: 1 MiB of fp32 stays in a core's caches through its handful of passes; a GPU wants few launches
TILE = 1 << 18
GPU_TILE = 1 << 26
CAUSAL_ROWS = 128  # rows of a causal tile: columns to the right of it are not computed
SHORT = 128  # tokens up to which an inner product that serves all sentences is computed once, not in each tile
NARROW = 16  # a product of fewer columns is computed transposed, 3 to 4 times faster at 8 (MKL)


class Group(NamedTuple):
    """Sentences ``first .. last - 1`` of a batch, all of `length` tokens."""

    first: int
    last: int
    length: int


def groups_of(lengths: Sequence[int]) -> List[Group]:
    """Neighbours of equal length together; fairseq sorts a batch by length, so that they are few."""
    groups: List[Group] = []
    for i, length in enumerate(lengths):
        if groups and groups[-1].length == length:
            groups[-1] = groups[-1]._replace(last=i + 1)
        else:
            groups.append(Group(i, i + 1, length))
    return groups


def tiled(terms: List[Terms], value: Tensor, groups: Sequence[Group], causal: bool) -> Tensor:
    """`plain`, a tile of logits at a time.

    Args:
        terms: of S.
        value: (B, H, T, d_h).
        groups: the sentences by length, as of `groups_of`; they begin at column 0. If `causal`, one group of
            all of them will do: what is behind a sentence is never seen from inside it.
        causal: row i sees the columns up to i only.

    Returns:
        (B, H, T, d_h); rows behind a sentence's length are 0.
    """
    independent = input_independent(terms)
    parts: List[Part] = []
    places: List[Place] = []
    for term in terms:
        for part, place in parts_of(term, once=not independent and value.size(2) <= SHORT):
            for name, tensor in part._asdict().items():
                if tensor is not None:
                    # a factor of an outer product that serves all sentences is rare, and repeated
                    repeat = not independent and name in ("left", "right")
                    tensor = tensor.expand(value.size(0) if repeat else -1, value.size(1), -1, -1)
                    if part.bias is None and (not independent or value.size(0) == 1):
                        tensor = tensor.to(value.dtype)  # under autocast they differ
                    part = part._replace(**{name: tensor})
            parts.append(part)
            places.append(place)
    return _Tiled.apply(groups, causal, independent, places, value, *[tensor for part in parts for tensor in part])


def input_independent(terms: Sequence[Terms]) -> bool:
    """Whether the logits are the same for every sentence of the batch."""
    return all(not isinstance(part, Tensor) or part.size(0) == 1 for term in terms for part in term)


class Part(NamedTuple):
    """What is left of a term in `_Tiled`: an inner product, a bias or an outer product. Or the gradients of it."""

    query: Optional[Tensor] = None  # (B or 1, H, T, r)
    key: Optional[Tensor] = None  # (B or 1, H, T, r)
    bias: Optional[Tensor] = None  # (B or 1, H, m, n)
    left: Optional[Tensor] = None  # (B, H, T, a)
    right: Optional[Tensor] = None  # (B, H, T, b)
    weight: Optional[Tensor] = None  # (1, H, 1, 1)


class Place(NamedTuple):
    """What `_Tiled` knows of a part beside its tensors."""

    scale: float = 1.0  # of an inner product
    row: Optional[int] = None  # of the logits, in which a bias begins; None if its one row serves all of them
    column: int = 0
    zeros: bool = True  # whether the gradient of a bias that no tile touches is zeros, and not absent

    def has_gradient(self, bias: Tensor, length: int, causal: bool) -> bool:
        """Whether a bias has a gradient for sentences of up to `length` tokens."""
        if self.row is None:
            return True
        last = self.row + bias.size(2)
        seen = max(self.row, self.column) < length and last > 0
        return (seen or self.zeros) and not (causal and self.column >= last)

    def overlap(self, bias: Tensor, rows: slice, columns: slice) -> Optional[Tuple[Tensor, Tuple[slice, ...]]]:
        """What a tile and a bias (n, R, C) have in common: the part of the bias, and where it lies in the tile."""
        own_rows = tile_rows = slice(None)
        if self.row is not None:
            own_rows, tile_rows = common(self.row, bias.size(1), rows)
        own_columns, tile_columns = common(self.column, bias.size(2), columns)
        part = bias[:, own_rows, own_columns]
        return (part, (slice(None), tile_rows, tile_columns)) if part.numel() else None


def parts_of(term: Terms, once: bool) -> Iterator[Tuple[Part, Place]]:
    """A term's inner product, biases and outer product, each with its weight.

    Args:
        term: a term.
        once: an inner product that serves all sentences becomes a bias.
    """
    if term.query is not None:
        if once and term.query.size(0) == term.key.size(0) == 1:
            shared = torch.matmul(times_weight(term.query, term.weight, term.scale), term.key.transpose(2, 3))
            yield Part(bias=shared), Place(row=0)
        else:
            yield Part(query=term.query, key=term.key, weight=term.weight), Place(term.scale)
    weight = None if term.weight is None else at_least_fp32(term.weight)  # its gradient is a sum over all blocks
    if term.bias is not None:
        yield Part(bias=term.bias, weight=weight), Place(row=0 if term.bias.size(2) > 1 else None)
    if term.matrix is not None:
        for block, (row, column), zeros in zip(term.matrix.blocks, term.matrix.corners, term.matrix.zeros):
            yield Part(bias=block[None], weight=weight), Place(row=row, column=column, zeros=zeros)
    if term.left is not None:
        yield Part(left=term.left, right=term.right, weight=term.weight), Place()


def common(start: int, size: int, span: slice) -> Tuple[slice, slice]:
    """What ``start .. start + size - 1`` and a span have in common, counted from the start of each."""
    first, last = max(start, span.start), max(min(start + size, span.stop), start, span.start)
    return slice(first - start, last - start), slice(first - span.start, last - span.start)


class _Tiled(torch.autograd.Function):
    """Saves its inputs alone; the backward pass computes every tile of weights again."""

    @staticmethod
    def forward(
        ctx: Any,
        groups: Sequence[Group],
        causal: bool,
        independent: bool,
        places: Sequence[Place],
        value: Tensor,
        *parts: Optional[Tensor],
    ) -> Tensor:
        ctx.call = groups, causal, independent, places
        ctx.save_for_backward(value, *parts)
        out = blank(value, groups)
        with torch.autocast(value.device.type, enabled=False):
            for block in blocks(*ctx.call, value, unflatten(parts)):
                v = block.take(value)
                o = torch.empty_like(v)
                for rows, columns in block.tiles:
                    o[:, rows] = torch.bmm(block.weights(rows, columns).to(v.dtype), v[:, columns])
                block.put(o, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        groups, causal, _, places = ctx.call
        value, *tensors = ctx.saved_tensors
        parts = unflatten(tensors)
        length = max((group.length for group in groups), default=0)
        grad_value = blank(value, groups)
        grads: List[Part] = []
        for part, place, needed in zip(parts, places, unflatten(ctx.needs_input_grad[5:])):
            if not any(needed):  # fixed_random alone has nothing to learn
                grads.append(Part())
                continue
            # a bias, and what serves all sentences, is a sum over tiles; the sum is in fp32
            made = {
                name: torch.zeros_like(tensor, dtype=at_least_fp32(tensor).dtype)
                if name == "bias" or tensor.size(0) == 1
                else blank(tensor, groups)
                for name, tensor in part._asdict().items()
                if tensor is not None and (name != "bias" or place.has_gradient(tensor, length, causal))
            }
            grads.append(Part(**made))
        learns = any(tensor is not None for part in grads for tensor in part)
        with torch.autocast(value.device.type, enabled=False):
            for block in blocks(*ctx.call, value, parts):
                v, g = block.take(value), block.take(grad)
                grad_v: Optional[Tensor] = None
                for rows, columns in reversed(block.tiles):  # the last has all columns: it comes first, to be added to
                    weights = block.weights(rows, columns)
                    grad_v = accumulate(grad_v, columns, weights.to(v.dtype).transpose(1, 2), g[:, rows])
                    if not learns:
                        continue
                    scores = torch.bmm(g[:, rows], v[:, columns].transpose(1, 2)).to(weights.dtype)
                    # softmax's backward, (scores - (scores * weights).sum(-1)) * weights, in one pass
                    scores = torch.ops.aten._softmax_backward_data(scores, weights, -1, weights.dtype)
                    block.add_gradients(scores, rows, columns, grads)
                block.put(grad_v, grad_value)
                block.put_gradients(grads)
            longest = slice(0, length)
            for part, own, place in zip(parts, grads, places):
                if own.bias is not None and own.weight is not None:
                    for h in range(value.size(1)):  # a head at a time: no second tensor of this size
                        found = [place.overlap(x[:, h], longest, longest) for x in (part.bias, own.bias)]
                        if all(found):
                            (bias, _), (grad, _) = found
                            own.weight[:, h] = (grad * bias).sum()
                            grad *= part.weight[:, h]
        return (None, None, None, None, grad_value, *[tensor for part in grads for tensor in part])


def blank(x: Tensor, groups: Sequence[Group]) -> Tensor:
    """A tensor like x (B, H, T, r), for all groups to write to; 0 where none does."""
    x = torch.empty_like(x)
    for first, last, length in groups:
        x[first:last, :, length:] = 0
    return x


def accumulate(total: Optional[Tensor], columns: slice, a: Tensor, b: Tensor) -> Tensor:
    """Adds a product a b to some columns of a sum, (n, S, r), that begins with all of them."""
    if total is None:
        return product(a, b)
    if b.size(2) < NARROW:
        total[:, columns].transpose(1, 2).baddbmm_(b.transpose(1, 2), a.transpose(1, 2))
    else:
        total[:, columns].baddbmm_(a, b)
    return total


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched product a b; a narrow one is a view of its transpose."""
    if b.size(2) < NARROW:
        return torch.bmm(b.transpose(1, 2), a.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(a, b)


class _Block:
    """Some heads of some sentences of one length, and their tiles. All inner products are one, of concatenated factors.

    Its tensors have three dimensions. Where the logits depend on the input, (sentences, T, d_h) of one head;
    otherwise (heads, T, sentences d_h): the sentences side by side, for one product with the weights.

    Args:
        size: of its tensors' first dimension.
        sentences: which.
        heads: which; one number where the logits depend on the input, otherwise a slice.
        length: T of these sentences.
        rows: height of a tile.
        future: of a causal tile, the mask of the square at the diagonal.
        parts: the terms' fields.
    """

    def __init__(
        self,
        size: int,
        sentences: slice,
        heads: Any,
        length: int,
        rows: int,
        future: Optional[Tensor],
        places: Sequence[Place],
        parts: Sequence[Part],
    ) -> None:
        self.size, self.sentences, self.heads, self.length = size, sentences, heads, length
        self.future, self.places = future, places
        self.parts = [Part(*[None if t is None else self.of_part(n, t) for n, t in p._asdict().items()]) for p in parts]
        self.products = [i for i, part in enumerate(self.parts) if part.query is not None]
        # inner and outer products take their weight here, a bias in its tiles
        queries = [times_weight(self.parts[i].query, self.parts[i].weight, places[i].scale) for i in self.products]
        keys = [self.parts[i].key for i in self.products]
        self.query = concatenated(queries, size)
        self.key = concatenated(keys, size if len(keys) > 1 else None)
        self.outer = [
            (i, times_weight(part.left, part.weight).contiguous(), part.right.contiguous())
            for i, part in enumerate(self.parts)
            if part.left is not None
        ]
        self.grads: Dict[Any, Tensor] = {}
        ends = [min(i + rows, length) for i in range(0, length, rows)]
        self.tiles = [(slice(i * rows, n), slice(0, length if future is None else n)) for i, n in enumerate(ends)]

    def of_part(self, name: str, part: Tensor) -> Tensor:
        """This block's (sentences or 1, T, r), or (heads, T, r), of a tensor (B or 1, H, T, r); all rows of a bias."""
        rows = slice(None) if name == "bias" else slice(0, self.length)
        if isinstance(self.heads, slice):
            return part[0, self.heads, rows]
        return part[self.sentences if part.size(0) > 1 else slice(None), self.heads, rows]

    def take(self, x: Tensor) -> Tensor:
        """This block's part of x (B, H, T, d_h)."""
        x = x[self.sentences, self.heads, : self.length]
        if x.dim() == 4:
            return x.permute(1, 2, 0, 3).reshape(x.size(1), self.length, -1)
        return x.contiguous()

    def put(self, part: Tensor, x: Tensor) -> None:
        """The inverse of `take`."""
        x = x[self.sentences, self.heads, : self.length]
        if x.dim() == 4:
            part = part.reshape(x.size(1), self.length, x.size(0), x.size(3)).permute(2, 0, 1, 3)
        x.copy_(part)

    def weights(self, rows: slice, columns: slice) -> Tensor:
        """Softmax of one tile of logits, in fp32 at least."""
        height, width = rows.stop - rows.start, columns.stop - columns.start
        scores: Optional[Tensor] = None
        if self.query is not None:
            scores = at_least_fp32(times(self.query[:, rows], self.key[:, columns].transpose(1, 2)))
        for _, left, right in self.outer:
            tile = outer_product(left[:, rows], right[:, rows])[..., columns]
            scores = at_least_fp32(tile) if scores is None else scores.add_(tile)
        own = scores is not None  # not a view of a bias, so to be written to
        for part, place in zip(self.parts, self.places):
            found = None if part.bias is None else place.overlap(part.bias, rows, columns)
            if found is None:
                continue
            tile, where = at_least_fp32(found[0]), found[1]
            if scores is None and tile[0].numel() == height * width and part.weight is None:
                scores = tile
                continue
            if scores is None:
                scores = tile.new_zeros(self.size, height, width)
            elif not own:
                scores = scores.expand(self.size, -1, -1).clone()
            own = True
            if part.weight is None:
                scores[where].add_(tile)
            else:
                scores[where].addcmul_(tile, part.weight)
        assert scores is not None
        if self.future is not None:
            scores = scores if own else scores.clone()
            scores[..., rows].add_(self.future[:height, :height])
        return torch.softmax(scores, dim=-1)

    def add_gradients(self, scores: Tensor, rows: slice, columns: slice, total: Sequence[Part]) -> None:
        """Adds what a tile's gradient of the logits gives to the parts; to a bias, in `total`, but for its weight."""
        if any(total[i].query is not None for i in self.products):
            grad, query = scores.to(self.query.dtype), self.query[:, rows]
            self.set_rows("query", rows, times(grad, self.key[:, columns]))
            if self.key.size(0) == 1:  # one product sums over the sentences
                query = query.reshape(1, -1, query.size(2))
                grad = grad.reshape(1, query.size(1), -1)
            self.grads["key"] = accumulate(self.grads.get("key"), columns, grad.transpose(1, 2), query)
        for i, left, right in self.outer:
            if total[i].left is not None:
                a, b = left.size(2), right.size(2)
                tile = F.pad(scores, (0, a * b - scores.size(2))).view(*scores.shape[:2], a, b)
                self.set_rows((i, "left"), rows, (tile * right[:, rows].unsqueeze(-2)).sum(-1))
                self.set_rows((i, "right"), rows, (tile * left[:, rows].unsqueeze(-1)).sum(-2))
        for whole, place in zip(total, self.places):
            found = whole.bias is not None and place.overlap(self.of_part("bias", whole.bias), rows, columns)
            if found:
                own, where = found
                own.add_(scores[where].sum_to_size(own.shape))

    def set_rows(self, name: Any, rows: slice, grad: Tensor) -> None:
        """Keeps the gradient of some rows."""
        if len(self.tiles) == 1:
            self.grads[name] = grad
        else:
            if name not in self.grads:
                self.grads[name] = grad.new_empty(grad.size(0), self.length, grad.size(2))
            self.grads[name][:, rows] = grad

    def put_gradients(self, total: Sequence[Part]) -> None:
        """Puts the gathered gradients of inner and outer products among those of the batch."""
        if "query" in self.grads:
            widths = [self.parts[i].query.size(2) for i in self.products]
            for name in ("query", "key"):
                for i, grad in zip(self.products, self.grads.pop(name).split(widths, dim=2)):
                    self.grads[i, name] = grad
        for (i, name), grad in self.grads.items():
            part, place, whole = self.parts[i], self.places[i], total[i]
            if getattr(whole, name) is None:
                continue
            if name in ("query", "left"):
                if place.scale != 1.0:
                    grad = grad * place.scale
                if part.weight is not None:
                    product = grad * getattr(part, name)
                    own = self.of_part("weight", whole.weight)
                    own.add_(product.sum(dim=(1, 2), keepdim=True).sum_to_size(own.shape))
                    grad = grad * part.weight
            own = self.of_part(name, getattr(whole, name))
            if getattr(whole, name).size(0) > 1:
                own.copy_(grad)
            else:
                own.add_(grad.sum_to_size(own.shape))


def blocks(
    groups: Sequence[Group],
    causal: bool,
    independent: bool,
    places: Sequence[Place],
    value: Tensor,
    parts: Sequence[Part],
) -> Iterator[_Block]:
    """The blocks that make up a batch."""
    heads, budget = value.size(1), TILE if value.device.type == "cpu" else GPU_TILE
    for first, last, length in groups:
        if length == 0:
            continue
        rows = min(length, CAUSAL_ROWS if causal else max(CAUSAL_ROWS, budget // length))
        count = max(1, budget // (rows * length))  # of tiles side by side
        future = future_mask(rows, at_least_fp32(value)) if causal else None
        if independent:
            for h in range(0, heads, count):
                size = min(count, heads - h)
                yield _Block(size, slice(first, last), slice(h, h + size), length, rows, future, places, parts)
        else:
            for h in range(heads):
                for i in range(first, last, count):
                    size = min(count, last - i)
                    yield _Block(size, slice(i, i + size), h, length, rows, future, places, parts)


def unflatten(tensors: Sequence[Any]) -> List[Part]:
    """The parts whose fields stand one behind the other."""
    size = len(Part._fields)
    return [Part(*tensors[i : i + size]) for i in range(0, len(tensors), size)]


def future_mask(length: int, like: Tensor) -> Tensor:
    """(T, T) of the type of `like`: minus infinity above the diagonal, else 0."""
    return torch.full((length, length), float("-inf"), dtype=like.dtype, device=like.device).triu_(1)


def concatenated(factors: Sequence[Tensor], size: Optional[int]) -> Optional[Tensor]:
    """Factors (n or 1, T, r) side by side, as (size, T, sum of r); of one alone the own size may stay."""
    if not factors:
        return None
    factors = [factor.expand(size or -1, -1, -1) for factor in factors]
    return factors[0].contiguous() if len(factors) == 1 else torch.cat(factors, dim=2)


def times(a: Tensor, b: Tensor) -> Tensor:
    """Batched product in which b may serve the whole batch."""
    return torch.matmul(a, b[0]) if b.size(0) == 1 else product(a, b)
