"""The limit of a model, ``--synth-max-length``: what refuses what is longer, and what it means for other flags."""

import logging
import re
from typing import Any, NamedTuple

from .errors import SynthesizerError

logger = logging.getLogger(__name__)

# --synth-max-length of every model that this process has built with such a limit, for messages
known_limits: set[int] = set()


class Limit(NamedTuple):
    """The longest sentence that a model takes, and the flag that sets it."""

    tokens: int
    flag: str


def announce_limit(task: Any, limit: Limit | None) -> None:
    """Makes the limit known. Raises SynthesizerError if ``--required-seq-len-multiple`` pads sentences that fit beyond
    it."""
    if limit is None:
        return
    multiple = flag_of(task, "required_seq_len_multiple") or 1
    below = limit.tokens // multiple * multiple
    if below < limit.tokens:
        fitting = [str(length) for length in (below, below + multiple) if length]
        raise SynthesizerError(
            f"--required-seq-len-multiple {multiple}: sentences of more than {below} tokens would be padded beyond "
            f"{limit.flag} {limit.tokens}; leave it out, or train with {limit.flag} {' or '.join(fitting)}"
        )
    known_limits.add(limit.tokens)
    logger.info(f"{limit.flag} {limit.tokens}: longer sentences are skipped in training, refused elsewhere")


def check_rows(flag: str, length: int, limit: Limit | None, add_bos_token: bool = False) -> None:
    """Raises SynthesizerError if rows of `length` tokens, as `flag` has them, are above the model's limit.

    With ``--add-bos-token`` each row is one token longer, which fairseq does not count.
    """
    longest = length + add_bos_token
    if limit is not None and longest > limit.tokens:
        raise SynthesizerError(
            f"{flag} {length}{' with --add-bos-token' if add_bos_token else ''} is above {limit.flag} {limit.tokens}: "
            f"lower it to {limit.tokens - add_bos_token}, or train with {limit.flag} {longest} or "
            "--synth-beyond-length tile"
        )


def length_hint(text: str) -> str:
    """What to add to a message if the limit that it names, ``max_positions=(24, 1024)``, may be a Synthesizer's."""
    numbers = re.findall(r"\d+", "".join(re.findall(r"max_positions=(\([^)]*\)|\d+)", text)))
    lengths = known_limits.intersection(map(int, numbers))
    hint = (
        "; {} is this model's --synth-max-length: longer sentences need --synth-beyond-length tile, with a trained "
        "model --model-overrides \"{{'synth_beyond_length': 'tile'}}\""
    )
    return "".join(hint.format(n) for n in sorted(lengths))


def cut_sources(task: Any, max_positions: int) -> None:
    """Lets ``--truncate-source`` cut at what the model reads: fairseq cuts at ``--max-source-positions``."""
    if flag_of(task, "truncate_source") and flag_of(task, "max_source_positions") > max_positions:
        flags_of(task).max_source_positions = max_positions


def check_min_len(generation: Any, decoder: Any) -> None:
    """Raises SynthesizerError for a ``--min-len`` above the decoder's positions without that of the end of sentence."""
    most = decoder.max_positions() - 1
    if getattr(generation, "min_len", 1) > most:
        flag = "--synth-max-length" if most + 1 == decoder.max_length else "--max-target-positions"
        raise SynthesizerError(
            f"--min-len {generation.min_len}: this model writes at most {most} tokens and the end of sentence "
            f"({flag} {most + 1}); choose at most {most}"
        )


def check_fusion(generation: Any, max_length: int | None) -> None:
    """Raises SynthesizerError if the language model of ``--lm-path`` cannot read all that a search may write."""
    if not getattr(generation, "lm_path", None) or max_length is None:
        return
    # the model reads the end of sentence before the output
    if generation.match_source_len or generation.max_len_a or generation.max_len_b >= max_length:
        raise SynthesizerError(
            f"--lm-path: this language model reads up to {max_length} tokens (its --synth-max-length); give "
            f"--max-len-a 0 and at most --max-len-b {max_length - 1}, without --match-source-len"
        )


def flag_of(task: Any, name: str) -> Any:
    """A flag of the task, or None where it has no such flag."""
    return getattr(flags_of(task), name, None)


def flags_of(task: Any) -> Any:
    """The flags of a task: those of fairseq's older kind of task are called ``args``."""
    return getattr(task, "cfg", None) or getattr(task, "args", None)
