"""Checks prepared data, and prints what a user should know before a training.

Some lines may be too long for a model, some subwords too rare to be learned, and some characters may get lost.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .languages import MOSES, join_subwords
from .metrics import bleu
from .text import lines

MOST_POSITIONS = 1024  # fairseq's default of --max-source-positions and --max-target-positions
LEAST_BLEU = 99.5  # if the text that comes back from the subwords has a lower BLEU, there is a warning
MOST_UNKNOWN = 0.005  # if a larger share of the validation and test sets becomes <unk>, there is a warning
SUBWORDS_PER_MERGE = 40  # in the training text; with so many, most subwords are frequent enough to be learned


def check_merges(out: Path, merges: int, sides: Sequence[str]) -> None:
    """Prints a note or a warning if the training text is too small for the number of BPE merges.

    With too many merges, nearly every word of the training text becomes a single subword. The smaller subwords that it
    was merged from then no longer occur in the training text, and so are missing from the dictionary. Where an unknown
    word of the test set is split into them, they become <unk>.

    Args:
        out: a folder with data prepared by prepare.sh.
        merges: the value of --merges.
        sides: the endings of the files in the folder `out`/sub, such as ["en", "de"].
    """
    note_missing_merges(out / "codes", merges)
    dictionaries = sorted((out / "bin").glob("dict*.txt"))
    counts = read_dictionary(dictionaries[0])  # both sides have the same dictionary
    files: list[Path] = []
    for split in ("valid", "test"):
        files += [out / "sub" / f"{split}.{side}" for side in sides]
    share = share_of_unknown(counts, files)
    warn_of_unknown_subwords(share, merges, training_subwords=sum(counts.values()))


def note_missing_merges(codes: Path, merges: int) -> None:
    """Prints a note if BPE has learned fewer merges than were asked for. `codes`: the file that has a line for each."""
    number_learned = sum(1 for _ in lines(codes)) - 1  # the first line names the version
    if number_learned < merges:
        print(f"note: --merges {merges} is more than the text allows; BPE has learned only {number_learned:,}")


def warn_of_unknown_subwords(share: float, merges: int, training_subwords: int) -> None:
    """Prints a warning if many subwords are unknown, and fewer merges would be better.

    Args:
        share: the share of the subwords in the validation and test sets that are unknown.
        merges: the value of --merges.
        training_subwords: the number of subwords in the training text.
    """
    suitable_merges = training_subwords // SUBWORDS_PER_MERGE
    # rounded down to a multiple of 100, but at least 100
    hundreds = max(suitable_merges // 100, 1)
    proposed_merges = 100 * hundreds
    if share > MOST_UNKNOWN and proposed_merges < merges:
        cause = f"--merges {merges} is too large for so little training text"
        fix = f"try --merges {proposed_merges} in another folder"
        print(f"warning: {100 * share:.1f} % of the validation and test subwords are unknown (<unk>): {cause}; {fix}")


def read_dictionary(file: Path) -> dict[str, int]:
    """Returns {subword: how often it occurs in the training text} from a dictionary that fairseq has written."""
    counts: dict[str, int] = {}
    for line in lines(file):
        subword, count = line.rsplit(" ", 1)
        counts[subword] = int(count)
    return counts


def share_of_unknown(counts: Mapping[str, int], files: Iterable[Path]) -> float:
    """Returns the share of the subwords in some files that are not in the dictionary, although their characters are.

    BPE has merged these subwords to longer ones everywhere in the training text. A subword with a character that the
    training text does not have does not count, as it would be unknown with any number of merges.

    Args:
        counts: {subword of the dictionary: how often it occurs in the training text}.
        files: text in subwords, with "@@" at the end of each subword inside a word. They are not empty.
    """
    known_characters = set("".join(counts))
    number_of_subwords = 0
    number_unknown = 0
    for file in files:
        for line in lines(file):
            subwords = line.split()
            number_of_subwords += len(subwords)
            for subword in subwords:
                characters = subword.removesuffix("@@")
                if subword not in counts and known_characters.issuperset(characters):
                    number_unknown += 1
    return number_unknown / number_of_subwords


def find_longest_sentence(out: Path, splits: Sequence[str], sides: Sequence[str]) -> int:
    """Returns the length of the longest sentence of prepared data, in subwords, including the end-of-sentence symbol.

    Prints a warning if a validation or test set has a sentence that is longer than fairseq allows.

    Args:
        out: a folder with data prepared by prepare.sh.
        splits: which of train, valid and test to look at.
        sides: the endings of the files of source and target.
    """
    longest = 0
    for split in splits:
        for side in sides:
            file = out / "sub" / f"{split}.{side}"
            lengths = [len(line.split(" ")) + 1 for line in lines(file)]  # 1 is the end-of-sentence symbol
            longest_of_file = max(lengths)
            longest = max(longest, longest_of_file)
            # fairseq leaves such a line out of the training set. In a validation or test set, it is an error.
            if split != "train" and longest_of_file > MOST_POSITIONS:
                line_number = lengths.index(longest_of_file) + 1
                warn_of_long_line(file, line_number, length=longest_of_file, split=split)
    return longest


def warn_of_long_line(file: Path, line_number: int, length: int, split: str) -> None:
    """Prints a warning about a line that is too long for fairseq.

    Args:
        file: the validation or test set in subwords.
        line_number: the number of the line, counted from 1.
        length: its length in subwords.
        split: "valid" if the file is the validation set, "test" if it is the test set.
    """
    if split == "valid":
        consequence = "train.sh will end with an error when it validates"
    else:
        consequence = "evaluate.sh will refuse it after the training"
    print(
        f"warning: {file.name}: line {line_number} is too long: {length:,} subwords, and fairseq takes "
        f"{MOST_POSITIONS:,}, so that {consequence}; shorten or remove the line, or prepare the text with "
        f"--truncate-source {MOST_POSITIONS} --truncate-target {MOST_POSITIONS}"
    )


# ---- the round trip: from text to subwords and back
#
# Translations are sequences of subwords, and are turned into text before they are scored. What the way from text to
# subwords and back changes in the references can therefore never be right in a translation.


class PreparedSide(NamedTuple):
    """One side of a prepared test set: its source sentences, or its target sentences."""

    folder: Path  # made by prepare.sh
    language: str  # the ending of the side's files, which is "source" or "target" if the text is not parallel text
    is_target: bool
    subwords: str  # the kind of subwords, "bpe" or "sentencepiece"
    max_length: int | None  # lines are cut to so many subwords, including the end of sentence; None: they are not cut
    lowercase: bool  # whether the data are in lower case


class Line(NamedTuple):
    """A line of the test set before and after the round trip."""

    number: int  # from 1
    before: str
    after: str
    length: int  # in subwords, including the end of sentence


class RoundTrip(NamedTuple):
    """How much of a side of the test set is the same after the round trip. settings.json keeps it as a list."""

    bleu: float  # the BLEU that a perfect translation would get
    same: int  # the number of lines that come back unchanged
    total: int  # the number of all lines, without those that are cut


class Comparison(NamedTuple):
    """The lines of a side of the test set, compared before and after the round trip."""

    compared_lines: list[Line]  # all lines that were not cut to a maximum length
    changed_lines: list[Line]  # those compared lines that are not the same after the round trip
    number_cut: int  # the number of lines that were cut, and cannot be compared
    bleu: float  # the BLEU that the compared lines have

    @property
    def number_same(self) -> int:
        """The number of compared lines that are the same after the round trip."""
        return len(self.compared_lines) - len(self.changed_lines)


def check_round_trip(side: PreparedSide) -> RoundTrip | None:
    """Compares a side of the test set before and after the round trip, and prints how many lines are the same.

    In the round trip, a line of text is split into subwords, and the subwords are joined to a line of text again. If
    many lines are different afterwards, this function prints how to keep more of them.

    Returns:
        what was measured; None if no line can be compared because all lines were cut to a maximum length.
    """
    comparison = compare_test_set(side)
    print_comparison(side, comparison)
    number_compared = len(comparison.compared_lines)
    if number_compared == 0:
        return None
    return RoundTrip(bleu=round(comparison.bleu, 2), same=comparison.number_same, total=number_compared)


def compare_test_set(side: PreparedSide) -> Comparison:
    """Returns which lines of a side of the test set the round trip has changed, and their BLEU."""
    all_lines = read_test_set(side)
    compared_lines = [line for line in all_lines if not may_be_cut(line, side.max_length)]
    changed_lines = [line for line in compared_lines if line.before != line.after]
    number_cut = len(all_lines) - len(compared_lines)
    score = bleu_of_round_trip(side, compared_lines) if changed_lines else 100.0
    return Comparison(compared_lines, changed_lines, number_cut=number_cut, bleu=score)


def print_comparison(side: PreparedSide, comparison: Comparison) -> None:
    """Prints how many lines are the same after the round trip, and the first line that is not.

    Prints a warning if so much is different that it has an influence on the scores of translations.
    """
    name = "round trip" if side.is_target else f"round trip of {side.language}"
    number_compared = len(comparison.compared_lines)
    number_cut = f"{comparison.number_cut:,}"
    if number_compared == 0:
        print(f"{name}: no line to compare, because all {number_cut} lines are cut to {side.max_length} subwords")
        return
    summary = (
        f"{name}: BLEU {comparison.bleu:.2f}, {comparison.number_same:,} of {number_compared:,} lines are identical"
    )
    if comparison.number_cut:
        summary += f"; {number_cut} more are cut to {side.max_length} subwords"
    print(summary)
    if comparison.changed_lines:
        print_difference(comparison.changed_lines[0])
    if comparison.bleu < LEAST_BLEU:
        explanation = explain_changes(side, comparison.changed_lines)
        if side.is_target:
            explanation = f"no translation can have more than BLEU {comparison.bleu:.2f}: {explanation}"
        print(f"warning: {explanation}")


def read_test_set(side: PreparedSide) -> list[Line]:
    """Returns all lines of a side of the test set, each before and after the round trip."""
    texts = lines(side.folder / "text" / f"test.{side.language}")
    texts_in_subwords = lines(side.folder / "sub" / f"test.{side.language}")
    test_lines: list[Line] = []
    for number, (text, text_in_subwords) in enumerate(zip(texts, texts_in_subwords), start=1):
        text_again = join_subwords(text_in_subwords, side.subwords, side.language)
        length = len(text_in_subwords.split(" ")) + 1  # 1 is the end-of-sentence symbol
        test_lines.append(Line(number, before=text, after=text_again, length=length))
    return test_lines


def may_be_cut(line: Line, max_length: int | None) -> bool:
    """Returns whether a line may have been cut to a maximum length in subwords. None: lines are not cut."""
    if max_length is None:
        return False
    # --keep-end cuts the beginning of a line. If the cut falls into a word, the whole word is removed, so that the line
    # becomes shorter than the maximum length.
    lacks_beginning = line.before != line.after and line.before.endswith(line.after)
    return line.length >= max_length or lacks_beginning


def bleu_of_round_trip(side: PreparedSide, compared: Sequence[Line]) -> float:
    """Returns the BLEU of lines after the round trip, with the lines before it as references."""
    metric = bleu(side.language, side.lowercase, references=side.folder / "text" / f"test.{side.language}")
    before = [line.before for line in compared]
    after = [line.after for line in compared]
    return float(metric.corpus_score(after, [before]).score)


def print_difference(line: Line) -> None:
    """Prints 80 characters of a line before and after the round trip, with the first difference in their middle."""
    start = max(0, first_difference(line) - 40)
    end = start + 80
    print(f"  line {line.number} was   {line.before[start:end]}")
    print(f"  and becomes {line.after[start:end]}")


def first_difference(line: Line) -> int:
    """Returns the index of the first character of a line that the round trip has changed."""
    return len(os.path.commonprefix([line.before, line.after]))


def explain_changes(side: PreparedSide, changed: Sequence[Line]) -> str:
    """Returns a text that says why lines change if their subwords are turned into text again, and what to do.

    Args:
        side: the side of the test set that the lines belong to.
        changed: the lines that are not the same as before.
    """
    if side.subwords == "sentencepiece":
        return "--nfkc changes characters; remove the flag"
    fix = "--subwords sentencepiece restores all text"
    if side.language not in MOSES:
        return f"Moses' tokeniser does not know {side.language}; {fix}"
    usual_changes = "Moses' tokeniser replaces typographic quotes and dashes, and separates slashes"
    changed_signs = find_frequent_changes(changed)
    if not changed_signs:
        return f"{usual_changes}; {fix}"
    return f"{usual_changes}; here it changes text at {' '.join(changed_signs)}; {fix}"


def find_frequent_changes(changed: Sequence[Line]) -> list[str]:
    """Returns the five signs at which the round trip has changed the most lines, the most frequent one first."""
    signs = [find_changed_sign(line) for line in changed]
    counts = Counter(sign for sign in signs if sign)
    return [sign for sign, _count in counts.most_common(5)]


def find_changed_sign(line: Line) -> str:
    """Returns the punctuation mark or symbol at which the round trip has changed a line first; "" if there is none.

    If the round trip adds or removes a space, the sign is the character after the space or before it.
    """
    place = first_difference(line)
    character_before_and_at_place = line.before[max(place - 1, 0) : place + 1]
    for character in reversed(character_before_and_at_place):
        if not character.isalnum() and character != " ":
            return character
    return ""
