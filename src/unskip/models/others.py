"""Networks of others that the papers' tables compare with: timm builds and names them, `unskip models` lists them."""

from dataclasses import dataclass
from typing import ClassVar

import timm
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Other:
    """A network of timm's that is listed beside ours. `create_model(name)` builds it, as it builds any of timm's."""

    name: str
    family: str
    skips: str  # what it has of them, in a few words
    input_size: tuple[int, int, int] = (3, 224, 224)
    num_classes: int = 1000
    paper_params: ClassVar[None] = None  # the papers print counts of other heads and sizes

    def build(self) -> nn.Module:
        return timm.create_model(self.name)


REPVGG = "while training, then folded (timm.utils.model.reparameterize_model)"
DENSENET = "all, concatenated"
OTHERS = {
    **{name: Other(name=name, family="repvgg (timm)", skips=REPVGG)
       for name in ("repvgg_a0", "repvgg_a2", "repvgg_b0", "repvgg_b1")},
    **{name: Other(name=name, family="densenet (timm)", skips=DENSENET)
       for name in ("densenet121", "densenet169", "densenet201")},
}  # fmt: skip
