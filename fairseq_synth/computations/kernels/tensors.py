"""The tensors of a call as the kernels read them.

A kernel reads each tensor in one way only, which `arguments.CallTensors` describes. Most tensors of a call are views of
such tensors. For example, queries, keys and values are three parts of one projection, and a matrix for 5 tokens is a
corner of a parameter (H, 256, 256). Then the kernels read the projection or the parameter itself, and compute its
gradient, so that nothing has to be copied. Tensors that lie in memory in another way are copied.
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

# Up to this number of rows, R1 R2^T is computed for all rows of the parameters (`multiply_parameters`).
MAX_ROWS_UNSLICED = 512
# The memory of each tensor has to begin at a multiple of so many bytes, as the kernels are compiled to expect.
ALIGNMENT = 16


class Summands:
    """The terms of the logits, sorted into the summands of the formula that the kernels compute; see `arguments`."""

    def __init__(self) -> None:
        self.product: list[Product] = []  # queries and keys both differ by sentence
        self.dense: list[Product] = []  # only the keys are shared by all sentences
        self.outer: list[Outer] = []
        self.bias_row: list[Bias] = []
        self.matrix: list[Product | Bias | Diagonals] = []  # shared by all sentences; several ones are added up
        self.unsupported: list[Product | Bias] = []  # the kernels have no summand for these

    def reason_to_refuse(self) -> str:
        """Returns why the kernels cannot take these summands; an empty string if they can."""
        if self.unsupported:
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
    """Returns what `sort_terms` returns. The result is kept with the logits, so that they are sorted only once.

    It is needed twice: to find out whether the kernels can take the logits, and to compute them.
    """
    summands: Summands | None = logits.sorted_terms
    if summands is None:
        summands = sort_terms(logits, value)
        logits.sorted_terms = summands
    return summands


def sort_terms(logits: Logits, value: Tensor) -> Summands:
    """Returns the terms of the logits S, sorted into the five summands that the kernels compute (see `arguments`).

    For example, a product is ``dense`` if all sentences share its keys, and ``product`` if they do not. A tensor that
    all sentences share has the size 1, and not B, in its first dimension. Terms that the kernels cannot compute are
    ``unsupported``.

    Args:
        logits: S.
        value: V, (B, H, T, d_h), whose sizes tell how many sentences and rows there are.
    """
    bsz, _, length, _ = value.size()
    summands = Summands()
    summands.outer.extend(logits.outers)
    summands.matrix.extend(logits.diagonals)  # all sentences share them
    if bsz == 1:  # the sizes do not tell what sentences share
        append_products_of_one_sentence(summands, logits.products)
    else:
        append_products(summands, logits.products)
    for term in logits.biases:
        num_sentences, _, num_rows, _ = term.bias.size()
        if num_sentences > 1:
            summands.unsupported.append(term)  # each sentence has a bias of its own
        elif num_rows < length:
            summands.bias_row.append(term)  # it has 1 row, for all T rows of S
        else:
            summands.matrix.append(term)  # it has T rows; with T = 1, either would be right
    return summands


def append_products(summands: Summands, products: Sequence[Product]) -> None:
    """Adds products to the summands, for a batch of several sentences."""
    for product in products:
        is_query_shared = product.query.shape[0] == 1  # all sentences have the same queries
        is_key_shared = product.key.shape[0] == 1
        if is_query_shared and is_key_shared:
            summands.matrix.append(product)  # as in factorized random, where R1 R2^T is the same for all sentences
        elif is_query_shared:
            summands.unsupported.append(product)  # as in no function of the paper
        elif is_key_shared:
            summands.dense.append(product)  # as in dense, where W2 takes the place of the keys
        else:
            summands.product.append(product)  # as in vanilla


def append_products_of_one_sentence(summands: Summands, products: Sequence[Product]) -> None:
    """Adds products to the summands, for a batch of a single sentence.

    With one sentence, it does not matter which tensors all sentences share: each of the summands ``product``, ``dense``
    and ``matrix`` can compute any product. The first two take one product each, and ``matrix`` takes all others.
    """
    remaining_products = list(products)
    if remaining_products:
        # In a mixture with ``vanilla``, this is the product of its queries and keys. The summand ``product`` does not
        # have to copy them.
        last_product = remaining_products.pop()
        summands.product.append(last_product)
    if remaining_products:
        next_to_last_product = remaining_products.pop()
        summands.dense.append(next_to_last_product)
    summands.matrix.extend(remaining_products)


# ---- the tensors and the layout of a call


class PackedProjections(NamedTuple):
    """A tensor of the values, and of the queries and keys of the summand `product` if it occurs."""

    packed: Tensor
    query_width: int
    scale: float


class DenseProduct(NamedTuple):
    """The tensors of the summand `dense`. If it does not occur, it is `NO_DENSE_PRODUCT`."""

    query: Any
    key: Any
    key_rows: int
    width: int


class OuterProduct(NamedTuple):
    """The factors of the summand `outer`. If it does not occur, it is `NO_OUTER_PRODUCT`."""

    factors: Any
    left_width: int
    right_width: int


class SharedTensor(NamedTuple):
    """A tensor that all sentences share, usually a parameter. If there is none, it is `NOTHING`.

    It may have more rows and columns than the sentences need. The kernels read the first ones of each head.
    """

    tensor: Any  # contiguous: (H, rows, columns), or (H, columns) with one row for each head
    rows: int
    columns: int
    is_by_distance: bool = False  # the columns are values by distance


class Weights(NamedTuple):
    """The weights of a mixture, and which row is the weight of which summand. If there are none, it is `NO_WEIGHTS`."""

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
    """Returns the tensors of a call as the kernels read them, and the layout of the call: its sizes and types.

    The arguments are those of `computations.attend`. The kernels must not refuse the call (`kernels.refuses`).
    """
    bsz, heads, length, value_width = value.size()
    summands = find_summands(logits, value)
    # Each summand has at most one term, apart from the matrix, which may have several.
    projections = pack_projections(summands.product, value)
    dense = read_dense_product(summands.dense[0], value) if summands.dense else NO_DENSE_PRODUCT
    outer = read_outer_product(summands.outer[0], value) if summands.outer else NO_OUTER_PRODUCT
    bias_row = find_or_copy(summands.bias_row[0].bias, heads) if summands.bias_row else NOTHING
    matrix = read_matrix(summands.matrix, heads, length) if summands.matrix else NOTHING
    weights = read_weights(summands, heads)
    hidden = None
    if key_padding_mask is not None:
        hidden = in_type(key_padding_mask, torch.bool).contiguous().view(torch.uint8)  # the kernels take no booleans
    # ``CallTensors.__new__(CallTensors, ...)`` is ``CallTensors(...)``, but faster: if a class is called, Python first
    # writes the keywords into a dictionary. It is the same with `Layout`.
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

    The keys are usually the first T rows of a parameter (H, rows, r). Then the result has the whole parameter instead,
    of which the kernels read the first T rows in each head.

    Args:
        product: The product. Its query is (B or 1, H or 1, T, r), its key (1, H or 1, T, r).
        value: (B, H, T, d_h).
    """
    bsz, heads, _, _ = value.size()
    query = product.query
    if product.scale != 1.0:
        query = query * product.scale  # the kernels have no scale for this summand
    query_by_head = order_by_head(query, bsz, heads, value.dtype)  # (H, T, B, r)
    keys = find_rows_or_copy(product.key, heads)  # the parameter, or a copy of the keys
    return DenseProduct(
        query=query_by_head,
        key=keys.tensor,
        key_rows=keys.rows,  # rows in each head, at least T
        width=keys.columns,  # r
    )


def read_outer_product(outer: Outer, value: Tensor) -> OuterProduct:
    """Returns the two factors of the summand ``outer``, as the kernels read them.

    If the factors have too few features for a long sentence, the left features are repeated.

    Args:
        outer: The outer product. Its tensor ``factors`` has the left features, and behind them the right features.
        value: (B, H, T, d_h).
    """
    bsz, heads, length, _ = value.size()
    repeated = repeat_left_factor(outer, num_columns=length)
    left_width = repeated.left_size
    right_width = repeated.factors.shape[3] - left_width
    factors_by_head = order_by_head(repeated.factors, bsz, heads, value.dtype)  # (H, T, B, left_width + right_width)
    return OuterProduct(factors_by_head, left_width=left_width, right_width=right_width)


def read_matrix(terms: list[Product | Bias | Diagonals], heads: int, length: int) -> SharedTensor:
    """Returns the matrix R of the summand ``matrix``, for the terms of the logits that all sentences share.

    - If there is a single term, R is the term without its weight. The kernels multiply R by the weight.
    - If there are several terms, R is their weighted sum. The kernels then have no weight for it (`find_weights`).
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
    """Returns the product ``scale * R1 R2^T``, without the weight of the term. It may have more rows than needed.

    For a sentence of 10 tokens, R1 and R2 are usually the first 10 rows of parameters with 256 rows. Then all 256 rows
    are multiplied, and the kernels read the first 10 rows and columns of the product. This is faster than to slice the
    parameters first, because each slice needs a launch to compute its gradient.

    Args:
        term: The product of R1 (the query) and R2 (the key), (1, H or 1, length, k) each.
        heads: H.
        length: T.
    """
    # Each is the whole parameter, (H, 256, k); or a copy of R1 or R2, (H, 10, k), if there is no such parameter.
    left = find_rows_or_copy(term.query, heads)
    right = find_rows_or_copy(term.key, heads)
    has_scale = term.scale != 1.0  # bmm cannot multiply by it
    if not has_scale and can_multiply_all_rows(left, right):
        matrix = torch.bmm(left.tensor, right.tensor.transpose(1, 2))  # (H, 256, 256)
        return SharedTensor(matrix, rows=left.rows, columns=right.rows)
    term_without_weight = term.with_weight(None)  # the kernels multiply by the weight
    return add_up([term_without_weight], heads, length)  # (H, 10, 10)


def can_multiply_all_rows(left: SharedTensor, right: SharedTensor) -> bool:
    """Returns whether the product of all rows of two tensors is small enough, and can be computed by `torch.bmm`."""
    if left.rows > MAX_ROWS_UNSLICED or right.rows > MAX_ROWS_UNSLICED:
        return False  # a short sentence would need only a small part of the product
    # bmm takes tensors (H, rows, k). A parameter with a single row for each head may be (H, k).
    return left.tensor.dim() == 3 and right.tensor.dim() == 3


# ---- views of larger tensors
#
# torch keeps the tensor that a view is made of in the view's attribute `_base`. No public attribute has it. The first
# element of a view is ``view.storage_offset() - base.storage_offset()`` elements behind the first one of its base.


def can_replace_views(base: Tensor, views: Sequence[Tensor]) -> bool:
    """Returns whether all `views` are views of `base`, and the kernels may read `base` instead of them.

    The kernels then compute the gradient of `base`, but not the gradients of the views. This is right for a view such
    as ``base[:, :5]``, which only passes its gradient on to `base`. Which part of `base` it is, is not checked here.
    """
    if not base.is_contiguous():
        return False  # the kernels compute addresses from sizes, and know no strides
    dtype = base.dtype
    requires_grad = base.requires_grad
    for view in views:
        if view._base is not base or view.dtype != dtype:
            return False  # it is no view of the base, or of another type, as ``base.view(torch.int16)``
        if requires_grad and view.is_leaf:
            # A leaf passes no gradient on to the base. It keeps its gradient, as ``base.detach().requires_grad_()``, or
            # it has none, as ``base.detach()``.
            return False
        if view.requires_grad and not requires_grad:
            return False  # the base has no gradient, but the view has, as ``base[:, :5].requires_grad_()``
        if view._backward_hooks or view.retains_grad:
            return False  # the user reads the gradient of the view, by ``register_hook`` or ``retain_grad``
    return True


def pack(queries_and_keys: list[Tensor], value: Tensor) -> Tensor:
    """Returns a contiguous tensor (T, B, features) with the queries, keys and values of each token side by side.

    If they are views of such a tensor, as after a joint projection to queries, keys and values, it is returned.
    Otherwise they are copied to a new tensor.

    Args:
        queries_and_keys: Queries and keys, (B or 1, H or 1, T, d) each; or nothing, for a tensor of the values alone.
        value: (B, H, T, d_h). Its type is that of the result.
    """
    projection = value._base  # torch's name for the tensor that the values are a view of; None if they are no view
    if projection is not None and are_side_by_side([*queries_and_keys, value], value, projection):
        return projection
    return copy_side_by_side(queries_and_keys, value)


def copy_side_by_side(queries_and_keys: list[Tensor], value: Tensor) -> Tensor:
    """Returns queries, keys and values side by side, as `pack` does, in a new tensor.

    Values alone are not copied if they already lie in the right order.

    Args:
        queries_and_keys, value: As in `pack`.
    """
    bsz, heads, _, _ = value.size()
    values_by_token = order_by_token(value, bsz, heads)  # (T, B, H d_h)
    if not queries_and_keys:
        return values_by_token.contiguous()
    by_token = [order_by_token(x.to(value.dtype), bsz, heads) for x in queries_and_keys]  # (T, B, H d) each
    return torch.cat([*by_token, values_by_token], dim=2)


def order_by_token(x: Tensor, bsz: int, heads: int) -> Tensor:
    """Returns queries, keys or values (B or 1, H or 1, T, d) as a tensor (T, B, H d).

    If all sentences or heads share x, the result repeats it for each of them.
    """
    expanded = x.expand(bsz, heads, -1, -1)  # (B, H, T, d)
    by_token = expanded.permute(2, 0, 1, 3)  # (T, B, H, d)
    return by_token.flatten(2)


def are_side_by_side(parts: list[Tensor], value: Tensor, base: Tensor) -> bool:
    """Returns whether queries, keys and values are views of `base` that lie side by side in it, as `pack` orders them.

    Then `base` has a row for each token of each sentence. For example, with 2 heads of 4 features, and 3 sentences:

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
    row_size = base.numel() // (length * bsz)  # 24
    begin_of_base = base.storage_offset()
    sentence_stride = row_size  # the same token of the next sentence is in the next row
    token_stride = bsz * row_size  # the next token of the same sentence is 3 rows later
    place = 0  # where the next part has to begin in row 0: the queries at place 0, the keys at 8, the values at 16
    for part in parts:
        part_bsz, part_heads, _, width = part.size()  # a width of 4
        if part_bsz != bsz or part_heads != heads:
            return False  # all sentences or heads share the part, and it has to be repeated for each of them
        if part.storage_offset() - begin_of_base != place:
            return False
        head_stride = width  # the next head is 4 places later, and the next feature 1 place
        if part.stride() != (sentence_stride, head_stride, token_stride, 1):
            return False
        place += heads * width
    if place != row_size:
        return False  # `base` has other features behind the parts
    # So far, only places were compared. This compares the rest, such as whether the parts are views of `base` at all.
    return can_replace_views(base, parts)


def order_by_head(x: Tensor, bsz: int, heads: int, dtype: torch.dtype) -> Tensor:
    """Returns x (B or 1, H or 1, T, r) as a contiguous tensor (H, T, B, r) of a type."""
    by_head = x.to(dtype).permute(1, 2, 0, 3)
    if by_head.shape[0] != heads or by_head.shape[2] != bsz:
        by_head = by_head.expand(heads, -1, bsz, -1)
    return by_head.contiguous()


def repeat_left_factor(outer: Outer, num_columns: int) -> Outer:
    """Repeats the left features of an outer product until it has at least `num_columns` columns.

    An outer product has a column for each pair of a left and a right feature. For example, the 3 left features a b c
    and 4 right features make 3 * 4 = 12 columns. If 18 columns are needed, the left features become a b c a b, which
    make 5 * 4 = 20 columns.

    Args:
        outer: The outer product. Its tensor `factors` has the left features, and behind them the right features.
        num_columns: The number of columns that are needed.
    """
    left_size = outer.left_size
    right_size = outer.factors.shape[3] - left_size
    needed_left_size = divide_up(num_columns, right_size)  # 5 in the example
    if needed_left_size <= left_size:
        return outer
    left, right = outer.factors.split([left_size, right_size], dim=3)
    # `take_positions` begins again with the first feature after the last one.
    repeated_left = take_positions(left, dim=3, start=0, count=needed_left_size)
    return outer._replace(factors=torch.cat([repeated_left, right], dim=3), left_size=needed_left_size)


def find_or_copy(x: Tensor, heads: int) -> SharedTensor:
    """Returns the parameter whose first rows and columns x is, or a copy of x if there is no such parameter.

    For example, x is ``R[:, :5, :5]`` of a parameter R (H, 256, 256). Then R is returned, of which the kernels read the
    first 5 rows and columns.

    Args:
        x: (1, H, n, m), or (1, 1, n, m) if all heads share it. Then the copy repeats it for each head.
        heads: H.
    """
    parameter = find_parameter(x, heads)
    if parameter is None:
        return copy_by_head(x, heads)
    return parameter


def find_rows_or_copy(x: Tensor, heads: int) -> SharedTensor:
    """Returns the parameter whose first rows x is, with all columns, or a copy of x if there is no such parameter.

    This is for the factors of a product, which must not have other columns than x: they would be multiplied, too.
    """
    shared_tensor = find_or_copy(x, heads)
    has_more_columns = shared_tensor.columns > x.shape[3]
    if has_more_columns:
        return copy_by_head(x, heads)
    return shared_tensor


def find_parameter(x: Tensor, heads: int) -> SharedTensor | None:
    """Returns the parameter whose first rows and columns x is; None if x is no such view.

    There are two cases:

    - The parameter is (H, rows, columns), and x is ``parameter[:, :n, :m]``.
    - The parameter is (H, columns), with a single row for each head, and x is ``parameter[:, :m]``. Then n is 1.

    Args:
        x: (1, H or 1, n, m).
        heads: H.
    """
    parameter = x._base  # torch's name for the tensor that x is a view of; None if x is no view
    if parameter is None:
        return None
    sizes = parameter.size()
    if len(sizes) == 3:
        num_heads, rows, columns = sizes
    elif len(sizes) == 2:
        num_heads, columns = sizes
        rows = 1
    else:
        return None  # it is no such parameter
    if num_heads != heads or x.shape[1] != heads:
        return None  # all heads share x, or x has only some of the heads
    # The first condition compares places in memory. The second one is for autograd: a view of ``parameter.detach()``
    # may lie at the same place, but gives no gradient to the parameter.
    if is_beginning(x, parameter, rows, columns) and can_replace_views(parameter, [x]):
        return SharedTensor(parameter, rows, columns)
    return None


def is_beginning(x: Tensor, base: Tensor, rows: int, columns: int) -> bool:
    """Returns whether x (1, H, n, m) lies in memory where ``base[:, :n, :m]`` lies, for a base (H, rows, columns)."""
    _, _, num_rows, num_columns = x.size()
    _, head_stride, row_stride, column_stride = x.stride()
    if num_rows > rows or num_columns > columns:
        return False
    if x.storage_offset() != base.storage_offset() or head_stride != rows * columns or column_stride != 1:
        return False
    # If there is a single row, the stride between rows may be any number.
    return row_stride == columns or num_rows == 1


def copy_by_head(x: Tensor, heads: int) -> SharedTensor:
    """Returns x (1, H or 1, n, m) as a contiguous tensor (H, n, m), which is a copy if x is not contiguous."""
    by_head = x[0].expand(heads, -1, -1).contiguous()
    return SharedTensor(by_head, rows=x.shape[2], columns=x.shape[3])


def read_distances(values: Tensor, heads: int, length: int) -> SharedTensor:
    """Returns a tensor (H, columns) with a value for each distance between two tokens. Its middle is for distance 0.

    For example, the values for a sentence of 5 tokens are for the distances from -4 to 4. Usually they are the middle
    columns of a parameter, which has the distances from -255 to 255. Then the parameter is returned, of which the
    kernels read the middle columns. Otherwise the values are copied.

    Args:
        values: A value for each distance from -(T - 1) to T - 1, (1, H or 1, 1, 2 T - 1).
        heads: H.
        length: T.
    """
    parameter = values._base  # torch's name for the tensor that `values` is a view of; None if it is no view
    if parameter is not None and are_middle_columns(values, parameter, heads, length):
        by_distance = parameter
    else:
        values_of_heads = values[0, :, 0]  # (H or 1, 2 T - 1)
        by_distance = values_of_heads.expand(heads, -1).contiguous()  # (H, 2 T - 1)
    return SharedTensor(by_distance, rows=1, columns=by_distance.shape[1], is_by_distance=True)


def are_middle_columns(values: Tensor, parameter: Tensor, heads: int, length: int) -> bool:
    """Returns whether values by distance are the middle columns of a parameter, so that it can be read instead of them.

    For example, a parameter has 7 columns, for the distances from -3 to 3. The values for a sentence of 2 tokens have
    to be the columns in brackets, for the distances from -1 to 1:

        column      0   1   [ 2   3   4]   5   6
        distance   -3  -2   [-1   0   1]   2   3

    Args:
        values: The values that a sentence needs, (1, H or 1, 1, 2 T - 1).
        parameter: Any tensor. The result is False if it is not (H, columns).
        heads: H.
        length: T.
    """
    if parameter.dim() != 2 or not can_replace_views(parameter, [values]):
        return False
    # So `values` is a view of the parameter, and the parameter is contiguous. The rest compares places in memory.
    num_heads, num_columns = parameter.size()  # 7 columns
    has_all_heads = num_heads == heads and values.shape[1] == heads
    middle = num_columns // 2  # column 3, for distance 0
    first_column = middle - (length - 1)  # column 2, for distance -1
    begins_there = values.storage_offset() == parameter.storage_offset() + first_column
    # The next head is a whole row of the parameter later, 7 places, and the next distance is 1 place later.
    _, head_stride, _, distance_stride = values.stride()
    has_same_strides = head_stride == num_columns and distance_stride == 1
    return has_all_heads and begins_there and has_same_strides


# ---- the weights of a mixture


def read_weights(summands: Summands, heads: int) -> Weights:
    """Returns the weights of a mixture as one tensor (M, H), and which of its rows is the weight of which summand.

    For example, if ``dense`` and ``matrix`` have weights, the result is
    ``Weights(tensor, rows=WeightRows(dense=0, matrix=1), num_rows=2)`` with a tensor (2, H). Usually the weights are
    rows of such a tensor already. If not, they are copied to a new one.

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
            # Only ``matrix`` may have several terms. `read_matrix` adds them up, each multiplied by its weight, so that
            # the kernels must not multiply by a weight again.
            continue
        (term,) = terms
        if term.weight is not None:
            weights[summand] = term.weight
    return weights


def find_rows_of_weights(weights_by_summand: dict[str, Tensor], heads: int) -> Weights | None:
    """Returns a tensor (M, H) whose rows are the weights, and the row of each weight; None if there is no such tensor.

    A weight has a number for each head. For example, the tensor has 3 rows for 4 heads, and lies in memory like this:

        row 0: places 0 1 2 3        row 1: places 4 5 6 7        row 2: places 8 9 10 11

    So a weight that is a view of the tensor and begins at place 8 is row 2.

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
    # So all weights are views of this tensor, which is contiguous. They may still be other parts of it than its rows.
    begin_of_tensor = tensor.storage_offset()
    row_numbers: dict[str, int] = {}
    for summand, weight in weights_by_summand.items():
        begin = weight.storage_offset() - begin_of_tensor  # place 8 in the example
        begins_with_a_row = begin % heads == 0
        # In a row, the next head is 1 place later. In a column, it would be 4 places later.
        _, head_stride, _, _ = weight.stride()
        if not begins_with_a_row or head_stride != 1:
            return None
        row_numbers[summand] = begin // heads  # row 2
    rows = WeightRows(**row_numbers)  # all other summands get -1, which stands for no weight
    return Weights(tensor, rows, num_rows=sizes[0])


# ---- addresses


def align_memory(tensors: Sequence[Any]) -> Sequence[Any]:
    """Returns the tensors, with copies instead of those whose memory does not begin at a multiple of `ALIGNMENT`."""
    for tensor in tensors:
        if tensor is not None and tensor.data_ptr() % ALIGNMENT != 0:
            return [copy_unless_aligned(any_tensor) for any_tensor in tensors]
    return tensors  # as nearly always


def copy_unless_aligned(tensor: Any) -> Any:
    """Returns a tensor, or a copy of it if its memory does not begin at a multiple of `ALIGNMENT`. None stays None."""
    if tensor is None or tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone()
