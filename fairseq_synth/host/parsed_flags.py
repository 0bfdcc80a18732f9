"""Repairs of the command line: functions that check or change the flags of a fairseq command once they are parsed."""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import fairseq.options

from .repairs import always_needed, repair

FlagFunction = Callable[[argparse.Namespace], None]


def repair_parsed_flags(
    *, symptom: str, versions: str, is_needed: Callable[[], bool] = always_needed
) -> Callable[[FlagFunction], FlagFunction]:
    """Registers the decorated function as a repair that is called whenever fairseq has parsed a command line.

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

    register_replacement = repair(
        "parse_args_and_arch", fairseq.options, symptom=symptom, versions=versions, is_needed=is_needed
    )

    def register(repair_flags: FlagFunction) -> FlagFunction:
        """Registers a function that parses the command line and then calls `repair_flags`. Returns `repair_flags`."""
        register_replacement(make_replacement(repair_flags))
        return repair_flags

    return register


def make_replacement(repair_flags: FlagFunction) -> Callable[..., Any]:
    """Returns a function that replaces ``fairseq.options.parse_args_and_arch`` and has the name of `repair_flags`.

    It calls the original and then `repair_flags` with the parsed flags. It returns what the original has returned.
    """

    # The function gets the name and docstring of `repair_flags`, because the name stands for the repair in messages and
    # in FAIRSEQ_SYNTH_NO_REPAIRS.
    @functools.wraps(repair_flags)
    def parse_and_repair(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parsed = original(*args, **kwargs)
        # With parse_known=True, fairseq returns a pair: the flags, and a list of arguments that it does not know.
        flags = parsed[0] if isinstance(parsed, tuple) else parsed
        repair_flags(flags)
        return parsed

    return parse_and_repair


def flag_name(name: str) -> str:
    """Returns the flag that sets a name in fairseq's configuration: ``adam_betas`` -> ``--adam-betas``."""
    return f"--{name.replace('_', '-')}"
