"""Options of the test suite, what it prints at the start and at the end, and the fixtures that several files use.

The fixtures that tests name as parameters:

- folders with data, which tests must not change: `data`, `monolingual`, `prepared_corpus`, `real_text`, and `make_once`
  to make another one
- changes that are undone after the test: `on_device`, `restore_registry`, `dry_run`, `recipes_environment`,
  `programs_in_process`

torch and fairseq are imported late, because the first process of pytest-xdist, which only gives out the tests to the
workers, needs neither.
"""

import contextlib
import fcntl
import gc
import os
import random
import re
import shlex
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import warm

# the programs that are installed beside this interpreter, such as fairseq-train, come first
os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"

# CPU time of the whole suite in minutes, for the estimate that is printed at the start
CPU_MINUTES = {"default": 10, "--kernels": 28, "--all": 17}


# ---- options


def pytest_addoption(parser):
    group = parser.getgroup("fairseq_synth")
    group.addoption("--kernels", action="store_true", help="run all tests of the GPU kernels, not only a few")
    group.addoption(
        "--all",
        action="store_true",
        help="run the tests of .ci/run: most tests of the kernels, torch.compile, training in several processes, and "
        "the scripts in a locale without UTF-8",
    )
    group.addoption(
        "--corpora",
        type=Path,
        default=os.environ.get("CORPORA") or None,  # an empty variable is as good as none
        help="folder with real text in subfolders multi30k, lm, classification, glue, superglue, summarisation and "
        "dialogue (default: $CORPORA); the tests of a missing subfolder are skipped",
    )
    group.addoption("--device", default="cpu", help="where attention is tested: cpu (default) or cuda")
    group.addoption("--seed", type=int, default=0, help="seed of the random numbers at the start of every test")


def pytest_configure(config):
    if config.getoption("--device") == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    if not is_worker():
        config.warm_server = warm.Server()
        config.warm_server.start()


def pytest_unconfigure(config):
    if hasattr(config, "warm_server"):
        config.warm_server.stop()


def is_worker():
    """Returns whether this process is a worker of pytest-xdist, and not the process that has started the workers."""
    return "PYTEST_XDIST_WORKER" in os.environ


# ---- which tests run, where, and in which order


@pytest.hookimpl(optionalhook=True)  # because pytest-xdist, which has this hook, may not be installed
def pytest_xdist_auto_num_workers(config):
    """Returns 0 as the number of workers if the command line names single tests, and otherwise leaves it to xdist.

    A worker takes some seconds to start, which is longer than most tests take.
    """
    has_only_single_tests = bool(config.args) and all("::" in argument for argument in config.args)
    if is_name_of_test(config.option.keyword) or has_only_single_tests:
        return 0
    return None


def pytest_ignore_collect(collection_path, config):
    """Saves time if -k names a test: leaves out all files of tests in which the name does not occur."""
    if not is_name_of_test(config.option.keyword) or not collection_path.is_file():
        return None
    # pytest compares names without regard to upper and lower case
    name_occurs = config.option.keyword.lower() in collection_path.read_text().lower()
    if name_occurs:
        return None
    return True


def is_name_of_test(keyword):
    """Returns whether the value of -k chooses tests by their own name, and not by the name of their file.

    ``-k test_help`` does. But ``-k test_train`` chooses all tests of the file test_train.py.
    """
    names_of_files = {file.stem for file in Path(__file__).parent.rglob("test_*.py")}
    return re.fullmatch(r"test_\w+", keyword) is not None and keyword not in names_of_files


def pytest_collection_modifyitems(config, items):
    """Puts slow tests first, so that no worker is left with them in the end, and skips what needs --all."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        if item.get_closest_marker("ci") and not config.getoption("--all"):
            item.add_marker(pytest.mark.skip(reason="runs with --all, as in .ci/run"))


def pytest_collection_finish():
    """Saves time: the garbage collector need not look through the objects that were made by importing torch."""
    gc.collect()
    gc.freeze()


# ---- what is printed: the number of tests and their time at the start, and at the end how to repeat a failed test


def pytest_report_collectionfinish(config, items):
    """Returns the line that describes the run, which pytest prints if this process runs the tests itself."""
    return describe_run(config, tests=len(items), workers=1)


@pytest.hookimpl(optionalhook=True)  # because pytest-xdist, which has this hook, may not be installed
def pytest_xdist_node_collection_finished(node, ids):
    """Prints the line that describes the run, once, if workers run the tests."""
    config = node.config
    if not hasattr(config, "is_described"):
        config.is_described = True
        line = describe_run(config, tests=len(ids), workers=config.getoption("numprocesses"))
        config.pluginmanager.get_plugin("terminalreporter").write_line(line)


def describe_run(config, tests, workers):
    """Returns a line with the number of tests, the time of the whole suite, and the options that matter."""
    worker_count = "1 worker" if workers == 1 else f"{workers} workers"
    words = [f"{tests} tests on {worker_count}"]
    is_whole_suite = config.args_source.name == "TESTPATHS" and not config.option.keyword and not config.option.markexpr
    if is_whole_suite:
        option = next((option for option in ("--all", "--kernels") if config.getoption(option)), "default")
        minutes = CPU_MINUTES[option] / min(workers, os.cpu_count())
        words.append(f"about {minutes:.0f} minutes on a machine that does nothing else")
    words.append(f"seed {config.getoption('--seed')}")
    words.append(f"real text from {config.getoption('--corpora') or 'nowhere (--corpora=DIR)'}")
    return "; ".join(words)


def pytest_terminal_summary(terminalreporter, config):
    """Prints the commands that repeat the failed tests, each alone."""
    failed = [*terminalreporter.stats.get("failed", []), *terminalreporter.stats.get("error", [])]
    if not failed:
        return
    options = []
    for name in ("--all", "--kernels"):
        if config.getoption(name):
            options.append(name)
    for name, default in (("--corpora", None), ("--device", "cpu"), ("--seed", 0)):
        if config.getoption(name) != default:
            options.append(f"{name}={config.getoption(name)}")
    terminalreporter.section("to repeat a failed test alone")
    for test in dict.fromkeys(report.nodeid for report in failed):  # once, if it failed in several phases
        terminalreporter.write_line(shlex.join(["./scripts/test.sh", "-n", "0", *options, test]))


# ---- fixtures that every test has


@pytest.fixture(autouse=True)
def seed_random_numbers(request):
    """Sets the seed of torch, numpy and random before every test, so that a test does not depend on earlier tests."""
    import numpy as np
    import torch

    seed = request.config.getoption("--seed")
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@pytest.fixture(autouse=True, scope="session")
def limit_torch_to_one_thread():
    """Lets torch use one core, so that the other workers can use the other cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def cache_configurations():
    """Saves half a second of each command of fairseq by reusing parts of its configuration; see compose_cache.py."""
    import hydra.initialize  # noqa: F401
    from compose_cache import CachedCompose, find_calling_file
    from fairseq.dataclass import utils

    # The attribute `hydra.initialize` is a class, not the module of the same name.
    hydra_initialize = sys.modules["hydra.initialize"]
    with (
        mock.patch.object(utils, "compose", CachedCompose(utils.compose)),
        mock.patch.object(hydra_initialize, "detect_calling_file_or_module_from_stack_frame", find_calling_file),
    ):
        yield


@pytest.fixture(autouse=True, scope="session")
def forget_seeds_of_gpus():
    """Saves time and memory on a machine without a GPU.

    Whenever a seed is set, torch stores it for each kind of GPU, together with a traceback, in case one is used later.
    """
    import torch

    if torch.cuda.is_available():
        yield
        return
    with contextlib.ExitStack() as patches:
        for name in ("cuda", "xpu", "mtia"):  # NVIDIA, Intel and Meta
            gpus = getattr(torch, name, None)
            if hasattr(gpus, "manual_seed_all"):  # older versions of torch do not have all three
                patches.enter_context(mock.patch.object(gpus, "manual_seed_all", lambda seed: None))
        yield


# ---- fixtures that change something for one test


@pytest.fixture
def on_device(request):
    """Lets the test make its tensors on the device of the option --device: cpu or cuda."""
    import torch

    device = request.config.getoption("--device")
    if device == "cpu":
        # This is torch's default. To set it would change nothing, but every call of torch would take longer.
        yield
        return
    with torch.device(device):
        yield


@pytest.fixture
def restore_registry():
    """Lets the test register functions with @register_synthesizer, which are removed after the test."""
    from fairseq_synth.synthesizers import SYNTHESIZERS

    with mock.patch.dict(SYNTHESIZERS):
        yield


@pytest.fixture
def dry_run(monkeypatch):
    """Sets the environment variable DRY_RUN=1, so that the commands of recipes/ only print what they would run."""
    monkeypatch.setenv("DRY_RUN", "1")


@pytest.fixture
def recipes_environment(monkeypatch):
    """Lets the test call commands of recipes/: the environment variables that they set are restored after the test."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("SACREBLEU", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"):
        # monkeypatch restores only variables that it has changed itself
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def programs_in_process(recipes_environment):
    """Lets the commands of recipes/ call fairseq-train, fairseq-preprocess etc. in this process, which saves time."""
    from helpers import run_programs_in_process

    with run_programs_in_process():
        yield


# ---- fixtures that provide data


@pytest.fixture(scope="session")
def make_once(tmp_path_factory):
    """Provides a function ``make_once(name, make)``, which returns a folder that all workers share.

    The first test that asks for the folder `name` fills it by calling make(folder). Tests must not write into it.
    """
    base = tmp_path_factory.getbasetemp()
    if is_worker():
        base = base.parent  # the folder of all workers

    def make_once(name, make):
        folder = base / name
        finished = base / f"{name}.finished"
        with open(base / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not finished.exists():
                shutil.rmtree(folder, ignore_errors=True)  # what is left of a failed try
                folder.mkdir()
                make(folder)
                finished.touch()
        return folder

    return make_once


@pytest.fixture(scope="session")
def data(make_once):
    """A folder with data for translation: random English sentences, whose German translation is the same backwards.

    It has the text in the files train.en, train.de, valid.en, valid.de, test.en and test.de. The subfolder ``bin`` has
    the same text as fairseq-preprocess binarises it, and a subset test1, whose sentences are longer than the small
    models of the tests allow. The sizes are 300, 13, 21 and 3 sentences.
    """
    from helpers import make_data

    return make_once("data", make_data)


@pytest.fixture(scope="session")
def monolingual(make_once, data):
    """A folder with the English sentences of `data`, binarised for language models and encoders: train and valid."""
    from fairseq_cli import preprocess
    from helpers import run_cli

    def make(folder):
        argv = ["--only-source", "--srcdict", data / "bin" / "dict.en.txt", "--destdir", folder]
        for split in ("train", "valid"):
            (folder / f"{split}.txt").write_text((data / f"{split}.en").read_text())
            argv += [f"--{split}pref", folder / f"{split}.txt"]
        run_cli(preprocess.cli_main, *argv)

    return make_once("monolingual", make)


@pytest.fixture(scope="session")
def prepared_corpus(make_once):
    """Provides a function ``prepared_corpus(name)``, which returns a folder that scripts/prepare.sh has made.

    `name` is one of the small corpora in the dictionary SMALL_CORPORA of small_text.py.
    """
    # These imports are late because they import torch and fairseq; see the beginning of this file.
    from helpers import run_programs_in_process
    from small_text import SMALL_CORPORA, prepare

    from recipes.prepare import main

    def prepare_corpus(name):
        """Returns the folder of this corpus, which is prepared when the first test asks for it."""
        # A command with "--like {other}/wmt" prepares its text like the corpus wmt, which has to be prepared before.
        # Then {other} stands for the folder that contains the prepared "wmt". Other commands do not have {other}.
        needs_wmt = "{other}" in SMALL_CORPORA[name].command
        folder_of_wmt = prepare_corpus("wmt").parent if needs_wmt else None

        def make(folder):
            """Prepares the corpus in the subfolder `name` of a folder."""
            with run_programs_in_process():
                prepare(name, folder, folder_of_wmt, main)

        return make_once(f"small-{name}", make) / name

    return prepare_corpus


@pytest.fixture
def real_text(request):
    """Provides a function ``real_text(name)``, which returns a subfolder of the folder --corpora with real text.

    Without this subfolder, the test is skipped.
    """

    def find_folder(name):
        corpora = request.config.getoption("--corpora")
        if not corpora or not Path(corpora, name).is_dir():
            pytest.skip(f"needs a folder {name} of real text in the folder that --corpora=DIR names")
        return Path(corpora, name)

    return find_folder
