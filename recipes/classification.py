"""Text classification: accuracy on the test set, and McNemar's test against a baseline."""

from pathlib import Path
from typing import Any, Dict, List

from .command import ROOT, UserError, dry_run, run, say
from .scoring import Evaluation, print_scores

SCORES = """
    Classification: accuracy in per cent, by scripts/classify.py. --baseline: McNemar's exact test. Also
    test.predicted, a label for each line of the test set.
"""
RECIPE = "agnews_cpu"  # of a run that names none
TEST = "McNemar's exact test"  # what `compare` does
METRIC, METRIC_NAME, BEST = "accuracy", "accuracy", max


def score(run_of: Evaluation, max_tokens: int = 4096) -> Dict[str, Any]:
    """The accuracy on the test set, whose labels are written too; nothing in a dry run."""
    say("classifying the test set")
    predicted = run_of.out / "test.predicted"
    argv = ["python", ROOT / "scripts" / "classify.py", run_of.data / "bin", "--path", run_of.checkpoint]
    run([*argv, "--max-tokens", max_tokens, "--output", predicted], log=run_of.out / "classify.log")
    return {} if dry_run() else accuracy(run_of.data, predicted)


def correct(data: Path, predicted: Path) -> List[bool]:
    """Whether each example of the test set has the label predicted."""
    labels = (data / "text" / "test.label").read_text(encoding="utf-8").splitlines()
    found = predicted.read_text(encoding="utf-8").splitlines() if predicted.exists() else []
    if len(found) != len(labels):
        raise UserError(f"{predicted.parent}: not evaluated yet, or not on these data")
    return [a == b for a, b in zip(found, labels)]


def accuracy(data: Path, predicted: Path) -> Dict[str, Any]:
    """The accuracy of predictions on the test set, in per cent."""
    right = correct(data, predicted)
    score = round(100 * sum(right) / len(right), 2)
    return {"accuracy": {"score": score, "name": "accuracy", "signature": f"examples:{len(right)}"}}


def compare(data: Path, run_dir: Path, baseline: Path) -> Dict[str, Any]:
    """McNemar's exact test of a run's accuracy against a baseline's, both evaluated on the same data.

    Null hypothesis: where only one of the two is right, each is with equal probability.
    """
    from scipy.stats import binomtest

    before, after = (correct(data, folder / "test.predicted") for folder in (baseline, run_dir))
    won = sum(b and not a for a, b in zip(before, after))
    lost = sum(a and not b for a, b in zip(before, after))
    return {
        "baseline": round(100 * sum(before) / len(before), 2),
        "score": round(100 * sum(after) / len(after), 2),
        "p_value": float(binomtest(won, won + lost).pvalue) if won + lost else 1.0,
        "signature": f"McNemar, exact|won:{won}|lost:{lost}",
    }


def report(data: Path, run_dir: Path) -> None:
    """Prints the scores of an evaluated run, and three of its predictions."""
    print_scores(run_dir, TEST)
    say("three predictions")
    files = (run_dir / "test.predicted", data / "text" / "test.label", data / "text" / "test.txt")
    for found, label, text in list(zip(*(path.read_text(encoding="utf-8").splitlines() for path in files)))[:3]:
        print(f"predicted: {found}, label: {label}, text: {text[:80]}")
