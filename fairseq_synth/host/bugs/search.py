"""Repairs of fairseq's beam search."""

import math
from collections.abc import Callable
from typing import Any

from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.search import DiverseBeamSearch
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from torch import Tensor

from ..repairs import custom_repair, repair, repair_names, set_repair_names


@custom_repair(
    symptom="`--no-repeat-ngram-size` has no effect: repeated n-grams are not forbidden",
    versions="all versions; fairseq's issue #5206",
)
def forbid_repeated_ngrams() -> bool:
    """Replaces ``NGramRepeatBlock._no_repeat_ngram`` by the function `_no_repeat_ngram` of this module.

    With ``--no-repeat-ngram-size``, fairseq should compare the last words of the output with all earlier parts of it.
    The output is at the beginning of a longer buffer. For example, the output "a b c a b" has 5 tokens in a buffer of
    200. fairseq compares the last words of the buffer instead, which are padding. So it never finds a repetition.

    Returns:
        True if the method was replaced now, False if it had been replaced before.
    """
    names_of_repairs = repair_names(NGramRepeatBlock._no_repeat_ngram)  # () for fairseq's own method
    if "forbid_repeated_ngrams" in names_of_repairs:
        return False
    set_repair_names(_no_repeat_ngram, ("forbid_repeated_ngrams",))
    NGramRepeatBlock._no_repeat_ngram = _no_repeat_ngram
    return True


# TorchScript compiles this function, and finds it by its name. So it is called like fairseq's method, it cannot have
# the original as its first parameter, and bsz and beam_size stay although they are not used.
def _no_repeat_ngram(self: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
    """Forbids each next token that would complete an n-gram which the output already has.

    For example, with n = 3 and the output "a b c a b":

        n-grams of the output                    "a b c"   "b c a"   "c a b"
        their beginnings, of n - 1 tokens        "a b"     "b c"     "c a"
        is it "a b", as in the next n-gram?      yes       no        no

    So the next token may not be the last one of "a b c".

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
    if step < n:  # The output is too short to have an n-gram.
        return lprobs
    # The comments at the ends of the lines show a single hypothesis, the example above.
    output = tokens[:, 1 : step + 1]  # (hypotheses, step): "a b c a b"
    ngrams = output.unfold(1, n, 1)  # (hypotheses, n-grams, n): "a b c", "b c a", "c a b", which are one token apart
    beginnings = ngrams[:, :, : n - 1]  # (hypotheses, n-grams, n - 1): "a b", "b c", "c a"
    last_tokens = ngrams[:, :, n - 1]  # (hypotheses, n-grams): "c", "a", "b"
    # The index -(n - 1) would be wrong for n = 1, where a beginning has no token: output[:, -0:] is the whole output.
    next_beginning = output[:, step - (n - 1) :].unsqueeze(1)  # (hypotheses, 1, n - 1): "a b"
    # If n is 1, beginnings have no tokens, so all are equal, and each token of the output is forbidden.
    has_same_beginning = (beginnings == next_beginning).all(dim=2)  # (hypotheses, n-grams): True, False, False
    # For each True: the number of its hypothesis, and the number of the n-gram there.
    hypothesis, ngram = has_same_beginning.nonzero().unbind(dim=1)  # [0] and [0]
    forbidden_tokens = last_tokens[hypothesis, ngram]  # "c"
    lprobs[hypothesis, forbidden_tokens] = -math.inf
    return lprobs


@repair(
    "step",
    DiverseBeamSearch,
    symptom="`--diverse-beam-groups` fails with an IndexError in the second batch",
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

    The beam search calls this method once for each token of the output. With ``--diverse-beam-groups``, the method
    uses `original_batch_idxs` as row numbers of a tensor that has a row for each sentence of the batch. But these are
    the numbers of the sentences in the data set. So the replacement passes the row numbers in their place. For example,
    if the sentences 6 and 7 are a batch, and sentence 6 is finished first:

                               step 0    a later step
        original_batch_idxs    [6, 7]    [7]             fairseq would look for row 7 of 2 rows
        what is passed         [0, 1]    [1]

    Args:
        original: fairseq's method.
        self: the search.
        step: the number of tokens of the output so far.
        lprobs: (sentences, beam, words), log-probabilities of the next token.
        scores: (sentences, beam, step), scores of the output so far.
        prev_output_tokens: the output so far.
        original_batch_idxs: (sentences,), the numbers in the data set of the sentences that are not yet finished.
    """
    if original_batch_idxs is None:
        return original(self, step, lprobs, scores, prev_output_tokens, None)
    is_first_step_of_batch = step == 0
    if is_first_step_of_batch:
        # No sentence is finished yet, so these are all sentences, in the order of their rows. They are kept for the
        # later steps of the batch, which get only the unfinished ones.
        self.sentence_of_each_row = original_batch_idxs  # [6, 7]
    # In the example, sentence 7 has the row 1, because it is at place 1 of [6, 7].
    rows = find_places(original_batch_idxs, among=self.sentence_of_each_row)
    return original(self, step, lprobs, scores, prev_output_tokens, rows)


def find_places(wanted: Tensor, among: Tensor) -> Tensor:
    """Returns the place of each wanted value among other values: [30, 50] among [50, 40, 30] -> [2, 0].

    Args:
        wanted: (m,), each of which is among the other values.
        among: (n,), which are all different.

    Returns:
        (m,), indices of `among`.
    """
    is_equal = wanted.unsqueeze(1).eq(among.unsqueeze(0))  # (m, n), with a single True in each row
    return is_equal.int().argmax(dim=1)


@repair(
    "inference_step",
    FairseqTask,
    LanguageModelingTask,
    symptom='`--prefix-size` fails with the AssertionError "200 < 200" if the text has an empty line',
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
    prefixes = kwargs.get("prefix_tokens")  # (sentences, N), or None; fairseq passes it by name
    if prefixes is not None and prefixes.size(1) > 0:
        first_tokens = prefixes[:, :1]  # (sentences, 1)
        is_empty_line = first_tokens.eq(self.target_dictionary.eos())  # (sentences, 1)
        # `masked_fill` changes all N tokens of a row, so the whole prefix of an empty line becomes padding.
        kwargs["prefix_tokens"] = prefixes.masked_fill(is_empty_line, self.target_dictionary.pad())
    return original(self, generator, *args, **kwargs)
