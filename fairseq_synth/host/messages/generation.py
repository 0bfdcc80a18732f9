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


@repair(
    "inference_step",
    FairseqTask,
    LanguageModelingTask,
    symptom="`--constraints` where nothing reads them, as in `fairseq-generate`, ends in a TypeError",
    versions="all versions",
)
def refuse_lost_constraints(
    original_inference_step: Any, self: FairseqTask, generator: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``inference_step`` with one that refuses constraints that are not given, or that have unknown words.

    Where nothing reads the constraints, as in ``fairseq-generate``, the original ends in a TypeError. It writes an
    unknown word in a constraint as ``<unk>``.
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
    return original_inference_step(self, generator, *args, **kwargs)


@repair(
    "load_align_dict",
    fairseq.utils,
    symptom="`--replace-unk` ends at the first unknown word: hypotheses no longer carry an alignment",
    versions="all versions",
)
def refuse_replace_unk(original_load_align_dict: Any, replace_unk: str | None) -> Any:
    """Replaces fairseq's ``load_align_dict`` with one that refuses ``--replace-unk``.

    Hypotheses no longer carry an alignment, so the original ends at the first unknown word. Without a file it looks for
    one named ``@@``.
    """
    if replace_unk is not None:
        raise SynthesizerError(
            "--replace-unk: fairseq cannot replace unknown words any more; leave it out (subwords hardly have any)"
        )
    return original_load_align_dict(replace_unk)


@repair(
    "_build_batches",
    GeneratorHubInterface,
    symptom="In Python, `translate()` names a flag of the command line where a sentence is too long",
    versions="all versions",
)
def name_argument_of_translate(
    original_build_batches: Any, self: GeneratorHubInterface, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``_build_batches``: its error about a long sentence names an argument of ``translate()``, not a flag.

    The argument is one that a Python program can pass; the flag is one of the command line.
    """
    try:
        return original_build_batches(self, *args, **kwargs)
    except Exception as error:
        message = str(error)
        flag = "--skip-invalid-size-inputs-valid-test"
        if flag not in message:
            raise
        reason = message.partition(flag)[0]
        can_tile = length_hint(reason) != ""
        hint = "; longer ones need from_pretrained(..., synth_beyond_length='tile')" if can_tile else ""
        raise SynthesizerError(f"{reason}skip_invalid_size_inputs=True{hint}") from error
