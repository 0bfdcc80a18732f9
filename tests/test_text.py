"""Checks that recipes/ reads every form of each corpus, refuses mistakes in their files, and checks downloads."""

import json
import re
import zipfile
from dataclasses import replace
from typing import NamedTuple

import pytest
from helpers import assert_refused
from small_text import write

from recipes import examples, pairs, text
from recipes.catalog import CORPORA, SPLITS
from recipes.pairs import FilePair, Limits


def make_wsc_row(text, noun, noun_index, pronoun, pronoun_index):
    """Returns a row of WSC with the label True: a text, and a noun and a pronoun that it contains.

    `noun_index` and `pronoun_index` are the numbers of words before the noun and before the pronoun.
    """
    spans = {
        "span1_text": noun,
        "span1_index": noun_index,
        "span2_text": pronoun,
        "span2_index": pronoun_index,
    }
    return {"text": text, "target": spans, "label": True}


class TaskRow(NamedTuple):
    """A row of a task of GLUE or SuperGLUE, and the example that it becomes."""

    row: str | dict  # lines of a table, the last of which is the row, or a JSON object
    example: str  # "source => target", without the name of the task at its beginning
    answers: tuple[str, ...] = ()  # the right answers; empty if the target is the only one


RECORD = {
    "passage": {
        "text": "Ann met Bob\n@highlight\nAnn met Bob.\n@highlight\nBob ran",
        "entities": [{"start": 0, "end": 2}, {"start": 8, "end": 10}],
    },
    "qas": [{"query": "@placeholder ran", "answers": [{"text": "Bob"}, {"text": "Bobby"}]}],
}
# {form: its row and example}. A form is the name of a task, which a comma and the name of a case may follow.
TASK_ROWS = {
    "sst2": TaskRow("sentence\tlabel\na film \t1", "sentence: a film => positive"),
    "cola": TaskRow('gj04\t0\t*\tHe "go.', 'sentence: He "go. => unacceptable'),
    "mrpc": TaskRow(
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\ta\tb",
        "sentence1: a sentence2: b => equivalent",
    ),
    "stsb": TaskRow("g\tf\t2012\t1\t1.1\ta\tb\tmore", "sentence1: a sentence2: b => 1.2", answers=("1.1",)),
    "qqp": TaskRow(
        "id\tquestion1\tquestion2\tis_duplicate\n1\ta?\tb?\t0",
        "question1: a? question2: b? => not duplicate",
    ),
    "mnli": TaskRow("sentence1\tsentence2\tgold_label\na\tb\tneutral", "hypothesis: b premise: a => neutral"),
    "qnli": TaskRow(
        "index\tquestion\tsentence\tlabel\n0\ta?\tb\tentailment",
        "question: a? sentence: b => entailment",
    ),
    "rte": TaskRow("0\ta\tb\tnot_entailment", "sentence1: a sentence2: b => not entailment"),
    "rte, jsonl": TaskRow(
        {"premise": "a", "hypothesis": "b", "label": "entailment"},
        "sentence1: a sentence2: b => entailment",
    ),
    "boolq": TaskRow({"passage": "a", "question": "b", "label": False}, "passage: a question: b => False"),
    "cb": TaskRow(
        {"premise": "a", "hypothesis": "b", "label": "contradiction"},
        "hypothesis: b premise: a => contradiction",
    ),
    "copa": TaskRow(
        {"premise": "a", "choice1": "b", "choice2": "c", "question": "cause", "label": 1},
        "choice1: b choice2: c premise: a question: cause => choice2",
    ),
    "record": TaskRow(
        RECORD,
        "query: @placeholder ran entities: Ann, Bob passage: Ann met Bob. Ann met Bob. Bob ran => Bob",
        answers=("Bob", "Bobby"),
    ),
    "wic": TaskRow(
        {"word": "w", "sentence1": "a", "sentence2": "b", "label": True},
        "sentence1: a sentence2: b word: w => True",
    ),
    "wsc": TaskRow(
        make_wsc_row("Ann saw it, as it barked.", "ann", 0, "it", 4),
        "text: * Ann * saw it, as # it # barked. => True",
    ),
    # If a word occurs several times, the nearest to the index is marked, even if the index is wrong by one.
    "wsc, index wrong by one": TaskRow(
        make_wsc_row("They use it; it helps", "They", 0, "it", 3),
        "text: * They * use it; # it # helps => True",
    ),
    # One of the two spans may lie in the other.
    "wsc, pronoun in the noun": TaskRow(
        make_wsc_row("By their\nmother", "their mother", 1, "their", 1),
        "text: By * # their # mother * => True",
    ),
    "wsc, noun in the pronoun": TaskRow(
        make_wsc_row("By their mother", "mother", 2, "their mother", 1),
        "text: By # their * mother * # => True",
    ),
}
# {task: the names of its files} for tasks whose training set and test sets are not called train and dev, or train and
# val.
FILE_NAMES = {
    "mrpc": ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt"),
    "stsb": ("sts-train.csv", "sts-dev.csv"),
    "mnli": ("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv"),
}


def make_task_files(form):
    """Returns {name: contents} of the files of a task.

    All files have the same row. The training set has it twice, because one example is held out.

    Args:
        form: a key of TASK_ROWS, such as "wsc, noun in the pronoun". The task is the part before the comma.
    """
    task = form.split(",")[0]
    row = TASK_ROWS[form].row
    if isinstance(row, str):  # a table: a line of headings, which some tasks do not have, and the row
        contents = row
        last_line = row.split("\n")[-1]
        default_names = ("train.tsv", "dev.tsv")
    else:  # a JSON object
        contents = json.dumps(row)
        last_line = contents
        default_names = ("train.jsonl", "val.jsonl")
    files = {}
    for name in FILE_NAMES.get(task, default_names):
        is_training_set = "train" in name
        if is_training_set:
            files[name] = f"{contents}\n{last_line}"
        else:
            files[name] = contents
    return files


def write_files(folder, files):
    """Writes files into a folder. `files`: {name: contents}."""
    for name, contents in files.items():
        write(folder / name, [contents])


def read_corpus(name, folder, history=5, limit=None):
    """Returns {split: its examples} of a corpus whose files are in a folder.

    Args:
        name: the name of the corpus.
        folder: the folder.
        history: for dialogues, how many utterances before the reply are part of the source.
        limit: for texts with labels, how many examples are used for training and validation; None: all.
    """
    corpus = CORPORA[name]
    files = text.find_corpus_files(corpus, archives=folder, source=folder)
    return examples.read_examples(corpus, files, history, limit)


def format_examples(examples_of_split):
    """Returns a list of each example as a string "source => target"."""
    return [f"{example.source} => {example.target}" for example in examples_of_split]


# ---- parallel text


@pytest.fixture
def prefixes(tmp_path):
    """Writes the parallel texts `train` and `train2`, and returns their paths without the endings .en and .de.

    They have 6 pairs and one pair. The English side of `train2` is compressed.
    """
    write(tmp_path / "train.en", ["\ufeffA\u2028b", "", "c d e f", "G", "x y", "  "])
    write(tmp_path / "train.de", ["A", "B", "C", "G", "1 2 3 4 5", "w"])
    write(tmp_path / "train2.en.gz", ["\x85h\x0c"])
    write(tmp_path / "train2.de", ["H"])
    return [tmp_path / "train", tmp_path / "train2"]


def test_pairs_that_are_left_out_are_counted_by_their_reason(prefixes, tmp_path, capsys):
    """Pairs within the limits are written in lower case. For each reason, it is printed how many pairs were left out.

    Of the 6 pairs of `train`, the first and the fourth are used. The second and the sixth pair have an empty side. The
    third pair has 4 words and 1 word, and the fifth pair has 2 words and 5 words. The only pair of `train2` is used.

    In "A\\u2028b", a character that some tools take for the end of a line becomes a space.
    """
    limits = Limits(lowercase=True, max_ratio=3, max_length=4)
    pairs.clean_pairs(prefixes, tmp_path / "out" / "x", ("en", "de"), limits)
    assert (tmp_path / "out" / "x.en").read_text() == "a b\ng\nh\n"
    counts = "3 pairs, left out: 2 empty, 1 of a length ratio over 3, 1 longer than 4 tokens\n"
    assert counts in capsys.readouterr().out


def test_a_sample_has_the_first_pairs_of_each_file(prefixes, tmp_path):
    """A sample of 1 has the first pair of `train` and the first pair of `train2`."""
    pairs.clean_pairs(prefixes, tmp_path / "out" / "y", ("en", "de"), Limits(sample=1))
    assert (tmp_path / "out" / "y.de").read_text() == "A\nH\n"


def test_text_without_any_pair_is_refused(prefixes, tmp_path):
    """A text all of whose German lines are empty is refused, and no file is written."""
    write(tmp_path / "train.de", ["", " ", "", "", "", ""])
    out = tmp_path / "out"
    assert_refused(
        lambda _: pairs.clean_pairs(prefixes[:1], out / "z", ("en", "de"), Limits()),
        part=r"train: none of the 6 pairs can be used \(6 empty\)",
    )
    assert list(out.glob("*")) == []


@pytest.mark.parametrize(
    "total_words, block_size, density, span_length", [(103, 20, 0.15, 3), (38, 7, 0.9, 1), (3, 64, 0.15, 3)]
)
def test_source_and_spans_together_are_the_text(tmp_path, total_words, block_size, density, span_length):
    """If the spans are put back into the source of a block, the result is the text of the block.

    A block goes over the ends of lines; a text that is shorter than a block is one block. The words after the last
    whole block of a longer text are left out. In each block, the share `density` of the words is removed, in spans of
    `span_length` words on average. But at least one word is removed and one word stays, and between two spans there is
    a word that stays.
    """

    def clamp(number, lowest, highest):
        """Returns the number, or the nearest bound if it is out of bounds."""
        return min(max(number, lowest), highest)

    words = [f"w{number}" for number in range(total_words)]
    write(tmp_path / "text", [words[0], words[1], " ".join(words[2:])])
    pairs.corrupt_spans(
        tmp_path / "text",
        tmp_path / "out",
        block_size=block_size,
        seed=1,
        density=density,
        span_length=span_length,
    )
    blocks = [*pairs.read_pairs(FilePair(tmp_path / "out.source", tmp_path / "out.target"))]
    assert len(blocks) == max(total_words // block_size, 1)
    for number, (source, target) in enumerate(blocks):
        expected_words = words[number * block_size : (number + 1) * block_size]
        # {mark: the span that it stands for}, from a target such as "<extra_id_0> w3 w4 <extra_id_1> w9"
        spans = dict(re.findall(r"(<extra_id_\d+>) ([^<]+)", target))
        restored = source
        for mark, span in spans.items():
            restored = restored.replace(mark, span)
        assert restored.split() == expected_words

        num_words = len(expected_words)
        num_removed = sum(len(span.split()) for span in spans.values())
        assert num_removed == clamp(round(num_words * density), lowest=1, highest=num_words - 1)
        assert len(spans) == clamp(round(num_removed / span_length), lowest=1, highest=num_words - num_removed)


# ---- examples with a source and a target


def write_multirc(path, paragraphs, questions):
    """Writes a file of MultiRC with a row for each paragraph. Each row has all questions."""
    rows = [{"passage": {"text": paragraph, "questions": questions}} for paragraph in paragraphs]
    write(path, [json.dumps(row) for row in rows])


def test_multirc_has_an_example_for_each_answer_and_holds_out_whole_paragraphs(tmp_path):
    """The validation set gets two whole paragraphs of the training text, and each answer becomes an example.

    The training text has 20 paragraphs, each in two rows, which stay together. The test set has the last paragraph.
    Each row becomes 10 examples: 5 questions with two answers each. Tags become spaces.
    """
    answers = [{"text": "Ann", "label": 1}, {"text": "Eve", "label": 0}]
    questions = [{"question": f"Who {number}?", "answers": answers} for number in range(5)]
    paragraphs = []
    for number in range(20):
        paragraph = f"<b>Part {number}.</b><br>So"
        paragraphs += [paragraph, paragraph]
    last_paragraph = paragraphs[-1]
    write_multirc(tmp_path / "train.jsonl", paragraphs, questions)
    write_multirc(tmp_path / "val.jsonl", [last_paragraph], questions)
    examples_of_splits = read_corpus("multirc", tmp_path)

    assert format_examples(examples_of_splits["test"])[:2] == [
        "multirc question: Who 0? answer: Ann paragraph: Part 19. So => True",
        "multirc question: Who 0? answer: Eve paragraph: Part 19. So => False",
    ]
    # The answers to a question are a group, which is named by the number of the row, 1, and the question.
    expected_groups = []
    for number in range(5):
        expected_groups += [f"1-Who {number}?", f"1-Who {number}?"]
    groups = [example.group for example in examples_of_splits["test"]]
    assert groups == expected_groups

    def get_paragraphs(split):
        """Returns the set of the paragraphs in the examples of a split."""
        return {example.source.split("paragraph: ")[1] for example in examples_of_splits[split]}

    assert len(examples_of_splits["valid"]) == 40  # 2 paragraphs in 2 rows of 10 examples
    assert len(get_paragraphs("valid")) == 2
    assert get_paragraphs("train").isdisjoint(get_paragraphs("valid"))


EMAIL = '{"email": "a b", "subject": "c"}'  # a line of the corpus AESLC


class WrongFile(NamedTuple):
    """A file of a corpus with a mistake. The other files of the corpus are correct."""

    mistake: str
    corpus: str
    name: str
    contents: str
    error: str  # a regular expression for a part of the error message


WRONG_FILES = [
    # The corpus `classification` has rows of a label and a text. Its training set has the labels sport and world.
    WrongFile(
        "a label that the training set does not have",
        "classification",
        name="test.csv",
        contents="sport,a ball\nmusic,a song",
        error='no training example has the label music of "a',
    ),
    WrongFile(
        "a text that is a blank",
        "classification",
        name="train.csv",
        contents='sport,a ball\nworld," "',
        error="train.csv: line 2 has an empty text",
    ),
    WrongFile(
        "a row without a text",
        "classification",
        name="test.csv",
        contents="sport,a\nworld",
        error=r"line 2 has 1 column\(s\), not 2 \(label, text\).* commas",
    ),
    WrongFile(
        "a label of two words",
        "classification",
        name="test.csv",
        contents="two words,a ball",
        error='test.csv: line 1 has the label "two words".*one word',
    ),
    WrongFile(
        "a quotation mark that is not closed",
        "classification",
        name="test.csv",
        contents='sport,"a ball\nsport,a ball',
        error="test.csv: .* line 2 has a stray quote",
    ),
    # The corpus AG News has rows of a label from 1 to 4, a title and a text.
    WrongFile(
        "a label that the corpus does not have",
        "agnews",
        name="train.csv",
        contents="12,title,text",
        error='line 1 has the label "12"; it must be one of 1, 2, 3, 4',
    ),
    # The corpus AESLC has a JSON object in each line: an e-mail with its subject, which is the target.
    WrongFile(
        "an e-mail without a subject",
        "aeslc",
        name="test.jsonl",
        contents='{"email": "a", "subject": null}',
        error="test.jsonl: line 1 has an empty target; remove",
    ),
    WrongFile(
        "a list instead of an object",
        "aeslc",
        name="test.jsonl",
        contents='["a"]',
        error="test.jsonl: line 1 is no JSON object",
    ),
    # A table of the task SST-2 has a heading. An example of its training set is held out.
    WrongFile(
        "one training example, so that none is left when it is held out",
        "sst2",
        name="train.tsv",
        contents="sentence\tlabel\na film \t1",
        error="sst2: has too few examples: the train set would be empty",
    ),
    WrongFile(
        "a heading without a training example",
        "sst2",
        name="train.tsv",
        contents="sentence\tlabel",
        error="sst2: has too few examples: the train set would be empty",
    ),
    WrongFile(
        "the heading labels instead of label",
        "sst2",
        name="dev.tsv",
        contents="sentence\tlabels\na\t1",
        error="line 2: not a valid row of sst2 .KeyError 'label'.; the row has sentence, la",
    ),
    # The fifth column of STS-B is a score.
    WrongFile(
        "a score that is no number",
        "stsb",
        name="sts-dev.csv",
        contents="g\tf\t2012\t1\tgood\ta\tb",
        error='line 1 has the score "good"; it must be a number',
    ),
    WrongFile(
        "a passage without a text in the second line",
        "record",
        name="val.jsonl",
        contents=json.dumps(RECORD) + '\n{"passage": {}}',
        error="val.jsonl: after line 1: not a valid row of record .KeyError 'text'.; the row has another form",
    ),
    WrongFile(
        "a pronoun that the text does not have",
        "wsc",
        name="val.jsonl",
        contents=json.dumps(make_wsc_row("Ann barked", noun="Ann", noun_index=0, pronoun="it", pronoun_index=4)),
        error='line 1: the text has no "it"; remove it',
    ),
]


@pytest.mark.parametrize("wrong_file", WRONG_FILES, ids=lambda wrong_file: wrong_file.mistake)
def test_a_wrong_row_is_refused_with_its_file_and_line(tmp_path, wrong_file):
    """A corpus with one wrong file is refused, and the error names the mistake."""
    corpus = wrong_file.corpus
    if corpus in TASK_ROWS:
        files = make_task_files(corpus)
    else:  # training sets and test sets of classification, agnews and aeslc; each corpus reads what it needs
        files = {
            "train.csv": "sport,a\nworld,b\n" * 5,
            "test.csv": "1,title,text",
            "train.jsonl": f"{EMAIL}\n{EMAIL}",
        }
    files[wrong_file.name] = wrong_file.contents
    write_files(tmp_path, files)
    assert_refused(lambda _: read_corpus(corpus, tmp_path), part=wrong_file.error)


LABELS_OF_TEXTS = ["sport", "world"] * 50  # a label for each of 100 texts


def write_labelled_text(folder):
    """Writes a corpus of texts with labels: 100 texts for training, with LABELS_OF_TEXTS, and one for testing."""
    write(folder / "train.tsv", [f"{label}\ttext {number}\tmore" for number, label in enumerate(LABELS_OF_TEXTS)])
    write(folder / "test.csv", ["sport,a ball"])


def test_labelled_text_is_drawn_at_random_and_held_out_by_a_fixed_seed(tmp_path):
    """With a limit of 50, there are 45 examples for training and 5 for validation, in random order.

    They are the same at each call. Without a limit, the validation set begins with the same 5 examples.
    """
    write_labelled_text(tmp_path)
    examples_of_splits = read_corpus("classification", tmp_path, limit=50)
    assert len(examples_of_splits["train"]) == 45
    assert len(examples_of_splits["valid"]) == 5
    assert read_corpus("classification", tmp_path, limit=50) == examples_of_splits

    drawn = format_examples(examples_of_splits["valid"] + examples_of_splits["train"])
    assert len(set(drawn)) == 50
    assert drawn != sorted(drawn)
    all_examples = {f"text {number} more => {label}" for number, label in enumerate(LABELS_OF_TEXTS)}
    assert set(drawn) <= all_examples

    valid_without_limit = format_examples(read_corpus("classification", tmp_path)["valid"])
    assert valid_without_limit[:5] == format_examples(examples_of_splits["valid"])


def test_a_labelled_test_set_is_read_in_its_order_without_heading_and_markup(tmp_path):
    """Tags and backslashes become spaces, entities become characters, and a very long text is read completely.

    Signs that only look like a tag or an entity stay: "2<3 5>4" and "C#5;".
    """
    write_labelled_text(tmp_path)
    markup = r"Oil\at  #36;50 or &#36;9 &lt;b&gt;a  barrel&lt;/b&gt;<br /><br />AT&amp;T 2<3 5>4 C#5;"
    long_text = "c" * 140_000  # longer than a cell that Python's csv module reads by default
    write(tmp_path / "test.csv", ['"Class Index","text"', f"sport,{markup}", f"world,{long_text}"])
    assert format_examples(read_corpus("classification", tmp_path, limit=50)["test"]) == [
        "oil at $50 or $9 a barrel at&t 2<3 5>4 c#5; => sport",
        f"{long_text} => world",
    ]


@pytest.mark.parametrize("form", TASK_ROWS)
def test_a_task_of_glue_or_superglue_becomes_text_with_the_words_of_t5(tmp_path, form):
    """Each test set of a task has one row. It becomes the example of TASK_ROWS, with the name of the task before it."""
    task = form.split(",")[0]
    files = make_task_files(form)
    write_files(tmp_path, files)
    examples_of_splits = read_corpus(task, tmp_path)
    num_test_sets = len(files) - 1  # all files but the training set
    expected_example = f"{task} {TASK_ROWS[form].example}"
    assert format_examples(examples_of_splits["test"]) == [expected_example] * num_test_sets
    assert tuple(examples_of_splits["test"][0].answers) == TASK_ROWS[form].answers
    assert examples_of_splits["train"]
    assert examples_of_splits["valid"]


def test_the_two_test_sets_of_mnli_are_scored_apart(tmp_path):
    """Each test set has one example. Their groups, which are scored separately, are the names of the files."""
    write_files(tmp_path, make_task_files("mnli"))
    groups = [example.group for example in read_corpus("mnli", tmp_path)["test"]]
    assert groups == ["dev_matched", "dev_mismatched"]


class CorpusForm(NamedTuple):
    """The files of a corpus in one of its forms, and what is read from them."""

    corpus: str
    files: dict[str, str]  # {name: contents}, where {} in a name stands for each split
    test_examples: list[str]  # as "source => target"
    messages: tuple[str, ...] = ()  # parts of what is printed


def make_imdb_files():
    """Returns {name: contents} of files of IMDb: 10 negative and 10 positive reviews in each split.

    In a name, {} stands for each split, as in `CorpusForm`.
    """
    files = {}
    for label in ("neg", "pos"):
        for number in range(10):
            name = f"{label}/{number}_7.txt"
            files["aclImdb/{}/" + name] = f"{label} film {number}"
    return files


MAIL = "Mail {0},\nof two lines.\n\n@subject\nThe {0}\n\n@ann0\nAnother"
QUESTION_WITH_LINE_BREAK = (
    'id\tquestion1\tquestion2\tis_duplicate\n2\t"When was\n\tWhere?\t1\n1\ta?\tb?\t0\n1\ta?\tb?\t0'
)
WIC_ROWS = "w\tN\t0-0\ta\tb\nv\tV\t0-0\tc\td"
WIC_LABELS = "T\nF"
WIC_EXAMPLES = ["wic sentence1: a sentence2: b word: w => True", "wic sentence1: c sentence2: d word: v => False"]
FORMS = {
    "a line break in a question, which leaves two rows that are no examples": CorpusForm(
        corpus="qqp",
        files={"{}.tsv": QUESTION_WITH_LINE_BREAK},
        test_examples=["qqp question1: a? question2: b? => not duplicate"] * 2,
        messages=("train.tsv: 2 row(s) with fewer than 4 columns are skipped", "dev.tsv: 2 row(s)"),
    ),
    "an empty side": CorpusForm(
        corpus="aeslc",
        files={"train.jsonl": "\n".join([EMAIL, EMAIL.replace('"c"', '""'), EMAIL]), "test.jsonl": EMAIL},
        test_examples=["a b => c"],
        messages=("train.jsonl: 1 example(s) with an empty side are skipped",),
    ),
    "IMDb, a file for each text": CorpusForm(
        corpus="imdb",
        files=make_imdb_files(),
        test_examples=[
            *[f"neg film {number} => 0" for number in range(10)],
            *[f"pos film {number} => 1" for number in range(10)],
        ],
    ),
    "AESLC, a file for each e-mail": CorpusForm(
        corpus="aeslc",
        files={"{}/a.subject": MAIL.format("a"), "{}/b.subject": MAIL.format("b")},
        test_examples=["Mail a, of two lines. => The a", "Mail b, of two lines. => The b"],
    ),
    "a table with other names, and line breaks in quotes": CorpusForm(
        corpus="cnndm",
        files={
            "my_train.csv": ",text,y\n0,a,b\n1,c,d",
            "test.csv": ',text,y\n0,"A ""long""\nstory.","One.\nTwo."',
        },
        test_examples=['A "long" story. => One. Two.'],
    ),
    "a table of three columns": CorpusForm(
        corpus="cnndm",
        files={"{}.csv": "article,highlights,id\nnews,new,7"},
        test_examples=["news => new"],
    ),
    "a line each in two files": CorpusForm(
        corpus="cnndm",
        files={"{}.source": "one\ntwo", "{}.target": "1\n2"},
        test_examples=["one => 1", "two => 2"],
    ),
    "WiC, rows and labels in two files": CorpusForm(
        corpus="wic",
        files={"{}.data.txt": WIC_ROWS, "{}.gold.txt.gz": WIC_LABELS},
        test_examples=WIC_EXAMPLES,
    ),
    "WiC, rows and labels in two files, rows as .gz": CorpusForm(
        corpus="wic",
        files={"{}.data.txt.gz": WIC_ROWS, "{}.gold.txt": WIC_LABELS},
        test_examples=WIC_EXAMPLES,
    ),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_corpus_is_read_in_every_form(form, tmp_path, capsys):
    """The test set has the expected examples, the other sets are not empty, and the expected messages are printed."""
    for name, contents in form.files.items():
        if "{}" in name:
            # Corpora call their validation set "valid" or "dev", and each corpus reads what it needs.
            file_names = [name.format(split) for split in ("train", "valid", "dev", "test")]
        else:
            file_names = [name]
        for file_name in file_names:
            write(tmp_path / file_name, [contents])
    examples_of_splits = read_corpus(form.corpus, tmp_path)
    assert format_examples(examples_of_splits["test"]) == form.test_examples
    assert list(examples_of_splits["test"][0].answers) == []
    assert examples_of_splits["train"]
    assert examples_of_splits["valid"]
    output = capsys.readouterr().out
    for message in form.messages:
        assert message in output


# Two dialogues of the corpus PersonaChat, with two replies and one reply. The lines of each are numbered from 1.
CHAT = ["1 your persona: i like tea.", "2 hi!\thello.", "3 tea?\tyes.", "1 your persona: i run.", "2 who?\tme."]


def test_persona_and_history_stand_before_the_utterance(tmp_path):
    """The source of a reply is the persona, then the utterances before the reply, at most `history` of them.

    The test set is the file `valid`. Training and validation set share the file `train`.
    """
    for split in ("train", "valid"):
        write(tmp_path / f"{split}_self_original_no_cands.txt", CHAT)
    examples_of_splits = read_corpus("personachat", tmp_path)
    second_example = examples_of_splits["test"][1]
    assert second_example.source == "i like tea. | hi! | hello. | tea?"
    assert second_example.target == "yes."
    assert read_corpus("personachat", tmp_path, history=1)["test"][1].source == "i like tea. | tea?"
    assert len(examples_of_splits["test"]) == 3
    assert len(examples_of_splits["train"]) + len(examples_of_splits["valid"]) == 3


def test_a_test_set_alone_is_divided_by_dialogues(tmp_path, capsys):
    """A file with 20 dialogues, which have 30 replies, is divided into three sets, and no dialogue is in two sets."""
    write(tmp_path / "valid_self_original_no_cands.txt", CHAT * 10)
    examples_of_splits = read_corpus("personachat", tmp_path)
    dialogues = {}  # {split: the different dialogues of its examples}
    for split in SPLITS:
        dialogues[split] = {example.group for example in examples_of_splits[split]}
    assert {split: len(groups) for split, groups in dialogues.items()} == {"train": 16, "valid": 2, "test": 2}
    all_dialogues = set.union(*dialogues.values())
    assert len(all_dialogues) == 20  # 16 + 2 + 2, so that no dialogue is in two splits
    assert sum(len(examples_of_split) for examples_of_split in examples_of_splits.values()) == 30
    assert "no training set" in capsys.readouterr().out


# ---- files of a corpus


def test_a_file_that_is_in_several_folders_is_refused(tmp_path):
    """If two folders on the same level have the file, the error names both of them."""
    write(tmp_path / "CoLA" / "dev.tsv", ["x"])
    write(tmp_path / "SST-2" / "dev.tsv", ["x"])
    assert_refused(
        lambda _: text.find_first_match(tmp_path, "**/dev.tsv"),
        part="has dev.tsv in CoLA, SST-2; name one of these folders",
    )


def test_a_file_that_is_there_plain_and_compressed_is_taken_once(tmp_path):
    """If a folder has both a file and its compressed form, only the file is taken."""
    raw = tmp_path / "out" / "raw"
    write(raw / "dev.tsv", ["x"])
    write(raw / "dev.tsv.gz", ["x"])
    assert text.find_first_match(tmp_path, "**/dev.tsv") == [raw / "dev.tsv"]


def test_the_nearest_files_are_taken(tmp_path):
    """If several folders have the file, that of the folder nearest to the top is taken, even if it is compressed.

    The pattern "no.tsv", which comes first, has no file.
    """
    write(tmp_path / "out" / "raw" / "dev.tsv", ["x"])
    write(tmp_path / "cnn" / "dev.tsv.gz", ["x"])
    assert text.find_first_match(tmp_path, "no.tsv **/dev.tsv") == [tmp_path / "cnn" / "dev.tsv.gz"]


DAILYDIALOG_FILES = ["dialogues_train.txt", "dialogues_validation.txt", "dialogues_test.txt"]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Returns a folder that stands in for the web site of DailyDialog.

    It has the archive d.zip. This contains an archive for each split, and a file that only has the name of an archive.
    The SHA-256 of d.zip is listed, as that of a real corpus in corpora.sha256.
    """
    site = tmp_path / "site"
    site.mkdir()
    with zipfile.ZipFile(site / "d.zip", "w") as archive:
        for split in ("train", "validation", "test"):
            inner_archive = tmp_path / "inner.zip"
            with zipfile.ZipFile(inner_archive, "w") as inner:
                inner.writestr(f"{split}/dialogues_{split}.txt", f"hello {split} __eou__ hi __eou__\n" * 20)
            archive.write(inner_archive, f"ijcnlp/{split}.zip")
        archive.writestr("ijcnlp/._train.zip", b"metadata of a file system, which is no archive")
    monkeypatch.setitem(text.CHECKSUMS, "dailydialog/d.zip", text.digest(site / "d.zip"))
    return site


def make_corpus(site):
    """Returns the corpus DailyDialog with the file d.zip of the folder `site` as its only address."""
    return replace(CORPORA["dailydialog"], home=f"file://{site}", urls=["d.zip"])


@pytest.mark.parametrize("is_at_hand", [False, True])
def test_an_archive_is_unpacked_whether_it_is_downloaded_or_at_hand(is_at_hand, site, tmp_path):
    """The files of all three splits are found in the inner archives of d.zip."""
    source = site if is_at_hand else None
    files_of_splits = text.find_corpus_files(make_corpus(site), tmp_path / "archives", source)
    names = []
    for paths in files_of_splits.values():
        names += [path.name for path in paths]
    assert names == DAILYDIALOG_FILES


@pytest.fixture
def fetch(site, tmp_path):
    """Returns a function that downloads d.zip from the site into the existing folder `tmp_path / "archives"`."""
    archives = tmp_path / "archives"
    archives.mkdir()
    return lambda: text.fetch(f"file://{site}/d.zip", archives, "dailydialog")


def test_a_download_that_was_cut_off_goes_on_where_it_ended(fetch, site, tmp_path):
    """If the first 200 bytes are there already, only the other bytes are downloaded."""
    archives = tmp_path / "archives"
    contents = (site / "d.zip").read_bytes()
    (archives / "d.zip.part").write_bytes(contents[:200])
    # The site now has other bytes at the beginning. The checksum would be wrong if they were downloaded again.
    (site / "d.zip").write_bytes(b"?" * 200 + contents[200:])
    fetch()
    assert (archives / "d.zip").read_bytes() == contents


def test_a_download_with_another_checksum_is_refused_and_deleted(fetch, site, tmp_path):
    """The error names the address, and neither the file nor a part of it is left in the folder."""
    (site / "d.zip").write_bytes(b"another file")
    assert_refused(lambda _: fetch(), part=f"file://{site}/d.zip: its SHA-256 is not .*; try again.*--from")
    assert list((tmp_path / "archives").glob("d.zip*")) == []


def test_a_download_that_fails_is_refused(fetch, site, tmp_path):
    """If the site does not have the file, the error names the log of curl, and nothing is left in the folder."""
    (site / "d.zip").unlink()
    assert_refused(lambda _: fetch(), part="curl failed: .*download.log")
    assert list((tmp_path / "archives").glob("d.zip*")) == []


def test_an_archive_that_cannot_be_unpacked_is_refused(site, tmp_path):
    """If d.zip is a page of HTML instead of an archive, the error names the log of the program that unpacks it."""
    write(site / "d.zip", ["<html>not found</html>"])
    assert_refused(
        lambda _: text.find_corpus_files(make_corpus(site), tmp_path / "archives", site),
        part="python failed: .*unpack.log",
    )


@pytest.fixture
def other_text(tmp_path):
    """Writes a text that is not the Penn Treebank, and returns the path of the file."""
    write(tmp_path / "a.txt", ["an other text"])
    return tmp_path / "a.txt"


def test_a_text_with_another_checksum_than_its_corpus_is_refused(other_text, tmp_path):
    """A text with the name of the Penn Treebank but with another SHA-256 is refused, and no file is written."""
    assert_refused(
        lambda _: text.copy_lines("ptb/train.txt", [other_text], tmp_path / "out"),
        part=r"a.txt: is not the text of this corpus, because its SHA-256 differs",
    )
    assert not (tmp_path / "out").exists()


def test_a_text_without_words_is_refused(tmp_path):
    """A text of empty lines is refused, and no file is written."""
    empty_text = tmp_path / "b.txt.gz"
    write(empty_text, ["", ""])
    assert_refused(
        lambda _: text.copy_lines("x", [empty_text], tmp_path / "out"),
        part="b.txt.gz: has no text",
    )
    assert not (tmp_path / "out").exists()


def test_a_sample_of_a_text_is_taken_whatever_its_checksum(other_text, tmp_path):
    """A sample of the first line is not compared with the SHA-256 of the whole Penn Treebank."""
    text.copy_lines("ptb/train.txt", [other_text], tmp_path / "out", sample=1)
    assert (tmp_path / "out").read_text() == "an other text\n"


# ---- real text


@pytest.mark.parametrize("corpus, folder, counts", [  # counts: the numbers of examples in train, valid and test
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
])  # fmt: skip
def test_every_row_of_a_real_corpus_is_read(real_text, corpus, folder, counts):
    """The training, validation and test set of a real corpus have the known numbers of examples.

    The limit applies only to corpora with labels.
    """
    examples_of_splits = read_corpus(corpus, real_text(folder), limit=20000)
    numbers_of_examples = tuple(len(examples_of_splits[split]) for split in SPLITS)
    assert numbers_of_examples == counts


@pytest.mark.parametrize("corpus, folder, num_tokens", [
    ("ptb", "lm/ptb", 82430),
    ("wikitext2", "lm/wikitext-2", 245569),
])  # fmt: skip
def test_a_real_test_set_has_as_many_tokens_as_in_the_literature(real_text, tmp_path, corpus, folder, num_tokens):
    """The test set of a language model has the number of tokens that other papers give, which count ends of lines.

    The other splits are checked by their checksums.
    """
    files_of_splits = text.find_corpus_files(CORPORA[corpus], tmp_path, real_text(folder))
    for split, paths in files_of_splits.items():
        text.copy_lines(f"{corpus}/{split}.txt", paths, tmp_path / f"{split}.txt")
    words_of_lines = [line.split() for line in text.lines(tmp_path / "test.txt")]
    assert sum(len(words) + 1 for words in words_of_lines) == num_tokens
