"""Writes coders.safetensors: the coders of papers/pnnh.md, Table 4 (Appendix C) that are not closed forms.

    PYTHONPATH=../../src python coders.py            # half a minute for each of the last three on one core

C = 16, 32, 64, C_B = C/2, 3x3 kernels, ReLU between; bfloat16, which is what networks compute with.

rectified_normal, normal, uniform           fitted as the library fits (`unskip.coders.fit`)
rectified_normal_start, normal_start,       the same rounds of Adam, from Algorithm 1's own start, N(0, 0.01)
uniform_start
random, random_1                            He's normal distribution, "no task"; two seeds

The last error on held-out samples of each fit stands in the file's metadata, beside its floor, (1 - C_B/C) Var(x).
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from unskip.coders import CoderSpec, fit, floor, make_coder

FITTING = sys.modules["unskip.coders.fit"]  # `unskip.coders.fit` itself is the function
TASKS = ("rectified_normal", "normal", "uniform")


def small_start(spec: CoderSpec, act: nn.Module, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Algorithm 1, line 2."""
    yield tuple(0.01 * torch.randn(shape, generator=generator) for shape in (spec.enc_shape, spec.dec_shape))


def main() -> None:
    tensors: dict[str, Tensor] = {}
    about: dict[str, dict[str, float]] = {}

    def keep(name: str, enc: Tensor, dec: Tensor) -> None:
        tensors[f"{name}.enc"], tensors[f"{name}.dec"] = enc.bfloat16().contiguous(), dec.bfloat16().contiguous()

    for channels in (16, 32, 64):
        size = {"channels": channels, "code": channels // 2, "act": "ReLU()", "kernel": 3}
        for seed in (0, 1):
            coder = make_coder(CoderSpec(**size, pretext="random", seed=seed), nn.ReLU())
            keep(f"random{f'_{seed}' if seed else ''}.{channels}", coder.enc, coder.dec)
        for suffix, starts in (("", FITTING._starts), ("_start", small_start)):
            for task in TASKS:
                spec = CoderSpec(**size, pretext=task)
                with patch.object(FITTING, "_starts", starts):
                    fitted = fit(spec, nn.ReLU())
                name = f"{task}{suffix}.{channels}"
                keep(name, fitted.enc, fitted.dec)
                about[name] = {
                    "mse": fitted.mse, "floor": floor(spec), "start": fitted.start_mse, "rounds": fitted.rounds,
                }  # fmt: skip
                print(name, {k: round(v, 4) for k, v in about[name].items()}, flush=True)
    file = Path(__file__).with_name("coders.safetensors")
    save_file(tensors, file, metadata={"fits": json.dumps(about), "torch": torch.__version__})
    print(file, file.stat().st_size)


if __name__ == "__main__":
    main()
