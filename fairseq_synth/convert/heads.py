"""Replaces heads in the state dict of a model.

A layer may then have heads of several kinds, which are groups of neighbouring heads with a mixture each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint_compatibility import select_prefix
from ..inspect.attentions import Attention, HeadGroup, is_synthetic
from ..synthesizers import SYNTHESIZERS


class OldHead(NamedTuple):
    """A head of the old attention. All indices count from 0."""

    index_in_attention: int
    group_index: int  # the index of its group of heads
    index_in_group: int
    is_replaced: bool  # whether it gets the new function
    # Only heads that read queries and keys have a part of q_proj and k_proj. This is the index of the head among them;
    # None if it does not read them.
    query_index: int | None


class NewGroup(NamedTuple):
    """Neighbouring heads of the new attention that have the same functions."""

    functions: tuple[str, ...]
    heads: list[OldHead]
    is_replaced: bool  # whether the heads get the new function; otherwise they all come from one old group

    @property
    def old_group_index(self) -> int:
        """The index of the old group from which the heads come if they are not replaced."""
        return self.heads[0].group_index

    @property
    def num_heads(self) -> int:
        """The number of its heads."""
        return len(self.heads)


class NewAttention(NamedTuple):
    """An attention after some of its heads got another function.

    Attributes:
        state: its state dict.
        layer_spec: the value of ``--encoder-synthesizer`` for a layer with this attention.
    """

    state: dict[str, Tensor]
    layer_spec: str


def replace_heads(
    old_state: dict[str, Tensor],
    attention: Attention,
    replaced: set[int],
    function: str,
    parameters: dict[str, Tensor],
) -> NewAttention:
    """Returns an attention in which some heads have another function.

    The heads may get another order, so that heads with the same functions are neighbours. Their parts of all weights
    get this order too, so the output of the attention does not depend on it. The comments show an example: head 2 of a
    Transformer's four heads gets the function ``random``.

    Args:
        old_state: the state dict of the old attention, which is not changed.
        attention: the old attention.
        replaced: the indices of the heads to replace.
        function: their new function.
        parameters: {name: parameter of the new function, for all heads of the attention}. Only the parts of the
            replaced heads are used.
    """
    heads = list_heads(attention, replaced)  # 0, 1, 2, 3; each has the attribute `is_replaced`, which is True for 2
    if not is_synthetic(attention.module):
        # In this order, there are only two groups. In an attention of this plugin, the heads must keep their places,
        # because a function such as ``dense`` reads the slice of the layer's input at the place of its head.
        heads = put_replaced_heads_first(heads)  # 2, 0, 1, 3
    groups = group_heads(attention, heads, function)  # head 2 with ``random``; heads 0, 1 and 3 with ``vanilla``

    # The keys of the functions' parameters begin with "synthesizer.". All others belong to v_proj, out_proj and so on.
    old_projections = {key: value for key, value in old_state.items() if not key.startswith("synthesizer.")}
    new_state = reorder_projections(old_projections, heads, head_dim=attention.module.head_dim)

    old_parameters = select_prefix(old_state, "synthesizer.")  # with keys that lack this prefix
    new_parameters = regroup_parameters(old_parameters, attention, groups, parameters)
    for key, value in new_parameters.items():
        new_state[f"synthesizer.{key}"] = value
    return NewAttention(state=new_state, layer_spec=describe_groups(groups))  # "random:1/vanilla:3"


def reorder_projections(projections: dict[str, Tensor], heads: list[OldHead], head_dim: int) -> dict[str, Tensor]:
    """Returns the state dict of the projections in the new attention, with the parts of the heads in their new order.

    A head that is replaced by the new function loses its part of q_proj and k_proj, if it had one.

    Args:
        projections: the state dict of the projections in the old attention, which is not changed.
        heads: all heads of the attention, in their new order.
        head_dim: the number of features of a head.
    """
    all_heads = [head.index_in_attention for head in heads]
    query_heads = find_kept_query_heads(heads)
    new_projections = {}
    for key, value in projections.items():
        # Heads are the outputs of q_proj, k_proj and v_proj, and the inputs of out_proj.
        if key.startswith(("q_proj.", "k_proj.")):
            if query_heads:  # Without such heads, the new attention has no q_proj and k_proj.
                new_projections[key] = select_output_heads(value, query_heads, head_dim)
        elif key.startswith("v_proj."):
            new_projections[key] = select_output_heads(value, all_heads, head_dim)
        elif key == "out_proj.weight":
            new_projections[key] = select_input_heads(value, all_heads, head_dim)
        else:
            new_projections[key] = value  # The bias of out_proj has no parts of heads.
    return new_projections


def put_replaced_heads_first(heads: list[OldHead]) -> list[OldHead]:
    """Returns the heads that are replaced, and after them the heads that are kept."""
    replaced_heads = [head for head in heads if head.is_replaced]
    kept_heads = [head for head in heads if not head.is_replaced]
    return replaced_heads + kept_heads


def list_heads(attention: Attention, replaced: set[int]) -> list[OldHead]:
    """Returns the heads of an attention in the order that they have there.

    For example, an attention ``random:1/vanilla:2`` has two groups of heads with the same functions. Only heads with
    ``vanilla`` read queries, and have a part in q_proj and k_proj:

        index_in_attention    0     1  2
        group_index           0     1  1
        index_in_group        0     0  1
        query_index           None  0  1     (the place in q_proj and k_proj)

    Args:
        attention: the old attention.
        replaced: the indices in the attention of the heads that get the new function.
    """
    heads: list[OldHead] = []
    index_in_attention = 0
    next_query_index = 0  # The next head that reads queries gets this index.
    for group_index, group in enumerate(attention.head_groups()):
        reads_query_key = any(SYNTHESIZERS[name].reads_query_key for name in group.functions)
        for index_in_group in range(group.num_heads):
            query_index = None
            if reads_query_key:
                query_index = next_query_index
                next_query_index += 1
            head = OldHead(
                index_in_attention=index_in_attention,
                group_index=group_index,
                index_in_group=index_in_group,
                is_replaced=index_in_attention in replaced,
                query_index=query_index,
            )
            heads.append(head)
            index_in_attention += 1
    return heads


def group_heads(attention: Attention, heads: list[OldHead], new_function: str) -> list[NewGroup]:
    """Returns the groups of heads in the new attention. Each group consists of neighbouring heads.

    The heads of a group either are all replaced, or all come from the same old group (`belong_together`).

    Args:
        attention: the old attention.
        heads: its heads in their new order.
        new_function: the function of the replaced heads.
    """
    old_groups = attention.head_groups()
    new_groups: list[NewGroup] = []
    for head in heads:
        joins_last_group = bool(new_groups) and belong_together(new_groups[-1].heads[-1], head)
        if joins_last_group:
            new_groups[-1].heads.append(head)
        else:
            functions = (new_function,) if head.is_replaced else old_groups[head.group_index].functions
            new_groups.append(NewGroup(functions=functions, heads=[head], is_replaced=head.is_replaced))
    return new_groups


def belong_together(first: OldHead, second: OldHead) -> bool:
    """Returns whether two neighbouring heads are in one group: both are replaced, or both kept from one old group."""
    if first.is_replaced or second.is_replaced:
        return first.is_replaced and second.is_replaced
    return first.group_index == second.group_index


def regroup_parameters(
    old_parameters: dict[str, Tensor],
    attention: Attention,
    groups: list[NewGroup],
    parameters_of_new_function: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Returns the parameters of the functions in the new attention, as a state dict.

    The replaced heads get the parameters of the new function, and all other heads keep theirs.

    Args:
        old_parameters: the state dict of the functions in the old attention.
        attention: the old attention.
        groups: the groups of heads in the new attention.
        parameters_of_new_function: {name: parameter of the new function, for all heads of the attention}.
    """
    # A state dict for each group of heads, with keys such as ``components.random.R``.
    states_of_old_groups = split_groups(old_parameters, num_groups=len(attention.head_groups()))
    states_of_new_groups = []
    for group in groups:
        if group.is_replaced:
            new_state = select_new_parameters(group, parameters_of_new_function)
        else:
            new_state = select_kept_parameters(group, states_of_old_groups[group.old_group_index])
        states_of_new_groups.append(new_state)
    return join_groups(states_of_new_groups)


def split_groups(functions: dict[str, Tensor], num_groups: int) -> list[dict[str, Tensor]]:
    """Returns a state dict for each group of heads, with keys such as ``components.random.R``.

    Args:
        functions: the state dict of all functions of an attention. If there are several groups, its keys name the group
            of heads too: ``groups.0.components.random.R``.
        num_groups: the number of groups in the attention.
    """
    if num_groups == 1:
        return [functions]
    return [select_prefix(functions, f"groups.{index}.") for index in range(num_groups)]


def join_groups(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the state dict of all functions of an attention, from those of its groups; undoes `split_groups`."""
    if len(states) == 1:
        return states[0]
    functions = {}
    for index, state in enumerate(states):
        for key, value in state.items():
            functions[f"groups.{index}.{key}"] = value
    return functions


def select_new_parameters(group: NewGroup, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state dict of a group of heads that all get the new function.

    Args:
        group: the group.
        parameters: {name: parameter of the new function, for all heads of the attention}.
    """
    heads = [head.index_in_attention for head in group.heads]
    [function] = group.functions
    return {f"components.{function}.{name}": value[heads] for name, value in parameters.items()}


def select_kept_parameters(group: NewGroup, old_group_state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state dict of a group of heads that keep their functions.

    Args:
        group: the group.
        old_group_state: the state dict of the old group from which all these heads come.
    """
    heads = [head.index_in_group for head in group.heads]
    return {key: choose_heads(key, value, heads) for key, value in old_group_state.items()}


def choose_heads(key: str, value: Tensor, heads: list[int]) -> Tensor:
    """Returns the parts of a parameter or buffer that belong to some heads of a group.

    Args:
        key: the key of the parameter in the state dict of the group.
        value: the parameter, usually of shape (heads of the group, ...).
        heads: the indices of the heads in the group.
    """
    # The buffer `factors` of factorized_dense has the shape (a, b, 0). It only records the sizes a and b, which are the
    # same for all heads.
    only_records_sizes = value.numel() == 0
    if only_records_sizes:
        return value
    if key == "alpha":  # the weights of the functions that the group mixes, of shape (functions, heads)
        return value[:, heads]
    return value[heads]


def find_kept_query_heads(heads: list[OldHead]) -> list[int]:
    """Returns the places in the old q_proj and k_proj of the heads that keep their part of these projections.

    These are the heads that read queries and keys and are not replaced. For example, the heads have the places None, 0
    and 1, because the first one reads no queries. If the last one is replaced, the result is [0].

    Args:
        heads: all heads of the attention, in their new order, which is also that of the result.
    """
    places = []
    for head in heads:
        if head.query_index is not None and not head.is_replaced:
            places.append(head.query_index)
    return places


def select_output_heads(parameter: Tensor, heads: list[int], head_dim: int) -> Tensor:
    """Returns a projection with the output features of only some heads, in the order of `heads`.

    For example, with 2 features for each head, the heads [2, 0] have the output features 4, 5, 0 and 1.

    Args:
        parameter: the weight (output features, input features) or the bias (output features,) of the projection.
        heads: the heads to select.
        head_dim: the number of features of a head.
    """
    by_head = parameter.unflatten(0, (-1, head_dim))  # (all heads, head_dim, ...)
    selected = by_head[torch.tensor(heads)]  # (selected heads, head_dim, ...)
    return selected.flatten(0, 1)


def select_input_heads(weight: Tensor, heads: list[int], head_dim: int) -> Tensor:
    """Returns a projection with the input features of only some heads, in the order of `heads`.

    For example, with 2 features for each head, the heads [2, 0] have the input features 4, 5, 0 and 1.

    Args:
        weight: the weight of the projection, (output features, input features).
        heads: the heads to select.
        head_dim: the number of features of a head.
    """
    by_head = weight.unflatten(1, (-1, head_dim))  # (output features, all heads, head_dim)
    selected = by_head[:, torch.tensor(heads)]  # (output features, selected heads, head_dim)
    return selected.flatten(1, 2)


def describe_groups(groups: Sequence[HeadGroup | NewGroup]) -> str:
    """Returns the value of ``--encoder-synthesizer`` for a layer with these groups of heads.

    For example, it is "random:6/dense+vanilla:2" for two groups, and "dense+vanilla" for a single one.
    """
    functions_of_groups = ["+".join(group.functions) for group in groups]
    if len(groups) == 1:
        return functions_of_groups[0]
    return "/".join(f"{functions}:{group.num_heads}" for functions, group in zip(functions_of_groups, groups))
