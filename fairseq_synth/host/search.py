"""Repairs of fairseq's beam search."""

import math
from typing import Any

import fairseq.utils
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.search import LexicallyConstrainedBeamSearch
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from torch import Tensor

from ..errors import SynthesizerError
from ..lengths import length_hint
from .repairs import MARK, listed, repair


@listed
def forbid_repeated_ngrams() -> bool:
    """``--no-repeat-ngram-size`` forbids nothing (all versions; fairseq's issue #5206).

    fairseq should compare the last tokens that are written with those before them. It takes the end of the buffer
    instead, which is padding until the longest possible output is reached.
    """
    if hasattr(NGramRepeatBlock._no_repeat_ngram, MARK):
        return False

    # no wrapper: TorchScript compiles it, by this name
    def _no_repeat_ngram(self: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
        size = self.no_repeat_ngram_size
        if step >= size:
            written = tokens[:, 1 : step + 1]  # without the end of sentence that every output begins with
            ngrams = written.unfold(1, size, 1)  # (hypotheses, n-grams, size)
            begun = written[:, step + 1 - size :].unsqueeze(1)  # what one more token would make an n-gram of
            row, place = (ngrams[:, :, : size - 1] == begun).all(dim=2).nonzero().unbind(dim=1)
            lprobs[row, ngrams[row, place, size - 1]] = -math.inf
        return lprobs

    setattr(_no_repeat_ngram, MARK, ("forbid_repeated_ngrams",))
    NGramRepeatBlock._no_repeat_ngram = _no_repeat_ngram
    return True


@repair("inference_step", FairseqTask, LanguageModelingTask)
def refuse_lost_constraints(inference_step: Any, self: FairseqTask, generator: Any, *args: Any, **kwargs: Any) -> Any:
    """``--constraints`` where nothing reads them, as in ``fairseq-generate``, ends in a TypeError (all versions).

    And of an unknown word in a constraint ``<unk>`` is written.
    """
    constraints = kwargs.get("constraints")
    is_constrained = isinstance(getattr(generator, "search", None), LexicallyConstrainedBeamSearch)
    if is_constrained and constraints is None:
        raise SynthesizerError(
            "--constraints: only fairseq-interactive of a translation model reads constraints, behind a tab in each "
            "line; leave it out here"
        )
    # a row of constraints begins with their number
    if constraints is not None and constraints[:, 1:].eq(self.target_dictionary.unk()).any():
        raise SynthesizerError(
            "--constraints: a word behind a tab is not in the dictionary; give words as the training has them, or, in "
            "text as it is, the --bpe of the training"
        )
    return inference_step(self, generator, *args, **kwargs)


@repair("load_align_dict", fairseq.utils)
def refuse_replace_unk(load_align_dict: Any, replace_unk: str | None) -> Any:
    """``--replace-unk`` ends at the first unknown word: no alignment comes with a translation any more (all versions).

    And without a file it looks for one named ``@@``.
    """
    if replace_unk is not None:
        raise SynthesizerError(
            "--replace-unk: fairseq cannot replace unknown words any more; leave it out (subwords hardly have any)"
        )
    return load_align_dict(replace_unk)


@repair("inference_step", FairseqTask, LanguageModelingTask)
def continue_empty_lines(inference_step: Any, self: FairseqTask, generator: Any, *args: Any, **kwargs: Any) -> Any:
    """``--prefix-size`` with an empty line ends in an AssertionError, "200 < 200" (all versions).

    The line's prefix is the end of the sentence, and there are fewer hypotheses than ``--beam`` of it. Here such a
    line is continued freely.
    """
    prefixes = kwargs.get("prefix_tokens")
    if prefixes is not None and prefixes.size(1):
        is_empty = prefixes[:, :1].eq(self.target_dictionary.eos())
        kwargs["prefix_tokens"] = prefixes.masked_fill(is_empty, self.target_dictionary.pad())
    return inference_step(self, generator, *args, **kwargs)


@repair("_build_batches", GeneratorHubInterface)
def name_argument_of_translate(build_batches: Any, self: GeneratorHubInterface, *args: Any, **kwargs: Any) -> Any:
    """In Python, ``translate()`` names a flag of the command line where a sentence is too long (all versions)."""
    try:
        return build_batches(self, *args, **kwargs)
    except Exception as error:
        text, found, _ = str(error).partition("--skip-invalid-size-inputs-valid-test")
        if not found:
            raise
        tile = "; longer ones need from_pretrained(..., synth_beyond_length='tile')" if length_hint(text) else ""
        raise SynthesizerError(f"{text}skip_invalid_size_inputs=True{tile}") from error
