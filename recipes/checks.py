"""Checks prepared data and prints what is worth knowing before a training: what is too long, too rare, or lost."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .languages import MOSES, undone
from .metrics import bleu
from .text import lines

MOST_POSITIONS = 1024  # fairseq's --max-source-positions and --max-target-positions by default
LEAST_BLEU = 99.5  # of the round trip: below it there is a warning
MOST_UNKNOWN = 0.005  # share of <unk> in subwords of the validation and test sets: above it there is a warning
SUBWORDS_PER_MERGE = 40  # of training text: with this number most subwords are frequent enough to be learned


def check_merges(out: Path, merges: int, sides: Sequence[str]) -> None:
    """Prints a note or a warning if BPE was given more merges than the training text is large enough for.

    With too many merges, nearly every word of the training text is a single piece, and the smaller pieces that it was
    merged from do not occur in the text any more. So they are no entries of the dictionary, and become <unk> where
    another word of the test set needs them.

    Args:
        out: a folder of prepare.sh.
        merges: how many merges were asked for.
        sides: the endings of the folder's files.
    """
    number_learned = sum(1 for _ in lines(out / "codes")) - 1  # the first line names the version
    if number_learned < merges:
        print(f"note: --merges {merges} is more than the text gives; BPE has learned {number_learned:,}")
    dictionary = sorted((out / "bin").glob("dict*.txt"))[0]  # both sides have the same one
    counts: dict[str, int] = {}
    for line in lines(dictionary):
        subword, count = line.rsplit(" ", 1)
        counts[subword] = int(count)
    files = [out / "sub" / f"{split}.{side}" for split in ("valid", "test") for side in sides]
    share = share_of_unknown(counts, files)
    suitable_merges = sum(counts.values()) // SUBWORDS_PER_MERGE
    proposed_merges = max(suitable_merges // 100 * 100, 100)  # in whole hundreds
    if share > MOST_UNKNOWN and proposed_merges < merges:
        cause = f"--merges {merges} is too large for so little training text"
        fix = f"try --merges {proposed_merges} in another folder"
        print(f"warning: {100 * share:.1f} % of the validation and test sets become <unk>: {cause}; {fix}")


def share_of_unknown(counts: Mapping[str, int], files: Iterable[Path]) -> float:
    """Returns the share of subwords in some files that are not in the dictionary, although their characters are.

    `counts`: {subword of the dictionary: how often the training text has it}.
    """
    characters = set("".join(counts))
    total = 0
    unknown = 0
    for file in files:
        for line in lines(file):
            for subword in line.split():
                total += 1
                if subword not in counts and characters.issuperset(subword.removesuffix("@@")):
                    unknown += 1
    return unknown / total


def find_longest(out: Path, splits: Sequence[str], sides: Sequence[str]) -> int:
    """Returns the length of the longest sentence in a folder of prepare.sh, in subwords; the end is counted.

    Prints a warning for a validation or test set that fairseq would refuse during or after the training.
    """
    longest = 0
    for split in splits:
        for side in sides:
            file = out / "sub" / f"{split}.{side}"
            lengths = [len(line.split(" ")) + 1 for line in lines(file)]
            longest_of_file = max(lengths)
            longest = max(longest, longest_of_file)
            # fairseq leaves such lines out of a training set by itself
            if split != "train" and longest_of_file > MOST_POSITIONS:
                line_number = lengths.index(longest_of_file) + 1
                warn_of_long_line(file, line_number, length=longest_of_file, is_valid=split == "valid")
    return longest


def warn_of_long_line(file: Path, line_number: int, length: int, is_valid: bool) -> None:
    """Prints a warning for a line that is too long for fairseq. `is_valid`: the file is the validation set."""
    consequence = "evaluate.sh will refuse it after the training"
    if is_valid:
        consequence = "train.sh will end with an error when it validates"
    print(
        f"warning: {file.name}: line {line_number} is too long: {length:,} subwords, and fairseq takes "
        f"{MOST_POSITIONS:,}, so that {consequence}; shorten or remove the line, or prepare the text with "
        f"--truncate-source {MOST_POSITIONS} --truncate-target {MOST_POSITIONS}"
    )


class Line(NamedTuple):
    """A line of the test set before its preparation and after that was undone."""

    number: int
    before: str
    after: str
    length: int  # in subwords, in which the end is counted


class RoundTrip(NamedTuple):
    """What comes back of a side of the test set, as settings.json has it."""

    bleu: float  # that of a perfect translation
    same: int  # lines that come back as they were
    total: int  # lines that can come back; others are cut


def report_round_trip(
    out: Path, side: str, *, kind: str, is_target: bool, most: int | None, lowercase: bool
) -> RoundTrip | None:
    """Turns the subwords of a side of the test set into text again, and prints how much of it is as it was.

    Translations are turned into text in the same way. So what is lost here is lost in every translation too. Lines that
    are cut do not count, since a translation may be longer.

    Args:
        out: a folder of prepare.sh.
        side: the ending of the side's files.
        kind: of the subwords: bpe or sentencepiece.
        is_target: whether it is the side of the translations.
        most: the length in subwords that lines are cut to; None: no line is cut.
        lowercase: whether the data are in lower case.

    Returns:
        What was measured; None if all lines are cut.
    """
    name = "round trip" if is_target else f"round trip of {side}"
    all_lines = undo_test_set(out, side, kind)
    kept = [line for line in all_lines if not may_be_cut(line, most)]
    if not kept:
        print(f"{name}: nothing is left of it, as all {len(all_lines):,} lines are cut to {most} subwords")
        return None
    changed = [line for line in kept if line.before != line.after]
    score = 100.0
    if changed:
        score = bleu_of_lines(kept, bleu(side, lowercase, out / "text" / f"test.{side}"))
    same = len(kept) - len(changed)
    number_cut = len(all_lines) - len(kept)
    cut_lines = f"; {number_cut:,} more are cut to {most} subwords" if number_cut else ""
    print(f"{name}: BLEU {score:.2f}, {same:,} of {len(kept):,} lines{cut_lines}")
    if changed:
        print_difference(changed[0])
    if score < LEAST_BLEU:
        limit = f"no translation can have more than BLEU {score:.2f}: " if is_target else ""
        print(f"warning: {limit}{explain_changes(side, kind, changed)}")
    return RoundTrip(round(score, 2), same, len(kept))


def bleu_of_lines(compared_lines: Sequence[Line], metric: Any) -> float:
    """Returns the BLEU of lines after the round trip, with the lines before it as references.

    `metric`: sacreBLEU's BLEU for their language.
    """
    before = [line.before for line in compared_lines]
    after = [line.after for line in compared_lines]
    return float(metric.corpus_score(after, [before]).score)


def undo_test_set(out: Path, side: str, kind: str) -> list[Line]:
    """Returns the lines of a side of the test set in a folder of prepare.sh. `kind`: bpe or sentencepiece."""
    text_and_subwords = zip(lines(out / "text" / f"test.{side}"), lines(out / "sub" / f"test.{side}"))
    undone_lines: list[Line] = []
    for number, (before, in_subwords) in enumerate(text_and_subwords, start=1):
        length = len(in_subwords.split(" ")) + 1
        undone_lines.append(Line(number, before, undone(in_subwords, kind, side), length))
    return undone_lines


def may_be_cut(line: Line, most: int | None) -> bool:
    """Returns whether a line may have been cut to a length of `most`."""
    if most is None:
        return False
    # --keep-end removes the rest of the first word too, so that the line becomes shorter than `most`
    lacks_beginning = line.before != line.after and line.before.endswith(line.after)
    return line.length >= most or lacks_beginning


def print_difference(line: Line) -> None:
    """Prints 80 characters of a line before and after the round trip, with the first difference in their middle."""
    start = max(0, first_difference(line) - 40)
    end = start + 80
    print(f"  line {line.number} was   {line.before[start:end]}")
    print(f"  and becomes {line.after[start:end]}")


def first_difference(line: Line) -> int:
    """Returns the place of the first character that is not the same before and after."""
    return len(os.path.commonprefix([line.before, line.after]))


def explain_changes(side: str, kind: str, changed: Sequence[Line]) -> str:
    """Returns why lines do not come back, and what to do."""
    if kind == "sentencepiece":
        return "--nfkc makes letters alike; leave it out"
    fix = "--subwords sentencepiece gives all back"
    if side not in MOSES:
        return f"Moses' tokeniser does not know {side}; {fix}"
    causes = [cause for cause in map(find_cause, changed) if cause]
    most_frequent = [cause for cause, _ in Counter(causes).most_common(5)]
    here = f"; here it changes text at {' '.join(most_frequent)}" if most_frequent else ""
    return f"Moses' tokeniser makes quotes and dashes plain, sets slashes apart{here}; {fix}"


def find_cause(line: Line) -> str:
    """Returns the sign at the first difference of a line, ``""`` if there is only text.

    Where a blank has come or gone, the sign stands before or behind it.
    """
    place = first_difference(line)
    for character in reversed(line.before[max(place - 1, 0) : place + 1]):
        if not character.isalnum() and character != " ":
            return character
    return ""
