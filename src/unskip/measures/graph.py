"""Reading the autograd graph: which layers everything passes through, and where a gradient enters a layer."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


class Edge(NamedTuple):
    """Where the gradient of a tensor arrives: a node of the graph and which of its outputs."""

    node: Node
    output: int


def edge_of(x: Tensor | None) -> Edge | None:
    if x is None or not x.requires_grad:
        return None
    edge = get_gradient_edge(x)
    return Edge(edge.node, edge.output_nr)


def successors(node: Node) -> Iterator[Node]:
    return (following for following, _ in node.next_functions if following is not None)


def postorder(root: Node) -> list[Node]:
    """Nodes that a gradient from `root` reaches, each after all that follow it. Iterative, since networks are deep."""
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
    """The nodes that every path from `root` (the loss) to `start` (the input) passes through.

    In a plain network these are all nodes between the two; in a residual network those between its blocks.
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
    furthest = 0  # the furthest that an edge from an earlier node reaches: a node that no edge jumps over is a cut
    for index, node in enumerate(between):
        if furthest <= index:
            found.add(node)
        furthest = max([furthest, *(place[following] for following in successors(node) if following in place)])
        if node is start:
            break
    return found


def entries(output: Edge, source: Edge, most: int = 64) -> list[tuple[Node, int]]:
    """The edges by which a gradient at `output` flows back into `source`: nodes and positions among their inputs.

    Empty where there is none, where the layer has handed its input through, or where more than `most` nodes lie between
    (several inputs: the search has left the layer).
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
                if number == source.output:
                    found.append((node, position))
            elif following not in seen:
                if len(seen) >= most:
                    return []
                seen.add(following)
                waiting.append(following)
    return found
