"""The figures in sentences of README.md and docs/, computed from results/.

A sentence takes a figure by an HTML comment, which GitHub does not show:

    a step is <!-- figure: speed-up cpu-step-4000 random -->1.19<!-- end --> times as fast

``python scripts/make_tables.py`` writes the text between the two comments, and ``--check`` fails where it differs from
the results. The first word names a function of `FIGURES`, whose docstring says which words follow. A MODEL is a row of
the tables, such as ``random_vanilla``; a GROUP stands for several models. A figure must not begin a line or an item of
a list, because Markdown takes such a line for HTML and does not render it. Examples:

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
from collections import defaultdict
from collections.abc import Callable, Sequence

from fairseq_synth.names import VARIANTS
from recipes.catalog import TABLES, TASKS, Column, Table
from recipes.steps import UserError

from .records import Difference, Place, Rows, column_of, differences, load, load_cells, pairs, rows_of, speeds
from .repairs import load_bugs
from .tables import BENCHMARKS

FIGURE = re.compile(r"(?P<start><!-- figure: (?P<words>[^\n]*?) -->)(?P<text>[^\n]*?)(?P<end><!-- end -->)")
FIRST_ON_A_LINE = re.compile(r"^[ \t>]*(?:[-*+] |\d+\. )?[ \t]*<!-- figure: (?P<words>[^\n]*?) -->", re.MULTILINE)

# The benchmarks by the names that `speed-up` takes. A name with several benchmarks gives the range over all of them.
SPEEDS: dict[str, list[Place]] = {
    "cpu-step-4000": [BENCHMARKS["speed"]["step, 4,000 words"]],
    "cpu-step-32768": [BENCHMARKS["speed"]["step, 32,768 words"]],
    "cpu-beam-search": [BENCHMARKS["speed"]["generation, 8k words"]],
    "gpu-step": [
        BENCHMARKS["speed on a GPU"]["step, batches of a corpus"],
        BENCHMARKS["speed on a GPU"]["step 128×256"],
    ],
    "imdb": [("imdb_cpu/speed", "imdb", "ratio")],
    "denoising": [("denoising_cpu/speed", "wikitext2_spans", "ratio")],
    "ptb": [("ptb_cpu/speed", "ptb", "ratio")],
    "agnews": [("agnews_cpu/speed", "agnews", "ratio")],
}
# The functions by the names of groups that `speed-up` takes.
GROUPS: dict[str, list[str]] = {
    "mixtures": [spec for spec in VARIANTS if "+" in spec],
    "mixtures-with-vanilla": [spec for spec in VARIANTS if "+vanilla" in spec],
    "without-vanilla": [spec for spec in VARIANTS if "vanilla" not in spec],
    "random-functions": [spec for spec in VARIANTS if "random" in spec and "+" not in spec],
}
# The tables of the trainings on Multi30k En-Fr that continue each other, by their number of updates.
CONTINUED = {"7000": "multi30k_cpu", "14000": "multi30k_14k", "28000": "multi30k_28k"}
DIGITS = {"bleu": 1, "chrf": 1, "ppl": 1, "accuracy": 1, "valid_loss": 2, "bits": 2}  # in sentences


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
        raise UserError(f"{comment}: choose from {', '.join(FIGURES)}")
    try:
        return FIGURES[name](*arguments)
    except (KeyError, StopIteration, TypeError) as error:  # a name that a table does not have, too few or many words
        raise UserError(f"{comment}: not in the results ({error}); see FIGURES in pages/figures.py") from None
    except UserError as error:
        raise UserError(f"{comment}: {error}") from None


# ---- speed


def speed_up(benchmark: str, model: str, *more_models: str) -> str:
    """``speed-up BENCHMARK MODEL|GROUP …``: fairseq's time over the model's; for several models their range.

    A benchmark is a key of `SPEEDS`, a group a key of `GROUPS`. Members of a group that a benchmark has not timed are
    left out, but a model that is named must have been timed.
    """
    ratios = []
    for place in SPEEDS[benchmark]:
        timed = {name.replace("+", "_"): speed.ratio for name, speed in speeds(*place).items()}
        for model_or_group in (model, *more_models):
            if model_or_group in GROUPS:
                names = [spec.replace("+", "_") for spec in GROUPS[model_or_group]]
                ratios += [timed[name] for name in names if name in timed]
            else:
                ratios.append(timed[model_or_group])
    return as_range(ratios, digits=2)


def as_range(values: Sequence[float], digits: int) -> str:
    """Returns ``lowest to highest``, or one number where both are the same in so many digits."""
    lowest = f"{min(values):.{digits}f}"
    highest = f"{max(values):.{digits}f}"
    return lowest if lowest == highest else f"{lowest} to {highest}"


# ---- quality


def load_column(table_name: str, dataset: str) -> tuple[Table, Column, Rows]:
    """Returns a table, one of its columns, and the records of that column by row."""
    table = TABLES[table_name]
    column = column_of(table, dataset)
    return table, column, rows_of(table, column, load_cells(table_name))


def is_lower_better(table: Table, figure: str) -> bool:
    """Returns whether a lower value of a figure means a better model."""
    if figure in ("valid_loss", "bits"):
        return True
    task = TASKS[table.task]
    return figure == task.metric and task.best is min


def load_advantages(table_name: str, dataset: str, figure: str) -> dict[str, Difference]:
    """Returns {row: its difference to the baseline}, with the sign turned where lower is better."""
    table, _, rows = load_column(table_name, dataset)
    found = differences(table, rows, figure)
    if not is_lower_better(table, figure):
        return found
    return {row: difference._replace(mean=-difference.mean) for row, difference in found.items()}


def score(table_name: str, dataset: str, figure: str, model: str) -> str:
    """``score TABLE DATASET FIGURE MODEL``: the mean over runs."""
    _, _, rows = load_column(table_name, dataset)
    values = [record["figures"][figure] for record in rows[model]]
    return f"{statistics.mean(values):.{DIGITS[figure]}f}"


def lead(table_name: str, dataset: str, figure: str, model: str, *more_models: str) -> str:
    """``lead TABLE DATASET FIGURE MODEL …``: by how much a model is better than the Transformer of the same seed.

    One model has its confidence interval, of several the range of their leads is given. UserError if one has no lead.
    """
    advantages = load_advantages(table_name, dataset, figure)
    leads = [advantages[name] for name in (model, *more_models)]
    return show_all_positive(leads, figure, "is not better than the Transformer")


def deficit(table_name: str, dataset: str, figure: str, model: str, *more_models: str) -> str:
    """``deficit TABLE DATASET FIGURE MODEL …``: by how much a model is worse than the Transformer, like ``lead``."""
    advantages = load_advantages(table_name, dataset, figure)
    deficits = [advantages[name]._replace(mean=-advantages[name].mean) for name in (model, *more_models)]
    return show_all_positive(deficits, figure, "is not worse than the Transformer")


def show_all_positive(values: Sequence[Difference], figure: str, otherwise: str) -> str:
    """Returns ``mean ± half width`` of one difference, the range of several means, or raises UserError."""
    if any(value.mean <= 0 for value in values):
        raise UserError(f"a model {otherwise}")
    if len(values) > 1:
        return as_range([value.mean for value in values], DIGITS[figure])
    return with_interval(values[0], figure)


def with_interval(difference: Difference, figure: str) -> str:
    """Returns ``mean ± half width``, without the second where there is no interval."""
    digits = DIGITS[figure]
    mean = f"{difference.mean:.{digits}f}"
    return f"{mean} ± {difference.half_width:.{digits}f}" if difference.half_width else mean


def ahead(table_name: str, dataset: str, figure: str) -> str:
    """``ahead TABLE DATASET FIGURE``: the models that are significantly better than the Transformer."""
    advantages = load_advantages(table_name, dataset, figure)
    return enumerate_models([row for row, own in advantages.items() if own.excludes_zero and own.mean > 0])


def behind(table_name: str, dataset: str, figure: str) -> str:
    """``behind TABLE DATASET FIGURE``: the models that are significantly worse than the Transformer."""
    advantages = load_advantages(table_name, dataset, figure)
    return enumerate_models([row for row, own in advantages.items() if own.excludes_zero and own.mean < 0])


def undecided(table_name: str, dataset: str, figure: str) -> str:
    """``undecided TABLE DATASET FIGURE``: the models that do not differ significantly from the Transformer."""
    advantages = load_advantages(table_name, dataset, figure)
    return enumerate_models([row for row, own in advantages.items() if not own.excludes_zero])


def enumerate_models(models: Sequence[str]) -> str:
    """Returns names as in a sentence: "`a`, `b` and `c`"; "none" without any."""
    names = [f"`{model}`" for model in models]
    if not names:
        return "none"
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"


# ---- trainings on Multi30k En-Fr that were continued


def load_continued_leads(updates: str, model: str, figure: str) -> list[float]:
    """Returns by how much each run of a model is better than its Transformer after so many updates.

    Only the seeds count that have gone on to the largest number of updates, so that the figures can be compared.
    """
    seeds_of_pairs = []
    pairs_after = {}
    for number, table_name in CONTINUED.items():
        table, _, rows = load_column(table_name, "en-fr")
        pairs_after[number] = pairs(table, rows).get(model, [])
        seeds_of_pairs.append({record["seed"] for record, _ in pairs_after[number]})
    seeds = set.intersection(*seeds_of_pairs)
    sign = -1 if figure == "valid_loss" else 1
    leads = []
    for record, baseline in pairs_after[updates]:
        if record["seed"] in seeds:
            leads.append(sign * (record["figures"][figure] - baseline["figures"][figure]))
    return leads


def lead_after(updates: str, figure: str, model: str) -> str:
    """``lead-after UPDATES FIGURE MODEL``: the mean lead on En-Fr after 7000, 14000 or 28000 updates."""
    return f"{statistics.mean(load_continued_leads(updates, model, figure)):.{DIGITS[figure]}f}"


def pairs_after(updates: str, model: str) -> str:
    """``pairs-after UPDATES MODEL``: how many seeds ``lead-after`` is a mean of."""
    return str(len(load_continued_leads(updates, model, "bleu")))


# ---- conversions, and the code


def conversion_cost(conversion: str, updates: str, figure: str) -> str:
    """``conversion-cost CONVERSION UPDATES FIGURE``: what a Transformer for En-De loses without its dot products.

    A conversion is one of results/convert/multi30k_cpu-*, such as ``encoder-random``; updates are 0, 500 or 2000.
    """
    table = TABLES["multi30k_cpu"]
    rows: Rows = defaultdict(list)
    for record in load("convert", f"{table.name}-*"):
        for run in record["runs"]:
            if run["updates"] == int(updates):
                rows[run["model"]].append({**record, **run})
    # as in docs/convert.md, the interval holds for all conversions together
    difference = differences(table, rows, figure)[conversion]
    cost = difference if is_lower_better(table, figure) else difference._replace(mean=-difference.mean)
    return with_interval(cost, figure)


def count_bugs() -> str:
    """``bugs``: how many bugs of fairseq the plugin works around."""
    return str(len(load_bugs()))


def count_variants() -> str:
    """``variants``: for how many functions and mixtures there are architectures."""
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
