"""Repairs of fairseq's beam search."""

import math
from typing import Any

from fairseq.ngram_repeat_block import NGramRepeatBlock
from torch import Tensor

from .repairs import repair, replace


@repair
def forbid_repeated_ngrams() -> bool:
    """``--no-repeat-ngram-size`` forbids nothing (all versions; fairseq's issue #5206).

    fairseq should compare the last tokens that are written with those before them. It takes the end of the buffer
    instead, which is padding until the longest possible output is reached.
    """

    def of_what_is_written(_: Any) -> Any:
        def no_repeat_ngram(self: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
            size = self.no_repeat_ngram_size
            if step >= size:
                written = tokens[:, 1 : step + 1]  # without the end of sentence that every output begins with
                ngrams = written.unfold(1, size, 1)  # (hypotheses, n-grams, size)
                begun = written[:, step + 1 - size :].unsqueeze(1)  # what one more token would make an n-gram of
                row, place = (ngrams[:, :, : size - 1] == begun).all(dim=2).nonzero().unbind(dim=1)
                lprobs[row, ngrams[row, place, size - 1]] = -math.inf
            return lprobs

        return no_repeat_ngram

    if not replace(NGramRepeatBlock, "_no_repeat_ngram", of_what_is_written):
        return False
    del NGramRepeatBlock._no_repeat_ngram.__wrapped__  # TorchScript would compile fairseq's own
    return True
