"""Exit codes, and Ctrl-C while a command is still importing what it needs."""

import os
import signal

INTERRUPTED = 130  # the exit code that shells know: 128 + SIGINT
STOPPED, DIVERGED = 75, 3  # of training; 75 is EX_TEMPFAIL, "try again later"
SENTENCE = "Interrupted. Nothing is left half written; the same command begins anew."


class Importing:
    """Until a command has imported what it needs, which takes seconds, Ctrl-C ends the process at once.

    An exception would not: modules that try what there is to import (NumPy, accelerate) swallow it, and go on with half
    of what they need. Nothing has begun by then that would have to be tidied up. It begins in `main` and ends with the
    first such block, that of the command, which from then on gets its KeyboardInterrupt.
    """

    def __enter__(self) -> None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in a script's background
            signal.signal(signal.SIGINT, _end)

    def __exit__(self, *_: object) -> None:
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    os.write(2, f"{SENTENCE}\n".encode())  # past sys.stderr, which may be in the middle of a line of its own
    os._exit(INTERRUPTED)
