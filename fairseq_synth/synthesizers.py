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

All of them are an inner product of synthesized queries and keys plus a bias or an outer product, `Terms`,
so a mixture scales and adds terms and the attention never asks which function it has.

To add a function, write one class here with `register_synthesizer`: the flags, the architectures, the
tests over the registry and the error messages find it by its name.
"""

import math
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Type

import torch
import torch.nn as nn
from torch import Tensor

from .errors import SynthesizerError
from .nested import Blocks, NestedMatrix, join


class Terms(NamedTuple):
    """Logits of one function, in factors: ``weight (scale query @ key^T + bias + outer_product(left, right))``.

    An absent part counts as 0, an absent weight as 1. A first dimension of 1 means that the part does not
    depend on the input and serves the whole batch.
    """

    query: Optional[Tensor] = None  # (B or 1, H, T, r)
    key: Optional[Tensor] = None  # (B or 1, H, S, r)
    bias: Optional[Tensor] = None  # (B or 1, H, T or 1, S)
    matrix: Optional[Blocks] = None  # one more bias, (H, T, S) for the whole batch, in the blocks that store it
    left: Optional[Tensor] = None  # (B or 1, H, T, a)
    right: Optional[Tensor] = None  # (B or 1, H, T, b), a b >= S
    weight: Optional[Tensor] = None  # (1, H, 1, 1)
    scale: float = 1.0


SYNTHESIZERS: Dict[str, Type["Synthesizer"]] = {}


def register_synthesizer(name: str) -> Callable[[Type["Synthesizer"]], Type["Synthesizer"]]:
    """Makes a `Synthesizer` available under `name` in ``--encoder-synthesizer`` and the like."""

    def register(cls: Type["Synthesizer"]) -> Type["Synthesizer"]:
        if name in SYNTHESIZERS:
            raise ValueError(f"a synthesizer named {name!r} exists already: {SYNTHESIZERS[name]}")
        SYNTHESIZERS[name] = cls
        return cls

    return register


class Synthesizer(nn.Module):
    """Base class of S(X).

    A subclass creates its parameters in ``__init__(num_heads, head_dim, max_length, rank)``, gives them
    values in `reset_parameters`, says in `silence` which of them to zero so that its logits vanish, and
    returns its `Terms` in ``forward``. Slice the parameters to T rows and S columns *before* computing.
    """

    reads_query_key = False  # True: q and k are passed to forward; otherwise nobody projects or caches them
    has_max_length = True  # False: the function works at any length

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__()

    def reset_parameters(self) -> None:
        """Initial values. Glorot-uniform per head, so that attention starts close to uniform."""
        if next(self.parameters(), None) is not None:
            raise NotImplementedError

    def silence(self) -> None:
        """Makes all logits zero and keeps their gradients alive: a mixture then starts as the rest of it."""
        if next(self.parameters(), None) is not None:
            raise NotImplementedError

    def forward(self, x: Tensor, q: Optional[Tensor], k: Optional[Tensor], start: int, src_len: int) -> Terms:
        """The logits' terms.

        Args:
            x: the layer's input, each head seeing its slice, (B, H, T, d_h).
            q: projected queries, (B, H, T, d_h); None unless `reads_query_key`.
            k: projected keys, (B, H, S, d_h); None unless `reads_query_key`.
            start: position of the first row.
            src_len: S, the number of columns.
        """
        raise NotImplementedError


@register_synthesizer("random")
class Random(Synthesizer):
    """Random (eq. 4): ``S = R``, a trained matrix R of (H, l, l) that never looks at the input."""

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__(num_heads, head_dim, max_length, rank)
        self.R = NestedMatrix(num_heads, max_length)

    def reset_parameters(self) -> None:
        R = self.R.whole()
        glorot_uniform_(R)
        self.R.assign(R)

    def silence(self) -> None:
        for block in self.R.parameters():
            nn.init.zeros_(block)

    def forward(self, x: Tensor, q: Optional[Tensor], k: Optional[Tensor], start: int, src_len: int) -> Terms:
        return Terms(matrix=self.R(start, x.size(2), src_len))


@register_synthesizer("fixed_random")
class FixedRandom(Synthesizer):
    """Fixed Random (section 3.1): ``S = R``, drawn once from N(0, 1), never trained, in every checkpoint."""

    R: Tensor

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__(num_heads, head_dim, max_length, rank)
        self.register_buffer("R", torch.empty(num_heads, max_length, max_length))

    def reset_parameters(self) -> None:
        # untrained values near 0 would leave nothing but an average over the sentence
        nn.init.normal_(self.R)

    def forward(self, x: Tensor, q: Optional[Tensor], k: Optional[Tensor], start: int, src_len: int) -> Terms:
        return Terms(bias=self.R[None, :, start : start + x.size(2), :src_len])


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

    def silence(self) -> None:
        nn.init.zeros_(self.R2)

    def forward(self, x: Tensor, q: Optional[Tensor], k: Optional[Tensor], start: int, src_len: int) -> Terms:
        return Terms(query=self.R1[None, :, start : start + x.size(2)], key=self.R2[None, :, :src_len])


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
        for weight in (self.W1, self.W2):
            glorot_uniform_(weight)
        for bias in (self.b1, self.b2):
            nn.init.zeros_(bias)

    def silence(self) -> None:
        nn.init.zeros_(self.W2)
        nn.init.zeros_(self.b2)

    def forward(self, x: Tensor, q: Optional[Tensor], k: Optional[Tensor], start: int, src_len: int) -> Terms:
        hidden = per_head_linear(x, self.W1, self.b1).relu_()
        return Terms(query=hidden, key=self.W2[None, :, :src_len], bias=self.b2[None, :, None, :src_len])


@register_synthesizer("factorized_dense")
class FactorizedDense(Synthesizer):
    """Factorized Dense (eq. 5-6): ``S_i[j] = A_i[u] B_i[v]`` with ``j = u b + v`` and ``a b = l``.

    A_i and B_i, of a and b values, are two linear read-outs of one relu(W1 x_i + b1), per head on its
    slice. A is interleaved and B tiled, so that all l columns differ (tiling both would leave lcm(a, b)
    distinct ones). a is the largest divisor of l up to its square root.

    Raises:
        SynthesizerError: l is 1, 2, 3 or another prime.
    """

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__(num_heads, head_dim, max_length, rank)
        self.a, self.b = factorize(max_length)
        self.W1 = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))
        self.b1 = nn.Parameter(torch.empty(num_heads, head_dim))
        self.WA = nn.Parameter(torch.empty(num_heads, self.a, head_dim))
        self.bA = nn.Parameter(torch.empty(num_heads, self.a))
        self.WB = nn.Parameter(torch.empty(num_heads, self.b, head_dim))
        self.bB = nn.Parameter(torch.empty(num_heads, self.b))

    def reset_parameters(self) -> None:
        for weight in (self.W1, self.WA, self.WB):
            glorot_uniform_(weight)
        for bias in (self.b1, self.bA, self.bB):
            nn.init.zeros_(bias)

    def silence(self) -> None:
        nn.init.zeros_(self.WB)
        nn.init.zeros_(self.bB)

    def forward(self, x: Tensor, q: Optional[Tensor], k: Optional[Tensor], start: int, src_len: int) -> Terms:
        hidden = per_head_linear(x, self.W1, self.b1).relu_()
        a = (src_len + self.b - 1) // self.b  # values of u that the first S columns reach
        b = min(self.b, src_len)
        W = torch.cat([self.WA[:, :a], self.WB[:, :b]], dim=1)
        A, B = per_head_linear(hidden, W, torch.cat([self.bA[:, :a], self.bB[:, :b]], dim=1)).split([a, b], dim=-1)
        return Terms(left=A, right=B)


@register_synthesizer("vanilla")
class Vanilla(Synthesizer):
    """Vanilla, the Transformer's own: ``S = Q K^T / sqrt(d_h)``. Its weights are the attention's q_proj, k_proj."""

    reads_query_key = True
    has_max_length = False

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__(num_heads, head_dim, max_length, rank)
        self.scaling = head_dim**-0.5

    def forward(self, x: Tensor, q: Optional[Tensor], k: Optional[Tensor], start: int, src_len: int) -> Terms:
        assert q is not None and k is not None
        return Terms(query=q, key=k, scale=self.scaling)


class Mixture(nn.Module):
    """Mixture (section 3.2): ``S = sum_m alpha_m S_m``, the sum taken on the logits.

    ``convex`` learns one weight per component and head, alpha = softmax over the components, so that they
    sum to 1 and start equal; ``sum`` adds the logits as they are. One component alone has no weight.

    Args:
        names: registered functions, as `parse_spec` returns them.
        mixture: ``convex`` or ``sum``.
        num_heads, head_dim, max_length, rank: sizes, see the module's head.
    """

    def __init__(
        self, names: Sequence[str], mixture: str, num_heads: int, head_dim: int, max_length: int, rank: int
    ) -> None:
        super().__init__()
        if mixture not in MIXTURES:
            raise SynthesizerError(f"--synth-mixture {mixture!r}: choose from {', '.join(MIXTURES)}")
        self.components = nn.ModuleDict(
            {name: SYNTHESIZERS[name](num_heads, head_dim, max_length, rank) for name in names}
        )
        self.reads_query_key = any(c.reads_query_key for c in self.components.values())
        if mixture == "convex" and len(names) > 1:
            self.alpha = nn.Parameter(torch.empty(len(names), num_heads))
        else:
            self.alpha = None

    def reset_parameters(self) -> None:
        """Initial values of every component, and equal weights."""
        for component in self.components.values():
            component.reset_parameters()
        if self.alpha is not None:
            nn.init.zeros_(self.alpha)

    def forward(self, x: Tensor, q: Optional[Tensor], k: Optional[Tensor], start: int, src_len: int) -> List[Terms]:
        """The weighted terms of every component; arguments as in `Synthesizer.forward`."""
        terms: List[Terms] = []
        for component in self.components.values():
            terms.append(component(x, q, k, start, src_len))
        if self.alpha is not None:
            alpha = torch.softmax(at_least_fp32(self.alpha), dim=0).to(x.dtype)
            for m, term in enumerate(terms):
                weight = alpha[m].view(1, -1, 1, 1)
                terms[m] = Terms(
                    term.query, term.key, term.bias, term.matrix, term.left, term.right, weight, term.scale
                )
        return terms


MIXTURES = ("convex", "sum")


def logits(terms: List[Terms], src_len: int) -> Tensor:
    """The sum of all terms.

    Args:
        terms: as a `Mixture` returns them.
        src_len: S.

    Returns:
        (B or 1, H, T or 1, S); B only if a term depends on the input, 1 row only if no row differs.
    """
    total: Optional[Tensor] = None
    for term in terms:
        query, key, bias, matrix, left, right, weight, scale = term
        if query is not None and key is not None:
            query = times_weight(query, weight, scale)
            if key.size(0) < query.size(0):
                product = torch.einsum("bhtr,hsr->bhts", query, key[0])  # matmul would repeat the keys
            else:
                product = torch.matmul(query, key.transpose(-2, -1))
            total = product if total is None else total + product
        if bias is not None:
            bias = times_weight(bias, weight)
            total = bias if total is None else total + bias
        if matrix is not None:
            bias = times_weight(join(matrix)[None], weight)
            total = bias if total is None else total + bias
        if left is not None and right is not None:
            product = outer_product(times_weight(left, weight), right)[..., :src_len]
            total = product if total is None else total + product
    assert total is not None
    return total


def times_weight(x: Tensor, weight: Optional[Tensor], scale: float = 1.0) -> Tensor:
    """One factor of a term's logits, of a product the smaller, times the term's weight and scale."""
    if weight is not None:
        return x * (weight * scale if scale != 1.0 else weight)
    return x * scale if scale != 1.0 else x


def outer_product(left: Tensor, right: Tensor) -> Tensor:
    """``left_u right_v`` for each row, column ``u b + v``: (..., a) and (..., b) -> (..., a b)."""
    return (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)


def parse_spec(spec: str, flag: str = "--encoder-synthesizer") -> Tuple[str, ...]:
    """``"vanilla+random"`` -> ``("random", "vanilla")``: the functions joined by ``+``, in registry order.

    Raises:
        SynthesizerError: an unknown, missing or repeated name; the message lists the valid ones.
    """
    names = [name.strip() for name in spec.split("+")]
    for name in names:
        if name not in SYNTHESIZERS:
            raise SynthesizerError(
                f"{flag} {spec!r}: unknown synthesizer {name!r}; choose from {', '.join(SYNTHESIZERS)}, "
                "or several of them joined by '+'"
            )
        if names.count(name) > 1:
            raise SynthesizerError(f"{flag} {spec!r}: {name!r} appears twice; name each function once")
    return tuple(name for name in SYNTHESIZERS if name in names)


def factorize(length: int) -> Tuple[int, int]:
    """``(a, b)`` with ``a b = length`` and a the largest divisor up to the square root.

    Raises:
        SynthesizerError: no divisor but 1, so that nothing is factorized.
    """
    for a in range(math.isqrt(length), 1, -1):
        if length % a == 0:
            return a, length // a
    raise SynthesizerError(
        f"--synth-max-length {length}: factorized_dense needs a product a*b with a, b > 1; "
        f"take {max(4, length + 1)}, for example"
    )


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or as it is in fp64."""
    return x if x.dtype == torch.float64 else x.float()


def per_head_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``W x + b`` with a matrix per head: x (B, H, T, n), weight (H, m, n), bias (H, m) -> (B, H, T, m)."""
    bsz, heads, length, _ = x.size()
    rows = x.permute(1, 2, 0, 3).reshape(
        heads, length * bsz, x.size(3)
    )  # of a layer's input a view, not a copy to keep
    out = torch.baddbmm(bias.unsqueeze(1), rows, weight.transpose(1, 2))
    return out.view(heads, length, bsz, weight.size(1)).permute(2, 0, 1, 3)


def glorot_uniform_(weight: Tensor) -> None:
    """Glorot-uniform for each head's matrix of a (H, m, n) tensor: U(-s, s) with s = sqrt(6 / (m + n))."""
    bound = math.sqrt(6.0 / (weight.size(1) + weight.size(2)))
    nn.init.uniform_(weight, -bound, bound)
