"""Parallel text: checks pairs of lines, holds out a validation and a test set, and makes pairs of text to denoise."""

import itertools
import random
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .languages import has_canonical_variants, has_separate_accents, lower, one_line
from .steps import UserError, dry_run, show_step, whole
from .text import at_hand, lines, open_to_write, write_lines

SEED = 1  # decides what is held out
MOST_HELD_OUT = 1000  # pairs of each set that is held out


class Pair(NamedTuple):
    """A line of the source and its translation."""

    source: str
    target: str


class FilePair(NamedTuple):
    """The files of both sides of parallel text."""

    source: Path
    target: Path


def find_files(prefixes: Sequence[Path], sides: Sequence[str]) -> list[FilePair]:
    """Returns the files PREFIX.SRC and PREFIX.TGT, or their .gz, of each prefix."""
    source, target = sides
    return [FilePair(at_hand(Path(f"{prefix}.{source}")), at_hand(Path(f"{prefix}.{target}"))) for prefix in prefixes]


def read_pairs(files: FilePair, clean: Callable[[str], str] = one_line) -> Iterator[Pair]:
    """Yields the pairs of lines of two files, each line changed by `clean`. Both files must have as many lines."""
    both_sides = itertools.zip_longest(lines(files.source), lines(files.target))  # None: the side has ended
    for number, (source, target) in enumerate(both_sides):
        if source is None or target is None:
            shorter = files.source if source is None else files.target
            raise UserError(f"{shorter}: ends after {number} lines, and the other side does not")
        yield Pair(clean(source), clean(target))


# ---- pairs to train and test on


class Limits(NamedTuple):
    """Which pairs are taken, and how they are changed."""

    keep_all: bool = False  # for a test set: a pair that would be left out raises an error instead
    sample: int | None = None  # only the first pairs of each file
    lowercase: bool = False
    held_out: frozenset[str] = frozenset()  # sources in small letters that must not be trained on
    max_length: int = 0  # words on a side; 0: any number
    max_ratio: float = 0  # of the longer side's words to the shorter side's; 0: any

    def fault(self, pair: Pair) -> str:
        """Returns why a pair is left out, or ``""`` if it is taken."""
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
    """Writes the pairs that a model can learn from to OUTPUT.SRC and OUTPUT.TGT, and prints how many others there are.

    `prefixes`: the files PREFIX.SRC and PREFIX.TGT to read. `clean`: changes each line before it is checked.
    """
    outputs = [Path(f"{output}.{side}") for side in sides]
    files = find_files(prefixes, sides)
    prefix_names = " ".join(str(prefix) for prefix in prefixes)
    show_step(f"{output}.{{{','.join(sides)}}}: pairs of {prefix_names}")
    if dry_run() or all(path.exists() for path in outputs):
        return
    counts = PairCounts()
    with whole(*outputs) as parts:
        source_part, target_part = parts
        with open_to_write(source_part) as source_file, open_to_write(target_part) as target_file:
            for pair in _checked_pairs(files, limits, clean, counts):
                source, target = pair
                if limits.lowercase:
                    source = lower(source, sides[0])
                    target = lower(target, sides[1])
                source_file.write(f"{source}\n")
                target_file.write(f"{target}\n")
        if not counts.taken:
            total = sum(counts.left_out.values())
            reasons = counts.describe_left_out() or "no text"
            raise UserError(f"{prefixes[0]}: no pair of {total} is left ({reasons})")
    counts.report()


class PairCounts:
    """Counts pairs by what happens to them."""

    def __init__(self) -> None:
        self.taken = 0
        self.left_out: Counter[str] = Counter()  # {reason: pairs}
        self.composed = 0  # pairs with letters and accents apart
        self.replaced = 0  # pairs with characters that NFC replaces by others

    def count_forms(self, pair: Pair) -> None:
        """Counts a pair as it was read, by the normal form of Unicode that it has."""
        text = f"{pair.source}\n{pair.target}"
        if unicodedata.is_normalized("NFC", text):  # which most text is, and what follows takes longer
            return
        self.composed += has_separate_accents(text)
        self.replaced += has_canonical_variants(text)

    def describe_left_out(self) -> str:
        """Returns how many pairs were left out for which reason."""
        return ", ".join(f"{number} {reason}" for reason, number in self.left_out.items())

    def report(self) -> None:
        """Prints the counts."""
        left_out = f", left out: {self.describe_left_out()}" if self.left_out else ""
        print(f"{self.taken} pairs{left_out}")
        if self.composed:
            print(f"{self.composed} pairs had letters and accents apart (NFD); they are composed now (NFC)")
        if self.replaced:
            replaced = "pairs had characters that Unicode's canonical form (NFC) replaces by others"
            print(f"{self.replaced} {replaced}, such as the sign of ohm (U+2126) by the letter omega (U+03A9)")


def _checked_pairs(
    files: Sequence[FilePair], limits: Limits, clean: Callable[[str], str], counts: PairCounts
) -> Iterator[Pair]:
    """Yields the pairs that are taken, cleaned, and counts all in `counts`."""
    for file_pair in files:
        pairs = itertools.islice(read_pairs(file_pair, clean=str), limits.sample)
        for number, raw_pair in enumerate(pairs, start=1):
            counts.count_forms(raw_pair)
            pair = Pair(clean(raw_pair.source), clean(raw_pair.target))
            fault = limits.fault(pair)
            if not fault:
                counts.taken += 1
                yield pair
            elif limits.keep_all:
                where = f"{file_pair.source}: line {number} here or in {file_pair.target.name}"
                raise UserError(f"{where} is {fault}; none may be dropped")
            else:
                counts.left_out[fault] += 1


# ---- pairs that are held out


def hold_out(prefixes: Sequence[Path], folder: Path, sides: Sequence[str], splits: Sequence[str]) -> frozenset[str]:
    """Draws pairs of the training text for `splits`, and writes them to FOLDER/SPLIT.SRC and FOLDER/SPLIT.TGT.

    Each split gets a tenth of the pairs, at most 1,000; a fixed seed decides which. Returns the sources that are held
    out, in small letters: a pair with such a source must not be trained on.
    """
    source_side, target_side = sides
    files = find_files(prefixes, sides)
    outputs = {
        split: FilePair(folder / f"{split}.{source_side}", folder / f"{split}.{target_side}") for split in splits
    }
    paths = [path for file_pair in outputs.values() for path in file_pair]
    show_step(f"{' and '.join(splits)} of {folder}: drawn from the training text")
    if dry_run():
        return frozenset()
    if not all(path.exists() for path in paths):
        drawn = draw_pairs(files, splits, prefixes[0])
        with whole(*paths) as parts:
            part_of_path = dict(zip(paths, parts))
            for split, file_pair in outputs.items():
                write_lines(part_of_path[file_pair.source], [pair.source for pair in drawn[split]])
                write_lines(part_of_path[file_pair.target], [pair.target for pair in drawn[split]])
    sources: set[str] = set()
    for file_pair in outputs.values():
        sources.update(line.lower() for line in lines(file_pair.source))
    return frozenset(sources)


def draw_pairs(files: Sequence[FilePair], splits: Sequence[str], text_name: Path) -> dict[str, list[Pair]]:
    """Returns {split: pairs drawn from the training text}. Each source is drawn once, for one of the splits."""
    total = sum(1 for _ in _full_pairs(files))
    number_for_a_split = min(MOST_HELD_OUT, total // 10)
    if number_for_a_split == 0:
        raise UserError(f"{text_name}: {total} pairs are too few to hold some out for {' and '.join(splits)}")
    places = random.Random(SEED).sample(range(total), number_for_a_split * len(splits))
    split_of_place = dict(zip(places, itertools.cycle(splits)))  # the splits take turns
    drawn: dict[str, list[Pair]] = {split: [] for split in splits}
    drawn_sources: set[str] = set()
    for place, pair in enumerate(_full_pairs(files)):
        source = pair.source.lower()
        if place in split_of_place and source not in drawn_sources:
            drawn_sources.add(source)
            drawn[split_of_place[place]].append(pair)
    return drawn


def _full_pairs(files: Sequence[FilePair]) -> Iterator[Pair]:
    """Yields the pairs of several files that have text on both sides."""
    for file_pair in files:
        for pair in read_pairs(file_pair):
            if pair.source and pair.target:
                yield pair


# ---- text to denoise


def corrupt_spans(
    text: Path, output: Path, *, block_size: int, seed: int, density: float = 0.15, span_length: float = 3
) -> None:
    """Writes pairs of corrupted text and what was taken out of it (span corruption, Raffel et al. 2020).

    The text is cut into blocks of `block_size` words, over the ends of lines. In each block, spans of `span_length`
    words on average, which are the share `density` of all words, become marks: OUTPUT.source has
    ``thank you <extra_id_0> me to your party``, and OUTPUT.target has ``<extra_id_0> for inviting``.
    """
    outputs = FilePair(Path(f"{output}.source"), Path(f"{output}.target"))
    show_step(f"{output}.{{source,target}}: spans of {text}, seed {seed}")
    if dry_run() or all(path.exists() for path in outputs):
        return
    rng = random.Random(seed)
    with whole(*outputs) as (source_part, target_part):
        with open_to_write(source_part) as source_file, open_to_write(target_part) as target_file:
            for block in read_blocks(text, block_size):
                pair = corrupt_block(block, density, span_length, rng)
                source_file.write(f"{pair.source}\n")
                target_file.write(f"{pair.target}\n")


def corrupt_block(block: Sequence[str], density: float, span_length: float, rng: random.Random) -> Pair:
    """Returns the words of a block with spans replaced by marks, and the marks with the words of their spans."""
    # at least one word is taken out, and at least one stays
    removed = min(max(round(len(block) * density), 1), len(block) - 1)
    kept = len(block) - removed
    # each span has at least one word, and at least one word that stays before it
    span_count = min(max(round(removed / span_length), 1), kept)
    kept_lengths = random_composition(kept, span_count, rng)
    removed_lengths = random_composition(removed, span_count, rng)
    source: list[str] = []
    target: list[str] = []
    start = 0
    for number, (kept_length, removed_length) in enumerate(zip(kept_lengths, removed_lengths)):
        mark = f"<extra_id_{number}>"
        span_start = start + kept_length
        span_end = span_start + removed_length
        source += [*block[start:span_start], mark]
        target += [mark, *block[span_start:span_end]]
        start = span_end
    return Pair(" ".join(source), " ".join(target))


def read_blocks(path: Path, block_size: int) -> Iterator[list[str]]:
    """Yields the words of a text, `block_size` at a time.

    Words that are left at the end are dropped, unless the whole text is shorter than a block.
    """
    block: list[str] = []
    has_yielded = False
    for line in lines(path):
        for word in line.split():
            block.append(word)
            if len(block) == block_size:
                yield block
                block = []
                has_yielded = True
    if not has_yielded and len(block) > 1:  # one word has to be taken out, and one has to stay
        yield block


def random_composition(total: int, parts: int, rng: random.Random) -> list[int]:
    """Returns `parts` positive integers with the sum `total`; each such list is equally likely."""
    # cut the numbers from 0 to `total` at random places: the parts are the distances between neighbouring cuts
    inner_cuts = sorted(rng.sample(range(1, total), parts - 1))
    starts = [0, *inner_cuts]
    ends = [*inner_cuts, total]
    return [end - start for start, end in zip(starts, ends)]
