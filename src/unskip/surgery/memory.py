"""Activation memory of a network: what is alive at each layer, the peak, and what joins cost on streaming targets.

Counted from one forward pass on the meta device, operator by operator. BatchNorm counts as absorbed by the layer before
it. A tensor lives from the operator that writes it to the last one that reads it; weights, the scratch space of kernels
and references that only Python holds are not counted, and the input image is.

In place: an elementwise operator (an activation, a sum, a product) writes into the memory of an input of the same size
if it is the last reader of that input. Runtimes for small devices do so; PyTorch does where a layer has inplace=True.

Streaming (FPGA dataflow: hls4ml, FINN): every operator runs at once, and every read of a tensor is a FIFO, so a tensor
with two readers must be cloned. Where two paths meet, what comes early must wait for what comes late. A k x k window
with padding p begins to write when it has read (k - 1 - p) rows and as many pixels,

    delay = ((k - 1 - p) W + (k - 1 - p)) / (H W)    images, for an input of H x W pixels

and a mean over the image needs all of it (1 image). Delays add up along a path. At a join a FIFO holds
(latest delay - own delay) of the numbers of its tensor: for a skip over two 3 x 3 convolutions 2 W + 2 pixels. The line
buffers of the windows themselves, which a network without skips has too, are not counted.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from unskip.surgery.tracing import running_modules

DType = Literal["int8", "float32"]
BYTES: dict[str, int] = {"int8": 1, "float32": 4}  # of one number
ELEMENTWISE = """
    abs add addcmul celu clamp clamp_max clamp_min div elu exp gelu hardsigmoid hardswish hardtanh leaky_relu maximum
    minimum mish mul neg prelu _prelu_kernel relu rsub selu sigmoid silu softplus sub tanh
"""
WHOLE = "_adaptive_avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d bmm _softmax"
IN_PLACE = frozenset(ELEMENTWISE.split())  # operators that may write into what they read
WHOLE_IMAGE = frozenset(WHOLE.split())  # those that read all of an image before they write


@dataclass(frozen=True, kw_only=True)
class LiveTensor:
    """A tensor that a network writes."""

    path: str  # of the module that writes it; 'input' for the image
    operator: str  # 'convolution', 'relu'; '' for the image
    shape: tuple[int, ...]  # of one image
    numbers: int
    first: int  # the operator that writes it
    last: int  # the last operator that reads it
    reads: int  # by how many operators it is read
    reuses: int | None  # the tensor whose memory it takes where that is allowed

    def __str__(self) -> str:
        return f"{self.path} ({' x '.join(map(str, self.shape))})"


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The activations of one image: `print(plan)` is a table.

    `unskip.memory_plan` makes it. Numbers of bytes are of activations in int8 (one byte each) or float32 (four).
    """

    tensors: tuple[LiveTensor, ...]  # in the order in which they are written; the image first
    waiting: tuple[tuple[int, int], ...]  # (tensor, numbers) for every FIFO that must hold more than a window's delay
    in_place: bool = True  # whether elementwise operators may write into what they read
    macs: int = 0  # multiply-accumulates of one image

    def live(self) -> list[int]:
        """How many numbers are alive while each operator runs; the operators are those that wrote `tensors[1:]`."""
        changes = [0] * (self._steps + 1)
        for numbers, first, last in self._buffers().values():
            changes[first] += numbers
            changes[last + 1] -= numbers
        total, found = 0, []
        for change in changes[:-1]:
            total += change
            found.append(total)
        return found

    def peak(self, dtype: DType = "int8") -> int:
        """The most bytes that are alive at once."""
        return max(self.live()) * BYTES[dtype]

    @property
    def peak_at(self) -> LiveTensor:
        """The tensor that is being written when memory peaks; the first such tensor."""
        live = self.live()
        step = live.index(max(live))
        return next(tensor for tensor in self.tensors[1:] if tensor.first == step)

    @property
    def alive_at_peak(self) -> tuple[LiveTensor, ...]:
        """The tensors in memory at the peak; of those that share a place, the one that is there then."""
        at = self.peak_at.first
        held: dict[int, LiveTensor] = {}
        for i, tensor in enumerate(self.tensors):
            if tensor.first <= at <= tensor.last:
                held[self._root(i)] = tensor
        return tuple(held.values())

    @property
    def streams(self) -> int:
        """FIFOs between operators of a streaming target: every read of a tensor."""
        return sum(tensor.reads for tensor in self.tensors)

    @property
    def clones(self) -> int:
        """Tensors that several operators read."""
        return sum(tensor.reads > 1 for tensor in self.tensors)

    def waiting_bytes(self, dtype: DType = "int8") -> int:
        """Bytes of the FIFOs in which a tensor waits for the other one of a join."""
        return sum(numbers for _, numbers in self.waiting) * BYTES[dtype]

    def __str__(self) -> str:
        where = "in-place activations and sums" if self.in_place else "nothing in place"
        image = " x ".join(map(str, self.tensors[0].shape))
        lines = [f"{f'one image of {image}, {where}':<58}{'int8':>14}{'float32':>14}"]
        rows: list[tuple[str, int]] = [("peak of activations", max(self.live()))]
        rows += [(f"    {tensor}", tensor.numbers) for tensor in self.alive_at_peak]
        rows += [(f"{len(self.waiting)} skip FIFOs", self.waiting_bytes())]
        lines += [f"{name:<58}" + "".join(f"{_kib(n * each):>14}" for each in BYTES.values()) for name, n in rows]
        lines += [f"{self.streams} FIFOs in all, {self.clones} tensors read more than once", ""]
        lines += [f"{'layer':<40}{'operator':<18}{'writes':>18}{'alive':>14}{'float32':>14}"]
        live = self.live()
        for tensor in self.tensors[1:]:
            if tensor.reuses is None or not self.in_place:
                shape, n = " x ".join(map(str, tensor.shape)), live[tensor.first]
                lines.append(f"{tensor.path:<40}{tensor.operator:<18}{shape:>18}{_kib(n):>14}{_kib(4 * n):>14}")
        return "\n".join(lines)

    @property
    def _steps(self) -> int:
        return 1 + max(tensor.last for tensor in self.tensors)

    def _root(self, i: int) -> int:
        """The tensor whose memory tensor i takes, itself where it has its own."""
        reuses = self.tensors[i].reuses if self.in_place else None
        return i if reuses is None else self._root(reuses)

    def _buffers(self) -> dict[int, tuple[int, int, int]]:
        """By root: numbers, first and last operator of each piece of memory."""
        found: dict[int, tuple[int, int, int]] = {}
        for i, tensor in enumerate(self.tensors):
            root = self._root(i)
            numbers, first, last = found.get(root, (tensor.numbers, tensor.first, tensor.last))
            found[root] = (numbers, first, max(last, tensor.last))
        return found


@dataclass(frozen=True)
class MemoryPlans:
    """Several plans side by side: `print(plans)` is a table."""

    plans: Mapping[str, MemoryPlan | str]  # by name; where the network can't be made, the reason

    def __getitem__(self, name: str) -> MemoryPlan:
        plan = self.plans[name]
        if isinstance(plan, str):
            raise ValueError(plan)
        return plan

    def __str__(self) -> str:
        headers = ("peak int8", "float32", "MACs", "FIFOs", "clones", "skip FIFOs", "int8")
        lines = [f"{'one image':<34}" + "".join(f"{header:>12}" for header in headers)]
        for name, plan in self.plans.items():
            if isinstance(plan, str):
                lines.append(f"{name:<34}  {plan}")
                continue
            values = (
                _kib(plan.peak()), _kib(plan.peak("float32")), f"{plan.macs / 1e6:,.1f} M", plan.streams, plan.clones,
                len(plan.waiting), _kib(plan.waiting_bytes()),
            )  # fmt: skip
            lines.append(f"{name:<34}" + "".join(f"{value:>12}" for value in values))
        return "\n".join(lines)


def _kib(numbers: int) -> str:
    return f"{numbers / 1024:,.1f} KiB"


class Recorder(TorchDispatchMode):
    """Records which operators write and read the activations of one forward pass."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.model = model
        self.batch = len(x)
        self.written: list[dict[str, Any]] = []  # the fields of LiveTensor
        self.delays: list[float] = []  # of each tensor, in images
        self.holds: dict[int, int] = {}  # by storage: the tensor that is in it now
        self.waiting: list[tuple[int, int]] = []
        self.count = 0
        self.kept: list[Any] = [x]  # so that no other storage gets the address of one that is gone
        self._write(x, "input", "", 0.0)

    def run(self, *, in_place: bool = True) -> MemoryPlan:
        """The plan of a forward pass on the input."""
        with running_modules(self.model) as self.running, torch.no_grad(), self:
            result = self.model(self.kept[0])
        last = max(self.count - 1, 0)
        outputs = {self.holds.get(_storage(x)) for x in _tensors(result)}
        for i, tensor in enumerate(self.written):
            if i in outputs:
                tensor["last"] = last
        # Some outputs are never read, such as the indices of a pooling: no runtime writes them.
        unread = {i for i, tensor in enumerate(self.written) if i and not tensor["reads"] and i not in outputs}
        numbered = {i: n for n, i in enumerate(i for i in range(len(self.written)) if i not in unread)}
        for tensor in self.written:
            tensor["reuses"] = self._reusable(tensor)
        return MemoryPlan(
            tensors=tuple(
                LiveTensor(**{**self.written[i], "reuses": numbered.get(self.written[i]["reuses"])}) for i in numbered
            ),
            waiting=tuple((numbered[i], numbers) for i, numbers in self.waiting if i in numbered),
            in_place=in_place,
        )

    def _reusable(self, tensor: dict[str, Any]) -> int | None:
        for source in tensor["reuses"]:
            before = self.written[source]
            if before["last"] == tensor["first"] and before["numbers"] == tensor["numbers"]:
                return int(source)
        return None

    def _write(self, x: Tensor, path: str, operator: str, delay: float, reuses: Iterable[int] = ()) -> None:
        self.holds[_storage(x)] = len(self.written)
        numbers = x.untyped_storage().nbytes() // x.element_size() // self.batch
        fields = {"path": path, "operator": operator, "shape": tuple(x.shape[1:]), "numbers": numbers}
        lifetime = {"first": self.count, "last": self.count, "reads": 0, "reuses": tuple(reuses)}
        self.written.append(fields | lifetime)
        self.delays.append(delay)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.kept.append(result)
        read = [x for x in _tensors((args, kwargs)) if _storage(x) in self.holds]
        mutates = func._schema.is_mutable  # type: ignore[attr-defined]
        fresh = [x for x in _tensors(result) if mutates or _storage(x) not in self.holds]
        if not read or not fresh:  # of weights alone, or a view
            return result
        name = func.overloadpacket.__name__  # type: ignore[attr-defined]
        operator = name if name.startswith("_") else name.removesuffix("_")
        sources = list(dict.fromkeys(self.holds[_storage(x)] for x in read))
        for source in sources:
            self.written[source]["last"] = self.count
            self.written[source]["reads"] += 1
        latest = max(self.delays[source] for source in sources)
        if len(sources) > 1:
            for x in read:
                ahead = latest - self.delays[self.holds[_storage(x)]]
                if ahead > 0:
                    numbers = math.ceil(round(ahead * x.numel() / self.batch, 6))
                    self.waiting.append((self.holds[_storage(x)], numbers))
        path = self.running[-1][0] if self.running else ""
        reuses = sources if operator in IN_PLACE else ()
        for x in fresh:
            self._write(x, path or type(self.model).__name__, operator, latest + _delay(operator, args), reuses)
        self.count += 1
        return result


def _delay(operator: str, args: tuple[Any, ...]) -> float:
    """How much an operator must have read before it begins to write, in images."""
    if operator in WHOLE_IMAGE or (operator in ("mean", "sum", "amax") and _over_pixels(*args[:2])):
        return 1.0
    if operator == "convolution":
        x, weight, _, _, padding, dilation = args[:6]
        windows = [d * (k - 1) - p for k, p, d in zip(weight.shape[2:], padding, dilation, strict=True)]
    elif operator in ("max_pool2d_with_indices", "avg_pool2d"):
        x, kernel = args[:2]
        padding = args[3] if len(args) > 3 else (0,)
        windows = [k - 1 - p for k, p in zip(_two(kernel), _two(padding), strict=True)]
    elif operator == "constant_pad_nd" and len(args[1]) == 4 and args[0].ndim == 4:
        x, (left, _, top, _) = args[:2]
        windows = [-top, -left]
    else:
        return 0.0
    sides = x.shape[2:]
    behind = [math.prod(sides[i + 1 :]) for i in range(len(sides))]  # pixels in a row, and in a pixel
    return float(sum(window * each for window, each in zip(windows, behind, strict=True)) / math.prod(sides))


def _over_pixels(x: Tensor, dims: Any = None) -> bool:
    """Whether a reduction is over positions, the last two axes of images and the middle ones of a sequence."""
    axes = {dim % x.ndim for dim in (_two(dims) if isinstance(dims, int) else dims or range(x.ndim))}
    return bool(axes & ({x.ndim - 2, x.ndim - 1} if x.ndim > 3 else set(range(1, x.ndim - 1))))


def _two(value: Any) -> tuple[int, int]:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return values if len(values) == 2 else values * 2


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
