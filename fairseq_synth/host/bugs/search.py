"""Repairs of fairseq's beam search."""

import math
from collections.abc import Callable
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
    """Replaces ``NGramRepeatBlock._no_repeat_ngram`` by the function `_no_repeat_ngram` of this module.

    For ``--no-repeat-ngram-size``, fairseq should look for the last tokens of the output among the earlier tokens. It
    takes the end of the buffer instead of the end of the output. The buffer is as long as the longest possible output,
    so its end is padding, and nothing is forbidden.

    Returns:
        True if the method was replaced now, False if it had been replaced before.
    """
    if hasattr(NGramRepeatBlock._no_repeat_ngram, MARK):
        return False
    setattr(_no_repeat_ngram, MARK, ("forbid_repeated_ngrams",))
    NGramRepeatBlock._no_repeat_ngram = _no_repeat_ngram
    return True


# TorchScript compiles this function, and finds it by its name. So it is called like fairseq's method, it cannot have
# the original as its first parameter, and bsz and beam_size stay although they are not used.
def _no_repeat_ngram(self: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
    """Forbids each next token that would complete an n-gram which the output already has.

    Args:
        self: fairseq's NGramRepeatBlock, which has n as ``no_repeat_ngram_size``.
        tokens: (hypotheses, longest output + 2), the end of sentence, then the output so far, then padding.
        lprobs: (hypotheses, words), log-probabilities of the next token; those of forbidden tokens are set to -inf.
        bsz: not used.
        beam_size: not used.
        step: the number of tokens of the output so far.

    Returns:
        `lprobs`.
    """
    n = self.no_repeat_ngram_size
    if step < n:
        return lprobs
    output = tokens[:, 1 : step + 1]  # (hypotheses, step)
    ngrams = output.unfold(1, n, 1)  # (hypotheses, step - n + 1, n), all n-grams of the output
    beginnings = ngrams[:, :, : n - 1]  # (hypotheses, step - n + 1, n - 1), each n-gram without its last token
    last_tokens = output[:, step - (n - 1) :].unsqueeze(1)  # (hypotheses, 1, n - 1), the last n - 1 tokens
    is_continued_again = (beginnings == last_tokens).all(dim=2)  # (hypotheses, step - n + 1)
    hypothesis, ngram = is_continued_again.nonzero().unbind(dim=1)  # the indices of the n-grams that begin alike
    forbidden_tokens = ngrams[hypothesis, ngram, n - 1]
    lprobs[hypothesis, forbidden_tokens] = -math.inf
    return lprobs


@repair(
    "step",
    DiverseBeamSearch,
    symptom="`--diverse-beam-groups` ends in an IndexError in the second batch",
    versions="all versions",
)
def penalize_groups_of_every_batch(
    original: Callable[..., Any],
    self: DiverseBeamSearch,
    step: int,
    lprobs: Tensor,
    scores: Tensor | None,
    prev_output_tokens: Tensor | None = None,
    original_batch_idxs: Tensor | None = None,
) -> Any:
    """Replaces ``DiverseBeamSearch.step`` (``original``): each sentence gets its own diversity penalties.

    With ``--diverse-beam-groups``, a tensor has the penalties of each sentence in the row that the sentence has in its
    batch. fairseq looks the penalties up by the number of the sentence in the data set. In the first batch, sentences
    can get the penalties of other sentences. In the second batch, the number is larger than the tensor, and an
    IndexError follows. The replacement passes the row instead of the number.

    Args:
        original: fairseq's method.
        self: the search; the replacement remembers the sentences of the batch in it.
        step: the number of tokens of the output so far.
        lprobs: (sentences, beam, words), log-probabilities of the next token.
        scores: (sentences, beam, step), scores of the output so far.
        prev_output_tokens: the output so far.
        original_batch_idxs: (sentences,), the number of each sentence that is not finished in the data set.
    """
    if original_batch_idxs is None:
        return original(self, step, lprobs, scores, prev_output_tokens, None)
    if step == 0:
        self.sentence_numbers = original_batch_idxs
    # Finished sentences leave the batch during the search, but the penalties stay in the rows of the first step.
    is_row_of_sentence = original_batch_idxs.unsqueeze(1).eq(self.sentence_numbers.unsqueeze(0))
    rows = is_row_of_sentence.int().argmax(dim=1)
    return original(self, step, lprobs, scores, prev_output_tokens, rows)


@repair(
    "inference_step",
    FairseqTask,
    LanguageModelingTask,
    symptom='`--prefix-size` with an empty line ends in an AssertionError, "200 < 200"',
    versions="all versions",
)
def continue_empty_lines(
    original: Callable[..., Any], self: FairseqTask, generator: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``inference_step`` of fairseq's tasks (``original``): an empty line is translated without a prefix.

    With ``--prefix-size N``, each output has to begin with the first N tokens of the reference. If the reference is an
    empty line, its prefix is the end of sentence. Nothing can follow that, so fairseq's search fails. The replacement
    changes such a prefix to padding, which leaves the search free.
    """
    prefixes = kwargs.get("prefix_tokens")  # (sentences, N), or None
    if prefixes is not None and prefixes.size(1) > 0:
        first_tokens = prefixes[:, :1]
        is_empty_line = first_tokens.eq(self.target_dictionary.eos())
        kwargs["prefix_tokens"] = prefixes.masked_fill(is_empty_line, self.target_dictionary.pad())
    return original(self, generator, *args, **kwargs)
