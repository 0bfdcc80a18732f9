"""The programs of scripts/ beside the recipes' commands: their help, their permissions, and what they write."""

import os
import re
import subprocess

import pytest
import torch
from helpers import (
    ROOT,
    run_script,
    train_model,
)

from fairseq_synth.errors import SynthesizerError
from recipes import train
from recipes.steps import UserError

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]


def test_scripts_that_pages_call_without_python_can_be_executed():
    for page in PAGES:
        for before, name in re.findall(r"(python )?\bscripts/(\w+\.py)\b", page.read_text(encoding="utf-8")):
            file = ROOT / "scripts" / name
            if not before and name != "make_tables.py":  # which pages only name as a file
                assert os.access(file, os.X_OK) and file.read_text().startswith("#!/usr/bin/env python\n"), name


@pytest.mark.parametrize("argv", [["--help"], ["-h"], []])
def test_recipe_py_has_a_help(argv):
    done = run_script("recipe.py", *argv)
    assert done.returncode == 0 and "prepare|train|evaluate|translate|reproduce" in done.stdout, done.stderr


def test_recipe_py_names_the_commands_there_are():
    done = run_script("recipe.py", "trian")
    assert done.returncode == 1
    assert done.stderr == "error: trian: choose from prepare, train, evaluate, translate, reproduce\n"


def test_setup_says_that_it_is_done_and_what_is_next():
    done = run_script("setup.sh")
    assert done.returncode == 0 and done.stdout.startswith("done: "), done.stdout
    assert "next: scripts/quickstart.sh" in done.stdout


def test_the_quickstart_ends_with_the_next_command():
    done = run_script("quickstart.sh", env={"DRY_RUN": "1"})
    assert done.stdout.splitlines()[-1] == "next, for your own text: scripts/prepare.sh DIR SRC TGT data/mine"


def test_a_checkpoint_with_weights_that_are_not_numbers_is_named(data, tmp_path):
    import sys

    sys.path.insert(0, str(ROOT / "scripts"))
    import average_checkpoints

    train_model(data, tmp_path, "--max-update", "1", "--disable-validation", "--no-epoch-checkpoints")
    checkpoint = tmp_path / "checkpoint_last.pt"
    train.explain_missing_numbers(checkpoint)  # which has none
    state = torch.load(checkpoint, weights_only=False)
    state["model"]["decoder.layers.1.fc1.weight"][:] = float("nan")
    torch.save(state, checkpoint)
    message = r"checkpoint_last.pt: has weights that are not numbers \(NaN, first in decoder.layers.1.fc1.weight\)"
    with pytest.raises(UserError, match=message):
        train.explain_missing_numbers(checkpoint)
    with pytest.raises(SynthesizerError, match=message):
        average_checkpoints.average([checkpoint])


def test_no_line_about_packages_that_are_not_needed(tmp_path):
    done = subprocess.run(
        [ROOT / "scripts" / "average_checkpoints.py", "--inputs", tmp_path / "x.pt", "--output", tmp_path / "y.pt"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.startswith("fairseq_synth: error: --inputs"), done.stderr
