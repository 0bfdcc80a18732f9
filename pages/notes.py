"""The notes below a table: by which commands, versions and machines its figures came about."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from packaging.version import Version

from recipes.catalog import BASELINE, TASKS, Table
from recipes.provenance import device_of

from .markdown import distinct, folded, format_range, model_label
from .records import Record, load_records

TITLE = "How these numbers were measured"
VERSIONS_SHOWN = ("python", "torch", "fairseq", "ve-fairseq")  # the records have the versions of more programs
SIGNIFICANT = 0.05  # the p value below which a run differs significantly from the baseline


def baseline_name(table: Table) -> str:
    """Returns the name of the model with which others are compared, as part of a sentence in Markdown."""
    return "the Transformer" if table.baseline == BASELINE else model_label(table.baseline)


def reproduce_command(table: Table) -> str:
    """Returns the command that trains any model of a table, as code in Markdown."""
    dataset_option = "--dataset DATASET " if len(table.columns) > 1 else ""
    return f"`scripts/reproduce.sh {table.name} {dataset_option}--variant MODEL --seed N`"


def results_note(table: Table, runs: list[Record], metrics: Iterable[str]) -> str:
    """Returns the note below a table of results, which says how its figures came about, as a folded list.

    Args:
        table: the table.
        runs: the records of the runs that the table shows.
        metrics: the metrics that the table shows; the note lists their signatures.
    """
    seeds = sorted({run["seed"] for run in runs})
    seeds_text = ", ".join(str(seed) for seed in seeds)
    items = [
        f"Command of a run: {reproduce_command(table)}, with N = {seeds_text}",
        f"Results of the runs: `results/{table.name}/`",
    ]
    items += list_extra_options(runs)
    items += [describe_duration(runs), describe_signatures(runs, metrics)]
    items += list_round_trip(runs)  # the BLEU of a perfect translation
    items += list_significance(table, runs)
    items += list_speed_benchmarks(table)
    items += list_origin(runs)  # versions, hardware and commits
    return folded_list(items)


def folded_list(items: Iterable[str]) -> str:
    """Returns the items of a note as a list in Markdown, which GitHub shows only after a click on `TITLE`."""
    return folded(TITLE, [f"- {item}" for item in items])


def list_extra_options(runs: Sequence[Record]) -> list[str]:
    """Returns an item for each set of extra options with which runs were started, such as options about the machine."""
    runs_by_options = Counter(read_extra_options(run["command"]) for run in runs)
    items = []
    for options in sorted(runs_by_options):
        if options:
            number = runs_by_options[options]
            items.append(f"Additional options of {number} of the {len(runs)} runs: `{options}`")
    return items


def read_extra_options(command: str) -> str:
    """Returns the options in the command of a run that other commands of the same table do not have.

    A command is ``scripts/reproduce.sh TABLE … --seed N OPTIONS``. ``--rerun`` and ``--`` change no result and are left
    out.
    """
    _, _, seed_and_options = command.partition(" --seed ")
    options = seed_and_options.split()[1:]  # without the seed
    return " ".join(option for option in options if option not in ("--rerun", "--"))


def describe_duration(runs: Sequence[Record]) -> str:
    """Returns an item with the numbers of updates, and how many minutes the runs took on a CPU and on a GPU.

    For example: "Training: 7,000 updates; 20.1 to 22.5 minutes on a CPU and 1.3 minutes on a GPU, while other programs
    ran on the machines". There is at least one run, and every run was on a CPU or on a GPU.
    """
    updates_text = format_range([run["updates"] for run in runs], ",")
    durations = []
    for device in ("cpu", "gpu"):
        minutes = [run["minutes"] for run in runs if device_of(run["hardware"]) == device]
        if minutes:
            durations.append(f"{format_range(minutes, '.1f')} minutes on a {device.upper()}")
    durations_text = " and ".join(durations)
    return f"Training: {updates_text} updates; {durations_text}, while other programs ran on the machines"


def describe_signatures(runs: Sequence[Record], metrics: Iterable[str]) -> str:
    """Returns an item with the signatures of the metrics and of chrF, which say how each was computed."""
    signatures = []
    for metric in distinct([*metrics, "chrf"]):
        signatures_of_metric = [run["signatures"][metric] for run in runs if metric in run["signatures"]]
        if signatures_of_metric:
            signatures.append(f"`{join_distinct(signatures_of_metric)}`")
    return f"Signatures of the scores: {', '.join(signatures)}"


def list_round_trip(runs: Sequence[Record]) -> list[str]:
    """Returns a list with one item, the BLEU of a perfect translation; an empty list if BLEU was not measured.

    This is the figure ``round_trip``: the BLEU of the references after they were preprocessed and turned into text
    again. It can be less than 100, because this changes some characters.
    """
    scores_as_text = []
    for run in runs:
        figures = run["figures"]
        if "bleu" in figures and "round_trip" in figures:
            scores_as_text.append(f"{figures['round_trip']:.2f}")
    if not scores_as_text:
        return []
    # The score depends only on the data, so it is the same for all runs, unless their data were prepared differently.
    return [f"BLEU of a perfect translation: {join_distinct(scores_as_text)}"]


def list_significance(table: Table, runs: Sequence[Record]) -> list[str]:
    """Returns a list with one item, how many runs differ significantly from the baseline; empty if none was tested.

    A run is compared with the baseline's run of the same seed, by the significance test of the table's task.
    """
    tests = [run["significance"] for run in runs if run.get("significance")]
    if not tests:
        return []
    number_significant = sum(test["p_value"] < SIGNIFICANT for test in tests)
    name_of_test = TASKS[table.task].test
    item = (
        f"{name_of_test} against {baseline_name(table)} with the same seed: "
        f"p < {SIGNIFICANT} in {number_significant} of {len(tests)} runs"
    )
    kinds = [read_kind_of_test(test["signature"]) for test in tests if "signature" in test]
    if kinds:
        item += f" ({join_distinct(kinds)})"
    return [item]


def read_kind_of_test(signature: str) -> str:
    """Returns the part of a test's signature that is the same for all runs: "McNemar, exact" of "McNemar, exact|won:3".

    It ends before the seed of the test, or before the number of examples that only this run has right ("won").
    """
    return re.split(r"\|(?:seed|won):", signature)[0]


def list_speed_benchmarks(table: Table) -> list[str]:
    """Returns an item for each measurement of the speed of a table's models: what was measured, command and commit."""
    command = f"`python benchmarks/timing.py {table.name}`"
    items = []
    for record in load_records(f"{table.name}/speed"):
        items.append(f"Speed: {command} at commit {record['commit']} ({record['benchmark']})")
    return items


def list_origin(records: Sequence[Record]) -> list[str]:
    """Returns items with the versions of programs, the hardware and the commits that records come from."""
    hardware: list[str] = []
    commits: list[str] = []
    for record in records:
        # A training that was continued may have run on several machines and from several commits. Its record has them
        # separated by semicolons.
        hardware += record["hardware"].split("; ")
        commits += record["commit"].split("; ")
    # Commits are separated by commas. Hardware is not, because its descriptions contain commas.
    commits_text = ", ".join(sorted(set(commits)))
    return [
        f"Versions: {describe_versions(records)}",
        f"Hardware: {join_distinct(hardware)}",
        f"Commits: {commits_text}",
    ]


def describe_versions(records: Sequence[Record]) -> str:
    """Returns the versions of the most important programs, for example "python 3.11.7, torch 2.6.0 and 2.13.0"."""
    versions_by_program: dict[str, set[str]] = {}
    for record in records:
        for program, version in record["versions"].items():
            if program in VERSIONS_SHOWN:
                versions_by_program.setdefault(program, set()).add(version)
    texts = []
    for program, versions in versions_by_program.items():
        versions_text = " and ".join(sorted(versions, key=Version))
        texts.append(f"{program} {versions_text}")
    return ", ".join(texts)


def join_distinct(texts: Iterable[str]) -> str:
    """Returns the distinct texts, sorted and separated by semicolons."""
    return "; ".join(sorted(set(texts)))
