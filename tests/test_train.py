"""Training: the command, and what a run is: which one goes on, which is refused, what is recorded of it."""

import os
import re
import subprocess
from dataclasses import replace

import pytest
import torch
from helpers import ROOT, assert_refused, flag_value, run_script

from recipes import provenance, steps, train
from recipes.catalog import RECIPES, TASKS

pytestmark = pytest.mark.usefixtures("recipes_environment")


def make_data(folder, task="translation", **facts):
    """What a training asks of prepared data."""
    sides = {"text_to_text": ("source", "target"), "denoising": ("source", "target")}.get(task, ("en", "de"))
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    for side in sides:
        (folder / "bin" / f"dict.{side}.txt").write_text("eins 1\n")
    steps.dump(folder / "settings.json", {"task": task, "src": sides[0], "tgt": sides[1], **facts})
    (folder / "bin" / "done").touch()
    return folder


@pytest.fixture
def shown(tmp_path, dry_run, capsys):
    """The command that train.sh shows for data, a model and more words."""

    def shown(argv, **facts):
        train.main([str(make_data(tmp_path / "data", **facts)), *argv.split()])
        return capsys.readouterr().out

    return shown


@pytest.mark.parametrize("nodes, gpus", [(1, 1), (1, 3), (1, 8), (16, 8), (5, 3)])
def test_the_batch_does_not_depend_on_the_gpus(nodes, gpus, shown):
    line = shown(f"random_vanilla --recipe wmt_en_de --gpus {gpus} --nodes {nodes} --rendezvous first:29500")
    tokens, passes, world = (
        int(flag_value(line, f"--{f}")) for f in ("max-tokens", "update-freq", "distributed-world-size")
    )
    assert world == nodes * gpus and 32768 - world * passes < world * tokens * passes <= 32768 and tokens <= 4096
    assert ("torchrun" in line) == (world > 1) == ("--heartbeat-timeout 600" in line)
    assert world == 1 or flag_value(line, "--nproc-per-node") == str(gpus)
    several = f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint first:29500 --rdzv-id data-random_vanilla-seed1 "
    assert (several in line) == (nodes > 1)


@pytest.mark.parametrize("task", TASKS)
def test_the_data_say_their_task(task, shown):
    """And their sides and classes; the recipe is the small one of the task, whose values may be changed."""
    recipe, facts = RECIPES[TASKS[task].recipe], {"classes": 6} if task == "sentence_prediction" else {}
    line = shown("random --gpus 0 --save-every 7 --seed 3 -- --lr 9", task=task, **facts)
    assert (
        flag_value(line, "--arch") == f"{recipe.kind}_synth_random_{recipe.preset}" and flag_value(line, "--lr") == "9"
    )
    assert (flag_value(line, "--task") if "--task" in line else "translation") == recipe.task
    sides = {"translation": "en de", "text_to_text": "source target", "denoising": "source target"}.get(task)
    assert sides is None or f"--source-lang {sides.split()[0]} --target-lang {sides.split()[1]}" in line
    assert ("--num-classes 6 " in line) == (task == "sentence_prediction")
    assert (
        flag_value(line, "--max-update") == str(recipe.max_update)
        and flag_value(line, "--save-interval-updates") == "7"
    )
    assert (
        flag_value(line, "--keep-interval-updates") == ("10" if recipe.average else "1")
        and flag_value(line, "--seed") == "3"
    )
    assert f"--save-dir {ROOT}/runs/data-random-seed3 " in line and " --cpu " in line and "fp16" not in line
    for n in "90x":  # 0 is no limit, and x is fairseq's to refuse
        said = "during its warm-up" in shown(f"random --gpus 0 -- --max-update {n}", task=task, **facts)
        assert said == (n == "9")


@pytest.mark.parametrize("argv, longest, length", [
    ("random", 115, "120"),  # in steps of 8, which suits GPUs
    ("random", 100, None),  # never less than the architecture takes
    ("random", 2000, "1024"),  # what is longer fairseq leaves out
    ("transformer", 115, None),
    ("relative_random_vanilla", 115, None),  # takes any length
    ("random -- --synth-max-length=24", 115, None),
    ("random -- --synth-beyond-length tile", 115, None),
])  # fmt: skip
def test_the_length_follows_the_text(argv, longest, length, shown):
    line = shown(argv, longest=longest)
    found = re.findall(r"--synth-max-length (\d+)", line.split("\n+")[-1])
    assert found == ([length] if length else []) and ("follows the longest" in line) == (length in ("120", "1024"))


@pytest.mark.parametrize("capability, best", [((8, 0), "bf16"), ((7, 5), "fp16")])
def test_the_precision_is_the_best_there_is(capability, best, shown, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert f" --{best} " in shown("random --recipe wmt_en_de")
    assert "bf16" not in shown("random --recipe wmt_en_de --precision fp16")


@pytest.mark.parametrize("argv, part", [
    ("{tmp} random", "no data that prepare.sh has made"),
    ("{data}/bin random", "bin: give .*data$"),
    ("{data} randm", "randm: no model of the recipe multi30k_cpu; see scripts/train.sh --help"),
    ("{data} roberta_agnews --recipe agnews", "prepared for translation, .* agnews is for sentence_prediction"),
    ("{data} random --recipe wmt_en_de", "--gpus: one wanted, 0 here; --gpus 0"),
    ("{data} random --threads 0", "--threads: 0: must be an integer, at least 1"),
    ("{data} random --gpus 1 --nodes 2", "--nodes 2: .*--rendezvous HOST:PORT"),
    ("{data} random --recipe wmt_en_de --gpus 8 --batch-tokens 1000", "--batch-tokens 1000.* 125 .*raise them"),
    ("{data} random --recipe wmt_en_de --gpus 1 --max-tokens 9", "--max-tokens 9: .*sentence of 256; raise them"),
])  # fmt: skip
def test_what_is_refused(argv, part, tmp_path, dry_run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert_refused(train.main, *argv.format(data=make_data(tmp_path / "data"), tmp=tmp_path).split(), part=part)


@pytest.mark.parametrize("name, character", [("run-18:30", "a colon"), ("${x}", "a variable")])
def test_a_folder_whose_name_fairseq_misreads_is_refused_before_the_training(name, character, tmp_path, dry_run):
    data, other_data = make_data(tmp_path / "data"), make_data(tmp_path / name / "data")
    for argv in ([data, "random", "--save-dir", tmp_path / name], [other_data, "random", "--save-dir", "x"]):
        assert_refused(train.main, *argv, "--gpus", "0", part=[re.escape(name), f"{character}.*rename the folder"])


def test_a_folder_whose_name_begins_with_a_dash_is_named_by_its_whole_path(tmp_path, dry_run, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_data(tmp_path / "-data")
    train.main(["./-data", "random", "--gpus", "0", "--save-dir=-run"])
    line = capsys.readouterr().out
    assert f"fairseq-train {tmp_path}/-data/bin " in line and flag_value(line, "--save-dir") == f"{tmp_path}/-run"


@pytest.mark.parametrize("argv, tokens, allowed", [
    ("transformer", 1025, "--max-source-positions 1032 --max-target-positions 1032"),
    ("transformer", 1024, None),
    ("transformer -- --max-source-positions 1030 --max-target-positions=1030", 1030, None),
    ("random", 900, None),  # its length follows the text
    ("random", 1030, "--max-source-positions 1032 --max-target-positions 1032 --synth-max-length 1032"),
    ("random -- --synth-max-length 200", 201, "--synth-max-length 208"),
    ("random -- --synth-max-length 200 --synth-beyond-length tile", 201, None),
])  # fmt: skip
@pytest.mark.parametrize("side", ["en", "de"])
def test_a_test_sentence_that_will_be_refused_is_warned_of_before_the_training(
    argv, tokens, allowed, side, shown, tmp_path
):
    data = make_data(tmp_path / "data")
    for language in ("en", "de"):
        long_line = "a " * (tokens - 1) if language == side else "a"
        steps.write(data / "sub" / f"test.{language}", f"a\n{long_line}\nb\n")
    said = shown(argv, longest=tokens)
    warning = f"test.{side}: line 2 of the test set has {tokens} tokens"
    assert (warning in said) == (allowed is not None)
    assert allowed is None or f"evaluate.sh will refuse this test set;\n  add -- {allowed}, or shorten" in said


def test_slurm(tmp_path):
    """Each machine is called with the job's size and its first machine; flags of fairseq-train stay behind --."""
    for name, code in (("scontrol", "printf 'gpu7\\ngpu8\\n'"), ("srun", 'shift; exec "$@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / name).chmod(0o755)
    env = {"DRY_RUN": "1", "SLURM_JOB_NODELIST": "gpu[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "40007"}
    env["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    argv = [make_data(tmp_path / "data"), "transformer", "--recipe", "wmt_en_de", "--gpus", "8", "--", "--lr", "1"]
    done = run_script("train.slurm", *argv, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--nnodes 2" in done.stdout and "--rdzv-endpoint gpu7:20007" in done.stdout
    assert flag_value(done.stdout, "--distributed-world-size") == "16" and flag_value(done.stdout, "--lr") == "1"
    done = run_script("train.slurm", *argv, env=env, cwd=tmp_path)
    assert done.returncode != 0 and "submit from the project's folder" in done.stderr


@pytest.mark.parametrize("line, said", [
    ("train_inner | epoch 2: loss=3, ppl=8.5, wps=1.35e+06, ups=4, wpb=300000, num_updates=200, wall=0",
     "training perplexity 8.5, 0:01:06 left"),
    ("train_inner | epoch 2: loss=3.1, accuracy=8, wps=9, wpb=9, num_updates=600, wall=30",
     "training loss 3.1, 0:00:00 left"),
    ("train_inner | epoch 1: loss=3, ppl=8.5, wps=0, wpb=9, num_updates=200", "training perplexity 8.5"),
    ("valid | epoch 2 | valid on 'valid' | loss 3 | ppl 7.5 | num_updates 200", "validation perplexity 7.5"),
])  # fmt: skip
def test_progress(line, said, capsys):
    """How far it is, how well it fares, and how long it takes."""
    others = ["another kind of line with num_updates=200\n", f"half a | {line}", 'a | train_inner | {"loss": "3"}\n']
    for shown in (f"2026-01-01 | INFO | {line}\n", *others):
        train.show_progress(500, shown)
    assert re.fullmatch(f"  update [26]00 of 500: {said}\n", capsys.readouterr().out)


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A training that has begun: its data and folder, and a call of train.sh that goes on, up to fairseq-train."""
    data, save = make_data(tmp_path / "data"), tmp_path / "save"
    line = "a | train_inner | loss=3, wps=0, wpb=9, num_updates=2\n"
    monkeypatch.setattr(train, "run_command", lambda argv, log, show: show(line))

    def go_on(*more, model="transformer", to=save, of=data):
        argv = [of, model, "--recipe", "multi30k_cpu", "--save-dir", to, "--gpus", "0", *more]
        train.main([*map(str, argv)])

    go_on()
    (save / "checkpoint_last.pt").touch()
    return data, save, go_on


def test_a_run_goes_on_as_it_was_begun(begun, monkeypatch):
    """With all that its figures depend on, but for the machine. Before its first checkpoint it has learned nothing."""
    data, save, go_on = begun
    recipe, last = RECIPES["multi30k_cpu"], save / "checkpoint_last.pt"
    assert os.environ["MALLOC_MMAP_MAX_"] == "0"  # memory is kept between updates, which spares filling it anew
    with steps.locked(save / ".lock"):
        assert_refused(lambda _: go_on(), part=f"{save}: another process is at work there; let it end")

    def refuses(part, *more, model="transformer", **flags):
        monkeypatch.setitem(RECIPES, "multi30k_cpu", replace(recipe, flags={**recipe.flags, **flags}))
        assert_refused(lambda _: go_on(*more, model=model), part=part)
        monkeypatch.setitem(RECIPES, "multi30k_cpu", recipe)

    for more in (
        ["--recipe", "news_cpu"],  # the same but for its length
        ["--max-update", "9000", "--save-every", "9"],  # which the learning rate does not follow
        ["--threads", "2", "--timeout", "9", "--max-tokens", "512"],  # another machine
    ):
        go_on(*more)
    assert os.environ["OMP_NUM_THREADS"] == "2"
    refuses(f"{save} was made with other settings .seed is 1, asked for 7", "--seed", "7")
    refuses("precision is fp32, asked for bf16", "--precision", "bf16")
    refuses("batch_tokens is 1024, asked for 2048", "--batch-tokens", "2048")
    refuses(r"flags is \[\], asked for \['--lr', '1'\]", "--", "--lr", "1")
    refuses("arch is transformer_multi30k, asked for transformer_synth_random", model="random")
    refuses(r"--gpus: 99 wanted, \d here; --gpus 0 trains on the CPU", "--gpus", "99")
    refuses("recipe_flags is .*3e-3.*, asked for .*'lr': '1'", lr="1")
    for file in (data / "settings.json", data / "bin" / "dict.de.txt"):  # made anew in the same folder
        kept = file.read_text()
        file.write_text(kept.replace("eins", "zwei").replace('"en"', '"fr"'))
        refuses("data_digest is")
        said = f"{save}: its data, {data}, have changed or moved since the training; .*run.json"
        assert_refused(lambda _: train.read_run(save), part=said)
        file.write_text(kept)
    assert_refused(lambda _: train.read_run(data), part=f"{data}: is a folder of data; name a run")
    assert_refused(lambda _: train.read_run(save.parent), part="no run of train.sh")
    last.unlink()
    file.write_text("zwei 1\n")
    monkeypatch.setitem(RECIPES, "multi30k_cpu", replace(recipe, flags={**recipe.flags, "lr-scheduler": "cosine"}))
    recipe = RECIPES["multi30k_cpu"]
    go_on()
    assert train.read_run(save).data == data
    last.touch()
    refuses("schedule is 7000, asked for 9000", "--max-update", "9000")
    refuses(r"schedule is 7000, asked for \)", "--", "--lr-scheduler=inverse_sqrt")  # its end is not --max-update's
    refuses(r"schedule is 7000, asked for \)", "--", "--lr-period-updates=3")


def test_a_run_that_begins_anew(begun, capsys):
    """It keeps nothing of another: neither scores nor log nor machine. With any checkpoint left it is the same run."""
    _, save, go_on = begun
    left = [save / "train.log", save / "evaluation" / "scores.json", save / "tests" / "other" / "scores.json"]
    for path in left:
        steps.write(path, "{}")
    steps.dump(save / "run.json", {**steps.load(save / "run.json"), "starts": [{"hardware": "another"}]})
    for _ in range(2):
        go_on()
    assert all(path.exists() for path in left) and len(steps.load(save / "run.json")["starts"]) == 2
    (save / "checkpoint_last.pt").rename(save / "checkpoint_2_20.pt")
    assert_refused(lambda _: go_on("--seed", "7"), part="seed is 1, asked for 7")
    known = (save / "run.json").rename(save / "kept.json")
    assert_refused(lambda _: go_on(), part=f"{save} was made with other settings .no run.json.; give another folder")
    known.rename(save / "run.json")
    (save / "checkpoint_2_20.pt").unlink()
    go_on("--seed", "7", "--precision", "bf16", "--", "--max-update=40")
    assert re.search("training for 40 updates (.|\n)*update 2 of 40: training loss 3\n", capsys.readouterr().out)
    (start,) = steps.load(save / "run.json")["starts"]
    assert not any(path.exists() for path in left) and start["hardware"].endswith("1 thread(s)")
    assert start["precision"] == "bf16"


def test_a_training_ends_with_the_next_command(begun, capsys):
    _, save, go_on = begun
    capsys.readouterr()
    go_on()
    said = capsys.readouterr().out
    assert said.endswith(f"\n\nnext: scripts/evaluate.sh {save}\n") and "is trained already" not in said


def test_a_finished_training_that_is_called_again_says_so(begun, capsys, monkeypatch):
    _, save, go_on = begun
    monkeypatch.setattr(train, "run_command", lambda argv, log, watch: watch("| INFO | done training in 0.0 seconds\n"))
    capsys.readouterr()
    go_on()
    assert f"{save} is trained already; there was nothing left to do" in capsys.readouterr().out


def test_the_help_explains_models_and_recipes():
    """Each recipe has a line that says what it is for, and those for data of one's own stand by their task."""
    said = train.make_parser().format_help()
    for recipe in RECIPES.values():
        assert recipe.about and re.search(rf"^  {recipe.name} +{re.escape(recipe.about)}$", said, re.M), recipe.name
    for task in TASKS.values():
        assert re.search(rf"^  [a-z ]+  {task.recipe} \(the default", said, re.M), task.recipe
    paper, own, others = re.split("models that are not in the paper:|baselines:", said.split("All recipes")[0])
    assert "dense_vanilla" in paper and "relative_random" in own and "lightconv" in others and "linformer" in others
    assert "-- --dropout 0.3 --tensorboard-logdir tb" in said and max(map(len, said.splitlines())) <= 120


def test_a_second_stage(begun, tmp_path):
    """Sizes are the first one's; it goes on although that was evaluated since; other models and words are refused."""
    data, _, go_on = begun
    first, second = tmp_path / "first", tmp_path / "second"
    go_on("--", "--encoder-layers", "1", "--synth-max-length=112", "--lr", "3", model="random", to=first)
    init = ["--init", str(first)]
    assert_refused(
        lambda _: go_on(*init, model="random", to=second), part="first: has no checkpoint_best.pt; name a run .* come"
    )
    for made in (first / "checkpoint_best.pt", second / "checkpoint_last.pt", first / "evaluation/checkpoint_avg.pt"):
        steps.write(made, "")
        go_on(*init, model="random", to=second)
    assert steps.load(second / "run.json")["flags"] == ["--encoder-layers", "1", "--synth-max-length", "112"]
    # longer text changes nothing of that
    go_on(*init, model="random", to=tmp_path / "third", of=make_data(tmp_path / "long", longest=500))
    assert steps.load(tmp_path / "third" / "run.json")["flags"] == steps.load(second / "run.json")["flags"]
    assert_refused(lambda _: go_on(model="random", to=second), part="flags is|init is")
    assert_refused(
        lambda _: go_on(*init, to=tmp_path / "x"), part="--init .*: is a run of transformer_synth_random.*, not of"
    )
    (data / "bin" / "dict.de.txt").write_text("zebra 1\n")
    other = make_data(tmp_path / "other")
    said = f"--init {first}: {other} has other words; use prepare.sh --like {data}"
    assert_refused(lambda _: go_on(*init, model="random", to=tmp_path / "x", of=other), part=said)


def test_a_first_stage_that_is_no_run_is_refused(begun, tmp_path):
    _, save, go_on = begun
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_refused(lambda _: go_on("--init", str(empty), to=tmp_path / "x"), part=f"--init {empty}: no run of train.sh")


def test_a_dry_run_of_a_second_stage_needs_no_first_stage(shown, tmp_path):
    """reproduce.sh shows the commands of both stages before any of them has been run."""
    line = shown(f"random --gpus 0 --init {tmp_path}")
    assert flag_value(line, "--finetune-from-model") == f"{tmp_path}/checkpoint_best.pt"


def test_a_training_without_a_limit_of_updates_promises_none(begun, tmp_path, capsys):
    _, _, go_on = begun
    capsys.readouterr()
    go_on("--", "--max-update", "0", to=tmp_path / "endless")
    said = capsys.readouterr().out
    assert "== training without a limit of updates (log: " in said and "\n  update 2: training loss 3\n" in said


def test_where_a_figure_is_from(tmp_path, monkeypatch):
    """A training on the CPU of a machine with a GPU is the CPU's; several processes are several GPUs. The commit is
    marked by other code, but not by a result, so that one cell does not mark the next."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert provenance.describe_hardware(on_gpu=True) == "a GPU"
    assert provenance.describe_hardware(True, 16) == "16 × a GPU"
    assert re.fullmatch(r"2 × (?!.*a GPU).*, 3 thread\(s\)", provenance.describe_hardware(False, 2, 3))
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.commit() == ""
    code, cell = tmp_path / "code.py", tmp_path / "results" / "cell.json"
    for path in (code, cell):
        steps.write(path, "1\n")
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b.c commit -qm first"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    cell.write_text("2\n")
    clean = provenance.commit()
    assert re.fullmatch("[0-9a-f]{12}", clean)
    code.write_text("2\n")
    assert provenance.commit() == f"{clean}-dirty"
