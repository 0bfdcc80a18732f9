"""How the recipes act: options, commands that are shown, files written atomically, folders locked, settings pinned."""

import argparse
import contextlib
import fcntl
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, NoReturn, Optional, Sequence, Tuple

ROOT = Path(__file__).resolve().parent.parent


class UserError(Exception):
    """What a user can mend. The message is one line that names the flag or file and the fix."""


def dry_run() -> bool:
    """Whether commands are to be shown only (``DRY_RUN=1``)."""
    return os.environ.get("DRY_RUN", "") not in ("", "0")


def say(text: str) -> None:
    """A heading between the commands."""
    print(f"\n== {text}", flush=True)


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviated options and whose errors are one line."""

    def __init__(self, script: str, description: Optional[str]) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(f"scripts/{script}.sh", description=description, formatter_class=formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")

    def options(self) -> List[str]:
        """The names of all options."""
        return [name for action in self._actions for name in action.option_strings]


def split_flags(argv: Sequence[str]) -> Tuple[List[str], List[str]]:
    """The arguments before the first ``--``, and those after it."""
    at = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def integer(minimum: int) -> Callable[[str], int]:
    """The type of an option that takes an integer from `minimum` on."""

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text}: must be an integer, at least {minimum}")
        return int(text)

    return convert


def folder(text: str) -> Path:
    """The type of an option that names a folder which fairseq reads or writes."""
    if not text:
        raise argparse.ArgumentTypeError("an empty word is no folder; give its name")
    if re.match("-", str(Path(text))) or re.search("[,:]", text):
        raise argparse.ArgumentTypeError(
            f"{text}: fairseq takes no path that begins with - or contains a comma or a colon; rename it"
        )
    return Path(text)


def existing_folder(text: str) -> Path:
    """The type of an option that names a folder with text."""
    if not text or not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no such folder")
    return Path(text)


def cores() -> int:
    """This machine's cores, as far as this process may use them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def show(argv: Sequence[object], note: str = "") -> None:
    """Prints a command as it can be typed."""
    print("+ " + shlex.join(map(str, argv)) + note, flush=True)


def reason(errors: str) -> str:
    """The last line of a program's output that speaks of an error, else the last line."""
    lines = [line for line in errors.splitlines() if line.strip()] or ["it said nothing"]
    told = [line for line in lines if "rror" in line or "fatal" in line.lower()]
    return (told or lines)[-1].split("fairseq_synth: error: ")[-1].replace("error: ", "", 1).strip()


@contextlib.contextmanager
def started(argv: Sequence[object], **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """A program, with `options` of subprocess. Leaving the block waits for it; leaving it by an error ends it first.

    The program holds the locks of this process too, so that others wait for it even where this process was killed.
    """
    with subprocess.Popen(list(map(str, argv)), errors="replace", close_fds=False, **options) as process:
        try:
            yield process
            process.wait()
        except BaseException:  # SystemExit and KeyboardInterrupt too
            end(process)
            raise


def end(process: "subprocess.Popen[str]") -> None:
    """Ends a program and all that it has started; kills them if it takes more than five seconds."""
    running = [process.pid, *descendants(process.pid)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
            return


def descendants(pid: int) -> List[int]:
    """The processes that a process has started, and those that they have; none on systems other than Linux."""
    children: List[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            children += map(int, file.read_text().split())
    return [*children, *(below for child in children for below in descendants(child))]


def run(argv: Sequence[object], log: Optional[Path] = None) -> None:
    """Shows a command and, unless this is a dry run, runs it. With `log` its output goes to this file.

    There both streams stand line by line in the order of writing: Python, which fairseq's programs are in, would keep
    its output back, and write it in blocks that end in the middle of a line.
    """
    show(argv)
    if dry_run():
        return
    why = ""
    with open(log or os.devnull, "w") as file:
        to, errors = (file, subprocess.STDOUT) if log else (None, subprocess.PIPE)
        env = {**os.environ, "PYTHONUNBUFFERED": "1"} if log else None
        with started(argv, stdout=to, stderr=errors, env=env) as process:
            if process.stderr:
                why = pass_on(process.stderr)
    if process.returncode and log:
        raise UserError(f"{argv[0]} failed: {reason(log.read_text(encoding='utf-8', errors='replace'))}; see {log}")
    if process.returncode:
        raise UserError(why or f"{argv[0]} failed, see above")


def pass_on(errors: Any) -> str:
    """Shows what a program writes to standard error as it comes, but for a line ``error: …``, which is returned."""
    why = ""
    errors.reconfigure(newline="")  # a progress bar goes back to the start of its line
    for line in errors:
        if line.startswith("error: "):
            why = line[len("error: ") :].strip()
        else:
            print(line, end="", file=sys.stderr, flush=True)
    return why


def shell(command: str, output: Path, fix: str = "") -> None:
    """Writes what a shell command prints to `output`, with its folder, once it is whole. An existing file is kept."""
    if output.exists():
        return
    print(f"+ {command} > {shlex.quote(str(output))}", flush=True)
    if dry_run():
        return
    make_folder(output.parent)
    part = output.with_name(output.name + ".part")
    with open(part, "wb") as file:
        with started(["bash", "-euo", "pipefail", "-c", command], stdout=file, stderr=subprocess.PIPE) as process:
            _, errors = process.communicate()
    if process.returncode:
        part.unlink()
        raise UserError(f"{output} was not made: {reason(errors)}{fix and '; ' + fix}")
    part.replace(output)


def write(path: Path, text: str) -> None:
    """Writes a file atomically, with its folder."""
    make_folder(path.parent)
    part = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: this folder cannot be made ({error.strerror}); name another one") from None


def download(url: str, output: Path, fix: str) -> None:
    """Downloads a file, to a folder that is made; a call after one that was cut off goes on where it ended."""
    part = output.with_name(output.name + ".part")
    argv = ["curl", "--fail", "--location", "--continue-at", "-"]
    show([*argv, "--output", output, url])
    if dry_run():
        return
    make_folder(output.parent)
    argv += ["--silent", "--show-error", "--retry", "3", "--output", str(part), url]
    with started(argv, stderr=subprocess.PIPE) as process:
        _, errors = process.communicate()
    if process.returncode:
        if "416" in errors:  # more is there than the complete file has
            part.unlink()
        raise UserError(f"{url}: cannot be downloaded ({reason(errors)}); call again to go on, or {fix}")
    part.replace(output)


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[int]:
    """Holds a lock file while the block runs, or until a program that replaces this process (exec) ends.

    Yields its descriptor. Where another holds it, this waits for that one, or else yields 0 at once.
    """
    if dry_run():
        yield 1
        return
    make_folder(path.parent)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                yield 0
                return
            say(f"another process is at work in {path.parent}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        os.set_inheritable(file.fileno(), True)
        yield file.fileno()


def read_settings(file: Path) -> Dict[str, str]:
    """What `pin_settings` wrote, or nothing."""
    lines = file.read_text().splitlines() if file.exists() else []
    return dict(line.split("=", 1) for line in lines if "=" in line)


def pin_settings(file: Path, made: str, settings: Mapping[str, object], own: Mapping[str, str] = {}) -> None:
    """Writes what a folder is made with; refuses to mix it with what was made otherwise.

    `made` are patterns of the files in the folder that depend on the settings, divided by blanks. A setting in `own`
    has patterns of its own there.
    """
    asked, found = {name: str(value) for name, value in settings.items()}, read_settings(file)
    # an option that folders of earlier versions do not know is as one that is not given
    others = [name for name in {**found, **asked} if found.get(name, "") != asked.get(name, "")]
    if not others or dry_run():
        return
    there = {name: [path for each in own.get(name, made).split() for path in file.parent.glob(each)] for name in others}
    mixed = [name for name in others if there[name]]
    if found and mixed:
        both = {n: f"it has {n}={found.get(n) or 'none'}, asked for {n}={asked.get(n) or 'none'}" for n in mixed}
        if "raw" in both:
            both["raw"] = "its text has changed"  # digests tell a reader nothing
        raise UserError(
            f"{file.parent} was made with other settings ({'; '.join(both.values())}); give another folder, or "
            "remove it"
        )
    write(file, "".join(f"{name}={value}\n" for name, value in asked.items()))
