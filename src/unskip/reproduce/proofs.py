"""Proofs: trained residual networks that people use, without their skips, in float and in INT8, on all test images.

Each is written as its users write it and gets the published weights. `rm` removes the skips and proves it, `fold` makes
convolutions with bias of the rest, `quantize` writes INT8 files of 7 and 8 bits beside those of the residual network.
"""

import base64
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import mobilenet_v2

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
PHOTOS = 256  # test images of nsfwjs' network, whose answers on half as many others calibrate it
RUN_AGAIN = 16  # of them are run by TensorFlow.js, seconds each
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
# Runs a network of TensorFlow.js, which is two scripts: its topology, and its weights in base64.
TENSORFLOW_JS = """
const tf = require("@tensorflow/tfjs"), fs = require("fs");
const [model, weights, read, write, side] = process.argv.slice(1);
const {modelTopology, weightsManifest} = require(model), bytes = Buffer.from(require(weights), "base64");
const weightData = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
const load = async () => ({modelTopology, weightSpecs: weightsManifest.flatMap(g => g.weights), weightData});
tf.loadLayersModel({load}).then(net => {
    const file = fs.readFileSync(read), x = new Float32Array(file.buffer, file.byteOffset, file.length / 4);
    const size = side * side * 3, answers = [];
    for (let i = 0; i < x.length; i += size)
        answers.push(...net.predict(tf.tensor(x.slice(i, i + size), [1, +side, +side, 3])).dataSync());
    fs.writeFileSync(write, Buffer.from(Float32Array.from(answers).buffer));
});
"""


@dataclass(frozen=True, kw_only=True)
class Proofs(Settings):
    """What can be set."""

    data: Annotated[Path | None, "the folder with trained/, cifar10/ and imagenette64/"] = None
    rows: Annotated[str, "networks, with commas between; empty: all"] = ""
    images: Annotated[int | None, "test images of each; all unless given", between(1, 1_000_000)] = None
    bits: Annotated[Literal["7,8", "7", "8", "none"], "of weights in INT8; none: float alone"] = "7,8"
    python: Annotated[
        Path | None, "a Python with ai-edge-litert or tensorflow, which runs MLPerf's .tflite; skipped unless given"
    ] = None
    resnet18: Annotated[Path | None, "a run of `unskip train` of the ResNet-18; trained here unless given"] = None
    epochs: Annotated[int, "epochs of the ResNet-18", between(1, 1000)] = 4
    nsfwjs: Annotated[
        Path | None,
        "the folder dist/models/mobilenet_v2 of npm's nsfwjs 4.3.0, whose MobileNet-V2 is left out without it",
    ] = None
    node: Annotated[
        Path | None, "a folder where npm has installed @tensorflow/tfjs, which runs nsfwjs' file; skipped unless given"
    ] = None


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
        x = self.layer3(self.layer2(self.layer1(x)))  # type: ignore[operator]
        return self.linear(F.avg_pool2d(x, 8).flatten(1))


def mlperf_resnet8(path: Path) -> nn.Module:
    """The network with the weights of the .npz file, which has Keras' layouts."""
    network = MLPerfResNet8()
    layers: dict[str, Any] = {"conv2d": network.conv1, "batch_normalization": network.bn1, "dense": network.fc}
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


def keras_mobilenet_v2(folder: Path) -> nn.Module:
    """nsfwjs' network with Keras' one-sided padding; it reads RGB from 0 to 1, and its softmax is left out.

    Weights are bytes, q * scale + min, in the order in which the topology lists them.
    """
    try:
        listed = re.findall(
            r'{name:"([^"]+)",shape:\[([\d,]*)\],dtype:"float32",quantization:{min:([^,]+),scale:([^,]+),dtype:"uint8"}}',
            (folder / "model.min.js").read_text(encoding="utf-8"),
        )
        text = (folder / "group1-shard1of1.min.js").read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"reproduce: --nsfwjs {folder} holds no {Path(error.filename).name}. `npm pack nsfwjs@4.3.0` fetches the "
            "package; give its folder dist/models/mobilenet_v2."
        ) from error
    stored = np.frombuffer(base64.b64decode(max(text.split('"'), key=len)), np.uint8).astype(np.float64)
    values: dict[str, Tensor] = {}
    start = 0
    for name, written, least, step in listed:
        shape = [int(side) for side in written.split(",")]
        value = torch.from_numpy(stored[start : start + np.prod(shape)] * float(step) + float(least)).view(shape)
        start += value.numel()
        if value.ndim == 4:
            value = value.permute(2, 3, 0, 1) if name.endswith("depthwise_kernel") else value.permute(3, 2, 0, 1)
        values[name] = value.T if value.ndim == 2 else value
    network = mobilenet_v2(norm_layer=partial(nn.BatchNorm2d, eps=1e-3))
    network.classifier = nn.Sequential(
        nn.Linear(1280, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 5)
    )
    steps = ["expand", "depthwise", "project"]
    blocks = ["expanded_conv_depthwise", "expanded_conv_project"]
    blocks += [f"block_{i}_{step}" for i in range(1, 17) for step in steps]
    names = [("Conv1", "bn_Conv1"), *((block, f"{block}_BN") for block in blocks), ("Conv_1", "Conv_1_bn")]
    convs = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    fields = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}
    with torch.no_grad():
        for (conv, norm), a, b in zip(names, convs, norms, strict=True):
            a.weight.copy_(values[f"{conv}/{'depthwise_' if conv.endswith('depthwise') else ''}kernel"])
            for field, key in fields.items():
                getattr(b, field).copy_(values[f"{norm}/{key}"])
        for i in (1, 2, 3):
            linear = network.classifier[2 * i - 2]
            linear.weight.copy_(values[f"dense_{i}/kernel"])
            linear.bias.copy_(values[f"dense_{i}/bias"])
    for parent in [m for m in network.modules() if isinstance(m, nn.Sequential)]:
        first = parent[0]
        if isinstance(first, nn.Conv2d) and first.stride == (2, 2):
            first.padding = (0, 0)
            parent.insert(0, nn.ZeroPad2d((0, 1, 0, 1)))
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


def _nsfwjs(folder: Path, root: Path, count: int | None) -> tuple[nn.Module, Images]:
    """nsfwjs' MobileNet-V2 on photographs at 224 px. They have no labels of its, so its own answers count as right."""
    network = keras_mobilenet_v2(folder)
    labels = read_npz(root / "labels.npz", "must hold y_train and y_val.", "y_train", "y_val")

    def prepared(part: str, numbers: np.ndarray, images: int) -> Tensor:
        split = read_split(root, part, numbers)
        chosen = split.take(torch.linspace(0, len(split) - 1, images).long()).images
        assert isinstance(chosen, Tensor)
        return F.interpolate(chosen.permute(0, 3, 1, 2).float() / 255, (224, 224), mode="bilinear")

    calibrate, x = prepared("train", labels[0], PHOTOS // 2), prepared("val", labels[1], min(PHOTOS, count or PHOTOS))
    with torch.no_grad():
        y = torch.cat([network(part).argmax(1) for part in x.split(32)])
    return network, Images(calibrate, x, y)


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Proof:
    """A network, and what became of it."""

    label: str
    exact: float  # relative error without skips in float64
    macs: float  # times those of the residual network
    parameters: float
    exported: float  # relative error of the folded network's ONNX file in float32
    files: dict[Literal[7, 8], Quantized]  # by bits
    official: float | None = None  # largest difference of probabilities to the file that is published

    def cells(self) -> list[str]:
        row = [self.label, f"{self.macs:.2f} / {self.parameters:.2f}", f"{self.exact:.0e}", f"{self.exported:.0e}"]
        before = next((q.accuracy.before for q in self.files.values()), None)
        row.append("-" if before is None else f"{before:.2f}")
        for q in self.files.values():
            assert q.residual is not None
            for a in (q.residual, q.accuracy):
                row.append(f"{a.after:.2f} ({a.after - before:+.2f}; {a.sqnr:.1f} dB)")  # type: ignore[operator]
        return row


HEAD = ["network", "rm: MACs / parameters", "rm, float64", "ONNX, float32", "float"]


def prove(
    label: str, network: nn.Module, images: Images, folder: Path, bits: Sequence[Literal[7, 8]]
) -> tuple[Proof, nn.Module]:
    """Removes the skips, folds, exports and quantises; the files are in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    example = images.calibrate[:8]
    plain = convert(network, "rm", example=example)
    folded = fold(plain, example=example)
    exported = export(folded, folder / "plain.onnx", example=example, force=True)
    files = {
        b: quantize(
            folded, folder / f"int{b}.onnx", calibrate=images.calibrate, test=(images.x, images.y), bits=b,
            residual=network, limit=100.0, force=True,
        )
        for b in bits
    }  # fmt: skip
    files = {b: replace(found, path=Path(found.path).name) for b, found in files.items()}  # not this machine's
    done: Any = plain.conversion
    assert done.cost.before.macs is not None
    return Proof(
        label, done.exact, done.cost.after.macs / done.cost.before.macs, done.cost.growth, exported.error, files
    ), folded


def _tflite(file: Path, x: Tensor, python: Path) -> Tensor:
    """The probabilities of a published .tflite file, by the interpreter of another Python."""
    with tempfile.TemporaryDirectory() as folder:
        given, answers = Path(folder) / "x.npy", Path(folder) / "y.npy"
        np.save(given, x.permute(0, 2, 3, 1).numpy())
        _run(
            [python, "-c", INTERPRETER, file, given, answers],
            f"--python {python} could not run {file.name}",
            "It must be a Python with ai-edge-litert or tensorflow",
        )
        return torch.from_numpy(np.load(answers))


def _tensorflow_js(model: Path, x: Tensor, node: Path) -> Tensor:
    """The probabilities of nsfwjs' published files, by TensorFlow.js."""
    files = [(model / name).resolve() for name in ("model.min.js", "group1-shard1of1.min.js")]
    with tempfile.TemporaryDirectory() as folder:
        given, answers = Path(folder) / "x.bin", Path(folder) / "y.bin"
        x.permute(0, 2, 3, 1).contiguous().numpy().tofile(given)
        _run(
            ["node", "-e", TENSORFLOW_JS, *files, given, answers, x.shape[-1]],
            f"node could not run nsfwjs' network in --node {node}",
            "It must be a folder where `npm install @tensorflow/tfjs` has run",
            cwd=node,
        )
        return torch.from_numpy(np.fromfile(answers, np.float32)).view(len(x), -1)


def _run(command: list[Any], failed: str, way_out: str, cwd: Path | None = None) -> None:
    try:
        ended = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=cwd)
        problem = ended.stderr.strip().splitlines()[-1:] if ended.returncode else None
    except OSError as error:
        problem = [str(error)]
    if problem is not None:
        raise ValueError(f"reproduce: {failed}: {problem}. {way_out}; leave it out to skip the comparison.")


@torch.no_grad()
def _gap(folded: nn.Module, x: Tensor, found: Tensor) -> float:
    """The largest difference of probabilities between a network's and those that its published file gave."""
    return float((torch.cat([folded(part).softmax(1) for part in x.split(64)]) - found).abs().max())


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
                partial(
                    cifar_row,
                    partial(akamaster, depth, trained / f"akamaster_resnet{depth}.safetensors"),
                    normalised=True,
                ),
            )
            for depth in (20, 56)
        },
        "resnet18": (
            "torchvision ResNet-18, 4 classes of Imagenette",
            lambda: _resnet18(settings, root / "imagenette64", folder),
        ),
        "mobilenetv2": (
            "nsfwjs MobileNet-V2, its own answers",
            lambda: _nsfwjs(settings.nsfwjs, root / "imagenette64", settings.images),  # type: ignore[arg-type]
        ),
    }
    all_rows = [name for name in rows if name != "mobilenetv2" or settings.nsfwjs is not None]
    chosen = [name.strip() for name in settings.rows.split(",") if name.strip()] or all_rows
    for name in chosen:
        if name not in rows:
            raise ValueError(f"reproduce: --rows has {name!r}; the networks are {', '.join(rows)}.")
    if "mobilenetv2" in chosen and settings.nsfwjs is None:
        raise ValueError(
            "reproduce: --rows has 'mobilenetv2', which needs --nsfwjs: the folder dist/models/mobilenet_v2 of "
            "nsfwjs 4.3.0, which `npm pack nsfwjs@4.3.0` fetches."
        )
    bits: list[Literal[7, 8]] = [b for b in (7, 8) if str(b) in settings.bits]
    head = [*HEAD, *(f"{b} bits, {kind}" for b in bits for kind in ("residual", "rm"))]
    found: dict[str, Proof] = {}
    lines = [f"| {' | '.join(head)} |", f"|---{'|---:' * (len(head) - 1)}|"]
    notes = []
    for name in chosen:
        label, make = rows[name]
        network, images = make()
        proof, folded = prove(label, network, images, folder / name, bits)
        found[name] = proof
        lines.append(f"| {' | '.join(proof.cells())} |")
        notes.append(f"{label}: {len(images.x):,} test images.")
        if name == "resnet8":
            file = "MLPerf's official float .tflite"
            if settings.python is None:
                notes.append(f"{file} was not run: --python names a Python that has an interpreter.")
                continue
            x = images.x
            theirs = _tflite(trained / "mlperf_tiny_resnet8.tflite", x, settings.python)
        elif name == "mobilenetv2":
            if bits:
                notes.append("It has no labelled images here: what the float network answers counts as right.")
            file = "nsfwjs' published files by TensorFlow.js"
            if settings.node is None:
                notes.append(f"{file} were not run: --node names a folder with @tensorflow/tfjs.")
                continue
            x = images.x[:RUN_AGAIN]
            theirs = _tensorflow_js(settings.nsfwjs.expanduser(), x, settings.node)  # type: ignore[union-attr]
        else:
            continue
        gap = _gap(folded, x, theirs)
        found[name] = replace(proof, official=gap)
        notes.append(
            f"{label}, rm and folded, beside {file}: probabilities of {len(x):,} test images differ by {gap:.1e} at "
            "most."
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
