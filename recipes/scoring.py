"""What a task is and how a run of it is evaluated: the checkpoint, and scores that appear all at once."""

import contextlib
import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any, ClassVar, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Type

from .command import ROOT, UserError, dry_run, locked, read_settings, run, say, write
from .corpora import digest
from .hyperparameters import RECIPES, Recipe
from .prepare import prepare_test
from .provenance import commit
from .train import check_data, pair_of, set_threads

Scores = Dict[str, Dict[str, Any]]  # {figure: what `figure` gives}, as in scores.json


def figure(name: str, score: Optional[float], signature: str, digits: int = 2) -> Dict[str, Any]:
    """A figure and how it was counted; a score of None was not counted."""
    return {"score": None if score is None else round(score, digits), "name": name, "signature": signature}


def read_lines(path: Path) -> List[str]:
    """The lines of a file, ended by line feeds alone; none if there is no file."""
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []


@dataclasses.dataclass
class Task:
    """A kind of task, whose docstring is for --help. An instance is the evaluation of one run."""

    RECIPE: ClassVar[str]  # of a run that names none
    METRIC: ClassVar[str]  # the figure that is shown in tables
    METRIC_NAME: ClassVar[str]
    BEST: ClassVar[Any] = max  # of several runs
    DIGITS: ClassVar[int] = 2  # decimals in tables
    TEST: ClassVar[str] = ""  # the significance test, if there is one
    OPTIONS: ClassVar[Sequence[str]] = ()  # of evaluate.sh, beside those of every task
    LABELS: ClassVar[Mapping[str, str]] = {}  # {figure: what it is called in print}, if not by its name
    LOG: ClassVar[str]  # file for the output of `command`

    data: Path
    settings: Mapping[str, str]  # of the data
    recipe: Recipe  # with the training's own flags after ``--``
    checkpoint: Path
    out: Path  # for what is written
    max_tokens: int = 4096

    def command(self) -> List[object]:
        """What runs the model on the test set."""
        raise NotImplementedError

    def figures(self, log: str) -> Scores:
        """The figures, from the output of `command`."""
        raise NotImplementedError

    @classmethod
    def files(cls, data: Path, run_dir: Path) -> Sequence[Path]:
        """The source of the test set, what a run has written for each line of it, and what was to be written."""
        return ()

    @classmethod
    def test(cls, data: Path, wanted: List[str], before: List[str], after: List[str]) -> Dict[str, Any]:
        """The significance test of two outputs: baseline, score, p_value, signature; metric, where it can vary."""
        raise NotImplementedError

    def score(self) -> Scores:
        """What scores.json has; nothing in a dry run."""
        say("scoring the test set")
        log = self.out / self.LOG
        run(self.command(), log=log)
        return {} if dry_run() else self.figures(log.read_text(encoding="utf-8"))

    def find(self, pattern: str, log: str) -> "re.Match[str]":
        """Where the log has a loss."""
        found = re.search(pattern, log)
        if not found:
            raise UserError(f"{self.out / self.LOG}: has no loss of the test set; see its end")
        return found

    @classmethod
    def written(cls, data: Path, run_dir: Path, flag: str = "") -> Tuple[List[str], List[str]]:
        """What a run has written for the test set, and what was wanted. `flag`: the option with this run."""
        _, *files = cls.files(data, run_dir)
        output, wanted = map(read_lines, files)
        if len(output) != len(wanted):
            what = f"{flag}{run_dir}: not evaluated yet, or not on these data"
            raise UserError(f"{what}; evaluate this run on the same test set first")
        return output, wanted

    @classmethod
    def compare(cls, data: Path, run_dir: Path, baseline: Path) -> Dict[str, Any]:
        """The significance test of a run against a baseline, both evaluated on the same data."""
        (before, _), (after, wanted) = cls.written(data, baseline, "--baseline "), cls.written(data, run_dir)
        return cls.test(data, wanted, before, after)

    @classmethod
    def report(cls, data: Path, run_dir: Path) -> None:
        """Prints the scores of an evaluated run, how it compares with a baseline, and three examples."""
        for key, found in json.loads((run_dir / "scores.json").read_text()).items():
            score = "" if found["score"] is None else f"{found['score']:.{cls.DIGITS}f}   "
            name, test_set = cls.LABELS.get(key, found["name"]), found.get("test_set", "")
            print(f"{name} {score}{found['signature']} {test_set}".rstrip())
        if (run_dir / "significance.json").exists():
            compared = json.loads((run_dir / "significance.json").read_text())
            line = "baseline {baseline:.2f}, this run {score:.2f}, p = {p_value:.4f}"
            of = f" of {compared['metric']}" if "metric" in compared else ""
            print(line.format(**compared), f"({cls.TEST}{of})")
        files = cls.files(data, run_dir)
        if files:
            say("three examples")
        for source, output, wanted in itertools.islice(zip(*map(read_lines, files)), 3):
            print(f"source:    {source[:300]}\noutput:    {output}\nreference: {wanted}")


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
    check_data(run_dir, data)
    pair = pair_of(read_settings(data / "settings"))
    if pair and settings.get("pair", pair) != pair:
        raise UserError(f"{run_dir}: was trained for {settings['pair']}, and {data} is {pair}")
    return settings


def recipe_of(task: Type[Task], run_dir: Path, training: Mapping[str, str]) -> Recipe:
    """The recipe in the settings of a training, else the task's own."""
    name = training.get("recipe", task.RECIPE)
    if name not in RECIPES:
        raise UserError(f"{run_dir / 'settings'}: there is no recipe {name}; name one of recipes/recipes.yaml")
    return RECIPES[name]


def evaluate(
    task: Type[Task],
    data: Path,
    run_dir: Path,
    recipe: Optional[Recipe] = None,
    baseline: Optional[Path] = None,
    test: Optional[Path] = None,
    max_tokens: int = 4096,
    **changes: Any,
) -> None:
    """evaluate.sh. The scores of another `test` set have a folder of their own, ``tests/NAME`` of the run.

    `recipe`: by default the one in the run's settings; `changes` are to it.
    """
    settings, training = read_data_settings(data), read_run_settings(data, run_dir)
    recipe = recipe or recipe_of(task, run_dir, training)
    own = re.findall(r"--([\w-]+)[= ](?!--)(\S+)", training.get("flags", ""))
    recipe = dataclasses.replace(recipe, flags={**recipe.flags, **dict(own)}, **changes)
    set_threads(recipe.threads)
    if baseline and not baseline.is_dir():
        raise UserError(f"--baseline {baseline}: no such folder")
    where = Path()
    if test:
        data = prepare_test(test, data)
        where = Path("tests", data.name)
    if baseline and not dry_run():
        task.written(data, baseline / where, "--baseline ")
        check_references(task, data, baseline / where)
    with atomic_evaluation(run_dir / where) as out:
        path = checkpoint(run_dir, out, recipe.average)
        scores = task(data, settings, recipe, path, out, max_tokens).score()
        if dry_run():
            return
        write(out / "scores.json", json.dumps(scores, indent=1) + "\n")
        evaluation = {**evaluation_options(recipe), "commit": commit(), "references": references(task, data, out)}
        write(out / "evaluation.json", json.dumps(evaluation, indent=1) + "\n")
        if baseline:
            write(out / "significance.json", json.dumps(task.compare(data, out, baseline / where), indent=1) + "\n")
        if test and path.parent == out:
            path.unlink()  # the run has it already, or makes it when its own test set is scored
    task.report(data, run_dir / where)
    if baseline:
        others = other_options(baseline / where, recipe)
        if others:
            told = ", ".join(f"{name} {value} and not {ours}" for name, (value, ours) in others.items())
            print(f"note: the baseline was evaluated with {told}")


def evaluation_options(recipe: Recipe) -> Dict[str, Any]:
    """The options on which the figures of a trained model depend; kept in evaluation.json."""
    return {name: getattr(recipe, name) for name in ("average", "beam", "lenpen", "context_window")}


def other_options(run_dir: Path, recipe: Recipe) -> Dict[str, Tuple[Any, Any]]:
    """{option: its value, and the recipe's}, where a run was evaluated by others; none where that was not kept."""
    found = read_evaluation(run_dir)
    return {
        name: (found[name], wanted)
        for name, wanted in evaluation_options(recipe).items()
        if found.get(name, wanted) != wanted
    }


def read_evaluation(run_dir: Path) -> Dict[str, Any]:
    """What evaluation.json has; nothing where there is none."""
    file = run_dir / "evaluation.json"
    return json.loads(file.read_text()) if file.exists() else {}


def references(task: Type[Task], data: Path, run_dir: Path) -> str:
    """A digest of what was to be written for the test set; nothing for a task that writes no text."""
    files = task.files(data, run_dir)
    return digest(files[-1]) if files else ""


def check_references(task: Type[Task], data: Path, baseline: Path) -> None:
    """Refuses a baseline that was not evaluated on the test set of `data`, or whose evaluation does not say so."""
    if read_evaluation(baseline).get("references") != references(task, data, baseline):
        raise UserError(
            f"--baseline {baseline}: was evaluated on another test set than that of {data}, or by an earlier version; "
            "evaluate it again"
        )


@contextlib.contextmanager
def atomic_evaluation(run_dir: Path) -> Iterator[Path]:
    """A folder for what an evaluation writes, which goes to `run_dir` when the block ends without an error."""
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
        # of an earlier evaluation, maybe with a baseline or an average
        for name in ("significance.json", "checkpoint_avg.pt", "scores.json"):
            (run_dir / name).unlink(missing_ok=True)
        for file in sorted(out.iterdir(), key=lambda file: file.name == "scores.json"):  # which says that all is there
            file.replace(run_dir / file.name)
        out.rmdir()


def checkpoint(run_dir: Path, out: Path, average: int) -> Path:
    """The checkpoint to evaluate: the last `average` ones averaged in `out`, or the best by validation for 0."""
    if not average:
        best = run_dir / "checkpoint_best.pt"
        if not best.exists() and not dry_run():
            raise UserError(f"{best}: no such file; train to the first validation, or choose another --average")
        return best
    say(f"averaging the last {average} checkpoints")
    by_updates = list(run_dir.glob("checkpoint_[0-9]*_[0-9]*.pt"))
    there = len(by_updates or list(run_dir.glob("checkpoint[0-9]*.pt")))
    if there < average and not dry_run():
        raise UserError(
            f"{run_dir}: has {there} of the {average} checkpoints to average; train on, or give --average {there}"
            + ("" if there else " for the best one")
        )
    argv = ["python", ROOT / "scripts" / "average_checkpoints.py", "--inputs", run_dir]
    argv += ["--num-update-checkpoints" if by_updates else "--num-epoch-checkpoints", average]
    run([*argv, "--output", out / "checkpoint_avg.pt"], log=out / "average.log")
    return out / "checkpoint_avg.pt"
