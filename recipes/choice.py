"""Which function to choose: quality against speed, from results/. For docs/which-one.md and README.md."""

import math
import statistics
from collections import Counter
from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple

from fairseq_synth.inspect.drawing import Call, Panel, Picture, legend
from fairseq_synth.names import VARIANTS
from fairseq_synth.specs import parse_spec
from fairseq_synth.synthesizers import SYNTHESIZERS

from . import render
from .render import Column, Record, Speed, load, load_cells, of_models
from .tables import BASELINE, TABLES

TRANSLATION, LANGUAGE_MODEL = ("multi30k_cpu", "en-de"), ("ptb_cpu", "ptb")
QUALITY = (  # tables and data sets, whose difference to the Transformer is shown
    TRANSLATION,
    ("multi30k", "en-de"),
    ("multi30k_cpu", "en-fr"),
    LANGUAGE_MODEL,
    ("wikitext2_cpu", "wikitext2"),
    ("agnews_cpu", "agnews"),
    ("imdb_cpu", "imdb"),
)
SPEED = {
    "training, CPU": render.SPEED["step, batches of a corpus"],
    "training, GPU": render.SPEED_GPU["step, batches of a corpus"],
    "decoding, CPU": render.SPEED["generation, 8k words"],
    "decoding, GPU": render.SPEED_GPU["generation, 32k words"],
}
COST = {**SPEED, "memory, CPU": render.SPEED["memory, causal 16×1024"]}
LONG, LONG_GPU = render.SPEED["causal 4×1024"], render.SPEED_GPU["causal 4×1024"]
LONG_PADDED = render.SPEED_LONG["memory of a block, 4×1024"]
LEVEL = 0.05  # of all intervals of a column together


class Difference(NamedTuple):
    """A model's figure less the Transformer's of the same seed: the mean over seeds, and its interval."""

    mean: float
    half_width: float
    runs: int
    gain: float  # the mean, above 0 where the model is better

    @property
    def is_behind(self) -> bool:
        return self.gain < -self.half_width

    @property
    def is_ahead(self) -> bool:
        return self.gain > self.half_width

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ± {self.half_width:.2f}"

    @property
    def cell(self) -> str:
        """In a table: bold where the interval excludes 0."""
        return f"**{self}**" if self.is_behind or self.is_ahead else str(self)


def differences(table: str, dataset: str) -> Dict[str, Difference]:
    """{model: its difference to the Transformer}, of the models that have run beside it.

    The intervals hold together (Bonferroni): with at least 95 % probability none of them misses. Chance is taken to
    move all models alike, so that a model with a single seed has an interval too.
    """
    entry = TABLES[table]
    column = entry.column(dataset)
    figure = entry.metric(column)
    pairs = {m: own for m, own in render.pairs(entry, render.rows_of(entry, column, load_cells(table))).items() if own}
    runs = [(model, *pair) for model, own in pairs.items() for pair in own]
    variance, freedom = chance(runs, figure)
    if not freedom:
        return {}
    from scipy.stats import t

    quantile = float(t.ppf(1 - LEVEL / len(pairs) / 2, freedom))
    sign, found = -1 if entry.task.BEST is min else 1, {}
    for model, own in pairs.items():
        mean = statistics.mean(record["figures"][figure] - other["figures"][figure] for record, other in own)
        # a run of the Transformer may stand in several pairs
        shares = [count / len(own) for count in Counter(id(other) for _, other in own).values()]
        width = quantile * math.sqrt(variance * (1 / len(own) + sum(share**2 for share in shares)))
        found[model] = Difference(mean, width, len(own), sign * mean)
    return found


def chance(runs: Sequence[Tuple[str, Record, Record]], figure: str) -> Tuple[float, int]:
    """The variance of a figure from run to run, and its degrees of freedom; 0 of them where runs are too few.

    `runs` are models, each with its record and the Transformer's beside it. Runs beside the same run of the Transformer
    are a group with it. The variance is of what is left of a figure without the mean of its model and of its group. The
    differences to the Transformer would not do: those of a group all vary with one run, and so are not independent.
    """
    import numpy

    groups = {id(other): other for _, _, other in runs}
    cells = [(BASELINE, group, other["figures"][figure]) for group, other in groups.items()]
    cells += [(model, id(other), record["figures"][figure]) for model, record, other in runs]
    columns = dict.fromkeys(name for model, group, _ in cells for name in (model, group))
    design = numpy.array([[column in (model, group) for column in columns] for model, group, _ in cells], float)
    design = design.reshape(len(cells), len(columns))  # also where there are none
    values = numpy.array([float(value) for *_, value in cells])
    fitted, _, rank, _ = numpy.linalg.lstsq(design, values, rcond=None)
    freedom = len(cells) - int(rank)
    left = values - design @ fitted
    return (float(left @ left) / freedom, freedom) if freedom else (0.0, 0)


def speeds(where: render.Place) -> Dict[str, Speed]:
    """{model: its speed} of a benchmark."""
    return {spec.replace("+", "_"): speed for spec, speed in render.speeds(*where).items()}


def models() -> List[str]:
    """The Synthesizers, in the order of the translation table."""
    return [model for model in TABLES[TRANSLATION[0]].models() if model != BASELINE]


def quality() -> str:
    """The table of differences to the Transformer, after the parameters over the Transformer's.

    Baselines of other kinds, which count in the intervals, come last.
    """
    records = load_cells(TRANSLATION[0])
    sizes = {record["model"]: record["parameters"] for record in records if record["dataset"] == TRANSLATION[1]}
    columns: List[Column] = [("parameters", {model: f"{size / sizes[BASELINE]:.2f}" for model, size in sizes.items()})]
    for table, dataset in QUALITY:
        found = differences(table, dataset)
        if found:
            entry = TABLES[table]
            column = entry.column(dataset)  # translation has two recipes: there the heading has the table's title
            heading = render.titled(entry, column) if entry.corpus else column.heading
            cells = {model: difference.cell for model, difference in found.items()}
            columns.append((f"{heading}, {entry.task.METRIC_NAME}", cells))
    return of_models(columns, dict.fromkeys([*models(), *(model for _, cells in columns[1:] for model in cells)]))


def cost() -> str:
    """The table of speeds and memory, relative to stock fairseq."""
    found = {name: speeds(where) for name, where in COST.items()}
    columns = [(name, {model: f"{speed.ratio:.2f}" for model, speed in own.items()}) for name, own in found.items()]
    notes = [
        f"- {name}: " + "; ".join(f"{r['benchmark']}; {r['hardware']}; {r['flags']['dtype']}" for r in load(*where[:2]))
        for name, where in COST.items()
    ]
    return "\n".join([of_models(columns, models()), *notes, ""])


def advice() -> str:
    """Which function to take: for translation, for language models, for long text."""
    found = [of_task("Translation", *TRANSLATION), of_task("Language models", *LANGUAGE_MODEL), of_long_text()]
    return "\n".join([*filter(None, found), ""])


def of_task(heading: str, table: str, dataset: str) -> str:
    """The fastest functions of those that are not behind the Transformer, and the one with the best figure.

    Functions whose rounds overlap with those of the fastest count as equally fast; of these the one with the best
    figure is taken. A function with a single run is not named.
    """
    found, name = differences(table, dataset), TABLES[table].task.METRIC_NAME
    found = {model: difference for model, difference in found.items() if model in models() and difference.runs > 1}
    cpu = speeds(SPEED["training, CPU"])
    level = {model: speed for model, speed in cpu.items() if model in found and not found[model].is_behind}
    if not level:
        return ""
    first = max(level.values(), key=lambda speed: speed.ratio)
    fastest = [model for model in models() if model in level and level[model].highest >= first.lowest]
    chosen, best = (max(names, key=lambda model: found[model].gain) for names in (fastest, found))
    *others, last = [f"`{model}`" for model in fastest]
    text = f"on a CPU {', '.join(others)} and {last} train" if others else f"on a CPU {last} trains"
    text += f" fastest of the functions whose {name} is not behind the Transformer's"
    text += f". Of these `{chosen}` has the best {name}" if others else ""
    text += f" ({found[chosen]}): {pace(chosen)}."
    text += f" `{best}` has the best {name} of all ({found[best]}), {pace(best)}." if best != chosen else ""
    return f"- **{heading}**: {text}"


def pace(model: str) -> str:
    """How fast a training step of the base model of translation is, in words."""
    found = on_devices(model, SPEED["training, CPU"], SPEED["training, GPU"])
    return f"{found} as fast as stock fairseq" if found else "whose speed is not measured"


def on_devices(model: str, cpu: render.Place, gpu: render.Place) -> str:
    """How many times as fast as stock fairseq a model is in two benchmarks, in words."""
    of = {"CPU": speeds(cpu), "GPU": speeds(gpu)}
    return " and ".join(f"on a {name} {of[name][model].ratio:.2f} times" for name in of if model in of[name])


def of_long_text() -> str:
    """The functions that take sentences of any length, and the fastest of the others."""
    specs = {spec.replace("+", "_"): parse_spec(spec) for spec in VARIANTS}
    block, memory = speeds(LONG), {"causal": speeds(COST["memory, CPU"]), "padded": speeds(LONG_PADDED)}
    timed = [model for model in models() if model in block]
    free = [model for model in timed if not any(SYNTHESIZERS[name].has_max_length for name in specs[model])]
    limited = [model for model in timed if model not in free]
    if not free or not limited:
        return ""
    about = []
    for model in free:
        shares = [
            f"{1 / of[model].ratio:.2f} times its memory in a {kind} block"
            for kind, of in memory.items()
            if model in of
        ]
        text = f", with {' and '.join(shares)} on a CPU" if shares else ""
        about.append(f"`{model}` ({on_devices(model, LONG, LONG_GPU)} as fast as stock fairseq{text})")
    fastest = max(limited, key=lambda model: block[model].ratio)
    return (
        f"- **Long text**: {' and '.join(about)} take sentences of any length. All others are built for "
        "`--synth-max-length` tokens, fixed once trained, and beyond them only repeat their matrices "
        f"(`--synth-beyond-length tile`); the fastest of them is `{fastest}` "
        f"({on_devices(fastest, LONG, LONG_GPU)}). The speeds are those of a causal block of 1,024 tokens."
    )


def pictures() -> Iterator[Picture]:
    """Quality of translation against speed, a panel for each kind of speed; crosses reach over the intervals."""
    found = differences(*TRANSLATION)
    measured = {heading: speeds(where) for heading, where in SPEED.items()}
    if not found or not any(measured.values()):
        return
    panels: List[Panel] = []
    for heading, of in measured.items():
        calls: List[Call] = [("axvline", [1], {"color": "grey", "lw": 1}), ("axhline", [0], {"color": "grey", "lw": 1})]
        both = [(number, model) for number, model in enumerate(models()) if model in found and model in of]
        calls += [cross(model, number, found[model], of[model]) for number, model in both]
        first = {} if panels else {"ylabel": "BLEU minus the Transformer's"}
        panels.append(Panel([*calls, *([] if panels else [legend()])], {"title": heading, **first}))
    below = "times as fast as stock fairseq"
    yield Picture("which-one.png", panels, (13, 4.2), len(panels), True, True, below)


def cross(model: str, number: int, difference: Difference, speed: Speed) -> Call:
    """A model's point with the interval of its quality and the range of its speed."""
    x, y = round(speed.ratio, 3), round(difference.mean, 3)
    left, right = round(max(x - speed.lowest, 0), 3), round(max(speed.highest - x, 0), 3)
    bars = {"xerr": [[left], [right]], "yerr": [round(difference.half_width, 3)], "elinewidth": 0.5}
    style = {"fmt": "osD^v"[number // 10], "ms": 5, "color": f"C{number % 10}", "label": model}
    return "errorbar", [[x], [y]], {**style, **bars}
