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
    """Returns the terms of logits, sorted by the summand of the kernels that they are.

    Args:
        logits: S.
        value: V, (B, H, T, d_h), whose sizes tell how many sentences and rows there are.
    """
    bsz, _, length, _ = value.size()
    # Diagonals are a matrix that is the same for all sentences.
    summands = Summands(product=[], dense=[], outer=logits.outers, bias_row=[], matrix=[*logits.diagonals], others=[])
    if bsz == 1:
        add_products_of_one_sentence(summands, logits.products)
    else:
        add_products(summands, logits.products)
    for term in logits.biases:
        num_sentences, _, num_rows, _ = term.bias.size()
        if num_sentences > 1:
            summands.others.append(term)
        elif num_rows < length:  # a single row, which is added to all rows of the logits
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

    With one sentence, it makes no difference which tensors all sentences share. So each product may be any summand. The
    last product becomes ``product``: in a mixture, its queries and keys are those of the projections, which the kernels
    then read without a copy. The one before it becomes ``dense``, and all others are added to ``matrix``.
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
    width = product.key.size(3)  # r
    key = read_whole(product.key, heads)
    if key.columns != width:
        # The keys are the first columns of a larger parameter. The kernels would read all of its columns.
        key = copy_whole(product.key, heads)
    return DenseProduct(
        query=order_by_head(query, bsz, heads, value.dtype), key=key.tensor, key_rows=key.rows, width=width
    )


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
    """Returns the matrix R that the kernels read.

    - A single term is read without its weight, because the kernels multiply by the weight.
    - Several terms are added up. Each is multiplied by its own weight first, so that the sum has no weight.
    """
    if len(terms) > 1:
        return compute_matrix(terms, heads, length)
    (term,) = terms
    if isinstance(term, Bias):
        return read_whole(term.bias, heads)
    if isinstance(term, Diagonals):
        return read_distances(term.values, heads, length)
    return multiply_parameters(term, heads, length)


def compute_matrix(terms: list[Product | Bias | Diagonals], heads: int, length: int) -> Whole:
    """Returns the sum of terms, each multiplied by its weight, with as many rows and columns as the sentences have."""
    return read_whole(Logits(terms).total(length), heads)


def multiply_parameters(term: Product, heads: int, length: int) -> Whole:
    """Returns the matrix ``scale * R1 R2^T``, (H, rows, columns), without the weight of the term.

    Usually R1 and R2 are whole parameters, and the matrix has a row for each row of R1. It may have more rows than the
    sentences need. So neither R1 and R2 nor their gradients have to be sliced. In some cases, the matrix is computed
    from the first `length` rows of R1 and R2 instead, and has `length` rows.

    Args:
        term: The product of R1 (the query) and R2 (the key), (1, H or 1, length, k) each.
        heads: H.
        length: T.
    """
    query = read_whole(term.query, heads)
    key = read_whole(term.key, heads)
    has_too_many_rows = max(query.rows, key.rows) > MAX_ROWS_UNSLICED  # to multiply all would take too long
    has_scale = term.scale != 1.0  # `bmm` does not multiply by a scale
    has_3_dimensions = query.tensor.dim() == 3 and key.tensor.dim() == 3  # `bmm` takes no parameter (H, columns)
    if has_too_many_rows or has_scale or not has_3_dimensions:
        return compute_matrix([term._replace(weight=None)], heads, length)
    matrix = torch.bmm(query.tensor, key.tensor.transpose(1, 2))
    return Whole(matrix, rows=query.rows, columns=key.rows)


# ---- views of larger tensors
#
# torch keeps the tensor that a view is made of in the view's attribute `_base`. No public attribute has it. The first
# element of a view is ``view.storage_offset() - base.storage_offset()`` elements behind the first one of its base.


def can_replace_views(base: Tensor, views: Sequence[Tensor]) -> bool:
    """Returns whether the kernels may read the tensor `base` in place of tensors that may be views of it.

    The kernels then compute the gradient of `base`, and none for the views. So autograd must do nothing else with the
    views than to add their gradients to that of `base`.
    """
    if not base.is_contiguous():
        return False
    dtype = base.dtype
    requires_grad = base.requires_grad
    for view in views:
        if view._base is not base or view.dtype != dtype:
            return False  # a view of another tensor, or of the same memory as another type
        if view.requires_grad != requires_grad:
            return False  # made by ``base.detach()``, or without gradients
        if requires_grad and view.is_leaf:
            return False  # made by ``base.detach().requires_grad_()``; it gets a gradient of its own
        if view._backward_hooks or view.retains_grad:
            return False  # after ``view.register_hook(...)`` or ``view.retain_grad()``
    return True


def pack(parts: list[Tensor]) -> Tensor:
    """Returns a contiguous tensor (T, B, features) in which the parts of each token lie side by side.

    The joint projection of a layer computes such a tensor, and queries, keys and values are views of it. Then this
    tensor is returned, and nothing is copied.

    Args:
        parts: Either [values] or [queries, keys, values]. The values are (B, H, T, d_h). Queries and keys are
            (B or 1, H or 1, T, d), and are expanded and cast to the type of the values.
    """
    value = parts[-1]
    joint_projection = value._base  # the tensor that the values are a view of, or None
    if joint_projection is not None and are_side_by_side(parts, joint_projection):
        return joint_projection
    bsz, heads, _, _ = value.size()
    parts_by_token = []
    for part in parts:
        expanded = part.to(value.dtype).expand(bsz, heads, -1, -1)  # (B, H, T, d)
        by_token = expanded.permute(2, 0, 1, 3)  # (T, B, H, d)
        parts_by_token.append(by_token.flatten(2))  # (T, B, H d)
    if len(parts_by_token) > 1:
        return torch.cat(parts_by_token, dim=2)
    (values_by_token,) = parts_by_token
    return values_by_token.contiguous()  # `flatten` may have copied them already


def are_side_by_side(parts: list[Tensor], base: Tensor) -> bool:
    """Returns whether parts (B, H, T, d) are views of `base` (T, B, features), and lie in it as `pack` would put them.

    The features of a token are then those of the first part, head by head, and then those of the next part. With two
    heads of 4 features, for example, the 24 features of a token are

        query 0 | query 1 | key 0 | key 1 | value 0 | value 1

    The queries begin at 0, the keys at 8 and the values at 16. The stride of a dimension says how far apart two
    neighbours in it are: two heads are 4 numbers apart, two sentences 24, and two tokens of a sentence B times 24.
    """
    bsz, heads, length, _ = parts[-1].size()  # of the values, as no dimension of theirs is expanded
    num_features = base.numel() // (length * bsz)
    begin_of_base = base.storage_offset()
    expected_begin = 0
    for part in parts:
        width = part.size(3)
        begin = part.storage_offset() - begin_of_base
        # for sentences, heads, tokens and features
        expected_strides = (num_features, width, bsz * num_features, 1)
        if begin != expected_begin or part.stride() != expected_strides:
            return False
        expected_begin += heads * width
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
    """Returns the parameter that x is the beginning of, or a copy of x if it is no beginning of a parameter.

    For example, x may be the first 5 rows of each head of a parameter (H, 256, k), as a view (1, H, 5, k). The kernels
    read these rows in the parameter, so that nothing is copied, and the gradient is that of the parameter. A parameter
    of size (H, columns) is read as one with a single row for each head.

    Args:
        x: (1, H, n, m), or (1, 1, n, m) if all heads share it. Then it is copied for each head, as the kernels read it.
        heads: H.
    """
    base = x._base  # the tensor that x is a view of, or None
    if base is None or base.dim() not in (2, 3):
        return copy_whole(x, heads)
    columns = base.size(-1)
    rows = base.size(1) if base.dim() == 3 else 1
    have_all_heads = x.size(1) == heads and base.size(0) == heads
    if have_all_heads and is_beginning(x, base, rows, columns) and can_replace_views(base, [x]):
        return Whole(base, rows, columns)
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
    """Returns the parameter with values by distance that `values` is the middle of, or a copy of `values`.

    The parameter has a value for each distance from -m to m, (H, 2 m + 1). A sentence of T tokens needs the distances
    from -(T - 1) to T - 1. With m = 3 and T = 2, the parameter has values for the distances

        -3 -2 [-1 0 1] 2 3

    and the sentence needs those in brackets, which begin at index ``m - (T - 1) = 2``. The kernels read them in the
    parameter.

    Args:
        values: The values of the sentence, (1, H, 1, 2 T - 1).
        heads: H.
        length: T.
    """
    base = values._base  # the tensor that they are a view of, or None
    if base is not None and base.dim() == 2 and base.size(0) == heads and values.size(1) == heads:
        num_distances = base.size(1)  # 2 m + 1
        largest_distance = num_distances // 2  # m
        begin = values.storage_offset() - base.storage_offset()
        is_middle = begin == largest_distance - (length - 1) and values.stride(1) == num_distances
        if is_middle and can_replace_views(base, [values]):
            return Whole(base, rows=1, columns=num_distances, is_by_distance=True)
    values_by_head = values[0, :, 0].expand(heads, -1).contiguous()  # (H, 2 T - 1)
    return Whole(values_by_head, rows=1, columns=values_by_head.size(1), is_by_distance=True)


# ---- the weights of a mixture


def read_weights(summands: Summands, heads: int) -> Weights:
    """Returns the weights of a mixture as one tensor (M, H).

    A mixture makes its weights as views of the rows of one tensor. Then this tensor is returned, and nothing is copied.
    Other weights are joined to a new tensor.

    Args:
        summands: The terms with their weights.
        heads: H.
    """
    weights = find_weights(summands)
    if not weights:
        return NO_WEIGHTS
    rows_of_one_tensor = find_rows(weights, heads)
    if rows_of_one_tensor is not None:
        return rows_of_one_tensor
    joined = torch.cat([weight.reshape(1, heads) for weight in weights.values()])
    row_numbers = {summand: row_number for row_number, summand in enumerate(weights)}
    return Weights(joined, WeightRows(**row_numbers), num_rows=len(weights))


def find_weights(summands: Summands) -> dict[str, Tensor]:
    """Returns {summand: its weight, (1, H, 1, 1)} for the summands that have a weight."""
    terms_by_summand: dict[str, Sequence[Term]] = {
        "product": summands.product,
        "dense": summands.dense,
        "outer": summands.outer,
        "bias_row": summands.bias_row,
        "matrix": summands.matrix,
    }
    weights: dict[str, Tensor] = {}
    for summand, terms in terms_by_summand.items():
        # Only `matrix` may have several terms. They have no weight here, because `read_matrix` has multiplied each of
        # them by its own.
        if len(terms) == 1:
            weight = terms[0].weight
            if weight is not None:
                weights[summand] = weight
    return weights


def find_rows(weights: dict[str, Tensor], heads: int) -> Weights | None:
    """Returns the tensor (M, H) that all weights are rows of, or None if there is no such tensor.

    For example, a tensor of 3 rows for 4 heads has 12 numbers. Its rows begin at 0, 4 and 8. A weight that begins at 8
    is row 2.

    Args:
        weights: {summand: its weight, (1, H, 1, 1)}; at least one.
        heads: H.
    """
    first_weight, *_ = weights.values()
    base = first_weight._base  # the tensor that the weight is a view of, or None
    if base is None or base.dim() != 2 or base.size(1) != heads:
        return None
    if not can_replace_views(base, list(weights.values())):
        return None
    row_numbers: dict[str, int] = {}
    for summand, weight in weights.items():
        begin = weight.storage_offset() - base.storage_offset()
        is_row = begin % heads == 0 and weight.stride(1) == 1
        if not is_row:
            return None
        row_numbers[summand] = begin // heads
    return Weights(base, WeightRows(**row_numbers), num_rows=base.size(0))


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
