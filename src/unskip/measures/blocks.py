"""The blocks of a model, for measures that treat a block as one function."""

from dataclasses import dataclass

from torch import Tensor, nn

from unskip.measures.layer_types import has_parts

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """A function of one tensor inside a model: a module, or several consecutive ones of an nn.Sequential."""

    name: str  # path of its first module, where the input arrives
    modules: tuple[nn.Module, ...]

    def __call__(self, x: Tensor) -> Tensor:
        for module in self.modules:
            x = module(x)
        return x


def blocks_of(model: nn.Module) -> list[Block]:
    """The blocks of a model, in order of definition.

    These are the innermost elements of containers that have submodules themselves: `layer1.0` of a ResNet, `blocks.3`
    of a ViT, `layers.1.blocks.0` of a Swin (an nn.Sequential only if it is not part of such a module). If there are
    none, each layer with a weight in an nn.Sequential forms a block with the layers up to the next one (Linear,
    BatchNorm, ReLU).
    """
    return innermost(model, "") or runs(model, "")


def innermost(module: nn.Module, prefix: str) -> list[Block]:
    found: list[Block] = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        inside = innermost(child, f"{path}.")
        element = isinstance(module, CONTAINERS) and has_weight(child)
        composite = has_parts(child) and not isinstance(child, CONTAINERS)
        if element and composite and all(isinstance(block.modules[0], nn.Sequential) for block in inside):
            found.append(Block(name=path, modules=(child,)))
        elif inside:
            found += inside
        elif element and isinstance(child, nn.Sequential) and len(child) > 1:
            found.append(Block(name=path, modules=(child,)))
    return found


def runs(module: nn.Module, prefix: str) -> list[Block]:
    found: list[Block] = []
    run: list[tuple[str, nn.Module]] = []

    def close() -> None:
        if run and has_weight(run[0][1]):
            found.append(Block(name=run[0][0], modules=tuple(child for _, child in run)))
        run.clear()

    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if has_parts(child):
            close()
            found += runs(child, f"{path}.")
        elif isinstance(module, nn.Sequential):
            if has_weight(child):
                close()
            run.append((path, child))
    close()
    return found


def has_weight(module: nn.Module) -> bool:
    return any(parameter.ndim >= 2 for parameter in module.parameters())
