"""Scores of known value, significance tests, and translate.sh, which reads what evaluate.sh does."""

import io
import itertools
import json
import random
import re
import shlex
import sys
from types import SimpleNamespace

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


def scorer(task, data, recipe="multi30k_cpu", **settings):
    known = {"task": task, "corpus": "own", "src": "en", "tgt": "de", "subwords": "sentencepiece", "lowercase": None}
    return SCORERS[task](data, {**known, **settings}, RECIPES[recipe])


def make_run(folder, data, recipe="multi30k_cpu", flags=()):
    """A run on data, without a model."""
    known = {"data": data, "data_digest": train.digest_of(data), "arch": "a", "seed": 1, "flags": flags}
    steps.dump(folder / "run.json", {**known, "recipe": vars(RECIPES[recipe])})
    return folder


def test_perplexity_by_word(tmp_path):
    """By hand: 3 words and 1 line end, in 6 pieces of 2 bits each, are 12 bits: 3 for each of the four."""
    write(tmp_path / "text" / "test.txt", ["a bcd ef"])
    log = "Evaluated {} tokens in 0.1s (1 tokens/s)\n| Loss (base 2): 2.0000, Perplexity: 4.00\n"
    found = scorer("language_modeling", tmp_path, "ptb_cpu")
    write(tmp_path / "sub" / "test.txt", ["a b@@ cd e@@ f"])
    scores = found.read_scores(log.format(6), tmp_path)
    assert scores["ppl"]["score"] == 8 and scores["token_ppl"]["score"] == 4
    assert scores["ppl"]["signature"] == "words+lines:4|tokens:6|block:128|context:0"
    assert_refused(lambda _: found.read_scores("", tmp_path), part="no figure of the test set")
    assert_refused(lambda _: found.read_scores(log.format(5), tmp_path), part="5 of 6 tokens; .*--tokens-per-sample")
    assert found.command("a", "b", 64)[-2] == 128  # a batch has room for a block


@pytest.mark.parametrize("loss", ["2.885", "3.5 | nll_loss 2.885"])
def test_bits_become_nats(tmp_path, loss):
    """The criterion's own loss, such as that with smoothed labels, is not shown where there is the other."""
    log = f"x | INFO | test | valid on 'test' subset | loss {loss} | ppl 7.39 | num_updates 3 | best_loss 9"
    assert scorer("denoising", tmp_path).read_scores(log, tmp_path)["log_ppl"]["score"] == 2.0


def test_translations():
    """In the order of the corpus, each of them."""
    said = "S-1\tso\nH-1\t-0.5\ta@@ b\nD-1\t-0.5\tab\nD-10\t-1\t\nD-0\t-0.2\tzuerst - so\n"
    assert score.read_hypotheses(said, "D", 3) == ["zuerst - so", "ab", ""]
    assert_refused(lambda _: score.read_hypotheses(said, "H", 3), part="2 of 3 sentences were left out")


def test_figures_of_a_translation(tmp_path):
    """German quotation marks are errors for sacreBLEU alone; case counts unless the data are lowercased."""
    write(tmp_path / "sacrebleu_set", ["wmt14/full"])
    written, wanted = ['Er sagt "ja" zu ihr und geht.'], ["Er sagt „ja“ zu ihr und geht."]
    scores = scorer("translation", tmp_path).score_outputs(written, wanted, "")
    assert scores["compound_split"]["score"] == pytest.approx(100) and scores["bleu"]["score"] < 99
    compounds = [["ein Hin ##AT##-##AT## und ##AT##-##AT## her"], ["ein Hin ##AT##-##AT## und ##AT##-##AT## hin"]]
    both = [re.sub(" ##AT##-##AT## ", "-", text) for (text,) in compounds]
    split = scorer("translation", tmp_path).score_outputs(both[:1], both[1:], "")["compound_split"]["score"]
    assert split == round(BLEU(tokenize="none").corpus_score(compounds[0], compounds[1:]).score, 2) > 0
    assert scores["bleu"]["test_set"] == "wmt14/full" and "nrefs:1|case:mixed" in scores["bleu"]["signature"]
    upper = [wanted[0].upper()]
    assert scorer("translation", tmp_path).score_outputs(upper, wanted, "")["bleu"]["score"] < 20
    scores = scorer("translation", tmp_path, tgt="fr", lowercase=True).score_outputs(upper, wanted, "")
    assert scores["bleu"]["score"] == scores["chrf"]["score"] == pytest.approx(100) and {*scores} == {"bleu", "chrf"}
    write(tmp_path / "tok" / "test.de", ["ja zu ihr und so"])
    said = "H-0\t-1\tj@@ a zu ih@@ r und so@@\n"
    scores = scorer("translation", tmp_path, subwords="bpe").score_outputs(written, wanted, said)
    assert scores["tokenised"]["score"] == pytest.approx(100) and "tok:none" in scores["tokenised"]["signature"]


def test_free_text(tmp_path, monkeypatch):
    """By hand: of two words one is right. METEOR has no figure without a Java that runs it, and is given no bars."""
    from pycocoevalcap.meteor.meteor import Meteor

    monkeypatch.setenv("PATH", str(tmp_path))
    scores = metrics.score_free_text(["a dog", "the cats ran"], ["a cat", "the cats ran"])
    assert scores["rouge1"]["score"] == scores["rougeL"]["score"] == scores["rougeLsum"]["score"] == 75
    assert scores["rouge2"]["score"] == 50 and scores["bleu1"]["score"] == 80 and scores["bleu4"]["name"] == "BLEU-4"
    assert scores["cider"]["score"] > 0 and "tok:13a" in scores["cider"]["signature"]
    # the sentences of a summary may come in another order: by hand, each has the words of the reference's
    assert metrics.rouge(["a b . c d ."], ["c d . a b ."], "L", "Lsum") == {"L": [0.5], "Lsum": [1]}
    assert scores["meteor"] == {"score": None, "name": "METEOR", "signature": "not scored: no Java"}
    (tmp_path / "java").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "java").chmod(0o755)
    monkeypatch.setattr(Meteor, "__del__", lambda self: None)
    found = metrics.score_free_text(["a"], ["a"])["meteor"]
    assert found["signature"] == "not scored: Java is there, but does not run METEOR" and found["score"] is None
    given = []
    monkeypatch.setattr(Meteor, "__init__", lambda self: None)
    monkeypatch.setattr(Meteor, "compute_score", lambda self, wanted, written: given.append(written) or (0.5, []))
    assert metrics.score_free_text(["a ||| B", ""], ["a b", "c"])["meteor"]["score"] == 50
    assert given == [{0: ["a b"], 1: [""]}]


@pytest.mark.parametrize("written, wanted, groups, labels, figures", [
    # an answer that is no label is wrong for every metric, and is counted; it is no class of its own
    ("yes yes maybe yes", "yes no yes no", "", ["no", "yes"],
     {"accuracy": 25, "f1": 40, "macro_f1": 20, "matthews": -57.74, "no_label": 1}),
    ("yes no maybe yes", "yes no yes no", "", ["no", "yes"], {"macro_f1": 58.33, "no_label": 1}),
    # a number that is none, or is off the scale, is the farther end of it
    ("1.0 x 3.0 9.0", "1 4 3 2", "", [], {"pearson": -29.11, "no_label": 2}),
    ("1.0 2.0 3.0", "2 4 5", "", [], {"pearson": 98.2, "spearman": 100, "no_label": 0}),
    ("1.0 1.0", "2 4", "", [], {"spearman": 0, "no_label": 0}),
    ("a b a", "a a a", "1 1 2", ["a", "b"], {"all_of_group": 50, "no_label": 0}),
    ("a b", "a a", "dev_matched dev_mismatched", ["a", "b"], {"matched": 100, "mismatched": 0, "no_label": 0}),
])  # fmt: skip
def test_answers(written, wanted, groups, labels, figures):
    rows = itertools.zip_longest(written.split(), wanted.split(), groups.split(), fillvalue="")
    found = metrics.score_answers([Answer(*row, ()) for row in rows], labels, [*figures][:-1])
    assert {name: value["score"] for name, value in found.items()} == figures


def test_the_best_of_several_answers():
    """By hand, of words without case, punctuation and articles: 1, and 2/3 of two words of which one is right."""
    found = [Answer("the big dog", "cat", "", ("cat", "Big dog!")), Answer("a tall man", "man", "", ("man",))]
    scores = metrics.score_answers(found, [], ["answer_f1", "answer_em"])
    assert (scores["answer_em"]["score"], round(scores["answer_f1"]["score"], 2)) == (50, 83.33)


def test_mcnemar(tmp_path):
    """By hand: 1 won and 6 lost of 7 have the two-sided probability 2 * (1 + 7) / 2**7."""
    found = scorer("sentence_prediction", tmp_path)
    test = found.test_significance(["b", *"a" * 9], ["a", *"b" * 6, *"a" * 3], ["a"] * 10)
    assert test["p_value"] == pytest.approx(0.125) and (test["baseline"], test["score"]) == (90, 40)
    assert found.test_significance(["b"], ["b"], ["a"])["p_value"] == 1


def test_answers_compared(tmp_path):
    """In the first metric of the task; capitals do not count; STS-B's numbers are those before they were rounded."""
    for corpus, answers, before, after, right, metric in (
        ("rte", [[]] * 4, ["x"] * 4, ["Entailment", "Not_entailment"] * 2, ["entailment", "not_entailment"] * 2, "acc"),
        ("stsb", [["1.1"], ["2.3"], ["4.0"]], ["3.0"] * 3, ["1.1", "2.3", "4.0"], ["1.2", "2.2", "4.0"], "Pearson"),
        ("aeslc", [[]] * 3, ["x"] * 3, ["a b", "c", "d"], ["a b", "c", "d"], "ROUGE-L"),
    ):
        write(tmp_path / "test.answers", (json.dumps(["", known]) for known in answers))
        found = scorer("text_to_text", tmp_path, corpus=corpus).test_significance(before, after, right)
        assert found["metric"].startswith(metric) and (found["baseline"], found["score"]) == (0, 100)
        assert found["p_value"] < 0.3


def test_the_bootstrap(tmp_path):
    """Two-sided, of 10,000 resamples: small enough for any correction; by its definition, with sacreBLEU's scores."""
    found, rng = scorer("translation", tmp_path, lowercase=True), random.Random(2)
    wanted = [" ".join(rng.choices("abcdefgh", k=rng.randint(5, 12))) for _ in range(200)]

    def damaged(share, lines):
        return [" ".join("x" if rng.random() < share else word for word in line.split()) for line in lines]

    before, after = damaged(0.3, wanted[:40]), damaged(0.35, wanted[:40])
    test, mirrored = (
        found.test_significance(before, after, wanted[:40]),
        found.test_significance(after, before, wanted[:40]),
    )

    def bleu(written, at):
        return found.bleu().corpus_score([written[i] for i in at], [[wanted[i] for i in at]]).score

    assert test["baseline"] == round(bleu(before, range(40)), 2) and test["score"] == round(bleu(after, range(40)), 2)
    assert test["p_value"] == mirrored["p_value"] and 0.05 < test["p_value"] < 0.9
    assert "case:lc" in test["signature"] and "|samples:10000|" in test["signature"]
    draws = numpy.random.default_rng(7).integers(40, size=(400, 40))
    measured, differences = test["score"] - test["baseline"], [bleu(after, d) - bleu(before, d) for d in draws]
    share = sum(abs(d - measured) >= abs(measured) for d in differences) / len(differences)
    assert abs(share - test["p_value"]) < 4 * (0.25 / 400) ** 0.5
    assert (
        found.test_significance(damaged(0.3, wanted), damaged(0.8, wanted), wanted)["p_value"] < 0.05 / 300
    )  # Holm's, of 300 tests


def test_no_difference_is_not_significant(tmp_path):
    """Of equal translations; of others that have the same scores; and where each is better once."""
    good, bad, found = "a b c d", "x x x x", scorer("translation", tmp_path, lowercase=True)
    for before, after in (([good, good], [good, good]), ([bad, bad], ["y", "z"]), ([good, bad], [bad, good])):
        assert found.test_significance(before, after, [good.upper()] * 2)["p_value"] == 1


def test_what_is_evaluated(tmp_path, monkeypatch):
    """One evaluation at a time; a baseline that was not evaluated, or on another test set, is refused first."""
    data, base = make_data(tmp_path / "data", subwords="bpe", lowercase=None), tmp_path / "base"
    run = make_run(tmp_path / "run", data)

    def run_command(argv, log):
        with pytest.raises(steps.Busy), steps.locked(log.parent / ".evaluation.lock"):
            pass
        raise steps.UserError(" ".join(map(str, argv)))

    monkeypatch.setattr(score, "run_command", run_command)
    write(data / "test.de", ["eins"])
    references = text.digest(data / "test.de")
    none = f"--baseline {base}: not evaluated yet; call evaluate.sh {base} first"
    other = f"--baseline {base}: evaluated on another test set; call evaluate.sh {base} --test DIR, then this command"
    for right, known, option, value, part in (
        ("eins", {}, "--baseline", base, none),
        ("eins", {"references": references}, "--baseline", base, "average_checkpoints.py .*--num-update-checkpoints 5"),
        ("zwei", {"references": references}, "--baseline", base, other),
        ("zwei", {}, "--context-window", 3, "--context-window: not for translation; leave it out"),
        ("zwei", {}, "--average", 0, "fairseq-generate .* --path .*checkpoint_best.pt"),
    ):
        write(data / "test.de", [right])
        steps.dump(base / "evaluation" / "scores.json", known)
        assert_refused(score.main, run, option, value, part=part)
    assert sorted(path.name for path in run.iterdir() if path.suffix != ".log" and path.name[0] != ".") == ["run.json"]
    data = make_data(tmp_path / "text", "language_modeling")
    run = make_run(tmp_path / "lm", data, "ptb_cpu", flags=["--tokens-per-sample=64"])
    assert_refused(score.main, run, "--average", 0, part="fairseq-eval-lm .*--tokens-per-sample 64 ")


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """A run on data with a test set, and the commands that its evaluation calls, each of which fails."""
    data = make_data(tmp_path / "data", subwords="bpe", lowercase=None)
    run = make_run(tmp_path / "run", data)
    write(data / "test.en", ["one"])
    write(data / "test.de", ["eins"])
    commands = []

    def fail(argv, log):
        commands.append(" ".join(map(str, argv)))
        log.touch()
        raise steps.UserError("it said nothing")

    monkeypatch.setattr(score, "run_command", fail)
    return run, data, commands


@pytest.mark.parametrize("checkpoints", [0, 4])
def test_after_a_short_training_the_best_checkpoint_is_scored(checkpoints, evaluated, capsys):
    run, _, commands = evaluated
    for number in range(checkpoints):
        (run / f"checkpoint_1_{number}.pt").touch()
    (run / "checkpoint_best.pt").touch()
    assert_refused(score.main, run, part="")
    said = capsys.readouterr().out
    assert f"{run}: has {checkpoints} of the 5 checkpoints that its recipe averages; scoring checkpoint_best.pt" in said
    assert len(commands) == 1 and f"--path {run}/checkpoint_best.pt " in commands[0]


def test_an_average_that_is_asked_for_is_not_replaced(evaluated):
    run, _, commands = evaluated
    (run / "checkpoint_best.pt").touch()
    assert_refused(score.main, run, "--average", 3, part="it said nothing")
    assert "average_checkpoints.py" in commands[0] and commands[0].split().count("3") == 1


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "long"])
def test_a_length_penalty_is_a_number(value, evaluated):
    run, _, _ = evaluated
    for main in (score.main, translate.main):
        assert_refused(main, run, f"--lenpen={value}", part=f"--lenpen: {value}: must be a number")


def test_a_test_sentence_that_is_too_long_is_refused_with_what_evaluate_can_do(evaluated):
    run, data, commands = evaluated
    write(data / "sub" / "test.de", ["a", "b " * 1024])
    write(data / "sub" / "test.en", ["a", "b"])
    said = "test.de: line 2 of the test set has 1025 tokens, the model takes 1024; .*evaluate.sh .*/run --test DIR"
    assert_refused(score.main, run, part=said)
    assert not commands
    make_run(run, data, flags=["--max-source-positions", "1100", "--max-target-positions=1100"])
    assert_refused(score.main, run, "--average", "0", part="it said nothing")
    assert "--max-source-positions 1100 --max-target-positions 1100" in commands[0]


def test_a_full_disk_is_named(evaluated, monkeypatch):
    """A command that fails for this reason cannot write to its log."""
    run, _, _ = evaluated
    monkeypatch.setattr(score.shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    assert_refused(score.main, run, part=f"{run}/evaluation.log: No space left on device; make room")


def test_a_folder_whose_name_fairseq_misreads_is_refused(tmp_path):
    run = make_run(tmp_path / "run-18:30", make_data(tmp_path / "data", subwords="bpe", lowercase=None))
    for main in (score.main, translate.main):
        assert_refused(main, run, part='run-18:30: has ":" in its name, a colon')


@pytest.mark.parametrize("flags, part", [
    ("--input {file}", "--input {file}: translate.sh reads standard input; call it with < {file}"),
    ("--input={file}", "--input {file}: translate.sh reads standard input"),
    ("--nbest 2", "--nbest 2: translate.sh writes one line per sentence; leave it out"),
    ("--nb=2", "--nbest 2: translate.sh writes one line per sentence; leave it out"),
])  # fmt: skip
def test_flags_that_change_the_input_or_the_number_of_lines_are_refused(flags, part, evaluated, tmp_path):
    run, _, _ = evaluated
    (run / "checkpoint_best.pt").touch()
    assert_refused(
        translate.main, run, "--", *flags.format(file=tmp_path / "x").split(), part=part.format(file=tmp_path / "x")
    )


@pytest.mark.parametrize("name", ["wmt", "pieces", "mails", "dialogues"])
def test_what_is_translated_is_as_prepared(name, prepared_corpus, tmp_path, monkeypatch, capsys):
    """translate.sh gives the model the subwords that prepare.sh made of the same text."""
    data = prepared_corpus(name)
    settings = steps.load(data / "settings.json")
    own = data.parent / "text" / f"test.{settings['src']}"  # before it was lowercased
    source = own if own.exists() else data / "raw" / own.name
    monkeypatch.setenv("DRY_RUN", "1")
    translate.main([str(make_run(tmp_path / "run", data, "pairs_cpu"))])
    interactive = shlex.split(capsys.readouterr().err.splitlines()[-1])[2:]
    parser = options.get_interactive_generation_parser()
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, interactive))
    found = translate.as_prepared(source.read_text(), settings, data)
    assert encoders.build_tokenizer(cfg.tokenizer) is None and encoders.build_bpe(cfg.bpe) is None
    assert found == [*text.lines(data / "sub" / own.name)]


def test_a_lone_beginning_of_a_word_stays(prepared_corpus):
    """Behind a cut: fairseq would not find it anew in the text."""
    model = prepared_corpus("pieces") / "pieces.model"
    split = subwords.piece_splitter(model)
    line = next(
        line for line in text.lines(prepared_corpus("pieces") / "text" / "train.en") if "\u2581" in split(line)[1:]
    )
    most = split(line).index("\u2581", 1) + 2
    settings = {"src": "en", "tgt": "de", "lowercase": True, "subwords": "sentencepiece", "keep-end": None}
    (given,) = translate.as_prepared(line, {**settings, "truncate-source": most}, model.parent)
    assert given.split() == split(line)[: most - 1] and given.endswith(" \u2581")


def test_lines_to_translate(tmp_path, capsys, monkeypatch):
    """One for each, an empty one for an empty one; each tool sees one line; flags go to fairseq-interactive."""
    options = {"lowercase": None, "dash-splits": None, "truncate-source": None}
    data = make_data(tmp_path / "data", subwords="bpe", **options)
    write(data / "codes", ["#version: 0.2", "q q</w>"])
    run, given_lines = make_run(tmp_path / "run", data), []

    def shell(command, stdin_text):
        given_lines.append(stdin_text)
        return "".join(f"H-{i}\t-1\t{line}\n" for i, line in enumerate(stdin_text.splitlines()))

    def call(said, *more):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said)))
        translate.main([str(run), "--beam", "1", "--", "--max-len-b", "20", *more])
        return capsys.readouterr()

    monkeypatch.setattr(translate, "shell", shell)
    (run / "checkpoint_best.pt").touch()
    out, error = call("\ufeff A\u2028 B\x85c\rd \n\ne".encode())
    assert out == "A B c d\n\ne\n" and given_lines.pop() == "A B c d\ne\n"
    assert "--beam 1 " in error and "--max-len-b 20" in error and "--tokenizer" not in error and "--bpe" not in error
    assert call(b"\n\n")[0] == "\n\n" and call(b"")[0] == "" and not given_lines
    assert call("a\tb\u00a0".encode(), "--constraints") and given_lines == ["a\tb\n"]
    assert_refused(lambda _: call(b"a\xff"), part="standard input is not UTF-8")
    steps.dump(data / "settings.json", {"task": "language_modeling"})
    make_run(run, data, "ptb_cpu")
    assert_refused(lambda _: call(b"a"), part="was trained for language_modeling; translate.sh needs pairs of text")
