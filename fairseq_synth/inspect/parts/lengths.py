"""Loss, and for a translation BLEU, of short and of long sentences."""

import math

from ..bleu import can_translate, compute_bleu
from ..checkpoints import batches
from ..passes import loss, progress
from ..subject import Figures, Subject, rounded

SHORTEST_RANGE = 8  # tokens; every further range ends at twice as many


def cost(subject: Subject) -> str:
    """Returns how much `measure` computes."""
    text = f"1 pass over {len(subject.order):,} sentences"
    if can_translate(subject.loaded):
        text += ", and 1 translation of them"
    return text


def measure(subject: Subject) -> None:
    """Adds loss and BLEU of the sentences of up to 8, 16, 32, ... tokens, of their longer side.

    ``lengths`` gets ``ranges``, shortest first: ``longest``, ``sentences``, ``loss`` in bits, ``bleu`` or None. And
    BLEU's ``signature`` and ``beam``.
    """
    loaded = subject.loaded
    options = subject.options
    ranges: list[Figures] = []
    signature = None
    for longest, order in progress(sentences_by_length(subject).items(), "loss by sentence length"):
        sample = batches(loaded, options.subset, order)
        score = None
        if can_translate(loaded):
            score, signature = compute_bleu(loaded, sample, options.beam, options.remove_bpe)
        ranges.append({"longest": longest, "sentences": len(order), "loss": loss(loaded, sample), "bleu": score})
    beam = options.beam if can_translate(loaded) else None
    subject.figures["lengths"] = rounded({"ranges": ranges, "signature": signature, "beam": beam})


def sentences_by_length(subject: Subject) -> dict[int, list[int]]:
    """Returns {the most tokens of a range: its sentences}, shortest first."""
    dataset = subject.loaded.task.dataset(subject.options.subset)
    ranges: dict[int, list[int]] = {}
    for i in subject.order:
        power_of_two = 2 ** math.ceil(math.log2(dataset.num_tokens(i)))
        ranges.setdefault(max(SHORTEST_RANGE, power_of_two), []).append(i)
    return ranges
