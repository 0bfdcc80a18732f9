"""The recipes of language models and classifiers: from text to a figure, and what they say when they cannot."""

import csv
import dataclasses
import gzip
import json
import random
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, flag, refused

from benchmarks import timing
from recipes import (
    corpora,
    examples,
    prepare,
    render,
    reproduce,
    scoring,
    tables,
    tasks,
    train,
)
from recipes.command import UserError
from recipes.hyperparameters import RECIPES
from recipes.tables import TABLES

pytestmark = pytest.mark.usefixtures("recipes_environment", "preprocess_here")
WORDS = [f"w{i}" for i in range(30)]


def text(seed, lines, longest=12):
    """Lines of random words."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for _ in range(lines)]


# ---- data of language models


@pytest.fixture(scope="module")
def own_text(tmp_path_factory):
    """A corpus for `own`: one file compressed, with an empty line and words seen in training alone."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "train.txt").write_text("\n".join([*text("train", 200), "", "only here"]) + "\n")
    (folder / "valid.txt").write_text("\n".join(text("valid", 20)) + "\n")
    (folder / "test.txt.gz").write_bytes(gzip.compress(("\n".join([*text("test", 20), ""]) + "\n").encode()))
    return folder


@pytest.fixture(scope="module")
def lm_data(tmp_path_factory, own_text):
    """`own_text` in words."""
    return prepared(tmp_path_factory.mktemp("lm") / "words", own_text)


MINE = "classification"


def prepared(out, folder, *options, corpus="lm"):
    prepare.main([corpus, str(out), "--from", str(folder), "--workers", "1", *options])
    return out


def test_prepare_words(lm_data, own_text, capfd):
    """Each line with its end is binarised; a second call keeps it; another recipe is refused."""
    assert {p.name for p in (lm_data / "bin").iterdir()} >= {"done", "dict.txt", "train.bin", "valid.bin", "test.bin"}
    assert (lm_data / "text" / "test.txt").read_bytes() == gzip.open(own_text / "test.txt.gz").read()
    lines = (lm_data / "text" / "test.txt").read_text().splitlines()
    assert len(lines) == 21 and lines[-1] == ""
    tokens = sum(len(line.split()) + 1 for line in lines)
    assert tasks.word_count(lm_data / "text" / "test.txt") == tokens
    assert f"test.txt: 21 sents, {tokens} tokens" in (lm_data / "preprocess.log").read_text()
    assert scoring.read_data_settings(lm_data)["task"] == "language_modeling"
    prepared(lm_data, own_text)
    assert "reusing" in capfd.readouterr().out
    refused(prepare.main, "lm", lm_data, "--from", own_text, "--merges", "9", parts=["merges=", "merges=9"])


def test_prepare_subwords(tmp_path, own_text, capfd):
    """Several processes, a sample of a training text that fills a pipe."""
    folder, out = tmp_path / "large", tmp_path / "out"
    shutil.copytree(own_text, folder)
    with open(folder / "train.txt", "a") as file:
        file.write("a line beyond the sample\n" * 50000)
    prepare.main(["lm", str(out), "--from", str(folder), "--workers", "2", "--merges", "20", "--sample", "50"])
    pieces = (out / "sub" / "test.txt").read_text()
    assert "@@ " in pieces and pieces.replace("@@ ", "") == (out / "text" / "test.txt").read_text()
    assert len((out / "text" / "train.txt").read_text().splitlines()) == 50


@pytest.mark.parametrize(
    "name, contents, parts",
    [
        ("test.txt.gz", None, ["no test set", "test.txt, or .gz of it"]),
        ("valid.txt", b"\n\n", ["valid.txt", "has no text"]),
        ("valid.txt", "Stra\u00dfe\n".encode("latin1"), ["valid.txt", "not UTF-8", "iconv"]),
        ("valid.txt", b"text\n" * 50000 + b"\xdf\n", ["valid.txt", "not UTF-8", "iconv"]),
        ("test.txt.gz", gzip.compress(b"text\n" * 50)[:-9], ["test.txt was not made", "unexpected end of file"]),
    ],
    ids=["missing", "empty", "encoding", "encoding below", "truncated"],
)
def test_prepare_refuses_text(tmp_path, own_text, name, contents, parts):
    folder, out = tmp_path / "text", tmp_path / "out"
    shutil.copytree(own_text, folder)
    (folder / name).unlink()
    if contents:
        (folder / name).write_bytes(contents)
    refused(prepare.main, "lm", out, "--from", folder, parts=parts)
    assert not (out / "bin").exists() and not (out / "text" / name.replace(".gz", "")).exists()


def test_a_language_models_text_that_changed(tmp_path, own_text, capfd):
    """After a mistake all of it is read again; once it is prepared, another text is refused."""
    folder, out = tmp_path / "text", tmp_path / "out"
    shutil.copytree(own_text, folder)
    (folder / "valid.txt").write_bytes(b"\xef\xbb\xbfw1 \xff\n")
    argv = ["lm", str(out), "--from", str(folder), "--workers", "1"]
    refused(prepare.main, *argv, parts=["valid.txt", "not UTF-8"])
    (folder / "valid.txt").write_bytes(b"\xef\xbb\xbfw1 w2\n")
    (folder / "train.txt").write_bytes(b"\xef\xbb\xbfw1 w2 w3\n")
    prepare.main(argv)
    for split, line in (("train", "w1 w2 w3\n"), ("valid", "w1 w2\n")):  # without the byte-order mark
        assert (out / "text" / f"{split}.txt").read_text() == line
    (folder / "train.txt").write_text("an other text\n")
    refused(prepare.main, *argv, parts=["other settings", "its text has changed"])


def test_nothing_is_left_of_a_text_with_a_mistake(tmp_path, own_text):
    """What is left in raw/ would be taken for data made with other settings once the text is mended."""
    folder, out = tmp_path / "text", tmp_path / "out"
    shutil.copytree(own_text, folder)
    (folder / "valid.txt").write_bytes(b"w1 \xff\n")
    argv = ["spans", out, "--from", folder, "--words", "2", "--workers", "1"]
    refused(prepare.main, *argv, parts=["valid.txt", "not UTF-8"])
    assert not list(out.glob("raw/*"))


def test_another_split_of_a_text(tmp_path):
    """The same lines, of which another part validates."""
    lines = [f"{line}\n" for line in text("all", 40)]
    argv = ["lm", str(tmp_path / "out"), "--from", str(tmp_path), "--workers", "1"]
    for first, last in ((0, 20), (0, 25)):
        for name, part in (("test", lines[30:]), ("train", lines[first:last]), ("valid", lines[last:30])):
            (tmp_path / f"{name}.txt").write_text("".join(part))
        if last == 20:
            prepare.main(argv)
    refused(prepare.main, *argv, parts=["other settings", "its text has changed"])


def test_folders_of_several_corpora(tmp_path):
    """The nearest files count, of one folder alone; a file that is there twice is taken once."""
    for folder in ("CoLA", "SST-2", "mine/out/raw", "mine/cnn/dm"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("CoLA/dev.tsv", "SST-2/dev.tsv", "mine/out/raw/dev.tsv", "mine/out/raw/dev.tsv.gz"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match="has dev.tsv in CoLA, SST-2; name one of these folders by --from"):
        corpora.find(tmp_path, ["**/dev.tsv"])
    assert corpora.find(tmp_path / "mine", ["**/dev.tsv"]) == [tmp_path / "mine" / "out" / "raw" / "dev.tsv"]
    (tmp_path / "mine" / "cnn" / "dev.tsv.gz").touch()
    assert corpora.find(tmp_path / "mine", ["**/dev.tsv"]) == [tmp_path / "mine" / "cnn" / "dev.tsv.gz"]


def test_prepare_lm_refuses(tmp_path):
    refused(prepare.main, "lm", tmp_path / "x", parts=["lm", "--from"])
    refused(prepare.main, "ptb2", tmp_path / "x", parts=["ptb2", "wikitext103"])
    refused(
        prepare.main,
        "ptb",
        tmp_path / "x",
        "--from",
        tmp_path,
        parts=["no train set of ptb", "ptb.train.txt or train.txt"],
    )
    (tmp_path / "ptb.train.txt").write_text("an other text\n")
    for split in ("valid", "test"):
        shutil.copy(tmp_path / "ptb.train.txt", tmp_path / f"ptb.{split}.txt")
    parts = ["ptb.train.txt", "not the text of this corpus", "SHA-256"]
    refused(prepare.main, "ptb", tmp_path / "x", "--from", tmp_path, parts=parts)
    assert not (tmp_path / "x" / "text" / "train.txt").exists()


def test_a_corpus_from_its_home(tmp_path, monkeypatch):
    """Downloaded, checked, unpacked; a changed archive is refused and removed. From an archive at hand, too."""
    site, folder = tmp_path / "site", tmp_path / "site" / "wikitext-2"
    folder.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (folder / f"wiki.{split}.tokens").write_text(" \n = A = \n")
    subprocess.run([sys.executable, "-m", "zipfile", "-c", "w.zip", "wikitext-2"], cwd=site, check=True)
    archive = site / "w.zip"
    corpus = dataclasses.replace(corpora.CORPORA["wikitext103"], home=f"file://{site}", urls=["w.zip"])
    monkeypatch.setitem(corpora.CORPORA, "wikitext103", corpus)
    wanted = {"wikitext103/w.zip": corpora.sha256(archive)}
    monkeypatch.setattr(corpora, "CHECKSUMS", wanted)
    monkeypatch.setattr(prepare, "binarise_text", lambda *args: None)
    out = tmp_path / "out"
    prepare.main(["wikitext103", str(out)])
    assert (out / "text" / "valid.txt").read_text() == " \n = A = \n"
    (out / "archives" / "w.zip").unlink()  # as after a disk that was full when it was unpacked
    shutil.rmtree(out / "text")
    prepare.main(["wikitext103", str(out)])
    assert (out / "archives" / "w.zip").exists()
    prepare.main(["wikitext103", str(tmp_path / "other"), "--from", str(site)])
    assert (tmp_path / "other" / "text" / "test.txt").exists()
    wanted["wikitext103/w.zip"] = "0" * 64
    refused(prepare.main, "wikitext103", tmp_path / "new", parts=["w.zip", "SHA-256", "removed", "--from"])
    assert not (tmp_path / "new" / "archives" / "w.zip").exists() and not list((tmp_path / "new" / "text").glob("*"))


@pytest.mark.parametrize("corpus, tokens", [("ptb", 82430), ("wikitext2", 245569)])
def test_the_real_corpora(tmp_path, lm_corpora, corpus, tokens, monkeypatch):
    """Their texts have the checksums, and the counts of the literature, line ends included."""
    monkeypatch.setattr(prepare, "binarise_text", lambda *args: None)
    folder = {"ptb": "ptb", "wikitext2": "wikitext-2"}[corpus]
    prepare.main([corpus, str(tmp_path / "out"), "--from", str(lm_corpora / folder)])
    assert tasks.word_count(tmp_path / "out" / "text" / "test.txt") == tokens
    (tmp_path / "out" / "bin").mkdir()
    (tmp_path / "out" / "bin" / "done").touch()
    prepare.main([corpus, str(tmp_path / "out")])  # ready, also for who names no folder


def test_perplexity_by_word(tmp_path):
    """By hand: 3 words and 1 line end, in 6 pieces of 2 bits each, are 12 bits: 3 for each of the four."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "test.txt").write_text("a bcd ef\n")
    log = "Evaluated {} tokens in 0.1s (1 tokens/s)\n| Loss (base 2): 2.0000, Perplexity: 4.00\n"
    evaluation = tasks.LanguageModel(tmp_path, {}, RECIPES["ptb_cpu"], tmp_path, tmp_path)
    by_word = evaluation.figures(log.format(4))
    assert by_word["ppl"]["score"] == by_word["token_ppl"]["score"] == 4
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "test.txt").write_text("a b@@ cd e@@ f\n")
    scores = evaluation.figures(log.format(6))
    assert scores["ppl"]["score"] == 8 and scores["token_ppl"]["score"] == 4
    assert scores["ppl"]["signature"] == "words+lines:4|tokens:6|block:128|context:0"
    with pytest.raises(UserError, match="eval_lm.log: has no loss of the test set"):
        evaluation.figures("")
    with pytest.raises(UserError, match="5 of 6 tokens.*--tokens-per-sample"):
        evaluation.figures(log.format(5))


# ---- data of classifiers

LABELS = ("sport", "world")


def rows_of(seed, n):
    """n rows: the first word of a text tells its label."""
    rng = random.Random(seed)
    found = []
    for _ in range(n):
        label = rng.choice(LABELS)
        found.append([label, f"{'ball' if label == 'sport' else 'vote'}", " ".join(rng.choices(WORDS, k=6))])
    return found


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


@pytest.fixture(scope="module")
def own_examples(tmp_path_factory):
    """A corpus for `own`, with headings, sorted by label."""
    folder = tmp_path_factory.mktemp("examples")
    write_csv(folder / "train.csv", [["label", "title", "text"], *sorted(rows_of("train", 200))])
    write_csv(folder / "test.csv", rows_of("test", 40))
    # with a byte-order mark, as spreadsheets write it
    (folder / "test.csv").write_bytes(b"\xef\xbb\xbf" + (folder / "test.csv").read_bytes())
    return folder


@pytest.fixture(scope="module")
def class_data(tmp_path_factory, own_examples):
    return prepared(tmp_path_factory.mktemp("classes") / "own", own_examples, corpus=MINE)


def read(folder, split):
    """(label, text) of a prepared split."""
    lines = ((folder / "text" / f"{split}.{end}").read_text().splitlines() for end in ("label", "txt"))
    return list(zip(*lines))


def test_prepare_classes(class_data, own_examples, tmp_path, monkeypatch):
    """A tenth held out, shuffled, the same each time; the test set in its order; nothing lost."""
    train_set, valid, test = (read(class_data, split) for split in ("train", "valid", "test"))
    assert (len(train_set), len(valid), len(test)) == (180, 20, 40)
    everything = [(label, f"{title} {words}") for label, title, words in rows_of("train", 200)]
    assert sorted(train_set + valid) == sorted(everything) and train_set != sorted(train_set)
    assert test == [(label, f"{title} {words}") for label, title, words in rows_of("test", 40)]
    monkeypatch.setattr(prepare, "binarise_labels", lambda *args: None)
    again = prepared(tmp_path / "again", own_examples, "--examples", "50", "--valid", "7", corpus=MINE)
    assert len(read(again, "train")) == 43 and set(read(again, "train")) <= set(everything)
    assert read(again, "valid") == [*valid, *train_set][:7]
    for name in ("input0", "label"):
        assert {p.name for p in (class_data / "bin" / name).iterdir()} >= {"dict.txt", "train.bin", "test.idx"}
    assert len((class_data / "bin" / "label" / "dict.txt").read_text().splitlines()) == 2


def test_examples_that_changed(class_data, own_examples, tmp_path):
    """Prepared data are not taken for those of another text."""
    folder = tmp_path / "changed"
    shutil.copytree(own_examples, folder)
    refused(prepare.main, MINE, class_data, "--from", folder, parts=["other settings", f"from={own_examples}"])
    kept = (own_examples / "test.csv").read_bytes()
    write_csv(own_examples / "test.csv", rows_of("others", 40))
    refused(prepare.main, MINE, class_data, "--from", own_examples, parts=["other settings", "its text has changed"])
    (own_examples / "test.csv").write_bytes(kept)
    prepared(class_data, own_examples, corpus=MINE)


def test_a_dry_run_writes_nothing(own_examples, tmp_path, dry, capsys):
    prepared(tmp_path / "out", own_examples, corpus=MINE)
    assert "fairseq-preprocess" in capsys.readouterr().out and not any(tmp_path.iterdir())


def test_clean():
    assert examples.clean("Oil\\at  #36;50 &lt;b&gt;a  barrel&lt;/b&gt;<br /><br />AT&amp;T 2<3 C#5;") == (
        "oil at $50 a barrel at&t 2<3 c#5;"
    )


@pytest.mark.parametrize(
    "corpus, name, contents, parts",
    [
        (
            "classification",
            "test.csv",
            "sport,a ball\nmusic,a song\n",
            ["test set has the label music", "sport, world", "a song"],
        ),
        (MINE, "train.csv", 'sport,a ball\nworld," "\n', ["train.csv: line 2 has an empty text"]),
        (MINE, "test.csv", "sport,a ball\nworld\n", ["line 2 has 1 column(s), not 2 (label, text), divided by commas"]),
        (MINE, "test.csv", "two words,a ball\n", ["test.csv: line 1", 'the label "two words"', "one word"]),
        (MINE, "test.csv", "", ["test.csv: has no examples"]),
        (MINE, "test.csv", None, ["no test set", "test.csv or test.tsv"]),
        ("agnews", "train.csv", "5,title,text\n", ['line 1 has the label "5"', "one of 1, 2, 3, 4"]),
        ("agnews", "train.csv", "5,title\n", ["line 1 has 2 column(s), not 3"]),
        (
            "classification",
            "test.csv",
            'sport,"a ball\nsport,a ball\n',
            ["test.csv: the row from line 1 on", "stray quote"],
        ),
        (
            "classification",
            "test.csv",
            'sport,a\nsport,"b" c\nworld,d\n',
            ["test.csv: the row from line 2 on", "doubled"],
        ),
        ("agnews", "train.csv", "12,title,text\n", ['line 1 has the label "12"', "one of 1, 2, 3, 4"]),
        (
            "classification",
            "test.csv",
            "sport,Stra\u00dfe\n".encode("latin1"),
            ["test.csv: line 1 is not UTF-8", "iconv"],
        ),
    ],
)
def test_prepare_refuses_examples(tmp_path, own_examples, corpus, name, contents, parts):
    folder, out = tmp_path / "text", tmp_path / "out"
    shutil.copytree(own_examples, folder)
    (folder / name).unlink()
    if contents is not None:
        (folder / name).write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    refused(prepare.main, corpus, out, "--from", folder, parts=parts)
    assert not out.exists()


def test_a_validation_set_beside_valid(tmp_path, own_examples):
    folder = tmp_path / "text"
    shutil.copytree(own_examples, folder)
    shutil.copy(folder / "test.csv", folder / "valid.csv")
    refused(prepare.main, MINE, tmp_path / "out", "--from", folder, "--valid", "5", parts=["--valid 5", "leave it out"])


def test_labels_of_another_text(tmp_path):
    """AG News at hand is not checked by SHA-256; so the settings say which text it was."""
    for name, n in (("first", 20), ("other", 30)):
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            write_csv(tmp_path / name / f"{split}.csv", [[i % 4 + 1, "title", f"text {i}"] for i in range(n)])
    prepared(tmp_path / "out", tmp_path / "first", corpus="agnews")
    argv = ["agnews", tmp_path / "out", "--from"]
    refused(prepare.main, *argv, tmp_path / "other", parts=["other settings", "its text has changed"])


def test_headings(tmp_path, capsys):
    """Known by their name, unless it is a label: of the other examples, or of the training set."""
    for split, first in (("train", "classical,a"), ("test", "classical,c")):
        write = (tmp_path / f"{split}.csv").write_text
        write(f"{first}\nrock,b\nlabel,a song\nclassical,d\n")
    (tmp_path / "valid.csv").write_text("label,a song\nrock,b\n")
    found = examples.read(corpora.CORPORA["classification"], tmp_path)
    assert {split: len(rows) for split, rows in found.items()} == {"train": 4, "valid": 2, "test": 4}
    assert capsys.readouterr().out == ""
    (tmp_path / "test.csv").write_text('"Class Index","text"\nrock,b\n')
    found = examples.read(corpora.CORPORA["classification"], tmp_path)
    assert [example[:2] for example in found["test"]] == [("b", "rock")]
    assert "test.csv: line 1 is taken for headings" in capsys.readouterr().out
    (tmp_path / "train.csv").write_text("genre,text\nrock,b\nrock,c\n")
    examples.read(corpora.CORPORA["classification"], tmp_path)
    assert 'no other line has the label "genre" of line 1' in capsys.readouterr().out


def test_imdb_folder(tmp_path):
    """The corpus as it is unpacked: a file for each review."""
    for split in ("train", "test"):
        for name, word in (("pos", "good"), ("neg", "bad")):
            folder = tmp_path / "aclImdb" / split / name
            folder.mkdir(parents=True)
            for i in range(3):
                (folder / f"{i}_7.txt").write_text(f"{word} film {i}")
    found = examples.read(corpora.CORPORA["imdb"], tmp_path, valid=1)
    assert {split: len(rows) for split, rows in found.items()} == {"train": 5, "valid": 1, "test": 6}
    every = [example for rows in found.values() for example in rows]
    assert all(example.target == ("1" if example.source.startswith("good") else "0") for example in every)


def test_the_real_classes(classification_corpora):
    """AG News and IMDb as they are at hand: every row is read, and the held out ones are of all classes."""
    for corpus, folder, sizes in (("agnews", "ag_news", (18000, 2000, 7600)), ("imdb", "imdb", (4500, 500, 5000))):
        found = examples.read(corpora.CORPORA[corpus], classification_corpora / folder, examples=20000)
        assert tuple(map(len, found.values())) == sizes
        held_out = [example.target for example in found["valid"]]
        assert min(map(held_out.count, corpora.CORPORA[corpus].labels)) > 0.2 * 4 / 5 * len(held_out)
        assert not any("<br" in example.source for rows in found.values() for example in rows)


def test_mcnemar(tmp_path):
    """By hand: 1 won and 6 lost of 7 have the two-sided probability 2 * (1 + 7) / 2**7."""
    for name in ("data/text", "ours", "base"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "data" / "text" / "test.label").write_text("a\n" * 10)
    (tmp_path / "ours" / "test.predicted").write_text("a\n" + "b\n" * 6 + "a\n" * 3)
    (tmp_path / "base" / "test.predicted").write_text("b\n" + "a\n" * 9)
    test = tasks.Classification.compare(tmp_path / "data", tmp_path / "ours", tmp_path / "base")
    assert test["p_value"] == pytest.approx(0.125) and (test["baseline"], test["score"]) == (90, 40)
    (tmp_path / "base" / "test.predicted").write_text("b\n")
    with pytest.raises(UserError, match="base: not evaluated yet, or not on these data"):
        tasks.Classification.compare(tmp_path / "data", tmp_path / "ours", tmp_path / "base")


# ---- training and evaluation


@pytest.mark.parametrize(
    "arch, dataset, task, recipe",
    [
        ("transformer_lm_synth_random_ptb", "ptb", "language_modeling", "ptb_cpu"),
        ("transformer_lm_ptb", "wikitext2", "language_modeling", "wikitext2_cpu"),
        ("lightconv_lm_ptb", "ptb", "language_modeling", "ptb_cpu"),
        ("roberta_synth_dense_vanilla_agnews", "agnews", "sentence_prediction", "agnews"),
        ("roberta_linformer_imdb", "imdb", "sentence_prediction", "imdb"),
        ("transformer_synth_random_t5_tiny", "cb", "translation", "glue_cpu"),
        ("transformer_t5_base", "boolq", "translation", "superglue"),
    ],
)
def test_train_shows_its_command(arch, dataset, task, recipe, dry, capsys):
    train.main([arch, dataset, "--gpus", "0"])
    shown = capsys.readouterr().out
    assert (flag(shown, "--task") if "--task" in shown else "translation") == task and flag(shown, "--arch") == arch
    assert ("--source-lang" in shown) == (task == "translation")
    assert f"{ROOT}/data/{dataset}/bin" in shown and flag(shown, "--lr") == RECIPES[recipe].flags["lr"]
    assert flag(shown, "--max-update") == str(RECIPES[recipe].max_update)
    assert flag(shown, "--keep-interval-updates") == "1"


def test_train_refuses_data_of_another_task(tmp_path, lm_data):
    argv = ["roberta_agnews", "agnews", "--data", lm_data, "--save-dir", tmp_path / "run", "--gpus", "0"]
    refused(train.main, *argv, parts=[f"--data {lm_data}", "language_modeling", "sentence_prediction"])
    argv = ["roberta_agnews", "agnews", "--data", tmp_path, "--gpus", "0"]
    refused(train.main, *argv, parts=["not prepared", f"prepare.sh agnews {tmp_path}"])
    argv[1] = "mine"
    refused(train.main, *argv, parts=["not prepared", f"prepare.sh classification {tmp_path} --from"])


TINY_LM = "--decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-attention-heads 2".split()
TINY = "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2".split()


@pytest.fixture
def project(tmp_path, monkeypatch):
    for module in (reproduce, tables, render, timing):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path


def run_cell(project, monkeypatch, table, data, model, updates, *flags):
    """reproduce.sh with a small recipe on these data: the folder of the run and its record."""
    described = TABLES[table]
    monkeypatch.setattr(tables, "prepare", lambda *args: None)
    monkeypatch.setitem(TABLES, table, dataclasses.replace(described, data=str(data)))
    more = ["--max-update", str(updates), "--save-every", str(updates // 2), "--", *flags]
    reproduce.main([table, "--variant", model, "--seed", "1", "--out", str(project), "--", *more])
    run = project / "runs" / f"{table}-{described.datasets[0].name}-{model}-seed1-changed"
    record = json.loads((run / "result.json").read_text())
    assert record["command"].startswith(f"scripts/reproduce.sh {table} --variant {model} --seed 1 --rerun -- --max")
    assert record["updates"] == updates and len(record["curve"]["valid_loss"]) == 2
    assert not (project / "results").exists() and not (run / "evaluation.part").exists()
    return run, record


def test_a_language_model(project, lm_data, monkeypatch):
    """From data to perplexity: the figure is what fairseq-eval-lm prints, with all tokens counted."""
    flags = [*TINY_LM, "--tokens-per-sample", "32", "--synth-max-length", "32", "--lr", "0.02", "--warmup-updates", "5"]
    # two updates are an epoch, at whose end the recipe does not validate: the save after 11 is in the midst of one
    run, record = run_cell(project, monkeypatch, "ptb_cpu", lm_data, "random", 22, *flags)
    score = json.loads((run / "scores.json").read_text())["ppl"]
    tokens = tasks.word_count(lm_data / "text" / "test.txt")
    assert score["signature"] == f"words+lines:{tokens}|tokens:{tokens}|block:32|context:0"
    assert f"Perplexity: {score['score']:.2f}" in (run / "eval_lm.log").read_text()
    assert 5 < score["score"] == record["figures"]["ppl"] < 40  # 30 words and the end of a line
    assert record["curve"]["valid_ppl"][-1] < record["curve"]["valid_ppl"][0]
    kept = (run / "scores.json").read_text()
    refused(tasks.main, lm_data, run, "--context-window", "32", parts=["--context-window 32", "--tokens-per-sample"])
    refused(tasks.main, lm_data, run, "--beam", "4", parts=["--beam", "language_modeling", "leave it out"])
    refused(tasks.main, lm_data, project / "no", parts=[str(project / "no"), "train.sh"])
    refused(tasks.main, project, run, parts=["not prepared"])
    assert (run / "scores.json").read_text() == kept


def test_a_classifier(project, class_data, monkeypatch, capfd):
    """From data to accuracy: every label stands at the line of its example."""
    flags = [*TINY, "--num-classes", "2", "--lr", "0.01", "--warmup-updates", "5", "--dropout", "0"]
    run, record = run_cell(project, monkeypatch, "agnews_cpu", class_data, "dense_vanilla", 30, *flags)
    found = (run / "test.predicted").read_text().splitlines()
    labels = [label for label, _ in read(class_data, "test")]
    right = sum(a == b for a, b in zip(found, labels))
    assert len(found) == 40 and set(found) <= set(LABELS) and record["figures"]["accuracy"] == 100 * right / 40 > 90
    assert len(record["curve"]["valid_accuracy"]) == 2
    (run / "checkpoint_best.pt").unlink()
    refused(tasks.main, class_data, run, parts=["checkpoint_best.pt: no such file"])


# ---- tables


def test_steps_a_second(project, class_data, monkeypatch, capsys):
    """All models in turns on the same batches; the table shows the ratios beside the paper's."""
    monkeypatch.setattr(timing, "ROUNDS", 4)
    monkeypatch.setattr(tables, "prepare", lambda *args: None)
    table = dataclasses.replace(TABLES["agnews_cpu"], data=str(class_data), rows=("transformer", "linformer", "random"))
    monkeypatch.setitem(TABLES, "agnews_cpu", table)
    refused(reproduce.main, "agnews_cpu", "--time", "--variant", "random", parts=["--time", "--variant"])
    with monkeypatch.context() as patch:
        patch.setenv("DRY_RUN", "1")
        reproduce.main(["agnews_cpu", "--time", "--out", str(project)])
    assert not (project / "results" / "agnews_cpu" / "speed").exists()
    reproduce.main(["agnews_cpu", "--time", "--out", str(project)])
    record = json.loads((project / "results" / "agnews_cpu" / "speed" / "agnews.json").read_text())
    figures = record["figures"]
    assert list(figures) == ["transformer", "linformer", "random"] and figures["transformer"]["ratio"] == 1
    assert all(0.1 < f["lowest"] <= f["ratio"] <= f["highest"] < 10 for f in figures.values())
    shown = render.results("agnews_cpu")
    row = next(line for line in shown.splitlines() if line.startswith("| `linformer` |"))
    assert f"| {figures['linformer']['ratio']:.2f} |" in row and "86.50" in row and "1.09 (1.00)" in row
    assert "--time" in shown


def test_timing_knows_the_architectures(class_data):
    """Also in a process that has not met the plugin before."""
    argv = timing.command(RECIPES["agnews_cpu"], "linformer", TABLES["agnews_cpu"].datasets[0], class_data)
    code = f"from benchmarks import timing; timing.update({argv!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_papers_figures_stand_beside(project):
    shown = render.results("ptb_cpu")
    assert "| LM1B, paper |" in shown and "| `random_vanilla` | not run | 40.05 | not run |" in shown
    assert "| `lightconv_lm` |" not in shown and "Not run yet: `relative_random` (ours), `lightconv_lm`" in shown
    shown = render.results("table7")
    assert "| `factorized_random_vanilla` |" in shown and "0.80 (0.73)" in shown
