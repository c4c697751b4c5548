"""Networks from words, their forms for inference, and unlike ones."""

import pytest
import torch
from torch import nn

from unskip.bench.networks import AS_TRAINED, FUSED, Candidate, common_input, forms, load
from unskip.kernels.depthwise import JoinedSequential
from unskip.kernels.stem import PooledStem, StemConv2d, StemPool


def contender(name: str, network: nn.Module, size: tuple[int, ...] = (3, 32, 32)) -> Candidate:
    return Candidate(name=name, network=network, input_size=size)


def test_options_in_a_word_reach_the_builder() -> None:
    found = load("pnnh_resnet20:pretext=identity,num_classes=7,scale=0.5")
    assert found.network.surgery.method.pretext == "identity"
    assert found.network.surgery.method.scale == 0.5
    assert found.network.fc.out_features == 7
    assert found.input_size == (3, 32, 32)


def test_a_word_that_is_no_option_is_refused() -> None:
    with pytest.raises(ValueError, match="'resnet18', which timm builds, has no argument 'stm'; leave it out"):
        load("resnet18:stm=3")
    for word in ("resnet18:stem=fst", "mobilenetv2_035:num_classes=5,stem=fast,depthwise=fst"):
        with pytest.raises(
            ValueError, match=r"(stem|depthwise)=fst in '.*' is not known; there is (stem|depthwise)=fast"
        ):
            load(word)
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
    found = forms(load("pnnh_resnet18:pretext=random,num_classes=5"), folded=True)
    assert list(found) == ["dense", "fast"]
    assert any(type(module) is PooledStem for module in found["fast"].modules())
    assert list(forms(load("pnnh_resnet20:pretext=random"), folded=True)) == ["dense"]


def test_a_stem_by_word() -> None:
    """timm's network with our stem: the same weights and function, its norm fused for inference."""
    ordinary, fast = load("resnet18:num_classes=5"), load("resnet18:num_classes=5,stem=fast")
    assert type(ordinary.network.conv1) is nn.Conv2d
    assert type(fast.network.conv1) is StemConv2d
    assert type(fast.network.maxpool) is StemPool
    assert list(fast.network.state_dict()) == list(ordinary.network.state_dict())
    ((form, made),) = forms(fast, folded=True).items()
    assert form == FUSED
    assert type(made.conv1) is PooledStem  # as in our folded networks, so that the blocks are all that differs
    assert type(made.conv1[0]) is StemConv2d
    assert made.conv1[0].bias is not None
    assert load("resnet20:stem=8").network.conv1.out_channels == 8  # an option of its own
    for word in ("resnet20:stem=fast", "pnnh_resnet18:stem=fast"):
        with pytest.raises(ValueError, match=f"stem=fast in '{word}' is for networks whose first layer"):
            load(word)


def test_images_of_different_sizes_are_refused_unless_one_is_given() -> None:
    both = [contender("a", nn.Conv2d(3, 2, 1)), contender("b", nn.Conv2d(3, 2, 1), (3, 224, 224))]
    with pytest.raises(ValueError, match="'a' reads images of 3x32x32 and 'b' of 3x224x224"):
        common_input(both, 0)
    assert common_input(both, 64) == (3, 64, 64)
    grey = [*both[:1], contender("c", nn.Conv2d(1, 2, 1), (1, 32, 32))]
    with pytest.raises(ValueError, match=r"reads 3 channels and 'c' 1; build them alike\.$"):  # 'c' is nobody's name
        common_input(grey, 64)


def test_weights_of_different_precisions_are_refused() -> None:
    both = [contender("a", nn.Conv2d(3, 2, 1)), contender("b", nn.Conv2d(3, 2, 1).bfloat16())]
    with pytest.raises(ValueError, match="weights of 'a' are float32 and those of 'b' bfloat16"):
        common_input(both, 0)


def trained(name: str) -> Candidate:
    """With norms that do something, so that leaving one out would be seen."""
    found = load(name)
    for module in found.network.modules():
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
    y = found.network.eval()(x)
    made = forms(found, folded=True)
    assert list(made) == expected
    for network in made.values():
        assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
        torch.testing.assert_close(network(x), y, rtol=1e-3, atol=1e-3 * y.abs().max().item())
    assert list(forms(found, folded=False)) == [AS_TRAINED]


@torch.no_grad()
def test_norms_that_nothing_absorbs_stay() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    (form, made), *others = forms(contender("group", network), folded=True).items()
    assert form in (AS_TRAINED, FUSED)
    assert not others
    assert any(isinstance(module, nn.GroupNorm) for module in made.modules())


@torch.no_grad()
def test_depthwise_convolutions_by_word() -> None:
    """timm's network with our depthwise convolutions: the same function and parameters; folded, no norm is left."""
    found = []
    for options in ("", "stem=fast,depthwise=fast,"):
        torch.manual_seed(0)
        found.append(trained(f"mobilenetv2_035:{options}num_classes=5"))
    ordinary, fast = found
    chains = [module for module in fast.network.modules() if isinstance(module, JoinedSequential)]
    assert len(chains) == 16  # of all blocks but the first, which does not expand
    layers = [nn.Conv2d, nn.BatchNorm2d, nn.ReLU6]
    assert all([type(module) for module in chain] == layers * 2 for chain in chains)
    assert type(fast.network.conv_stem) is StemConv2d
    for one, other in zip(ordinary.network.parameters(), fast.network.parameters(), strict=True):
        assert torch.equal(one, other)
    x = torch.randn(2, 3, 32, 32)
    for mode in (True, False):
        expected, actual = (contender.network.train(mode)(x) for contender in found)
        torch.testing.assert_close(actual, expected)
    for one, other in zip(ordinary.network.buffers(), fast.network.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    ((form, folded),) = forms(fast, folded=True).items()
    assert form == FUSED
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    torch.testing.assert_close(folded(x), fast.network.eval()(x), rtol=1e-3, atol=1e-3)
    for chain in (module for module in folded.modules() if isinstance(module, JoinedSequential)):
        left = [type(module) for module in chain if type(module) is not nn.Identity]
        assert left == [nn.Conv2d, nn.ReLU6] * 2  # of which inference computes all but the first as one operation
        assert chain[0].bias is not None
        assert chain[3].bias is not None


@pytest.mark.parametrize("name", ["resnet18", "pnnh_mobilenetv2", "efficientnet_b0"])
def test_networks_without_such_depthwise_convolutions_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"depthwise=fast in '{name}:depthwise=fast' is for networks whose blocks are"):
        load(f"{name}:depthwise=fast")
