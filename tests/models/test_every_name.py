"""It behaves like any PyTorch network: every registered name through the same tests."""

import copy
import io
import pickle
import warnings

import pytest
import timm
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import unskip
from unskip.coders import ClosedFormCoder, Coder, SharedCoder
from unskip.models import ENTRIES
from unskip.models.weights import names_with_weights

# One small network per family in `make test`; every name in `make test-all`.
QUICK = {
    "resnet20", "plain_resnet20", "pnnh_resnet20", "pnnh_resnet20_wide", "pnnh_wrn16_8", "plain_resnet18",
    "pnnh_resnet18", "pnnh_resnet50",
    "plain_mobilenetv2", "pnnh_mobilenetv2", "pnnh_swin_tiny", "pnnh_vit_tiny",
    "plainnet_mlp", "plainnet50",
    "simplified_plain20", "simplified_resnet20", "simplified_dominant20",
    "dirac_resnet20", "iso_resnet20", "delta_tanh_resnet20", "looks_linear_resnet20",
    "seqnet18", "cifar_seqnet20", "seqnet_mlp",
}  # fmt: skip
NAMES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full]) for name in ENTRIES]
NAMES = [name for name in NAMES if ENTRIES[name.values[0]].reads == "images"]  # for texts: tests/models/test_gpt.py


def small(name: str) -> dict:
    """Arguments that keep a test cheap without changing what is tested."""
    if ENTRIES[name].family == "swin":
        return {"img_size": 64, "embed_dim": 48}
    return {"img_size": 32, "depth": 3} if ENTRIES[name].family == "vit" else {}


def images(name: str) -> Tensor:
    channels, height, _ = ENTRIES[name].input_size
    # The BatchNorm of a fully connected network sees the batch alone, and two images would all become +-1.
    count = 2 if ENTRIES[name].feature_maps else 16
    side = {"cifar_resnet": 16, "simplified": 16, "wrn": 8, "vit": 32}.get(ENTRIES[name].family, min(height, 64))
    return torch.randn(count, channels, side, side)


def create(name: str, **kwargs: object) -> nn.Module:
    return timm.create_model(name, **{**small(name), **kwargs})


@pytest.mark.parametrize("name", NAMES)
def test_behaves_like_any_pytorch_network(name: str) -> None:
    network = create(name)
    x = images(name)
    classes = ENTRIES[name].num_classes
    assert classes == (1000 if ENTRIES[name].input_size[-1] == 224 else 10)

    # Backward: every trained parameter has a finite gradient, no coder has one or asks for one.
    network.train()
    loss = network(x).square().mean()
    loss.backward()
    for path, parameter in network.named_parameters():
        assert parameter.grad is not None, path
        assert torch.isfinite(parameter.grad).all(), path
    coders = [module for module in network.modules() if isinstance(module, Coder)]
    assert all(not buffer.requires_grad for coder in coders for buffer in coder.buffers())

    # Train, eval and back.
    network.eval()
    assert not any(module.training for module in network.modules())
    with torch.no_grad():
        y = network(x)
        assert y.shape == (len(x), classes)
        assert torch.equal(network(x), y)

        # Copies: deepcopy, pickle, state_dict (strict), safetensors.
        assert torch.equal(copy.deepcopy(network)(x), y)
        assert torch.equal(pickle.loads(pickle.dumps(network)).eval()(x), y)
        fresh = create(name).eval()
        fresh.load_state_dict(network.state_dict(), strict=True)
        assert torch.equal(fresh(x), y)

        # A symbolic trace, as torchvision's feature extraction and quantisation make one.
        assert torch.equal(torch.fx.symbolic_trace(network)(x), y)

        # Precision and memory layout.
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.isfinite(network(x)).all()
        channels_last = copy.deepcopy(network).to(memory_format=torch.channels_last)
        # Running statistics that have seen one batch let a deep network's outputs be of any size.
        size = y.abs().max().clamp_min(1).item()
        y_last = channels_last(x.to(memory_format=torch.channels_last))
        torch.testing.assert_close(y_last, y, rtol=1e-3, atol=1e-3 * size)
        double = copy.deepcopy(network).double()
        assert double(x.double()).dtype == torch.float64


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_safetensors_and_meta_round_trips(name: str, tmp_path: object) -> None:
    network = create(name).eval()
    x = images(name)
    y = network(x)
    save_model(network, str(tmp_path / "weights.safetensors"))
    fresh = create(name).eval()
    load_model(fresh, str(tmp_path / "weights.safetensors"), strict=True)
    assert torch.equal(fresh(x), y)

    with torch.device("meta"):
        empty = create(name).eval()
    assert all(p.is_meta for p in empty.parameters())
    empty = empty.to_empty(device="cpu")
    for module in empty.modules():  # buffers that timm computes and does not store
        if hasattr(module, "init_non_persistent_buffers"):
            module.init_non_persistent_buffers()
    empty.load_state_dict(network.state_dict(), strict=True)
    torch.testing.assert_close(empty(x), y)


@pytest.mark.parametrize("name", NAMES)
def test_a_coder_stands_once_and_decays_never(name: str) -> None:
    with torch.device("meta"):
        network = create(name)
    coders = [module for module in network.modules() if isinstance(module, Coder)]
    refs = [module for module in network.modules() if isinstance(module, SharedCoder)]
    assert len({id(coder) for coder in coders}) == len(coders)
    assert {id(ref.coder) for ref in refs} <= {id(coder) for coder in coders}
    keys = [key for key in network.state_dict() if key.endswith((".enc", ".dec", "._extra_state"))]
    assert len(keys) == sum(1 if isinstance(coder, ClosedFormCoder) else 2 for coder in coders)
    if name.startswith("pnnh_"):
        widths = [len(coder.matrices()["dec"]) for coder in coders]
        assert coders
        assert len(set(widths)) == len(widths), "one coder per width"
    for groups in (unskip.param_groups(network, 1e-4), unskip.param_groups(network, 1e-4, decay_all=True)):
        grouped = {id(p) for group in groups for p in group["params"]}
        assert grouped == {id(p) for p in network.parameters()}
        assert not grouped & {id(b) for coder in coders for b in coder.buffers()}


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_timm_arguments(name: str) -> None:
    family = ENTRIES[name].family
    x = images(name)
    network = create(name, num_classes=7, in_chans=1).eval()
    assert network(x[:, :1]).shape == (len(x), 7)
    network.reset_classifier(3)
    assert network(x[:, :1]).shape == (len(x), 3)
    if not ENTRIES[name].feature_maps:
        with pytest.raises(ValueError, match=f"'{name}' has no feature maps of images"):
            create(name, features_only=True)
        return
    features = create(name, features_only=True).eval()
    outputs = features(x)
    channels = features.feature_info.channels()
    assert len(outputs) == len(channels) > 1
    for output, width in zip(outputs, channels, strict=True):
        assert width in ((output.shape[-1],) if family == "swin" else (output.shape[1],))
        assert torch.isfinite(output).all()
    if name.startswith("pnnh_"):
        assert any(isinstance(module, Coder) for module in features.modules()), "the coder came along"


@pytest.mark.parametrize("name", NAMES)
def test_pretrained_without_weights_is_a_sentence(name: str) -> None:
    if name in names_with_weights():
        pytest.skip("it has weights; tests/models/test_weights.py loads them")
    with pytest.raises(ValueError, match=f"'{name}' has no pretrained weights"):
        timm.create_model(name, pretrained=True)


def test_building_a_name_says_nothing() -> None:
    """No warning of timm's about missing configurations, none of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unskip.create_model("pnnh_resnet20")


def test_a_file_of_weights_is_no_larger_than_the_network() -> None:
    network = unskip.create_model("pnnh_resnet110")
    buffer = io.BytesIO()
    torch.save(network.state_dict(), buffer)
    numbers = sum(t.numel() for t in network.state_dict().values())
    assert buffer.tell() < 4 * numbers * 1.3 + 400_000  # the names take their share
