"""Calls of matplotlib that several pictures share. Pictures are made for a width of 840 pixels."""

from collections.abc import Sequence
from typing import Any

from fairseq_synth.inspect.drawing import Call

WIDTH = 7.0  # inches: 840 pixels at 120 dots per inch
TITLE = {"fontsize": 8}


def call(method: str, *arguments: Any, **options: Any) -> Call:
    """Returns a call of a method of matplotlib's axes."""
    return method, list(arguments), options


def vertical_line(x: float, **style: Any) -> Call:
    """Returns a black line over the whole height of a panel, where the baseline is."""
    return call("axvline", x, **{"color": "black", "linewidth": 1, **style})


def logarithmic_x_axis(low: float, high: float, ticks: Sequence[float]) -> list[Call]:
    """Returns calls for an axis of ratios, on which half and twice are equally far from 1."""
    return [
        call("set_xscale", "log"),
        call("minorticks_off"),
        call("set_xlim", low, high),
        call("set_xticks", list(ticks), [f"{tick:g}" for tick in ticks]),
    ]


def break_name(model: str, longest_line: int = 17) -> str:
    """Returns the name of a model in two lines if it is longer than one line may be."""
    if len(model) <= longest_line:
        return model
    breaks = [place + 1 for place, character in enumerate(model) if character == "_"]
    nearest_to_middle = min(breaks, key=lambda place: abs(place - len(model) / 2))
    return f"{model[:nearest_to_middle]}\n{model[nearest_to_middle:]}"
