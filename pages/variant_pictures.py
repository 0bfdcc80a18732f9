"""The pictures that compare all functions: S of each function, quality and speed, speeds and memory."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fairseq_synth.inspect.drawing import Call, Panel, Picture, image
from recipes.catalog import TABLES, TASKS

from .axes import TITLE, WIDTH, call, logarithmic_x_axis, vertical_line
from .records import Difference, Place, Speed, differences, get_column, load_column, load_speeds
from .speed_tables import find_place, sort_models
from .tables import SYNTHESIZERS

# ---- S of each function

WORDS = "the dog saw the cat and the cat saw the dog .".split()
FORMULAS = {  # in matplotlib's TeX, with what a row of S depends on
    "vanilla": "$S_{ij} = q_i \\cdot k_j\\,/\\sqrt{d}$\nfrom each pair of words",
    "random": "$S_{ij} = R_{ij}$, trained\nfrom positions alone",
    "fixed_random": "$S_{ij} = R_{ij}$, not trained\nfrom positions alone",
    "factorized_random": "$S = R_1 R_2^\\top$, rank k\nfrom positions alone",
    "dense": "$S_i = W_2\\,\\mathrm{relu}(W_1 x_i)$\nfrom word i alone",
    "factorized_dense": "$S_{ij} = A_i[u]\\;B_i[v]$\nfrom word i alone",
    "relative_random": "$S_{ij} = r_{j - i}$, trained\nfrom distances alone",
}
PANELS_IN_A_ROW = 4


def draw_functions() -> Picture:
    """Draws S of each function for one sentence: a head before training, with equal vectors for equal words."""
    panels = []
    for number, (name, formula) in enumerate(FORMULAS.items()):
        matrix = compute_logits(name)
        largest = max(max(abs(value) for value in row) for row in matrix)
        is_first_in_row = number % PANELS_IN_A_ROW == 0
        # from blue for the lowest value through white for 0 to red: as far below 0 as above it
        style = {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest, "aspect": "equal"}
        calls = image(matrix, labels=WORDS, names=is_first_in_row, **style)
        calls.append(call("set_title", f"{name}\n{formula}", **TITLE))
        settings = {"xlabel": "word j"}
        if is_first_in_row:
            settings["ylabel"] = "word i"
        panels.append(Panel(calls, settings))
    panels.append(draw_color_scale())
    return Picture("six-kinds-of-s.png", panels, size=(WIDTH, 5.1), columns=PANELS_IN_A_ROW)


def compute_logits(name: str) -> list[list[float]]:
    """Returns S, rounded, of a function before training: a row and a column for each word of `WORDS`."""
    import torch

    from fairseq_synth.positions import Inputs
    from fairseq_synth.synthesizers import Mixture

    length = len(WORDS)
    width = 16
    torch.manual_seed(4)  # for the words' vectors and the projections, which are the same for all functions
    # in fp64, so that the rounded values do not depend on the processor
    vectors = {word: torch.randn(width, dtype=torch.double) for word in sorted(set(WORDS))}
    query_matrix, key_matrix = torch.randn(2, width, width, dtype=torch.double).div(width**0.5).unbind()
    x = torch.stack([vectors[word] for word in WORDS])  # (length, width)
    queries = x @ query_matrix
    keys = x @ key_matrix
    torch.manual_seed(1)  # for the function's own parameters
    function = Mixture((name,), mixture="convex", num_heads=1, head_dim=width, max_length=length, rank=2)
    function.reset_parameters()
    function = function.double()
    # one sentence and one head: dimensions of size 1
    inputs = Inputs(x=x[:, None], q=queries[None, None], k=keys[None, None], start=0, src_len=length)
    with torch.no_grad():
        logits = function(inputs)[0].total(length)
    matrix = logits.expand(1, 1, length, length)[0, 0]
    return [[round(value, 3) for value in row] for row in matrix.tolist()]


def draw_color_scale() -> Panel:
    """Draws the colours from the largest value, at the top, to its negative."""
    values = [[number / 50 - 1] for number in range(100, -1, -1)]  # a column of 101 pixels, from 1 to -1
    calls = [
        call("imshow", values, cmap="RdBu_r", aspect=0.2),
        call("set_yticks", [0, 50, 100], ["largest |S|", "0", "− largest |S|"]),
        call("set_xticks", []),
        call("set_title", "each picture has\nits own scale", **TITLE),
    ]
    return Panel(calls, {})


# ---- quality and speed


class Quality(NamedTuple):
    """A panel of differences to the Transformer: a table's data set, its figures, and the words around the panel."""

    table: str
    dataset: str
    figures: Sequence[str]
    title: str
    x_label: str


class Pace(NamedTuple):
    """A panel of speeds."""

    title: str
    place: Place


QUALITIES = (
    Quality("multi30k_cpu", "en-de", ("bleu", "chrf"), "translation, En-De\nBLEU ●  chrF ○", "minus the\nTransformer"),
    Quality("multi30k_cpu", "en-fr", ("bleu", "chrf"), "translation, En-Fr\nBLEU ●  chrF ○", "minus the\nTransformer"),
    Quality("ptb_cpu", "ptb", ("ppl",), "language model,\nPTB, perplexity", "minus the\nTransformer"),
)
PACES = (
    Pace("training step,\none CPU thread", find_place("speed", "step, 4,000 words")),
    Pace("training step,\nH100", find_place("speed on a GPU", "step, batches of a corpus")),
)
DOTS = (  # of the first and the second figure of a panel
    {"color": "C0", "markerfacecolor": "C0"},
    {"color": "C1", "markerfacecolor": "white"},
)


def draw_choice() -> list[Picture]:
    """Draws for each Synthesizer by how much it is better than the Transformer, and how fast it trains.

    Returns no picture where no quality has been measured. A Synthesizer without any figure has no row.
    """
    differences_by_quality = {quality: load_differences(quality) for quality in QUALITIES}
    speeds_by_pace = {pace: load_speeds(pace.place) for pace in PACES}
    models_with_quality: set[str] = set()
    for differences_by_figure in differences_by_quality.values():
        for differences_by_model in differences_by_figure.values():
            models_with_quality.update(differences_by_model)
    if not models_with_quality:
        return []
    models_with_speed: set[str] = set()
    for speeds in speeds_by_pace.values():
        models_with_speed.update(speeds)
    measured = models_with_quality | models_with_speed
    models = [model for model in SYNTHESIZERS if model in measured and model != "vanilla"]
    panels = []
    for quality, differences_by_figure in differences_by_quality.items():
        panels.append(draw_quality(quality, differences_by_figure, models))
    for pace, speeds in speeds_by_pace.items():
        panels.append(draw_pace(pace, speeds, models))
    below = (
        "Right of the line is better than fairseq's Transformer.\n"
        "Bars: 95 % confidence intervals (quality), range over all rounds (speed)."
    )
    size = (WIDTH, 1.6 + 0.23 * len(models))  # inches: titles, axis and caption, then a line for each model
    return [Picture("which-one.png", panels, size, columns=len(panels), share_y=True, below=below)]


def load_differences(quality: Quality) -> dict[str, dict[str, Difference]]:
    """Returns {figure: {model: its difference to the Transformer}}."""
    table = TABLES[quality.table]
    rows = load_column(table, get_column(table, quality.dataset))
    return {figure: differences(table, rows, figure) for figure in quality.figures}


def model_axis(models: Sequence[str]) -> list[Call]:
    """Returns calls that name the rows of a panel, at 0, 1, 2, … of its y axis, and draw a line through each."""
    return [call("grid", axis="y", alpha=0.3), call("set_yticks", list(range(len(models))), list(models))]


def model_limits(models: Sequence[str]) -> tuple[float, float]:
    """Returns the lower and the upper end of the axis of models.

    The axis is turned around, so that its first model, at 0, is at the top. Half a step is left free on both sides.
    """
    lower_end = len(models) - 0.5
    upper_end = -0.5
    return lower_end, upper_end


def draw_quality(
    quality: Quality, differences_by_metric: Mapping[str, Mapping[str, Difference]], models: Sequence[str]
) -> Panel:
    """Draws the differences of each model with their intervals. Metrics are one below the other in a model's row."""
    calls = [vertical_line(0), *model_axis(models)]
    distance = 0.36  # between the dots of two metrics of a model, where two models are 1 apart
    first_shift = -distance * (len(differences_by_metric) - 1) / 2  # so that the dots lie around the middle of the row
    for number, differences_by_model in enumerate(differences_by_metric.values()):
        for row, model in enumerate(models):
            if model in differences_by_model:
                height = row + first_shift + number * distance
                calls.append(draw_difference(differences_by_model[model], height, DOTS[number]))
    if TASKS[TABLES[quality.table].task].best is min:
        calls.append(call("invert_xaxis"))  # so that better is on the right
    calls.append(call("set_title", quality.title, **TITLE))
    return Panel(calls, {"ylim": model_limits(models), "xlabel": quality.x_label})


def draw_difference(difference: Difference, height: float, dot: Mapping[str, str]) -> Call:
    """Returns a dot for a difference at a height of the panel, with a bar for its interval."""
    mean = round(difference.mean, 3)
    half_width = round(difference.half_width, 3)
    return call("errorbar", [mean], [height], xerr=[half_width], fmt="o", ms=4, elinewidth=1, **dot)


def draw_pace(pace: Pace, speeds: Mapping[str, Speed], models: Sequence[str]) -> Panel:
    """Draws the speed of each model, with the range over the rounds."""
    calls = [vertical_line(1), *model_axis(models)]
    for row, model in enumerate(models):
        if model in speeds:
            ratio = round(speeds[model].ratio, 3)
            bar = distances_to_rounds(speeds[model])
            calls.append(call("errorbar", [ratio], [row], xerr=bar, fmt="s", ms=4, elinewidth=1, color="C2"))
    calls += logarithmic_x_axis(low=0.52, high=1.6, ticks=(0.6, 0.8, 1, 1.3))
    calls.append(call("set_title", pace.title, **TITLE))
    return Panel(calls, {"ylim": model_limits(models), "xlabel": "times as fast\n(logarithmic)"})


def distances_to_rounds(speed: Speed) -> list[list[float]]:
    """Returns how far the lowest and the highest round are from a speed, as matplotlib's error bars take them."""
    below = round(max(speed.ratio - speed.lowest, 0), 3)
    above = round(max(speed.highest - speed.ratio, 0), 3)
    return [[below], [above]]


# ---- speeds and memory


class SpeedPanel(NamedTuple):
    """A panel of `draw_speeds`: its words, its figures, and the ends and ticks of its axis."""

    title: str
    x_label: str
    place: Place
    limits: tuple[float, float]
    ticks: tuple[float, ...]


FASTER: dict[str, Any] = {"x_label": "times as fast", "limits": (0.35, 11), "ticks": (0.5, 1, 2, 4)}
SPEED_PANELS = (
    SpeedPanel("training step,\n4,000 words", place=find_place("speed", "step, 4,000 words"), **FASTER),
    SpeedPanel("training step,\nH100", place=find_place("speed on a GPU", "step, batches of a corpus"), **FASTER),
    SpeedPanel("causal block\n4×1024", place=find_place("speed", "causal block 4×1024"), **FASTER),
    SpeedPanel("beam search,\n8,000 words", place=find_place("speed", "generation, 8k words"), **FASTER),
    SpeedPanel(
        "peak memory of a\nblock 16×1024",
        x_label="times less memory",
        place=find_place("speed", "memory, causal block 16×1024"),
        limits=(0.07, 8),
        ticks=(0.1, 0.3, 1, 4),
    ),
)


def draw_speeds() -> list[Picture]:
    """Draws a panel for each benchmark, with bars that begin at fairseq's Transformer; no picture if none has run."""
    by_panel = {panel: load_speeds(panel.place) for panel in SPEED_PANELS}
    measured: set[str] = set()
    for speeds in by_panel.values():
        measured.update(speeds)
    models = sort_models(measured)
    if not models:
        return []
    panels = []
    for panel, speeds in by_panel.items():
        if speeds:
            panels.append(draw_bars(panel, speeds, models))
    below = (
        "Speed, or memory saved, relative to fairseq's Transformer (logarithmic): right of the line is better.\n"
        "Measured on one CPU thread or on an H100. Gray lines: range over all rounds. –: not measured."
    )
    size = (WIDTH, 1.6 + 0.2 * len(models))  # inches: titles, axis and caption, then a line for each model
    return [Picture("speed.png", panels, size, columns=len(panels), share_y=True, below=below)]


def draw_bars(panel: SpeedPanel, speeds: Mapping[str, Speed], models: Sequence[str]) -> Panel:
    """Draws a bar and a number for each model. A bar begins at 1, which is the Transformer's speed."""
    low, high = panel.limits
    calls = [vertical_line(1), *logarithmic_x_axis(low, high, panel.ticks)]
    for row, model in enumerate(models):
        text = "–"
        if model in speeds:
            ratio = round(speeds[model].ratio, 2)
            text = f"{ratio:.2f}"
            color = "#2a78b5" if ratio >= 1 else "#d1733c"  # blue for faster models, orange for slower ones
            rounds = distances_to_rounds(speeds[model])
            calls.append(call("barh", row, ratio - 1, left=1, height=0.72, color=color, xerr=rounds, ecolor="gray"))
        at_right_edge = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "center"}
        calls.append(call("annotate", text, (0.98, row), fontsize=7.5, **at_right_edge))
    calls.append(call("set_yticks", list(range(len(models))), list(models)))
    calls.append(call("set_title", panel.title, **TITLE))
    return Panel(calls, {"ylim": model_limits(models), "xlabel": panel.x_label})
