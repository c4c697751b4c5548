"""Compiling, exporting and distributing one network of each family."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from timm.layers import DropPath
from torch import nn

import unskip
from tests import processes
from tests.models.test_every_name import create, images
from unskip.models.cifar import cifar_resnet
from unskip.models.registry import RIVALS as METHODS

FAMILIES = ["pnnh_resnet20", "pnnh_wrn16_8", "pnnh_resnet18", "pnnh_resnet50", "pnnh_mobilenetv2", "pnnh_vit_tiny"]


RIVALS = [pytest.param(f"{method}_resnet20", marks=pytest.mark.full) for method in METHODS]
OTHERS = [
    pytest.param(name, marks=pytest.mark.full)
    for name in ("cifar_seqnet20", "seqnet_mlp", "plainnet50", "simplified_resnet20", "simplified_dominant20")
]


@pytest.mark.parametrize(
    "name", [*FAMILIES, "plain_resnet20", pytest.param("pnnh_swin_tiny", marks=pytest.mark.full), *RIVALS, *OTHERS]
)
def test_compiles_to_one_graph(name: str) -> None:
    """Forward and backward, `fullgraph`, against eager."""
    torch._dynamo.reset()
    tied = {"tie": "conv2"} if "seqnet" in name else {}
    network = create(name, **tied).train()
    for module in network.modules():  # chance would hit the two networks differently
        if isinstance(module, DropPath):
            module.drop_prob = 0.0
    twin = copy.deepcopy(network)
    x = torch.cat([images(name), images(name)])
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    expected, actual = network(x), compiled(x)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    expected.sum().backward()
    actual.sum().backward()
    for (path, p), q in zip(network.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=2e-2, atol=2e-2 * p.grad.abs().max().item() + 1e-6, msg=path)


@pytest.mark.parametrize("name", ["pnnh_resnet20", pytest.param("pnnh_vit_tiny", marks=pytest.mark.full)])
@torch.no_grad()
def test_inductor(name: str) -> None:
    """One block of each kind: its C++ compiler takes seconds for every further one."""
    torch._dynamo.reset()
    network = (create(name, depth=1) if "vit" in name else unskip.plainify(cifar_resnet(8), "pnnh")).eval()
    x = images(name)
    compiled = torch.compile(network, fullgraph=True)
    torch.testing.assert_close(compiled(x), network(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [*FAMILIES, pytest.param("pnnh_swin_tiny", marks=pytest.mark.full)])
@torch.no_grad()
def test_exports(name: str) -> None:
    network = create(name).eval()
    x = images(name)
    program = torch.export.export(network, (x,))
    torch.testing.assert_close(program.module()(x), network(x))
    coders = {value.data_ptr() for key, value in program.state_dict.items() if key.endswith(".enc")}
    assert len(coders) == len([key for key in network.state_dict() if key.endswith(".enc")])


def replica(rank: int, folder: Path, name: str, arguments: dict[str, Any], side: int) -> None:
    """Two updates of one of two replicas; both end with the same weights and coders."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(rank)  # replicas start different, DDP makes them equal
    network = nn.parallel.DistributedDataParallel(timm.create_model(name, **arguments))
    optimizer = torch.optim.SGD(unskip.param_groups(network, 1e-4), lr=0.1)
    for _ in range(2):
        x = torch.randn(2, 3, side, side)
        optimizer.zero_grad()
        network(x).square().mean().backward()
        optimizer.step()
    coders = [b.flatten() for key, b in network.named_buffers() if "coder" in key]
    flat = torch.cat([p.detach().flatten() for p in network.parameters()] + coders)
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    assert torch.isfinite(flat).all()
    assert torch.equal(*both), "replicas differ"
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "arguments", "side"),
    [
        ("pnnh_resnet20", {}, 16),
        pytest.param("cifar_seqnet20", {"tie": "conv2"}, 16, marks=pytest.mark.full),
        pytest.param("dirac_resnet20", {}, 16, marks=pytest.mark.full),
        pytest.param("pnnh_resnet18", {}, 32, marks=pytest.mark.full),
        pytest.param("pnnh_wrn16_8", {}, 8, marks=pytest.mark.full),
        pytest.param("pnnh_resnet50", {}, 32, marks=pytest.mark.full),
        pytest.param("pnnh_mobilenetv2", {}, 32, marks=pytest.mark.full),
        pytest.param("pnnh_swin_tiny", {"img_size": 64, "pretext": "group_average"}, 64, marks=pytest.mark.full),
        pytest.param(
            "pnnh_vit_tiny", {"img_size": 32, "depth": 2, "pretext": "group_average"}, 32, marks=pytest.mark.full
        ),
    ],
)
def test_two_processes_stay_equal_under_ddp(name: str, arguments: dict, side: int, tmp_path: Path) -> None:
    replicas = [processes.start(replica, rank, tmp_path, name, arguments, side) for rank in range(2)]
    for each in replicas:
        each.join(300)
    assert [each.exitcode for each in replicas] == [0, 0]


def test_timm_finds_the_names() -> None:
    assert "pnnh_resnet110" in timm.list_models("pnnh_*")
    parameters = sum(p.numel() for p in timm.create_model("pnnh_resnet110").parameters() if p.requires_grad)
    assert 0.80e6 < parameters < 0.55 * 1_727_962  # of ResNet-110's
