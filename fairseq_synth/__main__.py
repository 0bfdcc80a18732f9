"""``python -m fairseq_synth`` prints this folder, for ``--user-dir``, where fairseq and torch fit.

``python -m fairseq_synth configs`` prints the folder of the YAML files, for ``fairseq-hydra-train --config-dir``.
"""

import logging
import sys
from pathlib import Path

from . import register
from .errors import SynthesizerError, run_command


def main() -> None:
    """The command line.

    Raises:
        SynthesizerError: an argument other than ``configs``, or the folder of configs is missing.
    """
    folder, asked = Path(__file__).absolute().parent, sys.argv[1:]
    if asked not in ([], ["configs"]):
        raise SynthesizerError(f"{' '.join(asked)}: python -m fairseq_synth takes the word configs or nothing")
    if asked:
        # of an installed package; of a clone
        folders = [path for path in (folder / "configs", folder.parent / "configs") if path.is_dir()]
        if not folders:
            raise SynthesizerError(f"{folder}: has no configs; install the package again, or take them from a clone")
        folder = folders[0]
    logging.disable(logging.INFO)  # on import fairseq recommends packages that this does not need
    register()
    print(folder)


if __name__ == "__main__":
    run_command(main)
