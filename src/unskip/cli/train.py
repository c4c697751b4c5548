"""`unskip train`: trains a network by a recipe."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from unskip.cli.interrupts import DIVERGED, STOPPED, Importing


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [--FIELD VALUE]...",
            help="The name of a recipe (see --list) or a TOML file; unless given digits-pnnh-56 or, for a folder of "
            "images, images-pnnh-20-wide. Each field of a recipe (see --show) can be overridden: --model resnet18 "
            "--pretrained --epochs 3 --lr 0.05 --tensorboard; --init-from FILE starts from its weights.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Where the data set lies, for instance a folder with a folder for each class of images."),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="The folder of the run.", show_default="runs/RECIPE")
    ] = None,
    resume: Annotated[str, typer.Option(help="never, or auto: go on with the run in OUT if there is one.")] = "never",
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Train in a folder that a process of another host has locked and left.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the recipe with its overrides, and end.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Print the names of the recipes, and end.")] = False,
) -> None:
    """Trains a network by a recipe. Prints one line with the result; progress goes to stderr.

    Exit codes: 0 done, 2 something that you gave is wrong, 3 the loss diverged, 75 stopped by SIGTERM, SIGINT or SIGHUP
    after saving (go on with --resume auto).
    """
    with Importing():
        from unskip.train import TrainingDiverged, TrainingInterrupted, recipe_names, run
        from unskip.train.machine import is_main
        from unskip.train.recipe import parse_command, recipe_text

    if names:
        for name in recipe_names():
            print(f"{name:28} {recipe_text(name).splitlines()[0].removeprefix('# ')}")
        return
    name, recipe = parse_command(words or [], data)
    if show:
        print(recipe.to_toml(), end="")
        return
    try:
        result = run(recipe, data_dir=data, out=out or f"runs/{name}", resume=resume, take_over=take_over)  # type: ignore[arg-type]
    except ValueError:
        if not is_main():
            sys.exit(2)  # the main process says why
        raise
    except (TrainingInterrupted, TrainingDiverged) as ended:
        Console(stderr=True, highlight=False, soft_wrap=True).print(str(ended), style="yellow", markup=False)
        sys.exit(STOPPED if isinstance(ended, TrainingInterrupted) else DIVERGED)
    if is_main():
        print(result)
        if result.sample:
            print(f"\n{result.sample}")
