"""Networks of one shape that train side by side: `plainnet_mlp` with its own rate, limit, slope and seed each.

A 100-layer MLP of 300 units fills a hundredth of a large GPU, so N of them are one batched product. Each is trained as
`unskip.train.run` would train it alone; tests/reproduce/test_plainnet_table2.py compares the two in float64.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unskip._core.rng import seeded
from unskip.data.feed import make_feed
from unskip.data.sets import DataSet, Split
from unskip.models.build import build_network
from unskip.train.optim import Rates
from unskip.train.recipe import Recipe

EPS, MOMENTUM = 1e-5, 0.1  # of nn.BatchNorm1d
OWN = ("lr", "seed", "max_norm", "options", "schedule", "min_lr")  # fields in which the recipes may differ


# ---------------------------------------------------------------- the arithmetic of one layer and one update


def normed_layer(z: Tensor, b: Tensor, gamma: Tensor, beta: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """f(BN(z + b)) with the statistics of the batch, which is the last axis; and these statistics."""
    z = z + b
    mean = z.mean(2, keepdim=True)
    centred = z - mean
    var = centred.square().mean(2, keepdim=True)
    y = centred * torch.rsqrt(var + EPS) * gamma + beta
    return torch.where(y > 0, y, slope * y), mean.detach(), var.detach()


def bare_layer(z: Tensor, b: Tensor, slope: Tensor) -> Tensor:
    """f(z + b)."""
    y = z + b
    return torch.where(y > 0, y, slope * y)


def descend(p: Tensor, g: Tensor, v: Tensor, lr: Tensor, momentum: float, decay: float) -> None:
    """SGD in place, as torch.optim.SGD: v <- momentum v + g + decay p, p <- p - lr v."""
    v.mul_(momentum).add_(g + decay * p)
    p.sub_(lr * v)


def descend_hidden(p: Tensor, g: Tensor, v: Tensor, lr: Tensor, momentum: float, decay: float, limit: Tensor) -> Tensor:
    """SGD, and the factor of each unit's incoming weights that `unskip.train.MaxNorm` then asks for."""
    descend(p, g, v, lr, momentum, decay)
    norm = p.square().sum(2, keepdim=True).sqrt()
    return (limit / norm.clamp_min(1e-12)).clamp_max(1.0)


# ---------------------------------------------------------------- networks side by side


class Crowd:
    """N networks of one shape that train side by side, each by its own recipe (rate, max-norm, slope, seed).

    Activations are (N, units, images), so a layer is one batched product, and BatchNorm a mean over the last axis.
    On a GPU the layer and the update are compiled and the whole step is one CUDA graph.
    """

    normed_layer: Callable[..., Any]
    bare_layer: Callable[..., Any]
    descend_hidden: Callable[..., Any]

    def __init__(
        self, recipes: Sequence[Recipe], data: DataSet, device: torch.device, dtype: torch.dtype, fast: bool = True
    ) -> None:
        self.recipes, self.data, self.device, self.dtype = list(recipes), data, device, dtype
        one = self.one = recipes[0]
        self.norm = bool(one.network.options["norm"])
        for recipe in recipes:
            own = {name: value for name, value in recipe.flat().items() if name in OWN}
            assert one.replace(**own) == recipe, "these differ in shape"
            assert recipe.network.options["norm"] == self.norm

        self.feeds = {r.run.seed: make_feed(data, r.data, **r.feeding, device=device, dtype=dtype) for r in recipes}
        self.feed = self.feeds[one.run.seed]
        self.images, self.labels = self.read(data.train)
        self.held = {"train": (self.images, self.labels), "test": self.read(data.test)}
        if data.val is not None:
            self.held["val"] = self.read(data.val)

        networks = self.build()
        layers = [list(network.stage1) for network in networks]
        depth = len(layers[0])

        def stacked(tensors: Sequence[Tensor], trained: bool = True) -> Tensor:
            return torch.stack([t.detach() for t in tensors]).to(device, dtype).requires_grad_(trained)

        def vectors(path: str, trained: bool = True) -> Tensor:  # (depth, N, units)
            each = [torch.stack([net[i].get_parameter(path).detach() for net in layers]) for i in range(depth)]
            return stacked(each, trained)

        self.weights = [stacked([net[i].transform.weight for net in layers]) for i in range(depth)]  # (N, units, in)
        self.fc = stacked([net.fc.weight for net in networks])
        self.fc_bias = stacked([net.fc.bias for net in networks])
        self.bias = vectors("transform.bias")
        self.vectors = [self.bias]
        if self.norm:
            self.gamma, self.beta = vectors("norm.weight"), vectors("norm.bias")
            self.vectors += [self.gamma, self.beta]
            self.mean = torch.zeros_like(self.bias, requires_grad=False)
            self.var = torch.ones_like(self.bias, requires_grad=False)
        self.params = [*self.weights, self.fc, self.fc_bias, *self.vectors]
        self.velocities = [torch.zeros_like(p, requires_grad=False) for p in self.params]

        n = len(recipes)

        def each(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, device=device, dtype=dtype)

        self.slope = each([getattr(net[0].act, "negative_slope", 0.0) for net in layers]).view(n, 1, 1)
        self.limit = each([recipe.optimizer.max_norm or math.inf for recipe in recipes]).view(n, 1, 1)
        self.lr = each([recipe.optimizer.lr for recipe in recipes])
        self.loss = torch.zeros_like(self.lr)
        self.index = torch.zeros(n, one.run.batch, dtype=torch.int64, device=device)
        self.done = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.normed_layer, self.bare_layer, self.descend_hidden = normed_layer, bare_layer, descend_hidden
        if fast and device.type == "cuda":
            self.normed_layer, self.bare_layer, self.descend_hidden = compiled()
            self.capture()

    def build(self) -> list[Any]:
        """The library's networks. Those with the same seed and options are the same."""
        made: dict[str, Any] = {}
        for recipe in self.recipes:
            key = f"{recipe.run.seed} {recipe.network.options}"
            if key not in made:
                with seeded(recipe.run.seed):
                    made[key] = build_network(
                        recipe.network, num_classes=self.data.classes, in_chans=self.data.channels
                    )
        return [made[f"{recipe.run.seed} {recipe.network.options}"] for recipe in self.recipes]

    def read(self, split: Split) -> tuple[Tensor, Tensor]:
        """(images, pixels) as the network reads them, and labels."""
        assert isinstance(split.images, Tensor)
        images = self.feed.normalise(split.images.to(self.device).permute(0, 3, 1, 2))
        return images.flatten(1).contiguous(), split.labels.to(self.device)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """(N, pixels, images) -> logits (N, classes, images), and the batch statistics of each layer."""
        rows = [vector.unsqueeze(-1).unbind(0) for vector in self.vectors]
        means, variances = [], []
        for i, W in enumerate(self.weights):
            z = torch.bmm(W, x)
            if self.norm:
                x, mean, var = self.normed_layer(z, *(row[i] for row in rows), self.slope)
                means.append(mean)
                variances.append(var)
            else:
                x = self.bare_layer(z, rows[0][i], self.slope)
        return torch.baddbmm(self.fc_bias.unsqueeze(-1), self.fc, x), means, variances

    def update(self) -> None:
        """One update of each network on its own batch (`index`) at its own rate (`lr`)."""
        x = self.images[self.index].transpose(1, 2)  # (N, pixels, images)
        logits, means, variances = self.forward(x)
        loss = F.cross_entropy(logits, self.labels[self.index], reduction="none").mean(1)  # (N,)
        grads = torch.autograd.grad(loss.sum(), self.params)  # a network's loss depends on its own weights alone
        with torch.no_grad():
            self.loss.copy_(loss)
            if self.norm:
                batch = x.shape[2]
                self.mean.lerp_(torch.stack(means).squeeze(-1), MOMENTUM)
                self.var.lerp_(torch.stack(variances).squeeze(-1) * (batch / (batch - 1)), MOMENTUM)
            how = self.one.optimizer.momentum, self.one.optimizer.weight_decay
            rate = self.lr.view(-1, 1, 1)
            for i, (p, g, v) in enumerate(zip(self.params, grads, self.velocities, strict=True)):
                if i < len(self.weights):  # hidden units
                    p.mul_(self.descend_hidden(p, g, v, rate, *how, self.limit))
                else:
                    descend(p, g, v, rate if p is self.fc else self.lr.view(-1, 1), *how)

    def state(self) -> list[Tensor]:
        return [*self.params, *self.velocities, *([self.mean, self.var] if self.norm else []), self.loss]

    def capture(self) -> None:
        """Records the update as one CUDA graph. What the warm-up did to weights and statistics is undone."""
        before = [t.detach().clone() for t in self.state()]
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            try:
                self.update()
            except torch._dynamo.exc.BackendCompilerFailed as error:  # slower, but the same numbers
                print(f"not compiled: {error}", flush=True)
                self.normed_layer, self.bare_layer, self.descend_hidden = normed_layer, bare_layer, descend_hidden
            for _ in range(2):
                self.update()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.update()
        with torch.no_grad():
            for t, old in zip(self.state(), before, strict=True):
                t.copy_(old)

    @torch.no_grad()
    def recalibrate_batchnorm(self) -> None:
        """Measures BatchNorm's statistics anew, as swa_utils.update_bn with all training images as one batch.

        Then each layer's statistics are those of what it reads in eval mode. Averages over batches of 128 are not: each
        layer's were taken while those before it were normalised by the batch, and 100 layers amplify the difference.
        """
        if not self.norm:
            return
        count = len(self.images)
        _, means, variances = self.forward(self.images.T.expand(len(self.recipes), -1, -1))
        self.mean.copy_(torch.stack(means).squeeze(-1))
        self.var.copy_(torch.stack(variances).squeeze(-1) * (count / (count - 1)))

    @torch.no_grad()
    def error(self, split: str) -> list[float]:
        """Of each network in eval mode, in percent; NaN where it no longer computes numbers."""
        images, labels = self.held[split]
        wrong = torch.zeros(len(self.recipes), dtype=torch.int64, device=self.device)
        finite = torch.ones(len(self.recipes), dtype=torch.bool, device=self.device)
        for x, y in zip(images.split(512), labels.split(512), strict=True):
            h = x.T.expand(len(self.recipes), -1, -1)
            for i, W in enumerate(self.weights):
                z = torch.baddbmm(self.bias[i].unsqueeze(-1), W, h)
                if self.norm:
                    scale = self.gamma[i] * torch.rsqrt(self.var[i] + EPS)
                    z = torch.addcmul(self.beta[i].unsqueeze(-1), z - self.mean[i].unsqueeze(-1), scale.unsqueeze(-1))
                h = torch.where(z > 0, z, self.slope * z)
            logits = torch.baddbmm(self.fc_bias.unsqueeze(-1), self.fc, h)
            wrong += (logits.argmax(1) != y).sum(1)
            finite &= logits.isfinite().all(2).all(1)
        error = 100 * wrong.double() / len(labels)
        return torch.where(finite, error, math.nan).tolist()

    def rates(self) -> Tensor:
        """(steps, N) learning rates of the recipes' schedules."""
        total = self.one.run.epochs * self.feed.steps
        made: dict[tuple[float, str], list[float]] = {}
        for recipe in self.recipes:
            key = recipe.optimizer.lr, recipe.optimizer.schedule
            if key not in made:
                rates = Rates(recipe.optimizer, recipe.run.epochs, self.feed.steps)
                made[key] = [rates[step] for step in range(total)]
        columns = [made[recipe.optimizer.lr, recipe.optimizer.schedule] for recipe in self.recipes]
        return torch.tensor(columns, dtype=self.dtype).T.contiguous().to(self.device)

    def train(self) -> Iterator[int]:
        """All epochs of the recipes; yields the number of each one that is over (on a GPU: that is queued)."""
        rates, steps, run = self.rates(), self.feed.steps, self.one.run
        seeds = list(self.feeds)
        orders = torch.stack([
            torch.cat([self.feeds[seed].order(epoch) for epoch in range(run.epochs)]).view(-1, run.batch)
            for seed in seeds
        ], 1).to(self.device)  # (all steps, seeds, batch)  # fmt: skip
        mine = torch.tensor([seeds.index(recipe.run.seed) for recipe in self.recipes], device=self.device)
        for epoch in range(run.epochs):
            for _ in range(steps):
                torch.index_select(orders[self.done], 0, mine, out=self.index)
                self.lr.copy_(rates[self.done])
                self.update() if self.graph is None else self.graph.replay()
                self.done += 1
            yield epoch + 1


@cache
def compiled() -> tuple[Callable[..., Any], ...]:
    """The layers and the update, compiled."""
    return tuple(torch.compile(f) for f in (normed_layer, bare_layer, descend_hidden))
