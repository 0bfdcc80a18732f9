"""Reads the JSON files of results/, and computes by how much models differ from their baseline.

A *record* is the content of one JSON file. The record of a run, which is one training, says among other things

- ``dataset``, ``model`` and ``seed``: what was trained,
- ``figures``: {metric: its value on the test set}, for example {"bleu": 38.26},
- ``signatures``: {metric: how it was computed},
- ``curve``: the validation losses, and the numbers of updates after which they were measured.

A table of results, which recipes/tables.yaml defines, has a row for each model and a column for each data set. Its
*baseline* is the model with which the others are compared. Except in one table, this is fairseq's Transformer.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from recipes.catalog import Column, Table
from recipes.provenance import device_of
from recipes.steps import ROOT

Record = dict[str, Any]
RunsByModel = dict[str, list[Record]]  # {model: the records of its runs}
STEPS_PER_SECOND = "steps/s"  # the heading of the paper's speeds
STOCK = "stock"  # the name of fairseq's Transformer in the files of the benchmarks
ERROR_RATE = 0.05  # the probability that any interval of a column fails to cover its true difference


def load_records(folder: str, file_pattern: str = "*") -> list[Record]:
    """Returns the records of a folder of results/, sorted by file name.

    Args:
        folder: a path below results/.
        file_pattern: which files to read: their name without ``.json``, where ``*`` stands for any letters.
    """
    paths = sorted((ROOT / "results" / folder).glob(f"{file_pattern}.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def load_runs(table_name: str) -> list[Record]:
    """Returns the records of all runs of a table, with the last validation loss as one more metric, ``valid_loss``.

    If a model was trained with the same seed on a GPU and on a CPU, these are two runs, since their rounding differs.
    """
    runs = load_records(f"{table_name}/gpu") + load_records(f"{table_name}/cpu")
    for run in runs:
        losses = run["curve"].get("valid_loss")
        run["figures"]["valid_loss"] = losses[-1] if losses else None
    return runs


def group_by_model(table: Table, column: Column, runs: Iterable[Record]) -> RunsByModel:
    """Returns {model: those of the runs that belong to it and to the column's data set}.

    All models of the table are keys, in the order of the table, even if they have no run. Other models come last.
    """
    runs_by_model: RunsByModel = {model: [] for model in table.models()}
    for run in runs:
        if run["dataset"] == column.name:
            runs_by_model.setdefault(run["model"], []).append(run)
    return runs_by_model


def get_column(table: Table, dataset: str) -> Column:
    """Returns the column of a table for a data set. Raises KeyError if the table has no such column."""
    for column in table.columns:
        if column.name == dataset:
            return column
    raise KeyError(dataset)


def load_column(table: Table, column: Column) -> RunsByModel:
    """Returns {model: the records of its runs} for one column of a table. A model without runs has an empty list."""
    return group_by_model(table, column, load_runs(table.name))


# ---- pairs of runs with the same seed


class Pair(NamedTuple):
    """A run of a model, and the run of the baseline with which it is compared."""

    run: Record
    baseline: Record

    def difference(self, metric: str) -> float:
        """Returns the model's value of a metric minus the baseline's."""
        difference: float = self.run["figures"][metric] - self.baseline["figures"][metric]
        return difference

    @property
    def baseline_run_id(self) -> int:
        """A number for the run of the baseline. It is equal in two pairs if they have the same run of the baseline."""
        return id(self.baseline)  # these pairs share the object of the run


def pair_with_baseline(runs_by_model: RunsByModel, baseline: str) -> dict[str, list[Pair]]:
    """Returns {model: its runs, each paired with the baseline's run of the same seed}, without the baseline itself.

    Runs whose seed the baseline does not have are left out, and so are models without any pair.
    """
    baseline_runs = runs_by_model.get(baseline, [])
    pairs_by_model = {}
    for model, runs in runs_by_model.items():
        if model == baseline:
            continue
        pairs = []
        for run in runs:
            baseline_run = find_run_with_same_seed(run, baseline_runs)
            if baseline_run is not None:
                pairs.append(Pair(run, baseline_run))
        if pairs:
            pairs_by_model[model] = pairs
    return pairs_by_model


def find_run_with_same_seed(run: Record, candidates: Iterable[Record]) -> Record | None:
    """Returns the candidate with the same seed as a run, or None if there is none.

    Of several, it is the one on the same hardware, or else one on the same kind of device (CPU or GPU), or else the
    first one.
    """
    with_same_seed = [candidate for candidate in candidates if candidate["seed"] == run["seed"]]
    for candidate in with_same_seed:
        if candidate["hardware"] == run["hardware"]:
            return candidate
    for candidate in with_same_seed:
        if device_of(candidate["hardware"]) == device_of(run["hardware"]):
            return candidate
    return with_same_seed[0] if with_same_seed else None


# ---- differences with confidence intervals


class Difference(NamedTuple):
    """A model's value of a metric minus the baseline's with the same seed: mean over seeds, and confidence interval."""

    mean: float
    half_width: float  # half the width of the interval; 0 if there are too few runs for an interval

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


def compute_differences(table: Table, runs_by_model: RunsByModel, metric: str) -> dict[str, Difference]:
    """Returns {model: its difference to the baseline in a metric}, with confidence intervals.

    A difference is the mean over the pairs of a model's run and the baseline's run with the same seed. Models without
    such a pair are left out. The confidence interval is

        difference ± quantile of Student's t * square root of the variance of the difference

    The quantile grows with the number of models, so that all intervals hold together. The variance follows from the
    variance of a single run, which is estimated from the runs of all models. So a model with a single run has an
    interval, too.
    """
    measured_runs = select_measured_runs(runs_by_model, metric)
    pairs_by_model = pair_with_baseline(measured_runs, table.baseline)
    run_variance = estimate_variance(pairs_by_model, table.baseline, metric)
    number_of_models = len(pairs_by_model)  # each of them gets an interval
    quantile = simultaneous_quantile(number_of_models, run_variance.degrees_of_freedom)
    differences = {}
    for model, pairs in pairs_by_model.items():
        mean = statistics.mean(pair.difference(metric) for pair in pairs)
        standard_error = math.sqrt(variance_of_mean_difference(pairs, run_variance.value))
        differences[model] = Difference(mean, half_width=quantile * standard_error)
    return differences


def select_measured_runs(runs_by_model: RunsByModel, metric: str) -> RunsByModel:
    """Returns {model: those of its runs that have a value of a metric}."""
    measured_runs: RunsByModel = {}
    for model, runs in runs_by_model.items():
        measured_runs[model] = [run for run in runs if run["figures"][metric] is not None]
    return measured_runs


def variance_of_mean_difference(pairs: Sequence[Pair], run_variance: float) -> float:
    """Returns the variance of the mean difference of some pairs: mean of the model's runs - mean of the baseline's.

    The mean difference is a weighted sum of independent runs, and a run with the weight w adds w² times its variance.
    For example, three runs of a model are compared with two runs of the baseline, A, A and B. The sum is

        model 1 / 3 + model 2 / 3 + model 3 / 3 - 2 A / 3 - B / 3

    The weights squared are 1/9, 1/9, 1/9, 4/9 and 1/9. So the variance is 8/9 of the variance of a run.

    Args:
        pairs: the pairs of a model.
        run_variance: the variance of a single run.
    """
    number_of_pairs = len(pairs)
    weights_of_model_runs = [1 / number_of_pairs] * number_of_pairs
    pairs_by_baseline_run = Counter(pair.baseline_run_id for pair in pairs)  # {run: in how many pairs it is}
    weights_of_baseline_runs = [-count / number_of_pairs for count in pairs_by_baseline_run.values()]
    weights = [*weights_of_model_runs, *weights_of_baseline_runs]
    return run_variance * sum(weight**2 for weight in weights)


def simultaneous_quantile(number_of_intervals: int, degrees_of_freedom: int) -> float:
    """Returns the quantile of Student's t for two-sided intervals that hold together.

    With a probability of 1 - `ERROR_RATE`, all intervals cover their true values. Without degrees of freedom there are
    no intervals, and the quantile is 0.
    """
    if degrees_of_freedom == 0:
        return 0.0
    from scipy.stats import t

    error_rate_per_interval = ERROR_RATE / number_of_intervals  # Bonferroni correction
    return float(t.ppf(1 - error_rate_per_interval / 2, degrees_of_freedom))


class Observation(NamedTuple):
    """The value of a metric in one run. Runs that are compared with the same run of the baseline share its group."""

    model: str
    group: int  # the identity of the baseline's run
    value: float


class Variance(NamedTuple):
    """An estimate of a variance."""

    value: float
    degrees_of_freedom: int  # 0: there are too few runs for an estimate


NO_ESTIMATE = Variance(0.0, degrees_of_freedom=0)


class LeastSquaresFit(NamedTuple):
    """What a fit of the effects of models and groups leaves unexplained."""

    sum_of_squared_residuals: float
    degrees_of_freedom: int  # the number of observations minus the number of independent effects


def estimate_variance(pairs_by_model: Mapping[str, Sequence[Pair]], baseline: str, metric: str) -> Variance:
    """Estimates how much a metric varies by chance from run to run, from the runs of all models together.

    A run of the baseline and the runs that are compared with it are a *group*. The value of a run is taken to be

        effect of its model + effect of its group + residual

    The estimate is the variance of the residuals of a least-squares fit, or `NO_ESTIMATE` if there are too few runs.

    Args:
        pairs_by_model: {model: its runs, each paired with a run of the baseline}.
        baseline: the name of the baseline.
        metric: the metric.
    """
    observations = list_observations(pairs_by_model, baseline, metric)
    if not observations:
        return NO_ESTIMATE
    fit = fit_effects(observations)
    if fit.degrees_of_freedom == 0:
        return NO_ESTIMATE
    return Variance(fit.sum_of_squared_residuals / fit.degrees_of_freedom, fit.degrees_of_freedom)


def fit_effects(observations: Sequence[Observation]) -> LeastSquaresFit:
    """Fits the effects of models and groups to the observations by least squares."""
    design = build_design_matrix(observations)
    values = numpy.array([observation.value for observation in observations])
    effects, _residuals, rank, _singular_values = numpy.linalg.lstsq(design, values, rcond=None)
    residuals = values - design @ effects
    number_of_independent_effects = int(rank)
    return LeastSquaresFit(
        sum_of_squared_residuals=float(residuals @ residuals),
        degrees_of_freedom=len(observations) - number_of_independent_effects,
    )


def build_design_matrix(observations: Sequence[Observation]) -> "numpy.ndarray[Any, Any]":
    """Returns the matrix of the linear model that explains each observation by its model and its group.

    It has a row for each observation and a column for each model and each group. An entry is 1 if the observation
    belongs to the column's model or group, and otherwise 0. For example, two models and two groups can have the rows

        transformer  random  group 1  group 2
             1         0        1        0
             1         0        0        1
             0         1        1        0
             0         1        0        1
    """
    models = list(dict.fromkeys(observation.model for observation in observations))
    groups = list(dict.fromkeys(observation.group for observation in observations))
    columns_of_models = numpy.zeros((len(observations), len(models)))
    columns_of_groups = numpy.zeros((len(observations), len(groups)))
    for row_number, observation in enumerate(observations):
        columns_of_models[row_number, models.index(observation.model)] = 1
        columns_of_groups[row_number, groups.index(observation.group)] = 1
    return numpy.hstack([columns_of_models, columns_of_groups])


def list_observations(pairs_by_model: Mapping[str, Sequence[Pair]], baseline: str, metric: str) -> list[Observation]:
    """Returns the value of a metric for every run in a pair. A run of the baseline occurs once, even in many pairs.

    A run of the baseline and all runs that are compared with it are a group. For example, two models are compared with
    the same run of the baseline. The three runs are the observations of a group:

        Observation("transformer", group=1, value=38.2), Observation("random", 1, 37.1), Observation("dense", 1, 37.5)

    The differences −1.1 and −0.7 would not do as observations. They are not independent, as both contain the 38.2.
    """
    baseline_runs: dict[int, Record] = {}  # {group: its run of the baseline}
    observations = []
    for model, pairs in pairs_by_model.items():
        for pair in pairs:
            group = pair.baseline_run_id
            baseline_runs[group] = pair.baseline  # the same run in all pairs of the group
            observations.append(Observation(model, group, float(pair.run["figures"][metric])))
    observations_of_baseline = []
    for group, run in baseline_runs.items():
        observations_of_baseline.append(Observation(baseline, group, float(run["figures"][metric])))
    return observations_of_baseline + observations


# ---- speeds


class Benchmark(NamedTuple):
    """A measurement of the speed or memory of models: where its figures are in results/."""

    folder: str
    file: str  # a name without ``.json``
    # The key of the ratio to fairseq's Transformer in the figures of a model: "ratio", or the shape of the batch.
    key: str


class SpeedUp(NamedTuple):
    """How many times as fast as the baseline a model is (or how many times less memory it needs)."""

    ratio: float  # the median over rounds
    lowest: float  # the lowest ratio in any round
    highest: float


def load_speed_ups(benchmark: Benchmark) -> dict[str, SpeedUp]:
    """Returns {model: its speed-up in a benchmark}; empty if the benchmark has not been run.

    The figures of a benchmark's record are, for example, with the key "32x32"::

        {"random+vanilla": {"32x32": 0.91, "32x32 from": 0.88, "32x32 to": 0.94}, ...}

    Models without a figure of this key are left out. If several records have a model, the last one counts.
    """
    speed_ups = {}
    for record in load_records(benchmark.folder, benchmark.file):
        for name_in_record, figures in record["figures"].items():
            is_transformer = name_in_record == STOCK  # its speed-up, which some records have, is always 1
            if not is_transformer and benchmark.key in figures:
                model = name_in_record.replace("+", "_")  # "random+vanilla" is ``random_vanilla`` in tables
                speed_ups[model] = read_speed_up(figures, benchmark.key)
    return speed_ups


def read_speed_up(figures: Mapping[str, float], key: str) -> SpeedUp:
    """Returns the speed-up that is stored under a key of a model's figures, with its range over the rounds.

    The range of "ratio" is under "lowest" and "highest", and the range of a shape such as "32x32" is under "32x32 from"
    and "32x32 to". Benchmarks of the memory of a GPU have no rounds; their range is the ratio itself.
    """
    ratio = figures[key]
    if key == "ratio":
        return SpeedUp(ratio, lowest=figures.get("lowest", ratio), highest=figures.get("highest", ratio))
    return SpeedUp(ratio, lowest=figures.get(f"{key} from", ratio), highest=figures.get(f"{key} to", ratio))


def load_paper_speed_ups(table: Table) -> dict[str, float]:
    """Returns {model: its steps per second over the baseline's} from the paper's table; empty if it has no speeds."""
    steps_per_second = {}
    for model, figures in table.published().items():
        if STEPS_PER_SECOND in figures:
            steps_per_second[model] = float(figures[STEPS_PER_SECOND])
    return {model: steps / steps_per_second[table.baseline] for model, steps in steps_per_second.items()}
