"""A CNN that has the name of a method in front is plain, on its traced graph, not by its name.

Transformers: tests/methods/test_attention.py.
"""

import operator

import pytest
import torch
from torch import fx, nn

import unskip
from unskip.methods import stacked
from unskip.models import ENTRIES

CNNS = [name for name, entry in ENTRIES.items() if entry.family not in ("swin", "vit", "gpt") and entry.method]
CNNS += ["simplified_plain20", "simplified_dominant20"]
QUICK = {
    "plain_resnet20", "pnnh_resnet20", "pnnh_wrn16_8", "pnnh_resnet18", "pnnh_resnet50", "pnnh_mobilenetv2",
    "dirac_resnet20", "iso_resnet20", "delta_tanh_resnet20", "looks_linear_resnet20",
    "simplified_plain20",
}  # fmt: skip
NAMES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full]) for name in CNNS]

ADD = {operator.add, operator.iadd, torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}
ACTIVATIONS = ("relu", "relu_", "hardtanh", "hardtanh_", "tanh", "maximum")


def graph(network: nn.Module, side: int) -> torch.export.ExportedProgram:
    return torch.export.export(network.eval(), (torch.randn(1, 3, side, side),))


def additions(program: torch.export.ExportedProgram) -> list[fx.Node]:
    """Additions of two activations; those of a norm's counters, of constants and of two weights are none."""
    images = [n for n in program.graph.nodes if n.name in program.graph_signature.user_inputs]
    assert images
    tensors = [n for n in program.graph.nodes if n.op == "call_function" and n.target in ADD]
    return [
        n for n in tensors if all(isinstance(a, fx.Node) and not ancestors(a).isdisjoint(images) for a in n.args[:2])
    ]


def weight_of(node: fx.Node, program: torch.export.ExportedProgram) -> str:
    """The name of the weight in the convolution that made this node, looking through norms.

    A layer may put its weight together from several (taps here, centres there); they are all its own.
    """
    while "conv" not in str(node.target):
        assert "batch_norm" in str(node.target), f"{node} ({node.target}) is neither convolution nor norm"
        node = node.args[0]
    weight = node.args[1]
    signature = program.graph_signature
    known = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names = sorted(known[part.name] for part in {weight, *ancestors(weight)} if part.op == "placeholder")
    assert len({name.rpartition(".")[0] for name in names}) == 1, names
    return names[0]


def ancestors(node: fx.Node) -> set[fx.Node]:
    found, queue = set(), [node]
    while queue:
        for parent in queue.pop().all_input_nodes:
            if parent not in found:
                found.add(parent)
                queue.append(parent)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_no_addition_joins_input_and_output(name: str) -> None:
    # Of the definition; that the fast block computes the same is the matter of tests/methods/test_fast.py.
    network = unskip.create_model(name, **({"block": "plain"} if name.startswith("pnnh_") else {}))
    side = 32 if ENTRIES[name].input_size[-1] == 32 else 64
    program = graph(network, side)
    sums = additions(program)
    if not name.startswith("pnnh_"):
        assert not sums
        return
    # Each addition is learner + coder: one side ends in a trained convolution, the other in a coder's decoder, and
    # neither side is computed from the other.
    assert len(sums) == sum(type(m).__name__ == "PNNHBlock" and m.coder is not None for m in network.modules())
    for node in sums:
        learner, coder = node.args[:2]
        assert "learner" in weight_of(learner, program)
        assert weight_of(coder, program).endswith(".dec")
        assert learner not in ancestors(coder)
        assert coder not in ancestors(learner)


@pytest.mark.parametrize("name", NAMES)
def test_in_the_stacked_form_every_activation_has_one_consumer(name: str) -> None:
    network = stacked(unskip.create_model(name).eval())
    side = 32 if ENTRIES[name].input_size[-1] == 32 else 64
    program = graph(network, side)
    assert not additions(program)
    computed = [node for node in program.graph.nodes if node.op == "call_function"]
    activations = [node for node in computed if any(f"aten.{a}." in f"{node.target}." for a in ACTIVATIONS)]
    assert len(activations) >= 9
    for node in computed:
        readers = {user.target for user in node.users}
        # CReLU reads each number for its two halves, and nothing else does.
        halves = name.startswith("looks_linear_") and readers == {
            torch.ops.aten.relu.default,
            torch.ops.aten.neg.default,
        }
        assert len(node.users) == (2 if halves else 1), f"{node} is read by {list(node.users)}"


def test_the_test_sees_a_skip() -> None:
    """A residual network fails both."""
    program = graph(unskip.create_model("resnet20"), 16)
    assert len(additions(program)) == 9
    node = additions(program)[0]
    assert any(side in ancestors(other) for side, other in (node.args[:2], node.args[1::-1]))
    assert any(len(node.users) > 1 for node in program.graph.nodes if node.op == "call_function")
