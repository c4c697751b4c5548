"""`unskip reproduce`: a figure or table of a paper, made again by one command."""

import dataclasses
import inspect
import tomllib
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from unskip.cli.interrupts import STOPPED, Importing
from unskip.cli.options import Command
from unskip.cli.tables import console_for_tables, fitted

if TYPE_CHECKING:
    from unskip.reproduce import Reproduction

_ABOUT = tomllib.loads((resources.files("unskip") / "reproduce" / "reproductions.toml").read_text(encoding="utf-8"))


class _Named(TyperGroup):
    """Commands that are listed by what reproductions.toml says; only the one that is called is built, from its module.

    The options of a reproduction are known to its module alone, and that imports torch.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        if name is None or listed is None:
            return name, listed, rest
        with Importing():
            from unskip.reproduce import REPRODUCTIONS

        one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        one.command(name, cls=Command)(_command(REPRODUCTIONS[name]))
        return name, typer.main.get_command(one), rest


app = typer.Typer(
    cls=_Named,
    help="Makes a figure or table of the papers again, and a record of its numbers. Without a name: lists them.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _names(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        with Importing():
            from unskip.reproduce import PAPERS, paper_items, paper_tables

        table = Table(caption="unskip reproduce NAME --help lists what can be set.")
        for column in ("name", "source", "what it shows"):
            table.add_column(column, no_wrap=column == "name")
        for name, about in _ABOUT.items():
            table.add_row(name, about["source"], about["shows"])
        console = console_for_tables(140)
        console.print(table)
        papers = Table(
            title="Every table and figure of the four papers", caption="docs/figures.md has the records too."
        )
        for column in ("where", "what", "state", "made by", "note"):
            papers.add_column(column, no_wrap=column == "where")
        for item in paper_items():
            papers.add_row(item.source, item.about, item.state, item.command, item.note)
        console.print(fitted(papers, console, ["note", "what"]))
        states = Counter(item.state for item in paper_items())
        console.print(", ".join(f"{count} {state}" for state, count in states.items()) + ".")
        console.print("What the papers' tables print, as data (unskip.reproduce.paper_table):")
        for paper in PAPERS:
            console.print(f"  {paper}: Table {', '.join(paper_tables(paper))}")


def _command(entry: "Reproduction") -> Any:
    """A command whose options are the fields of the reproduction's configuration."""
    from unskip.reproduce import reproduce
    from unskip.train import TrainingInterrupted

    hints = get_type_hints(entry.settings, include_extras=True)

    def command(out: Path, record: Path | None, **fields: Any) -> None:
        try:
            written = reproduce(entry.name, out=out, record=record, **fields)
        except TrainingInterrupted as ended:
            Console(stderr=True, highlight=False, soft_wrap=True).print(str(ended), style="yellow", markup=False)
            raise typer.Exit(STOPPED) from None
        for line in (*written.outcome.lines, *map(str, written.files)):
            print(line)

    def option(name: str, hint: Any, words: str, default: Any, *flags: str) -> inspect.Parameter:
        annotation = Annotated[hint, typer.Option(*flags, help=words)]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    options = [
        option("out", Path, "The folder of what is made.", Path("reproduced"), "--out", "-o"),
        option("record", Path | None, "The folder of the numbers; OUT unless given.", None),
    ]
    for field in dataclasses.fields(entry.settings):
        kind, words = hints[field.name].__origin__, hints[field.name].__metadata__[0]
        options.append(option(field.name, kind, words[0].upper() + words[1:] + ".", field.default))
    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in options}
    command.__doc__ = _help(entry.source, entry.shows)
    return command


def _help(source: str, shows: str) -> str:
    return f"{source}: {shows}."


for _name, _about in _ABOUT.items():
    app.command(_name, help=_help(**_about))(lambda: None)
