"""Two real processes on the CPU, in float64, started as launchers do and by torchrun and accelerate launch."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import start_command
from tests.train.small import SMALL
from unskip.train import Recipe, run
from unskip.train.lock import Lock
from unskip.train.metrics import read_metrics

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(ROOT), *sys.path])  # so that processes run the code that is tested
RECIPE = SMALL.replace(device="auto", precision="fp64", crop="pad", pad=1, flip=0.5, epochs=2, log_steps=7, seed=4)
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
ACCELERATE = [
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",  # its launcher of several processes; without GPUs they run on the CPU
    "--num_processes=2",
    "--num_machines=1",
    "--mixed_precision=no",
    "--dynamo_backend=no",
    "--main_process_port=0",
]


def environment(**more: str) -> dict[str, str]:
    """A machine without a GPU, and nothing that says so to Accelerate."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH, "CUDA_VISIBLE_DEVICES": "", **more}


def launch(launcher: list[str], recipe: Recipe, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    (folder / "recipe.toml").write_text(recipe.to_toml())
    words = ["-m", "unskip", "train", str(folder / "recipe.toml"), "--out", str(folder / "run"), *more]
    return subprocess.run(
        [sys.executable, *launcher, *words], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def compare(two: Path, one: Path) -> None:
    rows = [[r for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "step"] for out in (two, one)]
    assert [r["step"] for r in rows[0]] == list(range(1, 41))
    assert [r["loss"] for r in rows[0]] == pytest.approx([r["loss"] for r in rows[1]], abs=1e-10)
    weights = [load_file(out / "weights.safetensors") for out in (two, one)]
    assert set(weights[0]) == set(weights[1])
    for key, value in weights[0].items():
        torch.testing.assert_close(
            value, weights[1][key], rtol=0, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.full
def test_group_norm_equals_one_process_at_the_same_global_batch(tmp_path: Path) -> None:
    recipe = RECIPE.replace(options={"norm": "group"}, clip=1.0, max_norm=2.0, orthogonal=1e-3)
    done = launch(TORCHRUN, recipe, tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test error") == 1  # one line, from one process
    one = run(recipe, out=tmp_path / "one", silent=True)
    compare(tmp_path / "two" / "run", tmp_path / "one")
    assert f"test error {one.test_error:.2f} %" in done.stdout


def join(recipe: Recipe, folder: Path) -> None:
    """Two processes in the environment that a launcher makes, without its start-up."""
    folder.mkdir()
    (folder / "recipe.toml").write_text(recipe.to_toml())
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    commands = []
    for rank in "01":
        (folder / rank).mkdir()
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        where = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
        words = ("train", str(folder / "recipe.toml"), "--out", str(folder / "run"))
        commands.append(start_command(*words, cwd=folder / rank, environment=ranks | where))
    for command in commands:
        code, _, err = command.finish()
        assert code == 0, err


@pytest.mark.parametrize("launcher", [[], pytest.param(ACCELERATE, marks=pytest.mark.full)], ids=["", "accelerate"])
def test_batch_norm_equals_one_process_that_normalises_each_half(launcher: list[str], tmp_path: Path) -> None:
    recipe = RECIPE.replace(options={"norm": "batch"})
    if launcher:
        done = launch(launcher, recipe, tmp_path / "two")
        assert done.returncode == 0, done.stderr
    else:
        join(recipe, tmp_path / "two")
    run(recipe.replace(options={"norm": "halves"}), out=tmp_path / "one", silent=True)
    compare(tmp_path / "two" / "run", tmp_path / "one")
    # So that the test can fail: whole-batch statistics are something else.
    run(recipe, out=tmp_path / "whole", silent=True)
    with pytest.raises(AssertionError):
        compare(tmp_path / "two" / "run", tmp_path / "whole")


@pytest.mark.full
def test_two_processes_stop_on_a_signal_and_go_on(tmp_path: Path) -> None:
    import signal
    import time

    recipe = RECIPE.replace(options={"norm": "group"}, epochs=30, save_steps=9)
    run(recipe, out=tmp_path / "one", silent=True)
    folder = tmp_path / "two"
    folder.mkdir()
    (folder / "recipe.toml").write_text(recipe.to_toml())
    words = ["-m", "unskip", "train", str(folder / "recipe.toml"), "--out", str(folder / "run")]
    process = subprocess.Popen([sys.executable, *TORCHRUN, *words], env=environment(), cwd=ROOT, stderr=subprocess.PIPE)
    while not (folder / "run" / "checkpoint.pt").exists():
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode != 0
    step = torch.load(folder / "run" / "checkpoint.pt", weights_only=True)["step"]
    assert step < 600
    assert launch(TORCHRUN, recipe, folder, "--resume", "auto").returncode == 0
    weights = [load_file(out / "weights.safetensors") for out in (folder / "run", tmp_path / "one")]
    for key, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][key], rtol=0, atol=1e-7)


@pytest.mark.full
def test_a_folder_in_use_is_said_once_by_two_processes(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "two" / "run")
    lock.folder.mkdir(parents=True)
    lock.acquire()
    done = launch(TORCHRUN, RECIPE, tmp_path / "two", "--resume", "auto")
    assert done.returncode != 0
    assert done.stderr.count(f"in use by process {os.getpid()} on host") == 1
    assert not [line for line in done.stderr.splitlines() if "/unskip/" in line]  # no traceback but the launcher's
    assert [file.name for file in lock.folder.iterdir()] == ["lock.json"]


def test_processes_that_are_not_joined_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the launcher's processes have GPUs of which Accelerate makes nothing."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match=r"the launcher has started 2 processes, and Accelerate joins 1 of them on cpu"
    ):
        run(RECIPE, out=tmp_path / "run", silent=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_fsdp_is_refused_where_nothing_would_be_sharded(tmp_path: Path) -> None:
    """Accelerate has FSDP on GPUs alone; on CPUs it ends with a traceback, or runs DDP without a word."""
    launcher = ["--use_fsdp" if word == "--multi_gpu" else word for word in ACCELERATE]
    done = launch(launcher, RECIPE, tmp_path / "two")
    assert done.returncode != 0
    assert done.stderr.count("the launcher asks for FSDP, which Accelerate has on GPUs alone") == 1, done.stderr
    assert not [line for line in done.stderr.splitlines() if "/unskip/" in line]  # no traceback but the launcher's
    assert not (tmp_path / "two" / "run").exists()


def sharded_worker(rank: int, folder: str) -> None:
    """FSDP on two CPU processes: the whole state of a sharded network and its optimizer, gathered and put back."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from unskip.train import machine

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

    class Sharded:  # what machine's functions ask an Accelerator for
        distributed_type = machine.DistributedType.FSDP

    class Wrapped:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
        fully_shard(network, mesh=init_device_mesh("cpu", (2,)))
        return network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)

    def steps(network: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        x = torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8)
        losses = []
        for _ in range(3):
            loss = network(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    network, optimizer = build(0)
    steps(network, optimizer)
    accelerator: object = Sharded()
    weights = machine.network_state(accelerator, network)  # type: ignore[arg-type]
    state = machine.optimizer_state(accelerator, network, Wrapped(optimizer))  # type: ignore[arg-type]
    box = [weights, state]
    dist.broadcast_object_list(box)  # every process reads the one file
    if rank == 0:
        assert weights["0.weight"].shape == (16, 8)  # whole
    expected = steps(network, optimizer)
    other, other_optimizer = build(1)
    machine.load_network(accelerator, other, box[0])  # type: ignore[arg-type]
    machine.load_optimizer(accelerator, other, Wrapped(other_optimizer), box[1])  # type: ignore[arg-type]
    assert steps(other, other_optimizer) == expected
    dist.destroy_process_group()


@pytest.mark.full
def test_a_sharded_network_is_saved_whole_and_put_back(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(sharded_worker, args=(str(tmp_path),), nprocs=2)
