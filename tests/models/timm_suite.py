"""A pytest plugin that runs timm's own tests/test_models.py, from its source distribution, with our names for its list.

    pytest -p tests.models.timm_suite -c /dev/null TIMM/tests/test_models.py -m "not torchscript"

Names are grouped as timm groups its own: transformers and MLPs are `NON_STD_FILTERS`, and every name with feature maps
is among those with `forward_intermediates`. Tests of timm's own names are left out.
"""

import fnmatch
from typing import Any

import pytest
import timm

from unskip.models import ENTRIES

NON_STANDARD = ("*_vit_*", "*_mlp")
_list_models = timm.list_models


def _ours(filter: str | list[str] = "", module: Any = "", exclude_filters: Any = "", **options: Any) -> list[str]:
    """`timm.list_models`, of our names alone."""
    found = _list_models(filter if isinstance(filter, str) else "", **options)
    names = [name for name in found if name.split(".")[0] in ENTRIES]

    def of(name: str, filters: Any) -> bool:
        groups = (*filters, *(NON_STANDARD if "vit_*" in filters else ()))
        return any(fnmatch.fnmatch(name, each) for each in groups)

    if module:
        names = [name for name in names if ENTRIES[name].feature_maps]
    if filter and not isinstance(filter, str):
        names = [name for name in names if of(name, filter)]
    return [name for name in names if not of(name, exclude_filters)] if exclude_filters else names


timm.list_models = _ours


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def is_ours(item: pytest.Item) -> bool:
        params = getattr(getattr(item, "callspec", None), "params", {})
        return str(params.get("model_name", "")).split(".")[0] in ENTRIES

    others = [item for item in items if not is_ours(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if is_ours(item)]
