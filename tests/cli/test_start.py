"""How the command starts: at once where it has nothing to compute, and so that Ctrl-C ends it at any time."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import unskip

SOURCE = Path(unskip.__file__).parents[1]
SENTENCE = "Interrupted. Nothing is left half written; the same command begins anew.\n"
SCRIPT = "import sys\nfrom unskip.cli import main\nsys.exit(main())\n"  # as pip writes it
INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == os.environ["INTERRUPTED_IMPORT"]:
            sys.meta_path.remove(self)
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                pass  # as some modules do that try what there is to import

sys.meta_path.insert(0, Interrupt())
"""


def python(*words: str, ahead: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*([] if ahead is None else [str(ahead)]), str(SOURCE)])
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("words", "code", "answer"),
    [
        ("--help", 0, "Very deep networks without skip connections"),
        ("--version", 0, f"unskip {unskip.__version__}"),
        ("bench --help", 0, "Ratios are to the first"),
        ("train digits-pnnh-56 --help", 0, "The folder of the run"),
        ("reproduce --help", 0, "Hu, Figure 6"),
        ("models pnnh_resnet110", 0, "0.863"),
        ("trian", 2, "No such command 'trian'"),
        ("bench --bogus", 2, "--bogus"),
        ("reproduce pnnh-tabel4", 2, "pnnh-table4"),
    ],
)
def test_what_needs_no_network_is_answered_without_torch(words: str, code: int, answer: str) -> None:
    done = python("-X", "importtime", "-m", "unskip", *words.split(), COLUMNS="150")
    assert done.returncode == code
    assert answer in done.stdout + done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "typer" in imported
    assert not imported & {"torch", "torchvision", "timm", "numpy", "matplotlib"}


def test_the_installed_command_is_as_quick(tmp_path: Path) -> None:
    (tmp_path / "unskip").write_text(SCRIPT)
    done = python("-X", "importtime", str(tmp_path / "unskip"), "--help")
    assert done.returncode == 0
    assert "reproduce" in done.stdout
    assert "| unskip.cli" in re.sub(r"\| +", "| ", done.stderr)
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)


@pytest.fixture
def interrupting(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command to which Ctrl-C comes as a module's import begins."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED_IMPORT)

    def run(module: str, *words: str) -> subprocess.CompletedProcess[str]:
        return python(*words, ahead=tmp_path, INTERRUPTED_IMPORT=module)

    return run


@pytest.mark.parametrize("module", ["typer", "unskip.cli.commands", "torch", "torch.nn"])
def test_ctrl_c_while_it_imports_is_one_sentence_too(
    module: str, interrupting: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = interrupting(module, "-m", "unskip", "models", "--methods")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", SENTENCE)


def test_where_ctrl_c_is_ignored_it_stays_ignored(
    interrupting: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # what a child inherits, as from nohup
    try:
        done = interrupting("typer", "-m", "unskip", "--help")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stderr) == (0, "")
    assert "reproduce" in done.stdout


# What whoever imports the package finds: our names in timm's registry, our operators in torch's, the rooms.
LIBRARY = """
import sys
import unskip
{first}
import timm
assert timm.is_model("pnnh_resnet110")
import torch
assert torch.ops.unskip.depthwise
rooms = [unskip.coders, unskip.doctor, unskip.measures, unskip.methods, unskip.models, unskip.ship, unskip.surgery]
rooms += [unskip.theory, unskip.train]
assert [unskip.plainify, unskip.create_model] == [unskip.surgery.plainify, unskip.models.create_model]
from unskip import diagnose, export, fold, param_groups, verify
assert not hasattr(unskip, "plainfy")
"""


def test_whoever_imports_the_package_has_all_of_it() -> None:
    done = python("-c", LIBRARY.format(first="assert 'torch' in sys.modules"), "unskip")
    assert (done.returncode, done.stderr) == (0, "")


def test_within_the_command_the_package_is_whole_as_soon_as_a_name_is_asked_for(tmp_path: Path) -> None:
    first = "assert not hasattr(unskip, '__wrapped__') and 'torch' not in sys.modules\nassert unskip.fold"
    (tmp_path / "unskip").write_text(LIBRARY.format(first=first))
    done = python(str(tmp_path / "unskip"), "doctor")
    assert (done.returncode, done.stderr) == (0, "")
