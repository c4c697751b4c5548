"""The command line. One file per command; each parses, calls and prints, and has no logic of its own."""

import inspect
import io
import sys
from collections.abc import Callable
from typing import NoReturn

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

INTERRUPTED = 130  # the exit code that shells know: 128 + SIGINT

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


@app.callback()
def _root() -> None:
    """So that a single command still needs its name."""


def main() -> None:
    """Runs the command line. What a user got wrong is one sentence on stderr and exit code 2, without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without √ gets a ?, not an error once all is computed
    try:
        app()
    except ValueError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(str(error), style="red", markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        _interrupted()
    except SystemExit as ended:  # typer's, of Ctrl-C too
        if ended.code == INTERRUPTED:
            _interrupted()
        raise


def _interrupted() -> NoReturn:
    print("Interrupted. Nothing is left half written; the same command begins anew.", file=sys.stderr)
    sys.exit(INTERRUPTED)
