"""Parallel text: checks pairs of lines, holds out validation and test sets, and makes pairs for T5's denoising."""

import contextlib
import itertools
import random
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .languages import has_canonical_variants, has_separate_accents, lower, one_line
from .steps import UserError, atomic_write, dry_run, show_step
from .text import lines, open_to_write, plain_or_compressed, write_lines

SEED = 1  # decides which pairs are held out
MOST_HELD_OUT = 1000  # the greatest number of pairs in a validation or test set that is held out


class Pair(NamedTuple):
    """A line of the source and its translation."""

    source: str
    target: str


class FilePair(NamedTuple):
    """The files of both sides of parallel text."""

    source: Path
    target: Path

    def exist(self) -> bool:
        """Returns whether both files exist."""
        return self.source.exists() and self.target.exists()


def name_files(prefix: Path, sides: Sequence[str]) -> FilePair:
    """Returns the paths of the files PREFIX.SOURCE and PREFIX.TARGET, which need not exist.

    `sides`: the endings of source and target, such as ("en", "de").
    """
    source_side, target_side = sides
    return FilePair(Path(f"{prefix}.{source_side}"), Path(f"{prefix}.{target_side}"))


def in_braces(sides: Sequence[str]) -> str:
    """Returns both endings in the form that a shell understands, such as "{en,de}"."""
    return "{" + ",".join(sides) + "}"


def find_file_pairs(prefixes: Sequence[Path], sides: Sequence[str]) -> list[FilePair]:
    """Returns the source and the target file for each prefix. Any file may be compressed (.gz).

    Args:
        prefixes: paths of files without the endings of source and target.
        sides: these two endings, such as ("en", "de").
    """
    file_pairs: list[FilePair] = []
    for prefix in prefixes:
        uncompressed = name_files(prefix, sides)
        source = plain_or_compressed(uncompressed.source)
        target = plain_or_compressed(uncompressed.target)
        file_pairs.append(FilePair(source, target))
    return file_pairs


def read_pairs(files: FilePair) -> Iterator[Pair]:
    """Yields the pairs of lines of two files, exactly as they are in the files.

    `files`: the source and the target file.

    Raises:
        UserError: one file has more lines than the other.
    """
    both_sides = itertools.zip_longest(lines(files.source), lines(files.target))  # None: the file has ended
    for number_read, (source, target) in enumerate(both_sides):  # how many pairs were read before this one
        if source is None or target is None:
            shorter = files.source if source is None else files.target
            raise UserError(f"{shorter}: has only {number_read} lines, but the other side has more")
        yield Pair(source, target)


def clean_pair(pair: Pair, clean: Callable[[str], str]) -> Pair:
    """Returns a pair after the function `clean` was applied to both sides."""
    return Pair(clean(pair.source), clean(pair.target))


@contextlib.contextmanager
def pair_writer(source: Path, target: Path) -> Iterator[Callable[[Pair], None]]:
    """Yields a function that writes a pair to the end of two files, one for each side.

    The files are complete or absent: they appear when the block of this context manager has ended without an error.
    """
    with atomic_write(source, target) as (source_part, target_part):
        with open_to_write(source_part) as source_file, open_to_write(target_part) as target_file:

            def write_pair(pair: Pair) -> None:
                """Writes a pair, each side to one line of its file."""
                source_file.write(f"{pair.source}\n")
                target_file.write(f"{pair.target}\n")

            yield write_pair


# ---- pairs to train and test on


class Limits(NamedTuple):
    """Which pairs of a text are used, and whether they are lowercased."""

    keep_all: bool = False  # for a test set: a pair that would be left out is an error
    sample: int | None = None  # use only so many pairs at the beginning of each file; None: all
    lowercase: bool = False
    held_out: frozenset[str] = frozenset()  # lowercased sources of held-out pairs, which must not be trained on
    max_length: int = 0  # the greatest number of words on a side; 0: any number
    max_ratio: float = 0  # the greatest ratio of the longer side's words to the shorter side's words; 0: any ratio

    def fault(self, pair: Pair) -> str:
        """Returns why a pair has to be left out, or "" if it can be used."""
        lengths = [len(pair.source.split()), len(pair.target.split())]
        shorter = min(lengths)
        longer = max(lengths)
        if shorter == 0:
            return "empty"
        if self.max_length and longer > self.max_length:
            return f"longer than {self.max_length} tokens"
        if self.max_ratio and longer > self.max_ratio * shorter:
            return f"of a length ratio over {self.max_ratio:g}"
        if pair.source.lower() in self.held_out:
            return "held out"
        return ""


def clean_pairs(
    prefixes: Sequence[Path], output: Path, sides: Sequence[str], limits: Limits, clean: Callable[[str], str] = one_line
) -> None:
    """Cleans the pairs of some files, and writes those that are within the limits to two files.

    Prints how many pairs are used, and how many are left out for which reason. If the output exists, nothing is done.

    Args:
        prefixes: paths of the files to read, without the endings of source and target.
        output: path of the files to write, without the endings of source and target.
        sides: these two endings, such as ("en", "de").
        limits: which pairs are used.
        clean: a function that is applied to each line before the pair is checked.

    Raises:
        UserError: no pair can be used, or a pair cannot be used although `limits.keep_all` is set.
    """
    files = find_file_pairs(prefixes, sides)
    outputs = name_files(output, sides)
    prefix_names = " ".join(str(prefix) for prefix in prefixes)
    show_step(f"{output}.{in_braces(sides)}: pairs of {prefix_names}")
    if dry_run() or outputs.exist():
        return
    counts = PairCounts()
    with pair_writer(*outputs) as write_pair:
        for checked in read_checked_pairs(files, limits, clean):
            counts.add(checked)
            if checked.fault:
                continue
            pair = checked.cleaned
            if limits.lowercase:
                pair = lower_pair(pair, sides)
            write_pair(pair)
        # An error here, inside of the block, discards the empty files.
        counts.refuse_text_without_pairs(text_name=prefixes[0])
    counts.report()


def lower_pair(pair: Pair, languages: Sequence[str]) -> Pair:
    """Returns a pair in lower case. `languages`: the codes of the languages of source and target."""
    source_language, target_language = languages
    return Pair(lower(pair.source, source_language), lower(pair.target, target_language))


class CheckedPair(NamedTuple):
    """A pair of lines before and after cleaning, and what is wrong with it."""

    raw: Pair
    cleaned: Pair
    fault: str  # why the pair has to be left out; "" if it can be used


def read_checked_pairs(files: Sequence[FilePair], limits: Limits, clean: Callable[[str], str]) -> Iterator[CheckedPair]:
    """Yields all pairs of some files, cleaned and checked, also those that have to be left out.

    Args:
        files: the source and target files.
        limits: which pairs can be used. From each file, only the first `limits.sample` pairs are read.
        clean: a function that is applied to each line before the pair is checked.

    Raises:
        UserError: a pair has a fault, and `limits.keep_all` is set.
    """
    for file_pair in files:
        raw_pairs = itertools.islice(read_pairs(file_pair), limits.sample)
        for line_number, raw in enumerate(raw_pairs, start=1):
            cleaned = clean_pair(raw, clean)
            fault = limits.fault(cleaned)
            if fault and limits.keep_all:
                either_line = f"line {line_number} here or in {file_pair.target.name}"
                raise UserError(
                    f"{file_pair.source}: {either_line} is {fault}; correct it, because no line of this text may be "
                    "dropped"
                )
            yield CheckedPair(raw, cleaned, fault)


class PairCounts:
    """Counts the pairs of a text that are used or left out, and those with unusual Unicode characters."""

    def __init__(self) -> None:
        self.used = 0
        self.left_out: Counter[str] = Counter()  # {reason: number of pairs}
        self.composed = 0  # pairs in which letters and accents are separate characters
        self.replaced = 0  # pairs with characters that Unicode's normal form NFC replaces by others

    def add(self, checked: CheckedPair) -> None:
        """Counts a pair."""
        if checked.fault:
            self.left_out[checked.fault] += 1
        else:
            self.used += 1
        raw_text = f"{checked.raw.source}\n{checked.raw.target}"
        if not unicodedata.is_normalized("NFC", raw_text):  # a fast test, which spares most text the slow ones
            self.composed += has_separate_accents(raw_text)
            self.replaced += has_canonical_variants(raw_text)

    def describe_left_out(self) -> str:
        """Returns how many pairs were left out for which reason, such as "3 empty, 1 held out"."""
        return ", ".join(f"{number} {reason}" for reason, number in self.left_out.items())

    def refuse_text_without_pairs(self, text_name: Path) -> None:
        """Raises UserError if no pair of a text can be used. `text_name`: names the text in the error."""
        if self.used > 0:
            return
        reasons = self.describe_left_out() if self.left_out else "no text"
        raise UserError(f"{text_name}: none of the {self.left_out.total()} pairs can be used ({reasons})")

    def report(self) -> None:
        """Prints the counts."""
        left_out = f", left out: {self.describe_left_out()}" if self.left_out else ""
        print(f"{self.used} pairs{left_out}")
        if self.composed:
            print(f"{self.composed} pairs had letters with separate accents (NFD), which are composed now (NFC)")
        if self.replaced:
            replaced = "pairs had characters that Unicode's canonical form (NFC) replaces by others"
            print(f"{self.replaced} {replaced}, such as the sign of ohm (U+2126) by the letter omega (U+03A9)")


# ---- pairs that are held out


def hold_out(prefixes: Sequence[Path], folder: Path, sides: Sequence[str], splits: Sequence[str]) -> None:
    """Draws pairs of the training text for validation or test sets, and writes them to the files FOLDER/SPLIT.SIDE.

    Each set gets a tenth of the pairs, but at most 1,000 pairs. They are always the same pairs, as the seed is fixed.
    If all files exist, they are kept. A dry run draws no pairs.

    Args:
        prefixes: paths of the files of the training text, without the endings of source and target.
        folder: where the files are written.
        sides: the endings of source and target.
        splits: the sets to draw: "valid", "test" or both.
    """
    training_files = find_file_pairs(prefixes, sides)
    show_step(f"{' and '.join(splits)} of {folder}: drawn from the training text")
    outputs = [name_files(folder / split, sides) for split in splits]
    if dry_run() or all(files.exist() for files in outputs):
        return
    drawn = draw_pairs(training_files, splits, text_name=prefixes[0])
    write_pairs_of_splits(drawn, folder, sides)


def read_held_out_sources(folder: Path, sides: Sequence[str], splits: Sequence[str]) -> frozenset[str]:
    """Returns the lowercased sources of all pairs that `hold_out` has written. They must not be trained on.

    A dry run, which has written no pairs, returns an empty set. The arguments are those of `hold_out`.
    """
    if dry_run():
        return frozenset()
    lowercased: set[str] = set()
    for split in splits:
        source_file = name_files(folder / split, sides).source
        lowercased.update(line.lower() for line in lines(source_file))
    return frozenset(lowercased)


def write_pairs_of_splits(pairs_by_split: Mapping[str, Sequence[Pair]], folder: Path, sides: Sequence[str]) -> None:
    """Writes the pairs of some splits to the files FOLDER/SPLIT.SIDE. `sides`: the endings of source and target."""
    texts_by_file: dict[Path, list[str]] = {}
    for split, pairs in pairs_by_split.items():
        files = name_files(folder / split, sides)
        texts_by_file[files.source] = [pair.source for pair in pairs]
        texts_by_file[files.target] = [pair.target for pair in pairs]
    with atomic_write(*texts_by_file) as parts:  # temporary files, in the same order
        for part, texts in zip(parts, texts_by_file.values()):
            write_lines(part, texts)


def draw_pairs(files: Sequence[FilePair], splits: Sequence[str], text_name: Path) -> dict[str, list[Pair]]:
    """Draws pairs of the training text for validation or test sets. No two of them have the same source.

    For each set, a tenth of the pairs is drawn, but at most `MOST_HELD_OUT` pairs. If several drawn pairs have the same
    source, only the first of them is kept.

    Args:
        files: the files of the training text.
        splits: the sets to draw.
        text_name: names the training text in an error.

    Returns:
        {split: its pairs}, in the order of the text.

    Raises:
        UserError: the text has fewer than ten pairs.
    """
    number_of_pairs = sum(1 for _ in _pairs_with_text(files))
    number_per_split = min(MOST_HELD_OUT, number_of_pairs // 10)
    if number_per_split == 0:
        too_few = f"{number_of_pairs} pairs are too few to hold out some of them"
        raise UserError(f"{text_name}: {too_few} for {' and '.join(splits)}")
    split_by_index = draw_indices(number_of_pairs, number_per_split, splits)
    drawn: dict[str, list[Pair]] = {split: [] for split in splits}
    drawn_sources: set[str] = set()
    for index, pair in enumerate(_pairs_with_text(files)):
        source = pair.source.lower()
        if index in split_by_index and source not in drawn_sources:
            drawn_sources.add(source)
            drawn[split_by_index[index]].append(pair)
    return drawn


def draw_indices(total: int, number_per_split: int, splits: Sequence[str]) -> dict[int, str]:
    """Draws some of the numbers from 0 to `total` - 1 for each split. Returns {drawn number: its split}."""
    drawn_indices = random.Random(SEED).sample(range(total), number_per_split * len(splits))
    # The indices are in random order, and the splits take turns. So each split gets a random sample of its number.
    split_by_index: dict[int, str] = {}
    for turn, index in enumerate(drawn_indices):
        split_by_index[index] = splits[turn % len(splits)]
    return split_by_index


def _pairs_with_text(files: Sequence[FilePair]) -> Iterator[Pair]:
    """Yields those pairs of several files that have text on both sides, in the form in which text is prepared."""
    for file_pair in files:
        for raw in read_pairs(file_pair):
            pair = clean_pair(raw, one_line)
            if pair.source and pair.target:
                yield pair


# ---- text to denoise


def corrupt_spans(
    text: Path, output: Path, *, block_size: int, seed: int, density: float = 0.15, span_length: float = 3
) -> None:
    """Writes examples for T5's denoising: text with missing spans, and the missing spans (Raffel et al. 2020).

    The text is divided into blocks of words. In each block, random spans of words are replaced by marks. For example,
    OUTPUT.source gets the line ``thank you <extra_id_0> me to your <extra_id_1>``, and OUTPUT.target gets
    ``<extra_id_0> for inviting <extra_id_1> party``.

    Args:
        text: the file to read.
        output: path of the files to write, without the endings .source and .target. Existing files are kept.
        block_size: the number of words in a block. Blocks go over the ends of lines.
        seed: decides which spans are replaced.
        density: the share of words that are replaced.
        span_length: the mean number of words in a span.
    """
    sides = ("source", "target")
    outputs = name_files(output, sides)
    show_step(f"{output}.{in_braces(sides)}: spans of {text}, seed {seed}")
    if dry_run() or outputs.exist():
        return
    rng = random.Random(seed)
    with pair_writer(*outputs) as write_pair:
        for block in read_blocks(text, block_size):
            write_pair(corrupt_block(block, density, span_length, rng))


def corrupt_block(block: Sequence[str], density: float, span_length: float, rng: random.Random) -> Pair:
    """Returns an example for T5's denoising: a text with marks in the place of some spans, and the spans with marks.

    For example, the words ``thank you for inviting me today`` become the pair
    ``thank you <extra_id_0> me <extra_id_1>`` and ``<extra_id_0> for inviting <extra_id_1> today``.

    Args:
        block: the words of the text, at least two.
        density: the share of words that are replaced.
        span_length: the mean number of words in a span, at least 1.
        rng: decides where the spans are.
    """
    remaining_words = iter(block)
    source: list[str] = []
    target: list[str] = []
    for span_index, turn in enumerate(draw_turns(len(block), density, span_length, rng)):
        kept_words = list(itertools.islice(remaining_words, turn.kept))
        replaced_words = list(itertools.islice(remaining_words, turn.replaced))
        mark = f"<extra_id_{span_index}>"
        source += [*kept_words, mark]
        target += [mark, *replaced_words]
    return Pair(" ".join(source), " ".join(target))


class Turn(NamedTuple):
    """Some words of a block for T5's denoising that are kept, and the span of words after them, which is replaced."""

    kept: int  # the number of kept words, at least 1
    replaced: int  # the number of replaced words, at least 1


def draw_turns(number_of_words: int, density: float, span_length: float, rng: random.Random) -> list[Turn]:
    """Divides the words of a block at random into kept and replaced words, which take turns.

    As in T5, the first word is always kept, and the last word is always replaced. For example, with 6 words, a density
    of 0.5 and a span length of 1.5, there are 3 kept words, 3 replaced words and 2 spans. [Turn(kept=2, replaced=2),
    Turn(kept=1, replaced=1)] is one of the possible results.

    Args:
        number_of_words: the number of words in the block, at least two.
        density: the share of words that are replaced.
        span_length: the mean number of words in a span, at least 1.
        rng: decides how many words there are in each turn.
    """
    # At least one word is replaced, and at least one word is kept.
    number_replaced = clamp(round(number_of_words * density), 1, number_of_words - 1)
    number_kept = number_of_words - number_replaced
    # Each turn needs a word of both kinds.
    most_turns = min(number_kept, number_replaced)
    number_of_turns = clamp(round(number_replaced / span_length), 1, most_turns)
    kept_lengths = random_composition(number_kept, number_of_turns, rng)
    replaced_lengths = random_composition(number_replaced, number_of_turns, rng)
    return [Turn(kept, replaced) for kept, replaced in zip(kept_lengths, replaced_lengths)]


def clamp(number: int, smallest: int, largest: int) -> int:
    """Returns the number between `smallest` and `largest` that is nearest to `number`."""
    return min(max(number, smallest), largest)


def read_blocks(path: Path, block_size: int) -> Iterator[list[str]]:
    """Yields the words of a file in blocks of the same number of words.

    The words after the last whole block are dropped. But if the whole text is shorter than a block, it is one block,
    provided that it has at least two words.
    """
    block: list[str] = []
    is_first_block = True
    for line in lines(path):
        for word in line.split():
            block.append(word)
            if len(block) == block_size:
                yield block
                block = []
                is_first_block = False
    if is_first_block and len(block) >= 2:  # `corrupt_block` needs two words
        yield block


def random_composition(total: int, parts: int, rng: random.Random) -> list[int]:
    """Returns a random list of `parts` positive integers with the sum `total`. All such lists are equally likely."""
    # Cut a line of length `total` at random places. The integers are the lengths of the pieces.
    inner_cuts = sorted(rng.sample(range(1, total), parts - 1))
    starts = [0, *inner_cuts]
    ends = [*inner_cuts, total]
    return [end - start for start, end in zip(starts, ends)]
