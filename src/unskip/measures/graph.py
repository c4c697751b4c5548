"""The autograd graph: which layers lie on every path, and where a gradient leaves a layer."""

from collections.abc import Iterator

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

MAX_NODES = 64  # of one layer; a longer search has left the layer


def edge_of(x: Tensor | None) -> GradientEdge | None:
    """The node and output number where the gradient of `x` arrives; None if it takes no gradient."""
    return None if x is None or not x.requires_grad else get_gradient_edge(x)


def successors(node: Node) -> Iterator[Node]:
    return (following for following, _ in node.next_functions if following is not None)


def postorder(root: Node) -> list[Node]:
    """All nodes reachable from `root`, each after its successors. Iterative, because networks are deep."""
    order: list[Node] = []
    seen = {root}
    stack = [(root, successors(root))]
    while stack:
        node, rest = stack[-1]
        following = next((other for other in rest if other not in seen), None)
        if following is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, successors(following)))
    return order


def cuts(root: Node, start: Node) -> set[Node]:
    """The nodes on every path from `root` (the loss) to `start` (the input).

    In a plain network these are all nodes between the two; in a residual network, those between its blocks.
    """
    order = postorder(root)
    reaches = {start}
    for node in order:
        if any(following in reaches for following in successors(node)):
            reaches.add(node)
    if root not in reaches:
        return set()
    between = [node for node in reversed(order) if node in reaches]
    place = {node: index for index, node in enumerate(between)}
    found = set()
    furthest = 0  # the furthest node that an edge from an earlier node reaches; a cut is never jumped over
    for index, node in enumerate(between):
        if furthest <= index:
            found.add(node)
        furthest = max([furthest, *(place[following] for following in successors(node) if following in place)])
        if node is start:
            break
    return found


def depths(root: Node, start: Node, weighted: set[Node]) -> dict[Node, int]:
    """For each node between `root` (the loss) and `start` (the input): the `weighted` nodes on its longest path there.

    A node counts itself.
    """
    found = {start: int(start in weighted)}
    for node in postorder(root):
        before = [found[following] for following in successors(node) if following in found]
        if before and node is not start:
            found[node] = max(before) + (node in weighted)
    return found


def entries(output: GradientEdge, source: GradientEdge) -> list[tuple[Node, int]]:
    """The edges on which a gradient flows from `output` into `source`: nodes, and positions among their inputs.

    Empty if there is none, if the layer returns its input unchanged, or if more than MAX_NODES nodes lie between.
    """
    if output.node is source.node:
        return []
    found: list[tuple[Node, int]] = []
    seen = {output.node}
    waiting = [output.node]
    while waiting:
        node = waiting.pop()
        for position, (following, number) in enumerate(node.next_functions):
            if following is None:
                continue
            if following is source.node:
                if number == source.output_nr:
                    found.append((node, position))
            elif following not in seen:
                if len(seen) >= MAX_NODES:
                    return []
                seen.add(following)
                waiting.append(following)
    return found
