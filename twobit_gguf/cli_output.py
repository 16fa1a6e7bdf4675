"""What becomes of a command whose output cannot be written: one line instead of a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from .errors import first_line


def flushed(program: str, command: Callable[[], int]) -> int:
    """Runs the command and writes all of its output, which at exit could only fail with a traceback.

    Returns:
        The command's status; 0 where the reader has hung up; 2 and one line on stderr for any other OSError.
    """
    try:
        try:
            return command()
        finally:
            if sys.stdout is not None:  # >&-
                sys.stdout.flush()
    except BrokenPipeError:  # `twobit inspect FILE | head`
        _discard()
        return 0
    except OSError as error:
        print(f"{program}: {first_line(error)}", file=sys.stderr)
        _discard()
        return 2


def _discard() -> None:
    """What is left in stdout's buffer would fail again at exit."""
    stdout = sys.__stdout__
    if stdout is not None and stdout is sys.stdout:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
