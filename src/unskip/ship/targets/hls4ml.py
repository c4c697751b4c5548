"""hls4ml: C++ for the high-level synthesis of an FPGA, FIFOs between layers (Duarte et al. 2018, arXiv:1804.06913).

The project's own C++ is compiled and run here, with fixed-point numbers as on the device: once with so many bits that
only a wrong layer could show, and once with those that were asked for. Its input is one image as (height, width,
channels). A residual network needs a FIFO more for each skip, as deep as its branch is long, and a copy of the stream.
"""

import contextlib
import io
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from unskip._core.errors import reason
from unskip._core.files import explained
from unskip.ship.targets.layers import ADDITIONS, named_layers
from unskip.ship.targets.target import ExportedFor, Job, Target, refuse
from unskip.ship.writing import Run, quiet
from unskip.surgery.verify import difference

KNOWN = (
    nn.Conv1d, nn.Conv2d, nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.PReLU,
    nn.Sigmoid, nn.Tanh, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.ConstantPad1d, nn.ConstantPad2d,
    nn.Flatten,
)  # fmt: skip
PRODUCTS = (nn.Conv1d, nn.Conv2d, nn.Linear)  # whose results hls4ml gives as many bits as they need
FRACTION = 18  # bits behind the point that prove the layers right
INTEGER = 10  # bits before it, at least
PROVEN = 4  # inputs of the example that the layers are proved on: a second or so each
WRONG = 0.01  # relative error with so many bits that a wrong layer is behind, and no rounding
CONFIG = "hls4ml_config.yml"


@dataclass(frozen=True, kw_only=True)
class HlsProject(ExportedFor):
    """A folder with C++ that was compiled and run."""

    precision: str
    fifos: int  # streams, of input and output too
    fifo_bytes: int  # that they hold, as declared
    clones: int  # streams that are copied, for a skip
    fixed_error: float  # relative, with that precision
    same: float  # percent of the answers that are the network's, with that precision


@dataclass(frozen=True, kw_only=True, eq=False)
class Hls4ml(Target):
    """A folder with an hls4ml project, `io_stream`."""

    name: ClassVar[str] = "hls4ml"
    suffix: ClassVar[str] = ""
    modules: ClassVar[tuple[str, ...]] = ("hls4ml",)
    layer_by_layer: ClassVar[bool] = True

    precision: str = "ap_fixed<16,6>"  # of weights and activations: all bits, and those before the point with the sign
    reuse_factor: int = 64  # products that share a multiplier; hls4ml takes the nearest that divides a layer
    backend: str = "Vitis"  # or another of hls4ml's that have C++ emulation
    limit: float = 10.0  # percent of the example's answers that may change with that precision

    def __post_init__(self) -> None:
        self.bits  # noqa: B018 - refuses a wrong precision
        if not self.reuse_factor >= 1:
            raise ValueError(f"Hls4ml: reuse_factor={self.reuse_factor!r} must be at least 1.")

    @property
    def bits(self) -> tuple[int, int]:
        """All bits, and those before the point."""
        found = re.fullmatch(r"ap_fixed<\s*(\d+)\s*,\s*(\d+)\s*>", self.precision)
        if not found or not 1 <= int(found[2]) <= int(found[1]):
            raise ValueError(
                f"Hls4ml: precision={self.precision!r} must be all bits and those before the point, for instance "
                "'ap_fixed<16,6>'."
            )
        return int(found[1]), int(found[2])

    def check(self, job: Job) -> None:
        for name, layer in named_layers(job.layers):
            if layer in ADDITIONS:
                continue
            if type(layer) not in KNOWN:
                what = type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", str(layer))
                raise refuse(self.name, name, f"hls4ml has no {what} in its PyTorch front end")
            if isinstance(layer, nn.Conv1d | nn.Conv2d):
                if layer.groups != 1:
                    raise refuse(
                        self.name, name, f"it has {layer.groups} groups, and hls4ml has no grouped convolution in its "
                        "PyTorch front end (rm has none with middle='dense')",
                    )  # fmt: skip
                if layer.padding_mode != "zeros" or isinstance(layer.padding, str) or set(layer.dilation) != {1}:
                    raise refuse(self.name, name, "hls4ml takes zero padding, given in pixels, and no dilation")
        if not job.path.suffix:
            _refuse_overflow(job, self)

    def make(self, job: Job) -> HlsProject:
        if shutil.which("g++") is None:
            raise ValueError("export: hls4ml's emulation needs a C++ compiler, and g++ is not there; install it.")
        example, expected = job.references.inputs[0], job.references.outputs[0]
        integer = max(INTEGER, 1 + max(bits for bits, _ in _integer_bits(job.layers, example)))
        proof = f"ap_fixed<{FRACTION + integer},{integer}>"
        with explained("the folder", job.path, command="export"), _beside(job.path) as folder:
            run = self._emulated(job, folder / "proof", proof)[0]
            error = difference(expected[:PROVEN], run(example[:PROVEN])).relative
            if not error <= WRONG:
                raise ValueError(
                    f"export: hls4ml's project with {proof} differs from the network by a relative error of "
                    f"{error:.1e}, above {WRONG:g}, so it was not kept. Please tell us which network it was."
                )
            project = folder / "project"
            run, facts = self._emulated(job, project, self.precision)
            found = run(example)
            same = 100 * (found.argmax(1) == expected.argmax(1)).double().mean().item()
            if not 100 - same <= self.limit:
                raise ValueError(
                    f"export: with precision={self.precision!r} {100 - same:.1f} % of the example's answers change, "
                    f"more than limit={self.limit:g}, so nothing was written; give more bits. With {proof} the "
                    f"relative error is {error:.1e}."
                )
            fixed_error = difference(expected, found).relative
            notes = (
                f"With {proof} only a wrong layer could show. With {self.precision}: relative error {fixed_error:.1e}, "
                f"the same answer for {same:.1f} % of the example's {len(example)} inputs.",
                f"{facts['fifos']} FIFOs of {facts['fifo_bytes']:,} bytes, {facts['clones']} streams copied for skips. "
                f"The input is (height, width, channels).",
            )
            for built in (project / "firmware").glob("*.so"):
                built.unlink()  # it has the path of its weights in it, and build_lib.sh makes it again
            config = project / CONFIG
            config.write_text(config.read_text(encoding="utf-8").replace(str(project), str(job.path)), encoding="utf-8")
            size = sum(file.stat().st_size for file in project.rglob("*") if file.is_file())
            os.replace(project, job.path)
        return job.result(
            HlsProject, format="hls4ml", target=self.name, error=error, bytes=size, notes=notes, same=same,
            precision=self.precision, fixed_error=fixed_error, batches=(len(example[:PROVEN]),),
            ran_by=f"hls4ml {version('hls4ml')}'s C++ emulation with {proof}", **facts,
        )  # fmt: skip

    def _emulated(self, job: Job, folder: Path, precision: str) -> tuple[Run, dict[str, int]]:
        """Writes and compiles a project. Returns it as a program, and what it has of streams."""
        import hls4ml

        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), quiet():
                config = hls4ml.utils.config_from_pytorch_model(
                    job.layers, tuple(job.one.shape[1:]), granularity="name", backend=self.backend,
                    default_precision=precision, default_reuse_factor=self.reuse_factor,
                    channels_last_conversion="internal",
                )  # fmt: skip
                for part in (config["Model"], *config["LayerName"].values()):
                    part["Strategy"] = "Resource" if self.reuse_factor > 1 else "Latency"
                model = hls4ml.converters.convert_from_pytorch_model(
                    job.layers, output_dir=str(folder), backend=self.backend, io_type="io_stream", hls_config=config
                )
                model.compile()
        except Exception as error:  # hls4ml raises Exception itself
            raise ValueError(f"export: hls4ml can't convert {type(job.model).__name__}: {reason(error)}.") from error
        source = (folder / "firmware" / "myproject.cpp").read_text(encoding="utf-8")
        streams = [
            (variable.pragma[1], variable.shape[-1], variable.type.precision.width)
            for layer in model.get_layers() for variable in layer.variables.values()
            if isinstance(getattr(variable, "pragma", None), tuple) and variable.pragma[0] == "stream"
        ]  # fmt: skip
        facts = {
            "fifos": len(streams),
            "fifo_bytes": int(sum(math.prod(map(int, stream)) for stream in streams) // 8),
            "clones": len(re.findall(r"nnet::clone_stream<", source)),
        }

        def run(x: Tensor) -> Tensor:
            with contextlib.redirect_stdout(io.StringIO()):
                y = model.predict(x.movedim(1, -1).contiguous().numpy())
            return torch.from_numpy(y).reshape(len(x), -1)

        return run, facts


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A folder for the work on the same disk, so that the result can be renamed."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        yield Path(folder).resolve()


def _integer_bits(layers: nn.Module, x: Tensor) -> list[tuple[int, str]]:
    """How many bits before the point, with the sign, hold what the input and each layer has, but for products."""
    assert isinstance(layers, fx.GraphModule)
    found = [(_bits(x), "the input")]

    class Watching(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            y = super().run_node(n)
            layer = self.module.get_submodule(str(n.target)) if n.op == "call_module" else None
            if n.op not in ("placeholder", "output") and not isinstance(layer, PRODUCTS):
                found.append((_bits(y), f"what {str(n.target) if layer is not None else n.name!r} writes"))
            return y

    with torch.no_grad():
        Watching(layers).run(x.clone())
    return found


def _bits(x: Tensor) -> int:
    return 1 + max(0, math.floor(math.log2(max(x.abs().max().item(), 1e-9))) + 1)


def _refuse_overflow(job: Job, target: Hls4ml) -> None:
    """Refuses numbers that would wrap around."""
    width, integer = target.bits
    needed, where = max(_integer_bits(job.layers, job.references.inputs[0]), key=lambda found: found[0])
    if needed > integer:
        raise ValueError(
            f"export: {where} needs {needed} bits before the point on the example, and precision={target.precision!r} "
            f"has {integer}, so that it would wrap around; give Hls4ml(precision='ap_fixed<{width + needed - integer},"
            f"{needed}>'), or scale the input."
        )
