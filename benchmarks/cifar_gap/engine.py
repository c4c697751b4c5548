"""Trains many small CIFAR-10 networks at a time on one GPU; every whole training step is one CUDA graph.

    python engine.py --data DIR --out DIR --queue queue.json --slots 8          # runs until the file DIR/stop exists

The queue is a JSON list of jobs, {"name": ..., "network": {fields of NetworkConfig}, "train": {fields of TrainConfig}}.
It is read again whenever a slot is free, so jobs can be added while others train; a name runs once.
Results go to OUT/epochs.jsonl (one line an epoch) and OUT/results.jsonl (one line a finished job).

Recipe: papers/pnnh.md, section 5.2 (SGD, momentum 0.9, batch 128, learning rate 0.1, cosine, weight decay 3e-4), fewer epochs, one epoch of warm-up.
Arithmetic: bfloat16 convolutions and activations, float32 master weights, normalisation statistics, head, loss and update.
"""

import argparse
import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

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


# ---------------------------------------------------------------- data


def tiles(path: Path) -> np.ndarray:
    from PIL import Image

    sprite = np.asarray(Image.open(path).convert("RGB"))  # 100 x 100 images of 32 x 32
    return sprite.reshape(100, 32, 100, 32, 3).swapaxes(1, 2).reshape(10000, 32, 32, 3)


class Data:
    """CIFAR-10 on the device as uint8, NHWC. The last 500 training images of each class are the validation split."""

    def __init__(self, folder: Path, device: str):
        labels = np.load(folder / "labels.npz")
        images = np.concatenate([tiles(folder / f"data_batch_{i}.webp") for i in range(1, 6)])
        y = labels["y_train"].astype(np.int64)
        held = np.zeros(len(y), bool)
        for c in range(10):
            held[np.flatnonzero(y == c)[-500:]] = True
        self.device = device
        self.train = self.put(images[~held], y[~held])
        self.val = self.put(images[held], y[held])
        self.test = self.put(tiles(folder / "test_batch.webp"), labels["y_test"].astype(np.int64))
        self.padded = F.pad(
            self.train[0], (0, 0, 4, 4, 4, 4)
        )  # black border, as torchvision's RandomCrop(32, padding=4)

    def put(self, x: np.ndarray, y: np.ndarray) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(x.copy()).to(self.device), torch.from_numpy(y).to(self.device)

    def epoch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """All training images once, shuffled, cropped and flipped: (N, 32, 32, 3) bfloat16 and labels."""
        n, device = len(self.padded), self.device
        order = torch.randperm(n, generator=generator, device=device)
        dy, dx = torch.randint(9, (2, n, 1), generator=generator, device=device)
        flip = torch.rand(n, 1, generator=generator, device=device) < 0.5
        line = torch.arange(32, device=device)
        rows, columns = dy + line, dx + torch.where(flip, 31 - line, line)  # (N, 32)
        x = self.padded[order[:, None, None], rows[:, :, None], columns[:, None, :]]
        return normalise(x), self.train[1][order]


def normalise(x: Tensor) -> Tensor:
    mean, std = torch.tensor(MEAN, device=x.device), torch.tensor(STD, device=x.device)
    return ((x / 255 - mean) / std).bfloat16()


def images_of(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)  # NHWC memory seen as NCHW: channels_last


# ---------------------------------------------------------------- one network


class Flat:
    """Trained parameters as slices of flat tensors: one float32 master, and a bfloat16 copy of the convolutions that the network computes with."""

    def __init__(self, network: Network, config: TrainConfig, device: str):
        named = list(network.named_parameters())
        self.convs = [p for _, p in named if p.ndim == 4]
        self.small = [p for _, p in named if p.ndim != 4]
        self.params = self.convs + self.small
        flat = [p.detach().permute(0, 2, 3, 1).reshape(-1) for p in self.convs]
        self.split = sum(map(len, flat))
        self.master = torch.cat(flat + [p.detach().reshape(-1) for p in self.small]).to(device)
        self.work = self.master[: self.split].bfloat16()
        self.momentum = torch.zeros_like(self.master)
        last = torch.cat([torch.full((p.numel(),), ".conv2.weight" in n) for n, p in named if p.ndim == 4])
        last = F.pad(last, (0, len(self.master) - self.split)).to(device)
        self.decay = torch.where(last, config.weight_decay * config.decay_last, config.weight_decay)
        self.rate = torch.where(last, config.lr_last, 1.0)
        self.clip = config.clip
        offset = 0
        for p in self.params:
            n = p.numel()
            if p.ndim == 4:
                o, i, kh, kw = p.shape
                p.data = self.work[offset : offset + n].view(o, kh, kw, i).permute(0, 3, 1, 2)
            else:
                p.data = self.master[offset : offset + n].view(p.shape)
            offset += n

    def update(self, grads: list[Tensor], lr: Tensor) -> None:
        k = len(self.convs)
        convs = torch.cat([g.permute(0, 2, 3, 1).reshape(-1) for g in grads[:k]]).float()
        g = torch.cat([convs, *[g.reshape(-1) for g in grads[k:]]])
        if self.clip is not None:
            g = g * (self.clip / g.norm()).clamp(max=1.0)
        g = g + self.decay * self.master
        self.momentum.mul_(0.9).add_(g)
        self.master.sub_(lr * self.rate * self.momentum)
        self.work.copy_(self.master[: self.split])


class Trainer:
    """One network, its schedule and its captured step. On the CPU (tests) the step runs eagerly."""

    def __init__(
        self, name: str, network: NetworkConfig, config: TrainConfig, data: Data, compile_pieces: bool = False
    ):
        self.name, self.config, self.data = name, config, data
        device = data.device
        self.steps = len(data.train[1]) // BATCH
        self.network = Network(network, config.seed, compile_pieces)
        self.parameters = trained_parameters(self.network)
        self.network.to(device)
        self.flat = Flat(self.network, config, device)
        self.generator = torch.Generator(device).manual_seed(config.seed)
        self.images = torch.zeros(len(data.train[1]), 32, 32, 3, dtype=torch.bfloat16, device=device)
        self.labels = torch.zeros(len(data.train[1]), dtype=torch.long, device=device)
        self.line = torch.arange(BATCH, device=device)
        self.cursor = torch.zeros((), dtype=torch.long, device=device)
        self.schedule = torch.tensor([self.lr_at(t) for t in range(config.epochs * self.steps + 8)], device=device)
        self.sums = torch.zeros(2, device=device)  # loss, wrong
        self.stream = self.graph = None
        if device == "cuda":
            self.stream = torch.cuda.Stream()
            self.capture()

    def lr_at(self, step: int) -> float:
        warm, total = self.config.warmup * self.steps, self.config.epochs * self.steps
        if step < warm:
            return self.config.lr * (step + 1) / warm
        return self.config.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, total - warm))))

    def step(self) -> None:
        at = (self.cursor % self.steps) * BATCH + self.line
        x, y = self.images.index_select(0, at), self.labels.index_select(0, at)
        logits = self.network(images_of(x))
        loss = F.cross_entropy(logits, y)
        grads = torch.autograd.grad(loss, self.flat.params)
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
            self.graph.capture_begin(capture_error_mode="thread_local")
            self.step()
            self.graph.capture_end()
            for t, b in zip(self.state(), before, strict=True):
                t.copy_(b)
            self.generator.manual_seed(self.config.seed)
            self.stream.synchronize()

    def next_epoch(self) -> None:
        x, y = self.data.epoch(self.generator)
        self.images.copy_(x)
        self.labels.copy_(y)
        self.sums.zero_()

    def replay(self, steps: int) -> None:
        """Runs this many steps; the host stays at most 16 steps ahead of the device."""
        if self.graph is None:
            for _ in range(steps):
                self.step()
            return
        waiting = None
        for i in range(steps):
            self.graph.replay()
            if i % 8 == 7:
                if waiting is not None:
                    waiting.synchronize()
                waiting = torch.cuda.Event(blocking=True)
                waiting.record(self.stream)
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

    def run(self, log) -> dict:
        start, config = time.time(), self.config
        row, status = {}, "done"
        for epoch in range(config.epochs):
            self.next_epoch()
            self.replay(self.steps)
            loss, wrong = (self.sums / self.steps).tolist()
            val_error, val_loss = self.evaluate(*self.data.val)
            row = {
                "name": self.name, "epoch": epoch + 1, "lr": self.lr_at((epoch + 1) * self.steps - 1), "train_loss": loss,
                "train_error": 100 * wrong / BATCH, "val_error": val_error, "val_loss": val_loss, "seconds": time.time() - start,
            }  # fmt: skip
            log("epochs.jsonl", row)
            if not math.isfinite(loss):
                status = "diverged"
                break
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
    def __init__(self, data: Data, out: Path, queue: Path, slots: int, compile_pieces: bool):
        self.data, self.out, self.queue, self.slots, self.compile_pieces = data, out, queue, slots, compile_pieces
        self.lock, self.started = threading.Lock(), set()
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
        while not (self.out / "stop").exists():
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

    def run(self, job: dict) -> None:
        start = time.time()
        network = {k: tuple(v) if isinstance(v, list) else v for k, v in job.get("network", {}).items()}
        network, config = NetworkConfig(**network), TrainConfig(**job.get("train", {}))
        trainer = self.builder.submit(Trainer, job["name"], network, config, self.data, self.compile_pieces).result()
        built = time.time() - start
        with torch.cuda.stream(trainer.stream):
            result = trainer.run(self.log)
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
    parser.add_argument("--compile", action="store_true", help="compile normalisation and joins")
    parser.add_argument("--once", action="store_true", help="stop when the queue is empty")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    Engine(Data(args.data, args.device), args.out, args.queue, args.slots, args.compile).work(args.once)


if __name__ == "__main__":
    main()
