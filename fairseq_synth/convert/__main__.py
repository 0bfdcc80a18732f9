"""``python -m fairseq_synth.convert``: the command line is in `command`."""

import logging
import sys
from collections.abc import Sequence

from .. import register
from ..errors import run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; see `command.main`."""
    register()  # first: it says in one line if fairseq does not fit
    from .command import main as run

    run(argv)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    run_command(main)
