"""``python -m fairseq_synth`` prints the plugin's folder, for fairseq's ``--user-dir``.

It answers at once, because it imports neither torch nor fairseq. `HELP` describes what else it prints.
"""

import logging
import sys
from pathlib import Path

from . import register
from .errors import SynthesizerError, run_command
from .host.versions import check_installed

HELP = """\
usage: python -m fairseq_synth [configs | flags]

Prints the folder of the plugin, for fairseq's commands:

    fairseq-train data-bin --user-dir "$(python -m fairseq_synth)" --arch transformer_synth_random_multi30k ...

configs   prints the folder of the YAML files instead, for fairseq-hydra-train:

    fairseq-hydra-train --config-dir "$(python -m fairseq_synth configs)" --config-name multi30k_cpu \\
        common.user_dir="$(python -m fairseq_synth)" task.data=/absolute/path/to/data-bin ...

flags     prints a table of the flags that the plugin adds to fairseq-train, with their defaults
"""


def find_configs(package: Path) -> Path:
    """Returns the folder of the YAML files: within an installed package, or next to the package in a clone.

    Raises SynthesizerError if there is none.
    """
    for folder in (package / "configs", package.parent / "configs"):
        if folder.is_dir():
            return folder
    raise SynthesizerError(
        f"{package}: contains no configs; reinstall the package, or use the configs in a clone of the repository"
    )


def format_flags() -> str:
    """Returns a table in Markdown of the plugin's flags: name, default and help. `register` has to be called before."""
    from .config import SYNTHESIZER_FLAGS, stack_flag
    from .linformer import LINFORMER_FLAGS

    lines = ["| flag | default | what it sets |", "| --- | --- | --- |"]
    for name, _, field in [stack_flag("encoder"), stack_flag("decoder"), *SYNTHESIZER_FLAGS, *LINFORMER_FLAGS]:
        flag = f"--{name.replace('_', '-')}"
        lines.append(f"| `{flag}` | `{field.default}` | {field.metadata['help']} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the command line.

    Raises:
        SynthesizerError: a word is unknown, or torch is too old or not installed.
    """
    package = Path(__file__).absolute().parent
    words = sys.argv[1:]
    match words:
        case ["--help"] | ["-h"]:
            print(HELP, end="")
        case []:
            check_installed()
            print(package)
        case ["configs"]:
            check_installed()
            print(find_configs(package))
        case ["flags"]:
            check_installed()
            logging.disable(logging.INFO)  # while it is imported, fairseq recommends packages that are not needed here
            register()
            print(format_flags())
        case _:
            raise SynthesizerError(
                f"{' '.join(words)}: unknown arguments; use python -m fairseq_synth with configs, with flags, or alone"
            )


if __name__ == "__main__":
    run_command(main)
