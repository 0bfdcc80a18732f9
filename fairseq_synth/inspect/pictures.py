"""The pictures of one model or of several, from the values of `analysis.analyse` alone."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .drawing import Call, Panel, Picture, color, image, legend, line, name_above, stairs

Figures = dict[str, Any]
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
    "gradient": "importance by gradient (nats)",
    "left_out": "loss without it, less loss (bits)",
    "without_words": "loss without words, less loss (bits)",
}
KINDS = {"loss": "loss (bits)", "bleu": "BLEU"}


class Model(NamedTuple):
    """What is drawn of a model."""

    name: str
    color: str
    found: Figures

    @property
    def attentions(self) -> Figures:
        """{name: figures} of its attentions."""
        return dict(self.found["attentions"])


def save(found: Mapping[str, Figures], folder: Path) -> None:
    """Writes the pictures of models by their names: each shows all of them, or one if their layers or heads differ.

    Needs matplotlib.
    """
    shapes = [{name: a["heads"] for name, a in own["attentions"].items()} for own in found.values()]
    alike = shapes.count(shapes[0]) == len(shapes)
    for label, several in [("", found)] if alike else [(f"{name}-", {name: own}) for name, own in found.items()]:
        for picture in pictures(several):
            title = f"{', '.join(several)}: {picture.name.replace('-', ' ')}"
            picture._replace(name=f"{label}{picture.name}.png", title=title).save(folder)


def pictures(found: Mapping[str, Figures], baseline: str = "") -> Iterator[Picture]:
    """The pictures that there are figures for.

    Args:
        found: by model, in their order, of models with the same layers and heads.
        baseline: the model that is drawn black.
    """
    names = list(found)
    models = [Model(name, color(name, names, baseline), own) for name, own in found.items()]
    attentions = models[0].attentions
    groups = {group: title for group, title in GROUPS.items() if any(a["group"] == group for a in attentions.values())}

    def have(figure: str) -> list[str]:
        """The attentions that have a figure in every model."""
        return [name for name in attentions if all(figure in model.attentions[name] for model in models)]

    for kind in ("parameters", "logits", "weights"):
        own = [n for n in have("histograms") if all(kind in model.attentions[n]["histograms"] for model in models)]
        if own:
            yield histograms(models, own, kind)
    if have("pattern"):
        yield grid("patterns", models, {n: [m.attentions[n]["pattern"] for m in models] for n in have("pattern")})
    for i, sentence in enumerate(models[0].found.get("sentences", [])):
        for group, title in groups.items():
            weights = {
                name: [model.found["sentences"][i]["weights"][name] for model in models]
                for name in sentence["weights"]
                if attentions[name]["group"] == group
            }
            rows = sentence["tokens"].get(group.split(".")[0])
            columns = sentence["tokens"].get("encoder") if group == "decoder.cross" else rows
            if weights:
                yield grid(f"sentence{i + 1}-{title.replace(' ', '-')}", models, weights, rows, columns)
    shown = {figure: have(figure) for figure in OF_HEADS if have(figure)}
    if shown:
        yield heads(models, shown)
    if any(a["alpha"] for model in models for a in model.attentions.values()):
        yield alpha(models)
    if have("singular_values"):
        yield singular_values(models, have("singular_values"))
    if all("layers" in model.found for model in models):
        yield rank(models)
    if all("removal" in model.found for model in models):
        yield removal(models)
    if all("words" in model.found for model in models):
        yield without_words(models)
    if all("lengths" in model.found for model in models):
        yield lengths(models)


def by_group(attentions: Figures) -> dict[str, list[Figures]]:
    """The attentions of each group, layer by layer."""
    found: dict[str, list[Figures]] = {}
    for attention in attentions.values():
        found.setdefault(attention["group"], []).append(attention)
    return found


def in_rows(name: str, rows: Sequence[Sequence[Panel | None]], size: Any, gaps: Any, **settings: Any) -> Picture:
    """A picture of rows of several lengths; `size` of a panel, `gaps` between them."""
    columns = max(map(len, rows))
    panels = [panel for row in rows for panel in [*row, *[None] * (columns - len(row))]]
    return Picture(name, panels, size, columns, gaps=gaps, **settings)


def histograms(models: Sequence[Model], names: Sequence[str], kind: str) -> Picture:
    """A row for each group and model, a column for each layer; the initial state is gray."""
    rows: list[list[Panel | None]] = []
    for group in by_group({name: models[0].attentions[name] for name in names}):
        for model in models:
            rows.append([])
            for name in names:
                attention = model.attentions[name]
                if attention["group"] == group:
                    calls = [*stairs(attention["histograms"][kind]), *([] if len(rows) > 1 or rows[0] else [legend()])]
                    calls.append(("tick_params", [], {"axis": "y", "which": "both", "left": False, "labelleft": False}))
                    settings = {"title": f"{group} {attention['layer']}", **of_model(models, model, first=not rows[-1])}
                    rows[-1].append(Panel(calls, {**settings, **({"yscale": "log"} if kind == "weights" else {})}))
    return in_rows(kind, rows, (1.6, 0.9), (0.2, 0.45))


def of_model(models: Sequence[Model], model: Model, first: bool) -> dict[str, str]:
    """The model's name beside a row of panels, where there are several models."""
    return {"ylabel": model.name} if first and len(models) > 1 else {}


def grid(
    name: str, models: Sequence[Model], matrices: Mapping[str, Sequence[Any]], words: Any = None, of_columns: Any = None
) -> Picture:
    """A row for each attention, for each model a block of columns, one for each head; words, if given, at the edges.

    Each cell has its own colors.
    """
    rows: list[list[Panel | None]] = []
    for attention, of_models in matrices.items():
        row: list[Panel | None] = []
        for model, own in zip(models, of_models):
            for head, matrix in enumerate(own):
                calls = image(matrix, cmap="Blues", vmin=0)[: 1 if words is not None else None]
                if words is not None:
                    names = list(words) if head == 0 else [""] * len(words)
                    calls.append(("set_yticks", [list(range(len(words))), names], {"fontsize": 5}))
                    places = list(range(len(of_columns)))
                    calls.append(("set_xticks", [places, list(of_columns)], {"fontsize": 5, "rotation": 90}))
                calls += [name_above(model.name)] if len(models) > 1 and not rows and not head else []
                beside = {"rotation": 0, "ha": "right", "va": "center", "fontsize": 6}
                calls += [] if row else [("set_ylabel", [attention], beside)]
                row.append(Panel(calls, {}))
        rows.append(row)
    if words is not None:
        return in_rows(name, rows, (1.9, 1.9), (0.2, 0.75))
    size = max(0.45, min(1.0, 7 / len(rows[0])))
    return in_rows(name, rows, (size, size), (0.05, 0.05))


def heads(models: Sequence[Model], shown: Mapping[str, Sequence[str]]) -> Picture:
    """A row for each model, a column for each figure: a cell for each head, a line of cells for each attention.

    One model's cells have their values in them; of several models the title has a figure's lowest and highest value.
    """
    rows: list[list[Panel | None]] = []
    several = len(models) > 1
    for model in models:
        rows.append([])
        for figure, names in shown.items():
            values = [model.attentions[name][figure] for name in names]
            every = [value for m in models for name in names for value in m.attentions[name][figure]]
            most = max(map(len, values))
            padded = [own + [float("nan")] * (most - len(own)) for own in values]
            calls = image(padded, cmap="Oranges", vmin=min(every), vmax=max(every))[:1]
            title, labels = OF_HEADS[figure], list(names)
            if several:  # names and titles stand once
                title = "\n".join([*textwrap.wrap(title, 16), f"{min(every):.2g} to {max(every):.2g}"])
                title = "" if rows[:-1] else title
                labels = [""] * len(labels) if rows[-1] else labels
            else:
                style = {"ha": "center", "va": "center", "fontsize": 6}
                places = [(head, row, value) for row, own in enumerate(values) for head, value in enumerate(own)]
                calls += [("text", [head, row, f"{value:.2g}"], style) for head, row, value in places]
            calls.append(("set_yticks", [list(range(len(names))), labels], {"fontsize": 5}))
            side = of_model(models, model, first=not rows[-1])
            rows[-1].append(Panel(calls, {"title": title, "xticks": list(range(most)), **side}))
    height = max(1.0, 0.18 * max(map(len, shown.values())))
    if several:
        return in_rows("heads", rows, (0.85, 0.6 * height), (0.12, 0.25), top=0.8)
    return in_rows("heads", rows, (max(1.8, 0.4 * most), height), (0.85, 0.4))


def alpha(models: Sequence[Model]) -> Picture:
    """A row for each model, a panel for each layer, a bar for each head, divided among the functions."""
    rows: list[list[Panel | None]] = []
    for model in models:
        row: list[Panel | None] = []
        for name, attention in model.attentions.items():
            calls: list[Call] = []
            base = [0.0] * attention["heads"]
            for function, shares in (attention["alpha"] or {}).items():
                calls.append(("bar", [list(range(len(shares))), shares], {"bottom": base, "label": function}))
                base = [low + share for low, share in zip(base, shares)]
            if calls:
                side = of_model(models, model, not row)
                row.append(Panel([*calls, *([] if row else [legend()])], {"title": name, "xlabel": "head", **side}))
        rows += [row] if row else []
    return in_rows("alpha", rows, (1.9, 1.4), (0.2, 0.6), share_y=True)


def curves(
    name: str,
    rows: Mapping[str, str],
    columns: Mapping[str, str],
    draw: Callable[[str, str], list[Call]],
    **settings: Any,
) -> Picture:
    """A panel with what `draw` makes of each row and column; both with their titles."""
    panels: list[list[Panel | None]] = []
    for row, side in rows.items():
        panels.append([])
        for column, title in columns.items():
            calls = draw(row, column)
            calls += [legend()] if calls and not any(panel for own in panels for panel in own) else []
            own = {"title": title, **({} if panels[-1] else {"ylabel": side}), **settings}
            panels[-1].append(Panel(calls, own) if calls else None)
    size = (2.1, 1.9) if len(columns) < 4 else (1.7, 1.7)
    return in_rows(name, panels, size, (0.2, 0.6), share_y="row")


def singular_values(models: Sequence[Model], names: Sequence[str]) -> Picture:
    """A row for each model, a column for each group; a line for each head, colored by layer."""
    by_name = {model.name: model for model in models}

    def draw(model: str, group: str) -> list[Call]:
        calls: list[Call] = []
        for attention in (by_name[model].attentions[name] for name in names):
            i = attention["layer"]
            style = {"linewidth": 1, "linestyle": ("-", "--", ":")[i // 10 % 3]}  # there are ten colors
            for head, values in enumerate(attention["singular_values"] if attention["group"] == group else []):
                shares = [place / (len(values) - 1) for place in range(len(values))]
                calls.append(line(shares, values, None if head else f"layer {i}", f"C{i}", **style))
        return calls

    own = by_group({name: models[0].attentions[name] for name in names})
    rows = {name: name if len(models) > 1 else "share of their sum" for name in by_name}
    groups = {group: GROUPS[group] for group in own}
    return curves("singular-values", rows, groups, draw, xlabel="share of the singular values")


def rank(models: Sequence[Model]) -> Picture:
    """A row for each stack, a column for each choice of branches, a line for each model; dashed: initial."""

    def draw(stack: str, branches: str) -> list[Call]:
        calls = []
        for model in models:
            for state, name, style in (("initial", None, "--"), ("trained", model.name, "-")):
                values = model.found["layers"].get(state, {}).get(stack, {}).get(branches, {}).get("equal_rows", [])
                calls.append(line(list(range(len(values))), values, name, model.color, linestyle=style, marker="."))
        return calls

    trained = models[0].found["layers"]["trained"]
    branches = {name: name for name in next(iter(trained.values()))}
    sides = {stack: f"{stack}: distance from equal rows" for stack in trained}
    layers = max(len(own["equal_rows"]) for stack in trained.values() for own in stack.values())
    return curves("rank", sides, branches, draw, xlabel="layer", yscale="log", xticks=list(range(layers)))


def removal(models: Sequence[Model]) -> Picture:
    """A row for the loss, and one for BLEU if there is one, a column for each group, a line for each model."""
    of_models = [model.found["removal"]["groups"] for model in models]
    known = {
        kind: title
        for kind, title in KINDS.items()
        if all(value is not None for groups in of_models for curve in groups.values() for value in curve[kind])
    }

    def draw(kind: str, group: str) -> list[Call]:
        pairs = [(model, groups[group]) for model, groups in zip(models, of_models)]
        return [line(curve["share"], curve[kind], m.name, m.color, marker=".") for m, curve in pairs]

    groups = {group: GROUPS[group] for group in of_models[0]}
    return curves("removal", known, groups, draw, xlabel="share of heads removed")


def without_words(models: Sequence[Model]) -> Picture:
    """The loss, a line for each model, as more and more heads of self-attention look by position alone."""

    def draw(*_: str) -> list[Call]:
        losses = [(model, model.found["words"]["loss"]) for model in models]
        return [line(list(range(len(own))), own, model.name, model.color, marker=".") for model, own in losses]

    title = {"": "heads by position alone, cheapest first"}
    return curves("without-words", {"loss": KINDS["loss"]}, title, draw, xlabel="heads")


def lengths(models: Sequence[Model]) -> Picture:
    """Loss, and BLEU if there is one, of the sentences of each range of lengths, a bar for each model."""
    ranges = models[0].found["lengths"]["ranges"]
    shortest = [1, *(found["longest"] + 1 for found in ranges)]
    names = [f"{first}–{found['longest']}\n({found['sentences']})" for first, found in zip(shortest, ranges)]
    panels: list[Panel | None] = []
    for kind, title in KINDS.items():
        values = [[found[kind] for found in model.found["lengths"]["ranges"]] for model in models]
        if any(None in own for own in values):
            continue
        calls: list[Call] = [("set_xticks", [list(range(len(names))), names], {"fontsize": 7})]
        for i, (model, own) in enumerate(zip(models, values)):
            width = 0.8 / len(models)
            places = [x + (i - (len(models) - 1) / 2) * width for x in range(len(own))]
            calls.append(("bar", [places, own, width], {"color": model.color, "label": model.name}))
        settings = {"xlabel": "tokens of a sentence (sentences)", "ylabel": title}
        panels.append(Panel([*calls, *([] if panels else [legend()])], settings))
    return in_rows("lengths", [panels], (3.4, 2.6), (0.7, 0))
