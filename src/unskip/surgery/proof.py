"""The proof that every exact rewriting comes with: made in float64, compared, and stored in the model's dtype."""

import torch
from torch import Tensor, nn

from unskip._core.errors import RUN_ERRORS, reason
from unskip._core.inputs import in_dtype, is_batch, is_tokens
from unskip._core.layers import altered
from unskip._core.modules import checked_model, copied, has_global_hooks
from unskip.surgery.signs import decides
from unskip.surgery.verify import TOLERANCE, Check, difference, in_words, verify

EXACT = 1e-9  # relative error in float64 that an exact rewriting stays below
FLOAT32_EPS_RATIO = 2.0**-29  # float64's rounding, relative to that of float32
LARGE = 96  # pixels; a larger example is checked at smaller sizes alone


def refuse_training(command: str, model: nn.Module) -> None:
    """Refuses a model of which a part is in training mode."""
    training = next((path for path, module in model.named_modules() if module.training), None)
    if training is not None:
        raise ValueError(
            f"{command}: {training or type(model).__name__!r} is in training mode, where norms depend on the batch and "
            "dropout on chance, so its function can't be kept; call .eval() on the network first."
        )


def hidden_decisions(model: nn.Module) -> str:
    """Why one pass of a model does not show what it does with other inputs, the end of a sentence; '' if it does."""
    why = decides(model, defaults=True)
    way_out = "Take decisions by sizes and values out of it; torch._assert may stand for assert."
    return f"can't be rewritten exactly: {why}. {way_out}" if why else ""


def in_float64(command: str, model: nn.Module) -> nn.Module:
    """A copy of a model in float64 on the CPU; refused if its function is not that of its modules, or dtypes mix."""
    model = checked_model(command, model)
    stored_as(command, model)
    refuse_training(command, model)
    if has_global_hooks(backward=False):
        raise ValueError(
            f"{command}: a global forward hook (torch.nn.modules.module.register_module_forward_hook) may change what "
            "any module computes; remove it first."
        )
    for path, module in model.named_modules():
        if why := altered(module):
            raise ValueError(
                f"{command}: {path or 'the model'!r} ({type(module).__name__}) {why}, which may change what it "
                "computes; remove it first (torch.nn.utils.prune.remove and remove_weight_norm make plain weights)."
            )
    return copied(command, model).to("cpu", torch.float64)


def stored_as(command: str, model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """The one device and dtype of a model."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    kinds = {(t.device, t.dtype) for t in tensors}
    if any(t.is_meta for t in tensors):
        raise ValueError(f"{command}: the network is on the meta device and has no weights; load them first.")
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for device, dtype in kinds))
        raise ValueError(f"{command}: the weights are of several kinds ({found}); bring them to one with .to().")
    return kinds.pop() if kinds else (torch.device("cpu"), torch.float32)


def prove(command: str, original: nn.Module, rewritten: nn.Module, x: Tensor) -> float:
    """The largest relative error of the rewritten model's output; a ValueError where it is another function.

    Compared on the example, and on random inputs of two other sizes if the models take them, in turn without gradients
    and with them, since a forward may ask.

    Args:
        command: the function that the user has called, for messages.
        original: in float64 on the CPU.
        rewritten: what is to be the same function.
        x: a batch of inputs in float64.
    """
    worst = 0.0
    for number, batch in enumerate([x, x[:1], *_other_sizes(x)]):
        with torch.set_grad_enabled(number % 2 == 1):
            try:
                expected = original(batch.clone())
                found = rewritten(batch.clone())
            except RUN_ERRORS as problem:
                if number > 0:
                    continue  # a size that one of them does not take, and says so
                raise ValueError(
                    f"{command}: the new network can't run as the old one: {reason(problem)}."
                ) from problem
        if not isinstance(expected, Tensor):
            raise ValueError(
                f"{command}: {type(original).__name__} does not return one tensor; wrap it so that it does."
            )
        if not torch.isfinite(expected).all():
            raise ValueError(f"{command}: the output is not finite, so there is nothing to check the result by.")
        same_shape = isinstance(found, Tensor) and found.shape == expected.shape
        error = difference(expected.detach(), found.detach()).relative if same_shape else torch.inf
        if error > EXACT:
            check = verify(original, rewritten, batch)
            # A network that float32 moves far is moved by float64 too, by as much less as its numbers are finer.
            if error > 10 * check.rounding * FLOAT32_EPS_RATIO:
                raise ValueError(
                    f"{command}: the new network is not the same function (a relative error of {error:.1e} on inputs "
                    f"of shape {tuple(batch.shape)}, {'with' if number % 2 else 'without'} gradients), so you don't "
                    f"get it.\n{check}"
                )
        worst = max(worst, error)
    return worst


def proven(
    command: str, model: nn.Module, original: nn.Module, rewritten: nn.Module, x: Tensor
) -> tuple[nn.Module, float, Check]:
    """The rewritten model in the dtype and on the device of the given one, or an error where it differs.

    Returns:
        The model, its relative error in float64 before its weights were rounded, and what `verify` says of it now.
    """
    exact = prove(command, original, rewritten, x)
    rewritten = rewritten.to(*stored_as(command, model))
    return rewritten, exact, check_stored(command, model, rewritten, x)


def check_stored(command: str, model: nn.Module, rewritten: nn.Module, x: Tensor) -> Check:
    """What `verify` says of two models in their own dtype; a ValueError where they differ in float32."""
    check = verify(model, rewritten, x)
    if next(rewritten.parameters(), x).dtype == torch.float32 and check.worst() > max(TOLERANCE, 10 * check.rounding):
        raise ValueError(
            f"{command}: the new network is not the same function in float32, so you don't get it.\n{check}"
        )
    return check


def _other_sizes(x: Tensor) -> list[Tensor]:
    """Random images, or series, of half the size and of half more (a quarter where the example is large).

    Of tokens the two halves of a text.
    """
    if is_tokens(x):
        return [x[:1, : (x.shape[1] + 1) // 2], x[:1, x.shape[1] // 2 :]]
    if x.ndim not in (3, 4):
        return []
    generator = torch.Generator().manual_seed(1)
    scales = (0.5, 1.5) if max(x.shape[2:]) <= LARGE else (0.5, 0.25)
    shapes = [(1, x.shape[1], *(max(1, int(side * scale)) for side in x.shape[2:])) for scale in scales]
    if x.ndim == 3:  # series with their channels last, too
        shapes += [(1, max(1, int(x.shape[1] * scale)), x.shape[2]) for scale in scales]
    return [3 * torch.randn(shape, generator=generator, dtype=x.dtype) for shape in shapes]


def find_example(command: str, model: nn.Module, example: Tensor | None, rewritten: nn.Module | None = None) -> Tensor:
    """The given example in float64, or random inputs of a shape that the model takes, and so does what it became."""
    models = [m for m in (model, rewritten) if m is not None]
    if example is not None:
        if not is_batch(example) or example.is_meta:
            raise ValueError(
                f"{command}: example={in_words(example)} must be a batch of floating-point inputs, or of tokens (B, T)."
            )
        if not torch.isfinite(example).all():
            raise ValueError(f"{command}: example has numbers that are not finite, so nothing can be checked on it.")
        x = in_dtype(example.detach().cpu(), torch.float64)
        for m in models:
            if problem := _problem(m, x):
                name = type(m).__name__
                raise ValueError(f"{command}: {name} can't run on an example of shape {tuple(x.shape)}: {problem}.")
        return x
    generator = torch.Generator().manual_seed(0)
    first = next((m for m in model.modules() if isinstance(m, nn.Embedding | nn.Conv2d | nn.Linear)), None)
    if isinstance(first, nn.Embedding):
        x = torch.randint(first.num_embeddings, (2, min(16, getattr(model, "context", 16))), generator=generator)
        if not _problem(model, x):
            return x
    for shape in input_shapes(model):
        x = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        if not any(_problem(m, x) for m in models):
            return x
    name = type(model).__name__
    raise ValueError(f"{command}: no input was found that {name} takes, to check the result on; give it as example=.")


@torch.no_grad()
def _problem(model: nn.Module, x: Tensor) -> str:
    """Why the model can't run on an input; '' if it can."""
    try:
        like = next(model.parameters(), x)
        model(in_dtype(x.clone().to(like.device), like.dtype) if like.is_floating_point() else x.clone())
    except RUN_ERRORS as error:
        return reason(error)
    return ""


def input_shapes(model: nn.Module) -> list[tuple[int, ...]]:
    """Shapes of one input that the model may take: small, one side odd and one even where that is its choice."""
    shapes: list[tuple[int, ...]] = []
    image_shape = getattr(model, "image_shape", None)
    if image_shape is not None:
        shapes.append(tuple(image_shape))
    first = next((m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Linear)), None)
    if isinstance(first, nn.Linear):
        shapes.append((first.in_features,))
    elif isinstance(first, nn.Conv1d):
        shapes += [(first.in_channels, 65), (first.in_channels, 64)]
    channels = first.in_channels if isinstance(first, nn.Conv2d) else 3
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is not None:
        shapes.append((channels, *size))
    config = getattr(model, "pretrained_cfg", None) or {}
    input_size = tuple(config.get("input_size", (channels, 32, 32)))
    side = min(64, input_size[-1])
    return [*shapes, (channels, side + 1, side), (channels, side, side), (channels, *input_size[1:])]
