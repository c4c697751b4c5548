"""`unskip demo`: the story, in a few minutes on a CPU."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from unskip.cli.interrupts import Importing
from unskip.cli.options import MAX_SEED


def demo(
    seed: Annotated[
        int, typer.Option(help="Seed of the weights and of the order of the images.", min=0, max=MAX_SEED)
    ] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the picture and the pages.")] = Path(
        "unskip-demo"
    ),
) -> None:
    """Trains a 56-layer network three ways (plain, PNNH, residual) on a CPU and shows why the plain one fails."""
    with Importing():
        from unskip._core.files import make_folder
        from unskip.demo import story
        from unskip.demo.page import write
        from unskip.demo.view import View, table

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the runs too, as Ctrl-C does
    make_folder(out, command="demo", way_out="Choose another one (--out).")
    with View() as view:
        told = story.train_all(seed, out, view.show)
    picture, page = write(told, out)
    view.console.print(table(told))
    doctor = story.write_doctor_page(seed, out)
    print(f"Picture: {picture}\nPage:    {page}\nDoctor:  {doctor}")
