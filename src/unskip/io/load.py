"""One loader: a network by name, from a run, a network file, a checkpoint, the package's weights or a function."""

import math
import os
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import timm
import torchvision
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from unskip._core.errors import reason
from unskip._core.limits import MemoryGuard, check_file, check_memory
from unskip._core.rng import seeded
from unskip.io.network_file import MALFORMED, WEIGHTS_ALONE, build_registered, check_size, read_header, read_network
from unskip.io.torch_file import FORMAT, read_torch_file
from unskip.methods import resolve_method
from unskip.models import ENTRIES
from unskip.models.build import NetworkConfig, build_network, import_object, same_kind, split_options
from unskip.models.weights import names_with_weights
from unskip.surgery import UnsupportedBlockError, plainify
from unskip.surgery.cost import guessed_shape

Shape = tuple[int, ...]
WEIGHT_FILES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
WRAPPERS = ("module.", "_orig_mod.")  # what DDP and torch.compile put before a weight's name


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A network and what a command needs to know about it."""

    name: str
    model: nn.Module
    input_size: Shape  # of one input, without the batch; () where it is not known
    guessed: bool = False  # whether the input size is a guess
    trained: bool = False  # whether its weights come from a file, a run or `--pretrained`
    folded: str = ""  # the form, where `fold` has made it
    data: dict[str, Any] = field(default_factory=dict)  # the [data] table of the recipe that it was trained with
    registered: dict[str, Any] = field(default_factory=dict)  # its name and options, where these build it as it is


def load(
    spec: str | Path,
    *,
    method: str = "",
    weights: str | Path | None = None,
    pretrained: bool = False,
    num_classes: int | None = None,
    seed: int = 0,
) -> nn.Module:
    """The network that `spec` names; in eval mode where its weights are trained.

    Args:
        spec: a name of `unskip models` or of timm (also `timm:NAME`), `torchvision:NAME`, each also with options
            (`resnet20:num_classes=100`, `resnet34:method=pnnh,channels=[48,96,192,384]`); the folder of a run of
            `unskip train`, with the weights that were tested; its checkpoint.pt; a network file of `unskip plainify` or
            `unskip fold`, or weights of the package (.safetensors); or `package.module:function`, which is imported and
            called. Files run no code.
        method: makes the network skip-free with this method.
        weights: a file with a state dict for it: .safetensors, or what torch.save wrote (`weights_only=True`).
        pretrained: takes the trained weights that a name has, the package's or timm's.
        num_classes: width of its head; unless given that of the weights, or the network's own.
        seed: of its weights, where none are given.

    Example:
        >>> net = unskip.load("pnnh_resnet20_wide", pretrained=True)  # also the folder of a run, or a file
        >>> net(torch.zeros(2, 3, 32, 32)).shape  # (B, C, H, W) -> (B, classes)
        torch.Size([2, 10])
        >>> net.training
        False
    """
    file = None if weights is None else Path(weights)
    loaded = _load(str(spec), method, file, pretrained, num_classes, seed, "load")
    return loaded.model.eval() if loaded.trained else loaded.model


def load_model(
    model_spec: str,
    *,
    method: str = "",
    weights: Path | None = None,
    pretrained: bool = False,
    num_classes: int | None = None,
    input_size: Shape | str | None = None,
    seed: int = 0,
    command: str = "doctor",
) -> LoadedModel:
    """What a command is given as its network, with all that it needs to know about it.

    Args:
        model_spec: as in `load`, and so are method, weights, pretrained, num_classes and seed.
        input_size: of one input, for instance "3x32x32"; without it what the network says about itself, or a guess.
        command: who asks, for messages.
    """
    if seed < 0:
        raise ValueError(f"{command}: --seed {seed} must not be negative.")
    shape = parse_shape(input_size, command=command) if isinstance(input_size, str) else input_size
    loaded = _load(model_spec, method, weights, pretrained, num_classes, seed, command)
    if shape is not None:
        return replace(loaded, input_size=shape, guessed=False)
    if not loaded.input_size:
        raise ValueError(
            f"{command}: {model_spec!r} does not say what it reads, and its first layer does not tell. Say the shape "
            "of one input with --input-size, for instance 3x32x32; a network that reads token numbers or several "
            "tensors can be looked at from Python, with unskip.diagnose(net, batch)."
        )
    return loaded


def _load(
    model_spec: str,
    method: str,
    weights: Path | None,
    pretrained: bool,
    num_classes: int | None,
    seed: int,
    command: str,
) -> LoadedModel:
    if pretrained:
        _check_pretrained(model_spec, weights, command)
    loaded = _made(model_spec, method, pretrained, num_classes, seed, command)
    if weights is not None:
        state = _bare(_state_dict(weights, command))
        if num_classes is None and (width := head_width(loaded.model, state)) is not None:
            with suppress(ValueError):  # a network of the user's may take no width; then its weights don't fit
                loaded = _made(model_spec, method, pretrained, width, seed, command)
        _load_weights(loaded.model, state, weights, model_spec, command)
        loaded = replace(loaded, trained=True)
    return loaded


def _made(
    model_spec: str, method: str, pretrained: bool, num_classes: int | None, seed: int, command: str
) -> LoadedModel:
    """The network of a spec, skip-free where a method is given, before weights are loaded."""
    loaded = _from_spec(model_spec, seed, command, pretrained=pretrained, num_classes=num_classes)
    if method:
        try:
            with seeded(seed, 1):  # not the numbers that the stem has been drawn from
                model = plainify(loaded.model, method)
        except UnsupportedBlockError as stuck:
            raise ValueError(
                f"{stuck.reason} `unskip plainify {model_spec} --method {method} --no-strict -o FILE` leaves such "
                f"blocks as they are, and {command} takes the file."
            ) from stuck
        trained = loaded.trained and resolve_method(method, {}).keeps_weights
        loaded = replace(loaded, name=f"{loaded.name}, {method}", model=model, trained=trained, registered={})
    return loaded


def head_width(model: nn.Module, state: dict[str, Tensor]) -> int | None:
    """The number of classes of the weights in `state`, where the model differs from them in its head's width alone."""
    own = model.state_dict()
    pairs = [(own[key].shape, value.shape) for key, value in state.items() if key in own]
    different = {(a[0], b[0]) for a, b in pairs if a != b and len(a) == len(b) and a[1:] == b[1:] and len(a)}
    if own.keys() != state.keys() or len(different) != 1 or any(a != b and a[1:] != b[1:] for a, b in pairs):
        return None
    return different.pop()[1]


def parse_shape(text: str, *, command: str) -> Shape:
    """`3x32x32` as (3, 32, 32)."""
    if not re.fullmatch(r"[1-9]\d{,17}([x,][1-9]\d{,17})*", text):
        raise ValueError(f"{command}: --input-size {text!r} must be whole numbers, for instance 3x32x32 or 784.")
    shape = tuple(int(part) for part in re.split("[x,]", text))
    check_memory(4 * math.prod(shape), f"{command}: an input of --input-size {text:.40}")
    return shape


def note_on_weights(model_spec: str, *, weights: Path | None, pretrained: bool, seed: int) -> str:
    """What to tell the user of a name whose trained weights were not asked for; '' where there is nothing to tell."""
    name = split_options(model_spec)[0].removeprefix("timm:")
    if pretrained or weights is not None or _file_of(model_spec) is not None or not _has_weights(name):
        return ""
    return f"Note: random weights (seed {seed}); {name} has trained ones: --pretrained."


def _has_weights(name: str) -> bool:
    return name in names_with_weights() if name in ENTRIES else timm.is_model_pretrained(name)


def _check_pretrained(model_spec: str, weights: Path | None, command: str) -> None:
    """Refuses --pretrained for whatever has its weights from elsewhere."""
    if weights is not None:
        raise ValueError(f"{command}: --pretrained and --weights {weights} both say which weights; leave one out.")
    if _file_of(model_spec) is not None:
        raise ValueError(f"{command}: {model_spec!r} has its own weights; leave --pretrained out, which is for names.")
    name = split_options(model_spec)[0].removeprefix("timm:")
    if ":" in name or (name not in ENTRIES and timm.is_model(name) and not _has_weights(name)):
        raise ValueError(
            f"{command}: nobody knows trained weights for {model_spec!r} (--pretrained). It is for names of `unskip "
            "models` and of timm that have some; give a file of weights with --weights FILE."
        )


def _file_of(model_spec: str) -> Path | None:
    """The file that a spec stands for, None where it is a name. Functions of `os`, since a spec may be no path."""
    path = os.path.expanduser(model_spec)
    inside = (os.path.join(path, name) for name in ("network.safetensors", "checkpoint.pt"))
    return next((Path(file) for file in (*inside, path) if os.path.isfile(file)), None)


def _from_spec(
    model_spec: str, seed: int, command: str, *, pretrained: bool, num_classes: int | None = None
) -> LoadedModel:
    file, path = _file_of(model_spec), os.path.expanduser(model_spec)
    if num_classes is not None and (file is not None or num_classes < 1):
        why = f"{model_spec!r} has a head of its own" if file is not None else "it must be at least 1"
        raise ValueError(f"{command}: --num-classes {num_classes}: {why}; leave it out.")
    is_folder = os.path.isdir(path)
    if file is not None:
        return _from_file(file, command) if file.suffix == ".safetensors" else _from_run(file, is_folder, command)
    if is_folder and not timm.is_model(model_spec):
        raise ValueError(f"{command}: the folder {model_spec!r} holds no checkpoint.pt of a run of `unskip train`.")
    if os.path.exists(path) and not is_folder:
        raise ValueError(f"{command}: {model_spec!r} is neither a file nor a folder.")
    if path.endswith(WEIGHT_FILES) or "/" in model_spec:
        raise ValueError(f"{command}: there is no file {model_spec!r:.200}.")
    name, options = split_options(model_spec, command)
    name = name.removeprefix("timm:")
    if ":" in name and not name.startswith("torchvision:"):
        return _from_function(model_spec, seed, command, num_classes)
    if num_classes is not None and options.setdefault("num_classes", num_classes) != num_classes:
        raise ValueError(f"{command}: {model_spec!r} and --num-classes {num_classes} differ; leave one out.")
    with seeded(seed):
        model = _built(name, options, pretrained, command)
    return LoadedModel(
        name=model_spec.removeprefix("timm:").replace("torchvision:", "torchvision "),
        model=model,
        input_size=_input_size(name, model, options),
        trained=pretrained,
        registered={"model": name, "options": options},
    )


# ---------------------------------------------------------------- names and functions


def _built(name: str, options: dict[str, Any], pretrained: bool, command: str) -> nn.Module:
    """A registered network. timm's trained weights are downloaded, or lie in its cache."""
    guard = MemoryGuard(f"{command}: {name!r} with these options") if options else nullcontext()
    try:
        with guard:
            return build_registered(name, options, pretrained=pretrained)
    except ValueError:
        raise  # a sentence of ours
    except Exception as error:  # a download fails in many ways, and so does a builder with values it did not expect
        why = " ".join(str(error).split())
        if pretrained:
            raise ValueError(
                f"{command}: timm's weights for {name!r} (--pretrained) can't be had: {type(error).__name__}: {why} "
                "Give a file of weights with --weights FILE."
            ) from error
        if not options:
            raise
        given = ",".join(f"{key}={value}" for key, value in options.items())
        raise ValueError(
            f"{command}: {name!r} can't be built with {given!r}: {reason(error)}. Leave that option out."
        ) from error


def _input_size(name: str, model: nn.Module, options: dict[str, Any]) -> Shape:
    """What a registered network reads."""
    if name.startswith("torchvision:"):
        weights = torchvision.models.get_model_weights(name.removeprefix("torchvision:"))
        side = getattr(weights.DEFAULT.transforms(), "crop_size", [224])[0]
        return (3, side, side)
    size = ENTRIES[name].input_size if name in ENTRIES else _timm_size(model)
    if len(size) == 1 and "context" in options:  # a text as long as the network reads
        return (options["context"],)
    return (options["in_chans"], *size[1:]) if size and "in_chans" in options else size


def _timm_size(model: nn.Module) -> Shape:
    about = getattr(model, "pretrained_cfg", None)
    return tuple(about.get("input_size") or ()) if isinstance(about, dict) else ()


def _from_function(model_spec: str, seed: int, command: str, num_classes: int | None) -> LoadedModel:
    """What `package.module:function` returns, or the network of that name."""
    given = {} if num_classes is None else {"num_classes": num_classes}
    try:
        build = import_object(model_spec)
    except ValueError as error:
        raise ValueError(f"{command}: {error}") from error
    with seeded(seed):  # after the import, which may draw numbers of its own
        model = build if isinstance(build, nn.Module) and not given else _call(build, model_spec, command, given)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{command}: {model_spec!r} gave {type(model).__name__!r}, not an nn.Module.")
    size = _timm_size(model)
    return LoadedModel(name=model_spec, model=model, input_size=size or guessed_shape(model), guessed=not size)


def _call(build: Callable[..., Any], model_spec: str, command: str, given: dict[str, int]) -> Any:
    try:
        return build(**given)
    except Exception as error:  # it is the user's own code
        how = ", ".join(f"{name}={value}" for name, value in given.items()) or "without arguments"
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{command}: {model_spec!r} failed when it was called {how}: {why}.") from error


# ---------------------------------------------------------------- files


def _from_run(path: Path, tested: bool, command: str) -> LoadedModel:
    """The network of a run of `unskip train`: with the weights that were tested, or with those of its checkpoint."""
    state = read_torch_file(path, command=command, way_out=WEIGHTS_ALONE)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{command}: {path} is no checkpoint of `unskip train`. {WEIGHTS_ALONE}")
    if state.get("own"):
        raise ValueError(
            f"{command}: {path} is of a run with a network of your own, {state['own']}, which only you can build. "
            f"Build it in Python, load {path.parent / 'weights.safetensors'} into it, and go on with unskip.export, "
            "unskip.fold or unskip.diagnose."
        )
    where = f"{command}: the recipe in {path}"
    try:
        config = NetworkConfig.from_tables(state["recipe"], "network", where)
        # What was fine-tuned needs no pretrained weights, since its own are loaded next.
        options = {k: v for k, v in config.options.items() if k != "pretrained"}
        config = replace(config, options=options, pretrained=False, init_from="")
        size, weights, classes = tuple(state["input_size"]), state["network"], state["data"]["classes"]
        about = _preparation(state.get("preparation", {}), size)
        check_size(size)
        if not is_state_dict(weights):
            raise ValueError("its field 'network' is no state dict.")
        if type(classes) is not int or classes < 1:
            raise ValueError(f"data['classes']={classes!r:.40} is no number of classes.")
        with seeded(0), MemoryGuard("its network"):
            model = build_network(config, num_classes=classes, in_chans=size[0])
    except MALFORMED as error:
        if isinstance(error, ValueError):
            raise ValueError(f"{where}: {str(error).removeprefix(f'{where}: ')} {WEIGHTS_ALONE}") from error
        words = "there is no " if isinstance(error, KeyError) else f"{type(error).__name__}: "
        raise ValueError(f"{where} can't be understood: {words}{reason(error)}. {WEIGHTS_ALONE}") from error
    name = f"{config} of {path.parent.name or path}"
    if tested and (path.parent / "weights.safetensors").is_file():
        path = path.parent / "weights.safetensors"
        weights = _state_dict(path, command)
    elif tested and state.get("ema") is not None:
        weights = state["ema"]
        if not is_state_dict(weights):
            raise ValueError(f"{where}: its field 'ema' is no state dict. {WEIGHTS_ALONE}")
    _load_weights(model, weights, path, config.model, command)
    known = getattr(model, "pretrained_cfg", None) or {}
    model.pretrained_cfg = {**known, **about, "input_size": size}  # type: ignore[assignment]
    return LoadedModel(name=name, model=model, input_size=size, trained=True, data=state["recipe"].get("data", {}))


def _preparation(found: Any, size: Shape) -> dict[str, Any]:
    """How a run prepared its images, in fields of timm's `pretrained_cfg` that were checked; older runs have none."""
    if not isinstance(found, dict):
        raise ValueError(f"preparation={found!r:.40} is no table.")
    about: dict[str, Any] = {}
    for name, kind, length in (("mean", float, size[0]), ("std", float, size[0]), ("label_names", str, None)):
        values = found.get(name, [])
        right = isinstance(values, list) and all(isinstance(value, kind) for value in values)
        if not right or (values and length not in (None, len(values))):
            raise ValueError(f"preparation[{name!r}]={values!r:.40} can't be right.")
        about |= {name: tuple(values)} if values else {}
    if isinstance(crop := found.get("crop_pct"), float) and crop > 0:
        about |= {"crop_pct": crop, "interpolation": "bicubic"}
    return about


def _from_file(path: Path, command: str) -> LoadedModel:
    """The network of a safetensors file: what `unskip plainify` or `unskip fold` wrote, or weights of the package."""
    header = read_header(path, command=command)
    if header is None:
        raise ValueError(f"{command}: {path} holds weights alone, and does not say of which network. {WEIGHTS_ALONE}")
    model = read_network(path, header, command=command)
    return LoadedModel(
        name=header.name,
        model=model,
        input_size=header.input_size or _input_size(header.name, model, {}),
        trained=header.trained,
        folded=header.folded,
        data=header.data,
        registered={} if "graph" in header.network else header.network,
    )


def _state_dict(path: Path, command: str) -> dict[str, Tensor]:
    """The tensors of a file: a state dict, or one inside what a training script has saved."""
    way_out = "A file of weights is a state dict, saved with torch.save(net.state_dict(), path) or as safetensors."
    check_file(path, command, expansion=2)
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{command}: {path} can't be read as safetensors: {error}. {way_out}") from error
    state = read_torch_file(path, command=command, way_out=way_out)
    for key in ("state_dict", "model_state_dict", "model", "network"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not is_state_dict(state):
        raise ValueError(f"{command}: {path} holds no state dict. {way_out}")
    return state


def is_state_dict(state: Any) -> TypeGuard[dict[str, Tensor]]:
    """Whether these are tensors by name."""
    tensors = isinstance(state, dict) and state and all(isinstance(value, Tensor) for value in state.values())
    return bool(tensors) and all(isinstance(key, str) for key in state)


def weights_from(spec: str, *, command: str) -> dict[str, Tensor]:
    """The weights of a run (those that were tested), of a checkpoint, of a network file, or of a file of weights."""
    file = _file_of(spec)
    if file is None:
        raise ValueError(
            f"{command}: there is no file or run {spec!r} to take weights from (--init-from). Give the folder of a "
            "run, its checkpoint.pt, a network file, or a file of weights."
        )
    ours = file.suffix == ".safetensors" and read_header(file, command=command) is not None
    if ours or file.name == "checkpoint.pt":
        return _load(spec, "", None, False, None, 0, command).model.state_dict()
    return _bare(_state_dict(file, command))


def _bare(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without what wrappers put before its names."""
    return {re.sub(rf"^({'|'.join(map(re.escape, WRAPPERS))})+", "", key): value for key, value in state.items()}


def _load_weights(model: nn.Module, state: dict[str, Tensor], path: Path, name: str, command: str) -> None:
    state, own = _bare(state), model.state_dict()
    odd = next((key for key in own if key in state and not same_kind(own[key], state[key])), None)
    if odd is not None:
        raise ValueError(f"{command}: {path} does not fit {name!r}: {odd!r} is complex, sparse or quantised.")
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{command}: {path} does not fit {name!r}: {why[:400]}") from error
