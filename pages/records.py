"""Reads the records of results/ and computes how far models lie from their baseline."""

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
Rows = dict[str, list[Record]]  # {row of a table: the records of its runs}
STEPS_PER_SECOND = "steps/s"  # the heading of the paper's speeds
ERROR_RATE = 0.05  # the probability that any interval of a column fails to cover its true difference


def load(folder: str, name: str = "*") -> list[Record]:
    """Returns the records of a folder of results/, sorted by file name. `name` is a pattern without ``.json``."""
    paths = sorted((ROOT / "results" / folder).glob(f"{name}.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def load_runs(table_name: str) -> list[Record]:
    """Returns the records of a table's runs, with the last validation loss as one more figure.

    A seed that was trained on a GPU and on a CPU counts as two runs, because their rounding differs.
    """
    records = load(f"{table_name}/gpu") + load(f"{table_name}/cpu")
    for record in records:
        losses = record["curve"].get("valid_loss")
        record["figures"]["valid_loss"] = losses[-1] if losses else None
    return records


def group_by_row(table: Table, column: Column, records: Iterable[Record]) -> Rows:
    """Returns the records of a column by row, in the order of the table.

    A row without a run has an empty list. Models that are no row of the table come last.
    """
    rows: Rows = {model: [] for model in table.models()}
    for record in records:
        if record["dataset"] == column.name:
            rows.setdefault(record["model"], []).append(record)
    return rows


def get_column(table: Table, dataset: str) -> Column:
    """Returns the column of a table that has the name of a data set; StopIteration if there is none."""
    return next(column for column in table.columns if column.name == dataset)


def load_column(table: Table, column: Column) -> Rows:
    """Returns the records of one column of a table by row."""
    return group_by_row(table, column, load_runs(table.name))


# ---- pairs of runs with the same seed


class Pair(NamedTuple):
    """A run of a model and the run of the baseline with which it is compared."""

    run: Record
    baseline: Record


def pair_with_baseline(table: Table, rows: Rows) -> dict[str, list[Pair]]:
    """Returns {row: its runs, each paired with the baseline's run of the same seed}.

    Runs whose seed the baseline does not have are left out, as are rows without any pair, and the baseline itself.
    """
    pairs_by_row = {}
    for row, runs in rows.items():
        if row == table.baseline:
            continue
        pairs = []
        for run in runs:
            baseline = match_seed(run, rows[table.baseline])
            if baseline is not None:
                pairs.append(Pair(run, baseline))
        if pairs:
            pairs_by_row[row] = pairs
    return pairs_by_row


def match_seed(run: Record, others: Iterable[Record]) -> Record | None:
    """Returns which of other runs has the same seed; of several the one on the same processor, else the same device."""
    candidates = [candidate for candidate in others if candidate["seed"] == run["seed"]]
    for candidate in candidates:
        if candidate["hardware"] == run["hardware"]:
            return candidate
    for candidate in candidates:
        if device_of(candidate["hardware"]) == device_of(run["hardware"]):
            return candidate
    return candidates[0] if candidates else None


# ---- differences with confidence intervals


class Difference(NamedTuple):
    """A figure of a model minus the baseline's with the same seed: the mean over seeds, with a confidence interval."""

    mean: float
    half_width: float  # of the interval; 0 where the runs are too few for one

    @property
    def excludes_zero(self) -> bool:
        """Whether there is an interval, and it does not contain 0."""
        return 0 < self.half_width < abs(self.mean)

    def cell(self, digits: int = 2) -> str:
        """Returns the difference for a table, in bold type if its interval excludes 0."""
        rounded = round(self.mean, digits) + 0.0  # adding 0.0 turns -0.0 into 0.0
        text = f"{rounded:+.{digits}f}"
        if self.half_width:
            text += f" ± {self.half_width:.{digits}f}"
        return f"**{text}**" if self.excludes_zero else text


def differences(table: Table, rows: Rows, figure: str) -> dict[str, Difference]:
    """Returns {row: its difference to the baseline in a figure}, for the rows that share a seed with the baseline.

    The intervals of a column hold simultaneously: with a probability of 95 % all of them cover the true difference
    (Bonferroni). They assume that all models have the same variance from run to run, so that even a row with a single
    run has an interval.
    """
    measured: Rows = {}
    for row, runs in rows.items():
        measured[row] = [run for run in runs if run["figures"][figure] is not None]
    pairs_by_row = pair_with_baseline(table, measured)
    variance, degrees_of_freedom = estimate_variance(table.baseline, pairs_by_row, figure)
    quantile = simultaneous_quantile(len(pairs_by_row), degrees_of_freedom)
    result = {}
    for row, pairs in pairs_by_row.items():
        values = [pair.run["figures"][figure] - pair.baseline["figures"][figure] for pair in pairs]
        half_width = quantile * math.sqrt(variance * variance_factor(pairs))
        result[row] = Difference(statistics.mean(values), half_width)
    return result


def variance_factor(pairs: Sequence[Pair]) -> float:
    """Returns the variance of the mean difference of independent pairs, in units of the variance of a single run.

    A run of the baseline may occur in several pairs, which then are not independent: its weight is their share.
    """
    pairs_per_baseline_run = Counter(id(pair.baseline) for pair in pairs)
    factor = 1 / len(pairs)
    for count in pairs_per_baseline_run.values():
        factor += (count / len(pairs)) ** 2
    return factor


def simultaneous_quantile(number_of_intervals: int, degrees_of_freedom: int) -> float:
    """Returns the quantile of Student's t for two-sided intervals that hold together; 0 without degrees of freedom."""
    if not degrees_of_freedom:
        return 0.0
    from scipy.stats import t

    error_rate_per_interval = ERROR_RATE / number_of_intervals
    return float(t.ppf(1 - error_rate_per_interval / 2, degrees_of_freedom))


class Observation(NamedTuple):
    """A figure of one run. Runs that are compared with the same run of the baseline form a group with it."""

    model: str
    group: int  # the identity of the baseline's run
    value: float


class Variance(NamedTuple):
    """An estimate of a variance."""

    value: float
    degrees_of_freedom: int  # 0: there are too few runs for an estimate


def estimate_variance(baseline: str, pairs_by_row: Mapping[str, Sequence[Pair]], figure: str) -> Variance:
    """Estimates the variance of a figure from run to run.

    A figure is modelled as an effect of the model, plus an effect of the group, plus chance; the variance is that of
    the residuals after a least-squares fit. The variance of the differences themselves would be wrong: all differences
    of a group contain the same run of the baseline, and so are not independent.
    """
    import numpy

    observations = list_observations(baseline, pairs_by_row, figure)
    if not observations:
        return Variance(0.0, 0)
    columns: dict[str | int, int] = {}  # {model or group: its column of the design matrix}
    for observation in observations:
        columns.setdefault(observation.model, len(columns))
        columns.setdefault(observation.group, len(columns))
    design = numpy.zeros((len(observations), len(columns)))
    for number, observation in enumerate(observations):
        design[number, columns[observation.model]] = 1
        design[number, columns[observation.group]] = 1
    values = numpy.array([observation.value for observation in observations])
    effects, _, rank, _ = numpy.linalg.lstsq(design, values, rcond=None)
    degrees_of_freedom = len(observations) - int(rank)
    if not degrees_of_freedom:
        return Variance(0.0, 0)
    residuals = values - design @ effects
    return Variance(float(residuals @ residuals) / degrees_of_freedom, degrees_of_freedom)


def list_observations(baseline: str, pairs_by_row: Mapping[str, Sequence[Pair]], figure: str) -> list[Observation]:
    """Returns a figure of every run that is part of a pair; a run of the baseline counts once for all its pairs."""
    baseline_runs: dict[int, Observation] = {}
    others = []
    for row, pairs in pairs_by_row.items():
        for pair in pairs:
            group = id(pair.baseline)
            baseline_runs[group] = Observation(baseline, group, float(pair.baseline["figures"][figure]))
            others.append(Observation(row, group, float(pair.run["figures"][figure])))
    return [*baseline_runs.values(), *others]


# ---- speeds


class Place(NamedTuple):
    """Where the figures of a benchmark are: a file of a folder of results/, and their name in that file."""

    folder: str
    file: str
    figure: str


class Speed(NamedTuple):
    """How many times as fast as the baseline a model is (or how many times less memory it takes)."""

    ratio: float  # the median over rounds
    lowest: float  # of all rounds
    highest: float


def load_speeds(place: Place) -> dict[str, Speed]:
    """Returns {model: its speed} of a benchmark, by the names of the tables; empty if it has not run."""
    if place.figure == "ratio":
        lowest, highest = "lowest", "highest"
    else:
        lowest, highest = f"{place.figure} from", f"{place.figure} to"
    speeds = {}
    for record in load(place.folder, place.file):
        for spec, figures in record["figures"].items():
            if place.figure in figures and spec != "stock":
                ratio = figures[place.figure]
                # benchmarks of memory on a GPU have no rounds
                speed = Speed(ratio, lowest=figures.get(lowest, ratio), highest=figures.get(highest, ratio))
                speeds[spec.replace("+", "_")] = speed
    return speeds


def load_paper_speeds(table: Table) -> dict[str, float]:
    """Returns {model: its steps per second over the Transformer's} from the paper's table; empty if it has none."""
    steps = {}
    for model, figures in table.published().items():
        if STEPS_PER_SECOND in figures:
            steps[model] = float(figures[STEPS_PER_SECOND])
    return {model: value / steps[table.baseline] for model, value in steps.items()}
