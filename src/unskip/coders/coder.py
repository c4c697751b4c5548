"""Coders: the frozen internal path of PNNH (Zhang et al. 2024, arXiv:2402.08645, section 4.1, Eq. 4-10).

    coder(x) = W_dec ⊛ σ(W_enc ⊛ x)                      C -> C_B -> C, vanilla block and MLP (Eq. 6)
    coder(x) = W_dec ⊛ σ(I ⊛ σ(W_enc ⊛ x))              bottleneck and inverted bottleneck (Eq. 7, 8)

A `FittedCoder` stores its weights. A `ClosedFormCoder` (`unskip.coders.closed_form`) has a formula and stores none. One
coder serves all blocks of its width: the first holds it, the others a `SharedCoder`.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from unskip._core.layers import fast_form, layer_with

# σ(σ(x)) = σ(x): a second activation in a row changes nothing and need not be computed.
IDEMPOTENT = (nn.ReLU, nn.ReLU6, nn.Identity)
FORM = "_extra_state"  # PyTorch's key in state dicts for what is neither a parameter nor a buffer
FITTED = "a fitted coder"


class Coder(nn.Module):
    """A frozen map C -> C_B -> C: no gradient, no weight decay."""

    enc: Tensor | None  # (C_B, C, k, k), or (C_B, C) for a linear one
    dec: Tensor | None  # (C, C_B, k, k)

    def __init__(self, act: nn.Module, depth: int) -> None:
        super().__init__()
        self.act = act
        self.depth = 1 if isinstance(act, IDEMPOTENT) else depth  # activations in a row

    def form(self) -> str:
        """The kind of coder, in words. A state dict of another kind is refused."""
        return FITTED

    def matrices(self) -> dict[str, Tensor]:
        """W_enc and W_dec as `enc` and `dec`."""
        raise NotImplementedError

    def activate(self, code: Tensor) -> Tensor:
        for _ in range(self.depth):
            code = self.act(code)
        return code

    def decode(self, code: Tensor) -> Tensor:
        assert self.dec is not None
        return project(code, self.dec)

    def forward(self, x: Tensor) -> Tensor:
        assert self.enc is not None
        return self.decode(self.activate(project(x, self.enc)))

    def to_ordinary(self) -> nn.Sequential:
        """W_enc, the activation and W_dec as layers."""
        enc, dec = self.matrices().values()
        return nn.Sequential(frozen_layer(enc), *[self.act] * self.depth, frozen_layer(dec))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        found = self.form()
        if prefix + FORM in state_dict:
            found = bytes(state_dict[prefix + FORM].tolist()).decode(errors="replace")
        elif prefix + "enc" in state_dict:
            found = FITTED
        if found != self.form():
            args[-1].append(
                f"{prefix[:-1]!r} is {self.form()!r}, and the state dict is of {found!r}. Build the network with the "
                "pretext, ratio and widths that it was saved with."
            )
        super()._load_from_state_dict(state_dict, prefix, *args)


class FittedCoder(Coder):
    """A coder whose weights were fitted or drawn. They are buffers and stand in the state dict."""

    enc: Tensor
    dec: Tensor

    def __init__(self, enc: Tensor, dec: Tensor, act: nn.Module, depth: int = 1) -> None:
        super().__init__(act, depth)
        self.register_buffer("enc", enc)
        self.register_buffer("dec", dec)

    def matrices(self) -> dict[str, Tensor]:
        return {"enc": self.enc, "dec": self.dec}

    def extra_repr(self) -> str:
        return f"{self.dec.shape[0]} -> {self.dec.shape[1]} -> {self.dec.shape[0]}, kernel={kernel_of(self.enc)}"


class SharedCoder(nn.Module):
    """A coder that an earlier block holds. Both blocks use it; the state dict has it once, with the earlier block."""

    def __init__(self, coder: Coder) -> None:
        super().__init__()
        self.coder = coder

    def decode(self, code: Tensor) -> Tensor:
        return self.coder.decode(code)

    def forward(self, x: Tensor) -> Tensor:
        return self.coder(x)

    def to_ordinary(self) -> nn.Sequential:
        return self.coder.to_ordinary()

    def to_fast(self) -> nn.Module | None:
        return fast_form(self.coder)

    def state_dict(self, *args: Any, destination: Any = None, **options: Any) -> Any:
        return {} if destination is None else destination

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # The coder's present state: no key is missing, and what the earlier block loads stays.
        state_dict.update(self.coder.state_dict(prefix=f"{prefix}coder."))
        super()._load_from_state_dict(state_dict, prefix, *args)


def frozen_layer(weight: Tensor, **settings: Any) -> nn.Conv2d | nn.Linear:
    """An ordinary layer with this weight, frozen: linear for a matrix, else a 'same' convolution."""
    return layer_with(weight, padding=kernel_of(weight) // 2, **settings).requires_grad_(False)


def project(x: Tensor, weight: Tensor) -> Tensor:
    """x through a frozen weight: linear on the last axis for two axes, else a 'same' convolution."""
    return F.linear(x, weight) if weight.ndim == 2 else F.conv2d(x, weight, padding=kernel_of(weight) // 2)


def kernel_of(weight: Tensor) -> int:
    return 1 if weight.ndim == 2 else weight.shape[-1]
