"""Writes the package's weight files (`pretrained=True`) from a trained run, with the test error that is measured here.

    python benchmarks/ship_weights.py NAME WEIGHTS --data DIR --epochs 200 --seed 0 --record FOLDER

WEIGHTS is the weights.safetensors of a run of `unskip train` or `unskip reproduce`; DIR holds cifar-10-batches-py. The
test error is that of the weights as they are stored, in float32.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import unskip
from unskip.data.config import DataConfig
from unskip.data.sets import DataSet, load
from unskip.models.weights import WeightsInfo, as_stored, store_weights

RECORDS = Path(__file__).parent / "records"


@torch.no_grad()
def find_test_error(model: nn.Module, data: DataSet, device: str) -> float:
    """The percentage of test images that the model gets wrong."""
    mean, std = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (data.mean, data.std))
    assert isinstance(data.test.images, Tensor)
    wrong = 0
    for x, y in zip(data.test.images.split(500), data.test.labels.split(500), strict=True):
        x = (x.to(device).permute(0, 3, 1, 2).float() / 255 - mean) / std  # (B, 3, 32, 32)
        wrong += int((model(x).argmax(1).cpu() != y).sum())
    return 100 * wrong / len(data.test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="a name of `unskip models`")
    parser.add_argument("weights", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--record", required=True, help="folder in benchmarks/records that says how they were trained")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if not (RECORDS / args.record).is_dir():
        parser.error(f"--record {args.record}: there is no such folder in benchmarks/records")
    model = unskip.create_model(args.name)
    model.load_state_dict(load_file(args.weights))
    model.load_state_dict(as_stored(model))  # test the rounded weights
    data = load(DataConfig(dataset="cifar10", val_fraction=0.0), args.data)
    for note in data.notes:
        print(f"Note: {note}.")
    model = model.to(args.device, memory_format=torch.channels_last).eval()
    about = WeightsInfo(
        network=args.name, dataset="CIFAR-10", test_error=find_test_error(model, data, args.device),
        test_images=len(data.test), epochs=args.epochs, seed=args.seed, mean=data.mean, std=data.std,
        record=args.record,
    )  # fmt: skip
    print(f"{store_weights(model, about)}: {about}")


if __name__ == "__main__":
    main()
