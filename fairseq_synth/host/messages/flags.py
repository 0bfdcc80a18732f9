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
from ..bugs.command_line import get_namespace
from ..repairs import repair


class Literal(NamedTuple):
    """How a flag whose value is written in JSON or Python is read.

    Attributes:
        read: reads the text; raises ValueError or SyntaxError.
        types: the types that fairseq takes.
        description: what to write.
        example: a value, in the quotes that a shell needs.
    """

    read: Callable[[str], Any]
    types: tuple[type, ...]
    description: str
    example: str


LITERALS = {
    "eval_bleu_args": Literal(json.loads, (dict,), "dict in JSON", """'{"beam": 4, "lenpen": 0.6}'"""),
    "eval_bleu_detok_args": Literal(json.loads, (dict,), "dict in JSON", """'{"moses_no_escape": true}'"""),
    "model_overrides": Literal(ast.literal_eval, (dict,), "dict in Python", """"{'synth_beyond_length': 'tile'}\""""),
    "optimizer_overrides": Literal(ast.literal_eval, (dict,), "dict in Python", """"{'lr': [0.0001]}\""""),
    "adam_betas": Literal(ast.literal_eval, (tuple, list), "tuple in Python", '"(0.9, 0.98)"'),
    "character_filters": Literal(ast.literal_eval, (tuple, list), "list in Python", '"[(1, 64), (2, 128)]"'),
}
# only fairseq-interactive has constraints, so a validation with --eval-bleu cannot take them
GENERATION_FLAGS = {field.name for field in dataclasses.fields(GenerationConfig)} - {"constraints"}


def flag_name(name: str) -> str:
    """Returns the flag that sets a name in a config: ``adam_betas`` -> ``--adam-betas``."""
    return f"--{name.replace('_', '-')}"


@repair(
    "parse_args_and_arch",
    fairseq.options,
    symptom="A mistake in a flag written in JSON or Python, as in `--eval-bleu-args`, is not explained",
    versions="all versions",
)
def check_written_flags(original_parse_args_and_arch: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``parse_args_and_arch`` with one that checks the flags whose values are written in JSON or Python.

    fairseq's own error does not name the flag, and it ignores names that generation does not know, such as "beem".
    """
    parsed = original_parse_args_and_arch(*args, **kwargs)
    namespace = get_namespace(parsed)
    for name, literal in LITERALS.items():
        text = getattr(namespace, name, None)
        if isinstance(text, str):
            value = read_literal(flag_name(name), text, literal)
            if name == "eval_bleu_args":
                check_generation_flags(flag_name(name), value)
    check_detokenizer(namespace)
    return parsed


def read_literal(flag: str, text: str, literal: Literal) -> Any:
    """Returns the value of a flag that is written in JSON or Python; raises SynthesizerError if it cannot be read."""
    try:
        value = literal.read(text)
    except (ValueError, SyntaxError):
        value = None
    if not isinstance(value, literal.types):
        raise SynthesizerError(f"{flag} {text}: not a {literal.description}; write it as in {flag} {literal.example}")
    return value


def check_generation_flags(flag: str, value: dict[str, Any]) -> None:
    """Checks that generation has each flag that is named in the value of another; raises SynthesizerError if not."""
    unknown = set(value) - GENERATION_FLAGS
    if unknown:
        names = ", ".join(sorted(unknown))
        raise SynthesizerError(f"{flag}: {names}: no flag of generation, such as beam or lenpen")


def check_detokenizer(namespace: argparse.Namespace) -> None:
    """Checks that the tokenizer of ``--eval-bleu-detok`` exists; raises SynthesizerError otherwise."""
    tokenizers = REGISTRIES["tokenizer"]["registry"]
    if getattr(namespace, "eval_bleu", False) and namespace.eval_bleu_detok not in tokenizers:
        raise SynthesizerError(f"--eval-bleu-detok {namespace.eval_bleu_detok}: choose from {', '.join(tokenizers)}")


@repair(
    "parse_args_and_arch",
    fairseq.options,
    symptom="A flag such as `--lenpen nan` is taken, and what is computed with it is meaningless",
    versions="all versions",
)
def refuse_not_a_number(original_parse_args_and_arch: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``parse_args_and_arch`` with one that raises SynthesizerError if the value of a flag is nan."""
    parsed = original_parse_args_and_arch(*args, **kwargs)
    for name, value in vars(get_namespace(parsed)).items():
        values = value if isinstance(value, list) else [value]
        if any(isinstance(number, float) and math.isnan(number) for number in values):
            raise SynthesizerError(f"{flag_name(name)} nan: give a number")
    return parsed


@repair(
    "parse_args_and_arch",
    fairseq.options,
    symptom="A mistake in `--arch` is answered with the names of all architectures, 13,000 characters",
    versions="all versions",
)
def shorten_choices(
    original_parse_args_and_arch: Any, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``parse_args_and_arch`` with one that answers a mistake with the nearest of many choices.

    The original answers a mistake in ``--arch`` with the names of all architectures.
    """
    original_error = parser.error

    def report_error(message: str) -> Any:
        pattern = r"argument (\S+): invalid choice: '(.*?)' \(choose from (.{500,})\)"
        invalid = re.match(pattern, message, re.DOTALL)
        if not invalid:
            original_error(message)
            return
        flags, value, choices = invalid.groups()
        names = [name.strip("'") for name in choices.split(", ")]
        similar = ", ".join(difflib.get_close_matches(value, names, cutoff=0.3))
        flag = flags.split("/")[0]  # argparse writes all names of a flag, "--arch/-a"
        raise SynthesizerError(f"{flag} {value}: unknown; the nearest are {similar}")

    parser.error = report_error  # type: ignore[method-assign]
    return original_parse_args_and_arch(parser, *args, **kwargs)
