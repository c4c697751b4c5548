"""verify: whether two networks are the same function, how far they are apart, and from which layer on.

Both run as copies in float32 and in float64, on an example and on random inputs of its shape. In float64 what is left
is a difference of the functions (or of weights that were rounded when they were stored); in float32 there is the
rounding of every step on top of it, and `Check.rounding` says how much of that one network has by itself.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unskip._core.errors import RUN_ERRORS, reason
from unskip._core.inputs import in_dtype, is_batch, random_like
from unskip._core.modules import checked_model, copied, preserved
from unskip.methods.rm import RMBlock

Precision = Literal["float32", "float64"]
InputSource = Literal["example", "random"]
# The finer one first: a copy that goes down to float32 afterwards has the weights that a copy of its own would have.
DTYPES: dict[Precision, torch.dtype] = {"float64": torch.float64, "float32": torch.float32}
TOLERANCE = 1e-4  # relative; above what float32 leaves of an exact rewriting in networks of ordinary depth
SHOWN = 12  # layers that a printed check lists


@dataclass(frozen=True, kw_only=True)
class Error:
    """How far y_b is from y_a."""

    maximum: float  # max |y_a - y_b|
    relative: float  # max |y_a - y_b| / max |y_a|


@dataclass(frozen=True, kw_only=True)
class LayerCheck:
    """One layer that both networks have, by its path; the larger error of example and random inputs."""

    path: str
    float32: Error
    float64: Error


@dataclass(frozen=True, kw_only=True)
class Check:
    """What `verify` found. Print it, or ask `ok`."""

    output: dict[tuple[InputSource, Precision], Error]
    layers: tuple[LayerCheck, ...]  # in the order in which they run
    rounding: float  # relative error that float32 alone makes at the output of a
    finite: bool  # whether all that a puts out is a number
    causes: tuple[str, ...]  # what is known to set two networks apart and holds here, whole sentences

    def worst(self, precision: Precision | None = None) -> float:
        """The largest relative error at the output, of one precision or of both."""
        return max(error.relative for (_, kind), error in self.output.items() if precision in (None, kind))

    def ok(self, tolerance: float = TOLERANCE) -> bool:
        """Whether every relative error at the output is at most the tolerance.

        Weights that are stored in float32 differ by its rounding in float64 too: 1e-9 is for networks in float64.
        """
        _check_tolerance("Check.ok", tolerance)
        return self.worst() <= tolerance

    def first_mismatch(self, tolerance: float = TOLERANCE) -> str | None:
        """The path of the first layer where the networks part, in float64, or None.

        A layer that was rewritten (a convolution that has absorbed its norm) may differ while those after it agree, so
        it is the first layer behind the last that agrees. None where the last layer agrees, or none is shared.
        """
        _check_tolerance("Check.first_mismatch", tolerance)
        path = None
        for layer in reversed(self.layers):
            if layer.float64.relative <= tolerance:
                break
            path = layer.path
        return path

    def reasons(self, tolerance: float = TOLERANCE) -> tuple[str, ...]:
        """Why the networks may differ by more than the tolerance, the usual reasons first; empty where they don't."""
        if self.ok(tolerance):
            return ()
        reasons = [*self.causes]
        single, double = self.worst("float32"), self.worst("float64")
        if double <= tolerance < single:
            reasons.append(
                f"In float64 they agree ({double:.1e}), so it is the rounding of float32: a itself moves by "
                f"{self.rounding:.1e} from one precision to the other."
            )
        agrees = {source: self.output[source, "float64"].relative <= tolerance for source in ("example", "random")}
        if agrees["example"] != agrees["random"]:
            yes, no = ("the example", "random inputs") if agrees["example"] else ("random inputs", "the example")
            reasons.append(
                f"They agree on {yes} and differ on {no}: one of them may rely on the sign or range of what it reads."
            )
        return tuple(reasons)

    def __str__(self) -> str:
        verdict = "The networks agree" if self.ok() else "The networks differ"
        lines = [
            f"{verdict}: the relative error of the output is at most {self.worst('float64'):.1e} in float64 and "
            f"{self.worst('float32'):.1e} in float32 (float32 alone: {self.rounding:.1e}).",
            "",
            f"{'':<32}{'float32':>11}{'relative':>11}{'float64':>11}{'relative':>11}",
        ]
        lines += [
            _row(f"output, {source}", self.output[source, "float32"], self.output[source, "float64"])
            for source in ("example", "random")
        ]
        parting = self.first_mismatch()
        shown = self._around(parting)
        lines += [_row(layer.path, layer.float32, layer.float64) for layer in shown]
        lines += ["", f"{len(self.layers)} layers compared by their paths, {len(shown)} shown."]
        rewritten = [layer.path for layer in self.layers if layer.float64.relative > TOLERANCE]
        if parting is not None:
            lines.append(f"They part at {parting!r}.")
        elif rewritten:
            lines.append(
                f"Not shown: rewritten layers, which write something else while what follows them agrees "
                f"({len(rewritten)}, {rewritten[0]!r} first)."
            )
        if not self.finite and self.ok():
            lines.append("The output of a is not finite: where both are infinite or NaN nothing was compared.")
        return "\n".join([*lines, *self.reasons()])

    def _around(self, path: str | None) -> Sequence[LayerCheck]:
        """The layers around a path; without one, those of the layers that agree that are farthest apart in float64."""
        if path is None:
            agree = [layer for layer in self.layers if layer.float64.relative <= TOLERANCE]
            worst = sorted(agree, key=lambda layer: layer.float64.relative)[-SHOWN:]
            return [layer for layer in agree if layer in worst]
        index = next(i for i, layer in enumerate(self.layers) if layer.path == path)
        return self.layers[max(0, index - SHOWN // 2) : index + SHOWN // 2]


def verify(a: nn.Module, b: nn.Module, example: Tensor, *, seed: int = 0) -> Check:
    """Whether b computes what a computes: errors at the output and at every layer that both have under one path.

    Both networks stay as they are: what runs are copies, side by side on the device of a.

    Args:
        a: the original, in the mode in which it is to be compared; a network in training mode is named as a reason.
        b: what is to be the same function.
        example: a batch of inputs, in floating point or tokens.
        seed: of the random inputs: standard normal numbers in the shape of the example, or tokens drawn from its own.

    Returns:
        A `Check`: `print(check)` shows a table, `check.ok(tolerance)` is the answer.

    Example:
        >>> net = unskip.create_model("pnnh_resnet20").eval()
        >>> check = unskip.verify(net, unskip.fold(net), torch.randn(2, 3, 32, 32))  # (B, C, H, W)
        >>> check.ok(1e-4)
        True
    """
    models = {name: checked_model("verify", model, name) for name, model in (("a", a), ("b", b))}
    if not is_batch(example) or example.numel() == 0:
        raise ValueError(
            f"verify: example={in_words(example)} must be a batch of floating-point inputs, for instance "
            "torch.randn(2, 3, 32, 32)."
        )
    tensors = [*models["a"].parameters(), *models["a"].buffers(), example]
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError("verify: a network on the meta device has no weights to compare; load them first.")
    device = torch.device("cpu") if tensors[0].device.type == "mps" else tensors[0].device  # which has no float64
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[InputSource, Tensor] = {
        "example": in_dtype(example.detach().cpu(), torch.float64),
        "random": random_like(in_dtype(example.detach().cpu(), torch.float64), example.shape, generator),
    }

    output: dict[tuple[InputSource, Precision], Error] = {}
    layers: dict[str, dict[Precision, Error]] = {}
    of_a: dict[tuple[InputSource, Precision], Tensor] = {}
    copies = [copied("verify", model) for model in models.values()]
    for precision, dtype in DTYPES.items():
        copies = [model.to(device, dtype) for model in copies]
        for source, x in inputs.items():
            of_layers = [
                _run(model, in_dtype(x.to(device), dtype), f"{name} ({type(model).__name__})", precision)
                for name, model in zip(models, copies, strict=True)
            ]
            y_a, y_b = (outputs.pop("") for outputs in of_layers)
            if y_a.shape != y_b.shape:
                raise ValueError(
                    f"verify: for an example of shape {tuple(example.shape)} a gives {tuple(y_a.shape)} and b gives "
                    f"{tuple(y_b.shape)}; networks with outputs of different shapes can't be compared."
                )
            of_a[source, precision] = y_a
            output[source, precision] = difference(y_a, y_b)
            for path, y in of_layers[0].items():
                other = of_layers[1].get(path)
                if other is not None and other.shape == y.shape:
                    found, error = layers.setdefault(path, {}), difference(y, other)
                    found[precision] = max(error, found.get(precision, error), key=lambda e: e.relative)
    finite = all(bool(torch.isfinite(y).all()) for y in of_a.values())
    return Check(
        output=output,
        layers=tuple(LayerCheck(path=path, **errors) for path, errors in layers.items() if len(errors) == len(DTYPES)),
        rounding=max(difference(of_a[s, "float64"], of_a[s, "float32"].double()).relative for s in inputs),
        finite=finite,
        causes=tuple(_causes(models, finite)),
    )


def in_words(example: object) -> str:
    """A rejected input, for a message: the dtype and shape of a tensor, or the class of anything else."""
    if isinstance(example, Tensor):
        return f"{example.dtype} {tuple(example.shape)}"
    text = repr(example)
    return text if len(text) <= 80 and "\n" not in text else f"a {type(example).__name__}"


def difference(y_a: Tensor, y_b: Tensor) -> Error:
    """max |y_a - y_b|, and that by max |y_a|. The same infinity or NaN in the same place is no difference."""
    same = (y_a == y_b) | (y_a.isnan() & y_b.isnan())
    apart = (y_a - y_b).abs().masked_fill(same, 0).nan_to_num(nan=math.inf, posinf=math.inf)
    maximum = apart.max().item() if apart.numel() else 0.0
    size = y_a.abs().masked_fill(~y_a.isfinite(), 0).max().item() if y_a.numel() else 0.0
    if maximum == 0:
        return Error(maximum=0.0, relative=0.0)
    return Error(maximum=maximum, relative=maximum / size if size else math.inf)


def _run(model: nn.Module, x: Tensor, name: str, precision: Precision) -> dict[str, Tensor]:
    """The outputs of all modules by path, '' for the whole network, as they were when they were written.

    A module that runs several times has a path for each, 'relu (2)' for the second.
    """
    outputs: dict[str, Tensor] = {}
    calls = Counter[str]()

    def record(path: str, output: Any) -> None:
        calls[path] += 1
        if isinstance(output, Tensor):
            key = path if calls[path] == 1 else f"{path} ({calls[path]})"
            outputs[key] = output.detach().clone()  # an activation in place would still change it

    # float32 means float32: no TF32 in convolutions
    tf32 = torch.backends.cudnn.flags(allow_tf32=False) if x.is_cuda else nullcontext()
    handles = []
    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_hook(lambda _, args, output, path=path: record(path, output)))
        with preserved(model), torch.no_grad(), tf32:
            torch.manual_seed(0)  # both networks draw the same numbers
            model(x.clone())
    except RUN_ERRORS as error:
        raise ValueError(
            f"verify: {name} can't run in {precision} on an input of shape {tuple(x.shape)}: {reason(error)}."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if "" not in outputs:
        raise ValueError(f"verify: {name} does not return one tensor; wrap it in a module that does.")
    return outputs


def _causes(models: dict[str, nn.Module], finite: bool) -> Iterator[str]:
    """The usual reasons that can be seen without running anything, the most usual first."""
    for name, model in models.items():
        training = [path or "the network itself" for path, module in model.named_modules() if module.training]
        if training:
            yield (
                f"{name} is in training mode ({', '.join(training[:3])}{', ...' if len(training) > 3 else ''}), where "
                "norms depend on the batch and dropout on chance: call .eval() first."
            )
    for name, model in models.items():
        for path, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
                yield f"The {type(module).__name__} {path!r} of {name} has no statistics and reads those of the batch."
                break
    for name, model in models.items():
        bounds = [(path, m.bound.item()) for path, m in model.named_modules() if isinstance(m, RMBlock) and m.bound]
        if bounds:
            path, bound = min(bounds, key=lambda found: found[1])
            yield (
                f"The block {path!r} of {name} carries numbers up to {bound:g} and no larger ones (rm with "
                "relu6='scale'): unskip.methods.out_of_range says whether an input exceeds that."
            )
    stored = {name: {p.dtype for p in model.parameters()} for name, model in models.items()}
    if stored["a"] != stored["b"]:
        kinds = {name: ", ".join(sorted(str(dtype) for dtype in dtypes)) for name, dtypes in stored.items()}
        yield f"a stores its weights as {kinds['a']}, b as {kinds['b']}: the coarser one has rounded them."
    if not finite:
        yield "The output of a is not finite, so there is nothing to compare it by."


def _row(name: str, single: Error, double: Error) -> str:
    numbers = (single.maximum, single.relative, double.maximum, double.relative)
    return f"{name if len(name) <= 31 else '…' + name[-30:]:<32}" + "".join(f"{number:>11.1e}" for number in numbers)


def _check_tolerance(where: str, tolerance: float) -> None:
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not tolerance >= 0:
        raise ValueError(f"{where}: tolerance={tolerance!r} must be a number of at least 0, for instance 1e-4.")
