"""Runs of several processes, and of some that are killed, on CPUs: by scripts/train.sh (--all), and by fork."""

import functools
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
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
QUIET = ["--disable-validation", "--no-epoch-checkpoints"]
UPDATES = 40  # some three epochs


def arguments(data, save, processes, max_update, *flags, timeout=600):
    """Of scripts/train.sh, for batches of 200 tokens in all."""
    argv = [data, ARCH, "--save-dir", save, "--gpus", 0]
    argv += ["--processes", processes, "--batch-tokens", 200, "--max-tokens", 100, "--max-update", max_update]
    argv += ["--timeout", timeout, "--seed", 7, "--", *SMALL, *RECIPE[:8], *RECIPE[10:-2], *QUIET, *flags]
    return list(map(str, argv))


def start(*args, **kwargs):
    """scripts/train.sh with these `arguments`, started."""
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return subprocess.Popen(
        [str(ROOT / "scripts" / "train.sh"), *arguments(*args, **kwargs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
    )


def finish(process, code=0):
    output = process.communicate(timeout=300)[0]
    assert process.returncode == code, output
    return output


def weights(save):
    state = checkpoint_utils.load_checkpoint_to_cpu(str(save / "checkpoint_last.pt"))
    return used_weights(state["model"]), state["optimizer_history"][-1]["num_updates"]


def assert_same_weights(one, other):
    (a, updates), (b, others) = weights(one), weights(other)
    assert updates == others
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def prepared(data):
    """The corpus, marked as scripts/prepare.sh marks what it has finished."""
    steps.dump(data / "settings.json", {"task": "translation", "src": "en", "tgt": "de"})
    (data / "bin" / "done").touch()
    return data


@pytest.fixture(scope="module")
def two(prepared, tmp_path_factory):
    """Two processes, without interruption."""
    save = tmp_path_factory.mktemp("two")
    finish(start(prepared, save, 2, UPDATES))
    return save, read_losses((save / "train.log").read_text())


def workers(process):
    """The training processes, below torchrun, which is below the recipe."""
    below = [pid for torchrun in children(process.pid) for pid in children(torchrun)]
    return [pid for pid in below if b"fairseq-train" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.ci
def test_two_processes_take_the_steps_of_one(prepared, two, tmp_path, dry_run, monkeypatch, capsys):
    """The same batch, split over processes or over passes: the same losses."""
    recipe.main(arguments(prepared, tmp_path, 1, UPDATES, "--dropout", "0"))
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])  # that train.sh would run; here in this process
    assert command[:2] == ["+", "fairseq-train"]
    one = read_losses(run_cli(train.cli_main, *command[2:])[1])
    monkeypatch.delenv("DRY_RUN")
    finish(start(prepared, tmp_path / "two", 2, UPDATES, "--dropout", "0"))
    split = read_losses((tmp_path / "two" / "train.log").read_text())
    assert list(one) == list(split) == list(range(1, UPDATES + 1))
    for update in one:
        assert float(split[update]) == pytest.approx(float(one[update]), abs=0.002)
    assert split != two[1]  # dropout does something


@pytest.mark.ci
def test_killed_processes_resume(prepared, two, tmp_path):
    """Both processes killed in the second epoch and started again: bit for bit the run that was not."""
    flags = ["--save-interval-updates", "3", "--keep-interval-updates", "1"]
    process = start(prepared, tmp_path, 2, UPDATES, *flags)
    wait_for(lambda: list(tmp_path.glob("checkpoint_2_*.pt")))
    for pid in [*workers(process), *children(process.pid), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert weights(tmp_path)[1] < UPDATES
    finish(start(prepared, tmp_path, 2, UPDATES, *flags))
    assert "Loaded checkpoint" in (tmp_path / "train.log").read_text()
    assert_same_weights(tmp_path, two[0])


@pytest.mark.ci
def test_a_dead_peer_ends_the_run(prepared, tmp_path):
    process = start(prepared, tmp_path, 2, 100000)
    wait_for(lambda: (tmp_path / "train.log").exists() and "num_updates" in (tmp_path / "train.log").read_text())
    os.kill(workers(process)[1], signal.SIGKILL)
    begin = time.time()
    finish(process, code=1)
    output = (tmp_path / "train.log").read_text()
    assert time.time() - begin < 60
    # torchrun's report names the process that died; the other one, if it was not ended first, says what it saw
    assert re.search(r"exitcode *: -9", output)
    assert (
        "Traceback" not in output
        or "another process of this run has ended or hangs" in output
        or "[rank0]" not in output
    )


@pytest.mark.ci
def test_a_hanging_peer_ends_the_run(prepared, tmp_path):
    """After --timeout. The stopped one goes on then, else torchrun waits 30 seconds for it before it kills it."""
    process = start(prepared, tmp_path, 2, 100000, timeout=5)
    log = tmp_path / "train.log"
    wait_for(lambda: log.exists() and "num_updates" in log.read_text())
    stopped = workers(process)[1]
    os.kill(stopped, signal.SIGSTOP)
    wait_for(lambda: "not making progress in 5 seconds" in log.read_text() and workers(process) == [stopped])
    os.kill(stopped, signal.SIGCONT)
    finish(process, code=1)


def as_torchrun(command, log):
    """Runs a command of torchrun's by fork: two workers with the environment that it gives them; rank 0's losses."""
    (worker,) = (word for word in command if word.endswith("cpu_worker.sh"))
    flags = Path(worker).read_text().split('exec fairseq-train "$@" ')[1].replace("\\\n", "")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def work(rank):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        argv = [*command[command.index(worker) + 1 :], *shlex.split(os.path.expandvars(flags))]
        log.with_suffix(f".{rank}").write_text(run_cli(train.cli_main, *argv)[1])

    context = torch.multiprocessing.get_context("fork")
    processes = [context.Process(target=work, args=(rank,)) for rank in (0, 1)]
    for process in processes:
        process.daemon = True  # ended with this one
        process.start()
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0, 0]
    return read_losses(log.with_suffix(".0").read_text())


def test_two_forked_processes_take_the_steps_of_one(prepared, tmp_path, dry_run, capsys):
    """The command of scripts/train.sh for two processes: the same losses as of one, and, in two parts, the same run."""

    def shown(save, processes, updates):
        recipe.main(arguments(prepared, tmp_path / save, processes, updates, "--dropout", "0"))
        return shlex.split(capsys.readouterr().out.splitlines()[-1])

    one = read_losses(run_cli(train.cli_main, *shown("one", 1, 12)[2:])[1])
    whole = as_torchrun(shown("two", 2, 12), tmp_path / "two.log")
    first = as_torchrun(shown("parts", 2, 7), tmp_path / "first.log")
    last = as_torchrun(shown("parts", 2, 12), tmp_path / "last.log")
    assert list(one) == list(whole) == list(range(1, 13)) and {**first, **last} == whole and min(last) == 8
    for update in one:
        assert float(whole[update]) == pytest.approx(float(one[update]), abs=0.002)
    assert_same_weights(tmp_path / "two", tmp_path / "parts")


def changed(path, before, process):
    return not process.is_alive() or (path.exists() and path.stat().st_mtime_ns != before)


def test_killed_at_any_moment(data, tmp_path):
    """Killed again and again while it writes checkpoints, a run ends with the weights of one that was not."""
    arch = "transformer_synth_random_multi30k"
    train_model(data, tmp_path / "whole", "--max-update", "60", *QUIET, arch=arch)
    save = tmp_path / "killed"
    argv = [data / "bin", *USER_DIR, "--arch", arch, *SMALL, *RECIPE, "--save-dir", save, *QUIET]
    argv += [
        "--save-interval-updates",
        "1",
        "--keep-interval-updates",
        "1",
        "--max-update",
        "60",
        "--log-format",
        "none",
    ]
    seed = int.from_bytes(os.urandom(4), "big")  # other moments in every run
    print(f"seed of the moments: {seed}")
    last, rng = save / "checkpoint_last.pt", random.Random(seed)
    for _ in range(3):
        before = last.stat().st_mtime_ns if last.exists() else 0
        process = torch.multiprocessing.get_context("fork").Process(target=run_cli, args=(train.cli_main, *argv))
        process.start()
        wait_for(functools.partial(changed, last, before, process))
        time.sleep(rng.uniform(0, 0.4))
        process.kill()
        process.join()
    train_model(data, save, "--max-update", "60", *QUIET, arch=arch)
    assert_same_weights(tmp_path / "whole", save)
    train_model(data, save, "--max-update", "60", *QUIET, arch=arch)  # it stays as it is
    assert_same_weights(tmp_path / "whole", save)


LENGTHS = [[(2, 3), (20, 23), (5, 9), (1, 2)], [(20, 23), (2, 3), (12, 16), (2, 1)]]  # of sentences, for each process


def in_ddp(rank, folder):
    """What one of two processes does in torch's DDP."""
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    train_variants(rank, folder)
    torch.distributed.destroy_process_group()


def train_variants(rank, folder):
    """Four steps of every variant, each process with sentences of other lengths."""
    for spec in VARIANTS:
        model = make_model(f"transformer_synth_{spec.replace('+', '_')}_multi30k").train()
        model.encoder.embed_tokens.weight.requires_grad_(True)
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in LENGTHS[rank]:
            sentences = pad_batch([[5 + i % 30 for i in range(n)] for n in step], left=True)
            targets = pad_batch([[2, *range(5, 4 + n)] for n in step], left=False)
            optimizer.zero_grad()
            parallel(sentences, torch.tensor(step), targets)[0].logsumexp(-1).mean().backward()
            optimizer.step()
        torch.save(model.state_dict(), f"{folder}/{spec}-{rank}.pt")


def test_ddp(tmp_path):
    """No parameter goes without a gradient where torch expects one, and the processes stay together."""
    torch.multiprocessing.start_processes(in_ddp, (str(tmp_path),), nprocs=2, start_method="fork")
    for spec in VARIANTS:
        one, other = (torch.load(tmp_path / f"{spec}-{rank}.pt") for rank in (0, 1))
        start = make_model(f"transformer_synth_{spec.replace('+', '_')}_multi30k").state_dict()
        assert all(torch.equal(one[key], other[key]) for key in one), spec
        moved = [key for key in one if key in start and not torch.equal(one[key], start[key])]
        assert "encoder.layers.0.self_attn.v_proj.weight" in moved
