"""Triton's kernels without a GPU: by its interpreter, in a process of its own, since it is chosen when Triton is
imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import triton"], capture_output=True, check=False).returncode != 0,
    reason="Triton can't be imported here",
)


def interpreted(*arguments: str) -> str:
    """What Python prints, run with these arguments and Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
