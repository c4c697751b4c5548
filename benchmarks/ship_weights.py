"""Puts trained weights into the package, with the test error that is measured here, for `pretrained=True`.

    PYTHONPATH=src python benchmarks/ship_weights.py NAME WEIGHTS --data DIR --epochs 300 --seed 0 --record FOLDER

WEIGHTS is the weights.safetensors of a run of `unskip train` or `unskip reproduce`, or the .pt of a run of
benchmarks/cifar_gap. DIR holds cifar-10-batches-py. The error is that of the weights as they are stored, in the
library's network and in float32.
"""

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import unskip
from unskip.data.sets import DataSet, load
from unskip.models.weights import Weights, as_stored, store_weights
from unskip.train import Recipe

sys.path.insert(0, str(Path(__file__).parent / "cifar_gap"))
import to_library


@torch.no_grad()
def test_error(network: nn.Module, data: DataSet, device: str) -> float:
    """Percent of the test images."""
    mean, std = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (data.mean, data.std))
    assert isinstance(data.test.images, Tensor)
    wrong = 0
    for x, y in zip(data.test.images.split(500), data.test.labels.split(500), strict=True):
        x = (x.to(device).permute(0, 3, 1, 2).float() / 255 - mean) / std
        wrong += int((network(x).argmax(1).cpu() != y).sum())
    return 100 * wrong / len(data.test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("weights", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--record", required=True, help="the folder in benchmarks/records")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    network = unskip.create_model(args.name)
    if args.weights.suffix == ".pt":
        to_library.load(network, torch.load(args.weights, map_location="cpu", weights_only=True))
    else:
        network.load_state_dict(load_file(args.weights))
    network.load_state_dict(as_stored(network))  # what is rounded is what is tested
    data = load(Recipe(dataset="cifar10", val_fraction=0.0), args.data)
    for note in data.notes:
        print(f"Note: {note}.")
    network = network.to(args.device, memory_format=torch.channels_last).eval()
    error = test_error(network, data, args.device)
    about = Weights(
        network=args.name, dataset="CIFAR-10", test_error=error, test_images=len(data.test), epochs=args.epochs,
        seed=args.seed, mean=data.mean, std=data.std, record=args.record,
    )  # fmt: skip
    print(f"{store_weights(network, about)}: {about}")


if __name__ == "__main__":
    main()
