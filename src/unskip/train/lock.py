"""The lock of a run's folder: lock.json names the host and the process that trains there."""

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path

import psutil

CLOCK_SLACK = 10.0  # s; a process's start time follows the system's clock, which may be set meanwhile


class Lock:
    """Held by one process at a time; one that a dead process of this host has left is replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "lock.json"
        self.text = ""  # what we have written there; '' while it is not ours

    def acquire(self, *, take_over: bool = False) -> None:
        """Takes the lock, or raises a ValueError that names who has it.

        Args:
            take_over: replaces the lock of a process that can't be looked at from here, as on another host.
        """
        me = psutil.Process()
        text = json.dumps({**_place(), "process": me.pid, "started": me.create_time()})
        while not self._create(text):
            self._remove_stale(take_over)
        self.text = text

    def check(self) -> None:
        """Refuses to write on after another process has taken the folder over."""
        if not self._is_ours():
            raise ValueError(
                f"train: the lock {self.path} is gone or another process's, which has taken the folder over. This run "
                "ends without writing there; start it anew in another folder (--out)."
            )

    def release(self) -> None:
        with contextlib.suppress(OSError):
            if self._is_ours():
                self.path.unlink()
        self.text = ""

    def _is_ours(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return bool(self.text) and self.path.read_text(encoding="utf-8", errors="replace") == self.text
        return False

    def _create(self, text: str) -> bool:
        """Makes the file, unless there is one. Not by a hard link, which some shared folders don't have."""
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError:  # a full disk
            self.path.unlink(missing_ok=True)
            raise
        return True

    def _remove_stale(self, take_over: bool) -> None:
        """Removes the lock of a process that is gone; refuses that of any other."""
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            with contextlib.suppress(OSError):  # where the file system has no such locks, two may come to this point
                fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever was here before has removed the file, and perhaps made its own.
            if os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                for _ in range(20):  # its owner may be about to write it
                    text = file.read()
                    if text:
                        break
                    time.sleep(0.05)
                self._check_gone(text, take_over)
                self.path.unlink()

    def _check_gone(self, text: bytes, take_over: bool) -> None:
        try:
            owner = json.loads(text)
            alive = _is_alive(int(owner["process"]), float(owner["started"]))
            here = {key: owner[key] for key in _place()} == _place()
            who = f"process {owner['process']} on host {owner['host']!r}"
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            alive, here, who = False, False, "an unknown process"
        if here and alive:
            raise ValueError(
                f"train: the folder {self.folder} is in use by {who}. Wait until it has ended, stop it, or choose "
                "another folder (--out)."
            )
        if not here and not take_over:
            raise ValueError(
                f"train: the folder {self.folder} is locked by {who} (lock.json), which can't be seen from here. If it "
                "no longer runs, take the folder over (--take-over; take_over=True), else choose another (--out)."
            )


def _place() -> dict[str, str]:
    """Where numbers of processes mean the same: the host and, for containers, the namespace."""
    with contextlib.suppress(OSError):
        return {"host": socket.gethostname(), "namespace": os.readlink("/proc/self/ns/pid")}
    return {"host": socket.gethostname(), "namespace": ""}


def _is_alive(number: int, started: float) -> bool:
    """Whether a process runs that began at this time, and not just one that got its number later."""
    try:
        process = psutil.Process(number)
        same = abs(process.create_time() - started) < CLOCK_SLACK
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return True
    except psutil.Error:
        return False
