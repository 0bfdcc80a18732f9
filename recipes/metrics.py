"""Scores of written text, by the libraries of the field: `pip install fairseq_synth[text]`."""

import importlib
import importlib.metadata
import re
import shutil
import string
from collections import Counter, defaultdict
from typing import Any, Callable, Dict, List, NamedTuple, Sequence

from .command import UserError

NO_JAVA = "not scored: no Java"
version_of = importlib.metadata.version
Scores = Dict[str, Dict[str, Any]]  # {figure: {score, name, signature}}; a score of None was not counted


def library(name: str) -> Any:
    """A module of the extra.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise UserError(f"{name.split('.')[0]} is not installed here; run pip install 'fairseq_synth[text]'") from None


def of_free_text(written: Sequence[str], wanted: Sequence[str]) -> Scores:
    """ROUGE-1, 2 and L, BLEU of 1- to 4-grams, METEOR and CIDEr of texts against one reference each, all times 100."""
    scores: Scores = {}

    def add(name: str, heading: str, score: Any, signature: str) -> None:
        scores[name] = {"score": None if score is None else round(100 * float(score), 2), "name": heading}
        scores[name]["signature"] = signature

    kinds = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
    scorer = library("rouge_score.rouge_scorer").RougeScorer(list(kinds), use_stemmer=True)
    found = [scorer.score(reference, text) for text, reference in zip(written, wanted)]
    signature = f"F1, stemmed|rouge-score {version_of('rouge-score')}"
    for kind, heading in kinds.items():
        add(kind, heading, sum(score[kind].fmeasure for score in found) / len(found), signature)
    for n in range(1, 5):
        bleu = library("sacrebleu.metrics").BLEU(max_ngram_order=n)
        score = bleu.corpus_score(list(written), [list(wanted)]).score / 100
        add(f"bleu{n}", f"BLEU-{n}", score, f"{bleu.get_signature().format()}|ngrams:{n}")
    tokenize = library("sacrebleu.tokenizers.tokenizer_13a").Tokenizer13a()
    # three bars divide texts in METEOR's own format
    texts = [
        {i: [tokenize(text.lower().replace("|||", " "))] for i, text in enumerate(side)} for side in (wanted, written)
    ]
    signature = f"lowercase, tok:13a|pycocoevalcap {version_of('pycocoevalcap')}"
    add("meteor", "METEOR", *(meteor(texts, signature) if shutil.which("java") else (None, NO_JAVA)))
    add("cider", "CIDEr", library("pycocoevalcap.cider.cider").Cider().compute_score(*texts)[0], signature)
    return scores


def meteor(texts: Sequence[Dict[int, List[str]]], signature: str) -> Any:
    """METEOR 1.5 in a Java program of pycocoevalcap's, and its signature."""
    scorer = library("pycocoevalcap.meteor.meteor").Meteor()
    try:
        return scorer.compute_score(*texts)[0], f"1.5, -l en -norm|{signature}"
    except (OSError, ValueError) as error:  # Java is there, but does not start
        return None, f"not scored: {error}"


# ---- answers


class Answer(NamedTuple):
    """What was written for an example, and what was wanted."""

    written: str
    wanted: str
    group: str
    answers: Sequence[str]


def of_answers(answers: Sequence[Answer], labels: Sequence[str], names: Sequence[str]) -> Scores:
    """The suites' metrics of a task, times 100, by scikit-learn and scipy.

    An answer that is no label counts as a wrong one, and a number that is none as the end of the scale that is farther
    from the right one.

    Args:
        labels: all there are, in lower case; the last one is the positive one of F1. Empty: the answers are free.
        names: of `METRICS`.
    """
    numbers = "pearson" in names
    valid = [is_number(a.written) if numbers else not labels or a.written in labels for a in answers]
    counted = [
        a if good else a._replace(written=("0" if float(a.wanted) > 2.5 else "5") if numbers else other(a, labels))
        for a, good in zip(answers, valid)
    ]
    signature = f"examples:{len(answers)}|scikit-learn {version_of('scikit-learn')}, scipy {version_of('scipy')}"
    scores: Scores = {}
    for name in names:
        heading, function = METRICS[name]
        score = round(100 * float(function(counted, labels)), 2)
        scores[name] = {"score": score, "name": heading, "signature": signature}
    scores["no_label"] = {"score": len(valid) - sum(valid), "name": "answers that are no label"}
    scores["no_label"]["signature"] = f"examples:{len(answers)}"
    return scores


def is_number(text: str) -> bool:
    """Whether it is a score of STS-B."""
    return bool(re.fullmatch(r"\d(\.\d+)?", text)) and float(text) <= 5


def other(answer: Answer, labels: Sequence[str]) -> str:
    """A label that is not the right one."""
    return next(label for label in labels if label != answer.wanted)


def accuracy(answers: Sequence[Answer], labels: Sequence[str]) -> float:
    return sum(a.written == a.wanted for a in answers) / len(answers)


def in_group(group: str) -> Callable[[Sequence[Answer], Sequence[str]], float]:
    """The accuracy in one of several test sets."""

    def count(answers: Sequence[Answer], labels: Sequence[str]) -> float:
        found = [a for a in answers if group in a.group]
        return accuracy(found, labels) if found else 0.0

    return count


def f1(answers: Sequence[Answer], labels: Sequence[str], average: str = "binary") -> float:
    """F1 of the positive label, or the mean of all labels' (``macro``)."""
    of = {"pos_label": labels[-1]} if average == "binary" else {"labels": list(labels)}
    y = [a.wanted for a in answers], [a.written for a in answers]
    return float(library("sklearn.metrics").f1_score(*y, average=average, zero_division=0, **of))


def matthews(answers: Sequence[Answer], labels: Sequence[str]) -> float:
    y = [a.wanted for a in answers], [a.written for a in answers]
    return float(library("sklearn.metrics").matthews_corrcoef(*y))


def correlation(name: str) -> Callable[[Sequence[Answer], Sequence[str]], float]:
    """scipy's ``pearsonr`` or ``spearmanr``; 0 where all answers are the same."""

    def correlate(answers: Sequence[Answer], labels: Sequence[str]) -> float:
        wanted, written = [float(a.wanted) for a in answers], [float(a.written) for a in answers]
        if len(set(written)) == 1 or len(set(wanted)) == 1:
            return 0.0
        return float(getattr(library("scipy.stats"), name)(wanted, written)[0])

    return correlate


def all_of_group(answers: Sequence[Answer], labels: Sequence[str]) -> float:
    """The questions whose answers are all labelled rightly (MultiRC)."""
    groups: Dict[str, bool] = defaultdict(lambda: True)
    for a in answers:
        groups[a.group] &= a.written == a.wanted
    return sum(groups.values()) / len(groups)


def words(text: str) -> List[str]:
    """Words without case, punctuation and articles, as SQuAD compares them."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def best_answer(score: Callable[[List[str], List[str]], float]) -> Callable[[Sequence[Answer], Sequence[str]], float]:
    """The mean over questions of the best score against one of the right answers (ReCoRD)."""

    def mean(answers: Sequence[Answer], labels: Sequence[str]) -> float:
        best = [max(score(words(a.written), words(right)) for right in a.answers or [a.wanted]) for a in answers]
        return sum(best) / len(best)

    return mean


def shared_words(written: List[str], wanted: List[str]) -> float:
    """F1 of the words of an answer."""
    same = sum((Counter(written) & Counter(wanted)).values())
    return 2 * same / (len(written) + len(wanted)) if same else float(written == wanted)


METRICS: Dict[str, Any] = {
    "accuracy": ("accuracy", accuracy),
    "matched": ("accuracy, matched", in_group("dev_matched")),
    "mismatched": ("accuracy, mismatched", in_group("dev_mismatched")),
    "f1": ("F1", f1),
    "macro_f1": ("macro F1", lambda answers, labels: f1(answers, labels, "macro")),
    "matthews": ("Matthews correlation", matthews),
    "pearson": ("Pearson correlation", correlation("pearsonr")),
    "spearman": ("Spearman correlation", correlation("spearmanr")),
    "all_of_group": ("exact match", all_of_group),
    "answer_f1": ("F1", best_answer(shared_words)),
    "answer_em": ("exact match", best_answer(lambda a, b: float(a == b))),
}
