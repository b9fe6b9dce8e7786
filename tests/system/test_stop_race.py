"""A message that arrives in the moment of a stop is returned, or was not given out (spec 1 §6.4)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio.connection import AbstractConnection

from conquiet import QueueConfig
from tests.contracts.flavours import Consumer, Flavour, Queue
from tests.contracts.looking import Look
from tests.rigs.waiting import eventually

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
SOON = 20.0
"""Seconds: well under the minute that the reads block for."""


class Pen:
    """Knows whether the read of this try has been written to its connection."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written = False
        send = AbstractConnection.send_packed_command

        async def spy(connection: Any, command: Any, *more: Any, **named: Any) -> Any:
            parts = [command] if isinstance(command, bytes) else command
            if any(b"XREADGROUP" in part for part in parts):
                self.written = True
            return await send(connection, command, *more, **named)

        monkeypatch.setattr(AbstractConnection, "send_packed_command", spy)


async def at_once(pen: Pen, look: Look, rng: random.Random) -> None:
    """Before the read had a chance."""


async def in_between(pen: Pen, look: Look, rng: random.Random) -> None:
    """Somewhere on the way: connecting, asking for the connection's ID, writing, waiting."""
    for _ in range(rng.randrange(12)):
        await asyncio.sleep(0)


async def when_written(pen: Pen, look: Look, rng: random.Random) -> None:
    """The server may or may not have it yet."""
    await eventually(lambda: pen.written, "the read is written")


async def when_blocked(pen: Pen, look: Look, rng: random.Random) -> None:
    """The server has it, and waits."""
    await look.blocked()


MOMENTS: tuple[Callable[[Pen, Look, random.Random], Awaitable[None]], ...] = (
    at_once,
    in_between,
    when_written,
    when_blocked,
)


async def attempt(consumer: Consumer, look: Look, rng: random.Random, pen: Pen, moment: int) -> bool:
    """One stop with a message arriving at that moment; whether the read had been written by then."""
    pen.written = False
    reading = asyncio.create_task(consumer.next(block_ms=60_000))
    await MOMENTS[moment](pen, look, rng)
    adding: asyncio.Task[str] | None = None
    if rng.random() < 0.5:
        adding = asyncio.create_task(look.add("data", "{}"))
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
    was_written = pen.written
    consumer.stop()
    adding = adding or asyncio.create_task(look.add("data", "{}"))
    message, sent = await asyncio.wait_for(asyncio.gather(reading, adding), SOON)

    pending = await look.pending_ids()
    if message is None:
        assert pending == [], "given out and dropped"
        assert await look.drain() == [sent]
    else:
        assert [message.id] == pending == [sent]
        await consumer.ack(message)
    return was_written


async def test_a_message_in_the_moment_of_a_stop_is_returned_or_not_given_out(
    flavour: Flavour,
    url: str,
    config: QueueConfig,
    look: Look,
    scale: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """spec 1 §6.3, §6.4: no new read after stop(), and no message is dropped; pending means returned."""
    tries = max(100, int(1_000 * scale))
    rng = random.Random(20_26)
    pen = Pen(monkeypatch)
    kept = await flavour.open(url, config)
    written = 0
    for number in range(tries):
        # Every fifth has yet to connect, which makes the way to the server a long one.
        queue: Queue = flavour.queue(url, config) if number % 5 == 4 else kept
        written += await attempt(flavour.consumer(queue), look, rng, pen, number % len(MOMENTS))
        if queue is not kept:
            await queue.aclose()
    assert await look.pending() == []
    assert tries - written >= tries / 5, "too few stops came before the write to tell anything"
    assert written >= tries / 5, "too few stops came after the write to tell anything"
