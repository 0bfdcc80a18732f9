"""Pictures as plain values: panels with the calls of matplotlib that fill them, so that a change is seen without it."""

import hashlib
import inspect
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

DIGEST = "Data-SHA256"  # in the PNG's metadata: its bytes depend on the version of matplotlib

Call = tuple[str, Sequence[Any], dict[str, Any]]  # a method of matplotlib's axes, and its arguments


class Panel(NamedTuple):
    """A diagram: calls in their order, and what ``axes.set`` takes."""

    calls: Sequence[Call]
    settings: dict[str, Any]


class Picture(NamedTuple):
    """A file: its panels, row by row; None for an empty place."""

    name: str
    panels: Sequence[Panel | None]
    size: tuple[float, float] = (6, 4)  # inches, of everything; or of a panel, if there are `gaps`
    columns: int = 1
    share_x: bool = False
    share_y: Any = False  # "row": in each row
    below: str = ""  # a label for all panels
    gaps: tuple[float, float] | None = None  # inches between panels; None: found by matplotlib, slowly
    title: str = ""
    top: float = 0.6  # inches above the panels, with `gaps`

    def digest(self) -> str:
        """Of what is drawn, and of the code that draws it."""
        return hashlib.sha256((json.dumps(self) + inspect.getsource(Picture.draw)).encode()).hexdigest()

    def draw(self) -> Any:
        """A figure of matplotlib."""
        from matplotlib.figure import Figure

        rows = -(-len(self.panels) // self.columns)
        figure = Figure(figsize=self.size, dpi=120, layout="constrained" if self.gaps is None else None)
        grid = figure.subplots(rows, self.columns, squeeze=False, sharex=self.share_x, sharey=self.share_y)
        if self.gaps is not None:
            left, right, top, bottom = 0.9, 0.2, self.top, 0.55
            width = left + right + self.columns * self.size[0] + (self.columns - 1) * self.gaps[0]
            height = top + bottom + rows * self.size[1] + (rows - 1) * self.gaps[1]
            figure.set_size_inches(width, height)
            places = (left / width, bottom / height, 1 - right / width, 1 - top / height)
            figure.subplots_adjust(*places, self.gaps[0] / self.size[0], self.gaps[1] / self.size[1])
        for axes, panel in itertools.zip_longest(grid.flat, self.panels):
            if panel is None:
                axes.axis("off")
                continue
            axes.tick_params(labelsize=7)
            axes.xaxis.label.set_fontsize(8)
            axes.yaxis.label.set_fontsize(8)
            for method, arguments, options in panel.calls:
                getattr(axes, method)(*arguments, **options)
            axes.set(**panel.settings)
            if self.gaps is not None:
                axes.title.set_fontsize(8)
        if self.below:
            figure.supxlabel(self.below, fontsize=9)
        if self.title:
            figure.suptitle(self.title, fontsize=10)
        return figure

    def save(self, folder: Path) -> None:
        """Writes it."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        figure = self.draw()
        FigureCanvasAgg(figure)
        figure.savefig(folder / self.name, metadata={DIGEST: self.digest(), "Software": None})


def stored_digest(path: Path) -> str:
    """The digest in a picture's metadata; empty where there is none."""
    from PIL import Image

    if not path.exists():
        return ""
    with Image.open(path) as image:
        return image.info.get(DIGEST, "")


def color(model: str, models: Sequence[str], baseline: str) -> str:
    """A color for each model, the baseline's black."""
    return "black" if model == baseline else f"C{list(models).index(model) % 10}"


def line(x: Sequence[float], y: Sequence[float], label: str | None, color: str, **style: Any) -> Call:
    return "plot", [x, y], {"label": label, "color": color, **style}


def legend() -> Call:
    return "legend", [], {"fontsize": 7}


def legend_beside() -> Call:
    """On the right of a panel, not over its points."""
    return "legend", [], {"fontsize": 8, "loc": "center left", "bbox_to_anchor": [1.01, 0.5]}


def name_above(text: str) -> Call:
    """A title that begins at the left edge, of the first panel of several."""
    return "set_title", [text], {"loc": "left", "fontsize": 9}


def stairs(histogram: dict[str, Any]) -> list[Call]:
    """A histogram of the inspection: the trained state before the initial one, in gray."""
    calls: list[Call] = []
    for state, own in (("initial", {"color": "0.75", "fill": True}), ("trained", {"color": "tab:blue"})):
        shares = histogram["shares"].get(state)
        if shares:
            width = (histogram["high"] - histogram["low"]) / len(shares)
            edges = [histogram["low"] + i * width for i in range(len(shares) + 1)]
            calls.append(("stairs", [shares, edges], {"label": state, **own}))
    return calls


def image(matrix: Any, labels: Sequence[str] = (), names: bool = True, **style: Any) -> list[Call]:
    """A matrix as colors. `labels`: of its columns, and of its rows if `names`."""
    places = list(range(len(labels)))
    return [
        ("imshow", [matrix], {"aspect": "auto", **style}),
        ("set_xticks", [places, list(labels)], {"rotation": 90}),
        ("set_yticks", [places, list(labels) if names else [""] * len(places)], {}),
        ("tick_params", [], {"length": 0}),
    ]
