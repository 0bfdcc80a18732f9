"""The pictures that compare several models, from the values of `analysis.analyse` alone."""

from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Sequence

from .drawing import Call, Panel, Picture, color, image, legend, legend_beside, line, name_above, stairs
from .pictures import GROUPS, KINDS, Figures, by_group

OF_HEADS = {  # title: what is summed
    "entropy (nats)": ("entropy",),
    "weight on the token and its neighbours": ("diagonal", "neighbours"),
    "dependence on words": ("word_dependence",),
    "importance by gradient (nats)": ("gradient",),
}


class Model(NamedTuple):
    """What is drawn of a model."""

    name: str
    color: str
    found: Figures
    groups: Dict[str, List[Figures]]  # its attentions, layer by layer


Drawing = Callable[[Model, str], List[Call]]  # of a model and a choice


def pictures(found: Mapping[str, Figures], baseline: str = "") -> Iterator[Picture]:
    """The pictures that there are figures for. `found`: by model, in their order; that of the `baseline` is black.

    Models whose layers or heads differ in number are not compared: there is no picture.
    """
    names = list(found)
    models = [
        Model(name, color(name, names, baseline), own, by_group(own["attentions"])) for name, own in found.items()
    ]
    groups = list(models[0].groups)
    own_groups = [group for group in groups if group.endswith("self")]

    def have(figures: Sequence[str], among: Sequence[str]) -> bool:
        """Whether all attentions of these groups have these figures."""
        return all(set(figures) <= set(a) for model in models for group in among for a in model.groups[group])

    if any(shape(model) != shape(models[0]) for model in models):
        return
    for kind, below in (("logits", "logit"), ("weights", "attention weight (share of weights, log scale)")):
        if all(kind in a.get("histograms", {}) for m in models for group in own_groups for a in m.groups[group]):
            yield histograms(models, own_groups, kind, below)
    if have(["pattern"], own_groups):
        yield patterns(models, own_groups)
    titles = {title: figures for title, figures in OF_HEADS.items() if have(figures, groups)}
    if titles:
        yield heads(models, groups, titles)
    if have(["singular_values"], groups):
        yield singular_values(models, {group: GROUPS[group] for group in groups})
    if all("layers" in own for own in found.values()):
        yield rank(models, next(iter(models[0].found["layers"]["trained"])))
    if all("removal" in own for own in found.values()):
        yield removal(models, {group: GROUPS[group] for group in models[0].found["removal"]["groups"]})


def shape(model: Model) -> Dict[str, int]:
    """The heads of each attention."""
    return {name: attention["heads"] for name, attention in model.found["attentions"].items()}


def histograms(models: Sequence[Model], groups: Sequence[str], kind: str, below: str) -> Picture:
    """A row for each model, a column for the first and the last layer of a stack; the initial state is gray."""
    panels: List[Panel] = []
    columns = 2 * len(groups)
    for model in models:
        for group in groups:
            for attention in (model.groups[group][0], model.groups[group][-1]):
                calls = [*stairs(attention["histograms"][kind]), *([] if panels else [legend()])]
                of_column = {"title": f"{group.split('.')[0]}, layer {attention['layer']}"}
                title = of_column if len(panels) < columns else {}
                side = {} if len(panels) % columns else {"ylabel": model.name}
                scale = {"yscale": "log"} if kind == "weights" else {}
                calls.append(("tick_params", [], {"axis": "y", "which": "both", "left": False, "labelleft": False}))
                panels.append(Panel(calls, {**title, **side, **scale}))
    return Picture(kind, panels, (2.5 * columns, 1.5 * len(models) + 0.6), columns, below=below)


def row_of_heads(attention: Figures, title: str, **settings: str) -> List[Panel]:
    """A panel for each head; the first one has the title, if any, and the settings."""
    first, *others = [image(matrix, cmap="Blues", vmin=0) for matrix in attention["pattern"]]
    named = [*first, *([name_above(title)] if title else [])]
    return [Panel(named, settings), *(Panel(calls, {}) for calls in others)]


def patterns(models: Sequence[Model], groups: Sequence[str]) -> Picture:
    """For each model a block of columns, one for each head; a row for each layer of the encoder, then the decoder."""
    rows: List[List[Panel]] = []
    for group in groups:
        for layer in range(len(models[0].groups[group])):
            row: List[Panel] = []
            for model in models:
                title = "" if layer else f"{model.name}, {group.split('.')[0]}"
                side = {} if row else {"ylabel": f"layer {layer}"}
                row += row_of_heads(model.groups[group][layer], title, **side)
            rows.append(row)
    panels = [panel for row in rows for panel in row]
    columns = len(rows[0])
    return Picture("patterns", panels, (0.775 * columns + 0.4, 0.85 * len(rows)), columns)


def heads(models: Sequence[Model], groups: Sequence[str], titles: Mapping[str, Sequence[str]]) -> Picture:
    """A panel for each figure, a dot for each head."""
    panels: List[Panel] = []
    for title, figures in titles.items():
        calls: List[Call] = []
        for place, model in enumerate(models):
            shift = (place - (len(models) - 1) / 2) * 0.7 / len(models)
            attentions = [attention for group in groups for attention in model.groups[group]]
            for x, attention in enumerate(attentions):
                values = [sum(parts) for parts in zip(*(attention[name] for name in figures))]
                style = {"s": 9, "color": model.color, "label": None if x else model.name}
                calls.append(("scatter", [[x + shift] * len(values), values], style))
        names = [f"{attention['group'].replace('.', ' ')} {attention['layer']}" for attention in attentions]
        calls.append(("set_xticks", [list(range(len(names))), names], {"rotation": 60, "ha": "right"}))
        calls += [legend_beside()] if len(panels) == 1 else []  # of the two columns the right one
        panels.append(Panel(calls, {"title": title, "ylim": (0, None)}))
    return Picture("heads", panels, (11, 6.4), 2)


def by_choice(
    name: str, models: Sequence[Model], choices: Mapping[str, str], draw: Drawing, x: str, y: str, **settings: Any
) -> Picture:
    """A panel for each choice with what `draw` makes of each model. `choices`: with their titles."""
    panels: List[Panel] = []
    for choice, title in choices.items():
        calls = [call for model in models for call in draw(model, choice)]
        calls += [legend_beside()] if len(panels) == len(choices) - 1 else []
        panels.append(Panel(calls, {"title": title, "xlabel": x, **settings, **({} if panels else {"ylabel": y})}))
    return Picture(name, panels, (10, 3.5), len(panels), share_y=True)


def singular_values(models: Sequence[Model], groups: Mapping[str, str]) -> Picture:
    """The mean over the heads of a group, and their span."""

    def draw(model: Model, group: str) -> List[Call]:
        columns = list(zip(*(head for attention in model.groups[group] for head in attention["singular_values"])))
        shares = [i / (len(columns) - 1) for i in range(len(columns))]
        span = [[min(column) for column in columns], [max(column) for column in columns]]
        means = [round(sum(column) / len(column), 4) for column in columns]
        shade = ("fill_between", [shares, *span], {"color": model.color, "alpha": 0.15})
        return [line(shares, means, model.name, model.color), shade]

    return by_choice("singular-values", models, groups, draw, "share of the singular values", "share of their sum")


def rank(models: Sequence[Model], stack: str) -> Picture:
    """How far the rows are from equal with some branches, layer by layer; dashed: initial."""

    def draw(model: Model, branches: str) -> List[Call]:
        calls = []
        for state, name, style in (("initial", None, "--"), ("trained", model.name, "-")):
            values = model.found["layers"].get(state, {}).get(stack, {}).get(branches, {}).get("equal_rows", [])
            calls.append(line(list(range(len(values))), values, name, model.color, linestyle=style, marker="."))
        return calls

    branches = {name: name for name in models[0].found["layers"]["trained"][stack]}
    return by_choice("rank", models, branches, draw, f"{stack} layer", "distance from equal rows", yscale="log")


def removal(models: Sequence[Model], groups: Mapping[str, str]) -> Picture:
    """BLEU, or the loss if there is none, as more and more heads of a group are removed."""
    curves = [curve for model in models for curve in model.found["removal"]["groups"].values()]
    kind = "loss" if any(value is None for curve in curves for value in curve["bleu"]) else "bleu"

    def draw(model: Model, group: str) -> List[Call]:
        curve = model.found["removal"]["groups"][group]
        return [line(curve["share"], curve[kind], model.name, model.color, marker=".")]

    return by_choice("removal", models, groups, draw, "share of heads removed", KINDS[kind])
