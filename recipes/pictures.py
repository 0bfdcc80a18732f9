"""Renders pictures of the results: scripts/make_pictures.py."""

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any, Callable, Dict, List

from .command import ROOT
from .render import Record, load, summarize
from .tables import BASELINE, TABLES, Dataset, Table

DIGEST = "Data-SHA256"  # in the PNG's metadata: its bytes depend on the version of matplotlib

Series = Dict[str, Any]


def curves(table: Table, dataset: Dataset, records: List[Record]) -> Series:
    """{model: {updates, mean validation loss over the seeds}}."""
    series: Series = {}
    for model in table.models():
        found = [dict(zip(r["curve"]["updates"], r["curve"]["valid_loss"])) for r in records if r["model"] == model]
        updates = sorted(set.intersection(*map(set, found))) if found else []
        if updates:
            series[model] = {"updates": updates, "loss": [summarize([f[u] for f in found]).mean for u in updates]}
    return series


def bars(table: Table, dataset: Dataset, records: List[Record]) -> Series:
    """{model: the metric for each seed}."""
    scores = {m: [r["figures"][table.metric] for r in records if r["model"] == m] for m in table.models()}
    return {model: values for model, values in scores.items() if values}


def draw_curves(series: Series, table: Table, axes: Any) -> None:
    """A line for each model; the Transformer's is black."""
    for model, line in series.items():
        style = {"color": "black", "linewidth": 2} if model == BASELINE else {"linewidth": 1}
        axes.plot(line["updates"], line["loss"], label=model, **style)
    lowest = min(min(line["loss"]) for line in series.values())
    axes.set(xlabel="updates", ylabel="validation loss", ylim=(lowest * 0.98, lowest * 1.6))
    axes.legend(fontsize=7)


def draw_bars(series: Series, table: Table, axes: Any) -> None:
    """A bar for each model's mean, a dot for each seed."""
    models = sorted(series, key=lambda model: -summarize(series[model]).mean)
    colors = ["black" if model == BASELINE else "tab:blue" for model in models]
    axes.barh(models, [summarize(series[model]).mean for model in models], color=colors, alpha=0.5)
    for model in models:
        axes.scatter(series[model], [model] * len(series[model]), color="black", s=10, zorder=3)
    values = [value for scores in series.values() for value in scores]
    margin = max(max(values) - min(values), 1) * 0.2
    axes.set(xlabel=table.metric_name, xlim=(min(values) - margin, max(values) + margin))
    axes.invert_yaxis()


PICTURES = {"valid-loss": (curves, draw_curves), "scores": (bars, draw_bars)}


def digest(series: Series, draw: Callable[..., None]) -> str:
    """Of what is drawn, and of the code that draws it."""
    return hashlib.sha256((json.dumps(series) + inspect.getsource(draw)).encode()).hexdigest()


def stored_digest(path: Path) -> str:
    """The digest in a picture's metadata; empty where there is none."""
    from PIL import Image

    if not path.exists():
        return ""
    with Image.open(path) as image:
        return image.text.get(DIGEST, "")


def render(check: bool, folder: Path = ROOT / "docs") -> List[Path]:
    """Draws the pictures of every table's columns that have results; those that are as the results say are kept.

    Args:
        check: draw nothing.

    Returns:
        The pictures that are not what the results say, or were not.
    """
    stale = []
    for table in TABLES.values():
        for dataset in table.datasets:
            records = [r for r in load(table.name) if r["dataset"] == dataset.name]
            for name, (collect, draw) in PICTURES.items():
                series, path = collect(table, dataset, records), folder / f"{table.name}-{dataset.name}-{name}.png"
                if series and stored_digest(path) != digest(series, draw):
                    stale.append(path)
                    if not check:
                        save(path, series, table, dataset, draw)
    return stale


def save(path: Path, series: Series, table: Table, dataset: Dataset, draw: Callable[..., None]) -> None:
    """Draws one picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(series, table, axes)
    axes.set_title(f"{table.name}, {dataset.heading}", fontsize=10)
    figure.savefig(path, metadata={DIGEST: digest(series, draw), "Software": None})
