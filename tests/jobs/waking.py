"""What the tests of wakes share: stores beside each other, and those who wait at them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final

import pytest

from conquiet import RedisStore
from conquiet.jobs.job import NewJob
from conquiet.jobs.store import Claimed, Wanted
from conquiet.kit.clock import ManualClock
from tests.rigs.waiting import LONG, eventually

__all__ = [
    "QUEUE",
    "SHORT",
    "Make",
    "another",
    "claim",
    "end",
    "idle",
    "listeners",
    "namespace",
    "new",
    "patient",
    "stack",
    "told",
]

QUEUE: Final = "emails"
SHORT: Final = 0.5
"""Seconds in which nothing should happen; what is right has no need of them."""


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told in the place of another."""
    monkeypatch.setattr("conquiet.jobs.stores._redis_watch._SOON", LONG)


Make = Callable[..., Awaitable[RedisStore]]


@pytest.fixture
def another(url: str, namespace: str, stack: AsyncExitStack) -> Make:
    """Makes a store, as another process has it."""

    async def make(at: str = url, clock: ManualClock | None = None) -> RedisStore:
        return await stack.enter_async_context(RedisStore(at, namespace=namespace, clock=clock or ManualClock()))

    return make


def new(*ids: str, delay_ms: int = 0) -> list[NewJob]:
    return [NewJob(id, b"{}", 0, delay_ms) for id in ids]


async def claim(store: RedisStore, count: int = 10, *, waits: bool = True) -> Claimed:
    return await store.claim(QUEUE, Wanted(count, "w", 30_000, 3, waits=waits))


async def idle(store: RedisStore, count: int = 10) -> asyncio.Task[None]:
    """Somebody who has claimed in vain and waits for news."""
    claimed = await claim(store, count)
    assert claimed.jobs == []
    before = listeners(store)
    waiting = asyncio.create_task(store.news(QUEUE, claimed.mark, 600))
    await eventually(lambda: waiting.done() or listeners(store) > before, "it waits")
    return waiting


def listeners(store: RedisStore) -> int:
    return sum(len(watch._listeners) for watch in store._watches.values())


async def told(*waiting: asyncio.Task[None]) -> None:
    async with asyncio.timeout(LONG):
        await asyncio.gather(*waiting)


async def end(*waiting: asyncio.Task[None]) -> None:
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
