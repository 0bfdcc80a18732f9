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
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Type, Union

import torch
import torch.nn as nn
from torch import Tensor

from .errors import SynthesizerError
from .masks import at_least_fp32
from .nested import NestedMatrix, assemble


class Terms(NamedTuple):
    """One function's share of the logits, kept factorized.

    ``weight (scale query @ key^T + bias + matrix + outer_product(left, right))``; an absent part counts as 0, an
    absent weight as 1. A first dimension of 1 means that the part is shared across the batch: it does not depend
    on the input.
    """

    query: Optional[Tensor] = None  # (B or 1, H or 1, T, r)
    key: Optional[Tensor] = None  # (B or 1, H or 1, S, r)
    bias: Optional[Tensor] = None  # (B or 1, H or 1, T or 1, S)
    matrix: Optional[List[List[Tensor]]] = None  # one more bias, (1, H, T, S), in blocks as numpy.block takes them
    left: Optional[Tensor] = None  # (B or 1, H or 1, T, a)
    right: Optional[Tensor] = None  # (B or 1, H or 1, T, b), a b >= S
    weight: Optional[Tensor] = None  # (1, H, 1, 1)
    scale: float = 1.0  # of the inner product


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
    returns its `Terms` in ``forward``. Take the T rows and S columns of the parameters by `positions` *before*
    computing: short sentences then cost little, and ``--synth-beyond-length tile`` works.
    """

    # True: forward gets q and k. Without such a component there is no q_proj, k_proj or key cache
    reads_query_key = False
    has_max_length = True  # False: the function works at any length

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__()

    def reset_parameters(self) -> None:
        """Gives the parameters their initial values."""
        if self.is_trained():
            raise NotImplementedError

    def silence(self) -> None:
        """Zeroes this function's logits, not their gradient, so that a mixture starts as its other components."""
        if self.is_trained():
            raise NotImplementedError

    def is_trained(self) -> bool:
        """Whether the function has parameters of its own, beside its weight in a mixture."""
        return any(name != "alpha" for name, _ in self.named_parameters())

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
        for block in self.R.blocks:
            nn.init.zeros_(block)

    def forward(self, x: Tensor, q: Optional[Tensor], k: Optional[Tensor], start: int, src_len: int) -> Terms:
        return Terms(matrix=self.R(start, x.size(2), src_len))


@register_synthesizer("fixed_random")
class FixedRandom(Synthesizer):
    """Fixed Random (section 3.1): ``S = R``, drawn once from N(0, 1): a buffer, so not trained, but saved."""

    R: Tensor

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__(num_heads, head_dim, max_length, rank)
        self.register_buffer("R", torch.empty(num_heads, max_length, max_length))

    def reset_parameters(self) -> None:
        # untrained values near 0 would leave nothing but an average over the sentence
        nn.init.normal_(self.R)

    def forward(self, x: Tensor, q: Optional[Tensor], k: Optional[Tensor], start: int, src_len: int) -> Terms:
        rows = positions(self.R, 1, start, x.size(2))
        return Terms(bias=positions(rows, 2, 0, src_len)[None])


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
        rows, columns = positions(self.R1, 1, start, x.size(2)), positions(self.R2, 1, 0, src_len)
        return Terms(query=rows[None], key=columns[None])


@register_synthesizer("relative_random")
class RelativeRandom(Synthesizer):
    """Random by distance, this project's own and not the paper's: ``S_ij = r[min(max(j - i, -m), m)]``, m = l.

    r, of (H, 2 l + 1), is trained. Sentences may have any length: beyond a distance of l all are alike.
    """

    has_max_length = False

    def __init__(self, num_heads: int, head_dim: int, max_length: int, rank: int) -> None:
        super().__init__(num_heads, head_dim, max_length, rank)
        self.max_length = max_length
        self.r = nn.Parameter(torch.empty(num_heads, 2 * max_length + 1))

    def reset_parameters(self) -> None:
        # as wide as the entries of `Random`
        bound = math.sqrt(3.0 / self.max_length)
        nn.init.uniform_(self.r, -bound, bound)

    def silence(self) -> None:
        nn.init.zeros_(self.r)

    def forward(self, x: Tensor, q: Optional[Tensor], k: Optional[Tensor], start: int, src_len: int) -> Terms:
        last = start + x.size(2) - 1
        # all j - i, from that of the last row and first column to that of the first row and last column
        distances = torch.arange(-last, src_len - start, device=x.device).clamp(-self.max_length, self.max_length)
        values = self.r.index_select(1, distances + self.max_length)
        # each row is the one below it, moved by one
        return Terms(bias=values.unfold(1, src_len, 1).flip(1)[None])


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
        hidden = per_head_linear(x, self.W1, self.b1, relu=True)
        columns, bias = positions(self.W2, 1, 0, src_len), positions(self.b2, 1, 0, src_len)
        return Terms(query=hidden, key=columns[None], bias=bias[None, :, None])


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
        hidden = per_head_linear(x, self.W1, self.b1, relu=True)
        groups = (src_len + self.b - 1) // self.b  # of columns with the same u
        a, b = min(self.a, groups), min(self.b, src_len)
        W = torch.cat([self.WA[:, :a], self.WB[:, :b]], dim=1)
        A, B = per_head_linear(hidden, W, torch.cat([self.bA[:, :a], self.bB[:, :b]], dim=1)).split([a, b], dim=-1)
        return Terms(left=positions(A, 3, 0, groups), right=B)


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
    sum to 1 and start equal; ``sum`` adds the logits as they are. One component alone has no weight. In a state
    dict the weights before the softmax are ``components.{name}.alpha``, (H,).

    Args:
        names: registered functions, as `parse_spec` returns them.
        mixture: ``convex`` or ``sum``.
        num_heads, head_dim, max_length, rank: sizes, see the module's head.
        beyond_length: what becomes of a position p >= l: ``refuse``, or ``tile``, row and column p mod l.
    """

    limit: Optional[int]  # longest sentence in tokens

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
        if mixture not in MIXTURES:
            raise SynthesizerError(f"--synth-mixture {mixture!r}: choose from {', '.join(MIXTURES)}")
        self.components = nn.ModuleDict(
            {name: SYNTHESIZERS[name](num_heads, head_dim, max_length, rank) for name in names}
        )
        self.reads_query_key = any(c.reads_query_key for c in self.components.values())
        self.is_weighted = mixture == "convex" and len(names) > 1
        limited = beyond_length == "refuse" and any(c.has_max_length for c in self.components.values())
        self.limit = max_length if limited else None
        # one group of heads, see `HeadGroups`
        self.heads, self.terms = [num_heads], [len(names)]
        self.query_key_heads = [num_heads if self.reads_query_key else 0]
        for component in self.components.values():
            component.register_parameter("alpha", nn.Parameter(torch.empty(num_heads)) if self.is_weighted else None)

    def reset_parameters(self) -> None:
        """Initial values of every component, and equal weights."""
        for component in self.components.values():
            component.reset_parameters()  # type: ignore[operator]  # a ModuleDict forgets its modules' type
            if component.alpha is not None:
                nn.init.zeros_(component.alpha)  # type: ignore[arg-type]

    def forward(self, x: Tensor, q: Optional[Tensor], k: Optional[Tensor], start: int, src_len: int) -> List[Terms]:
        """The weighted terms of every component; arguments as in `Synthesizer.forward`.

        Raises:
            ValueError: S is beyond l, and to be refused.
        """
        limit = self.limit
        if limit is not None and src_len > limit:
            raise ValueError("a sentence of {} tokens is longer than max_length {}".format(src_len, limit))
        terms: List[Terms] = []
        alphas: List[Tensor] = []
        for component in self.components.values():
            terms.append(component(x, q, k, start, src_len))
            alpha = component.alpha
            if alpha is not None:
                alphas.append(alpha)  # type: ignore[arg-type]
        if self.is_weighted:
            weights = torch.softmax(torch.stack(alphas), dim=0).to(x.dtype)
            for m, (term, weight) in enumerate(zip(terms, weights[:, None, :, None, None].unbind())):
                terms[m] = Terms(
                    term.query, term.key, term.bias, term.matrix, term.left, term.right, weight, term.scale
                )
        return terms


class HeadGroups(nn.Module):
    """Heads of different kinds in one layer: each group of neighbouring heads has a `Mixture` of its own.

    Args:
        heads: how many heads each group has.
        mixtures: the groups' mixtures, each built for its number of heads.
    """

    def __init__(self, heads: Sequence[int], mixtures: Sequence[Mixture]) -> None:
        super().__init__()
        self.heads = list(heads)
        self.groups = nn.ModuleList(mixtures)
        # of each group the heads that have queries and keys, and how many terms it has
        self.query_key_heads = [count if mixture.reads_query_key else 0 for count, mixture in zip(heads, mixtures)]
        self.terms = [len(mixture.components) for mixture in mixtures]
        self.reads_query_key = any(self.query_key_heads)

    def reset_parameters(self) -> None:
        """Initial values of every group."""
        for group in self.groups:
            group.reset_parameters()  # type: ignore[operator]

    def forward(self, x: Tensor, q: Optional[Tensor], k: Optional[Tensor], start: int, src_len: int) -> List[Terms]:
        """The terms of all groups, one group after the other; each has the heads of its group.

        Args:
            x: as in `Synthesizer.forward`, all heads.
            q, k: of those heads that have queries and keys.
            start, src_len: as in `Synthesizer.forward`.
        """
        terms: List[Terms] = []
        first, first_key = 0, 0
        for i, group in enumerate(self.groups):
            count, keys = self.heads[i], self.query_key_heads[i]
            group_q: Optional[Tensor] = None
            group_k: Optional[Tensor] = None
            if q is not None and k is not None and keys > 0:
                group_q, group_k = q.narrow(1, first_key, keys), k.narrow(1, first_key, keys)
            terms += group(x.narrow(1, first, count), group_q, group_k, start, src_len)
            first += count
            first_key += keys
        return terms


MIXTURES = ("convex", "sum")
BEYOND_LENGTH = ("refuse", "tile")


def logits(terms: List[Terms], src_len: int) -> Tensor:
    """The sum of all terms.

    Args:
        terms: as a `Mixture` returns them.
        src_len: S.

    Returns:
        (B or 1, H or 1, T or 1, S); B only if a term depends on the input, 1 row only if no row differs. A sum is in
        fp32 at least; a single part keeps its type, which saves a kernel.
    """
    terms_of_sum = one_product(terms)
    is_sum = sum([number_of_parts(term) for term in terms_of_sum]) > 1
    total: Optional[Tensor] = None
    for query, key, _, _, left, right, weight, scale in terms_of_sum:
        if query is not None and key is not None:
            product = part(inner_product(times_weight(query, weight, scale), key), is_sum)
            total = product if total is None else total + product
        if left is not None and right is not None:
            product = part(outer_product(times_weight(left, weight), right)[..., :src_len], is_sum)
            total = product if total is None else total + product
    is_new = total is not None  # and no view of a parameter: the next bias may be added in its memory
    for _, _, bias, matrix, _, _, weight, _ in terms:
        biases: List[Tensor] = []
        if bias is not None:
            biases.append(bias)
        if matrix is not None:
            biases.append(assemble(matrix))
        for bias in biases:
            bias = times_weight(part(bias, is_sum), weight)
            if total is None:
                total = bias
            elif is_new and all([bias.size(i) <= total.size(i) for i in range(3)]):
                total = total.add_(bias)
            else:
                total = total + bias
                is_new = True
    assert total is not None
    return total


def number_of_parts(term: Terms) -> int:
    """How many summands a term has."""
    return sum([term.query is not None, term.bias is not None, term.matrix is not None, term.left is not None])


def part(x: Tensor, is_sum: bool) -> Tensor:
    """A part of the logits, in fp32 at least where it is added to others."""
    return at_least_fp32(x) if is_sum else x


def inner_product(query: Tensor, key: Tensor) -> Tensor:
    """``query @ key^T``, without a copy of shared keys for each sentence."""
    if key.size(0) >= query.size(0):
        return torch.matmul(query, key.transpose(-2, -1))
    if key.size(1) == 1:
        return torch.matmul(query, key[0, 0].t())
    return torch.einsum("bhtr,hsr->bhts", query, key[0])


def one_product(terms: List[Terms]) -> List[Terms]:
    """The same sum, with its inner products joined to one.

    With a single row, as in decoding, they stay apart: to join them copies all keys, which costs more than to add up
    one row of logits.
    """
    products = 0
    for query, _, _, _, _, _, _, _ in terms:
        if query is not None and query.size(2) > 1:
            products += 1
    if products < 2:
        return terms
    joined = [joint_product(terms)]
    for term in terms:
        if has_bias(term):
            joined.append(Terms(None, None, term.bias, term.matrix, term.left, term.right, term.weight))
    return joined


def joint_product(terms: List[Terms]) -> Terms:
    """All inner products as one: the queries, times their weights, are concatenated, and so are the keys."""
    queries: List[Tensor] = []
    keys: List[Tensor] = []
    for query, key, _, _, _, _, weight, scale in terms:
        if query is not None and key is not None:
            queries.append(times_weight(query, weight, scale))
            keys.append(key)
    if len(queries) == 1:
        return Terms(queries[0], keys[0])
    return Terms(side_by_side(queries), side_by_side(keys))


def has_bias(term: Terms) -> bool:
    """Whether the term is more than an inner product of queries and keys."""
    return term.bias is not None or term.matrix is not None or term.left is not None


def times_weight(x: Tensor, weight: Optional[Tensor], scale: float = 1.0) -> Tensor:
    """x, a factor of a term's logits, times the term's weight and scale."""
    if weight is not None:
        weight = weight.to(x.dtype)  # under autocast they differ
        return x * (weight * scale if scale != 1.0 else weight)
    return x * scale if scale != 1.0 else x


def outer_product(left: Tensor, right: Tensor) -> Tensor:
    """``left_u right_v`` for each row, column ``u b + v``: (..., a) and (..., b) -> (..., a b)."""
    return (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)


def side_by_side(factors: List[Tensor]) -> Tensor:
    """Factors (B or 1, H or 1, T, r) concatenated along r."""
    sizes = list(factors[0].size())
    for x in factors:
        sizes = [n if m == 1 else m for m, n in zip(sizes, x.size())]
    return torch.cat([x.expand(sizes[0], sizes[1], sizes[2], -1) for x in factors], dim=-1)


HeadGroup = Tuple[int, Tuple[str, ...]]  # a number of heads, and the functions that each of them mixes


def parse_heads(spec: str, num_heads: int, flag: str = "--encoder-synthesizer") -> Tuple[HeadGroup, ...]:
    """The functions of a layer's heads: ``"random:6/dense+vanilla:2"`` for 8 heads.

    Without ``/`` all heads are alike; without numbers the groups are equally large.

    Returns:
        ((6, ("random",)), (2, ("dense", "vanilla"))).

    Raises:
        SynthesizerError: as of `parse_spec`, or the numbers do not add up to `num_heads`.
    """
    groups = [part.partition(":") for part in spec.split("/")]
    names = [parse_spec(name, flag) for name, _, _ in groups]
    numbers = [number.strip() for _, _, number in groups]
    if not any(colon for _, colon, _ in groups):
        if num_heads % len(groups):
            raise SynthesizerError(
                f"{flag} {spec!r}: {num_heads} heads cannot be shared out equally among {len(groups)} groups; give "
                "their numbers, as in random:6/vanilla:2"
            )
        numbers = [str(num_heads // len(groups))] * len(groups)
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise SynthesizerError(f"{flag} {spec!r}: give every group its number of heads, as in random:6/vanilla:2")
    if sum(map(int, numbers)) != num_heads:
        raise SynthesizerError(
            f"{flag} {spec!r}: {' + '.join(numbers)} heads are not the {num_heads} attention heads of the layer"
        )
    return tuple(zip(map(int, numbers), names))


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
                "or several of them joined by '+', as in random+vanilla"
            )
        if names.count(name) > 1:
            raise SynthesizerError(f"{flag} {spec!r}: {name!r} appears twice; name each function once")
    return tuple(name for name in SYNTHESIZERS if name in names)


def build_synthesizer(
    groups: Sequence[HeadGroup], mixture: str, head_dim: int, max_length: int, rank: int, beyond_length: str = "refuse"
) -> Union[Mixture, HeadGroups]:
    """What computes the logits of a layer.

    Args:
        groups: as `parse_heads` returns them.
        mixture, head_dim, max_length, rank, beyond_length: as of `Mixture`.
    """
    mixtures = [Mixture(names, mixture, heads, head_dim, max_length, rank, beyond_length) for heads, names in groups]
    return mixtures[0] if len(groups) == 1 else HeadGroups([heads for heads, _ in groups], mixtures)


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


def positions(x: Tensor, dim: int, start: int, count: int) -> Tensor:
    """The entries along a dimension of l for positions ``start .. start + count - 1``: position p has entry p mod l.

    This is the paper's way to sentences beyond l, "tile to the maximum sequence length". Within l it is a view.
    """
    length = x.size(dim)
    start = start % length
    if start + count <= length:
        return x.narrow(dim, start, count)
    pieces: List[Tensor] = []
    while count > 0:
        piece = x.narrow(dim, start, min(count, length - start))
        pieces.append(piece)
        count -= piece.size(dim)
        start = 0
    return torch.cat(pieces, dim=dim)


def per_head_linear(x: Tensor, weight: Tensor, bias: Tensor, relu: bool = False) -> Tensor:
    """``W x + b``, or ``relu(W x + b)``, with a matrix per head.

    x (B, H, T, n), weight (H, m, n), bias (H, m) -> (B, H, T, m).
    """
    bsz, heads, length, _ = x.size()
    # of a layer's input a view, not a copy to keep
    rows = x.permute(1, 2, 0, 3).reshape(heads, length * bsz, x.size(3))
    out = torch.baddbmm(bias.unsqueeze(1), rows, weight.transpose(1, 2))
    if relu:
        out = out.relu_()  # before the view: of a view in place, autograd copies the gradient twice more
    return out.view(heads, length, bsz, weight.size(1)).permute(2, 0, 1, 3)


def glorot_uniform_(weight: Tensor) -> None:
    """Glorot-uniform for each head's matrix of a (H, m, n) tensor: U(-s, s) with s = sqrt(6 / (m + n))."""
    bound = math.sqrt(6.0 / (weight.size(1) + weight.size(2)))
    nn.init.uniform_(weight, -bound, bound)
