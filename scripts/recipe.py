"""recipe.py COMMAND …: what scripts/COMMAND.sh calls: prepare, train, evaluate, translate or reproduce."""

import importlib
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # not another copy of the project in this folder

from recipes.steps import UserError  # noqa: E402


def main() -> None:
    # the programs beside this interpreter
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # on CPUs: threads that spin while they wait slow a training tenfold where another program wants one of the cores
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    logging.disable(logging.INFO)  # fairseq's, on optional packages
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that what this has started is ended too
        if signal.getsignal(number) == signal.SIG_DFL:  # not under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        if not shutil.which("fairseq-train"):
            raise ModuleNotFoundError(name="fairseq")
        importlib.import_module(f"recipes.{sys.argv[1].replace('evaluate', 'score')}").main(sys.argv[2:])
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is not installed here; run scripts/setup.sh")
    except UserError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # such as under | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer goes nowhere
        sys.exit(141)
    except OSError as error:
        sys.exit(f"error: {error.filename or ''}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
