"""Trainings in several processes, and trainings that are killed, on CPUs.

By default the processes are forked from this one. With --all scripts/train.sh starts fresh ones, by torchrun.
"""

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
from typing import NamedTuple

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
    remove_flags,
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
RECIPE_FLAGS = remove_flags(RECIPE, "--max-tokens", "--seed")  # scripts/train.sh sets these two flags itself
QUIET = ["--disable-validation", "--no-epoch-checkpoints"]
WITHOUT_DROPOUT = ["--dropout", "0"]  # dropout would make the losses depend on the number of processes
UPDATES = 12  # the number of updates of a training by forked processes
UNREACHED = 100000  # the --max-update of a training that is killed long before
SECONDS_TO_START = 300  # the longest time until fresh processes have imported torch and have begun a training


# ---- how scripts/train.sh is called


def make_train_arguments(prepared, save, processes, max_update, flags=(), timeout=600):
    """Returns arguments of scripts/train.sh: each update has 200 tokens, however many processes share them.

    Args:
        prepared: the folder of the fixture `prepared`.
        save: the folder for the checkpoints and the log.
        processes: the number of processes.
        max_update: the number of updates after which the training ends.
        flags: other flags of fairseq-train.
        timeout: after how many seconds a process ends if the other one hangs.
    """
    arguments = [prepared, ARCH, "--save-dir", save, "--gpus", 0, "--processes", processes]
    arguments += ["--batch-tokens", 200, "--max-tokens", 100, "--max-update", max_update]
    arguments += ["--timeout", timeout, "--seed", 7]
    arguments += ["--", *SMALL, *RECIPE_FLAGS, *QUIET, *flags]
    return [str(argument) for argument in arguments]


def make_training_command(prepared, save, processes, max_update, capsys, flags=()):
    """Returns the words of the command that scripts/train.sh would run; it has to be called in a dry run.

    Args:
        prepared, save, processes, max_update, flags: see `make_train_arguments`.
        capsys: pytest's fixture.
    """
    recipe.main(make_train_arguments(prepared, save, processes, max_update, flags))
    last_line = capsys.readouterr().out.splitlines()[-1]
    plus, *command = shlex.split(last_line)
    assert plus == "+"
    return command


@pytest.fixture(scope="module")
def prepared(data, tmp_path_factory):
    """Provides a copy of the corpus `data` that scripts/train.sh takes for one that scripts/prepare.sh has made."""
    folder = tmp_path_factory.mktemp("prepared")
    shutil.copytree(data, folder, dirs_exist_ok=True)
    steps.dump(folder / "settings.json", {"task": "translation", "src": "en", "tgt": "de"})
    (folder / "bin" / "done").touch()
    return folder


@pytest.fixture
def start_training():
    """Provides a function that starts scripts/train.sh with the arguments that `make_train_arguments` returns.

    It returns the process. After the test, all that is left of the training is killed.
    """
    started_processes = []

    def start_training(*args, **kwargs):
        process = subprocess.Popen(
            [str(ROOT / "scripts" / "train.sh"), *make_train_arguments(*args, **kwargs)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        started_processes.append(process)
        return process

    yield start_training
    for process in started_processes:
        if process.poll() is None:
            kill_all(process)


# ---- the processes of a training


def list_workers(process):
    """Returns the process numbers of the training processes of scripts/train.sh.

    scripts/train.sh starts torchrun, which starts them.
    """
    workers = []
    for torchrun in children(process.pid):
        for pid in children(torchrun):
            command_line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"fairseq-train" in command_line:
                workers.append(pid)
    return workers


def kill_all(process):
    """Kills scripts/train.sh, torchrun and the training processes, and waits until they have ended."""
    for pid in [process.pid, *children(process.pid), *list_workers(process)]:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)


def wait_for_end(process, exit_code):
    """Waits until a process ends, and checks its exit code."""
    output, _ = process.communicate(timeout=600)
    assert process.returncode == exit_code, output


def wait_for_first_update(process, log):
    """Waits until a training has logged its first update, and returns the process numbers of its two processes.

    Args:
        process: the process of scripts/train.sh.
        log: the path of the log, to which an earlier training may have written.
    """
    size_before = log.stat().st_size if log.exists() else 0

    def has_logged_an_update():
        """Returns whether the log of this training has an update."""
        return log.exists() and "num_updates" in log.read_text()[size_before:]

    wait_for(has_logged_an_update, SECONDS_TO_START)
    return list_workers(process)


# ---- what a training results in


class Checkpoint(NamedTuple):
    """The weights of a checkpoint, and after how many updates it was written."""

    weights: dict[str, torch.Tensor]
    updates: int


def load_last_checkpoint(save):
    """Returns the last `Checkpoint` of a training, whose folder is `save`."""
    state = checkpoint_utils.load_checkpoint_to_cpu(str(save / "checkpoint_last.pt"))
    return Checkpoint(weights=used_weights(state["model"]), updates=state["optimizer_history"][-1]["num_updates"])


def assert_same_weights(save, expected_save):
    """Checks that the last checkpoints in the folders of two trainings are of one update, and equal bit for bit."""
    checkpoint = load_last_checkpoint(save)
    expected = load_last_checkpoint(expected_save)
    assert checkpoint.updates == expected.updates
    for name, expected_weight in expected.weights.items():
        assert torch.equal(checkpoint.weights[name], expected_weight), name


def assert_same_losses(losses, expected_losses, updates):
    """Checks that two trainings have losses of all updates, and that these differ by rounding alone.

    Args:
        losses, expected_losses: {update: the loss as it is printed}.
        updates: the number of updates.
    """
    all_updates = list(range(1, updates + 1))
    assert list(losses) == all_updates
    assert list(expected_losses) == all_updates
    for update in all_updates:
        assert float(losses[update]) == pytest.approx(float(expected_losses[update]), abs=0.002), update


# ---- trainings in two fresh processes


def end_by_a_dead_process(process, save):
    """Kills one of two processes in the second epoch, and checks that the other one and scripts/train.sh end, too.

    They end within a minute, and torchrun's report names the process that has died.

    Args:
        process: the process of scripts/train.sh.
        save: the folder of the training.
    """

    def is_in_second_epoch():
        """Returns whether a checkpoint of the second epoch has been written."""
        return list(save.glob("checkpoint_2_*.pt")) != []

    wait_for(is_in_second_epoch, SECONDS_TO_START)
    time_of_kill = time.time()
    _, second_worker = list_workers(process)
    os.kill(second_worker, signal.SIGKILL)
    wait_for_end(process, exit_code=1)
    assert time.time() - time_of_kill < 60
    output = (save / "train.log").read_text()
    assert re.search(r"exitcode *: -9", output)
    # the other process, if torchrun does not end it first, says in one line why it ends
    if "Traceback" in output and "[rank0]" in output:
        assert "another process of this run has ended or hangs" in output


def end_by_a_hanging_process(process, save):
    """Stops one of two processes, checks that the other one ends after the timeout, and kills all that is left.

    Args:
        process: the process of scripts/train.sh.
        save: the folder of the training.
    """
    log = save / "train.log"
    _, hanging_worker = wait_for_first_update(process, log)
    os.kill(hanging_worker, signal.SIGSTOP)

    def has_other_worker_ended():
        """Returns whether the other process has logged that it does not wait any longer, and has ended."""
        return "not making progress in 5 seconds" in log.read_text() and list_workers(process) == [hanging_worker]

    wait_for(has_other_worker_ended)
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
    log = save / "train.log"
    flags = ["--save-interval-updates", "3", "--keep-interval-updates", "1", *WITHOUT_DROPOUT]

    # 1. Two fresh processes start the training. One of them is killed, and the other one ends, too. The fixture dry_run
    #    has set DRY_RUN, but here scripts/train.sh has to run its command, not only to print it.
    monkeypatch.delenv("DRY_RUN")
    process = start_training(prepared, save, processes=2, max_update=UNREACHED, flags=flags)
    end_by_a_dead_process(process, save)

    # 2. Two fresh processes continue it. One of them is stopped, and in the end all are killed. So one of the two
    #    starts has loaded a checkpoint.
    process = start_training(prepared, save, processes=2, max_update=UNREACHED, flags=flags, timeout=5)
    end_by_a_hanging_process(process, save)
    logged = log.read_text()
    assert logged.count("Loaded checkpoint") == 1  # the training has been continued once, which the first process logs

    # 3. Two forks of this process continue it for 6 updates. Their command is the one that a dry run prints.
    monkeypatch.setenv("DRY_RUN", "1")
    updates_before = load_last_checkpoint(save).updates
    updates = updates_before + 6
    command = make_training_command(prepared, save, 2, updates, capsys, flags)
    last_losses = run_forked(command, tmp_path / "last.log")
    assert min(last_losses) == updates_before + 1
    assert load_last_checkpoint(save).updates == updates

    # 4. This process alone does the same number of updates, without an interruption.
    command = make_training_command(prepared, tmp_path / "one", 1, updates, capsys, WITHOUT_DROPOUT)
    program, *arguments = command
    assert program == "fairseq-train"
    _, logged_by_one_process = run_cli(train.cli_main, *arguments)

    # The losses have the number of updates as keys. `logged` is the log of the stages 1 and 2. What they did after
    # their last checkpoint was lost, and stage 3 has done it again, so that its losses take precedence.
    losses = {**read_losses(logged), **last_losses}
    assert_same_losses(losses, read_losses(logged_by_one_process), updates)


# ---- trainings in two processes that are forked from this one


def find_unused_port():
    """Returns the number of a port of this machine that no program uses."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        _, port = unused.getsockname()
        return port


def read_added_flags(worker_script):
    """Returns the flags that scripts/cpu_worker.sh adds to those of fairseq-train, as they are written there.

    worker_script: the path of scripts/cpu_worker.sh.
    """
    script = Path(worker_script).read_text()
    _, _, added_flags = script.partition('exec fairseq-train "$@" ')
    added_flags = added_flags.replace("\\\n", "")
    assert added_flags
    return added_flags


def run_forked(command, log):
    """Runs a command with torchrun for two processes as two forks of this process; returns the losses of rank 0.

    The forks have the environment variables that torchrun sets, and the flags that scripts/cpu_worker.sh, which
    torchrun starts, adds.

    Args:
        command: the words of the command.
        log: where they write their logs, with the rank as suffix.
    """
    worker_script = next(word for word in command if word.endswith("cpu_worker.sh"))
    flags = command[command.index(worker_script) + 1 :]
    added_flags = read_added_flags(worker_script)
    port = find_unused_port()

    def work(rank):
        """Does what the process with this rank does."""
        os.environ["RANK"] = str(rank)
        os.environ["LOCAL_RANK"] = str(rank)
        os.environ["WORLD_SIZE"] = "2"
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = str(port)
        # cpu_worker.sh is a script of bash, in which one of the flags is "$RANK"
        flags_of_rank = shlex.split(os.path.expandvars(added_flags))
        _, logged = run_cli(train.cli_main, *flags, *flags_of_rank)
        log.with_suffix(f".{rank}").write_text(logged)

    context = torch.multiprocessing.get_context("fork")
    # A process waits for the other one at each update. It would wait for ever if the other one had failed, or if both
    # had the same rank by mistake. So both are killed after a minute. They are daemons, which end with this process.
    processes = [context.Process(target=work, args=(rank,), daemon=True) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    exit_codes = [process.exitcode for process in processes]  # None for a process that has not ended
    for process in processes:
        process.kill()
    assert exit_codes == [0, 0]
    return read_losses(log.with_suffix(".0").read_text())


def test_two_forked_processes_take_the_steps_of_one(prepared, tmp_path, dry_run, capsys):
    """The command of scripts/train.sh for two processes has the losses of the command for one."""
    command_for_one = make_training_command(prepared, tmp_path / "one", 1, UPDATES, capsys, WITHOUT_DROPOUT)
    _program, *arguments = command_for_one
    _, logged = run_cli(train.cli_main, *arguments)
    expected_losses = read_losses(logged)
    command_for_two = make_training_command(prepared, tmp_path / "two", 2, UPDATES, capsys, WITHOUT_DROPOUT)
    losses = run_forked(command_for_two, tmp_path / "two.log")
    assert_same_losses(losses, expected_losses, UPDATES)


def test_two_forked_processes_continue_an_interrupted_training(prepared, tmp_path, dry_run, capsys):
    """With dropout, too, the training ends, bit for bit, as one that is not interrupted."""
    whole_command = make_training_command(prepared, tmp_path / "whole", 2, UPDATES, capsys)
    whole_losses = run_forked(whole_command, tmp_path / "whole.log")
    first_command = make_training_command(prepared, tmp_path / "parts", 2, 7, capsys)
    first_losses = run_forked(first_command, tmp_path / "first.log")
    last_command = make_training_command(prepared, tmp_path / "parts", 2, UPDATES, capsys)
    last_losses = run_forked(last_command, tmp_path / "last.log")
    assert min(last_losses) == 8
    assert {**first_losses, **last_losses} == whole_losses
    assert_same_weights(tmp_path / "parts", tmp_path / "whole")


# ---- a training in one process that is killed


def read_time_of_change(path):
    """Returns the time at which a file was last written, in nanoseconds, or 0 if there is no such file."""
    if not path.exists():
        return 0
    return path.stat().st_mtime_ns


def wait_for_checkpoint_or_end(process, checkpoint, time_before):
    """Waits until a training has ended, or has written a checkpoint since a time.

    Args:
        process: the process of the training.
        checkpoint: the path of its last checkpoint.
        time_before: the time at which the checkpoint had last been written, as `read_time_of_change` returns it.
    """

    def is_saved_or_ended():
        """Returns whether the wait is over."""
        return not process.is_alive() or (checkpoint.exists() and read_time_of_change(checkpoint) != time_before)

    wait_for(is_saved_or_ended)


def test_a_training_that_is_killed_at_any_moment_ends_as_one_that_is_not_killed(data, tmp_path):
    """It is killed again and again while it writes checkpoints, and then continued.

    It writes a checkpoint after each update. It is killed up to 0.4 seconds after such a checkpoint. In this time, it
    makes further updates and writes their checkpoints. So it is likely, not sure, that it is killed while it writes.
    """
    arch = "transformer_synth_random_multi30k"
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    flags = ["--max-update", "60", *QUIET]
    train_model(data, whole, *flags, arch=arch)

    arguments = [data / "bin", *USER_DIR, "--arch", arch, *SMALL, *RECIPE, "--save-dir", killed, *flags]
    arguments += ["--save-interval-updates", "1", "--keep-interval-updates", "1", "--log-format", "none"]
    seed = int.from_bytes(os.urandom(4), "big")  # the moments differ from run to run
    print(f"seed of the moments: {seed}")
    moments = random.Random(seed)
    checkpoint = killed / "checkpoint_last.pt"
    # Each training that is killed is a fork of this process, because a fresh process would first have to import torch.
    context = torch.multiprocessing.get_context("fork")
    for _ in range(3):
        time_before = read_time_of_change(checkpoint)
        process = context.Process(target=run_cli, args=(train.cli_main, *arguments))
        process.start()
        wait_for_checkpoint_or_end(process, checkpoint, time_before)
        time.sleep(moments.uniform(0, 0.4))
        process.kill()
        process.join()

    train_model(data, killed, *flags, arch=arch)
    assert_same_weights(killed, whole)
    train_model(data, killed, *flags, arch=arch)  # nothing is left to do
    assert_same_weights(killed, whole)


# ---- torch's DistributedDataParallel


# For each rank, the numbers of tokens of the two sentences in its batch, for each of four steps. At every step, the two
# processes have sentences of other lengths.
LENGTHS = {0: [(2, 3), (20, 23), (5, 9), (1, 2)], 1: [(20, 23), (2, 3), (12, 16), (2, 1)]}


def make_variant(spec):
    """Returns a small model for translation with its initial weights, whose functions are `spec`, a variant."""
    name = spec.replace("+", "_")
    return make_model(f"transformer_synth_{name}_multi30k")


def make_source(length):
    """Returns a sentence of `length` tokens for the encoder: 5, 6, 7, ..., which are words of the dictionary."""
    return list(range(5, 5 + length))


def make_shifted_target(length):
    """Returns a sentence of `length` tokens for the decoder: 2, the end of sentence, then the words 5, 6, 7, ..."""
    words = range(5, 4 + length)
    return [2, *words]


def train_with_ddp(rank, folder):
    """Trains every variant in torch's DDP for four steps, and saves its weights. Each of two processes calls this.

    Args:
        rank: the number of the process, 0 or 1.
        folder: where the weights are saved, and where the processes find each other.
    """
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    for spec in VARIANTS:
        model = make_variant(spec).train()
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for lengths in LENGTHS[rank]:
            sources = [make_source(length) for length in lengths]
            targets = [make_shifted_target(length) for length in lengths]
            source_batch = pad_batch(sources, left=True)
            target_batch = pad_batch(targets, left=False)
            optimizer.zero_grad()
            logits, _ = parallel(source_batch, torch.tensor(lengths), target_batch)
            logits.logsumexp(-1).mean().backward()
            optimizer.step()
        torch.save(model.state_dict(), f"{folder}/{spec}-{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_with_ddp_keep_the_same_weights(tmp_path):
    """No parameter is without a gradient where torch's DDP expects one, and both processes have the same weights."""
    torch.multiprocessing.start_processes(train_with_ddp, (str(tmp_path),), nprocs=2, start_method="fork")
    for spec in VARIANTS:
        weights = torch.load(tmp_path / f"{spec}-0.pt")
        weights_of_second_process = torch.load(tmp_path / f"{spec}-1.pt")
        for name, weight in weights.items():
            assert torch.equal(weight, weights_of_second_process[name]), (spec, name)
        initial_weights = make_variant(spec).state_dict()
        trained_names = []
        for name, weight in weights.items():
            if name in initial_weights and not torch.equal(weight, initial_weights[name]):
                trained_names.append(name)
        assert "encoder.layers.0.self_attn.v_proj.weight" in trained_names
