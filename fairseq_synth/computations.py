"""Exact ways to compute ``softmax(S) V`` from the terms of S. `attention` chooses one for each call.

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

from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .synthesizers import Terms, at_least_fp32, logits, outer_product

# A tile of 2^18 fp32 logits is 1 MiB: it stays in a core's caches through its handful of passes. GPUs want
# few launches instead.
TILE = {"cpu": 1 << 18, "cuda": 1 << 26}
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
    independent of the input                               tiled; with dropout plain
    inner products alone                                   fused
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
    lengths = None if key_padding_mask is None else sentence_lengths(key_padding_mask)
    causal = attn_mask is not None
    if (key_padding_mask is not None and lengths is None) or (attn_mask is not None and not is_causal(attn_mask)):
        return None
    if causal:
        # what is behind a sentence is never seen from inside it
        key_padding_mask = lengths = None
    inner_products = not any(has_bias(term) for term in terms)
    if bsz > 1 and all(part is None or part.size(0) == 1 for term in terms for part in term):
        computation = plain if dropout else tiled
    elif inner_products or value.is_cuda:
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
    weights = masked_softmax(logits(terms, value.size(2)), key_padding_mask, attn_mask).to(value.dtype)
    if dropout > 0:
        return torch.matmul(F.dropout(weights.expand(value.size(0), -1, -1, -1), dropout), value), weights
    return torch.matmul(weights, value), weights


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

    return remembered(key_padding_mask, compute)


def is_causal(attn_mask: Tensor) -> bool:
    """Whether a mask (T, T) hides all columns above the diagonal, by minus infinity or true, and no other."""

    def compute() -> bool:
        if attn_mask.dim() != 2 or attn_mask.size(0) != attn_mask.size(1):
            return False
        if attn_mask.dtype == torch.bool:
            return torch.equal(attn_mask, torch.ones_like(attn_mask).triu_(1))
        return torch.equal(attn_mask, future_mask(attn_mask.size(0), attn_mask))

    return remembered(attn_mask, compute)


def remembered(mask: Tensor, compute: Callable[[], Any]) -> Any:
    """compute(), once for this mask: all layers of a model see the same one, and each look costs a GPU a wait."""
    if mask.is_inference():
        return compute()  # no version by which to know a change
    version, found = getattr(mask, "fairseq_synth", (None, None))
    if version != mask._version:
        found = compute()
        mask.fairseq_synth = (mask._version, found)
    return found


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
    for term in terms:
        if term.query is not None and term.key is not None:
            queries.append(term.query.to(value.dtype))
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
    mask: Optional[Tensor] = None
    if bias is not None:
        mask = bias.to(value.dtype)
        if causal:
            mask = mask + future_mask(length, mask)
        if key_padding_mask is not None:
            mask = mask.masked_fill(key_padding_mask[:, None, None], float("-inf"))
        # the kernels take a mask of all four sizes, without a copy
        mask = mask.expand(bsz, heads, length, length)
    elif key_padding_mask is not None:
        mask = ~key_padding_mask[:, None, None]
    if width > head_dim:
        value = F.pad(value, (0, width - head_dim))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None, scale=1.0
    )
    return out[..., :head_dim]


def has_bias(term: Terms) -> bool:
    """Whether the term is more than an inner product of queries and keys."""
    return term.bias is not None or term.left is not None


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
    # all that does not depend on the input is one bias, (1, H, T or 1, T), computed once
    static: Optional[Tensor] = None
    parts: List[Optional[Tensor]] = []
    for term in terms:
        for part in (
            Terms(query=term.query, key=term.key),
            Terms(bias=term.bias),
            Terms(left=term.left, right=term.right),
        ):
            tensors = [tensor for tensor in part if tensor is not None]
            if tensors and all(tensor.size(0) == 1 for tensor in tensors):
                bias = logits([part], value.size(2))
                static = bias if static is None else static + bias
            elif tensors:
                # a key may serve the batch, as in dense; whatever else might is rare, and repeated
                parts += [
                    None
                    if tensor is None
                    else tensor.to(value.dtype).expand(-1 if tensor is part.key else value.size(0), -1, -1, -1)
                    for tensor in part
                ]
    return _Tiled.apply(groups, causal, value, static, *parts)


class _Tiled(torch.autograd.Function):
    """Saves its inputs alone; the backward pass computes every tile of weights again."""

    @staticmethod
    def forward(
        ctx: Any, groups: Sequence[Group], causal: bool, value: Tensor, static: Optional[Tensor], *parts: Any
    ) -> Tensor:
        ctx.groups, ctx.causal = groups, causal
        ctx.save_for_backward(value, static, *parts)
        out = empty_like_heads(value, groups)
        with torch.autocast(value.device.type, enabled=False):
            for block in blocks(groups, causal, value, static, parts):
                v = block.take(value)
                o = torch.empty_like(v)
                for rows, columns in block.tiles:
                    o[:, rows] = torch.bmm(block.weights(rows, columns).to(v.dtype), v[:, columns])
                block.put(o, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        value, static, *parts = ctx.saved_tensors
        grad_value = empty_like_heads(value, ctx.groups)
        grads: List[Optional[Tensor]] = [None if part is None else torch.zeros_like(part) for part in parts]
        grad_static: Optional[Tensor] = None
        if static is not None and ctx.needs_input_grad[3]:
            grad_static = torch.zeros_like(static, dtype=at_least_fp32(static).dtype)  # a sum over the batch
        with torch.autocast(value.device.type, enabled=False):
            for block in blocks(ctx.groups, ctx.causal, value, static, parts):
                v, g = block.take(value), block.take(grad)
                grad_v = torch.zeros_like(v)
                for rows, columns in block.tiles:
                    weights = block.weights(rows, columns)
                    grad_v[:, columns] += torch.bmm(weights.to(v.dtype).transpose(1, 2), g[:, rows])
                    scores = torch.bmm(g[:, rows], v[:, columns].transpose(1, 2)).to(weights.dtype)
                    # softmax's backward, (scores - (scores * weights).sum(-1)) * weights, in one pass
                    scores = torch.ops.aten._softmax_backward_data(scores, weights, -1, weights.dtype)
                    if grad_static is not None:
                        add_to(block.of_static(grad_static, rows, columns), scores)
                    block.add_gradients(scores, rows, columns)
                block.put(grad_v, grad_value)
                block.put_gradients(grads)
        return (None, None, grad_value, grad_static, *grads)


def empty_like_heads(value: Tensor, groups: Sequence[Group]) -> Tensor:
    """A tensor like value (B, H, T, d_h) that lies in memory as (T, B, H, d_h), 0 where no group writes."""
    bsz, heads, length, head_dim = value.size()
    written = all(group.length == length for group in groups)
    create = value.new_empty if written else value.new_zeros
    return create(length, bsz, heads, head_dim).permute(1, 2, 0, 3)


class _Block:
    """Some heads of some sentences of one length, and their tiles.

    Its tensors have three dimensions. Where the logits depend on the input, (sentences, T, d_h) of one head;
    otherwise (heads, T, sentences d_h): the sentences side by side, for one product with the weights.

    Args:
        sentences, heads: which; `heads` is one number where the logits depend on the input.
        length: T of these sentences.
        rows: height of a tile.
        causal: columns behind the diagonal are hidden.
        static, parts: as of `_Tiled`.
    """

    def __init__(
        self,
        sentences: slice,
        heads: Any,
        length: int,
        rows: int,
        causal: bool,
        static: Optional[Tensor],
        parts: Sequence[Optional[Tensor]],
    ) -> None:
        self.sentences, self.heads, self.length, self.causal = sentences, heads, length, causal
        self.static = static
        self.terms = unflatten([None if part is None else self.of_part(part).contiguous() for part in parts])
        self.grads = [
            Terms(*[None if part is None else torch.zeros_like(part) for part in term]) for term in self.terms
        ]
        starts = range(0, length, rows)
        self.tiles = [
            (slice(i, min(i + rows, length)), slice(0, min(i + rows, length) if causal else length)) for i in starts
        ]

    def of_part(self, part: Tensor) -> Tensor:
        """This block's (sentences or 1, T, r) of a term's (B or 1, H, T, r)."""
        part = part if part.size(0) == 1 else part[self.sentences]
        return part[:, self.heads, : self.length]

    def of_static(self, static: Tensor, rows: slice, columns: slice) -> Tensor:
        """A tile's (heads or 1, rows or 1, columns) of (1, H, T or 1, S)."""
        static = static[0, self.heads] if isinstance(self.heads, slice) else static[:, self.heads]
        return static[:, rows if static.size(1) > 1 else slice(None), columns]

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
        scores: Optional[Tensor] = None
        for query, key, bias, left, right in self.terms:
            if query is not None:
                tile = times(query[:, rows], key[:, columns].transpose(1, 2))
            elif bias is not None:
                tile = bias[:, rows if bias.size(1) > 1 else slice(None), columns]
            else:
                tile = outer_product(left[:, rows], right[:, rows])[..., columns]
            tile = at_least_fp32(tile)
            scores = tile if scores is None else scores + tile
        if self.static is not None:
            tile = at_least_fp32(self.of_static(self.static, rows, columns))
            scores = tile if scores is None else scores + tile
        assert scores is not None
        scores = scores.expand(-1, rows.stop - rows.start, -1)
        if self.causal:
            past = scores[..., : rows.start]
            diagonal = scores[..., rows] + future_mask(rows.stop - rows.start, scores)
            scores = torch.cat([past, diagonal], dim=-1) if rows.start else diagonal
        return torch.softmax(scores, dim=-1)

    def add_gradients(self, scores: Tensor, rows: slice, columns: slice) -> None:
        """Adds what a tile's gradient of the logits gives to the terms."""
        for term, grad in zip(self.terms, self.grads):
            query, key, bias, left, right = term
            if query is not None:
                scores_ = scores.to(query.dtype)
                grad.query[:, rows] = times(scores_, key[:, columns])
                if key.size(0) == 1:  # one product sums over the sentences
                    flat = query[:, rows].reshape(-1, query.size(2))
                    grad.key[0, columns] += torch.mm(scores_.reshape(flat.size(0), -1).t(), flat)
                else:
                    grad.key[:, columns] += torch.bmm(scores_.transpose(1, 2), query[:, rows])
            elif bias is not None:
                add_to(grad.bias[:, rows if bias.size(1) > 1 else slice(None), columns], scores)
            else:
                a, b = left.size(2), right.size(2)
                tile = F.pad(scores, (0, a * b - scores.size(2))).view(*scores.shape[:2], a, b)
                grad.left[:, rows] = (tile * right[:, rows].unsqueeze(-2)).sum(-1)
                grad.right[:, rows] = (tile * left[:, rows].unsqueeze(-1)).sum(-2)

    def put_gradients(self, grads: Sequence[Optional[Tensor]]) -> None:
        """Adds the gathered gradients of the terms to those of the whole batch, `grads`."""
        for whole, part in zip(grads, [part for term in self.grads for part in term]):
            if whole is not None:
                self.of_part(whole).add_(part)


def blocks(
    groups: Sequence[Group],
    causal: bool,
    value: Tensor,
    static: Optional[Tensor],
    parts: Sequence[Optional[Tensor]],
) -> Iterator[_Block]:
    """The blocks that make up a batch."""
    heads, budget = value.size(1), TILE[value.device.type]
    for first, last, length in groups:
        if length == 0:
            continue
        rows = min(length, CAUSAL_ROWS if causal else max(CAUSAL_ROWS, budget // length))
        count = max(1, budget // (rows * length))  # of tiles side by side
        if not parts:
            for h in range(0, heads, count):
                yield _Block(slice(first, last), slice(h, h + count), length, rows, causal, static, parts)
        else:
            for h in range(heads):
                for i in range(first, last, count):
                    yield _Block(slice(i, min(i + count, last)), h, length, rows, causal, static, parts)


def unflatten(parts: Sequence[Optional[Tensor]]) -> List[Terms]:
    """The terms whose fields stand one behind the other."""
    size = len(Terms._fields)
    return [Terms(*parts[i : i + size]) for i in range(0, len(parts), size)]


def times(a: Tensor, b: Tensor) -> Tensor:
    """Batched product in which b may serve the whole batch."""
    return torch.matmul(a, b[0]) if b.size(0) == 1 else torch.bmm(a, b)


def add_to(total: Tensor, tile: Tensor) -> None:
    """Adds a tile, summed over the sentences or rows that share one entry of `total`."""
    total.add_(tile.sum_to_size(total.shape))
