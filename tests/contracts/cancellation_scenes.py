"""What the cancellation suites of queue and balance share: the ways of cancelling, and where a call is made."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, TypeAlias

import pytest

from conquiet import QueueConfig, QueueMessage, RedisStreamsQueue
from tests.rigs.asking import ask, entries, pending
from tests.rigs.cancelling import HOWS, Call, How, cancelled_everywhere, nothing_left
from tests.rigs.proxy import Proxy
from tests.rigs.sizing import IS_FULL

__all__ = ["IS_FULL", "SERVERS", "Place", "SceneAt", "cancelled_at_each_point", "hows", "hows_of_taking"]

SERVERS: Final = () if IS_FULL else (pytest.mark.any_server,)
"""Marks of a suite: at full size it runs on each server."""

_SCOPE: Final[tuple[How, ...]] = HOWS if IS_FULL else ("scope",)
_TAKING: Final[tuple[How, ...]] = HOWS if IS_FULL else ("scope", "late task")
hows: Final = pytest.mark.parametrize("how", _SCOPE)
hows_of_taking: Final = pytest.mark.parametrize("how", _TAKING)
"""For calls by which something is taken: the answer may be there, and nobody hears it."""


class Place:
    """One server behind a proxy; each scene has a stream of its own there."""

    def __init__(self, url: str, proxy: Proxy) -> None:
        self.url = url
        self.proxy = proxy
        self.config = QueueConfig("unset", "group", "consumer-1")
        self.anew()

    def anew(self) -> None:
        """Another stream, which nobody has used."""
        self.config = QueueConfig(f"t:{secrets.token_hex(6)}", "group", "consumer-1", block_ms=20_000)

    @asynccontextmanager
    async def queue(self, *, is_open: bool) -> AsyncGenerator[RedisStreamsQueue]:
        """A queue behind the proxy: with its group and a connection, or never used yet."""
        queue = RedisStreamsQueue.connect(self.proxy.url, self.config)
        if is_open:
            await queue.open()
        try:
            yield queue
        finally:
            await queue.aclose()

    async def send(self, *numbers: int) -> list[str]:
        """Entries of somebody else, with the group there to be given them."""
        async with RedisStreamsQueue.connect(self.url, self.config) as outside:
            return await outside.enqueue_many([{"n": number} for number in numbers])

    async def given(self, *numbers: int) -> list[QueueMessage]:
        """Entries of somebody else that this consumer has been given and not acknowledged."""
        await self.send(*numbers)
        async with RedisStreamsQueue.connect(self.url, self.config) as outside:
            return await outside.read(count=len(numbers))

    async def entries(self) -> dict[str, dict[str, int]]:
        """All that is in the stream, by its ID."""
        return await entries(self.url, self.config.stream_key)

    async def pending(self) -> list[str]:
        """The IDs of what was given and not acknowledged."""
        return await pending(self.url, self.config.stream_key, self.config.consumer_group)

    async def ask(self, *command: str | int) -> object:
        return await ask(self.url, *command)


SceneAt: TypeAlias = Callable[[Place], AbstractAsyncContextManager[Call]]


async def cancelled_at_each_point(place: Place, scene: SceneAt, how: How, *, at_least: int = 3) -> None:
    """Cancel the call of a new ``scene`` at each of its suspensions; after each, nothing of it is left."""

    @asynccontextmanager
    async def bare() -> AsyncGenerator[Call]:
        place.anew()
        async with nothing_left(lambda: place.proxy.open_connections), scene(place) as call:
            yield call

    await cancelled_everywhere(bare, how, at_least=at_least)
