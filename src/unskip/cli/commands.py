"""All commands. Each imports the library, and torch, only when it runs: help and wrong words are answered at once."""

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
from unskip.cli.plainify import plainify
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
    return "\n\n".join(" ".join(words.split()) for words in inspect.getdoc(command).split("\n\n"))  # type: ignore[union-attr]


for _command in (bench, demo, doctor, export, fold, models, plainify):
    app.command(help=_paragraphs(_command))(_command)
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
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.append(here)
