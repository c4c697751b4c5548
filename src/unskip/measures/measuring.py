"""`measure`: the families of measures on one network and one batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from unskip._core.modules import preserved, unwrap
from unskip.measures import (
    activation,
    cushion,
    dissipation,
    dists,
    dominance,
    gradient,
    scaling,
    singularity,
    weights,
)
from unskip.measures.losses import Loss
from unskip.measures.probe import Family, Probe, mapped
from unskip.measures.series import Measured

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (activation, gradient, dissipation, scaling, singularity, cushion, dominance, weights, dists)
}
DEFAULT = tuple(name for name in FAMILIES if name != "dists")  # which needs weights that are to be downloaded


def register_family(family: Family) -> Family:
    """Makes a family of measures known to `measure` under its name."""
    if family.name in FAMILIES:
        raise ValueError(f"register_family: there is a family {family.name!r} already. Give yours another name.")
    FAMILIES[family.name] = family
    return family


def measure(
    network: nn.Module,
    batch: Any,
    target: Any = None,
    *,
    families: Sequence[str] = DEFAULT,
    loss: Loss | None = None,
    seed: int = 0,
) -> Measured:
    """What happens to the signal on its way through a network and to the gradient on its way back.

    The network is run in training mode on the batch, forward and backward, and once more with a little noise on its
    input. Afterwards it is as before: no hooks, same mode, buffers, gradients and random state, also after an error.

    Args:
        network: any module; compiled and DDP-wrapped ones are unwrapped.
        batch: what it takes: a tensor (B, ...), a tuple of arguments, or a dict of keyword arguments.
        target: class numbers (B,) or a tensor like the output; random labels without it.
        families: which measures, by the names in `unskip.measures.FAMILIES`.
        loss: a function of the network's output and `target` that returns one number; the default fits the output.
        seed: of random labels, noise, dropout and estimates.
    """
    if not isinstance(network, nn.Module):
        raise ValueError(f"measure: network must be a torch.nn.Module, not {type(network).__name__}.")
    unknown = [name for name in families if name not in FAMILIES]
    if isinstance(families, str) or unknown:
        raise ValueError(f"measure: families must be a list of names out of {', '.join(FAMILIES)}, not {families!r}.")
    network = unwrap(network)
    if isinstance(network, torch.jit.ScriptModule):
        raise ValueError(
            "measure: a scripted network (torch.jit) takes no hooks. Give the module that it was made from."
        )
    if any(is_lazy(parameter) for parameter in network.parameters()):
        raise ValueError("measure: the network has lazy parameters without a shape. Run it once on a batch first.")
    chosen = [FAMILIES[name] for name in dict.fromkeys(families)]
    with torch.inference_mode(False), preserved(network), torch.compiler.set_stance("force_eager"):
        # Copies of what was made in inference mode, which takes no gradients.
        batch, target = mapped((batch, target), lambda x: x.clone() if x.is_inference() else x)
        probe = Probe(network, batch, target, loss=loss, seed=seed)
        probe.collect(chosen)
        findings = [family.report(probe) for family in chosen]
    return Measured(
        series={series.name: series for found in findings for series in found.series},
        numbers={"loss": probe.loss} | {name: value for found in findings for name, value in found.numbers.items()},
        layers=tuple(layer.info() for layer in probe.layers),
        notes=(*probe.notes, *(note for found in findings for note in found.notes)),
        failure=probe.failure,
        samples=probe.samples,
        shape=None if probe.input is None else tuple(probe.input.shape),
    )
