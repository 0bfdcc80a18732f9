"""Text to text: summaries, replies, and answers of GLUE and SuperGLUE, written by a translation model and scored."""

import json
from pathlib import Path
from typing import Any, Dict, List, Optional

from . import metrics
from .command import UserError, dry_run, run, say, write
from .corpora import CORPORA
from .scoring import Evaluation, print_scores
from .translation import generation_flags, hypotheses, read_lines

SCORES = """
    Text to text: of summaries and replies ROUGE-1, 2 and L (F1, stemmed), BLEU-1 to 4 (sacreBLEU), METEOR and CIDEr
    (pycocoevalcap; METEOR needs Java) of detokenised text, times 100; of tasks with labels their suite's metrics, and
    how many answers are no label, which count as wrong. There is no significance test. Also test.hyp.target, what the
    model has written.
"""
TEST = ""
RECIPE = "pairs_cpu"
METRIC, METRIC_NAME, BEST = "rougeL", "ROUGE-L", max


def score(
    run_of: Evaluation, beam: Optional[int] = None, lenpen: Optional[float] = None, max_tokens: int = 4096
) -> Dict[str, Any]:
    """Writes for the test set and scores that by the kind of the corpus; nothing in a dry run."""
    data, out = run_of.data, run_of.out
    say("writing for the test set")
    argv = generation_flags(data, run_of.checkpoint, run_of.recipe, beam, lenpen, max_tokens)
    run(["fairseq-generate", *argv], log=out / "generate.log")
    if dry_run():
        return {}
    written = hypotheses((out / "generate.log").read_text(encoding="utf-8"), "D")
    wanted = read_lines(data / "test.target")
    if len(written) != len(wanted):
        raise UserError(f"{out}/generate.log: {len(written)} texts of {len(wanted)}; see its end")
    write(out / "test.hyp.target", "".join(f"{line}\n" for line in written))
    say("scoring")
    corpus = CORPORA.get(run_of.settings.get("corpus", ""))
    if not corpus or not corpus.scores:
        return metrics.of_free_text(written, wanted)
    beside = map(json.loads, read_lines(data / "test.answers"))
    answers: List[metrics.Answer] = [
        metrics.Answer(
            text.lower().strip(),
            # a score as it was before it was rounded
            known["answers"][0] if corpus.number else right.lower(),
            known["group"],
            known["answers"],
        )
        for text, right, known in zip(written, wanted, beside)
    ]
    labels = [word.lower() for word in dict.fromkeys(corpus.labels.values())]
    return metrics.of_answers(answers, labels, corpus.scores)


def report(data: Path, run_dir: Path) -> None:
    """Prints the scores of an evaluated run, and three of its texts."""
    print_scores(run_dir, TEST)
    say("three texts")
    files = (data / "test.source", run_dir / "test.hyp.target", data / "test.target")
    for source, output, wanted in list(zip(*map(read_lines, files)))[:3]:
        print(f"source:    {source[:200]}\noutput:    {output}\nreference: {wanted}")
