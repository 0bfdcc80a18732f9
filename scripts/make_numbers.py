"""Writes a small parallel corpus of numbers, dates and quantities in words, in two languages.

    python scripts/make_numbers.py en de OUT_DIR [--train 10000]

The sentences come from the locale data of babel and the number words of num2words; nothing is downloaded.
No sentence of valid or test is in train. German says "einundzwanzig" for twenty-one, puts the day before the
month and "vor" before the days that English counts "ago": word order is what the model has to learn.
"""

import argparse
import datetime
import random
import re
from collections.abc import Callable
from pathlib import Path

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
DELTAS = ("days", "weeks", "hours", "minutes")

Fact = Callable[[str], str]  # language -> text


def number(rng: random.Random) -> int:
    """Most numbers are small, none has more than three digits."""
    return int(10 ** rng.uniform(0.3, 3))


def spell(text: str, lang: str) -> str:
    """Replaces the digits of `text` by words; German's ``3.`` and a day in English are ordinals."""
    if lang == "de":
        text = re.sub(r"(\d+)\.", lambda m: num2words(int(m[1]), lang=lang, to="ordinal"), text)
    return re.sub(r"\d+", lambda m: num2words(int(m[0]), lang=lang), text)


def quantity(rng: random.Random) -> Fact:
    n, unit = number(rng), rng.choice(UNITS)
    return lambda lang: spell(format_unit(n, unit, "long", format="0", locale=lang), lang)


def price(rng: random.Random) -> Fact:
    n, currency = number(rng), rng.choice(CURRENCIES)
    return lambda lang: f"{spell(str(n), lang)} {get_currency_name(currency, count=n, locale=lang)}"


def distance_in_time(rng: random.Random) -> Fact:
    unit, n, past = rng.choice(DELTAS), rng.randint(2, 99), rng.random() < 0.5
    delta = datetime.timedelta(**{unit: -n if past else n})
    return lambda lang: spell(
        format_timedelta(delta, granularity=unit[:-1], threshold=1e9, add_direction=True, locale=lang), lang
    )


def date(rng: random.Random) -> Fact:
    day = datetime.date(1900, 1, 1) + datetime.timedelta(days=rng.randrange(43_000))

    def text(lang: str) -> str:
        written = format_date(day, "full", locale=lang).replace(
            str(day.year), num2words(day.year, lang=lang, to="year")
        )
        if lang == "en":
            written = written.replace(f" {day.day},", f" {num2words(day.day, to='ordinal')},")
        return spell(written, lang)

    return text


def sentence(rng: random.Random, langs: tuple[str, str]) -> tuple[str, str]:
    """One or two facts, joined as each language joins a list."""
    facts = [rng.choice((quantity, price, distance_in_time, date))(rng) for _ in range(rng.randint(1, 2))]
    source, target = (format_list([fact(lang) for fact in facts], locale=lang) for lang in langs)
    return source.replace("\xa0", " "), target.replace("\xa0", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", choices=("en", "de", "fr"), help="source language")
    parser.add_argument("target", choices=("en", "de", "fr"), help="target language")
    parser.add_argument("out", type=Path, help="folder for {train,valid,test}.{source,target}")
    parser.add_argument("--train", type=int, default=10_000, help="training sentences (default: 10000)")
    parser.add_argument("--held-out", type=int, default=500, help="sentences of valid and of test (default: 500)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    rng = random.Random(args.seed)
    pairs: list[tuple[str, str]] = []
    seen = set()
    while len(pairs) < args.train + 2 * args.held_out:
        pair = sentence(rng, (args.source, args.target))
        if pair[0] not in seen:
            seen.add(pair[0])
            pairs.append(pair)
    args.out.mkdir(parents=True, exist_ok=True)
    ends = {"valid": args.held_out, "test": 2 * args.held_out, "train": len(pairs)}
    start = 0
    for split, end in ends.items():
        for side, lang in enumerate((args.source, args.target)):
            text = "".join(pair[side] + "\n" for pair in pairs[start:end])
            (args.out / f"{split}.{lang}").write_text(text, encoding="utf-8")
        start = end


if __name__ == "__main__":
    main()
