"""Trainings in several processes, and trainings that are killed, on CPUs.

By default the processes are forked from this one. With --all scripts/train.sh starts fresh ones, by torchrun.
"""

import functools
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from fairseq import checkpoint_utils
from fairseq_cli import train
from helpers import (
    RECIPE,
    ROOT,
    SMALL,
    USER_DIR,
    children,
    make_model,
    pad_batch,
    read_losses,
    run_cli,
    train_model,
    used_weights,
    wait_for,
)

from fairseq_synth.architectures import VARIANTS
from recipes import steps
from recipes import train as recipe

pytestmark = pytest.mark.slow
ARCH = "transformer_synth_random_vanilla_multi30k"
RECIPE_FLAGS = list(RECIPE)
for flag in ("--max-tokens", "--seed"):  # which scripts/train.sh sets itself
    position = RECIPE_FLAGS.index(flag)
    del RECIPE_FLAGS[position : position + 2]  # the flag and its value
QUIET = ["--disable-validation", "--no-epoch-checkpoints"]
WITHOUT_DROPOUT = ["--dropout", "0"]  # dropout would make the losses depend on the number of processes
UPDATES = 12  # of a training by forked processes
SECONDS_TO_START = 300  # the longest time until fresh processes have imported torch and have begun a training


def train_arguments(data, save, processes, max_update, *flags, timeout=600):
    """Returns arguments of scripts/train.sh: each update has 200 tokens, however many processes share them."""
    argv = [data, ARCH, "--save-dir", save, "--gpus", 0]
    argv += ["--processes", processes, "--batch-tokens", 200, "--max-tokens", 100, "--max-update", max_update]
    argv += ["--timeout", timeout, "--seed", 7, "--", *SMALL, *RECIPE_FLAGS, *QUIET, *flags]
    return list(map(str, argv))


@pytest.fixture
def start_training():
    """Provides a function that starts scripts/train.sh with the arguments that `train_arguments` returns.

    It returns the process. After the test, all that is left of the training is killed.
    """
    processes = []

    def start_training(*args, **kwargs):
        command = [str(ROOT / "scripts" / "train.sh"), *train_arguments(*args, **kwargs)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
        processes.append(subprocess.Popen(command, **options))
        return processes[-1]

    yield start_training
    for process in processes:
        if process.poll() is None:
            kill_all(process)


def kill_all(process):
    """Kills scripts/train.sh, torchrun and the training processes, and waits until they have ended."""
    for pid in [process.pid, *children(process.pid), *list_workers(process)]:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)


def wait_for_end(process, code=0):
    """Waits until a process ends, and checks its exit code."""
    output, _ = process.communicate(timeout=600)
    assert process.returncode == code, output


def training_command(data, save, processes, max_update, capsys, flags=()):
    """Returns the words of the command that scripts/train.sh would run; to be called in a dry run."""
    recipe.main(train_arguments(data, save, processes, max_update, *flags))
    last_line = capsys.readouterr().out.splitlines()[-1]
    plus, *command = shlex.split(last_line)
    assert plus == "+"
    return command


def load_last(save):
    """Returns the weights of a training's last checkpoint and its number of updates."""
    state = checkpoint_utils.load_checkpoint_to_cpu(str(save / "checkpoint_last.pt"))
    return used_weights(state["model"]), state["optimizer_history"][-1]["num_updates"]


def assert_same_weights(one, other):
    """Checks that the last checkpoints of two trainings are of one update, and equal bit for bit."""
    (weights, updates), (other_weights, other_updates) = load_last(one), load_last(other)
    assert updates == other_updates
    for key, weight in weights.items():
        assert torch.equal(weight, other_weights[key]), key


@pytest.fixture(scope="module")
def prepared(data, tmp_path_factory):
    """A copy of the corpus `data` that scripts/train.sh takes for one that scripts/prepare.sh has made."""
    folder = tmp_path_factory.mktemp("prepared")
    shutil.copytree(data, folder, dirs_exist_ok=True)
    steps.dump(folder / "settings.json", {"task": "translation", "src": "en", "tgt": "de"})
    (folder / "bin" / "done").touch()
    return folder


def list_workers(process):
    """Returns the training processes of scripts/train.sh, which starts torchrun, which starts them."""
    pids = [pid for torchrun in children(process.pid) for pid in children(torchrun)]
    return [pid for pid in pids if b"fairseq-train" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def assert_same_losses(one, other, updates):
    """Checks the losses {update: loss} of all updates, but for rounding."""
    assert list(one) == list(other) == list(range(1, updates + 1))
    for update in one:
        assert float(other[update]) == pytest.approx(float(one[update]), abs=0.002), update


def wait_for_first_update(process, log):
    """Waits until a training has logged its first update, and returns its two processes."""
    size_before = log.stat().st_size if log.exists() else 0
    wait_for(lambda: log.exists() and "num_updates" in log.read_text()[size_before:], SECONDS_TO_START)
    return list_workers(process)


def end_by_a_dead_process(process, save):
    """Kills one of two processes in the second epoch, and checks that the other one and scripts/train.sh end, too.

    They end within a minute, and torchrun's report names the process that has died.
    """
    wait_for(lambda: list(save.glob("checkpoint_2_*.pt")), SECONDS_TO_START)
    begin = time.time()
    os.kill(list_workers(process)[1], signal.SIGKILL)
    wait_for_end(process, code=1)
    assert time.time() - begin < 60
    output = (save / "train.log").read_text()
    assert re.search(r"exitcode *: -9", output)
    # the other process, if torchrun does not end it first, says in one line why it ends
    if "Traceback" in output and "[rank0]" in output:
        assert "another process of this run has ended or hangs" in output


def end_by_a_hanging_process(process, save):
    """Stops one of two processes, checks that the other one ends after the timeout, and kills all that is left."""
    log = save / "train.log"
    _, hanging = wait_for_first_update(process, log)
    os.kill(hanging, signal.SIGSTOP)
    wait_for(lambda: "not making progress in 5 seconds" in log.read_text() and list_workers(process) == [hanging])
    kill_all(process)


@pytest.mark.ci
def test_two_processes_take_the_steps_of_one_whatever_ends_them(
    prepared, start_training, tmp_path, dry_run, monkeypatch, capsys
):
    """A training by two processes is continued after one has died, and again after one has hung and all were killed.

    In the end it has the losses of a training by one process. All this is one test, because a start of the processes,
    which import torch and fairseq anew, takes longer than any training here. For the same reason, the last two
    processes are forked from this one.
    """
    save = tmp_path / "two"
    flags = ["--save-interval-updates", "3", "--keep-interval-updates", "1", *WITHOUT_DROPOUT]
    monkeypatch.delenv("DRY_RUN")
    end_by_a_dead_process(start_training(prepared, save, 2, 100000, *flags), save)
    end_by_a_hanging_process(start_training(prepared, save, 2, 100000, *flags, timeout=5), save)
    log = (save / "train.log").read_text()
    assert log.count("Loaded checkpoint") == 1  # the training has been continued once, which the first process logs

    monkeypatch.setenv("DRY_RUN", "1")
    _, updates_before = load_last(save)
    updates = updates_before + 6
    command = training_command(prepared, save, 2, updates, capsys, flags)
    last_losses = run_forked(command, tmp_path / "last.log")
    assert min(last_losses) == updates_before + 1
    _, updates_at_the_end = load_last(save)
    assert updates_at_the_end == updates

    program, *arguments = training_command(prepared, tmp_path / "one", 1, updates, capsys, WITHOUT_DROPOUT)
    assert program == "fairseq-train"
    _, log_of_one = run_cli(train.cli_main, *arguments)
    losses_of_two = {**read_losses(log), **last_losses}
    assert_same_losses(read_losses(log_of_one), losses_of_two, updates)


def run_forked(command, log):
    """Runs a command with torchrun for two processes as two forks of this process; returns the losses of rank 0.

    The forks have the environment variables that torchrun sets, and the flags that scripts/cpu_worker.sh, which
    torchrun starts, adds. log: where they write their logs, with the rank as suffix.
    """
    worker_script = next(word for word in command if word.endswith("cpu_worker.sh"))
    _, _, added_flags = Path(worker_script).read_text().partition('exec fairseq-train "$@" ')
    added_flags = added_flags.replace("\\\n", "")
    assert added_flags
    flags = command[command.index(worker_script) + 1 :]
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        _, port = unused.getsockname()

    def work(rank):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        _, logged = run_cli(train.cli_main, *flags, *shlex.split(os.path.expandvars(added_flags)))
        log.with_suffix(f".{rank}").write_text(logged)

    context = torch.multiprocessing.get_context("fork")
    # daemons end with this process; two processes of one rank would wait for each other for ever
    processes = [context.Process(target=work, args=(rank,), daemon=True) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0, 0]
    return read_losses(log.with_suffix(".0").read_text())


def test_two_forked_processes_take_the_steps_of_one(prepared, tmp_path, dry_run, capsys):
    """The command of scripts/train.sh for two processes has the losses of the command for one."""
    _, *arguments = training_command(prepared, tmp_path / "one", 1, UPDATES, capsys, WITHOUT_DROPOUT)
    _, log_of_one = run_cli(train.cli_main, *arguments)
    command = training_command(prepared, tmp_path / "two", 2, UPDATES, capsys, WITHOUT_DROPOUT)
    assert_same_losses(read_losses(log_of_one), run_forked(command, tmp_path / "two.log"), UPDATES)


def test_two_forked_processes_continue_an_interrupted_training(prepared, tmp_path, dry_run, capsys):
    """With dropout, too, the training ends, bit for bit, as one that is not interrupted."""
    whole_command = training_command(prepared, tmp_path / "whole", 2, UPDATES, capsys)
    whole = run_forked(whole_command, tmp_path / "whole.log")
    first = run_forked(training_command(prepared, tmp_path / "parts", 2, 7, capsys), tmp_path / "first.log")
    last = run_forked(training_command(prepared, tmp_path / "parts", 2, UPDATES, capsys), tmp_path / "last.log")
    assert min(last) == 8
    assert {**first, **last} == whole
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")


def test_killed_at_any_moment(data, tmp_path):
    """A training that is killed again and again while it writes checkpoints ends as one that is not killed."""
    arch = "transformer_synth_random_multi30k"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train_model(data, whole, "--max-update", "60", *QUIET, arch=arch)
    argv = [data / "bin", *USER_DIR, "--arch", arch, *SMALL, *RECIPE, "--save-dir", killed, *QUIET]
    argv += ["--save-interval-updates", "1", "--keep-interval-updates", "1"]
    argv += ["--max-update", "60", "--log-format", "none"]
    seed = int.from_bytes(os.urandom(4), "big")  # other moments in every run
    print(f"seed of the moments: {seed}")
    moments = random.Random(seed)
    checkpoint = killed / "checkpoint_last.pt"
    for _ in range(3):
        time_before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        process = torch.multiprocessing.get_context("fork").Process(target=run_cli, args=(train.cli_main, *argv))
        process.start()
        wait_for(functools.partial(is_ended_or_saved, process, checkpoint, time_before))
        time.sleep(moments.uniform(0, 0.4))
        process.kill()
        process.join()
    train_model(data, killed, "--max-update", "60", *QUIET, arch=arch)
    assert_same_weights(whole, killed)
    train_model(data, killed, "--max-update", "60", *QUIET, arch=arch)  # nothing is left to do
    assert_same_weights(whole, killed)


def is_ended_or_saved(process, checkpoint, time_before):
    """Whether a training has ended, or written a checkpoint since the time of the last one."""
    return not process.is_alive() or (checkpoint.exists() and checkpoint.stat().st_mtime_ns != time_before)


# {rank: (shortest and longest sentence) of each step}: the two processes have sentences of other lengths
LENGTHS = {0: [(2, 3), (20, 23), (5, 9), (1, 2)], 1: [(20, 23), (2, 3), (12, 16), (2, 1)]}


def train_with_ddp(rank, folder):
    """What one of two processes does: trains every variant in torch's DDP for four steps, and saves its weights."""
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    for spec in VARIANTS:
        model = make_model(f"transformer_synth_{spec.replace('+', '_')}_multi30k").train()
        model.encoder.embed_tokens.weight.requires_grad_(True)
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for lengths in LENGTHS[rank]:
            sources = [[5 + i % 30 for i in range(length)] for length in lengths]
            targets = [[2, *range(5, 4 + length)] for length in lengths]
            source_batch, target_batch = pad_batch(sources, left=True), pad_batch(targets, left=False)
            optimizer.zero_grad()
            logits, _ = parallel(source_batch, torch.tensor(lengths), target_batch)
            logits.logsumexp(-1).mean().backward()
            optimizer.step()
        torch.save(model.state_dict(), f"{folder}/{spec}-{rank}.pt")
    torch.distributed.destroy_process_group()


def test_ddp_keeps_the_processes_together(tmp_path):
    """No parameter is without a gradient where torch's DDP expects one, and both processes have the same weights."""
    torch.multiprocessing.start_processes(train_with_ddp, (str(tmp_path),), nprocs=2, start_method="fork")
    for spec in VARIANTS:
        weights, other_weights = (torch.load(tmp_path / f"{spec}-{rank}.pt") for rank in (0, 1))
        for key, weight in weights.items():
            assert torch.equal(weight, other_weights[key]), (spec, key)
        initial = make_model(f"transformer_synth_{spec.replace('+', '_')}_multi30k").state_dict()
        moved = [key for key in weights if key in initial and not torch.equal(weights[key], initial[key])]
        assert "encoder.layers.0.self_attn.v_proj.weight" in moved
