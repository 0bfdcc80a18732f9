"""Steps a second of a table's models, as ratios to its baseline: reproduce.sh TABLE --time."""

import statistics
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from recipes.command import ROOT, dry_run, say
from recipes.hyperparameters import RECIPES, Recipe
from recipes.render import baseline_name
from recipes.tables import Dataset, Table

from recipes import provenance, train

ROUNDS = 63  # of one update of each model; the first three are warm-up. With 15, two calls differed by up to 0.2
WARM_UP = 3


def result(table: Table, dataset: Dataset) -> Path:
    """Where the figures of a column are kept."""
    return ROOT / "results" / table.name / "speed" / f"{dataset.name}.json"


def time_table(table: Table, datasets: Optional[Sequence[str]], out: Path, source: Optional[Path]) -> None:
    """Times updates of the models of a table on its own data, and writes a record for each column.

    Args:
        datasets: names; None for all.
        out: the folder of data and runs.
        source: the folder of --from.
    """
    for dataset in table.datasets:
        if datasets is not None and dataset.name not in datasets:
            continue
        cell = next(table.cells([dataset.name]))
        data = cell.data(out)
        cell.prepare(out, source)
        recipe = RECIPES[dataset.recipe]
        if dry_run():
            continue
        names = list(dict.fromkeys([table.baseline, *table.models()]))
        say(f"{dataset.name}: one update of each model in turns, {ROUNDS} rounds")
        updates = {}
        for name in names:
            model, flags = table.training(name)
            updates[name] = update(command(recipe, model, dataset, data, flags))
        figures = ratios(updates, clock(recipe))
        for name, figure in figures.items():
            print(f"{name}: {figure['ratio']:.2f} (rounds from {figure['lowest']:.2f} to {figure['highest']:.2f})")
        record = {
            "benchmark": f"updates a second on {dataset.heading}, in turns in one process",
            "unit": f"over {baseline_name(table)}'s",
            "command": f"scripts/reproduce.sh {table.name} --dataset {dataset.name} --time",
            "figures": figures,
            **provenance.here("cpu" if recipe.gpus == 0 else "", recipe.threads),
        }
        provenance.write_record(result(table, dataset), record)


def command(recipe: Recipe, model: str, dataset: Dataset, data: Path, flags: Sequence[str] = ()) -> List[str]:
    """The flags of fairseq-train of a cell, from the data on; the first seed, and nothing saved."""
    parser = train.make_parser()
    args = parser.parse_args([recipe.architecture(model), dataset.name, "--recipe", dataset.recipe])
    args.gpus = recipe.gpus if recipe.gpus is not None else min(1, train.gpus_here()[0])
    train.set_threads(recipe.threads)
    words = train.training_command(args, recipe, data, Path("unused"), ["--no-save", "--disable-validation", *flags])
    return words[words.index(str(data / "bin")) :]


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


def ratios(updates: Dict[str, Callable[[], None]], now: Callable[[], float]) -> Dict[str, Dict[str, float]]:
    """Of each name the first one's time over its own, the median of the rounds and their range, and its seconds."""
    names = list(updates)
    seconds: Dict[str, List[float]] = {name: [] for name in names}
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
