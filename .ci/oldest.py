"""Prints the lower bounds of pyproject.toml as constraints for pip: the oldest versions that unskip supports."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
for requirement in sum(project["optional-dependencies"].values(), project["dependencies"]):
    if bound := re.match(r"([\w-]+)>=([\d.]+)", requirement):
        print(f"{bound[1]}=={bound[2]}")
