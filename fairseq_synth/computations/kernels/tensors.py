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
            return "a bias of each sentence, or shared queries of keys that differ by sentence"
        if max(len(self.product), len(self.dense), len(self.outer), len(self.bias_row)) > 1:
            return "two summands of one kind"
        if self.product and not (self.dense or self.outer or self.bias_row or self.matrix):
            return "an inner product alone, which torch's fused attention is for"
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
    """Returns the terms of the logits S, sorted by how the kernels compute them.

    ============  =====================================================================
    summand       terms
    ============  =====================================================================
    ``product``   products of queries and keys that both differ by sentence
    ``dense``     products of queries that differ by sentence, and keys that are shared
    ``outer``     outer products
    ``bias_row``  biases of a single row, which is added to all rows of the logits
    ``matrix``    anything that is the same matrix (T, T) for all sentences
    ``others``    everything else, for which there is no kernel
    ============  =====================================================================

    Args:
        logits: S.
        value: V, (B, H, T, d_h), whose sizes tell how many sentences and rows there are.
    """
    bsz, _, length, _ = value.size()
    # Outer products and diagonals are always of one summand. Products and biases are added to the lists below.
    outer = list(logits.outers)
    matrix: list[Product | Bias | Diagonals] = list(logits.diagonals)
    summands = Summands(product=[], dense=[], outer=outer, bias_row=[], matrix=matrix, others=[])
    if bsz == 1:
        # No two sentences can differ, so that there is a choice where to put each product.
        add_products_of_one_sentence(summands, logits.products)
    else:
        add_products(summands, logits.products)
    for term in logits.biases:
        num_sentences, _, num_rows, _ = term.bias.size()
        is_shared = num_sentences == 1
        is_single_row = num_rows < length  # a bias has 1 row or T rows
        if not is_shared:
            summands.others.append(term)
        elif is_single_row:
            summands.bias_row.append(term)
        else:
            summands.matrix.append(term)
    return summands


def add_products(summands: Summands, products: Sequence[Product]) -> None:
    """Adds the products of a batch of several sentences to the summand of the kernels that each of them is.

    The first size of a product's factor is 1 if all sentences share it, and B otherwise. So there are four kinds:

    - Both factors are shared, as in factorized random, where R1 R2^T is a matrix for all sentences: ``matrix``.
    - Only the queries are shared, which no function of the paper does: ``others``.
    - Only the keys are shared, as in dense, where W2 takes the place of the keys: ``dense``.
    - Both differ by sentence, as in vanilla: ``product``.
    """
    for product in products:
        is_query_shared = product.query.size(0) == 1
        is_key_shared = product.key.size(0) == 1
        if is_query_shared and is_key_shared:
            summands.matrix.append(product)
        elif is_query_shared:
            summands.others.append(product)
        elif is_key_shared:
            summands.dense.append(product)
        else:
            summands.product.append(product)


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
    summands: Summands,
) -> Call:
    """Returns the tensors of a call that the kernels take, and the layout of the call.

    Args:
        logits, value, key_padding_mask, attn_mask, dropout: As in `computations.attend`.
        summands: The sorted terms of the logits. Each has at most one term, except `matrix`.
    """
    bsz, heads, length, value_width = value.size()
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

    The keys are usually the first T rows of a parameter (H, rows, r). The kernels read them there, so that they are not
    copied. In a head, the key of token j begins at place ``j r``, and the next head begins after ``rows r`` places.

    Args:
        products: A single product ``scale * query @ key^T``. The query is (B or 1, H or 1, T, r), the key (1, H or 1,
            T, r).
        value: (B, H, T, d_h).
    """
    (product,) = products
    bsz, heads, _, _ = value.size()
    query = product.query
    if product.scale != 1.0:
        query = query * product.scale  # the kernels have a scale for the summand `product`, but none for this one
    query_by_head = order_by_head(query, bsz, heads, value.dtype)
    keys = find_rows_or_copy(product.key, heads)
    return DenseProduct(query_by_head, key=keys.tensor, key_rows=keys.rows, width=keys.columns)


def read_outer_product(outers: list[Outer], value: Tensor) -> OuterProduct:
    """Returns the factors of an outer product, which are enough for all columns."""
    (outer,) = outers
    bsz, heads, length, _ = value.size()
    outer = repeat_left_factor(outer, length)
    right_width = outer.factors.size(3) - outer.left_size
    return OuterProduct(order_by_head(outer.factors, bsz, heads, value.dtype), outer.left_size, right_width)


def read_bias_row(biases: list[Bias], heads: int) -> SharedTensor:
    """Returns the row of a bias whose rows are all alike."""
    (bias,) = biases
    return find_or_copy(bias.bias, heads)


def read_matrix(terms: list[Product | Bias | Diagonals], heads: int, length: int) -> SharedTensor:
    """Returns the matrix R that the kernels read: the terms that are the same for all sentences, added up."""
    if len(terms) > 1:
        # Each term is multiplied by its weight here, because the kernels can multiply R by one weight only.
        return add_up(terms, heads, length)
    # The kernels multiply R by the weight of a single term, so that R is the term without its weight.
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
      for products that are more than one `torch.bmm`.

    Args:
        term: The product of R1 (the query) and R2 (the key), (1, H or 1, length, k) each.
        heads: H.
        length: T.
    """
    factor_1 = find_rows_or_copy(term.query, heads)  # R1, and perhaps more rows behind its own
    factor_2 = find_rows_or_copy(term.key, heads)
    has_few_rows = max(factor_1.rows, factor_2.rows) <= MAX_ROWS_UNSLICED
    is_one_bmm = factor_1.tensor.dim() == 3 and factor_2.tensor.dim() == 3 and term.scale == 1.0
    if has_few_rows and is_one_bmm:
        matrix = torch.bmm(factor_1.tensor, factor_2.tensor.transpose(1, 2))
        return SharedTensor(matrix, rows=factor_1.rows, columns=factor_2.rows)
    term_without_weight = term._replace(weight=None)
    return add_up([term_without_weight], heads, length)


# ---- views of larger tensors
#
# torch keeps the tensor that a view is made of in the view's attribute `_base`. No public attribute has it. The first
# element of a view is ``view.storage_offset() - base.storage_offset()`` elements behind the first one of its base.


def can_replace_views(base: Tensor, views: Sequence[Tensor]) -> bool:
    """Returns whether the kernels may read the tensor `base` in place of tensors that may be views of it.

    The kernels then give a gradient to `base`, but none to the views. This is right for a view such as ``base[:, :5]``,
    whose gradient autograd adds to the gradient of `base`. It is wrong for other views, which are refused one by one.
    """
    if not base.is_contiguous():
        return False  # the kernels compute addresses from sizes, and know no strides
    dtype = base.dtype
    requires_grad = base.requires_grad
    for view in views:
        if view._base is not base:
            return False
        if view.dtype != dtype:
            return False  # ``base.view(torch.int16)`` has other numbers than `base`
        if view.requires_grad != requires_grad:
            return False  # ``base.detach()`` gives no gradient to `base`
        if requires_grad and view.is_leaf:
            return False  # ``base.detach().requires_grad_()`` has a gradient of its own: no operation made it of `base`
        if view._backward_hooks or view.retains_grad:
            return False  # a hook, or ``view.retain_grad()``, asks for the gradient of the view itself
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
    """Returns what `pack` returns, with the parts copied into a new tensor. Values alone may lie as they should."""
    value = parts[-1]
    bsz, heads, _, _ = value.size()
    parts_by_token = []
    for part in parts:
        expanded = part.to(value.dtype).expand(bsz, heads, -1, -1)  # (B, H, T, d)
        by_token = expanded.permute(2, 0, 1, 3)  # (T, B, H, d)
        parts_by_token.append(by_token.flatten(2))  # (T, B, H d)
    if len(parts_by_token) == 1:
        (values_by_token,) = parts_by_token
        return values_by_token.contiguous()
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
        expected_begin += heads * width
    has_no_other_features = expected_begin == features
    return has_no_other_features and can_replace_views(base, parts)


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
    """Returns a tensor in which the kernels find x as the first rows and columns of each head.

    Usually x is a part of a parameter. Then this is the parameter: nothing is copied, and the kernels compute the
    gradient of the parameter. In all other cases, it is a copy of x.

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
    found = find_or_copy(x, heads)
    has_more_columns = found.columns > x.size(3)
    if has_more_columns:
        return copy_by_head(x, heads)
    return found


def find_parameter(x: Tensor, heads: int) -> SharedTensor | None:
    """Returns the parameter of which x is the first rows and columns of each head; None if there is no such parameter.

    For example, x is the first 5 rows of a parameter (H, 256, k), as a view (1, H, 5, k). A parameter (H, columns) has
    a single row for each head.

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
        return None
    if num_heads != heads or x.size(1) != heads:
        return None  # all heads share x, or it is a part of the heads
    if not is_beginning(x, parameter, rows, columns):
        return None
    if not can_replace_views(parameter, [x]):
        return None  # the numbers are others than in memory, or x has a gradient of its own
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
    """Returns values by distance, in the middle of which the kernels find those that a sentence needs.

    Usually the values are the middle of a parameter. Then it is returned, and nothing is copied. In all other cases, a
    copy of the values is returned, which has nothing but this middle.

    Args:
        values: A value for each distance from -(T - 1) to T - 1, (1, H or 1, 1, 2 T - 1).
        heads: H.
        length: T.
    """
    parameter = values._base  # torch's name for the tensor that they are a view of; None if they are no view
    if parameter is not None and are_middle(values, parameter, heads, length):
        return SharedTensor(parameter, rows=1, columns=parameter.size(1), is_by_distance=True)
    values_by_head = values[0, :, 0]  # (H or 1, 2 T - 1): all sentences and rows share them
    copied_values = values_by_head.expand(heads, -1).contiguous()  # (H, 2 T - 1)
    return SharedTensor(copied_values, rows=1, columns=copied_values.size(1), is_by_distance=True)


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
        return False
    return can_replace_views(parameter, [values])


# ---- the weights of a mixture


def read_weights(summands: Summands, heads: int) -> Weights:
    """Returns the weights of a mixture as one tensor (M, H), and the number of the row for each summand.

    The weights of a mixture are usually rows of one tensor. Then this tensor is returned, and nothing is copied. Other
    weights are joined to a new tensor, in the order of their summands. If ``dense`` and ``matrix`` have weights, their
    rows are 0 and 1, and the other rows of `WeightRows` are -1.

    Args:
        summands: The terms with their weights.
        heads: H.
    """
    weights_by_summand = find_weights(summands)
    if not weights_by_summand:
        return NO_WEIGHTS
    weights_in_one_tensor = find_tensor_of_weights(weights_by_summand, heads)
    if weights_in_one_tensor is not None:
        return weights_in_one_tensor
    joined = torch.cat([weight.reshape(1, heads) for weight in weights_by_summand.values()])
    row_numbers = {summand: row_number for row_number, summand in enumerate(weights_by_summand)}
    return Weights(joined, WeightRows(**row_numbers), num_rows=len(weights_by_summand))


def find_weights(summands: Summands) -> dict[str, Tensor]:
    """Returns {summand: its weight, (1, H, 1, 1)} for the summands that the kernels have to multiply by a weight."""
    # Each summand has one term or none, except `matrix`.
    terms_by_summand: dict[str, Sequence[Term]] = {
        "product": summands.product,
        "dense": summands.dense,
        "outer": summands.outer,
        "bias_row": summands.bias_row,
    }
    # If `matrix` has several terms, `read_matrix` multiplies each of them by its weight, and the sum has none.
    if len(summands.matrix) == 1:
        terms_by_summand["matrix"] = summands.matrix
    weights: dict[str, Tensor] = {}
    for summand, terms in terms_by_summand.items():
        for term in terms:
            if term.weight is not None:
                weights[summand] = term.weight
    return weights


def find_tensor_of_weights(weights_by_summand: dict[str, Tensor], heads: int) -> Weights | None:
    """Returns the tensor (M, H) that all weights are rows of, or None if there is no such tensor.

    For example, a tensor of 3 rows for 4 heads has 12 numbers, side by side. Its rows begin at the places 0, 4 and 8. A
    weight that begins at place 8 is row 2, if its numbers lie side by side, too.

    Args:
        weights_by_summand: {summand: its weight, (1, H, 1, 1)}; at least one.
        heads: H.
    """
    weights = list(weights_by_summand.values())
    tensor = weights[0]._base  # torch's name for the tensor that a weight is a view of
    if tensor is None:
        return None  # the first weight is no view
    if tensor.dim() != 2 or tensor.size(1) != heads:
        return None  # its rows have another size than a weight
    if not can_replace_views(tensor, weights):
        return None  # some weight is a view of another tensor or has a gradient of its own, or rows are not contiguous
    begin_of_tensor = tensor.storage_offset()
    row_numbers: dict[str, int] = {}
    for summand, weight in weights_by_summand.items():
        if weight.stride(1) != 1:
            return None  # the numbers do not lie side by side, as in a column
        begin = weight.storage_offset() - begin_of_tensor  # 8 in the example
        if begin % heads != 0:
            return None  # the weight begins in the middle of a row
        row_numbers[summand] = begin // heads  # 8 / 4 = 2
    # A summand without a weight is not in `row_numbers`. Its row is -1.
    return Weights(tensor, WeightRows(**row_numbers), num_rows=tensor.size(0))


# ---- addresses


def align_memory(tensors: Sequence[Any]) -> Sequence[Any]:
    """Returns tensors whose memory begins at multiples of 16 bytes, as kernels are compiled to expect.

    A tensor that begins elsewhere is replaced by a copy. None stays None.
    """
    for tensor in tensors:
        if tensor is not None and tensor.data_ptr() % 16 != 0:
            return [copy_unless_aligned(any_tensor) for any_tensor in tensors]
    return tensors  # as nearly always


def copy_unless_aligned(tensor: Tensor | None) -> Tensor | None:
    """Returns a tensor, or a copy of it if its memory does not begin at a multiple of 16 bytes. None stays None."""
    if tensor is None or tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone()
