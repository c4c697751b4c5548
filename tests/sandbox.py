"""Runs code in a process that may take little memory: for hostile files, which must be refused before they take any.

One process imports the library and forks another for each piece of code, which then starts at once.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

ROOM = 2 * 2**30  # bytes of address space that the code may take beyond what the imports have
SECONDS = 60  # and of time: a pipe that is opened waits for ever


def run(code: str, *arguments: str | Path, gib: str = "") -> tuple[str, int]:
    """Runs code, with `arguments` as its `argv`, and the limit UNSKIP_MAX_GIB. Returns what it printed or the sentence
    that it ended with, and the bytes of memory that it took. Any error but ValueError is raised here.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([code, [str(each) for each in arguments], gib]) + "\n")
    server.stdin.flush()
    said, took, traceback = json.loads(server.stdout.readline() or '["", 0, "the process is gone"]')
    assert not traceback, traceback
    return said, took


@functools.cache
def _server() -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.sandbox"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    atexit.register(server.kill)
    return server


def _serve() -> None:
    import unskip.data.feed
    import unskip.io.load  # noqa: F401

    for line in sys.stdin:
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(reader)
            with open(writer, "w") as out:
                out.write(json.dumps(_in_little_memory(*json.loads(line))))
            os._exit(0)
        os.close(writer)
        with open(reader) as answer:
            text = answer.read()
        _, status = os.wait()
        print(text or json.dumps(["", 0, f"the process ended with status {status}"]), flush=True)


def _in_little_memory(code: str, arguments: list[str], gib: str) -> tuple[str, int, str]:
    import contextlib
    import io
    import resource
    import signal
    import traceback

    def taken() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    os.environ["UNSKIP_MAX_GIB"] = gib
    signal.alarm(SECONDS)
    with open("/proc/self/statm") as statm:
        limit = int(statm.read().split()[0]) * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before, said, unexpected = taken(), io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(said):
            exec(code, {"argv": arguments})
    except ValueError as error:
        said.write(str(error))
    except BaseException:
        unexpected = traceback.format_exc()
    return said.getvalue(), taken() - before, unexpected


if __name__ == "__main__":
    _serve()
