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
    """Returns the groups of heads that a flag such as ``--encoder-synthesizer`` describes for a layer.

    For example, ``"random:6/dense+vanilla:2"`` describes two groups: 6 heads of ``random``, and 2 heads that mix
    ``dense`` and ``vanilla``. Without ``/`` there is one group. Without numbers all groups have the same size.

    Args:
        spec: The value of the flag, for one layer.
        num_heads: Number of attention heads of the layer.
        flag: Name of the flag, for error messages.

    Raises:
        SynthesizerError: A function is unknown or named twice, or the numbers do not add up to `num_heads`.
    """
    functions_of_groups = []  # [("random",), ("dense", "vanilla")]
    size_texts = []  # ["6", "2"]; an empty text for a group without a number
    for group_text in spec.split("/"):
        functions_text, _, size_text = group_text.partition(":")
        functions_of_groups.append(parse_spec(functions_text, flag))
        size_texts.append(size_text.strip())
    source = f"{flag} {spec!r}"
    if ":" in spec:
        sizes = parse_sizes(size_texts, num_heads, source)
    else:
        sizes = share_heads(len(functions_of_groups), num_heads, source)
    return tuple(HeadGroup(size, functions) for size, functions in zip(sizes, functions_of_groups))


def share_heads(num_groups: int, num_heads: int, source: str) -> list[int]:
    """Returns the number of heads in each group, which is the same for all groups.

    Args:
        num_groups: Number of groups of a layer.
        num_heads: Number of attention heads of the layer.
        source: The flag that names the groups, with its value, for error messages.

    Raises:
        SynthesizerError: The heads cannot be shared out equally.
    """
    if num_heads % num_groups:
        raise SynthesizerError(
            f"{source}: {num_heads} heads cannot be divided equally among {num_groups} groups; give "
            "their numbers, as in random:6/vanilla:2"
        )
    return [num_heads // num_groups] * num_groups


def parse_sizes(sizes: list[str], num_heads: int, source: str) -> list[int]:
    """Returns the number of heads in each group, which a flag gives as texts.

    Args:
        sizes: The text after the colon for each group, or an empty text where there is no colon.
        num_heads: Number of attention heads of the layer.
        source: The flag with its value, for error messages.

    Raises:
        SynthesizerError: A group has no number above 0, or the numbers do not add up to `num_heads`.
    """
    are_numbers = all(size.isdecimal() and int(size) > 0 for size in sizes)
    if not are_numbers:
        raise SynthesizerError(f"{source}: give every group its number of heads, as in random:6/vanilla:2")
    numbers = [int(size) for size in sizes]
    if sum(numbers) != num_heads:
        raise SynthesizerError(
            f"{source}: {' + '.join(sizes)} heads do not add up to the {num_heads} attention heads of the layer"
        )
    return numbers


def parse_spec(spec: str, flag: str = "--encoder-synthesizer") -> tuple[str, ...]:
    """Returns the functions that a text joins by ``+``, in the order of `sort_functions`.

    For example, ``"vanilla+random"`` is ``("random", "vanilla")``.

    Args:
        spec: The names of functions, joined by ``+``.
        flag: Name of the flag that has this text, for error messages.

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
        """Returns the logits of each group of heads, which sees only its own heads of the inputs."""
        logits_of_groups = []
        # The next group begins at this feature of the layer's input, which has d_h features for each head.
        first_feature = 0
        # The next group begins at this head of the queries and keys, which only the heads of some groups have.
        first_query_head = 0
        for mixture in self.mixtures():
            [group_logits] = mixture(select_heads(inputs, mixture, first_feature, first_query_head))
            logits_of_groups.append(group_logits)
            first_feature += mixture.num_heads * mixture.head_dim
            if mixture.reads_query_key:
                first_query_head += mixture.num_heads
        return logits_of_groups


def select_heads(inputs: Inputs, mixture: Mixture, first_feature: int, first_query_head: int) -> Inputs:
    """Returns the part of a layer's inputs that a group of neighbouring heads sees, as views.

    Args:
        inputs: The inputs of the layer.
        mixture: The functions of the group.
        first_feature: Where the group's features begin in the layer's input, (T, B, H d_h).
        first_query_head: Where the group's heads begin in the queries and keys, (B, heads with queries, T or S, d_h).
            Groups that read no queries have no heads there.
    """
    # Each head of the group has d_h of the neighbouring features.
    num_features = mixture.num_heads * mixture.head_dim
    x = inputs.x.narrow(dim=2, start=first_feature, length=num_features)
    q = None
    k = None
    if mixture.reads_query_key:
        assert inputs.q is not None and inputs.k is not None
        q = inputs.q.narrow(dim=1, start=first_query_head, length=mixture.num_heads)
        k = inputs.k.narrow(dim=1, start=first_query_head, length=mixture.num_heads)
    # All heads have the same rows and columns.
    return Inputs(x, q, k, start=inputs.start, src_len=inputs.src_len)


def build_synthesizer(
    groups: Sequence[HeadGroup], mixture: str, head_dim: int, max_length: int, rank: int, beyond_length: str = "refuse"
) -> LayerSynthesizer:
    """Returns the module that computes the logits of a layer.

    Args:
        groups: The heads of the layer and their functions, as `parse_heads` returns them.
        mixture: ``convex`` or ``sum``, how a head that has several functions adds their logits; see `Mixture`.
        head_dim: Width of a head.
        max_length: The longest sentence that the functions are built for.
        rank: Rank of ``factorized_random``.
        beyond_length: ``refuse`` longer sentences, or ``tile`` the parameters.
    """
    mixtures = []
    for group in groups:
        mixtures.append(
            Mixture(
                group.functions,
                mixture=mixture,
                num_heads=group.num_heads,
                head_dim=head_dim,
                max_length=max_length,
                rank=rank,
                beyond_length=beyond_length,
            )
        )
    if len(mixtures) == 1:
        return mixtures[0]
    return HeadGroups(mixtures)
