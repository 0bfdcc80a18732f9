"""Scores a trained model on the test set of its task.

  scripts/evaluate.sh DATA_DIR RUN_DIR [options]

  DATA_DIR is what prepare.sh made, RUN_DIR the --save-dir of the training. --average, --beam, --lenpen and
  --context-window are by default the recipe's. Averaged are the checkpoints of --save-interval-updates or, where there
  are none, those of the epochs. --test has test.{{SRC,TGT}}, which are prepared as DATA_DIR was.

Writes scores.json to RUN_DIR once all is there, with the figures and how they were counted. The tasks that name
--baseline below have a significance test:

{tasks}
"""

import argparse
import inspect
import json
import math
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Type

from . import metrics
from .command import ROOT, Parser, UserError, folder, integer, read_settings
from .corpora import CORPORA, Corpus
from .scoring import Scores, Task, evaluate, figure, read_data_settings, read_lines
from .translation import Translation


class LanguageModel(Task):
    """
    Language models: perplexity by word, exp(nats of the test set / (its words + its lines)), as each line has an end
    to predict; with subwords, a word's nats are the sum over its pieces. Rows are blocks of --tokens-per-sample as in
    training; --context-window gives each token more context.
    """

    RECIPE, LOG = "ptb_cpu", "eval_lm.log"
    METRIC, METRIC_NAME, BEST = "ppl", "perplexity", min
    OPTIONS = ("context_window",)

    @property
    def block(self) -> int:
        return int(self.recipe.flags.get("tokens-per-sample") or 1024)

    def command(self) -> List[object]:
        block, context = self.block, self.recipe.context_window
        if context >= block:
            raise UserError(f"--context-window {context}: must be less than --tokens-per-sample, here {block}")
        argv = ["fairseq-eval-lm", self.data / "bin", "--user-dir", ROOT / "fairseq_synth", "--path", self.checkpoint]
        argv += ["--gen-subset", "test", "--sample-break-mode", self.recipe.flags.get("sample-break-mode") or "none"]
        argv += ["--tokens-per-sample", block, "--context-window", context]
        return [*argv, "--max-tokens", max(self.max_tokens, block), "--no-progress-bar"]

    def figures(self, log: str) -> Scores:
        pattern = r"(?s)Evaluated ([\d,]+) tokens.*Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)"
        counted, bits, by_token = self.find(pattern, log).groups()
        tokens, words = int(counted.replace(",", "")), word_count(self.data / "text" / "test.txt")
        pieces = self.data / "sub" / "test.txt"
        wanted = word_count(pieces) if pieces.exists() else words
        if tokens != wanted:
            raise UserError(
                f"fairseq-eval-lm scored {tokens} of {wanted} tokens of {self.data}: the others are in lines longer "
                "than --tokens-per-sample; train with a larger one, or with --sample-break-mode none"
            )
        by_word = float(by_token) if words == tokens else 2 ** (float(bits) * tokens / words)
        counts = f"words+lines:{words}|tokens:{tokens}"
        rows = f"block:{self.block}|context:{self.recipe.context_window}"
        return {
            "ppl": figure("PPL by word", by_word, f"{counts}|{rows}"),
            "token_ppl": figure("PPL by token", float(by_token), counts),
        }


def word_count(path: Path) -> int:
    """The words of a text and its line ends, as fairseq counts them."""
    with open(path, encoding="utf-8") as lines:
        return sum(len(line.split()) + 1 for line in lines)


class Classification(Task):
    """
    Classification: accuracy in per cent, by scripts/classify.py. --baseline: McNemar's exact test. Also
    test.predicted, a label for each line of the test set.
    """

    RECIPE, LOG = "agnews_cpu", "classify.log"
    METRIC, METRIC_NAME = "accuracy", "accuracy"
    OPTIONS, TEST = ("baseline",), "McNemar's exact test"

    @classmethod
    def files(cls, data: Path, run_dir: Path) -> Sequence[Path]:
        return data / "text" / "test.txt", run_dir / "test.predicted", data / "text" / "test.label"

    def command(self) -> List[object]:
        argv = ["python", ROOT / "scripts" / "classify.py", self.data / "bin", "--path", self.checkpoint]
        return [*argv, "--max-tokens", self.max_tokens, "--output", self.out / "test.predicted"]

    def figures(self, log: str) -> Scores:
        found, labels = self.written(self.data, self.out)
        return {"accuracy": figure("accuracy", accuracy(found, labels), f"examples:{len(labels)}")}

    @classmethod
    def test(cls, data: Path, wanted: List[str], before: List[str], after: List[str]) -> Dict[str, Any]:
        """Null hypothesis: where only one of the two is right, each is with equal probability."""
        from scipy.stats import binomtest

        won = sum(old != label == new for old, new, label in zip(before, after, wanted))
        lost = sum(old == label != new for old, new, label in zip(before, after, wanted))
        return {
            "baseline": accuracy(before, wanted),
            "score": accuracy(after, wanted),
            "p_value": float(binomtest(won, won + lost).pvalue) if won + lost else 1.0,
            "signature": f"McNemar, exact|won:{won}|lost:{lost}",
        }


def accuracy(found: Sequence[str], labels: Sequence[str]) -> float:
    """In per cent."""
    return round(100 * sum(a == b for a, b in zip(found, labels)) / len(labels), 2)


class TextToText(Translation):
    """
    Text to text: of summaries and replies ROUGE-1, 2, L and Lsum (F1, stemmed), BLEU-1 to 4 (sacreBLEU), METEOR and
    CIDEr (pycocoevalcap; METEOR needs Java) of detokenised text, times 100; of tasks with labels their suite's metrics,
    and how many answers are no label, which count as wrong. --baseline: paired permutation test of ROUGE-L, or of the
    suite's first metric. Also test.hyp.target, what the model has written.
    """

    RECIPE = "pairs_cpu"
    METRIC, METRIC_NAME = "rougeL", "ROUGE-L"
    OPTIONS, TEST = ("baseline", "beam", "lenpen"), "Paired permutation test"

    def scores(self, written: List[str], wanted: List[str], log: str) -> Scores:
        corpus = corpus_of_answers(self.settings)
        if not corpus:
            return metrics.of_free_text(written, wanted)
        answers = read_answers(self.data, corpus, written, wanted)
        return metrics.of_answers(answers, corpus.answer_labels(), corpus.scores)

    @classmethod
    def test(cls, data: Path, wanted: List[str], before: List[str], after: List[str]) -> Dict[str, Any]:
        corpus = corpus_of_answers(read_settings(data / "settings"))
        if not corpus:
            return metrics.compare_free_text(before, after, wanted)
        old, new = (read_answers(data, corpus, written, wanted) for written in (before, after))
        return metrics.compare_answers(old, new, corpus.answer_labels(), corpus.scores)


def corpus_of_answers(settings: Mapping[str, str]) -> Optional[Corpus]:
    """The corpus of data with these settings, if its texts are answers that a suite's metrics count."""
    corpus = CORPORA.get(settings.get("corpus", ""))
    return corpus if corpus and corpus.scores else None


def read_answers(data: Path, corpus: Corpus, written: List[str], wanted: List[str]) -> List[metrics.Answer]:
    """What was written for the test set, with what prepare.sh has kept of each example."""
    kept, answers = read_lines(data / "test.answers"), []
    if len(kept) != len(wanted):
        raise UserError(
            f"{data}/test.answers: has {len(kept)} lines, and the test set has {len(wanted)}; prepare the data anew"
        )
    for text, right, line in zip(written, wanted, kept):
        known = json.loads(line)
        # a number as it was before it was rounded
        right = known["answers"][0] if corpus.number else right.lower()
        answers.append(metrics.Answer(text.lower().strip(), right, known["group"], known["answers"]))
    return answers


class Denoising(Task):
    """
    Denoising: log perplexity of the test set's targets, nats for each token, marks and the end included
    (fairseq-validate). Lower is better.
    """

    RECIPE, LOG = "denoising_cpu", "validate.log"
    METRIC, METRIC_NAME, BEST, DIGITS = "log_ppl", "log perplexity", min, 3

    def command(self) -> List[object]:
        argv = ["fairseq-validate", self.data / "bin", "--user-dir", ROOT / "fairseq_synth", "--path", self.checkpoint]
        argv += ["--task", "translation", "--source-lang", "source", "--target-lang", "target"]
        return [*argv, "--valid-subset", "test", "--max-tokens", self.max_tokens]

    def figures(self, log: str) -> Scores:
        # the last one of the line: that is nll_loss, if it has both
        bits = float(self.find(r"\| test .*\b(?:nll_)?loss ([\d.]+)", log)[1])
        return {"log_ppl": figure("log perplexity", bits * math.log(2), "nats by target token", self.DIGITS)}


TASKS: Dict[str, Type[Task]] = {
    "translation": Translation,
    "language_modeling": LanguageModel,
    "sentence_prediction": Classification,
    "text_to_text": TextToText,
    "denoising": Denoising,
}


def main(argv: Sequence[str]) -> None:
    """evaluate.sh."""
    scores = "\n\n".join(inspect.getdoc(task) or "" for task in TASKS.values())
    parser = Parser("evaluate", (__doc__ or "").format(tasks=scores))
    parser.argument_default = argparse.SUPPRESS  # what is not given is the recipe's
    add = parser.add_argument
    add("data", metavar="DATA_DIR", type=folder)
    add("run_dir", metavar="RUN_DIR", type=folder)
    add("--average", type=integer(0), metavar="N", help="average the last N checkpoints; 0: the best by validation")
    add("--max-tokens", type=integer(1), metavar="N", help="tokens of a batch (default: 4096)")
    add("--baseline", type=Path, metavar="RUN_DIR", help="an evaluated run of the same data, for a significance test")
    add("--test", type=Path, metavar="DIR", help="translation: another test set; scores are in tests/NAME of RUN_DIR")
    add("--beam", type=integer(1), metavar="N", help="tasks that write text: beam size")
    add("--lenpen", type=float, metavar="X", help="tasks that write text: length penalty")
    add("--context-window", type=integer(0), metavar="N", help="language models: least context of a token in its row")
    args = vars(parser.parse_args(argv))
    name = read_data_settings(args["data"]).get("task", "translation")
    for key in args:
        if key not in ("data", "run_dir", "average", "max_tokens", *TASKS[name].OPTIONS):
            flag = f"--{key.replace('_', '-')}"
            raise UserError(f"{flag}: not for {args['data']}, whose task is {name}; leave it out")
    evaluate(TASKS[name], **args)
