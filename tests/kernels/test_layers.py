"""`use_fast_layers`: any model gets the stem and the depthwise convolutions, and stays the same function.

The kernels run in Triton's interpreter, in a process of their own (`check_...`), as in test_depthwise.
"""

import copy
import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import unskip
from tests.kernels.interpreter import interpreted, needs_triton
from tests.kernels.test_depthwise import close, compiled, images, learner, lift, step
from unskip.kernels import use_fast_layers
from unskip.kernels.depthwise import JoinedSequential
from unskip.kernels.layers import FastInvertedResidual
from unskip.kernels.stem import StemConv2d, StemPool


def timms() -> nn.Module:
    return timm.create_model("mobilenetv2_035", num_classes=5)


def torchvisions() -> nn.Module:
    return torchvision.models.MobileNetV2(5, inverted_residual_setting=[[1, 8, 1, 1], [6, 12, 3, 2]], dropout=0.0)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "timm": timms,
    "torchvision": torchvisions,
    "resnet": lambda: timm.create_model("resnet18", num_classes=5),
    "sequence": lambda: nn.Sequential(*learner(nn.Sequential).float()),
}


def replaced_by_hand(model: nn.Module) -> nn.Module:
    """Every fast layer as the ordinary one."""
    for path, module in list(model.named_modules()):
        if hasattr(module, "to_ordinary"):
            if not path:
                return module.to_ordinary()
            model.set_submodule(path, module.to_ordinary())
    return model


@pytest.mark.parametrize("name", BUILDERS)
def test_the_same_function_there_and_back(name: str) -> None:
    torch.manual_seed(0)
    model = BUILDERS[name]().double().train()
    ordinary = copy.deepcopy(model)
    parameters = list(model.parameters())
    names = list(model.state_dict())
    assert use_fast_layers(model)
    assert not use_fast_layers(model), "nothing is left to replace"
    assert list(model.state_dict()) == names
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    stored = torch.load(file, weights_only=False)
    back = replaced_by_hand(copy.deepcopy(model))
    kinds = [type(module) for module in ordinary.modules()]
    assert [type(module) for module in back.modules()] == kinds
    assert [type(module) for module in model.modules()] != kinds
    x = torch.randn(2, 6 if name == "sequence" else 3, 32, 32, dtype=torch.float64)
    expected = step(ordinary, ordinary, x)
    for other in (model, stored, back):
        for found, wanted in zip(step(other, other, x), expected, strict=True):
            close(found, wanted)


def test_what_is_replaced() -> None:
    resnet = BUILDERS["resnet"]()
    assert use_fast_layers(resnet, stem=False) == []
    assert use_fast_layers(resnet) == ["conv1", "maxpool"]
    assert (type(resnet.conv1), type(resnet.maxpool)) == (StemConv2d, StemPool)
    mobilenet = timms()
    paths = use_fast_layers(mobilenet)
    assert paths[0] == "conv_stem"
    assert len(paths) == 17  # all blocks but the first, which does not expand
    assert type(mobilenet.blocks[1][0]) is FastInvertedResidual
    other = torchvisions()
    assert use_fast_layers(other, stem=False) == [f"features.{i}.conv" for i in (2, 3, 4)]
    assert type(other.features[2].conv) is JoinedSequential
    assert type(other.features[2].conv[0]) is torchvision.ops.Conv2dNormActivation
    sequence = BUILDERS["sequence"]()
    assert use_fast_layers(sequence) == [""]
    assert type(sequence) is JoinedSequential
    for name in ("resnet20", "pnnh_resnet18", "pnnh_mobilenetv2"):  # no such layer, or fast ones already
        assert use_fast_layers(unskip.create_model(name)) == []
    efficientnet = timm.create_model("efficientnet_b0")  # SiLU
    assert use_fast_layers(efficientnet) == ["conv_stem"]


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"use_fast_layers: model='resnet34' must be an nn.Module"):
        use_fast_layers("resnet34")  # type: ignore[arg-type]


def test_layers_with_hooks_stay() -> None:
    model = torchvisions()
    model.features[2].conv[0][1].register_forward_hook(lambda *_: None)  # the norm
    model.features[3].conv.register_forward_hook(lambda *_: None)
    assert use_fast_layers(model, stem=False) == ["features.4.conv"]


def test_an_inner_sequence_is_called_where_somebody_waits_for_it() -> None:
    model = torchvisions().eval()
    use_fast_layers(model)
    called: list[nn.Module] = []
    inner = model.features[2].conv[0]
    handle = inner.register_forward_hook(lambda module, *_: called.append(module))
    model(torch.randn(1, 3, 32, 32))
    handle.remove()
    everything = nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(module))
    try:
        model(torch.randn(1, 3, 32, 32))
    finally:
        everything.remove()
    assert called.count(inner) == 2


def test_an_inner_sequence_that_is_compiled_by_itself_stays_compiled() -> None:
    model = torchvisions().eval()
    use_fast_layers(model)
    graphs = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model.features[2].conv[0].compile(backend=backend)
    model(torch.randn(1, 3, 32, 32))
    assert len(graphs) == 1


@torch.no_grad()
def test_a_model_with_fast_layers_can_be_made_plain() -> None:
    """Readers know the blocks: the same plain network comes out."""
    found = []
    for fast in (False, True):
        torch.manual_seed(0)
        model = timms()
        if fast:
            use_fast_layers(model)
        found.append(unskip.plainify(model, "plain").double().eval())
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    close(found[1](x), found[0](x))


# ---------------------------------------------------------------- by the interpreter


def compare(block: nn.Module, shape: tuple[int, ...], operations: int) -> None:
    """Two compiled steps with fast layers are those of the block as it was, in float64."""
    for module in block.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1, 0.5)
            nn.init.normal_(module.bias, 0, 0.5)
    fast = copy.deepcopy(block).double().train()
    ordinary = block.double().train()
    assert len(use_fast_layers(fast, stem=False)) == 1
    call, seen = compiled(fast)
    for _ in range(2):
        x: Tensor = images(*shape)
        for found, expected in zip(step(fast, call, x), step(ordinary, ordinary, x), strict=True):
            close(found, expected)
    assert len(seen) == 1
    assert seen[0].count("call_function[target=torch.ops.unskip.depthwise") == operations


def check_blocks() -> None:
    lift()
    torch.manual_seed(0)
    compare(timms().blocks[1][0], (3, 8, 8, 6), 1)  # stride 2
    compare(timms().blocks[1][1], (3, 8, 8, 6), 1)  # with a skip
    compare(torchvisions().features[2], (3, 8, 8, 6), 1)


CHECKS: dict[str, Callable[[], Any]] = {"check_blocks": check_blocks}


@pytest.mark.full
@needs_triton
def test_by_the_interpreter() -> None:
    assert interpreted("-m", "tests.kernels.test_layers", *CHECKS).split() == list(CHECKS)


if __name__ == "__main__":
    for check in sys.argv[1:]:
        CHECKS[check]()
        print(check, flush=True)
