#!/usr/bin/env python
"""Writes a small parallel corpus of numbers, dates and quantities in words, in two languages.

    python scripts/make_numbers.py en de OUT_DIR [--train 10000]

The sentences are made from the locale data of babel and the number words of num2words; nothing is downloaded.
No sentence of valid or test is in train. In German twenty-one is "einundzwanzig", the day comes before the month, and
"vor" comes before the days that English counts "ago": a model has to learn to change the order of words.
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

Fact = Callable[[str], str]  # returns the same fact in the language whose code it is given


class Pair(NamedTuple):
    """A sentence in two languages."""

    source: str
    target: str


def random_number(rng: random.Random) -> int:
    """Returns a number of at most three digits, mostly a small one."""
    return int(10 ** rng.uniform(0.3, 3))


def spell(text: str, lang: str) -> str:
    """Returns a text with words in place of its digits. In German, a number before a full stop is an ordinal."""
    if lang == "de":
        text = re.sub(r"(\d+)\.", lambda match: num2words(int(match[1]), lang=lang, to="ordinal"), text)
    return re.sub(r"\d+", lambda match: num2words(int(match[0]), lang=lang), text)


def make_quantity(rng: random.Random) -> Fact:
    """Returns a quantity such as "five kilometers"."""
    number = random_number(rng)
    unit = rng.choice(UNITS)
    return lambda lang: spell(format_unit(number, unit, "long", format="0", locale=lang), lang)


def make_price(rng: random.Random) -> Fact:
    """Returns a price such as "two euros"."""
    number = random_number(rng)
    currency = rng.choice(CURRENCIES)
    return lambda lang: f"{spell(str(number), lang)} {get_currency_name(currency, count=number, locale=lang)}"


def make_distance_in_time(rng: random.Random) -> Fact:
    """Returns a distance in time such as "three days ago" or "in two weeks"."""
    unit = rng.choice(TIME_UNITS)
    number = rng.randint(2, 99)
    is_past = rng.random() < 0.5
    delta = datetime.timedelta(**{unit: -number if is_past else number})
    granularity = unit.removesuffix("s")

    def write(lang: str) -> str:
        # with a high threshold babel never changes to a larger unit
        text = format_timedelta(delta, granularity=granularity, threshold=1e9, add_direction=True, locale=lang)
        return spell(text, lang)

    return write


def make_date(rng: random.Random) -> Fact:
    """Returns a date from 1900 to 2017 with its day of the week."""
    day = datetime.date(1900, 1, 1) + datetime.timedelta(days=rng.randrange(43_000))

    def write(lang: str) -> str:
        text = format_date(day, "full", locale=lang)
        text = text.replace(str(day.year), num2words(day.year, lang=lang, to="year"))
        if lang == "en":
            text = text.replace(f" {day.day},", f" {num2words(day.day, to='ordinal')},")
        return spell(text, lang)

    return write


FACTS = (make_quantity, make_price, make_distance_in_time, make_date)


def make_pair(rng: random.Random, source: str, target: str) -> Pair:
    """Returns one or two facts in two languages, joined as each language joins a list."""
    facts = [rng.choice(FACTS)(rng) for _ in range(rng.randint(1, 2))]
    return Pair(join_facts(facts, source), join_facts(facts, target))


def join_facts(facts: list[Fact], lang: str) -> str:
    """Returns facts as a list in a language. Spaces that forbid a line break become usual ones."""
    return format_list([fact(lang) for fact in facts], locale=lang).replace("\xa0", " ")


def make_corpus(rng: random.Random, source: str, target: str, size: int) -> list[Pair]:
    """Returns so many pairs whose sources all differ."""
    pair_by_source: dict[str, Pair] = {}
    while len(pair_by_source) < size:
        pair = make_pair(rng, source, target)
        pair_by_source.setdefault(pair.source, pair)
    return list(pair_by_source.values())


def write_split(folder: Path, split: str, pairs: list[Pair], source: str, target: str) -> None:
    """Writes SPLIT.SOURCE and SPLIT.TARGET, a sentence per line."""
    (folder / f"{split}.{source}").write_text("".join(f"{pair.source}\n" for pair in pairs), encoding="utf-8")
    (folder / f"{split}.{target}").write_text("".join(f"{pair.target}\n" for pair in pairs), encoding="utf-8")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", choices=("en", "de", "fr"), help="source language")
    parser.add_argument("target", choices=("en", "de", "fr"), help="target language")
    parser.add_argument("out", type=Path, help="folder for {train,valid,test}.{source,target}")
    parser.add_argument("--train", type=int, default=10_000, help="training sentences (default: 10000)")
    parser.add_argument("--held-out", type=int, default=500, help="sentences of valid and of test (default: 500)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    held_out = args.held_out
    pairs = make_corpus(random.Random(args.seed), args.source, args.target, args.train + 2 * held_out)
    args.out.mkdir(parents=True, exist_ok=True)
    write_split(args.out, "valid", pairs[:held_out], args.source, args.target)
    write_split(args.out, "test", pairs[held_out : 2 * held_out], args.source, args.target)
    write_split(args.out, "train", pairs[2 * held_out :], args.source, args.target)


if __name__ == "__main__":
    main()
