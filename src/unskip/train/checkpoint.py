"""Checkpoints: one file, written atomically, loaded with `weights_only`, and the folder of a run around it.

checkpoint.pt         everything that the run needs to go on, at the end of the last update that was saved
weights.safetensors   the weights alone, for others to load
best.safetensors      the weights with the lowest validation error so far (recipe.keep = "best")
recipe.toml           the recipe
metrics.jsonl         one line for each update, and one for each epoch
curves.png            loss and error over the run, at its end
lock.json             who trains here, while somebody does
"""

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Self

import torch

from unskip._core import files
from unskip.io.torch_file import FORMAT, read_torch_file
from unskip.train.lock import Lock

Resume = Literal["never", "auto"]

GO_ON = "What was saved before is untouched; make room or choose another folder (--out), and go on with --resume auto."
START_ANEW = "Nothing was changed. Put the right file there, or start anew in another folder (--out)."

explained = functools.partial(files.explained, command="train", way_out=GO_ON)
write_atomically = functools.partial(files.write_atomically, command="train", way_out=GO_ON)

# What a checkpoint holds besides `format`, `own`, `input_size` and `preparation`, which only `unskip.load` reads
FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("recipe", "data", "network", "optimizer"), (dict,)),
    **dict.fromkeys(("scaler", "ema"), (dict, NoneType)),
    **dict.fromkeys(("random", "sums"), (list,)),
    **dict.fromkeys(("step", "metrics_length"), (int,)),
    **dict.fromkeys(("seconds", "best"), (float,)),
    "feed": (str,),
    "stuck": (bool,),
}


class RunFolder:
    """The folder of a run. Only the main process writes to it, and only while it holds the folder's lock."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.checkpoint = self.path / "checkpoint.pt"
        self.metrics = self.path / "metrics.jsonl"
        self.lock = Lock(self.path)
        self.writer = ThreadPoolExecutor(1)  # writes checkpoints while training goes on
        self.written: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.shutdown()
        self.lock.release()

    def open(self, resume: Resume, *, take_over: bool = False) -> bool:
        """Locks the folder and says whether there is a run to go on with. Never overwrites one."""
        if resume not in ("never", "auto"):
            raise ValueError(f"train: resume={resume!r} must be 'never' or 'auto'.")
        with explained("the folder", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock.acquire(take_over=take_over)
            if resume == "never" and (self.checkpoint.exists() or self.metrics.exists()):
                raise ValueError(
                    f"train: {self.path} holds a run already. Go on with it (--resume auto), or choose another folder "
                    "(--out)."
                )
            for leftover in self.path.glob(".*.part"):  # of a process that was killed while it wrote
                leftover.unlink(missing_ok=True)
            if self.checkpoint.exists():
                return True
            self.metrics.unlink(missing_ok=True)  # of a run that was killed before its first checkpoint
        return False

    def write(self, name: str, data: bytes | memoryview) -> None:
        self.lock.check()
        write_atomically(self.path / name, lambda file: file.write(data))

    def save(self, state: dict[str, Any]) -> None:
        """Writes the checkpoint in the background; `wait` returns once it is on the disk."""
        data = BytesIO()
        torch.save({"format": FORMAT, **state}, data)
        self.wait()
        self.written = self.writer.submit(self.write, self.checkpoint.name, data.getbuffer())

    def wait(self) -> None:
        """Waits for the checkpoint under way; what went wrong with it is raised here."""
        if self.written is not None:
            written, self.written = self.written, None
            written.result()


def load_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint that has been checked: whole, one of ours, and with all of its fields. No code in it can run."""
    state = read_torch_file(path, command="train", way_out=START_ANEW)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        kind = state.get("format", "other keys") if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"train: {path} is no checkpoint of unskip: it holds {kind!r} where {FORMAT!r} is expected. {START_ANEW}"
        )
    for name, kinds in FIELDS.items():
        value = state.get(name)
        right = isinstance(value, kinds) and name in state and (bool in kinds or not isinstance(value, bool))
        if not right or (isinstance(value, int | float) and not value >= 0):
            found = f"is {value!r:.40}" if name in state else "is missing"
            raise ValueError(f"train: {path} is damaged: its field {name!r} {found}. {START_ANEW}")
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
