"""Describes pictures as plain values: each panel has a list of the calls of matplotlib that fill it.

A checksum of these values shows whether a picture has changed, without drawing it.

Pictures for pages are 7 inches wide, which is 840 pixels. Letters of 6 points are then 10 pixels high.
"""

import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Raise this number if you change how the classes below draw. All pictures then count as out of date, and are drawn
# again.
DRAWING_VERSION = 1
DIGEST = "Data-SHA256"  # in the PNG's metadata: its bytes depend on the version of matplotlib
WIDTH = 7.0  # inches
DPI = 120
TITLE_HEIGHT = 0.35  # inches

Call = tuple[str, Sequence[Any], dict[str, Any]]  # a method of matplotlib's axes, and its arguments


class Panel(NamedTuple):
    """A diagram: calls in their order, and the arguments of ``axes.set``."""

    calls: Sequence[Call]
    settings: dict[str, Any]

    def fill(self, axes: Any) -> None:
        """Draws the diagram on matplotlib's axes."""
        axes.tick_params(labelsize=7)
        axes.xaxis.label.set_fontsize(8)
        axes.yaxis.label.set_fontsize(8)
        for method, arguments, options in self.calls:
            getattr(axes, method)(*arguments, **options)
        axes.set(**self.settings)


class Margins(NamedTuple):
    """White space in inches: at the edges of a picture, and between its panels."""

    left: float
    right: float
    top: float
    bottom: float
    between_columns: float
    between_rows: float

    def picture_height(self, panel_heights: float, num_rows: int) -> float:
        """Returns the height of a picture in inches.

        Args:
            panel_heights: the sum of the heights of all rows of panels, in inches.
            num_rows: the number of these rows.
        """
        return self.top + self.bottom + panel_heights + (num_rows - 1) * self.between_rows


class Picture(NamedTuple):
    """A file: its panels, row by row; None for an empty place."""

    name: str
    panels: Sequence[Panel | None]
    size: tuple[float, float] = (6, 4)  # inches, of everything but the title
    columns: int = 1
    share_x: bool = False
    share_y: Any = False  # "row": in each row
    below: str = ""  # a label for all panels
    margins: Margins | None = None  # None: matplotlib makes room for all labels, slowly where there are many panels
    title: str = ""
    row_heights: Sequence[float] = ()  # of the panels, relative to each other; none: all alike
    legend_columns: int = 0  # of a legend of all panels above them; 0: none

    def digest(self) -> str:
        """Returns a checksum of what is drawn, and of the version of the code that draws it."""
        text = f"{DRAWING_VERSION} {json.dumps(self)}"
        return hashlib.sha256(text.encode()).hexdigest()

    def draw(self) -> Any:
        """Returns a figure of matplotlib."""
        from matplotlib.figure import Figure

        width, height = self.full_size()
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained" if self.margins is None else None)
        rows = self.num_rows()
        axes_grid = figure.subplots(
            rows,
            self.columns,
            squeeze=False,
            sharex=self.share_x,
            sharey=self.share_y,
            gridspec_kw={"height_ratios": self.row_heights or [1] * rows},
        )
        if self.margins is not None:
            figure.subplots_adjust(**self.layout(self.margins))
        for axes, panel in itertools.zip_longest(axes_grid.flat, self.panels):
            if panel is None:
                axes.axis("off")
            else:
                panel.fill(axes)
        if self.legend_columns:
            self.add_legend(figure)
        if self.below:
            figure.supxlabel(self.below, fontsize=9)
        if self.title:
            figure.suptitle(self.title, fontsize=10)
        return figure

    def num_rows(self) -> int:
        """Returns the number of rows of panels."""
        return -(-len(self.panels) // self.columns)  # rounded up

    def full_size(self) -> tuple[float, float]:
        """Returns width and height in inches, with the title."""
        width, height = self.size
        if self.title:
            height += TITLE_HEIGHT
        return width, height

    def layout(self, margins: Margins) -> dict[str, float]:
        """Returns matplotlib's description of the white space, in shares of the picture and of a panel."""
        width, height = self.full_size()
        rows = self.num_rows()
        top = margins.top
        if self.title:
            top += TITLE_HEIGHT
        width_of_panels = width - margins.left - margins.right - (self.columns - 1) * margins.between_columns
        height_of_panels = height - top - margins.bottom - (rows - 1) * margins.between_rows
        return {
            "left": margins.left / width,
            "right": 1 - margins.right / width,
            "bottom": margins.bottom / height,
            "top": 1 - top / height,
            "wspace": margins.between_columns / (width_of_panels / self.columns),
            "hspace": margins.between_rows / (height_of_panels / rows),
        }

    def add_legend(self, figure: Any) -> None:
        """Adds a legend above all panels, of what has a label in any of them."""
        handles: dict[str, Any] = {}
        for axes in figure.axes:
            for handle, label in zip(*axes.get_legend_handles_labels()):
                handles.setdefault(label, handle)
        place = "outside upper center" if self.margins is None else "upper center"
        figure.legend(list(handles.values()), list(handles), loc=place, ncols=self.legend_columns, fontsize=7)

    def save(self, folder: Path) -> None:
        """Writes the picture as a PNG."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        figure = self.draw()
        FigureCanvasAgg(figure)
        figure.savefig(folder / self.name, metadata={DIGEST: self.digest(), "Software": None})


def stored_digest(path: Path) -> str:
    """Returns the digest that is stored in a picture's file, or "" if there is no such file or no digest in it."""
    from PIL import Image

    if not path.exists():
        return ""
    with Image.open(path) as image:
        return image.info.get(DIGEST, "")


def model_color(model: str, models: Sequence[str], baseline: str) -> str:
    """Returns the color in which a model is drawn: black for the baseline, else one of matplotlib's ten, by its place.

    Args:
        model: the name of the model.
        models: the names of all models.
        baseline: the name of the baseline, if there is one.
    """
    if model == baseline:
        return "black"
    return f"C{list(models).index(model) % 10}"


# ---- calls of matplotlib's axes


def line(x: Sequence[float], y: Sequence[float], label: str | None, color: str, **style: Any) -> Call:
    """Returns a line through points, with an entry in the legend if there is a label."""
    return "plot", [x, y], {"label": label, "color": color, **style}


def legend(**options: Any) -> Call:
    """Returns a legend, which matplotlib puts where it hides least if the options name no place."""
    return "legend", [], {"fontsize": 7, **options}


def title(text: str) -> Call:
    """Returns a small title above a panel."""
    return "set_title", [text], {"fontsize": 8}


def heading(text: str, points: float) -> Call:
    """Returns text that begins at the left edge of a panel, so many points above the panel."""
    options = {"xycoords": "axes fraction", "xytext": [0, points], "textcoords": "offset points", "fontsize": 9}
    upper_left_corner = [0, 1]  # as shares of the panel's width and height
    return "annotate", [text, upper_left_corner], options


def row_label(text: str) -> Call:
    """Returns a horizontal label on the left of a panel."""
    return "set_ylabel", [text], {"rotation": 0, "ha": "right", "va": "center", "fontsize": 7}


def tick_names(axis: str, names: Sequence[str], **style: Any) -> Call:
    """Returns names for the places 0, 1, 2, … of an axis, ``x`` or ``y``."""
    places = list(range(len(names)))
    return f"set_{axis}ticks", [places, list(names)], {"fontsize": 7, **style}


def without_ticks(axis: str = "both") -> Call:
    """Returns a call that removes the ticks and their labels from an axis: ``x``, ``y`` or ``both``."""
    if axis == "x":
        hidden = {"bottom": False, "labelbottom": False}
    elif axis == "y":
        hidden = {"left": False, "labelleft": False}
    else:
        hidden = {"left": False, "labelleft": False, "bottom": False, "labelbottom": False}
    return "tick_params", [], {"axis": axis, "which": "both", **hidden}


def colors(matrix: Any, **style: Any) -> Call:
    """Returns a matrix whose cells are drawn as colors."""
    return "imshow", [matrix], {"aspect": "auto", **style}


def image(matrix: Any, labels: Sequence[str] = (), names: bool = True, **style: Any) -> list[Call]:
    """Returns a square matrix whose cells are drawn as colors, with labels at its rows and columns.

    Args:
        matrix: the matrix.
        labels: a label for each column, and for each row.
        names: False leaves out the labels of the rows, but not their ticks.
        style: further arguments of matplotlib's ``imshow``.
    """
    places = list(range(len(labels)))
    column_labels = list(labels)
    row_labels = column_labels if names else [""] * len(labels)
    return [
        colors(matrix, **style),
        ("set_xticks", [places, column_labels], {"rotation": 90}),
        ("set_yticks", [places, row_labels], {}),
        ("tick_params", [], {"length": 0}),
    ]
