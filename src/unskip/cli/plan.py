"""`unskip plan`: the activation memory of networks, residual and plain side by side."""

from typing import Annotated

import typer

from unskip.cli.interrupts import Importing
from unskip.cli.options import InputSize, NumClasses


def plan(
    networks: Annotated[
        list[str],
        typer.Argument(help="One or more networks, each as `unskip plainify` takes it.", metavar="NETWORK..."),
    ],
    in_place: Annotated[
        bool,
        typer.Option(
            "--in-place/--not-in-place",
            help="Whether activations and sums may write into a tensor that nobody reads afterwards.",
        ),
    ] = True,
    layers: Annotated[bool, typer.Option("--layers", help="Show each layer, and what is alive at the peak.")] = False,
    num_classes: NumClasses = None,
    input_size: InputSize = None,
) -> None:
    """Prints what memory the activations of one image need in int8 and float32, MACs, and FIFOs of streaming targets.

    A residual network stands beside what rm and pnnh make of it, folded dense and fast; a plain one is folded. Weights
    play no part.
    """
    with Importing():
        from unskip.io.shipping import plan_memory

    plans = plan_memory(networks, num_classes=num_classes, input_size=input_size, in_place=in_place)
    if layers:
        for name, each in plans.plans.items():
            print(f"{name}\n{each}\n")
    print(plans)
