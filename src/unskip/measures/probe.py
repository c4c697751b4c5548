"""The probe: runs a model on a batch and keeps, for every layer, only what the measures need.

Hooks reduce the tensors and release them, so measuring a model takes about as much memory as training it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.jit._script import RecursiveScriptModule
from torch.utils._pytree import tree_map_only

from unskip._core.errors import reason
from unskip._core.modules import preserved
from unskip._core.rng import own_generators_preserved
from unskip.measures.graph import cuts, depths, edge_of, entries
from unskip.measures.layer_types import (
    PARAMETRIZATIONS,
    floating_in,
    has_parts,
    kind_of,
    sample_axis,
    tensors_in,
    unit_axis,
)
from unskip.measures.losses import Loss, loss_of
from unskip.measures.series import COUNTED, Findings, LayerInfo, Measure, Series

T = TypeVar("T")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of the model
Values = Mapping[str, Any]  # of one layer, by name of measure: numbers, Estimates, or what `Family.report` reads
OnEntry = Callable[[str, tuple[Any, ...], dict[str, Any]], None]  # path and arguments of a module


@torch.no_grad()
def record_outputs(model: nn.Module, paths: Iterable[str], example: Tensor) -> dict[str, Tensor]:
    """The outputs of the modules at `paths` in one forward pass, in the model's current mode.

    Afterwards the model is unchanged, including BatchNorm statistics, and all hooks are removed, also after an error.
    """
    outputs: dict[str, Tensor] = {}
    modules = dict(model.named_modules())
    paths = list(paths)

    def record(path: str, module: nn.Module, args: object, output: Tensor) -> None:
        outputs[path] = output.detach().clone()

    for path in paths:
        if path not in modules:
            raise ValueError(f"record_outputs: {type(model).__name__} has no module {path!r}; see named_modules().")
    with ExitStack() as stack:
        stack.enter_context(preserved(model))
        for path in paths:
            stack.callback(modules[path].register_forward_hook(partial(record, path)).remove)
        model(example)
    return outputs


class Call(NamedTuple):
    """One call of a module, as its hooks see it."""

    path: str
    number: int  # how often the module has run before
    module: nn.Module
    input: Tensor | None  # the first floating-point input, before any in-place change
    edge: GradientEdge | None  # of that input
    output: Tensor


@dataclass(kw_only=True, eq=False)
class Layer:
    """One call of one module in the first pass."""

    path: str
    call: int  # 0 for the first call of the module
    module: nn.Module
    kind: str
    shape: tuple[int, ...]
    samples: int
    unit_axis: int
    trunk: bool = True
    depth: int = 0
    edge: GradientEdge | None = None  # of the output, while the graph exists
    values: dict[str, Any] = field(default_factory=dict)  # by name of measure

    @property
    def name(self) -> str:
        name = self.path or "output"
        return name if self.call == 0 else f"{name}#{self.call + 1}"

    @property
    def sample_axis(self) -> int | None:
        """The axis of the output that holds the samples, None if the shape does not tell."""
        return sample_axis(self.module, self.shape, self.samples)

    @cached_property  # a spectral norm changes its weight with every access
    def weight(self) -> Tensor | None:
        """The weight of a convolution or linear layer, frozen or not, (out, in, ...)."""
        weight = getattr(self.module, "weight", None)
        return weight.detach() if self.kind in ("conv", "linear") and isinstance(weight, Tensor) else None

    def by_sample(self, x: Tensor | None) -> Tensor | None:
        """An input or output of this layer as (B, entries), None if its shape does not tell the samples apart."""
        axis = None if x is None else sample_axis(self.module, tuple(x.shape), self.samples)
        if x is None or axis is None or x.numel() == 0:
            return None
        x = x.detach().movedim(axis, 0)
        return x.reshape(self.samples, -1) if x.shape[0] % self.samples == 0 else None

    def by_unit(self, x: Tensor, max_observations: int) -> Tensor:
        """An output of this layer as (observations, units): each position of each sample is one observation.

        Of more than `max_observations`, that many are taken, evenly spaced.
        """
        x = x.detach()
        if x.ndim <= 1:
            x = x.reshape(-1, 1)
        x = x.flatten(2) if self.unit_axis == 1 and x.ndim > 2 else x.flatten(0, -2)[..., None]  # (A, units, P)
        count, positions = x.shape[0] * x.shape[2], x.shape[2]
        chosen = evenly_spaced(count, max_observations, x.device)
        return x[chosen // positions, :, chosen % positions]

    def info(self) -> LayerInfo:
        parameters = sum(parameter.numel() for parameter in self.module.parameters() if parameter.requires_grad)
        return LayerInfo(
            name=self.name,
            kind=self.kind,
            parameters=parameters,
            shape=self.shape,
            trunk=self.trunk,
            depth=self.depth,
        )


def evenly_spaced(count: int, most: int, device: torch.device) -> Tensor:
    """At most `most` evenly spaced indices below `count`."""
    return torch.linspace(0, count - 1, min(most, count), dtype=torch.float64, device=device).long()


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of measures.

    `forward` and `backward` run inside the probe's pass and return values of one layer by name: small summaries, never
    its tensors. `report` runs afterwards and returns what concerns the whole model. It may run the model again through
    the probe, and set `layer.values`. Values with the name of one of `measures` become its series.
    """

    name: str
    measures: tuple[Measure, ...] = ()
    forward: Callable[[Layer, Tensor | None, Tensor], Values | None] | None = None  # layer, input, output
    backward: Callable[[Layer, Tensor, Tensor | None], Values | None] | None = None  # layer, gradient of output, input
    report: Callable[["Probe"], Findings] | None = None


@dataclass
class Gradients:
    """The gradients of a layer's output and input as they arrive during the backward pass."""

    missing: int  # paths on which the input's gradient has not arrived yet
    output: Tensor | None = None
    input: Tensor | None = None


class Probe:
    """One model and one batch. The first pass finds the layers, later passes run the same layers again.

    Use it inside `preserved(model)`.
    """

    def __init__(
        self, model: nn.Module, example: Any, targets: Any = None, *, loss: Loss | None = None, seed: int = 0
    ) -> None:
        self.model = model
        self.targets = targets
        self.loss_function = loss
        self.seed = seed
        self.families: Sequence[Family] = ()
        self.layers: list[Layer] = []
        self.notes: list[str] = []
        self.loss = float("nan")
        self.failure: str | None = None  # the error of the backward pass, if it fails
        self.weight_gradients: dict[str, Tensor | None] = {}  # by name of parameter
        self.pending: dict[Layer, Gradients] = {}
        self.backward_values: dict[Layer, dict[str, Any]] = {}  # until the backward pass is complete
        self.arguments = as_arguments(example)
        tensors = tensors_in(self.arguments)
        if not tensors or tensors[0].ndim == 0 or tensors[0].shape[0] == 0:
            raise ValueError(
                f"measure: example must be a tensor with at least one sample, or a tuple or dict of arguments with "
                f"one, not {describe(example)}."
            )
        self.samples = tensors[0].shape[0]
        self.input = floating_in(self.arguments)  # None for tokens

    def values(self, name: str) -> dict[Layer, Any]:
        """The values of a measure by layer; layers without a value are left out."""
        return {layer: layer.values[name] for layer in self.layers if name in layer.values}

    def series(self, measure: Measure) -> Series:
        return Series.of(measure, {layer.name: value for layer, value in self.values(measure.name).items()})

    def weights(self) -> dict[Layer, Tensor]:
        """The weights of convolutions and linear layers; a module that runs several times counts where it ran first."""
        return {layer: layer.weight for layer in self.layers if layer.weight is not None and layer.call == 0}

    # -- passes -----------------------------------------------------------------------------------------------------

    def collect(self, families: Sequence[Family]) -> None:
        """Runs the first pass, forward and backward, in training mode; in evaluation mode if the model fails there."""
        self.families = families
        try:
            self.model.train()
            self.forward_and_backward()
        except ModelFailedError as failed:
            self.layers, self.notes, self.weight_gradients, self.failure = [], [], {}, None
            self.model.eval()
            try:
                self.forward_and_backward()
            except ModelFailedError:
                raise failed from failed.__cause__
            self.notes.append(f"Measured in evaluation mode, because training mode fails: {failed.reason}.")
        else:
            self.notes.insert(0, "Measured in training mode: BatchNorm uses the statistics of this batch.")
        scripted = [path for path, part in self.model.named_modules() if isinstance(part, RecursiveScriptModule)]
        if scripted:
            self.notes.append(f"The inside of scripted modules (torch.jit) is not measured: {scripted[0]!r}.")

    def forward_and_backward(self) -> None:
        leaf = None
        arguments = self.arguments
        if self.input is not None:
            leaf = self.input.detach().requires_grad_()
            arguments = self.with_input(leaf.clone())  # not a leaf, since some models change their input in place
        self.pending, self.backward_values = {}, {}
        with torch.enable_grad(), self.with_hooks(self.discover):
            output = self.run(arguments)
            loss, note = loss_of(output, self.targets, self.loss_function, self.samples, self.seed)
        self.notes.append(note)
        self.loss = loss.item()
        if not self.layers:
            raise ValueError(
                f"measure: {type(self.model).__name__} calls no module that returns a tensor, so there are no layers "
                "to measure. Build it from nn.Modules."
            )
        if loss.requires_grad:
            self.find_trunk(loss, leaf)
            self.backward(loss, leaf)
        else:
            self.notes.append("Gradients are not measured: the loss depends on nothing that requires a gradient.")
        for layer in self.layers:
            layer.edge = None

    def backward(self, loss: Tensor, leaf: Tensor | None) -> None:
        named = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        wanted = [*named.values(), *([] if leaf is None else [leaf])]  # with the leaf, so that hooks see its gradient
        try:
            gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        except MeasureFailedError:
            raise
        except Exception as error:  # a hook of the model may raise anything
            self.failure = (str(error) or type(error).__name__).split(". ")[0].rstrip(".")
            self.notes.append(
                f"Gradients are not measured. The backward pass fails, as it would in training: {self.failure}."
            )
            return
        self.weight_gradients = dict(zip(named, gradients, strict=False))
        for layer in list(self.pending):  # the input takes no gradient, or only a part of it has arrived
            self.reduce_gradients(layer, with_input=False)
        for layer, values in self.backward_values.items():
            layer.values |= values

    def rerun(
        self,
        on_layer: Callable[[Layer, Tensor | None, Tensor], Tensor | None] | None = None,
        arguments: Arguments | None = None,
        *,
        on_entry: OnEntry | None = None,
    ) -> Any:
        """Runs the layers of the first pass once more and returns the model's output.

        Args:
            on_layer: called with layer, input and output. A returned tensor replaces the output.
            arguments: in place of the batch, from `first_samples` or `with_input`.
            on_entry: called with path and arguments before a module runs.
        """
        layers = {(layer.path, layer.call): layer for layer in self.layers}

        def on_call(call: Call) -> Tensor | None:
            layer = layers.get((call.path, call.number))
            return None if layer is None or on_layer is None else on_layer(layer, call.input, call.output)

        with self.with_hooks(on_call, on_entry):
            return self.run(self.arguments if arguments is None else arguments)

    def first_samples(self, samples: int) -> Arguments:
        """The model's arguments with only the first samples of the batch."""
        return map_tensors(self.arguments, lambda x: x[:samples] if x.ndim and x.shape[0] == self.samples else x)

    def with_input(self, x: Tensor) -> Arguments:
        """The model's arguments with `x` in place of the floating-point input."""
        return map_tensors(self.arguments, lambda old: x if old is self.input else old)

    def run(self, arguments: Arguments) -> Any:
        torch.manual_seed(self.seed)  # the same dropout in every pass; the caller's generators are preserved
        # Copies, since some models change their input in place, and the batch is the caller's.
        args, kwargs = map_tensors(arguments, lambda x: x if x.requires_grad else x.clone())
        try:
            with own_generators_preserved(self.model):
                return self.model(*args, **kwargs)
        except MeasureFailedError:
            raise
        except Exception as error:
            example = describe((args, kwargs) if kwargs else args[0] if len(args) == 1 else args)
            raise ModelFailedError(type(self.model).__name__, example, error) from error

    # -- hooks ------------------------------------------------------------------------------------------------------

    @contextmanager
    def with_hooks(self, on_call: Callable[[Call], Tensor | None], on_entry: OnEntry | None = None) -> Iterator[None]:
        """Inside, `on_call` gets every call of every module, children before their parents.

        `on_entry` gets path and arguments before the module runs. Modules that either of them calls are not reported.
        """
        calls: dict[str, int] = {}
        inputs: dict[str, list[tuple[Tensor | None, GradientEdge | None]]] = {}
        busy = False

        def guarded(path: str, function: Callable[..., Any], *args: Any) -> Any:
            nonlocal busy
            busy = True
            try:
                with blaming(f"a measure at layer {path!r}"):
                    return function(*args)
            finally:
                busy = False

        def before(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if busy:
                return
            x = floating_in((args, kwargs))
            edge = edge_of(x)
            if x is not None:
                x = x.detach().clone() if getattr(module, "inplace", False) else x.detach()
            inputs.setdefault(path, []).append((x, edge))
            if on_entry is not None:
                guarded(path, on_entry, path, args, kwargs)

        def after(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if busy:
                return None
            x, edge = inputs[path].pop()
            y = floating_in(output)
            if y is None or y.numel() == 0:
                return None
            number = calls.get(path, 0)
            calls[path] = number + 1
            changed = guarded(path, on_call, Call(path, number, module, x, edge, y))
            return changed if isinstance(output, Tensor) else None

        with ExitStack() as stack:
            for path, module in self.model.named_modules():
                # A parametrization returns a weight, not a signal. Scripted modules take no hooks.
                if PARAMETRIZATIONS in path.split(".") or isinstance(module, RecursiveScriptModule):
                    continue
                stack.callback(module.register_forward_pre_hook(partial(before, path), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(partial(after, path), with_kwargs=True).remove)
            yield

    def discover(self, call: Call) -> None:
        """Adds a layer for a call, unless the module only returns the output of an earlier layer."""
        kind, edge, composite = kind_of(call.module), edge_of(call.output), has_parts(call.module)
        known = composite if edge is None else any(edge == layer.edge for layer in self.layers)
        if kind == "pass" or known:
            return
        layer = Layer(
            path=call.path,
            call=call.number,
            module=call.module,
            kind=kind,
            shape=tuple(call.output.shape),
            samples=self.samples,
            unit_axis=unit_axis(call.module, kind, call.output, self.layers[-1].unit_axis if self.layers else 1),
            edge=edge,
        )
        self.layers.append(layer)
        with torch.no_grad():
            for family in self.families:
                if family.forward is not None:
                    with blaming(f"{family.name!r} at layer {layer.name!r}"):
                        layer.values |= present(family.forward(layer, call.input, call.output.detach()))
        if edge is None or not any(family.backward for family in self.families):
            return
        paths = entries(edge, call.edge) if call.edge is not None and not composite else []
        self.pending[layer] = Gradients(missing=len(paths))
        output: Any = call.output  # PyTorch's register_hook has no types
        output.register_hook(partial(self.on_output_gradient, layer))
        for node, position in paths:
            node.register_hook(partial(self.on_input_gradient, layer, position))

    def on_output_gradient(self, layer: Layer, gradient: Tensor) -> None:
        if layer in self.pending:
            self.pending[layer].output = gradient
            if self.pending[layer].missing == 0:
                self.reduce_gradients(layer)

    def on_input_gradient(
        self, layer: Layer, position: int, inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...]
    ) -> None:
        found, gradient = self.pending.get(layer), inputs[position]
        if found is None or found.output is None:
            return
        if gradient is not None:
            found.input = gradient if found.input is None else found.input + gradient
        found.missing -= 1
        if found.missing == 0:
            self.reduce_gradients(layer)

    @torch.no_grad()
    def reduce_gradients(self, layer: Layer, *, with_input: bool = True) -> None:
        found = self.pending.pop(layer)
        for family in self.families:
            if family.backward is not None and found.output is not None:
                with blaming(f"{family.name!r} at layer {layer.name!r}"):
                    values = present(family.backward(layer, found.output, found.input if with_input else None))
                self.backward_values.setdefault(layer, {}).update(values)

    def find_trunk(self, loss: Tensor, leaf: Tensor | None) -> None:
        root, start = edge_of(loss), edge_of(leaf) or next((layer.edge for layer in self.layers if layer.edge), None)
        if root is None or start is None:
            return
        trunk = cuts(root.node, start.node)
        weighted = {layer.edge.node for layer in self.layers if layer.edge and layer.kind in COUNTED}
        depth = depths(root.node, start.node, weighted)
        for layer in self.layers:
            layer.trunk = layer.edge is not None and layer.edge.node in trunk
            layer.depth = depth.get(layer.edge.node, 0) if layer.edge is not None else 0


def present(values: Values | None) -> dict[str, Any]:
    """The values that are not None."""
    return {name: value for name, value in (values or {}).items() if value is not None}


class MeasureFailedError(ValueError):
    """A measure fails. This is a bug in the measure, not in the model."""


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Turns an error of a measure into a sentence that names it."""
    try:
        yield
    except (MeasureFailedError, ModelFailedError):
        raise
    except Exception as error:
        raise MeasureFailedError(
            f"measure: {what} fails: {type(error).__name__}: {reason(error)}. Leave this measure out or correct it."
        ) from error


class ModelFailedError(ValueError):
    """The model fails on the batch."""

    def __init__(self, model: str, example: str, error: Exception) -> None:
        self.reason = (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
        super().__init__(f"measure: {model} fails on {example}: {self.reason}. Give an example that the model takes.")


def as_arguments(example: Any) -> Arguments:
    """An example as arguments of a model: tuples and lists are positional, mappings keyword, others one argument."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


def map_tensors(nested: T, function: Callable[[Tensor], Tensor]) -> T:
    """Nested tuples, lists and dicts with `function` applied to every tensor."""
    mapped: T = tree_map_only(Tensor, function, nested)
    return mapped


def describe(value: Any) -> str:
    """Types and shapes of the tensors in `value`, for an error message."""
    shapes = [f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in tensors_in(value)]
    if isinstance(value, Tensor):
        return f"a batch of {shapes[0]}"
    return f"a {type(value).__name__} with {', '.join(shapes) or 'no tensor'}"
