"""What several commands share: options in the same words, and the network that is made of them."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from unskip.cli.interrupts import Importing

if TYPE_CHECKING:
    from unskip.io.shipping import ModelSource

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
NumClasses = Annotated[
    int | None,
    typer.Option(help="Classes of the network's head.", show_default="those of the weights, or its own", min=1),
]
InputSize = Annotated[str | None, typer.Option(help="Shape of one input, for instance 3x32x32.")]
MAX_SEED = 2**63 - 1  # what PyTorch's generators take
Seed = Annotated[int, typer.Option(help="Seed of the weights, where none are given.", max=MAX_SEED)]
Force = Annotated[bool, typer.Option("--force", help="Overwrite OUT if it is there already.")]


class Command(TyperCommand):
    """Refuses empty arguments, which often come from a shell variable that is not set: Path("") is the folder here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for before, word in zip([ctx.info_name, *args], args, strict=False):
            if not word or (word.startswith("--") and word.endswith("=")):
                option = word or (before if before.startswith("-") else "an argument")
                raise ValueError(f"{ctx.info_name}: {option} is empty; give it a value or leave it out.")
        return super().parse_args(ctx, args)


def source_of(
    network: str,
    weights: Path | None,
    pretrained: bool,
    num_classes: int | None,
    input_size: str | None,
    seed: int,
    *,
    note: bool = True,
) -> "ModelSource":
    """The network that a command ships; the note says on stderr where a name has trained weights that are not taken."""
    with Importing():
        from unskip.io.shipping import ModelSource

    source = ModelSource(
        model_spec=network, weights=weights, pretrained=pretrained, num_classes=num_classes, input_size=input_size,
        seed=seed,
    )  # fmt: skip
    if note and source.note:
        print(source.note, file=sys.stderr)
    return source
