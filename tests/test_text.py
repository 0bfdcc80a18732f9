"""Text: every form that corpora come in is read, mistakes in them are refused, downloads are checked."""

import json
import re
import zipfile
from dataclasses import replace

import pytest
from helpers import assert_refused
from small_text import write

from recipes import examples, pairs, text
from recipes.catalog import CORPORA, SPLITS
from recipes.pairs import FilePair, Limits


def wsc(said, noun, first, pronoun, second):
    """A row of WSC: a noun and a pronoun, each with the number of its word."""
    target = {"span1_text": noun, "span1_index": first, "span2_text": pronoun, "span2_index": second}
    return {"text": said, "target": target, "label": True}


RECORD = {"passage": {"text": "Ann met Bob\n@highlight\nAnn met Bob.\n@highlight\nBob ran",
          "entities": [{"start": 0, "end": 2}, {"start": 8, "end": 10}]},
          "qas": [{"query": "@placeholder ran", "answers": [{"text": "Bob"}, {"text": "Bobby"}]}]}  # fmt: skip
# {task: a row, and what it becomes behind the task's name}
ROWS = {
    "sst2": ("sentence\tlabel\na film \t1", "sentence: a film => positive"),
    "cola": ('gj04\t0\t*\tHe "go.', 'sentence: He "go. => unacceptable'),
    "mrpc": ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\ta\tb",
             "sentence1: a sentence2: b => equivalent"),
    "stsb": ("g\tf\t2012\t1\t1.1\ta\tb\tmore", "sentence1: a sentence2: b => 1.2"),
    "qqp": ("id\tquestion1\tquestion2\tis_duplicate\n1\ta?\tb?\t0", "question1: a? question2: b? => not duplicate"),
    "mnli": ("sentence1\tsentence2\tgold_label\na\tb\tneutral", *["hypothesis: b premise: a => neutral"] * 2),
    "qnli": ("index\tquestion\tsentence\tlabel\n0\ta?\tb\tentailment", "question: a? sentence: b => entailment"),
    "rte": ("0\ta\tb\tnot_entailment", "sentence1: a sentence2: b => not entailment"),
    "rte, jsonl": ({"premise": "a", "hypothesis": "b", "label": "entailment"},
                   "sentence1: a sentence2: b => entailment"),
    "boolq": ({"passage": "a", "question": "b", "label": False}, "passage: a question: b => False"),
    "cb": ({"premise": "a", "hypothesis": "b", "label": "contradiction"}, "hypothesis: b premise: a => contradiction"),
    "copa": ({"premise": "a", "choice1": "b", "choice2": "c", "question": "cause", "label": 1},
             "choice1: b choice2: c premise: a question: cause => choice2"),
    "record": (RECORD, "query: @placeholder ran entities: Ann, Bob passage: Ann met Bob. Ann met Bob. Bob ran => Bob"),
    "wic": ({"word": "w", "sentence1": "a", "sentence2": "b", "label": True},
            "sentence1: a sentence2: b word: w => True"),
    "wsc": (wsc("Ann saw it, as it barked.", "ann", 0, "it", 4), "text: * Ann * saw it, as # it # barked. => True"),
    # of several equal words the one that is meant, also where the number is one off or a span lies in the other
    "wsc, one off": (wsc("They use it; it helps", "They", 0, "it", 3), "text: * They * use it; # it # helps => True"),
    "wsc, in 1": (wsc("By their\nmother", "their mother", 1, "their", 1), "text: By * # their # mother * => True"),
    "wsc, in 2": (wsc("By their mother", "mother", 2, "their mother", 1), "text: By # their * mother * # => True"),
}  # fmt: skip
FILES = {"mrpc": ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt"), "stsb": ("sts-train.csv", "sts-dev.csv"),
         "mnli": ("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv")}  # fmt: skip


def files_of(form):
    """{name: contents} of a task of the suites, all of one row; the training set has it twice, as one is held out."""
    row, (task, *_) = ROWS[form][0], form.split(",")
    names = ("train.tsv", "dev.tsv") if isinstance(row, str) else ("train.jsonl", "val.jsonl")
    rows = [row if isinstance(row, str) else json.dumps(row)]
    return {name: "\n".join([*rows, *rows[0].split("\n")[-1:] * ("train" in name)]) for name in FILES.get(task, names)}


def read(corpus, folder, history=5, limit=None):
    """The examples of a corpus in a folder."""
    files = text.find_corpus_files(CORPORA[corpus], folder, folder)
    return examples.read_examples(CORPORA[corpus], files, history, limit)


def as_lines(rows):
    """Examples as "source => target"."""
    return [f"{example.source} => {example.target}" for example in rows]


def test_pairs_that_are_left_out(tmp_path, capsys):
    """Each is counted with its reason; what some tools take for an end of a line is a blank."""
    write(tmp_path / "train.en", ["\ufeffA\u2028b", "", "c d e f", "G", "x y", "  "])
    write(tmp_path / "train2.en.gz", ["\x85h\x0c"])
    write(tmp_path / "train.de", ["A", "B", "C", "G", "1 2 3 4 5", "w"])
    write(tmp_path / "train2.de", ["H"])
    both, out = [tmp_path / "train", tmp_path / "train2"], tmp_path / "out"
    pairs.clean_pairs(both, out / "x", ("en", "de"), Limits(lowercase=True, max_ratio=3, max_length=4))
    assert (out / "x.en").read_text() == "a b\ng\nh\n"
    assert "3 pairs, left out: 2 empty, 1 of a length ratio over 3, 1 longer than 4 tokens\n" in capsys.readouterr().out
    pairs.clean_pairs(both, out / "y", ("en", "de"), Limits(sample=1))
    assert (out / "y.de").read_text() == "A\nH\n"
    write(tmp_path / "train.de", ["", " ", *[""] * 4])
    said = r"train: none of the 6 pairs can be used \(6 empty\)"
    assert_refused(lambda _: pairs.clean_pairs(both[:1], out / "z", ("en", "de"), Limits()), part=said)
    assert len([*out.iterdir()]) == 4


@pytest.mark.parametrize("total, words, density, span", [(103, 20, 0.15, 3), (38, 7, 0.9, 1), (3, 64, 0.15, 3)])
def test_spans(tmp_path, total, words, density, span):
    """What is left and what was taken out is the text, over the ends of lines; a short text is one block."""
    everything = [f"w{i}" for i in range(total)]
    write(tmp_path / "text", [*everything[:2], " ".join(everything[2:])])
    pairs.corrupt_spans(
        tmp_path / "text", tmp_path / "out", block_size=words, seed=1, density=density, span_length=span
    )
    rows = [*pairs.read_pairs(FilePair(tmp_path / "out.source", tmp_path / "out.target"))]
    assert len(rows) == max(total // words, 1)
    for number, (left, target) in enumerate(rows):
        block = everything[number * words : (number + 1) * words]
        spans = dict(re.findall(r"(<extra_id_\d+>) ([^<]+)", target))
        assert re.sub(r"<extra_id_\d+>", lambda mark, out=spans: out[mark[0]], left).split() == block
        taken = sum(len(out.split()) for out in spans.values())
        assert taken == min(max(round(len(block) * density), 1), len(block) - 1)
        assert len(spans) == min(max(round(taken / span), 1), len(block) - taken)


def test_multirc(tmp_path):
    """An example for each answer. What is held out has no paragraph of the training set, whatever its questions."""
    answers = [{"text": "Ann", "label": 1}, {"text": "Eve", "label": 0}]
    questions = [{"question": f"Who {i}?", "answers": answers} for i in range(5)]
    passages = [{"text": f"<b>Part {n // 2}.</b><br>So", "questions": questions} for n in range(40)]  # each in two rows
    for name, some in (("train", passages), ("val", passages[-1:])):
        write(tmp_path / f"{name}.jsonl", (json.dumps({"passage": passage}) for passage in some))
    found = read("multirc", tmp_path)
    said = "multirc question: Who 0? answer: {} paragraph: Part 19. So => {}"
    assert as_lines(found["test"])[:2] == [said.format("Ann", "True"), said.format("Eve", "False")]
    assert [e.group for e in found["test"]] == [f"1-Who {i // 2}?" for i in range(10)]
    train, valid = ({e.source.split("paragraph: ")[1] for e in found[split]} for split in ("train", "valid"))
    assert len(valid) == 2 and not train & valid and len(found["valid"]) == 40


@pytest.mark.parametrize("corpus, name, contents, part", [
    ("classification", "test.csv", "sport,a ball\nmusic,a song", 'no training example has the label music of "a'),
    ("classification", "train.csv", 'sport,a ball\nworld," "', "train.csv: line 2 has an empty text"),
    ("classification", "test.csv", "sport,a\nworld", r"line 2 has 1 column\(s\), not 2 \(label, text\).* commas"),
    ("classification", "test.csv", "two words,a ball", 'test.csv: line 1 has the label "two words".*one word'),
    ("classification", "test.csv", 'sport,"a ball\nsport,a ball', "test.csv: .* line 2 has a stray quote"),
    ("agnews", "train.csv", "12,title,text", 'line 1 has the label "12"; it must be one of 1, 2, 3, 4'),
    ("aeslc", "test.jsonl", '{"email": "a", "subject": null}', "test.jsonl: line 1 has an empty target; remove"),
    ("aeslc", "test.jsonl", '["a"]', "test.jsonl: line 1 is no JSON object"),
    ("sst2", "train.tsv", ROWS["sst2"][0], "sst2: has too few examples: the train set would be empty"),
    ("sst2", "dev.tsv", "sentence\tlabels\na\t1", "line 2: no row of sst2: KeyError 'label'; it has sentence, la"),
    ("stsb", "sts-dev.csv", "g\tf\t2012\t1\tgood\ta\tb", 'line 1 has the score "good"; it must be a number'),
    ("record", "val.jsonl", f'{json.dumps(RECORD)}\n{{"passage": {{}}}}',
     "val.jsonl: after line 1: no row of record: KeyError 'text'; it has another form"),
    ("wsc", "val.jsonl", json.dumps(wsc("Ann barked", "Ann", 0, "it", 4)), 'line 1: the text has no "it"; remove it'),
])  # fmt: skip
def test_examples_that_are_refused(tmp_path, corpus, name, contents, part):
    """In one line with the file and the line in it."""
    own = {"train.csv": "sport,a\nworld,b\n" * 5, "test.csv": "1,title,text", "train.jsonl": f"{EMAIL}\n{EMAIL}"}
    for file, given in {**(files_of(corpus) if corpus in ROWS else own), name: contents}.items():
        write(tmp_path / file, [given])
    assert_refused(lambda _: read(corpus, tmp_path), part=part)


def test_labelled_text(tmp_path):
    """Shuffled and held out by a fixed seed; the test set in its order, without headings and markup."""
    rows = [(("sport", "world")[i % 2], f"text {i}") for i in range(100)]
    write(tmp_path / "train.tsv", (f"{label}\t{said}\tmore" for label, said in rows))
    long = "c" * 140_000
    said = r"Oil\at  #36;50 or &#36;9 &lt;b&gt;a  barrel&lt;/b&gt;<br /><br />AT&amp;T 2<3 5>4 C#5;"
    write(tmp_path / "test.csv", ['"Class Index","text"', f"sport,{said}", f"world,{long}"])
    found, again = (read("classification", tmp_path, limit=50) for _ in range(2))
    assert found == again and [len(found[split]) for split in SPLITS] == [45, 5, 2]
    assert as_lines(found["test"]) == ["oil at $50 or $9 a barrel at&t 2<3 5>4 c#5; => sport", f"{long} => world"]
    everything = {f"{said} more => {label}" for label, said in rows}
    drawn = as_lines(found["valid"] + found["train"])
    assert {*drawn} <= everything and len({*drawn}) == 50 and drawn != sorted(drawn)
    assert as_lines(read("classification", tmp_path)["valid"])[:5] == as_lines(found["valid"])


MAIL = "Mail {0},\nof two lines.\n\n@subject\nThe {0}\n\n@ann0\nAnother"
SHORT = 'id\tquestion1\tquestion2\tis_duplicate\n2\t"When was\n\tWhere?\t1\n1\ta?\tb?\t0\n1\ta?\tb?\t0'
EMAIL = '{"email": "a b", "subject": "c"}'
WIC = "w\tN\t0-0\ta\tb\nv\tV\t0-0\tc\td", "T\nF"
WIC_PAIRS = ["wic sentence1: a sentence2: b word: w => True", "wic sentence1: c sentence2: d word: v => False"]
# {form: (corpus, files, the examples of its test set, what is said)}: other forms than those above; {} is each split
FORMS = {
    "a line break in a question, which leaves two rows that are no examples": (
        "qqp", {"{}.tsv": SHORT}, ["qqp question1: a? question2: b? => not duplicate"] * 2,
        ["train.tsv: 2 row(s) with fewer than 4 columns are skipped", "dev.tsv: 2 row(s)"]),
    "an empty side": (
        "aeslc", {"train.jsonl": "\n".join([EMAIL, EMAIL.replace('"c"', '""'), EMAIL]), "test.jsonl": EMAIL},
        ["a b => c"], ["train.jsonl: 1 example(s) with an empty side are skipped"]),
    "IMDb, a file for each text": (
        "imdb", {f"aclImdb/{{}}/{label}/{i}_7.txt": f"{label} film {i}" for i in range(10) for label in ("neg", "pos")},
        [f"{label} film {i} => {number}" for label, number in (("neg", 0), ("pos", 1)) for i in range(10)]),
    "AESLC, a file for each e-mail": ("aeslc", {f"{{}}/{x}.subject": MAIL.format(x) for x in "ab"},
        [f"Mail {x}, of two lines. => The {x}" for x in "ab"]),
    "a table with other names, and line breaks in quotes": ("cnndm", {"my_train.csv": ",text,y\n0,a,b\n1,c,d",
        "test.csv": ',text,y\n0,"A ""long""\nstory.","One.\nTwo."'}, ['A "long" story. => One. Two.']),
    "a table of three columns": ("cnndm", {"{}.csv": "article,highlights,id\nnews,new,7"}, ["news => new"]),
    "a line each in two files": ("cnndm", {"{}.source": "one\ntwo", "{}.target": "1\n2"}, ["one => 1", "two => 2"]),
    "WiC, labels apart": ("wic", dict(zip(("{}.data.txt", "{}.gold.txt.gz"), WIC)), WIC_PAIRS),
    "WiC, labels apart, as .gz": ("wic", dict(zip(("{}.data.txt.gz", "{}.gold.txt"), WIC)), WIC_PAIRS),
}  # fmt: skip


@pytest.mark.parametrize("form", [*ROWS, *FORMS])
def test_the_form_of_a_corpus(tmp_path, form, capsys):
    """With the files of its own archives, T5's prefixes and words, and what is known of the answers."""
    task = form.split(",")[0]
    own = (task, files_of(form), [f"{task} {line}" for line in ROWS[form][1:]]) if form in ROWS else FORMS[form]
    corpus, files, wanted, *said = own
    for name, contents in files.items():
        for split in ("train", "valid", "dev", "test") if "{}" in name else (name,):
            write(tmp_path / name.format(split), [contents])
    found, told = read(corpus, tmp_path), capsys.readouterr().out
    assert as_lines(found["test"]) == wanted and found["train"] and found["valid"]
    assert [*found["test"][0].answers] == {"record": ["Bob", "Bobby"], "stsb": ["1.1"]}.get(form, [])
    assert form != "mnli" or [e.group for e in found["test"]] == ["dev_matched", "dev_mismatched"]
    assert all(part in told for part in sum(said, []))


def test_dialogues(tmp_path, capsys):
    """Persona and history stand before the utterance, up to a number of them; a dialogue is not divided."""
    chat = ["1 your persona: i like tea.", "2 hi!\thello.", "3 tea?\tyes.", "1 your persona: i run.", "2 who?\tme."]
    train, valid = (tmp_path / f"{name}_self_original_no_cands.txt" for name in ("train", "valid"))
    for path in (train, valid):
        write(path, chat)
    found = read("personachat", tmp_path)
    assert found["test"][1][:2] == ("i like tea. | hi! | hello. | tea?", "yes.")
    assert read("personachat", tmp_path, history=1)["test"][1].source == "i like tea. | tea?"
    assert len(found["train"]) + len(found["valid"]) == len(found["test"]) == 3
    train.unlink()
    write(valid, chat * 10)
    found = read("personachat", tmp_path)  # a test set alone is divided
    groups = [{e.group for e in found[split]} for split in SPLITS]
    assert [len(group) for group in groups] == [16, 2, 2] and len(set.union(*groups)) == 20
    assert sum(map(len, found.values())) == 30 and "no training set" in capsys.readouterr().out


def test_folders_of_several_corpora(tmp_path):
    """The nearest files count, of one folder alone; a file that is there twice is taken once."""
    mine = tmp_path / "mine"
    for name in ("CoLA/dev.tsv", "SST-2/dev.tsv", "mine/out/raw/dev.tsv", "mine/out/raw/dev.tsv.gz"):
        write(tmp_path / name, ["x"])
    said = "has dev.tsv in CoLA, SST-2; name one of these folders"
    assert_refused(lambda _: text.find_first_match(tmp_path, "**/dev.tsv"), part=said)
    assert text.find_first_match(mine, "**/dev.tsv") == [mine / "out" / "raw" / "dev.tsv"]
    write(mine / "cnn" / "dev.tsv.gz", ["x"])
    assert text.find_first_match(mine, "no.tsv **/dev.tsv") == [mine / "cnn" / "dev.tsv.gz"]


def test_a_download(tmp_path, monkeypatch):
    """Checked by its SHA-256 and unpacked; one that was cut off goes on where it ended; an archive at hand, too."""
    folder, archives, splits = tmp_path / "site", tmp_path / "archives", ("train", "validation", "test")
    folder.mkdir()
    with zipfile.ZipFile(folder / "d.zip", "w") as archive:  # of archives
        for split in splits:
            with zipfile.ZipFile(tmp_path / "inner.zip", "w") as inner:
                inner.writestr(f"{split}/dialogues_{split}.txt", f"hello {split} __eou__ hi __eou__\n" * 20)
            archive.write(tmp_path / "inner.zip", f"ijcnlp/{split}.zip")
        archive.writestr("ijcnlp/._train.zip", b"of a file system")
    corpus = replace(CORPORA["dailydialog"], home=f"file://{folder}", urls=["d.zip"])
    whole = (folder / "d.zip").read_bytes()
    monkeypatch.setitem(text.CHECKSUMS, "dailydialog/d.zip", text.digest(folder / "d.zip"))
    for source in (None, folder):
        found = text.find_corpus_files(corpus, tmp_path / f"from {source and source.name}", source)
        names = [path.name for paths in found.values() for path in paths]
        assert names == [f"dialogues_{split}.txt" for split in splits]
    archives.mkdir()
    (archives / "d.zip.part").write_bytes(whole[:200])
    (folder / "d.zip").write_bytes(b"?" * 200 + whole[200:])  # which is not asked for again
    fetch = (f"file://{folder}/d.zip", archives, "dailydialog")
    text.fetch(*fetch)
    assert (archives / "d.zip").read_bytes() == whole
    (archives / "d.zip").unlink()
    assert_refused(
        lambda _: text.fetch(*fetch), part=f"file://{folder}/d.zip: its SHA-256 is not .*; try again.*--from"
    )
    (folder / "d.zip").unlink()
    assert_refused(lambda _: text.fetch(*fetch), part="curl failed: .*download.log")
    assert not list(archives.glob("d.zip*"))
    write(folder / "d.zip", ["<html>not found</html>"])
    assert_refused(lambda _: text.find_corpus_files(corpus, tmp_path / "b", folder), part="python failed: .*unpack.log")


def test_a_text_is_that_of_its_corpus(tmp_path):
    """By its SHA-256, if that is known and no sample is taken; and not empty."""
    write(tmp_path / "a.txt", ["an other text"])
    write(tmp_path / "b.txt.gz", ["", ""])
    said = r"a.txt: is not the text of this corpus, because its SHA-256 differs"
    assert_refused(lambda _: text.copy_lines("ptb/train.txt", [tmp_path / "a.txt"], tmp_path / "out"), part=said)
    assert_refused(
        lambda _: text.copy_lines("x", [tmp_path / "b.txt.gz"], tmp_path / "out"), part="b.txt.gz: has no text"
    )
    assert not (tmp_path / "out").exists()
    text.copy_lines("ptb/train.txt", [tmp_path / "a.txt"], tmp_path / "out", sample=1)
    assert (tmp_path / "out").read_text() == "an other text\n"


@pytest.mark.parametrize("corpus, folder, counts", [
    ("aeslc", "summarisation/aeslc", (14436, 1960, 1906)),
    ("cnndm", "summarisation/cnndm", (200, 1000, 500)),
    ("dailydialog", "dialogue/dailydialog", (76053, 7069, 6740)),
    ("personachat", "dialogue/personachat", (6239, 775, 787)),
    ("agnews", "classification/ag_news", (18000, 2000, 7600)),
    ("imdb", "classification/imdb", (4500, 500, 5000)),
    ("sst2", "glue/SST-2", (60614, 6735, 872)),
    ("cola", "glue/CoLA", (7696, 855, 1043)),
    ("mrpc", "glue/MRPC", (3668, 408, 1725)),
    ("stsb", "glue/STS-B", (5174, 575, 1500)),
    ("rte", "glue/RTE", (2241, 249, 277)),
    ("cb", "superglue/CB", (225, 25, 56)),
    ("copa", "superglue/COPA", (360, 40, 100)),
    ("wic", "superglue/WiC", (4885, 543, 638)),
    # tokens of the test set, as in the literature, line ends included
    ("ptb", "lm/ptb", 82430),
    ("wikitext2", "lm/wikitext-2", 245569),
])  # fmt: skip
def test_the_real_corpora(real_text, tmp_path, corpus, folder, counts):
    """Every row is read. Other texts have their checksums."""
    if CORPORA[corpus].kind == "text":
        for split, paths in text.find_corpus_files(CORPORA[corpus], tmp_path, real_text(folder)).items():
            text.copy_lines(f"{corpus}/{split}.txt", paths, tmp_path / f"{split}.txt")
        assert sum(len(line.split()) + 1 for line in text.lines(tmp_path / "test.txt")) == counts
    else:
        found = read(corpus, real_text(folder), limit=20000)
        assert tuple(len(found[split]) for split in SPLITS) == counts
