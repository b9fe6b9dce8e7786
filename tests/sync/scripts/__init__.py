"""What tests run in processes of their own: ``python -m tests.sync.scripts MODULE FUNCTION ARGUMENT...``.

A script speaks to its test in lines.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Final

__all__ = ["PATIENCE", "fork", "join", "say", "watch_over"]

PATIENCE: Final = 30


def say(*words: object) -> None:
    """One line, written at once and whole, whoever else writes to the same pipe."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def watch_over() -> None:
    """End this process with the stacks of all its threads if it hangs; a forked child has to ask again."""
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(PATIENCE)


def fork(work: Callable[[], object], *, leave: Callable[[int], object] = os._exit) -> int:
    """A child that does ``work``, ends with 0 if it could and tells on its way out why not."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        watch_over()  # the parent's watch has not come along
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    leave(code)
    raise AssertionError


def join(*pids: int) -> None:
    """Wait for children; all have to have ended well."""
    for pid in pids:
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0, "a child has failed"
