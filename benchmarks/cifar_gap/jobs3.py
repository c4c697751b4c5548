"""The fourth series as it was run (30 epochs, weight decay 5e-4, learning rate 0.1), and its queue.

python jobs3.py screen > queue.json
"""

import json
import sys

RESNET = {"kind": "resnet"}
CENTRED = {"widths": [32, 64, 128], "hidden": [8, 16, 31], "path": "half", "centred": True, "head_norm": True}
CENTRED_3X = {**CENTRED, "widths": [48, 96, 192], "hidden": [8, 12, 19]}
CENTRED_4X = {**CENTRED, "widths": [64, 128, 256], "hidden": [8, 8, 14]}
HALF = {"path": "identity", "head_norm": True}  # residual_half: C_B = C

SCREEN = {  # 30 epochs; name: (network, train)
    "centred_4x_s0": (CENTRED_4X, {}),
    "centred_4x_s1": (CENTRED_4X, {"seed": 1}),
    "resnet110_s1": (RESNET, {"seed": 1}),
    "resnet110_s2": (RESNET, {"seed": 2}),
    "residual_half_s0": (HALF, {}),
    "centred_3x_s0": (CENTRED_3X, {}),
    "centred_s1": (CENTRED, {"seed": 1}),
}
SECOND = {
    **{f"centred_4x_s{seed}": (CENTRED_4X, {"seed": seed}) for seed in range(3)},
    **{f"centred_3x_s{seed}": (CENTRED_3X, {"seed": seed}) for seed in (1, 2)},
}
SETS = {"screen": SCREEN, "second": SECOND}


def main() -> None:
    group = sys.argv[1]
    jobs = [
        {"name": f"{group}3_{name}", "network": network, "train": {"epochs": 30, "weight_decay": 5e-4, **train}}
        for name, (network, train) in SETS[group].items()
    ]
    print(json.dumps(jobs, indent=1))


if __name__ == "__main__":
    main()
