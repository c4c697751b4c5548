"""metrics.jsonl: one line for each update and one for each epoch, each exactly once, also after a crash."""

import contextlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from unskip.train.checkpoint import explained


class Metrics:
    """Appends lines. A checkpoint holds the length of the file at its moment; going on cuts the file back to it."""

    def __init__(self, path: Path, length: int = 0, *, boards: Sequence[Any] = ()) -> None:
        self.path = path
        with explained("the file", path):
            self.file = open(path, "ab")  # noqa: SIM115 - closed by __exit__
            if self.file.tell() < length:
                self.file.close()
                raise ValueError(
                    f"train: {path} is shorter than it was when the checkpoint beside it was written. Put it back, or "
                    "start anew in another folder (--out)."
                )
            self.file.truncate(length)
            self.file.seek(length)
        self.boards = boards  # with the methods add_scalar and close of TensorBoard's SummaryWriter

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        # Closing may fail on a full disk: then the error that is under way says so already.
        with explained("the file", self.path) if error is None else contextlib.suppress(OSError):
            self.file.close()
        for board in self.boards:
            board.close()

    def write(self, rows: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps({key: _finite(value) for key, value in row.items()}) + "\n" for row in rows)
        with explained("the file", self.path):
            self.file.write(text.encode())
            self.file.flush()
        for board in self.boards:
            for row in rows:
                for name, value in row.items():
                    if isinstance(value, float):
                        board.add_scalar(f"{row['kind']}/{name}", value, row["step"])

    def length(self) -> int:
        """The length of the file once all lines are on the disk."""
        with explained("the file", self.path):
            os.fsync(self.file.fileno())
            return self.file.tell()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl. A last line that is cut short, by a run that writes now, is left out."""
    text = Path(path).read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tensorboard(folder: Path, step: int) -> Any:
    """Writes OUT/tensorboard, from an update on."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("recipe: tensorboard=true needs that package: pip install 'unskip[tensorboard]'.") from error
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


class WandbRun:
    """Writes to Weights & Biases; its settings are its own environment variables (WANDB_PROJECT, WANDB_MODE, ...)."""

    def __init__(self, folder: Path, step: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError("recipe: wandb=true needs that package: pip install 'unskip[wandb]'.") from error
        project = os.environ.get("WANDB_PROJECT", "unskip")
        self.run = wandb.init(project=project, name=folder.name, dir=str(folder), config={"from_update": step})

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.run.log({name: value, "update": step})

    def close(self) -> None:
        self.run.finish()
