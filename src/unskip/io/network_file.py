"""Network files: weights, and the steps by which the network around them is built again.

A `.safetensors` file whose metadata say, as JSON under 'unskip', where the network comes from (a name, or the recipe of
a run), what was done to it (plainify, fold), what it reads, and what it answers to a fixed input. Reading one repeats
the steps on fresh weights, puts the stored ones in, and compares the answer. There is no code in the file.
"""

import copy
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from unskip._core.files import check_free, write_atomically
from unskip._core.version import __version__
from unskip.methods import method_options
from unskip.models.weights import Weights
from unskip.ship.fold import fold
from unskip.surgery import plainify

FORMAT = "unskip-network-1"
KEY = "unskip"
SAME = 1e-6  # relative, of answers in float64 by weights that are the same
ANSWERS = 64  # numbers of the answer that the file holds

Step = dict[str, Any]  # {"plainify": method, "options": {...}, "strict": bool} or {"fold": form}


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a network file says beside its weights."""

    name: str
    origin: dict[str, Any]  # {"word": ..., "seed": ...} or {"recipe": ..., "classes": ..., "channels": ...}
    steps: tuple[Step, ...]
    input_size: tuple[int, ...]
    answer: tuple[float, ...] = ()  # the first numbers of the output for `_question`
    proof: str = ""  # what was verified, for the reader


def read_header(path: Path, *, command: str) -> Header | Weights | None:
    """The header of a network file, or what a file of the package's weights says; None for safetensors of others."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(KEY)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{command}: {path} can't be read as safetensors: {error}. It is damaged, or something else by that name. "
            "To look at other weights name their network, and give the file with --weights."
        ) from error
    if text is None:
        return None
    try:
        values = json.loads(text)
        if "format" not in values:
            return Weights.parse(values)
        if values.pop("format") != FORMAT:
            raise KeyError("format")
        del values["version"]
        values |= {"steps": tuple(values["steps"]), "input_size": tuple(map(int, values["input_size"]))}
        return Header(**{**values, "answer": tuple(map(float, values["answer"]))})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{command}: {path} says that it is a network of unskip, but its description can't be understood: "
            f"{type(error).__name__}: {error}. It may come from a newer version."
        ) from error


def take_step(network: nn.Module, step: Step, example: Tensor) -> nn.Module:
    """Does to a network what was done to the one in a file."""
    if "plainify" in step:
        options = dict(step["options"])
        if "limit" in method_options(step["plainify"]):
            options["limit"] = math.inf  # whoever wrote the file has agreed to its size
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fresh weights are discarded, and the right ones come from the file
            return plainify(network, step["plainify"], strict=step.get("strict", True), **options)
    return fold(network, step["fold"], example=example)


def read_weights(network: nn.Module, header: Header, path: Path, *, command: str) -> nn.Module:
    """The network with the file's weights, if it answers as the one that was written."""
    weights = load_file(path)
    network.eval()  # as whatever is written
    for step in header.steps:
        network = take_step(network, step, torch.randn(2, *header.input_size, generator=_generator()))
    dtypes = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    network = network.to(next(iter(dtypes), torch.float32))
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:400]
        raise ValueError(f"{command}: the weights in {path} don't fit what it says they are of: {reason}") from error
    found, wanted = torch.tensor(_answer(network, header.input_size)), torch.tensor(header.answer)
    if found.shape != wanted.shape or not (found - wanted).abs().max() <= SAME * wanted.abs().max():
        raise ValueError(
            f"{command}: the network that was built again from {path} answers otherwise than the one that was written, "
            "so it is not the same function. It was written by another version of unskip, timm or torchvision."
        )
    return network


def write(
    path: Path, network: nn.Module, header: Header, read: Callable[[Path], Any], *, force: bool, command: str
) -> int:
    """Writes a network file, reads it back, and gives it its name. Returns its bytes.

    Args:
        path: where it goes, `.safetensors`.
        network: in eval mode.
        header: without an answer.
        read: reads the file as a user would; what it can't build again is refused.
        force: whether a file that is there may be replaced.
        command: who asks, for messages.
    """
    check_path(path, force=force, command=command)
    about = {"format": FORMAT, "version": __version__, **asdict(header)}
    about["answer"] = _answer(network, header.input_size)
    # Tied weights are stored once for each name, so any loader finds them all.
    state = {key: value.detach().to("cpu").clone().contiguous() for key, value in network.state_dict().items()}
    data = save_safetensors(state, metadata={"format": "pt", KEY: json.dumps(about)})

    def write_and_read(file: BinaryIO) -> None:
        file.write(data)
        file.flush()
        read(Path(file.name))

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


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@torch.no_grad()
def _answer(network: nn.Module, input_size: tuple[int, ...]) -> tuple[float, ...]:
    """In float64, where all machines agree."""
    question = torch.randn(2, *input_size, generator=_generator()).double()
    output = copy.deepcopy(network).to("cpu").double().eval()(question)
    return tuple(output.flatten()[:ANSWERS].tolist())
