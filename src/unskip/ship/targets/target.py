"""What all targets share: the adapted ONNX file that their tools read, and how a result is made, checked and named."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from unskip._core.files import check_free, write_atomically
from unskip.ship.targets.layers import as_layers
from unskip.ship.writing import (
    OPSET,
    Exported,
    References,
    Run,
    check_example,
    describe,
    need_float32,
    need_onnx,
    on_cpu,
    onnx_model,
    onnx_runner,
    references_of,
    set_metadata,
    stored_weights,
    traced,
)  # fmt: skip

IR_VERSION = 10  # of ONNX, 2024: a higher one is refused by older runtimes


@dataclass(frozen=True, kw_only=True)
class ExportedFor(Exported):
    """What was written for a target. Its text is a line, and one more for each thing to know."""

    target: str
    ran_by: str  # the program that ran it, with its version
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        kind = f"ONNX, opset {self.opset}, for {self.target}" if self.format == "onnx" else self.target
        inputs = sum(self.batches)
        first = (
            f"{self.path}: {kind}, {self.weights:,} weights, {self.bytes:,} bytes. Run by {self.ran_by} on {inputs} "
            f"input{'' if inputs == 1 else 's'}, one at a time, {self.agreement}."
        )
        return "\n".join((first, *self.notes))


@dataclass(frozen=True, kw_only=True)
class Job:
    """A network on its way to a target."""

    model: nn.Module  # as it was given, on the CPU
    layers: nn.Module  # the same as layers and additions, where torch.fx can follow it
    references: References  # what it computes
    path: Path
    opset: int
    about: dict[str, str]

    @property
    def one(self) -> Tensor:
        """One input."""
        return self.references.inputs[0][:1]

    @property
    def weights(self) -> int:
        """Numbers that the network holds."""
        return sum(p.numel() for p in self.layers.parameters())

    def check(self, run: Run) -> float:
        """The largest relative error of what was made, run on every input alone. Refuses another function."""
        return self.references.check(one_by_one(run), self.path)

    def result(self, kind: type[ExportedFor] = ExportedFor, **facts: Any) -> Any:
        """A result with what is known of every one of them."""
        return kind(
            path=str(self.path), rounding=self.references.rounding, metadata=self.about,
            **{"opset": None, "weights": self.weights, "batches": self.references.batches, **facts},
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Target(ABC):
    """A device's tool chain. A subclass has its settings."""

    name: ClassVar[str]
    suffix: ClassVar[str]  # of what its tools write; "" is a folder
    modules: ClassVar[tuple[str, ...]]  # what its tools are imported as
    layer_by_layer: ClassVar[bool] = False  # whether its tools read nothing but layers and additions

    def check(self, job: Job) -> None:  # noqa: B027 - most tools say it themselves
        """Refuses a layer that the tools don't know, by name."""

    @abstractmethod
    def make(self, job: Job) -> ExportedFor:
        """Has the tools write the file, and runs it."""

    def make_onnx(self, job: Job) -> ExportedFor:
        """Writes the ONNX file that the tools read, and has onnxruntime run it."""
        model = adapted_onnx(job)
        data = bytes(model.SerializeToString())
        runs = self.onnx_runners(data)
        error = max(job.check(run) for run in runs.values())
        write_atomically(job.path, lambda file: file.write(data), command="export")
        return job.result(
            format="onnx", target=self.name, opset=job.opset, error=error, bytes=len(data),
            weights=stored_weights(model), ran_by=" and ".join(runs),
        )  # fmt: skip

    def onnx_runners(self, data: bytes) -> dict[str, Run]:
        """The programs that are to run the ONNX file, by name."""
        return {f"onnxruntime {version('onnxruntime')}": onnx_runner(data)}

    def need(self) -> None:
        """Refuses to start without the tools."""
        missing = [name for name in self.modules if not importable(name)]
        if missing:
            raise ValueError(
                f"export: target={self.name!r} needs {', '.join(missing)}, which can't be imported here; install "
                f"`pip install 'unskip[{self.name}]'` in an environment of its own. A path that ends in .onnx needs "
                "none of it: it writes the ONNX file for these tools."
            )


def importable(name: str) -> bool:
    """Whether a module can be imported."""
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def export_to(
    target: Target, model: nn.Module, path: str | Path, *, example: Tensor, opset: int = OPSET,
    metadata: Mapping[str, str] | None = None, force: bool = False,
) -> ExportedFor:  # fmt: skip
    """Writes a network for a target and checks it by running it. Arguments are those of `unskip.export`."""
    path = Path(path).expanduser()
    suffix = path.suffix.lower()
    if suffix not in (".onnx", target.suffix):
        wanted = f"end in {target.suffix}" if target.suffix else "be a folder without an ending"
        other = "" if target.suffix == ".onnx" else ", or end in .onnx for the file that its tools read elsewhere"
        raise ValueError(f"export: path={str(path)!r} for target={target.name!r} must {wanted}{other}.")
    model = on_cpu(model)
    example = check_example(model, example)
    need_float32(example)
    if suffix == ".onnx":
        need_onnx("export")
    else:
        target.need()
    if not suffix and path.exists():
        raise ValueError(f"export: {str(path)!r} is there already, and a folder is not replaced; choose another path.")
    check_free(path, command="export", argument="path", force=force, overwrite="force=True")
    about = describe(model, example, metadata) | {"target": target.name}
    about["input"] = about["input"].replace("batch", "1", 1)
    try:
        layers: nn.Module = as_layers(model, example)
    except ValueError:
        if target.layer_by_layer:
            raise
        layers = model
    job = Job(
        model=model, layers=layers, references=references_of(model, example), path=path,
        opset=opset, about=about,
    )  # fmt: skip
    target.check(job)
    return target.make_onnx(job) if suffix == ".onnx" else target.make(job)


def adapted_onnx(job: Job) -> Any:
    """An ONNX model of one input at a time, with the shapes of all tensors and an IR version that all tools read."""
    import onnx

    model = onnx_model(traced(job.layers, job.one, free=False), job.opset)
    model.ir_version = min(model.ir_version, IR_VERSION)
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    job.about.update(opset=str(job.opset))
    set_metadata(model, job.about)
    return model


def one_by_one(run: Run) -> Run:
    """A program that takes one input, as one that takes a batch."""
    return lambda x: torch.cat([run(one.contiguous()) for one in x.split(1)])


def refuse(target: str, layer: str, why: str) -> ValueError:
    """What to raise for a layer that a target does not know."""
    return ValueError(f"export: target={target!r} can't have {layer!r}: {why}.")
