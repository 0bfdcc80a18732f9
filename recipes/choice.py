"""Which function to choose: quality against speed, from results/. For docs/which-one.md and README.md."""

import math
import statistics
from typing import Dict, Iterator, List, NamedTuple

from fairseq_synth.inspect.drawing import Call, Panel, Picture, legend
from fairseq_synth.specs import parse_spec
from fairseq_synth.synthesizers import SYNTHESIZERS

from .render import label, load, load_cells, markdown, of_models, paired_differences
from .tables import BASELINE, TABLES

TRANSLATION, LANGUAGE_MODEL = ("multi30k_cpu", "en-de"), ("ptb_cpu", "ptb")
QUALITY = (  # tables and data sets, whose difference to the Transformer is shown
    TRANSLATION,
    ("multi30k_cpu", "en-fr"),
    LANGUAGE_MODEL,
    ("wikitext2_cpu", "wikitext2"),
    ("agnews_cpu", "agnews"),
    ("imdb_cpu", "imdb"),
)
SPEED = {  # heading: folder and file of results/, figure, and the names of its lowest and highest round
    "training, CPU": ("speed_cpu", "step_corpus", "1024 tokens", "1024 tokens from", "1024 tokens to"),
    "training, GPU": ("speed_gpu", "step_corpus", "4096 tokens", "4096 tokens from", "4096 tokens to"),
    "decoding, CPU": ("speed_cpu", "generate_8k", "ratio", "lowest", "highest"),
    "decoding, GPU": ("speed_gpu", "generate_32k", "ratio", "lowest", "highest"),
}
MEMORY = {"memory, CPU": ("speed_cpu", "memory_causal", "16x1024", "", "")}
LONG = ("speed_cpu", "block_causal", "4x1024", "", "")
LEVEL = 0.05  # of all intervals of a column together


class Difference(NamedTuple):
    """A model's figure less the Transformer's of the same seed: the mean over seeds, and its interval."""

    mean: float
    half_width: float
    runs: int
    lower_is_better: bool

    @property
    def gain(self) -> float:
        """The mean, above 0 where the model is better."""
        return -self.mean if self.lower_is_better else self.mean

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


class Speed(NamedTuple):
    """How many times as fast as stock fairseq, or how many times less memory; the lowest and the highest round."""

    ratio: float
    lowest: float
    highest: float


def differences(table: str, dataset: str) -> Dict[str, Difference]:
    """{model: its difference to the Transformer}, of the models that have run beside it.

    The intervals hold together (Bonferroni): with 95 % probability none of them misses. Differences are taken to vary
    alike for all models, so that a model with a single seed has an interval too.
    """
    entry = TABLES[table]
    column = next(column for column in entry.datasets if column.name == dataset)
    here = of_models(entry, column, load_cells(table))
    metric = entry.metric(column)
    pairs = paired_differences(entry, here, lambda record: float(record["figures"][metric]))
    pairs = {model: values for model, values in pairs.items() if values and model != entry.baseline}
    freedom = sum(len(values) - 1 for values in pairs.values())
    if not freedom:
        return {}
    from scipy.stats import t

    squares = sum((len(values) - 1) * statistics.variance(values) for values in pairs.values() if len(values) > 1)
    width = float(t.ppf(1 - LEVEL / len(pairs) / 2, freedom)) * math.sqrt(squares / freedom)
    lower_is_better = entry.task.BEST is min
    return {
        model: Difference(statistics.mean(values), width / math.sqrt(len(values)), len(values), lower_is_better)
        for model, values in pairs.items()
    }


def speeds(folder: str, file: str, figure: str, lowest: str, highest: str) -> Dict[str, Speed]:
    """{model: its speed} of a benchmark in results/."""
    found: Dict[str, Speed] = {}
    for record in load(folder, file):
        for spec, values in record["figures"].items():
            if figure in values and spec != "stock":
                ratio = values[figure]
                found[spec.replace("+", "_")] = Speed(ratio, values.get(lowest, ratio), values.get(highest, ratio))
    return found


def models() -> List[str]:
    """The Synthesizers, in the order of the translation table."""
    return [model for model in TABLES[TRANSLATION[0]].models() if model != BASELINE]


def quality() -> str:
    """The table of differences to the Transformer."""
    heads, columns = ["model", "parameters"], [list(map(label, models())), list(map(parameters, models()))]
    for table, dataset in QUALITY:
        found = differences(table, dataset)
        if found:
            entry = TABLES[table]
            heading = next(column.heading for column in entry.datasets if column.name == dataset)
            heads.append(f"{heading}, {entry.task.METRIC_NAME}")
            columns.append([found[model].cell if model in found else "" for model in models()])
    return "\n".join([*markdown(heads, zip(*columns)), ""])


def parameters(model: str) -> str:
    """A translation model's parameters over the Transformer's."""
    records = {record["model"]: record for record in load_cells(TRANSLATION[0])}
    if model not in records:
        return ""
    return f"{records[model]['parameters'] / records[BASELINE]['parameters']:.2f}"


def cost() -> str:
    """The table of speeds and memory, relative to stock fairseq."""
    columns = {**SPEED, **MEMORY}
    found = {heading: speeds(*where) for heading, where in columns.items()}
    rows = [
        [label(model), *(f"{of[model].ratio:.2f}" if model in of else "" for of in found.values())]
        for model in models()
    ]
    notes = [f"- {heading}: {what(*where)}" for heading, where in columns.items()]
    return "\n".join([*markdown(["model", *columns], rows), "", *notes, ""])


def what(folder: str, file: str, *_: str) -> str:
    """What a benchmark measured, and where."""
    return "; ".join(f"{r['benchmark']}; {r['hardware']}; {r['flags']['dtype']}" for r in load(folder, file))


def advice() -> str:
    """Which function to take: for translation, for language models, for long text."""
    found = [of_task("Translation", *TRANSLATION), of_task("Language models", *LANGUAGE_MODEL), of_long_text()]
    return "\n".join([*filter(None, found), ""])


def of_task(heading: str, table: str, dataset: str) -> str:
    """The fastest function of those that are not behind the Transformer, and the one with the best figure.

    A function with a single run is not named.
    """
    found, name = differences(table, dataset), TABLES[table].task.METRIC_NAME
    found = {model: difference for model, difference in found.items() if model in models() and difference.runs > 1}
    cpu = speeds(*SPEED["training, CPU"])
    level = [model for model in cpu if model in found and not found[model].is_behind]
    if not level:
        return ""
    fastest = max(level, key=lambda model: cpu[model].ratio)
    best = max(found, key=lambda model: found[model].gain)
    text = (
        f"- **{heading}**: `{fastest}` trains fastest of the functions whose {name} is not behind the Transformer's "
        f"({found[fastest]}), {pace(fastest)}."
    )
    return text + f" `{best}` has the best {name} ({found[best]}), {pace(best)}." if best != fastest else text


def pace(model: str) -> str:
    """The speed of a model's training step, in a sentence."""
    devices = {name: speeds(*SPEED[f"training, {name}"]) for name in ("CPU", "GPU")}
    times = [f"{of[model].ratio:.2f} on a {name}" for name, of in devices.items() if model in of]
    return f"with steps {' and '.join(times)} times as fast as stock fairseq's"


def of_long_text() -> str:
    """The functions that have no longest sentence, and the fastest of the others."""
    block, memory = speeds(*LONG), speeds(*MEMORY["memory, CPU"])
    free = [
        f"`{model}` ({block[model].ratio:.2f} times as fast as stock fairseq, with {1 / memory[model].ratio:.2f} of "
        "its memory)"
        for model in models()
        if model in block and model in memory and not has_max_length(model)
    ]
    fastest = max((model for model in models() if model in block), key=lambda model: block[model].ratio)
    return (
        f"- **Long text**: {' and '.join(free)} have no longest sentence. All others have `--synth-max-length`, fixed "
        f"once trained; the fastest of them is `{fastest}` ({block[fastest].ratio:.2f}). The figures are of a causal "
        "block of 1,024 tokens on a CPU."
    )


def has_max_length(model: str) -> bool:
    """Whether a model has a longest sentence."""
    from fairseq_synth.architectures import VARIANTS

    spec = next(spec for spec in VARIANTS if spec.replace("+", "_") == model)
    return any(SYNTHESIZERS[name].has_max_length for name in parse_spec(spec))


def pictures() -> Iterator[Picture]:
    """Quality of translation against speed, a panel for each kind of speed; crosses reach over the intervals."""
    found = differences(*TRANSLATION)
    measured = {heading: speeds(*where) for heading, where in SPEED.items()}
    if not found or not any(measured.values()):
        return
    panels = []
    for heading, of in measured.items():
        calls: List[Call] = [("axvline", [1], {"color": "grey", "lw": 1}), ("axhline", [0], {"color": "grey", "lw": 1})]
        for number, model in enumerate(models()):
            if model in found and model in of:
                calls.append(cross(model, number, found[model], of[model]))
        panels.append(Panel(calls, {"title": heading}))
    panels[0] = Panel([*panels[0].calls, legend()], {**panels[0].settings, "ylabel": "BLEU minus the Transformer's"})
    below = "times as fast as stock fairseq"
    yield Picture("which-one.png", panels, (13, 4.2), len(panels), True, True, below)


def cross(model: str, number: int, difference: Difference, speed: Speed) -> Call:
    """A model's point with the interval of its quality and the range of its speed."""
    x, y = round(speed.ratio, 3), round(difference.mean, 3)
    left, right = round(max(x - speed.lowest, 0), 3), round(max(speed.highest - x, 0), 3)
    bars = {"xerr": [[left], [right]], "yerr": [round(difference.half_width, 3)], "elinewidth": 0.5}
    style = {"fmt": "osD^v"[number // 10], "ms": 5, "color": f"C{number % 10}", "label": model}
    return "errorbar", [[x], [y]], {**style, **bars}
