"""quantize: a folded network in 8 bits, and what that costs it: accuracy before and after, and the error of each layer.

Post-training static quantisation by onnxruntime. What comes out is an ordinary ONNX file with QuantizeLinear and
DequantizeLinear around its layers, which onnxruntime, TensorRT, OpenVINO and the compilers for small devices read;
torchao's is a PyTorch program that is fast where its compiler runs. Weights have a scale for each output channel.

Before that, hidden channels are brought to like ranges and biases take back what rounding shifts the mean by, each
where the measured error of the output falls (`unskip.ship.equalize`).

They have 7 bits unless 8 are asked for. A CPU without VNNI adds two products of 8 by 8 bits in 16, which overflows
silently; the file can't know on which CPU it will run, and one bit of the weights costs less (docs/ship.md).
"""

import ast
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from unskip._core.files import check_free, write_atomically
from unskip._core.modules import checked_model
from unskip.ship.accuracy import CHUNK, LIMIT, Accuracy, Batches, Labelled, compare, gather_inputs, labelled_pairs
from unskip.ship.equalize import bias_shifts, output_sqnr, shifted
from unskip.ship.equalize import equalize as equalize_channels
from unskip.ship.fake_quant import FakeQuantized, weighted_layers, without_fake_quant
from unskip.ship.fold import Refusal, absorb_norms
from unskip.ship.writing import (
    INPUT,
    OPSET,
    SCOPES,
    Run,
    check_example,
    need_onnx,
    on_cpu,
    onnx_runner,
    quiet,
    set_metadata,
    write,
)
from unskip.surgery.proof import in_float64
from unskip.surgery.verify import difference

Bits = Literal[7, 8]
Equalize = Literal["auto"] | bool

EXAMPLE = 8  # calibration inputs on which the float files are checked
COMPARED = 128  # calibration inputs that layers are compared on, at most
PIXELS = 2**20  # numbers in these inputs, at most: what all layers write is held in memory, twice
SAME = 1e-3  # relative, of what two float files of one function give
LAYERS = ("Conv", "Gemm", "MatMul")
DEQUANTIZED = "_DequantizeLinear_Output"  # how onnxruntime calls a weight behind its scale
AVERAGES = ("AveragePool", "GlobalAveragePool")  # onnxruntime would round them with the scale of what they average


@dataclass(frozen=True, kw_only=True)
class LayerNoise:
    """What 8 bits do to one layer: 10 log10(signal / noise) in decibel; 6 dB are a bit."""

    path: str
    weights: float  # dB, of its weights against those of the float network
    output: float | None  # dB, of what it writes, all layers before it in 8 bits too; None where it isn't quantised


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A file in 8 bits and what it costs. Its text is a table."""

    path: str
    bits: Bits  # of weights
    calibrated: int  # inputs
    accuracy: Accuracy
    layers: tuple[LayerNoise, ...]  # in the order in which they run
    bytes_before: int  # of the float network as ONNX
    bytes_after: int
    metadata: dict[str, str]  # as the file holds it
    equalized: bool  # whether hidden channels were brought to like ranges, which raised the output's ratio
    corrected: bool  # whether biases were shifted, likewise
    residual: Accuracy | None = None  # of the residual network in 8 bits, made in the same way, where it was given

    def __str__(self) -> str:
        a = self.accuracy
        lines = [
            f"{self.path}: INT8, weights of {self.bits} bits with a scale for each channel, calibrated on "
            f"{_inputs_in_words(self.calibrated)}; {self.bytes_before:,} bytes before, {self.bytes_after:,} after.",
        ]
        if a.before is not None and a.after is not None:
            lines.append(
                f"Accuracy on {a.inputs:,} inputs: {a.before:.2f} % before, {a.after:.2f} % after "
                f"({a.after - a.before:+.2f} points, standard error {a.error:.2f}); the same answer for "
                f"{a.agreement:.2f} %."
            )
        else:
            lines.append(f"The same answer as before for {a.agreement:.2f} % of {a.inputs:,} inputs (no labels given).")
        if self.residual is not None:
            lines += ["", *_side_by_side(a, self.residual)]
        lines += ["", f"{'layer':<40}{'weights, dB':>13}{'output, dB':>13}"]
        for layer in self.layers:
            output = "" if layer.output is None else f"{layer.output:.1f}"
            lines.append(f"{layer.path[-39:]:<40}{layer.weights:>13.1f}{output:>13}")
        return "\n".join(lines)


def quantize(
    model: nn.Module,
    path: str | Path,
    *,
    calibrate: Batches,
    test: Labelled | None = None,
    bits: Bits = 7,
    equalize: Equalize = "auto",
    per_channel: bool = True,
    residual: nn.Module | None = None,
    limit: float = LIMIT,
    opset: int = OPSET,
    metadata: Mapping[str, str] | None = None,
    force: bool = False,
) -> Quantized:
    """Writes a network as ONNX in 8 bits.

    Args:
        model: in eval mode, in float32; fold it first. One of `unskip.ship.fake_quantized` keeps its ranges.
        path: of the file, `.onnx`.
        calibrate: inputs like those that the network will see, some hundreds: a tensor, or batches of a loader. From
            the training set, so that `test` stays unseen.
        test: inputs and their classes, as two tensors or in batches, for the accuracy before and after. Without it the
            answers of both are compared on the calibration data.
        bits: of the weights; 8 is for CPUs with VNNI, for ARM and for accelerators.
        equalize: whether hidden channels are brought to like ranges (`unskip.ship.equalize`); 'auto' does so where
            the output's error on the calibration data falls.
        per_channel: whether weights have a scale for each output channel; False is for targets that take one for each
            layer, for which nothing is equalised.
        residual: the network that `model` was made of, in eval mode, to be quantised in the same way and shown beside
            it; no file is kept.
        limit: points of accuracy that may be lost, and two standard errors more, which is what few test inputs can't
            tell from none; without `test`, percent of answers that may change.
        opset: of ONNX.
        metadata: what else the file is to say.
        force: whether a file that is there may be replaced.

    Returns:
        Accuracy before and after, and the error of each layer. `print` shows a table.

    Raises:
        ValueError: something that was given is wrong, or more than `limit` is lost (with the table); then there is no
            file, or still the old one.

    Example:
        >>> images = torch.rand(64, 3, 32, 32)  # (B, C, H, W), of the training set
        >>> block = unskip.nn.PNNHBlock(3, 16)
        >>> net = nn.Sequential(block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).eval()
        >>> plain = unskip.fold(net, example=images)
        >>> print(unskip.quantize(plain, "net-int8.onnx", calibrate=images, limit=100))
        net-int8.onnx: INT8, weights of 7 bits with a scale for each channel, calibrated on 64 inputs; ...
    """
    path = Path(path).expanduser()
    if path.suffix.lower() != ".onnx":
        raise ValueError(f"quantize: path={str(path)!r} must end in .onnx.")
    if bits not in get_args(Bits) or isinstance(bits, bool):
        raise ValueError(f"quantize: bits={bits!r} must be 7 (safe on every CPU) or 8 (for CPUs with VNNI, and ARM).")
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        raise ValueError(f"quantize: limit={limit!r} must be a number of points, at least 0.")
    if test is not None and not isinstance(test, Iterable):
        raise ValueError(
            f"quantize: test={test!r} must be inputs and their classes, as two tensors or in batches of both."
        )
    if equalize not in ("auto", True, False):
        raise ValueError(f"quantize: equalize={equalize!r} must be 'auto', True or False.")
    if equalize is True and not per_channel:
        raise ValueError(
            "quantize: equalize=True does harm with per_channel=False, one scale for a whole layer; leave one out."
        )
    need_onnx("quantize")
    check_free(path, command="quantize", argument="path", force=force, overwrite="force=True")
    inputs = gather_inputs(calibrate)
    pairs: Iterable[tuple[Tensor, Tensor | None]] = (
        ((x, None) for x in inputs.split(CHUNK)) if test is None else labelled_pairs(test, inputs.shape[1:])
    )
    if isinstance(test, list | tuple):
        pairs = list(pairs)  # what is wrong with them is said before the work; a loader may be too large for that

    with tempfile.TemporaryDirectory() as folder:
        how = _How(bits=bits, equalize=equalize if per_channel else False, per_channel=per_channel, opset=opset)
        made = _make(model, inputs, how, Path(folder), metadata)
        beside = None
        if residual is None:
            (accuracy,) = compare(_runs(made.float_file, made.int8_file), pairs)
        else:
            (Path(folder) / "residual").mkdir()
            other = _make(_without_norms(residual, inputs), inputs, how, Path(folder) / "residual", None)
            pairs = list(pairs)
            if _alike(made.float_file, other.float_file, inputs[:EXAMPLE]):
                accuracy, beside = compare(_runs(made.float_file, made.int8_file, other.int8_file), pairs)
            else:  # trained on since
                (accuracy,) = compare(_runs(made.float_file, made.int8_file), pairs)
                (beside,) = compare(_runs(other.float_file, other.int8_file), pairs)
        layers = _layer_noise(made.float_file, made.int8_file, inputs[: _few(inputs)])
        data, said = _with_metadata(made, accuracy, how, len(inputs))
        result = Quantized(
            path=str(path), bits=bits, calibrated=len(inputs), accuracy=accuracy, layers=layers,
            bytes_before=made.float_file.stat().st_size, bytes_after=len(data), metadata=said, equalized=made.equalized,
            corrected=made.corrected, residual=beside,
        )  # fmt: skip
    if accuracy.exceeds(limit):
        what = "points of accuracy would be lost" if accuracy.before is not None else "% of the answers would change"
        raise ValueError(
            f"quantize: {accuracy.loss:.2f} {what}, more than limit={limit:g}, so nothing was written. More or other "
            "calibration data may help, and the table says which layer suffers most; a higher limit takes it as it "
            f"is.\n{result}"
        )
    write_atomically(path, lambda file: file.write(data), command="quantize")
    return result


@dataclass(frozen=True)
class _How:
    bits: Bits
    equalize: Equalize
    per_channel: bool
    opset: int


@dataclass(frozen=True)
class _Made:
    """A float file, and one in 8 bits."""

    float_file: Path  # of the equalised network, which is the same function
    int8_file: Path
    equalized: bool
    corrected: bool
    metadata: dict[str, str]


@torch.no_grad()
def _make(model: nn.Module, inputs: Tensor, how: _How, folder: Path, metadata: Mapping[str, str] | None) -> _Made:
    """Prepares a network where that lowers the error of its output, and writes it in float and in 8 bits."""
    float_file, int8_file = folder / "float.onnx", folder / "int8.onnx"
    trained = {path: layer for path, layer in model.named_modules() if isinstance(layer, FakeQuantized)}
    for path, layer in trained.items():
        if layer.bits != how.bits:
            raise ValueError(
                f"quantize: bits={how.bits}, and the network was trained with weights of {layer.bits} bits ({path}); "
                f"give bits={layer.bits}."
            )
        if layer.levels != 255:
            raise ValueError(
                f"quantize: {path} reads numbers of fewer than 8 bits (activation_bits), which no INT8 file has; "
                "unskip.ship.loss_in_bits measures such networks."
            )
    if trained:
        model = without_fake_quant(model)
    model = on_cpu(model)
    example = check_example(model, inputs[:EXAMPLE])
    few = inputs[: _few(inputs)]
    found: dict[tuple[bool, bool], tuple[float, nn.Module]] = {}
    if trained or not any(weighted_layers(model)):
        found[False, False] = 0.0, model
    else:
        exact = model(few.clone())
        kinds = {"auto": (False, True), True: (True,), False: (False,)}[how.equalize]
        for alike in kinds:
            try:
                same = equalize_channels(model, few) if alike else model
            except ValueError:  # a network whose function it would not keep
                if how.equalize is True:
                    raise
                continue
            for network, shift in ((same, False), (shifted(same, bias_shifts(same, few, how.bits)), True)):
                found[alike, shift] = output_sqnr(network, few, how.bits, exact), network
    equalized, corrected = max(found, key=lambda way: found[way][0])
    said = write(found[equalized, False][1], float_file, example=example, opset=how.opset, metadata=metadata).metadata
    ready = float_file
    if corrected:
        ready = folder / "corrected.onnx"
        write(found[equalized, True][1], ready, example=example, opset=how.opset, metadata=metadata)
    with quiet():
        _quantize_file(ready, int8_file, inputs, how, {})
        if trained:
            _quantize_file(ready, int8_file, inputs, how, _ranges(int8_file, trained))
    return _Made(float_file, int8_file, equalized, corrected, said)


def _few(inputs: Tensor) -> int:
    """How many calibration inputs layers are compared on."""
    return max(1, min(COMPARED, PIXELS // inputs[0].numel()))


def _without_norms(residual: nn.Module, inputs: Tensor) -> nn.Module:
    """The residual network with its norms in its convolutions, as every runtime has it."""
    residual = checked_model("quantize", residual)
    try:
        return absorb_norms(in_float64("quantize", residual), inputs[:2].double()).eval().float()
    except Refusal:
        return residual


def _side_by_side(plain: Accuracy, residual: Accuracy) -> list[str]:
    rows = [f"{'':<24}{'float':>12}{'residual INT8':>16}{'plain INT8':>14}"]
    if plain.before is not None:
        rows.append(f"{'accuracy, %':<24}{plain.before:>12.2f}{residual.after:>16.2f}{plain.after:>14.2f}")
    rows.append(f"{'same answer, %':<24}{'':>12}{residual.agreement:>16.2f}{plain.agreement:>14.2f}")
    rows.append(f"{'output, dB':<24}{'':>12}{residual.sqnr:>16.1f}{plain.sqnr:>14.1f}")
    return rows


def _inputs_in_words(count: int) -> str:
    return f"{count:,} input{'' if count == 1 else 's'}"


def _alike(a: Path, b: Path, x: Tensor) -> bool:
    """Whether two float files are one function, but for rounding."""
    outputs = [run(x.contiguous()) for run in _runs(a, b)]
    return outputs[0].shape == outputs[1].shape and difference(*outputs).relative < SAME


def _runs(*files: Path) -> list[Run]:
    return [onnx_runner(file.read_bytes()) for file in files]


# ---------------------------------------------------------------- onnxruntime's part


def _quantize_file(
    float_file: Path, int8_file: Path, inputs: Tensor, how: _How, ranges: Mapping[str, FakeQuantized]
) -> None:
    """Writes a float file in 8 bits. `ranges` has the tensors that are rounded as a layer does which has trained so."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.registry import QDQRegistry
    from onnxruntime.quantization.shape_inference import quant_pre_process

    # Shapes of all tensors, in place: what follows reads them, and the names stay as they are.
    quant_pre_process(str(float_file), str(float_file), skip_optimization=True, skip_symbolic_shape=True)
    overrides = {}
    for name, layer in ranges.items():
        scale, zero = np.array(layer.scale, np.float32), np.array(layer.zero_point, np.uint8)
        overrides[name] = [{"quant_type": QuantType.QUInt8, "scale": scale, "zero_point": zero}]
    quantize_static(
        str(float_file),
        str(int8_file),
        _reader(inputs.split(CHUNK)),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=[name for name in QDQRegistry if name not in AVERAGES],
        per_channel=how.per_channel,
        reduce_range=how.bits == 7,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        extra_options={"TensorQuantOverrides": overrides},
    )


def _ranges(int8_file: Path, trained: Mapping[str, FakeQuantized]) -> dict[str, FakeQuantized]:
    """The tensors of a file whose scale decides how these layers read."""
    import onnx

    graph = onnx.load(int8_file).graph
    writers = {name: node for node in graph.node for name in node.output}
    ranges = {}
    for node in graph.node:
        layer = trained.get(_layer_path(node)) if node.op_type in LAYERS else None
        if layer is not None:
            scale = writers[node.input[0]].input[1]
            ranges[scale.removesuffix("_scale")] = layer
    return ranges


def _reader(chunks: Sequence[Tensor]) -> Any:
    """Calibration inputs as onnxruntime asks for them."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(chunks)

        def get_next(self) -> dict[str, np.ndarray] | None:
            chunk = next(self.left, None)
            return None if chunk is None else {INPUT: chunk.numpy()}

    return Reader()


def _layer_noise(float_file: Path, int8_file: Path, inputs: Tensor) -> tuple[LayerNoise, ...]:
    """Every layer with weights, compared between the two files."""
    import onnx
    from onnxruntime.quantization import qdq_loss_debug as debug

    recorded = []
    for file in (float_file, int8_file):
        augmented = file.with_suffix(".all.onnx")
        debug.modify_model_output_intermediate_tensors(str(file), str(augmented))
        recorded.append(debug.collect_activations(str(augmented), _reader(inputs.split(CHUNK))))
    matched = debug.create_activation_matching(recorded[1], recorded[0])
    weights = debug.create_weight_matching(str(float_file), str(int8_file))
    ratio = debug.compute_signal_to_quantization_noice_ratio
    graph = onnx.load(float_file).graph
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    layers = []
    for node in graph.node:
        weight = node.input[1] if node.op_type in LAYERS else ""
        if weight not in weights:
            continue
        written = node.output[0]
        if written not in matched and len(readers.get(written, [])) == 1:
            written = readers[written][0].output[0]  # rounded together with its activation
        pair = matched.get(written, {})
        output = ratio(pair["float"], pair["post_qdq"]) if "float" in pair else None
        noise = ratio(weights[weight]["float"], weights[weight]["dequantized"])
        layers.append(LayerNoise(path=_layer_path(node), weights=noise, output=output))
    return tuple(layers)


def _layer_path(node: Any) -> str:
    """The path of the layer that a node comes from: its weight is named after it, or the exporter has noted it."""
    weight = node.input[1].removesuffix(DEQUANTIZED)
    if weight.endswith(".weight"):
        return weight.removesuffix(".weight")
    scopes = (entry.value for entry in node.metadata_props if entry.key == SCOPES)
    return next((ast.literal_eval(value)[-2] for value in scopes), weight)


def _with_metadata(made: _Made, accuracy: Accuracy, how: _How, calibrated: int) -> tuple[bytes, dict[str, str]]:
    """The file with what it is and what it costs, and that as a dict."""
    import onnx
    import onnxruntime

    steps = [word for word, done in (("equalised", made.equalized), ("biases corrected", made.corrected)) if done]
    each = "for each channel" if how.per_channel else "for each layer"
    kind = ", ".join(["static", "QDQ", f"weights of {how.bits} bits {each}", *steps])
    said = {
        **made.metadata,
        "int8": f"{kind}, onnxruntime {onnxruntime.__version__}",
        "calibrated on": _inputs_in_words(calibrated),
        "int8 agreement": f"{accuracy.agreement:.2f} % of {accuracy.inputs}",
    }
    if accuracy.before is not None:
        said["int8 accuracy"] = f"{accuracy.after:.2f} %, {accuracy.before:.2f} % before, of {accuracy.inputs}"
    model = onnx.load(made.int8_file)
    set_metadata(model, said)
    return model.SerializeToString(), said
