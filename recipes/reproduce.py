"""Runs the cells of a results table that nobody has run: data, training, averaging, translation, scores, JSON.

  scripts/reproduce.sh TABLE [options] [-- options of train.sh [-- flags for fairseq-train]]

  TABLE   one of
{tables}

What stands after -- goes to train.sh, and what stands after a second -- to fairseq-train. A run whose recipe they
change is not a cell of the table: its result goes to its own folder, as result.json. Only options about the machine
leave the recipe as it is. Every step is kept, so that a second call goes on where the first one stopped. Several calls
on one machine share the work: each takes the next cell that no other process is running. recipes/cluster.smk spreads
cells over the machines of a cluster. Each cell ends as results/TABLE/DEVICE/DATASET-VARIANT-seedN.json, DEVICE being
gpu or cpu. A cell with a result of either device is skipped; with -- --gpus N (0: the CPU) a result of that device is
needed for it. Then scripts/make_tables.py renders the tables. DRY_RUN=1 shows the commands.

--time trains nothing to its end: it times updates of the table's models in turns, in one process, and writes
results/TABLE/speed/DATASET.json. Let nothing else run meanwhile.
"""

import argparse
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Iterator, List, NamedTuple, Sequence

from benchmarks import timing

from . import train
from .command import (
    ROOT,
    Parser,
    UserError,
    dry_run,
    existing_folder,
    folder,
    locked,
    pin_settings,
    read_settings,
    say,
    show,
    split_flags,
)
from .hyperparameters import RECIPES, number_of
from .provenance import device_of
from .record import check_evaluation, record
from .scoring import evaluate
from .tables import TABLES, Cell, Table

OF_THE_CELL = {  # options of train.sh that say which cell it is: what to do instead
    "--seed": "give it before --",
    "--recipe": "a table has its own; leave it out",
    **dict.fromkeys(("--data", "--save-dir"), "name the folder of data and runs by --out, before --"),
    **dict.fromkeys(
        ("--nodes", "--rendezvous"), "a cell is trained on one machine; recipes/cluster.smk spreads cells over several"
    ),
}
OF_THE_MACHINE = re.compile(r"--(?:gpus|processes|threads|timeout|max-tokens|precision)[= ]\S+")


class Call(NamedTuple):
    """What a call of reproduce.sh asks for."""

    args: argparse.Namespace
    table: Table
    options: List[str]  # of train.sh
    flags: List[str]  # of fairseq-train
    for_second: bool = False  # the run itself is wanted, for another to begin with; a record of it is not enough

    @property
    def rest(self) -> List[str]:
        """What stands after ``--``."""
        return [*self.options, *(["--", *self.flags] if self.flags else [])]

    @property
    def machine(self) -> List[str]:
        """Those options of train.sh that say only where it runs, and not what is trained."""
        return " ".join(OF_THE_MACHINE.findall(" ".join(self.options))).split()

    @property
    def changed(self) -> str:
        """The options and flags, if they make it another recipe's."""
        return " ".join(self.rest) if self.rest != self.machine else ""

    @property
    def device(self) -> str:
        """gpu or cpu, as the options say; empty where they leave it to the recipe."""
        gpus = number_of("--gpus", self.options)
        return "" if gpus is None else "gpu" if gpus else "cpu"

    def cells(self) -> Iterator[Cell]:
        """The chosen cells, whether they have run or not."""
        seeds = [int(seed) for seed in self.args.seed or []]
        return self.table.cells(self.args.dataset, self.args.variant, seeds)

    def run(self, cell: Cell) -> Path:
        """The folder of a cell's run; by a recipe that was changed it has one of its own."""
        run = cell.run(self.args.out)
        return run.with_name(f"{run.name}-changed") if self.changed else run

    def is_done(self, cell: Cell) -> bool:
        """Whether a cell is recorded: of the device that is asked for, if one is, and of these options."""
        if self.for_second:
            return False
        if self.changed:
            run = self.run(cell)
            return (run / "result.json").exists() and read_settings(run / "cell").get("options") == self.changed
        return bool(cell.recorded(self.device))

    def command(self, cell: Cell, flag: str = "") -> str:
        """The call that does this for one cell, with a flag such as --rerun."""
        more = ["--from", str(self.args.source.resolve())] if self.args.source else []
        more += ["--out", str(self.args.out)] if self.args.out != ROOT else []
        more += ["--", *self.rest] if self.rest else []
        return " ".join([cell.command.replace("--rerun", flag).strip(), *map(shlex.quote, more)])

    def first(self) -> "Call":
        """The call for the run that a cell begins with, whose recipe is not changed."""
        args = argparse.Namespace(**{**vars(self.args), "rerun": False})
        return self._replace(args=args, options=self.machine, flags=[], for_second=True)

    def run_first(self, cell: Cell) -> List[str]:
        """Runs what is missing of the cell that this one begins with; the options that name it."""
        first = cell.init()
        if not first:
            return []
        run = first.run(self.args.out)
        if not all((run / name).exists() for name in ("scores.json", RECIPES[first.dataset.recipe].checkpoint)):
            if self.changed:
                say(f"first {first.name} of {first.table.name}, by its own recipe")
            self.first().run_cell(first)
            if not dry_run() and not (run / "scores.json").exists():
                raise UserError(f"{run}: this cell begins with it, and another process is running it; call again later")
        check_evaluation(run, first.data(self.args.out), RECIPES[first.dataset.recipe])  # which may average
        return ["--init", str(run)]

    def run_cell(self, cell: Cell) -> None:
        """Trains, scores and records a cell as far as that is not done; skips it if another process is running it."""
        run, rerun = self.run(cell), self.args.rerun
        with locked(run.with_name(f".{run.name}.lock"), wait=False) as free:
            if not free:
                return say(f"{run.name}: another process is running it: skipped")
            if not rerun and self.is_done(cell):
                return say(f"{run / 'result.json' if self.changed else cell.name} is there; --rerun runs it again")
            file = run / "provenance.json"
            before = device_of(json.loads(file.read_text())[-1]["hardware"]) if file.exists() else ""
            of_another_device = bool(self.device and before) and before != self.device
            if of_another_device and not rerun:
                mend = "remove it" if self.for_second else "--rerun trains it anew"
                raise UserError(f"{run}: was trained on a {before}; {mend}, or name another --out")
            say(f"{cell.dataset.name}, {cell.model}, seed {cell.seed}")
            # a run that was recorded, or begun on another device, is begun anew; one that was interrupted goes on
            if rerun and ((run / "recorded").exists() or of_another_device):
                remove(run)
            self.train_and_score(cell, run)

    def train_and_score(self, cell: Cell, run: Path) -> None:
        """Goes on with a cell from where its run is."""
        data, recipe = cell.data(self.args.out), RECIPES[cell.dataset.recipe]
        model, own = cell.table.training(cell.model)
        pin_settings(run / "cell", "trained", {"options": self.changed, **({"flags": " ".join(own)} if own else {})})
        if not (run / "trained").exists():
            argv = [recipe.architecture(model), cell.dataset.name, "--recipe", cell.dataset.recipe]
            argv += [*self.run_first(cell), "--data", str(data), "--save-dir", str(run), "--seed", str(cell.seed)]
            train.start([*argv, *self.options, "--", *own, *self.flags])
            if not dry_run():
                (run / "trained").touch()
        if dry_run():
            return show([ROOT / "scripts" / "evaluate.sh", data, run])
        evaluate(cell.table.task, data, run, recipe)
        command = f"{cell.command} -- {shlex.join(self.rest)}" if self.rest else cell.command
        record(cell, self.args.out, command, run if self.changed else None)


def remove(run: Path) -> None:
    """Removes a run at once, so that no rest of it is taken for one."""
    show(["rm", "-rf", run])
    if not dry_run():
        gone = run.with_name(f".{run.name}.old")
        shutil.rmtree(gone, ignore_errors=True)
        run.rename(gone)
        shutil.rmtree(gone)


def read_call(argv: Sequence[str]) -> Call:
    """Reads the arguments of reproduce.sh."""
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
    add("--out", type=folder, default=ROOT, metavar="DIR", help="data and runs (default: the project's folder)")
    add("--rerun", action="store_true", help="run a cell again although results/ has it")
    add("--prepare", action="store_true", help="only prepare the data")
    add("--list", action="store_true", help="only print the commands of the cells not run yet, one for each")
    add("--record", action="store_true", help="only write the JSON of scored runs again, as when their baseline is new")
    add("--time", action="store_true", help="only time the updates of the models in turns")
    args = parser.parse_args(own)
    table = TABLES[args.table]
    for seed in [] if args.seed is None else args.seed or [""]:
        if not seed.isdecimal():
            raise UserError(f"--seed {seed}: must be an integer, at least 0")
    table.check(args.dataset, args.variant)
    options, flags = split_flags(rest)
    for option in (word.split("=")[0] for word in options):
        if option in OF_THE_CELL:
            raise UserError(f"-- {option}: {OF_THE_CELL[option]}")
    if args.time:
        others = ("variant", "seed", "rerun", "prepare", "list", "record")
        ignored = [f"--{name}" for name in others if getattr(args, name)] + (["what follows --"] if rest else [])
        if ignored:
            names = " and ".join(ignored)
            raise UserError(f"--time: times all models of a table in turns, by its recipe; leave {names} out")
    if args.record and dry_run():
        raise UserError("--record: runs no command that DRY_RUN=1 could show; call it without")
    call = Call(args, table, options, flags)
    if args.record and call.changed:
        raise UserError("--record: writes the records of the table's own recipe; leave what follows -- out")
    return call


def main(argv: Sequence[str]) -> None:
    call = read_call(argv)
    args, prepared = call.args, set()
    if args.record and not any((cell.run(args.out) / "scores.json").exists() for cell in call.cells()):
        raise UserError(f"--record: no run of these cells below {args.out / 'runs'} is scored; run them without it")
    if args.time:
        return timing.time_table(call.table, args.dataset, args.out, args.source)
    for cell in call.cells():
        wanted = args.rerun or not call.is_done(cell)
        if args.list:
            if wanted:
                print(call.command(cell, "--rerun" if args.rerun else ""))
        elif args.record:
            if (cell.run(args.out) / "scores.json").exists():
                record(cell, args.out)
        else:
            if cell.dataset.name not in prepared and (wanted or args.prepare):
                prepared.add(cell.dataset.name)
                cell.prepare(args.out, args.source)
            if not args.prepare:
                call.run_cell(cell)
