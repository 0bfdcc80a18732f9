"""Replaces heads in the state dict of a model.

A layer may then have heads of several kinds, which are groups of neighbouring heads with a mixture each.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint_compatibility import select_prefix
from ..inspect.attentions import Attention, is_synthetic
from ..synthesizers import SYNTHESIZERS


class OldHead(NamedTuple):
    """A head of the old attention."""

    number: int  # in the attention
    group: int  # number of its group
    number_in_group: int
    is_replaced: bool
    reads_query_key: bool


class NewGroup(NamedTuple):
    """Neighbouring heads of the new attention with the same functions."""

    functions: str  # joined by +
    heads: list[OldHead]


def replace_heads(
    state: dict[str, Tensor],
    prefix: str,
    attention: Attention,
    replaced: set[int],
    function: str,
    parameters: dict[str, Tensor],
) -> str:
    """Makes some heads of an attention heads of another function, in a model's state dict.

    Args:
        state: the model's state dict, which is changed in place.
        prefix: of the attention's keys in it, with the dot.
        attention: the old attention.
        replaced: the numbers of the heads to replace.
        function: their new function.
        parameters: the parameters of that function by name, for all heads of the attention.

    Returns:
        the value of ``--encoder-synthesizer`` for such a layer.
    """
    heads = order_heads(attention, replaced)
    groups = group_heads(attention, heads, function)
    replace_synthesizer(state, f"{prefix}synthesizer.", attention, groups, parameters)
    head_dim = attention.module.head_dim
    numbers = [head.number for head in heads]
    permute_projection(state, f"{prefix}v_proj", numbers, head_dim)
    permute_columns(state, f"{prefix}out_proj.weight", numbers, head_dim)
    query_key_rows = find_query_key_rows(heads)
    for name in ("q_proj", "k_proj"):
        if query_key_rows:
            permute_projection(state, f"{prefix}{name}", query_key_rows, head_dim)
        else:
            remove_projection(state, f"{prefix}{name}")
    return describe_groups(groups)


def order_heads(attention: Attention, replaced: set[int]) -> list[OldHead]:
    """Returns the heads of an attention in their new order.

    In fairseq's attention the replaced heads come first, so that there are two groups of heads. Elsewhere the heads
    keep their places, as functions may see a slice of the input.
    """
    heads: list[OldHead] = []
    for number_of_group, group in enumerate(attention.head_groups()):
        reads_query_key = any(SYNTHESIZERS[name].reads_query_key for name in group.functions)
        for i in range(group.num_heads):
            number = len(heads)
            heads.append(OldHead(number, number_of_group, i, number in replaced, reads_query_key))
    if not is_synthetic(attention.module):
        heads.sort(key=lambda head: not head.is_replaced)
    return heads


def group_heads(attention: Attention, heads: list[OldHead], function: str) -> list[NewGroup]:
    """Returns neighbouring heads in groups: those with the new function, or those of one old group."""
    old_groups = attention.head_groups()
    new_groups: list[NewGroup] = []
    for head in heads:
        previous = new_groups[-1].heads[-1] if new_groups else None
        if previous is not None and belong_together(previous, head):
            new_groups[-1].heads.append(head)
            continue
        functions = function if head.is_replaced else "+".join(old_groups[head.group].functions)
        new_groups.append(NewGroup(functions, [head]))
    return new_groups


def belong_together(first: OldHead, second: OldHead) -> bool:
    """Returns whether two neighbouring heads are of one group."""
    if first.is_replaced or second.is_replaced:
        return first.is_replaced and second.is_replaced
    return first.group == second.group


def replace_synthesizer(
    state: dict[str, Tensor],
    prefix: str,
    attention: Attention,
    groups: list[NewGroup],
    parameters: dict[str, Tensor],
) -> None:
    """Replaces the keys ``synthesizer.*`` of an attention by the keys for new groups of heads.

    A new group consists of heads that are all replaced by the new function, or of heads that all come from the same old
    group and keep their parameters.

    Args:
        state: the model's state dict, which is changed in place.
        prefix: of the synthesizer's keys in it.
        attention: the old attention.
        groups: the new groups of heads.
        parameters: of the new function, by name, for all heads of the attention.
    """
    old_state = {key: state.pop(key) for key in list(state) if key.startswith(prefix)}
    num_old_groups = len(attention.head_groups())
    for number, group in enumerate(groups):
        new_prefix = group_prefix(prefix, number, len(groups))
        any_head = group.heads[0]
        if any_head.is_replaced:
            heads_of_attention = [head.number for head in group.heads]
            for name, value in parameters.items():
                state[f"{new_prefix}components.{group.functions}.{name}"] = value[heads_of_attention]
        else:
            old_prefix = group_prefix(prefix, any_head.group, num_old_groups)
            heads_of_old_group = [head.number_in_group for head in group.heads]
            for name, value in select_prefix(old_state, old_prefix).items():
                state[new_prefix + name] = choose_heads(name, value, heads_of_old_group)


def group_prefix(prefix: str, number: int, num_groups: int) -> str:
    """Returns the prefix of the keys of a group of heads; a single group has that of the synthesizer."""
    return f"{prefix}groups.{number}." if num_groups > 1 else prefix


def choose_heads(name: str, value: Tensor, numbers: list[int]) -> Tensor:
    """Returns what some heads have of a parameter or buffer of a group."""
    if value.numel() == 0:  # an empty tensor says a size, whatever the heads are
        return value
    if name == "alpha":  # (M, H)
        return value[:, numbers]
    return value[numbers]


def find_query_key_rows(heads: list[OldHead]) -> list[int]:
    """Returns the places, in the old query and key projections, of the heads that keep queries and keys.

    The projections only have the heads that read queries and keys, in the old order.
    """
    old_order = sorted(head.number for head in heads if head.reads_query_key)
    rows = []
    for head in heads:
        if head.reads_query_key and not head.is_replaced:
            rows.append(old_order.index(head.number))
    return rows


def permute_projection(state: dict[str, Tensor], name: str, numbers: list[int], head_dim: int) -> None:
    """Keeps some heads of a projection, in this order; its outputs are the heads."""
    for key in (f"{name}.weight", f"{name}.bias"):
        if key in state:
            by_head = state[key].unflatten(0, (-1, head_dim))
            state[key] = by_head[torch.tensor(numbers)].flatten(0, 1)


def permute_columns(state: dict[str, Tensor], key: str, numbers: list[int], head_dim: int) -> None:
    """Keeps some heads of a weight whose inputs are the heads, in this order."""
    by_head = state[key].unflatten(1, (-1, head_dim))
    state[key] = by_head[:, torch.tensor(numbers)].flatten(1, 2)


def remove_projection(state: dict[str, Tensor], name: str) -> None:
    """Removes a projection that no head needs any more."""
    state.pop(f"{name}.weight", None)
    state.pop(f"{name}.bias", None)


def describe_groups(groups: list[NewGroup]) -> str:
    """Returns what ``--encoder-synthesizer`` says of a layer with these groups."""
    if len(groups) == 1:
        return groups[0].functions
    return "/".join(f"{group.functions}:{len(group.heads)}" for group in groups)
