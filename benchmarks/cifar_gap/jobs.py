"""The experiments as they were run, and the queue for the engine.

python jobs.py > queue.json
"""

import json

WIDE = {"widths": [32, 64, 128], "hidden": [8, 8, 16]}
MID = {"widths": [32, 64, 96], "hidden": [8, 16, 16]}
RESNET = {"kind": "resnet"}

SCREEN = {  # 12 epochs, seed 0; name: (network, train)
    "resnet110": (RESNET, {}),
    "base": ({}, {}),
    "residual_half": ({"path": "identity"}, {}),
    "wide_2x": (WIDE, {}),
    "wide_early": ({"widths": [32, 48, 64], "hidden": [16, 16, 24]}, {}),
    "hidden_early": ({"hidden": [16, 32, 24]}, {}),
    "wide_mid": (MID, {}),
    "wide_flat": ({"widths": [48, 64, 64], "hidden": [16, 16, 16]}, {}),
    "half": ({"path": "half"}, {}),
    "half_carry": ({"path": "half", "carry": True}, {}),
    "norm2": ({"norm2": 0.3}, {}),
    "head_norm": ({"head_norm": True}, {}),
    "lr_0.05": ({}, {"lr": 0.05}),
    "lr_0.2": ({}, {"lr": 0.2}),
    "misaligned": ({"transition": "misaligned"}, {}),
    "whole": ({"transition": "whole"}, {}),
    "scale_0": ({"scale": 0.0}, {}),
    "decay_last_0": ({}, {"decay_last": 0.0}),
    "resnet110_zero": ({**RESNET, "zero_last": True}, {}),
    "turns": ({"path": "turns"}, {}),
    "quarter": ({"path": "quarter"}, {}),
    # second round, chosen after the first
    "wide_2x_norm2": ({**WIDE, "norm2": 0.3}, {}),
    "wide_2x_half": ({**WIDE, "path": "half"}, {}),
    "wide_2x_head_norm": ({**WIDE, "head_norm": True}, {}),
    "wide_2x_both": ({**WIDE, "norm2": 0.3, "head_norm": True}, {}),
    "wide_2x_head_norm_lr_0.2": ({**WIDE, "head_norm": True}, {"lr": 0.2}),
    "wide_mid_head_norm": ({**MID, "head_norm": True}, {}),
    "resnet110_lr_0.2": (RESNET, {"lr": 0.2}),
    "resnet110_head_norm": ({**RESNET, "head_norm": True}, {}),
}
FINAL = {  # 30 epochs
    **{f"resnet110_s{seed}": (RESNET, {"seed": seed}) for seed in range(3)},
    **{f"pnnh_wide_s{seed}": ({**WIDE, "head_norm": True}, {"seed": seed}) for seed in range(3)},
    "base_head_norm_s0": ({"head_norm": True}, {}),
    "resnet110_head_norm_s0": ({**RESNET, "head_norm": True}, {}),
    "resnet110_lr_0.2_s0": (RESNET, {"lr": 0.2}),
    "pnnh_wide_lr_0.2_s0": ({**WIDE, "head_norm": True}, {"lr": 0.2}),
    "base_s0": ({}, {}),
}


def main() -> None:
    groups = (("screen", 12, SCREEN), ("final", 30, FINAL))
    jobs = [
        {"name": f"{group}_{name}", "network": network, "train": {"epochs": epochs, **train}}
        for group, epochs, runs in groups
        for name, (network, train) in runs.items()
    ]
    print(json.dumps(jobs, indent=1))


if __name__ == "__main__":
    main()
