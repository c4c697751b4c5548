"""The second series of experiments as it was run (30 epochs unless stated, learning rate 0.1), and its queue.

python jobs2.py screen > queue.json
"""

import json
import sys

WIDE = {"widths": [32, 64, 128], "hidden": [8, 8, 16], "head_norm": True}
POINT = {"kernel2": 1, "head_norm": True}  # W_2 is 1x1
RESNET = {"kind": "resnet"}

SCREEN = {  # seed 0; name: (network, train)
    "pnnh1004": ({"blocks": 167, "head_norm": True, "scale": 0.1}, {"epochs": 18, "warmup": 2.0}),
    "wide_1x1": ({**WIDE, **POINT, "hidden": [16, 24, 24]}, {}),
    "wide_tied": ({**WIDE, "tied": True, "hidden": [16, 16, 32]}, {}),
    "wide_identity": ({**WIDE, "path": "identity"}, {}),
    "residual_half": ({"path": "identity", "head_norm": True}, {}),
    "wide_4x": ({**WIDE, "widths": [64, 128, 256], "hidden": [4, 4, 8]}, {}),
    "wide_early": ({**WIDE, "hidden": [16, 16, 10]}, {}),
    "resnet110_thin": ({**RESNET, "widths": [12, 24, 48]}, {}),
    "wide_4x_1x1": ({**WIDE, **POINT, "widths": [64, 128, 192], "hidden": [8, 12, 16]}, {}),
    "wide_decay_5e-4": (WIDE, {"weight_decay": 5e-4}),
    "resnet110_decay_5e-4": (RESNET, {"weight_decay": 5e-4}),
}
CENTRED = {**WIDE, "path": "half", "centred": True, "hidden": [8, 16, 31]}
HE = {"head_norm": True}
SECOND = {
    **{f"centred_s{seed}": (CENTRED, {"seed": seed}) for seed in range(3)},
    "resnet110_decay_5e-4": (RESNET, {"weight_decay": 5e-4}),
    "centred_decay_5e-4": (CENTRED, {"weight_decay": 5e-4}),
    "wide_half": ({**WIDE, "path": "half"}, {}),
    "wide_4x_s1": ({**WIDE, "widths": [64, 128, 256], "hidden": [4, 4, 8]}, {"seed": 1}),
    **{
        f"he{6 * blocks + 2}_s{seed}": ({**HE, "blocks": blocks}, {"seed": seed})
        for seed in (0, 1)
        for blocks in (18, 9, 7, 5, 3)
        if (blocks, seed) != (18, 0)  # done in the first series
    },
}
SETS = {"screen": SCREEN, "second": SECOND}


def main() -> None:
    group = sys.argv[1]
    jobs = [
        {"name": f"{group}2_{name}", "network": network, "train": {"epochs": 30, **train}}
        for name, (network, train) in SETS[group].items()
    ]
    print(json.dumps(jobs, indent=1))


if __name__ == "__main__":
    main()
