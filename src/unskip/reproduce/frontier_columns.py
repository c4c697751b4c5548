"""What a network costs: the columns of `unskip reproduce frontier` that need no training.

`plain_columns` counts the plain form of a network, `latency_columns` times it in onnxruntime on a CPU, and
`training_columns` has the speed and memory of training, by `unskip bench`.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from timm.utils.model import reparameterize_model
from torch import nn

from unskip.bench import Comparison, Setting
from unskip.io.load import load_model
from unskip.ship import export, fold
from unskip.surgery import plainify
from unskip.surgery.cost import on_meta, size

RM = "rm and fold"
LIMIT = 1e9  # no limit on the growth by rm
LATENCY_RUNS, LATENCY_SECONDS = 10, 2.0  # runs that are timed: at least so many, and as many as fit into the seconds
REFERENCE = "resnet34"  # in every comparison of training, so that ratios are measured side by side
TOGETHER = 9  # networks in one comparison: as many as a GPU of 139 GiB holds with their batches
MIB = 2**20
SIDE = 224  # px, of the images that costs are of


def built(model_spec: str) -> nn.Module:
    """The network of a spec in eval mode, with statistics in its norms that no rewriting passes by chance."""
    model = load_model(model_spec, command="reproduce").model.eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None and norm.running_var is not None:
            nn.init.normal_(norm.running_mean, std=0.1)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)
    return model


def plain_form(model: nn.Module) -> tuple[nn.Module, str]:
    """A network in eval mode as convolutions, biases and activations, the same function, and how it became that.

    Skip-free networks are folded. Those with skips lose them by `rm` first; RepVGG by timm's reparameterisation.
    """
    if any(hasattr(module, "reparameterize") for module in model.modules()):
        return fold(reparameterize_model(model).eval(), "dense"), "reparameterized"
    try:
        return fold(model, "dense"), "fold"
    except ValueError:
        return fold(plainify(model, "rm", limit=LIMIT), "dense"), RM


def plain_columns(model_spec: str) -> dict[str, Any]:
    """Parameters, MACs and peak of activations for one image: of the plain form, and of the network as it is trained.

    Where the plain form is by `rm`, it is counted on the meta device: that of ResNet-50 has 277 M weights.
    """
    model, shape = built(model_spec), (3, SIDE, SIDE)
    own = size(on_meta(model), shape)
    try:
        plain, how = plainify(on_meta(model), "rm", limit=LIMIT), RM
        layers = [m for m in plain.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        parameters = sum(m.weight.numel() + len(m.weight) for m in layers)  # norms become a bias in each layer
    except ValueError:  # it has no skips
        plain, how = plain_form(model)
        parameters = sum(p.numel() for p in plain.parameters())
    found = size(on_meta(plain), shape)
    return {
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "own_macs": own.macs,
        "own_activation_bytes": own.memory,
        "plain_form": how,
        "plain_parameters": parameters,
        "plain_macs": found.macs,
        "plain_activation_bytes": found.memory,
    }


def latency_columns(model_spec: str) -> dict[str, Any]:
    """Milliseconds of the plain form, and of a network with skips as it is, which a CPU would rather run."""
    model = built(model_spec)
    plain, how = plain_form(model)
    columns = {f"plain_{key}": value for key, value in latency(plain).items()}
    return columns | ({f"own_{key}": value for key, value in latency(model).items()} if how == RM else {})


def latency(model: nn.Module) -> dict[str, float]:
    """Milliseconds of one image in onnxruntime on one thread of a CPU: the least, and the median.

    They are the thread's own CPU time, which other programs on the same machine hardly lengthen.
    """
    import onnxruntime

    example = torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # so all runs in this thread
    with tempfile.TemporaryDirectory() as folder:
        file = export(model, Path(folder) / "network.onnx", example=example).path
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: example.numpy()}
    session.run(None, feed)
    times: list[float] = []
    while len(times) < LATENCY_RUNS or sum(times) < LATENCY_SECONDS:
        began = time.thread_time()
        session.run(None, feed)
        times.append(time.thread_time() - began)
    return {"ms": 1000 * min(times), "ms_median": 1000 * statistics.median(times)}


def training_columns(model_specs: Sequence[str], setting: Setting) -> dict[str, dict[str, Any]]:
    """Training images/s and peak memory of networks that are timed side by side, by their specs."""
    comparison = Comparison(model_specs, setting)
    comparison.run()
    columns = {}
    for row in comparison.rows:
        if row.case.network in model_specs:
            ratios = comparison.ratios(row)
            columns[row.case.network] = {
                "train_images_per_s": row.images_per_s,
                "train_bytes": row.memory,
                "train_speed_ratio": ratios["speed"],
                "train_memory_ratio": ratios["memory"],
                "train_error": row.error,
            }
    return columns
