"""The results tables: each is one description, from which its cells, commands, JSON and Markdown follow."""

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from . import classification, language_model, translation
from .command import ROOT, UserError
from .hyperparameters import BASELINES, RECIPES
from .train import models as known_models

BASELINE = "transformer"
SPEED = "steps/s"  # a column of the paper's
DEVICES = ("gpu", "cpu")  # folders of a table's results


class Dataset(NamedTuple):
    """A column of a table: what its models are trained and tested on, and by which recipe."""

    name: str  # for translation a pair of languages, else a corpus
    heading: str
    recipe: str  # of hyperparameters.py


@dataclass(frozen=True)
class Table:
    """A results table. CONTRIBUTING.md says how to add one.

    `task` is the module of what is particular to its kind of task (tasks.py has them all). It has
        prepare(corpus, dataset, data, source, options)   makes the folder `data`
        evaluate(data, run, recipe)                       writes scores.json, {figure: {score, name, signature}}
        compare(data, run, baseline)                      a significance test against another run, or None
        SCORES, TEST                                      what these two do, for --help and the notes of a table
    """

    name: str
    title: str  # beside the name of a data set
    about: str  # for --help: what is trained, and how long a cell takes
    datasets: Sequence[Dataset]
    seeds: Sequence[int] = (1,)
    task: ModuleType = translation
    metric: str = "bleu"  # the figure of scores.json that the table shows
    metric_name: str = "BLEU"
    best: Callable[..., Any] = max  # of several figures
    corpus: str = ""  # that has all datasets; default: each is a corpus of its own
    data: str = ""  # the folder of a dataset's data; default: the table's name and the dataset's
    preparation: Sequence[str] = ()  # options of the corpus' preparation
    paper: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # {model: {column: figure}}
    rows: Sequence[str] = ()  # default: the paper's, or every model there is
    variations: Mapping[str, Tuple[str, str]] = field(default_factory=dict)  # {row: its model, flags of fairseq-train}
    baseline: str = BASELINE  # the row that others are compared with

    def __post_init__(self) -> None:
        models, rows, columns = [*known_models(), *BASELINES, "vanilla"], self.models(), set(self.variations)
        wrong = [f"{row} is no model and no variation" for row in rows if row not in models and row not in columns]
        wrong += [f"variation {row}: there is no model {self.training(row)[0]}" for row in self.variations
                  if self.training(row)[0] not in models]  # fmt: skip
        wrong += [f"variation {row} is no row" for row in self.variations if row not in rows]
        wrong += [f"{d.name}: there is no recipe {d.recipe}" for d in self.datasets if d.recipe not in RECIPES]
        if self.baseline not in rows:
            wrong.append(f"baseline: {self.baseline} is no row; name one of {', '.join(rows)}")
        if wrong:
            raise UserError(f"table {self.name}: {wrong[0]}")

    def models(self) -> List[str]:
        """The names of its rows."""
        return list(self.rows or self.paper) or known_models()

    def training(self, row: str) -> Tuple[str, List[str]]:
        """The model of a row, and flags for fairseq-train beside those of the recipe."""
        model, flags = self.variations.get(row, (row, ""))
        return model, flags.split()

    def options(self, dataset: str, model: str, seed: str) -> str:
        """Options of reproduce.sh that choose cells."""
        flag = "--pair" if self.corpus else "--dataset"
        chosen = f"{flag} {dataset} " if self.corpus or len(self.datasets) > 1 else ""
        return f"{chosen}--variant {model} --seed {seed} --rerun"

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

    def baseline(self) -> "Cell":
        """The table's baseline on the same data with the same seed."""
        return self._replace(model=self.table.baseline)

    def init(self) -> Optional["Cell"]:
        """The cell that this one begins with, if its recipe is the second of two stages."""
        table = RECIPES[self.dataset.recipe].init
        return next(TABLES[table].cells([self.dataset.name], [self.model], [self.seed])) if table else None

    def run(self, out: Path) -> Path:
        """Its --save-dir below a folder of data and runs."""
        return out / "runs" / f"{self.table.name}-{self.name}"

    def data(self, out: Path) -> Path:
        """Its data below a folder of data and runs."""
        default = f"{self.table.name}-{self.dataset.name}"
        return out / "data" / (self.table.data.format(dataset=self.dataset.name) or default)


def paper_rows(columns: Tuple[str, ...], rows: str) -> Dict[str, Dict[str, Any]]:
    """{model: {column: figure}} from lines of a model and its figures."""
    split = [line.split() for line in rows.strip().splitlines()]
    return {model: dict(zip(columns, figures)) for model, *figures in split}


TABLE2_LM = paper_rows(
    ("parameters", "lm1b"),
    """
    transformer        70M  38.21
    fixed_random       53M  50.52
    random             58M  40.60
    factorized_random  53M  42.40
    dense              53M  40.88
    factorized_dense   53M  41.20
    random_dense       58M  42.35
    dense_vanilla      70M  37.27
    random_vanilla     70M  40.05
    """,
)
TABLE7 = paper_rows(
    ("agnews", "imdb", SPEED),
    """
    transformer                88.83  81.34  1.09
    linformer                  86.50  82.86  1.09
    factorized_random          86.53  83.39  1.10
    factorized_random_vanilla  89.13  84.61  0.80
    """,
)
LANGUAGE_MODELS: Dict[str, Any] = dict(
    task=language_model, metric="ppl", metric_name="perplexity", best=min, data="{dataset}"
)
CLASSIFIERS: Dict[str, Any] = dict(task=classification, metric="accuracy", metric_name="accuracy")
# in small: the paper's rows and figures, which are of other data, and two rows more
SMALL_LANGUAGE_MODELS: Dict[str, Any] = dict(
    seeds=(1, 2),
    paper={model: {"LM1B": figures["lm1b"]} for model, figures in TABLE2_LM.items()},
    rows=(*TABLE2_LM, "relative_random", "lightconv_lm"),
    **LANGUAGE_MODELS,
)


def small_classifiers(dataset: str) -> Dict[str, Any]:
    """The same of Table 7, with the paper's figures of one corpus."""
    paper = {model: {name: figures[name] for name in (dataset, SPEED)} for model, figures in TABLE7.items()}
    return dict(seeds=(1, 2, 3), paper=paper, rows=(*TABLE7, "random", "relative_random"), **CLASSIFIERS)


TILED = {  # random with an ℓ that sentences exceed, tiled; random itself has ℓ = 100
    f"random_tile{length}": ("random", f"--synth-max-length {length} --synth-beyond-length tile")
    for length in (32, 16, 8)
}
TWO_STAGES = ("transformer", "random", "random_vanilla")
TABLES: Dict[str, Table] = {
    table.name: table
    for table in (
        Table(
            "table2",
            title="WMT14, newstest2014",
            about="the paper's Table 2: WMT14 En-De and En-Fr, base models",
            corpus="wmt14",
            data="wmt14-{dataset}",
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
            about="the same models, small, by the recipe of Wu et al. 2021, minutes each on a GPU",
            corpus="multi30k",
            datasets=(Dataset("en-de", "En-De", "multi30k"), Dataset("en-fr", "En-Fr", "multi30k")),
            seeds=(1, 2, 3),
            preparation=("--merges", "10000", "--lowercase"),
        ),
        Table(
            "multi30k_cpu",
            title="short recipe",
            about="the same with a ninth of the training, for one CPU thread: some 25 minutes each",
            corpus="multi30k",
            datasets=(Dataset("en-de", "En-De", "multi30k_cpu"), Dataset("en-fr", "En-Fr", "multi30k_cpu")),
            seeds=(1, 2, 3),
            preparation=("--merges", "4000", "--lowercase"),
        ),
        Table(
            "multi30k_tiled",
            title="short recipe, tiled",
            about="random with ℓ of 32, 16 and 8, tiled to longer sentences",
            corpus="multi30k",
            data="multi30k_cpu-{dataset}",
            datasets=(Dataset("en-de", "En-De", "multi30k_cpu"),),
            preparation=("--merges", "4000", "--lowercase"),
            rows=("random", *TILED),
            variations=TILED,
            baseline="random",
        ),
        Table(
            "news_cpu",
            title="news",
            about="WMT's test sets of news as a small corpus: what the next table begins with",
            corpus="news",
            data="news-{dataset}",
            datasets=(Dataset("en-de", "En-De", "news_cpu"),),
            preparation=("--merges", "8000", "--lowercase", "--max-length", "100"),
            rows=TWO_STAGES,
        ),
        Table(
            "multi30k_from_news_cpu",
            title="trained on news first",
            about="models of news, fine-tuned on Multi30k: two stages, the first is run if it is missing",
            corpus="multi30k",
            datasets=(Dataset("en-de", "En-De", "multi30k_from_news_cpu"),),
            preparation=("--merges", "8000", "--lowercase"),
            rows=TWO_STAGES,
        ),
        Table(
            "table2_lm",
            title="One Billion Word",
            about="the paper's Table 2, right half: language models of One Billion Word",
            datasets=(Dataset("lm1b", "LM1B", "lm1b"),),
            paper=TABLE2_LM,
            **LANGUAGE_MODELS,
        ),
        Table(
            "ptb_cpu",
            title="Penn Treebank, two epochs",
            about="the same models, small, on Penn Treebank: some 12 minutes each on one CPU thread",
            datasets=(Dataset("ptb", "PTB", "ptb_cpu"),),
            **SMALL_LANGUAGE_MODELS,
        ),
        Table(
            "wikitext2_cpu",
            title="WikiText-2, nine tenths of an epoch",
            about="the same on WikiText-2",
            datasets=(Dataset("wikitext2", "WikiText-2", "wikitext2_cpu"),),
            **SMALL_LANGUAGE_MODELS,
        ),
        Table(
            "table7",
            title="from scratch, whole corpora",
            about="the paper's Table 7: AG News and IMDb from scratch",
            datasets=(Dataset("agnews", "AG News", "agnews"), Dataset("imdb", "IMDb", "imdb")),
            data="{dataset}",
            paper=TABLE7,
            **CLASSIFIERS,
        ),
        Table(
            "agnews_cpu",
            title="20,000 training examples of AG News",
            about="20,000 examples of AG News: some 12 minutes each on one CPU thread",
            datasets=(Dataset("agnews", "AG News", "agnews_cpu"),),
            data="agnews_20000",
            preparation=("--examples", "20000"),
            **small_classifiers("agnews"),
        ),
        Table(
            "imdb_cpu",
            title="5,000 training examples of IMDb",
            about="5,000 examples of IMDb: the same",
            datasets=(Dataset("imdb", "IMDb", "imdb_cpu"),),
            data="imdb_5000",
            preparation=("--examples", "5000"),
            **small_classifiers("imdb"),
        ),
    )
}
