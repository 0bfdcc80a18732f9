"""The notes below a table: by which commands, versions and machines its figures came about."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from recipes.catalog import BASELINE, TASKS, Table
from recipes.provenance import device_of

from .markdown import folded, format_range, label
from .records import Record, load

TITLE = "How these figures came about"
VERSIONS_SHOWN = ("python", "torch", "fairseq", "ve-fairseq")  # results/ has the others too


def baseline_name(table: Table) -> str:
    """Returns the name of the row with which others are compared, as part of a sentence."""
    return "the Transformer" if table.baseline == BASELINE else label(table.baseline)


def reproduce_command(table: Table) -> str:
    """Returns the command that runs any cell of a table, as code in Markdown."""
    dataset = "--dataset DATASET " if len(table.columns) > 1 else ""
    return f"`scripts/reproduce.sh {table.name} {dataset}--variant MODEL --seed N`"


def note(table: Table, records: list[Record], figures: Iterable[str]) -> str:
    """Returns folded text that says how the figures of a table came about.

    Args:
        table: the table.
        records: those of its runs that are shown.
        figures: the names of the figures that are shown, whose signatures are listed.
    """
    seeds = sorted({record["seed"] for record in records})
    seeds_text = " or ".join(str(seed) for seed in seeds)
    lines = [
        f"The command of each run is {reproduce_command(table)}. The seed N is {seeds_text}. "
        f"The results of the runs are in the folder `results/{table.name}/`.",
        *list_extra_options(records),
        describe_duration(records),
        list_signatures(records, figures),
        *describe_round_trip(records),
        *describe_significance(table, records),
        *list_speed_benchmarks(table),
        describe_origin(records),
    ]
    return folded(TITLE, lines)


def list_extra_options(records: Sequence[Record]) -> list[str]:
    """Returns a line for each set of options about the machine with which runs were started."""
    runs_by_options: Counter[str] = Counter()
    for record in records:
        # a command is "scripts/reproduce.sh TABLE … --seed N OPTIONS"
        after_seed = record["command"].partition(" --seed ")[2]
        options = [word for word in after_seed.split()[1:] if word not in ("--rerun", "--")]
        runs_by_options[" ".join(options)] += 1
    lines = []
    for options_text in sorted(runs_by_options):
        if options_text:
            number = runs_by_options[options_text]
            lines.append(f"{number} of the {len(records)} runs used the options `{options_text}`.")
    return lines


def describe_duration(records: Sequence[Record]) -> str:
    """Returns sentences with the numbers of updates, and the minutes on each kind of device."""
    updates = format_range([record["updates"] for record in records], ",")
    durations = []
    for device in ("cpu", "gpu"):
        minutes = [record["minutes"] for record in records if device_of(record["hardware"]) == device]
        if minutes:
            durations.append(f"{format_range(minutes, '.1f')} minutes on a {device.upper()}")
    durations_text = " and ".join(durations)
    return (
        f"The models were trained for {updates} updates. The recorded times per training are {durations_text}. "
        "Other programs ran on the machines at the same time."
    )


def list_signatures(records: Sequence[Record], figures: Iterable[str]) -> str:
    """Returns a sentence with the signatures of the scores that are shown."""
    signatures = []
    for figure in dict.fromkeys([*figures, "chrf"]):  # each once
        signatures_of_runs = [record["signatures"][figure] for record in records if figure in record["signatures"]]
        if signatures_of_runs:
            signatures.append(f"`{join_distinct(signatures_of_runs)}`")
    return f"Each score has one of these signatures: {', '.join(signatures)}."


def describe_round_trip(records: Sequence[Record]) -> list[str]:
    """Returns a sentence with the BLEU of a translation whose subwords are all right, if BLEU was measured."""
    scores = []
    for record in records:
        figures = record["figures"]
        if "bleu" in figures and "round_trip" in figures:
            scores.append(f"{figures['round_trip']:.2f}")
    return [f"A perfect translation would score {join_distinct(scores)} BLEU."] if scores else []


def describe_significance(table: Table, records: Sequence[Record]) -> list[str]:
    """Returns how many runs differ from the baseline by the task's significance test, if one was made."""
    tests = [record["significance"] for record in records if record.get("significance")]
    if not tests:
        return []
    number_significant = sum(test["p_value"] < 0.05 for test in tests)
    # seeds and counts of single runs are left out of the signatures
    kinds = [re.split(r"\|(?:seed|won):", test["signature"])[0] for test in tests if "signature" in test]
    kinds_text = f": {join_distinct(kinds)}" if kinds else ""
    return [
        f"Each run was compared with the run of {baseline_name(table)} that has the same seed "
        f"({TASKS[table.task].test}{kinds_text}). "
        f"The p-value is below 0.05 in {number_significant} of {len(tests)} runs."
    ]


def list_speed_benchmarks(table: Table) -> list[str]:
    """Returns a line for each measurement of the speed of a table's models."""
    lines = []
    for record in load(f"{table.name}/speed"):
        command = f"`python benchmarks/timing.py {table.name}`"
        lines.append(f"The speed was measured with {command} at commit {record['commit']} ({record['benchmark']}).")
    return lines


def describe_origin(records: Sequence[Record]) -> str:
    """Returns sentences with the versions, hardware and commits of records."""
    versions_by_program: dict[str, set[str]] = {}
    machines: set[str] = set()
    commits: set[str] = set()
    for record in records:
        # a record of a training that was continued has several, separated by semicolons
        machines.update(record["hardware"].split("; "))
        commits.update(record["commit"].split("; "))
        for program, version in record["versions"].items():
            if program in VERSIONS_SHOWN:
                versions_by_program.setdefault(program, set()).add(version)
    versions = []
    for program, program_versions in versions_by_program.items():
        versions.append(program + " " + " and ".join(sorted(program_versions)))
    versions_text = ", ".join(versions)
    commits_text = ", ".join(sorted(commits))
    return f"Versions: {versions_text}. Hardware: {join_distinct(machines)}. Commits: {commits_text}."


def join_distinct(values: Iterable[str]) -> str:
    """Returns the distinct values, sorted and separated by semicolons."""
    return "; ".join(sorted(set(values)))
