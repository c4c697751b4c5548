"""Proofs: trained residual networks that people use, without their skips, in float and in INT8, on all test images.

Each is written as its users write it and gets the published weights. `rm` removes the skips and proves it, `fold` makes
convolutions with bias of the rest, `quantize` writes INT8 files of 7 and 8 bits beside those of the residual network.
"""

import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.data.config import DataConfig
from unskip.data.readers import read_npz
from unskip.data.sets import Split, from_splits
from unskip.data.sprites import read_split
from unskip.io.load import load_model
from unskip.reproduce.registry import Outcome, Settings, between, reproduction
from unskip.ship import Quantized, convert, export, fold, quantize
from unskip.train.recipe import Recipe
from unskip.train.runner import run

NAME = "proofs"
CALIBRATION = 512  # training images
BITS = (7, 8)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of akamaster's and torchvision's networks
# Runs a .tflite file in a Python that has an interpreter for it.
INTERPRETER = """
import sys, numpy as np
try: from ai_edge_litert.interpreter import Interpreter
except ImportError: from tensorflow.lite import Interpreter
net = Interpreter(model_path=sys.argv[1]); net.allocate_tensors()
(read,), (wrote,) = net.get_input_details(), net.get_output_details()
answers = []
for x in np.load(sys.argv[2]):
    net.set_tensor(read["index"], x[None]); net.invoke(); answers.append(net.get_tensor(wrote["index"])[0])
np.save(sys.argv[3], np.stack(answers))
"""


@dataclass(frozen=True, kw_only=True)
class Proofs(Settings):
    """What can be set."""

    data: Annotated[Path | None, "the folder with trained/, cifar10/ and imagenette64/"] = None
    rows: Annotated[str, "networks, with commas between; empty: all"] = ""
    images: Annotated[int | None, "test images of each; all unless given", between(1, 1_000_000)] = None
    python: Annotated[
        Path | None, "a Python with ai-edge-litert or tensorflow, which runs MLPerf's .tflite; skipped unless given"
    ] = None
    resnet18: Annotated[Path | None, "a run of `unskip train` of the ResNet-18; trained here unless given"] = None
    epochs: Annotated[int, "epochs of the ResNet-18", between(1, 1000)] = 4


# ---------------------------------------------------------------- the networks, as their users write them


class MLPerfBlock(nn.Module):
    """Keras pads 'same' on one side where it takes every second pixel."""

    def __init__(self, in_chs: int, out_chs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv1 = nn.Conv2d(in_chs, out_chs, 3, stride, padding=0 if stride == 2 else 1)
        self.bn1 = nn.BatchNorm2d(out_chs, eps=1e-3)
        self.conv2 = nn.Conv2d(out_chs, out_chs, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(out_chs, eps=1e-3)
        self.shortcut = nn.Conv2d(in_chs, out_chs, 1, stride) if stride == 2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.pad(x, (0, 1, 0, 1)) if self.stride == 2 else x
        y = F.relu(self.bn1(self.conv1(y)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class MLPerfResNet8(nn.Module):
    """The reference network of MLPerf Tiny for CIFAR-10 (https://github.com/mlcommons/tiny); it reads 0 to 255."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16, eps=1e-3)
        self.blocks = nn.Sequential(MLPerfBlock(16, 16, 1), MLPerfBlock(16, 32, 2), MLPerfBlock(32, 64, 2))
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn1(self.conv1(x))))
        return self.fc(F.avg_pool2d(x, 8).flatten(1))


class PadBothSides(nn.Module):
    """akamaster's option A: every second pixel, and zero channels on both sides."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra // 2, self.extra // 2))


class AkamasterBlock(nn.Module):
    """A basic block as most code for CIFAR has it."""

    def __init__(self, in_chs: int, out_chs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_chs, out_chs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_chs)
        self.conv2 = nn.Conv2d(out_chs, out_chs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_chs)
        self.shortcut = PadBothSides(out_chs - in_chs) if stride == 2 else nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class AkamasterResNet(nn.Module):
    """He's ResNet-(6n + 2) as https://github.com/akamaster/pytorch_resnet_cifar10 has trained it."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        widths = (16, 16, 32, 64)
        for i in (1, 2, 3):
            first = AkamasterBlock(widths[i - 1], widths[i], 1 if i == 1 else 2)
            others = [AkamasterBlock(widths[i], widths[i], 1) for _ in range(n - 1)]
            setattr(self, f"layer{i}", nn.Sequential(first, *others))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(F.avg_pool2d(x, 8).flatten(1))


def mlperf_resnet8(path: Path) -> nn.Module:
    """The network with the weights of the .npz file, which has Keras' layouts."""
    network = MLPerfResNet8()
    layers = {"conv2d": network.conv1, "batch_normalization": network.bn1, "dense": network.fc}
    conv, norm = 0, 0
    for block in network.blocks:
        parts = [block.conv1, block.conv2, *([block.shortcut] if block.stride == 2 else [])]
        for layer in parts:
            conv += 1
            layers[f"conv2d_{conv}"] = layer
        for layer in (block.bn1, block.bn2):
            norm += 1
            layers[f"batch_normalization_{norm}"] = layer
    names = {"kernel": "weight", "gamma": "weight", "beta": "bias", "bias": "bias", "moving_mean": "running_mean",
             "moving_variance": "running_var"}  # fmt: skip
    state = network.state_dict()
    paths = {module: path for path, module in network.named_modules()}
    with np.load(path) as stored:
        for key in stored.files:
            layer, _, what = key.partition("/")
            value = torch.from_numpy(stored[key])
            if what == "kernel":
                value = value.permute(3, 2, 0, 1) if value.ndim == 4 else value.T
            state[f"{paths[layers[layer]]}.{names[what]}"] = value.contiguous()
    network.load_state_dict(state)
    return network.eval()


def akamaster(depth: int, path: Path) -> nn.Module:
    network = AkamasterResNet((depth - 2) // 6)
    missing, unexpected = network.load_state_dict(load_file(path), strict=False)
    assert not unexpected
    assert all(name.endswith("num_batches_tracked") for name in missing)
    return network.eval()


# ---------------------------------------------------------------- images


@dataclass(frozen=True)
class Images:
    """What a network is calibrated on, and what it is tested on."""

    calibrate: Tensor
    x: Tensor
    y: Tensor


def _cifar(root: Path, count: int | None, *, normalised: bool) -> Images:
    labels = read_npz(root / "labels.npz", "must hold y_train and y_test.", "y_train", "y_test")
    train = read_split(root, "data_batch", labels[0])
    test = read_split(root, "test_batch", labels[1])
    mean, std = (MEAN, STD) if normalised else ((0.0,) * 3, (1 / 255,) * 3)
    return _images(train, test, count, mean, std)


def _images(train: Split, test: Split, count: int | None, mean: Any, std: Any) -> Images:
    """Training images taken evenly, for calibration, and all or the first test images."""

    def prepared(images: Any) -> Tensor:
        return ((images.float() / 255 - torch.tensor(mean)) / torch.tensor(std)).permute(0, 3, 1, 2).contiguous()

    some = torch.linspace(0, len(train) - 1, CALIBRATION).long()
    return Images(prepared(train.take(some).images), prepared(test.images[:count]), test.labels[:count])


FOUR = 4  # classes of Imagenette: tench, English springer, cassette player, chain saw


def _resnet18(settings: Proofs, root: Path, folder: Path) -> tuple[nn.Module, Images]:
    """A torchvision ResNet-18 on four classes, trained once."""
    labels = read_npz(root / "labels.npz", "must hold y_train and y_val.", "y_train", "y_val")
    splits = [read_split(root, part, numbers) for part, numbers in zip(("train", "val"), labels, strict=True)]
    train, test = (split.take(torch.nonzero(split.labels < FOUR)[:, 0]) for split in splits)
    data = from_splits(DataConfig(dataset="npz", val_fraction=0.0), train, test, classes=FOUR)
    path = settings.resnet18
    if path is None:
        recipe = Recipe.of(
            model="torchvision:resnet18", dataset="npz", val_fraction=0.0, epochs=settings.epochs, batch=64, lr=0.02,
            crop="pad", pad=8, flip=0.5,
        )  # fmt: skip
        path = folder / "resnet18"
        run(recipe, data=data, out=path, resume="auto")
    model = load_model(str(path), command="reproduce").model.eval()
    return model, _images(data.train, data.test, settings.images, data.mean, data.std)


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Proof:
    """A network, and what became of it."""

    label: str
    exact: float  # relative error without skips in float64
    macs: float  # times those of the residual network
    parameters: float
    exported: float  # relative error of the folded network's ONNX file in float32
    files: dict[int, Quantized]  # by bits
    official: float | None = None  # largest difference of probabilities to the file that is published

    def cells(self) -> list[str]:
        first = self.files[BITS[0]].accuracy
        row = [self.label, f"{self.macs:.2f} / {self.parameters:.2f}", f"{self.exact:.0e}", f"{self.exported:.0e}"]
        row.append(f"{first.before:.2f}")
        for bits in BITS:
            q = self.files[bits]
            assert q.residual is not None
            for a in (q.residual, q.accuracy):
                row.append(f"{a.after:.2f} ({a.after - first.before:+.2f}; {a.sqnr:.1f} dB)")  # type: ignore[operator]
        return row


HEAD = ["network", "rm: MACs / parameters", "rm, float64", "ONNX, float32", "float"]
HEAD += [f"{bits} bits, {kind}" for bits in BITS for kind in ("residual", "rm")]


def prove(label: str, network: nn.Module, images: Images, folder: Path) -> tuple[Proof, nn.Module]:
    """Removes the skips, folds, exports and quantises; the files are in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    example = images.calibrate[:8]
    plain = convert(network, "rm", example=example)
    folded = fold(plain, example=example)
    exported = export(folded, folder / "plain.onnx", example=example, force=True)
    files = {
        bits: quantize(
            folded, folder / f"int{bits}.onnx", calibrate=images.calibrate, test=(images.x, images.y), bits=bits,
            residual=network, limit=100.0, force=True,
        )
        for bits in BITS
    }  # fmt: skip
    files = {bits: replace(found, path=Path(found.path).name) for bits, found in files.items()}  # not this machine's
    done: Any = plain.conversion
    assert done.cost.before.macs is not None
    return Proof(
        label, done.exact, done.cost.after.macs / done.cost.before.macs, done.cost.growth, exported.error, files
    ), folded


@torch.no_grad()
def _official(file: Path, folded: nn.Module, x: Tensor, python: Path) -> float:
    """The largest difference of probabilities between a network and the published file, run by its interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        given, answers = Path(folder) / "x.npy", Path(folder) / "y.npy"
        np.save(given, x.permute(0, 2, 3, 1).numpy())
        command = [str(python), "-c", INTERPRETER, *map(str, (file, given, answers))]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise ValueError(
                f"reproduce: --python {python} could not run {file.name}: {ended.stderr.strip().splitlines()[-1:]}. It "
                "must be a Python with ai-edge-litert or tensorflow; leave it out to skip the comparison."
            )
        found = torch.from_numpy(np.load(answers))
    ours = torch.cat([folded(part).softmax(1) for part in x.split(256)])
    return float((ours - found).abs().max())


@reproduction(NAME, settings=Proofs, trains=True)
def proofs(settings: Proofs, folder: Path) -> Outcome:
    """The networks one after another."""
    if settings.data is None:
        raise ValueError("reproduce: proofs needs --data, the folder with trained/, cifar10/ and imagenette64/.")
    root = settings.data.expanduser()
    trained = root / "trained"

    def cifar_row(load: Callable[[], nn.Module], *, normalised: bool) -> tuple[nn.Module, Images]:
        return load(), _cifar(root / "cifar10", settings.images, normalised=normalised)

    rows: dict[str, tuple[str, Callable[[], tuple[nn.Module, Images]]]] = {
        "resnet8": (
            "MLPerf Tiny ResNet-8",
            lambda: cifar_row(lambda: mlperf_resnet8(trained / "mlperf_tiny_resnet8.npz"), normalised=False),
        ),
        **{
            f"resnet{depth}": (
                f"akamaster ResNet-{depth}",
                lambda depth=depth: cifar_row(
                    lambda: akamaster(depth, trained / f"akamaster_resnet{depth}.safetensors"), normalised=True
                ),
            )
            for depth in (20, 56)
        },
        "resnet18": (
            "torchvision ResNet-18, 4 classes of Imagenette",
            lambda: _resnet18(settings, root / "imagenette64", folder),
        ),
    }  # type: ignore[dict-item]
    chosen = [name.strip() for name in settings.rows.split(",") if name.strip()] or list(rows)
    for name in chosen:
        if name not in rows:
            raise ValueError(f"reproduce: --rows has {name!r}; the networks are {', '.join(rows)}.")
    found: dict[str, Proof] = {}
    lines = [f"| {' | '.join(HEAD)} |", f"|---{'|---:' * (len(HEAD) - 1)}|"]
    notes = []
    for name in chosen:
        label, make = rows[name]
        network, images = make()
        proof, folded = prove(label, network, images, folder / name)
        found[name] = proof
        lines.append(f"| {' | '.join(proof.cells())} |")
        notes.append(f"{label}: {len(images.x):,} test images.")
        if name == "resnet8":
            file = trained / "mlperf_tiny_resnet8.tflite"
            if settings.python is None:
                notes.append("MLPerf's official .tflite was not run: --python names a Python that has an interpreter.")
            else:
                gap = _official(file, folded, images.x, settings.python)
                found[name] = replace(proof, official=gap)
                notes.append(
                    f"{label}, rm and folded, beside the official float .tflite: probabilities of {len(images.x):,} "
                    f"test images differ by {gap:.1e} at most."
                )
    versions = {name: version(name) for name in ("torch", "onnx", "onnxruntime", "torchvision")}
    about = [
        "Accuracy in percent on the test images (in brackets less float, in points, and signal to noise of the "
        "output). Both INT8 networks are made in the same way, the residual one with its norms folded.",
        *notes,
    ]
    numbers = {name: {**asdict(proof), "label": proof.label} for name, proof in found.items()}
    readme = [*lines, "", *about, "", ", ".join(f"{key} {value}" for key, value in versions.items()) + "."]
    return Outcome(lines=(*lines, *about), numbers={"rows": numbers, "versions": versions}, readme=tuple(readme))
