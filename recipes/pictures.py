"""The pictures of docs/, from results/ and from the code: scripts/make_tables.py."""

import statistics
from pathlib import Path
from typing import Any, Dict, Iterator, List

from fairseq_synth.inspect.drawing import Call, Panel, Picture, color, image, legend, line, stored_digest

from . import analysis, choice
from .command import ROOT
from .render import SPEED, SPEED_GPU, Rows, in_order, load_cells, models_of, paper_steps, rows_of, speeds
from .tables import TABLES, Dataset, Table


def render(check: bool, folder: Path = ROOT / "docs") -> List[Path]:
    """Draws the pictures that are not what the results and the code say, and returns them. `check`: draws nothing."""
    stale = []
    for picture in [kinds(), *of_speed(), *of_tables(), *choice.pictures(), *analysis.pictures()]:
        if stored_digest(folder / picture.name) != picture.digest():
            stale.append(folder / picture.name)
            if not check:
                picture.save(folder)
    return stale


def of_tables() -> Iterator[Picture]:
    """For each column of a table that has results the pictures that a page shows."""
    pages = "".join(page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    for table in TABLES.values():
        for dataset in table.datasets:
            rows = {row: found for row, found in rows_of(table, dataset, load_cells(table.name)).items() if found}
            for kind, draw in (("valid-loss", curves), ("scores", runs)):
                name = f"{table.name}-{dataset.name}-{kind}.png"
                if rows and name in pages:
                    calls, settings = draw(table, dataset, rows)
                    yield Picture(name, [Panel(calls, {**settings, "title": f"{table.title}, {dataset.heading}"})])


def curves(table: Table, _: Dataset, rows: Rows) -> Panel:
    """A line for each model: the mean validation loss over its runs."""
    calls, lowest = [], float("inf")
    models = models_of(table, (record for own in rows.values() for record in own))
    for model, records in rows.items():
        found = [dict(zip(r["curve"]["updates"], r["curve"]["valid_loss"])) for r in records]
        updates = sorted(set.intersection(*map(set, found)))
        if updates:
            losses = [statistics.mean(f[u] for f in found) for u in updates]
            lowest = min([lowest, *losses])
            calls.append(line(updates, losses, model, color(model, models, table.baseline)))
    limits = (lowest * 0.98, lowest * 1.6)
    return Panel([*calls, legend()], {"xlabel": "updates", "ylabel": "validation loss", "ylim": limits})


def runs(table: Table, dataset: Dataset, rows: Rows) -> Panel:
    """A dot for each run and a stroke for each model's mean, the best first; a line through the baseline's mean."""
    metric = table.metric(dataset)
    found = {model: [r["figures"][metric] for r in records] for model, records in rows.items()}
    means = {model: statistics.mean(values) for model, values in found.items()}
    calls: List[Call] = [("grid", [], {"axis": "y", "alpha": 0.4}), ("set_axisbelow", [True], {})]
    if table.baseline in means:
        calls.append(("axvline", [means[table.baseline]], {"color": "0.6", "linestyle": "--", "linewidth": 1}))
    for model in sorted(means, key=lambda model: means[model], reverse=table.task.BEST is max):
        own = {"color": "black" if model == table.baseline else "tab:blue"}
        calls.append(("scatter", [found[model], [model] * len(found[model])], {"s": 14, **own}))
        calls.append(("scatter", [[means[model]], [model]], {"marker": "|", "s": 300, **own}))
    label = f"{table.figures(dataset)[metric]}: a dot is a run, a stroke the mean"
    return Panel([*calls, ("invert_yaxis", [], {})], {"xlabel": label})


# ---- the six functions

SENTENCES = ("the dog saw the cat and the cat saw the dog .", "a bird sang , a child heard , a bird sang .")
FORMULAS = {  # in matplotlib's TeX, with what a row depends on
    "random": "$S_{ij} = R_{ij}$\ntrained; ignores the input",
    "fixed_random": "$S_{ij} = R_{ij}$\nfixed; ignores the input",
    "factorized_random": "$S = R_1 R_2^\\top$\nrank k; ignores the input",
    "dense": "$S_i = W_2\\,\\mathrm{relu}(W_1 x_i)$\nrow i from token i alone",
    "factorized_dense": "$S_{ij} = A_i[u]\\;B_i[v]$\nrow i from token i alone",
    "vanilla": "$S_{ij} = q_i \\cdot k_j\\,/\\sqrt{d}$\nfrom each pair of tokens",
}


def kinds() -> Picture:
    """S of each function for two sentences: one head, initial weights, equal vectors for equal words."""
    import torch

    from fairseq_synth.synthesizers import Inputs, Mixture

    sentences = [sentence.split() for sentence in SENTENCES]
    length, width = len(sentences[0]), 16
    torch.manual_seed(4)
    vectors = {word: torch.randn(width, dtype=torch.double) for word in sorted({w for ws in sentences for w in ws})}
    # in fp64, so that the rounded values do not depend on the processor
    Q, K = torch.randn(2, width, width, dtype=torch.double).div(width**0.5).unbind()
    rows: List[List[Panel]] = [[], []]
    for name, formula in FORMULAS.items():
        torch.manual_seed(1)
        function = Mixture((name,), "convex", 1, width, length, 2)
        function.reset_parameters()
        function = function.double()
        for row, words in zip(rows, sentences):
            x = torch.stack([vectors[word] for word in words])[None, None]
            with torch.no_grad():
                S = function(Inputs(x, x @ Q, x @ K, 0, length))[0].total(length).expand(1, 1, length, length)[0, 0]
            matrix = [[round(value, 3) for value in line] for line in S.tolist()]
            largest = max(abs(value) for line in matrix for value in line)
            style = {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest, "aspect": "equal"}
            title = {"title": f"{name}\n{formula}"} if row is rows[0] else {}
            row.append(Panel(image(matrix, words, name == "random", **style), title))
    return Picture("six-kinds-of-s.png", [panel for row in rows for panel in row], (13, 5.8), len(FORMULAS))


# ---- speed

SPEED_PANELS = {
    "training step,\nCPU": SPEED["step, batches of a corpus"],
    "training step,\nGPU": SPEED_GPU["step, batches of a corpus"],
    "block 32×128,\nCPU": SPEED["block 32×128"],
    "block 256×256,\nGPU": SPEED_GPU["block 256×256"],
    "causal block,\n4×1024, CPU": SPEED["causal 4×1024"],
    "generation,\n8k words, CPU": SPEED["generation, 8k words"],
    "peak memory, causal\n16×1024, CPU": SPEED["memory, causal 16×1024"],
}


def of_speed() -> Iterator[Picture]:
    """A panel for each benchmark, bars from the line of stock fairseq at 1; beside the steps the paper's ratios."""
    measured = {title: speeds(*where) for title, where in SPEED_PANELS.items()}
    found = {title: {name: round(s.ratio, 2) for name, s in own.items()} for title, own in measured.items() if own}
    if not found:
        return
    names = in_order({name for values in found.values() for name in values})
    every = [value for values in found.values() for value in values.values()]
    paper, models = paper_steps(TABLES["table4"]), [name.replace("+", "_") for name in names]
    diamonds = {place: round(paper[model], 2) for place, model in enumerate(models) if model in paper}
    panels = []
    for title, values in found.items():
        calls: List[Call] = [("axvline", [1], {"color": "black", "linewidth": 1})]
        for place, name in enumerate(names):
            value = values.get(name, 1)
            style: Dict[str, Any] = {"va": "center", "textcoords": "offset points", "fontsize": 7}
            side, offset = ("right", -4) if value < 1 else ("left", 4)
            text = f"{value:.2f}" if name in values else "not measured"
            shade = "#2a78b5" if value >= 1 else "#d1733c"
            calls.append(("barh", [place, value - 1], {"left": 1, "height": 0.72, "color": shade}))
            calls.append(("annotate", [text, (value, place), (offset, 0)], {"ha": side, **style}))
        if "step" in title:
            style = {"marker": "D", "color": "black", "s": 12, "zorder": 3}
            calls.append(("scatter", [list(diamonds.values()), list(diamonds)], style))
        calls += [("set_yticks", [list(range(len(names))), names], {}), ("set_xticks", [[1, 2, 3]], {})]
        limits = {"xlim": (min(every) - 0.7, max(every) + 0.6), "ylim": (len(names) - 0.5, -0.5)}
        panels.append(Panel(calls, {"title": title, **limits}))
    below = "stock fairseq's time, or memory, divided by the variant's: above 1 is better. "
    below += "Diamonds: the paper's steps a second over its Transformer's, other models on a TPU (Table 4)"
    yield Picture("speed.png", panels, (15, 4.8), len(panels), True, True, below)
