"""`unskip export`: a network as ONNX, torch.export or for a device, checked by running it, in 8 bits on request."""

from pathlib import Path
from typing import Annotated

import typer

from unskip.cli.options import Force, InputSize, Network, NumClasses, Pretrained, Seed, Weights, source_of


def export(
    network: Network,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file: .onnx, .pt2, or what the target writes.")],
    target: Annotated[
        str | None,
        typer.Option(help="A device's tool chain: hls4ml (-o FOLDER), qonnx, tflite, executorch; docs/targets.md."),
    ] = None,
    method: Annotated[
        str, typer.Option(help="Remove its skips first, by a method that keeps its function: rm.", show_default="none")
    ] = "",
    keep_skips: Annotated[
        bool, typer.Option("--keep-skips", help="Write a network with skip connections as it is.")
    ] = False,
    fold: Annotated[
        str, typer.Option(help="Fold it first: dense, fast, no; auto is dense wherever it can be folded.")
    ] = "auto",
    opset: Annotated[
        int | None, typer.Option(help="Version of ONNX's operators.", show_default="18", min=7, max=99)
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Write ONNX or TFLite in 8 bits; needs --calibrate.")] = False,
    calibrate: Annotated[
        str | None,
        typer.Option(
            help="For --int8: digits, an .npz file, or a folder as `unskip train` reads it. It calibrates on "
            "training images and tests on test images."
        ),
    ] = None,
    calibration_images: Annotated[
        int, typer.Option(help="How many training images to calibrate on.", min=1, max=1_000_000)
    ] = 512,
    bits: Annotated[
        int,
        typer.Option(
            help="Bits of the weights in ONNX: 7 is safe on every CPU; 8 for VNNI, ARM, accelerators.", min=7, max=8
        ),
    ] = 7,
    limit: Annotated[float, typer.Option(help="Points of accuracy that INT8 may lose.", min=0, max=100)] = 0.5,
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: NumClasses = None,
    input_size: InputSize = None,
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Writes a network as ONNX, torch.export or for a device, runs the file, and prints how far the two agree.

    Exit codes: 0 done; 2 an argument is wrong, or the file is not the network's function, or INT8 loses
    more than the limit, and nothing was written.
    """
    source = source_of(network, weights, pretrained, num_classes, input_size, seed)
    from unskip.io.shipping import export_to_file, int8_of

    how = int8_of(int8, calibrate, inputs=calibration_images, bits=bits, limit=limit)
    words, written = export_to_file(
        source, out, method=method, keep_skips=keep_skips, form=fold, target=target, opset=opset, int8=how, force=force,  # type: ignore[arg-type]
    )  # fmt: skip
    print(f"{words}\n{written}")
