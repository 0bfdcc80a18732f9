"""Repairs of fairseq's beam search."""

import math
from typing import Any

from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.search import DiverseBeamSearch
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from torch import Tensor

from ..repairs import MARK, PLACES, Place, custom_repair, repair

PLACES.append(Place(NGramRepeatBlock, "_no_repeat_ngram"))


@custom_repair(
    symptom="`--no-repeat-ngram-size` forbids nothing",
    versions="all versions; fairseq's issue #5206",
)
def forbid_repeated_ngrams() -> bool:
    """Puts `_no_repeat_ngram`, which forbids repeated n-grams, in the place of fairseq's method of that name.

    fairseq should compare the last tokens that are written with those before them. It takes the end of the buffer
    instead, which is padding until the longest possible output is reached.
    """
    if hasattr(NGramRepeatBlock._no_repeat_ngram, MARK):
        return False
    setattr(_no_repeat_ngram, MARK, ("forbid_repeated_ngrams",))
    NGramRepeatBlock._no_repeat_ngram = _no_repeat_ngram
    return True


# fairseq's TorchScript compiles this function by its name, so it cannot be wrapped as other repairs are
def _no_repeat_ngram(self: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
    """Forbids each token that would complete an n-gram for a second time.

    Args:
        self: has the size of the n-grams.
        tokens: (hypotheses, longest output + 2), the end of sentence and then what is written so far.
        lprobs: (hypotheses, words), log-probabilities of the next token; changed in place.
        bsz: not used.
        beam_size: not used.
        step: number of tokens that are written.
    """
    size = self.no_repeat_ngram_size
    if step >= size:
        written = tokens[:, 1 : step + 1]
        ngrams = written.unfold(1, size, 1)  # (hypotheses, n-grams, size)
        last_tokens = written[:, step + 1 - size :].unsqueeze(1)  # size - 1 tokens
        begins_alike = (ngrams[:, :, : size - 1] == last_tokens).all(dim=2)
        hypothesis, ngram = begins_alike.nonzero().unbind(dim=1)
        lprobs[hypothesis, ngrams[hypothesis, ngram, size - 1]] = -math.inf
    return lprobs


@repair(
    "step",
    DiverseBeamSearch,
    symptom="`--diverse-beam-groups` ends in an IndexError in the second batch",
    versions="all versions",
)
def penalize_groups_of_every_batch(
    original_step: Any,
    self: DiverseBeamSearch,
    step: int,
    lprobs: Tensor,
    scores: Tensor | None,
    prev_output_tokens: Tensor | None = None,
    original_batch_idxs: Tensor | None = None,
) -> Any:
    """Replaces ``DiverseBeamSearch.step`` with one that looks penalties up by the row of a sentence in the batch.

    fairseq stores them by that row, but looks them up by the sentence's number in the data set. The second batch ends
    in an error, and in the first one sentences may get the penalties of others.
    """
    rows = original_batch_idxs
    if original_batch_idxs is not None:
        if step == 0:
            self.sentence_numbers = original_batch_idxs
        # Finished sentences leave the batch, but the penalties keep the rows of its first step.
        is_row_of_sentence = original_batch_idxs.unsqueeze(1).eq(self.sentence_numbers.unsqueeze(0))
        rows = is_row_of_sentence.int().argmax(dim=1)
    return original_step(self, step, lprobs, scores, prev_output_tokens, rows)


@repair(
    "inference_step",
    FairseqTask,
    LanguageModelingTask,
    symptom='`--prefix-size` with an empty line ends in an AssertionError, "200 < 200"',
    versions="all versions",
)
def continue_empty_lines(
    original_inference_step: Any, self: FairseqTask, generator: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``inference_step`` with one that lets the search continue an empty line freely, without a prefix.

    With ``--prefix-size``, the prefix of an empty line is the end of the sentence, which has fewer continuations than
    ``--beam``.
    """
    prefixes = kwargs.get("prefix_tokens")
    if prefixes is not None and prefixes.size(1) > 0:
        is_empty = prefixes[:, :1].eq(self.target_dictionary.eos())
        kwargs["prefix_tokens"] = prefixes.masked_fill(is_empty, self.target_dictionary.pad())
    return original_inference_step(self, generator, *args, **kwargs)
