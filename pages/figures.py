"""The figures in sentences of README.md and docs/, computed from results/.

A sentence takes a figure by an HTML comment, which GitHub does not show:

    a step is <!-- figure: speed-up cpu-step-4000 random -->1.19<!-- end --> times as fast

``python scripts/make_tables.py`` writes the text between the two comments, and ``--check`` fails where it differs from
the results. The first word names a function of `FIGURES`, whose docstring says which words follow. A MODEL is a row of
the tables, such as ``random_vanilla``; a GROUP stands for several models. A figure must not begin a line or an item of
a list, because Markdown takes such a line for HTML and does not render it. Examples, with the results of version 1.0:

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
    pairs-after 28000 relative_random_vanilla                            1
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

from .markdown import format_range
from .records import (
    Difference,
    Place,
    Rows,
    differences,
    get_column,
    load,
    load_column,
    load_speeds,
    pair_with_baseline,
)
from .repairs import load_repairs
from .speed_tables import find_place
from .table_pictures import list_stages, load_continued_runs

FIGURE = re.compile(r"(?P<start><!-- figure: (?P<words>[^\n]*?) -->)(?P<text>[^\n]*?)(?P<end><!-- end -->)")
FIRST_ON_A_LINE = re.compile(r"^[ \t>]*(?:[-*+] |\d+\. )?[ \t]*<!-- figure: (?P<words>[^\n]*?) -->", re.MULTILINE)

# The benchmarks by the names that `speed-up` takes. A name with several benchmarks gives the range over all of them.
SPEEDS: dict[str, list[Place]] = {
    "cpu-step-4000": [find_place("speed", "step, 4,000 words")],
    "cpu-step-32768": [find_place("speed", "step, 32,768 words")],
    "cpu-beam-search": [find_place("speed", "generation, 8k words")],
    "gpu-step": [
        find_place("speed on a GPU", "step, batches of a corpus"),
        find_place("speed on a GPU", "step 128×256"),
    ],
    "imdb": [Place("imdb_cpu/speed", "imdb", "ratio")],
    "denoising": [Place("denoising_cpu/speed", "wikitext2_spans", "ratio")],
    "ptb": [Place("ptb_cpu/speed", "ptb", "ratio")],
    "agnews": [Place("agnews_cpu/speed", "agnews", "ratio")],
}


# The groups of models that `speed-up` takes, as they are written in VARIANTS: "random+vanilla" is random_vanilla.
GROUPS: dict[str, list[str]] = {
    "mixtures": [spec for spec in VARIANTS if "+" in spec],
    "mixtures-with-vanilla": [spec for spec in VARIANTS if "+vanilla" in spec],
    "without-vanilla": [spec for spec in VARIANTS if "vanilla" not in spec],
    "random-functions": [spec for spec in VARIANTS if "random" in spec and "+" not in spec],
}
# How many digits after the point a figure has in sentences.
DIGITS = {"bleu": 1, "chrf": 1, "ppl": 1, "accuracy": 1, "rougeL": 1, "valid_loss": 2, "log_ppl": 2, "bits": 2}


def fill_in(page: str, text: str) -> str:
    """Returns the text of a page with the current value of every figure in it.

    Raises:
        UserError: a comment names no figure, is not closed on its line, or stands where Markdown takes it for HTML.
    """
    misplaced = FIRST_ON_A_LINE.search(text)
    if misplaced:
        raise UserError(
            f"{page}: '<!-- figure: {misplaced['words']} -->' begins a line or an item of a list, "
            "which Markdown would show as it is written; begin it with a word"
        )

    def replace(match: "re.Match[str]") -> str:
        """Returns the two comments around a figure with the current value between them."""
        return match["start"] + compute(page, match["words"]) + match["end"]

    filled, number = FIGURE.subn(replace, text)
    if number != text.count("<!-- figure: "):
        raise UserError(f"{page}: not every '<!-- figure: NAME -->' has its '<!-- end -->' on the same line")
    return filled


def compute(page: str, words: str) -> str:
    """Returns a figure by the words of its comment. UserError names the page and the comment."""
    name, *arguments = words.split()
    comment = f"{page}: '<!-- figure: {words} -->'"
    if name not in FIGURES:
        names = ", ".join(FIGURES)
        raise UserError(f"{comment}: choose from {names}")
    try:
        return FIGURES[name](*arguments)
    # a name that the results do not have, or the wrong number of words
    except (LookupError, StopIteration, TypeError, ValueError) as error:
        raise UserError(f"{comment}: not in the results ({error}); see FIGURES in pages/figures.py") from None
    except UserError as error:
        raise UserError(f"{comment}: {error}") from None


# ---- speed


def speed_up(benchmark: str, model: str, *more_models: str) -> str:
    """Returns fairseq's time over the model's, or the range of these ratios for several models.

    The words of a comment are ``speed-up BENCHMARK MODEL|GROUP …``. A benchmark is a key of `SPEEDS`, a group is a key
    of `GROUPS`. Members of a group that a benchmark has not timed are left out. A model that is named must have been
    timed.
    """
    ratios = []
    for place in SPEEDS[benchmark]:
        ratio_by_model = {name: speed.ratio for name, speed in load_speeds(place).items()}
        for model_or_group in (model, *more_models):
            if model_or_group in GROUPS:
                members = [spec.replace("+", "_") for spec in GROUPS[model_or_group]]
                ratios += [ratio_by_model[member] for member in members if member in ratio_by_model]
            else:
                ratios.append(ratio_by_model[model_or_group])
    return format_range(ratios, ".2f")


# ---- quality


def load_rows(table_name: str, dataset: str) -> Rows:
    """Returns the records of a data set of a table by row."""
    table = TABLES[table_name]
    return load_column(table, get_column(table, dataset))


def is_lower_better(table: Table, figure: str) -> bool:
    """Returns whether a lower value of a figure means a better model."""
    if figure in ("valid_loss", "bits"):
        return True
    task = TASKS[table.task]
    return figure == task.metric and task.best is min


def load_advantages(table_name: str, dataset: str, figure: str) -> dict[str, Difference]:
    """Returns {row: its difference to the baseline}, with the sign turned where lower is better."""
    table = TABLES[table_name]
    by_row = differences(table, load_rows(table_name, dataset), figure)
    return negate(by_row) if is_lower_better(table, figure) else by_row


def negate(by_row: Mapping[str, Difference]) -> dict[str, Difference]:
    """Returns differences with the opposite sign."""
    return {row: difference._replace(mean=-difference.mean) for row, difference in by_row.items()}


def score(table_name: str, dataset: str, figure: str, model: str) -> str:
    """Returns the mean of a model's figure over its runs. Words: ``score TABLE DATASET FIGURE MODEL``."""
    values = [record["figures"][figure] for record in load_rows(table_name, dataset)[model]]
    return f"{statistics.mean(values):.{DIGITS[figure]}f}"


def lead(table_name: str, dataset: str, figure: str, model: str, *more_models: str) -> str:
    """Returns by how much a model is better than the Transformer of the same seed.

    The words of a comment are ``lead TABLE DATASET FIGURE MODEL …``. For one model the confidence interval is added;
    several models give the range of their leads. Raises UserError if a model has no lead.
    """
    advantages = load_advantages(table_name, dataset, figure)
    leads = [advantages[name] for name in (model, *more_models)]
    return show_all_positive(leads, figure, "is not better than the Transformer")


def deficit(table_name: str, dataset: str, figure: str, model: str, *more_models: str) -> str:
    """Returns by how much a model is worse than the Transformer, in the form of `lead`.

    Words: ``deficit TABLE DATASET FIGURE MODEL …``.
    """
    disadvantages = negate(load_advantages(table_name, dataset, figure))
    deficits = [disadvantages[name] for name in (model, *more_models)]
    return show_all_positive(deficits, figure, "is not worse than the Transformer")


def show_all_positive(values: Sequence[Difference], figure: str, otherwise: str) -> str:
    """Returns ``mean ± half width`` of one difference, the range of several means, or raises UserError."""
    if any(value.mean <= 0 for value in values):
        raise UserError(f"a model {otherwise}")
    if len(values) > 1:
        return format_range([value.mean for value in values], f".{DIGITS[figure]}f")
    return with_interval(values[0], figure)


def with_interval(difference: Difference, figure: str) -> str:
    """Returns ``mean ± half width``, or the mean alone if there is no interval."""
    digits = DIGITS[figure]
    mean = f"{difference.mean:.{digits}f}"
    return f"{mean} ± {difference.half_width:.{digits}f}" if difference.half_width else mean


def ahead(table_name: str, dataset: str, figure: str) -> str:
    """Names the models that are significantly better than the Transformer. Words: ``ahead TABLE DATASET FIGURE``."""
    advantages = load_advantages(table_name, dataset, figure)
    models = [row for row, difference in advantages.items() if difference.excludes_zero and difference.mean > 0]
    return enumerate_models(models)


def behind(table_name: str, dataset: str, figure: str) -> str:
    """Names the models that are significantly worse than the Transformer. Words: ``behind TABLE DATASET FIGURE``."""
    advantages = load_advantages(table_name, dataset, figure)
    models = [row for row, difference in advantages.items() if difference.excludes_zero and difference.mean < 0]
    return enumerate_models(models)


def undecided(table_name: str, dataset: str, figure: str) -> str:
    """Names the models that do not differ significantly from the Transformer.

    Words: ``undecided TABLE DATASET FIGURE``.
    """
    advantages = load_advantages(table_name, dataset, figure)
    models = [row for row, difference in advantages.items() if not difference.excludes_zero]
    return enumerate_models(models)


def enumerate_models(models: Sequence[str]) -> str:
    """Returns names as in a sentence: "`a`, `b` and `c`"; "none" without any."""
    names = [f"`{model}`" for model in models]
    if not names:
        return "none"
    if len(names) == 1:
        return names[0]
    *first_names, last_name = names
    return ", ".join(first_names) + f" and {last_name}"


# ---- trainings on Multi30k En-Fr that were continued


def load_continued_leads(updates: str, figure: str, model: str) -> list[float]:
    """Returns by how much each run of a model is better than its Transformer after so many updates.

    Only the seeds count that have gone on to the largest number of updates, so that the figures can be compared.
    """
    last_table = TABLES["multi30k_28k"]
    stages = list_stages(last_table, get_column(last_table, "en-fr"))
    stage_number = [stage.updates for stage in stages].index(int(updates))
    rows: Rows = {}
    for row, runs_of_seeds in load_continued_runs(stages).items():
        rows[row] = [runs[stage_number] for runs in runs_of_seeds]
    leads = []
    for pair in pair_with_baseline(last_table, rows)[model]:
        difference = pair.run["figures"][figure] - pair.baseline["figures"][figure]
        leads.append(-difference if is_lower_better(last_table, figure) else difference)
    return leads


def lead_after(updates: str, figure: str, model: str) -> str:
    """Returns a model's mean lead on En-Fr after 7000, 14000 or 28000 updates.

    Words: ``lead-after UPDATES FIGURE MODEL``.
    """
    mean_lead = statistics.mean(load_continued_leads(updates, figure, model))
    return f"{mean_lead:.{DIGITS[figure]}f}"


def pairs_after(updates: str, model: str) -> str:
    """Returns how many seeds `lead_after` is a mean of. Words: ``pairs-after UPDATES MODEL``."""
    leads_of_seeds = load_continued_leads(updates, "bleu", model)
    return str(len(leads_of_seeds))


# ---- conversions, and the code


def conversion_cost(conversion: str, updates: str, figure: str) -> str:
    """Returns what a Transformer for En-De loses without its dot products.

    The words of a comment are ``conversion-cost CONVERSION UPDATES FIGURE``. A conversion is one of
    results/convert/multi30k_cpu-*, such as ``encoder-random``; updates are 0, 500 or 2000.
    """
    table = TABLES["multi30k_cpu"]
    rows: Rows = {}
    for record in load("convert", f"{table.name}-*"):
        for run in record["runs"]:
            if run["updates"] == int(updates):
                rows.setdefault(run["model"], []).append({**record, **run})
    # as in docs/convert.md, the interval holds for all conversions together
    by_conversion = differences(table, rows, figure)
    costs = by_conversion if is_lower_better(table, figure) else negate(by_conversion)
    return with_interval(costs[conversion], figure)


def count_bugs() -> str:
    """Returns how many bugs of fairseq the plugin works around. Word: ``bugs``."""
    return str(len(load_repairs()))


def count_variants() -> str:
    """Returns for how many functions and mixtures there are architectures. Word: ``variants``."""
    return str(len(VARIANTS))


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
