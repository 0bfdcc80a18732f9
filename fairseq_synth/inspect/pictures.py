"""The pictures of one checkpoint, from the values of `analysis.analyse` alone."""

from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from .drawing import Call, Panel, Picture, image, legend, line, stairs

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
KINDS = {"loss": "loss (bits)", "bleu": "BLEU"}


def save(found: Figures, folder: Path, label: str) -> None:
    """Writes the pictures of one checkpoint as ``{label}-{picture}.png``. Needs matplotlib."""
    for picture in pictures(found):
        title = f"{found['checkpoint']['model']}: {picture.name.replace('-', ' ')}"
        picture._replace(name=f"{label}-{picture.name}.png", title=title).save(folder)


def pictures(found: Figures) -> Iterator[Picture]:
    """The pictures that there are figures for."""
    attentions = found["attentions"]
    for kind in ("parameters", "logits", "weights"):
        if any(kind in a.get("histograms", {}) for a in attentions.values()):
            yield histograms(f"histograms-{kind}", attentions, kind)
    for group, title in GROUPS.items():
        name = title.replace(" ", "-")
        shown = [a for a in attentions.values() if a["group"] == group and "pattern" in a]
        if shown:
            yield grid(f"patterns-{name}", [(a, a["pattern"]) for a in shown])
        measured = [a for a in attentions.values() if a["group"] == group and any(key in a for key in OF_HEADS)]
        if measured:
            yield heads(f"heads-{name}", measured)
        for i, sentence in enumerate(found.get("sentences", []), 1):
            weights = [(a, sentence["weights"][key]) for key, a in attentions.items() if a["group"] == group]
            rows = sentence["tokens"].get(group.split(".")[0])
            columns = sentence["tokens"].get("encoder") if group == "decoder.cross" else rows
            if weights:
                yield grid(f"sentence{i}-{name}", weights, rows, columns)
    mixtures = {name: a for name, a in attentions.items() if a["alpha"]}
    if mixtures:
        yield alpha(mixtures)
    if any("singular_values" in a for a in attentions.values()):
        yield singular_values(attentions)
    if "layers" in found:
        yield rank(found["layers"])
    if "removal" in found:
        yield removal(found["removal"]["groups"])
    if "lengths" in found:
        yield lengths(found["lengths"]["ranges"])


def by_group(attentions: Figures) -> Dict[str, List[Figures]]:
    """The attentions of each group, layer by layer."""
    found: Dict[str, List[Figures]] = {}
    for attention in attentions.values():
        found.setdefault(attention["group"], []).append(attention)
    return found


def in_rows(rows: Sequence[Sequence[Optional[Panel]]]) -> Tuple[List[Optional[Panel]], int]:
    """The panels of rows of several lengths, row by row, and their columns."""
    columns = max(map(len, rows))
    return [panel for row in rows for panel in [*row, *[None] * (columns - len(row))]], columns


def histograms(name: str, attentions: Figures, kind: str) -> Picture:
    """A row for each group, a column for each layer; initial and trained."""
    rows: List[List[Optional[Panel]]] = []
    for group, own in by_group(attentions).items():
        rows.append([])
        for attention in own:
            found = attention.get("histograms", {}).get(kind)
            settings = {"title": f"{group} {attention['layer']}", **({"yscale": "log"} if kind == "weights" else {})}
            rows[-1].append(Panel([*stairs(found), *([] if any(rows[0]) else [legend()])], settings) if found else None)
    panels, columns = in_rows(rows)
    return Picture(name, panels, (2.1, 1.5), columns, gaps=(0.45, 0.45))


def grid(name: str, patterns: List[Tuple[Figures, Any]], words: Any = None, of_columns: Any = None) -> Picture:
    """A row for each layer, a column for each head; words, if given, at the edges. Each cell has its own colors."""
    rows: List[List[Optional[Panel]]] = []
    for attention, pattern in patterns:
        rows.append([])
        for head, matrix in enumerate(pattern):
            calls = image(matrix, cmap="Blues", vmin=0, aspect="equal")[:1]
            if words is not None:
                names = list(words) if head == 0 else [""] * len(words)
                calls.append(("set_yticks", [list(range(len(words))), names], {"fontsize": 5}))
                places = list(range(len(of_columns)))
                calls.append(("set_xticks", [places, list(of_columns)], {"fontsize": 5, "rotation": 90}))
            rows[-1].append(Panel(calls, {"title": f"layer {attention['layer']}, head {head}"}))
    panels, columns = in_rows(rows)
    size, gaps = ((1.5, 1.5), (0.25, 0.35)) if words is None else ((1.9, 1.9), (0.2, 0.75))
    return Picture(name, panels, size, columns, gaps=gaps)


def heads(name: str, attentions: List[Figures]) -> Picture:
    """A panel for each figure: layers by heads, with the values."""
    panels = []
    most = max(attention["heads"] for attention in attentions)
    for key, title in OF_HEADS.items():
        if key not in attentions[0]:
            continue
        values = [attention[key] for attention in attentions]
        calls = image(values, cmap="Oranges")[:1]
        for row, own in enumerate(values):
            for head, value in enumerate(own):
                style = {"ha": "center", "va": "center", "fontsize": 6}
                calls.append(("text", [head, row, f"{value:.2g}"], style))
        layers = [str(attention["layer"]) for attention in attentions]
        calls.append(("set_yticks", [list(range(len(layers))), layers], {}))
        settings = {"title": title, "xlabel": "head", "ylabel": "layer", "xticks": list(range(most))}
        panels.append(Panel(calls, settings))
    return Picture(name, panels, (0.5 * most, 0.3 * len(attentions)), min(len(panels), 4), gaps=(0.6, 0.8))


def alpha(mixtures: Figures) -> Picture:
    """A panel for each layer, a bar for each head, divided among the functions."""
    panels: List[Panel] = []
    for name, attention in mixtures.items():
        calls: List[Call] = []
        base = [0.0] * attention["heads"]
        for function, shares in attention["alpha"].items():
            calls.append(("bar", [list(range(len(shares))), shares], {"bottom": base, "label": function}))
            base = [low + share for low, share in zip(base, shares)]
        panels.append(Panel([*calls, *([] if panels else [legend()])], {"title": name, "xlabel": "head"}))
    return Picture("alpha", panels, (1.9, 1.4), min(len(panels), 4), share_y=True, gaps=(0.2, 0.6))


def singular_values(attentions: Figures) -> Picture:
    """A panel for each group, a line for each layer and head, colored by layer."""
    panels: List[Panel] = []
    for group, own in by_group(attentions).items():
        calls: List[Call] = []
        for attention in own:
            i = attention["layer"]
            style = {"linewidth": 1, "linestyle": ("-", "--", ":")[i // 10 % 3]}  # there are ten colors
            for head, values in enumerate(attention.get("singular_values", [])):
                shares = [place / (len(values) - 1) for place in range(len(values))]
                calls.append(line(shares, values, None if head else f"layer {attention['layer']}", f"C{i}", **style))
        if calls:
            label = {} if panels else {"ylabel": "share of their sum"}
            panels.append(
                Panel([*calls, legend()], {"title": group, "xlabel": "share of the singular values", **label})
            )
    return Picture("singular-values", panels, (3, 2.6), len(panels), share_y=True, gaps=(0.2, 0))


def rank(states: Figures) -> Picture:
    """A panel for each stack, a line for each choice of branches; the initial state is dashed."""
    panels: List[Panel] = []
    for stack in states["trained"]:
        calls: List[Call] = []
        for state, style in (("initial", "--"), ("trained", "-")):
            for i, (branches, values) in enumerate(states.get(state, {}).get(stack, {}).items()):
                layers = list(range(len(values["equal_rows"])))
                label = branches if state == "trained" else None
                calls.append(line(layers, values["equal_rows"], label, f"C{i}", linestyle=style, marker="."))
        settings = {"title": f"{stack} (dashed: initial)", "xlabel": "layer", "yscale": "log", "xticks": layers}
        label = {} if panels else {"ylabel": "distance from equal rows"}
        panels.append(Panel([*calls, *([] if panels else [legend()])], {**settings, **label}))
    return Picture("rank-of-layers", panels, (3.4, 2.8), len(panels), share_y=True, gaps=(0.2, 0))


def removal(groups: Figures) -> Picture:
    """Loss, and BLEU if there is one, against the share of heads removed; a line for each group."""
    panels = []
    for kind, title in KINDS.items():
        if all(value is not None for curve in groups.values() for value in curve[kind]):
            calls = [
                line(curve["share"], curve[kind], GROUPS[group], f"C{i}", marker=".")
                for i, (group, curve) in enumerate(groups.items())
            ]
            panels.append(Panel([*calls, legend()], {"xlabel": "share of heads removed", "ylabel": title}))
    return Picture("removal", panels, (3.4, 2.6), len(panels), gaps=(0.7, 0))


def lengths(ranges: List[Figures]) -> Picture:
    """Loss, and BLEU if there is one, of the sentences of each range of lengths."""
    shortest = [1, *(found["longest"] + 1 for found in ranges)]
    names = [f"{first}–{found['longest']}\n({found['sentences']})" for first, found in zip(shortest, ranges)]
    panels = []
    for kind, title in KINDS.items():
        values = [found[kind] for found in ranges]
        if None not in values:
            settings = {"xlabel": "tokens of a sentence (sentences)", "ylabel": title}
            panels.append(Panel([("bar", [names, values], {})], settings))
    return Picture("lengths", panels, (3.4, 2.6), len(panels), gaps=(0.7, 0))
