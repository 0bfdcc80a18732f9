"""Explains flags of generation, and arguments of ``translate()``, that cannot be used."""

from collections.abc import Callable
from typing import Any

import fairseq.utils
from fairseq.data import Dictionary
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.search import LexicallyConstrainedBeamSearch
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from torch import Tensor

from ...errors import SynthesizerError
from ...lengths import has_limit_of_synthesizer
from ..repairs import repair


@repair(
    "inference_step",
    FairseqTask,
    LanguageModelingTask,
    symptom="`--constraints` fails with a TypeError in commands that cannot use it, such as `fairseq-generate`",
    versions="all versions",
)
def refuse_lost_constraints(
    original: Callable[..., Any], self: FairseqTask, generator: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``inference_step`` of fairseq's tasks (``original``): explains two mistakes with ``--constraints``.

    Constraints are words that a translation must contain. Only ``fairseq-interactive`` reads them. Other commands, such
    as ``fairseq-generate``, end in a TypeError. A constraint with a word that the model does not know would force the
    unknown word ``<unk>`` into the translation.

    Raises:
        SynthesizerError: the search needs constraints but gets none, or a constraint has an unknown word.
    """
    constraints = kwargs.get("constraints")
    search = getattr(generator, "search", None)  # None: a generator of another task, which has no beam search
    is_constrained_search = isinstance(search, LexicallyConstrainedBeamSearch)
    if is_constrained_search and constraints is None:
        raise SynthesizerError(
            "--constraints: only fairseq-interactive reads constraints, after a tab in each line, and only for a "
            "translation model; remove the flag"
        )
    if constraints is not None and has_unknown_word(constraints, self.target_dictionary):
        raise SynthesizerError(
            "--constraints: a word of a constraint is not in the dictionary; preprocess the constraints like "
            "the training text, or use the --bpe that the training text was split with"
        )
    return original(self, generator, *args, **kwargs)


def has_unknown_word(constraints: Tensor, dictionary: Dictionary) -> bool:
    """Returns whether some constraint has a word that is not in the dictionary.

    Args:
        constraints: (sentences, 1 + tokens); the first column is the number of constraints for each sentence.
        dictionary: the words of the translations.
    """
    tokens = constraints[:, 1:]
    return bool(tokens.eq(dictionary.unk()).any())


@repair(
    "load_align_dict",
    fairseq.utils,
    symptom="`--replace-unk` fails at the first unknown word, because hypotheses no longer contain an alignment",
    versions="all versions",
)
def refuse_replace_unk(original: Callable[..., Any], replace_unk: str | None) -> Any:
    """Replaces ``fairseq.utils.load_align_dict`` (``original``): raises SynthesizerError if ``--replace-unk`` is given.

    The flag should replace an unknown word by the source word that it is aligned with. fairseq's search no longer
    returns alignments, so the command would end in an error at the first unknown word.

    Args:
        original: fairseq's function.
        replace_unk: the value of the flag, or None if it is not given.
    """
    if replace_unk is not None:
        raise SynthesizerError(
            "--replace-unk: fairseq can no longer replace unknown words; remove the flag (with subwords, they are rare)"
        )
    return original(replace_unk)


@repair(
    "_build_batches",
    GeneratorHubInterface,
    symptom="In Python, the error of `translate()` for a long sentence advises a flag of the command line",
    versions="all versions",
)
def name_argument_of_translate(
    original: Callable[..., Any], self: GeneratorHubInterface, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``GeneratorHubInterface._build_batches`` (``original``): names an argument of Python instead of a flag.

    ``model.translate(sentences)`` calls this method in a Python program. If a sentence is too long, fairseq's error
    names the flag ``--skip-invalid-size-inputs-valid-test``, which such a program cannot use. The replacement raises
    SynthesizerError with the argument ``skip_invalid_size_inputs=True`` in place of the flag.
    """
    flag = "--skip-invalid-size-inputs-valid-test"
    try:
        return original(self, *args, **kwargs)
    except Exception as error:
        message = str(error)
        if flag not in message:  # an error of another kind
            raise
        # The flag is the end of the sentence "..., skip this example with --skip-invalid-size-inputs-valid-test". What
        # comes after it is not needed.
        message_before_flag, _ = message.split(flag, maxsplit=1)
        new_message = f"{message_before_flag}skip_invalid_size_inputs=True"
        if has_limit_of_synthesizer(message_before_flag):
            new_message += "; longer ones need from_pretrained(..., synth_beyond_length='tile')"
        raise SynthesizerError(new_message) from error
