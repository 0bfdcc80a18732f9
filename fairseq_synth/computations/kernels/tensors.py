"""The tensors of a call as the kernels read them.

A kernel reads each tensor in one way only, which `arguments.CallTensors` describes. Projections, parameters and weights
reach a computation as views of such tensors. Where a view lies as expected, the kernels read the tensor behind it and
give that tensor its gradient, so that nothing is sliced, joined or padded. Every other tensor is copied.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...logits import Bias, Diagonals, Logits, Outer, Product, Term
from ...positions import take_positions
from ...tensors import in_type
from .arguments import SUMMANDS, CallTensors, WeightRows
from .launches import Layout, divide_up

# Up to so many rows R1 R2^T is computed whole: to slice R1 and R2 first would add a launch for each slice's gradient.
MAX_ROWS_UNSLICED = 512
# The memory of each tensor has to begin at a multiple of so many bytes, as the kernels are compiled to expect.
ALIGNMENT = 16


class Summands:
    """The terms of logits, sorted by the summand of the kernels that they are; see `arguments`."""

    def __init__(self) -> None:
        self.product: list[Product] = []  # queries and keys both differ by sentence
        self.dense: list[Product] = []  # only the keys are shared by all sentences
        self.outer: list[Outer] = []
        self.bias_row: list[Bias] = []
        self.matrix: list[Product | Bias | Diagonals] = []  # shared by all sentences; several ones are added up
        self.others: list[Product | Bias] = []  # the kernels have no summand for these

    def reason_to_refuse(self) -> str:
        """Returns why the kernels cannot take these summands; an empty string if they can."""
        if self.others:
            return "a bias differs by sentence, or all sentences share the queries of a product but not its keys"
        if max(len(self.product), len(self.dense), len(self.outer), len(self.bias_row)) > 1:
            return "there are two summands of one kind"
        if self.product and not (self.dense or self.outer or self.bias_row or self.matrix):
            return "there is only an inner product, which torch's fused attention computes"
        return ""


class Call(NamedTuple):
    """A call of the attention, and what the kernels read for it."""

    logits: Logits
    value: Tensor
    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    layout: Layout
    tensors: CallTensors


def find_summands(logits: Logits, value: Tensor) -> Summands:
    """Returns what `sort_terms` returns, but sorts the terms only once.

    Each call of the attention needs the summands twice, to find out whether the kernels take it, and to compute it.
    """
    summands: Summands | None = logits.sorted_terms
    if summands is None:
        summands = sort_terms(logits, value)
        logits.sorted_terms = summands
    return summands


def sort_terms(logits: Logits, value: Tensor) -> Summands:
    """Returns the terms of the logits S, each in the list of the summand that it is.

    The kernels compute S as a sum of five summands (see `arguments`). A term that is none of them is in ``others``. To
    find the summand of a term, one has to know which of its tensors are shared by all sentences of the batch. Their
    first dimension has the size 1, and not B.

    Args:
        logits: S.
        value: V, (B, H, T, d_h), whose sizes tell how many sentences and rows there are.
    """
    bsz, _, length, _ = value.size()
    summands = Summands()
    summands.outer.extend(logits.outers)
    summands.matrix.extend(logits.diagonals)  # all sentences share them
    if bsz == 1:  # this size is always 1 then, and tells nothing
        append_products_of_one_sentence(summands, logits.products)
    else:
        append_products(summands, logits.products)
    for term in logits.biases:
        num_sentences, _, num_rows, _ = term.bias.size()
        if num_sentences > 1:
            summands.others.append(term)  # each sentence has a bias of its own
        elif num_rows < length:
            summands.bias_row.append(term)  # it has 1 row, for all T rows of S
        else:
            summands.matrix.append(term)  # it has T rows; with T = 1, either would be right
    return summands


def append_products(summands: Summands, products: Sequence[Product]) -> None:
    """Appends each product of a batch of several sentences to the list of the summand that it is."""
    for product in products:
        is_query_shared = product.query.shape[0] == 1  # all sentences have the same queries
        is_key_shared = product.key.shape[0] == 1
        if is_query_shared and is_key_shared:
            summands.matrix.append(product)  # as in factorized random, where R1 R2^T is the same for all sentences
        elif is_query_shared:
            summands.others.append(product)  # as in no function of the paper
        elif is_key_shared:
            summands.dense.append(product)  # as in dense, where W2 takes the place of the keys
        else:
            summands.product.append(product)  # as in vanilla


def append_products_of_one_sentence(summands: Summands, products: Sequence[Product]) -> None:
    """Appends each product of a batch of a single sentence to the list of a summand.

    With one sentence, the sizes do not tell which queries and keys are shared by all sentences. It does not matter,
    either: each of the summands ``product``, ``dense`` and ``matrix`` computes any product of one sentence. But the
    first two take only one product each.
    """
    remaining = list(products)
    if remaining:
        # If a mixture has ``vanilla``, its product is the last one. Only the summand ``product`` reads its queries and
        # keys, which are parts of a projection, without a copy.
        last_product = remaining.pop()
        summands.product.append(last_product)
    if remaining:
        next_to_last_product = remaining.pop()
        summands.dense.append(next_to_last_product)
    summands.matrix.extend(remaining)


# ---- the tensors and the layout of a call


class PackedProjections(NamedTuple):
    """Values, and the queries and keys of the summand `product` if it occurs, in one tensor."""

    packed: Tensor
    query_width: int
    scale: float


class DenseProduct(NamedTuple):
    """The tensors of the summand `dense`; those of `NO_DENSE_PRODUCT` if it does not occur."""

    query: Any
    key: Any
    key_rows: int
    width: int


class OuterProduct(NamedTuple):
    """The factors of the summand `outer`; those of `NO_OUTER_PRODUCT` if it does not occur."""

    factors: Any
    left_width: int
    right_width: int


class SharedTensor(NamedTuple):
    """A tensor that all sentences share, as the kernels read it: usually a parameter. `NOTHING` stands for none.

    It may have more rows and columns than the sentences need. The kernels read the first ones of each head.
    """

    tensor: Any  # contiguous: (H, rows, columns), or (H, columns) with one row for each head
    rows: int
    columns: int
    is_by_distance: bool = False  # the columns are values by distance


class Weights(NamedTuple):
    """The weights of a mixture, and which row is the weight of which summand. Without weights it is `NO_WEIGHTS`."""

    tensor: Any  # (M, H)
    rows: WeightRows
    num_rows: int  # M


NO_DENSE_PRODUCT = DenseProduct(query=None, key=None, key_rows=0, width=0)
NO_OUTER_PRODUCT = OuterProduct(factors=None, left_width=0, right_width=0)
NOTHING = SharedTensor(tensor=None, rows=0, columns=0)
NO_WEIGHTS = Weights(tensor=None, rows=WeightRows(), num_rows=0)


def prepare_call(
    logits: Logits,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    dropout: float,
) -> Call:
    """Returns the tensors of a call that the kernels take, and the layout of the call.

    The arguments are those of `computations.attend`. The kernels must not refuse the call (`kernels.refuses`).
    """
    bsz, heads, length, value_width = value.size()
    summands = find_summands(logits, value)
    # Only the matrix may have more than one term.
    projections = pack_projections(summands.product, value)
    dense = read_dense_product(summands.dense[0], value) if summands.dense else NO_DENSE_PRODUCT
    outer = read_outer_product(summands.outer[0], value) if summands.outer else NO_OUTER_PRODUCT
    bias_row = find_or_copy(summands.bias_row[0].bias, heads) if summands.bias_row else NOTHING
    matrix = read_matrix(summands.matrix, heads, length) if summands.matrix else NOTHING
    weights = read_weights(summands, heads)
    hidden = None
    if key_padding_mask is not None:
        hidden = in_type(key_padding_mask, torch.bool).contiguous().view(torch.uint8)  # the kernels take no booleans
    # ``CallTensors(...)`` and ``Layout(...)`` would do, but take longer than a view of a tensor: if a class is called,
    # Python first writes the keywords into a dictionary.
    tensors = CallTensors.__new__(
        CallTensors,
        packed=projections.packed,
        dense_query=dense.query,
        dense_key=dense.key,
        factors=outer.factors,
        bias_row=bias_row.tensor,
        matrix=matrix.tensor,
        weights=weights.tensor,
        hidden=hidden,
    )
    dtypes: dict[str, torch.dtype] = {}
    wanted: list[str] = []
    are_aligned = True
    for name, tensor in zip(CallTensors._fields, tensors):
        if tensor is None:
            continue
        dtypes[name] = tensor.dtype
        if tensor.requires_grad:
            wanted.append(name)
        if tensor.data_ptr() % ALIGNMENT != 0:
            are_aligned = False
    if not are_aligned:
        tensors = CallTensors(*align_memory(tensors))
    layout = Layout.__new__(
        Layout,
        device=value.device,
        dtypes=CallTensors(**dtypes),
        wanted=tuple(wanted),
        length=length,
        bsz=bsz,
        num_heads=heads,
        value_width=value_width,
        is_causal=attn_mask is not None,
        has_dropout=dropout > 0,
        dropout=dropout,
        query_width=projections.query_width,
        scale=projections.scale,
        dense_width=dense.width,
        dense_key_rows=dense.key_rows,
        left_width=outer.left_width,
        right_width=outer.right_width,
        bias_row_columns=bias_row.columns,
        matrix_rows=matrix.rows,
        matrix_columns=matrix.columns,
        is_by_distance=matrix.is_by_distance,
        number_of_weights=weights.num_rows,
        weight_rows=weights.rows,
    )
    return Call(logits, value, key_padding_mask, attn_mask, layout, tensors)


def pack_projections(products: list[Product], value: Tensor) -> PackedProjections:
    """Returns the values, together with the queries and keys of the summand ``product`` if it occurs.

    Args:
        products: The terms that are this summand: none or one.
        value: (B, H, T, d_h).
    """
    if not products:
        packed = pack([], value)
        return PackedProjections(packed, query_width=0, scale=1.0)
    (product,) = products
    packed = pack([product.query, product.key], value)
    query_width = product.query.shape[3]
    return PackedProjections(packed, query_width, product.scale)


def read_dense_product(product: Product, value: Tensor) -> DenseProduct:
    """Returns the queries and the keys of the summand ``dense``, as the kernels read them.

    Its keys are usually the first T rows of a parameter (H, rows, r). Then they are not copied: the kernels are given
    the whole parameter and the number of its rows, and read its first T rows in each head.

    Args:
        product: The product. Its query is (B or 1, H or 1, T, r), its key (1, H or 1, T, r).
        value: (B, H, T, d_h).
    """
    bsz, heads, _, _ = value.size()
    query = product.query
    if product.scale != 1.0:
        query = query * product.scale  # the kernels have no scale for this summand
    query_by_head = order_by_head(query, bsz, heads, value.dtype)  # (H, T, B, r)
    keys = find_rows_or_copy(product.key, heads)  # the parameter; or a copy of the keys, which has just T rows
    return DenseProduct(
        query=query_by_head,
        key=keys.tensor,
        key_rows=keys.rows,  # rows in each head, at least T
        width=keys.columns,  # r
    )


def read_outer_product(outer: Outer, value: Tensor) -> OuterProduct:
    """Returns the two factors of the summand ``outer``, as the kernels read them.

    In a long sentence, the left factor has to be repeated. The kernels do not do this, so it is done here.

    Args:
        outer: The outer product. Its tensor ``factors`` has the left factor, and behind it the right factor.
        value: (B, H, T, d_h).
    """
    bsz, heads, length, _ = value.size()
    repeated = repeat_left_factor(outer, num_columns=length)
    left_width = repeated.left_size
    right_width = repeated.factors.shape[3] - left_width
    factors_by_head = order_by_head(repeated.factors, bsz, heads, value.dtype)  # (H, T, B, left_width + right_width)
    return OuterProduct(factors_by_head, left_width=left_width, right_width=right_width)


def read_matrix(terms: list[Product | Bias | Diagonals], heads: int, length: int) -> SharedTensor:
    """Returns the matrix R that the kernels read, for the terms that are the same for all sentences.

    The kernels compute ``weight * R``, with one weight for each head, or with no weight:

    - A single term is R, and its weight is the weight.
    - Several terms may have different weights. So R is their weighted sum, and there is no weight (`find_weights`).

    Returns:
        a tensor of which the kernels read the first T rows and columns of each head; see `SharedTensor`.
    """
    if len(terms) > 1:
        return add_up(terms, heads, length)
    (term,) = terms
    if isinstance(term, Bias):  # a matrix, as in random
        return find_or_copy(term.bias, heads)
    if isinstance(term, Diagonals):  # a value for each distance
        return read_distances(term.values, heads, length)
    return multiply_parameters(term, heads, length)  # R1 R2^T, as in factorized random


def add_up(terms: list[Product | Bias | Diagonals], heads: int, length: int) -> SharedTensor:
    """Returns the sum of terms, each multiplied by its weight if it has one, as a matrix (H, length, length)."""
    return find_or_copy(Logits(terms).total(length), heads)


def multiply_parameters(term: Product, heads: int, length: int) -> SharedTensor:
    """Returns a matrix that begins with ``scale * R1 R2^T`` in each head. The kernels multiply it by the term's weight.

    R1 and R2 are usually the first rows of parameters, for example 10 of 256 rows for a sentence of 10 tokens. If
    possible, all rows of the parameters are multiplied, and the kernels read the first 10 rows and columns of the
    result. This is faster, because neither the parameters nor their gradients have to be sliced. Otherwise, R1 and R2
    are multiplied as they are.

    Args:
        term: The product of R1 (the query) and R2 (the key), (1, H or 1, length, k) each.
        heads: H.
        length: T.
    """
    # The parameters (H, 256, k) that R1 and R2 are the first rows of; or copies (H, 10, k) if there are none.
    left = find_rows_or_copy(term.query, heads)
    right = find_rows_or_copy(term.key, heads)
    has_scale = term.scale != 1.0  # bmm has none
    if not has_scale and can_multiply_all_rows(left, right):
        matrix = torch.bmm(left.tensor, right.tensor.transpose(1, 2))  # (H, 256, 256)
        return SharedTensor(matrix, rows=left.rows, columns=right.rows)
    term_without_weight = term.with_weight(None)  # or the weight would be multiplied twice, here and by the kernels
    return add_up([term_without_weight], heads, length)  # (H, 10, 10)


def can_multiply_all_rows(left: SharedTensor, right: SharedTensor) -> bool:
    """Returns whether a single `torch.bmm` computes the product of all rows of two tensors, without taking long."""
    if left.rows > MAX_ROWS_UNSLICED or right.rows > MAX_ROWS_UNSLICED:
        return False  # most of the product may be for nothing
    # bmm takes tensors (H, rows, k). A parameter with a single row for each head may be (H, k).
    return left.tensor.dim() == 3 and right.tensor.dim() == 3


# ---- views of larger tensors
#
# torch keeps the tensor that a view is made of in the view's attribute `_base`. No public attribute has it. The first
# element of a view is ``view.storage_offset() - base.storage_offset()`` elements behind the first one of its base.


def can_replace_views(base: Tensor, views: Sequence[Tensor]) -> bool:
    """Returns whether the kernels may read the tensor `base` in place of tensors that may be views of it.

    The kernels then give a gradient to `base`, but none to the views. This is right for a view such as ``base[:, :5]``,
    which has numbers of `base` and only passes its gradient on to `base`. Which numbers they are is for the caller to
    find out.
    """
    if not base.is_contiguous():
        return False  # the kernels compute addresses from sizes, and know no strides
    dtype = base.dtype
    requires_grad = base.requires_grad
    for view in views:
        if view._base is not base or view.dtype != dtype:
            return False  # the view has other numbers, as ``base.view(torch.int16)`` has
        if requires_grad and view.is_leaf:
            # A leaf passes no gradient on to the base. Either it keeps its gradient for itself, as
            # ``base.detach().requires_grad_()``, or it has none, as ``base.detach()``.
            return False
        if view.requires_grad and not requires_grad:
            return False  # the base has no gradient, but the view has, as ``base[:, :5].requires_grad_()``
        if view._backward_hooks or view.retains_grad:
            return False  # the user reads the gradient of the view, by ``register_hook`` or ``retain_grad``
    return True


def pack(queries_and_keys: list[Tensor], value: Tensor) -> Tensor:
    """Returns a contiguous tensor (T, B, features) in which queries, keys and values of a token lie side by side.

    If the attention has computed them by one projection, its result is such a tensor, and they are views of it. Then
    this result is returned. Otherwise they are copied to a new tensor.

    Args:
        queries_and_keys: Queries and keys, (B or 1, H or 1, T, d) each; or nothing, for a tensor of the values alone.
        value: (B, H, T, d_h). Its type is that of the result.
    """
    projection = value._base  # torch's name for the tensor that the values are a view of; None if they are no view
    if projection is not None and are_side_by_side([*queries_and_keys, value], value, projection):
        return projection
    return copy_side_by_side(queries_and_keys, value)


def copy_side_by_side(queries_and_keys: list[Tensor], value: Tensor) -> Tensor:
    """Returns what `pack` returns, but never the result of a projection.

    Values alone are not copied if they lie as wanted already.

    Args:
        queries_and_keys, value: As in `pack`.
    """
    bsz, heads, _, _ = value.size()
    values_by_token = order_by_token(value, bsz, heads)  # (T, B, H d_h)
    if not queries_and_keys:
        return values_by_token.contiguous()
    parts = [order_by_token(part.to(value.dtype), bsz, heads) for part in queries_and_keys]  # (T, B, H d) each
    return torch.cat([*parts, values_by_token], dim=2)


def order_by_token(x: Tensor, bsz: int, heads: int) -> Tensor:
    """Returns queries, keys or values (B or 1, H or 1, T, d) in the order of `pack`, (T, B, H d).

    If all sentences or heads share x, the result has it for each of them.
    """
    expanded = x.expand(bsz, heads, -1, -1)  # (B, H, T, d)
    by_token = expanded.permute(2, 0, 1, 3)  # (T, B, H, d)
    return by_token.flatten(2)


def are_side_by_side(parts: list[Tensor], value: Tensor, base: Tensor) -> bool:
    """Returns whether `base` already is the tensor (T, B, features) that `pack` would copy the parts to.

    Then `base` has a row of features for each token of each sentence. For example, with 2 heads of 4 features each, and
    3 sentences:

        place    0         4         8       12      16        20        24
        row 0    query 0 | query 1 | key 0 | key 1 | value 0 | value 1     of token 0 of sentence 0
        row 1    query 0 | query 1 | key 0 | key 1 | value 0 | value 1     of token 0 of sentence 1
        row 2    ...                                                       of token 0 of sentence 2
        row 3    ...                                                       of token 1 of sentence 0

    Args:
        parts: The queries and keys, if there are any, and the values.
        value: The values, (B, H, T, d_h).
        base: The tensor that the values are a view of. It may have other sizes, such as (T B, features).
    """
    bsz, heads, length, _ = value.size()
    features = base.numel() // (length * bsz)  # 24: the numbers in a row
    begin_of_base = base.storage_offset()
    # How many places it is from a number to the same number of the next sentence, and of the next token.
    next_sentence = features  # a row later
    next_token = bsz * features  # 3 rows later
    place = 0  # where the next part has to begin: the queries at place 0, the keys at 8, the values at 16
    for part in parts:
        part_bsz, part_heads, _, width = part.size()  # a width of 4
        if part_bsz != bsz or part_heads != heads:
            return False  # all sentences or heads share the part, and it has to be repeated for each of them
        if part.storage_offset() - begin_of_base != place:
            return False
        next_head = width  # 4 places later
        if part.stride() != (next_sentence, next_head, next_token, 1):  # the next feature is 1 place later
            return False
        place += heads * width
    if place != features:
        return False  # `base` has other features behind the parts
    # So far, the parts might still be views of another tensor, or views that autograd treats differently.
    return can_replace_views(base, parts)


def order_by_head(x: Tensor, bsz: int, heads: int, dtype: torch.dtype) -> Tensor:
    """Returns a factor (B or 1, H or 1, T, r) as a contiguous tensor (H, T, B, r) of a type."""
    by_head = x.to(dtype).permute(1, 2, 0, 3)
    if by_head.shape[0] != heads or by_head.shape[2] != bsz:
        by_head = by_head.expand(heads, -1, bsz, -1)
    return by_head.contiguous()


def repeat_left_factor(outer: Outer, num_columns: int) -> Outer:
    """Returns an outer product whose left factor is long enough for some number of columns.

    An outer product has a column for each pair of a left and a right feature. For example, 3 left and 4 right features
    give 12 columns. A sentence of 18 tokens needs 18 columns and 5 left features, as 5 * 4 is at least 18. They are
    0 1 2 0 1: after the last left feature, the first one follows again.

    Args:
        outer: The outer product. Its tensor `factors` has the left features, and behind them the right ones.
        num_columns: The number of columns.
    """
    left_size = outer.left_size
    right_size = outer.factors.shape[3] - left_size
    needed_left_size = divide_up(num_columns, right_size)
    if needed_left_size <= left_size:
        return outer
    left, right = outer.factors.split([left_size, right_size], dim=3)
    # `take_positions` begins again after the last feature.
    repeated_left = take_positions(left, dim=3, start=0, count=needed_left_size)
    return outer._replace(factors=torch.cat([repeated_left, right], dim=3), left_size=needed_left_size)


def find_or_copy(x: Tensor, heads: int) -> SharedTensor:
    """Returns a parameter that begins with x in each head, or a copy of x if there is no such parameter.

    For example, x is ``R[:, :5, :5]``, for a parameter R (H, 256, 256). Then R is returned, with the numbers of its
    rows and columns. The kernels read its first 5 rows and columns, and compute the gradient of R. Nothing is copied.

    Args:
        x: (1, H, n, m), or (1, 1, n, m) if all heads share it. Then the copy has it H times.
        heads: H.
    """
    parameter = find_parameter(x, heads)
    if parameter is None:
        return copy_by_head(x, heads)
    return parameter


def find_rows_or_copy(x: Tensor, heads: int) -> SharedTensor:
    """Returns what `find_or_copy` returns, but with the columns of x and no others. It may have more rows than x.

    This is for the factors of a product. Columns behind those of x would be multiplied, too.
    """
    shared_tensor = find_or_copy(x, heads)
    has_more_columns = shared_tensor.columns > x.shape[3]
    if has_more_columns:
        return copy_by_head(x, heads)
    return shared_tensor


def find_parameter(x: Tensor, heads: int) -> SharedTensor | None:
    """Returns the parameter of which x shows the first rows and columns of each head; None if there is none.

    There are two kinds of such parameters:

    - (H, rows, columns). For example, x (1, H, 5, 5) is ``R[:, :5, :5]`` of R (H, 256, 256).
    - (H, columns), with a single row for each head. Then x is (1, H, 1, m).

    Args:
        x: (1, H or 1, n, m).
        heads: H.
    """
    parameter = x._base  # torch's name for the tensor that x is a view of
    if parameter is None:
        return None  # x is no view
    sizes = parameter.size()
    if len(sizes) == 3:
        num_heads, rows, columns = sizes
    elif len(sizes) == 2:
        num_heads, columns = sizes
        rows = 1
    else:
        return None  # x is a view of something else
    if num_heads != heads or x.shape[1] != heads:
        return None  # all heads share x, or it is a part of the heads
    # Besides its place, it matters what autograd does with x: a view of ``R.detach()`` gives no gradient to R.
    if is_beginning(x, parameter, rows, columns) and can_replace_views(parameter, [x]):
        return SharedTensor(parameter, rows, columns)
    return None


def is_beginning(x: Tensor, base: Tensor, rows: int, columns: int) -> bool:
    """Returns whether x (1, H, n, m) has the first n rows and m columns of each head of `base`, (H, rows, columns)."""
    _, _, num_rows, num_columns = x.size()
    _, head_stride, row_stride, column_stride = x.stride()
    if num_rows > rows or num_columns > columns:
        return False
    if x.storage_offset() != base.storage_offset() or head_stride != rows * columns or column_stride != 1:
        return False
    # The stride between rows has no meaning if there is a single row, and may be any number.
    return row_stride == columns or num_rows == 1


def copy_by_head(x: Tensor, heads: int) -> SharedTensor:
    """Returns x (1, H or 1, n, m) as a contiguous tensor (H, n, m); x itself, without a copy, if it lies like that."""
    by_head = x[0].expand(heads, -1, -1).contiguous()
    return SharedTensor(by_head, rows=x.shape[2], columns=x.shape[3])


def read_distances(values: Tensor, heads: int, length: int) -> SharedTensor:
    """Returns values by distance as the kernels read them: a row for each head, whose middle is for distance 0.

    The values are usually the middle of each row of a parameter. For example, the parameter has the distances from -255
    to 255, and a sentence of T = 5 tokens has those from -4 to 4. The kernels read only as many values on both
    sides of the middle as the sentence needs. So the parameter is returned. All other values are copied.

    Args:
        values: A value for each distance from -(T - 1) to T - 1, (1, H or 1, 1, 2 T - 1).
        heads: H.
        length: T.
    """
    parameter = values._base  # torch's name for the tensor that they are a view of; None if they are no view
    if parameter is not None and are_middle_columns(values, parameter, heads, length):
        by_distance = parameter
    else:
        values_of_heads = values[0, :, 0]  # (H or 1, 2 T - 1), of the only sentence and row
        by_distance = values_of_heads.expand(heads, -1).contiguous()  # (H, 2 T - 1)
    return SharedTensor(by_distance, rows=1, columns=by_distance.shape[1], is_by_distance=True)


def are_middle_columns(values: Tensor, parameter: Tensor, heads: int, length: int) -> bool:
    """Returns whether a parameter (H, columns) can be read in place of values by distance: they are its middle columns.

    For example, a parameter has 7 columns, for the distances from -3 to 3. The values of a sentence of T = 2 tokens
    have to be the columns in brackets, for the distances from -1 to 1:

        column      0   1   [ 2   3   4]   5   6
        distance   -3  -2   [-1   0   1]   2   3

    Args:
        values: The values that a sentence needs, (1, H or 1, 1, 2 T - 1).
        parameter: Any tensor. Only one with two dimensions can be such a parameter.
        heads: H.
        length: T.
    """
    if parameter.dim() != 2 or not can_replace_views(parameter, [values]):
        return False
    # So `values` is a view of the parameter, and the parameter is contiguous. The following conditions compare the view
    # with the columns in brackets.
    num_heads, num_columns = parameter.size()  # 7 columns
    has_all_heads = num_heads == heads and values.shape[1] == heads
    # The view begins with the distance -1 of the first head.
    middle = num_columns // 2  # column 3 has distance 0
    first_column = middle - (length - 1)  # column 2 has distance -1
    begins_there = values.storage_offset() == parameter.storage_offset() + first_column
    # From one head to the next it is a whole row of the parameter, 7 places. The next distance is in the next place.
    _, head_stride, _, distance_stride = values.stride()
    has_same_strides = head_stride == num_columns and distance_stride == 1
    return has_all_heads and begins_there and has_same_strides


# ---- the weights of a mixture


def read_weights(summands: Summands, heads: int) -> Weights:
    """Returns the weights of a mixture as one tensor, and which of its rows is the weight of which summand.

    For example, ``dense`` and ``matrix`` have weights, and the other summands have none. A weight is a number for each
    of H heads. Then the result may be

        Weights(tensor, rows=WeightRows(dense=0, matrix=1), num_rows=2)

    with a tensor (2, H). Usually the weights are rows of one tensor. Then this tensor is returned, and nothing is
    copied. Other weights are joined to a new tensor.

    Args:
        summands: The terms with their weights.
        heads: H.
    """
    weights_by_summand = find_weights(summands)
    if not weights_by_summand:
        return NO_WEIGHTS
    rows_of_one_tensor = find_rows_of_weights(weights_by_summand, heads)
    if rows_of_one_tensor is not None:
        return rows_of_one_tensor
    return join_weights(weights_by_summand, heads)


def join_weights(weights_by_summand: dict[str, Tensor], heads: int) -> Weights:
    """Returns a new tensor (M, H) with the weights as its rows, in the order in which they are given."""
    row_numbers: dict[str, int] = {}
    rows: list[Tensor] = []
    for summand, weight in weights_by_summand.items():
        row_numbers[summand] = len(rows)
        rows.append(weight.reshape(1, heads))
    return Weights(torch.cat(rows), WeightRows(**row_numbers), num_rows=len(rows))


def find_weights(summands: Summands) -> dict[str, Tensor]:
    """Returns {summand: its weight, (1, H, 1, 1)} for the summands that the kernels have to multiply by a weight."""
    weights: dict[str, Tensor] = {}
    for summand in SUMMANDS:
        terms: Sequence[Term] = getattr(summands, summand)
        if not terms:
            continue  # the logits do not have this summand
        if len(terms) > 1:
            # Only ``matrix`` may have several terms. `read_matrix` multiplies each of them by its weight before it adds
            # them up, so that the kernels must not do it again.
            continue
        (term,) = terms
        if term.weight is not None:
            weights[summand] = term.weight
    return weights


def find_rows_of_weights(weights_by_summand: dict[str, Tensor], heads: int) -> Weights | None:
    """Returns the tensor (M, H) that all weights are rows of, and their rows; None if there is no such tensor.

    For example, a tensor of 3 rows for 4 heads lies in memory like this:

        row      0           1           2
        places   0 1 2 3     4 5 6 7     8 9 10 11

    Args:
        weights_by_summand: {summand: its weight, (1, H, 1, 1)}; at least one.
        heads: H, 4 in the example.
    """
    weights = list(weights_by_summand.values())
    tensor = weights[0]._base  # torch's name for the tensor that a weight is a view of; None if it is no view
    if tensor is None:
        return None
    sizes = tensor.size()
    if len(sizes) != 2 or sizes[1] != heads:
        return None  # it is no tensor (M, H)
    if not can_replace_views(tensor, weights):
        return None
    # So all weights are views of this tensor, which is contiguous. But they may be other parts of it than its rows.
    begin_of_tensor = tensor.storage_offset()
    row_numbers: dict[str, int] = {}
    for summand, weight in weights_by_summand.items():
        begin = weight.storage_offset() - begin_of_tensor  # for example place 8
        begins_with_a_row = begin % heads == 0
        # From one head to the next it is 1 place in a row. In a column, it would be 4 places.
        _, head_stride, _, _ = weight.stride()
        if not begins_with_a_row or head_stride != 1:
            return None
        row_numbers[summand] = begin // heads  # row 2
    rows = WeightRows(**row_numbers)  # summands that are not in `row_numbers` get -1, for no weight
    return Weights(tensor, rows, num_rows=sizes[0])


# ---- addresses


def align_memory(tensors: Sequence[Any]) -> Sequence[Any]:
    """Returns tensors whose memory begins at a multiple of `ALIGNMENT`: each as it is, or a copy. None stays None."""
    for tensor in tensors:
        if tensor is not None and tensor.data_ptr() % ALIGNMENT != 0:
            return [copy_unless_aligned(any_tensor) for any_tensor in tensors]
    return tensors  # as nearly always


def copy_unless_aligned(tensor: Any) -> Any:
    """Returns a tensor, or a copy of it if its memory does not begin at a multiple of `ALIGNMENT`. None stays None."""
    if tensor is None or tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone()
