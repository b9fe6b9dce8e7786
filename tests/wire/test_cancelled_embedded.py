"""A server of one's own whose start or end is cancelled, at each suspension: no process and no file is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis

from conquiet import EmbeddedRedis
from conquiet.errors import ConfigError
from tests.contracts.cancellation_scenes import hows_of_taking
from tests.rigs.cancelling import Call, How, cancelled_everywhere
from tests.rigs.waiting import LONG


def nothing_is_left(scratch: Path, before: set[psutil.Process]) -> None:
    assert list(scratch.glob("conquiet-*")) == []
    assert set(psutil.Process().children(recursive=True)) <= before


async def starts_again(server: EmbeddedRedis) -> None:
    async with asyncio.timeout(LONG), server, Redis.from_url(server.url) as client:
        assert await client.ping() is True


@hows_of_taking
async def test_a_start_that_is_cancelled_leaves_nothing_and_can_be_made_again(scratch: Path, how: How) -> None:
    before, server = set(psutil.Process().children(recursive=True)), EmbeddedRedis()

    @asynccontextmanager
    async def scene() -> AsyncGenerator[Call]:
        started: list[str] = []

        async def call() -> None:
            await server.open()
            started.append(server.url)

        yield call
        if started:
            await server.aclose()
        nothing_is_left(scratch, before)
        with pytest.raises(ConfigError, match="not open"):
            _ = server.url

    await cancelled_everywhere(scene, how)
    await starts_again(server)


@hows_of_taking
async def test_an_end_that_is_cancelled_is_one(scratch: Path, how: How) -> None:
    """It is not given up half way: when it raises the cancellation, the server has ended."""
    before, server = set(psutil.Process().children(recursive=True)), EmbeddedRedis()

    @asynccontextmanager
    async def scene() -> AsyncGenerator[Call]:
        await server.open()
        yield server.aclose
        nothing_is_left(scratch, before)
        with pytest.raises(ConfigError, match="not open"):
            _ = server.url
        await server.aclose()

    await cancelled_everywhere(scene, how, at_least=1)
    await starts_again(server)


async def test_a_start_that_is_cancelled_twice_leaves_nothing_either(scratch: Path) -> None:
    """As by those who lose patience: once while it starts, and again while that is undone."""
    before = set(psutil.Process().children(recursive=True))
    server = EmbeddedRedis()
    opening = asyncio.create_task(server.open())
    for _ in range(3):
        await asyncio.sleep(0)
        opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    nothing_is_left(scratch, before)
    await starts_again(server)
