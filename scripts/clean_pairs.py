"""Checks parallel text line by line and keeps the pairs that a translation model can learn from.

    python scripts/clean_pairs.py SRC TGT OUT_PREFIX PREFIX [PREFIX ...] [--max-length N] [--max-ratio R] [--sample N]
    python scripts/clean_pairs.py SRC TGT OUT_PREFIX PREFIX --keep-all

Reads PREFIX.SRC and PREFIX.TGT, or the same with .gz, and writes OUT_PREFIX.SRC and OUT_PREFIX.TGT: valid UTF-8, one
sentence a line for every tool (other line separators become spaces), no empty line. --keep-all is for test sets: a
pair that would be dropped is an error. The outputs get their names once both are whole.
"""

import argparse
import gzip
import itertools
import os
import re
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import BinaryIO, Iterator, NoReturn, Tuple

# what some tools take for the end of a line and others do not: the sides would no longer be aligned
SEPARATORS = re.compile("[\r\v\f\x1c-\x1e\x85\u2028\u2029]+")


def fail(message: str) -> NoReturn:
    sys.exit(f"error: {message}")


def opened(path: str) -> Tuple[BinaryIO, str]:
    """The file, or its .gz, and the name it was found by."""
    if os.path.exists(path):
        return open(path, "rb"), path
    if os.path.exists(path + ".gz"):
        return gzip.open(path + ".gz", "rb"), path + ".gz"
    fail(f"{path}: no such file, nor {path}.gz")


def sentences(path: str) -> Iterator[str]:
    """The lines of a file, decoded and trimmed."""
    file, name = opened(path)
    with file:
        try:
            for number, line in enumerate(file, 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")  # without a byte-order mark
                    yield SEPARATORS.sub(" ", text).strip()
                except UnicodeDecodeError as error:
                    other = "utf-16" if line[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
                    fail(
                        f"{name}: line {number} is not UTF-8 ({error.reason} {line[error.start]:#x}); "
                        f"convert the file, such as by iconv -f {other} -t utf-8"
                    )
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            fail(f"{name}: not a whole gzip file ({error}); fetch it again")


def pairs(prefix: str, src: str, tgt: str) -> Iterator[Tuple[str, str]]:
    """Both sides of a corpus, line by line."""
    sides = f"{prefix}.{src}", f"{prefix}.{tgt}"
    lines = 0
    for pair in itertools.zip_longest(*map(sentences, sides)):
        if None in pair:
            ended = sides[pair.index(None)]
            fail(f"{ended}: ends after {lines} lines and {sides[pair[0] is None]} does not; they must be aligned")
        lines += 1
        yield pair


def fault(source: str, target: str, max_length: int, max_ratio: float) -> str:
    """Why a pair is of no use, or nothing."""
    lengths = sorted((len(source.split()), len(target.split())))
    if not lengths[0]:
        return "empty"
    if max_length and lengths[1] > max_length:
        return f"longer than {max_length} tokens"
    if max_ratio and lengths[1] > max_ratio * lengths[0]:
        return f"of a length ratio over {max_ratio:g}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("src", help="language of the source, the files' extension")
    parser.add_argument("tgt", help="language of the target")
    parser.add_argument("output", help="prefix of the files to write")
    parser.add_argument("inputs", nargs="+", metavar="PREFIX", help="prefixes of the files to read, one after another")
    parser.add_argument("--max-length", type=int, default=0, help="most words on a side, 0 for any number")
    parser.add_argument("--max-ratio", type=float, default=0, help="longer side over the shorter, 0 for any")
    parser.add_argument("--sample", type=int, default=0, help="only the first N pairs of each input")
    parser.add_argument("--lowercase", action="store_true")
    parser.add_argument("--keep-all", action="store_true", help="a useless pair is an error")
    args = parser.parse_args()

    counts: Counter = Counter()
    outputs = [Path(f"{args.output}.{lang}") for lang in (args.src, args.tgt)]
    parts = [Path(f"{path}.part") for path in outputs]
    try:
        outputs[0].parent.mkdir(parents=True, exist_ok=True)
        with open(parts[0], "w", encoding="utf-8") as source_file, open(parts[1], "w", encoding="utf-8") as target_file:
            for prefix in args.inputs:
                corpus = pairs(prefix, args.src, args.tgt)
                for number, (source, target) in enumerate(itertools.islice(corpus, args.sample or None), 1):
                    why = fault(source, target, args.max_length, args.max_ratio)
                    if why and args.keep_all:
                        fail(f"{prefix}.{{{args.src},{args.tgt}}}: line {number} is {why}; nothing may be dropped here")
                    counts[why] += 1
                    if why:
                        continue
                    if args.lowercase:
                        source, target = source.lower(), target.lower()
                    source_file.write(source + "\n")
                    target_file.write(target + "\n")
        if not counts:
            fail(f"{', '.join(args.inputs)}: no text is in these files")
        left_out = ", ".join(f"{n} {why}" for why, n in counts.items() if why)
        if not counts[""]:
            fail(f"{', '.join(args.inputs)}: no pair is left of {sum(counts.values())} ({left_out})")
        for part, path in zip(parts, outputs):
            part.replace(path)
    except OSError as error:
        fail(f"{error.filename or args.output}: {error.strerror}")
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    print(f"{args.output}: {counts['']} pairs{', left out: ' + left_out if left_out else ''}")


if __name__ == "__main__":
    main()
