"""A network from a word of the command line: a name, a factory, a checkpoint."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import timm
import torchvision
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from unskip._core.rng import seeded
from unskip._core.text import nearest
from unskip.io import network_file as netfile
from unskip.io.torch_file import FORMAT, read_torch_file
from unskip.methods import resolve_method
from unskip.models import ENTRIES, create_model
from unskip.models.build import NetworkConfig, build_network, import_object
from unskip.models.weights import Weights, names_with_weights
from unskip.surgery import UnsupportedBlockError, plainify

Shape = tuple[int, ...]
WEIGHT_FILES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
GUESSED_SIDE = 32  # px, of images for a convolutional network that does not say what it reads
GUESSED_STEPS = 32  # of a sequence, likewise
OTHER_WEIGHTS = "To look at other weights name their network, and give the file with --weights."
WRAPPERS = ("module.", "_orig_mod.")  # what DDP and torch.compile put before a weight's name


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A network to look at."""

    name: str
    network: nn.Module
    input_size: Shape  # of one input, without the batch
    guessed: bool = False  # whether nobody said the input size
    trained: bool = False  # whether its weights come from a file, a run or `--pretrained`
    origin: dict[str, Any] = field(default_factory=dict)  # how to build it again (unskip.io.network_file)
    steps: tuple[netfile.Step, ...] = ()  # what was done to it since


def load_network(
    word: str,
    *,
    method: str = "",
    weights: Path | None = None,
    pretrained: bool = False,
    input_size: Shape | None = None,
    seed: int = 0,
    tested: bool = False,
    command: str = "doctor",
) -> LoadedModel:
    """A network by name, factory or checkpoint.

    Args:
        word: a name of `unskip models` or of timm, `timm:NAME`, `torchvision:NAME`, `package.module:function`,
            a checkpoint (or the folder) of a run of `unskip train`, what `unskip plainify` or `unskip fold` wrote, or
            weights of the package.
        method: makes the network skip-free with this method.
        weights: a file with a state dict for it.
        pretrained: takes the trained weights that a name has, of the package or of timm.
        input_size: of one input; without it what the network says about itself, or a guess.
        seed: of its weights.
        tested: of a run that has ended, the weights that were tested: the best or averaged ones, if the recipe says so.
        command: who asks, for messages.
    """
    if pretrained:
        _check_pretrained(word, weights, command)
    subject = _build(word, seed, tested, command, pretrained=pretrained)
    if method:
        try:
            with seeded(seed, 1):  # not the numbers that the stem has been drawn from
                network = plainify(subject.network, method)
        except UnsupportedBlockError as stuck:
            raise ValueError(
                f"{stuck.reason} `unskip plainify {word} --method {method} --no-strict -o FILE` leaves such blocks as "
                f"they are, and {command} takes the file."
            ) from stuck
        steps = (*subject.steps, {"plainify": method, "options": {}})
        trained = subject.trained and resolve_method(method, {}).keeps_weights
        subject = replace(subject, name=f"{subject.name}, {method}", network=network, steps=steps, trained=trained)
    if weights is not None:
        _load_weights(subject.network, _state_dict(weights, command), weights, word, command)
        subject = replace(subject, trained=True)
    if input_size is not None:
        return replace(subject, input_size=input_size, guessed=False)
    if not subject.input_size:
        raise ValueError(
            f"{command}: {word!r} does not say what it reads, and its first layer does not tell. Say the shape of one "
            "input with --input-size, for instance 3x32x32; a network that reads token numbers or several tensors can "
            "be looked at from Python, with unskip.diagnose(net, batch)."
        )
    return subject


def parse_shape(text: str, *, command: str) -> Shape:
    """`3x32x32` as (3, 32, 32)."""
    if not re.fullmatch(r"[1-9]\d*([x,][1-9]\d*)*", text):
        raise ValueError(f"{command}: --input-size {text!r} must be whole numbers, for instance 3x32x32 or 784.")
    return tuple(int(part) for part in re.split("[x,]", text))


def note_on_weights(word: str, *, weights: Path | None, pretrained: bool, seed: int) -> str:
    """What to tell the user of a name whose trained weights were not asked for; '' where there is nothing to tell."""
    name = word.removeprefix("timm:")
    if pretrained or weights is not None or _file_of(word) is not None or not _has_weights(name):
        return ""
    return f"Note: random weights (seed {seed}); {name} has trained ones: --pretrained."


def _has_weights(name: str) -> bool:
    return name in names_with_weights() if name in ENTRIES else timm.is_model_pretrained(name)


def _check_pretrained(word: str, weights: Path | None, command: str) -> None:
    """Refuses --pretrained for whatever has its weights from elsewhere."""
    if weights is not None:
        raise ValueError(f"{command}: --pretrained and --weights {weights} both say which weights; leave one out.")
    if _file_of(word) is not None:
        raise ValueError(f"{command}: {word!r} has its own weights; leave --pretrained out, which is for names.")
    name = word.removeprefix("timm:")
    if ":" in name or (name not in ENTRIES and timm.is_model(name) and not _has_weights(name)):
        raise ValueError(
            f"{command}: nobody knows trained weights for {word!r} (--pretrained). It is for names of `unskip models` "
            "and of timm that have some; give a file of weights with --weights FILE."
        )


def _file_of(word: str) -> Path | None:
    """The file that a word stands for, None where it is a name."""
    path = Path(word).expanduser()
    return next((file for file in (path / "checkpoint.pt", path) if file.is_file()), None)


def _build(word: str, seed: int, tested: bool, command: str, *, pretrained: bool = False) -> LoadedModel:
    file = _file_of(word)
    if file is not None:
        of_file = (
            _from_safetensors(file, command) if file.suffix == ".safetensors" else _from_run(file, tested, command)
        )
        return replace(of_file, trained=True)
    path = Path(word).expanduser()
    if path.is_dir() and not timm.is_model(word):
        raise ValueError(f"{command}: the folder {word!r} holds no checkpoint.pt of a run of `unskip train`.")
    if path.suffix in WEIGHT_FILES or "/" in word:
        raise ValueError(f"{command}: there is no file {word!r}.")
    name = word.removeprefix("timm:")
    if ":" in name:
        subject = _from_factory(word, seed, command)
    else:
        subject = _from_name(name, seed, command, pretrained=pretrained)
    return replace(subject, origin={"word": word, "seed": seed})


def _from_name(name: str, seed: int, command: str, *, pretrained: bool = False) -> LoadedModel:
    with seeded(seed):
        network = _pretrained(name, command) if pretrained else create_model(name)
    size = ENTRIES[name].input_size if name in ENTRIES else _timm_size(network) or ()
    origin = {"word": name, "seed": seed}
    return LoadedModel(name=name, network=network, input_size=size, trained=pretrained, origin=origin)


def _pretrained(name: str, command: str) -> nn.Module:
    """A name with its trained weights; those of timm's names are downloaded, or lie in its cache."""
    try:
        return create_model(name, pretrained=True)
    except Exception as error:  # a download fails in many ways
        if name in ENTRIES or not timm.is_model(name):
            raise  # a sentence of ours
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{command}: timm's weights for {name!r} (--pretrained) can't be had: {type(error).__name__}: {reason} "
            "Give a file of weights with --weights FILE."
        ) from error


def _is_factory(word: str) -> bool:
    return ":" in word and not word.startswith(("timm:", "torchvision:"))


def _timm_size(network: nn.Module) -> Shape | None:
    about = getattr(network, "pretrained_cfg", None)
    size = about.get("input_size") if isinstance(about, dict) else None
    return tuple(size) if size else None


def _from_factory(word: str, seed: int, command: str) -> LoadedModel:
    """`torchvision:NAME` or `package.module:function`."""
    module_name, _, name = word.partition(":")
    if module_name == "torchvision":
        known = torchvision.models.list_models()
        if name not in known:
            raise ValueError(f"{command}: torchvision has no network {name!r}.{nearest(name, known)}")
        with seeded(seed):
            network = torchvision.models.get_model(name, weights=None)
        transforms = torchvision.models.get_model_weights(name).DEFAULT.transforms()
        side = getattr(transforms, "crop_size", [224])[0]
        return LoadedModel(name=f"torchvision {name}", network=network, input_size=(3, side, side))
    try:
        build = import_object(word)
    except ValueError as error:
        raise ValueError(f"{command}: {error}") from error
    with seeded(seed):  # after the import, which may draw numbers of its own
        network = build if isinstance(build, nn.Module) else _call(build, word, command)
    if not isinstance(network, nn.Module):
        raise ValueError(f"{command}: {word!r} gave {type(network).__name__!r}, not an nn.Module.")
    if network.__class__.__module__.startswith("torchvision.models."):
        return LoadedModel(name=word, network=network, input_size=(3, 224, 224), guessed=True)
    size = _timm_size(network)
    if size is not None:
        return LoadedModel(name=word, network=network, input_size=size)
    return LoadedModel(name=word, network=network, input_size=_guess(network), guessed=True)


def _call(build: Callable[[], Any], word: str, command: str) -> Any:
    try:
        return build()
    except Exception as error:  # it is the user's own code
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{command}: {word!r} failed when it was called without arguments: {reason}.") from error


def _guess(network: nn.Module) -> Shape:
    """What the first layer with weights would read; () where it does not tell."""
    for module in network.modules():
        if isinstance(module, LazyModuleMixin):
            return ()
        if isinstance(module, nn.Conv2d):
            return (module.in_channels, GUESSED_SIDE, GUESSED_SIDE)
        if isinstance(module, nn.Conv1d):
            return (module.in_channels, GUESSED_STEPS)
        if isinstance(module, nn.Linear):
            return (module.in_features,)
        if isinstance(module, nn.RNNBase):
            return (GUESSED_STEPS, module.input_size)
        if next(module.parameters(recurse=False), None) is not None:
            return ()
    return ()


# ---------------------------------------------------------------- checkpoints


def _from_run(path: Path, tested: bool, command: str) -> LoadedModel:
    """The network of a run of `unskip train`, with the weights that it has reached."""
    state = read_torch_file(path, command=command, way_out=OTHER_WEIGHTS)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{command}: {path} is no checkpoint of `unskip train`. {OTHER_WEIGHTS}")
    if state.get("own"):
        raise ValueError(
            f"{command}: {path} is of a run with a network of your own, {state['own']}, which only you can build. "
            f"Build it in Python, load {path.parent / 'weights.safetensors'} into it, and go on with unskip.export, "
            "unskip.fold or unskip.diagnose."
        )
    where = f"{command}: the recipe in {path}"
    config = NetworkConfig.from_tables(state["recipe"], "network", where)
    weights, size = state["network"], tuple(state["input_size"])
    origin = {"recipe": state["recipe"], "classes": state["data"]["classes"], "channels": size[0]}
    network = _from_recipe(config, origin, where)
    if tested and (path.parent / "weights.safetensors").is_file():
        path = path.parent / "weights.safetensors"
        weights = _state_dict(path, command)
    elif tested and state.get("ema") is not None:
        weights = state["ema"]
    _load_weights(network, weights, path, config.model, command)
    name = f"{config} of {path.parent.name or path}"
    return LoadedModel(name=name, network=network, input_size=size, origin=origin)


def _from_recipe(config: NetworkConfig, origin: dict[str, Any], where: str) -> nn.Module:
    """The network of a run, with fresh weights. A recipe in a file that names code is refused."""
    # What was fine-tuned needs no pretrained weights, since its own are loaded next.
    config = replace(config, options={key: value for key, value in config.options.items() if key != "pretrained"})
    try:
        with seeded(0):
            return build_network(config, num_classes=origin["classes"], in_chans=origin["channels"])
    except ValueError as error:
        raise ValueError(f"{where}: {error} {OTHER_WEIGHTS}") from error


def _from_safetensors(path: Path, command: str) -> LoadedModel:
    """The network of a file that says which one it is of."""
    header = netfile.read_header(path, command=command)
    if header is None:
        raise ValueError(f"{command}: {path} holds weights alone, and does not say of which network. {OTHER_WEIGHTS}")
    return _from_package(path, header, command) if isinstance(header, Weights) else _from_file(path, header, command)


def _from_package(path: Path, about: Weights, command: str) -> LoadedModel:
    """The network of a file of weights as they come with the package."""
    if about.network not in ENTRIES:
        raise ValueError(
            f"{command}: {path} has weights of {about.network!r}, which is no name of `unskip models`. It may come "
            "from a newer version."
        )
    subject = _from_name(about.network, 0, command)
    _load_weights(subject.network, _state_dict(path, command), path, about.network, command)
    return subject


def _from_file(path: Path, header: netfile.Header, command: str) -> LoadedModel:
    """The network of a file that `unskip plainify` or `unskip fold` wrote."""
    try:
        if "recipe" in header.origin:
            where = f"{command}: the recipe in {path}"
            config = NetworkConfig.from_tables(header.origin["recipe"], "network", where)
            fresh = _from_recipe(config, header.origin, where)
        elif _is_factory(header.origin["word"]):
            raise ValueError(f"{command}: {path} asks to call {header.origin['word']!r}, and a file may name no code.")
        else:
            fresh = _build(header.origin["word"], header.origin["seed"], False, command).network
    except (KeyError, TypeError) as error:
        raise ValueError(f"{command}: {path} does not say what its network is built from ({error}).") from error
    network = netfile.read_weights(fresh, header, path, command=command)
    return LoadedModel(
        name=header.name, network=network, input_size=header.input_size, origin=header.origin, steps=header.steps
    )


def save_network(path: Path, subject: LoadedModel, *, proof: str, force: bool, command: str) -> int:
    """Writes a network so that its file can be given wherever a network is asked for. Returns the bytes."""
    if _is_factory(subject.origin.get("word", "")):
        raise ValueError(
            f"{command}: {subject.origin['word']!r} is code of your own, which a file may not name; write the network "
            "with `unskip export`, or work from Python."
        )
    header = netfile.Header(
        name=subject.name, origin=subject.origin, steps=subject.steps, input_size=subject.input_size, proof=proof
    )

    def read(file: Path) -> None:
        written = netfile.read_header(file, command=command)
        assert isinstance(written, netfile.Header)
        _from_file(file, written, command)

    return netfile.write(path, subject.network, header, read, force=force, command=command)


def _state_dict(path: Path, command: str) -> dict[str, Tensor]:
    """The tensors of a file: a state dict, or one inside what a training script has saved."""
    way_out = "A file of weights is a state dict, saved with torch.save(net.state_dict(), path) or as safetensors."
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{command}: {path} can't be read as safetensors: {error}. {way_out}") from error
    state = read_torch_file(path, command=command, way_out=way_out)
    for key in ("state_dict", "model_state_dict", "model", "network"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not state or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{command}: {path} holds no state dict. {way_out}")
    return state


def _load_weights(network: nn.Module, state: dict[str, Tensor], path: Path, name: str, command: str) -> None:
    state = {_bare(key): value for key, value in state.items()}
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        reason = reason if len(reason) < 400 else reason[:400] + " ..."
        raise ValueError(f"{command}: {path} does not fit {name!r}: {reason}") from error


def _bare(key: str) -> str:
    while key.startswith(WRAPPERS):
        key = key.split(".", 1)[1]
    return key
