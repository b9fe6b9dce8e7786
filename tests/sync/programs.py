"""Other Python processes, which run one function of ``tests/sync/scripts`` each."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.sync.looking import LONG

__all__ = ["Ended", "Program", "run", "running"]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """What a process left behind."""

    code: int
    lines: list[str]
    errors: str

    def went_well(self) -> list[str]:
        """Its remaining lines, provided that it ended with 0 and complained about nothing."""
        assert (self.code, self.errors) == (0, ""), f"exit code {self.code}\n{self.errors}"
        return self.lines


class Program:
    """A process under way."""

    def __init__(self, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self._process = process
        self._errors = errors
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def line(self) -> str:
        """What it says next."""
        line = self._next()
        if line is None:
            ended = self.end()
            raise AssertionError(f"it ended with {ended.code} instead\n{ended.errors}")
        return line

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def end(self) -> Ended:
        """Wait until it has ended and nobody holds its output any more."""
        lines = list(iter(self._next, None))
        code = self._process.wait(LONG)
        self._errors.seek(0)
        return Ended(code, lines, self._errors.read())

    def kill(self) -> None:
        """End it and its children, whatever they do."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _next(self) -> str | None:
        try:
            line = self._lines.get(timeout=2 * LONG)
        except queue.Empty:
            raise AssertionError("it says nothing") from None
        if line is None:
            self._lines.put(None)
        return line

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)


@contextmanager
def running(script: Callable[..., Any] | str, *args: str) -> Iterator[Program]:
    """A process that runs ``script``, a function of ``tests.sync.scripts`` or source text."""
    if isinstance(script, str):
        command = ["-c", script, *args]
    else:
        command = ["-m", "tests.sync.scripts", script.__module__, script.__name__, *args]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            # Python 3.12 and later warn when a process with threads forks; there is no way around that here.
            [sys.executable, "-W", "ignore:This process:DeprecationWarning", *command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        program = Program(process, errors)
        try:
            yield program
        finally:
            program.kill()


def run(script: Callable[..., Any] | str, *args: str) -> list[str]:
    """What ``script`` says, if all goes well."""
    with running(script, *args) as program:
        return program.end().went_well()
