"""What self-attention is worth beside its average by position: the loss with heads that no longer see the words."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import measure
from .checkpoints import Batch, Loaded, batches, readable
from .hooks import Attention, replaced_heads
from .passes import Sentences, loss, pad_of, progress

Head = tuple[str, int]  # name of the attention, number of the head
SENTENCES = 2000  # over which attention is averaged
FUNCTIONS = ("random", "relative_random", "factorized_random")  # that logits by position can be put into


class Averages(NamedTuple):
    """Attention weights of a model by position, as the logits under which they are most likely."""

    constants: dict[str, measure.Constants]  # {attention: of its heads}
    length: int  # of the longest sentence seen
    sentences: int


def average(loaded: Loaded, subset: str, sentences: int, longest: int | None = None) -> Averages:
    """Reads the self-attentions of a model on some of the sentences of a subset, as many long as short ones.

    Args:
        loaded: with data.
        subset: its split.
        sentences: how many at most, spread evenly from the longest down.
        longest: tokens of a sentence at most.

    Raises:
        SynthesizerError: there is no such subset, or it has no sentence of that length.
    """
    order = readable(loaded, subset, longest=longest)
    if len(order) > sentences:
        order = [order[-1 - k * len(order) // sentences] for k in reversed(range(sentences))]
    seen: dict[str, measure.MeanByPosition] = {}
    is_causal: dict[str, bool] = {}

    def read(attention: Attention, i: int, logits: Tensor, causal: bool) -> None:
        if attention.kind == "self":
            seen.setdefault(attention.name, measure.MeanByPosition()).add(measure.weights_of(logits, causal))
            is_causal[attention.name] = causal

    run = Sentences(loaded.model, pad_of(loaded))
    for batch in progress(batches(loaded, subset, order), "attention by position"):
        run(batch, read)
    constants = {name: measure.constants_of(mean, is_causal[name]) for name, mean in seen.items()}
    return Averages(constants, max(mean.count.size(-1) for mean in seen.values()), len(order))


def logits_of(function: str, parameters: dict[str, Tensor], length: int) -> Tensor:
    """The logits (H, length, length) of a function of `FUNCTIONS`."""
    if function == "relative_random":
        return measure.by_diagonal(parameters["r"], length)
    return parameters["R"] if function == "random" else parameters["R1"] @ parameters["R2"].transpose(1, 2)


def parameters_of(function: str, constants: measure.Constants, length: int, rank: int) -> dict[str, Tensor]:
    """The parameters of a function of `FUNCTIONS`, by their names, that come nearest to logits by position.

    Args:
        length, rank: l and k of the function; k is used by ``factorized_random``, which gets the best approximation of
            that rank.
    """
    if function == "relative_random":
        m = constants.by_distance.size(-1) // 2
        places = torch.arange(-length, length + 1).clamp(-m, m) + m
        return {"r": constants.by_distance[:, places].contiguous()}
    R = constants.matrix(length)
    if function == "random":
        return {"R": R}
    left, values, right = torch.linalg.svd(R)
    left, right = (x[..., :rank] * values[:, None, :rank].sqrt() for x in (left, right.transpose(1, 2)))
    return {"R1": left.contiguous(), "R2": right.contiguous()}


def without_words(
    loaded: Loaded, sample: list[Batch], logits: dict[str, Tensor], heads: Sequence[Head]
) -> dict[Head, float]:
    """The loss in bits when the logits of one head alone are replaced."""
    found = {}
    for head in progress(heads, "heads without words"):
        with replaced_heads(loaded.model, logits, [head]):
            found[head] = loss(loaded, sample)
    return found


def cheapest_first(
    loaded: Loaded, sample: list[Batch], logits: dict[str, Tensor], found: dict[Head, float]
) -> Iterator[tuple[Head, float]]:
    """The heads by their losses `found`, each with the loss in bits when it is replaced beside those before it."""
    order = sorted(found, key=lambda head: (found[head], head))
    for count, head in enumerate(progress(order, "more and more heads"), 1):
        with replaced_heads(loaded.model, logits, order[:count]):
            yield head, loss(loaded, sample)
