"""`unskip models`: the networks that have a name, and the methods of `plainify`."""

import fnmatch
from typing import Annotated

import typer
from rich.table import Table

from unskip.cli import Importing
from unskip.cli.tables import console_for_tables, fitted


def models(
    pattern: Annotated[str, typer.Argument(help="Only names that match, for instance 'pnnh_*'.")] = "*",
    family: Annotated[str, typer.Option(help="Only families that match, for instance 'resnet' or '*timm*'.")] = "*",
    paper: Annotated[bool, typer.Option("--paper", help="Only networks whose parameters a paper prints.")] = False,
    methods: Annotated[bool, typer.Option("--methods", help="List the methods and their options instead.")] = False,
) -> None:
    """Lists the networks: parameters trained and frozen, MACs, skips kept, and the paper's figure beside ours."""
    with Importing():
        from unskip._core.text import nearest
        from unskip.methods import describe_method, method_names
        from unskip.models import ENTRIES, OTHERS, Entry, Other, about

    if methods:
        names = [name for name in method_names() if fnmatch.fnmatch(name, pattern)]
        if not names:
            raise ValueError(f"models: no method matches {pattern!r}.{nearest(pattern, method_names())}")
        for method in map(describe_method, names):
            print(f"{method.name}: {method.summary}")
            for option in method.options:
                print(f"    {option.name} = {option.values}: {option.doc}")
        return
    listed: dict[str, Entry | Other] = {**ENTRIES, **OTHERS}
    families = sorted({entry.family for entry in listed.values()})
    if not fnmatch.filter(families, family):
        raise ValueError(f"models: no family matches {family!r}.{nearest(family, families)}")
    inside = {name: entry for name, entry in listed.items() if fnmatch.fnmatch(entry.family, family)}
    known = [name for name, entry in inside.items() if not paper or entry.paper_params is not None]
    names = [name for name in known if fnmatch.fnmatch(name, pattern)]
    if not names:
        where = ("" if family == "*" else f" in family {family!r}") + " of the paper" * paper
        raise ValueError(f"models: no name{where} matches {pattern!r}.{nearest(pattern, known)}")
    table = Table(caption="Millions. MACs: one image of the size given. Paper: as the network's paper prints it.")
    table.add_column("name", no_wrap=True)
    table.add_column("family", no_wrap=True)
    for column in ("image", "trained", "frozen", "MACs", "paper"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("skips")
    for name in names:
        entry = listed[name]
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
    console = console_for_tables(120)
    console.print(fitted(table, console, ("family", "frozen", "image", "paper", "skips")))
