"""Denoising: span corruption of any text, and the log perplexity of what was taken out of a held-out one."""

import math
import re
from pathlib import Path
from typing import Any, Dict

from .command import ROOT, UserError, dry_run, run, say
from .scoring import Evaluation, print_scores

SCORES = """
    Denoising: log perplexity of the test set's targets, nats for each token, marks and the end included
    (fairseq-validate). Lower is better. There is no significance test.
"""
TEST = ""
RECIPE = "denoising_cpu"
METRIC, METRIC_NAME, BEST = "log_ppl", "log perplexity", min
DIGITS = 3


def score(run_of: Evaluation, max_tokens: int = 4096) -> Dict[str, Any]:
    """The log perplexity of the test set; nothing in a dry run."""
    say("scoring the test set")
    log = run_of.out / "validate.log"
    argv = ["fairseq-validate", run_of.data / "bin", "--user-dir", ROOT / "fairseq_synth", "--path", run_of.checkpoint]
    argv += ["--task", "translation", "--source-lang", "source", "--target-lang", "target"]
    run([*argv, "--valid-subset", "test", "--max-tokens", max_tokens], log=log)
    return {} if dry_run() else log_perplexity(log.read_text(encoding="utf-8"), log)


def report(data: Path, run_dir: Path) -> None:
    """Prints the scores of an evaluated run."""
    print_scores(run_dir, TEST)


def log_perplexity(log: str, file: Path) -> Dict[str, Any]:
    """The log perplexity of what fairseq-validate says, in nats.

    Raises:
        UserError: it says no loss.
    """
    found = re.findall(r"\| test .*?\bnll_loss ([\d.]+)", log) or re.findall(r"\| test .*?\bloss ([\d.]+)", log)
    if not found:
        raise UserError(f"{file}: has no loss of the test set; see its end")
    nats = float(found[-1]) * math.log(2)  # fairseq's are bits
    return {"log_ppl": {"score": round(nats, 3), "name": METRIC_NAME, "signature": "nats by target token"}}
