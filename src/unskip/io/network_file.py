"""Network files: a `.safetensors` file that holds a network, its weights and its description, and no code.

Its metadata hold, as JSON under 'unskip', the number of the format, the network (a graph of registered layers and
functions, see `unskip.io.graph`, or the name and options of a registered network), what it reads, and its output for a
fixed input. Reading a file compares the output of the network that it builds with that.
"""

import dataclasses
import json
import math
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torchvision
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from unskip._core.config import Section
from unskip._core.errors import reason
from unskip._core.files import check_free, write_atomically
from unskip._core.limits import MemoryGuard, check_file
from unskip._core.modules import preserved, vocabulary
from unskip._core.text import nearest
from unskip._core.version import __version__
from unskip.io.graph import build, describe
from unskip.methods import resolve_method
from unskip.methods.registry import method_name
from unskip.models import create_model
from unskip.models.build import NetworkConfig, check_harmless
from unskip.surgery.plainify import Surgery

FORMAT = 2  # a later version reads this one too; 1 was that of 0.1.0.dev0
KEY = "unskip"
SAME = 1e-6  # relative, of outputs in float64 of the same weights
OUTPUTS = 64  # numbers of the output that the file holds
MAX_INPUT = 2**26  # numbers of one input
WEIGHTS_ALONE = "To use weights, name their network and give the file as weights (--weights FILE)."
# What a description that was not written by `save` may lead to.
MALFORMED = (
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, AssertionError, NotImplementedError),
    *(RuntimeError, RecursionError, MemoryError, OverflowError, ZeroDivisionError, OSError, SafetensorError),
)


@dataclass(frozen=True, kw_only=True)
class Header(Section):
    """What a network file says beside its tensors. The types of its fields are checked."""

    network: dict[str, Any]  # {"graph": ...}, or {"model": name, "options": {...}} of a registered network
    input_size: tuple[int, ...]  # of one input, without the batch
    name: str = ""
    trained: bool = True
    folded: str = ""  # the form, where `fold` has made it
    data: dict[str, Any] = field(default_factory=dict)  # the [data] table of the recipe that it was trained with
    surgery: dict[str, Any] = field(default_factory=dict)  # what `plainify` did
    proof: str = ""  # what was verified, for the reader
    output: tuple[float, ...] = ()  # the first numbers of the output for a fixed input


def read_header(path: Path, *, command: str) -> Header | None:
    """The header of a network file or of the package's weights; None for weights alone."""
    check_file(path, command, expansion=2)  # the file in memory, and the tensors of it
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(KEY)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{command}: {path} can't be read as safetensors: {error}. It is damaged, or another kind of file. "
            f"{WEIGHTS_ALONE}"
        ) from error
    if text is None:
        return None
    try:
        values = json.loads(text)
        if "format" not in values:  # weights of the package (unskip.models.weights)
            return Header(network={"model": values["network"]}, input_size=(), name=values["network"])
        if values["format"] == FORMAT:
            del values["format"], values["version"]
            header = Header(**values)
            check_size(header.input_size)
            if not header.output:
                raise ValueError("it has no output to compare with")
            return header
    except MALFORMED as error:
        raise _unusable(command, path, error) from error
    if values["format"] == "unskip-network-1":
        raise ValueError(
            f"{command}: {path} was written by unskip 0.1.0.dev0, whose network files are not read any more. Write it "
            "again with `unskip plainify` or `unskip fold`."
        )
    raise ValueError(
        f"{command}: {path} has format {values['format']!r:.40}, and this version of unskip ({__version__}) reads "
        f"format {FORMAT}. A newer version may read it."
    )


def check_size(size: tuple[int, ...]) -> None:
    """Refuses what is no shape of one input, or larger than anything that is shown to a network."""
    if not all(type(side) is int and side >= 1 for side in size) or not size or math.prod(size) > MAX_INPUT:
        raise ValueError(f"input_size={size!r:.80} is no shape of an input")


def read_network(path: Path, header: Header, *, command: str) -> nn.Module:
    """The network of a file, in eval mode, if its output is that of the network that was written."""
    try:
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}  # aligned, and not of the file
        model: nn.Module
        if "graph" in header.network:
            model = build(header.network["graph"], tensors)
            model.pretrained_cfg = {"input_size": header.input_size}  # type: ignore[assignment]
        else:
            with MemoryGuard("its network"):
                model = build_registered(header.network["model"], header.network.get("options", {}), from_file=True)
            model.load_state_dict(tensors)
        if header.output:
            model = model.to(next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)).eval()
            found, wanted = torch.tensor(_output(model, header.input_size)), torch.tensor(header.output)
            if found.shape != wanted.shape or not (found - wanted).abs().max() <= SAME * wanted.abs().max():
                raise ValueError("the network computes another function than the one that was written")
    except MALFORMED as error:
        raise _unusable(command, path, error) from error
    if header.surgery:
        model.surgery = _surgery(header.surgery)  # type: ignore[assignment]
    return model


def _unusable(command: str, path: Path, error: BaseException) -> ValueError:
    words = f"{reason(error).removeprefix('recipe: '):.400}"
    if isinstance(error, RecursionError):
        words = "it is nested too deeply, or refers to itself"
    elif isinstance(error, KeyError):
        words = f"there is no {words}"
    return ValueError(
        f"{command}: the network in {path} can't be opened: {words}. The file is damaged, was made by another program, "
        "or needs other versions of unskip, timm or torchvision."
    )


def build_registered(
    name: str, options: dict[str, Any], *, pretrained: bool = False, from_file: bool = False
) -> nn.Module:
    """A network of `unskip models` or timm by name, or `torchvision:NAME`.

    Args:
        name: the name.
        options: keyword arguments of its builder.
        pretrained: loads its trained weights.
        from_file: whether name and options come from a file, which may ask for no other file.
    """
    if from_file:
        check_harmless(NetworkConfig(model=name, options=options))
    package, colon, rest = name.partition(":")
    if not colon:
        return create_model(name, pretrained=pretrained, **options)
    # Those for detection load a backbone's weights where none are named, which a file may not ask for.
    known = torchvision.models.list_models(module=torchvision.models if from_file else None)
    if package != "torchvision" or rest not in known:
        raise ValueError(f"torchvision has no network {rest!r}.{nearest(rest, known)}")
    model: nn.Module = torchvision.models.get_model(rest, **{"weights": None, **options})
    return model


def save(
    path: str | Path,
    model: nn.Module,
    header: Header | None = None,
    *,
    input_size: tuple[int, ...] = (),
    force: bool = False,
    command: str = "save",
) -> int:
    """Writes a network file, reads it back, and gives it its name. Returns its bytes.

    Args:
        path: where it goes, `.safetensors`.
        model: the network. `unskip.load` gives it back in eval mode.
        header: what the file says; only `input_size` is needed.
        input_size: of one input, without the batch, instead of a header.
        force: whether a file that is there may be replaced.
        command: who asks, for messages.
    """
    path = Path(path)
    check_path(path, force=force, command=command)
    header = header or Header(network={}, input_size=tuple(input_size), name=type(model).__name__)
    check_size(header.input_size)
    network, tensors = header.network, model.state_dict()
    try:
        if not network:
            graph, tensors = describe(model)
            network = {"graph": graph}
        output = _output(model, header.input_size)
    except Exception as error:  # somebody's network may fail in any way
        raise ValueError(
            f"{command}: {header.name} can't be written as a network file: {reason(error)}. A layer class is "
            "registered with unskip.io.register_layer. Any network can be written as .onnx or .pt2 by `unskip export`."
        ) from error
    surgery = getattr(model, "surgery", None)
    header = dataclasses.replace(header, network=network, output=output, surgery=_described(surgery) if surgery else {})
    about = {"format": FORMAT, "version": __version__, **asdict(header)}
    state = {key: value.detach().to("cpu").clone().contiguous() for key, value in tensors.items()}
    data = save_safetensors(state, metadata={"format": "pt", KEY: json.dumps(about)})

    def write_and_read(file: BinaryIO) -> None:
        file.write(data)
        file.flush()
        written = read_header(Path(file.name), command=command)
        assert written is not None
        read_network(Path(file.name), written, command=command)

    write_atomically(path, write_and_read, command=command)
    return len(data)


def check_path(path: Path, *, force: bool, command: str) -> None:
    """Refuses a path that no network file can go to."""
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{command}: --out {str(path)!r} must end in .safetensors, which `unskip fold`, `unskip export` and "
            "`unskip doctor` read; `unskip export` writes .onnx and .pt2."
        )
    check_free(path, command=command, argument="--out", force=force, overwrite="--force")


def _described(surgery: Surgery) -> dict[str, Any]:
    return {
        "method": method_name(surgery.method),
        "options": asdict(surgery.method),  # type: ignore[call-overload]
        **{name: getattr(surgery, name) for name in ("replaced", "left", "kept")},
    }


def _surgery(said: dict[str, Any]) -> Surgery | None:
    """What was done to the network, None where the method is not known here."""
    try:
        method = resolve_method(said["method"], dict(said["options"]))
        replaced, left = (tuple(map(str, said[name])) for name in ("replaced", "left"))
        return Surgery(method=method, replaced=replaced, left=left, kept=dict(said["kept"]))
    except MALFORMED:
        return None


@torch.no_grad()
def _output(model: nn.Module, input_size: tuple[int, ...]) -> tuple[float, ...]:
    """The first numbers of the output for a fixed input, in float64, where all machines agree."""
    generator = torch.Generator().manual_seed(0)
    if tokens := vocabulary(model):
        x = torch.randint(tokens, (2, *input_size), generator=generator)
    else:
        x = torch.randn(2, *input_size, generator=generator).double()
    state = {
        name: tensor.detach().to("cpu", torch.float64 if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    }
    with preserved(model), MemoryGuard("running it on an input"):
        output = torch.func.functional_call(model.eval(), state, (x,))
    if not isinstance(output, Tensor) or not output.isfinite().all():
        what = "no finite numbers" if isinstance(output, Tensor) else f"{type(output).__name__}, not one tensor"
        raise ValueError(f"it returns {what}")
    return tuple(output.flatten()[:OUTPUTS].tolist())
