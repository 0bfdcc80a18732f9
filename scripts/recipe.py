"""Runs `python -m recipes` of this project, and not of another copy of it that is in the current folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipes.__main__ import main  # noqa: E402

main()
