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
    """A tensor that a batch shares, as the kernels read it, with the rows and columns of each head."""

    tensor: Tensor
    rows: int
    columns: int


class Weights(NamedTuple):
    """The weights (M, H) of a mixture, None without any, and which row is the weight of which summand."""

    tensor: Tensor | None
    rows: WeightRows


def sort_terms(logits: Logits, value: Tensor) -> Summands:
    """Returns the terms of logits by the places that the kernels have for them.

    Args:
        logits: S.
        value: V, (B, H, T, d_h), whose sizes tell how many sentences and rows there are.
    """
    bsz, length = value.size(0), value.size(2)
    if bsz == 1:
        summands = sort_products_of_one_sentence(logits.products)
    else:
        summands = sort_products(logits.products)
    summands.outer.extend(logits.outers)
    summands.matrices.extend(logits.diagonals)
    for bias in logits.biases:
        is_shared_by_rows = bias.bias.size(2) < length
        if bias.bias.size(0) > 1:
            summands.others.append(bias)
        elif is_shared_by_rows:
            summands.rows.append(bias)
        else:
            summands.matrices.append(bias)
    return summands


def sort_products(products: list[Product]) -> Summands:
    """Returns summands with the inner products only. Their places depend on which factors all sentences share."""
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
    """Returns summands with the inner products of a batch of one sentence only.

    All factors look shared then, and every place gives the same result. Queries and keys of the projections are the
    last product of a mixture, and are put where they are read from the memory of the projections without a copy.
    """
    matrices: list[Product | Bias | Diagonals] = list(products[:-2])
    return Summands(inner=products[-1:], shared_keys=products[-2:-1], outer=[], rows=[], matrices=matrices, others=[])


def prepare_call(
    logits: Logits,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    dropout: float,
    summands: Summands,
) -> Call:
    """Returns the tensors of a call that the kernels take, and the layout of the call."""
    bsz, heads, length, width = value.size()
    tensors: dict[str, Tensor] = {}  # filled in the order of `launches.NAMES`
    query_width = shared_width = left = right = w_rows = c_columns = r_rows = r_columns = 0
    scale = 1.0
    if summands.inner:
        (product,) = summands.inner
        query_width, scale = product.query.size(3), product.scale
        tensors["packed"] = pack([product.query, product.key, value])
    else:
        tensors["packed"] = pack([value])
    if summands.shared_keys:
        (product,) = summands.shared_keys
        query = product.query if product.scale == 1.0 else product.query * product.scale
        tensors["x"] = order_by_head(query, bsz, heads, value.dtype)
        tensors["w"], w_rows, shared_width = read_shared_keys(product.key, heads)
    if summands.outer:
        (outer,) = summands.outer
        factors, left = repeat_left_factor(outer, length)
        right = factors.size(3) - left
        tensors["pair"] = order_by_head(factors, bsz, heads, value.dtype)
    if summands.rows:
        (row,) = summands.rows
        tensors["c"], _, c_columns = read_whole(row.bias, heads)
    if summands.matrices:
        tensors["r"], r_rows, r_columns = read_matrix(summands.matrices, heads, length)
    weights = read_weights(summands, heads)
    if weights.tensor is not None:
        tensors["weights"] = weights.tensor
    layout = Layout(
        device=value.device,
        dtypes=tuple([tensor.dtype for tensor in tensors.values()]),
        length=length,
        bsz=bsz,
        num_heads=heads,
        value_width=width,
        query_width=query_width,
        shared_width=shared_width,
        left_width=left,
        right_width=right,
        shared_key_rows=w_rows,
        row_columns=c_columns,
        matrix_rows=r_rows,
        matrix_columns=r_columns,
        is_by_distance=len(summands.matrices) == 1 and isinstance(summands.matrices[0], Diagonals),
        number_of_weights=0 if weights.tensor is None else weights.tensor.size(0),
        weight_rows=weights.rows,
        scale=scale,
        has_hidden=key_padding_mask is not None,
        is_causal=attn_mask is not None,
        has_dropout=dropout > 0,
        dropout=dropout,
        wanted=tuple([name for name, tensor in tensors.items() if tensor.requires_grad]),
    )
    return Call(logits, value, key_padding_mask, attn_mask, layout, align_memory(list(tensors.values())))


def are_readable_in(base: Tensor, views: Iterable[Tensor]) -> bool:
    """Returns whether the kernels may read the tensor `base` in place of views of it.

    The kernels then compute the gradient of `base` and none for the views. This is wrong if something waits for the
    gradient of a view, as a hook does, or if a view has no part in the gradient of `base`, as a detached view.
    """
    if not base.is_contiguous():
        return False
    dtype = base.dtype
    requires_grad = base.requires_grad
    for view in views:
        if view._base is not base or view.dtype != dtype:
            return False
        if view.requires_grad != requires_grad:
            return False  # it was detached, or made without gradients
        if requires_grad and view.is_leaf:
            return False  # it was detached, and needs a gradient of its own
        if view._backward_hooks or view.retains_grad:
            return False
    return True


def pack(parts: list[Tensor]) -> Tensor:
    """Returns a tensor (T, B, features) in which the parts of each token lie side by side.

    If the parts are views of such a tensor already, as the joint projection makes them, that tensor is returned and
    nothing is copied.

    Args:
        parts: The values, (B, H, T, d), as the last part. Before them queries and keys, if there are any, each
            (B or 1, H or 1, T, d), which are expanded and cast to the type of the values.
    """
    value = parts[-1]
    base = value._base  # the tensor that the values are a view of
    if base is not None and are_side_by_side(parts, base):
        return base
    bsz, heads, _, _ = value.size()
    features = []
    for part in parts:
        by_token = part.to(value.dtype).expand(bsz, heads, -1, -1).permute(2, 0, 1, 3)
        features.append(by_token.flatten(2))  # (T, B, H d)
    if len(features) == 1:
        return features[0].contiguous()
    return torch.cat(features, dim=2)


def are_side_by_side(parts: list[Tensor], base: Tensor) -> bool:
    """Returns whether parts (B, H, T, d) are views of neighbouring features of `base` (T, B, features), and fill it."""
    bsz, heads, length, _ = parts[-1].size()
    features = base.numel() // (length * bsz)
    first_offset = base.storage_offset()
    offset = first_offset
    for part in parts:
        width = part.size(3)
        # In `base`, the next sentence is `features` numbers away, the next head `width`, the next token a whole batch.
        sentence_stride = features
        token_stride = bsz * features
        if part.storage_offset() != offset or part.stride() != (sentence_stride, width, token_stride, 1):
            return False
        offset += heads * width
    fills_base = offset - first_offset == features
    return fills_base and are_readable_in(base, parts)


def order_by_head(x: Tensor, bsz: int, heads: int, dtype: torch.dtype) -> Tensor:
    """Returns a factor (B or 1, H or 1, T, r) as a contiguous tensor (H, T, B, r) of a type."""
    by_head = x.to(dtype).permute(1, 2, 0, 3)
    if by_head.size(0) != heads or by_head.size(2) != bsz:
        by_head = by_head.expand(heads, -1, bsz, -1)
    return by_head.contiguous()


def repeat_left_factor(outer: Outer, length: int) -> tuple[Tensor, int]:
    """Returns both factors of an outer product, with a left factor that is long enough for `length` columns.

    With a = 3 left and b = 4 right features there are 12 columns, and left feature u stands for the columns 4 u to
    4 u + 3. A sentence of 18 tokens needs 5 left features. Beyond the third the left factor begins again.

    Returns:
        the factors (B, H, T, a + b), and a.
    """
    factors, left_size = outer.factors, outer.left_size
    right_size = factors.size(3) - left_size
    needed_size = divide_up(length, right_size)
    if needed_size <= left_size:
        return factors, left_size
    left, right = factors.split([left_size, right_size], dim=3)
    repeated_left = take_positions(left, dim=3, start=0, count=needed_size)
    return torch.cat([repeated_left, right], dim=3), needed_size


def read_whole(x: Tensor, heads: int) -> Whole:
    """Returns the parameter that x is the beginning of, or a copy of x.

    For example, x may be the first 5 rows of a parameter (H, 256, k), as a view (1, H, 5, k). The kernels read its
    5 rows in the parameter, so that nothing is copied, and the gradient is that of the parameter. The parameter has
    the size (H, rows, columns), or (H, columns) if it has one row for each head.

    Args:
        x: (1, H or 1, n, m).
        heads: H.
    """
    base = x._base
    if base is None or base.dim() < 2 or x.size(1) != heads:
        return copy_whole(x, heads)
    columns = base.size(-1)
    rows = base.numel() // (heads * columns)
    _, head_stride, row_stride, column_stride = x.stride()
    is_inside = x.size(2) <= rows and x.size(3) <= columns
    begins_with_base = x.storage_offset() == base.storage_offset()
    has_strides_of_heads = head_stride == rows * columns and base.numel() == heads * head_stride
    # If x has a single row, the stride between rows has no meaning, and may be any number.
    has_strides_of_rows = column_stride == 1 and (row_stride == columns or x.size(2) == 1)
    is_beginning = is_inside and begins_with_base and has_strides_of_heads and has_strides_of_rows
    if is_beginning and are_readable_in(base, [x]):
        return Whole(base, rows, columns)
    return copy_whole(x, heads)


def copy_whole(x: Tensor, heads: int) -> Whole:
    """Returns x (1, H or 1, n, m) as a contiguous tensor (H, n, m)."""
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
    """Returns a single term without its weight, or the sum of several terms times theirs."""
    if len(terms) > 1:
        return read_whole(Logits(terms).total(length), heads)
    (term,) = terms
    if isinstance(term, Bias):
        return read_whole(term.bias, heads)
    if isinstance(term, Diagonals):
        return read_distances(term.values, heads, length)
    return multiply_whole(term, heads, length)


def multiply_whole(term: Product, heads: int, length: int) -> Whole:
    """Returns ``R1 R2^T`` of whole parameters R1 and R2, if they are not too long; else of their first rows."""
    query = read_whole(term.query, heads)
    key = read_whole(term.key, heads)
    is_long = max(query.rows, key.rows) > MAX_ROWS_UNSLICED
    if is_long or query.tensor.dim() != 3 or key.tensor.dim() != 3 or term.scale != 1.0:
        return read_whole(Logits([term._replace(weight=None)]).total(length), heads)
    matrix = torch.bmm(query.tensor, key.tensor.transpose(1, 2))
    return Whole(matrix, rows=query.rows, columns=key.rows)


def read_distances(values: Tensor, heads: int, length: int) -> Whole:
    """Returns the values by distance, (H, 2 m + 1), whose distances of a sentence are `values`, (1, H, 1, 2 T - 1)."""
    base, number = values._base, values.stride(1)
    if base is not None and values.size(1) == heads and base.numel() == heads * number:
        # the middle one of 2 m + 1 numbers, m = number // 2, is that of distance 0, which is number T - 1 of the values
        place = values.storage_offset() - base.storage_offset()
        if place == number // 2 - (length - 1) and are_readable_in(base, [values]):
            return Whole(base, rows=1, columns=number)
    of_heads = values[0, :, 0].expand(heads, -1).contiguous()
    return Whole(of_heads, rows=1, columns=of_heads.size(1))


def read_weights(summands: Summands, heads: int) -> Weights:
    """Returns the weights of a mixture as one tensor (M, H), and which of its rows is the weight of which summand.

    If all weights are rows of one tensor already, as a mixture makes them, it is that tensor. Otherwise the weights
    are copied into a new one. Without any weight, the tensor is None.
    """
    weights: dict[str, Tensor] = {}
    for name, terms in zip(SUMMANDS, summands.by_weight()):
        # If a summand consists of several matrices, these are added up beforehand, times their weights. The sum has no
        # weight.
        if len(terms) == 1:
            weight = terms[0].weight
            if weight is not None:
                weights[name] = weight
    if not weights:
        return Weights(None, NO_WEIGHTS)
    base = next(iter(weights.values()))._base
    is_matrix_of_weights = base is not None and base.dim() == 2 and base.size(1) == heads and base.is_contiguous()
    if base is not None and is_matrix_of_weights:
        rows = find_rows(weights, base)
        if rows is not None:
            return Weights(base, WeightRows(**rows))
    copied = torch.cat([weight.reshape(1, heads) for weight in weights.values()])
    rows = {name: row for row, name in enumerate(weights)}
    return Weights(copied, WeightRows(**rows))


def find_rows(weights: dict[str, Tensor], base: Tensor) -> dict[str, int] | None:
    """Returns which row of `base` each weight is a view of, or None if one of them is no row of it.

    The kernels compute the gradient of `base` and none for the views. This is right for rows that take part in the
    gradient of `base`. A hook on a row would see nothing, but only a mixture makes these rows, and it adds no hooks.

    Args:
        weights: Weights (1, H, 1, 1) by the names of their summands.
        base: A contiguous tensor, (M, H).
    """
    heads = base.size(1)
    first_offset = base.storage_offset()
    requires_grad = base.requires_grad
    rows: dict[str, int] = {}
    for name, weight in weights.items():
        if weight._base is not base or weight.requires_grad != requires_grad or weight.stride(1) != 1:
            return None
        offset = weight.storage_offset() - first_offset
        if offset % heads:
            return None
        rows[name] = offset // heads
    return rows


def align_memory(tensors: list[Any]) -> list[Any]:
    """Returns tensors whose memory begins at multiples of 16 bytes, as kernels are compiled to expect.

    A tensor that begins elsewhere is replaced by a copy. None stays None.
    """
    is_any_misaligned = any([tensor.data_ptr() % 16 for tensor in tensors if tensor is not None])
    if not is_any_misaligned:
        return tensors
    aligned = []
    for tensor in tensors:
        is_aligned = tensor is None or tensor.data_ptr() % 16 == 0
        aligned.append(tensor if is_aligned else tensor.clone())
    return aligned
