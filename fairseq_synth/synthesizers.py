"""The synthesizing functions of the paper, one short class each.

Tay et al., *Synthesizer: Rethinking Self-Attention for Transformer Models*, arXiv 2005.00743. Every
attention there is ``Y = softmax(S(X)) G(X)``: G is the value projection, and the paper is about S, the
logits. A class below is one choice of S. Symbols are the paper's:

===  ===================================================================================================
H    attention heads; d_h their width                     (``num_heads``, ``head_dim``)
l    longest sentence the model can see                   (``max_length``, ``--synth-max-length``)
k    rank of the factorized random matrices               (``rank``, ``--synth-rank``)
T,S  query rows and key columns of this call; the rows are positions ``start .. start + T - 1`` of the
     sentence and the columns positions ``0 .. S - 1`` (``start`` is 0 except in incremental decoding)
===  ===================================================================================================

All of them are sums of inner products, outer products, biases and diagonals, `Logits`. A mixture adds these
sums up, and the attention never asks which function it has.

To add a function, write one class here with `register_synthesizer`: the flags, the tests over the registry
and the error messages find it by its name. Its architectures are a line in `names.VARIANTS`.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn as nn
from torch import Tensor

from .errors import SynthesizerError
from .linear import Light, by_head, by_sentence, per_head_linear
from .logits import Logits, bias_of, diagonals_of, outer_product_of, product_of
from .positions import Inputs, columns_of, distances_of, rows_of, window_of

SYNTHESIZERS: dict[str, type["Synthesizer"]] = {}
# the rows of alpha in every checkpoint: a matter of names, so that classes may stand in any order
ROWS = ("random", "fixed_random", "factorized_random", "relative_random", "dense", "factorized_dense", "vanilla")
MIXTURES = ("convex", "sum")
BEYOND_LENGTH = ("refuse", "tile")


def register_synthesizer(name: str) -> Callable[[type["Synthesizer"]], type["Synthesizer"]]:
    """Makes a `Synthesizer` available under `name` in ``--encoder-synthesizer`` and the like."""

    def register(cls: type["Synthesizer"]) -> type["Synthesizer"]:
        if name in SYNTHESIZERS:
            raise ValueError(f"a synthesizer named {name!r} exists already: {SYNTHESIZERS[name]}")
        SYNTHESIZERS[name] = cls
        return cls

    return register


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """The functions of a mixture in the order of their rows in alpha: those of `ROWS`, then others by name."""
    return tuple(sorted(names, key=lambda name: (ROWS.index(name) if name in ROWS else len(ROWS), name)))


class Synthesizer(Light):
    """Base class of S(X).

    A subclass creates its parameters in ``__init__(num_heads, head_dim, max_length, rank)``, gives them
    values in `reset_parameters`, multiplies its logits by numbers in `scale_`, and returns the `Logits` of a call in
    ``forward``. What a call reads of a parameter, within l and beyond, is in `positions`.
    """

    # True: inputs have q and k. Without such a component there is no q_proj, k_proj or key cache
    reads_query_key = False
    has_max_length = True  # False: the function works at any length

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def reset_parameters(self) -> None:
        """Gives the parameters their initial values."""
        if self.is_trained():
            raise NotImplementedError

    def scale_(self, weight: Tensor) -> None:
        """Multiplies the logits by a weight of each head, (H, 1, 1), in the parameters themselves."""
        raise NotImplementedError

    def zero_logits_(self) -> None:
        """Sets the parameters so that the logits are 0 but still get a gradient: a mixture starts as its others."""
        if self.is_trained():
            with torch.no_grad():
                self.scale_(next(self.parameters()).new_zeros(self.num_heads, 1, 1))

    def is_trained(self) -> bool:
        """Whether the function has parameters of its own."""
        return any(True for _ in self.parameters())

    def forward(self, inputs: Inputs) -> Logits:
        """The logits."""
        raise NotImplementedError


def glorot_uniform_(weight: Tensor) -> Tensor:
    """Glorot-uniform for each head's matrix of a (H, m, n) tensor: U(-s, s) with s = sqrt(6 / (m + n)); returns it."""
    bound = math.sqrt(6.0 / (weight.size(1) + weight.size(2)))
    return nn.init.uniform_(weight, -bound, bound)


@register_synthesizer("random")
class Random(Synthesizer):
    """Random (eq. 4): ``S = R``, a trained matrix R of (H, l, l) that never looks at the input."""

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__(num_heads, head_dim, max_length, rank)
        self.R = nn.Parameter(torch.empty(num_heads, max_length, max_length))

    def reset_parameters(self) -> None:
        glorot_uniform_(self.R)

    def scale_(self, weight: Tensor) -> None:
        self.R.mul_(weight)

    def forward(self, inputs: Inputs) -> Logits:
        return bias_of(window_of(self.R, inputs))


@register_synthesizer("fixed_random")
class FixedRandom(Random):
    """Fixed Random (section 3.1): ``S = R``, drawn once from N(0, 1): a buffer, so not trained, but saved."""

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__(num_heads, head_dim, max_length, rank)
        del self.R
        self.register_buffer("R", torch.empty(num_heads, max_length, max_length))

    def reset_parameters(self) -> None:
        # untrained values near 0 would leave nothing but an average over the sentence
        nn.init.normal_(self.R)


@register_synthesizer("factorized_random")
class FactorizedRandom(Synthesizer):
    """Factorized Random (eq. 7): ``S = R1 R2^T`` with R1 and R2 of (H, l, k)."""

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__(num_heads, head_dim, max_length, rank)
        self.R1 = nn.Parameter(torch.empty(num_heads, max_length, rank))
        self.R2 = nn.Parameter(torch.empty(num_heads, max_length, rank))

    def reset_parameters(self) -> None:
        glorot_uniform_(self.R1)
        glorot_uniform_(self.R2)

    def scale_(self, weight: Tensor) -> None:
        self.R2.mul_(weight)

    def forward(self, inputs: Inputs) -> Logits:
        return product_of(rows_of(self.R1, inputs), columns_of(self.R2, inputs))


@register_synthesizer("relative_random")
class RelativeRandom(Synthesizer):
    """Random by distance, this project's own and not the paper's: ``S_ij = r[min(max(j - i, -m), m)]``, m = l.

    r, of (H, 2 l + 1), is trained. Sentences may have any length: beyond a distance of l all are alike.
    """

    has_max_length = False

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__(num_heads, head_dim, max_length, rank)
        self.r = nn.Parameter(torch.empty(num_heads, 2 * max_length + 1))

    def reset_parameters(self) -> None:
        # as wide as the entries of `Random`
        bound = math.sqrt(6.0 / (self.r.size(1) - 1))
        nn.init.uniform_(self.r, -bound, bound)

    def scale_(self, weight: Tensor) -> None:
        self.r.mul_(weight[..., 0])

    def forward(self, inputs: Inputs) -> Logits:
        return diagonals_of(distances_of(self.r, inputs))


@register_synthesizer("dense")
class Dense(Synthesizer):
    """Dense (eq. 1-2): ``S_i = W2 relu(W1 x_i + b1) + b2``, per head on its slice, d_h -> d_h -> l.

    W1 is (H, d_h, d_h) and W2 (H, l, d_h): the relu is the query, the first S rows of W2 are the keys.
    """

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__(num_heads, head_dim, max_length, rank)
        self.W1 = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))
        self.b1 = nn.Parameter(torch.empty(num_heads, head_dim))
        self.W2 = nn.Parameter(torch.empty(num_heads, max_length, head_dim))
        self.b2 = nn.Parameter(torch.empty(num_heads, max_length))

    def reset_parameters(self) -> None:
        for matrix in (self.W1, self.W2):
            glorot_uniform_(matrix)
        for bias in (self.b1, self.b2):
            nn.init.zeros_(bias)

    def scale_(self, weight: Tensor) -> None:
        self.W2.mul_(weight)
        self.b2.mul_(weight[..., 0])

    def hidden(self, x: Tensor) -> Tensor:
        """``relu(W1 x + b1)`` of the layer's input (T, B, C): (H, T B, d_h)."""
        return per_head_linear(by_head(x, self.num_heads), self.W1, self.b1).relu_()

    def forward(self, inputs: Inputs) -> Logits:
        query = by_sentence(self.hidden(inputs.x), inputs.x)
        bias = window_of(self.b2.unsqueeze(1), inputs)
        return product_of(query, columns_of(self.W2, inputs)) + bias_of(bias)


def factorize(length: int) -> tuple[int, int]:
    """``(a, b)`` with ``a b = length`` and a the largest divisor up to the square root; SynthesizerError if a is 1."""
    for a in range(math.isqrt(length), 1, -1):
        if length % a == 0:
            return a, length // a
    raise SynthesizerError(
        f"--synth-max-length {length}: factorized_dense needs a product a*b with a, b > 1; "
        f"take {max(4, length + 1)}, for example"
    )


@register_synthesizer("factorized_dense")
class FactorizedDense(Dense):
    """Factorized Dense (eq. 5-6): ``S_i[j] = A_i[u] B_i[v]`` with ``j = u b + v`` and ``a b = l``.

    A_i and B_i, of a and b values, are two linear read-outs of one relu(W1 x_i + b1), per head on its
    slice: the first a and the last b rows of W2 and b2. Each value of A stands b times in a row and B is
    tiled, so that all l columns differ (tiling both would leave lcm(a, b) distinct ones). a is the largest
    divisor of l up to its square root.

    Raises:
        SynthesizerError: l is 1, 2, 3 or another prime.
    """

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        a, b = factorize(max_length)
        super().__init__(num_heads, head_dim, a + b, rank)
        self.a, self.b = a, b
        # empty: its shape tells a checkpoint of another l with the same a + b, whose rows would be divided wrongly
        self.register_buffer("factors", torch.empty(self.a, self.b, 0))

    def reset_parameters(self) -> None:
        for matrix in (self.W1, self.W2[:, : self.a], self.W2[:, self.a :]):
            with torch.no_grad():
                matrix.copy_(glorot_uniform_(torch.empty_like(matrix)))
        for bias in (self.b1, self.b2):
            nn.init.zeros_(bias)

    def scale_(self, weight: Tensor) -> None:
        self.W2[:, self.a :].mul_(weight)
        self.b2[:, self.a :].mul_(weight[..., 0])

    def forward(self, inputs: Inputs) -> Logits:
        factors = per_head_linear(self.hidden(inputs.x), self.W2, self.b2)
        return outer_product_of(by_sentence(factors, inputs.x), self.a)


@register_synthesizer("vanilla")
class Vanilla(Synthesizer):
    """Vanilla, the Transformer's own: ``S = Q K^T / sqrt(d_h)``. Its weights are the attention's q_proj, k_proj."""

    reads_query_key = True
    has_max_length = False

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__(num_heads, head_dim, max_length, rank)
        self.scaling = head_dim**-0.5

    def forward(self, inputs: Inputs) -> Logits:
        q, k = inputs.q, inputs.k
        assert q is not None and k is not None
        return product_of(q, k, self.scaling)


class LayerSynthesizer(Light):
    """What computes the logits of a layer: one `Mixture` for all heads, or one for each group of `HeadGroups`."""

    def mixtures(self) -> list["Mixture"]:
        """The mixture of each group of neighbouring heads."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initial values of every function, and equal weights."""
        for mixture in self.mixtures():
            for component in mixture.components.values():
                component.reset_parameters()  # type: ignore[operator]  # a ModuleDict forgets its modules' type
            if mixture.alpha is not None:
                nn.init.zeros_(mixture.alpha)

    def forward(self, inputs: Inputs) -> list[Logits]:
        """The logits of each group of heads."""
        raise NotImplementedError


def limit_of(names: Iterable[str], max_length: int, beyond_length: str) -> int | None:
    """The longest sentence in tokens that functions of these names take; None if they take any."""
    has_limit = any(SYNTHESIZERS[name].has_max_length for name in names)
    return max_length if has_limit and beyond_length == "refuse" else None


class Mixture(LayerSynthesizer):
    """Mixture (section 3.2): ``S = sum_m alpha_m S_m``, the sum taken on the logits.

    ``convex`` learns one weight per component and head, alpha = softmax over the components, so that they
    sum to 1 and start equal; ``sum`` adds the logits as they are. One component alone has no weight. The weights
    before the softmax are ``alpha``, (M, H), a row for each component.

    Args:
        names: registered functions, as `in_order` returns them.
        mixture: ``convex`` or ``sum``.
        num_heads, head_dim, max_length, rank: sizes, see the module's head.
        beyond_length: what becomes of a position p >= l: ``refuse``, or ``tile``, row and column p mod l.
    """

    limit: int | None  # longest sentence in tokens

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
        super().__init__()
        for flag, given, choices in (
            ("--synth-mixture", mixture, MIXTURES),
            ("--synth-beyond-length", beyond_length, BEYOND_LENGTH),
        ):
            if given not in choices:
                raise SynthesizerError(f"{flag} {given!r}: choose from {', '.join(choices)}")
        self.num_heads, self.head_dim = num_heads, head_dim
        self.components = nn.ModuleDict(
            {name: SYNTHESIZERS[name](num_heads, head_dim, max_length, rank) for name in names}
        )
        self.reads_query_key = any(c.reads_query_key for c in self.components.values())
        self.limit = limit_of(names, max_length, beyond_length)
        is_weighted = mixture == "convex" and len(names) > 1
        self.alpha = nn.Parameter(torch.empty(len(names), num_heads)) if is_weighted else None

    def mixtures(self) -> list["Mixture"]:
        return [self]

    def forward(self, inputs: Inputs) -> list[Logits]:
        """See `LayerSynthesizer`. Raises ValueError if S is beyond l, and to be refused."""
        limit = self.limit
        if limit is not None and inputs.src_len > limit:
            raise ValueError(f"a sentence of {inputs.src_len} tokens is longer than max_length {limit}")
        alpha = self.weights()
        weights = [] if alpha is None else alpha.view(alpha.size(0), 1, -1, 1, 1).unbind()
        logits = Logits([], [], [], [])
        for m, component in enumerate(self.components.values()):
            summand = component(inputs)
            logits = logits + (summand if alpha is None else summand.times(weights[m]))
        return [logits]

    def fold_weights_(self, like: Tensor) -> Tensor | None:
        """Multiplies the weights of the mixture into the parameters and drops them, if every function allows it.

        The buffer ``folded`` then tells a state dict of such parameters from one of a training.

        Args:
            like: a tensor of the device and type of the result; there may be no parameters.

        Returns:
            the factor of each head's queries from now on, (H,); None if no function reads queries.
        """
        components: list[Synthesizer] = list(self.components.values())  # type: ignore[arg-type]
        vanilla = next((component for component in components if isinstance(component, Vanilla)), None)
        others = [component for component in components if component is not vanilla]
        queries = like.new_ones(self.num_heads) if self.reads_query_key else None
        if any(c.reads_query_key or type(c).scale_ is Synthesizer.scale_ for c in others):
            return queries
        if vanilla is not None or self.alpha is not None:
            self.register_buffer("folded", like.new_ones([]))
        weights = self.weights()
        for m, component in enumerate(components):
            if component is vanilla:
                queries = queries * vanilla.scaling * (1.0 if weights is None else weights[m])
                vanilla.scaling = 1.0
            elif weights is not None:
                component.scale_(weights[m, :, None, None])
        self.alpha = None
        return queries

    def weights(self) -> Tensor | None:
        """The weight of each component in each head, (M, H), or None for 1."""
        alpha = self.alpha
        return None if alpha is None else torch.softmax(alpha, dim=0)
