"""Only what the server has confirmed is counted, in every room."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conquiet import Broker, JobQueue, Outgoing, QueueConfig, QueueConsumer, QueueError, RedisStore, RedisStreamsQueue
from tests.rigs.proxy import Proxy
from tests.rigs.scraping import value

pytestmark = pytest.mark.any_server

REFUSED = {"text": "refuse this"}
NEEDLE = b'"refuse this"'
TAKEN = {"text": "take this"}


@dataclass(frozen=True)
class Sending:
    """A way to send one payload, and what counts it."""

    send: Callable[[dict[str, Any]], Awaitable[object]]
    count: Callable[[], float | None]


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def sending(request: pytest.FixtureRequest, proxy: Proxy, config: QueueConfig) -> AsyncIterator[Sending]:
    name = config.stream_key.replace(":", "-")
    if request.param.startswith("jobs"):
        async with RedisStore.connect(proxy.url, namespace=name) as store:
            jobs = JobQueue(store, name)
            one, many = jobs.enqueue, lambda payload: jobs.enqueue_many([payload, TAKEN])
            yield Sending(
                many if request.param.endswith("many") else one,
                lambda: value("conquiet_jobs_enqueued_total", queue=name),
            )
        return
    async with Broker.connect(proxy.url) as broker:
        await broker.create_topic(name)
        ways: dict[str, Callable[[dict[str, Any]], Awaitable[object]]] = {
            "topics.send": lambda payload: broker.send(name, payload),
            "topics.send with an id": lambda payload: broker.send(name, payload, message_id=str(payload)),
            "topics.send_batch": lambda payload: broker.send_batch(name, [Outgoing(payload), Outgoing(TAKEN)]),
        }
        yield Sending(ways[request.param], lambda: value("conquiet_topics_produced_total", topic=name, partition="0"))


@pytest.mark.parametrize("how", ["refused", "cut"])
@pytest.mark.parametrize(
    ("sending", "messages"),
    [
        ("jobs.enqueue", 1),
        ("jobs.enqueue_many", 2),
        ("topics.send", 1),
        ("topics.send with an id", 1),
        ("topics.send_batch", 2),
    ],
    indirect=["sending"],
)
async def test_what_was_not_confirmed_is_not_counted(proxy: Proxy, sending: Sending, messages: int, how: str) -> None:
    await sending.send(TAKEN)  # so that the server knows the scripts
    before = sending.count()
    assert before == messages
    if how == "cut":
        proxy.cut(NEEDLE)
    else:
        proxy.refuse(NEEDLE, b"-OOM command not allowed when used memory > 'maxmemory'.\r\n")
    with pytest.raises(QueueError):
        await sending.send(REFUSED)
    assert sending.count() == before


@pytest.mark.parametrize(("how", "counted"), [("refused", 1), ("cut", 0)])
async def test_an_acknowledgment_that_was_not_confirmed_is_not_counted(
    proxy: Proxy, config: QueueConfig, how: str, counted: int
) -> None:
    """Made again, it counts if it had not been done before."""

    def acked() -> float:
        return value("conquiet_queue_messages_ack_total", stream=config.stream_key) or 0

    async with RedisStreamsQueue.connect(proxy.url, config) as queue:
        await queue.enqueue(TAKEN)
        [message] = await queue.read(block_ms=1000)
        if how == "cut":
            proxy.cut(b"XACK")
        else:
            proxy.refuse(b"XACK", b"-ERR not now\r\n")
        with pytest.raises(QueueError):
            await queue.ack(message)
        assert acked() == 0
        await queue.ack(message)
        assert acked() == counted


async def test_a_read_that_was_stopped_before_it_was_sent_is_not_counted(proxy: Proxy, config: QueueConfig) -> None:
    def reads() -> float | None:
        return value("conquiet_queue_read_latency_seconds_count", stream=config.stream_key)

    async with RedisStreamsQueue.connect(proxy.url, config) as queue:
        hold = proxy.hold(b"$2\r\nID\r\n")  # CLIENT ID, the first thing that a reader asks
        async with QueueConsumer(queue, handle_signals=False) as consumer:
            reading = asyncio.create_task(consumer.next())
            await hold.caught.wait()
            consumer.stop()
            hold.release()
            assert await reading is None
        assert (proxy.count(b"XREADGROUP"), reads()) == (0, 0)
        await queue.read(block_ms=1)
        assert reads() == 1


_EVERY_ROOM = """
import asyncio, sys
from conquiet import Broker, JobQueue, MemoryStore, QueueConfig, RedisStreamsQueue, StreamBalancer

async def main(url, name):
    async with RedisStreamsQueue.connect(url, QueueConfig(name, "group", "consumer")) as queue:
        await queue.enqueue({"n": 1})
        await queue.ack(*await queue.read())
    async with Broker.connect(url) as broker:
        topic = name.replace(":", "-")
        await broker.create_topic(topic)
        await broker.send(topic, {"n": 1})
        async with broker.consume(topic, group="group") as messages:
            message = await anext(messages)
            await message.ack()
    async with StreamBalancer.connect(url, service=topic, handle_signals=False) as balancer:
        await balancer.add_stream("stream")
        assert (await anext(balancer.events())).stream == "stream"
    jobs = JobQueue(MemoryStore(), "jobs")
    await jobs.enqueue({"n": 1})
    for job in await jobs.claim(count=1, worker="w"):
        await jobs.ack(job)
    print("fine")

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("directory", ["missing", "a file"])
def test_metrics_that_cannot_be_kept_harm_nobody(url: str, config: QueueConfig, tmp_path: Path, directory: str) -> None:
    """``PROMETHEUS_MULTIPROC_DIR`` names where processes keep them; it is there, or nothing is counted."""
    place = tmp_path / "metrics"
    if directory == "a file":
        place.write_text("")
    done = subprocess.run(
        [sys.executable, "-c", _EVERY_ROOM, url, config.stream_key],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
    assert "nothing is counted" in done.stderr
    assert done.stderr.count("Traceback") <= 8  # when it begins, and not with each message
