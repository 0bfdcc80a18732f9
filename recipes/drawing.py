"""Pictures as plain values: panels with the calls of matplotlib that fill them, so that a change is seen without it."""

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

DIGEST = "Data-SHA256"  # in the PNG's metadata: its bytes depend on the version of matplotlib

Call = Tuple[str, Sequence[Any], Dict[str, Any]]  # a method of matplotlib's axes, and its arguments


class Panel(NamedTuple):
    """A diagram: calls in their order, and what ``axes.set`` takes."""

    calls: Sequence[Call]
    settings: Dict[str, Any]


class Picture(NamedTuple):
    """A file of docs/: its panels, row by row."""

    name: str
    panels: Sequence[Panel]
    size: Tuple[float, float] = (6, 4)  # inches
    columns: int = 1
    share_x: bool = False
    share_y: bool = False
    below: str = ""  # a label for all panels

    def digest(self) -> str:
        """Of what is drawn, and of the code that draws it."""
        return hashlib.sha256((json.dumps(self) + inspect.getsource(Picture.save)).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Draws it."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=self.size, dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        rows = -(-len(self.panels) // self.columns)
        grid = figure.subplots(rows, self.columns, squeeze=False, sharex=self.share_x, sharey=self.share_y)
        for axes, panel in zip(grid.flat, self.panels):
            axes.tick_params(labelsize=7)
            axes.title.set_fontsize(9)
            axes.xaxis.label.set_fontsize(8)
            axes.yaxis.label.set_fontsize(8)
            for method, arguments, options in panel.calls:
                getattr(axes, method)(*arguments, **options)
            axes.set(**panel.settings)
        if self.below:
            figure.supxlabel(self.below, fontsize=9)
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


def line(x: Sequence[float], y: Sequence[float], label: Optional[str], color: str, **style: Any) -> Call:
    return "plot", [x, y], {"label": label, "color": color, **style}


def legend() -> Call:
    return "legend", [], {"fontsize": 7}


def name_above(text: str) -> Call:
    """A title that begins at the left edge, of the first panel of several."""
    return "set_title", [text], {"loc": "left", "fontsize": 9}


def image(matrix: Any, labels: Sequence[str] = (), names: bool = True, **style: Any) -> List[Call]:
    """A matrix as colors. `labels`: of its columns, and of its rows if `names`."""
    places = list(range(len(labels)))
    return [
        ("imshow", [matrix], {"aspect": "auto", **style}),
        ("set_xticks", [places, list(labels)], {"rotation": 90}),
        ("set_yticks", [places, list(labels) if names else [""] * len(places)], {}),
        ("tick_params", [], {"length": 0}),
    ]
