"""The tutorials run from top to bottom in an empty folder. `python -m tests.test_tutorials` writes new outputs."""

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import unskip

SOURCE = Path(unskip.__file__).parents[1]
TUTORIALS = sorted((SOURCE.parent / "docs" / "tutorials").glob("*.ipynb"))
MOST_BYTES = 300_000


def execute(path: Path, folder: Path) -> dict:
    """The notebook with the outputs of a run in `folder`; a cell that raises, or a command that fails, raises here."""
    import nbformat
    from nbclient import NotebookClient

    command = folder / "bin" / "unskip"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nfrom unskip.cli import main\nmain()\n")
    command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(command.parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path]),
        "IPYTHONDIR": str(folder / "ipython"),  # no settings of the user's
        "TORCH_HOME": torch.hub.get_dir(),
    }
    (folder / "work").mkdir()
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", record_timing=False, coalesce_streams=True,
        resources={"metadata": {"path": str(folder / "work")}},
    )  # fmt: skip
    client.execute(env=environment)
    for cell in notebook.cells:  # tqdm's advice to install widgets, and where the cell's name would be a random number
        kept = [each for each in cell.get("outputs", []) if "TqdmWarning" not in each.get("text", "")]
        if cell.cell_type == "code":
            cell.outputs = kept
    return notebook


@pytest.mark.full
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path: Path, tmp_path: Path) -> None:
    shown = json.dumps(execute(path, tmp_path))
    assert "Traceback (most recent call last)" not in shown
    assert "\\u001b[2K" not in shown  # a progress bar, which would fill the cell


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_reads_well_where_it_lies(path: Path) -> None:
    """It has its outputs, from one run in order, none of them an error, and is small."""
    assert path.stat().st_size < MOST_BYTES
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert len(outputs) > 4
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if "Traceback" in str(output) or str(Path.home()) in str(output)]


def test_there_are_five() -> None:
    assert len(TUTORIALS) == 5


if __name__ == "__main__":
    import nbformat

    for tutorial in [path for path in TUTORIALS if not sys.argv[1:] or path.stem in sys.argv[1:]]:
        with tempfile.TemporaryDirectory() as empty:
            nbformat.write(execute(tutorial, Path(empty)), tutorial)
