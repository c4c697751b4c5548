"""Networks from words, their forms for inference, and unlike ones."""

import pytest
import torch
from torch import nn

from unskip.bench.networks import AS_TRAINED, FUSED, Candidate, common_input, forms, load, load_candidates
from unskip.kernels import use_fast_layers
from unskip.kernels.layers import FastInvertedResidual
from unskip.kernels.stem import PooledStem, StemConv2d, StemPool


def candidate(name: str, model: nn.Module, size: tuple[int, ...] = (3, 32, 32)) -> Candidate:
    return Candidate(name=name, model_spec=name, model=model, input_size=size)


def test_options_in_a_word_reach_the_builder() -> None:
    found = load("pnnh_resnet20:pretext=identity,num_classes=7,scale=0.5")
    assert found.model.surgery.method.pretext == "identity"
    assert found.model.surgery.method.scale == 0.5
    assert found.model.fc.out_features == 7
    assert found.input_size == (3, 32, 32)


def test_a_word_that_is_no_option_is_refused() -> None:
    with pytest.raises(ValueError, match="'resnet18', which timm builds, has no argument 'stm'; leave it out"):
        load("resnet18:stm=3")
    with pytest.raises(ValueError, match="'pretext' in 'pnnh_resnet20:scale=1,pretext' must be option=value"):
        load("pnnh_resnet20:scale=1,pretext")
    with pytest.raises(ValueError, match="'lean' in 'pnnh_resnet20:lean' must be option=value"):
        load("pnnh_resnet20:lean")
    with pytest.raises(ValueError, match=r"'resnet18' can't be built with 'block=lean': .* Leave that option out"):
        load("resnet18:block=lean")


def test_channels_by_word_are_those_that_are_read() -> None:
    both = [load("resnet18:num_classes=5"), load("resnet18:num_classes=5,in_chans=1")]
    with pytest.raises(
        ValueError, match=r"'resnet18:num_classes=5,in_chans=1' 1; .* resnet18:num_classes=5,in_chans=3"
    ):
        common_input(both, 64)


def test_a_dense_coder_has_the_faster_stem_too() -> None:
    """Its form 'fast' is another network than 'dense', though learner and coder are one layer in both."""
    found = load("pnnh_resnet18:pretext=random,num_classes=5")
    made = forms(found.model, found.input_size, folded=True)
    assert list(made) == ["dense", "fast"]
    assert any(type(module) is PooledStem for module in made["fast"].modules())
    small = load("pnnh_resnet20:pretext=random")
    assert list(forms(small.model, small.input_size, folded=True)) == ["dense"]


def test_the_same_layers_on_all_sides() -> None:
    """timm's network gets our stem, folded as ours; those that this changes follow as they were built."""
    specs = ["resnet18:num_classes=5", "pnnh_resnet18:num_classes=5"]
    fast, ours, as_built = load_candidates(specs, "same", beside=True)
    assert [c.name for c in (fast, ours, as_built)] == [*specs, "resnet18:num_classes=5 (own layers)"]
    assert fast.fast_layers == ("conv1", "maxpool")
    assert not ours.fast_layers  # it has them already
    assert type(fast.model.conv1) is type(ours.model.conv1) is StemConv2d
    assert type(fast.model.maxpool) is type(ours.model.maxpool) is StemPool
    assert type(as_built.model.conv1) is nn.Conv2d
    for one, other in zip(fast.model.state_dict().items(), as_built.model.state_dict().items(), strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])
    ((form, made),) = forms(fast.model, fast.input_size, folded=True).items()
    assert form == FUSED
    assert type(made.conv1) is PooledStem
    assert type(made.conv1[0]) is StemConv2d
    assert made.conv1[0].bias is not None
    assert [c.name for c in load_candidates(specs, "same", beside=False)] == specs
    own = load_candidates(specs, "own", beside=True)
    assert [type(c.model.conv1) for c in own] == [nn.Conv2d, StemConv2d]


def test_images_of_different_sizes_are_refused_unless_one_is_given() -> None:
    both = [candidate("a", nn.Conv2d(3, 2, 1)), candidate("b", nn.Conv2d(3, 2, 1), (3, 224, 224))]
    with pytest.raises(ValueError, match="'a' reads images of 3x32x32 and 'b' of 3x224x224"):
        common_input(both, 0)
    assert common_input(both, 64) == (3, 64, 64)
    grey = [*both[:1], candidate("c", nn.Conv2d(1, 2, 1), (1, 32, 32))]
    with pytest.raises(ValueError, match=r"reads 3 channels and 'c' 1; build them alike\.$"):  # 'c' is nobody's name
        common_input(grey, 64)


def test_weights_of_different_precisions_are_refused() -> None:
    both = [candidate("a", nn.Conv2d(3, 2, 1)), candidate("b", nn.Conv2d(3, 2, 1).bfloat16())]
    with pytest.raises(ValueError, match="weights of 'a' are float32 and those of 'b' bfloat16"):
        common_input(both, 0)


def trained(name: str) -> Candidate:
    """With norms that do something, so that leaving one out would be seen."""
    found = load(name)
    for module in found.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
    return found


@pytest.mark.parametrize(("name", "expected"), [("resnet20", [FUSED]), ("pnnh_resnet20", ["dense", "fast"])])
@torch.no_grad()
def test_forms_are_the_same_function_without_norms(name: str, expected: list[str]) -> None:
    found = trained(name)
    x = torch.randn(2, 3, 32, 32)
    y = found.model.eval()(x)
    made = forms(found.model, found.input_size, folded=True)
    assert list(made) == expected
    for network in made.values():
        assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
        torch.testing.assert_close(network(x), y, rtol=1e-3, atol=1e-3 * y.abs().max().item())
    assert list(forms(found.model, found.input_size, folded=False)) == [AS_TRAINED]


@torch.no_grad()
def test_norms_that_nothing_absorbs_stay() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    (form, made), *others = forms(network, (3, 32, 32), folded=True).items()
    assert form in (AS_TRAINED, FUSED)
    assert not others
    assert any(isinstance(module, nn.GroupNorm) for module in made.modules())


@torch.no_grad()
def test_depthwise_convolutions_with_their_norms_fused() -> None:
    """No norm is left: activation, depthwise convolution with a bias and activation follow one another."""
    found = trained("mobilenetv2_035:num_classes=5")
    assert len(use_fast_layers(found.model)) == 17  # the stem and all blocks but the first, which does not expand
    ((form, folded),) = forms(found.model, found.input_size, folded=True).items()
    assert form == FUSED
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(folded(x), found.model.eval()(x), rtol=1e-3, atol=1e-3)
    for block in (module for module in folded.modules() if isinstance(module, FastInvertedResidual)):
        assert [type(getattr(block, name)) for name in ("bn1", "bn2")] == [nn.ReLU6] * 2
        assert block.conv_pw.bias is not None
        assert block.conv_dw.bias is not None
