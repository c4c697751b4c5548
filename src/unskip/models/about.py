"""What a network is made of: parameters trained and frozen, multiplications, skips that it keeps; `unskip models`.

Building every network takes long, so the lines are shipped as data, `listing.json`. `write_listing` renews that file; a
test compares it with the networks.
"""

import fnmatch
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from unskip.coders import Coder, TransitionCoder
from unskip.models.registry import ENTRIES, Entry
from unskip.models.weights import names_with_weights

LISTING = Path(__file__).with_name("listing.json")


@dataclass(frozen=True, kw_only=True)
class Other:
    """A network of timm's that the papers' tables compare with, listed beside ours. `create_model(name)` builds it."""

    name: str
    family: str
    skips: str  # in a few words
    input_size: tuple[int, int, int] = (3, 224, 224)
    num_classes: int = 1000
    paper_params: ClassVar[None] = None  # the papers print counts of other heads and sizes

    def build(self) -> nn.Module:
        return timm.create_model(self.name)


REPVGG = "while training, then folded (timm.utils.model.reparameterize_model)"
OTHERS = {
    name: Other(name=name, family=f"{family} (timm)", skips=skips)
    for family, skips, names in (
        ("repvgg", REPVGG, ("repvgg_a0", "repvgg_a2", "repvgg_b0", "repvgg_b1")),
        ("densenet", "all, concatenated", ("densenet121", "densenet169", "densenet201")),
    )
    for name in names
}


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
    """The line of a name, counted on the meta device: without memory for weights, and without fitting coders."""
    entry = _entry(name)
    with torch.device("meta"):
        model = entry.build().eval()
        with FlopCounterMode(display=False) as flops, torch.no_grad():
            model(entry.example() if isinstance(entry, Entry) else torch.empty(1, *entry.input_size))
    return About(
        name=name,
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        frozen=frozen_weights(model),
        macs=flops.get_total_flops() // 2,
        skips=entry.skips if isinstance(entry, Other) else skips_left(model),
        paper_params=entry.paper_params,
    )


def listed(name: str) -> dict[str, Any]:
    """The line of a name in `listing.json`."""
    entry = _entry(name)
    line = asdict(about(name)) | {"family": entry.family, "input_size": list(entry.input_size)}
    return line | {"pretrained": name in names_with_weights()}


def write_listing() -> None:
    """Writes `listing.json`, a line for each name."""
    lines = ",\n".join(json.dumps(listed(name)) for name in (*ENTRIES, *OTHERS))
    LISTING.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def list_models(pattern: str = "*", *, family: str = "*", pretrained: bool = False) -> list[str]:
    """Returns the names of `unskip models` that match `pattern`; `create_model` builds each, and any other of timm's.

    Args:
        pattern: of names, for instance 'pnnh_*'.
        family: of families, for instance 'resnet' or '*timm*'.
        pretrained: whether only networks whose trained weights come with the package are wanted.

    Example:
        >>> unskip.list_models("pnnh_*_wide", pretrained=True)
        ['pnnh_resnet20_wide', 'pnnh_resnet110_wide']
    """
    return [
        name
        for name in (*ENTRIES, *OTHERS)
        if fnmatch.fnmatch(name, pattern)
        and fnmatch.fnmatch(_entry(name).family, family)
        and not (pretrained and name not in names_with_weights())
    ]


def _entry(name: str) -> Entry | Other:
    return OTHERS[name] if name in OTHERS else ENTRIES[name]


def frozen_weights(model: nn.Module) -> int:
    """Weights of the network's coders, also those of a closed form, which stores none."""
    coders = (module for module in model.modules() if isinstance(module, Coder | TransitionCoder))
    return sum(matrix.numel() for coder in coders for matrix in coder.matrices().values())


def skips_left(model: nn.Module) -> str:
    """'all' for a residual network, 'none' for a plain one, else what stayed and how often."""
    surgery = getattr(model, "surgery", None)
    if surgery is None:
        return "none" if getattr(model, "skip_free", False) else "all"
    left = dict(surgery.kept)
    if surgery.left:
        left["block"] = len(surgery.left)
    return ", ".join(f"{kind} skips kept: {count}" for kind, count in left.items()) or "none"
