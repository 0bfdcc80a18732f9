"""Steps a second of a table's models, as ratios to its baseline's.

    python benchmarks/timing.py TABLE [--dataset NAMES] [--from DIR] [--out DIR]

Updates of all models are timed in turns, in one process, on the table's own data, which are prepared if they are not
there. Each column ends as results/TABLE/speed/NAME.json. DRY_RUN=1 shows the commands only.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pages.tables import baseline_name  # noqa: E402
from recipes import provenance, train  # noqa: E402
from recipes.catalog import RECIPES, TABLES, Cell, Recipe  # noqa: E402
from recipes.reproduce import prepare_cell  # noqa: E402
from recipes.steps import Parser, UserError, dry_run, existing, say  # noqa: E402

ROUNDS = 63  # of one update of each model; the first three are warm-up. With 15, two calls differed by up to 0.2
WARM_UP = 3


def main() -> None:
    parser = Parser("benchmarks/timing.py", __doc__)
    parser.add_argument("table", choices=TABLES, metavar="TABLE")
    parser.add_argument("--dataset", type=str.split, default=[], metavar="NAMES", help="columns (default: all)")
    parser.add_argument("--from", dest="source", type=existing, metavar="DIR", help="the corpora at hand")
    parser.add_argument("--out", type=Path, default=ROOT, metavar="DIR", help="data (default: the project's folder)")
    args = parser.parse_args()
    table = TABLES[args.table]
    cells = table.cells(args.dataset, list(dict.fromkeys([table.baseline, *table.models()])), table.seeds[:1])
    for _, group in itertools.groupby(cells, key=lambda cell: cell.column):
        own = list(group)
        settings = prepare_cell(own[0], args.out, args.source)
        if not dry_run():
            time_cells(own, settings, args.out)


def time_cells(cells: list[Cell], settings: dict[str, Any], out: Path) -> None:
    """Times updates of the cells of a column, the baseline's first, and writes the record. `settings`: of its data."""
    table, column, recipe = cells[0].table, cells[0].column, RECIPES[cells[0].column.recipe]
    say(f"{column.name}: one update of each model in turns, {ROUNDS} rounds")
    figures = ratios({cell.model: update(command(cell, settings, out)) for cell in cells}, clock(recipe))
    for name, figure in figures.items():
        print(f"{name}: {figure['ratio']:.2f} (rounds from {figure['lowest']:.2f} to {figure['highest']:.2f})")
    record = {
        "benchmark": f"updates a second on {column.heading}, in turns in one process",
        "unit": f"over {baseline_name(table)}'s",
        "command": f"python benchmarks/timing.py {table.name} --dataset {column.name}",
        "figures": figures,
        **provenance.here(recipe.gpus is None, threads=recipe.threads or 0),
    }
    provenance.write_record(ROOT / "results" / table.name / "speed" / f"{column.name}.json", record)


def command(cell: Cell, settings: dict[str, Any], out: Path) -> list[str]:
    """The flags of fairseq-train of a cell, from the data on, on one GPU or CPU; nothing is saved."""
    run = cell.run(out)
    machine = train.Machine(gpus=1 if run.recipe.gpus is None else 0).for_recipe(run.recipe)
    words = train.command(run, settings, machine, ["--no-save", "--disable-validation", *run.flags])
    return words[words.index(str(run.data / "bin")) :]


def update(argv: Sequence[str]) -> Callable[[], None]:
    """A training begun as fairseq-train begins it; a call is one update on its next batches."""
    from fairseq import options, tasks, utils
    from fairseq.data import iterators
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.trainer import Trainer

    from fairseq_synth import register

    register()  # the parser knows the architectures that are there before it
    args = options.parse_args_and_arch(options.get_training_parser(), input_args=list(argv))
    config: Any = convert_namespace_to_omegaconf(args)
    utils.import_user_module(config.common)
    utils.set_torch_seed(config.common.seed)
    task: Any = tasks.setup_task(config.task)
    model = task.build_model(config.model)
    trainer: Any = Trainer(config, task, model, task.build_criterion(config.criterion))
    epochs = trainer.get_train_iterator(epoch=1)
    trainer.begin_epoch(1)

    def batches() -> Any:
        while True:
            # the order depends on the seed alone: all models see the same batches
            yield from iterators.GroupedIterator(epochs.next_epoch_itr(), config.optimization.update_freq[0])

    stream = batches()
    return lambda: trainer.train_step(next(stream))


def clock(recipe: Recipe) -> Callable[[], float]:
    """Seconds: of the CPU for one thread, which neighbours disturb least; else of the clock, with the GPU's work."""
    import torch

    torch.set_num_threads(recipe.threads or torch.get_num_threads())
    if recipe.threads == 1 and recipe.gpus == 0:
        return time.process_time

    def seconds() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    return seconds


def ratios(updates: dict[str, Callable[[], None]], now: Callable[[], float]) -> dict[str, dict[str, float]]:
    """Of each name the first one's time over its own, the median of the rounds and their range, and its seconds."""
    names = list(updates)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(ROUNDS):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            before = now()
            updates[name]()
            seconds[name].append(now() - before)
    figures = {}
    for name in names:
        pairs = [base / own for base, own in zip(seconds[names[0]][WARM_UP:], seconds[name][WARM_UP:])]
        figures[name] = {
            "ratio": round(statistics.median(pairs), 3),
            "lowest": round(min(pairs), 3),
            "highest": round(max(pairs), 3),
            "seconds": round(statistics.median(seconds[name][WARM_UP:]), 4),
        }
    return figures


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
