"""How much of self-attention is more than an average by position.

Attention is averaged by position over sentences, and the loss is measured with heads that use the average only.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .attentions import Head
from .checkpoints import Batch, Loaded, batches, readable
from .hooks import replaced_heads
from .measure import sentence_weights
from .passes import SentenceReading, loss, padding_index, progress, read_sentences
from .positional import Constants, MeanByPosition, fit_constants, toeplitz

SENTENCES = 2000  # that attention is averaged over at most, if nobody asks for another number
FUNCTIONS = ("random", "relative_random", "factorized_random")  # that can have given logits by position


class Averages(NamedTuple):
    """A model's attention by position, as the logits under which it is most likely."""

    constants: dict[str, Constants]  # {self-attention: logits of its heads}
    length: int  # tokens of the longest sentence
    sentences: int


class ReplacedHead(NamedTuple):
    """One more head that is replaced, and the loss with it and all heads before it replaced."""

    head: Head
    loss: float  # bits


def spread(order: Sequence[int], count: int) -> list[int]:
    """Returns `count` of the items, evenly spaced and with the last one; all of them if there are no more."""
    if len(order) <= count:
        return list(order)
    chosen = []
    for steps_before_last in reversed(range(count)):
        # One step is len(order) / count items long, rounded down after the multiplication.
        index_from_end = -1 - steps_before_last * len(order) // count
        chosen.append(order[index_from_end])
    return chosen


def average(loaded: Loaded, subset: str, sentences: int, longest: int | None = None) -> Averages:
    """Averages the self-attentions of a model by position, over as many long as short sentences of a subset.

    Args:
        loaded: with data.
        subset: the split to read.
        sentences: how many to read at most, spread evenly from the longest down.
        longest: the most tokens that a sentence may have; None for what the model can take.

    Raises:
        SynthesizerError: there is no such subset, or it has no sentence of that length.
    """
    order = spread(readable(loaded, subset, longest=longest), sentences)
    means: dict[str, MeanByPosition] = {}
    is_causal: dict[str, bool] = {}

    def read(reading: SentenceReading) -> None:
        if reading.attention.kind == "self":
            name = reading.attention.name
            mean = means.setdefault(name, MeanByPosition())
            mean.add(sentence_weights(reading.logits, reading.causal))
            is_causal[name] = reading.causal

    pad = padding_index(loaded)
    for batch in progress(batches(loaded, subset, order), "attention by position"):
        read_sentences(loaded.model, batch, pad, read)
    constants = {name: fit_constants(mean, is_causal[name]) for name, mean in means.items()}
    length = max(mean.count.size(-1) for mean in means.values())
    return Averages(constants, length, len(order))


def function_parameters(function: str, constants: Constants, length: int, rank: int) -> dict[str, Tensor]:
    """Returns the parameters of a function of `FUNCTIONS`, by their names, that come nearest to logits by position.

    Args:
        function: one of `FUNCTIONS`.
        constants: the logits by position.
        length: l of the function.
        rank: k of ``factorized_random``, which gets the best approximation of that rank.
    """
    if function == "relative_random":
        # by_distance has the distances -m to m, r has -length to length: beyond m, r repeats the value at m
        m = constants.by_distance.size(-1) // 2
        distance = torch.arange(-length, length + 1)
        r = constants.by_distance[:, distance.clamp(-m, m) + m]
        return {"r": r.contiguous()}
    R = constants.matrix(length)
    if function == "random":
        return {"R": R}
    # the largest singular values and their vectors are the best approximation of that rank; R1 and R2 share the values
    left, values, right_transposed = torch.linalg.svd(R)
    roots = values[:, None, :rank].sqrt()
    R1 = left[:, :, :rank] * roots
    R2 = right_transposed.transpose(1, 2)[:, :, :rank] * roots
    return {"R1": R1.contiguous(), "R2": R2.contiguous()}


def function_logits(function: str, parameters: dict[str, Tensor], length: int) -> Tensor:
    """Returns the logits (H, length, length) of a function of `FUNCTIONS` with these parameters."""
    if function == "relative_random":
        return toeplitz(parameters["r"], length)
    if function == "random":
        return parameters["R"]
    return parameters["R1"] @ parameters["R2"].transpose(1, 2)


def losses_without_words(
    loaded: Loaded, sample: list[Batch], logits: dict[str, Tensor], heads: Sequence[Head]
) -> dict[Head, float]:
    """Returns for each head the loss in bits when its logits alone are replaced.

    Args:
        logits: {self-attention: logits by position (H, n, n)}.
        heads: the heads to measure.
    """
    losses = {}
    for head in progress(heads, "heads without words"):
        with replaced_heads(loaded.model, logits, [head]):
            losses[head] = loss(loaded, sample)
    return losses


def cheapest_first(
    loaded: Loaded, sample: list[Batch], logits: dict[str, Tensor], losses: dict[Head, float]
) -> Iterator[ReplacedHead]:
    """Replaces one head after the other, in the order of `losses`, and yields each with the loss that is reached.

    Args:
        logits: {self-attention: logits by position (H, n, n)}.
        losses: what `losses_without_words` returns.
    """
    order = sorted(losses, key=lambda head: (losses[head], head))
    for count, head in enumerate(progress(order, "more and more heads"), start=1):
        with replaced_heads(loaded.model, logits, order[:count]):
            yield ReplacedHead(head, loss(loaded, sample))
