"""Rank of the layers: how alike the tokens become, with and without skip connections and feed-forward layers."""

import statistics
from typing import NamedTuple

import torch
import torch.nn as nn

from ..checkpoints import Batch
from ..hooks import LayerOutput, input_tokens, layer_outputs
from ..measure import rank_one_distances
from ..passes import padding_index, progress
from ..subject import Figures, Subject, rounded

SENTENCES = 64  # at least, if there are as many


class Branches(NamedTuple):
    """Which branches of a layer are in use in addition to its attention."""

    skip: bool  # the skip connections
    feed_forward: bool  # the feed-forward layer


BRANCHES = {
    "as it is": Branches(skip=True, feed_forward=True),
    "without feed-forward": Branches(skip=True, feed_forward=False),
    "without skip": Branches(skip=False, feed_forward=True),
    "attention alone": Branches(skip=False, feed_forward=False),
}


class Distances(NamedTuple):
    """How far the outputs of one layer for one sentence are from being alike; see `measure.rank_one_distances`."""

    equal_rows: float
    rank_one: float


DistancesByLayer = dict[str, dict[int, list[Distances]]]  # {stack: {layer: of each sentence}}


def cost(subject: Subject) -> str:
    """Returns how much `measure` computes."""
    sentences = min(SENTENCES, len(subject.order))
    passes = len(BRANCHES) * (1 if subject.initial is None else 2)
    return f"{passes} passes over about {sentences} sentences"


def measure(subject: Subject) -> None:
    """Adds the distances of each layer's output from equal rows and from rank one, trained and initial."""
    pad = padding_index(subject.loaded)
    sample = choose_batches(subject.sample)
    layers = {"trained": rank_collapse(subject.loaded.model, sample, pad, "rank of layers, trained")}
    if subject.initial is not None:
        layers["initial"] = rank_collapse(subject.initial, sample, pad, "rank of layers, initial")
    subject.figures["layers"] = layers


def choose_batches(sample: list[Batch]) -> list[Batch]:
    """Returns batches with at least `SENTENCES` sentences, beginning with sentences of middle length."""
    middle = len(sample) // 2
    chosen = []
    num_sentences = 0
    for batch in sample[middle:] + sample[:middle]:
        if num_sentences >= SENTENCES:
            break
        chosen.append(batch)
        num_sentences += len(batch["id"])
    return chosen


def rank_collapse(model: nn.Module, sample: list[Batch], pad: int, title: str) -> Figures:
    """Returns how alike the tokens are after each layer, for each choice of branches.

    Returns:
        {stack: {name of the branches: {``equal_rows``, ``rank_one``: a mean over the sentences for each layer}}}.
    """
    result: Figures = {}
    for name, branches in progress(BRANCHES.items(), title):
        distances: DistancesByLayer = {}
        for batch in sample:
            add_distances(model, batch, pad, branches, distances)
        for stack, layers in distances.items():
            equal_rows = []
            rank_one = []
            for layer in sorted(layers):
                equal_rows.append(statistics.fmean(sentence.equal_rows for sentence in layers[layer]))
                rank_one.append(statistics.fmean(sentence.rank_one for sentence in layers[layer]))
            result.setdefault(stack, {})[name] = rounded({"equal_rows": equal_rows, "rank_one": rank_one})
    return result


@torch.no_grad()
def add_distances(model: nn.Module, batch: Batch, pad: int, branches: Branches, distances: DistancesByLayer) -> None:
    """Runs a model with some branches on a batch, and adds the distances of each sentence of two tokens or more."""
    outputs: list[LayerOutput] = []
    with input_tokens(model) as tokens, layer_outputs(model, outputs.append, branches.skip, branches.feed_forward):
        model(**batch["net_input"])
    for output in outputs:
        lengths = tokens[output.stack].ne(pad).sum(dim=1).tolist()
        for index, length in enumerate(lengths):
            if length > 1:
                by_layer = distances.setdefault(output.stack, {})
                sentence = Distances(*rank_one_distances(output.x[:length, index]))
                by_layer.setdefault(output.layer, []).append(sentence)
