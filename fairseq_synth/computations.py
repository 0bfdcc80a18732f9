"""Exact ways to compute ``softmax(S) V`` from the terms of S. `attend` chooses one for each call.

`plain` is the definition: the others are tested against it, in value and gradient.

==========  ==============================================================================================
`plain`     any mask, dropout, attention weights; holds logits and weights of (B, H, T, S)
`fused`     one call of `torch.nn.functional.scaled_dot_product_attention` over the concatenated queries and
            keys of all terms; biases become its mask
`tiled`     logits and weights never exist as a whole: a tile at a time, computed again in the backward pass.
            Logits that do not depend on the input have one softmax per sentence length, for all sentences
            of that length: one product (T, T) (T, n d_h) for each head
==========  ==============================================================================================
"""

from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .synthesizers import Terms, at_least_fp32, logits, outer_product, times_weight

# logits in a tile: 1 MiB of fp32 stays in a core's caches through its handful of passes; a GPU wants few launches
TILE = 1 << 18
GPU_TILE = 1 << 26
SMALL = 1 << 16  # logits of a whole batch that are not worth a tile
CAUSAL_ROWS = 128  # rows of a causal tile: columns to the right of it are not computed


def attend(
    terms: List[Terms],
    value: Tensor,
    key_padding_mask: Optional[Tensor],
    attn_mask: Optional[Tensor],
    dropout: float,
) -> Optional[Tensor]:
    """``softmax(S + masks) V`` by the best computation for these terms, or None where only `plain` will do.

    =====================================================  ================================
    logits                                                 computation
    =====================================================  ================================
    under a mask that is neither causal nor right padding  plain
    independent of the input, several sentences            tiled; with dropout plain
    one inner product                                      fused
    anything else, on a GPU                                fused
    anything else, on a CPU                                tiled; few or with dropout plain
    =====================================================  ================================

    Args:
        terms: of S.
        value: (B, H, T, d_h).
        key_padding_mask, attn_mask: as of `masked_softmax`, with S = T.
        dropout: probability of dropping a weight.

    Returns:
        (B, H, T, d_h), or None. Rows of padding are unspecified, but finite.
    """
    bsz, heads, length, _ = value.size()
    on_cpu = value.device.type == "cpu"
    lengths = None if key_padding_mask is None else sentence_lengths(key_padding_mask)
    causal = attn_mask is not None
    if key_padding_mask is not None and (lengths is None or len(lengths) != bsz):
        return None
    if attn_mask is not None and (attn_mask.size(0) != length or attn_mask.requires_grad or not is_causal(attn_mask)):
        return None
    if causal:
        # what is behind a sentence is never seen from inside it
        key_padding_mask = lengths = None
    if bsz > 1 and input_independent(terms):
        computation = plain if dropout else tiled
    elif not on_cpu or (len(terms) == 1 and not has_bias(terms[0])):
        computation = fused
    else:
        computation = plain if dropout or bsz * heads * length**2 <= SMALL else tiled

    if computation is fused:
        return fused(terms, value, key_padding_mask, causal, dropout)
    if computation is tiled:
        return tiled(terms, value, groups_of(lengths or [length] * bsz), causal)
    return None


def plain(
    terms: List[Terms],
    value: Tensor,
    key_padding_mask: Optional[Tensor],
    attn_mask: Optional[Tensor],
    dropout: float = 0.0,
) -> Tuple[Tensor, Tensor]:
    """``softmax(S + masks) V`` as it is written.

    Args:
        terms: of S.
        value: (B, H, S, d_h).
        key_padding_mask, attn_mask: as of `masked_softmax`.
        dropout: probability of dropping a weight, for each sentence its own.

    Returns:
        the output, (B, H, T, d_h), and the weights before dropout, (B or 1, H, T, S).
    """
    weights, dropped = plain_weights(terms, value.size(2), key_padding_mask, attn_mask, dropout, value)
    return torch.matmul(dropped, value), weights


def plain_weights(
    terms: List[Terms],
    src_len: int,
    key_padding_mask: Optional[Tensor],
    attn_mask: Optional[Tensor],
    dropout: float,
    value: Tensor,
) -> Tuple[Tensor, Tensor]:
    """The weights of `plain`, (B or 1, H, T, S) of the type of the value, before and after dropout."""
    weights = masked_softmax(logits(terms, src_len), key_padding_mask, attn_mask).to(value.dtype)
    if dropout > 0:
        return weights, F.dropout(weights.expand(value.size(0), -1, -1, -1), dropout)
    return weights, weights


def masked_softmax(scores: Tensor, key_padding_mask: Optional[Tensor], attn_mask: Optional[Tensor]) -> Tensor:
    """Softmax over the visible keys, in fp32 at least; 0 with a zero gradient in a row that sees none.

    Args:
        scores: (B or 1, H, T, S).
        key_padding_mask: (B, S), true for hidden.
        attn_mask: (T, S), boolean with true for hidden, or floating point to add.
    """
    scores = at_least_fp32(scores)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask, float("-inf"))
        else:
            scores = scores + attn_mask
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, None, :].to(torch.bool), float("-inf"))
    if attn_mask is None and key_padding_mask is None:
        return torch.softmax(scores, dim=-1)
    blind = (scores == float("-inf")).all(dim=-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)


def sentence_lengths(key_padding_mask: Tensor) -> Optional[List[int]]:
    """Length of each sentence, where all padding is on the right and no sentence is empty; otherwise None.

    Args:
        key_padding_mask: (B, S), true for padding.
    """

    def compute() -> Optional[List[int]]:
        real = ~key_padding_mask.to(torch.bool)
        lengths = real.sum(dim=1)
        columns = torch.arange(real.size(1), device=real.device)
        aligned = (real == (columns[None] < lengths[:, None])).all()
        found = torch.cat([lengths, aligned[None].to(lengths.dtype)]).tolist()  # at once: one wait for a GPU
        return found[:-1] if found[-1] and 0 not in found[:-1] else None

    return remembered(key_padding_mask, "lengths", compute)


def is_causal(attn_mask: Tensor) -> bool:
    """Whether a mask (T, T) hides all columns above the diagonal, by minus infinity or true, and no other."""

    def compute() -> bool:
        if attn_mask.dim() != 2 or attn_mask.size(0) != attn_mask.size(1):
            return False
        if attn_mask.dtype == torch.bool:
            return torch.equal(attn_mask, torch.ones_like(attn_mask).triu_(1))
        return torch.equal(attn_mask, future_mask(attn_mask.size(0), attn_mask))

    return remembered(attn_mask, "causal", compute)


def remembered(mask: Tensor, question: str, compute: Callable[[], Any]) -> Any:
    """compute(), once for this mask: all layers of a model see the same one, and each look costs a GPU a wait.

    A mask changed in place is read again; writes through ``.data`` or numpy go unseen.
    """
    if mask.is_inference():
        return compute()  # no version by which to know a change
    state = (id(mask), mask._version)
    answers = mask.__dict__.setdefault("fairseq_synth", {})
    if question not in answers or answers[question][0] != state:
        answers[question] = (state, compute())
    return answers[question][1]


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


def fused(
    terms: List[Terms], value: Tensor, key_padding_mask: Optional[Tensor], causal: bool, dropout: float = 0.0
) -> Tensor:
    """`plain`, where every row sees a key, by one call of torch's fused attention.

    Args:
        terms: of S.
        value: (B, H, T, d_h).
        key_padding_mask: (B, T), true for hidden; None if `causal`.
        causal: row i sees the columns up to i only.
        dropout: probability of dropping a weight.

    Returns:
        (B, H, T, d_h).
    """
    bsz, heads, length, head_dim = value.size()
    queries: List[Tensor] = []
    keys: List[Tensor] = []
    bias: Optional[Tensor] = None
    scale = terms[0].scale if len(terms) == 1 and not has_bias(terms[0]) else 1.0  # one product: the kernel's business
    for term in terms:
        if term.query is not None and term.key is not None:
            queries.append(times_weight(term.query, term.weight, term.scale / scale).to(value.dtype))
            keys.append(term.key.to(value.dtype))
        rest = logits([term._replace(query=None, key=None)], length) if has_bias(term) else None
        if rest is not None:
            bias = rest if bias is None else bias + rest
    if bias is not None and bias.size(0) == 1 and bias.size(2) == 1:
        # a bias on columns is one more key under a query of 1, and leaves the kernels without a mask
        queries.append(value.new_ones(1, 1, 1, 1))
        keys.append(bias.transpose(2, 3).to(value.dtype))
        bias = None
    if not queries:
        queries, keys = [value.new_zeros(1, 1, 1, 1)], [value.new_zeros(1, 1, 1, 1)]
    rank = sum(key.size(-1) for key in keys)
    # the kernels want queries, keys and values of one width, a multiple of 8
    width = max(head_dim, -(-rank // 8) * 8)
    if width > rank:
        queries.append(value.new_zeros(1, 1, 1, 1).expand(1, 1, 1, width - rank))
        keys.append(queries[-1])
    query, key = (
        parts[0].expand(bsz, -1, -1, -1)
        if len(parts) == 1
        else torch.cat([part.expand(bsz, heads, length, -1) for part in parts], dim=-1)
        for parts in (queries, keys)
    )
    hidden = None if key_padding_mask is None else key_padding_mask[:, None, None].to(torch.bool)
    mask: Optional[Tensor] = None
    if bias is not None:
        mask = bias.to(value.dtype)
        if causal:
            mask = mask + future_mask(length, mask)
        if hidden is not None:
            mask = mask.masked_fill(hidden, float("-inf"))
        # the kernels take a mask of all four sizes, without a copy
        mask = mask.expand(bsz, heads, length, length)
    elif hidden is not None:
        mask = ~hidden
    if width > head_dim:
        value = F.pad(value, (0, width - head_dim))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None, scale=scale
    )
    return out[..., :head_dim]


def has_bias(term: Terms) -> bool:
    """Whether the term is more than an inner product of queries and keys."""
    return term.bias is not None or term.matrix is not None or term.left is not None


def future_mask(length: int, like: Tensor) -> Tensor:
    """(T, T) of the type of `like`: minus infinity above the diagonal, else 0."""
    return torch.full((length, length), float("-inf"), dtype=like.dtype, device=like.device).triu_(1)


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
        found = [
            (Part(query=term.query, key=term.key, weight=term.weight), Place(term.scale)),
            (Part(bias=term.bias, weight=term.weight), Place()),
            (Part(left=term.left, right=term.right, weight=term.weight), Place()),
        ]
        if term.matrix is not None:
            for block, corner, reached in zip(term.matrix.blocks, term.matrix.corners, term.matrix.reached):
                found.append((Part(bias=block[None], weight=term.weight), Place(1.0, *corner, reached)))
        for part, place in found:
            if all(tensor is None for tensor in part[:-1]):
                continue
            if part.bias is not None and part.bias.size(2) > 1 and place.row is None:
                place = Place(row=0)
            for name, tensor in part._asdict().items():
                if tensor is not None:
                    # a factor of an outer product that serves all sentences is rare, and repeated
                    repeat = not independent and name in ("left", "right")
                    tensor = tensor.expand(value.size(0) if repeat else -1, value.size(1), -1, -1)
                    if name != "bias" and not independent:
                        tensor = tensor.to(value.dtype)
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
    reached: bool = True  # whether the gradient of a bias that no tile touches is zeros, and not absent

    def has_gradient(self, bias: Tensor, length: int, causal: bool) -> bool:
        """Whether a bias has a gradient for sentences of up to `length` tokens."""
        if self.row is None:
            return True
        last = self.row + bias.size(2)
        seen = max(self.row, self.column) < length and last > 0
        return (seen or self.reached) and not (causal and self.column >= last)

    def overlap(self, bias: Tensor, rows: slice, columns: slice) -> Optional[Tuple[Tensor, Tuple[slice, ...]]]:
        """What a tile and a bias (n, R, C) have in common: the part of the bias, and where it lies in the tile."""
        own_rows = tile_rows = slice(None)
        if self.row is not None:
            own_rows, tile_rows = common(self.row, bias.size(1), rows)
        own_columns, tile_columns = common(self.column, bias.size(2), columns)
        part = bias[:, own_rows, own_columns]
        return (part, (slice(None), tile_rows, tile_columns)) if part.numel() else None


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
                if name in ("bias", "weight") or tensor.size(0) == 1
                else blank(tensor, groups)
                for name, tensor in part._asdict().items()
                if tensor is not None and (name != "bias" or place.has_gradient(tensor, length, causal))
            }
            grads.append(Part(**made))
        with torch.autocast(value.device.type, enabled=False):
            for block in blocks(*ctx.call, value, parts):
                v, g = block.take(value), block.take(grad)
                grad_v: Optional[Tensor] = None
                for rows, columns in reversed(block.tiles):  # the last has all columns: it comes first, to be added to
                    weights = block.weights(rows, columns)
                    grad_v = accumulate(grad_v, columns, weights.to(v.dtype).transpose(1, 2), g[:, rows])
                    if all(tensor is None for part in grads for tensor in part):
                        continue
                    scores = torch.bmm(g[:, rows], v[:, columns].transpose(1, 2)).to(weights.dtype)
                    # softmax's backward, (scores - (scores * weights).sum(-1)) * weights, in one pass
                    scores = torch.ops.aten._softmax_backward_data(scores, weights, -1, weights.dtype)
                    block.add_gradients(scores, rows, columns, grads)
                block.put(grad_v, grad_value)
                block.put_gradients(grads)
            for part, own in zip(parts, grads):
                if own.bias is not None and own.weight is not None:
                    for h in range(value.size(1)):  # a head at a time: no second tensor of this size
                        own.weight[:, h] = (own.bias[:, h] * part.bias[:, h]).sum()
                        own.bias[:, h] *= part.weight[:, h]
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
        return torch.bmm(a, b)
    total[:, columns].baddbmm_(a, b)
    return total


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
            part = part.view(x.size(1), self.length, x.size(0), x.size(3)).permute(2, 0, 1, 3)
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


def concatenated(factors: Sequence[Tensor], size: Optional[int]) -> Optional[Tensor]:
    """Factors (n or 1, T, r) side by side, as (size, T, sum of r); of one alone the own size may stay."""
    if not factors:
        return None
    factors = [factor.expand(size or -1, -1, -1) for factor in factors]
    return factors[0].contiguous() if len(factors) == 1 else torch.cat(factors, dim=2)


def times(a: Tensor, b: Tensor) -> Tensor:
    """Batched product in which b may serve the whole batch."""
    return torch.matmul(a, b[0]) if b.size(0) == 1 else torch.bmm(a, b)
