"""Explains flags of generation, and arguments of ``translate()``, that cannot be used."""

from typing import Any

import fairseq.utils
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.search import LexicallyConstrainedBeamSearch
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask

from ...errors import SynthesizerError
from ...lengths import length_hint
from ..repairs import repair


@repair("inference_step", FairseqTask, LanguageModelingTask)
def refuse_lost_constraints(inference_step: Any, self: FairseqTask, generator: Any, *args: Any, **kwargs: Any) -> Any:
    """``--constraints`` where nothing reads them, as in ``fairseq-generate``, ends in a TypeError (all versions).

    And an unknown word in a constraint is written as ``<unk>``.
    """
    constraints = kwargs.get("constraints")
    is_constrained = isinstance(getattr(generator, "search", None), LexicallyConstrainedBeamSearch)
    if is_constrained and constraints is None:
        raise SynthesizerError(
            "--constraints: only fairseq-interactive of a translation model reads constraints, behind a tab in each "
            "line; leave it out here"
        )
    # the first column of the constraints is their number
    if constraints is not None and constraints[:, 1:].eq(self.target_dictionary.unk()).any():
        raise SynthesizerError(
            "--constraints: a word behind a tab is not in the dictionary; give words as the training has them, or, in "
            "text as it is, the --bpe of the training"
        )
    return inference_step(self, generator, *args, **kwargs)


@repair("load_align_dict", fairseq.utils)
def refuse_replace_unk(load_align_dict: Any, replace_unk: str | None) -> Any:
    """``--replace-unk`` ends at the first unknown word: hypotheses no longer carry an alignment (all versions).

    And without a file it looks for one named ``@@``.
    """
    if replace_unk is not None:
        raise SynthesizerError(
            "--replace-unk: fairseq cannot replace unknown words any more; leave it out (subwords hardly have any)"
        )
    return load_align_dict(replace_unk)


@repair("_build_batches", GeneratorHubInterface)
def name_argument_of_translate(build_batches: Any, self: GeneratorHubInterface, *args: Any, **kwargs: Any) -> Any:
    """In Python, ``translate()`` names a flag of the command line where a sentence is too long (all versions)."""
    try:
        return build_batches(self, *args, **kwargs)
    except Exception as error:
        message = str(error)
        flag = "--skip-invalid-size-inputs-valid-test"
        if flag not in message:
            raise
        reason = message.partition(flag)[0]
        can_tile = length_hint(reason) != ""
        hint = "; longer ones need from_pretrained(..., synth_beyond_length='tile')" if can_tile else ""
        raise SynthesizerError(f"{reason}skip_invalid_size_inputs=True{hint}") from error
