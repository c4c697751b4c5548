"""`measure`: the families of measures on one model and one batch."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from unskip._core import plugins
from unskip._core.modules import preserved, unwrap
from unskip._core.text import nearest
from unskip.measures import (
    activation,
    cushion,
    dissipation,
    dists,
    dominance,
    gradient,
    scaling,
    singularity,
    tokens,
    weights,
)
from unskip.measures.losses import Loss
from unskip.measures.probe import Family, Layer, ModelFailedError, Probe, blaming, map_tensors
from unskip.measures.series import Findings, Measure, Measured

LayerFunction = Callable[[Layer, Tensor | None, Tensor], float | None]  # layer, input, output to a value or None
M = TypeVar("M", bound=Family | LayerFunction)

_FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (activation, gradient, dissipation, scaling, singularity, cushion, dominance, weights, tokens, dists)
}
_ON_REQUEST = {"dists"}  # it downloads weights


def register_measure(measure: M, *, default: bool = True) -> M:
    """Registers a measure by its name, for `measure`, `diagnose` and `unskip doctor`; also a decorator.

    Args:
        measure: a `Family`, or a function of layer, input and output that returns one number, or None for a layer
            without a value. The function's name is the name of the measure, the first paragraph of its docstring the
            title of the plot, and the second one says what is healthy.
        default: whether it is measured if no measures are chosen.
    """
    family = _as_family(measure)
    if family.name in _FAMILIES:
        raise ValueError(f"register_measure: a measure {family.name!r} exists already. Choose another name.")
    _FAMILIES[family.name] = family
    if not default:
        _ON_REQUEST.add(family.name)
    return measure


def measure_names(*, default: bool = False) -> list[str]:
    """The names of all registered families of measures, or only of those that are measured by default."""
    plugins.load("unskip.measures")
    return [name for name in _FAMILIES if not (default and name in _ON_REQUEST)]


def _as_family(measure: str | Family | LayerFunction) -> Family:
    """A family by name, or made from a function of one layer."""
    if isinstance(measure, Family):
        return measure
    if isinstance(measure, str):
        if measure not in measure_names():
            raise ValueError(f"measure: there is no measure {measure!r}.{nearest(measure, measure_names())}")
        return _FAMILIES[measure]
    if not callable(measure):
        raise ValueError(f"measure: {measure!r} is neither the name of a measure, nor a Family, nor a function.")
    name = getattr(measure, "__name__", type(measure).__name__)
    title, _, healthy = (inspect.getdoc(measure) or name.replace("_", " ")).partition("\n\n")
    about = Measure(
        name=name,
        title=title.rstrip("."),
        label=name.replace("_", " "),
        healthy=" ".join(healthy.split()) or "Not documented.",
        source=getattr(measure, "__module__", ""),
    )
    return Family(name=name, measures=(about,), forward=lambda layer, x, y: {name: measure(layer, x, y)})


def measure(
    model: nn.Module,
    example: Any,
    targets: Any = None,
    *,
    families: Sequence[str | Family | LayerFunction] | None = None,
    loss: Loss | None = None,
    seed: int = 0,
) -> Measured:
    """Measures the signal at every layer of a model, and the gradient on its way back.

    The model runs in training mode on the example batch, forward and backward, and once more with a little noise on its
    input. Mode, buffers, gradients and random state are restored and hooks removed, also after an error.

    Args:
        model: any module. Compiled and DDP-wrapped models are unwrapped.
        example: an input batch: a tensor (B, ...), a tuple of arguments, or a dict of keyword arguments.
        targets: class indices (B,) or a tensor like the output; random labels by default.
        families: which measures: names (see `measure_names`), `Family` objects, or functions as `register_measure`
            takes them. By default all that are registered, except those on request (`dists`).
        loss: a function of the model's output and `targets` that returns one number; the default suits the output.
        seed: for random labels, noise, dropout and estimates.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"measure: model must be a torch.nn.Module, not {type(model).__name__}.")
    if isinstance(families, str):
        raise ValueError(f"measure: families={families!r} must be a list, for instance [{families!r}].")
    chosen = [_as_family(family) for family in (measure_names(default=True) if families is None else families)]
    chosen = list({family.name: family for family in chosen}.values())
    model = unwrap(model)
    check_measurable(model)
    with torch.inference_mode(False), preserved(model), torch.compiler.set_stance("force_eager"):
        # Inference tensors take no gradients, so they are copied.
        example, targets = map_tensors((example, targets), lambda x: x.clone() if x.is_inference() else x)
        probe = Probe(model, example, targets, loss=loss, seed=seed)
        probe.collect(chosen)
        findings = [run_report(family, probe) for family in chosen]
    return Measured(
        series={measure.name: probe.series(measure) for family in chosen for measure in family.measures},
        numbers={"loss": probe.loss} | {name: value for found in findings for name, value in found.numbers.items()},
        layers=tuple(layer.info() for layer in probe.layers),
        notes=(*probe.notes, *(note for found in findings for note in found.notes)),
        failure=probe.failure,
        samples=probe.samples,
        shape=None if probe.input is None else tuple(probe.input.shape),
    )


def check_measurable(model: nn.Module) -> None:
    """Refuses models that take no hooks or no gradients."""
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("measure: model is scripted (torch.jit) and takes no hooks. Pass the module it was made from.")
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise ValueError("measure: model has lazy parameters without a shape. Run it once on a batch first.")
    if any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "measure: model was made inside torch.inference_mode, so it takes no gradients. Make it outside."
        )


def run_report(family: Family, probe: Probe) -> Findings:
    """What a family finds after the pass; a note if the model does not run again, for instance on fewer samples."""
    try:
        with blaming(repr(family.name)):
            return Findings() if family.report is None else family.report(probe)
    except ModelFailedError as error:
        return Findings(notes=(f"Not all of {family.name!r} is measured: {str(error).removeprefix('measure: ')}",))
