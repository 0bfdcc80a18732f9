"""The pictures of one model or of several, from the results of `analysis.analyse` alone."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..drawing import Picture, model_color
from ..results import Results
from . import curves, matrices
from .heads import HEAD_METRICS, heads
from .histograms import histograms
from .models import GROUPS, Model, by_group, shared_attentions

__all__ = ["GROUPS", "by_group", "pictures", "titled_pictures"]

LONGEST_TITLE = 90  # letters


def titled_pictures(results: Mapping[str, Results]) -> Iterator[Picture]:
    """Yields the pictures of models, with titles and file names.

    Each picture shows all models if they have the same layers and numbers of heads. Otherwise each model has pictures
    of its own.

    Args:
        results: {name of a model: the results of its inspection}.
    """
    if have_same_heads(list(results.values())):
        for picture in pictures(results):
            yield add_title(picture, file_prefix="", models=", ".join(results))
    else:
        for model, model_results in results.items():
            for picture in pictures({model: model_results}):
                yield add_title(picture, file_prefix=f"{model}-", models=model)


def have_same_heads(results_of_models: Sequence[Results]) -> bool:
    """Returns whether models have the same attentions, with the same numbers of heads."""
    num_heads_of_models = []
    for results in results_of_models:
        num_heads = {name: attention["heads"] for name, attention in results["attentions"].items()}
        num_heads_of_models.append(num_heads)
    return all(num_heads == num_heads_of_models[0] for num_heads in num_heads_of_models)


def add_title(picture: Picture, file_prefix: str, models: str) -> Picture:
    """Returns a picture with a title that names its models, and with the name of a PNG file as its name."""
    subject = picture.name.replace("-", " ")
    title = textwrap.shorten(f"{models}: {subject}", LONGEST_TITLE, placeholder=" …")
    return picture._replace(name=f"{file_prefix}{picture.name}.png", title=title)


def save(results: Mapping[str, Results], folder: Path) -> None:
    """Writes the pictures of models into a folder. Needs matplotlib.

    Args:
        results: {name of a model: the results of its inspection}.
        folder: an existing folder.
    """
    for picture in titled_pictures(results):
        picture.save(folder)


def pictures(results: Mapping[str, Results], baseline: str = "") -> Iterator[Picture]:
    """Yields the pictures for which every model has results. Each picture shows all models.

    Args:
        results: {name of a model: the results of its inspection}. The models have the same layers and heads.
        baseline: the model that is drawn black.
    """
    models = []
    for name, model_results in results.items():
        color = model_color(name, list(results), baseline)
        models.append(Model(name, color, model_results))
    yield from matrix_pictures(models)
    yield from head_pictures(models)
    for key, draw in DRAW_BY_KEY.items():
        if all(key in model.results for model in models):
            yield draw(models)


DRAW_BY_KEY = {  # {key of the results of a model: the function that draws these results}
    "layers": curves.rank,
    "removal": curves.removal,
    "words": curves.without_words,
    "lengths": curves.lengths,
}


def matrix_pictures(models: list[Model]) -> Iterator[Picture]:
    """Yields the histograms, the mean attention weights by position, and the weights for single sentences."""
    for kind in ("parameters", "logits", "weights"):
        names = attentions_with_histogram(models, kind)
        if names:
            yield histograms(models, names, kind)
    names = shared_attentions(models, "pattern")
    if names:
        yield matrices.patterns(models, names)
    yield from matrices.sentences(models)


def attentions_with_histogram(models: list[Model], kind: str) -> list[str]:
    """Returns the names of the attentions for which every model has a histogram.

    Args:
        models: with the same layers.
        kind: what the values of the histogram are: ``parameters``, ``logits`` or ``weights``.
    """
    names = []
    for name in shared_attentions(models, "histograms"):
        if all(kind in model.attentions[name]["histograms"] for model in models):
            names.append(name)
    return names


def head_pictures(models: list[Model]) -> Iterator[Picture]:
    """Yields the metrics of every head, the weights alpha of mixtures, and the singular values."""
    names_by_metric = {}  # {metric: the attentions that have it in every model}
    for metric in HEAD_METRICS:
        names_with_metric = shared_attentions(models, metric)
        if names_with_metric:
            names_by_metric[metric] = names_with_metric
    if names_by_metric:
        yield heads(models, names_by_metric)
    if any(has_mixtures(model) for model in models):
        yield curves.alpha(models)
    names_with_singular_values = shared_attentions(models, "singular_values")
    if names_with_singular_values:
        yield curves.singular_values(models, names_with_singular_values)


def has_mixtures(model: Model) -> bool:
    """Returns whether an attention of a model has learned weights alpha."""
    return any(attention["alpha"] for attention in model.attentions.values())
