"""Measures the rank of the layers: how alike the tokens become, with and without some branches of the layers."""

import statistics
from typing import NamedTuple

import torch
import torch.nn as nn

from ..checkpoints import Batch
from ..hooks import LayerOutput, layer_outputs
from ..inspection import Inspection, Results, round_floats
from ..measure import RankDistances, rank_one_distances
from ..passes import count_tokens, padding_index, progress

SENTENCES = 64  # how many are read at least, if there are as many


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


class LayerDistances(NamedTuple):
    """How far the tokens of one sentence are from being alike after one layer."""

    stack: str  # encoder or decoder
    layer: int
    distances: RankDistances


def describe_cost(inspection: Inspection) -> str:
    """Returns how much `measure` computes for a model, as a text for the user."""
    num_models = 1 if inspection.initial_model is None else 2
    num_passes = len(BRANCHES) * num_models
    num_sentences = min(SENTENCES, len(inspection.sentence_indices))
    return f"{num_passes} passes over about {num_sentences} sentences"


def measure(inspection: Inspection) -> None:
    """Measures how alike the tokens are after each layer, and adds this to the inspection as ``layers``.

    It is measured for the trained model and, if it is known, for the model before its training.
    """
    pad = padding_index(inspection.loaded)
    batches = choose_batches(inspection.batches)
    results = {"trained": measure_model(inspection.loaded.model, batches, pad, "rank of layers, trained")}
    if inspection.initial_model is not None:
        results["initial"] = measure_model(inspection.initial_model, batches, pad, "rank of layers, initial")
    inspection.results["layers"] = results


def choose_batches(batches: list[Batch]) -> list[Batch]:
    """Returns batches with at least `SENTENCES` sentences together, or all batches if there are fewer sentences.

    The batches are sorted by the length of their sentences. Sentences of medium length are chosen first.
    """
    middle = len(batches) // 2
    medium_length_first = batches[middle:] + batches[:middle]
    chosen = []
    num_sentences = 0
    for batch in medium_length_first:
        if num_sentences >= SENTENCES:
            break
        chosen.append(batch)
        num_sentences += len(batch["id"])
    return chosen


def measure_model(model: nn.Module, batches: list[Batch], pad: int, title: str) -> Results:
    """Measures how much the tokens differ after each layer, with and without feed-forward layers and skip connections.

    Args:
        model: a Transformer of fairseq.
        batches: the data.
        pad: the index of padding.
        title: the text beside the progress bar.

    Returns:
        {stack: {branches in use, a key of `BRANCHES`: the mean distances over the sentences}}. The lists have a
        distance for each layer. For example::

            {"encoder": {"attention alone": {"equal_rows": [0.9, 0.8], "rank_one": [0.7, 0.6]}, ...}, ...}
    """
    results: Results = {}
    for branches_name, branches in progress(BRANCHES.items(), title):
        measured: list[LayerDistances] = []  # one for each sentence and layer
        for batch in batches:
            measured += measure_batch(model, batch, pad, branches)
        for stack in ("encoder", "decoder"):
            measured_in_stack = [item for item in measured if item.stack == stack]
            if measured_in_stack:  # The model may lack an encoder or a decoder.
                means = average_by_layer(measured_in_stack)
                results.setdefault(stack, {})[branches_name] = round_floats(means)
    return results


@torch.no_grad()
def measure_batch(model: nn.Module, batch: Batch, pad: int, branches: Branches) -> list[LayerDistances]:
    """Runs a model on a batch, and returns how far the tokens of each sentence are from being alike after each layer.

    Sentences of a single token, which is always like itself, are left out.

    Args:
        model: a Transformer of fairseq.
        batch: its sentences are padded on the right.
        pad: the index of padding.
        branches: the branches of the layers that are in use.

    Returns:
        the distances of all sentences after the first layer, then those after the second layer, and so on.
    """
    outputs: list[LayerOutput] = []
    with layer_outputs(model, outputs.append, keep_skip=branches.skip, keep_feed_forward=branches.feed_forward):
        model(**batch["net_input"])  # each layer appends its output to `outputs`
    measured = []
    for output in outputs:
        for batch_row, length in enumerate(count_tokens(batch, output.stack, pad)):
            if length <= 1:
                continue
            tokens_of_sentence = output.x[:length, batch_row]  # (length, C), without padding
            distances = rank_one_distances(tokens_of_sentence)
            measured.append(LayerDistances(output.stack, output.layer, distances))
    return measured


def average_by_layer(measured: list[LayerDistances]) -> dict[str, list[float]]:
    """Returns the mean distances over the sentences, such as ``{"equal_rows": [0.9, 0.8], "rank_one": [0.7, 0.6]}``.

    Each list has a distance for each layer, from the first.

    Args:
        measured: the distances of all sentences after the layers of one stack, encoder or decoder.
    """
    num_layers = 1 + max(item.layer for item in measured)
    equal_rows = []
    rank_one = []
    for layer in range(num_layers):
        sentences = [item.distances for item in measured if item.layer == layer]
        equal_rows.append(statistics.fmean(sentence.equal_rows for sentence in sentences))
        rank_one.append(statistics.fmean(sentence.rank_one for sentence in sentences))
    return {"equal_rows": equal_rows, "rank_one": rank_one}
