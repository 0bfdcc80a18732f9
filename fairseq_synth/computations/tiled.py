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
a term is. A new kind of term only has to be added to `cast_for_tiles` and `DIMENSIONS`.
"""

import enum
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..logits import Bias, Diagonals, Logits, NormalForm, Outer, Product, Term
from ..masks import future_mask, is_causal, sentence_lengths
from ..tensors import at_least_fp32, on_cpu
from .plain import join_heads
from .threads import compute_in_threads

# So many logits fit into the caches of a core as a whole, so that the plain computation is faster.
PLAIN_LIMIT = 1 << 18
# The largest number of logits in a tile: 2 MiB of fp32, which stay in the caches of a core through a handful of passes.
TILE = 1 << 19
# The largest number of rows in a tile under the causal mask. Columns to the right of its last row are not computed.
CAUSAL_ROWS = 128


def refuses(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float
) -> str:
    """Returns the reason why tiles cannot compute this call, or would not be faster; an empty string if there is none.

    The arguments are those of `attend`, which asks every computation in the same way.
    """
    if not on_cpu(value):
        return "the values are not on a CPU"
    if dropout:
        return "there is dropout"
    if attn_mask is not None and not is_causal(attn_mask):
        return "the mask is not the causal one"
    if count_logits(logits, value, key_padding_mask) <= PLAIN_LIMIT:
        return "there are few logits"
    lengths_are_known = read_lengths(value, key_padding_mask) is not None
    if not lengths_are_known:
        return "padding is not on the right, or a sentence is empty"
    return ""


def count_logits(logits: Logits, value: Tensor, key_padding_mask: Tensor | None) -> int:
    """Returns how many logits the plain computation would compute.

    It computes a matrix (T, T) for each sentence and head. If several sentences have the same logits and no padding, it
    computes the matrices of one sentence for all.
    """
    bsz, num_heads, length, _ = value.size()
    num_matrices = bsz * num_heads
    if bsz > 1 and key_padding_mask is None and logits.is_shared():
        num_matrices = num_heads
    return num_matrices * length**2


def compute(
    logits: Logits, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, dropout: float = 0.0
) -> Tensor:
    """Returns ``softmax(S) V``, (T B, C). The arguments are those of `attend`.

    `attend` calls this only if `refuses` has found no reason against it. So there is no dropout, there is no mask but
    the causal one, and all padding is on the right.
    """
    bsz, num_heads, _, _ = value.size()
    lengths = read_lengths(value, key_padding_mask)
    assert lengths is not None, "padding is not on the right, or a sentence is empty"
    has_shared_logits = bsz > 1 and logits.is_shared()
    blocks = divide_into_blocks(lengths, num_heads, has_shared_logits, causal=is_causal(attn_mask))
    terms = [cast_for_tiles(term, value.dtype) for term in logits.terms()]
    out = call_tiled_attention(blocks, terms, value)
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


# ---- terms and their tensors


def cast_for_tiles(term: Term, dtype: torch.dtype) -> Term:
    """Returns a term of the logits with its tensors in the types with which tiles are computed.

    * Product: The query and key get the type of the values, `dtype`. Under autocast their types may differ, and a
      matrix product takes two tensors of one type.
    * Bias, Diagonals, and the weight of each term: They are in fp32 at least. Their gradients are sums over many
      sentences, for which half precision is too coarse.
    * Outer: The factors keep their type.
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
    return term.with_weight(weight)


class TensorName(NamedTuple):
    """Says which tensor of a list of terms is meant."""

    term_index: int  # the index of the term in the list
    field: str  # the field of the term that the tensor is in, such as "query"


def collect_tensors(terms: Sequence[Term]) -> dict[TensorName, Tensor]:
    """Returns {name: tensor} for all tensors of the terms.

    For example, [Product(query=q, key=k, scale=0.125)] has the tensors {(0, "query"): q, (0, "key"): k}.
    """
    tensors = {}
    for term_index, term in enumerate(terms):
        for field, content in term._asdict().items():
            if isinstance(content, Tensor):
                tensors[TensorName(term_index, field)] = content
    return tensors


def remove_tensors(term: Term) -> Any:
    """Returns the term with None in place of each tensor. Its numbers stay."""
    none_for_tensors: dict[str, Any] = {}
    for field, content in term._asdict().items():
        if isinstance(content, Tensor):
            none_for_tensors[field] = None
    return term._replace(**none_for_tensors)


def insert_tensors(terms: Sequence[Any], tensors: Mapping[TensorName, Tensor]) -> list[Term]:
    """Returns copies of the terms in which some of the tensors are replaced by others.

    For example, with ``{TensorName(term_index=0, field="query"): q}``, the first term gets the query q.

    Args:
        terms: Terms of the logits. They may have None in place of a tensor, as after `remove_tensors`.
        tensors: {name of a tensor in the terms: the tensor that replaces it}.
    """
    new_terms = list(terms)
    for name, tensor in tensors.items():
        old_term = new_terms[name.term_index]
        new_field = {name.field: tensor}
        new_terms[name.term_index] = old_term._replace(**new_field)
    return new_terms


class Dimension(enum.Enum):
    """What the indices of one dimension of a tensor stand for."""

    SENTENCES = enum.auto()
    HEADS = enum.auto()
    ROWS = enum.auto()  # the tokens of a sentence as queries
    COLUMNS = enum.auto()  # the tokens of a sentence as keys
    DISTANCES = enum.auto()  # from a row to a column, with distance 0 in the middle
    FEATURES = enum.auto()


# The dimensions of the tensor in each field of a term and of `NormalForm`. A dimension may also have the size 1, which
# means that all sentences, heads or rows have the same numbers.
DIMENSIONS = {
    "query": (Dimension.SENTENCES, Dimension.HEADS, Dimension.ROWS, Dimension.FEATURES),
    "key": (Dimension.SENTENCES, Dimension.HEADS, Dimension.COLUMNS, Dimension.FEATURES),
    "factors": (Dimension.SENTENCES, Dimension.HEADS, Dimension.ROWS, Dimension.FEATURES),
    "left": (Dimension.SENTENCES, Dimension.HEADS, Dimension.ROWS, Dimension.FEATURES),
    "right": (Dimension.SENTENCES, Dimension.HEADS, Dimension.ROWS, Dimension.FEATURES),
    "bias": (Dimension.SENTENCES, Dimension.HEADS, Dimension.ROWS, Dimension.COLUMNS),
    "values": (Dimension.SENTENCES, Dimension.HEADS, Dimension.ROWS, Dimension.DISTANCES),
    "weight": (Dimension.SENTENCES, Dimension.HEADS, Dimension.ROWS, Dimension.COLUMNS),
}

# The index of a whole dimension.
WHOLE = slice(None)


def cut_dimensions(x: Tensor, field: str, find_part: Callable[[Dimension, int], slice]) -> Tensor:
    """Returns a part of a tensor, as a view, after cutting each of its dimensions.

    For example, `find_part` may return 0:4 for the sentences, 2:4 for the heads, 0:10 for the rows, and a slice of
    everything for the features. Then the part of a query is ``x[0:4, 2:4, 0:10, :]``.

    Args:
        x: The tensor.
        field: The field of a term or of a `NormalForm` that the tensor is in. `DIMENSIONS` says what its dimensions
            are.
        find_part: Returns the slice of one dimension. Its arguments are the dimension and its size.
    """
    index = []
    for dimension, size in zip(DIMENSIONS[field], x.size(), strict=True):
        index.append(find_part(dimension, size))
    return x[tuple(index)]


# ---- blocks and tiles


class Block(NamedTuple):
    """Neighbouring sentences and heads whose logits are computed together, one tile of rows after another."""

    sentences: slice
    heads: slice
    length: int  # how many tokens the longest of these sentences has
    rows_of_tile: int  # number of rows in each tile; the last tile may have fewer
    # Whether the sentences have the same logits. Their values are then side by side on the features.
    is_shared: bool
    # (sentences, n): true at padding, in the last n of `length` columns; None if there is no padding (`find_padding`)
    hidden: Tensor | None
    causal: bool  # whether a row sees only the columns up to its own

    def read(self, x: Tensor) -> Tensor:
        """Returns the part of the values for the block's n sentences, its heads and its tokens.

        It is (n, heads, length, d_h). If the sentences share their logits, it is (1, heads, length, n d_h) instead, so
        that one matrix product with their common weights serves all sentences.

        Args:
            x: The values of the batch, or a tensor like them, (B, H, T, d_h).
        """
        part = x[self.sentences, self.heads, : self.length]  # (n, heads, length, d_h)
        if self.is_shared:
            features_side_by_side = part.permute(1, 2, 0, 3).flatten(2)  # (heads, length, n d_h)
            return features_side_by_side[None]
        return part.contiguous()

    def write(self, x: Tensor, part: Tensor) -> None:
        """Writes a part to where `read` reads it from.

        Args:
            x: A tensor like the values of the batch, (B, H, T, d_h), which is changed in place.
            part: The values for the block's sentences, heads and tokens, with the dimensions of the result of `read`.
        """
        if self.is_shared:
            head_dim = x.shape[-1]
            # (1, heads, length, n d_h) -> (n, heads, length, d_h)
            part = part[0].unflatten(-1, (-1, head_dim)).permute(2, 0, 1, 3)
        x[self.sentences, self.heads, : self.length].copy_(part)

    def cut(self, x: Tensor, field: str) -> Tensor:
        """Returns the part of a term's tensor for the block's sentences, heads and tokens, as a view.

        For example, the part of a query is ``x[sentences, heads, :length]``.

        Args:
            x: A tensor of a term, such as a query or a bias, for the whole batch; or the gradient of such a tensor.
            field: The field of the term that the tensor is in. `DIMENSIONS` says what its dimensions are.
        """
        return cut_dimensions(x, field, self.find_part)

    def find_part(self, dimension: Dimension, size: int) -> slice:
        """Returns the indices that belong to the block, along one dimension of a tensor for the whole batch.

        Args:
            dimension: What the indices stand for, such as sentences.
            size: The size of the dimension.
        """
        if size == 1:
            return WHOLE  # All sentences, heads or rows have the same numbers.
        if dimension is Dimension.SENTENCES:
            return self.sentences
        if dimension is Dimension.HEADS:
            return self.heads
        if dimension in (Dimension.ROWS, Dimension.COLUMNS):
            return slice(0, self.length)  # There is a row and a column for each token.
        if dimension is Dimension.DISTANCES:
            return find_distances(self.length, num_distances=size)
        return WHOLE  # A block has all features.

    def cut_terms(self, terms: Sequence[Term]) -> list[Term]:
        """Returns the terms of the block's logits, given the terms for the whole batch.

        Each tensor is replaced by its part for the block, which is a view.
        """
        parts = {}
        for name, tensor in collect_tensors(terms).items():
            parts[name] = self.cut(tensor, name.field)
        return insert_tensors(terms, parts)

    def normal_form(self, terms: Sequence[Term]) -> NormalForm:
        """Returns the block's logits, which are a sum of terms, as ``query @ key^T + left (x) right + bias``.

        The query and key are in contiguous memory, so that no tile has to copy them for its matrix product.

        Args:
            terms: The terms of the block's logits, as `cut_terms` returns them.
        """
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
    columns: slice  # begins at 0

    def cut(self, x: Tensor, field: str) -> Tensor:
        """Returns the part of a tensor for the tile's rows and columns, as a view.

        Args:
            x: A tensor of the block's normal form, or the gradient of such a tensor.
            field: The field of `NormalForm` that the tensor is in. `DIMENSIONS` says what its dimensions are.
        """
        return cut_dimensions(x, field, self.find_part)

    def find_part(self, dimension: Dimension, size: int) -> slice:
        """Returns the indices that belong to the tile, along one dimension of a tensor for the whole block.

        Args:
            dimension: What the indices stand for, such as rows.
            size: The size of the dimension.
        """
        if size == 1:
            return WHOLE  # All rows or columns have the same numbers.
        if dimension is Dimension.ROWS:
            return self.rows
        if dimension is Dimension.COLUMNS:
            return self.columns
        return WHOLE  # A tile has all sentences, heads and features of its block.

    def cut_normal_form(self, normal: NormalForm) -> NormalForm:
        """Returns the parts of a block's normal form that the tile needs, as views."""
        parts = {field: self.cut(tensor, field) for field, tensor in normal.tensors().items()}
        return NormalForm(**parts)  # Fields that are None in `normal` are None here, too.


def find_distances(length: int, num_distances: int) -> slice:
    """Returns the indices of the distances from ``1 - length`` to ``length - 1``, which occur among `length` tokens.

    Args:
        length: A number of tokens.
        num_distances: The number of all distances, which is odd. Distance 0 is in the middle.
    """
    middle = num_distances // 2
    largest_distance = length - 1
    return slice(middle - largest_distance, middle + largest_distance + 1)


def split_range(total: int, size: int) -> list[slice]:
    """Returns neighbouring slices of `size` elements that cover 0 to ``total - 1``; the last one may be shorter."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def divide_into_blocks(lengths: Sequence[int], num_heads: int, has_shared_logits: bool, causal: bool) -> list[Block]:
    """Returns blocks that together contain every sentence and head once.

    A block has some sentences and heads. Its logits are computed in tiles, each of which has some of the rows.

    Args:
        lengths: The length of each sentence in tokens.
        num_heads: H.
        has_shared_logits: Whether all sentences have the same logits.
        causal: Whether a row sees only the columns up to its own.
    """
    if causal:
        # Tiles of few rows save work, because the columns after the last row of a tile are not computed.
        max_rows = CAUSAL_ROWS
    else:
        max_rows = max(lengths)  # A tile may have all rows.
    max_heads = count_heads_of_block(num_heads, torch.get_num_threads())
    if has_shared_logits:
        # Sentences of the same length then have the same weights, which are computed once for all of them.
        blocks = divide_by_length(lengths, num_heads, max_rows=max_rows, max_heads=max_heads, causal=causal)
    else:
        blocks = divide_by_sentences(lengths, num_heads, max_rows=max_rows, max_heads=max_heads, causal=causal)
    return list(blocks)


def count_heads_of_block(num_heads: int, num_threads: int) -> int:
    """Returns how many of the H heads a block may have, so that there are enough blocks for all threads.

    A single thread computes one block after another, so that a block may have all heads. Several threads need two
    blocks each, as far as there are enough heads: if a thread is slow, another one can take its second block.
    """
    if num_threads == 1:
        return num_heads
    num_blocks = 2 * num_threads
    return max(1, num_heads // num_blocks)


class BlockSize(NamedTuple):
    """How many sentences and heads a block has, and how many of its rows are computed at once, as a tile."""

    sentences: int
    heads: int
    rows_of_tile: int


def choose_block_size(length: int, num_sentences: int, max_rows: int, max_heads: int) -> BlockSize:
    """Returns the size of blocks whose tiles have at most `TILE` logits, but at least one row.

    A tile is some rows of all sentences and heads of its block. It first gets as many rows as fit. If there is room for
    more, it gets these rows of several sentences, and then of several heads.

    For example, `TILE` is 1000. Sentences of 10 tokens have 10 * 10 = 100 logits in each head. If there are 4 of them,
    a tile has 10 rows of 4 sentences, which are 400 logits in each head. So there is room for 2 heads.

    Args:
        length: The length of the longest sentence in tokens. Each row has as many logits.
        num_sentences: The largest number of sentences in a block.
        max_rows: The largest number of rows in a tile.
        max_heads: The largest number of heads in a block.
    """
    rows = count_fitting(logits_of_each=length, limit=min(max_rows, length))
    sentences = count_fitting(logits_of_each=length * rows, limit=num_sentences)
    heads = count_fitting(logits_of_each=length * rows * sentences, limit=max_heads)
    return BlockSize(sentences=sentences, heads=heads, rows_of_tile=rows)


def count_fitting(logits_of_each: int, limit: int) -> int:
    """Returns how many rows, sentences or heads fit into a tile of `TILE` logits; at least 1, at most `limit`."""
    return min(limit, max(1, TILE // logits_of_each))


def divide_by_sentences(
    lengths: Sequence[int], num_heads: int, max_rows: int, max_heads: int, causal: bool = False
) -> Iterator[Block]:
    """Yields the blocks of a batch in which each sentence has logits of its own.

    A block is some neighbouring sentences, of any length, and some neighbouring heads. Its logits are computed a *tile*
    at a time, which is some rows of all these sentences and heads.

    Args:
        lengths: The length of each sentence in tokens.
        num_heads: H.
        max_rows: The largest number of rows in a tile.
        max_heads: The largest number of heads in a block.
        causal: Whether a row sees only the columns up to its own.
    """
    # The size is the same for all blocks. It is chosen for the longest sentences, whose tiles are the largest.
    block_size = choose_block_size(max(lengths), num_sentences=len(lengths), max_rows=max_rows, max_heads=max_heads)
    for sentences in split_range(len(lengths), block_size.sentences):  # slices, such as 0:4 and 4:8
        block_lengths = lengths[sentences]
        padding = find_padding(block_lengths)
        for heads in split_range(num_heads, block_size.heads):  # slices, such as 0:2 and 2:4
            yield Block(
                sentences=sentences,
                heads=heads,
                length=max(block_lengths),
                rows_of_tile=block_size.rows_of_tile,
                is_shared=False,
                hidden=padding,
                causal=causal,
            )


def divide_by_length(
    lengths: Sequence[int], num_heads: int, max_rows: int, max_heads: int, causal: bool = False
) -> Iterator[Block]:
    """Yields the blocks of a batch in which all sentences have the same logits.

    A block is all neighbouring sentences of one length, and some neighbouring heads. For example, the lengths 7, 7, 7,
    5, 5 give blocks of the sentences 0 to 2 and of the sentences 3 and 4. fairseq sorts a batch by length, so that
    sentences of equal length are neighbours.

    Args:
        lengths: The length of each sentence in tokens.
        num_heads: H.
        max_rows: The largest number of rows in a tile.
        max_heads: The largest number of heads in a block.
        causal: Whether a row sees only the columns up to its own.
    """
    first_sentence = 0
    for length, equal_lengths in itertools.groupby(lengths):
        num_sentences = len(list(equal_lengths))
        sentences = slice(first_sentence, first_sentence + num_sentences)
        first_sentence += num_sentences
        # A tile has the logits only once for all sentences of the block, as if there were a single sentence.
        block_size = choose_block_size(length, num_sentences=1, max_rows=max_rows, max_heads=max_heads)
        for heads in split_range(num_heads, block_size.heads):
            yield Block(
                sentences=sentences,
                heads=heads,
                length=length,
                rows_of_tile=block_size.rows_of_tile,
                is_shared=True,
                hidden=None,  # sentences of one length have no padding
                causal=causal,
            )


def find_padding(lengths: Sequence[int]) -> Tensor | None:
    """Returns a mask that is true at the padding of some sentences; None if all have the same length.

    The mask leaves out the first columns, in which every sentence has a token. For example, the lengths 5, 3 and 4 give
    the mask of the last two of five columns:

        [[False, False],
         [True,  True],
         [False, True]]

    Args:
        lengths: The length of each sentence in tokens. All padding is after the tokens.

    Returns:
        (number of sentences, longest length - shortest length), or None
    """
    shortest = min(lengths)
    longest = max(lengths)
    if shortest == longest:
        return None
    columns = torch.arange(shortest, longest)  # [3, 4]
    lengths_of_rows = torch.tensor(lengths)[:, None]  # [[5], [3], [4]]
    return columns >= lengths_of_rows


# ---- both passes


class Plan(NamedTuple):
    """All arguments of `TiledAttention` that are no tensors."""

    blocks: list[Block]  # parts of the batch that together contain every sentence and head once
    terms_without_tensors: list[Any]  # the terms that the logits are a sum of, with None in place of each tensor
    tensor_names: list[TensorName]  # where each tensor belongs in the terms
    trained_names: list[TensorName]  # the names of the tensors that need a gradient

    def rebuild_terms(self, tensors: Sequence[Tensor]) -> list[Term]:
        """Returns the terms with their tensors, which are given in the order of `tensor_names`."""
        tensors_by_name = dict(zip(self.tensor_names, tensors, strict=True))
        return insert_tensors(self.terms_without_tensors, tensors_by_name)


def call_tiled_attention(blocks: list[Block], terms: Sequence[Term], value: Tensor) -> Tensor:
    """Returns ``softmax(S) V``, (B, H, T, d_h), computed by the autograd function `TiledAttention`.

    Autograd gives gradients only to tensors that are arguments of the function, and not to tensors within the terms. So
    each tensor becomes an argument, and the terms are passed without their tensors. The function puts both together
    again (`Plan.rebuild_terms`).

    For example, ``Product(query=q, key=k, scale=0.125)`` becomes ``Product(query=None, key=None, scale=0.125)`` and the
    tensors q and k.

    Args:
        blocks: Parts of the batch that together contain every sentence and head once.
        terms: The terms that the logits S are a sum of.
        value: V, (B, H, T, d_h).
    """
    tensors_by_name = collect_tensors(terms)
    plan = Plan(
        blocks=blocks,
        terms_without_tensors=[remove_tensors(term) for term in terms],
        tensor_names=list(tensors_by_name),
        trained_names=[name for name, tensor in tensors_by_name.items() if tensor.requires_grad],
    )
    tensors = tensors_by_name.values()  # in the order of `tensor_names`
    out: Tensor = TiledAttention.apply(plan, value, *tensors)
    return out


class TiledAttention(torch.autograd.Function):
    """Computes ``softmax(S) V``, (B, H, T, d_h), and its gradients. It saves nothing but its inputs.

    The logits S are a sum of terms. Their tensors are arguments of their own, because autograd gives gradients only to
    arguments that are tensors. `Plan` has everything else of the terms.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, value: Tensor, *tensors: Tensor) -> Tensor:
        """Returns ``softmax(S) V``, (B, H, T, d_h).

        Several threads compute the output of one block each, which is some sentences and heads of the batch.

        Args:
            ctx: Where torch keeps what the backward pass needs.
            plan: The blocks, and the terms of S without their tensors.
            value: V, (B, H, T, d_h).
            tensors: The tensors of the terms, in the order of `Plan.tensor_names`.
        """
        ctx.plan = plan
        ctx.save_for_backward(value, *tensors)

        terms = plan.rebuild_terms(tensors)
        out = empty_like_values(value, plan.blocks)
        compute = functools.partial(compute_block, terms=terms, value=value)  # compute(block) returns its output.
        for block, block_out in compute_in_threads(compute, plan.blocks):
            block.write(out, block_out)  # copies it into `out`
            del block_out  # Its memory is free for the output of the next block.
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the arguments of `forward`: of the plan, the values and each tensor of the terms.

        The gradient is None for an argument that needs no gradient.

        Args:
            ctx: What `forward` has kept.
            grad_out: The gradient of the output, (B, H, T, d_h).
        """
        plan = ctx.plan
        value, *tensors = ctx.saved_tensors
        terms = plan.rebuild_terms(tensors)
        gradients = differentiate_blocks(plan.blocks, terms, plan.trained_names, value, grad_out)

        grad_plan = None  # The plan is no tensor.
        grad_tensors = []
        for name in plan.tensor_names:
            grad = gradients.tensors.get(name)  # None if the tensor is not trained
            grad_tensors.append(grad)
        return (grad_plan, gradients.value, *grad_tensors)


def empty_like_values(value: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Returns a new tensor (B, H, T, d_h) into which each block is to write its result.

    A block writes only as many tokens as its longest sentence has. All tokens behind these are padding, and are 0. In
    memory the tensor is (T, B, H, d_h), which is the order in which projections read and write.

    Args:
        value: The values, (B, H, T, d_h). Only their sizes, type and device are read.
        blocks: The blocks that write to the tensor.
    """
    bsz, num_heads, length, head_dim = value.size()
    out = value.new_empty(length, bsz, num_heads, head_dim).permute(1, 2, 0, 3)
    shortest = min(block.length for block in blocks)
    out[:, :, shortest:] = 0  # Longer blocks overwrite a part of the zeros.
    return out


def zeros_for_sum(tensor: Tensor) -> Tensor:
    """Returns zeros of the tensor's shape, in fp32 at least, to which gradients of the tensor are added.

    They have the tensor's strides. Most tensors are views of projections, and the backward pass of such a view needs no
    copy if the gradient has the same strides.
    """
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


# ---- the forward pass


def compute_block(block: Block, terms: Sequence[Term], value: Tensor) -> Tensor:
    """Returns ``softmax(S) V`` for the sentences and heads of a block, (sentences, heads, tokens, features).

    The logits S are never computed for the whole block, but for a tile of its rows at a time. The block has them as
    ``query @ key^T + left (x) right + bias``, which takes less memory.

    Args:
        block: Some sentences and heads of the batch.
        terms: The terms that the logits S are a sum of, for the whole batch.
        value: The values V of the whole batch, (B, H, T, d_h).
    """
    # This takes the parts of the terms and values that belong to the block.
    block_terms = block.cut_terms(terms)
    block_normal = block.normal_form(block_terms)  # the query, key, left, right and bias
    block_value = block.read(value)  # (sentences, heads, tokens, features)
    block_out = torch.empty_like(block_value)
    for tile in block.tiles():
        # This takes the parts that belong to the tile, for example its rows of the query and its columns of the key.
        # Under the causal mask, a tile has only the columns up to its last row.
        tile_normal = tile.cut_normal_form(block_normal)
        tile_value = block_value[:, :, tile.columns]
        weights = compute_weights(tile_normal, tile, block)  # (sentences, heads, rows, columns)
        block_out[:, :, tile.rows] = torch.matmul(weights.to(value.dtype), tile_value)
    return block_out


def compute_weights(tile_normal: NormalForm, tile: Tile, block: Block) -> Tensor:
    """Returns the attention weights of a tile, (sentences, heads, rows, columns), in fp32 or fp64.

    Columns that a row may not see, because of padding or the causal mask, have the weight 0.

    Args:
        tile_normal: The logits of the tile, as ``query @ key^T + left (x) right + bias``.
        tile: Some rows of the block, and the columns that they see.
        block: Some sentences and heads of the batch.
    """
    scores = compute_scores(tile_normal, tile, block)
    hide_columns_(scores, tile, block)  # changes `scores` in place
    return torch.softmax(scores, dim=-1)


def hide_columns_(scores: Tensor, tile: Tile, block: Block) -> None:
    """Sets the logits of a tile to minus infinity, in place, where a row may not see a column.

    Autograd need not record this. A hidden logit gets the weight 0, and where the weight is 0, the gradient of softmax
    is 0, too.

    Args:
        scores: The logits of the tile, (sentences, heads, rows, columns).
        tile: Some rows of the block, and the columns that they see.
        block: Some sentences and heads of the batch.
    """
    with torch.no_grad():
        if block.causal:
            hide_future_(scores, tile)  # This also hides all padding from tokens, because padding comes after them.
        elif block.hidden is not None:
            hide_padding_(scores, block.hidden)


def hide_future_(scores: Tensor, tile: Tile) -> None:
    """Sets the logits of a tile to minus infinity, in place, where the column comes after the row.

    For example, a tile with the rows 2 and 3 has the columns 0 to 3. Both rows see the columns 0 and 1. So only the
    columns 2 and 3, which have the same numbers as the rows, are changed: row 2 may not see column 3.

    Args:
        scores: The logits of the tile, (sentences, heads, rows, columns).
        tile: Some rows of a block, and the columns up to the last one of these rows.
    """
    num_rows = tile.rows.stop - tile.rows.start
    # These are the columns with the same numbers as the rows. They are a view, so that adding to it changes `scores`.
    last_columns = scores[..., tile.rows]
    last_columns += future_mask(num_rows, scores)


def hide_padding_(scores: Tensor, hidden: Tensor) -> None:
    """Sets the logits of padding to minus infinity, in place.

    Args:
        scores: The logits of a tile, (sentences, heads, rows, columns).
        hidden: (sentences, n), true at padding, for the last n columns. Other columns have no padding.
    """
    num_last_columns = hidden.shape[1]
    last_columns = scores[..., -num_last_columns:]  # a view, so that filling it changes `scores`
    last_columns.masked_fill_(hidden[:, None, None], float("-inf"))


def compute_scores(tile_normal: NormalForm, tile: Tile, block: Block) -> Tensor:
    """Returns the logits of a tile as a new tensor, (sentences, heads, rows, columns), in fp32 or fp64.

    The caller may change it in place, because it shares no memory with another tensor.

    Args:
        tile_normal: The logits of the tile, as ``query @ key^T + left (x) right + bias``.
        tile: Some rows of the block, and the columns that they see.
        block: Some sentences and heads of the batch.
    """
    num_heads = block.heads.stop - block.heads.start
    num_rows = tile.rows.stop - tile.rows.start
    num_columns = tile.columns.stop - tile.columns.start
    scores = at_least_fp32(tile_normal.total(num_columns))  # (sentences, heads or 1, rows or 1, columns)

    has_all_heads_and_rows = scores.shape[1] == num_heads and scores.shape[2] == num_rows
    if not has_all_heads_and_rows:
        # All heads or rows are alike. `expand` repeats them without memory, and `clone` gives memory to each of them.
        return scores.expand(-1, num_heads, num_rows, -1).clone()
    is_bias_alone = tile_normal.query is None and tile_normal.left is None
    if is_bias_alone:
        return scores.clone()  # `total` has returned the bias itself, which may be a view of a parameter.
    return scores  # `total` has computed a product, which is a new tensor.


# ---- The backward pass. It goes through the forward pass from its end to its beginning: from the output of a block to
# ---- the block's normal form, a tile at a time (`differentiate_tiles`); from there to the block's parts of the tensors
# ---- of the terms (`differentiate_block`); and from all blocks to the whole tensors (`differentiate_blocks`).


class Gradients(NamedTuple):
    """The gradients of the values and of the tensors of the terms, either for the whole batch or for one block."""

    value: Tensor  # for one block, it has the dimensions of the result of `Block.read`
    tensors: dict[TensorName, Tensor]  # {name of a tensor: its gradient}, for the tensors that need one


def differentiate_blocks(
    blocks: Sequence[Block],
    terms: Sequence[Term],
    trained_names: Sequence[TensorName],
    value: Tensor,
    grad_out: Tensor,
) -> Gradients:
    """Returns the gradients of the values and of the terms' tensors, put together from the gradients of all blocks.

    Args:
        blocks: Parts of the batch that together contain every sentence and head once.
        terms: The terms of the logits S.
        trained_names: The names of the terms' tensors that need a gradient.
        value: V, (B, H, T, d_h).
        grad_out: The gradient of the output, (B, H, T, d_h).
    """
    tensors = collect_tensors(terms)
    grad_value = empty_like_values(value, blocks)  # 0 at padding, which is in no block
    grad_sums = {name: zeros_for_sum(tensors[name]) for name in trained_names}  # in fp32 at least
    # differentiate(block) returns the gradients of a block.
    differentiate = functools.partial(
        differentiate_block, terms=terms, trained_names=trained_names, value=value, grad_out=grad_out
    )
    # Several threads differentiate one block each. This thread alone adds up the gradients, in the order of the blocks,
    # so that the sums are always rounded in the same way.
    for block, block_gradients in compute_in_threads(differentiate, blocks):
        # A value is in one block only, so its gradient is copied.
        block.write(grad_value, block_gradients.value)
        # A tensor of a term may be in several blocks, for example a bias for all sentences. So its gradients are added.
        for name in trained_names:
            part_of_sum = block.cut(grad_sums[name], name.field)  # a view, so that adding to it changes the sum
            part_of_sum.add_(block_gradients.tensors[name])
        del block_gradients  # Their memory is free for the gradients of the next block.

    # Autograd wants the gradient of a tensor in the tensor's type.
    grad_tensors = {name: grad_sum.to(tensors[name].dtype) for name, grad_sum in grad_sums.items()}
    return Gradients(value=grad_value, tensors=grad_tensors)


def differentiate_block(
    block: Block,
    terms: Sequence[Term],
    trained_names: Sequence[TensorName],
    value: Tensor,
    grad_out: Tensor,
) -> Gradients:
    """Returns the gradients of a block's values, and of the block's parts of the trained tensors of the terms.

    The forward pass computes the output of a block in two steps, through which the gradients go back:

    1. The terms are added up: ``S = query @ key^T + left (x) right + bias``. This is the normal form of the logits.
    2. The output ``softmax(S) V`` is computed from the normal form and the values, tile by tile.

    Args:
        block: Some sentences and heads of the batch.
        terms: The terms of the logits, for the whole batch.
        trained_names: The names of the terms' tensors that need a gradient.
        value: The values of the whole batch, (B, H, T, d_h).
        grad_out: The gradient of the output, of the same size.
    """
    # Step 1 is computed again, and this time autograd records it.
    block_terms = block.cut_terms(terms)
    block_tensors = collect_tensors(block_terms)
    leaves = {name: new_leaf(block_tensors[name]) for name in trained_names}
    with torch.enable_grad():  # In a backward pass, nothing is recorded without this.
        normal = block.normal_form(insert_tensors(block_terms, leaves))

    # The gradient goes back through step 2, from the output to the values and the normal form.
    block_value = block.read(value)  # (sentences, heads, tokens, features)
    block_grad_out = block.read(grad_out)  # (sentences, heads, tokens, features)
    grad_value, grad_normal = differentiate_tiles(block, normal, block_value, block_grad_out)

    # Then it goes back through step 1, from the trained fields of the normal form, such as its query, to the leaves.
    normal_tensors = normal.tensors()
    outputs = [normal_tensors[field] for field in grad_normal]
    grad_tensors = gradients_of_leaves(leaves, outputs, grad_outputs=list(grad_normal.values()))
    return Gradients(grad_value, grad_tensors)


def new_leaf(tensor: Tensor) -> Tensor:
    """Returns a view of the tensor that is a *leaf* of autograd, which is where gradients end.

    What is computed from the leaf has a gradient with respect to the leaf, but not with respect to `tensor`.
    """
    leaf = tensor.detach()
    leaf.requires_grad = True
    return leaf


Name = TypeVar("Name", bound=Hashable)


def gradients_of_leaves(
    leaves: Mapping[Name, Tensor], outputs: Sequence[Tensor], grad_outputs: Sequence[Tensor]
) -> dict[Name, Tensor]:
    """Returns {name of a leaf: its gradient}, which autograd computes from the gradients of the outputs.

    Args:
        leaves: {name: a leaf (`new_leaf`)}. The outputs depend on each of them.
        outputs: Tensors that have been computed from the leaves while autograd recorded it.
        grad_outputs: The gradient of each output, in the order of `outputs`, in any type.
    """
    if not leaves:
        return {}
    # Autograd wants the gradient of an output in the output's type.
    grads_in_type = [grad.to(output.dtype) for output, grad in zip(outputs, grad_outputs, strict=True)]
    grads = torch.autograd.grad(outputs, inputs=list(leaves.values()), grad_outputs=grads_in_type)
    return dict(zip(leaves, grads, strict=True))  # Autograd returns a gradient for each of the inputs, in their order.


class NormalFormGradients(NamedTuple):
    """The gradients of a block's values and of its normal form, ``query @ key^T + left (x) right + bias``."""

    value: Tensor  # It has the dimensions of the result of `Block.read`.
    normal: dict[str, Tensor]  # {field of `NormalForm`, such as "query": its gradient}, for the fields that need one


def differentiate_tiles(block: Block, normal: NormalForm, value: Tensor, grad_out: Tensor) -> NormalFormGradients:
    """Returns the gradients of a block's values and of its normal form, given the gradient of its output.

    The output was computed in tiles, which are some rows of the block each. Both gradients are sums over the tiles.

    Args:
        block: Some sentences and heads of the batch.
        normal: The logits of the block, as ``query @ key^T + left (x) right + bias``. A tensor of it that needs a
            gradient has ``requires_grad``.
        value: The block's values as `Block.read` returns them, (sentences, heads, tokens, features).
        grad_out: The gradient of the block's output, of the same size.
    """
    trained = {field: tensor for field, tensor in normal.tensors().items() if tensor.requires_grad}
    trained_fields = list(trained)
    tiles = block.tiles()
    if len(tiles) == 1:
        # The only tile is the whole block, as for most short sentences. So there is nothing to add up.
        recomputed = recompute_weights(tiles[0], block, normal, trained_fields)
        grad_only_value = differentiate_output(recomputed.weights, grad_out)
        grad_only_normal = differentiate_weights(recomputed, grad_out, value)
        return NormalFormGradients(value=grad_only_value, normal=grad_only_normal)

    grad_value = torch.zeros_like(value)
    grad_normal = {field: zeros_for_sum(tensor) for field, tensor in trained.items()}
    # The order of the tiles must not change: it decides how the sums are rounded, and so the result of a training with
    # a given seed.
    for tile in reversed(tiles):
        # The forward pass has not kept the weights of the tile.
        recomputed = recompute_weights(tile, block, normal, trained_fields)
        tile_grad_out = grad_out[:, :, tile.rows]  # (sentences, heads, rows, features)
        # Each of these functions adds to its first argument in place.
        add_value_gradient_(grad_value, recomputed.weights, tile_grad_out, tile)
        add_normal_form_gradients_(grad_normal, recomputed, tile_grad_out, value, tile)
    return NormalFormGradients(value=grad_value, normal=grad_normal)


class RecomputedWeights(NamedTuple):
    """The attention weights of a tile, computed a second time, for their gradient."""

    weights: Tensor  # (sentences, heads, rows, columns)
    # {field of `NormalForm`, such as "query": the tile's part of it}, for the fields that need a gradient. Autograd
    # has recorded how the weights depend on these tensors, which are leaves (`new_leaf`).
    leaves: dict[str, Tensor]


def recompute_weights(tile: Tile, block: Block, normal: NormalForm, trained_fields: Sequence[str]) -> RecomputedWeights:
    """Computes the attention weights of a tile again, as in the forward pass, while autograd records it.

    `differentiate_weights` then asks autograd for the gradients of the leaves, which are the trained tensors that the
    weights are computed from.

    Args:
        tile: Some rows of the block, and the columns that they see.
        block: Some sentences and heads of the batch.
        normal: The logits of the block, as ``query @ key^T + left (x) right + bias``.
        trained_fields: The fields of `normal` that need a gradient, such as "query".
    """
    tile_normal = tile.cut_normal_form(normal)
    tile_tensors = tile_normal.tensors()
    leaves = {field: new_leaf(tile_tensors[field]) for field in trained_fields}
    tile_normal_of_leaves = tile_normal._replace(**leaves)
    with torch.enable_grad():  # In a backward pass, nothing is recorded without this.
        weights = compute_weights(tile_normal_of_leaves, tile, block)
    return RecomputedWeights(weights, leaves)


def differentiate_output(weights: Tensor, grad_out: Tensor) -> Tensor:
    """Returns the gradient of the values, given the gradient of the output ``weights @ values``.

    Args:
        weights: The attention weights, (sentences, heads, rows, columns).
        grad_out: The gradient of the output, (sentences, heads, rows, features).

    Returns:
        (sentences, heads, columns, features)
    """
    weights_transposed = weights.to(grad_out.dtype).transpose(2, 3)  # (sentences, heads, columns, rows)
    return torch.matmul(weights_transposed, grad_out)


def add_value_gradient_(grad_value: Tensor, weights: Tensor, tile_grad_out: Tensor, tile: Tile) -> None:
    """Adds the gradient that the values get from one tile, ``weights^T @ tile_grad_out``, to `grad_value` in place.

    Args:
        grad_value: The sum over the tiles so far, (sentences, heads, length, features), in contiguous memory. The
            values of the tile's columns get a larger sum.
        weights: The attention weights of the tile, (sentences, heads, rows, columns).
        tile_grad_out: The gradient of the tile's rows of the output, (sentences, heads, rows, features).
        tile: The tile.
    """
    part_of_sum = grad_value[:, :, tile.columns]  # (sentences, heads, columns, features), a view of `grad_value`
    weights_transposed = weights.to(tile_grad_out.dtype).transpose(2, 3)  # (sentences, heads, columns, rows)
    add_matrix_products_(part_of_sum, weights_transposed, tile_grad_out)


def add_matrix_products_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds ``left @ right`` to `total` in place, without memory for the product.

    All three hold a matrix for each sentence and head, (sentences, heads, ..., ...). torch's `baddbmm_` takes a list of
    matrices instead, so that sentences and heads become one dimension of N = sentences * heads.
    """
    sentences, heads, num_rows, num_columns = total.size()
    # `view` never copies; if it couldn't make a view, it would fail. So `matrices` is the memory of `total`.
    matrices = total.view(sentences * heads, num_rows, num_columns)
    matrices.baddbmm_(left.flatten(0, 1), right.flatten(0, 1))  # matrices += left @ right


def add_normal_form_gradients_(
    grad_normal: Mapping[str, Tensor],
    recomputed: RecomputedWeights,
    tile_grad_out: Tensor,
    value: Tensor,
    tile: Tile,
) -> None:
    """Adds the gradients that a block's normal form gets from one tile to `grad_normal` in place.

    For example, the gradient of the query is added to the tile's rows of ``grad_normal["query"]``, and the gradient of
    the key to the tile's columns of ``grad_normal["key"]``.

    Args:
        grad_normal: {field of `NormalForm`: the sum of its gradients so far, for the whole block}.
        recomputed: The attention weights of the tile, and the tensors that they are computed from.
        tile_grad_out: The gradient of the tile's rows of the output, (sentences, heads, rows, features).
        value: The values of the block, (sentences, heads, length, features).
        tile: The tile.
    """
    tile_value = value[:, :, tile.columns]
    tile_gradients = differentiate_weights(recomputed, tile_grad_out, tile_value)
    for field, tile_grad in tile_gradients.items():
        part_of_sum = tile.cut(grad_normal[field], field)  # a view, so that adding to it changes the sum
        part_of_sum.add_(tile_grad)


def differentiate_weights(
    recomputed: RecomputedWeights, tile_grad_out: Tensor, tile_value: Tensor
) -> dict[str, Tensor]:
    """Returns {field of `NormalForm`, such as "query": the gradient of the tile's part of it}.

    The result has the fields that need a gradient.

    Args:
        recomputed: The attention weights of the tile, and the tensors that they are computed from.
        tile_grad_out: The gradient of the tile's output ``weights @ tile_value``, (sentences, heads, rows, features).
        tile_value: The values of the tile's columns, (sentences, heads, columns, features).
    """
    if not recomputed.leaves:
        return {}
    # From the output to the weights.
    grad_weights = torch.matmul(tile_grad_out, tile_value.transpose(2, 3))  # (sentences, heads, rows, columns)
    # From the weights to the query, key and other tensors of the normal form.
    return gradients_of_leaves(recomputed.leaves, outputs=[recomputed.weights], grad_outputs=[grad_weights])
