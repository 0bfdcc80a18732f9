"""``python -m fairseq_synth`` prints this folder, for ``--user-dir``; at once, for it loads neither fairseq nor torch.

``python -m fairseq_synth configs`` prints the folder of the YAML files, for ``fairseq-hydra-train --config-dir``;
``python -m fairseq_synth flags`` prints a table of the plugin's flags.
"""

import logging
import sys
from pathlib import Path

from . import register
from .errors import SynthesizerError, run_command
from .host.versions import check_installed


def configs(folder: Path) -> Path:
    """The folder of YAML files of an installed package, or of a clone; SynthesizerError if there is none."""
    for found in (folder / "configs", folder.parent / "configs"):
        if found.is_dir():
            return found
    raise SynthesizerError(f"{folder}: has no configs; install the package again, or take them from a clone")


def flag_table() -> str:
    """The flags that fairseq has not, their defaults and what they are for, in Markdown."""
    from .config import SYNTHESIZER_FLAGS, stack_flag
    from .linformer import LINFORMER_FLAGS

    rows = [("flag", "default", "what it sets"), ("---",) * 3]
    for name, _, flag in [stack_flag("encoder"), stack_flag("decoder"), *SYNTHESIZER_FLAGS, *LINFORMER_FLAGS]:
        rows.append((f"`--{name.replace('_', '-')}`", f"`{flag.default}`", flag.metadata["help"]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """The command line. Raises SynthesizerError for an argument other than ``configs`` or ``flags``."""
    folder, asked = Path(__file__).absolute().parent, sys.argv[1:]
    if asked not in ([], ["configs"], ["flags"]):
        raise SynthesizerError(f"{' '.join(asked)}: python -m fairseq_synth takes the word configs, flags, or nothing")
    if asked == ["flags"]:
        logging.disable(logging.INFO)  # on import fairseq recommends packages that this does not need
        register()
        print(flag_table())
        return
    check_installed()
    print(configs(folder) if asked else folder)


if __name__ == "__main__":
    run_command(main)
