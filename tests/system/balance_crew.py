"""Consumers of balanced streams as processes, to be stopped, killed and told to leave."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from conquiet import StreamBalancer
from conquiet.wire.keys import BalanceKeys
from tests.rigs.asking import ask, nodes_of
from tests.rigs.waiting import LONG, eventually
from tests.system.balance_log import Log

__all__ = ["Crew", "names"]

_ROOT: Final = Path(__file__).parents[2]


def names(count: int) -> list[str]:
    return [f"session:{number}" for number in range(count)]


class Crew:
    """Consumer processes of one service, with one log."""

    def __init__(self, url: str, directory: Path, clock_url: str | None) -> None:
        self.url = url
        self.service = f"t{secrets.token_hex(6)}"
        self.keys = BalanceKeys(self.service)
        self.log = Log(directory / "log")
        self._clock_url = nodes_of(clock_url or url)[0]  # all nodes have one clock here
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    @contextmanager
    def hired(cls, url: str, directory: Path, clock_url: str | None = None) -> Iterator[Crew]:
        """A crew of which nobody outlives the block."""
        crew = cls(url, directory, clock_url)
        try:
            yield crew
        finally:
            for process in crew._processes.values():
                process.kill()
                process.wait()

    # --- the processes -----------------------------------------------------------------------------------------------

    async def start(self, *names: str, options: tuple[str, ...] = (), url: str | None = None) -> None:
        """Start some, and return when they are at work."""
        for name in names:
            words = ["--url", url or self.url, "--clock-url", self._clock_url, "--service", self.service]
            words += ["--name", name, "--log", str(self.log.path), *options]
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.system.balance_process", *words],
                env={**os.environ, "PYTHONPATH": str(_ROOT)},
                cwd=_ROOT,
            )

        def are_ready() -> bool:
            assert not any(self.code(name) for name in names)
            return {note.name for note in self.log.noted("ready", *names)} == {*names}

        await eventually(are_ready, "all are at work", 3 * LONG)

    def signal(self, name: str, number: int) -> None:
        self._processes[name].send_signal(number)

    def code(self, name: str) -> int | None:
        """The exit code, or ``None`` while it runs."""
        return self._processes[name].poll()

    async def freeze(self, name: str) -> int:
        """Stop one; the server's time after which it did nothing more."""
        self.signal(name, signal.SIGSTOP)
        process = psutil.Process(self._processes[name].pid)
        await eventually(lambda: process.status() == psutil.STATUS_STOPPED, f"{name} stands still")
        return await self.now()

    async def kill(self, *names: str) -> int:
        """kill -9, all at once; the server's time after which they did nothing more."""
        for name in names:
            self.signal(name, signal.SIGKILL)
        for name in names:
            await eventually(lambda name=name: self.code(name) is not None, f"{name} has ended")  # type: ignore[misc]
        return await self.now()

    async def dismiss(self, *names: str) -> int:
        """SIGTERM; returns when they have ended, as they should, with the server's time before it."""
        at = await self.now()
        for name in names:
            self.signal(name, signal.SIGTERM)
        for name in names:
            await eventually(lambda name=name: self.code(name) is not None, f"{name} has ended")  # type: ignore[misc]
            assert self.code(name) == 0
            assert [note.detail for note in self.log.noted("terminated", name)] == ["stopped"]
            assert self.log.noted("ended", name)
        return at

    # --- the streams -------------------------------------------------------------------------------------------------

    async def add(self, streams: list[str]) -> None:
        """Hand them in; who only does that needs not be open."""
        balancer = StreamBalancer.connect(self.url, service=self.service, consumer="producer")
        try:
            for start in range(0, len(streams), 50):
                await asyncio.gather(*(balancer.add_stream(stream) for stream in streams[start : start + 50]))
        finally:
            await balancer.aclose()

    async def owners(self) -> dict[str, str]:
        """Who has which stream, as the server knows it, by configured name; empty for nobody."""
        found = await ask(self.url, "HGETALL", self.keys.owners)
        states = dict(zip(found[::2], found[1::2], strict=True)) if isinstance(found, list) else found
        return {stream: state.split("|", 2)[2].partition("#")[0] for stream, state in states.items()}

    async def settled(self, streams: list[str], *names: str, seconds: float = LONG) -> None:
        """Return once each of these streams is owned by one of these consumers, who all know that."""

        async def are_owned() -> bool:
            if not all(name in names for name in (await self.owners()).values()):
                return False
            held = [stream for name in names for stream in self.log.held(name)]
            return sorted(held) == sorted(streams)

        await eventually(are_owned, f"{len(streams)} streams are owned, each by one of {names}", seconds)

    async def now(self) -> int:
        """The server's time in microseconds."""
        seconds, micros = await ask(self._clock_url, "TIME")
        return int(seconds) * 1_000_000 + int(micros)
