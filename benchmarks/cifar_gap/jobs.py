"""The experiments, one entry each, and the queue for the engine.

python jobs.py screen --epochs 16 > queue.json
"""

import argparse
import json

WIDE = {"widths": [32, 64, 128], "hidden": [8, 8, 16]}
SCREEN = {  # name: (network, train)
    "resnet110": ({"kind": "resnet"}, {}),
    "base": ({}, {}),
    "residual_half": ({"path": "identity"}, {}),
    "wide_2x": (WIDE, {}),
    "resnet110_zero": ({"kind": "resnet", "zero_last": True}, {}),
    "hidden_early": ({"hidden": [16, 32, 24]}, {}),
    "wide_early": ({"widths": [32, 48, 64], "hidden": [16, 16, 24]}, {}),
    "reads_code": ({"reads": "code"}, {}),
    "misaligned": ({"transition": "misaligned"}, {}),
    "whole": ({"transition": "whole"}, {}),
    "half": ({"path": "half"}, {}),
    "half_carry": ({"path": "half", "carry": True}, {}),
    "dense": ({"path": "dense"}, {}),
    "norm2": ({"norm2": 0.3}, {}),
    "head_norm": ({"head_norm": True}, {}),
    "lr_0.05": ({}, {"lr": 0.05}),
    "lr_0.2": ({}, {"lr": 0.2}),
    "scale_0": ({"scale": 0.0}, {}),
    "scale_1": ({"scale": 1.0}, {}),
    "wide_2x_1x1": ({"widths": [32, 64, 128], "hidden": [16, 24, 24], "kernel2": 1}, {}),
    "wide_mid": ({"widths": [32, 64, 96], "hidden": [8, 16, 16]}, {}),
    "wide_flat": ({"widths": [48, 64, 64], "hidden": [16, 16, 16]}, {}),
    "decay_last_0": ({}, {"decay_last": 0.0}),
    "clip_1": ({}, {"clip": 1.0}),
    "bias2": ({"bias2": True}, {}),
    "turns": ({"path": "turns"}, {}),
    "quarter": ({"path": "quarter"}, {}),
    "base_s1": ({}, {"seed": 1}),
    "resnet110_s1": ({"kind": "resnet"}, {"seed": 1}),
    "gain": ({"gain": True}, {}),
    "plain": ({"path": "none", "hidden": [16, 32, 64], "scale": 1.0, "norm2": 1.0}, {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=["screen"])
    parser.add_argument("--epochs", type=int, default=16)
    args = parser.parse_args()
    jobs = [
        {"name": f"screen_{n}", "network": net, "train": {"epochs": args.epochs, **train}}
        for n, (net, train) in SCREEN.items()
    ]
    print(json.dumps(jobs, indent=1))


if __name__ == "__main__":
    main()
