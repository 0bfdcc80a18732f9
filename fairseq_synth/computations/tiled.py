"""``softmax(S) V`` on a CPU, one tile of logits at a time: logits and weights never exist as a whole, in either pass.

The logits S are divided twice:

* A *block* (`Block`) is some neighbouring sentences and heads. Several threads compute one block each.
* A *tile* (`Tile`) is some rows of a block, so few that their logits fit into the caches of a core.

The logits of a call are given as a list of terms (`logits.Term`), such as inner products and biases. Each block adds up
terms of the same kind first. The result, ``query @ key^T + left (x) right + bias``, is the *normal form* of the block
(`logits.NormalForm`), from which its tiles are computed.

The backward pass computes each tile of weights again (recomputation: Rabe and Staats 2021, arXiv 2112.05682; Dao et
al. 2022, arXiv 2205.14135). In a first step it adds up the gradients of a block's normal form over the tiles. In a
second step, autograd differentiates the normal form by the tensors of the terms, so that nothing here depends on what
a term is.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
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
# The largest number of logits in a tile: 2 MiB of fp32, which stay in the caches of a core through a handful of passes.
TILE = 1 << 19
# The largest number of rows in a tile under the causal mask. Columns to the right of its last row are not computed.
CAUSAL_ROWS = 128

ALL = slice(None)


def refuses(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float
) -> str:
    """Returns why this call cannot be computed in tiles, or would not be faster; an empty string if it can.

    The arguments are those of `attend`, which asks every computation in the same way.
    """
    if not on_cpu(value):
        return "the values are not on a CPU"
    if dropout:
        return "there is dropout"
    if attn_mask is not None and not is_causal(attn_mask):
        return "the mask is not the causal one"
    bsz, num_heads, length, _ = value.size()
    num_matrices = bsz * num_heads
    if key_padding_mask is None and logits.is_shared() and bsz > 1:
        num_matrices = num_heads  # the plain computation computes the logits of one sentence for all
    if num_matrices * length**2 <= PLAIN_LIMIT:
        return "there are few logits"
    if read_lengths(value, key_padding_mask) is None:
        return "padding is not on the right, or a sentence is empty"
    return ""


def compute(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float = 0.0
) -> Tensor:
    """Returns ``softmax(S) V``, (T B, C). The arguments are those of `attend`.

    The batch is divided into blocks of some sentences and heads, which `TiledAttention` computes one after another.
    All padding has to be on the right. `attend` has made sure of that by `refuses`.
    """
    bsz, num_heads, _, _ = value.size()
    lengths = read_lengths(value, key_padding_mask)
    assert lengths is not None, "padding is not on the right, or a sentence is empty"
    has_shared_logits = bsz > 1 and logits.is_shared()
    blocks = divide_into_blocks(lengths, num_heads, has_shared_logits, causal=is_causal(attn_mask))
    terms = [cast_for_tiles(term, value.dtype) for term in logits.terms()]
    # Autograd sees a tensor only if it is an argument itself, and not if it is a field of an argument. So the terms are
    # given without their tensors, as templates, and the tensors are further arguments.
    templates = [remove_tensors(term) for term in terms]
    tensors = list_tensors(terms)
    out = TiledAttention.apply(templates, blocks, value, *tensors)
    return join_heads(out)


def read_lengths(value: Tensor, key_padding_mask: Tensor | None) -> list[int] | None:
    """Returns the length of each sentence, or None if padding is not on the right or a sentence is empty.

    Args:
        value: V, (B, H, T, d_h). Only its sizes are read.
        key_padding_mask: (B, T), true at padding, or None if all sentences have T tokens.
    """
    if key_padding_mask is None:
        bsz, _, length, _ = value.size()
        return [length] * bsz
    return sentence_lengths(key_padding_mask)


# ---- Terms and their tensors. Autograd sees a tensor only if it is itself an argument of an autograd function, so the
# ---- tensors are taken out of the terms before the call and put back within it.

PLACEHOLDER = object()


def cast_for_tiles(term: Term, dtype: torch.dtype) -> Term:
    """Returns a term of the logits with its tensors in the types with which tiles are computed.

    Query and key of a product are in `dtype`, the type of the values: under autocast their types may differ, and a
    matrix product takes two tensors of one type. The factors of an outer product keep their type, which is one for both
    of them. Biases, diagonals and weights are in fp32 at least: their gradients are sums over many sentences, for which
    half precision is too coarse.
    """
    weight = term.weight
    if weight is not None:
        weight = at_least_fp32(weight)
    if isinstance(term, Product):
        return term._replace(query=term.query.to(dtype), key=term.key.to(dtype), weight=weight)
    if isinstance(term, Bias):
        return term._replace(bias=at_least_fp32(term.bias), weight=weight)
    if isinstance(term, Diagonals):
        return term._replace(values=at_least_fp32(term.values), weight=weight)
    assert isinstance(term, Outer)
    return term._replace(weight=weight)


def list_tensors(terms: Sequence[Any]) -> list[Tensor]:
    """Returns the tensors of all terms in one list, in the order of the terms and of their fields."""
    tensors = []
    for term in terms:
        tensors += [field for field in term if isinstance(field, Tensor)]
    return tensors


def remove_tensors(term: Term) -> Any:
    """Returns a *template*: the term with a placeholder in place of each tensor."""
    fields = [PLACEHOLDER if isinstance(field, Tensor) else field for field in term]
    return type(term)._make(fields)


def insert_tensors(templates: Sequence[Any], tensors: Sequence[Tensor | None]) -> list[Any]:
    """Returns the terms that these templates become if `tensors` take the place of the placeholders.

    Args:
        templates: Terms with a placeholder in place of each tensor, as `remove_tensors` returns them.
        tensors: A tensor or None for each placeholder, in the order of the terms and of their fields. This is the order
            of `list_tensors`.
    """
    remaining_tensors = iter(tensors)
    terms = []
    for template in templates:
        fields = [next(remaining_tensors) if field is PLACEHOLDER else field for field in template]
        terms.append(type(template)._make(fields))
    return terms


# ---- blocks and tiles


class Block(NamedTuple):
    """Neighbouring sentences and heads whose logits are computed together, one tile of rows after another."""

    sentences: slice
    heads: slice
    length: int  # how many tokens the longest of these sentences has
    rows_of_tile: int  # number of rows in each tile; the last tile may have fewer
    # Whether the sentences have the same logits. Their values are then side by side on the features.
    is_shared: bool
    # (sentences, n): true at padding, in the last n of `length` columns; None if all have the same length
    hidden: Tensor | None
    causal: bool  # whether a row sees only the columns up to its own

    def read(self, x: Tensor) -> Tensor:
        """Returns the block's n sentences of values x (B, H, T, d_h) as a copy.

        It is (n, heads, length, d_h), or (1, heads, length, n d_h) if the sentences share their logits.
        """
        part = x[self.sentences, self.heads, : self.length]
        if self.is_shared:
            return part.permute(1, 2, 0, 3).flatten(2)[None]
        return part.contiguous()

    def write(self, x: Tensor, part: Tensor) -> None:
        """Copies `part`, laid out as `read` returns it, into the block's place in x (B, H, T, d_h)."""
        if self.is_shared:
            head_dim = x.size(-1)
            # (1, heads, length, n d_h) -> (n, heads, length, d_h)
            part = part[0].unflatten(-1, (-1, head_dim)).permute(2, 0, 1, 3)
        x[self.sentences, self.heads, : self.length].copy_(part)

    def cut_terms(self, terms: Sequence[Any]) -> list[Any]:
        """Returns the terms of the logits with only the block's sentences, heads and tokens in their tensors, as views.

        Args:
            terms: The terms of the whole batch. A tensor in them may be None, and stays None.
        """
        return [self.cut_term(term) for term in terms]

    def cut_term(self, term: Any) -> Any:
        """Returns one term, cut as in `cut_terms`."""
        tokens = slice(0, self.length)
        weight = cut(term.weight, ALL, self.heads)  # (1, H, 1, 1): all sentences have the same weights
        if isinstance(term, Product):
            query = cut(term.query, self.sentences, self.heads, tokens)
            key = cut(term.key, self.sentences, self.heads, tokens)
            return term._replace(query=query, key=key, weight=weight)
        if isinstance(term, Outer):
            factors = cut(term.factors, self.sentences, self.heads, tokens)
            return term._replace(factors=factors, weight=weight)
        if isinstance(term, Bias):
            bias = cut(term.bias, self.sentences, self.heads, tokens, tokens)
            return term._replace(bias=bias, weight=weight)
        assert isinstance(term, Diagonals)
        return term._replace(values=self.cut_diagonals(term.values), weight=weight)

    def cut_diagonals(self, values: Any) -> Any:
        """Returns the values of the distances that occur between the block's rows and columns.

        Args:
            values: One value for each distance, (1, H, 1, 2 T - 1), with distance 0 in the middle; or None, which is
                returned.

        Returns:
            (1, heads, 1, 2 length - 1), for the distances from 1 - length to length - 1
        """
        if values is None:
            return None
        middle = values.size(3) // 2  # the index of distance 0, T - 1
        largest_distance = self.length - 1
        distances = slice(middle - largest_distance, middle + largest_distance + 1)
        return cut(values, ALL, self.heads, ALL, distances)

    def normal_form(self, terms: Sequence[Term]) -> NormalForm:
        """Returns the sum of terms that `cut_terms` has returned, in its normal form with query and key contiguous."""
        normal = Logits(terms).normal_form(self.length)
        if normal.query is not None and normal.key is not None:
            return normal._replace(query=normal.query.contiguous(), key=normal.key.contiguous())
        return normal

    def tiles(self) -> list["Tile"]:
        """Returns the tiles of the block, from its first rows to its last."""
        tiles = []
        for rows in split_range(self.length, self.rows_of_tile):
            num_columns = rows.stop if self.causal else self.length
            tiles.append(Tile(rows, slice(0, num_columns)))
        return tiles


class Tile(NamedTuple):
    """Some rows of a block, and the columns that they may see."""

    rows: slice
    columns: slice

    def cut_normal_form(self, normal: NormalForm) -> NormalForm:
        """Returns the parts of a block's normal form that the tile needs, as views."""
        parts = {}
        for name, summand in normal._asdict().items():
            parts[name] = self.cut_summand(name, summand)
        return NormalForm(**parts)

    def cut_summand(self, name: str, summand: Any) -> Any:
        """Returns the part of a block's summand that the tile needs, as a view; None for None.

        Args:
            name: A field of `NormalForm`.
            summand: The tensor in this field, or any tensor of the same size, such as its gradient.
        """
        if name == "key":
            return cut(summand, ALL, ALL, self.columns)
        if name == "bias":
            return cut(summand, ALL, ALL, self.rows, self.columns)
        return cut(summand, ALL, ALL, self.rows)  # the query, and both factors of the outer product


def cut(x: Any, *slices: slice) -> Any:
    """Returns a slice of a tensor, in which a dimension of size 1 stays whole: it stands for all sentences or heads.

    Returns None for None, which stands for a tensor that does not occur or needs no gradient.
    """
    if x is None:
        return None
    index = tuple(part if size > 1 else ALL for part, size in zip(slices, x.size()))
    return x[index]


def split_range(total: int, size: int) -> list[slice]:
    """Returns neighbouring slices of `size` elements that cover 0 to ``total - 1``; the last one may be shorter."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def fit_into_tile(num_logits: int, limit: int) -> int:
    """Returns how many equal parts fit into a tile together, which has at most `TILE` logits: from 1 to `limit`.

    Args:
        num_logits: The number of logits in each part. A part is, for example, a row, or all rows of a sentence or head.
        limit: The largest number of parts that is useful.
    """
    return min(limit, max(1, TILE // num_logits))


def divide_into_blocks(lengths: Sequence[int], num_heads: int, has_shared_logits: bool, causal: bool) -> list[Block]:
    """Returns blocks that together contain every sentence and head once.

    Args:
        lengths: The length of each sentence in tokens.
        num_heads: H.
        has_shared_logits: Whether all sentences have the same logits.
        causal: Whether a row sees only the columns up to its own.
    """
    # Without the causal mask, a tile may have all rows.
    rows_of_tile = CAUSAL_ROWS if causal else max(lengths)
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        max_heads = num_heads
    else:
        # Two blocks for each thread, if there are enough heads. Another thread can then take the second block of a
        # thread that is slow.
        num_blocks = 2 * num_threads
        max_heads = max(1, num_heads // num_blocks)
    if has_shared_logits:
        # Sentences of the same length share one tile of weights, which is computed once.
        return list(divide_by_length(lengths, num_heads, rows_of_tile, max_heads, causal))
    return list(divide_by_sentences(lengths, num_heads, rows_of_tile, max_heads, causal))


def divide_by_sentences(
    lengths: Sequence[int], num_heads: int, rows_of_tile: int, max_heads: int, causal: bool = False
) -> Iterator[Block]:
    """Yields the blocks of a batch, for logits that differ by sentence.

    A block is some neighbouring sentences, of any length, and some neighbouring heads. A tile of it is some rows of the
    logits of all its sentences and heads. A tile may have `TILE` logits. It gets as many rows as fit; if there is room
    for more, the rows of more sentences; and then those of more heads.

    Args:
        lengths: The length of each sentence in tokens.
        num_heads: H.
        rows_of_tile: The largest number of rows in a tile.
        max_heads: The largest number of heads in a block.
        causal: Whether a row sees only the columns up to its own.
    """
    longest = max(lengths)
    row_logits = longest  # the number of logits in a row
    rows = fit_into_tile(num_logits=row_logits, limit=min(rows_of_tile, longest))
    sentence_logits = rows * row_logits  # in these rows of one sentence and head
    sentences_of_block = fit_into_tile(num_logits=sentence_logits, limit=len(lengths))
    head_logits = sentences_of_block * sentence_logits  # in these rows of these sentences in one head
    heads_of_block = fit_into_tile(num_logits=head_logits, limit=max_heads)
    for sentence_slice in split_range(len(lengths), sentences_of_block):
        block_lengths = lengths[sentence_slice]
        hidden = hide_padding(block_lengths)
        for head_slice in split_range(num_heads, heads_of_block):
            yield Block(
                sentences=sentence_slice,
                heads=head_slice,
                length=max(block_lengths),
                rows_of_tile=rows,
                is_shared=False,
                hidden=hidden,
                causal=causal,
            )


def divide_by_length(
    lengths: Sequence[int], num_heads: int, rows_of_tile: int, max_heads: int, causal: bool = False
) -> Iterator[Block]:
    """Yields the blocks of a batch, for logits that all sentences share.

    A block is all neighbouring sentences of one length, and some neighbouring heads. fairseq sorts a batch by length,
    so that sentences of equal length are neighbours. They share one tile of logits, so their number does not matter. A
    tile gets as many rows as fit; if there is room for more, the rows of more heads.

    Args:
        lengths: The length of each sentence in tokens.
        num_heads: H.
        rows_of_tile: The largest number of rows in a tile.
        max_heads: The largest number of heads in a block.
        causal: Whether a row sees only the columns up to its own.
    """
    first_sentence = 0
    for length, equal_lengths in itertools.groupby(lengths):
        num_sentences = len(list(equal_lengths))
        sentences = slice(first_sentence, first_sentence + num_sentences)
        first_sentence += num_sentences
        row_logits = length  # the number of logits in a row
        rows = fit_into_tile(num_logits=row_logits, limit=min(rows_of_tile, length))
        head_logits = rows * row_logits  # in these rows of one head
        heads_of_block = fit_into_tile(num_logits=head_logits, limit=max_heads)
        for head_slice in split_range(num_heads, heads_of_block):
            yield Block(
                sentences=sentences,
                heads=head_slice,
                length=length,
                rows_of_tile=rows,
                is_shared=True,
                hidden=None,
                causal=causal,
            )


def hide_padding(lengths: Sequence[int]) -> Tensor | None:
    """Returns `Block.hidden` for sentences of these lengths: which columns are padding, or None if there is none.

    The columns begin behind the shortest sentence, because all columns before are tokens.
    """
    shortest = min(lengths)
    longest = max(lengths)
    if shortest == longest:
        return None
    columns = torch.arange(shortest, longest)
    return columns >= torch.tensor(lengths)[:, None]


# ---- both passes


class TiledAttention(torch.autograd.Function):
    """Computes ``softmax(S) V``, (B, H, T, d_h), and its gradients. It saves nothing but its inputs.

    S is a sum of terms, which are tuples of tensors and numbers. torch gives gradients only to tensors that are
    arguments of their own, so the tensors are passed apart from the terms. What is left of a term is a *template*: the
    term with a placeholder in place of each tensor. `insert_tensors` puts tensors into the places, in their order.
    """

    @staticmethod
    def forward(ctx: Any, templates: list[Any], blocks: list[Block], value: Tensor, *tensors: Tensor) -> Tensor:
        """Returns ``softmax(S) V``, (B, H, T, d_h), computed block by block.

        Args:
            ctx: Where torch keeps what the backward pass needs.
            templates: The terms that S is a sum of, with placeholders for their tensors; see `remove_tensors`.
            blocks: Parts of the batch, each some sentences and heads, which together contain every sentence and head.
            value: V, (B, H, T, d_h).
            tensors: The tensors of the terms, in the order of the placeholders.
        """
        ctx.templates = templates
        ctx.blocks = blocks
        ctx.save_for_backward(value, *tensors)
        terms = insert_tensors(templates, tensors)

        def compute_one(block: Block) -> Tensor:
            return compute_block(block, terms, value)

        out = empty_like_values(value, blocks)  # with 0 at the padding that no block has
        block_outputs = map_in_threads(compute_one, blocks)  # in the order of the blocks
        for block_output, block in zip(block_outputs, blocks, strict=True):
            block.write(out, block_output)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradient of each argument of `forward`, computed block by block; None for those that need none.

        The gradient of a tensor is the sum of its gradients in all blocks. Each block adds its gradients to the part of
        the sums that belongs to its sentences and heads.

        Args:
            ctx: What `forward` has kept.
            grad_out: The gradient of the output, (B, H, T, d_h).
        """
        value, *tensors = ctx.saved_tensors
        # A truth value for each argument of `forward`; those after the first three are the tensors.
        _templates, _blocks, _value, *tensors_need_grad = ctx.needs_input_grad
        terms = insert_tensors(ctx.templates, tensors)

        def differentiate_one(block: Block) -> BlockGradients:
            return differentiate_block(
                block,
                templates=ctx.templates,
                terms=terms,
                tensors_need_grad=tensors_need_grad,
                value=value,
                grad_out=grad_out,
            )

        grad_value = empty_like_values(value, ctx.blocks)
        grad_sums = start_sums(tensors, tensors_need_grad)
        # In the order of the blocks, so that the rounding of the sums does not depend on which thread is faster.
        gradients_of_blocks = map_in_threads(differentiate_one, ctx.blocks)
        for block_gradients, block in zip(gradients_of_blocks, ctx.blocks, strict=True):
            block.write(grad_value, block_gradients.value)
            add_block_gradients(grad_sums, block_gradients.tensors, ctx.templates, block)

        grad_tensors: list[Tensor | None] = []
        for tensor, grad_sum in zip(tensors, grad_sums):
            grad_tensors.append(None if grad_sum is None else grad_sum.to(tensor.dtype))
        return (None, None, grad_value, *grad_tensors)  # `templates` and `blocks` have no gradient


def start_sums(tensors: Sequence[Tensor], tensors_need_grad: Sequence[bool]) -> list[Tensor | None]:
    """Returns for each tensor zeros, to which its gradients are added; None for a tensor that needs no gradient."""
    sums: list[Tensor | None] = []
    for tensor, needs_grad in zip(tensors, tensors_need_grad, strict=True):
        sums.append(zeros_for_sum(tensor) if needs_grad else None)
    return sums


def add_block_gradients(
    grad_sums: Sequence[Tensor | None], block_grads: Sequence[Tensor], templates: Sequence[Any], block: Block
) -> None:
    """Adds the gradients of a block to the sums over all blocks, in place.

    Args:
        grad_sums: For each tensor of the terms, the sum of its gradients so far; None if it needs no gradient.
        block_grads: The block's gradients of the tensors that need one, in the same order.
        templates: The terms with a placeholder in place of each tensor.
        block: The block, whose sentences and heads have a part in the sums.
    """
    # `Block.cut_terms` knows which part of each tensor belongs to the block. A sum has the size of its tensor, so that
    # the sums can take the places of the tensors in the terms.
    terms_of_sums = insert_tensors(templates, grad_sums)
    # The parts are views, so that adding to them changes the sums. None, for a tensor without a gradient, is left out.
    parts_of_sums = list_tensors(block.cut_terms(terms_of_sums))
    for part_of_sum, block_grad in zip(parts_of_sums, block_grads, strict=True):
        part_of_sum.add_(block_grad)


def empty_like_values(value: Tensor, blocks: list[Block]) -> Tensor:
    """Returns a tensor like the values (B, H, T, d_h) that the blocks write to; rows that no block writes to are 0.

    In memory it is (T, B, H, d_h), which is the order in which projections read and write.
    """
    bsz, num_heads, length, head_dim = value.size()
    out = value.new_empty(length, bsz, num_heads, head_dim).permute(1, 2, 0, 3)
    shortest = min(block.length for block in blocks)
    out[:, :, shortest:] = 0
    return out


def zeros_for_sum(tensor: Tensor) -> Tensor:
    """Returns zeros of the tensor's shape, in fp32 at least, to which gradients of the tensor are added.

    They have the tensor's strides. Most tensors are views of projections, and the backward pass of such a view then
    needs no copy.
    """
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def compute_block(block: Block, terms: Sequence[Any], value: Tensor) -> Tensor:
    """Returns ``softmax(S) V`` of the block's sentences and heads, laid out as `Block.read` returns values.

    Args:
        block: Some sentences and heads of the batch.
        terms: The terms that the logits of the whole batch are a sum of.
        value: The values of the whole batch, (B, H, T, d_h).
    """
    # The logits of the block as ``query @ key^T + left (x) right + bias``, of which a tile takes its rows and columns.
    normal = block.normal_form(block.cut_terms(terms))
    block_value = block.read(value)
    out = torch.empty_like(block_value)
    for tile in block.tiles():
        weights = tile_weights(tile.cut_normal_form(normal), tile, block)
        visible_value = block_value[:, :, tile.columns]
        out[:, :, tile.rows] = torch.matmul(weights.to(value.dtype), visible_value)
    return out


def tile_weights(tile_normal: NormalForm, tile: Tile, block: Block) -> Tensor:
    """Returns the attention weights of a tile, (sentences, heads, rows, columns), in fp32 or fp64.

    Columns that a row may not see have the weight 0.

    Args:
        tile_normal: The logits of the tile, as ``query @ key^T + left (x) right + bias``.
        tile: Some rows of the block, and the columns that they see.
        block: Some sentences and heads of the batch.
    """
    scores = writable_scores(tile_normal, tile, block)
    with torch.no_grad():  # Autograd needs no record of the masks: hidden logits have the weight 0 and no gradient.
        if block.causal:
            hide_future_(scores, tile)
        elif block.hidden is not None:
            hide_padding_(scores, block.hidden)
    return torch.softmax(scores, dim=-1)


def hide_future_(scores: Tensor, tile: Tile) -> None:
    """Makes logits of a tile minus infinity, in place, if their column comes after their row.

    For example, a tile with the rows 2 and 3 has the columns 0 to 3. The columns 0 and 1 are visible to both rows. Only
    in the last columns, which have the same numbers as the rows, some logits are hidden.
    """
    num_rows = tile.rows.stop - tile.rows.start
    last_columns = scores[..., tile.rows]
    last_columns += future_mask(num_rows, scores)


def hide_padding_(scores: Tensor, hidden: Tensor) -> None:
    """Makes the logits of padding minus infinity, in place. `hidden`: `Block.hidden`, for the last columns only."""
    num_last_columns = hidden.size(1)
    last_columns = scores[..., -num_last_columns:]
    last_columns.masked_fill_(hidden[:, None, None], float("-inf"))


def writable_scores(tile_normal: NormalForm, tile: Tile, block: Block) -> Tensor:
    """Returns the logits of a tile, (sentences, heads, rows, columns), in memory that nothing else uses.

    They can therefore be masked in place. The arguments are those of `tile_weights`.
    """
    num_heads = block.heads.stop - block.heads.start
    num_rows = tile.rows.stop - tile.rows.start
    num_columns = tile.columns.stop
    scores = at_least_fp32(tile_normal.total(num_columns))  # (sentences, heads or 1, rows or 1, columns)
    # There are two reasons to copy them. First, `NormalForm.total` computes products and sums into new memory, but it
    # returns a bias that is the only summand as it is. This may be a view of a parameter, which must not be masked.
    is_only_a_bias = tile_normal.query is None and tile_normal.left is None
    # Second, heads or rows that are alike are computed once. `expand` lets them share this memory; masks differ by row.
    has_all_heads_and_rows = scores.size(1) == num_heads and scores.size(2) == num_rows
    if has_all_heads_and_rows and not is_only_a_bias:
        return scores
    return scores.expand(-1, num_heads, num_rows, -1).clone()


class BlockGradients(NamedTuple):
    """The gradients of a block."""

    value: Tensor  # the gradient of the values, laid out as `Block.read` returns the values
    # The gradients of the tensors of the terms, cut as in `Block.cut_terms`, in the order of `list_tensors`. Tensors
    # that need no gradient have none here.
    tensors: Sequence[Tensor]


def differentiate_block(
    block: Block,
    templates: Sequence[Any],
    terms: Sequence[Any],
    tensors_need_grad: Sequence[bool],
    value: Tensor,
    grad_out: Tensor,
) -> BlockGradients:
    """Returns the gradients of a block's values, and of the block's parts of the tensors from which S is computed.

    A block is some sentences and heads of the batch. The logits S are a sum of terms, such as inner products and
    biases, each of which has some tensors. In the forward pass, the block's terms are added up to its *normal form*,
    ``S = query @ key^T + left (x) right + bias``, from which the logits are computed, a tile of rows at a time.
    Gradients flow the same way back: from the tiles to the normal form, and from the normal form to the tensors.

    Args:
        block: The block.
        templates: The terms with a placeholder in place of each tensor; see `remove_tensors`.
        terms: The same terms with the tensors of the whole batch.
        tensors_need_grad: Whether each tensor of the terms needs a gradient, in the order of `list_tensors`.
        value: The values of the whole batch, (B, H, T, d_h).
        grad_out: The gradient of the output, of the same size.
    """
    recorded = record_normal_form(block, templates, terms, tensors_need_grad)
    gradients = differentiate_tiles(block, recorded.normal, block.read(value), block.read(grad_out))
    tensor_grads = differentiate_normal_form(recorded, gradients.summands)
    return BlockGradients(gradients.value, tensor_grads)


class RecordedNormalForm(NamedTuple):
    """A block's normal form, ``query @ key^T + left (x) right + bias``, whose computation autograd has recorded."""

    normal: NormalForm
    trained_leaves: list[Tensor]  # those of the tensors it was computed from that need a gradient


def record_normal_form(
    block: Block, templates: Sequence[Any], terms: Sequence[Any], tensors_need_grad: Sequence[bool]
) -> RecordedNormalForm:
    """Computes the normal form of a block, and lets autograd record how.

    The normal form is the one of the forward pass. But its tensors, the block's parts of the tensors of the terms, are
    leaves of a new graph of autograd, so that gradients end at them.

    Args:
        block: The block.
        templates: The terms with a placeholder in place of each tensor; see `remove_tensors`.
        terms: The same terms with the tensors of the whole batch.
        tensors_need_grad: Whether each tensor of the terms needs a gradient, in the order of `list_tensors`.
    """
    leaves = []
    trained_leaves = []
    for block_tensor, needs_grad in zip(list_tensors(block.cut_terms(terms)), tensors_need_grad, strict=True):
        leaf = block_tensor.detach().requires_grad_(needs_grad)
        leaves.append(leaf)
        if needs_grad:
            trained_leaves.append(leaf)
    with torch.enable_grad():
        normal = block.normal_form(insert_tensors(templates, leaves))
    return RecordedNormalForm(normal, trained_leaves)


def differentiate_normal_form(recorded: RecordedNormalForm, summand_grads: dict[str, Tensor]) -> Sequence[Tensor]:
    """Returns the gradient of each tensor in `RecordedNormalForm.trained_leaves`.

    Args:
        recorded: The normal form of a block, and the tensors that it was computed from.
        summand_grads: {field of `NormalForm`: its gradient}, for the fields that need one.
    """
    if not recorded.trained_leaves:
        return []
    summands = []
    grads = []
    for name, grad in summand_grads.items():
        summand = getattr(recorded.normal, name)
        summands.append(summand)
        grads.append(grad.to(summand.dtype))
    return torch.autograd.grad(summands, recorded.trained_leaves, grads)


class NormalFormGradients(NamedTuple):
    """The gradients of a block's values and of its normal form."""

    value: Tensor  # laid out as `Block.read` returns the values
    summands: dict[str, Tensor]  # {field of `NormalForm`: its gradient}, for those that need one


def differentiate_tiles(block: Block, normal: NormalForm, value: Tensor, grad_out: Tensor) -> NormalFormGradients:
    """Returns the gradients of a block's values and of its normal form.

    The *normal form* is the block's logits as ``query @ key^T + left (x) right + bias``; each of these five tensors is
    a summand here. Each tile, which is some rows of the block, adds its part to the gradients. Its attention weights
    are computed again for that, because the forward pass has not kept them.

    Args:
        block: Some sentences and heads of the batch.
        normal: The normal form of the block.
        value: The block's values as `Block.read` returns them.
        grad_out: The gradient of the block's output, laid out in the same way.
    """
    sums = start_summand_sums(normal)
    grad_value = None
    # The last tile comes first. Even under the causal mask it has all columns, so that its gradient of the values has
    # the full size, and those of the other tiles can be added to it.
    for tile in reversed(block.tiles()):
        # 1. The weights of the tile, computed from its parts of the summands. Autograd records this for step 3.
        leaves = make_leaves(tile.cut_normal_form(normal), trained=sums.keys())
        with torch.enable_grad():
            weights = tile_weights(NormalForm(**leaves), tile, block)
        # 2. The gradient of the values. The output is ``weights @ value``.
        tile_grad_out = grad_out[:, :, tile.rows]
        grad_value = add_value_gradient(grad_value, weights, tile_grad_out, tile)
        # 3. The gradient of the weights, and from it those of the tile's parts of the summands.
        if sums:
            visible_value = value[:, :, tile.columns]
            grad_weights = torch.matmul(tile_grad_out, visible_value.transpose(2, 3)).to(weights.dtype)
            add_summand_gradients(sums, leaves, weights, grad_weights, tile)
    assert grad_value is not None, "a block has at least one tile"
    return NormalFormGradients(grad_value, sums)


def start_summand_sums(normal: NormalForm) -> dict[str, Tensor]:
    """Returns {field of `NormalForm`: zeros to add its gradients to}, for the summands that need a gradient."""
    sums = {}
    for name, summand in normal._asdict().items():
        if summand is not None and summand.requires_grad:
            sums[name] = zeros_for_sum(summand)
    return sums


def add_summand_gradients(
    sums: dict[str, Tensor], leaves: dict[str, Tensor], weights: Tensor, grad_weights: Tensor, tile: Tile
) -> None:
    """Adds the gradients of a tile's summands to the sums over all tiles of the block, in place.

    Args:
        sums: {field of `NormalForm`: the sum of its gradients so far, for the whole block}, which are changed.
        leaves: {field of `NormalForm`: the tile's part of it}, from which `weights` was computed.
        weights: The attention weights of the tile.
        grad_weights: Their gradient.
        tile: Some rows of the block, and the columns that they see.
    """
    trained_leaves = [leaves[name] for name in sums]
    tile_grads = torch.autograd.grad(weights, trained_leaves, grad_weights)
    for name, tile_grad in zip(sums, tile_grads, strict=True):
        tile_sum = tile.cut_summand(name, sums[name])  # a view, so that the sum of the block changes with it
        tile_sum.add_(tile_grad)


def make_leaves(normal: NormalForm, trained: Collection[str]) -> dict[str, Tensor]:
    """Returns the summands of a normal form by name, as leaves of a new graph of autograd.

    A gradient that is computed in the new graph ends at the leaves.

    Args:
        normal: The normal form, ``query @ key^T + left (x) right + bias``.
        trained: The names of the summands that need a gradient.
    """
    leaves = {}
    for name, summand in normal._asdict().items():
        if summand is not None:
            leaves[name] = summand.detach().requires_grad_(name in trained)
    return leaves


def add_value_gradient(grad_value: Tensor | None, weights: Tensor, tile_grad_out: Tensor, tile: Tile) -> Tensor:
    """Adds a tile's part, ``weights^T @ tile_grad_out``, to the gradient of the values in place, and returns the sum.

    Args:
        grad_value: The sum over earlier tiles, (sentences, heads, columns, features), which is changed; or None at the
            first tile, which must have all columns of the block, so that its product begins the sum.
        weights: The attention weights of the tile.
        tile_grad_out: The gradient of the tile's rows of the output.
        tile: The tile; it has values only in its columns.
    """
    weights_transposed = weights.detach().to(tile_grad_out.dtype).transpose(2, 3)
    if grad_value is None:
        return torch.matmul(weights_transposed, tile_grad_out)
    # `baddbmm_` adds a batch of matrix products in place. It wants sentences and heads as one dimension, the batch.
    # `flatten` has to return a view here, or a copy would be changed. It does: the first tile's product has made
    # `grad_value` contiguous, and only columns are cut from it, which leaves sentences and heads evenly spaced.
    grad_of_columns = grad_value[:, :, tile.columns].flatten(0, 1)
    grad_of_columns.baddbmm_(weights_transposed.flatten(0, 1), tile_grad_out.flatten(0, 1))
    return grad_value
