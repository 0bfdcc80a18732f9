"""Reads the examples of labelled text and of pairs of texts, in every form that their corpora come in."""

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
from .text import at_hand, lines

SEED = 1  # decides the order of labelled examples, and what is held out
HISTORY = 5  # utterances before the one to be written, by default

Row = dict[str, Any]  # {column: text}


class NumberedRow(NamedTuple):
    """A row of a file, and the number of its line."""

    number: int
    row: Row


Rows = Iterator[NumberedRow]


class Example(NamedTuple):
    """A source and a target line, with what scoring needs. For labelled text the target is the label."""

    source: str
    target: str
    group: str = ""  # what is held out or scored together: a dialogue, or the questions on a text
    answers: Sequence[str] = ()  # all right answers, where there are several
    paragraph: str = ""  # what is held out together, where that is more than a group


Examples = dict[str, list[Example]]  # {split: its examples}


def read_examples(
    corpus: Corpus, files: Mapping[str, Sequence[Path]], history: int | None = None, limit: int | None = None
) -> Examples:
    """Returns {split: examples} of a corpus, always the same ones.

    Without a validation set a tenth of the training set is held out. A corpus that may lack a training set gets one
    from its test set.

    `files`: {split: its files}. `history`: utterances of a dialogue that are part of the source. `limit`: how many
    labelled examples are drawn to train and validate.
    """
    examples: Examples = {}
    for split in SPLITS:
        examples[split] = []
        for path in files.get(split, ()):
            examples[split] += read_file(corpus, path, split, history)
    if corpus.kind == "labels":
        draw_labelled(corpus, examples, limit)
    if not examples["train"]:
        print(f"{corpus.name}: no training set; it gets eight tenths of the test set, and the validation set one")
        nine_tenths, examples["test"] = split_off(examples["test"], share=0.1)
        examples["train"], examples["valid"] = split_off(nine_tenths, share=1 / 9)
    if not examples["valid"]:
        examples["train"], examples["valid"] = split_off(examples["train"], share=0.1)
    for split in SPLITS:
        if not examples[split]:
            raise UserError(f"{corpus.name}: has too few examples; none is left for the {split} set")
    return examples


def draw_labelled(corpus: Corpus, examples: Examples, limit: int | None) -> None:
    """Shuffles the training set, shortens it to `limit` examples, and holds a tenth out where no set validates.

    `examples` is changed. A label that only the other sets have raises an error.
    """
    random.Random(SEED).shuffle(examples["train"])
    examples["train"] = examples["train"][:limit]
    if not examples["valid"]:
        number = len(examples["train"]) // 10
        examples["valid"] = examples["train"][:number]
        examples["train"] = examples["train"][number:]
    labels = {example.target for example in examples["train"]}
    for example in (*examples["valid"], *examples["test"]):
        if example.target not in labels:
            text = f'the label {example.target} of "{example.source[:40]}"'
            raise UserError(f"{corpus.name}: no training example has {text}")


def split_off(examples: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """Returns the examples that stay and those that are split off, a share of the groups, both in their order.

    A fixed seed decides which groups are split off.
    """
    # an example without a paragraph and a group is a group of its own
    keys = [example.paragraph or example.group or str(place) for place, example in enumerate(examples)]
    groups = list(dict.fromkeys(keys))
    number = max(1, round(len(groups) * share))
    chosen = set(random.Random(SEED).sample(groups, number))
    kept = [example for key, example in zip(keys, examples) if key not in chosen]
    removed = [example for key, example in zip(keys, examples) if key in chosen]
    return kept, removed


# ---- files


def read_file(corpus: Corpus, path: Path, split: str, history: int | None) -> Iterator[Example]:
    """Yields the examples of a file. Training pairs with an empty side are left out, and their number is printed."""
    read_rows = choose_reader(corpus, path)
    left_out = 0
    where = str(path)
    row_at_hand: Row = {}  # for the message of an error
    try:
        for number, row in read_rows(corpus, path):
            where = f"{path}: line {number}"
            row_at_hand = row
            # the name of a test file is the group of its examples, as MNLI's two test sets are scored apart
            default_group = path.stem if split == "test" else ""
            example = make_example(corpus, where, row, history, default_group)
            if example.source and example.target:
                yield example
            elif split == "train" and corpus.kind != "labels":
                left_out += 1
            else:
                raise UserError(f"{where} has an empty {'target' if example.source else 'text'}; remove it")
            # the reader comes to the next row now
            where = f"{path}: behind line {number}"
            row_at_hand = {}
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        columns = ", ".join(row_at_hand)[:99] or "another form"
        problem = f"{type(error).__name__} {error}; it has {columns}"
        raise UserError(f"{where}: no row of {corpus.name}: {problem}") from None
    if left_out:
        print(f"{path}: {left_out} example(s) with an empty side are left out")


def make_example(corpus: Corpus, where: str, row: Row, history: int | None, default_group: str) -> Example:
    """Returns the example in a row, in the form of its corpus. `where`: names the row in an error."""
    columns = name_columns(corpus, where, row, history)
    source = one_line(corpus.source.format(**columns))
    target = one_line(corpus.target.format(**columns))
    if corpus.kind == "labels":
        source = remove_markup(source)
    return Example(
        source,
        target,
        group=str(row.get("group", "")) or default_group,
        answers=columns.get("answers", ()),
        paragraph=str(row.get("held out with", "")),
    )


def name_columns(corpus: Corpus, where: str, row: Row, history: int | None) -> Row:
    """Returns a row with the column names of its corpus, and its label, number or history as it is to be written."""
    columns = {corpus.names.get(column, column): text for column, text in row.items()}
    if "turns" in row:  # a dialogue
        last_turns = row["turns"][-(history or HISTORY) :]
        columns["history"] = " | ".join([*row["persona"], *last_turns])
    if corpus.kind == "labels" or corpus.labels:
        columns["label"] = read_label(corpus, where, str(columns["label"]).strip())
    if corpus.number and corpus.number in columns:
        number = columns[corpus.number]
        columns["answers"] = [str(number)]  # scores are computed with the number as it was
        columns[corpus.number] = round_number(where, number)
    return columns


def round_number(where: str, number: Any) -> str:
    """Returns a number in steps of 0.2, as T5 writes the scores of STS-B. `where`: names the row in an error."""
    try:
        fifths = round(float(number) * 5)
    except ValueError:
        raise UserError(f'{where} has the score "{number}"; it must be a number') from None
    return f"{fifths / 5:.1f}"


def read_label(corpus: Corpus, where: str, label: str) -> str:
    """Returns a label as it is to be written."""
    if corpus.labels:
        if label not in corpus.labels:
            raise UserError(f'{where} has the label "{label}"; it must be one of {", ".join(corpus.labels)}')
        return corpus.labels[label]
    if len(label.split()) != 1:
        raise UserError(f'{where} has the label "{label}"; it must be one word')
    return label


def remove_markup(text: str) -> str:
    """Returns a text of one line without markup, in small letters.

    AG News has line breaks as backslashes, and entities that lost their ampersand: ``#36;`` for ``&#36;``.
    """
    text = text.replace("\\", " ")
    text = re.sub(r"(?<![&\w])#(\d+);", r"&#\1;", text)
    text = re.sub(r"</?[a-zA-Z][^<>]*>", " ", html.unescape(text))
    return one_line(text.lower())


# ---- readers: each yields the rows of a file


def read_table(corpus: Corpus, path: Path) -> Rows:
    """Yields the rows of a .csv or .tsv file, or the one row of a .txt file of IMDb, which is a text.

    Rows of labelled text have two columns more: `rest`, all cells behind the label, and `last`, the last cell.
    """
    if corpus.kind == "labels" and path.suffix == ".txt":
        label = {"neg": "0", "pos": "1"}[path.parent.name]  # IMDb has a folder for each label
        yield NumberedRow(1, {"label": label, "last": read_whole(path)})
        return
    columns = list(corpus.columns)
    broken_rows = 0
    is_first = True
    for number, cells in read_cells(corpus, path):
        if is_first and is_heading(corpus, cells):
            columns = list(corpus.columns) if corpus.kind == "labels" else cells
        elif len(cells) >= len(columns):
            row = dict(zip(columns, cells))
            if corpus.kind == "labels":
                row["rest"] = " ".join(cells[1:])
                row["last"] = cells[-1]
            yield NumberedRow(number, row)
        elif corpus.broken_rows:
            broken_rows += 1
        else:
            delimiter = "tabs" if has_tabs(corpus, path) else "commas"
            expected = f"{len(columns)} ({', '.join(columns)}), divided by {delimiter}"
            raise UserError(f"{path}: line {number} has {len(cells)} column(s), not {expected}")
        is_first = False
    if broken_rows:
        print(f"{path}: {broken_rows} row(s) with fewer than {len(columns)} columns are left out")


class NumberedCells(NamedTuple):
    """The cells of a row of a table, and the number of the line that it ends in."""

    number: int
    cells: list[str]


def read_cells(corpus: Corpus, path: Path) -> Iterator[NumberedCells]:
    """Yields the cells of each row of a .csv or .tsv file that is not empty."""
    csv.field_size_limit(1 << 30)  # characters: Python's default is less than a long article
    text = io.StringIO(read_whole(path), newline="")
    if has_tabs(corpus, path):
        reader = csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader(text, strict=True)
    try:
        for cells in reader:
            if cells:
                yield NumberedCells(reader.line_num, cells)
    except csv.Error as error:
        raise UserError(f"{path}: the row that ends at line {reader.line_num} has a stray quote ({error})") from None


def has_tabs(corpus: Corpus, path: Path) -> bool:
    """Returns whether tabs divide the columns of a table, not commas."""
    if ".tsv" in path.suffixes:
        return True
    return corpus.kind != "labels" and "\t" in next(lines(path), "")


def is_heading(corpus: Corpus, cells: Sequence[str]) -> bool:
    """Returns whether the first row of a table names its columns."""
    if corpus.kind == "labels":
        name = re.sub(r"[\W_]+", " ", cells[0]).strip().lower()
        return name in ("label", "class", "class index")
    known = {*corpus.columns, *corpus.names}
    return not corpus.columns or not known.isdisjoint(cells)


def read_whole(path: Path) -> str:
    """Returns the text of a file."""
    return "\n".join(lines(path))


def read_objects(corpus: Corpus, path: Path) -> Rows:
    """Yields a row for each line, which is a JSON object."""
    for number, line in enumerate(lines(path), start=1):
        try:
            columns = json.loads(line).items()
        except (ValueError, AttributeError):
            raise UserError(f"{path}: line {number} is no JSON object") from None
        row = {name: "" if value is None else value for name, value in columns}
        yield NumberedRow(number, row)


def second_file(corpus: Corpus, path: Path) -> Path | None:
    """Returns the file with the targets of a file of sources, or None where one file has both.

    X.target belongs to X.source, and WiC's labels X.gold.txt to its rows X.data.txt. Either may be compressed (.gz).
    """
    if choose_reader(corpus, path) is not read_two_files:
        return None
    if corpus.columns:
        name = path.name.replace(".data", ".gold")
    else:
        name = path.name.replace(".source", ".target")
    return at_hand(path.with_name(name.replace(".gz", "")))


def read_two_files(corpus: Corpus, path: Path) -> Rows:
    """Yields a row for each line of X.source with the same line of X.target, or of WiC's X.data.txt and X.gold.txt."""
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
    """Yields the row of a file of AESLC: an e-mail, @subject and its subject line, then further subject lines."""
    email, _, rest = read_whole(path).partition("@subject")
    subject, _, _ = rest.partition("@ann0")
    yield NumberedRow(1, {"email": email, "subject": subject})


class Span(NamedTuple):
    """A part of a text: the characters from `start` to before `end`."""

    start: int
    end: int


def read_wsc(corpus: Corpus, path: Path) -> Rows:
    """Yields the rows of WSC. The noun is marked as ``* noun *`` and the pronoun as ``# pronoun #``, as in T5."""
    for number, row in read_objects(corpus, path):
        text, target = row["text"], row["target"]
        where = f"{path}: line {number}"
        noun = find_words(where, text, target["span1_text"], target["span1_index"])
        pronoun = find_words(where, text, target["span2_text"], target["span2_index"])
        yield NumberedRow(number, {**row, "text": mark_spans(text, {"*": noun, "#": pronoun})})


def find_words(where: str, text: str, words: str, index: int) -> Span:
    """Returns the span of some words in a text. Where they occur repeatedly, it is the span nearest to word `index`.

    In some rows of WSC the index is one off. `where`: names the row in an error.
    """
    pattern = r"\s+".join(re.escape(word) for word in words.split())
    whole_words = rf"(?<!\w){pattern}(?!\w)"
    spans = [Span(match.start(), match.end()) for match in re.finditer(whole_words, text, re.IGNORECASE)]
    if not spans:
        raise UserError(f'{where}: the text has no "{words}"; remove it')

    def distance(span: Span) -> int:
        """Returns how many words lie between the beginning of a span and word `index`."""
        words_before = len(text[: span.start].split())
        return abs(words_before - index)

    return min(spans, key=distance)


class Insertion(NamedTuple):
    """A text that is inserted into another one, before the character at a place."""

    place: int
    order: int  # of several insertions at one place, the one with the smallest number comes first
    text: str


def mark_spans(text: str, spans: Mapping[str, Span]) -> str:
    """Returns a text with a mark before and behind each of two spans. `spans`: {mark: its span}.

    One span may contain the other; its marks are then the outer ones.
    """
    insertions: list[Insertion] = []
    for mark, span in spans.items():
        # Where both spans begin at one place, the longer span's mark has to come first: its end is the larger number.
        # Where both end at one place, the shorter span's mark has to come first: its start is the larger number.
        insertions.append(Insertion(span.start, order=-span.end, text=f"{mark} "))
        insertions.append(Insertion(span.end, order=-span.start, text=f" {mark}"))
    # from the end on, so that the places before stay the same
    for insertion in sorted(insertions, reverse=True):
        text = text[: insertion.place] + insertion.text + text[insertion.place :]
    return text


def read_multirc(corpus: Corpus, path: Path) -> Rows:
    """Yields a row for each answer of MultiRC. The answers to one question are a group.

    The groups on one paragraph are held out together. The paragraph loses its markup, as in T5.
    """
    for number, row in read_objects(corpus, path):
        paragraph = re.sub(r"</?b>|<br>", " ", row["passage"]["text"])
        for question in row["passage"]["questions"]:
            name = question.get("idx", question["question"])
            for answer in question["answers"]:
                columns = {
                    "paragraph": paragraph,
                    "held out with": paragraph,
                    "group": f"{number}-{name}",
                    "question": question["question"],
                    "answer": answer["text"],
                    "label": answer.get("label", ""),
                }
                yield NumberedRow(number, columns)


def read_record(corpus: Corpus, path: Path) -> Rows:
    """Yields a row for each query of ReCoRD with its right answers, of which the first is to be written.

    The highlights of the passage become sentences.
    """
    for number, row in read_objects(corpus, path):
        text = row["passage"]["text"]
        # "end" is the place of an entity's last character
        entities = [text[entity["start"] : entity["end"] + 1] for entity in row["passage"]["entities"]]
        passage = re.sub(r"([.?!\"']?)\n@highlight\n", lambda match: f"{match[1] or '.'} ", text)
        for query in row["qas"]:
            answers = [answer["text"] for answer in query["answers"]]
            columns = {
                "group": number,
                "entities": ", ".join(dict.fromkeys(entities)),  # each once
                "passage": passage,
                "query": query["query"],
                "answer": answers[0],
                "answers": answers,
            }
            yield NumberedRow(number, columns)


def read_persona_chat(corpus: Corpus, path: Path) -> Rows:
    """Yields a row for each reply in dialogues of ParlAI.

    The lines of a dialogue are numbered from 1. First come the lines that describe the persona of who replies. Each
    further line has what is said, a tab and the reply; other candidates for the reply may follow after more tabs.
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
            heard, reply = text.split("\t")[:2]
            turns.append(heard)
            columns = {"persona": persona, "turns": list(turns), "reply": reply, "group": dialogue}
            yield NumberedRow(number, columns)
            turns.append(reply)


def read_utterances(corpus: Corpus, path: Path) -> Rows:
    """Yields a row for each utterance of DailyDialog but the first: a line is a dialogue, with __eou__ between them."""
    for number, line in enumerate(lines(path), start=1):
        utterances = [text.strip() for text in line.split("__eou__") if text.strip()]
        for place in range(1, len(utterances)):
            columns = {"persona": [], "turns": utterances[:place], "reply": utterances[place], "group": number}
            yield NumberedRow(number, columns)


Reader = Callable[[Corpus, Path], Rows]
# {what a corpus has as its `rows`: its reader}
READERS: dict[str, Reader] = {
    "table": read_table,
    "wsc": read_wsc,
    "multirc": read_multirc,
    "record": read_record,
    "persona_chat": read_persona_chat,
    "utterances": read_utterances,
}
# {how the name of a file ends: its reader, where the corpus names none}
READERS_BY_ENDING: dict[str, Reader] = {
    ".jsonl": read_objects,
    ".source": read_two_files,
    ".data.txt": read_two_files,
    ".subject": read_subject_line,
}


def choose_reader(corpus: Corpus, path: Path) -> Reader:
    """Returns the reader for a file of a corpus: a table's unless the corpus or the file's name asks for another."""
    if corpus.rows:
        return READERS[corpus.rows]
    name = path.name.removesuffix(".gz")
    for ending, reader in READERS_BY_ENDING.items():
        if name.endswith(ending):
            return reader
    return read_table
