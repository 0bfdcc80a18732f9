"""Span corruption (Raffel et al. 2020) of a text, as pairs: what is left of a block of words, and what was taken out.

    python scripts/corrupt_spans.py TEXT PREFIX [--words 64] [--density 0.15] [--span 3] [--seed 1]

Writes PREFIX.source and PREFIX.target. TEXT is cut into blocks of --words words, over the ends of its lines. In each
block spans of words, --span long on average and --density of all words, become <extra_id_0>, <extra_id_1>, …:

    source: thank you <extra_id_0> me to your party <extra_id_1> week
    target: <extra_id_0> for inviting <extra_id_1> last
"""

import argparse
import random
from pathlib import Path
from typing import Iterator, List, Tuple


def blocks(path: Path, words: int) -> Iterator[List[str]]:
    """The words of a text, so many at a time; what is left at the end is dropped unless it is all there is."""
    block: List[str] = []
    whole = False
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            for word in line.split():
                block.append(word)
                if len(block) == words:
                    yield block
                    block, whole = [], True
    if block and not whole:
        yield block


def composition(total: int, parts: int, rng: random.Random) -> List[int]:
    """`total` as a sum of so many positive numbers, each such sum being equally likely."""
    cuts = sorted(rng.sample(range(1, total), parts - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total])]


def corrupted(block: List[str], density: float, span: float, rng: random.Random) -> Tuple[str, str]:
    """Source and target of a block of two words or more, which begins with a word that is kept."""
    taken = min(max(round(len(block) * density), 1), len(block) - 1)
    spans = min(max(round(taken / span), 1), len(block) - taken)
    source: List[str] = []
    target: List[str] = []
    at = 0
    kept, out = composition(len(block) - taken, spans, rng), composition(taken, spans, rng)
    for number, (before, length) in enumerate(zip(kept, out)):
        mark = f"<extra_id_{number}>"
        source += [*block[at : at + before], mark]
        target += [mark, *block[at + before : at + before + length]]
        at += before + length
    return " ".join(source), " ".join(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("prefix")
    parser.add_argument("--words", type=int, default=64, help="of a block")
    parser.add_argument("--density", type=float, default=0.15, help="part of the words that is taken out")
    parser.add_argument("--span", type=float, default=3, help="mean words of a span")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    files = [Path(f"{args.prefix}.{side}") for side in ("source", "target")]
    parts = [file.with_name(f"{file.name}.part") for file in files]
    with open(parts[0], "w", encoding="utf-8") as source, open(parts[1], "w", encoding="utf-8") as target:
        for block in blocks(args.text, args.words):
            if len(block) > 1:
                left, out = corrupted(block, args.density, args.span, rng)
                print(left, file=source)
                print(out, file=target)
    for part, file in zip(parts, files):
        part.replace(file)


if __name__ == "__main__":
    main()
