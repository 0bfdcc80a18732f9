"""``softmax(S) V`` on a CPU, one tile of logits at a time: logits and weights never exist as a whole, in either pass.

A `Block` is a set of sentences and heads whose logits are brought into their normal form together. It is divided into
tiles of some rows, and a tile is as large as fits into the caches of a core.

The backward pass computes each tile of weights again (recomputation: Rabe and Staats 2021, arXiv 2112.05682; Dao et
al. 2022, arXiv 2205.14135). Autograd differentiates a tile by the normal form of its block, and the normal form by the
tensors of the terms, so that nothing here depends on what a term is.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..logits import Bias, Diagonals, Logits, NormalForm, Outer, Product, Term
from ..masks import future_mask, is_causal, sentence_lengths
from ..tensors import at_least_fp32, on_cpu
from .plain import join_heads
from .threads import map_in_threads

# So many logits fit into the caches of a core as a whole, so that the plain computation is faster.
PLAIN_LIMIT = 1 << 18
# Number of logits in a tile: 2 MiB of fp32, which stay in the caches of a core through a handful of passes.
TILE = 1 << 19
# Number of rows in a tile under the causal mask. Columns to the right of its last row are not computed.
CAUSAL_ROWS = 128

ALL = slice(None)


def refuses(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float
) -> str:
    """Returns why this computation does not take the call, or an empty string; see `computations`."""
    if not on_cpu(value):
        return "the values are not on a CPU"
    if dropout:
        return "there is dropout"
    if attn_mask is not None and not is_causal(attn_mask):
        return "the mask is not the causal one"
    bsz, num_heads, length, _ = value.size()
    num_different_sentences = bsz
    if key_padding_mask is None and logits.is_shared():
        num_different_sentences = min(bsz, 1)
    if num_different_sentences * num_heads * length**2 <= PLAIN_LIMIT:
        return "there are few logits"
    if read_lengths(value, key_padding_mask) is None:
        return "padding is not on the right, or a sentence is empty"
    return ""


def compute(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float = 0.0
) -> Tensor:
    """Returns ``softmax(S) V``, (T B, C); see `attend`."""
    bsz, num_heads, length, _ = value.size()
    causal = is_causal(attn_mask)
    rows_of_tile = CAUSAL_ROWS if causal else length
    lengths = read_lengths(value, key_padding_mask)
    assert lengths is not None
    # Several threads share out the blocks, so there should be a few for each of them.
    num_threads = torch.get_num_threads()
    max_heads = num_heads if num_threads == 1 else max(1, num_heads // (2 * num_threads))
    if bsz > 1 and logits.is_shared():
        blocks = list(divide_by_length(lengths, num_heads, rows_of_tile, max_heads))
    else:
        blocks = list(divide_by_sentences(lengths, num_heads, rows_of_tile, max_heads))
    terms = [cast_for_tiles(term, value.dtype) for term in logits.terms()]
    templates = [remove_tensors(term) for term in terms]
    tensors = list_tensors(terms)
    return join_heads(_Tiled.apply(templates, blocks, causal, value, *tensors))


def read_lengths(value: Tensor, key_padding_mask: Tensor | None) -> list[int] | None:
    """Returns the length of each sentence as `sentence_lengths` does; without a mask, all of them are full."""
    if key_padding_mask is None:
        bsz, _, length, _ = value.size()
        return [length] * bsz
    return sentence_lengths(key_padding_mask)


# ---- terms as a list of tensors, which is what an autograd function takes

TENSOR = object()  # stands for a tensor in a template


def cast_for_tiles(term: Term, dtype: torch.dtype) -> Term:
    """Returns the term with its products in `dtype`, as under autocast the types differ, and all else in fp32 at least.

    The gradients of biases and weights are sums over many sentences, for which half precision is too coarse.
    """
    weight = term.weight
    if weight is not None:
        weight = at_least_fp32(weight)
    if isinstance(term, Product):
        return term._replace(query=term.query.to(dtype), key=term.key.to(dtype), weight=weight)
    if isinstance(term, Bias):
        return Bias(at_least_fp32(term.bias), weight)
    if isinstance(term, Diagonals):
        return Diagonals(at_least_fp32(term.values), weight)
    return term._replace(weight=weight)


def list_tensors(terms: Sequence[Any]) -> list[Tensor]:
    """Returns the tensors of the terms, in their order."""
    tensors = []
    for term in terms:
        tensors += [field for field in term if isinstance(field, Tensor)]
    return tensors


def remove_tensors(term: Term) -> Any:
    """Returns a template: the term with a placeholder for each tensor."""
    fields = [TENSOR if isinstance(field, Tensor) else field for field in term]
    return type(term)._make(fields)


def insert_tensors(templates: Sequence[Any], tensors: Sequence[Tensor | None]) -> list[Any]:
    """Returns the terms with `tensors` in the places of the placeholders, in their order."""
    remaining = iter(tensors)
    terms = []
    for template in templates:
        fields = [next(remaining) if field is TENSOR else field for field in template]
        terms.append(type(template)._make(fields))
    return terms


# ---- blocks and tiles


class Block(NamedTuple):
    """Sentences and heads whose logits are computed together, in tiles of some rows."""

    sentences: slice
    heads: slice
    length: int  # of the longest of these sentences, in tokens
    rows_of_tile: int
    # Whether the sentences have the same logits. Their values are then side by side on the features.
    is_shared: bool
    # (sentences, n): true at padding, in the last n of `length` columns; None if all have the same length
    hidden: Tensor | None

    def read(self, x: Tensor) -> Tensor:
        """Returns the block's n sentences of values x (B, H, T, d_h) as a copy.

        It is (n, heads, length, d_h), or (1, heads, length, n d_h) if the sentences share their logits.
        """
        part = x[self.sentences, self.heads, : self.length]
        if self.is_shared:
            return part.permute(1, 2, 0, 3).flatten(2)[None]
        return part.contiguous()

    def write(self, x: Tensor, part: Tensor) -> None:
        """Writes the block, laid out as `read` returns it, into x (B, H, T, d_h)."""
        if self.is_shared:
            head_dim = x.size(-1)
            part = part[0].unflatten(-1, (-1, head_dim)).permute(2, 0, 1, 3)
        x[self.sentences, self.heads, : self.length].copy_(part)

    def cut_terms(self, terms: Sequence[Any]) -> list[Any]:
        """Returns the parts of the terms that the block needs, as views; a tensor may be None and stays None."""
        tokens = slice(0, self.length)
        parts: list[Any] = []
        for term in terms:
            weight = cut(term.weight, ALL, self.heads)
            if isinstance(term, Product):
                query = cut(term.query, self.sentences, self.heads, tokens)
                key = cut(term.key, self.sentences, self.heads, tokens)
                parts.append(term._replace(query=query, key=key, weight=weight))
            elif isinstance(term, Outer):
                factors = cut(term.factors, self.sentences, self.heads, tokens)
                parts.append(term._replace(factors=factors, weight=weight))
            elif isinstance(term, Bias):
                parts.append(Bias(cut(term.bias, self.sentences, self.heads, tokens, tokens), weight))
            else:
                parts.append(Diagonals(self.cut_diagonals(term.values), weight))
        return parts

    def cut_diagonals(self, values: Any) -> Any:
        """Returns the values (1, H, 1, 2 length - 1) for the distances within the block."""
        if values is None:
            return None
        distance_0 = values.size(3) // 2
        distances = slice(distance_0 - self.length + 1, distance_0 + self.length)
        return cut(values, ALL, self.heads, ALL, distances)

    def normal_form(self, terms: Sequence[Term]) -> NormalForm:
        """Returns the normal form of terms that `cut_terms` has returned; its query and key are contiguous."""
        normal = Logits(terms).normal_form(self.length)
        if normal.query is not None and normal.key is not None:
            return normal._replace(query=normal.query.contiguous(), key=normal.key.contiguous())
        return normal

    def tiles(self, causal: bool) -> list["Tile"]:
        """Returns the tiles of the block."""
        tiles = []
        for start in range(0, self.length, self.rows_of_tile):
            end = min(start + self.rows_of_tile, self.length)
            num_columns = end if causal else self.length
            tiles.append(Tile(slice(start, end), slice(0, num_columns)))
        return tiles


class Tile(NamedTuple):
    """Some rows of a block, and the columns that they may see."""

    rows: slice
    columns: slice

    def cut_normal_form(self, normal: NormalForm) -> NormalForm:
        """Returns the parts of a block's normal form that the tile needs, as views."""
        return NormalForm(
            query=cut(normal.query, ALL, ALL, self.rows),
            key=cut(normal.key, ALL, ALL, self.columns),
            left=cut(normal.left, ALL, ALL, self.rows),
            right=cut(normal.right, ALL, ALL, self.rows),
            bias=cut(normal.bias, ALL, ALL, self.rows, self.columns),
        )


def cut(x: Any, *slices: slice) -> Any:
    """Returns a slice of a tensor, in which a dimension of size 1 stays whole: it stands for all sentences or heads.

    Returns None for None, which stands for a tensor that does not occur or needs no gradient.
    """
    if x is None:
        return None
    index = tuple(part if size > 1 else ALL for part, size in zip(slices, x.size()))
    return x[index]


def divide_by_sentences(lengths: Sequence[int], num_heads: int, rows_of_tile: int, max_heads: int) -> Iterator[Block]:
    """Yields blocks of neighbouring sentences of any length, for logits that differ by sentence.

    A block has at most `max_heads` heads.
    """
    longest = max(lengths)
    rows = min(rows_of_tile, longest, max(1, TILE // longest))
    num_sentences = min(len(lengths), max(1, TILE // (rows * longest)))
    heads_of_block = min(max_heads, max(1, TILE // (num_sentences * rows * longest)))
    for first in range(0, len(lengths), num_sentences):
        sentences = slice(first, first + num_sentences)
        block_lengths = lengths[sentences]
        shortest_of_block = min(block_lengths)
        longest_of_block = max(block_lengths)
        hidden = None
        if shortest_of_block < longest_of_block:
            columns = torch.arange(shortest_of_block, longest_of_block)
            hidden = columns >= torch.tensor(block_lengths)[:, None]
        for first_head in range(0, num_heads, heads_of_block):
            heads = slice(first_head, first_head + heads_of_block)
            yield Block(sentences, heads, longest_of_block, rows, is_shared=False, hidden=hidden)


def divide_by_length(lengths: Sequence[int], num_heads: int, rows_of_tile: int, max_heads: int) -> Iterator[Block]:
    """Yields blocks of neighbouring sentences of equal length, for logits that all sentences share.

    fairseq sorts a batch by length, so that sentences of equal length are neighbours. A block has at most `max_heads`
    heads.
    """
    first = 0
    for end in range(1, len(lengths) + 1):
        length = lengths[first]
        if end < len(lengths) and lengths[end] == length:
            continue
        sentences = slice(first, end)
        rows = min(rows_of_tile, length, max(1, TILE // length))
        heads_of_block = min(max_heads, max(1, TILE // (rows * length)))
        for first_head in range(0, num_heads, heads_of_block):
            heads = slice(first_head, first_head + heads_of_block)
            yield Block(sentences, heads, length, rows, is_shared=True, hidden=None)
        first = end


# ---- both passes


class _Tiled(torch.autograd.Function):
    """Computes ``softmax(S) V``, (B, H, T, d_h), and its gradients. It saves nothing but its inputs."""

    @staticmethod
    def forward(
        ctx: Any, templates: list[Any], blocks: list[Block], causal: bool, value: Tensor, *tensors: Tensor
    ) -> Tensor:
        """Returns the output.

        Args:
            ctx: Where torch keeps what the backward pass needs.
            templates: The terms of the logits, as `remove_tensors` returns them.
            blocks: The blocks that together cover all sentences and heads.
            causal: Whether a row sees only the columns up to its own.
            value: V, (B, H, T, d_h).
            tensors: The tensors of the terms, in the order of the templates.
        """
        ctx.templates = templates
        ctx.blocks = blocks
        ctx.causal = causal
        ctx.save_for_backward(value, *tensors)
        terms = insert_tensors(templates, tensors)
        out = empty_like_values(value, blocks)
        compute = functools.partial(compute_block, terms=terms, value=value, causal=causal)
        for block_out, block in zip(map_in_threads(compute, blocks), blocks):
            block.write(out, block_out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the arguments of `forward`; those that are no tensors have none."""
        value, *tensors = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad[4:]  # of the tensors of the terms, behind the four other arguments
        terms = insert_tensors(ctx.templates, tensors)
        # Gradients are sums over blocks, in fp32 at least. In memory they lie like their tensors, most of which are
        # views of projections, so that the backward pass of a view makes no copy.
        sum_dtype = torch.promote_types(value.dtype, torch.float32)
        sums = [
            torch.zeros_like(tensor, dtype=sum_dtype) if needed else None for tensor, needed in zip(tensors, needs_grad)
        ]
        terms_of_sums = insert_tensors(ctx.templates, sums)
        grad_value = empty_like_values(value, ctx.blocks)
        differentiate = functools.partial(
            differentiate_block, terms=terms, terms_of_sums=terms_of_sums, value=value, grad=grad, causal=ctx.causal
        )
        # The sums are added up here, in the order of the blocks, so that their rounding does not depend on threads.
        for gradients, block in zip(map_in_threads(differentiate, ctx.blocks), ctx.blocks):
            block.write(grad_value, gradients.value)
            for total, leaf_grad in zip(list_tensors(block.cut_terms(terms_of_sums)), gradients.leaves):
                total.add_(leaf_grad)
        grads = [None if total is None else total.to(tensor.dtype) for tensor, total in zip(tensors, sums)]
        return (None, None, None, grad_value, *grads)


def empty_like_values(value: Tensor, blocks: list[Block]) -> Tensor:
    """Returns a tensor like the values (B, H, T, d_h) that the blocks write to; rows that none writes to are 0.

    In memory it is (T, B, H, d_h), which is the order in which projections read and write.
    """
    bsz, num_heads, length, head_dim = value.size()
    out = value.new_empty(length, bsz, num_heads, head_dim).permute(1, 2, 0, 3)
    shortest = min(block.length for block in blocks)
    out[:, :, shortest:] = 0
    return out


def compute_block(block: Block, terms: Sequence[Any], value: Tensor, causal: bool) -> Tensor:
    """Returns the output of a block, laid out as `Block.read` returns values.

    Args:
        block: The block.
        terms: The terms of all logits.
        value: The values of all sentences and heads, (B, H, T, d_h).
        causal: Whether a row sees only the columns up to its own.
    """
    normal = block.normal_form(block.cut_terms(terms))
    block_value = block.read(value)
    out = torch.empty_like(block_value)
    for tile in block.tiles(causal):
        weights = tile_weights(tile.cut_normal_form(normal), block_value.size(1), tile, block, causal)
        visible_value = block_value[:, :, tile.columns]
        out[:, :, tile.rows] = torch.matmul(weights.to(value.dtype), visible_value)
    return out


class BlockGradients(NamedTuple):
    """The gradients of a block."""

    value: Tensor  # laid out as `Block.read` returns the values
    leaves: Sequence[Tensor]  # of the tensors of the terms that need a gradient


def differentiate_block(
    block: Block, terms: Sequence[Any], terms_of_sums: Sequence[Any], value: Tensor, grad: Tensor, causal: bool
) -> BlockGradients:
    """Returns the gradients of a block.

    Args:
        block: The block.
        terms: The terms of all logits.
        terms_of_sums: The same terms with the sums of gradients in place of their tensors; None where a tensor needs no
            gradient.
        value: The values of all sentences and heads, (B, H, T, d_h).
        grad: The gradient of the output, of the same size.
        causal: Whether a row sees only the columns up to its own.
    """
    leaves = make_leaves(block.cut_terms(terms), block.cut_terms(terms_of_sums))
    with torch.enable_grad():
        normal = block.normal_form(leaves.terms)
    sum_dtype = torch.promote_types(value.dtype, torch.float32)
    normal_sums = NormalForm(*(new_sum(summand, sum_dtype) for summand in normal))

    grad_value = backward_of_tiles(block, normal, normal_sums, block.read(value), block.read(grad), causal)

    summands = []
    summand_grads = []
    for summand, total in zip(normal, normal_sums):
        if summand is not None and total is not None:
            summands.append(summand)
            summand_grads.append(total.to(summand.dtype))
    if not summands:
        return BlockGradients(grad_value, [])
    return BlockGradients(grad_value, torch.autograd.grad(summands, leaves.trained_tensors, summand_grads))


class Leaves(NamedTuple):
    """Terms whose tensors are leaves of a new autograd graph."""

    terms: list[Any]
    trained_tensors: list[Tensor]  # the tensors that need a gradient


def make_leaves(terms: Sequence[Any], sums: Sequence[Any]) -> Leaves:
    """Returns the terms detached from the graph; a tensor needs a gradient if it has a sum."""
    leaves = Leaves([], [])
    for term, term_sums in zip(terms, sums):
        fields = []
        for field, field_sum in zip(term, term_sums):
            if not isinstance(field, Tensor):
                fields.append(field)
                continue
            leaf = field.detach()
            fields.append(leaf)
            if isinstance(field_sum, Tensor):
                leaves.trained_tensors.append(leaf.requires_grad_())
        leaves.terms.append(type(term)._make(fields))
    return leaves


def new_sum(summand: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns zeros to add the gradient of a summand to, or None if it needs no gradient."""
    if summand is None or not summand.requires_grad:
        return None
    return torch.zeros_like(summand, dtype=dtype)


def backward_of_tiles(
    block: Block, normal: NormalForm, normal_sums: NormalForm, value: Tensor, grad: Tensor, causal: bool
) -> Tensor:
    """Returns the gradient of a block's values, and adds the gradients of its normal form to `normal_sums`."""
    grad_value = None
    # The last tile comes first. It has all columns, so that its gradient can start the sum over tiles.
    for tile in reversed(block.tiles(causal)):
        tile_sums = tile.cut_normal_form(normal_sums)
        leaves = []
        for summand, total in zip(tile.cut_normal_form(normal), tile_sums):
            leaf = None
            if summand is not None:
                leaf = summand.detach().requires_grad_(total is not None)
            leaves.append(leaf)
        with torch.enable_grad():
            weights = tile_weights(NormalForm(*leaves), value.size(1), tile, block, causal)

        tile_grad = grad[:, :, tile.rows]
        tile_value = value[:, :, tile.columns]
        weights_transposed = weights.detach().to(value.dtype).transpose(2, 3)
        if grad_value is None:
            grad_value = torch.matmul(weights_transposed, tile_grad)
        else:
            columns_of_grad_value = grad_value[:, :, tile.columns].flatten(0, 1)
            columns_of_grad_value.baddbmm_(weights_transposed.flatten(0, 1), tile_grad.flatten(0, 1))

        trained_leaves = []
        trained_sums = []
        for leaf, total in zip(leaves, tile_sums):
            if leaf is not None and total is not None:
                trained_leaves.append(leaf)
                trained_sums.append(total)
        if trained_leaves:
            grad_weights = torch.matmul(tile_grad, tile_value.transpose(2, 3)).to(weights.dtype)
            leaf_grads = torch.autograd.grad(weights, trained_leaves, grad_weights)
            for total, leaf_grad in zip(trained_sums, leaf_grads):
                total.add_(leaf_grad)
    assert grad_value is not None
    return grad_value


def tile_weights(normal: NormalForm, num_heads: int, tile: Tile, block: Block, causal: bool) -> Tensor:
    """Returns the softmax of a tile of logits, in fp32 or fp64, with the columns masked that a row may not see.

    Args:
        normal: The tile's part of the normal form.
        num_heads: Number of heads of the block.
        tile, block: The tile and its block.
        causal: Whether a row sees only the columns up to its own.
    """
    num_rows = tile.rows.stop - tile.rows.start
    scores = at_least_fp32(normal.total(tile.columns.stop)).expand(-1, num_heads, -1, -1)
    is_only_a_bias = normal.query is None and normal.left is None
    is_expanded = scores.size(2) == 1 or scores.stride(1) == 0
    if is_only_a_bias or is_expanded:
        # A copy of the full size, because the masks below are written in place.
        scores = scores.expand(-1, -1, num_rows, -1).clone()
    with torch.no_grad():  # Hidden logits have the weight 0, so no gradient flows through the masks.
        if causal:
            scores[..., tile.rows] += future_mask(num_rows, scores)
        elif block.hidden is not None:
            num_hidden_columns = block.hidden.size(1)
            scores[..., -num_hidden_columns:].masked_fill_(block.hidden[:, None, None], float("-inf"))
    return torch.softmax(scores, dim=-1)
