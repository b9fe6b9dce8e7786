"""Each room runs as the user of docs/security.md: with no right more, and so without CLIENT, CONFIG and INFO."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing

import pytest

from conquiet import (
    Broker,
    Job,
    JobQueue,
    JobSpec,
    JobState,
    JobWorker,
    Message,
    Outgoing,
    QueueConfig,
    QueueConsumer,
    QueueError,
    RedisStore,
    RedisStreamsQueue,
    Reject,
    Retention,
    StreamBalancer,
    StreamLease,
    SubscribeOptions,
)
from tests.rigs.asking import ask
from tests.rigs.waiting import eventually
from tests.security.rights import OPTIONAL, ROOMS, rights_of, user_with

MORE = pytest.mark.parametrize("more", [(), OPTIONAL], ids=["least", "with CLIENT"])


@MORE
async def test_the_queue(url: str, config: QueueConfig, more: tuple[str, ...]) -> None:
    rights = rights_of("queue", STREAM=config.stream_key)
    async with user_with(url, *rights, *more) as mine, RedisStreamsQueue.connect(mine, config) as queue:
        ids = await queue.enqueue_many({"n": number} for number in range(3))
        first, *others = await queue.read(1000, count=3)
        await queue.ack(*others)
        assert [message.id for message in await queue.claim_stale(0)] == [ids[0]] == [first.id]
        await ask(url, "XDEL", config.stream_key, ids[0])
        assert await queue.claim_stale(0) == []
        assert (await queue.backlog_stats()).pending == 0
        consumer = QueueConsumer(queue, handle_signals=False)
        reading = asyncio.create_task(consumer.next(block_ms=200))
        consumer.stop()
        assert await reading is None


async def test_another_stream_is_out_of_reach(url: str, config: QueueConfig) -> None:
    async with (
        user_with(url, *rights_of("queue", STREAM=config.stream_key), refused="another") as mine,
        aclosing(RedisStreamsQueue.connect(mine, QueueConfig("another", "g", "c"))) as queue,
    ):
        with pytest.raises(QueueError, match=r"(?i)permission"):
            await queue.enqueue({"n": 1})


@MORE
async def test_topics(url: str, more: tuple[str, ...]) -> None:
    name, handled = f"t{secrets.token_hex(6)}", set[str]()

    async def handle(message: Message) -> None:
        if message.key == "bad":
            raise Reject("no")
        handled.add(str(message.key))

    async with user_with(url, *rights_of("topics", TOPICS=name), *more) as mine, Broker.connect(mine) as broker:
        admin = broker.admin
        await broker.create_topic(name, partitions=2, retention=Retention(max_len=1000, max_age=3600))
        await broker.send(name, {"n": 0}, key="first", message_id="once")
        await broker.send_batch(name, [Outgoing({"n": number}, key=f"k{number}") for number in range(20)])
        await broker.send(name, {"n": 1}, key="bad")
        async with broker.subscribe(name, group="g", handler=handle, options=SubscribeOptions(poll_timeout=0.2)):
            await eventually(lambda: len(handled) == 21, "all to be handled")
            await eventually(lambda: _has_letter(broker, name), "the dead letter")
            assert (await admin.describe_group(name, "g")).partitions
            await admin.grow(name, partitions=3)
            assert await admin.replay(name) == 1
        await admin.pending(name, "g")
        await admin.purge(name)
        await admin.reset_group(name, "g", "earliest")
        await admin.delete_group(name, "g")
        assert await admin.trim(name, max_len=1) > 0
        assert name in await admin.list_topics()
        await admin.delete_topic(name, force=True)


async def _has_letter(broker: Broker, name: str) -> bool:
    return bool(await broker.admin.dead_letters(name))


@MORE
async def test_balanced_streams(url: str, more: tuple[str, ...]) -> None:
    service = f"s{secrets.token_hex(6)}"
    seen: list[object] = []

    async def handle(stream: str, lease: StreamLease) -> None:
        async for message in lease.messages():
            seen.append(message.payload)
            await lease.commit(message)
            if len(seen) == 2:
                return

    rights = rights_of("balanced streams", SERVICE=service, STREAMS=f"{service}:*")
    await ask(url, "XADD", f"{service}:a", "*", "data", '{"n":1}')
    async with (
        user_with(url, *rights, *more) as mine,
        StreamBalancer.connect(mine, service=service, handle_signals=False) as balancer,
    ):
        await ask(url, "XADD", f"{service}-input", "*", "lbs-input", "no JSON")
        running = asyncio.create_task(balancer.run(handle))
        await balancer.add_stream(f"{service}:a")
        await eventually(lambda: len(seen) == 1, "the first")
        await ask(url, "XADD", f"{service}:a", "*", "data", '{"n":2}')
        await eventually(lambda: len(seen) == 2 and not balancer.owned, "it to be finished")
        await balancer.add_stream(f"{service}:b")
        await eventually(lambda: bool(balancer.owned), "another")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@MORE
async def test_jobs(url: str, more: tuple[str, ...]) -> None:
    name = f"q{secrets.token_hex(6)}"

    async def handle(job: Job) -> int:
        if job.payload["n"] == 3:
            raise ValueError("no")
        return int(job.payload["n"])

    async with user_with(url, *rights_of("jobs", QUEUE=name), *more) as mine, RedisStore.connect(mine) as store:
        queue = JobQueue(store, name)
        ids = await queue.enqueue_many([JobSpec({"n": n}, max_retries=0, priority=n % 2) for n in range(4)])
        worker = JobWorker(queue, handle, handle_signals=False)
        running = asyncio.create_task(worker.run())
        assert (await queue.wait(ids[0], timeout=60)).state is JobState.SUCCEEDED
        assert (await queue.wait(ids[3], timeout=60)).state is JobState.FAILED
        late = await queue.enqueue({"n": 5}, delay=3600)
        await queue.cancel(late)
        worker.stop()
        await running
        await queue.replay(ids[3])
        [job] = await queue.claim()
        await queue.heartbeat(job)
        await queue.release(job)
        await queue.list_jobs(JobState.READY)
        await queue.purge()
        assert sum((await queue.counts()).values()) > 0


def test_every_room_has_its_line() -> None:
    assert all(len(rights_of(room)) > 10 for room in ROOMS)
    assert not any(right in ("+@all", "allkeys", "~*", "nopass") for room in ROOMS for right in rights_of(room))
