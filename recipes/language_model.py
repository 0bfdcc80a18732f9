"""Language models: the corpora, and perplexity by word on the test set."""

import re
from pathlib import Path
from typing import Any, Dict, Optional

from .command import ROOT, UserError, dry_run, run, say
from .scoring import Evaluation, flag, print_scores

SCORES = """
    Language models: perplexity by word, exp(nats of the test set / (its words + its lines)), each line having an end
    of its own to predict, as in the literature on corpora of words; with subwords, a word's nats are the sum over its
    pieces. Rows are blocks of --tokens-per-sample as in training; --context-window gives each token more context.
    There is no significance test.
"""
RECIPE, TEST = "ptb_cpu", ""
METRIC, METRIC_NAME, BEST = "ppl", "perplexity", min


def score(run_of: Evaluation, context_window: Optional[int] = None, max_tokens: int = 4096) -> Dict[str, Any]:
    """The perplexity of the test set; nothing in a dry run."""
    data, recipe, training = run_of.data, run_of.recipe, run_of.training
    context = recipe.context_window if context_window is None else context_window
    block = int(flag(training, recipe, "tokens-per-sample") or 1024)
    if context >= block:
        raise UserError(f"--context-window {context}: must be less than --tokens-per-sample, here {block}")
    say("scoring the test set")
    argv = ["fairseq-eval-lm", data / "bin", "--user-dir", ROOT / "fairseq_synth", "--path", run_of.checkpoint]
    argv += ["--gen-subset", "test", "--sample-break-mode", flag(training, recipe, "sample-break-mode") or "none"]
    argv += ["--tokens-per-sample", block, "--context-window", context, "--max-tokens", max(max_tokens, block)]
    run([*argv, "--no-progress-bar"], log=run_of.out / "eval_lm.log")
    if dry_run():
        return {}
    scores = perplexity(data, (run_of.out / "eval_lm.log").read_text())
    scores["ppl"]["signature"] += f"|block:{block}|context:{context}"
    return scores


def report(data: Path, run_dir: Path) -> None:
    """Prints the scores of an evaluated run."""
    print_scores(run_dir, TEST)


def perplexity(data: Path, log: str) -> Dict[str, Any]:
    """The perplexity by word and by token, of what fairseq-eval-lm says of the test set."""
    counted = re.search(r"Evaluated ([\d,]+) tokens", log)
    result = re.search(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", log)
    if not counted or not result:
        raise UserError(f"fairseq-eval-lm printed no perplexity; see the evaluation of {data}")
    tokens, bits, by_token = int(counted[1].replace(",", "")), float(result[1]), float(result[2])
    words = word_count(data / "text" / "test.txt")
    wanted = words
    if (data / "sub").exists():
        wanted = word_count(data / "sub" / "test.txt")
    if tokens != wanted:
        raise UserError(
            f"fairseq-eval-lm scored {tokens} of {wanted} tokens of {data}: the others are in lines longer than "
            "--tokens-per-sample; train with a larger one, or with --sample-break-mode none"
        )
    by_word = by_token if words == tokens else round(2 ** (bits * tokens / words), 2)
    counts = f"words+lines:{words}|tokens:{tokens}"
    return {
        "ppl": {"score": by_word, "name": "PPL by word", "signature": counts},
        "token_ppl": {"score": by_token, "name": "PPL by token", "signature": counts},
    }


def word_count(path: Path) -> int:
    """The words of a text and its line ends, as fairseq counts them."""
    with open(path, encoding="utf-8") as lines:
        return sum(len(line.split()) + 1 for line in lines)
