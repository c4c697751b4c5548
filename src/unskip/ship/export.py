"""export: a network as a file that other programs run, and the proof that the file computes what the network does."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from unskip.ship.targets import Target, export_for
from unskip.ship.writing import OPSET, Exported, write


def export(
    model: nn.Module,
    path: str | Path,
    *,
    example: Tensor,
    target: str | Target | None = None,
    opset: int = OPSET,
    metadata: Mapping[str, str] | None = None,
    force: bool = False,
) -> Exported:
    """Writes a network as ONNX (`.onnx`) or torch.export (`.pt2`), or for a target, and checks it by running it.

    The batch is free, and so is the number of tokens, up to the example's; the rest of the shape is the example's. The
    file is for a network on the CPU. A file for a target takes one input at a time.

    Args:
        model: in eval mode; fold it first for a graph of plain layers.
        path: of the file; its ending decides the format. For the target hls4ml a folder.
        example: a batch of inputs.
        target: 'hls4ml', 'qonnx', 'tflite' or 'executorch', or one with settings,
            `unskip.ship.targets.Hls4ml(precision="ap_fixed<28,10>")`. With a path that ends in .onnx, the file is ONNX
            that the target's tools read in an environment of their own. None and 'onnx' are ONNX for any runtime.
        opset: of ONNX.
        metadata: what else the file is to say, for instance how inputs are normalised.
        force: whether a file that is there may be replaced.

    Returns:
        What was written, with the error that was found.

    Raises:
        ValueError: something that was given is wrong, or the file would not be the network's function; then there is
            no file, or still the old one.

    Example:
        >>> plain = unskip.fold(unskip.create_model("pnnh_resnet20").eval())
        >>> print(unskip.export(plain, "net.onnx", example=torch.zeros(1, 3, 32, 32)))  # (B, C, H, W), B is free
        net.onnx: ONNX, opset 18, 268,346 weights, ...
    """
    if isinstance(opset, bool) or not isinstance(opset, int):
        raise ValueError(f"export: opset={opset!r} must be a whole number, for instance {OPSET}.")
    if target is not None and target != "onnx":
        return export_for(target, model, path, example=example, opset=opset, metadata=metadata, force=force)
    if target == "onnx" and Path(path).suffix.lower() != ".onnx":
        raise ValueError(f"export: path={str(path)!r} must end in .onnx for target='onnx'.")
    return write(model, path, example=example, opset=opset, metadata=metadata, force=force)
