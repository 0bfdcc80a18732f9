"""python -m recipes COMMAND …: what scripts/COMMAND.sh of the same name calls."""

import importlib
import os
import signal
import sys
from pathlib import Path

from .command import UserError

COMMANDS = {  # name: the module whose main() it calls
    "quickstart": "quickstart",
    "prepare": "prepare",
    "train": "train",
    "evaluate": "tasks",
    "translate": "translate",
    "reproduce": "reproduce",
    "analyse": "analysis",
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"usage: python -m recipes {{{','.join(COMMANDS)}}} …")
    for word in sys.argv:
        if word.encode(errors="replace").decode() != word:  # a file name's bytes
            sys.exit(f"error: {ascii(word)}: is not UTF-8; rename the file")
    # the programs beside this interpreter
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # on CPUs: threads that spin while they wait slow a training tenfold where another program wants one of the cores
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that what this has started is ended too
        if signal.getsignal(number) == signal.SIG_DFL:  # not under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        importlib.import_module(f".{COMMANDS[sys.argv[1]]}", __package__).main(sys.argv[2:])
        sys.stdout.flush()
    except UserError as error:
        sys.exit(f"error: {error}")
    except ModuleNotFoundError as error:
        if error.name != "yaml":  # of the environment
            raise
        sys.exit("error: the environment is missing; run scripts/setup.sh")
    except BrokenPipeError:  # such as under | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer goes nowhere
        sys.exit(141)
    except OSError as error:
        sys.exit(f"error: {error.filename or ''}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
