"""Times functions in turns, so that changes of the machine's speed meet all of them alike."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Function = Callable[[], Any]
Stopwatch = Callable[[Function], float]  # calls a function and returns the seconds that it took


class Comparison(NamedTuple):
    """How many times as fast as a baseline a function is, over several rounds in which both were timed."""

    ratio: float  # the baseline's time divided by the function's time in the same round: the median over the rounds
    lowest: float  # the lowest of these ratios
    highest: float  # the highest of these ratios
    seconds: float  # the function's own time: the median over the rounds


def compare_in_turns(
    functions: Mapping[str, Function], baseline: str, stopwatch: Stopwatch, rounds: int, warm_up: int
) -> dict[str, Comparison]:
    """Times several functions in turns, and compares each with one of them, the baseline.

    Args:
        functions: {name: function}; one round calls each function once.
        baseline: the name of the function with which all are compared.
        stopwatch: calls a function and returns the seconds that it took.
        rounds: how many rounds count.
        warm_up: how many rounds are run before them and do not count.

    Returns:
        {name: the function's speed relative to the baseline}, also for the baseline itself.
    """
    seconds_by_name = time_in_turns(functions, stopwatch, rounds, warm_up)
    baseline_seconds = seconds_by_name[baseline]
    return {name: compare(seconds, baseline_seconds) for name, seconds in seconds_by_name.items()}


def time_in_turns(
    functions: Mapping[str, Function], stopwatch: Stopwatch, rounds: int, warm_up: int
) -> dict[str, list[float]]:
    """Calls each function once in every round, and returns {name: the seconds that it took in each round}.

    Args:
        functions: {name: function}.
        stopwatch: calls a function and returns the seconds that it took.
        rounds: how many rounds count.
        warm_up: how many rounds are run before them and do not count.
    """
    names = list(functions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(warm_up + rounds):
        # Each round begins with another function, so that no function is always called after the same one.
        first = round_number % len(names)
        for name in names[first:] + names[:first]:
            duration = stopwatch(functions[name])
            if round_number >= warm_up:
                seconds[name].append(duration)
    return seconds


def compare(seconds: Sequence[float], baseline_seconds: Sequence[float]) -> Comparison:
    """Compares the times of a function with the times of the baseline in the same rounds."""
    ratios = [baseline_time / time for baseline_time, time in zip(baseline_seconds, seconds)]
    return Comparison(
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        seconds=statistics.median(seconds),
    )
