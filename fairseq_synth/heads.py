"""The heads of a layer, which may be of different kinds: what the flags say of them, and what computes their logits."""

from collections.abc import Sequence

import torch.nn as nn
from torch import Tensor

from .errors import SynthesizerError
from .logits import Logits
from .positions import Inputs
from .synthesizers import SYNTHESIZERS, LayerSynthesizer, Mixture, in_order

HeadGroup = tuple[int, tuple[str, ...]]  # a number of heads, and the functions that each of them mixes


def parse_heads(spec: str, num_heads: int, flag: str = "--encoder-synthesizer") -> tuple[HeadGroup, ...]:
    """``"random:6/dense+vanilla:2"`` -> ``((6, ("random",)), (2, ("dense", "vanilla")))``: the functions of 8 heads.

    Without ``/`` all heads are alike; without numbers the groups are equally large. Raises SynthesizerError as
    `parse_spec` does, and for numbers that do not add up to `num_heads`.
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


def parse_spec(spec: str, flag: str = "--encoder-synthesizer") -> tuple[str, ...]:
    """``"vanilla+random"`` -> ``("random", "vanilla")``: the functions joined by ``+``, in the order of their weights.

    Raises SynthesizerError for an unknown, missing or repeated name; the message lists the valid ones.
    """
    names = [name.strip() for name in spec.split("+")]
    for name in names:
        if name not in SYNTHESIZERS:
            raise SynthesizerError(
                f"{flag} {spec!r}: unknown function {name!r}; choose from {', '.join(SYNTHESIZERS)}, "
                "or several of them joined by '+', as in random+vanilla"
            )
        if names.count(name) > 1:
            raise SynthesizerError(f"{flag} {spec!r}: {name!r} appears twice; name each function once")
    return in_order(names)


class HeadGroups(LayerSynthesizer):
    """Heads of different kinds in one layer: each group of neighbouring heads has a `Mixture` of its own."""

    def __init__(self, mixtures: Sequence[Mixture]) -> None:
        super().__init__()
        self.groups = nn.ModuleList(mixtures)

    def mixtures(self) -> list[Mixture]:
        return list(self.groups)  # type: ignore[arg-type]

    def forward(self, inputs: Inputs) -> list[Logits]:
        found: list[Logits] = []
        first, first_key = 0, 0
        for group in self.groups:
            heads = group.num_heads  # a ModuleList forgets the type of its modules
            q, k = inputs.q, inputs.k
            group_q: Tensor | None = None
            group_k: Tensor | None = None
            if group.reads_query_key and q is not None and k is not None:
                group_q = q.narrow(1, first_key, heads)  # type: ignore[call-overload]
                group_k = k.narrow(1, first_key, heads)  # type: ignore[call-overload]
                first_key += heads  # type: ignore
            dim = group.head_dim
            x = inputs.x.narrow(2, first * dim, heads * dim)  # type: ignore
            found += group(Inputs(x, group_q, group_k, inputs.start, inputs.src_len))
            first += heads  # type: ignore
        return found


def build_synthesizer(
    groups: Sequence[HeadGroup], mixture: str, head_dim: int, max_length: int, rank: int, beyond_length: str = "refuse"
) -> LayerSynthesizer:
    """What computes the logits of a layer: of `groups`, as `parse_heads` returns them; all else is as in `Mixture`."""
    mixtures = [Mixture(names, mixture, heads, head_dim, max_length, rank, beyond_length) for heads, names in groups]
    return mixtures[0] if len(groups) == 1 else HeadGroups(mixtures)
