"""Processes that go on with an object where its loop was left, or in a forked child.

An object of the async core that a child inherits works there anew, on connections of its own, or says why not. The
parent's connections are neither used nor closed there: both would share them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any, Final

from conquiet import (
    Broker,
    ConfigError,
    JobQueue,
    JobState,
    QueueConfig,
    RedisStore,
    RedisStreamsQueue,
    StreamBalancer,
)
from tests.rigs.asking import ask, blocked, entries
from tests.sync.scripts import fork, join, say

__all__ = [
    "balancer",
    "broker",
    "closing",
    "closing_on_another_loop",
    "inherited_loop",
    "job_store",
    "on_another_loop",
    "while_a_read_blocks",
    "while_calls_are_on_their_way",
    "while_the_group_is_created",
]

PAYLOADS: Final = [{"n": number} for number in range(20)]


def _child(work: Callable[[], Coroutine[Any, Any, object]]) -> int:
    return fork(lambda: asyncio.run(work()))


async def _joined(*pids: int) -> None:
    await asyncio.to_thread(join, *pids)


def _queue(url: str, stream: str) -> RedisStreamsQueue:
    return RedisStreamsQueue.connect(url, QueueConfig(stream, "group", "consumer-1", block_ms=20_000))


async def _all_its_own(queue: RedisStreamsQueue, url: str, stream: str, who: str) -> None:
    """Whether each call is answered with the ID of its own entry."""
    payloads = [{"who": who, "n": number} for number in range(20)]
    ids = await asyncio.gather(*(queue.enqueue(payload) for payload in payloads))
    written = await entries(url, stream)
    assert [written[id] for id in ids] == payloads, f"{who} got other replies than its own"


def on_another_loop(url: str, stream: str) -> None:
    """The first loop ends while calls stand in line, and all is cancelled."""
    queue = _queue(url, stream)
    calls: list[asyncio.Task[str]] = []

    async def leave_early() -> None:
        loop = asyncio.get_running_loop()
        calls.extend(loop.create_task(queue.enqueue({"n": number})) for number in (1, 2))
        await queue.enqueue({"n": 0})
        raise SystemExit  # those who stood in line were to be served next

    async def go_on() -> None:
        entry_id = await queue.enqueue({"n": 9})
        assert [message.id for message in await queue.read(count=10)][1:] == [entry_id]
        await queue.aclose()

    try:
        asyncio.run(leave_early())
    except SystemExit:
        assert all(call.cancelled() for call in calls)
        asyncio.run(go_on())
        say("fine")


def while_calls_are_on_their_way(url: str, stream: str) -> None:
    """The connection is in use and others stand in line at the moment of the fork."""

    async def main() -> None:
        queue = _queue(url, stream)
        await queue.open()
        calls = [asyncio.create_task(queue.enqueue(payload)) for payload in PAYLOADS]
        pids: list[int] = []
        for _ in range(3):
            await asyncio.sleep(0)  # so that they are on their way
            assert not all(call.done() for call in calls)
            pids.append(_child(lambda: _all_its_own(queue, url, stream, "child")))
        ids = await asyncio.gather(*calls)
        await _joined(*pids)
        written = await entries(url, stream)
        assert [written[id] for id in ids] == PAYLOADS
        await _all_its_own(queue, url, stream, "parent")
        await queue.aclose()

    asyncio.run(main())
    say("fine")


def while_a_read_blocks(url: str, stream: str) -> None:
    """The child reads what it sends itself, and the parent's read goes on."""

    async def child(queue: RedisStreamsQueue) -> None:
        mine = RedisStreamsQueue.connect(url, QueueConfig(stream, "another", "consumer-1"))
        assert await queue.enqueue({"n": 1})
        assert len(await mine.read(count=10)) == 1
        assert (await queue.backlog_stats()).pending == 1
        await queue.aclose()
        await mine.aclose()

    async def main() -> None:
        queue = _queue(url, stream)
        await queue.open()
        reading = asyncio.create_task(queue.read())
        await blocked(url)
        pid = _child(lambda: child(queue))
        [message] = await reading
        await _joined(pid)
        await queue.ack(message)
        assert (await queue.backlog_stats()).pending == 0
        await queue.aclose()

    asyncio.run(main())
    say("fine")


def while_the_group_is_created(url: str, stream: str) -> None:
    """Somebody in the parent has the right to create it, and others wait for that."""

    async def main() -> None:
        queue = _queue(url, stream)
        opening = [asyncio.create_task(queue.open()) for _ in range(2)]
        await asyncio.sleep(0)
        pid = _child(queue.backlog_stats)
        await asyncio.gather(*opening)
        await _joined(pid)
        await queue.aclose()

    asyncio.run(main())
    say("fine")


def closing(url: str, stream: str) -> None:
    """The child closes what it inherited; nothing of that reaches the parent."""

    async def main() -> None:
        queue = _queue(url, stream)
        await queue.enqueue({"n": 1})
        [message] = await queue.read()
        await _joined(_child(queue.aclose))
        await queue.ack(message)
        await _all_its_own(queue, url, stream, "parent")
        assert await queue.read(count=100)
        await queue.aclose()

    asyncio.run(main())
    say("fine")


def closing_on_another_loop(url: str, stream: str) -> None:
    """The loop on which it was used is closed, with calls on their way and in line that nobody has cancelled."""
    queue = _queue(url, stream)
    calls: list[asyncio.Task[str]] = []

    async def leave() -> None:
        await queue.enqueue({"n": 0})
        assert await queue.read()
        calls.extend(asyncio.get_running_loop().create_task(queue.enqueue({"n": number})) for number in (1, 2))
        await asyncio.sleep(0)  # so that one is on its way

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()
    asyncio.run(queue.aclose())
    say("fine")
    os._exit(0)  # what the loop has left would be complained about


def inherited_loop(url: str, stream: str) -> None:
    """A child that goes on with the parent's loop would take its events: it is told so."""
    queue = _queue(url, stream)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(queue.open())

    def child() -> None:
        try:
            loop.run_until_complete(queue.enqueue({"n": 1}))
        except ConfigError as error:
            assert "parent" in str(error)  # noqa: PT017
        else:
            raise AssertionError("the child used the parent's loop")

    join(fork(child))
    loop.run_until_complete(_all_its_own(queue, url, stream, "parent"))
    loop.run_until_complete(queue.aclose())
    loop.close()
    say("fine")


def broker(url: str, stream: str) -> None:
    """Sending and looking, while the parent sends."""
    topic = stream.replace(":", "-")

    async def child(broker: Broker) -> None:
        await asyncio.gather(*(broker.send(topic, payload) for payload in PAYLOADS))
        assert (await broker.admin.describe_topic(topic)).partitions
        await broker.aclose()

    async def main() -> None:
        async with Broker.connect(url) as broker:
            await broker.create_topic(topic)
            sending = [asyncio.create_task(broker.send(topic, payload)) for payload in PAYLOADS]
            await asyncio.sleep(0)
            pid = _child(lambda: child(broker))
            ids = await asyncio.gather(*sending)
            await _joined(pid)
            assert len({*ids, await broker.send(topic, {})}) == len(PAYLOADS) + 1
        written = await ask(url, "XLEN", f"stream:topic:{topic}:p:0")
        assert written == 2 * len(PAYLOADS) + 1, written

    asyncio.run(main())
    say("fine")


def job_store(url: str, stream: str) -> None:
    """Enqueueing and claiming, while the parent enqueues."""
    logging.getLogger("conquiet.jobs").addHandler(logging.NullHandler())  # the server persists nothing

    async def child(store: RedisStore) -> None:
        queue = JobQueue(store, "jobs", lease_ttl=60)
        await asyncio.gather(*(queue.enqueue(payload) for payload in PAYLOADS))
        jobs = await queue.claim(count=5, worker="child")
        for job in jobs:
            await queue.ack(job)
        assert len(jobs) == 5
        await store.aclose()

    async def main() -> None:
        async with RedisStore.connect(url, namespace=stream.replace(":", "-")) as store:
            queue = JobQueue(store, "jobs", lease_ttl=60)
            enqueueing = [asyncio.create_task(queue.enqueue(payload)) for payload in PAYLOADS]
            await asyncio.sleep(0)
            pid = _child(lambda: child(store))
            await asyncio.gather(*enqueueing)
            await _joined(pid)
            counts = await queue.counts()
            assert (counts[JobState.READY], counts[JobState.SUCCEEDED]) == (2 * len(PAYLOADS) - 5, 5), counts

    asyncio.run(main())
    say("fine")


def balancer(url: str, stream: str) -> None:
    """What the parent owns is the parent's: the child may add streams, and no more."""

    async def child(balancer: StreamBalancer) -> None:
        await balancer.add_stream("of the child")
        for use in (balancer.claim("of the child"), balancer.done_stream("mine"), balancer.release_stream("mine")):
            try:
                await use
            except ConfigError as error:
                assert "fork" in str(error)  # noqa: PT017
            else:
                raise AssertionError("the child used what the parent owns")
        await balancer.aclose()

    async def main() -> None:
        service = stream.replace(":", "-")
        async with StreamBalancer.connect(url, service=service, handle_signals=False) as balancer:
            await balancer.add_stream("mine")
            events = balancer.events()
            lease = (await anext(events)).stream
            assert lease == "mine"
            await _joined(_child(lambda: child(balancer)))
            assert (await anext(events)).stream == "of the child"
            await balancer.done_stream("mine")
            await balancer.done_stream("of the child")

    asyncio.run(main())
    say("fine")
