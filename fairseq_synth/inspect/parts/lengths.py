"""Measures loss, and BLEU of a translation model, for short and for long sentences."""

import math

from .. import checkpoints
from ..bleu import can_translate, compute_bleu
from ..inspection import Inspection, Results, round_floats
from ..passes import loss, progress

SHORTEST_RANGE = 8  # tokens; every further range ends at twice as many


def describe_cost(inspection: Inspection) -> str:
    """Returns how much `measure` computes for a model, as a text for the user."""
    cost = f"1 pass over {len(inspection.sentence_indices):,} sentences"
    if can_translate(inspection.loaded):
        cost += ", and 1 translation of them"
    return cost


def measure(inspection: Inspection) -> None:
    """Measures loss and BLEU by the length of the sentences, and adds them to the inspection as ``lengths``.

    The ranges of lengths are up to 8 tokens, 9 to 16, 17 to 32, and so on. For example::

        {
            "ranges": [
                {"longest": 8, "sentences": 120, "loss": 2.1, "bleu": 30.1},
                {"longest": 16, "sentences": 400, "loss": 2.4, "bleu": 28.7},
                ...
            ],
            "signature": "BLEU|...",
            "beam": 4,
        }

    The loss is in bits. BLEU, its signature and the size of the beam are None for a model that does not translate.
    """
    loaded = inspection.loaded
    options = inspection.options
    translates = can_translate(loaded)
    ranges: list[Results] = []
    signature = None
    for longest, sentence_indices in progress(group_by_length(inspection).items(), "loss by sentence length"):
        batches = checkpoints.batches(loaded, options.subset, sentence_indices)
        results: Results = {"longest": longest, "sentences": len(sentence_indices), "loss": None, "bleu": None}
        if translates:
            bleu = compute_bleu(loaded, batches, options.beam, options.remove_bpe)
            results["bleu"] = bleu.score
            signature = bleu.signature  # It says how BLEU is computed, so it is the same for all ranges.
        results["loss"] = loss(loaded, batches)
        ranges.append(results)
    beam = options.beam if translates else None
    inspection.results["lengths"] = round_floats({"ranges": ranges, "signature": signature, "beam": beam})


def group_by_length(inspection: Inspection) -> dict[int, list[int]]:
    """Returns {the most tokens of a range of lengths: the indices of its sentences}, shortest first.

    A pair of sentences counts by the longer one.
    """
    dataset = inspection.loaded.task.dataset(inspection.options.subset)
    ranges: dict[int, list[int]] = {}
    for index in inspection.sentence_indices:
        next_power_of_two = 2 ** math.ceil(math.log2(dataset.num_tokens(index)))
        longest = max(SHORTEST_RANGE, next_power_of_two)
        ranges.setdefault(longest, []).append(index)
    return ranges
