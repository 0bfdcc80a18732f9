"""Steps: commands, whole files and locks; and the scripts as a user meets them."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from helpers import ROOT, assert_refused, children, is_alive, run_script, wait_for

from recipes import steps
from recipes.catalog import CORPORA, TABLES
from recipes.steps import Busy, UserError


def test_a_log(tmp_path, monkeypatch):
    """What a program prints and logs, in order, behind what an earlier call has left; seen while the program runs."""
    (tmp_path / "log").write_text("earlier\n")
    seen = []
    program = "import sys, time\nfor i in range(3):\n print('D' * 3000)\n print('INFO', file=sys.stderr)\n"
    command = [sys.executable, "-c", f"{program} time.sleep(0.5 * (i == 0))"]
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    steps.run(command, tmp_path / "log", lambda line: seen.append((line, time.time())))
    assert [line for line, _ in seen] == ["D" * 3000 + "\n", "INFO\n"] * 3 and seen[2][1] - seen[1][1] > 0.25
    assert (tmp_path / "log").read_text() == "earlier\n" + ("D" * 3000 + "\nINFO\n") * 3


@pytest.mark.parametrize("code, log, part", [
    ("echo 'error: text.en: line 2 is empty'; echo more; exit 1", True, "text.en: line 2 is empty; see .*log$"),
    ("printf 'no \\xff\\n'; exit 1", True, "bash failed: no"),  # no UTF-8
    ("exit 1", False, "bash failed: see above"),
    ("kill -9 $$", True, "bash failed: signal 9 ended it; "),
])  # fmt: skip
def test_what_a_program_says(tmp_path, code, log, part):
    assert_refused(lambda _: steps.run(["bash", "-c", code], tmp_path / "log" if log else None), part=part)


@pytest.mark.parametrize("output, reason", [
    ("a\nOSError: disk full\nBrokenPipeError: gone\n", "OSError: disk full"),
    ("Traceback:\n  raise ValueError('no')\nKeyError: 'x'\n\nDuring it:\nTypeError: y", "KeyError: 'x'"),
    ("1 | INFO | errors: 0\nx.py:1: UserWarning: an error\nfairseq_synth: error: --lr: bad\n", "--lr: bad"),
    ("gzip: stdin: unexpected end of file\ntar: Child returned status 1\ntar: Error is not recoverable: exiting now",
     "gzip: stdin: unexpected end of file"),
    ("one\ntwo\n", "two"),
])  # fmt: skip
def test_the_first_error_is_the_reason(output, reason):
    """Later ones may follow from it. Source code, progress and warnings only speak of errors."""
    assert steps.reason_of_failure(output) == reason


def test_a_folder_is_never_taken_for_an_option(tmp_path, monkeypatch):
    (tmp_path / "-x").mkdir()
    monkeypatch.chdir(tmp_path)
    assert steps.existing("./-x") == tmp_path / "-x"


@pytest.mark.parametrize("value, is_shown", [("1", True), ("0", False), ("", False)])
def test_what_a_dry_run_is(value, is_shown, tmp_path, monkeypatch):
    """For the recipes and for the scripts around them."""
    monkeypatch.setenv("DRY_RUN", value)
    steps.run(["touch", tmp_path / "a"])
    steps.make_file(tmp_path / "c", "echo c")
    source = f'source {ROOT}/scripts/common.sh; run touch "$1"'
    subprocess.run(["bash", "-c", source, "bash", tmp_path / "b"], check=True)
    assert [(tmp_path / name).exists() for name in "abc"] == [not is_shown] * 3


def test_files_are_whole_or_not_there(tmp_path):
    """Also on a full disk, where only one of two is written, and where any program of a pipe fails or was killed."""
    for command in ("seq 9 > /dev/full", "false | cat", r"printf '\xff' >&2; exit 1"):
        assert_refused(
            lambda _, c=command: steps.make_file(tmp_path / "a", c, "; get room"), part="a was not made: .*; get room$"
        )
    with pytest.raises(ZeroDivisionError), steps.atomic_write(tmp_path / "b", tmp_path / "c") as (b, c):
        b.write_text("half")
        c.mkdir()
        raise ZeroDivisionError
    with pytest.raises(UserError, match="d was not written: No space left on device; free disk space"):
        with steps.atomic_write(tmp_path / "d") as (d,):
            d.symlink_to("/dev/full")
            d.write_text("text")
    assert not any(tmp_path.iterdir())
    alive, killed = (tmp_path / f"a.{socket.gethostname()}-{process}.part" for process in (1, 1 << 30))
    for part in (alive, killed):
        part.touch()
    steps.make_file(tmp_path / "a", "false | echo one || true")
    steps.make_file(tmp_path / "a", "echo other")  # one that is there is kept
    assert (tmp_path / "a").read_text() == "one\n" and {*tmp_path.iterdir()} == {tmp_path / "a", alive}


@pytest.mark.parametrize("made, of, is_kept", [(2, 1, True), (1, 2, False), (None, 1, False)])
def test_what_is_older_than_its_text_is_made_anew(made, of, is_kept, tmp_path):
    for name, time_made in (("made", made), ("of", of)):
        if time_made:
            (tmp_path / name).touch()
            os.utime(tmp_path / name, (time_made, time_made))
    assert steps.is_newer(tmp_path / "made", [tmp_path / "of"]) == is_kept


def test_a_lock(tmp_path, capsys):
    """It is held by what has been started, too, and refuses others, or has them wait, when its caller was killed."""
    code = f"""if True:
        from pathlib import Path
        from recipes.steps import locked, started
        with locked(Path({str(tmp_path / ".lock")!r})), started(["sleep", "60"]) as process:
            print(process.pid, flush=True)
            process.wait()
    """
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        program = int(process.stdout.readline())
        process.kill()
    with pytest.raises(Busy, match="another process is at work there"), steps.locked(tmp_path / ".lock"):
        pass
    threading.Timer(1, os.kill, (program, signal.SIGKILL)).start()
    began = time.time()
    with steps.locked(tmp_path / ".lock", wait=True):
        assert time.time() - began > 0.9 and "waiting for it" in capsys.readouterr().out


def test_help(tmp_path):
    """Of every script, called from elsewhere by a symbolic link: all that there is, in two screens."""
    for name in "prepare train evaluate translate reproduce quickstart setup test".split():
        (tmp_path / name).symlink_to(ROOT / "scripts" / f"{name}.sh")
        done = run_script(tmp_path / name, "--help", cwd=tmp_path)
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert name in ("setup", "test") or f"scripts/{name}.sh" in done.stdout
        names = {"prepare": CORPORA, "reproduce": TABLES}.get(name, ())
        assert all(re.search(rf"\b{entry}\b", done.stdout) for entry in names)
        assert len(done.stdout.splitlines()) <= 100, name


def test_an_environment_that_was_copied_is_made_anew(tmp_path):
    """Its programs name the interpreter of the one that it was copied from."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("setup.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    for root, is_anew in ((tmp_path, False), (f"/elsewhere{tmp_path}", True), (f"{tmp_path}2", True)):
        (tmp_path / ".venv" / "installed").write_text(f"{root} another digest  -\n")
        done = run_script(tmp_path / "scripts" / "setup.sh", env={"DRY_RUN": "1"})
        assert done.returncode == 0 and ("-m venv --clear " in done.stdout) == is_anew, done.stdout + done.stderr


def test_the_environment_of_another_folder_is_not_emptied(tmp_path):
    for folder in ("mine", "other"):
        (tmp_path / folder).mkdir()
        shutil.copytree(ROOT / "scripts", tmp_path / folder / "scripts")
        for name in ("setup.py", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, tmp_path / folder)
    (tmp_path / "other" / ".venv").mkdir()
    (tmp_path / "other" / ".venv" / "installed").write_text(f"{tmp_path}/other another digest  -\n")
    (tmp_path / "mine" / ".venv").symlink_to(tmp_path / "other" / ".venv")

    done = run_script(tmp_path / "mine" / "scripts" / "setup.sh", env={"DRY_RUN": "1"})
    assert done.returncode == 1
    assert done.stderr.startswith("error: .venv is a link to the environment of another folder")


def test_errors_are_one_line(tmp_path):
    """A mistake of the user's, one of the system's, no environment, and a pipe that is closed early."""
    for folder in ("scripts", "recipes"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "yaml.py").write_text("raise ModuleNotFoundError(name='yaml')\n")
    (tmp_path / "scripts" / "setup.sh").write_text("#!/bin/bash\nexit 1\n")
    for folder, argv, message in (
        (ROOT, ["train.sh", tmp_path, "random", "--gpu", "1"], "--gpu 1: no option of train.sh; flags of fairseq"),
        (ROOT, ["prepare.sh", "numbers", "de", tmp_path / "yaml.py" / "x"], f"{tmp_path}/yaml.py/x"),
        (tmp_path, ["quickstart.sh"], "scripts/setup.sh failed"),
        (tmp_path, ["train.sh"], "yaml is not installed here; run scripts/setup.sh"),
    ):
        done = run_script(folder / "scripts" / argv[0], *argv[1:], env={"PYTHONPATH": str(folder)})
        assert done.returncode == 1 and done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1
    listing = "scripts/reproduce.sh table2 --seed \"$(seq -s ' ' 3000)\" --list | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", listing], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.count("\n") == 1


@pytest.mark.parametrize("call, sent, code", [
    ("run(['bash', '-c', 'sleep 600 & wait'])", signal.SIGTERM, 143),  # as a scheduler or `timeout` sends it
    ("run(['bash', '-c', 'sleep 600 & wait'], Path('/dev/null'), print)", signal.SIGINT, 130),
    ("make_file(Path('out'), 'sleep 600 | cat')", signal.SIGTERM, 143),
    ("run(['bash', '-c', 'sleep 3; true'])", signal.SIGHUP, 0),  # not under nohup
])  # fmt: skip
def test_what_a_recipe_has_started_ends_with_it(tmp_path, call, sent, code):
    """A signal to a recipe leaves no program behind, nor half a file."""
    program = (
        "import signal, sys; from pathlib import Path\n"
        "from recipes import steps, translate; from scripts import recipe\n"
        f"translate.main = lambda argv: steps.{call}\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which a shell's background job has not
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "sys.argv[1:] = ['translate']; recipe.main()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
    wait_for(lambda: children(process.pid) and children(children(process.pid)[0]))
    first = children(process.pid)[0]
    started = [first, *children(first)]
    time.sleep(1)  # until the recipe waits for it
    process.send_signal(sent)
    assert process.wait(timeout=60) == code
    wait_for(lambda: not any(map(is_alive, started)))
    assert not any(tmp_path.iterdir())
