"""Options and fixtures. They import torch and fairseq late: pytest-xdist's first process needs neither."""

import contextlib
import fcntl
import gc
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import warm

os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # this interpreter's programs first


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="of the tests of the attention and its computations: cpu or cuda")
    parser.addoption("--seed", type=int, default=0, help="of the random numbers of a test that sets no seed itself")
    parser.addoption("--all", action="store_true", help="what is left to .ci/run too: several fresh processes, kernels")
    parser.addoption("--kernels", action="store_true", help="all tests of the kernels for GPUs, not a chosen part")
    parser.addoption(
        "--corpora",
        type=Path,
        default=os.environ.get("CORPORA"),
        help="folder of real text: multi30k, lm, classification, glue, superglue, summarisation, dialogue (default: "
        "$CORPORA); tests of what is not there are skipped",
    )


def pytest_configure(config):
    if config.getoption("--device") == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported


def pytest_sessionstart(session):
    """One server of warm processes for all workers; the first process, which starts them, has it."""
    if "PYTEST_XDIST_WORKER" not in os.environ and hasattr(warm.socket, "send_fds"):
        session.config.warm_folder = tempfile.TemporaryDirectory(prefix="warm-")
        session.config.warm_server = warm.start(session.config.warm_folder.name)


def pytest_unconfigure(config):
    if hasattr(config, "warm_server"):
        warm.end(config.warm_server)
        config.warm_folder.cleanup()


def pytest_report_header(config):
    return f"seed {config.getoption('--seed')}; real text from {config.getoption('--corpora') or 'nowhere'}"


def pytest_collection_modifyitems(config, items):
    """The slow tests first, so that none of them is left to one worker in the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        if item.get_closest_marker("ci") and not config.getoption("--all"):
            item.add_marker(pytest.mark.skip(reason="left to .ci/run: --all"))


def pytest_collection_finish():
    """What is there by now stays: the garbage collector need not look through torch and fairseq each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed(request):
    """Every test starts from the same random numbers, in any order and on any worker."""
    import numpy as np
    import torch

    number = request.config.getoption("--seed")
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


@pytest.fixture
def on_device(request):
    """Tensors are made on the device of --device."""
    import torch

    with torch.device(request.config.getoption("--device")):
        yield


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The workers of pytest-xdist share the machine."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def composed_once():
    """fairseq's commands compose the same groups of their configuration again and again."""
    from unittest import mock

    from composed import composed_once
    from fairseq.dataclass import utils

    with mock.patch.object(utils, "compose", composed_once(utils.compose)):
        yield


@pytest.fixture(autouse=True, scope="session")
def nothing_for_gpus():
    """Without a GPU torch keeps, for each seed that is set, a trace of the caller, which is for when there is one."""
    from unittest import mock

    import torch

    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(torch.cuda.random, "_lazy_call", lambda *_, **__: None))
        yield


@pytest.fixture
def restore_registry():
    """Functions that a test registers are gone after it."""
    from unittest import mock

    from fairseq_synth.synthesizers import SYNTHESIZERS

    with mock.patch.dict(SYNTHESIZERS):
        yield


@pytest.fixture
def recipes_environment(monkeypatch):
    """Recipes set environment variables; here they end with the test."""
    for name in ("OMP_NUM_THREADS", "SACREBLEU", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.setenv(name, "1")
    for name in ("SACREBLEU", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name)


@contextlib.contextmanager
def programs_here():
    """fairseq's programs run in this process, which spares their imports. Tests of the whole way run the programs."""
    from fairseq_cli import eval_lm, generate, preprocess, train, validate
    from helpers import run_cli

    from recipes import prepare, score, steps
    from recipes import train as training

    mains = {"preprocess": preprocess, "train": train, "generate": generate, "eval-lm": eval_lm, "validate": validate}

    def run(argv, log=None, watch=None):
        main = mains.get(str(argv[0]).replace("fairseq-", ""))
        if not main or steps.dry_run():
            return steps.run(argv, log, watch)
        steps.show(argv)
        with open(log, "a" if watch else "w") as file:
            file.write("".join(run_cli(main.cli_main, *argv[1:], form="| %(levelname)s | %(name)s | %(message)s")))

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((prepare, "run"), (score, "run_command"), (training, "run_command")):
            patch.setattr(module, name, run)
        yield


@pytest.fixture
def programs_in_process(recipes_environment):
    with programs_here():
        yield


@pytest.fixture(scope="session")
def make_once(tmp_path_factory):
    """Makes what several tests read, once for all workers: shared(name, make) is the folder that `make` has filled."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def make_once(name, make):
        with open(base / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (base / name / "made").exists():
                shutil.rmtree(base / name, ignore_errors=True)
                (base / name).mkdir()
                make(base / name)
                (base / name / "made").touch()
        return base / name

    return make_once


@pytest.fixture(scope="session")
def prepared_corpus(make_once):
    """The folder of data of a name in small_text.PREPARED."""
    from small_text import PREPARED, prepare

    from recipes.prepare import main

    def made(name):
        def make(folder):
            other = made("wmt").parent if "{other}" in PREPARED[name][1] else folder
            with programs_here():
                prepare(name, folder, other, main)

        return make_once(f"small-{name}", make) / name

    return made


@pytest.fixture
def dry_run(monkeypatch):
    monkeypatch.setenv("DRY_RUN", "1")


def at_hand(request, name):
    """The folder of a corpus; the test is skipped where there is none."""
    corpora = request.config.getoption("--corpora")
    if not corpora or not Path(corpora, name).is_dir():
        pytest.skip(f"no folder {name} of real text; name the folder of such folders by --corpora=DIR")
    return Path(corpora, name)


@pytest.fixture
def real_text(request):
    """The folder of any corpus, by its name."""
    return lambda name: at_hand(request, name)


@pytest.fixture(scope="session")
def data(make_once):
    """A corpus of a few hundred sentences, raw and binarised: the target is the source backwards."""
    from helpers import make_data

    return make_once("data", make_data)


@pytest.fixture(scope="session")
def monolingual(make_once, data):
    """The source side alone, as language models and encoders read it."""
    from fairseq_cli import preprocess
    from helpers import run_cli

    def make(folder):
        argv = ["--only-source", "--srcdict", data / "bin" / "dict.en.txt", "--destdir", folder]
        for split in ("train", "valid"):
            (folder / f"{split}.txt").write_text((data / f"{split}.en").read_text())
            argv += [f"--{split}pref", folder / f"{split}.txt"]
        run_cli(preprocess.cli_main, *argv)

    return make_once("monolingual", make)
