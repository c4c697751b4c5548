"""Compares the fused blocks with PyTorch's own autograd in float32; Triton's interpreter needs no GPU.

TRITON_INTERPRET=1 python check_fused.py
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from fused import FusedBlock
from networks import coder_matrix
from torch import Tensor


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp(min=1e-12)).item()


def check(
    channels: int,
    hidden: int,
    path: str,
    second_norm: bool,
    kernel2: int = 3,
    size: int = 8,
    lasting: int | None = None,
    code: int = 0,
) -> float:
    """Largest relative difference over the output and all gradients, for one block on random data."""
    g = torch.Generator().manual_seed(channels + hidden)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=g) * scale

    x = draw(2, channels, size, size).relu().contiguous(memory_format=torch.channels_last).requires_grad_()
    w1 = draw(hidden, channels, 3, 3, scale=0.1).requires_grad_()
    w2 = draw(channels, hidden, kernel2, kernel2, scale=0.1).requires_grad_()
    kept1, kept2 = torch.ones_like(w1), torch.ones_like(w2)  # of the weights, which there are
    if lasting is not None:
        off = torch.ones(3, 3)
        off[1, 1] = 0
        kept1[:, lasting:] -= off
        kept2[lasting:] -= off
        with torch.no_grad():
            w1 *= kept1
            w2 *= kept2
    norms = [
        [(1 + draw(n, scale=0.2)).requires_grad_(), draw(n, scale=0.3).requires_grad_()] for n in (hidden, channels)
    ]
    matrix = {"identity": torch.eye(channels), "none": torch.zeros(channels, channels)}.get(path)
    matrix = coder_matrix(path, channels, 0) if matrix is None else matrix

    enc, dec = draw(code, channels, 3, 3, scale=0.1), draw(channels, code, kernel2, kernel2, scale=0.1)
    a = F.batch_norm(F.conv2d(x, w1, padding=1), None, None, *norms[0], True).relu()
    out = F.conv2d(a, w2, padding=kernel2 // 2)
    if code:
        out = out + F.conv2d(F.conv2d(x, enc, padding=1).relu(), dec, padding=kernel2 // 2)
    out = F.batch_norm(out, None, None, *norms[1], True) if second_norm else out
    y = (out + torch.einsum("oc,bchw->bohw", matrix, x)).relu()
    gy = draw(*y.shape).contiguous(memory_format=torch.channels_last)
    trained = [x, w1, w2, *norms[0], *(norms[1] if second_norm else [])]
    want = list(torch.autograd.grad(y, trained, gy))
    want[0] = want[0] * (x > 0)  # a fused block returns the gradient its producer's relu lets through

    def flat(w: Tensor) -> Tensor:
        return w.detach().permute(0, 2, 3, 1).reshape(-1).contiguous()

    def views(gain: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        n = len(gain)
        return torch.zeros(n), torch.zeros(n), gain.detach(), bias.detach(), torch.zeros(n), torch.zeros(n)

    block = SimpleNamespace(
        w1=flat(torch.cat([w1, enc])), w2=flat(torch.cat([w2, dec], 1)), dw1=torch.zeros(w1.numel() + enc.numel()),
        dw2=torch.zeros(w2.numel() + dec.numel()), path=path, last=True, lasting=lasting, code=code,
        norm1=views(*norms[0]), norm2=views(*norms[1]) if second_norm else None,
    )  # fmt: skip
    source = x.detach().clone().requires_grad_()
    got_y = FusedBlock.apply(source, block)
    (gx,) = torch.autograd.grad(got_y, source, gy)
    dw1, dw2 = block.dw1.view(hidden + code, -1), block.dw2.view(-1, hidden + code)
    for coder in (dw1[hidden:], dw2[:, hidden:]):
        assert not coder.any(), "a frozen coder has a gradient"
    got = [gx, dw1[:hidden].reshape(-1), dw2[:, :hidden].reshape(-1)]
    got += [*block.norm1[4:], *(block.norm2[4:] if second_norm else [])]
    want[1:3] = [flat(want[1] * kept1), flat(want[2] * kept2)]
    got[1:3] = [got[1] * flat(kept1), got[2] * flat(kept2)]  # as the engine masks them
    return max(relative(got_y, y), *(relative(a, b) for a, b in zip(got, want, strict=True)))


def main() -> None:
    cases = [(16, 8, path, False) for path in ("pair", "identity", "half", "quarter", "turns", "none")]
    cases += [(16, 16, "identity", True), (16, 8, "pair", True), (32, 8, "pair", False), (24, 12, "half", False)]
    cases += [(16, 8, "pair", False, 1), (32, 24, "pair", False, 1)]
    cases += [(channels, channels // 2, "none", False, 3, 8, None, channels // 2) for channels in (16, 32, 64)]
    cases += [(24, 5, "pair", True, 3, 8, None, 7), (16, 8, "none", False, 1, 8, None, 8)]
    cases += [(16, 8, "half", False, 3, 8, 8), (24, 5, "half", False, 3, 8, 12), (48, 8, "half", False, 3, 8, 24)]
    for case in cases:
        worst = check(*case)
        print(*case, f"{worst:.1e}")
        assert worst < 1e-5, f"fused block {case} differs from autograd by {worst:.1e}"


if __name__ == "__main__":
    main()
