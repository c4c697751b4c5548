"""Zhang et al. 2024, arXiv:2402.08645, section 4.1 and Appendix C: what each coder loses of its input.

The mean squared error of coders on rectified normal images, the paper's pretext task, after one block and after many:
a block passes on σ(coder(x)) where its learner adds nothing. The paper chooses a coder by the first number.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from unskip._core.drawing import FAINT, INK, OTHER, PLAIN, PNNH, RESIDUAL, dress, legend, panels
from unskip.coders import FORMS, CoderSpec, act_name, floor, make_coder
from unskip.reproduce.registry import SEED, Outcome, Settings, between, reproduction

CODERS = {  # by name in Table 4's words: pretext, colour
    "identity": ("identity", PNNH),
    "pair average": ("group_average", PLAIN),
    "rectified normal": ("rectified_normal", RESIDUAL),
    "uniform": ("uniform", OTHER),
    "normal": ("normal", INK),
    "random weights": ("random", FAINT),
}


@dataclass(frozen=True, kw_only=True)
class Reconstruction(Settings):
    """What can be set."""

    channels: Annotated[int, "channels C; the code has half of them", between(2, 4096)] = 16
    blocks: Annotated[int, "blocks one after the other; ResNet-110 has 18 in a stage", between(1, 1000)] = 18
    images: Annotated[int, "images of 16 px drawn", between(1, 10_000)] = 64
    seed: Annotated[int, "seed of coders and images", SEED] = 0


def losses(coder: nn.Module, x: Tensor, blocks: int) -> list[float]:
    """Mean squared error of x after 1, 2, ... blocks that pass on σ(coder(x))."""
    found, y = [], x
    for _ in range(blocks):
        y = coder(y).relu()
        found.append((y - x).square().mean().item())
    return found


@reproduction("pnnh-reconstruction", settings=Reconstruction)
@torch.no_grad()
def reconstruction(settings: Reconstruction) -> Outcome:
    """The loss of each coder before the activation, and after each of many blocks."""
    C, act = settings.channels, nn.ReLU()
    generator = torch.Generator().manual_seed(settings.seed)
    x = torch.randn(settings.images, C, 16, 16, generator=generator).relu()
    figure, (axes,) = panels(1, 1, size=(6.4, 4.0), title=f"What coders lose of rectified normal inputs, {C} channels")
    numbers: dict[str, Any] = {}
    lines = []
    for name, (pretext, colour) in CODERS.items():
        kernel = 1 if pretext in FORMS else 3
        spec = CoderSpec(channels=C, code=C // 2, pretext=pretext, act=act_name(act), kernel=kernel, seed=settings.seed)
        coder = make_coder(spec, act)
        once, many = (coder(x) - x).square().mean().item(), losses(coder, x, settings.blocks)
        numbers[name] = {"once": once, "after blocks": many}
        axes.plot(range(1, settings.blocks + 1), many, "o-", color=colour, markersize=3, linewidth=1.2, label=name)
        lines.append(f"{name}: loss {once:.3f}; after 1 block {many[0]:.3f}, after {settings.blocks} {many[-1]:.3f}.")
    least = floor(CoderSpec(channels=C, code=C // 2, pretext="rectified_normal", act=act_name(act)))
    numbers["floor"] = least
    lines.append(f"No linear code of half of the channels loses less than {least:.3f}; giving nothing back loses 0.5.")
    axes.axhline(least, color=FAINT, linestyle=":", linewidth=1)
    dress(axes, x="blocks", y="mean squared error", title="y = σ(coder(x)), block after block", log_y=True)
    axes.set_xticks(range(1, settings.blocks + 1, 2))
    legend(axes)
    return Outcome(lines=tuple(lines), numbers=numbers, figure=figure)
