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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from unskip.train.checkpoint import RunFolder, explained, write_atomically
from unskip.train.metrics import read_metrics
from unskip.train.recipe import Recipe, load_recipe

RECIPE = "digits-pnnh-56"
DEPTH = 56
NOISE = 0.01  # of the pixels' standard deviation: an image and a copy of it that nobody could tell apart


@dataclass(frozen=True)
class Way:
    """One way to train the network."""

    key: str
    title: str
    network: str
    color: str
    longer: int = 1  # times the recipe's epochs


WAYS = (
    Way("plain", "plain", "plain_resnet56", "#dc2626"),
    Way("pnnh", "PNNH", "pnnh_resnet56", "#2563eb"),
    Way("residual", "residual", "resnet56", "#64748b"),
    Way("plain-3x", "plain, 3x the epochs", "plain_resnet56", "#f59e0b", longer=3),
)


@dataclass
class Track:
    """A run while it goes on, and what came out of it."""

    way: Way
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
    def last(self) -> dict[str, Any]:
        return self.rows[-1] if self.rows else {}


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Near/far ratio of a network at initialisation: at the stem and behind each block."""

    depth: list[int]  # layers up to here
    ratio: list[float]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What does not need training to be known about a network."""

    trained: int
    frozen: int
    skips: str
    layers: Layers


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
        return self.tracks[key].result["test_error"]

    @property
    def gap(self) -> float:
        """Points by which the plain network is behind the worse of the two others."""
        return self.error("plain") - max(self.error("pnnh"), self.error("residual"))

    def summary(self) -> dict[str, Any]:
        networks = {
            key: {
                "network": track.way.network,
                "epochs": track.epochs,
                "layers": DEPTH,
                "trained_parameters": self.facts[track.way.network].trained,
                "frozen_weights": self.facts[track.way.network].frozen,
                "skips": self.facts[track.way.network].skips,
                "test_error": self.error(key),
                "near_far_at_the_end": self.facts[track.way.network].layers.ratio[-1],
            }
            for key, track in self.tracks.items()
        }
        return {"seed": self.seed, "seconds": self.seconds, "gap": self.gap, "networks": networks, **versions()}


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}


def near_far_by_depth(network: torch.nn.Module, images: torch.Tensor, seed: int) -> Layers:
    """The near/far ratio behind the stem and behind each block, in training mode, as the first update sees it."""
    noise = NOISE * torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))
    stages = ["layer1", "layer2", "layer3"]
    paths = [
        "act1",
        *[f"{stage}.{name}" for stage in stages for name, _ in network.get_submodule(stage).named_children()],
    ]
    network.train()
    outputs = measures.record_outputs(network, paths, torch.cat([images, images + noise]))
    ratio = [measures.noise_to_signal(*outputs[path].chunk(2)) for path in paths]
    return Layers(depth=[1 + 2 * i for i in range(len(paths))], ratio=ratio)


def at_start(model: str, recipe: Recipe, data: DataSet) -> torch.nn.Module:
    """The network exactly as the run builds it, before its first update."""
    with seeded(recipe.run.seed):
        return build_network(NetworkConfig(model=model), num_classes=data.classes, in_chans=data.channels)


def facts_about(model: str, recipe: Recipe, data: DataSet) -> Facts:
    """What is known about a network before its first update."""
    network = at_start(model, recipe, data)
    images, _ = first_batch(recipe, data)
    return Facts(
        trained=sum(p.numel() for p in network.parameters() if p.requires_grad),
        frozen=frozen_weights(network),
        skips=skips_left(network),
        layers=near_far_by_depth(network, images, recipe.run.seed),
    )


def first_batch(recipe: Recipe, data: DataSet) -> tuple[torch.Tensor, torch.Tensor]:
    return next(make_feed(data, recipe.data, **recipe.feeding).batches(0, 0))


def write_doctor_page(seed: int, out: Path) -> Path:
    """The doctor's page: the plain network beside PNNH, as they are before their first update."""
    recipe = load_recipe(RECIPE, seed=seed)
    data = load(recipe.data)
    words = "the demo's first batch of digits"
    plain, pnnh = (
        diagnose(
            at_start(way.network, recipe, data), *first_batch(recipe, data), name=way.network, data=words, seed=seed
        )
        for way in WAYS[:2]
    )
    page = out / "doctor.html"
    plain.to_html(page, against=pnnh)
    return page


def start(way: Way, recipe: Recipe, seed: int, out: Path) -> Track:
    epochs = way.longer * recipe.run.epochs
    folder = out / way.key
    overrides = ["--model", way.network, "--epochs", str(epochs), "--seed", str(seed), "--log-steps", "5"]
    command = ["unskip", "train", RECIPE, *overrides, "--device", "cpu", "--out", str(folder)]
    return Track(way, command, epochs, folder)


def tell(seed: int, out: Path, show: Callable[[dict[str, Track]], None]) -> Story:
    """Trains the four side by side, calling `show` while they do, and writes the page. One thread for each run."""
    began = time.perf_counter()
    if seed < 0:
        raise ValueError(f"demo: seed={seed} must not be negative.")
    clear(out)
    recipe = load_recipe(RECIPE, seed=seed)
    tracks = {way.key: start(way, recipe, seed, out) for way in WAYS}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        for track in sorted(tracks.values(), key=lambda t: -t.epochs):  # the longest first
            with explained("the file", out / f"{track.way.key}.log"):
                log = open(out / f"{track.way.key}.log", "wb")  # noqa: SIM115 - closed below, the child has its own
            with log:
                track.process = subprocess.Popen(
                    [sys.executable, "-m", *track.command], stdout=log, stderr=log, text=True, env=environment
                )
        data = load(recipe.data)
        with one_thread():
            facts = {name: facts_about(name, recipe, data) for name in dict.fromkeys(way.network for way in WAYS)}
        while any(track.process is not None and track.process.poll() is None for track in tracks.values()):
            for track in tracks.values():
                track.follow()
            show(tracks)
            time.sleep(0.25)
    finally:
        for track in tracks.values():
            if track.process is not None and track.process.poll() is None:
                track.process.terminate()
                track.process.wait()
    for track in tracks.values():
        track.follow()
        assert track.process is not None
        if track.process.returncode != 0:
            text = (out / f"{track.way.key}.log").read_text(encoding="utf-8", errors="replace")
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


@contextmanager
def one_thread() -> Iterator[None]:
    """The runs have the cores; two threads that wait for each other on a busy machine are slower than one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def clear(out: Path) -> None:
    """Makes room for a new demo: removes what an earlier one left, and nothing else."""
    with explained("the folder", out):
        out.mkdir(parents=True, exist_ok=True)
        for way in WAYS:
            folder = RunFolder(out / way.key)
            names = (
                "checkpoint.pt",
                "metrics.jsonl",
                "recipe.toml",
                "result.json",
                "curves.png",
                "weights.safetensors",
            )
            for name in names:
                (folder.path / name).unlink(missing_ok=True)


def write(story: Story, out: Path) -> tuple[Path, Path]:
    """The picture and the page, and the numbers as JSON."""
    from unskip.demo.page import draw, page

    picture, html = draw(story), page(story)
    write_atomically(out / "demo.png", lambda file: file.write(picture))
    write_atomically(out / "index.html", lambda file: file.write(html.encode()))
    write_atomically(out / "demo.json", lambda file: file.write(json.dumps(story.summary(), indent=1).encode()))
    return out / "demo.png", out / "index.html"
