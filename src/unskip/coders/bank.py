"""The bank: the coders of one network, one per CoderSpec (Algorithm 1, "copy to all blocks")."""

import copy
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from unskip.coders import cache
from unskip.coders.closed import FORMS, averaging, closed_form, he_normal
from unskip.coders.closed_form import closed_of
from unskip.coders.coder import Coder, CoderRef, TransitionCoder
from unskip.coders.fit import PRETEXT_TASKS, ROUNDS, Fit, fit, floor
from unskip.coders.spec import CoderSpec

PRETEXTS = (*PRETEXT_TASKS, *FORMS, "random")


class CoderBank:
    """Hands out each coder once as itself, for the block that registers it, and from then on as a CoderRef."""

    def __init__(self) -> None:
        self._coders: dict[tuple[CoderSpec, bool], Coder] = {}

    def take(self, spec: CoderSpec, act: nn.Module, *, fast: bool = False, **factory: Any) -> Coder | CoderRef:
        """The coder of this spec, a closed form computed as one if `fast`; `factory` has the device and dtype."""
        if (spec, fast) in self._coders:
            return CoderRef(self._coders[spec, fast])
        coder = self._coders[spec, fast] = make_coder(spec, act, fast=fast, **factory)
        return coder

    def take_transition(
        self,
        target: CoderSpec,
        act: nn.Module,
        *,
        in_channels: int,
        limit: int,
        stride: int,
        fast: bool = False,
        **factory: Any,
    ) -> tuple[TransitionCoder, int]:
        """The internal path of a transition into the width of `target`, and its C_B.

        A closed form gives back any non-negative code that it has decoded, so the code is the pooled input itself, of
        at most `limit` channels. Other coders read what they are made for: the pooled input, each channel spread over
        the new ones that take its place.
        """
        coder = self.take(target, act, fast=fast, **factory)
        mix = spread = None
        if target.pretext in FORMS:
            signs = 2 if target.paired else 1
            target_groups = target.code // signs
            groups = min(in_channels, target_groups, limit // signs)
            code = groups * signs
            if groups < in_channels or target.paired:
                mix = averaging(groups, in_channels)
                mix = torch.cat([mix, -mix]) if target.paired else mix
            if groups < target_groups:
                spread = torch.block_diag(*[averaging(groups, target_groups).T] * signs)
        else:
            code = target.code
            enc = (coder.coder if isinstance(coder, CoderRef) else coder).enc
            centre = enc if target.linear else enc[:, :, target.kernel // 2, target.kernel // 2]
            if in_channels <= target.channels:
                lift = averaging(in_channels, target.channels).T
            else:
                lift = averaging(target.channels, in_channels)
            mix = centre.double() @ lift.to(centre.device)
        transition = TransitionCoder(
            coder,
            plain_copy(act),
            stride=stride,
            depth=target.depth,
            mix=None if mix is None else mix.to(**factory),
            spread=None if spread is None else spread.to(**factory),
            fast=fast,
        )
        return transition, code


def make_coder(
    spec: CoderSpec,
    act: nn.Module,
    *,
    fast: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Coder:
    """A coder with its weights: in closed form, from the cache, or fitted now. On the meta device none of these."""
    assert act_name(act) == spec.act, f"{act} is not the activation of {spec}"
    act = plain_copy(act)
    enc, dec = (torch.empty(shape, device=device, dtype=dtype) for shape in (spec.enc_shape, spec.dec_shape))
    if not enc.is_meta:
        for empty, weight in zip((enc, dec), coder_weights(spec, act), strict=True):
            empty.copy_(weight)
    coder = Coder(enc, dec, act, spec.depth, fast=fast)
    if enc.is_meta and fast and spec.pretext in FORMS:
        # What they will be once they are loaded; without this a network on the meta device would be another one.
        real_enc, real_dec = (weight.to(enc.dtype) for weight in closed_form(spec))
        coder.closed = closed_of(real_enc, real_dec, coder.act, coder.depth)
    return coder


def coder_weights(spec: CoderSpec, act: nn.Module) -> tuple[Tensor, Tensor]:
    if spec.pretext in FORMS:
        return closed_form(spec)
    if spec.pretext == "random":
        return he_normal(spec)
    if spec.pretext in PRETEXT_TASKS:
        fitted = cached_fit(spec, act)
        return fitted.enc, fitted.dec
    raise ValueError(f"CoderSpec: pretext={spec.pretext!r} is not known. Known: {', '.join(PRETEXTS)}.")


def cached_fit(spec: CoderSpec, act: nn.Module) -> Fit:
    """The fit from the cache, or made now under a progress bar and put there."""
    fitted = cache.load(spec)
    if fitted is None:
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(
            *columns, console=console, transient=True, disable=not (console.is_terminal or console.is_jupyter)
        ) as bar:
            name = f"coder {spec.channels} → {spec.code}, {spec.pretext}"
            task = bar.add_task(name, total=ROUNDS)

            def on_round(done: int, mse: float) -> None:
                bar.update(task, completed=done, description=f"{name}: error {mse:.4f} (floor {floor(spec):.4f})")

            fitted = fit(spec, act, on_round)
        cache.store(spec, fitted)
    return fitted


def plain_copy(act: nn.Module) -> nn.Module:
    """A copy of an activation that leaves its input alone."""
    act = copy.deepcopy(act)
    if hasattr(act, "inplace"):
        act.inplace = False  # type: ignore[assignment]
    return act


def act_name(act: nn.Module) -> str:
    """An activation as PyTorch prints it, with its arguments."""
    return repr(plain_copy(act))
