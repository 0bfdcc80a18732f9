import os
import sys

import pytest
import torch
from helpers import ROOT, make_data

import fairseq_synth.nested

os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # this interpreter's programs first
torch.set_num_threads(1)  # the workers of pytest-xdist share the machine


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="of the tests of the attention and its computations: cpu or cuda")


@pytest.fixture
def on_device(request):
    """Tensors are made on the device of --device."""
    with torch.device(request.config.getoption("--device")):
        yield


@pytest.fixture(autouse=True)
def small_blocks(request, monkeypatch):
    """The small matrices of the tests have several blocks; where other processes train, theirs are as usual."""
    if request.module.__name__ not in ("test_cli", "test_processes", "test_recipes", "test_tasks", "test_text_recipes"):
        monkeypatch.setattr(fairseq_synth.nested, "CORE", 4)


@pytest.fixture
def recipes_environment(monkeypatch):
    """Recipes set environment variables; here they end with the test."""
    for name in ("OMP_NUM_THREADS", "SACREBLEU"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("SACREBLEU")


@pytest.fixture
def dry(monkeypatch):
    monkeypatch.setenv("DRY_RUN", "1")


def at_hand(name):
    """The folder of a corpus beside the project; the test is skipped where there is none."""
    folder = ROOT.parent / "shared" / "data" / name
    if not folder.is_dir():
        pytest.skip(f"{name} is not at hand")
    return folder


@pytest.fixture(scope="session")
def multi30k():
    return at_hand("multi30k")


@pytest.fixture(scope="session")
def lm_corpora():
    return at_hand("lm")


@pytest.fixture(scope="session")
def classification_corpora():
    return at_hand("classification")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A corpus of a few hundred sentences, raw and binarised: the target is the source backwards."""
    return make_data(tmp_path_factory.mktemp("data"))
