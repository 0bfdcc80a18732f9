"""What several pictures share: a stand-in for matplotlib's axes, and the axes of ratios and of models.

Pictures are 840 pixels wide.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fairseq_synth.inspect.drawing import Call, Panel

WIDTH = 7.0  # inches: 840 pixels at 120 dots per inch
SMALL_FONT = 8  # points, for the titles of panels that stand side by side
FONT = 10  # points, for the title of a panel that fills the picture


class RecordedAxes:
    """Takes the same calls as matplotlib's axes, but only records them. They are made when the picture is saved.

    The recorded calls show whether a picture has changed, without drawing it. Any method of ``matplotlib.axes.Axes``
    can be called, for example ``axes.scatter([1, 2], [3, 4], color="black")``.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.settings: dict[str, Any] = {}

    def __getattr__(self, method: str) -> Callable[..., None]:
        """Returns a function that records a call of the method of matplotlib's axes with this name."""

        def record_call(*arguments: Any, **options: Any) -> None:
            self.calls.append((method, list(arguments), options))

        return record_call

    def record(self, calls: Iterable[Call]) -> None:
        """Adds some calls that were made elsewhere to the recorded ones."""
        self.calls += calls

    def set(self, **settings: Any) -> None:
        """Sets labels and limits like matplotlib's ``axes.set``. They take effect after all other calls."""
        self.settings.update(settings)

    def panel(self) -> Panel:
        """Returns the panel of a picture that is drawn by the recorded calls."""
        return Panel(self.calls, self.settings)


def use_logarithmic_x_axis(axes: RecordedAxes, limits: tuple[float, float], ticks: Sequence[float]) -> None:
    """Makes the x axis one for ratios: 0.5 and 2 are equally far from 1. `limits` are its left and right end."""
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xlim(*limits)
    axes.set_xticks(list(ticks), [f"{tick:g}" for tick in ticks])


def get_limits_of_models(number_of_models: int) -> tuple[float, float]:
    """Returns the bottom and the top of a y axis that has a model at each of 0, 1, 2, …, the first one at the top.

    The first model is at the top because the axis is turned around: its bottom end is a larger number than its top end.
    Half a step is left free at both ends.
    """
    bottom = number_of_models - 0.5
    top = -0.5
    return bottom, top


def break_name(model: str, longest_line: int = 17) -> str:
    """Returns the name of a model, with a line break after an underscore if it has more letters than `longest_line`.

    Of several underscores, the line breaks at the one that is nearest to the middle.
    """
    if len(model) <= longest_line:
        return model
    starts_of_second_line = [place + 1 for place, character in enumerate(model) if character == "_"]
    middle = len(model) / 2
    start = min(starts_of_second_line, key=lambda place: abs(place - middle))
    return f"{model[:start]}\n{model[start:]}"
