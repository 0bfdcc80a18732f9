"""The programs of scripts/ beside the recipes' commands: their help, their permissions, and what they write."""

import hashlib
import io
import os
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    ROOT,
    run_cli,
    run_programs_in_process,
    run_script,
    train_model,
)
from small_text import small_model_flags

from fairseq_synth.errors import SynthesizerError
from recipes import score, steps, train, translate
from recipes.steps import UserError

sys.path.insert(0, str(ROOT / "scripts"))
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/run.json"))
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


def test_setup_says_that_it_is_done_and_what_is_next(tmp_path):
    """The test uses a copy, because setup.sh would install everything here if the tests run in another environment."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    # setup.sh reads these files in this order to know what to install.
    contents = b""
    for name in ("setup.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
        contents += (ROOT / name).read_bytes()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    # setup.sh installs nothing if this file has the folder and the digest of those files. It takes the digest from
    # `cat ... | sha256sum`, which prints two blanks and a dash behind it.
    digest = hashlib.sha256(contents).hexdigest()
    (tmp_path / ".venv" / "installed").write_text(f"{tmp_path} {digest}  -\n")

    done = run_script(tmp_path / "scripts" / "setup.sh")
    assert done.returncode == 0 and done.stdout.startswith("done: "), done.stdout + done.stderr
    assert "next: scripts/quickstart.sh" in done.stdout


def test_test_sh_passes_its_arguments_to_pytest():
    done = run_script("test.sh", "-k", "padding", "tests/test_cli.py", env={"DRY_RUN": "1"})
    assert done.returncode == 0, done.stderr
    command = done.stdout.splitlines()[-1]
    assert command.startswith("+ python -m pytest ")
    assert command.rstrip().endswith(" -k padding tests/test_cli.py")


def test_the_quickstart_ends_with_the_next_command(tmp_path):
    """The scripts that it calls do nothing here."""
    (tmp_path / "scripts").mkdir()
    for name in ("quickstart.sh", "common.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    for name in ("setup", "prepare", "train", "evaluate", "translate"):
        (tmp_path / "scripts" / f"{name}.sh").write_text("#!/bin/sh\n")
        (tmp_path / "scripts" / f"{name}.sh").chmod(0o755)
    done = run_script(tmp_path / "scripts" / "quickstart.sh")
    assert done.stdout.splitlines()[-1] == "next, for your own text: scripts/prepare.sh DIR SRC TGT data/mine", (
        done.stderr
    )


def test_a_checkpoint_with_weights_that_are_not_numbers_is_named(data, tmp_path):
    import average_checkpoints

    train_model(data, tmp_path, "--max-update", "1", "--disable-validation", "--no-epoch-checkpoints")
    checkpoint = tmp_path / "checkpoint_last.pt"
    assert train.find_nan_weight(checkpoint) is None  # all of its weights are numbers
    with pytest.raises(UserError, match="^the command failed$"), train.explain_nan_weights(checkpoint):
        raise UserError("the command failed")
    done = run_script("average_checkpoints.py", "--inputs", checkpoint, "--output", tmp_path / "average.pt")
    assert done.returncode == 0 and done.stderr == ""  # and no line about packages that nobody needs
    state = torch.load(checkpoint, weights_only=False)
    state["model"]["decoder.layers.1.fc1.weight"][:] = float("nan")
    torch.save(state, checkpoint)
    message = r"checkpoint_last.pt: has weights that are not numbers \(NaN, first in decoder.layers.1.fc1.weight\)"
    with pytest.raises(UserError, match=message), train.explain_nan_weights(checkpoint):
        raise UserError("the command failed")
    with pytest.raises(SynthesizerError, match=message):
        average_checkpoints.average([checkpoint])


LOG = """\
2026 | train_inner | epoch 001: 100 / 546 loss=11.1, ppl=99, ups=2, wpb=900, num_updates=100, wall=36
2026 | valid | epoch 001 | valid on 'valid' subset | loss 7.8 | nll_loss 7 | ppl 136.82 | bleu 3.5 | num_updates 100
2026 | train_inner | epoch 001: 200 / 546 loss=8.9, ppl=50, ups=2, wpb=800, num_updates=200, wall=69
2026 | valid | epoch 001 | valid on 'valid' subset | loss 6.3 | nll_loss 5 | ppl 42.04 | bleu 9 | num_updates 200
"""


def test_curves_are_those_of_the_log_and_the_scores(tmp_path):
    import plot

    steps.write(tmp_path / "one" / "train.log", LOG)
    curves = plot.read_curves(tmp_path / "one")
    assert curves.training_loss == ([100, 200], [11.1, 8.9]) and curves.validation_loss == ([100, 200], [7.8, 6.3])
    assert curves.perplexity.values == [136.82, 42.04] and curves.validation_score.values == [3.5, 9]
    assert curves.test_score is None
    figures = {"bleu": {"score": 12.5, "name": "BLEU"}, "chrf": {"score": 40, "name": "chrF"}}
    steps.dump(tmp_path / "one" / "evaluation" / "scores.json", {"figures": figures})
    assert plot.read_curves(tmp_path / "one").test_score == ("BLEU", 12.5)


def test_curves_are_drawn_of_runs_with_and_without_scores(tmp_path):
    for name in ("one", "two"):
        steps.write(tmp_path / name / "train.log", LOG.replace("bleu", "other"))
    steps.dump(tmp_path / "one" / "evaluation" / "scores.json", {"figures": {"ppl": {"score": 12.5, "name": "PPL"}}})
    done = run_script("plot.py", tmp_path / "one", tmp_path / "two")
    assert done.stdout == f"wrote {tmp_path}/one/curves.png\n", done.stderr
    assert (tmp_path / "one" / "curves.png").read_bytes().startswith(b"\x89PNG")
    for folder, part in ((tmp_path, "has no train.log; name a run of train.sh"), (tmp_path / "two", "no losses yet")):
        steps.write(tmp_path / "two" / "train.log", "nothing")
        done = run_script("plot.py", folder)
        assert done.returncode == 1 and part in done.stderr and "\n" not in done.stderr.strip()


@pytest.fixture(scope="session")
def example(make_once, prepared_corpus):
    """Returns a folder with a small run in `run`, and with what make_example.py has made of it in `example`."""

    def make(folder):
        """Trains a model for 4 updates with a checkpoint after every 2, and averages both checkpoints."""
        import make_example

        run = folder / "run"
        options_of_train_sh = ["--save-dir", str(run), "--max-update", "4", "--save-every", "2"]
        flags_of_fairseq_train = {
            **small_model_flags("encoder", "decoder"),
            "warmup-updates": "2",
            "validate-after-updates": "0",
            "validate-interval-updates": "2",
        }
        argv = [str(prepared_corpus("wmt")), "random_vanilla", *options_of_train_sh]
        argv += ["--", *steps.as_arguments(flags_of_fairseq_train)]
        # The programs that train.sh and evaluate.sh call are run in this process, which is faster.
        with run_programs_in_process(), pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")  # one thread is enough for so small a model
            train.main(argv)
            score.main([str(run), "--average", "2"])
        run_cli(make_example.main, run, folder / "example")

    return make_once("example", make)


def translate_by(run, text, monkeypatch, capsys):
    """Returns what translate.sh prints for a text."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    translate.main([str(run), "--beam", "1", "--", "--max-len-b", "9"])
    return capsys.readouterr().out


def test_an_example_translates_as_its_run_and_names_no_folder(example, programs_in_process, monkeypatch, capsys):
    """The example is smaller than its run: it has weights in half precision and a short card, and no other files."""
    run = example / "run"
    example_folder = example / "example"
    files = [path for path in example_folder.rglob("*") if path.is_file()]

    # It translates a line as its run does.
    text = "a dog\n"
    translation = translate_by(example_folder, text, monkeypatch, capsys)
    assert translation == translate_by(run, text, monkeypatch, capsys)
    assert translation.count("\n") == 1

    # Its weights are in half precision, and its checkpoint has little else.
    checkpoint = example_folder / "checkpoint_best.pt"
    weights = torch.load(checkpoint, weights_only=False)["model"]
    for name, weight in weights.items():
        assert weight.dtype != torch.float32, name
    average = run / "evaluation" / "checkpoint_avg.pt"
    assert checkpoint.stat().st_size < average.stat().st_size / 2

    # None of its files names a folder of the machine that has made it.
    for path in files:
        assert str(example).encode() not in path.read_bytes(), path

    # Its card says how good it is and how it was trained.
    card = (example_folder / "README.md").read_text()
    assert "- BLEU: " in card
    assert "scripts/train.sh DATA_DIR" in card
    assert len(card.splitlines()) < 25

    # It has only the files that translating needs.
    expected_names = {"README.md", "run.json", "settings.json", "done", "codes", "checkpoint_best.pt"}
    expected_names |= {path.name for path in (example_folder / "prepared" / "bin").glob("dict.*.txt")}
    names = {path.name for path in files}
    assert names <= expected_names


def test_an_example_is_a_model_for_python(example):
    from fairseq_synth.transformer import SynthesizerTransformer

    folder = example / "example"
    codes = folder / "prepared" / "codes"
    model = SynthesizerTransformer.from_pretrained(
        str(folder), "checkpoint_best.pt", "./prepared/bin", tokenizer="moses", bpe="subword_nmt", bpe_codes=str(codes)
    )
    assert isinstance(model.translate("a dog", beam=1, max_len_b=9), str)


@pytest.mark.parametrize("folder", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_the_examples_translate(folder, monkeypatch, capsys):
    assert len(translate_by(folder, "a man plays the guitar .\n", monkeypatch, capsys).split()) > 2


@pytest.mark.parametrize(
    "keyword, arguments, num_workers",
    [
        ("test_help", ["tests"], 0),
        ("", ["tests/test_cli.py::test_average", "tests/test_cli.py::test_hydra"], 0),
        ("help", ["tests"], None),  # xdist's own number
        ("test_train", ["tests"], None),  # the name of a file
        ("", ["tests/test_cli.py", "tests/test_cli.py::test_hydra"], None),
        ("", [], None),
    ],
)
def test_single_tests_run_without_workers(keyword, arguments, num_workers, request):
    config = SimpleNamespace(option=SimpleNamespace(keyword=keyword), args=arguments)
    assert find_conftest(request).pytest_xdist_auto_num_workers(config) == num_workers


LEAVE_OUT = True  # the result of the hook pytest_ignore_collect for a file that is not read
LET_PYTEST_DECIDE = None  # its result for a file that is read, as it would be without this hook


@pytest.mark.parametrize(
    "keyword, result",
    [
        ("test_average", LEAVE_OUT),  # does not occur in the file
        ("test_boat", LET_PYTEST_DECIDE),  # occurs in the file
        ("test_BOAT", LET_PYTEST_DECIDE),  # occurs in the file, as -k takes capitals for small letters
        ("average", LET_PYTEST_DECIDE),  # may be part of a parameter, which does not occur in the file
        ("test_train", LET_PYTEST_DECIDE),  # may be the name of a file: there is tests/test_train.py
        ("", LET_PYTEST_DECIDE),  # all tests are asked for
    ],
)
def test_files_without_the_name_of_the_test_are_left_out(keyword, result, tmp_path, request):
    """With `pytest -k test_NAME`, a file is not imported if the name is not in it. A folder is never left out."""
    file = tmp_path / "test_ships.py"
    file.write_text("def test_boat(): pass")
    config = SimpleNamespace(option=SimpleNamespace(keyword=keyword))
    assert find_conftest(request).pytest_ignore_collect(file, config) is result
    assert find_conftest(request).pytest_ignore_collect(tmp_path, config) is None


def find_conftest(request):
    """Returns the module tests/conftest.py, which pytest has loaded."""
    (conftest,) = [plugin for plugin in request.config.pluginmanager.get_plugins() if hasattr(plugin, "describe_run")]
    return conftest
