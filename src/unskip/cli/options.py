"""What several commands are given in the same words."""

from pathlib import Path
from typing import Annotated

import typer

Network = Annotated[
    str,
    typer.Argument(
        help="A name of `unskip models` or of timm, timm:NAME, torchvision:NAME, NAME:option=value, the folder of a "
        "run of `unskip train` or its checkpoint.pt, a file that `unskip plainify` or `unskip fold` wrote, or "
        "package.module:function, which is imported and called."
    ),
]
Weights = Annotated[Path | None, typer.Option(help="A state dict for the network (.pt, .safetensors).")]
Pretrained = Annotated[
    bool, typer.Option("--pretrained", help="Take the trained weights of a name: the package's, or timm's (downloads).")
]
InputSize = Annotated[str | None, typer.Option(help="Shape of one input, for instance 3x32x32.")]
Seed = Annotated[int, typer.Option(help="Seed of the weights, where none are given.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite OUT if it is there already.")]
