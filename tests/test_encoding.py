"""Text files are UTF-8 on every system: what Windows would write otherwise can't hold σ, and fails after the work."""

import ast
from pathlib import Path

import unskip

SOURCE = Path(unskip.__file__).parent


def left_to_the_system(call: ast.Call) -> bool:
    """Whether a call opens a text file without saying in which encoding."""
    if any(keyword.arg == "encoding" for keyword in call.keywords):
        return False
    if isinstance(call.func, ast.Attribute):
        # Of a path: no argument, or the text alone. RunFolder.write_text takes two, and is UTF-8.
        return call.func.attr in ("read_text", "write_text") and len(call.args) == (call.func.attr == "write_text")
    mode = call.args[1].value if len(call.args) > 1 and isinstance(call.args[1], ast.Constant) else "r"
    return isinstance(call.func, ast.Name) and call.func.id == "open" and "b" not in str(mode)


def test_every_text_file_says_its_encoding() -> None:
    calls = [
        (path, node)
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]
    assert len(calls) > 1000
    assert not [f"{path.relative_to(SOURCE)}:{node.lineno}" for path, node in calls if left_to_the_system(node)]
