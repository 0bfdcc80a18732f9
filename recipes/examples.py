"""Reads examples (texts with labels, or pairs of texts) from the various file formats of their corpora."""

import contextlib
import csv
import html
import io
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    corpus: Corpus, files: Mapping[str, Sequence[Path]], history: int | None = None, limit: int | None = None
) -> Examples:
    """Returns the training, validation and test examples of a corpus. They are always the same examples.

    If the corpus has no validation set, a tenth of the training set is used for it. If it has no training set, its test
    set is divided into all three sets, and a validation set of its own is not used.

    Args:
        corpus: its record says how the files are read.
        files: {split: its files}.
        history: for dialogues, how many utterances before the reply are part of the source.
        limit: for texts with labels, how many examples are used for training and validation; None: all.

    Returns:
        {split: its examples}.

    Raises:
        UserError: no example is left for one of the sets.
    """
    examples: Examples = {}
    for split in SPLITS:
        examples[split] = []
        for path in files.get(split, ()):
            examples[split] += read_file(corpus, path, split, history)
    if corpus.kind == "labels":
        examples = draw_labelled_examples(examples, limit)
        refuse_unknown_labels(corpus, examples)
    if not examples["train"]:
        print(f"{corpus.name}: has no training set, so the test set is split: 80 % training, 10 % validation")
        examples = divide_test_set(examples["test"])
    if not examples["valid"]:
        division = split_off(examples["train"], share=0.1)
        examples["train"] = division.kept
        examples["valid"] = division.drawn
    for split in SPLITS:
        if not examples[split]:
            raise UserError(f"{corpus.name}: has too few examples: the {split} set would be empty")
    return examples


def draw_labelled_examples(examples: Examples, limit: int | None) -> Examples:
    """Returns the sets of examples with labels after shuffling the training examples and taking some of them.

    If there is no validation set, it gets a tenth of the training examples. A fixed seed decides the order.

    Args:
        examples: {split: its examples}.
        limit: how many training examples are taken; None: all.
    """
    shuffled = list(examples["train"])
    random.Random(SEED).shuffle(shuffled)
    drawn = shuffled[:limit]
    if examples["valid"]:
        return {**examples, "train": drawn}
    number_valid = len(drawn) // 10
    return {**examples, "valid": drawn[:number_valid], "train": drawn[number_valid:]}


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

    Examples with the same paragraph or group stay together, so that no text is in two sets. The same examples are drawn
    each time. Both lists keep the order of the examples.
    """
    groups: list[str] = []  # the group of each example
    for index, example in enumerate(examples):
        # An example without a paragraph and a group is a group of its own, which is named by its index.
        groups.append(example.paragraph or example.group or str(index))
    different_groups = list(dict.fromkeys(groups))  # in the order of the examples, so that the draw is always the same
    number_drawn = max(1, round(len(different_groups) * share))
    drawn_groups = set(random.Random(SEED).sample(different_groups, number_drawn))
    division = Division(kept=[], drawn=[])
    for group, example in zip(groups, examples):
        if group in drawn_groups:
            division.drawn.append(example)
        else:
            division.kept.append(example)
    return division


# ---- files


def read_file(corpus: Corpus, path: Path, split: str, history: int | None) -> Iterator[Example]:
    """Yields the examples of a file.

    Pairs of texts with an empty side are left out of the training set, and their number is printed. Elsewhere, an empty
    text is an error.

    Args:
        corpus: its record says how the file is read.
        path: the file.
        split: the split that the file belongs to.
        history: for dialogues, how many utterances before the reply are part of the source.

    Raises:
        UserError: an example is empty, or does not have the form that the corpus should have.
    """
    has_pairs_of_texts = corpus.kind != "labels"
    may_leave_out = split == "train" and has_pairs_of_texts
    # MNLI has two test files with separate scores. So in a test set, the name of the file is the group by default.
    default_group = path.stem if split == "test" else ""
    number_left_out = 0
    for number, row in read_rows(corpus, path):
        where = f"{path}: line {number}"
        with clear_error_if_row_is_wrong(corpus, where, row):
            example = make_example(corpus, where, row, history, default_group)
        if example.source and example.target:
            yield example
        elif may_leave_out:
            number_left_out += 1
        else:
            empty_side = "target" if example.source else "text"
            raise UserError(f"{where} has an empty {empty_side}; remove it")
    if number_left_out:
        print(f"{path}: {number_left_out} example(s) with an empty side are skipped")


def read_rows(corpus: Corpus, path: Path) -> Rows:
    """Yields the rows of a file.

    Raises UserError, which names the place, if the file does not have the form that the corpus should have.
    """
    read = choose_reader(corpus, path)
    rows = read(corpus, path)
    where = str(path)
    while True:
        # Only `next`, which reads a row, is inside of the with statement, and not what the caller does with the row. If
        # `next` fails, the row is not known yet. So the error names the row before it.
        with clear_error_if_row_is_wrong(corpus, where, row={}):
            numbered_row = next(rows, None)
        if numbered_row is None:
            return
        yield numbered_row
        where = f"{path}: after line {numbered_row.number}"


@contextlib.contextmanager
def clear_error_if_row_is_wrong(corpus: Corpus, where: str, row: Row) -> Iterator[None]:
    """Raises a UserError that names a row and its columns if the block of this context manager cannot read the row.

    The block fails if it takes a row apart that has other columns or values than the corpus should have.

    Args:
        corpus: the corpus that the row should belong to.
        where: names the row.
        row: its columns; empty if they are not known.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        columns = ", ".join(row) or "another form"
        problem = f"{type(error).__name__} {error}; it has {columns[:99]}"
        raise UserError(f"{where}: no row of {corpus.name}: {problem}") from None


def make_example(corpus: Corpus, where: str, row: Row, history: int | None, default_group: str) -> Example:
    """Returns the example that is in a row of a file.

    Args:
        corpus: its record says how source and target are made of the columns.
        where: names the row in an error.
        row: {name of a column: its value}.
        history: for dialogues, how many utterances before the reply are part of the source.
        default_group: the group of the example if the row does not name its group.
    """
    columns = name_columns(corpus, where, row, history)
    source = one_line(corpus.source.format(**columns))
    target = one_line(corpus.target.format(**columns))
    if corpus.kind == "labels":
        source = remove_markup(source)
    # Some readers add two columns to a row: examples with the same `group` are scored together, and examples with the
    # same text in `held out with` (the paragraph that they are about) stay together when a set is held out.
    return Example(
        source,
        target,
        group=str(row.get("group", "")) or default_group,
        answers=columns.get("answers", ()),
        paragraph=str(row.get("held out with", "")),
    )


def name_columns(corpus: Corpus, where: str, row: Row, history: int | None) -> Row:
    """Returns a row of a file in the form in which the format strings of its corpus need it.

    The columns get the names that the corpus' record gives them. A label is replaced by the text that the model has to
    write, a number is rounded, and a dialogue is joined to one text.

    Args:
        corpus: the corpus.
        where: names the row in an error.
        row: {name of a column: its value}.
        history: for dialogues, how many utterances before the reply are part of the source; None for `HISTORY`.
    """
    columns = {corpus.names.get(column, column): text for column, text in row.items()}
    is_dialogue = "turns" in columns
    if is_dialogue:
        number_of_turns = HISTORY if history is None else history
        last_turns = columns["turns"][-number_of_turns:]
        columns["history"] = " | ".join([*columns["persona"], *last_turns])
    # In GLUE for T5, the examples are pairs of texts, and the target text is the label, written out.
    has_labels = corpus.kind == "labels" or bool(corpus.labels)
    if has_labels:
        columns["label"] = read_label(corpus, where, str(columns["label"]).strip())
    if corpus.number and corpus.number in columns:  # the column with numbers, if the corpus has one
        number = columns[corpus.number]
        columns[corpus.number] = round_number(where, number)
        columns["answers"] = [str(number)]  # scores are computed with the exact number
    return columns


def round_number(where: str, number: Any) -> str:
    """Returns a number as text, rounded to a multiple of 0.2, as T5 does it for the task STS-B.

    `where`: names the row of the file in an error.
    """
    try:
        fifths = round(float(number) * 5)
    except ValueError:
        raise UserError(f'{where} has the score "{number}"; it must be a number') from None
    return f"{fifths / 5:.1f}"


def read_label(corpus: Corpus, where: str, label: str) -> str:
    """Returns the text that a model has to write for a label: the corpus' text for it, or else the label itself.

    `where`: names the row of the file in an error.
    """
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
    """Yields the rows of a .csv or .tsv file. The corpus IMDb has instead a .txt file for each text, which is one row.

    Raises:
        UserError: a row has too few columns, and the corpus does not allow that (`broken_rows`).
    """
    is_single_text = corpus.kind == "labels" and path.suffix == ".txt"
    if is_single_text:
        yield read_imdb_text(path)
        return
    columns: Sequence[str] = corpus.columns
    number_of_broken_rows = 0
    is_first_row = True
    for line_number, cells in read_cells(corpus, path):
        if is_first_row and is_heading(corpus, cells):
            columns = choose_columns(corpus, heading=cells)
        elif len(cells) >= len(columns):
            yield NumberedRow(line_number, name_cells(corpus, columns, cells))
        elif corpus.broken_rows:
            number_of_broken_rows += 1
        else:
            delimiter = "tabs" if has_tabs(corpus, path) else "commas"
            expected = f"{len(columns)} ({', '.join(columns)}), divided by {delimiter}"
            raise UserError(f"{path}: line {line_number} has {len(cells)} column(s), not {expected}")
        is_first_row = False
    if number_of_broken_rows:
        print(f"{path}: {number_of_broken_rows} row(s) with fewer than {len(columns)} columns are skipped")


def read_imdb_text(path: Path) -> NumberedRow:
    """Returns the text in a file of the corpus IMDb, with its label, as a row.

    The name of the folder is the label: "neg" for a negative review (label 0) or "pos" for a positive one (label 1).
    """
    label = {"neg": "0", "pos": "1"}[path.parent.name]
    return NumberedRow(1, {"label": label, "last": read_whole(path)})


def choose_columns(corpus: Corpus, heading: Sequence[str]) -> Sequence[str]:
    """Returns the names of the columns of a .csv or .tsv file. `heading`: its first row, which has names of columns.

    The columns of texts with labels have fixed names, whatever the heading calls them.
    """
    if corpus.kind == "labels":
        return corpus.columns
    return heading


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
        reader = csv.reader(text, strict=True)
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
    # `plain_or_compressed` also finds the file if it is compressed. One of the two files may be, and the other one not.
    return plain_or_compressed(path.with_name(target_name))


def read_two_files(corpus: Corpus, path: Path) -> Rows:
    """Yields a row for each line of a file with sources and the same line of the file with their targets."""
    targets = second_file(corpus, path)
    assert targets
    for number, pair in enumerate(read_pairs(FilePair(path, targets), clean=str), start=1):
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


def find_words(where: str, text: str, words: str, words_before: int) -> Span:
    """Returns the span of some words in a text, as indices of characters.

    If the words occur several times, it is the span before which there are about `words_before` words. This number is
    not always exact in the corpus WSC, so that the nearest span is taken.

    Args:
        where: names the row of the file in an error.
        text: the text.
        words: the words to find, with spaces between them.
        words_before: how many words of the text should be before the span.
    """
    pattern = r"\s+".join(re.escape(word) for word in words.split())
    whole_words = rf"(?<!\w){pattern}(?!\w)"  # without a letter directly before or after them
    spans = [Span(match.start(), match.end()) for match in re.finditer(whole_words, text, re.IGNORECASE)]
    if not spans:
        raise UserError(f'{where}: the text has no "{words}"; remove it')

    def distance(span: Span) -> int:
        """Returns by how much the number of words before a span differs from the number that should be there."""
        return abs(len(text[: span.start].split()) - words_before)

    return min(spans, key=distance)


def mark_spans(text: str, spans: Mapping[str, Span]) -> str:
    """Returns a text in which two spans have a mark before and after them, such as "* the cat * saw # her #".

    If one span contains the other, the marks of the longer span are the outer marks. For example, "* # her # cat *" has
    the spans "her cat" and "her", which begin at the same place.

    Args:
        text: the text.
        spans: {mark: the span that it is put around}.
    """

    def length(mark: str) -> int:
        """Returns the length of the span with a mark."""
        return spans[mark].end - spans[mark].start

    shorter_first = sorted(spans, key=length)
    longer_first = sorted(spans, key=length, reverse=True)
    marked_text = ""
    for place, character in enumerate(f"{text} "):  # the space stands for the end of the text, where a span may end
        for mark in shorter_first:
            if spans[mark].end == place:
                marked_text += f" {mark}"
        for mark in longer_first:
            if spans[mark].start == place:
                marked_text += f"{mark} "
        marked_text += character
    return marked_text[:-1]


def read_multirc(corpus: Corpus, path: Path) -> Rows:
    """Yields a row for each answer in the corpus MultiRC. Its task is to say whether an answer to a question is right.

    A line of the file has a paragraph with several questions, which have several answers. The answers to a question are
    a group, and all groups of a paragraph are held out together. HTML tags are removed, as in T5.
    """
    for number, row in read_objects(corpus, path):
        paragraph = re.sub(r"</?b>|<br>", " ", row["passage"]["text"])
        for question in row["passage"]["questions"]:
            question_id = question.get("idx", question["question"])
            for answer in question["answers"]:
                columns = {
                    "paragraph": paragraph,
                    "held out with": paragraph,
                    "group": f"{number}-{question_id}",
                    "question": question["question"],
                    "answer": answer["text"],
                    "label": answer.get("label", ""),
                }
                yield NumberedRow(number, columns)


def join_highlights(text: str) -> str:
    """Returns a passage of ReCoRD in which the highlights at its end have become sentences of the passage.

    A highlight follows the line "@highlight". The text before that line gets a full stop if it does not end with a
    punctuation mark.
    """

    def replace_marker(match: re.Match[str]) -> str:
        """Returns the punctuation mark before the line "@highlight", or else a full stop, and a space."""
        punctuation_mark = match[1] or "."
        return f"{punctuation_mark} "

    return re.sub(r"([.?!\"']?)\n@highlight\n", replace_marker, text)


def read_record(corpus: Corpus, path: Path) -> Rows:
    """Yields a row for each query of the corpus ReCoRD. Its task is to fill in a missing name from a passage.

    A query may have several right answers. The first is the target in training. As in T5, the highlights at the end of
    the passage become sentences of it.
    """
    for number, row in read_objects(corpus, path):
        text = row["passage"]["text"]
        # In this corpus, "end" is the index of the last character of a name, and not of the character after it.
        names = [text[entity["start"] : entity["end"] + 1] for entity in row["passage"]["entities"]]
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
        line_number, _, text = line.partition(" ")
        if line_number == "1":
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
    "table": read_table,
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
    return read_table
