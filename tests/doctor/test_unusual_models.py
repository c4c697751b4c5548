"""`diagnose` on unusual models, from threads and after errors: a report or a sentence, and an unchanged model."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import unskip
from tests.measures.networks import hooks, same, snapshot
from unskip.doctor import Report
from unskip.measures import Layer

EXAMPLE = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))


def mlp(*last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), *last, nn.Linear(16, 3))


def numbers(report: Report) -> dict[str, object]:
    values = {name: (series.layers, series.values) for name, series in report.measured.series.items()}
    return {"verdict": report.verdict, "series": repr(values), "numbers": repr(report.measured.numbers)}


@contextmanager
def unchanged(model: nn.Module, own_hooks: int = 0) -> Iterator[None]:
    before, attributes = snapshot(model), [dict(vars(module)) for module in model.modules()]
    yield
    assert same(before, snapshot(model))
    assert hooks(model) == own_hooks
    for module, old in zip(model.modules(), attributes, strict=True):
        assert vars(module).keys() == old.keys()
        assert all(vars(module)[name] is value for name, value in old.items())


@pytest.mark.parametrize("shared", [True, False], ids=["one model", "two models"])
def test_threads(shared: bool) -> None:
    """Two threads at a time: each report is that of a single thread, and the model is left as it was."""
    torch.manual_seed(0)
    first = mlp()
    models = [first, first if shared else mlp()]

    def diagnosed(model: nn.Module, seed: int) -> dict[str, object]:
        return numbers(unskip.diagnose(model, EXAMPLE, seed=seed, measures=[]))

    expected = [diagnosed(model, seed) for seed, model in enumerate(models)]
    together = threading.Barrier(2)

    def work(seed: int) -> list[dict[str, object]]:
        together.wait()
        return [diagnosed(models[seed], seed) for _ in range(3)]

    with unchanged(models[0]), unchanged(models[1]), ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, (0, 1)))
    assert found == [[one] * 3 for one in expected]


def test_a_global_forward_hook_changes_nothing_and_stays() -> None:
    torch.manual_seed(0)
    model, seen = mlp(), []
    expected = numbers(unskip.diagnose(model, EXAMPLE, measures=[]))
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        with unchanged(model):
            assert numbers(unskip.diagnose(model, EXAMPLE, measures=[])) == expected
        assert set(seen) == set(model.modules())
        seen.clear()
        model(EXAMPLE)
        assert seen
    finally:
        handle.remove()


def test_a_global_hook_that_raises_ends_in_a_sentence() -> None:
    def stop(module: nn.Module, args: object, output: object) -> None:
        raise KeyError("no entry")

    model = mlp()
    handle = nn.modules.module.register_module_forward_hook(stop)
    try:
        with unchanged(model), pytest.raises(ValueError, match=r"^measure: Sequential fails on .*no entry.*\.$"):
            unskip.diagnose(model, EXAMPLE)
    finally:
        handle.remove()


def test_inside_inference_mode() -> None:
    torch.manual_seed(0)
    model = mlp()
    expected = numbers(unskip.diagnose(model, EXAMPLE, measures=[]))
    with torch.inference_mode(), unchanged(model):
        assert numbers(unskip.diagnose(model, EXAMPLE, measures=[])) == expected
    with torch.inference_mode():
        frozen = mlp()
    with pytest.raises(ValueError, match=r"made inside torch.inference_mode.*\. Make it outside\."):
        unskip.diagnose(frozen, EXAMPLE)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_scripted_models() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))
    with pytest.raises(ValueError, match="scripted"):
        unskip.diagnose(scripted, torch.randn(32, 16))
    model = mlp(scripted)
    with unchanged(model):
        report = unskip.diagnose(model, EXAMPLE)
    assert [layer.name for layer in report.measured.layers] == ["0", "1", "2", "5"]
    assert "The inside of scripted modules (torch.jit) is not measured: '4'." in report.measured.notes


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "change",
    [nn.utils.weight_norm, nn.utils.spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)],
    ids=["weight norm", "spectral norm", "pruned"],
)
def test_weights_that_a_hook_computes(change: Callable[[nn.Module], nn.Module]) -> None:
    model = mlp()
    change(model[0])
    with unchanged(model, own_hooks=1):
        report = unskip.diagnose(model, EXAMPLE)
    assert report.measured.series["layer_cushion"].layers == ("0", "4")
    assert np.isfinite(report.measured.series["gradient_norm"].values).all()


class Drops(nn.Module):
    """Dropout, augmentation and noise from generators of its own, beside what no copy can be made of."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.torch, self.numpy, self.python = torch.Generator(), np.random.default_rng(1), random.Random(1)
        self.lock, self.iterator, self.calls, self.fails = threading.Lock(), iter(range(9)), 0, fails

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.calls += 1
            kept = torch.rand(x.shape, generator=self.torch) > 0.5
            scale = 1 + self.numpy.random() + self.python.random()
            if self.fails:
                raise RuntimeError("broken")
            return x * kept * scale

    def state(self) -> tuple[object, ...]:
        return self.torch.get_state().tolist(), self.numpy.bit_generator.state, self.python.getstate(), self.calls


@pytest.mark.parametrize("fails", [False, True])
def test_locks_and_generators_as_attributes(fails: bool) -> None:
    drops = Drops(fails)
    model, before = mlp(drops), drops.state()
    with unchanged(model):
        if fails:
            with pytest.raises(ValueError, match=r"^measure: .*broken"):
                unskip.diagnose(model, EXAMPLE)
        else:
            # The same units are dropped in every pass, or the noise-to-signal ratio would be near 1.
            assert unskip.diagnose(model, EXAMPLE).measured.numbers["input_dissipation"] < 0.2
    assert drops.state() == before
    assert not drops.lock.locked()


def test_a_model_for_one_batch_size_is_measured_as_far_as_it_runs() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(32, 16)

    report = unskip.diagnose(mlp(Fixed()), EXAMPLE)
    notes = [note for note in report.measured.notes if note.startswith("Not all of 'cushion' is measured: ")]
    assert len(notes) == 1
    assert "layer_cushion" in report.measured.series
    assert report.verdict.outcome == "trains"


def test_a_measure_that_fails_is_named() -> None:
    def broken(layer: Layer, x: Tensor | None, y: Tensor) -> float:
        """Never works."""
        raise KeyError(layer.name)

    model = mlp()
    with unchanged(model), pytest.raises(ValueError, match=r"^measure: 'broken' at layer '0' fails: KeyError: '0'\."):
        unskip.diagnose(model, EXAMPLE, measures=[broken])
