"""Checks that other flags fit ``--synth-max-length``, the longest sentence of a model, and explains errors about it."""

import logging
import re
from typing import Any, NamedTuple

from .errors import SynthesizerError

logger = logging.getLogger(__name__)

# The --synth-max-length of every model that this process has built with such a limit. fairseq's errors about lengths
# contain only a number. If the number is in this set, our message can name the flag that it comes from.
known_limits: set[int] = set()


class Limit(NamedTuple):
    """The longest sentence that a model takes, and the flag that sets it."""

    tokens: int
    flag: str


def check_and_announce_limit(task: Any, limit: Limit | None) -> None:
    """Checks that padding respects the limit of a new model, logs the limit, and adds it to `known_limits`.

    This is called after the model has been built, so that no limit is announced if building fails.

    Args:
        task: fairseq's task.
        limit: the longest sentence of the model. With None, nothing is done.

    Raises:
        SynthesizerError: ``--required-seq-len-multiple`` would pad some sentences to a length beyond the limit.
    """
    if limit is None:
        return
    check_padding(task, limit)
    known_limits.add(limit.tokens)
    logger.info(f"{limit.flag} {limit.tokens}: training skips longer sentences, and other commands refuse them")


def check_padding(task: Any, limit: Limit) -> None:
    """Checks that no sentence within the limit is padded to a length beyond it.

    ``--required-seq-len-multiple`` pads every sentence to a multiple of a number. So the limit has to be such a
    multiple itself. For example, with a limit of 100 tokens and multiples of 8, a sentence of 97 tokens would be padded
    to 104. The message then advises a limit of 96 or 104.

    Args:
        task: fairseq's task, which has the flag ``--required-seq-len-multiple``.
        limit: the longest sentence of the model.

    Raises:
        SynthesizerError: the limit is no multiple of ``--required-seq-len-multiple``.
    """
    multiple = task_flag(task, "required_seq_len_multiple") or 1
    if limit.tokens % multiple == 0:
        return
    lower_multiple = limit.tokens - limit.tokens % multiple  # 0 if the limit is smaller than the number
    higher_multiple = lower_multiple + multiple
    choices = f"{lower_multiple} or {higher_multiple}" if lower_multiple > 0 else str(higher_multiple)
    raise SynthesizerError(
        f"--required-seq-len-multiple {multiple}: sentences of more than {lower_multiple} tokens would be padded "
        f"beyond {limit.flag} {limit.tokens}; remove the flag, or train with {limit.flag} {choices}"
    )


def check_rows(flag: str, length: int, limit: Limit | None, add_bos_token: bool = False) -> None:
    """Checks that the rows, into which fairseq cuts a text for a model, are not longer than the model's limit.

    Args:
        flag: the flag that sets the length of the rows.
        length: the value of the flag, in tokens.
        limit: the model's limit, if it has one.
        add_bos_token: whether ``--add-bos-token`` puts a token before each row, which `length` does not count.

    Raises:
        SynthesizerError: the rows are longer than the limit.
    """
    num_bos_tokens = 1 if add_bos_token else 0
    num_tokens_read = length + num_bos_tokens
    if limit is None or num_tokens_read <= limit.tokens:
        return
    largest_length = limit.tokens - num_bos_tokens
    with_bos = " with --add-bos-token" if add_bos_token else ""
    raise SynthesizerError(
        f"{flag} {length}{with_bos} is above {limit.flag} {limit.tokens}: lower it to {largest_length}, "
        f"or train with {limit.flag} {num_tokens_read} or --synth-beyond-length tile"
    )


def length_hint(text: str) -> str:
    """Returns a hint on ``--synth-max-length`` to add to a message of fairseq about a sentence that is too long.

    The result is empty if no Synthesizer of this process has the limit in the message.

    Args:
        text: the message, such as "… max_positions=24 …".
    """
    return hint_on_limits(limits_in_message(text))


def hint_on_limits(limits: set[int]) -> str:
    """Returns a hint for each limit that is the ``--synth-max-length`` of a Synthesizer of this process.

    The hints say what to do about a longer sentence. Without such a limit, the result is empty.

    Args:
        limits: numbers of tokens, from a message of fairseq.
    """
    hints = ""
    limits_of_synthesizers = limits & known_limits
    for length in sorted(limits_of_synthesizers):
        hints += (
            f"; {length} is this model's --synth-max-length: for longer sentences, train with --synth-beyond-length "
            "tile, or use a trained model with --model-overrides \"{'synth_beyond_length': 'tile'}\""
        )
    return hints


def limits_in_message(text: str) -> set[int]:
    """Returns the limits in a message of fairseq: ``max_positions=24`` -> {24}; ``max_positions=(24, 9)`` -> {24, 9}.

    Other numbers in the message, such as the length of the sentence, are no limits.
    """
    values = re.findall(r"max_positions=(\([^)]*\)|\d+)", text)  # ["24"] or ["(24, 9)"]
    numbers = re.findall(r"\d+", " ".join(values))  # ["24"] or ["24", "9"]
    return {int(number) for number in numbers}


def has_limit_of_synthesizer(message: str) -> bool:
    """Returns whether a message of fairseq has the ``--synth-max-length`` of a model of this process as its limit."""
    return includes_limit_of_synthesizer(limits_in_message(message))


def includes_limit_of_synthesizer(limits: set[int]) -> bool:
    """Returns whether one of these limits is the ``--synth-max-length`` of a model of this process."""
    return not limits.isdisjoint(known_limits)


def explain_empty_dataset(text: str) -> str:
    """Returns fairseq's message about an empty data set, with a possible reason: all sentences have been skipped.

    Sentences are skipped if they are longer than a limit. `known_limits` has the limits of this process's models.

    Args:
        text: fairseq's message.
    """
    message = text.rstrip(".")
    if not known_limits:
        return message
    limits = " or ".join(f"--synth-max-length {length}" for length in sorted(known_limits))
    return (
        f"{message}; sentences that are longer than {limits}, or than other flags such as --max-tokens allow, "
        "are skipped"
    )


def make_task_cut_sources(task: Any, max_positions: int) -> None:
    """Makes ``--truncate-source`` cut source sentences to the length that the model can read.

    fairseq cuts them to ``--max-source-positions``. If this is longer, the flag's value in the task is lowered.

    Args:
        task: fairseq's task.
        max_positions: the number of tokens that the model can read.
    """
    if task_flag(task, "truncate_source") and task_flag(task, "max_source_positions") > max_positions:
        task_flags(task).max_source_positions = max_positions


def check_min_len(generation: Any, decoder: Any) -> None:
    """Checks that a model can write as many tokens as ``--min-len`` demands.

    Args:
        generation: fairseq's flags of the search, or None.
        decoder: the model's decoder.

    Raises:
        SynthesizerError: the model writes fewer tokens.
    """
    num_positions = decoder.max_positions()  # the smaller value of --max-target-positions and --synth-max-length
    longest_output = num_positions - 1  # One position is for the end of sentence, which --min-len does not count.
    min_len = getattr(generation, "min_len", 1)  # Without the flags of a search, this is fairseq's default.
    if min_len <= longest_output:
        return
    is_limited_by_functions = num_positions == decoder.max_length  # `max_length` is the value of --synth-max-length.
    if is_limited_by_functions:
        limiting_flag = "--synth-max-length"
    else:
        limiting_flag = "--max-target-positions"
    raise SynthesizerError(
        f"--min-len {min_len}: this model generates at most {longest_output} tokens and the end-of-sentence "
        f"token ({limiting_flag} {num_positions}); choose at most {longest_output}"
    )


def check_fusion(generation: Any, decoder: Any) -> None:
    """Checks that the language model of ``--lm-path`` can read the longest sentence that a search may write.

    Without ``--lm-path`` there is nothing to check.

    Args:
        generation: fairseq's flags of the search, or None.
        decoder: the language model's decoder.

    Raises:
        SynthesizerError: the search may write a longer sentence.
    """
    has_language_model = bool(getattr(generation, "lm_path", None))
    if not has_language_model:
        return
    max_length = decoder.max_length  # --synth-max-length of the language model
    if max_length is None:
        return  # It reads sentences of any length.

    # The language model reads the end-of-sentence token and then the output.
    longest_readable_output = max_length - 1
    # The search writes up to --max-len-b tokens, and for a long source even more with --match-source-len or
    # --max-len-a.
    length_depends_on_source = generation.match_source_len or generation.max_len_a != 0
    may_be_too_long = length_depends_on_source or generation.max_len_b > longest_readable_output
    if may_be_too_long:
        raise SynthesizerError(
            f"--lm-path: this language model reads up to {max_length} tokens (its --synth-max-length); use "
            f"--max-len-a 0 and at most --max-len-b {longest_readable_output}, without --match-source-len"
        )


def task_flag(task: Any, name: str) -> Any:
    """Returns the value of a task's flag, or None if the task has no such flag."""
    return getattr(task_flags(task), name, None)


def task_flags(task: Any) -> Any:
    """Returns the flags of a task: its attribute ``cfg``, or ``args`` in fairseq's older kind of task."""
    return getattr(task, "cfg", None) or getattr(task, "args", None)
