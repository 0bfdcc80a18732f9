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

    def picture_width(self, panel_widths: float, num_columns: int) -> float:
        """Returns the width of a picture in inches.

        Args:
            panel_widths: the sum of the widths of all columns of panels, in inches.
            num_columns: the number of these columns.
        """
        return self.left + self.right + panel_widths + (num_columns - 1) * self.between_columns

    def width_left_for_panels(self, picture_width: float, num_columns: int) -> float:
        """Returns the sum of the widths of all columns of panels in a picture, in inches; undoes `picture_width`."""
        return picture_width - self.left - self.right - (num_columns - 1) * self.between_columns

    def height_left_for_panels(self, picture_height: float, num_rows: int) -> float:
        """Returns the sum of the heights of all rows of panels in a picture, in inches; undoes `picture_height`."""
        return picture_height - self.top - self.bottom - (num_rows - 1) * self.between_rows


class Picture(NamedTuple):
    """What a picture file shows: panels in rows and columns, and what is written around them."""

    name: str  # the name of the file
    panels: Sequence[Panel | None]  # row by row; None is an empty place
    size: tuple[float, float] = (6, 4)  # width and height in inches, of everything but the title
    columns: int = 1  # how many panels a row has
    share_x: bool = False  # whether all panels have the same horizontal axis
    share_y: Any = False  # whether all panels have the same vertical axis; "row": all panels of each row
    below: str = ""  # a text below all panels
    margins: Margins | None = None  # None: matplotlib makes room for all labels, slowly where there are many panels
    title: str = ""
    row_heights: Sequence[float] = ()  # how high the rows of panels are, relative to each other; (): all alike
    legend_columns: int = 0  # how many columns the legend above all panels has; 0: there is no legend

    @property
    def has_automatic_margins(self) -> bool:
        """Whether matplotlib chooses the margins, which it calls the layout "constrained"."""
        return self.margins is None

    def digest(self) -> str:
        """Returns a checksum of what is drawn, and of the version of the code that draws it."""
        text = f"{DRAWING_VERSION} {json.dumps(self)}"
        return hashlib.sha256(text.encode()).hexdigest()

    def draw(self) -> Any:
        """Returns a figure of matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=self.full_size(), dpi=DPI)
        if self.has_automatic_margins:
            figure.set_layout_engine("constrained")  # makes room for all labels
        self.draw_panels(figure)
        if self.legend_columns:
            self.add_legend(figure)
        if self.below:
            figure.supxlabel(self.below, fontsize=9)
        if self.title:
            figure.suptitle(self.title, fontsize=10)
        return figure

    def draw_panels(self, figure: Any) -> None:
        """Adds the panels to a figure of matplotlib, in their rows and columns, with the margins between them."""
        num_rows = self.num_rows()
        equal_heights = [1] * num_rows
        axes_grid = figure.subplots(
            num_rows,
            self.columns,
            squeeze=False,  # returns a grid also for a single row or column
            sharex=self.share_x,
            sharey=self.share_y,
            gridspec_kw={"height_ratios": self.row_heights or equal_heights},
        )
        if self.margins is not None:
            figure.subplots_adjust(**self.panel_edges(self.margins), **self.panel_spaces(self.margins))
        # The places at the end of the last row may have no panel.
        for axes, panel in itertools.zip_longest(axes_grid.flat, self.panels):
            if panel is None:
                axes.axis("off")
            else:
                panel.fill(axes)

    def num_rows(self) -> int:
        """Returns the number of rows of panels."""
        return -(-len(self.panels) // self.columns)  # rounded up

    def full_size(self) -> tuple[float, float]:
        """Returns width and height in inches, with the title."""
        width, height = self.size
        if self.title:
            height += TITLE_HEIGHT
        return width, height

    def panel_edges(self, margins: Margins) -> dict[str, float]:
        """Returns the edges of the area of all panels, as ``subplots_adjust`` of matplotlib takes them.

        They are shares of the picture's width or height. For example, a left margin of 0.7 inches in a picture that is
        7 inches wide gives {"left": 0.1}. The lower left corner of the picture is at 0, its upper right corner at 1.
        """
        width, height = self.full_size()
        top_margin = margins.top
        if self.title:
            top_margin += TITLE_HEIGHT
        return {
            "left": margins.left / width,
            "right": 1 - margins.right / width,
            "bottom": margins.bottom / height,
            "top": 1 - top_margin / height,
        }

    def panel_spaces(self, margins: Margins) -> dict[str, float]:
        """Returns the space between panels, as ``subplots_adjust`` of matplotlib takes it.

        It is relative to the mean size of a panel. For example, 0.1 inches between columns of panels that are 2 inches
        wide give {"wspace": 0.05}.
        """
        width, height = self.size
        num_rows = self.num_rows()
        panel_width = margins.width_left_for_panels(width, self.columns) / self.columns
        mean_panel_height = margins.height_left_for_panels(height, num_rows) / num_rows
        return {
            "wspace": margins.between_columns / panel_width,
            "hspace": margins.between_rows / mean_panel_height,
        }

    def add_legend(self, figure: Any) -> None:
        """Adds a legend above all panels. It explains the labels of all lines and bars, each label once."""
        artist_by_label: dict[str, Any] = {}  # {label: the first line or bar that has it}
        for axes in figure.axes:
            artists, labels = axes.get_legend_handles_labels()
            for artist, label in zip(artists, labels):
                artist_by_label.setdefault(label, artist)
        # "outside" tells matplotlib to make room for the legend. Given margins have room for it already.
        place = "outside upper center" if self.has_automatic_margins else "upper center"
        figure.legend(
            list(artist_by_label.values()), list(artist_by_label), loc=place, ncols=self.legend_columns, fontsize=7
        )

    def save(self, folder: Path) -> None:
        """Writes the picture as a PNG."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = FigureCanvasAgg(self.draw())
        # The method `savefig` of the figure would write the same file, but it would draw the figure twice.
        canvas.print_png(folder / self.name, metadata={DIGEST: self.digest(), "Software": None})


def stored_digest(path: Path) -> str:
    """Returns the digest that is stored in a picture's file, or "" if there is no such file or no digest in it."""
    from PIL import Image

    if not path.exists():
        return ""
    with Image.open(path) as image:
        return image.info.get(DIGEST, "")


def model_color(model: str, models: Sequence[str], baseline: str) -> str:
    """Returns the color in which a model is drawn: black for the baseline, else one of matplotlib's ten colors.

    Args:
        model: the name of the model.
        models: the names of all models.
        baseline: the name of the baseline, if there is one.
    """
    if model == baseline:
        return "black"
    return f"C{list(models).index(model) % 10}"


# ---- calls of matplotlib's axes


def call(method: str, *arguments: Any, **options: Any) -> Call:
    """Returns a call that a panel makes later: ``call("bar", x, heights)`` stands for ``axes.bar(x, heights)``."""
    return method, list(arguments), options


def line(x: Sequence[float], y: Sequence[float], label: str | None, color: str, **style: Any) -> Call:
    """Returns a call that draws a line through points, with an entry in the legend if there is a label."""
    return "plot", [x, y], {"label": label, "color": color, **style}


def legend(**options: Any) -> Call:
    """Returns a call that draws a legend. If the options name no place, matplotlib chooses one that hides little."""
    return "legend", [], {"fontsize": 7, **options}


def title(text: str) -> Call:
    """Returns a call that writes a small title above a panel."""
    return "set_title", [text], {"fontsize": 8}


def heading(text: str, points: float) -> Call:
    """Returns a call that writes a text above the left edge of a panel, at a distance of `points` from the panel."""
    options = {"xycoords": "axes fraction", "xytext": [0, points], "textcoords": "offset points", "fontsize": 9}
    upper_left_corner = [0, 1]  # as shares of the panel's width and height
    return "annotate", [text, upper_left_corner], options


def row_label(text: str) -> Call:
    """Returns a call that writes a horizontal label on the left of a panel."""
    return "set_ylabel", [text], {"rotation": 0, "ha": "right", "va": "center", "fontsize": 7}


def tick_names(axis: str, names: Sequence[str], **style: Any) -> Call:
    """Returns a call that writes names at the places 0, 1, 2, … of an axis, ``x`` or ``y``."""
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
    """Returns a call that draws a matrix with a color for each cell."""
    return "imshow", [matrix], {"aspect": "auto", **style}


def image(matrix: Any, labels: Sequence[str] = (), has_row_labels: bool = True, **style: Any) -> list[Call]:
    """Returns the calls that draw a square matrix as colors, with the same labels at its rows and at its columns.

    Args:
        matrix: (N, N).
        labels: N labels; none leaves out the labels and the ticks.
        has_row_labels: False leaves out the labels of the rows, but not their ticks.
        style: further arguments of matplotlib's ``imshow``.
    """
    places = list(range(len(labels)))
    column_labels = list(labels)
    row_labels = column_labels if has_row_labels else [""] * len(labels)
    return [
        colors(matrix, **style),
        call("set_xticks", places, column_labels, rotation=90),
        call("set_yticks", places, row_labels),
        call("tick_params", length=0),
    ]
