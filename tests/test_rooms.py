"""The house rules that a reader can't see in one file: which room may import which, and what is public."""

import ast
from pathlib import Path

import pytest

import unskip

SOURCE = Path(unskip.__file__).parent
# From the top floor down; a room never imports one above it (docs/design.md).
ROOMS = ["cli", "reproduce", "bench", "doctor", "train", "ship", "models", "surgery", "methods", "coders", "measures"]
ROOMS.append("theory")
FILES = sorted(SOURCE.rglob("*.py"))


def imports(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "unskip"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_room_imports_none_above_it(file: Path) -> None:
    room = file.relative_to(SOURCE).parts[0]
    if room.endswith(".py"):  # __init__ and __main__ stand at the door and see all rooms
        return
    above = ROOMS[: ROOMS.index(room)]
    for name in imports(file):
        target = name.split(".")[1] if "." in name else ""
        assert target not in above, f"{file.relative_to(SOURCE)} imports {name}"


def test_public_names_exist_and_are_few() -> None:
    assert len(unskip.__all__) < 12
    for name in unskip.__all__:
        assert getattr(unskip, name).__doc__, name


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_file_opens_with_what_it_is(file: Path) -> None:
    assert ast.get_docstring(ast.parse(file.read_text())), file
