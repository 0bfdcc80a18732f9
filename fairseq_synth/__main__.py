"""``python -m fairseq_synth`` prints this folder, for ``--user-dir``, where fairseq and torch fit."""

import os

from . import register
from .errors import run_command


def main() -> None:
    """The command line."""
    register()
    print(os.path.dirname(os.path.abspath(__file__)))


if __name__ == "__main__":
    run_command(main)
