"""Scores of written text, by the libraries of the field: the extra `text` of this package."""

import importlib
import importlib.metadata
import re
import shutil
import string
from collections import Counter
from statistics import fmean
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

from .command import UserError
from .scoring import Scores, figure

SAMPLES, SEED = 999, 12345  # of the significance test

version_of = importlib.metadata.version


def library(name: str) -> Any:
    """A module of the extra."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise UserError(f"{name.split('.')[0]} is not installed here; run scripts/setup.sh") from None


def of_free_text(written: List[str], wanted: List[str]) -> Scores:
    """Figures of texts against one reference each, all times 100.

    ROUGE-1, 2, L and Lsum, BLEU of 1- to 4-grams, METEOR and CIDEr.
    """
    scores: Scores = {}
    signature = f"F1, stemmed|rouge-score {version_of('rouge-score')}"
    for kind, found in rouge(written, wanted, "1", "2", "L", "Lsum").items():
        scores[f"rouge{kind}"] = figure(f"ROUGE-{kind}", 100 * fmean(found), signature)
    for n in range(1, 5):
        bleu = library("sacrebleu.metrics").BLEU(max_ngram_order=n)
        score = bleu.corpus_score(written, [wanted]).score
        scores[f"bleu{n}"] = figure(f"BLEU-{n}", score, f"{bleu.get_signature().format()}|ngrams:{n}")
    tokenize = library("sacrebleu.tokenizers.tokenizer_13a").Tokenizer13a()
    # three bars divide texts in METEOR's own format
    texts = [{i: [tokenize(text.lower().replace("|||", " "))] for i, text in enumerate(s)} for s in (wanted, written)]
    signature = f"lowercase, tok:13a|pycocoevalcap {version_of('pycocoevalcap')}"
    scores["meteor"] = figure("METEOR", *meteor(texts, signature))
    cider, _ = library("pycocoevalcap.cider.cider").Cider().compute_score(*texts)
    scores["cider"] = figure("CIDEr", 100 * cider, signature)
    return scores


def rouge(written: Sequence[str], wanted: Sequence[str], *kinds: str) -> Dict[str, List[float]]:
    """{kind: ROUGE's F1 of each text, 0 to 1}. Kinds are ``1``, ``2``, ``L`` and ``Lsum``, ROUGE-L by sentences.

    A sentence of a summary ends with a full stop between blanks, as in CNN/DailyMail's and in T5's score of them.
    """
    scorer = library("rouge_score.rouge_scorer").RougeScorer([f"rouge{kind}" for kind in kinds], use_stemmer=True)
    sentences = ([text.replace(" . ", " .\n") for text in texts] for texts in (wanted, written))
    found = [scorer.score(*pair) for pair in zip(*sentences)]
    return {kind: [score[f"rouge{kind}"].fmeasure for score in found] for kind in kinds}


def meteor(texts: Sequence[Dict[int, List[str]]], signature: str) -> Tuple[Any, str]:
    """METEOR 1.5 in a Java program of pycocoevalcap's, and its signature."""
    if not shutil.which("java"):
        return None, "not scored: no Java"
    program: Any = None
    try:
        program = library("pycocoevalcap.meteor.meteor").Meteor()
        score, _ = program.compute_score(*texts)
    except (OSError, ValueError):
        if program:
            program.lock.release()  # compute_score still holds it, and deleting the object would wait for it
        return None, "not scored: Java is there, but does not run METEOR"
    return 100 * score, f"1.5, -l en -norm|{signature}"


class Answer(NamedTuple):
    """What was written for an example, and what was wanted."""

    written: str
    wanted: str
    group: str
    answers: Sequence[str]


def of_answers(answers: Sequence[Answer], labels: Sequence[str], names: Sequence[str]) -> Scores:
    """The suites' metrics of a task, times 100, by scikit-learn and scipy.

    Args:
        labels: all there are, in lower case; the last one is the positive one of F1. Empty: the answers are free.
        names: of `metrics_of`.
    """
    counted = counted_answers(answers, labels, names)
    known, signature = metrics_of(counted, labels), f"examples:{len(answers)}"
    versions = f"scikit-learn {version_of('scikit-learn')}, scipy {version_of('scipy')}"
    scores: Scores = {}
    for name in names:
        heading, metric = known[name]
        scores[name] = figure(heading, 100 * float(metric()), f"{signature}|{versions}")
    none = [a.written not in labels if labels else a.written != b.written for a, b in zip(answers, counted)]
    return {**scores, "no_label": figure("answers that are no label", sum(none), signature)}


def compare_free_text(before: List[str], after: List[str], wanted: List[str]) -> Dict[str, Any]:
    """`paired_test` of two models' texts, in ROUGE-L."""
    old, new = (rouge(written, wanted, "L")["L"] for written in (before, after))
    return paired_test("ROUGE-L", fmean, old, new)


def compare_answers(
    before: Sequence[Answer], after: Sequence[Answer], labels: Sequence[str], names: Sequence[str]
) -> Dict[str, Any]:
    """`paired_test` of two models' answers, in the first metric of `names`. Arguments are those of `of_answers`."""

    def metric(answers: Sequence[Answer]) -> float:
        return float(metrics_of(answers, labels)[names[0]][1]())

    old, new = (counted_answers(answers, labels, names) for answers in (before, after))
    return paired_test(metrics_of([], labels)[names[0]][0], metric, old, new)


def paired_test(
    heading: str, metric: Callable[[Sequence[Any]], float], before: Sequence[Any], after: Sequence[Any]
) -> Dict[str, Any]:
    """Paired permutation test, also called approximate randomisation (Noreen 1989), by scipy.

    Null hypothesis: each example's two outputs could as well be exchanged between the models.

    Args:
        heading: the metric's name in print.
        metric: of a list such as `before` or `after`, which have an item for each example; from 0 or -1 to 1.
    """
    items = [*before, *after]

    def difference(first: Sequence[int], second: Sequence[int]) -> float:
        return metric([items[i] for i in second]) - metric([items[i] for i in first])

    indices = range(len(before)), range(len(before), len(items))
    options = {"permutation_type": "samples", "vectorized": False, "n_resamples": SAMPLES, "random_state": SEED}
    options["batch"] = 50  # all at once would need gigabytes for a large test set
    test = library("scipy.stats").permutation_test(indices, difference, **options)
    return {
        "metric": heading,
        "baseline": round(100 * metric(before), 2),
        "score": round(100 * metric(after), 2),
        "p_value": float(test.pvalue),
        "signature": f"paired permutation|samples:{SAMPLES}|seed:{SEED}|scipy {version_of('scipy')}",
    }


def counted_answers(answers: Sequence[Answer], labels: Sequence[str], names: Sequence[str]) -> List[Answer]:
    """The answers as metrics count them: F1 of two labels and correlations have a wrong one in place of none."""
    return [in_place_of_none(a, labels if "f1" in names else (), "pearson" in names) for a in answers]


def in_place_of_none(answer: Answer, labels: Sequence[str], is_number: bool) -> Answer:
    """An answer; a wrong label in place of none, the farther end of the scale in place of no number of STS-B."""
    if is_number and not (re.fullmatch(r"\d(\.\d+)?", answer.written) and float(answer.written) <= 5):
        return answer._replace(written="0" if float(answer.wanted) > 2.5 else "5")
    if labels and answer.written not in labels:
        return answer._replace(written=next(label for label in labels if label != answer.wanted))
    return answer


def metrics_of(answers: Sequence[Answer], labels: Sequence[str]) -> Dict[str, Tuple[str, Callable[[], float]]]:
    """{name: its heading, what counts it, from 0 or -1 to 1}."""
    sides = [answer.wanted for answer in answers], [answer.written for answer in answers]

    def accuracy(group: str = "") -> float:
        right = [a.written == a.wanted for a in answers if group in a.group]
        return sum(right) / max(1, len(right))

    def whole_groups() -> float:  # the questions whose answers are all labelled rightly (MultiRC)
        groups, wrong = {a.group for a in answers}, {a.group for a in answers if a.written != a.wanted}
        return len(groups - wrong) / len(groups)

    def f1() -> Any:  # of each label
        score = library("sklearn.metrics").f1_score
        return score(*sides, labels=list(labels), average=None, zero_division=0)

    def correlation(name: str) -> float:  # 0 where all answers are the same
        numbers = [list(map(float, side)) for side in sides]
        is_constant = any(len(set(side)) == 1 for side in numbers)
        return 0.0 if is_constant else getattr(library("scipy.stats"), name)(*numbers)[0]

    def best_answer(score: Callable[[List[str], List[str]], float]) -> float:  # against one of the right ones (ReCoRD)
        best = [max(score(words(a.written), words(right)) for right in a.answers or [a.wanted]) for a in answers]
        return sum(best) / len(best)

    return {
        "accuracy": ("accuracy", accuracy),
        "matched": ("accuracy, matched", lambda: accuracy("dev_matched")),
        "mismatched": ("accuracy, mismatched", lambda: accuracy("dev_mismatched")),
        "f1": ("F1", lambda: f1()[-1]),
        "macro_f1": ("macro F1", lambda: f1().mean()),
        "matthews": ("Matthews correlation", lambda: library("sklearn.metrics").matthews_corrcoef(*sides)),
        "pearson": ("Pearson correlation", lambda: correlation("pearsonr")),
        "spearman": ("Spearman correlation", lambda: correlation("spearmanr")),
        "all_of_group": ("exact match", whole_groups),
        "answer_f1": ("F1", lambda: best_answer(shared_words)),
        "answer_em": ("exact match", lambda: best_answer(lambda written, wanted: written == wanted)),
    }


def words(text: str) -> List[str]:
    """Words without case, punctuation and articles, as SQuAD compares them."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def shared_words(written: List[str], wanted: List[str]) -> float:
    """F1 of the words of an answer."""
    same = sum((Counter(written) & Counter(wanted)).values())
    return 2 * same / (len(written) + len(wanted)) if same else float(written == wanted)
