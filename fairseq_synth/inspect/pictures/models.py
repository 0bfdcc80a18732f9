"""The models that a picture shows, and their attentions by kind."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..results import Results

GROUPS = {  # kind of attention: its title
    "encoder.self": "encoder self-attention",
    "decoder.self": "decoder self-attention",
    "decoder.cross": "cross-attention",
}


class Model(NamedTuple):
    """A model that a picture shows: its name, the color of its lines and bars, and the results of its inspection."""

    name: str
    color: str
    results: Results

    @property
    def attentions(self) -> dict[str, Results]:
        """The results of each attention, by the attention's name, such as ``encoder.self.0``."""
        attentions: dict[str, Results] = self.results["attentions"]
        return attentions


def by_group(attentions: Mapping[str, Results]) -> dict[str, list[Results]]:
    """Returns the results of attentions by the kind of attention.

    Args:
        attentions: {name of an attention: its results}.

    Returns:
        {kind, such as ``encoder.self``: the results of its attentions, layer by layer}.
    """
    groups: dict[str, list[Results]] = {}
    for results in attentions.values():
        groups.setdefault(results["group"], []).append(results)
    return groups


def names_by_group(attentions: Mapping[str, Results], names: Iterable[str]) -> dict[str, list[str]]:
    """Returns names of attentions by the kind of attention.

    Args:
        attentions: {name of an attention: its results}.
        names: those to return.

    Returns:
        {kind, such as ``encoder.self``: the names of its attentions, layer by layer}.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(attentions[name]["group"], []).append(name)
    return groups


def group_titles(groups: Iterable[str]) -> Mapping[str, str]:
    """Returns {kind of attention: its title} for some kinds, such as ``encoder.self``, in the order of `GROUPS`."""
    chosen = set(groups)
    return {group: title for group, title in GROUPS.items() if group in chosen}


def shared_attentions(models: Sequence[Model], key: str) -> list[str]:
    """Returns the names of the attentions for which every model has a result.

    Args:
        models: with the same layers.
        key: of the result, such as ``entropy``.
    """
    names = []
    for name in models[0].attentions:
        if all(key in model.attentions[name] for model in models):
            names.append(name)
    return names


def loss_label(models: Sequence[Model]) -> str:
    """Returns a label for an axis of the loss, with the split of the data and the unit."""
    subset = models[0].results["data"]["subset"]
    name = "validation loss" if subset == "valid" else f"loss on {subset}"
    has_decoder = any(attention.startswith("decoder.") for attention in models[0].attentions)
    unit = "bits per token" if has_decoder else "bits"
    return f"{name} ({unit})"
