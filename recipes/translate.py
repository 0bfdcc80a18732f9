"""Translates sentences with a trained model: one a line, from standard input to standard output.

  echo "A man plays the guitar." | scripts/translate.sh DATA_DIR RUN_DIR [options] [-- flags for fairseq-interactive]

  DATA_DIR  made by prepare.sh. The sentences are normalised, tokenised, lowercased and
            split into subwords as this text was
  RUN_DIR   trained on it by train.sh. The checkpoint is the average that evaluate.sh has made, else the best one

The command goes to standard error. DRY_RUN=1 only shows it.
"""

import argparse
import contextlib
import dataclasses
import io
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Sequence

from .command import Parser, UserError, dry_run, folder, integer, reason, show, split_flags, started
from .prepare import last_words
from .scoring import read_data_settings, read_run_settings, recipe_of
from .train import best_checkpoint, set_threads
from .translation import Translation, generation_flags, hypotheses, too_long


def as_prepared(text: str, settings: Dict[str, str], model: Path) -> List[str]:
    """Lines as prepare.sh has them before it normalises: no other separators, lowercased and cut if its text is.

    `model`: of the subwords, if SentencePiece has made them.
    """
    lines = [" ".join(line.split()) for line in io.StringIO(text, newline="\n")]
    lines = [line.lower() for line in lines] if settings["lowercase"] else lines
    most = int(settings.get("truncate_source") or 0)
    if not most or settings["subwords"] != "sentencepiece":
        return lines
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    pieces = [processor.encode(line, out_type=str) for line in lines]
    # pieces of a text's first or last words are its first or last pieces
    if settings.get("keep_end"):
        return [processor.decode(last_words(line, most - 1, "sentencepiece")) for line in pieces]
    return [processor.decode(line[: most - 1]) for line in pieces]


def pipeline(settings: Dict[str, str], flags: Sequence[object]) -> List[List[object]]:
    """The programs from text to translations, for data with these settings. `flags`: of fairseq-interactive."""
    # all sentences at once: its errors number them from the first of a buffer
    interactive = ["fairseq-interactive", *flags, "--buffer-size", 1000000]
    if settings["subwords"] == "sentencepiece":
        return [interactive]
    if not settings["dash_splits"]:
        interactive.append("--moses-no-dash-splits")  # by default fairseq splits words at hyphens
    return [["sacremoses", "--quiet", "-l", settings["src"], "normalize", "-c"], interactive]


def main(argv: Sequence[str]) -> None:
    own, rest = split_flags(argv)
    parser = Parser("translate", __doc__)
    parser.argument_default = argparse.SUPPRESS
    add = parser.add_argument
    add("data", metavar="DATA_DIR", type=folder)
    add("run", metavar="RUN_DIR", type=folder)
    add("--beam", type=integer(1), metavar="N", help="(default: the recipe's)")
    add("--lenpen", type=float, metavar="X", help="length penalty (default: the recipe's)")
    options = vars(parser.parse_args(own))
    refused = {"--nbest": "writes one translation of each line", "--input": "reads standard input, as in < FILE"}
    for flag in (word.split("=")[0] for word in rest):
        if flag in refused:
            raise UserError(f"-- {flag}: translate.sh {refused[flag]}; leave it out")
    data, run_dir = options.pop("data"), options.pop("run")
    settings = read_data_settings(data)
    if "src" not in settings:
        raise UserError(f"{data}: was prepared for {settings['task']}; translate.sh needs parallel text")
    recipe = recipe_of(Translation, run_dir, read_run_settings(data, run_dir))
    set_threads(recipe.threads)
    flags = generation_flags(data, settings, best_checkpoint(run_dir), dataclasses.replace(recipe, **options))
    programs = pipeline(settings, [*flags, *rest])
    with contextlib.redirect_stdout(sys.stderr):
        for program in programs:
            show(program)
    if dry_run():
        return
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")  # a byte-order mark is no part of the first word
    except UnicodeDecodeError as error:
        raise UserError(f"standard input: not UTF-8 ({error.reason} {error.object[error.start]:#x})") from None
    for line in translate(programs, as_prepared(text, settings, data / "pieces.model")):
        print(line)


def translate(programs: Sequence[Sequence[object]], lines: Sequence[str]) -> List[str]:
    """What a `pipeline` makes of each line; an empty one stays empty."""
    numbers = [number for number, line in enumerate(lines, 1) if line]
    if not numbers:
        return list(lines)
    command = " | ".join(shlex.join(map(str, program)) for program in programs)
    pipes: Dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with started(["bash", "-euo", "pipefail", "-c", command], encoding="utf-8", **pipes) as process:
        written, errors = process.communicate("".join(f"{line}\n" for line in lines if line))
    long = too_long(errors)
    if long:
        tile = """, or give -- --model-overrides "{'synth_beyond_length': 'tile'}\""""
        raise UserError(
            f"standard input: line {numbers[long[0] - 1]} is longer than the model's {long[1]} tokens; split it"
            + (tile if "synth-max-length" in errors else "")
        )
    if process.returncode:
        raise UserError(f"{programs[-1][0]} failed: {reason(errors)}")
    translations = iter(hypotheses(written, "D", len(numbers), str(programs[-1][0])))
    return [line and next(translations) for line in lines]
