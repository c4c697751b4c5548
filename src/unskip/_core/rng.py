"""Random states: seeds from keys, and the global generators set for a while and put back.

Order and augmentation draw from generators that are seeded by (seed, epoch) or (seed, epoch, position) and so need no
state in a checkpoint. Only what the network itself draws while training (dropout, drop path) comes from the global
generators, whose states a checkpoint holds.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


def seed_of(*key: int) -> int:
    """One seed of 63 bits for a tuple of numbers; different keys give unrelated streams."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def set_seed(*key: int) -> None:
    """Seeds the global generators of PyTorch, numpy and Python."""
    seed = seed_of(*key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_state() -> dict[str, Any]:
    """The states of the global generators, of types that torch.load(weights_only=True) accepts."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        # Of this process's own GPU: asking the others would open them.
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": (torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "python": random.getstate(),
    }


def set_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words), gauss_next))


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """The global generators seeded by a key, and afterwards as they were before."""
    before = get_state()
    set_seed(*key)
    try:
        yield
    finally:
        set_state(before)


@contextmanager
def own_generators_preserved(model: nn.Module) -> Iterator[None]:
    """The random generators that modules of `model` hold as attributes are afterwards as they were before."""
    found = [value for module in model.modules() for value in vars(module).values()]
    torchs = [(each, each.get_state()) for each in found if isinstance(each, torch.Generator)]
    numpys = [each.bit_generator for each in found if isinstance(each, np.random.Generator)]
    states = [(each, each.state) for each in numpys]
    pythons = [(each, each.getstate()) for each in found if isinstance(each, random.Random)]
    try:
        yield
    finally:
        for generator, state in torchs:
            generator.set_state(state)
        for bits, numbers in states:
            bits.state = numbers
        for own, before in pythons:
            own.setstate(before)
