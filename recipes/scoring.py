"""What the evaluations of all tasks share: the run and its data, the checkpoint, and scores that appear all at once."""

import contextlib
import json
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, Iterator, NamedTuple, Optional

from .command import ROOT, UserError, dry_run, locked, read_settings, run, say, write
from .hyperparameters import RECIPES, Recipe
from .prepare import prepare_test
from .train import pair_of, set_threads


def read_data_settings(data: Path) -> Dict[str, str]:
    """The settings that a folder of data was prepared with."""
    if not (data / "bin" / "done").exists():
        raise UserError(f"{data}: not prepared, or not to its end; run scripts/prepare.sh first")
    return read_settings(data / "settings")


def read_run_settings(data: Path, run_dir: Path) -> Dict[str, str]:
    """The settings of a training on a folder of data; empty for a dry run, or a training by fairseq-train itself."""
    if not run_dir.is_dir() and not dry_run():
        raise UserError(f"{run_dir}: no such folder; train with scripts/train.sh")
    settings = read_settings(run_dir / "settings")
    if settings.get("data", str(data.resolve())) != str(data.resolve()):
        raise UserError(
            f"{run_dir}: was trained on {settings['data']}, not on {data}; if that folder was moved, mend its name in "
            f"{run_dir}/settings"
        )
    pair = pair_of(read_settings(data / "settings"))
    if pair and settings.get("pair", pair) != pair:
        raise UserError(f"{run_dir}: was trained for {settings['pair']}, and {data} is {pair}")
    return settings


def flag(settings: Dict[str, str], recipe: Recipe, name: str) -> Optional[str]:
    """The value of fairseq-train's flag in a training: as its own flags after ``--`` say, else its recipe."""
    own = re.findall(rf"(?:^| )--{name}[= ](\S+)", settings.get("flags", ""))
    return own[-1] if own else recipe.flags.get(name)


class Evaluation(NamedTuple):
    """What the score of a task is told."""

    data: Path
    settings: Dict[str, str]  # of the data
    training: Dict[str, str]  # settings of the training
    recipe: Recipe
    checkpoint: Path
    out: Path  # for what is written


def evaluate(
    task: ModuleType,
    data: Path,
    run_dir: Path,
    recipe: Optional[Recipe] = None,
    average: Optional[int] = None,
    baseline: Optional[Path] = None,
    test: Optional[Path] = None,
    **options: Any,
) -> None:
    """evaluate.sh. What is not given comes from the recipe, by default the one in the run's settings.

    Args:
        task: the module of the data's task.
        baseline: an evaluated run, for the task's significance test.
        test: a folder with another test set; its scores have a folder of their own, ``tests/NAME`` of the run.
        options: of the task's `score`.
    """
    settings = read_data_settings(data)
    training = read_run_settings(data, run_dir)
    recipe = recipe or RECIPES[training.get("recipe", task.RECIPE)]
    set_threads(recipe.threads)
    where = Path()
    if test:
        data = prepare_test(test, data)
        where = Path("tests", data.name)
    with atomic_evaluation(run_dir / where) as out:
        path = checkpoint(run_dir, out, recipe.average if average is None else average)
        scores = task.score(Evaluation(data, settings, training, recipe, path, out), **options)
        if dry_run():
            return
        write(out / "scores.json", json.dumps(scores, indent=1) + "\n")
        if baseline:
            write(out / "bootstrap.json", json.dumps(task.compare(data, out, baseline / where), indent=1) + "\n")
        if test and path.parent == out:
            path.unlink()  # the run has it already, or makes it when its own test set is scored
    task.report(data, run_dir / where)


@contextlib.contextmanager
def atomic_evaluation(run_dir: Path) -> Iterator[Path]:
    """A folder for what an evaluation writes. It goes to `run_dir` when the block ends without an error.

    An earlier evaluation is kept until then.
    """
    out = run_dir / "evaluation.part"
    with locked(run_dir / ".evaluation.lock"):
        if dry_run():
            yield out
            return
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        try:
            yield out
        except UserError:
            if not any(out.iterdir()):
                out.rmdir()
            raise
        (run_dir / "bootstrap.json").unlink(missing_ok=True)  # of an evaluation with a baseline before one without
        (run_dir / "scores.json").unlink(missing_ok=True)
        for file in sorted(out.iterdir(), key=lambda file: file.name == "scores.json"):  # which says that all is there
            file.replace(run_dir / file.name)
        out.rmdir()


def print_scores(run_dir: Path, test: str, labels: Optional[Dict[str, str]] = None) -> None:
    """Prints the figures of an evaluated run, and how it compares with a baseline.

    Args:
        test: the name of the significance test.
        labels: {figure: what to call it}; default: its own name.
    """
    for key, figure in json.loads((run_dir / "scores.json").read_text()).items():
        name = labels[key] if labels else figure["name"]
        if figure["score"] is None:
            print(f"{name} {figure['signature']}")
            continue
        print(f"{name} {figure['score']:.2f}   {figure['signature']} {figure.get('test_set', '')}".rstrip())
    if (run_dir / "bootstrap.json").exists():
        compared = json.loads((run_dir / "bootstrap.json").read_text())
        line = "baseline {baseline:.2f}, this run {score:.2f}, p = {p_value:.4f}"
        print(line.format(**compared), f"({test})")


def checkpoint(run_dir: Path, out: Path, average: int) -> Path:
    """The checkpoint to evaluate: the last `average` ones averaged in `out`, or the best by validation for 0."""
    if not average:
        best = run_dir / "checkpoint_best.pt"
        if not best.exists() and not dry_run():
            raise UserError(f"{best}: no such file; train to the first validation, or choose another --average")
        return best
    say(f"averaging the last {average} checkpoints")
    names = [path.name for path in run_dir.glob("checkpoint*")]
    by_updates = any(re.fullmatch(r"checkpoint_\d+_\d+\.pt", name) for name in names)
    kind = r"checkpoint_\d+_\d+\.pt" if by_updates else r"checkpoint\d+\.pt"
    there = sum(bool(re.fullmatch(kind, name)) for name in names)
    if there < average and not dry_run():
        hint = "" if there else ", for the best one,"
        raise UserError(
            f"{run_dir}: has {there} of the {average} checkpoints to average; train on, or{hint} give --average {there}"
        )
    argv = ["python", ROOT / "scripts" / "average_checkpoints.py", "--inputs", run_dir]
    argv += ["--num-update-checkpoints" if by_updates else "--num-epoch-checkpoints", average]
    run([*argv, "--output", out / "checkpoint_avg.pt"], log=out / "average.log")
    return out / "checkpoint_avg.pt"
