"""Files that are whole or not there: written beside their place and renamed, and never over another without a word."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

ELSEWHERE = "Nothing was changed; make room or choose another place."


@contextmanager
def explained(what: str, path: Path, *, command: str, way_out: str = ELSEWHERE) -> Iterator[None]:
    """Turns what the file system refuses into a sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"{command}: {what} {path} can't be written: {reason}. {way_out}") from error


def make_folder(folder: Path, *, command: str, way_out: str = ELSEWHERE) -> None:
    """Makes a folder and writes a file of no length into it, so that a wrong place is refused before the work."""
    with explained("the folder", folder, command=command, way_out=way_out):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def write_atomically(path: Path, write: Callable[[BinaryIO], Any], *, command: str, way_out: str = ELSEWHERE) -> None:
    """Writes a file beside `path` and renames it: a kill or a full disk at any moment leaves the old one whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with explained("the file", path, command=command, way_out=way_out):
        try:
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes a rename last through a power cut, where the system has a way to."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check_free(path: Path, *, command: str, argument: str, force: bool, overwrite: str) -> None:
    """Refuses a file that could not be written, before work goes into it.

    Args:
        path: where it is to go.
        command: who asks, for the message.
        argument: how the user has named the path, likewise.
        force: whether a file that is there may be replaced.
        overwrite: how the user says so.
    """
    if path.is_dir():
        raise ValueError(f"{command}: {argument} {str(path)!r} is a folder; name a file in it.")
    if path.exists() and not path.is_file():
        raise ValueError(f"{command}: {argument} {str(path)!r} is a device or a pipe; name a file.")
    if path.exists() and not force:
        raise ValueError(
            f"{command}: {str(path)!r} is there already. Choose another {argument}, or overwrite it with {overwrite}."
        )
    if not path.parent.is_dir():
        raise ValueError(f"{command}: the folder {str(path.parent)!r} of {argument} does not exist. Make it first.")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(
            f"{command}: nothing can be written into the folder {str(path.parent)!r} of {argument}. Choose another."
        )
