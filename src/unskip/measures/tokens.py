"""Tokens and attention: whether layers still tell the tokens of one input apart, and what attention does to them.

Dong et al. 2021, arXiv:2103.03404: without skips, attention averages tokens layer by layer until the matrix of tokens
has rank 1 (rank collapse). Noci et al. 2022, arXiv:2206.03126: queries and keys then get no gradient. He et al. 2023,
arXiv:2302.10322, follow the cosine between tokens through depth.

Attention matrices are read from the functions that compute them, wherever a network calls them, and from modules that
have a method `matrix` (attention whose matrix is more than a softmax).
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from unskip.measures.layer_types import has_parts
from unskip.measures.probe import Family, Layer, Probe
from unskip.measures.series import Findings, measures_of
from unskip.theory import condition_number

MAX_SAMPLES = 8  # for attention matrices
MAX_TOKENS = 1024  # of one attention; the matrices of longer ones are left out
MAX_WIDTH = 1024  # of a product W_O W_V that is decomposed
SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)
PROJECTIONS = (  # names of the layers that write values and the output: ours, Llama's, timm's, GPT-2's, BERT's
    ("v", "o"), ("v_proj", "o_proj"), ("v_proj", "out_proj"), ("qkv", "proj"), ("c_attn", "c_proj"),
    ("query_key_value", "dense"),
)  # fmt: skip


def token_similarity(x: Tensor) -> float:
    """The mean cosine between two tokens of one input, mean over i ≠ j of cos(x_i, x_j); of tokens (B, T, C)."""
    unit = F.normalize(x.float(), dim=-1)
    count = unit.shape[1]
    total = unit.sum(1).square().sum(-1) - unit.square().sum((1, 2))  # without those of a token with itself
    return (total / (count * (count - 1))).mean().item()


def token_spread(x: Tensor) -> float:
    """What tokens have beside their mean, ‖X - 1x̄ᵀ‖ / ‖X‖ in Frobenius norms; of tokens (B, T, C), mean over inputs.

    0 is rank collapse (Dong et al. 2021, section 2, whose norm is √(‖·‖_1 ‖·‖_∞)): all tokens of an input are the same.
    """
    x = x.double()
    parts = x - x.mean(1, keepdim=True)
    total = torch.linalg.vector_norm(x, dim=(1, 2)).clamp_min(1e-300)
    return (torch.linalg.vector_norm(parts, dim=(1, 2)) / total).mean().item()


def attention_entropy(matrix: Tensor) -> float:
    """How widely tokens attend, H(p_i) / ln(tokens that i sees), mean over all i that see two and more.

    0: each token reads one token. 1: it reads the mean of all. p_i is row i of the attention matrix (..., T, T), in
    absolute values and divided by their sum, since a matrix that is more than a softmax may have negative entries.
    Causal attention is known by its zeros above the diagonal.
    """
    p = matrix.detach().abs().double()
    p = p / p.sum(-1, keepdim=True).clamp_min(1e-300)
    tokens = p.shape[-1]
    causal = p.shape[-2] == tokens and not bool(p.triu(1).any())
    seen = torch.arange(1, tokens + 1, device=p.device) if causal else torch.full((p.shape[-2],), tokens)
    entropy = torch.special.entr(p).sum(-1).reshape(-1, p.shape[-2]).mean(0)  # (T,)
    several = seen > 1
    return (entropy[several] / seen.to(entropy)[several].log()).mean().item()


def value_product(attention: nn.Module) -> Tensor | None:
    """W_O W_V of a self-attention, (C, C), over all heads; None if its layers are not known."""
    if isinstance(attention, nn.MultiheadAttention):
        if attention.in_proj_weight is None:
            return None
        return attention.out_proj.weight @ attention.in_proj_weight.chunk(3)[2]
    for value, output in PROJECTIONS:
        v, o = (getattr(getattr(attention, name, None), "weight", None) for name in (value, output))
        if not isinstance(v, Tensor) or not isinstance(o, Tensor) or v.ndim != 2 or o.ndim != 2:
            continue
        if value == "c_attn":  # transformers' Conv1D keeps (in, out)
            v, o = v.T, o.T
        v = v[-o.shape[1] :] if value in ("qkv", "c_attn", "query_key_value") else v
        if o.shape[1] % v.shape[0] == 0:  # where heads share values, each of them is read several times
            size = getattr(attention, "head_dim", v.shape[0])
            shared = o.shape[1] // v.shape[0]
            return o @ v.unflatten(0, (-1, size)).repeat_interleave(shared, 0).flatten(0, 1)
    return None


class AttentionMatrices(TorchFunctionMode):
    """Inside, `found` gets every attention matrix that PyTorch's functions compute; nothing else changes."""

    def __init__(self, found: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.found(softmax_matrix(*args, **kwargs))
        if func is F.multi_head_attention_forward:
            again = {**kwargs, "need_weights": True, "average_attn_weights": False, "training": False}
            matrix = func(*args, **again)[1]
            if matrix is not None:
                self.found(matrix)
        output = func(*args, **kwargs)
        if func in SOFTMAX and output.ndim >= 3 and output.shape[-1] == output.shape[-2] > 1:
            self.found(output)
        return output


def softmax_matrix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q kᵀ scale + mask), for the arguments of `scaled_dot_product_attention`: (..., T, T)."""
    eye = torch.eye(key.shape[-2], dtype=query.dtype, device=query.device).expand(*key.shape[:-2], -1, -1)
    settings: Any = {"scale": scale, "is_causal": is_causal} | ({"enable_gqa": True} if enable_gqa else {})
    return F.scaled_dot_product_attention(query, key, eye, attn_mask=attn_mask, **settings)


def attention_matrices(probe: Probe) -> dict[str, Tensor]:
    """The first attention matrix of each module that computes one, by its path."""
    modules = dict(probe.model.named_modules())
    inside: list[str] = []  # the modules that run, the innermost last
    found: dict[str, Tensor] = {}
    busy = False

    def keep(matrix: Tensor) -> None:
        path = next((p for p in reversed(inside) if has_parts(modules[p]) or not p), "")
        if max(matrix.shape[-2:]) <= MAX_TOKENS and not any(hasattr(modules[p], "matrix") for p in inside):
            found.setdefault(path, matrix)

    def before(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal busy
        if busy:
            return
        inside.append(path)
        if hasattr(module, "matrix") and path not in found:
            busy = True
            try:
                found[path] = module.matrix(*args, **kwargs)  # type: ignore[operator]
            finally:
                busy = False

    def after(path: str, *_: Any) -> None:
        if not busy:
            inside.pop()

    arguments = probe.first_samples(MAX_SAMPLES)
    with ExitStack() as stack, torch.no_grad():
        for path, module in modules.items():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            stack.callback(module.register_forward_pre_hook(partial(before, path), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(partial(after, path)).remove)
        stack.enter_context(AttentionMatrices(keep))
        probe.run(arguments)
    return found


def forward(layer: Layer, x: Tensor | None, y: Tensor) -> dict[str, float] | None:
    if y.ndim < 3 or layer.unit_axis != -1 or math.prod(y.shape[1:-1]) < 2 or not y.is_floating_point():
        return None
    tokens = y.flatten(1, -2)
    if not bool(tokens.any()):  # queries that start at zero
        return None
    return {"token_similarity": token_similarity(tokens), "token_spread": token_spread(tokens)}


def report(probe: Probe) -> Findings:
    """Entropy and conditioning of each attention; without any, tokens are no tokens, and nothing is reported."""
    attentions = attention_matrices(probe) if probe.values("token_spread") else {}
    layers = {}  # of each attention: the last one inside it
    for path in attentions:
        inside = [layer for layer in probe.layers if f"{layer.path}.".startswith(f"{path}." if path else "")]
        if inside:
            layers[path] = inside[-1]
    if not layers:
        for layer in probe.layers:
            layer.values.pop("token_similarity", None)
            layer.values.pop("token_spread", None)
        return Findings()
    notes = []
    for path, layer in layers.items():
        layer.values["attention_entropy"] = attention_entropy(attentions[path])
        product = value_product(probe.model.get_submodule(path))
        if product is None or max(product.shape) > MAX_WIDTH or not bool(product.isfinite().all()):
            notes.append(f"The conditioning of W_V W_O of {path!r} is not measured: its layers are not known, or wide.")
        else:
            layer.values["value_condition"] = condition_number(product.detach().double().cpu().numpy())
    return Findings(numbers={"token_spread": last_spread(probe)}, notes=tuple(notes[:1]))


def last_spread(probe: Probe) -> float:
    """The spread of tokens behind the last layer that all paths pass through, but for the one that ends the network."""
    hidden = [layer for layer in probe.layers[:-1] if layer.trunk and "token_spread" in layer.values]
    return hidden[-1].values["token_spread"] if hidden else math.nan


FAMILY = Family(name="tokens", measures=measures_of("tokens"), forward=forward, report=report)
