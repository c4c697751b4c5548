"""What `unskip plainify`, `unskip fold` and `unskip export` do: a network in, a file and its proof out."""

import math
import os
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from unskip._core.files import check_free
from unskip._core.rng import seeded
from unskip.data.config import DataConfig
from unskip.data.feed import DeviceFeed, Feed, WorkerFeed
from unskip.data.sets import DataSet, Split, find_kind, load
from unskip.io import network_file as netfile
from unskip.io.load import LoadedModel, Shape, load_model, note_on_weights
from unskip.methods import resolve_method
from unskip.ship import Exported, Quantized, convert, export, fold, quantize
from unskip.ship.accuracy import LIMIT
from unskip.ship.fold import Form, Refusal, blocks_with_skips
from unskip.ship.int8 import Bits
from unskip.ship.targets import Target, Tflite
from unskip.ship.writing import OPSET
from unskip.surgery import (
    Cost,
    MemoryPlan,
    MemoryPlans,
    UnsupportedBlockError,
    cost,
    memory_variants,
    plainify,
)
from unskip.surgery.cost import on_meta, size

FoldFirst = Literal["auto", "dense", "fast", "no"]
CALIBRATION = 512  # training images


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The network that a command is given, as `unskip.io.load.load_model` takes it."""

    model_spec: str
    weights: Path | None = None  # a state dict for it
    pretrained: bool = False  # whether a name is to have its trained weights
    num_classes: int | None = None  # width of its head; that of the weights, or its own, unless given
    input_size: Shape | str | None = None  # of one input
    seed: int = 0  # of fresh weights

    def load(self, command: str) -> LoadedModel:
        """The network in eval mode. What it reads must be known, since files are made for it."""
        loaded = load_model(
            self.model_spec, weights=self.weights, pretrained=self.pretrained, num_classes=self.num_classes,
            input_size=self.input_size, seed=self.seed, command=command,
        )  # fmt: skip
        if isinstance(loaded.model, torch.jit.ScriptModule):
            raise ValueError(
                f"{command}: {loaded.name} is a ScriptModule, whose layers can't be rewritten; give the module that it "
                "was made from."
            )
        loaded.model.eval()
        if loaded.guessed and size(on_meta(loaded.model), loaded.input_size).macs is None:
            raise ValueError(
                f"{command}: nothing says which size of input {loaded.name} is for; say the shape of one with "
                f"--input-size, for instance {'x'.join(map(str, loaded.input_size))}."
            )
        return loaded

    @property
    def note(self) -> str:
        """What to tell the user about its weights; '' where there is nothing to tell."""
        return note_on_weights(self.model_spec, weights=self.weights, pretrained=self.pretrained, seed=self.seed)


def guess_note(loaded: LoadedModel) -> str:
    """A line that says which input size was guessed; '' where none was."""
    if not loaded.guessed:
        return ""
    return f"Taken for inputs of {'x'.join(map(str, loaded.input_size))}, which is a guess (--input-size).\n"


def example_for(loaded: LoadedModel) -> Tensor:
    """Two random inputs."""
    return torch.randn(2, *loaded.input_size, generator=torch.Generator().manual_seed(1))


def write_network(out: Path, loaded: LoadedModel, *, proof: str, force: bool, command: str) -> int:
    """Writes a network file, which can be given wherever a network is asked for. Returns its bytes."""
    header = netfile.Header(
        network=loaded.registered, name=loaded.name, input_size=loaded.input_size, trained=loaded.trained,
        folded=loaded.folded, data=loaded.data, proof=proof,
    )  # fmt: skip
    return netfile.save(out, loaded.model, header, force=force, command=command)


def parse_options(text: str, *, command: str) -> dict[str, Any]:
    """`{norm = "absorb"}`, a table as TOML writes it on one line."""
    try:
        value = tomllib.loads(f"options = {text}")["options"]
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{command}: --options {text!r} must be a table, for instance '{{norm = \"absorb\"}}'.")
    return value


# ---------------------------------------------------------------- plainify


def plainify_to_file(
    source: ModelSource,
    out: Path | None,
    *,
    method: str = "rm",
    options: dict[str, Any] | None = None,
    limit: float | None = None,
    strict: bool = True,
    dry_run: bool = False,
    force: bool = False,
) -> str:
    """Makes a network skip-free and writes it, or says what it would cost. Returns what to print.

    Args:
        source: the network.
        out: the file; None with `dry_run` alone.
        method: an exact one keeps the function, and is verified; any other is for training from scratch.
        options: the method's own.
        limit: how many times its parameters the network may have after an exact method; its own unless given.
        strict: whether a block that can't be made skip-free is refused; else it stays as it is, and is named.
        dry_run: writes nothing, and says what it would cost.
        force: whether a file that is there may be replaced.
    """
    if out is None and not dry_run:
        raise ValueError(
            "plainify: there is no --out; name a .safetensors file, or ask what it would cost with --dry-run."
        )
    if out is not None:
        netfile.check_path(out, force=force, command="plainify")
    options = dict(options or {})
    if limit is not None:
        options["limit"] = limit
    how = resolve_method(method, options)
    loaded = source.load("plainify")
    example = example_for(loaded)
    try:
        price = cost(loaded.model, how, example=example, strict=strict)
    except UnsupportedBlockError as stuck:
        raise ValueError(f"{stuck.reason} --no-strict leaves such blocks as they are.") from stuck
    if len(price.left) == price.blocks:
        raise ValueError(
            f"plainify: method {method!r} can make no block of {loaded.name} skip-free; --strict says why."
        )
    if out is None or dry_run:
        return f"{guess_note(loaded)}{price}"
    exact = getattr(how, "exact", False)
    if exact:
        hint = getattr(how, "cheaper", "") + ' (--limit, --options "{...}")'
        price.check(getattr(how, "limit", math.inf), "plainify", hint)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of blocks that are left, which the price names
            network = convert(loaded.model, how, example=example, strict=strict)
        proof = str(network.conversion.check)  # type: ignore[union-attr]
    else:
        with warnings.catch_warnings(), seeded(source.seed, 1):
            warnings.simplefilter("ignore")  # the next line says it
            network = plainify(loaded.model, how, strict=strict).eval()
        proof = f"Method {method!r} is for training from scratch: the blocks are new, and the function is another one."
    skips = f" ({len(price.left)} of {price.blocks} blocks keep their skips)" if price.left else ""
    name = f"{loaded.name}, {method}{skips}"
    trained = loaded.trained and how.keeps_weights
    loaded = replace(loaded, name=name, model=network, trained=trained, folded="", registered={})
    written = write_network(out, loaded, proof=proof, force=force, command="plainify")
    end = f"{out}: {name}, {price.after.parameters:,} parameters, {written:,} bytes."
    return f"{guess_note(loaded)}{price}\n\n{proof}\n\n{end}"


def plan_memory(
    model_specs: Sequence[str], *, num_classes: int | None, input_size: str | None, in_place: bool
) -> MemoryPlans:
    """The memory plans of networks and of what they can become, side by side."""
    found: dict[str, MemoryPlan | str] = {}
    for spec in model_specs:
        loaded = ModelSource(model_spec=spec, num_classes=num_classes, input_size=input_size).load("plan")
        found |= memory_variants(loaded.model, example_for(loaded), name=loaded.name, in_place=in_place).plans
    return MemoryPlans(found)


# ---------------------------------------------------------------- fold


def fold_to_file(source: ModelSource, out: Path, *, form: Form = "dense", force: bool = False) -> str:
    """Folds a network into a file. Returns what to print."""
    netfile.check_path(out, force=force, command="fold")
    given = source.load("fold")
    loaded = _folded(given, form)
    before, after = (size(on_meta(s.model), s.input_size) for s in (given, loaded))
    price = Cost(before=before, after=after, shape=given.input_size)
    check = loaded.model.folding.check  # type: ignore[union-attr]
    written = write_network(out, loaded, proof=str(check), force=force, command="fold")
    end = f"{out}: {loaded.name}, {after.parameters:,} parameters, {written:,} bytes."
    return f"{guess_note(loaded)}{price}\n\n{check}\n\n{end}"


def _folded(loaded: LoadedModel, form: Form) -> LoadedModel:
    folded = fold(loaded.model, form, example=example_for(loaded))
    return replace(loaded, name=f"{loaded.name}, folded ({form})", model=folded, folded=form, registered={})


# ---------------------------------------------------------------- export


@dataclass(frozen=True, kw_only=True)
class Int8:
    """How a file in 8 bits is made."""

    data: str  # digits, or the path of a data set as `unskip train` reads it
    inputs: int = CALIBRATION  # training images to calibrate on
    bits: Bits = 7
    limit: float = LIMIT  # points of accuracy


def int8_of(asked: bool, data: str | None, *, inputs: int, bits: int, limit: float) -> Int8 | None:
    """From the words of a command line."""
    if asked and data is None:
        raise ValueError(
            "export: --int8 needs --calibrate: digits, an .npz file, or a folder, with images like those that the "
            "network will see."
        )
    if data is not None and not asked:
        raise ValueError(f"export: --calibrate {data!r} is for --int8; add it, or leave both out.")
    return None if data is None else Int8(data=data, inputs=inputs, bits=bits, limit=limit)  # type: ignore[arg-type]


def export_to_file(
    source: ModelSource,
    out: Path,
    *,
    method: str = "",
    keep_skips: bool = False,
    form: FoldFirst = "auto",
    target: str | None = None,
    opset: int | None = None,
    int8: Int8 | None = None,
    force: bool = False,
) -> tuple[str, Exported | Quantized]:
    """Exports a network. Returns what was done before, in words, and what was written.

    Args:
        source: the network.
        out: the file, `.onnx` or `.pt2`, or what the target's tools write.
        method: an exact one, by which skips are removed first.
        keep_skips: whether a network with skips may be written; else it is an error.
        form: how it is folded first; 'auto' is dense where it can be folded.
        target: a device's tool chain, of `unskip.ship.targets.TARGETS`.
        opset: of ONNX, `unskip.ship.writing.OPSET` unless given.
        int8: makes it a file in 8 bits.
        force: whether a file that is there may be replaced.
    """
    if form not in get_args(FoldFirst):
        raise ValueError(f"export: --fold {form!r} must be {', '.join(get_args(FoldFirst))}.")
    if int8 is not None and target not in (None, "onnx", "tflite"):
        raise ValueError(f"export: --int8 is for ONNX and for --target tflite, and not for --target {target}.")
    opset = OPSET if opset is None else opset
    check_free(out, command="export", argument="--out", force=force, overwrite="--force")
    loaded = given = _without_skips(source.load("export"), method, keep_skips)
    words = given.name
    if form in get_args(Form):
        loaded = _folded(given, form)  # type: ignore[arg-type]
    elif form == "auto" and not loaded.folded:
        try:
            loaded = _folded(given, "dense")
        except Refusal as reason:
            words = f"{given.name}, as it is ({reason})"
    if loaded is not given:
        before, after = (sum(p.numel() for p in s.model.parameters()) for s in (given, loaded))
        words = f"{loaded.name}: {before:,} parameters before, {after:,} now"
    device: str | Target | None = target
    metadata = None
    if int8 is not None:
        calibrate, test, metadata = _prepared(loaded, int8)
        if target == "tflite":
            device = Tflite(calibrate=calibrate, test=test, limit=int8.limit)
    if int8 is None or isinstance(device, Tflite):
        example = example_for(loaded)
        return words, export(
            loaded.model, out, example=example, target=device, opset=opset, metadata=metadata, force=force
        )
    quantized = quantize(
        loaded.model, out, calibrate=calibrate, test=test, bits=int8.bits, limit=int8.limit, opset=opset,
        metadata=metadata, force=force,
    )  # fmt: skip
    return words, quantized


def _without_skips(loaded: LoadedModel, method: str, keep_skips: bool) -> LoadedModel:
    """The network, converted by the exact method if there is one; refused where skips stay and may not."""
    if method:
        model = convert(loaded.model, method, example=example_for(loaded), strict=not keep_skips)
        loaded = replace(loaded, name=f"{loaded.name}, {method}", model=model, registered={})
    kept = [path for path, _ in blocks_with_skips(loaded.model)]
    kept += getattr(getattr(loaded.model, "surgery", None), "left", ())
    if kept and not keep_skips:
        raise ValueError(
            f"export: {loaded.name} keeps {len(kept)} skip connections ({kept[0]!r} first). --method rm removes them "
            "and keeps the function; --keep-skips writes the network as it is."
        )
    return loaded


def _prepared(loaded: LoadedModel, int8: Int8) -> tuple[Tensor, Iterator[tuple[Tensor, Tensor]], dict[str, str]]:
    """Training images to calibrate on, test images with their classes, and how both were normalised."""
    if int8.inputs < 1:
        raise ValueError(f"export: --calibration-images {int8.inputs} must be at least 1.")
    data, feed = _feed(loaded, int8.data)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))[: int8.inputs]
    images = torch.cat([x for x, _ in _real(feed, data.train.take(order))])
    outputs = loaded.model(images[:1]).shape[-1]
    if data.classes > outputs:
        raise ValueError(f"export: {int8.data!r} has {data.classes} classes, and {loaded.name} knows {outputs}.")
    metadata = {name: ", ".join(f"{v:.6g}" for v in getattr(data, name)) for name in ("mean", "std")}
    return images, _real(feed, data.test), metadata


def _feed(loaded: LoadedModel, data_spec: str) -> tuple[DataSet, Feed]:
    """A data set as the network's run has read it or, for a network by name, brought to its size."""
    root = None if data_spec == "digits" else Path(data_spec).expanduser()
    if root is not None and not root.exists():
        raise ValueError(f"export: --calibrate {data_spec!r} is not 'digits', and there is no such file or folder.")
    if loaded.data:
        config = DataConfig.from_tables({"data": loaded.data}, "data", f"export: the recipe of {loaded.name}")
        if (root is None) != (config.dataset == "digits"):
            right = "digits" if root is not None else "the file or folder with them"
            raise ValueError(
                f"export: {loaded.name} was trained on {config.dataset}, and is calibrated on images of the same "
                f"set, prepared as they were: give --calibrate {right} instead of {data_spec!r}. From Python, "
                "unskip.ship.quantize takes any tensor."
            )
    else:
        kind = "digits" if root is None else find_kind(root)
        if kind is None:
            raise ValueError(
                f"export: --calibrate {data_spec!r} is no data set that `unskip train` reads: an .npz file, CIFAR, "
                "Fashion-MNIST, or a folder with train/<class> and val/<class>."
            )
        config = DataConfig(dataset=kind, val_fraction=0.0)
    side = loaded.input_size[-1]
    config = replace(
        config, image_size=side, check_files=False, mixup=0.0, cutmix=0.0,
        workers=min(config.workers, os.cpu_count() or 1),  # that run may have had more cores; PyTorch would warn
    )  # fmt: skip
    data = load(config, root, option="--calibrate")
    if (data.channels, data.image_size, data.image_size) != loaded.input_size:
        raise ValueError(
            f"export: {loaded.name} reads inputs of shape {loaded.input_size}, and the images of --calibrate "
            f"{data_spec!r} have {data.channels} channels; from Python, unskip.ship.quantize takes any tensor."
        )
    # Of a folder of files only those are read that are asked for.
    reads = DeviceFeed if data.in_memory else WorkerFeed
    return data, reads(data, config, batch=1)


def _real(feed: Feed, split: Split) -> Iterator[tuple[Tensor, Tensor]]:
    """All images of a split once, without what fills up the last batch."""
    for x, labels, weights in feed.evaluation(split):
        yield x[weights > 0], labels[weights > 0]
