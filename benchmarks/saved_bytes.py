"""Bytes that a network keeps for its backward pass, by how its block is computed. CPU, about a minute a network.

    python benchmarks/saved_bytes.py OUT [--network resnet34] [--size 224] [--eager]

One forward pass of three images in training mode under bf16 autocast; every tensor that autograd saves is noted through
`saved_tensors_hooks`, each storage once, weights left out. Compiled: traced and cut into forward and backward by the
compiler's own min-cut partitioner (backend aot_eager_decomp_partition), which decides what is kept and what is computed
again, as it does before it generates code. Figures are MiB for one image.
"""

import argparse
import json
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

import unskip

NETWORKS = ("resnet18", "resnet34", "resnet50", "mobilenetv2")
OURS = {block: {"block": block} for block in ("plain", "fast", "auto", "lean")}
TIMM = {"mobilenetv2": "mobilenetv2_100"}
IMAGES = 3  # so that what belongs to a batch can be told by its first axis


def saved(network: nn.Module, size: int, *, compiled: bool) -> float:
    """MiB an image that one training step keeps between forward and backward, the images themselves included."""
    torch._dynamo.reset()
    network = network.train().to(memory_format=torch.channels_last)
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.ndim and tensor.shape[0] == IMAGES:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # holding it, so that no other gets its address
        return tensor

    x = torch.randn(IMAGES, 3, size, size).contiguous(memory_format=torch.channels_last)
    call = torch.compile(network, backend="aot_eager_decomp_partition", dynamic=False) if compiled else network
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        out = call(x)
    total = sum(t.untyped_storage().nbytes() for t in kept.values())
    out.float().sum().backward()
    return total / IMAGES / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--network", action="append", choices=NETWORKS)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--eager", action="store_true", help="without the compiler")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in args.network or NETWORKS:
        residual = saved(timm.create_model(TIMM.get(name, name)), args.size, compiled=not args.eager)
        for label, options in {"residual": None, **OURS}.items():
            found = residual
            if options is not None:
                found = saved(unskip.create_model(f"pnnh_{name}", **options), args.size, compiled=not args.eager)
            rows.append({"network": name, "block": label, "mib": found, "ratio": found / residual})
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
            about = {"torch": torch.__version__, "size": args.size, "compiled": not args.eager}
            (args.out / "saved_bytes.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
