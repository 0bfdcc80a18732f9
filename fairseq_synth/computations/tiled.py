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

    term: int  # the index of the term in the list
    field: str  # the field of the term that the tensor is in, such as "query"


def collect_tensors(terms: Sequence[Term]) -> dict[TensorName, Tensor]:
    """Returns the tensors of all terms by name."""
    tensors = {}
    for index, term in enumerate(terms):
        for field, content in term._asdict().items():
            if isinstance(content, Tensor):
                tensors[TensorName(index, field)] = content
    return tensors


def remove_tensors(term: Term) -> Any:
    """Returns a *bare term*, which is the term with None in place of each tensor."""
    without_tensors: dict[str, Any] = {}
    for field, content in term._asdict().items():
        if isinstance(content, Tensor):
            without_tensors[field] = None
    return term._replace(**without_tensors)


def insert_tensors(terms: Sequence[Any], tensors: Mapping[TensorName, Tensor]) -> list[Term]:
    """Returns the terms with these tensors in place of their own.

    For example, the tensor of the name TensorName(term=0, field="query") becomes the query of the first term.

    Args:
        terms: Terms of the logits, or bare terms, which have None in place of each tensor.
        tensors: The new tensors by name. A tensor of the terms whose name is not here stays.
    """
    new_terms = list(terms)
    for name, tensor in tensors.items():
        new_terms[name.term] = new_terms[name.term]._replace(**{name.field: tensor})
    return new_terms


class Dimension(enum.Enum):
    """What the numbers along one dimension of a tensor belong to."""

    SENTENCES = enum.auto()
    HEADS = enum.auto()
    ROWS = enum.auto()  # the tokens of a sentence as queries
    COLUMNS = enum.auto()  # the tokens of a sentence as keys
    DISTANCES = enum.auto()  # from a row to a column, with distance 0 in the middle
    FEATURES = enum.auto()


# The dimensions of the tensor in each field of a term and of `NormalForm`. A dimension may also have the size 1, which
# means that all sentences, heads or rows share the numbers.
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
    """Returns a part of a tensor, as a view.

    Args:
        x: The tensor.
        field: The field of a term or of a `NormalForm` that the tensor is in. `DIMENSIONS` says what its dimensions
            are.
        find_part: Returns which numbers along one dimension belong to the part. Its arguments are the dimension and
            its size.
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
    # (sentences, n): true at padding, in the last n of `length` columns; None if all have the same length
    hidden: Tensor | None
    causal: bool  # whether a row sees only the columns up to its own

    def read(self, x: Tensor) -> Tensor:
        """Returns the part of the values x (B, H, T, d_h) for the block's n sentences, its heads and its tokens.

        It is (n, heads, length, d_h), or (1, heads, length, n d_h) if the sentences share their logits.
        """
        part = x[self.sentences, self.heads, : self.length]
        if self.is_shared:
            return part.permute(1, 2, 0, 3).flatten(2)[None]
        return part.contiguous()

    def write(self, x: Tensor, part: Tensor) -> None:
        """Copies `part`, laid out as `read` returns it, into the block's place in x (B, H, T, d_h)."""
        if self.is_shared:
            head_dim = x.shape[-1]
            # (1, heads, length, n d_h) -> (n, heads, length, d_h)
            part = part[0].unflatten(-1, (-1, head_dim)).permute(2, 0, 1, 3)
        x[self.sentences, self.heads, : self.length].copy_(part)

    def cut(self, x: Tensor, field: str) -> Tensor:
        """Returns the part of a tensor for the block's sentences, heads and tokens, as a view.

        For example, the part of a query is ``x[sentences, heads, :length]``.

        Args:
            x: A tensor of a term, such as a query or a bias, for the whole batch; or the gradient of such a tensor.
            field: The field of the term that the tensor is in. `DIMENSIONS` says what its dimensions are.
        """
        return cut_dimensions(x, field, self.find_part)

    def find_part(self, dimension: Dimension, size: int) -> slice:
        """Returns which numbers along one dimension of a tensor belong to the block.

        Args:
            dimension: What the numbers along the dimension belong to, in a tensor for the whole batch.
            size: How many numbers there are.
        """
        if size == 1:
            return WHOLE  # All sentences, heads or rows share the number.
        if dimension is Dimension.SENTENCES:
            return self.sentences
        if dimension is Dimension.HEADS:
            return self.heads
        if dimension in (Dimension.ROWS, Dimension.COLUMNS):
            return slice(0, self.length)  # There is one of them for each token.
        if dimension is Dimension.DISTANCES:
            return find_distances(self.length, num_distances=size)
        return WHOLE  # A block has all features.

    def cut_terms(self, terms: Sequence[Term]) -> list[Term]:
        """Returns the terms of the logits with the block's parts of their tensors, as views."""
        parts = {}
        for name, tensor in collect_tensors(terms).items():
            parts[name] = self.cut(tensor, name.field)
        return insert_tensors(terms, parts)

    def normal_form(self, terms: Sequence[Term]) -> NormalForm:
        """Returns the sum of the block's terms in its normal form, ``query @ key^T + left (x) right + bias``.

        The query and key are in contiguous memory, so that no tile has to copy them for its matrix product.

        Args:
            terms: The terms of the logits, with the block's parts of their tensors (`cut_terms`).
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
        """Returns which numbers along one dimension of a tensor belong to the tile.

        Args:
            dimension: What the numbers along the dimension belong to, in a tensor for the whole block.
            size: How many numbers there are.
        """
        if size == 1:
            return WHOLE  # All rows or columns share the number.
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
    """Yields the blocks of a batch, for logits that differ by sentence.

    A block is some neighbouring sentences, of any length, and some neighbouring heads. Its logits are computed a *tile*
    at a time, which is some rows of all these sentences and heads.

    Args:
        lengths: The length of each sentence in tokens.
        num_heads: H.
        max_rows: The largest number of rows in a tile.
        max_heads: The largest number of heads in a block.
        causal: Whether a row sees only the columns up to its own.
    """
    # All blocks have the same number of sentences and heads. With these, even a tile of the longest sentences fits into
    # the caches of a core.
    block_size = choose_block_size(max(lengths), num_sentences=len(lengths), max_rows=max_rows, max_heads=max_heads)
    for sentences in split_range(len(lengths), block_size.sentences):  # slices, such as 0:4 and 4:8
        block_lengths = lengths[sentences]
        padding = find_padding(block_lengths)
        for heads in split_range(num_heads, block_size.heads):  # slices, too
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
    """Yields the blocks of a batch, for logits that all sentences share.

    A block is all neighbouring sentences of one length, and some neighbouring heads. fairseq sorts a batch by length,
    so that sentences of equal length are neighbours. For example, the lengths 7, 7, 7, 5, 5 give the sentences 0 to 2
    and 3 to 4. A tile contains some rows of all these heads, once for all sentences.

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
        # All sentences of the block have the same logits. A tile has them once, as if there were a single sentence.
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


class Plan(NamedTuple):
    """How `TiledAttention` computes a call: everything but the tensors."""

    blocks: list[Block]  # parts of the batch that together contain every sentence and head once
    bare_terms: list[Any]  # the terms that the logits are a sum of, with None in place of each tensor
    tensor_names: list[TensorName]  # where each tensor argument of `TiledAttention` belongs in the terms
    trained_names: list[TensorName]  # those of the tensors that need a gradient

    def complete_terms(self, tensor_arguments: Sequence[Tensor]) -> list[Term]:
        """Returns the terms with their tensors, which are given in the order of `tensor_names`."""
        tensors = dict(zip(self.tensor_names, tensor_arguments, strict=True))
        return insert_tensors(self.bare_terms, tensors)


def call_tiled_attention(blocks: list[Block], terms: Sequence[Term], value: Tensor) -> Tensor:
    """Returns ``softmax(S) V``, (B, H, T, d_h), computed by the autograd function `TiledAttention`.

    Autograd computes gradients only for tensors that are arguments of the function, and not for tensors inside of a
    term. So the tensors are taken out of the terms here, and `Plan.complete_terms` puts them back. The comments have
    the example of a single term, ``Product(query=q, key=k, scale=0.125)``.

    Args:
        blocks: Parts of the batch that together contain every sentence and head once.
        terms: The terms that the logits S are a sum of.
        value: V, (B, H, T, d_h).
    """
    tensors = collect_tensors(terms)  # {TensorName(0, "query"): q, TensorName(0, "key"): k}
    plan = Plan(
        blocks=blocks,
        bare_terms=[remove_tensors(term) for term in terms],  # Product(query=None, key=None, scale=0.125)
        tensor_names=list(tensors),
        trained_names=[name for name, tensor in tensors.items() if tensor.requires_grad],
    )
    tensor_arguments = [tensors[name] for name in plan.tensor_names]  # q, k
    out: Tensor = TiledAttention.apply(plan, value, *tensor_arguments)
    return out


class TiledAttention(torch.autograd.Function):
    """Computes ``softmax(S) V``, (B, H, T, d_h), and its gradients. It saves nothing but its inputs.

    S is a sum of terms, which contain tensors and numbers. torch gives gradients only to tensors that are arguments of
    their own. So the tensors are passed apart from the terms, and `Plan.complete_terms` puts both together again.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, value: Tensor, *tensor_arguments: Tensor) -> Tensor:
        """Returns ``softmax(S) V``, (B, H, T, d_h), computed block by block.

        Args:
            ctx: Where torch keeps what the backward pass needs.
            plan: How the call is divided into blocks, and the terms of S without their tensors.
            value: V, (B, H, T, d_h).
            tensor_arguments: The tensors of the terms, in the order of `Plan.tensor_names`.
        """
        ctx.plan = plan
        ctx.save_for_backward(value, *tensor_arguments)
        terms = plan.complete_terms(tensor_arguments)
        out = empty_like_values(value, plan.blocks)
        compute = functools.partial(compute_block, terms=terms, value=value)  # It runs in several threads.
        for block, block_out in compute_in_threads(compute, plan.blocks):
            block.write(out, block_out)
            del block_out  # It would need memory while that of the next block is computed.
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Returns a gradient for each argument of `forward` but `ctx`: the plan, the values, and each tensor argument.

        The gradient is None for an argument that needs no gradient.

        Args:
            ctx: What `forward` has kept.
            grad_out: The gradient of the output, (B, H, T, d_h).
        """
        plan = ctx.plan
        value, *tensor_arguments = ctx.saved_tensors  # in the order in which `forward` has saved them
        terms = plan.complete_terms(tensor_arguments)
        gradients = differentiate_blocks(plan.blocks, terms, plan.trained_names, value, grad_out)

        # torch assigns the gradients by position: to the plan, the values, and the tensors in order of their names.
        grad_plan = None  # The plan is no tensor.
        grad_tensor_arguments = []
        for name in plan.tensor_names:
            grad = gradients.tensors.get(name)  # None if the tensor is not trained
            grad_tensor_arguments.append(grad)
        return (grad_plan, gradients.value, *grad_tensor_arguments)


def empty_like_values(value: Tensor, blocks: Sequence[Block]) -> Tensor:
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


# ---- the forward pass


def compute_block(block: Block, terms: Sequence[Term], value: Tensor) -> Tensor:
    """Returns ``softmax(S) V`` for some sentences and heads of the batch, computed a few rows at a time.

    The result is (sentences, heads, tokens, features), like the result of `Block.read`. There are three levels:

        batch                               terms           value
        block: some sentences and heads     block_normal    block_value      block_out
        tile: some rows of the block        tile_normal     visible_value    tile_out

    A normal form is the sum of all terms as ``query @ key^T + left (x) right + bias``, which takes less memory than the
    logits. The logits themselves are only computed for a tile.

    Args:
        block: Which sentences and heads.
        terms: The terms that the logits S are a sum of, for the whole batch.
        value: The values V of the whole batch, (B, H, T, d_h).
    """
    # From the batch to the block.
    block_terms = block.cut_terms(terms)
    block_normal = block.normal_form(block_terms)
    block_value = block.read(value)  # (sentences, heads, tokens, features)
    block_out = torch.empty_like(block_value)
    for tile in block.tiles():
        # From the block to the tile: the query of the tile's rows, for example, and the key of its columns. Under the
        # causal mask, the columns are only those up to the last row.
        tile_normal = tile.cut_normal_form(block_normal)
        visible_value = block_value[:, :, tile.columns]
        # Columns that a row may not see, because of padding or the causal mask, have the weight 0.
        weights = tile_weights(tile_normal, tile, block)  # (sentences, heads, rows, columns)
        tile_out = torch.matmul(weights.to(value.dtype), visible_value)
        block_out[:, :, tile.rows] = tile_out
    return block_out


def tile_weights(tile_normal: NormalForm, tile: Tile, block: Block) -> Tensor:
    """Returns the attention weights of a tile, (sentences, heads, rows, columns), in fp32 or fp64.

    Columns that a row may not see have the weight 0.

    Args:
        tile_normal: The logits of the tile, as ``query @ key^T + left (x) right + bias``.
        tile: Some rows of the block, and the columns that they see.
        block: Some sentences and heads of the batch.
    """
    scores = writable_scores(tile_normal, tile, block)
    hide_columns_(scores, tile, block)
    return torch.softmax(scores, dim=-1)


def hide_columns_(scores: Tensor, tile: Tile, block: Block) -> None:
    """Makes the logits of a tile minus infinity, in place, where a row may not see a column.

    Autograd does not record this, and the gradients are right all the same: a hidden logit gets the weight 0, and the
    gradient of softmax is 0 where the weight is 0.

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
    """Makes logits of a tile minus infinity, in place, if their column comes after their row.

    For example, a tile with the rows 2 and 3 has the columns 0 to 3. The columns 0 and 1 are visible to both rows. Only
    in the last columns, which have the same numbers as the rows, some logits are hidden.
    """
    num_rows = tile.rows.stop - tile.rows.start
    last_columns = scores[..., tile.rows]
    last_columns += future_mask(num_rows, scores)


def hide_padding_(scores: Tensor, hidden: Tensor) -> None:
    """Makes the logits of padding minus infinity, in place. `hidden`: `Block.hidden`, for the last columns only."""
    num_last_columns = hidden.shape[1]
    last_columns = scores[..., -num_last_columns:]
    last_columns.masked_fill_(hidden[:, None, None], float("-inf"))


def writable_scores(tile_normal: NormalForm, tile: Tile, block: Block) -> Tensor:
    """Returns the logits of a tile, (sentences, heads, rows, columns), in memory that nothing else uses.

    So the masks can be applied in place.

    Args:
        tile_normal: The logits of the tile, as ``query @ key^T + left (x) right + bias``.
        tile: Some rows of the block, and the columns that they see.
        block: Some sentences and heads of the batch.
    """
    num_heads = block.heads.stop - block.heads.start
    num_rows = tile.rows.stop - tile.rows.start
    num_columns = tile.columns.stop - tile.columns.start
    scores = at_least_fp32(tile_normal.total(num_columns))  # (sentences, heads or 1, rows or 1, columns)

    is_repeated = scores.shape[1] != num_heads or scores.shape[2] != num_rows
    if is_repeated:
        # `expand` repeats the only head or row without memory, and `clone` gives each repetition memory of its own.
        return scores.expand(-1, num_heads, num_rows, -1).clone()
    has_product = tile_normal.query is not None or tile_normal.left is not None
    if has_product:
        return scores  # `total` has computed the product, in new memory.
    return scores.clone()  # The logits are a bias, which may be a view of a parameter.


# ---- The backward pass. Gradients flow from the output to the normal form of a block, a tile at a time
# ---- (`differentiate_tiles`), from there to the block's parts of the tensors of the terms
# ---- (`differentiate_normal_form`), and from all blocks to the tensors of the whole batch (`differentiate_blocks`).


class Gradients(NamedTuple):
    """The gradients of the values and of the tensors of the terms, either for the whole batch or for one block."""

    value: Tensor  # for one block, it is laid out as `Block.read` returns the values
    tensors: dict[TensorName, Tensor]  # those of `Plan.trained_names`


def differentiate_blocks(
    blocks: Sequence[Block],
    terms: Sequence[Term],
    trained_names: Sequence[TensorName],
    value: Tensor,
    grad_out: Tensor,
) -> Gradients:
    """Returns the gradients for the whole batch, put together from the gradients of its blocks.

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
    differentiate = functools.partial(
        differentiate_block, terms=terms, trained_names=trained_names, value=value, grad_out=grad_out
    )
    # `differentiate` runs in several threads. The body of the loop runs in this thread alone, for one block after
    # another, so that the sums are always rounded in the same way.
    for block, block_gradients in compute_in_threads(differentiate, blocks):
        # Each of the values is in one block only, which has its whole gradient.
        block.write(grad_value, block_gradients.value)
        # A tensor of a term, such as a bias for all sentences, may be in several blocks, whose gradients add up.
        for name in trained_names:
            part_of_sum = block.cut(grad_sums[name], name.field)  # a view: adding to it changes the sum
            part_of_sum.add_(block_gradients.tensors[name])
        del block_gradients  # They would need memory while those of the next block are computed.

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
    """Returns the gradients of a block's values, and of the block's parts of the tensors of the terms.

    The forward pass has two steps. First, the terms are added up, and the sum is a `NormalForm`. Then the output is
    computed from the normal form and the values. The gradients are passed back through these steps in reverse order.

    Args:
        block: Some sentences and heads of the batch.
        terms: The terms of the logits, for the whole batch.
        trained_names: The names of the terms' tensors that need a gradient.
        value: The values of the whole batch, (B, H, T, d_h).
        grad_out: The gradient of the output, of the same size.
    """
    block_value = block.read(value)  # (sentences, heads, tokens, features)
    block_grad_out = block.read(grad_out)  # (sentences, heads, tokens, features)
    # The first step is computed again, and autograd records it.
    recorded = record_normal_form(block, terms, trained_names)
    # Back through the second step: from the output to the values and the normal form.
    grad_value, grad_normal = differentiate_tiles(block, recorded.normal, block_value, block_grad_out)
    # Back through the first step: from the normal form to the tensors of the terms.
    grad_tensors = differentiate_normal_form(recorded, grad_normal)
    return Gradients(grad_value, grad_tensors)


def new_leaf(tensor: Tensor) -> Tensor:
    """Returns a *leaf* of autograd: a view of the tensor at which autograd's record begins.

    Gradients of whatever is computed from the leaf are passed back to the leaf, and no further.
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
        leaves: {name: a leaf (`new_leaf`)}, at least one. The outputs depend on each of them.
        outputs: Tensors that have been computed from the leaves while autograd recorded it.
        grad_outputs: The gradient of each output, in the order of `outputs`, in any type.
    """
    # Autograd wants the gradient of an output in the output's type.
    grads_in_type = [grad.to(output.dtype) for output, grad in zip(outputs, grad_outputs, strict=True)]
    grads = torch.autograd.grad(outputs, inputs=list(leaves.values()), grad_outputs=grads_in_type)
    return dict(zip(leaves, grads, strict=True))  # Autograd returns a gradient for each of the inputs, in their order.


class RecordedNormalForm(NamedTuple):
    """A block's normal form, ``query @ key^T + left (x) right + bias``, whose computation autograd has recorded."""

    normal: NormalForm
    # Where the record begins: a leaf for the block's part of each tensor that needs a gradient.
    leaves: dict[TensorName, Tensor]


def record_normal_form(block: Block, terms: Sequence[Term], trained_names: Sequence[TensorName]) -> RecordedNormalForm:
    """Computes the normal form of a block again. Autograd records how it depends on the trained tensors of the terms.

    The record begins at *leaves*, which are the block's parts of the trained tensors. Later,
    `differentiate_normal_form` passes gradients from the normal form back to the leaves.

    Args:
        block: Some sentences and heads of the batch.
        terms: The terms of the logits, for the whole batch.
        trained_names: The names of the terms' tensors that need a gradient.
    """
    block_terms = block.cut_terms(terms)
    block_tensors = collect_tensors(block_terms)
    leaves = {name: new_leaf(block_tensors[name]) for name in trained_names}
    block_terms = insert_tensors(block_terms, leaves)
    with torch.enable_grad():  # In a backward pass, nothing is recorded without this.
        normal = block.normal_form(block_terms)
    return RecordedNormalForm(normal, leaves)


def differentiate_normal_form(
    recorded: RecordedNormalForm, grad_normal: Mapping[str, Tensor]
) -> dict[TensorName, Tensor]:
    """Returns the gradients of the block's parts of the trained tensors, which are the leaves of the record.

    Args:
        recorded: The block's normal form, ``query @ key^T + left (x) right + bias``, and the leaves that it depends on.
        grad_normal: {field of `NormalForm`: its gradient}, for each field that depends on a leaf.
    """
    if not recorded.leaves:
        return {}
    normal_tensors = recorded.normal.tensors()
    fields = list(grad_normal)
    return gradients_of_leaves(
        recorded.leaves,
        outputs=[normal_tensors[field] for field in fields],
        grad_outputs=[grad_normal[field] for field in fields],
    )


class NormalFormGradients(NamedTuple):
    """The gradients of a block's values and of its normal form, ``query @ key^T + left (x) right + bias``."""

    value: Tensor  # laid out as `Block.read` returns the values
    normal: dict[str, Tensor]  # {field of `NormalForm`: its gradient}, for the fields that need one


def differentiate_tiles(block: Block, normal: NormalForm, value: Tensor, grad_out: Tensor) -> NormalFormGradients:
    """Returns the gradients of a block's values and of its normal form, computed tile by tile.

    A tile is some rows of the block, and the columns that they see. Both gradients are sums over the tiles.

    Args:
        block: Some sentences and heads of the batch.
        normal: The logits of the block, as ``query @ key^T + left (x) right + bias``. A tensor of it that needs a
            gradient has ``requires_grad``.
        value: The block's values as `Block.read` returns them, (sentences, heads, tokens, features).
        grad_out: The gradient of the block's output, of the same size.
    """
    trained = {field: tensor for field, tensor in normal.tensors().items() if tensor.requires_grad}
    tiles = block.tiles()
    if len(tiles) == 1:
        # This tile is the whole block, so that its gradients are those of the block. It is so for most short sentences.
        (only_tile,) = tiles
        recorded = record_weights(only_tile, block, normal, trained_fields=list(trained))
        return NormalFormGradients(
            value=differentiate_output(recorded.weights, grad_out),
            normal=differentiate_weights(recorded, grad_out, value),
        )
    grad_value = torch.zeros_like(value)
    grad_normal = {field: zeros_for_sum(tensor) for field, tensor in trained.items()}
    # In another order, the sums would be rounded in another way, and a training with the same seed would have another
    # result.
    for tile in reversed(tiles):
        # The forward pass has not kept the weights of the tile, so they are computed again.
        recorded = record_weights(tile, block, normal, trained_fields=list(trained))
        tile_grad_out = grad_out[:, :, tile.rows]  # (sentences, heads, rows, features)
        # Each of the two changes the sums that are its first argument.
        add_value_gradient_(grad_value, recorded.weights, tile_grad_out, tile)
        add_normal_form_gradients_(grad_normal, recorded, tile_grad_out, value, tile)
    return NormalFormGradients(value=grad_value, normal=grad_normal)


class RecordedWeights(NamedTuple):
    """The attention weights of a tile, whose computation autograd has recorded."""

    weights: Tensor  # (sentences, heads, rows, columns)
    # Where the record begins: {field of `NormalForm`: a leaf for the tile's part of it}, for the fields that need a
    # gradient.
    leaves: dict[str, Tensor]


def record_weights(tile: Tile, block: Block, normal: NormalForm, trained_fields: Sequence[str]) -> RecordedWeights:
    """Computes the attention weights of a tile again. Autograd records how they depend on the normal form.

    The record begins at *leaves*, which are the tile's parts of the trained fields of the normal form. Later,
    `differentiate_weights` passes gradients from the weights back to the leaves.

    Args:
        tile: Some rows of the block, and the columns that they see.
        block: Some sentences and heads of the batch.
        normal: The logits of the block, as ``query @ key^T + left (x) right + bias``.
        trained_fields: The fields of `normal` that need a gradient, such as "query".
    """
    tile_normal = tile.cut_normal_form(normal)
    tile_tensors = tile_normal.tensors()
    leaves = {field: new_leaf(tile_tensors[field]) for field in trained_fields}
    tile_normal = tile_normal._replace(**leaves)
    with torch.enable_grad():  # In a backward pass, nothing is recorded without this.
        weights = tile_weights(tile_normal, tile, block)
    return RecordedWeights(weights, leaves)


def differentiate_output(weights: Tensor, grad_out: Tensor) -> Tensor:
    """Returns the gradient of the values, (sentences, heads, columns, features), from that of ``weights @ values``.

    Args:
        weights: The attention weights, (sentences, heads, rows, columns).
        grad_out: The gradient of the output, (sentences, heads, rows, features).
    """
    weights_transposed = weights.to(grad_out.dtype).transpose(2, 3)  # (sentences, heads, columns, rows)
    return torch.matmul(weights_transposed, grad_out)


def add_value_gradient_(grad_value: Tensor, weights: Tensor, tile_grad_out: Tensor, tile: Tile) -> None:
    """Adds a tile's part of the gradient of a block's values, ``weights^T @ tile_grad_out``, to `grad_value` in place.

    Args:
        grad_value: The sum over the tiles so far, (sentences, heads, length, features), in contiguous memory.
        weights: The attention weights of the tile, (sentences, heads, rows, columns).
        tile_grad_out: The gradient of the tile's rows of the output, (sentences, heads, rows, features).
        tile: The tile. The rows of `grad_value` that belong to its columns are changed.
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
    recorded: RecordedWeights,
    tile_grad_out: Tensor,
    value: Tensor,
    tile: Tile,
) -> None:
    """Adds a tile's part of the gradients of the block's normal form to `grad_normal` in place.

    For example, the tile's gradient of the query is added to the tile's rows of ``grad_normal["query"]``, and that of
    the key to the tile's columns of ``grad_normal["key"]``.

    Args:
        grad_normal: {field of `NormalForm`: the sum of its gradients so far, for the whole block}.
        recorded: The attention weights of the tile.
        tile_grad_out: The gradient of the tile's rows of the output, (sentences, heads, rows, features).
        value: The values of the block, (sentences, heads, length, features).
        tile: The tile, whose rows and columns of the sums are changed.
    """
    visible_value = value[:, :, tile.columns]
    tile_gradients = differentiate_weights(recorded, tile_grad_out, visible_value)
    for field, tile_grad in tile_gradients.items():
        part_of_sum = tile.cut(grad_normal[field], field)  # a view: adding to it changes the sum
        part_of_sum.add_(tile_grad)


def differentiate_weights(recorded: RecordedWeights, tile_grad_out: Tensor, visible_value: Tensor) -> dict[str, Tensor]:
    """Returns {field of `NormalForm`: the gradient of the tile's part of it}, for the fields that need one.

    The forward pass computes the weights from the normal form, and then ``weights @ visible_value``, the output of the
    tile. The gradient goes the other way.

    Args:
        recorded: The attention weights of the tile, and the tile's parts of the normal form that they depend on.
        tile_grad_out: The gradient of the tile's rows of the output, (sentences, heads, rows, features).
        visible_value: The values of the tile's columns, (sentences, heads, columns, features).
    """
    if not recorded.leaves:
        return {}
    # From the output to the weights.
    grad_weights = torch.matmul(tile_grad_out, visible_value.transpose(2, 3))  # (sentences, heads, rows, columns)
    # From the weights to the normal form.
    return gradients_of_leaves(recorded.leaves, outputs=[recorded.weights], grad_outputs=[grad_weights])
