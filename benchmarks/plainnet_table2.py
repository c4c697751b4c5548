"""Table II of papers/plainnet.md: 100-layer MLPs on USPS, with and without BatchNorm, LReLU 0.3 and max-norm 3.

    PYTHONPATH=src python benchmarks/plainnet_table2.py OUT --data usps.npz

1. Select: each row at seven learning rates of the paper's range [0.0001-0.1], one seed, on nine tenths of the training
   images; the rate with the lowest validation error (eval mode, mean of the last three looks) is the row's.
2. Final: each row at its rate, on all training images, three seeds, otherwise by the recipe `usps-plainnet-100`. Errors
   are those of the last epoch, in eval mode.

The paper mentions no schedule. `--schedule constant` takes its range for rates to choose from; `cosine` also as the
range that the rate falls through, from the chosen one to 0.0001.

A 100-layer MLP of 300 units fills a hundredth of a large GPU, so networks train side by side (`Crowd`), each as
`unskip.train.run` would train it alone; tests/benchmarks/test_plainnet_table2.py compares the two in float64.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import unskip
from unskip.reproduce import paper_table
from unskip.train import Recipe, load_recipe
from unskip.train.feed import Share, make_feed
from unskip.train.optim import Rates
from unskip.train.rng import seeded
from unskip.train.runner import build_network
from unskip.train.sets import DataSet, Split, load

TABLE = paper_table("plainnet", "II")
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # the paper's range, two to a decade
SEEDS = (0, 1, 2)
LOWEST = 1e-4  # where a falling rate ends: the lower end of the range
EPS, MOMENTUM = 1e-5, 0.1  # of nn.BatchNorm1d


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of Table II: which components it has, and the errors that the paper prints (percent)."""

    name: str
    norm: bool
    leaky: bool
    max_norm: bool
    paper_train: float
    paper_test: float

    @classmethod
    def printed(cls, name: str) -> "Row":
        """From the paper's table, where a row's name is its components."""
        components = name.split(" + ")
        errors = {f"paper_{part}": TABLE.value(f"{part}_error", components=name) for part in ("train", "test")}
        return cls(
            name=name,
            norm="BN" in components,
            leaky="LReLU" in components,
            max_norm="max-norm" in components,
            **errors,
        )

    def recipe(self, base: Recipe, **changes: Any) -> Recipe:
        options = {**base.options, "norm": self.norm, "activation": "lrelu" if self.leaky else "relu"}
        return base.replace(options=options, max_norm=base.max_norm if self.max_norm else 0.0, **changes)


ROWS = tuple(Row.printed(str(row["components"])) for row in TABLE.rows)


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

    def __init__(
        self, recipes: Sequence[Recipe], data: DataSet, device: torch.device, dtype: torch.dtype, fast: bool = True
    ) -> None:
        self.recipes, self.data, self.device, self.dtype = list(recipes), data, device, dtype
        one = self.one = recipes[0]
        self.norm = bool(one.options["norm"])
        for recipe in recipes:
            same = one.replace(lr=recipe.lr, seed=recipe.seed, max_norm=recipe.max_norm, options=recipe.options)
            assert same.replace(schedule=recipe.schedule, min_lr=recipe.min_lr) == recipe, "these differ in shape"
            assert recipe.options["norm"] == self.norm

        self.feeds = {r.seed: make_feed(data, r, device=device, dtype=dtype, share=Share(0, 1)) for r in recipes}
        self.feed = self.feeds[one.seed]
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
        self.limit = each([recipe.max_norm or math.inf for recipe in recipes]).view(n, 1, 1)
        self.lr = each([recipe.lr for recipe in recipes])
        self.loss = torch.zeros_like(self.lr)
        self.index = torch.zeros(n, one.batch, dtype=torch.int64, device=device)
        self.done = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.normed_layer, self.bare_layer, self.descend_hidden = normed_layer, bare_layer, descend_hidden
        if fast and device.type == "cuda":
            self.normed_layer, self.bare_layer, self.descend_hidden = COMPILED
            self.capture()

    def build(self) -> list[Any]:
        """The library's networks. Those with the same seed and options are the same."""
        made: dict[str, Any] = {}
        for recipe in self.recipes:
            key = f"{recipe.seed} {recipe.options}"
            if key not in made:
                with seeded(recipe.seed):
                    made[key] = build_network(recipe, self.data)
        return [made[f"{recipe.seed} {recipe.options}"] for recipe in self.recipes]

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
            how = self.one.momentum, self.one.weight_decay
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
    def settle(self) -> None:
        """Measures BatchNorm's statistics anew, as torch.optim.swa_utils.update_bn: the mean over one epoch's batches.

        While training they are an average over the last ten batches or so, and 100 layers amplify its noise.
        """
        if not self.norm:
            return
        order = self.feed.order(0).view(-1, self.one.batch).to(self.device)
        mean, var = torch.zeros_like(self.mean), torch.zeros_like(self.var)
        for index in order:
            x = self.images[index].T.expand(len(self.recipes), -1, -1)
            _, means, variances = self.forward(x)
            mean += torch.stack(means).squeeze(-1) / len(order)
            var += torch.stack(variances).squeeze(-1) * (self.one.batch / (self.one.batch - 1)) / len(order)
        self.mean.copy_(mean)
        self.var.copy_(var)

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
        total = self.one.epochs * self.feed.steps
        made: dict[tuple[float, str], list[float]] = {}
        for recipe in self.recipes:
            key = recipe.lr, recipe.schedule
            if key not in made:
                rates = Rates(recipe, self.feed.steps)
                made[key] = [rates[step] for step in range(total)]
        columns = [made[recipe.lr, recipe.schedule] for recipe in self.recipes]
        return torch.tensor(columns, dtype=self.dtype).T.contiguous().to(self.device)

    def train(self) -> Iterator[int]:
        """All epochs of the recipes; yields the number of each one that is over (on a GPU: that is queued)."""
        rates, steps = self.rates(), self.feed.steps
        seeds = list(self.feeds)
        orders = torch.stack([
            torch.cat([self.feeds[seed].order(epoch) for epoch in range(self.one.epochs)]).view(-1, self.one.batch)
            for seed in seeds
        ], 1).to(self.device)  # (all steps, seeds, batch)  # fmt: skip
        mine = torch.tensor([seeds.index(recipe.seed) for recipe in self.recipes], device=self.device)
        for epoch in range(self.one.epochs):
            for _ in range(steps):
                torch.index_select(orders[self.done], 0, mine, out=self.index)
                self.lr.copy_(rates[self.done])
                self.update() if self.graph is None else self.graph.replay()
                self.done += 1
            yield epoch + 1


COMPILED = tuple(torch.compile(f) for f in (normed_layer, bare_layer, descend_hidden))


# ---------------------------------------------------------------- the experiment


class Curves:
    """What is seen of a crowd while it trains, and its results at the end. Errors in percent, None: diverged."""

    def __init__(self, part: list[tuple[Row, Recipe]], data: DataSet, device: torch.device) -> None:
        self.part, self.split = part, "test" if data.val is None else "val"
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.crowd = Crowd([recipe for _, recipe in part], data, device, torch.float32)
        self.epochs: list[int] = []
        self.losses: list[list[float | None]] = []
        self.errors: list[list[float | None]] = []

    def look(self, epoch: int) -> None:
        self.epochs.append(epoch)
        self.losses.append([number(v, 4) for v in self.crowd.loss.tolist()])
        self.errors.append([number(v) for v in self.crowd.error(self.split)])

    def results(self) -> list[dict[str, Any]]:
        """After the last look, which waited for the last epoch."""
        train = self.crowd.error("train")
        self.crowd.settle()
        settled = {f"settled_{split}_error": self.crowd.error(split) for split in ("train", self.split)}
        return [
            {
                **{name: number(errors[i]) for name, errors in settled.items()}, "row": row.name, "lr": recipe.lr, "schedule": recipe.schedule, "seed": recipe.seed,
                "epochs": recipe.epochs, "train_error": number(train[i]), f"{self.split}_error": self.errors[-1][i],
                "curve": {
                    "epoch": self.epochs,
                    "loss": [losses[i] for losses in self.losses],
                    self.split: [errors[i] for errors in self.errors],
                },
            }
            for i, (row, recipe) in enumerate(self.part)
        ]  # fmt: skip


def side_by_side(
    jobs: list[tuple[Row, Recipe]], data: DataSet, device: torch.device, say: Callable[[str], None], look_every: int
) -> list[dict[str, Any]]:
    """Trains all jobs: those with BatchNorm are one crowd, those without another, on a GPU at the same time."""
    began = time.perf_counter()
    parts = [[(row, recipe) for row, recipe in jobs if row.norm is norm] for norm in (True, False)]
    crowds = [Curves(part, data, device) for part in parts if part]
    built = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what was made on the main stream is there for the others
    total = jobs[0][1].epochs
    runs = [(each, each.crowd.train()) for each in crowds]
    for epoch in range(1, total + 1):
        for each, run in runs:
            with torch.cuda.stream(each.stream):
                next(run)
        if epoch % look_every == 0 or epoch == total:
            for each in crowds:
                with torch.cuda.stream(each.stream):
                    each.look(epoch)
    results = [result for each in crowds for result in each.results()]
    seconds = time.perf_counter() - built
    sizes = " and ".join(f"{len(each.part)} {'with' if each.crowd.norm else 'without'} BatchNorm" for each in crowds)
    say(
        f"networks: {sizes}; {total} epochs in {seconds:.1f} s, {1000 * seconds / crowds[0].crowd.done:.2f} ms a step, "
        f"{built - began:.1f} s before the first one"
    )
    return results


def number(value: float, digits: int = 3) -> float | None:
    return round(value, digits) if math.isfinite(value) else None


def select(results: list[dict[str, Any]]) -> dict[str, float]:
    """The rate of each row: lowest validation error with settled norms; a diverged network counts as 100 %."""
    best: dict[str, float] = {}
    for row in ROWS:
        mine = [r for r in results if r["row"] == row.name]
        if not mine:
            continue
        score = [100.0 if r["settled_val_error"] is None else r["settled_val_error"] for r in mine]
        best[row.name] = mine[score.index(min(score))]["lr"]
    return best


def table(final: list[dict[str, Any]]) -> str:
    """Markdown: the paper's errors beside ours, mean and range over seeds."""
    lines = [
        "| components | paper: train / test error % | rate | our train error % (range) | our test error % (range) "
        "| train, settled | test, settled |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in ROWS:
        mine = [r for r in final if r["row"] == row.name]
        if not mine:
            continue
        cells = []
        for key in ("train_error", "test_error", "settled_train_error", "settled_test_error"):
            errors = [r[key] for r in mine if r[key] is not None]
            lost = len(mine) - len(errors)
            words = f"{statistics.fmean(errors):.2f} ({min(errors):.2f} to {max(errors):.2f})" if errors else ""
            cells.append(words + (f" {lost} of {len(mine)} diverged" if lost else ""))
        paper = f"{row.paper_train:.2f} / {row.paper_test:.2f}"
        lines.append(f"| {row.name} | {paper} | {mine[0]['lr']:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def prove(base: Recipe, data: DataSet, device: torch.device, say: Callable[[str], None]) -> None:
    """How long a step takes, and how far the fast step in float32 is from the plain one in float64."""
    for norm in (True, False):
        rows = [row for row in ROWS if row.norm is norm]
        recipes = [row.recipe(base, lr=lr) for row in rows for lr in RATES]
        began = time.perf_counter()
        fast = Crowd(recipes, data, device, torch.float32)
        say(f"{len(recipes)} networks, norm={norm}: {time.perf_counter() - began:.1f} s until recorded")
        slow = Crowd(recipes, data, device, torch.float64, fast=False)
        order = fast.feed.order(0).view(-1, base.batch)
        for step in range(3):
            for crowd in (fast, slow):
                crowd.index.copy_(order[step].expand_as(crowd.index))
                crowd.update() if crowd.graph is None else crowd.graph.replay()
            away = [(p - q).norm() / q.norm() for p, q in zip(fast.params, slow.params, strict=True)]
            losses = (fast.loss - slow.loss).abs().max().item()
            say(f"step {step + 1}: largest relative distance of a parameter {max(away):.1e}, of a loss {losses:.1e}")
        del slow
        if device.type == "cuda":
            for what, step in (("compiled, recorded", fast.graph.replay), ("as it is", fast.update)):  # type: ignore[union-attr]
                if what == "as it is":
                    fast.normed_layer, fast.bare_layer, fast.descend_hidden = normed_layer, bare_layer, descend_hidden
                for count in (3, 20):
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    for _ in range(count):
                        step()
                    torch.cuda.synchronize()
                    took = (time.perf_counter() - began) / count
                say(f"{what}: {1000 * took:.2f} ms a step, {1000 * took / len(recipes):.3f} a network")
        began = time.perf_counter()
        fast.error("test")
        say(f"test error of all: {time.perf_counter() - began:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="usps.npz: x_train, y_train, x_test, y_test")
    parser.add_argument("--select-epochs", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--schedule", choices=("constant", "cosine"), default="constant")
    parser.add_argument("--rows", nargs="*", default=[row.name for row in ROWS], help="only these rows")
    parser.add_argument("--prove", action="store_true", help="only time a step and check it")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines: list[str] = []
    began = time.perf_counter()

    def say(words: str) -> None:
        lines.append(f"[{time.perf_counter() - began:6.1f} s] {words}")
        print(lines[-1], flush=True)
        (args.out / "log.txt").write_text("\n".join(lines) + "\n")

    rows = [row for row in ROWS if row.name in args.rows]
    if len(rows) != len(set(args.rows)):
        raise ValueError(f"--rows {args.rows}: the rows are {', '.join(repr(row.name) for row in ROWS)}.")
    end = LOWEST if args.schedule == "cosine" else 0.0
    base = load_recipe("usps-plainnet-100", options={"depth": args.depth}, schedule=args.schedule, min_lr=end)
    about: dict[str, Any] = {
        "unskip": unskip.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "precision": f"fp32, TF32 {'on' if torch.backends.cuda.matmul.allow_tf32 else 'off'}",
        "recipe": base.as_dict(),
        "select_epochs": args.select_epochs,
        "epochs": args.epochs,
    }
    say(", ".join(f"{k} {about[k]}" for k in ("unskip", "torch", "device", "precision")))
    choosing = base.replace(epochs=args.select_epochs, val_fraction=0.1)
    if args.prove:
        prove(choosing, load(choosing, args.data), device, say)
        return

    def write() -> None:
        (args.out / "results.json").write_text(json.dumps(about, indent=None, separators=(",", ":")) + "\n")

    jobs = [(row, row.recipe(choosing, lr=lr)) for row in rows for lr in RATES]
    about["select"] = side_by_side(jobs, load(choosing, args.data), device, say, max(1, args.select_epochs // 20))
    best = about["rates"] = select(about["select"])
    write()
    say(f"rates: {best}")
    last = base.replace(epochs=args.epochs, val_fraction=0.0)
    jobs = [(row, row.recipe(last, lr=best[row.name], seed=seed)) for row in rows for seed in SEEDS]
    about["final"] = side_by_side(jobs, load(last, args.data), device, say, max(1, args.epochs // 30))
    say(f"{args.schedule}\n{table(about['final'])}")
    about["seconds"] = round(time.perf_counter() - began, 1)
    write()


if __name__ == "__main__":
    main()
