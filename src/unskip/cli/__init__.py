"""The command line. One file per command; each parses, calls and prints, and has no logic of its own.

This file imports next to nothing: until `main` runs, Ctrl-C is a traceback.
"""

import contextlib
import io
import os
import sys
from typing import NoReturn

from unskip.cli.interrupts import INTERRUPTED, SENTENCE, Importing


def main() -> None:
    """Runs the command line. Errors are one sentence on stderr, without a traceback.

    Exit codes: 2 where the user's input is wrong, 1 where the machine refuses (a full disk, a lack of memory).
    """
    with Importing():
        from unskip.cli.commands import app

        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal without √ gets a ?, not an error once all is computed
        try:
            try:
                app()
            finally:
                sys.stdout.flush()  # here, where a full disk is a sentence, and not when Python exits
        except ValueError as error:
            _exit(str(error), 2)
        except MemoryError as error:
            _exit(f"unskip: this takes more memory than there is ({str(error) or 'out of memory'}).", 1)
        except OSError as error:
            with contextlib.suppress(OSError, ValueError):  # what is still buffered can't be written either
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            where = f" ({error.filename})" if error.filename else ""
            _exit(f"unskip: {error.strerror or error}{where}.", 1)
        except KeyboardInterrupt:
            _exit(SENTENCE, INTERRUPTED, style="")
        except SystemExit as ended:  # typer's, of Ctrl-C too
            if ended.code == INTERRUPTED:
                _exit(SENTENCE, INTERRUPTED, style="")
            raise


def _exit(sentence: str, code: int, style: str = "red") -> NoReturn:
    from rich.console import Console

    with contextlib.suppress(OSError):  # stderr may be full too
        Console(stderr=True, highlight=False, soft_wrap=True).print(sentence, style=style, markup=False)
    sys.exit(code)
