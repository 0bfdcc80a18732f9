import pytest
import torch
from helpers import ROOT, make_data

import fairseq_synth.nested

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
    if request.module.__name__ not in ("test_cli", "test_processes", "test_recipes"):
        monkeypatch.setattr(fairseq_synth.nested, "CORE", 4)


@pytest.fixture(scope="session")
def multi30k():
    """The corpus beside the project, where it is at hand."""
    folder = ROOT.parent / "shared" / "data" / "multi30k"
    if not folder.is_dir():
        pytest.skip("Multi30k is not at hand")
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A corpus of a few hundred sentences, raw and binarised: the target is the source backwards."""
    return make_data(tmp_path_factory.mktemp("data"))
