"""The blocks of a network: the parts between which a layer-by-layer measure of whole blocks is taken."""

from dataclasses import dataclass

from torch import Tensor, nn

from unskip.measures.layer_types import has_parts

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """A function of one tensor inside a network: a module, or several that follow each other in an nn.Sequential."""

    name: str
    start: str  # path of the module where its input arrives
    modules: tuple[nn.Module, ...]

    def __call__(self, x: Tensor) -> Tensor:
        for module in self.modules:
            x = module(x)
        return x


def blocks_of(network: nn.Module) -> list[Block]:
    """The blocks of a network, in order of definition.

    The innermost elements of containers that are modules of several parts: `layer1.0` of a ResNet, `blocks.3` of a ViT,
    `layers.1.blocks.0` of a Swin (an nn.Sequential only if it is not part of such a module). Where there are none: in
    every nn.Sequential, each layer with a weight together with what follows up to the next (Linear, BatchNorm, ReLU).
    """
    return innermost(network, "") or runs(network, "")


def innermost(module: nn.Module, path: str) -> list[Block]:
    found: list[Block] = []
    for name, child in module.named_children():
        place = f"{path}.{name}" if path else name
        inside = innermost(child, place)
        element = isinstance(module, CONTAINERS) and has_weight(child)
        if element and composite(child) and all(isinstance(block.modules[0], nn.Sequential) for block in inside):
            found.append(Block(name=place, start=place, modules=(child,)))
        elif inside:
            found += inside
        elif element and isinstance(child, nn.Sequential) and len(child) > 1:
            found.append(Block(name=place, start=place, modules=(child,)))
    return found


def runs(module: nn.Module, path: str) -> list[Block]:
    found: list[Block] = []
    run: list[tuple[str, nn.Module]] = []

    def close() -> None:
        if run and has_weight(run[0][1]):
            found.append(Block(name=run[0][0], start=run[0][0], modules=tuple(child for _, child in run)))
        run.clear()

    for name, child in module.named_children():
        place = f"{path}.{name}" if path else name
        if has_parts(child):
            close()
            found += runs(child, place)
        elif isinstance(module, nn.Sequential):
            if has_weight(child):
                close()
            run.append((place, child))
    close()
    return found


def composite(module: nn.Module) -> bool:
    return not isinstance(module, CONTAINERS) and has_parts(module)


def has_weight(module: nn.Module) -> bool:
    return any(parameter.ndim >= 2 for parameter in module.parameters())
