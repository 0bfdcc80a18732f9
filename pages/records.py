"""The records of results/, and how far models lie from their baseline."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from recipes.catalog import Column, Table
from recipes.provenance import device_of
from recipes.steps import ROOT

Record = dict[str, Any]
Rows = dict[str, list[Record]]  # the records of a column of a table, by row
Place = Sequence[str]  # of a benchmark's figure: folder and file of results/, and its name there
STEPS = "steps/s"
LEVEL = 0.05  # of all intervals of a column together


def load(folder: str, name: str = "*") -> list[Record]:
    """The records of a folder of results/, by name."""
    paths = sorted((ROOT / "results" / folder).glob(f"{name}.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def load_cells(table: str) -> list[Record]:
    """The records of a table. A seed that was trained on a GPU and on a CPU is two runs."""
    found = [record for device in ("gpu", "cpu") for record in load(f"{table}/{device}")]
    for record in found:
        record["figures"]["valid_loss"] = (record["curve"].get("valid_loss") or [None])[-1]
    return found


def rows_of(table: Table, column: Column, records: Iterable[Record]) -> Rows:
    """The records of a column, by row; models that are no row of the table stand below."""
    here = [record for record in records if record["dataset"] == column.name]
    models = dict.fromkeys([*table.models(), *(record["model"] for record in here)])
    return {model: [record for record in here if record["model"] == model] for model in models}


def column_of(table: Table, dataset: str) -> Column:
    return next(column for column in table.columns if column.name == dataset)


def pairs(table: Table, rows: Rows) -> dict[str, list[tuple[Record, Record]]]:
    """For each other row its records, each beside the baseline's of the same seed, of the most alike machine."""

    def likeness(record: Record, other: Record) -> tuple[bool, bool]:
        ours, theirs = record["hardware"], other["hardware"]
        return ours == theirs, device_of(ours) == device_of(theirs)

    found: dict[str, list[tuple[Record, Record]]] = {}
    for row, records in rows.items():
        for record in records if row != table.baseline else ():
            same = [other for other in rows[table.baseline] if other["seed"] == record["seed"]]
            if same:
                beside = max(same, key=lambda other: likeness(record, other))  # noqa: B023
                found.setdefault(row, []).append((record, beside))
    return found


# ---- differences


class Difference(NamedTuple):
    """A model's figure less the baseline's of the same seed: the mean over seeds, and its interval if there is one."""

    mean: float
    half_width: float  # 0: too few runs for an interval

    @property
    def excludes_zero(self) -> bool:
        return 0 < self.half_width < abs(self.mean)

    def cell(self, digits: int = 2) -> str:
        """In a table: bold where the interval excludes 0."""
        mean = f"{round(self.mean, digits) + 0.0:+.{digits}f}"  # no -0.00
        text = f"{mean} ± {self.half_width:.{digits}f}" if self.half_width else mean
        return f"**{text}**" if self.excludes_zero else text


def differences(table: Table, rows: Rows, figure: str) -> dict[str, Difference]:
    """{row: its difference to the baseline} in a figure, of the rows that have run beside it.

    The intervals of a column hold together: with a probability of 95 % all of them cover (Bonferroni). They assume that
    every model has the same variance from run to run, so that a row with a single run has an interval too.
    """
    measured = {row: [r for r in records if r["figures"][figure] is not None] for row, records in rows.items()}
    beside = pairs(table, measured)
    runs = [(row, *pair) for row, own in beside.items() for pair in own]
    variance, freedom = chance(table.baseline, runs, figure)
    quantile = 0.0
    if freedom:
        from scipy.stats import t

        quantile = float(t.ppf(1 - LEVEL / len(beside) / 2, freedom))
    found = {}
    for row, own in beside.items():
        mean = statistics.mean(record["figures"][figure] - other["figures"][figure] for record, other in own)
        # a run of the baseline may stand in several pairs
        shares = [count / len(own) for count in Counter(id(other) for _, other in own).values()]
        width = quantile * math.sqrt(variance * (1 / len(own) + sum(share**2 for share in shares)))
        found[row] = Difference(mean, width)
    return found


def chance(baseline: str, runs: Sequence[tuple[str, Record, Record]], figure: str) -> tuple[float, int]:
    """The variance of a figure from run to run, and its degrees of freedom; 0 of them where runs are too few.

    `runs` are rows, each with its record and the baseline's beside it. Runs beside the same run of the baseline are a
    group with it. The variance is of what is left of a figure without the mean of its model and of its group. The
    differences to the baseline would not do: those of a group all vary with one run, and so are not independent.
    """
    import numpy

    groups = {id(other): other for _, _, other in runs}
    cells = [(baseline, group, other["figures"][figure]) for group, other in groups.items()]
    cells += [(row, id(other), record["figures"][figure]) for row, record, other in runs]
    names = dict.fromkeys(name for row, group, _ in cells for name in (row, group))
    design = numpy.array([[name in (row, group) for name in names] for row, group, _ in cells], float)
    design = design.reshape(len(cells), len(names))  # also where there are none
    values = numpy.array([float(value) for *_, value in cells])
    fitted, _, rank, _ = numpy.linalg.lstsq(design, values, rcond=None)
    freedom = len(cells) - int(rank)
    left = values - design @ fitted
    return (float(left @ left) / freedom, freedom) if freedom else (0.0, 0)


# ---- speeds


class Speed(NamedTuple):
    """How many times as fast as the baseline, or how many times less memory; the lowest and the highest round."""

    ratio: float
    lowest: float
    highest: float


def speeds(folder: str, file: str, figure: str) -> dict[str, Speed]:
    """{variant: its speed} of a benchmark, if it has run."""
    found = {name: own for record in load(folder, file) for name, own in record["figures"].items() if figure in own}
    found.pop("stock", None)
    low, high = ("lowest", "highest") if figure == "ratio" else (f"{figure} from", f"{figure} to")
    return {n: Speed(own[figure], own.get(low, own[figure]), own.get(high, own[figure])) for n, own in found.items()}


def paper_steps(table: Table) -> dict[str, float]:
    """{model: its steps a second over the Transformer's} of the paper's table, if it has them."""
    found: Mapping[str, float] = {m: float(own[STEPS]) for m, own in table.published().items() if STEPS in own}
    return {model: value / found[table.baseline] for model, value in found.items()}
