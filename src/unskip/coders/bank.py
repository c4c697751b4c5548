"""The bank: the coders of one network, one per CoderSpec (Algorithm 1, "copy to all blocks")."""

import copy
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import nn

from unskip.coders import cache
from unskip.coders.closed_form import ClosedFormCoder
from unskip.coders.coder import Coder, FittedCoder, SharedCoder
from unskip.coders.fit import PRETEXT_TASKS, ROUNDS, Fit, fit, floor
from unskip.coders.matrices import FORMS, averaging, he_normal
from unskip.coders.spec import CoderSpec
from unskip.coders.transition import ClosedFormTransition, FittedTransition, TransitionCoder

PRETEXTS = (*PRETEXT_TASKS, *FORMS, "random")


class CoderBank:
    """Hands out each coder once as itself, for the block that holds it, and from then on as a SharedCoder.

    Example:
        >>> bank = unskip.nn.CoderBank()  # blocks of one width share a coder, (B, 16, H, W) -> (B, 16, H, W)
        >>> blocks = [unskip.nn.PNNHBlock(16, bank=bank) for _ in range(3)]
        >>> [type(block.coder).__name__ for block in blocks]
        ['ClosedFormCoder', 'SharedCoder', 'SharedCoder']
    """

    def __init__(self) -> None:
        self._coders: dict[tuple[CoderSpec, bool], Coder] = {}

    def take(self, spec: CoderSpec, act: nn.Module, *, dense: bool = False, **factory: Any) -> Coder | SharedCoder:
        """The coder of this spec; `dense` is that of `ClosedFormCoder`, `factory` has the device and dtype."""
        if (spec, dense) in self._coders:
            return SharedCoder(self._coders[spec, dense])
        coder = self._coders[spec, dense] = make_coder(spec, act, dense=dense, **factory)
        return coder

    def take_transition(
        self,
        target: CoderSpec,
        act: nn.Module,
        *,
        in_channels: int,
        limit: int,
        stride: int,
        dense: bool = False,
        **factory: Any,
    ) -> tuple[TransitionCoder, int]:
        """The coder of a transition into the width of `target`, and its C_B.

        A closed form gives back any non-negative code that it has decoded, so the code is the pooled input itself, of
        at most `limit` channels. Other coders read what they are made for: the pooled input, each channel spread over
        the new ones that take its place.
        """
        coder = self.take(target, act, dense=dense, **factory)
        act = plain_copy(act)
        if target.pretext in FORMS:
            signs = 2 if target.paired else 1
            groups = min(in_channels, target.code // signs, limit // signs)
            factory |= {"in_channels": in_channels, "groups": groups, "dense": dense}
            return ClosedFormTransition(target, coder, act, stride, **factory), groups * signs
        enc = self._coders[target, dense].matrices()["enc"]
        centre = enc if target.linear else enc[:, :, target.kernel // 2, target.kernel // 2]
        if in_channels <= target.channels:
            lift = averaging(in_channels, target.channels).T
        else:
            lift = averaging(target.channels, in_channels)
        mix = (centre.double() @ lift.to(centre.device)).to(**factory)
        return FittedTransition(target, coder, act, stride, mix), target.code


def make_coder(spec: CoderSpec, act: nn.Module, *, dense: bool = False, **factory: Any) -> Coder:
    """A coder: in closed form, drawn at random, from the cache, or fitted now. On the meta device it is not fitted.

    `dense` is that of `ClosedFormCoder`, `factory` has the device and dtype.
    """
    assert act_name(act) == spec.act, f"{act} is not the activation of {spec}"
    act = plain_copy(act)
    if spec.pretext in FORMS:
        return ClosedFormCoder(spec, act, dense=dense, **factory)
    enc, dec = (torch.empty(shape, **factory) for shape in (spec.enc_shape, spec.dec_shape))
    if not enc.is_meta:
        if spec.pretext == "random":
            weights = he_normal(spec)
        elif spec.pretext in PRETEXT_TASKS:
            fitted = cached_fit(spec, act)
            weights = fitted.enc, fitted.dec
        else:
            raise ValueError(f"CoderSpec: pretext={spec.pretext!r} is not known. Known: {', '.join(PRETEXTS)}.")
        enc.copy_(weights[0])
        dec.copy_(weights[1])
    return FittedCoder(enc, dec, act, spec.depth)


def cached_fit(spec: CoderSpec, act: nn.Module) -> Fit:
    """The fit from the cache, or made now under a progress bar and put there."""
    known = cache.load(spec)
    if known is not None:
        return known
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    shown = console.is_terminal or console.is_jupyter
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        name = f"coder {spec.channels} → {spec.code}, {spec.pretext}"
        task = bar.add_task(name, total=ROUNDS)

        def on_round(done: int, mse: float) -> None:
            bar.update(task, completed=done, description=f"{name}: error {mse:.4f} (floor {floor(spec):.4f})")

        fitted = fit(spec, act, on_round)
    cache.store(spec, fitted)
    return fitted


def plain_copy(act: nn.Module) -> nn.Module:
    """A copy of an activation that does not work in place."""
    act = copy.deepcopy(act)
    if hasattr(act, "inplace"):
        act.inplace = False  # type: ignore[assignment]
    return act


def act_name(act: nn.Module) -> str:
    """An activation as PyTorch prints it, with its arguments."""
    return repr(plain_copy(act))
