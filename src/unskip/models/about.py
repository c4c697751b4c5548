"""What a network is made of: parameters trained and frozen, multiplications, skips that it keeps."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from unskip.coders import Coder, TransitionCoder
from unskip.models.others import OTHERS, Other
from unskip.models.registry import ENTRIES


@dataclass(frozen=True, kw_only=True)
class About:
    """One line of `unskip models`."""

    name: str
    trained: int  # parameters with a gradient
    frozen: int  # weights of coders, each counted once
    macs: int  # multiply-accumulates of one forward pass of one image
    skips: str  # what is left of the skip connections
    paper_params: float | None  # millions


def about(name: str) -> About:
    """Built on the meta device, so it takes neither memory nor fitting."""
    entry = OTHERS[name] if name in OTHERS else ENTRIES[name]
    with torch.device("meta"):
        network = entry.build().eval()
        with FlopCounterMode(display=False) as flops, torch.no_grad():
            network(torch.empty(1, *entry.input_size))
    return About(
        name=name,
        trained=sum(p.numel() for p in network.parameters() if p.requires_grad),
        frozen=frozen_weights(network),
        macs=flops.get_total_flops() // 2,
        skips=entry.skips if isinstance(entry, Other) else skips_left(network),
        paper_params=entry.paper_params,
    )


def frozen_weights(network: nn.Module) -> int:
    """Weights of the network's coders, also those of a closed form, which stores none."""
    coders = (module for module in network.modules() if isinstance(module, Coder | TransitionCoder))
    return sum(matrix.numel() for coder in coders for matrix in coder.matrices().values())


def skips_left(network: nn.Module) -> str:
    """'all' for a residual network, 'none' for a plain one, else what stayed and how often."""
    surgery = getattr(network, "surgery", None)
    if surgery is None:
        return "none" if getattr(network, "skip_free", False) else "all"
    left = dict(surgery.kept)
    if surgery.left:
        left["block"] = len(surgery.left)
    return ", ".join(f"{kind} skips kept: {count}" for kind, count in left.items()) or "none"
