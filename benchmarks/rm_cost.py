"""What exact removal of skips costs, and how exact it is: every network that rm takes, in one table.

    python benchmarks/rm_cost.py OUT

Costs are counted on the meta device at each network's own image size. Errors are those of `unskip.verify` on networks
with random weights and random BatchNorm statistics, float64 and float32, on 33 x 32 pixels (64 x 64 where a shortcut
averages); networks above LIMIT times their parameters are converted with middle='grouped'. One thread, a few minutes.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import timm
import torch
import torchvision
from torch import nn

import unskip
from unskip.ship import convert
from unskip.surgery import cost

LIMIT = 4.0
OURS = ("resnet20", "resnet56", "resnet110", "wrn16_8", "wrn28_10")
TIMM = ("resnet18", "resnet34", "resnet50", "resnet101", "wide_resnet50_2", "resnext50_32x4d", "resnet50d",
        "mobilenetv2_100")  # fmt: skip
TORCHVISION = ("resnet18", "resnet50", "mobilenet_v2")


def networks() -> dict[str, nn.Module]:
    found = {f"unskip {name}": unskip.create_model(name) for name in OURS}
    found |= {f"timm {name}": timm.create_model(name) for name in TIMM}
    return found | {f"torchvision {name}": getattr(torchvision.models, name)() for name in TORCHVISION}


@torch.no_grad()
def as_trained(network: nn.Module) -> nn.Module:
    """Random statistics, gains and biases in every norm."""
    generator = torch.Generator().manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
            module.weight.uniform_(-1.5, 1.5, generator=generator)
            module.bias.normal_(0, 0.2, generator=generator)
    return network.eval()


def measure(name: str, network: nn.Module) -> dict[str, object]:
    start = time.time()
    prices = {middle: cost(network, "rm", middle=middle) for middle in ("dense", "grouped")}
    row: dict[str, object] = {"network": name, "image": prices["dense"].shape}
    for middle, price in prices.items():
        row[middle] = {
            what: (getattr(price.before, what), getattr(price.after, what)) for what in ("parameters", "macs", "memory")
        }
    middle = "dense" if prices["dense"].growth <= LIMIT else "grouped"
    example = torch.randn(1, 3, *((64, 64) if name.endswith("d") else (33, 32)))
    conversion = convert(network, example=example, middle=middle, limit=float("inf")).conversion
    errors = {"float64": conversion.exact, "float32": conversion.check.worst("float32")}
    return row | {"converted": middle, "relative_error": errors, "seconds": round(time.time() - start, 1)}


def table(rows: list[dict]) -> str:
    lines = [
        "| network | parameters (M) | rm | rm, grouped | MACs | grouped | activations | error, float64 | float32 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]

    def times(row: dict, middle: str, what: str) -> str:
        before, after = row[middle][what]
        return f"{after / before:.2f}x"

    for row in rows:
        cells = [row["network"], f"{row['dense']['parameters'][0] / 1e6:.2f}"]
        cells += [times(row, middle, "parameters") for middle in ("dense", "grouped")]
        cells += [times(row, middle, "macs") for middle in ("dense", "grouped")]
        cells += [times(row, "dense", "memory")]
        cells += [f"{row['relative_error'][kind]:.0e}" for kind in ("float64", "float32")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for name, network in networks().items():
        rows.append(measure(name, as_trained(network)))
        print(rows[-1], flush=True)
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "timm": timm.__version__}
    versions["torchvision"] = torchvision.__version__
    (out / "rm_cost.json").write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
