"""The heads of a layer: what a flag says about them, and how their logits are computed if they are of several kinds."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch.nn as nn

from .errors import SynthesizerError
from .logits import Logits
from .positions import Inputs
from .synthesizers import SYNTHESIZERS, LayerSynthesizer, Mixture, sort_functions


class HeadGroup(NamedTuple):
    """Neighbouring heads of one kind."""

    num_heads: int
    functions: tuple[str, ...]  # the functions that each of these heads mixes


def parse_heads(spec: str, num_heads: int, flag: str = "--encoder-synthesizer") -> tuple[HeadGroup, ...]:
    """Returns the groups of heads that the value of a flag describes.

    For example, ``"random:6/dense+vanilla:2"`` has 6 heads of ``random`` and 2 heads that mix ``dense`` and
    ``vanilla``. Without ``/`` there is one group. Without numbers all groups have the same size.

    Args:
        spec: The value of the flag, for one layer.
        num_heads: Number of attention heads of the layer.
        flag: Name of the flag, for error messages.

    Raises:
        SynthesizerError: A function is unknown or named twice, or the numbers do not add up to `num_heads`.
    """
    names = []
    sizes = []
    for part in spec.split("/"):
        group_names, _, size = part.partition(":")
        names.append(parse_spec(group_names, flag))
        sizes.append(size.strip())
    if ":" not in spec:
        if num_heads % len(names):
            raise SynthesizerError(
                f"{flag} {spec!r}: {num_heads} heads cannot be shared out equally among {len(names)} groups; give "
                "their numbers, as in random:6/vanilla:2"
            )
        sizes = [str(num_heads // len(names))] * len(names)
    are_numbers = all(size.isdecimal() and int(size) > 0 for size in sizes)
    if not are_numbers:
        raise SynthesizerError(f"{flag} {spec!r}: give every group its number of heads, as in random:6/vanilla:2")
    if sum(int(size) for size in sizes) != num_heads:
        raise SynthesizerError(
            f"{flag} {spec!r}: {' + '.join(sizes)} heads are not the {num_heads} attention heads of the layer"
        )
    return tuple(HeadGroup(int(size), functions) for size, functions in zip(sizes, names))


def parse_spec(spec: str, flag: str = "--encoder-synthesizer") -> tuple[str, ...]:
    """Returns the functions that are joined by ``+``, in the order of `sort_functions`.

    For example, ``"vanilla+random"`` is ``("random", "vanilla")``.

    Raises:
        SynthesizerError: A name is unknown, missing or repeated. The message lists the valid names.
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
    return sort_functions(names)


class HeadGroups(LayerSynthesizer):
    """Heads of different kinds in one layer: each group of neighbouring heads has a `Mixture` of its own."""

    def __init__(self, mixtures: Sequence[Mixture]) -> None:
        super().__init__()
        self.groups = nn.ModuleList(mixtures)

    def mixtures(self) -> list[Mixture]:
        return cast(list[Mixture], list(self.groups))

    def forward(self, inputs: Inputs) -> list[Logits]:
        """Returns the logits of each group, computed from the group's slice of the inputs.

        `inputs` has queries and keys only of the heads that read them, so these heads are counted apart.
        """
        logits_of_groups = []
        first_head = 0
        first_query_head = 0
        for mixture in self.mixtures():
            num_heads = mixture.num_heads
            head_dim = mixture.head_dim
            group_x = inputs.x.narrow(2, first_head * head_dim, num_heads * head_dim)
            group_q = None
            group_k = None
            if mixture.reads_query_key:
                assert inputs.q is not None and inputs.k is not None
                group_q = inputs.q.narrow(1, first_query_head, num_heads)
                group_k = inputs.k.narrow(1, first_query_head, num_heads)
                first_query_head += num_heads
            group_inputs = Inputs(group_x, group_q, group_k, inputs.start, inputs.src_len)
            logits_of_groups += mixture(group_inputs)
            first_head += num_heads
        return logits_of_groups


def build_synthesizer(
    groups: Sequence[HeadGroup], mixture: str, head_dim: int, max_length: int, rank: int, beyond_length: str = "refuse"
) -> LayerSynthesizer:
    """Returns the module that computes the logits of a layer.

    Args:
        groups: The heads of the layer, as `parse_heads` returns them.
        mixture, head_dim, max_length, rank, beyond_length: As in `Mixture`.
    """
    mixtures = [
        Mixture(group.functions, mixture, group.num_heads, head_dim, max_length, rank, beyond_length)
        for group in groups
    ]
    if len(mixtures) == 1:
        return mixtures[0]
    return HeadGroups(mixtures)
