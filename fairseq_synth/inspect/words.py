"""Measures how much of self-attention depends on the words, by replacing it with an average by position.

Self-attention is averaged by position over sentences. The loss is then measured with heads that use this average,
whatever the words are.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import checkpoints
from .attentions import Head
from .checkpoints import Batch, Loaded, readable
from .hooks import replaced_heads
from .measure import sentence_weights
from .passes import SentenceReading, loss, padding_index, progress, read_sentences
from .positional import Constants, MeanByPosition, fit_constants, toeplitz


class Averages(NamedTuple):
    """The self-attention of a model, averaged by position."""

    constants: dict[str, Constants]  # {self-attention: the logits of its heads whose attention is nearest the average}
    length: int  # tokens of the longest sentence
    sentences: int  # number of sentences


class ReplacedHead(NamedTuple):
    """One more head that is replaced, and the loss when it and all heads before it are."""

    head: Head
    loss: float  # bits


class AverageAttention:
    """Averages the weights of each self-attention by position, sentence by sentence."""

    def __init__(self) -> None:
        """Starts without a sentence."""
        self.means: dict[str, MeanByPosition] = {}
        self.is_causal: dict[str, bool] = {}

    def add(self, reading: SentenceReading) -> None:
        """Adds the weights of one attention for one sentence, unless it is a cross-attention."""
        if reading.attention.kind != "self":
            return
        name = reading.attention.name
        if name not in self.means:
            self.means[name] = MeanByPosition()
            self.is_causal[name] = reading.causal
        self.means[name].add(sentence_weights(reading.logits, reading.causal))

    def fit(self) -> dict[str, Constants]:
        """Returns {self-attention: the constant logits whose attention comes nearest to the average}."""
        return {name: fit_constants(mean, self.is_causal[name]) for name, mean in self.means.items()}

    def longest_sentence(self) -> int:
        """Returns the number of tokens of the longest sentence."""
        return max(mean.count.size(-1) for mean in self.means.values())


def choose_evenly(items: Sequence[int], count: int) -> list[int]:
    """Returns `count` of the items, evenly spaced and including the last one.

    For example, three of the items 0, 1, …, 8 are 2, 5 and 8. If there are fewer items than `count`, all are returned.
    """
    if len(items) <= count:
        return list(items)
    chosen = []
    # The items are divided into `count` parts of about the same size. The last item of each part is chosen.
    for part in range(1, count + 1):
        end_of_part = math.ceil(part * len(items) / count)
        chosen.append(items[end_of_part - 1])
    return chosen


def average(loaded: Loaded, subset: str, sentences: int, longest: int | None = None) -> Averages:
    """Averages the self-attentions of a model by position, over sentences of a split.

    The weights of each head are averaged over the sentences. Then logits are fitted that depend on positions alone, and
    whose attention weights come as near as possible to this average.

    Args:
        loaded: the model, with data.
        subset: the split.
        sentences: how many sentences to read at most. If the split has more, they are chosen evenly by their length.
        longest: the most tokens that a sentence may have; None for the model's own limit.

    Raises:
        SynthesizerError: there is no such split, or it has no sentence of that length.
    """
    all_indices = readable(loaded, subset, longest=longest)  # the shortest sentences first
    sentence_indices = choose_evenly(all_indices, sentences)
    batches = checkpoints.batches(loaded, subset, sentence_indices)
    pad = padding_index(loaded)
    average_attention = AverageAttention()
    for batch in progress(batches, "attention by position"):
        for reading in read_sentences(loaded.model, batch, pad):
            average_attention.add(reading)
    return Averages(
        constants=average_attention.fit(),
        length=average_attention.longest_sentence(),
        sentences=len(sentence_indices),
    )


def function_parameters(function: str, constants: Constants, length: int, rank: int) -> dict[str, Tensor]:
    """Returns the parameters of a function of the paper with which it computes given logits as exactly as it can.

    Args:
        function: ``random``, ``relative_random`` or ``factorized_random``.
        constants: the logits, by position and by distance.
        length: ``--synth-max-length``, which is the longest sentence that the function takes. For
            ``relative_random``, it is the largest distance between two tokens that has a logit of its own.
        rank: the rank of ``factorized_random``. The other functions do not need it.

    Returns:
        {name: parameter}:

        - for ``random``, R (H, length, length), the logits by position themselves;
        - for ``relative_random``, r (H, 2 length + 1), the logits by distance from -length to length;
        - for ``factorized_random``, R1 and R2 (H, length, rank), whose product is the best approximation of the logits
          by position that the rank allows.
    """
    if function == "random":
        return {"R": constants.matrix(length)}
    if function == "relative_random":
        return {"r": values_by_distance(constants.by_distance, length)}
    return factorize(constants.matrix(length), rank)


def values_by_distance(by_distance: Tensor, length: int) -> Tensor:
    """Returns logits for the distances from -length to length, (H, 2 length + 1).

    For example, the logits [5, 6, 7] are for the distances -1, 0 and 1. With the length 2, they become [5, 5, 6, 7, 7].

    Args:
        by_distance: (H, 2 m + 1), for the distances from -m to m. Larger distances get the logit of m, or of -m.
        length: the largest distance of the result.
    """
    largest_distance = by_distance.size(-1) // 2  # m
    distances = torch.arange(-length, length + 1).clamp(-largest_distance, largest_distance)
    places = distances + largest_distance  # the logit of distance -m is at place 0
    return by_distance[:, places].contiguous()


def factorize(R: Tensor, rank: int) -> dict[str, Tensor]:
    """Returns R1 and R2 (H, T, rank) whose product R1 R2^T is the best approximation of R (H, T, T) of that rank.

    It consists of the largest singular values and their vectors. Each of R1 and R2 gets the values' square roots.
    """
    left, singular_values, right_transposed = torch.linalg.svd(R)
    roots = singular_values[:, None, :rank].sqrt()
    R1 = left[:, :, :rank] * roots
    R2 = right_transposed.transpose(1, 2)[:, :, :rank] * roots
    return {"R1": R1.contiguous(), "R2": R2.contiguous()}


def function_logits(function: str, parameters: dict[str, Tensor], length: int) -> Tensor:
    """Returns the logits (H, length, length) that a function of the paper computes.

    Args:
        function: ``random``, ``relative_random`` or ``factorized_random``.
        parameters: {name: parameter}, as `function_parameters` returns them for sentences of `length` tokens.
        length: the number of tokens. Only ``relative_random`` reads it; the other parameters have this size already.
    """
    if function == "random":
        return parameters["R"]
    if function == "relative_random":
        return toeplitz(parameters["r"], length)
    return parameters["R1"] @ parameters["R2"].transpose(1, 2)


def losses_with_single_heads_replaced(
    loaded: Loaded, batches: list[Batch], logits: dict[str, Tensor], heads: Sequence[Head]
) -> dict[Head, float]:
    """Replaces one head at a time, and returns {head: the loss in bits that the model then has}.

    A replaced head gets logits that depend only on the positions of two tokens, not on the words.

    Args:
        loaded: the model, with data.
        batches: the data on which the loss is measured.
        logits: {self-attention: the logits by position (H, n, n) that replaced heads get}.
        heads: the heads to replace.
    """
    losses = {}
    for head in progress(heads, "heads without words"):
        with replaced_heads(loaded.model, logits, [head]):
            losses[head] = loss(loaded, batches)
    return losses


def replace_cheapest_heads_first(
    loaded: Loaded, batches: list[Batch], logits: dict[str, Tensor], losses: dict[Head, float]
) -> Iterator[ReplacedHead]:
    """Replaces one head, then two heads, and so on up to all heads, and measures the loss each time.

    The heads are replaced in the order of the loss when they alone are replaced, the lowest loss first. Each step
    yields the head that is replaced in addition, and the loss.

    Args:
        loaded: the model, with data.
        batches: the data on which the loss is measured.
        logits: {self-attention: the logits by position (H, n, n) that replaced heads get}.
        losses: {head: the loss when it alone is replaced}, as `losses_with_single_heads_replaced` returns it.
    """
    # Heads with the same loss are in the order of their names and numbers.
    cheapest_heads_first = sorted(losses, key=lambda head: (losses[head], head))
    heads_so_far = []
    for head in progress(cheapest_heads_first, "more and more heads"):
        heads_so_far.append(head)
        with replaced_heads(loaded.model, logits, heads_so_far):
            loss_so_far = loss(loaded, batches)
        yield ReplacedHead(head, loss_so_far)
