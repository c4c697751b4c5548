"""Plug-ins: methods, readers, measures and data sets that other installed packages bring, by their entry points.

    [project.entry-points."unskip.methods"]      # in the other package's pyproject.toml
    mine = "my_package.my_methods"

The module registers what it has when it is imported, with `register_method`, `register_reader`, `register_measure` or
`register_dataset`; the name before `=` is only a label. Each registry calls `load` with its group when it is asked for
the first time, so that `import unskip` reads no other package.
"""

import warnings
from importlib.metadata import entry_points
from typing import Literal

from unskip._core.errors import reason

Group = Literal["unskip.methods", "unskip.readers", "unskip.measures", "unskip.datasets"]

_LOADED: set[str] = set()


def load(group: Group) -> None:
    """Imports the plug-ins of one group, once per process. One that fails is left out, with a warning that says why."""
    if group in _LOADED:
        return
    _LOADED.add(group)  # first, for a plug-in may ask a registry while it is imported
    for entry in entry_points(group=group):
        try:
            entry.load()
        except Exception as error:  # it is somebody else's code
            package = "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
            warnings.warn(
                f"unskip: the plug-in {entry.name!r} ({group}) of {package} can't be loaded: {type(error).__name__}: "
                f"{reason(error)}. unskip goes on without it; update or uninstall that package.",
                stacklevel=2,
            )
