"""Statistics of weights and their ID entries (Yu and Tomasi 2019, arXiv:1905.10944, section 3 and Table 3)."""

import math

from torch import Tensor

from unskip.measures.probe import Family, Probe
from unskip.measures.series import Findings, Measure, Series

LARGE = 0.25  # Yu and Tomasi 2019, Table 3

IDENTITY = Measure(
    name="id_fraction",
    title="Weights that connect a channel to itself",
    label="fraction of the weight mass in ID entries",
    healthy="Neither is better: near 0 in plain networks, large if an identity is folded into the weights.",
    source="Yu and Tomasi 2019, section C, Table 3",
)
DEVIATION = Measure(
    name="weight_deviation",
    title="Standard deviation of the weights",
    label="standard deviation of the weights",
    log=True,
    healthy="Similar in layers of the same shape. He's initialisation gives sqrt(2 / (in · k²)).",
    source="Yu and Tomasi 2019, section C, Table 3",
)


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
    weights = {layer: layer.weight for layer in probe.layers if layer.weight is not None and layer.call == 0}
    total = {layer: mass(weight) for layer, weight in weights.items()}
    identity = {layer: mass(id_entries(weight)) for layer, weight in weights.items()}
    count = sum(weight.numel() for weight in weights.values())
    numbers = {}
    if count:
        mean = sum(weight.double().sum().item() for weight in weights.values()) / count
        square = sum(weight.double().square().sum().item() for weight in weights.values()) / count
        numbers = {
            "weight_mean": mean,
            "weight_deviation": max(square - mean**2, 0.0) ** 0.5,
            "weight_mass": sum(total.values()),
            "weight_mass_large": sum(mass(weight[weight.abs() >= LARGE]) for weight in weights.values()),
            "weight_mass_id": sum(identity.values()),
        }
    fractions = [identity[layer] / total[layer] if total[layer] > 0 else math.nan for layer in weights]
    deviations = [weight.double().std(unbiased=False).item() for weight in weights.values()]
    return Findings(
        series=(Series.of(IDENTITY, weights, fractions), Series.of(DEVIATION, weights, deviations)), numbers=numbers
    )


FAMILY = Family(name="weights", report=report)
