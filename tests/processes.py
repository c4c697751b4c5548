"""Processes of their own that begin with everything imported: for real signals, exit codes and several at a time."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

import unskip

SOURCE = Path(unskip.__file__).parents[1]
IMPORTED = ["unskip.cli.commands", "unskip.train.runner", "unskip.bench", "tests.train.small"]


def start(target: Callable[..., object], *args: Any) -> BaseProcess:
    """Runs a function in a process of its own, from a server that has imported everything and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=_single_threaded, args=(target, *args))
    process.start()
    return process


def _single_threaded(target: Callable[..., object], *args: Any) -> None:
    torch.set_num_threads(1)
    target(*args)


@dataclass(frozen=True)
class Command:
    """A command line that runs. Its streams are files beside its working directory."""

    process: BaseProcess
    out: Path
    err: Path

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def finish(self, seconds: float = 120) -> tuple[int, str, str]:
        """Its exit code, stdout and stderr."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, "it has not ended"
        out, err = (each.read_text(encoding="utf-8") if each.is_file() else "" for each in (self.out, self.err))
        return self.process.exitcode, out, err


def start_command(
    *words: str, cwd: Path, err: str | None = None, environment: Mapping[str, str] | None = None
) -> Command:
    """`unskip WORDS`, from `main` on, in this working directory; `err` is another place for its stderr, a terminal."""
    out, errors = cwd / "stdout.txt", Path(err or cwd / "stderr.txt")
    return Command(start(_command, words, cwd, out, errors, dict(environment or {})), out, errors)


def _command(words: tuple[str, ...], cwd: Path, out: Path, err: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.chdir(cwd)
    for place, number in ((out, 1), (err, 2)):
        os.dup2(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOCTTY, 0o600), number)
    sys.argv = ["unskip", *words]
    from unskip.cli import main

    main()


def paste(line: str, folder: Path) -> str:
    """What a line of commands prints; the line must end with code 0."""
    (folder / "bin").mkdir(exist_ok=True)
    command = folder / "bin" / "unskip"
    command.write_text(f"#!{sys.executable}\nfrom unskip.cli import main\nmain()\n")
    command.chmod(0o755)
    path = os.pathsep.join([str(command.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    # What the machine that runs the tests has; its packages too where PYTHONPATH says so.
    environment = {
        **os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path]),
        "TORCH_HOME": torch.hub.get_dir(), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout
