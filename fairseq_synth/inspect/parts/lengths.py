"""Measures loss, and BLEU of a translation model, for short and for long sentences."""

from .. import checkpoints
from ..bleu import can_translate
from ..inspection import Inspection, Results, round_floats
from ..passes import progress
from .heads import measure_quality

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
    ranges: list[Results] = []
    signature = None
    for longest, sentence_indices in progress(group_by_length(inspection).items(), "loss by sentence length"):
        batches = checkpoints.batches(loaded, options.subset, sentence_indices)
        quality = measure_quality(loaded, batches, [], options)  # no head is removed
        ranges.append(
            {
                "longest": longest,
                "sentences": len(sentence_indices),
                "loss": quality.loss,
                "bleu": quality.bleu,
            }
        )
        signature = quality.signature  # It says how BLEU is computed, so it is the same for all ranges.
    beam = options.beam if can_translate(loaded) else None
    inspection.results["lengths"] = round_floats({"ranges": ranges, "signature": signature, "beam": beam})


def group_by_length(inspection: Inspection) -> dict[int, list[int]]:
    """Returns {longest length of a range: the indices of the sentences in this range}, the shortest range first.

    For example, ``{8: [0, 3], 16: [1, 2]}`` if the sentences 0 and 3 have up to 8 tokens, and the others 9 to 16. The
    length of a sentence and its translation is that of the longer one.
    """
    dataset = inspection.loaded.task.dataset(inspection.options.subset)
    indices_by_range: dict[int, list[int]] = {}
    for index in inspection.sentence_indices:
        longest = find_end_of_range(dataset.num_tokens(index))
        indices_by_range.setdefault(longest, []).append(index)
    return dict(sorted(indices_by_range.items()))


def find_end_of_range(num_tokens: int) -> int:
    """Returns the longest length of the range to which a length belongs: the first of 8, 16, 32, … that is enough."""
    longest = SHORTEST_RANGE
    while longest < num_tokens:
        longest *= 2
    return longest
