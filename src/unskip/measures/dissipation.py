"""Input dissipation: how well a layer still tells inputs apart.

Zhang et al. 2024, arXiv:2402.08645, section 3.1, Figure 1.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from unskip.measures.probe import Family, Layer, Probe
from unskip.measures.series import Findings, measures_of

NOISE = 0.01  # standard deviation of the noise, as a fraction of the inputs'
SKETCH = 512  # numbers kept per sample and layer
MAX_SAMPLES = 256  # for distances and regressions
MIN_SAMPLES = 16  # for recovery
MIN_RECOVERY = 0.1  # with a batch of 64, a recovery (R²) below this is within the noise
BANDWIDTHS = (1.0, 4.0)  # of the kernel, in median distances; the wide one is close to a linear regression
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # in units of the kernel's diagonal


def noise_to_signal(clean: Tensor, noisy: Tensor) -> float:
    """The distance of an input to its noisy copy over the distance of two different inputs, at one layer::

        noise_to_signal = median_i |f(x_i) - f(x_i + n_i)| / median_{i<j} |f(x_i) - f(x_j)|

    `n_i` is `noise_like` the inputs, so the ratio starts near 0.01 whatever the data. Near 0, the layer preserves its
    input. At 1, noise moves an input as far as the distance to another input, or all inputs are the same: the input is
    lost. Medians are used because in deep plain networks with BatchNorm a few inputs
    lie far from all others.

    Args:
        clean: f(x), (B, ...), at least two samples.
        noisy: f(x + n), (B, ...), the same samples in the same order.
    """
    if clean.shape != noisy.shape or clean.shape[0] < 2:
        raise ValueError(
            f"noise_to_signal: clean and noisy need the same shape and at least two samples, not "
            f"{tuple(clean.shape)} and {tuple(noisy.shape)}."
        )
    clean, noisy = clean.flatten(1).double(), noisy.flatten(1).double()
    near = (clean - noisy).norm(dim=1).median()
    far = torch.pdist(clean).median()
    return (near / far).item() if far > 0 else 1.0


def noise_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Normal noise with the covariance of the samples x (B, ...), and `NOISE` times their standard deviation::

        n_i = NOISE sum_j g_ij (x_j - mean(x)) / sqrt(B - 1),   g_ij ~ N(0, 1)

    White noise has power at frequencies that smooth images lack. Networks with many depthwise convolutions and norms
    amplify these, so white noise says more about the resolution of the images than about the network.
    """
    centred = (x - x.mean(0)).flatten(1).float()
    g = torch.randn(len(x), len(x), generator=generator).to(centred)
    return (NOISE / math.sqrt(len(x) - 1) * (g @ centred)).view(x.shape).to(x.dtype)


def difference(similarity: float, recovery: float) -> float:
    """(1 - cosine_similarity) sqrt(recovery): the part of a layer's output that depends on the input.

    A recovery below `MIN_RECOVERY` is within the noise of a small batch, and one that was not measured counts as 1.
    """
    return max(0.0, 1 - similarity) * math.sqrt(1.0 if math.isnan(recovery) else max(recovery, MIN_RECOVERY))


def cosine_similarity(features: Tensor) -> float:
    """The mean cosine similarity of two different samples at a layer::

        cosine_similarity = mean_{i<j} <f(x_i), f(x_j)> / |f(x_i)| |f(x_j)|

    At 1, the layer returns the same for all samples, up to scale.
    """
    if not torch.any(features):
        return 1.0
    rows = F.normalize(features.flatten(1).double(), dim=1, eps=1e-300)
    count = len(rows)
    return ((rows.sum(0).square().sum() - rows.square().sum()) / (count * (count - 1))).item()


def recovery(features: Tensor, inputs: Tensor) -> float:
    """The leave-one-out R² of a kernel ridge regression from a layer's features to the inputs.

    With K the kernel exp(-d²/2h²) of distances d between the samples' features, G = (K + λI)⁻¹ and α = G y, the
    prediction of sample i from all others is y_i - α_i / G_ii, in closed form. R² = 1 - the sum of squared errors over
    that of predicting the mean of the other samples, over all entries of y, for the best bandwidth h and ridge λ.
    It is at most 1, and 0 if the layer carries no information. With few samples it is an underestimate: compare it
    with the R² of the inputs themselves.

    Args:
        features: (B, ...), the output of the layer.
        inputs: (B, ...), what is predicted.
    """
    x, y = features.flatten(1).double(), inputs.flatten(1).double()
    count = len(x)
    if count < 3 or len(y) != count:
        raise ValueError(f"recovery: needs features and inputs of at least three samples, not {count} and {len(y)}.")
    if not bool(x.isfinite().all()):
        return math.nan
    y = y - y.mean(0)
    baseline = (y * count / (count - 1)).square().sum()
    typical = torch.pdist(x).median()
    if not typical > 0 or not baseline > 0:
        return 0.0
    distances = torch.cdist(x, x)
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


def downscaled(x: Tensor, max_entries: int = 64) -> Tensor:
    """Inputs as a few numbers each: images averaged to 4 x 4 pixels, others to at most `max_entries` entries."""
    x = x.detach().float()
    if x.ndim == 4:
        return F.adaptive_avg_pool2d(x, (min(4, x.shape[2]), min(4, x.shape[3]))).flatten(1)
    flat = x.flatten(1)
    return flat if flat.shape[1] <= max_entries else F.adaptive_avg_pool1d(flat[:, None], max_entries)[:, 0]


def sketch(x: Tensor, seed: int, size: int = SKETCH) -> Tensor:
    """(B, D) as (B, at most `size`) with the same inner products in expectation (random signs, summed into buckets).

    The relative standard deviation of a squared distance is about sqrt(2 / size).
    """
    samples, entries = x.shape
    if entries <= size:
        return x.detach().float().clone()
    signs = torch.randint(0, 2, (entries,), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    signed = x * (signs * 2 - 1).to(x)
    padded = F.pad(signed, (0, -entries % size))
    return padded.view(samples, -1, size).sum(1).float()


def forward(layer: Layer, x: Tensor | None, y: Tensor) -> dict[str, Tensor | None]:
    flat = layer.by_sample(y)
    return {"sketch": None if flat is None or layer.samples < 2 else sketch(flat[:MAX_SAMPLES], seed=0)}


def noisy_outputs(probe: Probe) -> dict[Layer, Tensor | None]:
    """Sketches of the trunk's outputs with noise added to the input, or to the first layer's output for tokens."""
    found: dict[Layer, Tensor | None] = {}
    generator = torch.Generator().manual_seed(probe.seed + 1)

    def perturbed(x: Tensor) -> Tensor:
        return x + noise_like(x.detach(), generator)

    def on_layer(layer: Layer, x: Tensor | None, y: Tensor) -> Tensor | None:
        changed = perturbed(y) if probe.input is None and layer is probe.layers[0] else None
        found[layer] = forward(layer, x, y if changed is None else changed)["sketch"] if layer.trunk else None
        return changed

    with torch.no_grad():
        probe.rerun(on_layer, None if probe.input is None else probe.with_input(perturbed(probe.input)))
    return found


def report(probe: Probe) -> Findings:
    notes = []
    noisy: dict[Layer, Tensor | None] = {}
    if probe.samples < 2:
        notes.append("The batch has one sample. Comparing inputs needs at least two.")
    else:
        noisy = noisy_outputs(probe)
        if probe.input is None:
            notes.append("The input is not floating-point, so noise is added to the output of the first layer.")
    targets, possible = None, math.nan
    if probe.input is None or probe.samples < MIN_SAMPLES or probe.input.shape[0] != probe.samples:
        notes.append(
            f"Recovery of the input is not measured: it needs floating-point inputs and at least {MIN_SAMPLES} samples."
        )
    else:
        targets = downscaled(probe.input[:MAX_SAMPLES])
        possible = recovery(sketch(probe.input[:MAX_SAMPLES].detach().flatten(1), seed=0), targets)
        if possible < 0.3:
            notes.append(
                f"Even from the inputs themselves, only R² = {possible:.2f} can be recovered with {len(targets)} "
                "samples. Recovery says little here: there are too few samples, or they are too close to noise."
            )
    trunk = [layer for layer in probe.layers if layer.trunk]
    for layer in trunk:
        before, after = layer.values.get("sketch"), noisy.get(layer)
        recovered = math.nan if before is None or targets is None else recovery(before, targets)
        similarity = math.nan if before is None else cosine_similarity(before)
        layer.values |= {
            "noise_to_signal": math.nan if before is None or after is None else noise_to_signal(before, after),
            "recovery": recovered,
            "cosine_similarity": similarity,
            "difference": math.nan if math.isnan(similarity) else difference(similarity, recovered),
        }
    # The last layer is the classifier, which may discard information, so the layer before it counts.
    last_hidden = trunk[-2:][0].values if trunk else {}
    numbers = {
        "input_dissipation": last_hidden.get("noise_to_signal", math.nan),
        "recovery": last_hidden.get("recovery", math.nan),
        "cosine_similarity": last_hidden.get("cosine_similarity", math.nan),
        "recovery_possible": possible,
    }
    return Findings(numbers=numbers, notes=tuple(notes))


FAMILY = Family(name="dissipation", measures=measures_of("dissipation"), forward=forward, report=report)
