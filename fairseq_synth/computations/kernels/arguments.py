"""The arguments of the Triton kernels, as records with named fields.

The kernels compute, for each head of a sentence,

    S = a_product scale Q K^T + a_dense X W^T + a_outer A (x) B + a_bias_row c + a_matrix R,     Y = softmax(S) V

in which every summand may be absent. All files of this folder use these names:

========  =======================================  =======================================================
summand   tensors, with their letters in formulas  what it is
========  =======================================  =======================================================
product   query Q, key K                           the product of queries and keys, as in vanilla
dense     dense_query X, dense_key W               a product with keys that all sentences share, as in dense
outer     left A, right B                          the outer product of two factors of each row
bias_row  bias_row c                               a row that is added to all rows of the logits
matrix    matrix R                                 a matrix that all sentences share, as in random
========  =======================================  =======================================================

The values V are ``value``. The weights ``a`` of a mixture are ``weights``, with a number for each summand and head.
"""

from typing import Any, NamedTuple

SUMMANDS = ("product", "dense", "outer", "bias_row", "matrix")
# The tensors of `CallTensors` whose gradients are sums over all sentences. The gradients of the weights are, too, but a
# weight is a single number, so that they are summed in another way.
SHARED_TENSORS = ("dense_key", "bias_row", "matrix")


class CallTensors(NamedTuple):
    """The tensors of a call as the kernels read them, or their gradients or types. None: there is no such tensor.

    The sizes are T tokens, B sentences, H heads and M weights. ``packed`` and ``factors`` have several parts. The
    kernels compute where in a token each part begins.
    """

    packed: Any = None  # (T, B, features): for every token its queries and keys, if there are any, and its values
    dense_query: Any = None  # (H, T, B, features)
    dense_key: Any = None  # (H, rows, features), with at least T rows
    factors: Any = None  # (H, T, B, left + right features): both factors of the outer product
    bias_row: Any = None  # (H, columns), with at least T columns
    matrix: Any = None  # (H, rows, columns), with at least T of both; or its values by distance, (H, 2 m + 1)
    weights: Any = None  # (M, H)
    hidden: Any = None  # (B, T): the padding mask in bytes, not 0 at padding; it never has a gradient


class WeightRows(NamedTuple):
    """The row of ``weights`` (M, H) that is the weight of each summand; -1 for a summand whose weight is 1."""

    product: int = -1
    dense: int = -1
    outer: int = -1
    bias_row: int = -1
    matrix: int = -1


# ---- tensors


class PartialSums(NamedTuple):
    """Memory in fp32 that the kernels of a backward pass write for each other. None: this memory is not needed.

    Most of it are sums over groups of sentences, which the last launch adds up. The sums of one group lie side by side,
    and the sums of group g begin ``g * numbers_per_group`` numbers after those of the first group.
    """

    dense_key: Any = None  # (H, T, features) in each group
    bias_row: Any = None  # (H, T) in each group
    matrix: Any = None  # (H, T, T) in each group
    # Parts of the gradients of the weights, (parts, H). Each is what one program has summed.
    product_weight: Any = None
    dense_weight: Any = None
    outer_weight: Any = None
    bias_row_weight: Any = None
    matrix_weight: Any = None
    delta: Any = None  # (B, H, T): rowsum(P * dP), where P are the attention weights, and dP is their gradient


class PassTensors(NamedTuple):
    """All arguments of the kernels of one pass that are tensors or records of tensors. Each kernel takes some of them.

    None stands for a tensor that does not exist, here and in the records. A compiled kernel has no code for it.

    The kernels of the backward pass write each gradient in one of two ways:

    - Each sentence has its own values, queries, keys, dense_query and factors. Their gradients are written at once.
    - All sentences share dense_key, bias_row, matrix and weights. Most kernels write partial sums of their gradients,
      and the last kernel adds them up.
    """

    tensors: CallTensors
    out: Any  # Y, (T, B, H, d_h)
    seed: Any = None  # (1,), for dropout
    lse: Any = None  # (B, H, T): the logarithm of the softmax's denominator for each row, to base 2
    # These are for the backward pass.
    out_gradient: Any = None  # dY, (T, B, H, d_h)
    gradients: CallTensors = CallTensors()  # memory for the gradients of `tensors`; None: a gradient is not wanted
    sums: PartialSums = PartialSums()


# ---- numbers


class CallNumbers(NamedTuple):
    """The numbers that every kernel of `triton_attention` is given, by the names of its arguments.

    They are arguments and not constants, because a kernel would be compiled for each value of a constant. The sizes of
    a summand that does not occur are 0.
    """

    T: int  # tokens
    B: int  # sentences
    H: int  # heads
    left_width: int  # features of the left factor of the outer product
    right_width: int  # and of the right one; at least 1
    dense_key_rows: int  # the sizes that the parameters have, which may be larger than T
    bias_row_columns: int
    matrix_rows: int
    matrix_columns: int
    scale: float  # the scale of the product of queries and keys
    dropout: float  # the probability of dropping an attention weight


class GroupNumbers(NamedTuple):
    """The numbers of a kernel that sums over groups of sentences, by the names of its arguments."""

    sentences_per_group: int
    numbers_per_group: int  # how many numbers the sums of a group have


class AdditionNumbers(NamedTuple):
    """The numbers that the kernel `add` of `triton_sums` is given, by the names of its arguments.

    A gradient of a shared tensor is written with the size that the tensor has, (H, rows, columns). It is the sum over
    groups of sentences. A gradient of a weight is the sum of parts.
    """

    H: int
    T: int
    column_groups: int  # groups of the sums for dense_key and bias_row
    column_numbers: int  # how many numbers each of these groups has
    matrix_groups: int  # the same for the sums for the matrix
    matrix_numbers: int
    dense_key_rows: int  # the sizes of the parameters in each head
    dense_key_columns: int
    bias_row_rows: int  # always 1
    bias_row_columns: int
    matrix_rows: int
    matrix_columns: int
    row_parts: int  # parts of the gradient of the weight of the outer product
    column_parts: int  # parts of the gradients of the weights of product, dense and bias_row
    matrix_parts: int  # parts of the gradient of the weight of the matrix


class AdditionBlocks(NamedTuple):
    """How much a program of the kernel `add` reads and writes at once, by the names of its arguments."""

    HEADS: int  # a power of two that holds all heads
    BLOCK: int  # numbers of a gradient of a shared tensor that a program writes
    GROUPS: int  # groups of sentences that it reads at once
    DISTANCES: int  # numbers of the matrix's gradient that it writes if the matrix is given by its values by distance


class Constants(NamedTuple):
    """What a kernel is compiled for. The size of a BLOCK is a power of two that holds a width."""

    VALUE_WIDTH: Any  # features of a value
    VALUE_BLOCK: Any
    QUERY_WIDTH: Any  # features of a query and of a key; 0 if there are none
    QUERY_BLOCK: Any
    DENSE_WIDTH: Any  # features of dense_query and dense_key; 0 if there are none
    DENSE_BLOCK: Any
    FACTOR_BLOCK: Any  # holds the features of either factor of the outer product
    ROWS: Any  # how many rows and columns a tile of logits has
    COLUMNS: Any
    UNIT: Any  # all strides are multiples of it, so that several numbers are read at once
    CAUSAL: Any
    BY_DISTANCE: Any  # the matrix is given by its values by distance, 2 m + 1 for each head
    PRECISION: Any  # how products in fp32 are rounded: "ieee" or "tf32"
    # The row of the weights that is the weight of each summand; -1 for a weight of 1.
    PRODUCT_WEIGHT: Any
    DENSE_WEIGHT: Any
    OUTER_WEIGHT: Any
    BIAS_ROW_WEIGHT: Any
    MATRIX_WEIGHT: Any
