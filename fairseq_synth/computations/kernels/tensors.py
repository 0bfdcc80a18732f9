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
from .arguments import CallTensors, WeightRows
from .launches import Layout, divide_up

# Up to so many rows R1 R2^T is computed whole: to slice R1 and R2 first would add a launch for each slice's gradient.
MAX_ROWS_UNSLICED = 512


class Summands(NamedTuple):
    """The terms of logits, sorted by the summand of the kernels that they are; see `arguments`."""

    product: list[Product]  # queries and keys both differ by sentence
    dense: list[Product]  # only the keys are shared by all sentences
    outer: list[Outer]
    bias_row: list[Bias]
    matrix: list[Product | Bias | Diagonals]  # shared by all sentences; several ones are added up
    others: list[Product | Bias]  # the kernels have no summand for these

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


def sort_terms(logits: Logits, value: Tensor) -> Summands:
    """Returns the terms of the logits S, sorted by the summand of the kernels that each of them is.

    =============  ============================================  ============
    term           which ones                                    summand
    =============  ============================================  ============
    outer product  all                                           ``outer``
    diagonals      all: they are always shared by all sentences  ``matrix``
    product        queries and keys differ by sentence           ``product``
    product        queries differ, keys are shared               ``dense``
    product        queries and keys are shared                   ``matrix``
    product        queries are shared, keys differ               ``others``
    bias           shared, a single row for all rows of S        ``bias_row``
    bias           shared, T rows                                ``matrix``
    bias           differs by sentence                           ``others``
    =============  ============================================  ============

    The kernels cannot compute ``others``.

    Args:
        logits: S.
        value: V, (B, H, T, d_h), whose sizes tell how many sentences and rows there are.
    """
    bsz, _, length, _ = value.size()
    summands = Summands(product=[], dense=[], outer=[], bias_row=[], matrix=[], others=[])
    summands.outer.extend(logits.outers)
    summands.matrix.extend(logits.diagonals)
    if bsz > 1:
        add_products(summands, logits.products)
    else:
        # A single sentence differs from no other and shares everything, so that there is a choice.
        add_products_of_one_sentence(summands, logits.products)
    for term in logits.biases:
        num_sentences, _, num_rows, _ = term.bias.size()
        is_shared = num_sentences == 1
        is_single_row = num_rows < length  # a bias has 1 row or T rows
        if is_shared and is_single_row:
            summands.bias_row.append(term)
        elif is_shared:
            summands.matrix.append(term)
        else:
            summands.others.append(term)
    return summands


def add_products(summands: Summands, products: Sequence[Product]) -> None:
    """Adds the products of a batch of several sentences to the summand of the kernels that each of them is.

    The first size of a product's queries or keys is 1 if all sentences share them, and B if they differ by sentence.
    """
    for product in products:
        is_query_shared = product.query.size(0) == 1
        is_key_shared = product.key.size(0) == 1
        if not is_query_shared and not is_key_shared:
            summands.product.append(product)  # as in vanilla
        elif not is_query_shared:
            summands.dense.append(product)  # as in dense, where W2 takes the place of the keys
        elif is_key_shared:
            summands.matrix.append(product)  # as in factorized random, where R1 R2^T is a matrix for all sentences
        else:
            summands.others.append(product)  # as in no function of the paper


def add_products_of_one_sentence(summands: Summands, products: Sequence[Product]) -> None:
    """Adds the products of a batch of a single sentence to summands of the kernels.

    With one sentence, it makes no difference which tensors all sentences share. So each product may be any summand. For
    the products a, b, c and d:

    - d becomes ``product``. In a mixture, the queries and keys of the last product are those of the projections, which
      the kernels then read without a copy.
    - c becomes ``dense``.
    - a and b become ``matrix``, which may have any number of terms.
    """
    remaining = list(products)
    if remaining:
        summands.product.append(remaining.pop())
    if remaining:
        summands.dense.append(remaining.pop())
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
    # `refuses` has sorted the terms, too. To sort them again is faster than to keep them until now.
    summands = sort_terms(logits, value)
    projections = pack_projections(summands.product, value)
    dense = read_dense_product(summands.dense, value) if summands.dense else NO_DENSE_PRODUCT
    outer = read_outer_product(summands.outer, value) if summands.outer else NO_OUTER_PRODUCT
    bias_row = read_bias_row(summands.bias_row, heads) if summands.bias_row else NOTHING
    matrix = read_matrix(summands.matrix, heads, length) if summands.matrix else NOTHING
    weights = read_weights(summands, heads)
    hidden = None
    if key_padding_mask is not None:
        hidden = key_padding_mask.to(torch.bool).contiguous().view(torch.uint8)  # the kernels take no booleans
    tensors = CallTensors(
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
    for name, tensor in zip(CallTensors._fields, tensors):
        if tensor is None:
            continue
        dtypes[name] = tensor.dtype
        if tensor.requires_grad:
            wanted.append(name)
    layout = Layout(
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
    aligned_tensors = CallTensors(*align_memory(tensors))
    return Call(logits, value, key_padding_mask, attn_mask, layout, aligned_tensors)


def pack_projections(products: list[Product], value: Tensor) -> PackedProjections:
    """Returns the values, together with the queries and keys of a product if there is one."""
    if not products:
        return PackedProjections(pack([value]), query_width=0, scale=1.0)
    (product,) = products
    packed = pack([product.query, product.key, value])
    return PackedProjections(packed, query_width=product.query.size(3), scale=product.scale)


def read_dense_product(products: list[Product], value: Tensor) -> DenseProduct:
    """Returns the queries and the shared keys of the summand ``dense``, as the kernels read them.

    The keys are usually the first T rows of a parameter (H, rows, r). Then nothing is copied: the kernels are given the
    parameter, and read its first T rows in each head. With T = 2 and 3 rows:

        head 0: key 0 | key 1 | not read     head 1: key 0 | key 1 | not read     (r numbers each)

    Args:
        products: A single product ``scale * query @ key^T``. The query is (B or 1, H or 1, T, r), the key (1, H or 1,
            T, r).
        value: (B, H, T, d_h).
    """
    (product,) = products
    bsz, heads, _, _ = value.size()
    query = product.query
    if product.scale != 1.0:
        query = query * product.scale  # the kernels multiply the summand `product` by a scale, but not this one
    query_by_head = order_by_head(query, bsz, heads, value.dtype)
    keys = find_rows_or_copy(product.key, heads)  # the parameter, or a copy of the keys
    return DenseProduct(query_by_head, key=keys.tensor, key_rows=keys.rows, width=keys.columns)


def read_outer_product(outers: list[Outer], value: Tensor) -> OuterProduct:
    """Returns the factors of the summand ``outer``, as the kernels read them.

    Args:
        outers: A single outer product.
        value: (B, H, T, d_h).
    """
    (outer,) = outers
    bsz, heads, length, _ = value.size()
    long_enough = repeat_left_factor(outer, length)  # for T columns
    factors = long_enough.factors  # (B or 1, H or 1, T, left + right features)
    left_width = long_enough.left_size
    right_width = factors.size(3) - left_width
    return OuterProduct(order_by_head(factors, bsz, heads, value.dtype), left_width, right_width)


def read_bias_row(biases: list[Bias], heads: int) -> SharedTensor:
    """Returns the row of a bias whose rows are all alike."""
    (bias,) = biases
    return find_or_copy(bias.bias, heads)


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
    """Returns the matrix ``scale * R1 R2^T``, (H, rows, columns), without the weight of the term.

    R1 and R2 are usually the first rows of parameters, for example 10 of 256 rows for a sentence of 10 tokens. The
    matrix is computed in one of two ways:

    - All 256 rows are multiplied, which gives a matrix (H, 256, 256). The kernels read its first 10 rows and columns.
      This is faster, because neither the parameters nor their gradients are sliced.
    - Only the 10 rows are multiplied, which gives a matrix (H, 10, 10). This is for parameters of very many rows, and
      for products that a single `torch.bmm` does not compute.

    Args:
        term: The product of R1 (the query) and R2 (the key), (1, H or 1, length, k) each.
        heads: H.
        length: T.
    """
    # Each is a parameter with all its rows; or R1 or R2 itself, if it is no part of a parameter.
    factor_1 = find_rows_or_copy(term.query, heads)
    factor_2 = find_rows_or_copy(term.key, heads)
    has_few_rows = max(factor_1.rows, factor_2.rows) <= MAX_ROWS_UNSLICED
    # bmm takes tensors (H, rows, k), and has no scale. A parameter (H, k) is one of a single row for each head.
    bmm_computes_it = factor_1.tensor.dim() == 3 and factor_2.tensor.dim() == 3 and term.scale == 1.0
    if has_few_rows and bmm_computes_it:
        matrix = torch.bmm(factor_1.tensor, factor_2.tensor.transpose(1, 2))
        return SharedTensor(matrix, rows=factor_1.rows, columns=factor_2.rows)
    # `term` has the rows of the sentence alone.
    term_without_weight = term._replace(weight=None)
    return add_up([term_without_weight], heads, length)


# ---- views of larger tensors
#
# torch keeps the tensor that a view is made of in the view's attribute `_base`. No public attribute has it. The first
# element of a view is ``view.storage_offset() - base.storage_offset()`` elements behind the first one of its base.


def can_replace_views(base: Tensor, views: Sequence[Tensor]) -> bool:
    """Returns whether the kernels may read the tensor `base` in place of tensors that may be views of it.

    The kernels then give a gradient to `base`, but none to the views. This is right for a view such as ``base[:, :5]``,
    whose gradient autograd only adds to the gradient of `base`. All other views have to be refused.
    """
    if not base.is_contiguous():
        return False  # the kernels compute addresses from sizes, and know no strides
    dtype = base.dtype
    requires_grad = base.requires_grad
    for view in views:
        # The view has to show numbers of `base`,
        if view._base is not base:
            return False
        if view.dtype != dtype:
            return False  # ``base.view(torch.int16)`` shows other numbers
        # its gradient has to go to `base`,
        if view.requires_grad != requires_grad:
            return False  # ``base.detach()`` gives no gradient to `base`
        if requires_grad and view.is_leaf:
            return False  # ``base.detach().requires_grad_()`` keeps its gradient for itself
        # and nobody may ask for its gradient.
        if view._backward_hooks or view.retains_grad:
            return False  # a hook is called with it, or ``view.retain_grad()`` keeps it
    return True


def pack(parts: list[Tensor]) -> Tensor:
    """Returns a contiguous tensor (T, B, features) in which the parts of each token lie side by side.

    A layer computes queries, keys and values by one projection, whose result is such a tensor. They are views of it.
    Then this result is returned, and nothing is copied. In all other cases, the parts are copied.

    Args:
        parts: Either [values] or [queries, keys, values]. The values are (B, H, T, d_h). Queries and keys are
            (B or 1, H or 1, T, d), and are expanded and cast to the type of the values.
    """
    value = parts[-1]
    projection = value._base  # torch's name for the tensor that the values are a view of; None if they are no view
    if projection is not None and are_side_by_side(parts, projection):
        return projection
    return copy_side_by_side(parts)


def copy_side_by_side(parts: list[Tensor]) -> Tensor:
    """Returns a contiguous tensor (T, B, features) in which the parts of each token lie side by side.

    It is a new tensor. Only if there is a single part that already lies like this, nothing is copied.

    Args:
        parts: As in `pack`.
    """
    value = parts[-1]
    bsz, heads, _, _ = value.size()
    parts_by_token = []
    for part in parts:
        expanded = part.to(value.dtype).expand(bsz, heads, -1, -1)  # (B, H, T, d)
        by_token = expanded.permute(2, 0, 1, 3)  # (T, B, H, d)
        parts_by_token.append(by_token.flatten(2))  # (T, B, H d)
    if len(parts_by_token) == 1:
        (values_by_token,) = parts_by_token
        return values_by_token.contiguous()  # `cat` would copy it even if it is contiguous
    return torch.cat(parts_by_token, dim=2)


def are_side_by_side(parts: list[Tensor], base: Tensor) -> bool:
    """Returns whether parts (B, H, T, d) are views of `base` (T, B, features), and lie in it as `pack` would put them.

    With two heads of 4 features, for example, the 24 features of a token have to be

        query 0 | query 1 | key 0 | key 1 | value 0 | value 1

    The queries begin at place 0, the keys at 8 and the values at 16. `base` has the tokens of all sentences in the
    order

        token 0 of sentence 0 | token 0 of sentence 1 | ... | token 1 of sentence 0 | ...

    With 3 sentences, the next sentence is 24 places away, the next head 4 places, the next token of the same sentence
    3 * 24 = 72 places, and the next feature 1 place. These distances are the strides of each part, (24, 4, 72, 1).
    """
    value = parts[-1]
    bsz, heads, length, _ = value.size()  # 3 and 2 in the example
    features = base.numel() // (length * bsz)  # 24
    begin_of_base = base.storage_offset()
    expected_begin = 0  # 0 for the queries, 8 for the keys, 16 for the values
    for part in parts:
        part_bsz, part_heads, _, width = part.size()  # the width is 4
        if part_bsz != bsz or part_heads != heads:
            return False  # all sentences or heads share the part, and it has to be repeated for each of them
        if part.storage_offset() - begin_of_base != expected_begin:
            return False
        if part.stride() != (features, width, bsz * features, 1):
            return False
        expected_begin += heads * width  # the next part begins where this one ends
    end_of_last_part = expected_begin  # 24
    if end_of_last_part != features:
        return False  # `base` has other features behind the parts
    # The kernels will give a gradient to `base`, but none to the parts. This is not right for every view.
    return can_replace_views(base, parts)


def order_by_head(x: Tensor, bsz: int, heads: int, dtype: torch.dtype) -> Tensor:
    """Returns a factor (B or 1, H or 1, T, r) as a contiguous tensor (H, T, B, r) of a type."""
    by_head = x.to(dtype).permute(1, 2, 0, 3)
    if by_head.size(0) != heads or by_head.size(2) != bsz:
        by_head = by_head.expand(heads, -1, bsz, -1)
    return by_head.contiguous()


def repeat_left_factor(outer: Outer, length: int) -> Outer:
    """Returns an outer product whose left factor is long enough for `length` columns.

    An outer product has a column for each pair of a left and a right feature. For example, 3 left and 4 right features
    give 12 columns. A sentence of 18 tokens needs 18 columns and 5 left features, as 5 * 4 is at least 18. They are
    0 1 2 0 1: after the last left feature, the first one follows again.

    Args:
        outer: The outer product. Its tensor `factors` has the left features, and behind them the right ones.
        length: The number of columns.
    """
    left_size = outer.left_size
    right_size = outer.factors.size(3) - left_size
    needed_left_size = divide_up(length, right_size)
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
    has_more_columns = shared_tensor.columns > x.size(3)
    if has_more_columns:
        return copy_by_head(x, heads)
    return shared_tensor


def find_parameter(x: Tensor, heads: int) -> SharedTensor | None:
    """Returns the parameter that begins with x in each head; None if there is no such parameter.

    For example, x (1, H, 5, k) is a view of the first 5 rows of a parameter (H, 256, k). A parameter may also have a
    single row for each head, as (H, columns). Then x is a view (1, H, 1, m) of its first m columns.

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
        return None  # it has no heads, rows and columns
    if num_heads != heads or x.size(1) != heads:
        return None  # all heads share x, or it is a part of the heads
    if not is_beginning(x, parameter, rows, columns):
        return None  # x lies elsewhere in the parameter
    if not can_replace_views(parameter, [x]):
        return None  # the gradient of x is no part of the parameter's gradient
    return SharedTensor(parameter, rows, columns)


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
    return SharedTensor(by_head, rows=x.size(2), columns=x.size(3))


def read_distances(values: Tensor, heads: int, length: int) -> SharedTensor:
    """Returns a parameter whose middle the values are, or a copy of the values if there is no such parameter.

    For example, a parameter has a value for each distance from -255 to 255. A sentence of T = 5 tokens has distances
    from -4 to 4, whose values are the middle of the parameter. Then the parameter is returned, and nothing is copied.
    The kernels read the middle of what is returned.

    Args:
        values: A value for each distance from -(T - 1) to T - 1, (1, H or 1, 1, 2 T - 1).
        heads: H.
        length: T.
    """
    parameter = values._base  # torch's name for the tensor that they are a view of; None if they are no view
    if parameter is not None and are_middle(values, parameter, heads, length):
        by_distance = parameter  # (H, 2 m + 1)
    else:
        values_by_head = values[0, :, 0]  # (H or 1, 2 T - 1): all sentences and rows share them
        by_distance = values_by_head.expand(heads, -1).contiguous()  # (H, 2 T - 1)
    # Each head has one row, with a column for each distance.
    return SharedTensor(by_distance, rows=1, columns=by_distance.size(1), is_by_distance=True)


def are_middle(values: Tensor, parameter: Tensor, heads: int, length: int) -> bool:
    """Returns whether values by distance are the middle of each head of a parameter, which can then be read instead.

    A parameter (H, 2 m + 1) has a value for each distance from -m to m. With m = 3, it lies in memory like this:

        distance          -3 -2  -1  0  1    2  3
        places of head 0   0  1 [ 2  3  4]   5  6
        places of head 1   7  8 [ 9 10 11]  12 13

    A sentence of T = 2 tokens needs the values in brackets, for the distances from -1 to 1. They begin at place 2, and
    the same values of the next head are 7 places away.

    Args:
        values: The values that a sentence needs, (1, H or 1, 1, 2 T - 1).
        parameter: Any tensor. Only one with two dimensions can be such a parameter.
        heads: H.
        length: T.
    """
    if parameter.dim() != 2:
        return False
    num_heads, num_distances = parameter.size()  # 7 distances in the example
    if num_heads != heads or values.size(1) != heads:
        return False  # all heads share the values, or they are of a part of the heads
    m = num_distances // 2  # 3
    expected_begin = m - (length - 1)  # 3 - 1 = 2: distance -1 is one place before the middle, which is place 3
    begin = values.storage_offset() - parameter.storage_offset()
    _, head_stride, _, distance_stride = values.stride()  # how far it is to the next head, and to the next distance
    if begin != expected_begin or head_stride != num_distances or distance_stride != 1:
        return False  # the values lie elsewhere
    # The kernels will give a gradient to the parameter, but none to the values. This is not right for every view.
    return can_replace_views(parameter, [values])


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
    """Returns {summand: its weight, (1, H, 1, 1)} for the summands that the kernels have to multiply by a weight.

    These are the summands of one term that has a weight. Only ``matrix`` may have several terms. They are multiplied by
    their weights when they are added up (`read_matrix`), so that their sum has none.
    """
    terms_by_summand: dict[str, Sequence[Term]] = {
        "product": summands.product,
        "dense": summands.dense,
        "outer": summands.outer,
        "bias_row": summands.bias_row,
        "matrix": summands.matrix,
    }
    weights: dict[str, Tensor] = {}
    for summand, terms in terms_by_summand.items():
        if len(terms) == 1:
            (term,) = terms
            if term.weight is not None:
                weights[summand] = term.weight
    return weights


def find_rows_of_weights(weights_by_summand: dict[str, Tensor], heads: int) -> Weights | None:
    """Returns the tensor (M, H) that all weights are rows of, and their rows; None if there is no such tensor.

    For example, a tensor of 3 rows for 4 heads lies in memory like this:

        row      0           1           2
        places   0 1 2 3     4 5 6 7     8 9 10 11

    A weight that begins at place 8 is row ``8 / 4 = 2``.

    Args:
        weights_by_summand: {summand: its weight, (1, H, 1, 1)}; at least one.
        heads: H.
    """
    weights = list(weights_by_summand.values())
    tensor = weights[0]._base  # torch's name for the tensor that a weight is a view of; None if it is no view
    if tensor is None or tensor.dim() != 2 or tensor.size(1) != heads:
        return None  # there is no tensor (M, H)
    if not can_replace_views(tensor, weights):
        return None  # not all weights are views of it, or the gradient of one is no part of its gradient
    begin_of_tensor = tensor.storage_offset()
    row_numbers: dict[str, int] = {}
    for summand, weight in weights_by_summand.items():
        begin = weight.storage_offset() - begin_of_tensor  # 8 in the example
        is_beginning_of_row = begin % heads == 0
        lies_side_by_side = weight.stride(1) == 1  # not so in a column, such as the places 0, 4 and 8
        if not is_beginning_of_row or not lies_side_by_side:
            return None
        row_numbers[summand] = begin // heads  # 8 / 4 = 2
    rows = WeightRows(**row_numbers)  # -1 for the summands without a weight
    return Weights(tensor, rows, num_rows=tensor.size(0))


# ---- addresses


def align_memory(tensors: Sequence[Any]) -> Sequence[Any]:
    """Returns tensors whose memory begins at multiples of 16 bytes, as kernels are compiled to expect.

    A tensor that begins elsewhere is replaced by a copy. None stays None.
    """
    for tensor in tensors:
        if tensor is not None and tensor.data_ptr() % 16 != 0:
            return [copy_unless_aligned(any_tensor) for any_tensor in tensors]
    return tensors  # as nearly always


def copy_unless_aligned(tensor: Any) -> Any:
    """Returns a tensor, or a copy of it if its memory does not begin at a multiple of 16 bytes. None stays None."""
    if tensor is None or tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone()
