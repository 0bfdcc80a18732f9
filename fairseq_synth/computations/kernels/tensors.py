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
    hidden: Tensor | None  # the padding mask in bytes, not 0 at padding


def sort_terms(logits: Logits, value: Tensor) -> Summands:
    """Returns the terms of logits, sorted by how the kernels compute them.

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
    summands = Summands(product=[], dense=[], outer=logits.outers, bias_row=[], matrix=[*logits.diagonals], others=[])
    if bsz == 1:
        # No two sentences can differ, so that there is a choice where to put each product.
        add_products_of_one_sentence(summands, logits.products)
    else:
        add_products(summands, logits.products)
    for term in logits.biases:
        num_sentences, _, num_rows, _ = term.bias.size()
        if num_sentences > 1:
            summands.others.append(term)
        elif num_rows < length:  # a bias has 1 row or T rows
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


class Whole(NamedTuple):
    """A tensor that a batch shares, as the kernels read it: usually a whole parameter. `NOTHING` stands for none.

    It may have more rows and columns than the sentences need. The kernels read the first ones.
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
NOTHING = Whole(tensor=None, rows=0, columns=0)
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
    tensors = CallTensors(
        packed=projections.packed,
        dense_query=dense.query,
        dense_key=dense.key,
        factors=outer.factors,
        bias_row=bias_row.tensor,
        matrix=matrix.tensor,
        weights=weights.tensor,
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
        has_hidden=key_padding_mask is not None,
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
    hidden = None
    if key_padding_mask is not None:
        hidden = key_padding_mask.to(torch.bool).contiguous().view(torch.uint8)  # the kernels take no booleans
    hidden, *aligned_tensors = align_memory([hidden, *tensors])
    return Call(logits, value, key_padding_mask, attn_mask, layout, CallTensors(*aligned_tensors), hidden)


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
    copied.

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
    width = product.key.size(3)  # r
    parameter = read_whole(product.key, heads)
    if parameter.columns > width:
        # The kernels read the first rows of a parameter, but all of its columns. These keys are a part of the columns.
        parameter = copy_whole(product.key, heads)
    return DenseProduct(query_by_head, key=parameter.tensor, key_rows=parameter.rows, width=width)


def read_outer_product(outers: list[Outer], value: Tensor) -> OuterProduct:
    """Returns the factors of an outer product, which are enough for all columns."""
    (outer,) = outers
    bsz, heads, length, _ = value.size()
    outer = repeat_left_factor(outer, length)
    right_width = outer.factors.size(3) - outer.left_size
    return OuterProduct(order_by_head(outer.factors, bsz, heads, value.dtype), outer.left_size, right_width)


def read_bias_row(biases: list[Bias], heads: int) -> Whole:
    """Returns the row of a bias whose rows are all alike."""
    (bias,) = biases
    return read_whole(bias.bias, heads)


def read_matrix(terms: list[Product | Bias | Diagonals], heads: int, length: int) -> Whole:
    """Returns the matrix R that the kernels read: the terms that are the same for all sentences, added up.

    A single term is returned without its weight, because the kernels multiply the matrix by it. They know only one
    weight. So several terms are multiplied by their weights here, before they are added up.
    """
    if len(terms) > 1:
        return add_up(terms, heads, length)
    (term,) = terms
    if isinstance(term, Bias):  # a matrix, as in random
        return read_whole(term.bias, heads)
    if isinstance(term, Diagonals):  # a value for each distance
        return read_distances(term.values, heads, length)
    return multiply_parameters(term, heads, length)  # R1 R2^T, as in factorized random


def add_up(terms: list[Product | Bias | Diagonals], heads: int, length: int) -> Whole:
    """Returns the sum of terms, each multiplied by its weight, as a matrix (H, length, length)."""
    return read_whole(Logits(terms).total(length), heads)


def multiply_parameters(term: Product, heads: int, length: int) -> Whole:
    """Returns the matrix ``scale * R1 R2^T``, (H, rows, columns), without the weight of the term.

    R1 and R2 are usually the first rows of parameters, for example 10 of 256 rows for a sentence of 10 tokens. The
    matrix is computed in one of two ways:

    - All rows are multiplied, which gives a matrix (H, 256, 256). The kernels read its first 10 rows and columns. This
      is faster, because neither the parameters nor their gradients are sliced.
    - Only 10 rows are multiplied, which gives a matrix (H, 10, 10). This is for parameters of very many rows, and for
      products that are more than one `torch.bmm`.

    Args:
        term: The product of R1 (the query) and R2 (the key), (1, H or 1, length, k) each.
        heads: H.
        length: T.
    """
    parameter_1 = read_whole(term.query, heads)
    parameter_2 = read_whole(term.key, heads)
    has_many_rows = max(parameter_1.rows, parameter_2.rows) > MAX_ROWS_UNSLICED
    have_3_dimensions = parameter_1.tensor.dim() == 3 and parameter_2.tensor.dim() == 3
    is_one_bmm = have_3_dimensions and term.scale == 1.0
    if has_many_rows or not is_one_bmm:
        term_without_weight = term._replace(weight=None)
        return add_up([term_without_weight], heads, length)
    matrix = torch.bmm(parameter_1.tensor, parameter_2.tensor.transpose(1, 2))
    return Whole(matrix, rows=parameter_1.rows, columns=parameter_2.rows)


# ---- views of larger tensors
#
# torch keeps the tensor that a view is made of in the view's attribute `_base`. No public attribute has it. The first
# element of a view is ``view.storage_offset() - base.storage_offset()`` elements behind the first one of its base.


def can_replace_views(base: Tensor, views: Sequence[Tensor]) -> bool:
    """Returns whether the kernels may read the tensor `base` in place of tensors that may be views of it.

    The kernels then give a gradient to `base`, but none to the views. This is right for a view such as ``base[:, :5]``,
    whose gradient autograd adds to the gradient of `base`. It is wrong for other views:

    - ``base.view(torch.int16)`` has other numbers than `base`.
    - ``base.detach()`` gives no gradient to `base`.
    - ``base.detach().requires_grad_()`` gets a gradient of its own. It is a leaf: no operation of autograd made it.
    - A view with a hook, or after ``view.retain_grad()``, needs its gradient for something else, too.
    """
    if not base.is_contiguous():
        return False
    dtype = base.dtype
    requires_grad = base.requires_grad
    for view in views:
        if view._base is not base or view.dtype != dtype:
            return False
        if view.requires_grad != requires_grad:
            return False
        is_detached = requires_grad and view.is_leaf
        if is_detached:
            return False
        if view._backward_hooks or view.retains_grad:
            return False
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

    The queries begin at 0, the keys at 8 and the values at 16. The stride of a dimension is the number of places from
    one of its elements to the next. `base` has the tokens of all sentences in the order

        token 0 of sentence 0 | token 0 of sentence 1 | ... | token 1 of sentence 0 | ...

    With 3 sentences, the next sentence is 24 places away, the next head 4 places, the next token of the same sentence
    3 * 24 = 72 places, and the next feature 1 place. So the strides of each part are (24, 4, 72, 1).
    """
    value = parts[-1]  # the last part has all sentences and heads; the others may have one that stands for all
    bsz, heads, length, _ = value.size()
    num_features = base.numel() // (length * bsz)
    sentence_stride = num_features
    token_stride = bsz * num_features
    begin_of_base = base.storage_offset()
    expected_begin = 0
    for part in parts:
        head_stride = part.size(3)  # d
        begin = part.storage_offset() - begin_of_base
        if begin != expected_begin or part.stride() != (sentence_stride, head_stride, token_stride, 1):
            return False
        expected_begin += heads * head_stride
    all_features_are_used = expected_begin == num_features
    return all_features_are_used and can_replace_views(base, parts)


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


def read_whole(x: Tensor, heads: int) -> Whole:
    """Returns a tensor in which the kernels find x as the first rows and columns of each head.

    - Usually x is a part of a parameter, such as the first 5 rows of a parameter (H, 256, k), as a view (1, H, 5, k).
      Then the whole parameter is returned. Nothing is copied, and the kernels compute the gradient of the parameter. A
      parameter (H, columns) has a single row for each head.
    - In all other cases, a copy of x is returned.

    Args:
        x: (1, H, n, m), or (1, 1, n, m) if all heads share it. Then the copy has it H times.
        heads: H.
    """
    parameter = x._base  # torch's name for the tensor that x is a view of; None if x is no view
    if parameter is None:
        return copy_whole(x, heads)
    sizes = parameter.size()
    if len(sizes) == 3:
        num_heads, rows, columns = sizes
    elif len(sizes) == 2:
        num_heads, columns = sizes
        rows = 1
    else:
        return copy_whole(x, heads)
    have_all_heads = x.size(1) == heads and num_heads == heads
    if have_all_heads and is_beginning(x, parameter, rows, columns) and can_replace_views(parameter, [x]):
        return Whole(parameter, rows, columns)
    return copy_whole(x, heads)


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


def copy_whole(x: Tensor, heads: int) -> Whole:
    """Returns x (1, H or 1, n, m) as a contiguous tensor (H, n, m); x itself, without a copy, if it lies like that."""
    by_head = x[0].expand(heads, -1, -1).contiguous()
    return Whole(by_head, rows=x.size(2), columns=x.size(3))


def read_distances(values: Tensor, heads: int, length: int) -> Whole:
    """Returns values by distance, in the middle of which the kernels find those that a sentence needs.

    A sentence of T tokens needs the distances from -(T - 1) to T - 1. A parameter (H, 2 m + 1) has a value for each
    distance from -m to m. With m = 3 and T = 2, the sentence needs the three values in brackets:

        -3 -2 [-1 0 1] 2 3

    They begin 2 places after the parameter, and the same 3 values of the next head follow 7 places later. If `values`
    lie like that in a parameter, the whole parameter is returned, and nothing is copied. If not, a copy of `values` is
    returned, which are the middle of themselves.

    Args:
        values: The values of the sentence, (1, H or 1, 1, 2 T - 1).
        heads: H.
        length: T.
    """
    parameter = values._base  # torch's name for the tensor that they are a view of; None if they are no view
    if parameter is not None and parameter.dim() == 2:
        num_heads, num_distances = parameter.size()
        largest_distance = num_distances // 2  # m
        # Where the values are in memory: how many places after the parameter, and how many places from head to head.
        begin = values.storage_offset() - parameter.storage_offset()
        _, head_stride, _, distance_stride = values.stride()
        have_all_heads = num_heads == heads and values.size(1) == heads
        are_middle_of_first_head = begin == largest_distance - (length - 1) and distance_stride == 1
        are_middle = have_all_heads and are_middle_of_first_head and head_stride == num_distances
        if are_middle and can_replace_views(parameter, [values]):
            return Whole(parameter, rows=1, columns=num_distances, is_by_distance=True)
    values_by_head = values[0, :, 0].expand(heads, -1).contiguous()  # (H, 2 T - 1)
    return Whole(values_by_head, rows=1, columns=values_by_head.size(1), is_by_distance=True)


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
    """Returns {summand: its weight, (1, H, 1, 1)} for the summands that consist of one term with a weight."""
    terms_by_summand: dict[str, Sequence[Term]] = {
        "product": summands.product,
        "dense": summands.dense,
        "outer": summands.outer,
        "bias_row": summands.bias_row,
        "matrix": summands.matrix,
    }
    weights: dict[str, Tensor] = {}
    for summand, terms in terms_by_summand.items():
        # Most summands have one term or none. Only `matrix` may have several, and `read_matrix` multiplies each of them
        # by its weight, so that the sum has none.
        if len(terms) == 1:
            weight = terms[0].weight
            if weight is not None:
                weights[summand] = weight
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
    tensor = weights[0]._base  # torch's name for the tensor that a weight is a view of; None if it is no view
    if tensor is None or tensor.dim() != 2 or tensor.size(1) != heads:
        return None
    if not can_replace_views(tensor, weights):
        return None  # some weight is a view of another tensor, or has a gradient of its own
    begin_of_tensor = tensor.storage_offset()
    row_numbers: dict[str, int] = {}
    for summand, weight in weights_by_summand.items():
        begin = weight.storage_offset() - begin_of_tensor
        begins_a_row = begin % heads == 0
        lies_side_by_side = weight.stride(1) == 1
        if not begins_a_row or not lies_side_by_side:
            return None
        row_numbers[summand] = begin // heads
    # A summand without a weight is not in `row_numbers`. Its row is -1.
    return Weights(tensor, WeightRows(**row_numbers), num_rows=tensor.size(0))


# ---- addresses


def align_memory(tensors: list[Any]) -> list[Any]:
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
