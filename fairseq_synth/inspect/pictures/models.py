"""The models that a picture shows, and how panels are put in rows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..drawing import Panel
from ..subject import Figures

GROUPS = {
    "encoder.self": "encoder self-attention",
    "decoder.self": "decoder self-attention",
    "decoder.cross": "cross-attention",
}
KINDS = {"loss": "loss (bits)", "bleu": "BLEU"}

Row = list[Panel | None]


class Model(NamedTuple):
    """What is drawn of a model."""

    name: str
    color: str
    figures: Figures

    @property
    def attentions(self) -> Figures:
        """The figures of its attentions, by their names."""
        attentions: Figures = self.figures["attentions"]
        return attentions


def by_group(attentions: Figures) -> dict[str, list[Figures]]:
    """Returns {group: the figures of its attentions, layer by layer}."""
    groups: dict[str, list[Figures]] = {}
    for figures in attentions.values():
        groups.setdefault(figures["group"], []).append(figures)
    return groups


def names_by_group(attentions: Figures, names: Iterable[str]) -> dict[str, list[str]]:
    """Returns {group: the names of those attentions that belong to it}."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(attentions[name]["group"], []).append(name)
    return groups


def flatten_rows(rows: Sequence[Sequence[Panel | None]]) -> Row:
    """Returns the panels of rows of several lengths as a grid, with empty places at the end of shorter rows."""
    columns = max(len(row) for row in rows)
    panels: Row = []
    for row in rows:
        panels += row
        panels += [None] * (columns - len(row))
    return panels


def in_lines(panels: Sequence[Panel | None], columns: int) -> list[Row]:
    """Returns panels in lines of so many columns."""
    return [list(panels[i : i + columns]) for i in range(0, len(panels), columns)]


def shared_figures(models: Sequence[Model], figure: str) -> list[str]:
    """Returns the attentions that have a figure in every model."""
    names = []
    for name in models[0].attentions:
        if all(figure in model.attentions[name] for model in models):
            names.append(name)
    return names


def loss_label(models: Sequence[Model]) -> str:
    """Returns a label for an axis of the loss, with its subset and its unit."""
    figures = models[0].figures
    subset = figures["data"]["subset"]
    name = "validation loss" if subset == "valid" else f"loss on {subset}"
    has_decoder = any(name.startswith("decoder.") for name in models[0].attentions)
    return f"{name} (bits per token)" if has_decoder else f"{name} (bits)"


def group_titles(groups: Iterable[str]) -> Mapping[str, str]:
    """Returns {group: its title}, in the order of `GROUPS`."""
    present = set(groups)
    return {group: title for group, title in GROUPS.items() if group in present}
