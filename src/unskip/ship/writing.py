"""Networks as files of other programs: how .onnx and .pt2 are written, run and compared with the network.

`.onnx` is written by PyTorch's exporter on top of torch.export, `.pt2` by torch.export itself. Either is read back from
the disk and run, ONNX by onnxruntime, on the example and on fresh inputs in two more batch sizes, before it gets its
name. A weight that several layers share is in the file once. Targets (ship/targets) build on it.
"""

import importlib
import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor, nn

from unskip._core.errors import RUN_ERRORS, reason
from unskip._core.files import check_free, write_atomically
from unskip._core.inputs import in_dtype, is_batch, is_tokens, random_like
from unskip._core.modules import checked_model, copied
from unskip._core.version import __version__
from unskip.methods.registry import method_name
from unskip.surgery.proof import refuse_training
from unskip.surgery.verify import TOLERANCE, difference, in_words

Format = Literal["onnx", "pt2", "hls4ml", "tflite", "executorch"]
Run = Callable[[Tensor], Tensor]
# How a file with this metadata is written, how its bytes are run, and how many numbers it stores.
Written = tuple[Callable[[dict[str, str]], bytes], Callable[[bytes], Run], int]

OPSET = 18  # of ONNX, 2022: what every runtime of today reads
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
LARGEST = 2**31 - 1  # bytes of an ONNX file, which is one protocol buffer
INPUT, OUTPUT, BATCH = "input", "output", "batch"  # their names in the file
LENGTH = "length"  # the free size of a text
SCOPES = "pkg.torch.onnx.name_scopes"  # the paths of modules, as the exporter notes them on a node
METADATA = "unskip.json"  # the extra file of a .pt2


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file that was written and checked. Its text is one line."""

    path: str
    format: Format
    opset: int | None  # of ONNX
    batches: tuple[int, ...]  # sizes that it was run on
    error: float  # relative, the largest of all runs: max |file - network| / max |network|
    rounding: float  # relative error that float32 alone makes in the network
    weights: int  # numbers that the file stores
    bytes: int
    metadata: dict[str, str]  # as the file holds it

    def __str__(self) -> str:
        kind = "torch.export" if self.opset is None else f"ONNX, opset {self.opset}"
        return (
            f"{self.path}: {kind}, {self.weights:,} weights, {self.bytes:,} bytes. Run on batches of "
            f"{', '.join(map(str, self.batches))}, {self.agreement}."
        )

    @property
    def agreement(self) -> str:
        """How far the file and the network agree, in words."""
        return (
            f"it is the network's function to a relative error of {self.error:.1e} (float32 alone: {self.rounding:.1e})"
        )


def write(
    model: nn.Module,
    path: str | Path,
    *,
    example: Tensor,
    opset: int = OPSET,
    metadata: Mapping[str, str] | None = None,
    force: bool = False,
) -> Exported:
    """Writes a network as .onnx or .pt2, by the path's ending, with a free batch, and checks the file by running it."""
    kind = _format(path)
    model = on_cpu(model)
    example = check_example(model, example)
    if kind == "onnx":
        need_onnx("export")
        need_float32(example)
    path = Path(path).expanduser()
    check_free(path, command="export", argument="path", force=force, overwrite="force=True")

    about = describe(model, example, metadata) | ({"opset": str(opset)} if kind == "onnx" else {})
    references = references_of(model, example)
    program = traced(model, example)
    save, load, weights = _as_onnx(program, opset) if kind == "onnx" else _as_pt2(program)
    error = references.check(load(save(about)), path)
    batches = ", ".join(map(str, references.batches))
    about |= {
        "relative error": f"{error:.1e}",
        "checked on": f"the example and random inputs, batches {batches}",
    }
    data = save(about)

    def write_and_check(file: BinaryIO) -> None:
        file.write(data)
        file.flush()
        references.check(load(Path(file.name).read_bytes()), path)

    write_atomically(path, write_and_check, command="export")
    return Exported(
        path=str(path), format=kind, opset=opset if kind == "onnx" else None, batches=references.batches, error=error,
        rounding=references.rounding, weights=weights, bytes=len(data), metadata=about,
    )  # fmt: skip


# ---------------------------------------------------------------- what was given


def _format(path: str | Path) -> Format:
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in ("onnx", "pt2"):
        raise ValueError(
            f"export: path={str(path)!r} must end in .onnx (for onnxruntime, TensorRT, OpenVINO, ...) or .pt2 "
            "(torch.export); other files need a target, for instance target='tflite'."
        )
    return suffix  # type: ignore[return-value]


def need_float32(example: Tensor) -> None:
    """Refuses a network in another dtype, which runtimes compute in float32."""
    if example.is_floating_point() and example.dtype != torch.float32:
        raise ValueError(
            f"export: the network is in {example.dtype}, and onnxruntime computes in float32: call .float() first."
        )


def need_onnx(command: str) -> None:
    """Refuses to start without the packages that write, check and run ONNX."""
    missing = []
    for name in ONNX_PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise ValueError(
            f"{command}: ONNX needs {', '.join(missing)}, which can't be imported here; install them with "
            "`pip install 'unskip[export]'`, or write a .pt2 file."
        )


def on_cpu(model: nn.Module) -> nn.Module:
    """A copy of the network to work on."""
    model = checked_model("export", model)
    refuse_training("export", model)
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise ValueError("export: the network is on the meta device and has no weights; load them first.")
    return copied("export", model).to("cpu").to(memory_format=torch.contiguous_format)


def check_example(model: nn.Module, example: Tensor) -> Tensor:
    """The example in the network's dtype, if the network takes it."""
    if not is_batch(example) or example.dim() < 2 or not len(example):
        raise ValueError(
            f"export: example={in_words(example)} must be a batch of floating-point inputs, for instance "
            "torch.randn(2, 3, 32, 32), or of tokens (B, T)."
        )
    if example.is_meta:
        raise ValueError("export: the example is on the meta device and has no numbers; give real inputs.")
    like = next((t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), example)
    example = in_dtype(example.detach().cpu(), like.dtype).contiguous()
    try:
        with torch.no_grad():
            output = model(example.clone())
    except RUN_ERRORS as error:
        raise ValueError(
            f"export: {type(model).__name__} can't run on an example of shape {tuple(example.shape)}: {reason(error)}."
        ) from error
    if not isinstance(output, Tensor) or not output.dim() or len(output) != len(example):
        raise ValueError(
            f"export: {type(model).__name__} does not return one tensor with a row for each input; wrap it in a "
            "module that does."
        )
    return example


# ---------------------------------------------------------------- what the network computes


@dataclass(frozen=True)
class References:
    """Inputs, and what the network makes of them."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    rounding: float

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(len(x) for x in self.inputs)

    @property
    def allowed(self) -> float:
        return max(TOLERANCE, 10 * self.rounding)

    def check(self, run: Run, path: Path) -> float:
        """The largest relative error of what a file computes. Refuses one that is another function."""
        error = max(difference(y, run(x)).relative for x, y in zip(self.inputs, self.outputs, strict=True))
        if not error <= self.allowed:
            raise ValueError(
                f"export: what {path.name} computes differs from the network by a relative error of {error:.1e}, above "
                f"{self.allowed:.1e}, so the file was not kept. Export with another opset or format, and please tell "
                "us which network it was."
            )
        return error


@torch.no_grad()
def references_of(model: nn.Module, example: Tensor) -> References:
    """What the network makes of the example, and of fresh inputs: one alone, and one more than the example has.

    Of tokens these are shorter, too: one token, and half as many as the example has.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [example]
    for n in (1, len(example) + 1):
        inputs.append(random_like(example, (n, *example.shape[1:]), generator))
    if is_tokens(example):
        inputs[1:] = [inputs[1][:, :1], inputs[2][:, : (example.shape[1] + 1) // 2]]
    outputs = [model(x.clone()) for x in inputs]
    if not all(torch.isfinite(y).all() for y in outputs):
        raise ValueError("export: the network's output is not finite, so there is nothing to check a file by.")
    exact = copied("export", model).double()
    try:
        pairs = zip(inputs, outputs, strict=True)
        rounding = max(difference(exact(in_dtype(x, torch.float64)), y.double()).relative for x, y in pairs)
    except RUN_ERRORS as error:
        raise ValueError(
            f"export: a copy of {type(model).__name__} in float64 can't run: {reason(error)}. A forward that was set "
            "on an instance belongs to the original; put it into a class."
        ) from error
    return References(inputs, outputs, rounding)


def traced(model: nn.Module, example: Tensor, *, free: bool = True) -> torch.export.ExportedProgram:
    """The network as torch.export sees it, with a free batch or for one input at a time.

    With a free batch of tokens their number is free, too, up to that of the example.
    """
    # One input alone would be taken for a batch that is always one.
    example = example[:1] if not free else example if len(example) > 1 else torch.cat([example, example])
    sizes: dict[int, Any] = {0: torch.export.Dim(BATCH, min=1)}
    if is_tokens(example) and example.shape[1] > 1:
        sizes[1] = torch.export.Dim(LENGTH, min=1, max=example.shape[1])
    shapes = (sizes,) if free else None
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(model, (example.clone(),), dynamic_shapes=shapes)
    except Exception as error:  # torch.export has errors of many kinds
        raise ValueError(
            f"export: torch.export can't follow {type(model).__name__}{' with a free batch' if free else ''}: "
            f"{reason(error)}."
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of the machine that it was made on
    return program


@contextmanager
def quiet() -> Iterator[None]:
    """Without the chatter of exporters and quantisers about themselves."""
    names = ("", "torch.onnx", "onnxscript", "onnx_ir")  # onnxruntime's quantisation speaks through the root
    levels = {name: logging.getLogger(name).level for name in names}
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def describe(model: nn.Module, example: Tensor, metadata: Mapping[str, str] | None) -> dict[str, str]:
    """What a file says of its network, and what the user adds to it."""
    about = {"unskip": __version__, "torch": torch.__version__, "network": type(model).__name__}
    surgery, folding = getattr(model, "surgery", None), getattr(model, "folding", None)
    if surgery is not None:
        about |= {"method": method_name(surgery.method), "options": json.dumps(asdict(surgery.method), default=str)}
    if folding is not None:
        about |= {"form": folding.form, "fold error": f"{folding.exact:.1e}"}
    rest = f"{LENGTH} of at most {example.shape[1]}" if is_tokens(example) else " x ".join(map(str, example.shape[1:]))
    about["input"] = f"{BATCH} x {rest}, {str(example.dtype).removeprefix('torch.')}"
    return about | _check_metadata(metadata or {})


def _check_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(
                f"export: metadata has {key!r}: {value!r}, and a file holds text alone; write both as str."
            )
    return dict(metadata)


# ---------------------------------------------------------------- the two formats


def _as_pt2(program: torch.export.ExportedProgram) -> Written:
    def save(metadata: dict[str, str]) -> bytes:
        data = io.BytesIO()
        with quiet():
            torch.export.save(program, data, extra_files={METADATA: json.dumps(metadata, indent=1)})
        return data.getvalue()

    def load(data: bytes) -> Run:
        module = torch.export.load(io.BytesIO(data)).module()
        return lambda x: module(x.clone()).detach()

    tensors = [t for t in (*program.state_dict.values(), *program.constants.values()) if isinstance(t, Tensor)]
    weights = sum({t.untyped_storage().data_ptr(): t.numel() for t in tensors}.values())  # each storage once
    return save, load, weights


def _as_onnx(program: torch.export.ExportedProgram, opset: int) -> Written:
    model = onnx_model(program, opset)

    def save(metadata: dict[str, str]) -> bytes:
        set_metadata(model, metadata)
        return bytes(model.SerializeToString())

    return save, onnx_runner, stored_weights(model)


def onnx_model(program: torch.export.ExportedProgram, opset: int) -> Any:
    """The ONNX graph of a program with constants computed, but for what would store a shared weight twice."""
    import onnxscript

    try:
        with quiet():
            written = torch.onnx.export(
                program, (), dynamo=True, opset_version=opset, input_names=[INPUT], output_names=[OUTPUT],
                optimize=False, verbose=False,
            )  # fmt: skip
            assert written is not None
            onnxscript.optimizer.optimize_ir(written.model, should_fold=_not_shared)
            stored = [value.const_value for value in written.model.graph.initializers.values()]
            size = sum(tensor.nbytes for tensor in stored if tensor is not None)
            if size > LARGEST:
                raise ValueError(
                    f"export: the network has {size / 2**30:.1f} GiB of weights, and an ONNX file holds 2 GiB at most; "
                    "write a .pt2 file."
                )
            model = written.model_proto
    except torch.onnx.errors.OnnxExporterError as error:
        raise ValueError(
            f"export: PyTorch can't write this network as ONNX with opset {opset}: {reason(error)}."
        ) from error
    found = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if found != opset:
        raise ValueError(
            f"export: opset={opset} was asked for, and PyTorch can't write this network with it (it wrote opset "
            f"{found}); leave out opset, or take one from {OPSET} up that PyTorch and your runtime know."
        )
    _forget_source(model)
    _name_batch(model)
    return model


def _not_shared(node: Any) -> bool | None:
    """A weight that has several readers is not computed on ahead, which would store it once for each of them."""
    shared = any(value is not None and value.is_initializer() and len(value.uses()) > 1 for value in node.inputs)
    return False if shared else None


def _forget_source(model: Any) -> None:
    """Keeps of what the exporter notes on each node only the path of its module: the rest has files of this machine."""
    for item in (*model.graph.node, *model.graph.input, *model.graph.output, *model.graph.value_info):
        kept = [entry for entry in item.metadata_props if entry.key == SCOPES]
        del item.metadata_props[:]
        item.metadata_props.extend(kept)
    for tensor in model.graph.initializer:
        del tensor.metadata_props[:]


def _name_batch(model: Any) -> None:
    """The exporter calls the free sizes s77 or the like."""
    free = [dim.dim_param for dim in model.graph.input[0].type.tensor_type.shape.dim if dim.dim_param]
    for symbol, name in zip(free, (BATCH, LENGTH), strict=False):
        for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = re.sub(rf"\b{re.escape(symbol)}\b", name, dim.dim_param)


def set_metadata(model: Any, metadata: Mapping[str, str]) -> None:
    """Writes text by name into an ONNX model, in place of what it said under these names."""
    kept = [entry for entry in model.metadata_props if entry.key not in metadata]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value)


def stored_weights(model: Any) -> int:
    """Numbers in the initialisers of an ONNX model, without those that say a shape."""
    import onnx

    counted = (t for t in model.graph.initializer if t.data_type != onnx.TensorProto.INT64)
    return sum(int(torch.Size(t.dims).numel()) for t in counted)


def onnx_runner(model: bytes) -> Run:
    """What an ONNX model computes, by onnxruntime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors alone
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own kinds
        raise ValueError(f"export: onnxruntime can't read what was written: {reason(error)}.") from error
    (name,) = (entry.name for entry in session.get_inputs())
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])
