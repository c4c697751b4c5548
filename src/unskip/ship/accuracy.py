"""The accuracy of a network in few bits beside itself in float, on the same inputs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unskip.ship.fake_quant import decibel
from unskip.ship.writing import Run
from unskip.surgery.verify import in_words

Batches = Tensor | Iterable[Any]  # a tensor, or batches of a loader: tensors, or tuples that begin with one
Labelled = tuple[Tensor, Tensor] | Iterable[Any]  # images and classes, or batches of both

CHUNK = 64  # inputs that run at once
LIMIT = 0.5  # points of accuracy


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Of the float network and of the file, on the same inputs."""

    inputs: int
    before: float | None  # percent right, None without labels
    after: float | None
    agreement: float  # percent of the answers that are the same from both; of a classifier one for each input
    sqnr: float  # dB, of all outputs
    error: float = 0.0  # points, the standard error of the loss: inputs whose answer became right or wrong

    def exceeds(self, limit: float) -> bool:
        """Whether more than `limit` points are lost, and not by the chance of few inputs (two standard errors)."""
        return not self.loss - 2 * self.error <= limit

    @property
    def loss(self) -> float:
        """Points of accuracy; without labels, answers that changed, which bound them."""
        if self.before is None or self.after is None:
            return 100 - self.agreement
        return self.before - self.after


def gather_inputs(batches: Batches) -> Tensor:
    """All calibration inputs as one tensor."""
    if isinstance(batches, Tensor):
        parts: Sequence[Any] = [batches]
    elif isinstance(batches, Iterable) and not isinstance(batches, str | bytes):
        parts = [part[0] if isinstance(part, list | tuple) and part else part for part in batches]
    else:
        parts = [batches]
    for part in parts:
        if not isinstance(part, Tensor) or not part.is_floating_point() or part.dim() < 2:
            raise ValueError(
                f"quantize: calibrate has {in_words(part)} where a batch of floating-point inputs is expected; give a "
                "tensor, or batches of a loader."
            )
        if part.shape[1:] != parts[0].shape[1:]:
            raise ValueError(
                f"quantize: calibrate has inputs of shape {tuple(parts[0].shape[1:])} and of {tuple(part.shape[1:])}; "
                "bring them to one size."
            )
    if not sum(map(len, parts)):
        raise ValueError("quantize: calibrate has no inputs; give some hundreds like those that the network will see.")
    inputs = torch.cat([part.detach().to("cpu", torch.float32) for part in parts]).contiguous()
    if not torch.isfinite(inputs).all():
        raise ValueError("quantize: calibrate has inputs that are not finite, and ranges can't be read from them.")
    return inputs


def labelled_pairs(test: Labelled, shape: torch.Size) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of inputs of this shape and their classes."""
    whole = isinstance(test, tuple) and len(test) == 2 and all(isinstance(part, Tensor) for part in test)
    for pair in [test] if whole else test:
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(part, Tensor) for part in pair)):
            raise ValueError("quantize: test must be inputs and their classes, as two tensors or in batches of both.")
        x, labels = pair
        if len(x) != len(labels) or labels.dim() != 1 or labels.is_floating_point():
            raise ValueError(
                f"quantize: test has inputs {tuple(x.shape)} with classes {labels.dtype} {tuple(labels.shape)}; one "
                "whole number for each input is expected."
            )
        if x.shape[1:] != shape:
            raise ValueError(
                f"quantize: test has inputs of shape {tuple(x.shape[1:])}, and calibrate of {tuple(shape)}; both are "
                "for the same network."
            )
        if not torch.isfinite(x).all():
            raise ValueError("quantize: test has inputs that are not finite, and no answer to them is right.")
        yield from zip(x.detach().to("cpu", torch.float32).split(CHUNK), labels.to("cpu").split(CHUNK), strict=True)


def compare(runs: Sequence[Run], batches: Iterable[tuple[Tensor, Tensor | None]]) -> list[Accuracy]:
    """The accuracy of each network but the first, which is the float one, beside that of the first."""
    total = answers = 0  # a network that answers for each pixel has more answers than inputs
    right, turned, same, noise = [0] * len(runs), [0] * len(runs), [0] * len(runs), [0.0] * len(runs)
    signal = 0.0
    labelled = False
    for x, labels in batches:
        outputs = [run(x.contiguous()) for run in runs]
        shape = tuple(outputs[0].shape)
        if len(shape) < 2 or (labels is not None and len(shape) > 2):
            raise ValueError(
                f"quantize: the network's output of shape {shape} is no score for each class"
                f"{'' if labels is None else ' of each input'}, so that its answers can't be compared; wrap it in a "
                "module that returns (inputs, classes)."
            )
        classes = shape[1]
        if labels is not None and len(labels) and not 0 <= labels.min() <= labels.max() < classes:
            raise ValueError(
                f"quantize: test has classes from {labels.min()} to {labels.max()}, and the network knows {classes}, "
                f"from 0 to {classes - 1}."
            )
        signal += float(outputs[0].double().square().sum())
        total += len(x)
        before = outputs[0].argmax(1)
        answers += before.numel()
        for i, y in enumerate(outputs):
            after = y.argmax(1)
            noise[i] += float((y - outputs[0]).double().square().sum())
            same[i] += int((after == before).sum())
            if labels is not None:
                labelled = True
                right[i] += int((after == labels).sum())
                turned[i] += int(((after == labels) != (before == labels)).sum())
    if not total:
        raise ValueError("quantize: test has no inputs.")
    shares = [100 * n / total if labelled else None for n in right]
    return [
        Accuracy(
            inputs=total, before=shares[0], after=shares[i], agreement=100 * same[i] / answers,
            sqnr=decibel(signal, noise[i]), error=100 * turned[i] ** 0.5 / total,
        )
        for i in range(1, len(runs))
    ]  # fmt: skip
