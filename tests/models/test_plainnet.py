"""PlainNet against the figures that Oyedotun et al. 2020 prints, and against torch's own layers."""

import math

import pytest
import torch
from torch import nn

from tests.models.test_plainness import additions, graph
from unskip.models import create_model
from unskip.reproduce import paper_table
from unskip.train import load_recipe, run

# For COIL-20 at 32 x 32 px and its 20 classes.
TABLE_I = {row["depth"]: row["params"] for row in paper_table("plainnet", "I").rows}  # millions


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def of(network: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    return [module for module in network.modules() if isinstance(module, kind)]


@pytest.mark.parametrize("depth", TABLE_I)
def test_parameters_of_table_1(depth: int) -> None:
    with torch.device("meta"):
        network = create_model("plainnet_mlp", depth=depth, img_size=32, num_classes=20)
    millions = parameters(network) / 1e6
    # 4.768 is printed as 4.78; no reading of the text gives all seven.
    assert round(millions, 2) == (4.77 if depth == 50 else TABLE_I[depth])
    assert len(of(network, nn.Linear)) == depth + 1


def test_layers_of_table_a1() -> None:
    network = create_model("plainnet50").eval()
    convs = of(network, nn.Conv2d)
    assert len(convs) == 50
    printed = [row for row in paper_table("plainnet", "A1").rows if row["kind"] == "convolution"]
    ours = [(conv.out_channels, conv.kernel_size[0]) for conv in convs]
    assert ours.pop(48) == (96, 3)  # the row that the print leaves out
    assert ours == [(row["outputs"], row["kernel"]) for row in printed]
    sizes: list[int] = []
    for conv in convs:
        conv.register_forward_hook(lambda _m, _i, y: sizes.append(y.shape[-1]))
    network(torch.randn(1, 3, 32, 32))
    assert sizes.pop(48) == 7
    assert sizes == [row["size"] for row in printed]


@pytest.mark.parametrize("norm", [True, False])
def test_plainnet50_has_the_printed_parameters(norm: bool) -> None:
    network = create_model("plainnet50", norm=norm)
    assert round(parameters(network) / 1e6, 2) == 0.72
    assert bool(of(network, nn.BatchNorm2d)) is norm


def test_plainnet50_has_no_skip() -> None:
    """On its graph: no two activations are added, and each has one reader."""
    program = graph(create_model("plainnet50"), 32)
    assert not additions(program)
    computed = [node for node in program.graph.nodes if node.op == "call_function"]
    assert len(computed) > 150
    assert all(len(node.users) == 1 for node in computed)


def test_mlp_is_the_formula() -> None:
    """H^l = f(BN(W^l H^{l-1} + b)), in float64, from the weights alone."""
    network = create_model("plainnet_mlp", depth=4, width=20).double().train()
    x = torch.rand(32, 1, 16, 16, dtype=torch.float64)
    h = x.flatten(1)
    for linear in of(network, nn.Linear)[:-1]:
        z = h @ linear.weight.T + linear.bias
        z = (z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-5).sqrt()
        h = torch.where(z > 0, z, 0.3 * z)
    expected = h @ network.fc.weight.T + network.fc.bias
    torch.testing.assert_close(network(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("activation", "kind"), [("lrelu", nn.LeakyReLU), ("prelu", nn.PReLU), ("relu", nn.ReLU)])
@pytest.mark.parametrize("name", ["plainnet_mlp", "plainnet50"])
def test_components_switch(name: str, activation: str, kind: type[nn.Module]) -> None:
    network = create_model(name, norm=False, activation=activation, slope=0.2)
    hidden = 100 if name == "plainnet_mlp" else 50
    assert len(of(network, kind)) == hidden
    assert not of(network, nn.BatchNorm1d) + of(network, nn.BatchNorm2d)
    if activation == "lrelu":
        assert {module.negative_slope for module in of(network, kind)} == {0.2}
    if activation == "prelu":  # a slope for each unit, which is learned
        assert all((module.weight == 0.2).all() for module in of(network, kind))
        units = [m.weight.shape[0] for m in of(network, nn.Conv2d) or of(network, nn.Linear)[:-1]]
        assert [module.weight.numel() for module in of(network, kind)] == units


def test_initialisations() -> None:
    """Variance by n incoming and m outgoing connections (n = 300, m = 300), and what keeps a layer's variance."""
    a = 0.3
    weights = {}
    for init in ("he", "glorot", "uniform", "orthogonal"):
        torch.manual_seed(0)
        network = create_model("plainnet_mlp", depth=2, init=init)
        weights[init] = of(network, nn.Linear)[1].weight.detach()
        assert all((module.bias == 0).all() for module in of(network, nn.Linear))
    he = 2 / ((1 + a * a) * 300)
    assert weights["he"].var().item() == pytest.approx(he, rel=0.02)
    assert weights["he"].abs().max().item() == pytest.approx(math.sqrt(3 * he), rel=1e-3)  # uniform, not normal
    assert weights["glorot"].var().item() == pytest.approx(2 / 600, rel=0.02)
    assert weights["uniform"].abs().max().item() == pytest.approx(0.05, rel=1e-3)
    gram = weights["orthogonal"] @ weights["orthogonal"].T
    torch.testing.assert_close(gram, torch.eye(300) * 2 / (1 + a * a), rtol=0, atol=1e-5)
    relu = of(create_model("plainnet_mlp", depth=2, activation="relu"), nn.Linear)[1].weight
    assert relu.var().item() == pytest.approx(2 / 300, rel=0.02)


def test_he_keeps_the_signal_over_100_layers_without_norm() -> None:
    """With He's variance for the slope in use; the one for ReLU would multiply it by (1 + a^2)^100 = 5530."""
    torch.manual_seed(0)
    network = create_model("plainnet_mlp", norm=False)
    x = torch.randn(256, 1, 16, 16)
    ratio = (network.forward_features(x).square().mean() / x.square().mean()).item()
    assert 0.1 < ratio < 10


def test_gradient_checkpointing_changes_nothing() -> None:
    network = create_model("plainnet50").double().train()
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    grads = []
    for enable in (False, True):
        network.set_grad_checkpointing(enable)
        network.zero_grad()
        network(x).square().mean().backward()
        grads.append([p.grad.clone() for p in network.parameters()])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "wrong", "sentence"),
    [
        ("plainnet_mlp", {"depth": 0}, "depth=0 must be a whole number of at least 1"),
        ("plainnet_mlp", {"activation": "gelu"}, "activation='gelu' must be one of 'lrelu', 'prelu', 'relu'"),
        ("plainnet50", {"init": "zeros"}, "init='zeros' must be one of 'he', 'glorot', 'uniform', 'orthogonal'"),
        ("plainnet50", {"slope": 1.0}, "slope=1.0 must be at least 0 and below 1"),
        ("plainnet50", {"slope": "a"}, "slope='a' must be a finite number"),
        ("plainnet50", {"in_chans": 0}, "plainnet50: in_chans=0 must be a whole number of at least 1"),
        ("plainnet50", {"depth": 20}, "'plainnet50' has no argument 'depth'"),
        ("plainnet_mlp", {"dept": 20}, "'plainnet_mlp' has no argument 'dept'. Did you mean 'depth'?"),
    ],
)
def test_wrong_arguments_are_sentences(name: str, wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("?", r"\?")):
        create_model(name, **wrong)


def test_an_image_of_another_size_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"shape \(1, 32, 32\).*built for \(1, 16, 16\)"):
        create_model("plainnet_mlp", depth=3)(torch.rand(4, 1, 32, 32))


def test_the_recipes_are_the_papers() -> None:
    """Section VI: batch, momentum, weight decay, epochs, the range of the rate, and max-norm 3."""
    for name, epochs in (("usps-plainnet-100", 300), ("cifar10-plainnet-50", 400)):
        r = load_recipe(name)
        assert (r.run.batch, r.optimizer.momentum, r.optimizer.weight_decay, r.run.epochs, r.optimizer.max_norm) == (
            128,
            0.9,
            1e-4,
            epochs,
            3.0,
        )
        assert 1e-4 <= r.optimizer.lr <= 0.1
    with torch.device("meta"):
        assert len(of(create_model(load_recipe("usps-plainnet-100").network.model), nn.Linear)) == 101


def test_the_usps_recipe_trains(tmp_path: object) -> None:
    """The recipe with its BatchNorm, leaky units and max-norm learns scikit-learn's digits, a few layers deep."""
    options = {"depth": 8, "width": 64, "img_size": 8}
    recipe = load_recipe("usps-plainnet-100", dataset="digits", epochs=4, lr=0.01, options=options, device="cpu")
    result = run(recipe, out=tmp_path / "run", silent=True)  # type: ignore[operator]
    assert result.test_error < 15
