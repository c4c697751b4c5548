"""`unskip models`: the networks that have a name."""

import fnmatch
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from unskip.methods.registry import nearest
from unskip.models import ENTRIES, about


def models(
    pattern: Annotated[str, typer.Argument(help="Only names that match, for instance 'pnnh_*'.")] = "*",
    paper: Annotated[bool, typer.Option("--paper", help="Only networks whose parameters a paper prints.")] = False,
) -> None:
    """Lists the networks: parameters trained and frozen, MACs, skips kept, and the paper's figure beside ours."""
    known = [name for name, entry in ENTRIES.items() if not paper or entry.paper_params is not None]
    names = [name for name in known if fnmatch.fnmatch(name, pattern)]
    if not names:
        raise ValueError(f"models: no name{' of the paper' * paper} matches {pattern!r}.{nearest(pattern, known)}")
    table = Table(caption="Millions. MACs: one image of the size given. Paper: as the network's paper prints it.")
    table.add_column("name", no_wrap=True)
    table.add_column("family", no_wrap=True)
    for column in ("image", "trained", "frozen", "MACs", "paper"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("skips")
    for name in names:
        entry = ENTRIES[name]
        line = about(name)
        table.add_row(
            name,
            entry.family,
            str(entry.input_size[-1]),
            f"{line.trained / 1e6:.3f}",
            f"{line.frozen / 1e6:.3f}",
            f"{line.macs / 1e6:,.0f}",
            "" if line.paper_params is None else f"{line.paper_params:g}",
            line.skips,
        )
    # Off a terminal nobody sees the width, and a wrapped table can't be read by programs.
    console = Console()
    Console(width=None if console.is_terminal else 120).print(table)
