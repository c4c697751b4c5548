"""Turns the residual connections inside a larger forward, in a loop or line by line, into blocks of their own."""

import copy

import torch
from torch import fx, nn

from unskip._core.layers import altered
from unskip.methods.pieces import Residual
from unskip.methods.spec import Unsupported, is_activation
from unskip.surgery.reading import find_blocks, reader_of
from unskip.surgery.traced import Flow, adds, assemble, compare, function_name, is_layer, residual_of


def expose(model: nn.Module) -> nn.Module:
    """The model with each residual connection inside a larger forward turned into a module, a `Residual`.

    It is changed in place. A module whose forward is rewritten becomes an fx.GraphModule with the same children. What
    can't be read stays as it is.
    """

    def visit(module: nn.Module) -> nn.Module:
        if reader_of(module) is not None or getattr(module, "skip_free", False) or is_layer(module):
            return module
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = visit(child)
        ours = type(module).__module__.startswith("unskip.models.")  # whose forward adds nothing outside of blocks
        if ours or not adds(module) or altered(module):
            return module
        try:
            flow = Flow(module)
            sums = flow.sums()
        except Unsupported:
            return module
        found = flow.whole() if sums else None
        if not sums or (found is not None and not any(True for c in module.children() for _ in find_blocks(c))):
            return module
        return _rewritten(module, flow, sums)

    return visit(model)


def _same_in_all_modes(flow: Flow) -> bool:
    """Whether a forward runs the same functions in training mode, and with gradients and without; dropouts aside."""
    for training in (False, True):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                try:
                    other = Flow(flow.module, training=training)
                except Unsupported:
                    return False
            if _calls(other, training) != _calls(flow, False):
                return False
    return True


def _calls(flow: Flow, training: bool) -> list[tuple[str, ...]]:
    """The nodes of a graph as text, without the argument by which a dropout follows the mode."""
    calls: list[tuple[str, ...]] = []
    for node in flow.graph.nodes:
        kwargs = dict(node.kwargs)
        if function_name(node).startswith("dropout") and kwargs.get("training") is training:
            del kwargs["training"]
        calls.append((node.op, str(node.target), str(node.args), str(kwargs)))
    return calls


def _rewritten(module: nn.Module, flow: Flow, sums: list[fx.Node]) -> nn.Module:
    """A module with the residual connections of its own forward as submodules.

    The module itself where the graph is not all that its forward does: in training, or by a write to memory.
    """
    if flow.reads_overwritten() or not _same_in_all_modes(flow):
        return module
    found = [part for node in sums if (part := _inner(module, flow, node)) is not None]
    if not found:
        return module
    inner = set().union(*(flow.between(fork, end) for fork, end, _ in found))
    # A trace has fixed the mode of these functions.
    dropouts = [n for n in flow.sources if function_name(n).startswith("dropout") and n not in inner]
    modules = [flow.path(flow.above[n], n)[0] for n in dropouts]
    for fork, end, residual in found:
        inside = flow.between(fork, end)
        called = [str(n.target) for n in inside if n.op == "call_module"]
        others = [n.target for n in flow.graph.nodes if n.op == "call_module" and n not in inside]
        single = len(called) == 1 and called[0] not in others
        _substitute(module, flow.graph, end, called[0] if single else f"residual_{end.name}", residual, fork)
    for node, dropout in zip(dropouts, modules, strict=True):
        _substitute(module, flow.graph, node, node.name, dropout, flow.above[node])
    rewritten = fx.GraphModule(module, flow.graph, type(module).__name__)
    rewritten.graph.eliminate_dead_code()
    rewritten.recompile()
    rewritten.delete_all_unused_submodules()
    for name, value in vars(module).items():
        if name not in vars(rewritten):
            setattr(rewritten, name, value)
    return rewritten.train(module.training)


def _substitute(module: nn.Module, graph: fx.Graph, node: fx.Node, path: str, new: nn.Module, source: fx.Node) -> None:
    """Replaces a node by a call of `new`, registered at `path`, on the output of `source`."""
    (source,) = source.meta.get("moved", (source,))
    module.set_submodule(path, new.train(module.training))
    with graph.inserting_after(node):
        call = graph.call_module(path, (source,))
    node.replace_all_uses_with(call)
    node.meta["moved"] = (call,)


def _inner(module: nn.Module, flow: Flow, node: fx.Node) -> tuple[fx.Node, fx.Node, Residual] | None:
    """An addition of a forward as a block of its own, with the nodes that it begins behind and ends at; proved."""
    fork, end, behind = flow.above[node], node, []
    users = [*end.users]
    if len(users) == 1 and flow.sources.get(users[0]) == [end]:
        step = flow.path(end, users[0])
        if len(step) == 1 and is_activation(step[0]):
            behind, end = step, users[0]
    inside = flow.between(fork, end)
    if any(user not in inside and user.users for n in inside if n is not end for user in n.users):
        return None
    try:
        branch, shortcut = flow.residual(node)
        if any(True for part in branch for _ in find_blocks(part)):
            return None
        spec = assemble("", [], branch, shortcut, behind)
        residual = residual_of(spec)
        if not any(t.is_meta for t in module.parameters()):
            pair = copy.deepcopy(nn.ModuleList([flow.cut_out(fork, end), residual])).to("cpu", torch.float64)
            compare(pair[0].eval(), pair[1].eval(), spec, flow.line(node))
    except Unsupported:
        return None
    return fork, end, residual
