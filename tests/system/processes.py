"""Starting consumers as processes, and reading what they noted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.rigs.waiting import eventually

__all__ = ["Crew"]

_SCRIPT: Final = Path(__file__).with_name("consumer_process.py")
_ROOT: Final = Path(__file__).parents[2]


class Crew:
    """Consumer processes with one log."""

    def __init__(self, url: str, stream: str, log: Path) -> None:
        self._url = url
        self._stream = stream
        self._log = log
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    @contextmanager
    def hired(cls, url: str, stream: str, log: Path) -> Iterator[Crew]:
        """A crew of which nobody outlives the block."""
        crew = cls(url, stream, log)
        try:
            yield crew
        finally:
            for process in crew._processes.values():
                process.kill()
                process.wait()

    async def start(self, name: str, flavour: str, *more: str) -> None:
        """Start one, and return when it is about to read."""
        options = ["--flavour", flavour, "--url", self._url, "--stream", self._stream, "--name", name]
        self._processes[name] = subprocess.Popen(
            [sys.executable, "-W", "error", str(_SCRIPT), *options, "--log", str(self._log), *more],
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )
        await eventually(lambda: "ready" in self.notes(name) or self.code(name) is not None, f"{name} is ready")
        assert self.code(name) is None

    def signal(self, name: str, number: int) -> None:
        self._processes[name].send_signal(number)

    def code(self, name: str) -> int | None:
        """The exit code, or ``None`` while it runs."""
        return self._processes[name].poll()

    async def ended(self, name: str) -> int:
        """The exit code, once there is one."""
        await eventually(lambda: self.code(name) is not None, f"{name} has ended")
        code = self.code(name)
        assert code is not None
        return code

    def notes(self, name: str | None = None) -> list[str]:
        """What one of them noted, or all."""
        if not self._log.exists():
            return []
        lines = [line.split() for line in self._log.read_text().splitlines()]
        return [what for who, what in lines if name in (None, who)]

    def handled(self, name: str | None = None) -> list[str]:
        """The IDs of the messages that were handled."""
        return [what for what in self.notes(name) if what not in ("ready", "ended")]
