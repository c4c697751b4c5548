"""A file is whole or not there, whatever stops the one who writes it."""

from pathlib import Path
from typing import BinaryIO

import pytest

from unskip._core.files import check_free, write_atomically


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError, MemoryError])
def test_a_stop_in_the_middle_leaves_the_old_file_and_nothing_else(stop: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(b"old")

    def write(file: BinaryIO) -> None:
        file.write(b"new" * 10_000)
        file.flush()
        raise stop

    with pytest.raises(stop):
        write_atomically(path, write, command="export")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    write_atomically(path, lambda file: file.write(b"new"), command="export")
    assert path.read_bytes() == b"new"


def test_what_the_file_system_refuses_is_a_sentence(tmp_path: Path) -> None:
    name = tmp_path / ("n" * 300)
    with pytest.raises(
        ValueError, match=r"export: the file .* can't be written: File name too long\. Nothing was changed"
    ):
        write_atomically(name, lambda file: file.write(b"new"), command="export")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_may_not_be_written_to_is_named_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ValueError, match=r"nothing can be written into the folder .* of --out"):
        check_free(tmp_path / "a.onnx", command="export", argument="--out", force=False, overwrite="--force")
