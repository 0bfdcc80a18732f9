"""recipes/steps.py runs commands, writes whole files and locks folders; scripts/ have help and errors of one line."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import ROOT, assert_refused, children, is_alive, run_script, wait_for

from recipes import steps
from recipes.catalog import CORPORA, TABLES
from recipes.steps import Busy, UserError

# A program that prints and logs a line three times, with a pause of half a second after the first time.
PRINT_AND_LOG = """
import sys, time
for i in range(3):
    print('D' * 3000)
    print('INFO', file=sys.stderr)
    if i == 0:
        time.sleep(0.5)
"""


def test_a_log_has_what_a_program_prints_and_logs_behind_what_an_earlier_call_has_left(tmp_path, monkeypatch):
    """The lines of both kinds are in order, and are seen while the program runs."""
    log = tmp_path / "log"
    log.write_text("earlier\n")
    lines = []
    times = []

    def watch(line):
        """Records a line and when it was seen."""
        lines.append(line)
        times.append(time.time())

    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    steps.run([sys.executable, "-c", PRINT_AND_LOG], log, watch)
    printed_line = "D" * 3000 + "\n"
    assert lines == [printed_line, "INFO\n"] * 3
    assert times[2] - times[1] > 0.25
    assert log.read_text() == "earlier\n" + (printed_line + "INFO\n") * 3


@pytest.mark.parametrize("code, has_log, part", [
    ("echo 'error: text.en: line 2 is empty'; echo more; exit 1", True, "text.en: line 2 is empty; see .*log$"),
    ("printf 'no \\xff\\n'; exit 1", True, "bash failed: no"),  # this output is not UTF-8
    ("exit 1", False, "bash failed: see above"),
    ("kill -9 $$", True, "bash failed: signal 9 ended it; "),
])  # fmt: skip
def test_the_error_of_a_failed_program_says_why_it_failed(tmp_path, code, has_log, part):
    """Without a log the program's own output is on the screen already."""
    log = tmp_path / "log" if has_log else None
    assert_refused(lambda _: steps.run(["bash", "-c", code], log), part=part)


@pytest.mark.parametrize("output, reason", [
    ("a\nOSError: disk full\nBrokenPipeError: gone\n", "OSError: disk full"),
    ("Traceback:\n  raise ValueError('no')\nKeyError: 'x'\n\nDuring it:\nTypeError: y", "KeyError: 'x'"),
    ("1 | INFO | errors: 0\nx.py:1: UserWarning: an error\nfairseq_synth: error: --lr: bad\n", "--lr: bad"),
    ("gzip: stdin: unexpected end of file\ntar: Child returned status 1\ntar: Error is not recoverable: exiting now",
     "gzip: stdin: unexpected end of file"),
    ("one\ntwo\n", "two"),
])  # fmt: skip
def test_the_first_error_is_the_reason(output, reason):
    """Later errors may follow from the first one. Source code, progress and warnings only speak of errors."""
    assert steps.reason_of_failure(output) == reason


def test_a_folder_is_never_taken_for_an_option(tmp_path, monkeypatch):
    (tmp_path / "-x").mkdir()
    monkeypatch.chdir(tmp_path)
    assert steps.existing("./-x") == tmp_path / "-x"


@pytest.mark.parametrize("value, is_shown", [("1", True), ("0", False), ("", False)])
def test_a_dry_run_shows_commands_without_running_them(value, is_shown, tmp_path, monkeypatch):
    """The variable DRY_RUN has the same meaning for the recipes and for the scripts around them."""
    file_of_a_command = tmp_path / "a"
    file_of_a_script = tmp_path / "b"
    file_of_make_file = tmp_path / "c"
    monkeypatch.setenv("DRY_RUN", value)
    steps.run(["touch", file_of_a_command])
    steps.make_file(file_of_make_file, "echo c")
    script = f'source {ROOT}/scripts/common.sh; run touch "$1"'
    subprocess.run(["bash", "-c", script, "bash", file_of_a_script], check=True)
    is_run = not is_shown
    assert file_of_a_command.exists() == is_run
    assert file_of_a_script.exists() == is_run
    assert file_of_make_file.exists() == is_run


def test_files_are_whole_or_not_there(tmp_path):
    """Nothing is left on a full disk, where only one of two files is written, and where any program of a pipe fails.

    The unfinished file of a process that was killed is removed.
    """
    path = tmp_path / "a"

    def make_file_by(argv):
        """Makes the file with the shell command that is the only item of `argv`; the advice is to get room."""
        (command,) = argv
        steps.make_file(path, command, "; get room")

    for command in ("seq 9 > /dev/full", "false | cat", r"printf '\xff' >&2; exit 1"):
        assert_refused(make_file_by, command, part="a was not made: .*; get room$")

    with pytest.raises(ZeroDivisionError):
        with steps.atomic_write(tmp_path / "b", tmp_path / "c") as (part_of_file, part_of_folder):
            part_of_file.write_text("half")
            part_of_folder.mkdir()
            raise ZeroDivisionError

    with pytest.raises(UserError, match="d was not written: No space left on device; free disk space"):
        with steps.atomic_write(tmp_path / "d") as (part_on_full_disk,):
            part_on_full_disk.symlink_to("/dev/full")
            part_on_full_disk.write_text("text")
    assert not any(tmp_path.iterdir())

    host = socket.gethostname()
    no_process = 1 << 30  # a number that no process has
    part_of_running_process = tmp_path / f"a.{host}-1.part"
    part_of_killed_process = tmp_path / f"a.{host}-{no_process}.part"
    part_of_running_process.touch()
    part_of_killed_process.touch()
    steps.make_file(path, "false | echo one || true")
    steps.make_file(path, "echo other")  # does nothing, because a file that is there is kept
    assert path.read_text() == "one\n"
    assert set(tmp_path.iterdir()) == {path, part_of_running_process}


@pytest.mark.parametrize("time_of_file, time_of_text, is_kept", [(2, 1, True), (1, 2, False), (None, 1, False)])
def test_what_is_older_than_its_text_is_made_anew(time_of_file, time_of_text, is_kept, tmp_path):
    """A file without a time does not exist."""
    text = tmp_path / "text"
    text.touch()
    os.utime(text, (time_of_text, time_of_text))
    file = tmp_path / "file"
    if time_of_file is not None:
        file.touch()
        os.utime(file, (time_of_file, time_of_file))
    assert steps.is_newer(file, [text]) == is_kept


# A program that locks the file that it is given, starts another program and prints that program's process number.
LOCK_AND_START = """
import sys
from pathlib import Path
from recipes.steps import locked, started
with locked(Path(sys.argv[1])), started(["sleep", "60"]) as process:
    print(process.pid, flush=True)
    process.wait()
"""


def test_a_lock_is_held_by_what_has_been_started_when_its_caller_was_killed(tmp_path, capsys):
    """It refuses others, or has them wait until the started program has ended."""
    lock = tmp_path / ".lock"
    command = [sys.executable, "-c", LOCK_AND_START, lock]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as caller:
        started_program = int(caller.stdout.readline())
        caller.kill()
    with pytest.raises(Busy, match="another process is at work there"):
        with steps.locked(lock):
            pass
    threading.Timer(1, os.kill, (started_program, signal.SIGKILL)).start()
    start = time.time()
    with steps.locked(lock, wait=True):
        assert time.time() - start > 0.9
        assert "waiting for it" in capsys.readouterr().out


SCRIPTS_FOR_USERS = ("prepare", "train", "evaluate", "translate", "reproduce", "quickstart", "setup", "test")


def test_help(tmp_path):
    """The help of every script lists all that there is, in two screens, also if a symbolic link elsewhere is called."""
    for name in SCRIPTS_FOR_USERS:
        link = tmp_path / name
        link.symlink_to(ROOT / "scripts" / f"{name}.sh")
        process = run_script(link, "--help", cwd=tmp_path)
        assert process.returncode == 0, process.stderr
        assert not process.stderr
        if name not in ("setup", "test"):
            assert f"scripts/{name}.sh" in process.stdout
        if name == "prepare":
            for corpus in CORPORA:
                assert re.search(rf"\b{corpus}\b", process.stdout), corpus
        if name == "reproduce":
            for table in TABLES:
                assert re.search(rf"\b{table}\b", process.stdout), table
        assert len(process.stdout.splitlines()) <= 100, name


def copy_what_setup_reads(folder):
    """Copies the scripts, and the files from which setup.sh makes an environment, into a folder."""
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for name in ("setup.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)


def record_environment(folder, root):
    """Makes a folder .venv whose record says that it was installed for the project in the folder `root`."""
    (folder / ".venv").mkdir(exist_ok=True)
    (folder / ".venv" / "installed").write_text(f"{root} another digest  -\n")


def test_an_environment_that_was_copied_is_made_anew(tmp_path):
    """The programs of a copied environment name the interpreter of the one that it was copied from."""
    copy_what_setup_reads(tmp_path)
    for root, is_made_anew in ((tmp_path, False), (f"/elsewhere{tmp_path}", True), (f"{tmp_path}2", True)):
        record_environment(tmp_path, root)
        process = run_script(tmp_path / "scripts" / "setup.sh", env={"DRY_RUN": "1"})
        assert process.returncode == 0, process.stdout + process.stderr
        assert ("-m venv --clear " in process.stdout) == is_made_anew, process.stdout + process.stderr


def test_the_environment_of_another_folder_is_not_emptied(tmp_path):
    project = tmp_path / "mine"
    other_project = tmp_path / "other"
    for folder in (project, other_project):
        folder.mkdir()
        copy_what_setup_reads(folder)
    record_environment(other_project, root=other_project)
    (project / ".venv").symlink_to(other_project / ".venv")

    process = run_script(project / "scripts" / "setup.sh", env={"DRY_RUN": "1"})
    assert process.returncode == 1
    assert process.stderr.startswith("error: .venv is a link to the environment of another folder")


class FailingCall(NamedTuple):
    """A call of a script that ends with an error."""

    project: Path  # the folder of the project whose script is called
    script: str
    arguments: list[str]
    message: str  # the beginning of the error


def test_errors_are_one_line(tmp_path):
    """The errors are a mistake of the user's, one of the system's, no environment, and a pipe that is closed early."""
    broken_project = tmp_path  # in which setup.sh fails and yaml cannot be imported
    for folder in ("scripts", "recipes"):
        shutil.copytree(ROOT / folder, broken_project / folder)
    yaml_module = broken_project / "yaml.py"
    yaml_module.write_text("raise ModuleNotFoundError(name='yaml')\n")
    (broken_project / "scripts" / "setup.sh").write_text("#!/bin/bash\nexit 1\n")

    wrong_flag = FailingCall(
        project=ROOT,
        script="train.sh",
        arguments=[tmp_path, "random", "--gpu", "1"],
        message="--gpu 1: no option of train.sh; flags of fairseq",
    )
    file_as_folder = FailingCall(
        project=ROOT,
        script="prepare.sh",
        arguments=["numbers", "de", yaml_module / "x"],
        message=f"{yaml_module}/x",
    )
    failed_setup = FailingCall(broken_project, "quickstart.sh", arguments=[], message="scripts/setup.sh failed")
    no_yaml = FailingCall(
        broken_project, "train.sh", arguments=[], message="yaml is not installed here; run scripts/setup.sh"
    )
    for call in (wrong_flag, file_as_folder, failed_setup, no_yaml):
        script = call.project / "scripts" / call.script
        process = run_script(script, *call.arguments, env={"PYTHONPATH": str(call.project)})
        assert process.returncode == 1
        assert process.stderr.startswith(f"error: {call.message}")
        assert process.stderr.count("\n") == 1

    listing = "scripts/reproduce.sh table2 --seed \"$(seq -s ' ' 3000)\" --list | head -1"
    process = subprocess.run(["bash", "-o", "pipefail", "-c", listing], cwd=ROOT, capture_output=True, text=True)
    assert process.stderr == ""
    assert process.stdout.count("\n") == 1


@pytest.mark.parametrize("call, sent_signal, code", [
    ("run(['bash', '-c', 'sleep 600 & wait'])", signal.SIGTERM, 143),  # a scheduler or `timeout` sends this signal
    ("run(['bash', '-c', 'sleep 600 & wait'], Path('/dev/null'), print)", signal.SIGINT, 130),
    ("make_file(Path('out'), 'sleep 600 | cat')", signal.SIGTERM, 143),
    ("run(['bash', '-c', 'sleep 3; true'])", signal.SIGHUP, 0),  # under nohup this signal ends nothing
])  # fmt: skip
def test_what_a_recipe_has_started_ends_with_it(tmp_path, call, sent_signal, code):
    """A signal to a recipe leaves no program behind, nor half a file."""
    program = (
        "import signal, sys; from pathlib import Path\n"
        "from recipes import steps, translate; from scripts import recipe\n"
        f"translate.main = lambda argv: steps.{call}\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job of a shell ignores it
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "sys.argv[1:] = ['translate']; recipe.main()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    recipe = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)

    def has_grandchildren():
        """Returns whether the recipe has started a shell, and the shell another program."""
        shells = children(recipe.pid)
        return bool(shells) and bool(children(shells[0]))

    wait_for(has_grandchildren)
    shell = children(recipe.pid)[0]
    started_processes = [shell, *children(shell)]
    time.sleep(1)  # until the recipe waits for the shell
    recipe.send_signal(sent_signal)
    assert recipe.wait(timeout=60) == code
    wait_for(lambda: not any(is_alive(process) for process in started_processes))
    assert not any(tmp_path.iterdir())
