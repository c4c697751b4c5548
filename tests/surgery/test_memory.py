"""Memory plans against counts by hand, and against the liveness of torch.fx's graph."""

import math

import pytest
import timm
import torch
from torch import Tensor, fx, nn

import unskip
from unskip.models.cifar import cifar_resnet
from unskip.surgery import memory_plan, memory_variants


class Residual(nn.Module):
    """relu(x + conv(relu(conv(x)))) behind a stem; 4 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.relu(x + self.two(torch.relu(self.one(x))))


def test_a_block_by_hand() -> None:
    plan = memory_plan(Residual(), torch.empty(7, 1, 6, 10))
    tensor = 4 * 60  # numbers of one 4-channel image
    # stem: image + x; one: x, y; relu in place; two: x, y, z; the sum goes into x or z, the last relu into that.
    assert plan.live() == [60 + tensor, 2 * tensor, 2 * tensor, 3 * tensor, 2 * tensor, tensor]
    assert (plan.peak("int8"), plan.peak("float32")) == (3 * tensor, 12 * tensor)
    assert (plan.peak_at.path, plan.peak_at.operator) == ("two", "convolution")
    assert [(t.path, t.operator) for t in plan.alive_at_peak] == [
        ("stem", "convolution"), ("Residual", "relu"), ("two", "convolution")
    ]  # fmt: skip
    # Each relu and the sum write elsewhere: x, y, relu(y); then x, relu(y), z; then x, z, x + z.
    loose = memory_plan(Residual(), torch.empty(7, 1, 6, 10), in_place=False)
    assert loose.live() == [60 + tensor, 2 * tensor, 3 * tensor, 3 * tensor, 3 * tensor, 2 * tensor]
    assert plan.macs == 60 * (4 + 4 * 4 * 9 + 4 * 4 * 25)
    # One tensor is read twice: it waits for a 3 x 3 (a row and a pixel) and a 5 x 5 (two rows, two pixels).
    assert (plan.streams, plan.clones) == (7, 1)
    assert [numbers for _, numbers in plan.waiting] == [4 * (10 + 1 + 2 * 10 + 2)]
    assert plan.tensors[plan.waiting[0][0]].path == "stem"
    assert "peak of activations                                              0.7 KiB       2.8 KiB" in str(plan)


class Squeezed(nn.Module):
    """x times what a mean over x decides: the whole of x must wait."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.mean((2, 3), keepdim=True).sigmoid()


def test_what_waits_for_a_mean_over_the_image_waits_whole() -> None:
    plan = memory_plan(nn.Sequential(nn.Conv2d(3, 8, 1), Squeezed()), torch.empty(1, 3, 5, 5))
    assert [numbers for _, numbers in plan.waiting] == [8 * 25]
    fast = memory_variants(cifar_resnet(8), torch.empty(1, 3, 32, 32), name="net")["net, pnnh, fast"]
    assert fast.waiting_bytes() < 8 * 1024  # means over channels wait for nothing


def test_a_strided_block_waits_for_rows_of_each_size() -> None:
    """3 x 3 of stride 2 on 16 px, then 3 x 3 on 8 px; the projection on the skip waits for nothing."""
    block = cifar_resnet(8, shortcut="B").layer2
    plan = memory_plan(block, torch.empty(1, 16, 16, 16))
    delay = (16 + 1) / 256 + (8 + 1) / 64  # of an image
    assert [numbers for _, numbers in plan.waiting] == [math.ceil(delay * 32 * 64)]


@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 20, 28)])
def test_nothing_in_place_agrees_with_the_liveness_of_fx(shape: tuple[int, ...]) -> None:
    """Another way to count: torch.fx's nodes, each alive until its last user has run."""
    network = cifar_resnet(14, shortcut="B").eval()
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.Identity())
            elif isinstance(child, nn.ReLU):
                setattr(module, name, nn.ReLU())
    traced = fx.symbolic_trace(network)
    sizes: dict[fx.Node, int] = {}

    class Sizes(fx.Interpreter):
        def run_node(self, node: fx.Node) -> object:
            result = super().run_node(node)
            sizes[node] = result.numel() if isinstance(result, Tensor) else 0
            return result

    Sizes(traced).run(torch.randn(1, *shape))
    same: dict[fx.Node, fx.Node] = {}  # a node that writes nothing -> what it passes on
    for node in traced.graph.nodes:
        target = node.op == "call_module" and traced.get_submodule(node.target)
        if isinstance(target, nn.Identity | nn.Dropout):
            same[node] = same.get(node.all_input_nodes[0], node.all_input_nodes[0])
    real = [node for node in traced.graph.nodes if node not in same and node.op != "output" and sizes[node]]
    last = {node: i for i, node in enumerate(real)}
    for i, node in enumerate(real):
        for source in node.all_input_nodes:
            last[same.get(source, source)] = i
    live = [sum(sizes[n] for n in real[: i + 1] if last[n] >= i) for i, node in enumerate(real) if i]
    assert memory_plan(network, torch.empty(1, *shape), in_place=False).live() == live


def test_the_networks_side_by_side() -> None:
    """Peak in KiB (int8) and millions of MACs, measured by another program (docs/memory.md)."""
    expected = {
        "resnet20": (48, 40.6),
        "resnet20, rm": (48, 77.1),
        "resnet20, pnnh, dense": (32, 40.6),
        "resnet20, pnnh, fast": (40, 20.5),
    }
    plans = memory_variants(unskip.create_model("resnet20"), name="resnet20")
    assert {name: (plan.peak() / 1024, round(plan.macs / 1e6, 1)) for name, plan in plans.plans.items()} == expected
    assert [plan.clones for plan in plans.plans.values()] == [9, 0, 0, 9]
    wide = memory_variants(unskip.create_model("pnnh_resnet20_wide"))
    assert [plan.peak() for plan in wide.plans.values()] == [80 * 1024, 120 * 1024]
    assert len({len(line) for line in str(plans).splitlines()}) == 1


@pytest.mark.full
def test_mobilenet_side_by_side() -> None:
    plans = memory_variants(unskip.create_model("mobilenetv2_100"), name="m")
    found = {name: round(plan.peak() / 1024) for name, plan in plans.plans.items()}
    assert found == {"m": 1470, "m, rm": 1470, "m, pnnh, dense": 1409, "m, pnnh, fast": 1470}


def test_several_by_name_and_what_can_not_be_made() -> None:
    plans = memory_plan({"a": cifar_resnet(8), "b": cifar_resnet(14)}, torch.empty(1, 3, 32, 32))
    assert plans["a"].peak() == plans["b"].peak() == 48 * 1024
    variants = memory_variants(timm.create_model("test_vit").eval(), torch.empty(1, 3, 160, 160), name="se")
    assert "method 'rm' can't make block" in str(variants.plans["se, rm"])
    with pytest.raises(ValueError, match="method 'rm' can't make block"):
        variants["se, rm"]
    with pytest.raises(ValueError, match=r"memory_plan: CifarResNet does not run on an input of shape \(4, 8, 8\)"):
        memory_plan(cifar_resnet(8), torch.empty(1, 4, 8, 8))


def test_additions_in_the_forward_of_the_network_are_skips_too() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            convs = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)]
            self.first, self.second = (nn.Sequential(a, nn.ReLU(), b) for a, b in (convs[:2], convs[2:]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(x + self.first(x))
            return torch.relu(x + self.second(x))

    plans = memory_variants(Net(), torch.empty(1, 8, 16, 16))
    assert [*plans.plans] == ["network", "network, rm", "network, pnnh, dense", "network, pnnh, fast"]
    assert (plans["network"].clones, plans["network, rm"].clones) == (2, 0)


def test_a_network_that_reads_tokens() -> None:
    model = unskip.create_model("pnnh_gpt_small_char", width=32, heads=4, depth=2)
    plan = memory_plan(model)
    assert plan.tensors[0].shape == (256,)
    assert plan.tensors[-1].numbers == 256 * 65
    assert memory_plan(model, torch.zeros(1, 8, dtype=torch.long)).tensors[-1].numbers == 8 * 65
