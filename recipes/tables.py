"""The results tables of tables.yaml: from each follow its cells, commands, JSON, Markdown and pictures."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Type

from .command import ROOT, UserError
from .corpora import CORPORA
from .hyperparameters import BASELINES, RECIPES, make, read_data
from .prepare import prepare
from .scoring import Task
from .tasks import TASKS
from .train import models as known_models
from .translation import Translation

BASELINE = "transformer"
STEPS = "steps/s"  # a column of the paper's
Names = Optional[Sequence[str]]  # None: all
DEVICES = ("gpu", "cpu")  # folders of a table's results
HEADINGS = {  # of figures that are not named by them
    "f1": "F1", "macro_f1": "F1", "answer_f1": "F1", "answer_em": "exact", "all_of_group": "exact",
    "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman",
    "bleu4": "BLEU-4", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum", "meteor": "METEOR", "cider": "CIDEr",
}  # fmt: skip


class Dataset(NamedTuple):
    """A column of a table: what its models are trained and tested on, and by which recipe."""

    name: str  # for translation a pair of languages, else a corpus
    heading: str
    recipe: str  # of recipes.yaml
    figures: Sequence[str] = ()  # of scores.json that are shown; default: the corpus' scores, or the task's METRIC


@dataclass(frozen=True)
class Table:
    """A results table. CONTRIBUTING.md says how to add one."""

    name: str
    title: str  # beside the name of a data set
    about: str  # for --help: what is trained, and how long a cell takes
    datasets: Sequence[Dataset]
    seeds: Sequence[int] = (1,)
    task: Type[Task] = Translation
    corpus: str = ""  # that has all datasets; default: each is a corpus of its own
    data: str = ""  # the folder of a data set's data; default: DATASET, or TABLE-DATASET in a table with a `corpus`
    preparation: Mapping[str, Any] = field(default_factory=dict)  # options of prepare.sh
    paper: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # {model: {column: figure}}
    rows: Sequence[str] = ()  # default: the paper's and more_rows, or every model there is
    more_rows: Sequence[str] = ()
    variations: Mapping[str, Tuple[str, str]] = field(default_factory=dict)  # {row: its model, flags of fairseq-train}
    baseline: str = BASELINE  # the row that others are compared with

    def __post_init__(self) -> None:
        known, rows = {*known_models(), *BASELINES, "vanilla"}, self.models()
        wrong = [f"{d.name}: there is no recipe {d.recipe}" for d in self.datasets if d.recipe not in RECIPES]
        for key, names in (("rows", rows), ("variations", self.variations), ("baseline", [self.baseline])):
            wrong += [f"{key}: {name} is no row; name one of {', '.join(rows)}" for name in names if name not in rows]
            models = [self.training(name)[0] for name in names]
            wrong += [f"{key}: there is no model {model}" for model in models if model not in known]
        if wrong:
            raise UserError(f"table {self.name}: {wrong[0]}")

    def figures(self, dataset: Dataset) -> Mapping[str, str]:
        """{figure of scores.json that a column shows: its heading}."""
        names = dataset.figures or (CORPORA[dataset.name].scores if dataset.name in CORPORA else ())
        return {name: HEADINGS.get(name, name) for name in names} or {self.task.METRIC: self.task.METRIC_NAME}

    def column(self, name: str) -> Dataset:
        """The column of a data set."""
        return next(dataset for dataset in self.datasets if dataset.name == name)

    def metric(self, dataset: Dataset) -> str:
        """The figure of a column that is compared and drawn: the task's, else the column's first."""
        names = self.figures(dataset)
        return self.task.METRIC if self.task.METRIC in names else next(iter(names))

    def first_stage(self, dataset: Dataset) -> str:
        """The name of the data set here that another table's models of `dataset` begin with; empty if there is none.

        It has the same name. Pairs of texts may begin with any pairs, if this table has no other data set.
        """
        names = [other.name for other in self.datasets]
        any_text = len(names) == 1 and RECIPES[dataset.recipe].pair
        return dataset.name if dataset.name in names else names[0] if any_text else ""

    @property
    def digits(self) -> int:
        """Decimals of its figures."""
        return self.task.DIGITS

    def models(self) -> List[str]:
        """The names of its rows."""
        return list(self.rows) or [*self.paper, *self.more_rows] or known_models()

    def training(self, row: str) -> Tuple[str, List[str]]:
        """The model of a row, and flags for fairseq-train beside those of the recipe."""
        model, flags = self.variations.get(row, (row, ""))
        return model, flags.split()

    def options(self, dataset: str, model: str, seed: str) -> str:
        """Options of reproduce.sh that choose cells."""
        flag = "--pair" if self.corpus else "--dataset"
        chosen = f"{flag} {dataset} " if self.corpus or len(self.datasets) > 1 else ""
        return f"{chosen}--variant {model} --seed {seed} --rerun"

    def check(self, datasets: Names, models: Names) -> None:
        """Refuses columns and rows that do not exist. A second stage also has the rows of the first."""
        firsts = [RECIPES[dataset.recipe].init for dataset in self.datasets]
        of_firsts = [model for first in firsts if first for model in TABLES[first].models()]
        for flag, given, known in (
            ("--pair" if self.corpus else "--dataset", datasets, [dataset.name for dataset in self.datasets]),
            ("--variant", models, [*self.models(), *known_models(), *of_firsts, "vanilla"]),
        ):
            for word in [] if given is None else given or [""]:
                if word not in known:
                    raise UserError(f"{flag} {word}: choose from {', '.join(dict.fromkeys(known))}")

    def cells(self, datasets: Names = None, models: Names = None, seeds: Sequence[int] = ()) -> Iterator["Cell"]:
        """The cells of some or all columns, rows and seeds. Baselines come first, as others are compared with them."""
        for dataset in self.datasets:
            if datasets is None or dataset.name in datasets:
                for seed in seeds or self.seeds:
                    for model in sorted(models or self.models(), key=lambda model: model != self.baseline):
                        yield Cell(self, dataset, model, seed)


class Cell(NamedTuple):
    """One training of a table."""

    table: Table
    dataset: Dataset
    model: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.dataset.name}-{self.model}-seed{self.seed}"

    def result(self, device: str) -> Path:
        """Where its figures are kept, of a training on a device: gpu or cpu. Each has its own rounding."""
        return ROOT / "results" / self.table.name / device / f"{self.name}.json"

    def recorded(self, device: str = "") -> List[Path]:
        """Its records that are there, of one device or of all."""
        return [path for path in map(self.result, [device] if device else DEVICES) if path.exists()]

    @property
    def command(self) -> str:
        """Runs this cell, whether it has run or not."""
        options = self.table.options(self.dataset.name, self.model, str(self.seed))
        return f"scripts/reproduce.sh {self.table.name} {options}"

    def init(self) -> Optional["Cell"]:
        """The cell that this one begins with, if its recipe is the second of two stages."""
        first = TABLES.get(RECIPES[self.dataset.recipe].init)
        return next(first.cells([first.first_stage(self.dataset)], [self.model], [self.seed])) if first else None

    def run(self, out: Path) -> Path:
        """Its --save-dir below a folder of data and runs."""
        return out / "runs" / f"{self.table.name}-{self.name}"

    def data(self, out: Path) -> Path:
        """Its data below a folder of data and runs."""
        name = self.table.data or ("{table}-{dataset}" if self.table.corpus else "{dataset}")
        return out / "data" / name.format(table=self.table.name, dataset=self.dataset.name)

    def prepare(self, out: Path, source: Optional[Path]) -> None:
        """Prepares its data and, with the same words, those of the cell that it begins with. `source`: of --from."""
        first, options = self.init(), dict(self.table.preparation)
        if first:
            first.prepare(out, source)
            options["like"] = first.data(out)
        corpus = self.table.corpus or self.dataset.name
        if source and (source / corpus).is_dir():  # of several corpora, each in a folder of its name
            source = source / corpus
        prepare(corpus, self.dataset.name, self.data(out), source, options)


def read_paper(text: str, chosen: Mapping[str, str]) -> Dict[str, Dict[str, str]]:
    """{model: {column: figure}} of a line of headings and lines of models. `chosen`: {column: heading}, if not all."""
    rows = [line.split() for line in text.splitlines()]
    found = {model: dict(zip(rows[0][1:], figures)) for model, *figures in rows[1:]}
    chosen = chosen or {name: name for own in found.values() for name in own}
    return {model: {name: own[heading] for name, heading in chosen.items()} for model, own in found.items()}


def read_tables() -> Dict[str, Table]:
    """The tables of tables.yaml, by name."""
    found: Dict[str, Table] = {}
    for name, entry in read_data("tables.yaml").items():
        try:
            entry["datasets"] = [Dataset(dataset, *about) for dataset, about in entry.pop("columns").items()]
            entry["task"] = TASKS[entry.get("task", "translation")]
            entry["paper"] = read_paper(entry.get("paper", ""), entry.pop("paper_columns", {}))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"recipes/tables.yaml: {name}: {error} is missing, unknown or not of this form") from None
        table = make("tables.yaml", name, Table, entry, name=name)
        for dataset in table.datasets:
            first = RECIPES[dataset.recipe].init
            if first and (first not in found or not found[first].first_stage(dataset)):
                raise UserError(f"table {name}: begins with {first}, no table of {dataset.name} above it")
        found[name] = table
    return found


TABLES = read_tables()
