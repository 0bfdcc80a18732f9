"""Scores of written text, by the libraries of the field: `pip install fairseq_synth[text]`."""

import importlib
import importlib.metadata
import re
import shutil
import string
from collections import Counter
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

from .command import UserError
from .scoring import Scores, figure

version_of = importlib.metadata.version


def library(name: str) -> Any:
    """A module of the extra."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise UserError(f"{name.split('.')[0]} is not installed here; run pip install 'fairseq_synth[text]'") from None


def of_free_text(written: Sequence[str], wanted: Sequence[str]) -> Scores:
    """ROUGE-1, 2 and L, BLEU of 1- to 4-grams, METEOR and CIDEr of texts against one reference each, all times 100."""
    scores: Scores = {}
    scorer = library("rouge_score.rouge_scorer").RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    found = [scorer.score(reference, text) for text, reference in zip(written, wanted)]
    for kind in "12L":
        mean = sum(score[f"rouge{kind}"].fmeasure for score in found) / len(found)
        signature = f"F1, stemmed|rouge-score {version_of('rouge-score')}"
        scores[f"rouge{kind}"] = figure(f"ROUGE-{kind}", 100 * mean, signature)
    for n in range(1, 5):
        bleu = library("sacrebleu.metrics").BLEU(max_ngram_order=n)
        score = bleu.corpus_score(list(written), [list(wanted)]).score
        scores[f"bleu{n}"] = figure(f"BLEU-{n}", score, f"{bleu.get_signature().format()}|ngrams:{n}")
    tokenize = library("sacrebleu.tokenizers.tokenizer_13a").Tokenizer13a()
    # three bars divide texts in METEOR's own format
    texts = [
        {i: [tokenize(text.lower().replace("|||", " "))] for i, text in enumerate(side)} for side in (wanted, written)
    ]
    signature = f"lowercase, tok:13a|pycocoevalcap {version_of('pycocoevalcap')}"
    scores["meteor"] = figure("METEOR", *meteor(texts, signature))
    scores["cider"] = figure(
        "CIDEr", 100 * library("pycocoevalcap.cider.cider").Cider().compute_score(*texts)[0], signature
    )
    return scores


def meteor(texts: Sequence[Dict[int, List[str]]], signature: str) -> Tuple[Any, str]:
    """METEOR 1.5 in a Java program of pycocoevalcap's, and its signature."""
    if not shutil.which("java"):
        return None, "not scored: no Java"
    try:
        score = library("pycocoevalcap.meteor.meteor").Meteor().compute_score(*texts)[0]
    except (OSError, ValueError) as error:  # Java is there, but does not start
        return None, f"not scored: {error}"
    return 100 * score, f"1.5, -l en -norm|{signature}"


# ---- answers


class Answer(NamedTuple):
    """What was written for an example, and what was wanted."""

    written: str
    wanted: str
    group: str
    answers: Sequence[str]


Answers = Sequence[Answer]
Metric = Callable[[Answers, Sequence[str]], Any]  # of answers and labels; from 0, or -1, to 1


def of_answers(answers: Answers, labels: Sequence[str], names: Sequence[str]) -> Scores:
    """The suites' metrics of a task, times 100, by scikit-learn and scipy.

    An answer that is no label counts as a wrong one, and a number that is none as the end of the scale that is farther
    from the right one.

    Args:
        labels: all there are, in lower case; the last one is the positive one of F1. Empty: the answers are free.
        names: of `METRICS`.
    """
    counted = [in_place_of_none(answer, labels, "pearson" in names) for answer in answers]
    signature = f"examples:{len(answers)}|scikit-learn {version_of('scikit-learn')}, scipy {version_of('scipy')}"
    scores = {}
    for name in names:
        heading, metric = METRICS[name]
        scores[name] = figure(heading, 100 * float(metric(counted, labels)), signature)
    no_label = sum(a.written != b.written for a, b in zip(answers, counted))
    scores["no_label"] = figure("answers that are no label", no_label, f"examples:{len(answers)}")
    return scores


def in_place_of_none(answer: Answer, labels: Sequence[str], is_number: bool) -> Answer:
    """An answer, or a wrong one if it is no label or score of STS-B."""
    if is_number and not (re.fullmatch(r"\d(\.\d+)?", answer.written) and float(answer.written) <= 5):
        return answer._replace(written="0" if float(answer.wanted) > 2.5 else "5")
    if labels and answer.written not in labels:
        return answer._replace(written=next(label for label in labels if label != answer.wanted))
    return answer


def accuracy(answers: Answers, group: str = "") -> float:
    """In one of several test sets, or in all."""
    found = [a.written == a.wanted for a in answers if group in a.group]
    return sum(found) / max(1, len(found))


def whole_groups(answers: Answers) -> float:
    """The questions whose answers are all labelled rightly (MultiRC)."""
    groups, wrong = {a.group for a in answers}, {a.group for a in answers if a.written != a.wanted}
    return len(groups - wrong) / len(groups)


def sides(answers: Answers) -> Tuple[List[str], List[str]]:
    """What was wanted, and what was written."""
    return [a.wanted for a in answers], [a.written for a in answers]


def f1(answers: Answers, labels: Sequence[str]) -> Any:
    """F1 of each label."""
    return library("sklearn.metrics").f1_score(*sides(answers), labels=list(labels), average=None, zero_division=0)


def correlation(name: str) -> Metric:
    """scipy's ``pearsonr`` or ``spearmanr``; 0 where all answers are the same."""

    def correlate(answers: Answers, labels: Sequence[str]) -> float:
        wanted, written = ([float(text) for text in side] for side in sides(answers))
        if len(set(written)) == 1 or len(set(wanted)) == 1:
            return 0.0
        return float(getattr(library("scipy.stats"), name)(wanted, written)[0])

    return correlate


def best_answer(answers: Answers, score: Callable[[List[str], List[str]], float]) -> float:
    """The mean over questions of the best score against one of the right answers (ReCoRD)."""
    best = [max(score(words(a.written), words(right)) for right in a.answers or [a.wanted]) for a in answers]
    return sum(best) / len(best)


def words(text: str) -> List[str]:
    """Words without case, punctuation and articles, as SQuAD compares them."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def shared_words(written: List[str], wanted: List[str]) -> float:
    """F1 of the words of an answer."""
    same = sum((Counter(written) & Counter(wanted)).values())
    return 2 * same / (len(written) + len(wanted)) if same else float(written == wanted)


METRICS: Dict[str, Tuple[str, Metric]] = {
    "accuracy": ("accuracy", lambda answers, _: accuracy(answers)),
    "matched": ("accuracy, matched", lambda answers, _: accuracy(answers, "dev_matched")),
    "mismatched": ("accuracy, mismatched", lambda answers, _: accuracy(answers, "dev_mismatched")),
    "f1": ("F1", lambda answers, labels: f1(answers, labels)[-1]),
    "macro_f1": ("macro F1", lambda answers, labels: f1(answers, labels).mean()),
    "matthews": (
        "Matthews correlation",
        lambda answers, _: library("sklearn.metrics").matthews_corrcoef(*sides(answers)),
    ),
    "pearson": ("Pearson correlation", correlation("pearsonr")),
    "spearman": ("Spearman correlation", correlation("spearmanr")),
    "all_of_group": ("exact match", lambda answers, _: whole_groups(answers)),
    "answer_f1": ("F1", lambda answers, _: best_answer(answers, shared_words)),
    "answer_em": ("exact match", lambda answers, _: best_answer(answers, lambda a, b: float(a == b))),
}
