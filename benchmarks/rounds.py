"""Times functions in turns, so that changes of the machine's speed meet all of them alike."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Function = Callable[[], Any]
Stopwatch = Callable[[Function], float]  # calls a function and returns the seconds that it took


class Comparison(NamedTuple):
    """How many times as fast as the baseline a function is."""

    ratio: float  # the baseline's time over the function's in the same round: the median over rounds
    lowest: float  # of all rounds
    highest: float
    seconds: float  # the function's own time: the median over rounds


def compare_in_turns(
    functions: Mapping[str, Function], baseline: str, stopwatch: Stopwatch, rounds: int, warm_up: int
) -> dict[str, Comparison]:
    """Times each function once in each round, and returns {name: its speed relative to the baseline}.

    Args:
        functions: {name: what is timed}.
        baseline: the name of the function with which all are compared.
        stopwatch: calls a function and returns the seconds that it took.
        rounds: how many times each function is timed.
        warm_up: how many rounds before these are not counted.
    """
    seconds = time_in_turns(functions, stopwatch, rounds, warm_up)
    return {name: compare(seconds[baseline], seconds[name]) for name in functions}


def time_in_turns(
    functions: Mapping[str, Function], stopwatch: Stopwatch, rounds: int, warm_up: int
) -> dict[str, list[float]]:
    """Returns {name: the seconds of each round}, without the rounds of warm-up."""
    names = list(functions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warm_up + rounds):
        # each round begins with another function, so that none always follows the same one
        first = number % len(names)
        for name in names[first:] + names[:first]:
            duration = stopwatch(functions[name])
            if number >= warm_up:
                seconds[name].append(duration)
    return seconds


def compare(baseline_seconds: Sequence[float], seconds: Sequence[float]) -> Comparison:
    """Compares the times of a function with the baseline's, round by round."""
    ratios = [baseline / own for baseline, own in zip(baseline_seconds, seconds)]
    return Comparison(
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        seconds=statistics.median(seconds),
    )
