"""The house rules that a reader can't see in one file: which room may import which, and what is public."""

import ast
from pathlib import Path

import pytest

import unskip

SOURCE = Path(unskip.__file__).parent
# From the top floor down; a room never imports one above it (docs/design.md).
ROOMS = [
    "cli", "demo", "reproduce", "bench", "doctor", "train", "io", "ship", "data", "models", "surgery", "methods",
    "kernels", "coders", "measures", "theory", "_core",
]  # fmt: skip
FILES = sorted(SOURCE.rglob("*.py"))


def imports(file: Path) -> set[str]:
    """What of unskip a file imports, anywhere in it: a function's import would hide a cycle as well."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            assert node.module is not None
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "unskip"}


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(tree: ast.AST, *, in_functions: bool) -> set[str]:
    """The modules of unskip that are imported at the top of a file, or in its functions; not those for types alone."""
    found: set[str] = set()
    stack: list[tuple[ast.AST, bool]] = [(tree, False)]
    while stack:
        node, inside = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and inside == in_functions:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else str(node.module) for name in submodules} & set(MODULES)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        stack += [(child, inside) for child in ast.iter_child_nodes(node)]
    return found


MODULES = {module_name(file): file for file in FILES}


def test_no_import_in_a_function_hides_a_cycle() -> None:
    trees = {name: ast.parse(file.read_text()) for name, file in MODULES.items()}
    top = {name: imported_modules(tree, in_functions=False) for name, tree in trees.items()}

    def reached(start: str) -> set[str]:
        seen, queue = {start}, [start]
        while queue:
            new = top[queue.pop()] - seen
            seen |= new
            queue += new
        return seen

    hidden = [
        f"{name} imports {target}, which imports it"
        for name, tree in trees.items()
        for target in imported_modules(tree, in_functions=True)
        if name in reached(target)
    ]
    assert not hidden


def rooms(file: Path) -> dict[str, str]:
    """The rooms that a file imports from, each with one name from it; '' stands for the package itself."""
    return {name.removeprefix("unskip").lstrip(".").split(".")[0]: name for name in imports(file)}


def test_every_folder_is_a_room() -> None:
    assert {file.parent.relative_to(SOURCE).parts[0] for file in FILES if file.parent != SOURCE} == set(ROOMS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_room_imports_none_above_it_and_not_the_package(file: Path) -> None:
    room, where = file.relative_to(SOURCE).parts[0], file.relative_to(SOURCE)
    if room.endswith(".py"):  # __init__, __main__ and nn stand at the door and see all rooms
        assert set(rooms(file)) <= {*ROOMS, "nn"}, where
        return
    below = ROOMS[ROOMS.index(room) :]
    for target, name in rooms(file).items():
        assert target in below, f"{where} imports {name}"


@pytest.mark.parametrize("room", ROOMS)
def test_the_design_says_what_a_room_imports(room: str) -> None:
    """docs/design.md has a row for each room, in order, with arrows to those that it imports."""
    text = (SOURCE.parents[1] / "docs" / "design.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1].rstrip("/") for row in rows] == ROOMS
    found = {target for file in (SOURCE / room).rglob("*.py") for target in rooms(file)} - {room}
    arrows = " ".join(other for other in ROOMS if other in found) or "–"
    assert rows[ROOMS.index(room)].split("|")[2].strip() == arrows, f"docs/design.md: {room} imports {arrows}"


def test_public_names_exist_and_are_few() -> None:
    assert len(unskip.__all__) < 15
    for name in unskip.__all__:
        assert getattr(unskip, name).__doc__, name


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_file_opens_with_what_it_is(file: Path) -> None:
    assert ast.get_docstring(ast.parse(file.read_text())), file
