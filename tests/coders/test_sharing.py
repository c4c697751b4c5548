"""One coder per width, held once, wherever the network goes."""

import copy
import io
import sys
from collections.abc import Callable

import pytest
import timm
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.models import resnet18
from torchvision.models._utils import IntermediateLayerGetter

import unskip
from unskip.coders import Coder
from unskip.models.cifar import cifar_resnet


def network() -> nn.Module:
    return unskip.plainify(cifar_resnet(14), pretext="rectified_normal")


def coders(module: nn.Module) -> list[Coder]:
    """All coders that a module uses, its own or shared."""
    return [m for m in module.modules() if isinstance(m, Coder)]


def test_once_in_the_network_and_once_in_its_state_dict() -> None:
    net = network()
    assert len(coders(net)) == 3
    assert net.layer1[1].coder.coder is net.layer1[0].coder
    assert sum(".enc" in key for key in net.state_dict()) == 3
    assert not any("coder" in name for name, _ in net.named_parameters())
    assert len(list(net.buffers())) == len({id(b) for b in net.buffers()})


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda net: torch.load(_saved(net), weights_only=False)])
def test_copies_share_among_themselves_and_not_with_the_original(duplicate: object) -> None:
    net = network()
    twin = duplicate(net)
    assert len(coders(twin)) == 3
    assert not {id(c) for c in coders(twin)} & {id(c) for c in coders(net)}
    assert twin.layer1[1].coder.coder is twin.layer1[0].coder


def _saved(net: nn.Module) -> object:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("part", [lambda net: net, lambda net: net.layer2, lambda net: net.layer2[1:]])
def test_double_and_to_reach_the_coder_from_any_part(part: object) -> None:
    module = part(network())
    x = torch.rand(2, next(module.parameters()).shape[1], 8, 8)
    assert module.double()(x.double()).dtype == torch.float64
    assert module.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    assert module.to("meta")(x.to("meta", torch.bfloat16)).is_meta
    assert all(coder.enc.is_meta for coder in coders(module))


@torch.no_grad()
def test_meta_to_empty_load() -> None:
    net = network().eval()
    with torch.device("meta"):
        empty = unskip.plainify(cifar_resnet(14), pretext="rectified_normal").eval()
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(net.state_dict(), strict=True)
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(empty(x), net(x))
    assert len(coders(empty)) == 3


@torch.no_grad()
def test_features_only_of_timm() -> None:
    whole = timm.create_model("pnnh_resnet20", pretext="random").eval()
    features = timm.create_model("pnnh_resnet20", pretext="random", features_only=True, out_indices=(1,)).eval()
    features.load_state_dict(whole.state_dict(), strict=False)
    x = torch.randn(2, 3, 16, 16)
    expected = whole.layer2(whole.layer1(whole.act1(whole.bn1(whole.conv1(x)))))
    assert torch.equal(features(x)[0], expected)
    assert features.double()(x.double())[0].dtype == torch.float64


@torch.no_grad()
def test_intermediate_layer_getter_of_torchvision() -> None:
    net = unskip.plainify(resnet18(), pretext="identity").eval()
    body = IntermediateLayerGetter(net, {"layer2": "low", "layer3": "high"})
    outputs = body.double()(torch.randn(1, 3, 64, 64, dtype=torch.float64))
    assert outputs["high"].shape == (1, 256, 4, 4)
    assert len(coders(body)) == 3
    assert sum(key.endswith("._extra_state") for key in body.state_dict()) == 3


@torch.no_grad()
def test_loading_into_one_block_s_coder_is_seen_by_all() -> None:
    net = network().eval()
    state = {key: torch.zeros_like(v) if key.endswith(".dec") else v for key, v in net.state_dict().items()}
    net.load_state_dict(state)
    assert not any(block.coder(torch.rand(1, 16, 4, 4)).any() for block in net.layer1)


def replicas(net: nn.Module, devices: list[str], monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """What nn.DataParallel makes, by PyTorch's own function but for its broadcast, which is for GPUs alone."""
    module = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(module, "_get_device_index", lambda device, _: device)
    monkeypatch.setattr(
        module,
        "_broadcast_coalesced_reshape",
        lambda tensors, devices, detach=False: [[t.to(device, copy=True) for t in tensors] for device in devices],
    )
    return module.replicate(net, devices)


REPLICATED = {
    "fitted": network,
    "closed": lambda: unskip.plainify(cifar_resnet(14)),
    "tied": lambda: unskip.plainify(cifar_resnet(14), "seq", tie="conv2"),
}


@pytest.mark.parametrize("build", REPLICATED.values(), ids=REPLICATED)
def test_replicas_of_data_parallel_run_on_their_own_devices(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = build()
    with FakeTensorMode(allow_non_fake_inputs=True):  # has devices by name, and minds where tensors are
        with pytest.raises(RuntimeError, match="device"):
            net(torch.randn(2, 3, 16, 16, device="cuda:1"))
        for replica, device in zip(replicas(net, ["cpu", "cuda:1"], monkeypatch), ["cpu", "cuda:1"], strict=True):
            assert replica(torch.randn(2, 3, 16, 16, device=device)).device == torch.device(device)


@pytest.mark.parametrize("build", REPLICATED.values(), ids=REPLICATED)
def test_replicas_of_data_parallel_are_the_same_function(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = build().double().eval()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    y = net(x)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _, away = replicas(net, ["cpu", device], monkeypatch)
    far = away(x.to(device))
    torch.testing.assert_close(far.cpu(), y)
    parameters = list(net.parameters())
    torch.testing.assert_close(torch.autograd.grad(far.sum(), parameters), torch.autograd.grad(y.sum(), parameters))
