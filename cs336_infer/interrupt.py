"""Ctrl-C while the program `cs336-infer` imports torch: one line and exit code 130, as from `cli.main` later on.

Imported first of all by the package; in any other program it does nothing.
"""

import os
import signal
import sys
from types import FrameType

PROGRAM = "cs336-infer"


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, f"{PROGRAM}: interrupted\n".encode())
    os._exit(130)  # nothing was begun that would have to be ended; an import may turn an exception into another


def imported() -> None:
    """Everything is imported: from now on Ctrl-C is a `KeyboardInterrupt`."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_program() -> bool:
    return os.path.splitext(os.path.basename(sys.argv[0] if sys.argv else ""))[0] == PROGRAM


if _is_program() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell has it ignored
    signal.signal(signal.SIGINT, _leave)
