"""Repairs of fairseq's beam search."""

import math
from collections.abc import Callable
from typing import Any

import torch
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.search import DiverseBeamSearch
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from torch import Tensor

from ..repairs import custom_repair, has_repair, mark_repair, repair


@custom_repair(
    symptom="`--no-repeat-ngram-size` has no effect: repeated n-grams are not forbidden",
    versions="all versions; fairseq's issue #5206",
)
def forbid_repeated_ngrams() -> bool:
    """Replaces fairseq's method ``NGramRepeatBlock._no_repeat_ngram`` by the function of the same name in this module.

    With ``--no-repeat-ngram-size``, fairseq should compare the last words of the output with all earlier words. The
    output is at the beginning of a longer buffer: the 5 tokens "a b c a b", for example, are followed by padding up to
    200 tokens. fairseq compares the last tokens of the buffer, which are padding. So it never finds a repetition.

    Returns:
        True if the method was replaced now, False if it had been replaced before.
    """
    method = NGramRepeatBlock._no_repeat_ngram
    if has_repair(method, "forbid_repeated_ngrams"):
        return False
    mark_repair(_no_repeat_ngram, "forbid_repeated_ngrams", original=method)  # for the next call of `has_repair`
    NGramRepeatBlock._no_repeat_ngram = _no_repeat_ngram
    return True


# TorchScript compiles this function, and finds it by its name. So it is called like fairseq's method, it cannot have
# the original as its first parameter, and bsz and beam_size stay although they are not used.
def _no_repeat_ngram(self: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
    """Forbids each next token that would complete an n-gram which the output already has.

    For example, n is 3 and the output is "a b c a b". The next n-gram begins with "a b". So does the n-gram "a b c" of
    the output. So the next token may not be "c".

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
    num_ngrams = step - n + 1  # 3 in the example: "a b c", "b c a" and "c a b"
    if num_ngrams <= 0:
        return lprobs
    output = tokens[:, 1 : step + 1]  # (hypotheses, step): "a b c a b"
    last_tokens = output[:, n - 1 :]  # (hypotheses, n-grams), the last token of each n-gram: "c", "a", "b"

    # (hypotheses, n-grams): whether an n-gram begins like the next n-gram. Its n - 1 first tokens are compared one by
    # one. If n is 1, nothing is compared, and each token of the output is forbidden.
    has_same_beginning = torch.ones_like(last_tokens, dtype=torch.bool)
    for place in range(n - 1):  # 0 and 1 in the example
        tokens_of_ngrams = output[:, place : place + num_ngrams]  # "a", "b", "c"; then "b", "c", "a"
        token_of_next_ngram = output[:, num_ngrams + place].unsqueeze(1)  # "a"; then "b"
        has_same_beginning = has_same_beginning & (tokens_of_ngrams == token_of_next_ngram)

    # In the example, `has_same_beginning` is True, False, False. For each True, `torch.where` returns the index of the
    # hypothesis, which is 0 here, and the index of the n-gram, which is also 0.
    hypotheses, ngrams = torch.where(has_same_beginning)
    forbidden_tokens = last_tokens[hypotheses, ngrams]  # "c"
    lprobs[hypotheses, forbidden_tokens] = -math.inf
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
    """Replaces ``DiverseBeamSearch.step`` (``original``): passes it the numbers of the sentences within their batch.

    The beam search calls this method once for each token of the output, with the sentences that are not yet finished.
    The method has a tensor with a row for each sentence of the batch, and uses `original_batch_idxs` as row numbers.
    But these are numbers in the data set. For example, the second batch has the sentences 6 and 7, but only the rows 0
    and 1, so the method fails. The replacement passes the row numbers.

    Args:
        original: fairseq's method.
        self: the search.
        step: the number of tokens of the output so far.
        lprobs: (sentences, beam, words), log-probabilities of the next token.
        scores: (sentences, beam, step), scores of the output so far.
        prev_output_tokens: the output so far.
        original_batch_idxs: (sentences,), the numbers in the data set of the sentences that are not yet finished.
    """
    unfinished_sentences = original_batch_idxs
    if unfinished_sentences is None:
        return original(self, step, lprobs, scores, prev_output_tokens, None)
    is_new_batch = step == 0
    if is_new_batch:
        # No sentence is finished yet, so these are all sentences of the batch. They are kept for the later steps.
        self.sentences_of_batch = unfinished_sentences  # [6, 7]
    # [6, 7] has the rows [0, 1]. When sentence 6 is finished, [7] is left, with the row [1].
    rows = find_places(unfinished_sentences, among=self.sentences_of_batch)
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
