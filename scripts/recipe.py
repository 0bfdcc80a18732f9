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

MODULES = {
    "prepare": "recipes.prepare",
    "train": "recipes.train",
    "evaluate": "recipes.score",
    "translate": "recipes.translate",
    "reproduce": "recipes.reproduce",
}


def main() -> None:
    """Runs the command line, and ends the process with one line for every mistake of a user."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("--help", "-h"):
        print(__doc__)
        return
    if command not in MODULES:
        sys.exit(f"error: {command}: choose from {', '.join(MODULES)}")
    set_up_process()
    try:
        if not shutil.which("fairseq-train"):
            raise ModuleNotFoundError(name="fairseq")
        importlib.import_module(MODULES[command]).main(arguments)
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is not installed here; run scripts/setup.sh")
    except UserError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # the reader has ended, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that Python can flush what it has not written yet
        sys.exit(141)
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        sys.exit(f"error: {file}{error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)


def set_up_process() -> None:
    """Sets the environment, the logging and the signals of this process."""
    # the programs of this interpreter's environment come first
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # Threads that spin while they wait make a training on a CPU ten times slower if another program uses a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    logging.disable(logging.INFO)  # fairseq's messages about optional packages
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # under nohup, SIGHUP is ignored
            signal.signal(number, exit_by_signal)


def exit_by_signal(number: int, frame: FrameType | None) -> None:
    """Ends this process as an error would, so that the programs it has started are ended too."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
