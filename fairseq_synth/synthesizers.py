"""The synthesizing functions of the paper, one short class each.

Tay et al., *Synthesizer: Rethinking Self-Attention for Transformer Models*, arXiv 2005.00743. Every attention there is
``Y = softmax(S(X)) G(X)``. G is the value projection, and the paper is about S, the logits. Each class below is one
choice of S. Symbols are the paper's:

===  ===================================================================================================
H    attention heads; d_h is the width of a head          (``num_heads``, ``head_dim``)
l    longest sentence the model can see                   (``max_length``, ``--synth-max-length``)
k    rank of the factorized random matrices               (``rank``, ``--synth-rank``)
T,S  query rows and key columns of a call. The rows are the positions ``start`` to ``start + T - 1`` of the
     sentence and the columns are the positions ``0`` to ``S - 1``; ``start`` is 0 except in decoding
===  ===================================================================================================

A function returns its logits as a list of terms (`logits`): inner products, outer products, biases and diagonals. A
`Mixture` joins the terms of several functions, and the attention never asks which functions they came from.

To add a function, write a class here and give it a name with `register_synthesizer`. The flags, the error messages and
the tests over the registry then know it by that name. A line in `names.VARIANTS` adds its architectures.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn as nn
from torch import Tensor

from .errors import SynthesizerError
from .linear import LightModule, by_head, by_sentence, per_head_linear, read_module, read_parameter
from .logits import Bias, Diagonals, Logits, Outer, Product, Term
from .positions import Inputs, take_column_bias, take_columns, take_distances, take_rows, take_window

SYNTHESIZERS: dict[str, type["Synthesizer"]] = {}
# The weights alpha of a mixture are rows of a matrix in every checkpoint. This is the order of the rows. It goes by
# name, so that the order of the classes in this file has no meaning.
ALPHA_ORDER = ("random", "fixed_random", "factorized_random", "relative_random", "dense", "factorized_dense", "vanilla")
MIXTURES = ("convex", "sum")
BEYOND_LENGTH = ("refuse", "tile")


def register_synthesizer(name: str) -> Callable[[type["Synthesizer"]], type["Synthesizer"]]:
    """Returns a decorator that makes a `Synthesizer` available under `name`, as in ``--encoder-synthesizer NAME``."""

    def register(cls: type["Synthesizer"]) -> type["Synthesizer"]:
        if name in SYNTHESIZERS:
            raise ValueError(f"a synthesizer named {name!r} exists already: {SYNTHESIZERS[name]}")
        SYNTHESIZERS[name] = cls
        return cls

    return register


def sort_functions(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names in the order of `ALPHA_ORDER`, in which a mixture has the weights of its functions.

    Names that are not in `ALPHA_ORDER` come last, in alphabetical order.
    """

    def sort_key(name: str) -> tuple[int, str]:
        position = ALPHA_ORDER.index(name) if name in ALPHA_ORDER else len(ALPHA_ORDER)
        return position, name

    return tuple(sorted(names, key=sort_key))


class Synthesizer(LightModule):
    """Base class of the synthesizing functions, which compute the attention logits S(X) of a layer.

    A subclass creates its parameters in ``__init__``, initialises them in `reset_parameters`, and returns the terms of
    its logits in ``forward``. In `scale_`, it multiplies its logits by a weight of each head. The functions in
    `positions` read the rows and columns that a call needs from a parameter.
    """

    # Whether ``forward`` reads queries and keys. An attention without such a function has no q_proj, k_proj and key
    # cache.
    reads_query_key = False
    # Whether the parameters have a size that limits sentences to l tokens.
    has_max_length = True

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def reset_parameters(self) -> None:
        """Gives the parameters their initial values."""
        if self.is_trained():
            raise NotImplementedError

    def scale_(self, weight: Tensor) -> None:
        """Changes the parameters in place so that the logits are multiplied by a weight of each head, (H, 1, 1)."""
        raise NotImplementedError

    def zero_logits_(self) -> None:
        """Sets the parameters so that all logits are 0, but not their gradients.

        A mixture of this function with trained functions then starts with the logits of the trained functions alone.
        """
        if self.is_trained():
            with torch.no_grad():
                any_parameter = next(self.parameters())
                weight_0 = any_parameter.new_zeros(self.num_heads, 1, 1)
                self.scale_(weight_0)

    def is_trained(self) -> bool:
        """Returns whether the function has parameters of its own."""
        return any(True for _ in self.parameters())

    def has_fixed_logits(self) -> bool:
        """Returns whether training never changes the logits.

        They are fixed if the function has no parameters, and reads no queries and keys, whose projections are trained.
        """
        return not self.is_trained() and not self.reads_query_key

    def forward(self, inputs: Inputs) -> list[Term]:
        """Returns the logits S as a list of terms, which are to be added up."""
        raise NotImplementedError


def glorot_uniform_(weight: Tensor) -> Tensor:
    """Initialises the matrix of each head, in a tensor (H, m, n), by Glorot's uniform distribution, and returns it.

    Its entries are drawn from U(-s, s) with ``s = sqrt(6 / (m + n))``.
    """
    bound = math.sqrt(6.0 / (weight.shape[1] + weight.shape[2]))
    return nn.init.uniform_(weight, -bound, bound)


@register_synthesizer("random")
class Random(Synthesizer):
    """Random (eq. 4): ``S = R``. R, (H, l, l), is trained and never looks at the input."""

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__(num_heads, head_dim, max_length, rank)
        self.R = nn.Parameter(torch.empty(num_heads, max_length, max_length))

    def reset_parameters(self) -> None:
        glorot_uniform_(self.R)

    def scale_(self, weight: Tensor) -> None:
        self.R.mul_(weight)

    def forward(self, inputs: Inputs) -> list[Term]:
        return [Bias(take_window(self.R, inputs))]


@register_synthesizer("fixed_random")
class FixedRandom(Random):
    """Fixed Random (section 3.1): ``S = R``. R, (H, l, l), is drawn from N(0, 1) and never trained.

    R is a buffer, so that checkpoints contain it.
    """

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__(num_heads, head_dim, max_length, rank)
        del self.R
        self.register_buffer("R", torch.empty(num_heads, max_length, max_length))

    def reset_parameters(self) -> None:
        # Smaller values would make the softmax nearly uniform, and training cannot change that.
        nn.init.normal_(self.R)


@register_synthesizer("factorized_random")
class FactorizedRandom(Synthesizer):
    """Factorized Random (eq. 7): ``S = R1 R2^T``. R1 and R2, (H, l, k), are trained."""

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__(num_heads, head_dim, max_length, rank)
        self.R1 = nn.Parameter(torch.empty(num_heads, max_length, rank))
        self.R2 = nn.Parameter(torch.empty(num_heads, max_length, rank))

    def reset_parameters(self) -> None:
        glorot_uniform_(self.R1)
        glorot_uniform_(self.R2)

    def scale_(self, weight: Tensor) -> None:
        self.R2.mul_(weight)

    def forward(self, inputs: Inputs) -> list[Term]:
        return [Product(take_rows(self.R1, inputs), take_columns(self.R2, inputs))]


@register_synthesizer("relative_random")
class RelativeRandom(Synthesizer):
    """Random by distance, which is not in the paper: ``S_ij = r[min(max(j - i, -l), l)]``.

    r, (H, 2 l + 1), is trained. Sentences may have any length; all distances beyond l have the same value.
    """

    has_max_length = False

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__(num_heads, head_dim, max_length, rank)
        self.r = nn.Parameter(torch.empty(num_heads, 2 * max_length + 1))

    def reset_parameters(self) -> None:
        # The same range as the entries of an l x l matrix of `Random`.
        bound = math.sqrt(6.0 / (self.r.shape[1] - 1))
        nn.init.uniform_(self.r, -bound, bound)

    def scale_(self, weight: Tensor) -> None:
        self.r.mul_(weight[..., 0])

    def forward(self, inputs: Inputs) -> list[Term]:
        return [Diagonals(take_distances(self.r, inputs))]


@register_synthesizer("dense")
class Dense(Synthesizer):
    """Dense (eq. 1-2): ``S_i = W2 relu(W1 x_i + b1) + b2``, in each head for its slice x_i of the input.

    W1 is (H, d_h, d_h) and W2 is (H, l, d_h). This is an inner product: the relu is the query of row i, and row j of W2
    is the key of column j.
    """

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__(num_heads, head_dim, max_length, rank)
        self.W1 = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))
        self.b1 = nn.Parameter(torch.empty(num_heads, head_dim))
        self.W2 = nn.Parameter(torch.empty(num_heads, max_length, head_dim))
        self.b2 = nn.Parameter(torch.empty(num_heads, max_length))

    def reset_parameters(self) -> None:
        glorot_uniform_(self.W1)
        glorot_uniform_(self.W2)
        nn.init.zeros_(self.b1)
        nn.init.zeros_(self.b2)

    def scale_(self, weight: Tensor) -> None:
        self.W2.mul_(weight)
        self.b2.mul_(weight[..., 0])

    def hidden(self, x: Tensor) -> Tensor:
        """Returns ``relu(W1 x + b1)`` of the layer's input (T, B, C), as (H, T B, d_h)."""
        return per_head_linear(by_head(x, self.num_heads), self.W1, self.b1).relu_()

    def forward(self, inputs: Inputs) -> list[Term]:
        query = by_sentence(self.hidden(inputs.x), inputs.x)
        key = take_columns(self.W2, inputs)
        return [Product(query, key), Bias(take_column_bias(self.b2, inputs))]


def factorize(length: int) -> tuple[int, int]:
    """Returns two factors ``(a, b)`` of a length, ``a b = length``, which are as close to each other as possible.

    So a is the largest divisor of `length` up to its square root.

    Raises:
        SynthesizerError: `length` is a prime number or less than 4, so that a would be 1.
    """
    for a in range(math.isqrt(length), 1, -1):
        if length % a == 0:
            return a, length // a
    # After a prime above 3 comes an even number, which is a product. After 1, 2 and 3, the next product is 4.
    raise SynthesizerError(
        f"--synth-max-length {length}: for factorized_dense, the length must be a product a*b with a, b > 1; "
        f"use {max(4, length + 1)}, for example"
    )


@register_synthesizer("factorized_dense")
class FactorizedDense(Dense):
    """Factorized Dense (eq. 5-6): ``S_i[j] = A_i[u] B_i[v]`` with ``j = u b + v`` and ``a b = l``.

    A_i and B_i have a and b values, ``[A_i B_i] = W2 relu(W1 x_i + b1) + b2``, in each head for its slice x_i of the
    input. a is the largest divisor of l up to its square root.

    Each value of A_i belongs to b neighbouring columns, and B_i is repeated a times, so that all l columns differ. If
    both were repeated, only lcm(a, b) columns would differ.

    Raises:
        SynthesizerError: l is a prime number or less than 4.
    """

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        a, b = factorize(max_length)
        super().__init__(num_heads, head_dim, a + b, rank)
        self.a = a
        self.b = b
        # An empty tensor, whose shape makes torch refuse a checkpoint with other factors. The shape of W2 is not enough
        # for this, because it has only the sum a + b.
        self.register_buffer("factors", torch.empty(self.a, self.b, 0))

    def reset_parameters(self) -> None:
        rows_of_a = self.W2[:, : self.a]
        rows_of_b = self.W2[:, self.a :]
        for matrix in (self.W1, rows_of_a, rows_of_b):
            with torch.no_grad():
                matrix.copy_(glorot_uniform_(torch.empty_like(matrix)))
        nn.init.zeros_(self.b1)
        nn.init.zeros_(self.b2)

    def scale_(self, weight: Tensor) -> None:
        self.W2[:, self.a :].mul_(weight)
        self.b2[:, self.a :].mul_(weight[..., 0])

    def forward(self, inputs: Inputs) -> list[Term]:
        factors = per_head_linear(self.hidden(inputs.x), self.W2, self.b2)
        return [Outer(by_sentence(factors, inputs.x), left_size=self.a)]


@register_synthesizer("vanilla")
class Vanilla(Synthesizer):
    """Vanilla, the Transformer's own: ``S = Q K^T / sqrt(d_h)``.

    Its weights are q_proj and k_proj of the attention.
    """

    reads_query_key = True
    has_max_length = False

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__(num_heads, head_dim, max_length, rank)
        self.scaling = head_dim**-0.5

    def forward(self, inputs: Inputs) -> list[Term]:
        assert inputs.q is not None and inputs.k is not None
        return [Product(inputs.q, inputs.k, scale=self.scaling)]


def is_vanilla(function: Synthesizer) -> TypeGuard[Vanilla]:
    """Returns whether a function computes exactly the dot products of `Vanilla`.

    This is false for a subclass, which may do more with queries and keys than to multiply their product by `scaling`.
    """
    return type(function) is Vanilla


def can_scale_itself(function: Synthesizer) -> bool:
    """Returns whether a function can multiply its logits by a weight of each head by changing its own parameters.

    It cannot if its logits depend on queries and keys, or if its class has no `scale_` but that of the base class,
    which raises NotImplementedError.
    """
    implements_scale = type(function).scale_ is not Synthesizer.scale_
    return implements_scale and not function.reads_query_key


def split_by_function(weights: Tensor) -> Sequence[Tensor]:
    """Returns the weights (M, H) as M tensors (1, H, 1, 1), one for each function.

    In this shape, a tensor can be multiplied with logits (B, H, T, S).
    """
    num_functions, num_heads = weights.size()
    return weights.view(num_functions, 1, num_heads, 1, 1).unbind()  # `unbind` removes the first dimension.


class LayerSynthesizer(LightModule):
    """Computes the logits of a layer: a `Mixture` for all heads, or `HeadGroups` with a mixture for each group."""

    def mixtures(self) -> list["Mixture"]:
        """Returns the mixture of each group of neighbouring heads."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialises every function, and makes the weights of a mixture equal."""
        for mixture in self.mixtures():
            for function in mixture.functions():
                function.reset_parameters()
            if mixture.alpha is not None:
                nn.init.zeros_(mixture.alpha)

    def forward(self, inputs: Inputs) -> list[Logits]:
        """Returns the logits of each group of heads."""
        raise NotImplementedError


def longest_sentence(names: Iterable[str], max_length: int, beyond_length: str) -> int | None:
    """Returns the number of tokens in the longest sentence that the functions take, or None if they take any."""
    has_limit = any(SYNTHESIZERS[name].has_max_length for name in names)
    if has_limit and beyond_length == "refuse":
        return max_length
    return None


class Mixture(LayerSynthesizer):
    """Mixture (section 3.2): ``S = sum_m alpha_m S_m``. The logits are added, not the attention weights.

    ``convex`` learns one weight alpha_m for each function and head. The weights are a softmax over the functions, so
    they sum to 1, and they start equal. ``sum`` adds the logits without weights, and a single function has no weight
    either. The parameter ``alpha``, (M, H), holds the weights before the softmax, in the order of the functions.

    Args:
        names: Names of registered functions, as `sort_functions` returns them.
        mixture: ``convex`` or ``sum``.
        num_heads, head_dim, max_length, rank: Sizes, as in the head of this module.
        beyond_length: ``refuse`` sentences of more than l tokens, or ``tile`` the parameters: position p has the row
            and column ``p mod l``.

    Raises:
        SynthesizerError: `mixture` or `beyond_length` is unknown, or a function does not work with these sizes.
    """

    def __init__(
        self,
        names: Sequence[str],
        mixture: str,
        num_heads: int,
        head_dim: int,
        max_length: int,
        rank: int,
        beyond_length: str = "refuse",
    ) -> None:
        """Builds the functions and, if several functions are mixed with weights, the parameter ``alpha``.

        Their values are set later, by `reset_parameters`. The arguments are described at the class.
        """
        super().__init__()
        check_choice("--synth-mixture", mixture, MIXTURES)
        check_choice("--synth-beyond-length", beyond_length, BEYOND_LENGTH)
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.components = nn.ModuleDict()  # {name of a function: the function}
        for name in names:
            self.components[name] = SYNTHESIZERS[name](num_heads, head_dim, max_length, rank)
        self.reads_query_key = any(function.reads_query_key for function in self.functions())
        self.limit = longest_sentence(names, max_length, beyond_length)  # in tokens, or None
        self.alpha: nn.Parameter | None = None  # It stays None if the functions are added up without weights.
        if mixture == "convex" and len(names) > 1:
            self.alpha = nn.Parameter(torch.empty(len(names), num_heads))

    def mixtures(self) -> list["Mixture"]:
        return [self]

    def functions(self) -> list[Synthesizer]:
        """Returns the functions that are mixed, in the order of their rows in alpha."""
        components: nn.ModuleDict = read_module(self, "components")
        functions: Any = components._modules.values()  # `components.values()` would take four times as long
        return list(functions)

    def has_weights(self) -> bool:
        """Returns whether the mixture multiplies each function by a weight, which is so if it is convex.

        A mixture of a single function has none, nor one that is prepared for generation (`fold_weights_`).
        """
        return self.alpha is not None

    def weights(self) -> Tensor | None:
        """Returns the weight of each function in each head, (M, H), or None if all weights are 1."""
        alpha: Tensor | None = read_parameter(self, "alpha")
        if alpha is None:
            return None
        return torch.softmax(alpha, dim=0)

    def forward(self, inputs: Inputs) -> list[Logits]:
        """Returns the sum of the logits of all functions, each multiplied by its weight.

        The sum is the only element of a list, because all heads are in one group.

        Raises:
            ValueError: The sentences have more tokens than `limit`, which is None if sentences may have any length.
        """
        if self.limit is not None and inputs.src_len > self.limit:
            raise ValueError(f"a sentence of {inputs.src_len} tokens is longer than max_length {self.limit}")
        sum_of_logits = Logits()
        functions = self.functions()
        weights = self.weights()  # (M, H): a weight of each function in each head; None if all are 1
        if weights is None:
            for function in functions:
                sum_of_logits.add_terms(function(inputs))
        else:
            for function, weight in zip(functions, split_by_function(weights)):
                sum_of_logits.add_terms(function(inputs), weight)
        return [sum_of_logits]

    def factor_of_dot_products(self, like: Tensor) -> Tensor:
        """Returns the number by which the dot products of each head are multiplied: their weight times scale, (H,).

        For example, with the weight 0.5 and d_h = 64, it is 0.5 / sqrt(64). `fold_weights_` will remove weight and
        scale, so the caller has to multiply the queries by this number first. If `fold_weights_` will change nothing,
        the result is 1.

        Args:
            like: A tensor with the device and type of the attention's weights.
        """
        factor = like.new_ones(self.num_heads)
        if not self._can_fold_weights():
            return factor
        for function, weight in zip(self.functions(), self._weights_or_ones(like)):  # weight: (H,)
            if is_vanilla(function):
                factor = factor * function.scaling * weight
        return factor

    def fold_weights_(self, like: Tensor) -> None:
        """Multiplies the weight of each function into its parameters, so that `forward` need not. There is no way back.

        ``vanilla`` has no parameters here. The caller has multiplied its weight and scale into the projection of the
        queries already (`factor_of_dot_products`), so that they are only removed here.

        Nothing is changed if there is no weight and no scale, or if a function does not allow it.

        Args:
            like: A tensor with the device and type of the attention's weights.
        """
        if not self._can_fold_weights():
            return
        for function, weight in zip(self.functions(), self._weights_or_ones(like)):  # weight: (H,)
            if is_vanilla(function):
                function.scaling = 1.0
            else:
                function.scale_(weight.view(self.num_heads, 1, 1))
        self.alpha = None  # `forward` multiplies by no weights any more.
        # This buffer marks the state dict, so that no training goes on with it.
        self.register_buffer("folded", like.new_ones([]))

    def _weights_or_ones(self, like: Tensor) -> Tensor:
        """Returns the weight of each function in each head, (M, H), which is 1 if the mixture has no weights.

        Args:
            like: A tensor with the device and type that ones get.
        """
        weights = self.weights()
        if weights is None:
            return like.new_ones(len(self.functions()), self.num_heads)
        return weights

    def _can_fold_weights(self) -> bool:
        """Returns whether `fold_weights_` has a weight or a scale to remove, and can do so in every function.

        Only a convex mixture has weights, and only ``vanilla`` has a scale.
        """
        functions = self.functions()
        has_scale = any(is_vanilla(function) for function in functions)
        has_something_to_fold = self.has_weights() or has_scale
        can_fold_all = all(is_vanilla(function) or can_scale_itself(function) for function in functions)
        return has_something_to_fold and can_fold_all


def check_choice(flag: str, value: str, choices: Sequence[str]) -> None:
    """Raises a SynthesizerError that lists the choices if the value of a flag is not among them."""
    if value not in choices:
        raise SynthesizerError(f"{flag} {value!r}: choose from {', '.join(choices)}")
