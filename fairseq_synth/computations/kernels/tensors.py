"""The tensors of a call as the kernels read them.

A kernel reads each tensor in one way only:

=======  =====================================================================================
packed   (T, B, features): for every token its queries and keys, if there are any, and its values
x, w     (H, T, B, X) and (H, l, X): the product with shared keys
pair     (H, T, B, a + b): both factors of the outer product
c        (H, l): a row that is added to all rows of the logits
r        (H, l, l): a matrix; or its values by distance, (H, 2 m + 1)
weights  (M, H): the weights of the mixture
=======  =====================================================================================

Projections, parameters and weights reach a computation as views of such tensors. Where a view lies as expected, the
kernels read the tensor behind it and give that tensor its gradient, so that nothing is sliced, joined or padded. Every
other tensor is copied.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...logits import Bias, Diagonals, Logits, Outer, Product, Term
from ...positions import take_positions
from .launches import SUMMANDS, Layout, WeightRows, divide_up

# Up to so many rows R1 R2^T is computed whole: to slice R1 and R2 first would add a launch for each slice's gradient.
MAX_ROWS_UNSLICED = 512
NO_WEIGHTS = WeightRows()


class Summands(NamedTuple):
    """The terms of logits, sorted by the place that the kernels have for them."""

    inner: list[Product]  # queries and keys both differ by sentence
    shared_keys: list[Product]
    outer: list[Outer]
    rows: list[Bias]
    matrices: list[Product | Bias | Diagonals]  # shared by the batch; the kernels add them up
    others: list[Product | Bias]  # the kernels have no place for these

    def reason_to_refuse(self) -> str:
        """Returns why the kernels cannot take these summands; an empty string if they can."""
        if self.others:
            return "a bias of each sentence, or shared queries of keys that differ by sentence"
        if max(len(self.inner), len(self.shared_keys), len(self.outer), len(self.rows)) > 1:
            return "two summands of one kind"
        if self.inner and not (self.shared_keys or self.outer or self.rows or self.matrices):
            return "an inner product alone, which torch's fused attention is for"
        return ""

    def by_weight(self) -> tuple[Sequence[Term], ...]:
        """Returns the terms that may have a weight of their own in the kernels, in the order of `launches.SUMMANDS`."""
        return self.inner, self.shared_keys, self.outer, self.rows, self.matrices

    def number_of_tiles(self) -> int:
        """Returns how many summands take registers for a whole tile of logits."""
        return len(self.inner) + len(self.shared_keys) + len(self.outer) + len(self.matrices)

    def widest_factor(self) -> int:
        """Returns the largest number of features of a query."""
        return max([product.query.size(3) for product in self.inner + self.shared_keys], default=0)


class Call(NamedTuple):
    """A call of the attention, and what the kernels read for it."""

    logits: Logits
    value: Tensor
    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    layout: Layout
    tensors: list[Tensor]  # those of `launches.NAMES` that there are, in that order


class Whole(NamedTuple):
    """A tensor that a batch shares, as the kernels read it: usually a whole parameter.

    It may have more rows and columns than the sentences need. The kernels read the first ones.
    """

    tensor: Tensor  # contiguous: (H, rows, columns), or (H, columns) with one row for each head
    rows: int
    columns: int


class Weights(NamedTuple):
    """The weights of a mixture, and which row is the weight of which summand."""

    tensor: Tensor  # (M, H)
    rows: WeightRows


def sort_terms(logits: Logits, value: Tensor) -> Summands:
    """Returns the terms of logits by the places that the kernels have for them.

    Args:
        logits: S.
        value: V, (B, H, T, d_h), whose sizes tell how many sentences and rows there are.
    """
    bsz = value.size(0)
    length = value.size(2)
    if bsz == 1:
        summands = sort_products_of_one_sentence(logits.products)
    else:
        summands = sort_products(logits.products)
    summands.outer.extend(logits.outers)
    # Diagonals are a matrix that is the same for all sentences, given by one value for each distance.
    summands.matrices.extend(logits.diagonals)
    for bias in logits.biases:
        differs_by_sentence = bias.bias.size(0) > 1
        has_one_row_for_all = bias.bias.size(2) < length
        if differs_by_sentence:
            summands.others.append(bias)
        elif has_one_row_for_all:
            summands.rows.append(bias)
        else:
            summands.matrices.append(bias)
    return summands


def sort_products(products: list[Product]) -> Summands:
    """Returns the inner products of a batch by the places that the kernels have for them.

    The lists `outer` and `rows` are empty. `sort_terms` adds all terms that are no products.

    The first size of a factor is 1 if all sentences share it, and B otherwise. So there are four kinds of products:

    - Queries and keys differ by sentence, as in vanilla: ``inner``.
    - Only the keys are shared, as in dense, where W2 takes the place of the keys: ``shared_keys``.
    - Both are shared, as in factorized random, where R1 R2^T is a matrix for all sentences: ``matrices``.
    - Only the queries are shared, which no function of the paper does: ``others``.
    """
    summands = Summands(inner=[], shared_keys=[], outer=[], rows=[], matrices=[], others=[])
    for product in products:
        is_query_shared = product.query.size(0) == 1
        is_key_shared = product.key.size(0) == 1
        if is_query_shared and is_key_shared:
            summands.matrices.append(product)
        elif is_query_shared:
            summands.others.append(product)
        elif is_key_shared:
            summands.shared_keys.append(product)
        else:
            summands.inner.append(product)
    return summands


def sort_products_of_one_sentence(products: list[Product]) -> Summands:
    """Returns the inner products of a batch of a single sentence by the places that the kernels have for them.

    The first size of every factor is 1 then, so that all look shared, and each product may have any place. The last
    product becomes `inner`: in a mixture, its queries and keys are those of the projections, which the kernels then
    read without a copy. The product before it becomes `shared_keys`, and the others are `matrices`.
    """
    matrices: list[Product | Bias | Diagonals] = list(products[:-2])
    return Summands(inner=products[-1:], shared_keys=products[-2:-1], outer=[], rows=[], matrices=matrices, others=[])


# ---- the tensors and the layout of a call


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
        summands: The sorted terms of the logits.
    """
    reader = CallReader(value)
    # Each method puts its tensors at the end of `reader.tensors`. They must be in the order of `launches.NAMES`,
    # because the plan of a layout names them in this order.
    reader.read_projections(summands.inner)
    reader.read_shared_keys(summands.shared_keys)
    reader.read_outer_product(summands.outer)
    reader.read_row(summands.rows)
    reader.read_matrix(summands.matrices)
    weight_rows = reader.read_weights(summands)
    tensors = reader.tensors
    # The tuples are made from lists, which is faster than from generators.
    layout = Layout(
        device=value.device,
        dtypes=tuple([tensor.dtype for tensor in tensors.values()]),
        length=value.size(2),
        bsz=value.size(0),
        num_heads=value.size(1),
        value_width=value.size(3),
        weight_rows=weight_rows,
        has_hidden=key_padding_mask is not None,
        is_causal=attn_mask is not None,
        has_dropout=dropout > 0,
        dropout=dropout,
        wanted=tuple([name for name, tensor in tensors.items() if tensor.requires_grad]),
        **reader.sizes,  # the fields of the summands that occur
    )
    return Call(logits, value, key_padding_mask, attn_mask, layout, align_memory(list(tensors.values())))


class CallReader:
    """Collects what the kernels read for a call, summand by summand.

    Each method takes the terms of one place in `Summands`, and adds to `tensors` and `sizes`. A place has at most one
    term, because `Summands.reason_to_refuse` refuses others; only of matrices there may be several.

    Attributes:
        tensors: {name in `launches.NAMES`: tensor}, for the tensors that there are, in the order of the calls.
        sizes: {field of `Layout`: its value}, for the summands that occur. The other fields keep their defaults.
    """

    def __init__(self, value: Tensor) -> None:
        """Starts without a tensor. `value`: V, (B, H, T, d_h)."""
        self.value = value
        self.bsz, self.heads, self.length, _ = value.size()
        self.tensors: dict[str, Tensor] = {}
        self.sizes: dict[str, Any] = {}

    def read_projections(self, products: list[Product]) -> None:
        """Reads the values, together with the queries and keys of a product if there are any."""
        if not products:
            self.tensors["packed"] = pack([self.value])
            return
        (product,) = products
        self.tensors["packed"] = pack([product.query, product.key, self.value])
        self.sizes["query_width"] = product.query.size(3)
        self.sizes["scale"] = product.scale

    def read_shared_keys(self, products: list[Product]) -> None:
        """Reads the query and the shared keys of a product."""
        if not products:
            return
        (product,) = products
        # The kernels have a scale only for the product of `read_projections`.
        query = product.query if product.scale == 1.0 else product.query * product.scale
        keys = read_shared_keys(product.key, self.heads)
        self.tensors["x"] = order_by_head(query, self.bsz, self.heads, self.value.dtype)
        self.tensors["w"] = keys.tensor
        self.sizes["shared_key_rows"] = keys.rows
        self.sizes["shared_width"] = keys.columns

    def read_outer_product(self, outers: list[Outer]) -> None:
        """Reads the factors of an outer product."""
        if not outers:
            return
        (outer,) = outers
        outer = repeat_left_factor(outer, self.length)
        self.tensors["pair"] = order_by_head(outer.factors, self.bsz, self.heads, self.value.dtype)
        self.sizes["left_width"] = outer.left_size
        self.sizes["right_width"] = outer.factors.size(3) - outer.left_size

    def read_row(self, biases: list[Bias]) -> None:
        """Reads a bias whose rows are all alike."""
        if not biases:
            return
        (bias,) = biases
        row = read_whole(bias.bias, self.heads)
        self.tensors["c"] = row.tensor
        self.sizes["row_columns"] = row.columns

    def read_matrix(self, terms: list[Product | Bias | Diagonals]) -> None:
        """Reads a matrix that all sentences share, or the sum of several."""
        if not terms:
            return
        matrix = read_matrix(terms, self.heads, self.length)
        self.tensors["r"] = matrix.tensor
        self.sizes["matrix_rows"] = matrix.rows
        self.sizes["matrix_columns"] = matrix.columns
        self.sizes["is_by_distance"] = len(terms) == 1 and isinstance(terms[0], Diagonals)

    def read_weights(self, summands: Summands) -> WeightRows:
        """Reads the weights of a mixture, and returns which of their rows is the weight of which summand."""
        weights_by_summand = find_weights(summands)
        if not weights_by_summand:
            return NO_WEIGHTS
        weights = read_weights(weights_by_summand, self.heads)
        self.tensors["weights"] = weights.tensor
        self.sizes["number_of_weights"] = weights.tensor.size(0)
        return weights.rows


# ---- views of larger tensors
#
# torch keeps the tensor that a view is made of in the view's attribute `_base`. No public attribute has it.


def are_readable_in(base: Tensor, views: Iterable[Tensor]) -> bool:
    """Returns whether the kernels may read the tensor `base` in place of views of it.

    The kernels then compute the gradient of `base`, and none for the views. This is wrong for a view that has no part
    in the gradient of `base`, and for a view whose own gradient somebody reads. Such a view is copied instead.
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
    """Returns a tensor (T, B, features) in which the parts of each token lie side by side.

    The joint projection makes queries, keys and values as views of such a tensor. Then this tensor is returned, and
    nothing is copied.

    Args:
        parts: Either [values] or [queries, keys, values]. The values are (B, H, T, d_h). Queries and keys are
            (B or 1, H or 1, T, d), and are expanded and cast to the type of the values.
    """
    value = parts[-1]
    projections = value._base  # the tensor that the values are a view of, or None
    if projections is not None and are_side_by_side(parts, projections):
        return projections
    bsz, heads, _, _ = value.size()
    features = []
    for part in parts:
        by_token = part.to(value.dtype).expand(bsz, heads, -1, -1).permute(2, 0, 1, 3)  # (T, B, H, d)
        features.append(by_token.flatten(2))  # (T, B, H d)
    if len(features) == 1:
        return features[0].contiguous()  # `flatten` returns a view if it can, which need not be contiguous
    return torch.cat(features, dim=2)


def are_side_by_side(parts: list[Tensor], base: Tensor) -> bool:
    """Returns whether parts (B, H, T, d) are views of `base` (T, B, features), and lie in it as `pack` would put them.

    The features of a token are then those of the first part, head by head, and then those of the next part. With two
    heads, for example, they are

        query 0 | query 1 | key 0 | key 1 | value 0 | value 1
    """
    value = parts[-1]
    bsz, heads, length, _ = value.size()
    features_of_token = base.numel() // (length * bsz)
    begin_of_base = base.storage_offset()
    begin_of_part = begin_of_base  # where the part has to begin in memory
    for part in parts:
        width = part.size(3)
        # How far apart two sentences, two heads, two tokens and two features are in memory.
        strides = (features_of_token, width, bsz * features_of_token, 1)
        if part.storage_offset() != begin_of_part or part.stride() != strides:
            return False
        begin_of_part += heads * width
    # The parts are all of `base` if the last one ends where the first token's features end.
    covers_base = begin_of_part - begin_of_base == features_of_token
    return covers_base and are_readable_in(base, parts)


def order_by_head(x: Tensor, bsz: int, heads: int, dtype: torch.dtype) -> Tensor:
    """Returns a factor (B or 1, H or 1, T, r) as a contiguous tensor (H, T, B, r) of a type."""
    by_head = x.to(dtype).permute(1, 2, 0, 3)
    if by_head.size(0) != heads or by_head.size(2) != bsz:
        by_head = by_head.expand(heads, -1, bsz, -1)
    return by_head.contiguous()


def repeat_left_factor(outer: Outer, length: int) -> Outer:
    """Returns an outer product whose left factor is long enough for `length` columns.

    Each left feature is for as many columns as there are right features. With 3 left and 4 right features there are 12
    columns. A sentence of 18 tokens needs 5 left features: the three, followed by the first and the second again.
    """
    right_size = outer.factors.size(3) - outer.left_size
    needed_size = divide_up(length, right_size)
    if needed_size <= outer.left_size:
        return outer
    left, right = outer.factors.split([outer.left_size, right_size], dim=3)
    repeated_left = take_positions(left, dim=3, start=0, count=needed_size)  # begins again after its last feature
    return outer._replace(factors=torch.cat([repeated_left, right], dim=3), left_size=needed_size)


def read_whole(x: Tensor, heads: int) -> Whole:
    """Returns the parameter whose beginning x is, or a copy of x if it is no beginning of a parameter.

    For example, x may be the first 5 rows of a parameter (H, 256, k), as a view (1, H, 5, k). The kernels read these
    rows in the parameter, so that nothing is copied, and the gradient is that of the parameter. A parameter of size
    (H, columns) is read as one with a single row for each head.

    Args:
        x: (1, H, n, m), or (1, 1, n, m) if all heads share it. Then it is copied for each head, as the kernels read it.
        heads: H.
    """
    base = x._base  # the tensor that x is a view of, or None: a parameter, if x is its beginning
    if base is None or base.dim() < 2 or x.size(1) != heads:
        return copy_whole(x, heads)
    # How many rows each head has if `base` is (H, rows, columns) or (H, columns); `is_beginning` finds out if it is.
    columns = base.size(-1)
    rows = base.numel() // (heads * columns)
    if is_beginning(x, base, heads, rows, columns) and are_readable_in(base, [x]):
        return Whole(base, rows, columns)
    return copy_whole(x, heads)


def is_beginning(x: Tensor, base: Tensor, heads: int, rows: int, columns: int) -> bool:
    """Returns whether x (1, H, n, m) has the first n rows and m columns of each head of `base`, (H, rows, columns)."""
    _, _, num_rows, num_columns = x.size()
    _, head_stride, row_stride, column_stride = x.stride()
    if base.numel() != heads * rows * columns or num_rows > rows or num_columns > columns:
        return False
    if x.storage_offset() != base.storage_offset() or head_stride != rows * columns or column_stride != 1:
        return False
    # The stride between rows has no meaning if there is a single row, and may be any number.
    return row_stride == columns or num_rows == 1


def copy_whole(x: Tensor, heads: int) -> Whole:
    """Returns x (1, H or 1, n, m) as a contiguous tensor (H, n, m); x itself, without a copy, if it lies like that."""
    by_head = x[0].expand(heads, -1, -1).contiguous()
    return Whole(by_head, rows=x.size(2), columns=x.size(3))


def read_shared_keys(key: Tensor, heads: int) -> Whole:
    """Returns the parameter whose first rows of every head are shared keys (1, H or 1, n, m); or a copy of the keys.

    The kernels read all columns of the parameter, so that it may not have more of them than the keys have.
    """
    whole = read_whole(key, heads)
    if whole.columns != key.size(3):
        return copy_whole(key, heads)
    return whole


def read_matrix(terms: list[Product | Bias | Diagonals], heads: int, length: int) -> Whole:
    """Returns the matrix R that the kernels read: a term that all sentences share, or the sum of several.

    A single term is returned without its weight, which the kernels multiply it by. Several terms are added up after
    each has been multiplied by its own weight.
    """
    if len(terms) > 1:
        return read_whole(Logits(terms).total(length), heads)
    (term,) = terms
    if isinstance(term, Bias):
        return read_whole(term.bias, heads)
    if isinstance(term, Diagonals):
        return read_distances(term.values, heads, length)
    return multiply_whole(term, heads, length)


def multiply_whole(term: Product, heads: int, length: int) -> Whole:
    """Returns ``R1 R2^T`` of whole parameters R1 and R2, if they are not too long; else of their first rows.

    Args:
        term: The product of R1 (the query) and R2 (the key), whose weight is left out.
        heads: H.
        length: How many rows of R1 and R2 the sentences need.
    """
    query = read_whole(term.query, heads)
    key = read_whole(term.key, heads)
    is_long = max(query.rows, key.rows) > MAX_ROWS_UNSLICED
    if is_long or query.tensor.dim() != 3 or key.tensor.dim() != 3 or term.scale != 1.0:
        return read_whole(Logits([term._replace(weight=None)]).total(length), heads)
    matrix = torch.bmm(query.tensor, key.tensor.transpose(1, 2))
    return Whole(matrix, rows=query.rows, columns=key.rows)


def read_distances(values: Tensor, heads: int, length: int) -> Whole:
    """Returns the parameter with values by distance that `values` is the middle of, or a copy of `values`.

    The parameter has a value for each distance from -m to m, (H, 2 m + 1). A sentence of T tokens needs the distances
    from -(T - 1) to T - 1, so its values begin ``m - (T - 1)`` values later. With m = 3 and T = 2, the parameter has

        -3 -2 [-1 0 1] 2 3

    and the values in brackets, which begin 2 values later, are those of the sentence.

    Args:
        values: The values of the sentence, (1, H, 1, 2 T - 1).
        heads: H.
        length: T.
    """
    base = values._base  # the tensor that they are a view of, or None
    num_distances = values.stride(1)  # from the values of one head to those of the next: 2 m + 1 in the parameter
    if base is not None and values.size(1) == heads and base.numel() == heads * num_distances:
        largest_distance = num_distances // 2  # m
        begin = largest_distance - (length - 1)
        if values.storage_offset() - base.storage_offset() == begin and are_readable_in(base, [values]):
            return Whole(base, rows=1, columns=num_distances)
    values_by_head = values[0, :, 0].expand(heads, -1).contiguous()  # (H, 2 T - 1)
    return Whole(values_by_head, rows=1, columns=values_by_head.size(1))


def find_weights(summands: Summands) -> dict[str, Tensor]:
    """Returns {name in `launches.SUMMANDS`: its weight, (1, H, 1, 1)} for the summands that have a weight."""
    weights: dict[str, Tensor] = {}
    for name, terms in zip(SUMMANDS, summands.by_weight()):
        # A sum of several matrices has no weight, because `read_matrix` has multiplied each of them by its own.
        if len(terms) == 1:
            weight = terms[0].weight
            if weight is not None:
                weights[name] = weight
    return weights


def read_weights(weights: dict[str, Tensor], heads: int) -> Weights:
    """Returns the weights of a mixture as one tensor (M, H), and which of its rows is the weight of which summand.

    A mixture makes its weights as views of the rows of one tensor. Then this tensor is returned, and nothing is copied.
    Other weights are joined to a new tensor.

    Args:
        weights: {name of a summand: its weight, (1, H, 1, 1)}; at least one.
        heads: H.
    """
    first_weight, *_ = weights.values()
    base = first_weight._base  # `find_rows` finds out whether it has the other weights, too
    if base is not None and base.dim() == 2 and base.size(1) == heads and base.is_contiguous():
        rows = find_rows(weights, base)
        if rows is not None:
            return Weights(base, rows)
    joined = torch.cat([weight.reshape(1, heads) for weight in weights.values()])
    row_numbers = {name: number for number, name in enumerate(weights)}
    return Weights(joined, WeightRows(**row_numbers))


def find_rows(weights: dict[str, Tensor], base: Tensor) -> WeightRows | None:
    """Returns which row of `base` each weight is a view of, or None if a weight is no such view.

    The kernels compute the gradient of `base` and none for the views. Unlike `are_readable_in`, this function does not
    look for hooks on the views, which would see no gradient: only a mixture makes such views, and it adds no hooks.

    Args:
        weights: {name of a summand: its weight, (1, H, 1, 1)}.
        base: A contiguous tensor, (M, H).
    """
    heads = base.size(1)
    begin_of_base = base.storage_offset()
    requires_grad = base.requires_grad
    row_numbers: dict[str, int] = {}
    for name, weight in weights.items():
        if weight._base is not base or weight.requires_grad != requires_grad:
            return None  # no view of `base`, or without a part in its gradient
        offset = weight.storage_offset() - begin_of_base
        begins_with_a_row = offset % heads == 0
        if not begins_with_a_row or weight.stride(1) != 1:
            return None  # a view of `base`, but of no row
        row_numbers[name] = offset // heads
    return WeightRows(**row_numbers)


def align_memory(tensors: list[Any]) -> list[Any]:
    """Returns tensors whose memory begins at multiples of 16 bytes, as kernels are compiled to expect.

    A tensor that begins elsewhere is replaced by a copy. None stays None.
    """
    # Nearly always, all tensors are aligned. This is found out by a list, which is faster than a generator.
    offsets = [tensor.data_ptr() % 16 for tensor in tensors if tensor is not None]
    if not any(offsets):
        return tensors
    aligned = []
    for tensor in tensors:
        is_aligned = tensor is None or tensor.data_ptr() % 16 == 0
        aligned.append(tensor if is_aligned else tensor.clone())
    return aligned
