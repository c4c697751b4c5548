"""All commands. Each imports the library, and torch, only when it runs: help and wrong words are answered at once."""

import contextlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from unskip._core.version import __version__
from unskip.cli.bench import bench
from unskip.cli.demo import demo
from unskip.cli.doctor import doctor
from unskip.cli.export import export
from unskip.cli.fold import fold
from unskip.cli.models import models
from unskip.cli.options import Command
from unskip.cli.plainify import plainify
from unskip.cli.plan import plan
from unskip.cli.reproduce import app as reproduce
from unskip.cli.train import train

app = typer.Typer(
    name="unskip",
    help="Very deep networks without skip connections: build them, train them, see why they train, ship them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _paragraphs(command: Callable[..., None]) -> str:
    """A docstring for --help: typer would keep its line breaks, which are right for one width only."""
    return "\n\n".join(" ".join(words.split()) for words in (inspect.getdoc(command) or "").split("\n\n"))


for _command in (bench, demo, doctor, export, fold, models, plainify, plan):
    app.command(cls=Command, help=_paragraphs(_command))(_command)
app.add_typer(reproduce, name="reproduce")
app.command(help=_paragraphs(train), context_settings={"ignore_unknown_options": True})(train)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"unskip {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Prints the version.")
    ] = False,
) -> None:
    """Before any command: package.module:function may be in the current folder; what is installed comes first."""
    with contextlib.suppress(FileNotFoundError):  # the folder may have been deleted
        here = str(Path.cwd())
        if not {"", here} & set(sys.path):
            sys.path.append(here)
