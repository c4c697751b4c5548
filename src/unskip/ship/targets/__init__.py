"""Targets: device tool chains that a network is written for, one file each, and their settings."""

from typing import Any

from torch import nn

from unskip.ship.targets.executorch import Executorch
from unskip.ship.targets.hls4ml import Hls4ml, HlsProject
from unskip.ship.targets.qonnx import Qonnx
from unskip.ship.targets.target import ExportedFor, Target, export_to
from unskip.ship.targets.tflite import Tflite

__all__ = ["TARGETS", "Executorch", "ExportedFor", "Hls4ml", "HlsProject", "Qonnx", "Target", "Tflite", "export_for"]

TARGETS: dict[str, type[Target]] = {kind.name: kind for kind in (Hls4ml, Qonnx, Tflite, Executorch)}


def export_for(target: object, model: nn.Module, path: Any, **settings: Any) -> ExportedFor:
    """Writes a network for a target by name or with settings, as `unskip.export` does."""
    if isinstance(target, str) and target in TARGETS:
        target = TARGETS[target]()
    if not isinstance(target, Target):
        raise ValueError(
            f"export: target={target!r} must be 'onnx', {', '.join(map(repr, TARGETS))}, or one with settings, for "
            "instance unskip.ship.targets.Hls4ml(precision='ap_fixed<28,10>')."
        )
    return export_to(target, model, path, **settings)
