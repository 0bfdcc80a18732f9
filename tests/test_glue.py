"""GLUE and SuperGLUE as text: every task's form, labels and metrics; fine-tuning in two stages."""

import gzip
import itertools
import json
import subprocess
import sys

import pytest
from helpers import refused

from recipes import examples, metrics, prepare, render, tasks
from recipes.command import ROOT, UserError
from recipes.corpora import CORPORA
from recipes.metrics import Answer
from recipes.tables import TABLES

pytestmark = pytest.mark.usefixtures("recipes_environment", "preprocess_here")
PASSAGE = "Ann met Bob.\n@highlight\nBob ran"
MULTIRC = {"text": f"<b>{PASSAGE}</b><br>", "questions": [{"question": "Who?", "idx": 0, "answers": [
    {"text": "Ann", "label": 1}, {"text": "Eve", "label": 0}]}]}  # fmt: skip
NEWS = f"Ann met Bob\n@highlight\n{PASSAGE}"
RECORD = {"passage": {"text": NEWS, "entities": [{"start": 0, "end": 2}, {"start": 8, "end": 10}]},
          "qas": [{"query": "@placeholder ran", "answers": [{"text": "Bob"}, {"text": "Bobby"}]}]}  # fmt: skip
WSC = {"text": "Ann saw it, as it barked.", "label": True, "target": {
    "span1_text": "ann", "span1_index": 0, "span2_text": "it", "span2_index": 4}}  # fmt: skip
# {task: files of a row, and what it becomes}
ROWS = {
    "sst2": ("tsv", "sentence\tlabel\na film \t1", ["sst2 sentence: a film => positive"]),
    "cola": ("tsv", 'gj04\t0\t*\tHe "go.', ['cola sentence: He "go. => unacceptable']),
    "mrpc": ("tsv", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\ta\tb",
             ["mrpc sentence1: a sentence2: b => equivalent"]),
    "stsb": ("csv", "g\tf\t2012\t1\t3.75\ta\tb\tmore", ["stsb sentence1: a sentence2: b => 3.8"]),
    "qqp": ("tsv", "id\tquestion1\tquestion2\tis_duplicate\n1\ta?\tb?\t0",
            ["qqp question1: a? question2: b? => not duplicate"]),
    "mnli": ("tsv", "sentence1\tsentence2\tgold_label\na\tb\tneutral",
             ["mnli hypothesis: b premise: a => neutral"] * 2),
    "qnli": ("tsv", "index\tquestion\tsentence\tlabel\n0\ta?\tb\tentailment",
             ["qnli question: a? sentence: b => entailment"]),
    "rte": ("tsv", "0\ta\tb\tnot_entailment", ["rte sentence1: a sentence2: b => not entailment"]),
    "boolq": ("jsonl", {"passage": "a", "question": "b", "label": False}, ["boolq passage: a question: b => False"]),
    "cb": ("jsonl", {"premise": "a", "hypothesis": "b", "label": "contradiction"},
           ["cb hypothesis: b premise: a => contradiction"]),
    "copa": ("jsonl", {"premise": "a", "choice1": "b", "choice2": "c", "question": "cause", "label": 1},
             ["copa choice1: b choice2: c premise: a question: cause => choice2"]),
    "multirc": ("jsonl", {"passage": MULTIRC}, [f"multirc question: Who? answer: {name} paragraph: {PASSAGE} => {right}"
                                               for name, right in (("Ann", "True"), ("Eve", "False"))]),
    "record": ("jsonl", RECORD,
               ["record query: @placeholder ran entities: Ann, Bob passage: Ann met Bob. Ann met Bob. Bob ran => Bob"]),
    "wic": ("jsonl", {"word": "w", "sentence1": "a", "sentence2": "b", "label": True},
            ["wic sentence1: a sentence2: b word: w => True"]),
    "wsc": ("jsonl", WSC, ["wsc text: * Ann * saw it, as # it # barked. => True"]),
}  # fmt: skip
FILES = {"mrpc": ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt"), "stsb": ("sts-train.csv", "sts-dev.csv"),
         "mnli": ("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv")}  # fmt: skip


def write(folder, task, contents=None):
    """The files of a task, each of the same row."""
    kind, row, _ = ROWS[task]
    text = contents or (json.dumps(row) if kind == "jsonl" else row)
    for name in FILES.get(task, ("train.jsonl", "val.jsonl") if kind == "jsonl" else ("train.tsv", "dev.tsv")):
        lines = text.split("\n")
        several = [*lines[:-1], lines[-1], lines[-1]] if "train" in name else lines  # one is held out
        (folder / name).write_text("\n".join(several) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("task", ROWS)
def test_the_form_of_a_task(tmp_path, task):
    """With the files of the suite's own archives, and T5's prefixes and words."""
    found = examples.read(CORPORA[task], write(tmp_path, task), 0)
    wanted = [" ".join(line.split()) for line in ROWS[task][2]]
    assert [f"{pair.source} => {pair.target}" for pair in found["test"]] == wanted
    assert all(found.values())


def test_broken_rows(tmp_path, capsys):
    """QQP's training set has questions with a line break: each leaves two rows that are no examples."""
    task = "qqp"
    broken = '2\t"When was\n\tWhere?\t1'
    heading, row = ROWS[task][1].split("\n")
    write(tmp_path, task, "\n".join([heading, broken, row]))
    found = examples.read(CORPORA[task], tmp_path, 0)
    assert {f"{pair.source} => {pair.target}" for split in found.values() for pair in split} == {*ROWS[task][2]}
    assert capsys.readouterr().out.count(": 2 row(s) with fewer than 4 columns are left out\n") == 2  # of each file


def test_every_task_has_a_column():
    tasks = {name for name, corpus in CORPORA.items() if corpus.scores}
    assert tasks == set(ROWS) == {d.name for table in ("glue", "superglue") for d in TABLES[table].datasets}
    for table in ("glue", "superglue", "glue_cpu"):
        assert all(set(d.figures) <= set(CORPORA[d.name].scores) for d in TABLES[table].datasets)


@pytest.mark.parametrize(
    "task, contents, parts",
    [
        ("sst2", "sentence\tlabel\na\t2", ['train.tsv: line 2 has the label "2"', "one of 0, 1"]),
        ("sst2", "sentence\tlabels\na\t1", ["train.tsv: no column label; it has sentence, labels"]),
        ("cb", '{"premise": "a", "label": "neutral"}', ["train.jsonl: no column hypothesis", "premise"]),
        ("cb", json.dumps({"n" * 99: "", "m" * 99: ""}), [f"no column label; it has {'n' * 99}…"]),
        ("cb", '{"premise": "\\ud800", "hypothesis": "\\udbff x"}', ["line 1 has half of a surrogate pair"]),
        ("stsb", "g\tf\t2012\t1\tgood\ta\tb", ['line 1 has the score "good"', "a number"]),
        ("record", '{"passage": {}}', ["train.jsonl: a row has no 'text'"]),
        ("cola", "gj04\t1", ["line 1 has 2 column(s), not 4 (code, label, star, sentence), divided by tabs"]),
        (
            "wsc",
            '{"text": "a", "target": "b", "label": true}',
            ["train.jsonl: a row has another form than those of wsc"],
        ),
        ("wsc", json.dumps({**WSC, "text": "Ann barked"}), ['train.jsonl: line 1: the text has no "it"; remove it']),
    ],
)
def test_prepare_refuses(tmp_path, task, contents, parts):
    folder = tmp_path / "text"
    folder.mkdir()
    write(folder, task, contents)
    refused(prepare.main, task, tmp_path / "out", "--from", folder, parts=parts)
    assert list(tmp_path.iterdir()) == [folder]


def test_rte_of_superglue(tmp_path):
    """The same examples under other names, and as JSON."""
    row = {"premise": "a", "hypothesis": "b", "label": "not_entailment", "idx": 0}
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    found = examples.read(CORPORA["rte"], tmp_path)
    assert found["test"][0][:2] == ("rte sentence1: a sentence2: b", "not entailment")


@pytest.mark.parametrize("subwords", ["sentencepiece", "bpe"])
def test_labels_that_no_model_could_write(subwords, tmp_path):
    """A second stage has the first one's words. Labels are checked before anything is written."""
    text, first, second = tmp_path / "text", tmp_path / "first", tmp_path / "second"
    text.mkdir()
    write(text, "rte", "sentence1\tsentence2\tlabel\na\tb\tentailment\nc\td\tnot_entailment\n")
    words = "not entailment\ntraining\n" * 20
    (first / "bin").mkdir(parents=True)
    (first / "bin" / "done").touch()
    (first / "words").write_text(words)
    if subwords == "bpe":
        from subword_nmt.learn_bpe import learn_bpe

        with open(first / "words") as lines, open(first / "codes", "w") as codes:
            learn_bpe(lines, codes, 20)
    else:
        script = [sys.executable, ROOT / "scripts" / "sentence_pieces.py", "train", 16, first / "words"]
        done = subprocess.run([*map(str, script)], capture_output=True)
        assert done.returncode == 0, done.stderr
        (first / "pieces.model").write_bytes(done.stdout)
    split = prepare.subwords_of(first, subwords)
    (first / "settings").write_text(f"task=denoising\nsrc=source\ntgt=target\nsubwords={subwords}\n")
    wanted = {*split("entailment"), *split("not entailment")}
    last = split("not entailment")[0]
    (first / "bin" / "dict.target.txt").write_text("".join(f"{word} 1\n" for word in wanted - {last}))
    said = [f'--like {first}: its words have no {last}, and the label "not entailment" of rte is written']
    refused(prepare.main, "rte", second, "--from", text, "--like", first, parts=said)
    assert not second.exists()
    (first / "bin" / "dict.target.txt").write_text("".join(f"{word} 1\n" for word in wanted))
    options = prepare.options_of(CORPORA["rte"], {"like": first}, "source", "target")
    prepare.check_labels(CORPORA["rte"], options)


def test_marks_of_wsc(tmp_path):
    """Of several equal words the one that is meant, also where the number is one off or one span lies in the other."""
    rows = [
        ("They use it; it helps", ("They", 0), ("it", 3), "* They * use it; # it # helps"),
        ("They use it now", ("They", 0), ("it", 1), "* They * use # it # now"),
        ("Seen by their\nmother", ("their mother", 2), ("their", 2), "Seen by * # their # mother *"),
        ("Seen by their mother", ("mother", 3), ("their mother", 2), "Seen by # their * mother * #"),
    ]
    for text, (noun, first), (pronoun, second), wanted in rows:
        target = {"span1_text": noun, "span1_index": first, "span2_text": pronoun, "span2_index": second}
        row = {"text": text, "target": target, "label": False}
        found = examples.read(CORPORA["wsc"], write(tmp_path, "wsc", json.dumps(row)))
        assert found["test"][0].source == f"wsc text: {wanted}"


def test_labels_beside(tmp_path):
    """WiC's own archive has them in a file of their own."""
    for name in ("train", "dev"):
        (tmp_path / f"{name}.data.txt").write_text("w\tN\t0-0\ta\tb\nv\tV\t0-0\tc\td\n")
        (tmp_path / f"{name}.gold.txt").write_text("T\nF\n")
    assert [pair.target for pair in examples.read(CORPORA["wic"], tmp_path, 5)["test"]] == ["True", "False"]
    for name in ("data", "gold"):  # one of them is compressed
        path = tmp_path / f"train.{name}.txt"
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
        assert len(examples.read(CORPORA["wic"], tmp_path, 5)["test"]) == 2
        path.write_bytes(gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes()))
        path.with_name(f"{path.name}.gz").unlink()
    (tmp_path / "train.gold.txt").rename(tmp_path / "gold")
    with pytest.raises(UserError, match="train.gold.txt.gz: no such file, nor train.gold.txt; it goes with "):
        examples.read(CORPORA["wic"], tmp_path, 5)
    (tmp_path / "gold").rename(tmp_path / "train.gold.txt")
    (tmp_path / "dev.gold.txt").write_text("T\n")
    with pytest.raises(UserError, match=r"dev.gold.txt: has 1 lines, and .*dev.data.txt has 2 lines"):
        examples.read(CORPORA["wic"], tmp_path, 5)


@pytest.mark.parametrize(
    "task, folder, counts",
    [
        ("sst2", "glue/SST-2", (60614, 6735, 872)),
        ("cola", "glue/CoLA", (7696, 855, 1043)),
        ("mrpc", "glue/MRPC", (3668, 408, 1725)),
        ("stsb", "glue/STS-B", (5174, 575, 1500)),
        ("rte", "glue/RTE", (2241, 249, 277)),
        ("cb", "superglue/CB", (225, 25, 56)),
        ("copa", "superglue/COPA", (360, 40, 100)),
        ("wic", "superglue/WiC", (4885, 543, 638)),
    ],
)
def test_the_real_tasks(real_text, task, folder, counts):
    found = examples.read(CORPORA[task], real_text(folder), 0)
    assert tuple(len(found[split]) for split in examples.SPLITS) == counts


# ---- metrics


def answers(written, wanted, groups=None):
    return [Answer(a, b, group, ()) for a, b, group in zip(written, wanted, groups or [""] * len(written))]


def scored(answers, labels, *names):
    return {name: figure["score"] for name, figure in metrics.of_answers(answers, labels, names).items()}


def test_an_answer_that_is_no_label():
    """It counts as wrong for every metric, and is counted."""
    found = answers(["yes", "no", "maybe", "yes"], ["yes", "no", "yes", "no"])
    scores = scored(found, ["no", "yes"], "accuracy", "f1", "macro_f1", "matthews")
    assert scores == {"accuracy": 50, "f1": 50, "macro_f1": 50, "matthews": 0, "no_label": 1}
    # a mean over classes, with no answer more for any of them: F1 of yes is 1/2, of no 2/3
    assert scored(found, ["no", "yes"], "macro_f1") == {"macro_f1": 58.33, "no_label": 1}


def test_numbers():
    """An answer that is none, or is off the scale, is the farther end of it."""
    found = answers(["1.0", "x", "3.0", "9.0"], ["1", "4", "3", "2"])
    assert scored(found, [], "pearson", "spearman")["no_label"] == 2
    as_wrong = answers(["1.0", "0", "3.0", "5"], ["1", "4", "3", "2"])
    assert scored(found, [], "pearson")["pearson"] == scored(as_wrong, [], "pearson")["pearson"]
    assert scored(answers(["1.0", "2.0"], ["2", "4"]), [], "pearson", "spearman")["pearson"] == 100
    assert scored(answers(["1.0", "1.0"], ["2", "4"]), [], "spearman")["spearman"] == 0


def test_groups():
    found = answers(["a", "b", "a"], ["a", "a", "a"], ["1", "1", "2"])
    assert scored(found, ["a", "b"], "all_of_group")["all_of_group"] == 50
    found = answers(["a", "b"], ["a", "a"], ["dev_matched.tsv", "dev_mismatched.tsv"])
    assert scored(found, ["a", "b"], "matched", "mismatched") == {"matched": 100, "mismatched": 0, "no_label": 0}


def test_the_best_of_several_answers():
    found = [Answer("the big dog", "cat", "", ("cat", "Big dog!")), Answer("a tall man", "man", "", ("man",))]
    scores = scored(found, [], "answer_f1", "answer_em")
    assert scores["answer_em"] == 50 and scores["answer_f1"] == pytest.approx(100 * (1 + 2 / 3) / 2, abs=0.01)


def test_answers_compared():
    """In the first metric, F1 of the last label; an answer that is no label is a wrong one, for both."""
    wanted = ["yes", "yes", "no"]
    before, after = (answers(written, wanted) for written in (["yes", "eh", "no"], ["yes", "yes", "no"]))
    found = metrics.compare_answers(before, after, ["no", "yes"], ["f1", "accuracy"])
    assert (found["metric"], found["baseline"], found["score"], found["p_value"]) == ("F1", 66.67, 100, 1)
    before, after = (answers(written * 9, wanted * 9) for written in (["yes", "no", "no"], ["yes", "yes", "no"]))
    assert metrics.compare_answers(before, after, ["no", "yes"], ["f1"])["p_value"] < 0.02


def test_the_permutation_test():
    """Against its definition: every exchange of outputs, and how many of the differences are as extreme."""
    before, after = [0, 1, 1, 2, 1, 2], [3, 1, 2, 0, 3, 2]

    def metric(values):  # not linear
        return max(values) / (1 + values.count(1) + values.count(2))

    differences = []
    for exchanged in itertools.product([False, True], repeat=6):
        sides = zip(*(pair[::-1] if swap else pair for swap, pair in zip(exchanged, zip(before, after))))
        old, new = map(list, sides)
        differences.append(metric(new) - metric(old))
    observed = differences[0]
    tails = sum(d <= observed for d in differences), sum(d >= observed for d in differences)
    found = metrics.paired_test("metric", metric, before, after)
    assert found["p_value"] == pytest.approx(2 * min(tails) / 64) and tails[0] != tails[1]


def test_a_run_compared_with_another(tmp_path):
    """As evaluate.sh does: capitals do not count, and STS-B's numbers are those before they were rounded."""
    (tmp_path / "settings").write_text("corpus=cola\n")
    rows = [{"group": "", "answers": []}] * 8
    (tmp_path / "test.answers").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    wanted = ["acceptable", "unacceptable"] * 4
    found = tasks.TextToText.test(tmp_path, wanted, ["acceptable"] * 8, [word.title() for word in wanted])
    assert (found["metric"], found["baseline"], found["score"]) == ("Matthews correlation", 0, 100)
    assert found["p_value"] < 0.3
    (tmp_path / "test.answers").write_text("{}\n")
    with pytest.raises(UserError, match="test.answers: has 1 lines, and the test set has 8; prepare the data anew"):
        tasks.TextToText.test(tmp_path, wanted, wanted, wanted)
    (tmp_path / "settings").write_text("corpus=stsb\n")
    rows = [{"group": "", "answers": [number]} for number in ("1.1", "2.3", "4.0")]
    (tmp_path / "test.answers").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = tasks.TextToText.test(tmp_path, ["1.2", "2.2", "4.0"], ["3.0"] * 3, ["1.1", "2.3", "4.0"])
    assert (found["metric"], found["baseline"], found["score"]) == ("Pearson correlation", 0, 100)


# ---- tables


def test_the_papers_tables():
    shown = render.results("glue")
    assert "| MRPC (F1/accuracy), paper |" in shown and "| 91.2/87.7 |" in shown and "| GLUE, paper |" in shown
    assert "| `transformer_plus` | not run | 70.7 |" in render.results("superglue")


def test_the_second_stage_begins_with_the_first():
    """All tasks of a model begin with its one run of the table before."""
    cell = next(TABLES["glue_cpu"].cells(["cb"], ["random"], [1]))
    assert cell.init().name == "wikitext2_spans-random-seed1"
    assert next(TABLES["multi30k_from_news_cpu"].cells(["en-de"], ["random"], [1])).init().dataset.name == "en-de"
    assert not TABLES["news_cpu"].first_stage(TABLES["multi30k"].datasets[1])
