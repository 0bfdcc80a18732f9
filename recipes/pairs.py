"""Corpora of pairs of texts: what is read and what is to be written. Their files, columns and forms: corpora.yaml."""

import json
import random
import re
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

from .command import UserError
from .corpora import SPLITS, Corpus, files_of, find, rows_of, text_of

SEED = 1  # of what is held out
JOIN = " | "  # between a persona's sentences and the utterances
Row = Dict[str, Any]  # {column: text}; "line" is where it stands in its file


class Pair(NamedTuple):
    """An example: both texts, each a line, and what is known of it beside."""

    source: str
    target: str
    group: str = ""  # what is held out or scored together: a dialogue, the questions on a text
    answers: Sequence[str] = ()  # right ones, if there are several


def read(corpus: Corpus, folder: Path, history: int) -> Dict[str, List[Pair]]:
    """{split: its pairs}. Without a validation set a tenth of the training set is held out, whole groups.

    Args:
        history: utterances before the one to be written.

    Raises:
        UserError: a file or column is missing, a label unknown, a text to be tested with empty, or not UTF-8.
    """
    found = {split: read_split(corpus, folder, split, history) for split in SPLITS}
    for split in ("train", "test"):
        if not found[split] and not (split == "train" and corpus.test_is_enough and found["test"]):
            files_of(corpus, folder, [split])  # says what is missing
            raise UserError(f"{folder}: the {split} set of {corpus.name} has no pairs")
    if not found["train"]:
        print(f"{folder}: no training set; eight tenths of the test set are trained on, one validates, one is left")
        found["train"], found["test"] = held_out(found["test"], 0.1)
        found["train"], found["valid"] = held_out(found["train"], 1 / 9)
    if not found["valid"]:
        found["train"], found["valid"] = held_out(found["train"], 0.1)
    return found


def held_out(pairs: Sequence[Pair], part: float) -> Tuple[List[Pair], List[Pair]]:
    """The pairs in two, by groups, in their order; which groups, a fixed seed decides."""
    keys = [pair.group or str(i) for i, pair in enumerate(pairs)]
    groups = list(dict.fromkeys(keys))
    chosen = set(random.Random(SEED).sample(groups, max(1, round(len(groups) * part))))
    return (
        [pair for key, pair in zip(keys, pairs) if key not in chosen],
        [pair for key, pair in zip(keys, pairs) if key in chosen],
    )


def read_split(corpus: Corpus, folder: Path, split: str, history: int) -> List[Pair]:
    """The pairs of a split; none where there is no such file."""
    pairs = []
    for path in find(folder, corpus.files.get(split, ())):
        for row in checked_rows(READERS[corpus.rows](corpus, path), path):
            where = f"{path}: line {row['line']}"
            row = {corpus.names.get(column, column): text for column, text in row.items()}
            if history and "turns" in row:
                row["history"] = JOIN.join([*row["persona"], *row["turns"][-history:]])
            if corpus.labels:
                label = str(row.get("label", "")).strip()
                if label not in corpus.labels:
                    known = ", ".join(corpus.labels)
                    raise UserError(f'{where} has the label "{label}"; it must be one of {known}')
                row["label"] = corpus.labels[label]
            if corpus.number in row:
                row["answers"] = [str(row[corpus.number])]
                row[corpus.number] = steps(where, row[corpus.number])
            try:
                texts = [" ".join(form.format(**row).split()) for form in (corpus.source, corpus.target)]
            except KeyError as error:
                there = ", ".join(column for column in row if column != "line")
                raise UserError(f"{path}: no column {error.args[0]}; it has {there}") from None
            except ValueError as error:
                raise UserError(f"{where}: {error}") from None
            if not all(texts) and split != "train":
                raise UserError(f"{where} has an empty {'source' if texts[1] else 'target'}; remove it")
            group = str(row.get("group", "")) or (path.stem if split == "test" else "")
            if all(texts):
                source, target = texts
                pairs.append(Pair(source, target, group, row.get("answers", ())))
    return pairs


def checked_rows(rows: Iterator[Row], path: Path) -> Iterator[Row]:
    """The rows of a reader.

    Raises:
        UserError: a row lacks a field that its corpus has.
    """
    try:
        yield from rows
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(f"{path}: a row has no {error}; is this the right corpus?") from None


def steps(where: str, number: str) -> str:
    """A number in steps of 0.2, as T5 writes the scores of STS-B.

    Raises:
        UserError: it is none.
    """
    try:
        return f"{round(float(number) * 5) / 5:.1f}"
    except ValueError:
        raise UserError(f'{where} has the score "{number}"; it must be a number') from None


# ---- readers: the rows of a file


def table(corpus: Corpus, path: Path) -> Iterator[Row]:
    """Of .jsonl an object a line; of .csv and .tsv a row; of .source a line, with that of .target beside it."""
    name, text = re.sub(r"\.gz$", "", path.name), text_of(path)
    lines = text.split("\n")[: -1 if text.endswith("\n") else None]
    if name.endswith(".jsonl"):
        for number, line in enumerate(lines, 1):
            try:
                yield {"line": number, **json.loads(line)}
            except (ValueError, TypeError):
                raise UserError(f"{path}: line {number} is no JSON object") from None
    elif name.endswith(".source"):
        other = path.with_name(path.name.replace(".source", ".target"))
        targets = text_of(other).rstrip("\n").split("\n") if other.exists() else []
        if len(targets) != len(lines):
            raise UserError(f"{other}: has {len(targets)} lines, and {path} has {len(lines)}")
        for number, (source, target) in enumerate(zip(lines, targets), 1):
            yield {"line": number, "source": source, "target": target}
    else:
        columns: Sequence[str] = corpus.columns
        for number, (place, row) in enumerate(rows_of(path, text, tabs="\t" in lines[0] if lines else False)):
            if number == 0 and not (columns and is_data(corpus, columns, row)):
                columns = row
            elif len(row) < len(columns):
                raise UserError(f"{path}: line {place} has {len(row)} column(s), not {len(columns)}")
            else:
                yield {"line": place, **dict(zip(columns, row))}


def is_data(corpus: Corpus, columns: Sequence[str], row: Sequence[str]) -> bool:
    """Whether the first line of a table is an example, and not its headings."""
    return not set(row) & {*columns, *corpus.names}


def gold_beside(corpus: Corpus, path: Path) -> Iterator[Row]:
    """A table whose labels are in X.gold.txt beside X.data.txt; any other is a `table`."""
    gold = path.with_name(path.name.replace(".data.txt", ".gold.txt"))
    if gold == path:
        yield from table(corpus, path)
        return
    labels = text_of(gold).split() if gold.exists() else []
    rows = list(table(corpus, path))
    if len(labels) != len(rows):
        raise UserError(f"{gold}: has {len(labels)} labels, and {path} has {len(rows)} lines")
    for row, label in zip(rows, labels):
        yield {**row, "label": label}


def multirc(corpus: Corpus, path: Path) -> Iterator[Row]:
    """A row for each answer; those to one question are a group."""
    for row in table(corpus, path):
        for question in row["passage"]["questions"]:
            for answer in question["answers"]:
                group = f"{row['line']}-{question.get('idx', question['question'])}"
                texts = {"question": question["question"], "answer": answer["text"], "label": answer.get("label", "")}
                yield {"line": row["line"], "paragraph": row["passage"]["text"], "group": group, **texts}


def record(corpus: Corpus, path: Path) -> Iterator[Row]:
    """A row for each query with its right answers; the first is the one to be written."""
    for row in table(corpus, path):
        text = row["passage"]["text"]
        named = dict.fromkeys(text[e["start"] : e["end"] + 1] for e in row["passage"]["entities"])
        beside = {
            "line": row["line"],
            "group": row["line"],
            "entities": ", ".join(named),
            "passage": text.replace("@highlight", ""),
        }
        for query in row["qas"]:
            answers = [answer["text"] for answer in query["answers"]]
            yield {**beside, "query": query["query"], "answer": answers[0], "answers": answers}


def subject_lines(corpus: Corpus, path: Path) -> Iterator[Row]:
    """AESLC's .subject: an e-mail, @subject and its subject line, and further ones. .jsonl is a `table`."""
    if ".jsonl" in path.name:
        yield from table(corpus, path)
        return
    email, _, rest = text_of(path).partition("@subject")
    yield {"line": 1, "email": email, "subject": rest.partition("@ann0")[0]}


def persona_chat(corpus: Corpus, path: Path) -> Iterator[Row]:
    """ParlAI's dialogues: numbered lines, your persona first, then what is said to you, a tab and your reply."""
    persona: List[str] = []
    turns: List[str] = []
    dialogue = 0
    for number, line in enumerate(text_of(path).splitlines(), 1):
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
    for number, line in enumerate(text_of(path).splitlines(), 1):
        said = [text.strip() for text in line.split("__eou__") if text.strip()]
        for at in range(1, len(said)):
            yield {"line": number, "persona": [], "turns": said[:at], "reply": said[at], "group": number}


READERS: Dict[str, Callable[[Corpus, Path], Iterator[Row]]] = {
    "table": table,
    "gold_beside": gold_beside,
    "multirc": multirc,
    "record": record,
    "subject_lines": subject_lines,
    "persona_chat": persona_chat,
    "utterances": utterances,
}
