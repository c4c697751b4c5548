"""Reads residual blocks from the code of a forward, for blocks whose class no reader knows.

torch.fx follows a forward symbolically, with the modules that it calls as leaves. In the graph every addition of two
tensors that depend on the input is a residual connection between the fork, its immediate dominator, and itself:

    y = act(a branch(pre(x)) + b shortcut)         functions become modules, a and b modules `Scale`

What is read is proved: the parts, put together again, must give what the block gives, in float64 with random weights on
random inputs of two sizes. What can't be read is refused with the line of the code that stands in the way.
"""

import copy
import dis
import inspect
import operator
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from timm.layers import DropPath, LayerScale, LayerScale2d
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError
from torchvision.ops import Permute as TorchvisionPermute
from torchvision.ops import StochasticDepth

from unskip._core.errors import reason
from unskip._core.layers import altered, inherits
from unskip.methods.pieces import PadShortcut, Permute, Residual, Scale, Shift, Transpose
from unskip.methods.spec import LAYERS, NO_OPS, NORMS, BlockSpec, Unsupported, is_activation
from unskip.surgery.tracing import InputTracer, line_here, other_arguments, user_line
from unskip.surgery.verify import difference

EXACT = 1e-9  # relative, in float64
SIGNS = ("+", "+=", "-", "-=")
ADD = {"add", "iadd", "sub", "isub"}
MUL = {"mul", "imul", "div", "truediv", "itruediv", "multiply", "divide"}
RESHAPES = {"view", "reshape", "unsqueeze", "getitem", "expand", "permute", "flatten"}
IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")  # of `operator`
# Functions whose result may share the memory of what they read.
VIEWS = RESHAPES | {
    "as_strided", "chunk", "contiguous", "detach", "diagonal", "expand_as", "movedim", "narrow", "ravel",
    "requires_grad", "select", "split", "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "to", "transpose",
    "type", "type_as", "unbind", "unflatten", "unfold", "view_as",
}  # fmt: skip
ATTENTION = {"softmax", "scaled_dot_product_attention", "MultiheadAttention", "matmul", "bmm", "einsum"}

# The module for each function of one tensor. In-place variants have the same names here.
FUNCTIONS: dict[str, Callable[..., nn.Module | None]] = {
    "relu": lambda inplace=False: nn.ReLU(),
    "relu6": lambda inplace=False: nn.ReLU6(),
    "leaky_relu": lambda negative_slope=0.01, inplace=False: nn.LeakyReLU(negative_slope),
    "gelu": lambda approximate="none": nn.GELU(approximate),
    "silu": lambda inplace=False: nn.SiLU(),
    "mish": lambda inplace=False: nn.Mish(),
    "hardswish": lambda inplace=False: nn.Hardswish(),
    "hardsigmoid": lambda inplace=False: nn.Hardsigmoid(),
    "hardtanh": lambda min_val=-1.0, max_val=1.0, inplace=False: nn.Hardtanh(min_val, max_val),
    "elu": lambda alpha=1.0, inplace=False: nn.ELU(alpha),
    "selu": lambda inplace=False: nn.SELU(),
    "softplus": lambda beta=1.0, threshold=20.0: nn.Softplus(beta, threshold),
    "tanh": lambda: nn.Tanh(),
    "sigmoid": lambda: nn.Sigmoid(),
    **{
        f"{name.lower()}": lambda p=0.5, training=True, inplace=False, kind=name: getattr(nn, kind)(p)
        for name in ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d")
    },
    "drop_path": lambda drop_prob=0.0, training=False, scale_by_keep=True: DropPath(drop_prob, scale_by_keep),
    "avg_pool1d": nn.AvgPool1d,
    "avg_pool2d": nn.AvgPool2d,
    "max_pool1d": nn.MaxPool1d,
    "max_pool2d": nn.MaxPool2d,
    "contiguous": lambda **_: None,
    "clone": lambda **_: None,
    "transpose": lambda dim0, dim1: Transpose(dim0, dim1),
    "swapaxes": lambda axis0, axis1: Transpose(axis0, axis1),
    "permute": lambda *order: Permute(tuple(order[0]) if len(order) == 1 else order),
}


class _Proxy(fx.Proxy):
    """Which records `x += y` as what it is; torch.fx's own takes it for `x = x + y`. Attributes can't be set."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):
            raise TraceError(f"it sets the attribute {name!r} of a tensor")
        super().__setattr__(name, value)


def _recorded(function: Callable[..., Any]) -> Callable[..., fx.Proxy]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _operator in IN_PLACE:
    setattr(_Proxy, f"__{_operator}__", _recorded(getattr(operator, _operator)))


class _Follower(InputTracer):
    """Follows one forward; every module that it calls is a leaf."""

    proxy_buffer_attributes = True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        proxy = super().create_proxy(*args, **kwargs)
        proxy.node.meta["line"] = line_here()
        return proxy

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _at(line: str) -> str:
    return f" ({line})" if line else ""


class Flow:
    """The graph of the modules and functions that one forward calls."""

    def __init__(self, module: nn.Module, *, training: bool = False) -> None:
        self.module = module
        before = [(kept, dict(kept)) for m in module.modules() for kept in (vars(m), m._parameters, m._buffers)]
        try:
            module.train(training)
            defaults = _defaults(module)
            self.graph = _Follower().trace(module, defaults)
        except Exception as error:  # a forward may fail in any way on a symbolic input
            line = user_line((f.filename, f.lineno) for f in reversed(traceback.extract_tb(error.__traceback__)))
            raise Unsupported(f"its forward can't be followed: {reason(error)}{_at(line)}") from error
        finally:
            constants = [name for name in vars(module) if name not in before[0][1]]
            changed = []
            for kept, was in before:
                changed += [name for name in was if name != "training" and kept.get(name, kept) is not was[name]]
                kept.clear()
                kept.update(was)
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder" and n.target not in defaults]
        if len(placeholders) != 1:
            others = ", ".join(p.name for p in other_arguments(module)) or "none"
            raise Unsupported(f"its forward takes other arguments than its input ({others}), and a block has one input")
        if changed:
            raise Unsupported(f"its forward changes its attribute {changed[0]!r}")
        if constants:
            raise Unsupported("its forward uses a tensor that is neither a parameter nor a buffer")
        for node in self.graph.nodes:
            if not node.users and self.written(node):
                raise Unsupported(f"its forward writes to what it has read{_at(self.line(node))}")
        (self.start,) = placeholders
        (self.output,) = (n for n in self.graph.nodes if n.op == "output")
        self.end = self.output.args[0]
        self.sources: dict[fx.Node, list[fx.Node]] = {self.start: []}  # inputs that depend on the start, by node
        self.above: dict[fx.Node, fx.Node] = {}  # immediate dominators
        self.depth = {self.start: 0}
        for node in self.graph.nodes:
            sources = [n for n in node.all_input_nodes if n in self.sources]
            if not sources or node.op == "output":
                continue
            self.sources[node] = sources
            above = sources[0]
            for other in sources[1:]:
                above = self._common(above, other)
            self.above[node], self.depth[node] = above, self.depth[above] + 1
        if self.end not in self.sources:
            raise Unsupported("its forward does not return one tensor")

    def _common(self, a: fx.Node, b: fx.Node) -> fx.Node:
        while a is not b:
            if self.depth[a] < self.depth[b]:
                a, b = b, a
            a = self.above[a]
        return a

    def written(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose memory a node writes to."""
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op == "call_module":
            module = self.module.get_submodule(str(node.target))
            first = flat(module)[:1] if any(getattr(m, "inplace", False) for m in module.modules()) else []
            in_place = any(getattr(m, "inplace", False) for m in first)
        elif node.op in ("call_function", "call_method"):
            in_place = name.strip("_") in IN_PLACE or (name[-1] == "_" and name[0] != "_") or _works_in_place(node)
        else:
            return []
        found = [*node.args[: int(in_place)], node.kwargs.get("out")]
        return [n for n in found if isinstance(n, fx.Node) and self._is_tensor(n)]

    def reads_overwritten(self) -> bool:
        """Whether anything is read, under its own name or as a view, after it has been written to."""
        order = {node: number for number, node in enumerate(self.graph.nodes)}
        for node in order:
            same = self.written(node)  # grows while it is gone through
            for known in same:
                if any(order[user] > order[node] for user in known.users):
                    return True
                near = [user for user in known.users if _is_view(user)]
                near += [n for n in known.args[: int(_is_view(known))] if isinstance(n, fx.Node)]
                same += [n for n in near if n not in same and n is not node]
        return False

    def is_sum(self, node: fx.Node) -> bool:
        """Whether a node adds two tensors that depend on the input."""
        operands = node.args[:2]
        both = len(operands) == 2 and all(isinstance(n, fx.Node) and n in self.sources for n in operands)
        return function_name(node) in ADD and both and all(self._is_tensor(n) for n in operands)  # type: ignore[arg-type]

    def _is_tensor(self, node: fx.Node) -> bool:
        if function_name(node) in ("size", "getattr", "dim", "numel", "floordiv"):
            return function_name(node) == "getattr" and _is_view(node)
        return not (function_name(node) == "getitem" and not self._is_tensor(node.args[0]))  # type: ignore[arg-type]

    def sums(self) -> list[fx.Node]:
        """All additions of two tensors that depend on the input, in order."""
        return [n for n in self.sources if n is not self.start and self.is_sum(n)]

    def path(self, start: fx.Node, end: fx.Node) -> list[nn.Module]:
        """The modules that lead from `start` to `end`, where `start` dominates `end`."""
        found: list[nn.Module] = []
        while end is not start:
            above = self.above[end]
            found[:0] = self._step(above, end)
            end = above
        return found

    def _step(self, above: fx.Node, node: fx.Node) -> list[nn.Module]:
        """The modules that compute `node` from `above`, its immediate dominator."""
        name, others = function_name(node), [a for a in node.args[1:] if isinstance(a, fx.Node)]
        one = self.sources[node] == [above] and node.all_input_nodes.count(above) == 1
        if not one:
            return [self._region(above, node)]
        if node.op == "call_module":
            if node.args == (above,) and not node.kwargs:
                return flat(self.module.get_submodule(str(node.target)))
            return [self._region(above, node)]
        if name in (MUL | ADD) and len(node.args) == 2 and not node.kwargs:
            return [self._constant(above, node) or self._region(above, node)]
        if node.args[:1] == (above,) and not others and not any(isinstance(v, fx.Node) for v in node.kwargs.values()):
            try:
                module = self._function(name, node)
                return [] if module is None else [module]
            except (KeyError, TypeError):
                pass
        return [self._region(above, node)]

    def _function(self, name: str, node: fx.Node) -> nn.Module | None:
        kwargs = dict(node.kwargs)
        if name == "pad":
            pad, mode, value = (*node.args[1:], *[None] * 3)[:3]
            pad, mode, value = kwargs.get("pad", pad), kwargs.get("mode", mode), kwargs.get("value", value)
            kind = {2: nn.ZeroPad1d, 4: nn.ZeroPad2d}[len(pad)]  # type: ignore[arg-type]
            if mode not in (None, "constant") or value:
                raise KeyError(name)
            return kind(tuple(pad))  # type: ignore[arg-type]
        return FUNCTIONS[name](*node.args[1:], **kwargs)

    def _constant(self, above: fx.Node, node: fx.Node) -> nn.Module | None:
        """A `Scale` or `Shift` by a number or a parameter; None for any other operand."""
        name = function_name(node)
        first = node.args[0] is above
        other = node.args[1] if first else node.args[0]
        inverse, minus = name in ("div", "truediv", "itruediv", "divide"), name in ("sub", "isub")
        if isinstance(other, int | float) and (first or not (inverse or minus)):
            number = float(other)
            if name in ADD:
                return Shift(-number if minus else number)
            return Scale(1 / number if inverse else number)
        if isinstance(other, fx.Node) and not (inverse or minus):
            root = other
            while root.op != "get_attr":
                if function_name(root) not in RESHAPES or len(root.all_input_nodes) != 1:
                    return None
                (root,) = root.all_input_nodes
            value = operator.attrgetter(str(root.target))(self.module)
            shaped = self._evaluate(other)
            if isinstance(value, Tensor) and shaped.numel() == value.numel():
                return (Shift if name in ADD else Scale)(value, tuple(shaped.shape))
        return None

    def _evaluate(self, node: fx.Node) -> Tensor:
        """The value of a node that does not depend on the input."""
        graph = fx.Graph()
        graph.output(self._copy_into(graph, {}, node))
        value: Tensor = fx.GraphModule(self.module, graph)()
        return value

    def _copy_into(self, graph: fx.Graph, known: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
        if node not in known:
            for source in node.all_input_nodes:
                self._copy_into(graph, known, source)
            known[node] = graph.node_copy(node, lambda n: known[n])
        return known[node]

    def _region(self, start: fx.Node, end: fx.Node) -> nn.Module:
        """All that lies between two nodes as one module; raises Unsupported if it contains a residual addition."""
        inside = self.between(start, end)
        for node in inside:
            if self.is_sum(node):
                raise Unsupported(f"its branch adds tensors itself{_at(self.line(node))}")
        called = [self.module.get_submodule(str(n.target)) for n in inside if n.op == "call_module"]
        names = {function_name(n) for n in inside} | {type(module).__name__ for module in called}
        region = self.cut_out(start, end)
        region.meta = {"line": self.line(end), "attention": bool(names & ATTENTION)}
        return region

    def cut_out(self, start: fx.Node, end: fx.Node) -> fx.GraphModule:
        """A module that computes `end` from `start`."""
        graph = fx.Graph()
        graph.output(self._copy_into(graph, {start: graph.placeholder("x")}, end))
        return fx.GraphModule(self.module, graph, function_name(end) or "Part").train(self.module.training)

    def between(self, start: fx.Node, end: fx.Node) -> set[fx.Node]:
        """The nodes on all ways from `start` to `end`, with `end` and without `start`."""
        found, queue = {end}, [end]
        while queue:
            for source in self.sources[queue.pop()]:
                if source is not start and source not in found:
                    found.add(source)
                    queue.append(source)
        return found

    def line(self, node: fx.Node) -> str:
        """The line of code that a node comes from."""
        return str(node.meta.get("line", ""))

    def residual(self, node: fx.Node) -> "tuple[list[nn.Module], list[nn.Module]]":
        """The branch and the shortcut of an addition, from the fork on."""
        fork = self.above[node]
        sides = [self.path(fork, n) for n in node.args[:2]]  # type: ignore[arg-type]
        if function_name(node) in ("sub", "isub"):
            sides[1].append(Scale(-1.0))
        alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
        if alpha != 1:
            sides[1].append(Scale(float(alpha)))  # type: ignore[arg-type]
        sides.sort(key=_weight)
        shortcut, branch = sides
        if _weight(shortcut) == _weight(branch):
            raise Unsupported(f"which side of its addition is the shortcut can't be said{_at(self.line(node))}")
        return branch, shortcut

    def whole(self) -> "tuple[fx.Node, list[nn.Module]] | None":
        """The only addition of the forward, and the activations and gains after it; None if there is none."""
        end = self.end
        behind: list[nn.Module] = []
        while not self.is_sum(end):
            if end is self.start:
                return None
            above = self.above[end]
            if self.sources[end] != [above]:
                return None
            step = self._step(above, end)
            if not all(is_activation(m) or isinstance(m, (Scale, *NO_OPS)) for m in step):
                return None
            behind[:0] = step
            end = above
        node = self.above[end]
        while node is not self.start:
            if self.is_sum(node):
                return None
            node = self.above[node]
        return end, behind


def _defaults(module: nn.Module) -> dict[str, Any]:
    """The arguments behind the first, at their defaults."""
    return {p.name: p.default for p in other_arguments(module) if p.default is not p.empty}


def function_name(node: fx.Node) -> str:
    """The name of the function or method that a node calls, without the underscore of in-place variants."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return name.strip("_") if node.op in ("call_function", "call_method") else ""


def _works_in_place(node: fx.Node) -> bool:
    """Whether a function is called with inplace=True."""
    try:
        call = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # of a method, or a function in C, which has no such argument
        return False
    return bool(call.arguments.get("inplace", False))


def _is_view(node: fx.Node) -> bool:
    if function_name(node) == "getattr":
        return node.args[1] in ("data", "T", "mT", "H", "mH", "real", "imag")
    return function_name(node) in VIEWS


def _weight(side: list[nn.Module]) -> tuple[int, ...]:
    """A sort key, greater for the branch than for the shortcut: layers, then kernel sizes, activations, modules."""
    layers = [m for part in side for m in part.modules() if isinstance(m, LAYERS)]
    kernels = sum(m.weight[0, 0].numel() for m in layers)
    return (len(layers), kernels, sum(map(is_activation, side)), sum(not isinstance(m, NO_OPS) for m in side))


def flat(module: nn.Module) -> list[nn.Module]:
    """The layers that a module runs one after another; the module itself if it does anything else."""
    if altered(module):
        return [module]
    if isinstance(module, StochasticDepth):
        return [DropPath(module.p)] if module.mode == "row" else [module]
    if isinstance(module, TorchvisionPermute):
        return [Permute(tuple(module.dims))]
    if isinstance(module, LayerScale | LayerScale2d):
        shape = (module.gamma.numel(), 1, 1) if isinstance(module, LayerScale2d) else tuple(module.gamma.shape)
        return [Scale(module.gamma, shape)]
    if isinstance(module, nn.Sequential) and inherits(type(module), nn.Sequential):
        return [part for child in module for part in flat(child)]
    if is_layer(module):
        return [] if type(module) is nn.Identity else [module]
    try:
        flow = Flow(module)
        return flow.path(flow.start, flow.end) if not _has_region(flow) else [module]
    except Unsupported:
        return [module]


def _has_region(flow: Flow) -> bool:
    """Whether a forward is more than a chain of layers, so that its module is better left whole."""
    node = flow.end
    while node is not flow.start:
        if len(flow.sources[node]) > 1:
            return True
        node = flow.above[node]
    return False


def adds(module: nn.Module) -> bool:
    """Whether the forward of a module, or a function that it calls, may add two tensors, judged by its bytecode.

    This is cheaper than tracing. A forward without additions has no residual connection.
    """
    if isinstance(module, fx.GraphModule):
        return True
    own = [cls for cls in type(module).__mro__ if not cls.__module__.startswith("torch.nn.")]
    values = [v for holder in (module, *own) for v in vars(holder).values()] + [module.forward]
    queue, seen = [inspect.unwrap(v.__func__ if hasattr(v, "__func__") else v) for v in values if callable(v)], set()
    while queue:
        function = queue.pop()
        code = getattr(function, "__code__", None)
        if code is None or code in seen or function.__module__.startswith("torch."):
            continue
        seen.add(code)
        for op in dis.get_instructions(code):
            if (op.opname == "BINARY_OP" and op.argrepr in SIGNS) or op.argval in ("add", "add_", "sub", "sub_"):
                return True
        names = [function.__globals__.get(name) for name in code.co_names]
        queue += [inspect.unwrap(f) for f in names if isinstance(f, types.FunctionType)]
        queue += [
            types.FunctionType(c, function.__globals__)
            for c in code.co_consts
            if isinstance(c, types.CodeType) and not c.co_freevars
        ]
    return False


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a layer of PyTorch or another known one, whose forward is not traced."""
    known = (cls for cls in type(module).__mro__ if cls.__module__.startswith("torch.nn.modules"))
    own = next(known) not in (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)
    special = isinstance(module, NORMS) or is_activation(module) or hasattr(module, "to_ordinary")
    return own or special or isinstance(module, NO_OPS) or getattr(module, "skip_free", False)


# Blocks


def read_traced(block: nn.Module, path: str) -> BlockSpec:
    """The BlockSpec of a block, read from its forward and proved."""
    flow = Flow(block)
    found = flow.whole()
    if found is None:
        raise Unsupported("its forward is not one addition of a branch and a shortcut")
    node, behind = found
    fork = flow.above[node]
    branch, shortcut = flow.residual(node)
    spec = assemble(path, flow.path(flow.start, fork), branch, shortcut, behind)
    prove_parts(block, spec, flow.line(node))
    return spec


def assemble(
    path: str, pre: list[nn.Module], branch: list[nn.Module], shortcut: list[nn.Module], behind: list[nn.Module]
) -> BlockSpec:
    """The BlockSpec of these parts. Gains behind the sum move to its sides, norms before the branch to `pre`."""
    pre, branch, shortcut = list(pre), list(branch), list(shortcut)
    behind = [m for m in behind if not isinstance(m, nn.Identity)]
    while behind and isinstance(behind[0], Scale):
        branch.append(behind[0])
        shortcut.append(behind.pop(0))
    if len(behind) > 1:
        raise Unsupported("more than one activation follows its addition")
    identity = [m for m in shortcut if not isinstance(m, nn.Identity)] == []
    projects_input = False
    if not pre:
        ahead = next((i for i, m in enumerate(branch) if isinstance(m, LAYERS) or not _is_pre(m)), 0)
        pre, branch = branch[:ahead], branch[ahead:]
        projects_input = bool(pre) and not identity
    elif identity:
        shortcut = [nn.Identity()]
        identity = False
    project = None
    if not identity:
        first = next((m for m in branch if isinstance(m, nn.Conv1d | nn.Conv2d)), None)
        if first is not None:
            shortcut = _as_sampling(shortcut, first.in_channels, len(first.kernel_size))
        project = shortcut[0] if len(shortcut) == 1 else nn.Sequential(*shortcut)
    attention = any(_attends(m) for m in branch)
    return BlockSpec(
        path=path,
        branch=tuple(branch),
        pre=tuple(pre),
        shortcut=project,
        out_act=behind[0] if behind else None,
        projects_input=projects_input,
        skip=not attention,
        kept=("attention",) if attention else (),
    )


def _attends(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention) or getattr(module, "meta", {}).get("attention", False)


def _is_pre(module: nn.Module) -> bool:
    return isinstance(module, (*NORMS, *NO_OPS, Scale, Shift)) or is_activation(module)


def _as_sampling(shortcut: list[nn.Module], channels: int, axes: int) -> list[nn.Module]:
    """The shortcut with subsampling and zero padding of channels as `PadShortcut`."""
    done: list[nn.Module] = []
    for module in shortcut:
        bare = isinstance(module, fx.GraphModule | nn.ZeroPad1d | nn.ZeroPad2d) and not list(module.parameters())
        found = sampling(module, channels, axes) if bare else None
        last = done[-1] if done else None
        if found is not None and type(last) is PadShortcut:
            done[-1] = PadShortcut(
                last.stride * found.stride, last.extra + found.extra, last.before + found.before, axes
            )
        else:
            done.append(module if found is None else found)
        if found is not None:
            channels += found.before + found.extra
        elif isinstance(module, nn.Conv1d | nn.Conv2d):
            channels = module.out_channels
    return done


@torch.no_grad()
def sampling(module: nn.Module, channels: int, axes: int) -> PadShortcut | None:
    """The PadShortcut that does the same as a module without weights on random inputs; None if none does."""
    generator = torch.Generator().manual_seed(0)
    known: PadShortcut | None = None
    for shape in ((12, 8)[:axes], (7, 9)[:axes]):
        x = torch.rand(2, channels, *shape, generator=generator, dtype=torch.float64, device="cpu") + 0.5
        try:
            y = _call(module, x)
        except Exception:  # of any kind: the code is not ours
            return None
        if not isinstance(y, Tensor) or y.ndim != x.ndim:
            return None
        if known is None:
            rows = y.flatten(2).abs().sum((0, 2)).nonzero().flatten().tolist()
            before = rows[0] if rows else 0
            known = PadShortcut(max(1, round(x.shape[2] / y.shape[2])), y.shape[1] - channels - before, before, axes)
            if known.extra < 0:
                return None
        if known(x).shape != y.shape or not torch.equal(known(x), y):
            return None
    return known


def residual_of(spec: BlockSpec) -> Residual:
    """A `Residual` made of the modules of a spec."""
    return Residual(
        nn.Sequential(*spec.branch),
        pre=nn.Sequential(*spec.pre),
        shortcut=spec.shortcut,
        out_act=spec.out_act,
        projects_input=spec.projects_input,
        attention=not spec.skip,
    )


# The proof


@torch.no_grad()
def prove_parts(block: nn.Module, spec: BlockSpec, line: str = "") -> None:
    """Raises Unsupported if the parts, put together again, differ from the block, with random weights in float64."""
    if any(t.is_meta for t in (*block.parameters(), *block.buffers())):
        return
    try:
        pair = copy.deepcopy(nn.ModuleList([block, residual_of(spec)])).to("cpu", torch.float64).eval()
    except Exception as error:  # attributes may be anything
        raise Unsupported(f"it can't be copied: {reason(error)}") from error
    compare(pair[0], pair[1], spec, line)


@torch.no_grad()
def compare(block: nn.Module, parts: nn.Module, spec: BlockSpec, line: str = "") -> None:
    """Raises Unsupported if the two differ on random inputs. They share their weights, which are set at random."""
    generator = torch.Generator().manual_seed(0)
    for module in {*block.modules(), *parts.modules()}:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or not tensor.is_floating_point():
                continue
            if name == "running_var" or tensor.ndim <= 1:
                tensor.uniform_(0.5, 1.5, generator=generator)
            else:
                tensor.normal_(0, max(1, tensor[0].numel()) ** -0.5, generator=generator)
            if name == "running_mean":
                tensor.sub_(1)
    in_place = [m for m in {*block.modules(), *parts.modules()} if getattr(m, "inplace", False)]
    proved = 0
    for shape in _shapes(spec):
        x = 2 * torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        _set_in_place(in_place, True)
        try:
            expected = _call(block, x.clone())
        except Exception:  # a shape that it does not take
            continue
        _set_in_place(in_place, False)
        try:
            found = parts(x.clone())
        except Exception as error:
            raise Unsupported(f"the parts that were read can't run together: {reason(error)}{_at(line)}") from error
        same = isinstance(expected, Tensor) and found.shape == expected.shape
        if not same or not difference(expected, found).relative <= EXACT:
            raise Unsupported(f"its forward does more than the parts that were read{_at(line)}")
        proved += 1
        if proved == 2:
            return
    if not proved:
        raise Unsupported(f"no input was found that it takes, to prove on it what was read{_at(line)}")


def _call(module: nn.Module, x: Tensor) -> Any:
    """module(x); an fx.GraphModule would print a failure before it raises."""
    return module.forward(x) if isinstance(module, fx.GraphModule) else module(x)


def _set_in_place(modules: list[nn.Module], value: bool) -> None:
    for module in modules:
        module.inplace = value  # type: ignore[assignment]


def _shapes(spec: BlockSpec) -> Iterator[tuple[int, ...]]:
    """Shapes to try as one input of a block, without the batch."""
    modules = [m for part in (*spec.pre, *spec.branch) for m in part.modules()]
    sizes = [m.normalized_shape[-1] for m in modules if isinstance(m, nn.LayerNorm)]
    sizes += [m.num_features for m in modules if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    sizes += [m.in_channels for m in modules if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    sizes += [m.in_features for m in modules if isinstance(m, nn.Linear)]
    for width in dict.fromkeys(sizes):
        if any(isinstance(m, nn.Conv1d) for m in modules):
            yield from ((width, 16), (width, 13))
        if any(isinstance(m, nn.Conv3d) for m in modules):
            yield from ((width, 4, 6, 8), (width, 3, 5, 7))
        yield from ((width, 8, 6), (width, 5, 7), (width, 4, 10), (8, 6, width), (width,), (6, width))
        yield from ((other, width) for other in dict.fromkeys(sizes))
