"""Draws the figures of one checkpoint, from the values of `analysis.analyse` alone. Needs matplotlib."""

from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .measure import RANK_SHARES

Figures = Dict[str, Any]
GROUPS = {
    "encoder.self": "encoder self-attention",
    "decoder.self": "decoder self-attention",
    "decoder.cross": "cross-attention",
}
OF_HEADS = {  # figure of each head: its title
    "entropy": "entropy (nats)",
    "distance": "mean distance (tokens)",
    "diagonal": "weight on the diagonal",
    "neighbours": "weight on the neighbours",
    "word_dependence": "dependence on words",
    "gradient": "importance by gradient",
    "left_out": "loss without it, less loss (bits)",
}


def save(found: Figures, folder: Path, label: str) -> None:
    """Writes the pictures of one checkpoint as ``{label}-{picture}.png``."""
    for name, draw in pictures(found):
        figure = Figure(dpi=120)
        FigureCanvasAgg(figure)
        draw(figure)
        figure.suptitle(f"{found['checkpoint']['model']}: {name.replace('-', ' ')}", fontsize=10)
        figure.savefig(folder / f"{label}-{name}.png", metadata={"Software": None})


def pictures(found: Figures) -> Iterator[Tuple[str, Callable[[Figure], None]]]:
    """The name of each picture that there are figures for, and the function that draws it."""
    attentions = found["attentions"]
    for kind in ("parameters", "logits", "weights"):
        if any(kind in a.get("histograms", {}) for a in attentions.values()):
            yield f"histograms-{kind}", partial(histograms, attentions=attentions, kind=kind)
    for group, title in GROUPS.items():
        name = title.replace(" ", "-")
        shown = [a for a in attentions.values() if a["group"] == group and "pattern" in a]
        if shown:
            yield f"patterns-{name}", partial(grid, patterns=[(a, a["pattern"]) for a in shown])
        measured = [a for a in attentions.values() if a["group"] == group and any(key in a for key in OF_HEADS)]
        if measured:
            yield f"heads-{name}", partial(heads, attentions=measured)
        for i, sentence in enumerate(found.get("sentences", []), 1):
            weights = [(a, sentence["weights"][key]) for key, a in attentions.items() if a["group"] == group]
            rows = sentence["tokens"].get(group.split(".")[0])
            columns = sentence["tokens"].get("encoder") if group == "decoder.cross" else rows
            if weights:
                yield f"sentence{i}-{name}", partial(grid, patterns=weights, rows=rows, columns=columns)
    mixtures = [(name, a) for name, a in attentions.items() if a["alpha"]]
    if mixtures:
        yield "alpha", partial(alpha, mixtures=mixtures)
    if any("singular_values" in a for a in attentions.values()):
        yield "singular-values", partial(singular_values, attentions=attentions)
    if "layers" in found:
        yield "rank-of-layers", partial(rank, states=found["layers"])
    if "removal" in found:
        yield "removal", partial(removal, groups=found["removal"]["groups"])
    if "lengths" in found:
        yield "lengths", partial(lengths, ranges=found["lengths"]["ranges"])


def panels(
    figure: Figure, lines: int, columns: int, size: Tuple[float, float], gaps: Tuple[float, float], **shared: bool
) -> Any:
    """An array of panels of one size. Sizes are in inches, so that no layout has to be searched for."""
    left, right, top, bottom = 0.7, 0.2, 0.6, 0.55
    width = left + right + columns * size[0] + (columns - 1) * gaps[0]
    height = top + bottom + lines * size[1] + (lines - 1) * gaps[1]
    figure.set_size_inches(width, height)
    axes = figure.subplots(lines, columns, squeeze=False, **shared)  # type: ignore[call-overload]
    figure.subplots_adjust(
        left / width, bottom / height, 1 - right / width, 1 - top / height, gaps[0] / size[0], gaps[1] / size[1]
    )
    return axes


def by_group(attentions: Figures) -> Dict[str, List[Figures]]:
    """The attentions of each group, layer by layer."""
    found: Dict[str, List[Figures]] = {}
    for attention in attentions.values():
        found.setdefault(attention["group"], []).append(attention)
    return found


def histograms(figure: Figure, attentions: Figures, kind: str) -> None:
    """A row for each group, a column for each layer; initial and trained."""
    groups = by_group(attentions)
    columns = max(len(own) for own in groups.values())
    cells = panels(figure, len(groups), columns, (2.1, 1.5), (0.45, 0.45))
    for line, (group, own) in zip(cells, groups.items()):
        for axes in line[len(own) :]:
            axes.axis("off")
        for axes, attention in zip(line, own):
            axes.set_title(f"{group} {attention['layer']}", fontsize=8)
            axes.tick_params(labelsize=6)
            found = attention.get("histograms", {}).get(kind)
            if found is None:
                axes.axis("off")
                continue
            for state, color in (("initial", "0.6"), ("trained", "tab:blue")):
                shares = found["shares"].get(state)
                if shares:
                    width = (found["high"] - found["low"]) / len(shares)
                    edges = [found["low"] + i * width for i in range(len(shares) + 1)]
                    axes.stairs(shares, edges, label=state, color=color, fill=state == "initial")
            if kind == "weights":
                axes.set_yscale("log")
    cells[0][0].legend(fontsize=7)


def grid(figure: Figure, patterns: List[Tuple[Figures, Any]], rows: Any = None, columns: Any = None) -> None:
    """A row for each layer, a column for each head; words, if given, at the edges. Each cell has its own colors."""
    heads = max(len(pattern) for _, pattern in patterns)
    size, gaps = ((1.5, 1.5), (0.25, 0.35)) if rows is None else ((1.9, 1.9), (0.2, 0.75))
    cells = panels(figure, len(patterns), heads, size, gaps)
    for line, (attention, pattern) in zip(cells, patterns):
        for axes in line[len(pattern) :]:
            axes.axis("off")
        for head, (axes, matrix) in enumerate(zip(line, pattern)):
            axes.imshow(matrix, cmap="Blues", vmin=0)
            axes.set_title(f"layer {attention['layer']}, head {head}", fontsize=7)
            axes.tick_params(labelsize=6, length=1)
            if rows is not None:
                axes.set_yticks(range(len(rows)), rows if head == 0 else [""] * len(rows), fontsize=5)
                axes.set_xticks(range(len(columns)), columns, fontsize=5, rotation=90)


def heads(figure: Figure, attentions: List[Figures]) -> None:
    """A panel for each figure: layers by heads, with the values."""
    names = [name for name in OF_HEADS if name in attentions[0]]
    columns = min(len(names), 4)
    lines = -(-len(names) // columns)
    most = max(attention["heads"] for attention in attentions)
    cells = panels(figure, lines, columns, (0.5 * most, 0.3 * len(attentions)), (0.6, 0.8)).flatten()
    for axes in cells[len(names) :]:
        axes.axis("off")
    for axes, name in zip(cells, names):
        values = [attention[name] for attention in attentions]
        axes.imshow(values, cmap="Oranges", aspect="auto")
        for layer, own in enumerate(values):
            for head, value in enumerate(own):
                axes.text(head, layer, f"{value:.2g}", ha="center", va="center", fontsize=6)
        axes.set(xlabel="head", ylabel="layer", xticks=range(most), yticks=range(len(values)))
        axes.set_title(OF_HEADS[name], fontsize=8)
        axes.tick_params(labelsize=6, length=0)


def alpha(figure: Figure, mixtures: List[Tuple[str, Figures]]) -> None:
    """A panel for each layer, a bar for each head, divided among the functions."""
    columns = min(len(mixtures), 4)
    lines = -(-len(mixtures) // columns)
    cells = panels(figure, lines, columns, (1.9, 1.4), (0.2, 0.6), sharey=True).flatten()
    for axes in cells[len(mixtures) :]:
        axes.axis("off")
    for axes, (name, attention) in zip(cells, mixtures):
        base = [0.0] * attention["heads"]
        for function, shares in attention["alpha"].items():
            axes.bar(range(len(shares)), shares, bottom=base, label=function)
            base = [low + share for low, share in zip(base, shares)]
        axes.set_title(name, fontsize=8)
        axes.set_xlabel("head", fontsize=7)
        axes.tick_params(labelsize=6)
    cells[0].legend(fontsize=6)


def singular_values(figure: Figure, attentions: Figures) -> None:
    """A panel for each group, a line for each layer and head, colored by layer."""
    groups = {group: own for group, own in by_group(attentions).items() if "singular_values" in own[0]}
    row = panels(figure, 1, len(groups), (3, 2.6), (0.2, 0), sharey=True)[0]
    for axes, (group, own) in zip(row, groups.items()):
        for i, attention in enumerate(own):
            color = colormaps["viridis"](i / max(len(own) - 1, 1))
            for head, values in enumerate(attention["singular_values"]):
                label = f"layer {attention['layer']}" if head == 0 else None
                axes.plot(RANK_SHARES, values, color=color, linewidth=1, label=label)
        axes.set_title(group, fontsize=9)
        axes.set_xlabel("share of the singular values", fontsize=8)
        axes.legend(fontsize=7)
    row[0].set_ylabel("share of their sum", fontsize=8)


def rank(figure: Figure, states: Figures) -> None:
    """A panel for each stack, a line for each choice of branches; the initial state is dashed."""
    names = list(states["trained"])
    row = panels(figure, 1, len(names), (3.4, 2.8), (0.2, 0), sharey=True)[0]
    for axes, stack in zip(row, names):
        for state, line in (("initial", "--"), ("trained", "-")):
            for i, (branches, values) in enumerate(states.get(state, {}).get(stack, {}).items()):
                label = branches if state == "trained" else None
                axes.plot(values["equal_rows"], line, color=f"C{i}", marker=".", label=label)
        axes.set_yscale("log")
        axes.set_title(f"{stack} (dashed: initial)", fontsize=9)
        axes.set_xlabel("layer", fontsize=8)
        axes.set_xticks(range(len(values["equal_rows"])))
    row[0].set_ylabel("distance from equal rows", fontsize=8)
    row[0].legend(fontsize=7)


def removal(figure: Figure, groups: Figures) -> None:
    """Loss, and BLEU if there is one, against the share of heads removed; a line for each group."""
    kinds = {"loss": "loss (bits a token)", "bleu": "BLEU"}
    kinds = {k: title for k, title in kinds.items() if all(v is not None for c in groups.values() for v in c[k])}
    for axes, (kind, title) in zip(panels(figure, 1, len(kinds), (3.4, 2.6), (0.7, 0))[0], kinds.items()):
        for group, curve in groups.items():
            axes.plot(curve["share"], curve[kind], marker=".", label=GROUPS[group])
        axes.set_xlabel("share of heads removed", fontsize=8)
        axes.set_ylabel(title, fontsize=8)
    axes.legend(fontsize=7)


def lengths(figure: Figure, ranges: List[Figures]) -> None:
    """Loss, and BLEU if there is one, of the sentences of each range of lengths."""
    kinds = {"loss": "loss (bits a token)", "bleu": "BLEU"}
    kinds = {kind: title for kind, title in kinds.items() if all(found[kind] is not None for found in ranges)}
    shortest = [1, *(found["longest"] + 1 for found in ranges)]
    names = [f"{first}–{found['longest']}\n({found['sentences']})" for first, found in zip(shortest, ranges)]
    for axes, (kind, title) in zip(panels(figure, 1, len(kinds), (3.4, 2.6), (0.7, 0))[0], kinds.items()):
        axes.bar(names, [found[kind] for found in ranges])
        axes.set_xlabel("tokens of a sentence (sentences)", fontsize=8)
        axes.set_ylabel(title, fontsize=8)
        axes.tick_params(labelsize=7)
