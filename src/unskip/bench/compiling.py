"""Folding and compiling several models at once, each in a process of its own.

Tracing and code generation of one model run on one core. A machine with many cores does many models in the time of the
slowest: the workers fill the compiler's cache on disk, where the process that times finds their code.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir

from unskip.bench.networks import forms
from unskip.bench.runner import Runner, Task, tuned
from unskip.bench.setting import Case, Setting
from unskip.io.load import Shape

SPAWN = multiprocessing.get_context("spawn")


def compile_ahead(files: Mapping[Case, Path], task: Task, setting: Setting) -> Iterator[str]:
    """Compiles `setting.compile_workers` cases at a time, the first ones first; yields a sentence about each.

    Args:
        files: by case, the file of its model.
        task: what all models read and give.
        setting: how they are timed.
    """
    threads = torch.get_num_threads()  # of the process that will time them: code for a CPU depends on it
    # A fresh process each: forked ones can't use CUDA, and used ones would keep memory of the GPU.
    with ProcessPoolExecutor(setting.compile_workers, mp_context=SPAWN, max_tasks_per_child=1) as pool:
        futures = [pool.submit(_compile, case, path, task, setting, threads) for case, path in files.items()]
        for done, future in enumerate(as_completed(futures), 1):
            yield f"{future.result()}; {len(futures) - done} left"
    # Launch settings that were fastest while many processes shared the GPU may not be the fastest alone.
    for note in Path(cache_dir()).rglob("*.best_config"):
        note.unlink(missing_ok=True)


def _compile(case: Case, path: Path, task: Task, setting: Setting, threads: int) -> str:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # there are as many workers as cores
    torch.set_num_threads(threads)  # `tuned` sets those that the setting asks for
    began, error = time.perf_counter(), ""
    try:
        with tuned(setting):
            Runner(case, read(path), task, setting)
    except Exception as failure:  # the process that times it meets the same error and puts it into its row
        error = short_error(failure)
    return f"compiled in {time.perf_counter() - began:.0f} s: {case} {error}".rstrip()


def make_forms(
    paths: dict[str, Path], input_sizes: dict[str, Shape], *, folded: bool, workers: int
) -> dict[str, dict[str, Path] | str]:
    """Files of each model's forms for inference, or why there are none; made by `workers` processes, 0: by this one."""
    if not workers:
        return {name: _save_forms(path, input_sizes[name], folded) for name, path in paths.items()}
    with ProcessPoolExecutor(min(workers, len(paths)), mp_context=SPAWN) as pool:
        threads = max(1, torch.get_num_threads() // workers)
        futures = {n: pool.submit(_save_forms, path, input_sizes[n], folded, threads) for n, path in paths.items()}
        return {name: future.result() for name, future in futures.items()}


def _save_forms(path: Path, input_size: Shape, folded: bool, threads: int = 0) -> dict[str, Path] | str:
    paths = {}
    if threads:
        torch.set_num_threads(threads)
    try:
        for form, model in forms(read(path), input_size, folded=folded).items():
            paths[form] = path.with_name(f"{path.stem}-{form.replace(' ', '_')}.pt")
            torch.save(model, paths[form])
    except Exception as error:  # one model that fails must not take the others with it
        return short_error(error)
    return paths


def read(path: Path) -> nn.Module:
    """The model in a file that this program has just written."""
    model: nn.Module = torch.load(path, map_location="cpu", weights_only=False)
    return model


def short_error(error: Exception, characters: int = 800) -> str:
    """What failed, on one line. A compiler's message ends with the cause, followed by advice that never changes."""
    text = " ".join(str(error).partition("Set TORCHDYNAMO_VERBOSE")[0].split())
    return f"{type(error).__name__}: " + (text if len(text) <= characters else f"... {text[-characters:]}")
