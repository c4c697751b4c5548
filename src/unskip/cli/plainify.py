"""`unskip plainify`: a network without its skips, exactly where the method can."""

from pathlib import Path
from typing import Annotated

import typer

from unskip.cli.options import Force, InputSize, Network, NumClasses, Pretrained, Seed, Weights, source_of


def plainify(
    network: Network,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file: .safetensors.")] = None,
    method: Annotated[
        str, typer.Option(help="rm keeps the function. `unskip models --methods` lists all with their options.")
    ] = "rm",
    options: Annotated[str, typer.Option(help="The method's options, for instance '{norm = \"absorb\"}'.")] = "{}",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would cost, and write nothing.")] = False,
    limit: Annotated[
        float | None,
        typer.Option(help="How many times its parameters the network may have after rm; 4 unless given.", min=1),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict/--no-strict", help="Refuse a block that the method can't make skip-free, or leave it as it is."
        ),
    ] = True,
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: NumClasses = None,
    input_size: InputSize = None,
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Removes the skips of a network and prints what it costs and, for rm, the proof that its function stayed.

    The file can be given to `unskip fold`, `unskip export` and `unskip doctor`.

    Exit codes: 0 done; 2 an argument is wrong, it would grow beyond the limit, or the proof failed, and
    nothing was written.
    """
    source = source_of(network, weights, pretrained, num_classes, input_size, seed, note=False)
    from unskip.io.shipping import parse_options, plainify_to_file

    given = parse_options(options, command="plainify")
    print(
        plainify_to_file(
            source, out, method=method, options=given, limit=limit, strict=strict, dry_run=dry_run, force=force
        )
    )
