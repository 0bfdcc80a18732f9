"""Scores of known value, significance tests, and translate.sh, which reads what evaluate.sh does."""

import io
import itertools
import json
import random
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy
import pytest
from fairseq import options
from fairseq.data import encoders
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from helpers import assert_refused
from sacrebleu.metrics import BLEU
from small_text import write
from test_train import make_data

from recipes import metrics, score, steps, subwords, text, train, translate
from recipes.catalog import RECIPES
from recipes.metrics import Answer
from recipes.score import SCORERS

pytestmark = pytest.mark.usefixtures("recipes_environment")


def make_scorer(task, data, recipe="multi30k_cpu", **settings):
    """Returns the scorer of a task.

    Args:
        task: a key of `SCORERS`, such as "translation".
        data: the folder of the data.
        recipe: the name of a recipe of the catalog.
        settings: settings of the data that differ from those of English to German.
    """
    settings_of_data = {
        "task": task,
        "corpus": "own",
        "src": "en",
        "tgt": "de",
        "subwords": "sentencepiece",
        "lowercase": None,
        **settings,
    }
    return SCORERS[task](data, settings_of_data, RECIPES[recipe])


def make_run(folder, data, recipe="multi30k_cpu", flags=()):
    """Makes the folder of a run on data, without a model, and returns it.

    Args:
        folder: the folder to make.
        data: the folder of the data.
        recipe: the name of a recipe of the catalog.
        flags: flags of fairseq-train that the user has added.
    """
    run_settings = {
        "data": data,
        "data_digest": train.digest_of_data(data),
        "arch": "a",
        "seed": 1,
        "flags": flags,
        "recipe": vars(RECIPES[recipe]),
    }
    steps.dump(folder / "run.json", run_settings)
    return folder


def test_perplexity_by_word(tmp_path):
    """The perplexity by word is computed by hand.

    There are 3 words and 1 line end, in 6 pieces of 2 bits each. They are 12 bits, 3 for each of the four, so that the
    perplexity is 2 ** 3.
    """
    block_size = 128  # --tokens-per-sample of the recipe ptb_cpu
    log = "Evaluated {} tokens in 0.1s (1 tokens/s)\n| Loss (base 2): 2.0000, Perplexity: 4.00\n"
    write(tmp_path / "text" / "test.txt", ["a bcd ef"])
    write(tmp_path / "sub" / "test.txt", ["a b@@ cd e@@ f"])
    scorer = make_scorer("language_modeling", tmp_path, "ptb_cpu")
    scores = scorer.read_scores(log.format(6), tmp_path)
    assert scores["ppl"]["score"] == 8
    # The recipe has a context window of 0.
    assert scores["ppl"]["signature"] == f"words+lines:4|tokens:6|block:{block_size}|context:0"
    assert scores["token_ppl"]["score"] == 4  # 2 bits
    with_no_score = "contains no score"
    assert_refused(lambda _argv: scorer.read_scores("", tmp_path), part=with_no_score)
    with_too_few_tokens = "5 of 6 tokens; .*--tokens-per-sample"
    assert_refused(lambda _argv: scorer.read_scores(log.format(5), tmp_path), part=with_too_few_tokens)

    # A batch has room for a block, even if it is asked to be smaller.
    command = scorer.command(checkpoint="a", out="b", max_tokens=64)
    assert command[-3:-1] == ["--max-tokens", block_size]


@pytest.mark.parametrize("loss", ["2.885", "3.5 | nll_loss 2.885"])
def test_the_log_perplexity_is_the_last_loss_in_nats(tmp_path, loss):
    """A criterion with smoothed labels prints its own loss first."""
    log = f"x | INFO | test | valid on 'test' subset | loss {loss} | ppl 7.39 | num_updates 3 | best_loss 9"
    scores = make_scorer("denoising", tmp_path).read_scores(log, tmp_path)
    assert scores["log_ppl"]["score"] == 2.0


def test_translations_are_read_in_the_order_of_the_corpus():
    log = "S-1\tso\nH-1\t-0.5\ta@@ b\nD-1\t-0.5\tab\nD-10\t-1\t\nD-0\t-0.2\tzuerst - so\n"
    assert score.read_hypotheses(log, mark="D", count=3) == ["zuerst - so", "ab", ""]
    assert_refused(lambda _: score.read_hypotheses(log, mark="H", count=3), part="2 of 3 sentences were not translated")


OUTPUT = ['Er sagt "ja" zu ihr und geht.']
REFERENCE = ["Er sagt „ja“ zu ihr und geht."]


def test_german_quotation_marks_are_errors_for_sacrebleu_but_not_for_compound_split_bleu(tmp_path):
    scores = make_scorer("translation", tmp_path).score_outputs(OUTPUT, REFERENCE, log="")
    assert scores["compound_split"]["score"] == pytest.approx(100)
    assert scores["bleu"]["score"] < 99


def test_compound_split_bleu_is_bleu_of_the_parts(tmp_path):
    outputs = ["ein Hin-und-her"]
    references = ["ein Hin-und-hin"]
    split_outputs = ["ein Hin ##AT##-##AT## und ##AT##-##AT## her"]
    split_references = ["ein Hin ##AT##-##AT## und ##AT##-##AT## hin"]
    scores = make_scorer("translation", tmp_path).score_outputs(outputs, references, log="")
    expected = BLEU(tokenize="none").corpus_score(split_outputs, [split_references]).score
    assert scores["compound_split"]["score"] == round(expected, 2) > 0


def test_the_signature_names_the_test_set_and_the_case(tmp_path):
    write(tmp_path / "sacrebleu_set", ["wmt14/full"])
    scores = make_scorer("translation", tmp_path).score_outputs(OUTPUT, REFERENCE, log="")
    assert scores["bleu"]["test_set"] == "wmt14/full"
    assert "nrefs:1|case:mixed" in scores["bleu"]["signature"]


def test_case_counts_unless_the_data_are_in_lower_case(tmp_path):
    outputs = [REFERENCE[0].upper()]
    scores = make_scorer("translation", tmp_path).score_outputs(outputs, REFERENCE, log="")
    assert scores["bleu"]["score"] < 20
    scores = make_scorer("translation", tmp_path, tgt="fr", lowercase=True).score_outputs(outputs, REFERENCE, log="")
    assert scores["bleu"]["score"] == scores["chrf"]["score"] == pytest.approx(100)
    assert set(scores) == {"bleu", "chrf"}  # compounds are split for English to German only


def test_bpe_is_also_scored_by_the_words_of_the_tokeniser(tmp_path):
    write(tmp_path / "tok" / "test.de", ["ja zu ihr und so"])
    log = "H-0\t-1\tj@@ a zu ih@@ r und so@@\n"
    scores = make_scorer("translation", tmp_path, subwords="bpe").score_outputs(OUTPUT, REFERENCE, log)
    assert scores["tokenised"]["score"] == pytest.approx(100)
    assert "tok:none" in scores["tokenised"]["signature"]


@pytest.fixture
def without_java(tmp_path, monkeypatch):
    """Hides all programs, among them Java, by a PATH with an empty folder."""
    monkeypatch.setenv("PATH", str(tmp_path))


def test_free_text(without_java):
    """The scores are computed by hand: in the first of two texts, one of two words is right."""
    scores = metrics.score_free_text(["a dog", "the cats ran"], ["a cat", "the cats ran"])
    assert scores["rouge1"]["score"] == scores["rougeL"]["score"] == scores["rougeLsum"]["score"] == 75
    assert scores["rouge2"]["score"] == 50
    assert scores["bleu1"]["score"] == 80
    assert scores["bleu4"]["name"] == "BLEU-4"
    assert scores["cider"]["score"] > 0
    assert "tok:13a" in scores["cider"]["signature"]


def test_sentences_of_a_summary_may_come_in_another_order():
    """The order counts for ROUGE-L, but not for ROUGE-Lsum.

    Each sentence has the words of a sentence of the reference.
    """
    assert metrics.rouge(["a b . c d ."], ["c d . a b ."], "L", "Lsum") == {"L": [0.5], "Lsum": [1]}


def test_meteor_has_no_score_without_a_java_that_runs_it(without_java, tmp_path, monkeypatch):
    from pycocoevalcap.meteor.meteor import Meteor

    meteor = metrics.score_free_text(["a"], ["a"])["meteor"]
    assert meteor == {"score": None, "name": "METEOR", "signature": "not scored: no Java"}

    lock_was_free = []

    def try_to_acquire_lock(program):
        """Takes the place of the destructor, which acquires the lock, and would wait forever if it were not free."""
        lock_was_free.append(program.lock.acquire(blocking=False))

    (tmp_path / "java").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "java").chmod(0o755)
    monkeypatch.setattr(Meteor, "__del__", try_to_acquire_lock)
    meteor = metrics.score_free_text(["a"], ["a"])["meteor"]
    assert meteor["signature"] == "not scored: Java is installed, but fails to run METEOR"
    assert meteor["score"] is None
    assert lock_was_free == [True]


def test_meteor_is_given_text_without_bars(tmp_path, monkeypatch):
    """Bars are removed from the text, because three bars separate the fields of METEOR's input.

    The text is also put in lower case. METEOR itself, a program in Java, is replaced. As there is no METEOR
    without a program named java, the test makes one, which does nothing.
    """
    from pycocoevalcap.meteor.meteor import Meteor

    scored_texts = []

    def compute_score(self, references, texts):
        """Takes the place of METEOR's method: adds the texts to `scored_texts`, and returns a score of 0.5."""
        scored_texts.append(texts)
        return 0.5, []

    (tmp_path / "java").write_text("#!/bin/sh\n")
    (tmp_path / "java").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Meteor, "__init__", lambda self: None)
    monkeypatch.setattr(Meteor, "__del__", lambda self: None)
    monkeypatch.setattr(Meteor, "compute_score", compute_score)
    scores = metrics.score_free_text(outputs=["a ||| B", ""], references=["a b", "c"])
    assert scores["meteor"]["score"] == 50  # 0.5 in percent
    assert scored_texts == [{0: ["a b"], 1: [""]}]


@pytest.mark.parametrize("outputs, references, groups, labels, scores", [
    # An answer that is no label is wrong for every metric, and is counted. It is no class of its own.
    # For example, one of four answers is right, which is 25 %. For the label yes, 1 of the 3 answers is right and 1 of
    # the 2 references is found, so that F1 is 40. For the label no, F1 is 0, and the mean of both, macro_f1, is 20.
    ("yes yes maybe yes", "yes no yes no", "", ["no", "yes"],
     {"accuracy": 25, "f1": 40, "macro_f1": 20, "matthews": -57.74, "no_label": 1}),
    ("yes no maybe yes", "yes no yes no", "", ["no", "yes"], {"macro_f1": 58.33, "no_label": 1}),
    # An answer that is no number, or is off the scale, counts as the end of the scale that is farther from the truth.
    ("1.0 x 3.0 9.0", "1 4 3 2", "", [], {"pearson": -29.11, "no_label": 2}),
    ("1.0 2.0 3.0", "2 4 5", "", [], {"pearson": 98.2, "spearman": 100, "no_label": 0}),
    ("1.0 1.0", "2 4", "", [], {"spearman": 0, "no_label": 0}),
    ("a b a", "a a a", "1 1 2", ["a", "b"], {"all_of_group": 50, "no_label": 0}),
    ("a b", "a a", "dev_matched dev_mismatched", ["a", "b"], {"matched": 100, "mismatched": 0, "no_label": 0}),
])  # fmt: skip
def test_scores_of_answers(outputs, references, groups, labels, scores):
    """The outputs, the references and the groups of examples are given as words of a string. Groups may be missing.

    The scores are {metric: its score in percent}. Answers without a label are counted in all cases, as "no_label".
    """
    answers = []
    words_of_answers = itertools.zip_longest(outputs.split(), references.split(), groups.split(), fillvalue="")
    for output, reference, group in words_of_answers:
        answers.append(Answer(output, reference, group, ()))
    metric_names = [name for name in scores if name != "no_label"]  # which is always counted
    records = metrics.score_answers(answers, labels, metric_names)
    assert {name: record["score"] for name, record in records.items()} == scores


def test_the_best_of_several_right_answers_counts():
    """The scores are computed by hand, for words without case, punctuation and articles.

    The first answer has the F1 score 1. The second answer has 2/3, as one of its two words is right.
    """
    answers = [
        Answer("the big dog", "cat", "", ("cat", "Big dog!")),
        Answer("a tall man", "man", "", ("man",)),
    ]
    scores = metrics.score_answers(answers, [], ["answer_f1", "answer_em"])
    assert scores["answer_em"]["score"] == 50
    assert round(scores["answer_f1"]["score"], 2) == 83.33


def test_mcnemars_test_of_labels(tmp_path):
    """The p value is computed by hand: 1 won and 6 lost of 7 have the two-sided probability 2 * (1 + 7) / 2**7."""
    scorer = make_scorer("sentence_prediction", tmp_path)
    before = ["b", *"a" * 9]
    after = ["a", *"b" * 6, *"a" * 3]
    test = scorer.test_significance(before, after, ["a"] * 10)
    assert test["p_value"] == pytest.approx(0.125)
    assert test["baseline"] == 90
    assert test["score"] == 40
    assert scorer.test_significance(["b"], ["b"], ["a"])["p_value"] == 1


class Comparison(NamedTuple):
    """The outputs of a wrong run and of a perfect run, which are compared.

    Attributes:
        corpus: a corpus of the catalog.
        references: the reference of each example.
        wrong_outputs: an output for each example. Their score is 0.
        perfect_outputs: an output for each example. Their score is 100.
        metric: the beginning of the name of the metric.
        right_answers: for each example a list of the right answers, if they are not the reference alone.
    """

    corpus: str
    references: list[str]
    wrong_outputs: list[str]
    perfect_outputs: list[str]
    metric: str
    right_answers: list[list[str]]


COMPARISONS = [
    # Capitals do not count.
    Comparison(
        "rte",
        references=["entailment", "not_entailment", "entailment", "not_entailment"],
        wrong_outputs=["x", "x", "x", "x"],
        perfect_outputs=["Entailment", "Not_entailment", "Entailment", "Not_entailment"],
        metric="acc",
        right_answers=[[], [], [], []],
    ),
    # The right answers of STS-B are the numbers before they were rounded. Equal numbers have no correlation with them.
    Comparison(
        "stsb",
        references=["1.2", "2.2", "4.0"],
        wrong_outputs=["3.0", "3.0", "3.0"],
        perfect_outputs=["1.1", "2.3", "4.0"],
        metric="Pearson",
        right_answers=[["1.1"], ["2.3"], ["4.0"]],
    ),
    Comparison(
        "aeslc",
        references=["a b", "c", "d"],
        wrong_outputs=["x", "x", "x"],
        perfect_outputs=["a b", "c", "d"],
        metric="ROUGE-L",
        right_answers=[[], [], []],
    ),
]


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.corpus)
def test_runs_are_compared_in_the_first_metric_of_the_corpus(comparison, tmp_path):
    """The baseline, whose outputs are wrong, has the score 0, and the other run 100. So few examples prove little."""
    lines = [json.dumps(["", answers]) for answers in comparison.right_answers]
    write(tmp_path / "test.answers", lines)
    scorer = make_scorer("text_to_text", tmp_path, corpus=comparison.corpus)
    test = scorer.test_significance(comparison.wrong_outputs, comparison.perfect_outputs, comparison.references)
    assert test["metric"].startswith(comparison.metric)
    assert test["baseline"] == 0
    assert test["score"] == 100
    assert test["p_value"] < 0.3


@pytest.mark.parametrize("number_recorded", [1, 3])
def test_recorded_answers_that_do_not_fit_the_test_set_are_refused(number_recorded, tmp_path):
    """test.answers has a line for each example. With another number of lines, nothing is scored."""
    line = json.dumps(["", []])
    write(tmp_path / "test.answers", [line] * number_recorded)
    scorer = make_scorer("text_to_text", tmp_path, corpus="rte")

    def score_two_outputs(_argv):
        """Scores two right outputs."""
        scorer.score_outputs(["x"] * 2, ["entailment"] * 2, log="")

    parts = [f"test.answers: has {number_recorded} line", "has 2 examples", "remove the folder"]
    assert_refused(score_two_outputs, part=parts)


def make_references(rng):
    """Returns 200 sentences of 5 to 12 random letters, which are their words."""
    sentences = []
    for _ in range(200):
        words = rng.choices("abcdefgh", k=rng.randint(5, 12))
        sentences.append(" ".join(words))
    return sentences


def damage(share, text_lines, rng):
    """Returns lines in which some words are replaced by x.

    Args:
        share: the probability with which a word is replaced.
        text_lines: the lines.
        rng: the generator of random numbers.
    """
    damaged_lines = []
    for line in text_lines:
        words = ["x" if rng.random() < share else word for word in line.split()]
        damaged_lines.append(" ".join(words))
    return damaged_lines


class TwoSystems(NamedTuple):
    """Sentences and their translations by two systems, one of which is a little better."""

    references: list[str]
    better_outputs: list[str]  # with about 30 % of wrong words
    worse_outputs: list[str]  # with about 35 % of wrong words


def make_two_systems():
    """Returns `TwoSystems` for 40 sentences. They are the same in each call."""
    rng = random.Random(2)
    references = make_references(rng)[:40]
    better_outputs = damage(0.3, references, rng)
    worse_outputs = damage(0.35, references, rng)
    return TwoSystems(references, better_outputs, worse_outputs)


def compute_bleu(scorer, outputs, references):
    """Returns the BLEU of some outputs, without rounding."""
    return scorer.bleu().corpus_score(outputs, [references]).score


def test_the_bootstrap_has_the_scores_of_both_systems_and_is_two_sided(tmp_path):
    """The signature says that there are 10,000 resamples, and that case does not count."""
    scorer = make_scorer("translation", tmp_path, lowercase=True)
    references, better_outputs, worse_outputs = make_two_systems()
    test = scorer.test_significance(better_outputs, worse_outputs, references)
    assert test["baseline"] == round(compute_bleu(scorer, better_outputs, references), 2)
    assert test["score"] == round(compute_bleu(scorer, worse_outputs, references), 2)
    assert "case:lc" in test["signature"]
    assert "|samples:10000|" in test["signature"]
    test_of_exchanged_systems = scorer.test_significance(worse_outputs, better_outputs, references)
    assert test_of_exchanged_systems["p_value"] == test["p_value"]


def test_the_p_value_of_the_bootstrap_is_what_its_definition_gives(tmp_path):
    """A sample has as many sentences as the test set, each drawn at random, so that some of them are there twice.

    The p value is the share of the samples in which the difference of the systems is as far from the measured
    difference as this is from 0. Here, the share is computed with sacreBLEU's scores of fewer samples.
    """
    scorer = make_scorer("translation", tmp_path, lowercase=True)
    references, better_outputs, worse_outputs = make_two_systems()
    test = scorer.test_significance(better_outputs, worse_outputs, references)
    assert 0.05 < test["p_value"] < 0.9  # near 0 or 1, the comparison below would prove little

    measured_difference = test["score"] - test["baseline"]
    num_sentences = len(references)
    num_samples = 400
    num_as_far = 0
    samples = numpy.random.default_rng(7).integers(num_sentences, size=(num_samples, num_sentences))
    for numbers in samples:
        sample_references = [references[number] for number in numbers]
        better_bleu = compute_bleu(scorer, [better_outputs[number] for number in numbers], sample_references)
        worse_bleu = compute_bleu(scorer, [worse_outputs[number] for number in numbers], sample_references)
        difference = worse_bleu - better_bleu
        if abs(difference - measured_difference) >= abs(measured_difference):
            num_as_far += 1
    expected_p_value = num_as_far / num_samples
    # The standard error of a share p of n samples is root(p (1 - p) / n), which is largest for p = 1/2.
    largest_standard_error = (0.25 / num_samples) ** 0.5
    assert abs(expected_p_value - test["p_value"]) < 4 * largest_standard_error


def test_the_p_value_of_a_large_difference_is_small_enough_for_any_correction(tmp_path):
    """By Holm's method, the smallest of 300 p values has to be below 0.05 / 300."""
    rng = random.Random(2)
    references = make_references(rng)
    scorer = make_scorer("translation", tmp_path, lowercase=True)
    before = damage(0.3, references, rng)
    after = damage(0.8, references, rng)
    test = scorer.test_significance(before, after, references)
    assert test["p_value"] < 0.05 / 300


GOOD = "a b c d"
BAD = "x x x x"


@pytest.mark.parametrize(
    "before, after",
    [
        ([GOOD, GOOD], [GOOD, GOOD]),
        ([BAD, BAD], ["y", "z"]),  # the translations differ, and have the same score
        ([GOOD, BAD], [BAD, GOOD]),  # each system is better once
    ],
)
def test_no_difference_is_not_significant(before, after, tmp_path):
    scorer = make_scorer("translation", tmp_path, lowercase=True)
    test = scorer.test_significance(before, after, [GOOD.upper()] * 2)
    assert test["p_value"] == 1


@pytest.fixture
def refusing_run(tmp_path, monkeypatch):
    """Returns the folder of a run on data, which a test evaluates.

    Each command of the evaluation is replaced by one that fails, with the command itself as its error message, so that
    a test can read it there. It also checks that no second evaluation can begin meanwhile.
    """
    data = make_data(tmp_path / "data", subwords="bpe", lowercase=None)
    write(data / "test.de", ["eins"])

    def run_command(argv, log):
        """Takes the place of `score.run_command`."""
        # The evaluation holds its lock, so that it cannot be locked again.
        with pytest.raises(steps.Busy), steps.locked(log.parent / ".evaluation.lock"):
            pass
        raise steps.UserError(" ".join(map(str, argv)))

    monkeypatch.setattr(score, "run_command", run_command)
    return make_run(tmp_path / "run", data)


def test_a_baseline_has_to_be_evaluated_on_the_same_test_set(refusing_run, tmp_path):
    """A refused call leaves only hidden files and logs beside what was there, the file run.json."""
    references = tmp_path / "data" / "test.de"  # the fixture has written it
    base = tmp_path / "base"
    base.mkdir()

    # The baseline has no scores.
    not_evaluated = f"--baseline {base}: not scored yet; run evaluate.sh {base} first"
    assert_refused(score.main, refusing_run, "--baseline", base, part=not_evaluated)

    # The baseline has scores on the same references. It is accepted: the evaluation begins. Its first command, which
    # averages checkpoints, fails.
    steps.dump(base / "evaluation" / "scores.json", {"references": text.digest(references)})
    averages = "average_checkpoints.py .*--num-update-checkpoints 5"
    assert_refused(score.main, refusing_run, "--baseline", base, part=averages)

    # The references have changed since the baseline was scored.
    write(references, ["zwei"])
    advice = f"call evaluate.sh {base} --test DIR, then this command"
    other_test_set = f"--baseline {base}: scored on another test set; {advice}"
    assert_refused(score.main, refusing_run, "--baseline", base, part=other_test_set)

    left_files = []
    for path in refusing_run.iterdir():
        is_log = path.suffix == ".log"
        is_hidden = path.name.startswith(".")
        if not is_log and not is_hidden:
            left_files.append(path.name)
    assert left_files == ["run.json"]


@pytest.mark.parametrize("option, value, part", [
    ("--context-window", 3, "--context-window: has no effect for the task translation; remove it"),
    ("--average", 0, "fairseq-generate .* --path .*checkpoint_best.pt"),
])  # fmt: skip
def test_options_of_an_evaluation(option, value, part, refusing_run):
    assert_refused(score.main, refusing_run, option, value, part=part)


def test_a_language_model_is_evaluated_with_the_flags_of_its_training(refusing_run, tmp_path):
    data = make_data(tmp_path / "text", "language_modeling")
    run = make_run(tmp_path / "lm", data, "ptb_cpu", flags=["--tokens-per-sample=64"])
    assert_refused(score.main, run, "--average", 0, part="fairseq-eval-lm .*--tokens-per-sample 64 ")


class Evaluated(NamedTuple):
    """A run whose evaluation calls commands that fail."""

    run: Path
    data: Path  # with a test set
    commands: list  # the commands that have been called


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """Returns an `Evaluated`, whose evaluation has not been started."""
    data = make_data(tmp_path / "data", subwords="bpe", lowercase=None)
    run = make_run(tmp_path / "run", data)
    write(data / "test.en", ["one"])
    write(data / "test.de", ["eins"])
    commands = []

    def fail(argv, log):
        """Takes the place of `score.run_command`: adds the command to `commands`, and fails."""
        command = " ".join(map(str, argv))
        commands.append(command)
        log.touch()
        raise steps.UserError("it said nothing")

    monkeypatch.setattr(score, "run_command", fail)
    return Evaluated(run, data, commands)


@pytest.mark.parametrize("checkpoints", [0, 4])
def test_after_a_short_training_the_best_checkpoint_is_scored(checkpoints, evaluated, capsys):
    run = evaluated.run
    for number in range(checkpoints):
        (run / f"checkpoint_1_{number}.pt").touch()
    (run / "checkpoint_best.pt").touch()
    assert_refused(score.main, run, part="")
    printed = capsys.readouterr().out
    has_too_few = f"{run}: only {checkpoints} of the 5 checkpoints that its recipe averages"
    assert f"{has_too_few}; scoring checkpoint_best.pt" in printed
    (command,) = evaluated.commands
    assert f"--path {run}/checkpoint_best.pt " in command


@pytest.mark.usefixtures("evaluated")  # the translation fails, so that no score is computed
def test_a_missing_package_is_named_before_the_translation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ja_mecab.MeCab", None)
    metrics.bleu.cache_clear()
    data = make_data(tmp_path / "japanese", tgt="ja", subwords="bpe", lowercase=None)
    run = make_run(tmp_path / "japanese_run", data)
    write(data / "test.en", ["one"])
    write(data / "test.ja", ["いち"])
    (run / "checkpoint_best.pt").touch()
    assert_refused(score.main, run, part="it said nothing")
    assert 'pip install "sacrebleu[ja]"' in capsys.readouterr().out


def test_an_average_that_is_asked_for_is_not_replaced(evaluated):
    (evaluated.run / "checkpoint_best.pt").touch()
    assert_refused(score.main, evaluated.run, "--average", 3, part="it said nothing")
    first_command = evaluated.commands[0]
    assert "average_checkpoints.py" in first_command
    assert first_command.split().count("3") == 1


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "long"])
def test_a_length_penalty_is_a_number(value, evaluated):
    for main in (score.main, translate.main):
        assert_refused(main, evaluated.run, f"--lenpen={value}", part=f"--lenpen: {value}: must be a number")


def test_a_test_sentence_that_is_too_long_is_refused_with_what_evaluate_can_do(evaluated):
    run = evaluated.run
    data = evaluated.data
    write(data / "sub" / "test.de", ["a", "b " * 1024])
    write(data / "sub" / "test.en", ["a", "b"])
    too_long = "test.de: line 2 of the test set has 1025 tokens, the model takes 1024; .*evaluate.sh .*/run --test DIR"
    assert_refused(score.main, run, part=too_long)
    assert not evaluated.commands

    # With higher limits among the flags of the run, the sentence is not too long. The evaluation goes on to its first
    # command, which has these limits and fails, as the fixture lets all commands fail ("it said nothing").
    two_ways_to_write_a_flag = ["--max-source-positions", "1100", "--max-target-positions=1100"]
    make_run(run, data, flags=two_ways_to_write_a_flag)
    assert_refused(score.main, run, "--average", "0", part="it said nothing")
    first_command = evaluated.commands[0]
    assert "--max-source-positions 1100 --max-target-positions 1100" in first_command


def test_a_full_disk_is_named(evaluated, monkeypatch):
    """A command that fails for this reason cannot write to its log."""
    run = evaluated.run
    monkeypatch.setattr(score.shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    assert_refused(score.main, run, part=f"{run}/evaluation.log: No space left on device; make room")


def test_a_folder_whose_name_fairseq_misreads_is_refused(tmp_path):
    run = make_run(tmp_path / "run-18:30", make_data(tmp_path / "data", subwords="bpe", lowercase=None))
    for main in (score.main, translate.main):
        assert_refused(main, run, part='run-18:30: has ":" in its name, a colon')


@pytest.mark.parametrize("flags, part", [
    ("--input {file}", "--input {file}: translate.sh reads standard input; call it with < {file}"),
    ("--input={file}", "--input {file}: translate.sh reads standard input"),
    ("--nbest 2", "--nbest 2: translate.sh writes one line per sentence; remove the flag"),
    ("--nb=2", "--nbest 2: translate.sh writes one line per sentence; remove the flag"),
])  # fmt: skip
def test_flags_that_change_the_input_or_the_number_of_lines_are_refused(flags, part, evaluated, tmp_path):
    (evaluated.run / "checkpoint_best.pt").touch()
    file = tmp_path / "x"
    words = flags.format(file=file).split()
    assert_refused(translate.main, evaluated.run, "--", *words, part=part.format(file=file))


def find_test_source(data, file_name):
    """Returns the file with the source side of the test set of a prepared corpus, as it was before it was lowercased.

    Text that was given as a folder is in the folder text beside the data. Text that prepare.sh has read from another
    form, such as a table, is in the folder raw of the data.
    """
    given_text = data.parent / "text" / file_name
    if given_text.exists():
        return given_text
    return data / "raw" / file_name


@pytest.mark.parametrize("name", ["wmt", "pieces", "mails", "dialogues"])
def test_text_to_translate_is_split_as_prepared_text(name, prepared_corpus):
    """translate.sh splits its input as prepare.sh splits a test set."""
    data = prepared_corpus(name)
    settings = steps.load(data / "settings.json")
    file_name = f"test.{settings['src']}"
    source_text = find_test_source(data, file_name).read_text()
    prepared_lines = translate.prepare_sentences(source_text, settings, data)
    assert prepared_lines == list(text.lines(data / "sub" / file_name))


@pytest.mark.parametrize("name", ["wmt", "pieces", "mails", "dialogues"])
def test_fairseq_interactive_splits_nothing_itself(name, prepared_corpus, tmp_path, monkeypatch, capsys):
    """translate.sh calls fairseq-interactive with flags that name no tokeniser and no subwords."""
    data = prepared_corpus(name)
    monkeypatch.setenv("DRY_RUN", "1")  # the command is printed only, as "+ fairseq-interactive FLAGS"
    run = make_run(tmp_path / "run", data, "pairs_cpu")
    translate.main([str(run)])
    printed_command = capsys.readouterr().err.splitlines()[-1]
    flags = shlex.split(printed_command)[2:]
    parser = options.get_interactive_generation_parser()
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, flags))
    assert encoders.build_tokenizer(cfg.tokenizer) is None
    assert encoders.build_bpe(cfg.bpe) is None


WORD_BEGINNING = "\u2581"  # SentencePiece's sign for the beginning of a word


def find_line_with_lone_beginning(data):
    """Returns a training line and its pieces, one of which, behind the first, is the sign `WORD_BEGINNING` alone."""
    split = subwords.make_piece_splitter(data / "pieces.model")
    for line in text.lines(data / "text" / "train.en"):
        pieces = split(line)
        if WORD_BEGINNING in pieces[1:]:
            return line, pieces
    raise AssertionError("no training line has such a piece")


def test_a_lone_beginning_of_a_word_stays_at_a_cut(prepared_corpus):
    """A word may begin with a piece that is only the sign for its beginning. A line that is cut behind it keeps it.

    If the text that remains were split into pieces anew, there would be no such piece at its end.
    """
    data = prepared_corpus("pieces")
    line, pieces = find_line_with_lone_beginning(data)
    num_pieces = pieces.index(WORD_BEGINNING, 1) + 1
    settings = {
        "src": "en",
        "tgt": "de",
        "lowercase": True,
        "subwords": "sentencepiece",
        "keep-end": None,  # the beginning is kept
        "truncate-source": num_pieces + 1,  # with the end-of-sentence symbol
    }
    (prepared_line,) = translate.prepare_sentences(line, settings, data)
    assert prepared_line.split() == pieces[:num_pieces]
    assert prepared_line.endswith(f" {WORD_BEGINNING}")


class Translator:
    """Calls translate.sh for a run, with a stand-in for fairseq-interactive that returns its input as translations.

    Attributes:
        inputs: the text that fairseq-interactive has been given in each call.
    """

    def __init__(self, run, monkeypatch, capsys):
        self.run = run
        self.monkeypatch = monkeypatch
        self.capsys = capsys
        self.inputs = []
        monkeypatch.setattr(translate, "shell", self.shell)

    def shell(self, command, stdin_text):
        """Takes the place of `translate.shell`: returns the lines of the input as fairseq-interactive's output."""
        self.inputs.append(stdin_text)
        hypotheses = [f"H-{number}\t-1\t{line}\n" for number, line in enumerate(stdin_text.splitlines())]
        return "".join(hypotheses)

    def __call__(self, stdin_bytes, *flags):
        """Returns what translate.sh prints for its standard input: a pair of standard output and standard error."""
        self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin_bytes)))
        translate.main([str(self.run), "--beam", "1", "--", "--max-len-b", "20", *flags])
        return self.capsys.readouterr()


@pytest.fixture
def translator(tmp_path, monkeypatch, capsys):
    """Returns a `Translator` of a run whose subwords are single letters."""
    settings = {"lowercase": None, "dash-splits": None, "truncate-source": None}
    data = make_data(tmp_path / "data", subwords="bpe", **settings)
    write(data / "codes", ["#version: 0.2", "q q</w>"])
    run = make_run(tmp_path / "run", data)
    (run / "checkpoint_best.pt").touch()
    return Translator(run, monkeypatch, capsys)


def test_each_line_is_translated_and_an_empty_line_stays_empty(translator):
    """Only a line feed ends a line. Other separators of lines become blanks."""
    printed, error = translator("\ufeff A\u2028 B\x85c\rd \n\ne".encode())
    assert printed == "A B c d\n\ne\n"
    assert translator.inputs == ["A B c d\ne\n"]
    assert "--beam 1 " in error
    assert "--max-len-b 20" in error
    assert "--tokenizer" not in error
    assert "--bpe" not in error


def test_fairseq_is_not_started_if_there_is_nothing_to_translate(translator):
    assert translator(b"\n\n").out == "\n\n"
    assert translator(b"").out == ""
    assert not translator.inputs


def test_constraints_stay_behind_a_tab(translator):
    translator("a\tb\u00a0".encode(), "--constraints")
    assert translator.inputs == ["a\tb\n"]


def test_text_that_is_not_utf8_is_refused(translator):
    def translate_other_bytes(_argv):
        """Translates a line with a byte that UTF-8 does not have."""
        translator(b"a\xff")

    assert_refused(translate_other_bytes, part="standard input is not UTF-8")


def test_a_language_model_does_not_translate(translator, tmp_path):
    data = tmp_path / "data"
    steps.dump(data / "settings.json", {"task": "language_modeling"})
    make_run(translator.run, data, "ptb_cpu")
    no_pairs = "was trained for language_modeling; translate.sh needs a run for pairs of text"

    def translate_letter(_argv):
        """Translates a single letter."""
        translator(b"a")

    assert_refused(translate_letter, part=no_pairs)
