"""`unskip fold`: a trained network without skips as convolution, bias, activation and pooling."""

from pathlib import Path
from typing import Annotated

import typer

from unskip.cli.options import Force, InputSize, Network, NumClasses, Pretrained, Seed, Weights, source_of


def fold(
    network: Network,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file: .safetensors.")],
    form: Annotated[str, typer.Option(help="dense: plain layers alone; fast: closed-form coders stay sums.")] = "dense",
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: NumClasses = None,
    input_size: InputSize = None,
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Folds a network and prints the proof that its function stayed. `unskip export` takes the file, and `doctor` too.

    Exit codes: 0 done; 2 an argument is wrong, or the proof failed, and nothing was written.
    """
    source = source_of(network, weights, pretrained, num_classes, input_size, seed)
    from unskip.io.shipping import fold_to_file

    print(fold_to_file(source, out, form=form, force=force))  # type: ignore[arg-type]
