"""The pictures that compare all functions: S of each function, quality and speed, speeds and memory."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fairseq_synth.inspect.drawing import Panel, Picture, image
from recipes.catalog import TABLES, TASKS

from .axes import SMALL_FONT, WIDTH, RecordedAxes, get_limits_of_models, use_logarithmic_x_axis
from .records import (
    Benchmark,
    Difference,
    SpeedUp,
    compute_differences,
    get_column,
    load_column,
    load_speed_ups,
)
from .speed_tables import find_benchmark, sort_models
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
COLORS = "RdBu_r"  # matplotlib's colors from blue for negative values through white for 0 to red


def draw_functions() -> Picture:
    """Returns a picture of the attention logits S of each function for one sentence, in one head before training.

    Equal words have equal vectors. The last panel is the scale of the colors.
    """
    panels = []
    for number, (name, formula) in enumerate(FORMULAS.items()):
        is_first_in_row = number % PANELS_IN_A_ROW == 0
        panels.append(draw_logits(name, formula, is_first_in_row))
    panels.append(draw_color_scale())
    return Picture("six-kinds-of-s.png", panels, size=(WIDTH, 5.1), columns=PANELS_IN_A_ROW)


def draw_logits(name: str, formula: str, has_row_labels: bool) -> Panel:
    """Draws the logits S of an attention function as colors, under the function's name and formula.

    The columns are named by the words. The rows are named only if `has_row_labels` is true.
    """
    from .example_logits import compute_logits  # imports torch, which takes seconds and no other picture needs

    logits = compute_logits(name, WORDS)
    all_values = itertools.chain.from_iterable(logits)
    largest = max(abs(value) for value in all_values)
    axes = RecordedAxes()
    colored_matrix = image(
        logits,
        labels=WORDS,
        has_row_labels=has_row_labels,
        cmap=COLORS,
        vmin=-largest,  # The colors reach as far below 0 as above it, so that 0 is white.
        vmax=largest,
        aspect="equal",
    )
    axes.record(colored_matrix)
    axes.set_title(f"{name}\n{formula}", fontsize=SMALL_FONT)
    axes.set(xlabel="word j")
    if has_row_labels:
        axes.set(ylabel="word i")
    return axes.panel()


def draw_color_scale() -> Panel:
    """Draws a bar of the colors from the largest value of S, at the top, through 0 to its negative."""
    axes = RecordedAxes()
    column_of_pixels = [[number / 50 - 1] for number in range(100, -1, -1)]  # 101 pixels, from 1 to -1
    axes.imshow(column_of_pixels, cmap=COLORS, aspect=0.2)
    axes.set_yticks([0, 50, 100], ["largest |S|", "0", "− largest |S|"])
    axes.set_xticks([])
    axes.set_title("each picture has\nits own scale", fontsize=SMALL_FONT)
    return axes.panel()


# ---- quality and speed


class QualityPanel(NamedTuple):
    """A panel of `draw_choice` with differences to the Transformer on one data set of a table."""

    table: str
    dataset: str
    metrics: Sequence[str]
    title: str


class SpeedPanel(NamedTuple):
    """A panel of `draw_choice` with the speed-ups in one benchmark."""

    benchmark: Benchmark
    title: str


QUALITY_PANELS = (
    QualityPanel("multi30k_cpu", "en-de", metrics=("bleu", "chrf"), title="translation, En-De\nBLEU ●  chrF ○"),
    QualityPanel("multi30k_cpu", "en-fr", metrics=("bleu", "chrf"), title="translation, En-Fr\nBLEU ●  chrF ○"),
    QualityPanel("ptb_cpu", "ptb", metrics=("ppl",), title="language model,\nPTB, perplexity"),
)
SPEED_PANELS = (
    SpeedPanel(find_benchmark("speed", "step, 4,000 words"), title="training step,\none CPU thread"),
    SpeedPanel(find_benchmark("speed on a GPU", "step, batches of a corpus"), title="training step,\nH100"),
)
# The style of the dots of a panel's first and second metric.
FILLED_DOT = {"color": "C0", "markerfacecolor": "C0"}
HOLLOW_DOT = {"color": "C1", "markerfacecolor": "white"}
# How far apart the two dots of a model are. The lines of two models have the distance 1.
DISTANCE_OF_DOTS = 0.36
# The axis of the panels of speed-ups, which has room for all of them, and the color of their dots.
SPEED_LIMITS = (0.52, 1.6)
SPEED_TICKS = (0.6, 0.8, 1, 1.3)
SPEED_COLOR = "C2"

DifferencesByMetric = Mapping[str, Mapping[str, Difference]]  # {metric: {model: its difference to the Transformer}}


def draw_choice() -> list[Picture]:
    """Returns the picture that shows for each Synthesizer how good it is and how fast it trains.

    Both are compared with the Transformer. The list is empty if no quality was measured.
    """
    differences_by_panel = {panel: load_differences(panel) for panel in QUALITY_PANELS}
    speed_ups_by_panel = {panel: load_speed_ups(panel.benchmark) for panel in SPEED_PANELS}
    models_with_quality = find_models_with_quality(differences_by_panel.values())
    models_with_speed = find_models_with_speed(speed_ups_by_panel.values())
    if not models_with_quality:
        return []
    models = list_synthesizers_among(models_with_quality | models_with_speed)
    panels = []
    for quality_panel, differences in differences_by_panel.items():
        panels.append(draw_quality(quality_panel, differences, models))
    for speed_panel, speed_ups in speed_ups_by_panel.items():
        panels.append(draw_speed(speed_panel, speed_ups, models))
    return [
        Picture(
            "which-one.png",
            panels,
            size=(WIDTH, get_height(models, height_of_line=0.23)),
            columns=len(panels),
            share_y=True,
            below=(
                "Right of the line is better than fairseq's Transformer.\n"
                "Bars: 95 % confidence intervals (quality), range over all rounds (speed)."
            ),
        )
    ]


def list_synthesizers_among(models: set[str]) -> list[str]:
    """Returns those models that are Synthesizers, in the order of the architectures.

    The model "vanilla" is left out, as it has the Transformer's own attention.
    """
    return [name for name in SYNTHESIZERS if name in models and name != "vanilla"]


def find_models_with_quality(differences_of_panels: Iterable[DifferencesByMetric]) -> set[str]:
    """Returns the names of the models that have a difference to the Transformer in any panel and metric."""
    names: set[str] = set()
    for differences_by_metric in differences_of_panels:
        for difference_by_model in differences_by_metric.values():
            names.update(difference_by_model.keys())
    return names


def find_models_with_speed(speed_ups_of_panels: Iterable[Mapping[str, SpeedUp]]) -> set[str]:
    """Returns the names of the models that have a speed-up in any panel."""
    names: set[str] = set()
    for speed_up_by_model in speed_ups_of_panels:
        names.update(speed_up_by_model.keys())
    return names


def load_differences(panel: QualityPanel) -> DifferencesByMetric:
    """Returns {metric: {model: its difference to the Transformer}} for the metrics of a panel."""
    table = TABLES[panel.table]
    runs_by_model = load_column(table, get_column(table, panel.dataset))
    return {metric: compute_differences(table, runs_by_model, metric) for metric in panel.metrics}


def get_height(models: Sequence[str], height_of_line: float) -> float:
    """Returns the height of a picture in inches: room for titles, axis and caption, and a line for each model."""
    return 1.6 + height_of_line * len(models)


def name_models(axes: RecordedAxes, models: Sequence[str]) -> None:
    """Writes the names of models at 0, 1, 2, … of the y axis."""
    axes.set_yticks(list(range(len(models))), list(models))


def draw_quality(panel: QualityPanel, differences: DifferencesByMetric, models: Sequence[str]) -> Panel:
    """Draws the differences of each model to the Transformer, with their intervals. Better is on the right.

    Args:
        panel: says which metrics are drawn: one or two.
        differences: {metric: {model: its difference}}.
        models: the models, from top to bottom.
    """
    axes = RecordedAxes()
    axes.axvline(0, color="black", linewidth=1)
    axes.grid(axis="y", alpha=0.3)
    name_models(axes, models)
    places_of_metrics = choose_places(len(models), number_of_metrics=len(panel.metrics))
    dots_of_metrics = [FILLED_DOT, HOLLOW_DOT]  # a second metric has hollow dots
    for metric, places, dot in zip(panel.metrics, places_of_metrics, dots_of_metrics):
        draw_metric(axes, differences[metric], models, places, dot)
    task = TASKS[TABLES[panel.table].task]
    is_lower_better = task.best is min  # `best` is the function that chooses the best of several scores
    if is_lower_better:
        axes.invert_xaxis()  # brings lower values to the right
    axes.set_title(panel.title, fontsize=SMALL_FONT)
    axes.set(ylim=get_limits_of_models(len(models)), xlabel="minus the\nTransformer")
    return axes.panel()


def choose_places(number_of_models: int, number_of_metrics: int) -> list[list[float]]:
    """Returns for each of one or two metrics at which places of the y axis the dots of the models are.

    The models have lines at 0, 1, 2, … from top to bottom. The dots of a single metric are on these lines. The dots of
    a first metric are a little above the lines, and those of a second metric are a little below them.
    """
    lines = [float(number) for number in range(number_of_models)]
    if number_of_metrics == 1:
        return [lines]
    # A place above a line has a smaller number, as the numbers of the axis rise downwards.
    first_metric = [line - DISTANCE_OF_DOTS / 2 for line in lines]
    second_metric = [place + DISTANCE_OF_DOTS for place in first_metric]
    return [first_metric, second_metric]


def draw_metric(
    axes: RecordedAxes,
    differences: Mapping[str, Difference],
    models: Sequence[str],
    places: Sequence[float],
    dot: Mapping[str, str],
) -> None:
    """Draws a dot with an interval for each model that has a difference in one metric.

    Args:
        axes: where to draw.
        differences: {model: its difference to the Transformer}.
        models: the models to draw.
        places: where each of the models is drawn on the y axis.
        dot: the style of the dots.
    """
    for model, place in zip(models, places):
        if model in differences:
            # Rounded, so that a picture stays the same if the last bits of a mean differ from computer to computer.
            mean = round(differences[model].mean, 3)
            half_width = round(differences[model].half_width, 3)
            axes.errorbar([mean], [place], xerr=[half_width], fmt="o", ms=4, elinewidth=1, **dot)


def draw_speed(panel: SpeedPanel, speed_ups: Mapping[str, SpeedUp], models: Sequence[str]) -> Panel:
    """Draws the speed-up of each model over the Transformer, with the range over the rounds of the benchmark."""
    axes = RecordedAxes()
    axes.axvline(1, color="black", linewidth=1)
    axes.grid(axis="y", alpha=0.3)
    name_models(axes, models)
    for line_number, model in enumerate(models):
        if model in speed_ups:
            # Rounded, so that a picture stays the same if the last bits of a ratio differ.
            ratio = round(speed_ups[model].ratio, 3)
            lengths_of_bar = get_distances_to_rounds(speed_ups[model])  # to the left and to the right
            axes.errorbar([ratio], [line_number], xerr=lengths_of_bar, fmt="s", ms=4, elinewidth=1, color=SPEED_COLOR)
    use_logarithmic_x_axis(axes, limits=SPEED_LIMITS, ticks=SPEED_TICKS)
    axes.set_title(panel.title, fontsize=SMALL_FONT)
    axes.set(ylim=get_limits_of_models(len(models)), xlabel="times as fast\n(logarithmic)")
    return axes.panel()


def get_distances_to_rounds(speed_up: SpeedUp) -> list[list[float]]:
    """Returns how far the lowest and the highest round are from the median.

    This is the form in which matplotlib takes the lengths of a bar to the left and to the right: [[left], [right]].
    """
    below = round(max(speed_up.ratio - speed_up.lowest, 0), 3)
    above = round(max(speed_up.highest - speed_up.ratio, 0), 3)
    return [[below], [above]]


# ---- speeds and memory


class BarPanel(NamedTuple):
    """A panel of `draw_speeds`: a benchmark, its words, and the ends and ticks of its axis."""

    title: str
    x_label: str
    benchmark: Benchmark
    limits: tuple[float, float]
    ticks: tuple[float, ...]


FASTER: dict[str, Any] = {"x_label": "times as fast", "limits": (0.35, 11), "ticks": (0.5, 1, 2, 4)}
BAR_PANELS = (
    BarPanel("training step,\n4,000 words", benchmark=find_benchmark("speed", "step, 4,000 words"), **FASTER),
    BarPanel("training step,\nH100", benchmark=find_benchmark("speed on a GPU", "step, batches of a corpus"), **FASTER),
    BarPanel("causal block\n4×1024", benchmark=find_benchmark("speed", "causal block 4×1024"), **FASTER),
    BarPanel("beam search,\n8,000 words", benchmark=find_benchmark("speed", "generation, 8k words"), **FASTER),
    BarPanel(
        "peak memory of a\nblock 16×1024",
        x_label="times less memory",
        benchmark=find_benchmark("speed", "memory, causal block 16×1024"),
        limits=(0.07, 8),
        ticks=(0.1, 0.3, 1, 4),
    ),
)
FASTER_COLOR = "#2a78b5"  # blue
SLOWER_COLOR = "#d1733c"  # orange


def draw_speeds() -> list[Picture]:
    """Returns the picture that shows, for each benchmark, how many times as fast as the Transformer each model is.

    A benchmark that has not been run has no panel. The list has this single picture, or none if no benchmark has run.
    """
    speed_ups_by_panel = {}
    for bar_panel in BAR_PANELS:
        speed_ups = load_speed_ups(bar_panel.benchmark)
        if speed_ups:
            speed_ups_by_panel[bar_panel] = speed_ups
    if not speed_ups_by_panel:
        return []
    models = sort_models(find_models_with_speed(speed_ups_by_panel.values()))
    drawn_panels = []
    for bar_panel, speed_ups in speed_ups_by_panel.items():
        drawn_panels.append(draw_bars(bar_panel, speed_ups, models))
    return [
        Picture(
            "speed.png",
            drawn_panels,
            size=(WIDTH, get_height(models, height_of_line=0.2)),
            columns=len(drawn_panels),
            share_y=True,
            below=(
                "Speed, or memory saved, relative to fairseq's Transformer (logarithmic): "
                "right of the line is better.\n"
                "Measured on one CPU thread or on an H100. Gray lines: range over all rounds. –: not measured."
            ),
        )
    ]


def draw_bars(panel: BarPanel, speed_ups: Mapping[str, SpeedUp], models: Sequence[str]) -> Panel:
    """Draws a bar and a number for each model. A bar begins at 1, which is the Transformer's speed."""
    axes = RecordedAxes()
    axes.axvline(1, color="black", linewidth=1)
    use_logarithmic_x_axis(axes, panel.limits, panel.ticks)
    for line_number, model in enumerate(models):
        if model in speed_ups:
            draw_bar(axes, line_number, speed_ups[model])
            write_at_right_edge(axes, line_number, f"{speed_ups[model].ratio:.2f}")
        else:
            write_at_right_edge(axes, line_number, "–")
    name_models(axes, models)
    axes.set_title(panel.title, fontsize=SMALL_FONT)
    axes.set(ylim=get_limits_of_models(len(models)), xlabel=panel.x_label)
    return axes.panel()


def write_at_right_edge(axes: RecordedAxes, line_number: int, text: str) -> None:
    """Writes a text on the line of a model, so that it ends at 98 % of the panel's width."""
    x_and_y = (0.98, line_number)
    units = ("axes fraction", "data")  # the unit of x, and that of y
    axes.annotate(text, x_and_y, fontsize=7.5, xycoords=units, ha="right", va="center")


def draw_bar(axes: RecordedAxes, line_number: int, speed_up: SpeedUp) -> None:
    """Draws the bar of a model, from 1 to its speed-up, with a gray line from the lowest to the highest round."""
    ratio = round(speed_up.ratio, 2)
    color = FASTER_COLOR if ratio >= 1 else SLOWER_COLOR
    width_from_one = ratio - 1  # negative for a bar to the left of 1
    axes.barh(
        line_number,
        width_from_one,
        left=1,
        height=0.72,
        color=color,
        xerr=get_distances_to_rounds(speed_up),
        ecolor="gray",
    )
