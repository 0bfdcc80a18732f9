#!/usr/bin/env python
"""Runs a command of recipes/. The shell scripts call it: scripts/train.sh ... is scripts/recipe.py train ...

python scripts/recipe.py prepare|train|evaluate|translate|reproduce [--help] ...
"""

import importlib
import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this project, not another copy in the current folder

from recipes.steps import UserError  # noqa: E402

STDOUT = 1  # the file descriptor of standard output

# the module of each command; its function main takes the arguments
MODULES = {
    "prepare": "recipes.prepare",
    "train": "recipes.train",
    "evaluate": "recipes.score",
    "translate": "recipes.translate",
    "reproduce": "recipes.reproduce",
}


def main() -> None:
    """Runs the command that the command line names. A mistake of the user ends the process with one line."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("--help", "-h"):
        print(__doc__)
        return
    if command not in MODULES:
        sys.exit(f"error: {command}: choose from {', '.join(MODULES)}")
    set_up_process()
    try:
        run(MODULES[command], arguments)
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is not installed here; run scripts/setup.sh")
    except UserError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # the program that reads our output has ended, such as head
        # When Python ends, it writes the rest of our output. That must not raise the same error again.
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, STDOUT)
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        sys.exit(f"error: {file}{error.strerror}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def run(module: str, arguments: list[str]) -> None:
    """Calls the function main of a module of recipes/; raises ModuleNotFoundError if fairseq is not installed."""
    if not shutil.which("fairseq-train"):
        raise ModuleNotFoundError(name="fairseq")
    importlib.import_module(module).main(arguments)
    sys.stdout.flush()  # here, so that an error while writing is caught


def set_up_process() -> None:
    """Sets the environment variables, the logging and the signal handlers of this process."""
    # the programs of this interpreter's environment come first
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # Threads that spin while they wait make a training on a CPU ten times slower if another program uses a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    logging.disable(logging.INFO)  # fairseq's messages about optional packages
    for number in (signal.SIGTERM, signal.SIGHUP):
        is_ignored = signal.getsignal(number) != signal.SIG_DFL  # as SIGHUP is under nohup
        if not is_ignored:
            signal.signal(number, exit_by_signal)


def exit_by_signal(number: int, frame: FrameType | None) -> None:
    """Handles a signal by raising SystemExit, so that the programs that this process has started are ended too."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
