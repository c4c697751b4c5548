"""Folding and compiling several networks at once, each in a process of its own.

Tracing and code generation of one network run on one core. A machine with many of them does many networks in the time
of the slowest: the workers leave the compiler's cache on disk filled, where the process that times finds their code.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch._inductor.runtime.runtime_utils import cache_dir

from unskip.bench.networks import forms, load
from unskip.bench.runner import Reading, Runner, tuned
from unskip.bench.setting import Case, Setting


@dataclass(frozen=True, kw_only=True)
class Job:
    """A case to compile: the file of its network, and what that reads."""

    case: Case
    path: Path
    reading: Reading
    setting: Setting
    threads: int  # of the process that will time it, since code for a CPU depends on them


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a worker did with one case."""

    case: Case
    seconds: float
    error: str = ""


def compile_ahead(
    jobs: Sequence[Job], workers: int, done: Callable[[Compiled], None] = lambda _: None
) -> list[Compiled]:
    """Compiles so many cases at a time, the first ones first."""
    finished = []
    # A fresh process each: forked ones can't use CUDA, and used ones would keep memory of the GPU.
    with ProcessPoolExecutor(workers, mp_context=SPAWN, max_tasks_per_child=1) as pool:
        for future in as_completed([pool.submit(_compile, job) for job in jobs]):
            finished.append(future.result())
            done(finished[-1])
    forget_tuning()
    return finished


SPAWN = multiprocessing.get_context("spawn")


def forget_tuning() -> None:
    """Deletes which launch settings were fastest while many processes shared the GPU; alone, others may be."""
    for note in Path(cache_dir()).rglob("*.best_config"):
        note.unlink(missing_ok=True)


def cause(error: Exception, characters: int = 800) -> str:
    """What failed, on one line. A compiler's words end with the cause, and then with advice that never changes."""
    words = " ".join(str(error).partition("Set TORCHDYNAMO_VERBOSE")[0].split())
    return f"{type(error).__name__}: " + (words if len(words) <= characters else f"... {words[-characters:]}")


def _compile(job: Job) -> Compiled:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # there are as many of us as cores
    torch.set_num_threads(job.threads)
    began, error = time.perf_counter(), ""
    try:
        with tuned(job.setting):
            Runner(job.case, read(job.path), job.reading, job.setting)
    except Exception as failure:  # the process that times it will meet the same, and say so in its row
        error = cause(failure)
    return Compiled(case=job.case, seconds=time.perf_counter() - began, error=error)


def make_forms(words: Sequence[str], folder: Path, *, folded: bool, workers: int) -> dict[str, dict[str, Path] | str]:
    """Each network's forms for inference as files, made by so many processes; 0: by this one. Or why there are none."""
    if not workers or not words:
        made = [_save_forms(word, folder, i, folded) for i, word in enumerate(words)]
    else:
        with ProcessPoolExecutor(min(workers, len(words)), mp_context=SPAWN) as pool:
            threads = max(1, torch.get_num_threads() // workers)
            futures = [pool.submit(_save_forms, word, folder, i, folded, threads) for i, word in enumerate(words)]
            made = [future.result() for future in futures]
    return dict(zip(words, made, strict=True))


def _save_forms(word: str, folder: Path, number: int, folded: bool, threads: int = 0) -> dict[str, Path] | str:
    paths = {}
    if threads:
        torch.set_num_threads(threads)
    try:
        for form, network in forms(load(word), folded=folded).items():
            paths[form] = folder / f"{number}-{form.replace(' ', '_')}.pt"
            torch.save(network, paths[form])
    except Exception as error:  # one network that fails must not take the others with it
        return cause(error)
    return paths


def read(path: Path) -> nn.Module:
    """A network that this program itself has put there a moment ago."""
    return torch.load(path, map_location="cpu", weights_only=False)
