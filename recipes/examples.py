"""Texts with labels, and pairs of texts: the examples of their files. Columns, labels and forms: corpora.yaml."""

import csv
import html
import io
import json
import random
import re
from pathlib import Path
from typing import Any, Callable, Container, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from .command import UserError
from .corpora import SPLITS, Corpus, files_of, text_of

SEED = 1  # of the order, and of what is held out
JOIN = " | "  # between a persona's sentences and the utterances
Count = Optional[int]
Row = Dict[str, Any]  # {column: text}; "line" is where it stands in its file


class Example(NamedTuple):
    """Both texts, each a line, and what is known of them beside. The target of a text with a label is the label."""

    source: str
    target: str
    group: str = ""  # what is held out or scored together: a dialogue, the questions on a text
    answers: Sequence[str] = ()  # right ones, if there are several


Examples = Dict[str, List[Example]]  # {split: its examples}


def read(corpus: Corpus, folder: Path, history: Count = None, examples: Count = None, valid: Count = None) -> Examples:
    """The examples of a folder, always the same. Without a validation set a tenth of the training set is held out.

    Args:
        history: utterances before the one to be written.
        examples: how many texts with labels to keep, of training and validation.
        valid: how many of them are held out; default: a tenth.
    """
    files = files_of(corpus, folder, optional=("train", "valid") if corpus.test_is_enough else ("valid",))
    found: Examples = {split: [] for split in SPLITS}
    for split, paths in files.items():
        known = {example.target for example in found["train"]}
        found[split] = [example for path in paths for example in read_file(corpus, path, split, history, known)]
        if paths and not found[split]:
            raise UserError(f"{paths[0]}: has no examples")
    if corpus.kind == "labels":
        return drawn(found, folder, examples, valid)
    if not found["train"]:
        print(f"{folder}: no training set; eight tenths of the test set are trained on, one validates, one is left")
        found["train"], found["test"] = held_out(found["test"], 0.1)
        found["train"], found["valid"] = held_out(found["train"], 1 / 9)
    if not found["valid"]:
        found["train"], found["valid"] = held_out(found["train"], 0.1)
    for split in SPLITS:
        if not found[split]:
            raise UserError(f"{folder}: has too few examples of {corpus.name}; none is left for the {split} set")
    return found


def held_out(examples: Sequence[Example], part: float) -> Tuple[List[Example], List[Example]]:
    """The examples in two, by groups, in their order; which groups, a fixed seed decides."""
    keys = [example.group or str(i) for i, example in enumerate(examples)]
    groups = list(dict.fromkeys(keys))
    chosen = set(random.Random(SEED).sample(groups, max(1, round(len(groups) * part))))
    kept = [example for key, example in zip(keys, examples) if key not in chosen]
    return kept, [example for key, example in zip(keys, examples) if key in chosen]


def drawn(found: Examples, folder: Path, most: Count, valid: Count) -> Examples:
    """Texts with labels: the training set in a random order, a part of it held out, and no label without training."""
    random.Random(SEED).shuffle(found["train"])
    found["train"] = found["train"][:most]
    if valid and found["valid"]:
        raise UserError(f"--valid {valid}: {folder} has a validation set; leave it out")
    if not found["valid"]:
        n = valid or max(1, len(found["train"]) // 10)
        if n >= len(found["train"]):
            raise UserError(
                f"--valid {n}: leaves nothing of {len(found['train'])} examples to train on; hold out fewer"
            )
        found["valid"], found["train"] = found["train"][:n], found["train"][n:]
    known = {example.target for example in found["train"]}
    for split in ("valid", "test"):
        for example in found[split]:
            if example.target not in known:
                raise UserError(
                    f"{folder}: the {split} set has the label {example.target}, which no training example has (they "
                    f'have {", ".join(sorted(known))}); the text is "{example.source[:40]}"'
                )
    return found


def read_file(corpus: Corpus, path: Path, split: str, history: Count, known: Container[str]) -> Iterator[Example]:
    """The examples of a file. Training pairs with an empty side are left out.

    `known`: labels of the training set, which are not taken for headings.
    """
    is_labels = corpus.kind == "labels"
    try:
        rows = list(reader_of(corpus, path)(corpus, path))
    except KeyError as error:
        raise UserError(f"{path}: a row has no {error}; is this the right corpus?") from None
    except (TypeError, IndexError):
        raise UserError(
            f"{path}: a row has another form than those of {corpus.name}; is this the right corpus?"
        ) from None
    labels = [row["label"].strip() for row in rows] if is_labels else []
    if labels and has_headings(labels, known):
        print(f"{path}: line 1 is taken for headings: {rows.pop(0)['label']}, …")
    elif labels and split == "train" and not corpus.labels and labels[0] not in labels[1:]:
        print(f'{path}: no other line has the label "{labels[0]}" of line 1; if these are headings, remove the line')
    empty = 0
    for row in rows:
        where = f"{path}: line {row['line']}"
        try:
            columns = columns_of(corpus, where, row, history)
            source, target = corpus.source.format(**columns), corpus.target.format(**columns)
        except KeyError as error:
            there = " ".join(", ".join(column for column in row if column != "line").split())
            there = there if len(there) <= 100 else f"{there[:99]}…"  # a text, where the file has no headings
            raise UserError(f"{path}: no column {error.args[0]}; it has {there}") from None
        source, target = " ".join((clean(source) if is_labels else source).split()), " ".join(target.split())
        if source and target:
            group = str(row.get("group", "")) or (path.stem if split == "test" else "")
            yield Example(source, target, group, columns.get("answers", ()))
        elif is_labels or split != "train":
            raise UserError(f"{where} has an empty {'target' if source else 'text'}; remove it")
        else:
            empty += 1
    if empty:
        print(f"{path}: {empty} example(s) with an empty side are left out")


def has_headings(labels: Sequence[str], known: Container[str]) -> bool:
    """Whether the first of a file's labels is none: it is called one, and is none of the others' or of training's."""
    words = re.sub(r"[\W_]+", " ", labels[0]).strip().lower()
    return words in ("label", "labels", "class", "class index") and not (labels[0] in known or labels[0] in labels[1:])


def columns_of(corpus: Corpus, where: str, row: Row, history: Count) -> Row:
    """A row with the names of its corpus, and its label, number or history as it is to be written."""
    found = {corpus.names.get(column, column): text for column, text in row.items()}
    if history and "turns" in row:
        found["history"] = JOIN.join([*row["persona"], *row["turns"][-history:]])
    if corpus.kind == "labels" or corpus.labels:
        label = str(found["label"]).strip()
        if label not in corpus.labels if corpus.labels else len(label.split()) != 1:
            wanted = f"one of {', '.join(corpus.labels)}" if corpus.labels else "one word"
            raise UserError(f'{where} has the label "{label}"; it must be {wanted}')
        found["label"] = corpus.labels.get(label, label)
    if corpus.number and corpus.number in found:
        found["answers"] = [str(found[corpus.number])]
        try:  # in steps of 0.2, as T5 writes the scores of STS-B
            found[corpus.number] = f"{round(float(found[corpus.number]) * 5) / 5:.1f}"
        except ValueError:
            raise UserError(f'{where} has the score "{found[corpus.number]}"; it must be a number') from None
    return found


def clean(text: str) -> str:
    """Text of one line without markup, lowercased.

    AG News has line breaks as backslashes, and entities that lost their ampersand: ``#36;`` for ``&#36;``.
    """
    text = re.sub(r"(?<![&\w])#(\d+);", r"&#\1;", text.replace("\\", " "))
    text = re.sub(r"</?[a-zA-Z][^<>]*>", " ", html.unescape(text))
    return " ".join(text.lower().split())


# ---- what is in a file


def lines_of(path: Path) -> List[str]:
    """Its lines, which end with a line feed: other separators may stand in a text."""
    lines = text_of(path).split("\n")
    return lines if lines[-1] else lines[:-1]


def beside(path: Path, ending: str, other_ending: str) -> Iterator[Tuple[str, str]]:
    """The lines of a file, each with that of another one of the same name but for the ending."""
    other, lines = path.with_name(path.name.replace(ending, other_ending)), lines_of(path)
    if not other.exists():  # one of them may be compressed
        other = other.with_suffix("") if other.suffix == ".gz" else other.with_name(f"{other.name}.gz")
    if not other.exists():
        raise UserError(f"{other}: no such file, nor {other.name.replace('.gz', '')}; it goes with {path}")
    others = lines_of(other)
    if len(others) != len(lines):
        raise UserError(f"{other}: has {len(others)} lines, and {path} has {len(lines)} lines")
    return zip(lines, others)


def table(corpus: Corpus, path: Path) -> Iterator[Row]:
    """A row of a .csv or .tsv file. Of texts with labels `rest` is all behind the label, and `last` the last column.

    IMDb has a .txt file for each text, in a folder for each label.
    """
    text, is_labels, columns = text_of(path), corpus.kind == "labels", corpus.columns
    if is_labels and path.suffix == ".txt":
        yield {"line": 1, "label": {"neg": "0", "pos": "1"}[path.parent.name], "last": text}
        return
    csv.field_size_limit(1 << 30)
    tabs = ".tsv" in path.suffixes or (not is_labels and "\t" in text.split("\n")[0])
    style: Dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"strict": True}
    reader, before, broken = csv.reader(io.StringIO(text, newline=""), **style), 0, 0
    try:
        for number, cells in enumerate(filter(None, reader)):
            if number == 0 and not is_labels and (not columns or {*columns, *corpus.names} & {*cells}):
                columns = cells  # headings
            elif len(cells) >= len(columns):
                more = {"rest": " ".join(cells[1:]), "last": cells[-1]} if is_labels else {}
                yield {"line": reader.line_num, **dict(zip(columns, cells)), **more}
            elif corpus.broken_rows:
                broken += 1
            else:
                wanted = f"{len(columns)} ({', '.join(columns)}), divided by {'tabs' if tabs else 'commas'}"
                raise UserError(f"{path}: line {reader.line_num} has {len(cells)} column(s), not {wanted}")
            before = reader.line_num
    except csv.Error as error:
        raise UserError(
            f"{path}: the row from line {before + 1} on has a stray quote ({error}); a text with quotes is itself "
            'quoted, and each of its quotes is doubled: 1,"so ""called"" news"'
        ) from None
    if broken:
        print(f"{path}: {broken} row(s) with fewer than {len(columns)} columns are left out")


def objects(corpus: Corpus, path: Path) -> Iterator[Row]:
    """A JSON object a line."""
    for number, line in enumerate(lines_of(path), 1):
        try:
            row = {name: "" if value is None else value for name, value in json.loads(line).items()}
        except (ValueError, AttributeError):
            raise UserError(f"{path}: line {number} is no JSON object") from None
        if re.search(r"\\u[dD]", line) and re.search("[\ud800-\udfff]", json.dumps(row, ensure_ascii=False)):
            raise UserError(
                f"{path}: line {number} has half of a surrogate pair, which is no character; remove the line"
            )
        yield {"line": number, **row}


def sides(corpus: Corpus, path: Path) -> Iterator[Row]:
    """A line of .source, with that of .target beside it."""
    for number, (source, target) in enumerate(beside(path, ".source", ".target"), 1):
        yield {"line": number, "source": source, "target": target}


def gold_beside(corpus: Corpus, path: Path) -> Iterator[Row]:
    """Of WiC: a row of X.data.txt, whose label is a line of X.gold.txt."""
    for number, (line, label) in enumerate(beside(path, ".data", ".gold"), 1):
        yield {"line": number, **dict(zip(corpus.columns, line.split("\t"))), "label": label}


def subject_line(corpus: Corpus, path: Path) -> Iterator[Row]:
    """Of AESLC: an e-mail, @subject and its subject line, and further ones."""
    email, _, rest = text_of(path).partition("@subject")
    yield {"line": 1, "email": email, "subject": rest.partition("@ann0")[0]}


def wsc(corpus: Corpus, path: Path) -> Iterator[Row]:
    """Of a row's text the noun is marked as ``* noun *`` and the pronoun as ``# pronoun #``, as in T5."""
    for row in objects(corpus, path):
        text, target, marks = row["text"], row["target"], []
        for span, mark in (("span1", "*"), ("span2", "#")):
            begin, end = place_of(text, target[f"{span}_text"], target[f"{span}_index"], f"{path}: line {row['line']}")
            marks += [(begin, -end, f"{mark} "), (end, -begin, f" {mark}")]
        for at, _, mark in sorted(marks, reverse=True):  # from the end on, so that the other places stay
            text = text[:at] + mark + text[at:]
        yield {**row, "text": text}


def place_of(text: str, span: str, number: int, where: str) -> Tuple[int, int]:
    """Where a span stands: nearest to the word of this number, which is one off in some rows of WSC."""
    words = r"\s+".join(re.escape(word) for word in span.split())
    found = [match.span() for match in re.finditer(rf"(?<!\w){words}(?!\w)", text, re.IGNORECASE)]
    if not found:
        raise UserError(f'{where}: the text has no "{span}"; remove it')
    return min(found, key=lambda place: abs(len(text[: place[0]].split()) - number))


def multirc(corpus: Corpus, path: Path) -> Iterator[Row]:
    """A row for each answer; those to one question are a group. The paragraph loses its markup, as in T5."""
    for row in objects(corpus, path):
        paragraph = re.sub(r"</?b>|<br>", " ", row["passage"]["text"])
        for question in row["passage"]["questions"]:
            for answer in question["answers"]:
                group = f"{row['line']}-{question.get('idx', question['question'])}"
                texts = {"question": question["question"], "answer": answer["text"], "label": answer.get("label", "")}
                yield {"line": row["line"], "paragraph": paragraph, "group": group, **texts}


def record(corpus: Corpus, path: Path) -> Iterator[Row]:
    """A row for each query with its right answers; the first is the one to be written. Highlights become sentences."""
    for row in objects(corpus, path):
        text = row["passage"]["text"]
        named = dict.fromkeys(text[e["start"] : e["end"] + 1] for e in row["passage"]["entities"])
        passage = re.sub(r"([.?!\"']?)\n@highlight\n", lambda end: f"{end[1] or '.'} ", text)
        about = {"entities": ", ".join(named), "passage": passage}
        for query in row["qas"]:
            answers = [answer["text"] for answer in query["answers"]]
            texts = {"query": query["query"], "answer": answers[0], "answers": answers}
            yield {"line": row["line"], "group": row["line"], **about, **texts}


def persona_chat(corpus: Corpus, path: Path) -> Iterator[Row]:
    """ParlAI's dialogues: numbered lines, your persona first, then what is said to you, a tab and your reply."""
    persona: List[str] = []
    turns: List[str] = []
    dialogue = 0
    for number, line in enumerate(lines_of(path), 1):
        count, _, said = line.partition(" ")
        if count == "1":
            persona, turns, dialogue = [], [], dialogue + 1
        if said.startswith("your persona: "):
            persona.append(said[len("your persona: ") :])
        elif "\t" in said:
            heard, reply = said.split("\t")[:2]
            turns.append(heard)
            yield {"line": number, "persona": persona, "turns": list(turns), "reply": reply, "group": dialogue}
            turns.append(reply)


def utterances(corpus: Corpus, path: Path) -> Iterator[Row]:
    """DailyDialog: a dialogue a line, __eou__ after each utterance."""
    for number, line in enumerate(lines_of(path), 1):
        said = [text.strip() for text in line.split("__eou__") if text.strip()]
        for at in range(1, len(said)):
            yield {"line": number, "persona": [], "turns": said[:at], "reply": said[at], "group": number}


Reader = Callable[[Corpus, Path], Iterator[Row]]
READERS: Dict[str, Reader] = {  # {`rows` of a corpus, else the ending of a file's name: its reader}
    "wsc": wsc,
    "multirc": multirc,
    "record": record,
    "persona_chat": persona_chat,
    "utterances": utterances,
    ".jsonl": objects,
    ".source": sides,
    ".data.txt": gold_beside,
    ".subject": subject_line,
}


def reader_of(corpus: Corpus, path: Path) -> Reader:
    """What reads a file of a corpus."""
    if corpus.rows:
        return READERS[corpus.rows]
    endings = (ending for ending in READERS if path.name.endswith((ending, f"{ending}.gz")))
    return READERS.get(next(endings, ""), table)
