"""`unskip doctor`: will a network train, and if not, why."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from unskip.cli.interrupts import Importing
from unskip.cli.options import MAX_SEED, Force, InputSize, Network, NumClasses, Pretrained, Weights
from unskip.cli.tables import console_for_tables, fitted


def doctor(
    network: Network,
    method: Annotated[
        str, typer.Option(help="Make it skip-free with this method first (`unskip models --methods`).")
    ] = "",
    against: Annotated[str | None, typer.Option(help="A second network to compare it with, given likewise.")] = None,
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: NumClasses = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="The data: digits, noise, a .npz file, or a folder (CIFAR, Fashion-MNIST, classes of images, or just "
            "images). By default digits, resized to fit, or noise if no image fits. For a network that reads "
            "tokens a text (.txt), by default random ones."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Inputs in the batch; by default 64, or 16 above 64 px.", max=100_000)
    ] = None,
    input_size: InputSize = None,
    seed: Annotated[
        int,
        typer.Option(help="Seed of the weights, of the images taken, and of what measuring draws.", max=MAX_SEED),
    ] = 0,
    measure: Annotated[
        list[str] | None,
        typer.Option(help="Report only this measure, ours or a plug-in's, beside those of the verdict. Repeatable."),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="Look at the first updates of this optimizer, too: muon, adamw, or another of timm's."),
    ] = None,
    lr: Annotated[float, typer.Option(help="Learning rate of --optimizer.", min=1e-9, max=1e3)] = 1e-3,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the report as a page, for instance report.html.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
    force: Force = False,
) -> None:
    """Examines a network before training: what happens to the signal and the gradient, and whether it will train.

    Exit codes: 0 for any verdict; 2 for invalid arguments.
    """
    with Importing():
        from unskip.doctor.examine import InputSpec, check_report_path, examine
        from unskip.doctor.report import as_json
        from unskip.doctor.table import table, verdict_lines
        from unskip.train.optim import make_optimizer
        from unskip.train.recipe import OptimizerConfig

    check_report_path(out, force)
    chosen = None
    if optimizer is not None:
        muon = optimizer.lower() == "muon"
        config = OptimizerConfig(optimizer=optimizer, lr=lr, momentum=0.95 if muon else 0.9, nesterov=muon)
        chosen = partial(make_optimizer, config=config)
    inputs = InputSpec(
        data=data, batch_size=batch_size, input_size=input_size, seed=seed, measures=tuple(measure or ()),
        optimizer=chosen,
    )  # fmt: skip
    console = Console(stderr=True)
    with console.status(f"Measuring {network} ..."):
        reports = examine(
            network, inputs, against=against, method=method, weights=weights, pretrained=pretrained,
            num_classes=num_classes,
        )  # fmt: skip
    if out is not None:
        reports[0].to_html(out, *reports[1:])
    if json:
        print(as_json(*reports))
        return
    shown_on = console_for_tables(140)
    for each in reports:
        shown_on.print(verdict_lines(each))
    shown_on.print(fitted(table(reports), shown_on, ("highest", "lowest")))
    if out is not None:
        print(f"Page: {out}")
