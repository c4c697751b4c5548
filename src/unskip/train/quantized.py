"""Quantisation-aware training: a trained network trains on as the INT8 file that it will become.

It is folded (after `rm`, where it has skips), its ranges are read from training images, and every layer rounds its
input and its weight as the file does (`unskip.ship.fake_quant`). `unskip export` keeps these ranges.
"""

from pathlib import Path

import torch
from torch import nn

from unskip.data.feed import make_feed
from unskip.data.sets import DataSet
from unskip.io.network_file import Header, save
from unskip.ship import fake_quantized, fold
from unskip.surgery import find_blocks, plainify
from unskip.train.recipe import Recipe

CALIBRATION = 512  # training images
NETWORK = "network.safetensors"  # the file of the network, in the folder of its run


def quantization_aware(model: nn.Module, recipe: Recipe, data: DataSet) -> nn.Module:
    """The network that the recipe's `quantize` asks for, from a trained one."""
    if data.vocabulary:
        raise ValueError("recipe: quantize is for networks that read images; set it to 0.")
    feed = make_feed(data, recipe.data, **recipe.feeding)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
    images = torch.cat([x for x, _ in feed.plain_batches(data.train, (order[:CALIBRATION],))])
    model = model.eval()
    if any(True for _ in find_blocks(model)):
        model = plainify(model, "rm", example=images[:2])
    return fake_quantized(fold(model, example=images[:2]), images, bits=recipe.run.quantize)


def write_network(path: Path, model: nn.Module, recipe: Recipe, data: DataSet) -> None:
    """Writes the network with its ranges as a file that every command reads."""
    header = Header(
        network={}, name=f"{recipe.network}, quantised", input_size=tuple(data.input_size), trained=True,
        folded="dense", data=recipe.data.as_dict(),
    )  # fmt: skip
    save(path, model.eval().cpu(), header, force=True, command="train")
