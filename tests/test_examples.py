"""Every public name has an example in its docstring that runs, and says what goes in and comes out."""

import doctest
import inspect
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import unskip

NAMES = [f"unskip.{name}" for name in unskip.__all__ if name != "nn"] + [
    f"unskip.nn.{name}" for name in unskip.nn.__all__
]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_public_name_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    what = getattr(unskip.nn if ".nn." in name else unskip, name.rpartition(".")[2])
    text = inspect.getdoc(what)
    assert text is not None
    names = {"unskip": unskip, "torch": torch, "timm": timm, "nn": nn}
    example = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    assert example.examples, f"{name} has no example (>>>) in its docstring"
    shown: list[str] = []
    failed = doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(example, out=shown.append).failed
    assert not failed, "".join(shown)
