"""`measure` on any model: it returns a result or a clear error, and leaves the model unchanged."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import unskip
from tests.measures.networks import hooks, same, snapshot
from unskip.measures import Family, Findings, Layer, measure, measure_names, measuring, register_measure


def convnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


def test_no_trace_is_left() -> None:
    model = convnet()
    model[1].eval()
    model[6].bias.requires_grad_(False)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    before = snapshot(model)
    measured = measure(model, torch.randn(4, 3, 8, 8))
    after = snapshot(model)
    before["torch"] = after["torch"]  # the batch was drawn in between
    assert same(before, after)
    assert hooks(model) == 0
    assert measured.numbers["loss"] > 0
    assert any("1 of 6 parameters are not measured" in note for note in measured.notes)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_no_trace_after_an_error(error: type[BaseException], where: str) -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            random.random()
            np.random.rand()
            if where == "forward":
                raise error("stop")
            if x.requires_grad:
                x.register_hook(stop)
            return x * torch.rand(())

    def stop(gradient: Tensor) -> None:
        raise error("stop")

    model = nn.Sequential(convnet(), Bad())
    example = torch.randn(4, 3, 8, 8)
    before = snapshot(model)
    if where == "backward" and error is RuntimeError:  # the forward pass is still measured
        assert any("as it would in training: stop." in note for note in measure(model, example).notes)
    else:
        with pytest.raises((ValueError, KeyboardInterrupt), match="stop"):
            measure(model, example)
    assert same(before, snapshot(model))
    assert hooks(model) == 0
    assert example.grad is None


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act, self.last = nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.act(self.layer(x))
        return self.last(x)


class Returns(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layer, self.wrap = nn.Linear(5, 3), wrap

    def forward(self, x: Tensor) -> object:
        return self.wrap(self.layer(x).relu())


class Unhooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() @ self.layer.weight.detach().T


class Recurrent(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embed, self.net = nn.Embedding(11, 6), nn.LSTM(6, 7, num_layers=2, batch_first=batch_first)
        self.last, self.batch_first = nn.Linear(7, 3), batch_first

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y, _ = self.net(x if self.batch_first else x.transpose(0, 1))
        return self.last(y[:, -1] if self.batch_first else y[-1])


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.hidden, self.logits = logits.detach() * 0, logits


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (convnet(), torch.randn(4, 3, 8, 8)),
        (Reused(), torch.randn(6, 5)),
        (Returns(lambda y: {"features": y.int(), "logits": y}), torch.randn(6, 5)),
        (Returns(lambda y: (y, None, "aux")), torch.randn(6, 5)),
        (Returns(Output), torch.randn(6, 5)),
        (Returns(lambda y: y.sum()), torch.randn(6, 5)),
        (Returns(lambda y: y[:, None, :].expand(-1, 4, -1)), torch.randn(6, 5)),
        (Recurrent(True), torch.randint(11, (5, 9))),
        (Recurrent(False), torch.randint(11, (5, 9))),
        (nn.Sequential(nn.ReLU(inplace=True), nn.ReLU(inplace=True)), torch.randn(6, 5)),
        (nn.Sequential(nn.Linear(5, 3), nn.Sigmoid()).double(), torch.randn(6, 5, dtype=torch.float64)),
        (nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).bfloat16(), torch.randn(6, 5, dtype=torch.bfloat16)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(4, 5, 8)),
        (nn.MultiheadAttention(8, 2, batch_first=True), (torch.randn(4, 5, 8),) * 3),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), {"src": torch.randn(4, 5, 8)}),
        pytest.param(torchvision.models.mobilenet_v2(num_classes=5), torch.randn(4, 3, 32, 32), marks=pytest.mark.full),
        pytest.param(torchvision.models.densenet121(num_classes=5), torch.randn(2, 3, 32, 32), marks=pytest.mark.full),
        (timm.create_model("test_vit", num_classes=5), torch.randn(2, 3, 160, 160)),
        (unskip.create_model("pnnh_resnet20"), torch.randn(4, 3, 32, 32)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_model_is_measured(model: nn.Module, example: object) -> None:
    before = snapshot(model)
    measured = measure(model, example)
    assert same(before, snapshot(model))
    assert hooks(model) == 0
    assert measured.layers
    assert len({layer.name for layer in measured.layers}) == len(measured.layers)
    names = {layer.name for layer in measured.layers}
    for series in measured.series.values():
        assert set(series.layers) <= names
    assert np.isfinite(measured.series["activation_variance"].values).all()


def test_the_same_seed_gives_the_same_numbers() -> None:
    model, example = convnet(), torch.randn(16, 3, 8, 8)
    first, second, other = measure(model, example), measure(model, example), measure(model, example, seed=1)
    assert first.numbers == pytest.approx(second.numbers, nan_ok=True)
    assert first.numbers["loss"] != other.numbers["loss"]


def test_a_model_with_nan_is_measured() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    model[2].weight.data[0, 0] = float("nan")
    measured = measure(model, torch.randn(16, 5))
    assert any("'2' is the first with NaN or infinite outputs" in note for note in measured.notes)


def test_a_batch_made_in_inference_mode_is_measured() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    with torch.inference_mode():
        example, targets = torch.randn(16, 5), torch.arange(16) % 3
        found = measure(model, example, targets).numbers
    assert found == measure(model, example.clone(), targets.clone()).numbers


def test_one_sample_is_measured_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    measured = measure(model, torch.randn(1, 5))
    assert any("evaluation mode" in note for note in measured.notes)
    assert model.training


@pytest.mark.parametrize(
    ("model", "example", "options", "words"),
    [
        (nn.Linear(5, 3), torch.randn(4, 7), {}, r"Linear fails on a batch of float32 \(4, 7\)"),
        (nn.Linear(5, 3), "images", {}, "example must be a tensor"),
        (nn.Linear(5, 3), torch.randn(0, 5), {}, "at least one sample"),
        (Returns(lambda y: None), torch.randn(4, 5), {}, "without a floating-point tensor"),
        (nn.Linear(5, 3), torch.randn(4, 5), {"targets": torch.zeros(3, dtype=torch.long)}, r"targets of shape \(3,\)"),
        (nn.Linear(5, 3), torch.randn(4, 5), {"targets": [1, 2]}, "targets must be a tensor"),
        (nn.Linear(5, 3), torch.randn(4, 5), {"loss": lambda y, t: y}, "one number"),
        (
            nn.Linear(5, 3),
            torch.randn(4, 5),
            {"families": ["gradients"]},
            "no measure 'gradients'. Did you mean 'gradient'",
        ),
        (nn.Linear(5, 3), torch.randn(4, 5), {"families": [1]}, "1 is neither the name of a measure"),
        (nn.Linear(5, 3), torch.randn(4, 5), {"families": "gradient"}, "families='gradient' must be a list"),
        (nn.LazyLinear(3), torch.randn(4, 5), {}, "lazy parameters"),
        (Unhooked(), torch.randn(4, 5), {}, "no layers to measure"),
        (lambda x: x, torch.randn(4, 5), {}, "must be a torch.nn.Module"),
    ],
)
def test_errors_are_sentences(model: nn.Module, example: object, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        measure(model, example, **options)
    assert str(caught.value).startswith("measure: ")
    assert str(caught.value).endswith(".")


def test_wrapped_networks_are_unwrapped() -> None:
    model, example = convnet(), torch.randn(4, 3, 8, 8)
    expected = measure(model, example)
    for wrapped in (torch.compile(model), nn.DataParallel(model), torch.compile(nn.DataParallel(model))):
        assert measure(wrapped, example).numbers == pytest.approx(expected.numbers, nan_ok=True)
    model[0].compile()  # compiled in part: runs eagerly while measured, so that the hooks see it
    assert [layer.name for layer in measure(model, example).layers] == [layer.name for layer in expected.layers]


def test_a_ddp_wrapped_network_is_unwrapped_and_trains_on(tmp_path: Path) -> None:
    model, example = convnet(), torch.randn(4, 3, 8, 8)
    expected = measure(model, example)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert measure(wrapped, example).numbers == pytest.approx(expected.numbers, nan_ok=True)
        wrapped(example).square().mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_the_trunk_of_plain_and_residual_networks() -> None:
    x = torch.randn(4, 3, 32, 32)
    plain = measure(unskip.create_model("plain_resnet20"), x, families=["activation"])
    assert all(layer.trunk for layer in plain.layers)
    residual = measure(torchvision.models.resnet18(num_classes=5), x, families=["activation"])
    trunk = [layer.name for layer in residual.layers if layer.trunk]
    blocks = [f"layer{stage}.{block}.relu#2" for stage in range(1, 5) for block in range(2)]
    assert trunk == ["conv1", "bn1", "relu", "maxpool", *blocks, "avgpool", "fc"]


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_FAMILIES", dict(measuring._FAMILIES))
    monkeypatch.setattr(measuring, "_ON_REQUEST", set(measuring._ON_REQUEST))


def test_a_family_of_your_own(own_registry: None) -> None:
    mine = Family(
        name="mine",
        forward=lambda layer, x, y: {"entries": y.numel()},
        report=lambda probe: Findings(numbers={"entries": sum(probe.values("entries").values())}),
    )
    assert measure(nn.Linear(5, 3), torch.randn(4, 5), families=[mine]).numbers["entries"] == 12
    assert register_measure(mine, default=False) is mine
    assert measure(nn.Linear(5, 3), torch.randn(4, 5), families=["mine"]).numbers["entries"] == 12
    assert "mine" in measure_names()
    assert "mine" not in measure_names(default=True)
    with pytest.raises(ValueError, match="already"):
        register_measure(Family(name="mine", report=lambda probe: Findings()))


def test_a_function_of_a_layer_is_a_measure(own_registry: None) -> None:
    @register_measure
    def share_of_zeros(layer: Layer, x: Tensor | None, y: Tensor) -> float | None:
        """How many outputs are zero.

        About half of them
        after a ReLU.
        """
        return (y == 0).double().mean().item() if layer.kind == "activation" else None

    model, x = nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 3)), torch.randn(64, 5)
    series = measure(model, x).series["share_of_zeros"]  # registered measures are measured unless others are chosen
    assert series.layers == ("1",)
    assert series.values[0] == pytest.approx((model[0](x) <= 0).float().mean().item())
    assert (series.title, series.healthy) == ("How many outputs are zero", "About half of them after a ReLU.")
    assert measure(model, x, families=[share_of_zeros]).series.keys() == {"share_of_zeros"}


def test_parametrized_weights_belong_to_their_layer() -> None:
    parametrizations = nn.utils.parametrizations
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(5, 6)), nn.ReLU(), parametrizations.spectral_norm(nn.Linear(6, 3))
    )
    example = torch.randn(16, 5)
    before = snapshot(model)
    measured = measure(model, example)
    assert same(before, snapshot(model))
    assert [(layer.name, layer.kind) for layer in measured.layers] == [
        ("0", "linear"),
        ("1", "activation"),
        ("2", "linear"),
    ]
    for name in ("gradient_norm", "relative_gradient", "layer_cushion", "backward_ratio"):
        assert set(measured.series[name].layers) >= {"0", "2"}
        assert np.isfinite(measured.series[name].values).all()


def test_a_backward_pass_that_fails_is_reported() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Sigmoid(), nn.ReLU(inplace=True), nn.Linear(5, 3))
    failure = measure(model, torch.randn(16, 5)).failure
    assert failure is not None
    assert "inplace" in failure
    assert measure(nn.Linear(5, 3), torch.randn(16, 5)).failure is None
