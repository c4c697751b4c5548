"""`unskip models`: the networks that have a name, and the methods of `plainify`."""

import fnmatch
import json as json_module
from importlib import resources
from typing import Annotated, Any

import typer
from rich.table import Table

from unskip._core.text import nearest
from unskip.cli.interrupts import Importing
from unskip.cli.tables import console_for_tables, fitted

SORTS = ("name", "family", "image", "trained", "frozen", "MACs", "paper")


def models(
    pattern: Annotated[str, typer.Argument(help="Only names that match, for instance 'pnnh_*'.")] = "*",
    family: Annotated[str, typer.Option(help="Only families that match, for instance 'resnet' or '*timm*'.")] = "*",
    paper: Annotated[bool, typer.Option("--paper", help="Only networks whose parameters a paper prints.")] = False,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Only networks whose trained weights come with the package.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Only networks that keep no skip at all.")] = False,
    sort: Annotated[str, typer.Option(help=f"Sort by {', '.join(SORTS)}.", show_default="as they are registered")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    methods: Annotated[bool, typer.Option("--methods", help="List the methods and their options instead.")] = False,
) -> None:
    """Lists the networks: parameters trained and frozen, MACs, skips kept, and the paper's figure beside ours."""
    if methods:
        _print_methods(pattern)
        return
    listing = resources.files("unskip") / "models" / "listing.json"  # without torch
    lines: list[dict[str, Any]] = json_module.loads(listing.read_text(encoding="utf-8"))
    families = sorted({line["family"] for line in lines})
    if not fnmatch.filter(families, family):
        raise ValueError(f"models: no family matches {family!r}.{nearest(family, families)}")
    wanted = {
        f" in family {family!r}" * (family != "*"): lambda line: fnmatch.fnmatch(line["family"], family),
        " of the paper" * paper: lambda line: not paper or line["paper_params"] is not None,
        " with weights" * pretrained: lambda line: not pretrained or line["pretrained"],
        " without skips" * plain: lambda line: not plain or line["skips"] == "none",
    }
    lines = [line for line in lines if all(suits(line) for suits in wanted.values())]
    found = [line for line in lines if fnmatch.fnmatch(line["name"], pattern)]
    if not found:
        known = [line["name"] for line in lines]
        raise ValueError(f"models: no name{''.join(wanted)} matches {pattern!r}.{nearest(pattern, known)}")
    if sort:
        if sort not in SORTS:
            raise ValueError(f"models: --sort {sort!r} is not known.{nearest(sort, list(SORTS))}")
        found.sort(key=lambda line: _sort_key(line, sort))
    if json:
        print(json_module.dumps(found, indent=1))
        return
    table = Table(caption="Millions. MACs: one image of the size given. Paper: as the network's paper prints it.")
    table.add_column("name", no_wrap=True)
    table.add_column("family", no_wrap=True)
    for column in ("image", "trained", "frozen", "MACs", "paper"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("skips")
    for line in found:
        table.add_row(
            line["name"],
            line["family"],
            str(line["input_size"][-1]),
            f"{line['trained'] / 1e6:.3f}",
            f"{line['frozen'] / 1e6:.3f}",
            f"{line['macs'] / 1e6:,.0f}",
            "" if line["paper_params"] is None else f"{line['paper_params']:g}",
            line["skips"],
        )
    console = console_for_tables(120)
    console.print(fitted(table, console, ("family", "frozen", "image", "paper", "skips")))


def _sort_key(line: dict[str, Any], sort: str) -> Any:
    if sort == "image":
        return line["input_size"][-1]
    value = line[{"MACs": "macs", "paper": "paper_params"}.get(sort, sort)]
    return float("inf") if value is None else value


def _print_methods(pattern: str) -> None:
    with Importing():
        from unskip.methods import describe_method, method_names

    names = [name for name in method_names() if fnmatch.fnmatch(name, pattern)]
    if not names:
        raise ValueError(f"models: no method matches {pattern!r}.{nearest(pattern, method_names())}")
    for method in map(describe_method, names):
        print(f"{method.name}: {method.summary}")
        for option in method.options:
            print(f"    {option.name} = {option.values}: {option.doc}")
