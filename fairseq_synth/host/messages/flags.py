"""Checks flags of fairseq's command line before anything is loaded."""

import argparse
import ast
import dataclasses
import difflib
import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import fairseq.options
from fairseq.dataclass.configs import GenerationConfig
from fairseq.registry import REGISTRIES

from ...errors import SynthesizerError
from ..parsed_flags import flag_name, repair_parsed_flags
from ..repairs import repair


class Literal(NamedTuple):
    """How the value of a flag is written, if it is a dict or a list in JSON or Python.

    Attributes:
        read: returns the value of a text; raises ValueError or SyntaxError if the text is written in another way.
        types: the types that the value may have.
        description: what a user has to write.
        example: a value in the quotes that a shell needs.
    """

    read: Callable[[str], Any]
    types: tuple[type, ...]
    description: str
    example: str


# {name of a flag: how its value is written}
LITERALS = {
    "eval_bleu_args": Literal(json.loads, (dict,), "dict in JSON", """'{"beam": 4, "lenpen": 0.6}'"""),
    "eval_bleu_detok_args": Literal(json.loads, (dict,), "dict in JSON", """'{"moses_no_escape": true}'"""),
    "model_overrides": Literal(ast.literal_eval, (dict,), "dict in Python", """"{'synth_beyond_length': 'tile'}\""""),
    "optimizer_overrides": Literal(ast.literal_eval, (dict,), "dict in Python", """"{'lr': [0.0001]}\""""),
    "adam_betas": Literal(ast.literal_eval, (tuple, list), "tuple in Python", '"(0.9, 0.98)"'),
    "character_filters": Literal(ast.literal_eval, (tuple, list), "list in Python", '"[(1, 64), (2, 128)]"'),
}
# The flags that --eval-bleu-args may set. Constraints are left out, because only fairseq-interactive can read them.
GENERATION_FLAGS = {field.name for field in dataclasses.fields(GenerationConfig)} - {"constraints"}


# argparse's message about a value that is not among the choices of a flag, such as
# "argument --arch/-a: invalid choice: 'transformr' (choose from 'fconv', 'lstm')". The list of choices is long if it
# has 500 characters or more.
LONG_LIST_OF_CHOICES = r"argument (?P<flag>\S+): invalid choice: '(?P<value>.*?)' \(choose from (?P<choices>.{500,})\)"


@repair_parsed_flags(
    symptom="The error for a wrong value of a JSON or Python flag, such as `--eval-bleu-args`, does not name the flag",
    versions="all versions",
)
def check_written_flags(flags: argparse.Namespace) -> None:
    """Checks flags of a fairseq command whose values fairseq reads only later, with errors that do not name the flag.

    These are ``--eval-bleu-detok`` and the flags in `LITERALS`. The value of such a flag is a literal: a dict or a
    list, written in JSON or Python, such as ``--eval-bleu-args '{"beam": 4}'``. If ``--eval-bleu-args`` has a key that
    does not exist, such as "beem", fairseq would ignore it.

    Raises:
        SynthesizerError: a value cannot be read, ``--eval-bleu-args`` has an unknown key, or the tokenizer of
            ``--eval-bleu-detok`` does not exist.
    """
    for name, literal in LITERALS.items():
        text = getattr(flags, name, None)
        if not isinstance(text, str):
            continue  # this command has no such flag, or the flag is not given
        flag = flag_name(name)
        value = read_literal(flag, text, literal)
        if flag == "--eval-bleu-args":
            check_generation_flags(flag, settings=value)
    check_detokenizer(flags)


def read_literal(flag: str, text: str, literal: Literal) -> Any:
    """Returns the value of a flag that is written in JSON or Python; raises SynthesizerError if it cannot be read.

    Args:
        flag: the name of the flag, for the error.
        text: what the user has written.
        literal: how the value should be written.
    """
    message = f"{flag} {text}: not a {literal.description}; write it as in {flag} {literal.example}"
    try:
        value = literal.read(text)
    except (ValueError, SyntaxError):
        # The error of the parser says less than this message.
        raise SynthesizerError(message) from None
    if not isinstance(value, literal.types):
        raise SynthesizerError(message)
    return value


def check_generation_flags(flag: str, settings: dict[str, Any]) -> None:
    """Checks that each key of the value of ``--eval-bleu-args`` is a flag of fairseq's generation, such as "beam".

    Raises SynthesizerError otherwise.
    """
    unknown = set(settings) - GENERATION_FLAGS
    if unknown:
        names = ", ".join(sorted(unknown))
        raise SynthesizerError(f"{flag}: {names}: not a flag of fairseq-generate; use flags such as beam or lenpen")


def check_detokenizer(flags: argparse.Namespace) -> None:
    """Checks that the tokenizer of ``--eval-bleu-detok`` exists; raises SynthesizerError otherwise."""
    tokenizers = REGISTRIES["tokenizer"]["registry"]
    if getattr(flags, "eval_bleu", False) and flags.eval_bleu_detok not in tokenizers:
        raise SynthesizerError(f"--eval-bleu-detok {flags.eval_bleu_detok}: choose from {', '.join(tokenizers)}")


@repair_parsed_flags(
    symptom="Flags such as `--lenpen nan` are accepted, but give meaningless results",
    versions="all versions",
)
def refuse_not_a_number(flags: argparse.Namespace) -> None:
    """Raises SynthesizerError if the value of a flag, or a number in its list, is nan.

    fairseq accepts, for example, ``--lenpen nan`` or ``--lr nan``, and computes meaningless results.
    """
    for name, value in vars(flags).items():
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            if isinstance(number, float) and math.isnan(number):
                raise SynthesizerError(f"{flag_name(name)} nan: must be a number")


@repair(
    "parse_args_and_arch",
    fairseq.options,
    symptom="A typing error in `--arch` gives an error of 13,000 characters with the names of all architectures",
    versions="all versions",
)
def shorten_choices(original: Callable[..., Any], parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``fairseq.options.parse_args_and_arch`` (``original``): suggests similar names for a wrong ``--arch``.

    If the value of a flag is not one of its choices, argparse calls the method ``error`` of the parser with a message
    that lists all choices. For ``--arch`` this list has 13,000 characters. The replacement first changes this method of
    the parser, and then lets fairseq parse the command line.
    """
    error_of_argparse = parser.error  # It prints the message and ends the process.

    def report_error(message: str) -> None:
        """Raises SynthesizerError if the message lists very many choices; otherwise reports it as argparse does."""
        suggestion = suggest_similar_choices(message)
        if suggestion is not None:
            raise SynthesizerError(suggestion)
        error_of_argparse(message)

    parser.error = report_error  # type: ignore[method-assign, assignment]
    return original(parser, *args, **kwargs)


def suggest_similar_choices(message: str) -> str | None:
    """Returns a line with the choices that are most similar to a user's wrong value.

    For example, the message "argument --arch/-a: invalid choice: 'transformr' (choose from 'fconv', 'lstm', …)" becomes
    "--arch transformr: unknown; the most similar names are transformer, …".

    Args:
        message: argparse's message about a flag.

    Returns:
        The line; None if the message does not list very many choices.
    """
    match = re.match(LONG_LIST_OF_CHOICES, message, re.DOTALL)
    if match is None:
        return None
    value = match["value"]
    choices = [name.strip("'") for name in match["choices"].split(", ")]
    similar_choices = difflib.get_close_matches(value, choices, cutoff=0.3)  # at most three
    flag = match["flag"].split("/")[0]  # argparse writes all names of a flag, such as "--arch/-a"
    return f"{flag} {value}: unknown; the most similar names are {', '.join(similar_choices)}"
