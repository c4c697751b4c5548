"""Input dissipation: how much of an input a layer still tells apart (papers/pnnh.md, section 3.1)."""

import torch
from torch import Tensor


def near_far(clean: Tensor, noisy: Tensor) -> float:
    """Distance between an image and its noisy copy over the distance between two different images, at one layer::

        near_far = median_i |f(x_i) - f(x_i + n_i)| / median_{i<j} |f(x_i) - f(x_j)|

    Near 0 the layer knows its input. At 1 a trifle of noise moves an image as far as another image would be, or all
    images are the same: the input is lost. Medians, because in deep plain networks with BatchNorm a few images lie far
    from all others.

    Args:
        clean: f(x), (B, ...), at least two images.
        noisy: f(x + n), (B, ...), the same images in the same order.
    """
    if clean.shape != noisy.shape or clean.shape[0] < 2:
        raise ValueError(
            f"near_far: clean and noisy need the same shape and at least two images, not {tuple(clean.shape)} and "
            f"{tuple(noisy.shape)}."
        )
    clean, noisy = clean.flatten(1).double(), noisy.flatten(1).double()
    near = (clean - noisy).norm(dim=1).median()
    far = torch.pdist(clean).median()
    return (near / far).item() if far > 0 else 1.0
