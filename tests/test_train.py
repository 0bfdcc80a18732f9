"""train.sh calls fairseq-train with the right flags; a run goes on or is refused, and is recorded in its folder."""

import functools
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers import ROOT, assert_refused, flag_value, run_script

from recipes import provenance, steps, train
from recipes.catalog import RECIPES, TASKS

pytestmark = pytest.mark.usefixtures("recipes_environment")


# For each task with two sides of text: the names of the source and the target.
SIDES = {
    "translation": ("en", "de"),
    "text_to_text": ("source", "target"),
    "denoising": ("source", "target"),
}


def make_data(folder, task="translation", **facts):
    """Makes the files of prepared data that a training reads before fairseq-train starts, and returns the folder.

    Args:
        folder: the folder of the data.
        task: the task that they are prepared for.
        facts: other entries of settings.json, such as longest=100 for the longest sentence.
    """
    source_side, target_side = SIDES.get(task, ("en", "de"))
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    for side in (source_side, target_side):
        (folder / "bin" / f"dict.{side}.txt").write_text("eins 1\n")
    steps.dump(folder / "settings.json", {"task": task, "src": source_side, "tgt": target_side, **facts})
    (folder / "bin" / "done").touch()
    return folder


# ---- the command


@pytest.fixture
def show_command(tmp_path, dry_run, capsys):
    """Provides a function that returns what train.sh prints with DRY_RUN=1 for prepared data and other arguments."""

    def show_command(argv, **facts):
        """Returns what is printed for the arguments `argv`, a string, and data with these entries of settings.json."""
        data = make_data(tmp_path / "data", **facts)
        train.main([str(data), *argv.split()])
        return capsys.readouterr().out

    return show_command


@pytest.mark.parametrize("nodes, gpus", [(1, 1), (1, 3), (1, 8), (16, 8), (5, 3)])
def test_the_batch_does_not_depend_on_the_number_of_gpus(nodes, gpus, show_command):
    line = show_command(f"random_vanilla --recipe wmt_en_de --gpus {gpus} --nodes {nodes} --rendezvous first:29500")
    world_size = int(flag_value(line, "--distributed-world-size"))
    max_tokens = int(flag_value(line, "--max-tokens"))
    update_freq = int(flag_value(line, "--update-freq"))
    assert world_size == nodes * gpus
    batch_tokens = world_size * max_tokens * update_freq
    lost_by_rounding = 32768 - batch_tokens
    assert 0 <= lost_by_rounding < world_size * update_freq
    assert max_tokens <= 4096


@pytest.mark.parametrize("nodes, gpus", [(1, 1), (1, 3), (1, 8), (16, 8), (5, 3)])
def test_each_gpu_has_a_process_of_its_own(nodes, gpus, show_command):
    line = show_command(f"random_vanilla --recipe wmt_en_de --gpus {gpus} --nodes {nodes} --rendezvous first:29500")
    has_several_processes = nodes * gpus > 1
    assert ("torchrun" in line) == has_several_processes
    assert ("--heartbeat-timeout 600" in line) == has_several_processes
    if has_several_processes:
        assert flag_value(line, "--nproc-per-node") == str(gpus)
    rendezvous = (
        f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint first:29500 --rdzv-id data-random_vanilla-seed1 "
    )
    assert (rendezvous in line) == (nodes > 1)


@pytest.fixture
def facts(task):
    """Returns the entries of settings.json that describe data of the task of a test."""
    if task == "sentence_prediction":
        return {"task": task, "classes": 6}
    return {"task": task}


@pytest.mark.parametrize("task", TASKS)
def test_without_a_recipe_the_small_one_of_the_task_of_the_data_is_taken(task, facts, show_command):
    recipe = RECIPES[TASKS[task].recipe]
    line = show_command("random --gpus 0 --seed 3", **facts)
    assert flag_value(line, "--arch") == f"{recipe.kind}_synth_random_{recipe.preset}"
    assert flag_value(line, "--max-update") == str(recipe.max_update)
    kept_checkpoints = "10" if recipe.average else "1"
    assert flag_value(line, "--keep-interval-updates") == kept_checkpoints
    assert f"--save-dir {ROOT}/runs/data-random-seed3 " in line
    assert " --cpu " in line
    assert "fp16" not in line


@pytest.mark.parametrize("task", TASKS)
def test_fairseq_gets_the_task_the_sides_and_the_classes_of_the_data(task, facts, show_command):
    line = show_command("random --gpus 0", **facts)
    fairseq_task = flag_value(line, "--task") if "--task" in line else "translation"
    assert fairseq_task == RECIPES[TASKS[task].recipe].task
    if task in SIDES:
        source_side, target_side = SIDES[task]
        assert f"--source-lang {source_side} --target-lang {target_side}" in line
    assert ("--num-classes 6 " in line) == (task == "sentence_prediction")


@pytest.mark.parametrize("task", TASKS)
def test_values_of_the_recipe_can_be_changed(task, facts, show_command):
    line = show_command("random --gpus 0 --save-every 7 --seed 3 -- --lr 9", **facts)
    assert flag_value(line, "--lr") == "9"
    assert flag_value(line, "--save-interval-updates") == "7"
    assert flag_value(line, "--seed") == "3"


@pytest.mark.parametrize("max_update, is_warned_of", [
    ("9", True),
    ("0", False),  # this training has no limit
    ("x", False),  # fairseq refuses this value
])  # fmt: skip
@pytest.mark.parametrize("task", TASKS)
def test_a_training_that_ends_during_its_warm_up_is_warned_of(task, facts, max_update, is_warned_of, show_command):
    output = show_command(f"random --gpus 0 -- --max-update {max_update}", **facts)
    assert ("during its warm-up" in output) == is_warned_of


@pytest.mark.parametrize("argv, longest, length", [
    ("random", 115, "120"),  # lengths are in steps of 8, which suits GPUs
    ("random", 2000, "1024"),  # fairseq leaves out longer sentences
])  # fmt: skip
def test_the_length_follows_the_longest_sentence(argv, longest, length, show_command):
    output = show_command(argv, longest=longest)
    command = output.split("\n+")[-1]
    assert re.findall(r"--synth-max-length (\d+)", command) == [length]
    assert "is set to fit the longest sentence" in output


@pytest.mark.parametrize("argv, longest", [
    ("random", 100),  # the length is never less than the architecture takes
    ("transformer", 115),
    ("relative_random_vanilla", 115),  # this model takes any length
    ("random -- --synth-max-length=24", 115),
    ("random -- --synth-beyond-length tile", 115),
])  # fmt: skip
def test_the_length_stays_where_the_longest_sentence_needs_no_other(argv, longest, show_command):
    output = show_command(argv, longest=longest)
    command = output.split("\n+")[-1]
    assert re.findall(r"--synth-max-length (\d+)", command) == []
    assert "is set to fit the longest sentence" not in output


@pytest.mark.parametrize("capability, best_precision", [((8, 0), "bf16"), ((7, 5), "fp16")])
def test_the_precision_is_the_best_that_the_gpu_has(capability, best_precision, show_command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert f" --{best_precision} " in show_command("random --recipe wmt_en_de")
    assert "bf16" not in show_command("random --recipe wmt_en_de --precision fp16")


@pytest.mark.parametrize("argv, part", [
    ("{tmp} random", "contains no complete data of prepare.sh"),
    ("{data}/bin random", "bin: give .*data$"),
    ("{data} randm", "randm: the recipe multi30k_cpu has no such model; see scripts/train.sh --help"),
    ("{data} roberta_agnews --recipe agnews", "prepared for translation, .* agnews is for sentence_prediction"),
    ("{data} random --recipe wmt_en_de", "--gpus: one wanted, 0 here; --gpus 0"),
    ("{data} random --threads 0", "--threads: 0: must be an integer, at least 1"),
    ("{data} random --gpus 1 --nodes 2", "--nodes 2: .*--rendezvous HOST:PORT"),
    ("{data} random --recipe wmt_en_de --gpus 8 --batch-tokens 1000", "--batch-tokens 1000.* 125 .*raise these flags"),
    ("{data} random --recipe wmt_en_de --gpus 1 --max-tokens 9", "--max-tokens 9: .*may have 256; raise these flags"),
])  # fmt: skip
def test_wrong_arguments_are_refused(argv, part, tmp_path, dry_run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    data = make_data(tmp_path / "data")
    assert_refused(train.main, *argv.format(data=data, tmp=tmp_path).split(), part=part)


@pytest.mark.parametrize("name, character", [("run-18:30", "a colon"), ("${x}", "a variable")])
def test_a_folder_whose_name_fairseq_misreads_is_refused_before_the_training(name, character, tmp_path, dry_run):
    data = make_data(tmp_path / "data")
    misread_data = make_data(tmp_path / name / "data")
    message = [re.escape(name), f"{character}.*rename the folder"]
    assert_refused(train.main, data, "random", "--save-dir", tmp_path / name, "--gpus", "0", part=message)
    assert_refused(train.main, misread_data, "random", "--save-dir", "x", "--gpus", "0", part=message)


def test_a_folder_whose_name_begins_with_a_dash_is_named_by_its_whole_path(tmp_path, dry_run, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_data(tmp_path / "-data")
    train.main(["./-data", "random", "--gpus", "0", "--save-dir=-run"])
    line = capsys.readouterr().out
    assert f"fairseq-train {tmp_path}/-data/bin " in line
    assert flag_value(line, "--save-dir") == f"{tmp_path}/-run"


def make_data_with_long_test_sentence(folder, side, num_tokens):
    """Makes data with a test set of three lines, the second of which has `num_tokens` tokens on one side."""
    data = make_data(folder)
    for language in ("en", "de"):
        steps.write(data / "sub" / f"test.{language}", "a\na\nb\n")
    long_line = "a " * (num_tokens - 1)  # the end of the sentence is a token too
    steps.write(data / "sub" / f"test.{side}", f"a\n{long_line}\nb\n")


@pytest.mark.parametrize("argv, num_tokens, advice", [
    ("transformer", 1025, "--max-source-positions 1032 --max-target-positions 1032"),
    ("random", 1030, "--max-source-positions 1032 --max-target-positions 1032 --synth-max-length 1032"),
    ("random -- --synth-max-length 200", 201, "--synth-max-length 208"),
])  # fmt: skip
@pytest.mark.parametrize("side", ["en", "de"])
def test_a_test_sentence_that_will_be_refused_is_warned_of_before_the_training(
    argv, num_tokens, advice, side, show_command, tmp_path
):
    make_data_with_long_test_sentence(tmp_path / "data", side, num_tokens)
    output = show_command(argv, longest=num_tokens)
    assert f"test.{side}: line 2 of the test set has {num_tokens} tokens" in output
    assert f"evaluate.sh will refuse this test set;\n  add -- {advice}, or shorten" in output


@pytest.mark.parametrize("argv, num_tokens", [
    ("transformer", 1024),
    ("transformer -- --max-source-positions 1030 --max-target-positions=1030", 1030),
    ("random", 900),  # the length of this model follows the text
    ("random -- --synth-max-length 200 --synth-beyond-length tile", 201),
])  # fmt: skip
@pytest.mark.parametrize("side", ["en", "de"])
def test_a_long_test_sentence_that_can_be_read_is_not_warned_of(argv, num_tokens, side, show_command, tmp_path):
    make_data_with_long_test_sentence(tmp_path / "data", side, num_tokens)
    output = show_command(argv, longest=num_tokens)
    assert f"test.{side}: line 2 of the test set has {num_tokens} tokens" not in output


def write_program(path, code):
    """Writes a shell script that can be run."""
    path.write_text(f"#!/bin/bash\n{code}\n")
    path.chmod(0o755)


def test_slurm_calls_train_on_each_node_with_the_size_of_the_job(tmp_path):
    """The first node is the rendezvous. Flags of fairseq-train stay behind --."""
    write_program(tmp_path / "scontrol", "printf 'gpu7\\ngpu8\\n'")
    write_program(tmp_path / "srun", 'shift; exec "$@"')
    env = {
        "DRY_RUN": "1",
        "SLURM_JOB_NODELIST": "gpu[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "40007",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    argv = [make_data(tmp_path / "data"), "transformer", "--recipe", "wmt_en_de", "--gpus", "8", "--", "--lr", "1"]
    process = run_script("train.slurm", *argv, env=env, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    assert "--nnodes 2" in process.stdout
    assert "--rdzv-endpoint gpu7:20007" in process.stdout
    assert flag_value(process.stdout, "--distributed-world-size") == "16"
    assert flag_value(process.stdout, "--lr") == "1"

    process_in_another_folder = run_script("train.slurm", *argv, env=env, cwd=tmp_path)
    assert process_in_another_folder.returncode != 0
    assert "submit from the project's folder" in process_in_another_folder.stderr


# ---- runs


@pytest.mark.parametrize("line, expected", [
    ("train_inner | epoch 2: loss=3, ppl=8.5, wps=1.35e+06, ups=4, wpb=300000, num_updates=200, wall=0",
     "update 200 of 500: training perplexity 8.5, 0:01:06 left"),
    ("train_inner | epoch 2: loss=3.1, accuracy=8, wps=9, wpb=9, num_updates=600, wall=30",
     "update 600 of 500: training loss 3.1, 0:00:00 left"),
    ("train_inner | epoch 1: loss=3, ppl=8.5, wps=0, wpb=9, num_updates=200",
     "update 200 of 500: training perplexity 8.5"),
    ("valid | epoch 2 | valid on 'valid' | loss 3 | ppl 7.5 | num_updates 200",
     "update 200 of 500: validation perplexity 7.5"),
])  # fmt: skip
def test_progress_is_shown_for_each_line_of_the_log_with_losses(line, expected, capsys):
    train.show_progress(500, f"2026-01-01 | INFO | {line}\n")
    train.show_progress(500, "another kind of line with num_updates=200\n")
    train.show_progress(500, f"half a | {line}")
    train.show_progress(500, 'a | train_inner | {"loss": "3"}\n')
    assert capsys.readouterr().out == f"  {expected}\n"


class StartedRun(NamedTuple):
    """A training that has been started and has written a checkpoint."""

    data: Path
    save_dir: Path
    call_again: Callable[..., None]


@pytest.fixture
def started_run(tmp_path, monkeypatch):
    """Returns a training that has been started, without fairseq-train, and has written a checkpoint.

    ``call_again(*argv, model=, save_dir=, data=)`` calls train.sh once more, by default with the same arguments.
    """
    default_data = make_data(tmp_path / "data")
    default_save_dir = tmp_path / "save"

    def pretend_to_train(argv, log, watch):
        """Replaces the call of fairseq-train: shows one line of its log."""
        watch("a | train_inner | loss=3, wps=0, wpb=9, num_updates=2\n")

    monkeypatch.setattr(train, "run_command", pretend_to_train)

    def call(*argv, model="transformer", save_dir=default_save_dir, data=default_data):
        """Calls train.sh on the CPU with these arguments."""
        flags = ["--recipe", "multi30k_cpu", "--save-dir", save_dir, "--gpus", "0", *argv]
        train.main([str(data), model, *map(str, flags)])

    call()
    (default_save_dir / "checkpoint_last.pt").touch()
    return StartedRun(default_data, default_save_dir, call_again=call)


@pytest.fixture
def change_recipe(monkeypatch):
    """Provides a function that changes flags of the recipe multi30k_cpu, as an edit of catalog.py would."""
    recipe = RECIPES["multi30k_cpu"]

    def change_recipe(**flags):
        """Adds these flags to the recipe, or replaces their values."""
        monkeypatch.setitem(RECIPES, "multi30k_cpu", replace(recipe, flags={**recipe.flags, **flags}))

    return change_recipe


def test_two_processes_cannot_train_the_same_run(started_run):
    with steps.locked(started_run.save_dir / ".lock"):
        assert_refused(
            lambda _: started_run.call_again(),
            part=f"{started_run.save_dir}: another process is at work there; let it end",
        )


def test_a_run_goes_on_with_another_length_or_on_another_machine(started_run):
    started_run.call_again("--recipe", "news_cpu")  # this recipe differs only in its length
    started_run.call_again("--max-update", "9000", "--save-every", "9")  # the learning rate does not depend on them
    started_run.call_again("--threads", "2", "--timeout", "9", "--max-tokens", "512")
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert os.environ["MALLOC_MMAP_MAX_"] == "0"  # memory is kept between updates, which need not fill it anew


def test_a_run_does_not_go_on_with_other_settings_that_change_its_results(started_run, change_recipe):
    def assert_call_is_refused(*argv, part, model="transformer"):
        """Checks that a call with these arguments is refused by an error that matches `part`."""
        assert_refused(lambda _: started_run.call_again(*argv, model=model), part=part)

    other_settings = f"{started_run.save_dir} was made with other settings .seed is 1, asked for 7"
    assert_call_is_refused("--seed", "7", part=other_settings)
    assert_call_is_refused("--precision", "bf16", part="precision is fp32, asked for bf16")
    assert_call_is_refused("--batch-tokens", "2048", part="batch_tokens is 1024, asked for 2048")
    assert_call_is_refused("--", "--lr", "1", part=r"flags is \[\], asked for \['--lr', '1'\]")
    assert_call_is_refused("--gpus", "99", part=r"--gpus: 99 wanted, \d here; --gpus 0 trains on the CPU")
    assert_call_is_refused(model="random", part="arch is transformer_multi30k, asked for transformer_synth_random")
    change_recipe(lr="1")
    assert_call_is_refused(part="recipe_flags is .*3e-3.*, asked for .*'lr': '1'")


@pytest.mark.parametrize("name, old, new", [("settings.json", '"en"', '"fr"'), ("bin/dict.de.txt", "eins", "zwei")])
def test_a_run_does_not_go_on_with_data_that_have_been_made_anew_in_the_same_folder(name, old, new, started_run):
    file = started_run.data / name
    file.write_text(file.read_text().replace(old, new))
    assert_refused(lambda _: started_run.call_again(), part="data_digest is")
    message = (
        f"{started_run.save_dir}: its data, {started_run.data}, have changed or moved since the training; .*run.json"
    )
    assert_refused(lambda _: train.read_run(started_run.save_dir), part=message)


def test_a_folder_that_is_no_run_is_refused(started_run):
    assert_refused(
        lambda _: train.read_run(started_run.data), part=f"{started_run.data}: is a folder of data; name a run"
    )
    assert_refused(lambda _: train.read_run(started_run.save_dir.parent), part="no run of train.sh")


def test_before_its_first_checkpoint_a_run_can_be_started_with_other_data(started_run):
    (started_run.save_dir / "checkpoint_last.pt").unlink()
    (started_run.data / "bin" / "dict.de.txt").write_text("zwei 1\n")
    started_run.call_again()
    assert train.read_run(started_run.save_dir).data == started_run.data


def test_a_run_whose_learning_rate_depends_on_its_length_keeps_its_length(started_run, change_recipe):
    checkpoint = started_run.save_dir / "checkpoint_last.pt"
    checkpoint.unlink()
    change_recipe(**{"lr-scheduler": "cosine"})
    started_run.call_again()
    checkpoint.touch()

    def assert_call_is_refused(*argv, part):
        """Checks that a call with these arguments is refused by an error that matches `part`."""
        assert_refused(lambda _: started_run.call_again(*argv), part=part)

    assert_call_is_refused("--max-update", "9000", part="schedule is 7000, asked for 9000")
    # the following two schedules do not end at --max-update
    assert_call_is_refused("--", "--lr-scheduler=inverse_sqrt", part=r"schedule is 7000, asked for \)")
    assert_call_is_refused("--", "--lr-period-updates=3", part=r"schedule is 7000, asked for \)")


@pytest.fixture
def results(started_run):
    """Writes the log and the scores of a run, and returns their paths."""
    save_dir = started_run.save_dir
    paths = [
        save_dir / "train.log",
        save_dir / "evaluation" / "scores.json",
        save_dir / "tests" / "other" / "scores.json",
    ]
    for path in paths:
        steps.write(path, "{}")
    return paths


def set_hardware(save_dir, hardware):
    """Changes the record of a run, as if it had been started once, on this hardware."""
    settings = steps.load(save_dir / "run.json")
    settings["starts"] = [{"hardware": hardware}]
    steps.dump(save_dir / "run.json", settings)


def test_a_run_that_goes_on_keeps_its_results_and_records_each_machine_once(started_run, results):
    set_hardware(started_run.save_dir, "another")
    started_run.call_again()
    started_run.call_again()
    assert all(path.exists() for path in results)
    assert len(steps.load(started_run.save_dir / "run.json")["starts"]) == 2


def test_a_run_with_any_checkpoint_is_not_started_anew(started_run):
    save_dir = started_run.save_dir
    (save_dir / "checkpoint_last.pt").rename(save_dir / "checkpoint_2_20.pt")
    assert_refused(lambda _: started_run.call_again("--seed", "7"), part="seed is 1, asked for 7")
    (save_dir / "run.json").unlink()
    assert_refused(
        lambda _: started_run.call_again(),
        part=f"{save_dir} was made with other settings .no run.json.; give another folder",
    )


def test_a_run_that_is_started_anew_keeps_nothing_of_the_earlier_one(started_run, results, capsys):
    set_hardware(started_run.save_dir, "another")
    (started_run.save_dir / "checkpoint_last.pt").unlink()
    started_run.call_again("--seed", "7", "--precision", "bf16", "--", "--max-update=40")
    output = capsys.readouterr().out
    assert re.search("training for 40 updates (.|\n)*update 2 of 40: training loss 3\n", output)
    assert not any(path.exists() for path in results)
    (start,) = steps.load(started_run.save_dir / "run.json")["starts"]
    assert start["hardware"].endswith("1 thread(s)")
    assert start["precision"] == "bf16"


def test_a_training_ends_with_the_next_command(started_run, capsys):
    capsys.readouterr()
    started_run.call_again()
    output = capsys.readouterr().out
    assert output.endswith(f"\n\nnext: scripts/evaluate.sh {started_run.save_dir}\n")
    assert "is trained already" not in output


def test_a_finished_training_that_is_called_again_says_so(started_run, capsys, monkeypatch):
    def end_at_once(argv, log, watch):
        """Replaces the call of fairseq-train: shows the line with which a finished training ends."""
        watch("| INFO | done training in 0.0 seconds\n")

    monkeypatch.setattr(train, "run_command", end_at_once)
    capsys.readouterr()
    started_run.call_again()
    expected = f"{started_run.save_dir} is trained already; there was nothing left to do"
    assert expected in capsys.readouterr().out


@pytest.fixture(scope="module")
def help_text():
    """Returns what train.sh --help prints."""
    return train.make_parser().format_help()


def test_the_help_has_a_line_for_each_recipe(help_text):
    for recipe in RECIPES.values():
        assert recipe.about, recipe.name
        assert re.search(rf"^  {recipe.name} +{re.escape(recipe.about)}$", help_text, re.M), recipe.name


def test_the_help_names_the_default_recipe_of_each_task(help_text):
    for task in TASKS.values():
        assert re.search(rf"^  [a-z ]+  {task.recipe} \(the default", help_text, re.M), task.recipe


def test_the_help_lists_models_by_where_they_are_from(help_text):
    models = help_text.split("All recipes")[0]
    of_the_paper, of_this_project, of_others = re.split("models that are not in the paper:|baselines:", models)
    assert "dense_vanilla" in of_the_paper
    assert "relative_random" in of_this_project
    assert "lightconv" in of_others
    assert "linformer" in of_others


def test_the_help_has_an_example_and_fits_the_width_of_120_columns(help_text):
    assert "-- --dropout 0.3 --tensorboard-logdir tb" in help_text
    assert max(len(line) for line in help_text.splitlines()) <= 120


# ---- two stages


@pytest.fixture
def first_stage(started_run, tmp_path):
    """Returns the folder of a run of a smaller model, with a checkpoint, from which a second stage starts."""
    folder = tmp_path / "first"
    flags = ["--encoder-layers", "1", "--synth-max-length=112", "--lr", "3"]
    started_run.call_again("--", *flags, model="random", save_dir=folder)
    steps.write(folder / "checkpoint_best.pt", "")
    return folder


def read_flags(save_dir):
    """Returns the flags of fairseq-train that are recorded of a run."""
    return steps.load(save_dir / "run.json")["flags"]


def test_a_second_stage_has_the_sizes_of_the_first_whatever_its_own_data(started_run, first_stage, tmp_path):
    expected = ["--encoder-layers", "1", "--synth-max-length", "112"]
    started_run.call_again("--init", first_stage, model="random", save_dir=tmp_path / "second")
    assert read_flags(tmp_path / "second") == expected
    longer_text = make_data(tmp_path / "long", longest=500)
    started_run.call_again("--init", first_stage, model="random", save_dir=tmp_path / "third", data=longer_text)
    assert read_flags(tmp_path / "third") == expected


def test_a_second_stage_goes_on_although_the_first_has_been_evaluated_since(started_run, first_stage, tmp_path):
    second_stage = tmp_path / "second"
    started_run.call_again("--init", first_stage, model="random", save_dir=second_stage)
    steps.write(second_stage / "checkpoint_last.pt", "")
    steps.write(first_stage / "evaluation" / "checkpoint_avg.pt", "")
    started_run.call_again("--init", first_stage, model="random", save_dir=second_stage)
    # but it does not go on without its first stage
    assert_refused(lambda _: started_run.call_again(model="random", save_dir=second_stage), part="flags is|init is")


def test_a_first_stage_of_another_model_or_with_other_words_or_without_a_checkpoint_is_refused(
    started_run, first_stage, tmp_path
):
    def assert_call_is_refused(part, **kwargs):
        """Checks that a second stage, called with `kwargs`, is refused by an error that matches `part`."""
        call = functools.partial(started_run.call_again, "--init", first_stage, save_dir=tmp_path / "x", **kwargs)
        assert_refused(lambda _: call(), part=part)

    other_model = "--init .*: is a run of transformer_synth_random.*, but this run is one of"
    assert_call_is_refused(other_model, model="transformer")

    (started_run.data / "bin" / "dict.de.txt").write_text("zebra 1\n")
    data_with_other_words = make_data(tmp_path / "other")
    other_words = (
        f"--init {first_stage}: {data_with_other_words} has other words; use prepare.sh --like {started_run.data}"
    )
    assert_call_is_refused(other_words, model="random", data=data_with_other_words)

    (first_stage / "checkpoint_best.pt").unlink()
    no_checkpoint = "first: has no checkpoint_best.pt; name a run .* validated"
    assert_call_is_refused(no_checkpoint, model="random")


def test_a_first_stage_that_is_no_run_is_refused(started_run, tmp_path):
    empty_folder = tmp_path / "empty"
    empty_folder.mkdir()
    assert_refused(
        lambda _: started_run.call_again("--init", empty_folder, save_dir=tmp_path / "x"),
        part=f"--init {empty_folder}: no run of train.sh",
    )


def test_a_dry_run_of_a_second_stage_needs_no_first_stage(show_command, tmp_path):
    """reproduce.sh shows the commands of both stages before any of them has been run."""
    line = show_command(f"random --gpus 0 --init {tmp_path}")
    assert flag_value(line, "--finetune-from-model") == f"{tmp_path}/checkpoint_best.pt"


def test_a_training_without_a_limit_of_updates_promises_none(started_run, tmp_path, capsys):
    capsys.readouterr()
    started_run.call_again("--", "--max-update", "0", save_dir=tmp_path / "endless")
    output = capsys.readouterr().out
    assert "== training without a limit of updates (log: " in output
    assert "\n  update 2: training loss 3\n" in output


# ---- where a result is from


@pytest.fixture
def with_a_gpu(monkeypatch):
    """Lets torch find a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


def test_a_training_on_gpus_names_the_gpu_and_their_number(with_a_gpu):
    assert provenance.describe_hardware(on_gpu=True) == "a GPU"
    assert provenance.describe_hardware(True, 16) == "16 × a GPU"


def test_a_training_on_the_cpu_of_a_machine_with_a_gpu_names_the_cpu(with_a_gpu):
    assert re.fullmatch(r"2 × (?!.*a GPU).*, 3 thread\(s\)", provenance.describe_hardware(False, 2, 3))


def test_a_folder_that_is_no_repository_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.commit() == ""


def test_the_commit_is_marked_if_code_has_changed_but_not_if_a_result_has(tmp_path, monkeypatch):
    """If results counted, the result of one cell of a table would mark the commit of the next cell."""
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    code = tmp_path / "code.py"
    result = tmp_path / "results" / "cell.json"
    steps.write(code, "1\n")
    steps.write(result, "1\n")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b.c commit -qm first"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    result.write_text("2\n")
    commit = provenance.commit()
    assert re.fullmatch("[0-9a-f]{12}", commit)
    code.write_text("2\n")
    assert provenance.commit() == f"{commit}-dirty"
