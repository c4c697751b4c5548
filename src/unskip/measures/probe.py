"""The probe: runs a network on a batch and keeps, of every layer, only what the measures ask for.

Tensors are reduced inside the hooks and let go, so that measuring a network needs about the memory of training it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unskip._core.modules import preserved
from unskip.measures.graph import Edge, cuts, edge_of, entries
from unskip.measures.layer_types import (
    PARAMETRIZATIONS,
    by_sample,
    by_unit,
    floating_in,
    has_parts,
    kind_of,
    tensors_in,
    unit_axis,
)
from unskip.measures.losses import Loss, loss_of
from unskip.measures.series import Findings, LayerInfo


class Call(NamedTuple):
    """One call of a module, seen from its hook."""

    path: str
    number: int  # how often the module has run before
    module: nn.Module
    input: Tensor | None  # the first floating-point one, as it was before the call
    edge: Edge | None  # where the gradient of that input arrives
    output: Tensor


@torch.no_grad()
def record_outputs(network: nn.Module, paths: Iterable[str], x: Tensor) -> dict[str, Tensor]:
    """The outputs of the modules at `paths` in one forward pass, in the mode that the network is in.

    Afterwards the network is as before (BatchNorm's statistics too) and the hooks are gone, also after an error.
    """
    outputs: dict[str, Tensor] = {}

    def recorder(path: str) -> Callable[[nn.Module, object, Tensor], None]:
        def record(module: nn.Module, args: object, output: Tensor) -> None:
            outputs[path] = output.detach().clone()

        return record

    known = dict(network.named_modules())
    paths = list(paths)
    for path in paths:
        if path not in known:
            raise ValueError(f"record_outputs: {type(network).__name__} has no module {path!r}; see named_modules().")
    with ExitStack() as stack:
        stack.enter_context(preserved(network))
        for path in paths:
            stack.callback(known[path].register_forward_hook(recorder(path)).remove)
        network(x)
    return outputs


@dataclass(kw_only=True, eq=False)
class Layer:
    """One call of one module, as the first pass found it."""

    path: str
    call: int  # 0 for the first call of the module
    module: nn.Module
    kind: str
    shape: tuple[int, ...]
    samples: int
    sample_axis: int | None  # None: the shape does not say which entry belongs to which sample
    unit_axis: int
    trunk: bool = True
    edge: Edge | None = None  # of the output, while the graph lives
    kept: dict[str, Any] = field(default_factory=dict)  # by family: what its `forward` returned
    back: dict[str, Any] = field(default_factory=dict)  # by family: what its `backward` returned

    @property
    def name(self) -> str:
        name = self.path or "output"
        return name if self.call == 0 else f"{name}#{self.call + 1}"

    @property
    def weight(self) -> Tensor | None:
        """The weight of a convolution or linear layer (frozen ones too), (out, in, ...)."""
        weight = getattr(self.module, "weight", None)
        return weight.detach() if self.kind in ("conv", "linear") and isinstance(weight, Tensor) else None

    def by_sample(self, x: Tensor) -> Tensor | None:
        """A tensor shaped like this layer's output as (B, entries)."""
        return None if self.sample_axis is None else by_sample(x, self.samples, self.sample_axis)

    def by_unit(self, x: Tensor, most: int) -> Tensor:
        """A tensor shaped like this layer's output as (observations, units), at most so many observations."""
        return by_unit(x, self.unit_axis, most)

    def info(self) -> LayerInfo:
        parameters = sum(parameter.numel() for parameter in self.module.parameters() if parameter.requires_grad)
        return LayerInfo(name=self.name, kind=self.kind, parameters=parameters, shape=self.shape, trunk=self.trunk)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of measures.

    `forward` and `backward` run inside the probe's pass and return the little that is kept of a layer (never its
    tensors); `report` turns what was kept into series, and may run the network again through the probe.
    """

    name: str
    report: Callable[["Probe"], Findings]
    forward: Callable[[Layer, Tensor | None, Tensor], Any] | None = None  # layer, input, output
    backward: Callable[[Layer, Tensor, Tensor | None], Any] | None = None  # layer, gradient of output, of input


class Pending(NamedTuple):
    """A gradient that waits for its partner, or for the other paths by which it arrives."""

    output: Tensor | None
    input: Tensor | None
    missing: int


class Probe:
    """One network, one batch: the first pass finds the layers, later ones run the same layers again.

    Use it inside `state.preserved(network)`.
    """

    def __init__(
        self, network: nn.Module, batch: Any, target: Any = None, *, loss: Loss | None = None, seed: int = 0
    ) -> None:
        self.network = network
        self.target = target
        self.loss_function = loss
        self.seed = seed
        self.layers: list[Layer] = []
        self.notes: list[str] = []
        self.loss = float("nan")
        self.failure: str | None = None  # why the backward pass fails, where it does
        self.weight_gradients: dict[str, Tensor | None] = {}  # by name of parameter
        self.input_gradient: Tensor | None = None
        self.arguments, self.keywords = as_call(batch)
        tensors = tensors_in((self.arguments, self.keywords))
        if not tensors or tensors[0].ndim == 0 or tensors[0].shape[0] == 0:
            raise ValueError(
                f"measure: batch must be a tensor with at least one sample (or a tuple of arguments, or a dict of "
                f"keyword arguments, that holds one), not {describe(batch)}."
            )
        self.samples = tensors[0].shape[0]
        self.input = floating_in((self.arguments, self.keywords))  # None for tokens

    # -- passes -----------------------------------------------------------------------------------------------------

    def collect(self, families: Sequence[Family]) -> None:
        """The first pass, forward and backward, in training mode (as at the start of training)."""
        try:
            self.network.train()
            self.forward_and_backward(families)
        except RefusedError as refused:
            self.start_over()
            self.network.eval()
            try:
                self.forward_and_backward(families)
            except RefusedError:
                raise refused.as_error() from refused.__cause__
            self.notes.append(
                f"Measured in evaluation mode, since the network refuses this batch in training mode: {refused.reason}."
            )
            return
        self.notes.insert(0, "Measured in training mode: BatchNorm uses the statistics of this batch.")

    def start_over(self) -> None:
        self.layers, self.notes, self.weight_gradients, self.failure = [], [], {}, None

    def forward_and_backward(self, families: Sequence[Family]) -> None:
        leaf = None
        arguments, keywords = self.arguments, self.keywords
        if self.input is not None:
            leaf = self.input.detach().requires_grad_()
            # A copy that is no leaf, since some networks change their input in place.
            arguments, keywords = replace((arguments, keywords), self.input, leaf.clone())
        pending: dict[Layer, Pending] = {}
        with torch.enable_grad(), self.with_hooks(partial(self.discover, families, pending)):
            output = self.run(arguments, keywords)
            loss, sentence = loss_of(output, self.target, self.loss_function, self.samples, self.seed)
        self.notes.append(sentence)
        self.loss = loss.item()
        if not self.layers:
            raise ValueError(
                f"measure: {type(self.network).__name__} ran without calling a single module with a tensor as output, "
                "so there is nothing to measure layer by layer. Build it from nn.Modules."
            )
        if not loss.requires_grad:
            self.notes.append(
                "The loss does not depend on the input or on a parameter that takes gradients: no gradients measured."
            )
        else:
            self.find_trunk(loss, leaf)
            self.backward(families, pending, loss, leaf)
        for layer in self.layers:
            layer.edge = None

    def backward(
        self, families: Sequence[Family], pending: dict[Layer, Pending], loss: Tensor, leaf: Tensor | None
    ) -> None:
        named = [(name, parameter) for name, parameter in self.network.named_parameters() if parameter.requires_grad]
        wanted = [parameter for _, parameter in named] + ([leaf] if leaf is not None else [])
        try:
            gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        except HookError:
            raise
        except RuntimeError as error:
            self.failure = str(error).split(". ")[0].rstrip(".")
            self.notes.append(f"The backward pass fails, and so would training: {self.failure}. No gradients measured.")
            for layer in self.layers:
                layer.back.clear()
            return
        self.weight_gradients = {name: gradient for (name, _), gradient in zip(named, gradients, strict=False)}
        self.input_gradient = gradients[-1] if leaf is not None else None
        for layer, waiting in pending.items():  # their inputs take no gradient, or not all of it arrived
            if waiting.output is not None:
                self.reduce_back(families, layer, waiting.output, None)

    def again(self, on_layer: Callable[[Layer, Tensor | None, Tensor], Tensor | None], part: Any = None) -> Any:
        """One more forward pass over the layers that the first one found; a tensor returned replaces the output.

        Args:
            on_layer: gets layer, input and output.
            part: (arguments, keywords) in place of the batch, from `part()` or `with_input()`.
        """
        known = {(layer.path, layer.call): layer for layer in self.layers}

        def on_call(call: Call) -> Tensor | None:
            layer = known.get((call.path, call.number))
            return None if layer is None else on_layer(layer, call.input, call.output)

        arguments, keywords = part if part is not None else (self.arguments, self.keywords)
        with self.with_hooks(on_call):
            return self.run(arguments, keywords)

    def part(self, samples: int) -> tuple[tuple, dict]:
        """The call on the first samples of the batch only."""

        def cut(x: Tensor) -> Tensor:
            return x[:samples] if x.ndim and x.shape[0] == self.samples else x

        return mapped((self.arguments, self.keywords), cut)

    def with_input(self, x: Tensor) -> tuple[tuple, dict]:
        """The call with another input in place of the batch's."""
        assert self.input is not None
        return replace((self.arguments, self.keywords), self.input, x)

    def run(self, arguments: tuple, keywords: dict) -> Any:
        torch.manual_seed(self.seed)  # the same dropout in every pass; the caller's generators are preserved
        # Copies, since some networks change their input in place, and the batch is the caller's.
        arguments, keywords = mapped((arguments, keywords), lambda x: x if x.requires_grad else x.clone())
        try:
            return self.network(*arguments, **keywords)
        except HookError:
            raise
        except Exception as error:
            what = describe((arguments, keywords) if keywords else arguments[0] if len(arguments) == 1 else arguments)
            raise RefusedError(type(self.network).__name__, what, error) from error

    # -- hooks ------------------------------------------------------------------------------------------------------

    @contextmanager
    def with_hooks(
        self,
        on_call: Callable[[Call], Tensor | None],
        on_entry: Callable[[str, tuple, dict], None] | None = None,
    ) -> Iterator[None]:
        """Inside, `on_call` sees every call of every module, children before their parents.

        `on_entry` sees path and arguments before the module runs. Both may call modules; those calls are not seen.
        """
        calls: dict[str, int] = {}
        arrived: dict[str, list[tuple[Tensor | None, Edge | None]]] = {}
        busy = False

        @contextmanager
        def alone() -> Iterator[None]:
            nonlocal busy
            busy = True
            try:
                yield
            finally:
                busy = False

        def before(path: str, module: nn.Module, arguments: tuple, keywords: dict) -> None:
            if busy:
                return
            x = floating_in((arguments, keywords))
            edge = edge_of(x)
            if x is not None:
                x = x.detach().clone() if getattr(module, "inplace", False) else x.detach()
            arrived.setdefault(path, []).append((x, edge))
            if on_entry is not None:
                with alone(), as_hook_error(path):
                    on_entry(path, arguments, keywords)

        def after(path: str, module: nn.Module, arguments: tuple, keywords: dict, output: Any) -> Any:
            if busy:
                return None
            x, edge = arrived[path].pop()
            y = floating_in(output)
            if y is None or y.numel() == 0:
                return None
            number = calls.get(path, 0)
            calls[path] = number + 1
            with alone(), as_hook_error(path):
                changed = on_call(Call(path, number, module, x, edge, y))
            return changed if isinstance(output, Tensor) else None

        with ExitStack() as stack:
            for path, module in self.network.named_modules():
                if PARAMETRIZATIONS in path.split("."):
                    continue  # puts out a weight, and no signal
                stack.callback(module.register_forward_pre_hook(partial(before, path), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(partial(after, path), with_kwargs=True).remove)
            yield

    def discover(self, families: Sequence[Family], pending: dict[Layer, Pending], call: Call) -> None:
        """Adds a layer for a call, unless it only handed on what is a layer already."""
        kind = kind_of(call.module)
        edge = edge_of(call.output)
        composite = has_parts(call.module)
        if edge is None:
            if kind == "pass" or composite:
                return
        elif kind == "pass" or any(edge == layer.edge for layer in self.layers):
            return
        shape = tuple(call.output.shape)
        layer = Layer(
            path=call.path,
            call=call.number,
            module=call.module,
            kind=kind,
            shape=shape,
            samples=self.samples,
            sample_axis=sample_axis(call.module, shape, self.samples),
            unit_axis=unit_axis(call.module, kind, call.output, self.layers[-1].unit_axis if self.layers else 1),
            edge=edge,
        )
        self.layers.append(layer)
        with torch.no_grad():
            for family in families:
                if family.forward is not None:
                    layer.kept[family.name] = family.forward(layer, call.input, call.output.detach())
        if edge is None or not any(family.backward for family in families):
            return
        arriving = entries(edge, call.edge) if call.edge is not None and not composite else []
        pending[layer] = Pending(None, None, len(arriving))
        call.output.register_hook(partial(self.on_output_gradient, families, pending, layer))
        for node, position in arriving:
            node.register_hook(partial(self.on_input_gradient, families, pending, layer, position))

    def on_output_gradient(
        self, families: Sequence[Family], pending: dict[Layer, Pending], layer: Layer, gradient: Tensor
    ) -> None:
        waiting = pending.get(layer)
        if waiting is None:
            return
        if waiting.missing == 0:
            del pending[layer]
            self.reduce_back(families, layer, gradient, None)
        else:
            pending[layer] = waiting._replace(output=gradient)

    def on_input_gradient(
        self,
        families: Sequence[Family],
        pending: dict[Layer, Pending],
        layer: Layer,
        position: int,
        inputs: tuple[Tensor | None, ...],
        outputs: tuple[Tensor | None, ...],
    ) -> None:
        waiting = pending.get(layer)
        if waiting is None or waiting.output is None:
            return
        arrived = inputs[position]
        total = arrived if waiting.input is None else waiting.input if arrived is None else waiting.input + arrived
        if waiting.missing > 1:
            pending[layer] = waiting._replace(input=total, missing=waiting.missing - 1)
        else:
            del pending[layer]
            self.reduce_back(families, layer, waiting.output, total)

    @torch.no_grad()
    def reduce_back(self, families: Sequence[Family], layer: Layer, output: Tensor, source: Tensor | None) -> None:
        for family in families:
            if family.backward is not None:
                with as_hook_error(layer.name):
                    layer.back[family.name] = family.backward(layer, output, source)

    def find_trunk(self, loss: Tensor, leaf: Tensor | None) -> None:
        root, start = edge_of(loss), edge_of(leaf) or next((layer.edge for layer in self.layers if layer.edge), None)
        if root is None or start is None:
            return
        trunk = cuts(root.node, start.node)
        for layer in self.layers:
            layer.trunk = layer.edge is not None and layer.edge.node in trunk


class HookError(RuntimeError):
    """A measure failed inside a hook: ours to mend, and not a network that refuses its batch."""


@contextmanager
def as_hook_error(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise HookError(f"measure: at layer {name!r}: {error}") from error


class RefusedError(Exception):
    """The network did not take the batch."""

    def __init__(self, network: str, batch: str, error: Exception) -> None:
        self.reason = " ".join(str(error).split()) or type(error).__name__
        super().__init__(
            f"measure: {network} does not take {batch}: {self.reason.rstrip('.')}. Give it a batch that it takes."
        )

    def as_error(self) -> ValueError:
        return ValueError(str(self))


def sample_axis(module: nn.Module, shape: tuple[int, ...], samples: int) -> int | None:
    """The axis that counts the samples; recurrent nets put time first unless told otherwise."""
    if isinstance(module, nn.RNNBase) and not module.batch_first and len(shape) == 3:
        return 1
    if not shape:
        return None
    if shape[0] == samples:
        return 0
    if len(shape) >= 3 and shape[1] == samples:
        return 1
    return 0 if shape[0] % samples == 0 else None


def as_call(batch: Any) -> tuple[tuple, dict]:
    """A batch as the arguments of a network: a tuple is several, a mapping is keywords, anything else is one."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def mapped(nest: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A nest of tuples, lists and dicts with every tensor changed."""
    if isinstance(nest, Tensor):
        return change(nest)
    if isinstance(nest, dict):
        return {key: mapped(value, change) for key, value in nest.items()}
    if isinstance(nest, tuple | list) and not hasattr(nest, "_fields"):
        return type(nest)(mapped(value, change) for value in nest)
    return nest


def replace(nest: Any, old: Tensor, new: Tensor) -> Any:
    return mapped(nest, lambda x: new if x is old else x)


def describe(value: Any) -> str:
    """A batch in words, for an error."""
    shapes = [f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in tensors_in(value)]
    if isinstance(value, Tensor):
        return f"a batch of {shapes[0]}"
    return f"a {type(value).__name__} with {', '.join(shapes) or 'no tensor'}"
