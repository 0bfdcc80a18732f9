"""Reads examples (texts with labels, or pairs of texts) from the various file formats of their corpora."""

import csv
import html
import io
import itertools
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .catalog import SPLITS, Corpus
from .languages import one_line
from .pairs import FilePair, read_pairs
from .steps import UserError
from .text import lines, plain_or_compressed

SEED = 1  # decides the order of examples with labels, and which examples are held out
HISTORY = 5  # the default number of utterances of a dialogue before the reply that is to be written

Row = dict[str, Any]  # {name of a column: its value}, for one example in a file


class NumberedRow(NamedTuple):
    """An example in a file, and the number of its line."""

    number: int
    row: Row


Rows = Iterator[NumberedRow]


class Example(NamedTuple):
    """An example for training or testing a model, with what is needed to score the model's output."""

    source: str  # one line
    target: str  # one line; for a text with a label, the label
    group: str = ""  # the group of examples that are scored together, such as all answers to one question
    answers: Sequence[str] = ()  # all right answers, if there are several
    paragraph: str = ""  # the text that several groups are about. They are held out together.


Examples = dict[str, list[Example]]  # {split: its examples}


def read_examples(
    corpus: Corpus, files: Mapping[str, Sequence[Path]], history_length: int | None = None, limit: int | None = None
) -> Examples:
    """Returns the training, validation and test examples of a corpus. They are always the same examples.

    Missing sets are made of the others, as `make_missing_sets` explains.

    Args:
        corpus: its record says how the files are read.
        files: {split: its files}.
        history_length: for dialogues, how many utterances before the reply are part of the source; None: `HISTORY`.
        limit: for texts with labels, how many examples are used for training and validation; None: all.

    Returns:
        {split: its examples}.

    Raises:
        UserError: no example is left for one of the sets.
    """
    if history_length is None:
        history_length = HISTORY
    examples: Examples = {}
    for split in SPLITS:
        examples[split] = []
        for path in files.get(split, ()):
            examples[split] += read_file(corpus, path, split, history_length)
    if corpus.kind == "labels":
        examples = draw_labelled_examples(examples, limit)
        refuse_unknown_labels(corpus, examples)
    all_sets = make_missing_sets(corpus, examples)
    for split in SPLITS:
        if not all_sets[split]:
            raise UserError(f"{corpus.name}: has too few examples: the {split} set would be empty")
    return all_sets


def make_missing_sets(corpus: Corpus, examples: Examples) -> Examples:
    """Returns all sets of examples of a corpus. A missing training or validation set is made of another set.

    - If the training set is missing, the test set is divided into all three sets. A validation set is not used then.
    - If only the validation set is missing, it gets a tenth of the training set.
    - If no set is missing, all sets stay as they are.

    Args:
        corpus: the corpus, whose name is printed.
        examples: {split: its examples}. A missing set is an empty list.
    """
    if not examples["train"]:
        print(f"{corpus.name}: has no training set, so the test set is split: 80 % training, 10 % validation")
        return divide_test_set(examples["test"])
    if not examples["valid"]:
        division = split_off(examples["train"], share=0.1)
        return {"train": division.kept, "valid": division.drawn, "test": examples["test"]}
    return examples


def draw_labelled_examples(examples: Examples, limit: int | None) -> Examples:
    """Returns the sets of examples with labels, with the training examples in random order, and only some of them.

    If there is no validation set, it gets a tenth of these training examples. A fixed seed decides the order.

    Args:
        examples: {split: its examples}.
        limit: how many training examples are taken; None: all.
    """
    shuffled = list(examples["train"])
    random.Random(SEED).shuffle(shuffled)
    drawn = shuffled[:limit]
    if examples["valid"]:
        return {"train": drawn, "valid": examples["valid"], "test": examples["test"]}
    number_valid = len(drawn) // 10
    return {"train": drawn[number_valid:], "valid": drawn[:number_valid], "test": examples["test"]}


def refuse_unknown_labels(corpus: Corpus, examples: Examples) -> None:
    """Raises UserError if the validation or test set has a label that no training example has.

    Args:
        corpus: the corpus, which the error names.
        examples: {split: its examples}. Their targets are the labels.
    """
    labels = {example.target for example in examples["train"]}
    for example in (*examples["valid"], *examples["test"]):
        if example.target not in labels:
            text = f'the label {example.target} of "{example.source[:40]}"'
            raise UserError(f"{corpus.name}: no training example has {text}")


class Division(NamedTuple):
    """Examples that are divided into two lists."""

    kept: list[Example]
    drawn: list[Example]


def divide_test_set(examples: Sequence[Example]) -> Examples:
    """Returns {split: its examples}: one tenth for testing, one tenth for validation, and the rest for training."""
    test_division = split_off(examples, share=1 / 10)
    # A ninth of the remaining nine tenths is a tenth of all examples.
    valid_division = split_off(test_division.kept, share=1 / 9)
    return {"train": valid_division.kept, "valid": valid_division.drawn, "test": test_division.drawn}


def split_off(examples: Sequence[Example], share: float) -> Division:
    """Divides examples into two lists, by drawing a share of them at random.

    The examples of a group, as `name_group` defines it, stay together. The same examples are drawn each time. Both
    lists keep the order of the examples.
    """
    group_of_each_example = [name_group(example, index) for index, example in enumerate(examples)]
    # `dict.fromkeys` keeps the order of the examples, so that the draw is always the same.
    different_groups = list(dict.fromkeys(group_of_each_example))
    number_drawn = round(len(different_groups) * share)
    if number_drawn == 0 and different_groups:
        number_drawn = 1  # One group is drawn even if there are only a few.
    drawn_groups = set(random.Random(SEED).sample(different_groups, number_drawn))
    division = Division(kept=[], drawn=[])
    for group, example in zip(group_of_each_example, examples):
        if group in drawn_groups:
            division.drawn.append(example)
        else:
            division.kept.append(example)
    return division


def name_group(example: Example, index: int) -> str:
    """Returns a name that is the same for all examples that have to be in the same set, so that no text is in two sets.

    It is the paragraph or else the group of the example. An example without both is alone in a group, which its index
    among all examples names.
    """
    if example.paragraph:
        return example.paragraph
    if example.group:
        return example.group
    return str(index)


# ---- files

# what Python raises if a row is taken apart that has other columns or values than the corpus should have
ERRORS_OF_WRONG_ROWS = (AttributeError, KeyError, TypeError, IndexError)


def read_file(corpus: Corpus, path: Path, split: str, history_length: int) -> Iterator[Example]:
    """Yields the examples of a file.

    In the training set of a corpus of pairs, examples with an empty side are left out, and their number is printed
    after the last example. Elsewhere, an empty text is an error.

    Args:
        corpus: its record says how the file is read.
        path: the file.
        split: the split that the file belongs to.
        history_length: for dialogues, how many utterances before the reply are part of the source.

    Raises:
        UserError: an example is empty, or does not have the form that the corpus should have.
    """
    is_pair_of_texts = corpus.kind != "labels"
    may_leave_out = split == "train" and is_pair_of_texts
    # The scores of a test set are computed for each group. By default, the file of the test set is the group: the task
    # MNLI has two such files, whose scores are separate.
    default_group = path.stem if split == "test" else ""
    number_left_out = 0
    for number, row in read_rows(corpus, path):
        where = f"{path}: line {number}"
        example = make_example_or_explain(corpus, where, row, history_length, default_group)
        empty_side = name_empty_side(example)
        if empty_side is None:
            yield example
        elif may_leave_out:
            number_left_out += 1
        else:
            raise UserError(f"{where} has an empty {empty_side}; remove it")
    if number_left_out:
        print(f"{path}: {number_left_out} example(s) with an empty side are skipped")


def name_empty_side(example: Example) -> str | None:
    """Returns the name of an empty side of an example, for an error; None if no side is empty.

    The source is called the text, since in most corpora it is a text with a label.
    """
    if not example.source:
        return "text"
    if not example.target:
        return "target"
    return None


def read_rows(corpus: Corpus, path: Path) -> Rows:
    """Yields the rows of a file.

    Raises UserError if a row cannot be read because the file does not have the form that the corpus should have. The
    error names the last row before it, as the number of its own line is not known.
    """
    read = choose_reader(corpus, path)
    where = str(path)
    try:
        for numbered_row in read(corpus, path):
            where = f"{path}: after line {numbered_row.number}"  # for an error in the next row
            yield numbered_row
    except ERRORS_OF_WRONG_ROWS as error:
        raise UserError(explain_wrong_row(corpus, where, error)) from None


def explain_wrong_row(corpus: Corpus, where: str, error: Exception, columns: Iterable[str] = ()) -> str:
    """Returns the text of an error about a row that does not have the form that its corpus should have.

    Args:
        corpus: the corpus.
        where: names the row.
        error: one of `ERRORS_OF_WRONG_ROWS`.
        columns: the names of the row's columns; empty if they are not known.
    """
    contents = ", ".join(columns)[:99]  # a file of another kind may have very many columns
    if not contents:
        contents = "another form"
    return f"{where}: not a valid row of {corpus.name} ({type(error).__name__} {error}); the row has {contents}"


def make_example_or_explain(corpus: Corpus, where: str, row: Row, history_length: int, default_group: str) -> Example:
    """Returns the example that is in a row of a file. The arguments are those of `make_example`.

    Raises UserError if the row does not have the form that the corpus should have.
    """
    try:
        return make_example(corpus, where, row, history_length, default_group)
    except ERRORS_OF_WRONG_ROWS as error:
        raise UserError(explain_wrong_row(corpus, where, error, columns=row)) from None


def make_example(corpus: Corpus, where: str, row: Row, history_length: int, default_group: str) -> Example:
    """Returns the example that is in a row of a file.

    Args:
        corpus: its record says how source and target are made of the columns.
        where: names the row in an error.
        row: {name of a column: its value}.
        history_length: for dialogues, how many utterances before the reply are part of the source.
        default_group: the group of the example if the row does not name its group.
    """
    columns = name_columns(corpus, where, row, history_length)
    source = one_line(corpus.source.format(**columns))
    target = one_line(corpus.target.format(**columns))
    if corpus.kind == "labels":
        source = remove_markup(source)
    # Only some corpora have the columns "group", "answers" and "held out with", which stand for these fields.
    group = str(columns.get("group", ""))
    return Example(
        source,
        target,
        group=group if group else default_group,
        answers=columns.get("answers", ()),
        paragraph=str(columns.get("held out with", "")),
    )


def name_columns(corpus: Corpus, where: str, row: Row, history_length: int) -> Row:
    """Returns the columns of a row with the names and values that the format strings of its corpus need.

    - Each column gets the name that the corpus' record gives it.
    - Dialogues, which have the columns `persona` and `turns`, get a further column `history`. See `join_history`.
    - The value of the column `label` is replaced by the text that the model has to write. See `read_label`.
    - A number is rounded. Scores are computed with the exact number, which a further column `answers` has.

    Args:
        corpus: the corpus.
        where: names the row in an error.
        row: {name of a column: its value}.
        history_length: for dialogues, how many utterances before the reply are part of the source.
    """
    columns = {corpus.names.get(column, column): value for column, value in row.items()}
    is_dialogue = "turns" in columns
    if is_dialogue:
        columns["history"] = join_history(columns["persona"], columns["turns"], history_length)
    if has_labels(corpus):
        columns["label"] = read_label(corpus, where, columns["label"])
    number_column = corpus.number  # "" for a corpus without numbers
    if number_column and number_column in columns:
        exact_number = columns[number_column]
        columns[number_column] = round_number(where, exact_number)
        columns["answers"] = [str(exact_number)]
    return columns


def has_labels(corpus: Corpus) -> bool:
    """Returns whether the examples of a corpus have labels.

    A corpus of pairs can have labels too. In GLUE for T5, for example, the target of a pair is the text for a label.
    """
    return corpus.kind == "labels" or bool(corpus.labels)


def join_history(persona: Sequence[str], turns: Sequence[str], history_length: int) -> str:
    """Returns what a speaker in a dialogue knows before the reply, such as "I have a dog. | Hi! | Hello, who is it?".

    Args:
        persona: sentences about the speaker, all of which are used; empty if the corpus has none.
        turns: all utterances before the reply.
        history_length: how many of the last utterances are used, at least 1.
    """
    last_turns = turns[-history_length:]
    return " | ".join([*persona, *last_turns])


def round_number(where: str, number: Any) -> str:
    """Returns a number as text, rounded to a multiple of 0.2, as T5 does it for the task STS-B.

    `where`: names the row of the file in an error.
    """
    try:
        fifths = round(float(number) * 5)
    except ValueError:
        raise UserError(f'{where} has the score "{number}"; it must be a number') from None
    return f"{fifths / 5:.1f}"


def read_label(corpus: Corpus, where: str, value: Any) -> str:
    """Returns the text that a model has to write for a label: the corpus' text for it, or else the label itself.

    Args:
        corpus: the corpus.
        where: names the row of the file in an error.
        value: the label in the file, such as "1" or the number 1.
    """
    label = str(value).strip()
    if corpus.labels:
        if label not in corpus.labels:
            raise UserError(f'{where} has the label "{label}"; it must be one of {", ".join(corpus.labels)}')
        return corpus.labels[label]
    if len(label.split()) != 1:
        raise UserError(f'{where} has the label "{label}"; it must be one word')
    return label


def remove_markup(text: str) -> str:
    """Returns a text without HTML tags and entities, on one line and in lower case.

    In the corpus AG News, a backslash stands for a line break, and some entities have lost their ampersand, such as
    ``#36;`` instead of ``&#36;``.
    """
    text = text.replace("\\", " ")
    text = re.sub(r"(?<![&\w])#(\d+);", r"&#\1;", text)  # the lost ampersands
    text = html.unescape(text)  # for example, &#36; becomes $
    text = re.sub(r"</?[a-zA-Z][^<>]*>", " ", text)  # the tags
    return one_line(text.lower())


# ---- readers: each yields the rows of a file, {name of a column: its value}, with the numbers of their lines


def read_table(corpus: Corpus, path: Path) -> Rows:
    """Yields the rows of a .csv or .tsv file, without its heading.

    In a corpus with `broken_rows`, rows with too few columns are skipped, and their number is printed at the end.

    Raises:
        UserError: a row has too few columns, and the corpus has no `broken_rows`.
    """
    columns, rows = read_heading(corpus, read_cells(corpus, path))
    number_of_broken_rows = 0
    for line_number, cells in rows:
        if len(cells) >= len(columns):
            yield NumberedRow(line_number, name_cells(corpus, columns, cells))
        elif corpus.broken_rows:
            number_of_broken_rows += 1
        else:
            delimiter = "tabs" if has_tabs(corpus, path) else "commas"
            expected = f"{len(columns)} ({', '.join(columns)}), divided by {delimiter}"
            raise UserError(f"{path}: line {line_number} has {len(cells)} column(s), not {expected}")
    if number_of_broken_rows:
        print(f"{path}: {number_of_broken_rows} row(s) with fewer than {len(columns)} columns are skipped")


class TableFile(NamedTuple):
    """The contents of a .csv or .tsv file."""

    columns: Sequence[str]  # their names
    rows: Iterator["NumberedCells"]  # without the heading


def read_heading(corpus: Corpus, rows: Iterator["NumberedCells"]) -> TableFile:
    """Returns the names of the columns of a .csv or .tsv file, and all rows except for a heading.

    - If the first row is no heading, the corpus' record names the columns.
    - In texts with labels, the record names the columns too, whatever the heading calls them.
    - Otherwise, the heading names the columns.

    `rows`: all rows of the file.
    """
    first_row = next(rows, None)  # This takes the first row out of the iterator, which then has only the other rows.
    if first_row is None:  # an empty file
        return TableFile(corpus.columns, rows=rows)
    if not is_heading(corpus, first_row.cells):
        all_rows = itertools.chain([first_row], rows)
        return TableFile(corpus.columns, rows=all_rows)
    if corpus.kind == "labels":
        return TableFile(corpus.columns, rows=rows)
    return TableFile(first_row.cells, rows=rows)


def read_imdb_text(corpus: Corpus, path: Path) -> Rows:
    """Yields the only row of a file of the corpus IMDb: its text and its label.

    The name of the folder is the label: "neg" for a negative review (label 0) or "pos" for a positive one (label 1).
    """
    label = {"neg": "0", "pos": "1"}[path.parent.name]
    yield NumberedRow(1, {"label": label, "last": read_whole(path)})


def name_cells(corpus: Corpus, columns: Sequence[str], cells: Sequence[str]) -> Row:
    """Returns the cells of a row with the names of their columns: {name of a column: its cell}.

    For texts with labels, there are two additional columns: `rest` is all cells after the label, and `last` is the last
    cell. Cells without a column are otherwise left out.
    """
    row = dict(zip(columns, cells))
    if corpus.kind == "labels":
        row["rest"] = " ".join(cells[1:])
        row["last"] = cells[-1]
    return row


class NumberedCells(NamedTuple):
    """The cells of a row of a .csv or .tsv file, and the number of the line in which the row ends."""

    number: int
    cells: list[str]


def read_cells(corpus: Corpus, path: Path) -> Iterator[NumberedCells]:
    """Yields the cells of each row of a .csv or .tsv file. Empty rows are skipped."""
    csv.field_size_limit(1 << 30)  # characters in a cell; Python's default is too small for long articles
    text = io.StringIO(read_whole(path), newline="")
    if has_tabs(corpus, path):
        reader = csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE)  # quotation marks belong to the text
    else:
        reader = csv.reader(text, strict=True)  # raises an error at a stray quotation mark
    try:
        for cells in reader:
            if cells:
                yield NumberedCells(reader.line_num, cells)
    except csv.Error as error:
        raise UserError(f"{path}: the row that ends at line {reader.line_num} has a stray quote ({error})") from None


def has_tabs(corpus: Corpus, path: Path) -> bool:
    """Returns whether the columns of a .csv or .tsv file are divided by tabs; otherwise it is by commas."""
    if ".tsv" in path.suffixes:
        return True
    return corpus.kind != "labels" and "\t" in next(lines(path), "")


def is_heading(corpus: Corpus, cells: Sequence[str]) -> bool:
    """Returns whether the first row of a .csv or .tsv file has the names of the columns. `cells`: the first row."""
    if corpus.kind == "labels":
        name = re.sub(r"[\W_]+", " ", cells[0]).strip().lower()
        return name in ("label", "class", "class index")
    known = {*corpus.columns, *corpus.names}
    return not corpus.columns or not known.isdisjoint(cells)


def read_whole(path: Path) -> str:
    """Returns the text of a file."""
    return "\n".join(lines(path))


def read_objects(corpus: Corpus, path: Path) -> Rows:
    """Yields the rows of a file in which each line is a JSON object."""
    for number, line in enumerate(lines(path), start=1):
        try:
            columns = json.loads(line).items()
        except (ValueError, AttributeError):
            raise UserError(f"{path}: line {number} is no JSON object") from None
        row = {name: "" if value is None else value for name, value in columns}
        yield NumberedRow(number, row)


def second_file(corpus: Corpus, path: Path) -> Path | None:
    """Returns the file with the targets that belong to a file with sources; None if one file has both.

    X.source has its targets in X.target. In the corpus WiC, X.data.txt has its labels in X.gold.txt. The files may be
    compressed (.gz).
    """
    if choose_reader(corpus, path) is not read_two_files:
        return None  # the file has sources and targets
    name = path.name.removesuffix(".gz")
    target_name = name.replace(".source", ".target").replace(".data", ".gold")
    return plain_or_compressed(path.with_name(target_name))  # only one of the two files may be compressed


def read_two_files(corpus: Corpus, path: Path) -> Rows:
    """Yields a row for each line of a file with sources and the same line of the file with their targets."""
    targets = second_file(corpus, path)
    assert targets
    for number, pair in enumerate(read_pairs(FilePair(path, targets)), start=1):
        if corpus.columns:
            row = dict(zip(corpus.columns, pair.source.split("\t")))
            row["label"] = pair.target
        else:
            row = {"source": pair.source, "target": pair.target}
        yield NumberedRow(number, row)


def read_subject_line(corpus: Corpus, path: Path) -> Rows:
    """Yields the only row of a file of the corpus AESLC.

    Such a file has an e-mail, the line "@subject", the subject line of the e-mail, the line "@ann0", and further
    subject lines, which are not used.
    """
    email, _, rest = read_whole(path).partition("@subject")
    subject, _, _ = rest.partition("@ann0")
    yield NumberedRow(1, {"email": email, "subject": subject})


class Span(NamedTuple):
    """A part of a text: the characters from index `start` up to, but not including, index `end`."""

    start: int
    end: int


def read_wsc(corpus: Corpus, path: Path) -> Rows:
    """Yields the rows of the corpus WSC, whose task is to say whether a pronoun in a text refers to a noun.

    As in T5, marks are put around both in the text: ``* noun *`` and ``# pronoun #``.
    """
    for number, row in read_objects(corpus, path):
        text, target = row["text"], row["target"]
        where = f"{path}: line {number}"
        noun = find_words(where, text, target["span1_text"], target["span1_index"])
        pronoun = find_words(where, text, target["span2_text"], target["span2_index"])
        yield NumberedRow(number, {**row, "text": mark_spans(text, {"*": noun, "#": pronoun})})


def find_words(where: str, text: str, words: str, number_before: int) -> Span:
    """Returns the span of some words in a text, as indices of characters.

    If the words occur several times, the corpus WSC says how many words of the text are before the span that it means.
    This number is not always exact. So the span with the nearest number is taken.

    Args:
        where: names the row of the file in an error.
        text: the text.
        words: the words to find, with spaces between them.
        number_before: how many words of the text should be before the span.
    """
    pattern = r"\s+".join(re.escape(word) for word in words.split())
    whole_words = rf"(?<!\w){pattern}(?!\w)"  # without a letter directly before or after them
    spans = [Span(match.start(), match.end()) for match in re.finditer(whole_words, text, re.IGNORECASE)]
    if not spans:
        raise UserError(f'{where}: the text has no "{words}"; remove it')

    def distance(span: Span) -> int:
        """Returns by how much the number of words before a span differs from the number that should be there."""
        return abs(len(text[: span.start].split()) - number_before)

    return min(spans, key=distance)


def mark_spans(text: str, spans: Mapping[str, Span]) -> str:
    """Returns a text in which two spans have a mark before and after them, such as "* the cat * saw # her #".

    Marks are nested like brackets. For example, in the text "her cat" the spans {"*": "her cat", "#": "her"} are marked
    as "* # her # cat *".

    Args:
        text: the text.
        spans: {mark: the span that it is put around}. The two spans are not the same.
    """

    def length(mark: str) -> int:
        """Returns the length of the span with a mark."""
        return spans[mark].end - spans[mark].start

    shorter_first = sorted(spans, key=length)
    longer_first = list(reversed(shorter_first))
    marked = ""
    for index in range(len(text) + 1):  # the places before each character, and the end of the text
        # If one span ends where the other begins, it is closed before the other is opened.
        for mark in shorter_first:  # If both spans end here, the inner one is closed first.
            if spans[mark].end == index:
                marked += f" {mark}"
        for mark in longer_first:  # If both spans begin here, the outer one is opened first.
            if spans[mark].start == index:
                marked += f"{mark} "
        if index < len(text):
            marked += text[index]
    return marked


def read_multirc(corpus: Corpus, path: Path) -> Rows:
    """Yields a row for each answer in the corpus MultiRC. Its task is to say whether an answer to a question is right.

    A line of the file has a paragraph with several questions, which have several answers. The answers to a question are
    a group, and all groups of a paragraph are held out together. HTML tags are removed, as in T5.
    """
    for number, row in read_objects(corpus, path):
        paragraph = re.sub(r"</?b>|<br>", " ", row["passage"]["text"])
        for question in row["passage"]["questions"]:
            question_id = question.get("idx", question["question"])  # without a number, the question names itself
            for answer in question["answers"]:
                columns = {
                    "paragraph": paragraph,
                    "held out with": paragraph,  # all examples with this text will be in the same set
                    "group": f"{number}-{question_id}",
                    "question": question["question"],
                    "answer": answer["text"],
                    "label": answer.get("label", ""),
                }
                yield NumberedRow(number, columns)


def join_highlights(text: str) -> str:
    """Returns a passage of ReCoRD without the lines "@highlight", each of which has a highlight after it.

    The text before such a line gets a full stop, unless it ends with a punctuation mark. For example,
    "Ann met Bob\\n@highlight\\nBob ran" becomes "Ann met Bob. Bob ran".
    """
    joined, *highlights = text.split("\n@highlight\n")
    for highlight in highlights:
        if not joined.endswith((".", "?", "!", '"', "'")):
            joined += "."
        joined += f" {highlight}"
    return joined


def read_record(corpus: Corpus, path: Path) -> Rows:
    """Yields a row for each query of the corpus ReCoRD. Its task is to fill in a missing name from a passage.

    A query may have several right answers. The first is the target in training. The queries about a passage are a
    group. As in T5, `join_highlights` changes the passage.
    """
    for number, row in read_objects(corpus, path):
        text = row["passage"]["text"]
        names: list[str] = []
        for entity in row["passage"]["entities"]:
            start = entity["start"]
            end = entity["end"] + 1  # in this corpus, "end" is the index of the last character of the name
            names.append(text[start:end])
        different_names = list(dict.fromkeys(names))
        passage = join_highlights(text)
        for query in row["qas"]:
            answers = [answer["text"] for answer in query["answers"]]
            columns = {
                "group": number,
                "entities": ", ".join(different_names),
                "passage": passage,
                "query": query["query"],
                "answer": answers[0],
                "answers": answers,
            }
            yield NumberedRow(number, columns)


def read_persona_chat(corpus: Corpus, path: Path) -> Rows:
    """Yields a row for each reply in the dialogues of the corpus PersonaChat, in the format of ParlAI.

    The lines of each dialogue are numbered from 1. Its first lines describe the persona of the person who replies. Each
    further line has an utterance, a tab and the reply. More tabs and wrong replies may follow.
    """
    persona: list[str] = []
    turns: list[str] = []
    dialogue = 0
    for number, line in enumerate(lines(path), start=1):
        number_in_dialogue, _, text = line.partition(" ")
        if number_in_dialogue == "1":  # a new dialogue begins
            dialogue += 1
            persona = []
            turns = []
        if text.startswith("your persona: "):
            persona.append(text.removeprefix("your persona: "))
        elif "\t" in text:
            utterance, reply = text.split("\t")[:2]
            turns.append(utterance)
            # copies, as both lists may become longer before the row is used
            columns = {"persona": list(persona), "turns": list(turns), "reply": reply, "group": dialogue}
            yield NumberedRow(number, columns)
            turns.append(reply)


def read_utterances(corpus: Corpus, path: Path) -> Rows:
    """Yields a row for each utterance of the corpus DailyDialog that is a reply: all but the first of each dialogue.

    A line is a dialogue, with "__eou__" after each utterance.
    """
    for number, line in enumerate(lines(path), start=1):
        utterances = [text.strip() for text in line.split("__eou__") if text.strip()]
        for index in range(1, len(utterances)):
            columns = {"persona": [], "turns": utterances[:index], "reply": utterances[index], "group": number}
            yield NumberedRow(number, columns)


Reader = Callable[[Corpus, Path], Rows]
# {value of `rows` in the record of a corpus: the reader}
READERS: dict[str, Reader] = {
    "wsc": read_wsc,
    "multirc": read_multirc,
    "record": read_record,
    "persona_chat": read_persona_chat,
    "utterances": read_utterances,
}
# {ending of the name of a file: the reader}, for a corpus whose record has no `rows`
READERS_BY_ENDING: dict[str, Reader] = {
    ".jsonl": read_objects,
    ".source": read_two_files,
    ".data.txt": read_two_files,
    ".subject": read_subject_line,
}


def choose_reader(corpus: Corpus, path: Path) -> Reader:
    """Returns the reader for a file of a corpus, by the corpus' record or else by the ending of the file's name."""
    if corpus.rows:
        return READERS[corpus.rows]
    name = path.name.removesuffix(".gz")
    for ending, reader in READERS_BY_ENDING.items():
        if name.endswith(ending):
            return reader
    if corpus.kind == "labels" and path.suffix == ".txt":  # the corpus IMDb has a file for each text
        return read_imdb_text
    return read_table
