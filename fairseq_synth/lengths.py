"""What the limit of a Synthesizer, --synth-max-length, means for flags that fairseq keeps elsewhere."""

from typing import Any, Optional

from .errors import SynthesizerError


def check_padding(task: Any, max_length: int) -> None:
    """Refuses ``--required-seq-len-multiple`` if it would pad sentences that fit the model beyond `max_length`.

    Raises:
        SynthesizerError: names lengths that would do.
    """
    multiple = flag_of(task, "required_seq_len_multiple") or 1
    below = max_length // multiple * multiple
    if below < max_length:
        fitting = [str(length) for length in (below, below + multiple) if length]
        raise SynthesizerError(
            f"--required-seq-len-multiple {multiple}: sentences of more than {below} tokens would be padded beyond "
            f"--synth-max-length {max_length}; leave it out, or train with --synth-max-length {' or '.join(fitting)}"
        )


def cut_sources(task: Any, max_positions: int) -> None:
    """Lets ``--truncate-source`` cut at what the model reads: fairseq cuts at ``--max-source-positions``."""
    if flag_of(task, "truncate_source") and flag_of(task, "max_source_positions") > max_positions:
        flags_of(task).max_source_positions = max_positions


def check_min_len(generation: Any, max_positions: int, max_length: Optional[int]) -> None:
    """Refuses a ``--min-len`` above what the model writes: `max_positions` tokens, the end of sentence included.

    Raises:
        SynthesizerError: names the longest that is possible.
    """
    most = max_positions - 1
    if getattr(generation, "min_len", 1) > most:
        is_own = max_positions == max_length
        limit = f"--synth-max-length {max_length}" if is_own else f"--max-target-positions {max_positions}"
        raise SynthesizerError(
            f"--min-len {generation.min_len}: this model writes at most {most} tokens and the end of sentence "
            f"({limit}); choose at most {most}"
        )


def check_fusion(generation: Any, max_length: Optional[int]) -> None:
    """Refuses a search with a language model of ``--lm-path`` that cannot read all that the flags allow to be written.

    Raises:
        SynthesizerError: names the flags that would do.
    """
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
