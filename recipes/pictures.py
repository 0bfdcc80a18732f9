"""Renders the pictures of docs/ from results/ and from the code: scripts/make_tables.py."""

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple

from . import analysis
from .command import ROOT
from .render import SPEED, SPEED_IN_PICTURE, Record, in_order, load, load_cells, summarize
from .tables import TABLES, Dataset, Table

DIGEST = "Data-SHA256"  # in the PNG's metadata: its bytes depend on the version of matplotlib

Series = Dict[str, Any]


class Picture(NamedTuple):
    """A file of docs/: what it shows, as plain values, and the function that draws that in a figure."""

    name: str
    series: Series
    draw: Callable[[Series, Any], None]

    def digest(self) -> str:
        """Of what is drawn, and of the code that draws it."""
        return hashlib.sha256((json.dumps(self.series) + inspect.getsource(self.draw)).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Draws it."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        self.draw(self.series, figure)
        figure.savefig(folder / self.name, metadata={DIGEST: self.digest(), "Software": None})


def stored_digest(path: Path) -> str:
    """The digest in a picture's metadata; empty where there is none."""
    from PIL import Image

    if not path.exists():
        return ""
    with Image.open(path) as image:
        return image.info.get(DIGEST, "")


def render(check: bool, folder: Path = ROOT / "docs") -> List[Path]:
    """Draws all pictures; those that are as the results and the code say are kept.

    Args:
        check: draw nothing.

    Returns:
        The pictures that are not what the results and the code say, or were not.
    """
    stale = []
    of_analysis = (Picture(*parts) for parts in analysis.pictures())
    for picture in [Picture("six-kinds-of-s.png", kinds(), draw_kinds), *of_speed(), *of_tables(), *of_analysis]:
        if stored_digest(folder / picture.name) != picture.digest():
            stale.append(folder / picture.name)
            if not check:
                picture.save(folder)
    return stale


# ---- results of a table


def of_tables() -> Iterator[Picture]:
    """For each column of a table that has results the pictures that a page shows."""
    pages = "".join(page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    for table in TABLES.values():
        for dataset in table.datasets:
            records = [r for r in load_cells(table.name) if r["dataset"] == dataset.name]
            name, title = f"{table.name}-{dataset.name}", f"{table.title}, {dataset.heading}"
            for kind, series, draw in (("valid-loss", curves, draw_curves), ("scores", bars, draw_bars)):
                if records and f"{name}-{kind}.png" in pages:
                    yield Picture(f"{name}-{kind}.png", series(table, dataset, records, title), draw)


def curves(table: Table, dataset: Dataset, records: List[Record], title: str) -> Series:
    """{model: {updates, mean validation loss over the runs}}."""
    lines: Series = {}
    for model in table.models():
        found = [dict(zip(r["curve"]["updates"], r["curve"]["valid_loss"])) for r in records if r["model"] == model]
        updates = sorted(set.intersection(*map(set, found))) if found else []
        if updates:
            lines[model] = {"updates": updates, "loss": [summarize([f[u] for f in found]).mean for u in updates]}
    return {"title": title, "lines": lines, "baseline": table.baseline}


def bars(table: Table, dataset: Dataset, records: List[Record], title: str) -> Series:
    """{model: the metric of each run}, the best first."""
    found = {m: [r["figures"][table.metric] for r in records if r["model"] == m] for m in table.models()}
    models = sorted(filter(found.get, found), key=lambda m: summarize(found[m]).mean, reverse=table.task.BEST is max)
    scores = {model: found[model] for model in models}
    return {"title": title, "metric": table.task.METRIC_NAME, "scores": scores, "baseline": table.baseline}


def draw_curves(series: Series, figure: Any) -> None:
    """A line for each model; the baseline's is black."""
    axes = figure.add_subplot()
    for model, line in series["lines"].items():
        style = {"color": "black", "linewidth": 2} if model == series["baseline"] else {"linewidth": 1}
        axes.plot(line["updates"], line["loss"], label=model, **style)
    lowest = min(min(line["loss"]) for line in series["lines"].values())
    axes.set(xlabel="updates", ylabel="validation loss", ylim=(lowest * 0.98, lowest * 1.6))
    axes.legend(fontsize=7)
    axes.set_title(series["title"], fontsize=10)


def draw_bars(series: Series, figure: Any) -> None:
    """A bar for each model's mean, a dot for each seed."""
    axes, scores = figure.add_subplot(), series["scores"]
    models = list(scores)
    colors = ["black" if model == series["baseline"] else "tab:blue" for model in models]
    axes.barh(models, [summarize(scores[model]).mean for model in models], color=colors, alpha=0.5)
    for model in models:
        axes.scatter(scores[model], [model] * len(scores[model]), color="black", s=10, zorder=3)
    values = [value for found in scores.values() for value in found]
    margin = max(max(values) - min(values), 1) * 0.2
    axes.set(xlabel=series["metric"], xlim=(min(values) - margin, max(values) + margin))
    axes.invert_yaxis()
    axes.set_title(series["title"], fontsize=10)


# ---- the six functions

SENTENCES = ("the dog saw the cat and the cat saw the dog .", "a bird sang , a child heard , a bird sang .")
FORMULAS = {  # in matplotlib's TeX, with what a row depends on
    "random": (r"$S_{ij} = R_{ij}$", "trained; ignores the input"),
    "fixed_random": (r"$S_{ij} = R_{ij}$", "fixed; ignores the input"),
    "factorized_random": (r"$S = R_1 R_2^\top$", "rank k; ignores the input"),
    "dense": (r"$S_i = W_2\,\mathrm{relu}(W_1 x_i)$", "row i from token i alone"),
    "factorized_dense": (r"$S_{ij} = A_i[u]\;B_i[v]$", "row i from token i alone"),
    "vanilla": (r"$S_{ij} = q_i \cdot k_j\,/\sqrt{d}$", "from each pair of tokens"),
}


def kinds() -> Series:
    """{function: S for each sentence}: one head, initial weights, equal vectors for equal words."""
    import torch

    from fairseq_synth.synthesizers import Inputs, Mixture

    words = [sentence.split() for sentence in SENTENCES]
    length, width = len(words[0]), 16
    torch.manual_seed(4)
    vectors = {word: torch.randn(width, dtype=torch.double) for word in sorted({w for ws in words for w in ws})}
    # in fp64, so that the rounded values do not depend on the processor
    Q, K = torch.randn(2, width, width, dtype=torch.double).div(width**0.5).unbind()
    series: Series = {}
    for name in FORMULAS:
        torch.manual_seed(1)
        function = Mixture((name,), "convex", 1, width, length, 2)
        function.reset_parameters()
        function = function.double()
        series[name] = []
        for sentence in words:
            x = torch.stack([vectors[word] for word in sentence])[None, None]
            with torch.no_grad():
                S = function(Inputs(x, x @ Q, x @ K, 0, length))[0].total(length).expand(1, 1, length, length)[0, 0]
            series[name].append([[round(value, 3) for value in row] for row in S.tolist()])
    return {"sentences": words, "formulas": FORMULAS, "logits": series}


def draw_kinds(series: Series, figure: Any) -> None:
    """A column for each function, a row for each sentence; each picture of S has its own scale of colors."""
    width, height, side, pitch = 13, 5.8, 1.88, 2.05
    figure.set_size_inches(width, height)
    figure.set_layout_engine("none")
    for column, (name, matrices) in enumerate(series["logits"].items()):
        for row, (words, matrix) in enumerate(zip(series["sentences"], matrices)):
            place = (0.66 + column * pitch, 3.0 - row * (side + 0.6), side, side)  # in inches
            cell = figure.add_axes([x / (height if i % 2 else width) for i, x in enumerate(place)])
            largest = max(abs(value) for line in matrix for value in line)
            cell.imshow(matrix, cmap="RdBu_r", vmin=-largest, vmax=largest)
            cell.set_xticks(range(len(words)), words, rotation=90, fontsize=9, color="0.25")
            cell.set_yticks(range(len(words)), words if column == 0 else [""] * len(words), fontsize=9, color="0.25")
            cell.tick_params(length=0)
            cell.spines[:].set_visible(False)
            if row == 0:
                formula, note = series["formulas"][name]
                for text, above, style in (
                    (name, 37, {"fontsize": 12.5, "fontweight": "bold"}),
                    (formula, 20, {"fontsize": 12}),
                    (note, 5, {"fontsize": 9.5, "color": "0.35"}),
                ):
                    cell.annotate(text, (0.5, 1), (0, above), "axes fraction", "offset points", ha="center", **style)


# ---- speed


def of_speed() -> Iterator[Picture]:
    """One picture of results/speed_cpu."""
    series: Series = {}
    for heading, title in SPEED_IN_PICTURE.items():
        file, figure = SPEED[heading]
        for record in load("speed_cpu", file):
            found = {name: values[figure] for name, values in record["figures"].items() if figure in values}
            series[title] = {name: round(value, 2) for name, value in found.items() if name != "stock"}
    if series:
        names = in_order({name for values in series.values() for name in values})
        yield Picture("speed.png", {"names": names, "panels": series}, draw_speed)


def draw_speed(series: Series, figure: Any) -> None:
    """A panel for each benchmark, a bar for each variant, from the line of stock fairseq at 1."""
    figure.set_size_inches(13, 4.6)
    names = series["names"]
    panels = figure.subplots(1, len(series["panels"]), sharex=True, sharey=True)
    for axes, (heading, values) in zip(panels, series["panels"].items()):
        for position, name in enumerate(names):
            value = values.get(name)
            if value is None:
                axes.annotate("not measured", (1, position), (4, 0), textcoords="offset points", va="center",
                              fontsize=8.5, color="0.6")  # fmt: skip
                continue
            axes.barh(position, value - 1, left=1, height=0.72, color="#2a78b5" if value >= 1 else "#d1733c")
            side, offset = ("right", -4) if value < 1 else ("left", 4)
            axes.annotate(f"{value:.2f}", (value, position), (offset, 0), textcoords="offset points", va="center",
                          ha=side, fontsize=9.5)  # fmt: skip
        axes.axvline(1, color="black", linewidth=1)
        axes.set_yticks(range(len(names)), names, fontsize=10)
        axes.set_xticks([1, 2, 3], ["1", "2", "3"], fontsize=10)
        axes.tick_params(length=0)
        axes.set_title(heading, fontsize=11, fontweight="bold")
        axes.spines[:].set_visible(False)
    figures = [value for values in series["panels"].values() for value in values.values()]
    panels[0].set_xlim(min(figures) - 0.6, max(figures) + 0.6)
    panels[0].invert_yaxis()
    figure.supxlabel("stock fairseq's time, or memory, divided by the variant's: above 1 is better", fontsize=11)
