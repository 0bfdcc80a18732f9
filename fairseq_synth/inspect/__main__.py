"""``python -m fairseq_synth.inspect``: `arguments` has the flags, and `command` does the work."""

import logging
import sys
from collections.abc import Sequence

from .. import register
from ..errors import run_command
from .arguments import parse


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line. `argv`: its words; None: those of this process."""
    args = parse(argv)
    register()  # before the next import, which needs a fairseq that fits
    from .command import run

    run(args)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    run_command(main)
