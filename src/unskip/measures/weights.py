"""Statistics of weights and their ID entries (Yu and Tomasi 2019, arXiv:1905.10944, section 3 and Table 3)."""

import math

from torch import Tensor

from unskip.measures.probe import Family, Probe
from unskip.measures.series import Findings, measures_of

LARGE = 0.25  # Yu and Tomasi 2019, Table 3


def id_entries(weight: Tensor) -> Tensor:
    """The entries (c, c) at the kernels' centres, c up to min(C, D) (Yu and Tomasi 2019, section 3).

    A skip connection adds 1 to them. Kernels of even size have no centre and so no ID entries.
    """
    if any(size % 2 == 0 for size in weight.shape[2:]):
        return weight.new_empty(0)
    for size in weight.shape[2:]:
        weight = weight.select(2, size // 2)
    return weight.diagonal()


def mass(weight: Tensor) -> float:
    """The weight mass: the L1 norm."""
    return weight.double().abs().sum().item()


def report(probe: Probe) -> Findings:
    weights = probe.weights()
    total = {layer: mass(weight) for layer, weight in weights.items()}
    identity = {layer: mass(id_entries(weight)) for layer, weight in weights.items()}
    for layer, weight in weights.items():
        layer.values["id_fraction"] = identity[layer] / total[layer] if total[layer] > 0 else math.nan
        layer.values["weight_deviation"] = weight.double().std(unbiased=False).item()
    count = sum(weight.numel() for weight in weights.values())
    if count == 0:
        return Findings()
    mean = sum(weight.double().sum().item() for weight in weights.values()) / count
    square = sum(weight.double().square().sum().item() for weight in weights.values()) / count
    numbers = {
        "weight_mean": mean,
        "weight_deviation": max(square - mean**2, 0.0) ** 0.5,
        "weight_mass": sum(total.values()),
        "weight_mass_large": sum(mass(weight[weight.abs() >= LARGE]) for weight in weights.values()),
        "weight_mass_id": sum(identity.values()),
    }
    return Findings(numbers=numbers)


FAMILY = Family(name="weights", measures=measures_of("weights"), report=report)
