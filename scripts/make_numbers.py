#!/usr/bin/env python
"""Generates a small parallel corpus of numbers, dates and quantities in words, in two languages.

    python scripts/make_numbers.py en de OUT_DIR [--train 10000]

The sentences are generated from the locale data of babel and the number words of num2words, without any download. No
sentence of the validation and test sets is in the training set. The order of words differs between the languages: for
example, "twenty-one days ago" is "vor einundzwanzig Tagen" in German.
"""

import argparse
import datetime
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from babel.dates import format_date, format_timedelta
from babel.lists import format_list
from babel.numbers import get_currency_name
from babel.units import format_unit
from num2words import num2words

UNITS = (
    "length-kilometer length-meter length-mile mass-kilogram mass-gram mass-ton volume-liter volume-cup-metric "
    "duration-hour duration-minute duration-second area-hectare area-square-meter speed-kilometer-per-hour "
    "temperature-celsius energy-kilocalorie power-kilowatt digital-megabyte"
).split()
CURRENCIES = "EUR USD GBP JPY CHF SEK PLN INR".split()
TIME_UNITS = ("days", "weeks", "hours", "minutes")

# A fact, such as a date. The function takes the code of a language and returns the fact in that language.
Fact = Callable[[str], str]


class Pair(NamedTuple):
    """A sentence in two languages."""

    source: str
    target: str


def random_number(rng: random.Random) -> int:
    """Returns a number of at most three digits, mostly a small one."""
    return int(10 ** rng.uniform(0.3, 3))


def spell(text: str, lang: str) -> str:
    """Returns a text with words in place of its digits: "3 days" -> "three days", in German "3 Tage" -> "drei Tage"."""

    def spell_ordinal(match: re.Match[str]) -> str:
        return num2words(int(match[1]), lang=lang, to="ordinal")

    def spell_number(match: re.Match[str]) -> str:
        return num2words(int(match[0]), lang=lang)

    if lang == "de":  # in German, a number before a full stop is an ordinal
        text = re.sub(r"(\d+)\.", spell_ordinal, text)
    return re.sub(r"\d+", spell_number, text)


def make_quantity(rng: random.Random) -> Fact:
    """Returns a quantity such as "five kilometers"."""
    number = random_number(rng)
    unit = rng.choice(UNITS)

    def write(lang: str) -> str:
        return spell(format_unit(number, unit, "long", format="0", locale=lang), lang)

    return write


def make_price(rng: random.Random) -> Fact:
    """Returns a price such as "two euros"."""
    number = random_number(rng)
    currency = rng.choice(CURRENCIES)

    def write(lang: str) -> str:
        return f"{spell(str(number), lang)} {get_currency_name(currency, count=number, locale=lang)}"

    return write


def make_distance_in_time(rng: random.Random) -> Fact:
    """Returns a distance in time such as "three days ago" or "in two weeks"."""
    unit = rng.choice(TIME_UNITS)
    number = rng.randint(2, 99)
    is_past = rng.random() < 0.5
    signed_number = -number if is_past else number
    delta = datetime.timedelta(**{unit: signed_number})

    def write(lang: str) -> str:
        granularity = unit.removesuffix("s")  # babel calls the unit "day", not "days"
        # With a high threshold, babel never changes to a larger unit, such as from days to weeks.
        text = format_timedelta(delta, granularity=granularity, threshold=1e9, add_direction=True, locale=lang)
        return spell(text, lang)

    return write


def make_date(rng: random.Random) -> Fact:
    """Returns a date from 1900 to 2017, such as "Sunday, October thirteenth, nineteen ninety-one"."""
    days_since_1900 = rng.randrange(43_000)
    day = datetime.date(1900, 1, 1) + datetime.timedelta(days=days_since_1900)

    def write(lang: str) -> str:
        text = format_date(day, "full", locale=lang)
        text = text.replace(str(day.year), num2words(day.year, lang=lang, to="year"))
        if lang == "en":
            text = text.replace(f" {day.day},", f" {num2words(day.day, to='ordinal')},")
        return spell(text, lang)

    return write


FACTS = (make_quantity, make_price, make_distance_in_time, make_date)


def make_pair(rng: random.Random, source: str, target: str) -> Pair:
    """Returns the same one or two facts in two languages."""
    facts = []
    number_of_facts = rng.randint(1, 2)
    for _ in range(number_of_facts):
        make_fact = rng.choice(FACTS)
        facts.append(make_fact(rng))
    return Pair(join_facts(facts, source), join_facts(facts, target))


def join_facts(facts: list[Fact], lang: str) -> str:
    """Returns facts in a language, joined as this language joins a list: "two euros and three days ago"."""
    phrases = [fact(lang) for fact in facts]
    no_break_space = "\xa0"
    return format_list(phrases, locale=lang).replace(no_break_space, " ")


def make_corpus(rng: random.Random, source: str, target: str, size: int) -> list[Pair]:
    """Returns `size` pairs of sentences. No two of them have the same source."""
    pair_by_source: dict[str, Pair] = {}
    while len(pair_by_source) < size:
        pair = make_pair(rng, source, target)
        pair_by_source.setdefault(pair.source, pair)
    return list(pair_by_source.values())


def write_split(folder: Path, split: str, pairs: list[Pair], source: str, target: str) -> None:
    """Writes two files with a sentence per line, such as train.en and train.de.

    Args:
        folder: where to write the files.
        split: "train", "valid" or "test".
        pairs: the sentences.
        source: the code of the source language, such as "en".
        target: the code of the target language.
    """
    source_text = "".join(f"{pair.source}\n" for pair in pairs)
    target_text = "".join(f"{pair.target}\n" for pair in pairs)
    (folder / f"{split}.{source}").write_text(source_text, encoding="utf-8")
    (folder / f"{split}.{target}").write_text(target_text, encoding="utf-8")


def main() -> None:
    """Writes the corpus that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", choices=("en", "de", "fr"), help="source language")
    parser.add_argument("target", choices=("en", "de", "fr"), help="target language")
    parser.add_argument("out", type=Path, help="folder for {train,valid,test}.{source,target}")
    parser.add_argument("--train", type=int, default=10_000, help="number of training sentences (default: 10000)")
    parser.add_argument("--held-out", type=int, default=500, help="sentences in valid and in test (default: 500)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    size = args.train + 2 * args.held_out
    pairs = make_corpus(random.Random(args.seed), args.source, args.target, size)
    pairs_by_split = {
        "valid": pairs[: args.held_out],
        "test": pairs[args.held_out : 2 * args.held_out],
        "train": pairs[2 * args.held_out :],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for split, split_pairs in pairs_by_split.items():
        write_split(args.out, split, split_pairs, source=args.source, target=args.target)


if __name__ == "__main__":
    main()
