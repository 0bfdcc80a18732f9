"""What an import changes: of the library nothing; of the plugin, with --user-dir, what fairseq's commands need."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import warm
from helpers import NO_THREAD, ROOT, SMALL, USER_DIR

# what others would notice
SNAPSHOT = """
import json, logging, sys, types, warnings
import fairseq.models, fairseq.options, fairseq.tasks, numpy as np, torch
from fairseq import checkpoint_utils, criterions, registry
from fairseq.data import data_utils
from hydra.core.config_store import ConfigStore

def snapshot():
    loggers = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
    own = [logger for logger in loggers if isinstance(logger, logging.Logger)]
    return {
        "excepthook": repr(sys.excepthook),
        "warnings": repr(warnings.filters),
        "handlers": repr([(logger.name, logger.handlers) for logger in own if logger.handlers]),
        "levels": repr([(logger.name, logger.level) for logger in own if logger.level]),
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
LIBRARY = """
import importlib, importlib.metadata, pkgutil, fairseq_synth
from fairseq_synth.attention import SyntheticAttention
from fairseq_synth.transformer import SynthesizerTransformer

newer_triton = any(d.metadata["Name"] == "triton" and d.version >= "3" for d in importlib.metadata.distributions())
modules = [m.name for m in pkgutil.walk_packages(fairseq_synth.__path__, "fairseq_synth.")]
modules = [m for m in modules if not m.endswith(("__main__", ".plugin"))]
if not newer_triton:  # the kernels alone load it, and only a newer one; an old one changes warnings
    modules = [m for m in modules if ".triton_" not in m]
for module in modules:
    importlib.import_module(module)
"""
# three errors of a program that knows the library
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
    raise SynthesizerError("mend it")
except SynthesizerError:
    undefined
"""


def python(code, *argv, folder=ROOT, fresh=False, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    return warm.run(["-c", code, *argv], cwd=folder, env=environment, fresh=fresh)


def test_the_library_changes_nothing():
    """Neither the package nor any of its modules, but for the plugin's entry."""
    done = python(SNAPSHOT + LIBRARY + "print(json.dumps([len(modules), before, snapshot()]))")
    assert done.returncode == 0, done.stderr
    number, before, after = json.loads(done.stdout)
    assert number > 30
    for what, value in before.items():
        assert after[what] == value, what


def test_the_package_loads_neither_torch_nor_fairseq():
    """Names of models are there for programs that start quickly."""
    code = "import fairseq_synth.names, sys; print({'torch', 'fairseq', 'numpy'} & set(sys.modules))"
    assert python(code, fresh=True).stdout == "set()\n"


@pytest.mark.parametrize("registered", [False, True], ids=["library", "plugin"])
@pytest.mark.parametrize(
    "code, last",
    [
        (FULL_DISK, "OSError: [Errno 28] No space left on device"),
        (OTHER_ERROR, "KeyError: 'mine'"),
        (WHILE_HANDLING, "NameError: name 'undefined' is not defined"),
    ],
    ids=["full-disk", "from-none", "while-handling"],
)
def test_errors_of_other_programs_keep_their_traceback(code, last, registered):
    """Also in a program that makes the plugin itself."""
    fresh = registered and code == OTHER_ERROR  # one of them in an interpreter that has imported nothing before
    done = python("import fairseq_synth.attention\n" + "fairseq_synth.register()\n" * registered + code, fresh=fresh)
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr and done.stderr.splitlines()[-1] == last


def test_registering_twice_changes_nothing_more():
    done = python(
        "import fairseq_synth; fairseq_synth.register()\n" + SNAPSHOT + "fairseq_synth.register()\n"
        "import fairseq_synth.models.plugin\nassert 'transformer_synth' in before['models']\n"
        "assert 'transformer_synth_random_multi30k' in before['architectures']\nassert snapshot() == before"
    )
    assert done.returncode == 0, done.stderr


def test_a_program_that_knew_the_library_before(data, tmp_path):
    """fairseq does not import a --user-dir again whose package is there already: `register` is for that."""
    code = "import fairseq_synth.attention; {}from fairseq_cli.train import cli_main; cli_main()"
    argv = [data / "bin", *USER_DIR, "--arch", "transformer_synth_random_multi30k", *SMALL, "--optimizer", "adam"]
    argv += ["--max-tokens", "200", "--max-update", "1", "--disable-validation", "--save-dir", tmp_path, "--cpu"]
    argv += NO_THREAD
    done = python(code.format("fairseq_synth.register(); "), *argv)
    assert done.returncode == 0 and (tmp_path / "checkpoint_last.pt").exists(), done.stderr


SPAWN = """
import sys, torch
from fairseq import distributed_utils, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli.train import main

if __name__ == "__main__":
    args = options.parse_args_and_arch(options.get_training_parser())
    cfg = convert_namespace_to_omegaconf(args)
    cfg.distributed_training.distributed_world_size = 2
    cfg.distributed_training.distributed_rank = None  # each worker has its own
    torch.multiprocessing.spawn(distributed_utils.distributed_main, (main, cfg, {"start_rank": 0}), nprocs=2)
"""


@pytest.mark.ci
@pytest.mark.slow
def test_spawned_workers_have_the_plugin(data, tmp_path):
    """As fairseq-train starts a process for each GPU: a fresh one, which gets the settings; here on CPUs."""
    (tmp_path / "spawn.py").write_text(SPAWN)
    argv = [data / "bin", *USER_DIR, "--arch", "transformer_synth_random_vanilla_multi30k", *SMALL, "--optimizer"]
    argv += ["adam", "--max-tokens", "200", "--max-update", "2", "--disable-validation", "--save-dir", tmp_path / "s"]
    argv += ["--cpu", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp", "--num-workers", "0"]
    argv += NO_THREAD
    argv += ["--distributed-init-method", f"file://{tmp_path}/store"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, tmp_path / "spawn.py", *argv]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240
    )
    assert done.returncode == 0 and (tmp_path / "s" / "checkpoint_last.pt").exists(), done.stderr


@pytest.fixture(scope="module")
def installed(make_once):
    """What ``pip install .`` of a clone leaves: the wheel's files, and its scripts in ``bin``."""
    pytest.importorskip("setuptools", minversion="61")  # the first to read pyproject.toml

    def make(folder):
        for name in ["fairseq_synth", "scripts", "configs", "pyproject.toml", "setup.py", "README.md"]:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
        build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
        done = subprocess.run([sys.executable, "-c", build], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        with zipfile.ZipFile(folder / "dist" / done.stdout.split()[-1]) as wheel:
            wheel.extractall(folder / "site")

    return make_once("wheel", make) / "site"


def test_the_wheel_is_whole(installed):
    """Every module, the configs, and the scripts that README.md names for a set-up of one's own."""

    def files(folder):
        return {path.relative_to(folder) for path in folder.rglob("*.*") if path.suffix in (".py", ".yaml")}

    assert files(ROOT / "fairseq_synth") <= files(installed / "fairseq_synth")
    assert files(ROOT / "configs") == files(installed / "fairseq_synth" / "configs")
    scripts = next(installed.glob("*.data/scripts"))
    assert sorted(path.name for path in scripts.iterdir()) == ["average_checkpoints.py", "classify.py"]
    for path in scripts.iterdir():
        assert path.read_text().startswith("#!python\n")  # pip writes its interpreter there
        done = warm.run([path, "--help"], env={**os.environ, "PYTHONPATH": installed})
        assert done.returncode == 0 and "--output" in done.stdout, done.stderr


def test_where_the_configs_are(installed, tmp_path):
    """In an installed package and in a clone; any other word is refused in one line."""
    for place, configs in ((installed, installed / "fairseq_synth" / "configs"), (ROOT, ROOT / "configs")):
        environment = {**os.environ, "PYTHONPATH": str(place)}
        done = warm.run(["-m", "fairseq_synth", "configs"], cwd=tmp_path, env=environment)
        assert done.stdout == f"{configs}\n" and "INFO" not in done.stderr, done.stderr
    done = warm.run(["-m", "fairseq_synth", "flags"], cwd=tmp_path, env=environment)
    rows = dict(re.findall(r"^\| `(--[a-z-]+)` \| `(.*?)` \| .{30,} \|$", done.stdout, re.M))
    assert rows["--encoder-synthesizer"] == rows["--decoder-synthesizer"] == "random+vanilla"
    assert rows["--synth-max-length"] == "256" and len(rows) == 8 and "INFO" not in done.stderr
    done = warm.run(["-m", "fairseq_synth", "config"], cwd=tmp_path, env=environment)
    assert done.returncode == 1 and not done.stdout and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("fairseq_synth: error: config: ") and "configs" in done.stderr
