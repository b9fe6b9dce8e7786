"""A Redis that is restarted with its append-only file (spec 1 §8, spec 2 §9)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from conquiet import EmbeddedRedis, QueueConfig, QueueError
from tests.conftest import Rung
from tests.contracts.flavours import Flavour
from tests.contracts.looking import Look
from tests.rigs.servers import on_a_port

pytestmark = pytest.mark.system


@asynccontextmanager
async def server(rung: Rung, directory: Path, port: int | None = None) -> AsyncIterator[EmbeddedRedis]:
    async with on_a_port(rung.binary, appendonly=True, directory=directory, port=port) as embedded:
        yield embedded


@pytest.mark.parametrize("end", ["shut down", "killed"])
async def test_messages_survive_a_restart_and_a_new_call_works(
    end: str, flavour: Flavour, rung: Rung, config: QueueConfig, tmp_path: Path
) -> None:
    """spec 1 §8.1, spec 2 §9.1: the failure is visible as QueueError; nothing is lost; the caller's next try works."""
    async with server(rung, tmp_path) as first:
        port = urlsplit(first.url).port
        queue = await flavour.open(first.url, config)
        sent = await queue.enqueue_many({"n": n} for n in range(5))
        acked, held = await queue.read(block_ms=1_000, count=2)
        await queue.ack(acked)
        if end == "killed":
            os.kill(first.pid, signal.SIGKILL)
    for call in (queue.enqueue({"n": 5}), queue.read(block_ms=60_000), queue.ack(held), queue.claim_stale()):
        with pytest.raises(QueueError) as caught:
            await asyncio.wait_for(call, 20)
        assert caught.value.__cause__ is not None
    async with server(rung, tmp_path, port):
        assert [message.id for message in await queue.read(block_ms=1_000, count=10)] == sent[2:]
        stats = await queue.backlog_stats()
        assert (stats.length, stats.pending, stats.oldest_pending_id) == (5, 4, held.id)
        await queue.ack(held)
        after = await queue.enqueue({"n": 6})
        assert [message.id for message in await queue.read(block_ms=1_000)] == [after]
        await queue.aclose()


async def test_a_consumer_ends_with_the_server_and_another_goes_on(
    flavour: Flavour, rung: Rung, config: QueueConfig, tmp_path: Path
) -> None:
    """spec 2 §9.1: surface the failure, stop further processing, allow the hosting service to react."""
    handled: list[str] = []

    async with server(rung, tmp_path) as first:
        port = urlsplit(first.url).port
        queue = await flavour.open(first.url, config)
        sent = await queue.enqueue_many({"n": n} for n in range(3))
        look = Look(first.url, config)

        async def consume() -> None:
            consumer = flavour.consumer(queue)
            async for message in consumer.iter_messages():
                handled.append(message.id)
                await consumer.ack(message)
                if len(handled) == 5:
                    consumer.stop()

        consuming = asyncio.create_task(consume())
        await look.blocked()
        await look.aclose()
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(QueueError):
            await asyncio.wait_for(consuming, 20)
        assert handled == sent
    async with server(rung, tmp_path, port):
        sent += await queue.enqueue_many({"n": n} for n in range(3, 5))
        await asyncio.wait_for(consume(), 20)
        assert handled == sent
        assert (await queue.backlog_stats()).pending == 0
        await queue.aclose()
