"""`unskip demo`: one 56-layer network, three ways to carry its input, one ordinary recipe for all of them.

The plain network gets a second try with three times the epochs. Every run is an `unskip train` of its own, in a process
of its own, and its command is on the page. Nothing is tuned to make the plain network fail: the recipe is the one that
Zhang et al. 2024 uses for CIFAR, at half its batch and learning rate, with a warm-up that helps all three.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

from unskip import measures
from unskip._core.rng import seeded
from unskip.data.feed import make_feed
from unskip.data.sets import DataSet, load
from unskip.doctor.report import diagnose
from unskip.models.about import frozen_weights, skips_left
from unskip.models.build import NetworkConfig, build_network
from unskip.train.checkpoint import explained
from unskip.train.metrics import read_metrics
from unskip.train.recipe import Recipe, load_recipe

RECIPE = "digits-pnnh-56"
DEPTH = 56
NOISE = 0.01  # of the pixels' standard deviation: an image and a copy of it that nobody could tell apart


@dataclass(frozen=True)
class Variant:
    """One of the networks, and how long it trains."""

    key: str
    title: str
    network: str
    color: str
    factor: int = 1  # times the recipe's epochs


VARIANTS = (
    Variant("plain", "plain", "plain_resnet56", "#dc2626"),
    Variant("pnnh", "PNNH", "pnnh_resnet56", "#2563eb"),
    Variant("residual", "residual", "resnet56", "#64748b"),
    Variant("plain-3x", "plain, 3x the epochs", "plain_resnet56", "#f59e0b", factor=3),
)


@dataclass
class Track:
    """A training run and its result."""

    variant: Variant
    command: list[str]
    epochs: int
    folder: Path
    process: subprocess.Popen[str] | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)

    def follow(self) -> None:
        """Reads what the run has written so far."""
        file = self.folder / "metrics.jsonl"
        self.rows = read_metrics(file) if file.exists() else []

    @property
    def epoch_rows(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == "epoch"]

    @property
    def log(self) -> Path:
        """What the run prints."""
        return self.folder.with_suffix(".log")

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known about a network before it is trained."""

    trained: int
    frozen: int
    skips: str
    noise_to_signal: dict[int, float]  # by depth in layers: after the stem and after each block

    @property
    def at_the_end(self) -> float:
        """The noise-to-signal ratio after the last block."""
        return list(self.noise_to_signal.values())[-1]


@dataclass(frozen=True, kw_only=True)
class Story:
    """Everything that the page shows."""

    seed: int
    tracks: dict[str, Track]
    facts: dict[str, Facts]
    recipe: Recipe
    sizes: tuple[int, int, int]  # images to train, choose and test on
    chance_error: float  # percent
    seconds: float

    def error(self, key: str) -> float:
        """Test error of a run, in percent."""
        return float(self.tracks[key].result["test_error"])

    @property
    def gap(self) -> float:
        """Points by which the plain network is behind the worse of the two others."""
        return self.error("plain") - max(self.error("pnnh"), self.error("residual"))

    def summary(self) -> dict[str, Any]:
        networks = {}
        for key, track in self.tracks.items():
            facts = self.facts[track.variant.network]
            networks[key] = {
                "network": track.variant.network,
                "epochs": track.epochs,
                "layers": DEPTH,
                "trained_parameters": facts.trained,
                "frozen_weights": facts.frozen,
                "skips": facts.skips,
                "test_error": self.error(key),
                "noise_to_signal": facts.at_the_end,
            }
        return {"seed": self.seed, "seconds": self.seconds, "gap": self.gap, "networks": networks, **versions()}


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}


def noise_to_signal_by_depth(network: torch.nn.Module, images: torch.Tensor, seed: int) -> dict[int, float]:
    """The noise-to-signal ratio after the stem and after each block, in training mode, as in the first update."""
    noise = NOISE * torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))
    stages = ("layer1", "layer2", "layer3")
    blocks = [f"{stage}.{name}" for stage in stages for name, _ in network.get_submodule(stage).named_children()]
    paths = ["act1", *blocks]
    network.train()
    outputs = measures.record_outputs(network, paths, torch.cat([images, images + noise]))
    return {1 + 2 * i: measures.noise_to_signal(*outputs[path].chunk(2)) for i, path in enumerate(paths)}


def at_start(model: str, recipe: Recipe, data: DataSet) -> torch.nn.Module:
    """The network exactly as the run builds it, before its first update."""
    with seeded(recipe.run.seed):
        return build_network(NetworkConfig(model=model), num_classes=data.classes, in_chans=data.channels)


def facts_about(model: str, recipe: Recipe, data: DataSet) -> Facts:
    """Sizes and skips of a network, and its noise-to-signal ratio before the first update."""
    network = at_start(model, recipe, data)
    images, _ = first_batch(recipe, data)
    return Facts(
        trained=sum(p.numel() for p in network.parameters() if p.requires_grad),
        frozen=frozen_weights(network),
        skips=skips_left(network),
        noise_to_signal=noise_to_signal_by_depth(network, images, recipe.run.seed),
    )


def first_batch(recipe: Recipe, data: DataSet) -> tuple[torch.Tensor, torch.Tensor]:
    return next(make_feed(data, recipe.data, **recipe.feeding).batches(0, 0))


def write_doctor_page(seed: int, out: Path) -> Path:
    """The doctor's page: the plain network beside PNNH, as they are before their first update."""
    recipe = load_recipe(RECIPE, seed=seed)
    data = load(recipe.data)
    batch, words = first_batch(recipe, data), "the demo's first batch of digits"
    plain, pnnh = (
        diagnose(at_start(variant.network, recipe, data), *batch, name=variant.network, data=words, seed=seed)
        for variant in VARIANTS[:2]
    )
    plain.to_html(out / "doctor.html", against=pnnh)
    return out / "doctor.html"


def start(variant: Variant, recipe: Recipe, seed: int, out: Path) -> Track:
    epochs = variant.factor * recipe.run.epochs
    folder = out / variant.key
    overrides = ["--model", variant.network, "--epochs", str(epochs), "--seed", str(seed), "--log-steps", "5"]
    command = ["unskip", "train", RECIPE, *overrides, "--device", "cpu", "--out", str(folder)]
    return Track(variant, command, epochs, folder)


def train_all(seed: int, out: Path, show: Callable[[dict[str, Track]], None]) -> Story:
    """Trains the four networks at the same time, one thread each, and calls `show` while they train."""
    began = time.perf_counter()
    if seed < 0:
        raise ValueError(f"demo: seed={seed} must not be negative.")
    clear(out)
    recipe = load_recipe(RECIPE, seed=seed)
    tracks = {variant.key: start(variant, recipe, seed, out) for variant in VARIANTS}
    threads = torch.get_num_threads()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        for track in sorted(tracks.values(), key=lambda t: -t.epochs):  # the longest first
            with explained("the file", track.log), open(track.log, "wb") as log:
                track.process = subprocess.Popen(
                    [sys.executable, "-m", *track.command], stdout=log, stderr=log, text=True, env=environment
                )
        data = load(recipe.data)
        torch.set_num_threads(1)  # the runs keep the cores busy, and threads that wait for each other are slower
        facts = {
            name: facts_about(name, recipe, data) for name in dict.fromkeys(variant.network for variant in VARIANTS)
        }
        while any(track.running for track in tracks.values()):
            for track in tracks.values():
                track.follow()
            show(tracks)
            time.sleep(0.25)
    finally:
        torch.set_num_threads(threads)
        for track in tracks.values():
            if track.process is not None and track.running:
                track.process.terminate()
                track.process.wait()
    for track in tracks.values():
        track.follow()
        assert track.process is not None
        if track.process.returncode != 0:
            text = track.log.read_text(encoding="utf-8", errors="replace")
            raise ValueError(f"demo: `{' '.join(track.command)}` ended with code {track.process.returncode}:\n{text}")
        track.result = json.loads((track.folder / "result.json").read_text(encoding="utf-8"))
    show(tracks)
    return Story(
        seed=seed,
        tracks=tracks,
        facts=facts,
        recipe=recipe,
        sizes=(len(data.train), len(data.val or ()), len(data.test)),
        chance_error=data.chance_error,
        seconds=time.perf_counter() - began,
    )


def clear(out: Path) -> None:
    """Makes room for a new demo: removes what an earlier one left, and nothing else."""
    names = ["checkpoint.pt", "metrics.jsonl", "recipe.toml", "result.json", "curves.png", "weights.safetensors"]
    with explained("the folder", out):
        out.mkdir(parents=True, exist_ok=True)
        for variant, name in product(VARIANTS, names):
            (out / variant.key / name).unlink(missing_ok=True)
