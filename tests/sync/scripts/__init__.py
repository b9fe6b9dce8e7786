"""What tests run in processes of their own: ``python -m tests.sync.scripts MODULE FUNCTION ARGUMENT...``.

A script speaks to its test in lines.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import Final

__all__ = ["PATIENCE", "say", "watch_over"]

PATIENCE: Final = 30


def say(*words: object) -> None:
    """One line, written at once and whole, whoever else writes to the same pipe."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def watch_over() -> None:
    """End this process with the stacks of all its threads if it hangs; a forked child has to ask again."""
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(PATIENCE)
