"""A network as data: layers of registered classes, and the registered functions that run between them.

`describe` writes a network down as JSON: torch.fx traces it, registered layers are kept whole, and everything around
them becomes a list of steps. `build` makes a `Graph` of it, a module that runs the steps one after another. A
description can only name what is registered here, so reading one runs no code of the file's. Names of parameters and
buffers stay, and so does what layers do in training and in evaluation.
"""

import inspect
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
from itertools import chain
from typing import Any, TypeVar

import timm.layers
import torch
import torchvision
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

import unskip.kernels
import unskip.methods  # noqa: F401 - all of our layers, to be registered
from unskip._core.errors import reason
from unskip._core.modules import has_hooks, preserved
from unskip.coders import CoderSpec
from unskip.coders.closed_form import group_average, group_sum, repeated
from unskip.ship.fake_quant import FakeQuantized
from unskip.surgery.tracing import InputTracer

Kind = TypeVar("Kind", bound=type[nn.Module])
Step = tuple[str, Any, tuple[Any, ...], dict[str, Any]]  # what is called (KINDS), its target, arguments
LayerData = dict[str, Any]  # {"class": name, "settings": {...}, "layers": {...}, "none": [...]}

LAYERS: dict[str, type[nn.Module]] = {}  # by their names in files
NAMES: dict[type[nn.Module], str] = {}
INTERNALS = set(vars(nn.Module()))
SETTINGS = "__settings"  # where a layer keeps what becomes its attributes, until all layers are there
ATTRIBUTES = ("shape", "ndim", "dtype", "device")  # of a tensor, that a step may read

TORCH_LAYERS = """
    AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveMaxPool2d AvgPool1d AvgPool2d MaxPool1d MaxPool2d Upsample
    PixelShuffle BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm InstanceNorm2d GroupNorm LayerNorm RMSNorm
    LocalResponseNorm CELU ELU GELU GLU Hardsigmoid Hardswish Hardtanh LeakyReLU LogSoftmax Mish PReLU ReLU ReLU6
    SELU SiLU Sigmoid Softmax Softplus Tanh Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d Linear Embedding
    Sequential Flatten Unflatten Identity Dropout Dropout1d Dropout2d AlphaDropout ConstantPad2d ReflectionPad2d
    ReplicationPad2d ZeroPad2d
"""
TORCH_FUNCTIONS = """
    abs add amax amin avg_pool1d cat chunk clamp concat conv1d conv2d div exp flatten logsumexp
    matmul max_pool2d maximum mean minimum mul narrow neg permute pow relu relu_ reshape roll rsqrt sigmoid softmax
    split sqrt square squeeze stack sub sum swapaxes tanh transpose unbind unsqueeze zeros_like
"""
F_FUNCTIONS = """
    adaptive_avg_pool2d adaptive_max_pool2d avg_pool2d batch_norm conv1d conv2d dropout dropout2d elu gelu
    group_norm hardsigmoid hardswish hardtanh interpolate layer_norm leaky_relu linear log_softmax max_pool2d mish
    normalize pad pixel_shuffle prelu relu relu6 relu_ rms_norm scaled_dot_product_attention selu sigmoid silu
    softmax softplus tanh
"""
OPERATORS = "add and_ eq floordiv getitem iadd imul isub matmul mod mul neg pow sub truediv"
TENSOR_METHODS = """
    abs add add_ amax amin chunk clamp contiguous div exp expand expand_as flatten float matmul mean mul mul_ narrow
    neg new_zeros permute pow relu relu_ repeat reshape rsqrt sigmoid size softmax split sqrt square squeeze sub sum
    tanh tensor_split to transpose type_as unbind unflatten unsqueeze view view_as
"""


def register_layer(layer: Kind) -> Kind:
    """Lets network files hold layers of this class; a decorator, or called with a class of somebody else's.

    A file holds what is in such a layer's attributes: numbers, text, tuples, lists and dicts of them, dtypes,
    parameters, buffers, and layers that are registered too. Opening the file sets these without calling `__init__`,
    and the class must be registered by then. Layers of torch.nn are built by their constructor.
    """
    name = f"{layer.__module__.split('.')[0]}.{layer.__name__}"
    if LAYERS.get(name, layer) is not layer:
        raise ValueError(f"register_layer: there is a layer {name!r} already; give the class {layer!r} another name.")
    LAYERS[name], NAMES[layer] = layer, name
    return layer


def _subclasses(kind: type[nn.Module]) -> Iterable[type[nn.Module]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


for _name in TORCH_LAYERS.split():
    register_layer(getattr(nn, _name))
for _name in ("BatchNormAct2d", "Conv2dSame", "DropPath", "LayerNorm", "LayerNorm2d"):
    register_layer(getattr(timm.layers, _name))
register_layer(torchvision.ops.StochasticDepth)
register_layer(FakeQuantized)
for _kind in _subclasses(nn.Module):  # every layer of ours; networks and their residual blocks are traced
    if _kind.__module__.startswith(("unskip.coders.", "unskip.kernels.", "unskip.methods.")):
        register_layer(_kind)
RECORDS: dict[str, type] = {"CoderSpec": CoderSpec}  # dataclasses that a layer may have as attributes


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A Python operator that refuses text, long tuples and long numbers, of which few steps would fill the memory."""

    def call(*args: Any) -> Any:
        lengths = [len(arg) for arg in args if isinstance(arg, tuple | list)]
        numbers = [abs(arg) for arg in args if isinstance(arg, int)]
        if (
            any(isinstance(arg, str | bytes) for arg in args)
            or (lengths and math.prod(lengths + numbers) > MAX_ITEMS)
            or any(number >= 2**63 for number in numbers)
            or (function is operator.pow and len(numbers) == 2 and numbers[1] > 64)
        ):
            raise ValueError(f"it calls operator.{function.__name__} on values that no network needs")
        return function(*args)

    return call


GROWING = {"add", "iadd", "imul", "mod", "mul", "pow"}  # operators whose result may be longer than what they read
MAX_ITEMS = 4096
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getattr": getattr,
    **{f"torch.{name}": getattr(torch, name) for name in TORCH_FUNCTIONS.split()},
    **{f"F.{name}": getattr(F, name) for name in F_FUNCTIONS.split()},
    **{f"operator.{name}": getattr(operator, name) for name in OPERATORS.split()},
    **{f"coders.{function.__name__}": function for function in (group_average, group_sum, repeated)},
}
CALLED = {function: name for name, function in reversed(FUNCTIONS.items())}
FUNCTIONS |= {f"operator.{name}": _bounded(getattr(operator, name)) for name in GROWING}
METHODS = frozenset(TENSOR_METHODS.split())
KINDS = ("layer", "tensor", "function", "method", "output")  # of steps


class Inexpressible(ValueError):  # noqa: N818 - a reason
    """What a description can't say, as the end of a sentence."""


@dataclass(frozen=True)
class Ref:
    """The result of an earlier step."""

    step: int


@dataclass(frozen=True)
class TrainingFlag:
    """Whether the network trains."""


class Graph(nn.Module):
    """A network that runs a list of steps; `build` makes it."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps
        last: dict[int, int] = {}  # the step that reads a result last
        for i, (_, _, args, kwargs) in enumerate(steps, start=1):
            last |= dict.fromkeys(_read((args, kwargs)), i)
        self.done: list[list[int]] = [[] for _ in range(len(steps) + 1)]  # results that a step is the last to read
        for read, by in last.items():
            self.done[by].append(read)

    def forward(self, x: Tensor) -> Any:
        results: list[Any] = [x]
        for i, (kind, target, args, kwargs) in enumerate(self.steps, start=1):
            args, kwargs = self._filled(args, results), self._filled(kwargs, results)
            if kind == "output":
                return args[0]
            if kind == "layer":
                result = self.get_submodule(target)(*args, **kwargs)
            elif kind == "tensor":
                result = reduce(getattr, target.split("."), self)
            elif kind == "method":
                result = getattr(args[0], target)(*args[1:], **kwargs)
            else:
                result = target(*args, **kwargs)
            results.append(result)
            for read in self.done[i]:
                results[read] = None  # so that its memory is free
        raise AssertionError("a graph ends in an output")

    def _filled(self, value: Any, results: list[Any]) -> Any:
        if isinstance(value, Ref):
            return results[value.step]
        if isinstance(value, TrainingFlag):
            return self.training
        if isinstance(value, dict):
            return {key: self._filled(each, results) for key, each in value.items()}
        if isinstance(value, slice):
            return slice(*(self._filled(each, results) for each in (value.start, value.stop, value.step)))
        return type(value)(self._filled(each, results) for each in value) if isinstance(value, tuple | list) else value


def _read(value: Any) -> list[int]:
    """The steps whose results a value refers to."""
    found: list[int] = []
    fx.node.map_aggregate(value, lambda each: found.append(each.step) if isinstance(each, Ref) else None)
    return found


# ---------------------------------------------------------------- writing


def describe(model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A network as JSON-able data, and its tensors by name.

    Raises:
        Inexpressible: the network has a layer, function or attribute that a description can't hold.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise Inexpressible("it has a ScriptModule, whose code a file can't hold; save the module it was made from")
    paths = {id(module): path for path, module in model.named_modules()}
    with preserved(model):
        steps = _same_but_for_training(*(_traced(model.train(mode), paths) for mode in (False, True)))
    called = {target for kind, target, *_ in steps if kind == "layer"}
    layers: dict[str, LayerData] = {}
    for path in paths.values():  # in the network's order, which is that of its parameters
        if path in called and not any(path.startswith(f"{above}.") for above in layers):
            layers[path] = _layer(model.get_submodule(path), path, paths)
    roots = {target for kind, target, *_ in steps if kind == "tensor"}
    kinds: dict[str, str] = {}
    tied: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    for path, module in model.named_modules():
        for key, tensor in chain(module._parameters.items(), module._buffers.items()):
            name = f"{path}.{key}".removeprefix(".")
            if tensor is None or (name not in roots and not any(name.startswith(f"{above}.") for above in layers)):
                continue  # nothing reads it
            if is_lazy(tensor):
                raise Inexpressible(f"{name!r} has no shape yet; run the network once")
            if isinstance(tensor, nn.Parameter):
                kinds[name] = "parameter" if tensor.requires_grad else "frozen"
            else:
                kinds[name] = "temporary" if key in module._non_persistent_buffers_set else "buffer"
            if id(tensor) in names:
                tied[name] = names[id(tensor)]
            else:
                tensors[name], names[id(tensor)] = tensor, name
    return {"layers": layers, "steps": steps, "tensors": kinds, "tied": tied}, tensors


class _Tracer(InputTracer):
    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return all(type(module) in NAMES for module in m.modules())


def _traced(model: nn.Module, paths: dict[int, str]) -> list[list[Any]]:
    """The steps of a forward pass; registered layers are one step each."""
    if any(map(has_hooks, model.modules())):
        raise Inexpressible("it has hooks, which a file can't hold; remove them")
    parameters = inspect.signature(model.forward).parameters.values()
    given = {p.name: p.default for p in parameters if p.default is not p.empty}
    before = set(vars(model))
    try:
        graph = _Tracer().trace(model, concrete_args=given)
    except Exception as error:  # a forward may fail in any way under a symbolic input
        raise Inexpressible(f"torch.fx can't trace it: {reason(error)}") from error
    finally:
        constants = set(vars(model)) - before
        for name in constants:
            delattr(model, name)
    index: dict[fx.Node, int] = {}
    asserted: set[fx.Node] = set()
    steps: list[list[Any]] = []
    for node in graph.nodes:
        if index and (node.op == "placeholder" or asserted & set(node.all_input_nodes)):
            asserted.add(node)  # an argument at its default, and the assertion that it is
            continue
        if node.target is torch._assert:
            continue
        index[node] = len(index)
        target = node.target
        if node.op == "placeholder":
            continue
        if node.op == "get_attr":
            if target in constants:
                raise Inexpressible("its forward makes a tensor of its own, which would be a constant in the file")
            kind = "tensor"
        elif node.op == "call_function":
            kind, target = "function", CALLED.get(node.target)
        else:
            kind = {"call_module": "layer", "call_method": "method", "output": "output"}[node.op]
        if target is None or (kind == "method" and target not in METHODS):
            raise Inexpressible(f"it calls {getattr(node.target, '__name__', node.target)!r}, which is not registered")

        def value(each: Any) -> Any:
            return _encoded(each, paths, index)

        steps.append([kind, target, [value(each) for each in node.args], {k: value(v) for k, v in node.kwargs.items()}])
    return steps


def _same_but_for_training(evaluated: Any, trained: Any) -> Any:
    """Two traces as one: where one says False and the other True, it is the mode that decides."""
    if evaluated is False and trained is True:
        return {"training": True}
    alike = type(evaluated) is type(trained)
    if alike and isinstance(evaluated, list) and len(evaluated) == len(trained):
        return [_same_but_for_training(*pair) for pair in zip(evaluated, trained, strict=True)]
    if alike and isinstance(evaluated, dict) and evaluated.keys() == trained.keys():
        return {key: _same_but_for_training(each, trained[key]) for key, each in evaluated.items()}
    if not alike or evaluated != trained:
        raise Inexpressible("its forward does other things in training than in evaluation, outside of its layers")
    return evaluated


def _layer(module: nn.Module, path: str, paths: dict[int, str]) -> LayerData:
    """A registered layer and those in it. One that stands at two places is described at the first."""
    if type(module) not in NAMES:
        raise Inexpressible(f"{path!r} is a {type(module).__name__}, which is not registered")
    if paths[id(module)] != path:
        return {"same": paths[id(module)]}
    attributes = {name: value for name, value in vars(module).items() if name not in INTERNALS}
    settings = _constructor_arguments(module) if _by_constructor(type(module)) else attributes
    return {
        "class": NAMES[type(module)],
        "settings": {name: _encoded(value, paths, {}, f"{path}.{name}") for name, value in settings.items()},
        "layers": {name: _layer(m, f"{path}.{name}", paths) for name, m in module._modules.items() if m is not None},
        "none": [
            name
            for tensors in (module._parameters, module._buffers, module._modules)
            for name, value in tensors.items()
            if value is None
        ],
    }


def _by_constructor(layer: type) -> bool:
    return layer.__module__.startswith("torch.nn.")


def _constructor_names(layer: type[nn.Module]) -> list[str]:
    return [name for name in inspect.signature(layer).parameters if name not in ("device", "dtype")]


def _constructor_arguments(module: nn.Module) -> dict[str, Any]:
    names = [name for name in _constructor_names(type(module)) if hasattr(module, name)]
    return {name: getattr(module, name) is not None if name == "bias" else getattr(module, name) for name in names}


def _encoded(value: Any, paths: dict[int, str], index: dict[fx.Node, int], where: str = "its forward") -> Any:
    """A value as JSON has it: plain ones and lists as they are, all else as an object with one key."""

    def encoded(each: Any) -> Any:
        return _encoded(each, paths, index, where)

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, fx.Node):
        return {"step": index[value]}
    if isinstance(value, slice):
        return {"slice": [encoded(value.start), encoded(value.stop), encoded(value.step)]}
    if isinstance(value, list):
        return [encoded(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [encoded(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[encoded(key), encoded(each)] for key, each in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": "cpu"}  # where files are opened
    if isinstance(value, nn.Module) and id(value) in paths:
        return {"layer": paths[id(value)]}
    if is_dataclass(value) and RECORDS.get(type(value).__name__) is type(value):
        return {
            "record": type(value).__name__,
            "fields": {f.name: encoded(getattr(value, f.name)) for f in fields(value)},
        }
    raise Inexpressible(f"{where} has {type(value).__name__} as a value, which is no plain data")


# ---------------------------------------------------------------- reading


def build(description: dict[str, Any], tensors: dict[str, Tensor]) -> Graph:
    """The network of a description, in eval mode.

    Raises whatever a description that `describe` did not write leads to; it runs registered layers and functions alone.
    """
    graph = Graph([_step(i, *step) for i, step in enumerate(description["steps"], start=1)])
    if not graph.steps or graph.steps[-1][0] != "output":
        raise ValueError("its steps end in no output")
    made: dict[str, nn.Module] = {}  # layers by path, each after those inside it
    with torch.device("meta"):  # whatever sizes it says, there are no numbers but those in the file
        for path, layer in description["layers"].items():
            *parents, name = _names(path)
            _container(graph, parents).add_module(name, _built(layer, path, made))
    for kind, target, *_ in graph.steps:
        if (kind == "layer" and target not in made) or (kind == "tensor" and target not in description["tensors"]):
            raise ValueError(f"it runs {target!r}, which is no {kind} of its own")
    for module in made.values():
        for name, value in vars(module).pop(SETTINGS, {}).items():
            if not name.isidentifier() or name.startswith("__") or name in INTERNALS or hasattr(type(module), name):
                raise ValueError(f"{type(module).__name__} has no attribute {name!r} that a file may set")
            setattr(module, name, _decoded(value, made))
    tied: dict[str, str] = description["tied"]
    placed: dict[str, Tensor] = {}
    for name, kind in description["tensors"].items():
        first = tied.get(name, name)
        if kind in ("parameter", "frozen"):
            placed.setdefault(first, nn.Parameter(tensors[first], requires_grad=kind == "parameter"))
        elif kind not in ("buffer", "temporary"):
            raise ValueError(f"{name!r} is of the unknown kind {kind!r}")
        _place(graph, name, placed.setdefault(first, tensors[first]), persistent=kind != "temporary")
    for name, tensor in chain(graph.named_parameters(), graph.named_buffers()):
        if tensor.is_meta:
            raise ValueError(f"it has no numbers for {name!r}")
    return graph.eval()


def _step(i: int, kind: str, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Step:
    positional = tuple(_decoded(each) for each in args)
    named = {_names(key)[0]: _decoded(each) for key, each in kwargs.items()}
    if any(type(read) is not int or not 0 <= read < i for read in _read([positional, named])):
        raise ValueError(f"step {i} reads the result of a step that does not come before it")
    if kind == "function":
        if target == "getattr" and (named or len(positional) != 2 or positional[1] not in ATTRIBUTES):
            raise ValueError(f"step {i} reads an attribute other than {', '.join(ATTRIBUTES)}")
        target = FUNCTIONS.get(target)
    if target is None or (kind == "method" and target not in METHODS) or kind not in KINDS:
        raise ValueError(f"step {i} is no call of a registered layer, function or method")
    if kind == "method" and not (positional and isinstance(positional[0], Ref)):
        raise ValueError(f"step {i} calls a method of something that is no result")
    return kind, target, positional, named


def _names(path: Any) -> list[str]:
    """The parts of a layer's path: identifiers and numbers, nothing that Python gives a meaning."""
    names: list[str] = path.split(".")
    if not all((name.isidentifier() or name.isdecimal()) and not name.startswith("__") for name in names):
        raise ValueError(f"{path!r} is no name of a layer or tensor")
    return names


def _container(graph: nn.Module, path: list[str]) -> nn.Module:
    for name in path:
        if name not in graph._modules:
            graph.add_module(name, nn.Module())
        graph = graph._modules[name]  # type: ignore[assignment]
    return graph


def _built(layer: LayerData, path: str, made: dict[str, nn.Module]) -> nn.Module:
    if "same" in layer:
        return made[layer["same"]]
    kind = LAYERS.get(layer["class"])
    if kind is None:
        raise ValueError(
            f"it has a layer {layer['class']!r}, which is not registered. If it comes from another package, import "
            "that, and register the class with unskip.io.register_layer"
        )
    if _by_constructor(kind):
        unknown = set(layer["settings"]) - set(_constructor_names(kind))
        if unknown:
            raise ValueError(f"{layer['class']} has no setting {sorted(unknown)[0]!r} that a file may give")
        module: nn.Module = kind(**{name: _decoded(value) for name, value in layer["settings"].items()})
    else:
        module = nn.Module.__new__(kind)
        nn.Module.__init__(module)
        vars(module)[SETTINGS] = layer["settings"]  # which may refer to layers that are not there yet
    for name, child in layer["layers"].items():
        (part,) = _names(name)
        module._modules.pop(part, None)
        module.add_module(part, _built(child, f"{path}.{part}", made))
    for name in layer["none"]:
        (part,) = _names(name)
        if part not in module._parameters:
            module.register_parameter(part, None)
    made[path] = module
    return module


def _place(graph: Graph, name: str, tensor: Tensor, *, persistent: bool) -> None:
    """Puts a tensor where its layer has one, or expects one."""
    *path, last = _names(name)
    module = _container(graph, path)
    held: dict[str, Any] = module._parameters if isinstance(tensor, nn.Parameter) else module._buffers
    expected = held.pop(last, None)
    wanted = "none" if expected is None else tuple(expected.shape)
    if type(module) is not nn.Module and _by_constructor(type(module)) and wanted != tuple(tensor.shape):
        raise ValueError(f"{name!r} has shape {tuple(tensor.shape)}, and its layer wants {wanted}")
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_buffer(last, tensor, persistent=persistent)


def _decoded(value: Any, made: dict[str, nn.Module] | None = None) -> Any:
    """A value that `_encoded` wrote; `made` are the layers that it may refer to."""
    if isinstance(value, list):
        return [_decoded(each, made) for each in value]
    if not isinstance(value, dict):
        return value
    if "record" in value:
        return RECORDS[value["record"]](**{name: _decoded(each, made) for name, each in value["fields"].items()})
    ((kind, content),) = value.items()
    if kind == "step":
        return Ref(content)
    if kind == "training":
        return TrainingFlag()
    if kind == "slice":
        return slice(*(_decoded(each, made) for each in content))
    if kind == "tuple":
        return tuple(_decoded(each, made) for each in content)
    if kind == "dict":
        return {_decoded(key, made): _decoded(each, made) for key, each in content}
    if kind == "dtype" and isinstance(dtype := getattr(torch, content, None), torch.dtype):
        return dtype
    if kind == "device":
        return torch.device("cpu")
    if kind == "layer" and made is not None:
        return made[content]
    raise ValueError(f"{value!r} is no value")
