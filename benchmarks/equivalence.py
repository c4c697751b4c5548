"""A simplified ResNet and its image under T, trained side by side in float64 (docs/simplified.md).

    python benchmarks/equivalence.py OUT [--steps 50] [--batch 16] [--depths 20 32 44]

Same batches of scikit-learn's digits, SGD at 0.01 with momentum 0.9 and weight decay 1e-4: measured from the identity
in the plain network (the equivalent training of Yu and Tomasi 2019, 4.1) and, to see that it matters, from 0.
"""

import argparse
import json
import platform
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import unskip
from unskip.models import to_plain, to_residual
from unskip.train import ShiftedDecay, identity_shift

LR, MOMENTUM, DECAY = 0.01, 0.9, 1e-4


def apart(a: nn.Module, b: nn.Module) -> float:
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--depths", type=int, nargs="+", default=[20, 32, 44])
    arguments = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images).view(-1, 1, 8, 8)
    x, y = (x - x.mean()) / x.std(), torch.tensor(labels)

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, shift: dict[str, torch.Tensor]) -> list[float]:
        order, decay, losses = torch.Generator().manual_seed(0), ShiftedDecay(DECAY, shift), []
        for _ in range(arguments.steps):
            chosen = torch.randint(len(x), (arguments.batch,), generator=order)
            loss = F.cross_entropy(net(x[chosen]), y[chosen])
            optimizer.zero_grad()
            (loss + decay(net)).backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    rows = []
    for depth in arguments.depths:
        torch.manual_seed(0)
        r = unskip.create_model(f"simplified_resnet{depth}", in_chans=1).double()
        optimizer_r = torch.optim.SGD(r.parameters(), lr=LR, momentum=MOMENTUM)
        p, optimizer_p = to_plain(r, optimizer_r)
        q, optimizer_q = to_plain(r, optimizer_r)
        with torch.no_grad():
            row = {"depth": depth, "output": (r(x) - p(x)).abs().max().item()}
        losses = train(r, optimizer_r, identity_shift(r))
        train(p, optimizer_p, identity_shift(p))
        train(q, optimizer_q, {name: torch.zeros_like(rho) for name, rho in identity_shift(q).items()})
        momentum = [
            (optimizer_r.state[a]["momentum_buffer"] - optimizer_p.state[b]["momentum_buffer"]).abs().max().item()
            for a, b in zip(r.parameters(), p.parameters(), strict=True)
        ]
        row |= {
            "weights": apart(to_plain(r), p),
            "momentum": max(momentum),
            "there_and_back": apart(r, to_residual(to_plain(r))),  # of weights that fill all bits by now
            "weights_without_shift": apart(to_plain(r), q),
            "losses": [round(loss, 4) for loss in losses],
        }
        rows.append(row)
        print({key: value for key, value in row.items() if key != "losses"}, losses[0], losses[-1], flush=True)
    about = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    settings = {"steps": arguments.steps, "batch": arguments.batch, "lr": LR, "momentum": MOMENTUM, "decay": DECAY}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "equivalence.json").write_text(json.dumps({"about": about | settings, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
