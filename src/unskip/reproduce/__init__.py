"""Reproduce: the papers' figures and tables, each by one command and in one file."""

import importlib

from unskip.reproduce.papers import (
    PAPERS,
    PaperItem,
    PaperTable,
    items_markdown,
    paper_items,
    paper_table,
    paper_tables,
)
from unskip.reproduce.registry import ABOUT, REPRODUCTIONS, Outcome, Reproduction, Settings, reproduce, reproduction

for _name in ABOUT:  # importing a file registers what it makes
    importlib.import_module(f"{__name__}.{_name.replace('-', '_')}")

__all__ = [
    "PAPERS",
    "REPRODUCTIONS",
    "Outcome",
    "PaperItem",
    "PaperTable",
    "Reproduction",
    "Settings",
    "items_markdown",
    "paper_items",
    "paper_table",
    "paper_tables",
    "reproduce",
    "reproduction",
]
