"""Trained weights that come with the package: unskip/weights/NAME.safetensors, each with its measured error.

A file holds a network's `state_dict`, convolutions and classifier in float16 so that the package stays small, and, as
metadata, what it was trained and tested on. `create_model(NAME, pretrained=True)` loads it by timm's conventions:
another number of classes gets a fresh classifier, another number of input channels an adapted first convolution, and
`model.pretrained_cfg` says how to normalise images.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

FOLDER = Path(__file__).parents[1] / "weights"
MAX_BYTES = 8 * 2**20  # bytes of one file; the package is to stay small


@dataclass(frozen=True, kw_only=True)
class WeightsInfo:
    """What is known about a file of weights."""

    network: str  # the name that builds it
    dataset: str
    test_error: float  # percent, measured with these weights
    test_images: int
    epochs: int
    seed: int
    mean: tuple[float, ...]  # of the images' channels, for normalising
    std: tuple[float, ...]
    record: str  # the folder of benchmarks/records that says how they came about

    def __str__(self) -> str:
        return (
            f"{self.test_error:.2f} % test error on {self.dataset} ({self.test_images:,} images), "
            f"{self.epochs} epochs, seed {self.seed}, {self.record}"
        )


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.safetensors"


def names_with_weights() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def weights_of(name: str) -> WeightsInfo | None:
    """What is known about the weights of a name, None where it has none."""
    path = path_of(name)
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["unskip"])
            return WeightsInfo(**{**about, "mean": tuple(about["mean"]), "std": tuple(about["std"])})
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"create_model: the weights {path} can't be read ({error}); install the package again."
        ) from error


def pretrained_cfg(name: str) -> dict[str, Any]:
    """timm's configuration entries for the weights of a name; empty where it has none."""
    weights = weights_of(name)
    if weights is None:
        return {}
    return {"file": str(path_of(name)), "mean": weights.mean, "std": weights.std, "description": str(weights)}


def as_stored(model: nn.Module) -> dict[str, Tensor]:
    """A network's state as a file holds it: norms and coders as they are, and all other weights rounded."""
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    rounded = {key for key, parameter in model.named_parameters() if parameter.ndim > 1}
    return {key: value.half() if key in rounded else value for key, value in state.items()}


def store_weights(model: nn.Module, about: WeightsInfo) -> Path:
    """Writes a network's weights where `create_model(about.network, pretrained=True)` finds them."""
    state = as_stored(model)
    lost = [key for key, value in state.items() if not torch.isfinite(value).all()]
    if lost:
        raise ValueError(f"store_weights: {about.network!r} has values that are no numbers in float16: {lost[0]}.")
    size = sum(value.numel() * value.element_size() for value in state.values())
    if size > MAX_BYTES:
        raise ValueError(
            f"store_weights: {about.network!r} has {size / 2**20:.1f} MiB of weights, and the package ships at most "
            f"{MAX_BYTES / 2**20:.0f} MiB a network."
        )
    FOLDER.mkdir(exist_ok=True)
    path = path_of(about.network)
    path.write_bytes(save(state, metadata={"format": "pt", "unskip": json.dumps(asdict(about))}))
    return path
