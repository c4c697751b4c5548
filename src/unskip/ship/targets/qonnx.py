"""QONNX: ONNX with quantisers of any bits (Pappalardo et al. 2022, arXiv:2206.07527), which FINN and hls4ml read.

A float network is ordinary ONNX, for one input, with the shape of every tensor and an IR version that qonnx keeps.
Where qonnx is installed, its own executor runs the file too.
"""

from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import ClassVar

import torch

from unskip._core.errors import reason
from unskip.ship.targets.target import ExportedFor, Job, Target, importable
from unskip.ship.writing import INPUT, OUTPUT, Run


@dataclass(frozen=True, kw_only=True, eq=False)
class Qonnx(Target):
    """An .onnx file for qonnx's transformations, FINN and hls4ml's ONNX front end."""

    name: ClassVar[str] = "qonnx"
    suffix: ClassVar[str] = ".onnx"
    modules: ClassVar[tuple[str, ...]] = ("qonnx",)

    def make(self, job: Job) -> ExportedFor:
        return self.make_onnx(job)

    def make_onnx(self, job: Job) -> ExportedFor:
        done = super().make_onnx(job)
        if importable("qonnx"):
            return done
        note = "qonnx can't be imported here, so its executor did not run it: `pip install 'unskip[qonnx]'`."
        return replace(done, notes=(note,))

    def onnx_runners(self, data: bytes) -> dict[str, Run]:
        executor = {f"qonnx {version('qonnx')}": _runner(data)} if importable("qonnx") else {}
        return super().onnx_runners(data) | executor


def _runner(data: bytes) -> Run:
    """What a model computes, by qonnx's executor."""
    import onnx
    from qonnx.core.modelwrapper import ModelWrapper
    from qonnx.core.onnx_exec import execute_onnx

    model = ModelWrapper(onnx.load_from_string(data))

    def run(x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.from_numpy(execute_onnx(model, {INPUT: x.numpy()})[OUTPUT])
        except Exception as error:  # onnxruntime's own kinds: each node is run as a model of onnx's newest IR version
            raise ValueError(
                f"export: qonnx's executor can't run the file: {reason(error)}. Where onnxruntime does not know the IR "
                "version, `pip install 'onnx<1.21'` helps."
            ) from error

    return run
