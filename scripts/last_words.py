"""Keeps the last subwords of each line, from the beginning of a word on.

python scripts/last_words.py N bpe|sentencepiece < SUBWORDS > SUBWORDS
"""

import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipes.prepare import last_words  # noqa: E402


def main() -> None:
    most, kind = int(sys.argv[1]), sys.argv[2]
    out = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", newline="\n")
    for line in io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8", newline="\n"):
        print(*last_words(line.split(), most, kind), file=out)
    out.flush()


if __name__ == "__main__":
    main()
