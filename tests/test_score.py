"""Scores of known value, significance tests, and translate.sh, which reads what evaluate.sh does."""

import io
import itertools
import json
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from fairseq import options
from fairseq.data import encoders
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from helpers import refused
from sacrebleu.metrics import BLEU
from small_text import write
from test_train import make_data

from recipes import metrics, prepare, score, steps, text, train, translate
from recipes.catalog import RECIPES
from recipes.metrics import Answer
from recipes.score import SCORERS

pytestmark = pytest.mark.usefixtures("recipes_environment")


def scorer(task, data, recipe="multi30k_cpu", **settings):
    known = {"task": task, "corpus": "own", "src": "en", "tgt": "de", "subwords": "sentencepiece", "lowercase": None}
    return SCORERS[task](data, {**known, **settings}, RECIPES[recipe])


def make_run(folder, data, recipe="multi30k_cpu"):
    """A run on data, without a model."""
    known = {"data": data, "data_digest": train.digest_of(data), "arch": "a", "seed": 1, "flags": []}
    steps.dump(folder / "run.json", {**known, "recipe": vars(RECIPES[recipe])})
    return folder


# ---- figures


def test_perplexity_by_word(tmp_path):
    """By hand: 3 words and 1 line end, in 6 pieces of 2 bits each, are 12 bits: 3 for each of the four."""
    write(tmp_path / "text" / "test.txt", ["a bcd ef"])
    log = "Evaluated {} tokens in 0.1s (1 tokens/s)\n| Loss (base 2): 2.0000, Perplexity: 4.00\n"
    found = scorer("language_modeling", tmp_path, "ptb_cpu")
    by_word = found.figures(log.format(4), tmp_path)
    assert by_word["ppl"]["score"] == by_word["token_ppl"]["score"] == 4
    write(tmp_path / "sub" / "test.txt", ["a b@@ cd e@@ f"])
    scores = found.figures(log.format(6), tmp_path)
    assert scores["ppl"]["score"] == 8 and scores["token_ppl"]["score"] == 4
    assert scores["ppl"]["signature"] == "words+lines:4|tokens:6|block:128|context:0"
    refused(lambda _: found.figures("", tmp_path), part="no figure of the test set")
    refused(lambda _: found.figures(log.format(5), tmp_path), part="5 of 6 tokens; .*--tokens-per-sample")


@pytest.mark.parametrize("loss", ["2.885", "3.5 | nll_loss 2.885"])
def test_bits_become_nats(tmp_path, loss):
    """The criterion's own loss, such as that with smoothed labels, is not shown where there is the other."""
    log = f"x | INFO | test | valid on 'test' subset | loss {loss} | ppl 7.39 | num_updates 3 | best_loss 9"
    assert scorer("denoising", tmp_path).figures(log, tmp_path)["log_ppl"]["score"] == 2.0


def test_translations():
    """In the order of the corpus, each of them."""
    said = "S-1\tso\nH-1\t-0.5\ta@@ b\nD-1\t-0.5\tab\nD-10\t-1\t\nD-0\t-0.2\tzuerst - so\n"
    assert score.hypotheses(said, "D", 3) == ["zuerst - so", "ab", ""]
    refused(lambda _: score.hypotheses(said, "H", 3), part="2 of 3 sentences were left out")


def test_figures_of_a_translation(tmp_path):
    """German quotation marks are errors for sacreBLEU alone; case counts unless the data are lowercased."""
    write(tmp_path / "sacrebleu_set", ["wmt14/full"])
    written, wanted = ['Er sagt "ja" zu ihr und geht.'], ["Er sagt „ja“ zu ihr und geht."]
    scores = scorer("translation", tmp_path).scores(written, wanted, "")
    assert scores["compound_split"]["score"] == pytest.approx(100) and scores["bleu"]["score"] < 99
    compounds = [["ein Hin ##AT##-##AT## und ##AT##-##AT## her"], ["ein Hin ##AT##-##AT## und ##AT##-##AT## hin"]]
    both = [re.sub(" ##AT##-##AT## ", "-", text) for (text,) in compounds]
    split = scorer("translation", tmp_path).scores(both[:1], both[1:], "")["compound_split"]["score"]
    assert split == round(BLEU(tokenize="none").corpus_score(compounds[0], compounds[1:]).score, 2) > 0
    assert scores["bleu"]["test_set"] == "wmt14/full" and "nrefs:1|case:mixed" in scores["bleu"]["signature"]
    upper = [wanted[0].upper()]
    assert scorer("translation", tmp_path).scores(upper, wanted, "")["bleu"]["score"] < 20
    scores = scorer("translation", tmp_path, tgt="fr", lowercase=True).scores(upper, wanted, "")
    assert scores["bleu"]["score"] == pytest.approx(100) and {*scores} == {"bleu", "chrf"}
    write(tmp_path / "tok" / "test.de", ["ja zu ihr und so"])
    said = "H-0\t-1\tj@@ a zu ih@@ r und so@@\n"
    scores = scorer("translation", tmp_path, subwords="bpe").scores(written, wanted, said)
    assert scores["tokenised"]["score"] == pytest.approx(100) and "tok:none" in scores["tokenised"]["signature"]


def test_free_text(monkeypatch):
    """By hand: of two words one is right. METEOR says why it has no figure."""
    monkeypatch.setattr(metrics.shutil, "which", lambda name: None)
    scores = metrics.of_free_text(["a dog", "the cats ran"], ["a cat", "the cats ran"])
    assert scores["rouge1"]["score"] == scores["rougeL"]["score"] == scores["rougeLsum"]["score"] == 75
    assert scores["rouge2"]["score"] == 50 and scores["bleu1"]["score"] == 80 and scores["bleu4"]["name"] == "BLEU-4"
    assert scores["cider"]["score"] > 0 and "tok:13a" in scores["cider"]["signature"]
    # the sentences of a summary may come in another order: by hand, each has the words of the reference's
    assert metrics.rouge(["a b . c d ."], ["c d . a b ."], "L", "Lsum") == {"L": [0.5], "Lsum": [1]}
    assert scores["meteor"] == {"score": None, "name": "METEOR", "signature": "not scored: no Java"}


def test_meteor(tmp_path, monkeypatch):
    """It is given no bars, by which it divides texts; a Java that does not run it is told."""
    from pycocoevalcap.meteor.meteor import Meteor

    monkeypatch.setattr(Meteor, "__del__", lambda self: None)
    (tmp_path / "java").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "java").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = metrics.of_free_text(["a"], ["a"])["meteor"]
    assert found["signature"] == "not scored: Java is there, but does not run METEOR" and found["score"] is None
    given = []
    monkeypatch.setattr(Meteor, "__init__", lambda self: None)
    monkeypatch.setattr(Meteor, "compute_score", lambda self, wanted, written: given.append(written) or (0.5, []))
    assert metrics.of_free_text(["a ||| B", ""], ["a b", "c"])["meteor"]["score"] == 50
    assert given == [{0: ["a b"], 1: [""]}]


YES_NO = ["no", "yes"]


@pytest.mark.parametrize("written, wanted, groups, labels, figures", [
    # an answer that is no label is wrong for every metric, and is counted; it is no class of its own
    ("yes no maybe yes", "yes no yes no", "", YES_NO,
     {"accuracy": 50, "f1": 50, "macro_f1": 50, "matthews": 0, "no_label": 1}),
    ("yes no maybe yes", "yes no yes no", "", YES_NO, {"macro_f1": 58.33, "no_label": 1}),
    # a number that is none, or is off the scale, is the farther end of it
    ("1.0 x 3.0 9.0", "1 4 3 2", "", [], {"pearson": -29.11, "no_label": 2}),
    ("1.0 2.0 3.0", "2 4 5", "", [], {"pearson": 98.2, "spearman": 100, "no_label": 0}),
    ("1.0 1.0", "2 4", "", [], {"spearman": 0, "no_label": 0}),
    ("a b a", "a a a", "1 1 2", ["a", "b"], {"all_of_group": 50, "no_label": 0}),
    ("a b", "a a", "dev_matched dev_mismatched", ["a", "b"], {"matched": 100, "mismatched": 0, "no_label": 0}),
])  # fmt: skip
def test_answers(written, wanted, groups, labels, figures):
    rows = itertools.zip_longest(written.split(), wanted.split(), groups.split(), fillvalue="")
    found = metrics.of_answers([Answer(*row, ()) for row in rows], labels, [*figures][:-1])
    assert {name: value["score"] for name, value in found.items()} == figures


def test_the_best_of_several_answers():
    """By hand, of words without case, punctuation and articles: 1, and 2/3 of two words of which one is right."""
    found = [Answer("the big dog", "cat", "", ("cat", "Big dog!")), Answer("a tall man", "man", "", ("man",))]
    scores = metrics.of_answers(found, [], ["answer_f1", "answer_em"])
    assert (scores["answer_em"]["score"], round(scores["answer_f1"]["score"], 2)) == (50, 83.33)


# ---- significance


def test_mcnemar(tmp_path):
    """By hand: 1 won and 6 lost of 7 have the two-sided probability 2 * (1 + 7) / 2**7."""
    found = scorer("sentence_prediction", tmp_path)
    test = found.test(["b", *"a" * 9], ["a", *"b" * 6, *"a" * 3], ["a"] * 10)
    assert test["p_value"] == pytest.approx(0.125) and (test["baseline"], test["score"]) == (90, 40)
    assert found.test(["b"], ["b"], ["a"])["p_value"] == 1


def test_answers_compared(tmp_path):
    """In the first metric of the task; capitals do not count; STS-B's numbers are those before they were rounded."""
    for corpus, answers, before, after, right, metric in (
        ("rte", [[]] * 4, ["x"] * 4, ["Entailment", "Not_entailment"] * 2, ["entailment", "not_entailment"] * 2, "acc"),
        ("stsb", [["1.1"], ["2.3"], ["4.0"]], ["3.0"] * 3, ["1.1", "2.3", "4.0"], ["1.2", "2.2", "4.0"], "Pearson"),
        ("aeslc", [[]] * 3, ["x"] * 3, ["a b", "c", "d"], ["a b", "c", "d"], "ROUGE-L"),
    ):
        write(tmp_path / "test.answers", (json.dumps(["", known]) for known in answers))
        found = scorer("text_to_text", tmp_path, corpus=corpus).test(before, after, right)
        assert found["metric"].startswith(metric) and (found["baseline"], found["score"]) == (0, 100)
        assert found["p_value"] < 0.3


def corpora(sentences, worse, seed=1):
    """Sentences of words, and two outputs for them: each word is wrong with a probability of 0.3, and of `worse`."""
    rng = random.Random(seed)
    wanted = [" ".join(rng.choice("abcdefgh") for _ in range(rng.randint(5, 12))) for _ in range(sentences)]

    def damaged(share):
        return [" ".join("x" if rng.random() < share else word for word in line.split()) for line in wanted]

    return damaged(0.3), damaged(worse), wanted


def test_the_bootstrap(tmp_path):
    """Two-sided, of 10,000 resamples: small enough for any correction; by its definition, with sacreBLEU's scores."""
    found = scorer("translation", tmp_path, lowercase=True)
    before, after, wanted = corpora(40, 0.35)
    test, mirrored = found.test(before, after, wanted), found.test(after, before, wanted)

    def bleu(written, at):
        return found.bleu().corpus_score([written[i] for i in at], [[wanted[i] for i in at]]).score

    assert test["baseline"] == round(bleu(before, range(40)), 2) and test["score"] == round(bleu(after, range(40)), 2)
    assert test["p_value"] == mirrored["p_value"] and 0.05 < test["p_value"] < 0.9
    assert "case:lc" in test["signature"] and "|samples:10000|" in test["signature"]
    draws = numpy.random.default_rng(7).integers(40, size=(400, 40))
    measured, differences = test["score"] - test["baseline"], [bleu(after, d) - bleu(before, d) for d in draws]
    share = sum(abs(d - measured) >= abs(measured) for d in differences) / len(differences)
    assert abs(share - test["p_value"]) < 4 * (0.25 / 400) ** 0.5
    before, after, wanted = corpora(200, 0.8)
    assert found.test(before, after, wanted)["p_value"] < 0.05 / 300  # Holm's, of 300 tests


def test_no_difference_is_not_significant(tmp_path):
    """Of equal translations; of others that have the same scores; and where each is better once."""
    good, bad, found = "a b c d", "x x x x", scorer("translation", tmp_path, lowercase=True)
    for before, after in (([good, good], [good, good]), ([bad, bad], ["y", "z"]), ([good, bad], [bad, good])):
        assert found.test(before, after, [good.upper()] * 2)["p_value"] == 1


def test_a_baseline_was_scored_on_the_same_test_set(tmp_path, monkeypatch):
    """A baseline that was not, or not yet, is refused before anything else; another --average is a note alone."""
    data, base = make_data(tmp_path / "data", subwords="bpe", lowercase=None), tmp_path / "base"
    run = make_run(tmp_path / "run", data)
    base.mkdir()
    write(data / "test.de", ["eins"])

    def run_command(argv, log):
        raise steps.UserError(" ".join(map(str, argv)))

    monkeypatch.setattr(score, "run_command", run_command)
    said = f"--baseline {base}: not evaluated yet, or on another test set; evaluate it first"
    refused(score.main, run, "--baseline", base, part=said)
    steps.dump(base / "evaluation" / "scores.json", {"references": text.digest(data / "test.de")})
    for right, option, value, part in (
        ("eins", "--baseline", base, "average_checkpoints.py .*--num-update-checkpoints 5"),  # the next step
        ("zwei", "--baseline", base, said),
        ("zwei", "--context-window", 3, "--context-window: not for translation; leave it out"),
        ("zwei", "--average", 0, "fairseq-generate .* --path .*checkpoint_best.pt"),
    ):
        write(data / "test.de", [right])
        refused(score.main, run, option, value, part=part)
    refused(score.main, base, part=f"{base}: no run of train.sh")
    assert sorted(path.name for path in run.iterdir() if path.suffix != ".log" and path.name[0] != ".") == ["run.json"]


# ---- translate.sh


@pytest.fixture
def translator(small_data, tmp_path, capsys, monkeypatch):
    """A run on data of a name without a model: what translate.sh would start, and gives it, for lines of text."""

    def lines_of(name, said, *argv):
        run, given_lines = make_run(tmp_path / "run", small_data(name), "pairs_cpu"), []
        capsys.readouterr()  # what preparing it has printed

        def shell(command, given=""):
            given_lines.append(given)
            rows = enumerate(given.split("\n")[:-1])
            return "".join(f"{mark}-{i}\t-1\t{line}\n" for i, line in rows for mark in "HD")

        monkeypatch.setattr(translate, "shell", shell)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said.encode("utf-8", "surrogateescape"))))
        monkeypatch.setattr(translate, "best_checkpoint", lambda folder: Path("model.pt"))
        translate.main([str(run), *argv])
        out, error = capsys.readouterr()
        return out, "".join(given_lines), [shlex.split(line[2:]) for line in error.splitlines() if line[:2] == "+ "]

    return lines_of


@pytest.mark.parametrize("name", ["wmt", "pieces", "mails", "dialogues"])
def test_what_is_translated_is_as_prepared(translator, small_data, name):
    """translate.sh gives the model the subwords that prepare.sh made of the same text."""
    data = small_data(name)
    side = steps.load(data / "settings.json")["src"]
    own = data.parent / "text" / f"test.{side}"  # before it was lowercased
    source = own if own.exists() else data / "raw" / own.name
    _, given, (*normalise, interactive) = translator(name, source.read_text())
    for program in normalise:
        given = subprocess.run(program, input=given, capture_output=True, text=True, check=True).stdout
    parser = options.get_interactive_generation_parser()
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, interactive[1:]))
    found = given.splitlines()
    for tool in filter(None, (encoders.build_tokenizer(cfg.tokenizer), encoders.build_bpe(cfg.bpe))):
        found = list(map(tool.encode, found))
    assert found == [*text.lines(data / "sub" / f"test.{side}")]


def test_a_lone_beginning_of_a_word_stays(small_data, tmp_path):
    """Behind a cut: fairseq would not find it anew in the text."""
    model = small_data("pieces") / "pieces.model"
    split = prepare.pieces_of(model)
    line = next(line for line in text.lines(small_data("pieces") / "text" / "train.en") if "\u2581" in split(line)[1:])
    most = split(line).index("\u2581", 1) + 2
    settings = {"src": "en", "tgt": "de", "lowercase": True, "subwords": "sentencepiece", "keep-end": None}
    (given,) = translate.as_prepared(line, {**settings, "truncate-source": most}, model)
    assert given.split() == split(line)[: most - 1] and given.endswith(" \u2581")


def test_lines_to_translate(translator):
    """One for each, an empty one for an empty one; each tool sees one line; flags go to fairseq-interactive."""
    out, given, programs = translator("wmt", "\ufeff A\u2028 B\x85c \n\nd", "--beam", "1", "--", "--max-len-b", "20")
    assert given == "A B c\nd\n" and out == "A B c\n\nd\n"
    assert "--beam 1 " in " ".join(programs[-1]) and "--max-len-b 20" in " ".join(programs[-1])
    assert translator("wmt", "\n\n")[:2] == ("\n\n", "") and translator("wmt", "")[:2] == ("", "")
    with pytest.raises((steps.UserError, UnicodeError)):
        translator("wmt", "a\udcff")


def test_what_is_not_translated(tmp_path):
    run, data = tmp_path / "run", make_data(tmp_path / "data")
    refused(translate.main, tmp_path / "no", part="no: no such folder")
    refused(translate.main, data, part=f"{data}: is a folder of data; name a run|no run of train.sh")
    make_run(run, data)
    refused(translate.main, run, part="run: has no checkpoint_best.pt; name a run .* that has come to a validation")
    steps.dump(data / "settings.json", {"task": "language_modeling"})
    make_run(run, data, "ptb_cpu")
    refused(translate.main, run, part="was trained for language_modeling; translate.sh needs pairs of text")
