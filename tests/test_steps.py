"""Steps: commands, whole files, locks and settings; and the scripts as a user meets them."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import ROOT, children, is_alive, refused, script, wait_for

from recipes import steps
from recipes.catalog import CORPORA, TABLES
from recipes.steps import Busy, UserError

SCRIPTS = ("prepare", "train", "evaluate", "translate", "reproduce")

# ---- commands


def test_a_log_has_whole_lines(tmp_path, monkeypatch):
    """What a program prints and what it logs stand in the order of writing, and no line is inside another."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    program = "import sys\nfor i in range(9):\n print('D' * 3000)\n print('INFO', file=sys.stderr)"
    steps.run([sys.executable, "-c", program], tmp_path / "log")
    assert (tmp_path / "log").read_text() == ("D" * 3000 + "\nINFO\n") * 9


def test_a_log_is_followed(tmp_path):
    """Behind what an earlier call has left; each line comes while the program runs, and the last ones too."""
    (tmp_path / "log").write_text("earlier\n")
    seen = []

    def watch(line):
        seen.append((line, time.time()))

    steps.run(["bash", "-c", "echo one; sleep 1; echo two; echo three"], tmp_path / "log", watch)
    assert [line for line, _ in seen] == ["one\n", "two\n", "three\n"] and seen[1][1] - seen[0][1] > 0.5
    assert (tmp_path / "log").read_text() == "earlier\none\ntwo\nthree\n"


@pytest.mark.parametrize(
    "code, log, part",
    [
        ("echo 'error: text.en: line 2 is empty'; echo more; exit 1", True, "text.en: line 2 is empty; see .*log$"),
        ("printf 'no \\xff\\n'; exit 1", True, "bash failed: no"),  # no UTF-8
        ("exit 1", True, "it said nothing"),
        ("exit 1", False, "bash failed: see above"),
        ("kill -9 $$", True, "bash failed"),
    ],
)
def test_what_a_program_says(tmp_path, code, log, part):
    refused(lambda _: steps.run(["bash", "-c", code], tmp_path / "log" if log else None), part=part)


@pytest.mark.parametrize("value, is_shown", [("1", True), ("0", False), ("", False)])
def test_what_a_dry_run_is(value, is_shown, tmp_path, monkeypatch):
    """For the recipes and for the scripts around them."""
    monkeypatch.setenv("DRY_RUN", value)
    steps.run(["touch", tmp_path / "a"])
    steps.make(tmp_path / "c", "echo c")
    source = f'source {ROOT}/scripts/common.sh; run touch "$1"'
    subprocess.run(["bash", "-c", source, "bash", tmp_path / "b"], check=True)
    assert [(tmp_path / name).exists() for name in "abc"] == [not is_shown] * 3


@pytest.mark.parametrize("log", [None, "log"])
def test_a_program_ends_with_its_caller(tmp_path, log):
    """And so does what it has started in turn."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    code, begin = f"sleep 60 & echo $! > {tmp_path}/pid; wait", time.time()
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.5)
        with pytest.raises(KeyboardInterrupt):
            steps.run(["bash", "-c", code], log and tmp_path / log, log and (lambda line: None))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    wait_for(lambda: not is_alive(int((tmp_path / "pid").read_text())))
    assert time.time() - begin < 40


# ---- files and folders


def test_files_are_whole_or_not_there(tmp_path):
    """Also on a full disk, and where only one of two is written."""
    with pytest.raises(UserError, match=r"a was not made: .*No space left.*; get room$"):
        steps.make(tmp_path / "a", "seq 9 > /dev/full", "; get room")
    with pytest.raises(ZeroDivisionError), steps.whole(tmp_path / "b", tmp_path / "c") as (b, c):
        b.write_text("half")
        c.mkdir()
        raise ZeroDivisionError
    assert not any(tmp_path.iterdir())
    steps.make(tmp_path / "a", "false | echo one || true")
    steps.make(tmp_path / "a", "echo other")  # one that is there is kept
    assert (tmp_path / "a").read_text() == "one\n"
    with pytest.raises(UserError, match="d was not made"):  # any program of a pipe
        steps.make(tmp_path / "d", "false | cat")
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]


def test_what_is_newer_is_kept(tmp_path):
    for name, seconds in (("old", 100), ("new", 200)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (seconds, seconds))
    old, new = tmp_path / "old", tmp_path / "new"
    assert steps.is_made([new], [old], "") and not steps.is_made([old], [new], "")
    assert not steps.is_made([new, tmp_path / "none"], [old], "")


def test_a_lock_waits_or_is_refused(tmp_path, capsys):
    order = []

    def wait():
        with steps.locked(tmp_path / ".lock", wait=True):
            order.append("second")

    with steps.locked(tmp_path / ".lock"):
        with pytest.raises(Busy, match="another process is at work there"), steps.locked(tmp_path / ".lock"):
            pass
        thread = threading.Thread(target=wait)
        thread.start()
        wait_for(lambda: "waiting for it" in capsys.readouterr().out)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_lock_is_held_by_what_has_been_started(tmp_path):
    """A program goes on writing when the process that has started it is killed."""
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
    try:
        with pytest.raises(Busy), steps.locked(tmp_path / ".lock"):
            pass
    finally:
        os.kill(program, signal.SIGKILL)
    wait_for(lambda: not is_alive(program))
    with steps.locked(tmp_path / ".lock"):
        pass


def test_what_is_made_with_other_settings(tmp_path):
    """None, "" and False are three values. What is made is not mixed; before, the new settings count."""
    file = tmp_path / "settings.json"
    assert not steps.pin(file, {"a": 1, "b": ""}, False) and steps.pin(file, {"a": 2, "b": None}, False)
    for settings, told in (({"a": 3}, "a is 2, asked for 3"), ({"b": False}, "b is None, asked for False")):
        refused(lambda _, settings=settings: steps.pin(file, settings, True), part=rf"{tmp_path} .*\({told}\); ")
    assert steps.load(file) == {"a": 2, "b": None}
    assert not steps.pin(file, {"a": 2, "c": Path("x")}, True) and steps.load(file) == {"a": 2, "b": None, "c": "x"}


# ---- the scripts


def test_help(tmp_path):
    """Of every script, called from elsewhere by a symbolic link; in two screens."""
    for name in (*SCRIPTS, "quickstart", "setup", "test"):
        (tmp_path / name).symlink_to(ROOT / "scripts" / f"{name}.sh")
        done = subprocess.run([tmp_path / name, "--help"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert name not in SCRIPTS or f"scripts/{name}.sh" in done.stdout
        names = {"prepare": CORPORA, "reproduce": TABLES}.get(name, ())
        assert all(re.search(rf"\b{entry}\b", done.stdout) for entry in names)
        assert len(done.stdout.splitlines()) <= 100, name


def test_the_scripts_are_those_of_their_folder(tmp_path):
    """Not those of another copy of the project in the current folder."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").touch()
    (tmp_path / "recipes" / "__main__.py").write_text("print('the other copy')\n")
    for environment in ({}, {"PYTHONPATH": str(tmp_path)}):
        done = script("train.sh", "--help", cwd=tmp_path, env=environment)
        assert done.returncode == 0 and "scripts/train.sh DATA_DIR MODEL" in done.stdout, done.stderr


@pytest.mark.parametrize("name, said", [("quickstart", "scripts/setup.sh failed"), ("train", "run scripts/setup.sh")])
def test_without_an_environment(tmp_path, name, said):
    """One line, where it cannot be made, or where it is to be made first."""
    for folder in ("scripts", "recipes"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "scripts" / "setup.sh").write_text("#!/bin/bash\nexit 1\n")
    (tmp_path / "yaml.py").write_text("raise ModuleNotFoundError(name='yaml')\n")
    argv = [tmp_path / "scripts" / f"{name}.sh"]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert said in done.stderr


def test_an_environment_that_was_copied_is_made_anew(tmp_path):
    """Its programs name the interpreter of the one that it was copied from."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("setup.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    for root, is_anew in ((tmp_path, False), (f"/elsewhere{tmp_path}", True), (f"{tmp_path}2", True)):
        (tmp_path / ".venv" / "installed").write_text(f"{root} another digest  -\n")
        env = {**os.environ, "DRY_RUN": "1"}
        done = subprocess.run([tmp_path / "scripts" / "setup.sh"], capture_output=True, text=True, env=env)
        assert done.returncode == 0 and ("-m venv --clear " in done.stdout) == is_anew, done.stdout + done.stderr


def test_errors_are_one_line(tmp_path):
    """A mistake of the user's, one of the system's, and a pipe that is closed early."""
    (tmp_path / "file").touch()
    for argv, said in (
        (["train.sh", tmp_path / "no", "random"], f"error: {tmp_path}/no: no such folder\n"),
        (
            ["train.sh", tmp_path, "random", "--gpu", "1"],
            "error: --gpu 1: no option of train.sh; flags of fairseq-train stand after --",
        ),
        (["prepare.sh", "numbers", "de", tmp_path / "file" / "x"], f"error: {tmp_path}/file/x"),
    ):
        done = script(*argv)
        assert done.returncode == 1 and done.stderr.startswith(said) and done.stderr.count("\n") == 1, done.stderr
    listing = "scripts/reproduce.sh table2 --seed \"$(seq -s ' ' 3000)\" --list | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", listing], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.count("\n") == 1


@pytest.mark.parametrize("call", ["run(['bash', '-c', 'sleep 600 & wait'])", "make(Path('out'), 'sleep 600 | cat')"])
def test_what_a_recipe_has_started_ends_with_it(tmp_path, call):
    """SIGTERM to a recipe, as a scheduler or `timeout` sends it, leaves no program behind, nor half a file."""
    code = (
        "import sys; from pathlib import Path; from recipes import __main__, steps, translate\n"
        f"translate.main = lambda argv: steps.{call}\n"
        "sys.argv[1:] = ['translate']; __main__.main()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
    wait_for(lambda: children(process.pid) and children(children(process.pid)[0]))
    program = children(process.pid)[0]
    started = [program, *children(program)]
    time.sleep(1)  # until the recipe waits for it
    process.terminate()
    assert process.wait(timeout=60) == 143
    wait_for(lambda: not any(map(is_alive, started)))
    assert not any(tmp_path.iterdir())
