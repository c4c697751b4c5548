"""What all tests share: one coder cache for the whole run, kept apart from the user's."""

import signal
from pathlib import Path

import pytest
import torch

# The suite runs in one process per core (pytest -n auto); threads on top of that only get in each other's way.
torch.set_num_threads(1)
# A script's background ignores Ctrl-C, and so does whatever is started there; tests of Ctrl-C send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def coder_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Workers of one run share the folder, so that a coder is fitted once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "torch-hub"
    torch.hub.set_dir(str(folder))
    return folder


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def no_cache(tmp_path: Path) -> object:
    """An empty coder cache for one test."""
    before = torch.hub.get_dir()
    torch.hub.set_dir(str(tmp_path / "hub"))
    yield tmp_path / "hub"
    torch.hub.set_dir(before)
