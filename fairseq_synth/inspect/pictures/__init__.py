"""The pictures of one model or of several, from the figures of `analysis.analyse` alone."""

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..drawing import Picture, color
from ..subject import Figures
from . import curves, matrices
from .heads import HEAD_FIGURES, heads
from .histograms import histograms
from .models import GROUPS, Model, by_group, shared_figures

__all__ = ["GROUPS", "by_group", "pictures", "titled_pictures"]

LONGEST_TITLE = 90  # letters


def titled_pictures(figures: Mapping[str, Figures]) -> Iterator[Picture]:
    """Yields the pictures of models with file names and titles: each shows all models, if they can be compared.

    If layers or heads differ, each model has pictures of its own.

    Args:
        figures: {model: its figures}.
    """
    shapes = []
    for model_figures in figures.values():
        shapes.append({name: attention["heads"] for name, attention in model_figures["attentions"].items()})
    if all(shape == shapes[0] for shape in shapes):
        for picture in pictures(figures):
            yield name_picture(picture, prefix="", models=", ".join(figures))
        return
    for model, model_figures in figures.items():
        for picture in pictures({model: model_figures}):
            yield name_picture(picture, prefix=f"{model}-", models=model)


def name_picture(picture: Picture, prefix: str, models: str) -> Picture:
    """Returns a picture with a title, and the name of its file."""
    title = textwrap.shorten(f"{models}: {picture.name.replace('-', ' ')}", LONGEST_TITLE, placeholder=" …")
    return picture._replace(name=f"{prefix}{picture.name}.png", title=title)


def save(figures: Mapping[str, Figures], folder: Path) -> None:
    """Writes the pictures of models, {model: its figures}, into a folder. Needs matplotlib."""
    for picture in titled_pictures(figures):
        picture.save(folder)


def pictures(figures: Mapping[str, Figures], baseline: str = "") -> Iterator[Picture]:
    """Yields the pictures that there are figures for.

    Args:
        figures: {model: its figures}, of models with the same layers and heads.
        baseline: the model that is drawn black.
    """
    models = []
    for name, model_figures in figures.items():
        models.append(Model(name, color(name, list(figures), baseline), model_figures))
    yield from matrix_pictures(models)
    head_figures = {}
    for figure in HEAD_FIGURES:
        names = shared_figures(models, figure)
        if names:
            head_figures[figure] = names
    if head_figures:
        yield heads(models, head_figures)
    if any(attention["alpha"] for model in models for attention in model.attentions.values()):
        yield curves.alpha(models)
    names = shared_figures(models, "singular_values")
    if names:
        yield curves.singular_values(models, names)
    for key, draw in CURVES.items():
        if all(key in model.figures for model in models):
            yield draw(models)


CURVES = {
    "layers": curves.rank,
    "removal": curves.removal,
    "words": curves.without_words,
    "lengths": curves.lengths,
}


def matrix_pictures(models: list[Model]) -> Iterator[Picture]:
    """Yields histograms, patterns by position, and patterns of single sentences."""
    with_histograms = shared_figures(models, "histograms")
    for kind in ("parameters", "logits", "weights"):
        names = []
        for name in with_histograms:
            if all(kind in model.attentions[name]["histograms"] for model in models):
                names.append(name)
        if names:
            yield histograms(models, names, kind)
    names = shared_figures(models, "pattern")
    if names:
        yield matrices.patterns(models, names)
    yield from matrices.sentences(models)
