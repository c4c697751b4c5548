"""Closed-form coders as the cheap operations that they are: sums of neighbouring channels, without a matrix.

    group average   z_g = e Σ_{c in g} x_c,       y_c = d σ(z_g) for every channel c of group g; e = d = 1/√n
    identity        z = the first C_B channels,   y = σ(z) and zeros for the others

A paired coder carries x+ and x-, and σ(z) - σ(-z) = z where it is used: it has no activation left. e and d are taken
from the coder's weights, as these were rounded when they were stored.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.coders.closed import FORMS, odd_part_is_identity, paired
from unskip.coders.coder import Coder, CoderSpec


class CheapCoder(nn.Module):
    """A closed-form coder without matrices."""

    def __init__(
        self,
        form: str,
        *,
        channels: int,  # C
        groups: int,  # directions that it carries: C_B, or C_B / 2 of a paired coder
        scales: tuple[float, float],  # e and d
        dim: int,  # of the channels: 1 of images, -1 of an MLP
        act: nn.Module | None,  # None for a paired coder
        depth: int = 1,  # activations in a row
    ) -> None:
        super().__init__()
        self.form, self.channels, self.groups = form, channels, groups
        self.scales, self.dim, self.act, self.depth = scales, dim, act, depth

    def forward(self, x: Tensor) -> Tensor:
        e, d = self.scales
        each = self.channels // self.groups
        if self.form == "identity":
            code = e * x.narrow(self.dim, 0, self.groups)
        else:
            code = e * x.unflatten(self.dim, (self.groups, each)).sum(2 if self.dim == 1 else -1)
        if self.act is not None:
            for _ in range(self.depth):
                code = self.act(code)
        code = d * code
        if self.form == "identity":
            behind = (0, 0, 0, 0) if self.dim == 1 else ()
            return F.pad(code, (*behind, 0, self.channels - self.groups))
        return code.repeat_interleave(each, self.dim)

    def extra_repr(self) -> str:
        return f"{self.form}, {self.channels} -> {self.groups} -> {self.channels}"


@torch.no_grad()
def cheap_form(coder: Coder) -> CheapCoder | None:
    """The coder without its matrices; None where it is no closed form, or one of groups of different sizes."""
    code, channels = coder.enc.shape[:2]
    linear = coder.enc.ndim == 2
    if not linear and (coder.enc.shape[2:] != (1, 1) or coder.dec.shape[2:] != (1, 1)):
        return None
    enc, dec = coder.enc.flatten(1).double().cpu(), coder.dec.flatten(1).double().cpu()
    e, d = enc.max(), dec.max()
    for form, make in FORMS.items():
        for signs in (1, 2):
            if code % signs or (signs == 2 and not odd_part_is_identity(coder.act, coder.depth)):
                continue
            spec = CoderSpec(channels=channels, code=code, pretext=form, act="", paired=signs == 2)
            pattern = [weight.sign() for weight in (paired(make, spec) if signs == 2 else make(spec))]
            groups = code // signs
            same = torch.equal(enc, e * pattern[0]) and torch.equal(dec, d * pattern[1])
            if same and (form == "identity" or channels % groups == 0):
                return CheapCoder(
                    form,
                    channels=channels,
                    groups=groups,
                    scales=(e.item(), d.item()),
                    dim=-1 if linear else 1,
                    act=coder.act if signs == 1 else None,
                    depth=coder.depth,
                )
    return None
