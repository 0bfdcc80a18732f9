"""Updates a second of a table's models, relative to its baseline's.

    python benchmarks/timing.py TABLE [--dataset NAMES] [--from DIR] [--out DIR]

All models are trained in turns, in one process, on the table's own data, which are prepared if they are missing. Each
column of the table leaves a file results/TABLE/speed/NAME.json. DRY_RUN=1 only shows the commands.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rounds import Comparison, Function, Stopwatch, compare_in_turns

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pages.notes import baseline_name  # noqa: E402
from recipes import provenance, train  # noqa: E402
from recipes.catalog import RECIPES, TABLES, Cell, Recipe, Table  # noqa: E402
from recipes.reproduce import prepare_cell  # noqa: E402
from recipes.steps import Parser, UserError, dry_run, existing, say  # noqa: E402

WARM_UP = 3  # rounds of one update of each model that are not counted
ROUNDS = 60  # that are counted. With 15, two calls differed by up to 0.2


def main() -> None:
    """Times the models of a table, column by column."""
    parser = Parser("benchmarks/timing.py", __doc__)
    parser.add_argument("table", choices=TABLES, metavar="TABLE")
    parser.add_argument("--dataset", type=str.split, default=[], metavar="NAMES", help="columns (default: all)")
    parser.add_argument("--from", dest="source", type=existing, metavar="DIR", help="a folder that has the corpora")
    parser.add_argument("--out", type=Path, default=ROOT, metavar="DIR", help="data (default: the project's folder)")
    args = parser.parse_args()
    for cells in list_columns(TABLES[args.table], args.dataset):
        settings = prepare_cell(cells[0], args.out, args.source)  # all runs of a column have the same data
        if not dry_run():
            time_column(cells, settings, args.out)


def list_columns(table: Table, names: list[str]) -> list[list[Cell]]:
    """Returns the runs of a table that are timed, column by column.

    A cell of the table is a run: a model, trained on the data of a column.

    Args:
        table: the table.
        names: the columns to time; empty for all.

    Returns:
        for each column a run of each model, the baseline first. All have the table's first seed.
    """
    other_models = [model for model in table.models() if model != table.baseline]
    first_seed = table.seeds[0]
    cells = table.cells(names, [table.baseline, *other_models], [first_seed])  # in the order of these models
    cells_by_column: dict[str, list[Cell]] = {}
    for cell in cells:
        cells_by_column.setdefault(cell.column.name, []).append(cell)
    return list(cells_by_column.values())


def time_column(cells: list[Cell], settings: dict[str, Any], out: Path) -> None:
    """Times updates of a column's models in turns, prints their speeds and writes a record of them to results/.

    Args:
        cells: a run of each model, the baseline first.
        settings: how the data were prepared.
        out: the folder of data and runs.
    """
    baseline = cells[0]
    table = baseline.table
    column = baseline.column
    recipe = RECIPES[column.recipe]
    say(f"{column.name}: one update of each model in turns, {WARM_UP + ROUNDS} rounds")
    update_functions = {}
    for cell in cells:
        arguments = list_training_arguments(cell, settings, out)
        update_functions[cell.model] = make_update_function(arguments)
    if recipe.threads:
        set_number_of_threads(recipe.threads)
    comparisons = compare_in_turns(
        update_functions,
        baseline=baseline.model,
        stopwatch=choose_stopwatch(recipe),
        rounds=ROUNDS,
        warm_up=WARM_UP,
    )
    for model, comparison in comparisons.items():
        print(f"{model}: {comparison.ratio:.2f} (rounds from {comparison.lowest:.2f} to {comparison.highest:.2f})")
    folder = ROOT / "results" / table.name / "speed"
    provenance.write_record(folder / f"{column.name}.json", make_record(baseline, comparisons))


def make_record(baseline: Cell, comparisons: dict[str, Comparison]) -> dict[str, Any]:
    """Returns the record of the speeds of a column's models, which is written to results/.

    For example::

        {
            "benchmark": "updates a second on IMDb, in turns in one process",
            "unit": "over the Transformer's",
            "command": "python benchmarks/timing.py imdb_cpu --dataset imdb",
            "figures": {"random": {"ratio": 1.15, "lowest": 1.1, "highest": 1.2, "seconds": 0.31}, ...},
            ... (the machine and the versions of the programs)
        }

    Args:
        baseline: the baseline's run.
        comparisons: {model: its speed relative to the baseline's}.
    """
    column = baseline.column
    recipe = RECIPES[column.recipe]
    origin = provenance.describe_environment(gpus=count_gpus(recipe), threads=recipe.threads or 0)
    return {
        "benchmark": f"updates a second on {column.heading}, in turns in one process",
        "unit": f"over {baseline_name(baseline.table)}'s",
        "command": f"python benchmarks/timing.py {baseline.table.name} --dataset {column.name}",
        "figures": {model: round_comparison(comparison) for model, comparison in comparisons.items()},
        **origin,
    }


def round_comparison(comparison: Comparison) -> dict[str, float]:
    """Returns a comparison with as many digits as a record keeps: three, and four of the seconds."""
    return {
        "ratio": round(comparison.ratio, 3),
        "lowest": round(comparison.lowest, 3),
        "highest": round(comparison.highest, 3),
        "seconds": round(comparison.seconds, 4),
    }


def count_gpus(recipe: Recipe) -> int:
    """Returns on how many GPUs a recipe is timed: one, or none if the recipe says that it is for the CPU."""
    return 1 if recipe.gpus is None else 0


def list_training_arguments(cell: Cell, settings: dict[str, Any], out: Path) -> list[str]:
    """Returns the arguments with which fairseq-train trains a model: the folder of the data, and then flags.

    The flags say that nothing is saved or validated.

    Args:
        cell: the model's run.
        settings: how the data were prepared.
        out: the folder of data and runs.
    """
    run = cell.run(out)
    machine = train.Machine(gpus=count_gpus(run.recipe)).for_recipe(run.recipe)
    command = train.training_command(run, settings, machine, ["--no-save", "--disable-validation", *run.flags])
    # The words before this folder start the program: fairseq-train, or torchrun with its own flags.
    folder_of_binarised_data = str(run.data / "bin")
    position_of_first_argument = command.index(folder_of_binarised_data)
    return command[position_of_first_argument:]


def make_update_function(arguments: Sequence[str]) -> Function:
    """Makes a model and its trainer as fairseq-train does, and returns a function that updates the model once.

    The steps stand in the order of fairseq-train, as each of them needs the steps before it.

    Args:
        arguments: the arguments of fairseq-train.
    """
    from fairseq import options, tasks, utils
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.trainer import Trainer

    from fairseq_synth import register

    register()  # The parser knows only the architectures that are registered when it is made.
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, input_args=list(arguments))
    config: Any = convert_namespace_to_omegaconf(args)
    utils.import_user_module(config.common)
    utils.set_torch_seed(config.common.seed)
    task: Any = tasks.setup_task(config.task)
    model = task.build_model(config.model)
    trainer: Any = Trainer(config, task, model, task.build_criterion(config.criterion))
    batches_per_update = config.optimization.update_freq[0]  # a list of one number for each epoch; all are the same
    lists_of_batches = iterate_updates(trainer, batches_per_update)

    def update() -> None:
        """Updates the model once, on the next batches."""
        batches = next(lists_of_batches)
        trainer.train_step(batches)

    return update


def iterate_updates(trainer: Any, batches_per_update: int) -> Iterator[Any]:
    """Yields the list of batches of each update, without end: epoch after epoch, in the same order for all models."""
    from fairseq.data import iterators

    epochs = trainer.get_train_iterator(epoch=1)
    trainer.begin_epoch(1)
    while True:
        yield from iterators.GroupedIterator(epochs.next_epoch_itr(), batches_per_update)


def set_number_of_threads(threads: int) -> None:
    """Sets the number of CPU threads that torch uses."""
    import torch

    torch.set_num_threads(threads)


def choose_stopwatch(recipe: Recipe) -> Stopwatch:
    """Returns a function that times another function.

    For a recipe that runs on a single CPU thread it measures CPU time, which other processes disturb least. For others
    it measures the time of the clock.
    """
    is_one_thread = recipe.threads == 1 and recipe.gpus == 0
    read_clock = time.process_time if is_one_thread else read_clock_after_gpu

    def time_function(function: Function) -> float:
        """Calls a function and returns the seconds that it took."""
        start = read_clock()
        function()
        return read_clock() - start

    return time_function


def read_clock_after_gpu() -> float:
    """Waits until the GPU, if there is one, has finished its work, and returns the seconds of the clock."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
