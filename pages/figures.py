"""The figures in sentences of README.md and docs/, computed from results/.

A sentence takes a figure by an HTML comment, which GitHub does not show:

    a step is <!-- figure: speed-up cpu-step-4000 random -->1.19<!-- end --> times as fast

``python scripts/make_tables.py`` writes the text between the two comments, and ``--check`` fails where it differs from
the results. The first word of a comment, ``speed-up``, stands for a function in `FIGURES`. The other words are the
arguments of this function, and its docstring explains them. A MODEL is a row of the tables, such as ``random_vanilla``,
and a GROUP stands for several models. A figure must not begin a line or an item of a list, because Markdown takes such
a line for HTML and does not render it. Examples, with the results of version 1.0:

    speed-up cpu-step-4000 random                                        1.19
    speed-up cpu-step-32768 random                                       1.10
    speed-up cpu-beam-search without-vanilla                             1.44 to 1.49
    speed-up gpu-step random                                             1.07 to 1.11
    speed-up gpu-step mixtures                                           0.75 to 0.90
    speed-up imdb random                                                 1.15
    score ptb_cpu ptb ppl dense_vanilla                                  153.9
    lead multi30k_cpu en-fr bleu relative_random_vanilla                 2.5 ± 0.9
    lead multi30k_cpu en-fr chrf random_vanilla relative_random          1.3 to 1.5
    deficit multi30k_cpu en-de bleu fixed_random                         2.0 ± 0.8
    ahead multi30k_cpu en-fr bleu                                        `random_vanilla`, `relative_random` and …
    behind ptb_cpu ptb ppl                                               `fixed_random`, `random` and …
    undecided agnews_cpu agnews accuracy                                 `linformer`, `random` and …
    lead-after 28000 bleu relative_random_vanilla                        1.6
    pairs-after 28000 relative_random_vanilla                            one seed
    conversion-cost encoder-random 0 bleu                                1.6 ± 1.2
    conversion-cost encoder-random 2000 bleu                             0.3 ± 0.6
    bugs                                                                 37
    variants                                                             13
"""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence

from fairseq_synth.names import VARIANTS
from recipes.catalog import TABLES, TASKS, Table
from recipes.steps import UserError

from .convert import group_runs_by_updates, load_conversions
from .markdown import format_range
from .records import (
    Benchmark,
    Difference,
    RunsByModel,
    SpeedUp,
    compute_differences,
    get_column,
    load_column,
    load_speed_ups,
    pair_with_baseline,
)
from .repairs import load_repairs
from .speed_tables import find_benchmark
from .table_pictures import list_stages, load_continued_trainings

BEGINNING_OF_COMMENT = "<!-- figure: "
# A comment, the text of the figure and the comment that ends it, all on one line. `words` are the words of the comment.
FIGURE = re.compile(r"(?P<start><!-- figure: (?P<words>[^\n]*?) -->)(?P<text>[^\n]*?)(?P<end><!-- end -->)")
# A comment that is the first on its line, or in its item of a list.
FIGURE_AT_THE_START = re.compile(r"^[ \t>]*(?:[-*+] |\d+\. )?[ \t]*<!-- figure: (?P<words>[^\n]*?) -->", re.MULTILINE)

# The benchmarks by the names that `speed-up` takes. A name with several benchmarks gives the range over all of them.
BENCHMARKS: dict[str, list[Benchmark]] = {
    "cpu-step-4000": [find_benchmark("speed", "step, 4,000 words")],
    "cpu-step-32768": [find_benchmark("speed", "step, 32,768 words")],
    "cpu-beam-search": [find_benchmark("speed", "generation, 8k words")],
    "gpu-step": [
        find_benchmark("speed on a GPU", "step, batches of a corpus"),
        find_benchmark("speed on a GPU", "step 128×256"),
    ],
    "imdb": [Benchmark("imdb_cpu/speed", "imdb", key="ratio")],
    "denoising": [Benchmark("denoising_cpu/speed", "wikitext2_spans", key="ratio")],
    "ptb": [Benchmark("ptb_cpu/speed", "ptb", key="ratio")],
    "agnews": [Benchmark("agnews_cpu/speed", "agnews", key="ratio")],
}
# The groups of models that `speed-up` takes. The models are named as in VARIANTS.
GROUPS: dict[str, list[str]] = {
    "mixtures": [spec for spec in VARIANTS if "+" in spec],
    "mixtures-with-vanilla": [spec for spec in VARIANTS if "+vanilla" in spec],
    "without-vanilla": [spec for spec in VARIANTS if "vanilla" not in spec],
    "random-functions": [spec for spec in VARIANTS if "random" in spec and "+" not in spec],
}
# How many digits after the point the value of a metric has in sentences.
DIGITS = {"bleu": 1, "chrf": 1, "ppl": 1, "accuracy": 1, "rougeL": 1, "valid_loss": 2, "log_ppl": 2, "bits": 2}


def fill_in(page: str, text: str) -> str:
    """Returns the text of a page with the current value of every figure in it.

    For example, "<!-- figure: bugs -->36<!-- end -->" becomes "<!-- figure: bugs -->37<!-- end -->".

    Args:
        page: the name of the page, for error messages.
        text: the Markdown of the page.

    Raises:
        UserError: a comment names no figure, is not closed on its line, or stands where Markdown takes it for HTML.
    """
    refuse_misplaced_comment(page, text)
    refuse_unclosed_comment(page, text)

    def render_match(match: "re.Match[str]") -> str:
        """Returns the two comments around a figure, as `FIGURE` matches them, with the current value between them."""
        return match["start"] + compute_figure(page, match["words"]) + match["end"]

    return FIGURE.sub(render_match, text)


def refuse_misplaced_comment(page: str, text: str) -> None:
    """Raises UserError if a comment on a page begins a line or an item of a list: "- <!-- figure: bugs -->37…".

    Args:
        page: the name of the page.
        text: the Markdown of the page.
    """
    misplaced = FIGURE_AT_THE_START.search(text)
    if misplaced:
        raise UserError(
            f"{page}: '{BEGINNING_OF_COMMENT}{misplaced['words']} -->' is at the start of a line or of a list "
            "item, where Markdown would not read it as a comment; put a word before it"
        )


def refuse_unclosed_comment(page: str, text: str) -> None:
    """Raises UserError if a comment on a page has no "<!-- end -->" on its line: "has <!-- figure: bugs -->37 bugs".

    Args:
        page: the name of the page.
        text: the Markdown of the page.
    """
    number_of_beginnings = text.count(BEGINNING_OF_COMMENT)
    complete_comments = FIGURE.findall(text)  # each with its beginning and its end
    if len(complete_comments) != number_of_beginnings:
        raise UserError(f"{page}: not every '{BEGINNING_OF_COMMENT}NAME -->' has its '<!-- end -->' on the same line")


def compute_figure(page: str, words: str) -> str:
    """Returns the figure that the words of a comment stand for, such as "speed-up imdb random".

    Raises UserError, which names the page and the comment, if the words are wrong or the results have no such figure.
    """
    name, *arguments = words.split()
    place_of_error = f"{page}: '{BEGINNING_OF_COMMENT}{words} -->'"
    if name not in FIGURES:
        names = ", ".join(FIGURES)
        raise UserError(f"{place_of_error}: choose from {names}")
    function = FIGURES[name]  # for example, "speed-up imdb random" calls speed_up("imdb", "random")
    try:
        return function(*arguments)
    except UserError as error:
        raise UserError(f"{place_of_error}: {error}") from None
    except (LookupError, TypeError, ValueError) as error:
        # LookupError: the results have no such table or model. ValueError: they have no such number of updates.
        # TypeError: the function takes fewer or more arguments than the comment has words.
        raise UserError(f"{place_of_error}: not in the results ({error}); see FIGURES in pages/figures.py") from None


# ---- speed


def speed_up(benchmark_name: str, name: str, *more_names: str) -> str:
    """Returns how many times as fast as fairseq's Transformer a model is, or the range of several speed-ups.

    In a page: ``speed-up BENCHMARK NAME …``, where each NAME is that of a model or of a group of models. For example,
    ``speed-up imdb random`` gives "1.15". As "gpu-step" has two benchmarks, ``speed-up gpu-step random`` gives a range,
    "1.07 to 1.11".

    Args:
        benchmark_name: a key of `BENCHMARKS`, which lists one or more benchmarks for it.
        name: a model, or a key of `GROUPS`.
        more_names: further models and groups, which extend the range.
    """
    ratios: list[float] = []
    for benchmark in BENCHMARKS[benchmark_name]:
        speed_ups = load_speed_ups(benchmark)
        for model_or_group in (name, *more_names):
            ratios += list_ratios(speed_ups, model_or_group)
    return format_range(ratios, ".2f")


def list_ratios(speed_ups: Mapping[str, SpeedUp], model_or_group: str) -> list[float]:
    """Returns the speed-up of a model, or the speed-ups of those models of a group that were timed.

    Raises KeyError if a single model was not timed.
    """
    if model_or_group not in GROUPS:
        return [speed_ups[model_or_group].ratio]
    return [speed_ups[member].ratio for member in list_members(model_or_group) if member in speed_ups]


def list_members(group: str) -> list[str]:
    """Returns the models of a group by their names in tables: ``random_vanilla`` for ``random+vanilla`` in VARIANTS."""
    return [spec.replace("+", "_") for spec in GROUPS[group]]


# ---- quality


def load_runs_by_model(table_name: str, dataset: str) -> RunsByModel:
    """Returns {model: the records of its runs} for a data set of a table."""
    table = TABLES[table_name]
    return load_column(table, get_column(table, dataset))


def is_lower_better(table: Table, metric: str) -> bool:
    """Returns whether a lower value of a metric means a better model."""
    if metric in ("valid_loss", "bits"):
        return True
    task = TASKS[table.task]
    return metric == task.metric and task.best is min


def load_advantages(table_name: str, dataset: str, metric: str) -> dict[str, Difference]:
    """Returns {model: by how much it is better than the Transformer}, which is negative for a worse model."""
    table = TABLES[table_name]
    differences = compute_differences(table, load_runs_by_model(table_name, dataset), metric)
    if is_lower_better(table, metric):
        return {model: negate(difference) for model, difference in differences.items()}
    return differences


def negate(difference: Difference) -> Difference:
    """Returns a difference with the opposite sign. Its confidence interval is as wide as before."""
    return Difference(-difference.mean, difference.half_width)


def score(table_name: str, dataset: str, metric: str, model: str) -> str:
    """Returns the value of a metric for a model, as the mean over its runs.

    In a page: ``score TABLE DATASET METRIC MODEL``.
    """
    runs = load_runs_by_model(table_name, dataset)[model]
    mean = statistics.mean(run["figures"][metric] for run in runs)
    return f"{mean:.{DIGITS[metric]}f}"


def lead(table_name: str, dataset: str, metric: str, model: str, *more_models: str) -> str:
    """Returns by how much a model is better than the Transformer of the same seed, with its confidence interval.

    In a page: ``lead TABLE DATASET METRIC MODEL …``. For several models, returns the range of their leads. Raises
    UserError if one of the models is not better.
    """
    advantages = load_advantages(table_name, dataset, metric)
    leads = [advantages[name] for name in (model, *more_models)]
    if any(advantage.mean <= 0 for advantage in leads):
        raise UserError("a model is not better than the Transformer")
    return format_differences(leads, metric)


def deficit(table_name: str, dataset: str, metric: str, model: str, *more_models: str) -> str:
    """Returns by how much a model is worse than the Transformer of the same seed, with its confidence interval.

    In a page: ``deficit TABLE DATASET METRIC MODEL …``. For several models, returns the range of their deficits. Raises
    UserError if one of the models is not worse.
    """
    advantages = load_advantages(table_name, dataset, metric)
    deficits = [negate(advantages[name]) for name in (model, *more_models)]
    if any(disadvantage.mean <= 0 for disadvantage in deficits):
        raise UserError("a model is not worse than the Transformer")
    return format_differences(deficits, metric)


def format_differences(differences: Sequence[Difference], metric: str) -> str:
    """Returns "mean ± half width" of a single difference, or the range of the means of several."""
    if len(differences) == 1:
        return format_difference(differences[0], metric)
    means = [difference.mean for difference in differences]
    return format_range(means, f".{DIGITS[metric]}f")


def format_difference(difference: Difference, metric: str) -> str:
    """Returns "mean ± half width" of a difference, or the mean alone if there is no confidence interval."""
    digits = DIGITS[metric]
    mean = f"{difference.mean:.{digits}f}"
    if not difference.half_width:
        return mean
    return f"{mean} ± {difference.half_width:.{digits}f}"


def ahead(table_name: str, dataset: str, metric: str) -> str:
    """Returns the names of the models that are significantly better than the Transformer.

    In a page: ``ahead TABLE DATASET METRIC``.
    """
    advantages = load_advantages(table_name, dataset, metric)
    better = [model for model, advantage in advantages.items() if advantage.excludes_zero and advantage.mean > 0]
    return enumerate_models(better)


def behind(table_name: str, dataset: str, metric: str) -> str:
    """Returns the names of the models that are significantly worse than the Transformer.

    In a page: ``behind TABLE DATASET METRIC``.
    """
    advantages = load_advantages(table_name, dataset, metric)
    worse = [model for model, advantage in advantages.items() if advantage.excludes_zero and advantage.mean < 0]
    return enumerate_models(worse)


def undecided(table_name: str, dataset: str, metric: str) -> str:
    """Returns the names of the models that do not differ significantly from the Transformer.

    In a page: ``undecided TABLE DATASET METRIC``.
    """
    advantages = load_advantages(table_name, dataset, metric)
    similar = [model for model, advantage in advantages.items() if not advantage.excludes_zero]
    return enumerate_models(similar)


def enumerate_models(models: Sequence[str]) -> str:
    """Returns the names of models as in a sentence: "`a`, `b` and `c`"; "none" without any."""
    names = [f"`{model}`" for model in models]
    if not names:
        return "none"
    if len(names) == 1:
        return names[0]
    *first_names, last_name = names
    return ", ".join(first_names) + f" and {last_name}"


# ---- trainings on Multi30k En-Fr that were continued


def load_continued_leads(updates: int, metric: str, model: str) -> list[float]:
    """Returns the leads of a model over the Transformer on En-Fr after some updates, one for each seed.

    A lead is by how much the model is better. Only seeds that were trained for all 28,000 updates count.

    Args:
        updates: 7000, 14000 or 28000.
        metric: the metric.
        model: the model.
    """
    # This table has the ends of the trainings. Their records after fewer updates are found from there.
    table = TABLES["multi30k_28k"]
    runs_by_model = load_continued_runs(table, "en-fr", updates)
    pairs_by_model = pair_with_baseline(runs_by_model, table.baseline)
    differences = [pair.difference(metric) for pair in pairs_by_model[model]]
    if is_lower_better(table, metric):
        return [-difference for difference in differences]
    return differences


def load_continued_runs(table: Table, dataset: str, updates: int) -> RunsByModel:
    """Returns {model: the records of its runs after some updates} for trainings that were continued.

    The trainings of 7000 updates, for example, were continued to 14000 and then to 28000, but not with all seeds. Seeds
    that were not trained to the end are left out, so that the runs after different numbers of updates can be compared.

    Args:
        table: the table with the ends of the trainings.
        dataset: the data set.
        updates: the number of updates. Raises ValueError if the trainings were not evaluated after it.
    """
    stages = list_stages(table, get_column(table, dataset))
    updates_of_stages = [stage.updates for stage in stages]  # for example 7000, 14000 and 28000
    stage_number = updates_of_stages.index(updates)  # raises ValueError if there is no such stage
    runs_by_model: RunsByModel = {}
    for model, trainings in load_continued_trainings(stages).items():
        runs_by_model[model] = [training.records[stage_number] for training in trainings]
    return runs_by_model


def lead_after(updates: str, metric: str, model: str) -> str:
    """Returns a model's lead over the Transformer on En-Fr after some updates, as the mean over its seeds.

    In a page: ``lead-after UPDATES METRIC MODEL``. The updates are 7000, 14000 or 28000.
    """
    mean_lead = statistics.mean(load_continued_leads(int(updates), metric, model))
    return f"{mean_lead:.{DIGITS[metric]}f}"


def pairs_after(updates: str, model: str) -> str:
    """Returns over how many seeds `lead_after` takes the mean, such as "one seed" or "3 seeds".

    In a page: ``pairs-after UPDATES MODEL``.
    """
    number_of_seeds = len(load_continued_leads(int(updates), "bleu", model))
    return "one seed" if number_of_seeds == 1 else f"{number_of_seeds} seeds"


# ---- conversions, and the code


def conversion_cost(conversion: str, updates: str, metric: str) -> str:
    """Returns by how much a Transformer for En-De gets worse when its dot products are replaced, with an interval.

    The result is positive if the converted model is worse: if its BLEU is lower, or its loss higher.

    In a page: ``conversion-cost CONVERSION UPDATES METRIC``.

    Args:
        conversion: which dot products are replaced and by what, such as ``encoder-random``.
        updates: how many updates the converted model was trained: 0, 500 or 2000.
        metric: a metric of the records results/convert/multi30k_cpu-*.
    """
    table = TABLES["multi30k_cpu"]
    runs_by_updates = group_runs_by_updates(load_conversions(table.name))
    runs_by_conversion = runs_by_updates[int(updates)]
    # The intervals are simultaneous, as in docs/convert.md: they get wider with the number of conversions that are
    # compared. So the intervals of all conversions are computed, though only one is returned.
    differences = compute_differences(table, runs_by_conversion, metric)
    difference = differences[conversion]  # the converted model minus the Transformer
    cost = difference if is_lower_better(table, metric) else negate(difference)
    return format_difference(cost, metric)


def count_bugs() -> str:
    """Returns how many bugs in fairseq the plugin works around. In a page: ``bugs``."""
    return str(len(load_repairs()))


def count_variants() -> str:
    """Returns for how many functions and mixtures there are architectures. In a page: ``variants``."""
    return str(len(VARIANTS))


# The functions that compute figures, by the first word of a comment.
FIGURES: dict[str, Callable[..., str]] = {
    "speed-up": speed_up,
    "score": score,
    "lead": lead,
    "deficit": deficit,
    "ahead": ahead,
    "behind": behind,
    "undecided": undecided,
    "lead-after": lead_after,
    "pairs-after": pairs_after,
    "conversion-cost": conversion_cost,
    "bugs": count_bugs,
    "variants": count_variants,
}
