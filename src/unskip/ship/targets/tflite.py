"""TFLite: what LiteRT, TensorFlow Lite for Microcontrollers and most phones run. Converted by litert-torch.

Its input is one image as (1, height, width, channels). With calibration data the file is 8 bits throughout, input and
output too: weights with a scale for each channel, activations with one, by minimum and maximum.
"""

import contextlib
import io
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from unskip._core.errors import reason
from unskip._core.files import write_atomically
from unskip.ship.accuracy import LIMIT, Accuracy, Batches, Labelled, compare, gather_inputs, labelled_pairs
from unskip.ship.targets.target import ExportedFor, Job, Target, one_by_one
from unskip.ship.writing import Run, quiet

SIGNATURE = "serving_default"


@dataclass(frozen=True, kw_only=True)
class TfliteInt8(ExportedFor):
    """A file in 8 bits."""

    accuracy: Accuracy  # of the float .tflite and of this one
    calibrated: int  # inputs


class ChannelsLast(nn.Module):
    """A network that takes its input as (batch, ..., channels)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.network(x.movedim(-1, 1))
        return output


@dataclass(frozen=True, kw_only=True, eq=False)
class Tflite(Target):
    """A .tflite file, in 8 bits with calibration data."""

    name: ClassVar[str] = "tflite"
    suffix: ClassVar[str] = ".tflite"
    modules: ClassVar[tuple[str, ...]] = ("litert_torch", "ai_edge_litert.interpreter", "ai_edge_quantizer")

    calibrate: Batches | None = None  # inputs like those that the network will see: makes it INT8
    test: Labelled | None = None  # inputs and their classes, for the accuracy before and after
    limit: float = LIMIT  # points of accuracy that INT8 may lose; without `test`, percent of answers that may change

    def make(self, job: Job) -> ExportedFor:
        said = io.StringIO()
        try:
            with quiet(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                data = _converted(job)
        except Exception as failure:  # of many kinds
            raise ValueError(
                f"export: litert-torch can't convert {type(job.model).__name__}: {reason(failure)}."
            ) from failure
        error = job.check(runner(data))
        facts: dict[str, Any] = {
            "format": "tflite", "target": self.name, "error": error,
            "ran_by": f"LiteRT {version('ai-edge-litert')}",
        }  # fmt: skip
        if self.calibrate is None:
            note = f"The input is {_shape(job.one)} in float32."
            write_atomically(job.path, lambda file: file.write(data), command="export")
            return job.result(**facts, bytes=len(data), notes=(note,))
        inputs = gather_inputs(self.calibrate)
        with quiet(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            int8 = _quantized(data, inputs)
        pairs: Iterable[tuple[Tensor, Tensor | None]] = (
            ((x, None) for x in inputs.split(64)) if self.test is None else labelled_pairs(self.test, inputs.shape[1:])
        )
        (accuracy,) = compare([one_by_one(runner(each)) for each in (data, int8)], pairs)
        if accuracy.exceeds(self.limit):
            raise ValueError(
                f"export: INT8 loses {accuracy.loss:.2f} points of accuracy (without classes: percent of the answers), "
                f"more than limit={self.limit:g}, so nothing was written. Give more or other calibration data, or a "
                "higher limit."
            )
        write_atomically(job.path, lambda file: file.write(int8), command="export")
        before_after = (
            f"the same answer for {accuracy.agreement:.2f} %"
            if accuracy.before is None or accuracy.after is None
            else f"accuracy {accuracy.before:.2f} % before, {accuracy.after:.2f} % after "
            f"({accuracy.after - accuracy.before:+.2f} points)"
        )
        notes = (
            f"The float file agrees so; this one is INT8, calibrated on {len(inputs):,} inputs: on {accuracy.inputs:,} "
            f"inputs {before_after}. {_scales(int8)}",
        )
        return job.result(TfliteInt8, **facts, bytes=len(int8), notes=notes, accuracy=accuracy, calibrated=len(inputs))


def runner(data: bytes) -> Run:
    """What a .tflite file computes of one input as PyTorch has it, in float whatever the file takes."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=data, num_threads=1)
    interpreter.allocate_tensors()
    (source,), (output,) = interpreter.get_input_details(), interpreter.get_output_details()

    def run(x: Tensor) -> Tensor:
        given = x.movedim(1, -1).contiguous().numpy()
        if source["dtype"] == np.int8:
            scale, zero = source["quantization"]
            given = np.clip(np.round(given / scale) + zero, -128, 127).astype(np.int8)
        interpreter.set_tensor(source["index"], given)
        interpreter.invoke()
        y = interpreter.get_tensor(output["index"])
        if output["dtype"] == np.int8:
            scale, zero = output["quantization"]
            y = (y.astype(np.float32) - zero) * np.float32(scale)
        return torch.from_numpy(y.copy())

    return run


def _converted(job: Job) -> bytes:
    import litert_torch

    one = job.one.movedim(1, -1).contiguous()
    return bytes(litert_torch.convert(ChannelsLast(job.layers).eval(), (one,)).model_content())


def _quantized(data: bytes, inputs: Tensor) -> bytes:
    """8 bits throughout, by ranges that the float file shows on the inputs."""
    from ai_edge_litert.interpreter import Interpreter
    from ai_edge_quantizer import quantizer, recipe

    ((name, _),) = ((n, 0) for n in Interpreter(model_content=data).get_signature_list()[SIGNATURE]["inputs"])
    work = quantizer.Quantizer(bytearray(data), recipe.static_wi8_ai8())
    images = inputs.movedim(1, -1).contiguous().numpy()
    ranges = work.calibrate({SIGNATURE: [{name: image[None]} for image in images]}, num_threads=1)
    return bytes(work.quantize(ranges, enable_progress_report=False).quantized_model)


def _shape(one: Tensor) -> str:
    return str(tuple(one.movedim(1, -1).shape))


def _scales(data: bytes) -> str:
    from ai_edge_litert.interpreter import Interpreter

    (source,) = Interpreter(model_content=data).get_input_details()
    scale, zero = source["quantization"]
    shape = tuple(map(int, source["shape"]))
    return f"The input is {shape} in {np.dtype(source['dtype'])}: {scale:.6g} * (q {-zero:+d})."
