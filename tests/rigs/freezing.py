"""Standing still at an exactly known step.

A proxy keeps one command, or its answer, until it is let go. Meanwhile a test stops the client's process or the server,
and waits until leases have run out.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, Literal, TypeAlias

import psutil
from redis.asyncio import Redis

from conquiet.wire.embedded import EmbeddedRedis
from tests.rigs.asking import ask
from tests.rigs.servers import EVERY, LADDER, on_a_port
from tests.rigs.tracing import SCRIPTS, Tracer
from tests.rigs.waiting import LONG, eventually

__all__ = ["PAUSES", "Freezer", "Pause", "Side"]
__all__ += ["all_of", "elapse", "freeze", "freezer", "own_server", "paused", "thaw"]

Side: TypeAlias = Literal["before", "after"]
"""Whether a command is kept before the server has got it, or its answer after the server has done it."""

Pause: TypeAlias = Literal["stopped", "clients paused", "asleep"]
"""How a server stands still: SIGSTOP, ``CLIENT PAUSE`` or ``DEBUG SLEEP``."""

PAUSES: Final[tuple[Pause, ...]] = ("stopped", "clients paused", "asleep")

_SILENCE: Final = 0.1
"""Seconds without an answer after which a server that was told to sleep does so."""


# --- one step ----------------------------------------------------------------------------------------------------


class Freezer(Tracer):
    """Passes everything on, but for one command, which it keeps on its way there or back until it may go on."""

    def __init__(self, upstream: str = "") -> None:
        super().__init__(upstream)
        self._side: Side = "before"
        self._kept: bytes | None = None
        self._answered = asyncio.Event()
        self.answer = b""
        """What the server said to a command that it got late."""

    def keep(self, step: str, side: Side, *, after: Sequence[str] = ()) -> None:
        """Keep the next command named ``step``, once ``after`` were answered one after the other."""
        self.trace.clear()
        self._side = side
        self.strike(step, after, "unsent" if side == "before" else "held")

    async def kept(self) -> None:
        """Return once it is here."""
        try:
            await asyncio.wait_for(self._struck.wait(), LONG)
        except TimeoutError:
            raise AssertionError(f"{self._target!r} does not come: {self.trace}") from None

    async def release(self) -> None:
        """Let it go on; returns when the server has answered it."""
        self._keep.set()
        if self._side == "before":
            await asyncio.wait_for(self._answered.wait(), LONG)

    def release_soon(self) -> None:
        """Let it go on, whether or not the server answers."""
        self._keep.set()

    async def _wait_to_arrive(self, command: bytes) -> None:
        if self._side == "before" and self._is_meant(self._names(command)):
            self._kept = command
            self._hit()
            await self._keep.wait()

    async def _may_return(self, command: bytes, reply: bytes) -> bool:
        if self._kept is not None and command is self._kept:
            self.answer = reply
            self._answered.set()
        await super()._may_return(command, reply)
        return True


@asynccontextmanager
async def freezer(url: str) -> AsyncIterator[Freezer]:
    """A proxy before a server that has all scripts, so that no step is made twice because one is missing."""
    async with Redis.from_url(url) as client, client.pipeline(transaction=False) as pipeline:
        for script in SCRIPTS.values():
            pipeline.script_load(script.text)
        await pipeline.execute()
    async with Freezer(url) as proxy:
        yield proxy


# --- processes ---------------------------------------------------------------------------------------------------


async def freeze(pid: int) -> None:
    """SIGSTOP; returns when the process stands still."""
    os.kill(pid, signal.SIGSTOP)
    process = psutil.Process(pid)
    await eventually(lambda: process.status() == psutil.STATUS_STOPPED, f"process {pid} stands still")


def thaw(pid: int) -> None:
    """SIGCONT."""
    os.kill(pid, signal.SIGCONT)


# --- servers -----------------------------------------------------------------------------------------------------


def own_server() -> EmbeddedRedis:
    """A server that may be stopped, and told to sleep; to be entered."""
    binary = LADDER[-1].binary or EVERY[-1].binary
    about = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    is_old = re.search(r"v=[3-6]\.", about) is not None  # which allows DEBUG, and does not know the setting
    return on_a_port(binary, settings={} if is_old else {"enable-debug-command": "yes"})


@asynccontextmanager
async def paused(server: EmbeddedRedis, how: Pause, seconds: float) -> AsyncIterator[None]:
    """Within the block the server answers nobody; it ends when the server goes on, after ``seconds`` at least."""
    until = time.monotonic() + seconds
    sleeping: asyncio.Future[object] | None = None
    try:
        if how == "stopped":
            await freeze(server.pid)
        elif how == "clients paused":
            await ask(server.url, "CLIENT", "PAUSE", round(seconds * 1000), "ALL")
        else:
            sleeping = asyncio.ensure_future(ask(server.url, "DEBUG", "SLEEP", str(seconds)))
            await _silent(server.url)
        yield
        await elapse(until - time.monotonic())
    finally:
        if how == "stopped":
            thaw(server.pid)
        if sleeping is not None:
            await sleeping
    await _answering(server.url)


async def elapse(seconds: float) -> None:
    """Live through a time that is part of what is tested: leases run out in it."""
    await asyncio.sleep(max(seconds, 0.0))  # the subject of those who call this


async def _silent(url: str) -> None:
    with suppress(TimeoutError):
        while True:
            async with asyncio.timeout(_SILENCE):
                await ask(url, "PING")


async def _answering(url: str) -> None:
    async with asyncio.timeout(LONG):
        await ask(url, "PING")


# --- many at once ------------------------------------------------------------------------------------------------


async def all_of(scenes: Mapping[str, Callable[[], Awaitable[None]]], at_once: int = 6) -> None:
    """Play all scenes, some at a time, since they mostly wait; the failures of all of them are one."""
    room = asyncio.Semaphore(at_once)

    async def play(name: str, scene: Callable[[], Awaitable[None]]) -> Exception | None:
        async with room:
            try:
                await scene()
            except Exception as error:
                error.add_note(f"in the scene {name!r}")
                return error
        return None

    found = await asyncio.gather(*(play(name, scene) for name, scene in scenes.items()))
    if failures := [error for error in found if error is not None]:
        raise ExceptionGroup(f"{len(failures)} of {len(scenes)} scenes", failures)
