"""What the doctor says about well-known networks that train on ImageNet, by the measures that the verdict reads.

    python benchmarks/verdict/known.py OUT.json

16 digits at 224 px, untrained weights of seed 0. The limits were not set on these networks.
"""

import json
import sys
from pathlib import Path

import torch

from unskip.doctor.batches import load_batch
from unskip.doctor.verdict import judge
from unskip.io.load import load_network
from unskip.measures import measure

FAMILIES = ("activation", "gradient", "dissipation")

NAMES = (
    "torchvision:resnet18", "resnet50", "torchvision:vgg11_bn", "densenet121", "convnext_atto",
    "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224", "mobilenetv2_100", "efficientnet_b0",
)  # fmt: skip


def main() -> None:
    rows = {"torch": torch.__version__}
    for name in NAMES:
        subject = load_network(name)
        batch = load_batch(subject, None, size=None, seed=0)
        verdict = judge(measure(subject.network, batch.images, batch.targets, families=FAMILIES))
        rows[name] = {
            "fate": verdict.fate,
            "mechanism": verdict.mechanism,
            "confidence": round(verdict.confidence, 2),
            "batch": list(batch.images.shape),
        }
        print(f"{name:32}{verdict.fate:10}{verdict.mechanism or '':22}{verdict.confidence:.2f}", flush=True)
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
