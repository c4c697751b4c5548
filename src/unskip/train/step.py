"""One update: forward, loss, penalties, backward, clipping, optimizer, constraints; eagerly or as one CUDA graph."""

from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from unskip.methods import fused
from unskip.train.optim import CAPTURABLE
from unskip.train.penalties import Constraint, Penalty, total
from unskip.train.recipe import Recipe

STATS = ("loss", "error", "penalty")  # what an update returns, in this order; the error in percent


class Step:
    """Calling it with a batch makes one update and returns STATS as a tensor that nobody has waited for."""

    def __init__(
        self,
        accelerator: Accelerator,
        network: nn.Module,  # as prepared by Accelerate
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        penalties: Sequence[Penalty] = (),
        constraints: Sequence[Constraint] = (),
    ) -> None:
        self.accelerator, self.network, self.optimizer = accelerator, network, optimizer
        self.bare = accelerator.unwrap_model(network)
        self.penalties, self.constraints, self.clip = penalties, constraints, recipe.optimizer.clip
        self.criterion = make_loss(recipe)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        logits = class_axis(self.network(x), y)
        loss = self.criterion(logits, y)
        penalty = total(self.penalties, self.bare)
        self.accelerator.backward(loss if penalty is None else loss + penalty)
        if self.clip:
            self.accelerator.clip_grad_norm_(self.network.parameters(), self.clip)
        self.optimizer.step()
        for constraint in self.constraints:
            constraint(self.bare)
        with torch.no_grad():
            truth = y.argmax(1) if y.is_floating_point() else y  # mixed labels: the larger part
            error = 100 * (logits.argmax(1) != truth).to(loss.dtype).mean()
            return torch.stack([loss.detach(), error, torch.zeros_like(loss) if penalty is None else penalty.detach()])


class GraphStep(Step):
    """The same update, recorded once as one CUDA graph and replayed.

    The first call runs the update a few times, so that memory and algorithms are settled, and puts everything back
    before it records.
    """

    graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        if self.graph is None:
            self.capture(x, y)
        assert self.graph is not None
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.stats.clone()

    def capture(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x.clone(memory_format=torch.preserve_format), y.clone()
        device = x.device
        for group in self.optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)
        fresh = not self.optimizer.state
        weights = {key: value.clone() for key, value in self.bare.state_dict().items()}
        state = [tensor.clone() for tensor in self._optimizer_tensors()]
        random = torch.cuda.get_rng_state(device)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(3):
                super().__call__(self.x, self.y)
        torch.cuda.current_stream(device).wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            self.stats = super().__call__(self.x, self.y)
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = graph
        with torch.no_grad():
            for key, value in self.bare.state_dict().items():
                value.copy_(weights[key])
            for i, tensor in enumerate(self._optimizer_tensors()):
                # A fresh optimizer starts from zeros: momentum times 0 plus the gradient is the gradient.
                tensor.zero_() if fresh else tensor.copy_(state[i])
        torch.cuda.set_rng_state(random, device)

    def _optimizer_tensors(self) -> list[Tensor]:
        states = self.optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def make_step(
    accelerator: Accelerator,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    penalties: Sequence[Penalty] = (),
    constraints: Sequence[Constraint] = (),
) -> Step:
    """The step that a recipe asks for; a CUDA graph is refused where it can't be recorded."""
    obstacles = {
        "it needs an NVIDIA GPU": accelerator.device.type != "cuda",
        "it works on one GPU": accelerator.num_processes > 1,
        "precision='fp16' asks the CPU at each update; use 'bf16'": recipe.run.precision == "fp16",
        f"its optimizers are {', '.join(CAPTURABLE)}": recipe.optimizer.optimizer.lower() not in CAPTURABLE,
    }
    for reason in (words for words, there in obstacles.items() if there and recipe.run.cuda_graph):
        raise ValueError(f"recipe: cuda_graph=true is not possible here: {reason}. Set cuda_graph=false.")
    kind = GraphStep if recipe.run.cuda_graph else Step
    return kind(accelerator, network, optimizer, recipe, penalties, constraints)


def class_axis(logits: Tensor, y: Tensor) -> Tensor:
    """Logits with the classes on axis 1, where losses expect them. Those of a text come as (B, T, classes)."""
    return logits.transpose(1, 2) if logits.ndim == 3 and y.ndim == 2 else logits


def make_loss(recipe: Recipe) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy, or timm's binary one. Mixed batches come with soft labels that are smoothed already."""
    smoothing = 0.0 if recipe.data.mixes else recipe.optimizer.smoothing
    if recipe.optimizer.loss == "binary":
        return BinaryCrossEntropy(smoothing=smoothing)
    return SoftTargetCrossEntropy() if recipe.data.mixes else nn.CrossEntropyLoss(label_smoothing=smoothing)


def compile_network(network: nn.Module, recipe: Recipe, image_size: int) -> None:
    """torch.compile in place: the whole network, or each block, which compiles once for each kind of block.

    On images of so few px that all blocks see small ones, those that train by kernels of their own
    (`unskip.methods.fused`) are left to them: they are faster than what a compiler makes of such blocks.
    """
    if recipe.run.compile == "no":
        return
    # Blocks of one class share their code, so each width counts as a recompilation of it.
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 128)
    if recipe.run.compile == "whole":
        network.compile()
        return
    blocks = [child for module in network.modules() if _holds_blocks(module) for child in module.children()]
    if not blocks:
        name = type(network).__name__
        raise ValueError(f"recipe: compile='blocks' found no blocks in {name}, one after the other; use 'whole'.")
    device = next(network.parameters()).device
    by_kernels = recipe.run.precision == "bf16" and recipe.run.channels_last and image_size <= fused.MAX_SIDE
    for block in blocks:
        if not (by_kernels and fused.is_eligible(block, device)):
            block.compile()


def _holds_blocks(module: nn.Module) -> bool:
    """A stage: a sequence of at least two modules, each with layers inside, none of which is a stage itself."""
    children = list(module.children())
    if not isinstance(module, nn.Sequential | nn.ModuleList) or len(children) < 2:
        return False
    return all(any(True for _ in child.children()) and not _holds_blocks(child) for child in children)
