"""Importing the library changes nothing elsewhere; the plugin, which --user-dir imports, changes only fairseq.

Further tests are of the installed package, and of what ``python -m fairseq_synth`` prints.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from unittest import mock

import pytest
import torch
import warm
from fairseq import checkpoint_utils
from helpers import NO_THREAD, ROOT, SMALL, USER_DIR

from fairseq_synth.errors import SynthesizerError
from fairseq_synth.host.versions import check_installed

# Code that takes a snapshot of all that other programs would notice, before anything of this project is imported.
SNAPSHOT = """
import json, logging, sys, types, warnings
import fairseq.models, fairseq.options, fairseq.tasks, numpy as np, torch
from fairseq import checkpoint_utils, criterions, registry
from fairseq.data import data_utils
from hydra.core.config_store import ConfigStore

def snapshot():
    known = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
    loggers = [logger for logger in known if isinstance(logger, logging.Logger)]
    return {
        "excepthook": repr(sys.excepthook),
        "warnings": repr(warnings.filters),
        "handlers": repr([(logger.name, logger.handlers) for logger in loggers if logger.handlers]),
        "levels": repr([(logger.name, logger.level) for logger in loggers if logger.level]),
        "numpy": sorted(name for name, value in vars(np).items() if not isinstance(value, types.ModuleType)),
        "safe": repr(getattr(torch.serialization, "get_safe_globals", list)()),
        "torch": repr([torch.load, torch.get_default_dtype(), torch.get_num_threads()]),
        "models": sorted(fairseq.models.MODEL_REGISTRY),
        "architectures": sorted(fairseq.models.ARCH_MODEL_REGISTRY),
        "criteria": sorted(criterions.CRITERION_REGISTRY),
        "tasks": sorted(fairseq.tasks.TASK_REGISTRY),
        "configs": repr(ConfigStore.instance().repo["model"].keys()),
        "fairseq": repr([data_utils.batch_by_size, checkpoint_utils.load_checkpoint_to_cpu]),
        "path": sys.path[:],
    }

before = snapshot()
"""
# Code that imports every module but the plugin's entry.
LIBRARY = """
import importlib, importlib.metadata, pkgutil, fairseq_synth
from fairseq_synth.attention import SyntheticAttention
from fairseq_synth.transformer import SynthesizerTransformer

modules = [module.name for module in pkgutil.walk_packages(fairseq_synth.__path__, "fairseq_synth.")]
modules = [name for name in modules if not name.endswith(("__main__", ".plugin"))]
has_newer_triton = False
for package in importlib.metadata.distributions():
    if package.metadata["Name"] == "triton" and package.version >= "3":
        has_newer_triton = True
if not has_newer_triton:  # only the kernels load Triton, and only a newer one; an old one changes warnings
    modules = [name for name in modules if ".triton_" not in name]
for name in modules:
    importlib.import_module(name)
"""
# Code that prints which of three packages, whose import takes long, have been imported.
PRINT_IMPORTED = "print({'torch', 'fairseq', 'numpy'} & set(sys.modules))"
# Programs that end with an error. The plugin has a line of its own for a full disk and for a SynthesizerError, but only
# within fairseq's commands.
FULL_DISK = "import errno\nraise OSError(errno.ENOSPC, 'No space left on device')"
OTHER_ERROR = """
try:
    open("/nowhere")
except OSError:
    raise KeyError("mine") from None
"""
WHILE_HANDLING = """
from fairseq_synth.errors import SynthesizerError
try:
    raise SynthesizerError("a message")
except SynthesizerError:
    undefined
"""


def run_code(code, *argv, fresh=False):
    """Runs ``python -c CODE ARGV...`` with this project on the path, and returns a subprocess.CompletedProcess.

    Args:
        code: the program.
        argv: its arguments.
        fresh: whether the interpreter starts without any imports; otherwise torch and fairseq are imported already.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
    return warm.run(["-c", code, *argv], cwd=ROOT, env=environment, fresh=fresh)


def test_the_library_changes_nothing():
    """Importing the package and all its modules but the plugin's entry leaves everything else as it was."""
    process = run_code(SNAPSHOT + LIBRARY + "print(json.dumps([len(modules), before, snapshot()]))")
    assert process.returncode == 0, process.stderr
    number_of_modules, before, after = json.loads(process.stdout)
    assert number_of_modules > 30
    for name, value in before.items():
        assert after[name] == value, name


def test_the_package_loads_neither_torch_nor_fairseq():
    """Therefore programs that need only the names of the models start at once."""
    process = run_code(f"import fairseq_synth.names, sys; {PRINT_IMPORTED}", fresh=True)
    assert process.stdout == "set()\n"


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_environment_switches_the_kernels(value):
    """The variable is read when the kernels are imported."""
    code = "from fairseq_synth.computations import kernels; print(kernels.SWITCH)"
    environment = {**os.environ, "PYTHONPATH": ROOT, "FAIRSEQ_SYNTH_KERNELS": value}
    process = warm.run(["-c", code], env=environment)
    assert process.stdout == f"{value}\n"


@pytest.mark.parametrize("is_registered", [False, True], ids=["library", "plugin"])
@pytest.mark.parametrize(
    "code, last_line",
    [
        (FULL_DISK, "OSError: [Errno 28] No space left on device"),
        (OTHER_ERROR, "KeyError: 'mine'"),
        (WHILE_HANDLING, "NameError: name 'undefined' is not defined"),
    ],
    ids=["full-disk", "from-none", "while-handling"],
)
def test_errors_of_other_programs_keep_their_traceback(code, last_line, is_registered):
    """The plugin's one-line errors are for fairseq's commands, not for a program that imports or registers it."""
    program = "import fairseq_synth.attention\n"
    if is_registered:
        program += "fairseq_synth.register()\n"
    program += code
    is_fresh = is_registered and code == OTHER_ERROR  # one case has to register in an interpreter without any imports
    process = run_code(program, fresh=is_fresh)
    assert process.returncode == 1
    assert "Traceback (most recent call last)" in process.stderr
    assert process.stderr.splitlines()[-1] == last_line
    assert "repaired fairseq" not in process.stderr  # this is logged only with LOGLEVEL=DEBUG


def test_registering_twice_changes_nothing_more():
    register_again = """
fairseq_synth.register()
import fairseq_synth.models.plugin
assert 'transformer_synth' in before['models']
assert 'transformer_synth_random_multi30k' in before['architectures']
assert snapshot() == before
"""
    process = run_code("import fairseq_synth; fairseq_synth.register()\n" + SNAPSHOT + register_again)
    assert process.returncode == 0, process.stderr


def test_register_makes_up_for_a_user_dir_that_is_imported_already(data, tmp_path):
    """fairseq does not import the package of --user-dir again, so a program that has imported it calls `register`."""
    code = (
        "import fairseq_synth.attention; fairseq_synth.register(); from fairseq_cli.train import cli_main; cli_main()"
    )
    argv = [data / "bin", *USER_DIR, "--arch", "transformer_synth_random_multi30k", *SMALL, "--optimizer", "adam"]
    argv += ["--max-tokens", "200", "--max-update", "1", "--disable-validation", "--save-dir", tmp_path, "--cpu"]
    process = run_code(code, *argv, *NO_THREAD)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "checkpoint_last.pt").exists()


def test_loading_a_checkpoint_leaves_torch_load_alone(tmp_path):
    """The plugin loads checkpoints with weights_only=True, and other programs' torch.load stays as it is."""
    torch_load = torch.load
    with pytest.raises(FileNotFoundError):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "missing.pt"))
    assert torch.load is torch_load


# Trains in this process and in a spawned one. fairseq-train spawns such a process for each GPU.
SPAWN = """
import signal, torch
from fairseq import distributed_utils, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli.train import main

if __name__ == "__main__":
    args = options.parse_args_and_arch(options.get_training_parser())
    cfg = convert_namespace_to_omegaconf(args)
    cfg.distributed_training.distributed_world_size = 2
    cfg.distributed_training.distributed_rank = None  # each process has its own
    signal.alarm(240)  # ends this process, which would wait for half an hour if the spawned one has failed
    spawned = torch.multiprocessing.spawn(
        distributed_utils.distributed_main, (main, cfg, {"start_rank": 1}), nprocs=1, join=False
    )
    distributed_utils.distributed_main(0, main, cfg, {"start_rank": 0})
    spawned.join()
"""


@pytest.mark.ci
@pytest.mark.slow
def test_spawned_workers_have_the_plugin(data, tmp_path):
    """A process that fairseq-train starts for a GPU is fresh, and gets the plugin by the settings; here on CPUs."""
    (tmp_path / "spawn.py").write_text(SPAWN)
    argv = [data / "bin", *USER_DIR, "--arch", "transformer_synth_random_vanilla_multi30k", *SMALL, "--optimizer"]
    argv += ["adam", "--max-tokens", "200", "--max-update", "2", "--disable-validation", "--save-dir", tmp_path / "s"]
    argv += ["--cpu", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp", "--num-workers", "0"]
    argv += NO_THREAD
    argv += ["--distributed-init-method", f"file://{tmp_path}/store"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = warm.run([tmp_path / "spawn.py", *argv], cwd=tmp_path, env=environment)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "s" / "checkpoint_last.pt").exists()


@pytest.fixture(scope="module")
def installed(make_once):
    """Returns the folder with the files of a wheel, as ``pip install`` of a clone leaves them.

    The scripts are in its folder *.data/scripts.
    """
    pytest.importorskip("setuptools", minversion="61")  # the first version that reads pyproject.toml

    def build_wheel(folder):
        """Builds the wheel from a copy of the project in a folder, and unpacks it in the subfolder site."""
        for name in ("fairseq_synth", "scripts", "configs"):
            shutil.copytree(ROOT / name, folder / name)
        for name in ("pyproject.toml", "setup.py", "README.md"):
            shutil.copy(ROOT / name, folder / name)
        build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
        process = subprocess.run([sys.executable, "-c", build], cwd=folder, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        file_name = process.stdout.split()[-1]
        with zipfile.ZipFile(folder / "dist" / file_name) as wheel:
            wheel.extractall(folder / "site")

    return make_once("wheel", build_wheel) / "site"


def list_files(folder):
    """Returns the paths of all Python and YAML files below a folder, relative to it."""
    return {path.relative_to(folder) for path in folder.rglob("*.*") if path.suffix in (".py", ".yaml")}


def test_the_wheel_is_whole(installed):
    """It has every module, the configs, and the scripts that README.md names for other set-ups."""
    assert list_files(ROOT / "fairseq_synth") <= list_files(installed / "fairseq_synth")
    assert list_files(ROOT / "configs") == list_files(installed / "fairseq_synth" / "configs")
    scripts = sorted(next(installed.glob("*.data/scripts")).iterdir())
    assert [path.name for path in scripts] == ["average_checkpoints.py", "classify.py"]
    for path in scripts:
        assert path.read_text().startswith("#!python\n")  # pip writes its interpreter there
        process = warm.run([path, "--help"], env={**os.environ, "PYTHONPATH": installed})
        assert process.returncode == 0, process.stderr
        assert "--output" in process.stdout, process.stderr


def run_package(*words, folder, path=ROOT):
    """Runs ``python -m fairseq_synth WORDS...``, and returns a subprocess.CompletedProcess.

    Args:
        words: the arguments.
        folder: the folder in which it runs.
        path: the folder that has the package.
    """
    environment = {**os.environ, "PYTHONPATH": path}
    return warm.run(["-m", "fairseq_synth", *words], cwd=folder, env=environment)


def test_the_folder_of_the_configs_is_printed(installed, tmp_path):
    """An installed package has the folder in itself, and a clone beside itself."""
    for path, configs in ((installed, installed / "fairseq_synth" / "configs"), (ROOT, ROOT / "configs")):
        process = run_package("configs", folder=tmp_path, path=path)
        assert process.stdout == f"{configs}\n", process.stderr
        assert "INFO" not in process.stderr, process.stderr


def test_the_flags_are_printed_with_their_defaults(tmp_path):
    process = run_package("flags", folder=tmp_path)
    defaults = dict(re.findall(r"^\| `(--[a-z-]+)` \| `(.*?)` \| .{30,} \|$", process.stdout, re.M))
    assert defaults["--encoder-synthesizer"] == "random+vanilla"
    assert defaults["--decoder-synthesizer"] == "random+vanilla"
    assert defaults["--synth-max-length"] == "256"
    assert len(defaults) == 8
    assert "INFO" not in process.stderr


def test_a_missing_torch_is_named_in_one_line():
    """The error is raised before anything is imported."""
    with mock.patch.object(metadata, "version", side_effect=metadata.PackageNotFoundError("torch")):
        with pytest.raises(SynthesizerError, match="^torch is not installed here; supported: Python 3.10 with [^\n]*$"):
            check_installed()


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_explains_the_words(word, tmp_path):
    """It does so without an import of torch or fairseq, which takes seconds."""
    code = f"import runpy, sys; runpy.run_module('fairseq_synth', run_name='__main__'); {PRINT_IMPORTED}"
    process = run_code(code, word, fresh=True)
    assert process.returncode == 0, process.stderr
    assert not process.stderr, process.stderr
    *help_lines, imported = process.stdout.splitlines()
    assert help_lines[0].startswith("usage: python -m fairseq_synth ")
    assert imported == "set()"
    assert any(line.startswith("configs ") for line in help_lines)
    assert any(line.startswith("flags ") for line in help_lines)


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_help_of_the_tools_comes_at_once(command):
    """It is printed without an import of torch or fairseq, which takes seconds."""
    code = (
        "import sys\n"
        f"from fairseq_synth.{command}.__main__ import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit:\n"
        f"    {PRINT_IMPORTED}\n"
    )
    process = run_code(code, fresh=True)
    assert process.returncode == 0, process.stderr
    assert not process.stderr, process.stderr
    *help_lines, imported = process.stdout.splitlines()
    assert help_lines[0].startswith(f"usage: python -m fairseq_synth.{command} ")
    assert imported == "set()"


def test_another_word_is_refused_in_one_line(tmp_path):
    process = run_package("config", folder=tmp_path)
    assert process.returncode == 1
    assert not process.stdout
    assert len(process.stderr.splitlines()) == 1
    assert process.stderr.startswith("fairseq_synth: error: config: ")
    assert "configs" in process.stderr
