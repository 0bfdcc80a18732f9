"""Repairs of fairseq's command line, and checks of flags before anything is loaded."""

import argparse
import ast
import dataclasses
import difflib
import importlib.util
import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fairseq.options
from fairseq.data.data_utils import infer_language_pair
from fairseq.dataclass.configs import GenerationConfig
from fairseq.registry import REGISTRIES
from fairseq.tasks.denoising import DenoisingTask
from fairseq.utils import split_paths

from ..errors import SynthesizerError
from .repairs import repair

# flags with a value in JSON or Python: what reads it, what it is, and an example
WRITTEN: dict[str, tuple[Callable[[str], Any], type, str]] = {
    "eval_bleu_args": (json.loads, dict, '{"beam": 4, "lenpen": 0.6}'),
    "eval_bleu_detok_args": (json.loads, dict, '{"moses_no_escape": true}'),
    "model_overrides": (ast.literal_eval, dict, "{'synth_beyond_length': 'tile'}"),
    "optimizer_overrides": (ast.literal_eval, dict, "{'lr': [0.0001]}"),
    "adam_betas": (ast.literal_eval, tuple, "(0.9, 0.98)"),
    "character_filters": (ast.literal_eval, list, "[(1, 64), (2, 128)]"),
}
# constraints are of fairseq-interactive alone
GENERATION = {field.name for field in dataclasses.fields(GenerationConfig)} - {"constraints"}


def namespace_of(parsed: Any) -> argparse.Namespace:
    """The flags in what fairseq's `parse_args_and_arch` returns, with unknown ones behind them or without."""
    return parsed[0] if isinstance(parsed, tuple) else parsed


@repair("parse_args_and_arch", fairseq.options, where=lambda: importlib.util.find_spec("torch_xla") is None)
def allow_bf16_without_tpu(parse_args_and_arch: Any, *args: Any, **kwargs: Any) -> Any:
    """``--bf16`` makes the command line ask for a TPU (0.12.2 and later).

    The error is "'NoneType' object has no attribute 'xla_device'". Hydra's ``common.bf16=true`` works. Without
    torch_xla there can be no TPU.
    """
    parsed = parse_args_and_arch(*args, **kwargs)
    namespace = namespace_of(parsed)
    if getattr(namespace, "bf16", False):
        namespace.tpu = False
    return parsed


@repair("parse_args_and_arch", fairseq.options)
def check_written_flags(parse_args_and_arch: Any, *args: Any, **kwargs: Any) -> Any:
    """JSON or Python with a mistake, as in ``--eval-bleu-args``, is no word about the flag (all versions).

    A name that is none of generation's, such as "beem", is ignored. Here a line names the flag.
    """
    parsed = parse_args_and_arch(*args, **kwargs)
    namespace = namespace_of(parsed)
    for name, (read, kind, example) in WRITTEN.items():
        text = getattr(namespace, name, None)
        if not isinstance(text, str):
            continue
        flag = f"--{name.replace('_', '-')}"
        try:
            value = read(text)
            is_readable = isinstance(value, dict if kind is dict else (tuple, list))  # fairseq takes either of the two
        except (ValueError, SyntaxError):
            is_readable = False
        if not is_readable:
            language, quote = ("JSON", "'") if read is json.loads else ("Python", '"')
            raise SynthesizerError(
                f"{flag} {text}: not a {kind.__name__} in {language}; write it as in {flag} {quote}{example}{quote}"
            )
        unknown = set(value) - GENERATION if name == "eval_bleu_args" else set()
        if unknown:
            raise SynthesizerError(
                f"{flag}: {', '.join(sorted(unknown))}: no flag of generation, such as beam or lenpen"
            )
    tokenizers = REGISTRIES["tokenizer"]["registry"]
    if getattr(namespace, "eval_bleu", False) and namespace.eval_bleu_detok not in tokenizers:
        raise SynthesizerError(f"--eval-bleu-detok {namespace.eval_bleu_detok}: choose from {', '.join(tokenizers)}")
    return parsed


@repair("parse_args_and_arch", fairseq.options)
def find_languages_of_tokenizer(parse_args_and_arch: Any, *args: Any, **kwargs: Any) -> Any:
    """``--tokenizer moses`` without ``--source-lang`` and ``--target-lang`` ends in an error of Hydra's (all versions).

    Without the tokenizer fairseq finds them out by the names of the data.
    """
    parsed = parse_args_and_arch(*args, **kwargs)
    namespace = namespace_of(parsed)
    languages = ("source_lang", "target_lang")
    if getattr(namespace, "tokenizer", None) and any(getattr(namespace, side, "") is None for side in languages):
        found = infer_language_pair(split_paths(namespace.data)[0])
        for side, language in zip(languages, found):
            if getattr(namespace, side) is None:
                setattr(namespace, side, language)
        if None in found:
            raise SynthesizerError(
                f"--tokenizer {namespace.tokenizer}: give --source-lang and --target-lang, which {namespace.data} does "
                "not tell"
            )
    return parsed


@repair("parse_args_and_arch", fairseq.options)
def shorten_choices(parse_args_and_arch: Any, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
    """A mistake in ``--arch`` is answered with the names of all architectures, 13,000 characters (all versions)."""
    usual = parser.error

    def error(message: str) -> Any:
        found = re.match(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.{500,})\)", message, re.DOTALL)
        if not found:
            usual(message)
            return
        names = [name.strip("'") for name in found[3].split(", ")]
        near = difflib.get_close_matches(found[2], names, cutoff=0.3)
        raise SynthesizerError(f"{found[1].split('/')[0]} {found[2]}: unknown; the nearest are {', '.join(near)}")

    parser.error = error  # type: ignore[method-assign]
    return parse_args_and_arch(parser, *args, **kwargs)


@repair("add_args", DenoisingTask, where=lambda: "add_args" in vars(DenoisingTask))
def share_flags_with_the_model(add_args: Any, parser: argparse.ArgumentParser) -> None:
    """``--task denoising`` with a Transformer ends in "conflicting option string: --max-source-positions" (0.12.2)."""

    def add_argument(flag: str, **settings: Any) -> None:
        try:
            parser.add_argument(flag, **settings)
        except argparse.ArgumentError:  # the model has it
            parser.set_defaults(**{flag.lstrip("-").replace("-", "_"): settings["default"]})

    add_args(SimpleNamespace(add_argument=add_argument))
