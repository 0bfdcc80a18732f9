"""Repairs of the command line: functions that check or change the flags of a fairseq command once they are parsed."""

import argparse
from collections.abc import Callable
from typing import Any

import fairseq.options

from .repairs import Place, always_needed, register_replacement

FlagFunction = Callable[[argparse.Namespace], None]


def repair_parsed_flags(
    *, symptom: str, versions: str, is_needed: Callable[[], bool] = always_needed
) -> Callable[[FlagFunction], FlagFunction]:
    """Is a decorator: fairseq calls the decorated function whenever it has parsed a command line.

    The decorated function gets the flags. It may change them in place, or raise SynthesizerError if one of them cannot
    be used. It is called after ``fairseq.options.parse_args_and_arch``, and so before anything is loaded. For example:

        @repair_parsed_flags(symptom="`--bf16` makes the command line ask for a TPU", versions="0.12.2 and later")
        def allow_bf16_without_tpu(flags):
            flags.tpu = False

    Args:
        symptom: what goes wrong in fairseq without the repair; Markdown, without a full stop.
        versions: the versions of fairseq that have the symptom.
        is_needed: returns whether the installed fairseq, Python or torch needs the repair.
    """
    parser = Place(fairseq.options, "parse_args_and_arch")  # fairseq's function that parses a command line

    def register(repair_flags: FlagFunction) -> FlagFunction:
        """Registers the decorated function with the arguments of the decorator, and returns it unchanged."""
        parse_and_repair = call_after_parsing(repair_flags)  # takes the place of the parser
        register_replacement(
            parse_and_repair, places=(parser,), symptom=symptom, versions=versions, is_needed=is_needed
        )
        return repair_flags

    return register


def call_after_parsing(repair_flags: FlagFunction) -> Callable[..., Any]:
    """Returns a replacement for ``fairseq.options.parse_args_and_arch``, which also calls `repair_flags`.

    The replacement parses the command line with the original, which it gets as its first argument. Then it calls
    `repair_flags` with the parsed flags, and returns the result of the original.
    """

    def parse_and_repair(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parsed = original(*args, **kwargs)
        # With parse_known=True, fairseq returns a pair: the flags, and a list of arguments that it does not know.
        flags = parsed[0] if isinstance(parsed, tuple) else parsed
        repair_flags(flags)
        return parsed

    # The name of a replacement is the name by which users switch the repair off.
    parse_and_repair.__name__ = repair_flags.__name__
    return parse_and_repair


def flag_name(name: str) -> str:
    """Returns the flag that sets a name in fairseq's configuration: ``adam_betas`` -> ``--adam-betas``."""
    return f"--{name.replace('_', '-')}"
