"""The loop: golden losses, an independent reference, determinism, what is written, what is said when it fails."""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from tests.train.small import SMALL, linear_net, norm_net
from unskip.data.feed import Batch, DeviceFeed, make_feed
from unskip.data.sets import Split, load
from unskip.io.load import load_model
from unskip.train import Orthogonal, Recipe, TrainingDiverged, TrainingInterrupted, run
from unskip.train.metrics import read_metrics
from unskip.train.optim import learning_rate


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "step"]


# Of `unskip train --model resnet20 --epochs 1 --batch 256 --lr 0.05 --warmup-epochs 0` on digits, seed 0
GOLDEN = [2.5581, 2.2761, 2.0237, 1.9508, 1.9059]


def test_golden_losses(tmp_path: Path) -> None:
    recipe = Recipe.of(model="resnet20", epochs=1, batch=256, lr=0.05, weight_decay=3e-4, device="cpu")
    run(recipe, out=tmp_path / "run", silent=True)
    assert losses(tmp_path / "run") == pytest.approx(GOLDEN, abs=2e-3)


def test_the_loop_is_plain_sgd(tmp_path: Path) -> None:
    """Against a loop of ten lines with torch's own optimizer, in float64."""
    recipe = SMALL.replace(precision="fp64", decay_all=True, crop="pad", pad=1, clip=1.0)
    torch.manual_seed(1)
    network = norm_net(10, 1)
    reference = norm_net(10, 1)
    reference.load_state_dict(network.state_dict())
    reference.double()
    run(recipe, model=network, out=tmp_path, silent=True)

    feed = make_feed(load(recipe.data), recipe.data, **recipe.feeding, dtype=torch.float64)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    expected = []
    for epoch in range(2):
        for i, (x, y) in enumerate(feed.epoch(epoch)):
            step = epoch * feed.steps + i
            optimizer.param_groups[0]["lr"] = learning_rate(recipe.optimizer, step, epochs=2, steps=feed.steps)
            loss = F.cross_entropy(reference(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            optimizer.step()
            expected.append(loss.item())
    assert losses(tmp_path) == pytest.approx(expected, abs=1e-12)
    for key, value in load_file(tmp_path / "weights.safetensors").items():
        torch.testing.assert_close(value, reference.state_dict()[key], rtol=0, atol=1e-12)


def test_what_a_run_leaves(tmp_path: Path) -> None:
    recipe = SMALL.replace(tensorboard=True, epochs=3)
    network, before = norm_net(10, 1), torch.get_rng_state()
    result = run(recipe, model=network, out=tmp_path, silent=True)
    assert torch.equal(before, torch.get_rng_state())  # the caller's generator is left alone
    assert result.network == type(network).__name__  # and not the recipe's, which did not run
    assert str(result).startswith(f"{result.network} on digits: test error ")
    files = "checkpoint.pt curves.png metrics.jsonl recipe.toml result.json tensorboard weights.safetensors"
    assert sorted(file.name for file in tmp_path.iterdir()) == files.split()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows if r["kind"] == "step"] == list(range(1, 61))
    assert [r["epoch"] for r in rows if r["kind"] == "epoch"] == [1, 2, 3]
    assert rows[-1]["loss"] < rows[0]["loss"]
    mean = sum(r["loss"] for r in rows if r["kind"] == "step" and r["epoch"] == 3) / 20
    assert rows[-1]["loss"] == pytest.approx(mean)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "result.json").read_text())["test_error"] == result.test_error
    assert any((tmp_path / "tensorboard").iterdir())
    assert str(result).count("\n") == 0
    assert f"test error {result.test_error:.2f} %" in str(result)


def test_the_test_error_is_that_of_the_weights_on_the_disk(tmp_path: Path) -> None:
    for keep in ("last", "best"):
        recipe = SMALL.replace(keep=keep, ema=0.9 if keep == "best" else 0.0)
        result = run(recipe, model=norm_net(10, 1), out=tmp_path / keep, silent=True)
        network = norm_net(10, 1).eval()
        network.load_state_dict(load_file(tmp_path / keep / "weights.safetensors"))
        data = load(recipe.data)
        feed = make_feed(data, recipe.data, **recipe.feeding)
        wrong = sum((network(x).argmax(1) != y)[w > 0].sum().item() for x, y, w in feed.evaluation(data.test))
        assert result.test_error == pytest.approx(100 * wrong / len(data.test))
        epochs = [r for r in read_metrics(tmp_path / keep / "metrics.jsonl") if r["kind"] == "epoch"]
        best = min(r["val_error"] for r in epochs) if keep == "best" else epochs[-1]["val_error"]
        assert result.val_error == pytest.approx(best)


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_recalibrated_norms_are_those_of_all_images_as_one_batch(tmp_path: Path, ema: float) -> None:
    """The second norm's too: measured behind a first one that uses the same images."""
    recipe = SMALL.replace(epochs=1, recalibrate_batchnorm=100_000, ema=ema, flip=0.5)
    settled = run(recipe, out=tmp_path / "settled", silent=True)
    running = run(recipe.replace(recalibrate_batchnorm=0), out=tmp_path / "running", silent=True)
    found, before = (load_file(tmp_path / name / "weights.safetensors") for name in ("settled", "running"))
    data = load(recipe.data)
    feed = make_feed(data, recipe.data, **recipe.feeding)
    ((x, _),) = feed.plain_batches(data.train, (torch.arange(len(data.train)),))
    network = norm_net(10, 1).train()
    network.load_state_dict(before)
    with torch.no_grad():
        u = network[0](x)
        v = network[3](network[1:3](u))
    for index, read in ((1, u), (4, v)):
        var, mean = torch.var_mean(read, (0, 2, 3))
        torch.testing.assert_close(found[f"{index}.running_mean"], mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[f"{index}.running_var"], var, rtol=1e-4, atol=1e-5)
        assert (before[f"{index}.running_var"] / var - 1).abs().max() > 1e-3  # a running average is something else
    assert torch.equal(found["0.weight"], before["0.weight"])
    assert settled.test_error != running.test_error


def test_norms_are_recalibrated_without_dropout(tmp_path: Path) -> None:
    """As in eval mode, where what is behind a dropout reads all of what comes before it."""
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.9), nn.BatchNorm1d(64), nn.Linear(64, 10))
    recipe = SMALL.replace(epochs=1, recalibrate_batchnorm=100_000)
    run(recipe, model=network, out=tmp_path, silent=True)
    data = load(recipe.data)
    ((x, _),) = make_feed(data, recipe.data, **recipe.feeding).plain_batches(
        data.train, (torch.arange(len(data.train)),)
    )
    var, mean = torch.var_mean(x.flatten(1), 0)
    found = load_file(tmp_path / "weights.safetensors")
    torch.testing.assert_close(found["2.running_mean"], mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["2.running_var"], var, rtol=1e-4, atol=1e-5)


def test_recalibration_needs_a_norm(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"recalibrate_batchnorm=100 .* no BatchNorm"):
        run(SMALL.replace(recalibrate_batchnorm=100, options={"norm": "group"}), out=tmp_path, silent=True)
    with pytest.raises(ValueError, match=r"recalibrate_batchnorm=1 .* no variance"):
        SMALL.replace(recalibrate_batchnorm=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"deterministic": True},
        {"options": {"drop": 0.5}},
        {"mixup": 0.2, "cutmix": 1.0, "loss": "binary", "optimizer": "lamb", "lr": 5e-3},
        {"ema": 0.9, "optimizer": "adamw", "lr": 1e-3, "max_norm": 1.0, "orthogonal": 1e-3, "decay_from": "start"},
        {"precision": "bf16"},
    ],
    ids=["deterministic", "dropout", "mixed", "everything", "bf16"],
)
def test_the_same_losses_twice(tmp_path: Path, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = SMALL.replace(epochs=1, **changes)
    for i in range(2):
        torch.manual_seed(i)  # whatever the caller's generator says
        run(recipe, out=tmp_path / str(i), silent=True)
    assert losses(tmp_path / "0") == losses(tmp_path / "1")
    assert (tmp_path / "0/weights.safetensors").read_bytes() == (tmp_path / "1/weights.safetensors").read_bytes()
    assert not torch.are_deterministic_algorithms_enabled()


def test_seeds_differ(tmp_path: Path) -> None:
    for seed in range(2):
        run(SMALL.replace(epochs=1, seed=seed), out=tmp_path / str(seed), silent=True)
    assert losses(tmp_path / "0")[0] != losses(tmp_path / "1")[0]


def test_a_run_leaves_no_trace_in_network_and_flags(tmp_path: Path) -> None:
    """Accelerate's mixed precision gives a network another `forward`; determinism has a flag more for warnings."""
    network = norm_net(10, 1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        run(SMALL.replace(epochs=1, precision="bf16"), model=network, out=tmp_path, silent=True)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not {"forward", "_original_forward"} & set(vars(network))
    x = torch.randn(2, 1, 8, 8)
    step_by_step = x
    for layer in network.eval():
        step_by_step = layer(step_by_step)
    assert torch.equal(network(x), step_by_step)


def test_norms_that_could_not_be_recalibrated_train_on_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, plain_batches = norm_net(10, 1), DeviceFeed.plain_batches

    def full(feed: DeviceFeed, split: Split, parts: tuple[torch.Tensor, ...]) -> Iterator[Batch]:
        if len(parts[0]) == 1000:
            raise torch.OutOfMemoryError
        yield from plain_batches(feed, split, parts)

    monkeypatch.setattr(DeviceFeed, "plain_batches", full)
    with pytest.raises(torch.OutOfMemoryError):
        run(SMALL.replace(epochs=1, recalibrate_batchnorm=1000), model=network, out=tmp_path, silent=True)
    assert [network[1].momentum, network[4].momentum] == [0.1, 0.1]


class Refuses(nn.Linear):
    """Asks for something without a word."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError


class Two(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Refuses(2, 2), r"can't read images of shape \(1, 8, 8\) \(C, H, W\): AssertionError\."),
        (Two(2, 2), r"returns a tuple, no tensor, for one image; \(1, 10\) is expected"),
        (nn.Flatten(), "Flatten has no parameters, so there is nothing to train"),
        ("resnet20", r"model='resnet20' is not an nn\.Module; a name goes into the recipe"),
    ],
)
def test_a_network_that_does_not_fit_is_said_before_anything_is_written(
    tmp_path: Path, network: nn.Module, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(SMALL, model=network, out=tmp_path / "run", silent=True)
    assert not (tmp_path / "run").exists()


def test_what_is_no_recipe_is_said() -> None:
    with pytest.raises(ValueError, match=r"recipe=\{'lr': 0.1\} must be a Recipe, the name of one"):
        run({"lr": 0.1})  # type: ignore[arg-type]


def test_penalties_enter_the_loss(tmp_path: Path) -> None:
    network = norm_net(10, 1)
    first = Orthogonal(0.1)(network).item()
    run(SMALL.replace(epochs=1), model=network, out=tmp_path, penalties=[Orthogonal(0.1)], silent=True)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows[0]["penalty"] == pytest.approx(first, rel=1e-5)
    assert [r for r in rows if r["kind"] == "step"][-1]["penalty"] < first


def test_max_norm_holds_after_every_run(tmp_path: Path) -> None:
    run(SMALL.replace(epochs=1, max_norm=0.5), out=tmp_path, silent=True)
    weights = load_file(tmp_path / "weights.safetensors")
    norms = torch.cat(
        [w.flatten(1).norm(dim=1) for k, w in weights.items() if k in ("0.weight", "3.weight", "9.weight")]
    )
    assert norms.max() <= 0.5 + 1e-6
    assert (norms > 0.499).any()  # so the constraint was at work


def test_nan_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingDiverged, match=r"the loss is (nan|inf) at update \d+.*unskip doctor tests.train.small:norm_net"
    ):
        run(SMALL.replace(lr=1e30, warmup_epochs=0.0, weight_decay=0.0), out=tmp_path, silent=True)
    assert not (tmp_path / "checkpoint.pt").exists()  # no checkpoint of lost weights
    assert any(row["loss"] is None for row in read_metrics(tmp_path / "metrics.jsonl"))


class Blind(nn.Module):
    """Looks at nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bias.expand(len(x), 10)


def test_stuck_at_chance_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(SMALL.replace(epochs=4), model=Blind(), out=tmp_path)
    assert result.stuck
    said = capsys.readouterr().err
    assert "where guessing gives 2.302" in said
    assert "The network did not learn" in said
    assert "`unskip.diagnose(model, batch)` says what to look at" in said  # the doctor knows the recipe's network
    assert said.count("epoch ") >= 4  # plain lines where there is no terminal
    assert not run(SMALL.replace(epochs=4), out=tmp_path / "b", silent=True).stuck


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_finish_the_step_and_save(tmp_path: Path, number: signal.Signals) -> None:
    recipe = SMALL.replace(epochs=12, save_steps=7)
    run(recipe, out=tmp_path / "whole", silent=True)

    def interrupt() -> None:
        while not (tmp_path / "cut/checkpoint.pt").exists():
            time.sleep(0.001)
        os.kill(os.getpid(), number)

    before = signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(TrainingInterrupted, match=f"stopped by {number.name} after update"):
            run(recipe, out=tmp_path / "cut", silent=True)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
    done = torch.load(tmp_path / "cut/checkpoint.pt", weights_only=True)["step"]
    assert len(losses(tmp_path / "cut")) == done < 240
    run(recipe, out=tmp_path / "cut", resume="auto", silent=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert (tmp_path / "cut/weights.safetensors").read_bytes() == (tmp_path / "whole/weights.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cuda_graph": True}, "cuda_graph=true is not possible here: it needs an NVIDIA GPU"),
        pytest.param(
            {"device": "cuda"},
            "device='cuda', but PyTorch finds no GPU here. Use 'auto' or 'cpu'.",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ({"precision": "fp16"}, "precision='fp16' needs a GPU"),
        ({"sync_bn": True}, "sync_bn=true needs GPUs"),
        ({"model": "tests.train.small:nothing"}, "can't be imported"),
        ({"model": ":"}, "model=':' can't be imported"),
        ({"model": "os:"}, "model='os:' can't be imported"),
        ({"model": "os:sep"}, "model='os:sep' can't be built with options={}: TypeError: 'str' object is not callable"),
        ({"model": "builtins:dict"}, "model='builtins:dict' gives 'dict'; a function that returns an nn.Module"),
        ({"model": "builtins:print"}, "model='builtins:print' can't be built .*: TypeError"),
        ({"options": {"num_classes": 3}}, "can't be built with options={'num_classes': 3}: TypeError"),
        ({"model": ""}, "no network named ''"),
        ({"model": "resnet55"}, "no network named 'resnet55'. Did you mean"),
        ({"model": "plain_resnet56", "options": {"ratio": 2.0}}, "ratio"),
        ({"compile": "blocks"}, "compile='blocks' found no blocks"),
    ],
)
def test_refused_before_anything_is_written(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(SMALL.replace(**changes), out=tmp_path / "run", silent=True)
    assert not (tmp_path / "run").exists()


def test_a_network_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    for network, message in (
        (norm_net(9, 1), r"returns shape \(1, 9\) for one image; \(1, 10\) is expected"),
        (norm_net(10, 3), r"can't read images of shape \(1, 8, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            run(SMALL, model=network, out=tmp_path / "run", silent=True)
    assert not (tmp_path / "run").exists()


def test_plainify_by_recipe(tmp_path: Path) -> None:
    recipe = Recipe.of(model="resnet20", method="pnnh", options={"ratio": 0.25}, epochs=1, batch=512, device="cpu")
    result = run(recipe, out=tmp_path, silent=True)
    assert result.parameters != run(recipe.replace(options={}), out=tmp_path / "b", silent=True).parameters
    assert str(result).startswith("resnet20, pnnh on digits: ")
    assert load_model(str(tmp_path)).name == f"resnet20, pnnh of {tmp_path.name}"


def test_worker_feed_trains(tmp_path: Path) -> None:
    recipe = SMALL.replace(color_jitter=0.2, crop="pad", epochs=1, batch=256, workers=2)
    result = run(recipe, out=tmp_path, silent=True)
    assert math.isfinite(result.test_loss)


def test_linear_network_reaches_what_scikit_learn_does(tmp_path: Path) -> None:
    """Softmax regression is convex: the loop must find what scikit-learn's solver finds."""
    from sklearn.linear_model import LogisticRegression

    recipe = SMALL.replace(
        model="tests.train.small:linear_net", epochs=60, lr=0.5, weight_decay=0.0, val_fraction=0.0, warmup_epochs=0.0
    )
    result = run(recipe, model=linear_net(10, 1), out=tmp_path, silent=True)
    data = load(recipe.data)
    x, y = data.train.images.flatten(1).numpy() / 255, data.train.labels.numpy()
    theirs = LogisticRegression(C=10.0, max_iter=2000).fit(x, y)
    error = 100 * (1 - theirs.score(data.test.images.flatten(1).numpy() / 255, data.test.labels.numpy()))
    assert result.test_error == pytest.approx(error, abs=2.0)


@pytest.mark.full
def test_compiled_blocks_compute_the_same(tmp_path: Path) -> None:
    recipe = Recipe.of(model="pnnh_resnet20", epochs=1, batch=256, lr=0.05, device="cpu", precision="fp64")
    for compiled in ("no", "blocks"):
        run(recipe.replace(compile=compiled), out=tmp_path / compiled, silent=True)
    assert losses(tmp_path / "blocks") == pytest.approx(losses(tmp_path / "no"), abs=1e-9)
