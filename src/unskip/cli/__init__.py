"""The command line. One file per command; each parses, calls and prints, and has no logic of its own."""

import sys

import typer
from rich.console import Console

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
app.command()(bench)
app.command()(demo)
app.command()(doctor)
app.command()(export)
app.command()(fold)
app.command()(models)
app.command()(plainify)
app.add_typer(reproduce, name="reproduce")
app.command(context_settings={"ignore_unknown_options": True})(train)


@app.callback()
def _root() -> None:
    """So that a single command still needs its name."""


def main() -> None:
    """Runs the command line. What a user got wrong is one sentence on stderr and exit code 2, without a traceback."""
    try:
        app()
    except ValueError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(str(error), style="red", markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
