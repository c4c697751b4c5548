"""Input dissipation: how much of an input a layer still tells apart.

Zhang et al. 2024, arXiv:2402.08645, section 3.1, Figure 1.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from unskip.measures.probe import Family, Layer, Probe
from unskip.measures.series import About, Findings

NAN = float("nan")
NOISE = 0.01  # deviation of the noise, as a share of the input's
SKETCH = 512  # numbers kept of one sample at one layer
MOST = 256  # samples that distances and regressions are taken over
FEW = 16  # samples below which recovery is not attempted
BANDWIDTHS = (1.0, 4.0)  # of the kernel, in median distances; the wide one is close to a linear regression
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # in units of the kernel's diagonal


KNOWN = About(
    name="noise_to_signal",
    title="Is the input still known?",
    label="distance to a noisy copy over distance to another input",
    log=True,
    healthy="Well below 0.3 to the last layer. At 1, a trifle of noise counts as much as another input: it is lost.",
    source="Zhang et al. 2024, section 3.1 (weight-free form of Figure 1)",
)
RECOVERED = About(
    name="recovery",
    title="How much of the input can be read off a layer",
    label="R² of the coarse input, predicted from the layer",
    healthy="A slow fall from the level of the input itself. Near 0 the layer has lost what tells inputs apart.",
    source="Zhang et al. 2024, section 3.1 (weight-free form of Figure 1)",
)
ALIKE = About(
    name="cosine_similarity",
    title="How alike all inputs look",
    label="mean cosine between two inputs",
    healthy="Well below 1. At 1 the layer gives the same for every input.",
    source="Oyedotun et al. 2020, section V.B",
)


def noise_to_signal(clean: Tensor, noisy: Tensor) -> float:
    """Distance between an image and its noisy copy over the distance between two different images, at one layer::

        noise_to_signal = median_i |f(x_i) - f(x_i + n_i)| / median_{i<j} |f(x_i) - f(x_j)|

    Near 0 the layer knows its input. At 1 a trifle of noise moves an image as far as another image would be, or all
    images are the same: the input is lost. Medians, because in deep plain networks with BatchNorm a few images lie far
    from all others.

    Args:
        clean: f(x), (B, ...), at least two images.
        noisy: f(x + n), (B, ...), the same images in the same order.
    """
    if clean.shape != noisy.shape or clean.shape[0] < 2:
        raise ValueError(
            f"noise_to_signal: clean and noisy need the same shape and at least two images, not "
            f"{tuple(clean.shape)} and {tuple(noisy.shape)}."
        )
    clean, noisy = clean.flatten(1).double(), noisy.flatten(1).double()
    near = (clean - noisy).norm(dim=1).median()
    far = torch.pdist(clean).median()
    return (near / far).item() if far > 0 else 1.0


def cosine_similarity(features: Tensor) -> float:
    """How alike the samples look at a layer, the mean cosine between two different ones::

        cosine_similarity = mean_{i<j} <f(x_i), f(x_j)> / |f(x_i)| |f(x_j)|

    At 1 the layer gives the same for all, up to scale.
    """
    if not torch.any(features):
        return 1.0  # a layer of zeros
    rows = F.normalize(features.flatten(1).double(), dim=1, eps=1e-300)
    count = len(rows)
    return ((rows.sum(0).square().sum() - rows.square().sum()) / (count * (count - 1))).item()


def recovery(features: Tensor, inputs: Tensor) -> float:
    """How much of the inputs can be read off a layer: R² of a kernel ridge regression, each sample left out in turn.

    With K the kernel exp(-d²/2h²) of distances d between the samples' features, G = (K + λI)⁻¹ and α = G y, the
    prediction of sample i from all others is y_i - α_i / G_ii, in closed form. R² = 1 - sum of its squared errors over
    those of the mean of the other samples, over all entries of y; bandwidth h and ridge λ are those that serve best.
    It is at most 1, and 0 or less where the layer tells nothing. With few samples it is an underestimate: compare with
    the R² that the inputs themselves reach.

    Args:
        features: (B, ...), what the layer puts out.
        inputs: (B, ...), what is to be recovered.
    """
    x, y = features.flatten(1).double(), inputs.flatten(1).double()
    count = len(x)
    if count < 3 or len(y) != count:
        raise ValueError(f"recovery: needs features and inputs of at least three samples, not {count} and {len(y)}.")
    if not bool(x.isfinite().all()):
        return NAN
    baseline = ((y - y.mean(0)) * count / (count - 1)).square().sum()
    distances = torch.cdist(x, x)
    typical = torch.pdist(x).median()
    if not typical > 0 or not baseline > 0:
        return 0.0
    y = y - y.mean(0)
    best = 0.0
    for bandwidth in BANDWIDTHS:
        kernel = torch.exp(-0.5 * (distances / (bandwidth * typical)).square())
        values, vectors = torch.linalg.eigh(kernel)
        along = vectors.T @ y
        for ridge in RIDGES:
            inverse = 1 / (values.clamp_min(0) + ridge)
            alpha = vectors @ (inverse[:, None] * along)
            diagonal = vectors.square() @ inverse
            error = (alpha / diagonal[:, None]).square().sum()
            best = max(best, (1 - error / baseline).item())
    return best


def downscaled(x: Tensor, most: int = 64) -> Tensor:
    """Inputs as a few numbers each: images averaged to 4 x 4 pixels, anything else to at most `most` entries."""
    x = x.detach().float()
    if x.ndim == 4:
        return F.adaptive_avg_pool2d(x, (min(4, x.shape[2]), min(4, x.shape[3]))).flatten(1)
    flat = x.flatten(1)
    return flat if flat.shape[1] <= most else F.adaptive_avg_pool1d(flat[:, None], most)[:, 0]


def sketch(x: Tensor, seed: int, size: int = SKETCH) -> Tensor:
    """(B, D) as (B, at most `size`) with the same inner products in expectation (random signs, summed into buckets).

    The relative deviation of a squared distance is about sqrt(2 / size).
    """
    samples, entries = x.shape
    if entries <= size:
        return x.detach().float().clone()
    signs = torch.randint(0, 2, (entries,), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    signed = x * (signs * 2 - 1).to(x)
    padded = F.pad(signed, (0, -entries % size))
    return padded.view(samples, -1, size).sum(1).float()


def reduced(layer: Layer, y: Tensor) -> Tensor | None:
    flat = layer.by_sample(y)
    return None if flat is None or layer.samples < 2 else sketch(flat[:MOST], seed=0)


def forward(layer: Layer, x: Tensor | None, y: Tensor) -> Tensor | None:
    return reduced(layer, y)


def noisy_pass(probe: Probe) -> tuple[dict[str, Tensor | None], tuple[str, ...]]:
    """What the layers put out when a little noise is added to the input (to the first layer's output, for tokens)."""
    kept: dict[str, Tensor | None] = {}
    generator = torch.Generator().manual_seed(probe.seed + 1)

    def perturbed(x: Tensor) -> Tensor:
        scale = NOISE * x.detach().float().std()
        return x + (scale * torch.randn(x.shape, generator=generator).to(x.device)).to(x.dtype)

    def on_layer(layer: Layer, x: Tensor | None, y: Tensor) -> Tensor | None:
        changed = perturbed(y) if probe.input is None and layer is probe.layers[0] else None
        kept[layer.name] = reduced(layer, y if changed is None else changed) if layer.trunk else None
        return changed

    with torch.no_grad():
        probe.again(on_layer, None if probe.input is None else probe.with_input(perturbed(probe.input)))
    notes = (
        () if probe.input is not None else ("The input is not floating-point: noise is added behind the first layer.",)
    )
    return kept, notes


def report(probe: Probe) -> Findings:
    trunk = [layer for layer in probe.layers if layer.trunk]
    clean: dict[str, Tensor | None] = {layer.name: layer.kept["dissipation"] for layer in trunk}
    names = tuple(clean)
    notes: list[str] = []
    ratio, alike, recovered = [], [], []
    if probe.samples < 2:
        notes.append("The batch has one sample: how well inputs are told apart needs at least two.")
        noisy: dict[str, Tensor | None] = {}
    else:
        noisy, more = noisy_pass(probe)
        notes += more
    target = None
    possible = NAN
    if probe.input is None or probe.samples < FEW or probe.input.shape[0] != probe.samples:
        notes.append(
            f"Recovery of the input is not measured: it needs floating-point inputs and at least {FEW} samples, and "
            f"here are {probe.samples}."
        )
    else:
        target = downscaled(probe.input[:MOST])
        possible = recovery(sketch(probe.input[:MOST].detach().flatten(1), seed=0), target)
        if possible < 0.3:
            notes.append(
                f"From the inputs themselves only R² = {possible:.2f} of their coarse content can be recovered with "
                f"{len(target)} samples: too few, or too much like noise, for recovery to say much about the layers."
            )
    for name in names:
        before, after = clean[name], noisy.get(name)
        ratio.append(NAN if before is None or after is None else noise_to_signal(before, after))
        alike.append(NAN if before is None else cosine_similarity(before))
        recovered.append(NAN if before is None or target is None else recovery(before, target))
    found = (KNOWN.series(names, ratio), RECOVERED.series(names, recovered), ALIKE.series(names, alike))
    # The last layer is the classifier, which may forget: what it reads is what counts.
    hidden = list(range(len(trunk)))[:-1] or list(range(len(trunk)))
    last = hidden[-1] if hidden else None
    numbers = {
        "input_dissipation": NAN if last is None else ratio[last],
        "cosine_similarity": NAN if last is None else alike[last],
        "recovery": NAN if last is None else recovered[last],
        "recovery_possible": possible,
    }
    return Findings(series=found, numbers=numbers, notes=tuple(notes))


FAMILY = Family(name="dissipation", report=report, forward=forward)
