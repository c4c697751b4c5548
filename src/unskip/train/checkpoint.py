"""Checkpoints: one file, written atomically, loaded with `weights_only`, and the folder of a run around it.

checkpoint.pt         everything that the run needs to go on, at the end of the last update that was saved
weights.safetensors   the weights alone, for others to load
best.safetensors      the weights with the lowest validation error so far (recipe.keep = "best")
recipe.toml           the recipe
metrics.jsonl         one line for each update, and one for each epoch
curves.png            loss and error over the run, at its end
"""

import functools
import os
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from unskip._core import files
from unskip.io.torch_file import FORMAT, read_torch_file

Resume = Literal["never", "auto"]


GO_ON = "What was saved before is untouched; make room or choose another folder (--out), and go on with --resume auto."
START_ANEW = "Nothing was changed. Put the right file there, or start anew in another folder (--out)."

explained = functools.partial(files.explained, command="train", way_out=GO_ON)
write_atomically = functools.partial(files.write_atomically, command="train", way_out=GO_ON)


class RunFolder:
    """The folder of a run. Only the main process writes to it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.checkpoint = self.path / "checkpoint.pt"
        self.metrics = self.path / "metrics.jsonl"
        self.writer = ThreadPoolExecutor(1)  # writes checkpoints while training goes on
        self.written: Future[None] | None = None

    def open(self, resume: Resume) -> bool:
        """Makes the folder ready and says whether there is a run to go on with. Never overwrites one."""
        if resume not in ("never", "auto"):
            raise ValueError(f"train: resume={resume!r} must be 'never' or 'auto'.")
        if resume == "auto" and self.checkpoint.exists():
            self.remove_leftovers()
            return True
        if resume == "never" and (self.checkpoint.exists() or self.metrics.exists()):
            raise ValueError(
                f"train: {self.path} holds a run already. Go on with it (--resume auto), or choose another folder "
                "(--out)."
            )
        with explained("the folder", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.metrics.unlink(missing_ok=True)  # of a run that was killed before its first checkpoint
            self.remove_leftovers()
            probe = self.path / f".probe.{os.getpid()}.part"
            probe.write_bytes(b"unskip")
            probe.unlink()
        return False

    def remove_leftovers(self) -> None:
        """What a process that was killed while it wrote has left."""
        for leftover in self.path.glob(".*.part"):
            leftover.unlink(missing_ok=True)

    def write_text(self, name: str, text: str) -> None:
        write_atomically(self.path / name, lambda file: file.write(text.encode()))

    def write_weights(self, name: str, state: dict[str, Tensor]) -> None:
        """A state dict as safetensors. Tied weights are stored once for each name, so any loader finds them all."""
        copies = {key: value.detach().to("cpu").clone().contiguous() for key, value in state.items()}
        data = save_safetensors(copies, metadata={"format": "pt"})
        write_atomically(self.path / name, lambda file: file.write(data))

    def read_weights(self, name: str) -> dict[str, Tensor]:
        return load_safetensors((self.path / name).read_bytes())

    def save(self, state: dict[str, Any]) -> None:
        """Writes the checkpoint in the background; `wait` returns once it is on the disk."""
        data = BytesIO()
        torch.save({"format": FORMAT, **state}, data)
        self.wait()
        self.written = self.writer.submit(write_atomically, self.checkpoint, lambda file: file.write(data.getbuffer()))

    def wait(self) -> None:
        """Waits for the checkpoint under way; what went wrong with it is raised here."""
        if self.written is not None:
            written, self.written = self.written, None
            written.result()

    def load(self) -> dict[str, Any]:
        return load_checkpoint(self.checkpoint)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint that has been checked: whole, and one of ours. No code in it can run."""
    state = read_torch_file(path, command="train", way_out=START_ANEW)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        kind = state.get("format", "other keys") if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"train: {path} is no checkpoint of unskip: it holds {kind!r} where {FORMAT!r} is expected. {START_ANEW}"
        )
    return state


def check_same(found: dict[str, Any], asked: dict[str, Any], what: str, path: Path) -> None:
    """Refuses to go on with a run under another recipe or on other data, and names what differs."""
    names = [name for name in {**asked, **found} if found.get(name) != asked.get(name)]
    if names:
        differences = ", ".join(f"{name} was {found.get(name)!r} and is {asked.get(name)!r}" for name in names)
        raise ValueError(
            f"train: {path} was made with another {what}: {differences}. Give the same again, or start anew in another "
            "folder (--out)."
        )
