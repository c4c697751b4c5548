"""What timm's tests ask of every network (tests/models/timm_suite.py runs them all), for one network per family."""

from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf
from timm.models._manipulate import group_parameters

import unskip

STAGED = ("pnnh_resnet20", "plain_wrn16_8", "plainnet50", "simplified_dominant20", "cifar_seqnet20")


@pytest.mark.parametrize("name", STAGED)
def test_features_of_stages_are_those_that_hooks_see(name: str) -> None:
    model = timm.create_model(name).eval()
    x = torch.randn(1, 3, 32, 32)
    seen: list[torch.Tensor] = []
    for stage in model.stage_names:
        getattr(model, stage).register_forward_hook(lambda module, args, y: seen.append(y.clone()))
    with torch.no_grad():
        features, found = model.forward_intermediates(x)
        assert all(map(torch.equal, found, seen))
        assert torch.equal(features, model.forward_features(x))
        assert [y.shape[1] for y in found] == [info["num_chs"] for info in model.feature_info]
        (early,) = model.forward_intermediates(x, indices=[0], stop_early=True, intermediates_only=True)
        assert torch.equal(early, found[0])
        assert model.prune_intermediate_layers([1], prune_norm=True) == [1]
        assert torch.equal(model(x), found[1])
    with pytest.raises(ValueError, match="output_fmt='NHWC'"):
        model.forward_intermediates(x, output_fmt="NHWC")


@pytest.mark.parametrize("name", STAGED)
def test_head_pooling_groups_and_sizes(name: str) -> None:
    model = timm.create_model(name, num_classes=0, global_pool="", device="meta", dtype=torch.bfloat16).eval()
    assert model.in_chans == 3
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    y = model(torch.empty(1, 3, 32, 32, device="meta", dtype=torch.bfloat16))
    assert tuple(y.shape) == (1, model.head_hidden_size, *model.default_cfg["pool_size"])
    model.reset_classifier(5)  # pools again
    assert (model.fc.weight.device.type, model.fc.weight.dtype) == ("meta", torch.bfloat16)
    assert model.global_pool == "avg"
    with pytest.raises(ValueError, match="unpooled features without a classifier"):
        model.reset_classifier(5, "")
    assert len(set(group_parameters(model, model.group_matcher(), reverse=True).values())) > 3


@pytest.mark.parametrize("name", ["pnnh_resnet20", "plain_resnet18", "seqnet_mlp"])
def test_an_unknown_argument_is_a_type_error_too(name: str) -> None:
    with pytest.raises(TypeError, match="has no argument 'heads'"):
        timm.create_model(name, heads=3)
    with pytest.raises(ValueError, match="has no argument 'heads'"):
        unskip.create_model(name, heads=3)


def test_networks_of_one_image_size_say_so() -> None:
    for name in ("pnnh_vit_tiny", "plain_swin_tiny"):
        assert timm.get_pretrained_cfg_value(name, "fixed_input_size")


def test_save_for_hf_round_trips_by_name_and_says_where_it_can_not(tmp_path: Path) -> None:
    x = torch.randn(1, 3, 32, 32)
    named = unskip.create_model("pnnh_resnet20", num_classes=4).eval()
    save_for_hf(named, tmp_path / "named")
    back = timm.create_model(f"local-dir:{tmp_path / 'named'}", pretrained=True).eval()
    assert torch.equal(back(x), named(x))
    save_for_hf(unskip.plainify(unskip.create_model("resnet20"), "plain"), tmp_path / "made")
    with pytest.raises(RuntimeError, match="resnet20 after plainify by 'plain', which timm can not build"):
        timm.create_model(f"local-dir:{tmp_path / 'made'}", pretrained=True)
