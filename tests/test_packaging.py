"""What users install: an sdist that passes its tests, a wheel with all of its files, and the versions they go with."""

import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = {Requirement(text).name: Requirement(text).specifier for text in PROJECT["dependencies"]}
ELSEWHERE = {"torch": "2.11.0", "torchvision": "0.26.0", "timm": "1.0.29", "accelerate": "1.15.0"}  # in use with 3.12
JOURNEY = """
import torch, unskip
from unskip.reproduce.papers import paper_table
from unskip.train import load_recipe, recipe_names

example = torch.rand(2, 3, 32, 32)
model = unskip.create_model("pnnh_resnet20_wide", pretrained=True).eval()
with torch.no_grad():
    torch.testing.assert_close(unskip.fold(model)(example), model(example), rtol=1e-3, atol=1e-3)
plain = unskip.plainify(unskip.create_model("resnet20"), method="pnnh")
assert plain(example).shape == (2, 10)
assert [load_recipe(name) for name in recipe_names()]
assert paper_table("pnnh", "1").rows
report = unskip.diagnose(plain, example, measures=[])
report.to_html("report.html")
print(unskip.__file__)
"""
DEMO_PAGE = """
from pathlib import Path
from unskip.demo.story import write_doctor_page
write_doctor_page(0, Path())
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def run(*words: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command that finds neither this source tree nor a terminal; it must succeed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "PYTEST_"))}
    done = subprocess.run(words, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def files_of(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"
    }


@dataclass(frozen=True)
class Built:
    """The two files that a release consists of, and the unpacked sdist, which the wheel is built from."""

    sdist: Path
    wheel: Path
    unpacked: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=unpacked)
    (wheel,) = folder.glob("*.whl")
    return Built(sdist, wheel, unpacked)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel and nothing of this source tree; it borrows other packages."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, built.wheel, cwd=folder)
    # A folder that a .pth file names is searched, but its own .pth files (an editable unskip) are not read.
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    return folder / "bin"


def test_sdist_holds_sources_tests_and_pages_but_no_benchmarks(built: Built) -> None:
    found = files_of(built.unpacked)
    for folder in ("src", "tests"):
        missing = {f"{folder}/{name}" for name in files_of(ROOT / folder)} - found
        assert missing == set()
    assert {name.split("/")[0] for name in found} == {
        *(".ci", "docs", "src", "tests", ".gitignore", "Makefile", "PKG-INFO", "pyproject.toml"),
        *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md"),
    }
    assert built.sdist.stat().st_size < 8 * 2**20


def test_wheel_holds_every_file_of_the_package_and_no_other(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert sorted(names) == sorted(f"unskip/{name}" for name in files_of(ROOT / "src" / "unskip"))


def test_wheel_works_outside_of_the_source_tree(installed: Path, tmp_path: Path) -> None:
    """Networks, packaged weights, recipes, the papers' tables and the doctor's page."""
    done = run(installed / "python", "-c", JOURNEY, cwd=tmp_path)
    assert Path(done.stdout.strip()).is_relative_to(installed.parent)
    assert "echarts" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_installed_command_says_its_version(built: Built, installed: Path, tmp_path: Path) -> None:
    version = built.wheel.name.split("-")[1]
    assert run(installed / "unskip", "--version", cwd=tmp_path).stdout == f"unskip {version}\n"


@pytest.mark.full
def test_installed_commands_work_outside_of_the_source_tree(installed: Path, tmp_path: Path) -> None:
    """One after the other, without a terminal, where text is ASCII unless somebody says otherwise."""

    def unskip(words: str) -> str:
        return run(installed / "unskip", *words.split(), cwd=tmp_path, **ASCII).stdout

    assert "pnnh_resnet20" in unskip("models pnnh_resnet20*")
    unskip("train --model resnet20 --epochs 1 --warmup-epochs 0 --out run")
    unskip("plainify run -o plain.safetensors")
    unskip("export plain.safetensors -o net.onnx")
    unskip("doctor plain.safetensors --out report.html")
    run(installed / "python", "-c", DEMO_PAGE, cwd=tmp_path, **ASCII)
    written = {path.name for path in tmp_path.iterdir()}
    assert {"run", "plain.safetensors", "net.onnx", "report.html", "doctor.html"} <= written


@pytest.mark.full
def test_sdist_passes_its_tests(built: Built) -> None:
    """All tests are found there; those that read files of the repository pass or say why they are skipped."""
    pytest_there = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
    source = str(built.unpacked / "src")
    run(*pytest_there, "--collect-only", cwd=built.unpacked, PYTHONPATH=source)
    tests = [f"tests/{name}" for name in ("test_records.py", "test_rooms.py", "test_encoding.py", "test_plugins.py")]
    tests += [f"tests/{name}" for name in ("cli/test_start.py", "doctor/test_calibration.py", "models/test_weights.py")]
    done = run(*pytest_there, "-m", "not full and not deep", *tests, cwd=built.unpacked, PYTHONPATH=source)
    assert " passed" in done.stdout
    assert " skipped" in done.stdout


def test_every_dependency_has_a_lower_bound_that_is_tested() -> None:
    """`make test-oldest` installs what .ci/oldest.py prints."""
    printed = run(sys.executable, ROOT / ".ci" / "oldest.py", cwd=ROOT).stdout.split()
    assert REQUIREMENTS.keys() <= {line.split("==")[0] for line in printed}
    bounds = [part.version for specifier in REQUIREMENTS.values() for part in specifier if part.operator == ">="]
    assert bounds == [line.split("==")[1] for line in printed[: len(bounds)]]


def test_libraries_whose_internals_are_used_have_an_upper_bound() -> None:
    for name in ("accelerate", "timm"):
        assert "<" in {part.operator for part in REQUIREMENTS[name]}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_versions_in_use_elsewhere_are_admitted(name: str) -> None:
    assert REQUIREMENTS[name].contains(ELSEWHERE[name])
