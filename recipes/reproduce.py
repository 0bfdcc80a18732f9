"""Runs the cells of a results table that nobody has run: data, training, averaging, translation, scores, JSON.

  scripts/reproduce.sh TABLE [options] [-- options of train.sh [-- flags for fairseq-train]]

  TABLE   one of
{tables}

What stands after -- goes to train.sh, and what stands after a second -- to fairseq-train. A run whose recipe they
change is not a cell of the table: its result goes to its own folder, as result.json. Only options about the machine
leave the recipe as it is. Every step is kept, so that a second call goes on where the first one stopped. Several calls
on one machine share the work: each takes the next cell that no other process is running. recipes/cluster.smk spreads
cells over the machines of a cluster. Each cell ends as results/TABLE/DEVICE/DATASET-VARIANT-seedN.json, DEVICE being
gpu or cpu; a cell that has run on either is skipped, with -- --gpus N on that one. Then scripts/make_tables.py renders
the tables. DRY_RUN=1 shows the commands.

--time trains nothing to its end: it times updates of the table's models in turns, in one process, and writes
results/TABLE/speed/DATASET.json. Let nothing else run meanwhile.
"""

import argparse
import json
import shlex
import shutil
from pathlib import Path
from shlex import quote
from typing import Iterator, List, NamedTuple, Sequence

from benchmarks import timing

from . import train
from .command import ROOT, Parser, UserError, dry_run, existing_folder, locked, pin_settings, say, show, split_flags
from .hyperparameters import RECIPES, number_of
from .provenance import device_of
from .record import record
from .scoring import evaluate
from .tables import TABLES, Cell, Table

OF_THE_MACHINE = "gpus processes threads timeout max-tokens precision".split()


class Call(NamedTuple):
    """What a call of reproduce.sh asks for."""

    args: argparse.Namespace
    table: Table
    options: List[str]  # of train.sh
    flags: List[str]  # of fairseq-train
    changed: str  # the options and flags, if they make it another recipe's

    @property
    def rest(self) -> List[str]:
        """What stands after ``--``."""
        return [*self.options, *(["--", *self.flags] if self.flags else [])]

    def cells(self) -> Iterator[Cell]:
        """The chosen cells, whether they have run or not."""
        args = self.args
        return self.table.cells(args.dataset, args.variant, [int(seed) for seed in args.seed or []])


def read_call(argv: Sequence[str]) -> Call:
    """Reads the arguments of reproduce.sh.

    Raises:
        UserError: one is wrong.
    """
    own, rest = split_flags(argv)
    tables = "\n".join(f"            {table.name:14} {table.about}" for table in TABLES.values())
    parser = Parser("reproduce", (__doc__ or "").format(tables=tables))
    add = parser.add_argument
    add("table", metavar="TABLE", choices=TABLES)
    columns = 'columns of the table: en-de, en-fr or "en-de en-fr", ptb, ... (default: all)'
    add("--dataset", "--pair", type=str.split, metavar="NAMES", help=columns)
    add("--variant", type=str.split, metavar="NAMES", help='such as "transformer random" (default: the table\'s rows)')
    add("--seed", type=str.split, metavar="NUMBERS", help="(default: the table's, 1 to 3 of them)")
    corpora = "corpora at hand; of several each in a folder of its name"
    add("--from", dest="source", type=existing_folder, metavar="DIR", help=corpora)
    add("--out", type=Path, default=ROOT, metavar="DIR", help="data and runs (default: the project's folder)")
    add("--rerun", action="store_true", help="run a cell again although results/ has it")
    add("--prepare", action="store_true", help="only prepare the data")
    add("--list", action="store_true", help="only print the commands of the cells not run yet, one for each")
    add("--record", action="store_true", help="only write the JSON of scored runs again, as when their baseline is new")
    add("--time", action="store_true", help="only time the updates of the models in turns")
    args = parser.parse_args(own)
    table = TABLES[args.table]
    for seed in args.seed or []:
        if not seed.isdecimal():
            raise UserError(f"--seed {seed}: must be an integer, at least 0")
    for flag, given, known in (
        ("--pair" if table.corpus else "--dataset", args.dataset, [dataset.name for dataset in table.datasets]),
        ("--variant", args.variant, [*table.models(), *train.models(), "vanilla"]),
    ):
        for word in [] if given is None else given or [""]:
            if word not in known:
                raise UserError(f"{flag} {word}: choose from {', '.join(dict.fromkeys(known))}")
    options, flags = split_flags(rest)
    changed = " ".join(rest) if flags or of_the_machine(options) != options else ""
    if any(word.split("=")[0] in ("--nodes", "--rendezvous") for word in options):
        raise UserError("--nodes: a cell is trained on one machine; recipes/cluster.smk spreads cells over several")
    if args.time:
        ignored = [name for name in ("variant", "seed", "rerun", "prepare", "list", "record") if getattr(args, name)]
        if ignored or rest:
            names = " and ".join([*(f"--{name}" for name in ignored), *(["what follows --"] if rest else [])])
            raise UserError(f"--time: times all models of a table in turns, by its recipe; leave {names} out")
    if args.record and dry_run():
        raise UserError("--record: runs no command that DRY_RUN=1 could show; call it without")
    return Call(args, table, options, flags, changed)


def main(argv: Sequence[str]) -> None:
    call = read_call(argv)
    args, table, options, flags, changed = call
    if args.time:
        timing.time_table(table, args.dataset, args.out, args.source)
        return
    prepared, device = set(), asked_device(options)
    for cell in call.cells():
        if args.list:
            if args.rerun or not is_done(cell, args.out, device, bool(changed)):
                print(listed(cell, args, call.rest))
            continue
        if args.record:
            if (cell.run(args.out) / "scores.json").exists():
                record(cell, args.out)
            continue
        if cell.dataset.name not in prepared and (args.prepare or args.rerun or changed or not cell.recorded(device)):
            prepared.add(cell.dataset.name)
            cell.prepare(args.out, args.source)
        if args.prepare:
            continue
        run_cell(cell, args.out, args.rerun, options, flags, changed)


def listed(cell: Cell, args: argparse.Namespace, rest: Sequence[str]) -> str:
    """The call that runs one cell of those that this call would run."""
    words = [cell.command if args.rerun else cell.command.replace(" --rerun", "")]
    words += [f"--from {quote(str(args.source.resolve()))}"] if args.source else []
    words += [f"--out {quote(str(args.out))}"] if args.out != ROOT else []
    return " ".join([*words, *(["--", shlex.join(rest)] if rest else [])])


def is_done(cell: Cell, out: Path, device: str, changed: bool) -> bool:
    """Whether a cell is recorded, or the cell with a recipe that was changed. `device`: of `asked_device`."""
    return changed_run(cell, out).joinpath("result.json").exists() if changed else bool(cell.recorded(device))


def changed_run(cell: Cell, out: Path) -> Path:
    """The folder of a cell's run by a recipe that was changed."""
    return cell.run(out).with_name(f"{cell.run(out).name}-changed")


def asked_device(options: Sequence[str]) -> str:
    """gpu or cpu, as options of train.sh say; empty where they leave it to the recipe."""
    gpus = number_of("--gpus", options)
    return "" if gpus is None else "gpu" if gpus else "cpu"


def of_the_machine(options: Sequence[str]) -> List[str]:
    """Those options of train.sh that say only where it runs, and not what is trained."""
    found: List[str] = []
    keep = False
    for word in options:
        keep = word[2:].split("=")[0] in OF_THE_MACHINE if word.startswith("--") else keep
        found += [word] if keep else []
    return found


def run_first(cell: Cell, out: Path, options: List[str]) -> List[str]:
    """Runs the cell that this one begins with, unless its checkpoint is there; the options of train.sh that name it."""
    first = cell.init()
    if not first:
        return []
    run = first.run(out)
    needed = ("scores.json", RECIPES[first.dataset.recipe].checkpoint)
    if not all((run / name).exists() for name in needed):
        run_cell(first, out, True, options, [], "")
        if not dry_run() and not (run / "scores.json").exists():
            raise UserError(
                f"{run}: this cell begins with that run, which another process is running; call again later"
            )
    return ["--init", str(run)]


def run_cell(cell: Cell, out: Path, rerun: bool, options: List[str], flags: List[str], changed: str) -> None:
    """Trains, scores and records a cell as far as that is not done; skips it if another process is running it.

    Args:
        changed: the options that make it another recipe's, if any.
    """
    table, data, device = cell.table, cell.data(out), asked_device(options)
    run = changed_run(cell, out) if changed else cell.run(out)
    done = is_done(cell, out, device, bool(changed))
    with locked(run.with_name(f".{run.name}.lock"), wait=False) as free:
        if not free:
            say(f"{run.name}: another process is running it: skipped")
            return
        if done and not rerun:
            say(f"results/ has {run.name}; --rerun runs it again")
            return
        if device and not rerun and (run / "trained").exists() and (run / "provenance.json").exists():
            before = device_of(json.loads((run / "provenance.json").read_text())[-1]["hardware"])
            if before != device:
                raise UserError(f"{run}: was trained on a {before}; --rerun trains it anew, or name another --out")
        say(f"{cell.dataset.name}, {cell.model}, seed {cell.seed}")
        # a cell that was scored is begun anew, one that was interrupted goes on
        if (run / "scores.json").exists() and is_done(cell, out, "", bool(changed)):
            show(["rm", "-rf", run])
            if not dry_run():
                gone = run.with_name(f".{run.name}.old")  # at once, so that no rest of it is taken for a run
                shutil.rmtree(gone, ignore_errors=True)
                run.rename(gone)
                shutil.rmtree(gone)
        model, own = table.training(cell.model)
        pin_settings(run / "cell", "trained", {"options": changed, **({"flags": " ".join(own)} if own else {})})
        recipe = RECIPES[cell.dataset.recipe]
        if not (run / "trained").exists():
            argv = [recipe.architecture(model), cell.dataset.name, "--recipe", cell.dataset.recipe]
            argv += run_first(cell, out, of_the_machine(options))
            train.start([*argv, "--data", data, "--save-dir", run, "--seed", cell.seed, *options, "--", *own, *flags])
            if not dry_run():
                (run / "trained").touch()
        if dry_run():
            show([ROOT / "scripts" / "evaluate.sh", data, run])
            return
        evaluate(table.task, data, run, recipe)
        more = [*options, *(["--", *flags] if flags else [])]
        extra = f" -- {' '.join(more)}" if more else ""
        record(cell, out, cell.command + extra, run if changed else None)
