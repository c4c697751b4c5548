"""`unskip bench`: throughput and memory of networks side by side."""

import json as json_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def bench(
    networks: Annotated[
        list[str],
        typer.Argument(
            help="Two or more: names of `unskip models` or of timm, NAME:option=value,... to build one otherwise, or "
            "whatever `unskip doctor` takes. Ratios are to the first."
        ),
    ],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    batch: Annotated[int, typer.Option(help="Images; 256 on a GPU and 8 on a CPU unless given.")] = 0,
    size: Annotated[int, typer.Option(help="Side of the images in px; the networks' own unless given.")] = 0,
    precision: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    channels_last: Annotated[bool, typer.Option(help="Memory layout of images and weights.")] = True,
    train: Annotated[bool | None, typer.Option("--train/--no-train", help="Training; both unless given.")] = None,
    infer: Annotated[bool | None, typer.Option("--infer/--no-infer", help="Inference; both unless given.")] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Only compiled, or only eager; both unless given.")
    ] = None,
    fold: Annotated[bool, typer.Option(help="Inference of folded networks, of others with their norms fused.")] = True,
    graph: Annotated[bool, typer.Option(help="On a GPU each step is one CUDA graph.")] = True,
    rounds: Annotated[int, typer.Option(help="In each of which every network has its turn.")] = 7,
    seconds: Annotated[float, typer.Option(help="Of one turn.")] = 0.5,
    threads: Annotated[int, typer.Option(help="Of PyTorch on a CPU; as they are unless given.")] = 0,
    compile_workers: Annotated[
        int, typer.Option(help="Processes that compile at once beforehand; with 0 each network in its turn.")
    ] = 0,
    fit: Annotated[
        str | None, typer.Option(help="Search for the largest batch that trains, eagerly, in this memory, e.g. 8GiB.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for bench.json and bench.png, written as it goes.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Times training and inference of two or more networks in one process, in turns, and measures their memory.

    For inference plain networks are folded and others have their norms fused, each in the best form that it has. Ctrl-C
    prints what is there. Exit codes: 0 there is a table, 1 some network failed, 2 something that you gave is wrong.
    """
    # Training's modules and matplotlib take seconds to import, and other commands don't need them.
    from unskip.bench import Comparison, Setting, parse_bytes, table, write

    setting = Setting(
        device=device,
        batch=batch,
        size=size,
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
        fit=parse_bytes(fit) if fit else 0,
    )
    notes = Console(stderr=True, highlight=False)
    with notes.status("building") as status:
        comparison = Comparison(networks, setting, status.update)
        try:
            comparison.run(lambda: write(comparison, out) if out is not None else None)
        except KeyboardInterrupt:
            notes.print("Interrupted; this is what there is.", style="yellow")
    if out is not None:
        write(comparison, out)
    if json:
        print(json_module.dumps(comparison.to_dict(), indent=1))
    else:
        shown_on = Console(highlight=False)
        shown_on = shown_on if shown_on.is_terminal else Console(width=160, highlight=False)
        for part in table(comparison):
            shown_on.print(part)
        if out is not None:
            print(f"Written: {out}")
    if any(row.error for row in comparison.rows):
        raise typer.Exit(1)
