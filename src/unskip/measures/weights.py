"""Statistics of weights and of their ID entries (Yu and Tomasi 2019, arXiv:1905.10944, section 3 and Table 3)."""

from torch import Tensor

from unskip.measures.probe import Family, Probe
from unskip.measures.series import About, Findings

NAN = float("nan")
LARGE = 0.25  # Yu and Tomasi 2019, Table 3

IDENTITY = About(
    name="id_share",
    title="How much of a layer's weight carries a channel to itself",
    label="share of the weight mass in ID entries",
    healthy="No good or bad: near 0 in plain networks, large where an identity is folded into the weights.",
    source="Yu and Tomasi 2019, section C, Table 3",
)
DEVIATION = About(
    name="weight_deviation",
    title="Size of the weights",
    label="standard deviation of the weights",
    log=True,
    healthy="Alike in layers of the same shape; He's initialisation gives sqrt(2 / (in · k²)).",
    source="Yu and Tomasi 2019, section C, Table 3",
)


def id_entries(weight: Tensor) -> Tensor:
    """The entries (c, c, 0, 0), at the kernels' centres, c up to min(C, D) (Yu and Tomasi 2019, section 3).

    Those to which a skip connection adds 1. A kernel of even size has no centre: there are none.
    """
    if any(size % 2 == 0 for size in weight.shape[2:]):
        return weight.new_empty(0)
    for size in weight.shape[2:]:
        weight = weight.select(2, size // 2)
    return weight.diagonal()


def mass(weight: Tensor) -> float:
    """The total weight mass: the L1 norm."""
    return weight.double().abs().sum().item()


def report(probe: Probe) -> Findings:
    layers = [layer for layer in probe.layers if layer.weight is not None and layer.call == 0]
    weights = [layer.weight for layer in layers if layer.weight is not None]
    names = [layer.name for layer in layers]
    everything, identity = [mass(weight) for weight in weights], [mass(id_entries(weight)) for weight in weights]
    count = sum(weight.numel() for weight in weights)
    numbers = {}
    if count:
        mean = sum(weight.double().sum().item() for weight in weights) / count
        square = sum(weight.double().square().sum().item() for weight in weights) / count
        numbers = {
            "weight_mean": mean,
            "weight_deviation": max(square - mean**2, 0.0) ** 0.5,
            "weight_mass": sum(everything),
            "weight_mass_large": sum(mass(weight[weight.abs() >= LARGE]) for weight in weights),
            "weight_mass_id": sum(identity),
        }
    return Findings(
        series=(
            IDENTITY.series(
                names, (part / whole if whole > 0 else NAN for part, whole in zip(identity, everything, strict=True))
            ),
            DEVIATION.series(names, (weight.double().std(unbiased=False).item() for weight in weights)),
        ),
        numbers=numbers,
    )


FAMILY = Family(name="weights", report=report)
