"""The results tables: each is one description, from which its cells, commands, JSON and Markdown follow."""

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from . import translation
from .command import ROOT
from .train import models

BASELINE = "transformer"


class Dataset(NamedTuple):
    """A column of a table: what its models are trained and tested on, and by which recipe."""

    name: str  # for translation a pair of languages
    heading: str
    recipe: str  # of hyperparameters.py


@dataclass(frozen=True)
class Table:
    """A results table. CONTRIBUTING.md says how to add one.

    `task` is the module of what is particular to its kind of task. It has
        prepare(corpus, dataset, data, source, options)   makes the folder `data`
        evaluate(data, run, recipe)                       writes scores.json, {figure: {score, name, signature}}
        compare(data, run, baseline)                      a significance test against another run, or None
    """

    name: str
    title: str
    corpus: str
    datasets: Sequence[Dataset]
    seeds: Sequence[int] = (1,)
    task: ModuleType = translation
    metric: str = "bleu"  # the figure of scores.json that the table shows
    metric_name: str = "BLEU"
    data: str = ""  # prefix of the folder of its data; default: its name
    preparation: Sequence[str] = ()  # options of the corpus' preparation
    paper: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # {model: {dataset or "parameters": figure}}

    def models(self) -> List[str]:
        """The rows: the paper's, or every model there is."""
        return list(self.paper) or models()

    def cells(
        self,
        datasets: Optional[Sequence[str]] = None,
        models: Optional[Sequence[str]] = None,
        seeds: Optional[Sequence[int]] = None,
    ) -> Iterator["Cell"]:
        """The cells of some or all columns, rows and seeds. Baselines come first, as others are compared with them."""
        for dataset in self.datasets:
            if datasets is None or dataset.name in datasets:
                for seed in seeds or self.seeds:
                    for model in sorted(models or self.models(), key=lambda model: model != BASELINE):
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

    @property
    def result(self) -> Path:
        """Where its figures are kept."""
        return ROOT / "results" / self.table.name / f"{self.name}.json"

    @property
    def command(self) -> str:
        """Runs this cell, whether it has run or not."""
        options = f"--pair {self.dataset.name} --variant {self.model} --seed {self.seed} --rerun"
        return f"scripts/reproduce.sh {self.table.name} {options}"

    def baseline(self) -> "Cell":
        """The Transformer on the same data with the same seed."""
        return self._replace(model=BASELINE)

    def run(self, out: Path) -> Path:
        """Its --save-dir below a folder of data and runs."""
        return out / "runs" / f"{self.table.name}-{self.name}"

    def data(self, out: Path) -> Path:
        """Its data below a folder of data and runs."""
        return out / "data" / f"{self.table.data or self.table.name}-{self.dataset.name}"


def paper_rows(columns: Tuple[str, ...], rows: str) -> Dict[str, Dict[str, Any]]:
    """{model: {column: figure}} from lines of a model and its figures."""
    split = [line.split() for line in rows.strip().splitlines()]
    return {model: dict(zip(columns, figures)) for model, *figures in split}


TABLES: Dict[str, Table] = {
    table.name: table
    for table in (
        Table(
            "table2",
            title="WMT14, newstest2014",
            corpus="wmt14",
            data="wmt14",
            datasets=(Dataset("en-de", "En-De", "wmt_en_de"), Dataset("en-fr", "En-Fr", "wmt_en_fr")),
            paper=paper_rows(
                ("parameters", "en-de", "en-fr"),
                """
                transformer        67M  27.67  41.57
                fixed_random       61M  23.89  38.31
                random             67M  27.27  41.12
                factorized_random  61M  27.30  41.12
                dense              62M  27.43  41.39
                factorized_dense   61M  27.32  41.57
                random_dense       67M  27.68  41.21
                dense_vanilla      74M  27.57  41.38
                random_vanilla     73M  28.47  41.85
                """,
            ),
        ),
        Table(
            "multi30k",
            title="recipe of Wu et al. 2021",
            corpus="multi30k",
            datasets=(Dataset("en-de", "En-De", "multi30k"), Dataset("en-fr", "En-Fr", "multi30k")),
            seeds=(1, 2, 3),
            preparation=("--merges", "10000", "--lowercase"),
        ),
        Table(
            "multi30k_cpu",
            title="one CPU thread",
            corpus="multi30k",
            datasets=(Dataset("en-de", "En-De", "multi30k_cpu"), Dataset("en-fr", "En-Fr", "multi30k_cpu")),
            seeds=(1, 2, 3),
            preparation=("--merges", "4000", "--lowercase"),
        ),
    )
}
