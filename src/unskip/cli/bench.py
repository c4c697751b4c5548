"""`unskip bench`: throughput and memory of networks side by side."""

import json as json_module
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from unskip.cli.interrupts import INTERRUPTED, Importing
from unskip.cli.tables import console_for_tables, fitted


def bench(
    networks: Annotated[
        list[str],
        typer.Argument(
            help="Two or more: names of `unskip models` or of timm, NAME:option=value,... to build one otherwise, or "
            "whatever `unskip doctor` takes. Ratios are to the first."
        ),
    ],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    batch: Annotated[int, typer.Option(help="Images in a batch.", show_default="256 on a GPU, 8 on a CPU")] = 0,
    size: Annotated[int, typer.Option(help="Side of the images in px.", show_default="the networks' own")] = 0,
    layers: Annotated[
        str,
        typer.Option(
            help="same: all networks have our fast stem and depthwise kernels; on a GPU those that this changes are "
            "timed without them too; fast: they are not. own: each network as it was built."
        ),
    ] = "same",
    precision: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    channels_last: Annotated[bool, typer.Option(help="Memory layout of images and weights.")] = True,
    train: Annotated[bool | None, typer.Option("--train/--no-train", help="Training; both unless given.")] = None,
    infer: Annotated[bool | None, typer.Option("--infer/--no-infer", help="Inference; both unless given.")] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Only compiled, or only eager; both unless given.")
    ] = None,
    fold: Annotated[bool, typer.Option(help="Inference of folded networks, of others with their norms fused.")] = True,
    graph: Annotated[bool, typer.Option(help="On a GPU each step is one CUDA graph.")] = True,
    rounds: Annotated[int, typer.Option(help="Rounds, in each of which every network has its turn.")] = 7,
    seconds: Annotated[float, typer.Option(help="How long one turn is.")] = 0.5,
    threads: Annotated[int, typer.Option(help="Threads of PyTorch on a CPU.", show_default="PyTorch's own")] = 0,
    compile_workers: Annotated[
        int, typer.Option(help="Processes that compile at once beforehand; with 0 each network in its turn.")
    ] = 0,
    fit: Annotated[
        str | None, typer.Option(help="Search for the largest batch that trains, eagerly, in this memory, e.g. 8GiB.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A folder for bench.json and bench.png, written as it goes.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a bench.json that is in OUT already.")] = False,
) -> None:
    """Times training and inference of two or more networks in one process, in turns, and measures their memory.

    Ratios compare networks with the same stem and kernels (--layers). For inference plain networks are folded and
    others have their norms fused, each in the best form that it has. Exit codes: 0 there is a table, 1 some network
    failed, 2 an argument is wrong, 130 stopped by Ctrl-C, after printing what there is.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler's allocator warns of blocks older than itself
    with Importing():
        from unskip.bench import SPARE, Comparison, Setting, make_results_folder, parse_bytes, table, write

    setting = Setting(
        device=device,
        batch=batch,
        size=size,
        layers=layers,  # type: ignore[arg-type]
        precision=precision,  # type: ignore[arg-type]
        channels_last=channels_last,
        train=train if train is not None else not infer,
        infer=infer if infer is not None else not train,
        eager=not compiled,
        compiled=compiled is not False,
        fold=fold,
        graph=graph,
        rounds=rounds,
        seconds=seconds,
        threads=threads,
        compile_workers=compile_workers,
        fit=0 if fit is None else parse_bytes(fit),
    )
    if out is not None:
        make_results_folder(out, force=force)
    notes = Console(stderr=True, highlight=False)
    interrupted = False
    with notes.status("building") as status:
        comparison = Comparison(networks, setting, status.update)
        try:
            comparison.run(lambda: write(comparison, out) if out is not None and comparison.begun else None)
        except KeyboardInterrupt:
            if not comparison.begun:
                raise
            interrupted = True
    if out is not None:
        write(comparison, out)
    if json:
        print(json_module.dumps(comparison.to_dict(), indent=1))
    else:
        shown_on = console_for_tables(160)
        for part in table(comparison):
            shown_on.print(fitted(part, shown_on, SPARE))
        if out is not None:
            print(f"Written: {out}")
    for failure in comparison.failed:
        notes.print(f"Failed: {failure}", style="red", markup=False, soft_wrap=True)
    if interrupted or comparison.failed:
        raise typer.Exit(INTERRUPTED if interrupted else 1)
