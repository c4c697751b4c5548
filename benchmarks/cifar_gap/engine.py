"""Trains many small CIFAR-10 networks at a time on one GPU; every whole training step is one CUDA graph.

    python engine.py --data DIR --out DIR --queue queue.json --slots 8          # until the file OUT/stop exists

The queue is a JSON list of jobs, {"name": ..., "network": {fields of NetworkConfig}, "train": {fields of TrainConfig}}.
It is read again whenever a slot is free, so jobs can be added while others train; a name runs once.
Results go to OUT/epochs.jsonl (one line an epoch) and OUT/results.jsonl (one line a finished job).
With --until no epoch is begun that would end later; a network that is not done then leaves OUT/NAME.state.pt, and
--resume DIR goes on from such files where they are. `drive.py` does this from one machine to the next.

Recipe: papers/pnnh.md, section 5.2 (SGD, momentum 0.9, batch 128, learning rate 0.1, cosine, weight decay 3e-4),
with fewer epochs and one epoch of warm-up.
Arithmetic: bfloat16 convolutions and activations; float32 master weights, norm statistics, head, loss and update.
"""

import argparse
import gc
import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from networks import Network, NetworkConfig, trained_parameters
from torch import Tensor

BATCH = 128
MEAN, STD = (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    epochs: int = 16
    seed: int = 0  # weights, order and augmentation; the same seed gives every network the same batches
    lr: float = 0.1  # peak
    warmup: float = 1.0  # epochs
    weight_decay: float = 3e-4  # on every trained parameter
    decay_last: float = 1.0  # factor on the weight decay of W_2 (PNNH) or of each block's second convolution (ResNet)
    lr_last: float = 1.0  # factor on the learning rate of the same
    clip: float | None = None  # largest norm of the whole gradient
    whole: bool = False  # all 50,000 training images, so no validation: for rows about which nothing is chosen any more


# ---------------------------------------------------------------- data


def tiles(path: Path) -> np.ndarray:
    from PIL import Image

    sprite = np.asarray(Image.open(path).convert("RGB"))  # images of 32 x 32, row by row
    rows, columns = sprite.shape[0] // 32, sprite.shape[1] // 32
    return sprite.reshape(rows, 32, columns, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3)


class Data:
    """CIFAR-10 on the device as uint8, NHWC. The last tenth of each class's training images is the validation split."""

    def __init__(self, folder: Path, device: str):
        labels = np.load(folder / "labels.npz")
        images = np.concatenate([tiles(folder / f"data_batch_{i}.webp") for i in range(1, 6)])
        y = labels["y_train"].astype(np.int64)
        held = np.zeros(len(y), bool)
        for c in range(10):
            members = np.flatnonzero(y == c)
            held[members[-(len(members) // 10) :]] = True
        test = tiles(folder / "test_batch.webp"), labels["y_test"].astype(np.int64)
        self.fill(device, images, y, held, *test)

    def fill(self, device: str, images: np.ndarray, y: np.ndarray, held: np.ndarray, *test: np.ndarray) -> None:
        self.device = device
        order = np.argsort(held, kind="stable")  # those held out come last
        self.every = self.put(images[order], y[order])
        self.chosen = int((~held).sum())
        self.val = self.every[0][self.chosen :], self.every[1][self.chosen :]
        self.test = self.put(*test)
        # A black border, as torchvision's RandomCrop(32, padding=4).
        self.padded = F.pad(self.every[0], (0, 0, 4, 4, 4, 4))

    def put(self, x: np.ndarray, y: np.ndarray) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(x.copy()).to(self.device), torch.from_numpy(y).to(self.device)

    def count(self, whole: bool) -> int:
        """Training images, with or without those held out."""
        return len(self.padded) if whole else self.chosen

    def epoch(self, generator: torch.Generator, whole: bool = False) -> tuple[Tensor, Tensor]:
        """All training images once, shuffled, cropped and flipped: (N, 32, 32, 3) bfloat16 and labels."""
        n, device = self.count(whole), self.device
        order = torch.randperm(n, generator=generator, device=device)
        dy, dx = torch.randint(9, (2, n, 1), generator=generator, device=device)
        flip = torch.rand(n, 1, generator=generator, device=device) < 0.5
        line = torch.arange(32, device=device)
        rows, columns = dy + line, dx + torch.where(flip, 31 - line, line)  # (N, 32)
        x = self.padded[order[:, None, None], rows[:, :, None], columns[:, None, :]]
        return normalise(x), self.every[1][order]


def normalise(x: Tensor) -> Tensor:
    mean, std = torch.tensor(MEAN, device=x.device), torch.tensor(STD, device=x.device)
    return ((x / 255 - mean) / std).bfloat16()


def images_of(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)  # NHWC memory seen as NCHW: channels_last


class Gate:
    """Many train at once (shared); while one is built and captured, nothing else may touch the device (alone)."""

    def __init__(self):
        self.condition, self.inside, self.wanted = threading.Condition(), 0, 0

    @contextmanager
    def shared(self):
        with self.condition:
            self.condition.wait_for(lambda: self.wanted == 0)
            self.inside += 1
        try:
            yield
        finally:
            with self.condition:
                self.inside -= 1
                self.condition.notify_all()

    @contextmanager
    def alone(self):
        with self.condition:
            self.wanted += 1
            self.condition.wait_for(lambda: self.inside == 0)
        try:
            yield
        finally:
            with self.condition:
                self.wanted -= 1
                self.condition.notify_all()


# ---------------------------------------------------------------- one network


class Flat:
    """Trained parameters as slices of flat tensors: a float32 master with its gradient and momentum, and a bfloat16
    copy of the convolutions that the network computes with. Fused blocks read and write the slices themselves; the
    rest goes through autograd."""

    def __init__(self, network: Network, config: TrainConfig, device: str, fuse: bool):
        named = sorted(network.named_parameters(), key=lambda item: item[1].ndim != 4)  # convolutions first
        order = [p.detach().permute(0, 2, 3, 1) if p.ndim == 4 else p.detach() for _, p in named]
        self.master = torch.cat([p.reshape(-1) for p in order]).to(device)
        self.split = sum(p.numel() for _, p in named if p.ndim == 4)
        self.work = self.master[: self.split].bfloat16()
        self.grad, self.momentum = torch.zeros_like(self.master), torch.zeros_like(self.master)
        last = torch.cat([torch.full((p.numel(),), ".conv2.weight" in name) for name, p in named]).to(device)
        self.decay = torch.where(last, config.weight_decay * config.decay_last, config.weight_decay)
        self.rate = torch.where(last, config.lr_last, 1.0)
        self.clip = config.clip
        kept = {m.weight: m.kept for m in network.modules() if hasattr(m, "kept")}
        masks = [kept[p].permute(0, 2, 3, 1) if p in kept else torch.ones(p.shape, dtype=torch.bool) for _, p in named]
        self.kept = torch.cat([m.reshape(-1) for m in masks]).to(device) if kept else None
        if self.kept is not None:
            self.decay = self.decay * self.kept  # a frozen coder does not decay
        at, slices = 0, {}
        for _, p in named:
            here = slice(at, at + p.numel())
            slices[p] = here
            at = here.stop
            if p.ndim == 4:
                o, i, kh, kw = p.shape
                p.data = self.work[here].view(o, kh, kw, i).permute(0, 3, 1, 2)
            else:
                p.data = self.master[here].view(p.shape)
        blocks = [block for block in network.blocks if fuse and block.can_fuse]
        self.ties: list[tuple[Tensor, ...]] = []
        self.slices = slices
        self.fuse(blocks, slices, device)
        inside = {p for block in blocks for p in block.parameters()}
        self.leaves = [p for _, p in named if p not in inside]
        self.leaf_slices = [slices[p] for p in self.leaves]

    def fuse(self, blocks: list, slices: dict, device: str) -> None:
        norms = [n for block in blocks for n in (block.norm1, block.norm2) if n is not None]
        total = sum(len(n.weight) for n in norms)
        self.sums = torch.zeros(2, total, device=device)  # of each normalised channel and of its square
        self.mean, self.var, self.count = (
            torch.zeros(total, device=device),
            torch.ones(total, device=device),
            torch.ones(total, device=device),
        )
        at, views = 0, {None: None}
        for block in blocks:
            for n in (block.norm1, block.norm2):
                if n is None:
                    continue
                here = slice(at, at + len(n.weight))
                at = here.stop
                n.mean, n.var = self.mean[here], self.var[here]
                self.count[here] = BATCH * block.size**2
                views[n] = (
                    self.sums[0, here],
                    self.sums[1, here],
                    n.weight.detach(),
                    n.bias.detach(),
                    self.grad[slices[n.weight]],
                    self.grad[slices[n.bias]],
                )
            w1 = slices[block.conv1.weight]
            if getattr(block, "tied", False):
                w2, dw2 = self.tie(block, slices)
            else:
                here = slices[block.conv2.weight]
                w2, dw2 = self.work[here], self.grad[here]
            block.fused = SimpleNamespace(
                w1=self.work[w1], w2=w2, dw1=self.grad[w1], dw2=dw2,
                norm1=views[block.norm1], norm2=views[block.norm2], path=block.path, last=block.last,
                lasting=block.lasting, code=block.code,
            )  # fmt: skip

    def tie(self, block, slices: dict) -> tuple[Tensor, Tensor]:
        """A bfloat16 W_2 and a float32 gradient of its own for a tied block; `zero` and `update` keep them in step."""
        hidden, channels = block.conv1.weight.shape[:2]
        w1, gain = slices[block.conv1.weight], slices[block.gain2]
        shape = (hidden, 9, channels)
        w2 = torch.zeros(channels, 9, hidden, dtype=self.work.dtype, device=self.work.device)
        dw2 = torch.zeros(channels, 9, hidden, device=self.work.device)
        self.ties.append(
            (self.master[w1].view(shape), self.master[gain], self.grad[w1].view(shape), self.grad[gain], w2, dw2)
        )
        return w2.view(-1), dw2.view(-1)

    def zero(self) -> None:
        self.grad.zero_()
        self.sums.zero_()
        for w1, gain, _, _, w2, dw2 in self.ties:
            w2.copy_(w1.flip(1).permute(2, 1, 0) * gain)
            dw2.zero_()

    def update(self, leaf_grads: tuple[Tensor, ...], lr: Tensor) -> None:
        for g, here in zip(leaf_grads, self.leaf_slices, strict=True):
            self.grad[here].copy_(g.permute(0, 2, 3, 1).reshape(-1) if g.ndim == 4 else g.reshape(-1))
        for w1, gain, dw1, dgain, _, dw2 in self.ties:
            transposed = dw2.permute(2, 1, 0).flip(1)
            dgain.copy_((transposed * w1).sum((1, 2)))
            dw1.add_(transposed * gain[:, None, None])
        if self.kept is not None:
            self.grad.mul_(self.kept)
        g = self.grad
        if self.clip is not None:
            g = g * (self.clip / g.norm()).clamp(max=1.0)
        self.momentum.mul_(0.9).add_(g).addcmul_(self.decay, self.master)
        self.master.sub_(lr * self.rate * self.momentum)
        self.work.copy_(self.master[: self.split])
        mean = self.sums[0] / self.count
        self.mean.lerp_(mean, 0.1)
        self.var.lerp_((self.sums[1] / self.count - mean**2) * (self.count / (self.count - 1)), 0.1)


class Trainer:
    """One network, its schedule and its captured step. On the CPU (tests) the step runs eagerly."""

    def __init__(
        self,
        name: str,
        network: NetworkConfig,
        config: TrainConfig,
        data: Data,
        mode: str = "fused",
        gate: Gate | None = None,
    ):
        self.name, self.config, self.data, self.gate = name, config, data, gate or Gate()
        device = data.device
        count = data.count(config.whole)
        self.steps = count // BATCH
        self.network = Network(network, config.seed, compile_pieces=mode == "compiled")
        self.parameters = trained_parameters(self.network)
        self.network.to(device)
        self.flat = Flat(self.network, config, device, fuse=mode == "fused")
        self.generator = torch.Generator(device).manual_seed(config.seed)
        self.images = torch.zeros(count, 32, 32, 3, dtype=torch.bfloat16, device=device)
        self.labels = torch.zeros(count, dtype=torch.long, device=device)
        self.line = torch.arange(BATCH, device=device)
        self.cursor = torch.zeros((), dtype=torch.long, device=device)
        self.schedule = torch.tensor([self.lr_at(t) for t in range(config.epochs * self.steps + 8)], device=device)
        self.sums = torch.zeros(2, device=device)  # loss, wrong
        self.epoch = 0  # how many are over
        self.stream = self.graph = None
        if device == "cuda":
            # A very deep network is a long chain of small kernels: it goes first, the others fill the gaps.
            self.stream = torch.cuda.Stream(priority=-1 if network.blocks > 18 else 0)
            self.capture()

    def lr_at(self, step: int) -> float:
        warm, total = self.config.warmup * self.steps, self.config.epochs * self.steps
        if step < warm:
            return self.config.lr * (step + 1) / warm
        return self.config.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, total - warm))))

    def step(self) -> None:
        self.flat.zero()
        at = (self.cursor % self.steps) * BATCH + self.line
        x, y = self.images.index_select(0, at), self.labels.index_select(0, at)
        logits = self.network(images_of(x))
        loss = F.cross_entropy(logits, y)
        grads = torch.autograd.grad(loss, self.flat.leaves)
        with torch.no_grad():
            self.flat.update(grads, self.schedule.index_select(0, self.cursor[None]))
            wrong = (logits.argmax(1) != y).sum()
            self.sums.add_(torch.stack([loss.detach(), wrong.float()]))
            self.cursor.add_(1)

    def state(self) -> list[Tensor]:
        return [self.flat.master, self.flat.work, self.flat.momentum, self.cursor, self.sums, *self.network.buffers()]

    def capture(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.next_epoch()
            before = [t.clone() for t in self.state()]
            for _ in range(2):  # creates handles, chooses algorithms, compiles
                self.step()
            self.stream.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            gc.collect()
            gc.disable()  # freeing somebody else's graph or event here would break the capture
            try:
                self.graph.capture_begin(capture_error_mode="thread_local")
                self.step()
            finally:
                self.graph.capture_end()
                gc.enable()
            for t, b in zip(self.state(), before, strict=True):
                t.copy_(b)
            self.generator.manual_seed(self.config.seed)
            self.stream.synchronize()

    def next_epoch(self) -> None:
        x, y = self.data.epoch(self.generator, self.config.whole)
        self.images.copy_(x)
        self.labels.copy_(y)
        self.sums.zero_()

    def replay(self, steps: int) -> None:
        """Runs this many steps, eight at a time."""
        for start in range(0, steps, 8):
            with self.gate.shared():
                for _ in range(min(8, steps - start)):
                    self.graph.replay() if self.graph else self.step()
                if self.stream:
                    self.stream.synchronize()

    @torch.no_grad()
    def evaluate(self, images: Tensor, labels: Tensor) -> tuple[float, float]:
        """(error in percent, mean cross-entropy)"""
        self.network.eval()
        sums = torch.zeros(2, device=labels.device)
        for x, y in zip(images.split(1000), labels.split(1000), strict=True):
            logits = self.network(images_of(normalise(x)))
            sums += torch.stack([(logits.argmax(1) != y).sum().float(), F.cross_entropy(logits, y, reduction="sum")])
        self.network.train()
        wrong, loss = (sums / len(labels)).tolist()
        return 100 * wrong, loss

    def weights(self) -> dict[str, Tensor]:
        """The float32 weights and statistics by the names of `networks.py`, convolutions as (O, I, kh, kw)."""
        state = {}
        for name, p in self.network.named_parameters():
            here = self.flat.slices[p]
            flat = self.flat.master[here].cpu()
            o, *rest = p.shape
            state[name] = (
                flat.view(o, rest[1], rest[2], rest[0]).permute(0, 3, 1, 2).contiguous()
                if rest[1:]
                else flat.view(p.shape)
            )
        for name, module in self.network.named_modules():
            if hasattr(module, "mean") and hasattr(module, "var"):
                state[f"{name}.mean"], state[f"{name}.var"] = module.mean.cpu(), module.var.cpu()
        return state

    def trained(self, flat: Tensor) -> Tensor:
        """Of a flat tensor, what is trained."""
        return flat if self.flat.kept is None else flat[self.flat.kept]

    def save(self, file: Path) -> None:
        """Everything that the next epoch depends on, but for the last bits of the momentum, which is stored in bfloat16
        so that the files stay small. The bfloat16 copy of the weights follows from the master."""
        torch.save(
            {
                "epoch": self.epoch, "cursor": self.cursor, "generator": self.generator.get_state(),
                "master": self.trained(self.flat.master).clone(),
                "momentum": self.trained(self.flat.momentum).bfloat16(),
                "buffers": [buffer.clone() for buffer in self.network.buffers()],  # views would take the rest along
            },
            file,
        )  # fmt: skip

    @torch.no_grad()
    def resume(self, file: Path) -> None:
        saved = torch.load(file, map_location=self.labels.device, weights_only=True)
        self.epoch = saved["epoch"]
        self.generator.set_state(saved["generator"].cpu())
        self.cursor.copy_(saved["cursor"])
        where = slice(None) if self.flat.kept is None else self.flat.kept
        self.flat.master[where] = saved["master"]
        self.flat.momentum[where] = saved["momentum"].float()
        for buffer, value in zip(self.network.buffers(), saved["buffers"], strict=True):
            buffer.copy_(value)
        self.flat.work.copy_(self.flat.master[: self.flat.split])

    def run(self, log, deadline: float = math.inf) -> dict:
        start, config = time.time(), self.config
        row, status = {}, "done"
        for epoch in range(self.epoch, config.epochs):
            began = time.time()
            with self.gate.shared():
                self.next_epoch()
            self.replay(self.steps)
            with self.gate.shared():
                loss, wrong = (self.sums / self.steps).tolist()
                val_error, val_loss = (None, None) if config.whole else self.evaluate(*self.data.val)
            row = {
                "name": self.name, "epoch": epoch + 1, "lr": self.lr_at((epoch + 1) * self.steps - 1),
                "train_loss": loss, "train_error": 100 * wrong / BATCH, "val_error": val_error, "val_loss": val_loss,
                "seconds": time.time() - start,
            }  # fmt: skip
            log("epochs.jsonl", row)
            self.epoch = epoch + 1
            if not math.isfinite(loss):
                status = "diverged"
                break
            now = time.time()
            if now + (now - began) > deadline and self.epoch < config.epochs:
                return {**row, "status": "paused", "parameters": self.parameters}
        with self.gate.shared():
            test_error, test_loss = self.evaluate(*self.data.test)
        return {
            **row,
            "status": status,
            "parameters": self.parameters,
            "test_error": test_error,
            "test_loss": test_loss,
        }


# ---------------------------------------------------------------- many networks


class Engine:
    def __init__(
        self,
        data: Data,
        out: Path,
        queue: Path,
        slots: int,
        mode: str,
        deadline: float = math.inf,
        resume: Path | None = None,
    ):
        self.data, self.out, self.queue, self.slots, self.mode = data, out, queue, slots, mode
        self.deadline, self.resume = deadline, resume
        self.lock, self.started, self.gate = threading.Lock(), set(), Gate()
        self.builder = ThreadPoolExecutor(
            1
        )  # convolution algorithms are cached by thread, and captures must not overlap
        out.mkdir(parents=True, exist_ok=True)

    def log(self, file: str, row: dict) -> None:
        with self.lock, open(self.out / file, "a") as f:
            f.write(json.dumps(row) + "\n")

    def next_job(self) -> dict | None:
        with self.lock:
            try:
                jobs = json.loads(self.queue.read_text())
            except (OSError, json.JSONDecodeError):  # being replaced: look again later
                return None
            for job in jobs:
                if job["name"] not in self.started:
                    self.started.add(job["name"])
                    return job
        return None

    def slot(self, once: bool) -> None:
        while not (self.out / "stop").exists() and time.time() < self.deadline:
            job = self.next_job()
            if job is None:
                if once:
                    return
                time.sleep(0.5)
                continue
            try:
                self.run(job)
            except Exception as error:  # one broken job must not take the other slots with it
                self.log(
                    "results.jsonl", {"name": job["name"], "status": f"failed: {type(error).__name__}: {error}"[:400]}
                )

    def build(self, name: str, network: NetworkConfig, config: TrainConfig) -> Trainer:
        with self.gate.alone():
            return Trainer(name, network, config, self.data, self.mode, self.gate)

    def run(self, job: dict) -> None:
        start = time.time()
        network = {k: tuple(v) if isinstance(v, list) else v for k, v in job.get("network", {}).items()}
        network, config = NetworkConfig(**network), TrainConfig(**job.get("train", {}))
        trainer = self.builder.submit(self.build, job["name"], network, config).result()
        built = time.time() - start
        state = f"{job['name']}.state.pt"
        with torch.cuda.stream(trainer.stream):
            if self.resume is not None and (self.resume / state).exists():
                with self.gate.shared():
                    trainer.resume(self.resume / state)
            result = trainer.run(self.log, self.deadline)
            with self.gate.shared():
                if result["status"] == "paused":
                    trainer.save(self.out / state)
                elif job.get("save"):
                    torch.save(trainer.weights(), self.out / f"{job['name']}.pt")
        self.log(
            "results.jsonl", {**result, "build_seconds": built, "network": asdict(network), "train": asdict(config)}
        )

    def work(self, once: bool) -> None:
        threads = [threading.Thread(target=self.slot, args=(once,)) for _ in range(self.slots)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--queue", type=Path, required=True)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--mode", default="fused", choices=["fused", "compiled", "eager"])
    parser.add_argument("--once", action="store_true", help="stop when the queue is empty")
    parser.add_argument(
        "--until", type=float, default=math.inf, help="a Unix time: begin no epoch that would end later"
    )
    parser.add_argument("--resume", type=Path, help="folder of NAME.state.pt files to go on from")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    engine = Engine(Data(args.data, args.device), args.out, args.queue, args.slots, args.mode, args.until, args.resume)
    engine.work(args.once)


if __name__ == "__main__":
    main()
